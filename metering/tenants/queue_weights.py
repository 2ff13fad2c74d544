"""Weights of organizations in the fair queue: under load, twice the weight is twice the service.

An organization without a row weighs `DEFAULT_MILLI`. The audit log keeps the earlier weights. Every
api process reads all weights when one is changed (`control/control_channel.py`). Functions take a
session and never commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import announce_weights
from metering.core.audit import record_change
from metering.core.errors import InvalidValue
from metering.core.models import Organization, insertion
from metering.tenants.tenants import find_organization

# Thousandths. A larger ratio between two organizations would starve one of them.
MILLI_MIN, DEFAULT_MILLI, MILLI_MAX = 10, 1000, 100_000
WEIGHTS = text("""
SELECT organization_id, weight_milli FROM queue_weights
WHERE CAST(:ids AS uuid[]) IS NULL OR organization_id = ANY(CAST(:ids AS uuid[]))
""")
WEIGHT = text("SELECT weight_milli FROM queue_weights WHERE organization_id = :organization_id")


async def queue_weights(
    session: AsyncSession, ids: Collection[uuid.UUID] | None = None
) -> dict[uuid.UUID, int]:
    """Read the weights in thousandths of all organizations, or of these, by organization id.

    Those never set are left out.
    """
    rows = await session.execute(WEIGHTS, {"ids": None if ids is None else list(ids)})
    return {row.organization_id: row.weight_milli for row in rows}


async def queue_weight(session: AsyncSession, organization_id: uuid.UUID) -> int:
    """Read the weight of an organization in thousandths."""
    found = await session.scalar(WEIGHT, {"organization_id": organization_id})
    return DEFAULT_MILLI if found is None else int(found)


async def set_queue_weight(
    session: AsyncSession, *, organization: str, weight_milli: int, actor: str
) -> Organization:
    """Set the weight of an organization, in thousandths. Raises: NotFound, InvalidValue."""
    owner = await find_organization(session, organization)
    if not MILLI_MIN <= weight_milli <= MILLI_MAX:
        raise InvalidValue(
            "queue_weight_milli",
            f"must be between {MILLI_MIN} and {MILLI_MAX} thousandths, got {weight_milli}; 1000 is"
            " the weight of an organization without one",
        )
    # Concurrent changes of one organization: the audit log has them one after the other.
    await session.execute(
        select(Organization.id).where(Organization.id == owner.id).with_for_update()
    )
    before = await queue_weight(session, owner.id)
    if before == weight_milli:
        return owner
    changed = {"weight_milli": weight_milli, "updated_at": func.now()}
    upsert = insertion("queue_weights", changed | {"organization_id": owner.id})
    await session.execute(
        upsert.on_conflict_do_update(index_elements=["organization_id"], set_=changed)
    )
    await record_change(
        session,
        actor,
        "organization.queue_weight",
        str(owner.id),
        before={"queue_weight_milli": before},
        after={"queue_weight_milli": weight_milli},
    )
    await announce_weights(session)
    return owner
