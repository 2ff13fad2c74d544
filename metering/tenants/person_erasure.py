"""Erasure of a person: its description leaves the database, and its acts stay under its id.

The row of the person stays, with an address in no real domain. So do its memberships and keys, all
ended, because usage, ledger and audit log refer to them by id. Functions take a session and never
commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, delete, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change
from metering.core.models import (
    ApiKey,
    ApiKeyOwner,
    Invitation,
    Person,
    ScimGroupMember,
    ScimUser,
    SignInLink,
    SignInSession,
)
from metering.tenants.invitations import revoke_invitation
from metering.tenants.key_groups import lock_groups
from metering.tenants.members import find_person, memberships_of, remove_member

ERASED = "erased"
# The log may have millions of entries
LONG_STATEMENTS = text("SET LOCAL statement_timeout = '300s'")

ERASE_ENTRIES = text("""
WITH subjects AS (
    SELECT CAST(CAST(:person_id AS uuid) AS text) AS id
    UNION ALL SELECT CAST(id AS text) FROM memberships WHERE person_id = :person_id
    UNION ALL SELECT CAST(api_key_id AS text) FROM api_key_owners WHERE person_id = :person_id
    UNION ALL SELECT CAST(id AS text) FROM invitations WHERE email = :email)
UPDATE audit_log SET before = without_person(before), after = without_person(after)
WHERE (subject_id IN (SELECT id FROM subjects)
       OR action LIKE 'scim_user.%' AND (
           before ->> 'email' = :email OR after ->> 'email' = :email
           OR coalesce(after, before) ->> 'person_id' = CAST(CAST(:person_id AS uuid) AS text)))
    AND (before, after) IS DISTINCT FROM (without_person(before), without_person(after))
RETURNING id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedPerson:
    """An erased person, and the numbers of rows of it that ended, or lost what describes it.

    `organizations` are the names of those that it was a member of.
    """

    person_id: uuid.UUID
    organizations: Sequence[str]
    key_count: int
    session_count: int
    invitation_count: int
    provisioned_user_count: int
    audit_entry_count: int


def address_of_erased(person_id: uuid.UUID) -> str:
    """Return the address that stays in the row: in a domain that does not exist (RFC 2606)."""
    return f"{person_id}@erased.invalid"


async def erase_person(session: AsyncSession, *, person: str, actor: str) -> ErasedPerson:
    """Erase a person everywhere. Keys that it made for programs stay, as do its ids.

    Its memberships end, with its keys, sessions and invitations. An erased person is done already.
    Raises: NotFound; LastOwner, for any organization.
    """
    await session.execute(LONG_STATEMENTS)
    found = await find_person(session, person)
    memberships = sorted(
        await memberships_of(session, found.id), key=lambda each: each.organization_id
    )
    of_user = or_(ScimUser.person_id == found.id, ScimUser.email == found.email)
    provisioned = (await session.scalars(select(ScimUser).where(of_user))).all()
    organizations = {each.organization_id for each in memberships}
    organizations |= {each.organization_id for each in provisioned}
    for organization_id in sorted(organizations):
        await lock_groups(session, organization_id)
    await session.refresh(found, with_for_update={"key_share": True})
    key_count = 0
    for member in memberships:
        removal = await remove_member(
            session,
            organization=str(member.organization_id),
            member=str(found.id),
            revoke_keys=False,
            actor=actor,
        )
        key_count += len(removal.revoked)
    is_invited = Invitation.email == found.email
    pending = select(Invitation.id).where(
        is_invited, Invitation.accepted_at.is_(None), Invitation.revoked_at.is_(None)
    )
    for invitation_id in (await session.scalars(pending)).all():
        await revoke_invitation(session, invitation=str(invitation_id), actor=actor)
    await session.execute(
        update(Person)
        .where(Person.id == found.id)
        .values(
            issuer=None,
            subject=None,
            deactivated_at=func.coalesce(Person.deactivated_at, func.now()),
            erased_at=func.coalesce(Person.erased_at, func.now()),
        )
    )
    # While the old address can still be compared
    audit_entry_count = await _erase_from_log(session, found.id, found.email)
    owned = select(ApiKeyOwner.api_key_id).where(ApiKeyOwner.person_id == found.id)
    named = and_(ApiKey.id.in_(owned), ApiKey.name != ERASED)
    await session.execute(update(ApiKey).where(named).values(name=ERASED))
    users = [each.id for each in provisioned]
    await session.execute(delete(ScimGroupMember).where(ScimGroupMember.user_id.in_(users)))
    await session.execute(delete(ScimUser).where(ScimUser.id.in_(users)))
    sessions = delete(SignInSession).where(SignInSession.person_id == found.id)
    session_count = len((await session.scalars(sessions.returning(SignInSession.id))).all())
    await session.execute(delete(SignInLink).where(SignInLink.person_id == found.id))
    address = address_of_erased(found.id)
    invited = update(Invitation).where(is_invited).values(email=address)
    invitation_count = len((await session.scalars(invited.returning(Invitation.id))).all())
    if found.email != address:
        values = {"email": address, "display_name": ERASED}
        await session.execute(update(Person).where(Person.id == found.id).values(values))
        facts = {"person_id": str(found.id)}
        await record_change(session, actor, "person.erase", str(found.id), before=facts)
    return ErasedPerson(
        person_id=found.id,
        organizations=[each.organization_name for each in memberships],
        key_count=key_count,
        session_count=session_count,
        invitation_count=invitation_count,
        provisioned_user_count=len(users),
        audit_entry_count=audit_entry_count,
    )


async def _erase_from_log(session: AsyncSession, person_id: uuid.UUID, email: str) -> int:
    """Remove what describes a person from the states in the audit log. A trigger allows only that.

    Returns the number of entries that changed.
    """
    values = {"person_id": person_id, "email": email}
    return len((await session.execute(ERASE_ENTRIES, values)).all())
