"""Usage and cost that a key for inference sees: its own, and the sum of its project."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from weir_client import AsyncClient, BillingClient, InvalidRequest, PermissionDenied, UsageGrouping

from tests.service import MODEL, Service

OTHERS = ("organization_name", "project_name", "api_key_name", "api_key_prefix", "request_id")


async def test_a_key_sees_its_own_usage_and_the_sum_of_its_project(service: Service) -> None:
    """Costs equal those of the results to the pico, and what the bill's reader sees."""
    one, stranger = await service.tenant(), await service.tenant()
    _, second = await service.new_key(one)
    async with (
        service.client(one.secret) as client,
        service.client(second) as colleague,
        service.client(stranger.secret) as other,
    ):
        mine = [await client.complete(MODEL, "Hi", max_output_tokens=n) for n in (3, 7)]
        theirs = await colleague.complete(MODEL, "Hello", max_output_tokens=5)
        await other.complete(MODEL, "Hi", max_output_tokens=9)

        report = await client.usage()
        by_model = await client.usage(by="model", project=True, month=report.first_day[:7])
        other_model = await client.usage(model="other")
        own_of_colleague = await colleague.usage(first_day=report.last_day)

    today = report.last_day
    cost = sum(each.cost.picos for each in mine)
    [row] = report.rows
    assert (row.day, row.model, report.time_zone) == (today, MODEL, "UTC")
    assert report.first_day == f"{today[:7]}-01"
    assert row.cost == report.total.cost
    assert (row.cost.picos, row.cost.currency_code) == (cost, "USD")
    assert (row.request_count, row.output_token_count) == (2, 10)
    assert [row.model for row in by_model.rows] == [MODEL]
    assert by_model.total.cost.picos == cost + theirs.cost.picos
    assert by_model.total.request_count == 3
    assert other_model.rows == ()
    assert own_of_colleague.total.cost == theirs.cost
    for found in (row, *by_model.rows):
        assert not any(getattr(found, each) for each in OTHERS), "nothing beside day and model"


async def test_a_reader_of_the_bill_sees_the_same_for_the_same_days(service: Service) -> None:
    tenant = await service.tenant(scopes=("inference", "billing"))
    async with service.client(tenant.secret) as client:
        await client.complete(MODEL, "Hi", max_output_tokens=4)
        report = await client.usage(project=True)

    def read() -> tuple[object, ...]:
        with BillingClient(service.address, tenant.secret) as billing:
            days = [report.first_day, report.last_day]
            by = [UsageGrouping.DAY, UsageGrouping.MODEL]
            [page] = billing.get_usage("", by, first_day=days[0], last_day=days[1])
            [month] = billing.get_usage(days[0][:7], by)
            with pytest.raises(InvalidRequest, match="month"):
                next(billing.get_usage("", by))
            with pytest.raises(InvalidRequest, match="month"):
                next(billing.get_usage("2026-01", by, first_day="2026-01-01"))
        return (*((each.rows[0].cost, each.total and each.total.cost) for each in (page, month)),)

    assert set(await asyncio.to_thread(read)) == {(report.total.cost, report.total.cost)}


async def test_a_key_of_some_models_does_not_learn_of_others(service: Service) -> None:
    tenant = await service.tenant()
    _, narrow = await service.new_key(tenant, models=(MODEL,))
    _, billing = await service.new_key(tenant, "billing")
    async with service.client(narrow) as client:
        assert (await client.usage()).rows == ()
        with pytest.raises(PermissionDenied, match=MODEL):
            await client.usage(project=True)
    async with service.client(billing) as client:
        with pytest.raises(PermissionDenied):
            await client.usage()


async def test_wrong_questions_name_the_field_and_what_it_takes(service: Service) -> None:
    tenant = await service.tenant()
    today = datetime.now(UTC).date()
    async with service.client(tenant.secret) as client:
        for wrong, field in (
            ({"month": "2026-13"}, "month"),
            ({"month": "2026-01", "first_day": today}, "month"),
            ({"first_day": today - timedelta(days=92)}, "last_day"),
            ({"first_day": "today"}, "first_day"),
            ({"last_day": today}, "first_day"),
            ({"by": "project"}, "group_by"),
            ({"by": ("day", "day")}, "group_by"),
            ({"by": "week"}, "by"),
            ({"model": "a\0"}, "model"),
        ):
            assert await field_of(client, **wrong) == field, wrong


async def field_of(client: AsyncClient, **question: object) -> str:
    """Return the field that the refusal of a question names."""
    with pytest.raises(InvalidRequest) as caught:
        await client.usage(**question)  # type: ignore[arg-type]
    return caught.value.details.field_violations[0].field
