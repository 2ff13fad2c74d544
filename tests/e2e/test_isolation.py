"""Isolation of organizations: a key never reads or spends anything of another organization."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from functools import partial

import psycopg
from grpc import StatusCode

from metering.core.models import QuotaDimension
from metering.store.db import psycopg_conninfo
from tests.calls import calls
from tests.service import PLAIN_IDS, Service, refused, start, until

RUNNING_MAX = 2  # reports of one key: `report_connections` less the one reserved for other keys
WAITING_MAX = 16  # more of them
REPORTS = 20


async def test_requests_of_others_do_not_exist(service: Service) -> None:
    one, other = await service.tenant(), await service.tenant()
    async with service.stream(one.secret) as stream:
        request_id = await stream.begin()
        await stream.finished(request_id)

    async with calls(service, other.secret) as call:
        refusal = await call.refused("GetGeneration", request_id=request_id)
        unknown = await call.refused("GetGeneration", request_id="0" * 32)

    assert refusal.code is unknown.code is StatusCode.NOT_FOUND
    assert refusal.reason == unknown.reason


async def test_a_request_of_others_cannot_be_cancelled(service: Service) -> None:
    one, other = await service.tenant(), await service.tenant()
    async with service.stream(one.secret) as stream, service.stream(other.secret) as theirs:
        request_id = await stream.begin(max_output_tokens=200)
        await stream.received(request_id, 1)

        await theirs.cancel(request_id)

        assert (await theirs.failed(request_id)).code is StatusCode.NOT_FOUND
        assert (await stream.finished(request_id)).usage.delivered_token_count == 200


async def test_each_key_sees_its_own_limits_only(service: Service) -> None:
    one = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 1111})
    other = await service.tenant({QuotaDimension.TOKENS_PER_DAY: 2222})

    async with service.client(one.secret) as client, service.client(other.secret) as theirs:
        assert [quota.limit_value for quota in await client.get_quota()] == [1111]
        assert [quota.limit_value for quota in await theirs.get_quota()] == [2222]
        async with service.stream(one.secret) as stream:
            await stream.finished(await stream.begin())
        assert [quota.used_value for quota in await theirs.get_quota()] == [0]


async def test_a_used_up_tenant_takes_nothing_from_another(service: Service) -> None:
    empty = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 0})
    other = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 1})

    async with service.stream(empty.secret) as stream, service.stream(other.secret) as theirs:
        refusal = await stream.failed(await stream.begin())
        assert (await theirs.finished(await theirs.begin())).usage.delivered_token_count == 20

    assert refusal.info.metadata["subject_id"] == str(empty.organization_id)


async def test_long_reports_keep_no_request_from_being_admitted(service: Service) -> None:
    """Reports of one key beyond the running and waiting ones are refused at once."""
    one, other = await service.tenant(scopes=("billing",)), await service.tenant()
    month = f"{datetime.now(UTC):%Y-%m}"

    with psycopg.connect(psycopg_conninfo(service.database_url)) as slow:
        slow.execute("LOCK TABLE ledger_entries IN ACCESS EXCLUSIVE MODE")
        async with calls(service, one.secret) as call, asyncio.TaskGroup() as tasks:
            report = partial(call, "GetMonthReport", organization=one.name, month=month)
            reports = [tasks.create_task(refused(report())) for _ in range(REPORTS)]
            await until(lambda: waiting_count(service) == RUNNING_MAX, "reports to run")
            refused_count = REPORTS - RUNNING_MAX - WAITING_MAX
            await until(lambda: sum(each.done() for each in reports) == refused_count, "refusals")
            refusals = [each.result() for each in reports if each.done()]
            async with service.stream(other.secret) as stream:
                finished = await stream.finished(await stream.begin())
            still_waiting = waiting_count(service)
            for each in reports:
                each.cancel()

    assert (finished.usage.delivered_token_count, still_waiting) == (20, RUNNING_MAX)
    assert {refusal.reason for refusal in refusals} == {"TOO_MANY_REPORTS"}


def waiting_count(service: Service) -> int:
    """Return the number of statements that wait for a table."""
    [row] = service.database.rows(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE wait_event = 'relation'"
    )
    return int(row["n"])


async def test_a_prompt_is_cached_for_its_organization_alone(service: Service) -> None:
    """Not even a prediction may reveal that another tenant has sent the same prompt."""
    one, other = await service.tenant(), await service.tenant()
    _, colleague = await service.new_key(one)
    prompt = random.Random(77).sample(PLAIN_IDS, 300)
    cached = {}
    predicted = {}
    for name, secret in (
        ("first", one.secret),
        ("other", other.secret),
        ("colleague", colleague),
        ("other again", other.secret),
    ):
        async with service.stream(secret) as stream:
            request_id = await stream.begin(prompt=prompt)
            cached[name] = (await stream.finished(request_id)).usage.cached_input_token_count
            predicted[name] = stream.of(request_id, "admitted")[0].predicted_cached_token_count

    assert cached["first"] == cached["other"] == predicted["first"] == predicted["other"] == 0
    assert cached["colleague"] == predicted["colleague"] == cached["other again"] > 200


async def test_the_same_answer_comes_to_both_and_is_billed_to_each(service: Service) -> None:
    one, other = await service.tenant(), await service.tenant()
    frame = start(max_output_tokens=50)
    answers = []
    for secret in (one.secret, other.secret):
        async with service.stream(secret) as stream:
            await stream.send(frame)
            await stream.finished(frame.request_id)
            answers.append(stream.token_ids(frame.request_id))

    assert answers[0] == answers[1]
    for tenant in (one, other):
        event = service.database.event(tenant, frame.request_id)
        assert (event["project_id"], event["api_key_id"]) == (tenant.project_id, tenant.key.id)


async def test_finance_of_one_customer_sees_no_other_customer(service: Service) -> None:
    one, other = await service.tenant(), await service.tenant()
    _, secret = await service.new_key(one, "billing")
    others = (other.name, str(other.organization_id), "nobody")
    async with calls(service, secret) as call:
        report = partial(call, "GetMonthReport", month="2026-11")
        refusals = [await refused(report(organization=each)) for each in others]
        own = await report(organization=one.name)

    assert own.organization_name == one.name
    assert [refusal.code for refusal in refusals] == [StatusCode.NOT_FOUND] * 3
    assert {refusal.reason for refusal in refusals} == {"NOT_FOUND"}, "both look alike"
