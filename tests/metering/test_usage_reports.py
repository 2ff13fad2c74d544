"""Breakdown of a month: rows, sums, pages, late usage, query plan."""

from __future__ import annotations

import base64
import uuid
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import TokenKind
from metering.core.pages import page_token
from metering.invoicing.months import month_report
from metering.invoicing.resale import find_statement
from metering.ledger.rating import rate_all_pending
from metering.pricing.resale_prices import ResalePrice
from metering.reports.usage_reports import (
    NOT_GIVEN,
    Days,
    Grouping,
    Groups,
    Share,
    UsageFilter,
    UsageRow,
    find_end_user_id,
    group_statement,
    own_usage,
    parameters_of,
    period_of,
    usage_page,
    usage_total,
)
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import create_project, find_organization
from tests.metering.queries import execute_unguarded
from tests.metering.usage import Acme, Consumed, Customer, add_usage, new_customer, new_price

DAY = Grouping.DAY
LAST = date(2026, 11, 30)
FIRST, SECOND = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, 23, 59, 59, tzinfo=UTC)


def of(customer: Customer, month: str = "2026-11") -> UsageFilter:
    """Return all usage of a customer's month."""
    return UsageFilter(month, customer.organization_id)


async def rows(
    sessions: Sessions, what: UsageFilter, *by: Grouping, **terms: Any
) -> tuple[UsageRow, ...]:
    """Return all rows, in small pages. terms: of `Groups`."""
    groups = Groups(by, **terms)
    found: list[UsageRow] = []
    token = ""
    async with sessions() as session:
        while True:
            page = await usage_page(session, what, groups, page_size=2, token=token)
            found += page.rows
            if not (token := page.next_token):
                return tuple(found)


async def second_key(session: AsyncSession) -> Customer:
    """Create another project of `acme` with its own key."""
    await create_project(session, organization="acme", name="chat", actor="test")
    key, secret = await create_api_key(
        session,
        organization="acme",
        project="chat",
        name="bot",
        terms=KeyTerms(scopes=("inference",)),
        actor="test",
    )
    return Customer(key.organization_id, "acme", key, secret)


async def test_a_row_reports_tokens_by_kind_and_the_ways_requests_ended(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        await add_usage(
            session,
            acme.customer,
            acme.price,
            [
                Consumed(100, 40, 20, "stop", FIRST),
                Consumed(10, 0, 7, "cancelled", FIRST),
                Consumed(50, 50, 0, "deadline", FIRST),
                Consumed(5, 0, 1, "quota_exhausted", FIRST),
                Consumed(3, 0, 2, "failed", FIRST),
            ],
        )
        other = await new_customer(session, "bolt")
        await add_usage(session, other, acme.price, [Consumed(9_999, 0, 9_999, "stop", FIRST)])
    await rate_all_pending(acme.sessions)
    moved = "UPDATE usage_events SET migration_count = 2 WHERE outcome IN ('stop', 'failed')"
    await execute_unguarded(acme.sessions, moved)  # triggers prevent every change of an event

    (row,) = await rows(acme.sessions, of(acme.customer), DAY)

    assert row.migration_count == 4, "of two requests of this customer"
    assert (row.day, row.request_count) == (date(2026, 11, 1), 5)
    assert row.token_counts == {
        TokenKind.INPUT: 78,
        TokenKind.CACHED_INPUT: 90,
        TokenKind.OUTPUT: 30,
        TokenKind.REASONING: 0,
        TokenKind.EMBEDDING: 0,
    }
    assert sum(row.token_counts.values()) == 168 + 30
    assert row.cancelled == Share(2, 67, 10 * 150_000 + 7 * 600_000 + 50 * 15_000)
    assert row.limited == Share(1, 6, 5 * 150_000 + 600_000)
    assert row.failed == Share(1, 5, 3 * 150_000 + 2 * 600_000)
    assert (row.amount_picos, row.pending_picos) == (78 * 150_000 + 90 * 15_000 + 30 * 600_000, 0)
    assert (row.organization_name, row.currency_code, row.late) == ("acme", "USD", False)


async def test_rows_of_every_grouping_add_up_to_the_bill(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        bot = await second_key(session)
        dearer = await new_price(session, "large")
        for who, what in ((acme.customer, acme.price), (acme.customer, dearer), (bot, acme.price)):
            await add_usage(
                session,
                who,
                what,
                [
                    Consumed(n, n // 2, n, "stop", FIRST + timedelta(hours=7 * n))
                    for n in range(1, 30)
                ],
            )
    await rate_all_pending(acme.sessions)
    async with acme.sessions() as session:
        bill = await month_report(session, organization="acme", month="2026-11")
        total = await usage_total(session, of(acme.customer))

    for by in (
        (DAY,),
        (Grouping.PROJECT, Grouping.API_KEY),
        (Grouping.MODEL, DAY),
        (Grouping.API_KEY,),
        (Grouping.REQUEST,),
    ):
        found = await rows(acme.sessions, of(acme.customer), *by)
        assert sum(row.amount_picos for row in found) == bill.total_picos == total.amount_picos
        assert (
            sum(sum(row.token_counts.values()) for row in found)
            == sum(line.token_count for line in bill.lines)
            == sum(total.token_counts.values())
        )
        assert sum(row.request_count for row in found) == 87 == total.request_count
    projects = await rows(acme.sessions, of(acme.customer), Grouping.PROJECT, Grouping.API_KEY)
    assert {(row.project_name, row.api_key_name, row.request_count) for row in projects} == {
        ("search", "all", 58),
        ("chat", "bot", 29),
    }


async def test_a_filter_leads_from_the_day_to_the_requests(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        bot = await second_key(session)
        await add_usage(
            session,
            acme.customer,
            acme.price,
            [Consumed(1, 0, 1, "stop", FIRST), Consumed(2, 0, 2, "stop", SECOND)],
        )
        await add_usage(
            session,
            bot,
            acme.price,
            [Consumed(4, 0, 4, "failed", SECOND), Consumed(8, 0, 8, "stop", SECOND)],
        )
    await rate_all_pending(acme.sessions)

    key = UsageFilter(
        "2026-11",
        acme.organization_id,
        SECOND.date(),
        bot.key.project_id,
        bot.key.id,
        "demo",
    )
    found = await rows(acme.sessions, key, Grouping.REQUEST)

    assert [(row.outcome, row.token_counts[TokenKind.OUTPUT], row.settled_at) for row in found] == [
        ("failed", 4, SECOND),
        ("stop", 8, SECOND),
    ]
    assert len({row.request_id for row in found}) == 2
    assert {row.api_key_prefix for row in found} == {bot.key.prefix}
    assert (
        await rows(
            acme.sessions,
            UsageFilter("2026-11", acme.organization_id, date(2026, 11, 3)),
            DAY,
        )
        == ()
    )


async def test_unposted_usage_is_pending_and_late_usage_is_not_a_request(acme: Acme) -> None:
    hold = uuid.uuid4()
    await acme.use(Consumed(1, 0, 1, "failed", FIRST, hold_id=hold))
    await rate_all_pending(acme.sessions)
    await acme.use(Consumed(0, 0, 2, "failed", FIRST, hold_id=hold, part=1))

    (row,) = await rows(acme.sessions, of(acme.customer), DAY)

    assert (row.request_count, row.token_counts[TokenKind.OUTPUT]) == (1, 3)
    assert (row.amount_picos, row.pending_picos) == (750_000, 1_200_000)
    assert row.failed == Share(1, 4, 1_950_000)


async def test_usage_of_a_closed_month_is_shown_in_the_month_that_charges_it(acme: Acme) -> None:
    october = datetime(2026, 10, 31, 12, tzinfo=UTC)
    await acme.use(Consumed(1, 0, 1, "stop", october))
    await rate_all_pending(acme.sessions)
    await acme.mark_closed(date(2026, 10, 1), FIRST)
    await acme.use(Consumed(0, 0, 5, "stop", october), Consumed(0, 0, 7, "stop", FIRST))
    # Closed months accept no usage.
    assert [
        row.pending_picos for row in await rows(acme.sessions, of(acme.customer, "2026-10"), DAY)
    ] == [0]
    await rate_all_pending(acme.sessions)

    assert [
        (r.day, r.token_counts[TokenKind.OUTPUT], r.late)
        for r in await rows(acme.sessions, of(acme.customer, "2026-10"), DAY)
    ] == [(date(2026, 10, 31), 1, False)]
    assert [
        (r.day, r.token_counts[TokenKind.OUTPUT], r.late)
        for r in await rows(acme.sessions, of(acme.customer), DAY)
    ] == [
        (date(2026, 10, 31), 5, True),
        (date(2026, 11, 1), 7, False),
    ]


async def test_no_end_user_an_erased_one_and_an_empty_label_are_rows_of_their_own(
    acme: Acme,
) -> None:
    alice, bob, carol = [await acme.end_user(name) for name in ("alice", "bob", "carol")]
    await acme.use_and_rate(
        *(
            Consumed(count, settled_at=FIRST, end_user_id=who, labels=labels)
            for count, who, labels in (
                (1, None, {}),
                (2, alice, {"team": ""}),
                (4, bob, {"team": "a"}),
                (8, carol, {"team": "a", "x": "y"}),
            )
        )
    )
    await acme.erase(bob, carol)

    by_user = await rows(acme.sessions, of(acme.customer), Grouping.END_USER)
    by_team = await rows(acme.sessions, of(acme.customer), Grouping.LABEL, label_key="team")
    requests = await rows(acme.sessions, of(acme.customer), Grouping.REQUEST)

    assert {(r.end_user_id, r.end_user, r.token_counts[TokenKind.INPUT]) for r in by_user} == {
        (None, None, 1),
        (alice, "alice", 2),
        (bob, None, 4),
        (carol, None, 8),
    }
    assert [(row.label_value, row.token_counts[TokenKind.INPUT]) for row in by_team] == [
        (None, 1),
        ("", 2),
        ("a", 12),
    ]
    assert {(row.end_user_id, row.end_user) for row in requests} == {
        (None, None),
        (alice, "alice"),
        (bob, None),
        (carol, None),
    }


@pytest.mark.parametrize(
    "border",
    [
        "2028-02-29",  # a leap day begins
        "2028-03-01",  # and ends, with its month
        "2027-03-01",
        "2027-01-01",
        "2027-01-04",  # a Monday
        "2026-11-20T13:00",
    ],
)
async def test_hours_days_weeks_and_months_of_reports_are_those_of_utc(
    acme: Acme, border: str
) -> None:
    """Rows of usage in the last and the first microsecond, in a session with another time zone."""
    after = datetime.fromisoformat(border).replace(tzinfo=UTC)
    before = after - timedelta(microseconds=1)
    ada = await acme.end_user("ada")
    price = {"markup_milli": 2000, "model": "", "request_picos": 0, "effective_at": after}
    of_acme = {"organization_id": acme.organization_id}
    async with acme.sessions.begin() as session:
        await session.execute(insert(ResalePrice).values(price | of_acme))
    used = [Consumed(n, settled_at=at, end_user_id=ada) for n, at in ((1, before), (2, after))]
    await acme.use_and_rate(*used)

    async def counts(period: str | Days, *by: Grouping) -> dict[Any, int]:
        """Return tokens by the group's value."""
        what = UsageFilter(period, acme.organization_id)
        page = await usage_page(session, what, Groups(by))
        return {getattr(row, by[0]): row.token_counts[TokenKind.INPUT] for row in page.rows}

    def week_of(at: datetime) -> Days:
        monday = at.date() - timedelta(days=at.weekday())
        return Days(monday, monday + timedelta(days=6))

    async with acme.sessions() as session:
        owner = await find_organization(session, "acme")
        await session.execute(text("SET LOCAL TIME ZONE 'Asia/Kathmandu'"))
        both = Days(before.date(), after.date())
        hour = before.replace(minute=0, second=0, microsecond=0)
        assert await counts(both, Grouping.HOUR) == {hour: 1, after: 2}
        days = (
            {before.date(): 1, after.date(): 2}
            if before.date() < after.date()
            else {after.date(): 3}
        )
        assert await counts(both, DAY) == days
        for at, tokens in ((before, 1), (after, 2)):
            month = f"{at:%Y-%m}"
            other = after if at is before else before
            in_month = tokens if f"{other:%Y-%m}" != month else 3
            assert sum((await counts(month, DAY)).values()) == in_month
            found = await find_statement(session, owner, month, "ada")
            amounts = {1: 150_000, 2: 2 * 150_000 * 2, 3: 5 * 150_000}
            assert (found.token_count, found.amount_picos) == (in_month, amounts[in_month])
            week, day = week_of(at), Days(at.date(), at.date())
            in_week = tokens if week_of(other) != week else 3
            assert sum((await counts(week, DAY)).values()) == in_week
            assert await counts(day, DAY) == {at.date(): days[at.date()]}


async def test_a_key_lists_only_its_own_end_users_and_labels(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        key, secret = await create_api_key(
            session, organization="acme", project="search", name="more", actor="test"
        )
    more = Customer(key.organization_id, "acme", key, secret)
    alice, bob = await acme.end_user("alice"), await acme.end_user("bob")
    async with acme.sessions.begin() as session:
        for who, end_user in ((acme.customer, alice), (more, bob), (more, alice)):
            used = Consumed(1, settled_at=FIRST, end_user_id=end_user, labels={"of": str(end_user)})
            await add_usage(session, who, acme.price, [used])
    own_key = replace(of(acme.customer), api_key_id=acme.customer.key.id)
    project = replace(of(acme.customer), project_id=acme.customer.key.project_id)

    async with acme.sessions() as session:
        by_user = await own_usage(session, own_key, Groups((Grouping.END_USER,)))
        by_label = await own_usage(session, own_key, Groups((Grouping.LABEL,), "of"))
        of_alice = await own_usage(session, replace(project, end_user_id=alice), Groups((DAY,)))
        for groups in (Groups((Grouping.END_USER,)), Groups((DAY, Grouping.LABEL), "of")):
            with pytest.raises(InvalidValue, match=r"group_by.*with `project`"):
                await own_usage(session, project, groups)

    assert [row.end_user for row in by_user.rows] == ["alice"]
    assert [row.label_value for row in by_label.rows] == [str(alice)]
    assert of_alice.total.request_count == 2, "of all keys of the project"


async def test_an_end_user_is_found_by_name_within_its_organization(acme: Acme) -> None:
    alice = await acme.end_user("alice")
    async with acme.sessions.begin() as session:
        bolt = await new_customer(session, "bolt")
        assert await find_end_user_id(session, acme.organization_id, "alice") == alice
        assert await find_end_user_id(session, acme.organization_id, "") is None
        for organization_id, name in (
            (bolt.organization_id, "alice"),
            (acme.organization_id, "bob"),
        ):
            found = await find_end_user_id(session, organization_id, name)
            assert found == NOT_GIVEN, "matches no usage"
        with pytest.raises(InvalidValue, match="end_user"):
            await find_end_user_id(session, acme.organization_id, "a\nb")


@pytest.mark.parametrize(
    ("month", "first", "last", "field"),
    [
        ("2026-13", "", "", "month"),
        ("2026-11", "2026-11-01", "", "month"),
        ("2026-11", "", "2026-11-01", "month"),
        ("", "2026-11-31", "", "first_day"),
        ("", "yesterday", "", "first_day"),
        ("", "2026-11-01", "2026-11", "last_day"),
        ("", "", "2026-11-01", "first_day"),
        ("", "2026-11-02", "2026-11-01", "last_day"),
        ("", "2026-08-01", "2026-11-01", "last_day"),
        ("", "9999-12-01", "9999-12-31", "last_day"),
    ],
)
def test_a_period_that_cannot_be_is_refused_by_name(
    month: str, first: str, last: str, field: str
) -> None:
    with pytest.raises(InvalidValue, match=field):
        period_of(month, first, last, date(2026, 11, 27))


def test_a_period_ends_today_and_begins_with_the_month() -> None:
    today = date(2026, 11, 27)

    assert period_of("", "", "", today) == Days(date(2026, 11, 1), today)
    assert period_of("", "2026-08-28", "", today) == Days(date(2026, 8, 28), today)
    assert period_of("2026-02", "", "", today) == "2026-02"


async def test_all_customers_are_separate_with_their_currency(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        bolt = await new_customer(session, "bolt")
        await add_usage(session, acme.customer, acme.price, [Consumed(1, 0, 1, "stop", FIRST)])
        await add_usage(
            session,
            bolt,
            acme.price,
            [Consumed(2, 0, 2, "stop", FIRST), Consumed(2, 0, 2, "stop", SECOND)],
        )
    await rate_all_pending(acme.sessions)

    found = await rows(acme.sessions, UsageFilter("2026-11"), DAY)

    assert sorted(
        (row.organization_name, str(row.day), row.token_counts[TokenKind.OUTPUT]) for row in found
    ) == [
        ("acme", "2026-11-01", 1),
        ("bolt", "2026-11-01", 2),
        ("bolt", "2026-11-02", 2),
    ]


async def test_bad_questions_are_refused_by_name(sessions: Sessions, customer: Customer) -> None:
    async with sessions() as session:
        for groups, what, field in (
            (Groups((Grouping.LABEL,)), of(customer), "label_key"),
            (Groups((Grouping.LABEL,), "\n"), of(customer), "label_key"),
            (Groups((Grouping.LABEL,), "x" * 65), of(customer), "label_key"),
            (Groups((DAY,), "team"), of(customer), "label_key"),
            (Groups((DAY,)), replace(of(customer), labels={"": "x"}), "labels"),
            (Groups((DAY,)), replace(of(customer), labels={"a": "x\0"}), "labels"),
            (Groups((DAY,), largest_first=True), UsageFilter("2026-11"), "largest_first"),
            (Groups((Grouping.REQUEST,), largest_first=True), of(customer), "largest_first"),
        ):
            with pytest.raises(InvalidValue, match=field):
                await usage_page(session, what, groups)
        label = Groups((Grouping.LABEL,), "team")
        for forged in (page_token("=\0"), page_token("x"), page_token("=" + "x" * 513)):
            with pytest.raises(InvalidValue, match="page_token"):
                await usage_page(session, of(customer), label, token=forged)
        for by, size, token, field in (
            ((), 0, "", "group_by"),
            ((DAY, DAY), 0, "", "group_by"),
            ((Grouping.REQUEST, DAY), 0, "", "group_by"),
            ((DAY,), 10_001, "", "page_size"),
            ((DAY,), -1, "", "page_size"),
            ((DAY,), 0, "%%%", "page_token"),
            ((DAY,), 0, "WyJ4Il0=", "page_token"),
            ((DAY,), 0, "e30=", "page_token"),
            ((Grouping.REQUEST,), 0, "WyIyMDI2LTExLTAxIl0=", "page_token"),
            ((Grouping.REQUEST,), 0, page_token(FIRST, 2**63), "page_token"),
            ((DAY,), 0, base64.urlsafe_b64encode(b"[" * 200_000).decode(), "page_token"),
        ):
            with pytest.raises(InvalidValue, match=field):
                await usage_page(session, of(customer), Groups(by), page_size=size, token=token)
        with pytest.raises(InvalidValue, match="group_by"):
            await usage_page(session, UsageFilter("2026-11"), Groups((Grouping.REQUEST,)))
        with pytest.raises(InvalidValue, match="month"):
            await usage_page(session, of(customer, "2026-13"), Groups((DAY,)))


async def test_the_statement_reads_the_index_of_the_customer_and_no_other_time(acme: Acme) -> None:
    """The plan must bound the scan by customer and time."""
    async with acme.sessions.begin() as session:
        other = await new_customer(session, "bolt")
        for who, start in (
            (acme.customer, FIRST),
            (acme.customer, FIRST - timedelta(days=90)),
            (other, FIRST),
            (other, SECOND),
        ):
            await add_usage(
                session,
                who,
                acme.price,
                [Consumed(1, 0, 1, "stop", start + timedelta(minutes=n)) for n in range(500)],
            )
    await rate_all_pending(acme.sessions)
    async with acme.sessions.begin() as session:
        await session.execute(text("ANALYZE usage_events"))
        what, parameters = (
            of(acme.customer),
            await parameters_of(session, of(acme.customer)) | {"limit": 100},
        )
        statement = group_statement(what, Groups((DAY,)), "", parameters)
        plan = "\n".join((await session.scalars(text("EXPLAIN " + statement), parameters)).all())

    assert "organization_id_settled_at" in plan
    condition = next(
        line for line in plan.splitlines() if "Index Cond" in line and "settled_at" in line
    )
    assert "organization_id = " in condition
    assert "settled_at < " in condition


async def test_a_filter_by_end_user_reads_the_index_of_end_users(acme: Acme) -> None:
    await execute_unguarded(acme.sessions, "SELECT create_usage_partition('2026-11-01')")
    end_users = [await acme.end_user(f"user-{number}") for number in range(20)]
    await acme.use_and_rate(
        *(
            Consumed(1, settled_at=FIRST + timedelta(minutes=n), end_user_id=end_users[n % 20])
            for n in range(2000)
        )
    )
    for what in (of(acme.customer), replace(of(acme.customer), period=Days(FIRST.date(), LAST))):
        one = replace(what, end_user_id=end_users[7])
        async with acme.sessions.begin() as session:
            await session.execute(text("ANALYZE usage_events"))
            parameters = await parameters_of(session, one) | {"limit": 100}
            statement = group_statement(one, Groups((DAY,)), "", parameters)
            plan = "\n".join(
                (await session.scalars(text("EXPLAIN " + statement), parameters)).all()
            )

        assert "ix_usage_events_2026_11_end_user_id_settled_at" in plan
        assert "Seq Scan on usage_events" not in plan


async def test_the_calendars_last_day_has_no_usage(sessions: Sessions, customer: Customer) -> None:
    """No later date exists."""
    async with sessions() as session:
        last = UsageFilter("2026-11", customer.organization_id, day=date(9999, 12, 31))
        assert (await usage_page(session, last, Groups((DAY,)))).rows == ()


async def test_names_that_no_model_has_are_refused_before_the_database_refuses_them(
    sessions: Sessions, customer: Customer
) -> None:
    owner = customer.organization_id
    async with sessions() as session:
        with pytest.raises(InvalidValue, match="model"):
            await usage_page(session, UsageFilter("2025-10", owner, model="a\0"), Groups((DAY,)))
        with pytest.raises(InvalidValue, match="page_token"):
            await usage_page(
                session,
                UsageFilter("2025-10", owner),
                Groups((Grouping.MODEL,)),
                token=page_token("a\0"),
            )
