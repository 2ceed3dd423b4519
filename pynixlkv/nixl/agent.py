"""`NixlAgent`: an agent with NIXL as its transfer backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from pynixlkv import _loader, _native
from pynixlkv._limits import check_reserve
from pynixlkv.agent import Agent, check_strings
from pynixlkv.errors import NixlError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Period of the timer of NIXL's progress thread, which serves peers whose transport needs this
# side's processor (TCP) and also wakes on events. The period of NIXL's Python API burns a core.
_PROGRESS_DELAY_US = 100_000

# NIXL applies these unless the environment has a UCX_ variable of the name. UCX's registration
# cache grows without bound where memory is mapped and unmapped often. A blocking connect() would
# hold up all peers for minutes where one host drops packets.
# The kernel gives up the idle connection to a silent host after KEEPIDLE + KEEPCNT * KEEPINTVL.
_UCX_CONFIG = (
    "RCACHE_MAX_UNRELEASED=1024,TCP_CONN_NB=y,TCP_KEEPIDLE=5s,TCP_KEEPINTVL=2s,TCP_KEEPCNT=3"
)


class NixlAgent(Agent):
    """An agent that moves bytes with NIXL. Safe from several threads.

    Parameters
    ----------
    name : str
        Unique among the agents that talk to each other.
    backend : str
        NIXL backend; registered memory and transfers use it alone.
    backend_params : mapping of str to str, optional
        Parameters of the backend, over the defaults that `default_backend_params` shows.
    secret : bytes or str, optional
        Key of the MAC on hello bytes; both sides need the same. Default: the environment variable
        ``PYNIXLKV_SECRET``, or none.

    Raises
    ------
    LibraryNotFoundError, LibraryVersionError
        If NIXL is not installed or too old; the message says what to install.
    ConfigError
        If the name is empty, or the secret, or if the backend reaches no peers, as of files.
    NixlError
        If NIXL does not start the agent or the backend.

    Notes
    -----
    In a forked child an agent raises `ForkError`, and so does making one if the parent had one:
    start such a child with the method ``spawn``. The agent has one thread of its own, asleep while
    idle, and one of NIXL's.

    Examples
    --------
    >>> with NixlAgent("decode-0") as agent:  # doctest: +SKIP
    ...     agent.register(cache)
    ...     peer = agent.connect(hello_from_prefill)
    """

    transfer_backend: ClassVar[str] = "nixl"

    def __init__(
        self,
        name: str,
        *,
        backend: str = "UCX",
        backend_params: Mapping[str, str] | None = None,
        secret: bytes | str | None = None,
    ) -> None:
        check_reserve("an agent")
        self._library = _loader.load_nixl()
        params = self.default_backend_params(backend) | dict(backend_params or {})
        check_strings("backend parameter", params)
        self._backend = backend
        self._backend_params = params
        super().__init__(name, backend_version=_loader.nixl_version(), secret=secret)

    def _start(self, name: str, incarnation: bytes) -> _native.transfer.Agent:
        backend, params = self._backend, self._backend_params
        try:
            return _native.transfer.nixl_agent(
                name, incarnation, self._library, backend, params, _PROGRESS_DELAY_US
            )
        except NixlError as error:
            raise type(error)(
                f"{error}; {backend} was started with {params} and {_ucx_environment()}. See "
                "pynixlkv.native_report() for the plugins and transports that work here",
                library=error.library,
                status=error.status,
                call=error.call,
                detail=error.detail,
            ) from error

    def _transports(self) -> tuple[str, ...]:
        if self._backend != "UCX":
            return ()
        items = self._backend_params.get("engine_config", "").split(",")
        pairs = (item.split("=", 1) for item in items if "=" in item)
        config = {key: value for key, value in pairs if f"UCX_{key}" not in os.environ}
        return _loader.transports_of_nixl(tuple(sorted(config.items())))

    @staticmethod
    def default_backend_params(backend: str) -> dict[str, str]:
        """Return the default parameters of a backend."""
        return {"engine_config": _UCX_CONFIG} if backend == "UCX" else {}

    @property
    def backend(self) -> str:
        """Name of the NIXL backend."""
        return self._backend

    @property
    def backend_params(self) -> dict[str, str]:
        """Parameters that the backend was made with."""
        return dict(self._backend_params)

    @property
    def transport(self) -> str:
        """The transports that UCX may choose from; NIXL does not say which it chose for a peer.

        ``UCX_TLS`` of the environment, which wins, or ``TLS`` of the backend's ``engine_config``.
        """
        if self._backend != "UCX":
            return self._backend
        config = self._backend_params.get("engine_config", "").split(",")
        choice = [item.removeprefix("TLS=") for item in config if item.startswith("TLS=")]
        return f"UCX, UCX_TLS={os.environ.get('UCX_TLS') or (choice or ['all'])[0]}"


def _ucx_environment() -> str:
    """Return UCX's variables, the usual reason why no transport works."""
    found = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key[:4] == "UCX_"]
    return " ".join(found) or "no UCX_ variable in the environment"
