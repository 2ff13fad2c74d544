"""Ids that clients mint for calls that create something, so that a repetition answers what was made and makes nothing.

Functions take a session and never commit: the id is kept if, and only if, what it made is.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.control_models import AdminRequest
from metering.errors import RequestIdReused

KEPT_FOR = timedelta(days=7)  # a script that is repeated after a weekend still finds its own call


async def earlier_subject(session: AsyncSession, request_id: uuid.UUID, method: str, payload: bytes) -> str | None:
    """The id of what an earlier call of this request id made; None for the first, which then must call `made`.

    Of two calls at once, the second waits for the first. Raises: RequestIdReused for another method or payload.
    """
    digest = hashlib.sha256(payload).digest()
    await session.execute(delete(AdminRequest).where(AdminRequest.created_at < func.now() - KEPT_FOR))
    values = {"request_id": request_id, "method": method, "payload_hash": digest, "subject_id": ""}
    statement = insert(AdminRequest).values(values).on_conflict_do_nothing().returning(AdminRequest.request_id)
    if await session.scalar(statement) is not None:
        return None
    earlier = (await session.scalars(select(AdminRequest).where(AdminRequest.request_id == request_id))).one()
    if (earlier.method, earlier.payload_hash) != (method, digest):
        raise RequestIdReused(f"this request_id was used before for another {earlier.method}: mint a new one for a new call")
    return earlier.subject_id


async def made(session: AsyncSession, request_id: uuid.UUID, subject_id: str) -> None:
    """Remember what the first call of a request id made."""
    await session.execute(update(AdminRequest).where(AdminRequest.request_id == request_id).values(subject_id=subject_id))
