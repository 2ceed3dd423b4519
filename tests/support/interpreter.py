"""Code in an interpreter of its own."""

import os
import subprocess
import sys
import textwrap


def run_python(code: str, **variables: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    # On a busy machine UCX reports connections that end before they are made; not into the answer.
    environment = {**os.environ, "UCX_LOG_FILE": "stderr", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
