"""Digests agree between any two layouts that hold the same, and see every byte that differs.

`HYPOTHESIS_MAX_EXAMPLES=2500` makes 10,000 flips and 10,000 clean comparisons of the first test.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pynixlkv import digest
from pynixlkv.digest import Digest, GroupDigest, sample_units
from pynixlkv.errors import ConfigError, KVCorruptError, NativeError, PlanError, WireError
from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import held_heads, read_sources
from pynixlkv.types import MemoryType

from .reference import Side, apply
from .test_plan_properties import Ranks, cache_of, groups, layer_sets, many, models, shapes, tables

FLIPS = 4


@many
@given(data=st.data())
def test_digests_of_a_transfer_agree_and_see_every_flip(data) -> None:
    """Read from every source of a rank; compare clean digests, then flip bytes that have moved."""
    model = data.draw(models())
    ranks, remote_ranks = data.draw(groups(model.kv_heads)), data.draw(groups(model.kv_heads))
    rank = data.draw(st.integers(0, ranks.size - 1))
    layers, remote_layers = data.draw(layer_sets(model)), data.draw(layer_sets(model))
    common = sorted(set(layers) & set(remote_layers))
    assume(common)
    local = Side(data.draw(shapes(model, ranks, rank, layers)), seed=1)
    cache = cache_of(local, model, ranks, rank)
    sources = read_sources(
        model.kv_heads,
        local=(rank, ranks.size),
        remote_size=remote_ranks.size,
        local_dcp=ranks.dcp,
        remote_dcp=remote_ranks.dcp,
    )
    like = data.draw(shapes(model, remote_ranks, sources[0].rank, remote_layers))
    table = data.draw(tables(local.shape, like))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for number, source in enumerate(sources):
        shape = dataclasses.replace(
            like,
            heads=held_heads(source.rank, remote_ranks.size, model.kv_heads),
            token_rank=source.rank % remote_ranks.dcp,
        )
        remote = Side(shape, seed=10 + number)
        remote.fill(table.remote_blocks, table.remote_start)
        remote_cache = cache_of(remote, model, remote_ranks, source.rank)
        plan = TransferPlan(
            cache.geometry, remote_cache.geometry, heads=source.heads, layers=common
        )
        here, there = plan.descriptors(table.local_blocks, table.remote_blocks, **table.arguments)
        apply(here, there)
        if not len(here):
            continue
        for unit in [None, *rng.integers(1, 40, FLIPS - 1).tolist()]:
            scopes = plan.digest_scopes(
                table.local_blocks, table.remote_blocks, **table.arguments, unit=unit
            )
            theirs = remote_cache.digest(
                table.remote_blocks, start=table.remote_start, scopes=scopes
            )
            verify = partial(
                plan.verify,
                cache,
                theirs,
                table.local_blocks,
                start=table.local_start,
                scopes=scopes,
            )
            verify()
            row = rng.choice(len(here), p=here[:, 1] / here[:, 1].sum())
            address = int(here[row, 0] + rng.integers(here[row, 1]))
            byte = ctypes.c_ubyte.from_address(address)
            flip = int(rng.integers(1, 256))
            byte.value ^= flip
            with pytest.raises(KVCorruptError) as caught:
                verify()
            assert caught.value.num_mismatches == 1
            byte.value ^= flip
        verify()


def make_pair(**options) -> tuple[np.ndarray, KVCache, Digest]:
    """Memory of 3 layers, 6 blocks of 8 tokens and 4 heads; its cache; and its clean digest."""
    shape = (3, 2, 6, 4, 8, 16)  # LKBHND
    memory = np.random.default_rng(5).integers(0, 2**16, shape, np.uint16)
    cache = KVCache.from_tensors({"all": memory}, axes="LKBHND", kv_heads=4, **options)
    return memory, cache, cache.digest(range(6))


@pytest.mark.parametrize(
    ("axis", "named"),
    [
        ("layer", {"layer": {1, 2}}),
        ("kv", {"kv": {"K", "V"}}),
        ("block", {"tokens": {range(8, 16), range(16, 24)}}),
        ("head", {"head": {1, 2}}),
        ("token", {"tokens": {range(8 * i, 8 * i + 8) for i in range(6)}}),
        ("dim", {}),
    ],
)
def test_swapped_slices_are_seen_and_named(axis, named) -> None:
    memory, cache, clean = make_pair()
    at = ["layer", "kv", "block", "head", "token", "dim"].index(axis)
    first = 0 if axis == "kv" else 1
    order = np.arange(memory.shape[at])
    order[[first, first + 1]] = order[[first + 1, first]]
    memory[...] = np.take(memory, order, axis=at)
    with pytest.raises(KVCorruptError) as caught:
        cache.digest(range(6)).check(clean, peer="prefill-0")
    error = caught.value
    assert error.peer == "prefill-0"
    sizes = {"layer": 3, "kv": 2, "head": 4, "tokens": 6}
    expected = np.prod([len(named.get(name, range(n))) for name, n in sizes.items()])
    assert error.num_mismatches == expected
    assert len(error.mismatches) == min(64, expected)
    for field, values in named.items():
        assert {getattr(mismatch, field) for mismatch in error.mismatches} <= values


def test_one_wrong_byte_is_named_by_its_place() -> None:
    memory, cache, clean = make_pair(layers=[4, 5, 9])
    memory[2, 1, 3, 2, 5, 7] ^= 0x100
    with pytest.raises(KVCorruptError, match="layers 9 of 4-5, 9, V, heads 2 of 0-3, tokens 24-31"):
        cache.digest(range(6)).check(clean)
    with pytest.raises(KVCorruptError) as caught:
        cache.digest(range(6), unit=1, layers=[9]).check(
            make_pair(layers=[4, 5, 9])[1].digest(range(6), unit=1, layers=[9])
        )
    (mismatch,) = caught.value.mismatches
    assert (mismatch.layer, mismatch.kv, mismatch.head) == (9, "V", 2)
    assert mismatch.tokens == range(29, 30)


def test_digests_of_units_are_sums_of_those_of_their_parts() -> None:
    _, cache, _ = make_pair()
    fine = cache.digest(range(6), unit=1, num_tokens=45).groups[0].values
    for unit in (2, 5, 8, 48, 1000):
        coarse = cache.digest(range(6), unit=unit, num_tokens=45).groups[0].values
        summed = np.add.reduceat(fine, np.arange(0, 45, unit), axis=3)
        assert coarse.tolist() == summed.tolist()


def test_the_digest_of_known_bytes_stays() -> None:
    """Peers of other releases compare with it: a change needs a new version of the protocol."""
    memory = np.arange(2 * 2 * 3 * 43, dtype=np.uint8).reshape(2, 2, 3, 43)
    cache = KVCache.from_tensors({"0": memory}, axes="BHND", kv_heads=2)
    assert cache.digest([1, 0]).groups[0].values.ravel().tolist() == [
        0xAF27EF7C406A7BF6,
        0xB7D83D2968466094,
        0x1D33E5BCAB4ADD59,
        0xEE7FF6A528CDF1EB,
    ]


def test_a_sample_finds_the_fraction_of_flips() -> None:
    """Chi-square of the found, of what each unit is chosen for, and of pairs; seeds are fixed."""
    memory, cache, clean = make_pair()
    scopes = clean.scopes
    rng = np.random.default_rng(11)
    trials, fraction = 1200, 1 / 3
    found = 0
    for seed in range(trials):
        place = tuple(rng.integers(size) for size in memory.shape)
        bit = 1 << int(rng.integers(16))
        memory[place] ^= bit
        units = tuple(sample_units(range(6), fraction, seed))
        sampled = [msgspec.structs.replace(scope, units=units) for scope in scopes]
        values = clean.groups[0].values[..., list(units)]
        expected = Digest((GroupDigest(sampled[0], values.tobytes()),))
        try:
            cache.digest(range(6), scopes=sampled).check(expected)
        except KVCorruptError:
            found += 1
        memory[place] ^= bit
    assert chi_square([found, trials - found], [trials * fraction, trials * (1 - fraction)]) < 10.8
    counts = np.bincount(np.ravel([sample_units(range(6), fraction, s) for s in range(trials)]))
    assert chi_square(counts, [trials * fraction] * 6) < 20.5  # 5 degrees, 0.1 %


def chi_square(seen, expected) -> float:
    return float(np.sum((np.asarray(seen) - expected) ** 2 / np.asarray(expected)))


@pytest.mark.parametrize(
    ("units", "fraction", "count"),
    [
        (range(1), 0.001, 1),
        (range(5, 105), 1 / 16, 6),
        (range(7), 1.0, 7),
        (range(100), 0.999, 100),
    ],
)
def test_a_sample_is_of_the_units_and_never_empty(units, fraction, count) -> None:
    chosen = sample_units(units, fraction, 3)
    assert chosen == sorted(set(chosen)) == sample_units(units, fraction, 3)
    assert set(chosen) <= set(units)
    assert len(chosen) == count
    with pytest.raises(PlanError, match="fraction is 0"):
        sample_units(units, 0, 1)


@many
@given(data=st.data())
def test_a_staged_copy_has_the_digests_of_the_memory(data) -> None:
    """Device memory, pretended: torch's CPU tensors go the way of CUDA's, in small chunks."""
    model = data.draw(models())
    layers = tuple(range(model.num_layers))
    side = Side(data.draw(shapes(model, Ranks(1, 1), 0, layers)), seed=3)
    signed = np.dtype(f"i{model.itemsize}") if model.itemsize > 1 else np.uint8
    options = {"axes": side.shape.axes, "kv_heads": model.kv_heads, "layers": layers}
    host = KVCache.from_tensors(
        {name: torch.from_numpy(array.view(signed)) for name, array in side.tensors.items()},
        **options,
    )
    device = KVCache(
        [dataclasses.replace(array, memory=MemoryType.VRAM) for array in host._arrays],
        host.geometry.groups,
    )
    blocks = data.draw(st.permutations(range(side.shape.num_blocks)))
    wanted = {"unit": data.draw(st.integers(1, 20)), "start": side.shape.block_size}
    count = data.draw(st.integers(1, len(blocks) * side.shape.block_size))
    wanted["num_tokens"] = wanted["start"] + count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_STAGED_BYTES", data.draw(st.sampled_from([1, 1000, 1 << 20])))
        staged = device.digest(blocks, **wanted)
    assert staged == host.digest(blocks, **wanted)


def test_device_memory_that_cannot_be_copied_is_an_error(monkeypatch) -> None:
    tensors = {name: torch.zeros((4, 2, 3)) for name in "ab"}
    host = KVCache.from_tensors(tensors, axes="BND", kv_heads=None)
    arrays = [dataclasses.replace(array, memory=MemoryType.VRAM) for array in host._arrays]
    device = KVCache(arrays, host.geometry.groups)

    def index_select(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        with pytest.raises(ConfigError, match="device memory need torch"):
            device.digest([1, 3])
    monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    with pytest.raises(NativeError, match=r"2 blocks of 'a' could not be copied.*out of memory"):
        device.digest([1, 3])
    mixed = KVCache([arrays[0], host._arrays[1]], host.geometry.groups)
    with pytest.raises(PlanError, match=r"group 'kv' is in \['DRAM', 'VRAM'\] memory"):
        mixed.digest([0])


def test_long_lists_of_places_are_cut() -> None:
    memory = np.zeros((400, 1, 3), np.uint8)
    cache = KVCache.from_tensors({"0": memory}, axes="BND", kv_heads=None)
    clean = cache.digest(range(400))
    memory[::2] = 1
    with pytest.raises(KVCorruptError, match="tokens 0, 2, 4, 6, 8, 10, 12, 14, …;") as caught:
        cache.digest(range(400)).check(clean)
    assert (caught.value.num_mismatches, len(caught.value.mismatches)) == (200, 64)


def test_state_and_groups_have_tables_of_their_own() -> None:
    rng = np.random.default_rng(2)
    arrays = {
        "state": rng.integers(0, 256, (5, 3, 7), np.uint8),
        "latent": rng.integers(0, 256, (4, 2, 9), np.uint8),
    }

    def cache_with(state: np.ndarray, latent: np.ndarray) -> KVCache:
        return KVCache.combine(
            KVCache.from_tensors({"s": state}, axes="BHD", kv_heads=3, group="state"),
            KVCache.from_tensors({"m": latent}, axes="MLA", kv_heads=None, group="latent"),
        )

    local = cache_with(*(np.zeros_like(array) for array in arrays.values()))
    remote = cache_with(*arrays.values())
    plan = TransferPlan(local.geometry, remote.geometry)
    mine, theirs = {"state": [1, 4], "latent": [0, 3]}, {"state": [2, 0], "latent": [2, 1]}
    apply(*plan.descriptors(mine, theirs, num_tokens={"latent": 3}))
    scopes = plan.digest_scopes(mine, theirs, num_tokens={"latent": 3})
    assert [scope.tokens for scope in scopes] == [(0, 2), (0, 3)]
    only_state = plan.digest_scopes(mine, theirs, num_tokens={"latent": 0})
    assert only_state == scopes[:1]
    plan.verify(local, remote.digest(theirs, scopes=scopes), mine, scopes=scopes)
    arrays["state"][0, 1, 2] ^= 1
    with pytest.raises(KVCorruptError, match=r"group 'state'.*heads 1 of 0-2, tokens 1") as caught:
        plan.verify(local, remote.digest(theirs, scopes=scopes), mine, scopes=scopes)
    assert caught.value.mismatches[0].kv == ""


def test_an_opaque_token_axis_digests_whole_blocks() -> None:
    _, cache, _ = make_pair(opaque_axes="N")
    memory, other, _ = make_pair(opaque_axes="N")
    plan = TransferPlan(cache.geometry, other.geometry)
    (scope,) = plan.digest_scopes([2, 3], [2, 3], num_tokens=9)
    assert scope.tokens == (0, 16)
    assert cache.digest([2, 3], num_tokens=9).scopes == (scope,)
    memory[0, 0, 3, 0, 7, 0] ^= 1  # token 15
    with pytest.raises(KVCorruptError):
        plan.verify(cache, other.digest([2, 3], scopes=[scope]), [2, 3])


def test_threads_digest_at_once() -> None:
    _, cache, clean = make_pair()
    with ThreadPoolExecutor(8) as pool:
        assert set(map(Digest.to_bytes, pool.map(cache.digest, [range(6)] * 64))) == {
            clean.to_bytes()
        }


def test_digests_from_outside_are_checked() -> None:
    _, cache, clean = make_pair()
    assert Digest.from_bytes(clean.to_bytes()) == clean
    with pytest.raises(WireError):
        Digest.from_bytes(clean.to_bytes()[:-1])
    with pytest.raises(PlanError, match="unlike scopes"):
        clean.check(cache.digest(range(5)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"units": [0, 1]}, "expected 384"),
        ({"units": [0, 6]}, "units from 0 to 5"),
        ({"units": [1, 1]}, "expected ascending numbers"),
        ({"units": []}, "length"),
        ({"layers": [2**31]}, "layers"),
        ({"layers": list(range(60000)), "heads": list(range(60000))}, "larger or fewer units"),
        ({"unit": 0}, "unit"),
        ({"tokens": [4, 4]}, "tokens 4 to 3"),
        ({"tokens": [0, 2**60]}, "tokens"),
        ({"turns": [[2, 2, 1]]}, "is impossible"),
        ({"turns": [[0, 2, 0]]}, "turns"),
        ({"shares": 1}, "unknown field"),
    ],
)
def test_forged_digests_are_refused(changes, text) -> None:
    (group,) = msgspec.to_builtins(make_pair()[2])["groups"]
    forged = {"groups": [{**group, "scope": group["scope"] | changes}]}
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.convert(forged, Digest)


@pytest.mark.parametrize(
    ("blocks", "options", "text"),
    [
        ([6], {}, "block 6 at index 0 must be from 0 to 5"),
        ([-1], {}, "block -1 at index 0"),
        ([2**70], {}, "blocks"),
        ([0.5], {}, "blocks"),
        ([], {}, "tokens 0 to -1"),
        ({"other": [0]}, {}, "the groups are ['kv']"),
        ({}, {}, "the groups are ['kv']"),
        ([0], {"num_tokens": 9}, "tokens 0 to 8 are not all in the 1 blocks"),
        ([0], {"start": 8, "num_tokens": 3}, "tokens 8 to 2"),
        ([0], {"start": -8}, "start is -8"),
        ([0], {"unit": 0}, "unit is 0"),
        ([0], {"unit": 1.5}, "unit is 1.5"),
        ([0], {"units": [1]}, "units from 0 to 0"),
        ([0], {"units": [2**70]}, "units"),
        ([0], {"units": 3}, "units"),
        ([0], {"layers": ["a"]}, "layers"),
        (
            [0],
            {"layers": [3]},
            "a digest of layers [3] cannot be made here, where they are [0, 1, 2]",
        ),
        ([0], {"heads": [1, 4]}, "a digest of heads [1, 4] cannot be made here"),
    ],
)
def test_what_is_not_held_is_refused(blocks, options, text) -> None:
    _, cache, _ = make_pair()
    with pytest.raises(PlanError) as caught:
        cache.digest(blocks, **options)
    assert text in str(caught.value)


def test_scopes_of_another_cache_are_refused() -> None:
    _, cache, clean = make_pair()
    (scope,) = clean.scopes
    cases: list[tuple[dict[str, Any], str]] = [
        ({"group": "other"}, "no table for group 'other'"),
        ({"planes": 1}, "planes \\[1\\] cannot be made here"),
    ]
    for changes, text in cases:
        with pytest.raises(PlanError, match=text):
            cache.digest(range(6), scopes=[msgspec.structs.replace(scope, **changes)])
    two = KVCache.combine(cache, make_pair(group="b")[1])
    with pytest.raises(PlanError, match="one table if there is one group"):
        two.digest([0])
    plan = TransferPlan(cache.geometry, cache.geometry)
    with pytest.raises(PlanError, match="unlike scopes"):
        plan.verify(cache, clean, range(6), scopes=plan.digest_scopes([0], [0]))
