"""vLLM's own descriptions of its caches, as geometries. No engine is started."""

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pynixlkv import TransferPlan
from pynixlkv.connector.scheduler import GroupSpec
from pynixlkv.errors import ConfigError, LayoutError
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


def describe(kv_config, tensors, total=4, place=None, is_opaque=False):
    place = place or ParallelPlace((0, 1))
    return kv_cache(tensors, kv_config, total, place, is_opaque=is_opaque)


def test_one_group():
    spec = full()
    kv_config = config((names(0, 1), spec))
    cache, block_table_index = describe(kv_config, {n: tensor(spec) for n in names(0, 1)})
    (group,) = cache.geometry.groups
    assert block_table_index == {"0:model.layers.#.self_attn.attn": 0}
    assert group.layers == (0, 1)
    assert (group.block_size, group.num_blocks, group.kv_heads) == (16, BLOCKS, 4)
    assert (group.head_dim, group.has_values, group.opaque_axes) == (64, False, "")
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


def test_what_is_not_supported_is_named():
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match="MambaSpec"):
        group_specs(config((["model.layers.0.mixer"], state)), 1)
    spec = full()
    with pytest.raises(LayoutError, match=r"blocks, heads, tokens, content"):
        describe(config((names(0), spec)), {names(0)[0]: torch.zeros(4, 4)})
    with pytest.raises(LayoutError, match="2 numbers"):
        describe(config((["a.0.b.1.c"], spec)), {"a.0.b.1.c": tensor(spec)})
