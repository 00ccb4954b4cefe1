"""Spans of requests (`spans.py`) by way of OpenTelemetry: made by a tracer, and sent from a trace to a collector.

vLLM brings OpenTelemetry's packages. Nothing here is imported before a span is to be made.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from connector.clock import NS_PER_SECOND
from connector.observe.clocks import Clock
from connector.observe.history import History, Story
from connector.observe.spans import REQUEST_SPAN, Attribute, PullTimes, exported_ns, times_of

TRACER = "nixl_actor_connector"
LEASE_SPAN = f"{REQUEST_SPAN}.lease"
"""On P: from when the prompt is computed to when its blocks may be freed."""

SPANS_PER_MESSAGE = 512


class ExportError(Exception):
    """The collector has not taken the spans; OpenTelemetry has logged why."""


def record_spans(
    tracer: Tracer,
    times: PullTimes,
    context: Context | None = None,
    more: Mapping[str, Attribute] | None = None,
) -> Span:
    """Make the span of a request below that of `context`, and one below it for each part of its time.

    `more`: further attributes. Returns the request's span, which has ended.
    """
    attributes = times.attributes() | dict(more or {})
    span = tracer.start_span(
        REQUEST_SPAN,
        context=context,
        kind=SpanKind.INTERNAL,
        attributes=attributes,
        start_time=exported_ns(times.start_ns),
    )
    below = set_span_in_context(span)
    for part in times.parts:
        start_ns, end_ns = exported_ns(part.start_ns), exported_ns(part.end_ns)
        tracer.start_span(f"{REQUEST_SPAN}.{part.name}", context=below, start_time=start_ns).end(end_ns)
    if times.reason is not None:
        span.set_status(Status(StatusCode.ERROR, times.detail))
    span.end(exported_ns(times.end_ns))
    return span


def exporter_to(endpoint: str) -> SpanExporter:
    """The exporter that vLLM would choose: by gRPC, unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says http/protobuf."""
    if os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, "grpc") == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))


def export_otlp(stories: Iterable[Story], clock_of: Mapping[int, Clock], endpoint: str) -> int:
    """Send the spans of all requests that are over, and of their leases; returns how many spans those are.

    Ids are made from what the requests are called and when they began: sent again, they are the same spans. Raises
    ExportError.
    """
    exporter = exporter_to(endpoint)
    sent = 0
    try:
        made = _Made()
        spans = (span for story in stories for span in made.spans_of(story, clock_of))
        while batch := list(islice(spans, SPANS_PER_MESSAGE)):
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise ExportError(f"{endpoint} has not taken the spans ({sent} before were sent)")
            sent += len(batch)
    finally:
        exporter.shutdown()
    return sent


# --- inside -----------------------------------------------------------------------------------------------------------


class _Made:
    """Spans as the SDK makes them, by a tracer for each engine."""

    def __init__(self) -> None:
        self._finished = InMemorySpanExporter()
        self._ids = _Ids()
        self._tracers: dict[str, Tracer] = {}

    def spans_of(self, story: Story, clock_of: Mapping[int, Clock]) -> Iterator[ReadableSpan]:
        if not story.requests:
            return
        deciding = story.deciding
        times = times_of(deciding, clock_of[id(deciding)].zero_ns)
        if times is None:
            return
        engine_id = deciding.engine_id
        self._ids.begin(f"{engine_id}/{times.request_id}/{times.start_ns}")
        span = record_spans(self._tracer(engine_id), times, Context())
        below = set_span_in_context(span)
        for each in story.leases:
            self._make_lease(each, clock_of[id(each)], below)
        yield from self._finished.get_finished_spans()
        self._finished.clear()

    def _make_lease(self, history: History, clock: Clock, context: Context) -> None:
        first, last = history.records[0], history.records[-1]
        attributes: dict[str, Attribute] = {
            "gen_ai.request.id": history.subject,
            "kv_transfer.outcome": history.outcome,
            "kv_transfer.blocks": history.blocks,
            "kv_transfer.rank": history.rank,
        }
        queued_ns = round((history.queued_seconds or 0.0) * NS_PER_SECOND)
        start_ns = exported_ns(clock.at(first.mono_ns) - queued_ns)
        span = self._tracer(history.engine_id).start_span(
            LEASE_SPAN, context=context, attributes=attributes, start_time=start_ns
        )
        for visit in history.visits:
            span.add_event(visit.state, timestamp=exported_ns(clock.at(visit.entered_ns)))
        span.end(exported_ns(clock.at(last.mono_ns)))

    def _tracer(self, engine_id: str) -> Tracer:
        if engine_id not in self._tracers:
            resource = Resource.create({"service.name": "vllm", "service.instance.id": engine_id})
            provider = TracerProvider(
                sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
            )
            provider.add_span_processor(SimpleSpanProcessor(self._finished))
            self._tracers[engine_id] = provider.get_tracer(TRACER)
        return self._tracers[engine_id]


class _Ids(IdGenerator):
    """Made from a text, in order."""

    def __init__(self) -> None:
        self._text = ""
        self._count = 0

    def begin(self, text: str) -> None:
        self._text, self._count = text, 0

    def generate_trace_id(self) -> int:
        return self._digest(16, "trace")

    def generate_span_id(self) -> int:
        self._count += 1
        return self._digest(8, str(self._count))

    def _digest(self, length: int, what: str) -> int:
        text = f"{self._text}/{what}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=length).digest(), "big") or 1
