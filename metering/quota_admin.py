"""Setting, removing and reading quotas. What is charged to them is the business of `holds.py`.

Functions take a session and never commit; every change writes the audit log in the same transaction. Changes to the quotas of one
subject take turns, so the log tells them in the order in which they happened.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from sqlalchemy import Select, and_, case, delete, func, literal, or_, select, tuple_, union_all, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.audit import record_change, snapshot
from metering.errors import InvalidValue, NotFound
from metering.models import ApiKey, Organization, Project, Quota, QuotaCounter, QuotaDimension, QuotaSubject
from metering.operations import QuotaState
from metering.prices import checked_model
from metering.quotas import window_end, window_start
from metering.tenants import as_uuid, find_api_key, find_organization, find_project

LIMIT_MAX = 2**63 - 1  # what the column holds; in picos of money that is some nine million units

SUBJECT_TABLES: dict[QuotaSubject, type[Organization | Project | ApiKey]] = {
    QuotaSubject.ORGANIZATION: Organization,
    QuotaSubject.PROJECT: Project,
    QuotaSubject.API_KEY: ApiKey,
}
SUBJECT_ORDER = list(QuotaSubject)
DIMENSION_ORDER = list(QuotaDimension)
WINDOWED = [dimension for dimension in QuotaDimension if dimension is not QuotaDimension.CONCURRENT_REQUESTS]
PAST_DAYS_KEPT = timedelta(days=2)
PAST_MONTHS_KEPT = timedelta(days=93)


async def set_quota(
    session: AsyncSession,
    *,
    subject: QuotaSubject,
    subject_ref: str,
    model: str = "",
    dimension: QuotaDimension,
    limit_value: int,
    actor: str,
) -> QuotaState:
    """Set one limit. One that stands for the same subject, model and dimension keeps its id, and so what was used of it.

    subject_ref: as in `find_subject`. model: empty for all models together. Raises: NotFound, InvalidValue.
    """
    if not 0 <= limit_value <= LIMIT_MAX:
        raise InvalidValue("limit_value", f"give 0 to {LIMIT_MAX}")
    if model:
        checked_model(model)
    subject_id = await find_subject(session, subject, subject_ref)
    await _lock_subject(session, subject, subject_id)
    standing = and_(Quota.subject_id == subject_id, Quota.model == model, Quota.dimension == dimension, Quota.deleted_at.is_(None))
    old = await session.scalar(select(Quota).where(standing).execution_options(populate_existing=True))
    before = None if old is None else snapshot(old)
    if old is None:
        values = {"subject": subject, "subject_id": subject_id, "model": model, "dimension": dimension}
        quota = (await session.scalars(insert(Quota).values(**values, limit_value=limit_value).returning(Quota))).one()
    else:
        statement = update(Quota).where(Quota.id == old.id).values(limit_value=limit_value).returning(Quota)
        quota = (await session.scalars(statement.execution_options(populate_existing=True))).one()
    after = snapshot(quota)
    if before != after:
        await record_change(session, actor=actor, action="quota.set", subject_id=str(quota.id), before=before, after=after)
    (state,) = await _states(session, select(Quota).where(Quota.id == quota.id))
    return state


async def delete_quota(session: AsyncSession, *, quota_id: str, actor: str) -> None:
    """Remove one limit; requests that run are no longer held to it. Raises: NotFound."""
    key = as_uuid(quota_id)
    quota = None if key is None else await session.get(Quota, key)
    if quota is None:
        raise NotFound("quota", quota_id)
    await _lock_subject(session, QuotaSubject(quota.subject), quota.subject_id)
    await session.refresh(quota)
    if quota.deleted_at is not None:
        raise NotFound("quota", quota_id)
    before = snapshot(quota)
    await session.execute(update(Quota).where(Quota.id == quota.id).values(deleted_at=func.now()))
    await record_change(session, actor=actor, action="quota.delete", subject_id=str(quota.id), before=before, after=None)


async def list_quotas(session: AsyncSession, *, organization: str | None = None) -> list[QuotaState]:
    """All limits, or those of an organization, its projects and their keys; by subject, then dimension. Raises: NotFound."""
    query = select(Quota)
    if organization:
        owner = (await find_organization(session, organization)).id
        projects = select(Project.id).where(Project.organization_id == owner)
        keys = select(ApiKey.id).where(ApiKey.project_id.in_(projects))
        query = query.where(or_(Quota.subject_id == owner, Quota.subject_id.in_(projects), Quota.subject_id.in_(keys)))
    return await _states(session, query)


async def quotas_for(session: AsyncSession, *, subject_ids: Collection[uuid.UUID], model: str | None = None) -> list[QuotaState]:
    """The limits that a request charged to these subjects must pass; for every model if none is given."""
    query = select(Quota).where(Quota.subject_id.in_(subject_ids))
    if model is not None:
        query = query.where(Quota.model.in_(("", model)))
    return await _states(session, query)


async def delete_past_counters(session: AsyncSession) -> int:
    """Delete the counters of windows that ended long ago, of which nothing is held any more; tells how many.

    Long ago is a day after the end of a minute or a day, two months after that of a month: no request runs for so long.
    """
    ages = {dimension: PAST_MONTHS_KEPT if "month" in dimension else PAST_DAYS_KEPT for dimension in WINDOWED}
    ended = or_(*(and_(Quota.dimension == d, QuotaCounter.window_start < func.now() - age) for d, age in ages.items()))
    past = select(QuotaCounter.quota_id, QuotaCounter.window_start).join(Quota).where(ended, QuotaCounter.held == 0)
    key = tuple_(QuotaCounter.quota_id, QuotaCounter.window_start)
    deleted = await session.scalars(delete(QuotaCounter).where(key.in_(past)).returning(QuotaCounter.quota_id))
    return len(deleted.all())


async def find_subject(session: AsyncSession, subject: QuotaSubject, ref: str) -> uuid.UUID:
    """Id of an organization by name or id, of a project by "organization/project" or id, of a key by prefix or id.

    Raises: NotFound.
    """
    match subject:
        case QuotaSubject.ORGANIZATION:
            return (await find_organization(session, ref)).id
        case QuotaSubject.PROJECT:
            return (await find_project(session, ref)).id
        case QuotaSubject.API_KEY:
            return (await find_api_key(session, ref)).id


async def _lock_subject(session: AsyncSession, subject: QuotaSubject, subject_id: uuid.UUID) -> None:
    # FOR NO KEY UPDATE: requests that are admitted at the same time refer to the row and must not wait.
    table = SUBJECT_TABLES[subject]
    await session.execute(select(table.id).where(table.id == subject_id).with_for_update(key_share=True))


async def _states(session: AsyncSession, query: Select[Quota]) -> list[QuotaState]:
    """Live quotas of a query with the counters of the windows that the database's clock is in."""
    now = (await session.scalars(select(func.clock_timestamp()))).one()
    starts = case(*((Quota.dimension == d, literal(window_start(d, now))) for d in QuotaDimension))
    counted = (
        query.where(Quota.deleted_at.is_(None))
        .outerjoin(QuotaCounter, and_(QuotaCounter.quota_id == Quota.id, QuotaCounter.window_start == starts))
        .add_columns(func.coalesce(QuotaCounter.used, 0), func.coalesce(QuotaCounter.held, 0))
    )
    rows = (await session.execute(counted)).all()
    names = await _subject_names(session, {quota.subject_id for quota, _, _ in rows})
    return sorted((_state(quota, used, held, now, names) for quota, used, held in rows), key=_sort_key)


async def _subject_names(session: AsyncSession, subject_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, str]:
    """What people call these organizations, projects ("organization/project") and keys (their prefix)."""
    organizations = select(Organization.id, Organization.name)
    projects = select(Project.id, Organization.name + "/" + Project.name).join(
        Organization, Organization.id == Project.organization_id
    )
    keys = select(ApiKey.id, ApiKey.prefix)
    wanted = (
        organizations.where(Organization.id.in_(subject_ids)),
        projects.where(Project.id.in_(subject_ids)),
        keys.where(ApiKey.id.in_(subject_ids)),
    )
    return {row[0]: row[1] for row in await session.execute(union_all(*wanted))}


def _state(quota: Quota, used: int, held: int, now: datetime, names: Mapping[uuid.UUID, str]) -> QuotaState:
    dimension = QuotaDimension(quota.dimension)
    return QuotaState(
        quota_id=quota.id,
        subject=QuotaSubject(quota.subject),
        subject_id=quota.subject_id,
        model=quota.model,
        dimension=dimension,
        limit_value=quota.limit_value,
        used=used,
        held=held,
        now=now,
        resets_at=window_end(dimension, now),
        subject_name=names.get(quota.subject_id, ""),
    )


def _sort_key(state: QuotaState) -> tuple[int, str, int, str]:
    return SUBJECT_ORDER.index(state.subject), str(state.subject_id), DIMENSION_ORDER.index(state.dimension), state.model
