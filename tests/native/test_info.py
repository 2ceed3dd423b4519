"""``pynixlkv info`` against the installed libraries."""

import json
import os
import subprocess
import sys


def info(*options, **variables):
    return subprocess.run(
        [sys.executable, "-m", "pynixlkv", "info", *options],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    ).stdout


def test_json_names_library_version_transports_and_memory():
    report = json.loads(info("--json"))
    assert report["nixl"]["path"].endswith("libnixl_capi.so")
    assert report["nixl"]["version"]
    assert "UCX" in [plugin["name"] for plugin in report["plugins"]]
    assert "DRAM" in report["memory_types"]
    assert report["transports"]
    assert isinstance(report["missing"], list)


def test_the_table_shows_the_same():
    text = info(COLUMNS="200")
    for part in ("libnixl_capi.so", "UCX", "DRAM", "transports"):
        assert part in text


def test_a_missing_library_is_reported_not_raised(tmp_path):
    report = json.loads(info("--json", PYNIXLKV_NIXL_LIBRARY=str(tmp_path / "libnixl_capi.so")))
    assert report["nixl"] is None
    assert str(tmp_path) in " ".join(report["missing"])
