"""Authentication of callers by the secrets of API keys, or by a bound key, which has no secret.

A secret is shown once, at its creation; only its SHA-256 is stored. A bound key acts for a caller
that is known by other means, such as a signed-in person: nothing that a caller can send
authenticates it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Double,
    Row,
    Select,
    and_,
    bindparam,
    cast,
    func,
    or_,
    select,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from metering.core.errors import KeyInvalid, OrganizationClosed, ProjectClosed, TokenInvalid
from metering.core.models import (
    ApiKey,
    ApiKeyOwner,
    Organization,
    OrganizationRegion,
    Person,
    Project,
    SupersededSecret,
    Suspension,
    record_of,
)
from metering.tenants.key_terms import AUTHORITY, DEFAULT_TERMS, KeyTerms
from metering.tenants.networks import Address, Network, networks_of

PREFIX_CHARS = string.ascii_lowercase + string.digits
PREFIX_LENGTH = 8  # 36^8 prefixes: enough to tell keys apart; not part of the key's strength
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRET_BYTES = 32
SECRET_LENGTH = 43  # 62^43 > 256^32

SECRET_FORM = re.compile(
    rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}_[0-9A-Za-z]{{{SECRET_LENGTH}}}", re.ASCII
)

BOUND_KEY_INVALID = (
    "The key that acts for you in this organization is revoked or expired. Ask an administrator of"
    " the organization for access."
)
# Condition for `select_principal`: the bound key with this id
IS_BOUND_KEY = and_(ApiKey.id == bindparam("api_key_id"), ApiKey.secret_hash.is_(None))
PREFIX_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Token limits of a key per request, all choices together; None means the model's limit."""

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


NO_BOUNDS = TokenBounds()


@dataclass(frozen=True, slots=True)
class Suspended:
    """Why the organization of a key may not use models, or else its project."""

    of_organization: bool
    reason: str
    by_operator: bool


@dataclass(frozen=True, slots=True)
class SingleUse:
    """Token that may be used once: the hash of its name, and the Unix time of its end."""

    token_issuer_id: uuid.UUID
    mark: bytes
    expires_at: float


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Terms of the token that a caller sent instead of a secret, beside those of its key.

    `end_user` and `labels` are those of its requests. `marks` are the hashes by which a revocation
    names it. `use` is set if it may be used once. A client token has an id, and may only make the
    HTTP call `call` from `origins`; without origins, pages of other servers cannot use it.
    """

    end_user: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    marks: frozenset[bytes] = frozenset()
    use: SingleUse | None = None
    client_token_id: uuid.UUID | None = None
    call: str = ""
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """Caller of a request, as identified by its key.

    `secret_lifetime_s` is the remaining validity of the secret, None if unlimited. `models` and
    `networks` are the allowed ones, empty for all. `bounds` limit the tokens of one request.
    `expires_at` is the key's, whichever secret is used. `address` is the client's, determined by
    the listener; None if unknown. `region` is the one that the organization is bound to, empty for
    none. `secret_hash` is that of the secret used in this call; a rotated
    key has several, a bound key none. `person_id` is that of the person the key belongs to; None if
    it belongs to no person. `terms` are those of the key; `scopes` (with the role, as
    `authority_of` returns them), `models`, `networks` and `bounds` have parts of them in the form
    that requests look up. `token` has the terms of a token that was sent instead of a secret.
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
    terms: KeyTerms = DEFAULT_TERMS
    expires_at: datetime | None = None
    suspended: Suspended | None = None
    person_id: uuid.UUID | None = None
    region: str = ""
    address: Address | None = field(default=None, compare=False)
    secret_hash: bytes = field(default=b"", compare=False, repr=False)
    token: TokenTerms | None = None

    @property
    def credentials(self) -> frozenset[bytes]:
        """Hashes of the secret or token; the end of one of them ends the caller's requests."""
        return frozenset({self.secret_hash}) if self.token is None else self.token.marks

    @property
    def end_user(self) -> str:
        """End user that the token names. Nothing of others is shown to the caller; empty: all."""
        return "" if self.token is None else self.token.end_user

    def knows(self, end_user: str) -> bool:
        """Return True if the caller may know requests of this end user."""
        return self.end_user in ("", end_user)

    def may_use(self, model: str) -> bool:
        """Return True if the key may use the model."""
        return model_allowed(self.models, model)


def narrowed(
    principal: Principal,
    token: TokenTerms,
    *,
    lifetime_s: float,
    models: Collection[str] = (),
    bounds: TokenBounds = NO_BOUNDS,
) -> Principal:
    """Return the principal of a token: no more than its key may do, and no longer.

    Without `models`, those of the key are allowed. Raises: TokenInvalid if no model is left.
    """
    allowed = principal.models
    if models:
        theirs, own = frozenset(models), principal.models
        allowed = frozenset(each for each in theirs if model_allowed(own, each)) | frozenset(
            each for each in own if model_allowed(theirs, each)
        )
        if not allowed:
            raise TokenInvalid("it permits no model that its key in Weir may use")
    limits = {
        name: min((each for each in values if each is not None), default=None)
        for name, values in (
            (name, (getattr(principal.bounds, name), getattr(bounds, name)))
            for name in ("max_input_tokens", "max_output_tokens")
        )
    }
    left_s = principal.secret_lifetime_s
    return replace(
        principal,
        token=token,
        models=allowed,
        bounds=TokenBounds(**limits),
        secret_lifetime_s=lifetime_s if left_s is None else min(left_s, lifetime_s),
    )


def new_secret(prefix: str | None = None) -> str:
    """Generate a secret: `wk_`, a visible prefix, `_`, and 256 random bits in base 62.

    `prefix` is that of an existing key that gets another secret; None generates one.
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
    """Return the visible part of a secret, which is stored and shown."""
    return secret[: len("wk_") + PREFIX_LENGTH]


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def model_allowed(models: Collection[str], requested: str) -> bool:
    """Return True if a key limited to these models may use the requested one; empty allows all.

    The name of a model allows each of its versions, `name@version`; a version allows only itself.
    """
    return not models or requested in models or requested.partition("@")[0] in models


def select_principal(
    identified: ColumnElement[bool], ends_at: ColumnElement[datetime | None] | None = None
) -> Select[Any]:
    """Build the query for the principal of a valid key that a condition identifies.

    It ends at `ends_at`, by default that of the key.
    """
    ends_at = func.least(ApiKey.expires_at) if ends_at is None else ends_at
    suspension, either = aliased(Suspension), aliased(Suspension)
    of_owner = (
        select(either.id)
        .where(
            either.organization_id == Project.organization_id,
            or_(either.project_id.is_(None), either.project_id == Project.id),
        )
        .order_by(either.closed_at.is_(None), either.project_id.is_(None).desc())
        .limit(1)
        .correlate(Project)
    )
    return (
        select(
            ApiKey.id,
            ApiKey.prefix,
            ApiKey.project_id,
            ApiKey.expires_at,
            Project.organization_id,
            Organization.currency_code,
            OrganizationRegion.region,
            cast(func.extract("epoch", ends_at - func.now()), Double).label("secret_lifetime_s"),
            *(getattr(ApiKey, each.name) for each in fields(KeyTerms)),
            suspension.project_id.is_(None).label("of_organization"),
            suspension.reason.label("suspension_reason"),
            suspension.by_operator,
            ApiKeyOwner.person_id,
            suspension.closed_at,
        )
        .join(Project, Project.id == ApiKey.project_id)
        .join(Organization, Organization.id == Project.organization_id)
        .outerjoin(OrganizationRegion, OrganizationRegion.organization_id == Organization.id)
        .outerjoin(suspension, suspension.id == of_owner.scalar_subquery())
        .outerjoin(ApiKeyOwner, ApiKeyOwner.api_key_id == ApiKey.id)
        .outerjoin(Person, Person.id == ApiKeyOwner.person_id)
        .where(
            identified,
            # A key that was revoked with its owner is refused with the reason of that.
            or_(ApiKey.revoked_at.is_(None), suspension.closed_at.is_not(None)),
            Person.deactivated_at.is_(None),
            ApiKeyOwner.suspended_at.is_(None),
            or_(ends_at.is_(None), ends_at > func.now()),
        )
    )


@cache  # building it per call took as long as the query
def select_principal_of_secret() -> Select[Any]:
    """Build the query for the principal of a secret, present or replaced, by its hash."""
    replaced = (
        select(SupersededSecret)
        .where(SupersededSecret.secret_hash == bindparam("secret_hash"))
        .subquery()
    )
    identified = or_(
        ApiKey.secret_hash == bindparam("secret_hash"),
        ApiKey.id == select(replaced.c.api_key_id).scalar_subquery(),
    )
    ends_at = func.least(ApiKey.expires_at, replaced.c.expires_at)  # ignores NULLs
    return select_principal(identified, ends_at).outerjoin(
        replaced, replaced.c.api_key_id == ApiKey.id
    )


@cache
def select_principal_of_bound_key() -> Select[Any]:
    """Build the query for the principal of a bound key, by its id."""
    return select_principal(IS_BOUND_KEY)


async def authenticate(session: AsyncSession, secret: str) -> Principal:
    """Return the principal of a secret that is valid by the database's clock. Raises: KeyInvalid.

    Unknown, revoked and expired secrets take equal time: one statement handles all, comparing
    SHA-256 hashes by index. Keys of deactivated persons and suspended members are refused like
    them.
    """
    if SECRET_FORM.fullmatch(secret) is None:
        raise KeyInvalid()
    secret_hash = hash_of(secret)
    result = await session.execute(select_principal_of_secret(), {"secret_hash": secret_hash})
    if (row := result.one_or_none()) is None:
        raise KeyInvalid()
    return principal_of_row(row, secret_hash)


async def authenticate_bound(session: AsyncSession, api_key_id: uuid.UUID) -> Principal:
    """Return the principal of a bound key that is valid by the database's clock.

    The caller has proved by other means whom the key acts for. Raises: KeyInvalid, for a key that
    has a secret as well.
    """
    result = await session.execute(select_principal_of_bound_key(), {"api_key_id": api_key_id})
    if (row := result.one_or_none()) is None:
        raise KeyInvalid(BOUND_KEY_INVALID)
    return principal_of_row(row)


def principal_of_row(row: Row[Any], secret_hash: bytes = b"") -> Principal:
    """Convert a row of `select_principal`. Raises: OrganizationClosed, ProjectClosed."""
    if row.closed_at is not None:
        closed = OrganizationClosed if row.of_organization else ProjectClosed
        raise closed(row.suspension_reason)
    return record_of(
        Principal,
        row,
        api_key_id=row.id,
        key_prefix=row.prefix,
        scopes=AUTHORITY[row.role].union(row.scopes),
        models=frozenset(row.models),
        bounds=TokenBounds(row.max_input_tokens, row.max_output_tokens),
        terms=record_of(KeyTerms, row),
        networks=networks_of(tuple(row.allowed_networks)),
        secret_hash=secret_hash,
        suspended=(
            None
            if row.suspension_reason is None
            else Suspended(row.of_organization, row.suspension_reason, row.by_operator)
        ),
    )
