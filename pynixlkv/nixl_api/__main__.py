"""``python -m pynixlkv.nixl_api PROGRAM ...``: run a program of NIXL's on pynixlkv.

A process that the program starts is switched too if it loads the plugins of vLLM, or if it is told
to by ``PYNIXLKV_NIXL_API=1`` and a ``sitecustomize`` that calls `install_if_asked`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from pynixlkv.nixl_api import install
from pynixlkv.nixl_api._switch import VARIABLE


def main() -> None:
    """Run the program that the command line names: a file, or a module after ``-m``."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    sys.argv[:] = arguments[1:] if is_module else arguments
    if not sys.argv or (not is_module and sys.argv[0].startswith("-")):
        sys.exit("usage: python -m pynixlkv.nixl_api (PROGRAM | -m MODULE) [ARGUMENTS]")
    os.environ[VARIABLE] = "1"
    install()
    # Of a program's own folder, unless -P or PYTHONSAFEPATH (Python 3.11) keeps that from the path.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path.cwd() if is_module else Path(sys.argv[0]).resolve().parent)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
