"""`weir price simulate`: what a past month would have come to with other prices or plans."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import SimulatedCustomer

from api.cli.amounts import decimal_text
from api.cli.connection import AddressOption, KeyOption, admin_client
from api.cli.credits import shown
from api.cli.output import JsonOption, note, print_json, show
from api.cli.plans import read_proposal
from api.cli.render import table

TIMEOUT_S = 300.0  # a month of millions of events is one statement, and a long one
CSV_COLUMNS = (
    "organization_name",
    "organization_id",
    "currency_code",
    "token_count",
    "old_amount",
    "new_amount",
    "difference",
    "old_plan",
    "new_plan",
)


def simulate(
    month: Annotated[str, typer.Argument(help="The month, as YYYY-MM, UTC.")],
    file: Annotated[Path, typer.Option("--prices", help="YAML with `prices:` as for `weir apply`, and `plans:`; - for stdin.")],
    organization: Annotated[str, typer.Option("--org", "--organization", help="Only this organization, by name or id.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with exact amounts on stdout.")] = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Rate a past month's real usage anew, with proposed prices and plans. Changes nothing.

    Amounts are usage and plan; adjustments, credit and rounding are left out on both sides.
    """
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    with admin_client(address, api_key, timeout=TIMEOUT_S) as client:
        found = client.simulate_prices(month, read_proposal(file), organization=organization)
    if as_json:
        print_json(found)
    elif as_csv:
        write_csv(found)
    elif found:
        show(simulated_table(found))
    else:
        note(f"nothing was used in {month}")


def write_csv(customers: list[SimulatedCustomer]) -> None:
    """RFC 4180 with a header."""
    writer = csv.writer(sys.stdout, lineterminator="\r\n")
    writer.writerow(CSV_COLUMNS)
    for each in customers:
        amounts = (f"{money.amount:f}" for money in (each.old_amount, each.new_amount, each.difference))
        writer.writerow(
            [
                each.organization_name,
                each.organization_id,
                each.old_amount.currency_code,
                each.token_count,
                *amounts,
                each.old_plan,
                each.new_plan,
            ]
        )


def simulated_table(customers: list[SimulatedCustomer]) -> RenderableType:
    """What each paid, would have paid, and the difference."""
    numbers = ("tokens", "paid", "would pay", "difference", "%")
    made = table("organization", *numbers, "plan", right=numbers)
    for each in customers:
        share = f"{100 * each.difference.picos / each.old_amount.picos:+.1f}" if each.old_amount.picos else "—"
        plan = each.new_plan or "none"
        made.add_row(
            each.organization_name,
            f"{each.token_count:,}",
            shown(each.old_amount),
            decimal_text(each.new_amount.amount),
            decimal_text(each.difference.amount),
            share,
            plan if each.new_plan == each.old_plan else f"{each.old_plan or 'none'} → {plan}",
        )
    return made
