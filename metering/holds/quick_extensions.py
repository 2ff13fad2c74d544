"""Extensions that fit by all that is known, in one round trip; any other goes the long way (`batch.py`).

Like admissions (`quick_admissions.py`) and ends (`quick_ends.py`): the statement that extends the holds, and locks them by that,
compares what can have changed of them; with them under lock the next one sees that no rule has changed and that it is the minute
that was reckoned with; the last one moves the counters if each limit has room for all that the batch adds. Where one of them finds
anything else nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from metering.holds.counter_rows import packed_columns
from metering.holds.known import NO_LIMIT, Known, Meter, OwnHold, OwnHolds, Return
from metering.holds.operations import Extend, HoldOperation, Renew
from metering.holds.quick_admissions import MINUTE, time_text
from metering.holds.quick_ends import packed_starts
from metering.quotas.quota_rules import window_starts
from metering.quotas.quotas import USED_MAX
from metering.store.exchange import Connection, Statement, Value, array, bigint_array, exchange, id_number_array

# In the order of their ids, like all who lock holds. Each extension makes the lease larger: that tells whether there was another.
# `left_minute` is negative where the charge stays in its minute.
EXTEND_UNREAD = """
WITH extended AS (
    UPDATE holds h
    SET cached_input_token_count = v.cached, leased_token_count = v.leased + v.wanted, delivered_token_count = v.delivered,
        posted_token_count = h.input_token_count + v.delivered, posted_cost_picos = v.posted_cost, posted_minutes = CASE
            WHEN v.left_minute < 0 THEN h.posted_minutes
            ELSE h.posted_minutes || ARRAY[v.left_minute, h.input_token_count + v.delivered] END,
        charged_at = now(), expires_at = now() + make_interval(secs => %s)
    FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::int[])
        AS v(id, cached, leased, wanted, delivered, posted_cost, left_minute, quota_count)
    WHERE h.id = v.id AND h.ended_at IS NULL AND h.leased_token_count = v.leased
        AND cardinality(h.quota_ids) = v.quota_count
    RETURNING 1
) SELECT 1 / (count(*) = %s)::int FROM extended
"""
# A statement of its own, after the holds are locked: whoever sets a quota locks those that live.
CHECK_RULES = """
SELECT now(), pg_current_snapshot()::text, 1 / (now() >= %s::timestamptz AND now() < %s::timestamptz AND NOT EXISTS (
    SELECT FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before)))::int
"""
# A negative limit is none: of what only counts, and of a window that is left.
MOVE_WITHIN = f"""
WITH moved AS (
    UPDATE quota_counters c SET held = c.held + v.held, used = CASE
        WHEN c.used <= {USED_MAX} - greatest(v.used, 0) AND c.used < {USED_MAX} THEN c.used + v.used ELSE {USED_MAX} END
    FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[], %s::bigint[]) WITH ORDINALITY
        AS v(quota_id, window_start, used, held, limit_value, place)
    WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
        AND (v.limit_value < 0 OR c.used <= v.limit_value - c.held - v.used - v.held)
    RETURNING v.place, c.used + c.held AS total
) SELECT m.place, m.total, 1 / ((SELECT count(*) FROM moved) = %s)::int FROM (SELECT) one LEFT JOIN moved m ON true
"""


class Extension(NamedTuple):
    """One lease that grows. hold: as it stands. posted_cost_picos, left_minute: see EXTEND_UNREAD."""

    number: int
    op: Extend
    hold: OwnHold
    cached_input_token_count: int
    posted_cost_picos: int
    left_minute: int


@dataclass(slots=True)
class Charge:
    """What the batch adds to one counter, which may reach `limit_value`.

    meter, total: of a counter of now, and where it will stand by what that says.
    """

    limit_value: int
    total: int = 0
    used: int = 0
    held: int = 0
    meter: Meter | None = None


@dataclass(slots=True)
class ExtensionPlan:
    """Extensions that fit as far as is known, in the minute that begins at `minute`, if the batch begins before `until`."""

    minute: datetime
    until: datetime
    snapshot: str
    places: list[int] = field(default_factory=list)  # of the extensions in their batch
    extensions: list[Extension] = field(default_factory=list)
    charges: dict[bytes, Charge] = field(default_factory=dict)  # by the packed key


def plan_extensions(own: OwnHolds, known: Known, batch: Sequence[HoldOperation]) -> ExtensionPlan | None:
    """Those of a batch whose holds need not be read; None if there is none, or if holds are renewed, which is about all at once."""
    now = known.now()
    if now is None or known.snapshot is None or any(type(op) is Renew for op in batch):
        return None
    minute = now.replace(second=0, microsecond=0)
    plan = ExtensionPlan(minute, minute + MINUTE, known.snapshot)
    met: set[int] = set()
    for place, op in enumerate(batch):
        if not isinstance(op, Extend) or op.hold_id.int in met:
            continue
        met.add(op.hold_id.int)  # a second one goes by what the first has made of the hold
        extension = planned_extension(own, known, plan, op, now)
        if extension is not None:
            plan.places.append(place)
            plan.extensions.append(extension)
    return plan if plan.extensions else None


def planned_extension(own: OwnHolds, known: Known, plan: ExtensionPlan, op: Extend, now: datetime) -> Extension | None:
    """One extension by all that it asks for, its charges added to the plan; None, and nothing is added, if that may not fit."""
    hold = own.get(op.hold_id.int)
    if hold is None or hold.terms.embedding or op.wanted_token_count < 1:
        return None
    if not hold.delivered_token_count <= op.delivered_token_count <= hold.leased_token_count:
        return None
    returns = known.returns_of(hold.terms)
    if returns is None or hold.terms.returns is None:
        return None
    ends = [rule.raised_until for rule in hold.terms.returns[0] if rule.raised_until is not None]
    if any(end <= now for end in ends):
        return None
    cached = hold.cached_input_token_count
    if op.cached_input_token_count > cached and not hold.posted_token_count:
        cached = op.cached_input_token_count
    if not charge(known, plan, hold, op, cached, returns):
        return None
    plan.until = min((plan.until, *ends))
    left = int(hold.charged_at.timestamp()) // 60
    prices = hold.terms.prices
    posted_cost = prices.cost_picos(hold.input_token_count, cached, op.delivered_token_count, 0)
    return Extension(op.hold_id.int, op, hold, cached, posted_cost, -1 if left == int(plan.minute.timestamp()) // 60 else left)


def charge(known: Known, plan: ExtensionPlan, hold: OwnHold, op: Extend, cached: int, returns: Sequence[Return]) -> bool:
    """Add what one extension moves, as `quotas.extend` does, if each limit has room for it; else nothing."""
    sent, leased, delivered = hold.input_token_count, hold.leased_token_count, op.delivered_token_count
    old_starts, new_starts = packed_starts(hold.charged_at), window_starts(plan.minute)
    moves: list[tuple[Return, Meter, bytes, int, int, int]] = []
    for each in returns:
        if each.is_place:
            continue
        meter = known.meters.get((each.number, new_starts[each.window]))
        if meter is None:
            return False
        posted = each.amount(sent, cached, delivered)
        if hold.posted_token_count:
            before = each.amount(sent, cached, hold.posted_token_count - sent)
            used, held = max(posted - before, 0), each.amount(sent, cached, leased) - before
        else:
            used, held = posted, -(-(sent * each.per_held_input + leased * each.per_output) // each.divisor)
        to_hold = each.amount(sent, cached, leased + op.wanted_token_count) - posted
        old = each.packed_number + old_starts[each.window]
        added = to_hold + (used - held if old == meter.packed else 0)
        before_this = plan.charges.get(meter.packed)
        if 0 <= each.limit_value < (meter.total if before_this is None else before_this.total) + added:
            return False
        moves.append((each, meter, old, used, held, to_hold))
    for each, meter, old, used, held, to_hold in moves:
        new = plan.charges.get(meter.packed)
        if new is None:
            new = plan.charges[meter.packed] = Charge(each.limit_value, meter.total)
        new.meter, new.limit_value = meter, each.limit_value
        new.held += to_hold
        new.total += to_hold
        left = new if old == meter.packed else plan.charges.get(old)
        if left is None:
            left = plan.charges[old] = Charge(NO_LIMIT)
        left.used += used
        left.held -= held
        left.total += used - held
    return True


async def extend_planned(connection: Connection, known: Known, plan: ExtensionPlan, expiry_s: float) -> datetime:
    """Do what was planned, whole or not at all. Returns when, by the database's clock.

    Raises: what the database raises where something is not as it was thought to be; nothing is committed then.
    """
    statements: list[Statement] = [
        (EXTEND_UNREAD, (expiry_s, *extension_values(sorted(plan.extensions)), len(plan.extensions))),
        (CHECK_RULES, (time_text(plan.minute), time_text(plan.until), plan.snapshot)),
    ]
    keys = sorted(key for key, each in plan.charges.items() if each.used or each.held)
    charges = [plan.charges[key] for key in keys]
    if charges:
        columns = (
            bigint_array([each.used for each in charges]),
            bigint_array([each.held for each in charges]),
            bigint_array([each.limit_value for each in charges]),
        )
        statements.append((MOVE_WITHIN, (*packed_columns(keys), *columns, len(keys))))
    _, [(now, snapshot, _)], *moved = await exchange(connection, statements)
    known.asked(now, snapshot, ())
    for place, total, _ in moved[0] if moved else ():
        meter = charges[place - 1].meter
        if meter is not None:
            meter.total = total
    at: datetime = now
    return at


def extension_values(extensions: Sequence[Extension]) -> tuple[Value, ...]:
    """Most values of EXTEND_UNREAD."""
    return (
        id_number_array([each.number for each in extensions]),
        bigint_array([each.cached_input_token_count for each in extensions]),
        bigint_array([each.hold.leased_token_count for each in extensions]),
        bigint_array([each.op.wanted_token_count for each in extensions]),
        bigint_array([each.op.delivered_token_count for each in extensions]),
        bigint_array([each.posted_cost_picos for each in extensions]),
        bigint_array([each.left_minute for each in extensions]),
        array([len(each.hold.terms.quota_ids) for each in extensions]),
    )


def extended_hold(extension: Extension, now: datetime) -> OwnHold:
    """As the hold stands once it is extended."""
    _, op, hold, cached, _, _ = extension
    return hold._replace(
        cached_input_token_count=cached,
        leased_token_count=hold.leased_token_count + op.wanted_token_count,
        delivered_token_count=op.delivered_token_count,
        posted_token_count=hold.input_token_count + op.delivered_token_count,
        charged_at=now,
    )
