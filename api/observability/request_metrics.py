"""What has become of requests, as metrics: the counts of `request_counts.py`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from api.observability.families import counter, counters, histograms
from api.observability.request_counts import RequestCounts

OF = ("model", "tier")


def request_metrics(counts: RequestCounts) -> Iterator[Metric]:
    """All of them."""
    yield counters(
        "weir_requests",
        "Requests that have ended, by how: a finish reason, or the reason of a refusal or a failure.",
        (*OF, "outcome"),
        counts.ends,
    )
    yield counters(
        "weir_refusals",
        "Requests that ended without anything to bill, by reason; of QUOTA_EXCEEDED the dimension and subject of the quota.",
        ("model", "reason", "dimension", "subject"),
        counts.refusals,
    )
    yield counters("weir_tokens", "Tokens billed, by kind; input is without cached_input.", ("model", "kind"), counts.tokens)
    yield counters("weir_failed_calls", "Calls that ended with an error.", ("call", "reason"), counts.failed_calls)
    yield counter("weir_migrations", "Times that a request went on in another engine.", counts.migration_count)
    yield from time_metrics(counts)


def time_metrics(counts: RequestCounts) -> Iterator[Metric]:
    """Of requests that ran."""
    of = [((model, tier.value), times) for (model, tier), times in sorted(counts.times.items())]
    yield histograms(
        "weir_time_to_first_token_seconds",
        "From the arrival of a start frame to its first token.",
        OF,
        ((labels, times.first_token) for labels, times in of),
    )
    yield histograms(
        "weir_inter_token_seconds",
        "Between two tokens of a request; all of a request at their mean.",
        OF,
        ((labels, times.inter_token) for labels, times in of),
    )
    yield histograms(
        "weir_request_seconds",
        "From the arrival of a start frame to the last frame.",
        OF,
        ((labels, times.total) for labels, times in of),
    )
    yield histograms(
        "weir_stage_seconds",
        "Where the time of a request went. cold_start counts those alone that waited for an engine to start.",
        (*OF, "stage"),
        (((*labels, stage), histogram) for labels, times in of for stage, histogram in times.stages.items()),
    )
