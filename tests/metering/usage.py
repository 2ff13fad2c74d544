"""Customers and usage events for tests, inserted into the tables as settlements do."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, TypedDict

from sqlalchemy import func, insert, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import (
    Hold,
    HoldState,
    QuotaDimension,
    QuotaKey,
    QuotaSubject,
    QuotaTerms,
    UsageEvent,
    UsageSubject,
    insertion,
)
from metering.ledger.ledger import AccountKey, AccountKind, MonthState
from metering.ledger.rating import BATCH_SIZE, rate_all_pending, rate_batch
from metering.plans.prepaid import Grant, grant_credit, refresh
from metering.pricing.prices import ModelPrice, PriceTerms, set_price
from metering.quotas.quota_admin import set_quota
from metering.quotas.quota_rules import QuotaState
from metering.store.db import Sessions
from metering.tenants.api_keys import KeyRecord, create_api_key
from metering.tenants.billing_profiles import BillingProfile
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import create_organization, create_project
from metering.tenants.usage_subjects import END_USER, create_usage_subject
from tests.metering.hold_world import minutes_of

NOVEMBER = datetime(2026, 11, 15, 12, tzinfo=UTC)


class Rates(TypedDict):
    """Prices of a token, by kind."""

    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int


@dataclass(frozen=True, slots=True)
class Customer:
    """Organization with one project and one key."""

    organization_id: uuid.UUID
    name: str
    key: KeyRecord
    secret: str


@dataclass(frozen=True, slots=True)
class Consumed:
    """Usage of one request. cost_picos: None for the correct cost.

    reasoning_token_count: part of the output. price: None for that of the call that adds it.
    """

    input_token_count: int = 0
    cached_input_token_count: int = 0
    output_token_count: int = 0
    outcome: str = "stop"
    settled_at: datetime = NOVEMBER
    cost_picos: int | None = None
    hold_id: uuid.UUID | None = None
    part: int = 0
    embedding_token_count: int = 0
    reasoning_token_count: int = 0
    end_user_id: uuid.UUID | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    price: ModelPrice | None = None

    @property
    def token_count(self) -> int:
        """Tokens of all kinds."""
        return self.input_token_count + self.output_token_count + self.embedding_token_count

    def cost(self, price: ModelPrice) -> int:
        """Return the cost that the event records."""
        if self.cost_picos is not None:
            return self.cost_picos
        counts = (
            self.input_token_count,
            self.cached_input_token_count,
            self.output_token_count,
            self.embedding_token_count,
            self.reasoning_token_count,
        )
        return price.prices.cost_picos(*counts)


async def new_customer(session: AsyncSession, name: str, currency_code: str = "USD") -> Customer:
    """Create organization `name` with e-mail address, the project `search`, and a key."""
    organization = await create_organization(
        session, name=name, currency_code=currency_code, actor="test"
    )
    profile = BillingProfile(emails=(f"billing@{name}.example",))
    await session.execute(
        insertion("billing_profiles", profile.as_json() | {"organization_id": organization.id})
    )
    await create_project(session, organization=name, name="search", actor="test")
    key, secret = await create_api_key(
        session,
        organization=name,
        project="search",
        name="all",
        terms=KeyTerms(scopes=("inference", "admin", "billing")),
        actor="test",
    )
    return Customer(organization.id, name, key, secret)


def rates_of(input_picos: int, cached_picos: int, output_picos: int) -> Rates:
    """Return prices of a token."""
    return Rates(
        input_picos_per_token=input_picos,
        cached_input_picos_per_token=cached_picos,
        output_picos_per_token=output_picos,
    )


async def new_price(session: AsyncSession, model: str = "demo", **terms: Any) -> ModelPrice:
    """Set picos of a dollar per token: 150,000 input, 15,000 cached, 600,000 output, unless said.

    terms: of `PriceTerms`.
    """
    usual: dict[str, Any] = {**rates_of(150_000, 15_000, 600_000)}
    return await set_price(session, PriceTerms(model=model, **usual | terms), actor="test")


async def new_limit(
    session: AsyncSession,
    subject_ref: str,
    dimension: QuotaDimension,
    limit_value: int,
    *,
    subject: QuotaSubject = QuotaSubject.ORGANIZATION,
    model: str = "",
    **terms: Any,
) -> QuotaState:
    """Set a limit as an admin does. terms: of `QuotaTerms`."""
    return await set_quota(
        session,
        subject=subject,
        subject_ref=subject_ref,
        key=QuotaKey(dimension, model, window_minutes=minutes_of(dimension)),
        terms=QuotaTerms(limit_value, **terms),
        actor="test",
    )


async def mark_closed(session: AsyncSession, customer: Customer, month: date) -> None:
    """Insert the row of a closed month without an invoice."""
    closed = {
        "organization_id": customer.organization_id,
        "month": month,
        "state": MonthState.CLOSED,
        "closed_at": datetime.now(UTC),
        "closed_by": "test",
    }
    await session.execute(insertion("billing_months", closed))


async def add_usage(
    session: AsyncSession,
    customer: Customer,
    price: ModelPrice,
    events: Iterable[Consumed],
    *,
    end_user: str = "",
    labels: dict[str, str] | None = None,
) -> list[int]:
    """Insert usage events, each with its ended hold; return their ids in the given order."""
    owner = customer.organization_id
    subject = (
        (await create_usage_subject(session, owner, END_USER, "", end_user))[0]
        if end_user
        else None
    )
    holds: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for event in events:
        hold_id = event.hold_id or uuid.uuid4()
        paid = event.price or price
        common = {
            "organization_id": customer.organization_id,
            "project_id": customer.key.project_id,
            "api_key_id": customer.key.id,
            "request_id": uuid.uuid4(),
            "model": paid.model,
            "price_version_id": paid.prices.version,
            "labels": dict(event.labels) | (labels or {}),
            "end_user_id": event.end_user_id if subject is None else subject.id,
            "input_token_count": event.input_token_count,
            "cached_input_token_count": event.cached_input_token_count,
            "admitted_at": event.settled_at,
        }
        if event.part == 0:
            holds.append(
                common
                | {
                    "id": hold_id,
                    "payload_hash": bytes(32),
                    "embedding": event.embedding_token_count > 0,
                    "input_token_count": event.input_token_count + event.embedding_token_count,
                    "state": HoldState.SETTLED,
                    "process_id": uuid.uuid4(),
                    "leased_token_count": event.output_token_count,
                    "delivered_token_count": event.output_token_count,
                    "quota_ids": [],
                    "expires_at": event.settled_at,
                    "ended_at": event.settled_at,
                }
            )
        rows.append(
            common
            | {
                "hold_id": hold_id,
                "part": event.part,
                "outcome": event.outcome,
                "generated_token_count": event.output_token_count,
                "delivered_token_count": event.output_token_count,
                "billed_token_count": event.output_token_count,
                "embedding_token_count": event.embedding_token_count,
                "reasoning_token_count": event.reasoning_token_count,
                "billed_reasoning_token_count": event.reasoning_token_count,
                "cost_picos": event.cost(paid),
                "settled_at": event.settled_at,
            }
        )
    if holds:
        await session.execute(insert(Hold), holds)
    return list(
        await session.scalars(
            insert(UsageEvent).returning(UsageEvent.id, sort_by_parameter_order=True), rows
        )
    )


@dataclass(frozen=True, slots=True)
class Acme:
    """Organization `acme` and the price of the model `demo`, with sessions on their database."""

    sessions: Sessions
    customer: Customer
    price: ModelPrice

    @property
    def organization_id(self) -> uuid.UUID:
        """Id of the organization."""
        return self.customer.organization_id

    async def use(self, *events: Consumed, price: ModelPrice | None = None) -> list[int]:
        """Insert usage, as settlements do; return the ids of the events."""
        async with self.sessions.begin() as session:
            return await add_usage(session, self.customer, price or self.price, events)

    async def end_user(self, name: str) -> uuid.UUID:
        """Create an end user, as its first request does; return its id."""
        async with self.sessions.begin() as session:
            made = await create_usage_subject(session, self.organization_id, "end_user", "", name)
            return made[0].id

    async def erase(self, *end_user_ids: uuid.UUID) -> None:
        """Remove the names of end users."""
        erased = {"name": None, "erased_at": func.now(), "archived_at": func.now()}
        async with self.sessions.begin() as session:
            await session.execute(
                update(UsageSubject).where(UsageSubject.id.in_(end_user_ids)).values(erased)
            )

    async def mark_closed(self, month: date, at: datetime) -> None:
        """Record that a month is closed, without an invoice."""
        closed = {"month": month, "state": MonthState.CLOSED, "closed_at": at, "closed_by": "test"}
        async with self.sessions.begin() as session:
            await session.execute(
                insertion("billing_months", closed | {"organization_id": self.organization_id})
            )

    async def use_and_rate(self, *events: Consumed) -> None:
        """Insert usage and post it to the ledger."""
        await self.use(*events)
        await rate_all_pending(self.sessions)


async def rate_pending(session: AsyncSession, limit: int = BATCH_SIZE) -> int:
    """Rate at most `limit` events in the caller's transaction; return their number."""
    return (await rate_batch(session, limit=limit)).rated_count


async def balances(session: AsyncSession, organization_id: uuid.UUID) -> dict[AccountKey, int]:
    """Return the balances of all accounts of an organization, in picos."""
    query = text("""
        SELECT a.kind, a.currency_code, coalesce(sum(e.amount_picos), 0)
        FROM ledger_accounts a LEFT JOIN ledger_entries e ON e.account_id = a.id
        WHERE a.organization_id = :organization_id GROUP BY a.id ORDER BY a.id
    """)
    found = await session.execute(query, {"organization_id": organization_id})
    return {
        AccountKey(organization_id, AccountKind(kind), currency): int(picos)
        for kind, currency, picos in found
    }


async def grant(
    session: AsyncSession, amount: int, *, last_month: date, first_month: date | None = None
) -> Grant:
    """Grant prepaid credit and compute what is left of it."""
    made = await grant_credit(
        session,
        organization="acme",
        amount_picos=amount,
        first_month=first_month,
        last_month=last_month,
        reason="paid",
        actor="test",
    )
    await refresh(session, made.organization_id, actor="test", granted_picos=made.amount_picos)
    return made
