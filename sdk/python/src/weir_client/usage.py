"""Values of usage reports: rows, forecasts and files of a month."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.money import Money
from weir_client.plain import Value


class UsageGrouping(StrEnum):
    """Key by which usage is grouped. `request` lists single requests and excludes other keys."""

    ORGANIZATION = "organization"
    DAY = "day"
    PROJECT = "project"
    API_KEY = "api_key"
    MODEL = "model"
    REQUEST = "request"


class MonthExportFormat(StrEnum):
    """File format of a month: the invoice as PDF, or its charges as CSV in FOCUS columns."""

    INVOICE_PDF = "invoice_pdf"
    FOCUS_CSV = "focus_csv"


@dataclass(frozen=True, slots=True)
class UsageShare(Value):
    """Part of a usage row with one outcome. The row's own numbers include it."""

    request_count: int
    token_count: int
    amount: Money


@dataclass(frozen=True, slots=True)
class UsageRow(Value):
    """Usage of one group. Fields outside the grouping are empty or None.

    Days are `YYYY-MM-DD` in UTC. Input computed anew and input from the prefix cache are separate.
    `amount` is posted to the ledger, `pending_amount` is recorded but not posted yet. `late` marks
    usage of a month closed before.
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
    migration_count: int = 0  # number of moves to another engine
    reasoning_token_count: int = 0  # thinking; not part of `output_token_count`

    @property
    def token_count(self) -> int:
        """Sum of the tokens of all kinds."""
        return (
            self.input_token_count
            + self.cached_input_token_count
            + self.output_token_count
            + self.reasoning_token_count
            + self.embedding_token_count
        )


@dataclass(frozen=True, slots=True)
class UsagePage(Value):
    """Page of usage rows. `total` sums all pages, on the first page of one organization only."""

    rows: tuple[UsageRow, ...]
    total: UsageRow | None
    has_more: bool  # whether another page follows


@dataclass(frozen=True, slots=True)
class UsageForecast(Value):
    """Expected cost of a month before plan discounts, credit and tax; None with too little data."""

    organization_name: str
    month: str
    as_of_time: datetime
    month_to_date: Money
    expected: Money | None
    low: Money | None
    high: Money | None
    confidence_percent: int
    complete_day_count: int
    method: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MonthFile(Value):
    """Complete file of an exported month."""

    file_name: str
    media_type: str
    content: bytes
