"""Versions of the fleet: documents that all api processes serve, the newest one now.

A document is text to this module; its parser is the reader of fleet files. Rows are only appended.
Functions take a session and never commit; the notification after the commit lets every process poll
its control channel (`control_channel.py`), which finds a new version within a second in any case.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import LiveRow, announce, ask_all
from metering.core.audit import record_change
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import insertion, record_of
from metering.core.pages import check_page_size
from metering.store.db import (
    KEEPALIVES,
    BoundedConnection,
    Sessions,
    patience,
    psycopg_conninfo,
)
from metering.store.refusals import AWAY

LOCK_ID = 7_355_610  # arbitrary, but never to be changed
SYSTEM = "system"  # actor of a process
REASON_CHARS_MAX = 200
CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 2, 2.0  # before a process starts with its settings
NEWEST = "SELECT number, document FROM fleet_versions ORDER BY number DESC LIMIT 1"
FIND = text("SELECT * FROM fleet_versions WHERE number = :number")
FIND_NEWEST = text("SELECT * FROM fleet_versions ORDER BY number DESC LIMIT 1")
LIST = text("""
SELECT number, '' AS document, actor, reason, digest, created_at
FROM fleet_versions
WHERE :before = 0 OR number < :before
ORDER BY number DESC
LIMIT :page_size
""")
PROCESSES = text("""
SELECT process_id, process_name, fleet_number AS number, fleet_fault AS fault
FROM live_reports
WHERE reported_at >= :requested_at
ORDER BY process_name, process_id
""")


@dataclass(frozen=True, slots=True)
class StoredFleet:
    """Number and document of a version."""

    number: int
    document: str


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Version of the fleet. `digest` is the SHA-256 of the document, in hexadecimal."""

    number: int
    document: str
    digest: str
    actor: str
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class FleetProcesses:
    """Versions that processes serve, as rows of `PROCESSES`, and processes that did not answer."""

    processes: Sequence[LiveRow]
    unresponsive_process_ids: tuple[uuid.UUID, ...]


def digest_of(document: str) -> str:
    """Compute the digest of a document."""
    return hashlib.sha256(document.encode()).hexdigest()


async def read_newest(database_url: str) -> StoredFleet | None:
    """Read the newest version on a connection of its own; None if there is none.

    Also None if the database does not answer, or lacks the table: the caller serves its settings
    until the control channel finds the version.
    """
    try:
        with patience(ANSWER_TIMEOUT_S):
            async with await BoundedConnection.connect(
                psycopg_conninfo(database_url),
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                **KEEPALIVES,
            ) as connection:
                row = await (await connection.execute(NEWEST)).fetchone()
    except (*AWAY, OSError, psycopg.errors.UndefinedTable):
        return None
    return None if row is None else StoredFleet(*row)


async def find_version(session: AsyncSession, number: int = 0) -> FleetRecord | None:
    """Load a version; 0 is the newest, None if there is none. Raises: NotFound."""
    query = FIND if number else FIND_NEWEST
    row = (await session.execute(query, {"number": number} if number else {})).one_or_none()
    if row is None and number:
        raise NotFound("fleet version", str(number))
    return None if row is None else record_of(FleetRecord, row)


async def list_versions(
    session: AsyncSession, *, page_size: int = 0, before_number: int = 0
) -> Sequence[LiveRow]:
    """List versions without their documents, the newest first. Raises: InvalidValue."""
    check_page_size(page_size := page_size or 100)
    values = {"before": before_number, "page_size": page_size}
    return (await session.execute(LIST, values)).all()


async def lock_newest(session: AsyncSession) -> FleetRecord | None:
    """Load the newest version, and let no other be added until the transaction ends."""
    await session.execute(select(func.pg_advisory_xact_lock(LOCK_ID)))
    return await find_version(session)


async def add_version(
    session: AsyncSession,
    *,
    document: str,
    newest: FleetRecord | None,
    reason: str,
    actor: str,
    changes: Sequence[dict[str, Any]] = (),
) -> FleetRecord:
    """Add a version after `newest`, from `lock_newest`. The audit log gets `changes`.

    Raises: InvalidValue for a reason that is too long.
    """
    if len(reason) > REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"must be at most {REASON_CHARS_MAX} printable characters")
    number, digest = (newest.number if newest else 0) + 1, digest_of(document)
    values = {"number": number, "document": document, "digest": digest}
    await session.execute(insertion("fleet_versions", values | {"actor": actor, "reason": reason}))
    before = None if newest is None else {"number": newest.number, "digest": newest.digest}
    after = {"number": number, "digest": digest, "reason": reason, "changes": list(changes)}
    await record_change(session, actor, "fleet.apply", str(number), before=before, after=after)
    await announce(session)
    added = await find_version(session, number)
    assert added is not None, "it was just added"
    return added


async def fleet_processes(sessions: Sessions) -> FleetProcesses:
    """Ask all processes which version they serve."""
    requested_at, silent = await ask_all(sessions)
    async with sessions() as session:
        rows = (await session.execute(PROCESSES, {"requested_at": requested_at})).all()
    return FleetProcesses(rows, tuple(sorted(silent)))
