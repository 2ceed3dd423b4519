"""Engines of unlike shapes: pipeline stages, tensor parallelism, layouts and block sizes."""

from __future__ import annotations

import re

import pytest
from toy_engine import Model
from toy_world import World

MODELS = {
    "heads": Model(layers=4, kv_heads=4),
    "few heads": Model(layers=4, kv_heads=2),
    "latent": Model(layers=4, kv_heads=None),
    "state": Model(layers=4, kv_heads=4, state_heads=4),
    "state of all ranks": Model(layers=4, kv_heads=4, state_heads=None),
}
# Pipeline stages and tensor-parallel ranks of the producer, then of the consumer.
SHAPES = [(2, 1, 1, 1), (1, 1, 2, 1), (2, 2, 1, 1), (4, 1, 2, 2), (1, 4, 2, 1), (2, 1, 4, 4)]


PACKED = Model(layers=4, kv_heads=4, packing="nvfp4")


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_opaque_pages_arrive_whole_between_equal_tp_sizes(mode):
    with World(mode) as world:
        prefill, decode = (world.engine(name, PACKED, pp=2, tp=2) for name in "PD")
        params = prefill.prefill("p", 0, 13)
        decode.arrive("d", 0, 13, params)
        assert decode.schedule("d", 0) == 13
        world.until(lambda: "d" in world.outcomes["D"].received)
        assert decode.holds("d")


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("tp", "options", "message"),
    [
        (1, {}, r"indivisible in pages of uint16:nvfp4, is '4 of 4' here and '2 of 4' there"),
        (4, {}, r"indivisible in pages of uint16:nvfp4, is '1 of 4' here and '2 of 4' there"),
        (2, {"block_size": 8}, "token axis is opaque, so blocks must hold the same tokens"),
    ],
)
def test_opaque_pages_of_unlike_shapes_are_refused_at_first_contact(mode, tp, options, message):
    with World(mode) as world:
        prefill = world.engine("P", PACKED, tp=2)
        decode = world.engine("D", PACKED, tp=tp, **options)
        decode.arrive("d", 0, 13, prefill.prefill("p", 0, 13))
        decode.schedule("d", 0)
        world.until(lambda: "d" in world.outcomes["D"].failed)
        assert all(re.search(message, str(end.error)) for end in world.outcomes["D"].failed["d"])


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{}x{} to {}x{}".format(*s))
@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_gets_its_layers_and_heads(kind, shape, mode):
    model = MODELS[kind]
    axes = ("BND", "BND") if model.kv_heads is None else ("KBHND", "BNKHD")
    with World(mode) as world:
        prefill = world.engine(
            "P", model, pp=shape[0], tp=shape[1], axes=axes[0], block_size=4, num_blocks=16
        )
        decode = world.engine(
            "D", model, pp=shape[2], tp=shape[3], axes=axes[1], block_size=8, num_blocks=16
        )
        for number, (num_tokens, num_computed) in enumerate([(13, 0), (21, 8)]):
            name = f"p{number}"
            params = prefill.prefill(name, number, num_tokens)
            decode.arrive(f"d{number}", number, num_tokens, params)
            assert decode.schedule(f"d{number}", num_computed) == num_tokens - num_computed
            world.until(lambda name=f"d{number}": name in world.outcomes["D"].received)
            assert decode.holds(f"d{number}")
            # Every stage and rank of the producer is released, unread ones too.
            world.until(lambda name=name: name in world.outcomes["P"].sent)
        assert not world.outcomes["D"].failed


# What the NixlConnector of vLLM 0.33 refuses: options of the producer, then of the consumer.
REFUSED_ELSEWHERE = {
    "consumer PP 2": ({}, {"pp": 2}),
    "PP 4 x TP 1 to PP 2 x TP 2": ({"pp": 4}, {"pp": 2, "tp": 2}),
    "TP 4, blocks of 8 to TP 1, blocks of 16": ({"tp": 4}, {"block_size": 16}),
    "blocks of 16 to blocks of 8": ({"block_size": 16}, {}),
    "NHD at TP 2 to HND at TP 4": ({"axes": "KBNHD", "tp": 2}, {"tp": 4}),
    "HND at TP 4 to NHD at TP 2": ({"axes": "BHKND", "tp": 4}, {"axes": "KBNHD", "tp": 2}),
    "rows of all layers to one tensor a layer": (
        {"axes": "BLKHND"},
        {"block_size": 16, "tp": 2},
    ),
    "one tensor of all layers to PP 2": (
        {"axes": "LKBHND", "tp": 2},
        {"axes": "KBNHD", "pp": 2},
    ),
    "TP 3 to TP 2": ({"tp": 3}, {"tp": 2}),
}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("producer", "consumer"), REFUSED_ELSEWHERE.values(), ids=REFUSED_ELSEWHERE.keys()
)
def test_what_nixlconnector_refuses_arrives(mode, producer, consumer):
    model = Model(layers=4, kv_heads=12)
    common = {"axes": "KBHND", "block_size": 8, "num_blocks": 24}
    with World(mode, checksums="all", self_test=True) as world:
        prefill = world.engine("P", model, **{**common, **producer})
        decode = world.engine("D", model, **{**common, **consumer})
        decode.arrive("d", 0, 61, prefill.prefill("p", 0, 61))
        assert decode.schedule("d", 0) == 61
        world.until(lambda: "d" in world.outcomes["D"].received or world.outcomes["D"].failed)
        assert not world.outcomes["D"].failed
        assert decode.holds("d")
        world.until(lambda: "p" in world.outcomes["P"].sent)
