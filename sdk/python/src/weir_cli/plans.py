"""`weir plan`, `weir credit` and `weir price`: plans and who has which, credit and what is left of it, prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from weir_client import AdminClient, AppliedPrice, CreditGrant, Plan, PriceVersion, SimulatedCustomer

from weir_cli.configuration import PROPOSAL, content_of, read_document, tell_mistakes
from weir_cli.connection import OnlyOrganizationOption, Output, admin_client, calls
from weir_cli.render import (
    JsonOption,
    csv_of,
    decimal_text,
    parse_picos,
    parse_price,
    parse_thousandths,
    parsed,
    per_million,
    put,
    table,
    time_text,
)

plan = typer.Typer(help="Make plans, and say who has which.", no_args_is_help=True)

credit = typer.Typer(help="Grant credit, and see what is left of it.", no_args_is_help=True)

OrganizationArgument = Annotated[str, typer.Argument(help="Organization, by name or id.")]


@plan.command("create")
@calls(admin_client)
def create_plans(
    client: AdminClient,
    file: Annotated[Path, typer.Argument(help="YAML with `plans:`; - for stdin. See docs/how-to/prices.md.")],
) -> Output:
    """Make the plans of a file, or their next versions. What says the same already stays; customers keep their versions."""
    proposal = read_proposal(file)
    if proposal.get("prices"):
        raise typer.BadParameter("`prices:` are set by `weir apply`", param_hint="FILE")
    made = [client.create_plan(each) for each in proposal.get("plans", [])]
    told = (f"plan {each.name} version {each.version}{' says so already' if each.existed else ' is made'}" for each in made)
    return made, *told


@plan.command("list")
@calls(admin_client)
def list_plans(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="Only this plan.")] = "",
    organization: Annotated[str, typer.Option("--org", help="Only assignments of this organization.")] = "",
) -> Output:
    """List plans, and who has which."""
    found = client.list_plans(name, organization=organization)
    if not found.plans:
        return found, "there is no plan: `weir plan create FILE`"
    rows = ((each.organization_name, each.first_month, each.plan or "none", str(each.version or "—")) for each in found.assignments)
    assignments = table("organization", "from", "plan", "version", right=("version",), rows=rows)
    return found, plans_table(found.plans), assignments


@plan.command("assign")
@calls(admin_client)
def assign_plan(
    client: AdminClient,
    organization: Annotated[str, typer.Argument(help="Organization, by name or id.")],
    name: Annotated[str, typer.Argument(help="The plan; leave it out to end the present one.")] = "",
    first_month: Annotated[str, typer.Option("--from", help="The first month, as YYYY-MM. Default: this one.")] = "",
    version: Annotated[int, typer.Option(min=0, help="Version of the plan. Default: the latest.")] = 0,
) -> Output:
    """Give an organization a plan from a month on. Months before stay as they are."""
    assigned = client.assign_plan(organization, name, version=version, first_month=first_month)
    which = f"the plan {assigned.plan} version {assigned.version}" if assigned.plan else "no plan"
    already = " already" if assigned.existed else ""
    return assigned, f"{assigned.organization_name} has{already} {which} from {assigned.first_month} on"


def plans_table(plans: tuple[Plan, ...]) -> RenderableType:
    made = table("plan", "version", "currency", "allowances", "tiered prices", "commitment", right=("version", "commitment"))
    for each in plans:
        rules = each.configuration
        commitment = int(rules.get("commitment_picos", 0)) / 10**12
        allowances = (f"{int(rule['token_count']):,} {about(rule)}" for rule in rules.get("allowances", []))
        prices = (f"{rule['kind']} {about(rule)}, {len(rule['steps'])} steps" for rule in rules.get("tiered_prices", []))
        told = str(rules.get("currency_code", "")), "; ".join(allowances) or "—", "; ".join(prices) or "—"
        made.add_row(each.name, str(each.version), *told, f"{commitment:,.2f}" if commitment else "—")
    return made


def about(rule: Mapping[str, Any]) -> str:
    selector = rule.get("selector", {})
    tier = str(selector.get("tier", "")).removeprefix("SERVICE_TIER_").lower()
    return " ".join(part for part in (selector.get("model") or "all", selector.get("token_kind", ""), tier) if part)


def read_proposal(file: Path) -> dict[str, Any]:
    """Plans and prices of a file, as the contract has them. Ends the command with every mistake, by line."""
    document = read_document(content_of(file), prune=False, section=PROPOSAL)
    if document.mistakes:
        tell_mistakes(file, document.mistakes)
    return document.configuration


@credit.command("grant")
@calls(admin_client)
def grant_credit(
    client: AdminClient,
    organization: OrganizationArgument,
    amount: Annotated[str, typer.Argument(help="In units of the organization's currency, such as 500.00.")],
    last_month: Annotated[str, typer.Option("--until", help="The last month that it pays for, as YYYY-MM; then the rest expires.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it stands in the ledger and in the audit log.")],
    first_month: Annotated[str, typer.Option("--from", help="The first month that it pays for. Default: this one.")] = "",
    request_id: Annotated[
        str, typer.Option("--request-id", help="A UUID of your own: the same call with it again grants nothing more.")
    ] = "",
) -> Output:
    """Grant an organization credit for what is billed in some months.

    At most 1,000,000 units at once. For a prepaid organization, all that it ever uses and its credit are limited to
    9,223,372 units together: an error says how much more can be granted.
    """
    picos = parsed("AMOUNT", parse_picos, amount)
    granted = client.grant_credit(
        organization, picos, last_month=last_month, reason=reason, first_month=first_month, request_id=request_id or None
    )
    return granted, grants_table([granted])


@credit.command("list")
@calls(admin_client)
def list_grants(
    client: AdminClient,
    organization: OnlyOrganizationOption = "",
) -> Output:
    """List credit, spent and left by the months that are closed."""
    found = client.list_credit_grants(organization)
    return found, grants_table(found) if found else "no credit was granted"


@credit.command("balance")
@calls(admin_client)
def show_balance(client: AdminClient, organization: OrganizationArgument) -> Output:
    """Tell what there is of an organization's credit at this moment."""
    found = client.get_credit_balance(organization)
    numbers = ("left", "unbilled", "held", "available")
    row = found.organization_name, "yes" if found.prepaid else "no", found.left, found.unbilled, found.held, found.available
    return found, table("organization", "prepaid only", *numbers, right=numbers, rows=[row])


@credit.command("prepaid")
@calls(admin_client)
def set_prepaid(
    client: AdminClient,
    organization: OrganizationArgument,
    only: Annotated[bool, typer.Option("--only/--off", help="Let requests in only as far as credit reaches, or end that.")],
    alert_left: Annotated[
        str | None,
        typer.Option(help="Alert when so much is left, such as 100.00,20.00; or none. Default: as it is; none at first."),
    ] = None,
) -> Output:
    """Keep an organization to its credit, exactly, from now on; or no longer."""
    parts = [] if alert_left in (None, "none") else (alert_left or "").split(",")
    lefts = [parsed("--alert-left", parse_picos, part.strip()) for part in parts]
    existed = client.set_prepaid(organization, only, alert_at=None if alert_left is None else lefts)
    told = f"{organization} is{' already' if existed else ''} {'kept to its credit' if only else 'not kept to its credit'}"
    return {"organization": organization, "prepaid": only, "existed": existed}, told


def grants_table(grants: Iterable[CreditGrant]) -> RenderableType:
    numbers = ("granted", "spent", "expired", "left")
    made = table("organization", *numbers, "from", "until", "reason", "id", right=numbers)
    for each in grants:
        amounts = each.amount, each.spent, each.expired, each.remaining
        made.add_row(each.organization_name, *amounts, each.first_month, each.last_month, each.reason, each.grant_id)
    return made


price = typer.Typer(help="Set, list and try out prices: of the list, and of single customers.", no_args_is_help=True)

TIME_FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ"]
ModelArgument = Annotated[str, typer.Argument(help="The model; it need not exist yet.")]
SinceOption = Annotated[datetime | None, typer.Option(help="Since when it holds, in UTC. Default: now.", formats=TIME_FORMATS)]
KINDS = ("input", "cached input", "output", "embedding")
TITLE = "prices per million tokens"
TIMEOUT_S = 300.0  # a month of millions of events is one statement, and a long one
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


@price.command("set")
@calls(admin_client)
def set_price(
    client: AdminClient,
    model: ModelArgument,
    input_price: Annotated[str, typer.Option("--input", help="Per million input tokens, in units of the currency.")],
    output_price: Annotated[str, typer.Option("--output", help="Per million output tokens.")],
    cached_price: Annotated[
        str | None, typer.Option("--cached-input", help="Per million input tokens from the prefix cache. Default: as --input.")
    ] = None,
    embedding_price: Annotated[
        str | None, typer.Option("--embedding", help="Per million embedded tokens. Default: as it is; 0 at first.")
    ] = None,
    batch_multiplier: Annotated[
        str | None,
        typer.Option(help="What the batch tier pays of these prices, such as 0.5. Default: as it is; the same price at first."),
    ] = None,
    organization: Annotated[
        str, typer.Option("--org", "--organization", help="Only for this organization, by name or id: its own price.")
    ] = "",
    currency: Annotated[str, typer.Option(help="ISO 4217 code. Default: the organization's; USD for the list.")] = "",
    effective_time: SinceOption = None,
) -> Output:
    """Set a new price version, one per service tier. Earlier ones stay: a request costs what was in force when it was admitted."""
    per_token = parsed("--input", parse_price, input_price)
    versions = client.set_price(
        model,
        input_picos_per_token=per_token,
        cached_input_picos_per_token=per_token if cached_price is None else parsed("--cached-input", parse_price, cached_price),
        output_picos_per_token=parsed("--output", parse_price, output_price),
        embedding_picos_per_token=None if embedding_price is None else parsed("--embedding", parse_price, embedding_price),
        batch_multiplier_milli=None
        if batch_multiplier is None
        else parsed("--batch-multiplier", parse_thousandths, batch_multiplier),
        organization=organization,
        currency_code=currency,
        effective_time=_utc(effective_time),
    )
    remarks = []
    for each in versions:
        whose = f" for {each.organization_name}" if each.organization_name else ""
        told = ", ".join(f"{kind} {rate}" for kind, rate in zip(KINDS, rates(each), strict=True))
        since = time_text(each.effective_time, "now")
        what = f"price version {each.version} of {each.model}{whose}, {each.tier}, from {since} on"
        remarks.append(f"{what}, in {each.currency_code} per million tokens: {told}")
    return versions, *remarks


@price.command("withdraw")
@calls(admin_client)
def withdraw_price(
    client: AdminClient,
    model: ModelArgument,
    organization: Annotated[str, typer.Option("--org", "--organization", help="Whose own price ends, by name or id.")],
    effective_time: SinceOption = None,
) -> Output:
    """End a customer's own price: from then on it pays as the list says."""
    versions = client.withdraw_price(organization, model, effective_time=_utc(effective_time))
    since = time_text(versions[0].effective_time, "now")
    return versions, f"{organization} pays the list price of {model} from {since} on"


@price.command("list")
@calls(admin_client)
def list_prices(
    client: AdminClient,
    organization: Annotated[
        str, typer.Option("--org", "--organization", help="What this organization pays, by name or id. Default: the list.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Only of this model.")] = "",
    currency: Annotated[str, typer.Option(help="Only in this currency.")] = "",
    at: Annotated[datetime | None, typer.Option("--at", help="At this time, in UTC. Default: now.", formats=TIME_FORMATS)] = None,
    history: Annotated[bool, typer.Option("--history", help="Every version there ever was and will be.")] = False,
) -> Output:
    """Tell who pays what for which model and tier, where that comes from and since when."""
    found = client.list_prices(organization, model=model, currency_code=currency, time=_utc(at), history=history)
    if history and found.versions:
        return found, versions_table(found.versions)
    return found, applied_table(found.prices) if found.prices else "no price is in force: set one with `weir price set`"


def applied_table(prices: Iterable[AppliedPrice]) -> RenderableType:
    made = table("model", "tier", *KINDS, "currency", "from", "since", "version", right=(*KINDS, "version"), title=TITLE)
    for each in prices:
        version = each.version
        source = version.organization_name if each.source == "organization" else "list"
        source += "" if version.tier == each.tier else f" ({version.tier})"
        told = version.currency_code, source, version.effective_time, str(version.version)
        made.add_row(each.model, each.tier, *rates(version), *told)
    return made


def versions_table(versions: Iterable[PriceVersion]) -> RenderableType:
    made = table("version", "model", "of", "tier", "times", *KINDS, "currency", "since", right=("version", *KINDS), title=TITLE)
    for each in versions:
        times, shown = (f"{each.multiplier_milli / 1000:g}", rates(each)) if not each.withdrawn else ("ends", ["—"] * len(KINDS))
        what = str(each.version), each.model, each.organization_name or "list", each.tier, times
        made.add_row(*what, *shown, each.currency_code, time_text(each.effective_time))
    return made


def rates(version: PriceVersion) -> list[str]:
    """Prices by kind, in the order of KINDS."""
    picos = (getattr(version, f"{kind.replace(' ', '_')}_picos_per_token") for kind in KINDS)
    return [decimal_text(per_million(each)) for each in picos]


def _utc(time: datetime | None) -> datetime | None:
    return time.replace(tzinfo=UTC) if time else None


@price.command("simulate")
@calls(admin_client, timeout=TIMEOUT_S)
def simulate(
    client: AdminClient,
    month: Annotated[str, typer.Argument(help="The month, as YYYY-MM, UTC.")],
    file: Annotated[Path, typer.Option("--prices", help="YAML with `prices:` as for `weir apply`, and `plans:`; - for stdin.")],
    organization: Annotated[str, typer.Option("--org", "--organization", help="Only this organization, by name or id.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with exact amounts on stdout.")] = False,
    as_json: JsonOption = False,
) -> Output | None:
    """Rate a past month's real usage anew, with proposed prices and plans. Changes nothing.

    Amounts are usage and plan; adjustments, credit and rounding are left out on both sides.
    """
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    found = client.simulate_prices(month, read_proposal(file), organization=organization)
    if as_csv:
        put(None, [csv_of(found, CSV_COLUMNS, line_end="\r\n")])
        return None
    return found, simulated_table(found) if found else f"nothing was used in {month}"


def simulated_table(customers: list[SimulatedCustomer]) -> RenderableType:
    """What each paid, would have paid, and the difference."""
    numbers = ("tokens", "paid", "would pay", "difference", "%")
    made = table("organization", *numbers, "plan", right=numbers)
    for each in customers:
        share = f"{100 * each.difference.picos / each.old_amount.picos:+.1f}" if each.old_amount.picos else "—"
        plan = each.new_plan or "none"
        amounts = each.old_amount, decimal_text(each.new_amount.amount), decimal_text(each.difference.amount)
        plan = plan if each.new_plan == each.old_plan else f"{each.old_plan or 'none'} → {plan}"
        made.add_row(each.organization_name, each.token_count, *amounts, share, plan)
    return made
