"""vLLM's own descriptions of its caches, as geometries. No engine is started."""

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from pynixlkv import TransferPlan
from pynixlkv.connector.scheduler import GroupSpec
from pynixlkv.errors import ConfigError, LayoutError, PlanError
from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.vllm import caches
from pynixlkv.vllm.caches import ParallelPlace, group_specs, kv_cache

pytestmark = pytest.mark.ci

BLOCKS = 10


def full(**changes):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**{**fields, **changes})


def sliding(**changes):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    return SlidingWindowSpec(**{**fields, "sliding_window": 40, **changes})


def config(*groups):
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec) for names, spec in groups])


def tensor(spec, blocks=BLOCKS, ratio=1):
    return torch.zeros(
        blocks * ratio,
        spec.num_heads,
        spec.block_size // ratio,
        spec.state_content_size_bytes // spec.dtype.itemsize,
        dtype=spec.dtype,
    )


def names(*numbers):
    return [f"model.layers.{n}.self_attn.attn" for n in numbers]


def describe(kv_config, tensors, total=4, place=None, is_opaque=False, **options):
    place = place or ParallelPlace((0, 1))
    return kv_cache(tensors, kv_config, total, place, is_opaque=is_opaque, **options)


def one_layer(spec, tp=(0, 1), total=4, **options):
    """Return a cache of one layer with this spec, and its tensor."""
    (name,) = names(0)
    made = tensor(spec)
    cache, _ = describe(config(([name], spec)), {name: made}, total, ParallelPlace(tp), **options)
    return cache, made


def test_one_group():
    spec = full()
    kv_config = config((names(0, 1), spec))
    cache, block_table_index = describe(kv_config, {n: tensor(spec) for n in names(0, 1)})
    (group,) = cache.geometry.groups
    assert block_table_index == {"0:model.layers.#.self_attn.attn": 0}
    assert group.layers == (0, 1)
    assert (group.block_size, group.num_blocks, group.kv_heads) == (16, BLOCKS, 4)
    assert (group.head_dim, group.planes, group.opaque_axes) == (64, 1, "")
    assert group_specs(kv_config, 1) == [GroupSpec(16, window=None, null_block=0)]


def test_groups_that_share_memory_have_tables_of_their_own():
    # As the hybrid manager allocates: layer i of each group lies in the same memory.
    specs = full(), sliding()
    kv_config = config((names(0, 2), specs[0]), (names(1, 3), specs[1]))
    shared = [tensor(specs[0]) for _ in range(2)]
    tensors = dict(zip([*names(0, 2), *names(1, 3)], shared * 2, strict=True))
    cache, block_table_index = describe(kv_config, tensors)
    assert [group.layers for group in cache.geometry.groups] == [(0, 2), (1, 3)]
    assert list(block_table_index.values()) == [0, 1]
    assert len(cache.spans) <= 2
    assert [s.window for s in group_specs(kv_config, 1)] == [None, 40]


def test_layers_of_other_shapes_in_one_group_share_its_table():
    specs = {names(0)[0]: full(), names(1)[0]: full(head_size=64)}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    kv_config = config((names(0, 1), uniform))
    cache, block_table_index = describe(kv_config, {n: tensor(s) for n, s in specs.items()})
    assert [group.head_dim for group in cache.geometry.groups] == [64, 128]
    assert list(block_table_index.values()) == [0, 0]


@pytest.mark.parametrize(("size", "held"), [(2, 2), (8, 1)])
def test_heads_of_a_rank(size, held):
    spec = full(num_kv_heads=held, max_tp_shards=4)
    kv_config = config((names(0), spec))
    place = ParallelPlace((size - 1, size))
    cache, _ = describe(kv_config, {names(0)[0]: tensor(spec)}, place=place)
    (group,) = cache.geometry.groups
    assert group.kv_heads == 4
    assert group.heads == range(4 - held, 4)


def test_a_latent_is_whole_on_every_rank():
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    kv_config = config((names(0), spec))
    cache, _ = describe(kv_config, {names(0)[0]: tensor(spec)}, place=ParallelPlace((3, 8)))
    (group,) = cache.geometry.groups
    assert (group.kv_heads, group.head_dim, group.dtype) == (None, 576, "bfloat16")


def test_blocks_that_the_kernels_split():
    spec = full(block_size=64)
    kv_config = config((names(0), spec))
    cache, _ = describe(kv_config, {names(0)[0]: tensor(spec, ratio=4)})
    (group,) = cache.geometry.groups
    assert (group.block_size, group.num_blocks) == (16, 4 * BLOCKS)
    assert group_specs(kv_config, 1)[0].block_size == 64


def test_opaque_pages_do_not_plan_against_others():
    spec, other = full(), full(block_size=32)
    ours, _ = describe(config((names(0), spec)), {names(0)[0]: tensor(spec)}, is_opaque=True)
    theirs, _ = describe(config((names(0), other)), {names(0)[0]: tensor(other)}, is_opaque=True)
    TransferPlan(ours.geometry, ours.geometry)
    with pytest.raises(ConfigError, match=r"opaque_axes|opaque"):
        TransferPlan(ours.geometry, theirs.geometry)


def quantised(mode, **changes):
    dtype = torch.int8 if mode.name.startswith("INT8") else torch.uint8
    return full(dtype=dtype, kv_quant_mode=mode, **changes)


FORMATS = {
    KVQuantMode.NONE: ("float32", ""),
    KVQuantMode.FP8_PER_TENSOR: ("float8_e4m3fnuz", ""),
    KVQuantMode.INT8_PER_TOKEN_HEAD: ("int8:int8_per_token_head", ""),
    KVQuantMode.FP8_PER_TOKEN_HEAD: ("float8_e4m3fnuz:fp8_per_token_head", ""),
    KVQuantMode.INT4_PER_TOKEN_HEAD: ("uint8:int4_per_token_head", ""),
}


@pytest.mark.parametrize("mode", KVQuantMode, ids=lambda mode: mode.name)
def test_each_quantisation_mode_is_known_to_be_sliceable_or_opaque(mode):
    spec = full() if mode is KVQuantMode.NONE else quantised(mode)
    spec = TritonAttentionBackend.customize_spec(spec)
    (group,) = one_layer(spec, fp8_format="float8_e4m3fnuz")[0].geometry.groups
    packing = f"uint8:{mode.name.lower()}"
    assert (group.dtype, group.opaque_axes) == FORMATS.get(mode, (packing, "HND"))


def test_fn_and_fnuz_bytes_do_not_meet():
    spec = quantised(KVQuantMode.FP8_PER_TENSOR)
    fn, fnuz = (one_layer(spec, fp8_format=f"float8_e4m3{kind}")[0] for kind in ("fn", "fnuz"))
    with pytest.raises(PlanError, match="dtype is 'float8_e4m3fn' here and 'float8_e4m3fnuz'"):
        TransferPlan(fn.geometry, fnuz.geometry)


def test_inline_scales_move_with_their_heads_between_unlike_tp_sizes():
    whole, parts = (
        one_layer(
            TritonAttentionBackend.customize_spec(quantised(KVQuantMode.INT4_PER_TOKEN_HEAD))
        ),
        [
            one_layer(
                TritonAttentionBackend.customize_spec(
                    quantised(KVQuantMode.INT4_PER_TOKEN_HEAD, num_kv_heads=2)
                ),
                (rank, 2),
            )
            for rank in (0, 1)
        ],
    )
    network = FakeNetwork()
    with FakeAgent("decode", network) as decode:
        decode.register(whole[0])
        for rank, (cache, values) in enumerate(parts):
            values.random_(256, generator=torch.Generator().manual_seed(rank))
            with FakeAgent(f"prefill {rank}", network) as prefill:
                prefill.register(cache)
                peer = decode.connect(prefill.hello(cache))
                heads = [2 * rank, 2 * rank + 1]
                plan = TransferPlan(whole[0].geometry, peer.geometry, heads=heads)
                decode.read(peer, plan, range(BLOCKS), range(BLOCKS)).wait(60)
    assert torch.equal(whole[1], torch.cat([values for _, values in parts], dim=1))


def nvfp4(heads=4, **changes):
    """The spec that FlashInfer's backend makes: slots of K's heads, then of V's."""
    return quantised(
        KVQuantMode.NVFP4,
        num_kv_heads=heads,
        num_head_slots=2 * heads,
        state_content_bytes=32 // 2 + 32 // 16,
        **changes,
    )


def test_opaque_pages_move_whole_between_equal_tp_sizes_a_tail_included():
    (ours, decode_values), (theirs, prefill_values) = (one_layer(nvfp4(2), (1, 2)) for _ in "ab")
    prefill_values.random_(256)
    network = FakeNetwork()
    with FakeAgent("decode", network) as decode, FakeAgent("prefill", network) as prefill:
        decode.register(ours)
        prefill.register(theirs)
        peer = decode.connect(prefill.hello(theirs))
        plan = TransferPlan(ours.geometry, peer.geometry)
        decode.read(peer, plan, [5, 1], [3, 7], num_tokens=17).wait(60)
    expected = torch.zeros_like(prefill_values)
    expected[[5, 1]] = prefill_values[[3, 7]]
    assert torch.equal(decode_values, expected)


@pytest.mark.parametrize(("heads", "tp"), [(4, (0, 1)), (1, (3, 4)), (1, (7, 8))])
def test_opaque_pages_of_unlike_tp_sizes_are_refused_by_the_name_of_the_mode(heads, tp):
    options = {"backends": {names(0)[0]: "FLASHINFER"}}
    ours, theirs = one_layer(nvfp4(2), (1, 2), **options)[0], one_layer(nvfp4(heads), tp, **options)
    with pytest.raises(PlanError, match="indivisible in pages of uint8:nvfp4 of FLASHINFER, is '4"):
        TransferPlan(ours.geometry, theirs[0].geometry)


def test_opaque_pages_of_unlike_backends_or_block_sizes_are_refused():
    ours, theirs = (
        one_layer(nvfp4(), backends={names(0)[0]: backend})[0] for backend in ("A", "B")
    )
    with pytest.raises(PlanError, match="uint8:nvfp4 of A' here and 'uint8:nvfp4 of B' there"):
        TransferPlan(ours.geometry, theirs.geometry)
    with pytest.raises(PlanError, match="token axis is opaque"):
        TransferPlan(one_layer(nvfp4())[0].geometry, one_layer(nvfp4(block_size=32))[0].geometry)


def test_an_unknown_quantisation_mode_is_opaque():
    class Mode:
        name = "INT3_PER_GALAXY"

    (group,) = one_layer(full(kv_quant_mode=Mode()))[0].geometry.groups
    assert (group.dtype, group.opaque_axes) == ("float32:int3_per_galaxy", "HND")


@pytest.mark.parametrize(
    "spec",
    [
        full(num_head_slots=2, state_content_bytes=4 * 32 * 4),
        full(state_content_bytes=1000),
        full(dtype=torch.uint8),
        MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8),
        MLAAttentionSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=128,
            dtype=torch.bfloat16,
            cache_role=SparseCacheRole.INDEXER,
        ),
    ],
    ids=["planes of K and V", "a content of its own", "bytes", "indexer of bytes", "indexer"],
)
def test_pages_that_no_field_explains_are_opaque(spec):
    (group,) = one_layer(spec)[0].geometry.groups
    assert group.opaque_axes == "HND"
    assert group.dtype.endswith(":packed")


KINDS = {
    ChunkedLocalAttentionSpec: {"attention_chunk_size": 64},
    CircularBufferSpec: {},
    CrossAttentionSpec: {},
    EncoderOnlyAttentionSpec: {},
    HiddenStateCacheSpec: {},
    RSWASpec: {"rswa_window": 32},
    SinkFullAttentionSpec: {"sink_len": 4},
    type("OfAPlugin", (FullAttentionSpec,), {}): {},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_subclasses_with_blocks_of_their_own_are_refused_by_name(kind):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    spec = kind(**fields, **KINDS[kind])
    for group_spec in (spec, UniformTypeKVCacheSpecs(16, kv_cache_specs={names(0)[0]: spec})):
        with pytest.raises(ConfigError, match=f"cache of kind {kind.__name__}"):
            group_specs(config((names(0), group_spec)), 1)


def test_every_kind_of_attention_of_this_release_is_decided():
    attention = kv_cache_interface.AttentionSpec
    kinds = {
        kind
        for kind in vars(kv_cache_interface).values()
        if isinstance(kind, type) and issubclass(kind, attention)
    }
    known = {getattr(kv_cache_interface, name) for name in caches._KINDS}
    assert kinds - known == {kind for kind in KINDS if kind.__name__ != "OfAPlugin"}


def test_what_is_not_supported_is_named():
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match="MambaSpec"):
        group_specs(config((["model.layers.0.mixer"], state)), 1)
    spec = full()
    with pytest.raises(LayoutError, match=r"blocks, heads, tokens, content"):
        describe(config((names(0), spec)), {names(0)[0]: torch.zeros(4, 4)})
    with pytest.raises(LayoutError, match="2 numbers"):
        describe(config((["a.0.b.1.c"], spec)), {"a.0.b.1.c": tensor(spec)})
