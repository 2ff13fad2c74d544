"""Whose letterhead stands on an invoice: the one it had when it first left the house, whatever the settings say later.

Append-only by a trigger. Amounts, names and numbers of a closed month are kept by its close, which does not know the letterhead.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import datetime

from sqlalchemy import ForeignKey, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.billing.invoice_document import Issuer
from metering.billing.invoice_models import InvoiceRow
from metering.billing.reports import month_bounds
from metering.models import Base


class InvoiceLetterhead(Base):
    """The issuer on an invoice, written with its first document. address, payment: a line each."""

    __tablename__ = "invoice_letterheads"

    invoice_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("invoices.id"), primary_key=True)
    name: Mapped[str]
    address: Mapped[list[str]]
    tax_id: Mapped[str]
    contact: Mapped[str]
    payment: Mapped[list[str]]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())


async def letterhead_of(session: AsyncSession, organization_id: uuid.UUID, month: str, issuer: Issuer) -> Issuer:
    """The issuer on the documents of a month `YYYY-MM`, with the fonts of this one.

    Of an invoice the kept one, or this one, which is kept from now on if it has a name; of a month without an invoice this one.
    Never commits. Two who ask first at once get the same. Raises: InvalidValue for a bad month.
    """
    first_day = month_bounds(month)[0].date()
    of_month = (InvoiceRow.organization_id == organization_id, InvoiceRow.month == first_day)
    invoice_id = await session.scalar(select(InvoiceRow.id).where(*of_month))
    if issuer.name and invoice_id is not None:
        values = {
            "invoice_id": invoice_id,
            "name": issuer.name,
            "address": list(issuer.address),
            "tax_id": issuer.tax_id,
            "contact": issuer.contact,
            "payment": list(issuer.payment),
        }
        await session.execute(insert(InvoiceLetterhead).values(values).on_conflict_do_nothing())
    kept = await session.scalar(select(InvoiceLetterhead).where(InvoiceLetterhead.invoice_id == invoice_id))
    if kept is None:
        return issuer
    return replace(
        issuer,
        name=kept.name,
        address=tuple(kept.address),
        tax_id=kept.tax_id,
        contact=kept.contact,
        payment=tuple(kept.payment),
    )
