"""vLLM's own descriptions of its caches, as geometries. No engine is started."""

import ctypes
from fractions import Fraction

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.utils.torch_utils import nvfp4_split_data_scale
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
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
from pynixlkv.connector.metadata import ParallelSizes
from pynixlkv.connector.scheduler import GroupSpec
from pynixlkv.connector.tp_mapping import transfer_slices
from pynixlkv.errors import ConfigError, IncompatibleLayoutError, LayoutError, PlanError
from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.vllm.caches import (
    CACHE_KINDS,
    ParallelPlace,
    group_specs,
    kv_cache,
    layer_number,
    withheld_tokens,
)

pytestmark = pytest.mark.ci

BLOCKS = 10


def full(**changes):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**{**fields, **changes})


def sliding(**changes):
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    return SlidingWindowSpec(**{**fields, "sliding_window": 40, **changes})


def mamba(kind, shapes, dtype=torch.float32, **changes):
    return MambaSpec(
        block_size=32,
        shapes=shapes,
        dtypes=(dtype,) * len(shapes),
        mamba_type=MambaAttentionBackendEnum[kind],
        **changes,
    )


def config(*groups):
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec) for names, spec in groups])


def tensor(spec, blocks=BLOCKS, ratio=1):
    return torch.zeros(
        blocks * ratio,
        spec.num_heads,
        spec.get_num_kernel_states(spec.block_size // ratio),
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
    cache = describe(config(([name], spec)), {name: made}, total, ParallelPlace(tp), **options)
    return cache, made


def test_one_group():
    spec = full()
    kv_config = config((names(0, 1), spec))
    cache = describe(kv_config, {n: tensor(spec) for n in names(0, 1)})
    (group,) = cache.geometry.groups
    assert (group.name, group.table) == ("0:model.layers.#.self_attn.attn", "0")
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
    cache = describe(kv_config, tensors)
    assert [group.layers for group in cache.geometry.groups] == [(0, 2), (1, 3)]
    assert [group.table for group in cache.geometry.groups] == ["0", "1"]
    assert len(cache.spans) <= 2
    assert [s.window for s in group_specs(kv_config, 1)] == [None, 40]


def test_layers_of_other_shapes_in_one_group_share_its_table():
    specs = {names(0)[0]: full(), names(1)[0]: full(head_size=64)}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    kv_config = config((names(0, 1), uniform))
    cache = describe(kv_config, {n: tensor(s) for n, s in specs.items()})
    assert [group.head_dim for group in cache.geometry.groups] == [64, 128]
    assert [group.table for group in cache.geometry.groups] == ["0", "0"]


@pytest.mark.parametrize(("size", "held"), [(2, 2), (8, 1)])
def test_heads_of_a_rank(size, held):
    spec = full(num_kv_heads=held, max_tp_shards=4)
    kv_config = config((names(0), spec))
    place = ParallelPlace((size - 1, size))
    cache = describe(kv_config, {names(0)[0]: tensor(spec)}, place=place)
    (group,) = cache.geometry.groups
    assert group.kv_heads == 4
    assert group.heads == range(4 - held, 4)


def test_a_latent_is_whole_on_every_rank():
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    kv_config = config((names(0), spec))
    cache = describe(kv_config, {names(0)[0]: tensor(spec)}, place=ParallelPlace((3, 8)))
    (group,) = cache.geometry.groups
    assert (group.kv_heads, group.head_dim, group.dtype) == (None, 576, "bfloat16")


def test_blocks_that_the_kernels_split():
    spec = full(block_size=64)
    kv_config = config((names(0), spec))
    cache = describe(kv_config, {names(0)[0]: tensor(spec, ratio=4)})
    (group,) = cache.geometry.groups
    assert (group.block_size, group.num_blocks) == (16, 4 * BLOCKS)
    assert group_specs(kv_config, 1)[0].block_size == 64


def test_opaque_pages_do_not_plan_against_others():
    spec, other = full(), full(block_size=32)
    ours = describe(config((names(0), spec)), {names(0)[0]: tensor(spec)}, is_opaque=True)
    theirs = describe(config((names(0), other)), {names(0)[0]: tensor(other)}, is_opaque=True)
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
    options = {"backends": {names(0)[0]: "TRITON"}}
    ours, theirs = one_layer(nvfp4(2), (1, 2), **options)[0], one_layer(nvfp4(heads), tp, **options)
    with pytest.raises(PlanError, match="indivisible in pages of uint8:nvfp4 of TRITON, is '4"):
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


REFUSED = {
    kv_cache_interface.AttentionSpec: {},
    CrossAttentionSpec: {},
    EncoderOnlyAttentionSpec: {},
    HiddenStateCacheSpec: {},
    type("OfAPlugin", (FullAttentionSpec,), {}): {},
    # As above, but with the name of one that is moved.
    type("FullAttentionSpec", (FullAttentionSpec,), {}): {},
}


def of_kind(kind, **fields):
    plain = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    return kind(**{**plain, **fields})


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_kinds_with_blocks_of_their_own_are_refused_by_name(kind):
    spec = of_kind(kind, **REFUSED[kind])
    for group_spec in (spec, UniformTypeKVCacheSpecs(16, kv_cache_specs={names(0)[0]: spec})):
        with pytest.raises(ConfigError, match=f"cache of kind {kind.__name__}, which .* not move"):
            group_specs(config((names(0), group_spec)), 1)


@pytest.mark.parametrize(
    "spec",
    [
        HiSparseHotSpec(block_size=16, page_size=64, blocks_per_request=2),
        HiSparseResidentSpec(block_size=16, page_size=64),
        mamba("CUSTOM", ((4, 4),)),
        mamba("MAMBA2", ((4, 4), (4, 4, 4), (4, 2, 4), (4, 2), (1, 2, 4))),
        full(tokens_per_state=Fraction(1, 2)),
    ],
    ids=["hot", "resident", "state of an unknown type", "ReplaySSM", "two states a token"],
)
def test_caches_that_are_not_understood_are_refused_by_name(spec):
    with pytest.raises(ConfigError, match=type(spec).__name__):
        group_specs(config((names(0), spec)), 1)


def test_every_kind_of_this_release_is_decided():
    kinds = {
        kind.__name__
        for kind in vars(kv_cache_interface).values()
        if isinstance(kind, type) and issubclass(kind, kv_cache_interface.KVCacheSpec)
    }
    assert kinds - set(CACHE_KINDS) == {"KVCacheSpec", "UniformTypeKVCacheSpecs"}
    assert all(bool(kind.moves) != bool(kind.refused) for kind in CACHE_KINDS.values())


TABLES = {
    "whole": (full(), GroupSpec(16, null_block=0)),
    "RSWA": (of_kind(RSWASpec, rswa_window=32), GroupSpec(16, null_block=0)),
    "sink": (of_kind(SinkFullAttentionSpec, sink_len=16), GroupSpec(16, null_block=0)),
    "window": (sliding(extra_retained_tokens=2), GroupSpec(16, window=42, null_block=0)),
    "chunk": (
        of_kind(ChunkedLocalAttentionSpec, attention_chunk_size=64),
        GroupSpec(16, chunk=64, null_block=0),
    ),
    "ring": (of_kind(CircularBufferSpec), GroupSpec(0, null_block=0)),
    "state": (mamba("MAMBA1", ((3, 8), (8, 4))), GroupSpec(0, state_tokens=32, null_block=0)),
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_table_of_each_kind_is_read_by_its_rule(kind):
    spec, expected = TABLES[kind]
    assert group_specs(config((names(0), spec)), 1) == [expected]


@pytest.mark.parametrize(
    ("spec", "withheld"),
    [(full(), 0), (sliding(), 1), (TABLES["chunk"][0], 1), (TABLES["state"][0], 1)],
)
def test_prefill_leaves_a_token_to_decode_where_the_cache_cannot_go_back(spec, withheld):
    assert withheld_tokens(config((names(0), spec))) == withheld
    assert withheld_tokens(config((names(0), spec)), 4) == 3


def test_a_tensor_of_another_rank_than_four_is_refused():
    with pytest.raises(LayoutError, match=r"blocks, heads, tokens, content"):
        describe(config((names(0), full())), {names(0)[0]: torch.zeros(4, 4)})


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ([f"m.layers.{i}.self_attn.{j}.attn" for i in (0, 1) for j in (0, 1)], (0, 1, 4096, 4097)),
        (["model.attn"], (0,)),
        (["a.7.b.0.c.2.d"], (7 * 4096**2 + 2,)),
    ],
    ids=["two modules", "no number", "three numbers"],
)
def test_layers_are_told_apart_by_their_names(layers, numbers):
    spec = full()
    cache = describe(config((layers, spec)), {name: tensor(spec) for name in layers})
    assert [group.layers for group in cache.geometry.groups] == [numbers]
    assert tuple(map(layer_number, layers)) == numbers


def test_layers_of_a_draft_are_a_group_of_their_own():
    layers = ["model.layers.0.self_attn.attn", "draft_model.layers.0.self_attn.attn"]
    spec = full()
    cache = describe(config((layers, spec)), {name: tensor(spec) for name in layers})
    assert [group.layers for group in cache.geometry.groups] == [(0,), (0,)]
    assert [group.table for group in cache.geometry.groups] == ["0", "0"]


def test_layers_that_share_a_cache_are_described_once():
    spec = full()
    shared = tensor(spec)
    kv_config = config((names(0, 1, 2), spec))
    cache = describe(
        kv_config, dict(zip(names(0, 1, 2), (shared, tensor(spec), shared), strict=True))
    )
    assert [group.layers for group in cache.geometry.groups] == [(0, 1)]


# ---- what arrives, between any numbers of ranks


def move(consumers, producers, tables):
    """Move blocks between the ranks of two engines: tables of the consumer's and of the other's."""
    sizes = [ParallelSizes(tp=len(side)) for side in (consumers, producers)]
    for rank, here in enumerate(consumers):
        for other, there in enumerate(producers):
            for part in transfer_slices(here, (0, rank), sizes[0], there, (0, other), sizes[1]):
                plan = TransferPlan(
                    here, there, groups=part.groups, heads=part.heads, layers=part.layers
                )
                local, remote = plan.descriptors(*(dict.fromkeys(plan.groups, t) for t in tables))
                for (to, size, _), (source, _, _) in zip(local, remote, strict=True):
                    ctypes.memmove(int(to), int(source), int(size))


# The numbers of a model with state, as `MambaStateShapeCalculator` takes them.
HEADS, WIDTH, STATE, KERNEL = 8, 4, 16, 4
STATES = {
    "MAMBA1": {},
    "MAMBA2": {"n_groups": 4},
    "MAMBA2 of one group": {"n_groups": 1},
    "GDN_ATTN": {"num_k_heads": 4},
    "GDN_ATTN of KDA": {"num_k_heads": HEADS},
    "SHORT_CONV": {},
    "SHORT_CONV on every rank": {},
    "LINEAR": {},
}


def shapes_of(kind, tp, n_groups=0, num_k_heads=0):
    """The shapes of a rank's state, by vLLM's own arithmetic."""
    shapes, inner = MambaStateShapeCalculator, HEADS * WIDTH
    if kind == "MAMBA1":
        return shapes.mamba1_state_shape(tp, inner, STATE, KERNEL)
    if kind == "MAMBA2":
        return shapes.mamba2_state_shape(tp, inner, n_groups, HEADS, WIDTH, STATE, KERNEL)
    if kind == "GDN_ATTN":
        return shapes.gated_delta_net_state_shape(tp, num_k_heads, HEADS, STATE, WIDTH, KERNEL)
    if kind == "SHORT_CONV":
        return shapes.short_conv_state_shape(tp, inner, KERNEL)
    return shapes.linear_attention_state_shape(HEADS, tp, WIDTH)


def share(part, tp, rank):
    """What a rank of several has of a part whose first axis is its heads or channels."""
    count = part.shape[0]
    return part[rank * count // tp : (rank + 1) * count // tp] if count >= tp else part


class StateEngine:
    """The ranks of an engine whose model has a layer of state, made from the state of the whole."""

    def __init__(self, name, tp, layout, monkeypatch, seed=None, padding=40):
        kind, numbers = name.partition(" ")[0], STATES[name]
        monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
        inner, taps = HEADS * WIDTH, KERNEL - 1
        side = STATE * (numbers.get("n_groups", 0) or numbers.get("num_k_heads", 0))
        inputs = {
            "MAMBA1": [(inner, 1)],
            "MAMBA2": [(inner, 1), (side // STATE, STATE), (side // STATE, STATE)],
            "GDN_ATTN": [(side // STATE, STATE), (side // STATE, STATE), (inner, 1)],
            "SHORT_CONV": [(inner, 1)],
            "LINEAR": [],
        }[kind]
        random = torch.Generator().manual_seed(seed or 0)
        whole = [torch.randn(n, size, taps, generator=random) for n, size in inputs]
        recurrent = shapes_of(kind, 1, **numbers)[-1]
        state = torch.randn(*recurrent, generator=random)
        self.pages, self.geometries, self._caches = [], [], []
        is_replicated = name.endswith("on every rank")
        for rank in range(tp):
            at = (1, 0) if is_replicated else (tp, rank)
            shapes = shapes_of(kind, at[0], **numbers)
            states = [] if kind == "SHORT_CONV" else [share(state, *at)]
            if inputs:
                channels = torch.cat([share(part, *at).flatten(0, 1) for part in whole])
                states.insert(0, channels if layout == "DS" else channels.T)
            assert [tuple(each.shape) for each in states] == [tuple(shape) for shape in shapes]
            content = torch.cat([each.flatten() for each in states]).view(torch.uint8)
            spec = mamba(kind, shapes, tp_replicated=is_replicated)
            assert spec.page_size_bytes == len(content)
            pages = torch.zeros(BLOCKS, 1, 1, len(content) + padding, dtype=torch.int8)
            if seed is not None:
                pages[4, 0, 0, : len(content)] = content.view(torch.int8)
            kv_config = config((["model.layers.3.mixer"], spec))
            cache = describe(
                kv_config,
                {"model.layers.3.mixer": pages[..., : len(content)]},
                place=ParallelPlace((rank, tp)),
            )
            assert {group.table for group in cache.geometry.groups} == {"0"}
            self.pages.append(pages)
            self._caches.append(cache)
            self.geometries.append(cache.geometry)


@pytest.mark.parametrize("layouts", ["SD SD", "DS DS", "SD DS"])
@pytest.mark.parametrize("sizes", [(1, 4), (4, 2)])
@pytest.mark.parametrize("name", STATES)
def test_state_arrives_whole_between_any_ranks(name, sizes, layouts, monkeypatch):
    (producers, consumers), (theirs, ours) = sizes, layouts.split()
    source = StateEngine(name, producers, theirs, monkeypatch, seed=1)
    target = StateEngine(name, consumers, ours, monkeypatch)
    move(target.geometries, source.geometries, ([7], [4]))
    for pages, wanted in zip(
        target.pages, StateEngine(name, consumers, ours, monkeypatch, seed=1).pages, strict=True
    ):
        expected = torch.zeros_like(pages)
        expected[7] = wanted[4]
        assert torch.equal(pages, expected)


def held(total, tp, rank):
    """The heads of a rank, which several hold if there are fewer than ranks."""
    return range(rank * total // tp, max((rank + 1) * total // tp, rank * total // tp + 1))


class HeadEngine:
    """The ranks of an engine whose layers have numbers of heads of their own, each head filled by
    its layer, its number and the block."""

    def __init__(self, layers, tp, *, group_all, filled):
        self.tensors, self.geometries, self._caches = [], [], []
        for rank in range(tp):
            specs, tensors = {}, {}
            for at, (name, total) in enumerate(layers.items()):
                heads = held(total, tp, rank)
                spec = full(num_kv_heads=len(heads), head_size=8 * (1 + at % 2))
                specs[name], tensors[name] = spec, tensor(spec)
                if filled:
                    for k, head in enumerate(heads):
                        for block in range(BLOCKS):
                            tensors[name][block, k] = 10000 * at + 100 * head + block + 1
            if group_all:
                groups = [(list(specs), UniformTypeKVCacheSpecs(16, kv_cache_specs=specs))]
            else:
                groups = [([name], spec) for name, spec in specs.items()]
            cache = describe(config(*groups), tensors, 8, ParallelPlace((rank, tp)))
            self.tensors.append(tensors)
            self._caches.append(cache)
            self.geometries.append(cache.geometry)


@pytest.mark.parametrize(
    "sizes", [(1, 1), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4), (8, 2), (2, 8), (8, 4), (8, 8)]
)
@pytest.mark.parametrize("group_all", [True, False], ids=["one group", "groups"])
def test_layers_with_heads_of_their_own_arrive_between_any_ranks(sizes, group_all):
    layers = {names(0)[0]: 8, names(1)[0]: 2, "draft_model.layers.0.self_attn.attn": 1}
    producers, consumers = sizes
    source = HeadEngine(layers, producers, group_all=group_all, filled=True)
    target = HeadEngine(layers, consumers, group_all=group_all, filled=False)
    move(target.geometries, source.geometries, ([1, 3], [4, 2]))
    wanted = HeadEngine(layers, consumers, group_all=group_all, filled=True)
    for found, all_blocks in zip(target.tensors, wanted.tensors, strict=True):
        for name, values in found.items():
            expected = torch.zeros_like(values)
            expected[[1, 3]] = all_blocks[name][[4, 2]]
            assert torch.equal(values, expected), name


class Nvfp4Engine:
    """The ranks of an engine whose pages hold the data of K, its scales, and those of V."""

    def __init__(self, tp, order, whole=None):
        self.pages, self.geometries, self._caches = [], [], []
        for rank in range(tp):
            spec = nvfp4(4 // tp)
            pages = tensor(spec)
            if order == "NHD":
                pages = pages.view(BLOCKS, 16, -1, 18).transpose(1, 2)
            for side, parts in enumerate(whole or []):
                dense = pages.as_strided(
                    (BLOCKS, 4 // tp, 16, 18),
                    (pages.stride(0), *((288, 18) if order == "HND" else (18, 72 // tp)), 1),
                    side * 4 // tp * 288,
                )
                for view, values in zip(nvfp4_split_data_scale(dense), parts, strict=True):
                    mine = values[:, rank * 4 // tp : (rank + 1) * 4 // tp]
                    view.view(torch.uint8).copy_(mine)
            (name,) = names(0)
            cache = describe(
                config(([name], spec)),
                {name: pages},
                place=ParallelPlace((rank, tp)),
                backends={name: "FLASHINFER"},
            )
            self.pages.append(pages)
            self._caches.append(cache)
            self.geometries.append(cache.geometry)


@pytest.mark.parametrize(
    ("order", "sizes"),
    [*(("HND", sizes) for sizes in ((1, 1), (1, 2), (4, 1), (2, 4))), ("NHD", (2, 2))],
)
def test_packed_data_and_scales_arrive_with_their_heads_between_any_ranks(order, sizes):
    random = torch.Generator().manual_seed(1)
    whole = [
        [
            torch.randint(256, (BLOCKS, 4, 16, n), generator=random, dtype=torch.uint8)
            for n in (16, 2)
        ]
        for _ in "KV"
    ]
    producers, consumers = sizes
    source, target = Nvfp4Engine(producers, order, whole), Nvfp4Engine(consumers, order)
    move(target.geometries, source.geometries, ([7, 1], [4, 2]))
    for pages, wanted in zip(target.pages, Nvfp4Engine(consumers, order, whole).pages, strict=True):
        expected = torch.zeros_like(pages)
        expected[[7, 1]] = wanted[[4, 2]]
        assert torch.equal(pages, expected)


@pytest.mark.parametrize("other", [("HND", 1), ("NHD", 2)], ids=["order", "TP size"])
def test_packed_data_with_tokens_outside_heads_meets_its_like_only(other):
    order, tp = other
    sides = Nvfp4Engine(tp, order).geometries[0], Nvfp4Engine(1, "NHD").geometries[0]
    with pytest.raises(PlanError, match="the token axis is opaque"):
        TransferPlan(*sides)


def test_states_of_several_tokens_arrive_between_unlike_blocks():
    specs = [
        MLAAttentionSpec(
            block_size=size, num_kv_heads=1, head_size=24, dtype=torch.float32, tokens_per_state=4
        )
        for size in (32, 64)
    ]
    (ours, here), (theirs, there) = (one_layer(spec) for spec in specs)
    there.random_(1000)
    plan = TransferPlan(ours.geometry, theirs.geometry)
    tables = (dict.fromkeys(plan.groups, table) for table in ([3, 1, 5], [8, 2]))
    local, remote = plan.descriptors(*tables, num_tokens=90)
    for (to, size, _), (source, _, _) in zip(local, remote, strict=True):
        ctypes.memmove(int(to), int(source), int(size))
    expected = torch.zeros_like(here)
    states = there[[8, 2]].transpose(1, 2).flatten(0, 1)[:23]  # of 90 tokens
    expected[3, 0], expected[1, 0] = states[:8, 0], states[8:16, 0]
    expected[5, 0, :7] = states[16:, 0]
    assert torch.equal(here, expected)


def test_a_ring_moves_whole_between_equal_ranks_only():
    spec = of_kind(CircularBufferSpec, num_kv_heads=2, head_size_v=0, block_size=8)
    (ours, here), (theirs, there) = (one_layer(spec, (1, 2)) for _ in "ab")
    there.random_(1000)
    plan = TransferPlan(ours.geometry, theirs.geometry)
    local, remote = plan.descriptors([5], [3])
    for (to, size, _), (source, _, _) in zip(local, remote, strict=True):
        ctypes.memmove(int(to), int(source), int(size))
    expected = torch.zeros_like(here)
    expected[5] = there[3]
    assert torch.equal(here, expected)
    larger = of_kind(CircularBufferSpec, num_kv_heads=2, head_size_v=0, block_size=16)
    for other in (one_layer(spec, (0, 1)), one_layer(larger, (1, 2))):
        with pytest.raises((PlanError, IncompatibleLayoutError), match=r"ring|planes"):
            TransferPlan(ours.geometry, other[0].geometry)
