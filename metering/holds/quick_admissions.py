"""Admissions that fit by all that is known, in one round trip; whatever else there is to them goes the long way (`batch.py`).

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
from typing import NamedTuple

from metering.holds.counter_rows import packed_columns
from metering.holds.known import Known, Meter, Metering, Terms
from metering.holds.operations import Admit, Admitted
from metering.holds.read import BEGIN_ADMITTING
from metering.holds.write import NewHold, insertion
from metering.quotas.quota_rules import QuotaState
from metering.store.exchange import Connection, Statement, bigint_array, exchange, id_array, id_bytes_array

MINUTE = timedelta(minutes=1)
NOT_LOOKED_UP = tuple(QuotaState._field_defaults.values())  # what of a limit's state only its owner asks for
# After the lock that whoever sets a quota holds alone, and in a statement of its own: it sees what was committed meanwhile. The
# index would refuse a request id that is taken, but only once the counters are locked; and if the hold that has it is just being
# ended it waits for that, which waits for the counters.
CHECK_KNOWN = """
SELECT now(), pg_current_snapshot()::text, 1 / (now() >= %s::timestamptz AND now() < %s::timestamptz AND NOT EXISTS (
    SELECT FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before)
) AND NOT EXISTS (
    SELECT FROM unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) JOIN holds h USING (project_id, request_id)
    WHERE h.state <> 'voided'))::int
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


class Planned(NamedTuple):
    """An admission that fits, and what it adds by each of its meterings."""

    op: Admit
    terms: Terms
    amounts: list[int]


@dataclass(slots=True)
class Plan:
    """Admissions that fit as far as is known, in the minute that begins at `minute`, if the batch begins before `until`."""

    minute: datetime
    until: datetime
    snapshot: str
    places: list[int] = field(default_factory=list)  # of the admissions in their batch
    admissions: list[Planned] = field(default_factory=list)
    charges: dict[bytes, tuple[Meter, int]] = field(default_factory=dict)  # with the limit; by the packed key


def plan(known: Known, operations: Sequence[Admit]) -> Plan | None:
    """Those of the operations that can be done quickly, in their order; None if there is none."""
    now = known.now()
    if now is None or known.snapshot is None:
        return None
    minute = now.replace(second=0, microsecond=0)
    planned = Plan(minute, minute + MINUTE, known.snapshot)
    met: set[int] = set()  # terms by their identity
    for place, op in enumerate(operations):
        if op.only_asks:
            continue
        terms = known.terms_of(op)
        if terms is None or (terms.until is not None and terms.until <= now):
            continue
        meterings = known.meterings_of(terms, minute)
        if meterings is None:
            continue
        if id(terms) not in met:
            met.add(id(terms))
            begin(planned, meterings)
        amounts = charge(op, meterings)
        if amounts is None:
            continue
        planned.places.append(place)
        planned.admissions.append(Planned(op, terms, amounts))
        if terms.until is not None and terms.until < planned.until:
            planned.until = terms.until
    return planned if planned.admissions else None


def seems_to_fit(known: Known, op: Admit) -> bool:
    """Whether an admission fits by all that is known, which is a guess. Changes nothing."""
    now, terms = known.now(), known.terms_of(op)
    if now is None or terms is None or (terms.until is not None and terms.until <= now):
        return False
    meterings = known.meterings_of(terms, now.replace(second=0, microsecond=0))
    sent, lease = op.input_token_count, op.first_slice_token_count
    return meterings is not None and all(
        meter.total + (fixed or -(-(sent * per_input + lease * per_output) // divisor)) <= limit
        for meter, limit, _, fixed, per_input, per_output, divisor in meterings
    )


def begin(planned: Plan, meterings: Sequence[Metering]) -> None:
    """Nothing is added by this batch yet."""
    for meter, limit, *_ in meterings:
        if meter.packed not in planned.charges:
            planned.charges[meter.packed] = meter, limit
            meter.used = meter.held = 0


def charge(op: Admit, meterings: Sequence[Metering]) -> list[int] | None:
    """Add one admission with its whole first slice; None, and nothing is added, if that may not fit."""
    sent, lease = op.input_token_count, op.first_slice_token_count
    amounts: list[int] = []
    for meter, limit, is_used_at_once, fixed, per_input, per_output, divisor in meterings:
        amount = fixed or -(-(sent * per_input + lease * per_output) // divisor)  # `Weighing.amount`, without the call
        meter.total += amount
        if is_used_at_once:
            meter.used += amount
        else:
            meter.held += amount
        amounts.append(amount)
        if meter.total > limit:
            take_back(meterings, amounts)
            return None
    return amounts


def take_back(meterings: Sequence[Metering], amounts: Sequence[int]) -> None:
    """As if the admission had never been."""
    for (meter, _, is_used_at_once, *_), amount in zip(meterings, amounts, strict=False):
        meter.total -= amount
        if is_used_at_once:
            meter.used -= amount
        else:
            meter.held -= amount


async def admit_planned(
    connection: Connection, known: Known, planned: Plan, owner_id: uuid.UUID, expiry_s: float
) -> list[Admitted]:
    """Do what was planned, whole or not at all.

    Raises: what the database raises where something is not as it was thought to be; nothing is committed then.
    """
    keys = sorted(planned.charges)
    charges = [planned.charges[key] for key in keys]
    requests = (
        id_bytes_array([terms.common.project_id for _, terms, _ in planned.admissions]),
        id_array([op.request_id for op, _, _ in planned.admissions]),
    )
    statements: list[Statement] = [
        (BEGIN_ADMITTING, ()),
        (CHECK_KNOWN, (time_text(planned.minute), time_text(planned.until), planned.snapshot, *requests)),
    ]
    if charges:  # before the holds: whoever waits for a request id of another has its counters, like everybody else
        columns = (
            bigint_array([meter.used for meter, _ in charges]),
            bigint_array([meter.held for meter, _ in charges]),
            bigint_array([limit for _, limit in charges]),
        )
        statements.append((CHARGE_COUNTERS, (*packed_columns(keys), *columns, len(keys))))
    holds = [NewHold(op, terms.common, op.first_slice_token_count) for op, terms, _ in planned.admissions]
    statements.append(insertion(owner_id, expiry_s, holds))
    _, [(now, snapshot, _)], *charged, _ = await exchange(connection, statements)
    known.asked(now, snapshot, ())
    for place, used, held, _ in charged[0] if charged else ():
        meter, _ = charges[place - 1]
        meter.used, meter.held, meter.total = used, held, used + held
    return answers(planned, now)


def answers(planned: Plan, now: datetime) -> list[Admitted]:
    """Each admission with the counters as they stood when it was counted: from the last one backwards."""
    found: list[Admitted] = []
    new = tuple.__new__  # five for each admission, so without the Python around it
    for op, terms, amounts in reversed(planned.admissions):
        states: list[QuotaState] = []
        for (meter, _, is_used_at_once, *_), rule, amount in zip(terms.meterings, terms.rules, amounts, strict=True):
            states.append(new(QuotaState, (rule, meter.used, meter.held, now, *NOT_LOOKED_UP)))
            if is_used_at_once:
                meter.used -= amount
            else:
                meter.held -= amount
        found.append(Admitted(op.hold_id, op.first_slice_token_count, terms.common.prices, tuple(states), now))
    found.reverse()
    return found


@functools.lru_cache(maxsize=64)
def time_text(at: datetime) -> str:
    """A time as the database reads it."""
    return str(at)
