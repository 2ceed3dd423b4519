"""Print the requirements of an installed package, except those named after it.

vLLM's CPU build asks for torchvision, torchaudio and torchcodec, whose wheels bring CUDA libraries;
text models run without them.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires


def name_of(requirement: str) -> str:
    """Return the package that a requirement names."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def main(package: str, *left_out: str) -> None:
    """Print the requirements, one a line."""
    for line in requires(name_of(package)) or []:
        if "extra ==" not in line and name_of(line) not in left_out:
            print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
