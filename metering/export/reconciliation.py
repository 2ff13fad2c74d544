"""Our tokens against Stripe's, per customer and meter, for one month: what was used less what is counted there.

Hours that are not over yet are left out on both sides. Stripe counts some seconds after it has answered.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Row, text

from metering.billing.pricing import TOKENS_BY_KIND
from metering.billing.reports import month_bounds
from metering.export.batches import CLOSE_DELAY
from metering.export.stripe_gateway import StripeGateway
from metering.store.db import Sessions

CALLS_AT_ONCE = 8

OURS = text(f"""
WITH used AS (
    SELECT organization_id, price_version_id, kind.token_kind, sum(kind.token_count) AS token_count
    FROM usage_events, {TOKENS_BY_KIND}
    WHERE organization_id = :organization_id AND settled_at >= :begins AND settled_at < :ends
    GROUP BY 1, 2, 3 HAVING sum(kind.token_count) > 0
), batches AS (
    SELECT organization_id, price_version_id, token_kind,
           coalesce(sum(token_count) FILTER (WHERE state = 'delivered'), 0) AS delivered,
           coalesce(sum(token_count) FILTER (WHERE state IN ('pending', 'sent', 'parked', 'cancelling')), 0) AS waiting,
           coalesce(sum(token_count) FILTER (WHERE state = 'rejected'), 0) AS rejected
    FROM meter_batches WHERE organization_id = :organization_id AND hour >= :begins AND hour < :ends GROUP BY 1, 2, 3
)
SELECT o.id AS organization_id, o.name, p.model, price_version_id, token_kind, coalesce(used.token_count, 0)::bigint AS used,
       coalesce(delivered, 0)::bigint AS delivered, coalesce(waiting, 0)::bigint AS waiting,
       coalesce(rejected, 0)::bigint AS rejected, c.stripe_id AS customer, m.stripe_id AS meter
FROM used FULL JOIN batches USING (organization_id, price_version_id, token_kind)
JOIN organizations o ON o.id = organization_id
JOIN price_versions p ON p.id = price_version_id
LEFT JOIN stripe_objects c ON (c.account, c.kind, c.ref) = (:account, 'customer', o.id::text)
LEFT JOIN stripe_objects m ON (m.account, m.kind, m.ref) = (:account, 'meter', price_version_id || ':' || token_kind)
ORDER BY o.name, p.model, price_version_id, token_kind
""")
CLOSED_UNTIL = text("""
SELECT coalesce((SELECT closed_until FROM export_progress), date_trunc('hour', now() - :close_delay, 'UTC'))
""")


@dataclass(frozen=True, slots=True)
class MeterSum:
    """Tokens of one customer and meter in the month. waiting, rejected: batches that Stripe does not count, or not surely."""

    organization_id: uuid.UUID
    organization: str
    model: str
    price_version: int
    token_kind: str
    used: int
    delivered: int
    waiting: int
    rejected: int
    stripe: int

    @property
    def difference(self) -> int:
        """Used here and not counted there; negative if more is counted than was used."""
        return self.used - self.stripe


@dataclass(frozen=True, slots=True)
class MeterReconciliation:
    """All sums of a month, up to the end of the last hour that is over."""

    month: str
    until: datetime
    sums: tuple[MeterSum, ...]

    @property
    def balanced(self) -> bool:
        """Whether Stripe counts exactly what was used."""
        return all(each.difference == 0 for each in self.sums)


async def reconcile(sessions: Sessions, gateway: StripeGateway, month: str) -> MeterReconciliation:
    """Raises: StripeFailed, InvalidValue for a month that is none."""
    begins, month_ends = month_bounds(month)
    async with sessions() as session:
        closed_until = await session.scalar(CLOSED_UNTIL, {"close_delay": CLOSE_DELAY})
        assert isinstance(closed_until, datetime)
        ends = max(begins, min(month_ends, closed_until))
        parameters = {"begins": begins, "ends": ends, "account": gateway.account}
        rows: list[Row[Any]] = []
        for organization_id in await session.scalars(text("SELECT id FROM organizations ORDER BY name")):
            rows += (await session.execute(OURS, parameters | {"organization_id": organization_id})).all()
    calls = asyncio.Semaphore(CALLS_AT_ONCE)

    async def counted(customer: str | None, meter: str | None) -> int:
        if customer is None or meter is None or ends - begins < timedelta(minutes=1):
            return 0
        async with calls:
            summaries = await gateway.list_all(
                f"/v1/billing/meters/{meter}/event_summaries",
                customer=customer,
                start_time=int(begins.timestamp()),
                end_time=int(ends.timestamp()),
            )
        return sum(int(each["aggregated_value"]) for each in summaries)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(counted(row.customer, row.meter)) for row in rows]
    sums = (
        MeterSum(
            organization_id=row.organization_id,
            organization=row.name,
            model=row.model,
            price_version=row.price_version_id,
            token_kind=row.token_kind,
            used=row.used,
            delivered=row.delivered,
            waiting=row.waiting,
            rejected=row.rejected,
            stripe=task.result(),
        )
        for row, task in zip(rows, asked, strict=True)
    )
    return MeterReconciliation(month, ends.astimezone(UTC), tuple(sums))
