"""The connector in vLLM's own scheduler, whose workers the test plays. No engine is started."""

import copy
import functools
from unittest.mock import Mock

import pytest
import torch
import transformers
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pynixlkv.connector.metadata import AgentMetadata
from pynixlkv.connector.worker import Finished
from pynixlkv.errors import CompatMismatch, ConfigError
from pynixlkv.handshake import fetch
from pynixlkv.vllm import PyNixlKVConnector, connector, releases
from pynixlkv.vllm.content import content_digest

pytestmark = pytest.mark.ci

BLOCK, BLOCKS = 32, 21  # the first block is vLLM's null block
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
HASH = get_hash_fn_by_name("sha256")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """vLLM's configuration without a connector."""
    folder = tmp_path_factory.mktemp("config")
    shape = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8}
    transformers.LlamaConfig(
        **shape, num_key_value_heads=4, architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)
    init_none_hash(HASH)
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=4 * BLOCK,
        async_scheduling=False,
        enforce_eager=True,
    ).create_engine_config()


def needs_several_tables(test):
    """A test of a model with several block tables, refused where vLLM cannot fail such a load."""

    @functools.wraps(test)
    def either(*args, **options):
        if releases.TransferResults is not None:
            test(*args, **options)
            return
        with pytest.raises(ConfigError, match=r"use vLLM 0\.30 or newer"):
            test(*args, **options)

    return either


class Side:
    """A scheduler, and what its workers tell it."""

    def __init__(self, base, role, policy="fail", group=None, **extra):
        self.config = copy.copy(base)
        self.config.cache_config = copy.copy(base.cache_config)
        self.config.cache_config.num_gpu_blocks = BLOCKS
        self.config.kv_transfer_config = KVTransferConfig(
            kv_connector="PyNixlKVConnector",
            kv_connector_module_path="pynixlkv.vllm",
            kv_role=role,
            engine_id=role,
            kv_buffer_device="cpu",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        )
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32
        )
        layers = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
        groups = [KVCacheGroupSpec(layers, spec)]
        if group is not None:
            groups.append(KVCacheGroupSpec(["model.layers.2.mixer"], group))
            self.config.cache_config.enable_prefix_caching = False
        self.caches = KVCacheConfig(BLOCKS, [], groups)
        self.scheduler = Scheduler(
            self.config,
            self.caches,
            StructuredOutputManager(self.config),
            max(each.kv_cache_spec.block_size for each in groups),
            BLOCK,
        )
        self.scheduler.connector._side.address = ("127.0.0.1", 5600)

    def add(self, request_id, length, params=None, max_tokens=1, first=3, tokens=None, **more):
        """Queue a request for a prompt whose tokens follow from its first one, or are given."""
        tokens = tokens or [first + i for i in range(length)]
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
            output_kind=RequestOutputKind.DELTA,
        )
        request = Request(
            request_id,
            None if "prompt_embeds" in more else tokens,
            sampling,
            None,
            block_hasher=get_request_block_hasher(BLOCK, HASH),
            **more,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, received=(), failed=(), sent=()):
        """Make one step; returns the message to the workers and the outputs by request."""
        planned = self.scheduler.schedule()
        ids = list(planned.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [
            [5] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids
        ]
        made = self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: n for n, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
                kv_connector_output=KVConnectorOutput(
                    finished_sending=set(sent) or None,
                    finished_recving={*received, *failed} or None,
                    **self.failures(failed),
                ),
            ),
        )
        outputs = {o.request_id: o for each in made.values() for o in each.outputs}
        return planned.kv_connector_metadata, outputs

    def failures(self, failed):
        """How the workers report failed requests: by id, or by block in older releases."""
        if releases.TransferResults is not None:
            return {"failed_recving": set(failed)}
        manager = self.scheduler.kv_cache_manager
        return {"invalid_block_ids": {b for i in failed for b in manager.get_block_ids(i)[0]}}

    def run(self):
        """Make steps until something comes out of them."""
        for _ in range(20):
            message, outputs = self.step()
            if outputs:
                return message, outputs
        raise AssertionError("nothing has come out in 20 steps")

    def abort(self, request_id):
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def num_free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def check_that_nothing_is_left(self):
        """Every block is free, and the connector remembers no request."""
        connector = self.scheduler.connector
        side = connector._side
        assert self.num_free == BLOCKS - 1
        assert not self.scheduler.requests
        assert not any((side._open, side._receiving, side._settled, side._held))
        assert not any(
            (connector._infos, connector._computed, connector._rejected, connector._failing)
        )
        assert not any((connector._loaded, connector._starved, connector._kept))


ATTENTION = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
STATE = MambaSpec(block_size=1024, shapes=((3, 64), (4, 8, 4)), dtypes=(torch.float32,) * 2)
LOCAL = {
    "window": SlidingWindowSpec(**ATTENTION, sliding_window=33),
    "chunk": ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
}


def hand_over(base, length, request_id="p-1", first=3, **extra):
    """Prefill a prompt; returns the producer, which keeps it, and its parameters."""
    producer = Side(base, PRODUCER, **extra)
    producer.add(request_id, length, {"do_remote_decode": True}, first=first)
    _, outputs = producer.run()
    return producer, outputs[request_id].kv_transfer_params


@pytest.fixture
def params(base):
    """A hand-off of a prompt of 70 tokens."""
    _, params = hand_over(base, 70)
    return params


@pytest.fixture
def decode(base):
    return Side(base, CONSUMER)


def test_a_hand_off_names_requests_as_each_side_does(base, decode):
    producer, params = hand_over(base, 70, "p-a1b2")
    assert params["remote_request_id"] == "p-a1b2"
    message, _ = producer.step()
    kept = message.connector.reqs_to_send["p-a1b2"]
    assert [list(kept.blocks[0])] == params["remote_block_ids"]
    assert producer.num_free == BLOCKS - 1 - 3
    decode.add("d-c3d4", 70, params, max_tokens=2)
    message, outputs = decode.step()
    assert message.connector.reqs_to_recv.keys() == {"d-c3d4"}
    fetched = message.connector.reqs_to_recv["d-c3d4"]
    assert fetched.remote.remote_request_id == "p-a1b2"
    assert (fetched.num_tokens, len(fetched.blocks[0])) == (70, 3)
    assert not outputs
    decode.step(received={"d-c3d4"})
    _, outputs = decode.step()
    assert outputs["d-c3d4"].new_token_ids == [5]
    _, outputs = decode.step()
    assert outputs["d-c3d4"].finish_reason is FinishReason.LENGTH
    decode.check_that_nothing_is_left()
    producer.step(sent={"p-a1b2"})
    producer.check_that_nothing_is_left()


def test_workers_wait_in_steps_in_which_nothing_runs(base):
    producer, _ = hand_over(base, 70)
    # Of the first two, a step with tokens may still be under way.
    assert [producer.step()[0].is_idle for _ in range(4)] == [False, False, True, True]
    producer.add("p-2", 10, {"do_remote_decode": True})
    assert not producer.step()[0].is_idle
    producer.config.parallel_config = copy.copy(base.parallel_config)
    producer.config.parallel_config.data_parallel_size = 2  # its engines make steps together
    assert not any(producer.step()[0].is_idle for _ in range(5))


def test_a_hand_off_carries_the_trace_of_its_request(base, decode):
    mine, theirs = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")
    producer = Side(base, PRODUCER)
    headers = {"traceparent": theirs}
    producer.add("p", 70, {"do_remote_decode": True}, trace_headers=headers)
    _, outputs = producer.run()
    params = outputs["p"].kv_transfer_params
    message, _ = producer.step()
    assert params["traceparent"] == message.connector.reqs_to_send["p"].traceparent == theirs
    decode.add("d1", 70, params)
    decode.add("d2", 70, params, trace_headers={"traceparent": mine})
    message, _ = decode.step()
    fetched = message.connector.reqs_to_recv
    assert [fetched[name].traceparent for name in ("d1", "d2")] == [theirs, mine]


@pytest.mark.parametrize("length", [2, 64, 65, 70])
@needs_several_tables
def test_state_is_handed_over_as_it_is_before_the_last_token(base, length):
    producer, params = hand_over(base, length, group=STATE)
    blocks = -(-(length - 1) // BLOCK)
    assert params["remote_num_tokens"] == length - 1
    assert [len(table) for table in params["remote_block_ids"]] == [blocks, 1]
    decode = Side(base, CONSUMER, group=STATE)
    decode.add("d", length, params, max_tokens=2)
    message, _ = decode.step()
    fetched = message.connector.reqs_to_recv["d"]
    assert fetched.num_tokens == length - 1
    assert [len(table) for table in fetched.blocks] == [blocks, 1]
    decode.step(received={"d"})
    _, outputs = decode.step()
    assert outputs["d"].new_token_ids == [5]
    decode.run()
    decode.check_that_nothing_is_left()
    producer.step(sent={"p-1"})
    producer.check_that_nothing_is_left()


@needs_several_tables
def test_a_prompt_of_one_token_is_computed_where_state_is_wanted(base):
    _, params = hand_over(base, 1, group=STATE)
    decode = Side(base, CONSUMER, group=STATE)
    decode.add("d", 1, params)
    message, outputs = decode.run()
    assert not message.connector.reqs_to_recv
    assert "d" in message.connector.reqs_to_release
    assert outputs["d"].new_token_ids == [5]


@pytest.mark.parametrize("length", [64, 65, 96, 128, 130])
@pytest.mark.parametrize("kind", LOCAL)
@needs_several_tables
def test_what_the_last_token_sees_is_fetched_where_attention_is_local(base, kind, length):
    _, params = hand_over(base, length, group=LOCAL[kind])
    decode = Side(base, CONSUMER, group=LOCAL[kind])
    decode.add("d", length, params, max_tokens=2)
    message, _ = decode.step()
    fetched = message.connector.reqs_to_recv["d"]
    last = length - 1
    first = {"window": max(last - 32, 0), "chunk": last // 64 * 64}[kind]
    assert params["remote_num_tokens"] == fetched.num_tokens == last
    assert params["remote_starts"][1] <= fetched.starts[1] <= first
    for tables in (params["remote_block_ids"], fetched.blocks):
        assert len(tables[1]) == -(-last // BLOCK) - first // BLOCK
    decode.step(received={"d"})
    _, outputs = decode.step()
    assert outputs["d"].new_token_ids == [5]


def test_state_is_not_pushed_by_layer(base):
    refusal = r"layerwise is set, but the model has state|use vLLM 0.30"
    with pytest.raises(ConfigError, match=refusal):
        Side(base, PRODUCER, group=STATE, transfer_mode="push", layerwise=True)


@pytest.fixture
def copies(base):
    """A configuration with two ranks of prefill context parallelism."""
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.prefill_context_parallel_size = 2
    return config


@pytest.mark.parametrize("role", [CONSUMER, BOTH])
def test_copies_of_a_cache_are_refused_but_for_producers(copies, role):
    with pytest.raises(ConfigError, match=f"context_parallel_size is 2, kv_role '{role}'"):
        Side(copies, role)


def test_one_rank_lends_what_several_have_copies_of(copies, monkeypatch):
    producer = Side(copies, PRODUCER)
    assert producer.scheduler.connector.get_finished_count() == 1
    worker = PyNixlKVConnector(producer.config, KVConnectorRole.WORKER, producer.caches)
    for group, rank in (("get_pp_group", 0), ("get_pcp_group", 1)):
        monkeypatch.setattr(parallel_state, group, lambda rank=rank: Mock(rank_in_group=rank))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    worker.register_kv_caches({})
    assert worker.get_handshake_metadata() is None
    producer.add("p", 70, {"do_remote_decode": True})
    producer.run()
    worker.bind_connector_metadata(producer.step()[0])
    worker.start_load_kv(Mock())
    assert not any(results_of(worker))
    worker.shutdown()


def test_samples_of_one_request_are_readers_of_one_lease(base, decode):
    producer = Side(base, PRODUCER)
    for number in range(3):
        producer.add(f"{number}_p", 70, {"do_remote_decode": True})
    offers = []
    while len(offers) < 3:
        offers += [output.kv_transfer_params for output in producer.run()[1].values()]
    assert len({offer["lease"] for offer in offers}) == 1
    assert sorted(offer["num_readers"] for offer in offers) == [0, 2, 3]
    assert producer.num_free == BLOCKS - 1 - 3
    # A router that asked for one sample does not know how many are going to read it.
    for told, meant in ((1, 0), (3, 3)):
        decode.add(f"{told}_d", 70, {**offers[0], "num_readers": told})
        message, _ = decode.step()
        assert message.connector.reqs_to_recv[f"{told}_d"].remote.num_readers == meant


def test_an_abort_of_a_queued_request_releases_it(decode, params):
    decode.add("d-1", 70, params)
    decode.abort("d-1")
    message, _ = decode.step()
    assert message.connector.reqs_to_release.keys() == {"d-1"}
    assert not (message.connector.reqs_to_recv)
    assert not (message.connector.reqs_waiting)
    decode.check_that_nothing_is_left()


@pytest.mark.parametrize("report", ["received", "failed"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_an_abort_while_receiving_keeps_the_blocks_until_the_workers_report(
    base, params, report, policy
):
    decode = Side(base, CONSUMER, policy)
    decode.add("d-1", 70, params)
    decode.step()
    decode.abort("d-1")
    assert decode.num_free == BLOCKS - 1 - 3
    message, _ = decode.step()
    assert message.connector.reqs_to_abort == {"d-1"}
    assert decode.num_free == BLOCKS - 1 - 3
    decode.step(**{report: {"d-1"}})
    decode.check_that_nothing_is_left()


@pytest.mark.parametrize("is_running", [False, True])
def test_an_abort_after_receiving_tells_nobody(decode, params, is_running):
    decode.add("d-1", 70, params, max_tokens=9)
    decode.step()
    decode.step(received={"d-1"})
    if is_running:
        decode.run()
    decode.abort("d-1")
    message, _ = decode.step()
    assert not message.connector
    decode.check_that_nothing_is_left()


def test_an_abort_during_the_prefill_is_told_to_who_waits(base):
    producer = Side(base, PRODUCER)
    producer.add("p-1", 200, {"do_remote_decode": True})
    producer.step()
    producer.abort("p-1")
    message, _ = producer.step()
    assert message.connector.reqs_not_held.keys() == {"p-1"}
    producer.check_that_nothing_is_left()


def test_an_abort_after_the_prefill_changes_nothing(base):
    producer, _ = hand_over(base, 70)
    producer.abort("p-1")
    message, _ = producer.step()
    assert message.connector.reqs_to_send.keys() == {"p-1"}
    assert producer.num_free == BLOCKS - 1 - 3
    producer.step(sent={"p-1"})
    producer.check_that_nothing_is_left()


def test_a_decode_request_that_is_preempted_is_computed_here(decode, params):
    decode.add("d-1", 70, params, max_tokens=3)
    decode.step()
    decode.step(received={"d-1"})
    decode.step()
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    message, outputs = decode.step()
    assert message.connector.reqs_preempted == {"d-1"}
    assert not (message.connector.reqs_to_recv)
    assert not (message.connector.reqs_to_release)
    assert outputs["d-1"].new_token_ids == [5]
    _, outputs = decode.run()
    assert outputs["d-1"].finish_reason is FinishReason.LENGTH
    decode.check_that_nothing_is_left()


def test_requests_that_outgrow_the_cache_are_preempted_and_end_all_the_same(base):
    producer, decode = Side(base, PRODUCER), Side(base, CONSUMER)
    lengths = {f"-{i}": 6 * BLOCK for i in range(3)}  # 18 of 20 blocks; each grows by two
    for n, (name, length) in enumerate(lengths.items()):
        producer.add(f"p{name}", length, {"do_remote_decode": True}, first=1000 * n)
    handed = {}
    while len(handed) < len(lengths):
        _, outputs = producer.run()
        handed |= {i.replace("p", "d"): o.kv_transfer_params for i, o in outputs.items()}
    for n, (request_id, params) in enumerate(handed.items()):
        decode.add(request_id, 6 * BLOCK, params, max_tokens=2 * BLOCK, first=1000 * n)
    decode.step()
    preempted, ended = set(), set()
    decode.step(received=handed.keys())
    for _ in range(8 * BLOCK):
        message, outputs = decode.step()
        preempted |= message.connector.reqs_preempted
        assert not message.connector.reqs_to_recv
        ended |= {i for i, o in outputs.items() if o.finish_reason is FinishReason.LENGTH}
        if ended == handed.keys():
            break
    assert ended == handed.keys()
    assert preempted
    decode.check_that_nothing_is_left()


def test_a_producer_that_preempts_pushes_layers_anew(base):
    producer = Side(base, PRODUCER, transfer_mode="push", layerwise=True)
    producer.add("p-1", 200, {"do_remote_decode": True})
    message, _ = producer.step()
    assert message.connector.reqs_to_save["p-1"].num_tokens == 4 * BLOCK
    assert producer.scheduler.reset_prefix_cache(reset_running_requests=True)
    message, _ = producer.step()
    assert message.connector.reqs_preempted == {"p-1"}
    assert message.connector.reqs_to_save["p-1"].num_tokens == 4 * BLOCK
    message, outputs = producer.step()
    saved = message.connector.reqs_to_save["p-1"]
    assert (saved.num_tokens, len(saved.blocks[0])) == (200, 7)
    assert outputs["p-1"].kv_transfer_params["remote_block_ids"] == [list(saved.blocks[0])]
    message, _ = producer.step()
    assert message.connector.reqs_to_send.keys() == {"p-1"}
    assert not message.connector.reqs_to_save


def test_what_is_not_handed_over_is_not_pushed(base):
    producer = Side(base, PRODUCER, transfer_mode="push", layerwise=True)
    producer.add("p-1", 70)
    message, _ = producer.step()
    assert not message.connector
    producer.check_that_nothing_is_left()


BAD = {
    "incomplete": {"do_remote_prefill": True},
    "of a wrong type": {"do_remote_prefill": True, "remote_port": "x"},
    "both": {"do_remote_prefill": True, "do_remote_decode": True},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_hand_off_that_is_rejected_ends_as_the_policy_says(base, bad, policy):
    decode = Side(base, CONSUMER, policy)
    decode.add("d-1", 70, bad)
    decode.add("d-2", 70)
    message, _ = decode.step()
    assert message.rejected.keys() == {"d-1"}
    _, outputs = decode.step(failed=message.rejected)
    if policy == "recompute":
        outputs = decode.run()[1]
    expected = FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH
    assert outputs["d-1"].finish_reason is expected
    assert not decode.scheduler.connector._failing
    decode.step()
    decode.check_that_nothing_is_left()


def test_a_hand_off_of_the_other_mode_is_rejected(base, params):
    decode = Side(base, CONSUMER, transfer_mode="push")
    decode.add("d-1", 70, params)
    message, _ = decode.step()
    assert "'pull' mode" in message.rejected["d-1"]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_kv_of_another_prompt_is_neither_loaded_nor_cached(base, params, policy, caplog):
    decode = Side(base, CONSUMER, policy)
    mixed_up = decode.add("d-1", 70, params, first=500)
    message, _ = decode.step()
    assert message.rejected.keys() == {"d-1"}
    assert not message.connector
    own = content_digest(mixed_up, 70)
    assert own != params["content"]
    assert own in caplog.text
    assert params["content"] in caplog.text
    _, outputs = decode.step(failed=message.rejected)
    if policy == "fail":
        assert outputs["d-1"].finish_reason is FinishReason.ERROR
        message, _ = decode.step()
        assert not message.connector  # the lease is left for its reader
        again = decode.add("d-2", 70, first=500)
        assert decode.scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 0
        decode.run()
    else:
        assert decode.run()[1]["d-1"].finish_reason is FinishReason.LENGTH
    decode.add("d-3", 70, params)
    message, _ = decode.step()
    assert message.connector.reqs_to_recv.keys() == {"d-3"}
    decode.step(received={"d-3"})
    assert decode.run()[1]["d-3"].finish_reason is FinishReason.LENGTH
    decode.check_that_nothing_is_left()


def test_vllms_notice_of_a_failed_request_releases_its_own_hand_off_only(base, decode):
    _, mixed_up = hand_over(base, 70, "p-1")
    _, own = hand_over(base, 70, "p-2", first=500)
    decode.add("d-1", 70, mixed_up, first=500)
    decode.step(failed=decode.step()[0].rejected)
    for request_id, params in (("n-1", mixed_up), ("n-2", {**own, "lease": "5-7"})):
        decode.add(request_id, 1, params, first=0, abort_immediately=True)
        decode.abort(request_id)
    message, _ = decode.step()
    assert message.connector.reqs_to_release.keys() == {"n-2"}
    assert not message.rejected


def image(identifier, offset=10, **data):
    elements = {
        key: MultiModalFieldElem(torch.tensor(value), MultiModalSharedField(batch_size=1))
        for key, value in data.items()
    }
    return MultiModalFeatureSpec(
        MultiModalKwargsItem(elements) if data else None,
        "image",
        identifier,
        PlaceholderRange(offset=offset, length=20),
    )


def request(first=3, **more):
    tokens = None if "prompt_embeds" in more else [first + i for i in range(70)]
    return Request("r", tokens, SamplingParams(), None, **more)


UNLIKE = {
    "plain": {},
    "other tokens": {"first": 4},
    "adapter": {"lora_request": LoRARequest("a", 1, "/adapters/a")},
    "other adapter": {"lora_request": LoRARequest("a", 1, "/adapters/b")},
    "salt": {"cache_salt": "salt"},
    "image": {"mm_features": [image("hash")]},
    "other image": {"mm_features": [image("other")]},
    "image elsewhere": {"mm_features": [image("hash", 11)]},
    "embeddings": {"prompt_embeds": torch.ones(70, 8)},
    "other embeddings": {"prompt_embeds": torch.ones(70, 8).index_fill(0, torch.tensor(39), 2)},
    "embeddings of another type": {"prompt_embeds": torch.ones(70, 8, dtype=torch.bfloat16)},
}


def test_a_digest_is_of_all_that_decides_the_kv():
    digests = {what: content_digest(request(**more), 70) for what, more in UNLIKE.items()}
    assert len({*digests.values()}) == len(UNLIKE)
    assert content_digest(request(), 69) not in digests.values()
    # An adapter has other numbers in other engines.
    again = {"lora_request": LoRARequest("a", 2, "/adapters/a")}
    assert content_digest(request(**again), 70) == digests["adapter"]


def test_a_digest_of_a_prefix_ends_with_the_prefix():
    late = [image("hash", 50)]
    assert content_digest(request(mm_features=late), 50) == content_digest(request(), 50)
    assert content_digest(request(mm_features=late), 51) != content_digest(request(), 51)
    for more in UNLIKE["embeddings"], UNLIKE["other embeddings"]:
        assert content_digest(request(**more), 39) == content_digest(
            request(**UNLIKE["embeddings"]), 39
        )


def test_images_that_vllm_only_numbers_are_digested_themselves():
    def digest(number, pixels):
        numbered = request(mm_features=[image(number, pixels=pixels)])
        return content_digest(numbered, 70, hash_features=True)

    assert digest("0", [1, 2]) == digest("1", [1, 2]) != digest("0", [1, 3])


def test_a_prompt_of_embeddings_is_handed_over(base):
    embeds = {"prompt_embeds": torch.ones(70, 8)}
    producer, decode = Side(base, PRODUCER), Side(base, CONSUMER)
    producer.add("p-1", 70, {"do_remote_decode": True}, **embeds)
    params = producer.run()[1]["p-1"].kv_transfer_params
    decode.add("d-1", 70, params, **embeds)
    assert decode.step()[0].connector.reqs_to_recv.keys() == {"d-1"}
    decode.add("d-2", 70, params, prompt_embeds=torch.zeros(70, 8))
    assert decode.step()[0].rejected.keys() == {"d-2"}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_ends_as_the_policy_says(base, params, policy):
    decode = Side(base, CONSUMER, policy)
    decode.add("d-1", 70, params)
    decode.step()
    _, outputs = decode.step(failed={"d-1"})
    if policy == "fail":
        assert outputs["d-1"].finish_reason is FinishReason.ERROR
    else:
        message, outputs = decode.run()
        assert outputs["d-1"].finish_reason is FinishReason.LENGTH
        assert not message.connector
    decode.step()
    decode.check_that_nothing_is_left()


def test_a_prompt_that_is_here_releases_the_producer_once(base, decode):
    _, params = hand_over(base, 2 * BLOCK)
    decode.add("d-0", 2 * BLOCK + 6)
    decode.run()
    releases = []
    decode.add("d-1", 2 * BLOCK + 6, params, max_tokens=3)
    for _ in range(5):
        message, _ = decode.step()
        assert not message.connector.reqs_to_recv
        releases += message.connector.reqs_to_release
    assert releases == ["d-1"]
    decode.check_that_nothing_is_left()


def test_a_prompt_that_is_partly_here_is_fetched_from_there_on(base, decode, params):
    decode.add("d-0", 70)
    decode.run()
    decode.add("d-1", 70, params)
    message, _ = decode.step()
    fetched = message.connector.reqs_to_recv["d-1"]
    assert (fetched.starts, len(fetched.blocks[0])) == ((2 * BLOCK,), 1)


def test_a_prompt_that_no_host_buffer_holds_is_computed_here(base):
    _, params = hand_over(base, 70)
    decode = Side(base, CONSUMER, host_buffer_blocks=2)
    decode.add("d-1", 70, params)
    message, outputs = decode.step()
    assert outputs["d-1"].finish_reason is FinishReason.LENGTH
    assert message.connector.reqs_to_release.keys() == {"d-1"}
    decode.step()
    decode.check_that_nothing_is_left()


def test_requests_wait_for_host_blocks(base):
    decode = Side(base, CONSUMER, host_buffer_blocks=3)
    for name in "12":
        _, params = hand_over(base, 70, f"p-{name}", first=1000 * int(name))
        decode.add(f"d-{name}", 70, params, first=1000 * int(name))
    message, _ = decode.step()
    assert message.connector.reqs_to_recv.keys() == {"d-1"}
    decode.step(received={"d-1"})
    message, _ = decode.step()
    assert message.connector.reqs_to_recv.keys() == {"d-2"}


class FakeWorker:
    """The worker half, which does nothing."""

    def __init__(self):
        self.taken, self.finished = [], Finished()

    def start_load_kv(self, metadata, event):
        self.taken.append(metadata)

    def save_kv_layer(self, layer, event):
        self.taken.append(layer)

    def get_finished(self, _timeout):
        finished, self.finished = self.finished, Finished()
        return finished


def test_the_facts_that_are_served_are_those_of_the_workers(base):
    """Loading a model changes its settings, in the processes of the workers alone."""
    producer = Side(base, PRODUCER).scheduler.connector
    hello = AgentMetadata(PRODUCER, (0, 0), b"hello")
    loaded = {(0, 0): connector._WorkerHello(hello, {"config.tuning": "false"})}
    producer.set_xfer_handshake_metadata_pp_aware(loaded)
    try:
        ask = functools.partial(fetch, producer._side.address, engine_id=PRODUCER)
        assert ask(compatibility={"config.tuning": "false"}).hellos == {(0, 0): b"hello"}
        with pytest.raises(CompatMismatch, match=r"config.tuning is 'true' here, 'false' there"):
            ask(compatibility={"config.tuning": "true"})
    finally:
        producer.shutdown()
    unlike = connector._WorkerHello(hello, {"config.tuning": "true"})
    with pytest.raises(ConfigError, match=r"rank \(0, 1\) of engine .*'config.tuning': 'true'"):
        producer.set_xfer_handshake_metadata_pp_aware({**loaded, (0, 1): unlike})


def worker_of(side):
    connector = PyNixlKVConnector(side.config, KVConnectorRole.WORKER, side.caches)
    connector._worker = FakeWorker()
    return connector


def results_of(worker):
    """What a worker has received, failed to receive, and sent, as vLLM asks for it."""
    if releases.TransferResults is not None:
        results = worker.get_transfer_results(set())
        return results.finished_recving, results.failed_recving, results.finished_sending
    sent, received = worker.get_finished(set())
    return received, {"d-1"} if worker.get_block_ids_with_load_errors() else set(), sent


def test_a_worker_reports_what_was_rejected_as_failed_once(base):
    decode = Side(base, CONSUMER)
    worker = worker_of(decode)
    decode.add("d-1", 70, {"do_remote_prefill": True})
    worker.bind_connector_metadata(decode.step()[0])
    worker.start_load_kv(None)
    worker._worker.finished.received.add("d-2")
    assert results_of(worker) == ({"d-1", "d-2"}, {"d-1"}, set())
    assert not any(results_of(worker))


def test_a_worker_hears_of_a_step_before_its_layers(base):
    producer = Side(base, PRODUCER, transfer_mode="push", layerwise=True)
    worker = worker_of(producer)
    names = producer.caches.kv_cache_groups[0].layer_names
    worker._layer_numbers = {name: number for number, name in enumerate(names)}
    producer.add("p-1", 200, {"do_remote_decode": True})
    message = producer.step()[0]
    worker.bind_connector_metadata(message)
    for name in names:
        worker.save_kv_layer(name, torch.empty(0), None)
    worker.start_load_kv(None)  # vLLM calls it after the forward pass
    assert worker._worker.taken == [message.connector, 0, 1]
    worker.bind_connector_metadata(Side(base, PRODUCER).step()[0])
    worker.save_kv_layer(names[0], torch.empty(0), None)
    assert len(worker._worker.taken) == 4  # the message, and no layer


def test_layers_of_one_number_are_not_pushed_one_by_one():
    names = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    assert list(connector._layer_numbers(names).values()) == [0, 1]
    with pytest.raises(ConfigError, match="have one number, 0; leave layerwise out"):
        connector._layer_numbers([*names, "draft_model.layers.0.self_attn.attn"])


def test_layers_are_pushed_in_push_mode_only():
    with pytest.raises(ValueError, match="layerwise"):
        PyNixlKVConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    extra = {"layerwise": True, "transfer_mode": "push"}
    assert PyNixlKVConnector.requires_piecewise_for_cudagraph(extra)
    assert not PyNixlKVConnector.requires_piecewise_for_cudagraph({})


def broken(*_args, **_options):
    raise RuntimeError("a defect")


@pytest.mark.parametrize(
    "place", ["on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"]
)
def test_a_defect_in_a_consumer_fails_its_request_only(base, params, monkeypatch, place):
    decode = Side(base, CONSUMER)
    side = decode.scheduler.connector._side
    with monkeypatch.context() as patch:
        patch.setattr(side, place, broken)
        decode.add("d-1", 70, params)
        message, _ = decode.step()
    assert message.rejected == {"d-1": "a defect"}
    decode.add("d-2", 70, hand_over(base, 70)[1])
    _, outputs = decode.step(failed=message.rejected)
    assert outputs["d-1"].finish_reason is FinishReason.ERROR
    decode.step(received={"d-2"})
    assert decode.run()[1]["d-2"].finish_reason is FinishReason.LENGTH
    decode.step()
    decode.check_that_nothing_is_left()


@pytest.mark.parametrize("place", ["_hand_over", "_cut", "save"])
def test_a_defect_in_a_producer_fails_its_hand_off_only(base, monkeypatch, place):
    producer = Side(base, PRODUCER, transfer_mode="push", layerwise=True)
    side = producer.scheduler.connector._side
    with monkeypatch.context() as patch:
        patch.setattr(side, place, broken)
        producer.add("p-1", 70, {"do_remote_decode": True})
        _, outputs = producer.run()
    assert outputs["p-1"].finish_reason is FinishReason.LENGTH
    is_held = outputs["p-1"].kv_transfer_params is not None
    assert is_held == (place == "save")
    message, _ = producer.step(sent={"p-1"} if is_held else ())
    assert ("p-1" in message.connector.reqs_not_held) != is_held
    producer.add("p-2", 70, {"do_remote_decode": True})
    assert producer.run()[1]["p-2"].kv_transfer_params
    producer.step(sent={"p-2"})
    producer.step()
    producer.check_that_nothing_is_left()


@pytest.mark.parametrize("place", ["_hand_over", "_cut"])
def test_a_turn_that_cannot_be_held_releases_the_producer_once(base, monkeypatch, place):
    _, params = hand_over(base, 2 * BLOCK)
    decode = Side(base, BOTH, "recompute", bidirectional_kv_xfer=True)
    decode.add("d-0", 2 * BLOCK + 6)
    decode.run()
    decode.add("d-1", 2 * BLOCK + 6, params, max_tokens=2)  # its prompt is here already
    message, _ = decode.step()
    released = list(message.connector.reqs_to_release)
    with monkeypatch.context() as patch:
        patch.setattr(decode.scheduler.connector._side, place, broken)
        _, outputs = decode.step()
    assert outputs["d-1"].finish_reason is FinishReason.LENGTH
    assert outputs["d-1"].kv_transfer_params is None
    message, _ = decode.step()
    released += message.connector.reqs_to_release
    assert released == ["d-1"]
    decode.check_that_nothing_is_left()


def test_a_step_that_a_worker_cannot_begin_fails_its_requests_only(base, params, monkeypatch):
    decode, producer = Side(base, CONSUMER), Side(base, PRODUCER)
    worker = worker_of(decode)
    decode.add("d-1", 70, params)
    producer.add("p-1", 70, {"do_remote_decode": True})
    producer.run()
    with monkeypatch.context() as patch:
        patch.setattr(worker._worker, "start_load_kv", broken)
        for side in (decode, producer):
            worker.bind_connector_metadata(side.step()[0])
            worker.start_load_kv(None)
        patch.setattr(worker._worker, "get_finished", broken)
        assert results_of(worker) == ({"d-1"}, {"d-1"}, {"p-1"})
    worker._worker.finished.received.add("d-2")
    assert results_of(worker) == ({"d-2"}, set(), set())


def first_turn(base, length=70, max_tokens=60, **extra):
    """Both engines after a turn, its tokens, and the hand-off for the next one."""
    extra["bidirectional_kv_xfer"] = True
    prefill, params = hand_over(base, length)
    decode = Side(base, BOTH, "recompute", **extra)
    decode.add("d-1", length, params, max_tokens=max_tokens)
    decode.step()
    decode.step(received={"d-1"})
    prefill.step(sent={"p-1"})
    for _ in range(max_tokens):
        _, outputs = decode.run()
        if outputs["d-1"].finish_reason is not None:
            return (
                prefill,
                decode,
                [*range(3, 3 + length), *[5] * max_tokens],
                (outputs["d-1"].kv_transfer_params),
            )
    raise AssertionError("the turn has no end")


def test_a_finished_answer_is_held_for_the_next_turn_which_prefill_fetches(base):
    prefill, decode, tokens, params = first_turn(base)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (False, True)
    assert params["remote_num_tokens"] == 128  # the last of 130 tokens has no KV
    turn_id = params["remote_request_id"]
    message, _ = decode.step()
    assert [list(message.connector.reqs_to_send[turn_id].blocks[0])] == params["remote_block_ids"]
    assert decode.num_free == BLOCKS - 1 - 5
    assert not decode.scheduler.has_requests()  # vLLM makes no steps for it

    prefill.add("p-2", 0, {**params, "do_remote_prefill": False}, tokens=[*tokens, 7, 8, 9])
    message, _ = prefill.step()
    fetched = message.connector.reqs_to_recv["p-2"]
    assert (fetched.starts, len(fetched.blocks[0]), fetched.num_tokens) == ((64,), 2, 128)
    prefill.step(received={"p-2"})
    _, outputs = prefill.run()
    assert outputs["p-2"].kv_transfer_params["remote_num_tokens"] == 133
    decode.add("d-2", 0, outputs["p-2"].kv_transfer_params, tokens=[*tokens, 7, 8, 9])
    message, _ = decode.step(sent={turn_id})
    assert message.connector.reqs_to_recv["d-2"].starts == (128,)  # decode has what it had
    decode.step(received={"d-2"})
    _, outputs = decode.run()
    decode.step(sent={outputs["d-2"].kv_transfer_params["remote_request_id"]})
    prefill.step(sent={"p-2"})
    for side in (prefill, decode):
        side.check_that_nothing_is_left()


def test_a_turn_whose_blocks_are_gone_or_of_other_tokens_is_computed_by_prefill(base):
    _, _, tokens, params = first_turn(base)
    prefill = Side(base, BOTH, "recompute")
    prefill.add("p-2", 0, params, tokens=[*tokens, 7])
    prefill.step()
    prefill.step(failed={"p-2"})
    prefill.add("p-3", 0, params, tokens=[*tokens[:100], 7, *tokens[101:]])
    made = {}
    while len(made) < 2:
        message, outputs = prefill.run()
        assert not message.connector.reqs_to_recv
        made |= {name: o.kv_transfer_params["remote_num_tokens"] for name, o in outputs.items()}
    assert made == {"p-2": 131, "p-3": 130}
    prefill.step(sent=made.keys())
    prefill.check_that_nothing_is_left()


def test_held_turns_give_way_to_requests_that_need_their_blocks(base):
    _, decode, _, params = first_turn(base)
    turn_id = params["remote_request_id"]
    decode.step()
    decode.add("big", 16 * BLOCK, first=1000)
    message, _ = decode.step()
    assert message.connector.reqs_to_end.keys() == {turn_id}
    message, _ = decode.step(sent={turn_id})
    assert not message.connector
    decode.run()
    decode.step()
    decode.check_that_nothing_is_left()


def test_held_turns_give_way_to_a_loaded_request_that_needs_one_more_block(base):
    _, decode, _, params = first_turn(base)
    turn_id = params["remote_request_id"]
    decode.step()
    decode.scheduler.scheduler_reserve_full_isl = False
    # What is loaded takes all 15 free blocks, and the tokens after it need another one.
    _, params = hand_over(base, 15 * BLOCK, first=1000)
    decode.add("d-2", 15 * BLOCK + 6, params, first=1000)
    message, _ = decode.step()
    assert message.connector.reqs_to_recv.keys() == {"d-2"}
    assert not message.connector.reqs_to_end
    assert decode.num_free == 0
    decode.step(received={"d-2"})
    message, _ = decode.step()
    assert message.connector.reqs_to_end.keys() == {turn_id}
    decode.step(sent={turn_id})
    _, outputs = decode.run()
    assert outputs["d-2"].finish_reason is FinishReason.LENGTH


def test_a_reset_of_the_cache_releases_held_turns(base):
    _, decode, _, params = first_turn(base)
    turn_id = params["remote_request_id"]
    decode.step()
    assert not decode.scheduler.has_requests()
    assert not decode.scheduler.reset_connector_cache()
    message, _ = decode.step()
    assert message.connector.reqs_to_end.keys() == {turn_id}
    assert decode.scheduler.has_requests()  # its workers are still to report
    decode.step(sent={turn_id})
    assert not decode.scheduler.has_requests()
    assert decode.scheduler.reset_connector_cache()
    decode.check_that_nothing_is_left()


def test_the_report_of_another_connector_frees_no_turn(base):
    _, decode, tokens, params = first_turn(base)
    reports = KVConnectorOutput(finished_sending={"d-1"})
    decode.scheduler.connector.update_connector_output(reports)
    assert reports.finished_sending == {"d-1"}  # for vLLM, which has been asked to wait for it
    assert decode.num_free == BLOCKS - 1 - 5
    prefill = Side(base, BOTH, "recompute")
    prefill.add("p-2", 0, params, tokens=[*tokens, 7])
    assert prefill.step()[0].connector.reqs_to_recv.keys() == {"p-2"}
    decode.step(sent={params["remote_request_id"]})
    decode.check_that_nothing_is_left()


@pytest.mark.parametrize("is_for_a_consumer", [True, False])
def test_an_id_can_be_used_again_while_its_turn_is_held(base, is_for_a_consumer):
    _, decode, _, params = first_turn(base)
    again = {"do_remote_decode": True}
    if not is_for_a_consumer:
        again = hand_over(base, 70, first=1000)[1]
    decode.add("d-1", 70, again, first=1000)
    decode.step()
    if not is_for_a_consumer:
        decode.step(received={"d-1"})
        _, outputs = decode.run()
        answer = outputs["d-1"].kv_transfer_params
        ids = {params["remote_request_id"], answer["remote_request_id"]}
    else:
        ids = {params["remote_request_id"], "d-1"}
        assert "d-1" in decode.scheduler.requests
    assert len(ids) == 2
    assert decode.num_free == BLOCKS - 1 - 5 - 3
    for name in ids:
        decode.step(sent={name})
    decode.step()
    decode.check_that_nothing_is_left()


def test_conversations_need_both_roles(base):
    with pytest.raises(ConfigError, match="expected 'kv_both'"):
        Side(base, CONSUMER, bidirectional_kv_xfer=True)
