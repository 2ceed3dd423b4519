"""The demo as a program: real processes, every byte compared, every failure reported."""

import json
import os
import signal
import subprocess
import sys

import faulty_demo
import psutil
import pytest
from peers import interrupt

from pynixlkv.cli.models import find_model

DEMO = ["demo", "--json", "--timeout", "300"]


def command(*options, fault=""):
    """Return how to start the demo: arguments and environment."""
    program = [faulty_demo.__file__] if fault else ["-m", "pynixlkv"]
    return {
        "args": [sys.executable, *program, *DEMO, *options],
        "env": {**os.environ, "FAULT": fault},
    }


def run(*options, fault=""):
    done = subprocess.run(
        **command(*options, fault=fault), check=False, capture_output=True, text=True, timeout=300
    )
    return done, json.loads(done.stdout)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--prefill-tp", "2", "--decode-tp", "4"],
        ["--prefill-tp", "4", "--decode-tp", "2"],
        ["--prefill-axes", "KBHND", "--decode-axes", "KBNHD"],
        ["--prefill-axes", "BHNC", "--decode-axes", "LKBHND", "--decode-tp", "2"],
        ["--transfer-backend", "ucx"],
        ["--transfer-backend", "ucx", "--prefill-tp", "2", "--decode-tp", "4"],
        ["--transfer-backend", "ucx", "--prefill-tp", "4", "--decode-tp", "2"],
    ],
    ids=" ".join,
)
def test_every_byte_arrives_where_it_belongs(options):
    done, report = run("--blocks", "3", *options)
    assert done.returncode == 0, report
    assert report["ok"] is True
    expected = 3 * find_model("Llama-3.1-8B").block_bytes(0, 1)
    assert report["verified_bytes"] == 2 * expected
    assert report["wrong_bytes"] == 0
    assert report["guard_bytes"] > 0
    assert [row["operation"] for row in report["operations"]] == ["read", "write"]
    for row in report["operations"]:
        assert row["bytes"] == expected
        assert 0 < row["descriptors"] <= row["descriptors_unmerged"]
        assert row["gb_per_s"] > 0


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_a_latent_cache_is_read_once_by_each_rank(prefill_tp, decode_tp):
    done, report = run(
        "--model", "DeepSeek-V3", "--blocks", "2",
        "--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp),
    )  # fmt: skip
    assert done.returncode == 0, report
    assert report["verified_bytes"] == 2 * 2 * decode_tp * 61 * 16 * 576 * 2


@pytest.mark.parametrize("fault", ["read", "write", "guard"])
def test_a_flipped_bit_anywhere_fails_the_run(fault):
    done, report = run("--blocks", "2", fault=fault)
    assert done.returncode == 1
    assert report["ok"] is False
    assert report["wrong_bytes"] >= 1
    assert report["differences"][0].startswith("decode-0: layer 0, block ")


@pytest.mark.parametrize(
    ("fault", "error"),
    [("crash", "decode-0 exited with 3 in the middle"), ("hang", "no answer from decode-0")],
)
def test_a_rank_that_dies_or_hangs_fails_the_run_and_is_named(fault, error):
    timeout = ("--timeout", "20") if fault == "hang" else ()
    done, report = run("--blocks", "2", *timeout, fault=fault)
    assert done.returncode == 1
    assert report["ok"] is False
    assert error in report["error"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_behind(number, status):
    def is_ready(ranks):
        # Once a rank is stopped, everything is set up and the other rank waits for it.
        return any(rank.status() == psutil.STATUS_STOPPED for rank in ranks) and len(ranks) == 2

    assert interrupt(number, is_ready, **command("--blocks", "2", fault="hang")) == status


def test_the_terminal_shows_a_table_and_the_verified_bytes():
    done = subprocess.run(
        [sys.executable, "-m", "pynixlkv", "demo", "--blocks", "1"],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "descriptors" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"verified {2 * 2 * 1024 * 1024:,} bytes: all equal; ")
