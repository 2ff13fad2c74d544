"""Retention: sums, documents and proofs are the same before and after details are removed."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering import retention
from metering.core.audit import list_audit_entries
from metering.core.errors import DatabaseUnavailable, InvalidValue, NotFound
from metering.core.models import QuotaDimension
from metering.export.reconciliation import our_month, reconcile_locally
from metering.invoicing.documents import kept_document
from metering.invoicing.month_report import to_csv, to_json
from metering.invoicing.months import changed_months, verify_month
from metering.invoicing.resale import statement_page
from metering.ledger.ledger import month_end, month_text
from metering.ledger.rating import create_partitions
from metering.plans.simulation import simulate
from metering.receipts.months import receipt_month, receipts_page
from metering.reports.focus import Tags, focus_csv
from metering.reports.usage_reports import (
    Days,
    Grouping,
    Groups,
    UsageFilter,
    find_recorded_request,
    usage_page,
    usage_total,
)
from metering.retention import MonthRetention, RetentionSettings, apply_retention, read_retention
from metering.store.db import Sessions, psycopg_conninfo
from metering.tenants.tenants import find_organization
from tests.metering.closing_world import ClosingWorld
from tests.metering.invariants import check_invariants
from tests.metering.queries import execute, execute_unguarded, fetch_column, fetch_value
from tests.metering.usage import Consumed, Customer, new_customer, new_limit

MONTHS = [date(2025, month, 1) for month in (1, 2, 3)]
OUTCOMES = ("stop", "length", "cancelled", "failed", "cost_limit")
ALL = RetentionSettings(usage_months=3, audit_months=3)
KEPT_GROUPS = (
    (Grouping.DAY,),
    (Grouping.DAY, Grouping.MODEL),
    (Grouping.PROJECT, Grouping.API_KEY),
    (Grouping.MODEL, Grouping.DAY),
)


class Records:
    """Two customers, their random usage, and everything that can be read of it later."""

    def __init__(self, sessions: Sessions, worlds: list[ClosingWorld], seed: int) -> None:
        self.sessions = sessions
        self.worlds = worlds
        self.random = random.Random(seed)

    def request(self, month: date, **given: Any) -> Consumed:
        """Return random usage in a month."""
        sent, output = self.random.randint(0, 900), self.random.randint(0, 300)
        at = datetime(month.year, month.month, 1, tzinfo=UTC) + timedelta(
            seconds=self.random.randrange(28 * 86_400)
        )
        return Consumed(
            sent,
            self.random.choice([0, sent, self.random.randint(0, sent)]),
            output,
            self.random.choice(OUTCOMES),
            given.pop("settled_at", at),
            reasoning_token_count=self.random.choice([0, output, self.random.randint(0, output)]),
            labels=self.random.choice([{}, {"team": "search"}, {"team": "ads", "tier": "1"}]),
            **given,
        )

    async def use(self, world: ClosingWorld, prices: list[Any], month: date, count: int) -> None:
        """Settle requests, some for end users, some expired with a late report."""
        for number in range(count):
            first = self.request(month, hold_id=uuid.uuid4())
            user = self.random.choice(["", "ann", "bob"])
            price = self.random.choice(prices)
            await world.use(price, first, end_user=user)
            if number % 4 == 0 and first.output_token_count:
                late = self.request(
                    month,
                    hold_id=first.hold_id,
                    part=1,
                    settled_at=first.settled_at + timedelta(days=self.random.choice([0, 1, 31])),
                )
                await world.use(price, late, end_user=user)
                await execute_unguarded(
                    self.sessions,
                    "UPDATE holds SET state = 'expired', leased_token_count = 10000"
                    f" WHERE id = '{first.hold_id}'",
                    "UPDATE usage_events SET labels = h.labels, end_user_id = h.end_user_id,"
                    " request_id = h.request_id, admitted_at = h.admitted_at,"
                    " input_token_count = 0, cached_input_token_count = 0,"
                    " cost_picos = billed_reasoning_token_count *"
                    " coalesce(p.reasoning_picos_per_token, p.output_picos_per_token) +"
                    " (billed_token_count - billed_reasoning_token_count) *"
                    " p.output_picos_per_token FROM holds h, price_versions p"
                    f" WHERE h.id = hold_id AND part = 1 AND h.id = '{first.hold_id}' AND p.id ="
                    " usage_events.price_version_id",
                )

    async def live(self, closed: Sequence[date] = (*MONTHS, date(2025, 4, 1))) -> None:
        """Use and close months; some usage is found after the close of its month."""
        for world in self.worlds:
            prices = [
                await world.price(datetime(2024, 12, 1, tzinfo=UTC), model=model, input_picos=picos)
                for model, picos in (
                    (f"{world.customer.name}-a", 7),
                    (f"{world.customer.name}-b", 11),
                )
            ]
            for month in closed:
                if month in MONTHS:
                    await self.use(world, prices, month, self.random.randint(4, 8))
                if month != closed[0]:
                    await self.use(world, prices, closed[closed.index(month) - 1], 3)
                world.clock.now = month_end(month) + timedelta(days=40)
                await world.close(month_text(month))

    async def read(self) -> dict[str, str]:
        """Read all that stays readable: reports, documents, exports, sums, proofs."""
        found: dict[str, object] = {}
        async with self.sessions() as session:
            for world in self.worlds:
                owner = await find_organization(session, world.customer.name)
                name, quarter = owner.name, Days(date(2025, 1, 1), date(2025, 3, 31))
                for by in KEPT_GROUPS:
                    page = await usage_page(session, UsageFilter(quarter, owner.id), Groups(by))
                    found[f"{name} usage {by}"] = [str(asdict(row)) for row in page.rows]
                for month in (*map(month_text, MONTHS), "2025-04"):
                    of = UsageFilter(month, owner.id)
                    for by in KEPT_GROUPS:
                        page = await usage_page(session, of, Groups(by, largest_first=True))
                        found[f"{name} {month} usage {by}"] = [str(asdict(r)) for r in page.rows]
                    found[f"{name} {month} total"] = str(asdict(await usage_total(session, of)))
                    verified = await verify_month(session, owner, month)
                    assert verified.differences == ()
                    found[f"{name} {month} json"] = to_json(verified.report)
                    found[f"{name} {month} csv"] = to_csv(verified.report)
                    pdf = await kept_document(session, owner.id, month)
                    found[f"{name} {month} pdf"] = str(pdf)
                    found[f"{name} {month} focus"] = "".join(
                        [chunk async for chunk in focus_csv(session, verified.report, "Weir")]
                    )
                    statements = await statement_page(session, owner, month)
                    found[f"{name} {month} statements"] = str(statements)
                    found[f"{name} {month} sums"] = str(await our_month(session, month, [owner.id]))
                    checked, _ = await reconcile_locally(session, month, owner.id)
                    assert checked.differences == ()
                    first = date.fromisoformat(f"{month}-01")
                    found[f"{name} {month} receipts"] = str(
                        await receipt_month(session, owner.id, first)
                    )
                    simulated = await simulate(session, month=month, organization=name)
                    found[f"{name} {month} simulated"] = str(simulated)
            assert [each async for each in changed_months(session)] == []
        return {name: str(value) for name, value in found.items()}


@pytest.fixture
async def small(sessions: Sessions, customer: Customer) -> Records:
    """A closed month of one customer."""
    made = Records(sessions, [ClosingWorld(sessions, customer)], 7)
    await made.live(MONTHS[:1])
    return made


@pytest.fixture
async def records(sessions: Sessions, customer: Customer) -> Records:
    """Closed months of two customers."""
    seed = int(os.environ.get("WEIR_RETENTION_SEED", random.SystemRandom().getrandbits(32)))
    print(f"WEIR_RETENTION_SEED={seed}")
    async with sessions.begin() as session:
        other = await new_customer(session, "globex")
    made = Records(sessions, [ClosingWorld(sessions, each) for each in (customer, other)], seed)
    await made.live()
    return made


async def states(sessions: Sessions) -> dict[str, MonthRetention]:
    return {each.month: each.state for each in (await read_retention(sessions, ALL)).months}


async def test_all_sums_and_documents_are_the_same_after_details_are_removed(
    records: Records, sessions: Sessions, database_url: str
) -> None:
    before = await records.read()
    check_invariants(database_url)

    done = await apply_retention(sessions, ALL, actor="test")

    assert done.months[:3] == list(map(month_text, MONTHS))
    assert done.obstacles == ()
    assert await fetch_value(sessions, "SELECT count(*) FROM usage_events") == 0
    assert await fetch_value(sessions, "SELECT count(*) FROM holds") == 0
    after = await records.read()
    assert [name for name in before if after[name] != before[name]] == []
    check_invariants(database_url)


async def test_details_that_are_gone_are_named_and_never_silently_empty(
    records: Records, sessions: Sessions
) -> None:
    [world, *_] = records.worlds
    project_id = world.customer.key.project_id
    request_id = await fetch_value(
        sessions, f"SELECT request_id FROM holds WHERE project_id = '{project_id}' LIMIT 1"
    )
    async with sessions() as session:
        assert (await find_recorded_request(session, project_id, request_id)).events
    await apply_retention(sessions, ALL, actor="test")

    async with sessions() as session:
        owner = await find_organization(session, world.customer.name)
        of_days = UsageFilter(Days(date(2025, 1, 5), date(2025, 1, 9)), owner.id)
        of_month = UsageFilter("2025-03", owner.id)
        for by in (Grouping.REQUEST, Grouping.END_USER, Grouping.HOUR, Grouping.LABEL):
            key = "team" if by is Grouping.LABEL else ""
            for of in (of_days, of_month):
                with pytest.raises(InvalidValue, match=r"group_by: needs .* from 20\d\d-\d\d-01"):
                    await usage_page(session, of, Groups((by,), key))
        filtered = {
            "end_user": UsageFilter("2025-03", owner.id, end_user_id=uuid.uuid4()),
            "labels": UsageFilter("2025-03", owner.id, labels={"team": "ads"}),
        }
        for field, of in filtered.items():
            with pytest.raises(InvalidValue, match=f"{field}: needs .* retained for 3 months"):
                await usage_page(session, of, Groups((Grouping.DAY,)))
        report = (await verify_month(session, owner, "2025-02")).report
        with pytest.raises(InvalidValue, match="tags: needs"):
            [_ async for _ in focus_csv(session, report, "", Tags(end_user=True))]
        with pytest.raises(InvalidValue, match="month: needs receipts"):
            await receipts_page(session, owner.id, date(2025, 2, 1))
        with pytest.raises(NotFound, match=r"ended before .* retained for 3 months"):
            await find_recorded_request(session, project_id, request_id)
        # Of later, everything is answered.
        later = UsageFilter(Days(date.today(), date.today()), owner.id)
        assert (await usage_page(session, later, Groups((Grouping.HOUR,)))).rows == ()


async def test_nothing_is_removed_without_a_setting(small: Records, sessions: Sessions) -> None:
    removed = await apply_retention(sessions, RetentionSettings(), actor="test")

    assert (removed.months, removed.audit_entry_count) == ([], 0)
    assert await fetch_value(sessions, "SELECT count(*) FROM usage_events") > 0
    assert await fetch_value(sessions, "SELECT count(*) FROM retired_months") == 0


REOPEN = (
    "UPDATE billing_months SET state = 'closing', closed_at = NULL, closed_by = NULL"
    " WHERE month = '2025-01-01'"
)
CLOSE = (
    "UPDATE billing_months SET state = 'closed', closed_at = now(), closed_by = 'x'"
    " WHERE month = '2025-01-01'"
)
EXPORT = "INSERT INTO export_progress (id, closed_until, scanned_until) VALUES (1, '{}', now())"
NO_EXPORT = "DELETE FROM export_progress; DELETE FROM meter_batches"
OBSTACLES = (
    (REOPEN, "close acme 2025-01", CLOSE),
    (EXPORT.format("2025-01-31 23:00+00"), "exported until 2025-01-31 23:00 UTC only", NO_EXPORT),
    (
        EXPORT.format("2025-02-01 00:00+00")
        + "; INSERT INTO meter_batches (id, organization_id, price_version_id, token_kind, hour,"
        " part, token_count) SELECT gen_random_uuid(), organization_id, price_version_id, 'input',"
        " '2025-01-09 05:00+00', 0, 1 FROM usage_events LIMIT 1",
        "1 batches of the export are not delivered",
        NO_EXPORT,
    ),
    (
        "INSERT INTO unrated_usage SELECT id, hold_id, part, settled_at, organization_id"
        " FROM usage_events LIMIT 1",
        "1 usage events wait to be rated",
        "DELETE FROM unrated_usage",
    ),
    (
        "UPDATE holds SET state = 'held', ended_at = NULL",
        "requests of the month still run",
        "UPDATE holds SET state = 'settled', ended_at = admitted_at",
    ),
)


async def test_a_month_that_is_open_or_not_exported_is_kept(
    small: Records, sessions: Sessions
) -> None:
    for setup, obstacle, undo in OBSTACLES:
        await execute_unguarded(sessions, *setup.split("; "))
        removal = await apply_retention(sessions, ALL, actor="test")
        found = await read_retention(sessions, ALL)
        await execute_unguarded(sessions, *undo.split("; "))

        assert removal.months == []
        assert obstacle in " ".join(removal.obstacles)
        blocked = [each for each in found.months if each.state is MonthRetention.BLOCKED]
        assert obstacle in " ".join(blocked[0].obstacles)
    assert await fetch_value(sessions, "SELECT count(*) FROM retired_months") == 0


RECENT = "date_trunc('month', now() - interval '62 days')::date"
REFUSED = (
    (f"SELECT begin_usage_retirement({RECENT}, 3)", "3 whole months"),
    ("SELECT begin_usage_retirement('2025-01-01', 2)", "3 whole months"),
    ("SELECT begin_usage_retirement('2025-02-01', 3)", "an earlier one"),
    ("DELETE FROM holds", "holds"),
    ("TRUNCATE holds CASCADE", "holds"),
    ("SELECT begin_audit_retention(now() - interval '20 days', 3)", "last 3 months"),
    ("DELETE FROM audit_log", "append-only"),
    ("TRUNCATE audit_log CASCADE", "append-only"),
)


async def test_the_database_refuses_to_remove_what_must_be_kept(
    small: Records, sessions: Sessions
) -> None:
    for statement, problem in REFUSED:
        with pytest.raises(DBAPIError, match=problem):
            await execute(sessions, statement)

    await execute_unguarded(sessions, REOPEN)
    with pytest.raises(DBAPIError, match="not all billed by closed months"):
        await execute(sessions, "SELECT begin_usage_retirement('2025-01-01', 3)")
    # Without sums, nothing is detached.
    assert not await fetch_value(sessions, "SELECT detach_retired_usage('2025-01-01')")
    assert not await fetch_value(sessions, "SELECT drop_retired_usage('2025-01-01')")


async def test_wrong_sums_are_not_exchanged_for_the_events(
    small: Records, sessions: Sessions
) -> None:
    january = {"month": MONTHS[0]}
    async with sessions.begin() as session:
        await create_partitions(session)
        await session.execute(retention.BEGIN, january | {"kept_months": 3})
        while await session.scalar(retention.SUM_DAY, january) is not None:
            pass
        while await session.scalar(retention.RETIRE_HOLDS, january | {"page_count": 9}) is not None:
            pass
    await execute_unguarded(
        sessions, "UPDATE usage_days SET cost_picos = cost_picos + 1 WHERE id = 1"
    )

    with pytest.raises(DBAPIError, match="the sums of 2025-01 differ"):
        await retention.exchange(sessions, MONTHS[0], "test")
    assert await fetch_value(sessions, "SELECT count(*) FROM usage_events") > 0


async def test_an_interrupted_removal_continues_and_every_step_is_sound(
    records: Records, sessions: Sessions, database_url: str
) -> None:
    """Each run takes one step; between two of them everything can be read and proved."""
    before = await records.read()
    steps = 0
    over = iter([True])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(retention, "_is_over", lambda _: next(over))
        while not (
            done := await fetch_value(
                sessions,
                "SELECT dropped_at IS NOT NULL FROM retired_months WHERE month = '2025-01-01'",
            )
        ):
            over = iter([*[False] * records.random.randint(1, 12), *[True] * 99])
            await apply_retention(sessions, ALL, actor="test")
            steps += 1
            if steps % 2:
                check_invariants(database_url)
    assert done
    assert steps > 2
    after = await records.read()
    assert [name for name in before if after[name] != before[name]] == []


async def test_a_kill_between_detach_and_drop_leaves_a_table_that_the_next_run_drops(
    records: Records, sessions: Sessions, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await records.read()
    monkeypatch.setattr(retention, "DROP", text("SELECT 1 / (:month)::text::int"))
    with pytest.raises(DBAPIError):
        await apply_retention(sessions, ALL, actor="test")
    monkeypatch.undo()
    assert (await states(sessions))["2025-01"] is MonthRetention.REMOVING
    assert await fetch_value(sessions, "SELECT count(*) FROM usage_events_2025_01") > 0
    between = await records.read()
    check_invariants(database_url)

    # Even without the setting, a month that was begun is finished.
    await apply_retention(sessions, RetentionSettings(), actor="test")

    assert (await states(sessions))["2025-01"] is MonthRetention.REMOVED
    assert await fetch_value(sessions, "SELECT to_regclass('usage_events_2025_01')") is None
    assert before == between == await records.read()


async def test_each_run_says_in_the_audit_log_what_it_removed(
    small: Records, sessions: Sessions
) -> None:
    event_count = await fetch_value(
        sessions, "SELECT count(*) FROM usage_events WHERE settled_at < '2025-02-01'"
    )
    await apply_retention(sessions, ALL, actor="weir retention")

    async with sessions() as session:
        entries = await list_audit_entries(session, action_prefix="retention.usage")
    assert {entry.actor for entry in entries} == {"weir retention"}
    [january] = [entry for entry in entries if entry.subject_id == "2025-01"]
    assert january.after is not None
    assert january.after["event_count"] == event_count
    assert january.after["kept_months"] == 3
    assert january.after["hold_count"] > 0


async def test_old_audit_entries_expire_except_those_that_decide(
    small: Records, sessions: Sessions, database_url: str
) -> None:
    kept = ("api_key.create", "quota.set", "retention.usage")
    async with sessions.begin() as session:
        await new_limit(session, "acme", QuotaDimension.CONCURRENT_REQUESTS, 10**3)
    await execute_unguarded(
        sessions,
        "UPDATE audit_log SET created_at = '2025-01-01'",
        "INSERT INTO audit_log (created_at, actor, action, subject_id) VALUES"
        " ('2025-01-02', 'x', 'retention.usage', '2024-01'),"
        " ('2025-01-02', 'x', 'quota.set', gen_random_uuid()::text)",
    )
    due = (await read_retention(sessions, ALL)).audit_entry_count
    recent = RetentionSettings(audit_months=1200)
    assert (await apply_retention(sessions, recent, actor="test")).audit_entry_count == 0

    removal = await apply_retention(sessions, RetentionSettings(audit_months=3), actor="test")

    assert removal.audit_entry_count == due > 3
    left = await fetch_column(
        sessions, "SELECT action FROM audit_log WHERE created_at < '2025-06-01'"
    )
    assert set(left) == set(kept)
    async with sessions() as session:
        [entry] = await list_audit_entries(session, action_prefix="retention.audit")
    assert entry.after is not None
    assert entry.after["deleted_count"] == due
    check_invariants(database_url)
    again = await apply_retention(sessions, RetentionSettings(audit_months=3), actor="test")
    assert again.audit_entry_count == 0


async def test_only_one_run_removes_at_a_time(small: Records, sessions: Sessions) -> None:
    removals = await asyncio.gather(
        *(apply_retention(sessions, ALL, actor="test") for _ in range(3))
    )

    busy = [each for each in removals if each.is_busy]
    assert 1 <= len(busy) <= 2
    assert sum("2025-01" in each.months for each in removals) == 1


async def test_a_long_reader_makes_the_exchange_give_up_and_nobody_waits_for_it(
    small: Records, sessions: Sessions, database_url: str
) -> None:
    """A reader keeps the table for the whole try: statements of others go through meanwhile."""
    with psycopg.connect(psycopg_conninfo(database_url)) as reader:
        reader.execute("SELECT count(*) FROM usage_events")
        trying = asyncio.create_task(apply_retention(sessions, ALL, actor="test"))
        slowest = timedelta()
        while not trying.done():
            began = datetime.now(UTC)
            await fetch_value(sessions, "SELECT count(*) FROM usage_events")
            slowest = max(slowest, datetime.now(UTC) - began)
            await asyncio.sleep(0.02)
        with pytest.raises(DatabaseUnavailable):
            trying.result()
    assert slowest < timedelta(seconds=4)

    await apply_retention(sessions, ALL, actor="test")

    assert (await states(sessions))["2025-01"] is MonthRetention.REMOVED
