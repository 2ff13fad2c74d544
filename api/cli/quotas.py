"""`weir quota`: limits of organizations, projects and keys, and what is left of them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import QuotaDimension, QuotaStatus, QuotaSubject

from api.cli.amounts import dimension_amount, duration_text, parse_limit
from api.cli.connection import AddressOption, KeyOption, admin_client, inference_client
from api.cli.output import JsonOption, note, print_json, show
from api.cli.render import table

quota = typer.Typer(help="Set, show and remove limits.", no_args_is_help=True)

DIMENSIONS = tuple(each for each in QuotaDimension if each is not QuotaDimension.UNSPECIFIED)


@quota.command("set")
def set_quota(
    dimension: Annotated[str, typer.Argument(help=f"What to limit: {', '.join(DIMENSIONS)}.")],
    value: Annotated[
        str, typer.Argument(help="The limit; for cost-per-month in units of the currency, such as 250.00. 0 lets nothing in.")
    ],
    organization: Annotated[str | None, typer.Option("--org", help="Limit this organization, by name or id.")] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Limit this project: ORG/NAME, its id, or NAME beside --org.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Limit this key, by id or prefix.")] = None,
    model: Annotated[str, typer.Option("--model", help="Only for this model. Default: all models together.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Set one limit. A limit for the same subject, model and dimension is replaced, and what was used stays counted."""
    kind = parse_dimension(dimension)
    try:
        limit = parse_limit(kind, value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="VALUE") from error
    subject, subject_ref = parse_subject(organization, project, key)
    with admin_client(address, api_key) as client:
        status = client.set_quota(subject, subject_ref, kind, limit, model=model)
    if as_json:
        print_json(status)
    else:
        show(quotas_table([status]))


@quota.command("show")
def show_quotas(
    model: Annotated[str, typer.Option("--model", help="Only limits that apply to this model.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Show every limit that applies to your own key, and what is left of it."""
    with inference_client(address, api_key) as client:
        found = client.get_quota(model)
    if as_json:
        print_json(found)
    elif found:
        show(quotas_table(found, ids=False))
    else:
        note("no limit applies to this key")


@quota.command("list")
def list_quotas(
    organization: Annotated[str, typer.Option("--org", help="Only limits of this organization, its projects and keys.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List limits as an admin, with what is left of them and their ids."""
    with admin_client(address, api_key) as client:
        found = client.list_quotas(organization)
    if as_json:
        print_json(found)
    elif found:
        show(quotas_table(found))
    else:
        note("no limit is set")


@quota.command("delete")
def delete_quota(
    quota_id: Annotated[str, typer.Argument(help="Id of the limit, as `weir quota list` shows it.")],
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Remove one limit."""
    with admin_client(address, api_key) as client:
        client.delete_quota(quota_id)
    if as_json:
        print_json({"quota_id": quota_id, "deleted": True})
    else:
        note(f"limit {quota_id} is removed")


def parse_dimension(text: str) -> QuotaDimension:
    """A dimension by name. Raises: typer.BadParameter naming those that exist."""
    if text not in DIMENSIONS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DIMENSIONS)}", param_hint="DIMENSION")
    return QuotaDimension(text)


def parse_subject(organization: str | None, project: str | None, key: str | None) -> tuple[QuotaSubject, str]:
    """What a limit hangs on. Raises: typer.BadParameter unless it is exactly one thing."""
    if key is not None and organization is None and project is None:
        return QuotaSubject.API_KEY, key
    if project is not None and key is None:
        return QuotaSubject.PROJECT, project if organization is None else f"{organization}/{project}"
    if organization is not None and key is None:
        return QuotaSubject.ORGANIZATION, organization
    raise typer.BadParameter("say what to limit: one of --org, --project, --key")


def quotas_table(quotas: list[QuotaStatus], *, ids: bool = True) -> RenderableType:
    """Limits with what is used, held and left."""
    numbers = ("limit", "used", "held", "left")
    made = table("of", "limit on", "model", *numbers, "resets in", *(["id"] if ids else []), right=numbers)
    for each in quotas:
        values = (each.limit_value, each.used_value, each.held_value, each.remaining_value)
        made.add_row(
            f"{each.subject.value.replace('-', ' ')} {each.subject_name}".rstrip(),
            each.dimension.value,
            each.model or "all",
            *(dimension_amount(each.dimension, value) for value in values),
            duration_text(each.reset_delay_s) if each.reset_delay_s is not None else "—",
            *([each.quota_id] if ids else []),
        )
    return made
