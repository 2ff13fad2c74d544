"""`weir month` over all organizations: a failure stops no other one, and sets the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.rpc import code_pb2, status_pb2
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import months_pb2

from tests.cli.conftest import Run, ScriptedWeir

BROKEN = status_pb2.Status(code=code_pb2.INTERNAL, message="the server broke: incident 4711")
MONTH = months_pb2.Month(
    organization_name="acme", month="2026-10", state=months_pb2.MONTH_STATE_CLOSED
)


@pytest.fixture
def three(server: ScriptedWeir) -> ScriptedWeir:
    """Prepare three organizations; the server fails at the second."""
    names = ("acme", "bolt", "core")
    server.accounts.replies["ListOrganizations"] = admin_pb.ListOrganizationsResponse(
        organizations=[admin_pb.Organization(name=name) for name in names]
    )
    server.accounts.replies["CloseMonth"] = months_pb2.CloseMonthResponse(month=MONTH)
    server.accounts.refusals_of["bolt"] = BROKEN
    return server


def test_a_close_of_all_continues_after_an_error(weir: Run, three: ScriptedWeir) -> None:
    done = weir("month close 2026-10 --all-orgs")

    requested = [
        each.organization
        for each in three.accounts.requests
        if isinstance(each, months_pb2.CloseMonthRequest)
    ]
    assert requested == ["acme", "bolt", "core"]
    assert done.exit_code == 1
    assert "bolt: the server broke: incident 4711" in done.stderr
    assert "1 refused or failed, of 3 organizations" in done.stderr


def test_all_closed_exits_zero_and_a_forbidden_key_stops_it(weir: Run, three: ScriptedWeir) -> None:
    three.accounts.refusals_of.clear()
    assert weir("month close 2026-10 --all-orgs --before-first").exit_code == 0
    assert all(
        each.before_first
        for each in three.accounts.requests
        if isinstance(each, months_pb2.CloseMonthRequest)
    )
    three.accounts.requests.clear()
    three.accounts.refusals_of["acme"] = status_pb2.Status(
        code=code_pb2.PERMISSION_DENIED, message="it lacks the scope admin"
    )

    done = weir("month close 2026-10 --all-orgs")

    assert done.exit_code != 0
    assert (
        len(
            [
                each
                for each in three.accounts.requests
                if isinstance(each, months_pb2.CloseMonthRequest)
            ]
        )
        == 1
    )


def test_months_are_listed_with_their_payments(weir: Run, server: ScriptedWeir) -> None:
    payments = [
        months_pb2.InvoicePayment(stripe_invoice_id=id, state=state)
        for id, state in (
            ("in_1", months_pb2.PAYMENT_STATE_PAID),
            ("in_2", months_pb2.PAYMENT_STATE_FAILED),
        )
    ]
    reported = months_pb2.Month(
        month="2026-10", state=months_pb2.MONTH_STATE_CLOSED, payments=payments
    )
    server.accounts.replies["ListMonths"] = months_pb2.ListMonthsResponse(months=[reported])

    shown = weir("month list --org acme")
    [month] = json.loads(weir("month list --org acme --json").stdout)

    assert "failed, paid" in " ".join(shown.stdout.split())
    assert [(each["stripe_invoice_id"], each["state"]) for each in month["payments"]] == [
        ("in_1", "paid"),
        ("in_2", "failed"),
    ]


def test_a_format_that_does_not_exist_is_refused_with_the_formats(weir: Run) -> None:
    done = weir("month show 2026-10 --format xml")

    assert done.exit_code == 2
    assert "'xml' is not one of 'table', 'csv', 'json', 'focus', 'pdf'" in done.stderr
    assert "Value error" not in done.stderr


def test_pdf_is_a_format_and_its_own_option(weir: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first.pdf", tmp_path / "second.pdf"

    requested = weir(
        "month", "show", "2026-10", "--org", "acme", "--format", "pdf", "-o", str(first)
    )
    short = weir("month", "show", "2026-10", "--org", "acme", "--pdf", str(second))

    assert (requested.exit_code, short.exit_code) == (0, 0), requested.stderr
    assert first.read_bytes() == second.read_bytes() == b"first second"
