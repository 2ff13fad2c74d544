"""`weir quota`: limits of organizations, projects and keys, and what is left of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import AdminClient, Client, QuotaDimension, QuotaStatus, QuotaSubject

from api.cli.connection import Output, admin_client, calls, inference_client
from api.cli.render import (
    dimension_amount,
    duration_text,
    parse_limit,
    parse_span,
    parse_thresholds,
    parsed,
    table,
    thresholds_text,
    time_text,
)
from api.cli.tenants import restrictions

quota = typer.Typer(help="Set, show and remove limits.", no_args_is_help=True)

WeightOption = Annotated[
    int | None, typer.Option(min=0, max=1_000_000, help="Thousandths that such a token counts. Default: as it is; 1000 at first.")
]
DIMENSIONS = tuple(each for each in QuotaDimension if each is not QuotaDimension.UNSPECIFIED)


@quota.command("set")
@calls(admin_client)
def set_quota(
    client: AdminClient,
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
) -> Output:
    """Set one limit. A limit for the same subject, model and dimension is replaced, and what was used is counted."""
    kind = parse_dimension(dimension)
    limit = parsed("VALUE", parse_limit, kind, value)
    thresholds = None if alert_at is None else parsed("--alert-at", parse_thresholds, alert_at)
    subject, subject_ref = parse_subject(organization, project, key)
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
    return changed(status)


@quota.command("raise")
@calls(admin_client)
def raise_quota(
    client: AdminClient,
    quota_id: Annotated[str, typer.Argument(help="Id of the limit, as `weir quota list` shows it.")],
    value: Annotated[str | None, typer.Argument(help="The higher limit, as for `weir quota set`.")] = None,
    lasting: Annotated[str | None, typer.Option("--for", help="How long: 90m, 12h, 7d.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is shown with the limit and stands in the audit log.")] = "",
    end: Annotated[bool, typer.Option("--end", help="End a raise before its time.")] = False,
) -> Output:
    """Let a higher limit hold for a time, or end that."""
    if end == (value is not None) or end == (lasting is not None):
        raise typer.BadParameter("give a VALUE with --for and --reason, or --end alone")
    if value is None or lasting is None:
        status = client.end_quota_raise(quota_id)
    else:
        kind = next((each.dimension for each in client.list_quotas() if each.quota_id == quota_id), QuotaDimension.UNSPECIFIED)
        limit, span = parsed("VALUE", parse_limit, kind, value), parsed("--for", parse_span, lasting, "90m, 12h or 7d")
        status = client.raise_quota(quota_id, limit, datetime.now(UTC) + span, reason)
    return changed(status)


@quota.command("show")
@calls(inference_client)
def show_quotas(
    client: Client,
    model: Annotated[str, typer.Option("--model", help="Only limits that apply to this model.")] = "",
) -> Output:
    """Show every limit that applies to your own key, and what is left of it."""
    found, own = client.get_quota(model), client.get_restrictions()
    narrowed = "; ".join(f"{name} {value}" for name, value in restrictions(own))
    remarks = [f"key {own.prefix} is good for: {narrowed}"] if narrowed else []
    return found, quotas_table(found, ids=False) if found else "no limit applies to this key", *remarks


@quota.command("list")
@calls(admin_client)
def list_quotas(
    client: AdminClient,
    organization: Annotated[str, typer.Option("--org", help="Only limits of this organization, its projects and keys.")] = "",
    key: Annotated[
        str, typer.Option("--key", help="All limits that this key meets, by id or prefix, and which of them bind.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="With --key: only limits that apply to this model.")] = "",
) -> Output:
    """List limits as an admin, with what is left of them and their ids."""
    if key and organization:
        raise typer.BadParameter("give --org or --key, not both")
    found = client.list_key_quotas(key, model) if key else client.list_quotas(organization)
    return found, quotas_table(found) if found else "no limit is set"


@quota.command("delete")
@calls(admin_client)
def delete_quota(
    client: AdminClient,
    quota_id: Annotated[str, typer.Argument(help="Id of the limit, as `weir quota list` shows it.")],
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="Do nothing if it is gone, so that a script may be repeated.")
    ] = False,
) -> Output:
    """Remove one limit."""
    deleted = client.delete_quota(quota_id, allow_missing=if_exists)
    told = f"limit {quota_id} is removed" if deleted else f"there is no limit {quota_id}: nothing was removed"
    return {"quota_id": quota_id, "deleted": deleted}, told


def changed(status: QuotaStatus) -> Output:
    narrowing = status.narrowed_by_quota_id
    remarks = [f"this limit has no effect: {narrowing} further up always runs out first"] if narrowing else []
    return status, quotas_table([status]), *remarks


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
