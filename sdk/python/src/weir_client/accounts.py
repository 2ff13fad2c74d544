"""Values of the admin and billing APIs: customers, keys, the audit log and the month's report."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from weir_client.bills import CreditNoteSummary, MonthCharge, MonthState, PrepaidCredit
from weir_client.money import Money
from weir_client.plain import Value


class TokenKind(StrEnum):
    """Kind of token that has a price of its own."""

    UNSPECIFIED = "unspecified"
    INPUT = "input"
    CACHED_INPUT = "cached-input"
    OUTPUT = "output"  # without reasoning
    REASONING = "reasoning"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class BillingProfile(Value):
    """Recipient of an organization's invoices. Unknown fields are empty.

    Stripe sends invoices to the first address in `emails`; the others are for the operator.
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
class Organization(Value):
    """Customer, billed in one currency."""

    organization_id: str
    name: str
    currency_code: str
    create_time: datetime | None
    billing_profile: BillingProfile | None = None  # None: never set


@dataclass(frozen=True, slots=True)
class Project(Value):
    """Subdivision of an organization, with its own API keys."""

    project_id: str
    organization_id: str
    name: str
    create_time: datetime | None


@dataclass(frozen=True, slots=True)
class ApiKey(Value):
    """API key without its secret."""

    api_key_id: str
    organization_id: str
    project_id: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    create_time: datetime | None
    expire_time: datetime | None  # None: never expires
    revoke_time: datetime | None  # None: not revoked
    # The replaced secret works until then; None: there is only one secret.
    overlap_end_time: datetime | None = None
    models: tuple[str, ...] = ()  # allowed models; empty: all
    allowed_networks: tuple[str, ...] = ()  # allowed client networks; empty: all
    max_input_tokens: int | None = None  # per request; None: the model's own limit
    max_output_tokens: int | None = None  # per request, all choices together
    strict_parameters: bool = False  # the HTTP API refuses unknown parameters
    # Accurate to two minutes; None: unused since `use_tracked_since_time`.
    last_use_time: datetime | None = None
    # create_time, or for older keys the time since when uses are recorded.
    use_tracked_since_time: datetime | None = None
    organization_name: str = ""
    project_name: str = ""


@dataclass(frozen=True, slots=True)
class CreatedApiKey(Value):
    """New API key with its secret. No later call returns the secret."""

    api_key: ApiKey
    secret: str = field(repr=False)  # kept out of logs; empty if the key existed before
    existed: bool = False


@dataclass(frozen=True, slots=True)
class RotatedApiKey(Value):
    """API key with its new secret, returned only once. The old secret still works for a while."""

    api_key: ApiKey
    secret: str = field(repr=False)  # kept out of logs; empty if this call was repeated
    overlap_end_time: datetime | None


@dataclass(frozen=True, slots=True)
class AuditEntry(Value):
    """Entry of the audit log: a change, its author, and the object before and after as JSON."""

    entry_id: int
    create_time: datetime | None
    actor: str
    action: str
    subject_id: str
    before_json: str
    after_json: str


@dataclass(frozen=True, slots=True)
class RequestCounts(Value):
    """Numbers of requests in a month, by outcome."""

    total_count: int
    completed_count: int
    cancelled_count: int
    limited_count: int
    failed_count: int


@dataclass(frozen=True, slots=True)
class MonthReportLine(Value):
    """Line of a month's report: usage of one model at one price version, for one kind of token."""

    model: str
    token_kind: TokenKind
    price_version: int
    request_count: int
    token_count: int
    cancelled_token_count: int  # part of `token_count` that belongs to cancelled requests
    unit_price_picos: int  # per token
    amount: Money
    # YYYY-MM of the usage, if that month was closed before the usage was posted.
    late_month: str = ""
    rounded_amount: Money | None = None  # in whole minor units
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Reconciliation(Value):
    """Comparison of a month's usage events with the ledger, in tokens of all kinds."""

    usage_token_count: int
    ledger_token_count: int
    unrated_token_count: int
    balanced: bool


@dataclass(frozen=True, slots=True)
class MonthReport(Value):
    """Report of one calendar month (UTC) of one organization, from the ledger."""

    organization_id: str
    organization_name: str
    month: str  # YYYY-MM
    lines: tuple[MonthReportLine, ...]
    request_counts: RequestCounts
    total: Money  # before rounding
    total_rounded: Money  # rounded to the currency's minor unit
    unrated_event_count: int
    reconciliation: Reconciliation
    state: MonthState = MonthState.UNSPECIFIED
    invoice_number: str = ""
    close_time: datetime | None = None
    closed_by: str = ""
    charges: tuple[MonthCharge, ...] = ()
    carried_in: Money | None = None  # rounding remainder of previous months
    carried_out: Money | None = None  # rounding remainder for the next month
    prepaid_credit: PrepaidCredit | None = None
    credit_notes: tuple[CreditNoteSummary, ...] = ()  # not part of the invoice's total
    tax_note: str = ""
    report_format: int = 0
    receipts_root: str = ""
    billing_profile: BillingProfile | None = None  # as it was at the close, for a closed month
    rounding: Money | None = None  # makes the rounded lines and charges add up to the total
