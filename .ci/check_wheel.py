"""Fail unless each wheel, and the sdist, holds what users get and nothing else.

python .ci/check_wheel.py dist/*
"""

from __future__ import annotations

import email
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
MAX_BYTES = 5_000_000
TAG = re.compile(r"pynixlkv-(?P<version>[^-]+)-(cp3\d+)-\2-manylinux_2_28_(x86_64|aarch64)\.whl")
EXPECTED = ("py.typed", "__init__.py", "_native/__init__.pyi", "_kernels.pyi", "vllm/connector.py")
# Libraries of every manylinux_2_28 system; all others are found at run time or linked statically.
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libstdc++.so.6", "libgcc_s.so.1"}


def package_version() -> str:
    """Return the version of the package."""
    text = (ROOT / "pynixlkv" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return str(version)


def check_version(version: str) -> Iterator[str]:
    """Yield contradictions between the version, the changelog and the tags of this commit."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    if not headings or headings[0] not in ("Unreleased", version):
        yield f"CHANGELOG.md begins with {headings[:1]}, not with Unreleased or {version}"
    command = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for tag in re.findall(r"^v(\d.*)$", done.stdout, re.MULTILINE):
        if tag != version:
            yield f"this commit is tagged v{tag}, but pynixlkv.__version__ is {version}"
        if tag not in headings:
            yield f"this commit is tagged v{tag}, but CHANGELOG.md has no entry [{tag}]"


def check_library(name: str, data: bytes) -> Iterator[str]:
    """Yield problems of an extension module."""
    elf = ELFFile(io.BytesIO(data))
    for section in elf.iter_sections():
        if section.name == ".symtab" or section.name.startswith((".debug", ".zdebug")):
            yield f"{name} is not stripped: it has {section.name}"
        if not isinstance(section, DynamicSection):
            continue
        for tag in section.iter_tags():
            if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                yield f"{name} has a run path: {getattr(tag, 'rpath', getattr(tag, 'runpath', ''))}"
            if tag.entry.d_tag == "DT_NEEDED" and tag.needed not in SYSTEM:
                yield f"{name} needs {tag.needed}, which users may not have"


def check_wheel(path: Path, version: str) -> Iterator[str]:
    """Yield problems of a wheel."""
    named = TAG.fullmatch(path.name)
    if named is None:
        yield f"its name is not that of a manylinux_2_28 wheel: {TAG.pattern}"
    if path.stat().st_size > MAX_BYTES:
        yield f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}"
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        top = {name.split("/")[0] for name in names}
        if top != {"pynixlkv", f"pynixlkv-{version}.dist-info"}:
            yield f"it installs {sorted(top)}"
        yield from (f"it lacks pynixlkv/{e}" for e in EXPECTED if f"pynixlkv/{e}" not in names)
        if f"pynixlkv-{version}.dist-info/licenses/LICENSE" not in names:
            yield "it lacks the licence"
        yield from (
            f"it carries {name}" for name in names if re.search(r"lib(uc[a-z]|nixl)[^/]*\.so", name)
        )
        libraries = [name for name in names if ".so" in Path(name).name]
        modules = sorted(Path(name).name.split(".")[0] for name in libraries)
        if modules != ["_kernels", "_native"]:
            yield f"its libraries are {libraries}, not the two extension modules"
        for name in libraries:
            yield from check_library(name, wheel.read(name))
        for name in names:
            if name.endswith(".dist-info/METADATA"):
                metadata = email.message_from_bytes(wheel.read(name))
                if metadata["Version"] != version:
                    yield f"its metadata say {metadata['Version']}, pynixlkv.__version__ {version}"


def check_sdist(path: Path, version: str) -> Iterator[str]:
    """Yield problems of the sdist."""
    top = f"pynixlkv-{version}"
    if path.name != f"{top}.tar.gz":
        yield f"it is not called {top}.tar.gz"
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    for expected in ("PKG-INFO", "LICENSE", "CMakeLists.txt", "csrc/bindings/module.cpp"):
        if f"{top}/{expected}" not in names:
            yield f"it lacks {expected}"
    strays = [n for n in names if n.split("/")[1:2] in (["build"], ["dist"], [".git"], [".venv"])]
    yield from (f"it carries {name}" for name in strays[:5])


def main(*paths: str) -> int:
    """Check the files and return the exit status."""
    version = package_version()
    problems = list(check_version(version))
    for path in map(Path, paths):
        check = check_sdist if path.name.endswith(".tar.gz") else check_wheel
        found = list(check(path, version))
        print(f"{path.name}: {path.stat().st_size / 1e3:,.0f} kB, {len(found)} problems")
        problems += [f"{path.name}: {problem}" for problem in found]
    if not any(path.endswith(".whl") for path in paths):
        problems.append("no wheel was given")
    print("\n".join(problems) if problems else f"all are right for version {version}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
