"""Tables that several packages read, and the base that all tables are declared on. They declare what the domain forbids.

Triggers are in the migrations. Append-only tables (`usage_events` but for what rating sets, `price_versions`, `audit_log`) are
guarded by them, so that a correction can only be a new row. Tables of one package alone are declared in that package.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


def one_of(column: str, values: type[StrEnum]) -> str:
    """SQL condition that a text column holds one of the values."""
    return f"{column} IN ({', '.join(repr(str(v)) for v in values)})"


D = TypeVar("D")


def record_of(kind: type[D], source: object, /, **values: Any) -> D:
    """A dataclass with the source's attributes of the same names, but for `values`.

    A number becomes an int, a word its enumeration and a list a tuple where the field is one. None leaves a field its default.
    """
    checked: Any = kind
    for name, (has_default, convert) in _conversions(checked).items():
        if name not in values and hasattr(source, name):
            value = getattr(source, name)
            if value is not None or not has_default:
                values[name] = value if value is None or convert is None else convert(value)
    return kind(**values)


@functools.cache
def _conversions(kind: Any) -> dict[str, tuple[bool, Callable[[Any], Any] | None]]:
    """Of each field of a dataclass: whether it has a default, and what makes of a value what the field is."""
    hints = get_type_hints(kind)
    found: dict[str, tuple[bool, Callable[[Any], Any] | None]] = {}
    for each in fields(kind):
        hint = hints[each.name]
        of = get_origin(hint) if get_origin(hint) is tuple else (get_args(hint) or (hint,))[0]
        converts = of is int or of is tuple or (isinstance(of, type) and issubclass(of, StrEnum))
        found[each.name] = not (each.default is MISSING and each.default_factory is MISSING), of if converts else None
    return found


class Base(DeclarativeBase):
    """Fixed constraint names, and one mapping from Python types to column types."""

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
        uuid.UUID: Uuid(),
        Decimal: Numeric(38, 0),
        dict[str, Any]: JSONB(),
        list[str]: ARRAY(Text()),
        list[uuid.UUID]: ARRAY(Uuid()),
        list[int]: ARRAY(BigInteger()),
    }


class Organization(Base):
    """A customer: the unit of billing and of isolation."""

    __tablename__ = "organizations"
    __table_args__ = (
        CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name="name_form"),
        CheckConstraint("currency_code ~ '^[A-Z]{3}$'", name="currency_form"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    name: Mapped[str] = mapped_column(unique=True)
    currency_code: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class BillingProfileRow(Base):
    """Whom an organization's invoices are addressed to; empty text for what is not known. See `tenants/billing_profiles.py`."""

    __tablename__ = "billing_profiles"

    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    emails: Mapped[list[str]]
    legal_name: Mapped[str]
    address_line1: Mapped[str]
    address_line2: Mapped[str]
    city: Mapped[str]
    postal_code: Mapped[str]
    state: Mapped[str]
    country: Mapped[str]
    tax_id: Mapped[str]
    language: Mapped[str]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Project(Base):
    """A part of an organization with its own keys and request ids."""

    __tablename__ = "projects"
    __table_args__ = (
        UniqueConstraint("organization_id", "name"),
        CheckConstraint("name ~ '^[a-z][a-z0-9-]{0,62}$'", name="name_form"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    organization_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ApiKey(Base):
    """A credential. Only the SHA-256 of the secret is stored; it has 256 random bits, so a slow hash would add nothing."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("octet_length(secret_hash) = 32", name="secret_hash_size"),
        CheckConstraint("scopes <@ ARRAY['inference', 'admin', 'billing'] AND scopes <> '{}'", name="scopes_known"),
        CheckConstraint("array_position(models, '') IS NULL", name="models_named"),
        CheckConstraint("allowed_networks::cidr[] IS NOT NULL", name="allowed_networks_are"),
        CheckConstraint("max_input_tokens > 0", name="max_input_tokens_positive"),
        CheckConstraint("max_output_tokens > 0", name="max_output_tokens_positive"),
        Index("ix_api_keys_project_id", "project_id"),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    project_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(unique=True)
    secret_hash: Mapped[bytes] = mapped_column(unique=True)
    scopes: Mapped[list[str]]
    models: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))  # that it may use; none: every one
    allowed_networks: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))  # to be used from; none: everywhere
    max_input_tokens: Mapped[int | None]  # of one request; none: as many as the model takes
    max_output_tokens: Mapped[int | None]  # of one request, all its choices together
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    uses_known_since: Mapped[datetime] = mapped_column(server_default=func.now())  # later than `created_at` of keys of before


class ApiKeyUse(Base):
    """When a key was used last; a key without a row was not. Written by `tenants/key_uses.py`, a minute late, and only forward."""

    __tablename__ = "api_key_uses"
    # Free space on the page keeps the updates off the index.
    __table_args__ = ({"postgresql_with": {"fillfactor": "50"}},)

    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    last_used_at: Mapped[datetime]


class AuditEntry(Base):
    """Who changed what. Written in the transaction of the change."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    action: Mapped[str]
    subject_id: Mapped[str]
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]


class ServiceTier(StrEnum):
    """What a request is: somebody waits for it, or it fills what others leave."""

    __hash__ = str.__hash__  # an Enum's own is Python, at ten times the cost

    INTERACTIVE = "interactive"
    BATCH = "batch"


class TokenKind(StrEnum):
    """What a token is billed as."""

    INPUT = "input"
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"
    EMBEDDING = "embedding"


class PriceVersion(Base):
    """Prices of one model and service tier from a moment on, in picos per token. Never changed; a correction is a later version.

    organization_id: whose own price it is; none for the list. multiplier_milli: thousandths of the interactive prices that these
    were made with, for display. withdrawn: from then on the organization pays the list price again; nobody is charged by the row.
    """

    __tablename__ = "price_versions"
    __table_args__ = (
        UniqueConstraint(
            "model",
            "currency_code",
            "organization_id",
            "tier",
            "effective_at",
            name="uq_price_versions_place",
            postgresql_nulls_not_distinct=True,
        ),
        CheckConstraint(
            "least(input_picos_per_token, cached_input_picos_per_token, output_picos_per_token, embedding_picos_per_token) >= 0",
            name="not_negative",
        ),
        CheckConstraint(one_of("tier", ServiceTier), name="tier_known"),
        CheckConstraint("multiplier_milli >= 0 AND (tier <> 'interactive' OR multiplier_milli = 1000)", name="multiplier_sane"),
        CheckConstraint("NOT withdrawn OR organization_id IS NOT NULL", name="list_stays"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    model: Mapped[str]
    currency_code: Mapped[str]
    input_picos_per_token: Mapped[int]
    cached_input_picos_per_token: Mapped[int]
    output_picos_per_token: Mapped[int]
    embedding_picos_per_token: Mapped[int] = mapped_column(server_default="0")
    organization_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("organizations.id"))
    tier: Mapped[str] = mapped_column(server_default="interactive")
    multiplier_milli: Mapped[int] = mapped_column(server_default="1000")
    withdrawn: Mapped[bool] = mapped_column(server_default=text("false"))
    effective_at: Mapped[datetime]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class QuotaSubject(StrEnum):
    """What a quota hangs on."""

    ORGANIZATION = "organization"
    PROJECT = "project"
    API_KEY = "api_key"


class QuotaDimension(StrEnum):
    """What a quota counts, and over which calendar window (UTC)."""

    CONCURRENT_REQUESTS = "concurrent_requests"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    COST_PICOS_PER_DAY = "cost_picos_per_day"
    COST_PICOS_PER_MONTH = "cost_picos_per_month"
    PREPAID_CREDIT_PICOS = "prepaid_credit_picos"  # for ever: `plans/prepaid.py` moves the limit with what is granted and billed


class Quota(Base):
    """One limit. `model` is empty for all models together. A removed limit stays, for the holds that were charged to it.

    Weights are thousandths per token of a kind, for quotas on tokens. A raise holds instead of the limit until `raised_until`. One
    that is not enforced counts and refuses nobody. One for new keys limits nothing itself: each key that is created under its
    subject gets a copy of it. `alert_at`: percent of the limit that are used, of prepaid credit picos that are left
    (`quotas/quota_rules.py`).
    """

    __tablename__ = "quotas"
    __table_args__ = (
        CheckConstraint(one_of("subject", QuotaSubject), name="subject_known"),
        CheckConstraint(one_of("dimension", QuotaDimension), name="dimension_known"),
        CheckConstraint("limit_value >= 0", name="limit_not_negative"),
        CheckConstraint(
            "input_weight_milli BETWEEN 0 AND 1000000 AND cached_input_weight_milli BETWEEN 0 AND 1000000 "
            "AND output_weight_milli BETWEEN 0 AND 1000000",
            name="weights_in_range",
        ),
        CheckConstraint(
            "num_nulls(raised_limit_value, raised_until, raise_reason) IN (0, 3) AND raised_limit_value > limit_value",
            name="raise_complete",
        ),
        CheckConstraint("NOT for_new_keys OR subject <> 'api_key'", name="keys_have_no_new_keys"),
        CheckConstraint("array_position(alert_at, NULL) IS NULL AND 0 < ALL (alert_at)", name="alert_at_sane"),
        Index(
            "uq_quotas_live",
            "subject_id",
            "model",
            "dimension",
            "for_new_keys",
            unique=True,
            postgresql_where=text("deleted_at IS NULL"),
        ),
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, server_default=text("gen_random_uuid()"))
    subject: Mapped[str]
    subject_id: Mapped[uuid.UUID]
    model: Mapped[str] = mapped_column(server_default="")
    dimension: Mapped[str]
    limit_value: Mapped[int]
    input_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    cached_input_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    output_weight_milli: Mapped[int] = mapped_column(Integer(), server_default="1000")
    enforced: Mapped[bool] = mapped_column(server_default=text("true"))
    for_new_keys: Mapped[bool] = mapped_column(server_default=text("false"))
    raised_limit_value: Mapped[int | None]
    raised_until: Mapped[datetime | None]
    raise_reason: Mapped[str | None]
    alert_at: Mapped[list[int]] = mapped_column(server_default=text("'{}'"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())  # set by a trigger
    deleted_at: Mapped[datetime | None]


class QuotaCounter(Base):
    """What is used and held of one quota in one window. Equals the sums over holds and usage events (checked by fsck tests).

    would_refuse_count: admissions that a quota which is not enforced would have refused.
    """

    __tablename__ = "quota_counters"
    __table_args__ = (
        CheckConstraint("used >= 0", name="used_not_negative"),
        CheckConstraint("held >= 0", name="held_not_negative"),
        # Every admission updates these rows: free space on the page keeps the updates off the index.
        {"postgresql_with": {"fillfactor": "50"}},
    )

    quota_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("quotas.id"), primary_key=True)
    window_start: Mapped[datetime] = mapped_column(primary_key=True)
    used: Mapped[int] = mapped_column(server_default="0")
    held: Mapped[int] = mapped_column(server_default="0")
    would_refuse_count: Mapped[int] = mapped_column(server_default="0")


class RuleChange(Base):
    """That rules or prices of a subject have changed, or those of all. Written by triggers; read by those who keep rules in memory.

    transaction_id: of the change, a 64-bit transaction number as the server counts them.
    """

    __tablename__ = "rule_changes"
    __table_args__ = (Index("ix_rule_changes_transaction_id", "transaction_id"),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    transaction_id: Mapped[int] = mapped_column(server_default=text("pg_current_xact_id()::text::bigint"))
    subject_id: Mapped[uuid.UUID | None]
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class HoldState(StrEnum):
    """A hold's life: `held`, then exactly one of the others, for ever."""

    HELD = "held"
    SETTLED = "settled"
    VOIDED = "voided"
    EXPIRED = "expired"


class Hold(Base):
    """One request's claim on its quotas.

    For the token quotas it holds input + leased output - posted tokens, all in the window of `charged_at`; an extension posts what
    was delivered to the window it was charged to and moves the rest into the window of the moment. `quota_ids` are the quotas
    charged. `posted_minutes` has a pair for each minute (since 1970) whose charge was moved on: the minute, and the tokens that
    were posted up to its end; so what a hold used in any window can be told at any later time. Of an `embedding` the input is what
    is embedded: quotas on tokens count it as input, those on money at its own price. That key, project, organization and price
    version exist and belong together is seen to by a trigger on each INSERT, at a fraction of the cost of foreign keys.
    """

    __tablename__ = "holds"
    __table_args__ = (
        # A voided request left no trace, so its id may be used again.
        Index("uq_holds_request", "project_id", "request_id", unique=True, postgresql_where=text("state <> 'voided'")),
        CheckConstraint(one_of("state", HoldState), name="state_known"),
        CheckConstraint("(state = 'held') = (ended_at IS NULL)", name="ended_once"),
        CheckConstraint("delivered_token_count BETWEEN 0 AND leased_token_count", name="delivered_within_lease"),
        CheckConstraint("cached_input_token_count BETWEEN 0 AND input_token_count", name="cached_within_input"),
        CheckConstraint("posted_token_count BETWEEN 0 AND input_token_count + delivered_token_count", name="posted_sane"),
        CheckConstraint("NOT embedding OR leased_token_count + cached_input_token_count = 0", name="embedding_has_no_output"),
        Index("ix_holds_owner_held", "owner_id", postgresql_where=text("state = 'held'")),
        # Expired holds are charged to quotas without a usage event: rare, and looked for when a quota is set.
        Index(
            "ix_holds_charged_unbilled",
            "organization_id",
            "ended_at",
            postgresql_where=text("state = 'expired' OR (state = 'voided' AND posted_token_count > 0)"),
        ),
        {"postgresql_with": {"fillfactor": "70"}},
    )

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    organization_id: Mapped[uuid.UUID]
    project_id: Mapped[uuid.UUID]
    api_key_id: Mapped[uuid.UUID]
    request_id: Mapped[uuid.UUID]
    payload_hash: Mapped[bytes]
    model: Mapped[str]
    price_version_id: Mapped[int]
    labels: Mapped[dict[str, Any]]
    embedding: Mapped[bool] = mapped_column(server_default=text("false"))
    state: Mapped[str] = mapped_column(server_default="held")
    owner_id: Mapped[uuid.UUID]
    input_token_count: Mapped[int]
    cached_input_token_count: Mapped[int] = mapped_column(server_default="0")
    leased_token_count: Mapped[int]
    delivered_token_count: Mapped[int] = mapped_column(server_default="0")
    posted_token_count: Mapped[int] = mapped_column(server_default="0")
    posted_cost_picos: Mapped[int] = mapped_column(server_default="0")
    posted_minutes: Mapped[list[int]] = mapped_column(server_default=text("'{}'"))
    quota_ids: Mapped[list[uuid.UUID]]
    admitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    charged_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class UsageEvent(Base):
    """What one request consumed: the row that is billed. Written in the transaction that ends the hold.

    Tokens that were embedded are counted apart, and an event that has some has no others. `part` 0 is the settlement. `part` 1
    exists only where a hold had expired before its owner's journal was found, and carries the tokens beyond part 0, so that the
    parts of a hold add up to what was delivered. A trigger on each INSERT sees that its hold exists, has ended and has the same key
    and price version, and that no month has the part already; it puts the event into `unrated_usage`. Rating sets `rated_at` and
    `ledger_transaction_id` together, once; a trigger sees that the transaction is there, is of the same organization, and debits
    what its events cost. `receipt_hash` is that of the event's receipt, the rest of which is in the other columns; events of before
    there were receipts have none. `migration_count` says how often the request went on in another engine after its first token; it
    is not billed, and of what a dead process left behind it is not known.

    One partition per month of `settled_at` (UTC). The primary key has that in it because PostgreSQL wants it there; `id` has no
    index, and is the order in which events were written. Pages are left half free for what rating writes (`usage_by_month`).
    """

    __tablename__ = "usage_events"
    __table_args__ = (
        CheckConstraint("cached_input_token_count BETWEEN 0 AND input_token_count", name="cached_within_input"),
        CheckConstraint("delivered_token_count BETWEEN 0 AND generated_token_count", name="delivered_within_generated"),
        CheckConstraint("billed_token_count BETWEEN 0 AND delivered_token_count", name="billed_within_delivered"),
        CheckConstraint(
            "embedding_token_count = 0 OR embedding_token_count > 0 AND input_token_count + generated_token_count = 0",
            name="embedding_alone",
        ),
        CheckConstraint("(rated_at IS NULL) = (ledger_transaction_id IS NULL)", name="rated_and_posted"),
        CheckConstraint(
            "num_nulls(receipt_sequence, previous_receipt_hash, receipt_hash) IN (0, 3) AND receipt_sequence > 0",
            name="receipt_complete",
        ),
        Index("ix_usage_events_organization_id_settled_at", "organization_id", "settled_at"),
        Index("ix_usage_events_rated_at", "rated_at", postgresql_using="brin", postgresql_with={"autosummarize": "true"}),
        {"postgresql_partition_by": "RANGE (settled_at)"},
    )

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
    migration_count: Mapped[int] = mapped_column(Integer(), server_default="0")
    price_version_id: Mapped[int]
    cost_picos: Mapped[int]
    timings: Mapped[dict[str, Any] | None]
    labels: Mapped[dict[str, Any]]
    recovered: Mapped[bool] = mapped_column(server_default=text("false"))
    admitted_at: Mapped[datetime]
    settled_at: Mapped[datetime] = mapped_column(server_default=func.now(), primary_key=True)
    rated_at: Mapped[datetime | None]
    ledger_transaction_id: Mapped[int | None]
    receipt_sequence: Mapped[int | None]
    previous_receipt_hash: Mapped[bytes | None]
    receipt_hash: Mapped[bytes | None]
    receipt_batch_id: Mapped[int | None]


# The usage events that are not rated, by their keys: a list that rating reads from the front and takes rows out of. A trigger puts
# each event in as it is written. No index, so that an event's way through it costs next to nothing.
unrated_usage = Table(
    "unrated_usage",
    Base.metadata,
    Column("event_id", BigInteger(), nullable=False),
    Column("hold_id", Uuid(), nullable=False),
    Column("part", SmallInteger(), nullable=False),
    Column("settled_at", DateTime(timezone=True), nullable=False),
    Column("organization_id", Uuid(), nullable=False),
)


class Outcome(StrEnum):
    """How a request that cost something ended, as stored in `usage_events.outcome`."""

    __hash__ = str.__hash__  # an Enum's own is Python, at ten times the cost

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
    """A secret of a key that a rotation has replaced. It leads to the same key, and so to the same counters, until `expires_at`."""

    __tablename__ = "superseded_secrets"
    __table_args__ = (
        CheckConstraint("octet_length(secret_hash) = 32", name="secret_hash_size"),
        Index("ix_superseded_secrets_api_key_id", "api_key_id"),
    )

    secret_hash: Mapped[bytes] = mapped_column(primary_key=True)
    api_key_id: Mapped[uuid.UUID] = mapped_column(ForeignKey("api_keys.id"))
    superseded_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]


class AdminRequest(Base):
    """An administrative call that created something, under the id that its client minted for it. Kept for some days."""

    __tablename__ = "admin_requests"
    __table_args__ = (
        CheckConstraint("octet_length(payload_hash) = 32", name="payload_hash_size"),
        Index("ix_admin_requests_created_at", "created_at"),
    )

    request_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    method: Mapped[str]
    payload_hash: Mapped[bytes]
    subject_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
