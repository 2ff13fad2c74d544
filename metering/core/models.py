"""Mapped classes that several packages use, and their base.

A mapped class names the columns of its table. Constraints are defined once, in the revisions under
`migrations/`: checks, indexes, triggers, and tables used through SQL only. Triggers keep
append-only tables (`usage_events` except the columns set by rating, `price_versions`, `audit_log`)
unchanged, so that a correction can only be a new row. A class that only one package needs is
declared there.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from sqlalchemy import (
    BigInteger,
    Date,
    DateTime,
    FetchedValue,
    ForeignKey,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    Text,
    Uuid,
    column,
    func,
    table,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, Insert, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

D = TypeVar("D")


def insertion(name: str, values: Mapping[str, Any]) -> Insert:
    """Build an INSERT of one row into a table that has no mapped class."""
    return insert(table(name, *map(column, values))).values(values)


def record_of(kind: type[D], source: object, /, **values: Any) -> D:
    """Build a dataclass from the source's attributes of the same names, overridden by `values`.

    Values are converted to int, enumeration or tuple where the field's type requires it. Where the
    source has None, the field keeps its default, if any.
    """
    checked: Any = kind
    for name, (has_default, convert) in _conversions(checked).items():
        if name not in values and hasattr(source, name):
            value = getattr(source, name)
            if value is not None or not has_default:
                values[name] = value if value is None or convert is None else convert(value)
    return kind(**values)


def values_of(kind: type, source: object) -> dict[str, Any]:
    """Read the source's attributes that are named like the fields of a dataclass, by name."""
    return {each.name: getattr(source, each.name) for each in fields(kind)}


@functools.cache
def _conversions(kind: Any) -> dict[str, tuple[bool, Callable[[Any], Any] | None]]:
    """Determine for each field of a dataclass whether it has a default, and its conversion."""
    hints = get_type_hints(kind)
    conversions: dict[str, tuple[bool, Callable[[Any], Any] | None]] = {}
    for each in fields(kind):
        hint = hints[each.name]
        of = get_origin(hint) if get_origin(hint) is tuple else (get_args(hint) or (hint,))[0]
        converts = of is int or of is tuple or (isinstance(of, type) and issubclass(of, StrEnum))
        conversions[each.name] = (
            not (each.default is MISSING and each.default_factory is MISSING),
            of if converts else None,
        )
    return conversions


class Base(DeclarativeBase):
    """Base of mapped classes: fixes constraint names and each Python type's column type."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        int: BigInteger(),
        bytes: LargeBinary(),
        datetime: DateTime(timezone=True),
        date: Date(),
        uuid.UUID: Uuid(),
        Decimal: Numeric(38, 0),
        dict[str, Any]: JSONB(),
        list[str]: ARRAY(Text()),
        list[uuid.UUID]: ARRAY(Uuid()),
        list[int]: ARRAY(BigInteger()),
    }


# Primary key that the database generates.
GeneratedId = Annotated[
    uuid.UUID, mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
]


class Organization(Base):
    """A customer: the unit of billing and of isolation."""

    __tablename__ = "organizations"

    id: Mapped[GeneratedId]
    name: Mapped[str] = mapped_column(unique=True)
    currency_code: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Project(Base):
    """Part of an organization that has its own keys and request ids."""

    __tablename__ = "projects"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Suspension(Base):
    """Suspension of an organization or of one project of it (`tenants/suspensions.py`).

    `by_operator` is False if the organization suspended its own project. With `closed_at` the
    owner is closed for good (`metering/closures.py`), and a trigger keeps the row as it is.
    `remaining_credit` says what happens to credit that the final month of an organization leaves.
    """

    __tablename__ = "suspensions"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    project_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("projects.id"))
    reason: Mapped[str]
    by_operator: Mapped[bool]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    closed_at: Mapped[datetime | None]
    remaining_credit: Mapped[str] = mapped_column(server_default="")


class OrganizationRegion(Base):
    """Region that an organization is bound to (`tenants/tenants.py`); without a row, to none."""

    __tablename__ = "organization_regions"

    organization_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("organizations.id"), primary_key=True
    )
    region: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """An API key. Only the SHA-256 of the secret is stored: 256 random bits need no slow hash.

    A bound key has no secret: it acts for callers that are known by other means.
    """

    __tablename__ = "api_keys"

    id: Mapped[GeneratedId]
    project_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(unique=True)
    secret_hash: Mapped[bytes | None] = mapped_column(unique=True)
    scopes: Mapped[list[str]]
    # Allowed models; empty for all.
    models: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    # Empty for everywhere.
    allowed_networks: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))
    max_input_tokens: Mapped[int | None]  # per request; None for the model's limit
    max_output_tokens: Mapped[int | None]  # per request, all choices together
    # Whether unknown parameters over HTTP are refused.
    strict_parameters: Mapped[bool] = mapped_column(server_default=text("false"))
    # Group of keys within the organization, for limits on each of them; empty for none.
    group: Mapped[str] = mapped_column(server_default="")
    # Role in the organization; empty for none.
    role: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    # After `created_at` for old keys.
    uses_tracked_since: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKeyUse(Base):
    """Time of a key's last use; a key never used has no row. Written by `tenants/key_uses.py`."""

    __tablename__ = "api_key_uses"

    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    last_used_at: Mapped[datetime]


class Person(Base):
    """A person, known by e-mail address and, after the first sign-in, by issuer and subject.

    Persons are above organizations: `Membership` connects them.
    """

    __tablename__ = "persons"

    id: Mapped[GeneratedId]
    email: Mapped[str] = mapped_column(unique=True)
    display_name: Mapped[str]
    issuer: Mapped[str | None]
    subject: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deactivated_at: Mapped[datetime | None]
    erased_at: Mapped[datetime | None]


class Membership(Base):
    """Membership of a person in an organization, with the bound key that acts for it there.

    The key has the role. Its scope `admin` makes the person an operator of the service.
    """

    __tablename__ = "memberships"

    id: Mapped[GeneratedId]
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("persons.id"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"), unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    removed_at: Mapped[datetime | None]


class Invitation(Base):
    """Invitation to an organization. Only the SHA-256 of its token is stored.

    `issuer` is the actor who last got a token.
    """

    __tablename__ = "invitations"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    project_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("projects.id"))
    email: Mapped[str]
    role: Mapped[str]
    token_hash: Mapped[bytes] = mapped_column(unique=True)
    issuer: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    accepted_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class ServiceAccount(Base):
    """Program of an organization that owns keys. Its keys have its role."""

    __tablename__ = "service_accounts"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str]
    role: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]


class ApiKeyOwner(Base):
    """Owner of a key, a person or a service account, and the person who created the key.

    A key without a row belongs to its project, and its creator was not a person. While a member is
    suspended, all keys that belong to the person in the organization are.
    """

    __tablename__ = "api_key_owners"

    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    person_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("persons.id"))
    service_account_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("service_accounts.id"))
    creator_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("persons.id"))
    suspended_at: Mapped[datetime | None]


class SignInSession(Base):
    """Session of a person who signed in. Only the SHA-256 of its secret is stored.

    `provider` is the name of the one that vouched for the person, with its own id of the session;
    empty for a link or an invitation. One that an invitation began acts in that organization only.
    It ends at `expires_at`, or after `idle_max_s` without use.
    """

    __tablename__ = "sign_in_sessions"

    id: Mapped[GeneratedId]
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("persons.id"))
    organization_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("organizations.id"))
    secret_hash: Mapped[bytes] = mapped_column(unique=True)
    provider: Mapped[str]
    provider_session: Mapped[str]
    address: Mapped[str]
    idle_max_s: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_used_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class SignInLink(Base):
    """Link that signs a person in, once. It is deleted by its use."""

    __tablename__ = "sign_in_links"

    secret_hash: Mapped[bytes] = mapped_column(primary_key=True)
    person_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("persons.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]


class GroupMembership(Base):
    """Membership that groups of a provider make, and end."""

    __tablename__ = "group_memberships"

    membership_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("memberships.id"), primary_key=True)
    provider: Mapped[str]


class ScimUser(Base):
    """User that the identity provider of an organization provisions by SCIM.

    Known in that organization only, until a person signs in with its address: `person_id`.
    `email` is the address by which the person is found, in lower case. `attributes` has
    `displayName`, `name` and `emails`. `has_role` says that its groups gave the role of the
    membership.
    """

    __tablename__ = "scim_users"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    user_name: Mapped[str]
    user_name_key: Mapped[str]
    external_id: Mapped[str | None]
    email: Mapped[str | None]
    attributes: Mapped[dict[str, Any]]
    is_active: Mapped[bool]
    person_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("persons.id"))
    has_role: Mapped[bool] = mapped_column(server_default=text("false"))
    version: Mapped[int] = mapped_column(server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ScimGroup(Base):
    """Group that the identity provider of an organization provisions by SCIM."""

    __tablename__ = "scim_groups"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    display_name: Mapped[str]
    name_key: Mapped[str]
    external_id: Mapped[str | None]
    version: Mapped[int] = mapped_column(server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ScimGroupMember(Base):
    """User in a group."""

    __tablename__ = "scim_group_members"

    group_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("scim_groups.id"), primary_key=True)
    user_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("scim_users.id"), primary_key=True)


class ScimGroupRole(Base):
    """Role that the group with a name gives, whether it is provisioned yet or not.

    `project_id` is that of the member's key; None for the oldest one.
    """

    __tablename__ = "scim_group_roles"

    organization_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("organizations.id"), primary_key=True
    )
    name_key: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    project_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("projects.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class TokenIssuer(Base):
    """Issuer whose tokens for one audience authenticate callers of one organization.

    A row never changes but for its removal.
    """

    __tablename__ = "token_issuers"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    issuer: Mapped[str]
    audience: Mapped[str]
    algorithms: Mapped[list[str]]
    # Where its public keys are; both empty: where its discovery document says.
    keys_url: Mapped[str]
    keys: Mapped[str]
    leeway_s: Mapped[int]
    lifetime_max_s: Mapped[int]
    token_type: Mapped[str]
    requires_id: Mapped[bool]
    # Claims that narrow what a token may do; empty for none.
    project_claim: Mapped[str]
    end_user_claim: Mapped[str]
    models_claim: Mapped[str]
    max_output_tokens_claim: Mapped[str]
    label_claims: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    removed_at: Mapped[datetime | None]
    single_use: Mapped[bool] = mapped_column(server_default=text("false"))


class TokenKey(Base):
    """Bound key that acts for the tokens of an issuer whose project claim has a value."""

    __tablename__ = "token_keys"

    token_issuer_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("token_issuers.id"), primary_key=True
    )
    claim_value: Mapped[str] = mapped_column(primary_key=True)
    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"), unique=True)


class TokenRevocation(Base):
    """Revoked token, session or subject of an issuer, by the hash of its name.

    It expires when the last token that it can concern has.
    """

    __tablename__ = "token_revocations"

    mark: Mapped[bytes] = mapped_column(primary_key=True)
    token_issuer_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("token_issuers.id"))
    kind: Mapped[str]
    revoked_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]


class UsedToken(Base):
    """Token that may be used once and was, by the hash of its name, until it has expired."""

    __tablename__ = "used_tokens"

    mark: Mapped[bytes] = mapped_column(primary_key=True)
    token_issuer_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("token_issuers.id"))
    expires_at: Mapped[datetime]


class ClientToken(Base):
    """Token for minutes that an API key made for a browser, and how often it was used."""

    __tablename__ = "client_tokens"

    id: Mapped[GeneratedId]
    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"))
    secret_hash: Mapped[bytes] = mapped_column(unique=True)
    call: Mapped[str]
    model: Mapped[str]
    end_user: Mapped[str]
    origins: Mapped[list[str]]
    max_requests: Mapped[int]
    request_count: Mapped[int] = mapped_column(server_default=text("0"))
    max_input_tokens: Mapped[int | None]
    max_output_tokens: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class AuditEntry(Base):
    """A change and its actor, written in the transaction of the change."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    action: Mapped[str]
    subject_id: Mapped[str]
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]
    # Of the key that made the change; the role is empty or None if that was not a key.
    actor_role: Mapped[str | None] = mapped_column(server_default=FetchedValue())
    actor_organization_id: Mapped[uuid.UUID | None] = mapped_column(server_default=FetchedValue())
    # The person whose key it was, and the network address of the caller, if they are known.
    actor_person_id: Mapped[uuid.UUID | None] = mapped_column(server_default=FetchedValue())
    actor_address: Mapped[str | None] = mapped_column(server_default=FetchedValue())


class ServiceTier(StrEnum):
    """Service tier of a request: `interactive` if a client waits, `batch` to use spare capacity."""

    __hash__ = str.__hash__  # an Enum's own hash is implemented in Python, at ten times the cost

    INTERACTIVE = "interactive"
    BATCH = "batch"


class TokenKind(StrEnum):
    """Kind of token; each kind has its own price."""

    INPUT = "input"
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"
    REASONING = "reasoning"  # apart from the output; a request reports the sum of both
    EMBEDDING = "embedding"


class PriceVersion(Base):
    """Prices of a model and service tier from `effective_at` on, in picos per token.

    Rows are immutable; a correction is a later row. `organization_id` is the customer that has its
    own price, None for the price list. `multiplier_milli` shows the factor, in thousandths, by
    which the interactive prices were multiplied. A `withdrawn` row ends a customer's own price: the
    list price applies from then on. If `reasoning_picos_per_token` is None, reasoning has the
    output price.
    """

    __tablename__ = "price_versions"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    model: Mapped[str]
    currency_code: Mapped[str]
    input_picos_per_token: Mapped[int]
    cached_input_picos_per_token: Mapped[int]
    output_picos_per_token: Mapped[int]
    embedding_picos_per_token: Mapped[int] = mapped_column(server_default="0")
    reasoning_picos_per_token: Mapped[int | None]
    organization_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("organizations.id"))
    tier: Mapped[str] = mapped_column(server_default="interactive")
    multiplier_milli: Mapped[int] = mapped_column(server_default="1000")
    withdrawn: Mapped[bool] = mapped_column(server_default=text("false"))
    effective_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class UsageSubject(Base):
    """End user of a customer, or value of a label (`tenants/usage_subjects.py`).

    The only place with its name, which is None once it is erased. An archived one has not been used
    for long and does not count towards the bound of its organization; its next request brings it
    back. `last_used_on` (UTC) is set at most once a day. `receipt_salt` proves the name of an end
    user in receipts; a trigger deletes it with the name.
    """

    __tablename__ = "usage_subjects"

    id: Mapped[GeneratedId]
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    kind: Mapped[str]  # `end_user` or `label`, as in `QuotaSubject`
    label_key: Mapped[str] = mapped_column(server_default="")
    name: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_used_on: Mapped[date] = mapped_column(
        server_default=text("(now() AT TIME ZONE 'UTC')::date")
    )
    archived_at: Mapped[datetime | None]
    erased_at: Mapped[datetime | None]
    receipt_salt: Mapped[bytes | None] = mapped_column(
        server_default=text("sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))")
    )


class UsageSubjectCount(Base):
    """Numbers of an organization's usage subjects that are not archived, counted by triggers.

    Its row is locked to create, archive or bring back one of them.
    """

    __tablename__ = "usage_subject_counts"

    organization_id: Mapped[uuid.UUID] = mapped_column(
        ForeignKey("organizations.id"), primary_key=True
    )
    end_user_count: Mapped[int] = mapped_column(server_default="0")
    label_value_count: Mapped[int] = mapped_column(server_default="0")


class QuotaSubject(StrEnum):
    """Kind of object that a quota limits."""

    ORGANIZATION = "organization"
    PROJECT = "project"
    API_KEY = "api_key"
    END_USER = "end_user"
    LABEL = "label"

    @property
    def spelling(self) -> str:
        """Name in the API, the CLI and documents, such as `api-key`."""
        return self.value.replace("_", "-")


class QuotaDimension(StrEnum):
    """Measure that a quota limits and its window, joined by `_per_`.

    `window` is a rolling one, of so many minutes as the quota says.
    """

    CONCURRENT_REQUESTS = "concurrent_requests"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    REQUESTS_PER_WINDOW = "requests_per_window"
    REQUESTS_PER_HOUR = "requests_per_hour"
    REQUESTS_PER_DAY = "requests_per_day"
    REQUESTS_PER_WEEK = "requests_per_week"
    REQUESTS_PER_MONTH = "requests_per_month"
    REQUESTS_PER_LIFETIME = "requests_per_lifetime"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_WINDOW = "tokens_per_window"
    TOKENS_PER_HOUR = "tokens_per_hour"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_WEEK = "tokens_per_week"
    TOKENS_PER_MONTH = "tokens_per_month"
    TOKENS_PER_LIFETIME = "tokens_per_lifetime"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    INPUT_TOKENS_PER_WINDOW = "input_tokens_per_window"
    INPUT_TOKENS_PER_HOUR = "input_tokens_per_hour"
    INPUT_TOKENS_PER_DAY = "input_tokens_per_day"
    INPUT_TOKENS_PER_WEEK = "input_tokens_per_week"
    INPUT_TOKENS_PER_MONTH = "input_tokens_per_month"
    INPUT_TOKENS_PER_LIFETIME = "input_tokens_per_lifetime"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    OUTPUT_TOKENS_PER_WINDOW = "output_tokens_per_window"
    OUTPUT_TOKENS_PER_HOUR = "output_tokens_per_hour"
    OUTPUT_TOKENS_PER_DAY = "output_tokens_per_day"
    OUTPUT_TOKENS_PER_WEEK = "output_tokens_per_week"
    OUTPUT_TOKENS_PER_MONTH = "output_tokens_per_month"
    OUTPUT_TOKENS_PER_LIFETIME = "output_tokens_per_lifetime"
    COST_PICOS_PER_WINDOW = "cost_picos_per_window"
    COST_PICOS_PER_HOUR = "cost_picos_per_hour"
    COST_PICOS_PER_DAY = "cost_picos_per_day"
    COST_PICOS_PER_WEEK = "cost_picos_per_week"
    COST_PICOS_PER_MONTH = "cost_picos_per_month"
    COST_PICOS_PER_LIFETIME = "cost_picos_per_lifetime"
    # Never resets: `plans/prepaid.py` updates the limit.
    PREPAID_CREDIT_PICOS = "prepaid_credit_picos"

    @property
    def spelling(self) -> str:
        """Name in the API, the CLI and documents, such as `cost-per-month`."""
        return self.value.replace("_picos", "").replace("_", "-")


class Quota(Base):
    """One limit. `model` is empty for all models together.

    For quotas on tokens, weights are the thousandths that a token of each kind counts. An override
    replaces the limit until `override_until`. A quota that is not enforced counts but refuses
    nothing. With `for_new_keys` it limits nothing itself: each key created under its subject gets a
    copy. `alert_at` is in percent of the limit, or in picos of prepaid credit left
    (`quotas/quota_rules.py`). Removed limits are kept for the holds charged to them.

    `window_minutes` is the length of a rolling window, 0 for any other.

    A limit on a usage subject (an end user or label value) counts requests within one organization
    or project, `within_id`. With `for_each`, which is `end_user`, `label:KEY` or `key:GROUP`, a
    quota is a selector: it limits nothing itself, and each usage subject, or each key of the group,
    within its subject gets a limit with its `selector_id`. The terms of such a limit are those of
    the selector: the view `quota_terms` has each quota with its terms in force. The limits of keys
    are written with their terms when they change (`tenants/key_groups.py`).
    """

    __tablename__ = "quotas"

    id: Mapped[GeneratedId]
    subject: Mapped[str]
    subject_id: Mapped[uuid.UUID]
    model: Mapped[str] = mapped_column(server_default="")
    dimension: Mapped[str]
    window_minutes: Mapped[int] = mapped_column(Integer(), server_default="0")
    # By a key of the organization, not by the operator, whose limits it cannot change.
    set_by_organization: Mapped[bool] = mapped_column(server_default=text("false"))
    limit_value: Mapped[int]
    input_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    cached_input_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    output_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    enforced: Mapped[bool] = mapped_column(server_default=text("true"))
    for_new_keys: Mapped[bool] = mapped_column(server_default=text("false"))
    for_each: Mapped[str] = mapped_column(server_default="")
    within_id: Mapped[uuid.UUID | None]
    selector_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("quotas.id"))
    override_limit_value: Mapped[int | None]
    override_until: Mapped[datetime | None]
    override_reason: Mapped[str | None]
    alert_at: Mapped[list[int]] = mapped_column(server_default=text("'{}'"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())  # set by a trigger
    deleted_at: Mapped[datetime | None]


# Columns that say what a limit counts. Limits of a subject that agree in them replace each other.
# Those of the operator and of the organization both apply.
QUOTA_TARGET = ("model", "dimension", "window_minutes", "set_by_organization")


@dataclass(frozen=True, slots=True)
class QuotaKey:
    """Columns that identify a limit among those of its subject. `model` is empty for all models.

    `window_minutes` is the length of a rolling window, 0 for any other dimension.
    `for_each` is `end_user`, `label:KEY` or `key:GROUP` for a selector, otherwise empty. With
    `end_user` or with `label`, which is `KEY=VALUE`, the limit is one of this end user or label
    value within the subject. The operator's limits and those that the organization set itself are
    different ones.
    """

    dimension: QuotaDimension
    model: str = ""
    for_new_keys: bool = False
    for_each: str = ""
    end_user: str = ""
    label: str = ""
    window_minutes: int = 0
    set_by_organization: bool = False


@dataclass(frozen=True, slots=True)
class QuotaTerms:
    """Terms of a limit by the columns of `Quota`, carried whole from calls and files to the table.

    By default each token counts as one. `alert_at` None means the default of the dimension.
    """

    limit_value: int
    enforced: bool = True
    input_weight_milli: int = 1000
    cached_input_weight_milli: int = 1000
    output_weight_milli: int = 1000
    alert_at: tuple[int, ...] | None = None


class QuotaCounter(Base):
    """Used and held amounts of one quota in one window: the sums over its holds and usage events.

    A rolling window has a row for each bucket of minutes. Only one is open: `carried` is what the
    others that still count have used and hold, which counts against the limit too. In a closed one
    it is NULL, and nothing is admitted there. A bucket may be deleted after `kept_until`, which is
    NULL for any other window.
    `would_refuse_count` counts admissions that an unenforced quota would have refused.
    """

    __tablename__ = "quota_counters"

    quota_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("quotas.id"), primary_key=True)
    window_start: Mapped[datetime] = mapped_column(primary_key=True)
    used: Mapped[int] = mapped_column(server_default="0")
    held: Mapped[int] = mapped_column(server_default="0")
    carried: Mapped[int | None] = mapped_column(server_default="0")
    kept_until: Mapped[datetime | None]
    would_refuse_count: Mapped[int] = mapped_column(server_default="0")


class HoldState(StrEnum):
    """State of a hold: `held`, then exactly one final state."""

    HELD = "held"
    SETTLED = "settled"
    VOIDED = "voided"
    EXPIRED = "expired"


class Hold(Base):
    """One request's reservation in its quotas.

    For token quotas it holds input + leased output - posted tokens, all in the window of
    `charged_at`; an extension posts the delivered tokens to the window they were charged to and
    moves the rest into the current window. `quota_ids` are the quotas charged. `posted_minutes` has
    a pair for each minute that the charge has left: the minute since 1970, and the tokens posted up
    to its end, so that the usage of any window can be computed later. For an `embedding` the input
    is the embedded text: quotas on tokens count it as input, those on money at its own price.
    `reasoning_token_count` are delivered tokens known to be thinking.

    A trigger on INSERT checks that key, project, organization, end user and price version exist and
    belong together, at a fraction of the cost of foreign keys.
    """

    __tablename__ = "holds"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    organization_id: Mapped[uuid.UUID]
    project_id: Mapped[uuid.UUID]
    api_key_id: Mapped[uuid.UUID]
    request_id: Mapped[uuid.UUID]
    payload_hash: Mapped[bytes]
    model: Mapped[str]
    price_version_id: Mapped[int]
    labels: Mapped[dict[str, Any]]
    end_user_id: Mapped[uuid.UUID | None]  # of a `UsageSubject`; None: not given
    embedding: Mapped[bool] = mapped_column(server_default=text("false"))
    state: Mapped[str] = mapped_column(server_default="held")
    process_id: Mapped[uuid.UUID]
    input_token_count: Mapped[int]
    cached_input_token_count: Mapped[int] = mapped_column(server_default="0")
    leased_token_count: Mapped[int]
    delivered_token_count: Mapped[int] = mapped_column(server_default="0")
    reasoning_token_count: Mapped[int] = mapped_column(server_default="0")
    posted_token_count: Mapped[int] = mapped_column(server_default="0")
    posted_cost_picos: Mapped[int] = mapped_column(server_default="0")
    posted_minutes: Mapped[list[int]] = mapped_column(server_default=text("'{}'"))
    quota_ids: Mapped[list[uuid.UUID]]
    admitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    charged_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class UsageEvent(Base):
    """Usage of one request: the row that is billed. Written in the transaction that ends the hold.

    `part` 0 is the settlement. `part` 1 exists only if a hold had expired before its owner's
    journal was found; it has the tokens beyond part 0, so that the parts add up to the delivered
    tokens. An event with embedded tokens has no others. A trigger on INSERT checks that the hold
    exists, has ended and has the same key and price version, and that no month has the part
    already; it adds the event to `unrated_usage`. Rating sets `rated_at` and
    `ledger_transaction_id` together, once; a trigger checks that the transaction exists, belongs to
    the same organization, and debits the cost of its events.

    `receipt_hash` is the hash of the receipt, whose other fields are the other columns; events
    older than receipts have none. `receipt_is_timed` is True if the receipt has the timings.
    `receipt_end_user_hash` and `receipt_labels_hash` are in the receipt too; `receipt_labels_salt`
    is deleted with the labels.
    `migration_count` counts moves to another engine after the first token; it is unknown for
    requests recovered from a dead process. `journalled_token_count` are output tokens that were
    written to the journal to be sent; those beyond the delivered ones are credited.
    `reasoning_token_count` are delivered tokens of the model's thinking, and
    `billed_reasoning_token_count` those billed at the reasoning price. Events of earlier versions
    have 0 or False in the last four.

    There is one partition per month of `settled_at` (UTC), which PostgreSQL therefore requires in
    the primary key; `id` has no index and gives the order of writing. Pages are half free for the
    columns set by rating (`rated_at`, `ledger_transaction_id`).
    """

    __tablename__ = "usage_events"

    id: Mapped[int] = mapped_column(Identity(always=True))
    hold_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    part: Mapped[int] = mapped_column(SmallInteger(), server_default="0", primary_key=True)
    organization_id: Mapped[uuid.UUID]
    project_id: Mapped[uuid.UUID]
    api_key_id: Mapped[uuid.UUID]
    request_id: Mapped[uuid.UUID]
    model: Mapped[str]
    outcome: Mapped[str]
    input_token_count: Mapped[int]
    cached_input_token_count: Mapped[int]
    generated_token_count: Mapped[int]
    delivered_token_count: Mapped[int]
    billed_token_count: Mapped[int]
    embedding_token_count: Mapped[int] = mapped_column(server_default="0")
    journalled_token_count: Mapped[int] = mapped_column(server_default="0")
    reasoning_token_count: Mapped[int] = mapped_column(server_default="0")
    billed_reasoning_token_count: Mapped[int] = mapped_column(server_default="0")
    migration_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    price_version_id: Mapped[int]
    cost_picos: Mapped[int]
    timings: Mapped[dict[str, Any] | None]
    labels: Mapped[dict[str, Any]]
    end_user_id: Mapped[uuid.UUID | None]  # of a `UsageSubject`; None: not given
    recovered: Mapped[bool] = mapped_column(server_default=text("false"))
    admitted_at: Mapped[datetime]
    settled_at: Mapped[datetime] = mapped_column(server_default=func.now(), primary_key=True)
    rated_at: Mapped[datetime | None]
    ledger_transaction_id: Mapped[int | None]
    receipt_sequence: Mapped[int | None]
    previous_receipt_hash: Mapped[bytes | None]
    receipt_hash: Mapped[bytes | None]
    receipt_is_timed: Mapped[bool] = mapped_column(server_default=text("false"))
    receipt_end_user_hash: Mapped[bytes | None]
    receipt_labels_hash: Mapped[bytes | None]
    receipt_labels_salt: Mapped[bytes | None]
    receipt_batch_id: Mapped[int | None]


class Outcome(StrEnum):
    """Outcome of a billed request, as stored in `usage_events.outcome`."""

    __hash__ = str.__hash__  # an Enum's own hash is implemented in Python, at ten times the cost

    STOP = "stop"
    STOP_SEQUENCE = "stop_sequence"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUOTA_EXHAUSTED = "quota_exhausted"
    COST_LIMIT = "cost_limit"
    SLOW_CONSUMER = "slow_consumer"
    FILTERED = "filtered"
    FAILED = "failed"


class SupersededSecret(Base):
    """Secret replaced by a rotation. It still authenticates its key until `expires_at`."""

    __tablename__ = "superseded_secrets"

    secret_hash: Mapped[bytes] = mapped_column(primary_key=True)
    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"))
    superseded_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
