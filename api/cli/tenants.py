"""`weir org`, `weir project` and `weir audit`: customers, their parts, and who changed what."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import AuditEntry, Organization, Project

from api.cli.amounts import time_text
from api.cli.connection import AddressOption, KeyOption, admin_client, organization_or_default
from api.cli.output import JsonOption, note, print_json, show
from api.cli.render import table

org = typer.Typer(help="Create and list organizations.", no_args_is_help=True)
project = typer.Typer(help="Create and list projects.", no_args_is_help=True)

OrganizationOption = Annotated[str | None, typer.Option("--org", help="Organization, by name or id. Else that of `weir up`.")]


@org.command("create")
def create_organization(
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9 and -, starting with a letter.")],
    currency: Annotated[str, typer.Option(help="Currency of its bills, as ISO 4217 code.")] = "USD",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Create an organization: a customer with its own bill."""
    with admin_client(address, api_key) as client:
        created = client.create_organization(name, currency_code=currency)
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
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Create a project: a part of an organization with its own keys and limits."""
    with admin_client(address, api_key) as client:
        created = client.create_project(organization_or_default(organization, client.address), name)
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


def audit(
    limit: Annotated[int, typer.Option(help="At most so many entries, 1 to 1000.", min=1, max=1000)] = 100,
    before: Annotated[int, typer.Option(help="Only entries before this number; for the next page.")] = 0,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Read who changed what, newest first."""
    with admin_client(address, api_key) as client:
        entries = client.list_audit_entries(page_size=limit, before_entry_id=before)
    if as_json:
        print_json(entries)
        return
    show(audit_table(entries))
    if len(entries) == limit:
        note(f"older entries: weir audit --before {entries[-1].entry_id}")


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


def audit_table(entries: list[AuditEntry]) -> RenderableType:
    """Changes, newest first, each with what became different."""
    made = table("entry", "time", "actor", "action", "subject", "change", right=("entry",))
    for each in entries:
        change = changed(each.before_json, each.after_json)
        made.add_row(str(each.entry_id), time_text(each.create_time), each.actor, each.action, each.subject_id, change)
    return made


def changed(before_json: str, after_json: str) -> str:
    """What a change made of an object: `limit_value: 10 → 20`; what a new one says; `removed`. Ids and times are in `--json`."""
    before, after = _object(before_json), _object(after_json)
    if not after:
        return "removed" if before else ""
    told = [name for name in after if name != "id" and not name.endswith(("_id", "_at", "_time")) and after[name] not in ("", None)]
    if not before:
        return ", ".join(f"{name}: {_word(after[name])}" for name in told)
    differing = [name for name in after if before.get(name) != after[name]]
    return ", ".join(f"{name}: {_word(before.get(name))} → {_word(after[name])}" for name in differing)


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {"value": text}
    return value if isinstance(value, dict) else {"value": value}


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
