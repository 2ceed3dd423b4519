"""Copies between cards and host memory: digests of what is on a card, and host staging."""

import numpy as np
import pytest
import torch
from cuda_memory import DeviceArray, DevicePool, SecondDevicePool, allow, launch, use_cards

from pynixlkv import KVCache, TransferPlan
from pynixlkv.connector.staging import HostBlockPool, HostStaging, make_host_tensors
from pynixlkv.errors import KVCorruptError
from pynixlkv.nixl import NixlAgent
from pynixlkv.testing.conformance import WAIT_S
from pynixlkv.testing.remote import Pool
from pynixlkv.ucx import UcxAgent
from pynixlkv.vllm.host import work_so_far

pytestmark = pytest.mark.stub


@pytest.fixture(autouse=True)
def cards(monkeypatch):
    use_cards(monkeypatch)
    yield
    allow()


# ---- digests


@pytest.mark.parametrize("axes", ["KBHND", "BKNHD"])
@pytest.mark.parametrize("make_pool", [DevicePool, SecondDevicePool])
def test_digests_of_a_card_are_those_of_the_same_bytes_in_host_memory(axes, make_pool):
    host, card = Pool(axes), make_pool(axes)
    host.fill(1)
    card.fill(1)
    blocks = [5, 0, 63]
    expected = host.cache.digest(blocks)
    card.cache.digest(blocks).check(expected)
    values = card.tensor.read()
    where = [{"K": 1, "B": 63, "H": 2, "N": 3, "D": 9}[axis] for axis in axes]
    values[tuple(where)] ^= 1
    card.tensor.write(values)
    with pytest.raises(KVCorruptError, match=r"V, heads 2 of 0-3, tokens 16-23"):
        card.cache.digest(blocks).check(expected)


# ---- staging

SHAPE, AXES, HOST_BLOCKS = (8, 2, 2, 4, 8), "BKHND", 5


class StagedRank:
    """A cache on a card, a host cache, and copies that a stream makes between them."""

    def __init__(self, seed):
        self.values = np.random.default_rng(seed).integers(1, 1 << 16, SHAPE, np.uint16)
        self.card = DeviceArray(SHAPE)
        self.card.write(self.values)
        self.host = make_host_tensors({"layer.0": self.values}, axes=AXES, num_blocks=HOST_BLOCKS)
        self.staging = HostStaging(
            KVCache.from_tensors({"layer.0": self.card}, axes=AXES, kv_heads=2),
            KVCache.from_tensors(self.host, axes=AXES, kv_heads=2),
            self.copy,
        )

    def copy(self, direction, device_blocks, host_blocks):
        size = self.card.nbytes // SHAPE[0]
        host = self.host["layer.0"].ctypes.data
        for on_card, on_host in zip(device_blocks[0], host_blocks[0], strict=True):
            ends = host + on_host * size, self.card.address + on_card * size
            launch(*(ends if direction == "d2h" else ends[::-1]), size)
        return work_so_far(torch.device("cuda:0"))


def wait(event):
    while not event.query():
        pass


@pytest.mark.parametrize("make", [UcxAgent, NixlAgent], ids=["ucx", "nixl"])
def test_blocks_go_from_card_to_card_through_the_hosts(make, closing):
    ours, theirs = StagedRank(1), StagedRank(2)
    consumer, producer = closing(make("consumer")), closing(make("producer"))
    for agent, rank in ((producer, theirs), (consumer, ours)):
        agent.register(rank.staging.host_cache)
    peer = consumer.connect(producer.hello(theirs.staging.host_cache))
    plan = TransferPlan(ours.staging.host_cache.geometry, peer.geometry)
    there, here = (HostBlockPool([HOST_BLOCKS]).allocate([3]) for _ in range(2))

    allow(0)
    sent = theirs.staging.stage("d2h", ((7, 0, 3),), there)
    assert not sent.query()
    assert not theirs.host["layer.0"].any()
    allow()
    wait(sent)
    consumer.read(peer, plan, here[0], there[0]).wait(WAIT_S)

    allow(0)
    arrived = ours.staging.stage("h2d", ((1, 6, 4),), here)
    assert not arrived.query()
    assert np.array_equal(ours.card.read(), ours.values)
    allow()
    wait(arrived)
    expected = ours.values.copy()
    expected[[1, 6, 4]] = theirs.values[[7, 0, 3]]
    assert np.array_equal(ours.card.read(), expected)
