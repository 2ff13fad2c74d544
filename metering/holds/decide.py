"""Decisions about hold operations: their effect on holds, counters, usage events and money.

Pure functions on values in memory, one operation after the other. `slow_path.py` calls them with
rows that it has locked, `fast_path.py` with cached rows that the database verifies later.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from msgspec import structs

from metering.core.errors import (
    EndUsersExhausted,
    HoldEnded,
    InvariantViolated,
    KeyInvalid,
    MeteringError,
    NotFound,
    PriceMissing,
    RequestIdReused,
    RequestInFlight,
    WriteConflict,
)
from metering.core.models import HoldState, Outcome, ServiceTier
from metering.holds.operations import (
    Admit,
    Admitted,
    Ended,
    Expire,
    Extend,
    Extended,
    Fits,
    HoldAnswer,
    HoldOperation,
    Renew,
    Renewed,
    RequestSettled,
    Settle,
    Settled,
    Void,
    is_other_payload,
)
from metering.pricing.prices import TokenPrices, embedding_terms
from metering.quotas import quotas
from metering.quotas.quota_rules import (
    Charge,
    Payer,
    QuotaRule,
    QuotaStates,
    Scale,
    Tokens,
    money_scale,
    window_starts,
)
from metering.quotas.quotas import Counters
from metering.receipts.chaining import BatchSigner, Chains, IssuedReceipt
from metering.receipts.encoding import owners_in
from metering.receipts.subjects import NO_SUBJECTS, Labels, Subjects, new_salt
from metering.store.pipeline import packed_id

END_USERS_MAX = 1_000_000  # per organization, unless set otherwise
LATEST = datetime.max.replace(tzinfo=UTC)
# Members of an enum are looked up by a descriptor, which takes 0.1 µs each time.
HELD, SETTLED, VOIDED, EXPIRED = HoldState
# Counts of a settlement that usage events have too.
REPORTED = (
    "cached_input_token_count",
    "generated_token_count",
    "delivered_token_count",
    "journalled_token_count",
    "reasoning_token_count",
)
TermsKey = tuple[int, str, str, ServiceTier, bool]  # key, currency, model, tier, embedding
# Organization, kind, label key and name of a usage subject.
MemberName = tuple[uuid.UUID, str, str, str]
MemberKey = tuple[str, ...]  # end user, and the value of each limited label; empty: not given


@dataclass(slots=True, eq=False)
class HoldTerms:
    """Payer, prices and quotas shared by all holds of one key for one model.

    `payer_ids` are the ids of organization, project and key as in receipts, 48 bytes. `charged` are
    the prices that quotas on money count. `end_user` is the number of the end user's id, 0 without
    one, and `subjects` its part in receipts. The packed ids are several elements of a packed array.
    """

    payer_ids: bytes
    model: str
    embedding: bool
    prices: TokenPrices
    quota_ids: tuple[int, ...]
    end_user: int = 0
    subjects: Subjects | None = None
    charged: TokenPrices = field(init=False)
    money: Scale = field(init=False)  # `charged` as a scale
    project_id: bytes = field(init=False)
    packed_payer_ids: bytes = field(init=False)  # organization, project, key, end user
    packed_quota_ids: bytes = field(init=False)

    def __post_init__(self) -> None:
        """Compute the derived fields once, because every batch reads them."""
        self.charged = embedding_terms(self.prices) if self.embedding else self.prices
        self.money = money_scale(self.charged)
        self.project_id = self.payer_ids[16:32]
        ids = *(each.int for each in owners_in(self.payer_ids)), self.end_user
        self.packed_payer_ids = b"".join(map(packed_id, ids))
        self.packed_quota_ids = b"".join(map(packed_id, self.quota_ids))


@dataclass(slots=True, eq=False)
class AdmissionTerms:
    """Terms on which a key is admitted for a model, tier and kind of request.

    They apply until the time `until`; None means without end. Requests with an end user or with one
    of the labels `label_keys`, which have limits, have terms of their own in `members`; `selectors`
    give those their limits. `limited` has `end_user` and `label:KEY` where there are limits.
    """

    payer: Payer
    common: HoldTerms
    rules: tuple[QuotaRule, ...]
    until: datetime | None
    selectors: tuple[QuotaRule, ...] = ()
    label_keys: tuple[str, ...] = ()
    limited: frozenset[str] = frozenset()
    members: dict[MemberKey, AdmissionTerms] = field(default_factory=dict)
    # Rows that the first admission on these terms creates or changes; None if they are committed.
    creation: Creation | None = None

    def equals(self, other: AdmissionTerms) -> bool:
        """Return True if the other terms are the same, apart from their members."""
        return (
            self.payer == other.payer
            and self.common.prices == other.common.prices
            and self.rules == other.rules
            and self.until == other.until
            and self.selectors == other.selectors
            and self.label_keys == other.label_keys
            and self.limited == other.limited
        )

    def member_key(self, op: Admit) -> MemberKey | None:
        """Return the key of the request's terms in `members`; None if these ones apply."""
        if not self.label_keys:
            return (op.end_user,) if op.end_user else None
        labels = op.labels
        key = (op.end_user, *(labels.get(each, "") for each in self.label_keys))
        return key if any(key) else None


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """End user or label value of a request. `is_new`: it has no row; `is_idle`: to be marked used.

    `is_archived` ones count as new in the bound of the organization.
    """

    organization_id: uuid.UUID
    kind: str
    label_key: str
    name: str
    id: uuid.UUID
    salt: bytes = field(default_factory=new_salt)  # of its receipts
    is_new: bool = False
    is_archived: bool = False
    is_idle: bool = False

    @property
    def full_name(self) -> MemberName:
        """Name, unique among all."""
        return self.organization_id, self.kind, self.label_key, self.name

    @property
    def shown(self) -> str:
        """Name in messages."""
        return f"{self.label_key}={self.name}" if self.label_key else self.name


@dataclass(frozen=True, slots=True, eq=False)
class Creation:
    """Rows of usage subjects that are new, archived or idle, and new limits from selectors."""

    base: AdmissionTerms
    key: MemberKey
    members: tuple[Member, ...]
    rules: tuple[QuotaRule, ...]


class Hold(msgspec.Struct, eq=False):
    """A hold in memory; decisions change it in place. `rules` are the quotas that it is charged to.

    `posted_cost_picos` is the cost of its posted tokens, with output at the lower of its two
    prices; each extension sets it. `reasoning_token_count` counts the delivered tokens known to be
    thinking.
    """

    id: uuid.UUID
    request_id: uuid.UUID
    terms: HoldTerms
    rules: Sequence[QuotaRule]
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    posted_minutes: tuple[int, ...]
    admitted_at: datetime
    charged_at: datetime
    state: str = HELD
    expires_at: datetime = LATEST
    posted_cost_picos: int = 0
    reasoning_token_count: int = 0
    subjects: Subjects | None = None  # None: neither end user nor labels

    @property
    def unbound(self) -> bool:
        """True if the hold is pre-authorized and has no request yet (`preauthorized_holds.py`)."""
        return self.request_id.int == self.id.int  # comparing UUIDs costs several times as much

    def charge(self, cached_input_token_count: int = 0) -> Charge:
        """Build the charge of this hold to its quotas.

        A larger `cached_input_token_count` replaces the hold's own unless the input is already
        posted, because the windows it was posted to may be over.
        """
        cached = self.cached_input_token_count
        if cached_input_token_count > cached and not self.posted_token_count:
            cached = cached_input_token_count
        return Charge(
            self.terms.charged,
            self.input_token_count,
            cached,
            self.leased_token_count,
            self.posted_token_count,
            self.admitted_at,
            self.charged_at,
            self.posted_minutes,
            self.reasoning_token_count,
        )

    def corrected_cached_tokens(self, op: Settle) -> int | None:
        """Return the cached tokens to charge if a settlement has more than were posted; else None.

        The correction only lowers the charge: where cached input is dearer, the posted count stays.
        """
        cached = min(op.cached_input_token_count, op.input_token_count, self.input_token_count)
        if not self.posted_token_count or cached <= self.cached_input_token_count:
            return None
        scales = [self.terms.money, *(rule.token_scale for rule in self.rules if rule.token_scale)]
        is_dearer = any(scale.cached_input > scale.input for scale in scales)
        return self.cached_input_token_count if is_dearer else cached


class EventSums(NamedTuple):
    """Sums over the usage events of one hold; all zero if it has none."""

    part_count: int = 0
    input_token_count: int = 0
    cached_input_token_count: int = 0
    generated_token_count: int = 0
    delivered_token_count: int = 0
    billed_token_count: int = 0
    cost_picos: int = 0
    outcome: str = ""
    embedding_token_count: int = 0
    journalled_token_count: int = 0
    reasoning_token_count: int = 0
    billed_reasoning_token_count: int = 0

    @property
    def sent_token_count(self) -> int:
        """Input tokens of the request, for generation or embedding."""
        return self.input_token_count + self.embedding_token_count

    @property
    def charged(self) -> Tokens:
        """Tokens that quotas count: input, billed output, and reasoning as part of output."""
        return self.sent_token_count, self.billed_token_count, self.billed_reasoning_token_count

    def settled(
        self, hold_id: uuid.UUID, currency_code: str, receipts: list[IssuedReceipt]
    ) -> Settled:
        """Build the answer `Settled` from the recorded usage."""
        return Settled(hold_id, *self[1:7], currency_code, *self[7:], receipts=receipts)

    def plus(self, part: Settled) -> EventSums:
        """Add one usage event and return the new sums."""
        sums = {
            name: value + getattr(part, name)
            for name, value in self._asdict().items()
            if name.endswith(("_token_count", "_picos"))
        }
        return EventSums(part_count=self.part_count + 1, outcome=part.outcome, **sums)


NOTHING_USED = EventSums()


# First use of a request id: hash of its payload, and its usage if it has ended.
SameRequest = tuple[bytes, Settled | None]


class BatchReads(msgspec.Struct, eq=False):
    """Rows that a batch reads before it decides, keyed by integer ids (`CounterKey` says why)."""

    now: datetime
    chains: Chains = msgspec.field(default_factory=Chains)
    holds: dict[int, Hold] = msgspec.field(default_factory=dict)
    events: dict[int, EventSums] = msgspec.field(default_factory=dict)  # by hold
    # By hold; receipts of this batch are added when it is written.
    receipts: dict[int, list[IssuedReceipt]] = msgspec.field(default_factory=dict)
    # Keys: ids of project and request.
    same_requests: dict[tuple[int, int], SameRequest] = msgspec.field(default_factory=dict)
    live_keys: set[int] = msgspec.field(default_factory=set)
    terms: Mapping[TermsKey, AdmissionTerms] = msgspec.field(default_factory=dict)
    members: list[AdmissionTerms] = msgspec.field(default_factory=list)  # of this batch
    creations: dict[HoldTerms, Creation] = msgspec.field(default_factory=dict)
    # How many more usage subjects of a kind an organization may have, and the maximum.
    room: dict[tuple[int, str], int] = msgspec.field(default_factory=dict)
    end_users_max: int = 0
    # Usage subjects that an administrator's open transaction is creating.
    taken_names: set[MemberName] = msgspec.field(default_factory=set)


# Live holds of this process as of the database's last answers, by integer id. Holds without a
# request are left out: binding changes their rows.
OwnHolds = dict[int, Hold]


def store_holds(own: OwnHolds, holds: Iterable[Hold]) -> None:
    """Add new and extended holds to `own`, except pre-authorized ones."""
    for hold in holds:
        number = hold.id.int
        if hold.request_id.int != number:  # as `Hold.unbound`
            own[number] = hold


@dataclass(frozen=True, slots=True)
class HoldOwner:
    """Process that owns holds, which expire `expiry_s` after its last renewal.

    `signer` signs the receipts of its settlements; with None they are unsigned. An organization may
    have `end_users_max` end users that are not archived, and as many values of limited labels.
    """

    process_id: uuid.UUID
    expiry_s: float
    signer: BatchSigner | None
    own: OwnHolds
    end_users_max: int = END_USERS_MAX


# Hold, usage, part number, settlement, and whether it was recovered.
UsageEvent = tuple[Hold, Settled, int, Settle, bool]


class BatchWrites(msgspec.Struct, eq=False):
    """Changes that a batch writes, except those of counters.

    `holds` has new holds with their admissions. `extensions` has, by hold id, the hold and its
    previous lease. `ends` has ended holds by id.
    """

    holds: list[tuple[Admit, Hold]] = msgspec.field(default_factory=list)
    extensions: dict[int, tuple[Hold, int]] = msgspec.field(default_factory=dict)
    ends: dict[int, Hold] = msgspec.field(default_factory=dict)
    events: list[UsageEvent] = msgspec.field(default_factory=list)
    renewed: list[tuple[uuid.UUID, frozenset[uuid.UUID]]] = msgspec.field(default_factory=list)


class Decisions(msgspec.Struct, eq=False):
    """Working state of a batch, whose operations are decided one after the other."""

    reads: BatchReads
    counters: Counters
    writes: BatchWrites = msgspec.field(default_factory=BatchWrites)
    added: dict[int, list[Settled]] = msgspec.field(default_factory=dict)  # usage by hold id
    created: set[int] = msgspec.field(default_factory=set)  # usage subjects that take up room

    def decide(self, op: HoldOperation) -> HoldAnswer:
        """Decide one operation and return its answer. A refusal raises and changes nothing."""
        match op:
            case Admit():
                return self.admit(op)
            case Extend():
                return self.extend(op)
            case Settle():
                return self.settle(op)
            case Void():
                return self.void(op.hold_id)
            case Expire():
                return self.expire(op.hold_id)
            case Renew():
                self.writes.renewed.append((op.process_id, op.hold_ids))
                return Renewed(frozenset())  # the write returns the ids

    def admit(self, op: Admit, terms: AdmissionTerms | None = None) -> Admitted | Fits:
        """Take a hold or raise a refusal. With `only_asks`, take none and return `Fits`.

        `terms` is the entry of `reads.terms`, if the caller has already looked it up. Raises:
        KeyInvalid, PriceMissing, QuotaExceeded, RequestIdReused, RequestInFlight, RequestSettled.
        """
        reads, counters, payer = self.reads, self.counters, op.payer
        if terms is None:
            terms = reads.terms.get(
                (payer.api_key_id.int, payer.currency_code, op.model, op.tier, op.embedding)
            )
            if terms is None:
                if payer.api_key_id.int not in reads.live_keys:
                    raise KeyInvalid()
            elif (op.end_user or op.labels) and (key := terms.member_key(op)) is not None:
                terms = terms.members[key]
        request_key = (payer.project_id.int, op.request_id.int)
        if (same := reads.same_requests.get(request_key)) is not None:
            raise same_request_error(op, *same)
        if terms is None:
            raise PriceMissing(op.model, payer.currency_code)
        if op.embedding and (op.first_slice_token_count or op.least_slice_token_count):
            raise InvariantViolated(f"hold {op.hold_id}: an embedding has no output to lease")
        now, rules, common, sent, lease = (
            reads.now,
            terms.rules,
            terms.common,
            op.input_token_count,
            op.first_slice_token_count,
        )
        creation = terms.creation
        new = () if creation is None else self.new_members(creation)
        if op.only_asks:
            counters = counters.copy_for(rules)
        counts = quotas.admit_whole(counters, rules, common.money, sent, lease)
        if counts is None:
            charge = Charge(common.charged, sent, 0, 0, 0, now, now)
            lease = quotas.admit(
                counters, rules, charge, lease, op.least_slice_token_count
            ).leased_token_count
            counts = counters.counts(rules)
        if op.only_asks:
            return Fits()
        for each in new:
            self.created.add(each.id.int)
            reads.room[each.organization_id.int, each.kind] -= 1
        hold = Hold(op.hold_id, op.request_id, common, rules, sent, 0, lease, 0, 0, (), now, now)
        hold.subjects = common.subjects
        if op.labels:
            known = common.subjects or NO_SUBJECTS
            hold.subjects = Subjects(known.end_user, known.salt, Labels.of(op.labels))
        self.writes.holds.append((op, hold))
        reads.same_requests[request_key] = op.payload_hash, None
        return Admitted(
            op.hold_id,
            lease,
            common.prices,
            QuotaStates(rules, counts, now),
            now,
            terms.limited,
        )

    def new_members(self, creation: Creation) -> list[Member]:
        """Return the usage subjects that take up room. Raises: EndUsersExhausted, WriteConflict."""
        new = [
            each
            for each in creation.members
            if (each.is_new or each.is_archived) and each.id.int not in self.created
        ]
        for each in new:
            if each.is_new and each.full_name in self.reads.taken_names:
                raise WriteConflict("an administrator is setting a limit of this end user or label")
            if self.reads.room[each.organization_id.int, each.kind] < 1:
                what = f"values of limited labels such as {each.label_key}"
                raise EndUsersExhausted(
                    what if each.label_key else "end users", self.reads.end_users_max
                )
        return new

    def extend(self, op: Extend) -> Extended:
        """Extend a lease, or raise a refusal and leave it unchanged."""
        hold = self.live(op.hold_id)
        if not hold.delivered_token_count <= op.delivered_token_count <= hold.leased_token_count:
            raise InvariantViolated(
                f"hold {hold.id}: delivered count must be between {hold.delivered_token_count}"
                f" (last extension) and {hold.leased_token_count} (leased), got"
                f" {op.delivered_token_count}"
            )
        if op.wanted_token_count < 1:
            raise InvariantViolated(
                f"hold {hold.id}: a lease grows by at least one token, got {op.wanted_token_count}"
            )
        if hold.terms.embedding:
            raise InvariantViolated(f"hold {hold.id}: an embedding has no output to lease")
        charge = quotas.extend(
            self.counters,
            hold.rules,
            hold.charge(op.cached_input_token_count),
            op.delivered_token_count,
            op.wanted_token_count,
            min(
                max(op.reasoning_token_count, hold.reasoning_token_count), op.delivered_token_count
            ),
        )
        self.writes.extensions.setdefault(hold.id.int, (hold, hold.leased_token_count))
        hold.cached_input_token_count = charge.cached_input_token_count
        hold.leased_token_count = charge.leased_token_count
        hold.delivered_token_count = op.delivered_token_count
        hold.posted_token_count = charge.posted_token_count
        hold.posted_minutes = charge.posted_minutes
        hold.charged_at = charge.charged_at
        hold.reasoning_token_count = charge.reasoning_token_count
        hold.posted_cost_picos = charge.posted(hold.terms.money)
        return Extended(charge.leased_token_count)

    def settle(self, op: Settle) -> Settled:
        """End a hold and record its usage.

        For a settled hold, return the recorded usage. For an expired one, record the usage that its
        expiry did not bill. Raises: NotFound, HoldEnded if the hold was voided, InvariantViolated
        if more was delivered than leased.
        """
        number = op.hold_id.int
        hold = self.reads.holds.get(number)
        if hold is None:
            raise NotFound("hold", str(op.hold_id))
        if op.delivered_token_count > hold.leased_token_count:
            raise InvariantViolated(
                f"hold {hold.id}: {op.delivered_token_count} delivered of {hold.leased_token_count}"
                " leased"
            )
        if hold.state == VOIDED:
            raise HoldEnded("it was voided, and usage can no longer be recorded")
        if unbound := hold.request_id.int == number:  # as `Hold.unbound`
            op = structs.replace(op, input_token_count=0, cached_input_token_count=0)
        elif hold.terms.embedding:
            op = structs.replace(op, cached_input_token_count=0)
        if hold.state == EXPIRED:
            return self.settle_late(hold, op)
        if hold.state == SETTLED:
            return self.recorded_usage(hold)
        if op.delivered_token_count < hold.delivered_token_count:
            if not op.recovered:
                raise InvariantViolated(
                    f"hold {hold.id}: {op.delivered_token_count} delivered after"
                    f" {hold.delivered_token_count}"
                )
            # A machine crash may lose the end of a journal; the last extension is in the database.
            op = structs.replace(op, delivered_token_count=hold.delivered_token_count)
        reasoning = min(
            max(op.reasoning_token_count, hold.reasoning_token_count), op.delivered_token_count
        )
        if reasoning != op.reasoning_token_count:
            op = structs.replace(op, reasoning_token_count=reasoning)
        sent, delivered = op.input_token_count, op.delivered_token_count
        if unbound:
            delivered = reasoning = 0
        if hold.posted_token_count:
            if (known := hold.corrected_cached_tokens(op)) is not None:
                op = structs.replace(op, cached_input_token_count=known)
                quotas.lower_postings(self.counters, hold.rules, hold.charge(), known)
                hold.cached_input_token_count = known
            quotas.settle(self.counters, hold.rules, hold.charge(), (sent, delivered, reasoning))
        else:
            cached = hold.cached_input_token_count = max(
                hold.cached_input_token_count, op.cached_input_token_count
            )
            cached = min(cached, sent)
            admitted_tokens, consumed = (
                (hold.input_token_count, hold.leased_token_count),
                (sent - cached, cached, delivered - reasoning, reasoning),
            )
            quotas.settle_unposted(
                self.counters,
                hold.rules,
                hold.terms.money,
                window_starts(hold.charged_at),
                admitted_tokens,
                consumed,
            )
        hold.state, hold.delivered_token_count = SETTLED, op.delivered_token_count
        hold.reasoning_token_count = op.reasoning_token_count
        self.writes.ends[number] = hold
        return self.record(hold, op, recovered=op.recovered)

    def settle_late(self, hold: Hold, op: Settle) -> Settled:
        """Record usage of an expired hold that its expiry did not bill; return the unused lease.

        This happens once: the usage event, even one without tokens, marks it as done.
        """
        known = self.sums_of(hold.id)
        if known.part_count > (1 if hold.delivered_token_count else 0):
            return self.recorded_usage(hold)
        unbilled = {name: max(getattr(op, name) - getattr(known, name), 0) for name in REPORTED}
        unbilled["input_token_count"] = max(op.input_token_count - known.sent_token_count, 0)
        rest = structs.replace(op, **unbilled)
        part = self.record(hold, rest, recovered=True)
        charge, lease = hold.charge(), hold.leased_token_count
        charged = hold.input_token_count, lease, charge.dearest_reasoning(lease)
        billed, after = known.charged, known.plus(part).charged
        quotas.correct_expired(self.counters, hold.rules, charge, charged, billed, after)
        return self.recorded_usage(hold)

    def void(self, hold_id: uuid.UUID) -> Ended:
        """End a hold without usage and undo its charges.

        Raises: InvariantViolated if tokens were delivered.
        """
        hold = self.reads.holds.get(hold_id.int)
        if hold is None or hold.state != HELD:
            return Ended(done=False)
        if hold.delivered_token_count:
            raise InvariantViolated(
                f"hold {hold_id} has delivered tokens and must be settled, not voided"
            )
        charge = hold.charge()
        quotas.void(self.counters, hold.rules, charge)
        hold.state, hold.delivered_token_count = VOIDED, 0
        self.writes.ends[hold.id.int] = hold
        return Ended(done=True)

    def expire(self, hold_id: uuid.UUID) -> Ended:
        """End a hold whose expiry has passed; bill the tokens reported by its last extension."""
        hold = self.reads.holds.get(hold_id.int)
        if hold is None or hold.state != HELD or hold.expires_at > self.reads.now:
            return Ended(done=False)
        charge, delivered = hold.charge(), hold.delivered_token_count
        billed = (0, 0, 0)
        if delivered:
            billed = hold.input_token_count, delivered, hold.reasoning_token_count
        quotas.expire(self.counters, hold.rules, charge, billed)
        hold.state = EXPIRED
        self.writes.ends[hold.id.int] = hold
        if delivered:
            known = Settle(
                hold_id=hold.id,
                input_token_count=hold.input_token_count,
                cached_input_token_count=hold.cached_input_token_count,
                generated_token_count=delivered,
                delivered_token_count=delivered,
                outcome=Outcome.FAILED,
                reasoning_token_count=hold.reasoning_token_count,
            )
            self.record(hold, known, recovered=True)
        return Ended(done=True)

    def record(self, hold: Hold, op: Settle, *, recovered: bool) -> Settled:
        """Add a usage event to a hold and return its usage; the receipt is added when written.

        Delivered tokens are billed, except those of an unbound hold, whose request is billed under
        another hold. The input of an embedding counts as embedding tokens.
        """
        number, prices, delivered = hold.id.int, hold.terms.prices, op.delivered_token_count
        billed = 0 if hold.request_id.int == number else delivered
        sent, embedded = (
            (0, op.input_token_count) if hold.terms.embedding else (op.input_token_count, 0)
        )
        cached = min(op.cached_input_token_count, sent)
        reasoning = min(op.reasoning_token_count, delivered)
        billed_reasoning = min(reasoning, billed)
        part = Settled(
            hold.id,
            sent,
            cached,
            max(op.generated_token_count, delivered),
            delivered,
            billed,
            prices.cost_picos(sent, cached, billed, embedded, billed_reasoning),
            prices.currency_code,
            op.outcome,
            embedded,
            max(op.journalled_token_count, delivered),
            reasoning,
            billed_reasoning,
            self.reads.receipts.setdefault(number, []),
        )
        has_parts = number in self.reads.events or number in self.added
        self.writes.events.append(
            (hold, part, self.sums_of(hold.id).part_count if has_parts else 0, op, recovered)
        )
        self.added.setdefault(number, []).append(part)
        return part

    def sums_of(self, hold_id: uuid.UUID) -> EventSums:
        """Sum the hold's usage events, including those of this batch."""
        sums = self.reads.events.get(hold_id.int, NOTHING_USED)
        for part in self.added.get(hold_id.int, ()):
            sums = sums.plus(part)
        return sums

    def recorded_usage(self, hold: Hold) -> Settled:
        """Build the answer `Settled` from a hold's recorded usage and receipts."""
        receipts = self.reads.receipts.setdefault(hold.id.int, [])
        return self.sums_of(hold.id).settled(hold.id, hold.terms.prices.currency_code, receipts)

    def live(self, hold_id: uuid.UUID) -> Hold:
        """Return a hold that has not ended. Raises: NotFound, HoldEnded."""
        hold = self.reads.holds.get(hold_id.int)
        if hold is None:
            raise NotFound("hold", str(hold_id))
        if hold.state != HELD:
            raise HoldEnded(f"it is {hold.state}")
        return hold


def same_request_error(op: Admit, payload_hash: bytes, settled: Settled | None) -> MeteringError:
    """Return the error for a repeated request id.

    `payload_hash` and `settled` are those of the first request; `settled` is None while it runs.
    """
    if is_other_payload(payload_hash, op.payload_hash):
        return RequestIdReused()
    if settled is None:
        return RequestInFlight()
    return RequestSettled(settled)
