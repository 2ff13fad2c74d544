"""`weir org` and `weir project`: customers and their parts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import Organization, Project

from api.cli.amounts import time_text
from api.cli.connection import AddressOption, KeyOption, admin_client, organization_or_default
from api.cli.output import JsonOption, note, print_json, show
from api.cli.render import table

org = typer.Typer(help="Create and list organizations.", no_args_is_help=True)
project = typer.Typer(help="Create and list projects.", no_args_is_help=True)

OrganizationOption = Annotated[str | None, typer.Option("--org", help="Organization, by name or id. Else that of `weir up`.")]

IfMissingOption = Annotated[bool, typer.Option("--if-missing", help="Do nothing if it exists, so that a script may be repeated.")]


@org.command("create")
def create_organization(
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and -, starting with a letter.")],
    currency: Annotated[str, typer.Option(help="Currency of its bills, as ISO 4217 code.")] = "USD",
    if_missing: IfMissingOption = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Create an organization: a customer with its own bill."""
    with admin_client(address, api_key) as client:
        created = client.create_organization(name, currency_code=currency, allow_existing=if_missing)
    if as_json:
        print_json(created)
    else:
        show(organizations_table([created]))


@org.command("list")
def list_organizations(as_json: JsonOption = False, address: AddressOption = None, api_key: KeyOption = None) -> None:
    """List all organizations."""
    with admin_client(address, api_key) as client:
        found = client.list_organizations()
    if as_json:
        print_json(found)
    elif found:
        show(organizations_table(found))
    else:
        note("there is no organization yet: `weir org create NAME`")


@project.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and -, starting with a letter.")],
    organization: OrganizationOption = None,
    if_missing: IfMissingOption = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Create a project: a part of an organization with its own keys and limits."""
    with admin_client(address, api_key) as client:
        created = client.create_project(organization_or_default(organization, client.address), name, allow_existing=if_missing)
    if as_json:
        print_json(created)
    else:
        show(projects_table([created]))


@project.command("list")
def list_projects(
    organization: OrganizationOption = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List the projects of an organization."""
    with admin_client(address, api_key) as client:
        found = client.list_projects(organization_or_default(organization, client.address))
    if as_json:
        print_json(found)
    elif found:
        show(projects_table(found))
    else:
        note("it has no project yet: `weir project create NAME --org ORG`")


def organizations_table(organizations: list[Organization]) -> RenderableType:
    """Customers with their currency."""
    made = table("organization", "currency", "created", "id")
    for each in organizations:
        made.add_row(each.name, each.currency_code, time_text(each.create_time), each.organization_id)
    return made


def projects_table(projects: list[Project]) -> RenderableType:
    """Projects of an organization."""
    made = table("project", "created", "id", "organization id")
    for each in projects:
        made.add_row(each.name, time_text(each.create_time), each.project_id, each.organization_id)
    return made
