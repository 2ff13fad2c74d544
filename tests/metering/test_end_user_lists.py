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
    Quota,
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
from metering.store.db import Sessions, database_now
from metering.tenants.tenants import find_organization
from metering.tenants.usage_subjects import (
    NOBODY,
    EndUserState,
    archive_idle,
    create_usage_subject,
    end_users_page,
    find_end_user,
    state_of,
)
from tests.metering.queries import execute_unguarded, rows_read
from tests.metering.usage import Acme, Consumed, Customer, add_usage, new_customer

COUNT = 4000  # end users of each of two customers
PAGE_SIZE = 20
EVENTS = 4  # of each end user
READ_MAX = 12 * PAGE_SIZE  # rows of one table
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
    # Erased ones have no name.
    erased = "UPDATE usage_subjects SET name = NULL, erased_at = now(), archived_at = now()"
    await execute_unguarded(acme.sessions, erased + " WHERE name LIKE '%9999'")
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
    page, _ = await end_users_page(
        session, crowd.owner.id, page_size=PAGE_SIZE, page_token=after
    )
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
    assert len(await list_quotas(session, organization="acme")) == 2


async def limits_of_all(session: AsyncSession, crowd: Crowd) -> Any:
    assert len(await list_quotas(session)) == 4


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
            await read(session, crowd)
            counts = await rows_read(session)
            await session.rollback()
        few = {name: count for name, count in counts.items() if count <= READ_MAX}
        assert few == counts, read.__name__
        assert sum(counts.values()) > 0, "rows are counted"


async def test_a_scan_of_all_end_users_would_be_seen(acme: Acme, crowd: Crowd) -> None:
    async with acme.sessions() as session:
        await session.execute(text("SELECT sum(limit_value) FROM quotas WHERE subject = 'label'"))
        assert (await rows_read(session))["quotas"] > READ_MAX
