"""`weir org`, `weir project`, `weir key`, `weir quota`, `weir end-user`: tenants, keys and limits.

A secret is printed once, alone on stdout.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer
from weir_client import BillingProfile, QuotaDimension, QuotaSubject, RemainingCredit

from weir_cli.connection import (
    EveryOption,
    OrganizationOption,
    Output,
    admin_client,
    billing_client,
    calls,
    inference_client,
    organization_or_default,
    organizations,
    project_or_default,
)
from weir_cli.render import JsonOption, Table, cell_of, fail, make_console, note, print_json, table
from weir_cli.terms import TERMS, option, options_of, restrictions, values_of
from weir_cli.texts import (
    ERASED,
    WINDOW_MINUTES_MAX,
    dimension_amount,
    duration_text,
    grouped_dimensions,
    key_state,
    labelled,
    money_text,
    owner_text,
    parse_limit,
    parse_selector,
    parse_span,
    parse_state,
    parse_thousandths,
    parsed,
    quota_owner,
    quota_remarks,
    suspension_text,
    thresholds_text,
    tightest_text,
    time_text,
    use_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import (
        AdminClient,
        ApiKey,
        BillingClient,
        Client,
        ClosedOrganization,
        ClosureEffects,
        EndUser,
        Organization,
        PreviewedDay,
        PreviewedMember,
        Project,
        QuotaPreview,
        QuotaStatus,
    )

org = typer.Typer(
    help=(
        "Create, rename, suspend, resume, bind, close and list organizations; set their billing"
        " profiles and queue weights."
    ),
    no_args_is_help=True,
)
project = typer.Typer(
    help="Create, rename, suspend, resume, close and list projects.", no_args_is_help=True
)

NewNameArgument = Annotated[
    str,
    typer.Argument(
        help="Its new name: 1 to 63 of a-z, 0-9 and -, beginning with a letter.", metavar="NEW"
    ),
]
IfMissingOption = Annotated[
    bool,
    typer.Option("--if-missing", help="Succeed if it already exists, for scripts that run again."),
]
NameArgument = Annotated[
    str, typer.Argument(help="Its name: 1 to 63 of a-z, 0-9 and -, beginning with a letter.")
]
OrganizationArgument = Annotated[
    str, typer.Argument(help="Organization, by name or id.", metavar="ORG")
]
ProjectArgument = Annotated[
    str, typer.Argument(help="Project: its name with --org, ORG/NAME or its id.", metavar="PROJECT")
]
SearchOption = Annotated[
    str, typer.Option("--search", metavar="PREFIX", help="Only names that begin like this.")
]
ReasonOption = Annotated[
    str, typer.Option("--reason", help="Why. Its callers read it in each refusal.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; show what it would change.")
]
ConfirmOption = Annotated[
    str,
    typer.Option(
        "--confirm", help="Its name, which confirms it without a question.", metavar="NAME"
    ),
]
QuotaArgument = Annotated[
    str, typer.Argument(help="Id of the limit, as shown by `weir quota list`.")
]

# Prepaid credit is granted, not set.
NOT_SETTABLE = (QuotaDimension.UNSPECIFIED, QuotaDimension.PREPAID_CREDIT)
DIMENSIONS = tuple(each for each in QuotaDimension if each not in NOT_SETTABLE)
DIMENSION_NAMES = grouped_dimensions(DIMENSIONS)
ORGANIZATIONS: Table[Organization] = Table(
    {
        "organization": "name",
        "currency": "currency_code",
        "weight": lambda each: f"{each.queue_weight_milli / 1000:g}",
        "region": lambda each: each.region or "any",
        "state": suspension_text,
        "created": "create_time",
        "id": "organization_id",
    },
    empty="no organizations: create one with `weir org create NAME`",
    drop=("id", "created"),
)
EFFECTS: Table[tuple[str, str, str]] = Table(
    {"closing": itemgetter(0), "now": itemgetter(1), "effect": itemgetter(2)}, right=("now",)
)
PROJECTS: Table[Project] = Table(
    {
        "project": "name",
        "state": suspension_text,
        "created": "create_time",
        "id": "project_id",
        "organization id": "organization_id",
    },
    empty="no projects: create one with `weir project create NAME --org ORG`",
    drop=("organization id", "id", "created"),
)
KEYS: Table[ApiKey] = Table(
    {
        "key": "name",
        "of": lambda each: f"{each.organization_name}/{each.project_name}",
        "prefix": "prefix",
        "group": lambda each: each.group or None,
        "owner": owner_text,
        "scopes": lambda each: " ".join((*each.scopes, each.role)).strip(),
        "models": lambda each: " ".join(each.models) or "all",
        "state": key_state,
        "created": "create_time",
        "last used": use_text,
        "id": "api_key_id",
    },
    optional={"group": lambda each: each.group, "owner": owner_text},
    drop=("id", "created", "models", "last used", "owner", "scopes"),
)
PREVIEWED: dict[str, str | Callable[[Any], str | None]] = {
    "requests": "request_count",
    "refused": "refused_count",
    "ended early": "shortened_count",
}
PREVIEWED_DAYS: Table[PreviewedDay] = Table(
    {"day (UTC)": "day", **PREVIEWED}, right=tuple(PREVIEWED), empty="no requests"
)
PREVIEWED_MEMBERS: Table[PreviewedMember] = Table(
    {"of": lambda each: each.name or "(erased)", **PREVIEWED}, right=tuple(PREVIEWED)
)
QUOTAS: Table[QuotaStatus] = Table(
    {
        "of": quota_owner,
        "limit on": lambda each: each.dimension.value + quota_remarks(each),
        "model": lambda each: each.model or "all",
        "limit": lambda each: dimension_amount(each.dimension, each.limit_value),
        "used": lambda each: dimension_amount(each.dimension, each.used_value),
        "held": lambda each: dimension_amount(each.dimension, each.held_value),
        "left": lambda each: dimension_amount(each.dimension, each.remaining_value),
        "resets in": lambda each: (
            None if each.reset_delay_s is None else duration_text(each.reset_delay_s)
        ),
        "alerts at": lambda each: (
            thresholds_text(each.dimension, each.alert_at) if each.alert_at else None
        ),
        "id": "quota_id",
    },
    right=("limit", "used", "held", "left"),
    empty="no limits are set",
    drop=("id", "alerts at", "held", "model", "resets in", "used"),
)
END_USERS: Table[EndUser] = Table(
    {
        "end user": lambda each: each.name or f"{ERASED} {each.end_user_id}",
        "this month": lambda each: each.month_cost and money_text(each.month_cost),
        "requests": "month_request_count",
        "limits used": tightest_text,
        "last used": "last_use_day",
        "first used": lambda each: each.create_time and f"{each.create_time:%Y-%m-%d}",
        "state": lambda each: each.state.value,
        "id": "end_user_id",
    },
    right=("this month", "requests"),
    empty="no end users: requests name them, with `end_user` or OpenAI's `user`",
    drop=("id", "first used", "state", "requests", "last used"),
)
# Of a key's own limits, which it cannot change.
OWN_QUOTAS = QUOTAS.without("alerts at", "id", empty="no limits apply to this key")
QUOTAS_OF_ONE = QUOTAS.without("alerts at", empty="no limits apply to this end user")
END_USERS_PAGE_SIZE = 200
# Whom a limit within an organization or project concerns.
ONE = {
    "end_user": option(str, "Limits of this end user: your own user, as requests name it."),
    "label": option(str, "Limits of the requests with this label, such as team=search."),
}
ONES = {
    "each": option(str, "Give the limit to each of them: `end-user`, `label:KEY` or `key:GROUP`."),
    "end_user": option(str, "Limit this end user only: your own user, as requests name it."),
    "label": option(str, "Limit the requests with this label only, such as team=search."),
}
WINDOW = {
    "minutes": option(
        int,
        "Length of a rolling window, such as 300 for tokens-per-window.",
        "--minutes",
        min=1,
        max=WINDOW_MINUTES_MAX,
    )
}
REQUEST = {
    "end_user": option(str, "Also the limits of this end user of yours."),
    "labels": option(
        list[str],
        "Also the limits of this label; repeat for more.",
        "--label",
        metavar="KEY=VALUE",
    ),
}
PROFILE = {
    "emails": option(
        list[str], "E-mail address; repeat for more. Stripe sends invoices to the first.", "--email"
    ),
    "legal_name": option(str, "Registered name, for the address on documents."),
    "address_line1": option(str, "Street and number."),
    "address_line2": option(str, "Building, floor or department."),
    "city": option(str, "City."),
    "postal_code": option(str, "Postal code."),
    "state": option(str, "State, province or region."),
    "country": option(str, "ISO 3166-1 alpha-2 code, such as DE."),
    "tax_id": option(str, "Tax id, as printed on documents."),
    "language": option(str, "Language of Stripe's messages, such as de or pt-BR."),
}


@org.command("create")
@calls(admin_client, shown=ORGANIZATIONS)
def create_organization(
    client: AdminClient,
    name: NameArgument,
    currency: Annotated[
        str, typer.Option(help="Currency of its bills, such as USD or EUR.")
    ] = "USD",
    if_missing: IfMissingOption = False,
) -> Organization:
    """Create an organization: a customer with its own bill."""
    created = client.create_organization(name, currency_code=currency, allow_existing=if_missing)
    note_unpriced(client, [created.currency_code])
    return created


def note_unpriced(client: AdminClient, currency_codes: Iterable[str]) -> None:
    """Warn on stderr of currencies in which no price is in force; USD is that of `weir up`."""
    for code in sorted({*currency_codes} - {"USD"}):
        if not client.list_prices(currency_code=code).prices:
            note(
                f"no {code} price is in force: requests that are billed in {code} are refused until"
                f" you set prices with `weir price set MODEL --currency {code}`"
            )


@org.command("list")
@calls(admin_client, shown=ORGANIZATIONS)
def list_organizations(client: AdminClient, search: SearchOption = "") -> list[Organization]:
    """List all organizations by name."""
    return list(client.list_organizations(search=search))


@org.command("billing")
@calls(admin_client, options=PROFILE)
def billing_profile(
    client: AdminClient,
    organization: OrganizationArgument,
    **profile: Any,
) -> Output:
    """Show where an organization's invoices go. Options change single fields; '' clears one."""
    given = {name: value for name, value in profile.items() if value is not None}
    if "emails" in given:
        given["emails"] = tuple(filter(None, given["emails"]))
    found = next(
        (
            each
            for each in client.list_organizations(organization=organization)
            if organization in (each.name, each.organization_id)
        ),
        None,
    )
    if found is None:
        fail(f"organization {organization!r} does not exist: see `weir org list`")
    if given:
        changed = replace(found.billing_profile or BillingProfile(), **given)
        found = client.set_billing_profile(found.organization_id, changed)
    if found.billing_profile is None:
        return (
            found,
            f"{found.name} has no billing profile: give --email, --legal-name and the address",
        )
    fields = asdict(found.billing_profile).items()
    rows = (
        (name.replace("_", " "), ", ".join(value) if name == "emails" else value or None)
        for name, value in fields
    )
    return found, table("field", "value", title=f"billing profile of {found.name}", rows=rows)


@org.command("weight")
@calls(admin_client, shown=ORGANIZATIONS)
def queue_weight(
    client: AdminClient,
    organization: OrganizationArgument,
    weight: Annotated[
        str,
        typer.Argument(help="0.01 to 100; 1 is the weight of an organization without one."),
    ],
) -> Organization:
    """Set how much an organization counts in the fair queue.

    Under load, an organization with twice the weight gets twice the service. Running servers follow
    within a second.
    """
    return client.set_queue_weight(organization, parsed("WEIGHT", parse_thousandths, weight))


@org.command("rename")
@calls(admin_client, shown=ORGANIZATIONS)
def rename_organization(
    client: AdminClient, organization: OrganizationArgument, name: NewNameArgument
) -> Organization:
    """Give an organization another name. Its id, keys, limits, usage and bills stay.

    Documents of closed months keep the former name. Change it in your configuration file too:
    `weir apply` would create an organization of the former name.
    """
    return client.update_organization(organization, name)


@org.command("suspend")
@calls(admin_client, shown=ORGANIZATIONS)
def suspend_organization(
    client: AdminClient, organization: OrganizationArgument, reason: ReasonOption
) -> Organization:
    """Refuse the requests of an organization, and end its running ones on all servers.

    Its keys stay, and work again after `weir org resume`. Its own administrators can still read and
    change everything else.
    """
    return client.suspend_organization(organization, reason)


@org.command("resume")
@calls(admin_client, shown=ORGANIZATIONS)
def resume_organization(client: AdminClient, organization: OrganizationArgument) -> Organization:
    """End the suspension of an organization. Those of its projects stay."""
    return client.resume_organization(organization)


@org.command("close")
@calls(admin_client)
def close_organization(
    client: AdminClient,
    organization: OrganizationArgument,
    reason: ReasonOption = "",
    credit: Annotated[
        RemainingCredit,
        typer.Option(
            "--credit",
            help=(
                "What happens to the credit that the final month leaves: refund posts it as owed"
                " to the customer, expire as forfeited, keep leaves it until its grants end."
                " Required if credit remains."
            ),
        ),
    ] = RemainingCredit.UNSPECIFIED,
    dry_run: DryRunOption = False,
    confirmed: ConfirmOption = "",
) -> Output:
    """Close an organization for good: revoke all of its keys, and end its running requests.

    Its rentals end now, and its plan with this month. Its months close as always, with late usage,
    and you can still adjust them; the close of the final month posts what you chose for the credit.
    All records stay.
    """
    preview = client.close_organization(organization, validate_only=True)
    if dry_run:
        return preview, effects_table(preview.effects, of_organization=True)
    name = preview.organization.name
    closed = client.close_organization(
        organization,
        confirm_name=confirmed_name(name, preview.effects, confirmed, of_organization=True),
        reason=reason,
        remaining_credit=credit,
    )
    return closed, ORGANIZATIONS.of([closed.organization]), *final_lines(closed)


def final_lines(closed: ClosedOrganization) -> list[str]:
    """Say what remains to be done after the closing of an organization."""
    closure = closed.organization.closure
    assert closure is not None, "it was closed"
    if closure.is_final_month_closed:
        return [f"its final month, {closure.final_month}, is closed"]
    of_credit = {
        RemainingCredit.REFUND: ", which posts the rest of its credit as owed to the customer",
        RemainingCredit.EXPIRE: ", which posts the rest of its credit as forfeited",
    }.get(closure.remaining_credit, "")
    months = ", ".join(closed.effects.open_months)
    return [f"close its open months when they are over: {months}{of_credit}"]


def effects_table(effects: ClosureEffects, *, of_organization: bool) -> RenderableType:
    """Draw what a closing would change at present."""
    rows: list[tuple[str, str, str]] = [
        ("running requests", str(effects.running_request_count), "end, billed as delivered"),
        ("keys", str(effects.active_key_count), "revoked"),
        ("limits", str(effects.limit_count), "without effect"),
        ("limits changed for a time", str(effects.overridden_limit_count), ""),
    ]
    if of_organization:
        assert effects.unbilled is not None, "of an organization"
        assert effects.remaining_credit is not None, "of an organization"
        rows += [
            ("projects", str(effects.open_project_count), "closed with it"),
            ("rentals", str(effects.open_rental_count), "end now"),
            ("webhook", "1" if effects.has_webhook else "0", "stays, for the final invoice"),
            ("open months", ", ".join(effects.open_months), "to be closed as always"),
            ("unbilled so far", money_text(effects.unbilled), "on their invoices"),
            ("credit left", money_text(effects.remaining_credit), "as --credit says"),
        ]
    return EFFECTS.of(rows)


def confirmed_name(
    name: str, effects: ClosureEffects, confirmed: str, *, of_organization: bool
) -> str:
    """Return the name that confirms a closing: as given, or as a person types it.

    Raises: typer.BadParameter without a name and a terminal.
    """
    if confirmed:
        return confirmed
    if not has_terminal():
        raise typer.BadParameter(
            f"give --confirm {name}: there is no terminal to ask", param_hint="--confirm"
        )
    make_console(stderr=True).print(effects_table(effects, of_organization=of_organization))
    answer: str = typer.prompt(f"Nothing undoes this. Type {name} to close it", err=True)
    return answer


@org.command("bind")
@calls(admin_client, shown=ORGANIZATIONS)
def bind_organization(
    client: AdminClient,
    organization: OrganizationArgument,
    region: Annotated[str, typer.Argument(help="A region of the fleet.", metavar="REGION")],
) -> Organization:
    """Keep the texts of an organization in one region: its servers and engines, and no others.

    Servers elsewhere refuse its keys. Its running requests end, and can be sent again to a server
    in the region.
    """
    return client.bind_organization(organization, region)


@org.command("unbind")
@calls(admin_client, shown=ORGANIZATIONS)
def unbind_organization(client: AdminClient, organization: OrganizationArgument) -> Organization:
    """Let the requests of an organization run in any region again."""
    return client.bind_organization(organization, "")


@project.command("create")
@calls(admin_client, shown=PROJECTS)
def create_project(
    client: AdminClient,
    name: NameArgument,
    organization: OrganizationOption = None,
    if_missing: IfMissingOption = False,
) -> Project:
    """Create a project: a part of an organization with keys and limits of its own."""
    return client.create_project(
        organization_or_default(organization, client.address), name, allow_existing=if_missing
    )


@project.command("rename")
@calls(admin_client, shown=PROJECTS)
def rename_project(
    client: AdminClient,
    project_ref: ProjectArgument,
    name: NewNameArgument,
    organization: OrganizationOption = None,
) -> Project:
    """Give a project another name. Its id, keys, limits and usage stay."""
    return client.update_project(project_of(project_ref, organization, client.address), name)


@project.command("suspend")
@calls(admin_client, shown=PROJECTS)
def suspend_project(
    client: AdminClient,
    project_ref: ProjectArgument,
    reason: ReasonOption,
    organization: OrganizationOption = None,
) -> Project:
    """Refuse the requests of a project, and end its running ones on all servers.

    Its keys stay, and work again after `weir project resume`.
    """
    return client.suspend_project(project_of(project_ref, organization, client.address), reason)


@project.command("resume")
@calls(admin_client, shown=PROJECTS)
def resume_project(
    client: AdminClient, project_ref: ProjectArgument, organization: OrganizationOption = None
) -> Project:
    """End the suspension of a project. That of its organization, if any, stays."""
    return client.resume_project(project_of(project_ref, organization, client.address))


@project.command("close")
@calls(admin_client)
def close_project(
    client: AdminClient,
    project_ref: ProjectArgument,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    confirmed: ConfirmOption = "",
    organization: OrganizationOption = None,
) -> Output:
    """Close a project for good: revoke all of its keys, and end its running requests.

    Its usage stays in the months of its organization.
    """
    ref = project_of(project_ref, organization, client.address)
    preview = client.close_project(ref, validate_only=True)
    if dry_run:
        return preview, effects_table(preview.effects, of_organization=False)
    name = preview.project.name
    closed = client.close_project(
        ref,
        confirm_name=confirmed_name(name, preview.effects, confirmed, of_organization=False),
        reason=reason,
    )
    return closed, PROJECTS.of([closed.project])


def project_of(ref: str, organization: str | None, address: str) -> str:
    """Return the reference of a project: "ORG/NAME" or its id. Raises: typer.BadParameter."""
    if "/" in ref or is_uuid(ref):
        return ref
    return f"{organization_or_default(organization, address)}/{ref}"


def is_uuid(ref: str) -> bool:
    try:
        UUID(ref)
    except ValueError:
        return False
    return True


@project.command("list")
@calls(admin_client)
def list_projects(
    client: AdminClient,
    organization: OrganizationOption = None,
    every: EveryOption = False,
    search: SearchOption = "",
) -> Output:
    """List the projects of an organization."""
    names = organizations(organization, client, every=every)
    owners = {each: name for name in names for each in client.list_projects(name, search=search)}
    several = {"organization": owners.__getitem__} if len(names) > 1 else {}
    found = list(owners)
    return found, replace(PROJECTS, columns={**PROJECTS.columns, **several}).of(found)


key = typer.Typer(help="Create, rotate, change, revoke and list API keys.", no_args_is_help=True)

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Id or prefix of the key.")]


@key.command("create")
@calls(admin_client, options=options_of(TERMS["key"]))
def create_key(
    client: AdminClient,
    name: Annotated[
        str, typer.Argument(help="A name for you, such as that of the program that uses the key.")
    ],
    organization: OrganizationOption = None,
    project: Annotated[
        str | None,
        typer.Option("--project", help="Project, by name or id. Default: the one of `weir up`."),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(help="How long it works: 90m, 12h, 30d or 4w. Default: for ever.")
    ] = None,
    if_missing: Annotated[
        bool,
        typer.Option(
            "--if-missing",
            help="Succeed if the project has a working key of this name and scopes already.",
        ),
    ] = False,
    service_account: Annotated[
        str,
        typer.Option(
            metavar="ACCOUNT", help="Service account that the key belongs to, by name or id."
        ),
    ] = "",
    own: Annotated[
        bool, typer.Option("--own", help="The key belongs to you, and ends with your membership.")
    ] = False,
    as_json: JsonOption = False,
    **terms: Any,
) -> None:
    """Create an API key. You see its secret once, on stdout: keep it."""
    lifetime = parsed("--expires-in", parse_span, expires_in) if expires_in is not None else None
    created = client.create_api_key(
        organization_or_default(organization, client.address),
        project_or_default(project, client.address),
        name,
        lifetime=lifetime,
        service_account=service_account,
        own=own,
        allow_existing=if_missing,
        **values_of(TERMS["key"], terms),
    )
    if as_json:
        print_json(created)
        return
    made = created.api_key
    if created.existed:
        note(
            f"key {made.name} ({made.prefix}) exists; its secret was shown at its creation: `weir"
            " key rotate` makes a new one"
        )
        return
    until = f" until {time_text(made.expire_time)}" if made.expire_time else ""
    limits = "".join(f", {name} {value}" for name, value in restrictions(made))
    purpose = f" for {', '.join(made.scopes)}" if made.scopes else ""
    note(f"key {made.name} ({made.prefix}){purpose}{limits}{until}, id {made.api_key_id}")
    show_secret(created.secret)


@key.command("rotate")
@calls(admin_client)
def rotate_key(
    client: AdminClient,
    api_key_ref: KeyArgument,
    overlap: Annotated[
        str,
        typer.Option(help="How long the old secret still works: 90m, 12h, 7d, or 0 to end it now."),
    ] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret, which you see once. The old one still works for a while.

    Use it regularly, and with `--overlap 0` if a secret leaked. Prefix and limits stay the same.
    """
    span = span_or_none_left("--overlap", overlap)
    rotated = client.rotate_api_key(api_key_ref, overlap=span)
    if as_json:
        print_json(rotated)
        return
    made = rotated.api_key
    until = (
        f"works until {time_text(rotated.overlap_end_time)}" if span else "is refused from now on"
    )
    note(f"key {made.name} ({made.prefix}) has a new secret; the old one {until}")
    show_secret(rotated.secret)


@key.command("update")
@calls(admin_client, options=options_of(TERMS["key"]), shown=KEYS)
def update_key(
    client: AdminClient,
    api_key_ref: KeyArgument,
    name: Annotated[str | None, typer.Option(help="New display name.")] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Allow all models.")] = False,
    all_networks: Annotated[
        bool, typer.Option("--all-networks", help="Allow all networks.")
    ] = False,
    expires_in: Annotated[
        str | None, typer.Option(help="Let it expire after 90m, 12h, 30d or 4w; 0 ends it now.")
    ] = None,
    never_expires: Annotated[
        bool, typer.Option("--never-expires", help="Let it work for ever.")
    ] = False,
    **terms: Any,
) -> ApiKey:
    """Change the name, expiry or rights of a key. Only what you name changes."""
    given = values_of(TERMS["key"], terms)
    if not (given or all_models or all_networks or never_expires) and name is expires_in is None:
        flags = ", ".join(each.names.replace("/", ", ") for each in TERMS["key"])
        raise typer.BadParameter(
            f"give at least one of --name, {flags}, --all-models, --all-networks, --expires-in or"
            " --never-expires"
        )
    span = None if expires_in is None else span_or_none_left("--expires-in", expires_in)
    return client.update_api_key(
        api_key_ref,
        name=name,
        all_models=all_models,
        all_networks=all_networks,
        expire_time=None if span is None else datetime.now(UTC) + span,
        never_expires=never_expires,
        **given,
    )


@key.command("revoke")
@calls(admin_client)
def revoke_key(client: AdminClient, api_key_ref: KeyArgument) -> Output:
    """Stop a key for good, and end its running requests on all servers."""
    revoked = client.revoke_api_key(api_key_ref)
    return (
        revoked,
        f"key {revoked.name} ({revoked.prefix}) was revoked at {time_text(revoked.revoke_time)}",
    )


@key.command("list")
@calls(admin_client)
def list_keys(
    client: AdminClient,
    organization: Annotated[
        str, typer.Option("--org", help="Only keys of this organization, by name or id.")
    ] = "",
    unused_for: Annotated[
        str | None,
        typer.Option(help="Only working keys that were not used for 90m, 12h, 90d or 13w."),
    ] = None,
    search: Annotated[
        str,
        typer.Option(metavar="PREFIX", help="Only keys whose name or prefix begins like this."),
    ] = "",
) -> Output:
    """List API keys, the newest first. Secrets are never shown."""
    span = None if unused_for is None else parsed("--unused-for", parse_span, unused_for)
    found = list(client.list_api_keys(organization, unused_for=span, search=search))
    none = "no keys" if span is None else f"no active key is known to be unused for {unused_for}"
    return found, KEYS.drawn(found) if found else none


@key.command("show")
@calls(admin_client)
def show_key(client: AdminClient, api_key_ref: KeyArgument) -> Output:
    """Show what an API key may do, and when it was last used."""
    [found] = client.list_api_keys(api_key=api_key_ref)
    return found, key_sheet(found)


def span_or_none_left(flag: str, text: str) -> timedelta:
    """Parse a length of time; `0` means none. Raises: typer.BadParameter."""
    return timedelta(0) if text == "0" else parsed(flag, parse_span, text)


def show_secret(secret: str) -> None:
    """Print a secret alone on stdout, with a warning on stderr."""
    typer.secho("The secret is shown only now. Store it:", fg="yellow", err=True)
    typer.echo(secret)


def key_sheet(key: ApiKey) -> RenderableType:
    """Draw all properties of a key: the columns of the list, and its restrictions."""
    cells = {name: cell_of(key, cell) for name, cell in KEYS.columns.items()}
    rows = (
        *((name, cells[name]) for name in ("of", "prefix", "state", "scopes")),
        *(list(restrictions(key)) or [("restrictions", "none")]),
        *((name, cells[name]) for name in ("created", "last used", "id")),
        ("project id", key.project_id),
        ("organization id", key.organization_id),
    )
    return table("key", key.name, rows=rows)


quota = typer.Typer(help="Set, show and remove limits.", no_args_is_help=True)


@quota.command("set")
@calls(admin_client, options=WINDOW | ONES | options_of(TERMS["quota"]))
def set_quota(
    client: AdminClient,
    dimension: Annotated[str, typer.Argument(help=f"What to limit: {DIMENSION_NAMES}.")],
    value: Annotated[
        str,
        typer.Argument(
            help="The limit: a number, or money such as 250.00. 0 lets nothing through."
        ),
    ],
    organization: Annotated[
        str | None, typer.Option("--org", help="Limit this organization, by name or id.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", help="Limit this project: ORG/NAME, its id, or NAME with --org."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Limit this key, by id or prefix.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Limit the use of this model only. Default: of all models together."
        ),
    ] = "",
    new_keys: Annotated[
        bool,
        typer.Option(
            "--new-keys",
            help="Give each new key its own copy of the limit, instead of limiting the subject.",
        ),
    ] = False,
    preview: Annotated[
        bool,
        typer.Option(
            "--preview", help="Only show what the limit would have refused in the last seven days."
        ),
    ] = False,
    **terms: Any,
) -> Output:
    """Set a limit for an organization, a project or a key, or change it.

    You can also limit your own users and the labels of requests, one or each of them. Usage of the
    current window, such as the month, counts already. A week begins on Monday, UTC. With `--minutes
    300`, a limit per window counts in any 300 minutes; one per lifetime never resets.
    """
    kind = parse_dimension(dimension)
    limit = parsed("VALUE", parse_limit, kind, value)
    each, end_user, label = (terms[name] for name in ONES)
    if any((each, end_user, label)) and not any((organization, project, key)):
        organization = organization_or_default(None, client.address)
    subject, subject_ref = parse_subject(organization, project, key)
    identity: dict[str, Any] = {
        "model": model,
        "for_each": parsed("--each", parse_selector, each) if each else "",
        "end_user": end_user or "",
        "label": label or "",
        "window_minutes": terms["minutes"] or 0,
    }
    values = values_of(TERMS["quota"], terms)
    if preview:
        if new_keys:
            raise typer.BadParameter("leave --new-keys out of a preview: those keys have no past")
        weights = {name: value for name, value in values.items() if name.endswith("_weight_milli")}
        return previewed(
            client.preview_quota(subject, subject_ref, kind, limit, **identity, **weights)
        )
    status = client.set_quota(
        subject, subject_ref, kind, limit, for_new_keys=new_keys, **identity, **values
    )
    return changed(status)


def previewed(found: QuotaPreview) -> Output:
    """Show what a limit would have refused, by day and by member."""
    remark = (
        f"{found.refused_count:,} of {found.request_count:,} requests since"
        f" {time_text(found.start_time)} would have been refused, and"
        f" {found.shortened_count:,} ended early. Requests that were refused before are not"
        " recorded, and neither is whether clients would have tried again."
    )
    tables = [PREVIEWED_DAYS.drawn(found.days), PREVIEWED_MEMBERS.drawn(found.members)]
    return found, *tables[: 1 + bool(found.members)], remark


@quota.command("override")
@calls(admin_client)
def override_quota(
    client: AdminClient,
    quota_id: QuotaArgument,
    value: Annotated[
        str | None, typer.Argument(help="The higher limit, written as for `weir quota set`.")
    ] = None,
    lasting: Annotated[
        str | None, typer.Option("--for", help="How long it lasts: 90m, 12h, 7d.")
    ] = None,
    reason: Annotated[
        str,
        typer.Option("--reason", help="Why. You see it with the limit and in the audit log."),
    ] = "",
    end: Annotated[bool, typer.Option("--end", help="End the override now.")] = False,
) -> Output:
    """Raise a limit for some time, or end this early."""
    if end == (value is not None) or end == (lasting is not None):
        raise typer.BadParameter("give a VALUE with --for and --reason, or --end alone")
    if value is None or lasting is None:
        status = client.end_quota_override(quota_id)
    else:
        kind = next(
            (
                each.dimension
                for each in client.list_quotas(quota_id=quota_id)
                if each.quota_id == quota_id  # older servers return all
            ),
            QuotaDimension.UNSPECIFIED,
        )
        limit, span = (
            parsed("VALUE", parse_limit, kind, value),
            parsed("--for", parse_span, lasting, "90m, 12h or 7d"),
        )
        status = client.override_quota(quota_id, limit, datetime.now(UTC) + span, reason)
    return changed(status)


@quota.command("show")
@calls(inference_client, options=REQUEST)
def show_quotas(
    client: Client,
    model: Annotated[
        str, typer.Option("--model", help="Only limits that apply to this model.")
    ] = "",
    *,
    end_user: str | None,
    labels: list[str] | None,
) -> Output:
    """Show the limits of your own key, and how much is left of each.

    With `--end-user` or `--label` you also see what is left to this user or label.
    """
    found = client.get_quota(model, end_user=end_user, labels=labelled(labels or []))
    own = client.get_restrictions()
    narrowed = "; ".join(f"{name} {value}" for name, value in restrictions(own))
    remarks = [f"key {own.prefix} is restricted to: {narrowed}"] if narrowed else []
    if (change := own.latest_change) is not None:
        what = "given more rights" if change.act == "widened" else change.act
        when = time_text(change.change_time)
        remarks.append(f"key {own.prefix} was {what} by {change.actor} at {when}")
    return found, limits(found, OWN_QUOTAS), *remarks


@quota.command("list")
@calls(admin_client, options=ONE)
def list_quotas(
    client: AdminClient,
    organization: Annotated[
        str, typer.Option("--org", help="Only limits of this organization, its projects and keys.")
    ] = "",
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help=(
                "All limits that apply to this key, by id or prefix, with the binding ones marked."
            ),
        ),
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="With --key: only limits that apply to this model.")
    ] = "",
    *,
    end_user: str | None,
    label: str | None,
) -> Output:
    """List limits, how much is left of each, and their ids. Needs an admin key.

    You see the limits of end users with `--end-user`, because there may be very many.
    """
    if sum(map(bool, (key, end_user, label))) > 1:
        raise typer.BadParameter("give one of --key, --end-user, --label")
    if key and organization:
        raise typer.BadParameter("give --org or --key, not both")
    if end_user or label:
        organization = organization_or_default(organization, client.address)
    found = (
        client.list_key_quotas(key, model)
        if key
        else list(client.list_quotas(organization, end_user=end_user or "", label=label or ""))
    )
    return found, limits(found, QUOTAS)


@quota.command("delete")
@calls(admin_client)
def delete_quota(
    client: AdminClient,
    quota_id: QuotaArgument,
    if_exists: Annotated[
        bool,
        typer.Option(
            "--if-exists", help="Succeed if it does not exist, for scripts that run again."
        ),
    ] = False,
) -> Output:
    """Remove a limit."""
    deleted = client.delete_quota(quota_id, allow_missing=if_exists)
    message = (
        f"removed limit {quota_id}"
        if deleted
        else f"limit {quota_id} does not exist: nothing was removed"
    )
    return {"quota_id": quota_id, "deleted": deleted}, message


end_users = typer.Typer(help="Show and erase your customers' own users.", no_args_is_help=True)


@end_users.command("list")
@calls(billing_client)
def list_end_users(
    client: BillingClient,
    organization: OrganizationOption = None,
    prefix: Annotated[
        str, typer.Option(help="Only names that begin like this, in upper and lower case as given.")
    ] = "",
    state: Annotated[
        str,
        typer.Option(help="Only those that are active, archived or erased.", metavar="STATE"),
    ] = "",
    limit: Annotated[int, typer.Option(help="Show at most this many.", min=1, max=100_000)] = 100,
) -> Output:
    """List the end users of an organization by name, with their usage of this month (UTC).

    The limit shown is the one of which the largest share is used.
    """
    owner = organization_or_default(organization, client.address)
    size = min(limit + 1, END_USERS_PAGE_SIZE)
    listed = client.list_end_users(
        owner,
        prefix=prefix,
        state=parsed("--state", parse_state, state) if state else None,
        with_usage=True,
        page_size=size,
    )
    found = list(islice(listed, limit + 1))
    more = [f"more than {limit:,}: narrow them with --prefix, or raise --limit"]
    return found[:limit], END_USERS.of(found[:limit]), *(more if len(found) > limit else [])


@end_users.command("show")
@calls(billing_client)
def show_end_user(
    client: BillingClient,
    end_user: Annotated[str, typer.Argument(help="Its name, as requests give it, or its id.")],
    organization: OrganizationOption = None,
) -> Output:
    """Show an end user: its usage of this month (UTC), its limits, and their remainders."""
    owner = organization_or_default(organization, client.address)
    found = client.get_end_user(end_user, organization=owner)
    about = END_USERS.of([found.end_user])
    return found, about, limits(found.quotas, QUOTAS_OF_ONE)


@end_users.command("erase")
@calls(admin_client)
def erase_end_user(
    client: AdminClient,
    end_user: Annotated[str, typer.Argument(help="Its name, as requests gave it.")],
    organization: OrganizationOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    if_exists: Annotated[
        bool,
        typer.Option(
            "--if-exists", help="Succeed if it does not exist, for scripts that run again."
        ),
    ] = False,
) -> Output:
    """Erase an end user's name for ever. Its usage stays in all sums and bills, without a name.

    Its limits end. Labels with the same value are removed from all requests of the organization.
    """
    owner = organization_or_default(organization, client.address)
    if not yes:
        if not has_terminal():
            raise typer.BadParameter("give --yes: there is no terminal to ask", param_hint="--yes")
        question = (
            f"Erase {end_user!r} of {owner}, its limits, and labels with this value, for ever?"
        )
        typer.confirm(question, abort=True, err=True)
    erased = client.erase_end_user(owner, end_user, allow_missing=if_exists)
    if not erased.erased:
        return erased, f"{owner} has no such end user: nothing was erased"
    return erased, (
        f"erased an end user of {owner}; limits that ended: {erased.limit_count}, requests that"
        f" lost a label: {erased.labelled_request_count}"
    )


def has_terminal() -> bool:
    """Return True if a person can answer a question."""
    return sys.stdin.isatty()


def changed(status: QuotaStatus) -> Output:
    narrowing = status.narrowed_by_quota_id
    remarks = (
        [f"this limit has no effect: the inherited limit {narrowing} always runs out first"]
        if narrowing
        else []
    )
    return status, limits([status], QUOTAS), *remarks


def limits(found: Sequence[QuotaStatus], table: Table[QuotaStatus]) -> RenderableType:
    """Draw limits. Among several on one dimension, the remark says which of them binds."""
    counts = Counter((each.dimension, each.window_minutes) for each in found)
    return table.of(
        [
            each
            if counts[each.dimension, each.window_minutes] > 1
            else replace(each, binding=False)
            for each in found
        ]
    )


def parse_dimension(text: str) -> QuotaDimension:
    """Parse the name of a dimension. Raises: typer.BadParameter with the valid names."""
    if text == QuotaDimension.PREPAID_CREDIT:
        raise typer.BadParameter(
            "prepaid credit is not a limit that you set: grant it with `weir credit grant`",
            param_hint="DIMENSION",
        )
    if text not in DIMENSIONS:
        raise typer.BadParameter(
            f"{text!r} is not one of {DIMENSION_NAMES}", param_hint="DIMENSION"
        )
    return QuotaDimension(text)


def parse_subject(
    organization: str | None, project: str | None, key: str | None
) -> tuple[QuotaSubject, str]:
    """Parse the owner of a limit. Raises: typer.BadParameter unless exactly one is given."""
    if key is not None and organization is None and project is None:
        return QuotaSubject.API_KEY, key
    if project is not None and key is None:
        return (
            QuotaSubject.PROJECT,
            project if organization is None else f"{organization}/{project}",
        )
    if organization is not None and key is None:
        return QuotaSubject.ORGANIZATION, organization
    raise typer.BadParameter("give one of --org, --project, --key")
