"""Spans of requests: bounded, sent in a thread, and never delaying a request."""

from __future__ import annotations

import threading
import uuid

import pytest
from structlog.testing import capture_logs

from api.metrics.operator_http import span_metrics
from api.observability.observer import Observer, record_of
from api.observability.spans import NO_TRACE, Record, Spans, TraceContext, trace_of_metadata
from api.serving import open_spans
from common.settings import SettingInvalid
from tests.api.endings import ending

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PATIENCE_S = 60.0


class SlowCollector:
    """Collector that takes a batch when released, and reports so."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.records: list[Record] = []
        self.busy, self.let = threading.Event(), threading.Event()
        self.is_closed = False

    def send(self, records: list[Record]) -> bool:
        """Implement `Sender.send`."""
        self.busy.set()
        assert self.let.wait(PATIENCE_S)
        self.records += records
        return self.takes

    def close(self) -> None:
        """Implement `Sender.close`."""
        self.is_closed = True


def reported(spans: Spans) -> dict[str, float]:
    """Return its metrics."""
    return {
        sample.name: sample.value
        for family in span_metrics(spans.counts())
        for sample in family.samples
    }


def test_while_the_collector_is_slow_traces_are_dropped_and_counted() -> None:
    collector = SlowCollector()
    spans = Spans(collector, records_max=10)
    spans.put(record_of(ending()))
    assert collector.busy.wait(PATIENCE_S), "the first is under way"

    for _ in range(15):
        spans.put(record_of(ending()))
    waiting = reported(spans)
    collector.let.set()
    spans.close(PATIENCE_S)

    assert waiting == {
        "weir_traces_sent_total": 0,
        "weir_traces_dropped_total": 5,
        "weir_traces_waiting": 10,
    }
    assert reported(spans) == {
        "weir_traces_sent_total": 11,
        "weir_traces_dropped_total": 5,
        "weir_traces_waiting": 0,
    }
    assert len(collector.records) == 11
    assert collector.is_closed


def test_spans_refused_by_the_collector_are_counted_as_dropped() -> None:
    collector = SlowCollector(takes=False)
    collector.let.set()
    spans = Spans(collector)

    spans.put(record_of(ending()))
    spans.close(PATIENCE_S)

    assert reported(spans) == {
        "weir_traces_sent_total": 0,
        "weir_traces_dropped_total": 1,
        "weir_traces_waiting": 0,
    }


def test_a_bug_in_sending_ends_no_thread() -> None:
    class Broken(SlowCollector):
        def send(self, records: list[Record]) -> bool:
            super().send(records)
            if len(self.records) == 1:
                raise RuntimeError("a bug")
            return True

    collector = Broken()
    spans = Spans(collector)
    with capture_logs() as logs:
        spans.put(record_of(ending()))
        assert collector.busy.wait(PATIENCE_S)
        spans.put(record_of(ending()))
        collector.let.set()
        spans.close(PATIENCE_S)

    assert reported(spans)["weir_traces_sent_total"] == 1, "the second"
    assert [entry["event"] for entry in logs] == ["spans_not_sent"]


def test_a_record_has_nothing_of_what_was_requested() -> None:
    record = record_of(ending(broken=ValueError("a secret of theirs")))

    assert "secret" not in repr(record)
    assert record.reason == "INTERNAL"


def test_every_ended_request_is_recorded_if_there_is_a_collector() -> None:
    collector = SlowCollector()
    collector.let.set()
    spans = Spans(collector)
    observer = Observer(["m"], spans)

    observer.ended(ending(trace=TraceContext(TRACEPARENT)))
    spans.close(PATIENCE_S)

    [record] = collector.records
    assert record.trace.traceparent == TRACEPARENT
    assert (record.operation, record.outcome) == ("text_completion", "stop")


@pytest.mark.parametrize(
    ("metadata", "context"),
    [
        ([("traceparent", TRACEPARENT), ("tracestate", "a=1")], TraceContext(TRACEPARENT, "a=1")),
        (
            [("traceparent", TRACEPARENT), ("tracestate", "a=1, b@c=2,,")],
            TraceContext(TRACEPARENT, "a=1, b@c=2,,"),
        ),
        ([("traceparent", TRACEPARENT), ("tracestate", "a=1," * 129)], TraceContext(TRACEPARENT)),
        (
            [("traceparent", TRACEPARENT), ("tracestate", "a=1,\nevent=forged")],
            TraceContext(TRACEPARENT),
        ),
        ([("traceparent", TRACEPARENT + "-and-more")], NO_TRACE),
        ([("traceparent", TRACEPARENT.upper())], NO_TRACE),
        ([("tracestate", "a=1")], NO_TRACE),
        ([("authorization", "Bearer x")], NO_TRACE),
        ([], NO_TRACE),
    ],
)
def test_a_trace_context_is_bounded(metadata: list[tuple[str, str]], context: TraceContext) -> None:
    assert trace_of_metadata(metadata) == context


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_sent_unless_a_collector_is_named(environment: dict[str, str]) -> None:
    assert open_spans(uuid.uuid4(), environment) is None


def test_a_protocol_that_is_not_spoken_is_refused_by_name() -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }

    with pytest.raises(
        SettingInvalid, match="OTEL_EXPORTER_OTLP_PROTOCOL='http/protobuf': must be grpc"
    ):
        open_spans(uuid.uuid4(), environment)
