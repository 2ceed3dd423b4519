"""Report what a NIXL library can do here, as a line of JSON: ``python -m pynixlkv._probe PATH``.

A program of its own, because it loads every plugin and opens every UCX transport.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import msgspec

from pynixlkv import _loader, _native
from pynixlkv._loader import DeviceDriver, PluginReport, ProbeResult, _mapped_files
from pynixlkv.errors import NixlError, UcxError


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
    library = _loader.open_ucx_of_nixl()
    if library is None:
        return "", ()
    try:
        return library.version, _loader.transports_of(_native.ucx.Context(library, {}))
    except UcxError:
        return library.version, ()


def main(path: str) -> None:
    """Probe the library and print the result."""
    agent = _native.nixl.NativeAgent(_native.nixl.Library(path), "pynixlkv-probe")
    # In this order: the plugins load the UCX.
    result = ProbeResult(
        probe_plugins(agent), *probe_ucx(), DeviceDriver(*_native.transfer.device_driver())
    )
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
