"""An imaginary serving engine on the connector kit, whose KV can be predicted element by element.

The value of a token's KV depends on the prompt, the layer, K or V, the head, the position and the
element, and on nothing else; so whatever arrives anywhere can be compared with what should be.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pynixlkv import KVCache
from pynixlkv.connector.metadata import (
    ConnectorConfig,
    KVTransferParams,
    ParallelSizes,
    RequestInfo,
)
from pynixlkv.connector.scheduler import ConnectorScheduler, GroupSpec
from pynixlkv.connector.worker import ConnectorWorker, Finished
from pynixlkv.topology import held_heads, held_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future

    import numpy.typing as npt

    from pynixlkv.agent import Agent
    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.connector.receiver import RequestEnd
    from pynixlkv.connector.remote_engines import Fetch
    from pynixlkv.connector.spans import HandOffSpan
    from pynixlkv.connector.staging import DeviceEvent
    from pynixlkv.connector.stats import StatsSnapshot
    from pynixlkv.types import Rank

POISON = 0xDEAD


def content(prompt: int, num_tokens: int) -> str:
    """Name what decides the KV of a prompt's first tokens."""
    return f"prompt {prompt} up to {num_tokens}"


class ToyWorker(ConnectorWorker):
    """Knows what its other threads have not finished."""

    def __init__(self, *args: object, **options: object) -> None:
        self.unfinished: set[Future[object]] = set()
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _submit(self, executor: Executor, function: Callable[[], object]) -> Any:
        future = super()._submit(executor, function)
        self.unfinished.add(future)
        future.add_done_callback(self.unfinished.discard)
        return future


@dataclass(frozen=True)
class Model:
    """What both sides agree about."""

    layers: int = 2
    kv_heads: int | None = 4
    state_heads: int | None = 0
    """Shards of the state that each layer has beside its KV: None if every rank has all of it, 0 if
    there is none."""
    dim: int = 8
    packing: str = ""
    """Name of a packing that makes pages opaque."""
    is_apart: bool = False
    """Whether an engine describes each layer as a group."""
    knows_heads: bool = True
    """Whether ranks of one head know how many the model has."""

    def kv(self, prompt: int, layers: range, heads: range, tokens: range) -> npt.NDArray[np.uint16]:
        """Return the KV of a prompt, shape (layers, 2 or 1, heads, tokens, dim)."""
        kinds = 1 if self.kv_heads is None else 2
        index = np.ix_(list(layers), range(kinds), list(heads), list(tokens), range(self.dim))
        layer, kind, head, token, dim = (axis.astype(np.uint64) for axis in index)
        mixed = (((prompt * 31 + layer) * 7 + kind) * 61 + head) * 8191 + token
        mixed = (mixed * 17 + dim) * np.uint64(0x9E3779B97F4A7C15)
        values: npt.NDArray[np.uint16] = (mixed >> np.uint64(48)).astype(np.uint16)
        return values

    def state(
        self, prompt: int, layers: range, shards: range, num_tokens: int
    ) -> npt.NDArray[np.uint16]:
        """Return the state after a prompt's first tokens, shape (layers, shards, dim)."""
        after = range(num_tokens, num_tokens + 1)
        return self.kv(prompt + 2**20, layers, shards, after)[:, 0, :, 0]


class ToyRank:
    """One worker of a toy engine: its cache, its agent and its half of the connector."""

    def __init__(
        self,
        model: Model,
        rank: Rank,
        parallel: ParallelSizes,
        *,
        axes: str,
        block_size: int,
        num_blocks: int,
        agent: Agent,
        worker: ToyWorker,
    ) -> None:
        self.model, self.agent, self.worker = model, agent, worker
        self.axes, self.block_size = axes.replace("L", ""), block_size
        self.layers = held_layers(rank[0], parallel.pp, model.layers)
        self.heads = held_heads(rank[1], parallel.tp, model.kv_heads)
        has_state = model.state_heads != 0
        self.shards = held_heads(rank[1], parallel.tp, model.state_heads) if has_state else range(0)
        # Slots are counted from the end, unlike blocks.
        self.states = np.full(
            (len(self.layers), num_blocks, len(self.shards), model.dim), POISON, np.uint16
        )
        sizes = {"K": 2, "B": num_blocks, "H": len(self.heads), "N": block_size, "D": model.dim}
        sizes["L"] = len(self.layers)
        dims = [sizes[letter] for letter in axes]
        if "L" in axes:
            whole = np.full(dims, POISON, np.uint16)
            given = {"all": whole}
            each = iter(np.moveaxis(whole, axes.index("L"), 0))
        else:
            given = {f"layer.{i}": np.full(dims, POISON, np.uint16) for i in self.layers}
            each = iter(given.values())
        self.tensors = {f"layer.{i}": next(each) for i in self.layers}
        is_exact = model.knows_heads or len(self.heads) > 1
        tensors = list(self.on_device(given).items())
        step = 1 if model.is_apart else len(self.layers)
        self.cache = KVCache.combine(
            *(
                KVCache.from_tensors(
                    dict(tensors[at : at + step]),
                    axes=axes,
                    kv_heads=model.kv_heads if is_exact else parallel.tp,
                    has_exact_heads=is_exact,
                    tp=(rank[1], parallel.tp),
                    layers=list(self.layers)[at : at + step],
                    group=f"{KVCache.DEFAULT_GROUP}{at or ''}",
                    kind=KVCache.DEFAULT_GROUP,
                    table=KVCache.DEFAULT_GROUP,
                    dtype=f"uint16:{model.packing}" if model.packing else None,
                    opaque_axes="HND" if model.packing else "",
                )
                for at in range(0, len(self.layers), step)
            )
        )
        if has_state:
            state = KVCache.from_tensors(
                self.on_device({"states": self.states}), axes="LBHD", kv_heads=model.state_heads,
                tp=(rank[1], parallel.tp), layers=list(self.layers), group="state",
            )  # fmt: skip
            self.cache = KVCache.combine(self.cache, state)
        self.metadata = worker.register_kv_caches(self.cache)

    def on_device(self, tensors: dict[str, npt.NDArray[np.uint16]]) -> dict[str, Any]:
        """Return the tensors whose bytes move: those that the processor computes in."""
        return dict(tensors)

    def _by_block(self, tensor: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Return a view of a layer, shape (blocks, 2 or 1, heads, block size, dim)."""
        letters = self.axes
        for letter in "KH":
            if letter not in letters:
                tensor, letters = tensor[None], letter + letters
        view: npt.NDArray[np.uint16] = tensor.transpose(
            [letters.index(letter) for letter in "BKHND"]
        )
        return view

    def write(
        self,
        prompt: int,
        blocks: Sequence[int],
        tokens: range,
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Compute the KV of some tokens, whose blocks are given from position 0 on."""
        where = np.array(blocks, np.int64)[np.array(tokens, np.int64) // self.block_size]
        for layer in self.layers if layers is None else layers:
            values = self.model.kv(prompt, range(layer, layer + 1), self.heads, tokens)[0]
            view = self._by_block(self.tensors[f"layer.{layer}"])
            view[where, :, :, np.array(tokens, np.int64) % self.block_size] = values.transpose(
                2, 0, 1, 3
            )
            if tokens:
                self.states[self.layers.index(layer), -1 - blocks[0]] = self.model.state(
                    prompt, range(layer, layer + 1), self.shards, tokens.stop
                )[0]

    def read(self, blocks: Sequence[int], tokens: range) -> npt.NDArray[np.uint16]:
        """Return the KV of some tokens, as `Model.kv` does."""
        where = np.array(blocks, np.int64)[np.array(tokens, np.int64) // self.block_size]
        layers = [
            self._by_block(tensor)[where, :, :, np.array(tokens, np.int64) % self.block_size]
            for tensor in self.tensors.values()
        ]
        values: npt.NDArray[np.uint16] = np.stack(layers).transpose(0, 2, 3, 1, 4)
        return values

    def holds(self, prompt: int, blocks: Sequence[int], tokens: range) -> bool:
        """Whether the KV of the prompt's tokens is in the blocks, and its state after them."""
        kv = self.model.kv(prompt, self.layers, self.heads, tokens)
        state = self.model.state(prompt, self.layers, self.shards, tokens.stop)
        return np.array_equal(self.read(blocks, tokens), kv) and np.array_equal(
            self.states[:, -1 - blocks[0]], state
        )

    def poison(self, blocks: Sequence[int]) -> None:
        """Let other requests overwrite blocks."""
        for tensor in self.tensors.values():
            self._by_block(tensor)[list(blocks)] = POISON
        self.states[:, [-1 - block for block in blocks]] = POISON


@dataclass
class ToyRequest:
    info: RequestInfo
    prompt: int
    blocks: list[int]
    num_computed: int = 0
    until: int = 0
    """Its KV is here, or arrives, up to this position."""


@dataclass
class Outcome:
    """What has become of requests in one or more steps."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, list[RequestEnd]] = field(default_factory=dict)


class ToyEngine:
    """Scheduler and workers in one process, stepped by hand.

    `make_agent` makes the agent of a rank from its name; `fetch` replaces `Handshake`.
    """

    rank_class = ToyRank

    def __init__(
        self,
        engine_id: str,
        model: Model,
        make_agent: Callable[[str], Agent],
        fetch: Fetch | None,
        *,
        axes: str = "KBHND",
        tp: int = 1,
        pp: int = 1,
        block_size: int = 4,
        num_blocks: int = 16,
        config: ConnectorConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        longest_gap: float = math.inf,
        background: bool = False,
        draw: Callable[[], float] = lambda: 0.5,
    ) -> None:
        self.id, self.model, self.block_size = engine_id, model, block_size
        self.parallel = ParallelSizes(pp=pp, tp=tp)
        config = config or ConnectorConfig()
        self.config = config
        groups = [GroupSpec(block_size), *([GroupSpec(0)] if model.state_heads != 0 else [])]
        self.scheduler = ConnectorScheduler(
            engine_id, groups, parallel=self.parallel, config=config
        )
        self.spans: list[HandOffSpan] = []
        self.ranks = []
        for stage in range(pp):
            for rank in range(tp):
                agent = make_agent(f"{engine_id}.{stage}.{rank}")
                worker = ToyWorker(
                    agent,
                    engine_id=engine_id,
                    rank=(stage, rank),
                    parallel=self.parallel,
                    config=config,
                    fetch=fetch,
                    background=background,
                    clock=clock,
                    longest_gap=longest_gap,
                    draw=draw,
                    tracer=self.spans.append,
                )
                self.ranks.append(
                    self.rank_class(
                        model, (stage, rank), self.parallel, axes=axes, block_size=block_size,
                        num_blocks=num_blocks, agent=agent, worker=worker,
                    )
                )  # fmt: skip
        self.background = background
        self.event: DeviceEvent | None = None
        self.layer_events: dict[int, DeviceEvent] = {}
        self._running: list[tuple[ToyRequest, range]] = []
        self.num_blocks, self.free = num_blocks, list(range(num_blocks))
        self.requests: dict[str, ToyRequest] = {}
        self._reports: dict[str, list[object]] = {}

    @property
    def hellos(self) -> dict[Rank, bytes]:
        return {rank.metadata.rank: rank.metadata.hello for rank in self.ranks}

    @property
    def stats(self) -> StatsSnapshot:
        return self.ranks[0].worker.stats.snapshot()

    @property
    def num_running(self) -> int:
        """Transfers that all agents have begun and not ended."""
        return sum(rank.agent._native.running for rank in self.ranks)

    def flush(self) -> None:
        """Wait until what was sent to the agents has arrived: they look between two calls."""
        for rank in self.ranks:
            for _ in range(2):
                rank.agent._native.metadata()

    def allocate(self, num_tokens: int, num_there: int = 0) -> list[int]:
        """Take blocks for tokens, beyond those that are there; the oldest free ones first."""
        count = -(-num_tokens // self.block_size) - num_there
        assert count <= len(self.free), "the toy engine is out of blocks"
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _tables(self, blocks: Sequence[int]) -> BlockLists:
        """Return the block tables of a request: its blocks, and the slot of its state."""
        slots = tuple(self.num_blocks - 1 - block for block in blocks[:1])
        return (tuple(blocks),) if self.model.state_heads == 0 else (tuple(blocks), slots)

    # ---- producer

    def prefill(
        self, request_id: str, prompt: int, num_tokens: int, **params: object
    ) -> dict[str, object] | None:
        """Compute a prompt and hand it over; the blocks are freed when the scheduler allows."""
        info = RequestInfo(
            request_id,
            num_tokens,
            KVTransferParams.from_dict({"do_remote_decode": True, **params}),
            partial(content, prompt),
        )
        blocks = self.allocate(num_tokens)
        for rank in self.ranks:
            rank.write(prompt, blocks, range(num_tokens))
        self.requests[request_id] = ToyRequest(info, prompt, blocks, num_tokens)
        keeps, answer = self.scheduler.request_finished(info, self._tables(blocks), num_tokens)
        if not keeps:
            self._drop(request_id)
        return answer

    def begin(self, request_id: str, prompt: int, num_tokens: int, **params: object) -> None:
        """Take a prompt that is computed in chunks, to be handed over."""
        asked = KVTransferParams.from_dict({"do_remote_decode": True, **params})
        info = RequestInfo(request_id, num_tokens, asked, partial(content, prompt))
        self.requests[request_id] = ToyRequest(info, prompt, [])

    def compute(self, request_id: str, until: int) -> None:
        """Compute a prompt up to a position in the next step, layer by layer."""
        request = self.requests[request_id]
        request.blocks += self.allocate(until, len(request.blocks))
        self._running.append((request, range(request.num_computed, until)))
        request.num_computed = until
        self.scheduler.save(request.info, self._tables(request.blocks), until)

    def preempt(self, request_id: str) -> list[int]:
        """Take the blocks of a prompt away, to be computed again from the start."""
        request = self.requests[request_id]
        taken, request.blocks, request.num_computed = request.blocks, [], 0
        self._running = [(running, _) for running, _ in self._running if running is not request]
        self.free += taken
        self.scheduler.request_preempted(request_id)
        return taken

    def hand_over(self, request_id: str, *, is_complete: bool = True) -> dict[str, object] | None:
        """End a prompt that was computed in chunks."""
        request = self.requests[request_id]
        keeps, answer = self.scheduler.request_finished(
            request.info, self._tables(request.blocks), request.num_computed,
            is_complete=is_complete,
        )  # fmt: skip
        if not keeps:
            self._drop(request_id)
        return answer

    # ---- consumer

    def arrive(self, request_id: str, prompt: int, num_tokens: int, params: object) -> RequestInfo:
        made = KVTransferParams.from_dict(params)  # type: ignore[arg-type]
        info = RequestInfo(request_id, num_tokens, made, partial(content, prompt))
        self.requests[request_id] = ToyRequest(info, prompt, [])
        self.scheduler.on_new_request(info)
        return info

    def schedule(self, request_id: str, num_computed: int = 0) -> int:
        """Give a queued request its blocks; returns how many tokens are fetched."""
        request = self.requests[request_id]
        count, _ = self.scheduler.get_num_new_matched_tokens(request.info, num_computed)
        assert count is not None
        request.blocks = self.allocate(request.info.num_prompt_tokens)
        for rank in self.ranks:
            rank.write(request.prompt, request.blocks, range(num_computed))
        self.scheduler.update_state_after_alloc(
            request.info, self._tables(request.blocks), num_computed, count
        )
        request.num_computed, request.until = num_computed, num_computed + count
        return count

    def go_on(self, request_id: str, until: int, begin: int | None = None) -> None:
        """Compute a request up to a position, by default from what is there of it."""
        request = self.requests[request_id]
        tokens = range(request.until if begin is None else begin, until)
        request.blocks += self.allocate(until, len(request.blocks))
        for rank in self.ranks:
            rank.write(request.prompt, request.blocks, tokens)
        request.num_computed = request.until = until

    def finish(self, request_id: str) -> None:
        """End a request of a consumer, whatever it is at."""
        request = self.requests[request_id]
        keeps, _ = self.scheduler.request_finished(
            request.info, self._tables(request.blocks), 0, is_complete=False
        )
        if not keeps:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self.free += self.requests.pop(request_id).blocks

    def holds(self, request_id: str) -> bool:
        """Whether all ranks have the right KV of a request, or of what is fetched of a turn."""
        request = self.requests[request_id]
        is_turn = request.info.params.do_remote_decode
        tokens = range(request.until if is_turn else request.info.num_prompt_tokens)
        return all(rank.holds(request.prompt, request.blocks, tokens) for rank in self.ranks)

    # ---- steps

    def step(self) -> Outcome:
        """Run one step: tell the workers, let them work, collect what all of them report."""
        metadata = self.scheduler.build_connector_meta()
        outcome, running, self._running = Outcome(), self._running, []
        for rank in self.ranks:
            rank.worker.start_load_kv(metadata, self.event)
            for layer in rank.layers if running else ():
                for request, tokens in running:
                    rank.write(request.prompt, request.blocks, tokens, layers=[layer])
                rank.worker.save_kv_layer(layer, self.layer_events.get(layer))
            if not self.background:
                rank.worker.poll()
            with_errors = rank.worker.get_block_ids_with_load_errors()
            finished = rank.worker.get_finished()
            failed = {b for end in finished.failed.values() for table in end.blocks for b in table}
            assert with_errors == failed or self.background
            self._collect(finished, outcome)
        self.scheduler.update_finished(
            sent=outcome.sent, received=outcome.received, failed=outcome.failed
        )
        for request_id in outcome.sent:
            self._drop(request_id)
        return outcome

    def _collect(self, finished: Finished, outcome: Outcome) -> None:
        """Count reports: a request is sent or received when every worker says so."""
        reports: dict[str, object] = dict.fromkeys(finished.sent, "sent")
        reports |= dict.fromkeys(finished.received, "received")
        reports |= finished.failed
        for request_id, report in reports.items():
            seen = self._reports.setdefault(request_id, [])
            seen.append(report)
            assert len(seen) <= len(self.ranks), f"{request_id} was reported twice: {seen}"
            if len(seen) < len(self.ranks):
                continue
            del self._reports[request_id]
            failures = [r for r in seen if r not in ("sent", "received")]
            if failures:
                outcome.failed[request_id] = failures  # type: ignore[assignment]
            elif seen[0] == "sent":
                outcome.sent.add(request_id)
            else:
                outcome.received.add(request_id)

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.shutdown()
        for rank in self.ranks:
            assert rank.agent.close(), f"{rank.agent.name!r} is not quiet"
