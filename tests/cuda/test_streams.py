"""The order of an engine's kernels and of the bytes that move: events of streams that are late.

Toy engines on cards: what they compute is the work of a stream, which the test holds up.
"""

import numpy as np
import pytest
import torch
from cuda_memory import (
    DeviceArray,
    allow,
    current,
    launch,
    use_cards,
)
from toy_engine import POISON, ToyEngine, ToyRank
from toy_pair import arrives, early_params, received, start
from toy_world import World

from pynixlkv.nixl import NixlAgent
from pynixlkv.ucx import UcxAgent
from pynixlkv.vllm.host import StreamFence, work_so_far

PROMPT, TOKENS = 7, 13
CARD = torch.device("cuda:0")

pytestmark = pytest.mark.stub


@pytest.fixture(autouse=True)
def cards(monkeypatch):
    use_cards(monkeypatch)
    yield
    for device in (0, 1):
        allow(device=device)


class CardRank(ToyRank):
    """Its tensors are what the processor launches; a stream brings them to the card."""

    def on_device(self, tensors):
        self.cards = {name: DeviceArray(tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self.cards[name].write(tensor)
        return self.cards

    def launch(self, layers):
        for layer in layers:
            tensor, card = self.tensors[f"layer.{layer}"], self.cards[f"layer.{layer}"]
            launch(card.address, tensor.ctypes.data, card.nbytes)

    def look(self):
        """Let the processor see what is on the card."""
        for name, tensor in self.tensors.items():
            tensor[...] = self.cards[name].read()


class CardEngine(ToyEngine):
    rank_class = CardRank

    def holds(self, request_id):
        for rank in self.ranks:
            rank.look()
        return super().holds(request_id)


class Cards(World):
    """Engines whose KV is on a card, by a real library."""

    engine_class = CardEngine

    def __init__(self, make, mode, **config):
        super().__init__(mode, checksums="off", **config)
        self._make = make

    def make_agent(self, name):
        return self._make(name)

    def round(self):
        """Let a consumer look at a lease again that it has seen too early."""
        self.clock.now += 0.001
        super().round()


@pytest.fixture(params=[UcxAgent, NixlAgent], ids=["ucx", "nixl"])
def world(request, mode):
    with Cards(request.param, mode) as world:
        yield world


def fence(is_ordered):
    return work_so_far(CARD) if is_ordered else None


ORDERED = pytest.mark.parametrize("is_ordered", [True, False], ids=["events", "no events"])


@pytest.mark.parametrize("mode", ["pull", "push"])
@ORDERED
def test_no_byte_is_sent_before_the_work_that_writes_it_is_done(world, is_ordered):
    prefill, decode = world.engine("P"), world.engine("D")
    params = prefill.prefill("p1", PROMPT, TOKENS)
    allow(0)
    prefill.ranks[0].launch(prefill.ranks[0].layers)
    prefill.event = fence(is_ordered)
    start(world, decode, params)
    if not is_ordered:
        world.until(received(world))
        assert not decode.holds("d1")  # without the event, the test sees what it looks for
        return
    world.quiet()
    assert not received(world)()
    assert all((card.read() == POISON).all() for card in decode.ranks[0].cards.values())
    allow()
    arrives(world, decode)


@pytest.mark.parametrize("mode", ["push"])
@ORDERED
def test_no_layer_is_pushed_before_the_work_that_writes_it_is_done(world, is_ordered):
    prefill, decode = world.engine("P"), world.engine("D")
    prefill.begin("p1", PROMPT, TOKENS)
    start(world, decode, early_params(prefill, "p1"))
    world.until(lambda: prefill.stats.pushes)
    allow(0)
    rank = prefill.ranks[0]
    save = rank.worker.save_kv_layer

    def save_kv_layer(layer, _):
        rank.launch([layer])
        save(layer, fence(is_ordered))

    rank.worker.save_kv_layer = save_kv_layer
    prefill.compute("p1", TOKENS)
    first, second = decode.ranks[0].cards.values()
    world.quiet()
    prefill.event = fence(is_ordered)
    if not is_ordered:
        prefill.hand_over("p1")
        world.until(received(world))
        assert not decode.holds("d1")
        return
    assert (first.read() == POISON).all()
    allow(2)  # the first layer's copy and its event
    world.until(lambda: (first.read() != POISON).any())
    world.quiet()
    assert (second.read() == POISON).all()
    allow()
    prefill.hand_over("p1")
    arrives(world, decode)


@pytest.mark.parametrize("mode", ["pull", "push"])
@ORDERED
def test_no_byte_is_received_into_a_block_that_older_work_still_reads(world, is_ordered):
    prefill, decode = world.engine("P"), world.engine("D")
    old = np.arange(decode.ranks[0].cards["layer.0"].nbytes // 2, dtype=np.uint16)
    card = decode.ranks[0].cards["layer.0"]
    card.write(old.reshape(card.shape))
    seen = np.zeros_like(old)
    allow(0)
    launch(seen.ctypes.data, card.address, card.nbytes)
    decode.event = fence(is_ordered)
    start(world, decode, prefill.prefill("p1", PROMPT, TOKENS))
    prefill.ranks[0].cards["layer.0"].write(prefill.ranks[0].tensors["layer.0"])
    prefill.ranks[0].cards["layer.1"].write(prefill.ranks[0].tensors["layer.1"])
    if is_ordered:
        world.quiet()
        assert not received(world)()
    else:
        world.until(received(world))
    allow()
    arrives(world, decode)
    assert np.array_equal(seen, old) is is_ordered


# ---- fences


@pytest.mark.parametrize("device", [0, 1])
def test_a_fence_is_of_the_stream_of_its_own_card_whichever_is_current(device):
    array, values = DeviceArray([8], device=device), np.arange(8, dtype=np.uint16)
    allow(0, device)
    launch(array.address, values.ctypes.data, array.nbytes, device)
    with current(1 - device):
        late = StreamFence(torch.device("cuda", device))
        free = StreamFence(torch.device("cuda", 1 - device))
        while not free.query():
            pass
        assert not late.query()
    allow(device=device)
    while not late.query():
        pass
    assert np.array_equal(array.read(), values)


def test_memory_of_the_processor_needs_no_fence():
    assert work_so_far(None) is work_so_far(torch.device("cpu")) is None
