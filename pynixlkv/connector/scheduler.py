"""The scheduler half of a connector: what to fetch, what to hold, what to free.

It knows only requests and block numbers. Each engine has one, next to its scheduler. It talks to
the workers through one `ConnectorMetadata` per step, and hears from them through their reports.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from pynixlkv.connector.leases import LeaseSlots
from pynixlkv.connector.metadata import (
    ConnectorConfig,
    ConnectorMetadata,
    KVTransferParams,
    ParallelSizes,
    ReqMeta,
    RequestInfo,
)
from pynixlkv.errors import ConfigError, ContentMismatch, PoolExhausted, PynixlkvError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pynixlkv.connector.metadata import BlockLists, Lease
    from pynixlkv.connector.staging import HostBlockPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupSpec:
    """How to read the block tables of one group of layers.

    A rule for each kind of table:

    * one block per block of tokens: ``GroupSpec(16)``; with a window,
      ``GroupSpec(16, window=1024)``; with attention inside chunks, ``GroupSpec(16, chunk=8192)``;
    * one slot per block of tokens, of which the one at the last position has the state:
      ``GroupSpec(0, state_tokens=16)``;
    * one slot (or ring) per request: ``GroupSpec(0)``; ``slots=1`` if scratch slots follow it.
    """

    block_size: int
    """Tokens per block of a table (of all ranks together, under context parallelism); 0 for state,
    whose tables are not by position."""
    window: int | None = None
    """Number of last tokens that attention reaches; earlier blocks are neither held nor fetched."""
    chunk: int | None = None
    """Tokens per chunk, if attention stays inside a chunk: blocks before the last one are not
    needed."""
    state_tokens: int | None = None
    """For state whose tables are by position nevertheless: tokens per block. Each block has the
    state after the last of its tokens, so the last block is all that is needed."""
    null_block: int | None = None
    """The block number that stands for "none": at the front of a table, or anywhere in one of
    state, whose other entries are those that carry it."""
    slots: int | None = None
    """Of state: how many entries, the first that are not null, carry it; by default all."""

    @property
    def is_partial(self) -> bool:
        """Whether a request's blocks need not hold all of its tokens."""
        return self.window is not None or self.chunk is not None

    def first_needed(self, position: int) -> int:
        """Return the first position that a token at `position` sees."""
        first = 0 if self.window is None else position - self.window + 1
        return max(first, 0 if self.chunk is None else position // self.chunk * self.chunk, 0)


@dataclass
class _Receiving:
    host_blocks: BlockLists | None
    is_aborted: bool = False


@dataclass
class _Held:
    """A request that is handed over, and its samples, which share its lease."""

    lease: Lease
    meta: ReqMeta
    params: KVTransferParams
    """The hand-off."""
    sibling_group: str | None
    num_samples: int = 1


class ConnectorScheduler:
    """Decides for one engine. Not thread-safe; never blocks.

    Its methods take `blocks`, all block tables of a request from position 0 on, one for each group,
    and `num_computed_tokens`, the number of tokens from position 0 on whose KV is local.

    Parameters
    ----------
    engine_id : str
        This engine.
    groups : sequence of GroupSpec
        One for each group of the KV cache, in its order.
    address : tuple of (str, int)
        Where other engines reach this engine's `pynixlkv.handshake.Handshake`; may be set later.
    parallel : ParallelSizes
        Sizes of the engine's parallel groups.
    config : ConnectorConfig
        Options.
    host_pool : HostBlockPool, optional
        Host blocks for staging, where device memory cannot be registered.
    withheld_tokens : int
        Last tokens of a prompt that producers leave to their consumers, because state and windows
        cannot go back to an earlier token.
    """

    def __init__(
        self,
        engine_id: str,
        groups: Sequence[GroupSpec],
        *,
        address: tuple[str, int] | None = None,
        parallel: ParallelSizes | None = None,
        config: ConnectorConfig | None = None,
        host_pool: HostBlockPool | None = None,
        withheld_tokens: int = 0,
    ) -> None:
        self.engine_id = engine_id
        self.address = address
        self._groups = tuple(groups)
        self._parallel = parallel or ParallelSizes()
        self._config = config or ConnectorConfig()
        self._host_pool = host_pool
        self._withheld_tokens = withheld_tokens
        self._block_sizes = tuple(group.block_size for group in self._groups)
        self._common_block = math.lcm(*(g.block_size for g in self._groups if g.block_size))
        self._slots = LeaseSlots(self._config.max_leases)
        self._next = ConnectorMetadata()
        self._open: dict[str, KVTransferParams] = {}  # nothing has been decided yet
        self._receiving: dict[str, _Receiving] = {}
        self._settled: set[str] = set()  # received, or not to be
        self._held: dict[str, _Held] = {}
        self._consumer_comes = False
        self._pushed_by_layer: set[str] = set()  # their blocks may be in use until the lease ends
        self._first_samples: dict[str, str] = {}  # ids of held requests, by sibling group
        self._turns: dict[str, int] = {}  # blocks of held turns, the oldest turn first
        self._num_turn_blocks = 0
        self._ending: set[str] = set()  # turns that are being released

    # ---- consumer

    def on_new_request(self, request: RequestInfo) -> None:
        """Note that a request has arrived: its producer holds it while it is queued."""
        if request.params.is_fetched and self._is_open(request):
            self._next.reqs_waiting[request.request_id] = self._open[request.request_id]
        if request.params.do_remote_decode and self._config.transfer_mode == "push":
            self._next.reqs_to_come.add(request.request_id)

    def _is_open(self, request: RequestInfo) -> bool:
        if request.request_id in self._settled or request.request_id in self._receiving:
            return False
        if request.request_id not in self._open:
            try:
                self._check(request)
            except PynixlkvError as error:
                if not request.params.is_next_turn:
                    raise
                _log.warning("all of the prompt is computed here: %s", str(error))
                self._settled.add(request.request_id)
                return False
            self._open[request.request_id] = _as_reader(request.params)
        return True

    def _check(self, request: RequestInfo) -> None:
        """Refuse a hand-off that does not fit the request or this engine."""
        if len(request.params.blocks) not in (0, len(self._groups)):
            raise ConfigError(
                f"request {request.request_id!r}: the producer has "
                f"{len(request.params.blocks)} block tables, this engine "
                f"{len(self._groups)} groups of layers"
            )
        if request.params.transfer_mode != self._config.transfer_mode:
            raise ConfigError(
                f"request {request.request_id!r}: the producer is in "
                f"{request.params.transfer_mode!r} mode, this engine in "
                f"{self._config.transfer_mode!r} mode; use one transfer_mode on both sides"
            )
        _check_content(request)

    def get_num_new_matched_tokens(
        self, request: RequestInfo, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be fetched beyond the local ones; may be called repeatedly.

        Returns
        -------
        num_tokens : int or None
            Tokens that can be fetched; 0 if the host pool is too small to stage them; None if its
            blocks are in use: ask again later.
        is_async : bool
            Whether they arrive later.

        Raises
        ------
        ConfigError
            If the request's parameters do not fit this engine.
        ContentMismatch
            If the hand-off is of another prompt. It stays held for the right one.
        """
        if not request.params.is_fetched or not self._is_open(request):
            return 0, False
        count = self._num_fetchable(request) - num_computed_tokens
        fewest = self._config.recompute_threshold if request.params.is_next_turn else 1
        if count < max(fewest, 1):
            return 0, False
        if self._host_pool is not None:
            end = num_computed_tokens + count
            counts = [_num_blocks(g, num_computed_tokens, end) for g in self._groups]
            if not self._host_pool.can_hold(counts):
                return 0, False
            if not self._host_pool.has_free(counts):
                return None, False
        return count, True

    def _num_fetchable(self, request: RequestInfo) -> int:
        count = request.num_prompt_tokens - self._withheld_tokens
        remote = request.params.remote_num_tokens
        if remote is not None:
            if remote > count and any(group.state_tokens for group in self._groups):
                return 0  # state of a later token
            count = min(count, remote)
        if not self._config.partial_blocks:
            count -= count % self._common_block
        return count

    def update_state_after_alloc(
        self,
        request: RequestInfo,
        blocks: BlockLists,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Fetch the promised tokens of a request whose blocks have been allocated.

        `num_external_tokens` is what `get_num_new_matched_tokens` returned. Later calls for the
        same request have no effect.
        """
        if not request.params.is_fetched or not self._is_open(request):
            return
        request_id, remote = request.request_id, self._open[request.request_id]
        if num_external_tokens == 0:
            del self._open[request_id]
            self._next.reqs_waiting.pop(request_id, None)
            self._settled.add(request_id)
            self._next.reqs_to_release[request_id] = remote
            return
        end = num_computed_tokens + num_external_tokens
        meta = self._stage(self._cut(blocks, num_computed_tokens, end))
        if meta is None:
            raise PoolExhausted(
                f"request {request_id!r}: the host blocks that were free when "
                "get_num_new_matched_tokens was called are not; schedule in the order of the calls"
            )
        content = None
        if remote.lease is None:
            content = _prompt_content(request, self._withheld_tokens)
        meta = replace(meta, remote=remote, content=content, traceparent=request.trace())
        del self._open[request_id]
        self._next.reqs_waiting.pop(request_id, None)
        self._receiving[request_id] = _Receiving(meta.host_blocks)
        self._next.reqs_to_recv[request_id] = meta

    def _cut(self, blocks: BlockLists, begin: int, end: int) -> ReqMeta:
        """Return the parts of block tables that cover positions from begin to end."""
        cuts = [
            cut_table(spec, table, begin, end)
            for spec, table in zip(self._groups, blocks, strict=True)
        ]
        return ReqMeta(
            blocks=tuple(table for table, _ in cuts),
            starts=tuple(start for _, start in cuts),
            num_tokens=end,
            block_sizes=self._block_sizes,
        )

    def _stage(self, meta: ReqMeta) -> ReqMeta | None:
        """Add host blocks if there is a host pool; return None if too few are free."""
        if self._host_pool is None:
            return meta
        counts = [len(table) for table in meta.blocks]
        if not self._host_pool.has_free(counts):
            return None
        return replace(meta, host_blocks=self._host_pool.allocate(counts))

    # ---- producer

    def request_finished(
        self,
        request: RequestInfo,
        blocks: BlockLists,
        num_computed_tokens: int,
        *,
        is_complete: bool = True,
        turn_id: str | None = None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide what happens to the blocks of a request that has ended here.

        Parameters
        ----------
        request : RequestInfo
            The request.
        blocks : tuple of tuple of int
            Its block tables.
        num_computed_tokens : int
            Tokens whose KV is in the blocks, and final.
        is_complete : bool
            False if it was aborted or failed.
        turn_id : str, optional
            The id under which it is reported and fetched if it is held for the next turn; by
            default its own.

        Returns
        -------
        delay_free : bool
            Whether the blocks must stay until the workers report the request as sent or, if it is
            being received, as received or failed.
        params : dict or None
            ``kv_transfer_params`` for the consumer, if it is handed over, or for the producer of
            the next turn, if it is held for that.
        """
        request_id, why = request.request_id, "the producer gave the request up"
        self._next.reqs_waiting.pop(request_id, None)
        if request_id in self._receiving:
            if request.params.do_remote_decode:
                self._not_held(request, why)
            meta = self._next.reqs_to_recv.pop(request_id, None)
            if meta is not None:  # the workers do not know of it yet
                self._free_host(self._receiving.pop(request_id).host_blocks)
                self._next.reqs_to_release[request_id] = meta.remote or request.params
                return False, None
            self._next.reqs_to_abort.add(request_id)
            self._receiving[request_id].is_aborted = True
            return True, None
        if request_id not in self._settled and request.params.is_fetched:
            # Rejected or aborted before anything was fetched.
            remote = self._open.pop(request_id, None)
            if remote or _is_own(request):
                self._next.reqs_to_release[request_id] = remote or _as_reader(request.params)
        self._settled.add(request_id)  # in case of another call after an error
        ended = self._end(
            request, blocks, num_computed_tokens, is_complete=is_complete, turn_id=turn_id
        )
        self._settled.remove(request_id)
        return ended

    def _end(
        self,
        request: RequestInfo,
        blocks: BlockLists,
        num_computed_tokens: int,
        *,
        is_complete: bool,
        turn_id: str | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand a request over that does not receive, hold it as a turn, or neither."""
        request_id, why = request.request_id, "the producer gave the request up"
        held = self._held.get(request_id)
        if held is not None:  # it has finished before
            if is_complete:
                return True, held.params.to_dict()
            self._close_group(request_id)
            self._next.reqs_to_end[request_id] = why
            return True, None
        if not request.params.do_remote_decode:
            if not is_complete or not self._may_keep(request, blocks):
                return False, None
            num_computed_tokens -= num_computed_tokens % self._common_block
            request = replace(request, request_id=turn_id or request_id)
            return self._hand_over(request, blocks, num_computed_tokens, was_pushed=False)
        self._next.reqs_to_save.pop(request_id, None)
        was_pushed = request_id in self._pushed_by_layer
        self._pushed_by_layer.discard(request_id)
        if not is_complete:
            return self._not_held(request, why)
        return self._hand_over(request, blocks, num_computed_tokens, was_pushed=was_pushed)

    def _may_keep(self, request: RequestInfo, blocks: BlockLists) -> bool:
        """Whether a finished turn can be held for the next one."""
        return (
            request.params.do_remote_prefill
            and request.params.sibling_group is None  # samples have no common next turn
            and 0 < sum(map(len, blocks)) <= self._config.conversation_blocks
            # State is that of the last token, whose step may not be over.
            and all(group.block_size and group.window != 1 for group in self._groups)
        )

    def _make_room(self, request_id: str, num_blocks: int) -> None:
        """Count the blocks of a turn that is going to be held; the oldest ones make room."""
        missing = self._num_turn_blocks + num_blocks - self._config.conversation_blocks
        self.release_turns(missing, "its blocks are needed for a newer turn")
        self._turns[request_id] = num_blocks
        self._num_turn_blocks += num_blocks

    def release_turns(self, num_blocks: int, why: str) -> None:
        """End the leases of the oldest turns that are held, until they had this many blocks."""
        left = self._num_turn_blocks - num_blocks
        while self._turns and self._num_turn_blocks > left:
            request_id = next(iter(self._turns))
            self._num_turn_blocks -= self._turns.pop(request_id)
            self._ending.add(request_id)
            self._next.reqs_to_end[request_id] = why

    def _hand_over(
        self, request: RequestInfo, blocks: BlockLists, num_tokens: int, *, was_pushed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        if not self._config.partial_blocks:
            num_tokens -= num_tokens % self._common_block
        if num_tokens == 0:
            return self._not_held(request, "there is nothing to hand over")
        if self.address is None:
            raise ConfigError("the scheduler's address is not set; hand-offs need to name it")
        cut = self._cut(blocks, 0, num_tokens)
        is_kept = not request.params.do_remote_decode
        if any(
            (is_kept or group.is_partial) and start > group.first_needed(num_tokens)
            for group, start in zip(self._groups, cut.starts, strict=True)
        ):
            return self._not_held(request, "what its next token sees is gone")
        content = None if request.content is None else request.content(num_tokens)
        if self._config.transfer_mode == "push":
            cut = replace(cut, content=_prompt_content(request))
        group = request.params.sibling_group
        first = None if group is None else self._first_samples.get(group)
        if first is not None:
            held = self._held[first].params
            is_equal = (held.remote_num_tokens, held.content) == (num_tokens, content)
            if is_equal and not was_pushed:
                self._not_held(request, f"it is handed over as {first!r}")
                return False, self._share(first, request).to_dict()
        if not self._slots.num_free:
            return self._not_held(request, "all leases of the producer are taken")
        staged = self._stage(cut)
        lease = self._slots.take() if staged is not None else None
        if staged is None or lease is None:
            return self._not_held(request, "the producer's host blocks are all in use")
        num_readers = request.params.num_readers
        trace = request.trace()
        meta = replace(staged, lease=lease, num_readers=num_readers, traceparent=trace)
        if is_kept:
            self._make_room(request.request_id, sum(map(len, blocks)))
            num_readers = 1
            meta = replace(meta, num_readers=1, keep_seconds=self._config.conversation_seconds)
        self._next.reqs_to_send[request.request_id] = meta
        params = KVTransferParams(
            do_remote_prefill=not is_kept,
            do_remote_decode=is_kept,
            remote_engine_id=self.engine_id,
            remote_request_id=request.request_id,
            remote_host=self.address[0],
            remote_port=self.address[1],
            remote_block_ids=meta.host_blocks or meta.blocks,
            remote_starts=meta.starts,
            remote_block_sizes=meta.block_sizes,
            remote_num_tokens=num_tokens,
            content=content,
            tp_size=self._parallel.tp,
            pp_size=self._parallel.pp,
            dcp_size=self._parallel.dcp,
            lease=str(lease),
            lease_duration=self._config.lease_duration,
            traceparent=trace,
            transfer_mode=self._config.transfer_mode,
            num_readers=num_readers,
        )
        self._held[request.request_id] = _Held(lease, meta, params, group)
        if group is not None:
            self._first_samples[group] = request.request_id
        return True, params.to_dict()

    def _share(self, first: str, request: RequestInfo) -> KVTransferParams:
        """Let one more reader into the lease of another sample of the same prompt."""
        held = self._held[first]
        held.num_samples += 1
        num_readers = max(held.num_samples, held.meta.num_readers, request.params.num_readers)
        held.meta = self._next.reqs_to_send[first] = replace(held.meta, num_readers=num_readers)
        held.params = msgspec.structs.replace(held.params, num_readers=num_readers)
        return held.params

    def _close_group(self, request_id: str) -> None:
        """Let no further sample share the lease of a request."""
        group = self._held[request_id].sibling_group
        if group is not None and self._first_samples.get(group) == request_id:
            del self._first_samples[group]

    def _not_held(self, request: RequestInfo, why: str) -> tuple[bool, None]:
        self._next.reqs_not_held[request.request_id] = why
        return False, None

    def save(self, request: RequestInfo, blocks: BlockLists, num_computed_tokens: int) -> None:
        """Push the layers of a request that runs in this step as they finish.

        `num_computed_tokens` includes the tokens of the step.
        """
        if (
            request.params.do_remote_decode
            and self._config.transfer_mode == "push"
            and self._host_pool is None  # a staged request is sent when it is complete
        ):
            cut = self._cut(blocks, 0, num_computed_tokens)
            self._pushed_by_layer.add(request.request_id)
            self._next.reqs_to_save[request.request_id] = replace(
                cut, content=_prompt_content(request)
            )

    def request_preempted(self, request_id: str) -> None:
        """Note that the blocks of a running request have been taken away.

        Layers that were pushed are pushed again once they have been recomputed. Call it before
        `build_connector_meta` of the step in which the blocks may have a new use.
        """
        self._next.reqs_to_save.pop(request_id, None)
        self._next.reqs_preempted.add(request_id)

    # ---- each step

    def build_connector_meta(self) -> ConnectorMetadata:
        """Return the message to the workers for this step, and start the next one."""
        built, self._next = self._next, ConnectorMetadata()
        built.consumer_comes, self._consumer_comes = self._consumer_comes, False
        return built

    def consumer_comes(self) -> None:
        """Note that a consumer has asked for hellos; may be called from another thread.

        Its first heartbeat can take longer than a lease on a busy machine.
        """
        self._consumer_comes = True

    def update_finished(
        self,
        *,
        sent: Collection[str] = (),
        received: Collection[str] = (),
        failed: Collection[str] = (),
    ) -> None:
        """Take reports of `Finished`; a request is `sent` once every worker has reported it."""
        for request_id in sent:
            if request_id in self._held:
                self._close_group(request_id)
                held = self._held.pop(request_id)
                self._num_turn_blocks -= self._turns.pop(request_id, 0)
                self._ending.discard(request_id)
                self._slots.give_back(held.lease)
                self._free_host(held.meta.host_blocks)
        for request_id in (*received, *failed):
            receiving = self._receiving.pop(request_id, None)
            if receiving is not None:
                self._free_host(receiving.host_blocks)
                if not receiving.is_aborted:  # otherwise the engine has forgotten it
                    self._settled.add(request_id)

    def _free_host(self, blocks: BlockLists | None) -> None:
        if blocks is not None and self._host_pool is not None:
            self._host_pool.free(blocks)

    @property
    def is_releasing_turns(self) -> bool:
        """Whether turns are to be released that the workers have not reported as sent."""
        return bool(self._ending)

    @property
    def num_free_leases(self) -> int:
        """Requests that can be held in addition."""
        return self._slots.num_free


def _check_content(request: RequestInfo) -> None:
    """Refuse the hand-off of another prompt."""
    params, size = request.params, request.num_prompt_tokens
    if request.content is None or params.lease is None:
        return  # without a lease the producer compares, when it is asked to push
    count = params.remote_num_tokens or size
    expected = request.content(count) if count <= size else ""
    seen = params.content or ""
    if not seen or seen != expected:
        wanted = expected or f"at most {size} tokens"
        raise ContentMismatch(
            f"request {request.request_id!r}: the hand-off is of another prompt: the content of "
            f"its {count} tokens is {seen or 'not named'}; expected {wanted}. Pass each answer of "
            "the producer on with the prompt that it answers",
            expected=expected,
            seen=seen,
        )


def _prompt_content(request: RequestInfo, num_withheld: int = 0) -> str | None:
    """Return the digest of a prompt as the producer has it."""
    count = request.num_prompt_tokens - num_withheld
    return None if request.content is None else request.content(count)


def _is_own(request: RequestInfo) -> bool:
    """Whether the request is a reader of its hand-off."""
    try:
        _check_content(request)
    except ContentMismatch:
        return False
    return True


def _as_reader(remote: KVTransferParams) -> KVTransferParams:
    """Return a hand-off as one reader of its lease."""
    # With a next turn, the router tells the producer the readers of the lease to come.
    num_readers = 1 if remote.is_next_turn else remote.num_readers
    return msgspec.structs.replace(remote, reader=secrets.randbits(62), num_readers=num_readers)


def _ceil(tokens: int, spec: GroupSpec) -> int:
    return -(-tokens // spec.block_size)


def _num_blocks(spec: GroupSpec, begin: int, end: int) -> int:
    """Return the largest number of blocks that `cut_table` returns."""
    return _ceil(end, spec) - begin // spec.block_size if spec.block_size else 1


def cut_table(
    spec: GroupSpec, table: Sequence[int], begin: int, end: int
) -> tuple[tuple[int, ...], int]:
    """Return the part of a block table that covers positions, and that of its first block."""
    if spec.state_tokens:
        at = (end - 1) // spec.state_tokens
        slot = tuple(table[at : at + 1])
        if not slot or spec.null_block in slot:
            raise ConfigError(
                f"entry {at} of a table of {len(table)} blocks has no state of token {end - 1}"
            )
        return slot, 0
    if spec.block_size == 0:
        return tuple(block for block in table if block != spec.null_block)[: spec.slots], 0
    begin = max(begin, spec.first_needed(end - 1))
    first, last = begin // spec.block_size, _ceil(end, spec)
    cut = tuple(table[first:last])
    if len(cut) < last - first:
        raise ConfigError(
            f"a table of {len(table)} blocks of {spec.block_size} tokens does not reach {end}"
        )
    if spec.null_block is not None:
        nulls = 0
        while spec.is_partial and nulls < len(cut) and cut[nulls] == spec.null_block:
            nulls += 1
        cut, first = cut[nulls:], first + nulls
        if spec.null_block in cut:
            raise ConfigError(
                f"block {spec.null_block}, which stands for none, is inside the table of positions "
                f"{first * spec.block_size} to {end}"
            )
    return cut, first * spec.block_size
