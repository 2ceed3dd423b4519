"""Digests of a Llama-3.1-8B cache beside a copy of the same bytes, in three layouts."""

import itertools

import numpy as np
import pytest

from pynixlkv import KVCache
from pynixlkv.connector import ConnectorConfig
from pynixlkv.digest import sample_units

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 32, 64, 8, 16, 128
ORDERS = {  # of the axes K B H N D in memory
    "HND": (0, 1, 2, 3, 4),
    "NHD": (0, 1, 3, 2, 4),
    "HDN, elements apart": (0, 1, 2, 4, 3),
}


@pytest.fixture(scope="module")
def contents():
    """Elements by layer, K or V, block, head, token and dim: 128 MiB."""
    shape = (LAYERS, 2, BLOCKS, HEADS, TOKENS, DIM)
    return np.random.default_rng(3).integers(0, 2**16, shape, np.uint16)


def make_cache(contents, order):
    tensors = {
        f"layer.{i}": np.ascontiguousarray(layer.transpose(order)).transpose(np.argsort(order))
        for i, layer in enumerate(contents)
    }
    return KVCache.from_tensors(tensors, axes="KBHND", kv_heads=HEADS)


def note(benchmark, nbytes):
    benchmark.extra_info["bytes"] = nbytes
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = nbytes / benchmark.stats.stats.median / 1e9


@pytest.mark.benchmark(group="digests of 128 MiB")
def test_copy(benchmark, contents):
    """One memcpy for each layer, of all blocks at once, into memory that exists."""
    copy = np.zeros_like(contents)

    def run():
        for target, layer in zip(copy, contents, strict=True):
            np.copyto(target, layer)

    benchmark.pedantic(run, rounds=11, warmup_rounds=1)
    assert np.array_equal(copy, contents)
    note(benchmark, contents.nbytes)


@pytest.mark.benchmark(group="digests of 128 MiB")
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("fraction", [1, ConnectorConfig.checksum_fraction], ids=["all", "sampled"])
def test_digest(benchmark, contents, order, fraction):
    cache = make_cache(contents, order)
    table = np.random.default_rng(4).permutation(BLOCKS)
    seeds = itertools.count()

    def setup():
        """Choose other blocks in each round, which no cache of the processor holds."""
        return (table,), {"units": sample_units(range(BLOCKS), fraction, next(seeds))}

    digest = benchmark.pedantic(cache.digest, setup=setup, rounds=11, warmup_rounds=1)
    (scope,) = digest.scopes
    plain = make_cache(np.ascontiguousarray(contents[:, :, table]), ORDERS["HND"])
    plain.digest(range(BLOCKS), units=scope.units).check(digest)
    note(benchmark, contents.nbytes * len(scope.units) // BLOCKS)
