"""Let programs that import ``nixl`` get this implementation."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from pynixlkv.errors import ConfigError, StateError

VARIABLE = "PYNIXLKV_NIXL_API"
_SUBMODULES = ("_api", "_bindings", "_utils", "logging")


def install(name: str = "nixl") -> None:
    """Make ``import nixl``, and of its modules, give what this package offers.

    Parameters
    ----------
    name : str
        Top-level name to take, for programs that import another than ``nixl``
        (``nixl_cu12``, ``nixl_rocm``).

    Raises
    ------
    StateError
        If NIXL's own package of that name has been imported in this process.

    Notes
    -----
    A second call does nothing. It acts on this process only: a program that spawns others has to
    call it in each, or set ``PYNIXLKV_NIXL_API=1`` where the program loads vLLM's plugins.
    """
    present = sys.modules.get(name)
    if present is not None:
        if getattr(present, "__pynixlkv__", False):
            return
        raise StateError(
            f"{name} has been imported from {getattr(present, '__file__', None)}; call install() "
            "before anything imports it"
        )
    package = ModuleType(name, "NIXL's Python API, as pynixlkv.nixl_api offers it.")
    package.__path__ = []
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    vars(package)["__pynixlkv__"] = True
    modules = {name: package}
    for submodule in _SUBMODULES:
        ours = importlib.import_module(
            f"pynixlkv.nixl_api.{'_logging' if submodule == 'logging' else submodule}"
        )
        modules[f"{name}.{submodule}"] = ours
        setattr(package, submodule, ours)
        for public in vars(ours):
            if not public.startswith("_"):
                setattr(package, public, getattr(ours, public))
    package.logging = modules[f"{name}.logging"]  # type: ignore[attr-defined]
    sys.modules.update(modules)


def install_if_asked() -> None:
    """Call `install` if the environment variable ``PYNIXLKV_NIXL_API`` is 1.

    Raises
    ------
    ConfigError
        If it is neither 0 nor 1.
    StateError
        As `install` does.

    Notes
    -----
    vLLM calls this in each of its processes, as a plugin of the group ``vllm.general_plugins``.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} is {value!r}; it must be 1 to be used, or 0")
    if value == "1":
        install()
