"""The order of an engine's kernels and of the bytes that move, with streams that are late.

Toy engines on cards: what they compute is the work of a stream, which the test holds up. Without
the events, each test must see the wrong bytes that it looks for.
"""

import numpy as np
import pytest
import torch
from cuda_memory import DeviceArray, allow, current, launch, use_cards
from toy_engine import POISON, ToyEngine, ToyRank
from toy_pair import arrives, early_params, received, start
from toy_world import World

from pynixlkv.nixl import NixlAgent
from pynixlkv.ucx import UcxAgent
from pynixlkv.vllm.host import StreamFence, work_so_far

pytestmark = pytest.mark.stub

PROMPT, TOKENS = 7, 13
MODES = pytest.mark.parametrize("mode", ["pull", "push"])


@pytest.fixture(autouse=True)
def cards(monkeypatch):
    use_cards(monkeypatch)
    yield
    for device in (0, 1):
        allow(device=device)


class CardRank(ToyRank):
    """Its tensors are what the processor launches; a stream brings them to the card."""

    def on_device(self, tensors):
        self.cards = [DeviceArray(tensor.shape) for tensor in tensors.values()]
        for card, tensor in zip(self.cards, tensors.values(), strict=True):
            card.write(tensor)
        return dict(zip(tensors, self.cards, strict=True))

    def launch(self, layer):
        card, tensor = self.cards[layer], self.tensors[f"layer.{layer}"]
        launch(card.address, tensor.ctypes.data, card.nbytes)


class CardEngine(ToyEngine):
    rank_class = CardRank

    def holds(self, request_id):
        (rank,) = self.ranks
        for card, tensor in zip(rank.cards, rank.tensors.values(), strict=True):
            tensor[...] = card.read()
        return super().holds(request_id)


class Cards(World):
    """A producer and a consumer whose KV is on a card, by a real library."""

    engine_class = CardEngine

    def __init__(self, mode, make):
        super().__init__(mode, checksums="off")
        self.make_agent = make
        self.prefill, self.decode = self.engine("P"), self.engine("D")
        self.source, self.target = self.prefill.ranks[0], self.decode.ranks[0]

    def round(self):
        """Let a consumer look at a lease again that it has seen too early."""
        self.clock.now += 0.001
        super().round()


@pytest.fixture(params=[UcxAgent, NixlAgent], ids=["ucx", "nixl"])
def world(request, mode):
    with Cards(mode, request.param) as world:
        yield world


@pytest.fixture(params=[True, False], ids=["events", "no events"])
def fence(request):
    """Return a function that makes the hooks' event of a moment, or none."""

    def make():
        return work_so_far(torch.device("cuda:0")) if make.is_ordered else None

    make.is_ordered = request.param
    return make


def arrives_wrong(world):
    world.until(received(world))
    assert not world.decode.holds("d1")


@MODES
def test_no_byte_is_sent_before_the_work_that_writes_it_is_done(world, fence):
    params = world.prefill.prefill("p1", PROMPT, TOKENS)
    allow(0)
    for layer in world.source.layers:
        world.source.launch(layer)
    world.prefill.event = fence()
    start(world, world.decode, params)
    if not fence.is_ordered:
        arrives_wrong(world)
        return
    world.quiet()
    assert not received(world)()
    assert all((card.read() == POISON).all() for card in world.target.cards)
    allow()
    arrives(world, world.decode)


@pytest.mark.parametrize("mode", ["push"])
def test_no_layer_is_pushed_before_the_work_that_writes_it_is_done(world, fence):
    world.prefill.begin("p1", PROMPT, TOKENS)
    start(world, world.decode, early_params(world.prefill, "p1"))
    world.until(lambda: world.prefill.stats.pushes)
    save = world.source.worker.save_kv_layer

    def launch_and_save(layer, _):
        world.source.launch(layer)
        save(layer, fence())

    world.source.worker.save_kv_layer = launch_and_save
    allow(0)
    world.prefill.compute("p1", TOKENS)
    world.quiet()
    world.prefill.event = fence()
    if not fence.is_ordered:
        world.prefill.hand_over("p1")
        arrives_wrong(world)
        return
    first, second = world.target.cards
    assert (first.read() == POISON).all()
    allow(2)  # the first layer's copy and its event
    world.until(lambda: (first.read() != POISON).any())
    world.quiet()
    assert (second.read() == POISON).all()
    allow()
    world.prefill.hand_over("p1")
    arrives(world, world.decode)


@MODES
def test_no_byte_is_received_into_a_block_that_older_work_still_reads(world, fence):
    card = world.target.cards[0]
    old = np.arange(card.nbytes // 2, dtype=np.uint16)
    card.write(old.reshape(card.shape))
    seen = np.zeros_like(old)
    params = world.prefill.prefill("p1", PROMPT, TOKENS)
    for layer, tensor in enumerate(world.source.tensors.values()):
        world.source.cards[layer].write(tensor)
    allow(0)
    launch(seen.ctypes.data, card.address, card.nbytes)
    world.decode.event = fence()
    start(world, world.decode, params)
    if fence.is_ordered:
        world.quiet()
        assert not received(world)()
    else:
        world.until(received(world))
    allow()
    arrives(world, world.decode)
    while not StreamFence(torch.device("cuda:0")).query():
        pass
    assert np.array_equal(seen, old) is fence.is_ordered


@pytest.mark.parametrize("device", [0, 1])
def test_a_fence_is_of_the_stream_of_its_own_card_whichever_is_current(device):
    array, values = DeviceArray([8], device=device), np.arange(8, dtype=np.uint16)
    allow(0, device)
    launch(array.address, values.ctypes.data, array.nbytes, device)
    with current(1 - device):
        late, free = (StreamFence(torch.device("cuda", d)) for d in (device, 1 - device))
        while not free.query():
            pass
        assert not late.query()
    allow(device=device)
    while not late.query():
        pass
    assert np.array_equal(array.read(), values)


def test_memory_of_the_processor_needs_no_fence():
    assert work_so_far(None) is work_so_far(torch.device("cpu")) is None
