"""`weir org`, `weir project`, `weir key` and `weir quota`: tenants, API keys and limits.

A secret is printed once, alone on stdout.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer
from weir_client import (
    BillingProfile,
    QuotaDimension,
    QuotaSubject,
)

from weir_cli.connection import (
    OrganizationOption,
    Output,
    admin_client,
    calls,
    inference_client,
    organization_or_default,
    project_or_default,
)
from weir_cli.render import JsonOption, fail, note, print_json, table
from weir_cli.terms import TERMS, options_of, restrictions, values_of
from weir_cli.texts import (
    dimension_amount,
    duration_text,
    parse_limit,
    parse_span,
    parsed,
    thresholds_text,
    time_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import (
        AdminClient,
        ApiKey,
        Client,
        Organization,
        Project,
        QuotaStatus,
    )

org = typer.Typer(
    help="Create and list organizations; set their billing profiles.", no_args_is_help=True
)
project = typer.Typer(help="Create and list projects.", no_args_is_help=True)

IfMissingOption = Annotated[
    bool, typer.Option("--if-missing", help="Do nothing if it exists, for repeatable scripts.")
]

DIMENSIONS = tuple(each for each in QuotaDimension if each is not QuotaDimension.UNSPECIFIED)


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
    return found, (
        organizations_table(found)
        if found
        else "no organizations: create one with `weir org create NAME`"
    )


@org.command("billing")
@calls(admin_client)
def billing_profile(
    client: AdminClient,
    organization: Annotated[
        str, typer.Argument(help="Organization, by name or id.", metavar="ORG")
    ],
    emails: Annotated[
        list[str] | None,
        typer.Option(
            "--email", help="E-mail address; repeat for more. Stripe sends invoices to the first."
        ),
    ] = None,
    legal_name: Annotated[
        str | None, typer.Option(help="Registered name, for the address on documents.")
    ] = None,
    address_line1: Annotated[str | None, typer.Option(help="Street and number.")] = None,
    address_line2: Annotated[
        str | None, typer.Option(help="Building, floor or department.")
    ] = None,
    city: Annotated[str | None, typer.Option(help="City.")] = None,
    postal_code: Annotated[str | None, typer.Option(help="Postal code.")] = None,
    state: Annotated[str | None, typer.Option(help="State, province or region.")] = None,
    country: Annotated[
        str | None, typer.Option(help="ISO 3166-1 alpha-2 code, such as DE.")
    ] = None,
    tax_id: Annotated[str | None, typer.Option(help="Tax id, as printed on documents.")] = None,
    language: Annotated[
        str | None, typer.Option(help="Language of Stripe's messages, such as de or pt-BR.")
    ] = None,
) -> Output:
    """Show an organization's billing profile; options change its fields. Clear one with ''."""
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
    found = next(
        (
            each
            for each in client.list_organizations()
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


@project.command("create")
@calls(admin_client)
def create_project(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and -, starting with a letter.")],
    organization: OrganizationOption = None,
    if_missing: IfMissingOption = False,
) -> Output:
    """Create a project: a subdivision of an organization with its own keys and limits."""
    created = client.create_project(
        organization_or_default(organization, client.address), name, allow_existing=if_missing
    )
    return created, projects_table([created])


@project.command("list")
@calls(admin_client)
def list_projects(client: AdminClient, organization: OrganizationOption = None) -> Output:
    """List the projects of an organization."""
    found = client.list_projects(organization_or_default(organization, client.address))
    return found, (
        projects_table(found)
        if found
        else "no projects: create one with `weir project create NAME --org ORG`"
    )


def organizations_table(organizations: list[Organization]) -> RenderableType:
    rows = (
        (each.name, each.currency_code, time_text(each.create_time), each.organization_id)
        for each in organizations
    )
    return table("organization", "currency", "created", "id", rows=rows)


def projects_table(projects: list[Project]) -> RenderableType:
    rows = (
        (each.name, time_text(each.create_time), each.project_id, each.organization_id)
        for each in projects
    )
    return table("project", "created", "id", "organization id", rows=rows)


key = typer.Typer(help="Create, rotate, change, revoke and list API keys.", no_args_is_help=True)

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="Id or prefix of the key.")]


@key.command("create")
@calls(admin_client, options=options_of(TERMS["key"]))
def create_key(
    client: AdminClient,
    name: Annotated[
        str, typer.Argument(help="Display name, for example of the program that uses it.")
    ],
    organization: OrganizationOption = None,
    project: Annotated[
        str | None,
        typer.Option("--project", help="Project, by name or id. Default: that of `weir up`."),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(help="Lifetime, as 90m, 12h, 30d or 4w. Default: unlimited.")
    ] = None,
    if_missing: Annotated[
        bool,
        typer.Option(
            "--if-missing",
            help="Do nothing if the project has an active key of this name and scopes.",
        ),
    ] = False,
    as_json: JsonOption = False,
    **terms: Any,
) -> None:
    """Create an API key. Its secret goes to stdout, once."""
    lifetime = parsed("--expires-in", parse_span, expires_in) if expires_in is not None else None
    created = client.create_api_key(
        organization_or_default(organization, client.address),
        project_or_default(project, client.address),
        name,
        lifetime=lifetime,
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
    note(
        f"key {made.name} ({made.prefix}) for {', '.join(made.scopes)}{limits}{until}, id"
        f" {made.api_key_id}"
    )
    show_secret(created.secret)


@key.command("rotate")
@calls(admin_client)
def rotate_key(
    client: AdminClient,
    api_key_ref: KeyArgument,
    overlap: Annotated[
        str,
        typer.Option(help="Remaining time of the old secret: 90m, 12h, 7d, or 0 to end it now."),
    ] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Replace the secret of a key; the new one is shown once. The old one works for the overlap.

    Id, prefix, limits and counters stay.
    """
    span = timedelta(0) if overlap == "0" else parsed("--overlap", parse_span, overlap)
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
@calls(admin_client, options=options_of(TERMS["key"]))
def update_key(
    client: AdminClient,
    api_key_ref: KeyArgument,
    name: Annotated[str | None, typer.Option(help="New display name.")] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Allow all models.")] = False,
    all_networks: Annotated[
        bool, typer.Option("--all-networks", help="Allow all networks.")
    ] = False,
    expires_in: Annotated[
        str | None, typer.Option(help="Expire after 90m, 12h, 30d or 4w; 0 expires it now.")
    ] = None,
    never_expires: Annotated[
        bool, typer.Option("--never-expires", help="Remove the expiry.")
    ] = False,
    **terms: Any,
) -> Output:
    """Change the name, expiry or permissions of a key. Omitted options stay unchanged."""
    given = values_of(TERMS["key"], terms)
    if not (given or all_models or all_networks or never_expires) and name is expires_in is None:
        flags = ", ".join(each.names.replace("/", ", ") for each in TERMS["key"])
        raise typer.BadParameter(
            f"give at least one of --name, {flags}, --all-models, --all-networks, --expires-in or"
            " --never-expires"
        )
    span = (
        None
        if expires_in is None
        else timedelta(0)
        if expires_in == "0"
        else parsed("--expires-in", parse_span, expires_in)
    )
    expire_time = None if span is None else datetime.now(UTC) + span
    changed = client.update_api_key(
        api_key_ref,
        name=name,
        all_models=all_models,
        all_networks=all_networks,
        expire_time=expire_time,
        never_expires=never_expires,
        **given,
    )
    return changed, keys_table([changed], datetime.now(UTC))


@key.command("revoke")
@calls(admin_client)
def revoke_key(client: AdminClient, api_key_ref: KeyArgument) -> Output:
    """Revoke an API key permanently, and end its running requests on all servers. Idempotent."""
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
        typer.Option(help="Only active keys that were not used for 90m, 12h, 90d or 13w."),
    ] = None,
) -> Output:
    """List API keys, newest first, without their secrets."""
    span = None if unused_for is None else parsed("--unused-for", parse_span, unused_for)
    found = client.list_api_keys(organization, unused_for=span)
    none = "no keys" if span is None else f"no active key is known to be unused for {unused_for}"
    return found, keys_table(found, datetime.now(UTC)) if found else none


@key.command("show")
@calls(admin_client)
def show_key(client: AdminClient, api_key_ref: KeyArgument) -> Output:
    """Show all properties of an API key except its secret."""
    found = client.list_api_keys(api_key=api_key_ref)
    return found[0], key_sheet(found[0], datetime.now(UTC))


def show_secret(secret: str) -> None:
    """Print a secret alone on stdout, with a warning on stderr."""
    typer.secho("The secret is shown only now. Store it:", fg="yellow", err=True)
    typer.echo(secret)


def key_state(key: ApiKey, now: datetime) -> str:
    if key.revoke_time is not None:
        return f"revoked {time_text(key.revoke_time)}"
    if key.expire_time is not None and key.expire_time <= now:
        return f"expired {time_text(key.expire_time)}"
    state = f"until {time_text(key.expire_time)}" if key.expire_time else "active"
    return (
        f"{state}, two secrets until {time_text(key.overlap_end_time)}"
        if key.overlap_end_time
        else state
    )


def use_text(key: ApiKey) -> str:
    """Format when a key was last used, as far as the server knows."""
    if key.last_use_time is not None:
        return time_text(key.last_use_time)
    if key.use_tracked_since_time is None or key.use_tracked_since_time == key.create_time:
        return "never"
    return f"not since {time_text(key.use_tracked_since_time)}"


def keys_table(keys: list[ApiKey], now: datetime) -> RenderableType:
    """Build a table of keys with their scopes, and their state at the time `now`."""
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
        *(list(restrictions(key)) or [("restrictions", "none")]),
        ("created", time_text(key.create_time)),
        ("last used", use_text(key)),
        ("id", key.api_key_id),
        ("project id", key.project_id),
        ("organization id", key.organization_id),
    )
    return table("key", key.name, rows=rows)


quota = typer.Typer(help="Set, show and remove limits.", no_args_is_help=True)


@quota.command("set")
@calls(admin_client, options=options_of(TERMS["quota"]))
def set_quota(
    client: AdminClient,
    dimension: Annotated[
        str, typer.Argument(help=f"Dimension of the limit: {', '.join(DIMENSIONS)}.")
    ],
    value: Annotated[
        str,
        typer.Argument(
            help="The limit; money in units of the currency, such as 250.00. 0 admits nothing."
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
        str, typer.Option("--model", help="Only for this model. Default: all models together.")
    ] = "",
    new_keys: Annotated[
        bool,
        typer.Option(
            "--new-keys",
            help="Set a default instead, copied to each key created under the subject from now on.",
        ),
    ] = False,
    **terms: Any,
) -> Output:
    """Set one limit, or replace that of the same subject, model and dimension.

    Past usage counts.
    """
    kind = parse_dimension(dimension)
    limit = parsed("VALUE", parse_limit, kind, value)
    subject, subject_ref = parse_subject(organization, project, key)
    status = client.set_quota(
        subject,
        subject_ref,
        kind,
        limit,
        model=model,
        for_new_keys=new_keys,
        **values_of(TERMS["quota"], terms),
    )
    return changed(status)


@quota.command("override")
@calls(admin_client)
def override_quota(
    client: AdminClient,
    quota_id: Annotated[
        str, typer.Argument(help="Id of the limit, as shown by `weir quota list`.")
    ],
    value: Annotated[
        str | None, typer.Argument(help="The higher limit, as for `weir quota set`.")
    ] = None,
    lasting: Annotated[str | None, typer.Option("--for", help="Duration: 90m, 12h, 7d.")] = None,
    reason: Annotated[
        str,
        typer.Option(
            "--reason", help="Reason, shown with the limit and recorded in the audit log."
        ),
    ] = "",
    end: Annotated[bool, typer.Option("--end", help="End the override early.")] = False,
) -> Output:
    """Override a limit with a higher one for a time, or end the override."""
    if end == (value is not None) or end == (lasting is not None):
        raise typer.BadParameter("give a VALUE with --for and --reason, or --end alone")
    if value is None or lasting is None:
        status = client.end_quota_override(quota_id)
    else:
        kind = next(
            (each.dimension for each in client.list_quotas() if each.quota_id == quota_id),
            QuotaDimension.UNSPECIFIED,
        )
        limit, span = (
            parsed("VALUE", parse_limit, kind, value),
            parsed("--for", parse_span, lasting, "90m, 12h or 7d"),
        )
        status = client.override_quota(quota_id, limit, datetime.now(UTC) + span, reason)
    return changed(status)


@quota.command("show")
@calls(inference_client)
def show_quotas(
    client: Client,
    model: Annotated[
        str, typer.Option("--model", help="Only limits that apply to this model.")
    ] = "",
) -> Output:
    """Show every limit that applies to your own key, with its remainder."""
    found, own = client.get_quota(model), client.get_restrictions()
    narrowed = "; ".join(f"{name} {value}" for name, value in restrictions(own))
    remarks = [f"key {own.prefix} is restricted to: {narrowed}"] if narrowed else []
    if (change := own.latest_change) is not None:
        what = "given more rights" if change.act == "widened" else change.act
        when = time_text(change.change_time)
        remarks.append(f"key {own.prefix} was {what} by {change.actor} at {when}")
    return (
        found,
        quotas_table(found, ids=False) if found else "no limits apply to this key",
        *remarks,
    )


@quota.command("list")
@calls(admin_client)
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
) -> Output:
    """List limits as an admin, with their remainders and ids."""
    if key and organization:
        raise typer.BadParameter("give --org or --key, not both")
    found = client.list_key_quotas(key, model) if key else client.list_quotas(organization)
    return found, quotas_table(found) if found else "no limits are set"


@quota.command("delete")
@calls(admin_client)
def delete_quota(
    client: AdminClient,
    quota_id: Annotated[
        str, typer.Argument(help="Id of the limit, as shown by `weir quota list`.")
    ],
    if_exists: Annotated[
        bool,
        typer.Option(
            "--if-exists", help="Do nothing if it does not exist, for repeatable scripts."
        ),
    ] = False,
) -> Output:
    """Remove one limit."""
    deleted = client.delete_quota(quota_id, allow_missing=if_exists)
    message = (
        f"removed limit {quota_id}"
        if deleted
        else f"limit {quota_id} does not exist: nothing was removed"
    )
    return {"quota_id": quota_id, "deleted": deleted}, message


def changed(status: QuotaStatus) -> Output:
    narrowing = status.narrowed_by_quota_id
    remarks = (
        [f"this limit has no effect: the inherited limit {narrowing} always runs out first"]
        if narrowing
        else []
    )
    return status, quotas_table([status]), *remarks


def parse_dimension(text: str) -> QuotaDimension:
    """Parse the name of a dimension. Raises: typer.BadParameter with the valid names."""
    if text not in DIMENSIONS:
        raise typer.BadParameter(
            f"{text!r} is not one of {', '.join(DIMENSIONS)}", param_hint="DIMENSION"
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


def quotas_table(quotas: list[QuotaStatus], *, ids: bool = True) -> RenderableType:
    numbers = ("limit", "used", "held", "left")
    made = table(
        "of",
        "limit on",
        "model",
        *numbers,
        "resets in",
        *(["alerts at", "id"] if ids else []),
        right=numbers,
    )
    for each in quotas:
        values = (each.limit_value, each.used_value, each.held_value, each.remaining_value)
        made.add_row(
            f"{'new keys of ' if each.for_new_keys else ''}{each.subject.value.replace('-', ' ')}"
            f" {each.subject_name}".rstrip(),
            each.dimension.value + remarks(each),
            each.model or "all",
            *(dimension_amount(each.dimension, value) for value in values),
            duration_text(each.reset_delay_s) if each.reset_delay_s is not None else "—",
            *(
                [
                    thresholds_text(each.dimension, each.alert_at) if each.alert_at else "—",
                    each.quota_id,
                ]
                if ids
                else []
            ),
        )
    return made


def remarks(each: QuotaStatus) -> str:
    """Format the special properties of a limit in parentheses; empty if it has none."""
    notes = []
    weights = (each.input_weight_milli, each.cached_input_weight_milli, each.output_weight_milli)
    if len({*weights, 1000}) > 1 and any(weights):
        notes.append("weights " + "/".join(f"{weight / 1000:g}" for weight in weights))
    if each.override_end_time is not None:
        regular = dimension_amount(each.dimension, each.base_limit_value)
        notes.append(
            f"temporary override of {regular} until {time_text(each.override_end_time)}:"
            f" {each.override_reason}"
        )
    if not each.enforced:
        notes.append(f"shadow mode, would have refused {each.would_refuse_count:,}")
    if each.binding:
        notes.append("binds")
    if each.narrowed_by_quota_id:
        notes.append("without effect")
    return f" ({'; '.join(notes)})" if notes else ""
