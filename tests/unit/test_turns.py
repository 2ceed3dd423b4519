"""Conversations: a consumer holds finished turns, and a producer fetches them for the next ones."""

from __future__ import annotations

import logging

import pytest
from toy_pair import BEATS_5, arrives, failed, pair, received, sent, start

from pynixlkv.connector import (
    ConnectorConfig,
    ConnectorScheduler,
    GroupSpec,
    KVTransferParams,
    RequestInfo,
)

KEPT_S = 100.0
TURNS = {
    **BEATS_5,
    "conversation_blocks": 12,
    "conversation_seconds": KEPT_S,
    "recompute_threshold": 1,
}
PROMPT, ANSWER = 13, 6
KEPT = 16  # whole blocks of both

both_modes = pytest.mark.parametrize("mode", ["pull", "push"])


def turn(world, prefill, decode, *, prompt=7, name="1"):
    """Let decode finish a turn; returns its hand-off for the next one."""
    start(world, decode, prefill.prefill(f"p{name}", prompt, PROMPT), prompt=prompt,
          request_id=f"d{name}")  # fmt: skip
    arrives(world, decode, f"d{name}")
    decode.go_on(f"d{name}", PROMPT + ANSWER)
    params = decode.hand_over(f"d{name}")
    world.quiet()
    return params


def computes_all(prefill, params, *, prompt=7, num_tokens=23, request_id="p2"):
    """A next turn of which nothing is fetched is handed over all the same."""
    prefill.arrive(request_id, prompt, num_tokens, params)
    assert prefill.schedule(request_id) == 0
    prefill.go_on(request_id, num_tokens)
    assert prefill.hand_over(request_id)["remote_num_tokens"] == num_tokens


@both_modes
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
def test_each_turn_fetches_what_the_one_before_has_left(mode, tp):
    sides = {"producer": {"tp": tp[0]}, "consumer": {"tp": tp[1], "axes": "BKNHD"}}
    with pair(mode, **sides, **TURNS) as (world, prefill, decode):
        params, num_tokens = None, PROMPT
        for number in range(3):
            prompt_id, answer_id = f"p{number}", f"d{number}"
            prefill.arrive(prompt_id, 7, num_tokens, params or {"do_remote_decode": True})
            held = 0 if params is None else params["remote_num_tokens"]
            local = 4 * number  # the prefix that is still in prefill's own cache
            assert prefill.schedule(prompt_id, local) == max(held - local, 0)
            if held:
                world.until(received(world, prompt_id, "P"))
                world.until(sent(world, f"d{number - 1}", "D"))
            prefill.go_on(prompt_id, num_tokens)
            assert prefill.holds(prompt_id)
            start(world, decode, prefill.hand_over(prompt_id), request_id=answer_id,
                  num_tokens=num_tokens)  # fmt: skip
            arrives(world, decode, answer_id)
            world.until(sent(world, prompt_id))
            decode.go_on(answer_id, num_tokens + ANSWER)
            params = decode.hand_over(answer_id)
            world.quiet()
            assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
            num_tokens += ANSWER + 4
            assert params["remote_num_tokens"] == (num_tokens - 4) // 4 * 4
        assert world.count("P", "errors") == world.count("D", "errors") == 0


def test_a_turn_is_held_for_its_time_and_longer_while_a_reader_waits():
    with pair(**TURNS) as (world, prefill, decode):
        first, second = (turn(world, prefill, decode, prompt=p, name=str(p)) for p in (7, 8))
        assert world.leases("D") == [2]
        prefill.arrive("q7", 7, 20, first)
        world.quiet()
        world.pass_time(KEPT_S + 30, 26)
        assert world.leases("D") == [1]
        assert world.outcomes["D"].sent == {"d8"}
        assert prefill.schedule("q7") == KEPT
        world.until(received(world, "q7", "P"))
        assert prefill.holds("q7")
        world.until(sent(world, "d7", "D"))
        prefill.arrive("q8", 8, 20, second)
        assert prefill.schedule("q8") == KEPT
        world.until(failed(world, "q8", "P"))
        assert {end.value for end in world.end_of("P", "q8")} == {"expired"}
        assert decode.stats.leases == {"released": 1, "unread": 1}
        assert len(decode.free) == 16


def test_the_oldest_turns_make_room_for_new_ones():
    with pair(consumer={"num_blocks": 32}, **TURNS) as (world, prefill, decode):
        for prompt in range(4):  # each has 5 blocks, and 12 may be held
            assert turn(world, prefill, decode, prompt=prompt, name=str(prompt)) is not None
            assert len(decode.free) >= 32 - 12
        assert world.outcomes["D"].sent == {"d0", "d1"}
        decode.scheduler.release_turns(1, "the test says so")
        world.until(sent(world, "d2", "D"))
        assert world.leases("D") == [1]


def test_a_turn_that_is_larger_than_all_that_may_be_held_is_not_held():
    with pair(**{**TURNS, "conversation_blocks": 4}) as (world, prefill, decode):
        assert turn(world, prefill, decode) is None
        assert len(decode.free) == 16


@both_modes
def test_what_decode_no_longer_holds_is_computed_again(mode):
    with pair(mode, **TURNS) as (world, prefill, decode):
        params = turn(world, prefill, decode)
        decode.scheduler.release_turns(99, "the test says so")
        world.until(sent(world, "d1", "D"))
        for rank in decode.ranks:
            rank.poison(range(16))
        prefill.arrive("p2", 7, 23, params)
        assert prefill.schedule("p2") == KEPT
        world.until(failed(world, "p2", "P"))
        prefill.go_on("p2", 23, 0)
        start(world, decode, prefill.hand_over("p2"), request_id="d2", num_tokens=23)
        arrives(world, decode, "d2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"content": "another"}, "the hand-off is of another prompt"),
        ({"content": None}, "the hand-off is of another prompt"),
        ({"remote_num_tokens": 24}, "the hand-off is of another prompt"),
        ({"transfer_mode": "push"}, "use one transfer_mode on both sides"),
        ({"remote_block_ids": [[1], [2]], "remote_starts": None, "remote_block_sizes": []},
         "2 block tables"),
    ],
)  # fmt: skip
def test_a_turn_that_does_not_fit_is_not_fetched_and_stays_held(caplog, change, why):
    with pair(**TURNS) as (world, prefill, decode):
        params = turn(world, prefill, decode)
        with caplog.at_level(logging.WARNING, "pynixlkv"):
            computes_all(prefill, {**params, **change})
        assert why in caplog.text
        assert len(caplog.records) == 1
        world.quiet()
        assert world.leases("D") == [1]


def test_a_turn_that_prefill_has_itself_is_released_at_once():
    with pair(**{**TURNS, "recompute_threshold": 9}) as (world, prefill, decode):
        params = turn(world, prefill, decode)
        prefill.arrive("p2", 7, 23, params)
        assert prefill.schedule("p2", 8) == 0  # 8 tokens are fewer than it is worth
        world.until(sent(world, "d1", "D"))


def test_the_readers_that_a_router_announces_are_those_of_the_next_lease():
    with pair(**TURNS) as (world, prefill, decode):
        params = turn(world, prefill, decode)
        prefill.arrive("p2", 7, 23, {**params, "num_readers": 2})
        prefill.schedule("p2")
        world.until(received(world, "p2", "P"))
        prefill.go_on("p2", 23)
        assert prefill.hand_over("p2")["num_readers"] == 2
        world.until(sent(world, "d1", "D"))


@both_modes
def test_a_next_turn_that_is_given_up_ends_the_lease_of_the_one_before(mode):
    with pair(mode, **TURNS) as (world, prefill, decode):
        params = turn(world, prefill, decode)
        prefill.arrive("p2", 7, 23, params)
        prefill.finish("p2")
        world.until(sent(world, "d1", "D"))
        assert len(prefill.free) == 16


OFFER = {
    "do_remote_prefill": True, "remote_engine_id": "P", "remote_request_id": "p",
    "remote_host": "host", "remote_port": 1, "remote_num_tokens": 96, "lease": "0-4",
    "lease_duration": 30.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "tables", "num_tokens", "held"),
    [
        ([GroupSpec(32)], [range(4)], 127, 96),
        ([GroupSpec(32), GroupSpec(16)], [range(4), range(8)], 127, 96),
        # A window of 64 tokens before position 96 begins with the second block.
        ([GroupSpec(32, window=64, null_block=0)], [[0, 1, 2, 3]], 127, 96),
        ([GroupSpec(32, window=64, null_block=0)], [[0, 0, 2, 3]], 127, None),
        ([GroupSpec(32, chunk=64, null_block=0)], [[0, 0, 2, 3]], 127, 96),
        ([GroupSpec(32, window=1)], [range(4)], 127, None),
        ([GroupSpec(32), GroupSpec(0)], [range(4), [1]], 127, None),  # state is of the last token
        ([GroupSpec(32)], [range(1)], 31, None),
    ],
)
def test_whole_blocks_are_held_with_all_that_a_next_turn_needs(groups, tables, num_tokens, held):
    scheduler = ConnectorScheduler(
        "D", groups, address=("host", 1), config=ConnectorConfig(conversation_blocks=12)
    )
    params = KVTransferParams.from_dict({**OFFER, "remote_block_ids": [[1]] * len(groups)})
    info = RequestInfo("d1", 96, params)
    keeps, answer = scheduler.request_finished(info, tuple(map(tuple, tables)), num_tokens)
    assert keeps is (held is not None)
    assert held == (answer and answer["remote_num_tokens"])
