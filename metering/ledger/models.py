"""Tables of the ledger and of billing months. Append-only, balanced and closed month by month, by triggers in the migrations."""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base, TokenKind, one_of


class AccountKind(StrEnum):
    """Meaning of a ledger account. Debits are positive.

    receivable: what the customer owes. revenue: what its usage earned at list price. discount: what its plan took off. commitment:
    what it owes for a minimum it did not reach. prepaid_credit: what of its credit is left, as a negative number. credit_funding:
    where granted credit came from. credit_breakage: credit that expired unused. adjustment: corrections by hand. rounding: what
    rounding to whole coins has moved from one invoice to the next.
    """

    RECEIVABLE = "receivable"
    REVENUE = "revenue"
    DISCOUNT = "discount"
    COMMITMENT = "commitment"
    PREPAID_CREDIT = "prepaid_credit"
    CREDIT_FUNDING = "credit_funding"
    CREDIT_BREAKAGE = "credit_breakage"
    ADJUSTMENT = "adjustment"
    ROUNDING = "rounding"


class TransactionKind(StrEnum):
    """Why a ledger transaction was written."""

    USAGE = "usage"
    PLAN = "plan"
    CREDIT_GRANTED = "credit_granted"
    CREDIT_APPLIED = "credit_applied"
    CREDIT_EXPIRED = "credit_expired"
    ADJUSTMENT = "adjustment"
    ROUNDING = "rounding"


class MonthState(StrEnum):
    """Where a customer's month stands. open, closing: it takes postings. closed: never again."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class LedgerAccount(Base):
    """One account per organization, kind and currency."""

    __tablename__ = "ledger_accounts"
    __table_args__ = (
        UniqueConstraint("organization_id", "kind", "currency_code"),
        CheckConstraint(one_of("kind", AccountKind), name="kind_known"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    kind: Mapped[str]
    currency_code: Mapped[str]


class LedgerTransaction(Base):
    """A balanced move. `billing_month` is the month that it is billed in, `effective_at` when what it is about happened.

    One of kind `usage` is for all usage events that point to it: of one organization, one day (UTC; `effective_at` is its
    beginning), rated together. `source_id` is what any other one stems from, and has one transaction of a kind at most.
    """

    __tablename__ = "ledger_transactions"
    __table_args__ = (
        CheckConstraint(one_of("kind", TransactionKind), name="kind_known"),
        CheckConstraint("extract(day FROM billing_month) = 1", name="whole_month"),
        CheckConstraint(
            "kind <> 'usage' OR billing_month >= date_trunc('month', effective_at AT TIME ZONE 'UTC')::date",
            name="usage_not_before",
        ),
        Index("ix_ledger_transactions_organization_id_billing_month", "organization_id", "billing_month"),
        Index("uq_ledger_transactions_source", "kind", "source_id", unique=True, postgresql_where=text("source_id IS NOT NULL")),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    kind: Mapped[str]
    billing_month: Mapped[date]
    effective_at: Mapped[datetime]
    description: Mapped[str]
    source_id: Mapped[uuid.UUID | None]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())


class LedgerEntry(Base):
    """One leg of a transaction, in picos. Revenue legs of usage carry the tokens they are for; other legs carry none.

    A trigger on each INSERT sees that transaction and account exist and are of one organization, that the price version exists and
    has the account's currency, and that each transaction sums to zero.
    """

    __tablename__ = "ledger_entries"
    __table_args__ = (
        CheckConstraint(
            "(token_kind IS NULL) = (token_count IS NULL) AND (token_kind IS NULL) = (price_version_id IS NULL)",
            name="tokens_complete",
        ),
        CheckConstraint(f"token_kind IS NULL OR {one_of('token_kind', TokenKind)}", name="token_kind_known"),
        Index("ix_ledger_entries_transaction_id", "transaction_id"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    transaction_id: Mapped[int]
    account_id: Mapped[int]
    amount_picos: Mapped[Decimal]
    token_kind: Mapped[str | None]
    token_count: Mapped[int | None]
    price_version_id: Mapped[int | None]


class BillingMonth(Base):
    """Where a month of an organization stands. A month without a row is open."""

    __tablename__ = "billing_months"
    __table_args__ = (
        CheckConstraint("extract(day FROM month) = 1", name="whole_month"),
        CheckConstraint(one_of("state", MonthState), name="state_known"),
        CheckConstraint("num_nulls(closing_at, closing_by) IN (0, 2)", name="closing_complete"),
        CheckConstraint("num_nulls(closed_at, closed_by) = CASE state WHEN 'closed' THEN 0 ELSE 2 END", name="closed_complete"),
    )

    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    month: Mapped[date] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(server_default="open")
    closing_at: Mapped[datetime | None]
    closing_by: Mapped[str | None]
    closed_at: Mapped[datetime | None]
    closed_by: Mapped[str | None]
