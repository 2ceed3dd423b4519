"""What a worker tells a tracer of hand-offs."""

import pytest
from toy_pair import errors, failed, pair, received, sent, start

from pynixlkv.connector.metadata import KVTransferParams

PARENT = f"00-{'5a' * 16}-{'c3' * 8}-01"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_spans_have_the_phases_of_both_sides_and_one_parent(mode):
    with pair(mode) as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13, traceparent=PARENT)
        assert params["traceparent"] == PARENT
        decode.arrive("d1", 7, 13, params)
        world.round()
        world.pass_time(2)
        decode.schedule("d1")
        world.until(received(world))
        world.pass_time(1)
        world.until(sent(world))
        (span,), (lease,) = decode.spans, prefill.spans
    assert (span.side, span.end, span.error) == ("consumer", "received", None)
    assert (lease.side, lease.request_id, lease.end) == ("producer", "p1", "released")
    assert span.traceparent == lease.traceparent == PARENT
    assert [name for name, _, _ in span.phases] == ["queued", "handshake", "read", "verified"]
    assert [begin for _, begin, _ in span.phases] == [
        span.seconds,
        *(end for _, _, end in span.phases[:-1]),
    ]
    queued, *_, verified = span.phases
    assert queued[1] - queued[2] == 2
    assert verified[2] == 0
    assert (span.attributes["engine"], span.attributes["tokens"]) == ("P", 13)
    assert (span.attributes["bytes"] > 0) == (mode == "pull")
    assert [name for name, _, _ in lease.phases] == ["released"]
    assert 2 <= lease.seconds <= 3


def test_a_request_that_fails_has_a_span_with_its_error():
    with pair() as (world, prefill, decode):
        params = prefill.prefill("p1", 7, 13)
        start(world, decode, {**params, "remote_engine_id": "gone"})
        world.until(failed(world))
        (span,) = decode.spans
        assert (span.end, span.traceparent) == ("failed", None)
        assert [span.error] == errors(world)
        assert [name for name, _, _ in span.phases] == ["handshake"]


@pytest.mark.parametrize(
    "bad", ["", "00-1-2-01", PARENT.upper(), f"{PARENT}\n", f"{PARENT}-00", 7, [PARENT]]
)
def test_a_parent_of_another_form_is_ignored(bad):
    assert KVTransferParams.from_dict({"traceparent": bad}) == KVTransferParams()
    assert KVTransferParams.from_dict({"traceparent": PARENT}).traceparent == PARENT
