"""The self-test at first contact names the axes that two caches do not mean alike."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from toy_engine import Model
from toy_world import World

from pynixlkv import KVCache
from pynixlkv.connector import verification
from pynixlkv.connector.tp_mapping import TransferSlice
from pynixlkv.errors import IncompatibleLayoutError
from pynixlkv.testing import FakeAgent, FakeNetwork
from pynixlkv.types import MemoryType

LAYERS, HEADS, TOKENS, DIM = 2, 4, 4, 8
SIZES = {"K": 2, "B": verification.NUM_SCRATCH_BLOCKS, "H": HEADS, "N": TOKENS, "D": DIM}


def engine_scratch(axes: str, described: str, *, fault: str = "") -> KVCache:
    """Return scratch blocks that an engine fills by its own axes, and describes by others."""
    tensors = {}
    for layer in range(LAYERS):
        array = np.zeros([SIZES[letter] for letter in axes], np.uint16)
        view = array.transpose([axes.index(letter) for letter in "BKHND"])
        for block, (letter, index) in enumerate(
            {
                "L": np.array((layer + (fault == "layer")) % LAYERS),
                "K": np.arange(2),
                "H": np.arange(HEADS),
                "N": np.arange(TOKENS),
                "D": np.arange(DIM),
            }.items()
        ):
            shape = [SIZES[other] if other == letter else 1 for other in "KHND"]
            view[block] = (index * 257).reshape(shape)
        if fault in tuple("KHND"):
            view[:] = np.roll(view, 1, "BKHND".index(fault))
        tensors[f"layer.{layer}"] = array
    return KVCache.from_tensors(tensors, axes=described, kv_heads=HEADS)


def compare(producer: KVCache, consumer: KVCache) -> None:
    network = FakeNetwork()
    with FakeAgent("P", network) as theirs, FakeAgent("D", network) as ours:
        theirs.register(producer)
        ours.register(consumer)
        peer = ours.connect(theirs.hello(producer))
        slices = [TransferSlice(("kv",), tuple(range(HEADS)), tuple(range(LAYERS)))]
        verification.self_test(ours, consumer, peer, peer.geometries[0], slices, 60.0, 0, [])


def scratch_of(cache: KVCache) -> KVCache:
    scratch = verification.make_scratch(cache)
    assert scratch is not None
    return scratch


def made(axes: str) -> KVCache:
    """Return the scratch blocks that a worker makes for a cache."""
    shape = [{**SIZES, "B": 7}[letter] for letter in axes]
    tensors = {f"layer.{i}": np.zeros(shape, np.uint16) for i in range(LAYERS)}
    return scratch_of(KVCache.from_tensors(tensors, axes=axes, kv_heads=HEADS))


@pytest.mark.parametrize("axes", ["KBHND", "BKNHD"])
@pytest.mark.parametrize("their_axes", ["KBHND", "KBNHD", "BKHND"])
def test_an_engines_own_pattern_is_the_one_that_workers_make(axes: str, their_axes: str) -> None:
    compare(engine_scratch(axes, axes), made(their_axes))
    compare(made(their_axes), engine_scratch(axes, axes))


@pytest.mark.parametrize(
    ("axes", "described", "fault", "wrong"),
    [
        ("KBNHD", "KBHND", "", "head, token"),
        ("BKHND", "BKNHD", "", "head, token"),
        ("KBHND", "KBHND", "K", "kv"),
        ("KBHND", "KBHND", "H", "head"),
        ("KBHND", "KBHND", "N", "token"),
        ("KBHND", "KBHND", "D", "dim"),
        ("KBHND", "KBHND", "layer", "layer"),
    ],
)
def test_a_layout_that_is_described_wrongly_is_named_by_axis(
    axes: str, described: str, fault: str, wrong: str
) -> None:
    for producer, consumer in (
        (engine_scratch(axes, described, fault=fault), made("KBHND")),
        (made("KBHND"), engine_scratch(axes, described, fault=fault)),
    ):
        with pytest.raises(IncompatibleLayoutError, match=f"axes {wrong};") as caught:
            compare(producer, consumer)
        assert ", ".join(axis for axis, _, _ in caught.value.differences) == wrong


def fetch(world: World, producer, consumer) -> None:
    consumer.arrive("d1", 1, 13, producer.prefill("p1", 1, 13))
    consumer.schedule("d1")
    ended = world.outcomes["D"]
    world.until(lambda: "d1" in ended.received or "d1" in ended.failed)


PAIRS = [
    (Model(), {"axes": "KBHND"}, {"axes": "BKNHD", "block_size": 8}),
    (Model(), {"axes": "BKNHD", "tp": 2, "pp": 2}, {"axes": "KBHND", "tp": 4}),
    (Model(), {"axes": "KBHND", "tp": 4}, {"axes": "KBNHD", "pp": 2}),
    (Model(kv_heads=None), {"axes": "BND", "tp": 2}, {"axes": "BND", "block_size": 12}),
    (Model(is_apart=True), {"axes": "KBHND", "model": Model(), "tp": 2}, {"axes": "BKNHD"}),
    (Model(kv_heads=2, knows_heads=False), {"tp": 4, "model": Model(2, 2)}, {"tp": 8}),
    (Model(kv_heads=2, knows_heads=False), {"tp": 4}, {"tp": 2}),
]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(("model", "theirs", "ours"), PAIRS)
def test_engines_that_mean_the_same_pass(mode, model, theirs, ours, monkeypatch) -> None:
    tested, run = [], verification.self_test
    monkeypatch.setattr(verification, "self_test", lambda *args: tested.append(run(*args)))
    with World(mode, self_test=True) as world:
        producer = world.engine("P", **{"model": model, **theirs})
        consumer = world.engine("D", **{"model": model, **ours})
        fetch(world, producer, consumer)
        assert world.outcomes["D"].received == {"d1"}
        assert consumer.holds("d1")
        assert len(tested) >= len(consumer.ranks)


def test_a_failed_self_test_fails_requests_before_anything_is_read(monkeypatch) -> None:
    make = verification.make_scratch
    with World(self_test=True) as world:
        consumer = world.engine("D")
        monkeypatch.setattr(
            verification, "make_scratch", lambda cache: engine_scratch("KBNHD", "KBHND")
        )
        producer = world.engine("P")
        monkeypatch.setattr(verification, "make_scratch", make)
        fetch(world, producer, consumer)
        (end,) = world.outcomes["D"].failed["d1"]
        assert isinstance(end.error, IncompatibleLayoutError)
        assert "axes head, token" in str(end.error)
        assert consumer.stats.transfers == 0
        world.pass_time(world.config.lease_duration)
        assert world.outcomes["P"].sent == {"p1"}


def test_a_self_test_that_one_side_has_switched_off_is_left_out() -> None:
    with World() as off, World(self_test=True) as on:
        on.network, on.book = off.network, off.book
        producer, consumer = off.engine("P"), on.engine("D")
        params = producer.prefill("p1", 1, 13)
        consumer.arrive("d1", 1, 13, params)
        consumer.schedule("d1")
        while not on.outcomes["D"].received:
            off.round()
            on.round()
            on._is_active(0.001)
        assert consumer.holds("d1")


def test_scratch_blocks_of_a_device_are_on_the_device() -> None:
    shape = [{**SIZES, "B": 7}[letter] for letter in "KBHND"]
    tensors = {f"layer.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(LAYERS)}
    host = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=HEADS)
    pretended = KVCache(
        [dataclasses.replace(array, memory=MemoryType.VRAM) for array in host._arrays],
        host.geometry.groups,
    )
    scratch = scratch_of(pretended)
    assert isinstance(scratch._arrays[0].owner, torch.Tensor)
    blocks = range(len(verification.AXES))
    assert scratch.digest(blocks) == scratch_of(host).digest(blocks)


def test_a_large_cache_is_tested_by_layers_that_any_two_ranks_share(monkeypatch) -> None:
    tensors = {f"layer.{i}": np.zeros((2, 3, HEADS, TOKENS, DIM), np.uint16) for i in range(40)}
    every = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=HEADS)
    some = KVCache.from_tensors(
        dict(list(tensors.items())[:16]), axes="KBHND", kv_heads=HEADS, layers=range(24, 40)
    )
    monkeypatch.setattr(verification, "_MAX_BYTES", 32_000)
    scratch = [scratch_of(cache) for cache in (every, some)]
    for each in scratch:
        assert sum(span.nbytes for span in each.spans) <= 32_000
    first, second = (set(each.geometry.groups[0].layers) for each in scratch)
    assert first & second
