"""Collector of spans and metrics for tests: OTLP over gRPC."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Received span. resource: of the process that sent it."""

    span: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes by name."""
        return values_of(self.span.attributes)


@dataclass(frozen=True, slots=True)
class ReceivedPoint:
    """Received data point of a metric. resource: of the process that sent it."""

    metric: metrics_pb2.Metric
    point: Any
    resource: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes by name."""
        return values_of(self.point.attributes)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP servicer that keeps the received spans, also as bytes, and each export of metrics.

    `answer_metrics` may replace the answer to an export of metrics, or raise.
    """

    def __init__(self) -> None:
        self.address = ""
        self.data = b""
        self._spans: list[ReceivedSpan] = []
        self.answer_metrics: Callable[
            [grpc.ServicerContext], metrics_service_pb2.ExportMetricsServiceResponse
        ] = lambda _: metrics_service_pb2.ExportMetricsServiceResponse()
        self._exports: list[list[ReceivedPoint]] = []
        self._lock = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Implement OTLP's `Export`."""
        with self._lock:
            self.data += request.SerializeToString()
            for of_resource in request.resource_spans:
                resource = values_of(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self._spans += [ReceivedSpan(span, resource) for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def exports(self) -> list[list[ReceivedPoint]]:
        """Return the points of each export of metrics."""
        with self._lock:
            return list(self._exports)

    def export_metrics(
        self,
        request: metrics_service_pb2.ExportMetricsServiceRequest,
        context: grpc.ServicerContext,
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Keep the points of an export, and answer it."""
        answer = self.answer_metrics(context)
        points = [
            ReceivedPoint(metric, point, values_of(of_resource.resource.attributes))
            for of_resource in request.resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
            for point in getattr(metric, str(metric.WhichOneof("data"))).data_points
        ]
        with self._lock:
            self.data += request.SerializeToString()
            self._exports.append(points)
        return answer

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Return the spans by request id; all spans of a request arrive in one export."""
        with self._lock:
            spans = list(self._spans)
        roots = {
            each.span.span_id: str(each.attributes["gen_ai.response.id"])
            for each in spans
            if "gen_ai.response.id" in each.attributes
        }
        traces: dict[str, list[ReceivedSpan]] = {request_id: [] for request_id in roots.values()}
        for each in spans:
            request_id = roots.get(each.span.span_id) or roots[each.span.parent_span_id]
            traces[request_id].append(each)
        return traces


def values_of(attributes: Any) -> dict[str, Any]:
    """Return attributes as plain values."""
    return {each.key: value_of(each.value) for each in attributes}


def value_of(value: Any) -> Any:
    """Return the value of an attribute as a plain value."""
    kind = value.WhichOneof("value")
    return (
        [value_of(each) for each in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )


class MetricsServicer(metrics_service_pb2_grpc.MetricsServiceServicer):
    """OTLP servicer for metrics, whose method has the same name as that for spans."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(
        self,
        request: metrics_service_pb2.ExportMetricsServiceRequest,
        context: grpc.ServicerContext,
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Implement OTLP's `Export`."""
        return self._receiver.export_metrics(request, context)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Yield a listening receiver."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
        MetricsServicer(receiver), server
    )
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=None).wait()
