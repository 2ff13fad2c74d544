"""Admin calls that may be repeated: request ids that clients mint, get or create by name, and the lock of changes.

A request id is kept if, and only if, what it made is. An object that exists but is not as requested is refused, never changed.
Single changes share the lock and a whole configuration holds it exclusively, so that its plan is exact at its commit. Functions
take a session and never commit.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import timedelta
from typing import Unpack

import psycopg
from sqlalchemy import func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.errors import AlreadyExists, ChangesUnderWay, RequestIdReused, StoreAway
from metering.core.models import ApiKey, Organization, Project
from metering.tenants.tenants import (
    KeyRecord,
    KeyTerms,
    checked_name,
    checked_terms,
    create_api_key,
    create_organization,
    create_project,
    find_api_key,
    find_organization,
    find_project,
)

FORGET_OLD = text("DELETE FROM admin_requests WHERE created_at < now() - :kept_for")
BEGIN = text("""
INSERT INTO admin_requests (request_id, method, payload_hash, subject_id) VALUES (:request_id, :method, :payload_hash, '')
ON CONFLICT DO NOTHING RETURNING request_id
""")
EARLIER = text("SELECT * FROM admin_requests WHERE request_id = :request_id")
MADE = text("UPDATE admin_requests SET subject_id = :subject_id WHERE request_id = :request_id")
KEPT_FOR = timedelta(days=7)  # a script that is repeated after a weekend still finds its own call


async def earlier_subject(session: AsyncSession, request_id: uuid.UUID, method: str, payload: bytes) -> str | None:
    """The id of what an earlier call of this request id made; None for the first, which then must call `made`.

    Of two calls at once, the second waits for the first. Raises: RequestIdReused for another method or payload.
    """
    digest = hashlib.sha256(payload).digest()
    await session.execute(FORGET_OLD, {"kept_for": KEPT_FOR})
    if await session.scalar(BEGIN, {"request_id": request_id, "method": method, "payload_hash": digest}) is not None:
        return None
    earlier = (await session.execute(EARLIER, {"request_id": request_id})).one()
    if (earlier.method, earlier.payload_hash) != (method, digest):
        raise RequestIdReused(f"this request_id was used before for another {earlier.method}: mint a new one for a new call")
    return str(earlier.subject_id)


async def made(session: AsyncSession, request_id: uuid.UUID, subject_id: str) -> None:
    """Remember what the first call of a request id made."""
    await session.execute(MADE, {"request_id": request_id, "subject_id": subject_id})


CHANGES_LOCK_ID = 7_355_609  # any fixed number that is ours
WAIT_MAX_S = 5.0  # below the time limit of statements, so that what is waited for can be told from a database that hangs


async def take_changes_lock(session: AsyncSession, *, alone: bool) -> None:
    """Hold the lock until the transaction ends. Raises: ChangesUnderWay if others keep it for too long."""
    lock = func.pg_advisory_xact_lock if alone else func.pg_advisory_xact_lock_shared
    await session.execute(select(func.set_config("lock_timeout", f"{WAIT_MAX_S}s", True)))
    try:
        await session.execute(select(lock(CHANGES_LOCK_ID)))
    except StoreAway as error:
        if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
            raise ChangesUnderWay from None
        raise
    await session.execute(select(func.set_config("lock_timeout", "0", True)))


async def ensure_organization(
    session: AsyncSession, *, name: str, currency_code: str = "USD", actor: str
) -> tuple[Organization, bool]:
    """The customer of this name. Raises: InvalidValue; AlreadyExists if its currency is another one."""
    checked_name(name)
    try:
        return await create_organization(session, name=name, currency_code=currency_code, actor=actor), False
    except AlreadyExists:
        standing = await find_organization(session, name)
    if standing.currency_code != currency_code:
        raise AlreadyExists("organization", name, f"with the currency {standing.currency_code}, which never changes")
    return standing, True


async def ensure_project(session: AsyncSession, *, organization: str, name: str, actor: str) -> tuple[Project, bool]:
    """The project of this name. Raises: NotFound, InvalidValue."""
    checked_name(name)
    try:
        return await create_project(session, organization=organization, name=name, actor=actor), False
    except AlreadyExists:
        return await find_project(session, name, organization=organization), True


async def ensure_api_key(
    session: AsyncSession, *, organization: str, project: str, name: str, actor: str, **terms: Unpack[KeyTerms]
) -> tuple[KeyRecord, str, bool]:
    """The project's working key of this name; its secret only if it is new, else empty.

    Raises: NotFound, InvalidValue; AlreadyExists if what it is good for is something else, or if several keys have the name.
    """
    owner = await find_project(session, project, organization=organization)
    # Scripts that say the same at the same time take turns; admissions refer to the row and do not wait.
    await session.execute(select(Project.id).where(Project.id == owner.id).with_for_update(key_share=True))
    working = select(ApiKey.id).where(
        ApiKey.project_id == owner.id,
        ApiKey.name == name,
        ApiKey.revoked_at.is_(None),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
    )
    found = (await session.scalars(working)).all()
    if not found:
        key, secret = await create_api_key(session, organization=organization, project=project, name=name, actor=actor, **terms)
        return key, secret, False
    if len(found) > 1:
        raise AlreadyExists("API key", name, f"{len(found)} times: revoke all but one, or say which by its prefix")
    standing = await find_api_key(session, str(found[0]))
    wanted = checked_terms(terms)
    bounds = standing.bounds
    most = (bounds.max_input_tokens or "any number of", bounds.max_output_tokens or "any number of")
    for present, asked, how in (
        (sorted(standing.scopes), wanted["scopes"], f"with the scopes {', '.join(standing.scopes)}: change them"),
        (sorted(standing.models), wanted["models"], f"for {', '.join(standing.models) or 'every model'}: change that"),
        (
            sorted(standing.allowed_networks),
            wanted["allowed_networks"],
            f"to be used from {', '.join(standing.allowed_networks) or 'everywhere'}: change that",
        ),
        (
            (bounds.max_input_tokens, bounds.max_output_tokens),
            (wanted["max_input_tokens"], wanted["max_output_tokens"]),
            f"for {most[0]} input and {most[1]} output tokens: change that",
        ),
    ):
        if present != asked:
            raise AlreadyExists("API key", name, f"{how} with UpdateApiKey")
    return standing, "", True
