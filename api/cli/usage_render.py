"""Drawing a month taken apart: the table and the sheet of usage rows, and the forecast in words. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

from rich.console import RenderableType
from rich.text import Text
from weir_client import Money, UsageForecast, UsageGrouping, UsageRow

from api.cli.amounts import decimal_text, time_text
from api.cli.render import decimal_places, table

Field = Callable[[UsageRow], object]

KEY_COLUMNS: dict[UsageGrouping, tuple[str, Callable[[UsageRow], str]]] = {
    UsageGrouping.ORGANIZATION: ("organization", lambda row: row.organization_name),
    UsageGrouping.DAY: ("day", lambda row: row.day),
    UsageGrouping.PROJECT: ("project", lambda row: row.project_name),
    UsageGrouping.API_KEY: ("key", lambda row: f"{row.api_key_name} ({row.api_key_prefix})"),
    UsageGrouping.MODEL: ("model", lambda row: row.model),
}
KIND_COLUMNS: Mapping[str, Callable[[UsageRow], int]] = {
    "input": lambda row: row.input_token_count,
    "cached": lambda row: row.cached_input_token_count,
    "output": lambda row: row.output_token_count,
    "embedded": lambda row: row.embedding_token_count,
}
CSV_FIELDS: tuple[tuple[str, Field], ...] = (
    ("organization", lambda row: row.organization_name),
    ("organization_id", lambda row: row.organization_id),
    ("day", lambda row: row.day),
    ("project", lambda row: row.project_name),
    ("project_id", lambda row: row.project_id),
    ("api_key", lambda row: row.api_key_name),
    ("api_key_prefix", lambda row: row.api_key_prefix),
    ("api_key_id", lambda row: row.api_key_id),
    ("model", lambda row: row.model),
    ("request_id", lambda row: row.request_id),
    ("outcome", lambda row: row.outcome),
    ("settle_time", lambda row: time_text(row.settle_time, "")),
    ("time_zone", lambda row: "UTC"),
    ("late", lambda row: str(row.late).lower()),
    ("request_count", lambda row: row.request_count),
    ("input_token_count", lambda row: row.input_token_count),
    ("cached_input_token_count", lambda row: row.cached_input_token_count),
    ("output_token_count", lambda row: row.output_token_count),
    ("cancelled_request_count", lambda row: row.cancelled.request_count),
    ("cancelled_token_count", lambda row: row.cancelled.token_count),
    ("cancelled_amount", lambda row: plain(row.cancelled.amount)),
    ("limited_request_count", lambda row: row.limited.request_count),
    ("limited_token_count", lambda row: row.limited.token_count),
    ("limited_amount", lambda row: plain(row.limited.amount)),
    ("failed_request_count", lambda row: row.failed.request_count),
    ("failed_token_count", lambda row: row.failed.token_count),
    ("failed_amount", lambda row: plain(row.failed.amount)),
    ("amount", lambda row: plain(row.amount)),
    ("pending_amount", lambda row: plain(row.pending_amount)),
    ("currency_code", lambda row: row.amount.currency_code),
    ("embedding_token_count", lambda row: row.embedding_token_count),
    ("migration_count", lambda row: row.migration_count),
)


def plain(money: Money) -> str:
    """An exact amount for a sheet."""
    return f"{money.amount:f}"


def usage_table(rows: Sequence[UsageRow], by: Sequence[UsageGrouping], total: UsageRow | None, title: str) -> RenderableType:
    """Rows by group with what ended early apart, and the total of all that was asked for, shown or not."""
    if UsageGrouping.REQUEST in by:
        return request_table(rows, total, title)
    shown = [*rows, *([total] if total else [])]
    places, pending = money_places(shown), any(row.pending_amount.picos for row in shown)
    late, currencies = any(row.late for row in rows), len({row.amount.currency_code for row in rows}) > 1
    kinds = kinds_of(shown)
    numbers = ["requests", *kinds, "cancelled", "limited", "failed", "amount"]
    numbers += ["pending"] if pending else []
    extra = ["currency"] if currencies else []
    drawn = table(*(KEY_COLUMNS[each][0] for each in by), *numbers, *extra, right=numbers, title=title)

    def numbers_of(row: UsageRow) -> list[str]:
        shares = (row.cancelled.request_count, row.limited.request_count, row.failed.request_count)
        amounts = [row.amount, *([row.pending_amount] if pending else [])]
        return [
            f"{row.request_count:,}",
            *token_cells(row, kinds),
            *(f"{each:,}" for each in shares),
            *(decimal_text(each.amount, places) for each in amounts),
        ]

    for row in rows:
        keys = [KEY_COLUMNS[each][1](row) for each in by]
        if late and row.late:
            keys[-1] += " (late)"
        drawn.add_row(*keys, *numbers_of(row), *([row.amount.currency_code] if currencies else []))
    if total is not None:
        drawn.add_section()
        drawn.add_row("total", *[""] * (len(by) - 1), *numbers_of(total), style="bold")
    return drawn


def request_table(rows: Sequence[UsageRow], total: UsageRow | None, title: str) -> RenderableType:
    """Single requests, oldest first."""
    shown = [*rows, *([total] if total else [])]
    kinds, places = kinds_of(shown), money_places(shown)
    numbers = (*kinds, "amount")
    drawn = table("settled", "id", "project", "key", "model", "outcome", *numbers, right=numbers, title=title)
    for row in rows:
        picked = (time_text(row.settle_time), row.request_id, row.project_name, row.api_key_prefix, row.model, row.outcome)
        drawn.add_row(*picked, *token_cells(row, kinds), decimal_text(total_of(row), places))
    if total is not None:
        drawn.add_section()
        drawn.add_row(
            "total",
            f"{total.request_count:,} requests",
            *[""] * 4,
            *token_cells(total, kinds),
            decimal_text(total_of(total), places),
        )
    return drawn


def total_of(row: UsageRow) -> Decimal:
    """Posted and pending together."""
    return Money(row.amount.currency_code, row.amount.picos + row.pending_amount.picos).amount


def kinds_of(rows: Iterable[UsageRow]) -> Mapping[str, Callable[[UsageRow], int]]:
    """The columns of tokens: what most customers have none of is left out where nobody has any."""
    return KIND_COLUMNS if any(row.embedding_token_count for row in rows) else dict(list(KIND_COLUMNS.items())[:-1])


def token_cells(row: UsageRow, kinds: Mapping[str, Callable[[UsageRow], int]]) -> tuple[str, ...]:
    """Tokens by kind."""
    return tuple(f"{count(row):,}" for count in kinds.values())


def money_places(rows: Iterable[UsageRow]) -> int:
    """Digits after the point that the finest amount needs."""
    return max([2, *(decimal_places(money.amount) for row in rows for money in (row.amount, row.pending_amount))])


def usage_csv(rows: Iterable[UsageRow], *, header: bool) -> str:
    """Rows as CSV with exact plain numbers and no totals, so that a sheet can sum them up itself."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(name for name, _ in CSV_FIELDS)
    writer.writerows([field(row) for _, field in CSV_FIELDS] for row in rows)
    return text.getvalue()


def forecast_lines(forecast: UsageForecast) -> list[Text]:
    """The forecast in words: the numbers first, then what they rest on."""
    currency = forecast.so_far.currency_code
    if forecast.expected is None:
        expected = "no forecast yet"
    else:
        expected = f"forecast {decimal_text(forecast.expected.amount)} {currency} by the end of {forecast.month}"
        if forecast.low is not None and forecast.high is not None:
            low, high = decimal_text(forecast.low.amount), decimal_text(forecast.high.amount)
            expected += f" ({low} to {high} in {forecast.confidence_percent} of 100 cases)"
    so_far = f"so far    {decimal_text(forecast.so_far.amount)} {currency} until {time_text(forecast.as_of_time)}"
    why = " ".join((forecast.method, *forecast.cautions))
    return [Text(so_far), Text(expected, style="bold"), Text(why, style="dim")]
