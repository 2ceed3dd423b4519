"""Held heads and read sources, against brute force and the table of a running peer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pynixlkv.errors import LayoutError
from pynixlkv.topology import (
    Reader,
    Source,
    expected_readers,
    held_heads,
    held_layers,
    held_tokens,
    read_sources,
    release_targets,
)

GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "tp_sources.json").read_text(encoding="utf-8")
)


def golden_id(row: dict) -> str:
    kind = "mla" if row["mla"] else f"h{row['kv_heads']}"
    return f"{kind}-{row['local_rank']}of{row['local_tp']}-from{row['remote_tp']}"


@st.composite
def splits(draw) -> tuple[int | None, int]:
    """A head count and a group size that the heads can be cut into."""
    kv_heads = draw(st.one_of(st.none(), st.integers(1, 24)))
    size = draw(st.integers(1, 32))
    assume(kv_heads is None or size > kv_heads or kv_heads % size == 0)
    return kv_heads, size


@st.composite
def groups(draw, kv_heads: int | None) -> tuple[int, int]:
    """A group size and a context-parallel size that fit the heads."""
    heads = kv_heads or 1
    divisors = [size for size in range(1, heads + 1) if heads % size == 0]
    size = draw(st.sampled_from([*divisors, *range(heads + 1, 3 * heads + 16)]))
    copies = max(1, size // heads) if size % heads == 0 else 1
    dcp = draw(st.sampled_from([ways for ways in range(1, copies + 1) if copies % ways == 0]))
    return size, dcp


@st.composite
def two_groups(draw):
    kv_heads = draw(st.one_of(st.none(), st.integers(1, 16)))
    return kv_heads, draw(groups(kv_heads)), draw(groups(kv_heads))


def ask(topology, kv_heads, rank, here, there):
    """Call a function of the module for a rank; each side is its size and context-parallel size."""
    (size, dcp), (remote_size, remote_dcp) = here, there
    return topology(
        kv_heads,
        local=(rank, size), remote_size=remote_size, local_dcp=dcp, remote_dcp=remote_dcp,
    )  # fmt: skip


# Held heads, layers and tokens.


def test_twelve_heads_over_four_and_over_six() -> None:
    assert [held_heads(r, 4, 12)[0] for r in range(4)] == [0, 3, 6, 9]
    assert held_heads(3, 4, 12) == range(9, 12)
    assert [held_heads(r, 6, 12)[0] for r in range(6)] == [0, 2, 4, 6, 8, 10]
    assert held_heads(5, 6, 12) == range(10, 12)


def test_more_ranks_than_heads_replicate() -> None:
    assert [held_heads(r, 8, 2)[0] for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [held_heads(r, 6, 4)[0] for r in range(6)] == [0, 0, 1, 2, 2, 3]


def test_a_replicated_cache_is_one_head_on_every_rank() -> None:
    assert [held_heads(r, 3, None) for r in range(3)] == [range(1)] * 3


@given(splits())
def test_every_head_is_held_and_every_rank_holds_as_many(split) -> None:
    kv_heads, size = split
    held = [held_heads(rank, size, kv_heads) for rank in range(size)]
    assert {len(heads) for heads in held} == {max(1, (kv_heads or 1) // size)}
    assert {head for heads in held for head in heads} == set(range(kv_heads or 1))
    assert [heads[0] for heads in held] == sorted(heads[0] for heads in held)


def test_heads_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match=r"10 KV heads do not divide over 4 ranks \(10 % 4 = 2\)"):
        held_heads(0, 4, 10)
    with pytest.raises(LayoutError, match="10 KV heads do not divide over 4 ranks"):
        read_sources(10, local=(0, 2), remote_size=4)


@pytest.mark.parametrize(
    ("rank", "size", "kv_heads", "message"),
    [
        (-1, 4, 8, "rank is -1; expected at least 0"),
        (4, 4, 8, "rank 4 is not in a group of 4; ranks go from 0 to 3"),
        (0, 0, 8, "the size of a group is 0; expected at least 1"),
        (0, 4, 0, "kv_heads is 0; expected at least 1"),
        (True, 4, 8, "rank is True; expected an int"),
        (0, 4.0, 8, "the size of a group is 4.0; expected an int"),
        (0, 4, "8", "kv_heads is '8'; expected an int"),
    ],
)
def test_numbers_that_are_no_rank_size_or_count(rank, size, kv_heads, message) -> None:
    with pytest.raises(LayoutError, match=message.replace(".", r"\.")):
        held_heads(rank, size, kv_heads)


def test_even_pipeline_stages() -> None:
    assert [held_layers(r, 4, 80)[0] for r in range(4)] == [0, 20, 40, 60]
    assert held_layers(3, 4, 80) == range(60, 80)


def test_uneven_pipeline_stages_are_said_and_not_guessed() -> None:
    held = [held_layers(r, 3, 61, stages=[21, 20, 20]) for r in range(3)]
    assert held == [range(21), range(21, 41), range(41, 61)]
    assert held_layers(1, 3, 4, stages=[2, 0, 2]) == range(2, 2)
    with pytest.raises(LayoutError, match="61 layers do not divide over 3 pipeline stages"):
        held_layers(0, 3, 61)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([21, 20], "lists 2 stages with 41 layers in all; expected 3 stages with 61"),
        ([21, 20, 19], "lists 3 stages with 60 layers in all; expected 3 stages with 61"),
        ([62, -1, 0], r"stages\[1\] is -1; expected at least 0"),
        ([61, False, 0], r"stages\[1\] is False; expected an int"),
    ],
)
def test_stages_that_do_not_fit(stages, message) -> None:
    with pytest.raises(LayoutError, match=message):
        held_layers(0, 3, 61, stages=stages)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(sum))
def test_stages_partition_the_layers(stages) -> None:
    total = sum(stages)
    held = [held_layers(r, len(stages), total, stages=stages) for r in range(len(stages))]
    assert [layer for layers in held for layer in layers] == list(range(total))
    assert [len(layers) for layers in held] == stages


@given(size=st.integers(1, 8), num_tokens=st.integers(0, 300), interleave=st.integers(1, 40))
def test_tokens_are_dealt_in_turns(size, num_tokens, interleave) -> None:
    for rank in range(size):
        runs = held_tokens(rank, size, num_tokens, interleave=interleave)
        assert all(len(run) > 0 for run in runs)
        assert [t for run in runs for t in run] == [
            t for t in range(num_tokens) if (t // interleave) % size == rank
        ]


def test_tokens_example() -> None:
    assert held_tokens(1, 2, 14, interleave=4) == [range(4, 8), range(12, 14)]
    assert held_tokens(0, 1, 14) == [range(14)]
    assert held_tokens(0, 1, 0) == []
    with pytest.raises(LayoutError, match="num_tokens is -1"):
        held_tokens(0, 1, -1)
    with pytest.raises(LayoutError, match="interleave is 0"):
        held_tokens(0, 1, 8, interleave=0)


# Sources, readers and release targets.


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=golden_id)
def test_golden_sources(row) -> None:
    kv_heads = None if row["mla"] else row["kv_heads"]
    local = (row["local_rank"], row["local_tp"])
    remote_size = row["remote_tp"]

    sources = read_sources(kv_heads, local=local, remote_size=remote_size)

    # Any holder of a head is right: compare the heads and the number of ranks.
    wanted = [head for source in sources for head in source.heads]
    assert wanted == list(held_heads(*local, kv_heads))
    for source in sources:
        assert set(source.heads) <= set(held_heads(source.rank, remote_size, kv_heads))
    held_by_golden = [held_heads(rank, remote_size, kv_heads) for rank in row["sources"]]
    ours = [held_heads(source.rank, remote_size, kv_heads) for source in sources]
    assert ours == held_by_golden
    for rank in row["sources"]:
        readers = expected_readers(kv_heads, local=(rank, remote_size), remote_size=local[1])
        assert len(readers) == row["consumers"]


def test_golden_table_is_the_whole_one() -> None:
    rows = GOLDEN["rows"]
    assert len(rows) == 240
    assert {row["kv_heads"] for row in rows if not row["mla"]} == {1, 2, 8}


@given(two_groups())
def test_every_head_and_token_arrives_exactly_once(case) -> None:
    kv_heads, (size, dcp), (remote_size, remote_dcp) = case
    tokens = 2 * dcp * remote_dcp

    def held(rank: int, size: int, dcp: int) -> set[tuple[int, int]]:
        return {
            (head, token)
            for head in held_heads(rank, size, kv_heads)
            for run in held_tokens(rank % dcp, dcp, tokens)
            for token in run
        }

    for rank in range(size):
        sources = ask(read_sources, kv_heads, rank, (size, dcp), (remote_size, remote_dcp))
        mine = held(rank, size, dcp)
        arrived: Counter[tuple[int, int]] = Counter()
        for source in sources:
            given_here = {
                (head, token)
                for head, token in held(source.rank, remote_size, remote_dcp) & mine
                if head in source.heads
            }
            assert given_here
            assert len(source.heads) > 0
            arrived.update(given_here)
        assert arrived == Counter(mine)
        assert [s.rank for s in sources] == sorted({s.rank for s in sources})


@given(two_groups())
def test_copies_are_shared_out_evenly(case) -> None:
    kv_heads, (size, _), (remote_size, _) = case
    readings: dict[int, Counter[int]] = {head: Counter() for head in range(kv_heads or 1)}
    for rank in range(remote_size):
        for head in held_heads(rank, remote_size, kv_heads):
            readings[head][rank] = 0
    for rank in range(size):
        for source in read_sources(kv_heads, local=(rank, size), remote_size=remote_size):
            for head in source.heads:
                readings[head][source.rank] += 1
    for per_holder in readings.values():
        assert max(per_holder.values()) - min(per_holder.values()) <= 1


@given(two_groups())
def test_both_ends_agree_on_who_reads_and_who_tells(case) -> None:
    kv_heads, (size, dcp), (remote_size, remote_dcp) = case
    reads, tells = {}, set()
    for rank in range(size):
        here, there = (size, dcp), (remote_size, remote_dcp)
        for source in ask(read_sources, kv_heads, rank, here, there):
            reads[rank, source.rank] = source.heads
        targets = ask(release_targets, kv_heads, rank, here, there)
        assert targets == sorted(set(targets))
        tells |= {(rank, producer) for producer in targets}
    expected = {}
    for producer in range(remote_size):
        readers = ask(expected_readers, kv_heads, producer, (remote_size, remote_dcp), (size, dcp))
        assert readers
        assert [r.rank for r in readers] == sorted({r.rank for r in readers})
        expected |= {(reader.rank, producer): reader.heads for reader in readers}
    assert tells == set(expected)
    assert reads == {pair: heads for pair, heads in expected.items() if len(heads)}


def test_twelve_heads_from_four_ranks_to_six() -> None:
    sources = read_sources(12, local=(1, 6), remote_size=4)
    assert sources == [Source(0, range(2, 3)), Source(1, range(3, 4))]
    readers = expected_readers(12, local=(0, 4), remote_size=6)
    assert readers == [Reader(0, range(2)), Reader(1, range(2, 3))]


def test_mla_from_eight_ranks_to_one_is_one_read_and_eight_notices() -> None:
    assert read_sources(None, local=(0, 1), remote_size=8) == [Source(0, range(1))]
    assert release_targets(None, local=(0, 1), remote_size=8) == list(range(8))
    readers = [expected_readers(None, local=(rank, 8), remote_size=1) for rank in range(8)]
    assert readers == [[Reader(0, range(1))]] + [[Reader(0, range(0))]] * 7


def test_mla_from_one_rank_to_eight_waits_for_eight() -> None:
    for rank in range(8):
        assert read_sources(None, local=(rank, 8), remote_size=1) == [Source(0, range(1))]
        assert release_targets(None, local=(rank, 8), remote_size=1) == [0]
    assert len(expected_readers(None, local=(0, 1), remote_size=8)) == 8


def test_context_parallel_producers_are_all_read() -> None:
    assert read_sources(None, local=(0, 1), remote_size=4, remote_dcp=4) == [
        Source(rank, range(1)) for rank in range(4)
    ]
    # Two heads over eight ranks: four copies of each, which share its tokens two ways.
    sources = read_sources(2, local=(1, 2), remote_size=8, remote_dcp=2)
    assert [source.rank % 2 for source in sources] == [0, 1]
    assert {source.heads for source in sources} == {range(1, 2)}


@pytest.mark.parametrize(
    ("kv_heads", "size", "dcp", "message"),
    [
        (8, 8, 2, "8 ranks cannot share the tokens of 8 KV heads 2 ways: 16 shares.* 8 have one"),
        (4, 6, 2, "6 ranks cannot share the tokens of 4 KV heads 2 ways"),
        (None, 6, 4, "6 ranks cannot share the tokens of replicated KV heads 4 ways"),
        (None, 4, 0, "context parallelism is 0; expected at least 1"),
    ],
)
def test_context_parallelism_that_leaves_tokens_without_a_holder(
    kv_heads, size, dcp, message
) -> None:
    with pytest.raises(LayoutError, match=message):
        read_sources(kv_heads, local=(0, 1), remote_size=size, remote_dcp=dcp)


@pytest.mark.parametrize("question", [held_layers, held_tokens])
def test_a_rank_outside_its_group_holds_nothing(question) -> None:
    with pytest.raises(LayoutError, match="rank 2 is not in a group of 2"):
        question(2, 2, 4)


@pytest.mark.parametrize("question", [read_sources, release_targets, expected_readers])
def test_a_rank_outside_its_group(question) -> None:
    with pytest.raises(LayoutError, match="rank 2 is not in a group of 2"):
        question(8, local=(2, 2), remote_size=4)
    with pytest.raises(LayoutError, match="the size of a group is 0"):
        question(8, local=(0, 2), remote_size=0)
