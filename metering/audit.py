"""The audit log: who changed what. An entry is written in the transaction of its change, so neither exists without the other."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.errors import InvalidValue
from metering.models import AuditEntry, Base

PAGE_SIZE_MAX = 1000  # entries; one page is one answer, and an answer must fit a message
UNLOGGED = frozenset({"secret_hash"})  # columns that no log may show

Snapshot = dict[str, Any]


def snapshot(row: Base) -> Snapshot:
    """The columns of a row as JSON values."""
    columns = (column.key for column in row.__mapper__.column_attrs)
    return {name: _json_value(getattr(row, name)) for name in columns if name not in UNLOGGED}


async def record_change(
    session: AsyncSession, *, actor: str, action: str, subject_id: str, before: Snapshot | None, after: Snapshot | None
) -> None:
    """Add an entry. before: None for something new; after: None for something gone."""
    await session.execute(insert(AuditEntry).values(actor=actor, action=action, subject_id=subject_id, before=before, after=after))


async def list_audit_entries(session: AsyncSession, *, page_size: int = 100, before_entry_id: int = 0) -> Sequence[AuditEntry]:
    """Entries, newest first; only those with a smaller id than `before_entry_id` where that is not 0."""
    if not 1 <= page_size <= PAGE_SIZE_MAX:
        raise InvalidValue("page_size", f"give 1 to {PAGE_SIZE_MAX}")
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(page_size)
    if before_entry_id:
        query = query.where(AuditEntry.id < before_entry_id)
    return (await session.scalars(query)).all()


def _json_value(value: object) -> object:
    match value:
        case uuid.UUID():
            return str(value)
        case datetime():
            return value.isoformat()
        case _:
            return value
