"""Invoice items at Stripe: for late usage, and for charges on our invoices that Stripe does not
know.

Late usage is usage delivered to Stripe after the invoice of its period was finalized. Stripe counts
it in the old period and puts it on no invoice. It becomes an invoice item here, which Stripe adds
to the customer's next invoice. Late usage is computed from the rows; the batches of an item are
recorded with it, in the transaction that makes it; and an item is created at Stripe only if none
there carries its id, whatever happened to earlier answers. An item is in whole minor units of
Stripe's; the rounding remainder is carried to the customer's next item.

Closed months: invoice items bring Stripe's invoices of a closed month to the total of our invoice.
Stripe knows tokens and list prices. Each other charge on our invoice (plan, commitment,
adjustments, credit) becomes an item with its label, and the remaining difference, such as the
rounding of lines, becomes one more. Items are put on the draft of the month if there is one, which
is then finalized; otherwise on the customer's next invoice. A month is settled once Stripe's final
invoices, the items made for it and the late usage invoiced meanwhile equal our invoice to the minor
unit. Usage that Stripe refused for good, and months for which it never makes an invoice, are part
of that difference, so no refusal keeps a month open.

The amount due is recorded once per month, an item before it is created, and an item is created only
if none at Stripe carries its id. Amounts below Stripe's minor unit are carried to the customer's
next month.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.core.errors import DatabaseUnavailable, StripeFailed
from metering.core.money import round_to_minor_unit
from metering.export.exporting import derived_id
from metering.export.stripe_gateway import (
    PICOS_PER_TOKEN,
    StripeGateway,
    begins_within,
    create_item,
    finalized_at,
    in_steps,
    known_items,
    minor_unit_picos,
    subscription_of,
    usage_invoices,
)
from metering.invoicing.invoices import invoice_of_month, read_lines
from metering.ledger.ledger import month_text
from metering.store.db import Sessions, lock_holder, try_lock

# A batch first delivered this long after the invoice was finalized cannot be on it, despite clock
# skew. A batch in between may be, so an operator decides: `weir reconcile` names it.
SURELY_LATE = timedelta(minutes=5)
METADATA = "weir_late_item"
LOCK_NAME = "late invoice items"

log = logging.getLogger(__name__)
retries = Retries("late_items", passing=(DatabaseUnavailable,))  # per organization and item

# Invoices older than these items may have been corrected by hand and are left alone. Subscriptions
# to metered prices end with the calendar month: an invoice that ends otherwise is for something
# else. A customer may have several invoices of one month, from several subscriptions; usage is late
# if it came after the last of them. Stripe is asked for the last one (`last`): a webhook may not
# have reported it yet, and usage that Stripe still counted is on it.
LATE = text(f"""
SELECT i.organization_id, i.currency_code, i.period_start, i.period_end,
       array_agg(b.id) AS batch_ids,
       sum(b.token_count)::bigint AS token_count,
       sum(b.token_count::numeric * {PICOS_PER_TOKEN}) AS picos
FROM (
    SELECT organization_id, currency_code, period_end,
           max(finalized_at) AS finalized_at,
           greatest(
               min(period_start),
               date_trunc('month', period_end - interval '1 microsecond', 'UTC')
           ) AS period_start
    FROM stripe_invoices
    WHERE period_end > period_start
      AND period_end = date_trunc('month', period_end, 'UTC')
      AND finalized_at >= (SELECT late_items_since FROM export_progress)
      AND organization_id IN (
          SELECT ref::uuid FROM stripe_objects WHERE account = :account AND kind = 'customer'
      )
      AND (
          CAST(:organization_id AS uuid) IS NULL
          OR (organization_id, period_end) = (:organization_id, :ends)
      )
    GROUP BY organization_id, currency_code, period_end
) AS i
JOIN meter_batches b
    ON b.organization_id = i.organization_id
   AND b.hour >= i.period_start
   AND b.hour < i.period_end
JOIN price_versions p
    ON p.id = b.price_version_id
   AND p.currency_code = i.currency_code
WHERE b.state = 'delivered'
  AND b.late_item_id IS NULL
  AND b.sent_at > greatest(i.finalized_at, CAST(:last AS timestamptz)) + :margin
GROUP BY 1, 2, 3, 4
ORDER BY 1, 3
""")
CUSTOMER = text("""
SELECT stripe_id
FROM stripe_objects
WHERE (account, kind, ref) = (:account, 'customer', :ref)
""")
CARRIED = text("""
SELECT coalesce(
    (
        SELECT exact_picos + carried_in_picos - amount_minor * :minor_picos
        FROM stripe_late_items
        WHERE organization_id = :organization_id AND currency_code = :currency_code
        ORDER BY number DESC
        LIMIT 1
    ),
    0
)
""")
# An item's id comes from its position within its period, so that an item lost in a failover gets
# the same id.
POSITION = """(
    SELECT count(*)
    FROM stripe_late_items
    WHERE (organization_id, currency_code, period_end)
        = (:organization_id, :currency_code, :period_end)
)"""
ITEM_ID = derived_id(
    "'late item'",
    "CAST(:organization_id AS uuid)",
    "CAST(:currency_code AS text)",
    "extract(epoch FROM CAST(:period_end AS timestamptz))::bigint",
    POSITION,
)
MAKE = text(f"""
INSERT INTO stripe_late_items
    (id, organization_id, currency_code, period_start, period_end, token_count, exact_picos,
     carried_in_picos, amount_minor)
SELECT {ITEM_ID}, :organization_id, :currency_code, :period_start, :period_end, :token_count,
       :picos, :carried, :amount_minor
RETURNING id
""")
BELONG = text("UPDATE meter_batches SET late_item_id = :item_id WHERE id = ANY(:batch_ids)")
UNINVOICED = text("""
SELECT t.id, t.currency_code, t.period_start, t.period_end, t.token_count, t.amount_minor,
       c.stripe_id AS customer
FROM stripe_late_items t
JOIN stripe_objects c
    ON (c.account, c.kind, c.ref) = (:account, 'customer', t.organization_id::text)
WHERE t.stripe_id IS NULL AND t.amount_minor > 0
ORDER BY t.created_at, t.id
""")
RECORD = text("UPDATE stripe_late_items SET stripe_id = :stripe_id WHERE id = :id")

MONTH_METADATA = "weir_month_item"
MONTHS_LOCK_NAME = "month items"
LABELLED_MAX = 200  # charges with an item of their own: Stripe takes 250 items on an invoice
DESCRIPTION_LENGTH_MAX = 500
# Stripe makes the drafts of a month soon after its end; earlier, a draft may not exist yet.
DRAFTS_EXIST_AFTER = timedelta(hours=6)
# After the end of a month: Stripe makes an invoice within hours, so there was no subscription, or
# the draft was deleted.
NO_INVOICE_AFTER = timedelta(days=7)
# Per run, drawn at random: a month that cannot be settled must not block the others.
MONTHS_MAX = 20
MONTH_ITEM_ID = derived_id(
    "'month item'",
    "CAST(:organization_id AS uuid)",
    "to_char(CAST(:month AS date), 'YYYY-MM')",
    "CAST(:position AS integer)",
)


async def invoice_late_usage(sessions: Sessions, gateway: StripeGateway) -> int:
    """Create Stripe items for usage that came after its invoice; return how many were created.

    Only one worker does this at a time; the others return 0.
    """
    async with lock_holder(sessions) as locks:
        if not await try_lock(locks, LOCK_NAME):
            return 0
        all_customers = {
            "account": gateway.account,
            "margin": SURELY_LATE,
            "organization_id": None,
            "ends": None,
            "last": None,
        }
        async with sessions() as session:
            rows = (await session.execute(LATE, all_customers)).all()
        for row in rows:
            if not retries.is_due(row.organization_id):
                continue
            with retries.survive(row.organization_id):
                try:
                    is_final, last = await last_finalized(sessions, gateway, row)
                except StripeFailed as failed:
                    log.warning("late usage is not invoiced yet: %s", failed)
                    continue
                if not is_final:
                    continue  # the usage is on the invoice that is not final yet
                one_period = all_customers | {
                    "organization_id": row.organization_id,
                    "ends": row.period_end,
                    "last": last,
                }
                async with sessions.begin() as session:
                    for late in (await session.execute(LATE, one_period)).all():
                        await make_item(session, late)
        return await create_items(sessions, gateway)


async def last_finalized(
    sessions: Sessions, gateway: StripeGateway, row: Row[Any]
) -> tuple[bool, datetime | None]:
    """Check whether all Stripe invoices of a period are final, and since when.

    The time is None if there are no invoices. Raises: StripeFailed.
    """
    async with sessions() as session:
        known = {"account": gateway.account, "ref": str(row.organization_id)}
        customer = str(await session.scalar(CUSTOMER, known))
    invoices = await usage_invoices(gateway, customer, row.period_end)
    last = finalized_at(invoices)
    return last is not None or not invoices, last


async def make_item(session: AsyncSession, row: Row[Any]) -> None:
    """Record an invoice item and its batches for a period's late usage that is not invoiced yet."""
    minor_picos = minor_unit_picos(row.currency_code)
    owner = {"organization_id": row.organization_id, "currency_code": row.currency_code}
    carried = int(await session.scalar(CARRIED, owner | {"minor_picos": minor_picos}) or 0)
    rounded = max(round_to_minor_unit(int(row.picos) + carried, row.currency_code), 0)
    values = owner | {
        "period_start": row.period_start,
        "period_end": row.period_end,
        "token_count": row.token_count,
        "picos": int(row.picos),
        "carried": carried,
        "amount_minor": in_steps(rounded // minor_picos, row.currency_code),
    }
    item_id = await session.scalar(MAKE, values)
    await session.execute(BELONG, {"item_id": item_id, "batch_ids": row.batch_ids})


async def create_items(sessions: Sessions, gateway: StripeGateway) -> int:
    """Create the recorded items that Stripe does not have. Later runs retry failed ones."""
    async with sessions() as session:
        waiting = (await session.execute(UNINVOICED, {"account": gateway.account})).all()
    created = 0
    for row in waiting:
        if not retries.is_due(row.id):
            continue
        with retries.survive(row.id):
            try:
                known = await known_items(gateway, METADATA, row.customer)
                last_day = row.period_end - timedelta(seconds=1)
                period = f"{row.period_start:%Y-%m-%d} to {last_day:%Y-%m-%d}"
                description = f"Late usage of {period}: {row.token_count:,} tokens"
                terms = {
                    "customer": row.customer,
                    "amount": row.amount_minor,
                    "description": description,
                }
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


month_retries = Retries("month_items", passing=(DatabaseUnavailable,))  # per organization, month

# Closed months that are not settled, the oldest of each customer. Months closed before such items
# existed are left alone.
OLDEST_UNSETTLED_MONTHS = text("""
SELECT *
FROM (
    SELECT DISTINCT ON (m.organization_id)
           m.organization_id, o.name AS organization, m.month, c.currency_code,
           m.month AT TIME ZONE 'UTC' AS begins,
           (m.month + interval '1 month') AT TIME ZONE 'UTC' AS ends,
           k.stripe_id AS customer, s.due_minor
    FROM billing_months m
    JOIN month_closings c USING (organization_id, month)
    JOIN organizations o ON o.id = m.organization_id
    JOIN stripe_objects k
        ON (k.account, k.kind, k.ref) = (:account, 'customer', m.organization_id::text)
    LEFT JOIN stripe_month_settlements s USING (organization_id, month)
    WHERE m.state = 'closed'
      AND m.closed_at >= (SELECT month_items_since FROM export_progress)
      AND s.settled_at IS NULL
      AND (m.month + interval '1 month') AT TIME ZONE 'UTC' + :grace <= now()
    ORDER BY m.organization_id, m.month
) AS oldest
ORDER BY random()
LIMIT :limit
""")
# True if some usage is not delivered yet or in doubt. Usage that the biller refused, because it is
# too old or the meter is archived, is not waited for: an item of the invoice takes its place.
UNDELIVERED = text("""
SELECT (SELECT closed_until FROM export_progress) < :ends
    OR EXISTS (
        SELECT
        FROM meter_batches
        WHERE organization_id = :organization_id
          AND hour >= :begins
          AND hour < :ends
          AND state NOT IN ('delivered', 'cancelled', 'rejected')
    )
""")
# SQL condition: a batch `b` of a month whose amount due is recorded, so items cover its refusal.
OF_OWED_MONTH = """EXISTS (
    SELECT
    FROM stripe_month_settlements s
    WHERE s.organization_id = b.organization_id
      AND s.month = CAST(date_trunc('month', b.hour, 'UTC') AT TIME ZONE 'UTC' AS date)
)"""
# Whether Stripe may still make the month's invoice, and whether it issued one that is not among the
# customer's invoices now.
INVOICE_KNOWN = text("""
SELECT CAST(:ends AS timestamptz) + :grace > now() AS may_come,
       EXISTS (
           SELECT
           FROM stripe_invoices
           WHERE (organization_id, period_end) = (:organization_id, :ends)
             AND period_end > period_start
             AND finalized_at IS NOT NULL
       ) AS is_final_elsewhere
""")
# One line per price version and kind, rounded as Stripe does on finalization: half a minor unit
# upwards.
METERED = text(f"""
SELECT coalesce(sum(floor(picos / :minor_picos + 0.5)), 0)::bigint
FROM (
    SELECT sum(b.token_count::numeric * {PICOS_PER_TOKEN}) AS picos
    FROM meter_batches b
    JOIN price_versions p ON p.id = b.price_version_id AND p.currency_code = :currency_code
    WHERE b.organization_id = :organization_id
      AND b.hour >= :begins
      AND b.hour < :ends
      AND b.state = 'delivered'
    GROUP BY b.price_version_id, b.token_kind
) AS lines
""")
# Late items cover part of a month as well: they count in the first month settled after they were
# made.
LATE_MINOR = text("""
SELECT (
    SELECT coalesce(sum(amount_minor), 0)
    FROM stripe_late_items
    WHERE organization_id = :organization_id
      AND currency_code = :currency_code
      AND period_start < :ends
      AND created_at >= (SELECT month_items_since FROM export_progress)
)::bigint - (
    SELECT coalesce(sum(late_minor), 0)
    FROM stripe_month_settlements
    WHERE organization_id = :organization_id
)::bigint
""")
MONTH_CARRIED = text("""
SELECT coalesce(
    (
        SELECT due_picos + carried_in_picos
               - (coalesce(invoiced_minor + late_minor + items.minor, due_minor)) * :minor_picos
        FROM stripe_month_settlements s,
        LATERAL (
            SELECT coalesce(sum(amount_minor), 0)::bigint AS minor
            FROM stripe_month_items i
            WHERE (i.organization_id, i.month) = (s.organization_id, s.month)
        ) AS items
        WHERE s.organization_id = :organization_id
        ORDER BY s.month DESC
        LIMIT 1
    ),
    0
)
""")
OWE = text("""
INSERT INTO stripe_month_settlements
    (organization_id, month, currency_code, due_picos, carried_in_picos, due_minor)
VALUES (:organization_id, :month, :currency_code, :due_picos, :carried, :due_minor)
""")
MADE = text("""
SELECT count(*) AS item_count, coalesce(sum(amount_minor), 0)::bigint AS minor
FROM stripe_month_items
WHERE organization_id = :organization_id AND month = :month
""")
MAKE_MONTH_ITEM = text(f"""
INSERT INTO stripe_month_items (id, organization_id, month, position, description, amount_minor)
VALUES ({MONTH_ITEM_ID}, :organization_id, :month, :position, :description, :amount_minor)
""")
WAITING = text("""
SELECT i.id, i.month, i.description, i.amount_minor
FROM stripe_month_items i
WHERE i.organization_id = :organization_id AND i.stripe_id IS NULL
ORDER BY i.month, i.position
""")
CREATED = text("""
UPDATE stripe_month_items
SET stripe_id = :stripe_id, invoice_stripe_id = :draft
WHERE id = :id
""")
SETTLE = text("""
UPDATE stripe_month_settlements
SET invoiced_minor = :invoiced, late_minor = :late, settled_at = now()
WHERE organization_id = :organization_id AND month = :month
""")


@dataclass(frozen=True, slots=True)
class StripeMonth:
    """Stripe's invoices of one customer's month.

    `drafts` are those not final yet, `usage_minor` the usage billed in minor units of the currency.
    """

    invoice_count: int
    drafts: tuple[Mapping[str, Any], ...]
    usage_minor: int


async def settle_months(sessions: Sessions, gateway: StripeGateway) -> int:
    """Settle the oldest unsettled month of each customer; return how many months were settled.

    Only one worker does this at a time; the others return 0.
    """
    async with lock_holder(sessions) as locks:
        if not await try_lock(locks, MONTHS_LOCK_NAME):
            return 0
        account, grace = gateway.account, DRAFTS_EXIST_AFTER
        oldest = {"account": account, "grace": grace, "limit": MONTHS_MAX}
        async with sessions() as session:
            months = (await session.execute(OLDEST_UNSETTLED_MONTHS, oldest)).all()
        settled = 0
        for month in months:
            item = (month.organization_id, month.month)
            if not month_retries.is_due(item):
                continue
            with month_retries.survive(item):
                try:
                    settled += await settle_month(sessions, gateway, month)
                except StripeFailed as failed:
                    log.warning(
                        "%s of %s is not settled at Stripe yet: %s",
                        month_text(month.month),
                        month.organization,
                        failed,
                    )
        return settled


async def settle_month(sessions: Sessions, gateway: StripeGateway, month: Row[Any]) -> bool:
    """Create the items that make Stripe's total equal ours, and finalize the drafts.

    Returns True once the month is settled.
    """
    facts = {
        name: month._mapping[name]
        for name in ("organization_id", "month", "currency_code", "begins", "ends")
    }
    async with sessions() as session:
        if await session.scalar(UNDELIVERED, facts):
            return False
    stripe_month = await read_stripe_month(sessions, gateway, month, facts)
    async with sessions.begin() as session:
        due_minor = (
            month.due_minor if month.due_minor is not None else await owe(session, month, facts)
        )
        if due_minor and not stripe_month.invoice_count:
            await check_no_invoice(session, facts)
        late = int(await session.scalar(LATE_MINOR, facts) or 0)
        missing = await make_items(
            session, month, facts, due_minor - stripe_month.usage_minor - late
        )
    await create_month_items(
        sessions, gateway, month, stripe_month.drafts[0]["id"] if stripe_month.drafts else ""
    )
    for draft in stripe_month.drafts if gateway.settings.finalizes else ():
        # No idempotency key: Stripe finalizes an invoice once, and repeats its own failures under a
        # key for a day.
        await gateway.call("post", f"/v1/invoices/{draft['id']}/finalize", auto_advance=True)
    if stripe_month.drafts or missing:
        return False  # the next run checks the amounts after finalization
    async with sessions.begin() as session:
        await session.execute(SETTLE, facts | {"invoiced": stripe_month.usage_minor, "late": late})
    return True


async def check_no_invoice(session: AsyncSession, facts: Mapping[str, Any]) -> None:
    """Raise StripeFailed unless it is certain that Stripe never makes an invoice for the month.

    The whole amount is then put on the customer's next invoice.
    """
    known = (await session.execute(INVOICE_KNOWN, {**facts, "grace": NO_INVOICE_AFTER})).one()
    if known.is_final_elsewhere:
        raise StripeFailed(
            "The invoice of the month belongs to another customer at Stripe. Check `weir stripe"
            " status`, and bill the month by hand."
        )
    if known.may_come:
        raise StripeFailed(
            "Stripe has no invoice of the month yet. Wait for it; if there is no subscription"
            " (`weir stripe sync`), the amount goes on the next invoice"
            f" {NO_INVOICE_AFTER.days} days after the month."
        )


async def read_stripe_month(
    sessions: Sessions, gateway: StripeGateway, month: Row[Any], facts: Mapping[str, Any]
) -> StripeMonth:
    """Read Stripe's invoices of a month. Drafts get our usage, because Stripe recounts theirs."""
    invoices = [
        each
        for each in await usage_invoices(gateway, month.customer, month.ends, with_void=True)
        if begins_within(each, month.begins)
    ]
    # A void invoice was issued and is owed no more. It counts unless another took its place.
    invoices = [each for each in invoices if each["status"] != "void"] or invoices
    drafts = tuple(each for each in invoices if each["status"] == "draft")
    if drafts:
        async with sessions() as session:
            metered = await session.scalar(
                METERED, {**facts, "minor_picos": minor_unit_picos(month.currency_code)}
            )
        return StripeMonth(len(invoices), drafts, int(metered or 0))
    usage = 0
    for invoice in invoices:
        items = await gateway.list_all("/v1/invoiceitems", invoice=invoice["id"])
        usage += int(invoice["subtotal"]) - sum(int(item["amount"]) for item in items)
    return StripeMonth(len(invoices), (), usage)


async def make_items(
    session: AsyncSession, month: Row[Any], facts: Mapping[str, Any], difference_minor: int
) -> int:
    """Record invoice items for the amount missing at Stripe, named after our charges.

    `difference_minor` is in Stripe's minor units. Returns the number of items.
    """
    made = (await session.execute(MADE, facts)).one()
    missing = difference_minor - made.minor
    if not in_steps(missing, month.currency_code) and made.item_count:
        return 0
    items = [] if made.item_count else await charges(session, month)
    # Less than a step is left: Stripe takes no item of it, so the next month carries it.
    remainder = in_steps(missing - sum(amount for _, amount in items), month.currency_code)
    if remainder:
        reason = "rounding, and usage that is invoiced in another month"
        items.append((f"{month_text(month.month)}: {reason}", remainder))
    for position, (description, amount) in enumerate(items, made.item_count + 1):
        values = {
            "position": position,
            "description": description[:DESCRIPTION_LENGTH_MAX],
            "amount_minor": amount,
        }
        await session.execute(MAKE_MONTH_ITEM, {**facts, **values})
    return len(items)


async def owe(session: AsyncSession, month: Row[Any], facts: Mapping[str, Any]) -> int:
    """Record the total of our invoice in Stripe's minor units, once per month, and return it."""
    minor_picos = minor_unit_picos(month.currency_code)
    invoice = await invoice_of_month(session, month.organization_id, month.month)
    total = 0 if invoice is None else int(invoice.total_picos)
    before = {**facts, "minor_picos": minor_picos}
    carried = int(await session.scalar(MONTH_CARRIED, before) or 0)
    due_minor = whole_units(total + carried, month.currency_code)
    due = {"due_picos": total, "carried": carried, "due_minor": due_minor}
    await session.execute(OWE, {**facts, **due})
    return due_minor


async def charges(session: AsyncSession, month: Row[Any]) -> list[tuple[str, int]]:
    """List a month's charges besides usage as label and Stripe's minor units, without zeros."""
    invoice = await invoice_of_month(session, month.organization_id, month.month)
    if invoice is None:
        return []
    return [
        (f"{month_text(month.month)}: {line.description}", amount)
        for line in await read_lines(session, invoice.id)
        if line.kind.is_charge
        and (
            amount := in_steps(
                whole_units(line.amount_picos, month.currency_code), month.currency_code
            )
        )
    ][:LABELLED_MAX]


def whole_units(amount_picos: int, currency_code: str) -> int:
    """Round an amount in picos and convert it to Stripe's minor units, truncated towards zero."""
    unit = minor_unit_picos(currency_code)
    rounded = round_to_minor_unit(amount_picos, currency_code)
    return rounded // unit if rounded >= 0 else -(-rounded // unit)


async def create_month_items(
    sessions: Sessions, gateway: StripeGateway, month: Row[Any], draft: str
) -> None:
    """Create the recorded items at Stripe, on the draft or, if `draft` is empty, the next invoice.

    Raises: StripeFailed.
    """
    async with sessions() as session:
        waiting = (await session.execute(WAITING, {"organization_id": month.organization_id})).all()
    if not waiting:
        return
    known = await known_items(gateway, MONTH_METADATA, month.customer)
    for row in waiting:
        key = f"month-item-{row.id}" + (f"-{draft}" if draft else "")
        terms = {
            "customer": month.customer,
            "amount": row.amount_minor,
            "description": row.description,
        }
        terms |= {"invoice": draft} if draft else {}
        stripe_id = known.get(str(row.id)) or await create_item(
            gateway, MONTH_METADATA, row.id, key, month.currency_code, **terms
        )
        async with sessions.begin() as session:
            await session.execute(
                CREATED, {"id": row.id, "stripe_id": stripe_id, "draft": draft or None}
            )


async def hold_draft(gateway: StripeGateway, invoice_id: str) -> bool:
    """Keep Stripe from finalizing an invoice; return False if it is not a draft of usage."""
    invoice = await gateway.find(f"/v1/invoices/{invoice_id}")
    if (
        invoice is None
        or invoice["status"] != "draft"
        or invoice["period_end"] <= invoice["period_start"]
    ):
        return False
    subscription = (
        await gateway.find(f"/v1/subscriptions/{subscription_of(invoice)}")
        if subscription_of(invoice)
        else None
    )
    if (
        subscription is None
        or (subscription.get("metadata") or {}).get("namespace") != gateway.settings.namespace
    ):
        return False
    if invoice["auto_advance"]:
        await gateway.call("post", f"/v1/invoices/{invoice_id}", auto_advance=False)
    return True
