"""`weir plan` and `weir credit`: plans and who has which, credit and what is left of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from weir_client import AdminClient, CreditGrant, Plan, PlanAssignment

from api.cli.apply import content_of
from api.cli.connection import Output, admin_client, calls
from api.cli.document import PROPOSAL, read_document
from api.cli.render import money_text, parse_picos, parsed, table
from common.strict_yaml import FileMistake

plan = typer.Typer(help="Make plans, and say who has which.", no_args_is_help=True)

TIERS = {"interactive": "SERVICE_TIER_INTERACTIVE", "batch": "SERVICE_TIER_BATCH"}

credit = typer.Typer(help="Grant credit, and see what is left of it.", no_args_is_help=True)

OrganizationArgument = Annotated[str, typer.Argument(help="Organization, by name or id.")]


@plan.command("create")
@calls(admin_client)
def create_plans(
    client: AdminClient,
    file: Annotated[Path, typer.Argument(help="YAML with `plans:`; - for stdin. See docs/administration.md.")],
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
    return found, plans_table(found.plans), assignments_table(found.assignments)


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
        made.add_row(
            each.name,
            str(each.version),
            str(rules.get("currency_code", "")),
            "; ".join(f"{int(rule['token_count']):,} {about(rule)}" for rule in rules.get("allowances", [])) or "—",
            "; ".join(f"{rule['kind']} {about(rule)}, {len(rule['steps'])} steps" for rule in rules.get("tiered_prices", []))
            or "—",
            f"{commitment:,.2f}" if commitment else "—",
        )
    return made


def about(rule: Mapping[str, Any]) -> str:
    selector = rule.get("selector", {})
    tier = str(selector.get("tier", "")).removeprefix("SERVICE_TIER_").lower()
    return " ".join(part for part in (selector.get("model") or "all", selector.get("token_kind", ""), tier) if part)


def assignments_table(assignments: tuple[PlanAssignment, ...]) -> RenderableType:
    rows = ((each.organization_name, each.first_month, each.plan or "none", str(each.version or "—")) for each in assignments)
    return table("organization", "from", "plan", "version", right=("version",), rows=rows)


def read_proposal(file: Path) -> dict[str, Any]:
    """Plans and prices of a file, as the contract has them. Ends the command with every mistake, by line."""
    document = read_document(content_of(file), prune=False, section=PROPOSAL)
    if document.mistakes:
        refuse(file, document.mistakes)
    plans = [plan_document(each) for each in document.configuration.get("plans", [])]
    return {**document.configuration, "plans": plans}


def plan_document(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of the file as the contract nests it."""
    found = dict(mapping)
    for name in ("allowances", "tiered_prices"):
        if name in found:
            found[name] = [nested(rule) for rule in found[name]]
    return found


def nested(rule: Mapping[str, Any]) -> dict[str, Any]:
    """With what selects tokens in a place of its own."""
    selector = {name.removeprefix("selector."): value for name, value in rule.items() if name.startswith("selector.")}
    if "tier" in selector:
        if selector["tier"] not in TIERS:
            raise typer.BadParameter(f"tier {selector['tier']!r} is neither interactive nor batch", param_hint="FILE")
        selector["tier"] = TIERS[selector["tier"]]
    return {name: value for name, value in rule.items() if not name.startswith("selector.")} | {"selector": selector}


def refuse(file: Path, mistakes: list[FileMistake]) -> NoReturn:
    """Say what is wrong as `file:line: place: remedy`, and end the command."""
    for each in mistakes:
        typer.secho(f"{file}:{each.line}: {each.place and each.place + ': '}{each.message}", fg="red", err=True)
    raise typer.Exit(2)


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
    organization: Annotated[str, typer.Option("--org", help="Only of this organization, by name or id.")] = "",
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
    amounts = map(money_text, (found.left, found.unbilled, found.held, found.available))
    row = found.organization_name, "yes" if found.prepaid else "no", *amounts
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
        amounts = map(money_text, (each.amount, each.spent, each.expired, each.remaining))
        made.add_row(each.organization_name, *amounts, each.first_month, each.last_month, each.reason, each.grant_id)
    return made
