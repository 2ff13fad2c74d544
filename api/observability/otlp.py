"""Spans of requests in OpenTelemetry's format, sent over OTLP/gRPC and configured by
OpenTelemetry's own variables; and the description of the process, which its metrics have too.

Spans are made when the request has ended, from times that are measured anyway; a request that is
not sampled costs almost nothing. Attributes follow the semantic conventions for generative AI where
these define one.
"""

from __future__ import annotations

import uuid
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as EncodedResource
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from api.observability.spans import STAGES, Record

NS_PER_MS = 1_000_000
MODEL_CHARS_MAX = 128  # of an unknown model name sent by a client
REFUSAL_CHARS_MAX = 200  # of a collector's reason, for the log


# Attributes in seconds. The conventions define the first; others have the names of their metrics.
PACE = {
    "gen_ai.response.time_to_first_chunk": "ttft_ms",
    "gen_ai.server.time_to_first_token": "ttft_ms",
    "weir.inter_token.p50": "itl_p50_ms",
    "weir.inter_token.p99": "itl_p99_ms",
    "weir.inter_token.max": "itl_max_ms",
    "weir.client_stall": "client_stall_ms",
}


class Finished(SpanProcessor):
    """Span processor that collects ended, sampled spans until they are sent."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        taken, self._spans = self._spans, []
        return taken


def resource_of(process_id: uuid.UUID) -> Resource:
    """Describe this process, with the attributes of OpenTelemetry's variables."""
    ours = {
        "service.name": "weir",
        "service.version": version("weir-server"),
        "service.instance.id": str(process_id),
    }
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def encoded_resource(process_id: uuid.UUID) -> EncodedResource:
    found = resource_of(process_id).attributes
    return EncodedResource(
        attributes=[
            KeyValue(key=name, value=AnyValue(string_value=str(value)))
            for name, value in found.items()
        ]
    )


def encoded_scope() -> InstrumentationScope:
    return InstrumentationScope(name="weir", version=version("weir-server"))


class Answers:
    """Mixin for OpenTelemetry's exporters, which do not read the collector's answers.

    A collector may accept a message and refuse parts of it, which must not be sent again.
    """

    refused = ""  # reason for refusing parts of the last message; empty if it was accepted
    _client: Any

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[misc]
        export = self._client.Export

        def checked(request: Any, **options: Any) -> Any:
            answer = export(request=request, **options)
            self.refused = refusal_of(answer.partial_success)
            return answer

        self._client = SimpleNamespace(Export=checked)


def refusal_of(answer: Any) -> str:
    """Describe what a collector has refused of a message; empty if nothing."""
    count = next((value for _, value in answer.ListFields() if isinstance(value, int)), 0)
    return f"{count} refused: {answer.error_message[:REFUSAL_CHARS_MAX]}" if count else ""


class SpanSender(Answers, OTLPSpanExporter):
    """OpenTelemetry's exporter of spans, with the collector's answers."""


class OtlpSender:
    """Implements `Sender`."""

    def __init__(self, process_id: uuid.UUID, exporter: SpanExporter | None = None) -> None:
        """`process_id` becomes `service.instance.id`; `exporter` overrides the environment."""
        self._finished = Finished()
        resource = resource_of(process_id)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self._finished)
        self._tracer = self._provider.get_tracer("weir", version("weir-server"))
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = exporter or SpanSender()

    def send(self, records: list[Record]) -> bool:
        for record in records:
            self._make(record)
        spans = self._finished.take()
        if not spans:
            return True
        taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        return taken and not getattr(self._exporter, "refused", "")

    def close(self) -> None:
        self._exporter.shutdown()

    def _make(self, record: Record) -> None:
        """Create the spans of a request if the client or `OTEL_TRACES_SAMPLER` samples it."""
        carrier = {"traceparent": record.trace.traceparent, "tracestate": record.trace.tracestate}
        parent = self._propagator.extract({key: value for key, value in carrier.items() if value})
        at = record.ended_at_ns - int(record.timings["total_ms"] * NS_PER_MS)
        name = f"{record.operation} {record.model[:MODEL_CHARS_MAX]}"
        root = self._tracer.start_span(
            name, parent, SpanKind.SERVER, attributes(record), start_time=at
        )
        if root.is_recording():
            within = set_span_in_context(root)
            for stage in STAGES:
                length_ns = int(record.timings[f"{stage}_ms"] * NS_PER_MS)
                if stage == "client_stall":  # may have begun while the engine went on
                    settle_ns = int(record.timings["settle_ms"] * NS_PER_MS)
                    at = record.ended_at_ns - settle_ns - length_ns
                if length_ns:
                    self._tracer.start_span(stage, within, start_time=at).end(at + length_ns)
                at += length_ns
            if record.reason:
                root.set_status(Status(StatusCode.ERROR, record.reason))
        root.end(record.ended_at_ns)


def attributes(record: Record) -> dict[str, AttributeValue]:
    model = record.model[:MODEL_CHARS_MAX]
    result: dict[str, AttributeValue] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "weir",
        "gen_ai.request.model": record.requested_model[:MODEL_CHARS_MAX] or model,
        "gen_ai.response.id": str(record.request_id),
        "weir.tier": record.tier,
        "weir.organization_id": str(record.organization_id),
        "weir.project_id": str(record.project_id),
    }
    if record.end_user:
        result["enduser.id"] = record.end_user
    for key, value in record.labels.items():
        result[f"weir.label.{key}"] = value
    if record.reason:
        result["error.type"] = record.reason
    else:
        result |= {
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": (record.outcome,),
        }
    for attribute, name in PACE.items():
        if name in record.timings:
            result[attribute] = record.timings[name] / 1000
    if "tokens_per_second" in record.timings:
        per_second = record.timings["tokens_per_second"]
        result["weir.tokens_per_second"] = per_second
        result["gen_ai.server.time_per_output_token"] = 1 / per_second
    if record.migration_count:
        result["weir.migration_count"] = record.migration_count
    if (settled := record.settled) is not None:
        result |= {
            "gen_ai.usage.input_tokens": settled.input_token_count + settled.embedding_token_count,
            "gen_ai.usage.cache_read.input_tokens": settled.cached_input_token_count,
            "gen_ai.usage.output_tokens": settled.delivered_token_count,
            "weir.cost_picos": settled.cost_picos,
            "weir.currency_code": settled.currency_code,
        }
    return result
