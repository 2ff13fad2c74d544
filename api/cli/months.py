"""`weir month`, `weir adjustment` and `weir credit-note`: closing a month, and corrections by hand, which another one approves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import RenderableType
from rich.text import Text
from weir_client import (
    Aborted,
    Adjustment,
    AdminClient,
    BillingClient,
    ClosedMonth,
    DeadlineExceeded,
    DocumentFormat,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    Invoice,
    Money,
    Month,
    MonthVerification,
    NotFound,
    Unavailable,
    WeirError,
)

from api.cli.connection import AddressOption, KeyOption, Output, admin_client, billing_client, calls, organization_or_default
from api.cli.render import (
    JsonOption,
    decimal_text,
    money_text,
    month_report,
    note,
    parse_picos,
    parsed,
    print_json,
    put,
    show,
    table,
    time_text,
)
from api.cli.tenants import OrganizationOption

month = typer.Typer(help="Close months, read them, and prove that they are what they were.", no_args_is_help=True)

CLOSE_TIMEOUT_S = 300.0  # a close reads all usage events of its month

MonthArgument = Annotated[str, typer.Argument(help="The month in UTC, as YYYY-MM.", metavar="MONTH")]
AllOption = Annotated[bool, typer.Option("--all", help="Every organization, one after the other.")]


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
        Literal["table", "json", "csv"],
        typer.Option("--format", help="table for people; json and csv are the report's documents, byte for byte."),
    ] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")] = None,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show a month as it stands: the invoice of a closed one, and what it would be now of an open one."""
    with billing_client(address, api_key) as client:
        chosen = organization_or_default(organization, client.address)
        if form == "table":
            report = client.get_month_report(chosen, month)
            invoice = client.get_invoice(report.invoice_number) if report.invoice_number else None
            show(month_report(report), *([] if invoice is None else [invoice_table(invoice)]))
            return
        content = client.get_month_document(chosen, month, DocumentFormat(form))
    put(output, [content])
    if output is not None:
        note(f"{output}: {len(content):,} bytes")


@month.command("close")
@calls(billing_client, admin_client, timeout=CLOSE_TIMEOUT_S)
def close_months(
    client: BillingClient,
    admin: AdminClient,
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
) -> None:
    """Close a month for good and issue its invoice. Closing it again changes nothing. Exit code 1 if anything stands in the way.

    With --all every organization has its turn, whatever goes wrong with one.
    """
    if corrected_by and (every or earlier):
        raise typer.BadParameter("an adjustment is for one month of one organization", param_hint="--corrected-by")
    closed: list[ClosedMonth] = []
    refused = 0
    names = organizations(organization, client, admin, every=every)
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
@calls(billing_client, admin_client, timeout=CLOSE_TIMEOUT_S)
def verify_months(
    client: BillingClient,
    admin: AdminClient,
    month: MonthArgument,
    organization: OrganizationOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a closed month's report again from the ledger, and compare it with its close. Exit code 1 on any difference."""
    found: list[MonthVerification] = []
    failed = 0
    for name in organizations(organization, client, admin, every=every):
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


def organizations(given: str | None, client: BillingClient, admin: AdminClient, *, every: bool) -> list[str]:
    """Whose months. Raises: typer.BadParameter for both or neither."""
    if not every:
        return [organization_or_default(given, client.address)]
    if given:
        raise typer.BadParameter("give an organization or --all, not both", param_hint="--org")
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
        payment = ", ".join(sorted({payment.state.value for payment in each.payments})) or "—"
        told = each.month, each.state.value, time_text(at), by or "—", each.invoice_number or "—", total, payment
        made.add_row(*told, each.json_sha256[:16])
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


adjustment = typer.Typer(help="Put a line on the next invoice: one proposes it, another approves.", no_args_is_help=True)
credit_note = typer.Typer(help="Give back a part of an invoice: one proposes it, another approves.", no_args_is_help=True)

ReasonOption = Annotated[str, typer.Option(help="Why, 1 to 200 characters; the customer reads it.")]
IdArgument = Annotated[str, typer.Argument(help="Its id, as `list` shows it.", metavar="ID")]
RequestIdOption = Annotated[
    str | None,
    typer.Option("--request-id", help="A UUID that makes the command repeatable: however often, it proposes once."),
]
UndecidedOption = Annotated[bool, typer.Option("--undecided", help="Only what waits for a decision.")]


@adjustment.command("create", context_settings={"ignore_unknown_options": True})
@calls(billing_client)
def create_adjustment(
    client: BillingClient,
    amount: Annotated[
        str, typer.Argument(help="What the customer owes more, in units of its currency; negative for less, such as -12.50.")
    ],
    reason: ReasonOption,
    organization: OrganizationOption = None,
    request_id: RequestIdOption = None,
) -> Output:
    """Propose a line for the next invoice. Somebody with another key approves it."""
    chosen = organization_or_default(organization, client.address)
    return told(client.create_adjustment(chosen, parse_money(amount), reason, request_id=request_id))


@credit_note.command("create")
@calls(billing_client)
def create_credit_note(
    client: BillingClient,
    invoice: Annotated[str, typer.Argument(help="Number of the invoice, such as INV-000001.")],
    amount: Annotated[str, typer.Argument(help="What is given back, above zero, in units of its currency.")],
    reason: ReasonOption,
    request_id: RequestIdOption = None,
) -> Output:
    """Propose to give back a part of an invoice, or all of it. Somebody with another key approves it."""
    return told(client.create_credit_note(invoice, parse_money(amount), reason, request_id=request_id))


@adjustment.command("approve")
@credit_note.command("approve")
@calls(billing_client)
def approve(client: BillingClient, adjustment_id: IdArgument) -> Output:
    """Approve what somebody else proposed, and post it to the month whose invoice comes next."""
    return told(client.approve_adjustment(adjustment_id))


@adjustment.command("reject")
@credit_note.command("reject")
@calls(billing_client)
def reject(client: BillingClient, adjustment_id: IdArgument) -> Output:
    """Reject it for good; whoever proposed it may do so too."""
    return told(client.reject_adjustment(adjustment_id))


@adjustment.command("list")
@calls(billing_client)
def list_adjustments(client: BillingClient, organization: OrganizationOption = None, undecided: UndecidedOption = False) -> Output:
    """List the adjustments of an organization, the latest first."""
    return listed(client, organization, undecided, credit_notes=False)


@credit_note.command("list")
@calls(billing_client)
def list_credit_notes(client: BillingClient, organization: OrganizationOption = None, undecided: UndecidedOption = False) -> Output:
    """List the credit notes of an organization, the latest first."""
    return listed(client, organization, undecided, credit_notes=True)


def listed(client: BillingClient, organization: str | None, undecided: bool, *, credit_notes: bool) -> Output:
    """Those that are credit notes, or those that are not."""
    found = client.list_adjustments(organization_or_default(organization, client.address), undecided_only=undecided)
    chosen = [each for each in found if bool(each.invoice_number) is credit_notes]
    return chosen, adjustments_table(chosen, credit_notes=credit_notes) if chosen else "none"


def parse_money(amount: str) -> Money:
    """Raises: typer.BadParameter."""
    return Money("", parsed("AMOUNT", parse_picos, amount))


def told(changed: Adjustment) -> Output:
    name = f"credit note {changed.credit_note_number}".rstrip() if changed.invoice_number else "adjustment"
    match changed.state.value:
        case "proposed":
            what = f"proposed; somebody else approves it: weir {name.replace(' ', '-')} approve {changed.adjustment_id}"
        case "approved":
            what = f"approved by {changed.decided_by}, posted to {changed.billing_month}"
        case _:
            what = f"{changed.state.value} by {changed.decided_by}"
    return changed, Text(f"{name} of {money_text(changed.amount)} ({changed.reason}): {what}")


def adjustments_table(found: list[Adjustment], *, credit_notes: bool) -> RenderableType:
    own = ("invoice", "number") if credit_notes else ()
    made = table("id", "state", "amount", *own, "month", "reason", "proposed", "by", "decided by", right=("amount",))
    for each in found:
        cells = (each.invoice_number, each.credit_note_number or "—") if credit_notes else ()
        what = each.adjustment_id, each.state.value, money_text(each.amount), *cells, each.billing_month or "—", each.reason
        made.add_row(*what, time_text(each.create_time), each.author, each.decided_by or "—")
    return made
