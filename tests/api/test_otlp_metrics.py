"""Export of metrics by OTLP: what a collector gets, whatever it answers."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from api.metrics import otlp
from api.metrics.operator_http import conventional_metrics, counters, gauges, histograms
from api.metrics.otlp import CONVENTIONAL, Encoder, ExportSettings, Message, points_of
from api.observability.collector import collector_of
from api.observability.observer import (
    CONVENTIONAL_FIRST_TOKEN_BOUNDS_MS,
    CONVENTIONAL_TOKEN_BOUNDS_MS,
    CONVENTIONAL_TOTAL_BOUNDS_MS,
    FINE_TOTAL_BOUNDS_MS,
    TOTAL_BOUNDS_MS,
    USAGE_BOUNDS,
    Histogram,
    Observer,
    RequestCounts,
    merged,
)
from common.settings import SettingInvalid
from metering.holds.operations import Settled
from tests.api.endings import TIMINGS, ending
from tests.otlp_receiver import values_of

START_NS, STEP_NS = 1_000, 10
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SETTLED = Settled(uuid.uuid4(), 1025, 200, 150, 150, 150, 10**8, "USD", "stop")
SECONDS = {
    "gen_ai.server.request.duration": CONVENTIONAL_TOTAL_BOUNDS_MS,
    "gen_ai.server.time_per_output_token": CONVENTIONAL_TOKEN_BOUNDS_MS,
    "gen_ai.server.time_to_first_token": CONVENTIONAL_FIRST_TOKEN_BOUNDS_MS,
}
COMMON = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "weir",
    "gen_ai.request.model": "m",
    "weir.tier": "interactive",
}


def encoder(temporality: str) -> Encoder:
    """Return an encoder of a process that has just started."""
    return Encoder(uuid.uuid4(), temporality, START_NS)


def metrics_in(message: Message) -> Iterator[pb.Metric]:
    """Yield the metrics of a message."""
    for of_resource in message.request.resource_metrics:
        for of_scope in of_resource.scope_metrics:
            yield from of_scope.metrics


def counted(value: float, name: str = "weir_admissions") -> Metric:
    """Return a counter with this value."""
    return CounterMetricFamily(name, "Requests.", value=value)


def of_times(values: list[float]) -> Metric:
    """Return a histogram of these values."""
    histogram = Histogram((1, 10, 100))
    for value in values:
        histogram.observe(value)
    return histograms("weir_request_seconds", ("model",), [(("m",), histogram)], unit=1.0)


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 1000), max_size=3), st.booleans()), max_size=20),
    st.sampled_from(["cumulative", "delta", "lowmemory"]),
)
def test_whatever_exports_fail_a_collector_counts_everything_once(
    steps: list[tuple[list[float], bool]], temporality: str
) -> None:
    """A message that was not accepted is sent again with the next one, whose time begins before."""
    encoding = encoder(temporality)
    values: list[float] = []
    now_ns = last_ns = START_NS
    count, buckets, total = 0.0, [0] * 4, 0.0
    for added, is_accepted in [*steps, ([5.0], True)]:
        values += added
        now_ns += STEP_NS
        [message] = encoding.messages([counted(len(values)), of_times(values)], now_ns)
        if not is_accepted:
            continue
        encoding.accept(message, now_ns)
        counter, histogram = metrics_in(message)
        [number], [times] = counter.sum.data_points, histogram.histogram.data_points
        for data, point in ((counter.sum, number), (histogram.histogram, times)):
            is_delta = data.aggregation_temporality == pb.AGGREGATION_TEMPORALITY_DELTA
            begins_ns = last_ns if is_delta else START_NS
            assert (point.start_time_unix_nano, point.time_unix_nano) == (begins_ns, now_ns)
            if data is counter.sum:
                assert is_delta == (temporality == "delta")
                count = number.as_double + (count if is_delta else 0.0)
            else:
                assert is_delta == (temporality != "cumulative")
                found = list(times.bucket_counts)
                buckets = (
                    [a + b for a, b in zip(found, buckets, strict=True)] if is_delta else found
                )
                total = times.sum + (total if is_delta else 0.0)
        last_ns = now_ns

    assert counter.sum.is_monotonic
    assert count == len(values)
    assert sum(buckets) == len(values)
    assert buckets[0] == sum(value <= 1 for value in values)
    assert total == pytest.approx(sum(values))
    assert list(times.explicit_bounds) == [1, 10, 100]


def test_counters_of_other_processes_may_begin_before_and_again() -> None:
    """An engine counts on while api processes come and go, and starts again alone."""
    encoding = encoder("delta")
    received = []
    for index, value in enumerate([1_000_000.0, 1_000_010.0, 3.0, 5.0]):
        now_ns = START_NS + index * STEP_NS
        [message] = encoding.messages([counted(value, "weir_engine_steps")], now_ns)
        encoding.accept(message, now_ns)
        [metric] = metrics_in(message)
        received.append(metric.sum.data_points[0].as_double)
    [message] = encoder("cumulative").messages([counted(7.0, "weir_engine_steps")], START_NS)
    [metric] = metrics_in(message)

    assert received == [0.0, 10.0, 3.0, 2.0]
    assert metric.sum.data_points[0].start_time_unix_nano == 0, "unknown"


def test_messages_are_bounded_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "POINTS_MAX", 7)
    families = [
        gauges("weir_queue_waiting", ("model",), [((f"m{index}",), 1.0) for index in range(size)])
        for size in (0, 3, 20, 4)
    ]

    found = [list(metrics_in(each)) for each in encoder("delta").messages(families, START_NS)]

    sizes = [sum(len(each.gauge.data_points) for each in metrics) for metrics in found]
    assert sizes == [7, 7, 7, 6]


def test_an_empty_label_is_no_attribute() -> None:
    """Omit it, as Prometheus does: requests of an unknown model lack this attribute."""
    family = counters("weir_tokens", ("model", "kind"), [(("", "input"), 1.0)])

    [message] = encoder("cumulative").messages([family], START_NS)

    [metric] = metrics_in(message)
    assert values_of(metric.sum.data_points[0].attributes) == {"kind": "input"}


def conventional(counts: RequestCounts) -> dict[str, pb.Metric]:
    """Return the metrics of the semantic conventions as they are exported."""
    [message] = encoder("cumulative").messages(conventional_metrics(counts), START_NS)
    return {metric.name: metric for metric in metrics_in(message)}


def test_conventional_metrics_are_those_of_the_semantic_conventions() -> None:
    """Names, units, attributes and recommended bounds of `semantic-conventions-genai`, 0.1."""
    observer = Observer(["m", "large"])
    timings = TIMINGS | {"ttft_ms": 30.0, "tokens_per_second": 50.0, "total_ms": 700.0}
    observer.ended(ending(timings=timings, settled=SETTLED))
    observer.ended(ending(timings=timings, settled=SETTLED, requested_model="large"))
    observer.ended(ending(timings=timings, outcome=None, broken=ValueError("a bug")))

    metrics = conventional(observer.counts)

    assert metrics.keys() == {name for name, _ in CONVENTIONAL.values()}
    answered = COMMON | {"gen_ai.response.model": "m"}
    requests = [answered, answered | {"gen_ai.request.model": "large"}]
    for name, bounds in SECONDS.items():
        metric = metrics[name]
        points = metric.histogram.data_points
        assert metric.unit == "s"
        assert list(points[0].explicit_bounds) == [bound / 1000 for bound in bounds], name
        broken = [COMMON | {"error.type": "INTERNAL"}] * name.endswith("request.duration")
        assert [values_of(point.attributes) for point in points] == [*requests, *broken], name
        assert all(point.count == 1 for point in points), name
    assert metrics["gen_ai.server.time_to_first_token"].histogram.data_points[0].sum == 0.03
    per_token = metrics["gen_ai.server.time_per_output_token"].histogram.data_points[0]
    assert per_token.sum == pytest.approx(0.02)
    usage = metrics["gen_ai.client.token.usage"]
    assert usage.unit == "{token}"
    assert list(usage.histogram.data_points[0].explicit_bounds) == list(USAGE_BOUNDS)
    found = [(values_of(each.attributes), each.sum) for each in usage.histogram.data_points]
    assert found == [
        (of | {"gen_ai.token.type": kind}, tokens)
        for of in requests
        for kind, tokens in (("input", 1025.0), ("output", 150.0))
    ]


def test_published_bounds() -> None:
    assert [bound / 1000 for bound in CONVENTIONAL_TOTAL_BOUNDS_MS] == [
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
    ]
    assert USAGE_BOUNDS[-3:] == (4194304, 16777216, 67108864)
    assert [bound / 1000 for bound in CONVENTIONAL_FIRST_TOKEN_BOUNDS_MS] == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    ]
    assert [bound / 1000 for bound in CONVENTIONAL_TOKEN_BOUNDS_MS] == [
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
    ]


@given(
    st.lists(st.sampled_from(FINE_TOTAL_BOUNDS_MS) | st.floats(0, 10**6), max_size=50),
    st.sampled_from([TOTAL_BOUNDS_MS, CONVENTIONAL_TOTAL_BOUNDS_MS]),
)
def test_coarser_bounds_are_exact(values: list[float], bounds: tuple[float, ...]) -> None:
    fine, coarse = Histogram(FINE_TOTAL_BOUNDS_MS), Histogram(bounds)
    for value in values:
        fine.observe(value)
        coarse.observe(value)

    half = merged([fine], bounds)

    assert half.counts == coarse.counts
    assert half.sum == coarse.sum
    assert merged([fine, fine], bounds).counts == [2 * count for count in coarse.counts]


def test_names_of_models_that_do_not_exist_make_no_series() -> None:
    observer = Observer(["another"])
    for index in range(50):
        start = ending(broken=ValueError(str(index)), outcome=None)
        start.start.model = f"invented-{index}"  # type: ignore[misc]
        observer.ended(start)

    points = conventional(observer.counts)["gen_ai.server.request.duration"].histogram.data_points

    assert [point.count for point in points] == [50]


def test_buckets_are_counted_apart() -> None:
    family = HistogramMetricFamily("weir_x", "X.", labels=("model",))
    family.add_metric(("a",), [("0.5", 1.0), ("1", 3.0), ("+Inf", 4.0)], 2.5)

    assert list(points_of(family)) == [((("model", "a"),), (2.5, 1.0, 2.0, 1.0), (0.5, 1.0))]
    assert math.inf not in [bound for point in points_of(family) for bound in point.bounds]


@pytest.mark.parametrize(
    ("environment", "is_sent"),
    [
        ({}, False),
        ({ENDPOINT: "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_METRICS_EXPORTER": "prometheus"}, False),
        ({ENDPOINT: "http://c:4317", "OTEL_METRICS_EXPORTER": "prometheus, otlp"}, True),
        ({ENDPOINT: "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, True),
        ({ENDPOINT: "http://c:4317", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_metrics_are_sent_if_a_variable_names_a_collector(
    environment: dict[str, str], is_sent: bool
) -> None:
    assert bool(collector_of("METRICS", environment)) == is_sent


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_METRICS_EXPORTER": "console"}, "must be otlp or none or prometheus, got console"),
        ({"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"}, "must be grpc"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "5 s"}, "whole number of milliseconds, at least 1000"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "10"}, "whole number of milliseconds, at least 1000"),
        ({otlp.TEMPORALITY: "both"}, "must be one of cumulative, delta, lowmemory"),
        ({otlp.AGGREGATION: "base2_exponential_bucket_histogram"}, "must be explicit_bucket_hist"),
    ],
)
def test_a_wrong_variable_is_named(variables: Mapping[str, str], message: str) -> None:
    environment = {ENDPOINT: "http://c:4317", **variables}

    def read() -> None:
        collector_of("METRICS", environment)
        ExportSettings.from_environment(environment)

    with pytest.raises(SettingInvalid, match=message) as refused:
        read()

    assert next(iter(variables)) in str(refused.value)


def test_variables_are_read_as_opentelemetry_defines_them() -> None:
    assert ExportSettings.from_environment({}) == (60.0, "cumulative")
    variables = {"OTEL_METRIC_EXPORT_INTERVAL": "2500", otlp.TEMPORALITY: "DELTA"}
    assert ExportSettings.from_environment(variables) == (2.5, "delta")
