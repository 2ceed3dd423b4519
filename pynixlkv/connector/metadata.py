"""The options of a connector, and the data that its halves, producers and consumers exchange.

`ConnectorConfig` has the options. `KVTransferParams` is the typed form of the
``kv_transfer_params`` of a request; it comes from outside and is validated. `ConnectorMetadata`
goes from an engine's scheduler to its workers once per step. All are plain data and can be pickled.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec

from pynixlkv.errors import ConfigError
from pynixlkv.types import Rank

BlockLists = tuple[tuple[int, ...], ...]
"""Physical block numbers in token order, one tuple for each group of the cache, in its order."""

TransferMode = Literal["pull", "push"]
"""Who moves the bytes: ``"pull"``, the consumer reads; ``"push"``, the producer writes."""

Checksums = Literal["off", "sampled", "all"]
"""How much of a request's KV the consumer compares with the producer's digests."""

_MAX_TEXT = 512
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]
TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C's header of this name (Trace Context, 3.2.2); who receives another form ignores it."""
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
_MAX_RANKS = 4096
_Size = Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)]
_Port = Annotated[int, msgspec.Meta(ge=1, lt=2**16)]

_BlockTables = Annotated[
    tuple[Annotated[tuple[_Index, ...], msgspec.Meta(max_length=1 << 22)], ...],
    msgspec.Meta(max_length=64),
]
MAX_READERS = 1024
"""Most readers of one lease that a producer keeps account of; with more it lasts its time."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
NumReaders = Annotated[int, msgspec.Meta(ge=0, le=2**16)]

_LEASE = re.compile(r"(\d{1,9})-([0-9a-f]{1,16})")


class EndState(enum.Enum):
    """How receiving a request ended; final."""

    RECEIVED = "received"
    """All bytes arrived, and the producer held its blocks while they moved."""
    FAILED = "failed"
    EXPIRED = "expired"
    """The producer's lease ended before the bytes had moved, or before it gave their digests."""
    CORRUPT = "corrupt"
    """The bytes that arrived are not those that the producer held: their digests differ."""
    ABORTED = "aborted"
    """Given up by the engine."""


class Lease(msgspec.Struct, frozen=True):
    """A producer's promise to hold a request's blocks."""

    slot: _Index
    """In the producer's lease tables, the same in all ranks of the engine."""
    token: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    """Value of that slot while the lease holds; never reused."""

    def __str__(self) -> str:
        return f"{self.slot}-{self.token:x}"

    @classmethod
    def parse(cls, text: str) -> Lease:
        """Read what ``str`` wrote; raise `ConfigError` for anything else."""
        match = _LEASE.fullmatch(text)
        if match is None or not 1 <= int(match[2], 16) <= 2**62:
            raise ConfigError(f"the lease is {text!r}; expected <slot>-<hexadecimal token>")
        return cls(int(match[1]), int(match[2], 16))


class ParallelSizes(msgspec.Struct, frozen=True):
    """Sizes of the parallel groups of an engine."""

    pp: _Size = 1
    tp: _Size = 1
    dcp: _Size = 1
    """Ranks that share the tokens of a head (decode context parallelism)."""

    def __post_init__(self) -> None:
        if self.pp * self.tp > _MAX_RANKS:
            raise ConfigError(
                f"an engine of {self.pp} x {self.tp} ranks; expected at most {_MAX_RANKS}"
            )


_MAY_BE_0 = ("conversation_blocks", "recompute_threshold")


@dataclass(frozen=True)
class ConnectorConfig:
    """Options of `ConnectorScheduler` and `ConnectorWorker`; all times in seconds."""

    transfer_mode: TransferMode = "pull"
    """``"pull"``, the consumer reads; ``"push"``, the producer writes. The same on both sides."""
    lease_duration: float = 30.0
    """How long a producer holds blocks after the end of the prefill and after each heartbeat."""
    heartbeat_interval: float | None = None
    """Time between two heartbeats to a producer; by default a sixth of its lease duration."""
    missed_heartbeats: int = 3
    """A producer that leaves this many in a row unanswered counts as dead."""
    transfer_timeout: float = 30.0
    """Longest time to receive a request."""
    handshake_timeout: float = 5.0
    """Longest time to get a producer's metadata."""
    peer_ttl: float = 3600.0
    """Producers that are idle for this long are forgotten."""
    max_leases: int = 16384
    """Most requests that a producer holds at once."""
    conversation_blocks: int = 0
    """Most blocks of finished turns that a consumer holds for the next turns of conversations; the
    oldest turns make room for new ones. 0: none are held."""
    conversation_seconds: float = 480.0
    """Longest time that a finished turn is held for the next one."""
    recompute_threshold: int = 64
    """A producer computes fewer tokens than this itself instead of fetching them from a consumer's
    finished turn."""
    partial_blocks: bool = True
    """Hand over a last block that is not full. Otherwise prompts are cut to whole blocks, and one
    that is shorter than a block is not handed over."""
    self_test: bool = True
    """Before the first request from a producer, test that both sides mean the same by the axes of
    their caches; see `pynixlkv.connector.verification`. Takes up to 4 MiB of the cache's memory."""
    max_bytes: int | None = None
    """Longest descriptor, see `pynixlkv.plan.TransferPlan`."""
    checksums: Checksums = "sampled"
    """Compare digests of received KV with the producer's: ``"all"`` of it, ``"sampled"``, or
    ``"off"``. The consumer's option; every producer answers."""
    checksum_fraction: float = 1 / 32
    """Part of a request's KV that ``"sampled"`` compares; at least one unit of each group."""
    compatibility: Mapping[str, str] = field(default_factory=dict)
    """What both sides must agree on beyond their geometries (model, attention backend)."""
    allow_insecure: bool = False
    """Fetch metadata beyond loopback without a shared secret."""

    def __post_init__(self) -> None:
        if self.transfer_mode not in ("pull", "push"):
            raise ConfigError(f"transfer_mode is {self.transfer_mode!r}; expected 'pull' or 'push'")
        if self.checksums not in ("off", "sampled", "all"):
            raise ConfigError(
                f"checksums is {self.checksums!r}; expected 'off', 'sampled' or 'all'"
            )
        if self.checksum_fraction > 1:
            raise ConfigError(
                f"checksum_fraction is {self.checksum_fraction}; expected a number above 0, up to 1"
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            if not (value > 0 or (value == 0 and each.name in _MAY_BE_0)):
                raise ConfigError(f"{each.name} is {value}; expected a number above 0")
        if self.heartbeat_period(self.lease_duration) >= self.lease_duration:
            raise ConfigError(
                f"heartbeat_interval is {self.heartbeat_interval} s, not below lease_duration, "
                f"{self.lease_duration} s; leases would run out between two heartbeats"
            )

    def heartbeat_period(self, lease_duration: float) -> float:
        """Return the time between two heartbeats for leases of this duration."""
        return self.heartbeat_interval or lease_duration / 6


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The ``kv_transfer_params`` of a request.

    A proxy sends ``do_remote_decode=True`` to the producer, and passes the producer's answer, which
    has everything else, on to the consumer unchanged. A consumer that keeps conversations answers
    with ``do_remote_decode=True`` and a hand-off of its own, to be sent with the prompt of the next
    turn: its producer fetches what it describes. Unknown fields are ignored.
    """

    do_remote_decode: bool = False
    """Hold the blocks for a consumer."""
    do_remote_prefill: bool = False
    """Fetch the blocks from the producer described here; fail if that fails."""
    remote_engine_id: _Text | None = None
    remote_request_id: _Text | None = None
    """The producer's id of the request."""
    remote_host: _Text | None = None
    """The producer's side channel."""
    remote_port: _Port | None = None
    remote_block_ids: _BlockTables | None = None
    """The producer's block tables, one for each group, in token order."""
    remote_starts: tuple[_Index, ...] | None = None
    """Token position of the first block of each table; zeros if left out."""
    remote_block_sizes: tuple[_Index, ...] = ()
    """Tokens per block of each table; left out if they are the blocks of its geometry."""
    remote_num_tokens: _Index | None = None
    """Tokens, from position 0 on, whose KV the producer holds."""
    content: _Text | None = None
    """Digest of what decides the KV of these tokens, see `RequestInfo.content`."""
    tp_size: _Size = 1
    pp_size: _Size = 1
    dcp_size: _Size = 1
    lease: str | None = None
    """The producer's `Lease`, as text."""
    lease_duration: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    """Seconds that the lease lasts after its start and after each heartbeat."""
    traceparent: str | None = None
    """Of the producer's request, as W3C's header of this name: parent of the consumer's spans."""
    transfer_mode: TransferMode = "pull"
    sibling_group: _Text | None = None
    """To a producer: requests of one group are samples of one prompt, and share a lease."""
    num_readers: NumReaders = 1
    """Requests of consumers that are going to read the lease, such as the samples of a prompt. A
    router can tell it to the producer or the consumers. With 0, for an unknown number, the lease
    lasts a heartbeat longer than its last reader."""
    reader: Number | None = None
    """Set by the consumer's scheduler: which reader of the lease it is."""

    @classmethod
    def from_dict(cls, params: Mapping[str, Any] | None) -> KVTransferParams:
        """Validate parameters from outside; raise `ConfigError` for a bad field, by name."""
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise ConfigError(
                f"kv_transfer_params is a {type(params).__name__}; expected a mapping"
            )
        given = {key: value for key, value in params.items() if value is not None}
        if not TRACEPARENT.fullmatch(str(given.get("traceparent"))):
            given.pop("traceparent", None)
        try:
            made = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_transfer_params: {error}") from error
        for name, value in given.items():
            if isinstance(value, str) and not _is_text(value):
                raise ConfigError(
                    f"kv_transfer_params: {name} is {value[:40]!r}; expected at most {_MAX_TEXT} "
                    "bytes of UTF-8"
                )
        made._check()
        return made

    def _check(self) -> None:
        self.parallel  # noqa: B018 - its constructor checks the product
        if not self.is_fetched:
            return
        needed = _NEEDED if self.transfer_mode == "push" else _NEEDED + _NEEDED_TO_PULL
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ConfigError(
                f"kv_transfer_params: a hand-off is to be fetched, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; pass on what the producer "
                "answered, unchanged"
            )
        if self.lease is not None:
            Lease.parse(self.lease)
        for name in ("remote_starts", "remote_block_sizes"):
            given = getattr(self, name)
            if given and len(given) != len(self.blocks):
                raise ConfigError(
                    f"kv_transfer_params: {name} has {len(given)} entries, remote_block_ids "
                    f"{len(self.blocks)}; expected one for each table"
                )

    @property
    def is_fetched(self) -> bool:
        """Whether there are blocks to fetch."""
        return self.do_remote_prefill or self.is_next_turn

    @property
    def is_next_turn(self) -> bool:
        """Whether the blocks to fetch are of the turn before, and could be computed here."""
        return self.do_remote_decode and self.remote_engine_id is not None

    @property
    def blocks(self) -> BlockLists:
        """The producer's block tables; empty if there are none."""
        return self.remote_block_ids or ()

    @property
    def starts(self) -> tuple[int, ...]:
        """Token position of the first block of each table."""
        return self.remote_starts or (0,) * len(self.blocks)

    @property
    def lease_token(self) -> Lease | None:
        """The producer's lease; None if it has given none, as for an early push."""
        return None if self.lease is None else Lease.parse(self.lease)

    @property
    def parallel(self) -> ParallelSizes:
        """Sizes of the producer's parallel groups."""
        return ParallelSizes(self.pp_size, self.tp_size, self.dcp_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters as JSON-compatible data, without unset fields."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        data = {key: value for key, value in data.items() if value is not None}
        for key in ("remote_block_ids", "remote_starts", "remote_block_sizes"):
            if key in data:
                data[key] = [list(v) if isinstance(v, tuple) else v for v in data[key]]
        return data


def _is_text(value: str) -> bool:
    try:
        return len(value.encode()) <= _MAX_TEXT
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can carry
        return False


_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_NEEDED_TO_PULL = ("remote_block_ids", "remote_num_tokens", "lease", "lease_duration")


@dataclass(frozen=True)
class RequestInfo:
    """A request, as an engine presents it to its `ConnectorScheduler`."""

    request_id: str
    """The engine's own id; the other side's may differ."""
    num_prompt_tokens: int
    params: KVTransferParams = field(default_factory=KVTransferParams)
    content: Callable[[int], str] | None = None
    """Returns a digest of all that decides the KV of the first n tokens of prompt and answer
    (tokens, adapters, images), equal on both sides. A consumer that has one refuses a hand-off of
    other content, or of none; without one nothing is checked."""
    traceparent: str | None = None
    """Parent of its spans; by default the one of its hand-off."""

    def trace(self) -> str | None:
        """Return the parent of its spans."""
        return self.traceparent or self.params.traceparent


@dataclass(frozen=True)
class ReqMeta:
    """One request that a worker is to receive, save or send."""

    blocks: BlockLists
    """Local block tables, one for each group; only the blocks to move."""
    starts: tuple[int, ...]
    """Token position of the first block of each table."""
    num_tokens: int
    """Valid tokens of the sequence, from position 0 on."""
    remote: KVTransferParams | None = None
    """Where to receive from."""
    lease: Lease | None = None
    """The lease to hold, for a request that is sent."""
    num_readers: int = 1
    """Of the lease; may grow when the request is sent again."""
    keep_seconds: float | None = None
    """Of a finished turn that is held for the next one: how long the lease waits for a reader."""
    host_blocks: BlockLists | None = None
    """Block tables in the host cache, where device memory is staged."""
    block_sizes: tuple[int, ...] = ()
    """Tokens per block of each table; empty if they are the geometry's blocks."""
    content: str | None = None
    """Digest of the whole prompt, to be compared where a push does not wait for the hand-off."""
    traceparent: str | None = None
    """Parent of the request's spans."""


@dataclass
class ConnectorMetadata:
    """A scheduler's message to its workers for one step: what to do with which requests."""

    reqs_to_recv: dict[str, ReqMeta] = field(default_factory=dict)
    """Receive these."""
    reqs_to_save: dict[str, ReqMeta] = field(default_factory=dict)
    """These run in this step and are pushed layer by layer; never also in `reqs_to_recv`."""
    reqs_preempted: set[str] = field(default_factory=set)
    """The blocks of these were taken away; they are computed again."""
    reqs_to_send: dict[str, ReqMeta] = field(default_factory=dict)
    """Hold these under their leases until their readers are done."""
    reqs_to_end: dict[str, str] = field(default_factory=dict)
    """The leases of these end now, and why."""
    reqs_not_held: dict[str, str] = field(default_factory=dict)
    """These will never be sent, and why: tell waiting consumers."""
    reqs_to_come: set[str] = field(default_factory=set)
    """These are going to be computed here, for a push that may be asked for already."""
    reqs_waiting: dict[str, KVTransferParams] = field(default_factory=dict)
    """These are queued: connect to their producers, and keep their leases alive."""
    reqs_to_release: dict[str, KVTransferParams] = field(default_factory=dict)
    """These are no longer wanted: tell their producers."""
    consumer_comes: bool = False
    """A consumer has asked for hellos: leases without a reader last longer, once."""
    reqs_to_abort: set[str] = field(default_factory=set)
    """The engine has given these up while they were being received."""

    def __bool__(self) -> bool:
        return any(vars(self).values())


class AgentMetadata(msgspec.Struct, frozen=True):
    """What a worker contributes to its engine's handshake."""

    engine_id: str
    rank: Rank
    hello: bytes
    """`Agent.hello` of the cache and the lease table."""
