"""Code in an interpreter of its own."""

import os
import subprocess
import sys
import textwrap


def interpret(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter to its end, which must be a success."""
    # On a busy machine UCX reports connections that end before they are made; not into the answer.
    environment = {**os.environ, "UCX_LOG_FILE": "stderr", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def run_python(code: str, **variables: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    return interpret(code, **variables).stdout.strip()
