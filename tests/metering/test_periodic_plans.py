"""The worker's periodic statements read what has changed, however many end users there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.sql.elements import TextClause

from metering.alerts.alerts import (
    FIRE_CROSSED,
    FIRE_OF_USAGE_SUBJECTS,
    SCAN_SETTINGS,
    scanned_windows,
)
from metering.ledger.rating import RATE, RATING_SETTINGS
from metering.quotas.quota_admin import DELETE_PAST_COUNTERS, past_ranges
from metering.store.db import Sessions, database_now
from tests.metering.hold_world import HoldWorld

MEMBER_COUNT = 5000
READ_MAX = 100

# A selector with end users, each with a counter of this month and one of the day before.
MEMBERS = """
WITH selector AS (
    INSERT INTO quotas (subject, subject_id, for_each, dimension, limit_value, alert_at)
    SELECT 'organization', %s, 'end_user', dimension, 1000, '{80}'
    FROM unnest(ARRAY['tokens_per_month', 'tokens_per_day']) AS d(dimension)
    RETURNING id, dimension
), members AS (
    INSERT INTO usage_subjects (organization_id, kind, name)
    SELECT %s, 'end_user', 'user-' || n FROM generate_series(1, %s) n
    RETURNING id
)
SELECT FROM selector, members
"""
QUOTAS = """
INSERT INTO quotas (subject, subject_id, within_id, selector_id, dimension, limit_value, alert_at)
SELECT 'end_user', u.id, s.subject_id, s.id, s.dimension, 1000, s.alert_at
FROM quotas s
JOIN usage_subjects u ON u.organization_id = s.subject_id
WHERE s.for_each <> ''
"""
COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start, used)
SELECT id, date_trunc(CASE dimension WHEN 'tokens_per_day' THEN 'day' ELSE 'month' END, now()), 900
FROM quotas WHERE within_id IS NOT NULL
"""


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes(each)


def read_count(plan: dict[str, Any]) -> int:
    """Return the greatest number of rows that one scan of a table read."""
    removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    return max(
        int(
            (node["Actual Rows"] + sum(node.get(each, 0) for each in removed))
            * node["Actual Loops"]
        )
        for node in nodes(plan)
        if "Relation Name" in node
    )


@pytest.mark.parametrize(
    ("statement", "settings"),
    [
        pytest.param(FIRE_CROSSED, None, id="alerts of named limits"),
        pytest.param(FIRE_OF_USAGE_SUBJECTS, SCAN_SETTINGS, id="alerts of usage subjects"),
        pytest.param(DELETE_PAST_COUNTERS, None, id="past counters"),
        pytest.param(RATE, RATING_SETTINGS, id="rating"),
    ],
)
async def test_a_periodic_statement_reads_few_rows(
    world: HoldWorld, sessions: Sessions, statement: TextClause, settings: TextClause | None
) -> None:
    payer = world.tenant()
    world.execute(MEMBERS, payer.organization_id, payer.organization_id, MEMBER_COUNT)
    world.execute(QUOTAS)
    world.execute(COUNTERS)
    world.execute("DELETE FROM alert_scans")
    world.execute(
        "INSERT INTO alert_scans (quota_id) SELECT id FROM quotas WHERE within_id IS NOT NULL"
        " LIMIT 3"
    )
    world.execute("ANALYZE")

    async with sessions() as session:
        now = await database_now(session)
        windows, ranges = scanned_windows(now), past_ranges(now)
        parameters = {
            "dimensions": [str(dimension) for dimension, _, _ in windows],
            "starts": [starts_at for _, starts_at, _ in windows],
            "ends": [ends_at for _, _, ends_at in windows],
            "month": now.date().replace(day=1),
            "limit": 5000,
            "per_hour": 1000,
            "after": "(0,0)" if statement is RATE else [after for after, _ in ranges],
            "before": [before for _, before in ranges],
            "batch_size": 1000,
            "organization_id": None,
            "locks": [],
            "paused": [],
        }
        if settings is not None:
            await session.execute(settings)
        explained = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}")
        [plan] = (await session.execute(explained, parameters)).scalar_one()

    assert read_count(plan["Plan"]) <= READ_MAX, plan
