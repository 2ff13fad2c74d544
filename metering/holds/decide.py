"""What one batch of hold operations decides, one operation after the other, in memory.

By `quotas.py` about room, and here about all else: who may, what has ended, what is recorded. Reads and writes nothing itself.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

from metering.core.errors import (
    HoldEnded,
    InvariantViolated,
    KeyInvalid,
    MeteringError,
    NotFound,
    PriceMissing,
    RequestIdReused,
    RequestInFlight,
)
from metering.core.models import HoldState, Outcome
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
from metering.holds.read import BatchReads, EventSums, HoldRow, SameRequest
from metering.holds.write import BatchWrites, End, Extension, NewHold, usage_row
from metering.pricing.token_prices import TokenPrices, embedding_terms
from metering.quotas import quotas
from metering.quotas.quota_rules import Claim, money_scale
from metering.quotas.quotas import Counters

NOTHING_USED = EventSums()


@dataclass(slots=True)
class Decisions:
    """The state of a batch while its operations are decided one after the other."""

    reads: BatchReads
    counters: Counters
    writes: BatchWrites

    def decide(self, op: HoldOperation) -> HoldAnswer:
        """Answer one operation, or raise the error that refuses it."""
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
                self.writes.renewed.append((op.owner_id, op.hold_ids))
                return Renewed(frozenset())  # which ones only the write will tell

    def admit(self, op: Admit) -> Admitted | Fits:
        """Take a hold, or refuse without a trace; only say that there could be one, where that is asked."""
        if op.payer.api_key_id.int not in self.reads.live_keys:
            raise KeyInvalid("the API key is unknown, expired or revoked")
        request_key = (op.payer.project_id.int, op.request_id.int)
        if (same := self.reads.same_requests.get(request_key)) is not None:
            raise same_request_error(op, same)
        prices = self.reads.prices_in_force.find(op.model, op.payer.currency_code, op.payer.organization_id, op.tier)
        if prices is None:
            raise PriceMissing(op.model, op.payer.currency_code)
        rules = self.reads.rules_for(op.payer, op.model).rules
        if op.embedding and (op.first_slice_token_count or op.least_slice_token_count):
            raise InvariantViolated(f"hold {op.hold_id}: an embedding has no output to lease")
        charged = embedding_terms(prices) if op.embedding else prices
        claim = Claim(charged, op.input_token_count, 0, 0, 0, admitted_at=self.reads.now, charged_at=self.reads.now)
        if op.only_asks:
            quotas.admit(self.counters.copy_for(rules), rules, claim, op.first_slice_token_count, op.least_slice_token_count)
            return Fits()
        claim = quotas.admit(self.counters, rules, claim, op.first_slice_token_count, op.least_slice_token_count)
        terms = self.reads.hold_terms(op.payer, op.model, prices, embedding=op.embedding)
        self.writes.holds.append(NewHold(op, terms, claim.leased_token_count))
        self.reads.same_requests[request_key] = SameRequest(HoldState.HELD, op.payload_hash, None)
        states = tuple(self.counters.state(rule) for rule in rules)
        return Admitted(op.hold_id, claim.leased_token_count, prices, states, self.reads.now)

    def extend(self, op: Extend) -> Extended:
        """Lease more, or refuse and leave the lease as it is."""
        hold = self.live(op.hold_id)
        if not hold.delivered_token_count <= op.delivered_token_count <= hold.leased_token_count:
            raise InvariantViolated(
                f"hold {hold.id}: {op.delivered_token_count} delivered, which was {hold.delivered_token_count} before, "
                f"of {hold.leased_token_count} leased"
            )
        if op.wanted_token_count < 1:
            raise InvariantViolated(f"hold {hold.id}: a lease grows by at least one token, not by {op.wanted_token_count}")
        if hold.embedding:
            raise InvariantViolated(f"hold {hold.id}: an embedding has no output to lease")
        claim = hold.claim(self.reads.prices[hold.price_version_id], op.cached_input_token_count)
        claim = quotas.extend(self.counters, self.reads.rules_of(hold), claim, op.delivered_token_count, op.wanted_token_count)
        self.extended(hold, claim, op.delivered_token_count)
        return Extended(claim.leased_token_count)

    def settle(self, op: Settle) -> Settled:
        """End the hold with its usage event; an ended one answers what stands, or takes what its expiry did not know of."""
        hold = self.known(op.hold_id)
        prices = self.reads.prices[hold.price_version_id]
        if hold.unbound:
            op = replace(op, input_token_count=0, cached_input_token_count=0)
        elif hold.embedding:
            op = replace(op, cached_input_token_count=0)
        if op.delivered_token_count > hold.leased_token_count:
            raise InvariantViolated(f"hold {hold.id}: {op.delivered_token_count} delivered of {hold.leased_token_count} leased")
        if hold.state == HoldState.VOIDED:
            raise HoldEnded(f"hold {hold.id} was voided: its usage cannot be recorded any more")
        if hold.state == HoldState.EXPIRED:
            return self.settle_late(hold, prices, op)
        if hold.state == HoldState.SETTLED:
            return self.standing_usage(hold, prices)
        if op.delivered_token_count < hold.delivered_token_count:
            if not op.recovered:
                raise InvariantViolated(f"hold {hold.id}: {op.delivered_token_count} delivered after {hold.delivered_token_count}")
            # A machine that went down may have lost the end of a journal; the last extension still knows.
            op = replace(op, delivered_token_count=hold.delivered_token_count)
        claim = hold.claim(prices, op.cached_input_token_count)
        billed_token_count = 0 if hold.unbound else op.delivered_token_count
        quotas.end(self.counters, self.reads.rules_of(hold), claim, op.input_token_count, billed_token_count)
        self.ended(hold, claim, HoldState.SETTLED, op.delivered_token_count)
        return self.record(hold, priced_usage(hold, prices, op), op, recovered=op.recovered)

    def settle_late(self, hold: HoldRow, prices: TokenPrices, op: Settle) -> Settled:
        """Record what an expired hold delivered beyond what its expiry billed, and give back what it did not use of its lease.

        Once: the event that is written, even one without tokens, tells the next attempt that it has been done.
        """
        known = self.standing(hold.id)
        if known.part_count > (1 if hold.delivered_token_count else 0):
            return self.standing_usage(hold, prices)
        rest = replace(
            op,
            input_token_count=max(op.input_token_count - known.sent_token_count, 0),
            cached_input_token_count=max(op.cached_input_token_count - known.cached_input_token_count, 0),
            generated_token_count=max(op.generated_token_count - known.generated_token_count, 0),
            delivered_token_count=max(op.delivered_token_count - known.delivered_token_count, 0),
        )
        part = priced_usage(hold, prices, rest)
        charged = hold.input_token_count, hold.leased_token_count
        billed = known.sent_token_count, known.billed_token_count
        consumed = billed[0] + rest.input_token_count, billed[1] + part.billed_token_count
        quotas.give_back(self.counters, self.reads.rules_of(hold), hold.claim(prices), charged, billed, consumed)
        self.record(hold, part, op, recovered=True)
        return self.standing_usage(hold, prices)

    def void(self, hold_id: uuid.UUID) -> Ended:
        """Undo a hold of which nothing is billed."""
        hold = self.reads.holds.get(hold_id.int)
        if hold is None or hold.state != HoldState.HELD:
            return Ended(done=False)
        claim = hold.claim(self.reads.prices[hold.price_version_id])
        if hold.delivered_token_count:
            raise InvariantViolated(f"hold {hold_id} has delivered tokens and must be settled, not voided")
        quotas.void(self.counters, self.reads.rules_of(hold), claim)
        self.ended(hold, claim, HoldState.VOIDED, 0)
        return Ended(done=True)

    def expire(self, hold_id: uuid.UUID) -> Ended:
        """End a hold that is overdue."""
        hold = self.reads.holds.get(hold_id.int)
        if hold is None or hold.state != HoldState.HELD or hold.expires_at > self.reads.now:
            return Ended(done=False)
        prices = self.reads.prices[hold.price_version_id]
        claim = hold.claim(prices)
        billed = (hold.input_token_count, hold.delivered_token_count) if hold.delivered_token_count else (0, 0)
        quotas.expire(self.counters, self.reads.rules_of(hold), claim, billed)
        self.ended(hold, claim, HoldState.EXPIRED, hold.delivered_token_count)
        if hold.delivered_token_count:
            known = Settle(
                hold_id=hold.id,
                input_token_count=hold.input_token_count,
                cached_input_token_count=hold.cached_input_token_count,
                generated_token_count=hold.delivered_token_count,
                delivered_token_count=hold.delivered_token_count,
                outcome=Outcome.FAILED,
            )
            self.record(hold, priced_usage(hold, prices, known), known, recovered=True)
        return Ended(done=True)

    def standing(self, hold_id: uuid.UUID) -> EventSums:
        """What the hold's usage events add up to, those of this batch among them."""
        return self.reads.events.get(hold_id.int, NOTHING_USED)

    def standing_usage(self, hold: HoldRow, prices: TokenPrices) -> Settled:
        """The same as an answer, with the receipts."""
        receipts = tuple(self.reads.receipts.get(hold.id.int, ()))
        return self.standing(hold.id).settled(hold.id, prices.currency_code, receipts)

    def record(self, hold: HoldRow, part: Settled, op: Settle, *, recovered: bool) -> Settled:
        """Write the next usage event of a hold, and its receipt."""
        known = self.standing(part.hold_id)
        receipt = self.writes.chains.append(
            hold.receipt_ids,
            (
                known.part_count,
                part.input_token_count,
                part.cached_input_token_count,
                part.billed_token_count,
                part.embedding_token_count,
            ),
            (hold.price_version_id, part.cost_picos),
            hold.admitted_at,
            (part.currency_code, hold.model, part.outcome),
        )
        self.writes.events.append(usage_row(part, known.part_count, op, receipt, recovered=recovered))
        self.reads.events[part.hold_id.int] = known.plus(part)
        self.reads.receipts.setdefault(part.hold_id.int, []).append(receipt)
        return part.receipted(receipt)

    def known(self, hold_id: uuid.UUID) -> HoldRow:
        """The hold, in whatever state."""
        hold = self.reads.holds.get(hold_id.int)
        if hold is None:
            raise NotFound("hold", str(hold_id))
        return hold

    def live(self, hold_id: uuid.UUID) -> HoldRow:
        """The hold, which must not have ended."""
        hold = self.known(hold_id)
        if hold.state != HoldState.HELD:
            raise HoldEnded(f"hold {hold_id} has ended as {hold.state}")
        return hold

    def extended(self, hold: HoldRow, claim: Claim, delivered_token_count: int) -> None:
        """Note the hold's new values, for the write and for later operations of the batch on the same hold."""
        hold.cached_input_token_count = claim.cached_input_token_count
        hold.leased_token_count = claim.leased_token_count
        hold.delivered_token_count = delivered_token_count
        hold.posted_token_count = claim.posted_token_count
        hold.posted_minutes = list(claim.posted_minutes)
        hold.charged_at = claim.charged_at
        self.writes.extensions[hold.id.int] = Extension(
            hold.id,
            claim.cached_input_token_count,
            claim.leased_token_count,
            delivered_token_count,
            claim.posted_token_count,
            claim.posted(money_scale(claim.prices)),
            claim.posted_minutes,
            claim.charged_at,
        )

    def ended(self, hold: HoldRow, claim: Claim, state: HoldState, delivered_token_count: int) -> None:
        """The same for a hold that has ended."""
        cached = claim.cached_input_token_count
        hold.state, hold.cached_input_token_count, hold.delivered_token_count = state, cached, delivered_token_count
        self.writes.ends[hold.id.int] = End(hold.id, state, cached, delivered_token_count)


def same_request_error(op: Admit, same: SameRequest) -> MeteringError:
    """Why a request id cannot be used a second time."""
    if is_other_payload(same.payload_hash, op.payload_hash):
        return RequestIdReused("this request_id was used before with another payload: mint a new one for a new request")
    if same.settled is None:
        return RequestInFlight("a request with this request_id and payload is running")
    return RequestSettled(same.settled)


def priced_usage(hold: HoldRow, prices: TokenPrices, op: Settle) -> Settled:
    """The usage event of a settlement. Billed is what was delivered; nothing if the request is billed under another hold.

    Of an embedding the input is what was embedded, a kind of token of its own.
    """
    billed_token_count = 0 if hold.unbound else op.delivered_token_count
    input_token_count, embedding_token_count = (0, op.input_token_count) if hold.embedding else (op.input_token_count, 0)
    cached = min(op.cached_input_token_count, input_token_count)
    return Settled(
        hold_id=hold.id,
        input_token_count=input_token_count,
        cached_input_token_count=cached,
        generated_token_count=max(op.generated_token_count, op.delivered_token_count),
        delivered_token_count=op.delivered_token_count,
        billed_token_count=billed_token_count,
        cost_picos=prices.cost_picos(input_token_count, cached, billed_token_count, embedding_token_count),
        currency_code=prices.currency_code,
        outcome=op.outcome,
        embedding_token_count=embedding_token_count,
    )
