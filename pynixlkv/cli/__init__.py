"""The command line: ``pynixlkv info``, ``pynixlkv demo`` and ``pynixlkv bench``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its status.

    Status 0 is success, 1 a failure or a difference, 2 a wrong option or a missing package, 130 an
    interrupt from the keyboard.
    """
    try:
        from pynixlkv.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.stderr.write(
            f"pynixlkv: the command line needs the package {package}, which is not installed; "
            'install it with: pip install "pynixlkv[cli]"\n'
        )
        sys.exit(2)
    app()
