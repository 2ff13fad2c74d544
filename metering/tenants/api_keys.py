"""API keys: their terms, their changes, and the limits that a new key gets.

Functions take a session and never commit. Every change writes the audit log in the same
transaction.

A rotated key is the same key: its id, prefix, limits and counters stay, so that a quota is exact
however many of its secrets are in use.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Select,
    Text,
    and_,
    case,
    cast,
    delete,
    func,
    literal,
    not_,
    or_,
    select,
    union,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import cancel_requests_of_key, recheck_key
from metering.core.audit import record_change, record_changes, snapshot
from metering.core.errors import InvalidValue, KeyRevoked, NotFound
from metering.core.models import (
    QUOTA_TARGET,
    ApiKey,
    ApiKeyOwner,
    ApiKeyUse,
    Organization,
    Project,
    Quota,
    QuotaSubject,
    QuotaTerms,
    SupersededSecret,
    record_of,
    values_of,
)
from metering.core.pages import PAGE_SIZE, SortKey, page_of, utc_time
from metering.tenants.authentication import (
    PREFIX_FORM,
    PREFIX_LENGTH,
    hash_of,
    new_secret,
    prefix_of,
)
from metering.tenants.key_groups import align_group_limits, lock_groups
from metering.tenants.key_terms import DEFAULT_TERMS, KeyTerms, checked_terms
from metering.tenants.tenants import as_uuid, check_open, find_organization, find_project

KEY_NAME_MAX_CHARS = 100
LIFETIME_MAX = timedelta(days=36_500)  # a century; keeps the sum within the range of a timestamp
OVERLAP = timedelta(hours=24)  # a working day to deploy the new secret
OVERLAP_MAX = timedelta(days=30)  # a longer overlap would leave a leaked secret in use
OF_MEMBERSHIP = "{} acts for a member; change or remove the member instead"
EXPIRY_MIN, EXPIRY_MAX = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """Owner of a key, a person or a service account, by the columns of `ApiKeyOwner`.

    Without either, the key belongs to its project alone. `creator_id` is the person who created it.
    """

    person_id: uuid.UUID | None = None
    service_account_id: uuid.UUID | None = None
    creator_id: uuid.UUID | None = None

    @property
    def is_known(self) -> bool:
        return self.person_id is not None or self.service_account_id is not None


NO_OWNER = KeyOwner()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord(KeyTerms):
    """An API key with its terms, without its secret. One that `is_bound` has none.

    A replaced secret is valid until `overlap_ends_at`. `last_used_at` is None if the key was not
    used since `uses_tracked_since`.
    """

    id: uuid.UUID
    organization_id: uuid.UUID
    organization_name: str
    project_id: uuid.UUID
    project_name: str
    name: str
    prefix: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    uses_tracked_since: datetime
    is_bound: bool = False
    owner: KeyOwner = NO_OWNER
    overlap_ends_at: datetime | None = None
    last_used_at: datetime | None = None


def checked_key_name(name: str) -> str:
    """Validate a key name and return it unchanged. Raises: InvalidValue."""
    if not 1 <= len(name) <= KEY_NAME_MAX_CHARS or not name.isprintable():
        raise InvalidValue("name", f"must have 1 to {KEY_NAME_MAX_CHARS} printable characters")
    return name


def checked_lifetime(lifetime: timedelta) -> timedelta:
    """Validate a lifetime and return it unchanged. Raises: InvalidValue."""
    if not timedelta(0) < lifetime <= LIFETIME_MAX:
        raise InvalidValue(
            "lifetime",
            f"must be more than zero and at most {LIFETIME_MAX.days} days, or unset for an"
            " unlimited key",
        )
    return lifetime


async def create_api_key(
    session: AsyncSession,
    *,
    organization: str,
    project: str,
    name: str,
    terms: KeyTerms = DEFAULT_TERMS,
    lifetime: timedelta | None = None,
    is_bound: bool = False,
    owner: KeyOwner = NO_OWNER,
    actor: str,
) -> tuple[KeyRecord, str]:
    """Create a key. Returns it with its secret, which cannot be read again.

    With `is_bound`, it has no secret and the one returned is empty. It gets the limits that its
    project and organization define for new keys, and those of its group. Raises: NotFound,
    InvalidValue.
    """
    within = await find_project(session, project, organization=organization)
    await check_open(session, within)
    if terms.group:
        await lock_groups(session, within.organization_id)
    expires_at = None if lifetime is None else func.now() + checked_lifetime(lifetime)
    values = checked_terms(terms) | {
        "project_id": within.id,
        "name": checked_key_name(name),
        "expires_at": expires_at,
    }
    while True:  # until the prefix is unused, which is nearly always the first
        secret = new_secret()
        values |= {
            "prefix": prefix_of(secret),
            "secret_hash": None if is_bound else hash_of(secret),
        }
        statement = (
            insert(ApiKey)
            .values(values)
            .on_conflict_do_nothing(index_elements=["prefix"])
            .returning(ApiKey)
        )
        if (key := await session.scalar(statement)) is not None:
            break
    if owner != NO_OWNER:
        await session.execute(
            insert(ApiKeyOwner).values(values_of(KeyOwner, owner) | {"api_key_id": key.id})
        )
    owned = {name: str(value) for name, value in values_of(KeyOwner, owner).items() if value}
    await record_change(
        session,
        actor=actor,
        action="api_key.create",
        subject_id=str(key.id),
        before=None,
        after=snapshot(key) | owned,
    )
    await limit_new_key(
        session,
        api_key_id=key.id,
        project_id=within.id,
        organization_id=within.organization_id,
        actor=actor,
    )
    if terms.group:  # the new limits have no usage to count
        await align_group_limits(session, within.organization_id, actor)
    return await find_api_key(session, str(key.id)), "" if is_bound else secret


def is_unowned() -> ColumnElement[bool]:
    """Return the condition that a key has a secret, and neither a person nor a service account.

    Only these keys are part of configurations.
    """
    return is_owned_like(NO_OWNER)


def is_owned_like(owner: KeyOwner) -> ColumnElement[bool]:
    """Return the condition that a key has a secret and this person or service account, or none."""
    owned = select(ApiKeyOwner.api_key_id).where(ApiKeyOwner.api_key_id == ApiKey.id)
    if owner.is_known:
        owned = owned.where(
            ApiKeyOwner.person_id.is_not_distinct_from(owner.person_id),
            ApiKeyOwner.service_account_id.is_not_distinct_from(owner.service_account_id),
        )
        return and_(ApiKey.secret_hash.is_not(None), owned.exists())
    has_owner = func.num_nonnulls(ApiKeyOwner.person_id, ApiKeyOwner.service_account_id) > 0
    return and_(ApiKey.secret_hash.is_not(None), ~owned.where(has_owner).exists())


async def limit_new_key(
    session: AsyncSession,
    *,
    api_key_id: uuid.UUID,
    project_id: uuid.UUID,
    organization_id: uuid.UUID,
    actor: str,
) -> None:
    """Copy limits for new keys to a key. The project's take precedence over the organization's."""
    kept = select(Quota).where(
        Quota.subject_id.in_((project_id, organization_id)),
        Quota.for_new_keys.is_(True),
        Quota.deleted_at.is_(None),
    )
    nearest_last = case((Quota.subject == QuotaSubject.PROJECT, 1), else_=0)
    rows = await session.scalars(kept.order_by(nearest_last, Quota.created_at, Quota.id))
    nearest = {tuple(getattr(row, name) for name in QUOTA_TARGET): row for row in rows}
    for target, template in nearest.items():
        copied = dict(zip(QUOTA_TARGET, target, strict=True)) | values_of(QuotaTerms, template)
        copy = (
            insert(Quota)
            .values(subject=QuotaSubject.API_KEY, subject_id=api_key_id, **copied)
            .returning(Quota)
        )
        quota = (await session.scalars(copy)).one()
        await record_change(
            session,
            actor=actor,
            action="quota.set",
            subject_id=str(quota.id),
            before=None,
            after=snapshot(quota),
        )


async def update_api_key(
    session: AsyncSession,
    *,
    api_key: str,
    name: str | None = None,
    terms: Callable[[KeyTerms], KeyTerms] | None = None,
    expires_at: datetime | None = None,
    never_expires: bool = False,
    actor: str,
    uncounted: list[tuple[Quota, uuid.UUID]] | None = None,
) -> KeyRecord:
    """Change the given attributes of a key, found by id or prefix; others stay.

    `terms` maps the present terms to the new ones. A past `expires_at` refuses new requests from
    now on. Every process checks the key again at once and cancels its requests from networks no
    longer allowed. The limits of a new group are added to `uncounted`, with the organization: the
    caller counts their past usage (`quotas/quota_recount.py`) at the end of the transaction.
    Raises: NotFound, InvalidValue, KeyRevoked.
    """
    if never_expires and expires_at is not None:
        raise InvalidValue("never_expires", "set either a time or never_expires, not both")
    if expires_at is not None and not EXPIRY_MIN <= expires_at <= EXPIRY_MAX:
        raise InvalidValue("expire_time", f"must be a time from {EXPIRY_MIN:%Y} to {EXPIRY_MAX:%Y}")
    record = await find_api_key(session, api_key)
    if terms is not None:
        await lock_groups(session, record.organization_id)
    key = await _changeable(session, record)
    if is_membership(record) and (expires_at is not None or never_expires):
        raise InvalidValue("expire_time", f"cannot be set: {OF_MEMBERSHIP.format(key.prefix)}")
    requested: dict[str, object] = {
        "name": key.name if name is None else checked_key_name(name),
        "expires_at": None if never_expires else (expires_at or key.expires_at),
    }
    if terms is not None:
        requested |= checked_terms(terms(record_of(KeyTerms, key)))
        if record.owner.is_known and (list(key.scopes), key.role) != (
            requested["scopes"],
            requested["role"],
        ):
            raise InvalidValue(
                "role",
                f"{key.prefix} has the role of its owner: change that of the member or service"
                " account, or create a key without an owner",
            )
    values = {column: value for column, value in requested.items() if getattr(key, column) != value}
    if not values:
        return record
    changed = await change_key(session, key, actor, "api_key.update", **values)
    if values.keys() - {"name"}:
        await recheck_key(session, key.id, changed.allowed_networks)
    if "group" in values:
        aligned = await align_group_limits(session, record.organization_id, actor)
        assert uncounted is not None or not aligned, "limits of a group count past usage"
        if uncounted is not None:
            uncounted += [(each, record.organization_id) for each in aligned]
    return await find_api_key(session, str(key.id))


async def rotate_api_key(
    session: AsyncSession, *, api_key: str, overlap: timedelta = OVERLAP, actor: str
) -> tuple[KeyRecord, str, datetime]:
    """Give a key, found by id or prefix, a new secret.

    Returns the key, the secret, and the time at which the replaced secret ends. `overlap` 0 ends it
    at once, with every request started with it. Secrets replaced earlier keep their end, or end
    with this overlap if that is earlier. Raises: NotFound, InvalidValue, KeyRevoked.
    """
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise InvalidValue("overlap", f"must be zero to {OVERLAP_MAX.days} days")
    record = await find_api_key(session, api_key)
    key = await _changeable(session, record)
    if key.secret_hash is None:
        raise InvalidValue("api_key", f"{key.prefix} has no secret to replace: it is bound")
    secret = new_secret(prefix=key.prefix)
    await session.execute(
        delete(SupersededSecret).where(
            SupersededSecret.api_key_id == key.id, SupersededSecret.expires_at <= func.now()
        )
    )
    values = {
        "secret_hash": key.secret_hash,
        "api_key_id": key.id,
        "expires_at": func.now() + overlap,
    }
    ends_at = (
        await session.scalars(
            insert(SupersededSecret).values(values).returning(SupersededSecret.expires_at)
        )
    ).one()
    superseded = (
        await session.scalars(select(SupersededSecret).where(SupersededSecret.api_key_id == key.id))
    ).all()
    for older in superseded:
        older.expires_at = min(older.expires_at, ends_at)
    ended_secrets = [] if overlap else [each.secret_hash for each in superseded]
    await session.flush()
    before = snapshot(key)
    key.secret_hash = hash_of(secret)
    await session.flush()
    # No hash is logged, so the end of the replaced secret distinguishes one rotation from another.
    ended, ends = (
        {"replaced_secret_ends_at": each and each.isoformat()}
        for each in (record.overlap_ends_at, ends_at)
    )
    await record_change(
        session,
        actor=actor,
        action="api_key.rotate",
        subject_id=str(key.id),
        before=before | ended,
        after=before | ends,
    )
    await recheck_key(session, key.id, key.allowed_networks, ended_secrets)
    return await find_api_key(session, str(key.id)), secret, ends_at


async def revoke_api_key(session: AsyncSession, *, api_key: str, actor: str) -> KeyRecord:
    """Revoke a key, found by id or prefix, permanently, and cancel its requests. Idempotent.

    Raises: NotFound.
    """
    found = await find_api_key(session, api_key)
    if is_membership(found):
        raise InvalidValue(
            "api_key", f"cannot be revoked alone: {OF_MEMBERSHIP.format(found.prefix)}"
        )
    return replace(found, revoked_at=(await end_key(session, found.id, actor)).revoked_at)


async def end_key(session: AsyncSession, key_id: uuid.UUID, actor: str) -> ApiKey:
    """Revoke a key of any kind, and cancel its requests. Idempotent."""
    key = await locked_key(session, key_id)
    if key.revoked_at is not None:
        return key
    changed = await change_key(session, key, actor, "api_key.revoke", revoked_at=func.now())
    await cancel_requests_of_key(session, key.id)
    return changed


def is_membership(key: KeyRecord) -> bool:
    """Return whether a key acts for a signed-in member."""
    return key.is_bound and key.owner.person_id is not None


async def revoke_keys_of(
    session: AsyncSession, project_ids: Collection[uuid.UUID], *, actor: str
) -> int:
    """Revoke all keys of projects; return how many were not. The caller ends their requests.

    In two statements, because a project may have thousands.
    """
    revocation = (
        update(ApiKey)
        .where(ApiKey.project_id.in_(project_ids), ApiKey.revoked_at.is_(None))
        .values(revoked_at=func.now())
        .returning(ApiKey)
    )
    keys = (await session.scalars(revocation.execution_options(populate_existing=True))).all()
    entries = []
    for key in keys:
        after = snapshot(key)
        entry = {"actor": actor, "action": "api_key.revoke", "subject_id": str(key.id)}
        entries.append(entry | {"before": after | {"revoked_at": None}, "after": after})
    await record_changes(session, entries)
    return len(keys)


async def _changeable(session: AsyncSession, record: KeyRecord) -> ApiKey:
    key = await locked_key(session, record.id)
    if key.revoked_at is not None:
        raise KeyRevoked(
            f"The key {key.prefix} is revoked, which cannot be undone. Create another one."
        )
    return key


async def locked_key(session: AsyncSession, key_id: uuid.UUID) -> ApiKey:
    """Read a key's row and lock it against other changes until the transaction ends."""
    # Not FOR UPDATE: requests admitted concurrently refer to the row and must not wait.
    locking = select(ApiKey).where(ApiKey.id == key_id).with_for_update(key_share=True)
    return (await session.scalars(locking.execution_options(populate_existing=True))).one()


async def change_key(
    session: AsyncSession, key: ApiKey, actor: str, action: str, **values: Any
) -> ApiKey:
    """Set columns of a locked key and write the audit log."""
    before = snapshot(key)
    statement = update(ApiKey).where(ApiKey.id == key.id).values(**values).returning(ApiKey)
    changed = (await session.scalars(statement.execution_options(populate_existing=True))).one()
    after = snapshot(changed)
    await record_change(
        session, actor=actor, action=action, subject_id=str(key.id), before=before, after=after
    )
    return changed


async def find_api_key(session: AsyncSession, ref: str) -> KeyRecord:
    """Look up a key by id or prefix. Raises: NotFound."""
    key_id = as_uuid(ref)
    if key_id is None and PREFIX_FORM.fullmatch(ref) is None:
        raise NotFound("API key", ref[: PREFIX_LENGTH + 3])  # truncated: it might be a secret
    condition = ApiKey.prefix == ref if key_id is None else ApiKey.id == key_id
    if (row := (await session.execute(_select_keys().where(condition))).one_or_none()) is None:
        raise NotFound("API key", ref)
    return _key_record(*row)


async def list_api_keys(
    session: AsyncSession,
    *,
    organization: str | None = None,
    api_key: str | None = None,
    search: str = "",
    is_ended: bool | None = None,
    unused_for: timedelta | None = None,
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[KeyRecord], str]:
    """List a page of keys, the newest first: all, one organization's, or one by id or prefix.

    `search` selects keys whose name or prefix begins with it, in upper or lower case; `is_ended`
    those that are revoked or expired, or those that are neither. `unused_for` selects active keys
    without a use for this long; keys whose uses are recorded for a shorter time are left out.
    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    query = _select_keys()
    if begins := search.strip().lower():
        texts = func.lower(ApiKey.name), func.lower(ApiKey.prefix)
        query = query.where(or_(*(each.startswith(begins, autoescape=True) for each in texts)))
    if is_ended is not None:
        ended = or_(
            ApiKey.revoked_at.is_not(None), func.coalesce(ApiKey.expires_at <= func.now(), False)
        )
        query = query.where(ended if is_ended else not_(ended))
    if api_key:
        query = query.where(ApiKey.id == (await find_api_key(session, api_key)).id)
    if unused_for is not None:
        if not timedelta(0) < unused_for <= LIFETIME_MAX:
            raise InvalidValue(
                "unused_for", f"must be more than zero and at most {LIFETIME_MAX.days} days"
            )
        used_at = func.coalesce(ApiKeyUse.last_used_at, ApiKey.uses_tracked_since)
        query = query.where(ApiKey.revoked_at.is_(None), used_at < func.now() - unused_for)
    if organization:
        query = query.where(
            Project.organization_id == (await find_organization(session, organization)).id
        )
    sorting = SortKey(ApiKey.created_at, utc_time), SortKey(ApiKey.id, uuid.UUID)
    rows, following = await page_of(
        session, query, *sorting, page_size=page_size, page_token=page_token, latest_first=True
    )
    return [_key_record(*row) for row in rows], following


def _select_keys() -> Select[ApiKey, Project, str, datetime, datetime, ApiKeyOwner]:
    overlap = (
        select(func.max(SupersededSecret.expires_at))
        .where(SupersededSecret.api_key_id == ApiKey.id, SupersededSecret.expires_at > func.now())
        .scalar_subquery()
    )
    return (
        select(ApiKey, Project, Organization.name, overlap, ApiKeyUse.last_used_at, ApiKeyOwner)
        .join(Project, Project.id == ApiKey.project_id)
        .join(Organization, Organization.id == Project.organization_id)
        .outerjoin(ApiKeyUse, ApiKeyUse.api_key_id == ApiKey.id)
        .outerjoin(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
    )


def _key_record(
    key: ApiKey,
    project: Project,
    organization_name: str,
    overlap_ends_at: datetime | None,
    last_used_at: datetime | None,
    owner: ApiKeyOwner | None,
) -> KeyRecord:
    return record_of(
        KeyRecord,
        key,
        is_bound=key.secret_hash is None,
        owner=NO_OWNER if owner is None else record_of(KeyOwner, owner),
        organization_id=project.organization_id,
        organization_name=organization_name,
        project_name=project.name,
        overlap_ends_at=overlap_ends_at,
        last_used_at=last_used_at,
    )


async def subject_ids(session: AsyncSession, ref: str) -> CompoundSelect[str]:
    """Select the ids of an organization, project or key and all below it, and `ref` itself.

    They stay in the database: an organization may have very many keys.
    """
    ids: set[uuid.UUID] = set()
    finders: tuple[
        Callable[[AsyncSession, str], Awaitable[Organization | Project | KeyRecord]], ...
    ]
    finders = (find_organization, find_project, find_api_key)
    for find in finders:
        with contextlib.suppress(NotFound):
            ids.add((await find(session, ref)).id)
    of_ids = or_(Project.organization_id.in_(ids), Project.id.in_(ids))
    return union(
        *(select(literal(each)) for each in (ref, *map(str, ids))),
        select(cast(Project.id, Text)).where(of_ids),
        select(cast(ApiKey.id, Text)).join(Project).where(of_ids),
    )
