"""`weir adjustment` and `weir credit-note`: corrections by hand, which one proposes and another approves."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text
from weir_client import Adjustment, BillingClient, Money

from api.cli.connection import Output, billing_client, calls, organization_or_default
from api.cli.render import money_text, parse_picos, parsed, table, time_text
from api.cli.tenants import OrganizationOption

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
