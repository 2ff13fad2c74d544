"""What happens to a key after its creation: a new secret beside the old one, another name, other scopes, another end.

Functions take a session and never commit. A rotated key is the same key: its id, prefix, limits and counters stay, so that a quota
is exact however many of its secrets are in use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.stop_orders import order_look_at_key
from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue, KeyRevoked
from metering.core.models import ApiKey, SupersededSecret
from metering.tenants.networks import checked_networks
from metering.tenants.tenants import (
    KeyRecord,
    TokenBounds,
    change_key,
    checked_bound,
    checked_key_name,
    checked_models,
    checked_scopes,
    find_api_key,
    hash_of,
    locked_key,
    new_secret,
)

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
    return replace(
        found,
        name=changed.name,
        scopes=tuple(changed.scopes),
        models=tuple(changed.models),
        expires_at=changed.expires_at,
        allowed_networks=tuple(changed.allowed_networks),
        bounds=TokenBounds(changed.max_input_tokens, changed.max_output_tokens),
    )


def _bound(standing: int | None, given: int | None, field: str) -> int | None:
    return standing if given is None else checked_bound(given, field)


async def _changeable(session: AsyncSession, found: KeyRecord) -> ApiKey:
    key = await locked_key(session, found.id)
    if key.revoked_at is not None:
        raise KeyRevoked(f"key {key.prefix} is revoked, which is for good: create another one")
    return key
