"""New environments, one for each set of libraries, with the wheel of dist/ and no source tree."""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NIXL = os.environ.get("NIXL", "nixl-cu12")
LIBRARIES = {"bare": [], "nixl": ["nixl"], "ucx": ["ucx"], "both": ["nixl", "ucx"]}


def wheels() -> dict[str, Path]:
    """Return the wheels in dist/ by Python version, such as ``"3.11"``."""
    found = sorted((ROOT / "dist").glob("*.whl"))
    return {f"3.{wheel.name.split('-')[2].removeprefix('cp3')}": wheel for wheel in found}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty directory to run it from."""

    bin: Path
    home: Path
    libraries: list[str]

    def run(self, *command: str, status: int = 0, **variables: str) -> str:
        """Run a program of the environment with nothing else on PATH; return its output."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.home,
            env={"PATH": str(self.bin), "HOME": str(self.home), **variables},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


def pip(python: Path, *arguments: str) -> None:
    """Run this environment's pip on another environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, "--python", str(python), *arguments], check=True, timeout=110)


def make_environment(folder: Path, base: str, wheel: Path, libraries: list[str]) -> Environment:
    """Make an environment of an interpreter, `base`."""
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    extras = (["cli"] if libraries else []) + (["ucx"] if "ucx" in libraries else [])
    pip(python, "install", f"{wheel}[{','.join(extras)}]" if extras else str(wheel))
    if "nixl" in libraries:
        pip(python, "install", "--no-deps", NIXL)  # its dependency on torch is not needed
    home = folder / "home"
    home.mkdir()
    return Environment(python.parent, home, libraries)


@pytest.fixture(scope="session")
def get_environment(tmp_path_factory) -> Callable[[str, str], Environment]:
    """Return the environment of a Python and a set of libraries; each is made once."""
    find_interpreter = runpy.run_path(str(ROOT / ".ci" / "build_wheels.py"))["find_interpreter"]

    @functools.cache
    def get(python: str, name: str) -> Environment:
        folder = tmp_path_factory.mktemp(f"{name}-{python}")
        return make_environment(folder, find_interpreter(python), wheels()[python], LIBRARIES[name])

    return get


@pytest.fixture(params=sorted(wheels()))
def python(request: pytest.FixtureRequest) -> str:
    """A Python version with a wheel in dist/."""
    return request.param


@pytest.fixture(params=sorted(LIBRARIES))
def environment(request, python, get_environment) -> Environment:
    """An environment with the wheel and one of the sets of libraries."""
    return get_environment(python, request.param)
