"""``pynixlkv info`` where there are cards."""

import json
import os
import subprocess
import sys

import pytest

from pynixlkv import _native


def info(**environment):
    done = subprocess.run(
        [sys.executable, "-m", "pynixlkv", "info", "--json"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout)


@pytest.mark.stub
def test_info_names_the_transports_of_device_memory():
    report = info()
    assert {"cuda_copy/cuda", "cuda_ipc/cuda"} <= set(report["transports"])
    assert "VRAM" in report["memory_types"]
    assert report["device_memory"] == [
        "same host: cuda_ipc, from GPU to GPU",
        "other hosts: through host memory and TCP",
    ]
    assert not any(line.startswith("VRAM") for line in report["missing"])


@pytest.mark.stub
def test_info_says_why_device_memory_cannot_be_used():
    (line,) = (each for each in info(CUDA_STUB_INIT_ERROR="803")["missing"] if each[:4] == "VRAM")
    assert "the CUDA driver for CUDA 12.9 did not start, cuInit: error 803" in line
    assert "nvidia-smi" in line


def ask_driver(channel):
    return _native.transfer.device_driver()


@pytest.mark.stub
@pytest.mark.parametrize("has_dma_buf", [True, False])
def test_the_driver_says_whether_it_has_dma_buf(has_dma_buf, start_peer):
    asked = start_peer(ask_driver, env={"CUDA_STUB_DMA_BUF": str(int(has_dma_buf))}).finish()
    assert asked == ("", has_dma_buf)
