"""`weir plan` and `weir credit`: plans and who has which, credit and what is left of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from weir_client import CreditGrant, Money, Plan, PlanAssignment

from api.cli.apply import content_of
from api.cli.connection import AddressOption, KeyOption, admin_client
from api.cli.document import PROPOSAL, FileMistake, read_document
from api.cli.render import JsonOption, decimal_text, note, parse_amount, print_json, show, table, units_to_picos

plan = typer.Typer(help="Make plans, and say who has which.", no_args_is_help=True)

TIERS = {"interactive": "SERVICE_TIER_INTERACTIVE", "batch": "SERVICE_TIER_BATCH"}

credit = typer.Typer(help="Grant credit, and see what is left of it.", no_args_is_help=True)

OrganizationArgument = Annotated[str, typer.Argument(help="Organization, by name or id.")]


@plan.command("create")
def create_plans(
    file: Annotated[Path, typer.Argument(help="YAML with `plans:`; - for stdin. See docs/administration.md.")],
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Make the plans of a file, or their next versions. What says the same already stays; customers keep their versions."""
    proposal = read_proposal(file)
    if proposal.get("prices"):
        raise typer.BadParameter("`prices:` are set by `weir apply`", param_hint="FILE")
    with admin_client(address, api_key) as client:
        made = [client.create_plan(each) for each in proposal.get("plans", [])]
    if as_json:
        print_json(made)
        return
    for each in made:
        note(f"plan {each.name} version {each.version}{' says so already' if each.existed else ' is made'}")


@plan.command("list")
def list_plans(
    name: Annotated[str, typer.Argument(help="Only this plan.")] = "",
    organization: Annotated[str, typer.Option("--org", help="Only assignments of this organization.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List plans, and who has which."""
    with admin_client(address, api_key) as client:
        found = client.list_plans(name, organization=organization)
    if as_json:
        print_json(found)
    elif found.plans:
        show(plans_table(found.plans), assignments_table(found.assignments))
    else:
        note("there is no plan: `weir plan create FILE`")


@plan.command("assign")
def assign_plan(
    organization: Annotated[str, typer.Argument(help="Organization, by name or id.")],
    name: Annotated[str, typer.Argument(help="The plan; leave it out to end the present one.")] = "",
    first_month: Annotated[str, typer.Option("--from", help="The first month, as YYYY-MM. Default: this one.")] = "",
    version: Annotated[int, typer.Option(min=0, help="Version of the plan. Default: the latest.")] = 0,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Give an organization a plan from a month on. Months before stay as they are."""
    with admin_client(address, api_key) as client:
        assigned = client.assign_plan(organization, name, version=version, first_month=first_month)
    if as_json:
        print_json(assigned)
    else:
        which = f"the plan {assigned.plan} version {assigned.version}" if assigned.plan else "no plan"
        already = " already" if assigned.existed else ""
        note(f"{assigned.organization_name} has{already} {which} from {assigned.first_month} on")


def plans_table(plans: tuple[Plan, ...]) -> RenderableType:
    """Plans by their rules."""
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
    """Which tokens a rule is about."""
    selector = rule.get("selector", {})
    tier = str(selector.get("tier", "")).removeprefix("SERVICE_TIER_").lower()
    return " ".join(part for part in (selector.get("model") or "all", selector.get("token_kind", ""), tier) if part)


def assignments_table(assignments: tuple[PlanAssignment, ...]) -> RenderableType:
    """Who has which plan from when on."""
    made = table("organization", "from", "plan", "version", right=("version",))
    for each in assignments:
        made.add_row(each.organization_name, each.first_month, each.plan or "none", str(each.version) if each.version else "—")
    return made


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
