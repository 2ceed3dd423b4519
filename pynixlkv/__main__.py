"""``python -m pynixlkv`` is the command line."""

from __future__ import annotations

from pynixlkv.cli import main

if __name__ == "__main__":
    main()
