"""Numbers of documents, without gaps: the next one is drawn in the transaction that uses it, and given back if that fails."""

from __future__ import annotations

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.invoice_models import DocumentSeries
from metering.billing.invoices import Series, document_number


async def draw_number(session: AsyncSession, series: Series) -> tuple[int, str]:
    """The next ordinal and number. Whoever else draws one waits until this transaction ends: draw late in it."""
    statement = (
        insert(DocumentSeries)
        .values(series=series, last_ordinal=1)
        .on_conflict_do_update(index_elements=["series"], set_={"last_ordinal": DocumentSeries.last_ordinal + 1})
        .returning(DocumentSeries.last_ordinal)
    )
    ordinal: int = (await session.scalars(statement)).one()
    return ordinal, document_number(series, ordinal)
