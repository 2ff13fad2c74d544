"""`weir credit`: prepaid credit, and organizations that are kept to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import CreditGrant, Money

from api.cli.amounts import decimal_text, parse_amount, units_to_picos
from api.cli.connection import AddressOption, KeyOption, admin_client
from api.cli.output import JsonOption, note, print_json, show
from api.cli.render import table

credit = typer.Typer(help="Grant credit, and see what is left of it.", no_args_is_help=True)

OrganizationArgument = Annotated[str, typer.Argument(help="Organization, by name or id.")]


@credit.command("grant")
def grant_credit(
    organization: OrganizationArgument,
    amount: Annotated[str, typer.Argument(help="In units of the organization's currency, such as 500.00.")],
    last_month: Annotated[str, typer.Option("--until", help="The last month that it pays for, as YYYY-MM; then the rest expires.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it stands in the ledger and in the audit log.")],
    first_month: Annotated[str, typer.Option("--from", help="The first month that it pays for. Default: this one.")] = "",
    request_id: Annotated[
        str, typer.Option("--request-id", help="A UUID of your own: the same call with it again grants nothing more.")
    ] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Grant an organization credit for what is billed in some months.

    At most 1,000,000 units at once. For a prepaid organization, all that it ever uses and its credit are limited to
    9,223,372 units together: an error says how much more can be granted.
    """
    try:
        picos = units_to_picos(parse_amount(amount))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="AMOUNT") from error
    with admin_client(address, api_key) as client:
        granted = client.grant_credit(
            organization, picos, last_month=last_month, reason=reason, first_month=first_month, request_id=request_id or None
        )
    if as_json:
        print_json(granted)
    else:
        show(grants_table([granted]))


@credit.command("list")
def list_grants(
    organization: Annotated[str, typer.Option("--org", help="Only of this organization, by name or id.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List credit, spent and left by the months that are closed."""
    with admin_client(address, api_key) as client:
        found = client.list_credit_grants(organization)
    if as_json:
        print_json(found)
    elif found:
        show(grants_table(found))
    else:
        note("no credit was granted")


@credit.command("balance")
def show_balance(
    organization: OrganizationArgument, as_json: JsonOption = False, address: AddressOption = None, api_key: KeyOption = None
) -> None:
    """Tell what there is of an organization's credit at this moment."""
    with admin_client(address, api_key) as client:
        found = client.get_credit_balance(organization)
    if as_json:
        print_json(found)
        return
    made = table(
        "organization", "prepaid only", "left", "unbilled", "held", "available", right=("left", "unbilled", "held", "available")
    )
    amounts = map(shown, (found.left, found.unbilled, found.held, found.available))
    made.add_row(found.organization_name, "yes" if found.prepaid else "no", *amounts)
    show(made)


@credit.command("prepaid")
def set_prepaid(
    organization: OrganizationArgument,
    only: Annotated[bool, typer.Option("--only/--off", help="Let requests in only as far as credit reaches, or end that.")],
    alert_left: Annotated[
        str | None,
        typer.Option(help="Alert when so much is left, such as 100.00,20.00; or none. Default: as it is; none at first."),
    ] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Keep an organization to its credit, exactly, from now on; or no longer."""
    try:
        parts = [] if alert_left in (None, "none") else (alert_left or "").split(",")
        lefts = [units_to_picos(parse_amount(part.strip())) for part in parts]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--alert-left") from error
    with admin_client(address, api_key) as client:
        existed = client.set_prepaid(organization, only, alert_at=None if alert_left is None else lefts)
    if as_json:
        print_json({"organization": organization, "prepaid": only, "existed": existed})
    else:
        already = " already" if existed else ""
        note(f"{organization} is{already} {'kept to its credit' if only else 'not kept to its credit'}")


def grants_table(grants: Iterable[CreditGrant]) -> RenderableType:
    """Credit, by what is left of it."""
    numbers = ("granted", "spent", "expired", "left")
    made = table("organization", *numbers, "from", "until", "reason", "id", right=numbers)
    for each in grants:
        amounts = map(shown, (each.amount, each.spent, each.expired, each.remaining))
        made.add_row(each.organization_name, *amounts, each.first_month, each.last_month, each.reason, each.grant_id)
    return made


def shown(money: Money) -> str:
    """An amount with its currency."""
    return f"{decimal_text(money.amount)} {money.currency_code}"
