"""Invitations to organizations: by e-mail address, with a role, until a time.

A token accepts an invitation once. It is shown once, to the caller that invites or resends; only
its SHA-256 is stored. Its presenter becomes a member as the person of the address, so only that
organization is at stake. Functions take a session and never commit.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Select, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, InvitationInvalid, NotFound
from metering.core.models import Invitation, Organization, Person, Project, record_of
from metering.core.pages import PAGE_SIZE, SortKey, page_of
from metering.store.border import Actor
from metering.store.db import database_now
from metering.tenants.api_keys import KeyOwner, create_api_key
from metering.tenants.billing_profiles import check_email
from metering.tenants.key_groups import lock_groups
from metering.tenants.members import (
    MemberRecord,
    add_member,
    bound_key_of,
    checked_display_name,
    terms_of,
)
from metering.tenants.networks import Address
from metering.tenants.tenants import as_uuid, find_organization, find_project

TOKEN_PREFIX = "wi_"
TOKEN_FORM = re.compile(rf"{TOKEN_PREFIX}[0-9A-Za-z_-]{{43}}", re.ASCII)
TOKEN_BYTES = 32
LIFETIME = timedelta(days=7)
LIFETIME_MAX = timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationRecord:
    """An invitation that is neither accepted nor revoked; it may have expired."""

    invitation_id: uuid.UUID
    organization_id: uuid.UUID
    organization_name: str
    project_id: uuid.UUID
    project_name: str
    email: str
    role: str
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Accepted:
    """A new member, and the secret of the key that was created for it; empty without one."""

    member: MemberRecord
    secret: str


async def invite(
    session: AsyncSession,
    *,
    organization: str,
    email: str,
    role: str,
    project: str = "",
    lifetime: timedelta | None = None,
    actor: str,
) -> tuple[InvitationRecord, str]:
    """Invite a person to an organization. Returns the invitation with its token.

    `project` is that of the member's key; by default the oldest one. The answer does not depend on
    whether the service knows the address. Raises: NotFound; InvalidValue; AlreadyExists for a
    member, or for an address with a pending invitation.
    """
    owner = await find_organization(session, organization)
    await lock_groups(session, owner.id)
    address = email.strip().lower()
    check_email(address, "email")
    terms_of(role)
    within = await project_for_member(session, owner, project)
    token = new_token()
    if await _is_member(session, owner.id, address):
        raise AlreadyExists("member", address, f"in {owner.name}: change the role instead")
    pending = select(Invitation).where(Invitation.organization_id == owner.id, *_pending(address))
    if (earlier := await session.scalar(pending)) is not None:
        if earlier.expires_at > await database_now(session):
            raise AlreadyExists(
                "invitation", address, f"to {owner.name}: resend or revoke it instead"
            )
        await _change(session, earlier, actor, "invitation.revoke", revoked_at=func.now())
    values = {
        "organization_id": owner.id,
        "project_id": within.id,
        "email": address,
        "role": role,
        "token_hash": hash_of_token(token),
        "issuer": actor,
        "expires_at": func.clock_timestamp() + _checked_lifetime(lifetime),
    }
    made = (await session.scalars(insert(Invitation).values(values).returning(Invitation))).one()
    await record_change(
        session, actor, "invitation.create", str(made.id), before=None, after=snapshot(made)
    )
    return await find_invitation(session, str(made.id)), token


async def resend_invitation(
    session: AsyncSession, *, invitation: str, lifetime: timedelta | None = None, actor: str
) -> tuple[InvitationRecord, str]:
    """Give a pending invitation a new token and a new end. The former token is refused from now on.

    Raises: NotFound, InvalidValue.
    """
    token = new_token()
    await _change(
        session,
        await _locked(session, invitation),
        actor,
        "invitation.resend",
        token_hash=hash_of_token(token),
        issuer=actor,
        expires_at=func.clock_timestamp() + _checked_lifetime(lifetime),
    )
    return await find_invitation(session, invitation), token


async def revoke_invitation(session: AsyncSession, *, invitation: str, actor: str) -> None:
    """Refuse the token of a pending invitation from now on. Raises: NotFound."""
    locked = await _locked(session, invitation)
    await _change(session, locked, actor, "invitation.revoke", revoked_at=func.now())


async def offered(session: AsyncSession, token: str) -> InvitationRecord:
    """Return the invitation that a token accepts. Raises: InvitationInvalid."""
    if TOKEN_FORM.fullmatch(token) is None:
        raise InvitationInvalid
    query = _select().where(Invitation.token_hash == hash_of_token(token), _in_force())
    if (row := (await session.execute(query)).one_or_none()) is None:
        raise InvitationInvalid
    return _record(*row)


async def accept_invitation(
    session: AsyncSession,
    *,
    token: str,
    display_name: str = "",
    create_key: bool = False,
    address: Address | None = None,
) -> Accepted:
    """Make the presenter of a token a member, as the person of the invited address.

    `display_name` is the name of a person that the service does not know. With `create_key`, the
    member gets a key with a secret too, of the same role. Of several calls at the same time, one
    uses up the token. The audit log names the new member, calling from `address`, and the issuer of
    the token as the creator of the bound key. Raises: InvitationInvalid, InvalidValue.
    """
    if TOKEN_FORM.fullmatch(token) is None:
        raise InvitationInvalid
    invitation = await session.scalar(
        select(Invitation).where(
            Invitation.token_hash == hash_of_token(token), *_pending(), _in_force()
        )
    )
    if invitation is None:
        raise InvitationInvalid
    await lock_groups(session, invitation.organization_id)
    accepting = (
        update(Invitation)
        .where(Invitation.id == invitation.id, Invitation.token_hash == hash_of_token(token))
        .where(*_pending(), _in_force())
        .values(accepted_at=func.now())
    )
    before = snapshot(invitation)
    accepted = await session.scalar(
        accepting.returning(Invitation).execution_options(populate_existing=True)
    )
    if accepted is None:
        raise InvitationInvalid
    person = await _person(session, accepted.email, display_name)
    if (
        await bound_key_of(session, person_id=person.id, organization_id=accepted.organization_id)
        is not None
        or person.deactivated_at is not None
    ):
        raise InvitationInvalid
    member = await add_member(
        session,
        person=person,
        project=await session.get_one(Project, accepted.project_id),
        role=accepted.role,
        actor=accepted.issuer,
    )
    itself = Actor(
        role=member.role,
        organization_id=member.organization_id,
        is_bound=False,
        person_id=person.id,
        address=address,
    )
    await (await session.connection()).exec_driver_sql(itself.settings)
    await record_change(
        session,
        member.key_prefix,
        "invitation.accept",
        str(accepted.id),
        before=before,
        after=snapshot(accepted) | {"person_id": str(person.id)},
    )
    secret = ""
    if create_key:
        _, secret = await create_api_key(
            session,
            organization=str(accepted.organization_id),
            project=str(accepted.project_id),
            name=f"own key of {accepted.email}"[:100],
            terms=terms_of(accepted.role),
            owner=KeyOwner(person_id=person.id, creator_id=person.id),
            actor=member.key_prefix,
        )
    return Accepted(member, secret)


async def find_invitation(session: AsyncSession, ref: str) -> InvitationRecord:
    """Look up a pending invitation by id. Raises: NotFound."""
    key = as_uuid(ref)
    query = _select().where(Invitation.id == key)
    if key is None or (row := (await session.execute(query)).one_or_none()) is None:
        raise NotFound("invitation", ref)
    return _record(*row)


async def list_invitations(
    session: AsyncSession, *, organization: str, page_size: int = PAGE_SIZE, page_token: str = ""
) -> tuple[list[InvitationRecord], str]:
    """List a page of the pending invitations of an organization by e-mail address.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    owner = await find_organization(session, organization)
    query = _select().where(Invitation.organization_id == owner.id)
    key = SortKey(Invitation.email)
    rows, following = await page_of(session, query, key, page_size=page_size, page_token=page_token)
    return [_record(*row) for row in rows], following


def new_token() -> str:
    """Generate a token: `wi_` and 256 random bits in base 64."""
    return f"{TOKEN_PREFIX}{secrets.token_urlsafe(TOKEN_BYTES)}"


def hash_of_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


async def project_for_member(session: AsyncSession, owner: Organization, project: str) -> Project:
    """Look up the project of a member's key, by default the oldest.

    Raises: NotFound, InvalidValue.
    """
    if project:
        return await find_project(session, project, organization=str(owner.id))
    oldest = select(Project).where(Project.organization_id == owner.id)
    oldest = oldest.order_by(Project.created_at, Project.id).limit(1)
    if (found := await session.scalar(oldest)) is None:
        raise InvalidValue(
            "project", f"{owner.name} has no project, which members need: create one first"
        )
    return found


async def _is_member(session: AsyncSession, organization_id: uuid.UUID, email: str) -> bool:
    person = await session.scalar(select(Person).where(Person.email == email))
    return person is not None and (
        await bound_key_of(session, person_id=person.id, organization_id=organization_id)
        is not None
    )


async def _person(session: AsyncSession, email: str, display_name: str) -> Person:
    """Return the person of an address, a new one if the service does not know it; lock the row.

    The name of a known person stays: the presenter of a token may be someone else.
    """
    name = checked_display_name(display_name or email.partition("@")[0])
    made: Person | None = await session.scalar(
        insert(Person)
        .values(email=email, display_name=name)
        .on_conflict_do_nothing(index_elements=["email"])
        .returning(Person)
    )
    if made is not None:
        return made
    locking = select(Person).where(Person.email == email).with_for_update(key_share=True)
    return (await session.scalars(locking)).one()


def _checked_lifetime(lifetime: timedelta | None) -> timedelta:
    if lifetime is None:
        return LIFETIME
    if not timedelta(0) < lifetime <= LIFETIME_MAX:
        raise InvalidValue(
            "lifetime", f"must be more than zero and at most {LIFETIME_MAX.days} days"
        )
    return lifetime


async def _locked(session: AsyncSession, ref: str) -> Invitation:
    found = await find_invitation(session, ref)
    locking = select(Invitation).where(Invitation.id == found.invitation_id, *_pending())
    locking = locking.with_for_update().execution_options(populate_existing=True)
    if (invitation := await session.scalar(locking)) is None:  # accepted or revoked meanwhile
        raise NotFound("invitation", ref)
    return invitation


async def _change(
    session: AsyncSession, invitation: Invitation, actor: str, action: str, **values: object
) -> None:
    before = snapshot(invitation)
    await session.execute(update(Invitation).where(Invitation.id == invitation.id).values(**values))
    await session.refresh(invitation)
    after = snapshot(invitation)
    await record_change(session, actor, action, str(invitation.id), before=before, after=after)


def _pending(email: str = "") -> tuple[ColumnElement[bool], ...]:
    conditions = (Invitation.accepted_at.is_(None), Invitation.revoked_at.is_(None))
    return (*conditions, Invitation.email == email) if email else conditions


def is_pending() -> tuple[ColumnElement[bool], ...]:
    """Build the conditions for an invitation that can be accepted."""
    return (*_pending(), _in_force())


def _in_force() -> ColumnElement[bool]:
    # Not now(), which is the begin of the transaction: this one may have waited for a lock
    return Invitation.expires_at > func.clock_timestamp()


def _select() -> Select[Invitation, Organization, Project]:
    return (
        select(Invitation, Organization, Project)
        .join(Organization, Organization.id == Invitation.organization_id)
        .join(Project, Project.id == Invitation.project_id)
        .where(*_pending())
    )


def _record(
    invitation: Invitation, organization: Organization, project: Project
) -> InvitationRecord:
    return record_of(
        InvitationRecord,
        invitation,
        invitation_id=invitation.id,
        organization_name=organization.name,
        project_name=project.name,
    )
