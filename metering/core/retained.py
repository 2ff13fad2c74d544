"""Months without details: the day from which details are kept, and errors that name it.

Sums by day, project, key, model and outcome remain (`usage_sums`). A call that needs a detail of a
removed month gets an error that names the first day with details, never an empty answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import CHECK_NAME, InvalidValue, NotFound

# Requests are removed before the events of their month are exchanged for sums.
BOUNDARIES = text("""
SELECT month_ends(month) AS requests_from,
       (SELECT month_ends(max(month)) FROM retired_months WHERE detached_at IS NOT NULL)
           AS usage_from,
       kept_months
FROM retired_months
ORDER BY month DESC
LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Removed:
    """Times from which details are kept, and for how many months after their own.

    `usage_from` is None before the first month is exchanged for its sums.
    """

    requests_from: datetime
    usage_from: datetime | None
    kept_months: int

    @property
    def text(self) -> str:
        """Say what was removed."""
        return (
            f"requests that ended before {self.requests_from:%Y-%m-%d} were removed: they are"
            f" retained for {self.kept_months} months"
        )


async def removed_details(session: AsyncSession) -> Removed | None:
    """Read what was removed; None if nothing ever was."""
    row = (await session.execute(BOUNDARIES)).one_or_none()
    return None if row is None else Removed(*row)


async def check_details(session: AsyncSession, first: datetime, field: str, what: str) -> None:
    """Raise InvalidValue for `field` if details of usage from `first` on were removed.

    `what` is the detail, such as "single requests".
    """
    removed = await removed_details(session)
    if removed is not None and removed.usage_from is not None and first < removed.usage_from:
        day = f"{removed.usage_from:%Y-%m-%d}"
        raise InvalidValue(
            field,
            f"needs {what}, which are retained for {removed.kept_months} months. Ask for usage from"
            f" {day} on; earlier usage has sums by day, project, key and model",
        )


async def request_not_found(session: AsyncSession, request_id: str) -> NotFound:
    """Build the error for a request that does not exist, or no longer."""
    removed = await removed_details(session)
    remedy = CHECK_NAME if removed is None else f"{CHECK_NAME} Details of {removed.text}."
    return NotFound("request", request_id, remedy)
