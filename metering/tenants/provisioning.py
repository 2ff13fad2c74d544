"""Users and groups that the identity provider of an organization provisions, and their members.

A provisioned user is known in its organization only. What its provider says of it changes no row of
a person. The user gets a person when a caller signs in with its address, verified by a provider of
the operator (`admit_person`), or at once if that person is a member already. From then on, state
and groups of the user decide about the membership. Functions take a session and never commit. Every
change locks the row of the organization, so changes of one group come one after the other.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import ColumnElement, SQLColumnExpression, and_, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import (
    GroupMembership,
    Person,
    ScimGroup,
    ScimGroupMember,
    ScimGroupRole,
    ScimUser,
    record_of,
)
from metering.core.pages import PAGE_SIZE, check_page_size, page_values
from metering.core.pages import page_token as token_of
from metering.tenants.invitations import project_for_member
from metering.tenants.key_groups import lock_groups
from metering.tenants.key_terms import ROLES
from metering.tenants.members import (
    DEVELOPER,
    OPERATOR,
    MemberRecord,
    add_member,
    change_role,
    find_member,
    remove_member,
    suspend_member,
)
from metering.tenants.tenants import check_open, find_organization

SYSTEM = "system"
MEMBERS_MAX = 20_000  # of a group: more would be a response of several megabytes
LISTED_IDS_MAX = 100  # in an audit entry
GROUP_NAME_CHARS_MAX = 255

log = structlog.get_logger(__name__)

# Ids are one text parameter, whatever their number: a driver takes 10 ms for an array of 10,000.
IDS = "CAST(string_to_array(:ids, ',') AS uuid[])"
OWN_USERS = (
    f"SELECT id FROM scim_users WHERE organization_id = :organization_id AND id = ANY({IDS})"
)
UNKNOWN = text(f"SELECT id FROM unnest({IDS}) id WHERE id NOT IN ({OWN_USERS}) LIMIT 1")
CHANGED = "SELECT coalesce(string_agg(CAST(user_id AS text), ','), '') FROM changed"
ADD = text(f"""
WITH changed AS (
    INSERT INTO scim_group_members (group_id, user_id) SELECT :group_id, id FROM ({OWN_USERS}) u
    ON CONFLICT DO NOTHING RETURNING user_id)
{CHANGED}
""")
REMOVE = text(f"""
WITH changed AS (
    DELETE FROM scim_group_members WHERE group_id = :group_id AND user_id = ANY({IDS})
    RETURNING user_id)
{CHANGED}
""")
KEEP_ONLY = text(f"""
WITH changed AS (
    DELETE FROM scim_group_members WHERE group_id = :group_id AND user_id <> ALL({IDS})
    RETURNING user_id)
{CHANGED}
""")
MEMBER_IDS = text(
    "SELECT coalesce(string_agg(CAST(user_id AS text), ','), '') FROM scim_group_members"
    " WHERE group_id = :group_id"
)
# JSON is built by the database: reading 10,000 rows would hold the event loop for long.
MEMBERS_JSON = text("""
SELECT m.group_id,
       CAST(json_agg(json_build_object('value', m.user_id,
           '$ref', CAST(:users_url AS text) || m.user_id) ORDER BY m.user_id) AS text)
FROM scim_group_members m
WHERE m.group_id = ANY(:group_ids)
GROUP BY m.group_id
""")
GROUPS_JSON = text("""
SELECT m.user_id,
       CAST(json_agg(json_build_object('value', g.id, 'display', g.display_name, 'type', 'direct',
           '$ref', CAST(:groups_url AS text) || g.id) ORDER BY g.id) AS text)
FROM scim_group_members m JOIN scim_groups g ON g.id = m.group_id
WHERE m.user_id = ANY(:user_ids)
GROUP BY m.user_id
""")
# Users whose membership is not what their state and groups say, with the role that these give. A
# person with several roles has the widest. `k.role` is empty for operators.
MISALIGNED = text(f"""
SELECT u.id, r.role, r.project_id
FROM scim_users u
LEFT JOIN LATERAL (
    SELECT given.role, given.project_id
    FROM scim_group_members m
    JOIN scim_groups g ON g.id = m.group_id
    JOIN scim_group_roles given
        ON given.organization_id = g.organization_id AND given.name_key = g.name_key
    WHERE m.user_id = u.id
    ORDER BY array_position(CAST(:roles AS text[]), given.role), given.created_at, given.name_key
    LIMIT 1) r ON true
LEFT JOIN memberships b
    ON b.organization_id = u.organization_id AND b.person_id = u.person_id
    AND b.removed_at IS NULL
LEFT JOIN api_keys k ON k.id = b.api_key_id
LEFT JOIN api_key_owners o ON o.api_key_id = k.id
WHERE u.organization_id = :organization_id AND u.person_id IS NOT NULL
    AND (CAST(:ids AS text) IS NULL OR u.id = ANY({IDS}))
    AND CASE
        WHEN b.id IS NULL THEN u.is_active AND r.role IS NOT NULL
        WHEN k.role = '' THEN NOT u.is_active
        ELSE (o.suspended_at IS NULL) <> u.is_active
            OR (r.role IS NULL AND u.has_role)
            OR (r.role IS NOT NULL AND (
                NOT u.has_role OR k.role <> r.role
                OR (r.role = '{DEVELOPER}' AND k.project_id <> r.project_id)))
        END
ORDER BY u.id
""")

# Groups that exist or have a role, by name
GROUPS = text("""
SELECT s.id AS group_id, coalesce(s.display_name, r.name) AS "group",
       coalesce(r.role, '') AS role, r.project_id, p.name AS project_name,
       coalesce(s.name_key, r.name_key) AS name_key,
       (SELECT count(*) FROM scim_group_members m WHERE m.group_id = s.id) AS member_count
FROM (SELECT * FROM scim_groups WHERE organization_id = :organization_id) s
FULL JOIN (SELECT * FROM scim_group_roles WHERE organization_id = :organization_id) r
    ON r.name_key = s.name_key
LEFT JOIN projects p ON p.id = r.project_id
WHERE coalesce(s.name_key, r.name_key) > :after
    AND (CAST(:name_key AS text) IS NULL OR coalesce(s.name_key, r.name_key) = :name_key)
ORDER BY coalesce(s.name_key, r.name_key)
LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class UserTerms:
    """Statement of a provider about a user. `attributes` has `displayName`, `name`, `emails`."""

    user_name: str
    external_id: str | None
    is_active: bool
    attributes: Mapping[str, Any]

    @property
    def email(self) -> str | None:
        """Address by which the person is found: the primary one, the first one, or the name."""
        emails = self.attributes.get("emails", ())
        primary = next((each for each in emails if each.get("primary")), None)
        chosen = (primary or (emails[0] if emails else {})).get("value", self.user_name)
        address = str(chosen).strip().lower()
        return address if "@" in address else None

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "user_name": self.user_name,
            "user_name_key": self.user_name.casefold(),
            "external_id": self.external_id,
            "email": self.email,
            "attributes": dict(self.attributes),
            "is_active": self.is_active,
        }


def terms_of_user(user: ScimUser) -> UserTerms:
    return UserTerms(user.user_name, user.external_id, user.is_active, user.attributes)


@dataclass(frozen=True, slots=True)
class MemberChange:
    """Change of the members of a group: "add" or "remove" users, or "replace" all by these."""

    operator: str
    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """Name, id at the provider, and changes of the members, in order."""

    display_name: str
    external_id: str | None
    changes: Sequence[MemberChange] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoleRecord:
    """A group by name, with the role that it gives: empty for none. It may not be provisioned yet.

    The project is that of the members' keys; None for the oldest one.
    """

    group: str
    group_id: uuid.UUID | None = None
    member_count: int = 0
    role: str = ""
    project_id: uuid.UUID | None = None
    project_name: str | None = None


# Users


async def create_user(
    session: AsyncSession, organization_id: uuid.UUID, terms: UserTerms, actor: str
) -> ScimUser:
    """Create a user. Raises: AlreadyExists for a name or address that another user has."""
    await lock_groups(session, organization_id)
    member = await _member_with_address(session, organization_id, terms.email)
    made = await session.scalar(
        insert(ScimUser)
        .values(
            organization_id=organization_id,
            person_id=None if member is None else member.person_id,
            **terms.columns,
        )
        .on_conflict_do_nothing()
        .returning(ScimUser)
    )
    if made is None:
        raise AlreadyExists("user", terms.user_name, "with this userName or address")
    await record_change(
        session, actor, "scim_user.create", str(made.id), before=None, after=snapshot(made)
    )
    await _align(session, organization_id, actor, {str(made.id)})
    return await find_user(session, organization_id, made.id)


async def find_user(
    session: AsyncSession, organization_id: uuid.UUID, user_id: uuid.UUID
) -> ScimUser:
    """Look up a user. Raises: NotFound."""
    query = select(ScimUser).where(
        ScimUser.organization_id == organization_id, ScimUser.id == user_id
    )
    found = await session.scalar(query.execution_options(populate_existing=True))
    if found is None:
        raise NotFound("user", str(user_id))
    return found


async def update_user(
    session: AsyncSession,
    organization_id: uuid.UUID,
    user_id: uuid.UUID,
    changed: Callable[[ScimUser], Awaitable[UserTerms]],
    actor: str,
) -> ScimUser:
    """Change a user to what `changed` makes of it. Raises: NotFound, AlreadyExists, LastOwner.

    Other changes of the organization's users wait meanwhile.
    """
    await lock_groups(session, organization_id)
    user = await find_user(session, organization_id, user_id)
    terms = await changed(user)
    if terms != terms_of_user(user):
        await _check_free(session, user, terms)
        before = snapshot(user)
        values: dict[str, Any] = terms.columns
        if user.person_id is None and terms.email != user.email:
            member = await _member_with_address(session, organization_id, terms.email)
            values["person_id"] = None if member is None else member.person_id
        await _set(session, user, **values, version=ScimUser.version + 1, changed_at=func.now())
        await record_change(
            session, actor, "scim_user.update", str(user.id), before=before, after=snapshot(user)
        )
    await _align(session, organization_id, actor, {str(user.id)})
    return await find_user(session, organization_id, user_id)


async def delete_user(
    session: AsyncSession,
    organization_id: uuid.UUID,
    user_id: uuid.UUID,
    check: Callable[[ScimUser], None],
    actor: str,
) -> None:
    """Delete a user, and end its membership. `check` may refuse. Raises: NotFound, LastOwner."""
    await lock_groups(session, organization_id)
    user = await find_user(session, organization_id, user_id)
    check(user)
    if (member := await _member_of(session, user)) is not None:
        _check_no_operator(member)
        await _remove(session, member, actor)
    await session.execute(delete(ScimGroupMember).where(ScimGroupMember.user_id == user.id))
    await session.execute(delete(ScimUser).where(ScimUser.id == user.id))
    await record_change(session, actor, "scim_user.delete", str(user.id), before=snapshot(user))


async def list_users(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    where: ColumnElement[bool] | None,
    order: Sequence[SQLColumnExpression[Any]],
    offset: int,
    limit: int,
) -> tuple[int, Sequence[ScimUser]]:
    """Return the number of users that fulfil a condition, and some of them."""
    query = select(ScimUser).where(ScimUser.organization_id == organization_id)
    if where is not None:
        query = query.where(where)
    count = await session.scalar(select(func.count()).select_from(query.subquery()))
    ordered = query.order_by(*order, ScimUser.created_at, ScimUser.id).offset(offset).limit(limit)
    return count or 0, (await session.scalars(ordered)).all() if limit else ()


async def groups_json(
    session: AsyncSession, users: Collection[ScimUser], groups_url: str
) -> dict[uuid.UUID, str]:
    """Return the groups of users as JSON of SCIM, by id of the user."""
    values = {"user_ids": [each.id for each in users], "groups_url": groups_url}
    return {row[0]: row[1] for row in await session.execute(GROUPS_JSON, values)}


async def _check_free(session: AsyncSession, user: ScimUser, terms: UserTerms) -> None:
    """Raise AlreadyExists if another user of the organization has the name or address."""
    named = ScimUser.user_name_key == terms.user_name.casefold()
    is_taken = named if terms.email is None else named | (ScimUser.email == terms.email)
    others = select(ScimUser.id).where(
        ScimUser.organization_id == user.organization_id, ScimUser.id != user.id, is_taken
    )
    if await session.scalar(others.limit(1)) is not None:
        raise AlreadyExists("user", terms.user_name, "with this userName or address")


async def _set(session: AsyncSession, user: ScimUser, **values: Any) -> None:
    await session.execute(update(ScimUser).where(ScimUser.id == user.id).values(**values))
    await session.refresh(user)


# Memberships


async def _member_with_address(
    session: AsyncSession, organization_id: uuid.UUID, email: str | None
) -> MemberRecord | None:
    """Return the member with an address that no user has yet, if any."""
    if email is None:
        return None
    try:
        member = await find_member(session, str(organization_id), email)
    except NotFound:
        return None
    taken = select(ScimUser.id).where(
        ScimUser.organization_id == organization_id, ScimUser.person_id == member.person_id
    )
    return member if await session.scalar(taken) is None else None


async def _member_of(session: AsyncSession, user: ScimUser) -> MemberRecord | None:
    if user.person_id is None:
        return None
    try:
        return await find_member(session, str(user.organization_id), str(user.person_id))
    except NotFound:
        return None


def _check_no_operator(member: MemberRecord) -> None:
    if member.role == OPERATOR:
        raise InvalidValue(
            "active",
            f"{member.email} is an operator of the service, whom an organization cannot deactivate:"
            " ask another operator to remove the member",
        )


async def _align(
    session: AsyncSession,
    organization_id: uuid.UUID,
    actor: str,
    user_ids: Collection[str] | None = None,
) -> None:
    """Make the memberships of users those that their state and their groups give.

    Without `user_ids`, of all users of the organization, which is locked. Raises: LastOwner;
    InvalidValue for an operator, or for a role in a closed project.
    """
    values = {
        "organization_id": organization_id,
        "roles": list(ROLES),
        "ids": None if user_ids is None else ",".join(user_ids),
    }
    for user_id, role, project_id in (await session.execute(MISALIGNED, values)).all():
        user = await find_user(session, organization_id, user_id)
        await _align_user(session, user, role, project_id, actor)


async def _align_user(
    session: AsyncSession,
    user: ScimUser,
    role: str | None,
    project_id: uuid.UUID | None,
    actor: str,
) -> None:
    member = await _member_of(session, user)
    if member is not None:
        _check_no_operator(member)
        is_elsewhere = role == DEVELOPER and project_id not in (None, member.project_id)
        if is_elsewhere or (role is None and user.has_role):
            await _remove(session, member, actor)
            member = None
    if member is None and role is not None and user.is_active:
        member = await _add(session, user, role, project_id, actor)
    elif member is not None and role not in (None, member.role):
        assert role is not None
        await change_role(
            session,
            organization=str(user.organization_id),
            member=str(user.person_id),
            role=role,
            actor=actor,
        )
    await _set(session, user, has_role=role is not None and member is not None)
    if member is None:
        return
    if role is not None:  # groups of a sign-in do not change it any more
        made = GroupMembership.membership_id == member.membership_id
        await session.execute(delete(GroupMembership).where(made))
    await suspend_member(session, member, actor, is_suspended=not user.is_active)


async def _add(
    session: AsyncSession, user: ScimUser, role: str, project_id: uuid.UUID | None, actor: str
) -> MemberRecord:
    owner = await find_organization(session, str(user.organization_id))
    project = await project_for_member(session, owner, str(project_id or ""))
    await check_open(session, project)
    person = await session.get_one(Person, user.person_id)
    return await add_member(session, person=person, project=project, role=role, actor=actor)


async def _remove(session: AsyncSession, member: MemberRecord, actor: str) -> None:
    """End a membership. Keys that the person created for programs stay, as at a sign-in."""
    made = GroupMembership.membership_id == member.membership_id
    await session.execute(delete(GroupMembership).where(made))
    await remove_member(
        session,
        organization=str(member.organization_id),
        member=str(member.person_id),
        revoke_keys=False,
        actor=actor,
    )


# Persons who sign in


async def organizations_waiting(session: AsyncSession, email: str) -> list[uuid.UUID]:
    """List the organizations that give an address a role, by users that have no person yet."""
    query = (
        select(ScimUser.organization_id)
        .distinct()
        .join(ScimGroupMember, ScimGroupMember.user_id == ScimUser.id)
        .join(ScimGroup, ScimGroup.id == ScimGroupMember.group_id)
        .join(
            ScimGroupRole,
            and_(
                ScimGroupRole.organization_id == ScimGroup.organization_id,
                ScimGroupRole.name_key == ScimGroup.name_key,
            ),
        )
        .where(ScimUser.email == email, ScimUser.person_id.is_(None), ScimUser.is_active)
    )
    return list(await session.scalars(query)) if email else []


async def admit_person(
    session: AsyncSession, person: Person, email: str, organization_ids: Collection[uuid.UUID]
) -> None:
    """Give users with a verified address their person, who becomes a member by their groups.

    The caller has locked the organizations and the person.
    """
    still = set(await organizations_waiting(session, email)) & set(organization_ids)
    for organization_id in sorted(still):
        taken = select(ScimUser.id).where(
            ScimUser.organization_id == organization_id, ScimUser.person_id == person.id
        )
        if await session.scalar(taken) is not None:
            continue
        waiting = select(ScimUser).where(
            ScimUser.organization_id == organization_id, ScimUser.email == email
        )
        user = (await session.scalars(waiting)).one()
        user_id = str(user.id)  # a rollback expires the row
        try:
            async with session.begin_nested():
                before = snapshot(user)
                await _set(session, user, person_id=person.id)
                after = snapshot(user)
                await record_change(
                    session, SYSTEM, "scim_user.identify", user_id, before=before, after=after
                )
                await _align(session, organization_id, SYSTEM, {user_id})
        except (InvalidValue, NotFound) as error:  # the organization or project is closed
            log.warning("scim_user_not_admitted", user_id=user_id, cause=str(error))


# Groups


async def create_group(
    session: AsyncSession, organization_id: uuid.UUID, terms: GroupTerms, actor: str
) -> ScimGroup:
    """Create a group. Raises: AlreadyExists, InvalidValue for an unknown member, LastOwner."""
    await lock_groups(session, organization_id)
    made: ScimGroup | None = await session.scalar(
        insert(ScimGroup)
        .values(
            organization_id=organization_id,
            display_name=terms.display_name,
            name_key=terms.display_name.casefold(),
            external_id=terms.external_id,
        )
        .on_conflict_do_nothing()
        .returning(ScimGroup)
    )
    if made is None:
        raise AlreadyExists("group", terms.display_name)
    added, removed = await _change_members(session, made, terms.changes)
    await _record_group(session, actor, "create", made, None, added, removed)
    await _align(session, organization_id, actor, added | removed)
    return made


async def find_group(
    session: AsyncSession, organization_id: uuid.UUID, group_id: uuid.UUID
) -> ScimGroup:
    """Look up a group. Raises: NotFound."""
    query = select(ScimGroup).where(
        ScimGroup.organization_id == organization_id, ScimGroup.id == group_id
    )
    found = await session.scalar(query.execution_options(populate_existing=True))
    if found is None:
        raise NotFound("group", str(group_id))
    return found


async def update_group(
    session: AsyncSession,
    organization_id: uuid.UUID,
    group_id: uuid.UUID,
    changed: Callable[[ScimGroup], Awaitable[GroupTerms]],
    actor: str,
) -> ScimGroup:
    """Change a group to what `changed` makes of it.

    Raises: NotFound, AlreadyExists, LastOwner; InvalidValue for an unknown member.
    """
    await lock_groups(session, organization_id)
    group = await find_group(session, organization_id, group_id)
    terms = await changed(group)
    before, key = snapshot(group), terms.display_name.casefold()
    is_renamed = key != group.name_key
    if is_renamed:
        others = select(ScimGroup.id).where(
            ScimGroup.organization_id == organization_id, ScimGroup.name_key == key
        )
        if await session.scalar(others) is not None:
            raise AlreadyExists("group", terms.display_name)
    added, removed = await _change_members(session, group, terms.changes)
    own = (terms.display_name, terms.external_id)
    if own != (group.display_name, group.external_id) or added or removed:
        values = {
            "display_name": terms.display_name,
            "name_key": key,
            "external_id": terms.external_id,
            "version": ScimGroup.version + 1,
            "changed_at": func.now(),
        }
        await session.execute(update(ScimGroup).where(ScimGroup.id == group.id).values(values))
        await session.refresh(group)
        await _record_group(session, actor, "update", group, before, added, removed)
    affected = added | removed
    if is_renamed:  # another role, or none
        affected |= await _ids(session, MEMBER_IDS, group_id=group.id)
    await _align(session, organization_id, actor, affected)
    return group


async def delete_group(
    session: AsyncSession,
    organization_id: uuid.UUID,
    group_id: uuid.UUID,
    check: Callable[[ScimGroup], None],
    actor: str,
) -> None:
    """Delete a group; members lose its role. `check` may refuse. Raises: NotFound, LastOwner."""
    await lock_groups(session, organization_id)
    group = await find_group(session, organization_id, group_id)
    check(group)
    nobody = [MemberChange("replace", frozenset())]
    _, removed = await _change_members(session, group, nobody)
    await session.execute(delete(ScimGroup).where(ScimGroup.id == group.id))
    await _record_group(session, actor, "delete", None, snapshot(group), set(), removed)
    await _align(session, organization_id, actor, removed)


async def list_groups(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    where: ColumnElement[bool] | None,
    order: Sequence[SQLColumnExpression[Any]],
    offset: int,
    limit: int,
) -> tuple[int, Sequence[ScimGroup]]:
    """Return the number of groups that fulfil a condition, and some of them."""
    query = select(ScimGroup).where(ScimGroup.organization_id == organization_id)
    if where is not None:
        query = query.where(where)
    count = await session.scalar(select(func.count()).select_from(query.subquery()))
    ordered = query.order_by(*order, ScimGroup.created_at, ScimGroup.id)
    found = await session.scalars(ordered.offset(offset).limit(limit)) if limit else None
    return count or 0, () if found is None else found.all()


async def members_json(
    session: AsyncSession, groups: Sequence[ScimGroup], users_url: str
) -> dict[uuid.UUID, str]:
    """Return the members of groups as JSON of SCIM, by id of the group.

    Groups beyond the first `MEMBERS_MAX` members are left out, but never the first group.
    """
    counts = select(ScimGroupMember.group_id, func.count()).where(
        ScimGroupMember.group_id.in_([each.id for each in groups])
    )
    sizes: dict[uuid.UUID, int] = {
        row[0]: row[1] for row in await session.execute(counts.group_by(ScimGroupMember.group_id))
    }
    found: dict[uuid.UUID, str] = {}
    total = 0
    for group in groups:
        total += sizes.get(group.id, 0)
        if found and total > MEMBERS_MAX:
            break
        found[group.id] = "[]"
    values = {"group_ids": list(found), "users_url": users_url}
    found |= {row[0]: row[1] for row in await session.execute(MEMBERS_JSON, values)}
    return found


async def _ids(session: AsyncSession, statement: Any, **values: Any) -> set[str]:
    joined: str = (await session.execute(statement, values)).scalar_one()
    return set(joined.split(",")) if joined else set()


async def _change_members(
    session: AsyncSession, group: ScimGroup, changes: Sequence[MemberChange]
) -> tuple[set[str], set[str]]:
    """Change the members of a group; return the ids of new and of former members.

    Raises: InvalidValue for an unknown user, or for too many.
    """
    added: set[str] = set()
    removed: set[str] = set()
    for change in changes:
        values = {
            "organization_id": group.organization_id,
            "group_id": group.id,
            "ids": ",".join(change.ids),
        }
        left, joined = set(), set()
        if change.operator == "remove":
            left = await _ids(session, REMOVE, **values)
        else:
            unknown = await session.scalar(UNKNOWN, values) if change.ids else None
            if unknown is not None:
                raise InvalidValue("members", f"there is no user {unknown}: create it first")
            if change.operator == "replace":
                left = await _ids(session, KEEP_ONLY, **values)
            joined = await _ids(session, ADD, **values)
        removed, added = removed | (left - added), added - left
        removed, added = removed - joined, added | (joined - removed)
    if added:
        count = select(func.count()).where(ScimGroupMember.group_id == group.id)
        if ((await session.scalar(count)) or 0) > MEMBERS_MAX:
            raise InvalidValue(
                "members", f"a group has at most {MEMBERS_MAX:,} members: divide the group"
            )
    return added, removed


async def _record_group(
    session: AsyncSession,
    actor: str,
    action: str,
    group: ScimGroup | None,
    before: dict[str, Any] | None,
    added: Collection[str],
    removed: Collection[str],
) -> None:
    """Write the audit entry of a group, which lists the first ids only."""
    members = {
        "added_count": len(added),
        "removed_count": len(removed),
        "added": sorted(added)[:LISTED_IDS_MAX],
        "removed": sorted(removed)[:LISTED_IDS_MAX],
    }
    after = None if group is None else snapshot(group) | members
    if group is None and before is not None:
        before = before | members
    subject_id = (after or before or {})["id"]
    await record_change(
        session, actor, f"scim_group.{action}", subject_id, before=before, after=after
    )


# Roles of groups


async def set_group_role(
    session: AsyncSession,
    *,
    organization: str,
    group: str,
    role: str,
    project: str = "",
    actor: str,
) -> GroupRoleRecord:
    """Let the group with a name give a role, or none; its members have it at once.

    Raises: NotFound; InvalidValue; LastOwner.
    """
    owner = await find_organization(session, organization)
    await lock_groups(session, owner.id)
    name = checked_group_name(group)
    if role and role not in ROLES:
        raise InvalidValue("role", f"{role[:20]!r} is not one of {', '.join(ROLES)}, or empty")
    if project and not role:
        raise InvalidValue("project", "needs a role: set one, or leave the project out")
    within = await project_for_member(session, owner, project) if project else None
    key = {"organization_id": owner.id, "name_key": name.casefold()}
    query = select(ScimGroupRole).filter_by(**key)
    earlier = await session.scalar(query)
    before = None if earlier is None else snapshot(earlier)
    values = {"name": name, "role": role, "project_id": within and within.id}
    if not role:
        await session.execute(delete(ScimGroupRole).filter_by(**key))
        after = None
    else:
        setting = insert(ScimGroupRole).values(**key, **values)
        setting = setting.on_conflict_do_update(
            index_elements=["organization_id", "name_key"], set_=values
        )
        await session.execute(setting)
        refreshed = query.execution_options(populate_existing=True)
        after = snapshot((await session.scalars(refreshed)).one())
    if before != after:
        await record_change(
            session, actor, "scim_group_role.set", str(owner.id), before=before, after=after
        )
    await _align(session, owner.id, actor)
    found = await _groups_of(session, owner.id, limit=1, name_key=name.casefold())
    return found[0] if found else GroupRoleRecord(group=name)


async def list_provisioned_groups(
    session: AsyncSession, *, organization: str, page_size: int = PAGE_SIZE, page_token: str = ""
) -> tuple[list[GroupRoleRecord], str]:
    """List a page of the groups of an organization and of the roles set for others, by name.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    check_page_size(page_size)
    owner = await find_organization(session, organization)
    after = page_values(page_token, str)[0] if page_token else ""
    found = await _groups_of(session, owner.id, after=after, limit=page_size + 1)
    page = found[:page_size]
    return page, token_of(page[-1].group.casefold()) if len(found) > page_size else ""


def checked_group_name(name: str) -> str:
    """Validate the name of a group and return it. Raises: InvalidValue."""
    name = name.strip()
    if not 1 <= len(name) <= GROUP_NAME_CHARS_MAX or not name.isprintable():
        raise InvalidValue("group", f"must have 1 to {GROUP_NAME_CHARS_MAX} printable characters")
    return name


async def _groups_of(
    session: AsyncSession,
    organization_id: uuid.UUID,
    *,
    limit: int,
    after: str = "",
    name_key: str | None = None,
) -> list[GroupRoleRecord]:
    values = {"organization_id": organization_id, "after": after, "name_key": name_key}
    rows = await session.execute(GROUPS, values | {"limit": limit})
    return [record_of(GroupRoleRecord, row) for row in rows]
