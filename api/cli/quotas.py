"""`weir quota`: limits of organizations, projects and keys, and what is left of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import QuotaDimension, QuotaStatus, QuotaSubject

from api.cli.connection import AddressOption, KeyOption, admin_client, inference_client
from api.cli.keys import restrictions
from api.cli.render import (
    JsonOption,
    dimension_amount,
    duration_text,
    note,
    parse_limit,
    parse_thresholds,
    print_json,
    show,
    table,
    thresholds_text,
    time_text,
)

quota = typer.Typer(help="Set, show and remove limits.", no_args_is_help=True)

WeightOption = Annotated[
    int | None, typer.Option(min=0, max=1_000_000, help="Thousandths that such a token counts. Default: as it is; 1000 at first.")
]
DIMENSIONS = tuple(each for each in QuotaDimension if each is not QuotaDimension.UNSPECIFIED)


@quota.command("set")
def set_quota(
    dimension: Annotated[str, typer.Argument(help=f"What to limit: {', '.join(DIMENSIONS)}.")],
    value: Annotated[str, typer.Argument(help="The limit; for money in units of the currency, such as 250.00. 0 lets nothing in.")],
    organization: Annotated[str | None, typer.Option("--org", help="Limit this organization, by name or id.")] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Limit this project: ORG/NAME, its id, or NAME beside --org.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Limit this key, by id or prefix.")] = None,
    model: Annotated[str, typer.Option("--model", help="Only for this model. Default: all models together.")] = "",
    input_weight: WeightOption = None,
    cached_weight: WeightOption = None,
    output_weight: WeightOption = None,
    enforce: Annotated[
        bool | None,
        typer.Option("--enforce/--watch", help="Refuse what does not fit, or only count and report. Default: as it is."),
    ] = None,
    new_keys: Annotated[
        bool, typer.Option("--new-keys", help="Limit nothing now: each key created under the subject from then on gets a copy.")
    ] = False,
    alert_at: Annotated[
        str | None,
        typer.Option(
            help="Percent of the limit at which it alerts, such as 50,80,100; or none. Default: as it is; these at first."
        ),
    ] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Set one limit. A limit for the same subject, model and dimension is replaced, and what was used is counted."""
    kind = parse_dimension(dimension)
    try:
        limit = parse_limit(kind, value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="VALUE") from error
    try:
        thresholds = None if alert_at is None else parse_thresholds(alert_at)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--alert-at") from error
    subject, subject_ref = parse_subject(organization, project, key)
    with admin_client(address, api_key) as client:
        status = client.set_quota(
            subject,
            subject_ref,
            kind,
            limit,
            model=model,
            input_weight_milli=input_weight,
            cached_input_weight_milli=cached_weight,
            output_weight_milli=output_weight,
            enforced=enforce,
            for_new_keys=new_keys,
            alert_at=thresholds,
        )
    show_one(status, as_json=as_json)


@quota.command("raise")
def raise_quota(
    quota_id: Annotated[str, typer.Argument(help="Id of the limit, as `weir quota list` shows it.")],
    value: Annotated[str | None, typer.Argument(help="The higher limit, as for `weir quota set`.")] = None,
    lasting: Annotated[str | None, typer.Option("--for", help="How long: 90m, 12h or 7d.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is shown with the limit and stands in the audit log.")] = "",
    end: Annotated[bool, typer.Option("--end", help="End a raise before its time.")] = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Let a higher limit hold for a time, or end that."""
    if end == (value is not None) or end == (lasting is not None):
        raise typer.BadParameter("give a VALUE with --for and --reason, or --end alone")
    with admin_client(address, api_key) as client:
        if value is None or lasting is None:
            status = client.end_quota_raise(quota_id)
        else:
            kind = next((each.dimension for each in client.list_quotas() if each.quota_id == quota_id), QuotaDimension.UNSPECIFIED)
            try:
                limit, until = parse_limit(kind, value), datetime.now(UTC) + parse_lasting(lasting)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            status = client.raise_quota(quota_id, limit, until, reason)
    show_one(status, as_json=as_json)


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
        own = None if as_json else client.get_restrictions()
    if own is None:
        print_json(found)
        return
    if found:
        show(quotas_table(found, ids=False))
    else:
        note("no limit applies to this key")
    if narrowed := restrictions(own):
        note(f"key {own.prefix} is good for: {'; '.join(f'{name} {value}' for name, value in narrowed)}")


@quota.command("list")
def list_quotas(
    organization: Annotated[str, typer.Option("--org", help="Only limits of this organization, its projects and keys.")] = "",
    key: Annotated[
        str, typer.Option("--key", help="All limits that this key meets, by id or prefix, and which of them bind.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="With --key: only limits that apply to this model.")] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List limits as an admin, with what is left of them and their ids."""
    if key and organization:
        raise typer.BadParameter("give --org or --key, not both")
    with admin_client(address, api_key) as client:
        found = client.list_key_quotas(key, model) if key else client.list_quotas(organization)
    if as_json:
        print_json(found)
    elif found:
        show(quotas_table(found))
    else:
        note("no limit is set")


@quota.command("delete")
def delete_quota(
    quota_id: Annotated[str, typer.Argument(help="Id of the limit, as `weir quota list` shows it.")],
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="Do nothing if it is gone, so that a script may be repeated.")
    ] = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Remove one limit."""
    with admin_client(address, api_key) as client:
        deleted = client.delete_quota(quota_id, allow_missing=if_exists)
    if as_json:
        print_json({"quota_id": quota_id, "deleted": deleted})
    else:
        note(f"limit {quota_id} is removed" if deleted else f"there is no limit {quota_id}: nothing was removed")


def show_one(status: QuotaStatus, *, as_json: bool) -> None:
    """A limit that was changed."""
    if as_json:
        print_json(status)
        return
    show(quotas_table([status]))
    if status.narrowed_by_quota_id:
        note(f"this limit has no effect: {status.narrowed_by_quota_id} further up always runs out first")


def parse_lasting(text: str) -> timedelta:
    """A length of time such as 90m, 12h or 7d. Raises: ValueError."""
    unit = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}.get(text[-1:])
    if unit is None or not text[:-1].isdecimal() or not 0 < int(text[:-1]) <= 1_000_000:
        raise ValueError(f"{text!r} is no length of time: give minutes, hours or days, such as 90m, 12h or 7d")
    return int(text[:-1]) * unit


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
    made = table("of", "limit on", "model", *numbers, "resets in", *(["alerts at", "id"] if ids else []), right=numbers)
    for each in quotas:
        values = (each.limit_value, each.used_value, each.held_value, each.remaining_value)
        made.add_row(
            f"{'new keys of ' if each.for_new_keys else ''}{each.subject.value.replace('-', ' ')} {each.subject_name}".rstrip(),
            each.dimension.value + remarks(each),
            each.model or "all",
            *(dimension_amount(each.dimension, value) for value in values),
            duration_text(each.reset_delay_s) if each.reset_delay_s is not None else "—",
            *([thresholds_text(each.dimension, each.alert_at) if each.alert_at else "—", each.quota_id] if ids else []),
        )
    return made


def remarks(each: QuotaStatus) -> str:
    """What is special about a limit, in parentheses; empty if nothing is."""
    said = []
    weights = (each.input_weight_milli, each.cached_input_weight_milli, each.output_weight_milli)
    if len({*weights, 1000}) > 1 and any(weights):
        said.append("weights " + "/".join(f"{weight / 1000:g}" for weight in weights))
    if each.raised_until_time is not None:
        usual = dimension_amount(each.dimension, each.standing_limit_value)
        said.append(f"raised from {usual} until {time_text(each.raised_until_time)}: {each.raise_reason}")
    if not each.enforced:
        said.append(f"only watching, would have refused {each.would_refuse_count:,}")
    if each.binding:
        said.append("binds")
    if each.narrowed_by_quota_id:
        said.append("without effect")
    return f" ({'; '.join(said)})" if said else ""
