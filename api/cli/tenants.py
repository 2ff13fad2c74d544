"""`weir org`, `weir project` and `weir key`: customers, their parts, and API keys. A secret is shown once, alone on stdout."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from weir_client import AdminClient, ApiKey, BillingProfile, KeyRestrictions, Organization, Project

from api.cli.connection import Output, admin_client, calls, organization_or_default, project_or_default
from api.cli.render import JsonOption, fail, note, parse_span, parsed, print_json, table, time_text

org = typer.Typer(help="Create and list organizations; set the addressee of their invoices.", no_args_is_help=True)
project = typer.Typer(help="Create and list projects.", no_args_is_help=True)

OrganizationOption = Annotated[str | None, typer.Option("--org", help="Organization, by name or id. Else that of `weir up`.")]

IfMissingOption = Annotated[bool, typer.Option("--if-missing", help="Do nothing if it exists, so that a script may be repeated.")]


@org.command("create")
@calls(admin_client)
def create_organization(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and -, starting with a letter.")],
    currency: Annotated[str, typer.Option(help="Currency of its bills, as ISO 4217 code.")] = "USD",
    if_missing: IfMissingOption = False,
) -> Output:
    """Create an organization: a customer with its own bill."""
    created = client.create_organization(name, currency_code=currency, allow_existing=if_missing)
    return created, organizations_table([created])


@org.command("list")
@calls(admin_client)
def list_organizations(client: AdminClient) -> Output:
    """List all organizations."""
    found = client.list_organizations()
    return found, organizations_table(found) if found else "there is no organization yet: `weir org create NAME`"


@org.command("billing")
@calls(admin_client)
def billing_profile(
    client: AdminClient,
    organization: Annotated[str, typer.Argument(help="Organization, by name or id.", metavar="ORG")],
    emails: Annotated[
        list[str] | None,
        typer.Option("--email", help="E-mail address; repeat for more. Stripe sends invoices to the first."),
    ] = None,
    legal_name: Annotated[str | None, typer.Option(help="Registered name, as documents are addressed to it.")] = None,
    address_line1: Annotated[str | None, typer.Option(help="Street and number.")] = None,
    address_line2: Annotated[str | None, typer.Option(help="Building, floor or department.")] = None,
    city: Annotated[str | None, typer.Option(help="City.")] = None,
    postal_code: Annotated[str | None, typer.Option(help="Postal code.")] = None,
    state: Annotated[str | None, typer.Option(help="State, province or region.")] = None,
    country: Annotated[str | None, typer.Option(help="ISO 3166-1 alpha-2 code, such as DE.")] = None,
    tax_id: Annotated[str | None, typer.Option(help="Tax id, as it is printed on documents.")] = None,
    language: Annotated[str | None, typer.Option(help="Language of Stripe's messages, such as de or pt-BR.")] = None,
) -> Output:
    """Show the addressee of an organization's invoices; with options, change those fields. Clear one with ''."""
    options = {
        "emails": None if emails is None else tuple(filter(None, emails)),
        "legal_name": legal_name,
        "address_line1": address_line1,
        "address_line2": address_line2,
        "city": city,
        "postal_code": postal_code,
        "state": state,
        "country": country,
        "tax_id": tax_id,
        "language": language,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    found = next((each for each in client.list_organizations() if organization in (each.name, each.organization_id)), None)
    if found is None:
        fail(f"there is no organization {organization!r}: see `weir org list`")
    if given:
        changed = replace(found.billing_profile or BillingProfile(), **given)
        found = client.set_billing_profile(found.organization_id, changed)
    if found.billing_profile is None:
        return found, f"{found.name} has no billing profile: give --email, --legal-name and the address"
    return found, profile_table(found.name, found.billing_profile)


@project.command("create")
@calls(admin_client)
def create_project(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and -, starting with a letter.")],
    organization: OrganizationOption = None,
    if_missing: IfMissingOption = False,
) -> Output:
    """Create a project: a part of an organization with its own keys and limits."""
    created = client.create_project(organization_or_default(organization, client.address), name, allow_existing=if_missing)
    return created, projects_table([created])


@project.command("list")
@calls(admin_client)
def list_projects(client: AdminClient, organization: OrganizationOption = None) -> Output:
    """List the projects of an organization."""
    found = client.list_projects(organization_or_default(organization, client.address))
    return found, projects_table(found) if found else "it has no project yet: `weir project create NAME --org ORG`"


def organizations_table(organizations: list[Organization]) -> RenderableType:
    rows = ((each.name, each.currency_code, time_text(each.create_time), each.organization_id) for each in organizations)
    return table("organization", "currency", "created", "id", rows=rows)


def profile_table(organization: str, profile: BillingProfile) -> RenderableType:
    made = table("field", "value", title=f"billing profile of {organization}")
    for name, value in asdict(profile).items():
        made.add_row(name.replace("_", " "), ", ".join(value) if name == "emails" else value or "—")
    return made


def projects_table(projects: list[Project]) -> RenderableType:
    rows = ((each.name, time_text(each.create_time), each.project_id, each.organization_id) for each in projects)
    return table("project", "created", "id", "organization id", rows=rows)


key = typer.Typer(help="Create, rotate, change, revoke and list API keys.", no_args_is_help=True)

ModelsOption = Annotated[
    list[str] | None, typer.Option(help="A model that it may use; may be given several times. None: every model.")
]
NetworksOption = Annotated[
    list[str] | None,
    typer.Option("--network", help="Network that it may be used from, as 203.0.113.0/24; may be given several times. None: all."),
]
InputTokensOption = Annotated[
    int | None, typer.Option("--max-input-tokens", min=0, help="Most tokens of one request's prompt or texts. 0: no limit.")
]
OutputTokensOption = Annotated[
    int | None, typer.Option("--max-output-tokens", min=0, help="Most output tokens of one request, all its choices. 0: no limit.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, or its prefix as shown.")]


@key.command("create")
@calls(admin_client)
def create_key(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="Name for people, for example the program that uses it.")],
    organization: OrganizationOption = None,
    project: Annotated[str | None, typer.Option("--project", help="Project, by name or id. Else that of `weir up`.")] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="inference, admin or billing; may be given several times. Default: inference.")
    ] = None,
    model: ModelsOption = None,
    network: NetworksOption = None,
    max_input_tokens: InputTokensOption = None,
    max_output_tokens: OutputTokensOption = None,
    expires_in: Annotated[str | None, typer.Option(help="How long it works, as 90m, 12h, 30d or 4w. Default: for ever.")] = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Do nothing if the project has a working key of this name and these scopes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create an API key. Its secret goes to stdout, once."""
    lifetime = parsed("--expires-in", parse_span, expires_in) if expires_in is not None else None
    created = client.create_api_key(
        organization_or_default(organization, client.address),
        project_or_default(project, client.address),
        name,
        scopes=scope or ("inference",),
        models=model or (),
        allowed_networks=network or (),
        max_input_tokens=max_input_tokens,
        max_output_tokens=max_output_tokens,
        lifetime=lifetime,
        allow_existing=if_missing,
    )
    if as_json:
        print_json(created)
        return
    made = created.api_key
    if created.existed:
        note(f"key {made.name} ({made.prefix}) is there already; its secret was shown once: `weir key rotate` makes another")
        return
    until = f" until {time_text(made.expire_time)}" if made.expire_time else ""
    limits = "".join(f", {name} {value}" for name, value in restrictions(made))
    note(f"key {made.name} ({made.prefix}) for {', '.join(made.scopes)}{limits}{until}, id {made.api_key_id}")
    show_secret(created.secret)


@key.command("rotate")
@calls(admin_client)
def rotate_key(
    client: AdminClient,
    api_key_ref: KeyArgument,
    overlap: Annotated[str, typer.Option(help="How long the present secret works on: 90m, 12h, 7d, or 0 to end it now.")] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret, shown once. The present one works on for the overlap; id, prefix, limits and counters stay."""
    span = timedelta(0) if overlap == "0" else parsed("--overlap", parse_span, overlap)
    rotated = client.rotate_api_key(api_key_ref, overlap=span)
    if as_json:
        print_json(rotated)
        return
    made = rotated.api_key
    until = f"works until {time_text(rotated.overlap_end_time)}" if span else "is refused from now on"
    note(f"key {made.name} ({made.prefix}) has a new secret; the old one {until}")
    show_secret(rotated.secret)


@key.command("update")
@calls(admin_client)
def update_key(
    client: AdminClient,
    api_key_ref: KeyArgument,
    name: Annotated[str | None, typer.Option(help="New name for people.")] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help="inference, admin or billing; may be given several times. Replaces all scopes.")
    ] = None,
    model: ModelsOption = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Let it use every model.")] = False,
    network: NetworksOption = None,
    all_networks: Annotated[bool, typer.Option("--all-networks", help="Let it be used from everywhere.")] = False,
    max_input_tokens: InputTokensOption = None,
    max_output_tokens: OutputTokensOption = None,
    expires_in: Annotated[str | None, typer.Option(help="Let it end in so long, as 90m, 12h, 30d or 4w; 0 ends it now.")] = None,
    never_expires: Annotated[bool, typer.Option("--never-expires", help="Let it work for ever.")] = False,
) -> Output:
    """Change name, end, or what a key is good for. What is not given stays."""
    given = (name, max_input_tokens, max_output_tokens, expires_in)
    if all(each is None for each in given) and not (scope or model or all_models or network or all_networks or never_expires):
        raise typer.BadParameter(
            "say what to change: --name, --scope, --model, --all-models, --network, --all-networks, --max-input-tokens, "
            "--max-output-tokens, --expires-in or --never-expires"
        )
    span = None if expires_in is None else timedelta(0) if expires_in == "0" else parsed("--expires-in", parse_span, expires_in)
    expire_time = None if span is None else datetime.now(UTC) + span
    changed = client.update_api_key(
        api_key_ref,
        name=name,
        scopes=scope or (),
        models=model or (),
        all_models=all_models,
        allowed_networks=network or (),
        all_networks=all_networks,
        max_input_tokens=max_input_tokens,
        max_output_tokens=max_output_tokens,
        expire_time=expire_time,
        never_expires=never_expires,
    )
    return changed, keys_table([changed], datetime.now(UTC))


@key.command("revoke")
@calls(admin_client)
def revoke_key(client: AdminClient, api_key_ref: KeyArgument) -> Output:
    """Revoke an API key for good, and end what runs with it, on every server. Doing it twice changes nothing."""
    revoked = client.revoke_api_key(api_key_ref)
    return revoked, f"key {revoked.name} ({revoked.prefix}) is revoked since {time_text(revoked.revoke_time)}"


@key.command("list")
@calls(admin_client)
def list_keys(
    client: AdminClient,
    organization: Annotated[str, typer.Option("--org", help="Only keys of this organization, by name or id.")] = "",
    unused_for: Annotated[
        str | None, typer.Option(help="Only working keys that nobody has used for so long, as 90m, 12h, 90d or 13w: to clean up.")
    ] = None,
) -> Output:
    """List API keys, newest first, without their secrets."""
    span = None if unused_for is None else parsed("--unused-for", parse_span, unused_for)
    found = client.list_api_keys(organization, unused_for=span)
    none = "there is no key" if span is None else f"no working key is known to be unused for {unused_for}"
    return found, keys_table(found, datetime.now(UTC)) if found else none


@key.command("show")
@calls(admin_client)
def show_key(client: AdminClient, api_key_ref: KeyArgument) -> Output:
    """Show all that is known of an API key but its secret."""
    found = client.list_api_keys(api_key=api_key_ref)
    return found[0], key_sheet(found[0], datetime.now(UTC))


def show_secret(secret: str) -> None:
    """A secret alone on stdout, with a warning beside it."""
    typer.secho("This is the only time that the secret is shown. Store it now:", fg="yellow", err=True)
    typer.echo(secret)


def key_state(key: ApiKey, now: datetime) -> str:
    if key.revoke_time is not None:
        return f"revoked {time_text(key.revoke_time)}"
    if key.expire_time is not None and key.expire_time <= now:
        return f"expired {time_text(key.expire_time)}"
    state = f"until {time_text(key.expire_time)}" if key.expire_time else "active"
    return f"{state}, two secrets until {time_text(key.overlap_end_time)}" if key.overlap_end_time else state


def use_text(key: ApiKey) -> str:
    """When a key was used last, as far as it is known."""
    if key.last_use_time is not None:
        return time_text(key.last_use_time)
    if key.use_known_since_time is None or key.use_known_since_time == key.create_time:
        return "never"
    return f"not since {time_text(key.use_known_since_time)}"


def restrictions(key: ApiKey | KeyRestrictions) -> list[tuple[str, str]]:
    found = [("models", " ".join(key.models))] if key.models else []
    if key.allowed_networks:
        found.append(("networks", " ".join(key.allowed_networks)))
    if key.max_input_tokens is not None:
        found.append(("max input tokens", f"{key.max_input_tokens:,}"))
    if key.max_output_tokens is not None:
        found.append(("max output tokens", f"{key.max_output_tokens:,}"))
    return found


def keys_table(keys: list[ApiKey], now: datetime) -> RenderableType:
    """Keys with their scopes and state at `now`."""
    made = table("key", "of", "prefix", "scopes", "models", "state", "created", "last used", "id")
    for each in keys:
        scopes, models = " ".join(each.scopes), " ".join(each.models) or "all"
        times = key_state(each, now), time_text(each.create_time), use_text(each)
        owner = f"{each.organization_name}/{each.project_name}"
        made.add_row(each.name, owner, each.prefix, scopes, models, *times, each.api_key_id)
    return made


def key_sheet(key: ApiKey, now: datetime) -> RenderableType:
    rows = (
        ("of", f"{key.organization_name}/{key.project_name}"),
        ("prefix", key.prefix),
        ("state", key_state(key, now)),
        ("scopes", " ".join(key.scopes)),
        *(restrictions(key) or [("restrictions", "none")]),
        ("created", time_text(key.create_time)),
        ("last used", use_text(key)),
        ("id", key.api_key_id),
        ("project id", key.project_id),
        ("organization id", key.organization_id),
    )
    return table("key", key.name, rows=rows)
