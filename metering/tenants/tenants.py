"""Organizations and projects.

Functions take a session and never commit. Every change writes the audit log in the same
transaction.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from typing import TypeVar

from sqlalchemy import and_, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import Organization, Project, Suspension
from metering.core.money import checked_currency

Owner = TypeVar("Owner", Organization, Project)
NAME_FORM = re.compile(r"[a-z][a-z0-9-]{0,62}", re.ASCII)


async def create_organization(
    session: AsyncSession, *, name: str, currency_code: str = "USD", actor: str
) -> Organization:
    """Create an organization. Raises: InvalidValue, AlreadyExists."""
    values = {"name": checked_name(name), "currency_code": checked_currency(currency_code)}
    statement = (
        insert(Organization)
        .values(values)
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(Organization)
    )
    if (organization := await session.scalar(statement)) is None:
        raise AlreadyExists("organization", name)
    await record_creation(session, actor, "organization.create", organization)
    return organization


async def list_organizations(session: AsyncSession) -> Sequence[Organization]:
    return (await session.scalars(select(Organization).order_by(Organization.name))).all()


async def create_project(
    session: AsyncSession, *, organization: str, name: str, actor: str
) -> Project:
    """Create a project in an organization. Raises: NotFound, InvalidValue, AlreadyExists."""
    owner = await find_organization(session, organization)
    await check_open(session, owner)
    values = {"organization_id": owner.id, "name": checked_name(name)}
    statement = (
        insert(Project)
        .values(values)
        .on_conflict_do_nothing(index_elements=["organization_id", "name"])
    )
    project: Project | None = await session.scalar(statement.returning(Project))
    if project is None:
        raise AlreadyExists("project", f"{owner.name}/{name}")
    await record_creation(session, actor, "project.create", project)
    return project


async def list_projects(session: AsyncSession, *, organization: str) -> Sequence[Project]:
    """List the projects of an organization by name. Raises: NotFound."""
    owner = await find_organization(session, organization)
    query = select(Project).where(Project.organization_id == owner.id).order_by(Project.name)
    return (await session.scalars(query)).all()


async def rename_organization(
    session: AsyncSession, *, organization: str, name: str, actor: str
) -> Organization:
    """Rename an organization. Raises: NotFound, InvalidValue, AlreadyExists."""
    return await _rename(session, await find_organization(session, organization), name, actor)


async def rename_project(session: AsyncSession, *, project: str, name: str, actor: str) -> Project:
    """Rename a project within its organization. Raises: NotFound, InvalidValue, AlreadyExists."""
    return await _rename(session, await find_project(session, project), name, actor)


async def _rename(session: AsyncSession, owner: Owner, name: str, actor: str) -> Owner:
    checked_name(name)
    await lock_owner(session, owner)
    before = snapshot(owner)
    if owner.name == name:
        return owner
    kind: type[Owner] = type(owner)
    try:
        async with session.begin_nested():
            await session.execute(update(kind).where(kind.id == owner.id).values(name=name))
    except IntegrityError as error:  # the unique name
        detail = "and keeps its name: choose another one."
        raise AlreadyExists(kind_of(owner), name, detail) from error
    await session.refresh(owner)
    action = f"{kind_of(owner)}.rename"
    await record_change(session, actor, action, str(owner.id), before=before, after=snapshot(owner))
    return owner


def kind_of(owner: Organization | Project) -> str:
    """Return "organization" or "project"."""
    return owner.__tablename__.removesuffix("s")


async def lock_owner(session: AsyncSession, owner: Organization | Project) -> None:
    """Lock a row against other changes until the transaction ends, and read it again."""
    # Not FOR UPDATE: requests admitted concurrently refer to the row and must not wait.
    await session.refresh(owner, with_for_update={"key_share": True})


async def check_open(session: AsyncSession, owner: Organization | Project) -> None:
    """Raise InvalidValue if an organization is closed for good, or a project or its organization.

    Every call that gives an owner something new calls it, within the lock of changes: a closing
    holds that alone.
    """
    own_id, project_id = (
        (owner.id, None) if isinstance(owner, Organization) else (owner.organization_id, owner.id)
    )
    closed = select(Suspension).where(
        Suspension.organization_id == own_id,
        Suspension.closed_at.is_not(None),
        or_(Suspension.project_id.is_(None), Suspension.project_id == project_id),
    )
    if (found := (await session.scalars(closed.limit(1))).first()) is not None:
        kind = "organization" if found.project_id is None else "project"
        raise InvalidValue(
            kind, f"is closed for good since {found.closed_at:%Y-%m-%d}: use another"
        )


async def find_organization(session: AsyncSession, ref: str) -> Organization:
    """Look up an organization by name or id. Raises: NotFound."""
    key = as_uuid(ref)
    if key is None and NAME_FORM.fullmatch(ref) is None:
        raise NotFound("organization", ref)
    condition = Organization.name == ref if key is None else Organization.id == key
    if (organization := await session.scalar(select(Organization).where(condition))) is None:
        raise NotFound("organization", ref)
    return organization


async def find_project(
    session: AsyncSession, ref: str, *, organization: str | None = None
) -> Project:
    """Look up a project by id, name, or "organization/project". Raises: NotFound."""
    shown = f"{organization}/{ref}" if organization else ref
    if not organization:
        organization, _, ref = ref.rpartition("/")
    key = as_uuid(ref)
    if key is None and (NAME_FORM.fullmatch(ref) is None or not organization):
        raise NotFound("project", shown)
    condition = Project.name == ref if key is None else Project.id == key
    if organization:
        condition = and_(
            condition,
            Project.organization_id == (await find_organization(session, organization)).id,
        )
    if (project := await session.scalar(select(Project).where(condition))) is None:
        raise NotFound("project", shown)
    return project


def as_uuid(ref: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(ref)
    except ValueError:
        return None


def checked_name(name: str) -> str:
    """Validate an organization's or project's name. A UUID is refused, as it would be ambiguous."""
    if NAME_FORM.fullmatch(name) is None or as_uuid(name) is not None:
        raise InvalidValue(
            "name", 'must be 1 to 63 of a-z, 0-9 and "-", starting with a letter, and not a UUID'
        )
    return name


async def record_creation(
    session: AsyncSession, actor: str, action: str, row: Organization | Project
) -> None:
    await record_change(
        session,
        actor=actor,
        action=action,
        subject_id=str(row.id),
        before=None,
        after=snapshot(row),
    )


async def organization_names(
    session: AsyncSession, ids: Iterable[uuid.UUID]
) -> dict[uuid.UUID, str]:
    rows = await session.execute(
        select(Organization.id, Organization.name).where(Organization.id.in_(set(ids)))
    )
    return {row.id: row.name for row in rows}


async def project_names(session: AsyncSession, project_ids: Sequence[uuid.UUID]) -> list[str]:
    names = select(Organization.name + "/" + Project.name).select_from(Project).join(Organization)
    return sorted(await session.scalars(names.where(Project.id.in_(project_ids))))
