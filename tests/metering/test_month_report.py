"""Report of a month: the ledger's numbers in one snapshot."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from metering.core.errors import InvalidValue, NotFound
from metering.core.models import Outcome, TokenKind
from metering.invoicing.month_report import MonthReport, Reconciliation, ReportLine, RequestCounts
from metering.invoicing.months import CANCELLED, COMPLETED, FAILED, LIMITED, month_report
from metering.ledger.ledger import month_bounds
from metering.ledger.rating import rate_all_pending
from metering.store.db import Sessions
from tests.metering import usage

BEGINS, ENDS = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)


async def report_of(
    sessions: Sessions, organization: str = "acme", month: str = "2026-11"
) -> MonthReport:
    async with sessions() as session:
        return await month_report(session, organization=organization, month=month)


async def test_a_month_is_shown_by_price_and_kind_with_cancelled_requests(acme: usage.Acme) -> None:
    async with acme.sessions.begin() as session:
        dearer = await usage.new_price(session, **usage.rates_of(300_000, 30_000, 900_000))
    async with acme.sessions.begin() as session:
        other = await usage.new_customer(session, "bolt")
        hold = uuid.uuid4()
        await usage.add_usage(
            session,
            acme.customer,
            acme.price,
            [
                usage.Consumed(100, 40, 20, "stop", BEGINS),
                usage.Consumed(100, 0, 7, "cancelled", ENDS - INSTANT),
                usage.Consumed(50, 50, 0, "deadline"),
                usage.Consumed(10, 0, 1, "quota_exhausted"),
                usage.Consumed(10, 0, 1, "failed", hold_id=hold),
                usage.Consumed(0, 0, 2, "failed", hold_id=hold, part=1),
                usage.Consumed(1_000, 0, 1_000, "stop", BEGINS - INSTANT),
                usage.Consumed(1_000, 0, 1_000, "stop", ENDS),
            ],
        )
        await usage.add_usage(session, acme.customer, dearer, [usage.Consumed(8, 0, 0, "length")])
        await usage.add_usage(session, other, acme.price, [usage.Consumed(5_000, 0, 5_000)])
    await rate_all_pending(acme.sessions)

    report = await report_of(acme.sessions)

    old, new = acme.price.prices.version, dearer.prices.version
    assert report.lines == (
        ReportLine("demo", old, TokenKind.INPUT, 4, 180, 100, 150_000, 180 * 150_000),
        ReportLine("demo", old, TokenKind.CACHED_INPUT, 2, 90, 50, 15_000, 90 * 15_000),
        ReportLine("demo", old, TokenKind.OUTPUT, 4, 31, 7, 600_000, 31 * 600_000),
        ReportLine("demo", new, TokenKind.INPUT, 1, 8, 0, 300_000, 8 * 300_000),
    )
    assert report.request_counts == RequestCounts(6, 2, 2, 1, 1)
    assert report.reconciliation == Reconciliation(309, 309, 0)
    assert report.reconciliation.balanced
    assert report.unrated_event_count == 0
    assert report == await report_of(acme.sessions, str(acme.organization_id))


async def test_unrated_usage_is_shown_separately(acme: usage.Acme) -> None:
    await acme.use(usage.Consumed(10, 0, 5), usage.Consumed(1, 0, 1))

    before = await report_of(acme.sessions)
    await rate_all_pending(acme.sessions)
    after = await report_of(acme.sessions)

    assert before.lines == ()
    assert before.unrated_event_count == 2
    assert before.request_counts.total_count == 2
    assert before.reconciliation == Reconciliation(17, 0, 17)
    assert after.reconciliation == Reconciliation(17, 17, 0)
    assert before.reconciliation.balanced
    assert after.reconciliation.balanced
    assert not Reconciliation(17, 15, 1).balanced


async def test_an_empty_month_is_a_report_too(sessions: Sessions, customer: usage.Customer) -> None:
    report = await report_of(sessions)

    assert report.lines == ()
    assert report.request_counts == RequestCounts(0, 0, 0, 0, 0)
    assert report.total_rounded_picos == 0


async def test_an_unknown_month_or_customer_fails(
    sessions: Sessions, customer: usage.Customer
) -> None:
    for month in ("", "2026-13", "2026-00", "2026-1", "26-11", "2026-11-01", "9999-12", "２026-11"):
        with pytest.raises(InvalidValue, match="month"):
            await report_of(sessions, month=month)
    with pytest.raises(NotFound):
        await report_of(sessions, organization="nobody")


def test_a_month_ends_where_the_next_begins() -> None:
    assert month_bounds("2026-11") == (BEGINS, ENDS)
    assert month_bounds("2026-12")[1] == month_bounds("2027-01")[0]


def test_every_outcome_is_counted_in_one_way() -> None:
    assert sorted((*COMPLETED, *CANCELLED, *LIMITED, *FAILED)) == sorted(Outcome)
