"""`weir plan`, `weir credit` and `weir price`: plans and assignments, credit, prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_cli.configuration import content_of, print_errors
from weir_cli.connection import OnlyOrganizationOption, Output, admin_client, calls
from weir_cli.render import JsonOption, Table, csv_of, put
from weir_cli.terms import TERMS, options_of, values_of
from weir_cli.texts import (
    allowances_text,
    amount_text,
    applied_rate,
    commitment_text,
    minute_text,
    parse_picos,
    parsed,
    price_source,
    prices_reasoning,
    rate,
    tiered_prices_text,
    time_text,
    version_rate,
)

if TYPE_CHECKING:
    from weir_client import (
        AdminClient,
        AppliedPrice,
        CreditBalance,
        CreditGrant,
        Organization,
        Plan,
        PlanAssignment,
        PriceVersion,
        SimulatedCustomer,
        SimulatedModel,
    )

plan = typer.Typer(help="Create and assign plans.", no_args_is_help=True)

credit = typer.Typer(help="Grant credit, and show balances.", no_args_is_help=True)

OrganizationArgument = Annotated[str, typer.Argument(help="Organization, by name or id.")]

TIME_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]
KINDS = tuple(each.key.replace("_", " ") for each in TERMS["price"] if each.kind == "price")
TITLE = "prices per million tokens"
HEADS = {kind: kind.removesuffix(" input") for kind in KINDS}  # of columns
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


PLANS: Table[Plan] = Table(
    {
        "plan": "name",
        "version": lambda each: str(each.version),
        "currency": lambda each: str(each.configuration.get("currency_code", "")),
        "allowances": allowances_text,
        "tiered prices": tiered_prices_text,
        "commitment": commitment_text,
    },
    right=("version", "commitment"),
    empty="no plans: create one with `weir plan create FILE`",
    drop=("currency", "tiered prices", "allowances"),
)
ASSIGNMENTS: Table[PlanAssignment] = Table(
    {
        "organization": "organization_name",
        "from": "first_month",
        "plan": lambda each: each.plan or "none",
        "version": lambda each: str(each.version) if each.version else None,
    },
    right=("version",),
)
GRANTS: Table[CreditGrant] = Table(
    {
        "organization": "organization_name",
        "granted": "amount",
        "spent": "spent",
        "expired": "expired",
        "refunded": "refunded",
        "remaining": "remaining",
        "from": "first_month",
        "until": "last_month",
        "reason": "reason",
        "id": "grant_id",
    },
    right=("granted", "spent", "expired", "refunded", "remaining"),
    empty="no credit grants",
    drop=("id", "refunded", "expired", "from", "spent", "granted"),
)
BALANCES: Table[CreditBalance] = Table(
    {
        "organization": "organization_name",
        "prepaid only": lambda each: "yes" if each.prepaid else "no",
        "remaining": "remaining",
        "unbilled": "unbilled",
        "held": "held",
        "available": "available",
    },
    right=("remaining", "unbilled", "held", "available"),
    drop=("held", "unbilled", "remaining", "prepaid only"),
)
PRICES: Table[AppliedPrice] = Table(
    {
        "model": "model",
        "tier": "tier",
        **{HEADS[kind]: partial(applied_rate, kind) for kind in KINDS},
        "currency": lambda each: each.version.currency_code,
        "from": price_source,
        "as tier": lambda each: each.version.tier,
        "since (UTC)": lambda each: minute_text(each.version.effective_time),
        "version": lambda each: str(each.version.version),
    },
    right=(*HEADS.values(), "version"),
    empty="no price is in force: set one with `weir price set`",
    optional={
        "reasoning": lambda each: prices_reasoning(each.version),
        "as tier": lambda each: each.version.tier != each.tier,
    },
    title=TITLE,
    drop=("version", "as tier", "since (UTC)", "from"),
    unit="currency",
)
VERSIONS: Table[PriceVersion] = Table(
    {
        "version": lambda each: str(each.version),
        "model": "model",
        "of": lambda each: each.organization_name or "list",
        "tier": "tier",
        "times": lambda each: "ends" if each.withdrawn else f"{each.multiplier_milli / 1000:g}",
        **{HEADS[kind]: partial(version_rate, kind) for kind in KINDS},
        "currency": "currency_code",
        "since (UTC)": lambda each: minute_text(each.effective_time),
    },
    right=("version", *HEADS.values()),
    optional={"reasoning": prices_reasoning},
    title=TITLE,
    drop=("times", "tier", "cached", "of", "embedding"),
    unit="currency",
)
AMOUNTS: dict[str, str | Callable[[Any], str | None]] = {
    "tokens": "token_count",
    "paid": "old_amount",
    "would pay": lambda each: amount_text(each.new_amount),
    "difference": lambda each: amount_text(each.difference),
    "%": lambda each: (
        f"{100 * each.difference.picos / each.old_amount.picos:+.1f}"
        if each.old_amount.picos
        else None
    ),
}
SIMULATED: Table[SimulatedCustomer] = Table(
    {
        "organization": "organization_name",
        **AMOUNTS,
        "plan": lambda each: (
            each.new_plan or "none"
            if each.new_plan == each.old_plan
            else f"{each.old_plan or 'none'} → {each.new_plan or 'none'}"
        ),
    },
    right=tuple(AMOUNTS),
    drop=("plan", "tokens", "%"),
)
SIMULATED_MODELS: Table[SimulatedModel] = Table(
    {"model": lambda each: each.model or "lines of all models", **AMOUNTS},
    right=tuple(AMOUNTS),
    drop=("tokens", "%"),
)


@plan.command("create")
@calls(admin_client)
def create_plans(
    client: AdminClient,
    file: Annotated[
        Path, typer.Argument(help="YAML with `plans:`; - for stdin. See docs/how-to/prices.md.")
    ],
) -> Output:
    """Create the plans of a file, or their next versions. Customers keep the version they have."""
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
        return found, PLANS.empty
    return found, PLANS.drawn(found.plans), ASSIGNMENTS.drawn(found.assignments)


@plan.command("assign")
@calls(admin_client)
def assign_plan(
    client: AdminClient,
    organization: Annotated[str, typer.Argument(help="Organization, by name or id.")],
    name: Annotated[
        str, typer.Argument(help="The plan. Leave it out to end the current one.")
    ] = "",
    first_month: Annotated[
        str, typer.Option("--from", help="First month, such as 2026-12. Default: this month.")
    ] = "",
    version: Annotated[
        int, typer.Option(min=0, help="Version of the plan. Default: the latest.")
    ] = 0,
) -> Output:
    """Give an organization a plan from a month on. Earlier months stay as they are."""
    assigned = client.assign_plan(organization, name, version=version, first_month=first_month)
    which = f"the plan {assigned.plan} version {assigned.version}" if assigned.plan else "no plan"
    already = " already" if assigned.existed else ""
    return (
        assigned,
        f"{assigned.organization_name} has{already} {which} from {assigned.first_month} on",
    )


def read_proposal(file: Path) -> dict[str, Any]:
    """Read the plans and prices of a file. On errors, prints all of them by line and exits."""
    from weir_cli.document import PROPOSAL, read_document

    document = read_document(content_of(file), prune=False, section=PROPOSAL)
    if document.errors:
        print_errors(file, document.errors)
    return document.configuration


@credit.command("grant")
@calls(admin_client, shown=GRANTS)
def grant_credit(
    client: AdminClient,
    organization: OrganizationArgument,
    amount: Annotated[
        str, typer.Argument(help="Amount in the organization's currency, such as 500.00.")
    ],
    last_month: Annotated[
        str,
        typer.Option(
            "--until", help="Last month that it pays for, such as 2026-12. Then the rest expires."
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", help="Why, for the ledger and the audit log.")],
    first_month: Annotated[
        str, typer.Option("--from", help="First month that it pays for. Default: this month.")
    ] = "",
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            help="A UUID. If you repeat the command with it, nothing more is granted.",
        ),
    ] = "",
) -> CreditGrant:
    """Give an organization credit that pays for its next bills.

    You can grant up to 1,000,000 units at once. A prepaid organization can have 9,223,372 units in
    all, used ones included; the error says how much you can still grant.
    """
    picos = parsed("AMOUNT", parse_picos, amount)
    return client.grant_credit(
        organization,
        picos,
        last_month=last_month,
        reason=reason,
        first_month=first_month,
        request_id=request_id or None,
    )


@credit.command("list")
@calls(admin_client, shown=GRANTS)
def list_grants(
    client: AdminClient, organization: OnlyOrganizationOption = ""
) -> list[CreditGrant]:
    """List grants of credit. Spent and remaining amounts count closed months only."""
    return list(client.list_credit_grants(organization))


@credit.command("balance")
@calls(admin_client, shown=BALANCES)
def show_balance(client: AdminClient, organization: OrganizationArgument) -> CreditBalance:
    """Show how much credit an organization has now."""
    return client.get_credit_balance(organization)


@credit.command("prepaid")
@calls(admin_client)
def set_prepaid(
    client: AdminClient,
    organization: OrganizationArgument,
    only: Annotated[
        bool,
        typer.Option(
            "--only/--off", help="Refuse requests beyond the credit, or bill them as usual."
        ),
    ],
    alert_remaining: Annotated[
        str | None,
        typer.Option(
            help=("Alert when less than these amounts is left, such as 100.00,20.00; or `none`.")
        ),
    ] = None,
) -> Output:
    """Let an organization use no more than its credit, or switch back."""
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


price = typer.Typer(
    help="Set and list prices, for all or for one customer, and try new ones.", no_args_is_help=True
)

ModelArgument = Annotated[str, typer.Argument(help="Model. You may price it before you serve it.")]
SinceOption = Annotated[
    datetime | None,
    typer.Option(help="When it begins, in UTC. Default: now.", formats=TIME_FORMATS),
]


@price.command("set")
@calls(admin_client, options=options_of(TERMS["price"]))
def set_price(
    client: AdminClient,
    model: ModelArgument,
    organization: Annotated[
        str,
        typer.Option(
            "--org",
            "--organization",
            help="Set the price of this organization only, by name or id.",
        ),
    ] = "",
    currency: Annotated[
        str, typer.Option(help="Such as EUR. Default: the organization's; USD for list prices.")
    ] = "",
    effective_time: SinceOption = None,
    **terms: Any,
) -> Output:
    """Set the price of a model. A request pays the price in force when it starts."""
    given = values_of(TERMS["price"], terms)
    given.setdefault("cached_input_picos_per_token", given["input_picos_per_token"])
    versions = client.set_price(
        model,
        **given,
        organization=organization,
        currency_code=currency,
        effective_time=utc(effective_time),
    )
    kinds = [kind for kind in KINDS if kind != "reasoning" or any(map(prices_reasoning, versions))]
    remarks = []
    for each in versions:
        suffix = f" for {each.organization_name}" if each.organization_name else ""
        amounts = ", ".join(f"{kind} {rate(kind, each)}" for kind in kinds)
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
    """End the price of one customer, who pays the list price from then on."""
    versions = client.withdraw_price(organization, model, effective_time=utc(effective_time))
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
            help="Prices that this organization pays, by name or id. Default: list prices.",
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Only this model.")] = "",
    currency: Annotated[str, typer.Option(help="Only in this currency.")] = "",
    at: Annotated[
        datetime | None,
        typer.Option(
            "--at", help="Prices at this time, in UTC. Default: now.", formats=TIME_FORMATS
        ),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show past and future prices too.")
    ] = False,
) -> Output:
    """List the price of each model and tier, where it comes from, and since when it applies."""
    found = client.list_prices(
        organization, model=model, currency_code=currency, time=utc(at), history=history
    )
    if history and found.versions:
        return found, VERSIONS.drawn(found.versions)
    if organization and not currency and not found.prices:
        known = client.list_organizations(organization=organization)
        owners = (each for each in known if organization in names_of(each))
        currency = next((each.currency_code for each in owners), "")
    if found.prices or not currency:
        return found, PRICES.of(found.prices)
    code = currency.upper()
    return found, (
        f"no price in {code} is in force: set one with `weir price set MODEL --currency {code}`"
    )


def names_of(organization: Organization) -> tuple[str, str]:
    return organization.name, organization.organization_id


def utc(time: datetime | None) -> datetime | None:
    """Take the time of an option as UTC."""
    return time.replace(tzinfo=UTC) if time else None


@price.command("simulate")
@calls(admin_client, timeout=TIMEOUT_S)
def simulate(
    client: AdminClient,
    month: Annotated[str, typer.Argument(help="Month in UTC, such as 2026-11.")],
    file: Annotated[
        Path,
        typer.Option(
            "--prices", help="YAML with `prices:` as for `weir apply`, and `plans:`; - for stdin."
        ),
    ],
    organization: Annotated[
        str, typer.Option("--org", "--organization", help="Only this organization, by name or id.")
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with exact amounts.")] = False,
    as_json: JsonOption = False,
) -> Output | None:
    """Show what a past month would have cost with other prices or plans. Changes nothing.

    Both sides have usage and plan only, without adjustments, credit and rounding. With a single
    organization you also see its models; --json has those of all.
    """
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    found = client.simulate_prices(month, read_proposal(file), organization=organization)
    if as_csv:
        put(None, [csv_of(found, CSV_COLUMNS, line_end="\r\n")])
        return None
    if len(found) == 1:
        return found, SIMULATED.drawn(found), SIMULATED_MODELS.drawn(found[0].models)
    return found, SIMULATED.drawn(found) if found else f"no usage in {month}"
