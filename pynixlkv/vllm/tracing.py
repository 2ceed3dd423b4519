"""Spans of hand-offs for OpenTelemetry, through the tracing that vLLM has set up."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pynixlkv.connector.metadata import TRACEPARENT

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from pynixlkv.connector.spans import HandOffSpan, Tracer

_log = logging.getLogger(__name__)
_SUCCESSES = ("received", "released", "unread")


def parent_of(request: Request) -> str | None:
    """Return the header with the trace that a request belongs to; None without a valid one."""
    header = (request.trace_headers or {}).get("traceparent", "")
    return header if TRACEPARENT.fullmatch(header) else None


def make_tracer(config: VllmConfig) -> Tracer | None:
    """Return what exports spans with vLLM's provider; None if its tracing is off."""
    if config.observability_config.otlp_traces_endpoint is None:
        return None
    from opentelemetry import trace
    from vllm.tracing import extract_trace_context

    tracer = trace.get_tracer("pynixlkv")

    def export(done: HandOffSpan) -> None:
        end = time.time_ns()
        context = None
        if done.traceparent is not None:
            context = extract_trace_context({"traceparent": done.traceparent})
        attributes = {f"pynixlkv.{name}": value for name, value in done.attributes.items()}
        span = tracer.start_span(
            "kv_hand_off" if done.side == "consumer" else "kv_lease",
            context,
            start_time=end - int(done.seconds * 1e9),
            attributes={
                "gen_ai.request.id": done.request_id,
                "pynixlkv.end": done.end,
                **attributes,
            },
        )
        if done.error is not None:
            span.record_exception(done.error)
        if done.end not in _SUCCESSES:
            span.set_status(trace.StatusCode.ERROR, str(done.error or done.end))
        inside = trace.set_span_in_context(span)
        for name, begin, until in done.phases:
            phase = tracer.start_span(name, inside, start_time=end - int(begin * 1e9))
            phase.end(end - int(until * 1e9))
        span.end(end)

    def trace_safely(done: HandOffSpan) -> None:
        try:
            export(done)
        except Exception:
            _log.exception("the spans of request %s are lost", done.request_id)

    return trace_safely
