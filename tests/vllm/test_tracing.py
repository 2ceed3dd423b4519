"""Hand-offs in vLLM's tracing."""

from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pynixlkv.connector.spans import HandOffSpan
from pynixlkv.errors import LeaseExpired
from pynixlkv.vllm.tracing import make_tracer, parent_of

pytestmark = pytest.mark.ci

TRACE, SPAN = "5a" * 16, "c3" * 8
PARENT = f"00-{TRACE}-{SPAN}-01"


def config(endpoint):
    return SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))


@pytest.fixture
def exported(monkeypatch):
    """Spans that the provider, which vLLM sets up from its endpoint, exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def test_a_hand_off_is_a_span_of_its_request_with_one_inside_for_each_phase(exported):
    phases = (("queued", 3.0, 2.0), ("read", 2.0, 0.5), ("verified", 0.5, 0.0))
    more = {"attributes": {"engine": "P", "bytes": 77}}
    make_tracer(config("here"))(
        HandOffSpan("consumer", "d1", PARENT, "received", 3.0, phases, **more)
    )
    *inside, whole = exported.get_finished_spans()
    assert whole.name == "kv_hand_off"
    assert (whole.parent.trace_id, whole.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert whole.end_time - whole.start_time == 3_000_000_000
    assert whole.attributes["gen_ai.request.id"] == "d1"
    assert whole.attributes["pynixlkv.bytes"] == 77
    assert whole.status.is_unset
    assert [each.name for each in inside] == ["queued", "read", "verified"]
    assert {each.parent.span_id for each in inside} == {whole.context.span_id}
    assert [each.start_time for each in inside[1:]] == [each.end_time for each in inside[:-1]]
    assert (inside[0].start_time, inside[-1].end_time) == (whole.start_time, whole.end_time)


def test_a_failed_hand_off_has_its_error(exported):
    error = LeaseExpired("too late")
    make_tracer(config("here"))(HandOffSpan("consumer", "d1", None, "expired", 1.0, (), error))
    (whole,) = exported.get_finished_spans()
    assert whole.parent is None
    assert (whole.status.is_ok, whole.status.description) == (False, "too late")
    assert whole.events[0].attributes["exception.message"] == "too late"


def test_an_expired_lease_is_an_error_and_a_defect_of_the_exporter_none(exported, monkeypatch):
    done = HandOffSpan("producer", "p1", PARENT, "expired", 1.0, ())
    tracer = make_tracer(config("here"))
    tracer(done)
    (whole,) = exported.get_finished_spans()
    assert (whole.name, whole.status.description) == ("kv_lease", "expired")
    monkeypatch.setattr(trace, "set_span_in_context", None)
    tracer(done)
    assert len(exported.get_finished_spans()) == 1


def test_there_is_no_tracer_without_an_endpoint():
    assert make_tracer(config(None)) is None


@pytest.mark.parametrize(
    ("headers", "parent"),
    [
        ({"traceparent": PARENT, "tracestate": "a=b"}, PARENT),
        ({"traceparent": PARENT + "-00"}, None),
        ({"traceparent": "nonsense"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_parent_is_taken_from_valid_headers(headers, parent):
    assert parent_of(SimpleNamespace(trace_headers=headers)) == parent
