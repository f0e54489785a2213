"""Traces in OpenTelemetry's form: a span per request, and below it one for its wait and one for every stage that was run.

In: requests that got their reply, with the `traceparent` that came with them. Out: spans, to a TracerProvider. Needs
opentelemetry (extra `traces`) only where something is traced.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from nestling import __version__
from nestling.errors import NestlingError
from nestling.serve.request import ServedRequest

PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context


def trace_of(traceparent: str) -> str:
    """The trace's own number, "" where there is none."""
    found = PARENT.fullmatch(traceparent)
    return found[1] if found else ""


class Traces:
    """Spans of one server."""

    def __init__(self, provider: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """`provider`: opentelemetry's TracerProvider."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace, self.provider, self.clock = trace, provider, clock
        self.tracer = provider.get_tracer("nestling", __version__)
        self.extract = TraceContextTextMapPropagator().extract

    def request(self, model: str, request: ServedRequest, status: int) -> None:
        """A request got its reply: with a stage, with none, or never, because its client left."""
        zero = time.time_ns() - int(1e9 * self.clock())  # when the clock was 0

        def at(moment: float) -> int:
            return zero + int(1e9 * moment)

        now = self.clock()
        about = {
            "nestling.model": model,
            "nestling.images": len(request.tickets),
            "nestling.stage": min(request.told),
            "nestling.late": now > request.deadline,
            "http.response.status_code": status,
        }
        parent = self.extract({"traceparent": request.traceparent})
        kind = self.trace.SpanKind.SERVER
        span = self.tracer.start_span(
            f"infer {model}", parent, kind=kind, attributes=about, start_time=at(request.began)
        )
        inside = self.trace.set_span_in_context(span)
        for name, began, ended in parts(request):
            self.tracer.start_span(name, inside, start_time=at(began)).end(at(ended))
        if status >= 500:
            span.set_status(self.trace.StatusCode.ERROR)
        span.end(at(now))

    def close(self) -> None:
        """Send what has not been sent yet."""
        self.provider.shutdown()


def parts(request: ServedRequest) -> list[tuple[str, float, float]]:
    """Its wait for a first stage, and the stages that were run for it: name, beginning and end. Images that went through a stage
    together went through it once."""
    ran = sorted(
        {each for ticket in request.tickets for each in ticket.ran if each[1] >= request.began},
        key=lambda each: each[1],
    )
    waited = [("queue", request.began, ran[0][1])] if ran else []
    return waited + [(f"stage {stage}", began, ended) for stage, began, ended in ran]


def exported(url: str, clock: Callable[[], float] = time.monotonic) -> Traces:
    """Traces that are sent to a collector by OTLP over HTTP."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise NestlingError(f"traces need {error.name}; run: pip install 'nestling[serve,traces]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "nestling"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Traces(provider, clock)
