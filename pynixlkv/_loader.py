"""Find and open native libraries, and report what was found.

The only module that searches for them. It imports neither torch nor NIXL's own Python package.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from pynixlkv.errors import LibraryNotFoundError, LibraryVersionError, PynixlkvError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pynixlkv import _native

T = TypeVar("T")

NIXL_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13")
# The loader of the libucx wheel opens these names, in this order. The names with version numbers
# are copies of the files, which would be loaded once more.
_UCX_WHEEL_LIBRARIES = ("libucs.so", "libucs_signal.so", "libuct.so", "libucp.so")
_SYSTEM_PREFIXES = ("/usr/local", "/usr", "/opt/nvidia/nvda_nixl", "/usr/local/nixl")
_REPORTED = re.compile(r"lib(nixl|uc[mpst])[^/]*\.so[^/]*$")
_PROBE_TIMEOUT_S = 60.0
_RDMA_DEVICES = Path("/sys/class/infiniband")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LibraryLocation:
    """Where a native library is."""

    path: str
    version: str  # of the package that it came with; empty if unknown
    origin: str  # the environment variable, a distribution, or "system"


@dataclass(frozen=True)
class LoadedLibrary:
    """A library that is mapped into this process."""

    path: str
    version: str  # of the package that the file belongs to; empty if unknown


@dataclass(frozen=True)
class PluginReport:
    """What a NIXL plugin declares on this machine."""

    name: str
    memory_types: tuple[str, ...] = ()  # whether they work also depends on the machine
    params: dict[str, str] = field(default_factory=dict)  # of `create_backend`, with defaults
    problem: str = ""  # why it cannot be loaded


@dataclass(frozen=True)
class NativeReport:
    """Which native libraries there are, and what works with them on this machine."""

    nixl: LibraryLocation | None  # the NIXL of `NixlAgent`
    ucx: LibraryLocation | None  # the UCX of `UcxAgent`
    loaded: tuple[LoadedLibrary, ...]  # every NIXL and UCX library mapped into this process
    ucx_version: str  # of the UCX of NIXL's UCX plugin
    plugins: tuple[PluginReport, ...]
    transports: tuple[str, ...]  # that this UCX could open, as "transport/device"
    memory_types: tuple[str, ...]  # of the plugins that load; VRAM only with a CUDA transport
    device_memory: tuple[str, ...]  # how GPU memory moves here; empty without a CUDA transport
    missing: tuple[str, ...]  # what is missing or does not work, and how to get it

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain dictionaries, lists and strings, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Wheels:
    """Distributions that can contain a library, by a pattern of its file name."""

    names: tuple[str, ...]
    pattern: str
    minimum: str = ""
    has_rdma: bool = True

    def search(self, tried: list[str]) -> Iterator[LibraryLocation]:
        """Yield the installed ones; the wheel for the CUDA of torch comes first."""
        needs = f" (needs {self.minimum} or newer)" if self.minimum else ""
        for name in _by_cuda(self.names):
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                tried.append(f"distribution {name}: not installed")
                continue
            version = distribution.version
            found = [f for f in distribution.files or () if fnmatch(f.name, self.pattern)]
            path = Path(str(distribution.locate_file(found[0]))) if found else None
            if path is None or not path.is_file():
                tried.append(f"distribution {name} {version}: has no {self.pattern}{needs}")
                continue
            tried.append(f"{path} (distribution {name} {version})")
            if _release(version) < _release(self.minimum):
                raise LibraryVersionError(
                    f"{path} is of {name} {version}; pynixlkv needs {self.minimum} or newer: "
                    + _pip_command(self.names, self.minimum)
                )
            yield LibraryLocation(str(path), version, name)


# NIXL's wheels carry a UCX of their own under names with a hash.
UCX_IN_NIXL = _Wheels(NIXL_DISTRIBUTIONS, "libucp-*.so*")


_PEERMEM = Path("/sys/module/nvidia_peermem")


@dataclass
class _Library(Generic[T]):
    """A native library: where to search for it, and the copy that this process uses."""

    variable: str
    name: str
    file: str
    minimum: str
    wheels: tuple[_Wheels, ...]
    open_path: Callable[[Path], T]
    loaded: tuple[LibraryLocation, T] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self) -> LibraryLocation:
        """Return the first of: the variable, the wheels, the system's directories."""
        tried: list[str] = []
        has_cards = bool(rdma_devices())
        ordered = sorted(self.wheels, key=lambda w: has_cards and not w.has_rdma)
        wheels = chain.from_iterable(wheels.search(tried) for wheels in ordered)
        for location in chain(self._from_variable(tried), wheels, self._from_system(tried)):
            return location
        raise LibraryNotFoundError(
            f"{self.name} was not found. Install it with: {self._pip_command()} (or set "
            f"{self.variable} to {self.file} or its directory). Tried:\n  " + "\n  ".join(tried)
        )

    def location(self) -> LibraryLocation:
        """Return where the copy of this process is, or would be."""
        return self.loaded[0] if self.loaded else self.find()

    def load(self) -> T:
        """Open the library once and return it."""
        with self._lock:
            if self.loaded is None:
                location = self.find()
                try:
                    library = self.open_path(Path(location.path))
                except (LibraryNotFoundError, OSError) as error:
                    is_ours = isinstance(error, LibraryNotFoundError)
                    about = f"{location.origin} {location.version}".rstrip()
                    raise (type(error) if is_ours else LibraryNotFoundError)(
                        f"{error} (found through {about}); pynixlkv needs {self.name} "
                        f"{self.minimum} or newer: {self._pip_command()}"
                    ) from error
                self.loaded = (location, library)
                _log.info("%s of %s %s", location.path, location.origin, location.version)
                without = [n for w in self.wheels if not w.has_rdma for n in w.names]
                if location.origin in without and (devices := rdma_devices()):
                    _log.warning(
                        "the RDMA devices %s are not used: %s has no InfiniBand; install %s, or "
                        "set %s to a UCX that has it",
                        ", ".join(devices), location.origin, NIXL_DISTRIBUTIONS[0], self.variable,
                    )  # fmt: skip
            return self.loaded[1]

    def _pip_command(self) -> str:
        return _pip_command(self.wheels[0].names, self.minimum)

    def _from_variable(self, tried: list[str]) -> Iterator[LibraryLocation]:
        value = os.environ.get(self.variable)
        if not value:
            return
        path = Path(value)
        if path.is_dir():
            path /= self.file
        tried.append(f"{path} (from {self.variable})")
        if not path.is_file():
            raise LibraryNotFoundError(
                f"{self.variable} is {value!r}, but there is no {path}; point it to {self.file} or "
                "to the directory that holds it, or unset it"
            )
        yield LibraryLocation(str(path), _version_of(path), self.variable)

    def _from_system(self, tried: list[str]) -> Iterator[LibraryLocation]:
        directories = [d for d in os.environ.get("LD_LIBRARY_PATH", "").split(":") if d]
        for prefix in _SYSTEM_PREFIXES:
            machine = os.uname().machine
            directories += [f"{prefix}/{d}" for d in ("lib", "lib64", f"lib/{machine}-linux-gnu")]
        for directory in directories:
            path = Path(directory) / self.file
            tried.append(str(path))
            if path.is_file():
                yield LibraryLocation(str(path), "", "system")


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this host."""
    return sorted(path.name for path in _RDMA_DEVICES.glob("*"))


def _by_cuda(names: tuple[str, ...]) -> list[str]:
    """Sort distributions: the one for the CUDA of torch, if torch was imported, comes first."""
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    suffix = f"-cu{version.split('.')[0]}" if isinstance(version, str) else "-none"
    return sorted(names, key=lambda name: not name.endswith(suffix))


def _pip_command(names: tuple[str, ...], minimum: str) -> str:
    return f'pip install "{_by_cuda(names)[0]}>={minimum}"'


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _open_nixl(path: Path) -> _native.nixl.Library:
    from pynixlkv import _native

    return _native.nixl.Library(str(path))


def _open_ucx(path: Path) -> _native.ucx.Library:
    """Open libucp with local symbols, so that it does not mix with another UCX of the process."""
    from pynixlkv import _native

    if path.name == _UCX_WHEEL_LIBRARIES[-1]:
        for name in _UCX_WHEEL_LIBRARIES[:-1]:
            if path.with_name(name).is_file():
                ctypes.CDLL(str(path.with_name(name)), ctypes.RTLD_LOCAL)
    return _native.ucx.Library(str(path))


NIXL = _Library(
    "PYNIXLKV_NIXL_LIBRARY",
    "NIXL",
    "libnixl_capi.so",
    "1.0.1",
    (_Wheels(NIXL_DISTRIBUTIONS, "libnixl_capi.so", "1.0.1"),),
    _open_nixl,
)
# The libucx wheels have no InfiniBand; the UCX inside NIXL's and most systems' do, so NIXL's comes
# first on a host with RDMA devices.
UCX = _Library(
    "PYNIXLKV_UCX_LIBRARY",
    "UCX",
    "libucp.so.0",
    "1.18",
    (
        _Wheels(("libucx-cu12", "libucx-cu13"), _UCX_WHEEL_LIBRARIES[-1], has_rdma=False),
        UCX_IN_NIXL,
    ),
    _open_ucx,
)

# Finding a library only reads files. Loading one starts no thread and opens no device, and returns
# the same object for the life of the process, whatever the environment says later: a second NIXL
# would have plugins and loggers of its own.
find_nixl = NIXL.find
find_ucx = UCX.find
load_nixl = NIXL.load
load_ucx = UCX.load


def nixl_version() -> str:
    """Return the version of the NIXL that `load_nixl` opened, ``"unknown"`` if nothing tells it."""
    library = load_nixl()
    return NIXL.location().version or library.version or "unknown"


def _version_of(path: Path) -> str:
    """Version of the distribution that installed a file, empty if none did."""
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


class DeviceDriver(NamedTuple):
    """What `_native.transfer.device_driver` says of the CUDA driver."""

    problem: str = ""
    has_dma_buf: bool = False


@dataclass(frozen=True)
class ProbeResult:
    """The output of `pynixlkv._probe`."""

    plugins: tuple[PluginReport, ...]
    ucx_version: str
    transports: tuple[str, ...]
    driver: DeviceDriver


def _probe(library: str) -> ProbeResult:
    """Ask NIXL and its UCX, in a process of its own, what works here.

    Loading every plugin and opening every device has side effects, and a plugin can crash.
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
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=ProbeResult)


def open_ucx_of_nixl() -> _native.ucx.Library | None:
    """Open the UCX that NIXL's UCX plugin has loaded into this process; None if it has not."""
    from pynixlkv import _native

    paths = [path for path in map(Path, _mapped_files()) if fnmatch(path.name, "libucp[.-]*so*")]
    paths.sort(key=lambda path: not fnmatch(path.name, UCX_IN_NIXL.pattern))
    return _native.ucx.Library(str(paths[0])) if paths else None


def transports_of(context: _native.ucx.Context) -> tuple[str, ...]:
    """Return the transports that a UCX has opened, as "transport/device"."""
    return tuple(re.findall(r"resource \d+ .*? -- (\S+)", context.info()))


@cache
def transports_of_nixl(config: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the transports that NIXL's UCX opens with settings; NIXL does not tell its own."""
    from pynixlkv import _native

    try:
        library = open_ucx_of_nixl()
        return () if library is None else transports_of(_native.ucx.Context(library, dict(config)))
    except PynixlkvError:
        return ()


def summary(transports: tuple[str, ...]) -> str:
    """Return in one line how memory moves with a UCX's transports, and what is missing."""
    from pynixlkv import _native

    names = {transport.split("/")[0] for transport in transports}
    driver = DeviceDriver()
    if "cuda_copy" in names:  # this process has opened the driver
        driver = DeviceDriver(*_native.transfer.device_driver())
    host = ", ".join(sorted(name for name in names if not name.startswith("cuda")))
    parts = [f"host memory moves by {host}"] if host else []
    parts += [f"GPU memory, {way}" for way in _device_memory(transports, driver)]
    return "; ".join(parts + [f"missing {what}" for what in _missing(transports, driver)])


def _missing(transports: tuple[str, ...], driver: DeviceDriver) -> list[str]:
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
            "VRAM: this UCX could not open a CUDA transport; "
            + (driver.problem or "needs an NVIDIA GPU and its driver (libcuda.so.1)")
        )
    if not has_rdma(names):
        missing.append("RDMA: this UCX could not open an RDMA device; needs one and its driver")
    elif "cuda_copy" in names and not driver.has_dma_buf and not _PEERMEM.exists():
        missing.append(
            "GPUDirect RDMA: nvidia_peermem is not loaded and the driver has no dma-buf, so GPU "
            "memory passes through host memory on its way to other hosts: modprobe nvidia_peermem, "
            "or install NVIDIA's open kernel modules"
        )
    return missing


def has_rdma(names: set[str]) -> bool:
    """Whether one of these transports of UCX is RDMA."""
    return any(name.startswith(("rc", "dc", "ud", "srd")) for name in names)


def _device_memory(transports: tuple[str, ...], driver: DeviceDriver) -> tuple[str, ...]:
    """Return how GPU memory moves with these transports."""
    names = {transport.split("/")[0] for transport in transports}
    if "cuda_copy" not in names:
        return ()
    same_host = "cuda_ipc, from GPU to GPU" if "cuda_ipc" in names else "through host memory"
    if not has_rdma(names):
        others = "through host memory and TCP"
    elif driver.has_dma_buf:
        others = "GPUDirect RDMA, by dma-buf"
    elif _PEERMEM.exists():
        others = "GPUDirect RDMA, by nvidia_peermem"
    else:
        others = "through host memory and RDMA"
    return f"same host: {same_host}", f"other hosts: {others}"


def native_report() -> NativeReport:
    """Report which native libraries there are and what works with them on this machine.

    Takes a second or two: another process loads every NIXL plugin and opens every UCX transport.
    This one loads nothing. Libraries that are missing are listed, not raised.
    """
    missing: list[str] = []
    nixl = ucx = None
    try:
        ucx = UCX.location()
    except LibraryNotFoundError as error:
        missing.append(f"UCX: {error}")
    probed = ProbeResult((), "", (), DeviceDriver())
    try:
        nixl = NIXL.location()
        probed = _probe(nixl.path)
    except (LibraryNotFoundError, subprocess.TimeoutExpired, ValueError) as error:
        missing.insert(0, f"NIXL: {error}")
    else:
        missing += _missing(probed.transports, probed.driver)
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
        device_memory=_device_memory(probed.transports, probed.driver),
        missing=tuple(missing),
    )
