"""`weir org` and `weir project`: customers and their parts."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from weir_client import AdminClient, BillingProfile, Organization, Project

from api.cli.connection import Output, admin_client, calls, organization_or_default
from api.cli.render import fail, table, time_text

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
