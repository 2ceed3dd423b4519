"""Finding and opening NIXL and UCX, and the errors and the report when they are missing."""

import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
from interpreter import run_python

import pynixlkv
from pynixlkv import _loader, _native
from pynixlkv.errors import LibraryNotFoundError, LibraryVersionError

ROOT = Path(__file__).parents[2]


SELF_TRANSFER = """
import numpy
from pynixlkv.nixl import Agent, XferState
with Agent("a") as agent:
    agent.create_backend("UCX")
    source, target = numpy.arange(64, dtype=numpy.uint8), numpy.zeros(64, numpy.uint8)
    s, t = agent.register_buffers(source), agent.register_buffers(target)
    request = agent.create_xfer_req("WRITE", s.descriptors, t.descriptors, "a")
    state = agent.post_xfer_req(request)
    while state == XferState.PENDING:
        state = agent.get_xfer_status(request)
    assert (source == target).all()
"""


# The libraries, each with its file, variable, search and way to open it.
LIBRARIES = {
    "nixl": ("libnixl_capi.so", "PYNIXLKV_NIXL_LIBRARY", _loader.find_nixl, _loader.load_nixl),
    "ucx": ("libucp.so.0", "PYNIXLKV_UCX_LIBRARY", _loader.find_ucx, _loader.load_ucx),
}
each_library = pytest.mark.parametrize(
    ("file", "variable", "find", "load"), LIBRARIES.values(), ids=LIBRARIES
)


@pytest.fixture
def no_nixl(monkeypatch, tmp_path):
    """A machine without NIXL and UCX."""

    def not_there(name):
        raise importlib.metadata.PackageNotFoundError(name)

    for library in (_loader.NIXL, _loader.UCX):
        monkeypatch.delenv(library.variable, raising=False)
        monkeypatch.setattr(library, "loaded", None)
    monkeypatch.setattr(_loader.importlib.metadata, "distribution", not_there)
    monkeypatch.setattr(_loader, "_SYSTEM_PREFIXES", (str(tmp_path),))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/one:{tmp_path}/two")


class FakeDistribution:
    def __init__(self, folder, version, library="libnixl_capi.so"):
        self.version = version
        self._folder = folder
        self.files = [importlib.metadata.PackagePath(f".libs/{library}")]
        (folder / ".libs").mkdir(parents=True)
        (folder / ".libs" / library).touch()

    def locate_file(self, path):
        return self._folder / path


@pytest.fixture
def install(monkeypatch, no_nixl, tmp_path):
    """Pretend that distributions are installed."""
    known = {}

    def distribution(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(_loader.importlib.metadata, "distribution", distribution)

    def add(name, version, **options):
        known[name] = FakeDistribution(tmp_path / name, version, **options)

    return add


@pytest.fixture
def compile_library(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def build(name, source):
        path = tmp_path / name
        command = [compiler, "-shared", "-fPIC", "-o", path, "-x", "c", "-"]
        subprocess.run(command, input=source.encode(), check=True, timeout=300)
        return path

    return build


@pytest.fixture
def build_library(compile_library):
    """Build a library with the functions that pynixlkv needs, all of which return 0."""
    header = (ROOT / "csrc/nixl/capi.hpp").read_text()
    required = re.search(r"define PYNIXLKV_NIXL_REQUIRED\(X\)(.*?)\n\n", header, re.DOTALL)
    names = re.findall(r"\bX\((\w+),", required.group(1))
    assert len(names) > 60

    def build(without=(), stub=False, crashing=()):
        source = "".join(
            f"int nixl_capi_{name}(void){{{'__builtin_trap();' * (name in crashing)}return 0;}}"
            for name in {*names} - {*without}
        )
        if "is_stub" not in without:
            source += f"_Bool nixl_capi_is_stub(void){{return {int(stub)};}}"
        return compile_library("libnixl_capi.so", source)

    return build


def test_the_installed_distribution_is_found():
    location = _loader.find_nixl()
    assert location.path.endswith("/libnixl_capi.so")
    assert location.origin in _loader.NIXL_DISTRIBUTIONS
    assert location.version == importlib.metadata.version(location.origin)
    library = _loader.load_nixl()
    assert library.path == location.path
    assert _loader.load_nixl() is library


def test_nothing_found_names_every_path_and_the_command(no_nixl, tmp_path):
    with pytest.raises(LibraryNotFoundError) as caught:
        _loader.find_nixl()
    message = str(caught.value)
    assert 'pip install "nixl-cu12>=1.0.1"' in message
    assert "PYNIXLKV_NIXL_LIBRARY" in message
    for tried in ("distribution nixl-cu12", "distribution nixl-cu13", "one", "two", "lib64"):
        assert tried in message
    assert isinstance(caught.value, ImportError)


@each_library
def test_the_variable_wins_and_takes_a_file_or_a_directory(
    monkeypatch, install, tmp_path, file, variable, find, load
):
    install("nixl-cu12", "1.5.1", library=file)
    library = tmp_path / "mine" / file
    library.parent.mkdir()
    library.touch()
    for value in (library, library.parent):
        monkeypatch.setenv(variable, str(value))
        assert find() == _loader.LibraryLocation(str(library), "", variable)
    monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    with pytest.raises(LibraryNotFoundError, match="nowhere"):
        find()


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("13.0", "nixl-cu13"), ("12.8", "nixl-cu12"), ("11.8", "nixl-cu12"), (None, "nixl-cu12")],
)
def test_the_distribution_fits_the_cuda_of_an_imported_torch(monkeypatch, install, cuda, expected):
    torch = types.SimpleNamespace(version=types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)
    install("nixl-cu12", "1.5.1")
    install("nixl-cu13", "1.5.1")
    assert _loader.find_nixl().origin == expected


def test_the_system_comes_last(install, monkeypatch, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "libnixl_capi.so").touch()
    assert _loader.find_nixl().origin == "system"
    install("nixl-cu13", "1.5.1")
    assert _loader.find_nixl().origin == "nixl-cu13"


def test_an_old_distribution_is_named_with_its_version(install):
    install("nixl-cu12", "0.8.0", library="libnixl.so")
    with pytest.raises(LibraryNotFoundError, match=r"nixl-cu12 0\.8\.0: has no libnixl_capi\.so"):
        _loader.find_nixl()
    install("nixl-cu13", "0.10.1")
    with pytest.raises(LibraryVersionError, match=r"nixl-cu13 0\.10\.1; pynixlkv needs 1\.0\.1"):
        _loader.find_nixl()


def test_a_missing_function_is_named_with_library_and_command(monkeypatch, no_nixl, build_library):
    path = build_library(without=["gen_notif"])
    monkeypatch.setenv("PYNIXLKV_NIXL_LIBRARY", str(path))
    with pytest.raises(LibraryVersionError) as caught:
        _loader.load_nixl()
    for part in (str(path), "no symbol nixl_capi_gen_notif", "pip install"):
        assert part in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_a_library_that_cannot_say_whether_it_is_a_stub_is_refused(build_library):
    with pytest.raises(LibraryVersionError, match="nixl_capi_is_stub"):
        _native.nixl.Library(str(build_library(without=["is_stub"])))


def test_a_stub_build_is_refused(build_library):
    with pytest.raises(LibraryVersionError, match="stub build"):
        _native.nixl.Library(str(build_library(stub=True)))


@each_library
def test_a_file_that_is_no_library_is_refused(
    monkeypatch, no_nixl, tmp_path, file, variable, find, load
):
    (tmp_path / file).write_text("not a library")
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(LibraryNotFoundError, match=r"cannot open .*pip install"):
        load()


def test_native_report_says_what_works():
    report = pynixlkv.native_report()
    assert report.nixl == _loader.find_nixl()
    assert re.fullmatch(r"\d+\.\d+\.\d+", report.ucx_version)
    assert any(transport.startswith("tcp/") for transport in report.transports)
    assert {"DRAM", "FILE"} <= set(report.memory_types)
    plugins = {plugin.name: plugin for plugin in report.plugins}
    assert plugins["UCX"].memory_types == ("DRAM", "VRAM")
    assert plugins["UCX"].params["ucx_error_handling_mode"] == "peer"
    for plugin in plugins.values():
        says = any(f"NIXL plugin {plugin.name}:" in line for line in report.missing)
        assert bool(plugin.problem) == says
    if not any(transport.startswith("cuda") for transport in report.transports):
        assert "VRAM" not in report.memory_types
        assert any(line.startswith("VRAM") for line in report.missing)
    assert report.ucx == _loader.find_ucx()
    as_json = json.loads(json.dumps(report.to_dict()))
    assert as_json["nixl"]["version"] == report.nixl.version
    assert as_json["ucx"]["path"] == report.ucx.path


@pytest.mark.parametrize(
    ("transports", "has_peermem", "has_dma_buf", "ways", "is_incomplete"),
    [
        ("tcp cma", True, True, [], False),
        ("tcp cuda_copy", False, True, ["through host memory", "host memory and TCP"], False),
        ("tcp cuda_copy cuda_ipc rc_mlx5", True, False, ["cuda_ipc", "by nvidia_peermem"], False),
        ("tcp cuda_copy cuda_ipc rc_mlx5", False, True, ["cuda_ipc", "by dma-buf"], False),
        ("tcp cuda_copy rc_mlx5", False, False, ["host memory", "host memory and RDMA"], True),
    ],
)
def test_the_report_says_how_gpu_memory_moves(
    transports, has_peermem, has_dma_buf, ways, is_incomplete, tmp_path, monkeypatch
):
    driver = _loader.DeviceDriver("", has_dma_buf)
    monkeypatch.setattr(_loader, "_PEERMEM", tmp_path if has_peermem else tmp_path / "none")
    opened = tuple(f"{name}/device" for name in transports.split())
    found = _loader._device_memory(opened, driver)
    assert len(found) == len(ways)
    assert all(way in line for way, line in zip(ways, found, strict=True))
    missing = _loader._missing(opened, driver)
    assert any(line.startswith("GPUDirect") for line in missing) is is_incomplete


def test_native_report_without_nixl_says_how_to_get_it(no_nixl):
    report = pynixlkv.native_report()
    assert report.nixl is None
    assert "pip install" in report.missing[0]


def test_native_report_survives_a_library_that_crashes(monkeypatch, no_nixl, build_library):
    path = build_library(crashing=["get_available_plugins"])
    monkeypatch.setenv("PYNIXLKV_NIXL_LIBRARY", str(path))
    report = pynixlkv.native_report()
    assert report.plugins == ()
    assert re.search("probing .* ended with status -", report.missing[0])


def test_import_is_quiet():
    code = """
    import numpy, os, sys, threading
    environment = dict(os.environ)
    before = set(sys.modules)
    import pynixlkv
    assert dict(os.environ) == environment
    assert threading.active_count() == 1
    assert not {m for m in sys.modules if m.split(".")[0] in ("torch", "nixl", "nixl_cu12")}
    assert not any("nixl_capi" in line for line in open("/proc/self/maps"))
    assert "native_report" in dir(pynixlkv)
    try:
        pynixlkv.nonsense
    except AttributeError as error:
        print(error)
    """
    assert run_python(code) == "module 'pynixlkv' has no attribute 'nonsense'"


def test_neither_torch_nor_python_nixl_is_needed():
    code = SELF_TRANSFER + textwrap.dedent("""
    import sys
    print(sorted(m for m in sys.modules if m.split(".")[0].startswith(("torch", "nixl"))))
    """)
    assert run_python(code) == "[]"


def test_the_loaded_libraries_are_listed_with_versions():
    code = SELF_TRANSFER + textwrap.dedent("""
    from pynixlkv import _loader
    for library in _loader._loaded_libraries():
        print(library.path.split("/")[-1], library.version)
    """)
    listed = dict(line.split() for line in run_python(code).splitlines())
    version = _loader.find_nixl().version
    assert listed["libnixl_capi.so"] == version
    assert any(name.startswith("libucp") for name in listed)
    assert set(listed.values()) == {version}


# pynixlkv comes first, in the middle, and last in turn.
ORDERS = [
    [*others[: place % 4], "pynixlkv.nixl", *others[place % 4 :]]
    for place, others in enumerate(itertools.permutations(["numpy", "msgspec", "nixl_cu12"]))
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_import_order_does_not_matter(order):
    pytest.importorskip("torch", reason="NIXL's own package needs torch")
    run_python("".join(f"import {module}\n" for module in order) + SELF_TRANSFER)


@pytest.mark.parametrize("first", ["libucx", "pynixlkv.nixl"])
def test_two_ucx_libraries_in_one_process(first):
    pytest.importorskip("libucx", reason="needs the libucx wheel")
    load = "import libucx\nlibucx.load_library()\n"
    code = (load if first == "libucx" else "") + SELF_TRANSFER + load + SELF_TRANSFER
    code += textwrap.dedent("""
    from pynixlkv import _loader
    print(*(l.path for l in _loader._loaded_libraries() if "libucp" in l.path), sep="\\n")
    """)
    assert len(run_python(code).splitlines()) == 2


# ---- UCX


def test_ucx_not_found_names_every_path_and_the_command(no_nixl):
    with pytest.raises(LibraryNotFoundError) as caught:
        _loader.find_ucx()
    message = str(caught.value)
    assert 'pip install "libucx-cu12>=1.18"' in message
    assert "PYNIXLKV_UCX_LIBRARY" in message
    for tried in ("libucx-cu12", "libucx-cu13", "nixl-cu12", "nixl-cu13", "one/libucp.so.0"):
        assert tried in message
    report = pynixlkv.native_report()
    assert report.ucx is None
    assert any(line.startswith("UCX: UCX was not found") for line in report.missing)


def test_ucx_is_looked_for_in_order(install, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "libucp.so.0").touch()
    assert _loader.find_ucx().origin == "system"
    install("nixl-cu12", "1.5.1", library="libucp-0123abcd.so.0.0.0")
    location = _loader.find_ucx()
    assert location.origin == "nixl-cu12"
    assert location.path.endswith("/libucp-0123abcd.so.0.0.0")
    install("libucx-cu13", "1.22.0", library="libucp.so")
    assert _loader.find_ucx().origin == "libucx-cu13"


def test_a_ucx_with_infiniband_comes_first_on_a_host_with_rdma_devices(
    install, tmp_path, monkeypatch, caplog, build_ucx
):
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(_loader, "_RDMA_DEVICES", tmp_path / "infiniband")
    library = build_ucx(22)
    install("libucx-cu13", "1.22.0", library="libucp.so")
    location = _loader.find_ucx()
    assert location.origin == "libucx-cu13"
    monkeypatch.setattr(_loader.UCX, "open_path", lambda _: library)
    _loader.load_ucx()
    assert "the RDMA devices mlx5_0 are not used: libucx-cu13 has no InfiniBand" in caplog.text
    install("nixl-cu12", "1.5.1", library="libucp-0123abcd.so.0.0.0")
    assert _loader.find_ucx().origin == "nixl-cu12"


@pytest.fixture
def build_ucx(compile_library):
    """Build a libucp of a version, without some of the functions that pynixlkv needs."""
    header = (ROOT / "csrc/ucx/capi.hpp").read_text()
    table = re.search(r"define PYNIXLKV_UCP_FUNCTIONS\(X\)(.*?)\n\n", header, re.DOTALL)
    names = set(re.findall(r"\bX\([\w ]+(?: ?\*)?, (\w+),", table.group(1)))
    assert len(names) > 30
    assert "get_version" in names

    def build(minor, without=()):
        source = "".join(
            f"int ucp_{name}(void){{return 0;}}" for name in names - {"get_version", *without}
        )
        source += (
            "void ucp_get_version(unsigned* a, unsigned* b, unsigned* c)"
            f"{{*a = 1; *b = {minor}; *c = 0;}}"
        )
        return compile_library("libucp.so.0", source)

    return build


@pytest.mark.parametrize(
    ("minor", "without", "words"),
    [(17, (), ["UCX 1.17.0", "1.18 or newer"]), (22, ("rkey_ptr",), ["no symbol ucp_rkey_ptr"])],
)
def test_an_old_or_incomplete_ucx_is_refused(
    no_nixl, monkeypatch, build_ucx, minor, without, words
):
    path = build_ucx(minor, without)
    monkeypatch.setenv("PYNIXLKV_UCX_LIBRARY", str(path))
    with pytest.raises(LibraryVersionError) as caught:
        _loader.load_ucx()
    for word in (*words, str(path), "pip install"):
        assert word in str(caught.value)
