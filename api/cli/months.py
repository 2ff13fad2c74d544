"""`weir month`: closing a month, what a closed one says, and whether it still says so."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import (
    Aborted,
    BillingClient,
    ClosedMonth,
    DeadlineExceeded,
    DocumentFormat,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    Invoice,
    Month,
    MonthVerification,
    NotFound,
    Unavailable,
    WeirError,
)

from api.cli.connection import AddressOption, KeyOption, Output, admin_client, billing_client, calls, organization_or_default
from api.cli.render import JsonOption, decimal_text, fail, money_text, month_report, note, print_json, show, table, time_text
from api.cli.tenants import OrganizationOption

month = typer.Typer(help="Close months, read them, and prove that they are what they were.", no_args_is_help=True)

CLOSE_TIMEOUT_S = 300.0  # a close reads all usage events of its month

MonthArgument = Annotated[str, typer.Argument(help="The month in UTC, as YYYY-MM.", metavar="MONTH")]
AllOption = Annotated[bool, typer.Option("--all", help="Every organization, one after the other.")]


class DocumentForm(StrEnum):
    """How a month is shown."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@month.command("list")
@calls(billing_client)
def list_months(client: BillingClient, organization: OrganizationOption = None) -> Output:
    """List the months of an organization: which are closed, by whom, with which invoice."""
    found = client.list_months(organization_or_default(organization, client.address))
    return found, months_table(found)


@month.command("show")
def show_month(
    month: MonthArgument,
    organization: OrganizationOption = None,
    form: Annotated[
        DocumentForm, typer.Option("--format", help="table for people; json and csv are the report's documents, byte for byte.")
    ] = DocumentForm.TABLE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show a month as it stands: the invoice of a closed one, and what it would be now of an open one."""
    with billing_client(address, api_key) as client:
        chosen = organization_or_default(organization, client.address)
        if form is DocumentForm.TABLE:
            report = client.get_month_report(chosen, month)
            invoice = client.get_invoice(report.invoice_number) if report.invoice_number else None
            show(month_report(report), *([] if invoice is None else [invoice_table(invoice)]))
            return
        content = client.get_month_document(chosen, month, DocumentFormat(form.value))
    if output is None:
        sys.stdout.buffer.write(content)
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        fail(f"{output} cannot be written: {error}")
    note(f"{output}: {len(content):,} bytes")


@month.command("close")
def close_months(
    month: MonthArgument,
    organization: OrganizationOption = None,
    every: AllOption = False,
    earlier: Annotated[bool, typer.Option("--earlier", help="Close the open months before it first, in their order.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only tell what stands in the way, and close nothing.")] = False,
    leave_running: Annotated[
        bool, typer.Option("--leave-running", help="Although requests of the month still run: they are billed in the next one.")
    ] = False,
    before_first: Annotated[
        bool,
        typer.Option("--before-first", help="Although it is before the customer's first month: those between have to follow."),
    ] = False,
    corrected_by: Annotated[
        str, typer.Option("--corrected-by", metavar="ADJUSTMENT", help="An approved adjustment of what misstated usage costs.")
    ] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Close a month for good and issue its invoice. Closing it again changes nothing. Exit code 1 if anything stands in the way.

    With --all every organization has its turn, whatever goes wrong with one.
    """
    if corrected_by and (every or earlier):
        raise typer.BadParameter("an adjustment is for one month of one organization", param_hint="--corrected-by")
    closed: list[ClosedMonth] = []
    refused = 0
    names = organizations(organization, every=every, address=address, api_key=api_key)
    with billing_client(address, api_key, timeout=CLOSE_TIMEOUT_S) as client:
        for name in names:
            try:
                for each in months_to_close(client, name, month, earlier=earlier):
                    closed.append(
                        client.close_month(
                            name,
                            each,
                            leave_running=leave_running,
                            before_first=before_first,
                            corrected_by=corrected_by,
                            validate_only=check,
                        )
                    )
                    refused += bool(closed[-1].obstacles)
                    if not as_json:
                        tell(closed[-1], check=check)
            except one_failure(every) as error:
                refused += 1
                tell_refusal(name, error)
    if as_json:
        print_json(closed)
    if refused:
        if every:
            note(f"{refused} refused or failed, of {len(names)} organizations")
        raise typer.Exit(1)


@month.command("verify")
def verify_months(
    month: MonthArgument,
    organization: OrganizationOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Make a closed month's report again from the ledger, and compare it with its close. Exit code 1 on any difference."""
    found: list[MonthVerification] = []
    failed = 0
    names = organizations(organization, every=every, address=address, api_key=api_key)
    with billing_client(address, api_key, timeout=CLOSE_TIMEOUT_S) as client:
        for name in names:
            try:
                found.append(client.verify_month(name, month))
            except one_failure(every) as error:
                failed += 1
                tell_refusal(name, error)
                continue
            failed += not found[-1].reproduced
            if not as_json:
                tell_verified(found[-1])
    if as_json:
        print_json(found)
    if failed:
        raise typer.Exit(1)


def one_failure(every: bool) -> tuple[type[WeirError], ...]:
    """What may go wrong with one organization and hold up no other. A key that may not do it may do it for none."""
    others = (Aborted, DeadlineExceeded, Internal, InvalidRequest, NotFound, Unavailable)
    return (FailedPrecondition, *others) if every else (FailedPrecondition,)


def organizations(given: str | None, *, every: bool, address: str | None, api_key: str | None) -> list[str]:
    """Whose months. Raises: typer.BadParameter for both or neither."""
    if not every:
        with billing_client(address, api_key) as client:
            return [organization_or_default(given, client.address)]
    if given:
        raise typer.BadParameter("give an organization or --all, not both", param_hint="--org")
    with admin_client(address, api_key) as admin:
        return [each.name for each in admin.list_organizations()]


def months_to_close(client: BillingClient, organization: str, month: str, *, earlier: bool) -> list[str]:
    """The month itself, behind the open ones before it if those are to be closed too."""
    if not earlier:
        return [month]
    known = [each for each in reversed(client.list_months(organization)) if each.month < month]
    return [*(each.month for each in known if each.state != "closed"), month]


def tell(result: ClosedMonth, *, check: bool) -> None:
    told = result.month
    if check:
        for each in result.obstacles:
            typer.echo(f"{told.organization_name} {told.month}: {each.kind}: {each.description}")
        if not result.obstacles:
            typer.echo(f"{told.organization_name} {told.month}: {'is closed' if told.state == 'closed' else 'can be closed'}")
        return
    invoice = f"invoice {told.invoice_number}, {told.total}" if told.invoice_number else "nothing to invoice"
    how = "had been closed before" if result.already_closed else "closed"
    typer.echo(f"{told.organization_name} {told.month}: {how}: {invoice}")


def tell_refusal(organization: str, error: WeirError) -> None:
    """What stands in the way, a line each, on stderr."""
    told = [f"{each.kind}: {each.description}" for each in error.details.preconditions] or [error.message]
    for each in told:
        typer.secho(f"{organization}: {each}", fg="red", err=True)


def tell_verified(found: MonthVerification) -> None:
    told = found.month
    if found.reproduced:
        typer.echo(
            f"{told.organization_name} {told.month}: reproduced; JSON {found.json_sha256[:16]}…, CSV {found.csv_sha256[:16]}…"
        )
    for each in found.differences:
        typer.secho(f"{told.organization_name} {told.month}: DIFFERS: {each}", fg="red")


def months_table(months: list[Month]) -> RenderableType:
    made = table("month", "state", "closed", "by", "invoice", "total", "payment", "SHA-256 of the JSON", right=("total",))
    for each in months:
        at, by = (each.close_time, each.closed_by) if each.state == "closed" else (each.closing_time, each.closing_by)
        total = "—" if each.total is None else money_text(each.total)
        made.add_row(
            each.month,
            each.state.value,
            time_text(at),
            by or "—",
            each.invoice_number or "—",
            total,
            ", ".join(sorted({payment.state.value for payment in each.payments})) or "—",
            each.json_sha256[:16],
        )
    return made


def invoice_table(invoice: Invoice) -> RenderableType:
    """The invoice in words: each line with what is paid for it."""
    currency = invoice.total.currency_code
    title = f"invoice {invoice.number} · {invoice.organization_name} · {invoice.month} · {currency}, {invoice.tax_note}"
    made = table("line", "exact", "amount", right=("exact", "amount"), title=title)
    for line in invoice.lines:
        made.add_row(line.description, decimal_text(line.exact_amount.amount), decimal_text(line.amount.amount))
    made.add_section()
    made.add_row("total", decimal_text(invoice.exact_total.amount), decimal_text(invoice.total.amount), style="bold")
    if invoice.carried_in.picos:
        made.add_row("carried from the months before", decimal_text(invoice.carried_in.amount), "")
    made.add_row("carried to the next month", decimal_text(invoice.carried_out.amount), "")
    for each in invoice.credit_notes:
        made.add_row(f"credit note {each.credit_note_number}: {each.reason}", "", decimal_text(each.amount.amount))
    return made
