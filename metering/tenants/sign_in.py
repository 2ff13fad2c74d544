"""Persons who sign in: who an identity is, the memberships that its groups make, and sessions.

An identity is what a provider, chosen by the operator, says of a caller. Its person is known by
issuer and subject, and is found by e-mail address at the first sign-in. Only the SHA-256 of a
session's secret is stored. A session acts with the bound keys of the person's memberships.
Functions take a session of the database and never commit.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

import structlog
from sqlalchemy import (
    ColumnElement,
    Double,
    Select,
    and_,
    bindparam,
    cast,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import recheck_key
from metering.core.audit import record_change, snapshot
from metering.core.errors import (
    InvalidValue,
    KeyInvalid,
    LastOwner,
    NotFound,
)
from metering.core.models import (
    ApiKey,
    GroupMembership,
    Membership,
    Person,
    Project,
    SignInLink,
    SignInSession,
)
from metering.tenants.authentication import (
    Principal,
    principal_of_row,
    select_principal_of_bound_key,
)
from metering.tenants.invitations import project_for_member
from metering.tenants.key_groups import lock_groups
from metering.tenants.members import (
    DISPLAY_NAME_CHARS_MAX,
    MemberRecord,
    add_member,
    change_role,
    find_member,
    memberships_of,
    remove_member,
)
from metering.tenants.provisioning import admit_person, organizations_waiting
from metering.tenants.tenants import check_open, find_organization

SECRET_BYTES = 32
SESSION_FORM = re.compile(r"ws_[0-9A-Za-z_-]{43}", re.ASCII)
LINK_FORM = re.compile(r"wl_[0-9A-Za-z_-]{43}", re.ASCII)
# A session with the organization that a call acts in: the form that `Authenticator` takes.
ACTING_FORM = re.compile(rf"({SESSION_FORM.pattern})@([0-9a-f-]{{36}})", re.ASCII)
SESSIONS_MAX = 20  # of one person; a further one ends the oldest
KEPT_FOR = timedelta(days=30)  # after the end of a session
LINK_LIFETIME, LINK_LIFETIME_MAX = timedelta(minutes=15), timedelta(days=1)
TOUCHED_AFTER = timedelta(minutes=1)  # a use is noted at most that often
SYSTEM = "system"
LINK_INVALID = "The link is unknown, was used before, or has expired. Ask for another one."
SESSION_ENDED = "Your session has ended. Sign in again."

log = structlog.get_logger(__name__)


class Refusal(StrEnum):
    """Why a person who proved who they are may not come in. The values are part of URLs."""

    NO_EMAIL = "email-unverified"
    NOT_A_MEMBER = "not-a-member"
    OTHER_IDENTITY = "other-identity"
    DEACTIVATED = "deactivated"


class SignInRefused(Exception):
    """The identity is known and may not sign in."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Identity:
    """Statement of a provider about a person. `email` is empty unless the provider verified it."""

    provider: str
    issuer: str
    subject: str
    email: str = ""
    display_name: str = ""
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Role in an organization that a group of a provider gives.

    `project` is that of the member's key; empty: the oldest one.
    """

    group: str
    organization: str
    role: str
    project: str = ""


# Role and project of memberships, by id of the organization
Wanted = dict[uuid.UUID, tuple[str, Project]]


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Bounds of a session: it ends after `lifetime`, or after `idle_max` without use."""

    lifetime: timedelta
    idle_max: timedelta


@dataclass(frozen=True, slots=True)
class SignedIn:
    """Person of a session, and the organizations where it can act."""

    person: Person
    memberships: Sequence[MemberRecord]
    expires_at: datetime
    is_touched: bool  # its use was noted a moment ago


def new_secret(prefix: str) -> str:
    """Generate a secret of a session (`ws`) or a link (`wl`), with 256 random bits."""
    return f"{prefix}_{secrets.token_urlsafe(SECRET_BYTES)}"


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


# Identities


async def identify(
    session: AsyncSession, identity: Identity, rules: Collection[GroupRule]
) -> Person:
    """Return the person of an identity, with the memberships that its groups give; maybe none.

    A person known by e-mail address only gets the identity. An unknown one is created if a
    rule gives a membership, or an organization has provisioned the verified address with a role.
    Raises: SignInRefused.
    """
    wanted = await _memberships_of_groups(session, identity, rules)
    waiting = await organizations_waiting(session, identity.email)
    person = await _find_person(session, identity)
    present = [] if person is None else await memberships_of(session, person.id)
    # Organizations by id, then the person: the order of all changes of members
    locked = wanted.keys() | {each.organization_id for each in present}.union(waiting)
    for organization_id in sorted(locked):
        await lock_groups(session, organization_id)
    if person is None:
        if not identity.email:
            raise SignInRefused(Refusal.NO_EMAIL)
        if not wanted and not waiting:
            raise SignInRefused(Refusal.NOT_A_MEMBER)
        person = await _create_person(session, identity)
    await _bind(session, person, identity)
    if person.deactivated_at is not None:
        raise SignInRefused(Refusal.DEACTIVATED)
    await admit_person(session, person, identity.email, waiting)  # before the groups of the sign-in
    await align_memberships(session, person, identity.provider, wanted)
    return person


async def _memberships_of_groups(
    session: AsyncSession, identity: Identity, rules: Collection[GroupRule]
) -> Wanted:
    """Return the memberships that the rules give. The first rule for an organization decides.

    A rule that names no organization or project, or a closed one, is left out: the log says so.
    """
    wanted: Wanted = {}
    for rule in rules:
        if rule.group not in identity.groups:
            continue
        try:
            owner = await find_organization(session, rule.organization)
            project = await project_for_member(session, owner, rule.project)
            await check_open(session, project)
        except (NotFound, InvalidValue) as error:
            log.warning("sign_in_rule_ignored", provider=identity.provider, cause=str(error))
            continue
        wanted.setdefault(owner.id, (rule.role, project))
    return wanted


async def _find_person(session: AsyncSession, identity: Identity) -> Person | None:
    """Return the person of an identity, or one with its address and no identity yet; maybe none.

    Raises: SignInRefused if the address belongs to another identity.
    """
    known = and_(Person.issuer == identity.issuer, Person.subject == identity.subject)
    person = await session.scalar(select(Person).where(known))
    if person is None and identity.email:
        person = await session.scalar(select(Person).where(Person.email == identity.email))
    if person is not None:
        check_identity(person, identity)
    return person


def check_identity(person: Person, identity: Identity) -> None:
    """Raise SignInRefused if a person has another identity than this one."""
    found = (person.issuer, person.subject)
    if person.subject is not None and found != (identity.issuer, identity.subject):
        # Perhaps another person, with the address of one that left
        raise SignInRefused(Refusal.OTHER_IDENTITY)


async def _bind(session: AsyncSession, person: Person, identity: Identity) -> None:
    """Lock a person, and give it the identity by which it is known from now on.

    Raises: SignInRefused if it got another one meanwhile.
    """
    await session.refresh(person, with_for_update={"key_share": True})
    check_identity(person, identity)
    if person.subject is not None:
        return
    before = snapshot(person)
    bound = update(Person).where(Person.id == person.id)
    await session.execute(bound.values(issuer=identity.issuer, subject=identity.subject))
    await session.refresh(person)
    await record_change(
        session,
        SYSTEM,
        "person.identify",
        str(person.id),
        before=before,
        after=snapshot(person),
    )


async def _create_person(session: AsyncSession, identity: Identity) -> Person:
    name = "".join(filter(str.isprintable, identity.display_name)).strip()
    values = {
        "email": identity.email,
        "display_name": name[:DISPLAY_NAME_CHARS_MAX] or identity.email.partition("@")[0],
        "issuer": identity.issuer,
        "subject": identity.subject,
    }
    made = insert(Person).values(values).on_conflict_do_nothing().returning(Person)
    person = await session.scalar(made)
    if person is None:  # created at the same time, by another sign-in or an invitation
        if (person := await _find_person(session, identity)) is None:
            raise SignInRefused(Refusal.OTHER_IDENTITY)
        return person
    await record_change(
        session, SYSTEM, "person.create", str(person.id), before=None, after=snapshot(person)
    )
    return person


async def align_memberships(
    session: AsyncSession, person: Person, provider: str, wanted: Wanted
) -> None:
    """Make the memberships of a person those that groups of a provider give.

    Memberships by invitation stay as they are, and so does the last owner of an organization. The
    caller has locked the organizations and the person.
    """
    present = {each.organization_id: each for each in await memberships_of(session, person.id)}
    owned = select(GroupMembership.membership_id).where(GroupMembership.provider == provider)
    of_groups = set(await session.scalars(owned))
    for organization_id in sorted(wanted.keys() | present.keys()):
        member = present.get(organization_id)
        if member is not None and member.membership_id not in of_groups:
            continue
        if member is None:
            await _add(session, person, provider, *wanted[organization_id])
        elif organization_id not in wanted:
            await _remove(session, member, provider)
        elif member.role != wanted[organization_id][0]:
            await _change(session, member, provider, *wanted[organization_id])


async def _add(
    session: AsyncSession, person: Person, provider: str, role: str, project: Project
) -> None:
    try:
        await find_member(session, str(project.organization_id), str(person.id))
    except NotFound:
        member = await add_member(session, person=person, project=project, role=role, actor=SYSTEM)
        values = {"membership_id": member.membership_id, "provider": provider}
        await session.execute(insert(GroupMembership).values(values))


async def _remove(session: AsyncSession, member: MemberRecord, provider: str) -> None:
    try:
        await remove_member(
            session,
            organization=str(member.organization_id),
            member=str(member.person_id),
            revoke_keys=False,
            actor=SYSTEM,
        )
    except LastOwner as error:
        log.warning("sign_in_membership_kept", provider=provider, cause=str(error))
        return
    ended = delete(GroupMembership).where(GroupMembership.membership_id == member.membership_id)
    await session.execute(ended)


async def _change(
    session: AsyncSession, member: MemberRecord, provider: str, role: str, project: Project
) -> None:
    """Change the role of a member; that of an operator needs another key."""
    if "operator" in (role, member.role):
        await _remove(session, member, provider)
        person = await session.get_one(Person, member.person_id)
        await _add(session, person, provider, role, project)
        return
    try:
        await change_role(
            session,
            organization=str(member.organization_id),
            member=str(member.person_id),
            role=role,
            actor=SYSTEM,
        )
    except LastOwner as error:
        log.warning("sign_in_membership_kept", provider=provider, cause=str(error))


# Sessions


async def begin_session(
    session: AsyncSession,
    person_id: uuid.UUID,
    terms: SessionTerms,
    *,
    provider: str = "",
    provider_session: str = "",
    organization_id: uuid.UUID | None = None,
    address: str = "",
) -> str:
    """Begin a session of a person and return its secret.

    With `organization_id` it acts there only, whatever else the person is a member of.
    """
    secret = new_secret("ws")
    await session.execute(
        select(Person.id).where(Person.id == person_id).with_for_update(key_share=True)
    )
    values = {
        "person_id": person_id,
        "organization_id": organization_id,
        "secret_hash": hash_of(secret),
        "provider": provider,
        "provider_session": provider_session,
        "address": address,
        "idle_max_s": int(terms.idle_max.total_seconds()),
        "expires_at": func.now() + terms.lifetime,
    }
    made = await session.scalars(insert(SignInSession).values(values).returning(SignInSession))
    begun = made.one()
    await record_change(
        session, SYSTEM, "session.create", str(person_id), before=None, after=snapshot(begun)
    )
    surplus = (
        select(SignInSession.id)
        .where(SignInSession.person_id == person_id, SignInSession.ended_at.is_(None))
        .order_by(SignInSession.created_at.desc(), SignInSession.id)
        .offset(SESSIONS_MAX)
    )
    await _end(session, SignInSession.id.in_(surplus))
    await session.execute(
        delete(SignInSession).where(SignInSession.expires_at < func.now() - KEPT_FOR)
    )
    return secret


async def end_session(session: AsyncSession, secret: str) -> None:
    """End a session and the requests that it started. Idempotent."""
    await _end(session, SignInSession.secret_hash == hash_of(secret))


async def end_sessions_of(
    session: AsyncSession,
    *,
    provider: str,
    issuer: str,
    subject: str,
    provider_session: str,
    begun_before: float,
) -> int:
    """End the sessions that a provider ends: one of its own, or all of a subject. Returns how many.

    With both, the session must be of the subject. Those that began after the Unix time
    `begun_before` go on, so that a repeated message ends nothing new.
    """
    conditions: list[ColumnElement[bool]] = [
        SignInSession.provider == provider,
        SignInSession.created_at < func.to_timestamp(begun_before),
    ]
    if provider_session:
        conditions.append(SignInSession.provider_session == provider_session)
    if subject:
        persons = select(Person.id).where(Person.issuer == issuer, Person.subject == subject)
        conditions.append(SignInSession.person_id.in_(persons))
    return await _end(session, *conditions)


async def _end(session: AsyncSession, *conditions: ColumnElement[bool]) -> int:
    ending = (
        update(SignInSession)
        .where(*conditions, SignInSession.ended_at.is_(None))
        .values(ended_at=func.now())
        .returning(SignInSession)
    )
    ended = (await session.scalars(ending)).all()
    for each in ended:
        keys = select(ApiKey).join(Membership, Membership.api_key_id == ApiKey.id)
        keys = keys.where(Membership.person_id == each.person_id, Membership.removed_at.is_(None))
        for key in await session.scalars(keys):
            await recheck_key(session, key.id, key.allowed_networks, [each.secret_hash])
        await record_change(
            session,
            SYSTEM,
            "session.end",
            str(each.person_id),
            before=snapshot(each) | {"ended_at": None},
            after=snapshot(each),
        )
    return len(ended)


def _in_force(secret_hash: object) -> tuple[ColumnElement[bool], ...]:
    idle = func.make_interval(0, 0, 0, 0, 0, 0, SignInSession.idle_max_s)
    return (
        SignInSession.secret_hash == secret_hash,
        SignInSession.ended_at.is_(None),
        SignInSession.expires_at > func.now(),
        SignInSession.last_used_at + idle > func.now(),
    )


async def signed_in(session: AsyncSession, secret: str) -> SignedIn:
    """Return the person of a session and its memberships. Raises: KeyInvalid."""
    recently = (SignInSession.last_used_at > func.now() - TOUCHED_AFTER).label("recently")
    query = (
        select(Person, SignInSession.organization_id, SignInSession.expires_at, recently)
        .join(SignInSession, SignInSession.person_id == Person.id)
        .where(*_in_force(hash_of(secret)), Person.deactivated_at.is_(None))
    )
    if (row := (await session.execute(query)).one_or_none()) is None:
        raise KeyInvalid(SESSION_ENDED)
    person, organization_id, expires_at, is_touched = row
    memberships = [
        each
        for each in await memberships_of(session, person.id)
        if organization_id in (None, each.organization_id) and each.deactivated_at is None
    ]
    return SignedIn(person, memberships, expires_at, is_touched)


async def touch_session(session: AsyncSession, secret: str) -> None:
    """Note that a session in force is used, which keeps it from ending for lack of use."""
    await session.execute(
        update(SignInSession)
        .where(*_in_force(hash_of(secret)), SignInSession.last_used_at < func.now() - TOUCHED_AFTER)
        .values(last_used_at=func.now())
    )


@functools.cache  # building it per call took as long as the query
def select_membership() -> Select[uuid.UUID, float]:
    """Build the query for the bound key of a session in an organization, and its seconds left."""
    left_s = cast(func.extract("epoch", SignInSession.expires_at - func.now()), Double)
    return (
        select(Membership.api_key_id, left_s.label("left_s"))
        .join(SignInSession, SignInSession.person_id == Membership.person_id)
        .where(
            *_in_force(bindparam("secret_hash")),
            Membership.organization_id == bindparam("organization_id"),
            func.coalesce(SignInSession.organization_id, Membership.organization_id)
            == Membership.organization_id,
            Membership.removed_at.is_(None),
        )
    )


def is_session(secret: str) -> bool:
    """Return whether a secret has the form of a session that acts in an organization."""
    return ACTING_FORM.fullmatch(secret) is not None


def acting_in(secret: str, organization_id: uuid.UUID) -> str:
    """Return the secret by which a session acts in an organization."""
    return f"{secret}@{organization_id}"


async def authenticate_session(session: AsyncSession, acting: str) -> Principal:
    """Return the principal of a session in an organization. Raises: KeyInvalid."""
    found = ACTING_FORM.fullmatch(acting)
    assert found is not None
    secret_hash = hash_of(found[1])
    try:
        organization_id = uuid.UUID(found[2])
    except ValueError:
        raise KeyInvalid(SESSION_ENDED) from None
    parameters = {"secret_hash": secret_hash, "organization_id": organization_id}
    row = (await session.execute(select_membership(), parameters)).one_or_none()
    if row is None:
        raise KeyInvalid(SESSION_ENDED)
    by_id = {"api_key_id": row.api_key_id}
    key = await session.execute(select_principal_of_bound_key(), by_id)
    if (principal := key.one_or_none()) is None:
        raise KeyInvalid(SESSION_ENDED)
    found_principal = principal_of_row(principal, secret_hash)
    key_left_s = found_principal.secret_lifetime_s
    left_s = row.left_s if key_left_s is None else min(row.left_s, key_left_s)
    return replace(found_principal, secret_lifetime_s=left_s)


# Links


async def create_link(
    session: AsyncSession, person: Person, *, lifetime: timedelta | None = None, actor: str
) -> str:
    """Create a link that signs a person in, once. Returns its secret. Raises: InvalidValue."""
    lifetime = LINK_LIFETIME if lifetime is None else lifetime
    if not timedelta(0) < lifetime <= LINK_LIFETIME_MAX:
        raise InvalidValue("lifetime", "must be more than zero and at most a day")
    if person.deactivated_at is not None:
        raise InvalidValue("person", "is deactivated: reactivate the person first")
    secret = new_secret("wl")
    values = {
        "secret_hash": hash_of(secret),
        "person_id": person.id,
        "expires_at": func.now() + lifetime,
    }
    made = await session.scalars(insert(SignInLink).values(values).returning(SignInLink))
    await record_change(
        session,
        actor,
        "sign_in_link.create",
        str(person.id),
        before=None,
        after=snapshot(made.one()),
    )
    await session.execute(delete(SignInLink).where(SignInLink.expires_at < func.now()))
    return secret


def link_url(console_url: str, secret: str) -> str:
    """Return the address of a link. The secret is in the fragment, which no server is sent."""
    return f"{console_url.rstrip('/')}/#/sign-in?link={secret}"


async def person_of_link(session: AsyncSession, secret: str) -> Person:
    """Return the person whom a link would sign in, without using it up. Raises: KeyInvalid."""
    query = (
        select(Person)
        .join(SignInLink, SignInLink.person_id == Person.id)
        .where(
            SignInLink.secret_hash == hash_of(secret),
            SignInLink.expires_at > func.now(),
            Person.deactivated_at.is_(None),
        )
    )
    if LINK_FORM.fullmatch(secret) is None or (person := await session.scalar(query)) is None:
        raise KeyInvalid(LINK_INVALID)
    return person


async def use_link(session: AsyncSession, secret: str) -> uuid.UUID:
    """Use a link up, and return the id of its person. Raises: KeyInvalid."""
    if LINK_FORM.fullmatch(secret) is None:
        raise KeyInvalid(LINK_INVALID)
    used = delete(SignInLink).where(
        SignInLink.secret_hash == hash_of(secret),
        SignInLink.expires_at > func.now(),
        SignInLink.person_id == Person.id,
        Person.deactivated_at.is_(None),
    )
    person_id: uuid.UUID | None = await session.scalar(used.returning(SignInLink.person_id))
    if person_id is None:
        raise KeyInvalid(LINK_INVALID)
    return person_id
