"""Organizations, projects and API keys: who may use the service, and how a key leads to them.

Functions take a session and never commit. Every change writes the audit log in the same transaction. A secret leaves this module
once, at its creation; what is stored is its SHA-256.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import Select, and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.audit import record_change, snapshot
from metering.errors import AlreadyExists, InvalidValue, KeyInvalid, NotFound
from metering.models import ApiKey, Organization, Project
from metering.money import checked_currency

NAME_FORM = re.compile(r"[a-z][a-z0-9-]{0,62}", re.ASCII)
KEY_NAME_MAX_CHARS = 100
SCOPES = frozenset({"inference", "admin", "billing"})
LIFETIME_MAX = timedelta(days=36_500)  # a century; keeps the sum inside what a timestamp can hold

PREFIX_CHARS = string.ascii_lowercase + string.digits
PREFIX_LENGTH = 8  # 36^8 prefixes: enough to tell keys apart; it is no part of the key's strength
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRET_BYTES = 32
SECRET_LENGTH = 43  # 62^43 > 256^32
SECRET_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}_[0-9A-Za-z]{{{SECRET_LENGTH}}}", re.ASCII)
PREFIX_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, as its key says."""

    api_key_id: uuid.UUID
    key_prefix: str
    project_id: uuid.UUID
    organization_id: uuid.UUID
    currency_code: str
    scopes: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as it may be shown: all but its secret."""

    id: uuid.UUID
    organization_id: uuid.UUID
    project_id: uuid.UUID
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


async def create_organization(session: AsyncSession, *, name: str, currency_code: str = "USD", actor: str) -> Organization:
    """A new customer. Raises: InvalidValue, AlreadyExists."""
    values = {"name": checked_name(name), "currency_code": checked_currency(currency_code)}
    statement = insert(Organization).values(values).on_conflict_do_nothing(index_elements=["name"]).returning(Organization)
    organization = await session.scalar(statement)
    if organization is None:
        raise AlreadyExists("organization", name)
    await _record_creation(session, actor, "organization.create", organization)
    return organization


async def list_organizations(session: AsyncSession) -> Sequence[Organization]:
    """All of them, by name."""
    return (await session.scalars(select(Organization).order_by(Organization.name))).all()


async def create_project(session: AsyncSession, *, organization: str, name: str, actor: str) -> Project:
    """A new part of an organization, given by name or id. Raises: NotFound, InvalidValue, AlreadyExists."""
    owner = await find_organization(session, organization)
    values = {"organization_id": owner.id, "name": checked_name(name)}
    statement = insert(Project).values(values).on_conflict_do_nothing(index_elements=["organization_id", "name"])
    project: Project | None = await session.scalar(statement.returning(Project))
    if project is None:
        raise AlreadyExists("project", f"{owner.name}/{name}")
    await _record_creation(session, actor, "project.create", project)
    return project


async def list_projects(session: AsyncSession, *, organization: str) -> Sequence[Project]:
    """Those of one organization, by name. Raises: NotFound."""
    owner = await find_organization(session, organization)
    query = select(Project).where(Project.organization_id == owner.id).order_by(Project.name)
    return (await session.scalars(query)).all()


async def create_api_key(
    session: AsyncSession,
    *,
    organization: str,
    project: str,
    name: str,
    scopes: Collection[str] = ("inference",),
    lifetime: timedelta | None = None,
    actor: str,
) -> tuple[KeyRecord, str]:
    """A new key and its secret, which cannot be had again. No scopes means "inference"; no lifetime means for ever.

    Raises: NotFound, InvalidValue.
    """
    owner = await find_project(session, project, organization=organization)
    values = {
        "project_id": owner.id,
        "name": _checked_key_name(name),
        "scopes": _checked_scopes(scopes),
        "expires_at": None if lifetime is None else func.now() + _checked_lifetime(lifetime),
    }
    while True:  # until a prefix is free, which the first one is but for one time in millions
        secret = new_secret()
        values |= {"prefix": prefix_of(secret), "secret_hash": hash_of(secret)}
        statement = insert(ApiKey).values(values).on_conflict_do_nothing(index_elements=["prefix"]).returning(ApiKey)
        if (key := await session.scalar(statement)) is not None:
            break
    await _record_creation(session, actor, "api_key.create", key)
    return _key_record(key, owner.organization_id), secret


async def revoke_api_key(session: AsyncSession, *, api_key: str, actor: str) -> KeyRecord:
    """End a key, given by id or prefix, for good. Revoking twice changes nothing. Raises: NotFound."""
    found = await find_api_key(session, api_key)
    locking = select(ApiKey).where(ApiKey.id == found.id).with_for_update(key_share=True)
    key = (await session.scalars(locking.execution_options(populate_existing=True))).one()
    if key.revoked_at is not None:
        return replace(found, revoked_at=key.revoked_at)
    before = snapshot(key)
    statement = update(ApiKey).where(ApiKey.id == key.id).values(revoked_at=func.now()).returning(ApiKey)
    key = (await session.scalars(statement.execution_options(populate_existing=True))).one()
    await record_change(session, actor=actor, action="api_key.revoke", subject_id=str(key.id), before=before, after=snapshot(key))
    return _key_record(key, found.organization_id)


async def list_api_keys(session: AsyncSession, *, organization: str | None = None) -> list[KeyRecord]:
    """Newest first; only an organization's if it is given. Raises: NotFound."""
    query = _select_keys().order_by(ApiKey.created_at.desc(), ApiKey.id)
    if organization:
        query = query.where(Project.organization_id == (await find_organization(session, organization)).id)
    return [_key_record(key, owner_id) for key, owner_id in await session.execute(query)]


async def authenticate(session: AsyncSession, secret: str) -> Principal:
    """Who the secret belongs to, by the database's clock. Raises: KeyInvalid, the same for unknown, revoked and expired."""
    refusal = KeyInvalid("the API key is not valid: it is unknown, revoked or expired")
    if SECRET_FORM.fullmatch(secret) is None:
        raise refusal
    query = (
        select(ApiKey.id, ApiKey.prefix, ApiKey.project_id, Project.organization_id, Organization.currency_code, ApiKey.scopes)
        .join(Project, Project.id == ApiKey.project_id)
        .join(Organization, Organization.id == Project.organization_id)
        .where(
            ApiKey.secret_hash == hash_of(secret),
            ApiKey.revoked_at.is_(None),
            or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
        )
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        raise refusal
    return Principal(*row[:-1], scopes=frozenset(row[-1]))


async def find_organization(session: AsyncSession, ref: str) -> Organization:
    """By name or id. Raises: NotFound."""
    key = as_uuid(ref)
    if key is None and NAME_FORM.fullmatch(ref) is None:
        raise NotFound("organization", ref)
    condition = Organization.name == ref if key is None else Organization.id == key
    if (organization := await session.scalar(select(Organization).where(condition))) is None:
        raise NotFound("organization", ref)
    return organization


async def find_project(session: AsyncSession, ref: str, *, organization: str | None = None) -> Project:
    """By id, or by name in the organization; without an organization the name is "organization/project". Raises: NotFound."""
    shown = f"{organization}/{ref}" if organization else ref
    if not organization:
        organization, _, ref = ref.rpartition("/")
    key = as_uuid(ref)
    if key is None and (NAME_FORM.fullmatch(ref) is None or not organization):
        raise NotFound("project", shown)
    condition = Project.name == ref if key is None else Project.id == key
    if organization:
        condition = and_(condition, Project.organization_id == (await find_organization(session, organization)).id)
    if (project := await session.scalar(select(Project).where(condition))) is None:
        raise NotFound("project", shown)
    return project


async def find_api_key(session: AsyncSession, ref: str) -> KeyRecord:
    """By id or prefix. Raises: NotFound."""
    key_id = as_uuid(ref)
    if key_id is None and PREFIX_FORM.fullmatch(ref) is None:
        raise NotFound("API key", ref[: PREFIX_LENGTH + 3])  # no more of it: it might be a secret
    condition = ApiKey.prefix == ref if key_id is None else ApiKey.id == key_id
    row = (await session.execute(_select_keys().where(condition))).one_or_none()
    if row is None:
        raise NotFound("API key", ref)
    return _key_record(*row)


def as_uuid(ref: str) -> uuid.UUID | None:
    """The id that a reference is, if it is one."""
    try:
        return uuid.UUID(ref)
    except ValueError:
        return None


def checked_name(name: str) -> str:
    """A name that an organization or project may have. One that reads as an id would make references ambiguous."""
    if NAME_FORM.fullmatch(name) is None or as_uuid(name) is not None:
        raise InvalidValue("name", 'give 1 to 63 of a-z, 0-9 and "-", starting with a letter, and not a UUID')
    return name


def new_secret() -> str:
    """A secret that nobody has had: `wk_`, a prefix to show, `_`, and 256 random bits in base 62."""
    prefix = "".join(secrets.choice(PREFIX_CHARS) for _ in range(PREFIX_LENGTH))
    number = int.from_bytes(secrets.token_bytes(SECRET_BYTES))
    digits = []
    for _ in range(SECRET_LENGTH):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return f"wk_{prefix}_{''.join(digits)}"


def prefix_of(secret: str) -> str:
    """The part of a secret that is stored and shown."""
    return secret[: len("wk_") + PREFIX_LENGTH]


def hash_of(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def _checked_key_name(name: str) -> str:
    if not 1 <= len(name) <= KEY_NAME_MAX_CHARS or not name.isprintable():
        raise InvalidValue("name", f"give 1 to {KEY_NAME_MAX_CHARS} printable characters")
    return name


def _checked_scopes(scopes: Collection[str]) -> list[str]:
    if unknown := set(scopes) - SCOPES:
        raise InvalidValue("scopes", f"{sorted(unknown)} unknown: choose from {sorted(SCOPES)}")
    return sorted(set(scopes)) or ["inference"]


def _checked_lifetime(lifetime: timedelta) -> timedelta:
    if not timedelta(0) < lifetime <= LIFETIME_MAX:
        raise InvalidValue(
            "lifetime", f"give more than zero and at most {LIFETIME_MAX.days} days, or none for a key without an end"
        )
    return lifetime


def _select_keys() -> Select[ApiKey, uuid.UUID]:
    return select(ApiKey, Project.organization_id).join(Project, Project.id == ApiKey.project_id)


def _key_record(key: ApiKey, organization_id: uuid.UUID) -> KeyRecord:
    return KeyRecord(
        id=key.id,
        organization_id=organization_id,
        project_id=key.project_id,
        name=key.name,
        prefix=key.prefix,
        scopes=tuple(key.scopes),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
    )


async def _record_creation(session: AsyncSession, actor: str, action: str, row: Organization | Project | ApiKey) -> None:
    await record_change(session, actor=actor, action=action, subject_id=str(row.id), before=None, after=snapshot(row))
