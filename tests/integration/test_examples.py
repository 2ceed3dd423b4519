"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("engine", ["nixl", "ucx"])
def test_minimal_connector(engine):
    script = EXAMPLES / "minimal_connector.py"
    assert len(script.read_text().splitlines()) < 100
    done = subprocess.run(
        [sys.executable, str(script), engine], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decode has the KV of 64 tokens that it did not compute\n"
