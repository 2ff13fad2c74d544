"""The interface of an exporter: the border between our batches of tokens and the biller. Pure.

An exporter counts each quantity once by its identifier, however often it is delivered, for as long as it promises to. Identifiers
are derived from what they identify: a database that has lost commits in a failover makes the same ones again, so the biller counts
nothing twice. A quantity is not part of its identifier: where some usage was lost as well, the biller keeps what it counted first,
and `weir reconcile` names the difference.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from metering.core.models import TokenKind


def derived_id(*parts: str) -> str:
    """SQL of a UUID (version 8) that is made of these SQL expressions: the first 16 bytes of their SHA-256."""
    digest = f"sha256(convert_to(concat_ws(':', {', '.join(parts)}), 'UTF8'))"
    versioned = f"set_byte(substr({digest}, 1, 16), 6, get_byte({digest}, 6) & 15 | 128)"
    return f"encode(set_byte({versioned}, 8, get_byte({digest}, 8) & 63 | 128), 'hex')::uuid"


HALF_AN_HOUR = timedelta(minutes=30)


class Verdict(StrEnum):
    """What became of handing a quantity over.

    delivered: it is counted, now or before. refused: it never will be. later: try again. blocked: nothing will be taken until
    somebody changes the configuration.
    """

    DELIVERED = "delivered"
    REFUSED = "refused"
    LATER = "later"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict and its reason. certain: that the quantity was not counted, where the verdict is not `delivered`."""

    verdict: Verdict
    reason: str = ""
    certain: bool = True
    retry_after_s: float | None = None


DELIVERED = Answer(Verdict.DELIVERED)


@dataclass(frozen=True, slots=True)
class Stream:
    """What is handed over one at a time: a customer's tokens of one kind at one price, which is one meter."""

    organization_id: uuid.UUID
    price_version: int
    token_kind: TokenKind

    @property
    def lock_name(self) -> str:
        return f"meter stream {self.organization_id} {self.price_version} {self.token_kind}"


@dataclass(frozen=True, slots=True)
class Quantity:
    """Tokens of one stream in the hour from `hour` on. customer: what the biller calls the organization, if it has customers."""

    identifier: str
    stream: Stream
    hour: datetime
    token_count: int
    attempt: int
    customer: str = ""

    @property
    def at(self) -> datetime:
        """The moment it is counted at: the middle of its hour, so no clock and no border of a period puts it elsewhere."""
        return self.hour + HALF_AN_HOUR


class Exporter(Protocol):
    """Hands quantities over."""

    @property
    def account(self) -> str:
        """Whose customers and meters a quantity needs (`stripe_objects`); empty where it needs none."""
        ...

    @property
    def remembers_for(self) -> timedelta:
        """How long after the first attempt an identifier is surely still known, so that asking again is harmless."""
        ...

    async def deliver(self, quantity: Quantity) -> Answer:
        """Hand it over. Never raises for what the other side says or does not say."""
        ...
