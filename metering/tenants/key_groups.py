"""Limits that keys have as members of a group.

A selector `key:GROUP` of an organization or project gives each key of the group a limit: a row with
the selector's terms and its id as `selector_id`. A key's own limit on the same dimension, window
and model wins, and takes its place. The rows are written when a selector, a key's own limit or the
group of a key changes, so that admissions read them like any other limit of a key.

Functions take a session and never commit.
"""

from __future__ import annotations

import uuid
from collections import defaultdict

from sqlalchemy import Select, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.models import (
    QUOTA_TARGET,
    ApiKey,
    Organization,
    Project,
    Quota,
    QuotaSubject,
    QuotaTerms,
    values_of,
)

FOR_KEYS = "key:"  # before the group, in `for_each` of a selector
OVERRIDE = ("override_limit_value", "override_until", "override_reason")
WEIGHTS = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")

Pair = tuple[uuid.UUID, uuid.UUID]  # of a key and a selector


async def lock_groups(session: AsyncSession, organization_id: uuid.UUID) -> None:
    """Serialize changes of the limits that an organization's keys have as members of groups.

    Lock it before the row of a project or key. Admissions do not wait.
    """
    locking = select(Organization.id).where(Organization.id == organization_id)
    await session.execute(locking.with_for_update(key_share=True))


async def align_group_limits(
    session: AsyncSession, organization_id: uuid.UUID, actor: str
) -> list[Quota]:
    """Give each key of an organization the limits of its group, and remove those it has lost.

    Returns the limits whose past usage is still to be counted (`quotas/quota_recount.py`): new ones
    and those whose weights have changed. The caller has locked the groups (`lock_groups`).
    """
    wanted = await _wanted(session, organization_id)
    given = select(Quota).where(
        Quota.subject == QuotaSubject.API_KEY,
        Quota.subject_id.in_(_keys_of(organization_id)),
        Quota.selector_id.is_not(None),
        Quota.deleted_at.is_(None),
    )
    rows = (await session.scalars(given.execution_options(populate_existing=True))).all()
    present = {(row.subject_id, row.selector_id): row for row in rows if row.selector_id}
    uncounted: list[Quota] = []
    changed: defaultdict[uuid.UUID, list[uuid.UUID]] = defaultdict(list)
    for pair, row in sorted(present.items()):
        selector = wanted.pop(pair, None)
        if selector is None:
            before = snapshot(row)
            await _update(session, [row.id], {"deleted_at": func.now()})
            await record_change(session, actor, "quota.delete", str(row.id), before=before)
        elif _terms(row) != _terms(selector):
            changed[selector.id].append(row.id)
            if any(getattr(row, name) != getattr(selector, name) for name in WEIGHTS):
                uncounted.append(row)
    for selector_id, ids in changed.items():
        await _update(session, ids, _terms(await session.get_one(Quota, selector_id)))
    for (key_id, selector_id), selector in sorted(wanted.items()):
        identity = {
            "subject": QuotaSubject.API_KEY,
            "subject_id": key_id,
            "selector_id": selector_id,
        }
        target = dict(zip(QUOTA_TARGET, _target(selector), strict=True))
        statement = insert(Quota).values(identity | target | _terms(selector)).returning(Quota)
        quota = (await session.scalars(statement)).one()
        await record_change(session, actor, "quota.set", str(quota.id), after=snapshot(quota))
        uncounted.append(quota)
    return uncounted


async def _wanted(session: AsyncSession, organization_id: uuid.UUID) -> dict[Pair, Quota]:
    """Find the selectors that concern each key, without those that its own limits replace."""
    owned = select(Project.id).where(Project.organization_id == organization_id)
    projects = (await session.scalars(owned)).all()
    of_groups = select(Quota).where(
        Quota.subject_id.in_((organization_id, *projects)),
        Quota.for_each.startswith(FOR_KEYS),
        Quota.deleted_at.is_(None),
    )
    selectors = (await session.scalars(of_groups.execution_options(populate_existing=True))).all()
    if not selectors:
        return {}
    target = (getattr(Quota, name) for name in QUOTA_TARGET)
    of_keys = select(Quota.subject_id, *target).where(
        Quota.subject_id.in_(_keys_of(organization_id)),
        Quota.selector_id.is_(None),
        Quota.deleted_at.is_(None),
    )
    own = {tuple(row) for row in await session.execute(of_keys)}
    groups = {each.for_each.removeprefix(FOR_KEYS) for each in selectors}
    members = select(ApiKey.id, ApiKey.project_id, ApiKey.group).where(
        ApiKey.project_id.in_(projects), ApiKey.group.in_(groups), ApiKey.revoked_at.is_(None)
    )
    return {
        (key_id, each.id): each
        for key_id, project_id, group in await session.execute(members)
        for each in selectors
        if each.for_each == FOR_KEYS + group
        and each.subject_id in (organization_id, project_id)
        and (key_id, *_target(each)) not in own
    }


def _keys_of(organization_id: uuid.UUID) -> Select[uuid.UUID]:
    owned = select(ApiKey.id).join(Project, Project.id == ApiKey.project_id)
    return owned.where(Project.organization_id == organization_id)


def _target(quota: Quota) -> tuple[object, ...]:
    return tuple(getattr(quota, name) for name in QUOTA_TARGET)


def _terms(quota: Quota) -> dict[str, object]:
    return values_of(QuotaTerms, quota) | {name: getattr(quota, name) for name in OVERRIDE}


async def _update(
    session: AsyncSession, quota_ids: list[uuid.UUID], values: dict[str, object]
) -> None:
    """Set columns of limits that this session has loaded."""
    statement = update(Quota).where(Quota.id.in_(quota_ids)).values(**values).returning(Quota)
    (await session.scalars(statement.execution_options(populate_existing=True))).all()
