"""Close of a month in a process of its own: `python -m tests.metering.closing_process`.

Arguments: the URL of the database, the organization, and the month. It prints the result.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncSession

from metering.invoicing.closing import close_month
from metering.invoicing.invoice_document import Issuer
from metering.store.db import create_engine, create_sessions


async def late(session: AsyncSession) -> datetime:
    """Return a moment after the months of the tests."""
    return datetime(2025, 12, 15, tzinfo=UTC)


async def close(url: str, organization: str, month: str) -> None:
    """Close the month."""
    engine = create_engine(url)
    result = await close_month(
        create_sessions(engine),
        organization=organization,
        month=month,
        actor="finance",
        clock=late,
        issuer=Issuer("W", ("A",), payment=("P",)),
    )
    print("closed before" if result.already_closed else "closed")
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(close(*sys.argv[1:]))
