"""What must be true of holds, counters and usage events at every commit, worked out from the rows and from nothing else.

Independent of `metering/quotas.py` on purpose: the windows are PostgreSQL's `date_trunc`, the sums are written down here once more.
For any database at any time; `tests/metering/test_invariants.py` shows that each check can fail.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row

from metering.db import psycopg_conninfo

Row = dict[str, Any]
Window = tuple[uuid.UUID, datetime]

TOKENS = ("tokens_per_minute", "tokens_per_day", "tokens_per_month")

# Each hold beside each quota it was charged to, with the windows in which it was admitted and last charged.
CHARGES = """
SELECT h.*, q.id AS quota_id, q.dimension, p.input_picos_per_token AS input_price,
       p.cached_input_picos_per_token AS cached_price, p.output_picos_per_token AS output_price,
       CASE WHEN w.unit IS NULL THEN 'epoch' ELSE date_trunc(w.unit, h.admitted_at, 'UTC') END AS first_window,
       CASE WHEN w.unit IS NULL THEN 'epoch' ELSE date_trunc(w.unit, h.charged_at, 'UTC') END AS last_window,
       e.parts, e.input AS event_input, e.delivered AS event_delivered
FROM holds h
JOIN quotas q ON q.id = ANY(h.quota_ids)
JOIN (VALUES ('concurrent_requests', NULL), ('requests_per_minute', 'minute'), ('tokens_per_minute', 'minute'),
             ('tokens_per_day', 'day'), ('tokens_per_month', 'month'), ('cost_picos_per_month', 'month')
     ) AS w(dimension, unit) USING (dimension)
JOIN price_versions p ON p.id = h.price_version_id
LEFT JOIN (SELECT hold_id, count(*) AS parts, sum(input_token_count) AS input, sum(delivered_token_count) AS delivered
           FROM usage_events GROUP BY hold_id) e ON e.hold_id = h.id
"""
LOWERED = """
SELECT DISTINCT subject_id FROM audit_log
WHERE action = 'quota.set' AND (after->>'limit_value')::numeric < (before->>'limit_value')::numeric
"""
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
    """What the counters must say. Where an extension has posted tokens and the window changed, only the quota's total is known."""

    held: Counter[Window] = field(default_factory=Counter)
    used: Counter[Window] = field(default_factory=Counter)
    used_total: Counter[uuid.UUID] = field(default_factory=Counter)
    spread: defaultdict[uuid.UUID, list[tuple[datetime, datetime, int]]] = field(default_factory=lambda: defaultdict(list))


def check_invariants(database_url: str, *, all_ended: bool = False) -> None:
    """Raises: AssertionError telling everything that is wrong. all_ended: that no hold may be live any more either."""
    found = list(find_violations(database_url, all_ended=all_ended))
    assert not found, "\n".join(found)


def find_violations(database_url: str, *, all_ended: bool = False) -> Iterator[str]:
    """Everything that is wrong, at one moment (one snapshot)."""
    with psycopg.connect(psycopg_conninfo(database_url), row_factory=dict_row) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield from violations_in(connection, all_ended=all_ended)


def violations_in(connection: psycopg.Connection[Row], *, all_ended: bool = False) -> Iterator[str]:
    """The same as the connection's transaction sees it."""
    charges = connection.execute(CHARGES).fetchall()
    counters = connection.execute("SELECT c.*, q.limit_value, q.deleted_at FROM quota_counters c JOIN quotas q ON q.id = quota_id")
    yield from wrong_counters(charges, counters.fetchall(), {row["subject_id"] for row in connection.execute(LOWERED)})
    yield from wrong_holds(connection.execute(EVENTS_OF_HOLDS).fetchall())
    yield from wrong_events(connection.execute(EVENTS).fetchall())
    if all_ended:
        for row in connection.execute("SELECT id, owner_id FROM holds WHERE state = 'held'"):
            yield f"hold {row['id']} of {row['owner_id']} is still live"


def cost(row: Row, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Exact price of tokens under the hold's price version."""
    uncached = input_tokens - cached_tokens
    return int(uncached * row["input_price"] + cached_tokens * row["cached_price"] + output_tokens * row["output_price"])


def held_by(row: Row) -> int:
    """What a live hold claims of the quota beside it."""
    dimension = row["dimension"]
    if row["state"] != "held" or dimension == "requests_per_minute":
        return 0
    if dimension == "concurrent_requests":
        return 1
    if dimension in TOKENS:
        return int(row["input_token_count"] + row["leased_token_count"] - row["posted_token_count"])
    sent, leased = row["input_token_count"], row["leased_token_count"]
    if row["posted_token_count"]:
        return int((sent + leased - row["posted_token_count"]) * row["output_price"])
    return max(cost(row, sent, 0, leased), cost(row, sent, sent, leased))


def used_by(row: Row) -> tuple[int, int]:
    """What a hold has left in `used` of the quota beside it, in all windows: posted by extensions, and added by its end."""
    dimension, state = row["dimension"], row["state"]
    if dimension == "concurrent_requests":
        return 0, 0
    if dimension == "requests_per_minute":
        return 0, int(state != "voided")
    is_cost = dimension == "cost_picos_per_month"
    posted = int(row["posted_cost_picos"] if is_cost else row["posted_token_count"])
    if state in ("held", "voided"):
        return posted, 0
    sent, output = row["input_token_count"], row["leased_token_count"]
    # An expired hold that was settled late has an event beyond the one of its expiry, and has given back the rest of its lease.
    if state == "settled" or (row["parts"] or 0) > (1 if row["delivered_token_count"] else 0):
        sent, output = int(row["event_input"] or 0), int(row["event_delivered"] or 0)
    total = cost(row, sent, min(row["cached_input_token_count"], sent), output) if is_cost else sent + output
    return posted, max(total - posted, 0)


def expected_counters(charges: list[Row]) -> Expected:
    """The counters as the holds say they must be."""
    expected = Expected()
    for row in charges:
        quota, first, last = row["quota_id"], row["first_window"], row["last_window"]
        posted, ended = used_by(row)
        if row["dimension"] == "requests_per_minute":
            last = first
        expected.held[quota, last] += held_by(row)
        expected.used[quota, last] += ended
        expected.used_total[quota] += posted + ended
        if first == last:
            expected.used[quota, last] += posted
        elif posted:
            expected.spread[quota].append((first, last, posted))
    return expected


def wrong_counters(charges: list[Row], counters: list[Row], lowered: set[str]) -> Iterator[str]:
    """held = what live holds claim; used = what holds have left; used + held within a limit that was never lowered."""
    expected = expected_counters(charges)
    seen: set[Window] = set()
    used_total: Counter[uuid.UUID] = Counter()
    for row in counters:
        quota, key = row["quota_id"], (row["quota_id"], row["window_start"])
        seen.add(key)
        used_total[quota] += row["used"]
        if row["held"] != expected.held[key]:
            yield f"counter {key}: held {row['held']}, but live holds claim {expected.held[key]}"
        least = expected.used[key]
        most = least + sum(posted for first, last, posted in expected.spread[quota] if first <= row["window_start"] <= last)
        if not least <= row["used"] <= most:
            yield f"counter {key}: used {row['used']}, but holds left {least} to {most}"
        if row["deleted_at"] is None and str(quota) not in lowered and row["used"] + row["held"] > row["limit_value"]:
            yield f"counter {key}: used {row['used']} + held {row['held']} exceed the limit {row['limit_value']}"
    for quota, total in expected.used_total.items():
        if used_total[quota] != total:
            yield f"quota {quota}: used {used_total[quota]} over all windows, but holds left {total}"
    for key in (set(+expected.held) | set(+expected.used)) - seen:
        yield f"counter {key} is missing: holds claim {expected.held[key]} and left {expected.used[key]}"


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
        if row["billed_token_count"] != row["delivered_token_count"]:
            yield f"{name} bills {row['billed_token_count']} of {row['delivered_token_count']} delivered tokens"
