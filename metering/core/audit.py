"""Audit log: each entry is written in the transaction of its change.

Ids of entries are drawn before the commit, so a smaller one may become visible after a larger one.
A reader that follows the log would miss it. Writers hold a shared lock from before they draw an id
to the end of their transaction, and `entries_after` waits for those that may have drawn one below
its bound, without stopping new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Sequence
from datetime import date, datetime
from typing import Any

from sqlalchemy import CompoundSelect, Row, insert, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import InvalidValue
from metering.core.models import AuditEntry, Base
from metering.core.pages import check_page_size

# References of a row to its owners.
OWNER_COLUMNS = (
    *("subject_id", "within_id", "organization_id", "project_id", "api_key_id"),
    *("person_id", "service_account_id"),
)
UNLOGGED = frozenset({"secret_hash", "secret", "token_hash"})  # columns that must not be logged
ENTRIES_PER_STATEMENT = 1000  # five parameters each; PostgreSQL's limit is 65,535
WRITER_LOCK_ID = 1_634_036_844  # arbitrary, but never to be changed
HOLD_WRITER_LOCK = text(f"SELECT pg_advisory_xact_lock_shared({WRITER_LOCK_ID})")
LAST_DRAWN = text("""
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('public.audit_log', 'id')), 0)
""")
WRITERS = text(f"""
SELECT virtualtransaction
FROM pg_locks
WHERE locktype = 'advisory' AND classid = 0 AND objid = {WRITER_LOCK_ID} AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
""")
WRITERS_WAIT_S, WRITERS_POLL_S = 2.0, 0.02  # most changes take milliseconds

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
    """Add an audit entry. `before` is None for a new object, `after` None for a deleted one.

    The database adds the caller: its role, organization, person and address, from the settings of
    the transaction (`metering/store/border.py`).
    """
    assert before is not None or after is not None, f"{action} has no state to record"
    entry = {"actor": actor, "action": action, "subject_id": subject_id}
    await record_changes(session, [entry | {"before": before, "after": after}])


async def record_changes(session: AsyncSession, entries: Sequence[dict[str, Any]]) -> None:
    """Add audit entries, each with the arguments of `record_change` by name."""
    await session.execute(HOLD_WRITER_LOCK)
    for start in range(0, len(entries), ENTRIES_PER_STATEMENT):
        of_one = entries[start : start + ENTRIES_PER_STATEMENT]
        await session.execute(insert(AuditEntry).values(of_one))


async def entries_after(
    session: AsyncSession, *, after_entry_id: int, page_size: int = 1000
) -> tuple[Sequence[AuditEntry], int]:
    """List the entries after a position, oldest first, and return the position after them.

    No entry ever appears below a returned position. While a change that is under way may still
    write one, the position stays, and there are no entries. Raises: InvalidValue.
    """
    check_page_size(page_size)
    last: int = (await session.execute(LAST_DRAWN)).scalar_one()
    if not 0 <= after_entry_id <= last:
        raise InvalidValue(
            "after_entry_id",
            f"must be between 0 and {last}, the newest position, got {after_entry_id}: if the"
            " database was restored, begin with 0 and ignore the entries that you have",
        )
    # After the bound: a writer with an id up to it holds the lock by now, or has ended.
    earlier = set(await session.scalars(WRITERS))
    deadline = asyncio.get_running_loop().time() + WRITERS_WAIT_S
    while earlier and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(WRITERS_POLL_S)
        earlier &= set(await session.scalars(WRITERS))
    if earlier:
        return (), after_entry_id
    query = select(AuditEntry).where(AuditEntry.id > after_entry_id, AuditEntry.id <= last)
    entries = (await session.scalars(query.order_by(AuditEntry.id).limit(page_size))).all()
    return entries, entries[-1].id if len(entries) == page_size else last


async def list_audit_entries(
    session: AsyncSession,
    *,
    page_size: int = 100,
    before_entry_id: int = 0,
    subject_ids: Collection[str] | CompoundSelect[str] | None = None,
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
