"""The tables of closed months: what was frozen at the close, invoices, adjustments and who decided them.

All are append-only, by triggers in the migrations; only `document_series` counts on.
"""

from __future__ import annotations

import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, SmallInteger, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from metering.billing.invoices import InvoiceLineKind, Series
from metering.models import Base, one_of


class DocumentSeries(Base):
    """How far a row of numbers is. Whoever draws one keeps the row locked until it commits: so no number is ever left out."""

    __tablename__ = "document_series"
    __table_args__ = (CheckConstraint(one_of("series", Series), name="series_known"),)

    series: Mapped[str] = mapped_column(primary_key=True)
    last_ordinal: Mapped[int] = mapped_column(server_default="0")


class MonthClosing(Base):
    """Parts of a closed month's report that no other row holds: names, the remainder it began with, and digests of its documents.

    billing_profile: addressee of its documents; None for a month that was closed without a profile.
    """

    __tablename__ = "month_closings"
    __table_args__ = (
        ForeignKeyConstraint(["organization_id", "month"], ["billing_months.organization_id", "billing_months.month"]),
        CheckConstraint("octet_length(json_sha256) = 32 AND octet_length(csv_sha256) = 32", name="digest_size"),
    )

    organization_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    month: Mapped[date] = mapped_column(primary_key=True)
    organization_name: Mapped[str]
    currency_code: Mapped[str]
    carried_in_picos: Mapped[Decimal]
    report_format: Mapped[int]
    json_sha256: Mapped[bytes]
    csv_sha256: Mapped[bytes]
    receipts_root: Mapped[str] = mapped_column(server_default="")
    billing_profile: Mapped[dict[str, Any] | None]


class InvoiceRow(Base):
    """An invoice: one for each month that has anything to invoice. Its lines are written by one statement and add up to it."""

    __tablename__ = "invoices"
    __table_args__ = (
        UniqueConstraint("organization_id", "month"),
        ForeignKeyConstraint(["organization_id", "month"], ["billing_months.organization_id", "billing_months.month"]),
        CheckConstraint("total_picos + carried_out_picos = exact_picos + carried_in_picos", name="adds_up"),
        CheckConstraint("line_count > 0", name="has_lines"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    ordinal: Mapped[int] = mapped_column(unique=True)
    number: Mapped[str] = mapped_column(unique=True)
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    month: Mapped[date]
    organization_name: Mapped[str]
    currency_code: Mapped[str]
    issued_at: Mapped[datetime]
    issued_by: Mapped[str]
    line_count: Mapped[int]
    exact_picos: Mapped[Decimal]
    carried_in_picos: Mapped[Decimal]
    carried_out_picos: Mapped[Decimal]
    total_picos: Mapped[Decimal]


class InvoiceLineRow(Base):
    """A line. Amounts are exact, and rounded so that they add up to the invoice's total."""

    __tablename__ = "invoice_lines"
    __table_args__ = (CheckConstraint(one_of("kind", InvoiceLineKind), name="kind_known"),)

    invoice_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("invoices.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    description: Mapped[str]
    exact_picos: Mapped[Decimal]
    amount_picos: Mapped[Decimal]
    model: Mapped[str]
    price_version_id: Mapped[int | None] = mapped_column(ForeignKey("price_versions.id"))
    token_kind: Mapped[str | None]
    token_count: Mapped[int | None]
    unit_price_picos: Mapped[int | None]
    usage_month: Mapped[str]
    source_id: Mapped[uuid.UUID | None]


class Adjustment(Base):
    """A proposed correction in picos: what the customer owes more, negative for less. With an invoice it is a credit note."""

    __tablename__ = "adjustments"
    __table_args__ = (
        UniqueConstraint("id", "author"),
        CheckConstraint("invoice_id IS NULL OR amount_picos < 0", name="amount_sign"),
        CheckConstraint("reason <> '' AND author <> ''", name="told"),
        Index("ix_adjustments_organization_id", "organization_id"),
        Index("ix_adjustments_invoice_id", "invoice_id", postgresql_where=text("invoice_id IS NOT NULL")),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    invoice_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("invoices.id"))
    currency_code: Mapped[str]
    amount_picos: Mapped[Decimal]
    reason: Mapped[str]
    author: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class UsageCorrection(Base):
    """A usage event that did not cost what its tokens cost, and is billed by an approved adjustment instead: it is never rated.

    No foreign key to the event: partitions of usage may be moved.
    """

    __tablename__ = "usage_corrections"

    hold_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(SmallInteger(), primary_key=True)
    settled_at: Mapped[datetime] = mapped_column(primary_key=True)
    adjustment_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("adjustment_decisions.adjustment_id"))
    corrected_by: Mapped[str]
    corrected_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdjustmentDecision(Base):
    """What became of an adjustment, once: approved by somebody else than its author, or rejected. An approved one is posted."""

    __tablename__ = "adjustment_decisions"
    __table_args__ = (
        ForeignKeyConstraint(["adjustment_id", "author"], ["adjustments.id", "adjustments.author"]),
        CheckConstraint("NOT approved OR decided_by <> author", name="four_eyes"),
        CheckConstraint("approved = (billing_month IS NOT NULL)", name="posted_if_approved"),
        CheckConstraint(
            "num_nulls(credit_note_ordinal, credit_note_number) IN (0, 2) AND (approved OR credit_note_number IS NULL)",
            name="number_complete",
        ),
    )

    adjustment_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    author: Mapped[str]
    approved: Mapped[bool]
    decided_by: Mapped[str]
    decided_at: Mapped[datetime] = mapped_column(server_default=func.now())
    billing_month: Mapped[date | None]
    credit_note_ordinal: Mapped[int | None] = mapped_column(unique=True)
    credit_note_number: Mapped[str | None] = mapped_column(unique=True)
