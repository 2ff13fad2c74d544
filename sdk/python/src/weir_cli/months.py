"""`weir month`, `weir adjustment` and `weir credit-note`: reports, closing of months, corrections.

Reports are tables, CSV, JSON or a plot. A second person approves corrections.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from weir_client import (
    Aborted,
    DeadlineExceeded,
    DocumentFormat,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    Money,
    MonthExportFormat,
    NotFound,
    Unavailable,
    UsageGrouping,
)
from weir_client.values import LABEL_PREFIX

from weir_cli.commands import ExitCode
from weir_cli.connection import (
    EveryOption,
    MonthArgument,
    OrganizationOption,
    Output,
    PresentMonthArgument,
    admin_client,
    billing_client,
    calls,
    organization_or_default,
    organizations,
)
from weir_cli.render import (
    JsonOption,
    Table,
    csv_of,
    fail,
    jsonable,
    note,
    print_json,
    put,
    show,
    to_text,
)
from weir_cli.terms import option
from weir_cli.texts import (
    NOT_GIVEN,
    Cell,
    amount_text,
    counted,
    decimal_text,
    end_user_text,
    label_text,
    money_places,
    money_text,
    parse_picos,
    parsed,
    shortened,
    time_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text
    from weir_client import (
        Adjustment,
        AdminClient,
        BillingClient,
        ClosedMonth,
        Invoice,
        Month,
        MonthFile,
        MonthReport,
        MonthVerification,
        UsageForecast,
        UsagePage,
        UsageRow,
        WeirError,
    )

# Grouping and column by the words of `--by`; requests have a table of their own.
KEYS: Mapping[str, tuple[UsageGrouping, str, Callable[[UsageRow], str]]] = {
    "org": (UsageGrouping.ORGANIZATION, "organization", lambda row: row.organization_name),
    "day": (UsageGrouping.DAY, "day", lambda row: row.day),
    "project": (UsageGrouping.PROJECT, "project", lambda row: row.project_name),
    "key": (UsageGrouping.API_KEY, "key", lambda row: f"{row.api_key_name} ({row.api_key_prefix})"),
    "model": (UsageGrouping.MODEL, "model", lambda row: row.model),
    "end-user": (UsageGrouping.END_USER, "end user", lambda row: shortened(end_user_text(row))),
    "label:KEY": (UsageGrouping.LABEL, "label", lambda row: shortened(label_text(row))),
    "hour": (UsageGrouping.HOUR, "hour (UTC)", lambda row: row.hour[:16].replace("T", " ")),
    "request": (UsageGrouping.REQUEST, "request", lambda row: row.request_id),
}
KEY_COLUMNS = {grouping: (column, key) for grouping, column, key in KEYS.values()}
KIND_COLUMNS: Mapping[str, Callable[[UsageRow], Cell]] = {
    "input": lambda row: row.input_token_count,
    "cached": lambda row: row.cached_input_token_count,
    "output": lambda row: row.output_token_count,
    "thinking": lambda row: row.reasoning_token_count,
    "embedded": lambda row: row.embedding_token_count,
}
UNORDERED = (UsageGrouping.END_USER, UsageGrouping.LABEL)  # shown by cost
OPTIONAL_KINDS = ("thinking", "embedded")  # columns shown only if a row has such tokens
USAGE_DROP = ("failed", "limited", "cancelled", "cached", "thinking", "requests", "pending")

month = typer.Typer(
    help="See what a month costs, close it, and verify closed ones.", no_args_is_help=True
)
MONTHS: Table[Month] = Table(
    {
        "organization": "organization_name",
        "month": "month",
        "state": "state",
        "closed": lambda each: each.close_time if each.state == "closed" else each.closing_time,
        "by": lambda each: (each.closed_by if each.state == "closed" else each.closing_by) or None,
        "invoice": lambda each: each.invoice_number or None,
        "total": "total",
        "payment": lambda each: (
            ", ".join(sorted({payment.state.value for payment in each.payments})) or None
        ),
        "SHA-256 of the JSON": lambda each: each.json_sha256[:16],
    },
    right=("total",),
    drop=("SHA-256 of the JSON", "by", "payment", "closed"),
)
ADJUSTMENTS: Table[Adjustment] = Table(
    {
        "id": "adjustment_id",
        "state": "state",
        "amount": "amount",
        "invoice": "invoice_number",
        "number": lambda each: each.credit_note_number or None,
        "month": lambda each: each.billing_month or None,
        "reason": "reason",
        "proposed": "create_time",
        "by": "author",
        "decided by": lambda each: each.decided_by or None,
    },
    right=("amount",),
    empty="none",
    optional=dict.fromkeys(("invoice", "number"), lambda each: each.invoice_number),
    drop=("decided by", "by", "proposed", "month", "number", "invoice", "id"),
)
# Filters of usage, also of `weir usage`.
WHOSE = {
    "end_user": option(str, "Only this end user.", "--end-user", default="", metavar="END_USER"),
    "labels": option(
        list[str], "Only requests with this label; repeatable.", "--label", metavar="KEY=VALUE"
    ),
}
# Rows of `weir month show --by`, and its chart.
USAGE = {
    "by": option(
        str,
        "Group by day, hour, project, key, model, end-user, label:KEY, or several with commas; or"
        " by request.",
        "--by",
        default="",
    ),
    "day": option(str, "With --by: only this day, YYYY-MM-DD in UTC.", "--day", default=""),
    "project": option(str, "With --by: only this project.", "--project", default=""),
    "key": option(str, "With --by: only this API key, by prefix or id.", "--key", default=""),
    **WHOSE,
    "tags": option(
        str,
        "With --format focus: split charges by end-user, label:KEY, or several with commas, and put"
        " them into the column Tags.",
        "--tags",
        default="",
    ),
    "everyone": option(
        bool, "With --by: all organizations. Needs an admin key.", "--all-orgs", default=False
    ),
    "plot": option(
        bool, "Draw the tokens of each day. Default: on a terminal.", "--plot/--no-plot"
    ),
    "as_json": option(bool, "Short for --format json.", "--json", default=False),
}
CLOSE = {
    "leave_running": option(
        bool,
        "Close although requests of the month still run; they are billed in the next one.",
        "--leave-running",
        default=False,
    ),
    "before_first": option(
        bool,
        "Close a month before the customer's first; the months between must follow.",
        "--before-first",
        default=False,
    ),
    "corrected_by": option(
        str,
        "The approved adjustment that bills misstated usage.",
        "--corrected-by",
        default="",
        metavar="ADJUSTMENT",
    ),
}

FILE_WIDTH = 120  # columns of a table written to a file
TABLE_ROWS_MAX = 1_000  # a longer table is unreadable
FORMULA_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r")
PAGE_ROWS = 5_000  # rows of a CSV page: far below the size limit of a message

CSV_FIELDS: Mapping[str, Callable[[UsageRow], object]] = {
    "organization": lambda row: row.organization_name,
    "organization_id": lambda row: row.organization_id,
    "day": lambda row: row.day,
    "project": lambda row: row.project_name,
    "project_id": lambda row: row.project_id,
    "api_key": lambda row: row.api_key_name,
    "api_key_prefix": lambda row: row.api_key_prefix,
    "api_key_id": lambda row: row.api_key_id,
    "model": lambda row: row.model,
    "request_id": lambda row: row.request_id,
    "outcome": lambda row: row.outcome,
    "settle_time": lambda row: time_text(row.settle_time, ""),
    "time_zone": lambda row: "UTC",
    "late": lambda row: str(row.late).lower(),
    "request_count": lambda row: row.request_count,
    "input_token_count": lambda row: row.input_token_count,
    "cached_input_token_count": lambda row: row.cached_input_token_count,
    "output_token_count": lambda row: row.output_token_count,
    "cancelled_request_count": lambda row: row.cancelled.request_count,
    "cancelled_token_count": lambda row: row.cancelled.token_count,
    "cancelled_amount": lambda row: plain(row.cancelled.amount),
    "limited_request_count": lambda row: row.limited.request_count,
    "limited_token_count": lambda row: row.limited.token_count,
    "limited_amount": lambda row: plain(row.limited.amount),
    "failed_request_count": lambda row: row.failed.request_count,
    "failed_token_count": lambda row: row.failed.token_count,
    "failed_amount": lambda row: plain(row.failed.amount),
    "amount": lambda row: plain(row.amount),
    "pending_amount": lambda row: plain(row.pending_amount),
    "currency_code": lambda row: row.amount.currency_code,
    "embedding_token_count": lambda row: row.embedding_token_count,
    "migration_count": lambda row: row.migration_count,
    "reasoning_token_count": lambda row: row.reasoning_token_count,
    "hour": lambda row: row.hour,
}
# Columns of rows by end user and by label, whose texts the customer chose.
CSV_OF_END_USERS: Mapping[str, Callable[[UsageRow], object]] = {
    "end_user": lambda row: safe_cell(end_user_text(row)),
    "end_user_id": lambda row: row.end_user_id,
}
CSV_OF_GROUPS: Mapping[UsageGrouping, Mapping[str, Callable[[UsageRow], object]]] = {
    UsageGrouping.END_USER: CSV_OF_END_USERS,
    UsageGrouping.REQUEST: CSV_OF_END_USERS,
    UsageGrouping.LABEL: {
        "label": lambda row: safe_cell(NOT_GIVEN if row.label_value is None else row.label_value)
    },
}

FILES: Mapping[Format, MonthExportFormat] = {
    "focus": MonthExportFormat.FOCUS_CSV,
    "pdf": MonthExportFormat.INVOICE_PDF,
}
CLOSE_TIMEOUT_S = 300.0  # a close reads all usage events of its month


def safe_cell(value: str) -> str:
    """Quote a text that a spreadsheet would read as a formula."""
    return f"'{value}" if value.startswith(FORMULA_BEGINNINGS) else value


def plain(money: Money) -> str:
    return f"{money.amount:f}"


def usage_table(
    rows: Sequence[UsageRow], by: Sequence[Group], total: UsageRow | None, title: str
) -> RenderableType:
    """Build a table of usage by group, with requests that ended early apart, and the total."""
    if by[0].grouping is UsageGrouping.REQUEST:
        return request_table(rows, total, title)
    shown = [*rows, *([total] if total else [])]
    decimals, pending = row_places(shown), any(row.pending_amount.picos for row in shown)
    numbers: dict[str, Callable[[UsageRow], Cell]] = {
        "requests": lambda row: row.request_count,
        **kinds_of(shown),
        "cancelled": lambda row: row.cancelled.request_count,
        "limited": lambda row: row.limited.request_count,
        "failed": lambda row: row.failed.request_count,
        "amount": lambda row: decimal_text(row.amount.amount, decimals),
    }
    if pending:
        numbers["pending"] = lambda row: decimal_text(row.pending_amount.amount, decimals)
    keys = dict(each.column for each in by)
    last, last_key = list(keys.items())[-1]
    keys[last] = lambda row: last_key(row) + (" (late)" if row.late else "")
    extra = (
        {"currency": lambda row: row.amount.currency_code}
        if len({row.amount.currency_code for row in rows}) > 1
        else {}
    )
    drawn = Table(keys | numbers | extra, right=numbers, title=title, drop=USAGE_DROP).drawn(rows)
    if total is not None:
        drawn.add_section()
        drawn.add_row(
            "total",
            *[""] * (len(by) - 1),
            *(number(total) for number in numbers.values()),
            style="bold",
        )
    return drawn


def request_table(rows: Sequence[UsageRow], total: UsageRow | None, title: str) -> RenderableType:
    shown = [*rows, *([total] if total else [])]
    decimals = row_places(shown)
    numbers: dict[str, Callable[[UsageRow], Cell]] = {
        **kinds_of(shown),
        "amount": lambda row: decimal_text(total_of(row), decimals),
    }
    keys: dict[str, Callable[[UsageRow], Cell]] = {
        "settled": lambda row: row.settle_time,
        "id": lambda row: row.request_id,
        "project": lambda row: row.project_name,
        "key": lambda row: row.api_key_prefix,
        "model": lambda row: row.model,
        "outcome": lambda row: row.outcome,
    }
    drop = "project", "key", "settled", "outcome", "cached", "model"
    drawn = Table(keys | numbers, right=numbers, title=title, drop=drop).drawn(rows)
    if total is not None:
        drawn.add_section()
        drawn.add_row(
            "total",
            counted(total.request_count, "request"),
            *[""] * 4,
            *(number(total) for number in numbers.values()),
        )
    return drawn


def total_of(row: UsageRow) -> Decimal:
    """Add the posted and the pending amount of a row."""
    return Money(row.amount.currency_code, row.amount.picos + row.pending_amount.picos).amount


def kinds_of(rows: Sequence[UsageRow]) -> Mapping[str, Callable[[UsageRow], Cell]]:
    """Choose the token columns. Reasoning and embedding tokens have one only if a row has any."""
    return {
        name: count
        for name, count in KIND_COLUMNS.items()
        if name not in OPTIONAL_KINDS or any(count(row) for row in rows)
    }


def row_places(rows: Iterable[UsageRow]) -> int:
    """Count the decimals that the finest amount needs."""
    return money_places(money for row in rows for money in (row.amount, row.pending_amount))


def usage_csv(rows: Iterable[UsageRow], by: Sequence[Group], *, header: bool) -> str:
    """Format rows as CSV for spreadsheets, with exact plain numbers and without totals."""
    of_groups = [CSV_OF_GROUPS.get(each.grouping, {}) for each in by]
    columns = {name: cell for each in (CSV_FIELDS, *of_groups) for name, cell in each.items()}
    return csv_of(rows, columns, header=header)


def forecast_lines(forecast: UsageForecast) -> list[Text]:
    """Format a forecast: the numbers first, then what they are based on."""
    from rich.text import Text

    currency = forecast.month_to_date.currency_code
    reasons = [forecast.method, *forecast.warnings]
    if forecast.expected is None:
        expected = f"no forecast yet: {reasons.pop(0).removeprefix('No estimate: ')}"
    else:
        expected = (
            f"forecast {amount_text(forecast.expected)} {currency} by the end of {forecast.month}"
        )
        if forecast.low is not None and forecast.high is not None:
            low, high = amount_text(forecast.low), amount_text(forecast.high)
            expected += f" ({low} to {high} in {forecast.confidence_percent} of 100 cases)"
    month_to_date = (
        f"so far    {amount_text(forecast.month_to_date)} {currency} until"
        f" {time_text(forecast.as_of_time)}"
    )
    why = [Text(" ".join(reasons), style="dim")] if reasons else []
    return [Text(month_to_date), Text(expected, style="bold"), *why]


Format = Literal["table", "csv", "json", "focus", "pdf"]  # output format of a report


@month.command("show")
@calls(billing_client, options=USAGE)
def show_month(
    client: BillingClient,
    month: PresentMonthArgument = "",
    organization: OrganizationOption = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help=(
                "table for people; json and csv are the server's documents; focus is for FinOps"
                " tools; pdf is the invoice, or its draft."
            ),
        ),
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")
    ] = None,
    pdf: Annotated[
        Path | None,
        typer.Option("--pdf", help="Write the PDF to this file: short for --format pdf --output."),
    ] = None,
    *,
    plot: bool | None,
    as_json: bool,
    **rows: Any,
) -> None:
    """Show what a month costs: tokens by kind, prices, amounts, and the invoice or its draft.

    It checks the ledger against usage, and exits with 1 if they differ. Documents of a closed
    month never change.
    """
    form, month = "json" if as_json else form, month or f"{present_day():%Y-%m}"
    if pdf is not None:
        form, output = "pdf", pdf
    if form == "pdf" and output is None and sys.stdout.isatty():
        raise typer.BadParameter(
            "a terminal does not show it: add --output FILE", param_hint="--format"
        )
    groups, everyone = parse_rows(rows.pop("by")), rows.pop("everyone")
    if groups and form in FILES:
        raise typer.BadParameter(
            f"--format {form} covers the whole month: omit --by", param_hint="--by"
        )
    tags = parse_groups(rows.pop("tags"), ("end-user", "label:KEY"), "--tags")
    if tags and form != "focus":
        raise typer.BadParameter("needs --format focus", param_hint="--tags")
    if not groups and (everyone or any(rows.values())):
        raise typer.BadParameter(
            "--day, --project, --key, --end-user, --label and --all-orgs need --by",
            param_hint="--by",
        )
    if everyone and organization:
        raise typer.BadParameter("give --org or --all-orgs", param_hint="--all-orgs")
    owner = "" if everyone else organization_or_default(organization, client.address)
    if groups:
        rows |= {"api_key": rows.pop("key"), "labels": parse_labels(rows["labels"])}
        # A table has the first rows only, which are those that matter where names have no order.
        rows["largest_first"] = form == "table" and bool(owner) and groups[0].grouping in UNORDERED
        found = client.get_usage(
            month, [str(each) for each in groups], organization=owner, page_size=PAGE_ROWS, **rows
        )
        write_usage(form, output, found, groups, month, plot)
    elif form in FILES:
        save(client, month, FILES[form], owner, output, [str(each) for each in tags])
    else:
        write_report(client, month, owner, form, output, plot)


def write_report(
    client: BillingClient,
    month: str,
    organization: str,
    form: Format,
    output: Path | None,
    plot: bool | None,
) -> None:
    """Print the report as tables or as a document. Exits with 1 if ledger and usage disagree."""
    report = client.get_month_report(organization, month)
    if form == "table":
        write_month(client, report, output)
        if output is None:
            add_outlook(client, month, organization, plot)
    else:
        content = client.get_month_document(organization, month, DocumentFormat(form))
        write_content(output, content)
    print_check(report, form)


@month.command("forecast")
@calls(billing_client)
def forecast(
    client: BillingClient,
    organization: OrganizationOption = None,
) -> Output:
    """Show the cost of this month so far, and of the whole month if it goes on like this."""
    found = client.get_forecast(organization_or_default(organization, client.address))
    return found, *forecast_lines(found)


@dataclass(frozen=True, slots=True)
class Group:
    """Grouping of rows, with the key of a label."""

    grouping: UsageGrouping
    label_key: str = ""

    def __str__(self) -> str:
        """Return the grouping as the client takes it."""
        return f"{LABEL_PREFIX}{self.label_key}" if self.label_key else self.grouping.value

    @property
    def column(self) -> tuple[str, Callable[[UsageRow], str]]:
        """Name of the column, and its cells."""
        name, cell = KEY_COLUMNS[self.grouping]
        return self.label_key or name, cell


def parse_groups(by: str, words: Iterable[str], hint: str = "--by") -> list[Group]:
    """Parse words for groupings. Raises: typer.BadParameter for one that is not of `words`."""
    groups = []
    for word in filter(None, map(str.strip, by.split(","))):
        key = word.removeprefix(LABEL_PREFIX) if word.startswith(LABEL_PREFIX) else ""
        known = "label:KEY" if key else word
        if known not in words or (known == "label:KEY" and key in ("", "KEY")):
            allowed = ", ".join(words)
            raise typer.BadParameter(f"{word!r} is not one of {allowed}", param_hint=hint)
        groups.append(Group(KEYS[known][0], key))
    if len(set(groups)) < len(groups):
        raise typer.BadParameter(f"{by!r} has a word twice", param_hint=hint)
    return groups


def parse_rows(by: str, words: Iterable[str] = KEYS) -> list[Group]:
    """Parse the words of `--by`, with one label at most. Raises: typer.BadParameter."""
    groups = parse_groups(by, words)
    if len([each for each in groups if each.label_key]) > 1:
        raise typer.BadParameter("has two labels: give one label:KEY at a time", param_hint="--by")
    return groups


def parse_labels(labels: Iterable[str] | None) -> dict[str, str]:
    """Parse the values of `--label`. Raises: typer.BadParameter."""
    found: dict[str, str] = {}
    for label in labels or ():
        key, equals, value = label.partition("=")
        if not key or not equals:
            raise typer.BadParameter(
                f"{label!r} is not KEY=VALUE, such as team=search", param_hint="--label"
            )
        if key in found:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint="--label")
        found[key] = value
    return found


def write_usage(
    form: Format,
    output: Path | None,
    found: Iterator[UsagePage],
    groups: list[Group],
    month: str,
    plot: bool | None,
) -> None:
    """Print rows as a table, CSV or JSON. CSV is written page by page, to save memory."""
    if form == "csv":
        put(
            output,
            (usage_csv(page.rows, groups, header=not index) for index, page in enumerate(found)),
        )
        return
    first = next(found)
    if form == "json":
        rows = [*first.rows, *(row for page in found for row in page.rows)]
        document = {
            "month": month,
            "time_zone": "UTC",
            "rows": jsonable(rows),
            "total": jsonable(first.total),
        }
        put(output, [json.dumps(document, ensure_ascii=False, indent=2) + "\n"])
        return
    rows = list(first.rows[:TABLE_ROWS_MAX])
    currency = first.rows[0].amount.currency_code if first.rows else ""
    title = " · ".join(
        filter(
            None,
            (month + " (UTC)", f"amounts in {currency}, before tax" if currency else "no usage"),
        )
    )
    drawn = usage_table(rows, groups, first.total, title)
    if output is None:
        show(drawn)
        if Group(UsageGrouping.DAY) in groups and wants_plot(plot):
            show_plot(month, rows)
    else:
        put(output, [to_text(drawn, FILE_WIDTH)])
    if first.has_more or len(first.rows) > TABLE_ROWS_MAX:
        note(
            f"the first {len(rows):,} rows: --format csv has them all, --day, --project, --key,"
            " --end-user and --label narrow it down"
        )


def write_month(client: BillingClient, report: MonthReport, output: Path | None) -> None:
    """Print the report as tables, with the month's invoice or, for an open month, its draft."""
    from weir_cli.tables import draft_table, month_report

    is_empty = not (report.lines or report.charges or report.unrated_event_count)
    if is_empty and output is None:
        note(f"{report.organization_name} has no usage and no charges in {report.month}")
    parts = [month_report(report)]
    if report.invoice_number:
        parts.append(invoice_table(client.get_invoice(report.invoice_number)))
    elif report.lines or report.charges:
        parts.append(draft_table(report))
    if output is None:
        show(*parts)
    else:
        put(output, [to_text(part, FILE_WIDTH) for part in parts])
        note(f"{output}: {counted(len(report.lines), 'line')}, total {report.total_rounded}")


def write_content(target: Path | None, content: bytes) -> None:
    put(target, [content])
    if target is not None:
        note(f"{target}: {len(content):,} bytes")


def print_check(report: MonthReport, form: Format) -> None:
    """Print how much usage is not in a document yet. Exits with 1 if ledger and usage disagree."""
    balanced = report.reconciliation.balanced
    if form != "table" and (report.unrated_event_count or not balanced):
        note(
            f"{report.unrated_event_count:,} usage events are not included yet; --format table"
            " shows the check"
        )
    if not balanced:
        fail("the ledger and the usage events do not agree")


def add_outlook(client: BillingClient, month: str, organization: str, plot: bool | None) -> None:
    """Print the forecast of the current month and, on a terminal, a plot of daily tokens."""
    today = present_day()
    if month == f"{today:%Y-%m}":
        show(*forecast_lines(client.get_forecast(organization, month)))
    if wants_plot(plot):
        found = client.get_usage(month, [UsageGrouping.DAY], organization=organization)
        show("")
        show_plot(month, (row for page in found for row in page.rows))


def wants_plot(plot: bool | None) -> bool:
    """Return whether to draw a plot: as `--plot` says, by default on a terminal."""
    return sys.stdout.isatty() if plot is None else plot


def show_plot(month: str, rows: Iterable[UsageRow]) -> None:
    """Print a plot of the tokens of each day."""
    from weir_cli.tables import daily_plot

    by_day: Counter[str] = Counter()
    for row in rows:
        by_day[row.day] += row.token_count
    show(daily_plot(month, by_day, present_day()))


def present_day() -> date:
    """Return today's date in UTC."""
    return datetime.now(UTC).date()


def save(
    client: BillingClient,
    month: str,
    form: MonthExportFormat,
    organization: str,
    path: Path | None,
    tags: Sequence[str] = (),
) -> None:
    """Write the file of a month, to stdout without a `path`."""
    write_file(client.export_month(month, form, organization=organization, tags=tags), path)


def write_file(file: MonthFile, path: Path | None) -> None:
    write_content(
        path / file.file_name if path is not None and path.is_dir() else path, file.content
    )


@month.command("list")
@calls(billing_client, admin_client)
def list_months(
    client: BillingClient,
    admin: AdminClient,
    organization: OrganizationOption = None,
    every: EveryOption = False,
) -> Output:
    """List the months of an organization: state, invoice, and the key that closed each."""
    names = organizations(organization, admin, every=every)
    found = [each for name in names for each in client.list_months(name)]
    return found, (MONTHS if every else MONTHS.without("organization", empty="none")).of(found)


@month.command("close")
@calls(billing_client, admin_client, options=CLOSE, timeout=CLOSE_TIMEOUT_S)
def close_months(
    client: BillingClient,
    admin: AdminClient,
    month: MonthArgument,
    organization: OrganizationOption = None,
    every: EveryOption = False,
    earlier: Annotated[
        bool, typer.Option("--earlier", help="Close the open months before it first.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only show what is in the way; close nothing.")
    ] = False,
    *,
    as_json: bool,
    **terms: Any,
) -> None:
    """Close a month for good, and issue its invoice. You cannot reopen it.

    If something is in the way, it exits with 1 and says what you can do. With --all-orgs, one
    organization that fails does not stop the others. You may repeat a close.
    """
    if terms["corrected_by"] and (every or earlier):
        raise typer.BadParameter(
            "an adjustment is for one month of one organization", param_hint="--corrected-by"
        )
    closed: list[ClosedMonth] = []
    refused = 0
    names = organizations(organization, admin, every=every)
    for name in names:
        try:
            for each in months_to_close(client, name, month, earlier=earlier):
                closed.append(client.close_month(name, each, validate_only=check, **terms))
                refused += bool(closed[-1].obstacles)
                if not as_json:
                    print_closed(closed[-1], check=check)
        except one_failure(every) as error:
            refused += 1
            print_refusal(name, error)
    if as_json:
        print_json(closed)
    if refused:
        if every:
            note(f"{refused} refused or failed, of {counted(len(names), 'organization')}")
        raise typer.Exit(ExitCode.FAILED)


@month.command("verify")
@calls(billing_client, admin_client, timeout=CLOSE_TIMEOUT_S)
def verify_months(
    client: BillingClient,
    admin: AdminClient,
    month: MonthArgument,
    organization: OrganizationOption = None,
    every: EveryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute a closed month again, and compare. Exits with 1 if anything differs."""
    found: list[MonthVerification] = []
    failed = 0
    for name in organizations(organization, admin, every=every):
        try:
            found.append(client.verify_month(name, month))
        except one_failure(every) as error:
            failed += 1
            print_refusal(name, error)
            continue
        failed += not found[-1].reproduced
        if not as_json:
            print_verified(found[-1])
    if as_json:
        print_json(found)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def one_failure(every: bool) -> tuple[type[WeirError], ...]:
    """Return the errors that concern one organization, so that the loop goes on with the others.

    PermissionDenied is not one of them: such a key lacks the permission for every organization.
    """
    errors = (Aborted, DeadlineExceeded, Internal, InvalidRequest, NotFound, Unavailable)
    return (FailedPrecondition, *errors) if every else (FailedPrecondition,)


def months_to_close(
    client: BillingClient, organization: str, month: str, *, earlier: bool
) -> list[str]:
    """List the months to close: `month` and, with `earlier`, the open ones before it."""
    if not earlier:
        return [month]
    known = [each for each in reversed(client.list_months(organization)) if each.month < month]
    return [*(each.month for each in known if each.state != "closed"), month]


def print_closed(result: ClosedMonth, *, check: bool) -> None:
    closed = result.month
    if check:
        for each in result.obstacles:
            typer.echo(
                f"{closed.organization_name} {closed.month}: {each.kind}: {each.description}"
            )
        if not result.obstacles:
            typer.echo(
                f"{closed.organization_name} {closed.month}:"
                f" {'is closed' if closed.state == 'closed' else 'can be closed'}"
            )
        return
    invoice = (
        f"invoice {closed.invoice_number}, {closed.total}"
        if closed.invoice_number
        else "nothing to invoice"
    )
    how = "was closed before" if result.already_closed else "closed"
    typer.echo(f"{closed.organization_name} {closed.month}: {how}: {invoice}")


def print_refusal(organization: str, error: WeirError) -> None:
    """Print each obstacle to the close as a line on stderr."""
    reasons = [f"{each.kind}: {each.description}" for each in error.details.preconditions] or [
        error.message
    ]
    for each in reasons:
        typer.secho(f"{organization}: {each}", fg="red", err=True)


def print_verified(found: MonthVerification) -> None:
    month = found.month
    if found.reproduced:
        typer.echo(
            f"{month.organization_name} {month.month}: reproduced; JSON {found.json_sha256[:16]}…,"
            f" CSV {found.csv_sha256[:16]}…"
        )
    for each in found.differences:
        typer.secho(f"{month.organization_name} {month.month}: DIFFERS: {each}", fg="red")


def invoice_table(invoice: Invoice) -> RenderableType:
    """Build a table of an invoice's lines and credit notes."""
    from rich.console import Group

    from weir_cli.tables import BillLine, bill_table

    currency = invoice.total.currency_code
    title = (
        f"invoice {invoice.number} · {invoice.organization_name} · {invoice.month} · {currency},"
        f" {invoice.tax_note}"
    )
    rounding = Money(currency, 0)
    lines = []
    for each in invoice.lines:
        if each.kind == "rounding":
            rounding = each.amount
        else:
            lines.append(BillLine(each.description, each.exact_amount, each.amount))
    carried = invoice.carried_in, invoice.carried_out
    notes = [
        f"credit note {each.credit_note_number} of {money_text(each.amount)}: {each.reason}"
        for each in invoice.credit_notes
    ]
    return Group(bill_table(title, lines, carried, rounding, invoice.total), *notes)


adjustment = typer.Typer(
    help="Correct a bill by a line on the next invoice. One person proposes, another approves.",
    no_args_is_help=True,
)
credit_note = typer.Typer(
    help="Refund an invoice or a part of it. One person proposes, another approves.",
    no_args_is_help=True,
)

ReasonOption = Annotated[
    str, typer.Option(help="Why, in up to 200 characters. Your customer can read it.")
]
IdArgument = Annotated[str, typer.Argument(help="Id, as shown by `list`.", metavar="ID")]
RequestIdOption = Annotated[
    str | None,
    typer.Option(
        "--request-id", help="A UUID. If you repeat the command with it, nothing new is proposed."
    ),
]
UndecidedOption = Annotated[
    bool, typer.Option("--undecided", help="Only those that wait for a decision.")
]


@adjustment.command("create", context_settings={"ignore_unknown_options": True})
@calls(billing_client)
def create_adjustment(
    client: BillingClient,
    amount: Annotated[
        str,
        typer.Argument(help="Amount in the customer's currency; -12.50 gives them 12.50."),
    ],
    reason: ReasonOption,
    organization: OrganizationOption = None,
    request_id: RequestIdOption = None,
) -> Output:
    """Propose a line for the next invoice. Another person approves it with another key."""
    chosen = organization_or_default(organization, client.address)
    return outcome_of(
        client.create_adjustment(chosen, parse_money(amount), reason, request_id=request_id)
    )


@credit_note.command("create")
@calls(billing_client)
def create_credit_note(
    client: BillingClient,
    invoice: Annotated[str, typer.Argument(help="Number of the invoice, such as INV-000001.")],
    amount: Annotated[str, typer.Argument(help="How much to refund, such as 0.50.")],
    reason: ReasonOption,
    request_id: RequestIdOption = None,
) -> Output:
    """Propose to refund an invoice or a part of it. Another person approves it with another key."""
    return outcome_of(
        client.create_credit_note(invoice, parse_money(amount), reason, request_id=request_id)
    )


@credit_note.command("show")
@calls(billing_client)
def show_credit_note(
    client: BillingClient,
    number: Annotated[str, typer.Argument(help="Number, such as CN-000001.")],
    pdf: Annotated[Path, typer.Option("--pdf", help="Write the credit note to this file.")],
) -> None:
    """Write an approved credit note as PDF. The document never changes."""
    write_file(client.export_credit_note(number), pdf)


@adjustment.command("approve")
@calls(billing_client)
def approve(client: BillingClient, adjustment_id: IdArgument) -> Output:
    """Approve another person's adjustment or credit note, and post it to the next invoice."""
    return outcome_of(client.approve_adjustment(adjustment_id))


@adjustment.command("reject")
@calls(billing_client)
def reject(client: BillingClient, adjustment_id: IdArgument) -> Output:
    """Reject an adjustment or a credit note for good. Its author may do so too."""
    return outcome_of(client.reject_adjustment(adjustment_id))


@adjustment.command("list")
@calls(billing_client, admin_client)
def list_adjustments(
    client: BillingClient,
    admin: AdminClient,
    organization: OrganizationOption = None,
    every: EveryOption = False,
    undecided: UndecidedOption = False,
) -> Output:
    """List the adjustments of an organization, the latest first."""
    found = proposals(client, organizations(organization, admin, every=every), undecided)
    return proposal_table({each: name for each, name in found.items() if not each.invoice_number})


@credit_note.command("list")
@calls(billing_client, admin_client)
def list_credit_notes(
    client: BillingClient,
    admin: AdminClient,
    organization: OrganizationOption = None,
    every: EveryOption = False,
    undecided: UndecidedOption = False,
) -> Output:
    """List the credit notes of an organization, the latest first."""
    found = proposals(client, organizations(organization, admin, every=every), undecided)
    return proposal_table({each: name for each, name in found.items() if each.invoice_number})


def proposals(
    client: BillingClient, names: Sequence[str], undecided: bool
) -> dict[Adjustment, str]:
    """Find the adjustments of organizations, credit notes included, and whose each is."""
    return {
        each: name
        for name in names
        for each in client.list_adjustments(name, undecided_only=undecided)
    }


def proposal_table(found: Mapping[Adjustment, str]) -> Output:
    """Draw adjustments; with their organization if there are several."""
    several = {"organization": found.__getitem__} if len({*found.values()}) > 1 else {}
    table = replace(ADJUSTMENTS, columns={**ADJUSTMENTS.columns, **several})
    return list(found), table.of(list(found))


def parse_money(amount: str) -> Money:
    """Parse an amount, whose currency is the organization's. Raises: typer.BadParameter."""
    return Money("", parsed("AMOUNT", parse_picos, amount))


def outcome_of(changed: Adjustment) -> Output:
    from rich.text import Text

    name = (
        f"credit note {changed.credit_note_number}".rstrip()
        if changed.invoice_number
        else "adjustment"
    )
    match changed.state.value:
        case "proposed":
            what = (
                "proposed; another person approves it with: weir adjustment approve"
                f" {changed.adjustment_id}"
            )
        case "approved":
            what = f"approved by {changed.decided_by}, posted to {changed.billing_month}"
        case _:
            what = f"{changed.state.value} by {changed.decided_by}"
    return changed, Text(f"{name} of {money_text(changed.amount)} ({changed.reason}): {what}")
