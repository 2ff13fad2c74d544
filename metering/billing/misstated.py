"""Usage that does not cost what its tokens cost: found, and billed by an adjustment in place of the ledger's usage.

Such a record cannot be rated, since nobody knows which of the two is wrong, and cannot be changed. Two people agree on an
adjustment of exactly what its tokens cost; the close that is told of it takes the records out of what waits for rating, for good.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.rating import RIGHT_COST
from metering.money import exact_text
from metering.tenants.tenants import as_uuid

MISSTATED = text(f"""
SELECT e.id, {RIGHT_COST} AS right_picos, p.currency_code FROM unrated_usage w JOIN usage_events e USING (hold_id, part, settled_at)
JOIN price_versions p ON p.id = e.price_version_id
WHERE w.organization_id = :organization_id AND settled_at < :ends AND e.cost_picos <> {RIGHT_COST} ORDER BY e.id
""")
UNRATABLE = text("""
SELECT w.event_id FROM unrated_usage w JOIN organizations o ON o.id = w.organization_id
LEFT JOIN usage_events e USING (hold_id, part, settled_at) LEFT JOIN price_versions p ON p.id = e.price_version_id
WHERE w.organization_id = :organization_id AND settled_at < :ends AND p.currency_code IS DISTINCT FROM o.currency_code
ORDER BY w.event_id
""")
ADJUSTMENT = text("""
SELECT a.organization_id, a.currency_code, a.amount_picos, a.invoice_id IS NOT NULL AS is_credit_note,
       coalesce(d.approved, false) AS approved,
       EXISTS (SELECT FROM usage_corrections c WHERE c.adjustment_id = a.id) AS is_used
FROM adjustments a LEFT JOIN adjustment_decisions d ON d.adjustment_id = a.id WHERE a.id = :adjustment_id
""")
CORRECT = text("""
WITH taken AS (DELETE FROM unrated_usage WHERE organization_id = :organization_id AND event_id = ANY(:ids)
               RETURNING hold_id, part, settled_at)
INSERT INTO usage_corrections (hold_id, part, settled_at, adjustment_id, corrected_by)
SELECT hold_id, part, settled_at, :adjustment_id, :actor FROM taken
""")


@dataclass(frozen=True, slots=True)
class Misstated:
    """Events by their ids, and what their tokens cost."""

    ids: tuple[int, ...]
    right_picos: int
    currency_code: str

    @property
    def right_cost(self) -> str:
        """In words."""
        return f"{exact_text(self.right_picos, self.currency_code)} {self.currency_code}"


async def misstated_usage(session: AsyncSession, organization_id: uuid.UUID, ends: datetime) -> Misstated | None:
    """What a customer has of it before a moment; None if there is none."""
    rows = (await session.execute(MISSTATED, {"organization_id": organization_id, "ends": ends})).all()
    if not rows:
        return None
    return Misstated(tuple(row.id for row in rows), sum(int(row.right_picos) for row in rows), rows[0].currency_code)


async def unratable_usage(session: AsyncSession, organization_id: uuid.UUID, ends: datetime) -> list[int]:
    """Events before a moment, by their ids, that no ledger of the customer can take: priced in another currency, or lost."""
    return list((await session.execute(UNRATABLE, {"organization_id": organization_id, "ends": ends})).scalars())


async def why_not(session: AsyncSession, organization_id: uuid.UUID, found: Misstated, adjustment: str) -> str:
    """Why an adjustment, by its id, does not correct that usage; empty if it does."""
    number = as_uuid(adjustment)
    row = None if number is None else (await session.execute(ADJUSTMENT, {"adjustment_id": number})).one_or_none()
    if row is None:
        return f"there is no adjustment {adjustment!r}"
    if row.organization_id != organization_id or row.is_credit_note:
        return f"adjustment {number} is another customer's, or a credit note"
    if not row.approved:
        return f"adjustment {number} is not approved: somebody else has to approve it"
    if row.is_used:
        return f"adjustment {number} has corrected other usage already"
    if row.amount_picos != found.right_picos:
        told = exact_text(int(row.amount_picos), row.currency_code)
        return f"adjustment {number} is of {told} {row.currency_code}, and not of {found.right_cost}"
    return ""


async def correct(session: AsyncSession, organization_id: uuid.UUID, found: Misstated, adjustment: str, actor: str) -> None:
    """Bill that usage by the adjustment, and by nothing else ever."""
    parameters = {
        "organization_id": organization_id,
        "ids": list(found.ids),
        "adjustment_id": uuid.UUID(adjustment),
        "actor": actor,
    }
    await session.execute(CORRECT, parameters)
