"""Let programs that import ``nixl`` get this implementation."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from pynixlkv.errors import ConfigError, StateError
from pynixlkv.nixl_api._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

VARIABLE = "PYNIXLKV_NIXL_API"
NAMES = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "rixl")
_SUBMODULES = {"_api": "_api", "_bindings": "_bindings", "_utils": "_utils", "logging": "_logging"}


class _Finder(MetaPathFinder, Loader):
    """Imports a package whose modules are ours.

    Not before it is asked for: vLLM sets an environment variable of UCX ahead of its import of
    ``nixl``, and not if that is there already.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a spec for the package alone; importing it brings its modules."""
        return ModuleSpec(fullname, self, is_package=True) if fullname == self.name else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the package, and put its modules where the import system looks first."""
        for name, ours in _SUBMODULES.items():
            submodule = importlib.import_module(f"pynixlkv.nixl_api.{ours}")
            sys.modules[f"{self.name}.{name}"] = submodule
            for public, value in vars(submodule).items():
                if not public.startswith("_"):
                    setattr(module, public, value)
        for name in _SUBMODULES:
            setattr(module, name, sys.modules[f"{self.name}.{name}"])


def install(*names: str) -> None:
    """Make ``import nixl``, and of its modules, give what this package offers.

    `names` are the top-level names to take; all names of NIXL's packages by default. Acts on this
    process only; a second call does nothing. Raises `StateError` if NIXL's own package of such a
    name has been imported.
    """
    taken = installed_names()
    wanted = [name for name in names or NAMES if name not in taken]
    for name in wanted:
        if name in sys.modules:
            origin = getattr(sys.modules[name], "__file__", None)
            raise StateError(
                f"{name} has been imported from {origin}; call install() before anything imports it"
            )
    sys.meta_path[:0] = [_Finder(name) for name in wanted]
    if wanted:
        get_logger("nixl_api").info("pynixlkv.nixl_api stands in for %s", ", ".join(wanted))


def installed_names() -> list[str]:
    """Return the top-level names that `install` has taken in this process."""
    return [finder.name for finder in sys.meta_path if isinstance(finder, _Finder)]


def install_if_asked() -> None:
    """Call `install` if ``PYNIXLKV_NIXL_API`` is 1, as a plugin of ``vllm.general_plugins``."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"{VARIABLE} is {value!r}; it must be 1 to be used, or 0")
    if value == "1":
        install()
