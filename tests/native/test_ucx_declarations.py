"""Our own declarations of UCX's interface against the headers of the installed libucx."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pynixlkv import _native

ROOT = Path(__file__).parents[2]
libucx = pytest.importorskip("libucx", reason="needs the libucx wheel, for its headers")
HEADERS = Path(libucx.__file__).parent / "include"


def test_structures_constants_and_functions_are_those_of_the_headers():
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    done = subprocess.run(
        [
            compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", "-isystem", HEADERS,
            ROOT / "tests/cpp/ucx_headers.cpp",
        ],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_status_of_the_headers_is_in_the_table():
    text = (HEADERS / "ucs/type/status.h").read_text()
    theirs = {
        name.removeprefix("ERR_"): int(code)
        for name, code in re.findall(r"^ +UCS_(\w+) *= *(-?\d+)", text, re.MULTILINE)
    }
    assert len(theirs) > 30
    assert {name: code for code, name, _ in _native.ucx.status_table()} == theirs
    for code, name, kind in _native.ucx.status_table():
        assert (kind == "") == (code >= 0), name
