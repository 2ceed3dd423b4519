"""Batches of gets and puts."""

import threading

import numpy as np
import pytest

from pynixlkv.errors import ClosedError, ConfigError
from pynixlkv.ucx import Context, Endpoint, RemoteKey, Worker, get_batch, put_batch

PIECE, COUNT = 512, 300


@pytest.fixture
def pair():
    """Two workers of this process, memory of each, and a key to the second's."""
    context = Context({"RNDV_THRESH": "inf"})
    here, there = (np.random.default_rng(i).integers(0, 256, PIECE * COUNT, "u1") for i in (1, 2))
    local, remote = context.map(here), context.map(there)
    worker, other = Worker(context), Worker(context)
    stop = threading.Event()

    def progress():
        while not stop.is_set():
            other.spin(0.005)

    thread = threading.Thread(target=progress)
    thread.start()
    with Endpoint(worker, other.address) as endpoint:
        yield here, there, local, RemoteKey(endpoint, remote.pack()), endpoint
    stop.set()
    thread.join()
    local.close()
    remote.close()


def places():
    rng = np.random.default_rng(3)
    return np.stack([rng.permutation(COUNT), rng.permutation(COUNT)], axis=1) * PIECE


@pytest.mark.parametrize("window", [1, 7, 1000])
@pytest.mark.parametrize("is_get", [True, False], ids=["get", "put"])
def test_every_piece_arrives_at_its_offset(pair, window, is_get):
    here, there, local, key, _ = pair
    expected_here, expected_there = here.copy(), there.copy()
    for a, b in places():
        if is_get:
            expected_here[a : a + PIECE] = there[b : b + PIECE]
        else:
            expected_there[b : b + PIECE] = here[a : a + PIECE]
    make = get_batch if is_get else put_batch
    batch = make(local, key, places(), PIECE, window=window, timed=True)
    assert not np.array_equal(here, expected_here) or not np.array_equal(there, expected_there)
    batch.wait(60.0)
    assert np.array_equal(here, expected_here)
    assert np.array_equal(there, expected_there)
    assert batch.piece_times.shape == (COUNT,)
    assert (batch.piece_times >= 0).all()


def test_an_empty_batch_is_complete(pair):
    here, _, local, key, _ = pair
    before = here.copy()
    get_batch(local, key, np.zeros((0, 2), dtype=int), PIECE).wait(1.0)
    assert np.array_equal(here, before)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([[0, 0], [-1, 0]], r"piece 1, 512 bytes at offset -1.*local"),
        ([[0, 0], [PIECE * COUNT - PIECE + 1, 0]], r"piece 1.*local"),
        ([[0, PIECE * COUNT]], r"piece 0.*153600 bytes of the remote"),
        (np.array([[0, 2**64 - 512]], dtype=np.uint64), r"piece 0.*remote"),
        ([[0.5, 0.0]], "integers of shape"),
        ([0, 0], "integers of shape"),
        ([[0, 0, 0]], "integers of shape"),
    ],
)
def test_a_piece_outside_the_memory_is_refused_by_number(pair, wrong, words):
    _, _, local, key, _ = pair
    with pytest.raises(ConfigError, match=words):
        get_batch(local, key, wrong, PIECE)


@pytest.mark.parametrize(("nbytes", "window"), [(0, 1), (512, 0), (-1, 1)])
def test_lengths_and_windows_must_be_positive(pair, nbytes, window):
    _, _, local, key, _ = pair
    with pytest.raises(ConfigError, match="at least 1"):
        put_batch(local, key, [[0, 0]], nbytes, window=window)


def test_closing_the_endpoint_ends_the_batch(pair):
    _, _, local, key, endpoint = pair
    batch = get_batch(local, key, places(), PIECE)
    endpoint.close()
    with pytest.raises(ClosedError):
        batch.wait(5.0)
