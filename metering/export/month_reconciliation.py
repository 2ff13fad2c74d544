"""A month from its usage to the biller: where two stages differ, since when, and what to do about it.

Used = posted to the ledger = on the invoices of closed months, and = in batches = delivered = counted by the biller, per customer,
price version and kind of token; and what Stripe invoiced. Whatever is on its way is a difference too, with its age: nothing is left
out because it will probably pass.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.pricing import COUNTS_OF_EVENT
from metering.export.reconciliation import OurMonth, StageSum
from metering.export.stripe_prices import minor_unit_picos
from metering.money import exact_text

NAMED_MAX = 5  # batches named in a difference; `weir stripe status` lists them all

PRICE = " ".join(f"WHEN '{kind}' THEN p.{price}" for kind, (_, price) in COUNTS_OF_EVENT.items())
STUCK = text("""
SELECT b.price_version_id, b.token_kind, b.state, sum(b.token_count)::bigint AS token_count, min(b.created_at) AS since,
       array_agg(b.id ORDER BY b.hour, b.part) AS ids, max(b.last_error) AS error
FROM meter_batches b
WHERE b.organization_id = :organization_id AND b.hour >= :begins AND b.hour < :until AND b.state NOT IN ('delivered', 'cancelled')
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
""")
# Invoices of one period are compared together: a customer with many prices has several subscriptions, and an invoice of each. What
# Stripe had counted when it finalised them is on them, what came later is on none.
INVOICED = text(f"""
SELECT o.id AS organization_id, o.name AS organization, i.currency_code, i.period_start, i.period_end, i.finalized_at, i.ids,
       i.amount_due_minor, coalesce(c.in_time_picos, 0) AS in_time_picos, coalesce(c.late_picos, 0) AS late_picos,
       coalesce(c.late_tokens, 0)::bigint AS late_tokens, c.late_since, coalesce(c.line_count, 0) AS line_count, items.item_minor
FROM (
    SELECT organization_id, currency_code, period_start, period_end, min(finalized_at) AS finalized_at,
           array_agg(id ORDER BY id) AS ids, sum(amount_due_minor)::bigint AS amount_due_minor
    FROM stripe_invoices
    WHERE finalized_at IS NOT NULL AND period_start >= :begins AND period_start < :ends AND period_end > period_start
    GROUP BY 1, 2, 3, 4
) i JOIN organizations o ON o.id = i.organization_id,
LATERAL (
    SELECT sum(picos) FILTER (WHERE delivered_at <= i.finalized_at) AS in_time_picos,
           sum(picos) FILTER (WHERE delivered_at > i.finalized_at AND NOT invoiced) AS late_picos,
           sum(token_count) FILTER (WHERE delivered_at > i.finalized_at AND NOT invoiced) AS late_tokens,
           min(delivered_at) FILTER (WHERE delivered_at > i.finalized_at AND NOT invoiced) AS late_since,
           count(DISTINCT (price_version_id, token_kind)) FILTER (WHERE delivered_at <= i.finalized_at) AS line_count
    FROM (SELECT b.*, b.token_count::numeric * CASE b.token_kind {PRICE} END AS picos,
                 coalesce(t.stripe_id IS NOT NULL OR t.amount_minor = 0, false) AS invoiced
          FROM meter_batches b JOIN price_versions p ON p.id = b.price_version_id AND p.currency_code = i.currency_code
          LEFT JOIN stripe_late_items t ON t.id = b.late_item_id
          WHERE b.organization_id = i.organization_id AND b.state = 'delivered'
            AND b.hour >= i.period_start AND b.hour < i.period_end
    ) priced
) c,
-- Items for late usage of earlier periods are on the first invoice that was finalised after they were created.
LATERAL (
    SELECT coalesce(sum(t.amount_minor), 0)::bigint AS item_minor FROM stripe_late_items t
    WHERE t.organization_id = i.organization_id AND t.currency_code = i.currency_code AND t.stripe_id IS NOT NULL
      AND t.created_at <= i.finalized_at AND NOT EXISTS (
          SELECT FROM stripe_invoices s WHERE s.organization_id = i.organization_id AND s.currency_code = i.currency_code
              AND s.period_end > s.period_start AND s.finalized_at >= t.created_at AND s.finalized_at < i.finalized_at)
) items
WHERE CAST(:organization_id AS uuid) IS NULL OR o.id = :organization_id ORDER BY o.name, i.period_start
""")
REMEDIES = {
    "pending": "the worker hands it over by itself: see that one runs with WEIR_EXPORT set",
    "sent": "the worker asks again by itself: see that one runs with WEIR_EXPORT set",
    "parked": "compare with the biller, then say what is so: weir stripe settle BATCH --counted or --not-counted",
    "rejected": "remove the cause, then: weir stripe resend BATCH",
    "cancelling": "it is being taken back: weir stripe resend BATCH ends it",
}
COUNT_REMEDIES = {
    "stripe": "it counts some seconds late: ask again; then look for what it rejected with weir stripe status",
    "file": "a part of the file may have been moved away: count it too; else a line is missing or doubled",
}


class Stage(StrEnum):
    """Between which stages a difference lies."""

    RATING = "usage to ledger"
    INVOICING = "ledger to invoice"
    BATCHING = "ledger to batches"
    DELIVERY = "batches to biller"
    COUNTING = "biller's own count"
    INVOICE = "biller's invoice"
    LATE = "after the biller's invoice"


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


@dataclass(frozen=True, slots=True)
class MonthReconciliation:
    """A month at every stage. counted: the biller's own counts in the order of `ours.sums`; None where it was not asked."""

    month: str
    ours: OurMonth
    counted: tuple[int, ...] | None
    differences: tuple[Difference, ...]
    biller: str

    @property
    def balanced(self) -> bool:
        """Whether every stage says the same."""
        return not self.differences


async def differences_here(session: AsyncSession, ours: OurMonth, organization_id: uuid.UUID | None = None) -> list[Difference]:
    """What differs between the stages after the ledger, as far as we know ourselves."""
    found = list(batching(ours))
    for each in sorted({(each.organization_id, each.organization) for each in ours.sums}):
        found += await stuck(session, ours, *each)
    parameters = {"begins": ours.begins, "ends": ours.ends, "organization_id": organization_id}
    for row in await session.execute(INVOICED, parameters):
        found += invoiced(row)
    return found


def conclude(
    month: str, ours: OurMonth, here: Sequence[Difference] = (), counted: Sequence[int] | None = None, biller: str = ""
) -> MonthReconciliation:
    """Every difference of the month, by stage.

    here: those between the stages after the ledger. counted: what the biller counts of each sum; None where it was not asked.
    biller: what is exported to, or empty where nothing is.
    """
    found = [*rating(ours), *invoicing(ours), *here, *(counting(ours, counted, biller) if counted is not None else ())]
    order = list(Stage)
    found.sort(key=lambda each: (order.index(each.stage), each.organization, each.model, each.price_version or 0, each.token_kind))
    return MonthReconciliation(month, ours, None if counted is None else tuple(counted), tuple(found), biller)


def rating(ours: OurMonth) -> Iterator[Difference]:
    """Used, and not posted."""
    for each in ours.sums:
        if each.used == each.posted:
            continue
        if each.unrated_since is not None and each.used > each.posted:
            detail = "is not rated"
            remedy = "the worker rates each second: see that one runs; its log names events that it cannot rate"
        else:
            detail, remedy = "ledger and usage events say different things", "find out where with: weir fsck"
        yield place(each, Stage.RATING, each.used - each.posted, detail, remedy, each.unrated_since)


def invoicing(ours: OurMonth) -> Iterator[Difference]:
    """Posted to months that are closed, and on no invoice of theirs."""
    for each in ours.sums:
        if each.billed != each.invoiced:
            detail = f"{each.billed:,} are posted to closed months, and their invoices have {each.invoiced:,}"
            remedy = "a closed month never changes: find out what did with weir fsck, and correct it by an adjustment"
            yield place(each, Stage.INVOICING, each.billed - each.invoiced, detail, remedy)


def batching(ours: OurMonth) -> Iterator[Difference]:
    """Used in hours that are over, and in no batch."""
    for each in ours.sums:
        if each.due != each.batched:
            detail = "of hours that are over stands in no batch" if each.due > each.batched else "is exported and was not used"
            remedy = "the worker makes batches each quarter of a minute once usage is rated: see that one runs; then weir fsck"
            yield place(each, Stage.BATCHING, each.due - each.batched, detail, remedy)


def counting(ours: OurMonth, counted: Sequence[int], biller: str) -> Iterator[Difference]:
    """Delivered, and not counted by the biller."""
    for each, count in zip(ours.sums, counted, strict=True):
        if count != each.delivered:
            detail = f"{each.delivered:,} were delivered, and the biller counts {count:,}"
            yield place(each, Stage.COUNTING, each.delivered - count, detail, COUNT_REMEDIES[biller])


async def stuck(session: AsyncSession, ours: OurMonth, organization_id: uuid.UUID, organization: str) -> list[Difference]:
    """Batches that the biller does not count, or not surely."""
    parameters = {"organization_id": organization_id, "begins": ours.begins, "until": ours.until}
    sums: Mapping[tuple[int, str], StageSum] = {
        (each.price_version, each.token_kind): each for each in ours.sums if each.organization_id == organization_id
    }
    found = []
    for row in await session.execute(STUCK, parameters):
        named = ", ".join(map(str, row.ids[:NAMED_MAX])) + (
            f" and {len(row.ids) - NAMED_MAX} more" if len(row.ids) > NAMED_MAX else ""
        )
        detail = f"is {row.state} in {len(row.ids)} batches: {named}" + (f"; {row.error}" if row.error else "")
        each = sums[row.price_version_id, row.token_kind]
        found.append(place(each, Stage.DELIVERY, row.token_count, detail, REMEDIES[row.state], row.since))
    return found


def place(each: StageSum, stage: Stage, token_count: int, detail: str, remedy: str, since: datetime | None = None) -> Difference:
    """A difference of a sum."""
    return Difference(
        stage=stage,
        organization_id=each.organization_id,
        organization=each.organization,
        detail=detail,
        remedy=remedy,
        model=each.model,
        price_version=each.price_version,
        token_kind=each.token_kind,
        token_count=token_count,
        since=since,
    )


def invoiced(row: Row[Any]) -> Iterator[Difference]:
    """What the biller invoiced against what it had been told by then, and what it was told too late to invoice.

    Stripe rounds each line, so it may be half a minor unit off per line without anything being wrong.
    """
    facts: dict[str, Any] = {
        "organization_id": row.organization_id,
        "organization": row.organization,
        "currency_code": row.currency_code,
    }
    minor_picos = minor_unit_picos(row.currency_code)
    due_picos, late = row.amount_due_minor * minor_picos, int(row.late_picos)
    in_time = int(row.in_time_picos) + row.item_minor * minor_picos
    invoices = f"{', '.join(row.ids)}, finalised {row.finalized_at:%Y-%m-%d %H:%M} UTC"
    if 2 * abs(in_time - due_picos) > row.line_count * minor_picos:
        yield Difference(
            stage=Stage.INVOICE,
            **facts,
            detail=f"{exact_text(in_time, row.currency_code)} {row.currency_code} of usage were counted in time, and "
            f"{exact_text(due_picos, row.currency_code)} were invoiced ({invoices})",
            remedy="look for coupons, taxes and hand-made items on the invoice; correct what is left by an item on the next one, "
            "or by a credit note",
            amount_picos=in_time - due_picos,
            since=row.finalized_at,
        )
    if late:
        yield Difference(
            stage=Stage.LATE,
            **facts,
            detail=f"reached the biller after it had finalised ({invoices}): counted in the old period, and on no invoice",
            remedy="the worker invoices by an item of its own what came more than five minutes late; invoice the rest by hand: "
            f"{exact_text(late, row.currency_code)} {row.currency_code} in all",
            token_count=row.late_tokens,
            amount_picos=late,
            since=row.late_since,
        )
