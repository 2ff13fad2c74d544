"""Pre-authorized holds, which admit requests for a while when PostgreSQL is unavailable.

Each is a real hold: it counts against every quota of its key, is renewed, expires and is swept like
any other. So requests admitted under it were within the limits before the outage, and no limit can
be exceeded. A request gets one hold at most, and never more than that hold's charge; the rest is
returned when the hold is bound in the database (`execute_binds`).

A key that has used half of any of its limits has no pre-authorized holds: its regular requests may
need every token. Existing ones are voided at once.
"""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from metering.core.errors import (
    DatabaseUnavailable,
    MeteringError,
    RequestIdReused,
    RequestInFlight,
)
from metering.core.models import HoldState, ServiceTier
from metering.holds.bindings import Bind
from metering.holds.decide import END_USERS_MAX, BatchReads, Hold, Member, MemberName
from metering.holds.lease_clock import LeaseClock
from metering.holds.operations import Admit, Admitted, Ended, Fits, HoldAnswer, new_hold_id
from metering.holds.read import (
    INSERT_SUBJECT_COUNTS,
    LOCK_SUBJECT_COUNTS,
    lock_counters,
    read_and_lock,
    read_members,
)
from metering.holds.write import counter_writes, member_writes
from metering.quotas import quotas
from metering.quotas.quota_rules import FOR_END_USERS, FOR_LABEL, CounterKey, Kind, Payer
from metering.quotas.quotas import Counters, QuotaExceeded
from metering.store.group_commit import Answered, Pending
from metering.store.pipeline import (
    Connection,
    Value,
    array,
    bytes_array,
    id_array,
    run_pipeline,
    text_array,
)

log = structlog.get_logger(__name__)
UserKey = tuple[uuid.UUID, str, ServiceTier, bool]

USER_COUNT_MAX = 1000  # pairs of key and model with holds; beyond it the least recently used goes

QUIET_MAX_S = 60.0  # a key without requests for so long loses its holds

AGE_MAX_S = 60.0  # a hold counts in the windows of its start, so it is replaced every minute

LEFT_LEAST_S = 1.0  # a hold that lapses sooner would end its request before its first token


class Bindings(Protocol):
    """Durable log of bindings, implemented by `BindingLog`."""

    def record(self, bind: Bind) -> None:
        """Write a binding to disk before it takes effect. Raises: JournalUnavailable."""

    def forget(self, hold_id: uuid.UUID) -> None:
        """Drop a binding that the database has stored."""


@dataclass(frozen=True, slots=True)
class GraceTerms:
    """Number of pre-authorized holds per key and model in use, and their size in tokens."""

    hold_count: int
    input_token_count: int
    output_token_count: int


@dataclass(frozen=True, slots=True)
class UnboundHold:
    """Pre-authorized hold without a request. `taken_at` is in seconds of the lease clock."""

    admitted: Admitted
    input_token_count: int
    taken_at: float


@dataclass(slots=True)
class User:
    """Key, model, tier and kind of request for which holds are pre-authorized.

    `used_at` is the time of the last admission in seconds of the lease clock. `has_room` is True if
    no enforced limit is half used. `limited` is that of the last answer.
    """

    payer: Payer
    model: str
    tier: ServiceTier
    embedding: bool
    used_at: float
    has_room: bool
    limited: frozenset[str] = frozenset()
    unbound: list[UnboundHold] = field(default_factory=list)


class PreauthorizedHolds:
    """Pre-authorized holds of this process, and bindings that the database does not have yet."""

    def __init__(self, terms: GraceTerms, bindings: Bindings, leases: LeaseClock) -> None:
        self._terms = terms
        self._bindings = bindings
        self._leases = leases
        self._users: OrderedDict[UserKey, User] = OrderedDict()  # least recently used first
        self._surplus: list[uuid.UUID] = []  # holds to void
        self._pending_binds: dict[uuid.UUID, Bind] = {}  # by hold
        # Keys: ids of project and request.
        self._running: dict[tuple[uuid.UUID, uuid.UUID], tuple[uuid.UUID, bytes]] = {}
        self._request_of: dict[uuid.UUID, tuple[uuid.UUID, uuid.UUID]] = {}  # by hold

    @property
    def pending_binds(self) -> list[Bind]:
        """Bindings that the database does not have yet."""
        return list(self._pending_binds.values())

    @property
    def unbound_count(self) -> int:
        """Number of holds that could admit a request."""
        return sum(self._lasts(hold) for user in self._users.values() for hold in user.unbound)

    def admitted(self, op: Admit, answer: Admitted) -> None:
        """Record an admission by the database: the key is in use, its quotas' state known."""
        self._runs(op)
        user = self._users.setdefault(
            user_key(op), User(op.payer, op.model, op.tier, op.embedding, 0.0, has_room=False)
        )
        self._users.move_to_end(user_key(op))
        user.used_at, user.has_room = self._leases.now(), has_room(answer)
        user.limited = answer.limited
        if not user.has_room:
            self._clear(user)
        if len(self._users) > USER_COUNT_MAX:
            self._clear(self._users.popitem(last=False)[1])

    def taken(self, op: Admit, answer: Admitted) -> None:
        """Add a hold taken for an admission that `due` returned."""
        user = self._users.get(user_key(op))
        if user is None or not has_room(answer):
            self._surplus.append(answer.hold_id)
        else:
            user.unbound.append(UnboundHold(answer, op.input_token_count, self._leases.now()))

    def ended(self, hold_id: uuid.UUID) -> None:
        """Forget a request that has ended in the database."""
        self._running.pop(self._request_of.pop(hold_id, (hold_id, hold_id)), None)
        self.bound(hold_id)

    def bound(self, hold_id: uuid.UUID) -> None:
        """Drop the binding of a hold that the database has stored or refused."""
        if self._pending_binds.pop(hold_id, None) is not None:
            self._bindings.forget(hold_id)

    def admit(self, op: Admit) -> Admitted:
        """Admit a request without the database; its binding is on disk when this returns.

        Raises: DatabaseUnavailable if no hold is suitable; JournalUnavailable; RequestInFlight or
        RequestIdReused if the request id is running in this process.
        """
        if (running := self._running.get((op.payer.project_id, op.request_id))) is not None:
            if running[1] != op.payload_hash:
                raise RequestIdReused()
            raise RequestInFlight()
        user = self._users.get(user_key(op))
        if user is not None and is_limited(op, user.limited):
            raise DatabaseUnavailable(
                "The database does not answer, and your request's end user or label has limits,"
                " which no pre-authorized hold counts."
            )
        fitting = [hold for hold in user.unbound if self._fits(hold, op)] if user else []
        if user is None or not fitting:
            raise DatabaseUnavailable(
                "The database does not answer, and no pre-authorized hold fits your request."
            )
        chosen = max(fitting, key=lambda hold: self._leases.left_s(hold.admitted.hold_id))
        leased = min(chosen.admitted.leased_token_count, op.first_slice_token_count)
        hold_id = chosen.admitted.hold_id
        bind = Bind(
            hold_id,
            op.payer,
            op.request_id,
            op.payload_hash,
            op.labels,
            op.input_token_count,
            leased,
            op.end_user,
        )
        self._bindings.record(bind)
        user.unbound.remove(chosen)
        self._pending_binds[hold_id] = bind
        self._running[op.payer.project_id, op.request_id] = hold_id, op.payload_hash
        self._request_of[hold_id] = op.payer.project_id, op.request_id
        admitted = chosen.admitted
        return Admitted(hold_id, leased, admitted.prices, admitted.quotas, admitted.admitted_at)

    def release(self, organization_id: uuid.UUID) -> list[uuid.UUID]:
        """Return the organization's holds to void at once, because a request exceeded a quota."""
        for user in self._users.values():
            if user.payer.organization_id == organization_id:
                user.has_room = False
                self._clear(user)
        return self.surplus()

    def surplus(self) -> list[uuid.UUID]:
        """Return holds to void, such as old ones and those of unused keys. Each comes once."""
        now = self._leases.now()
        for user in self._users.values():
            kept = [
                s
                for s in user.unbound
                if now - user.used_at < QUIET_MAX_S and now - s.taken_at < AGE_MAX_S
            ]
            self._surplus += [s.admitted.hold_id for s in user.unbound if s not in kept]
            user.unbound = kept
        surplus, self._surplus = self._surplus, []
        return surplus

    def release_all(self) -> list[uuid.UUID]:
        """Return all unbound holds, to be voided at shutdown. No more are requested."""
        for user in self._users.values():
            self._clear(user)
        self._users.clear()
        return self.surplus()

    def due(self) -> list[Admit]:
        """Build the admissions that refill the holds of each key in use."""
        now = self._leases.now()
        return [
            self._admit(user)
            for user in self._users.values()
            if user.has_room and now - user.used_at < QUIET_MAX_S
            for _ in range(self._terms.hold_count - len(user.unbound))
        ]

    def _admit(self, user: User) -> Admit:
        hold_id = new_hold_id()
        output_token_count = 0 if user.embedding else self._terms.output_token_count
        return Admit(
            hold_id=hold_id,
            payer=user.payer,
            request_id=hold_id,  # marks the hold as unbound
            payload_hash=bytes(32),
            model=user.model,
            input_token_count=self._terms.input_token_count,
            first_slice_token_count=output_token_count,
            least_slice_token_count=output_token_count,
            tier=user.tier,
            embedding=user.embedding,
        )

    def _fits(self, hold: UnboundHold, op: Admit) -> bool:
        return (
            op.input_token_count <= hold.input_token_count
            and op.least_slice_token_count <= hold.admitted.leased_token_count
            and self._lasts(hold)
        )

    def _lasts(self, hold: UnboundHold) -> bool:
        return self._leases.left_s(hold.admitted.hold_id) > LEFT_LEAST_S

    def _runs(self, op: Admit) -> None:
        request = op.payer.project_id, op.request_id
        self._running[request] = op.hold_id, op.payload_hash
        self._request_of[op.hold_id] = request

    def _clear(self, user: User) -> None:
        self._surplus += [hold.admitted.hold_id for hold in user.unbound]
        user.unbound = []


class BackedAdmission:
    """Admission in a process with pre-authorized holds.

    If it exceeds a quota, the organization's pre-authorized holds are voided and it is tried once
    more. If the database is unavailable, it gets a pre-authorized hold.
    """

    __slots__ = (
        "_begin",
        "_done",
        "_has_released",
        "_op",
        "_pending",
        "_preauthorized",
        "_void_all",
    )

    def __init__(
        self,
        preauthorized: PreauthorizedHolds,
        begin: Callable[[Admit, Answered], Pending],
        void_all: Callable[[Sequence[uuid.UUID], Callable[[], None]], None],
        op: Admit,
        done: Answered,
    ) -> None:
        """Submit the admission with `begin`. `void_all` voids holds and then calls back."""
        self._preauthorized = preauthorized
        self._begin = begin
        self._void_all = void_all
        self._op = op
        self._done: Answered | None = done
        self._has_released = False
        self._pending = begin(op, self._answered)

    def abandon(self) -> None:
        """Implement `Pending.abandon`."""
        self._done = None
        self._pending.abandon()

    def _answered(self, answer: Any) -> None:
        op, preauthorized = self._op, self._preauthorized
        if isinstance(answer, QuotaExceeded) and not self._has_released:
            self._has_released = True
            if released := preauthorized.release(op.payer.organization_id):
                self._void_all(released, self._begin_again)
                return
        if isinstance(answer, DatabaseUnavailable):
            try:
                answer = Fits() if op.only_asks else preauthorized.admit(op)
            except MeteringError as refusal:
                answer = refusal
        elif isinstance(answer, Admitted):
            preauthorized.admitted(op, answer)
        if self._done is not None:
            self._done(answer)

    def _begin_again(self) -> None:
        if self._done is not None:
            self._pending = self._begin(self._op, self._answered)


def user_key(op: Admit) -> UserKey:
    """Return the key of an admission's `User`. Tier and embedding are part of it: prices differ."""
    return op.payer.api_key_id, op.model, op.tier, op.embedding


def is_limited(op: Admit, limited: frozenset[str]) -> bool:
    """Return True if a request has an end user or a label of the kinds that have limits."""
    return (op.end_user != "" and FOR_END_USERS in limited) or any(
        FOR_LABEL + key in limited for key in op.labels
    )


def has_room(admitted: Admitted) -> bool:
    """Return True if no enforced limit that counts the request is more than half used."""
    prices = admitted.prices
    return all(
        state.remaining * 2 >= state.limit_value
        for state in admitted.quotas
        if state.rule.enforced
        and (state.rule.kind is not Kind.MONEY or prices.cost_picos(2, 1, 2, 1, 1))
    )


SELECT_USED_REQUESTS = """
SELECT h.project_id, h.request_id
FROM holds h
JOIN unnest(%s::uuid[], %s::uuid[]) AS a(project_id, request_id) USING (project_id, request_id)
WHERE h.state <> 'voided'
"""

BIND_HOLDS = """
UPDATE holds h
SET request_id = v.request_id, payload_hash = v.payload_hash, labels = v.labels::jsonb,
    input_token_count = v.input, leased_token_count = v.leased, end_user_id = v.end_user_id
FROM unnest(%s::uuid[], %s::uuid[], %s::bytea[], %s::text[], %s::bigint[], %s::bigint[], %s::uuid[])
    AS v(id, request_id, payload_hash, labels, input, leased, end_user_id)
WHERE h.id = v.id
"""


async def execute_binds(
    connection: Connection, binds: Sequence[Bind], end_users_max: int = END_USERS_MAX
) -> list[HoldAnswer | Exception]:
    """Bind holds to requests in one transaction; answer for each, in order, whether it is bound.

    A hold that is already bound is unchanged. If another hold has the request id, the hold stays
    unbound: its settlement records the delivered tokens without billing them. Raises:
    psycopg.Error.
    """
    reads = await read_and_lock(connection, {bind.hold_id for bind in binds})
    end_user_ids = await end_users_of(connection, binds, end_users_max)
    keys = {key for hold in reads.holds.values() for key in bound_keys(reads, hold)}
    counters = await lock_counters(connection, reads.now, keys, rolling={})
    requests = id_array(b.payer.project_id for b in binds), id_array(b.request_id for b in binds)
    [used] = await run_pipeline(connection, [(SELECT_USED_REQUESTS, requests)])
    taken = {(project_id, request_id) for project_id, request_id in used}
    answers: list[HoldAnswer | Exception] = []
    new: list[Bind] = []
    for bind in binds:
        hold = reads.holds.get(bind.hold_id.int)
        if hold is None or not hold.unbound:
            answers.append(Ended(done=hold is not None and hold.request_id == bind.request_id))
        elif (bind.payer.project_id, bind.request_id) in taken or hold.state not in (
            HoldState.HELD,
            HoldState.EXPIRED,
        ):
            answers.append(Ended(done=False))
        else:
            taken.add((bind.payer.project_id, bind.request_id))
            shrink(counters, hold, bind)
            new.append(bind)
            answers.append(Ended(done=True))
    if new:
        await run_pipeline(connection, [(BIND_HOLDS, bind_columns(new, end_user_ids))])
    await run_pipeline(connection, [*counter_writes(counters), ("COMMIT", ())])
    return answers


def bound_keys(reads: BatchReads, hold: Hold) -> set[CounterKey]:
    """Return the keys of all counters that include the hold's charge."""
    return quotas.touched_keys(hold.rules, hold.charge(), reads.now, extends=False)


def shrink(counters: Counters, hold: Hold, bind: Bind) -> None:
    """Reduce a hold's charge to the tokens of the request that it is bound to."""
    rules, before = hold.rules, hold.charge()
    if hold.state == HoldState.EXPIRED:
        charged, granted = (
            (sent, leased, before.dearest_reasoning(leased))
            for sent, leased in (
                (hold.input_token_count, hold.leased_token_count),
                (bind.input_token_count, bind.leased_token_count),
            )
        )
        # Prepaid credit keeps only the billed tokens of an expired hold; an unbound hold has none.
        windowed = [rule for rule in rules if not rule.is_credit]
        quotas.correct_expired(counters, windowed, before, charged, (0, 0, 0), granted)
        return
    after = before._replace(
        input_token_count=bind.input_token_count, leased_token_count=bind.leased_token_count
    )
    for rule in rules:
        counters.add(rule.key(before.charged_at), held=after.held(rule) - before.held(rule))


async def end_users_of(
    connection: Connection, binds: Sequence[Bind], end_users_max: int
) -> dict[MemberName, uuid.UUID]:
    """Find the end users of these requests; create new ones and bring back archived ones.

    No refusal is possible, since the requests have run: one for which the organization has no room
    is left out, and its requests count as those without an end user. An archived one without room
    stays archived.
    """
    names = dict.fromkeys(member_name(bind) for bind in binds if bind.end_user)
    if not names:
        return {}
    owners = id_array(sorted({name[0] for name in names}))
    _, counts = await run_pipeline(
        connection, [(INSERT_SUBJECT_COUNTS, (owners,)), (LOCK_SUBJECT_COUNTS, (owners,))]
    )
    room = {row[0]: end_users_max - row[1] for row in counts}
    found, _ = await read_members(connection, names)
    changed: list[Member] = []
    for name in names:
        member = found.get(name) or Member(*name, uuid.uuid4(), is_new=True)
        if member.is_new or member.is_archived:
            if room[name[0]] < 1:
                if member.is_new:
                    log.warning("end_user_without_room", organization_id=str(name[0]))
                continue
            room[name[0]] -= 1
            found[name] = member
        elif not member.is_idle:
            continue
        changed.append(member)
    if statements := member_writes(changed):
        await run_pipeline(connection, statements)
    return {name: member.id for name, member in found.items()}


def member_name(bind: Bind) -> MemberName:
    """Return the name of the usage subject that is the request's end user."""
    return bind.payer.organization_id, "end_user", "", bind.end_user


def bind_columns(
    binds: Sequence[Bind], end_user_ids: Mapping[MemberName, uuid.UUID]
) -> tuple[Value, ...]:
    """Pack bindings into the array parameters of BIND_HOLDS."""
    return (
        id_array(bind.hold_id for bind in binds),
        id_array(bind.request_id for bind in binds),
        bytes_array([bind.payload_hash for bind in binds]),
        text_array(json.dumps(bind.labels) for bind in binds),
        array(bind.input_token_count for bind in binds),
        array(bind.leased_token_count for bind in binds),
        text_array(
            str(found) if (found := end_user_ids.get(member_name(bind))) is not None else None
            for bind in binds
        ),
    )
