"""Suspensions: an organization or project whose requests are refused until it is resumed.

Its keys, limits, usage and bills stay, and calls that do not use models work. Every api process
gets a command that ends the running requests (`control/live.py`); a request that has not begun is
refused by the authentication of its key, which reads the suspensions in the same statement. Only
the operator suspends organizations; what the operator suspended, the organization cannot resume.
A closed owner has a suspension that nothing changes (`metering/closures.py`).
Functions take a session and never commit. The audit log keeps each suspension and its end.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import announce_suspension
from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue
from metering.core.models import Organization, Project, Suspension
from metering.tenants.tenants import (
    check_open,
    find_organization,
    find_project,
    kind_of,
    lock_owner,
)

REASON_CHARS_MAX = 200
OF_OPERATOR = "the operator has suspended it, and only the operator can change that: ask them"


async def suspensions_of_organizations(
    session: AsyncSession, ids: Collection[uuid.UUID] | None = None
) -> dict[uuid.UUID, Suspension]:
    """Read the suspensions of all organizations, or of these, by organization id."""
    query = select(Suspension).where(Suspension.project_id.is_(None))
    if ids is not None:
        query = query.where(Suspension.organization_id.in_(ids))
    rows = await session.scalars(query)
    return {each.organization_id: each for each in rows}


async def suspensions_of_projects(
    session: AsyncSession, project_ids: Collection[uuid.UUID]
) -> dict[uuid.UUID | None, Suspension]:
    """Read the suspensions of these projects, by project id."""
    rows = await session.scalars(
        select(Suspension).where(Suspension.project_id.in_(tuple(project_ids)))
    )
    return {each.project_id: each for each in rows}


async def suspend_organization(
    session: AsyncSession, *, organization: str, reason: str, actor: str
) -> Organization:
    """Suspend an organization, or change the reason. Raises: NotFound, InvalidValue."""
    owner = await find_organization(session, organization)
    await _suspend(session, owner, reason, actor, by_operator=True)
    return owner


async def resume_organization(
    session: AsyncSession, *, organization: str, actor: str
) -> Organization:
    """End the suspension of an organization, if there is one. Raises: NotFound."""
    owner = await find_organization(session, organization)
    await _resume(session, owner, actor, by_operator=True)
    return owner


async def suspend_project(
    session: AsyncSession, *, project: str, reason: str, actor: str, by_operator: bool
) -> Project:
    """Suspend a project, or change the reason; the operator takes over from the organization.

    Raises: NotFound, InvalidValue.
    """
    owner = await find_project(session, project)
    await _suspend(session, owner, reason, actor, by_operator=by_operator)
    return owner


async def resume_project(
    session: AsyncSession, *, project: str, actor: str, by_operator: bool
) -> Project:
    """End the suspension of a project, if there is one. Raises: NotFound, InvalidValue."""
    owner = await find_project(session, project)
    await _resume(session, owner, actor, by_operator=by_operator)
    return owner


async def _suspend(
    session: AsyncSession,
    owner: Organization | Project,
    reason: str,
    actor: str,
    *,
    by_operator: bool,
) -> None:
    values = {"reason": checked_reason(reason), "by_operator": by_operator}
    present = await _present(session, owner, by_operator=by_operator)
    if await write_suspension(session, owner, present, values, f"{kind_of(owner)}.suspend", actor):
        await announce_suspension(session, owner.id, reason.strip(), by_operator=by_operator)


async def write_suspension(
    session: AsyncSession,
    owner: Organization | Project,
    present: Suspension | None,
    values: Mapping[str, object],
    action: str,
    actor: str,
) -> bool:
    """Write the suspension of a locked owner; return whether that changed anything."""
    if present is None:
        before = None
        made = insert(Suspension).values({**_owner_columns(owner), **values}).returning(Suspension)
        suspension = (await session.scalars(made)).one()
    else:
        before, suspension = snapshot(present), present
        for name, value in values.items():
            setattr(suspension, name, value)
        await session.flush()
    if before == (after := snapshot(suspension)):
        return False
    await record_change(session, actor, action, str(owner.id), before=before, after=after)
    return True


def checked_reason(reason: str) -> str:
    """Validate the reason of a suspension or closing. Raises: InvalidValue."""
    if not 1 <= len(reason.strip()) <= REASON_CHARS_MAX or not reason.isprintable():
        raise InvalidValue("reason", f"must have 1 to {REASON_CHARS_MAX} printable characters")
    return reason.strip()


async def _resume(
    session: AsyncSession, owner: Organization | Project, actor: str, *, by_operator: bool
) -> None:
    if (present := await _present(session, owner, by_operator=by_operator)) is None:
        return
    before = snapshot(present)
    await session.execute(delete(Suspension).where(Suspension.id == present.id))
    action = f"{kind_of(owner)}.resume"
    await record_change(session, actor, action, str(owner.id), before=before, after=None)
    await announce_suspension(session, owner.id, "", by_operator=None)


async def _present(
    session: AsyncSession, owner: Organization | Project, *, by_operator: bool
) -> Suspension | None:
    """Lock the owner and read its suspension. Raises: InvalidValue if that may not be changed."""
    await check_open(session, owner)
    present = await locked_suspension(session, owner)
    if present is not None and present.by_operator and not by_operator:
        raise InvalidValue(kind_of(owner), OF_OPERATOR)
    return present


async def locked_suspension(
    session: AsyncSession, owner: Organization | Project
) -> Suspension | None:
    """Lock the owner and read its own suspension."""
    await lock_owner(session, owner)
    query = select(Suspension).where(*_is_of(owner))
    present: Suspension | None = await session.scalar(
        query.execution_options(populate_existing=True)
    )
    return present


def _is_of(owner: Organization | Project) -> tuple[ColumnElement[bool], ...]:
    columns = _owner_columns(owner)
    return (
        Suspension.organization_id == columns["organization_id"],
        Suspension.project_id.is_not_distinct_from(columns["project_id"]),
    )


def _owner_columns(owner: Organization | Project) -> dict[str, object]:
    if isinstance(owner, Organization):
        return {"organization_id": owner.id, "project_id": None}
    return {"organization_id": owner.organization_id, "project_id": owner.id}
