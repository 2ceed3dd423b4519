"""The promises of every agent, as a pytest suite.

Tests of an agent subclass `AgentConformance` and give it two fixtures: ``make_agent`` (name → agent
of this process) and ``remote`` (the other side, a `pynixlkv.testing.remote.Remote`). Every check
compares bytes, including the ones that must not have changed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pynixlkv.agent import MAX_NOTIFICATION_BYTES, Agent, Peer, Transfer
from pynixlkv.errors import (
    AlreadyRegisteredError,
    ClosedError,
    ConfigError,
    DuplicatePeerError,
    ForkError,
    HandshakeError,
    LayoutError,
    NotRegisteredError,
    PeerLostError,
    PlanError,
    RegistrationInUseError,
    StalePeerError,
    StateError,
    TransferCancelled,
    TransferTimeout,
    WireError,
)
from pynixlkv.plan import TransferPlan
from pynixlkv.testing.contents import random_bytes
from pynixlkv.testing.remote import Pool
from pynixlkv.types import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from pynixlkv.testing.remote import Remote

__all__ = ["AgentConformance", "HungPeerConformance", "rows"]

WAIT_S = 60.0
"""Longest wait for something that must happen."""


def rows(address: int, *ranges: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Return descriptors of (offset, length) ranges from an address on, device 0."""
    array = [(address + offset, length, 0) for offset, length in ranges]
    return np.array(array, dtype=np.uint64).reshape(-1, 3)


class _Local:
    """The suite's own side: an agent, its pool, and the connection to the remote."""

    def __init__(self, agent: Agent, remote: Remote, pool: Pool) -> None:
        self.agent = agent
        self.remote = remote
        self.pool = pool
        self.registration = agent.register(pool.cache)
        self.peer = self.connect()
        remote.connect(agent.hello(pool.cache))

    def connect(self) -> Peer:
        return self.agent.connect(self.remote.hello())

    def plan(self) -> TransferPlan:
        return TransferPlan(self.pool.cache.geometry, self.peer.geometry)

    def remote_content(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.remote.content(), dtype=np.uint8)

    def remote_pool(self) -> Pool:
        """Return a copy of the remote's pool."""
        pool = Pool("KBHND")
        pool.bytes[:] = self.remote_content()
        return pool


class AgentConformance:
    """The promises of `pynixlkv.agent.Agent`."""

    make_pool: Callable[[str], Pool] = Pool
    """Makes the suite's own pool from its axes."""

    @pytest.fixture
    def make_agent(self) -> Iterator[Callable[[str], Agent]]:
        """Make agents and close them; overridden by the tests of an agent."""
        raise NotImplementedError

    @pytest.fixture
    def remote(self) -> Iterator[Remote]:
        """Make the other side; overridden by the tests of an agent."""
        raise NotImplementedError

    @pytest.fixture
    def local(self, make_agent: Callable[[str], Agent], remote: Remote) -> _Local:
        """Our side, with another layout than the remote's."""
        return _Local(make_agent("local"), remote, self.make_pool("KBHND"))

    # ---- moving bytes

    def test_is_an_agent(self, local: _Local) -> None:
        assert isinstance(local.agent, Agent)

    def test_read_moves_the_named_bytes_and_no_other(self, local: _Local) -> None:
        local.remote.fill(1)
        local.pool.fill(2)
        expected = local.pool.bytes.copy()
        there = local.remote_content()
        spans = [(64, 100), (4096, 1), (8000, 4000)]
        ours = rows(local.pool.address, *spans)
        theirs = rows(local.remote.address(), *[(o + 300, n) for o, n in spans])
        with local.agent.read_descriptors(local.peer, ours, theirs) as transfer:
            result = transfer.wait(WAIT_S)
        for offset, length in spans:
            expected[offset : offset + length] = there[offset + 300 : offset + 300 + length]
        assert np.array_equal(local.pool.bytes, expected)
        assert result.bytes == 4101
        assert result.descriptors == 3
        assert transfer.state is TransferState.DONE
        assert transfer.is_quiet
        assert transfer.error is None

    def test_write_moves_the_named_bytes_and_no_other(self, local: _Local) -> None:
        local.remote.fill(1)
        local.pool.fill(2)
        expected = local.remote_content().copy()
        ours = rows(local.pool.address, (10, 5000), (9000, 7))
        theirs = rows(local.remote.address(), (5, 5000), (6000, 7))
        transfer = local.agent.write_descriptors(local.peer, ours, theirs)
        transfer.wait(WAIT_S)
        expected[5:5005] = local.pool.bytes[10:5010]
        expected[6000:6007] = local.pool.bytes[9000:9007]
        assert np.array_equal(local.remote_content(), expected)

    @pytest.mark.parametrize("direction", ["read", "write"])
    def test_blocks_move_by_plan(self, local: _Local, direction: str) -> None:
        local.remote.fill(3)
        local.pool.fill(4)
        before_here, before_there = local.pool.array.copy(), local.remote_pool().array
        here, there = [5, 0, 63, 17, 18], [40, 41, 2, 9, 8]
        move = local.agent.read if direction == "read" else local.agent.write
        move(local.peer, local.plan(), here, there).wait(WAIT_S)
        if direction == "read":
            before_here[:, here] = before_there[:, there]
        else:
            before_there[:, there] = before_here[:, here]
        assert np.array_equal(local.pool.array, before_here)
        assert np.array_equal(local.remote_pool().array, before_there)

    def test_layouts_may_differ(self, make_agent: Callable[[str], Agent], remote: Remote) -> None:
        local = _Local(make_agent("other-layout"), remote, self.make_pool("BNKHD"))
        remote.fill(5)
        there = local.remote_pool()
        local.agent.read(local.peer, local.plan(), [1, 2], [7, 3], num_tokens=11).wait(WAIT_S)
        assert np.array_equal(local.pool.block(1), there.block(7))
        assert np.array_equal(local.pool.block(2)[:, :, :3], there.block(3)[:, :, :3])
        assert not local.pool.block(2)[:, :, 3:].any()
        assert not local.pool.block(0).any()

    def test_a_large_transfer_is_cut_and_arrives_whole(
        self, make_agent: Callable[[str], Agent], remote: Remote
    ) -> None:
        agent = make_agent("large")
        size = 40 << 20
        buffer = np.zeros(size, dtype=np.uint8)
        agent.register(buffer)
        theirs = remote.register_more(size, 12)
        peer = agent.connect(remote.hello())
        address = int(buffer.__array_interface__["data"][0])
        result = agent.read_descriptors(
            peer, rows(address, (0, size)), rows(theirs, (0, size))
        ).wait(WAIT_S)
        assert np.array_equal(buffer, random_bytes(size, 12))
        assert result.batches > 1
        assert result.bytes == size

    def test_nothing_to_move_is_done_and_nothing_to_register_is_refused(
        self, local: _Local
    ) -> None:
        with pytest.raises(ConfigError, match="no bytes"):
            local.agent.register(np.empty(0, np.uint8))
        nothing = rows(0)
        result = local.agent.read_descriptors(local.peer, nothing, nothing, notify=b"n").wait(
            WAIT_S
        )
        assert result.bytes == 0
        assert local.remote.notifications(WAIT_S) == [("local", b"n")]
        assert local.agent.read(local.peer, local.plan(), [], []).wait(WAIT_S).bytes == 0

    # ---- notifications

    def test_notifications_are_exact_and_come_once(self, local: _Local) -> None:
        sent = [b"req-1", b"req-10", b"", b"req-1", bytes(range(256)), b"\0", "é:\n".encode()]
        for message in sent:
            local.agent.notify(local.peer, message)
        seen: list[tuple[str, bytes]] = []
        deadline = time.monotonic() + WAIT_S
        while len(seen) < len(sent) and time.monotonic() < deadline:
            seen += local.remote.notifications(1.0)
        assert seen == [("local", message) for message in sent]
        assert local.remote.notifications(0.0) == []

    def test_both_sides_may_notify(self, local: _Local) -> None:
        local.remote.notify("local", b"hello")
        notes = local.agent.notifications(WAIT_S)
        assert [(n.peer, n.message) for n in notes] == [("remote", b"hello")]

    def test_data_is_there_before_its_notification(self, local: _Local) -> None:
        for seed in range(10, 30):
            local.pool.fill(seed)
            local.agent.write(
                local.peer, local.plan(), range(64), range(64), notify=str(seed).encode()
            )
            assert local.remote.notifications(WAIT_S) == [("local", str(seed).encode())]
            assert np.array_equal(local.remote_content(), local.pool.bytes)

    def test_whatever_happens_wakes_who_waits_for_activity(self, local: _Local) -> None:
        agent, remote = local.agent, local.remote
        count = agent.wait_activity(0, 0.0)
        assert agent.wait_activity(count, 0.01) == count
        transfer = agent.read(local.peer, local.plan(), [1], [2])
        deadline = time.monotonic() + WAIT_S
        while not transfer.is_quiet:
            count = agent.wait_activity(count, max(0.0, deadline - time.monotonic()))
            assert time.monotonic() < deadline
        remote.notify("local", b"wake up")
        # The transfer's last activity may be announced after it was seen to be quiet.
        while not (notes := agent.notifications()):
            count = agent.wait_activity(count, max(0.0, deadline - time.monotonic()))
            assert time.monotonic() < deadline
        assert [note.message for note in notes] == [b"wake up"]
        while (latest := agent.wait_activity(count, 0.05)) != count:
            count = latest
        caller = threading.Timer(0.05, agent.wake)
        caller.start()
        assert agent.wait_activity(count, WAIT_S) > count
        caller.join()

    def test_the_same_blocks_may_be_read_and_written_at_once(self, local: _Local) -> None:
        rounds = 100
        plan = local.plan()
        local.pool.fill(1)
        local.remote.fill(1)

        def move(move: Callable[..., Transfer]) -> None:
            for _ in range(rounds):
                move(local.peer, plan, [1, 2, 3], [1, 2, 3]).wait(WAIT_S)

        with ThreadPoolExecutor() as threads:
            agent = local.agent
            for moved in [threads.submit(move, f) for f in (agent.read, agent.write, agent.read)]:
                moved.result(WAIT_S)
        # Both sides had the same bytes, so whatever won has changed nothing.
        assert np.array_equal(local.remote_content(), local.pool.bytes)

    def test_a_notification_of_the_limit_arrives_whole_and_one_more_byte_is_refused(
        self, local: _Local
    ) -> None:
        largest = np.random.default_rng(0).bytes(MAX_NOTIFICATION_BYTES)
        local.agent.notify(local.peer, largest)
        assert local.remote.notifications(WAIT_S) == [("local", largest)]
        with pytest.raises(ConfigError, match=str(MAX_NOTIFICATION_BYTES)):
            local.agent.notify(local.peer, largest + b"x")
        with pytest.raises(ConfigError, match="must be bytes"):
            local.agent.notify(local.peer, "text")  # type: ignore[arg-type]

    # ---- refused before anything moves

    def test_lengths_that_differ(self, local: _Local) -> None:
        spans = [(i * 8192, 4096) for i in range(8)]
        ours = rows(local.pool.address, *spans)
        theirs = rows(local.remote.address(), *spans)
        theirs[3, 1] = 2048
        with pytest.raises(PlanError, match=r"row 3.*4096.*2048"):
            local.agent.read_descriptors(local.peer, ours, theirs)

    def test_bad_rows(self, local: _Local) -> None:
        here, there = local.pool.address, local.remote.address()
        good = rows(here, (0, 64)), rows(there, (0, 64))
        three = (0, 8), (8, 8), (16, 8)
        cases: list[tuple[type[Exception], str, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]] = [
            (PlanError, "2 local rows", rows(here, (0, 8), (8, 8)), good[1]),
            (PlanError, "length 0", rows(here, (0, 0)), rows(there, (0, 0))),
            (PlanError, "overlap", rows(here, (0, 8), (4, 8)), rows(there, (0, 8), (8, 8))),
            (PlanError, "overlap", rows(here, (9, 8), (0, 8), (9, 8)), rows(there, *three)),
            (PlanError, "uint64", good[0].astype(np.int64), good[1]),
            (PlanError, "shape", good[0][0], good[1]),
            (PlanError, "list", [(1, 2, 3)], good[1]),  # type: ignore[list-item]
            (NotRegisteredError, "row 0", rows(here - 1, (0, 64)), good[1]),
            (NotRegisteredError, "row 0", rows(here, (local.pool.bytes.size - 63, 64)), good[1]),
            (NotRegisteredError, "peer 'remote'", good[0], rows(there, (-8, 64))),
            (NotRegisteredError, "row 0", rows(here, (0, 1 << 62)), rows(there, (0, 1 << 62))),
            (NotRegisteredError, "device 7", np.array([(here, 64, 7)], np.uint64), good[1]),
        ]  # fmt: skip
        before = local.pool.bytes.copy()
        local.remote.fill(9)
        for error, text, ours, theirs in cases:
            with pytest.raises(error, match=text):
                local.agent.read_descriptors(local.peer, ours, theirs)
        assert np.array_equal(local.pool.bytes, before)
        assert local.registration._native.uses == 0

    def test_bad_blocks(self, local: _Local) -> None:
        plan = local.plan()
        cases: list[tuple[list[Any], list[int]]] = [
            ([64], [0]), ([0], [64]), ([-1], [0]), ([1, 1], [0, 2]), ([True], [0]), ([0.5], [0]),
            ([0, 1], [0]),
        ]  # fmt: skip
        for here, there in cases:
            with pytest.raises(PlanError):
                local.agent.read(local.peer, plan, here, there, num_tokens=8 * len(here))
        with pytest.raises(PlanError):  # the written side is the remote's now
            local.agent.write(local.peer, plan, [0, 1], [2, 2])

    def test_a_plan_for_another_peer_is_refused(self, local: _Local) -> None:
        plan = TransferPlan(local.pool.cache.geometry, local.pool.cache.geometry)
        with pytest.raises(PlanError, match="remote geometry"):
            local.agent.read(local.peer, plan, [0], [0])

    @pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
    def test_timeouts_must_be_positive(self, local: _Local, timeout: float) -> None:
        with pytest.raises(ConfigError, match="timeout"):
            local.agent.read(local.peer, local.plan(), [0], [0], timeout=timeout)

    # ---- memory

    def test_registering_twice_and_deregistering_twice(self, local: _Local) -> None:
        with pytest.raises(AlreadyRegisteredError):
            local.agent.register(local.pool.cache)
        with pytest.raises(AlreadyRegisteredError):
            local.agent.register(local.pool.cache.spans[0])
        local.registration.close()
        with pytest.raises(ClosedError):
            local.registration.close()
        with pytest.raises(NotRegisteredError):
            local.agent.read(local.peer, local.plan(), [0], [0])
        with local.agent.register(local.pool.cache):
            local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)

    def test_what_cannot_be_registered(self, local: _Local) -> None:
        with pytest.raises(ConfigError):
            local.agent.register()
        with pytest.raises(ConfigError):
            local.agent.register(np.zeros(0, np.uint8))
        with pytest.raises(LayoutError):
            local.agent.register(np.zeros((8, 8))[:, ::2])
        with pytest.raises(LayoutError):
            local.agent.register("text")

    def test_registered_memory_outlives_its_last_name(self, local: _Local) -> None:
        array = np.full(4096, 7, dtype=np.uint8)
        address = int(array.__array_interface__["data"][0])
        references = sys.getrefcount(array)
        registration = local.agent.register(array)
        assert sys.getrefcount(array) > references
        del array
        gc.collect()
        local.agent.write_descriptors(
            local.peer, rows(address, (0, 4096)), rows(local.remote.address(), (0, 4096))
        ).wait(WAIT_S)
        assert (local.remote_content()[:4096] == 7).all()
        registration.close()

    def test_memory_that_the_peer_registers_later(self, local: _Local) -> None:
        more = local.remote.register_more(4096, 13)
        ours, theirs = rows(local.pool.address, (0, 4096)), rows(more, (0, 4096))
        local.pool.fill(6)
        with pytest.raises(NotRegisteredError, match=f"{more:x}"):
            local.agent.read_descriptors(local.peer, ours, theirs)
        assert local.connect().generation == local.peer.generation
        local.agent.read_descriptors(local.peer, ours, theirs).wait(WAIT_S)
        assert np.array_equal(local.pool.bytes[:4096], random_bytes(4096, 13))

    def test_hello_of_unregistered_memory(self, local: _Local) -> None:
        with pytest.raises(NotRegisteredError):
            local.agent.hello(self.make_pool("KBHND").cache)

    # ---- hello

    def test_mutated_hellos_are_refused(self, local: _Local) -> None:
        hello = local.remote.hello()
        rng = np.random.default_rng(0)
        for _ in range(500):
            bad = bytearray(hello)
            kind = int(rng.integers(4))
            at = int(rng.integers(len(bad)))
            if kind == 0:
                bad[at] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                del bad[at:]
            elif kind == 2:
                bad += rng.bytes(int(rng.integers(1, 64)))
            else:
                bad[at:at] = rng.bytes(8)
            with pytest.raises(HandshakeError):
                local.agent.connect(bytes(bad))
        assert local.agent.connect(hello).generation == 1

    def test_secrets_must_agree(self, make_agent: Callable[..., Agent], remote: Remote) -> None:
        keyed = make_agent("keyed", secret=b"0123456789abcdef")
        other = make_agent("other", secret="another secret!!")
        same = make_agent("same", secret=b"0123456789abcdef")
        with pytest.raises(WireError, match="not authenticated"):
            keyed.connect(remote.hello())
        with pytest.raises(WireError, match="another secret"):
            other.connect(keyed.hello())
        with pytest.raises(WireError, match="secret too"):
            remote.connect(keyed.hello())
        assert same.connect(keyed.hello()).name == "keyed"

    def test_an_agent_does_not_connect_to_itself(self, local: _Local) -> None:
        with pytest.raises(DuplicatePeerError):
            local.agent.connect(local.agent.hello())

    def test_killed_before_the_first_transfer(self, local: _Local) -> None:
        local.remote.kill()
        before = local.pool.bytes.copy()
        with pytest.raises(PeerLostError):
            # The death may be known when the read is submitted, or be found by it.
            local.agent.read(local.peer, local.plan(), range(64), range(64)).wait(WAIT_S)
        assert np.array_equal(local.pool.bytes, before)
        assert not local.agent.is_alive(local.peer)

    def test_killed_after_a_good_transfer(self, local: _Local) -> None:
        local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)
        assert local.agent.is_alive(local.peer)
        local.remote.kill()
        with pytest.raises(PeerLostError):
            local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)

    def test_a_live_double_is_refused(
        self, local: _Local, make_agent: Callable[[str], Agent]
    ) -> None:
        class Double(type(local.agent)):  # type: ignore[misc]
            """Says that it is the remote."""

            name = "remote"

        double = make_agent("double")
        double.__class__ = Double
        with pytest.raises(DuplicatePeerError, match="remote"):
            local.agent.connect(double.hello())
        local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)

    def test_a_disconnected_generation_is_stale(self, local: _Local) -> None:
        old = local.peer
        local.agent.disconnect(old)
        with pytest.raises(StalePeerError):
            local.agent.read(old, local.plan(), [0], [0])
        local.peer = local.connect()
        assert local.peer.generation == 2
        local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)
        with pytest.raises(StalePeerError):
            local.agent.read(old, TransferPlan(local.pool.cache.geometry, old.geometry), [0], [0])

    # ---- life

    def test_a_closed_agent_refuses_everything(self, local: _Local) -> None:
        plan = local.plan()
        assert local.agent.close()
        for use in (
            lambda: local.agent.read(local.peer, plan, [0], [0]),
            lambda: local.agent.notify(local.peer, b""),
            lambda: local.agent.hello(),
            lambda: local.agent.register(np.zeros(8)),
            lambda: local.registration.close(),
        ):
            with pytest.raises((ClosedError, StalePeerError)):
                use()
        assert "closed" in repr(local.agent)

    def test_a_half_built_agent_goes_quietly(self, make_agent: Callable[[str], Agent]) -> None:
        kind = type(make_agent("model"))
        agent = kind.__new__(kind)
        del agent  # pytest fails on an exception or a warning of the finalizer

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_use_after_fork_raises(self, local: _Local) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                plan = local.plan()
                for use in (
                    lambda: local.agent.read(local.peer, plan, [0], [0]),
                    lambda: local.agent.notifications(),
                    lambda: local.agent.hello(),
                ):
                    with pytest.raises(ForkError):
                        use()
                status = 0 if local.agent.close() else 3
            finally:
                os._exit(status)
        deadline = time.monotonic() + WAIT_S
        done, status = os.waitpid(pid, os.WNOHANG)
        while done == 0 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
            done, status = os.waitpid(pid, os.WNOHANG)
        if done == 0:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        assert done == pid
        assert os.waitstatus_to_exitcode(status) == 0
        local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)

    # ---- concurrency

    def test_await_and_gather(self, local: _Local) -> None:
        local.remote.fill(2)

        async def pull() -> list[int]:
            transfers = [
                local.agent.read(local.peer, local.plan(), [i], [63 - i]) for i in range(32)
            ]
            results = await asyncio.gather(*transfers)
            return [r.bytes for r in results]

        block_bytes = local.pool.bytes.size // Pool.NUM_BLOCKS
        # Nothing is left behind that a second event loop would stumble over.
        for _ in range(2):
            local.pool.fill(1)
            assert asyncio.run(pull()) == [block_bytes] * 32
            there = local.remote_pool()
            for i in range(32):
                assert np.array_equal(local.pool.block(i), there.block(63 - i))

    def test_threads_pull_while_notifications_are_drained(self, local: _Local) -> None:
        local.remote.fill(3)
        each, threads = 100, 4
        plan = local.plan()

        def pull(number: int) -> None:
            mine = range(number * 16, number * 16 + 16)
            for _ in range(each):
                local.agent.read(local.peer, plan, mine, mine, notify=b"n").wait(WAIT_S)

        with ThreadPoolExecutor() as pool:
            pulls = [pool.submit(pull, number) for number in range(threads)]
            seen = 0
            deadline = time.monotonic() + WAIT_S
            while seen < each * threads and time.monotonic() < deadline:
                seen += len(local.remote.notifications(0.2))
            for pulled in pulls:
                pulled.result()
        assert seen == each * threads
        assert np.array_equal(local.pool.bytes, local.remote_content())


class HungPeerConformance(AgentConformance):
    """The same, and what happens when a transfer hangs because the peer's process does.

    Not for transports that need nothing of the peer's processor: their transfers do not hang.
    """

    def stuck(self, local: _Local, timeout: float) -> Transfer:
        """Pause the remote and return a read from it that has not ended."""
        # One that waits for its connection would be quiet when it ends.
        local.agent.read(local.peer, local.plan(), [0], [0]).wait(WAIT_S)
        local.remote.pause()
        return local.agent.read(local.peer, local.plan(), range(64), range(64), timeout=timeout)

    def test_a_hung_peer_ends_the_transfer_by_its_deadline(self, local: _Local) -> None:
        local.remote.fill(1)
        transfer = self.stuck(local, timeout=0.3)
        with pytest.raises(TransferTimeout) as caught:
            transfer.wait(WAIT_S)
        assert transfer.state is TransferState.TIMED_OUT
        assert caught.value.peer == "remote"
        assert caught.value.transfer_id == transfer.id
        assert not transfer.is_quiet
        assert local.agent.quarantined == 1
        with pytest.raises(RegistrationInUseError):
            local.registration.close()
        assert not transfer.close(timeout=0.05)
        local.remote.resume()
        assert transfer.wait_quiet(WAIT_S)
        assert transfer.state is TransferState.TIMED_OUT
        with pytest.raises(TransferTimeout):
            transfer.done()
        local.registration.close()

    def test_closing_with_a_hung_peer_takes_neither_side_down(self, local: _Local) -> None:
        transfer = self.stuck(local, timeout=0.2)
        with pytest.raises(TransferTimeout):
            transfer.wait(WAIT_S)
        assert not local.agent.close(timeout=0.2)
        with pytest.raises(ClosedError):
            local.agent.notify(local.peer, b"x")
        local.remote.resume()
        assert local.agent.close(timeout=WAIT_S)
        assert local.agent.close()
        local.remote.fill(8)  # it still answers
        assert local.remote_content().any()

    def test_cancelled_by_its_owner(self, local: _Local) -> None:
        transfer = self.stuck(local, timeout=30.0)
        with pytest.raises(TransferTimeout, match="goes on"):
            transfer.wait(0.01)
        with pytest.raises(StateError):
            _ = transfer.result
        assert not transfer.done()
        transfer.cancel()
        with pytest.raises(TransferCancelled):
            transfer.wait(WAIT_S)
        local.remote.resume()
        assert transfer.wait_quiet(WAIT_S)
        assert transfer.state is TransferState.CANCELLED

    def test_a_killed_peer_ends_what_runs_and_comes_back_as_a_new_generation(
        self, local: _Local
    ) -> None:
        transfer = self.stuck(local, timeout=30.0)
        local.remote.kill()
        with pytest.raises(PeerLostError):
            transfer.wait(WAIT_S)
        assert transfer.wait_quiet(WAIT_S)
        assert not local.peer.is_connected
        with pytest.raises(PeerLostError) as caught:
            local.agent.read(local.peer, local.plan(), [0], [0])
        assert caught.value.peer == local.peer.name
        local.remote.start()
        local.remote.fill(5)
        old = local.peer
        local.peer = local.connect()
        assert local.peer.generation == old.generation + 1
        local.agent.read(local.peer, local.plan(), [3], [4]).wait(WAIT_S)
        assert np.array_equal(local.pool.block(3), local.remote_pool().block(4))

    def test_awaiting_a_failure_raises_it(self, local: _Local) -> None:
        transfer = self.stuck(local, timeout=0.2)

        async def pull() -> None:
            await transfer

        with pytest.raises(TransferTimeout):
            asyncio.run(pull())
        local.remote.resume()
        assert transfer.wait_quiet(WAIT_S)
