"""Report what a NIXL library can do here, as a line of JSON: ``python -m pynixlkv._probe PATH``.

A program of its own, because it loads every plugin and opens every UCX transport.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path

import msgspec

from pynixlkv import _native
from pynixlkv._loader import PluginReport, ProbeResult, _mapped_files
from pynixlkv.errors import NixlError

_UCP_FEATURES_FIELD = 1
_UCP_FEATURE_RMA = 1 << 1
_UCP_FEATURE_AM = 1 << 6


def probe_plugins(agent: _native.nixl.NativeAgent) -> tuple[PluginReport, ...]:
    """Load each plugin; return its declarations, or why it cannot be loaded."""
    plugins = []
    for name in agent.get_available_plugins():
        try:
            info = agent.get_plugin_params(name)
        except NixlError as error:
            plugins.append(PluginReport(name, problem=why_not(name) or str(error)))
        else:
            memory_types = tuple(memory.name for memory in info.memory_types)
            plugins.append(PluginReport(name, memory_types, info.params))
    return tuple(plugins)


def why_not(plugin: str) -> str:
    """Return the dynamic loader's error for a plugin; empty if it can be opened."""
    folders = [
        os.environ.get("NIXL_PLUGIN_DIR", ""),
        *(str(Path(p).parent / "plugins") for p in _mapped_files() if p.endswith("/libnixl.so")),
    ]
    for folder in filter(None, folders):
        path = Path(folder) / f"libplugin_{plugin}.so"
        if path.is_file():
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                return str(error)
    return ""


def probe_ucx() -> tuple[str, tuple[str, ...]]:
    """Return version and transports of the UCX that NIXL's UCX plugin has loaded."""
    paths = [path for path in _mapped_files() if re.search(r"/libucp[^/]*\.so", path)]
    if not paths:
        return "", ()
    ucp = ctypes.CDLL(paths[0])
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    version = ucp.ucp_get_version_string().decode()
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    # A zeroed parameter block; UCX reads only the fields named in the mask, its first word.
    params = (ctypes.c_uint64 * 64)(_UCP_FEATURES_FIELD, _UCP_FEATURE_RMA | _UCP_FEATURE_AM)
    context = ctypes.c_void_p()
    status = ucp.ucp_init_version(major, minor, ctypes.byref(params), None, ctypes.byref(context))
    if status != 0:
        return version, ()
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "context"
        stream = ctypes.c_void_p(libc.fopen(os.fsencode(path), b"w"))
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        text = path.read_text(encoding="utf-8")
    return version, tuple(re.findall(r"resource \d+ .*? -- (\S+)", text))


def main(path: str) -> None:
    """Probe the library and print the result."""
    agent = _native.nixl.NativeAgent(_native.nixl.Library(path), "pynixlkv-probe")
    # In this order: the plugins load the UCX.
    result = ProbeResult(probe_plugins(agent), *probe_ucx())
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
