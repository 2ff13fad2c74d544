"""Lists of end users: order, pages, usage of the month, tightest limit, and the rows they read."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.alerts import Alert, list_alerts
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import (
    Organization,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    UsageSubject,
)
from metering.core.pages import page_token
from metering.quotas.quota_admin import delete_quota, set_quota
from metering.quotas.quota_rules import QuotaRule, QuotaState
from metering.quotas.quota_states import list_quotas, tightest
from metering.reports.end_users import get_end_user, with_usage
from metering.reports.usage_reports import Days, Grouping, Groups, UsageFilter, usage_page
from metering.store.db import database_now
from metering.tenants.tenants import find_organization
from metering.tenants.usage_subjects import (
    NOBODY,
    EndUserState,
    archive_idle,
    end_users_page,
    find_end_user,
    state_of,
)
from tests.metering.queries import execute_unguarded, rows_read
from tests.metering.usage import Acme, Consumed, add_usage, new_customer

COUNT = 4000  # end users of each of two customers
PAGE_SIZE = 20
EVENTS = 4  # of each end user
READ_MAX = 8 * PAGE_SIZE  # rows of one table
HOSTILE = ["<b>", "a/b%2F..", "a b", "مستخدم", "👩‍👧", "é" * 256, "%", "_", "'; --", "\U0010fffdz"]

END_USERS = """
INSERT INTO usage_subjects (organization_id, kind, name)
SELECT '{0}', 'end_user', 'user-' || lpad(n::text, 5, '0') FROM generate_series(1, {1}) n
"""
SELECTORS = """
INSERT INTO quotas (subject, subject_id, for_each, dimension, limit_value)
SELECT 'organization', '{0}', 'end_user', dimension, 1000
FROM unnest(ARRAY['tokens_per_month', 'tokens_per_day']) AS d(dimension)
"""
LIMITS = """
INSERT INTO quotas (subject, subject_id, within_id, selector_id, dimension, limit_value)
SELECT 'end_user', u.id, s.subject_id, s.id, s.dimension, 1000
FROM quotas s
JOIN usage_subjects u ON u.organization_id = s.subject_id
WHERE s.for_each <> ''
"""
# Besides, an own limit of each end user, which lists leave out.
OWN_LIMITS = """
INSERT INTO quotas (subject, subject_id, within_id, dimension, limit_value)
SELECT 'end_user', id, organization_id, 'requests_per_day', 1000 FROM usage_subjects
"""
COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start, used)
SELECT id, date_trunc('month', now()), 900 FROM quotas WHERE selector_id IS NOT NULL
"""
ALERTS = """
INSERT INTO alerts (organization_id, quota_id, window_start, threshold, limit_value, used)
SELECT within_id, id, date_trunc('month', now()), 80, 1000, 900
FROM quotas WHERE selector_id IS NOT NULL
"""
EVENTS_OF_EACH = """
INSERT INTO usage_events (
    hold_id, organization_id, project_id, api_key_id, request_id, model, outcome,
    input_token_count, cached_input_token_count, generated_token_count, delivered_token_count,
    billed_token_count, price_version_id, cost_picos, labels, admitted_at, settled_at, end_user_id)
SELECT gen_random_uuid(), '{0}', '{1}', '{2}', gen_random_uuid(), 'demo', 'stop', 1, 0, 0, 0, 0,
       {3}, 150000, '{{}}', at, at, u.id
FROM usage_subjects u, generate_series(1, {4}) n,
     LATERAL (SELECT date_trunc('month', now()) + n * interval '1 second' AS at) t
WHERE u.organization_id = '{0}'
"""


@dataclass(frozen=True, slots=True)
class Crowd:
    """A customer beside another one with as many end users."""

    owner: Organization
    page: list[UsageSubject]


@pytest.fixture
async def crowd(acme: Acme) -> Crowd:
    async with acme.sessions.begin() as session:
        other = await new_customer(session, "bolt")
        month = (await database_now(session)).astimezone(UTC).date().replace(day=1)
    statements = [f"SELECT create_usage_partition('{month}')"]
    for who in (acme.customer, other):
        ids = (who.organization_id, who.key.project_id, who.key.id, acme.price.prices.version)
        statements += [
            END_USERS.format(who.organization_id, COUNT),
            SELECTORS.format(who.organization_id),
            EVENTS_OF_EACH.format(*ids, EVENTS),
        ]
    await execute_unguarded(acme.sessions, *statements, LIMITS, OWN_LIMITS, COUNTERS, ALERTS)
    async with acme.sessions.begin() as session:
        await session.execute(text("ANALYZE"))
        owner = await find_organization(session, "acme")
        page, _ = await end_users_page(session, owner.id, page_size=PAGE_SIZE)
        return Crowd(owner, page)


Read = Callable[[AsyncSession, Crowd], Awaitable[Any]]


async def first_page(session: AsyncSession, crowd: Crowd) -> Any:
    page, token = await end_users_page(session, crowd.owner.id, page_size=PAGE_SIZE)
    assert token
    return await with_usage(session, crowd.owner, page)


async def middle_page(session: AsyncSession, crowd: Crowd) -> Any:
    after = page_token("user-02000", NOBODY)
    page, _ = await end_users_page(session, crowd.owner.id, page_size=PAGE_SIZE, page_token=after)
    assert page[0].name == "user-02001"
    return await with_usage(session, crowd.owner, page)


async def searched(session: AsyncSession, crowd: Crowd) -> Any:
    page, _ = await end_users_page(session, crowd.owner.id, prefix="user-0399", page_size=PAGE_SIZE)
    assert [each.name for each in page] == [f"user-0399{n}" for n in range(10)]
    return await with_usage(session, crowd.owner, page)


async def one(session: AsyncSession, crowd: Crowd) -> Any:
    found = await get_end_user(session, crowd.owner, "user-00007")
    assert (found.month_request_count, len(found.quotas)) == (EVENTS, 3)


async def latest_requests(session: AsyncSession, crowd: Crowd) -> Any:
    today = (await database_now(session)).astimezone(UTC).date()
    of = UsageFilter(
        Days(today.replace(day=1), today), crowd.owner.id, end_user_id=crowd.page[0].id
    )
    latest = Groups((Grouping.REQUEST,), latest_first=True)
    assert len((await usage_page(session, of, latest)).rows) == EVENTS


async def alerts(session: AsyncSession, crowd: Crowd) -> Any:
    found, _ = await list_alerts(session, organization_id=crowd.owner.id, end_user="user-00007")
    assert [each.subject_name for each in found] == ["user-00007"] * 2


async def limits_of_one_customer(session: AsyncSession, crowd: Crowd) -> Any:
    assert len((await list_quotas(session, organization="acme"))[0]) == 2


async def limits_of_all(session: AsyncSession, crowd: Crowd) -> Any:
    assert len((await list_quotas(session))[0]) == 4


async def nobody_archived(session: AsyncSession, crowd: Crowd) -> Any:
    assert await archive_idle(session) == 0


async def some_archived(session: AsyncSession, crowd: Crowd) -> Any:
    idle = (UsageSubject.last_used_on, datetime.now(UTC).date() - timedelta(days=50))
    ids = [each.id for each in crowd.page[:3]]
    await session.execute(
        update(UsageSubject).where(UsageSubject.id.in_(ids)).values({idle[0]: idle[1]})
    )
    assert await archive_idle(session) == 3


READS: list[Read] = [
    first_page, middle_page, searched, one, latest_requests, alerts, limits_of_one_customer,
    limits_of_all, nobody_archived, some_archived,
]  # fmt: skip


async def test_each_list_reads_the_rows_that_it_shows(acme: Acme, crowd: Crowd) -> None:
    """Counted by PostgreSQL, beside thousands of other end users, limits, alerts and events."""
    for read in READS:
        async with acme.sessions() as session:
            before = await rows_read(session)
            await read(session, crowd)
            counts = await rows_read(session) - before
            await session.rollback()
        assert not {name for name, count in counts.items() if count > READ_MAX}, (
            read.__name__,
            counts,
        )


async def test_a_scan_of_all_end_users_would_be_seen(acme: Acme, crowd: Crowd) -> None:
    async with acme.sessions() as session:
        before = await rows_read(session)
        await session.execute(text("SELECT sum(limit_value) FROM quotas WHERE subject = 'label'"))
        assert (await rows_read(session) - before)["quotas"] > READ_MAX


async def test_end_users_are_listed_in_pages_by_name_then_erased_ones(acme: Acme) -> None:
    ids = {name: await acme.end_user(name) for name in [*HOSTILE, "b", "a", "A", "gone", "lost"]}
    names = [name for name in ids if name not in ("gone", "lost")]
    await execute_unguarded(
        acme.sessions,
        "UPDATE usage_subjects SET archived_at = NULL WHERE name <> 'a'",
        "UPDATE usage_subjects SET name = NULL, receipt_salt = NULL, erased_at = now(),"
        " archived_at = now() WHERE name IN ('gone', 'lost')",
    )
    async with acme.sessions() as session:
        found, token, pages = [], "", 0
        while token or not pages:
            page, token = await end_users_page(
                session, acme.organization_id, page_size=2, page_token=token
            )
            found += page
            pages += 1
        by_state = {
            state: (await end_users_page(session, acme.organization_id, state=state))[0]
            for state in EndUserState
        }
        for prefix in ("a", "A", "%", "م", "👩", "é" * 256, "<", "nobody"):
            page, _ = await end_users_page(session, acme.organization_id, prefix=prefix)
            expected = sorted(each for each in names if each.startswith(prefix))
            assert [each.name for each in page] == expected, prefix

    assert [each.name for each in found[:-2]] == sorted(names, key=str.encode)
    assert [each.id for each in found[-2:]] == sorted((ids["gone"], ids["lost"]))
    assert pages == (len(ids) + 1) // 2
    for state, listed in by_state.items():
        assert [each.id for each in listed] == [
            each.id for each in found if state_of(each) is state
        ]
        assert listed


@pytest.mark.parametrize(
    "token", [page_token("a\nb", NOBODY), page_token("a"), page_token("a", 1), "x"]
)
async def test_a_forged_token_is_refused(acme: Acme, token: str) -> None:
    async with acme.sessions() as session:
        with pytest.raises(InvalidValue, match="page_token"):
            await end_users_page(session, acme.organization_id, page_token=token)
        for size in (0, 1001):
            with pytest.raises(InvalidValue, match="page_size"):
                await end_users_page(session, acme.organization_id, page_size=size)


async def test_an_end_user_is_found_by_name_else_by_id_within_its_customer(acme: Acme) -> None:
    alice = await acme.end_user("alice")
    named_so = await acme.end_user(str(alice))
    async with acme.sessions.begin() as session:
        bolt = await new_customer(session, "bolt")
        for ref, expected in (
            ("alice", alice),
            (str(alice), named_so),  # a name wins
            (str(named_so), named_so),
            (str(uuid.uuid4()), None),
            ("Alice", None),
        ):
            found = await find_end_user(session, acme.organization_id, ref)
            assert (None if found is None else found.id) == expected
            assert await find_end_user(session, bolt.organization_id, ref) is None


async def test_usage_of_the_month_equals_the_report(acme: Acme) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    first = now.replace(day=1, hour=0, minute=0, second=0)
    alice, bob = await acme.end_user("alice"), await acme.end_user("bob")
    await acme.use_and_rate(Consumed(1, settled_at=now, end_user_id=alice))
    await acme.use_and_rate(Consumed(20, settled_at=first, end_user_id=alice))
    await acme.use_and_rate(
        Consumed(300, settled_at=first - timedelta(seconds=1), end_user_id=alice)
    )
    async with acme.sessions.begin() as session:
        owner = await find_organization(session, "acme")
        await add_usage(  # not posted yet
            session, acme.customer, acme.price, [Consumed(4000, settled_at=now, end_user_id=alice)]
        )
        page, _ = await end_users_page(session, owner.id)
        listed = {each.subject.id: each for each in await with_usage(session, owner, page)}
        shown = await get_end_user(session, owner, str(alice))
        with pytest.raises(NotFound, match="carol"):
            await get_end_user(session, owner, "carol")

    assert (listed[alice].month_cost_picos, listed[alice].month_request_count) == (
        4021 * 150_000,
        3,
    )
    assert (listed[bob].month_cost_picos, listed[bob].month_request_count) == (0, 0)
    assert shown == listed[alice]


async def test_requests_of_an_end_user_are_listed_from_the_latest_in_pages(acme: Acme) -> None:
    alice = await acme.end_user("alice")
    start = datetime(2026, 11, 3, tzinfo=UTC)
    times = [start + timedelta(seconds=n // 2) for n in range(7)]  # some at one time
    await acme.use_and_rate(*(Consumed(1, settled_at=at, end_user_id=alice) for at in times))
    await acme.use_and_rate(Consumed(1, settled_at=start))
    of = UsageFilter("2026-11", acme.organization_id, end_user_id=alice)
    rows: list[Any] = []
    async with acme.sessions() as session:
        for groups in (
            Groups((Grouping.REQUEST,)),
            Groups((Grouping.REQUEST,), latest_first=True),
        ):
            found: list[Any] = []
            token = ""
            while token or not found:
                page = await usage_page(session, of, groups, page_size=2, token=token)
                found, token = [*found, *page.rows], page.next_token
            rows.append([row.request_id for row in found])
        with pytest.raises(InvalidValue, match="latest_first"):
            await usage_page(session, of, Groups((Grouping.DAY,), latest_first=True))

    assert rows[1] == rows[0][::-1]
    assert len(set(rows[1])) == 7


async def test_alerts_of_an_end_user_stay_when_its_limit_is_removed(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        for name in ("alice", "bob"):
            state = await set_quota(
                session,
                subject=QuotaSubject.ORGANIZATION,
                subject_ref="acme",
                key=QuotaKey(QuotaDimension.TOKENS_PER_DAY, end_user=name),
                terms=QuotaTerms(10),
                actor="test",
            )
            window = {"window_start": datetime(2026, 11, 3, tzinfo=UTC), "limit_value": 10}
            await session.execute(
                insert(Alert).values(
                    organization_id=acme.organization_id,
                    quota_id=state.quota_id,
                    threshold=80,
                    used=9,
                    **window,
                )
            )
            if name == "alice":
                await delete_quota(session, quota_id=str(state.quota_id), actor="test")
    async with acme.sessions() as session:
        for name in ("alice", "bob"):
            found, _ = await list_alerts(
                session, organization_id=acme.organization_id, end_user=name
            )
            assert [each.subject_name for each in found] == [name]
        with pytest.raises(NotFound):
            await list_alerts(session, organization_id=acme.organization_id, end_user="carol")
        with pytest.raises(InvalidValue, match="organization"):
            await list_alerts(session, organization_id=None, end_user="alice")


LIMIT = QuotaRule(
    id=uuid.UUID(int=1),
    subject=QuotaSubject.END_USER,
    subject_id=uuid.UUID(int=2),
    model="",
    dimension=QuotaDimension.TOKENS_PER_DAY,
    limit_value=100,
)


@pytest.mark.parametrize(
    ("limits", "expected"),  # limit, used, held, enforced; and the place of the tightest
    [
        ([], None),
        ([(100, 50, 0, True), (1000, 600, 0, True)], 1),
        ([(100, 50, 0, True), (1000, 400, 200, True)], 1),
        ([(100, 50, 0, True), (10, 10, 0, False)], 0),
        ([(10, 10, 0, False)], None),
        ([(100, 99, 0, True), (0, 0, 0, True)], 1),
        ([(10**18, 10**18 - 1, 0, True), (10**18 + 1, 10**18, 0, True)], 1),
        ([(100, 0, 0, True), (1000, 0, 0, True)], 0),
        ([(100, 150, 0, True), (0, 0, 0, True)], 0),
    ],
)
def test_the_tightest_limit_is_the_one_with_the_largest_share_used(
    limits: list[tuple[int, int, int, bool]], expected: int | None
) -> None:
    now = datetime(2026, 11, 3, tzinfo=UTC)
    states = [
        QuotaState(replace(LIMIT, limit_value=limit, enforced=enforced), used, held, now)
        for limit, used, held, enforced in limits
    ]

    assert tightest(states) is (None if expected is None else states[expected])
