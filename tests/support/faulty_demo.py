"""``pynixlkv demo`` whose rank decode-0 spoils what the variable FAULT names: bytes, or itself."""

import os
import signal
from typing import Any

from pynixlkv.cli import demo, main
from pynixlkv.cli.rank import DemoRank


class FaultyRank(DemoRank):
    def __init__(self, spec):
        super().__init__(spec)
        self.fault: Any = os.environ["FAULT"] if spec.name == "decode-0" else ""

    def move(self):
        if self.fault == "crash":
            os._exit(3)
        if self.fault == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().move()

    def check(self, done):
        if self.fault == "guard":
            self._cache.layer(0)[0].flat[0] ^= 1
        if self.fault in done:
            self._cache.layer(0)[self._tables[self.fault][0]].flat[0] ^= 1
        return super().check(done)


if __name__ == "__main__":
    import faulty_demo  # whose name the child processes know

    vars(demo)["DemoRank"] = faulty_demo.FaultyRank
    main()
