"""`PyNixlKVConnector`: translates vLLM's types to `pynixlkv.connector` and back."""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pynixlkv.connector.metadata import (
    ConnectorMetadata,
    EndState,
    KVTransferParams,
    ParallelSizes,
    RequestInfo,
)
from pynixlkv.connector.scheduler import ConnectorScheduler
from pynixlkv.connector.staging import HostBlockPool, HostStaging, make_host_tensors
from pynixlkv.connector.stats import ConnectorStats
from pynixlkv.connector.worker import ConnectorWorker, Finished
from pynixlkv.errors import ConfigError, ContentMismatch, PynixlkvError
from pynixlkv.handshake import Handshake
from pynixlkv.vllm import log_as_vllm, releases
from pynixlkv.vllm.caches import (
    ParallelPlace,
    group_specs,
    kv_cache,
    layer_number,
    withheld_tokens,
)
from pynixlkv.vllm.content import content_digest, numbers_features
from pynixlkv.vllm.facts import compatibility, fp8_format
from pynixlkv.vllm.host import BlockCopy, processors_of_parent, work_so_far
from pynixlkv.vllm.options import Options
from pynixlkv.vllm.stats import PyNixlKVPromMetrics, PyNixlKVStats
from pynixlkv.vllm.tracing import make_tracer, parent_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from typing_extensions import Self
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pynixlkv.connector.metadata import AgentMetadata, BlockLists
    from pynixlkv.nixl import NixlAgent
    from pynixlkv.ucx import UcxAgent

log_as_vllm()
_log = logging.getLogger(__name__)

_IDLE_STEP_S, _IDLE_STEP_CPU_S = 0.002, 0.02
"""vLLM makes steps as fast as it can while requests are awaited or held. If nothing runs, a step
waits this long for news, instead of taking the processor from those that make them. On the CPU, a
step is longer, and its processors are those that move the blocks."""

_SAMPLE = re.compile(r"\d+_(.+)", re.DOTALL)
"""The id that vLLM gives each of several samples of one request: its number, and that one's id."""


@dataclass
class _StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to the workers for one step."""

    connector: ConnectorMetadata
    rejected: dict[str, str] = field(default_factory=dict)
    """Requests with invalid parameters, and why: they fail as a failed load does."""
    rejected_blocks: set[int] = field(default_factory=set)
    """Their blocks."""
    is_idle: bool = False
    """Nothing runs: requests are only awaited, or held for their readers."""


@dataclass
class _WorkerHello(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What vLLM collects from each worker for the handshake.

    The facts are a worker's, since loading the model changes settings in the workers only.
    """

    agent: AgentMetadata
    compatibility: Mapping[str, str]


class PyNixlKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Moves KV blocks between vLLM engines with pynixlkv.

    vLLM creates one in the scheduler's process and one in each worker. Its options are those of
    `pynixlkv.vllm.options.Options`.
    """

    _cache_hit_source = releases.cache_hit_source()

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Check vLLM's interface before Python refuses to make an abstract class."""
        releases.check(cls)
        made: Self = super().__new__(cls)
        return made

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        self._options = Options.read(config.kv_connector_extra_config)
        releases.refuse_what_is_missing(vllm_config, kv_cache_config)
        self._engine_id = str(config.engine_id)
        self._dcp = vllm_config.parallel_config.decode_context_parallel_size
        # The facts, whose digest of the weights reads files, are the workers' alone.
        facts = compatibility(vllm_config) if role is KVConnectorRole.WORKER else {}
        self._settings = self._options.connector_config(facts, kv_cache_config.num_blocks)
        if self._options.bidirectional_kv_xfer:
            _check_roles(config)
        parallel = vllm_config.parallel_config
        self._parallel = ParallelSizes(
            pp=parallel.pipeline_parallel_size, tp=parallel.tensor_parallel_size, dcp=self._dcp
        )
        self._handshake: Handshake | None = None
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._stats = ConnectorStats()  # of the scheduler; the worker half has its own
        self._agent: NixlAgent | UcxAgent | None = None
        self._infos: dict[str, RequestInfo] = {}
        self._computed: dict[str, int] = {}
        self._rejected: dict[str, str] = {}
        # Block tables of the requests whose layers are pushed as they finish.
        self._running_tables: dict[str, tuple[list[int], ...]] = {}
        self._refused_leases: deque[str | None] = deque(maxlen=1024)  # of other prompts
        self._failing: dict[str, str] = {}  # rejected requests for the next results
        self._invalid: set[int] = set()  # blocks of failed requests, for the next results
        self._not_sent: set[str] = set()  # the same for requests to hold
        self._pool: BlockPool  # of the scheduler
        self._kept: dict[str, list[KVCacheBlock]] = {}  # blocks of finished turns, by id
        self._starved: set[str] = set()  # requests that get no blocks in this step
        self._loaded: set[str] = set()  # requests that have not run since they were received
        self._copy: BlockCopy | None = None
        self._layer_numbers: dict[str, int] = {}
        self._device: torch.device | None = None  # of the cache, once it is known
        self._is_step_begun = False
        self._num_empty_steps = 0  # since the last with tokens
        self._idle_s = 0.0  # how long the step of a worker may wait
        self._content = partial(content_digest, hash_features=numbers_features(vllm_config))
        groups = group_specs(kv_cache_config, self._dcp)  # refuses unsupported kinds of cache
        self._withheld = withheld_tokens(
            kv_cache_config, getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
        )
        self._num_replicas = parallel.prefill_context_parallel_size
        self._is_replica = False
        self._hello: _WorkerHello | None = None
        self._check_settings(has_state=any(group.block_size == 0 for group in groups))
        if role is KVConnectorRole.SCHEDULER:
            host_blocks = self._num_host_blocks()
            self._scheduler = ConnectorScheduler(
                self._engine_id,
                groups,
                parallel=self._parallel,
                config=self._settings,
                host_pool=HostBlockPool([host_blocks] * len(groups)) if host_blocks else None,
                withheld_tokens=self._withheld,
            )

    def _check_settings(self, *, has_state: bool) -> None:
        """Refuse settings under which the cache cannot be moved right."""
        if self._options.layerwise and has_state:
            raise ConfigError(
                "layerwise is set, but the model has state, which every chunk of a prompt "
                "overwrites; leave layerwise out"
            )
        role = self._kv_transfer_config.kv_role
        if self._num_replicas > 1 and (role != "kv_producer" or self._dcp > 1):
            raise ConfigError(
                f"prefill_context_parallel_size is {self._num_replicas}, kv_role {role!r} and "
                f"decode_context_parallel_size {self._dcp}; the ranks of prefill context "
                "parallelism hold copies, which only a 'kv_producer' without decode context "
                "parallelism can lend"
            )

    def _num_host_blocks(self) -> int:
        """Return the blocks of the host buffer for each table; 0 if there is none."""
        from vllm.platforms import current_platform

        if self._options.host_buffer_blocks is not None:
            return self._options.host_buffer_blocks
        device = self._kv_transfer_config.kv_buffer_device
        is_needed = device == "cpu" and not current_platform.is_cpu()
        return int(self._kv_cache_config.num_blocks) if is_needed else 0

    # ---- scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve the hellos of all workers, and advertise where."""
        options = self._options
        port = options.side_channel_port
        if port:
            port += self._vllm_config.parallel_config.data_parallel_index
        workers = {rank: each for rank, each in metadata.items() if isinstance(each, _WorkerHello)}
        facts = next(iter(workers.values())).compatibility if workers else {}
        for rank, worker in workers.items():
            unlike = dict(worker.compatibility.items() - facts.items())
            if unlike:
                raise ConfigError(
                    f"rank {rank} of engine {self._engine_id} has {unlike}, its first rank "
                    f"{ {name: facts.get(name) for name in unlike} }; start all workers of an "
                    "engine with one model, on machines of one kind"
                )
        self._handshake = Handshake(
            self._engine_id,
            {rank: worker.agent.hello for rank, worker in workers.items()},
            compatibility=facts,
            host=options.side_channel_host,
            port=port,
            allow_insecure=options.allow_insecure,
            on_contact=self._side.consumer_comes,
        )
        self._side.address = self._handshake.host, self._handshake.port
        _log.info("engine %s serves its handshake at %s", self._engine_id, self._handshake.address)

    @property
    def _side(self) -> ConnectorScheduler:
        assert self._scheduler is not None  # vLLM calls each role's methods on that role only
        return self._scheduler

    def _info(self, request: Request) -> RequestInfo:
        """Return a request as the scheduler half knows it; bad parameters fail it later."""
        info = self._infos.get(request.request_id)
        if info is None:
            try:
                params = KVTransferParams.from_dict(request.kv_transfer_params)
                params = _for_samples(params, request.request_id)
                content = None
                # vLLM's notice that a request has failed has its hand-off, but no prompt.
                if not request.abort_immediately:
                    content = cache(partial(self._content, request))
                elif params.lease in self._refused_leases:
                    params = KVTransferParams()
                info = RequestInfo(
                    request.request_id,
                    request.num_prompt_tokens,
                    params,
                    content,
                    parent_of(request),
                )
                self._side.get_num_new_matched_tokens(info, 0)
            except Exception as error:
                if isinstance(error, ContentMismatch):
                    self._refused_leases.append(params.lease)
                self._reject(request, error)
                info = RequestInfo(request.request_id, request.num_prompt_tokens)
            self._infos[request.request_id] = info
        return info

    def _reject(self, request: Request, error: Exception) -> None:
        """Let a request fail as a failed load does: it must not stop the engine."""
        self._stats.ended(EndState.FAILED.value, error)
        is_defect = not isinstance(error, PynixlkvError)
        _log.error("request %s: %s", request.request_id, error, exc_info=is_defect)
        self._rejected[request.request_id] = str(error) or type(error).__name__

    def on_new_request(self, request: Request) -> None:
        """Keep the request's lease alive while it is queued."""
        try:
            if self._withheld and (request.kv_transfer_params or {}).get("do_remote_decode"):
                _withhold(request, self._withheld)
            self._side.on_new_request(self._info(request))
        except Exception as error:
            self._reject(request, error)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be fetched beyond the local ones."""
        info = self._info(request)
        self._computed[request.request_id] = num_computed_tokens
        self._starved.add(request.request_id)  # until they are allocated
        if request.request_id not in self._rejected:
            try:
                return self._side.get_num_new_matched_tokens(info, num_computed_tokens)
            except Exception as error:
                self._reject(request, error)
        count = request.num_prompt_tokens - num_computed_tokens
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002
        """Return the groups that a load fills: all that take part in transfers."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Start to fetch into the allocated blocks."""
        self._starved.discard(request.request_id)
        if request.request_id not in self._rejected:
            try:
                self._side.update_state_after_alloc(
                    self._info(request),
                    self._tables(blocks.get_block_ids()),
                    self._computed.get(request.request_id, 0),
                    num_external_tokens,
                )
            except Exception as error:
                self._reject(request, error)
        why = self._rejected.pop(request.request_id, None)
        if why is not None and num_external_tokens:
            self._failing[request.request_id] = why
            self._invalid.update(*blocks.get_unhashed_block_ids_all_groups())

    def _tables(self, block_ids: tuple[list[int], ...]) -> BlockLists:
        selected = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return tuple(tuple(table) for table in selected)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the message to the workers for this step."""
        preempted = scheduler_output.preempted_req_ids or ()
        for request_id in preempted:
            self._side.request_preempted(request_id)
        self._loaded -= scheduler_output.num_scheduled_tokens.keys()
        # vLLM does not ask again for a loaded request that needs one more block.
        is_stuck = self._loaded and not scheduler_output.total_num_scheduled_tokens
        if preempted or self._starved or is_stuck:
            self._side.release_turns(1, "its blocks are needed for requests")
        self._starved.clear()
        if self._options.layerwise:
            self._save(scheduler_output)
        rejected, self._failing = self._failing, {}
        blocks, self._invalid = self._invalid, set()
        return _StepMetadata(
            self._side.build_connector_meta(), rejected, blocks, self._is_idle(scheduler_output)
        )

    def _is_idle(self, step: SchedulerOutput) -> bool:
        """Return whether no step with tokens can be under way any more."""
        parallel = self._vllm_config.parallel_config
        is_empty = not step.total_num_scheduled_tokens
        self._num_empty_steps = self._num_empty_steps + 1 if is_empty else 0
        # vLLM launches a step for each stage, or two, before it waits for the first of them. The
        # steps of data-parallel engines wait for each other.
        under_way = max(parallel.pipeline_parallel_size, 2)
        return bool(self._num_empty_steps > under_way and parallel.data_parallel_size == 1)

    def _save(self, scheduler_output: SchedulerOutput) -> None:
        """Push what this step computes of prompts for consumers, layer by layer."""
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more is not None and request_id in self._running_tables:
                if request_id in cached.resumed_req_ids:
                    self._running_tables[request_id] = ([],) * len(more)
                known = self._running_tables[request_id]
                self._running_tables[request_id] = tuple(map(list.__add__, known, more))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if self._holds(new.req_id):
                self._running_tables[new.req_id] = new.block_ids
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            if not self._holds(request_id):
                continue
            info = self._infos[request_id]
            try:
                until = min(computed[request_id] + count, info.num_prompt_tokens)
                tables = self._tables(self._running_tables[request_id])
                self._side.save(info, tables, until)
            except Exception:  # the layers follow when the prompt is complete
                _log.exception("request %s: its layers are not pushed in this step", request_id)

    def _holds(self, request_id: str) -> bool:
        """Return whether a running request is computed for a consumer."""
        info = self._infos.get(request_id)
        return info is not None and info.params.do_remote_decode

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the reports of all workers."""
        sent = connector_output.finished_sending or set()
        received = connector_output.finished_recving or set()
        self._loaded |= received & self._infos.keys()
        self._side.update_finished(sent=sent, received=received)
        for turn_id in sent & self._kept.keys():
            sent.remove(turn_id)  # vLLM knows only requests
            self._pool.free_blocks(reversed(self._kept.pop(turn_id)))

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold a request's blocks for a consumer, or free them."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold a request's blocks for a consumer, or free them; one table for each group."""
        from vllm.v1.request import RequestStatus

        info = self._info(request)
        for known in (self._infos, self._computed, self._rejected, self._running_tables):
            known.pop(request.request_id, None)
        self._loaded.discard(request.request_id)
        # The last token of an answer has no KV, even if a step that computes it has been launched.
        last = request.num_tokens - 1
        if info.params.do_remote_decode:
            last = request.num_prompt_tokens
        # Not the request's id, which another connector may report or another request have.
        turn_id = f"pynixlkv-turn-{secrets.token_hex(8)}-{request.request_id[:64]}"
        is_complete = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        is_turn = is_complete and not info.params.do_remote_decode
        try:
            blocks: list[KVCacheBlock] = []
            if is_turn and self._settings.conversation_blocks:
                manager = getattr(self, "_kv_cache_manager", None)
                blocks = releases.blocks_of(manager, self._pool, request.request_id, block_ids)
            delay_free, params = self._side.request_finished(
                info,
                self._tables(block_ids),
                min(request.num_computed_tokens, last),
                is_complete=is_complete,
                turn_id=turn_id,
            )
            if is_turn and params is not None:
                # Without its request, for which vLLM would make steps.
                self._pool.touch(blocks)
                self._kept[turn_id] = blocks
                delay_free = False
            return delay_free, params
        except Exception:
            _log.exception("request %s cannot be handed over", request.request_id)
            return self._side.request_finished(info, (), 0, is_complete=False)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the pool of the blocks."""
        self._pool = gpu_block_pool

    def reset_cache(self) -> bool:
        """Release all finished turns, as for new weights; ask again until it is true."""
        self._side.release_turns(1 << 62, "the cache is reset")
        return not self._kept

    def has_pending_push_work(self) -> bool:
        """Ask for steps while turns are being released."""
        return self._side.is_releasing_turns

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache with an agent, and start to work."""
        from vllm.distributed.parallel_state import (
            get_pcp_group,
            get_pp_group,
            get_tensor_model_parallel_rank,
        )

        rank = get_pp_group().rank_in_group, get_tensor_model_parallel_rank()
        if self._num_replicas > 1 and get_pcp_group().rank_in_group > 0:
            self._is_replica = True  # the first of its group lends what all of them hold
            return
        if self._options.layerwise:
            self._layer_numbers = _layer_numbers(kv_caches)
        self._device = next(iter(kv_caches.values())).device
        parallel = self._vllm_config.parallel_config
        describe = partial(
            kv_cache,
            kv_cache_config=self._kv_cache_config,
            total_kv_heads=self._vllm_config.model_config.get_total_num_kv_heads(),
            place=ParallelPlace(
                tp=(rank[1], self._parallel.tp),
                dcp=(rank[1] % self._dcp, self._dcp),
                interleave=parallel.cp_kv_cache_interleave_size,
            ),
            is_opaque=self._device.type == "cpu",
            fp8_format=fp8_format(self._vllm_config.cache_config.cache_dtype),
            backends=_backends(self._vllm_config, list(kv_caches)),
        )
        cache = describe(kv_caches)
        staging = None
        host_blocks = self._num_host_blocks()
        if host_blocks:
            host = {
                name: make_host_tensors(
                    {name: tensor},
                    axes="BHND",
                    num_blocks=host_blocks * tensor.shape[0] // self._kv_cache_config.num_blocks,
                )[name]
                for name, tensor in kv_caches.items()
            }
            self._copy = BlockCopy(kv_caches, host, cache.geometry)
            staging = HostStaging(cache, describe(host), self._copy)
        with processors_of_parent():
            self._agent = self._make_agent(f"{self._engine_id}.{rank[0]}.{rank[1]}")
            self._worker = ConnectorWorker(
                self._agent,
                engine_id=self._engine_id,
                rank=rank,
                parallel=self._parallel,
                config=self._settings,
                tracer=make_tracer(self._vllm_config),
            )
            self._hello = _WorkerHello(
                self._worker.register_kv_caches(cache, staging=staging),
                self._settings.compatibility,
            )
        _log.info(
            "rank %s of engine %s moves KV with %s (%s); %s mode, layout %s; %r",
            rank, self._engine_id, type(self._agent).__name__, self._agent.transport,
            self._options.transfer_mode, _layout(kv_caches), cache,
        )  # fmt: skip

    def set_host_xfer_buffer_ops(self, copy_operation: Callable[..., None]) -> None:
        """Take vLLM's function that copies blocks between device and host."""
        # On the CPU there is no device to copy from, and vLLM's function fails.
        if self._copy is not None and self._device is not None and self._device.type != "cpu":
            self._copy.operation = copy_operation

    def _make_agent(self, name: str) -> NixlAgent | UcxAgent:
        options = self._options
        if options.transfer_backend == "ucx":
            from pynixlkv.ucx import UcxAgent

            return UcxAgent(name, config=options.backend_params)
        from pynixlkv.nixl import NixlAgent

        return NixlAgent(name, backend=options.backends[0], backend_params=options.backend_params)

    @property
    def _loader(self) -> ConnectorWorker:
        assert self._worker is not None  # vLLM registers the cache before the first step
        return self._worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's hello."""
        return self._hello

    def get_finished_count(self) -> int | None:
        """Return how many workers report each request: one for each group of copies."""
        parallel = self._parallel
        return parallel.pp * parallel.tp if self._num_replicas > 1 else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the message of a step."""
        super().bind_connector_metadata(connector_metadata)
        self._is_step_begun = False
        assert isinstance(connector_metadata, _StepMetadata)
        on_cpu = self._device is not None and self._device.type == "cpu"
        idle_s = _IDLE_STEP_CPU_S if on_cpu else _IDLE_STEP_S
        self._idle_s = idle_s if connector_metadata.is_idle else 0.0

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:  # noqa: ARG002
        """Hand the step's message to the worker half."""
        self._begin_step()

    def _begin_step(self) -> None:
        """Hand the step's message over, once: vLLM may save layers before it starts loads."""
        if self._is_step_begun or self._is_replica:
            return
        self._is_step_begun = True
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        self._failing.update(metadata.rejected)
        self._invalid |= metadata.rejected_blocks
        step = metadata.connector
        try:
            self._loader.start_load_kv(step, work_so_far(self._device))
        except Exception as error:
            _log.exception("the requests of a step cannot begin")
            self._failing.update(dict.fromkeys(step.reqs_to_recv, str(error)))
            self._invalid |= _flat(meta.blocks for meta in step.reqs_to_recv.values())
            self._not_sent.update(step.reqs_to_send)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs only after all of it has arrived."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: object,  # noqa: ARG002
        **kwargs: object,  # noqa: ARG002
    ) -> None:
        """Push a layer of the prompts in this step, if `layerwise` is set."""
        number = self._layer_numbers.get(layer_name)
        if number is None:
            return
        self._begin_step()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        if metadata.connector.reqs_to_save:
            try:
                self._loader.save_kv_layer(number, work_so_far(self._device))
            except Exception:  # it is pushed when the prompt is complete
                _log.exception("layer %s is not pushed in this step", layer_name)

    def wait_for_save(self) -> None:
        """Do nothing: held blocks stay until they are reported as sent."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> object:  # noqa: ARG002
        """Return the requests that have ended since the last step."""
        sent, received, failed = self._take_ended()
        self._invalid.clear()
        assert releases.TransferResults is not None  # other releases call the two methods below
        return releases.TransferResults(
            finished_sending=sent, finished_recving=received | failed, failed_recving=failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """Return the same to releases that take failures by block."""
        sent, received, failed = self._take_ended()
        return sent, received | failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the requests that `get_finished` has returned and that failed."""
        blocks, self._invalid = self._invalid, set()
        return blocks

    def _take_ended(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests that were sent, were received, and failed to be received."""
        try:
            finished = Finished() if self._is_replica else self._loader.get_finished(self._idle_s)
        except Exception:
            _log.exception("the requests that have ended are asked for again in the next step")
            finished = Finished()
        failed = {*finished.failed, *self._failing}
        self._invalid |= _flat(end.blocks for end in finished.failed.values())
        sent = finished.sent | self._not_sent
        self._failing, self._not_sent = {}, set()
        return sent, finished.received, failed

    def shutdown(self) -> None:
        """Close everything this role owns."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._agent is not None:
            self._agent.close()
        if self._handshake is not None:
            self._handshake.close()

    # ---- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        counted = self._stats if self._worker is None else self._worker.stats
        stats = PyNixlKVStats.of(counted.take())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return counts in vLLM's type."""
        return PyNixlKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return the metrics that vLLM's Prometheus endpoint shows."""
        return PyNixlKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers are pushed as they finish, which a full CUDA graph would skip."""
        return Options.read(extra_config).layerwise

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003
        """Return False: the memory that a sleeping engine maps anew would need a registration."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for heads outside tokens, so that a slice of the heads is contiguous in a block."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else releases.heads_before_tokens()


def _withhold(request: Request, num_tokens: int) -> None:
    """Leave the last tokens of a prompt to decode."""
    # A request for the probabilities of its prompt is computed whole here, and again by decode.
    if request.num_prompt_tokens <= num_tokens or request.skip_reading_prefix_cache:
        return
    if request.prompt_token_ids is not None:  # perhaps shared with other samples
        request.prompt_token_ids = request.prompt_token_ids[:-num_tokens]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-num_tokens]
    del request._all_token_ids[-num_tokens:]
    request.num_prompt_tokens -= num_tokens
    request.max_tokens = 1  # a further step would change the state


def _for_samples(params: KVTransferParams, request_id: str) -> KVTransferParams:
    """Say of a sample that it has siblings, which vLLM tells by the request's id alone."""
    sample = _SAMPLE.fullmatch(request_id)
    if sample is None:
        return params
    return msgspec.structs.replace(
        params,
        sibling_group=params.sibling_group or sample[1],
        num_readers=params.num_readers if params.num_readers > 1 else 0,
    )


def _flat(tables: Iterable[BlockLists]) -> set[int]:
    return {block for each in tables for table in each for block in table}


def _layout(tensors: dict[str, torch.Tensor]) -> str:
    """Return the order of the axes in memory, from the outermost, of the first layer."""
    first = next(iter(tensors.values()))
    order = sorted(range(first.ndim), key=first.stride, reverse=True)
    return "".join("BHNC"[axis] for axis in order) if first.ndim == 4 else str(first.shape)


def _layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return the numbers of layers that are sent each on its own."""
    numbers = {name: layer_number(name) for name in names}
    by_number = {number: name for name, number in numbers.items()}
    for name, number in numbers.items():
        if by_number[number] != name:
            raise ConfigError(
                f"layerwise is set, but layers {name!r} and {by_number[number]!r} have one number, "
                f"{number}; leave layerwise out"
            )
    return numbers


def _check_roles(config: KVTransferConfig) -> None:
    """Refuse, or warn of, what does not go with conversations."""
    if config.kv_role != "kv_both":
        raise ConfigError(
            f"bidirectional_kv_xfer is set, but kv_role is {config.kv_role!r}; expected 'kv_both': "
            "prefill fetches from decode what decode has of a conversation"
        )
    if config.kv_load_failure_policy != "recompute":
        _log.warning(
            "bidirectional_kv_xfer is set, but kv_load_failure_policy is %r: a turn whose blocks "
            "decode no longer holds fails at prefill; with 'recompute' it is computed there",
            config.kv_load_failure_policy,
        )


def _backends(config: VllmConfig, layers: list[str]) -> dict[str, str]:
    """Return the name of the attention backend of each layer."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    found = get_layers_from_vllm_config(config, AttentionLayerBase, layers)
    return {name: layer.get_attn_backend().get_name() for name, layer in found.items()}
