"""Checks of what the other side says, each of which nothing behind it would make up for."""

from __future__ import annotations

import numpy as np
import pytest
from toy_engine import Model
from toy_pair import arrives, early_params, errors, failed, start, start_early
from toy_world import World

from pynixlkv import KVCache
from pynixlkv.connector import messages
from pynixlkv.connector.context import WorkerContext
from pynixlkv.connector.metadata import Lease, ParallelSizes
from pynixlkv.connector.scheduler import GroupSpec, cut_table
from pynixlkv.errors import (
    ConfigError,
    HandshakeError,
    IncompatibleLayoutError,
    PeerLostError,
    PlanError,
    TransferError,
)


def fail(world, params, request_id="d1"):
    """Let a request fail at D; return why."""
    start(world, world.engines["D"], params, request_id=request_id)
    world.until(failed(world, request_id))
    return errors(world, request_id)[0]


@pytest.fixture
def world():
    with World(lease_duration=30, transfer_timeout=1000) as world:
        world.engine("P")
        world.engine("D")
        yield world


def test_a_producer_without_some_of_the_layers_is_refused():
    with World() as world:
        prefill = world.engine("P", Model(layers=1))
        world.engine("D", Model(layers=2))
        error = fail(world, prefill.prefill("p1", 7, 13))
        assert isinstance(error, IncompatibleLayoutError)
        assert error.differences == [("kv.layers", (0, 1), (0,))]


@pytest.mark.parametrize("size", [2, 6, 9])
def test_tables_of_other_blocks_than_those_of_the_cache_are_refused(world, size):
    params = world.engines["P"].prefill("p1", 7, 13)
    error = fail(world, {**params, "remote_block_sizes": [size]})
    assert isinstance(error, PlanError)
    assert f"a block of its table stands for {size} tokens" in str(error)


@pytest.mark.parametrize(("blocks", "starts"), [((), ()), (((1,),), ()), (((1,),), (0, 0))])
def test_tables_that_are_not_those_of_a_geometry_are_refused(blocks, starts):
    layers = {"x": np.zeros((4, 2, 8, 2, 4), "f4")}
    cache = KVCache.from_tensors(layers, axes="BKNHD", kv_heads=2).geometry
    with pytest.raises(PlanError, match=f"there are {len(blocks)} tables and {len(starts)} starts"):
        WorkerContext.tables_by_group(None, cache, blocks, starts, ())


@pytest.mark.parametrize("num_caches", [0, 1, 2, 3])
def test_a_hello_that_is_not_of_a_connector_is_refused(world, num_caches):
    prefill = world.engines["P"]
    params = prefill.prefill("p1", 7, 13)
    agent = prefill.ranks[0].agent
    arrays = [np.zeros((4, 8), np.uint64) for _ in range(num_caches)]
    caches = [KVCache.from_tensors({"x": a}, axes="BD", kv_heads=None) for a in arrays]
    for cache in caches:
        agent.register(cache)
    world.book["P"] = {(0, 0): agent.hello(*caches)}
    error = fail(world, params)
    assert isinstance(error, HandshakeError)
    assert f"describes {num_caches} caches" in str(error)


def test_a_lost_peer_is_connected_anew_for_the_next_request(world):
    prefill, decode = world.engines["P"], world.engines["D"]
    agent = decode.ranks[0].agent
    read = agent.read

    def lose(peer, *_args, **_options):
        raise PeerLostError("its cable was pulled", peer=peer.name)

    agent.read = lose
    assert isinstance(fail(world, prefill.prefill("p1", 7, 13)), PeerLostError)
    assert world.count("D", "releases_lost") == 1
    agent.read = read
    assert world.num_fetches == 1
    start(world, decode, prefill.prefill("p2", 7, 13), request_id="d2")
    arrives(world, decode, "d2")
    assert world.num_fetches == 2


def test_a_push_of_a_request_that_never_comes_ends_with_the_time_of_a_lease():
    with World("push", lease_duration=30, transfer_timeout=1000) as world:
        prefill, decode = world.engine("P"), world.engine("D")
        start(world, decode, early_params(prefill, "never"))
        world.quiet()
        # Whoever asks again still waits; only silence counts.
        world.pass_time(60, 30)
        assert not world.outcomes["D"].failed
        world.network.drop_notifications("P.0.0", 10**6)
        world.pass_time(31, 31)
        world.until(lambda: prefill.stats.pushes == 0)


@pytest.mark.parametrize(
    "text",
    ["", "1", "1-", "-1", "1-0", "1-g", f"1-{2**62 + 1:x}", f"{10**9}-1", "1-1 ", " 1-1", "1--1"],
)
def test_leases_are_of_one_form(text):
    with pytest.raises(ConfigError, match="expected <slot>-<hexadecimal token>"):
        Lease.parse(text)


def test_the_largest_lease_is_one():
    lease = Lease(10**9 - 1, 2**62)
    assert Lease.parse(str(lease)) == lease


def test_a_lease_of_a_slot_that_is_not_there_is_refused(world):
    params = world.engines["P"].prefill("p1", 7, 13)
    error = fail(world, {**params, "lease": str(Lease(10**8, 1))})
    assert isinstance(error, PlanError)
    assert "slots" in str(error)


def test_tokens_that_the_producer_does_not_hold_are_refused(world):
    params = world.engines["P"].prefill("p1", 7, 13)
    error = fail(world, {**params, "remote_starts": [4]})
    assert isinstance(error, (PlanError, TransferError))
    assert "table 0 from 4 on, wanted from 0" in str(error)


def test_state_of_a_token_is_in_the_slot_of_its_stretch():
    spec = GroupSpec(0, state_tokens=4, null_block=0)
    for end, slot in ((1, 5), (4, 5), (5, 6), (8, 6), (12, 7)):
        assert cut_table(spec, (5, 6, 7, 0), 0, end) == ((slot,), 0)
    for end in (13, 16, 17):  # the null block, and none
        with pytest.raises(ConfigError, match=f"has no state of token {end - 1}"):
            cut_table(spec, (5, 6, 7, 0), 0, end)


def test_a_hand_off_that_names_no_starts_begins_at_the_first_token(world):
    params = world.engines["P"].prefill("p1", 7, 13)
    start(world, world.engines["D"], {**params, "remote_starts": None})
    arrives(world, world.engines["D"])


def test_an_engines_blocks_are_whole_numbers_of_those_of_the_cache():
    layers = {"x": np.zeros((4, 2, 8, 2, 4), "f4")}
    cache = KVCache.from_tensors(layers, axes="BKNHD", kv_heads=2, table="0").geometry
    tables, starts = WorkerContext.tables_by_group(None, cache, ((3, 5),), (16,), (16,))
    assert {name: list(table) for name, table in tables.items()} == {"kv": [6, 7, 10, 11]}
    assert starts == {"kv": 16}


@pytest.mark.parametrize(
    ("table", "slots"),
    [((0, 0, 9), (9,)), ((9, 0), (9,)), ((0,), ()), ((4, 0, 9), (4, 9)), ((7,), (7,))],
)
def test_placeholders_in_tables_of_state_are_skipped(table, slots):
    assert cut_table(GroupSpec(0, null_block=0), table, 0, 100) == (slots, 0)
    assert cut_table(GroupSpec(0), table, 0, 100) == (table, 0)


def test_a_page_that_moves_whole_waits_for_what_the_producer_adds_to_it():
    """The producer goes on behind the prompt, in the page of its last tokens."""
    model = Model(packing="nvfp4")
    with World("push", checksums="all") as world:
        prefill, decode = world.engine("P", model), world.engine("D", model)
        prefill.begin("p1", 7, 13)
        start_early(world, prefill, decode)
        prefill.compute("p1", 13)
        world.quiet()
        for rank in prefill.ranks:
            rank.write(7, prefill.requests["p1"].blocks, range(13, 14))
        prefill.hand_over("p1")
        arrives(world, decode)


def test_a_reader_is_counted_once_whatever_it_says_of_its_ranks():
    with World() as world:
        prefill = world.engine("P")
        lease = Lease.parse(prefill.prefill("p1", 7, 13, num_readers=2)["lease"])
        world.quiet()
        first, second = (messages.Reader("p1", lease, number, 2) for number in (1, 2))
        world.deliver("P", "x", messages.Heartbeat([first, second]))
        for rank, parallel in (((0, 0), ParallelSizes()), ((0, 1), ParallelSizes(tp=2))):
            reader = messages.ConsumerRank("X", rank, parallel)
            world.deliver("P", "x", messages.Release(reader, [first]))
        world.quiet()
        assert not world.outcomes["P"].sent
        reader = messages.ConsumerRank("Y", (0, 0), ParallelSizes())
        world.deliver("P", "y", messages.Release(reader, [second]))
        world.until(lambda: world.outcomes["P"].sent == {"p1"})
