"""Batches that lock nothing beforehand: decided by what the process remembers, and written in one round trip, whole or not at all.

The decisions are those of `decide.py`. Nothing is decided that the database does not see for itself, in the same transaction: that
the holds are as they were, that no rule, price or key has changed since it was read, that it is the minute that was reckoned with,
that every counter has room for all that the batch adds to it, that no request id is taken, and that the chains of receipts end
where they did. Where it sees anything else nothing is done, and the batch goes the long way (`batch.py`), as does whatever needs
more than that all of it fits. Counters are moved, not set: so two such batches, of one process or of several, are exact in any
order, and wait for each other only to commit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from metering.core.errors import MeteringError
from metering.holds.decide import LATEST, BatchReads, Decisions
from metering.holds.known import Known, OwnHolds, remember
from metering.holds.operations import Admit, Admitted, Extend, HoldAnswer, HoldOperation, Renew, Settle, Void
from metering.holds.read import BEGIN_ADMITTING, LOCK_CHAINS, NO_IDS, SELECT_RULES_BY_ID, rules_of_rows
from metering.holds.write import changed_holds, moved_counters, new_holds, usage_writes
from metering.quotas.quota_rules import CounterKey, window_starts
from metering.quotas.quotas import Counters, Unsure
from metering.receipts.chaining import BatchSigner, Chains
from metering.store.exchange import Connection, Statement, columns, exchange, id_array, id_number_array

MINUTE = timedelta(minutes=1)
EARLIEST = datetime.min.replace(tzinfo=UTC)
NO_CORRECTION = 0, 0  # of what a quota has used and holds
CLOCK_ERROR = timedelta(seconds=1)  # of the time that a receipt says: far less than a transaction may take
# After the lock that whoever sets a quota holds alone, or with the holds under lock, and in a statement of its own: it sees what
# was committed meanwhile. The index would refuse a request id that is taken, but only once the counters are locked; and if the hold
# that has it is just being ended it waits for that, which waits for the counters.
CHECK_KNOWN = """
SELECT now(), pg_current_snapshot()::text, 1 / (now() >= %s::timestamptz AND now() < %s::timestamptz AND NOT EXISTS (
    SELECT FROM rule_changes, (VALUES (%s::pg_snapshot)) AS s(before)
    WHERE transaction_id >= pg_snapshot_xmin(before)::text::bigint
        AND NOT pg_visible_in_snapshot(transaction_id::text::xid8, before)
) AND NOT EXISTS (
    SELECT FROM unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) JOIN holds h USING (project_id, request_id)
    WHERE h.state <> 'voided'))::int
"""


@dataclass(slots=True)
class Trip:
    """Operations that are decided, in the minute of `now`, if the transaction begins from `since` on and before `until`.

    decided: each with its place in its batch and its answer.
    """

    decisions: Decisions
    since: datetime
    until: datetime
    decided: list[tuple[int, HoldOperation, HoldAnswer]] = field(default_factory=list)


# What a decision raises, having changed nothing, if its operation has to go the long way.
LONG_WAY = (MeteringError, Unsure)


def plan_admissions(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Admissions that fit by all that is known; None if there is none, or if anything else is in the batch: it may make room."""
    trip = new_trip(known)
    if trip is None or not batch or {*map(type, batch)} != {Admit}:
        return None
    now, admit = trip.decisions.reads.now, trip.decisions.admit
    for place, op in enumerate(batch):
        if not isinstance(op, Admit) or op.only_asks or (terms := known.terms_of(op)) is None:
            continue
        until = terms.until
        if until is not None and until <= now:
            continue
        try:
            answer = admit(op, terms)
        except LONG_WAY:
            continue
        trip.decided.append((place, op, answer))
        if until is not None and until < trip.until:
            trip.until = until
    return trip if trip.decided else None


def unknown_rules(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> set[int]:
    """Give own holds that are ended or extended their rules as they are known; return the numbers of those that are not."""
    missing: set[int] = set()
    for op in batch:
        if isinstance(op, Settle | Extend) and (hold := own.get(op.hold_id.int)) is not None:
            rules = known.charged.get(hold.terms) or known.rules_of(hold.terms)
            if len(rules) < len(hold.terms.quota_ids):
                missing.update(hold.terms.quota_ids)
            hold.rules = rules
    return missing


async def learn_rules(connection: Connection, known: Known, numbers: Collection[int]) -> None:
    """Read rules; what changes them from now on is seen by the checks of every batch."""
    [rows] = await exchange(connection, [(SELECT_RULES_BY_ID, (id_number_array(list(numbers)),))])
    known.add_rules(rules_of_rows(connection, rows).values())


def plan_ends(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Settlements of own holds; None if there is none, or if holds are renewed, which is about all at once.

    What is ended one way or the other is forgotten.
    """
    ended = [(place, op, own.pop(op.hold_id.int, None)) for place, op in enumerate(batch) if isinstance(op, Settle | Void)]
    trip = new_trip(known) if ended and Renew not in map(type, batch) else None
    if trip is None:
        return None
    holds, settle = trip.decisions.reads.holds, trip.decisions.settle
    for place, op, hold in ended:
        if hold is not None and isinstance(op, Settle) and len(hold.rules) == len(hold.terms.quota_ids):
            holds[hold.id.int] = hold
            try:
                trip.decided.append((place, op, settle(op)))
            except LONG_WAY:
                continue
    return trip if trip.decided else None


def plan_extensions(known: Known, own: OwnHolds, batch: Sequence[HoldOperation]) -> Trip | None:
    """Extensions of own holds that fit by all that is known; None if there is none, or if holds are renewed."""
    extended = [(place, op) for place, op in enumerate(batch) if isinstance(op, Extend)]
    trip = new_trip(known) if extended and Renew not in map(type, batch) else None
    if trip is None:
        return None
    reads = trip.decisions.reads
    for place, op in extended:
        if op.hold_id.int in reads.holds:
            continue  # a second one goes by what the first has made of the hold
        hold = own.pop(op.hold_id.int, None)
        if hold is None or len(hold.rules) < len(hold.terms.quota_ids):
            continue
        ends = [rule.raised_until for rule in hold.rules if rule.raised_until is not None]
        reads.holds[op.hold_id.int] = hold
        try:
            if any(end <= reads.now for end in ends):
                raise Unsure
            trip.decided.append((place, op, trip.decisions.extend(op)))
            trip.until = min((trip.until, *ends))
        except LONG_WAY:
            remember(own, (hold,))
    return trip if trip.decided else None


def seems_to_fit(known: Known, op: Admit) -> bool:
    """Whether an admission fits by all that is known, which is a guess. Changes nothing."""
    now, terms = known.now(), known.terms_of(op)
    if now is None or terms is None or (terms.until is not None and terms.until <= now):
        return False
    reads = BatchReads(now, terms=known.terms)
    counters = Counters(now, known.counters, guessed=True)
    try:
        Decisions(reads, counters).decide(replace(op, only_asks=True))
    except (MeteringError, Unsure):
        return False
    return True


def new_trip(known: Known) -> Trip | None:
    """Return a trip without operations; None if nothing is known."""
    now = known.now()
    if now is None or known.snapshot is None:
        return None
    minute = window_starts(now)[1]
    return Trip(Decisions(BatchReads(now), Counters(now, known.counters, guessed=True)), minute, minute + MINUTE)


async def take(
    connection: Connection, known: Known, own: OwnHolds, trip: Trip, *, owner: str, expiry_s: float, signer: BatchSigner | None
) -> None:
    """Write what was decided, and complete the answers.

    Raises: what the database raises where something is not as it was thought to be.
    """
    writes, counters = trip.decisions.writes, trip.decisions.counters
    keys, moves = moved_counters(counters.all_moves(), counters.limits)
    try:
        if writes.events:
            await write_ends(connection, known, trip, moves, signer)
            return
        inserts = new_holds(writes, owner, expiry_s)
        # Counters before new holds: whoever waits for a request id of another has its counters, like everybody else.
        statements = [*changed_holds(writes, expiry_s), check(known, trip), *moves, *inserts]
        _, [(now, snapshot, _)], *rows = await exchange(connection, [(BEGIN_ADMITTING, ()), *statements] if inserts else statements)
    except BaseException:
        for key in counters.changed:
            known.counters.pop(key, None)
        raise
    known.asked(now, snapshot, ())
    corrections: dict[CounterKey, tuple[int, int]] = {}
    for place, used, held, _ in rows[0] if moves and counters.limits else ():
        row = counters.rows.get(keys[place - 1])
        if row is not None:
            corrections[keys[place - 1]] = used - row.used, held - row.held
            row.used, row.held = used, held
    for _, hold in writes.holds:
        hold.admitted_at = hold.charged_at = now
    for hold, _ in writes.extensions.values():
        hold.charged_at = now
    remember(own, [hold for _, hold in writes.holds])
    remember(own, [hold for hold, _ in writes.extensions.values()])
    starts = window_starts(now)
    for _, _, answer in trip.decided:
        if isinstance(answer, Admitted):  # the counters as they really were, and when
            states = answer.quotas
            answer.admitted_at = states.now = now
            moved = [corrections.get((rule.number, starts[rule.window]), NO_CORRECTION) for rule in states.rules]
            states.counts = [(used + a, held + b) for (used, held), (a, b) in zip(states.counts, moved, strict=True)]


async def write_ends(
    connection: Connection, known: Known, trip: Trip, moves: Sequence[Statement], signer: BatchSigner | None
) -> None:
    """End holds with their usage: in one round trip where nobody else continues the chains of receipts, else in two."""
    writes, now = trip.decisions.writes, trip.decisions.reads.now
    ends = changed_holds(writes, 0.0)
    projects = {event[0].terms.project_id for event in writes.events}
    found = [known.heads.get(project_id) for project_id in projects]
    heads = [each[0] for each in found if each is not None and each[1]]
    if len(heads) == len(projects):
        trip.since, trip.until = now - CLOCK_ERROR, now + CLOCK_ERROR
        chains = Chains.of_rows(now, [(head.project_id, head.sequence, head.hash, head.settled_at) for head in heads])
        for project_id in projects:  # until it is known that they were right
            del known.heads[project_id]
        statements = [*ends, check(known, trip), *usage_writes(chains, writes.events, signer), *moves]
        _, [(now, snapshot, _)], *_ = await exchange(connection, statements)
        locked = {head.project_id: head.sequence for head in heads}
        known.heads |= {head.project_id: (head, True) for head in heads}
    else:
        trip.since, trip.until = EARLIEST, LATEST
        lock = LOCK_CHAINS, (id_array([event[0].id for event in writes.events]),)
        _, _, rows, [(now, snapshot, _)] = await exchange(connection, [("BEGIN", ()), *ends, lock, check(known, trip)])
        chains = Chains.of_rows(now, rows)
        locked = {head.project_id: head.sequence for head in chains.heads.values()}
        await exchange(connection, [*usage_writes(chains, writes.events, signer), *moves, ("COMMIT", ())])
    known.asked(now, snapshot, ())
    known.continued(locked, chains.heads)


def check(known: Known, trip: Trip) -> Statement:
    """CHECK_KNOWN with its values."""
    requests = [(hold.terms.project_id, op.request_id.int.to_bytes(16, "big")) for op, hold in trip.decisions.writes.holds]
    ids = columns("uu", requests) if requests else (NO_IDS, NO_IDS)
    return CHECK_KNOWN, (str(trip.since), str(trip.until), known.snapshot, *ids)
