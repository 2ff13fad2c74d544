"""What must be true of holds, counters and usage events at every commit, worked out from the rows and from nothing else.

Independent of the product on purpose: windows are names from the calendar, weights are fractions, and the sums are written down
here once more, over each hold's own story.
For any database at any time; `tests/metering/test_invariants.py` shows that each check can fail.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import psycopg
from psycopg.rows import dict_row

from metering.store.db import psycopg_conninfo
from tests.metering.export_invariants import export_violations

Row = dict[str, Any]
Place = tuple[uuid.UUID, str]  # a quota and the name of a window

# What each dimension counts: over which window, and which tokens (input, output).
DIMENSIONS = {
    "concurrent_requests": (None, 0, 0),
    "requests_per_minute": ("%Y-%m-%d %H:%M", 0, 0),
    "tokens_per_minute": ("%Y-%m-%d %H:%M", 1, 1),
    "input_tokens_per_minute": ("%Y-%m-%d %H:%M", 1, 0),
    "output_tokens_per_minute": ("%Y-%m-%d %H:%M", 0, 1),
    "tokens_per_day": ("%Y-%m-%d", 1, 1),
    "tokens_per_month": ("%Y-%m", 1, 1),
    "cost_picos_per_day": ("%Y-%m-%d", 1, 1),
    "cost_picos_per_month": ("%Y-%m", 1, 1),
}
# Each hold beside each quota that counts it: those it was charged to, and of quotas that an admin has set all of their subject and
# model, since such a quota counts what was used before it was there.
CHARGES = """
SELECT h.*, q.id AS quota_id, q.dimension, q.input_weight_milli, q.cached_input_weight_milli, q.output_weight_milli,
       p.input_picos_per_token AS input_price, p.cached_input_picos_per_token AS cached_price,
       p.output_picos_per_token AS output_price, e.parts, e.input AS event_input, e.delivered AS event_delivered,
       q.id = ANY(h.quota_ids) AS is_charged
FROM holds h
JOIN quotas q ON q.id = ANY(h.quota_ids) OR (
    q.deleted_at IS NULL AND NOT q.for_new_keys AND q.subject_id IN (h.organization_id, h.project_id, h.api_key_id)
    AND q.model IN ('', h.model) AND q.id::text IN (SELECT subject_id FROM audit_log WHERE action = 'quota.set'))
JOIN price_versions p ON p.id = h.price_version_id
LEFT JOIN (SELECT hold_id, count(*) AS parts, sum(input_token_count) AS input, sum(delivered_token_count) AS delivered
           FROM usage_events GROUP BY hold_id) e ON e.hold_id = h.id
"""
COUNTERS = """
SELECT c.*, q.dimension, q.deleted_at, q.enforced,
       CASE WHEN q.raised_until > coalesce(nullif(c.window_start, 'epoch'), first.admitted_at)
            THEN q.raised_limit_value ELSE q.limit_value END AS bound
FROM quota_counters c JOIN quotas q ON q.id = quota_id,
LATERAL (SELECT min(admitted_at) AS admitted_at FROM holds WHERE state = 'held' AND q.id = ANY(quota_ids)) first
"""
# What an admin made tighter may be over its limit until its window ends.
LOWERED = """
SELECT DISTINCT subject_id FROM audit_log
WHERE action IN ('quota.set', 'quota.raise') AND (
    greatest((after->>'limit_value')::numeric, (after->>'raised_limit_value')::numeric)
    < greatest((before->>'limit_value')::numeric, (before->>'raised_limit_value')::numeric)
    OR (after->>'enforced')::bool > (before->>'enforced')::bool)
"""
AUDITED = "SELECT DISTINCT subject_id FROM audit_log WHERE action = 'quota.set'"
EVENTS_OF_HOLDS = """
SELECT h.*, coalesce(e.parts, '{}') AS parts, coalesce(e.delivered, 0) AS event_delivered, coalesce(e.input, 0) AS event_input,
       k.project_id AS key_project_id, j.organization_id AS project_organization_id
FROM holds h
LEFT JOIN (SELECT hold_id, array_agg(part ORDER BY part) AS parts, sum(delivered_token_count) AS delivered,
                  sum(input_token_count) AS input
           FROM usage_events GROUP BY hold_id) e ON e.hold_id = h.id
LEFT JOIN api_keys k ON k.id = h.api_key_id
LEFT JOIN projects j ON j.id = h.project_id
"""
EVENTS = """
SELECT e.*, h.id AS known_hold_id,
       (h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model, h.price_version_id)
       IS DISTINCT FROM (e.organization_id, e.project_id, e.api_key_id, e.request_id, e.model, e.price_version_id) AS differs,
       (e.input_token_count - e.cached_input_token_count) * p.input_picos_per_token
       + e.cached_input_token_count * p.cached_input_picos_per_token
       + e.billed_token_count * p.output_picos_per_token AS right_cost
FROM usage_events e LEFT JOIN holds h ON h.id = e.hold_id LEFT JOIN price_versions p ON p.id = e.price_version_id
"""


@dataclass(slots=True)
class Expected:
    """What the counters must say. doubtful: what may be missing in them, since it was given back while the quota was made."""

    held: Counter[Place] = field(default_factory=Counter)
    used: Counter[Place] = field(default_factory=Counter)
    doubtful: Counter[Place] = field(default_factory=Counter)


def check_invariants(database_url: str, *, all_ended: bool = False, over: Collection[uuid.UUID] = ()) -> None:
    """Raises: AssertionError telling everything that is wrong.

    all_ended: that no hold may be live any more either. over: quotas that were set below what was used already.
    """
    found = list(find_violations(database_url, all_ended=all_ended, over=over))
    assert not found, "\n".join(found)


def find_violations(database_url: str, *, all_ended: bool = False, over: Collection[uuid.UUID] = ()) -> Iterator[str]:
    """Everything that is wrong, at one moment (one snapshot)."""
    with psycopg.connect(psycopg_conninfo(database_url), row_factory=dict_row) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield from violations_in(connection, all_ended=all_ended, over=over)


def violations_in(
    connection: psycopg.Connection[Row], *, all_ended: bool = False, over: Collection[uuid.UUID] = ()
) -> Iterator[str]:
    """The same as the connection's transaction sees it."""
    charges = connection.execute(CHARGES).fetchall()
    counters = connection.execute(COUNTERS).fetchall()
    lowered = {row["subject_id"] for row in connection.execute(LOWERED)} | set(map(str, over))
    audited = {row["subject_id"] for row in connection.execute(AUDITED)}
    now = connection.execute("SELECT now()").fetchone()
    assert now is not None
    yield from wrong_counters(expected_counters(charges), counters, lowered, audited)
    yield from missing_counters(expected_counters(charges), counters, audited, now["now"])
    yield from wrong_holds(connection.execute(EVENTS_OF_HOLDS).fetchall())
    yield from wrong_events(connection.execute(EVENTS).fetchall())
    if connection.execute("SELECT 1 FROM meter_batches LIMIT 1").fetchone():
        yield from export_violations(connection)
    if all_ended:
        for row in connection.execute("SELECT id, owner_id FROM holds WHERE state = 'held'"):
            yield f"hold {row['id']} of {row['owner_id']} is still live"


def window_of(dimension: str, at: datetime) -> str:
    """The name of the window that a moment lies in."""
    form = DIMENSIONS[dimension][0]
    return "always" if form is None else at.astimezone(UTC).strftime(form)


def weighed(row: Row, sent: int, cached: int, output: int) -> int:
    """What tokens count for the quota beside their hold, rounded up to a whole."""
    if row["dimension"].startswith("cost"):
        return int((sent - cached) * row["input_price"] + cached * row["cached_price"] + output * row["output_price"])
    _, input_counts, output_counts = DIMENSIONS[row["dimension"]]
    thousandths = input_counts * ((sent - cached) * row["input_weight_milli"] + cached * row["cached_input_weight_milli"])
    thousandths += output_counts * output * row["output_weight_milli"]
    return math.ceil(Fraction(thousandths, 1000))


def segments(row: Row) -> list[tuple[str, int]]:
    """What a hold has left in `used` of the quota beside it: the window of each part, and how much, in the order of time."""
    sent, cached, quota = row["input_token_count"], row["cached_input_token_count"], row["dimension"]
    marks = row["posted_minutes"]
    posts = [(datetime.fromtimestamp(marks[i] * 60, UTC), marks[i + 1]) for i in range(0, len(marks), 2)]
    posts.append((row["charged_at"], row["posted_token_count"]))
    left, before = [], 0
    for at, posted in posts:
        so_far = weighed(row, sent, cached, posted - sent) if posted else 0
        left.append((window_of(quota, at), so_far - before))
        before = so_far
    if row["state"] in ("settled", "expired"):
        output = row["leased_token_count"]
        # An expired hold that was settled late has an event beyond the one of its expiry, and has given back the rest of its lease.
        if row["state"] == "settled" or told_late(row):
            sent, output = int(row["event_input"] or 0), int(row["event_delivered"] or 0)
        total = weighed(row, sent, min(cached, sent), output)
        left.append((window_of(quota, row["charged_at"]), max(total - before, 0)))
    return left


def told_late(row: Row) -> bool:
    """Whether the owner of an expired hold has come back with what it delivered."""
    return row["state"] == "expired" and (row["parts"] or 0) > (1 if row["delivered_token_count"] else 0)


def held_by(row: Row) -> int:
    """What a live hold claims of the quota beside it."""
    if row["dimension"] == "concurrent_requests":
        return 1
    sent, cached, leased = row["input_token_count"], row["cached_input_token_count"], row["leased_token_count"]
    if row["posted_token_count"]:
        return weighed(row, sent, cached, leased) - weighed(row, sent, cached, row["posted_token_count"] - sent)
    return max(weighed(row, sent, 0, leased), weighed(row, sent, sent, leased))


def expected_counters(charges: list[Row]) -> Expected:
    """The counters as the holds say they must be."""
    expected = Expected()
    for row in charges:
        quota, dimension = row["quota_id"], row["dimension"]
        place = quota, window_of(dimension, row["charged_at"])
        if dimension == "requests_per_minute":
            place = quota, window_of(dimension, row["admitted_at"])
            expected.used[place] += row["state"] != "voided"
        elif row["state"] == "held":
            expected.held[place] += held_by(row)
        if dimension not in ("requests_per_minute", "concurrent_requests"):
            for window, amount in segments(row):
                expected.used[quota, window] += amount
            if told_late(row) and not row["is_charged"]:
                expected.doubtful[place] += weighed(row, row["input_token_count"], 0, row["leased_token_count"])
    return expected


def wrong_counters(expected: Expected, counters: list[Row], lowered: set[str], audited: set[str]) -> Iterator[str]:
    """held = what live holds claim; used = what holds have left; used + held within a limit that was never lowered.

    Of a quota that an admin set and removed again nobody knows any more what it counted when it was made.
    """
    for row in counters:
        quota, place = row["quota_id"], (row["quota_id"], window_of(row["dimension"], row["window_start"]))
        if row["held"] != expected.held[place]:
            yield f"counter {place}: held {row['held']}, but live holds claim {expected.held[place]}"
        least = expected.used[place]
        most = least + expected.doubtful[place]
        if row["deleted_at"] is not None and str(quota) in audited:
            most = max(most, row["used"])
        if not least <= row["used"] <= most:
            yield f"counter {place}: used {row['used']}, but holds left {least} to {most}"
        binds = row["deleted_at"] is None and row["enforced"] and str(quota) not in lowered
        if binds and row["used"] + row["held"] > row["bound"]:
            yield f"counter {place}: used {row['used']} + held {row['held']} exceed the limit {row['bound']}"


def missing_counters(expected: Expected, counters: list[Row], audited: set[str], now: datetime) -> Iterator[str]:
    """Every charge stands somewhere. A quota that an admin has set has no counters of the windows before it."""
    seen = {(row["quota_id"], window_of(row["dimension"], row["window_start"])) for row in counters}
    current = {window_of(dimension, now) for dimension in DIMENSIONS}
    for place in (set(+expected.held) | set(+expected.used)) - seen:
        quota, window = place
        if expected.held[place] or window in current or str(quota) not in audited:
            yield f"counter {place} is missing: holds claim {expected.held[place]} and left {expected.used[place]}"


def wrong_holds(holds: list[Row]) -> Iterator[str]:
    """Each hold in one state, with the usage events that belong to it; one hold per request but for voided ones."""
    requests = Counter((row["project_id"], row["request_id"]) for row in holds if row["state"] != "voided")
    for request, count in requests.items():
        if count > 1:
            yield f"request {request} has {count} holds that were not voided"
    for row in holds:
        name, state, parts = f"hold {row['id']} ({row['state']})", row["state"], row["parts"]
        if (row["ended_at"] is None) != (state == "held"):
            yield f"{name} ended at {row['ended_at']}"
        if parts != list(range(len(parts))):
            yield f"{name} has the parts {parts}"
        if state in ("held", "voided") and parts:
            yield f"{name} has a usage event"
        if state == "settled" and (len(parts) != 1 or row["event_delivered"] != row["delivered_token_count"]):
            yield f"{name}: {len(parts)} usage events with {row['event_delivered']} tokens of {row['delivered_token_count']}"
        if state == "expired" and not row["delivered_token_count"] <= row["event_delivered"] <= row["leased_token_count"]:
            yield f"{name}: usage events with {row['event_delivered']} tokens, known to be delivered {row['delivered_token_count']}"
        if state == "expired" and len(parts) > 1 and not row["delivered_token_count"]:
            yield f"{name}: {len(parts)} usage events, though nothing was known when it expired"
        if row["event_input"] not in (0, row["input_token_count"]):
            yield f"{name}: {row['event_input']} input tokens in usage events, {row['input_token_count']} in the request"
        if (row["key_project_id"], row["project_organization_id"]) != (row["project_id"], row["organization_id"]):
            yield f"{name} is charged to a key, a project and an organization that do not belong together"


def wrong_events(events: list[Row]) -> Iterator[str]:
    """Every usage event belongs to a hold, repeats its facts and is priced exactly."""
    for row in events:
        name = f"usage event {row['id']} of hold {row['hold_id']}"
        if row["known_hold_id"] is None:
            yield f"{name}: there is no such hold"
        elif row["differs"]:
            yield f"{name} tells another story than its hold"
        if row["cost_picos"] != row["right_cost"]:
            yield f"{name} costs {row['cost_picos']} picos, by its price version {row['right_cost']}"
        # A hold that has its own id as request id was taken in advance, for a request that is billed under another hold.
        to_bill = 0 if row["request_id"] == row["hold_id"] else row["delivered_token_count"]
        if row["billed_token_count"] != to_bill:
            yield f"{name} bills {row['billed_token_count']} of {row['delivered_token_count']} delivered tokens"
