"""How fast hellos are handed out: one connection, question and answer after the other, and many."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pynixlkv.handshake import Handshake, fetch

HELLO = bytes(range(256)) * 40  # about that of a rank with 80 layers
THREADS = 16
EACH = 20


@pytest.fixture(params=["plain", "curve"])
def ask(request):
    secret = b"sixteen or more random bytes" if request.param == "curve" else None
    hellos = {(0, tp): HELLO for tp in range(8)}
    with Handshake("bench", hellos, compatibility={"dtype": "bf16"}, secret=secret) as listener:

        def fetch_one(ranks=((0, 3),)):
            return fetch(
                listener.address,
                engine_id="bench",
                compatibility={"dtype": "bf16"},
                ranks=ranks,
                secret=secret,
                timeout=60.0,
            )

        yield fetch_one


@pytest.mark.benchmark(group="handshake")
def test_one_handshake(benchmark, ask):
    """One rank's hello, connection included."""
    assert benchmark(ask).hellos == {(0, 3): HELLO}
    benchmark.extra_info["hello_bytes"] = len(HELLO)


@pytest.mark.benchmark(group="handshake rate")
def test_handshakes_of_many_threads(benchmark, ask):
    """Threads that all ask one listener; `handshakes_per_s` in `extra_info` is the rate."""
    with ThreadPoolExecutor(THREADS) as pool:

        def burst():
            return list(pool.map(lambda _: ask(), range(THREADS * EACH)))

        engines = benchmark.pedantic(burst, rounds=5, warmup_rounds=1)
    assert all(engine.hellos == {(0, 3): HELLO} for engine in engines)
    benchmark.extra_info["threads"] = THREADS
    if benchmark.stats:
        benchmark.extra_info["handshakes_per_s"] = len(engines) / benchmark.stats.stats.median
