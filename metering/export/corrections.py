"""What a person decides about single batches: sending one again, and settling the doubt about a parked one.

Stripe takes an event back within 24 hours of receiving it. Usage itself never shrinks here, so nothing ever has to be offset by a
negative quantity; money is given back by a credit on the invoice.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.errors import InvalidValue, NotFound, StripeFailed
from metering.export.batches import form
from metering.export.export_models import BatchState, MeterBatch
from metering.export.exporting import Verdict
from metering.export.stripe_gateway import CANCEL_WITHIN, StripeGateway
from metering.models import TokenKind
from metering.store.db import Sessions

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
