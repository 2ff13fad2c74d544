"""Receipts of an organization's month: their root, chain positions, pages, and the seal that ends
the month.

A receipt belongs to the calendar month (UTC) in which it was settled. Chains never go back in time,
so a project's month is a contiguous part of its chain. Functions take a session and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.pages import PAGE_SIZE, check_page_size, page_values, row_id, utc_time
from metering.core.pages import page_token as token_of
from metering.core.retained import check_details
from metering.receipts.chaining import (
    BATCHES,
    ISSUED,
    IssuedReceipt,
    IssuedRow,
    issued_of_rows,
    split,
)
from metering.receipts.encoding import NO_HASH
from metering.receipts.merkle import RunningRoot

OF_MONTH = "organization_id = :organization_id AND settled_at >= :begins AND settled_at < :ends"
# The month's usage events were removed; their sums, and the hashes of their receipts, remain.
IS_REMOVED = """EXISTS (
    SELECT FROM retired_months r WHERE r.month = :month AND r.detached_at IS NOT NULL
)"""
# The hashes of each chain in values of two megabytes: one row per receipt would cost far more than
# its hash.
HASHES = text(f"""
SELECT project_id, first_sequence, last_sequence, receipt_count, previous_hash, hashes
FROM retired_receipts
WHERE organization_id = :organization_id AND month = :month AND {IS_REMOVED}
UNION ALL
SELECT project_id,
       min(receipt_sequence) AS first_sequence,
       max(receipt_sequence) AS last_sequence,
       count(*) AS receipt_count,
       (array_agg(previous_receipt_hash ORDER BY receipt_sequence))[1] AS previous_hash,
       string_agg(receipt_hash, ''::bytea ORDER BY receipt_sequence) AS hashes
FROM usage_events
WHERE {OF_MONTH} AND receipt_sequence IS NOT NULL
GROUP BY project_id, receipt_sequence / 65536
ORDER BY project_id, first_sequence
""")
COUNT_MISSING_RECEIPTS = text(f"""
SELECT (SELECT count(*) FROM usage_events WHERE {OF_MONTH} AND receipt_sequence IS NULL)
     + (SELECT coalesce(sum(event_count), 0) FROM usage_days WHERE {OF_MONTH} AND {IS_REMOVED})
     - (
         SELECT coalesce(sum(receipt_count), 0)
         FROM retired_receipts
         WHERE organization_id = :organization_id AND month = :month AND {IS_REMOVED}
     )
""")
PAGE = text(f"""
{ISSUED}
  AND e.organization_id = :organization_id
  AND e.settled_at >= :begins
  AND e.settled_at < :ends
  AND e.settled_at >= :after_time
  AND (e.settled_at, e.project_id, e.receipt_sequence)
    > (:after_time, :after_project, :after_sequence)
ORDER BY e.settled_at, e.project_id, e.receipt_sequence
LIMIT :page_size
""")
OF_HOLD = text(f"{ISSUED} AND e.hold_id = :hold_id ORDER BY e.part")
SELECT_BATCHES = text(f"{BATCHES} WHERE id = ANY(:ids)")
# Never deleted: old receipts need them.
KEYS = text("SELECT id, public_key, created_at FROM receipt_keys ORDER BY created_at, id")
SEAL = text("""
UPDATE receipt_chains c
SET last_settled_at = :ends
FROM (
    SELECT c.project_id
    FROM receipt_chains c
    JOIN projects p ON p.id = c.project_id
    WHERE p.organization_id = :organization_id AND c.last_settled_at < :ends
    ORDER BY c.project_id
    FOR UPDATE OF c
) AS open
WHERE c.project_id = open.project_id AND :ends <= now()
""")

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC), uuid.UUID(int=0), 0  # before the first page


@dataclass(slots=True)
class ChainPiece:
    """Receipts of one project in a month; `previous_hash` is of the receipt before the first."""

    project_id: uuid.UUID
    first_sequence: int
    last_sequence: int
    receipt_count: int
    previous_hash: bytes
    last_hash: bytes


@dataclass(slots=True)
class ReceiptMonth:
    """Receipts of an organization in a month. `missing_receipt_count` usage events have none."""

    root: bytes
    receipt_count: int
    chains: list[ChainPiece] = field(default_factory=list)
    missing_receipt_count: int = 0


def bounds(organization_id: uuid.UUID, month: date) -> dict[str, object]:
    """Build query parameters: the organization, and the start and end of the month."""
    begins = datetime(month.year, month.month, 1, tzinfo=UTC)
    ends = datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)
    return {
        "organization_id": organization_id,
        "month": begins.date(),
        "begins": begins,
        "ends": ends,
    }


async def month_root(session: AsyncSession, organization_id: uuid.UUID, month: date) -> bytes:
    """Compute the 32-byte Merkle root of a month's receipts, by project id and sequence.

    `month` is any day of the month. The root never changes once the month is sealed.
    """
    return (await receipt_month(session, organization_id, month)).root


async def receipt_month(
    session: AsyncSession, organization_id: uuid.UUID, month: date
) -> ReceiptMonth:
    """Compute a month's Merkle root, and the first and last receipt of each chain."""
    selected = bounds(organization_id, month)
    root, chains = RunningRoot(), dict[uuid.UUID, ChainPiece]()
    for row in await session.execute(HASHES, selected):
        hashes = split(bytes(row.hashes))
        for each in hashes:
            root.push(each)
        piece = chains.setdefault(
            row.project_id,
            ChainPiece(row.project_id, row.first_sequence, 0, 0, bytes(row.previous_hash), NO_HASH),
        )
        piece.last_sequence, piece.last_hash = row.last_sequence, hashes[-1]
        piece.receipt_count += row.receipt_count
    missing_count = int(await session.scalar(COUNT_MISSING_RECEIPTS, selected) or 0)
    return ReceiptMonth(root.root, root.count, list(chains.values()), missing_count)


async def seal_month(session: AsyncSession, organization_id: uuid.UUID, month: date) -> None:
    """Prevent further receipts in a month that is over: later settlements get a later month.

    Call it in a short transaction of its own before a close reads the month: it waits for running
    settlements, and new ones wait for its commit. Does nothing if the month is not over by the
    database's clock.
    """
    selected = bounds(organization_id, month)
    await session.execute(SEAL, {"organization_id": organization_id, "ends": selected["ends"]})


async def receipts_page(
    session: AsyncSession,
    organization_id: uuid.UUID,
    month: date,
    *,
    page_token: str = "",
    page_size: int = PAGE_SIZE,
) -> tuple[list[IssuedReceipt], str]:
    """List receipts of a month by time; also return the token of the next page, or "".

    Raises: InvalidValue.
    """
    check_page_size(page_size)
    await check_details(
        session, datetime(month.year, month.month, 1, tzinfo=UTC), "month", "receipts"
    )
    after = page_values(page_token, utc_time, uuid.UUID, row_id) if page_token else BEGINNING
    position = dict(zip(("after_time", "after_project", "after_sequence"), after, strict=True))
    page = bounds(organization_id, month) | position | {"page_size": page_size + 1}
    rows = (await session.execute(PAGE, page)).all()
    receipts = await with_batches(session, rows[:page_size])
    if len(rows) <= page_size:
        return receipts, ""
    last = IssuedRow(*rows[page_size - 1])
    return receipts, token_of(last.settled_at, last.project_id, last.sequence)


async def receipts_of_hold(session: AsyncSession, hold_id: uuid.UUID) -> list[IssuedReceipt]:
    """List the receipts of one request, by part."""
    return await with_batches(session, (await session.execute(OF_HOLD, {"hold_id": hold_id})).all())


async def with_batches(
    session: AsyncSession, rows: Sequence[Sequence[object]]
) -> list[IssuedReceipt]:
    """Convert rows of ISSUED to receipts with the signatures of their batches, each read once."""
    ids = sorted({row[-1] for row in rows if isinstance(row[-1], int)})
    batches = (await session.execute(SELECT_BATCHES, {"ids": ids})).all() if ids else []
    return [receipt for _, receipt in issued_of_rows(rows, batches)]


async def list_receipt_keys(session: AsyncSession) -> Sequence[Row[Any]]:
    """List the public keys that have signed receipts, the oldest first."""
    return (await session.execute(KEYS)).all()
