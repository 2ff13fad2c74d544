"""Metrics at a collector: those of a scrape, whatever the collector does."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2

from tests.e2e.conftest import Serve
from tests.otlp_receiver import ReceivedPoint, Receiver, receiving
from tests.scraped import scrape
from tests.service import MODEL, Service, until

PATIENCE_S = 60.0
SUFFIXES = {"s": "seconds", "By": "bytes", "{token}": ""}  # of units, in Prometheus
# Values that a scrape shortly after an export may have changed.
STEADY = re.compile(
    r"weir_(requests|tokens|refusals|admissions|engine_(output|prompt)_tokens)_total"
    r"|(weir|gen_ai)_.*(request|token).*_(bucket|count|sum)|weir_build_info|weir_engine_up"
)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
Answer = metrics_service_pb2.ExportMetricsServiceResponse


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Yield a collector."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def exporting(serve: Serve, receiver: Receiver, model: Path) -> Service:
    """Return a service that sends its metrics to the collector each second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", receiver.address)
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        return serve(model, is_drained=True)


@pytest.fixture(autouse=True)
def answering(receiver: Receiver) -> Iterator[None]:
    """Let the collector accept everything again."""
    answer = receiver.answer_metrics
    yield
    receiver.answer_metrics = answer


def as_prometheus(points: Iterable[ReceivedPoint]) -> Samples:
    """Translate points by OpenTelemetry's specification of compatibility with Prometheus."""
    samples: Samples = {}
    for each in points:
        metric, point = each.metric, each.point
        name = re.sub(r"[^a-zA-Z0-9_:]", "_", metric.name)
        suffix = SUFFIXES.get(metric.unit, metric.unit)
        if suffix and suffix not in name.split("_"):
            name += f"_{suffix}"
        if metric.HasField("sum") and metric.sum.is_monotonic and not name.endswith("_total"):
            name += "_total"
        labels = {re.sub(r"\W", "_", key): str(value) for key, value in each.attributes.items()}
        of = frozenset(labels.items())
        if not metric.HasField("histogram"):
            samples[name, of] = point.as_double
            continue
        below = 0
        for bound, count in zip((*point.explicit_bounds, "+Inf"), point.bucket_counts, strict=True):
            below += count
            le = bound if isinstance(bound, str) else f"{bound:.12g}"
            samples[f"{name}_bucket", of | {("le", le)}] = below
        samples[f"{name}_count", of], samples[f"{name}_sum", of] = point.count, point.sum
    return samples


async def next_export(receiver: Receiver) -> list[ReceivedPoint]:
    """Return an export that began after this call."""
    count = len(receiver.exports())
    await until(lambda: len(receiver.exports()) > count + 1, "the next exports")
    return receiver.exports()[-1]


async def test_the_collector_gets_every_metric_of_a_scrape(
    exporting: Service, receiver: Receiver
) -> None:
    """Dashboards and alert rules need not know which way the metrics came."""
    tenant = await exporting.tenant()
    async with exporting.stream(tenant.secret) as stream:
        await stream.finished(await stream.begin(max_output_tokens=20))
        await stream.failed(await stream.begin(model="no-such-model"))
    exported = await next_export(receiver)
    scraped = await scrape(exporting.metrics_url)

    sent = as_prometheus(exported)
    shown = {
        (name, frozenset((key, value) for key, value in of if value)): value
        for (name, of), value in scraped.samples.items()
    }
    assert sent.keys() == shown.keys()
    steady = {of for of in sent if STEADY.fullmatch(of[0])}
    assert len(steady) > 150
    assert {of: sent[of] for of in steady} == pytest.approx({of: shown[of] for of in steady})
    assert all(each.resource["service.name"] == "weir" for each in exported)
    answered = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "weir",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "weir.tier": "interactive",
    }
    durations = [
        each.attributes for each in exported if each.metric.name == "gen_ai.server.request.duration"
    ]
    assert answered in durations
    assert any(each.get("error.type") == "MODEL_UNKNOWN" for each in durations)
    ids = (tenant.organization_id, tenant.project_id, tenant.key.id, tenant.name, tenant.secret)
    assert not [each for each in ids if str(each).encode() in receiver.data]


async def outcomes(service: Service) -> dict[str, float]:
    """Return the counts of exports by outcome."""
    scraped = await scrape(service.metrics_url)
    return {
        outcome: scraped.value("weir_metric_exports_total", outcome=outcome)
        for outcome in ("accepted", "partly_refused", "failed")
    }


async def count_until(service: Service, outcome: str, above: float) -> None:
    """Wait until more exports than `above` have ended so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if (await outcomes(service))[outcome] > above:
                return
            await asyncio.sleep(0.1)


async def test_a_collector_that_hangs_refuses_or_fails_costs_no_request_anything(
    exporting: Service, receiver: Receiver
) -> None:
    tenant, before = await exporting.tenant(), await outcomes(exporting)
    hanging, released = threading.Event(), threading.Event()

    def hang(_: grpc.ServicerContext) -> Answer:
        hanging.set()
        assert released.wait(PATIENCE_S)
        return Answer()

    def refuse_some(_: grpc.ServicerContext) -> Answer:
        answer = Answer()
        answer.partial_success.rejected_data_points = 3
        answer.partial_success.error_message = "too old"
        return answer

    def deny(context: grpc.ServicerContext) -> Answer:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no pipeline for metrics")

    receiver.answer_metrics = hang
    await until(hanging.is_set, "an export to hang")
    async with exporting.stream(tenant.secret) as stream:
        finished = await stream.finished(await stream.begin(max_output_tokens=20))
    assert finished.usage.delivered_token_count == 20
    assert (await outcomes(exporting))["failed"] == before["failed"], "scrapes go on too"
    receiver.answer_metrics = refuse_some
    released.set()
    await count_until(exporting, "partly_refused", before["partly_refused"])
    receiver.answer_metrics = deny
    await count_until(exporting, "failed", before["failed"])
    receiver.answer_metrics = lambda _: Answer()
    accepted = (await outcomes(exporting))["accepted"]
    await count_until(exporting, "accepted", accepted)
