"""Importing pynixlkv is quiet: seen from a fresh process, as this one has imported everything."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pynixlkv

PROBE = """
import json, os, sys
import numpy
before = dict(os.environ), len(os.listdir("/proc/self/task")), os.listdir("/proc/self/fd")
import pynixlkv
for name in pynixlkv.__all__:
    getattr(pynixlkv, name)
after = dict(os.environ), len(os.listdir("/proc/self/task")), os.listdir("/proc/self/fd")
maps = open("/proc/self/maps").read()
print(json.dumps({
    "before": before, "after": after,
    "heavy": sorted({m.split(".")[0] for m in sys.modules} &
                    {"torch", "nixl", "nixl_cu12", "nixl_cu13", "vllm", "zmq", "typer", "rich"}),
    "libraries": [name for name in ("libnixl", "libucp", "libcuda") if name in maps],
}))
"""


def test_import_loads_nothing_heavy_and_changes_nothing():
    output = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    seen = json.loads(output)
    assert seen["heavy"] == []
    assert seen["libraries"] == []
    assert seen["after"] == seen["before"]


def test_import_does_not_need_numpy_to_be_imported_first():
    subprocess.run([sys.executable, "-c", "import pynixlkv"], check=True, timeout=300)


def test_a_checkout_that_is_not_built_says_so(tmp_path):
    (tmp_path / "pynixlkv").mkdir()
    for source in Path(pynixlkv.__file__).parent.glob("*.py"):
        shutil.copy(source, tmp_path / "pynixlkv")
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import pynixlkv"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert f"{tmp_path}/pynixlkv cannot be imported" in run.stderr
    assert "build it with `make build`" in run.stderr
