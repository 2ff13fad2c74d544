"""Settlements of holds that this process has taken itself, without reading them; any other end goes the long way (`batch.py`).

The statement that ends the holds, and locks them by that, compares all of their rows that can have changed since: that they live,
what they have leased and posted, and how many quotas they are charged to. Where it finds one otherwise, nothing is done. From there
on it is as the long way: chains are locked after the holds, rules are believed once no change of them is seen with the holds under
lock, and counters are moved, not set, last before the commit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from metering.holds.counter_rows import move_statement
from metering.holds.known import SELECT_CHANGES, HoldTerms, Known, OwnHold, OwnHolds, Return
from metering.holds.operations import HoldOperation, Renew, Settle, Settled, Void
from metering.holds.read import SELECT_RULES_BY_ID, rules_of_rows
from metering.holds.write import UsageRow, usage_writes
from metering.quotas.quota_rules import window_starts
from metering.receipts.chaining import BatchSigner, Chains
from metering.store.exchange import (
    Connection,
    Statement,
    Value,
    array,
    bigint_array,
    exchange,
    id_bytes_array,
    id_number_array,
    packed_time,
)

# In the order of their ids, like all who lock holds. Asked for their state, the server would go through all that live.
END_UNREAD = """
WITH ended AS (
    UPDATE holds h
    SET state = 'settled', cached_input_token_count = v.cached, delivered_token_count = v.delivered, ended_at = now()
    FROM unnest(%s::uuid[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::int[])
        AS v(id, cached, delivered, leased, posted, quota_count)
    WHERE h.id = v.id AND h.ended_at IS NULL AND h.leased_token_count = v.leased AND h.posted_token_count = v.posted
        AND cardinality(h.quota_ids) = v.quota_count
    RETURNING 1
) SELECT count(*) FROM ended
"""
LOCK_CHAINS = """
SELECT uuid_send(project_id), last_sequence, last_hash, last_settled_at
FROM receipt_chains WHERE project_id = ANY(%s::uuid[]) ORDER BY project_id FOR UPDATE
"""


class End(NamedTuple):
    """One settlement. cached_input_token_count: what is known of the hold now."""

    number: int
    op: Settle
    hold: OwnHold
    cached_input_token_count: int


@dataclass(slots=True)
class EndPlan:
    """Settlements whose holds are known, and their places in their batch."""

    places: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)


@dataclass(slots=True)
class Returned:
    """What ends give back whose holds have the same terms and were charged at the same time. Sums of tokens.

    each: tokens of each one: fresh and cached input and output that it consumed, input and output that it held. Kept where a sum is
    rounded for each.
    """

    returns: tuple[Return, ...]
    starts: tuple[bytes, ...]
    count: int = 0
    fresh: int = 0
    cached: int = 0
    delivered: int = 0
    input: int = 0
    leased: int = 0
    each: list[tuple[int, int, int, int, int]] | None = None


def plan_ends(own: OwnHolds, batch: Sequence[HoldOperation]) -> EndPlan | None:
    """Those of a batch that need not be read; None if there is none, or if holds are renewed, which is about all at once.

    What is ended one way or the other is forgotten.
    """
    plan = EndPlan()
    for place, op in enumerate(batch):
        if not isinstance(op, Settle | Void):
            continue
        number = op.hold_id.int
        hold = own.take(number)
        if hold is None or isinstance(op, Void):
            continue
        if not hold.delivered_token_count <= op.delivered_token_count <= hold.leased_token_count:
            continue
        cached = hold.cached_input_token_count
        if op.cached_input_token_count > cached and not hold.posted_token_count and not hold.terms.embedding:
            cached = op.cached_input_token_count
        plan.places.append(place)
        plan.ends.append(End(number, op, hold, cached))
    return plan if plan.ends and not any(type(op) is Renew for op in batch) else None


async def end_planned(connection: Connection, known: Known, plan: EndPlan, signer: BatchSigner | None) -> list[Settled]:
    """Settle what was planned, whole or not at all; nothing is answered where a hold is not as it was thought to be.

    Raises: what the database raises; nothing is committed then.
    """
    ends = plan.ends
    terms = {id(end.hold.terms): end.hold.terms for end in ends}
    _, [(count,)], heads, [(now, snapshot, changes)] = await exchange(
        connection,
        [
            ("BEGIN", ()),
            (END_UNREAD, end_values(sorted(ends))),
            (LOCK_CHAINS, (id_bytes_array({each.project_id for each in terms.values()}),)),
            (SELECT_CHANGES, (known.snapshot,)),
        ],
    )
    known.asked(now, snapshot, changes)
    if count != len(ends):
        await exchange(connection, [("ROLLBACK", ())])
        return []
    returns = await returns_of_all(connection, known, terms.values())
    chains = Chains.of_rows(now, heads)
    moves = moves_of(ends, returns)
    rows: list[UsageRow] = []
    answers = [record(chains, rows, end) for end in ends]
    statements: list[Statement] = usage_writes(chains, rows, signer)
    if moves:
        statements.append(move_statement(moves))
    await exchange(connection, [*statements, ("COMMIT", ())])
    return answers


def end_values(ends: Sequence[End]) -> tuple[Value, ...]:
    """The values of END_UNREAD."""
    return (
        id_number_array([end.number for end in ends]),
        bigint_array([end.cached_input_token_count for end in ends]),
        bigint_array([end.op.delivered_token_count for end in ends]),
        bigint_array([end.hold.leased_token_count for end in ends]),
        bigint_array([end.hold.posted_token_count for end in ends]),
        array([len(end.hold.terms.quota_ids) for end in ends]),
    )


async def returns_of_all(connection: Connection, known: Known, terms: Collection[HoldTerms]) -> dict[int, tuple[Return, ...]]:
    """What the ends give back, by the identity of their terms: by the rules as they are with the holds under lock."""
    found = {id(each): known.returns_of(each) for each in terms}
    if None in found.values():
        missing = {number for each in terms if found[id(each)] is None for number in each.quota_ids}
        [rows] = await exchange(connection, [(SELECT_RULES_BY_ID, (id_number_array(list(missing)),))])
        known.add_rules(rules_of_rows(connection, rows).values())
        found = {id(each): known.returns_of(each) for each in terms}
    return {each: returns for each, returns in found.items() if returns is not None}


def moves_of(ends: Sequence[End], returns: Mapping[int, tuple[Return, ...]]) -> dict[bytes, list[int]]:
    """What ends move from held to used, as `quotas.end` does, by packed keys. returns: by the identity of the terms."""
    moves: dict[bytes, list[int]] = {}
    groups: dict[tuple[int, datetime], Returned] = {}
    for _, op, hold, known_cached in ends:
        terms = id(hold.terms)
        if hold.posted_token_count:
            give_back_posted(moves, op, hold, known_cached, returns[terms])
            continue
        group = groups.get((terms, hold.charged_at))
        if group is None:
            group = groups[terms, hold.charged_at] = Returned(returns[terms], packed_starts(hold.charged_at))
            if any(each.divisor > 1 for each in group.returns):
                group.each = []
        sent, delivered = op.input_token_count, op.delivered_token_count
        cached = known_cached if known_cached < sent else sent
        group.count += 1
        group.fresh += sent - cached
        group.cached += cached
        group.delivered += delivered
        group.input += hold.input_token_count
        group.leased += hold.leased_token_count
        if group.each is not None:
            group.each.append((sent - cached, cached, delivered, hold.input_token_count, hold.leased_token_count))
    for group in groups.values():
        give_back(moves, group)
    return moves


def give_back(moves: dict[bytes, list[int]], group: Returned) -> None:
    """What a group of ends moves. Where nothing is rounded it is that of their sum."""
    sums = [(group.fresh, group.cached, group.delivered, group.input, group.leased)]
    for _, number, _, window, is_place, per_held, per_input, per_cached, per_output, divisor in group.returns:
        used, held = 0, group.count if is_place else 0
        for fresh, cached, delivered, sent, leased in sums if divisor == 1 else group.each or ():
            used -= -(fresh * per_input + cached * per_cached + delivered * per_output) // divisor
            held -= -(sent * per_held + leased * per_output) // divisor
        move(moves, number + group.starts[window], used, held)


def give_back_posted(moves: dict[bytes, list[int]], op: Settle, hold: OwnHold, cached: int, returns: tuple[Return, ...]) -> None:
    """The same for one hold, part of which was posted before, to windows that it has left."""
    sent, starts = hold.input_token_count, packed_starts(hold.charged_at)
    for each in returns:
        used, held = 0, 1
        if not each.is_place:
            posted = each.amount(sent, cached, hold.posted_token_count - sent)
            consumed = each.amount(op.input_token_count, min(cached, op.input_token_count), op.delivered_token_count)
            used, held = max(consumed - posted, 0), each.amount(sent, cached, hold.leased_token_count) - posted
        move(moves, each.packed_number + starts[each.window], used, held)


@functools.lru_cache(maxsize=4096)
def packed_starts(at: datetime) -> tuple[bytes, ...]:
    """The windows of a time, as the second half of a packed key."""
    return tuple(map(packed_time, window_starts(at)))


def move(moves: dict[bytes, list[int]], key: bytes, used: int, held: int) -> None:
    """Add to what one counter is moved by. What costs nothing may have no counter."""
    before = moves.get(key)
    if before is not None:
        before[0] += used
        before[1] -= held
    elif used or held:
        moves[key] = [used, -held]


def record(chains: Chains, rows: list[UsageRow], end: End) -> Settled:
    """Write the usage event and its receipt, as `Decisions.settle` does."""
    number, op, hold, _ = end
    terms, delivered, outcome = hold.terms, op.delivered_token_count, op.outcome
    prices = terms.prices
    sent, embedded = (0, op.input_token_count) if terms.embedding else (op.input_token_count, 0)
    cached, generated = min(op.cached_input_token_count, sent), max(op.generated_token_count, delivered)
    cost = prices.cost_picos(sent, cached, delivered, embedded)
    receipt = chains.append(
        terms.payer_ids + hold.request_id.bytes,
        (0, sent, cached, delivered, embedded),
        (prices.version, cost),
        hold.admitted_at,
        (prices.currency_code, terms.model, outcome),
    )
    rows.append(
        (
            number,
            0,
            outcome,
            sent,
            cached,
            generated,
            delivered,
            delivered,
            cost,
            None if op.timings is None else json.dumps(op.timings),
            op.recovered,
            receipt.settled_at,
            receipt.sequence,
            receipt.previous_hash,
            receipt.hash,
            embedded,
            op.migration_count,
        )
    )
    return Settled(
        op.hold_id, sent, cached, generated, delivered, delivered, cost, prices.currency_code, outcome, embedded, (receipt,)
    )
