"""`weir resale`: what you charge your own users, and a statement of each for a month."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from weir_client import ResaleStatementFormat

from weir_cli.connection import (
    MonthArgument,
    OrganizationOption,
    Output,
    billing_client,
    calls,
    organization_or_default,
)
from weir_cli.months import write_content
from weir_cli.plans import TIME_FORMATS, SinceOption, utc
from weir_cli.render import Table, put
from weir_cli.terms import TERMS, options_of, values_of
from weir_cli.texts import amount_or_none, amount_text, end_user_text, resale_rate, time_text

if TYPE_CHECKING:
    from weir_client import (
        BillingClient,
        ReplicaRental,
        ResalePrice,
        ResaleStatement,
        ResaleStatementLine,
    )

EVERY_MODEL = "all models"
CLOSED_ONLY = "amounts may still change until the month is closed"

resale = typer.Typer(
    help="Set what you charge your own users, and get their statements.", no_args_is_help=True
)
price = typer.Typer(help="Set and list the prices for your users.", no_args_is_help=True)
rental = typer.Typer(help="Record replicas that your users rent by the hour.", no_args_is_help=True)
resale.add_typer(price, name="price")
resale.add_typer(rental, name="rental")


PRICES: Table[ResalePrice] = Table(
    {
        "model": lambda each: each.model or EVERY_MODEL,
        "markup": lambda each: "ends" if each.withdrawn else f"{each.markup_milli / 1000:g}",
        **{
            term.key.replace("_", " "): partial(resale_rate, term.key)
            for term in TERMS["resale price"]
            if term.kind == "price"
        },
        "request": lambda each: amount_or_none(each.request_picos),
        "replica hour": lambda each: amount_or_none(each.replica_hour_picos),
        "since": "effective_time",
        "version": lambda each: str(each.version),
    },
    right=(
        *("markup", "input", "cached input", "output", "reasoning", "embedding", "request"),
        "replica hour",
    ),
    optional={"replica hour": lambda each: each.replica_hour_picos},
    empty="no resale prices: your users are charged your cost; see `weir resale price set --help`",
    title="prices per million tokens, per request, and per hour of a replica",
    drop=("version", "cached input", "embedding", "reasoning"),
)
STATEMENTS: Table[ResaleStatement] = Table(
    {
        "end user": end_user_text,
        "requests": "request_count",
        "tokens": "token_count",
        "your cost": lambda each: amount_text(each.cost),
        "amount": lambda each: amount_text(each.amount),
        "to charge": lambda each: amount_text(each.total_rounded),
        "id": lambda each: each.end_user_id or None,
    },
    right=("requests", "tokens", "your cost", "amount", "to charge"),
    empty="no usage in this month",
    drop=("id", "tokens", "requests"),
)
RENTALS: Table[ReplicaRental] = Table(
    {
        "id": lambda each: str(each.rental_id),
        "end user": lambda each: each.end_user or "erased",
        "model": "model",
        "replicas": "replica_count",
        "from": "start_time",
        "until": lambda each: "open" if each.end_time is None else time_text(each.end_time),
    },
    right=("id", "replicas"),
    empty="no rentals; see `weir resale rental start --help`",
)
LINES: Table[ResaleStatementLine] = Table(
    {
        "model": "model",
        "item": lambda each: each.item.replace("_", " "),
        "quantity": "quantity",
        "your cost": lambda each: amount_text(each.cost),
        "amount": lambda each: amount_text(each.amount),
        "late": lambda each: each.late_month or None,
        "price": lambda each: str(each.resale_price_version) if each.resale_price_version else None,
    },
    right=("quantity", "your cost", "amount"),
    optional={"late": lambda each: each.late_month},
    drop=("price",),
)


@price.command("set")
@calls(billing_client, options=options_of(TERMS["resale price"]))
def set_price(
    client: BillingClient,
    model: Annotated[
        str, typer.Argument(help="The model. Leave it out for all without a price of their own.")
    ] = "",
    organization: OrganizationOption = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="End the price of the model instead.")
    ] = False,
    effective_time: SinceOption = None,
    **terms: Any,
) -> Output:
    """Set what your users pay for a model. Requests that start later pay it.

    Give a multiple of your cost, prices of some kinds of token, or both. It changes statements
    only, never your own bill.
    """
    made = client.set_resale_price(
        organization_or_default(organization, client.address),
        model,
        **values_of(TERMS["resale price"], terms),
        withdrawn=withdraw,
        effective_time=utc(effective_time),
    )
    return made, PRICES.drawn([made])


@price.command("list")
@calls(billing_client)
def list_prices(
    client: BillingClient,
    organization: OrganizationOption = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show past and future prices too.")
    ] = False,
) -> Output:
    """List the prices for your users. An empty cell means the markup on your cost."""
    owner = organization_or_default(organization, client.address)
    found = list(client.list_resale_prices(owner, history=history))
    return found, PRICES.of(found)


@rental.command("start")
@calls(billing_client)
def start_rental(
    client: BillingClient,
    end_user: Annotated[str, typer.Argument(help="Your user, known or not.")],
    model: Annotated[str, typer.Argument(help="The model; it needs a price per replica and hour.")],
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 1,
    start_time: Annotated[
        datetime | None,
        typer.Option(
            "--from",
            help="Start, in UTC, in a month that is not closed. Default: now.",
            formats=TIME_FORMATS,
        ),
    ] = None,
    end_time: Annotated[
        datetime | None,
        typer.Option("--until", help="End, in UTC. Default: open.", formats=TIME_FORMATS),
    ] = None,
    organization: OrganizationOption = None,
) -> Output:
    """Record that a user rents replicas of a model, at your price per hour.

    It changes their statement only. Weir neither starts nor reserves a replica for them.
    """
    made = client.rent_replicas(
        end_user,
        model,
        replicas,
        organization=organization_or_default(organization, client.address),
        start_time=utc(start_time),
        end_time=utc(end_time),
    )
    return made, RENTALS.drawn([made])


@rental.command("end")
@calls(billing_client)
def end_rental(
    client: BillingClient,
    rental_id: Annotated[int, typer.Argument(help="Number of the rental.")],
    end_time: Annotated[
        datetime | None,
        typer.Option(
            "--at",
            help="End, in UTC. Default: now, or unchanged if it has ended. The start cancels the"
            " rental.",
            formats=TIME_FORMATS,
        ),
    ] = None,
    organization: OrganizationOption = None,
) -> Output:
    """Set the end of a rental, in a month that is not closed."""
    ended = client.end_replica_rental(
        rental_id, utc(end_time), organization=organization_or_default(organization, client.address)
    )
    return ended, RENTALS.drawn([ended])


@rental.command("list")
@calls(billing_client)
def list_rentals(
    client: BillingClient,
    end_user: Annotated[
        str, typer.Option("--end-user", help="Only this user, by name or id.")
    ] = "",
    organization: OrganizationOption = None,
) -> Output:
    """List the rentals of your users, the latest recorded first."""
    owner = organization_or_default(organization, client.address)
    found = list(client.list_replica_rentals(end_user, organization=owner, page_size=1000))
    return found, RENTALS.of(found)


@resale.command("statements")
@calls(billing_client)
def list_statements(
    client: BillingClient,
    month: MonthArgument,
    organization: OrganizationOption = None,
) -> Output:
    """List the statements of a month, by end user. Their costs add up to your usage."""
    owner = organization_or_default(organization, client.address)
    found = list(client.list_resale_statements(month, organization=owner, page_size=1000))
    remarks = [CLOSED_ONLY] if found and found[0].state == "open" else []
    return found, STATEMENTS.of(found), *remarks


@resale.command("statement")
@calls(billing_client)
def show_statement(
    client: BillingClient,
    end_user: Annotated[
        str,
        typer.Argument(help='End user, by name or id; "" for usage without one.'),
    ],
    month: MonthArgument,
    organization: OrganizationOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the CSV document.")] = False,
    pdf: Annotated[
        Path | None, typer.Option("--pdf", help="Write the PDF for the end user to this file.")
    ] = None,
    *,
    as_json: bool = False,
) -> Output | None:
    """Show what an end user owes you for a month. CSV and JSON are the server's documents.

    Documents of a closed month never change. CSV and JSON have your costs, the PDF has not.
    """
    owner = organization_or_default(organization, client.address)
    if sum((as_csv, as_json, pdf is not None)) > 1:
        raise typer.BadParameter("give one of --csv, --json and --pdf")
    if as_csv or as_json or pdf is not None:
        form = (
            ResaleStatementFormat.CSV
            if as_csv
            else ResaleStatementFormat.JSON
            if as_json
            else ResaleStatementFormat.PDF
        )
        content = client.export_resale_statement(end_user, month, form, organization=owner)
        if pdf is None:
            put(None, [content])
        else:
            write_content(pdf, content)
        return None
    found = client.get_resale_statement(end_user, month, organization=owner)
    drawn = LINES.drawn(found.lines)
    remarks = [CLOSED_ONLY] if found.state == "open" else []
    return found, STATEMENTS.drawn([found]), drawn, *remarks
