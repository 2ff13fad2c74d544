"""Our tokens compared with the biller's, per customer, price version and kind, for one month: used, posted, exported, counted.

A difference says where, how much, since when and what to do about it. Hours that are not over are left out on both sides of the
export. Stripe counts some seconds after it has answered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.export.deliveries import CLOSE_DELAY
from metering.export.stripe_gateway import StripeGateway
from metering.ledger.ledger import month_bounds
from metering.pricing.token_prices import TOKENS_BY_KIND
from metering.store.db import Sessions


class Stage(StrEnum):
    """Between which stages a difference lies."""

    RATING = "usage to ledger"
    INVOICING = "ledger to invoice"
    BATCHING = "ledger to batches"
    DELIVERY = "batches to biller"
    COUNTING = "biller's own count"
    INVOICE = "biller's invoice"
    LATE = "after the biller's invoice"
    SETTLEMENT = "our invoice to the biller's"


@dataclass(frozen=True, slots=True)
class Difference:
    """What is missing at a stage, in tokens, or in picos of the currency; negative: what is too much. since: how old it is."""

    stage: Stage
    organization_id: uuid.UUID
    organization: str
    detail: str
    remedy: str
    model: str = ""
    price_version: int | None = None
    token_kind: str = ""
    token_count: int = 0
    amount_picos: int = 0
    currency_code: str = ""
    since: datetime | None = None


CALLS_AT_ONCE = 8

OURS = text(f"""
WITH used AS (
    SELECT price_version_id, kind.token_kind, sum(kind.token_count) AS used,
           sum(kind.token_count) FILTER (WHERE settled_at < :until) AS due,
           min(settled_at) FILTER (WHERE rated_at IS NULL) AS unrated_since
    FROM usage_events, {TOKENS_BY_KIND}
    WHERE organization_id = :organization_id AND settled_at >= :begins AND settled_at < :ends
      AND NOT EXISTS (SELECT FROM usage_corrections c  -- billed by an adjustment, and posted to no month
                      WHERE (c.hold_id, c.part, c.settled_at) = (usage_events.hold_id, usage_events.part, usage_events.settled_at))
    GROUP BY 1, 2 HAVING sum(kind.token_count) > 0
), posted AS (
    SELECT e.price_version_id, e.token_kind, sum(e.token_count) AS posted,
           sum(e.token_count) FILTER (WHERE m.state = 'closed') AS billed
    FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id
    LEFT JOIN billing_months m ON m.organization_id = t.organization_id AND m.month = t.billing_month
    WHERE t.organization_id = :organization_id AND t.kind = 'usage' AND e.token_kind IS NOT NULL
      AND t.effective_at >= :begins AND t.effective_at < :ends
    GROUP BY 1, 2 HAVING sum(e.token_count) > 0
), invoiced AS (
    SELECT l.price_version_id, l.token_kind, sum(l.token_count) AS invoiced
    FROM invoices i JOIN invoice_lines l ON l.invoice_id = i.id
    WHERE i.organization_id = :organization_id AND l.kind IN ('usage', 'late_usage') AND l.usage_month = :month GROUP BY 1, 2
), batches AS (
    SELECT price_version_id, token_kind,
           sum(token_count) FILTER (WHERE state <> 'cancelled') AS batched,
           sum(token_count) FILTER (WHERE state = 'delivered') AS delivered,
           sum(token_count) FILTER (WHERE state IN ('pending', 'sent', 'parked', 'cancelling')) AS waiting,
           sum(token_count) FILTER (WHERE state = 'rejected') AS rejected
    FROM meter_batches WHERE organization_id = :organization_id AND hour >= :begins AND hour < :until GROUP BY 1, 2
)
SELECT o.id AS organization_id, o.name AS organization, p.model, p.tier, price_version_id AS price_version, token_kind,
       coalesce(used, 0)::bigint AS used, coalesce(posted, 0)::bigint AS posted, coalesce(billed, 0)::bigint AS billed,
       coalesce(invoiced, 0)::bigint AS invoiced, coalesce(due, 0)::bigint AS due,
       coalesce(batched, 0)::bigint AS batched, coalesce(delivered, 0)::bigint AS delivered,
       coalesce(waiting, 0)::bigint AS waiting, coalesce(rejected, 0)::bigint AS rejected, unrated_since
FROM used FULL JOIN posted USING (price_version_id, token_kind) FULL JOIN invoiced USING (price_version_id, token_kind)
FULL JOIN batches USING (price_version_id, token_kind)
JOIN organizations o ON o.id = :organization_id
JOIN price_versions p ON p.id = price_version_id
ORDER BY p.model, price_version_id, token_kind
""")
PLACES = text("""
SELECT (SELECT stripe_id FROM stripe_objects WHERE (account, kind, ref) = (:account, 'customer', :customer)) AS customer,
       (SELECT stripe_id FROM stripe_objects WHERE (account, kind, ref) = (:account, 'meter', :meter)) AS meter
""")
CLOSED_UNTIL = text("""
SELECT coalesce((SELECT closed_until FROM export_progress), date_trunc('hour', now() - :close_delay, 'UTC'))
""")


@dataclass(frozen=True, slots=True)
class StageSum:
    """Tokens of one customer, price version and kind that were used in a month, as they stand at each stage.

    billed, invoiced: of the posted ones those in closed months, and what stands on the invoices of these, whichever month billed
    them. due: of the used ones those of hours that should have been exported. waiting, rejected: in batches that the biller does
    not count, or not surely. unrated_since: of the oldest usage event that is not posted.
    """

    organization_id: uuid.UUID
    organization: str
    model: str
    tier: str
    price_version: int
    token_kind: str
    used: int
    posted: int
    billed: int
    invoiced: int
    due: int
    batched: int
    delivered: int
    waiting: int
    rejected: int
    unrated_since: datetime | None


@dataclass(frozen=True, slots=True)
class OurMonth:
    """Every stage of a month here. until: hours before it are over, and to be exported."""

    begins: datetime
    ends: datetime
    until: datetime
    sums: tuple[StageSum, ...]


async def our_month(session: AsyncSession, month: str, organization_ids: Sequence[uuid.UUID] = ()) -> OurMonth:
    """Of these organizations, or of all. Raises: InvalidValue for a month that is none."""
    begins, ends = month_bounds(month)
    closed_until = await session.scalar(CLOSED_UNTIL, {"close_delay": CLOSE_DELAY})
    assert isinstance(closed_until, datetime)
    until = max(begins, min(ends, closed_until)).astimezone(UTC)
    ids = organization_ids or list(await session.scalars(text("SELECT id FROM organizations ORDER BY name")))
    sums: list[StageSum] = []
    for organization_id in ids:
        parameters = {"begins": begins, "ends": ends, "until": until, "month": month, "organization_id": organization_id}
        sums += (StageSum(**row._mapping) for row in await session.execute(OURS, parameters))
    return OurMonth(begins, ends, until, tuple(sums))


async def stripe_counts(sessions: Sessions, gateway: StripeGateway, ours: OurMonth) -> list[int]:
    """What Stripe counts of each sum, in their order. Raises: StripeFailed."""
    calls = asyncio.Semaphore(CALLS_AT_ONCE)

    async def counted(each: StageSum) -> int:
        async with calls:
            async with sessions() as session:
                names = {"customer": str(each.organization_id), "meter": f"{each.price_version}:{each.token_kind}"}
                place = (await session.execute(PLACES, names | {"account": gateway.account})).one()
            if place.customer is None or place.meter is None or ours.until - ours.begins < timedelta(minutes=1):
                return 0
            summaries = await gateway.list_all(
                f"/v1/billing/meters/{place.meter}/event_summaries",
                customer=place.customer,
                start_time=int(ours.begins.timestamp()),
                end_time=int(ours.until.timestamp()),
            )
        return sum(int(summary["aggregated_value"]) for summary in summaries)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(counted(each)) for each in ours.sums]
    return [task.result() for task in asked]


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
    async with sessions() as session:
        ours = await our_month(session, month)
    counts = await stripe_counts(sessions, gateway, ours)
    sums = (
        MeterSum(
            organization_id=each.organization_id,
            organization=each.organization,
            model=each.model,
            price_version=each.price_version,
            token_kind=each.token_kind,
            used=each.due,
            delivered=each.delivered,
            waiting=each.waiting,
            rejected=each.rejected,
            stripe=count,
        )
        for each, count in zip(ours.sums, counts, strict=True)
        if each.due or each.batched or count
    )
    return MeterReconciliation(month, ours.until, tuple(sums))
