"""Audit log: each entry is written in the transaction of its change."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Sequence
from datetime import date, datetime
from typing import Any

from sqlalchemy import Row, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import AuditEntry, Base
from metering.core.pages import check_page_size

# References of a row to its owners.
OWNER_COLUMNS = (
    *("subject_id", "within_id", "organization_id", "project_id", "api_key_id"),
    *("person_id", "service_account_id"),
)
UNLOGGED = frozenset({"secret_hash", "secret", "token_hash"})  # columns that must not be logged
ENTRIES_PER_STATEMENT = 1000  # five parameters each; PostgreSQL's limit is 65,535

Snapshot = dict[str, Any]


def snapshot(row: Base | Row[Any]) -> Snapshot:
    """Convert a row to a dict of JSON values, without the columns that are never logged."""
    names = (
        row._fields
        if isinstance(row, Row)
        else [column.key for column in row.__mapper__.column_attrs]
    )
    return {name: _json_value(getattr(row, name)) for name in names if name not in UNLOGGED}


async def record_change(
    session: AsyncSession,
    actor: str,
    action: str,
    subject_id: str,
    *,
    before: Snapshot | None = None,
    after: Snapshot | None = None,
) -> None:
    """Add an audit entry. `before` is None for a new object, `after` None for a deleted one."""
    entry = {"actor": actor, "action": action, "subject_id": subject_id}
    await record_changes(session, [entry | {"before": before, "after": after}])


async def record_changes(session: AsyncSession, entries: Sequence[dict[str, Any]]) -> None:
    """Add audit entries, each with the arguments of `record_change` by name."""
    for start in range(0, len(entries), ENTRIES_PER_STATEMENT):
        of_one = entries[start : start + ENTRIES_PER_STATEMENT]
        await session.execute(insert(AuditEntry).values(of_one))


async def list_audit_entries(
    session: AsyncSession,
    *,
    page_size: int = 100,
    before_entry_id: int = 0,
    subject_ids: Collection[str] | None = None,
    actor: str | uuid.UUID = "",
    action_prefix: str = "",
    start_at: datetime | None = None,
    end_at: datetime | None = None,
) -> Sequence[AuditEntry]:
    """List audit entries, the newest first.

    `before_entry_id` lists only entries with lower ids; 0 starts with the newest. `subject_ids`
    selects changes of these objects and of objects that refer to them (`OWNER_COLUMNS`). `actor`
    selects the changes of a key by prefix, or of a person by id.
    `action_prefix` is a prefix such as "api_key.". `start_at` is inclusive, `end_at` exclusive.
    Raises: InvalidValue.
    """
    check_page_size(page_size)
    query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(page_size)
    if before_entry_id:
        query = query.where(AuditEntry.id < before_entry_id)
    if subject_ids is not None:
        named = (
            state[column].astext
            for state in (AuditEntry.before, AuditEntry.after)
            for column in OWNER_COLUMNS
        )
        query = query.where(
            or_(
                AuditEntry.subject_id.in_(subject_ids),
                *(column.in_(subject_ids) for column in named),
            )
        )
    if actor:
        is_person = isinstance(actor, uuid.UUID)
        query = query.where(
            (AuditEntry.actor_person_id if is_person else AuditEntry.actor) == actor
        )
    if action_prefix:
        query = query.where(AuditEntry.action.startswith(action_prefix, autoescape=True))
    if start_at is not None:
        query = query.where(AuditEntry.created_at >= start_at)
    if end_at is not None:
        query = query.where(AuditEntry.created_at < end_at)
    return (await session.scalars(query)).all()


def referred_ids(entry: AuditEntry) -> set[uuid.UUID]:
    """Collect the ids of the object of an entry and of its owners, before and after the change."""
    states = [state for state in (entry.before, entry.after) if isinstance(state, dict)]
    texts = [
        entry.subject_id,
        entry.actor_person_id,
        *(state.get(each) for state in states for each in OWNER_COLUMNS),
    ]
    found = set()
    for each in texts:
        with contextlib.suppress(ValueError):
            found.add(uuid.UUID(str(each)))
    return found


def _json_value(value: object) -> object:
    match value:
        case uuid.UUID():
            return str(value)
        case date():  # or datetime
            return value.isoformat()
        case _:
            return value
