"""`weir plan`, `weir credit` and `weir price`: plans and assignments, credit, prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_cli.configuration import content_of, print_errors
from weir_cli.connection import OnlyOrganizationOption, Output, admin_client, calls
from weir_cli.render import JsonOption, csv_of, put, table
from weir_cli.terms import TERMS, options_of, values_of
from weir_cli.texts import (
    amount_text,
    decimal_text,
    parse_picos,
    parsed,
    per_million,
    time_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import (
        AdminClient,
        AppliedPrice,
        CreditGrant,
        Plan,
        PriceVersion,
        SimulatedCustomer,
    )

plan = typer.Typer(help="Create and assign plans.", no_args_is_help=True)

credit = typer.Typer(help="Grant credit, and show balances.", no_args_is_help=True)

OrganizationArgument = Annotated[str, typer.Argument(help="Organization, by name or id.")]

TIME_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]
KINDS = tuple(each.key.replace("_", " ") for each in TERMS["price"] if each.kind == "price")
TITLE = "prices per million tokens"
TIMEOUT_S = 300.0  # a month of millions of events is rated in one statement
CSV_COLUMNS: Mapping[str, Callable[[SimulatedCustomer], object]] = {
    "organization_name": lambda each: each.organization_name,
    "organization_id": lambda each: each.organization_id,
    "currency_code": lambda each: each.old_amount.currency_code,
    "token_count": lambda each: each.token_count,
    "old_amount": lambda each: f"{each.old_amount.amount:f}",
    "new_amount": lambda each: f"{each.new_amount.amount:f}",
    "difference": lambda each: f"{each.difference.amount:f}",
    "old_plan": lambda each: each.old_plan,
    "new_plan": lambda each: each.new_plan,
}


@plan.command("create")
@calls(admin_client)
def create_plans(
    client: AdminClient,
    file: Annotated[
        Path, typer.Argument(help="YAML with `plans:`; - for stdin. See docs/how-to/prices.md.")
    ],
) -> Output:
    """Create the plans of a file, or their next versions. Customers keep their version."""
    proposal = read_proposal(file)
    if proposal.get("prices"):
        raise typer.BadParameter("`prices:` are set by `weir apply`", param_hint="FILE")
    made = [client.create_plan(each) for each in proposal.get("plans", [])]
    remarks = (
        f"plan {each.name} version {each.version}{' is unchanged' if each.existed else ' created'}"
        for each in made
    )
    return made, *remarks


@plan.command("list")
@calls(admin_client)
def list_plans(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="Only this plan.")] = "",
    organization: Annotated[
        str, typer.Option("--org", help="Only assignments of this organization.")
    ] = "",
) -> Output:
    """List plans and their assignments."""
    found = client.list_plans(name, organization=organization)
    if not found.plans:
        return found, "no plans: create one with `weir plan create FILE`"
    rows = (
        (each.organization_name, each.first_month, each.plan or "none", str(each.version or "—"))
        for each in found.assignments
    )
    assignments = table("organization", "from", "plan", "version", right=("version",), rows=rows)
    return found, plans_table(found.plans), assignments


@plan.command("assign")
@calls(admin_client)
def assign_plan(
    client: AdminClient,
    organization: Annotated[str, typer.Argument(help="Organization, by name or id.")],
    name: Annotated[str, typer.Argument(help="The plan; omit it to end the current one.")] = "",
    first_month: Annotated[
        str, typer.Option("--from", help="First month, as YYYY-MM. Default: this one.")
    ] = "",
    version: Annotated[
        int, typer.Option(min=0, help="Version of the plan. Default: the latest.")
    ] = 0,
) -> Output:
    """Assign a plan to an organization from a month on. Earlier months stay unchanged."""
    assigned = client.assign_plan(organization, name, version=version, first_month=first_month)
    which = f"the plan {assigned.plan} version {assigned.version}" if assigned.plan else "no plan"
    already = " already" if assigned.existed else ""
    return (
        assigned,
        f"{assigned.organization_name} has{already} {which} from {assigned.first_month} on",
    )


def plans_table(plans: tuple[Plan, ...]) -> RenderableType:
    made = table(
        "plan",
        "version",
        "currency",
        "allowances",
        "tiered prices",
        "commitment",
        right=("version", "commitment"),
    )
    for each in plans:
        rules = each.configuration
        commitment = int(rules.get("commitment_picos", 0)) / 10**12
        allowances = (
            f"{int(rule['token_count']):,} {about(rule)}" for rule in rules.get("allowances", [])
        )
        prices = (
            f"{rule['kind']} {about(rule)}, {len(rule['steps'])} steps"
            for rule in rules.get("tiered_prices", [])
        )
        cells = (
            str(rules.get("currency_code", "")),
            "; ".join(allowances) or "—",
            "; ".join(prices) or "—",
        )
        made.add_row(
            each.name, str(each.version), *cells, f"{commitment:,.2f}" if commitment else "—"
        )
    return made


def about(rule: Mapping[str, Any]) -> str:
    selector = rule.get("selector", {})
    tier = str(selector.get("tier", "")).removeprefix("SERVICE_TIER_").lower()
    return " ".join(
        part
        for part in (selector.get("model") or "all", selector.get("token_kind", ""), tier)
        if part
    )


def read_proposal(file: Path) -> dict[str, Any]:
    """Read the plans and prices of a file. On errors, prints all of them by line and exits."""
    from weir_cli.document import PROPOSAL, read_document

    document = read_document(content_of(file), prune=False, section=PROPOSAL)
    if document.errors:
        print_errors(file, document.errors)
    return document.configuration


@credit.command("grant")
@calls(admin_client)
def grant_credit(
    client: AdminClient,
    organization: OrganizationArgument,
    amount: Annotated[
        str, typer.Argument(help="In units of the organization's currency, such as 500.00.")
    ],
    last_month: Annotated[
        str,
        typer.Option(
            "--until", help="Last month that it covers, as YYYY-MM; then the rest expires."
        ),
    ],
    reason: Annotated[
        str, typer.Option("--reason", help="Reason, recorded in the ledger and the audit log.")
    ],
    first_month: Annotated[
        str, typer.Option("--from", help="First month that it covers. Default: this one.")
    ] = "",
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id", help="A UUID: repeating the command with it grants nothing more."
        ),
    ] = "",
) -> Output:
    """Grant an organization credit for the charges of some months.

    At most 1,000,000 units at once. For a prepaid organization, total usage and credit are limited
    to 9,223,372 units together; the error has the amount that can still be granted.
    """
    picos = parsed("AMOUNT", parse_picos, amount)
    granted = client.grant_credit(
        organization,
        picos,
        last_month=last_month,
        reason=reason,
        first_month=first_month,
        request_id=request_id or None,
    )
    return granted, grants_table([granted])


@credit.command("list")
@calls(admin_client)
def list_grants(
    client: AdminClient,
    organization: OnlyOrganizationOption = "",
) -> Output:
    """List credit grants; spent and remaining amounts count closed months only."""
    found = client.list_credit_grants(organization)
    return found, grants_table(found) if found else "no credit grants"


@credit.command("balance")
@calls(admin_client)
def show_balance(client: AdminClient, organization: OrganizationArgument) -> Output:
    """Show an organization's current credit."""
    found = client.get_credit_balance(organization)
    numbers = ("remaining", "unbilled", "held", "available")
    row = (
        found.organization_name,
        "yes" if found.prepaid else "no",
        found.remaining,
        found.unbilled,
        found.held,
        found.available,
    )
    return found, table("organization", "prepaid only", *numbers, right=numbers, rows=[row])


@credit.command("prepaid")
@calls(admin_client)
def set_prepaid(
    client: AdminClient,
    organization: OrganizationArgument,
    only: Annotated[
        bool,
        typer.Option(
            "--only/--off", help="Admit requests only within the credit, or switch that off."
        ),
    ],
    alert_remaining: Annotated[
        str | None,
        typer.Option(
            help=(
                "Alert at these remainders, such as 100.00,20.00; or none. Default: unchanged, at"
                " first none."
            )
        ),
    ] = None,
) -> Output:
    """Switch an organization to prepaid, limited to its credit, or back."""
    parts = [] if alert_remaining in (None, "none") else (alert_remaining or "").split(",")
    lefts = [parsed("--alert-remaining", parse_picos, part.strip()) for part in parts]
    existed = client.set_prepaid(
        organization, only, alert_at=None if alert_remaining is None else lefts
    )
    message = (
        f"{organization} is{' already' if existed else ''}"
        f" {'limited to its credit' if only else 'not limited to its credit'}"
    )
    return {"organization": organization, "prepaid": only, "existed": existed}, message


def grants_table(grants: Iterable[CreditGrant]) -> RenderableType:
    numbers = ("granted", "spent", "expired", "remaining")
    made = table("organization", *numbers, "from", "until", "reason", "id", right=numbers)
    for each in grants:
        amounts = each.amount, each.spent, each.expired, each.remaining
        made.add_row(
            each.organization_name,
            *amounts,
            each.first_month,
            each.last_month,
            each.reason,
            each.grant_id,
        )
    return made


price = typer.Typer(
    help="Set, list and simulate prices: list prices and customers' own.", no_args_is_help=True
)

ModelArgument = Annotated[str, typer.Argument(help="Model; it need not exist yet.")]
SinceOption = Annotated[
    datetime | None, typer.Option(help="Start, in UTC. Default: now.", formats=TIME_FORMATS)
]


@price.command("set")
@calls(admin_client, options=options_of(TERMS["price"]))
def set_price(
    client: AdminClient,
    model: ModelArgument,
    organization: Annotated[
        str,
        typer.Option(
            "--org", "--organization", help="Set this organization's own price, by name or id."
        ),
    ] = "",
    currency: Annotated[
        str, typer.Option(help="ISO 4217 code. Default: the organization's; USD for list prices.")
    ] = "",
    effective_time: SinceOption = None,
    **terms: Any,
) -> Output:
    """Set a new price version per service tier. Requests pay the price at their admission."""
    given = values_of(TERMS["price"], terms)
    given.setdefault("cached_input_picos_per_token", given["input_picos_per_token"])
    versions = client.set_price(
        model,
        **given,
        organization=organization,
        currency_code=currency,
        effective_time=_utc(effective_time),
    )
    remarks = []
    for each in versions:
        suffix = f" for {each.organization_name}" if each.organization_name else ""
        kinds = kinds_of(versions)
        amounts = ", ".join(
            f"{kind} {rate}" for kind, rate in zip(kinds, rates(each, kinds), strict=True)
        )
        since = time_text(each.effective_time, "now")
        what = f"price version {each.version} of {each.model}{suffix}, {each.tier}, from {since} on"
        remarks.append(f"{what}, in {each.currency_code} per million tokens: {amounts}")
    return versions, *remarks


@price.command("withdraw")
@calls(admin_client)
def withdraw_price(
    client: AdminClient,
    model: ModelArgument,
    organization: Annotated[
        str, typer.Option("--org", "--organization", help="Organization, by name or id.")
    ],
    effective_time: SinceOption = None,
) -> Output:
    """End a customer's own price; the list price applies from then on."""
    versions = client.withdraw_price(organization, model, effective_time=_utc(effective_time))
    since = time_text(versions[0].effective_time, "now")
    return versions, f"{organization} pays the list price of {model} from {since} on"


@price.command("list")
@calls(admin_client)
def list_prices(
    client: AdminClient,
    organization: Annotated[
        str,
        typer.Option(
            "--org",
            "--organization",
            help="Prices of this organization, by name or id. Default: list prices.",
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Only this model.")] = "",
    currency: Annotated[str, typer.Option(help="Only in this currency.")] = "",
    at: Annotated[
        datetime | None,
        typer.Option("--at", help="At this time, in UTC. Default: now.", formats=TIME_FORMATS),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="All past and future versions.")
    ] = False,
) -> Output:
    """List prices by model and tier, with source and start."""
    found = client.list_prices(
        organization, model=model, currency_code=currency, time=_utc(at), history=history
    )
    if history and found.versions:
        return found, versions_table(found.versions)
    return found, (
        applied_table(found.prices)
        if found.prices
        else "no price is in force: set one with `weir price set`"
    )


def applied_table(prices: Sequence[AppliedPrice]) -> RenderableType:
    kinds = kinds_of([each.version for each in prices])
    made = table(
        "model",
        "tier",
        *kinds,
        "currency",
        "from",
        "since",
        "version",
        right=(*kinds, "version"),
        title=TITLE,
    )
    for each in prices:
        version = each.version
        source = version.organization_name if each.source == "organization" else "list"
        source += "" if version.tier == each.tier else f" ({version.tier})"
        cells = version.currency_code, source, version.effective_time, str(version.version)
        made.add_row(each.model, each.tier, *rates(version, kinds), *cells)
    return made


def versions_table(versions: Sequence[PriceVersion]) -> RenderableType:
    kinds = kinds_of(versions)
    made = table(
        "version",
        "model",
        "of",
        "tier",
        "times",
        *kinds,
        "currency",
        "since",
        right=("version", *kinds),
        title=TITLE,
    )
    for each in versions:
        times, shown = (
            (f"{each.multiplier_milli / 1000:g}", rates(each, kinds))
            if not each.withdrawn
            else ("ends", ["—"] * len(kinds))
        )
        what = str(each.version), each.model, each.organization_name or "list", each.tier, times
        made.add_row(*what, *shown, each.currency_code, time_text(each.effective_time))
    return made


def kinds_of(versions: Iterable[PriceVersion]) -> tuple[str, ...]:
    """Choose the kinds of token to show; reasoning only if it costs more or less than output."""
    has_own = any(
        each.reasoning_picos_per_token != each.output_picos_per_token for each in versions
    )
    return tuple(kind for kind in KINDS if has_own or kind != "reasoning")


def rates(version: PriceVersion, kinds: Iterable[str]) -> list[str]:
    """Format the prices of these kinds of token."""
    picos = (getattr(version, f"{kind.replace(' ', '_')}_picos_per_token") for kind in kinds)
    return [decimal_text(per_million(each)) for each in picos]


def _utc(time: datetime | None) -> datetime | None:
    return time.replace(tzinfo=UTC) if time else None


@price.command("simulate")
@calls(admin_client, timeout=TIMEOUT_S)
def simulate(
    client: AdminClient,
    month: Annotated[str, typer.Argument(help="The month, as YYYY-MM, UTC.")],
    file: Annotated[
        Path,
        typer.Option(
            "--prices", help="YAML with `prices:` as for `weir apply`, and `plans:`; - for stdin."
        ),
    ],
    organization: Annotated[
        str, typer.Option("--org", "--organization", help="Only this organization, by name or id.")
    ] = "",
    as_csv: Annotated[
        bool, typer.Option("--csv", help="CSV with exact amounts on stdout.")
    ] = False,
    as_json: JsonOption = False,
) -> Output | None:
    """Rate a past month's usage with proposed prices and plans. Changes nothing.

    Amounts are usage and plan; adjustments, credit and rounding are left out on both sides.
    """
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    found = client.simulate_prices(month, read_proposal(file), organization=organization)
    if as_csv:
        put(None, [csv_of(found, CSV_COLUMNS, line_end="\r\n")])
        return None
    return found, simulated_table(found) if found else f"no usage in {month}"


def simulated_table(customers: list[SimulatedCustomer]) -> RenderableType:
    """Build a table of actual and simulated amounts, one row per customer."""
    numbers = ("tokens", "paid", "would pay", "difference", "%")
    made = table("organization", *numbers, "plan", right=numbers)
    for each in customers:
        share = (
            f"{100 * each.difference.picos / each.old_amount.picos:+.1f}"
            if each.old_amount.picos
            else "—"
        )
        plan = each.new_plan or "none"
        amounts = (
            each.old_amount,
            amount_text(each.new_amount),
            amount_text(each.difference),
        )
        plan = plan if each.new_plan == each.old_plan else f"{each.old_plan or 'none'} → {plan}"
        made.add_row(each.organization_name, each.token_count, *amounts, share, plan)
    return made
