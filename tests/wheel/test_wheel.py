"""The wheel of dist/ works in new environments without a compiler or this source tree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOVE = (Path(__file__).parent / "transfer.py").read_text(encoding="utf-8")
MISSING = {
    "nixl": ("pynixlkv.nixl.NixlAgent", r'pip install "nixl-cu12>='),
    "ucx": ("pynixlkv.ucx.UcxAgent", r'pip install "libucx-cu12>='),
}


def test_the_version_is_that_of_the_source(environment):
    code = (
        "import pynixlkv, importlib.metadata; "
        "print(pynixlkv.__version__, importlib.metadata.version('pynixlkv'))"
    )
    text = (ROOT / "pynixlkv" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert environment.run("python", "-c", code).split() == [version, version]


def test_no_compiler_can_be_found(environment):
    code = "import shutil; print([shutil.which(p) for p in 'cc c++ gcc g++ clang zig'.split()])"
    assert set(environment.run("python", "-c", code).strip("[]\n").split(", ")) == {"None"}


def test_info_lists_the_installed_libraries(environment):
    if not environment.libraries:
        assert 'pip install "pynixlkv[cli]"' in environment.run("pynixlkv", "info", status=2)
        code = "import pynixlkv, json; print(json.dumps(pynixlkv.native_report().to_dict()))"
        report = json.loads(environment.run("python", "-c", code))
    else:
        report = json.loads(environment.run("pynixlkv", "info", "--json"))
    origins = {name: (report[name] or {}).get("origin", "") for name in ("nixl", "ucx")}
    assert origins["nixl"].startswith("nixl-cu") == ("nixl" in environment.libraries)
    if "ucx" in environment.libraries:
        assert origins["ucx"] == "libucx-cu12"
    else:  # NIXL's wheel has a UCX inside, or there is none but the system's
        assert "libucx" not in origins["ucx"]


def in_environments(**backends: list[str]):
    """Run a test with each transfer backend in each named environment."""
    cases = [(name, each) for name, wanted in backends.items() for each in wanted]
    return pytest.mark.parametrize(("environment", "backend"), cases, indirect=["environment"])


@in_environments(bare=["nixl", "ucx"], ucx=["nixl"])
def test_a_missing_backend_says_what_to_install(environment, backend):
    name, remedy = MISSING[backend]
    module, _, cls = name.rpartition(".")
    code = f"import {module} as m\ntry: m.{cls}('a')\nexcept ImportError as e: print(e)"
    assert re.search(remedy, environment.run("python", "-c", code))


# NIXL's wheel has a UCX inside.
@in_environments(nixl=["nixl", "ucx"], ucx=["ucx"], both=["nixl", "ucx"])
def test_an_installed_backend_moves_blocks(environment, backend):
    assert environment.run("python", "-c", MOVE, backend).endswith("elements moved\n")


@in_environments(nixl=["nixl"], ucx=["ucx"], both=["nixl", "ucx"])
def test_two_processes_exchange_blocks(environment, backend):
    output = environment.run(
        "pynixlkv", "demo", "--transfer-backend", backend, "--blocks", "8", "--json"
    )
    assert json.loads(output)["ok"] is True


@pytest.mark.parametrize("environment", ["both"], indirect=True)
@pytest.mark.parametrize("order", [("nixl", "ucx"), ("ucx", "nixl")], ids="-".join)
def test_backends_load_in_either_order(environment, order):
    lines = environment.run("python", "-c", MOVE, *order).splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == list(order)


def test_the_sdist_without_a_compiler_says_so(tmp_path):
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    python = tmp_path / "venv" / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        str(sdist),
    ]
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        command,
        env={"PATH": str(tmp_path / "empty"), "HOME": str(tmp_path), "CXX": "/nonexistent/c++"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode != 0
    output = " ".join((done.stdout + done.stderr).split())
    assert "pynixlkv: no C++ compiler was found" in output
    assert "pip install --only-binary" in output
