"""`weir alerts`: alerts and their webhooks."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer
from weir_client import AlertDeliveryState, QuotaDimension

from weir_cli.commands import ExitCode
from weir_cli.connection import OnlyOrganizationOption, Output, admin_client, billing_client, calls
from weir_cli.render import JsonOption, Table, note, print_found, print_json, table
from weir_cli.tenants import show_secret
from weir_cli.texts import (
    Cell,
    dimension_amount,
    minute_text,
    money_text,
    subject_text,
    thresholds_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import AdminClient, Alert, AlertWebhook, BillingClient

alerts = typer.Typer(
    help="Read alerts about limits, credit and payments, or have them sent to a URL.",
    no_args_is_help=True,
)
webhook = typer.Typer(help="Have an organization's alerts sent to a URL.", no_args_is_help=True)
alerts.add_typer(webhook, name="webhook")

PAGE_SIZE = 1000
POLL_S = 0.5
OrganizationOption = Annotated[str, typer.Option("--org", help="Organization, by name or id.")]


ALERT_COLUMNS = (
    *("found (UTC)", "of", "limit on", "model", "alert"),
    *("used", "limit", "window", "webhook", "id"),
)
WEBHOOKS: Table[AlertWebhook] = Table(
    {
        "organization": "organization_name",
        "URL": "url",
        "since": "create_time",
        "waiting": lambda each: str(each.pending_count),
        "failures": lambda each: str(each.failure_count),
        "paused until": "pause_end_time",
        "last error": lambda each: each.last_error or None,
    },
    right=("waiting", "failures"),
    empty="there is no webhook",
    drop=("since", "paused until", "failures", "waiting"),
)


@alerts.command("list")
@calls(billing_client)
def list_alerts(
    client: BillingClient,
    organization: Annotated[
        str,
        typer.Option(
            "--org",
            help="Only this organization, by name or id. Default: all that your key may see.",
        ),
    ] = "",
    end_user: Annotated[
        str, typer.Option(help="Only alerts on the limits of this end user, by name or id.")
    ] = "",
    count: Annotated[
        int,
        typer.Option("--count", "-n", min=1, max=100_000, help="Show at most this many alerts."),
    ] = 100,
) -> Output:
    """List alerts, the latest first. With a billing key you see those of your organization."""
    size = min(count, PAGE_SIZE)
    found = client.list_alerts(organization, end_user=end_user, page_size=size)
    listed = list(islice(found, count + 1))
    has_more, listed = len(listed) > count, listed[:count]
    more = [f"there are earlier ones: give --count more than {count}"] if has_more else []
    return (
        {"alerts": listed, "has_more": has_more},
        alerts_table(listed) if listed else "no alerts",
        *more,
    )


@alerts.command("test")
@calls(admin_client, billing_client)
def send_test(
    admin: AdminClient,
    client: BillingClient,
    organization: OrganizationOption,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", min=0, max=600, help="Wait this many seconds for the first attempt."
        ),
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Send a test alert to an organization's webhook, and show whether it arrived."""
    sent = admin.test_alert_webhook(organization)
    deadline = time.monotonic() + wait_s
    while (delivery := sent.delivery) is not None and not (
        delivery.end_time or delivery.last_error
    ):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
        latest = islice(client.list_alerts(organization, page_size=PAGE_SIZE), PAGE_SIZE)
        sent = next((each for each in latest if each.alert_id == sent.alert_id), sent)
    print_found(sent, f"test {sent.alert_id}: {delivery_text(sent)}", as_json=as_json)
    if delivery is None or delivery.state is not AlertDeliveryState.DELIVERED:
        raise typer.Exit(
            ExitCode.FAILED
            if delivery is not None and delivery.last_error
            else ExitCode.NOT_ALL_DONE
        )


@webhook.command("set")
@calls(admin_client)
def set_webhook(
    client: AdminClient,
    url: Annotated[str, typer.Argument(help="URL to post to, such as https://example.com/alerts.")],
    organization: OrganizationOption,
    as_json: JsonOption = False,
) -> None:
    """Send an organization's alerts to a URL. You see the signing secret once, on stdout.

    If you set the same URL again, you get a new secret.
    """
    made = client.set_alert_webhook(organization, url)
    if as_json:
        print_json(made)
        return
    note(f"alerts of {made.webhook.organization_name} are posted to {made.webhook.url}")
    show_secret(made.secret)


@webhook.command("list")
@calls(admin_client, shown=WEBHOOKS)
def list_webhooks(
    client: AdminClient, organization: OnlyOrganizationOption = ""
) -> list[AlertWebhook]:
    """List webhooks, and the alerts that wait or could not be delivered."""
    return list(client.list_alert_webhooks(organization))


@webhook.command("remove")
@calls(admin_client)
def remove_webhook(
    client: AdminClient,
    organization: OrganizationOption,
    if_exists: Annotated[
        bool,
        typer.Option("--if-exists", help="Succeed if there is none, for scripts that run again."),
    ] = False,
) -> Output:
    """Stop sending an organization's alerts. Those that wait are dropped."""
    deleted = client.delete_alert_webhook(organization, allow_missing=if_exists)
    message = (
        f"removed the webhook of {organization}"
        if deleted
        else f"{organization} has no webhook: nothing was removed"
    )
    return {"organization": organization, "deleted": deleted}, message


def alerts_table(found: list[Alert]) -> RenderableType:
    """Build a table of alerts, with the usage when each was raised.

    One row has all thresholds that were passed together, the highest first, and the id of that one.
    """
    rows = (
        (minute_text(each[0].fire_time), *about(*each), deliveries_text(each), each[0].alert_id)
        for each in jumps(found)
    )
    drop = "id", "model", "window", "webhook", "limit", "used"
    return table(*ALERT_COLUMNS, right=("used", "limit"), rows=rows, drop=drop)


def jumps(found: list[Alert]) -> list[list[Alert]]:
    """Join the alerts of one limit that were raised at once, the furthest threshold first."""
    together: dict[object, list[Alert]] = {}
    for each in found:
        key = (each.quota_id, each.fire_time, each.used_value) if each.quota_id else each.alert_id
        together.setdefault(key, []).append(each)
    for alerts in together.values():
        is_of_credit = alerts[0].dimension is QuotaDimension.PREPAID_CREDIT
        alerts.sort(key=lambda alert: alert.threshold, reverse=not is_of_credit)
    return list(together.values())


def about(alert: Alert, *passed: Alert) -> tuple[Cell, ...]:
    """Format the cells of an alert that follow its time, from owner and dimension to window.

    `passed` are the alerts with the thresholds that were passed together with its own.
    """
    if alert.invoice is not None:
        paid, due = money_text(alert.invoice.amount_paid), money_text(alert.invoice.amount_due)
        what = "invoice", "—", alert.kind.replace("_", " ")
        return (f"organization {alert.organization_name}", *what, paid, due, alert.invoice.month)
    if alert.key is not None:
        what = "key", "—", alert.kind.replace("_", " ")
        return (f"key {alert.key.prefix}", *what, f"by {alert.key.changed_by}", "—", "—")
    if not alert.quota_id:
        return alert.organization_name, "—", "—", "test", "—", "—", "—"
    within = f" within {alert.within_name}" if alert.within_name else ""
    return (
        f"{subject_text(alert.subject)} {alert.subject_name}{within}",
        alert.dimension.value,
        alert.model or "all",
        thresholds_text(alert.dimension, [each.threshold for each in (alert, *passed)]),
        dimension_amount(alert.dimension, alert.used_value, alert.currency_code),
        dimension_amount(alert.dimension, alert.limit_value, alert.currency_code),
        window_text(alert),
    )


def window_text(alert: Alert) -> str:
    """Format the day, ISO week or month that an alert's window covers, in UTC."""
    if alert.window_start_time is None:
        return "—"
    formats = {"week": "%G-W%V", "month": "%Y-%m"}
    return alert.window_start_time.strftime(
        formats.get(alert.dimension.rpartition("-")[2], "%Y-%m-%d")
    )


def deliveries_text(alerts: list[Alert]) -> str:
    return "; ".join(dict.fromkeys(map(delivery_text, alerts)))


def delivery_text(alert: Alert) -> str:
    """Describe the delivery state of an alert."""
    if (delivery := alert.delivery) is None:
        return "none"
    after = f" after {delivery.attempt_count} attempts" if delivery.attempt_count > 1 else ""
    why = (
        f": {delivery.last_error}"
        if delivery.last_error and delivery.state is not AlertDeliveryState.DELIVERED
        else ""
    )
    return f"{delivery.state.value}{after}{why}"
