"""Export of all metrics by OTLP/gRPC: a second reader of the numbers that Prometheus scrapes.

A task takes a snapshot at each interval; a thread of its own encodes and sends it. While the
collector is slow or unavailable, the next snapshot waits, and no request does. Names and labels are
those of Prometheus; the metrics of the semantic conventions for generative AI have the names, units
and attributes defined there. Translated for Prometheus by OpenTelemetry's rules, both give the
names of a scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import structlog
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
from opentelemetry.sdk.metrics.export import MetricExportResult
from prometheus_client.core import Metric

from api.metrics.operator_http import OTLP, TOTALS, MetricsSource
from api.observability.otlp import Answers, encoded_resource, encoded_scope
from common.settings import SettingInvalid

INTERVAL, INTERVAL_MS, INTERVAL_MS_MIN = "OTEL_METRIC_EXPORT_INTERVAL", "60000", 1000
TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
EXPLICIT_BUCKETS = "explicit_bucket_histogram"
POINTS_MAX = 2000  # of a message: some 2 MB at most, and collectors take 4 MB
CLOSE_MAX_S = 5.0  # for the last export
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
# Kinds of metrics that are exported as increments since the last accepted export.
INCREMENTS: Mapping[str, frozenset[str]] = {
    "cumulative": frozenset(),
    "delta": frozenset({COUNTER, HISTOGRAM}),
    "lowmemory": frozenset({HISTOGRAM}),
}
# Counters of other processes, which began at an unknown time and may begin again.
FOREIGN = frozenset({*(name for name, _ in TOTALS), "weir_worker_incidents"})
# Names and units of the semantic conventions, by the names in Prometheus.
CONVENTIONAL: Mapping[str, tuple[str, str]] = {
    "gen_ai_client_token_usage": ("gen_ai.client.token.usage", "{token}"),
    "gen_ai_server_request_duration_seconds": ("gen_ai.server.request.duration", "s"),
    "gen_ai_server_time_per_output_token_seconds": ("gen_ai.server.time_per_output_token", "s"),
    "gen_ai_server_time_to_first_token_seconds": ("gen_ai.server.time_to_first_token", "s"),
}
UNITS: Mapping[str, str] = {"seconds": "s", "bytes": "By"}  # by the last word of a name
Labels = tuple[tuple[str, str], ...]
Values = tuple[float, ...]  # of a histogram: its sum, then the count of each bucket
ACCEPTED, PARTLY_REFUSED, FAILED = "accepted", "partly_refused", "failed"

log = structlog.get_logger(__name__)


class ExportSettings(NamedTuple):
    """Settings of the export, from OpenTelemetry's variables."""

    interval_s: float
    temporality: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ExportSettings:
        """Read the settings. Raises: SettingInvalid."""
        interval = environment.get(INTERVAL) or INTERVAL_MS
        if not interval.isdecimal() or int(interval) < INTERVAL_MS_MIN:
            raise SettingInvalid(
                f"{INTERVAL}={interval!r}: must be a whole number of milliseconds, at least"
                f" {INTERVAL_MS_MIN}"
            )
        temporality = environment.get(TEMPORALITY) or "cumulative"
        if temporality.lower() not in INCREMENTS:
            raise SettingInvalid(
                f"{TEMPORALITY}={temporality!r}: must be one of {', '.join(INCREMENTS)}"
            )
        aggregation = environment.get(AGGREGATION) or EXPLICIT_BUCKETS
        if aggregation != EXPLICIT_BUCKETS:
            raise SettingInvalid(
                f"{AGGREGATION}={aggregation!r}: must be {EXPLICIT_BUCKETS}, since Weir counts in"
                " fixed buckets"
            )
        return cls(int(interval) / 1000, temporality.lower())


class Point(NamedTuple):
    """Series of a metric with its current value. `bounds` are those of a histogram."""

    labels: Labels
    values: Values
    bounds: tuple[float, ...] = ()


class Message(NamedTuple):
    """Encoded metrics, and the values that they report, by metric and labels."""

    request: ExportMetricsServiceRequest
    values: dict[tuple[str, Labels], Values]


class Encoder:
    """Encoder of metrics, which knows what the collector has accepted."""

    def __init__(self, process_id: uuid.UUID, temporality: str, started_at_ns: int) -> None:
        """`process_id` becomes `service.instance.id`; counters began at `started_at_ns`."""
        self._resource, self._scope = encoded_resource(process_id), encoded_scope()
        self._increments = INCREMENTS[temporality]
        self._started_at_ns = started_at_ns
        # Of metrics that are exported as increments, with the time of their export.
        self._accepted: dict[tuple[str, Labels], tuple[Values, int]] = {}

    def messages(self, families: Iterable[Metric], now_ns: int) -> Iterator[Message]:
        """Encode metrics in messages of at most `POINTS_MAX` points."""
        message, count = self._empty(), 0
        for family in families:
            points = list(points_of(family))
            while points:
                taken, points = points[: POINTS_MAX - count], points[POINTS_MAX - count :]
                [of_resource] = message.request.resource_metrics
                metric = of_resource.scope_metrics[0].metrics.add()
                self._encode(metric, family, taken, now_ns, message.values)
                count += len(taken)
                if count == POINTS_MAX:
                    yield message
                    message, count = self._empty(), 0
        if count:
            yield message

    def accept(self, message: Message, now_ns: int) -> None:
        """Record that the collector has the values of a message."""
        self._accepted.update((of, (values, now_ns)) for of, values in message.values.items())

    def _empty(self) -> Message:
        of_scope = pb.ScopeMetrics(scope=self._scope)
        of_resource = pb.ResourceMetrics(resource=self._resource, scope_metrics=[of_scope])
        return Message(ExportMetricsServiceRequest(resource_metrics=[of_resource]), {})

    def _encode(
        self,
        metric: pb.Metric,
        family: Metric,
        points: list[Point],
        now_ns: int,
        reported: dict[tuple[str, Labels], Values],
    ) -> None:
        """Encode one metric; add the values to `reported` if increments are exported."""
        unit = UNITS.get(family.name.rpartition("_")[2], "")
        metric.name, metric.unit = CONVENTIONAL.get(family.name, (family.name, unit))
        metric.description = family.documentation
        is_increment = family.type in self._increments
        if family.type == GAUGE:
            numbers = metric.gauge.data_points
        else:
            numbers = metric.sum.data_points
            data = metric.sum if family.type == COUNTER else metric.histogram
            data.aggregation_temporality = temporality_of(is_increment)
            if family.type == COUNTER:
                metric.sum.is_monotonic = True
        for labels, values, bounds in points:
            is_foreign = family.name in FOREIGN
            start_ns = 0 if is_foreign or family.type == GAUGE else self._started_at_ns
            if is_increment:
                of = family.name, labels
                reported[of] = values
                # What another process counted before the first export is not an increment.
                before, start_ns = self._accepted.get(
                    of, (values if is_foreign else (0.0,) * len(values), start_ns or now_ns)
                )
                if all(now >= then for now, then in zip(values, before, strict=True)):
                    values = tuple(now - then for now, then in zip(values, before, strict=True))
            times = {"start_time_unix_nano": start_ns, "time_unix_nano": now_ns}
            attributes = attributes_of(family.name, labels)
            if family.type == HISTOGRAM:
                total, *buckets = values
                metric.histogram.data_points.add(
                    attributes=attributes,
                    sum=total,
                    count=round(sum(buckets)),
                    bucket_counts=map(round, buckets),
                    explicit_bounds=bounds,
                    **times,
                )
            else:
                numbers.add(attributes=attributes, as_double=values[0], **times)


def points_of(family: Metric) -> Iterator[Point]:
    """Yield the series of a metric; the buckets of a histogram are not cumulative any more."""
    buckets: dict[Labels, list[tuple[float, float]]] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        if family.type != HISTOGRAM:
            yield Point(labels, (sample.value,))
        elif sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            bounds, cumulated = zip(*buckets.pop(labels), strict=True)
            counts = (up - below for up, below in zip(cumulated, (0.0, *cumulated), strict=False))
            yield Point(labels, (sample.value, *counts), bounds[:-1])


def attributes_of(name: str, labels: Labels) -> list[KeyValue]:
    """Return labels as attributes; an empty label is none, as in Prometheus."""
    is_conventional = name in CONVENTIONAL
    return [
        KeyValue(
            key=label.replace("_", ".").replace("gen.ai", "gen_ai") if is_conventional else label,
            value=AnyValue(string_value=value),
        )
        for label, value in labels
        if value
    ]


def temporality_of(is_increment: bool) -> pb.AggregationTemporality.ValueType:
    return (
        pb.AGGREGATION_TEMPORALITY_DELTA if is_increment else pb.AGGREGATION_TEMPORALITY_CUMULATIVE
    )


class Exporter(Answers, OTLPMetricExporter):
    """OpenTelemetry's exporter, for metrics that are already encoded."""

    def _translate_data(  # type: ignore[override]
        self, data: ExportMetricsServiceRequest
    ) -> ExportMetricsServiceRequest:
        return data

    def _count_data(self, data: ExportMetricsServiceRequest) -> int:  # type: ignore[override]
        return 0

    def send(self, request: ExportMetricsServiceRequest) -> bool:
        """Send encoded metrics, and return whether the collector took them, at least in part."""
        return self._export(request) is MetricExportResult.SUCCESS  # type: ignore[arg-type]


class Sender(Protocol):
    """Connection to the collector. `send` blocks as long as the collector does."""

    refused: str  # reason of the collector for refusing parts of the last message; empty if none

    def send(self, request: ExportMetricsServiceRequest) -> bool: ...
    def shutdown(self) -> None: ...


class OtlpExport:
    """Export of all metrics at an interval."""

    def __init__(
        self, process_id: uuid.UUID, settings: ExportSettings, sender: Sender | None = None
    ) -> None:
        """`sender` overrides the environment."""
        self.exports = dict.fromkeys((ACCEPTED, PARTLY_REFUSED, FAILED), 0)  # messages, by outcome
        self._settings = settings
        self._encoder = Encoder(process_id, settings.temporality, time.time_ns())
        self._sender: Sender = sender or Exporter()
        self._thread = ThreadPoolExecutor(1, "weir-otlp")  # never the one of scrapes
        self._outcome = ACCEPTED  # of the last message

    async def run(self, source: MetricsSource) -> None:
        """Export regularly until cancelled."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            await self.export(source)

    async def export(self, source: MetricsSource) -> None:
        """Export all metrics now; wait for the collector."""
        snapshot = await source.read(OTLP)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, lambda: self._send(snapshot.families()))

    async def close(self, source: MetricsSource) -> None:
        """Export the last counts, within `CLOSE_MAX_S`, and close the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_MAX_S):
                await self.export(source)
        await asyncio.to_thread(self._sender.shutdown)
        self._thread.shutdown(wait=False)

    def _send(self, families: list[Metric]) -> None:
        """Send the metrics; after a failure, leave the rest to the next export."""
        now_ns = time.time_ns()
        try:
            for message in self._encoder.messages(families, now_ns):
                if not self._sender.send(message.request):
                    self._ended(FAILED)
                    return
                self._encoder.accept(message, now_ns)
                refused = self._sender.refused
                self._ended(PARTLY_REFUSED if refused else ACCEPTED, reason=refused)
        except Exception:  # a bug must not end the export for good
            log.exception("metrics_not_sent")
            self._ended(FAILED)

    def _ended(self, outcome: str, **facts: str) -> None:
        """Count a message; log when the outcome changes, since an outage can last for days."""
        self.exports[outcome] += 1
        if outcome != self._outcome:
            self._outcome = outcome
            event = log.info if outcome == ACCEPTED else log.warning
            event("metrics_export", outcome=outcome, **facts)
