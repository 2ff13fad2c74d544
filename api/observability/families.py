"""Metric families from plain numbers, in the client library's types: names, units and help texts stand where they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from api.observability.histogram import Histogram

Labels = tuple[str, ...]
MS = 1e-3  # seconds in one: histograms count in ms, and are told in seconds


def gauge(name: str, what: str, value: float) -> Metric:
    """One number."""
    return GaugeMetricFamily(name, what, value=value)


def gauges(name: str, what: str, labels: Sequence[str], values: Mapping[Labels, float] | Iterable[tuple[Labels, float]]) -> Metric:
    """A number for each set of labels."""
    family = GaugeMetricFamily(name, what, labels=labels)
    for of, value in values.items() if isinstance(values, Mapping) else values:
        family.add_metric(of, value)
    return family


def counter(name: str, what: str, value: float) -> Metric:
    """A count since the start. name: without `_total`."""
    return CounterMetricFamily(name, what, value=value)


def counters(
    name: str, what: str, labels: Sequence[str], values: Mapping[Labels, float] | Iterable[tuple[Labels, float]]
) -> Metric:
    """A count for each set of labels."""
    family = CounterMetricFamily(name, what, labels=labels)
    for of, value in values.items() if isinstance(values, Mapping) else values:
        family.add_metric(of, value)
    return family


def histograms(name: str, what: str, labels: Sequence[str], values: Iterable[tuple[Labels, Histogram]], unit: float = MS) -> Metric:
    """A histogram for each set of labels. unit: what one of its units is in the metric's."""
    family = HistogramMetricFamily(name, what, labels=labels)
    for of, histogram in values:
        family.add_metric(of, histogram.buckets(unit), histogram.sum * unit)
    return family
