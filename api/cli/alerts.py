"""`weir alerts`: what alerted."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from weir_client import Alert, BillingClient, QuotaDimension

from api.cli.amounts import dimension_amount, thresholds_text, time_text
from api.cli.connection import AddressOption, KeyOption, billing_client
from api.cli.output import JsonOption, note, print_json, show
from api.cli.render import table

alerts = typer.Typer(help="Read alerts on limits and credit.", no_args_is_help=True)

PAGE_SIZE = 1000


@alerts.command("list")
def list_alerts(
    organization: Annotated[
        str, typer.Option("--org", help="Only of this organization, by name or id. Default: all that your key may see.")
    ] = "",
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=100_000, help="At most so many, the latest first.")] = 100,
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """List alerts, the latest first. A key for finance sees those of its own organization."""
    with billing_client(address, api_key) as client:
        found, has_more = read_alerts(client, organization, count)
    if as_json:
        print_json({"alerts": found, "has_more": has_more})
    elif found:
        show(alerts_table(found))
        if has_more:
            note(f"there are earlier ones: give --count more than {count}")
    else:
        note("nothing has alerted")


def read_alerts(client: BillingClient, organization: str, count: int) -> tuple[list[Alert], bool]:
    """So many at most, and whether there are more."""
    found: list[Alert] = []
    token = ""
    while True:
        page = client.list_alerts(organization, page_size=min(count - len(found), PAGE_SIZE), page_token=token)
        found += page.alerts
        token = page.next_page_token
        if not token or len(found) >= count:
            return found, bool(token)


def alerts_table(found: list[Alert]) -> RenderableType:
    """Alerts with what had been used when they were found."""
    made = table("found", "of", "limit on", "model", "alert", "used", "limit", "window", "id", right=("used", "limit"))
    for each in found:
        made.add_row(time_text(each.fire_time), *about(each), each.alert_id)
    return made


def about(alert: Alert) -> tuple[str, ...]:
    """What of a limit an alert tells, column by column."""
    if not alert.quota_id:
        return alert.organization_name, "—", "—", "test", "—", "—", "—"
    return (
        f"{alert.subject.value.replace('-', ' ')} {alert.subject_name}",
        alert.dimension.value,
        alert.model or "all",
        thresholds_text(alert.dimension, (alert.threshold,)),
        dimension_amount(alert.dimension, alert.used_value),
        dimension_amount(alert.dimension, alert.limit_value),
        window_text(alert),
    )


def window_text(alert: Alert) -> str:
    """Which day or month, UTC."""
    if alert.window_start_time is None:
        return "—"
    is_of_month = alert.dimension in (QuotaDimension.TOKENS_PER_MONTH, QuotaDimension.COST_PER_MONTH)
    return f"{alert.window_start_time:%Y-%m}" if is_of_month else f"{alert.window_start_time:%Y-%m-%d}"
