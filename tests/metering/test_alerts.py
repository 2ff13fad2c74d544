"""Alerts: one for each threshold, window and limit, with any number of workers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from metering.alerts import alerts
from metering.alerts.alerts import FIRE_CROSSED, fire_due_alerts, list_alerts, scanned_windows
from metering.core.errors import InvalidValue
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.core.pages import page_token
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import refresh_for_the_month, set_prepaid
from metering.quotas.quota_admin import override_quota, set_quota
from metering.quotas.quota_rules import Payer, QuotaState
from metering.store.db import Sessions, psycopg_conninfo
from metering.tenants.api_keys import create_api_key
from tests.metering.hold_world import NOON, HoldWorld, admit, settle
from tests.metering.usage import grant
from tests.metering.workers import wait_until

WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%WITH"
    " windows%'"
)
POLL_ONCE = "from metering.tasks import fire_alerts; fire_alerts()"
EXPLAIN, NO_SCANS = text(f"EXPLAIN {FIRE_CROSSED.text}"), text("SET LOCAL enable_seqscan = off")
DAY, MONTH = QuotaDimension.TOKENS_PER_DAY, QuotaDimension.TOKENS_PER_MONTH


async def limit(
    sessions: Sessions,
    value: int,
    dimension: QuotaDimension = DAY,
    *,
    alert_at: Sequence[int] | None = None,
    enforced: bool | None = None,
    subject: QuotaSubject = QuotaSubject.ORGANIZATION,
    ref: str = "acme",
) -> str:
    """Set a limit as an admin does; return its id."""
    given = {"limit_value": value, "enforced": enforced, "alert_at": alert_at}
    terms: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
    async with sessions.begin() as session:
        state = await set_quota(
            session,
            subject=subject,
            subject_ref=ref,
            key=QuotaKey(dimension),
            terms=partial(replace, **terms),
            actor="test",
        )
    return str(state.quota_id)


async def use(world: HoldWorld, payer: Payer, token_count: int) -> None:
    """Run a request with this many input tokens from admission to settlement."""
    begun = admit(payer, input_tokens=token_count, slice_tokens=0, least_tokens=0)
    await world.run(begun)
    await world.run(settle(begun.hold_id, 0, input_tokens=token_count))


def fired(world: HoldWorld) -> list[tuple[int, int, int]]:
    """Return threshold, limit and used amount, in the order of detection."""
    rows = world.rows(
        "SELECT threshold, limit_value, used FROM alerts ORDER BY fired_at, threshold, used"
    )
    return [(row[0], row[1], row[2]) for row in rows]


@pytest.mark.parametrize("is_committed", [True, False])
async def test_concurrent_workers_write_an_alert_once_and_held_amounts_do_not_count(
    world: HoldWorld, sessions: Sessions, is_committed: bool
) -> None:
    """An uncommitted row is invisible; another worker waits for its commit."""
    payer = world.tenant()
    quota_id = await limit(sessions, 1000)
    await use(world, payer, 499)
    await world.run(admit(payer, input_tokens=400))
    held = await fire_due_alerts(sessions)
    await use(world, payer, 1)

    with psycopg.connect(psycopg_conninfo(world.url)) as other:
        window = NOON.replace(hour=0)
        values = (payer.organization_id, quota_id, window)
        other.execute(
            "INSERT INTO alerts (organization_id, quota_id, window_start, threshold, limit_value,"
            " used) VALUES (%s, %s, %s, 50, 1000, 500)",
            values,
        )
        async with asyncio.TaskGroup() as group:
            polls = [group.create_task(fire_due_alerts(sessions)) for _ in range(3)]
            await asyncio.to_thread(
                wait_until, lambda: world.one(WAITING) == 3, "all to meet the row"
            )
            (other.commit if is_committed else other.rollback)()
    again = await fire_due_alerts(sessions)

    assert held == 0
    assert (sum(poll.result() for poll in polls), again) == (0 if is_committed else 1, 0)
    assert fired(world) == [(50, 1000, 500)]


async def test_workers_that_race_and_one_that_is_killed_in_the_middle_alert_once(
    world: HoldWorld, sessions: Sessions
) -> None:
    """The first is killed before its statement writes; then two race."""
    payer = world.tenant()
    await limit(sessions, 1000)
    await use(world, payer, 1000)
    environment = {**os.environ, "WEIR_DATABASE_URL": world.url}

    def poll() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", POLL_ONCE], env=environment, cwd=Path.cwd())

    with psycopg.connect(psycopg_conninfo(world.url)) as busy:
        busy.execute("LOCK TABLE alerts IN SHARE MODE")
        killed = poll()
        wait_until(lambda: world.one(WAITING) == 1, "it to write")
        killed.kill()
        killed.wait()
    racing = [poll(), poll()]  # the server may still be busy with what the first one asked
    statuses = [each.wait() for each in racing]

    assert statuses == [0, 0]
    assert fired(world) == [(50, 1000, 1000), (80, 1000, 1000), (100, 1000, 1000)]


async def test_another_limit_alerts_again_and_the_same_one_never(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    quota_id = await limit(sessions, 1000, alert_at=[80])
    await use(world, payer, 900)
    await fire_due_alerts(sessions)
    async with sessions.begin() as session:
        await override_quota(
            session,
            quota_id=quota_id,
            limit_value=2000,
            until=NOON + timedelta(hours=1),
            reason="launch",
            actor="test",
        )

    raised = await fire_due_alerts(sessions)
    await use(world, payer, 700)
    crossed = await fire_due_alerts(sessions)
    world.advance(3601)  # the raise is over, and the limit with its 80 % alert is back
    fallen = await fire_due_alerts(sessions)
    await limit(sessions, 1500)
    lowered = await fire_due_alerts(sessions)
    world.advance(12 * 3600)
    tomorrow = await fire_due_alerts(sessions)
    await use(world, payer, 1200)
    next_window = await fire_due_alerts(sessions)

    assert (raised, crossed, fallen, lowered, tomorrow, next_window) == (0, 1, 0, 1, 0, 1)
    assert fired(world) == [(80, 1000, 900), (80, 2000, 1600), (80, 1500, 1600), (80, 1500, 1200)]


async def test_a_worker_that_was_away_finds_what_it_missed_by_the_limit_of_then(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    day, month = (
        await limit(sessions, 1000, alert_at=[50]),
        await limit(sessions, 5000, MONTH, alert_at=[50]),
    )
    async with sessions.begin() as session:  # in force until after the day's end
        until = NOON + timedelta(hours=30)
        await override_quota(
            session, quota_id=day, limit_value=2000, until=until, reason="launch", actor="test"
        )
    await use(world, payer, 990)  # less than half of the raised limit
    world.set_time(until + timedelta(hours=1))
    under_the_raise = await fire_due_alerts(sessions)
    world.set_time(datetime(2026, 12, 1, 3, tzinfo=UTC))
    await use(world, payer, 600)
    world.set_time(datetime(2026, 12, 3, 3, tzinfo=UTC))

    late = await fire_due_alerts(sessions)
    # On the first day, more than half of it was used, when the limit was 1000.
    await limit(sessions, 800, alert_at=[50])
    await limit(sessions, 1200, MONTH, alert_at=[50])
    after_changes = await fire_due_alerts(sessions)

    first = datetime(2026, 12, 1, tzinfo=UTC)
    found = world.rows(
        "SELECT quota_id, window_start, limit_value, used FROM alerts ORDER BY limit_value"
    )
    assert (under_the_raise, late, after_changes) == (0, 1, 1)
    assert found == [(uuid.UUID(day), first, 1000, 600), (uuid.UUID(month), first, 1200, 600)]


async def test_an_enforced_limit_alerts_when_almost_used_up_and_a_shadow_limit_when_used_up(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    await limit(sessions, 1000, alert_at=[100])
    await limit(sessions, 1000, MONTH, alert_at=[100, 120], enforced=False)

    found = []
    for token_count in (994, 1):
        await use(world, payer, token_count)
        found.append(await fire_due_alerts(sessions))
    await limit(sessions, 2000, alert_at=[])
    for token_count in (5, 200):
        await use(world, payer, token_count)
        found.append(await fire_due_alerts(sessions))

    assert found == [0, 1, 1, 1]
    assert fired(world) == [(100, 1000, 995), (100, 1000, 1000), (120, 1000, 1200)]


async def test_prepaid_credit_alerts_when_so_much_is_left_and_again_when_a_grant_was_used_up(
    world: HoldWorld, sessions: Sessions
) -> None:
    """Input tokens cost 3 picos. Monthly changes alert only once the limit is computed for them."""
    payer = world.tenant()

    december = date(2026, 12, 1)

    async def granted(amount: int, last: date, first: date | None = None) -> None:
        async with sessions.begin() as session:
            await grant(session, amount, last_month=last, first_month=first)

    async with sessions.begin() as session:
        await set_prepaid(
            session, organization="acme", prepaid=True, alert_at=[150, 300], actor="test"
        )
    await granted(60, december)
    await granted(840, date(2026, 11, 1))
    await granted(900, december, first=december)
    found = []
    for token_count in (199, 1, 50):  # 303, 300 and 150 are left
        await use(world, payer, token_count)
        found.append(await fire_due_alerts(sessions))
    await granted(450, date(2026, 11, 1))
    found.append(await fire_due_alerts(sessions))
    await use(world, payer, 100)
    found.append(await fire_due_alerts(sessions))
    world.set_time(datetime(2026, 12, 1, 0, 0, 1, tzinfo=UTC))
    found.append(await fire_due_alerts(sessions))
    await refresh_for_the_month(sessions)
    found.append(await fire_due_alerts(sessions))

    assert found == [0, 1, 1, 0, 1, 0, 0]
    assert sorted(fired(world)) == [(150, 900, 750), (300, 900, 600), (300, 1350, 1050)]


async def test_alerts_of_keys_and_projects_are_their_organizations_and_read_page_by_page(
    world: HoldWorld, sessions: Sessions
) -> None:
    acme, bolt = world.tenant("acme"), world.tenant("bolt")
    await limit(sessions, 100, subject=QuotaSubject.PROJECT, ref="acme/search")
    await limit(sessions, 100, subject=QuotaSubject.API_KEY, ref=str(acme.api_key_id))
    await limit(sessions, 100, ref="bolt", alert_at=[1])
    for payer in (acme, bolt):
        await use(world, payer, 85)
    await fire_due_alerts(sessions)

    async with sessions() as session:
        pages = [await list_alerts(session, organization_id=acme.organization_id, page_size=3)]
        pages.append(
            await list_alerts(
                session, organization_id=acme.organization_id, page_size=3, page_token=pages[0][1]
            )
        )
        everything, _ = await list_alerts(session, organization_id=None)
        with pytest.raises(InvalidValue, match="page_token"):
            await list_alerts(session, organization_id=None, page_token="x_y")
        before_the_calendar = page_token("0001-01-01T00:00:00+23:59", uuid.UUID(int=0))
        with pytest.raises(InvalidValue, match="page_token"):
            await list_alerts(session, organization_id=None, page_token=before_the_calendar)

    listed = [each for page, _ in pages for each in page]
    assert ([len(page) for page, _ in pages], pages[1][1]) == ([3, 1], "")
    assert {(each.subject_name, each.alert.threshold) for each in listed} == {
        (name, percent) for name in ("acme/search", acme.api_key_id.hex) for percent in (50, 80)
    }
    assert [each.organization.name for each in everything if each not in listed] == ["bolt"]


async def test_impossible_thresholds_are_refused_and_new_keys_copy_theirs(
    world: HoldWorld, sessions: Sessions
) -> None:
    world.tenant()
    wrong: list[tuple[QuotaDimension, Sequence[int], str]] = [
        (QuotaDimension.TOKENS_PER_MINUTE, [50], "does not alert"),
        (DAY, [0], "got 0"),
        (DAY, [1001], "got 1001"),
        (DAY, [50, 50], "not repeat"),
        (DAY, range(1, 12), "at most 10"),
    ]
    for dimension, alert_at, reported in wrong:
        with pytest.raises(InvalidValue, match=reported):
            await limit(sessions, 100, dimension, alert_at=alert_at)
    async with sessions.begin() as session:
        set_again = partial(
            set_quota,
            session,
            subject=QuotaSubject.PROJECT,
            subject_ref="acme/search",
            key=QuotaKey(DAY, for_new_keys=True),
            actor="test",
        )
        await set_again(terms=QuotaTerms(100, alert_at=(90, 10)))
        kept = await set_again(terms=partial(replace, limit_value=200))
        key, _ = await create_api_key(
            session, organization="acme", project="search", name="new", actor="test"
        )

    assert kept.alert_at == (10, 90)
    assert world.one("SELECT alert_at FROM quotas WHERE subject_id = %s", key.id) == [10, 90]


def test_the_windows_of_a_query_end_where_the_next_begin() -> None:
    windows = scanned_windows(datetime(2027, 3, 1, 5, tzinfo=UTC))

    days = [(starts_at, ends_at) for dimension, starts_at, ends_at in windows if dimension is DAY]
    months = [
        (starts_at.date(), ends_at.date())
        for dimension, starts_at, ends_at in windows
        if dimension is MONTH
    ]
    assert [ends_at for _, ends_at in days[1:]] == [starts_at for starts_at, _ in days[:-1]]
    assert len(days) == 3
    assert months == [(date(2027, 3, 1), date(2027, 4, 1)), (date(2027, 2, 1), date(2027, 3, 1))]


async def test_a_query_finds_counters_by_their_key(sessions: Sessions) -> None:
    """However many counters other limits have."""
    async with sessions() as session:
        await session.execute(NO_SCANS)
        parameters = {
            "dimensions": [str(DAY)],
            "starts": [NOON],
            "ends": [NOON],
            "month": NOON.date(),
            "limit": 10,
        }
        plan = "\n".join((await session.execute(EXPLAIN, parameters)).scalars())

    assert "pk_quota_counters" in plan, plan
    assert "Seq Scan on quota_counters" not in plan


async def test_end_users_alert_when_rated_and_when_their_terms_change(
    world: HoldWorld, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    payer = world.tenant()

    async def set_limit(value: int, percents: Sequence[int], **key: Any) -> QuotaState:
        async with sessions.begin() as session:
            return await set_quota(
                session,
                subject=QuotaSubject.PROJECT,
                subject_ref=str(payer.project_id),
                key=QuotaKey(DAY, **key),
                terms=QuotaTerms(value, alert_at=tuple(percents)),
                actor="test",
            )

    async def rate_and_fire() -> int:
        await rate_all_pending(sessions)
        return await fire_due_alerts(sessions)

    await set_limit(1000, [80], for_each="end_user")
    for name, token_count in (("alice", 700), ("bob", 850)):
        begun = admit(
            payer, end_user=name, input_tokens=token_count, slice_tokens=0, least_tokens=0
        )
        await world.run(begun)
        await world.run(settle(begun.hold_id, 0, input_tokens=token_count))

    assert await rate_and_fire() == 1
    assert fired(world) == [(80, 1000, 850)]
    assert world.rows("SELECT DISTINCT organization_id FROM alerts") == [(payer.organization_id,)]
    assert await rate_and_fire() == 0
    selector = await set_limit(800, [80], for_each="end_user")
    monkeypatch.setattr(alerts, "ALERTS_MAX", 1)  # one after the other
    assert await rate_and_fire() == 2, "each by the selector's new terms"
    await set_limit(750, [90], end_user="alice")
    assert await rate_and_fire() == 1
    assert world.one("SELECT count(*) FROM alert_scans") == 0

    async with sessions.begin() as session:
        await override_quota(
            session,
            quota_id=str(selector.quota_id),
            limit_value=5000,
            until=NOON + timedelta(hours=1),
            reason="launch",
            actor="test",
        )
    begun = admit(payer, end_user="carol", input_tokens=790, slice_tokens=0, least_tokens=0)
    await world.run(begun)
    await world.run(settle(begun.hold_id, 0, input_tokens=790))
    assert await rate_and_fire() == 0
    world.advance(3601)
    assert await rate_and_fire() == 1, "the temporary limit has ended"
    async with sessions() as session:
        listed, _ = await list_alerts(session, organization_id=payer.organization_id)
    assert {each.subject_name for each in listed} == {"alice", "bob", "carol"}
