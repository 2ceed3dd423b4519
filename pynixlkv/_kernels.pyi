import numpy as np
from numpy.typing import NDArray

def physical_blocks(blocks: NDArray[np.int64], ratio: int) -> NDArray[np.int64]: ...
