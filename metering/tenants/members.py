"""Members: persons with a role in an organization, and persons as the operator sees them.

Each membership has a bound key (`tenants/authentication.py`), which acts for the person there and
has the role. A member may have keys with secrets too; these own keys have no other role than the
member's. Functions take a session and never commit. Every change writes the audit log in the same
transaction.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import cancel_requests_of_key, recheck_key
from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue, LastOwner, NotFound
from metering.core.models import (
    ApiKey,
    ApiKeyOwner,
    Membership,
    Organization,
    Person,
    Project,
    SignInLink,
    SignInSession,
    record_of,
)
from metering.core.pages import PAGE_SIZE, SortKey, page_of
from metering.tenants.api_keys import (
    KeyOwner,
    KeyRecord,
    change_key,
    create_api_key,
    end_key,
    find_api_key,
    locked_key,
)
from metering.tenants.key_groups import lock_groups
from metering.tenants.key_terms import ROLES, KeyTerms
from metering.tenants.tenants import as_uuid, find_organization

OWNER, DEVELOPER, OPERATOR = "owner", "developer", "operator"
MEMBER_ROLES = (*ROLES, OPERATOR)
# Members for whom models are work; the others only read, or only pay.
USERS_OF_MODELS = frozenset({"owner", "admin", "developer"})
DISPLAY_NAME_CHARS_MAX = 100
LAST_CHAR = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A member: the person, and its membership of one organization. `role` may be "operator".

    Since `deactivated_at` it is inactive: the person is deactivated, or the membership suspended.
    """

    membership_id: uuid.UUID
    person_id: uuid.UUID
    email: str
    display_name: str
    organization_id: uuid.UUID
    organization_name: str
    project_id: uuid.UUID
    project_name: str
    role: str
    api_key_id: uuid.UUID
    key_prefix: str
    created_at: datetime
    deactivated_at: datetime | None


@dataclass(frozen=True, slots=True)
class Removal:
    """Keys that a removal of a member has revoked, and kept: own keys and created ones."""

    revoked: tuple[KeyRecord, ...]
    kept: tuple[KeyRecord, ...]


def terms_of(role: str) -> KeyTerms:
    """Return the terms of a member's keys. Raises: InvalidValue for an unknown role."""
    if role not in MEMBER_ROLES:
        raise InvalidValue("role", f"{role[:20]!r} is not one of {', '.join(MEMBER_ROLES)}")
    if role == OPERATOR:
        return KeyTerms(scopes=("admin",))
    return KeyTerms(scopes=("inference",) if role in USERS_OF_MODELS else (), role=role)


def checked_display_name(name: str) -> str:
    """Validate the name of a person and return it unchanged. Raises: InvalidValue."""
    if not 1 <= len(name.strip()) <= DISPLAY_NAME_CHARS_MAX or not name.isprintable():
        raise InvalidValue(
            "display_name", f"must have 1 to {DISPLAY_NAME_CHARS_MAX} printable characters"
        )
    return name.strip()


async def bound_key_of(
    session: AsyncSession, *, person_id: uuid.UUID, organization_id: uuid.UUID
) -> uuid.UUID | None:
    """Return the id of the bound key that acts for a person in an organization, if any.

    `Authenticator.principal_of_bound_key` takes it once the person is known to be the caller.
    """
    found: uuid.UUID | None = await session.scalar(
        select(Membership.api_key_id).where(
            Membership.person_id == person_id,
            Membership.organization_id == organization_id,
            Membership.removed_at.is_(None),
        )
    )
    return found


async def add_member(
    session: AsyncSession,
    *,
    person: Person,
    project: Project,
    role: str,
    actor: str,
) -> MemberRecord:
    """Make a person a member of the organization of a project. Raises: InvalidValue.

    `project` is that of the bound key: its usage of models counts there, and a developer sees no
    other one. The caller has locked the organization, and knows that the person is not a member.
    """
    key, _ = await create_api_key(
        session,
        organization=str(project.organization_id),
        project=str(project.id),
        name=f"member {person.email}"[:100],
        terms=terms_of(role),
        is_bound=True,
        owner=KeyOwner(person_id=person.id),
        actor=actor,
    )
    membership = Membership(
        person_id=person.id, organization_id=project.organization_id, api_key_id=key.id
    )
    session.add(membership)
    await session.flush()
    await session.refresh(membership)
    member = await find_member(session, str(project.organization_id), str(person.id))
    await record_change(
        session,
        actor,
        "member.create",
        str(membership.id),
        after=snapshot(membership) | {"role": member.role, "project_id": str(project.id)},
    )
    return member


async def find_member(session: AsyncSession, organization: str, ref: str) -> MemberRecord:
    """Look up a member of an organization by e-mail address or id of the person.

    Raises: NotFound.
    """
    owner = await find_organization(session, organization)
    query = _select_members().where(Membership.organization_id == owner.id, _is_person(ref))
    if (row := (await session.execute(query)).one_or_none()) is None:
        raise NotFound("member", ref)
    return _member_record(*row)


async def list_members(
    session: AsyncSession,
    *,
    organization: str,
    search: str = "",
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[MemberRecord], str]:
    """List a page of the members of an organization by e-mail address.

    `search` selects addresses that begin with it. Returns the token of the next page too. Raises:
    NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    query = _select_members().where(Membership.organization_id == owner.id)
    rows, next_token = await _page(session, query, search, page_size, page_token)
    return [_member_record(*row) for row in rows], next_token


async def change_role(
    session: AsyncSession, *, organization: str, member: str, role: str, actor: str
) -> MemberRecord:
    """Give a member another role, and with it the bound key and the own keys that have a role.

    It applies at once, on every server. Own keys that the role does not allow are revoked: those
    for models if the role does not use models, and a developer's in other projects. Raises:
    NotFound; InvalidValue; LastOwner.
    """
    owner = await find_organization(session, organization)
    await lock_groups(session, owner.id)  # serializes all changes of owners
    found = await find_member(session, str(owner.id), member)
    terms = terms_of(role)
    if role == found.role:
        return found
    if OPERATOR in (role, found.role):
        raise InvalidValue(
            "role", "an operator has no other role: remove the member, then invite the person anew"
        )
    await check_owner_remains(session, owner, found)
    for key_id in await _own_keys(session, found):
        key = await locked_key(session, key_id)
        is_elsewhere = role == DEVELOPER and key.project_id != found.project_id
        if is_elsewhere or not (key.role or terms.scopes):
            await end_key(session, key_id, actor)
        if is_elsewhere or not key.role:
            continue
        values = {"scopes": list(terms.scopes), "role": terms.role}
        changed = await change_key(session, key, actor, "api_key.update", **values)
        await recheck_key(session, key.id, changed.allowed_networks)
    changed_member = await find_member(session, str(owner.id), str(found.person_id))
    before, after = (
        {
            "person_id": str(each.person_id),
            "organization_id": str(each.organization_id),
            "role": each.role,
        }
        for each in (found, changed_member)
    )
    await record_change(
        session, actor, "member.update", str(found.membership_id), before=before, after=after
    )
    return changed_member


async def remove_member(
    session: AsyncSession,
    *,
    organization: str,
    member: str,
    revoke_keys: bool | None = None,
    actor: str,
) -> Removal:
    """End a membership, with the keys that belong to the person.

    `revoke_keys` decides about other active keys that the person created in the organization; it is
    required if there are any. Raises: NotFound; InvalidValue; LastOwner.
    """
    owner = await find_organization(session, organization)
    await lock_groups(session, owner.id)
    found = await find_member(session, str(owner.id), member)
    await check_owner_remains(session, owner, found)
    created = await keys_created_by(session, found)
    if created and revoke_keys is None:
        shown = ", ".join(each.prefix for each in created[:5])
        more = f" and {len(created) - 5} more" if len(created) > 5 else ""
        raise InvalidValue(
            "revoke_keys",
            f"must be set, because {found.email} created keys that are active: {shown}{more}."
            " Set it to true to revoke them, or to false to keep them",
        )
    ended = await _own_keys(session, found)
    if revoke_keys:
        ended += [each.id for each in created]
    for key_id in ended:
        await end_key(session, key_id, actor)
    membership = await session.get_one(Membership, found.membership_id)
    before = snapshot(membership)
    await session.execute(
        update(Membership).where(Membership.id == membership.id).values(removed_at=func.now())
    )
    await session.refresh(membership)
    after = snapshot(membership)
    await record_change(
        session, actor, "member.remove", str(membership.id), before=before, after=after
    )
    return Removal(
        tuple([await find_api_key(session, str(each)) for each in ended]),
        () if revoke_keys else tuple(created),
    )


async def suspend_member(
    session: AsyncSession, member: MemberRecord, actor: str, *, is_suspended: bool = True
) -> None:
    """Refuse the keys of a member in this organization and end what runs, or accept them again.

    Idempotent. Sessions that act in this organization only end for good. The caller has locked the
    organization. Raises: LastOwner.
    """
    keys = await _own_keys(session, member)
    if is_suspended:
        owner = await session.get_one(Organization, member.organization_id)
        await check_owner_remains(session, owner, member)
    changing = (
        update(ApiKeyOwner)
        .where(ApiKeyOwner.api_key_id.in_(keys), ApiKeyOwner.suspended_at.is_(None) == is_suspended)
        .values(suspended_at=func.now() if is_suspended else None)
        .returning(ApiKeyOwner.api_key_id)
    )
    changed = (await session.scalars(changing)).all()
    if member.api_key_id not in changed:
        return
    if is_suspended:
        of_member = (
            SignInSession.person_id == member.person_id,
            SignInSession.organization_id == member.organization_id,
            SignInSession.ended_at.is_(None),
        )
        await session.execute(update(SignInSession).where(*of_member).values(ended_at=func.now()))
        for key_id in keys:
            await cancel_requests_of_key(session, key_id)
    before, after = (
        {
            "person_id": str(member.person_id),
            "organization_id": str(member.organization_id),
            "is_active": state,
        }
        for state in (is_suspended, not is_suspended)
    )
    action = "member.suspend" if is_suspended else "member.resume"
    await record_change(
        session, actor, action, str(member.membership_id), before=before, after=after
    )


async def keys_created_by(session: AsyncSession, member: MemberRecord) -> list[KeyRecord]:
    """List the active keys of the organization that the person created and does not own."""
    query = (
        select(ApiKey.id)
        .join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
        .join(Project, Project.id == ApiKey.project_id)
        .where(
            ApiKeyOwner.creator_id == member.person_id,
            ApiKeyOwner.person_id.is_distinct_from(member.person_id),
            Project.organization_id == member.organization_id,
            ApiKey.revoked_at.is_(None),
            or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
        )
        .order_by(ApiKey.created_at, ApiKey.id)
    )
    return [await find_api_key(session, str(each)) for each in await session.scalars(query)]


async def check_owner_remains(
    session: AsyncSession, owner: Organization, member: MemberRecord
) -> None:
    """Raise LastOwner if the member is the only active owner. The organization must be locked."""
    if member.role != OWNER or member.deactivated_at is not None:
        return
    others = select(Membership.id).join(ApiKey, ApiKey.id == Membership.api_key_id)
    others = others.join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
    others = others.join(Person, Person.id == Membership.person_id).where(
        Membership.organization_id == owner.id,
        Membership.person_id != member.person_id,
        Membership.removed_at.is_(None),
        ApiKey.role == OWNER,
        Person.deactivated_at.is_(None),
        ApiKeyOwner.suspended_at.is_(None),
    )
    if await session.scalar(others.limit(1)) is None:
        raise LastOwner(owner.name)


async def _own_keys(session: AsyncSession, member: MemberRecord) -> list[uuid.UUID]:
    """List the active keys that belong to the person in the organization, sorted for locking."""
    query = (
        select(ApiKey.id)
        .join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
        .join(Project, Project.id == ApiKey.project_id)
        .where(
            ApiKeyOwner.person_id == member.person_id,
            Project.organization_id == member.organization_id,
            ApiKey.revoked_at.is_(None),
        )
        .order_by(ApiKey.id)
    )
    return list(await session.scalars(query))


# Persons, above all organizations


async def find_person(session: AsyncSession, ref: str) -> Person:
    """Look up a person by e-mail address or id. Raises: NotFound."""
    if (person := await session.scalar(select(Person).where(_is_person(ref)))) is None:
        raise NotFound("person", ref)
    return person


async def person_id_of(session: AsyncSession, ref: str) -> uuid.UUID | None:
    """Return the id of a person by e-mail address or id; None if there is none."""
    if "@" not in ref and as_uuid(ref) is None:
        return None
    found: uuid.UUID | None = await session.scalar(select(Person.id).where(_is_person(ref)))
    return found


async def list_persons(
    session: AsyncSession, *, search: str = "", page_size: int = PAGE_SIZE, page_token: str = ""
) -> tuple[list[Person], str]:
    """List a page of all persons by e-mail address, as `list_members` does."""
    rows, next_token = await _page(session, select(Person), search, page_size, page_token)
    return [person for (person,) in rows], next_token


async def memberships_of(session: AsyncSession, person_id: uuid.UUID) -> list[MemberRecord]:
    """List the memberships of a person, by name of the organization."""
    query = _select_members().where(Membership.person_id == person_id)
    return [
        _member_record(*row) for row in await session.execute(query.order_by(Organization.name))
    ]


async def rename_person(
    session: AsyncSession, *, person: str, display_name: str, actor: str
) -> Person:
    """Change the name of a person. Raises: NotFound, InvalidValue."""
    return await _change_person(
        session, person, actor, "person.update", display_name=checked_display_name(display_name)
    )


async def deactivate_person(session: AsyncSession, *, person: str, actor: str) -> Person:
    """Refuse all keys of a person, in every organization, and cancel their requests. Idempotent.

    The sessions of the person end, and links that sign it in are refused.
    Keys of service accounts go on. Raises: NotFound; LastOwner, for any organization.
    """
    found = await find_person(session, person)
    memberships = await memberships_of(session, found.id)
    for each in sorted(memberships, key=lambda each: each.organization_id):
        await lock_groups(session, each.organization_id)
    for each in await memberships_of(session, found.id):
        owner = await session.get_one(Organization, each.organization_id)
        await check_owner_remains(session, owner, each)
    if await _set_active(session, found, actor, is_active=False):
        # A reactivation must not bring them back
        of_person = SignInSession.person_id == found.id, SignInSession.ended_at.is_(None)
        await session.execute(update(SignInSession).where(*of_person).values(ended_at=func.now()))
        await session.execute(delete(SignInLink).where(SignInLink.person_id == found.id))
        owned = select(ApiKeyOwner.api_key_id).where(ApiKeyOwner.person_id == found.id)
        for key_id in await session.scalars(owned.order_by(ApiKeyOwner.api_key_id)):
            await cancel_requests_of_key(session, key_id)
    return found


async def reactivate_person(session: AsyncSession, *, person: str, actor: str) -> Person:
    """Accept the keys of a person again, as they were. Idempotent.

    Raises: NotFound; InvalidValue for an erased person.
    """
    found = await find_person(session, person)
    if found.erased_at is not None:
        raise InvalidValue("person", "is erased for ever: invite the person anew")
    await _set_active(session, found, actor, is_active=True)
    return found


async def _set_active(
    session: AsyncSession, person: Person, actor: str, *, is_active: bool
) -> bool:
    """Activate or deactivate a person, with an entry for each organization; False if it was so."""
    await session.refresh(person, with_for_update={"key_share": True})
    if is_active == (person.deactivated_at is None):
        return False
    action = "reactivate" if is_active else "deactivate"
    ended = None if is_active else func.now()
    await _change_person(session, str(person.id), actor, f"person.{action}", deactivated_at=ended)
    for each in await memberships_of(session, person.id):
        before, after = (
            {
                "person_id": str(each.person_id),
                "organization_id": str(each.organization_id),
                "is_active": state,
            }
            for state in (not is_active, is_active)
        )
        subject_id = str(each.membership_id)
        await record_change(
            session, actor, f"member.{action}", subject_id, before=before, after=after
        )
    return True


async def _change_person(
    session: AsyncSession, ref: str, actor: str, action: str, **values: object
) -> Person:
    person = await find_person(session, ref)
    await session.refresh(person, with_for_update={"key_share": True})
    before = snapshot(person)
    await session.execute(update(Person).where(Person.id == person.id).values(**values))
    await session.refresh(person)
    if before != (after := snapshot(person)):
        await record_change(session, actor, action, str(person.id), before=before, after=after)
    return person


def _is_person(ref: str) -> ColumnElement[bool]:
    key = as_uuid(ref)
    return Person.email == ref.strip().lower() if key is None else Person.id == key


def _select_members() -> Select[Membership, Person, Organization, Project, ApiKey, ApiKeyOwner]:
    return (
        select(Membership, Person, Organization, Project, ApiKey, ApiKeyOwner)
        .join(Person, Person.id == Membership.person_id)
        .join(Organization, Organization.id == Membership.organization_id)
        .join(ApiKey, ApiKey.id == Membership.api_key_id)
        .join(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
        .join(Project, Project.id == ApiKey.project_id)
        .where(Membership.removed_at.is_(None))
    )


def _member_record(
    membership: Membership,
    person: Person,
    organization: Organization,
    project: Project,
    key: ApiKey,
    owner: ApiKeyOwner,
) -> MemberRecord:
    return record_of(
        MemberRecord,
        membership,
        membership_id=membership.id,
        email=person.email,
        display_name=person.display_name,
        deactivated_at=person.deactivated_at or owner.suspended_at,
        organization_name=organization.name,
        project_id=project.id,
        project_name=project.name,
        role=key.role or OPERATOR,
        key_prefix=key.prefix,
    )


async def _page(
    session: AsyncSession,
    query: Select[*tuple[Any, ...]],
    search: str,
    page_size: int,
    page_token: str,
) -> tuple[list[Any], str]:
    """Read a page of rows of persons, sorted by the bytes of their addresses."""
    if prefix := search.strip().lower():
        query = query.where(and_(Person.email >= prefix, Person.email < prefix + LAST_CHAR))
    key = SortKey(Person.email)
    return await page_of(session, query, key, page_size=page_size, page_token=page_token)
