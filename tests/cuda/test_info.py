"""``pynixlkv info`` where there are cards."""

import json
import subprocess
import sys

import pytest


@pytest.mark.stub
def test_info_names_the_transports_of_device_memory():
    done = subprocess.run(
        [sys.executable, "-m", "pynixlkv", "info", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)
    assert {"cuda_copy/cuda", "cuda_ipc/cuda"} <= set(report["transports"])
    assert "VRAM" in report["memory_types"]
    assert report["device_memory"] == [
        "same host: cuda_ipc, from GPU to GPU",
        "other hosts: through host memory and TCP",
    ]
    assert not any(line.startswith("VRAM") for line in report["missing"])
