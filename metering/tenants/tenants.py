"""Organizations, projects and API keys: who may use the service, and how a key leads to them.

Functions take a session and never commit. Every change writes the audit log in the same transaction. A secret leaves this module
once, at its creation; what is stored is its SHA-256.

A rotated key is the same key: its id, prefix, limits and counters stay, so that a quota
is exact however many of its secrets are in use.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import string
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, Unpack

from sqlalchemy import Double, Select, and_, bindparam, case, cast, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import order_end_of_key, order_look_at_key
from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, KeyInvalid, KeyRevoked, NotFound
from metering.core.models import ApiKey, ApiKeyUse, Organization, Project, Quota, QuotaSubject, SupersededSecret, record_of
from metering.core.money import checked_currency
from metering.tenants.networks import Address, Network, checked_networks, networks_of

KEY_NAME_MAX_CHARS = 100
MODEL_NAME_MAX_CHARS = 200
MODELS_PER_KEY_MAX = 100  # a key that is good for so many is better good for all
SCOPES = frozenset({"inference", "admin", "billing"})
TOKENS_MAX = 1_000_000_000  # of one request: above any context window, and far below what its column holds


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """The most tokens of one request of a key; None: as many as the model takes. Output is that of all choices together."""

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


NO_BOUNDS = TokenBounds()


def checked_key_name(name: str) -> str:
    """A name that a key may have. Raises: InvalidValue."""
    if not 1 <= len(name) <= KEY_NAME_MAX_CHARS or not name.isprintable():
        raise InvalidValue("name", f"give 1 to {KEY_NAME_MAX_CHARS} printable characters")
    return name


def checked_scopes(scopes: Collection[str]) -> list[str]:
    """Scopes in order, each once; none means "inference". Raises: InvalidValue."""
    if unknown := set(scopes) - SCOPES:
        raise InvalidValue("scopes", f"{sorted(unknown)} unknown: choose from {sorted(SCOPES)}")
    return sorted(set(scopes)) or ["inference"]


def checked_models(models: Collection[str]) -> list[str]:
    """Names of models in order, each once; none means every model. Raises: InvalidValue."""
    if len(set(models)) > MODELS_PER_KEY_MAX:
        raise InvalidValue("models", f"give at most {MODELS_PER_KEY_MAX}, or none for every model")
    if not all(1 <= len(model) <= MODEL_NAME_MAX_CHARS and model.isprintable() for model in models):
        raise InvalidValue("models", f"give names of 1 to {MODEL_NAME_MAX_CHARS} printable characters")
    return sorted(set(models))


def checked_bound(token_count: int | None, field: str) -> int | None:
    """The most tokens of one request; 0 and None mean no bound. Raises: InvalidValue."""
    if token_count is not None and not 0 <= token_count <= TOKENS_MAX:
        raise InvalidValue(field, f"give 1 to {TOKENS_MAX:,} tokens, or 0 for no limit of the key")
    return token_count or None


def model_allowed(models: Collection[str], asked: str) -> bool:
    """Whether a key that is limited to these models may use the one asked for; no models mean every one.

    The name of a model allows each version of it, `name@version`; a version allows itself alone.
    """
    return not models or asked in models or asked.partition("@")[0] in models


PREFIX_CHARS = string.ascii_lowercase + string.digits
PREFIX_LENGTH = 8  # 36^8 prefixes: enough to tell keys apart; it is no part of the key's strength
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRET_BYTES = 32
SECRET_LENGTH = 43  # 62^43 > 256^32
SECRET_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}_[0-9A-Za-z]{{{SECRET_LENGTH}}}", re.ASCII)
PREFIX_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}", re.ASCII)


def new_secret(prefix: str | None = None) -> str:
    """A secret that nobody has had: `wk_`, a prefix to show, `_`, and 256 random bits in base 62.

    prefix: that of a key which gets one more secret; a new one for a new key.
    """
    if prefix is None:
        prefix = "wk_" + "".join(secrets.choice(PREFIX_CHARS) for _ in range(PREFIX_LENGTH))
    number = int.from_bytes(secrets.token_bytes(SECRET_BYTES))
    digits = []
    for _ in range(SECRET_LENGTH):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return f"{prefix}_{''.join(digits)}"


def prefix_of(secret: str) -> str:
    """The part of a secret that is stored and shown."""
    return secret[: len("wk_") + PREFIX_LENGTH]


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


WEIGHTS = ("input_weight_milli", "cached_input_weight_milli", "output_weight_milli")

COPIED = ("model", "dimension", "limit_value", *WEIGHTS, "enforced", "alert_at")


async def limit_new_key(
    session: AsyncSession, *, api_key_id: uuid.UUID, project_id: uuid.UUID, organization_id: uuid.UUID, actor: str
) -> None:
    """Give a key that nobody has used yet its limits. Where both have one for a dimension and model, the project's holds."""
    kept = select(Quota).where(
        Quota.subject_id.in_((project_id, organization_id)), Quota.for_new_keys.is_(True), Quota.deleted_at.is_(None)
    )
    nearest_last = case((Quota.subject == QuotaSubject.PROJECT, 1), else_=0)
    rows = await session.scalars(kept.order_by(nearest_last, Quota.created_at, Quota.id))
    for template in {(row.model, row.dimension): row for row in rows}.values():
        values = {column: getattr(template, column) for column in COPIED}
        copy = insert(Quota).values(subject=QuotaSubject.API_KEY, subject_id=api_key_id, **values).returning(Quota)
        quota = (await session.scalars(copy)).one()
        await record_change(session, actor=actor, action="quota.set", subject_id=str(quota.id), before=None, after=snapshot(quota))


NAME_FORM = re.compile(r"[a-z][a-z0-9-]{0,62}", re.ASCII)
LIFETIME_MAX = timedelta(days=36_500)  # a century; keeps the sum inside what a timestamp can hold


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, as its key says. secret_lifetime_s: how long this secret of the key works from now on; None: for ever.

    models: those that it may use; none: every one. bounds: on the tokens of one request. networks: from which it may be used; none:
    from everywhere. address: from where it is used in this call, which whoever let it in has found out; None: that is not known.
    secret_hash: of the secret that this call came with; a rotated key has several.
    """

    api_key_id: uuid.UUID
    key_prefix: str
    project_id: uuid.UUID
    organization_id: uuid.UUID
    currency_code: str
    scopes: frozenset[str]
    secret_lifetime_s: float | None = None
    models: frozenset[str] = frozenset()
    bounds: TokenBounds = NO_BOUNDS
    networks: tuple[Network, ...] = ()
    address: Address | None = field(default=None, compare=False)
    secret_hash: bytes = field(default=b"", compare=False, repr=False)

    def may_use(self, model: str) -> bool:
        """Whether the key is good for the model of this name."""
        return model_allowed(self.models, model)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as it may be shown: all but its secret. overlap_ends_at: until when a replaced secret works too.

    models: those that it may use; none: every one. last_used_at: None if it was not used since `uses_known_since`.
    """

    id: uuid.UUID
    organization_id: uuid.UUID
    organization_name: str
    project_id: uuid.UUID
    project_name: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    uses_known_since: datetime
    overlap_ends_at: datetime | None = None
    models: tuple[str, ...] = ()
    last_used_at: datetime | None = None
    bounds: TokenBounds = NO_BOUNDS
    allowed_networks: tuple[str, ...] = ()


async def create_organization(session: AsyncSession, *, name: str, currency_code: str = "USD", actor: str) -> Organization:
    """A new customer. Raises: InvalidValue, AlreadyExists."""
    values = {"name": checked_name(name), "currency_code": checked_currency(currency_code)}
    statement = insert(Organization).values(values).on_conflict_do_nothing(index_elements=["name"]).returning(Organization)
    if (organization := await session.scalar(statement)) is None:
        raise AlreadyExists("organization", name)
    await _record_creation(session, actor, "organization.create", organization)
    return organization


async def list_organizations(session: AsyncSession) -> Sequence[Organization]:
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


class KeyTerms(TypedDict, total=False):
    """What a new key is good for. No scopes means "inference"; no models all; no networks everywhere; no lifetime for ever."""

    scopes: Collection[str]
    models: Collection[str]
    allowed_networks: Collection[str]
    max_input_tokens: int | None
    max_output_tokens: int | None
    lifetime: timedelta | None


async def create_api_key(
    session: AsyncSession, *, organization: str, project: str, name: str, actor: str, **terms: Unpack[KeyTerms]
) -> tuple[KeyRecord, str]:
    """A new key and its secret, which cannot be had again.

    It gets the limits that its project and organization keep for new keys. Raises: NotFound, InvalidValue.
    """
    owner = await find_project(session, project, organization=organization)
    lifetime = terms.get("lifetime")
    expires_at = None if lifetime is None else func.now() + _checked_lifetime(lifetime)
    values = checked_terms(terms) | {"project_id": owner.id, "name": checked_key_name(name), "expires_at": expires_at}
    while True:  # until a prefix is free, which the first one is but for one time in millions
        secret = new_secret()
        values |= {"prefix": prefix_of(secret), "secret_hash": hash_of(secret)}
        statement = insert(ApiKey).values(values).on_conflict_do_nothing(index_elements=["prefix"]).returning(ApiKey)
        if (key := await session.scalar(statement)) is not None:
            break
    await _record_creation(session, actor, "api_key.create", key)
    await limit_new_key(session, api_key_id=key.id, project_id=owner.id, organization_id=owner.organization_id, actor=actor)
    return await find_api_key(session, str(key.id)), secret


def checked_terms(terms: KeyTerms) -> dict[str, Any]:
    """What a key is good for, as its columns have it. Raises: InvalidValue."""
    return {
        "scopes": checked_scopes(terms.get("scopes", ("inference",))),
        "models": checked_models(terms.get("models", ())),
        "allowed_networks": checked_networks(terms.get("allowed_networks", ())),
        "max_input_tokens": checked_bound(terms.get("max_input_tokens"), "max_input_tokens"),
        "max_output_tokens": checked_bound(terms.get("max_output_tokens"), "max_output_tokens"),
    }


async def revoke_api_key(session: AsyncSession, *, api_key: str, actor: str) -> KeyRecord:
    """End a key, given by id or prefix, for good, and order the end of what runs with it. Revoking twice changes nothing.

    Raises: NotFound.
    """
    found = await find_api_key(session, api_key)
    key = await locked_key(session, found.id)
    if key.revoked_at is not None:
        return replace(found, revoked_at=key.revoked_at)
    changed = await change_key(session, key, actor, "api_key.revoke", revoked_at=func.now())
    await order_end_of_key(session, key.id)
    return replace(found, revoked_at=changed.revoked_at)


async def locked_key(session: AsyncSession, key_id: uuid.UUID) -> ApiKey:
    """The row as it is now, which nobody else changes before the end of the transaction."""
    # Not FOR UPDATE: requests that are admitted at the same time refer to the row and must not wait.
    locking = select(ApiKey).where(ApiKey.id == key_id).with_for_update(key_share=True)
    return (await session.scalars(locking.execution_options(populate_existing=True))).one()


async def change_key(session: AsyncSession, key: ApiKey, actor: str, action: str, **values: Any) -> ApiKey:
    """Set columns of a locked key, and write the log."""
    before = snapshot(key)
    statement = update(ApiKey).where(ApiKey.id == key.id).values(**values).returning(ApiKey)
    changed = (await session.scalars(statement.execution_options(populate_existing=True))).one()
    after = snapshot(changed)
    await record_change(session, actor=actor, action=action, subject_id=str(key.id), before=before, after=after)
    return changed


async def list_api_keys(
    session: AsyncSession, *, organization: str | None = None, api_key: str | None = None, unused_for: timedelta | None = None
) -> list[KeyRecord]:
    """Newest first; only an organization's, or only the one of this id or prefix, if they are given.

    unused_for: only those that are not revoked and were not used for so long; of a key whose uses are not known for so long yet
    nobody can tell. Raises: NotFound, InvalidValue.
    """
    query = _select_keys().order_by(ApiKey.created_at.desc(), ApiKey.id)
    if api_key:
        query = query.where(ApiKey.id == (await find_api_key(session, api_key)).id)
    if unused_for is not None:
        if not timedelta(0) < unused_for <= LIFETIME_MAX:
            raise InvalidValue("unused_for", f"give more than zero and at most {LIFETIME_MAX.days} days")
        used_at = func.coalesce(ApiKeyUse.last_used_at, ApiKey.uses_known_since)
        query = query.where(ApiKey.revoked_at.is_(None), used_at < func.now() - unused_for)
    if organization:
        query = query.where(Project.organization_id == (await find_organization(session, organization)).id)
    return [_key_record(*row) for row in await session.execute(query)]


def select_principal() -> Select[Any]:
    """Whom a secret belongs to, by its hash, if it is good now."""
    replaced = select(SupersededSecret).where(SupersededSecret.secret_hash == bindparam("secret_hash")).subquery()
    ends_at = func.least(ApiKey.expires_at, replaced.c.expires_at)  # of those that are known
    return (
        select(
            ApiKey.id,
            ApiKey.prefix,
            ApiKey.project_id,
            Project.organization_id,
            Organization.currency_code,
            ApiKey.scopes,
            cast(func.extract("epoch", ends_at - func.now()), Double),
            ApiKey.models,
            ApiKey.max_input_tokens,
            ApiKey.max_output_tokens,
            ApiKey.allowed_networks,
        )
        .join(Project, Project.id == ApiKey.project_id)
        .join(Organization, Organization.id == Project.organization_id)
        .outerjoin(replaced, replaced.c.api_key_id == ApiKey.id)
        .where(
            or_(ApiKey.secret_hash == bindparam("secret_hash"), ApiKey.id == select(replaced.c.api_key_id).scalar_subquery()),
            ApiKey.revoked_at.is_(None),
            or_(ends_at.is_(None), ends_at > func.now()),
        )
    )


PRINCIPAL_OF_SECRET = select_principal()  # put together once: to do it for each call took as long as the answer


async def authenticate(session: AsyncSession, secret: str) -> Principal:
    """Who the secret belongs to, by the database's clock. Raises: KeyInvalid, the same for unknown, revoked and expired.

    No time tells them apart: one statement answers all, and it compares SHA-256s by index, which says nothing of the secret.
    """
    refusal = KeyInvalid("the API key is not valid: it is unknown, revoked or expired")
    if SECRET_FORM.fullmatch(secret) is None:
        raise refusal
    found = await session.execute(PRINCIPAL_OF_SECRET, {"secret_hash": hash_of(secret)})
    if (row := found.one_or_none()) is None:
        raise refusal
    key_id, prefix, project_id, organization_id, currency_code, scopes, lifetime_s, models, most_in, most_out, networks = row
    return Principal(
        api_key_id=key_id,
        key_prefix=prefix,
        project_id=project_id,
        organization_id=organization_id,
        currency_code=currency_code,
        scopes=frozenset(scopes),
        secret_lifetime_s=lifetime_s,
        models=frozenset(models),
        bounds=TokenBounds(most_in, most_out),
        networks=networks_of(tuple(networks)),
        secret_hash=hash_of(secret),
    )


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
    if (row := (await session.execute(_select_keys().where(condition))).one_or_none()) is None:
        raise NotFound("API key", ref)
    return _key_record(*row)


def as_uuid(ref: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(ref)
    except ValueError:
        return None


def checked_name(name: str) -> str:
    """A name that an organization or project may have. One that reads as an id would make references ambiguous."""
    if NAME_FORM.fullmatch(name) is None or as_uuid(name) is not None:
        raise InvalidValue("name", 'give 1 to 63 of a-z, 0-9 and "-", starting with a letter, and not a UUID')
    return name


def _checked_lifetime(lifetime: timedelta) -> timedelta:
    if not timedelta(0) < lifetime <= LIFETIME_MAX:
        raise InvalidValue(
            "lifetime", f"give more than zero and at most {LIFETIME_MAX.days} days, or none for a key without an end"
        )
    return lifetime


def _select_keys() -> Select[ApiKey, Project, str, datetime, datetime]:
    overlap = (
        select(func.max(SupersededSecret.expires_at))
        .where(SupersededSecret.api_key_id == ApiKey.id, SupersededSecret.expires_at > func.now())
        .scalar_subquery()
    )
    return (
        select(ApiKey, Project, Organization.name, overlap, ApiKeyUse.last_used_at)
        .join(Project, Project.id == ApiKey.project_id)
        .join(Organization, Organization.id == Project.organization_id)
        .outerjoin(ApiKeyUse, ApiKeyUse.api_key_id == ApiKey.id)
    )


def _key_record(
    key: ApiKey, project: Project, organization_name: str, overlap_ends_at: datetime | None, last_used_at: datetime | None
) -> KeyRecord:
    return record_of(
        KeyRecord,
        key,
        organization_id=project.organization_id,
        organization_name=organization_name,
        project_name=project.name,
        overlap_ends_at=overlap_ends_at,
        last_used_at=last_used_at,
        bounds=TokenBounds(key.max_input_tokens, key.max_output_tokens),
    )


async def _record_creation(session: AsyncSession, actor: str, action: str, row: Organization | Project | ApiKey) -> None:
    await record_change(session, actor=actor, action=action, subject_id=str(row.id), before=None, after=snapshot(row))


async def organization_names(session: AsyncSession, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, str]:
    rows = await session.execute(select(Organization.id, Organization.name).where(Organization.id.in_(set(ids))))
    return {row.id: row.name for row in rows}


async def project_names(session: AsyncSession, project_ids: Sequence[uuid.UUID]) -> list[str]:
    names = select(Organization.name + "/" + Project.name).select_from(Project).join(Organization)
    return sorted(await session.scalars(names.where(Project.id.in_(project_ids))))


async def subject_ids(session: AsyncSession, ref: str) -> list[str]:
    """The ids of an organization, a project or a key of that name, and of all below it; and the text itself, for other ids."""
    found: set[uuid.UUID] = set()
    finders: tuple[Callable[[AsyncSession, str], Awaitable[Organization | Project | KeyRecord]], ...]
    finders = (find_organization, find_project, find_api_key)
    for find in finders:
        with contextlib.suppress(NotFound):
            found.add((await find(session, ref)).id)
    projects = await session.scalars(select(Project.id).where(or_(Project.organization_id.in_(found), Project.id.in_(found))))
    found |= set(projects)
    found |= set(await session.scalars(select(ApiKey.id).where(ApiKey.project_id.in_(found))))
    return sorted({ref, *map(str, found)})


OVERLAP = timedelta(hours=24)  # a working day to put the new secret in place
OVERLAP_MAX = timedelta(days=30)  # a leaked secret that works for longer is not rotated, only doubled
EXPIRY_MIN, EXPIRY_MAX = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


async def rotate_api_key(
    session: AsyncSession, *, api_key: str, overlap: timedelta = OVERLAP, actor: str
) -> tuple[KeyRecord, str, datetime]:
    """Give a key, by id or prefix, a new secret; the key, the secret, and until when the replaced one works.

    overlap: 0 ends the replaced secret at once, and every request that was begun with it. A secret that was replaced before keeps
    its own end, or ends with this overlap if that is earlier. Raises: NotFound, InvalidValue, KeyRevoked.
    """
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise InvalidValue("overlap", f"give zero to {OVERLAP_MAX.days} days")
    found = await find_api_key(session, api_key)
    key = await _changeable(session, found)
    secret = new_secret(prefix=key.prefix)
    await session.execute(
        delete(SupersededSecret).where(SupersededSecret.api_key_id == key.id, SupersededSecret.expires_at <= func.now())
    )
    values = {"secret_hash": key.secret_hash, "api_key_id": key.id, "expires_at": func.now() + overlap}
    ends_at = (await session.scalars(insert(SupersededSecret).values(values).returning(SupersededSecret.expires_at))).one()
    superseded = (await session.scalars(select(SupersededSecret).where(SupersededSecret.api_key_id == key.id))).all()
    for older in superseded:
        older.expires_at = min(older.expires_at, ends_at)
    ended_secrets = [] if overlap else [each.secret_hash for each in superseded]
    await session.flush()
    before = snapshot(key)
    key.secret_hash = hash_of(secret)
    await session.flush()
    # No hash is logged, so the end of the replaced secret is what tells one rotation from another.
    ended, ends = ({"replaced_secret_ends_at": each and each.isoformat()} for each in (found.overlap_ends_at, ends_at))
    await record_change(
        session, actor=actor, action="api_key.rotate", subject_id=str(key.id), before=before | ended, after=before | ends
    )
    await order_look_at_key(session, key.id, key.allowed_networks, ended_secrets)
    return await find_api_key(session, str(key.id)), secret, ends_at


async def update_api_key(
    session: AsyncSession,
    *,
    api_key: str,
    name: str | None = None,
    scopes: Collection[str] = (),
    models: Collection[str] = (),
    all_models: bool = False,
    allowed_networks: Collection[str] = (),
    all_networks: bool = False,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    expires_at: datetime | None = None,
    never_expires: bool = False,
    actor: str,
) -> KeyRecord:
    """Change what is given of a key, by id or prefix; the rest stays. A time that has passed ends the key now; 0 tokens: no bound.

    Every process looks at the key again at once, and ends what it runs from outside of the key's networks.

    Raises: NotFound, InvalidValue, KeyRevoked.
    """
    if all_models and models:
        raise InvalidValue("all_models", "name models or say that it is good for all, not both")
    if all_networks and allowed_networks:
        raise InvalidValue("all_networks", "name networks or say that it is good from everywhere, not both")
    if never_expires and expires_at is not None:
        raise InvalidValue("never_expires", "give a time or say that there is none, not both")
    if expires_at is not None and not EXPIRY_MIN <= expires_at <= EXPIRY_MAX:
        raise InvalidValue("expire_time", f"give a time from {EXPIRY_MIN:%Y} to {EXPIRY_MAX:%Y}")
    found = await find_api_key(session, api_key)
    key = await _changeable(session, found)
    wanted = {
        "name": key.name if name is None else checked_key_name(name),
        "scopes": checked_scopes(scopes) if scopes else list(key.scopes),
        "models": checked_models(models) if models or all_models else list(key.models),
        "allowed_networks": (
            checked_networks(allowed_networks) if allowed_networks or all_networks else list(key.allowed_networks)
        ),
        "max_input_tokens": _bound(key.max_input_tokens, max_input_tokens, "max_input_tokens"),
        "max_output_tokens": _bound(key.max_output_tokens, max_output_tokens, "max_output_tokens"),
        "expires_at": None if never_expires else (expires_at or key.expires_at),
    }
    values = {column: value for column, value in wanted.items() if getattr(key, column) != value}
    if not values:
        return found
    changed = await change_key(session, key, actor, "api_key.update", **values)
    if values.keys() - {"name"}:
        await order_look_at_key(session, key.id, changed.allowed_networks)
    return await find_api_key(session, str(key.id))


def _bound(standing: int | None, given: int | None, field: str) -> int | None:
    return standing if given is None else checked_bound(given, field)


async def _changeable(session: AsyncSession, found: KeyRecord) -> ApiKey:
    key = await locked_key(session, found.id)
    if key.revoked_at is not None:
        raise KeyRevoked(f"key {key.prefix} is revoked, which is for good: create another one")
    return key
