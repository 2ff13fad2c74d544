"""Which api process runs a request, or ran it, and where that process can be reached by the others."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.models import HoldState

# A voided attempt has left nothing, and may have been followed by another.
SELECT_OWNER = text("""
SELECT h.owner_id, h.state, coalesce(r.peer_address, '') AS address, coalesce(r.peer_certificate, '') AS certificate
FROM holds h LEFT JOIN live_reports r ON r.owner_id = h.owner_id
WHERE h.project_id = :project_id AND h.request_id = :request_id AND h.state <> 'voided'
ORDER BY h.admitted_at DESC LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a request is. is_held: it runs, as far as the books know.

    address: "host:port" where other processes reach its process, which shows that certificate; both empty where it has gone.
    """

    owner_id: uuid.UUID
    is_held: bool
    address: str
    certificate: str


async def certificate_of(session: AsyncSession, owner_id: uuid.UUID) -> str:
    """What the process of this id shows the others; empty if there is none."""
    found = await session.scalar(text("SELECT peer_certificate FROM live_reports WHERE owner_id = :id"), {"id": owner_id})
    return str(found or "")


async def find_owner(session: AsyncSession, project_id: uuid.UUID, request_id: uuid.UUID) -> Owner | None:
    """None if no request of this id has been admitted in the project."""
    row = (await session.execute(SELECT_OWNER, {"project_id": project_id, "request_id": request_id})).one_or_none()
    return None if row is None else Owner(row.owner_id, row.state == HoldState.HELD, row.address, row.certificate)
