"""Limits that a key has from its beginning: copies of those that its project and organization keep for new keys.

A copy is a limit like any other from then on: what is set for new keys later changes no key that exists.
"""

from __future__ import annotations

import uuid

from sqlalchemy import case, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.models import Quota, QuotaSubject
from metering.tenants.audit import record_change, snapshot

WEIGHTS = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")

COPIED = ("model", "dimension", "limit_value", *WEIGHTS, "enforced", "alert_at")


async def limit_new_key(
    session: AsyncSession, *, api_key_id: uuid.UUID, project_id: uuid.UUID, organization_id: uuid.UUID, actor: str
) -> None:
    """Give a key that nobody has used yet its limits. Where both have one for a dimension and model, the project's holds."""
    kept = select(Quota).where(
        Quota.subject_id.in_((project_id, organization_id)), Quota.for_new_keys.is_(True), Quota.deleted_at.is_(None)
    )
    nearest_last = case((Quota.subject == QuotaSubject.PROJECT, 1), else_=0)
    rows = await session.scalars(kept.order_by(nearest_last, Quota.created_at, Quota.id))
    for template in {(row.model, row.dimension): row for row in rows}.values():
        values = {column: getattr(template, column) for column in COPIED}
        copy = insert(Quota).values(subject=QuotaSubject.API_KEY, subject_id=api_key_id, **values).returning(Quota)
        quota = (await session.scalars(copy)).one()
        await record_change(session, actor=actor, action="quota.set", subject_id=str(quota.id), before=None, after=snapshot(quota))
