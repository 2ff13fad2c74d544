"""Usage and cost that a key for inference sees: its own, and the sum of its project."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner
from weir_cli.__main__ import app
from weir_client import (
    AsyncClient,
    BillingClient,
    InvalidRequest,
    MonthExportFormat,
    PermissionDenied,
    UsageGrouping,
)

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


async def test_usage_by_end_user_label_and_hour_adds_up_in_every_api(
    service: Service, tmp_path: Path
) -> None:
    tenant, stranger = await service.tenant(), await service.tenant()
    _, second = await service.new_key(tenant)
    _, billing_key = await service.new_key(tenant, "billing")
    async with (
        service.client(tenant.secret) as client,
        service.client(second) as colleague,
        service.client(stranger.secret) as other,
    ):
        made = [
            await sender.complete(MODEL, "Hi", max_output_tokens=2, end_user=name, labels=labels)
            for sender, name, labels in (
                (client, "", {}),
                (client, "alice", {"team": "search"}),
                (client, "bob", {"team": ""}),
                (colleague, "alice", {"team": "chat", "feature": "x"}),
            )
        ]
        await other.complete(MODEL, "Hi", max_output_tokens=2, end_user="alice")
        by_user = await client.usage(by="end_user")
        by_team = await client.usage(by=["label:team", "hour"])
        of_alice = await client.usage(end_user="alice", project=True)
        of_search = await client.usage(labels={"team": "search"})
        of_nobody = await client.usage(end_user="carol")
        of_stranger = await other.usage(by=["end_user", "day"], labels={})
        for wrong, field in (
            ({"by": "end_user", "project": True}, "group_by"),
            ({"by": "label:team", "project": True}, "group_by"),
            ({"by": ["label:a", "label:b"]}, "by"),
            ({"by": "label:"}, "by"),
            ({"by": "label:\0"}, "label_key"),
            ({"end_user": "a\nb"}, "end_user"),
            ({"labels": {"": "x"}}, "labels"),
        ):
            assert await field_of(client, **wrong) == field, wrong

    costs = [each.cost.picos for each in made]
    assert {(row.end_user, bool(row.end_user_id), row.cost.picos) for row in by_user.rows} == {
        ("", False, costs[0]),
        ("alice", True, costs[1]),
        ("bob", True, costs[2]),
    }, "of its own requests only"
    assert [(row.label_value, row.request_count) for row in by_team.rows] == [
        (None, 1),
        ("", 1),
        ("search", 1),
    ]
    assert {row.hour[:10] for row in by_team.rows} <= {by_team.first_day, by_team.last_day}
    assert by_user.total.cost == by_team.total.cost
    assert of_alice.total.cost.picos == costs[1] + costs[3], "of all keys of the project"
    assert of_search.total.cost.picos == costs[1]
    assert (of_nobody.rows, of_nobody.total.request_count) == ((), 0)
    assert [row.request_count for row in of_stranger.rows] == [1]

    def read() -> None:
        month = by_user.last_day[:7]
        with BillingClient(service.address, billing_key) as billing:
            for by in (["end_user"], ["label:team"], ["hour"], ["label:feature", "end_user"]):
                [page] = billing.get_usage(month, by, largest_first=True)
                assert page.total is not None
                assert sum(row.cost.picos for row in page.rows) == sum(costs)
                assert page.total.cost.picos == sum(costs)
            [page] = billing.get_usage(month, ["end_user"])
            assert {row.end_user for row in page.rows} == {"", "alice", "bob"}
            [page] = billing.get_usage(month, ["model"], end_user="alice", labels={"team": "chat"})
            assert [row.cost.picos for row in page.rows] == [costs[3]]
            [page] = billing.get_usage(month, ["request"], end_user="alice")
            assert {(row.end_user, row.request_count) for row in page.rows} == {("alice", 1)}
            for wrong, field in (
                ({"group_by": ["request"], "largest_first": True}, "largest_first"),
                ({"group_by": ["label:" + "x" * 65]}, "label_key"),
            ):
                with pytest.raises(InvalidRequest, match=field):
                    next(billing.get_usage(month, **wrong))
            with pytest.raises(InvalidRequest, match="format"):
                billing.export_month(month, MonthExportFormat.INVOICE_PDF, tags=["end_user"])
            with pytest.raises(InvalidRequest, match="tags"):
                billing.export_month(month, MonthExportFormat.FOCUS_CSV, tags=["day"])

    await asyncio.to_thread(read)
    environment = {
        "WEIR_ADDRESS": service.address,
        "WEIR_API_KEY": tenant.secret,
        "WEIR_HOME": str(tmp_path),
        "COLUMNS": "80",
    }
    arguments = ["usage", "--by", "end-user,label:team", "--label", "team=search"]
    shown = await asyncio.to_thread(
        CliRunner(env=environment).invoke, app, arguments, catch_exceptions=False
    )
    assert shown.exit_code == 0, shown.output
    [line] = [line for line in shown.stdout.splitlines() if "alice" in line]
    assert line.split()[:3] == ["alice", "search", "1"]
