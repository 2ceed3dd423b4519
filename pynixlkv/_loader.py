"""Finding and opening native libraries, and saying what was found.

The only module that looks for them. Nothing here imports torch or NIXL's own Python package.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pynixlkv.errors import LibraryNotFoundError, LibraryVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pynixlkv import _native

__all__ = [
    "LibraryLocation",
    "LoadedLibrary",
    "NativeReport",
    "PluginReport",
    "find_nixl",
    "find_ucx",
    "load_nixl",
    "load_ucx",
    "native_report",
]

NIXL_VARIABLE = "PYNIXLKV_NIXL_LIBRARY"
NIXL_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13")
NIXL_LIBRARY = "libnixl_capi.so"
NIXL_MINIMUM = "1.0.1"
UCX_VARIABLE = "PYNIXLKV_UCX_LIBRARY"
UCX_DISTRIBUTIONS = ("libucx-cu12", "libucx-cu13")
UCX_LIBRARY = "libucp.so.0"
UCX_MINIMUM = "1.18"
# The wheel's own loader opens these names, in this order; the names with version numbers are copies
# of the files, which would be loaded once more.
_UCX_WHEEL_LIBRARIES = ("libucs.so", "libucs_signal.so", "libuct.so", "libucp.so")
# NIXL's wheels carry a UCX of their own under names with a hash.
_UCX_IN_NIXL = "libucp-*.so*"
_SYSTEM_PREFIXES = ("/usr/local", "/usr", "/opt/nvidia/nvda_nixl", "/usr/local/nixl")
_REPORTED = re.compile(r"lib(nixl|uc[mpst])[^/]*\.so[^/]*$")
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LibraryLocation:
    """Where a native library is.

    Parameters
    ----------
    path : str
        Its file.
    version : str
        Version of the package that it came with; empty where nothing tells.
    origin : str
        What led to it: the environment variable, a distribution, or ``"system"``.
    """

    path: str
    version: str
    origin: str


@dataclass(frozen=True)
class LoadedLibrary:
    """A library that is mapped into this process.

    Parameters
    ----------
    path : str
        Its file.
    version : str
        Version of the package that the file belongs to; empty where nothing tells.
    """

    path: str
    version: str


@dataclass(frozen=True)
class PluginReport:
    """What a NIXL plugin says about itself here.

    Parameters
    ----------
    name : str
        Name to create a backend with.
    memory_types : tuple of str
        Kinds of memory that it declares; whether they work also depends on the machine.
    params : dict
        Creation parameters with their defaults.
    problem : str
        Why it cannot be used; empty if it can be loaded.
    """

    name: str
    memory_types: tuple[str, ...] = ()
    params: dict[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class NativeReport:
    """What native libraries there are, and what works with them here.

    Parameters
    ----------
    nixl : LibraryLocation or None
        The NIXL that the first `NixlAgent` will use or has used.
    ucx : LibraryLocation or None
        The UCX that the first `UcxAgent` will use or has used.
    loaded : tuple of LoadedLibrary
        Every NIXL and UCX library that is mapped into this process.
    ucx_version : str
        Version of the UCX that NIXL's UCX plugin uses.
    plugins : tuple of PluginReport
        NIXL's plugins.
    transports : tuple of str
        Transports that this UCX could open on this machine, as ``"transport/device"``.
    memory_types : tuple of str
        Kinds of memory that the plugins which can be loaded declare; VRAM only if UCX could open
        a CUDA transport. Storage may need a service or credentials in addition.
    missing : tuple of str
        What is missing or does not work, and how to get it.
    """

    nixl: LibraryLocation | None
    ucx: LibraryLocation | None
    loaded: tuple[LoadedLibrary, ...]
    ucx_version: str
    plugins: tuple[PluginReport, ...]
    transports: tuple[str, ...]
    memory_types: tuple[str, ...]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain dictionaries, lists and strings, ready for JSON."""
        return asdict(self)


def _pip_command(
    distributions: tuple[str, ...] = NIXL_DISTRIBUTIONS, minimum: str = NIXL_MINIMUM
) -> str:
    cuda = _torch_cuda_major()
    fitting = [name for name in distributions if name.endswith(f"-cu{cuda}")]
    return f'pip install "{(fitting or distributions)[0]}>={minimum}"'


def _torch_cuda_major() -> str | None:
    """CUDA major version of torch, if something else has imported it and it was built for CUDA."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return version.split(".")[0] if isinstance(version, str) else None


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _from_variable(variable: str, library: str, tried: list[str]) -> Iterator[LibraryLocation]:
    value = os.environ.get(variable)
    if not value:
        return
    path = Path(value)
    if path.is_dir():
        path /= library
    tried.append(f"{path} (from {variable})")
    if not path.is_file():
        raise LibraryNotFoundError(
            f"{variable} is {value!r}, but there is no {path}; point it to {library} or "
            "to the directory that holds it, or unset it"
        )
    yield LibraryLocation(str(path), _version_of(path), variable)


def _from_distributions(
    names: Iterable[str], library: str, needs: str, tried: list[str]
) -> Iterator[LibraryLocation]:
    """Look for a file, named by a pattern, in distributions; first for torch's version of CUDA."""
    cuda = _torch_cuda_major()
    for name in sorted(names, key=lambda name: not name.endswith(f"-cu{cuda}")):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            tried.append(f"distribution {name}: not installed")
            continue
        found = [file for file in distribution.files or () if fnmatch(file.name, library)]
        path = Path(str(distribution.locate_file(found[0]))) if found else None
        if path is None or not path.is_file():
            tried.append(f"distribution {name} {distribution.version}: has no {library}{needs}")
            continue
        tried.append(f"{path} (distribution {name} {distribution.version})")
        yield LibraryLocation(str(path), distribution.version, name)


def _from_system(library: str, tried: list[str]) -> Iterator[LibraryLocation]:
    directories = [d for d in os.environ.get("LD_LIBRARY_PATH", "").split(":") if d]
    for prefix in _SYSTEM_PREFIXES:
        directories += [f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/lib/{_multiarch()}"]
    for directory in directories:
        path = Path(directory) / library
        tried.append(str(path))
        if path.is_file():
            yield LibraryLocation(str(path), "", "system")


def _multiarch() -> str:
    return f"{os.uname().machine}-linux-gnu"


def find_nixl() -> LibraryLocation:
    """Find NIXL's C interface without opening it.

    Returns
    -------
    LibraryLocation
        The first of: the file or directory in the environment variable
        ``PYNIXLKV_NIXL_LIBRARY``; an installed distribution ``nixl-cu12`` or ``nixl-cu13``, first
        the one for the CUDA version of torch if torch has been imported; ``LD_LIBRARY_PATH`` and
        the usual system directories.

    Raises
    ------
    LibraryNotFoundError
        If there is none; names every path tried and the command that installs it.
    LibraryVersionError
        If the distribution that was found is older than NIXL 1.0.1.

    Notes
    -----
    Reads files only. Safe from several threads.
    """
    tried: list[str] = []
    needs = f" (needs {NIXL_MINIMUM} or newer)"
    for location in chain(
        _from_variable(NIXL_VARIABLE, NIXL_LIBRARY, tried),
        _from_distributions(NIXL_DISTRIBUTIONS, NIXL_LIBRARY, needs, tried),
        _from_system(NIXL_LIBRARY, tried),
    ):
        if location.origin in NIXL_DISTRIBUTIONS and _release(location.version) < _release(
            NIXL_MINIMUM
        ):
            raise LibraryVersionError(
                f"{location.path} is of {location.origin} {location.version}; pynixlkv needs "
                f"{NIXL_MINIMUM} or newer: {_pip_command()}"
            )
        return location
    raise LibraryNotFoundError(
        f"NIXL was not found. Install it with: {_pip_command()} (or set {NIXL_VARIABLE} to "
        f"{NIXL_LIBRARY} or its directory). Tried:\n  " + "\n  ".join(tried)
    )


def find_ucx() -> LibraryLocation:
    """Find UCX's libucp without opening it.

    Returns
    -------
    LibraryLocation
        The first of: the file or directory in the environment variable ``PYNIXLKV_UCX_LIBRARY``;
        an installed distribution ``libucx-cu12`` or ``libucx-cu13``; the UCX inside an installed
        ``nixl-cu12`` or ``nixl-cu13``; ``LD_LIBRARY_PATH`` and the usual system directories. Of
        distributions, the one for the CUDA version of an imported torch comes first.

    Raises
    ------
    LibraryNotFoundError
        If there is none; names every path tried and the command that installs it.

    Notes
    -----
    Reads files only. Safe from several threads. The ``libucx`` distributions have no InfiniBand;
    the UCX inside NIXL's and most systems' do.
    """
    tried: list[str] = []
    for location in chain(
        _from_variable(UCX_VARIABLE, UCX_LIBRARY, tried),
        _from_distributions(UCX_DISTRIBUTIONS, _UCX_WHEEL_LIBRARIES[-1], "", tried),
        _from_distributions(NIXL_DISTRIBUTIONS, _UCX_IN_NIXL, "", tried),
        _from_system(UCX_LIBRARY, tried),
    ):
        return location
    raise LibraryNotFoundError(
        f"UCX was not found. Install it with: {_pip_command(UCX_DISTRIBUTIONS, UCX_MINIMUM)} "
        f"(or set {UCX_VARIABLE} to {UCX_LIBRARY} or its directory). Tried:\n  "
        + "\n  ".join(tried)
    )


_lock = threading.Lock()
_loaded: tuple[LibraryLocation, _native.nixl.Library] | None = None


def load_nixl() -> _native.nixl.Library:
    """Open NIXL once and return it.

    Returns
    -------
    _native.nixl.Library
        The same object on every call of a process, whatever the environment says later: a second
        NIXL in one process would have plugins and loggers of its own.

    Raises
    ------
    LibraryNotFoundError
        As `find_nixl`, or if the dynamic loader cannot open the file.
    LibraryVersionError
        If a function is missing or the library is a stub; names library, version and symbol.

    Notes
    -----
    Starts no thread and opens no device. Safe from several threads.
    """
    global _loaded
    from pynixlkv import _native

    with _lock:
        if _loaded is None:
            location = find_nixl()
            try:
                library = _native.nixl.Library(location.path)
            except LibraryNotFoundError as error:
                about = f"{location.origin} {location.version}".rstrip()
                raise type(error)(
                    f"{error} (found through {about}); pynixlkv needs NIXL {NIXL_MINIMUM} or "
                    f"newer: {_pip_command()}"
                ) from error
            _loaded = (location, library)
        return _loaded[1]


def nixl_version() -> str:
    """Return the version of the NIXL that `load_nixl` opened, ``"unknown"`` if nothing tells it."""
    library = load_nixl()
    location = _loaded[0] if _loaded is not None else None
    return (location.version if location is not None else "") or library.version or "unknown"


_loaded_ucx: tuple[LibraryLocation, _native.ucx.Library] | None = None


def load_ucx() -> _native.ucx.Library:
    """Open UCX once and return it.

    Returns
    -------
    _native.ucx.Library
        The same object on every call of a process, whatever the environment says later.

    Raises
    ------
    LibraryNotFoundError
        As `find_ucx`, or if the dynamic loader cannot open the file.
    LibraryVersionError
        If it is older than UCX 1.18 or a function is missing.

    Notes
    -----
    Symbols stay local, so that it meets no other UCX of the process. Starts no thread and opens no
    device. Safe from several threads.
    """
    global _loaded_ucx
    from pynixlkv import _native

    with _lock:
        if _loaded_ucx is None:
            location = find_ucx()
            path = Path(location.path)
            try:
                if path.name == _UCX_WHEEL_LIBRARIES[-1]:
                    for name in _UCX_WHEEL_LIBRARIES[:-1]:
                        if path.with_name(name).is_file():
                            ctypes.CDLL(str(path.with_name(name)), ctypes.RTLD_LOCAL)
                library = _native.ucx.Library(location.path)
            except (LibraryNotFoundError, OSError) as error:
                kind = type(error) if isinstance(error, LibraryNotFoundError) else None
                about = f"{location.origin} {location.version}".rstrip()
                raise (kind or LibraryNotFoundError)(
                    f"{error} (found through {about}); pynixlkv needs UCX {UCX_MINIMUM} or newer: "
                    + _pip_command(UCX_DISTRIBUTIONS, UCX_MINIMUM)
                ) from error
            _loaded_ucx = (location, library)
        return _loaded_ucx[1]


def _version_of(path: Path) -> str:
    """Version of the distribution that a file was installed by, empty if none says so."""
    for directory in path.parents:
        if directory.name not in ("site-packages", "dist-packages"):
            continue
        top = path.relative_to(directory).parts[0]
        for distribution in importlib.metadata.distributions(path=[str(directory)]):
            if any(file.parts[0] == top for file in distribution.files or ()):
                return distribution.version
    return ""


def _mapped_files() -> list[str]:
    """Files mapped into this process, each once, in the order of their addresses."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = (line.split(maxsplit=5) for line in lines)
    return list(dict.fromkeys(f[5] for f in fields if len(f) == 6 and f[5].startswith("/")))


def _loaded_libraries() -> tuple[LoadedLibrary, ...]:
    return tuple(
        LoadedLibrary(path, _version_of(Path(path)))
        for path in _mapped_files()
        if _REPORTED.search(path)
    )


@dataclass(frozen=True)
class _ProbeResult:
    """What `pynixlkv._probe` prints."""

    plugins: tuple[PluginReport, ...]
    ucx_version: str
    transports: tuple[str, ...]


def _probe(library: str) -> _ProbeResult:
    """Ask NIXL and its UCX what works here, in a process of its own.

    Loading every plugin and opening every device has side effects that the asking process must not
    have, and a plugin that crashes must not take it down.
    """
    import msgspec

    done = subprocess.run(
        [sys.executable, "-m", "pynixlkv._probe", library],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise LibraryVersionError(
            f"probing {library} ended with status {done.returncode}: {lines[-1]}"
        )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=_ProbeResult)


def _missing(transports: tuple[str, ...]) -> list[str]:
    if not transports:
        return ["UCX: NIXL's UCX plugin could not be loaded, or its UCX could not be started"]
    names = {transport.split("/")[0] for transport in transports}
    missing = []
    if "cma" not in names:
        missing.append(
            "cma (zero-copy between processes of one host): needs ptrace rights, for example the "
            "container capability SYS_PTRACE"
        )
    if not any(name.startswith("cuda") for name in names):
        missing.append(
            "VRAM: this UCX could not open a CUDA transport; needs an NVIDIA GPU and its driver "
            "(libcuda.so.1)"
        )
    if not any(name.startswith(("rc", "dc", "ud", "srd")) for name in names):
        missing.append("RDMA: this UCX could not open an RDMA device; needs one and its driver")
    return missing


def native_report() -> NativeReport:
    """Say which native libraries there are and what works with them on this machine.

    Returns
    -------
    NativeReport
        Never raises for something that is missing: that is listed in ``missing``.

    Notes
    -----
    Blocks for a second or two: a process of its own loads every NIXL plugin and opens every UCX
    transport. This process only reads files; it loads nothing.
    """
    missing: list[str] = []
    with _lock:
        known, known_ucx = _loaded, _loaded_ucx
    nixl = ucx = None
    try:
        ucx = known_ucx[0] if known_ucx else find_ucx()
    except LibraryNotFoundError as error:
        missing.append(f"UCX: {error}")
    probed = _ProbeResult((), "", ())
    try:
        nixl = known[0] if known else find_nixl()
        probed = _probe(nixl.path)
    except (LibraryNotFoundError, subprocess.TimeoutExpired, ValueError) as error:
        missing.insert(0, f"NIXL: {error}")
    else:
        missing += _missing(probed.transports)
        missing += [f"NIXL plugin {p.name}: {p.problem}" for p in probed.plugins if p.problem]
    has_cuda = any(transport.startswith("cuda") for transport in probed.transports)
    declared = {memory for p in probed.plugins if not p.problem for memory in p.memory_types}
    return NativeReport(
        nixl=nixl,
        ucx=ucx,
        loaded=_loaded_libraries(),
        ucx_version=probed.ucx_version,
        plugins=probed.plugins,
        transports=probed.transports,
        memory_types=tuple(sorted(m for m in declared if m != "VRAM" or has_cuda)),
        missing=tuple(missing),
    )
