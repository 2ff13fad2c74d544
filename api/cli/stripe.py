"""`weir stripe` and `weir reconcile`: billing with Stripe, and comparison of a month's stages.

They access the database directly, like the worker; the API server need not run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

import typer
from rich.markup import escape
from weir_cli.render import csv_of, fail, make_console, note, print_json, show, table
from weir_cli.texts import counted, duration_text

from api.cli.stack import run
from metering.core.errors import BillingDetailsMissing, InvalidValue
from metering.core.models import TokenKind
from metering.core.money import exact_text
from metering.export.export_settings import (
    Collection,
    Destination,
    ExportSettings,
    export_settings,
    stripe_settings,
)
from metering.export.exporting import Stream
from metering.export.exporting import counted as counted_in
from metering.export.invoice_payments import PaymentState
from metering.export.reconciliation import (
    Difference,
    MonthReconciliation,
    OurMonth,
    conclude,
    local_differences,
    our_month,
    stripe_counts,
)
from metering.export.stripe_gateway import StripeGateway
from metering.export.stripe_sync import ExportStatus, Sync
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization

PAYMENT_STATES = {
    PaymentState.FAILED: "failed",
    PaymentState.OVERDUE: "overdue",
    PaymentState.UNCOLLECTIBLE: "written off as uncollectible",
}

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


def synchronize(home: Path | None, *, dry_run: bool, as_json: bool) -> None:
    """Create and update the objects at Stripe, and print the changes."""

    async def synchronized(sessions: Sessions) -> Sync | BillingDetailsMissing:
        sync = Sync(sessions, gateway(), dry_run)
        try:
            await sync.run()
        except BillingDetailsMissing as missing:
            return missing
        return sync

    done = run(home, synchronized)
    if isinstance(done, BillingDetailsMissing):
        if as_json:
            print_json({"dry_run": dry_run, "created": [], "updated": [], "missing": done.missing})
        fail(str(done))
    if as_json:
        without = {"without_payment_method": done.without_payment_method}
        print_json(
            {"dry_run": dry_run, "created": done.created, "updated": done.updated, "missing": []}
            | without
        )
        return
    for each in done.created:
        typer.echo(f"{'would create' if dry_run else 'created'} {each}")
    for each in done.updated:
        typer.echo(f"{'would update' if dry_run else 'updated'} {each}")
    counts = (
        f"{len(done.created)} {'to create' if dry_run else 'created'}, {len(done.updated)}"
        f" {'to update' if dry_run else 'updated'}"
    )
    note(f"{counts}; the rest exists")
    for name in done.without_payment_method:
        note(without_payment_method_text(name))


def print_status(found: ExportStatus) -> None:
    """Print the status of the export: a table of batches, then what needs attention."""
    rows = [(each.state, each.batch_count, each.token_count) for each in found.states]
    if rows:
        show(table("state", "batches", "tokens", right=("batches", "tokens"), rows=rows))
    else:
        note("no usage was exported yet: WEIR_EXPORT=stripe turns the export on")
    if found.pause_reason:
        note(f"paused until {found.paused_until:%H:%M:%S} UTC: {found.pause_reason}")
    for name in found.changed_profiles:
        note(
            f"the billing profile of {name} has changed since the last sync: run `weir stripe sync`"
        )
    if charges_automatically():
        for name in found.without_payment_method:
            note(f"{without_payment_method_text(name)} (as of the last `weir stripe sync`)")
    for name in found.unknown_organizations:
        note(f"{name} has usage but does not exist at Stripe: run `weir stripe sync`")
    if found.unhandled_event_count:
        note(f"not processed yet: {counted(found.unhandled_event_count, 'Stripe event')}")
    for organization, month in found.unsettled_months:
        note(
            f"{month} of {organization} is closed; Stripe's invoices do not match ours yet: see"
            f" `weir reconcile {month}`"
        )
    for invoice in found.unpaid_invoices:
        amount = exact_text(
            invoice.amount_due_picos - invoice.amount_paid_picos, invoice.currency_code
        )
        where = f": {invoice.hosted_url}" if invoice.hosted_url else ""
        state = PAYMENT_STATES[invoice.state]
        typer.echo(
            f"{invoice.organization}  {invoice.month}  {amount} {invoice.currency_code}  payment"
            f" {state}{where}"
        )
    for batch in found.needing_attention:
        typer.echo(
            f"{batch.id}  {batch.state}  {batch.organization}  {batch.token_count:,}"
            f" {batch.token_kind}  {batch.last_error}"
        )


def without_payment_method_text(organization: str) -> str:
    """Format the remedy for an organization that Stripe cannot charge."""
    remedy = f"have the customer open the page that `weir stripe portal {organization}` prints"
    return (
        f"{organization} has no default payment method at Stripe, so its next invoice cannot be"
        f" charged: {remedy}"
    )


def charges_automatically() -> bool:
    """Return whether Stripe charges payment methods; False if its settings are invalid."""
    with contextlib.suppress(InvalidValue):
        return stripe_settings(os.environ).collection is Collection.CHARGE
    return False


def gateway() -> StripeGateway:
    return StripeGateway(stripe_settings(os.environ))


def compare(
    home: Path | None,
    month: str,
    organization: str | None,
    *,
    against_stripe: bool,
    as_json: bool,
    as_csv: bool,
) -> bool:
    """Compare the stages of a month and print them. Return whether all agree."""
    found = run(
        home,
        lambda sessions: reconciled(sessions, month, organization, against_stripe=against_stripe),
    )
    now = datetime.now(UTC)
    if as_json:
        print_json(document(found))
    elif as_csv:
        typer.echo(sheet(found.differences), nl=False)
    else:
        print_comparison(found, now)
    return found.balanced


async def reconciled(
    sessions: Sessions, month: str, organization: str | None, *, against_stripe: bool
) -> MonthReconciliation:
    """Read every stage of the month from one snapshot of the database. Raises: MeteringError."""
    settings = export_settings(os.environ)
    destination = Destination.STRIPE if against_stripe else settings.destination
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        chosen = (
            None if organization is None else (await find_organization(session, organization)).id
        )
        ours = await our_month(session, month, () if chosen is None else (chosen,))
        if destination is Destination.OFF:
            return conclude(month, ours)
        local = await local_differences(session, ours, chosen)
    counts = await biller_counts(sessions, settings, ours, against_stripe=against_stripe)
    return conclude(month, ours, local, counts, destination.value)


async def biller_counts(
    sessions: Sessions, settings: ExportSettings, ours: OurMonth, *, against_stripe: bool
) -> Sequence[int] | None:
    """Fetch the biller's count for each of our sums; None without one. Raises: StripeFailed."""
    if against_stripe:
        return await stripe_counts(
            sessions, StripeGateway(settings.stripe or stripe_settings(os.environ)), ours
        )
    if settings.destination is Destination.FILE:
        totals = counted_in(settings.file, ours.begins, ours.until)
        return [
            totals[Stream(each.organization_id, each.price_version, TokenKind(each.token_kind))]
            for each in ours.sums
        ]
    return None


def print_comparison(found: MonthReconciliation, now: datetime) -> None:
    """Print the sums of each stage, then the differences, each with its age and remedy."""
    stages = ("used", "posted", "invoiced", "due", "batched", "delivered")
    heads = ("organization", "model", "tier", "price version", "tokens", *stages, "biller")
    made = table(
        *heads,
        right=heads[5:],
        drop=("price version", "tier", "due", "batched", "model"),
        title=f"{found.month}, hours until {found.ours.until:%Y-%m-%d %H:%M} UTC are due",
    )
    counts = found.counted or [None] * len(found.ours.sums)
    for each, count in zip(found.ours.sums, counts, strict=True):
        numbers = (getattr(each, name) for name in stages)
        made.add_row(
            each.organization,
            each.model,
            each.tier,
            str(each.price_version),
            each.token_kind,
            *numbers,
            count,
        )
    show(made)
    console = make_console()
    for difference in found.differences:
        console.print(
            f"[red]{difference.stage}[/red]  {escape(headline(difference, now))}", soft_wrap=True
        )
        console.print(f"    [dim]remedy:[/dim] {escape(difference.remedy)}", soft_wrap=True)
    if not found.biller:
        note("nothing is exported (WEIR_EXPORT is off): the ledger is the last stage compared")
    differing = f"{counted(len(found.differences), 'difference')} between the stages"
    note("all stages agree" if found.balanced else differing)


def headline(difference: Difference, now: datetime) -> str:
    where = [difference.organization, difference.model]
    if difference.price_version is not None:
        where.append(f"version {difference.price_version} {difference.token_kind}")
    what = counted(difference.token_count, "token") if difference.token_count else ""
    if difference.amount_picos:
        amount = (
            f"{exact_text(difference.amount_picos, difference.currency_code)}"
            f" {difference.currency_code}"
        )
        what = f"{what}, {amount}" if what else amount
    age = (
        f", for {duration_text((now - difference.since).total_seconds())}"
        if difference.since
        else ""
    )
    return f"{' '.join(filter(None, where))}: {what}{age}: {difference.detail}"


def document(found: MonthReconciliation) -> dict[str, object]:
    """Convert the comparison for `--json`."""
    counts = found.counted or [None] * len(found.ours.sums)
    sums = [
        asdict(each) | {"biller": count}
        for each, count in zip(found.ours.sums, counts, strict=True)
    ]
    head = {"month": found.month, "until": found.ours.until, "balanced": found.balanced}
    return head | {"sums": sums, "differences": found.differences}


def sheet(differences: Sequence[Difference]) -> str:
    """Format the differences as CSV (RFC 4180) with a header."""
    columns: dict[str, Callable[[Difference], object]] = {
        name: attrgetter(name) for name in CSV_COLUMNS
    }
    columns["amount"] = lambda each: (
        exact_text(each.amount_picos, each.currency_code) if each.currency_code else ""
    )
    columns["since"] = lambda each: each.since.astimezone(UTC).isoformat() if each.since else ""
    return csv_of(differences, columns, line_end="\r\n")
