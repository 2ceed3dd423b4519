"""Log records that say which request and which peer they are about, for programs that read logs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter

__all__ = ["RequestLog"]


class RequestLog(_Adapter):
    """A logger whose records have the attributes ``request`` and ``peer``.

    Parameters
    ----------
    logger : logging.Logger
        Where the records go.
    request : str
        Id of the request; empty if the records are about none.
    peer : str
        Name of the engine or agent on the other side; empty if there is none.

    Notes
    -----
    A call's own ``extra`` is added to these, or replaces them.
    """

    def __init__(self, logger: logging.Logger, *, request: str = "", peer: str = "") -> None:
        super().__init__(logger, {"request": request, "peer": peer})

    def process(
        self,
        msg: Any,  # noqa: ANN401 - the signature of logging
        kwargs: MutableMapping[str, Any],
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the fields to one record; called by `logging`."""
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}
