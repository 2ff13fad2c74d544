"""`weir reconcile`: a month from its usage to the biller's invoice, and every place where two stages differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import attrgetter
from typing import Annotated

import typer
from rich.markup import escape

from api.cli.render import JsonOption, csv_of, duration_text, make_console, note, print_json, show, table
from api.cli.stack import HomeOption, run
from metering.core.models import TokenKind
from metering.core.money import exact_text
from metering.export.export_settings import Destination, ExportSettings, export_settings
from metering.export.exporting import Stream, counted
from metering.export.reconciliation import (
    Difference,
    MonthReconciliation,
    OurMonth,
    conclude,
    differences_here,
    our_month,
    stripe_counts,
)
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization

CSV_COLUMNS = (
    "stage",
    "organization",
    "model",
    "price_version",
    "token_kind",
    "token_count",
    "amount",
    "currency_code",
    "since",
    "detail",
    "remedy",
)


def reconcile(
    month: Annotated[str, typer.Argument(help="The month in UTC, as YYYY-MM.")],
    organization: Annotated[str | None, typer.Option("--organization", "--org", help="Only this one, by name or id.")] = None,
    against_stripe: Annotated[
        bool, typer.Option("--against-stripe", help="Ask Stripe what it counts; takes a call per meter.")
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the differences as CSV.")] = False,
    home: HomeOption = None,
) -> None:
    """Compare usage, ledger, our invoices, exported batches, the biller's own count and its invoices. Changes nothing.

    Where WEIR_EXPORT is file, the biller's count is the file's. Exit code 1 on any difference.
    """
    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both", param_hint="--csv")
    found = run(home, lambda sessions: reconciled(sessions, month, organization, against_stripe=against_stripe))
    now = datetime.now(UTC)
    if as_json:
        print_json(document(found))
    elif as_csv:
        typer.echo(sheet(found.differences), nl=False)
    else:
        tell(found, now)
    if not found.balanced:
        raise typer.Exit(1)


async def reconciled(sessions: Sessions, month: str, organization: str | None, *, against_stripe: bool) -> MonthReconciliation:
    """Every stage of the month, from one snapshot of ours. Raises: MeteringError."""
    settings = export_settings(os.environ)
    destination = Destination.STRIPE if against_stripe else settings.destination
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        chosen = None if organization is None else (await find_organization(session, organization)).id
        ours = await our_month(session, month, () if chosen is None else (chosen,))
        if destination is Destination.OFF:
            return conclude(month, ours)
        here = await differences_here(session, ours, chosen)
    counts = await biller_counts(sessions, settings, ours, against_stripe=against_stripe)
    return conclude(month, ours, here, counts, destination.value)


async def biller_counts(
    sessions: Sessions, settings: ExportSettings, ours: OurMonth, *, against_stripe: bool
) -> Sequence[int] | None:
    """What the biller counts of each sum; None where it is not asked. Raises: StripeFailed, InvalidValue."""
    if against_stripe:
        # Imported here: it takes a second, and only those who ask Stripe have to wait for it.
        from metering.export.export_settings import stripe_settings
        from metering.export.stripe_gateway import StripeGateway

        return await stripe_counts(sessions, StripeGateway(settings.stripe or stripe_settings(os.environ)), ours)
    if settings.destination is Destination.FILE:
        totals = counted(settings.file, ours.begins, ours.until)
        return [totals[Stream(each.organization_id, each.price_version, TokenKind(each.token_kind))] for each in ours.sums]
    return None


def tell(found: MonthReconciliation, now: datetime) -> None:
    """The sums of each stage, then what differs, how old it is and what to do."""
    counted = ("used", "posted", "invoiced", "due", "batched", "delivered")
    heads = ("organization", "model", "tier", "price version", "tokens", *counted, "biller")
    made = table(*heads, right=heads[5:], title=f"{found.month}, hours until {found.ours.until:%Y-%m-%d %H:%M} UTC are due")
    counts = found.counted or [None] * len(found.ours.sums)
    for each, count in zip(found.ours.sums, counts, strict=True):
        numbers = (getattr(each, name) for name in counted)
        told = "not asked" if count is None else count
        made.add_row(each.organization, each.model, each.tier, str(each.price_version), each.token_kind, *numbers, told)
    show(made)
    console = make_console()
    for difference in found.differences:
        console.print(f"[red]{difference.stage}[/red]  {escape(headline(difference, now))}", soft_wrap=True)
        console.print(f"    [dim]what to do:[/dim] {escape(difference.remedy)}", soft_wrap=True)
    if not found.biller:
        note("nothing is exported (WEIR_EXPORT is off): the ledger is the last stage that was compared")
    count = len(found.differences)
    differing = f"{count:,} {'difference' if count == 1 else 'differences'} between the stages"
    note("every stage says the same" if found.balanced else differing)


def headline(difference: Difference, now: datetime) -> str:
    where = [difference.organization, difference.model]
    if difference.price_version is not None:
        where.append(f"version {difference.price_version} {difference.token_kind}")
    what = f"{difference.token_count:,} tokens" if difference.token_count else ""
    if difference.amount_picos:
        amount = f"{exact_text(difference.amount_picos, difference.currency_code)} {difference.currency_code}"
        what = f"{what}, {amount}" if what else amount
    age = f", for {duration_text((now - difference.since).total_seconds())}" if difference.since else ""
    return f"{' '.join(filter(None, where))}: {what}{age}: {difference.detail}"


def document(found: MonthReconciliation) -> dict[str, object]:
    """For `--json`."""
    counts = found.counted or [None] * len(found.ours.sums)
    sums = [asdict(each) | {"biller": count} for each, count in zip(found.ours.sums, counts, strict=True)]
    told = {"month": found.month, "until": found.ours.until, "balanced": found.balanced}
    return told | {"sums": sums, "differences": found.differences}


def sheet(differences: Sequence[Difference]) -> str:
    """For `--csv`, RFC 4180 with a header."""
    columns: dict[str, Callable[[Difference], object]] = {name: attrgetter(name) for name in CSV_COLUMNS}
    columns["amount"] = lambda each: exact_text(each.amount_picos, each.currency_code) if each.currency_code else ""
    columns["since"] = lambda each: each.since.astimezone(UTC).isoformat() if each.since else ""
    return csv_of(differences, columns, line_end="\r\n")
