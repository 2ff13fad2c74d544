"""What a month was made of, as values: rows of usage, the forecast, and the files of a month."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money


class UsageGrouping(StrEnum):
    """What rows of usage are for. `request` gives single requests and goes with no other."""

    ORGANIZATION = "organization"
    DAY = "day"
    PROJECT = "project"
    API_KEY = "api_key"
    MODEL = "model"
    REQUEST = "request"


class MonthExportFormat(StrEnum):
    """A kind of file of a month: the invoice as PDF, or its charges as CSV with the columns of FOCUS."""

    INVOICE_PDF = "invoice_pdf"
    FOCUS_CSV = "focus_csv"


@dataclass(frozen=True, slots=True)
class UsageShare:
    """The part of a row that ended in one way; contained in the row's numbers."""

    request_count: int
    token_count: int
    amount: Money


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of one group; what it is not grouped by is empty or None. Days are `YYYY-MM-DD` in UTC.

    Input that was computed and input from the prefix cache are apart. amount is what was posted to the ledger, pending_amount what
    is recorded and not posted yet. late: some of it was used in a month that was closed before.
    """

    organization_id: str
    organization_name: str
    day: str
    project_id: str
    project_name: str
    api_key_id: str
    api_key_name: str
    api_key_prefix: str
    model: str
    request_id: str
    outcome: str
    settle_time: datetime | None
    late: bool
    request_count: int
    input_token_count: int
    cached_input_token_count: int
    output_token_count: int
    cancelled: UsageShare
    limited: UsageShare
    failed: UsageShare
    amount: Money
    pending_amount: Money
    embedding_token_count: int = 0
    migration_count: int = 0  # how often requests went on in another engine

    @property
    def token_count(self) -> int:
        """Of all kinds."""
        return self.input_token_count + self.cached_input_token_count + self.output_token_count + self.embedding_token_count


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A page of rows. total: of all pages, on the first one of a single organization."""

    rows: tuple[UsageRow, ...]
    total: UsageRow | None
    has_more: bool  # whether another page follows


@dataclass(frozen=True, slots=True)
class UsageForecast:
    """What a month will have cost at its prices, before plan discounts, credit and tax. None where too little is known to tell."""

    organization_name: str
    month: str
    as_of_time: datetime
    so_far: Money
    expected: Money | None
    low: Money | None
    high: Money | None
    confidence_percent: int
    complete_day_count: int
    method: str
    cautions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MonthFile:
    """A file of a month, whole."""

    file_name: str
    media_type: str
    content: bytes
