"""Usage that Stripe was told of after it had finalised the invoice of its period: invoiced by an item of its own, once.

Stripe counts such usage in the old period and puts it on no invoice. Here it becomes an invoice item, which Stripe adds to the
customer's next invoice. What is late is worked out from the rows; which batches an item is for is written down with the item, in
the transaction that makes it; and it is created at Stripe only if none there carries its id, whatever became of earlier answers.

An item is in whole minor units of Stripe's. What rounding leaves is carried to the customer's next item.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.core.errors import StoreAway, StripeFailed
from metering.core.money import round_to_minor_unit
from metering.export.exporting import derived_id
from metering.export.stripe_gateway import StripeGateway
from metering.export.stripe_objects import PICOS_PER_TOKEN, create_item, finalized_at, known_items, minor_unit_picos, usage_invoices
from metering.store.db import Sessions, lock_holder, try_lock

# A batch that was first handed over so long after the invoice was finalised cannot be on it, whatever the two clocks say. One in
# between may be, so a person decides: `weir reconcile` names it.
SURELY_LATE = timedelta(minutes=5)
METADATA = "weir_late_item"
LOCK_NAME = "late invoice items"

log = logging.getLogger(__name__)
retries = Retries("late_items", passing=(StoreAway,))  # by organization, and by item

# Invoices from before there were such items may have been corrected by hand: they are left alone. Subscriptions to metered prices
# end with the calendar month: an invoice that ends otherwise is of something else. A customer may have several of one month, of
# several subscriptions; usage is late if it came after the last of them. Which is the last, Stripe is asked (`last`): a webhook may
# not have told of it yet, and what it still counted is on it.
LATE = text(f"""
SELECT i.organization_id, i.currency_code, i.period_start, i.period_end, array_agg(b.id) AS batch_ids,
       sum(b.token_count)::bigint AS token_count, sum(b.token_count::numeric * {PICOS_PER_TOKEN}) AS picos
FROM (
    SELECT organization_id, currency_code, period_end, max(finalized_at) AS finalized_at,
           greatest(min(period_start), date_trunc('month', period_end - interval '1 microsecond', 'UTC')) AS period_start
    FROM stripe_invoices
    WHERE period_end > period_start AND period_end = date_trunc('month', period_end, 'UTC')
      AND finalized_at >= (SELECT late_items_since FROM export_progress)
      AND organization_id IN (SELECT ref::uuid FROM stripe_objects WHERE account = :account AND kind = 'customer')
      AND (CAST(:organization_id AS uuid) IS NULL OR (organization_id, period_end) = (:organization_id, :ends))
    GROUP BY organization_id, currency_code, period_end
) i
JOIN meter_batches b ON b.organization_id = i.organization_id AND b.hour >= i.period_start AND b.hour < i.period_end
JOIN price_versions p ON p.id = b.price_version_id AND p.currency_code = i.currency_code
WHERE b.state = 'delivered' AND b.late_item_id IS NULL
  AND b.sent_at > greatest(i.finalized_at, CAST(:last AS timestamptz)) + :margin
GROUP BY 1, 2, 3, 4 ORDER BY 1, 3
""")
CUSTOMER = text("SELECT stripe_id FROM stripe_objects WHERE (account, kind, ref) = (:account, 'customer', :ref)")
CARRIED = text("""
SELECT coalesce((SELECT exact_picos + carried_in_picos - amount_minor * :minor_picos FROM stripe_late_items
                 WHERE organization_id = :organization_id AND currency_code = :currency_code ORDER BY number DESC LIMIT 1), 0)
""")
# The place among the items of its period tells an item, so that one that a failover has lost is made again under the same id.
PLACE = """(SELECT count(*) FROM stripe_late_items
    WHERE (organization_id, currency_code, period_end) = (:organization_id, :currency_code, :period_end))"""
ITEM_ID = derived_id(
    "'late item'",
    "CAST(:organization_id AS uuid)",
    "CAST(:currency_code AS text)",
    "extract(epoch FROM CAST(:period_end AS timestamptz))::bigint",
    PLACE,
)
MAKE = text(f"""
INSERT INTO stripe_late_items (id, organization_id, currency_code, period_start, period_end, token_count, exact_picos,
                               carried_in_picos, amount_minor)
SELECT {ITEM_ID}, :organization_id, :currency_code, :period_start, :period_end, :token_count, :picos, :carried, :amount_minor
RETURNING id
""")
BELONG = text("UPDATE meter_batches SET late_item_id = :item_id WHERE id = ANY(:batch_ids)")
UNINVOICED = text("""
SELECT t.id, t.currency_code, t.period_start, t.period_end, t.token_count, t.amount_minor, c.stripe_id AS customer
FROM stripe_late_items t
JOIN stripe_objects c ON (c.account, c.kind, c.ref) = (:account, 'customer', t.organization_id::text)
WHERE t.stripe_id IS NULL AND t.amount_minor > 0 ORDER BY t.created_at, t.id
""")
RECORD = text("UPDATE stripe_late_items SET stripe_id = :stripe_id WHERE id = :id")


async def invoice_late_usage(sessions: Sessions, gateway: StripeGateway) -> int:
    """Make the items that are missing, here and at Stripe; tells how many were created there. One worker at a time does it."""
    async with lock_holder(sessions) as locks:
        if not await try_lock(locks, LOCK_NAME):
            return 0
        nobody = {"account": gateway.account, "margin": SURELY_LATE, "organization_id": None, "ends": None, "last": None}
        async with sessions() as session:
            found = (await session.execute(LATE, nobody)).all()
        for row in found:
            if not retries.is_due(row.organization_id):
                continue
            with retries.survive(row.organization_id):
                try:
                    whole, last = await last_finalized(sessions, gateway, row)
                except StripeFailed as failed:
                    log.warning("late usage is not invoiced yet: %s", failed)
                    continue
                if not whole:
                    continue  # it is on the invoice that is not final yet
                asked = nobody | {"organization_id": row.organization_id, "ends": row.period_end, "last": last}
                async with sessions.begin() as session:
                    for late in (await session.execute(LATE, asked)).all():
                        await make_item(session, late)
        return await create_items(sessions, gateway)


async def last_finalized(sessions: Sessions, gateway: StripeGateway, row: Row[Any]) -> tuple[bool, datetime | None]:
    """Whether all invoices of the period are final at Stripe, and when the last became so if it has any. Raises: StripeFailed."""
    async with sessions() as session:
        customer = str(await session.scalar(CUSTOMER, {"account": gateway.account, "ref": str(row.organization_id)}))
    invoices = await usage_invoices(gateway, customer, row.period_end)
    last = finalized_at(invoices)
    return last is not None or not invoices, last


async def make_item(session: AsyncSession, row: Row[Any]) -> None:
    """Write down what one period still owes, with the batches that it is for."""
    minor_picos = minor_unit_picos(row.currency_code)
    owner = {"organization_id": row.organization_id, "currency_code": row.currency_code}
    carried = int(await session.scalar(CARRIED, owner | {"minor_picos": minor_picos}) or 0)
    rounded = max(round_to_minor_unit(int(row.picos) + carried, row.currency_code), 0)
    facts = owner | {"period_start": row.period_start, "period_end": row.period_end, "token_count": row.token_count}
    values = facts | {"picos": int(row.picos), "carried": carried, "amount_minor": rounded // minor_picos}
    item_id = await session.scalar(MAKE, values)
    await session.execute(BELONG, {"item_id": item_id, "batch_ids": row.batch_ids})


async def create_items(sessions: Sessions, gateway: StripeGateway) -> int:
    """Create at Stripe what is not there. What fails is told in the log, and tried again at the next run."""
    async with sessions() as session:
        waiting = (await session.execute(UNINVOICED, {"account": gateway.account})).all()
    created = 0
    for row in waiting:
        if not retries.is_due(row.id):
            continue
        with retries.survive(row.id):
            try:
                known = await known_items(gateway, METADATA, row.customer)
                description = f"Late usage of {span(row.period_start, row.period_end)}: {row.token_count:,} tokens"
                terms = {"customer": row.customer, "amount": row.amount_minor, "description": description}
                stripe_id = known.get(str(row.id)) or await create_item(
                    gateway, METADATA, row.id, f"late-item-{row.id}", row.currency_code, **terms
                )
            except StripeFailed as failed:
                log.warning("late usage is not invoiced yet: %s", failed)
                continue
            async with sessions.begin() as session:
                await session.execute(RECORD, {"id": row.id, "stripe_id": stripe_id})
            created += 1
    return created


def span(begins: datetime, ends: datetime) -> str:
    return f"{begins:%Y-%m-%d} to {ends - timedelta(seconds=1):%Y-%m-%d}"
