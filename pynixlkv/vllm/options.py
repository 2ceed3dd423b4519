"""The options in ``kv_connector_extra_config``, by vLLM's own names where the meaning agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pynixlkv.connector.metadata import ConnectorConfig
from pynixlkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of `PyNixlKVConnector`; times in seconds.

    Parameters
    ----------
    transfer_backend : str
        What moves the bytes: ``"nixl"`` or ``"ucx"``.
    backends : list of str
        NIXL backend, exactly one.
    backend_params : dict of str to str
        Its parameters, or UCX's configuration (without the prefix ``UCX_``).
    transfer_mode : str
        ``"pull"`` or ``"push"``; the same on both sides.
    layerwise : bool
        In push mode: send each layer of each chunk of a prompt as soon as the device has finished
        it, to decode engines that have asked for it by then.
    side_channel_host : str
        Address of this machine where the handshake listens and consumers connect; no wildcard.
    side_channel_port : int
        Its port, to which the data-parallel index is added; 0 for any free one.
    allow_insecure : bool
        Listen and connect beyond loopback without the shared secret of ``PYNIXLKV_SECRET``.
    kv_lease_duration : float
        How long blocks are held after the end of the prefill and after each heartbeat.
    kv_heartbeat_interval : float
        Time between heartbeats; a sixth of the lease if left out.
    transfer_timeout : float
        Longest time to load a request.
    handshake_timeout : float
        Longest handshake.
    checksums : str
        Compare digests of loaded KV with the prefill's: ``"all"`` of it, ``"sampled"``, or
        ``"off"``. An option of decode.
    checksum_fraction : float
        Part of a request's KV that ``"sampled"`` compares.
    self_test : bool
        Before the first request from a prefill engine, test that both sides mean the same by the
        axes of their caches. Takes up to 4 MiB of the cache's memory.
    bidirectional_kv_xfer : bool
        On decode: hold the blocks of a finished answer, whose ``kv_transfer_params`` then are a
        hand-off for the next turn of the conversation; prefill fetches what decode has of it. Both
        sides need the ``kv_role`` ``"kv_both"``, and prefill ``kv_load_failure_policy``
        ``"recompute"``.
    conversation_blocks : int
        Most blocks that decode holds for next turns, half of its cache if left out. The oldest
        turns make room for new ones, and for requests.
    decoder_kv_blocks_ttl : float
        Longest time that decode holds blocks for a next turn.
    kv_recompute_threshold : int
        Prefill computes fewer tokens of a turn before than this itself.
    engine_ttl : float
        Producers that are idle for this long are forgotten.
    max_leases : int
        Most requests that are held at once.
    host_buffer_blocks : int
        Stage in host memory with this many blocks for each table. By default only where
        ``kv_buffer_device`` is ``"cpu"`` and the device is not, with the device's number of blocks.
    enforce_handshake_compat : bool
        Refuse a peer whose model, dtype or versions differ.
    """

    transfer_backend: Literal["nixl", "ucx"] = "nixl"
    backends: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1)] = msgspec.field(
        default_factory=lambda: ["UCX"]
    )
    backend_params: dict[str, str] = {}
    transfer_mode: Literal["pull", "push"] = "pull"
    layerwise: bool = False
    side_channel_host: str = "127.0.0.1"
    side_channel_port: Annotated[int, msgspec.Meta(ge=0, lt=65536)] = 0
    allow_insecure: bool = False
    kv_lease_duration: _Seconds = 30.0
    kv_heartbeat_interval: _Seconds | None = None
    transfer_timeout: _Seconds = 30.0
    handshake_timeout: _Seconds = 5.0
    checksums: Literal["off", "sampled", "all"] = "sampled"
    checksum_fraction: _Fraction = ConnectorConfig.checksum_fraction
    self_test: bool = True
    bidirectional_kv_xfer: bool = False
    conversation_blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    decoder_kv_blocks_ttl: _Seconds = 480.0
    kv_recompute_threshold: Annotated[int, msgspec.Meta(ge=0)] = 64
    engine_ttl: _Seconds = 3600.0
    max_leases: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 16384
    host_buffer_blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    enforce_handshake_compat: bool = True

    def __post_init__(self) -> None:
        if self.side_channel_host in ("", "*", "0.0.0.0", "::"):
            raise ConfigError(
                f"side_channel_host is {self.side_channel_host!r}; expected an address of this "
                "machine, because consumers are told to connect to it"
            )
        if self.layerwise and self.transfer_mode != "push":
            raise ConfigError(
                f"layerwise is set, but transfer_mode is {self.transfer_mode!r}; only 'push' sends "
                "layers as they finish"
            )

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Options:
        """Validate the options; raise `ConfigError` for a wrong one, by name."""
        try:
            return msgspec.convert(dict(extra), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"kv_connector_extra_config: {error}; PyNixlKVConnector knows "
                f"{', '.join(cls.__struct_fields__)}"
            ) from error

    def connector_config(
        self, compatibility: Mapping[str, str], num_blocks: int = 0
    ) -> ConnectorConfig:
        """Return the options of `pynixlkv.connector`; `num_blocks` are those of the cache."""
        held = self.conversation_blocks or num_blocks // 2
        return ConnectorConfig(
            conversation_blocks=held if self.bidirectional_kv_xfer else 0,
            conversation_seconds=self.decoder_kv_blocks_ttl,
            recompute_threshold=self.kv_recompute_threshold,
            transfer_mode=self.transfer_mode,
            lease_duration=self.kv_lease_duration,
            heartbeat_interval=self.kv_heartbeat_interval,
            transfer_timeout=self.transfer_timeout,
            handshake_timeout=self.handshake_timeout,
            peer_ttl=self.engine_ttl,
            self_test=self.self_test,
            checksums=self.checksums,
            checksum_fraction=self.checksum_fraction,
            max_leases=self.max_leases,
            compatibility=compatibility if self.enforce_handshake_compat else {},
            allow_insecure=self.allow_insecure,
        )
