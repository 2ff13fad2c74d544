"""Reconciliation of one month: our tokens and the biller's, per customer, price version and kind.

Compares used, posted to the ledger, on the invoices of closed months, in batches, delivered and
counted by the biller, and Stripe's invoices. Each difference has a place, an amount, an age and a
remedy. Hours that are not over are left out on both sides of the export. Usage in transit is
reported as a difference with its age, even if it will probably arrive. Stripe counts some seconds
after it has answered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import record_of
from metering.core.money import exact_text
from metering.export.deliveries import CLOSE_DELAY
from metering.export.invoice_items import OF_OWED_MONTH
from metering.export.stripe_gateway import (
    PICOS_PER_TOKEN,
    StripeGateway,
    in_steps,
    minor_unit_picos,
)
from metering.invoicing.resale import StatedMonth, stated_month
from metering.ledger.ledger import month_bounds
from metering.pricing.prices import TOKENS_BY_KIND
from metering.store.db import Sessions

CALLS_AT_ONCE = 8
STAGE_SUMS = "used posted billed invoiced due batched delivered waiting rejected"
STAGE_COUNTS = ", ".join(f"coalesce({name}, 0)::bigint AS {name}" for name in STAGE_SUMS.split())
NAMED_MAX = 5  # batches named in a difference; `weir stripe status` lists them all
REMEDIES = {
    "pending": "the worker delivers it: check that one runs with WEIR_EXPORT set",
    "sent": "the worker retries it: check that one runs with WEIR_EXPORT set",
    "parked": (
        "compare with the biller, then record the result: weir stripe settle BATCH --counted or"
        " --not-counted"
    ),
    "rejected": (
        "remove the cause, then: weir stripe resend BATCH; otherwise an item of the invoice takes"
        " its place once the month is closed"
    ),
    "cancelling": "the cancellation is incomplete: weir stripe resend BATCH completes it",
}
COUNT_REMEDIES = {
    "stripe": (
        "it counts some seconds late: try again; then look for rejected batches with weir stripe"
        " status"
    ),
    "file": (
        "a part of the file may have been moved away: count it too; otherwise a line is missing or"
        " duplicated"
    ),
}


class Stage(StrEnum):
    """Step of billing between two counts that reconciliation compares."""

    RATING = "usage to ledger"
    INVOICING = "ledger to invoice"
    STATEMENTS = "ledger to statements"
    BATCHING = "ledger to batches"
    DELIVERY = "batches to biller"
    COUNTING = "biller's own count"
    INVOICE = "biller's invoice"
    LATE = "after the biller's invoice"
    SETTLEMENT = "our invoice to the biller's"


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens or picos that a stage lacks; negative if it has too many.

    `since` is the time from which the difference has existed, None if unknown.
    """

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


OURS = text(f"""
WITH used AS (
    SELECT price_version_id, kind.token_kind,
           sum(kind.token_count) AS used,
           sum(kind.token_count) FILTER (WHERE settled_at < :until) AS due,
           min(settled_at) FILTER (WHERE rated_at IS NULL) AS unrated_since
    FROM usage_sums e,
    {TOKENS_BY_KIND}
    WHERE organization_id = :organization_id
      AND settled_at >= :begins
      AND settled_at < :ends
      AND NOT EXISTS (  -- billed by an adjustment, and posted to no month
          SELECT
          FROM usage_corrections c
          WHERE (c.hold_id, c.part, c.settled_at) = (e.hold_id, e.part, e.settled_at)
      )
      AND NOT (e.hold_id IS NULL AND e.rated_at IS NULL)  -- the same, of a month without details
    GROUP BY 1, 2
    HAVING sum(kind.token_count) > 0
), posted AS (
    SELECT e.price_version_id, e.token_kind,
           sum(e.token_count) AS posted,
           sum(e.token_count) FILTER (WHERE m.state = 'closed') AS billed
    FROM ledger_transactions t
    JOIN ledger_entries e ON e.transaction_id = t.id
    LEFT JOIN billing_months m
        ON m.organization_id = t.organization_id AND m.month = t.billing_month
    WHERE t.organization_id = :organization_id
      AND t.kind = 'usage'
      AND e.token_kind IS NOT NULL
      AND t.effective_at >= :begins
      AND t.effective_at < :ends
    GROUP BY 1, 2
    HAVING sum(e.token_count) > 0
), invoiced AS (
    SELECT l.price_version_id, l.token_kind, sum(l.token_count) AS invoiced
    FROM invoices i
    JOIN invoice_lines l ON l.invoice_id = i.id
    WHERE i.organization_id = :organization_id
      AND l.kind IN ('usage', 'late_usage')
      AND l.usage_month = :month
    GROUP BY 1, 2
), batches AS (
    SELECT price_version_id, token_kind,
           sum(token_count) FILTER (WHERE state <> 'cancelled') AS batched,
           sum(token_count) FILTER (WHERE state = 'delivered') AS delivered,
           sum(token_count) FILTER (WHERE state IN ('pending', 'sent', 'parked', 'cancelling'))
               AS waiting,
           sum(token_count) FILTER (WHERE state = 'rejected') AS rejected
    FROM meter_batches
    WHERE organization_id = :organization_id
      AND hour >= :begins
      AND hour < :until
    GROUP BY 1, 2
)
SELECT o.id AS organization_id, o.name AS organization, p.model, p.tier,
       price_version_id AS price_version, token_kind,
       {STAGE_COUNTS}, unrated_since
FROM used
FULL JOIN posted USING (price_version_id, token_kind)
FULL JOIN invoiced USING (price_version_id, token_kind)
FULL JOIN batches USING (price_version_id, token_kind)
JOIN organizations o ON o.id = :organization_id
JOIN price_versions p ON p.id = price_version_id
ORDER BY p.model, price_version_id, token_kind
""")
STRIPE_IDS = text("""
SELECT (
           SELECT stripe_id
           FROM stripe_objects
           WHERE (account, kind, ref) = (:account, 'customer', :customer)
       ) AS customer,
       (
           SELECT stripe_id
           FROM stripe_objects
           WHERE (account, kind, ref) = (:account, 'meter', :meter)
       ) AS meter
""")
CLOSED_UNTIL = text("""
SELECT coalesce(
    (SELECT closed_until FROM export_progress), date_trunc('hour', now() - :close_delay, 'UTC')
)
""")


@dataclass(frozen=True, slots=True)
class StageSum:
    """Tokens of one customer, price version and kind in a month, counted at each stage.

    `billed` are posted tokens of closed months, `invoiced` those on these months' invoices, `due`
    those of hours that should have been exported. `waiting` and `rejected` are in batches that the
    biller does not count, or may not count. `unrated_since` is the time of the oldest usage event
    that is not posted.
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
    """Token sums of a month at every stage. Hours before `until` are due for export.

    `stated` has the costs of customers that have statements of their end users.
    """

    begins: datetime
    ends: datetime
    until: datetime
    sums: tuple[StageSum, ...]
    stated: tuple[StatedMonth, ...] = ()


async def our_month(
    session: AsyncSession, month: str, organization_ids: Sequence[uuid.UUID] = ()
) -> OurMonth:
    """Compute the sums of a month for these organizations, or for all if none is given.

    Raises: InvalidValue for an invalid month.
    """
    begins, ends = month_bounds(month)
    closed_until = await session.scalar(CLOSED_UNTIL, {"close_delay": CLOSE_DELAY})
    assert isinstance(closed_until, datetime)
    until = max(begins, min(ends, closed_until)).astimezone(UTC)
    ids = organization_ids or list(
        await session.scalars(text("SELECT id FROM organizations ORDER BY name"))
    )
    sums: list[StageSum] = []
    stated: list[StatedMonth] = []
    for organization_id in ids:
        parameters = {
            "begins": begins,
            "ends": ends,
            "until": until,
            "month": month,
            "organization_id": organization_id,
        }
        sums += (StageSum(**row._mapping) for row in await session.execute(OURS, parameters))
        if (found := await stated_month(session, organization_id, begins.date())) is not None:
            stated.append(found)
    return OurMonth(begins, ends, until, tuple(sums), tuple(stated))


async def stripe_counts(sessions: Sessions, gateway: StripeGateway, ours: OurMonth) -> list[int]:
    """Ask Stripe for its count of each sum, in the order of `ours.sums`. Raises: StripeFailed."""
    calls = asyncio.Semaphore(CALLS_AT_ONCE)

    async def counted(each: StageSum) -> int:
        async with calls:
            async with sessions() as session:
                names = {
                    "customer": str(each.organization_id),
                    "meter": f"{each.price_version}:{each.token_kind}",
                }
                ids = (
                    await session.execute(STRIPE_IDS, names | {"account": gateway.account})
                ).one()
            if (
                ids.customer is None
                or ids.meter is None
                or ours.until - ours.begins < timedelta(minutes=1)
            ):
                return 0
            summaries = await gateway.list_all(
                f"/v1/billing/meters/{ids.meter}/event_summaries",
                customer=ids.customer,
                start_time=int(ours.begins.timestamp()),
                end_time=int(ours.until.timestamp()),
            )
        return sum(int(summary["aggregated_value"]) for summary in summaries)

    async with asyncio.TaskGroup() as tasks:
        counts = [tasks.create_task(counted(each)) for each in ours.sums]
    return [task.result() for task in counts]


# Invoices of one period are compared together: a customer with many prices has several
# subscriptions, each with its own invoice. They contain the usage Stripe had counted when it
# finalized them; later usage is on none.
INVOICED = text(f"""
SELECT o.id AS organization_id, o.name AS organization, i.currency_code,
       i.period_start, i.period_end, i.finalized_at, i.ids, i.amount_due_minor,
       coalesce(c.in_time_picos, 0) AS in_time_picos,
       coalesce(c.late_picos, 0) AS late_picos,
       coalesce(c.late_tokens, 0)::bigint AS late_tokens,
       c.late_since,
       coalesce(c.line_count, 0) AS line_count,
       items.item_minor
FROM (
    SELECT organization_id, currency_code, period_start, period_end,
           min(finalized_at) AS finalized_at,
           array_agg(id ORDER BY id) AS ids,
           sum(coalesce(total_minor, amount_due_minor))::bigint AS amount_due_minor
    FROM stripe_invoices
    WHERE finalized_at IS NOT NULL
      AND period_start >= :begins
      AND period_start < :ends
      AND period_end > period_start
    GROUP BY 1, 2, 3, 4
) AS i
JOIN organizations o ON o.id = i.organization_id,
LATERAL (
    SELECT sum(picos) FILTER (WHERE NOT is_late) AS in_time_picos,
           sum(picos) FILTER (WHERE is_late AND NOT invoiced) AS late_picos,
           sum(token_count) FILTER (WHERE is_late AND NOT invoiced) AS late_tokens,
           min(delivered_at) FILTER (WHERE is_late AND NOT invoiced) AS late_since,
           count(DISTINCT (price_version_id, token_kind)) FILTER (WHERE NOT is_late) AS line_count
    FROM (
        SELECT b.*,
               b.delivered_at > i.finalized_at AS is_late,
               b.token_count::numeric * {PICOS_PER_TOKEN} AS picos,
               coalesce(t.stripe_id IS NOT NULL OR t.amount_minor = 0, false) AS invoiced
        FROM meter_batches b
        JOIN price_versions p ON p.id = b.price_version_id AND p.currency_code = i.currency_code
        LEFT JOIN stripe_late_items t ON t.id = b.late_item_id
        WHERE b.organization_id = i.organization_id
          AND b.state = 'delivered'
          AND b.hour >= i.period_start
          AND b.hour < i.period_end
    ) AS priced
) AS c,
-- Items that are on no draft are on the first invoice made after them, at the end of a period.
LATERAL (
    SELECT coalesce(sum(t.amount_minor), 0)::bigint AS item_minor
    FROM (
        SELECT organization_id, amount_minor, created_at, NULL AS invoice_stripe_id
        FROM stripe_late_items
        WHERE stripe_id IS NOT NULL AND currency_code = i.currency_code
        UNION ALL
        SELECT organization_id, amount_minor, created_at, invoice_stripe_id
        FROM stripe_month_items
        WHERE stripe_id IS NOT NULL
    ) AS t
    WHERE t.organization_id = i.organization_id
      AND (
          t.invoice_stripe_id = ANY(i.ids)
          OR (
              t.invoice_stripe_id IS NULL
              AND t.created_at <= i.period_end
              AND NOT EXISTS (
                  SELECT
                  FROM stripe_invoices s
                  WHERE s.organization_id = i.organization_id
                    AND s.currency_code = i.currency_code
                    AND s.period_end > s.period_start
                    AND s.period_end >= t.created_at
                    AND s.period_end < i.period_end
              )
          )
      )
) AS items
WHERE CAST(:organization_id AS uuid) IS NULL OR o.id = :organization_id
ORDER BY o.name, i.period_start
""")
# Closed months of customers known to Stripe, with the amounts that settled them.
SETTLED = text("""
SELECT o.id AS organization_id, o.name AS organization, c.currency_code, m.closed_at, n.number,
       s.due_minor, s.settled_at, coalesce(n.total_picos, 0) AS total_picos, s.invoiced_minor,
       s.late_minor, items.minor AS item_minor, items.waiting_count
FROM billing_months m
JOIN month_closings c USING (organization_id, month)
JOIN organizations o ON o.id = m.organization_id
LEFT JOIN invoices n USING (organization_id, month)
LEFT JOIN stripe_month_settlements s USING (organization_id, month),
LATERAL (
    SELECT coalesce(sum(amount_minor), 0)::bigint AS minor,
           count(*) FILTER (WHERE stripe_id IS NULL) AS waiting_count
    FROM stripe_month_items i
    WHERE (i.organization_id, i.month) = (m.organization_id, m.month)
) AS items
WHERE m.month = CAST(:begins AT TIME ZONE 'UTC' AS date)
  AND m.state = 'closed'
  AND m.closed_at >= (SELECT month_items_since FROM export_progress)
  AND EXISTS (
      SELECT FROM stripe_objects WHERE kind = 'customer' AND ref = m.organization_id::text
  )
  AND (CAST(:organization_id AS uuid) IS NULL OR o.id = :organization_id)
ORDER BY o.name
""")


async def invoice_differences(
    session: AsyncSession, ours: OurMonth, organization_id: uuid.UUID | None
) -> list[Difference]:
    """Compare the biller's invoices with our usage, for one organization or all."""
    parameters = {"begins": ours.begins, "ends": ours.ends, "organization_id": organization_id}
    differences = [
        each for row in await session.execute(INVOICED, parameters) for each in invoiced(row)
    ]
    return differences + [
        each for row in await session.execute(SETTLED, parameters) for each in settled(row)
    ]


def settled(row: Row[Any]) -> Iterator[Difference]:
    """Compare our invoice of a closed month with the biller's total, including late items."""
    unit = minor_unit_picos(row.currency_code)
    ours = int(row.total_picos)
    name = f"invoice {row.number}" if row.number else "a month without an invoice"
    if row.settled_at is None or row.waiting_count:
        yield record_of(
            Difference,
            row,
            stage=Stage.SETTLEMENT,
            detail=(
                f"{name} of {exact_text(ours, row.currency_code)} {row.currency_code} is not"
                " settled at the biller yet"
            ),
            remedy=(
                "the worker makes the missing items once all usage of the month is delivered: check"
                " that one runs with WEIR_EXPORT=stripe; its log shows the reason for the wait"
            ),
            amount_picos=ours - row.item_minor * unit,
            since=row.closed_at,
        )
    elif in_steps(
        missing := row.due_minor - row.invoiced_minor - row.late_minor - row.item_minor,
        row.currency_code,
    ):
        yield record_of(
            Difference,
            row,
            stage=Stage.SETTLEMENT,
            detail=(
                f"{name} comes to {exact_text(row.due_minor * unit, row.currency_code)}"
                f" {row.currency_code}, and the biller's invoices of it with all items do not"
            ),
            remedy="settled amounts never change: find the cause with weir fsck",
            amount_picos=missing * unit,
            since=row.settled_at,
        )


def invoiced(row: Row[Any]) -> Iterator[Difference]:
    """Compare the biller's invoices with usage delivered before they became final.

    Later usage is reported too. Stripe rounds each line, so a difference of half a minor unit per
    line is normal.
    """
    minor_picos = minor_unit_picos(row.currency_code)
    due_picos, late = row.amount_due_minor * minor_picos, int(row.late_picos)
    in_time = int(row.in_time_picos) + row.item_minor * minor_picos
    invoices = f"{', '.join(row.ids)}, finalized {row.finalized_at:%Y-%m-%d %H:%M} UTC"
    if 2 * abs(in_time - due_picos) > row.line_count * minor_picos:
        yield record_of(
            Difference,
            row,
            stage=Stage.INVOICE,
            detail=(
                f"{exact_text(in_time, row.currency_code)} {row.currency_code} of usage were"
                f" counted in time, and {exact_text(due_picos, row.currency_code)} were invoiced"
                f" ({invoices})"
            ),
            remedy=(
                "look for coupons, taxes and manual items on the invoice; correct the rest by an"
                " item on the next one, or by a credit note"
            ),
            amount_picos=in_time - due_picos,
            since=row.finalized_at,
        )
    if late:
        yield record_of(
            Difference,
            row,
            stage=Stage.LATE,
            detail=(
                f"reached the biller after it had finalized ({invoices}): counted in the old"
                " period, and on no invoice"
            ),
            remedy=(
                "the worker invoices usage more than five minutes late by an item of its own;"
                f" invoice the rest by hand: {exact_text(late, row.currency_code)}"
                f" {row.currency_code} in all"
            ),
            token_count=row.late_tokens,
            amount_picos=late,
            since=row.late_since,
        )


STUCK = text(f"""
SELECT b.price_version_id, b.token_kind, b.state,
       sum(b.token_count)::bigint AS token_count,
       min(b.created_at) AS since,
       array_agg(b.id ORDER BY b.hour, b.part) AS ids,
       max(b.last_error) AS error
FROM meter_batches b
WHERE b.organization_id = :organization_id
  AND b.hour >= :begins
  AND b.hour < :until
  AND b.state NOT IN ('delivered', 'cancelled')
  AND NOT (b.state = 'rejected' AND {OF_OWED_MONTH})
GROUP BY 1, 2, 3
ORDER BY 1, 2, 3
""")
EXPORTED = text("SELECT EXISTS (SELECT FROM export_progress)")  # once any customer has a batch


@dataclass(frozen=True, slots=True)
class MonthReconciliation:
    """Reconciliation of a month at every stage.

    `counted` has the biller's count of each of `ours.sums`, None if it was not asked.
    """

    month: str
    ours: OurMonth
    counted: tuple[int, ...] | None
    differences: tuple[Difference, ...]
    biller: str

    @property
    def balanced(self) -> bool:
        return not self.differences


async def local_differences(
    session: AsyncSession, ours: OurMonth, organization_id: uuid.UUID | None = None
) -> list[Difference]:
    """Find differences in the stages after the ledger, without asking the biller."""
    differences = list(batching(ours))
    for each in sorted({(each.organization_id, each.organization) for each in ours.sums}):
        differences += await stuck(session, ours, *each)
    return differences + await invoice_differences(session, ours, organization_id)


async def reconcile_locally(
    session: AsyncSession, month: str, organization_id: uuid.UUID
) -> tuple[MonthReconciliation, bool]:
    """Reconcile one organization's month without asking the biller.

    Also returns whether usage is exported at all. Raises: InvalidValue for an invalid month.
    """
    ours = await our_month(session, month, (organization_id,))
    is_exported = bool(await session.scalar(EXPORTED))
    local = await local_differences(session, ours, organization_id) if is_exported else ()
    return conclude(month, ours, local), is_exported


def conclude(
    month: str,
    ours: OurMonth,
    local: Sequence[Difference] = (),
    counted: Sequence[int] | None = None,
    biller: str = "",
) -> MonthReconciliation:
    """Combine all differences of a month, sorted by stage.

    `local` are the differences in the stages after the ledger. `counted` has the biller's count of
    each sum, None if it was not asked. `biller` names the destination, empty if the export is off.
    """
    differences = [
        *rating(ours),
        *invoicing(ours),
        *stating(ours),
        *local,
        *(counting(ours, counted, biller) if counted is not None else ()),
    ]
    order = list(Stage)
    differences.sort(
        key=lambda each: (
            order.index(each.stage),
            each.organization,
            each.model,
            each.price_version or 0,
            each.token_kind,
        )
    )
    return MonthReconciliation(
        month, ours, None if counted is None else tuple(counted), tuple(differences), biller
    )


def rating(ours: OurMonth) -> Iterator[Difference]:
    for each in ours.sums:
        if each.used == each.posted:
            continue
        if each.unrated_since is not None and each.used > each.posted:
            detail = "is not rated"
            remedy = (
                "the worker rates each second: check that one runs; its log names events that it"
                " cannot rate"
            )
        else:
            detail, remedy = "ledger and usage events disagree", "find the place with: weir fsck"
        yield difference_of(
            each, Stage.RATING, each.used - each.posted, detail, remedy, each.unrated_since
        )


def invoicing(ours: OurMonth) -> Iterator[Difference]:
    """Yield a difference for tokens posted to closed months but missing on their invoices."""
    for each in ours.sums:
        if each.billed != each.invoiced:
            detail = (
                f"{each.billed:,} are posted to closed months, and their invoices have"
                f" {each.invoiced:,}"
            )
            remedy = (
                "a closed month never changes: find the cause with weir fsck, and correct it by an"
                " adjustment"
            )
            yield difference_of(each, Stage.INVOICING, each.billed - each.invoiced, detail, remedy)


def stating(ours: OurMonth) -> Iterator[Difference]:
    """Yield a difference if the statements of end users do not add up to the customer's usage."""
    for each in ours.stated:
        posted = f"{exact_text(each.posted_picos, each.currency_code)} {each.currency_code}"
        if missing := each.posted_picos - each.stated_picos:
            stated = f"{exact_text(each.stated_picos, each.currency_code)} {each.currency_code}"
            yield record_of(
                Difference,
                each,
                stage=Stage.STATEMENTS,
                detail=f"usage of {posted} is billed, and statements of end users have {stated}",
                remedy=(
                    "a closed month never changes: find the cause with weir fsck, and tell the"
                    " customer"
                ),
                amount_picos=missing,
            )
        if rented := each.recorded_rented_picos - each.rented_picos:
            amounts = (each.recorded_rented_picos, each.rented_picos)
            recorded, stated = (exact_text(picos, each.currency_code) for picos in amounts)
            yield record_of(
                Difference,
                each,
                stage=Stage.STATEMENTS,
                detail=(
                    f"rentals of replicas, which have no cost, come to {recorded}"
                    f" {each.currency_code}, and statements of end users have {stated}"
                ),
                remedy=(
                    "a closed month never changes: find out who changed the rentals, and tell the"
                    " customer"
                ),
                amount_picos=rented,
            )
        if each.unequal_count:
            yield record_of(
                Difference,
                each,
                stage=Stage.STATEMENTS,
                detail=f"{each.unequal_count} statements of end users differ from their lines",
                remedy="a statement never changes after the close: restore it from a backup",
                amount_picos=each.unequal_picos,
            )


def batching(ours: OurMonth) -> Iterator[Difference]:
    """Yield a difference for tokens used in completed hours but missing in batches."""
    for each in ours.sums:
        if each.due != each.batched:
            detail = (
                "of completed hours is in no batch"
                if each.due > each.batched
                else "is exported and was not used"
            )
            remedy = (
                "the worker forms batches every 15 s once usage is rated: check that one runs; then"
                " weir fsck"
            )
            yield difference_of(each, Stage.BATCHING, each.due - each.batched, detail, remedy)


def counting(ours: OurMonth, counted: Sequence[int], biller: str) -> Iterator[Difference]:
    for each, count in zip(ours.sums, counted, strict=True):
        if count != each.delivered:
            detail = f"{each.delivered:,} were delivered, and the biller counts {count:,}"
            yield difference_of(
                each, Stage.COUNTING, each.delivered - count, detail, COUNT_REMEDIES[biller]
            )


async def stuck(
    session: AsyncSession, ours: OurMonth, organization_id: uuid.UUID, organization: str
) -> list[Difference]:
    """Find the batches that the biller does not count, or may not, and return differences."""
    parameters = {"organization_id": organization_id, "begins": ours.begins, "until": ours.until}
    sums: Mapping[tuple[int, str], StageSum] = {
        (each.price_version, each.token_kind): each
        for each in ours.sums
        if each.organization_id == organization_id
    }
    found = []
    for row in await session.execute(STUCK, parameters):
        named = ", ".join(map(str, row.ids[:NAMED_MAX])) + (
            f" and {len(row.ids) - NAMED_MAX} more" if len(row.ids) > NAMED_MAX else ""
        )
        detail = f"is {row.state} in {len(row.ids)} batches: {named}" + (
            f"; {row.error}" if row.error else ""
        )
        each = sums[row.price_version_id, row.token_kind]
        found.append(
            difference_of(
                each, Stage.DELIVERY, row.token_count, detail, REMEDIES[row.state], row.since
            )
        )
    return found


def difference_of(
    each: StageSum,
    stage: Stage,
    token_count: int,
    detail: str,
    remedy: str,
    since: datetime | None = None,
) -> Difference:
    return record_of(
        Difference,
        each,
        stage=stage,
        detail=detail,
        remedy=remedy,
        token_count=token_count,
        since=since,
    )
