"""Idempotent admin calls: client-generated request ids, get or create by name, and the lock of
changes.

A request id is kept if, and only if, the object that it created is. An existing object that differs
from the request is refused, never changed. Single changes share the lock and a whole configuration
holds it exclusively, so that its plan is exact at its commit. Functions take a session and never
commit.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import timedelta

import psycopg
from sqlalchemy import func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import (
    AlreadyExists,
    ConcurrentChanges,
    RequestIdReused,
    WriteConflict,
)
from metering.core.models import ApiKey, Organization, Project
from metering.tenants.api_keys import (
    NO_OWNER,
    KeyOwner,
    KeyRecord,
    create_api_key,
    find_api_key,
    is_owned_like,
)
from metering.tenants.key_terms import DEFAULT_TERMS, KeyTerms, checked_terms
from metering.tenants.tenants import (
    create_organization,
    create_project,
    find_organization,
    find_project,
)

FORGET_OLD = text("DELETE FROM admin_requests WHERE created_at < now() - :kept_for")
BEGIN = text("""
INSERT INTO admin_requests (request_id, method, payload_hash, subject_id)
VALUES (:request_id, :method, :payload_hash, '')
ON CONFLICT DO NOTHING
RETURNING request_id
""")
EARLIER = text("SELECT * FROM admin_requests WHERE request_id = :request_id")
MADE = text("UPDATE admin_requests SET subject_id = :subject_id WHERE request_id = :request_id")
KEPT_FOR = timedelta(days=7)  # a script repeated after a weekend still finds its own call

CHANGES_LOCK_ID = 7_355_609  # arbitrary, but never to be changed
# Below the statement timeout, so that a lock wait differs from a database that hangs.
WAIT_MAX_S = 5.0


async def earlier_subject(
    session: AsyncSession, request_id: uuid.UUID, method: str, payload: bytes
) -> str | None:
    """Return the id of the object that an earlier call with this request id created.

    Returns None for the first call, which must then call `made`; a concurrent second one waits for
    it. Raises: RequestIdReused for another method or payload.
    """
    digest = hashlib.sha256(payload).digest()
    await session.execute(FORGET_OLD, {"kept_for": KEPT_FOR})
    if (
        await session.scalar(
            BEGIN, {"request_id": request_id, "method": method, "payload_hash": digest}
        )
        is not None
    ):
        return None
    earlier = (await session.execute(EARLIER, {"request_id": request_id})).one()
    if (earlier.method, earlier.payload_hash) != (method, digest):
        raise RequestIdReused(
            f"You used this request_id for another {earlier.method}. Use a new one for a new call."
        )
    return str(earlier.subject_id)


async def made(session: AsyncSession, request_id: uuid.UUID, subject_id: str) -> None:
    """Record the id of the object that the first call with a request id created."""
    await session.execute(MADE, {"request_id": request_id, "subject_id": subject_id})


async def take_changes_lock(session: AsyncSession, *, alone: bool) -> None:
    """Take the lock on configuration changes until the transaction ends.

    `alone` excludes all other changes; otherwise it is shared. Raises: ConcurrentChanges.
    """
    lock = func.pg_advisory_xact_lock if alone else func.pg_advisory_xact_lock_shared
    await session.execute(select(func.set_config("lock_timeout", f"{WAIT_MAX_S}s", True)))
    try:
        await session.execute(select(lock(CHANGES_LOCK_ID)))
    except WriteConflict as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise ConcurrentChanges from None
        raise
    await session.execute(select(func.set_config("lock_timeout", "0", True)))


async def ensure_organization(
    session: AsyncSession,
    *,
    name: str,
    currency_code: str = "USD",
    allow_existing: bool = True,
    actor: str,
) -> tuple[Organization, bool]:
    """Create an organization unless it exists. Raises: InvalidValue, AlreadyExists.

    Also returns whether it existed. AlreadyExists means that it has another currency, or that it
    exists and `allow_existing` is False.
    """
    try:
        return (
            await create_organization(session, name=name, currency_code=currency_code, actor=actor),
            False,
        )
    except AlreadyExists:
        if not allow_existing:
            raise
        existing = await find_organization(session, name)
    if existing.currency_code != currency_code:
        raise AlreadyExists(
            "organization", name, f"with the currency {existing.currency_code}, which never changes"
        )
    return existing, True


async def ensure_project(
    session: AsyncSession, *, organization: str, name: str, allow_existing: bool = True, actor: str
) -> tuple[Project, bool]:
    """Create a project unless it exists; return whether it did.

    Raises: NotFound; InvalidValue; AlreadyExists unless `allow_existing`.
    """
    try:
        return (
            await create_project(session, organization=organization, name=name, actor=actor),
            False,
        )
    except AlreadyExists:
        if not allow_existing:
            raise
        return await find_project(session, name, organization=organization), True


async def ensure_api_key(
    session: AsyncSession,
    *,
    organization: str,
    project: str,
    name: str,
    terms: KeyTerms = DEFAULT_TERMS,
    lifetime: timedelta | None = None,
    owner: KeyOwner = NO_OWNER,
    allow_existing: bool = True,
    actor: str,
) -> tuple[KeyRecord, str, bool]:
    """Create a key unless the project has an active one of this name, owner and terms.

    Returns the key, its secret (empty for an existing key), and whether it existed. Without
    `allow_existing`, always creates one. Raises: NotFound; InvalidValue; AlreadyExists if the terms
    of the existing key differ, or if several keys have the name.
    """
    within = await find_project(session, project, organization=organization)
    # Serializes concurrent calls of the same script; admissions refer to the row and do not wait.
    await session.execute(
        select(Project.id).where(Project.id == within.id).with_for_update(key_share=True)
    )
    working = select(ApiKey.id).where(
        ApiKey.project_id == within.id,
        ApiKey.name == name,
        ApiKey.revoked_at.is_(None),
        is_owned_like(owner),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
    )
    key_ids = (await session.scalars(working)).all() if allow_existing else ()
    if not key_ids:
        key, secret = await create_api_key(
            session,
            organization=organization,
            project=project,
            name=name,
            terms=terms,
            lifetime=lifetime,
            owner=owner,
            actor=actor,
        )
        return key, secret, False
    if len(key_ids) > 1:
        raise AlreadyExists(
            "API key", name, f"{len(key_ids)} times: revoke all but one, or name one by its prefix"
        )
    existing = await find_api_key(session, str(key_ids[0]))
    requested = checked_terms(terms)
    for term, value in checked_terms(existing).items():
        if value != requested[term]:
            shown = ", ".join(value) if isinstance(value, list) else str(value or "").lower()
            detail = f"with {term} {shown or 'unset'}: change that with UpdateApiKey"
            raise AlreadyExists("API key", name, detail)
    return existing, "", True
