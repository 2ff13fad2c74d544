"""`weir report`: what an organization used in a month, what that was made of, what it will cost, and the month's files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from weir_client import BillingClient, Money, MonthExportFormat, MonthReport, UsageGrouping, UsagePage

from api.cli.connection import AddressOption, KeyOption, billing_client, fail, organization_or_default
from api.cli.output import JsonOption, jsonable, note, print_json, show
from api.cli.plot import DailyPlot, Day
from api.cli.render import month_report, month_report_csv, to_text
from api.cli.tenants import OrganizationOption
from api.cli.usage_render import forecast_lines, usage_csv, usage_table

report = typer.Typer(help="Report usage and money by month.", no_args_is_help=True)

FILE_WIDTH = 120  # columns of a table that goes to a file
TABLE_ROWS_MAX = 1_000  # beyond it nobody reads a table
PAGE_ROWS = 5_000  # a page of a sheet: far below the size of a message
GROUPINGS = {
    "org": UsageGrouping.ORGANIZATION,
    "day": UsageGrouping.DAY,
    "project": UsageGrouping.PROJECT,
    "key": UsageGrouping.API_KEY,
    "model": UsageGrouping.MODEL,
    "request": UsageGrouping.REQUEST,
}


class Format(StrEnum):
    """How a report is written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    FOCUS = "focus"


@report.command("month")
def month(
    month: Annotated[str, typer.Argument(help="The month in UTC, as YYYY-MM.")],
    organization: OrganizationOption = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="table for people, csv for sheets (lines only), json for programs, focus for FinOps tools."),
    ] = Format.TABLE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    pdf: Annotated[Path | None, typer.Option("--pdf", help="Write the invoice, or its draft, as PDF to this file.")] = None,
    by: Annotated[
        str, typer.Option("--by", help="Take it apart by day, project, key, model, or several with commas; or by request.")
    ] = "",
    day: Annotated[str, typer.Option("--day", help="With --by: only of this day, YYYY-MM-DD in UTC.")] = "",
    project: Annotated[str, typer.Option("--project", help="With --by: only of this project.")] = "",
    key: Annotated[str, typer.Option("--key", help="With --by: only of this API key, by prefix or id.")] = "",
    everyone: Annotated[bool, typer.Option("--all-orgs", help="With --by: of all organizations. Needs an admin key.")] = False,
    plot: Annotated[
        bool | None, typer.Option("--plot/--no-plot", help="Draw the tokens of each day. Else on a terminal only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Report one month of one organization from the ledger: tokens by kind, unit price, amount, and the check against usage."""
    checked_month(month)
    form = Format.JSON if as_json else form
    groups = parse_groups(by)
    if groups and (pdf or form is Format.FOCUS):
        raise typer.BadParameter("--pdf and --format focus are of the whole month: leave --by away", param_hint="--by")
    if not groups and (day or project or key or everyone):
        raise typer.BadParameter("--day, --project, --key and --all-orgs need --by", param_hint="--by")
    if everyone and organization:
        raise typer.BadParameter("give --org or --all-orgs", param_hint="--all-orgs")
    with billing_client(address, api_key) as client:
        owner = "" if everyone else organization_or_default(organization, client.address)
        if groups:
            write_usage(client, form, output, pages(client, month, groups, owner, day, project, key), groups, month)
        elif pdf is not None:
            save(client, month, MonthExportFormat.INVOICE_PDF, owner, pdf)
        elif form is Format.FOCUS:
            save(client, month, MonthExportFormat.FOCUS_CSV, owner, output)
        else:
            write_month(client.get_month_report(owner, month), form, output)
            if form is Format.TABLE and output is None:
                add_outlook(client, month, owner, plot)


@report.command("forecast")
def forecast(
    organization: OrganizationOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Tell what the present month has cost so far, what it will have cost by its end, and how sure that is."""
    with billing_client(address, api_key) as client:
        found = client.get_forecast(organization_or_default(organization, client.address))
    if as_json:
        print_json(found)
    else:
        show(*forecast_lines(found))


def checked_month(month: str) -> None:
    """Raises: typer.BadParameter."""
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise typer.BadParameter(f"{month!r} is not a month: write it as YYYY-MM", param_hint="MONTH")


def parse_groups(by: str) -> list[UsageGrouping]:
    """The groupings of `--by`. Raises: typer.BadParameter."""
    names = [name.strip() for name in by.split(",") if name.strip()]
    if wrong := [name for name in names if name not in GROUPINGS]:
        raise typer.BadParameter(f"{wrong[0]!r} is none of {', '.join(GROUPINGS)}", param_hint="--by")
    return [GROUPINGS[name] for name in names]


def pages(
    client: BillingClient, month: str, groups: list[UsageGrouping], organization: str, day: str, project: str, key: str
) -> Iterator[UsagePage]:
    """The pages one after the other, fetched as they are read."""
    token = ""
    while True:
        page = client.get_usage(
            month, groups, organization=organization, day=day, project=project, api_key=key, page_size=PAGE_ROWS, page_token=token
        )
        yield page
        if not (token := page.next_page_token):
            return


def write_usage(
    client: BillingClient, form: Format, output: Path | None, found: Iterator[UsagePage], groups: list[UsageGrouping], month: str
) -> None:
    """Rows as a table, a sheet or a document. A sheet is written page by page, however long it is."""
    if form is Format.CSV:
        put(output, (usage_csv(page.rows, header=not index) for index, page in enumerate(found)))
        return
    first = next(found)
    if form is Format.JSON:
        rows = [*first.rows, *(row for page in found for row in page.rows)]
        document = {"month": month, "time_zone": "UTC", "rows": jsonable(rows), "total": jsonable(first.total)}
        put(output, [json.dumps(document, ensure_ascii=False, indent=2) + "\n"])
        return
    rows = list(first.rows[:TABLE_ROWS_MAX])
    currency = first.rows[0].amount.currency_code if first.rows else ""
    title = " · ".join(filter(None, (month + " (UTC)", f"amounts in {currency}, before tax" if currency else "no usage")))
    drawn = usage_table(rows, groups, first.total, title)
    if output is None:
        show(drawn)
    else:
        put(output, [to_text(drawn, FILE_WIDTH)])
    if first.next_page_token or len(first.rows) > TABLE_ROWS_MAX:
        note(f"the first {len(rows):,} rows: --format csv has them all, --day, --project and --key narrow it down")


def write_month(found: MonthReport, form: Format, output: Path | None) -> None:
    """The report of the month, and what is wrong with it, if anything."""
    if output is not None:
        put(output, [written(found, form)])
        note(f"{output}: {len(found.lines)} lines, total {found.total_rounded}{_beside_usage(found, form)}")
    elif form is Format.TABLE:
        show(month_report(found))
    else:
        typer.echo(written(found, form), nl=False)
    if form is Format.CSV and (found.unrated_event_count or not found.reconciliation.balanced):
        note(f"{found.unrated_event_count:,} usage events are not in the lines yet; --format table shows the check")
    if not found.reconciliation.balanced:
        fail("the ledger and the usage events do not agree")


def _beside_usage(found: MonthReport, form: Format) -> str:
    """Says so where the rows of a CSV, which are usage alone, do not come to the total that is told beside them."""
    usage_picos = sum(line.amount.picos for line in found.lines)
    if form is not Format.CSV or usage_picos == found.total.picos:
        return ""
    return (
        f"; the lines are usage alone and come to {Money(found.total.currency_code, usage_picos)}: "
        f"`weir month show {found.month} --format csv` has plan, credit and adjustments too"
    )


def written(report: MonthReport, form: Format) -> str:
    """The report as the text of a file."""
    if form is Format.TABLE:
        return to_text(month_report(report), FILE_WIDTH)
    if form is Format.CSV:
        return month_report_csv(report)
    return json.dumps(jsonable(report), ensure_ascii=False, indent=2) + "\n"


def add_outlook(client: BillingClient, month: str, organization: str, plot: bool | None) -> None:
    """Below the table: of the present month the forecast, and the tokens of each day where somebody looks."""
    today = present_day()
    if month == f"{today:%Y-%m}":
        show(*forecast_lines(client.get_forecast(organization, month)))
    if plot or (plot is None and sys.stdout.isatty()):
        by_day = {row.day: row.token_count for row in client.get_usage(month, [UsageGrouping.DAY], organization=organization).rows}
        show("", daily_plot(month, by_day, today))


def present_day() -> date:
    """Today in UTC."""
    return datetime.now(UTC).date()


def daily_plot(month: str, by_day: dict[str, int], today: date) -> DailyPlot:
    """Every day of the month; those to come are empty. Usage of other months, found late, is left out."""
    begins = date.fromisoformat(f"{month}-01")
    ends = (begins + timedelta(days=31)).replace(day=1)
    days = [begins + timedelta(days=index) for index in range((ends - begins).days)]
    return DailyPlot(
        f"tokens per day of {month} (UTC)", [Day(day.day, by_day.get(str(day), 0) if day <= today else None) for day in days]
    )


def save(client: BillingClient, month: str, form: MonthExportFormat, organization: str, path: Path | None) -> None:
    """A file of the month as the server makes it; to stdout without a path."""
    file = client.export_month(month, form, organization=organization)
    if path is None:
        sys.stdout.buffer.write(file.content)
        return
    target = path / file.file_name if path.is_dir() else path
    try:
        target.write_bytes(file.content)
    except OSError as error:
        fail(f"{target} cannot be written: {error}")
    note(f"{target}: {len(file.content):,} bytes")


def put(output: Path | None, texts: Iterator[str] | list[str]) -> None:
    """Texts one after the other, to a file or to stdout."""
    if output is None:
        for text in texts:
            typer.echo(text, nl=False)
        return
    try:
        with output.open("w", encoding="utf-8", newline="") as file:
            file.writelines(texts)
    except OSError as error:
        fail(f"{output} cannot be written: {error}")
