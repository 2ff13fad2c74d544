"""Quotas as admins set and read them."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, select, text

from metering.core.audit import list_audit_entries
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import QuotaCounter, QuotaDimension, QuotaSubject
from metering.quotas.quota_admin import (
    SETTABLE,
    delete_all_past_counters,
    delete_past_counters,
    delete_quota,
)
from metering.quotas.quota_rules import QuotaState, window_start
from metering.quotas.quota_states import list_quotas, quotas_for
from metering.store.db import Sessions
from tests.metering.usage import Customer, new_customer, new_limit


async def test_a_limit_set_again_keeps_its_usage(sessions: Sessions, customer: Customer) -> None:
    async def set_limit(limit_value: int) -> uuid.UUID:
        async with sessions.begin() as session:
            state = await new_limit(session, "acme", QuotaDimension.TOKENS_PER_MONTH, limit_value)
        assert (state.limit_value, state.resets_in_s is None) == (limit_value, False)
        return state.quota_id

    quota_id = await set_limit(100)
    async with sessions.begin() as session:
        for start, used in (
            (window_start(QuotaDimension.TOKENS_PER_MONTH, datetime.now(UTC)), 60),
            (datetime(2020, 1, 1, tzinfo=UTC), 7),
        ):
            await session.execute(
                insert(QuotaCounter).values(
                    quota_id=quota_id, window_start=start, used=used, held=5
                )
            )

    assert await set_limit(200) == quota_id
    assert await set_limit(200) == quota_id
    async with sessions() as session:
        (state,) = (await list_quotas(session))[0]
        changes = [
            entry for entry in await list_audit_entries(session) if entry.action == "quota.set"
        ]
    assert (state.used, state.held, state.remaining) == (60, 5, 135)
    assert state.now < (state.resets_at or state.now)
    assert [
        (entry.before and entry.before["limit_value"], entry.after and entry.after["limit_value"])
        for entry in changes
    ] == [
        (100, 200),
        (None, 100),
    ]


async def test_a_request_has_its_subjects_limits(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        await new_customer(session, "bolt")
        for subject, ref, model, dimension in (
            (QuotaSubject.API_KEY, customer.key.prefix, "", QuotaDimension.CONCURRENT_REQUESTS),
            (QuotaSubject.PROJECT, "acme/search", "demo", QuotaDimension.TOKENS_PER_DAY),
            (QuotaSubject.ORGANIZATION, "acme", "other", QuotaDimension.TOKENS_PER_DAY),
            (QuotaSubject.ORGANIZATION, "acme", "", QuotaDimension.REQUESTS_PER_MINUTE),
            (QuotaSubject.ORGANIZATION, "bolt", "", QuotaDimension.REQUESTS_PER_MINUTE),
        ):
            await new_limit(session, ref, dimension, 9, model=model, subject=subject)
    ids = (customer.organization_id, customer.key.project_id, customer.key.id)
    async with sessions() as session:
        for_demo = await quotas_for(session, subject_ids=ids, model="demo")
        for_any = await quotas_for(session, subject_ids=ids)
        of_acme = (await list_quotas(session, organization="acme"))[0]
        of_all = (await list_quotas(session))[0]

    assert [(state.subject, state.model, state.dimension) for state in for_demo] == [
        ("organization", "", "requests_per_minute"),
        ("project", "demo", "tokens_per_day"),
        ("api_key", "", "concurrent_requests"),
    ]
    assert for_demo[-1].resets_at is None
    assert [state.quota_id for state in of_acme] == [state.quota_id for state in for_any]
    assert (len(of_acme), len(of_all)) == (4, 5)


async def test_a_removed_limit_is_set_as_a_new_one(sessions: Sessions, customer: Customer) -> None:
    async def set_limit() -> uuid.UUID:
        async with sessions.begin() as session:
            state = await new_limit(
                session,
                "acme/search",
                QuotaDimension.TOKENS_PER_DAY,
                9,
                subject=QuotaSubject.PROJECT,
            )
        return state.quota_id

    first = await set_limit()
    async with sessions.begin() as session:
        await delete_quota(session, quota_id=str(first), actor="test")
    async with sessions.begin() as session:
        assert (await list_quotas(session))[0] == []
        for ref in (str(first), str(uuid.uuid4()), "nothing"):
            with pytest.raises(NotFound):
                await delete_quota(session, quota_id=ref, actor="test")
    assert await set_limit() != first


async def test_two_admins_make_one_limit_in_order(sessions: Sessions, customer: Customer) -> None:
    async def set_limit(limit_value: int) -> None:
        async with sessions.begin() as session:
            await new_limit(session, "acme", QuotaDimension.TOKENS_PER_DAY, limit_value)

    await asyncio.gather(*(set_limit(limit_value) for limit_value in range(1, 6)))

    async with sessions() as session:
        (state,) = (await list_quotas(session))[0]
        changes = [
            entry for entry in await list_audit_entries(session) if entry.action == "quota.set"
        ]
    after = [entry.after["limit_value"] for entry in reversed(changes) if entry.after]
    before = [entry.before and entry.before["limit_value"] for entry in reversed(changes)]
    assert sorted(after) == [1, 2, 3, 4, 5]
    assert before == [None, *after[:-1]]
    assert state.limit_value == after[-1]


async def test_bad_values_are_named(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        for limit_value in (-1, 2**63):
            with pytest.raises(InvalidValue, match="limit_value"):
                await new_limit(session, "acme", QuotaDimension.TOKENS_PER_DAY, limit_value)
        with pytest.raises(NotFound):
            await new_limit(
                session,
                "wk_nothing0",
                QuotaDimension.TOKENS_PER_DAY,
                1,
                subject=QuotaSubject.API_KEY,
            )


async def test_only_unreachable_counters_are_gone(sessions: Sessions, customer: Customer) -> None:
    now = datetime.now(UTC)
    async with sessions.begin() as session:
        quotas: dict[QuotaDimension, QuotaState] = {
            dimension: await new_limit(session, "acme", dimension, 9) for dimension in SETTABLE
        }
        for dimension, age, held in (
            (QuotaDimension.TOKENS_PER_MINUTE, timedelta(days=3), 0),
            (QuotaDimension.TOKENS_PER_MINUTE, timedelta(days=4), 1),
            (QuotaDimension.TOKENS_PER_MINUTE, timedelta(hours=1), 0),
            (QuotaDimension.REQUESTS_PER_HOUR, timedelta(hours=30), 0),
            (QuotaDimension.REQUESTS_PER_HOUR, timedelta(days=3), 0),
            (QuotaDimension.TOKENS_PER_WEEK, timedelta(days=8), 0),
            (QuotaDimension.TOKENS_PER_WEEK, timedelta(days=24), 0),
            (QuotaDimension.TOKENS_PER_MONTH, timedelta(days=40), 0),
            (QuotaDimension.TOKENS_PER_MONTH, timedelta(days=140), 0),
            (QuotaDimension.CONCURRENT_REQUESTS, timedelta(days=20_000), 0),
        ):
            counter = {
                "quota_id": quotas[dimension].quota_id,
                "window_start": window_start(dimension, now - age),
            }
            await session.execute(insert(QuotaCounter).values(**counter, used=1, held=held))

    async with sessions.begin() as session:
        aged = text("UPDATE rule_changes SET changed_at = :then WHERE id % 2 = 0")
        await session.execute(aged, {"then": now - timedelta(days=3)})
        change_count = await session.scalar(text("SELECT count(*) FROM rule_changes"))
        deleted_count = await delete_past_counters(session, limit=1)
    deleted_count += await delete_all_past_counters(sessions, limit=1)

    async with sessions() as session:
        assert change_count
        assert (
            await session.scalar(text("SELECT count(*) FROM rule_changes"))
            == (change_count + 1) // 2
        )
        assert deleted_count == 4, (
            "one in the first call, which may delete one; the rest in the calls until none is left"
        )
        left = {(row.quota_id, row.held) for row in await session.scalars(select(QuotaCounter))}
    assert left == {
        (quotas[QuotaDimension.TOKENS_PER_MINUTE].quota_id, 1),
        (quotas[QuotaDimension.TOKENS_PER_MINUTE].quota_id, 0),
        (quotas[QuotaDimension.REQUESTS_PER_HOUR].quota_id, 0),
        (quotas[QuotaDimension.TOKENS_PER_WEEK].quota_id, 0),
        (quotas[QuotaDimension.TOKENS_PER_MONTH].quota_id, 0),
        (quotas[QuotaDimension.CONCURRENT_REQUESTS].quota_id, 0),
    }


@pytest.mark.parametrize(
    "dimension", [QuotaDimension.COST_PICOS_PER_DAY, QuotaDimension.COST_PICOS_PER_MONTH]
)
async def test_a_limit_of_money_beyond_nine_million_units_is_refused_with_the_greatest_in_money(
    sessions: Sessions, customer: Customer, dimension: QuotaDimension
) -> None:
    async with sessions.begin() as session:
        with pytest.raises(
            InvalidValue,
            match="which is 9,223,372 units of the organization's currency: leave the limit out",
        ):
            await new_limit(session, customer.name, dimension, 2**63)
