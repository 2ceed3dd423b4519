"""A reserve of descriptors and threads, for libraries that abort the process without one."""

from __future__ import annotations

import os
import threading

from pynixlkv.errors import ResourceExhausted

_RESERVE = 32
"""File descriptors; a ZeroMQ context with two sockets takes 12, a UCX worker over TCP about 20."""

_one_at_a_time = threading.Lock()  # together, many threads would take what each looks for


def check_reserve(what: str) -> None:
    """Raise `ResourceExhausted` unless `what` can open files and start threads."""
    taken: list[int] = []
    with _one_at_a_time:
        try:
            taken.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_RESERVE))
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
        except (OSError, RuntimeError) as error:
            raise ResourceExhausted(
                f"there is no room for {what}: {error}; it needs {_RESERVE} file descriptors and a "
                "few threads, so raise the limits of this process (ulimit -n, ulimit -u) or close "
                "something"
            ) from error
        finally:
            for descriptor in taken:
                os.close(descriptor)
