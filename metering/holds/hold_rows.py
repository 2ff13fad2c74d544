"""What the database held when a batch of hold operations began, as values: holds, what was used of them, rules, prices.

`batch_reads.py` reads it; `decisions.py` decides by it, and changes it as it does.
"""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from metering.billing.pricing import PriceBook, TokenPrices, embedding_terms
from metering.holds.own_holds import HoldTerms, OwnHold
from metering.operations import Payer, Settled
from metering.quotas.quota_rules import Claim, QuotaRule
from metering.receipts.chaining import Chains, IssuedReceipt


@dataclass(slots=True)
class HoldRow:
    """A locked hold, changed as the batch decides. receipt_ids: as a receipt has them, 64 bytes."""

    id: uuid.UUID
    state: str
    owner_id: uuid.UUID
    price_version_id: int
    input_token_count: int
    cached_input_token_count: int
    leased_token_count: int
    delivered_token_count: int
    posted_token_count: int
    posted_minutes: list[int]
    quota_ids: list[uuid.UUID]
    admitted_at: datetime
    charged_at: datetime
    expires_at: datetime
    request_id: uuid.UUID
    receipt_ids: bytes
    model: str
    embedding: bool

    @property
    def project_id(self) -> bytes:
        """Whose receipts its usage events get, as 16 bytes."""
        return self.receipt_ids[16:32]

    @property
    def unbound(self) -> bool:
        """Whether it was taken in advance and no request has been given to it (`bind_batch.py`)."""
        return self.request_id == self.id

    def claim(self, prices: TokenPrices, cached_input_token_count: int | None = None) -> Claim:
        """What the hold claims of its quotas; `cached_input_token_count` where more is known than the row has.

        What comes to be known after the input was posted changes nothing any more: it stands in windows that may be over.
        """
        cached = self.cached_input_token_count
        if cached_input_token_count is not None and not self.posted_token_count:
            cached = max(cached, cached_input_token_count)
        return Claim(
            embedding_terms(prices) if self.embedding else prices,
            self.input_token_count,
            cached,
            self.leased_token_count,
            self.posted_token_count,
            self.admitted_at,
            self.charged_at,
            tuple(self.posted_minutes),
        )

    def own(self, prices: TokenPrices) -> OwnHold:
        """What the process that has taken it remembers."""
        quota_ids = tuple(quota_id.int for quota_id in self.quota_ids)
        return OwnHold(
            HoldTerms(self.receipt_ids[:48], self.model, self.embedding, prices, quota_ids),
            self.request_id,
            self.input_token_count,
            self.cached_input_token_count,
            self.leased_token_count,
            self.delivered_token_count,
            self.posted_token_count,
            self.admitted_at,
            self.charged_at,
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
    embedding_token_count: int = 0

    @property
    def sent_token_count(self) -> int:
        """Tokens of the request's input, to be continued or to be embedded."""
        return self.input_token_count + self.embedding_token_count

    def settled(self, hold_id: uuid.UUID, currency_code: str, receipts: tuple[IssuedReceipt, ...] = ()) -> Settled:
        """The usage that stands."""
        return Settled(hold_id, *self[1:7], currency_code, self.outcome, self.embedding_token_count, receipts)

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
            self.embedding_token_count + part.embedding_token_count,
        )


class SameRequest(NamedTuple):
    """A hold that exists for a request id, and its usage if it has ended."""

    state: str
    payload_hash: bytes
    settled: Settled | None


@dataclass(slots=True)
class BatchReads:
    """What the database holds at the beginning of a batch. Ids are looked up by their numbers, for the reason of `CounterKey`."""

    now: datetime
    chains: Chains
    holds: dict[int, HoldRow] = field(default_factory=dict)
    events: dict[int, EventSums] = field(default_factory=dict)  # by hold
    receipts: dict[int, list[IssuedReceipt]] = field(default_factory=dict)  # by hold
    same_requests: dict[tuple[int, int], SameRequest] = field(default_factory=dict)  # by project and request
    live_keys: set[int] = field(default_factory=set)
    rules: dict[int, QuotaRule] = field(default_factory=dict)
    prices_in_force: PriceBook = field(default_factory=PriceBook)
    prices: dict[int, TokenPrices] = field(default_factory=dict)
    _by_subject: dict[tuple[int, str], list[QuotaRule]] = field(default_factory=dict)
    _by_payer: dict[tuple[Payer, str], PayerRules] = field(default_factory=dict)
    _hold_terms: dict[tuple[Payer, str, int, bool], HoldTerms] = field(default_factory=dict)

    def rules_for(self, payer: Payer, model: str) -> PayerRules:
        """What a new request of the payer for the model is charged to; found once per batch, not once per request."""
        found = self._by_payer.get((payer, model))
        if found is None:
            if not self._by_subject:
                for rule in self.rules.values():
                    if rule.limit_value is not None:
                        self._by_subject.setdefault((rule.subject_id.int, rule.model), []).append(rule)
            get = self._by_subject.get
            rules: list[QuotaRule] = []
            for subject_id in (payer.organization_id, payer.project_id, payer.api_key_id):
                rules += get((subject_id.int, ""), ())
                if model:
                    rules += get((subject_id.int, model), ())
            found = self._by_payer[payer, model] = payer_rules(tuple(rules))
        return found

    def hold_terms(self, payer: Payer, model: str, prices: TokenPrices, *, embedding: bool) -> HoldTerms:
        """What new holds have in common; the same object for all that have the same."""
        key = payer, model, prices.version, embedding
        found = self._hold_terms.get(key)
        if found is None:
            quota_ids = self.rules_for(payer, model).quota_ids
            found = self._hold_terms[key] = HoldTerms(payer.receipt_ids, model, embedding, prices, quota_ids)
        return found

    def rules_of(self, hold: HoldRow) -> list[QuotaRule]:
        """The rules that a hold was charged to."""
        rules = self.rules
        return [rules[quota_id.int] for quota_id in hold.quota_ids]


class PayerRules(NamedTuple):
    """The rules that requests of one payer for one model are charged to. quota_ids: the numbers of theirs."""

    rules: tuple[QuotaRule, ...]
    quota_ids: tuple[int, ...]


@functools.lru_cache(maxsize=32_768)  # a payer's rules are the same objects from batch to batch
def payer_rules(rules: tuple[QuotaRule, ...]) -> PayerRules:
    """With their ids written out."""
    return PayerRules(rules, tuple(rule.number for rule in rules))
