"""`weir report`: what an organization used in a month, and what it costs."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from weir_client import MonthReport

from api.cli.connection import AddressOption, KeyOption, billing_client, fail, organization_or_default
from api.cli.output import jsonable, note, show
from api.cli.render import month_report, month_report_csv, to_text
from api.cli.tenants import OrganizationOption

report = typer.Typer(help="Report usage and money by month.", no_args_is_help=True)

FILE_WIDTH = 120  # columns of a table that goes to a file


class Format(StrEnum):
    """How a report is written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


@report.command("month")
def month(
    month: Annotated[str, typer.Argument(help="The month in UTC, as YYYY-MM.")],
    organization: OrganizationOption = None,
    form: Annotated[
        Format, typer.Option("--format", help="table for people, csv for sheets (lines only), json for programs.")
    ] = Format.TABLE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Report one month of one organization from the ledger: tokens by kind, unit price, amount, and the check against usage."""
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise typer.BadParameter(f"{month!r} is not a month: write it as YYYY-MM", param_hint="MONTH")
    with billing_client(address, api_key) as client:
        found = client.get_month_report(organization_or_default(organization, client.address), month)
    form = Format.JSON if as_json else form
    if output is not None:
        try:
            output.write_text(written(found, form), encoding="utf-8")
        except OSError as error:
            fail(f"{output} cannot be written: {error}")
        note(f"{output}: {len(found.lines)} lines, total {found.total_rounded}")
    elif form is Format.TABLE:
        show(month_report(found))
    else:
        typer.echo(written(found, form), nl=False)
    if form is Format.CSV and (found.unrated_event_count or not found.reconciliation.balanced):
        note(f"{found.unrated_event_count:,} usage events are not in the lines yet; --format table shows the check")
    if not found.reconciliation.balanced:
        fail("the ledger and the usage events do not agree")


def written(report: MonthReport, form: Format) -> str:
    """The report as the text of a file."""
    match form:
        case Format.TABLE:
            return to_text(month_report(report), FILE_WIDTH)
        case Format.CSV:
            return month_report_csv(report)
        case Format.JSON:
            return json.dumps(jsonable(report), ensure_ascii=False, indent=2) + "\n"
