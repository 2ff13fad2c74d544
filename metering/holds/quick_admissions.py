"""Admissions that fit by all that is known, in one round trip; whatever else there is to them goes the long way (`hold_batch.py`).

Nothing is decided here that the database does not see for itself, in the same transaction: that no rule, price or key has changed
since it was read, that it is the minute that was reckoned with, that every counter has room for all that the batch adds to it, and
that no request id is taken. Where it sees anything else nothing is done, and the batch goes the long way. Counters are moved, not
set: so two such batches, of one process or of several, are exact in any order, and wait for each other only to commit.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from metering.holds.counter_rows import key_columns
from metering.holds.exchange import Connection, Statement, array, exchange
from metering.holds.hold_rows import BEGIN_ADMITTING
from metering.holds.hold_writes import NewHold, insertion
from metering.holds.known import Known, Terms
from metering.operations import Admit, Admitted, QuotaState
from metering.quotas.quota_rules import CounterKey, QuotaRule, window_starts

MINUTE = timedelta(minutes=1)
# After the lock that whoever sets a quota holds alone, and in a statement of its own: it sees what was committed meanwhile.
CHECK_KNOWN = """
SELECT now(), pg_current_snapshot()::text, 1 / (now() >= %s::timestamptz AND now() < %s::timestamptz AND NOT EXISTS (
    SELECT FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before)))::int
"""
CHARGE_COUNTERS = """
WITH charged AS (
    UPDATE quota_counters c SET used = c.used + v.used, held = c.held + v.held
    FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[], %s::bigint[]) WITH ORDINALITY
        AS v(quota_id, window_start, used, held, limit_value, place)
    WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start AND c.used + c.held + v.used + v.held <= v.limit_value
    RETURNING v.place, c.used, c.held
) SELECT c.place, c.used, c.held, 1 / ((SELECT count(*) FROM charged) = %s)::int FROM (SELECT) one LEFT JOIN charged c ON true
"""


@dataclass(slots=True)
class Charge:
    """What a batch adds to one counter, and after its commit what stands there."""

    rule: QuotaRule
    used: int = 0
    held: int = 0


@dataclass(slots=True)
class Plan:
    """Admissions that fit as far as is known, in the minute that begins at `minute`, if the batch begins before `until`."""

    minute: datetime
    until: datetime
    snapshot: str
    places: list[int] = field(default_factory=list)  # of the admissions in their batch
    admissions: list[tuple[Admit, Terms, list[tuple[CounterKey, bool, int]]]] = field(default_factory=list)
    charges: dict[CounterKey, Charge] = field(default_factory=dict)


def plan(known: Known, operations: Sequence[Admit]) -> Plan | None:
    """Those of the operations that can be done quickly, in their order; None if there is none."""
    now = known.now()
    if now is None or known.snapshot is None:
        return None
    minute = now.replace(second=0, microsecond=0)
    planned = Plan(minute, minute + MINUTE, known.snapshot)
    starts = window_starts(minute)
    for place, op in enumerate(operations):
        terms = known.terms.get((op.payer, op.model, op.tier, op.embedding))
        if terms is None or (terms.until is not None and terms.until <= now):
            continue
        charges = charges_of(known, op, terms, starts)
        if charges is None:
            continue
        planned.places.append(place)
        planned.admissions.append((op, terms, charges))
        if terms.until is not None and terms.until < planned.until:
            planned.until = terms.until
        for (key, is_used_at_once, amount), rule in zip(charges, terms.rules, strict=True):
            charge = planned.charges.get(key)
            if charge is None:
                charge = planned.charges[key] = Charge(rule)
            if is_used_at_once:
                charge.used += amount
            else:
                charge.held += amount
            known.totals[key] += amount  # a guess as well: the commit will tell
    return planned if planned.admissions else None


def charges_of(known: Known, op: Admit, terms: Terms, starts: tuple[datetime, ...]) -> list[tuple[CounterKey, bool, int]] | None:
    """What one admission with its whole first slice adds to each counter; None if that may not fit, or a counter is not known."""
    sent, lease, totals = op.input_token_count, op.first_slice_token_count, known.totals
    charges: list[tuple[CounterKey, bool, int]] = []
    for number, window, limit, is_used_at_once, fixed, per_input, per_output, divisor in terms.weighings:
        key = (number, starts[window])
        amount = fixed or -(-(sent * per_input + lease * per_output) // divisor)  # `Weighing.amount`, without the call
        total = totals.get(key)
        if total is None or total + amount > limit:
            return None
        charges.append((key, is_used_at_once, amount))
    return charges


async def admit_planned(
    connection: Connection, known: Known, planned: Plan, owner_id: uuid.UUID, expiry_s: float
) -> list[Admitted]:
    """Do what was planned, whole or not at all.

    Raises: what the database raises where something is not as it was thought to be; nothing is committed then.
    """
    keys = sorted(planned.charges)
    charges = [planned.charges[key] for key in keys]
    columns = (
        *key_columns(keys),
        array(charge.used for charge in charges),
        array(charge.held for charge in charges),
        array(charge.rule.limit_value or 0 for charge in charges),
    )
    holds = [NewHold(op, terms.prices.version, op.first_slice_token_count, terms.quota_ids) for op, terms, _ in planned.admissions]
    statements: list[Statement] = [
        (BEGIN_ADMITTING, ()),
        (CHECK_KNOWN, (time_text(planned.minute), time_text(planned.until), planned.snapshot)),
    ]
    if charges:  # before the holds: whoever waits for a request id of another has its counters, like everybody else
        statements.append((CHARGE_COUNTERS, (*columns, len(keys))))
    statements.append(insertion(owner_id, expiry_s, holds))
    _, [(now, snapshot, _)], *charged, _ = await exchange(connection, statements)
    known.asked(now, snapshot, ())
    for place, used, held, _ in charged[0] if charged else ():
        charges[place - 1].used, charges[place - 1].held = used, held
    known.saw((key, charge.used + charge.held) for key, charge in zip(keys, charges, strict=True))
    return answers(planned, now)


def answers(planned: Plan, now: datetime) -> list[Admitted]:
    """Each admission with the counters as they stood when it was counted: from the last one backwards."""
    found: list[Admitted] = []
    for op, terms, added in reversed(planned.admissions):
        states: list[QuotaState] = []
        for key, is_used_at_once, amount in added:
            charge = planned.charges[key]
            states.append(QuotaState(charge.rule, charge.used, charge.held, now))
            if is_used_at_once:
                charge.used -= amount
            else:
                charge.held -= amount
        found.append(Admitted(op.hold_id, op.first_slice_token_count, terms.prices, tuple(states), now))
    found.reverse()
    return found


@functools.lru_cache(maxsize=64)
def time_text(at: datetime) -> str:
    """A time as the database reads it."""
    return str(at)
