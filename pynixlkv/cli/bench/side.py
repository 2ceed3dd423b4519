"""One side of a measurement, in a process of its own: ``python -m pynixlkv.cli.bench.side FD``.

It obeys the commands that arrive on the socket, one reply each. When the socket closes, the bench
is gone and so is this process. A watchdog thread that needs no GIL ends it at its deadline.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from pynixlkv.cli.bench.cases import Fault, Series
from pynixlkv.cli.bench.messages import (
    Close,
    Done,
    Finish,
    Message,
    Offer,
    Offered,
    Open,
    Ran,
    Rest,
    Rested,
    Run,
    Serve,
    SideSpec,
    decode,
)
from pynixlkv.cli.bench.movers import InitiatorHalf, TargetHalf, has_target
from pynixlkv.cli.messages import Failed, RunError, encode
from pynixlkv.errors import PynixlkvError

if TYPE_CHECKING:
    import msgspec

    from pynixlkv.cli.bench.cases import Case

__all__ = ["Side", "main"]

_SPOILED_RUN = 10


class Side:
    """What a side has open, as its commands use it."""

    def __init__(self) -> None:
        self._targets: dict[Series, TargetHalf] = {}
        self._initiators: dict[Series, InitiatorHalf] = {}
        self._serving: TargetHalf | None = None
        self._fault: Fault | None = None
        self._num_runs: Counter[str] = Counter()

    def obey(self, command: Message) -> msgspec.Struct:
        """Carry out a command.

        Parameters
        ----------
        command : Message
            What to do.

        Returns
        -------
        msgspec.Struct
            The reply.
        """
        match command:
            case Offer():
                return self._offer(command.case)
            case Open():
                return self._open(command)
            case Serve():
                self._serving = self._targets[Series(command.series)]
                if command.clear:
                    self._serving.clear()
                return Done()
            case Rest():
                serving, self._serving = self._serving, None
                return Rested(serving.count_wrong() if serving and command.compare else 0)
            case Run():
                return self._run(command)
            case Close():
                self.close()
                return Done()
            case _:
                raise RunError(f"the command {command!r} is not known")

    def progress(self) -> bool:
        """Take part in the series being served; False if there is nothing to do."""
        return self._serving is not None and self._serving.progress()

    def close(self) -> None:
        """Give back everything."""
        for initiator in self._initiators.values():
            initiator.close()
        for target in self._targets.values():
            target.close()
        self._initiators, self._targets = {}, {}

    def _offer(self, case: Case) -> Offered:
        for series in filter(has_target, case.series):
            self._targets[series] = TargetHalf(series, case)
        return Offered({series.value: half.offer() for series, half in self._targets.items()})

    def _open(self, command: Open) -> Done:
        self._fault = command.case.fault
        # What copies the memory of another series comes after that.
        for series in sorted(command.case.series, key=lambda s: s is Series.memcpy_mapped):
            if series is not Series.perftest:
                offer = command.offers.get(series.value, b"")
                agent = self._initiators.get(Series.ucx_allocated)
                self._initiators[series] = InitiatorHalf(series, command.case, offer, agent)
        return Done()

    def _run(self, command: Run) -> Ran:
        """Move once; a failure is part of the result."""
        self._num_runs[command.series] += 1
        try:
            if self._fault is Fault.run and self._num_runs[command.series] % _SPOILED_RUN == 0:
                raise RunError("this run fails on purpose")
            seconds, wrong_bytes = self._initiators[Series(command.series)].run(
                compare=command.compare,
                spoil=command.compare and self._fault is Fault.byte,
            )
        except PynixlkvError as error:
            return Ran(error=f"{type(error).__name__}: {error}")
        return Ran(seconds, wrong_bytes)


def _serve(connection: Connection) -> None:
    """Obey commands until told to finish, taking part in between."""
    side = Side()
    try:
        while True:
            while not connection.poll(0) and side.progress():
                pass
            command = decode(connection.recv_bytes())
            if isinstance(command, Finish):
                break
            connection.send_bytes(encode(side.obey(command)))
        side.close()
        connection.send_bytes(encode(Done()))
    except (EOFError, ConnectionError):
        sys.exit("the command that started this process is gone")
    except Exception as error:
        failed = Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send_bytes(encode(failed))
        sys.exit(1)


def main() -> None:
    """Serve the bench that is on the other end of the socket whose number is the first argument."""
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    spec = decode(connection.recv_bytes())
    if not isinstance(spec, SideSpec):
        raise RunError(f"expected a SideSpec first, got {spec!r}")
    if spec.processor is not None:
        os.sched_setaffinity(0, {spec.processor})  # inherited by the threads of the engines
    # The bench has the same deadline and ends this process itself; this is for when it cannot.
    faulthandler.dump_traceback_later(spec.timeout_s + 5, exit=True)
    _serve(connection)


if __name__ == "__main__":
    main()
