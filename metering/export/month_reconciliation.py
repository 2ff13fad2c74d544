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

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.export.differences import Difference, Stage
from metering.export.invoice_reconciliation import invoice_differences
from metering.export.reconciliation import OurMonth, StageSum, our_month

NAMED_MAX = 5  # batches named in a difference; `weir stripe status` lists them all

STUCK = text("""
SELECT b.price_version_id, b.token_kind, b.state, sum(b.token_count)::bigint AS token_count, min(b.created_at) AS since,
       array_agg(b.id ORDER BY b.hour, b.part) AS ids, max(b.last_error) AS error
FROM meter_batches b
WHERE b.organization_id = :organization_id AND b.hour >= :begins AND b.hour < :until AND b.state NOT IN ('delivered', 'cancelled')
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
""")
EXPORTED = text("SELECT EXISTS (SELECT FROM export_progress)")  # from the first batch of any customer on
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
    return found + await invoice_differences(session, ours, organization_id)


async def reconciled_here(session: AsyncSession, month: str, organization_id: uuid.UUID) -> tuple[MonthReconciliation, bool]:
    """One customer's month as far as we know ourselves, and whether usage is exported at all. The biller is not asked.

    Raises: InvalidValue for a month that is none.
    """
    ours = await our_month(session, month, (organization_id,))
    is_exported = bool(await session.scalar(EXPORTED))
    here = await differences_here(session, ours, organization_id) if is_exported else ()
    return conclude(month, ours, here), is_exported


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
