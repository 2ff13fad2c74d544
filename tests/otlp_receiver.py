"""A collector of spans: OTLP over gRPC, as a real one takes it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ToldSpan:
    """One span as it came. resource: of the process that sent it."""

    span: trace_pb2.Span
    resource: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        """By name."""
        return values_of(self.span.attributes)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, as bytes too."""

    def __init__(self) -> None:
        self.address = ""
        self.data = b""
        self._told: list[ToldSpan] = []
        self._lock = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """See OTLP."""
        with self._lock:
            self.data += request.SerializeToString()
            for of_resource in request.resource_spans:
                resource = values_of(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self._told += [ToldSpan(span, resource) for span in of_scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self) -> dict[str, list[ToldSpan]]:
        """Spans by the id of their request; those of a request come together."""
        with self._lock:
            told = list(self._told)
        roots = {
            each.span.span_id: str(each.attributes["gen_ai.response.id"])
            for each in told
            if "gen_ai.response.id" in each.attributes
        }
        found: dict[str, list[ToldSpan]] = {request_id: [] for request_id in roots.values()}
        for each in told:
            request_id = roots.get(each.span.span_id) or roots[each.span.parent_span_id]
            found[request_id].append(each)
        return found


def values_of(attributes: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {each.key: value_of(each.value) for each in attributes}


def value_of(value: Any) -> Any:
    """One of them."""
    kind = value.WhichOneof("value")
    return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """One that listens."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(grace=None).wait()
