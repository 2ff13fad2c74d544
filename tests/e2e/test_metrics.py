"""Metrics of requests, and facts that they must not contain."""

from __future__ import annotations

import uuid

import pytest
from grpc import StatusCode

from api.observability.observer import COLD_START_MS_MIN
from api.observability.spans import STAGES
from metering.core.models import QuotaDimension
from tests.scraped import Scrape, scrape
from tests.service import MODEL, Service, Tenant, kernels_of_this_machine

OF = {"model": MODEL, "tier": "interactive"}
ROUNDING_S = 1e-4  # stages have a resolution of a microsecond


def added(before: Scrape, after: Scrape, name: str, **labels: str) -> float:
    """Return the increase of a series."""
    return after.value(name, **labels) - before.value(name, **labels)


async def test_a_request_is_counted_once_with_tokens_and_stages(service: Service) -> None:
    tenant = await service.tenant()
    before = await scrape(service.metrics_url)

    async with service.stream(tenant.secret) as stream:
        finished = await stream.finished(await stream.begin(max_output_tokens=20))
    after = await scrape(service.metrics_url)

    assert added(before, after, "weir_requests_total", **OF, outcome="length") == 1
    assert added(before, after, "weir_tokens_total", model=MODEL, kind="output") == 20
    usage = finished.usage
    cached = added(before, after, "weir_tokens_total", model=MODEL, kind="cached_input")
    assert cached == usage.cached_input_token_count
    uncached = added(before, after, "weir_tokens_total", model=MODEL, kind="input")
    assert uncached + cached == usage.input_token_count
    for stage in set(STAGES) - {"cold_start"}:
        reported_s = added(before, after, "weir_stage_seconds_sum", **OF, stage=stage)
        assert reported_s == pytest.approx(
            getattr(finished.timings, f"{stage}_ms") / 1000, abs=ROUNDING_S
        ), stage
        assert added(before, after, "weir_stage_seconds_count", **OF, stage=stage) == 1, stage
    waited = (
        finished.timings.cold_start_ms >= COLD_START_MS_MIN
    )  # the engine was ready; a busy machine may have noticed late
    assert added(before, after, "weir_stage_seconds_count", **OF, stage="cold_start") == waited
    for name, reported_ms in (
        ("weir_time_to_first_token_seconds", finished.timings.ttft_ms),
        ("weir_request_seconds", finished.timings.total_ms),
    ):
        assert added(before, after, f"{name}_sum", **OF) == pytest.approx(
            reported_ms / 1000, abs=ROUNDING_S
        ), name
    gap_count = added(before, after, "weir_inter_token_seconds_count", **OF)
    assert 10 < gap_count <= 19, "between twenty tokens, of which several may come at once"
    assert added(before, after, "weir_inter_token_seconds_bucket", **OF, le="+Inf") == gap_count
    conventional = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "weir",
        "gen_ai_request_model": MODEL,
        "gen_ai_response_model": MODEL,
        "weir_tier": "interactive",
    }
    reported = finished.timings
    for name, total, more in (
        ("server_time_to_first_token_seconds", reported.ttft_ms / 1000, {}),
        ("server_time_per_output_token_seconds", 1 / reported.tokens_per_second, {}),
        ("server_request_duration_seconds", reported.total_ms / 1000, {"error_type": ""}),
        ("client_token_usage", usage.input_token_count, {"gen_ai_token_type": "input"}),
        ("client_token_usage", 20, {"gen_ai_token_type": "output"}),
    ):
        of = {**conventional, **more}
        assert added(before, after, f"gen_ai_{name}_count", **of) == 1, name
        sum_ = added(before, after, f"gen_ai_{name}_sum", **of)
        assert sum_ == pytest.approx(total, abs=ROUNDING_S), name
    assert added(before, after, "weir_inter_token_seconds_sum", **OF) == pytest.approx(
        reported.decode_ms / 1000, rel=0.2, abs=0.0002
    )
    assert (
        0 < reported.itl_p50_ms <= reported.itl_p99_ms <= reported.itl_max_ms < reported.decode_ms
    )
    assert reported.tokens_per_second == pytest.approx(19 / reported.decode_ms * 1000)


async def test_a_refusal_is_counted_by_what_refused_it(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 25})
    nonsense = f"no-such-model-{uuid.uuid4()}"
    before = await scrape(service.metrics_url)

    async with service.stream(tenant.secret) as stream:
        too_much = await stream.failed(await stream.begin(prompt=range(7, 60)))
        unknown = await stream.failed(await stream.begin(model=nonsense))
        wrong = await stream.failed(await stream.begin(max_output_tokens=-1))
    async with service.stream("weir_not_a_key") as refused:
        assert await refused.closed() is StatusCode.UNAUTHENTICATED
    after = await scrape(service.metrics_url)

    reasons = [each.reason for each in (too_much, unknown, wrong)]
    assert reasons == ["QUOTA_EXCEEDED", "MODEL_UNKNOWN", "FIELD_INVALID"]
    quota = {
        "model": MODEL,
        "reason": "QUOTA_EXCEEDED",
        "dimension": "tokens-per-month",
        "subject": "organization",
    }
    assert added(before, after, "weir_refusals_total", **quota) == 1
    assert added(before, after, "weir_requests_total", **OF, outcome="quota_exceeded") == 1
    for reason in ("MODEL_UNKNOWN", "FIELD_INVALID"):
        labels = {"model": "", "reason": reason, "dimension": "", "subject": ""}
        assert added(before, after, "weir_refusals_total", **labels) == 1, reason
    labels = {"call": "Generate", "reason": "UNAUTHENTICATED"}
    assert added(before, after, "weir_failed_calls_total", **labels) == 1
    assert nonsense not in after.text


async def test_labels_name_no_caller_and_no_request(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(labels={"team": "marketing-of-acme"})
        await stream.finished(request_id)
    text = (await scrape(service.metrics_url)).text

    ids = (tenant.organization_id, tenant.project_id, tenant.key.id, request_id)
    reported = {str(each) for each in (*ids, tenant.name, tenant.key.prefix, "marketing-of-acme")}
    assert not {each for each in reported if each in text}


async def test_running_requests_are_shown_while_they_run_only(service: Service) -> None:
    """Without credit for its second token it runs until it is cancelled, on any machine."""
    tenant = await service.tenant()
    idle = await scrape(service.metrics_url)

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=200, initial_credit_tokens=1)
        await stream.first(request_id, "delta")
        busy = await scrape(service.metrics_url)
        await stream.cancel(request_id)
        await stream.finished(request_id)
    done = await scrape(service.metrics_url)

    running: list[tuple[str, dict[str, str]]]
    running = [
        ("weir_live_requests", {"phase": "streaming"}),
        ("weir_holds", {}),
        ("weir_permits_taken", {}),
    ]
    for name, labels in running:
        assert added(idle, busy, name, **labels) == 1, name
        assert added(idle, done, name, **labels) == 0, name
    assert added(idle, busy, "weir_open_streams", caller="clients") == 1
    replica = {"model": MODEL, "replica": f"{MODEL}#0"}
    assert (
        busy.value("weir_engine_up", **replica)
        == busy.value("weir_engine_state", **replica, state="ready")
        == busy.value("weir_engine_info", **replica, kernels=kernels_of_this_machine())
        == 1
    )
    assert (
        sum(
            busy.value("weir_kv_blocks", **replica, state=state)
            for state in ("free", "cached", "held")
        )
        > 0
    )
    assert done.value("weir_event_loop_lag_seconds_count") > 0
    assert done.value("weir_database_up") == done.value("weir_cluster_backlog_up") == 1
    assert added(idle, done, "weir_requests_total", **OF, outcome="cancelled") == 1
    assert (
        added(idle, done, "weir_hold_batch_seconds_count")
        == added(idle, done, "weir_hold_batch_operations_count")
        >= 2
    )
