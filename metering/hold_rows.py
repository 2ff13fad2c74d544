"""The SQL of one batch of hold operations: what is read and locked, and what is written back. No decisions.

Statements are sent in psycopg pipelines: a batch costs three round trips whatever its size. Columns of ids, numbers and times go as
array literals (`array`), which cost a third of what psycopg's own lists cost.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from metering.models import HoldState, QuotaDimension, QuotaSubject
from metering.operations import Admit, Settled
from metering.pricing import TokenPrices
from metering.quotas import Claim, Counter, CounterKey, Counters, QuotaRule

Connection = AsyncConnection[tuple[Any, ...]]

# What the usage events of a hold add up to; the last part tells how it ended.
EVENT_SUMS = """
count(*)::int AS part_count, coalesce(sum(input_token_count), 0)::bigint AS input_token_count,
coalesce(sum(cached_input_token_count), 0)::bigint AS cached_input_token_count,
coalesce(sum(generated_token_count), 0)::bigint AS generated_token_count,
coalesce(sum(delivered_token_count), 0)::bigint AS delivered_token_count,
coalesce(sum(billed_token_count), 0)::bigint AS billed_token_count, coalesce(sum(cost_picos), 0)::bigint AS cost_picos,
coalesce((array_agg(outcome ORDER BY part DESC))[1], '') AS outcome
"""
SELECT_HOLDS = """
SELECT id, state, owner_id, price_version_id, input_token_count, cached_input_token_count, leased_token_count,
       delivered_token_count, posted_token_count, posted_cost_picos, quota_ids, admitted_at, charged_at, expires_at, request_id
FROM holds WHERE id = ANY(%s::uuid[]) ORDER BY id FOR UPDATE
"""
# A statement of its own, after the holds are locked: joined to the locking one it would see the events as they were before the
# lock was waited for, and a hold that another process has just ended would look as if nothing had been used.
SELECT_EVENT_SUMS = f"SELECT hold_id, {EVENT_SUMS} FROM usage_events WHERE hold_id = ANY(%s) GROUP BY hold_id"
SELECT_ORPHANS = "SELECT id FROM holds WHERE owner_id = %s AND state = 'held' AND id <> ALL(%s)"
SELECT_SAME_REQUEST = f"""
SELECT h.project_id, h.request_id, h.state, h.payload_hash, h.id, p.currency_code, e.*
FROM holds h JOIN unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) USING (project_id, request_id)
JOIN price_versions p ON p.id = h.price_version_id,
LATERAL (SELECT {EVENT_SUMS} FROM usage_events WHERE h.state <> 'held' AND hold_id = h.id) e
WHERE h.state <> 'voided'
"""
SELECT_LIVE_KEYS = """
SELECT id FROM api_keys
WHERE id = ANY(%s::uuid[]) AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""
SELECT_RULES = """
SELECT id, subject, subject_id, model, dimension, CASE WHEN deleted_at IS NULL THEN limit_value END AS limit_value
FROM quotas
WHERE (deleted_at IS NULL AND subject_id = ANY(%s::uuid[])) OR id = ANY(%s::uuid[])
"""
SELECT_PRICES_IN_FORCE = """
SELECT DISTINCT ON (p.model, p.currency_code) p.model, p.id AS version, p.currency_code, p.input_picos_per_token,
       p.cached_input_picos_per_token, p.output_picos_per_token
FROM price_versions p JOIN unnest(%s::text[], %s::text[]) AS a(model, currency_code) USING (model, currency_code)
WHERE p.effective_at <= now()
ORDER BY p.model, p.currency_code, p.effective_at DESC
"""
SELECT_PRICES = """
SELECT model, id AS version, currency_code, input_picos_per_token, cached_input_picos_per_token, output_picos_per_token
FROM price_versions WHERE id = ANY(%s)
"""
LOCK_COUNTERS = """
SELECT c.quota_id, c.window_start, c.used, c.held
FROM quota_counters c JOIN unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start) USING (quota_id, window_start)
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
INSERT_COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start)
SELECT quota_id, window_start FROM unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start)
ORDER BY quota_id, window_start
ON CONFLICT DO NOTHING RETURNING quota_id, window_start
"""
UPDATE_COUNTERS = """
UPDATE quota_counters c SET used = v.used, held = v.held
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[]) AS v(quota_id, window_start, used, held)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
INSERT_HOLDS = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels,
                   owner_id, input_token_count, leased_token_count, quota_ids, admitted_at, charged_at, expires_at)
SELECT id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels::jsonb,
       owner_id, input_token_count, leased_token_count, quota_ids::uuid[], now(), now(),
       now() + make_interval(secs => %s)
FROM unnest(%s::uuid[], %s::uuid[], %s::uuid[], %s::uuid[], %s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::text[],
            %s::uuid[], %s::bigint[], %s::bigint[], %s::text[])
    AS v(id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels, owner_id,
         input_token_count, leased_token_count, quota_ids)
"""
UPDATE_HOLDS = """
UPDATE holds h SET state = v.state, cached_input_token_count = v.cached, leased_token_count = v.leased,
    delivered_token_count = v.delivered, posted_token_count = v.posted, posted_cost_picos = v.posted_cost,
    charged_at = v.charged_at, ended_at = CASE WHEN v.state = 'held' THEN NULL ELSE now() END,
    expires_at = CASE WHEN v.state = 'held' THEN now() + make_interval(secs => %s) ELSE h.expires_at END
FROM unnest(%s::uuid[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::timestamptz[])
    AS v(id, state, cached, leased, delivered, posted, posted_cost, charged_at)
WHERE h.id = v.id
"""
# Whoever else has a hold under lock is ending it: renewing it would be in vain, and waiting could deadlock.
RENEW_HOLDS = """
UPDATE holds SET expires_at = now() + make_interval(secs => %s)
WHERE id IN (SELECT id FROM holds WHERE owner_id = %s AND state = 'held' AND id = ANY(%s::uuid[]) FOR NO KEY UPDATE SKIP LOCKED)
"""
DELETE_COUNTERS = """
DELETE FROM quota_counters c USING unnest(%s::uuid[], %s::timestamptz[]) AS v(quota_id, window_start)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
INSERT_USAGE_EVENTS = """
INSERT INTO usage_events (hold_id, part, organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count,
    cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count, price_version_id, cost_picos,
    timings, labels, recovered, admitted_at)
SELECT h.id, v.part, h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model, v.outcome, v.input, v.cached,
    v.generated, v.delivered, v.billed, h.price_version_id, v.cost, v.timings::jsonb, h.labels, v.recovered, h.admitted_at
FROM unnest(%s::uuid[], %s::smallint[], %s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
            %s::bigint[], %s::text[], %s::bool[])
    AS v(hold_id, part, outcome, input, cached, generated, delivered, billed, cost, timings, recovered)
JOIN holds h ON h.id = v.hold_id
"""


@dataclass(frozen=True, slots=True)
class HoldRow:
    """A locked hold."""

    id: uuid.UUID
    state: str
    owner_id: uuid.UUID
    price_version_id: int
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    posted_cost_picos: int
    quota_ids: list[uuid.UUID]
    admitted_at: datetime
    charged_at: datetime
    expires_at: datetime
    request_id: uuid.UUID

    @property
    def unbound(self) -> bool:
        """Whether it was taken in advance and no request has been given to it (`bind_batch.py`)."""
        return self.request_id == self.id

    def claim(self, prices: TokenPrices, cached_input_token_count: int | None = None) -> Claim:
        """What the hold claims of its quotas; `cached_input_token_count` where more is known than the row has."""
        return Claim(
            prices=prices,
            input_token_count=self.input_token_count,
            cached_input_token_count=max(self.cached_input_token_count, cached_input_token_count or 0),
            leased_token_count=self.leased_token_count,
            posted_token_count=self.posted_token_count,
            posted_cost_picos=self.posted_cost_picos,
            admitted_at=self.admitted_at,
            charged_at=self.charged_at,
        )


class EventSums(NamedTuple):
    """What the usage events of one hold add up to; nothing for a hold that has none."""

    part_count: int = 0
    input_token_count: int = 0
    cached_input_token_count: int = 0
    generated_token_count: int = 0
    delivered_token_count: int = 0
    billed_token_count: int = 0
    cost_picos: int = 0
    outcome: str = ""

    def settled(self, hold_id: uuid.UUID, currency_code: str) -> Settled:
        """The usage that stands."""
        return Settled(hold_id, *self[1:7], currency_code=currency_code, outcome=self.outcome)

    def plus(self, part: Settled) -> EventSums:
        """With one more part."""
        return EventSums(
            self.part_count + 1,
            self.input_token_count + part.input_token_count,
            self.cached_input_token_count + part.cached_input_token_count,
            self.generated_token_count + part.generated_token_count,
            self.delivered_token_count + part.delivered_token_count,
            self.billed_token_count + part.billed_token_count,
            self.cost_picos + part.cost_picos,
            part.outcome,
        )


class SameRequest(NamedTuple):
    """A hold that exists for a request id, and its usage if it has ended."""

    state: str
    payload_hash: bytes
    settled: Settled | None


@dataclass(slots=True)
class BatchReads:
    """What the database holds at the beginning of a batch."""

    now: datetime
    holds: dict[uuid.UUID, HoldRow] = field(default_factory=dict)
    events: dict[uuid.UUID, EventSums] = field(default_factory=dict)
    same_requests: dict[tuple[uuid.UUID, uuid.UUID], SameRequest] = field(default_factory=dict)
    live_key_ids: set[uuid.UUID] = field(default_factory=set)
    rules: dict[uuid.UUID, QuotaRule] = field(default_factory=dict)
    prices_in_force: dict[tuple[str, str], TokenPrices] = field(default_factory=dict)
    prices: dict[int, TokenPrices] = field(default_factory=dict)
    _rules_of: dict[tuple[uuid.UUID, str], list[QuotaRule]] = field(default_factory=dict)

    def rules_of(self, subject_id: uuid.UUID, model: str) -> list[QuotaRule]:
        """Rules in force of one subject that a request for the model is charged to; found once per batch, not once per request."""
        if not self._rules_of:
            for rule in self.rules.values():
                if rule.limit_value is not None:
                    self._rules_of.setdefault((rule.subject_id, rule.model), []).append(rule)
        return self._rules_of.get((subject_id, ""), []) + self._rules_of.get((subject_id, model), [])


@dataclass(frozen=True, slots=True)
class HoldChange:
    """The new values of one hold row."""

    hold_id: uuid.UUID
    state: HoldState
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    posted_cost_picos: int
    charged_at: datetime


@dataclass(frozen=True, slots=True)
class NewHold:
    """A hold to insert."""

    admit: Admit
    price_version: int
    leased_token_count: int
    quota_ids: tuple[uuid.UUID, ...]


@dataclass(frozen=True, slots=True)
class NewUsageEvent:
    """A usage event to insert."""

    settled: Settled
    part: int
    timings: dict[str, float] | None
    recovered: bool


@dataclass(slots=True)
class BatchWrites:
    """All that a batch changes."""

    holds: list[NewHold] = field(default_factory=list)
    changes: dict[uuid.UUID, HoldChange] = field(default_factory=dict)
    events: list[NewUsageEvent] = field(default_factory=list)
    renewed: list[tuple[uuid.UUID, frozenset[uuid.UUID]]] = field(default_factory=list)


async def read_time_and_holds(connection: Connection, hold_ids: Collection[uuid.UUID]) -> BatchReads:
    """Begin the transaction; lock the holds."""
    async with connection.pipeline():
        await connection.execute("BEGIN")
        time = await connection.execute("SELECT now()")
        if hold_ids:
            holds = await connection.execute(SELECT_HOLDS, (array(hold_ids),))
    row = await time.fetchone()
    assert row is not None
    reads = BatchReads(now=row[0])
    if hold_ids:
        reads.holds = {row[0]: HoldRow(*row) for row in await holds.fetchall()}
        ended = [hold.id for hold in reads.holds.values() if hold.state != HoldState.HELD]
        if ended:
            sums = await connection.execute(SELECT_EVENT_SUMS, (ended,))
            reads.events = {row[0]: EventSums(*row[1:]) for row in await sums.fetchall()}
    return reads


async def read_context(connection: Connection, reads: BatchReads, admits: Sequence[Admit]) -> None:
    """Read what decisions need beside the holds: rules, prices, keys, and holds of the same request ids."""
    quota_ids = {quota_id for hold in reads.holds.values() for quota_id in hold.quota_ids}
    versions = {hold.price_version_id for hold in reads.holds.values()}
    subjects = {subject for op in admits for subject in op.payer.subject_ids}
    async with connection.pipeline():
        rules = await connection.execute(SELECT_RULES, (array(subjects), array(quota_ids)))
        prices = await connection.execute(SELECT_PRICES, (list(versions),))
        if admits:
            same = await connection.execute(
                SELECT_SAME_REQUEST, (array(op.payer.project_id for op in admits), array(op.request_id for op in admits))
            )
            keys = await connection.execute(SELECT_LIVE_KEYS, (array({op.payer.api_key_id for op in admits}),))
            wanted = sorted({(op.model, op.payer.currency_code) for op in admits})
            in_force = await connection.execute(
                SELECT_PRICES_IN_FORCE, ([model for model, _ in wanted], [currency for _, currency in wanted])
            )
    if admits:
        reads.same_requests = {(row[0], row[1]): same_request(row) for row in await same.fetchall()}
        reads.live_key_ids = {row[0] for row in await keys.fetchall()}
        reads.prices_in_force = {(row[0], row[2]): TokenPrices(*row[1:]) for row in await in_force.fetchall()}
    reads.rules = {
        row[0]: QuotaRule(row[0], QuotaSubject(row[1]), row[2], row[3], QuotaDimension(row[4]), row[5])
        for row in await rules.fetchall()
    }
    reads.prices = {row[1]: TokenPrices(*row[1:]) for row in await prices.fetchall()}


def same_request(row: tuple[Any, ...]) -> SameRequest:
    """One row of SELECT_SAME_REQUEST."""
    _, _, state, payload_hash, hold_id, currency_code, *sums = row
    settled = None if state == HoldState.HELD else EventSums(*sums).settled(hold_id, currency_code)
    return SameRequest(state, payload_hash, settled)


async def lock_counters(connection: Connection, now: datetime, keys: Collection[CounterKey]) -> Counters:
    """Lock the counter rows in order, making those of windows that have just begun."""
    counters = Counters(now)
    if not keys:
        return counters
    parameters = key_columns(keys)
    rows = await (await connection.execute(LOCK_COUNTERS, parameters)).fetchall()
    if len(rows) < len(keys):
        async with connection.pipeline():
            inserted = await connection.execute(INSERT_COUNTERS, parameters)
            cursor = await connection.execute(LOCK_COUNTERS, parameters)
        counters.created = frozenset((row[0], row[1]) for row in await inserted.fetchall())
        rows = await cursor.fetchall()
    counters.rows = {(row[0], row[1]): Counter(row[2], row[3]) for row in rows}
    return counters


async def write_and_commit(
    connection: Connection, owner_id: uuid.UUID, expiry_s: float, counters: Counters, writes: BatchWrites
) -> None:
    """Write all changes and commit, in one round trip."""
    async with connection.pipeline():
        if counters.changed:
            rows = [counters.rows[key] for key in counters.changed]
            values = (array(row.used for row in rows), array(row.held for row in rows))
            await connection.execute(UPDATE_COUNTERS, (*key_columns(counters.changed), *values))
        if untouched := counters.created - counters.changed:  # a refused request leaves no trace
            await connection.execute(DELETE_COUNTERS, key_columns(untouched))
        if writes.holds:
            await connection.execute(INSERT_HOLDS, (expiry_s, *new_hold_columns(owner_id, writes.holds)))
        if writes.changes:
            await connection.execute(UPDATE_HOLDS, (expiry_s, *change_columns(list(writes.changes.values()))))
        if writes.events:
            await connection.execute(INSERT_USAGE_EVENTS, usage_event_columns(writes.events))
        for renewing_owner_id, hold_ids in writes.renewed:
            await connection.execute(RENEW_HOLDS, (expiry_s, renewing_owner_id, array(hold_ids)))
        await connection.execute("COMMIT")


def array(values: Iterable[uuid.UUID | int | bool | datetime | HoldState]) -> str:
    """An array literal. Only for values whose text needs no quoting."""
    return "{" + ",".join(map(str, values)) + "}"


def key_columns(keys: Iterable[CounterKey]) -> tuple[str, str]:
    """The two columns of counter keys."""
    return array(key[0] for key in keys), array(key[1] for key in keys)


def new_hold_columns(owner_id: uuid.UUID, holds: Sequence[NewHold]) -> tuple[str | list[Any], ...]:
    """One list per column of INSERT_HOLDS."""
    admits = [hold.admit for hold in holds]
    return (
        array(op.hold_id for op in admits),
        array(op.payer.organization_id for op in admits),
        array(op.payer.project_id for op in admits),
        array(op.payer.api_key_id for op in admits),
        array(op.request_id for op in admits),
        [op.payload_hash for op in admits],
        [op.model for op in admits],
        array(hold.price_version for hold in holds),
        [json.dumps(op.labels) for op in admits],
        array(owner_id for _ in holds),
        array(op.input_token_count for op in admits),
        array(hold.leased_token_count for hold in holds),
        [array(hold.quota_ids) for hold in holds],
    )


def change_columns(changes: Sequence[HoldChange]) -> tuple[str, ...]:
    """One list per column of UPDATE_HOLDS."""
    return (
        array(change.hold_id for change in changes),
        array(change.state for change in changes),
        array(change.cached_input_token_count for change in changes),
        array(change.leased_token_count for change in changes),
        array(change.delivered_token_count for change in changes),
        array(change.posted_token_count for change in changes),
        array(change.posted_cost_picos for change in changes),
        array(change.charged_at for change in changes),
    )


def usage_event_columns(events: Sequence[NewUsageEvent]) -> tuple[str | list[Any], ...]:
    """One list per column of INSERT_USAGE_EVENTS."""
    settled = [event.settled for event in events]
    return (
        array(usage.hold_id for usage in settled),
        array(event.part for event in events),
        [str(usage.outcome) for usage in settled],
        array(usage.input_token_count for usage in settled),
        array(usage.cached_input_token_count for usage in settled),
        array(usage.generated_token_count for usage in settled),
        array(usage.delivered_token_count for usage in settled),
        array(usage.billed_token_count for usage in settled),
        array(usage.cost_picos for usage in settled),
        [None if event.timings is None else json.dumps(event.timings) for event in events],
        array(event.recovered for event in events),
    )
