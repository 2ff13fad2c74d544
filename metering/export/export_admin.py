"""State of the export for operators, and their decisions on batches: to send one again, to settle a parked one.

Stripe takes an event back within 24 hours of receiving it. Usage itself never shrinks here, so nothing has to be offset by a
negative quantity; money is given back by a credit on the invoice.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue, NotFound, StripeFailed
from metering.core.models import TokenKind
from metering.export.deliveries import form
from metering.export.export_models import BatchState, MeterBatch
from metering.export.exporting import Verdict
from metering.export.stripe_gateway import CANCEL_WITHIN, StripeGateway
from metering.export.stripe_inbox import InvoicePayment, unpaid_invoices
from metering.store.db import Sessions

ATTENTION_MAX = 50  # batches named; the counts say how many there are

STATES = text("SELECT state, count(*), sum(token_count)::bigint FROM meter_batches GROUP BY 1 ORDER BY 1")
PAUSE = text("SELECT closed_until, paused_until, pause_reason FROM export_progress")
UNKNOWN = text("""
SELECT DISTINCT o.name FROM meter_batches b JOIN organizations o ON o.id = b.organization_id
WHERE b.state IN ('pending', 'sent') AND NOT (
    EXISTS (SELECT 1 FROM stripe_objects WHERE (kind, ref) = ('customer', o.id::text))
    AND EXISTS (SELECT 1 FROM stripe_objects WHERE (kind, ref) = ('meter', b.price_version_id || ':' || b.token_kind)))
ORDER BY 1
""")
ATTENTION = text("""
SELECT b.id, b.state, o.name, b.token_kind, b.hour, b.token_count, coalesce(b.last_error, '')
FROM meter_batches b JOIN organizations o ON o.id = b.organization_id
WHERE b.state IN ('rejected', 'parked', 'cancelling') ORDER BY b.hour, b.id LIMIT :limit
""")
UNSETTLED = text("""
SELECT o.name, to_char(m.month, 'YYYY-MM') FROM billing_months m JOIN organizations o ON o.id = m.organization_id
LEFT JOIN stripe_month_settlements s USING (organization_id, month)
WHERE m.state = 'closed' AND s.settled_at IS NULL AND m.closed_at >= (SELECT month_items_since FROM export_progress)
  AND EXISTS (SELECT FROM stripe_objects WHERE kind = 'customer' AND ref = m.organization_id::text)
ORDER BY m.month, o.name LIMIT :limit
""")
# A customer's row is written by each sync that finds it.
CHANGED_PROFILES = text("""
SELECT o.name FROM billing_profiles p JOIN organizations o ON o.id = p.organization_id
WHERE EXISTS (SELECT FROM stripe_objects s WHERE (s.kind, s.ref) = ('customer', o.id::text) AND s.seen_at < p.updated_at)
ORDER BY 1 LIMIT :limit
""")
WITHOUT_PAYMENT_METHOD = text("""
SELECT DISTINCT o.name FROM stripe_objects s JOIN organizations o ON o.id::text = s.ref
WHERE s.kind = 'payment_method' AND s.stripe_id = '' ORDER BY 1 LIMIT :limit
""")
UNHANDLED = text("SELECT count(*) FROM stripe_events WHERE handled_at IS NULL")


@dataclass(frozen=True, slots=True)
class StateCount:
    """Batches of one state."""

    state: str
    batch_count: int
    token_count: int


@dataclass(frozen=True, slots=True)
class StuckBatch:
    """One that needs a person: `weir stripe resend` for what is rejected, `weir stripe settle` for what is parked."""

    id: uuid.UUID
    state: str
    organization: str
    token_kind: str
    hour: datetime
    token_count: int
    last_error: str


@dataclass(frozen=True, slots=True)
class ExportStatus:
    """All of it, at one moment. closed_until: hours before it have their batches; None where nothing was exported ever.

    unsettled_months: organization and month, of which Stripe's invoices do not come to ours yet. changed_profiles,
    without_payment_method: names of organizations, as of the last `weir stripe sync`. unpaid_invoices: those whose charge failed,
    that are overdue, or that were marked as uncollectible.
    """

    states: tuple[StateCount, ...]
    closed_until: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    unknown_organizations: tuple[str, ...]
    unhandled_event_count: int
    unsettled_months: tuple[tuple[str, str], ...]
    needing_attention: tuple[StuckBatch, ...]
    changed_profiles: tuple[str, ...]
    without_payment_method: tuple[str, ...]
    unpaid_invoices: tuple[InvoicePayment, ...]


async def export_status(sessions: Sessions) -> ExportStatus:
    async with sessions() as session:
        progress = (await session.execute(PAUSE)).one_or_none()
        return ExportStatus(
            states=tuple(StateCount(*row) for row in await session.execute(STATES)),
            closed_until=progress.closed_until if progress else None,
            paused_until=progress.paused_until if progress else None,
            pause_reason=progress.pause_reason if progress else None,
            unknown_organizations=tuple(await session.scalars(UNKNOWN)),
            unhandled_event_count=int(await session.scalar(UNHANDLED) or 0),
            unsettled_months=tuple((row[0], row[1]) for row in await session.execute(UNSETTLED, {"limit": ATTENTION_MAX})),
            needing_attention=tuple(StuckBatch(*row) for row in await session.execute(ATTENTION, {"limit": ATTENTION_MAX})),
            changed_profiles=tuple(await session.scalars(CHANGED_PROFILES, {"limit": ATTENTION_MAX})),
            without_payment_method=tuple(await session.scalars(WITHOUT_PAYMENT_METHOD, {"limit": ATTENTION_MAX})),
            unpaid_invoices=tuple(await unpaid_invoices(session, ATTENTION_MAX)),
        )


MOVE = text("UPDATE meter_batches SET state = :state, last_error = :error WHERE id = :id")
COUNTED = text("UPDATE meter_batches SET state = 'delivered', delivered_at = sent_at, last_error = NULL WHERE id = :id")


async def resend(sessions: Sessions, gateway: StripeGateway, batch_id: uuid.UUID) -> None:
    """Take a delivered batch back, or give up a rejected one, and let its tokens go out anew as another part.

    May be repeated when it was cut off. Raises: NotFound, InvalidValue where the batch's state or age forbids it, StripeFailed.
    """
    async with sessions.begin() as session:
        batch = await _locked(session, batch_id)
        if batch.late_item_id is not None:
            raise InvalidValue("batch", f"{batch_id} is invoiced by an item of its own: sent again, it would be invoiced twice")
        state = BatchState(batch.state)
        if state is BatchState.REJECTED:
            await _give_up(session, batch)
            return
        if state is BatchState.DELIVERED:
            await _check_age(session, batch)
            await session.execute(MOVE, {"id": batch_id, "state": "cancelling", "error": None})
        elif state is not BatchState.CANCELLING:
            raise InvalidValue("batch", f"{batch_id} is {state}: only what is delivered or rejected can be sent again")
    event_name = gateway.event_name(batch.price_version_id, TokenKind(batch.token_kind))
    answer = await gateway.take_back(str(batch_id), event_name)
    async with sessions.begin() as session:
        batch = await _locked(session, batch_id)
        if batch.state != BatchState.CANCELLING:
            return  # another call was quicker
        if answer.verdict is Verdict.DELIVERED:
            await _give_up(session, batch)
        elif answer.verdict is Verdict.REFUSED:
            # An earlier attempt whose answer was lost may have taken it back, and would be why this one is refused.
            stands = BatchState.PARKED if state is BatchState.CANCELLING else BatchState.DELIVERED
            await session.execute(MOVE, {"id": batch_id, "state": str(stands), "error": answer.reason})
    if answer.verdict is not Verdict.DELIVERED:
        raise StripeFailed(f"the meter event is not taken back: {answer.reason}")


async def settle(sessions: Sessions, batch_id: uuid.UUID, *, counted: bool) -> None:
    """Say of a parked batch whether Stripe counts it. If it does not, its tokens go out anew. Raises: NotFound, InvalidValue."""
    async with sessions.begin() as session:
        batch = await _locked(session, batch_id)
        if batch.state != BatchState.PARKED:
            raise InvalidValue("batch", f"{batch_id} is {batch.state}: there is doubt about parked batches only")
        if counted:
            await session.execute(COUNTED, {"id": batch_id})
        else:
            await _give_up(session, batch)


async def _locked(session: AsyncSession, batch_id: uuid.UUID) -> MeterBatch:
    batch = await session.get(MeterBatch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None:
        raise NotFound("meter batch", str(batch_id))
    return batch


async def _give_up(session: AsyncSession, batch: MeterBatch) -> None:
    """Cancel it and make its successor in the same transaction: at no commit are its tokens missing."""
    await session.execute(MOVE, {"id": batch.id, "state": "cancelled", "error": batch.last_error})
    await form(session, batch.hour, batch.hour + timedelta(hours=1), batch.organization_id)


async def _check_age(session: AsyncSession, batch: MeterBatch) -> None:
    now = await session.scalar(text("SELECT now()"))
    assert isinstance(now, datetime)
    assert batch.delivered_at is not None
    if now - batch.delivered_at >= CANCEL_WITHIN:
        raise InvalidValue("batch", f"{batch.id} was delivered over 24 hours ago, and Stripe keeps it: credit the customer instead")
