"""Code in a fresh interpreter."""

import os
import subprocess
import sys
import textwrap


def run_python(code: str, *options: str, **variables: str) -> tuple[str, str]:
    """Run code to its end, which must be a success; returns what it wrote to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
