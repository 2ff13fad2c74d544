"""Client tokens: secrets for minutes with which a browser or app may make one kind of call.

A backend makes one with its API key for each user, so that no key is in a page. A token is a row:
its requests are counted there, exactly, and a revocation applies to the next call. Requests with it
are those of the key, with its limits, usage and bills. Functions take a session and never commit.
"""

from __future__ import annotations

import re
import secrets
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from sqlalchemy import Double, bindparam, cast, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import recheck_key
from metering.core.errors import InvalidValue, NotFound, TokenInvalid
from metering.core.models import ApiKey, ClientToken
from metering.tenants.authentication import (
    BASE62,
    SECRET_LENGTH,
    Principal,
    TokenBounds,
    TokenTerms,
    hash_of,
    narrowed,
    principal_of_row,
    select_principal,
)
from metering.tenants.key_terms import MODEL_NAME_MAX_CHARS, TOKENS_MAX
from metering.tenants.tenants import as_uuid

FORM = re.compile(rf"wct_[0-9A-Za-z]{{{SECRET_LENGTH}}}", re.ASCII)
LIFETIME = timedelta(minutes=5)
LIFETIME_MAX = timedelta(hours=1)
REQUESTS, REQUESTS_MAX = 1, 10_000
ORIGINS_MAX = 10
ORIGIN_CHARS_MAX = 255
LIVE_MAX = 100_000  # of one key: more are a loop that makes them
KEPT = timedelta(days=1)  # rows of expired tokens, so that a late call reads why it is refused
REMEDY = "Send a new one from your application's server."


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTokenTerms:
    """Terms of a client token, by the columns of `ClientToken`.

    `call` is the kind of HTTP call. The token limits are per request, within those of the key.
    """

    call: str
    model: str
    end_user: str = ""
    origins: tuple[str, ...] = ()
    max_requests: int = REQUESTS
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


def is_client_token(secret: str) -> bool:
    """Return whether a secret has the form of a client token."""
    return FORM.fullmatch(secret) is not None


def checked_origin(origin: str) -> str:
    """Validate an origin as browsers send it, and return it. Raises: InvalidValue."""
    try:
        parts = urlsplit(origin)
        is_valid = (
            parts.scheme in ("https", "http")
            and bool(parts.hostname)
            and f"{parts.scheme}://{parts.netloc}" == origin
            and "@" not in origin
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        is_valid = False
    if not is_valid or len(origin) > ORIGIN_CHARS_MAX or not origin.isascii():
        raise InvalidValue(
            "origins", f"{origin[:64]!r} is not an origin: write it as https://app.example.com"
        )
    return origin.lower()


def checked(terms: ClientTokenTerms) -> None:
    """Validate terms but `call` and the end user. Raises: InvalidValue."""
    if not 1 <= len(terms.model) <= MODEL_NAME_MAX_CHARS or not terms.model.isprintable():
        raise InvalidValue(
            "model", f"must be a name of 1 to {MODEL_NAME_MAX_CHARS} printable characters"
        )
    if not 1 <= terms.max_requests <= REQUESTS_MAX:
        raise InvalidValue("max_requests", f"must be 1 to {REQUESTS_MAX:,}")
    for name in ("max_input_tokens", "max_output_tokens"):
        value = getattr(terms, name)
        if value is not None and not 1 <= value <= TOKENS_MAX:
            raise InvalidValue(name, f"must be 1 to {TOKENS_MAX:,} tokens, or unset")
    if len(terms.origins) > ORIGINS_MAX:
        raise InvalidValue("origins", f"must have at most {ORIGINS_MAX}")


async def create_client_token(
    session: AsyncSession, maker: Principal, terms: ClientTokenTerms, lifetime: timedelta = LIFETIME
) -> tuple[uuid.UUID, str, datetime]:
    """Make a client token of the maker's key. Returns its id, its secret, and when it expires.

    Raises: InvalidValue.
    """
    checked(terms)
    if not timedelta(seconds=1) <= lifetime <= LIFETIME_MAX:
        raise InvalidValue("lifetime", "must be 1 second to 1 hour")
    if maker.secret_lifetime_s is not None:
        lifetime = min(lifetime, timedelta(seconds=maker.secret_lifetime_s))
    own = ClientToken.api_key_id == maker.api_key_id
    await session.execute(
        delete(ClientToken).where(own, ClientToken.expires_at < func.now() - KEPT)
    )
    live = select(func.count()).where(own, ClientToken.expires_at > func.now())
    if (await session.scalar(live) or 0) >= LIVE_MAX:
        raise InvalidValue("api_key", f"has {LIVE_MAX:,} client tokens that have not expired")
    secret = "wct_" + "".join(secrets.choice(BASE62) for _ in range(SECRET_LENGTH))
    values = {
        "api_key_id": maker.api_key_id,
        "secret_hash": hash_of(secret),
        "call": terms.call,
        "model": terms.model,
        "end_user": terms.end_user,
        "origins": sorted({checked_origin(each) for each in terms.origins}),
        "max_requests": terms.max_requests,
        "max_input_tokens": terms.max_input_tokens,
        "max_output_tokens": terms.max_output_tokens,
        "expires_at": func.now() + lifetime,
    }
    made = insert(ClientToken).values(values).returning(ClientToken.id, ClientToken.expires_at)
    token_id, expires_at = (await session.execute(made)).one()
    return token_id, secret, expires_at


async def revoke_client_tokens(
    session: AsyncSession, maker: Principal, *, client_token: str = "", end_user: str = ""
) -> int:
    """Revoke one client token of the maker's key, or all of an end user, and end their requests.

    Returns how many were still valid. Raises: NotFound, InvalidValue.
    """
    if bool(client_token) == bool(end_user):
        raise InvalidValue("client_token_id", "set either a client token or an end user")
    own = ClientToken.api_key_id == maker.api_key_id
    token_id = as_uuid(client_token)
    chosen = ClientToken.id == token_id if client_token else ClientToken.end_user == end_user
    if client_token and not (
        token_id and await session.scalar(select(ClientToken.id).where(own, chosen))
    ):
        raise NotFound("client token", client_token)
    ended = (
        await session.scalars(
            update(ClientToken)
            .where(own, chosen, ClientToken.revoked_at.is_(None))
            .where(ClientToken.expires_at > func.now())
            .values(revoked_at=func.now())
            .returning(ClientToken.secret_hash)
        )
    ).all()
    if ended:
        await recheck_key(session, maker.api_key_id, maker.terms.allowed_networks, ended)
    return len(ended)


PRINCIPAL_OF_CLIENT_TOKEN = (
    select_principal(ApiKey.id == ClientToken.api_key_id)
    .add_columns(
        ClientToken.id.label("client_token_id"),
        ClientToken.call,
        ClientToken.model.label("token_model"),
        ClientToken.end_user,
        ClientToken.origins,
        ClientToken.max_input_tokens.label("token_input"),
        ClientToken.max_output_tokens.label("token_output"),
        ClientToken.revoked_at.is_not(None).label("is_revoked"),
        cast(func.extract("epoch", ClientToken.expires_at - func.now()), Double).label("left_s"),
        (ClientToken.request_count >= ClientToken.max_requests).label("is_used_up"),
    )
    .where(ClientToken.secret_hash == bindparam("secret_hash"))
)


async def authenticate_client_token(session: AsyncSession, secret: str) -> Principal:
    """Return the principal of a client token. Raises: TokenInvalid."""
    secret_hash = hash_of(secret)
    result = await session.execute(PRINCIPAL_OF_CLIENT_TOKEN, {"secret_hash": secret_hash})
    if (row := result.one_or_none()) is None:
        raise TokenInvalid("it is unknown, or its API key has ended", REMEDY)
    if row.is_revoked:
        raise TokenInvalid("it was revoked", REMEDY, row.origins)
    if row.left_s <= 0:
        raise TokenInvalid("it has expired", REMEDY, row.origins)
    if row.is_used_up:
        raise TokenInvalid("it has made all of its requests", REMEDY, row.origins)
    token = TokenTerms(
        end_user=row.end_user,
        marks=frozenset({secret_hash}),
        client_token_id=row.client_token_id,
        call=row.call,
        origins=tuple(row.origins),
    )
    return narrowed(
        principal_of_row(row),
        token,
        lifetime_s=row.left_s,
        models=[row.token_model],
        bounds=TokenBounds(row.token_input, row.token_output),
    )


async def count_requests(session: AsyncSession, client_token_id: uuid.UUID, count: int) -> None:
    """Count requests of a client token. Concurrent ones never exceed its number.

    Raises: TokenInvalid if it has fewer left, has expired or was revoked.
    """
    counted = (
        update(ClientToken)
        .where(
            ClientToken.id == client_token_id,
            ClientToken.request_count + count <= ClientToken.max_requests,
            ClientToken.expires_at > func.now(),
            ClientToken.revoked_at.is_(None),
        )
        .values(request_count=ClientToken.request_count + count)
        .returning(ClientToken.id)
    )
    if await session.scalar(counted) is None:
        row = await session.get_one(ClientToken, client_token_id)
        raise TokenInvalid("it has made all of its requests", REMEDY, row.origins)
