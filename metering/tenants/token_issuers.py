"""Issuers whose tokens authenticate callers of an organization, and revocations of their tokens.

A bound key acts for the tokens: its terms, limits, usage and bills are theirs. A claim of a token
may choose among the keys of several projects; other claims narrow what the key may do. Functions
take a session and never commit. Every change writes the audit log in the same transaction.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import LargeBinary, Select, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import recheck_key
from metering.core.audit import record_change, snapshot
from metering.core.errors import AlreadyExists, InvalidValue, NotFound, TokenInvalid
from metering.core.models import (
    ApiKey,
    Organization,
    Project,
    TokenIssuer,
    TokenKey,
    TokenRevocation,
    UsedToken,
    record_of,
    values_of,
)
from metering.core.pages import PAGE_SIZE, SortKey, page_of, utc_time
from metering.tenants.api_keys import create_api_key, revoke_api_key
from metering.tenants.authentication import (
    BOUND_KEY_INVALID,
    IS_BOUND_KEY,
    Principal,
    SingleUse,
    principal_of_row,
    select_principal,
)
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import as_uuid, find_organization

TEXT_CHARS_MAX = 255
KEYS_CHARS_MAX = 65_536
PROJECTS_MAX = 50
ISSUERS_MAX = 20  # of one organization
LABELS_MAX = 8  # half of those that a request may have
LEEWAY_S_MAX = 300
LIFETIME_S_MAX = 24 * 3600
USED_REMEDY = "Use a new one for each call. One is enough for all requests of a gRPC stream."
KINDS = ("jti", "sid", "sub")  # of names by which tokens are revoked
# Rows of used tokens outlive these, so that no server with a slow clock takes one again.
CLOCKS_DIFFER = timedelta(minutes=5)
EXPIRED_EACH_MAX = 4  # rows of expired tokens that a use removes: more than it adds
NEVER_ISSUED = datetime(1970, 1, 1, tzinfo=UTC)  # so that a token without `iat` counts as old


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerTerms:
    """Terms of a trust in an issuer, by the columns of `TokenIssuer`.

    Empty `algorithms` are all asymmetric ones. Without `keys_url` and `keys`, the issuer's
    discovery document says where its keys are. An empty `token_type` allows those of access tokens.
    With `single_use`, which implies `requires_id`, a token is good for one call.
    The claims, if set, must be in each token: the project (one of a list), the end user, the
    models, the output tokens per request, and labels of the same names.
    """

    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ()
    keys_url: str = ""
    keys: str = ""
    leeway_s: int = 30
    lifetime_max_s: int = 3600
    token_type: str = ""
    requires_id: bool = False
    single_use: bool = False
    project_claim: str = ""
    end_user_claim: str = ""
    models_claim: str = ""
    max_output_tokens_claim: str = ""
    label_claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedIssuer(IssuerTerms):
    """Trusted issuer, with the ids of its keys by the value of the project claim."""

    id: uuid.UUID
    keys_by_value: Mapping[str, uuid.UUID]


@dataclass(frozen=True, slots=True)
class TokenProject:
    """Project whose key acts for tokens with this value of the project claim; empty without one."""

    claim_value: str
    project_name: str
    api_key_id: uuid.UUID
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerRecord(IssuerTerms):
    """Trusted issuer as it is shown."""

    id: uuid.UUID
    organization_id: uuid.UUID
    organization_name: str
    created_at: datetime
    projects: tuple[TokenProject, ...]


def checked_issuer(terms: IssuerTerms) -> IssuerTerms:
    """Validate all terms but URLs and algorithms, and return them. Raises: InvalidValue."""
    names = ("audience", "issuer", "token_type", "project_claim", "end_user_claim", "models_claim")
    values = [(name, getattr(terms, name)) for name in (*names, "max_output_tokens_claim")]
    for name, value in (*values, *(("label_claims", each or " ") for each in terms.label_claims)):
        if len(value) > TEXT_CHARS_MAX or not value.isprintable() or value != value.strip():
            raise InvalidValue(name, f"must have at most {TEXT_CHARS_MAX} printable characters")
    if not terms.audience:
        raise InvalidValue("audience", "must be set: tokens for other services are refused")
    if terms.keys_url and terms.keys:
        raise InvalidValue("keys", "set either the keys or their URL, not both")
    if len(terms.keys) > KEYS_CHARS_MAX:
        raise InvalidValue("keys", f"must have at most {KEYS_CHARS_MAX:,} characters")
    if len(terms.label_claims) > LABELS_MAX:
        raise InvalidValue("label_claims", f"must have at most {LABELS_MAX}")
    if not 0 <= terms.leeway_s <= LEEWAY_S_MAX:
        raise InvalidValue("leeway", f"must be zero to {LEEWAY_S_MAX} s")
    if not 1 <= terms.lifetime_max_s <= LIFETIME_S_MAX:
        raise InvalidValue("lifetime_max", f"must be one second to {LIFETIME_S_MAX // 3600} hours")
    return replace(
        terms,
        algorithms=tuple(sorted(set(terms.algorithms))),
        requires_id=terms.requires_id or terms.single_use,
        label_claims=tuple(sorted(set(terms.label_claims))),
    )


def projects_of(texts: Iterable[str], *, has_claim: bool) -> dict[str, str]:
    """Parse projects, each after the value of the claim if there is one. Raises: InvalidValue."""
    found: dict[str, str] = {}
    for text in texts:
        value, equals, project = text.rpartition("=")
        if bool(equals) != has_claim:
            raise InvalidValue(
                "projects",
                f"{text[:64]!r} must be VALUE=PROJECT, with a value of `project_claim`"
                if has_claim
                else f"{text[:64]!r} must be a project, or set `project_claim` too",
            )
        if value in found:
            raise InvalidValue("projects", f"{value[:64]!r} must be there once")
        found[value] = project
    return found


async def create_token_issuer(
    session: AsyncSession,
    *,
    organization: str,
    terms: IssuerTerms,
    projects: Mapping[str, str],
    key_terms: KeyTerms,
    actor: str,
) -> IssuerRecord:
    """Trust an issuer, and create the bound keys that act for its tokens, with these terms.

    `projects` are those of the organization by the value of the project claim; without a claim,
    there is one, by the empty text. Raises: NotFound, InvalidValue, AlreadyExists.
    """
    terms = checked_issuer(terms)
    owner = await find_organization(session, organization)
    if not 1 <= len(projects) <= PROJECTS_MAX:
        raise InvalidValue("projects", f"must have 1 to {PROJECTS_MAX} entries")
    if bool(terms.project_claim) == ("" in projects):
        raise InvalidValue(
            "projects", "must have a value of `project_claim` for each project, or one without both"
        )
    if any(len(each) > TEXT_CHARS_MAX or not each.isprintable() for each in projects):
        raise InvalidValue("projects", f"values must have at most {TEXT_CHARS_MAX} characters")
    active = select(func.count()).where(
        TokenIssuer.organization_id == owner.id, TokenIssuer.removed_at.is_(None)
    )
    if (await session.scalar(active) or 0) >= ISSUERS_MAX:
        raise InvalidValue("organization", f"must have at most {ISSUERS_MAX} token issuers")
    values = values_of(IssuerTerms, terms) | {"organization_id": owner.id}
    made = insert(TokenIssuer).values(values).on_conflict_do_nothing().returning(TokenIssuer)
    if (row := await session.scalar(made)) is None:
        raise AlreadyExists(
            "token issuer",
            terms.issuer,
            f"for the audience {terms.audience[:64]!r}. Use an audience of its own, or remove the"
            " existing one.",
        )
    for value, project in projects.items():
        key, _ = await create_api_key(
            session,
            organization=str(owner.id),
            project=project,
            name=f"tokens for {terms.audience}"[:100],
            terms=key_terms,
            is_bound=True,
            actor=actor,
        )
        bound = {"token_issuer_id": row.id, "claim_value": value, "api_key_id": key.id}
        await session.execute(insert(TokenKey).values(bound))
    after = snapshot(row) | {"projects": dict(projects)}
    await record_change(session, actor, "token_issuer.create", str(row.id), after=after)
    return await find_token_issuer(session, str(row.id))


async def delete_token_issuer(session: AsyncSession, *, token_issuer: str, actor: str) -> None:
    """Trust an issuer no more: revoke its keys, with all requests of them.

    Raises: NotFound.
    """
    record = await find_token_issuer(session, token_issuer)
    removal = (
        update(TokenIssuer)
        .where(TokenIssuer.id == record.id, TokenIssuer.removed_at.is_(None))
        .values(removed_at=func.now())
        .returning(TokenIssuer)
    )
    if (row := (await session.scalars(removal)).one_or_none()) is None:
        raise NotFound("token issuer", token_issuer)
    before = snapshot(row) | {"removed_at": None}
    await record_change(session, actor, "token_issuer.delete", str(row.id), before=before)
    for key in record.projects:
        await revoke_api_key(session, api_key=str(key.api_key_id), actor=actor)


async def find_token_issuer(session: AsyncSession, ref: str) -> IssuerRecord:
    """Look up a trusted issuer by id. Raises: NotFound."""
    issuer_id = as_uuid(ref)
    found = [] if issuer_id is None else await _records(session, [issuer_id])
    if as_uuid(ref) is None or not found:
        raise NotFound("token issuer", ref)
    return found[0]


async def list_token_issuers(
    session: AsyncSession,
    *,
    organization: str | None = None,
    page_size: int = PAGE_SIZE,
    page_token: str = "",
) -> tuple[list[IssuerRecord], str]:
    """List a page of the trusted issuers, the newest first.

    Returns the token of the next page too. Raises: NotFound, InvalidValue.
    """
    query = await _select_ids(session, organization)
    sorting = SortKey(TokenIssuer.created_at, utc_time), SortKey(TokenIssuer.id, uuid.UUID)
    rows, following = await page_of(
        session, query, *sorting, page_size=page_size, page_token=page_token, latest_first=True
    )
    return await _records(session, [each for (each,) in rows]), following


async def all_token_issuers(
    session: AsyncSession, *, organization: str | None = None
) -> list[IssuerRecord]:
    """List the trusted issuers, the newest first. Raises: NotFound."""
    ids = await session.scalars(await _select_ids(session, organization))
    return await _records(session, ids.all())


async def _select_ids(session: AsyncSession, organization: str | None) -> Select[Any]:
    query = select(TokenIssuer.id).where(TokenIssuer.removed_at.is_(None))
    if not organization:
        return query
    owner = await find_organization(session, organization)
    return query.where(TokenIssuer.organization_id == owner.id)


async def _records(session: AsyncSession, ids: Collection[uuid.UUID]) -> list[IssuerRecord]:
    query = (
        select(TokenIssuer, Organization.name, TokenKey, ApiKey.prefix, Project.name)
        .join(Organization, Organization.id == TokenIssuer.organization_id)
        .join(TokenKey, TokenKey.token_issuer_id == TokenIssuer.id)
        .join(ApiKey, ApiKey.id == TokenKey.api_key_id)
        .join(Project, Project.id == ApiKey.project_id)
        .where(TokenIssuer.removed_at.is_(None), TokenIssuer.id.in_(ids))
        .order_by(TokenIssuer.created_at.desc(), TokenIssuer.id.desc(), TokenKey.claim_value)
    )
    issuers: dict[uuid.UUID, tuple[TokenIssuer, str]] = {}
    keys: dict[uuid.UUID, list[TokenProject]] = {}
    for row, organization_name, key, prefix, project_name in await session.execute(query):
        issuers[row.id] = row, organization_name
        keys.setdefault(row.id, []).append(
            TokenProject(key.claim_value, project_name, key.api_key_id, prefix)
        )
    return [
        record_of(
            IssuerRecord,
            row,
            organization_name=name,
            projects=tuple(keys[row.id]),
            algorithms=tuple(row.algorithms),
            label_claims=tuple(row.label_claims),
        )
        for row, name in issuers.values()
    ]


def mark_of(token_issuer_id: uuid.UUID, kind: str, name: str) -> bytes:
    """Return the hash by which a revocation names a token, a session or a subject."""
    return hashlib.sha256(f"{token_issuer_id}:{kind}:{name}".encode(errors="replace")).digest()


async def revoke_tokens(
    session: AsyncSession, *, token_issuer: str, kind: str, name: str, actor: str
) -> datetime:
    """Revoke the tokens of an issuer with this `jti`, `sid` or `sub`, and cancel their requests.

    Those of a subject are its tokens until now; later ones are accepted. Returns the time at which
    the last token that the revocation can concern has expired. Raises: NotFound, InvalidValue.
    """
    if kind not in KINDS:
        raise InvalidValue("kind", f"must be one of {', '.join(KINDS)}, got {kind[:20]!r}")
    if not 1 <= len(name) <= TEXT_CHARS_MAX or not name.isprintable():
        raise InvalidValue("name", f"must have 1 to {TEXT_CHARS_MAX} printable characters")
    issuer = await find_token_issuer(session, token_issuer)
    mark = mark_of(issuer.id, kind, name)
    await session.execute(delete(TokenRevocation).where(TokenRevocation.expires_at <= func.now()))
    lasting = timedelta(seconds=issuer.lifetime_max_s + 2 * issuer.leeway_s)
    values = {"token_issuer_id": issuer.id, "kind": kind, "expires_at": func.now() + lasting}
    renewed = {"revoked_at": func.now(), "expires_at": values["expires_at"]}
    expires_at = (
        await session.scalars(
            insert(TokenRevocation)
            .values(values | {"mark": mark})
            .on_conflict_do_update(index_elements=["mark"], set_=renewed)
            .returning(TokenRevocation.expires_at)
        )
    ).one()
    after = {"kind": kind, "name": name, "expires_at": expires_at.isoformat()}
    owner = {"organization_id": str(issuer.organization_id)}
    await record_change(session, actor, "tokens.revoke", str(issuer.id), after=after | owner)
    networks = select(ApiKey.id, ApiKey.allowed_networks).where(
        ApiKey.id.in_([each.api_key_id for each in issuer.projects])
    )
    for api_key_id, allowed in (await session.execute(networks)).all():
        await recheck_key(session, api_key_id, allowed, [mark])
    return expires_at


async def find_trusted(
    session: AsyncSession, issuer: str, audiences: Collection[str]
) -> Sequence[TrustedIssuer]:
    """Find the trusted issuers of tokens with this `iss` and one of these `aud`."""
    query = (
        select(TokenIssuer, TokenKey)
        .join(TokenKey, TokenKey.token_issuer_id == TokenIssuer.id)
        .where(
            TokenIssuer.issuer == issuer,
            TokenIssuer.audience.in_(tuple(audiences)),
            TokenIssuer.removed_at.is_(None),
        )
    )
    rows = (await session.execute(query)).all()
    keys: dict[uuid.UUID, dict[str, uuid.UUID]] = {}
    for row, key in rows:
        keys.setdefault(row.id, {})[key.claim_value] = key.api_key_id
    return [
        record_of(
            TrustedIssuer,
            row,
            keys_by_value=keys[row.id],
            algorithms=tuple(row.algorithms),
            label_claims=tuple(row.label_claims),
        )
        for row in {row.id: row for row, _ in rows}.values()
    ]


def select_principal_of_token() -> Select[Any]:
    """Build the query for the principal of a verified token, by its bound key.

    One statement, so that a token costs a call as many round trips as a secret.
    """
    revocations = select(TokenRevocation.mark).where(
        TokenRevocation.mark == func.any(bindparam("marks", type_=ARRAY(LargeBinary))),
        TokenRevocation.expires_at > func.now(),
        or_(
            TokenRevocation.kind != "sub",
            TokenRevocation.revoked_at >= bindparam("issued_at"),
        ),
    )
    trusted = (
        select(TokenKey.api_key_id)
        .join(TokenIssuer, TokenIssuer.id == TokenKey.token_issuer_id)
        .where(TokenKey.api_key_id == ApiKey.id, TokenIssuer.removed_at.is_(None))
    )
    query = select_principal(IS_BOUND_KEY).where(trusted.exists())
    return query.add_columns(revocations.exists().label("is_revoked"))


PRINCIPAL_OF_TOKEN = select_principal_of_token()


async def authenticate_token(
    session: AsyncSession,
    api_key_id: uuid.UUID,
    marks: Collection[bytes],
    issued_at: datetime | None,
) -> Principal:
    """Return the principal of the bound key that acts for a verified token.

    Raises: TokenInvalid if one of its marks is revoked, or if its key or issuer is no longer valid.
    """
    values = {
        "api_key_id": api_key_id,
        "marks": list(marks),
        "issued_at": issued_at or NEVER_ISSUED,
    }
    row = (await session.execute(PRINCIPAL_OF_TOKEN, values)).one_or_none()
    if row is None:
        raise TokenInvalid("its issuer is no longer trusted", BOUND_KEY_INVALID)
    if row.is_revoked:
        raise TokenInvalid("it was revoked")
    return principal_of_row(row)


async def use_token(session: AsyncSession, use: SingleUse) -> None:
    """Record the use of a token that may be used once. Of concurrent uses one succeeds.

    Raises: TokenInvalid if it was used before.
    """
    surplus = (
        select(UsedToken.mark)
        .where(UsedToken.expires_at <= func.now())
        .limit(EXPIRED_EACH_MAX)
        .with_for_update(skip_locked=True)
    )
    await session.execute(delete(UsedToken).where(UsedToken.mark.in_(surplus.scalar_subquery())))
    values = {
        "mark": use.mark,
        "token_issuer_id": use.token_issuer_id,
        "expires_at": datetime.fromtimestamp(use.expires_at, UTC) + CLOCKS_DIFFER,
    }
    recorded = insert(UsedToken).values(values).on_conflict_do_nothing().returning(UsedToken.mark)
    if await session.scalar(recorded) is None:
        raise TokenInvalid("it was used before, and its issuer's tokens work once", USED_REMEDY)
