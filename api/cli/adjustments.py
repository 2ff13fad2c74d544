"""`weir adjustment` and `weir credit-note`: corrections by hand, which one proposes and another approves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.connection import AddressOption, KeyOption, billing_client, organization_or_default
from api.cli.render import JsonOption, decimal_text, note, parse_amount, print_json, show, table, time_text, units_to_picos
from api.cli.tenants import OrganizationOption

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import Adjustment

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
def create_adjustment(
    amount: Annotated[
        str, typer.Argument(help="What the customer owes more, in units of its currency; negative for less, such as -12.50.")
    ],
    reason: ReasonOption,
    organization: OrganizationOption = None,
    request_id: RequestIdOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Propose a line for the next invoice. Somebody with another key approves it."""
    from weir_client import Money

    picos = parse_picos(amount)
    with billing_client(address, api_key) as client:
        chosen = organization_or_default(organization, client.address)
        tell(client.create_adjustment(chosen, Money("", picos), reason, request_id=request_id), as_json=as_json)


@credit_note.command("create")
def create_credit_note(
    invoice: Annotated[str, typer.Argument(help="Number of the invoice, such as INV-000001.")],
    amount: Annotated[str, typer.Argument(help="What is given back, above zero, in units of its currency.")],
    reason: ReasonOption,
    request_id: RequestIdOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Propose to give back a part of an invoice, or all of it. Somebody with another key approves it."""
    from weir_client import Money

    picos = parse_picos(amount)
    with billing_client(address, api_key) as client:
        tell(client.create_credit_note(invoice, Money("", picos), reason, request_id=request_id), as_json=as_json)


@adjustment.command("approve")
@credit_note.command("approve")
def approve(
    adjustment_id: IdArgument, as_json: JsonOption = False, address: AddressOption = None, api_key: KeyOption = None
) -> None:
    """Approve what somebody else proposed, and post it to the month whose invoice comes next."""
    with billing_client(address, api_key) as client:
        tell(client.approve_adjustment(adjustment_id), as_json=as_json)


@adjustment.command("reject")
@credit_note.command("reject")
def reject(
    adjustment_id: IdArgument, as_json: JsonOption = False, address: AddressOption = None, api_key: KeyOption = None
) -> None:
    """Reject it for good; whoever proposed it may do so too."""
    with billing_client(address, api_key) as client:
        tell(client.reject_adjustment(adjustment_id), as_json=as_json)


@adjustment.command("list")
def list_adjustments(
    organization: OrganizationOption = None,
    undecided: UndecidedOption = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List the adjustments of an organization, the latest first."""
    list_some(organization, undecided, as_json, address, api_key, credit_notes=False)


@credit_note.command("list")
def list_credit_notes(
    organization: OrganizationOption = None,
    undecided: UndecidedOption = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List the credit notes of an organization, the latest first."""
    list_some(organization, undecided, as_json, address, api_key, credit_notes=True)


def list_some(
    organization: str | None, undecided: bool, as_json: bool, address: str | None, api_key: str | None, *, credit_notes: bool
) -> None:
    """Those that are credit notes, or those that are not."""
    with billing_client(address, api_key) as client:
        found = client.list_adjustments(organization_or_default(organization, client.address), undecided_only=undecided)
    chosen = [each for each in found if bool(each.invoice_number) is credit_notes]
    if as_json:
        print_json(chosen)
    elif chosen:
        show(adjustments_table(chosen, credit_notes=credit_notes))
    else:
        note("none")


def parse_picos(amount: str) -> int:
    """Raises: typer.BadParameter."""
    try:
        return units_to_picos(parse_amount(amount))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="AMOUNT") from error


def tell(told: Adjustment, *, as_json: bool) -> None:
    """One adjustment after a change."""
    if as_json:
        print_json(told)
        return
    name = f"credit note {told.credit_note_number}".rstrip() if told.invoice_number else "adjustment"
    amount = f"{decimal_text(told.amount.amount)} {told.amount.currency_code}"
    match told.state.value:
        case "proposed":
            what = f"proposed; somebody else approves it: weir {name.replace(' ', '-')} approve {told.adjustment_id}"
        case "approved":
            what = f"approved by {told.decided_by}, posted to {told.billing_month}"
        case _:
            what = f"{told.state.value} by {told.decided_by}"
    typer.echo(f"{name} of {amount} ({told.reason}): {what}")


def adjustments_table(found: list[Adjustment], *, credit_notes: bool) -> RenderableType:
    """One line each."""
    own = ("invoice", "number") if credit_notes else ()
    made = table("id", "state", "amount", *own, "month", "reason", "proposed", "by", "decided by", right=("amount",))
    for each in found:
        cells = (each.invoice_number, each.credit_note_number or "—") if credit_notes else ()
        amount = f"{decimal_text(each.amount.amount)} {each.amount.currency_code}"
        proposed = time_text(each.create_time)
        made.add_row(
            each.adjustment_id,
            each.state.value,
            amount,
            *cells,
            each.billing_month or "—",
            each.reason,
            proposed,
            each.author,
            each.decided_by or "—",
        )
    return made
