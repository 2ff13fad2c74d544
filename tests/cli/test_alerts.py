"""`weir alerts`, and thresholds in other commands: requests and output."""

from __future__ import annotations

import json

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import admin_service_pb2, alerts_pb2, plans_pb2, types_pb2

from tests.cli.conftest import Run, ScriptedWeir

NOVEMBER = Timestamp(seconds=1793491200)  # 2026-11-01
MONEY = alerts_pb2.Alert(
    alert_id="a1",
    organization_name="acme",
    quota_id="q1",
    subject=types_pb2.QUOTA_SUBJECT_API_KEY,
    subject_name="wk_12345678",
    dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH,
    threshold=80,
    limit_value=250 * 10**12,
    used_value=201 * 10**12,
    currency_code="USD",
    window_start_time=NOVEMBER,
)
CREDIT = alerts_pb2.Alert(
    alert_id="a2",
    organization_name="acme",
    quota_id="q2",
    subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
    subject_name="acme",
    dimension=types_pb2.QUOTA_DIMENSION_PREPAID_CREDIT_PICOS,
    threshold=20 * 10**12,
    limit_value=500 * 10**12,
    used_value=480 * 10**12,
)


def test_alerts_are_listed_with_what_was_used_of_what(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["ListAlerts"] = alerts_pb2.ListAlertsResponse(
        alerts=[MONEY, CREDIT], next_page_token="more"
    )

    shown = weir("alerts list --org acme --count 2 --wide")
    as_json = weir("alerts list --json --count 2")

    assert server.accounts.requests[0] == alerts_pb2.ListAlertsRequest(
        organization="acme", page_size=2
    )
    reported = "wk_12345678", "cost-per-month", "80 %", "201.00 USD", "250.00 USD", "2026-11"
    for part in reported:
        assert part in shown.stdout
    assert "20.00 left" in shown.stdout
    assert "a2" in shown.stdout
    assert "--count more than 2" in shown.stderr
    document = json.loads(as_json.stdout)
    assert document["has_more"]
    assert [each["threshold"] for each in document["alerts"]] == [80, 20 * 10**12]


def test_thresholds_passed_at_once_are_one_row_with_its_time(
    weir: Run, server: ScriptedWeir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    passed = [alerts_pb2.Alert() for _ in range(4)]
    for at, (alert, threshold) in enumerate(zip(passed, (50, 100, 80, 50), strict=True)):
        alert.CopyFrom(MONEY)
        alert.alert_id, alert.threshold = f"b{at}", threshold
        alert.fire_time.seconds = NOVEMBER.seconds + (0 if at < 3 else 90)
    passed[3].quota_id = "q9"
    reply = alerts_pb2.ListAlertsResponse(alerts=passed)
    server.accounts.replies["ListAlerts"] = reply

    shown = weir("alerts list")
    listed = json.loads(weir("alerts list --json").stdout)["alerts"]

    rows = [" ".join(line.split()) for line in shown.stdout.splitlines() if "wk_1234" in line]
    assert [row.partition(" API key")[0] for row in rows] == ["2026-11-01", "2026-11-01 00:01"]
    assert "100, 80, 50 %" in rows[0]
    assert " 50 %" in rows[1]
    assert [each["alert_id"] for each in listed] == ["b0", "b1", "b2", "b3"]


@pytest.mark.usefixtures("wide_terminal")
def test_alerts_on_payments_are_listed_with_the_invoice(weir: Run, server: ScriptedWeir) -> None:
    due = types_pb2.Money(currency_code="USD", units=12, picos=340_000_000_000)
    invoice = alerts_pb2.AlertInvoice(
        stripe_invoice_id="in_1",
        month="2026-10",
        amount_due=due,
        amount_paid=types_pb2.Money(currency_code="USD"),
    )
    failed = alerts_pb2.Alert(
        alert_id="a3", organization_name="acme", kind="invoice_payment_failed", invoice=invoice
    )
    server.accounts.replies["ListAlerts"] = alerts_pb2.ListAlertsResponse(alerts=[failed])

    shown = weir("alerts list --wide")
    [reported] = json.loads(weir("alerts list --json").stdout)["alerts"]

    for part in ("organization acme", "invoice payment failed", "12.34 USD", "2026-10"):
        assert part in " ".join(shown.stdout.split())
    assert (reported["kind"], reported["invoice"]["month"]) == ("invoice_payment_failed", "2026-10")


@pytest.mark.parametrize(("given", "sent"), [("80,100", [80, 100]), ("none", []), (None, None)])
def test_thresholds_of_a_limit_are_sent(
    weir: Run, server: ScriptedWeir, given: str | None, sent: list[int] | None
) -> None:
    requested = weir(
        "quota",
        "set",
        "tokens-per-day",
        "1000",
        "--org",
        "acme",
        *(() if given is None else ("--alert-at", given)),
    )

    [request] = server.accounts.requests
    assert requested.exit_code == 0
    assert isinstance(request, admin_service_pb2.SetQuotaRequest)
    assert (list(request.alert_at.values) if request.HasField("alert_at") else None) == sent


def test_amounts_of_credit_are_sent_in_picos(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["SetPrepaid"] = plans_pb2.SetPrepaidResponse()

    requested = weir("credit prepaid acme --only --alert-remaining 100.00,0.5")

    [request] = server.accounts.requests
    assert requested.exit_code == 0
    assert list(request.alert_at.values) == [100 * 10**12, 5 * 10**11]


@pytest.mark.parametrize("given", ["half", "50,,80", "50.5", "-1"])
def test_an_invalid_percentage_is_never_sent(weir: Run, server: ScriptedWeir, given: str) -> None:
    refused = weir("quota", "set", "tokens-per-day", "1000", "--org", "acme", f"--alert-at={given}")

    assert refused.exit_code == 2
    assert "50,80,100" in refused.stderr
    assert server.accounts.requests == []


def test_a_webhooks_secret_is_alone_on_stdout_after_a_test(weir: Run, server: ScriptedWeir) -> None:
    webhook = alerts_pb2.AlertWebhook(
        organization_name="acme", url="https://e.com/", failure_count=2, last_error="answered 500"
    )
    failed = alerts_pb2.AlertDelivery(
        state=alerts_pb2.ALERT_DELIVERY_STATE_PENDING, attempt_count=2, last_error="answered 500"
    )
    server.accounts.replies["SetAlertWebhook"] = alerts_pb2.SetAlertWebhookResponse(
        webhook=webhook, secret="wh_1"
    )
    server.accounts.replies["ListAlertWebhooks"] = alerts_pb2.ListAlertWebhooksResponse(
        webhooks=[webhook]
    )
    server.accounts.replies["DeleteAlertWebhook"] = alerts_pb2.DeleteAlertWebhookResponse(
        deleted=True
    )
    sent = alerts_pb2.Alert(
        alert_id="t1",
        delivery=alerts_pb2.AlertDelivery(state=alerts_pb2.ALERT_DELIVERY_STATE_PENDING),
    )
    server.accounts.replies["TestAlertWebhook"] = alerts_pb2.TestAlertWebhookResponse(alert=sent)
    reported = alerts_pb2.Alert(alert_id="t1", delivery=failed)
    server.accounts.replies["ListAlerts"] = alerts_pb2.ListAlertsResponse(alerts=[reported])

    made = weir("alerts webhook set https://e.com/ --org acme")
    listed = weir("alerts webhook list")
    removed = weir("alerts webhook remove --org acme")
    tested = weir("alerts test --org acme")
    impatient = weir("alerts test --org acme --wait 0")

    assert made.stdout == "wh_1\n"
    assert "answered 500" in listed.stdout
    assert (removed.exit_code, tested.exit_code, impatient.exit_code) == (0, 1, 3)
    assert "pending after 2 attempts: answered 500" in tested.stderr
