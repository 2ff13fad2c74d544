"""Organizations and projects, and the regions that organizations are bound to.

The requests of a bound organization run in one region, and nowhere else. Every api process refuses
the calls of an organization that is bound to another region than its own: the authentication of a
key reads the region in the same statement. A change is a command to every process
(`control/live.py`), which ends the requests that began under another binding.

Functions take a session and never commit. Every change writes the audit log in the same
transaction.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from sqlalchemy import Select, and_, delete, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import announce_binding
from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import Organization, OrganizationRegion, Project, Suspension
from metering.core.money import checked_currency
from metering.core.pages import PAGE_SIZE, SortKey, page_of

Owner = TypeVar("Owner", Organization, Project)
REGION_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)  # as in a fleet file
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


async def list_organizations(
    session: AsyncSession,
    *,
    organization: str = "",
    search: str = "",
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[Organization], str]:
    """List a page of organizations by name: those whose names begin with `search`, or one.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    query = select(Organization)
    if organization:
        query = query.where(Organization.id == (await find_organization(session, organization)).id)
    return await _page_by_name(session, query, Organization, search, page_size, page_token)


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


async def list_projects(
    session: AsyncSession,
    *,
    organization: str,
    search: str = "",
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[Project], str]:
    """List a page of the projects of an organization, as `list_organizations` does."""
    owner = await find_organization(session, organization)
    query = select(Project).where(Project.organization_id == owner.id)
    return await _page_by_name(session, query, Project, search, page_size, page_token)


async def _page_by_name(
    session: AsyncSession,
    query: Select[Owner],
    kind: type[Owner],
    search: str,
    page_size: int,
    page_token: str,
) -> tuple[list[Owner], str]:
    query = query.where(kind.name.startswith(search.strip().lower(), autoescape=True))
    key = SortKey(kind.name)
    rows, following = await page_of(session, query, key, page_size=page_size, page_token=page_token)
    return [found for (found,) in rows], following


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


async def organization_regions(
    session: AsyncSession, ids: Collection[uuid.UUID] | None = None
) -> dict[uuid.UUID, str]:
    """Read the regions of bound organizations, all or these, by organization id."""
    query = select(OrganizationRegion.organization_id, OrganizationRegion.region)
    if ids is not None:
        query = query.where(OrganizationRegion.organization_id.in_(ids))
    return {row.organization_id: row.region for row in await session.execute(query)}


async def region_of(session: AsyncSession, organization_id: uuid.UUID) -> str:
    """Read the region that an organization is bound to; empty for none."""
    query = select(OrganizationRegion.region).where(
        OrganizationRegion.organization_id == organization_id
    )
    return await session.scalar(query) or ""


async def bind_organization(
    session: AsyncSession, *, organization: str, region: str, actor: str
) -> Organization:
    """Bind an organization to a region, or to none if `region` is empty.

    Whether the fleet has the region is for the caller to check. Raises: NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    if region and REGION_FORM.fullmatch(region) is None:
        raise InvalidValue("region", "must be a region of the fleet, or empty for none")
    await lock_owner(session, owner)
    before = await region_of(session, owner.id)
    if before == region:
        return owner
    if region:
        bound = insert(OrganizationRegion).values(organization_id=owner.id, region=region)
        await session.execute(
            bound.on_conflict_do_update(index_elements=["organization_id"], set_={"region": region})
        )
    else:
        await session.execute(
            delete(OrganizationRegion).where(OrganizationRegion.organization_id == owner.id)
        )
    await record_change(
        session,
        actor,
        "organization.bind",
        str(owner.id),
        before={"region": before},
        after={"region": region},
    )
    await announce_binding(session, owner.id, region)
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
