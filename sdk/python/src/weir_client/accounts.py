"""The values of the admin and billing APIs: customers, keys, the audit log and the month's report."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.bills import CreditNoteSummary, MonthCharge, MonthState, PrepaidCredit
from weir_client.money import Money


class TokenKind(StrEnum):
    """What a token is billed as."""

    UNSPECIFIED = "unspecified"
    INPUT = "input"
    CACHED_INPUT = "cached-input"
    OUTPUT = "output"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class BillingProfile:
    """Whom an organization's invoices are addressed to. Empty for what is not known.

    emails: Stripe sends invoices to the first; the others are for the operator.
    """

    emails: tuple[str, ...] = ()
    legal_name: str = ""
    address_line1: str = ""
    address_line2: str = ""
    city: str = ""
    postal_code: str = ""
    state: str = ""
    country: str = ""  # ISO 3166-1 alpha-2, such as "DE"
    tax_id: str = ""
    language: str = ""  # IETF tag, such as "de" or "pt-BR"


@dataclass(frozen=True, slots=True)
class Organization:
    """A customer."""

    organization_id: str
    name: str
    currency_code: str
    create_time: datetime | None
    billing_profile: BillingProfile | None = None  # None: none was ever set


@dataclass(frozen=True, slots=True)
class Project:
    """A part of an organization, with its own keys."""

    project_id: str
    organization_id: str
    name: str
    create_time: datetime | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret."""

    api_key_id: str
    organization_id: str
    project_id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    create_time: datetime | None
    expire_time: datetime | None  # None: never
    revoke_time: datetime | None  # None: it is not revoked
    overlap_end_time: datetime | None = None  # until when a replaced secret works too; None: only one works
    models: tuple[str, ...] = ()  # that it may use; empty: every one
    allowed_networks: tuple[str, ...] = ()  # that it may be used from; empty: everywhere
    max_input_tokens: int | None = None  # of one request; None: as many as the model takes
    max_output_tokens: int | None = None  # of one request, all its choices together
    last_use_time: datetime | None = None  # to some two minutes; None: not since `use_known_since_time`
    use_known_since_time: datetime | None = None  # the time of its creation, unless it is older than the noting of uses
    organization_name: str = ""
    project_name: str = ""


@dataclass(frozen=True, slots=True)
class CreatedApiKey:
    """A new key with its secret, which no later call can tell again."""

    api_key: ApiKey
    secret: str = field(repr=False)  # kept out of logs; empty if the key was there before
    existed: bool = False


@dataclass(frozen=True, slots=True)
class RotatedApiKey:
    """A key with its new secret, which no later call can tell again; the old one works until `overlap_end_time`."""

    api_key: ApiKey
    secret: str = field(repr=False)  # kept out of logs; empty if this repeats a call
    overlap_end_time: datetime | None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change, who made it, and the object before and after as JSON text."""

    entry_id: int
    create_time: datetime | None
    actor: str
    action: str
    subject_id: str
    before_json: str
    after_json: str


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests of a month by how they ended."""

    total_count: int
    completed_count: int
    cancelled_count: int
    limited_count: int
    failed_count: int


@dataclass(frozen=True, slots=True)
class MonthReportLine:
    """One line of a month: a model, a price version, a kind of token."""

    model: str
    token_kind: TokenKind
    price_version: int
    request_count: int
    token_count: int
    cancelled_token_count: int  # part of `token_count` that belongs to cancelled requests
    unit_price_picos: int  # per token
    amount: Money
    late_month: str = ""  # YYYY-MM of the use, where that was closed before the usage was posted
    rounded_amount: Money | None = None  # what of `total_rounded` it is
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Whether usage events and ledger agree, in tokens of all kinds."""

    usage_token_count: int
    ledger_token_count: int
    unrated_token_count: int
    balanced: bool


@dataclass(frozen=True, slots=True)
class MonthReport:
    """One calendar month (UTC) of one organization, from the ledger."""

    organization_id: str
    organization_name: str
    month: str  # YYYY-MM
    lines: tuple[MonthReportLine, ...]
    request_counts: RequestCounts
    total: Money  # exact
    total_rounded: Money  # to the minor unit of the currency
    unrated_event_count: int
    reconciliation: Reconciliation
    state: MonthState = MonthState.UNSPECIFIED
    invoice_number: str = ""
    close_time: datetime | None = None
    closed_by: str = ""
    charges: tuple[MonthCharge, ...] = ()
    carried_in: Money | None = None  # what rounding left of the months before
    carried_out: Money | None = None  # what it leaves for the next
    prepaid_credit: PrepaidCredit | None = None
    credit_notes: tuple[CreditNoteSummary, ...] = ()  # beside the invoice, not in its total
    tax_note: str = ""
    report_format: int = 0
    receipts_root: str = ""
    billing_profile: BillingProfile | None = None  # of a closed month as it was at the close
