"""Closed months for tests: a movable clock, past prices, and invariants of the ledger."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from sqlalchemy import column, insert, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import PriceVersion, ServiceTier, insertion
from metering.invoicing import adjustments
from metering.invoicing.closing import CloseResult, close_month
from metering.invoicing.invoice_document import InvoiceDocument, Issuer
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.month_report import MonthReport
from metering.invoicing.months import Verification, month_report, verify_month
from metering.ledger.ledger import AccountKind, Posting, TransactionKind, post
from metering.plans.plan_admin import assign_plan, create_plan
from metering.plans.plans import PlanRules
from metering.pricing.prices import ModelPrice, get_price
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization
from tests.metering.usage import Consumed, Customer, add_usage

ISSUER = Issuer("Weir Operations GmbH", ("Brückenstraße 12",), payment=("IBAN DE02 1005",))
LATER = datetime(2025, 12, 15, tzinfo=UTC)  # when the months of most tests are over


@dataclass(slots=True)
class MovableClock:
    """Clock of closes, set by the test."""

    now: datetime = LATER

    async def __call__(self, session: AsyncSession) -> datetime:
        """Return the same moment for every close."""
        return self.now


async def draw_here(document: InvoiceDocument) -> bytes:
    """Draw without the time that a process takes to start."""
    return render_pdf(document)


@dataclass(slots=True)
class ClosingWorld:
    """One customer, its prices, and the actions of finance on its months."""

    sessions: Sessions
    customer: Customer
    clock: MovableClock = field(default_factory=MovableClock)
    currency_code: str = "USD"
    issuer: Issuer = ISSUER

    async def price(
        self,
        begins: datetime,
        *,
        model: str = "demo",
        input_picos: int = 150_000,
        output_picos: int = 600_000,
        tier: ServiceTier = ServiceTier.INTERACTIVE,
        embedding_picos: int = 0,
    ) -> ModelPrice:
        """Set a price that began in the past; cached input costs a tenth of input."""
        values = {
            "model": model,
            "currency_code": self.currency_code,
            "input_picos_per_token": input_picos,
            "cached_input_picos_per_token": input_picos // 10,
            "output_picos_per_token": output_picos,
            "embedding_picos_per_token": embedding_picos,
            "effective_at": begins,
            "tier": tier,
        }
        async with self.sessions.begin() as session:
            version = (
                await session.scalars(
                    insert(PriceVersion).values(values).returning(PriceVersion.id)
                )
            ).one()
            return await get_price(session, version)

    async def plan(self, name: str, first_month: date, rules: PlanRules) -> None:
        """Set the plan from a month on."""
        async with self.sessions.begin() as session:
            await create_plan(
                session, name=name, currency_code=self.currency_code, rules=rules, actor="ann"
            )
            await assign_plan(
                session,
                organization=self.customer.name,
                plan=name,
                first_month=first_month,
                actor="ann",
            )

    async def grant(
        self, amount_picos: int, first_month: date, last_month: date, reason: str
    ) -> uuid.UUID:
        """Grant prepaid credit in the past, as `credits.grant_credit` does in the present."""
        owner = self.customer.organization_id
        values = {
            "organization_id": owner,
            "currency_code": self.currency_code,
            "amount_picos": amount_picos,
            "granted_by": "ann",
        }
        async with self.sessions.begin() as session:
            months = {"first_month": first_month, "last_month": last_month, "reason": reason}
            statement = insertion("credit_grants", values | months)
            grant_id: uuid.UUID = (
                await session.execute(statement.returning(column("id")))
            ).scalar_one()
            entries = (
                (AccountKind.CREDIT_FUNDING, amount_picos),
                (AccountKind.PREPAID_CREDIT, -amount_picos),
            )
            at = datetime(first_month.year, first_month.month, 1, tzinfo=UTC)
            kind = TransactionKind.CREDIT_GRANTED
            await post(
                session,
                [
                    Posting(
                        kind, owner, self.currency_code, first_month, at, reason, grant_id, entries
                    )
                ],
            )
        return grant_id

    async def use(
        self,
        price: ModelPrice,
        *events: Consumed,
        end_user: str = "",
        labels: dict[str, str] | None = None,
    ) -> list[int]:
        """Insert usage events, as settlements do; return their ids."""
        async with self.sessions.begin() as session:
            return await add_usage(
                session, self.customer, price, events, end_user=end_user, labels=labels
            )

    async def close(
        self,
        month: str,
        actor: str = "finance",
        *,
        leave_running: bool = False,
        before_first: bool = False,
        correcting: str = "",
    ) -> CloseResult:
        """Close a month at the clock's time."""
        return await close_month(
            self.sessions,
            organization=self.customer.name,
            month=month,
            actor=actor,
            leave_running=leave_running,
            before_first=before_first,
            correcting=correcting,
            clock=self.clock,
            issuer=self.issuer,
            draw=draw_here,
        )

    async def report(self, month: str) -> MonthReport:
        """Return the current report."""
        async with self.sessions() as session:
            return await month_report(session, organization=self.customer.name, month=month)

    async def verify(self, month: str) -> Verification:
        """Verify a month: reproduce and compare it."""
        async with self.sessions() as session:
            return await verify_month(
                session, await find_organization(session, self.customer.name), month
            )

    async def adjust(
        self, amount_picos: int, reason: str = "an outage"
    ) -> adjustments.AdjustmentRecord:
        """Propose and approve an adjustment by two persons."""
        async with self.sessions.begin() as session:
            proposed = await adjustments.create_adjustment(
                session,
                organization=self.customer.name,
                amount_picos=amount_picos,
                currency_code=self.currency_code,
                reason=reason,
                actor="ann",
            )
            return await adjustments.approve(
                session, adjustment_id=str(proposed.id), actor="bob", now=self.clock.now
            )

    async def give_back(
        self, invoice_number: str, amount_picos: int, reason: str = "a refund"
    ) -> adjustments.AdjustmentRecord:
        """Propose and approve a credit note by two persons."""
        async with self.sessions.begin() as session:
            proposed = await adjustments.create_credit_note(
                session,
                invoice_number=invoice_number,
                amount_picos=amount_picos,
                currency_code=self.currency_code,
                reason=reason,
                actor="ann",
            )
            return await adjustments.approve(
                session, adjustment_id=str(proposed.id), actor="bob", now=self.clock.now
            )

    async def ask(self, query: str) -> tuple[object, ...]:
        """Return the single row of a query."""
        async with self.sessions() as session:
            return tuple((await session.execute(text(query))).one())
