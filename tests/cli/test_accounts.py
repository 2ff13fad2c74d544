"""Commands of admins and finance: their requests, output and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from google.rpc import code_pb2, status_pb2
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import billing_service_pb2 as billing_pb
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import live_requests_pb2 as live_pb
from weir.v1 import months_pb2, prices_pb2, types_pb2
from weir.v1.closures_pb2 import REMAINING_CREDIT_REFUND
from weir_cli import months

from tests.cli.conftest import Run, ScriptedWeir, rows
from tests.cli.scripted_weir import LISTED, QUOTA, REPORT


def test_a_keys_secret_is_alone_on_stdout_with_a_warning(weir: Run, server: ScriptedWeir) -> None:
    result = weir(
        "key create laptop --org acme --project web --scope admin --model demo "
        "--expires-in 30d --network 203.0.113.0/24 --network 2001:db8::/32 "
        "--max-input-tokens 8000 --max-output-tokens 100 --strict-parameters"
    )

    assert result.stdout == "weir_ab12cd_topsecret\n"
    assert "The secret is shown only now" in result.stderr
    request = server.accounts.requests[0]
    assert request.organization == "acme"
    assert request.project == "web"
    assert list(request.scopes) == ["admin"]
    assert list(request.models) == ["demo"]
    assert list(request.allowed_networks) == ["203.0.113.0/24", "2001:db8::/32"]
    assert (request.max_input_tokens, request.max_output_tokens) == (8000, 100)
    assert request.strict_parameters
    assert request.lifetime.seconds == 30 * 86_400
    assert server.accounts.keys == ["Bearer weir_admin"]


def test_keys_are_listed_without_secrets_and_revoked(weir: Run) -> None:
    listed = weir("key list")
    revoked = weir("key revoke weir_ab12cd")

    assert (
        "laptop  acme/web  weir_ab12cd  inference  all     active  2026-11-20 12:00:00Z  never"
        in listed.stdout
    )
    assert "secret" not in listed.output
    assert revoked.stderr == "key laptop (weir_ab12cd) was revoked at 2026-11-20 12:00:00Z\n"
    assert json.loads(weir("key create k --org a --project b --json").stdout)["secret"]


def test_the_last_use_of_a_key_is_shown_as_far_as_known(weir: Run, server: ScriptedWeir) -> None:
    replies: Any = server.accounts.replies
    [key] = replies["ListApiKeys"].api_keys
    never = weir("key show weir_ab12cd").stdout
    key.use_tracked_since_time.FromJsonString("2026-11-21T00:00:00Z")
    unknown = weir("key show weir_ab12cd").stdout
    key.strict_parameters = True
    key.last_use_time.FromJsonString("2026-11-22T09:30:00Z")
    used = weir("key show weir_ab12cd").stdout
    reported = json.loads(weir("key show weir_ab12cd --json").stdout)
    unused = weir("key list --unused-for 90d")
    wrong = weir("key list --unused-for long")

    assert " last used        never" in never.splitlines()
    assert "not since 2026-11-21 00:00:00Z" in unknown
    assert "2026-11-22 09:30:00Z" in used
    assert " restrictions     none" in unknown.splitlines()
    assert " unknown parameters  refused" in used.splitlines()
    assert reported["strict_parameters"] is True
    assert reported["prefix"] == "weir_ab12cd"
    assert reported["last_use_time"] == "2026-11-22T09:30:00Z"
    assert "weir_ab12cd" in unused.stdout
    assert [request.api_key for request in server.accounts.requests] == ["weir_ab12cd"] * 4 + [""]
    assert server.accounts.requests[-1].unused_for.seconds == 90 * 86_400
    assert (wrong.exit_code, "90d" in wrong.stderr or "30d" in wrong.stderr) == (2, True)


def test_a_lifetime_must_be_readable(weir: Run) -> None:
    result = weir("key create laptop --org a --project b --expires-in soon")

    assert result.exit_code == 2
    assert "30d" in result.stderr


def test_organizations_and_projects(weir: Run, server: ScriptedWeir) -> None:
    assert "acme" in weir("org create acme --currency EUR").stdout
    assert "acme" in weir("org list").stdout
    assert "web" in weir("project create web --org acme").stdout
    assert json.loads(weir("project list --org acme --json").stdout)[0]["name"] == "web"

    created = server.accounts.requests[0]
    assert (created.name, created.currency_code, created.allow_existing) == ("acme", "EUR", False)
    assert (
        weir("org create acme --if-missing").exit_code
        == weir("project create web --if-missing --org a").exit_code
    )
    assert all(request.allow_existing for request in server.accounts.requests[-2:])
    assert weir("project list").exit_code == 2, "which organization is not known"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["cost-per-month", "1,250.50", "--org", "acme"],
            admin_pb.SetQuotaRequest(
                subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
                subject_ref="acme",
                dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_MONTH,
                limit_value=1_250_500_000_000_000,
            ),
        ),
        (
            ["tokens-per-minute", "100000", "--project", "acme/web", "--model", "demo"],
            admin_pb.SetQuotaRequest(
                subject=types_pb2.QUOTA_SUBJECT_PROJECT,
                subject_ref="acme/web",
                model="demo",
                dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE,
                limit_value=100_000,
            ),
        ),
        (
            ["concurrent-requests", "0", "--org", "acme", "--project", "web"],
            admin_pb.SetQuotaRequest(
                subject=types_pb2.QUOTA_SUBJECT_PROJECT,
                subject_ref="acme/web",
                dimension=types_pb2.QUOTA_DIMENSION_CONCURRENT_REQUESTS,
            ),
        ),
        (
            ["requests-per-minute", "60", "--key", "weir_ab12cd"],
            admin_pb.SetQuotaRequest(
                subject=types_pb2.QUOTA_SUBJECT_API_KEY,
                subject_ref="weir_ab12cd",
                dimension=types_pb2.QUOTA_DIMENSION_REQUESTS_PER_MINUTE,
                limit_value=60,
            ),
        ),
    ],
)
def test_a_limit_is_sent_exactly(
    weir: Run, server: ScriptedWeir, arguments: list[str], expected: object
) -> None:
    assert weir("quota", "set", *arguments).exit_code == 0

    assert server.accounts.requests == [expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bananas", "1", "--org", "a"], "'bananas' is not one of"),
        (["tokens-per-day", "1.5", "--org", "a"], "whole numbers"),
        (["tokens-per-day", "--org", "a", "--", "-1"], "0 or more"),
        (["tokens-per-day", "many", "--org", "a"], "not a number"),
        (["cost-per-month", "0.0000000000001", "--org", "a"], "finer than a pico"),
        (["cost-per-month", "9223373", "--org", "a"], "the largest limit is"),
        (["tokens-per-day", "1"], "one of --org, --project, --key"),
        (["tokens-per-day", "1", "--org", "a", "--key", "k"], "one of --org, --project, --key"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_before_it_is_sent(
    weir: Run, server: ScriptedWeir, arguments: list[str], message: str
) -> None:
    result = weir("quota", "set", *arguments)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert server.accounts.requests == []


def test_limits_are_shown_with_what_is_left(weir: Run, server: ScriptedWeir) -> None:
    own = weir("quota show --model demo")
    listed = json.loads(weir("quota list --org acme --json").stdout)

    assert [line.rstrip() for line in own.stdout.splitlines()][1:-1] == [
        (
            " of            limit on           model    limit        used   held         left "
            " resets in"
        ),
        f" {'─' * 90}",
        " organization  cost-per-month     demo    250.00  12.3456789   0.00  237.6543211  —",
        " project       tokens-per-minute  all    100,000      58,750  1,175       40,075  42 s",
    ]
    assert listed[1]["dimension"] == "tokens-per-minute"
    assert listed[1]["reset_time"] == "2026-11-20T12:00:00Z"
    assert server.inference.metadata["authorization"] == "Bearer weir_user"
    assert weir("quota", "delete", QUOTA.quota_id).exit_code == 0
    assert server.accounts.requests[-1].quota_id == QUOTA.quota_id


def test_a_price_per_million_becomes_whole_picos(weir: Run, server: ScriptedWeir) -> None:
    result = weir("price set demo --input 0.15 --output 0.6 --effective-time 2026-12-01")

    assert (
        "price version 2 of demo, interactive, from 2026-12-01 00:00:00Z on, in USD per million"
        " tokens: input 0.15" in result.stderr
    )
    assert "price version 3 of demo for acme, batch" in result.stderr
    request = server.accounts.requests[0]
    assert request.input_picos_per_token == 150_000
    assert request.cached_input_picos_per_token == 150_000
    assert request.output_picos_per_token == 600_000
    assert request.effective_time.seconds == 1_796_083_200
    assert not request.HasField("reasoning_picos_per_token"), "as output"
    thinking = ("--reasoning", "1.2")
    assert weir("price", "set", "demo", "--input", "1", "--output", "1", *thinking).exit_code == 0
    assert server.accounts.requests[1].reasoning_picos_per_token == 1_200_000
    assert weir("price set demo --input 0.0000001 --output 1").exit_code == 2
    assert json.loads(weir("price set demo --input 1 --output 1 --json").stdout)[0]["version"] == 2
    assert not request.HasField("batch_multiplier_milli")
    own = weir(
        "price set demo --input 1 --output 1 --org acme --batch-multiplier 0.5 --embedding 2"
    )
    requested = server.accounts.requests[-1]
    assert (own.exit_code, requested.organization) == (0, "acme")
    assert requested.batch_multiplier_milli == 500
    assert requested.embedding_picos_per_token == 2_000_000
    assert weir("price set demo --input 1 --output 1 --batch-multiplier 0.0005").exit_code == 2


@pytest.mark.usefixtures("wide_terminal")
def test_amount_payer_and_reason_are_one_call(weir: Run, server: ScriptedWeir) -> None:
    listed = weir("price list --org acme")
    history = weir("price list --org acme --history")
    ended = weir("price withdraw demo --org acme")

    assert [row for row in rows(listed.stdout) if " demo " in f" {row}"] == [
        "demo interactive 0.15 0.15 0.60 0.00 list 2026-12-01 2",
        "demo batch 0.075 0.075 0.30 0.00 acme 2026-11-20 12:00 3",
    ]
    assert listed.stdout.startswith("prices per million tokens · USD\n")
    assert server.accounts.requests[0].organization == "acme"
    ended_price = next(row for row in rows(history.stdout) if " ends " in row)
    assert ended_price.startswith("4 demo acme batch ends ")
    assert "acme pays the list price of demo from 2026-11-20 12:00:00Z on" in ended.stderr
    assert json.loads(weir("price list --json").stdout)["prices"][1]["source"] == "organization"


@pytest.mark.parametrize(
    ("columns", "heads"), [("80", "from since (UTC)"), ("60", "output embedding from")]
)
def test_a_price_list_keeps_prices_currency_and_source_on_a_narrow_terminal(
    weir: Run, monkeypatch: pytest.MonkeyPatch, columns: str, heads: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    shown = weir("price list --org acme").stdout

    assert shown.startswith("prices per million tokens · USD\n")
    assert heads in " ".join(shown.splitlines()[2].split())


def test_a_tier_that_inherits_its_price_leaves_room_for_the_time(
    weir: Run, server: ScriptedWeir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    server.accounts.replies["ListPrices"] = prices_pb2.ListPricesResponse(
        prices=[
            prices_pb2.AppliedPrice(
                model="demo-embedding",
                tier=tier,
                version=LISTED,
                source=prices_pb2.AppliedPrice.SOURCE_LIST,
            )
            for tier in (pb.SERVICE_TIER_INTERACTIVE, pb.SERVICE_TIER_BATCH)
        ]
    )

    shown = weir("price list").stdout

    assert "from since (UTC)" in " ".join(shown.splitlines()[2].split())
    assert "left out: as tier, version" in shown
    assert "interactive" in weir("price list --wide").stdout.splitlines()[5].rpartition("list")[2]


@pytest.mark.parametrize(
    "command", ["price list --currency eur", "price list --org euro", "price list --org o-2"]
)
def test_a_list_without_prices_names_the_currency(
    weir: Run, server: ScriptedWeir, command: str
) -> None:
    server.accounts.replies["ListPrices"] = prices_pb2.ListPricesResponse()
    server.accounts.replies["ListOrganizations"] = admin_pb.ListOrganizationsResponse(
        organizations=[
            admin_pb.Organization(organization_id="o-1", name="acme", currency_code="USD"),
            admin_pb.Organization(organization_id="o-2", name="euro", currency_code="EUR"),
        ]
    )

    assert weir(command).stderr == (
        "no price in EUR is in force: set one with `weir price set MODEL --currency EUR`\n"
    )


@pytest.mark.parametrize("command", ["month show", "month show 2031-01"])
def test_an_empty_month_says_so(weir: Run, server: ScriptedWeir, command: str) -> None:
    reply = billing_pb.GetMonthReportResponse(organization_name="acme", month="2031-01")
    reply.reconciliation.balanced = True
    server.accounts.replies["GetMonthReport"] = reply

    shown = weir(f"{command} --org acme")

    assert "acme has no usage and no charges in 2031-01\n" in shown.stderr
    month = next(each.month for each in server.accounts.requests if hasattr(each, "month"))
    assert month == (command.partition("show ")[2] or f"{months.present_day():%Y-%m}")


@pytest.mark.parametrize("amount", ["-5", "-0.50", "-.5"])
@pytest.mark.parametrize("command", ["credit grant acme", "quota set tokens-per-day"])
def test_a_negative_amount_is_not_an_unknown_option(weir: Run, command: str, amount: str) -> None:
    result = weir(f"{command} {amount}")

    assert result.exit_code == 2
    assert "must be above 0: write it without the minus sign" in " ".join(result.stderr.split())


def test_models_count_and_prices_are_listed(weir: Run) -> None:
    assert (
        "demo   LlamaForCausalLM    2,048  torch   0.15 USD      0.05 USD  0.60 USD"
        in weir("models").stdout
    )
    assert json.loads(weir("models --json").stdout)[0]["price"]["output_picos_per_token"] == 600_000
    assert weir("count Hi").stdout == "1,025 tokens of a context window of 2,048\n"
    assert json.loads(weir("count Hi --json").stdout) == {
        "input_token_count": 1025,
        "context_window_tokens": 2048,
    }


def test_the_audit_log_says_what_changed(weir: Run) -> None:
    result = weir("audit --limit 1")

    assert "quota.set" in result.stdout
    assert "limit value: 10 → 20" in result.stdout
    assert result.stderr == "older entries: weir audit --before 17\n"
    assert json.loads(weir("audit --json").stdout)[0]["actor"] == "weir_ab12cd"


def test_the_month_is_a_table_with_totals_counts_and_check(weir: Run) -> None:
    result = weir("month show 2026-11 --org acme")

    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "acme · 2026-11 (UTC) · USD before tax, rates per million tokens",
        "",
        " model  price  kind          requests  tokens  cancelled  rate     amount",
        " ────────────────────────────────────────────────────────────────────────",
        " demo   v1     input               50  41,450      2,475  0.15  0.0062175",
        " demo   v1     cached input        50   9,800        600  0.05  0.0004900",
        " demo   v1     output              50   7,121         71  0.60  0.0042726",
        "",
        " sum                                   58,371      3,146        0.0109801",
        "",
        "requests  50: 47 completed, 3 cancelled, 0 limited, 0 failed",
        "unrated   0 usage events are recorded but not included above yet",
        "check     usage 58,371 = ledger 58,371 + unrated 0 tokens: balanced",
        "draft invoice · acme · 2026-11 · USD, tax not included",
        "",
        " line                                       exact  amount",
        " ────────────────────────────────────────────────────────",
        " demo, input tokens, v1                 0.0062175    0.01",
        " demo, cached input tokens, v1          0.0004900    0.00",
        " demo, output tokens, v1                0.0042726    0.00",
        "",
        " rounding carried from previous months  0.0050000",
        " rounding carried to the next month     0.0040199",
        " rounding                                            0.01",
        " total                                  0.0200000    0.02",
        "",
    ]


def test_documents_of_a_month_are_written(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    content = b'{"month": "2026-11"}\r\n'
    server.accounts.replies["GetMonthDocument"] = months_pb2.GetMonthDocumentResponse(
        content=content
    )
    files = {form: tmp_path / f"month.{form}" for form in ("json", "csv")}

    shown = weir("month show 2026-11 --org acme --json")
    saved = [
        weir("month", "show", "2026-11", "--org", "acme", "--format", form, "-o", str(files[form]))
        for form in files
    ]

    requested = [
        each
        for each in server.accounts.requests
        if isinstance(each, months_pb2.GetMonthDocumentRequest)
    ]
    assert [each.format for each in requested] == [1, 1, 2]
    assert shown.stdout_bytes == files["json"].read_bytes() == files["csv"].read_bytes() == content
    assert [each.stderr for each in saved] == [f"{files[form]}: 22 bytes\n" for form in files]
    assert [each.exit_code for each in (shown, *saved)] == [0, 0, 0]


def test_a_closed_month_is_shown_with_its_invoice_and_a_file_has_the_same_table(
    weir: Run, server: ScriptedWeir, tmp_path: Path
) -> None:
    report = billing_pb.GetMonthReportResponse()
    report.CopyFrom(REPORT)
    report.invoice_number = "INV-000007"
    server.accounts.replies["GetMonthReport"] = report
    usd = types_pb2.Money(currency_code="USD")
    invoice = months_pb2.Invoice(
        number="INV-000007", total=usd, exact_total=usd, carried_in=usd, carried_out=usd
    )
    server.accounts.replies["GetInvoice"] = months_pb2.GetInvoiceResponse(invoice=invoice)

    shown = weir("month show 2026-11 --org acme").stdout
    weir("month", "show", "2026-11", "--org", "acme", "-o", str(tmp_path / "month.txt"))

    assert "0.0062175" in shown
    assert "invoice INV-000007" in shown
    assert "0.0062175" in (tmp_path / "month.txt").read_text()
    assert "invoice INV-000007" in (tmp_path / "month.txt").read_text()


def test_a_ledger_that_does_not_agree_is_no_success(weir: Run, server: ScriptedWeir) -> None:
    report = billing_pb.GetMonthReportResponse()
    report.CopyFrom(REPORT)
    report.unrated_event_count = 3
    report.reconciliation.ledger_token_count = 58_370
    report.reconciliation.balanced = False
    server.accounts.replies["GetMonthReport"] = report
    server.accounts.replies["GetMonthDocument"] = months_pb2.GetMonthDocumentResponse(
        content=b"month\n"
    )

    table = weir("month show 2026-11 --org acme")
    sheet = weir("month show 2026-11 --org acme --format csv")

    assert table.exit_code == sheet.exit_code == 1
    assert "usage 58,371 ≠ ledger 58,370 + unrated 0 tokens: OFF BY 1 TOKENS" in table.stdout
    assert "unrated   3 usage events" in table.stdout
    assert "3 usage events are not included yet" in sheet.stderr
    assert weir("month show 2026-13 --org acme").exit_code == 2


def test_the_trace_of_a_request(weir: Run) -> None:
    result = weir("trace 7f3c1d52-6f0e-4b1a-9a53-0d8c6f2b1e77")

    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        (
            "7f3c1d52-6f0e-4b1a-9a53-0d8c6f2b1e77 · demo · settled, STOP · admitted 2026-11-20"
            " 12:00:00Z"
        ),
        "agent=1",
        "",
        "auth             0.4 ms ▏                                  authenticate the key",
        "tokenize         2.1 ms ▏                                  tokenize the prompt",
        "admission        3.5 ms ▏                                  hold the tokens",
        "cold start       0.0 ms                                    start the engine",
        "queue           24.0 ms ▋                                  wait in the queue",
        "prefill        182.0 ms ████▍                              825 new, 200 cached",
        "decode       1,450.0 ms     █████████████████████████████▉ 9.7 ms a token",
        "client stall     0.0 ms                                    wait for the client",
        "settle           4.0 ms                                  █ write the usage",
        "first token    212.0 ms     ▲",
        "total        1,666.0 ms ──────────────────────────────────",
        "",
        "1,025 in (200 cached) · 150 out · 0.00022375 USD · TTFT 212 ms · 102.8 tokens/s",
    ]
    assert json.loads(weir("trace x --json").stdout)["timings"]["decode_ms"] == 1450


@pytest.mark.parametrize("refusal", [code_pb2.NOT_FOUND, code_pb2.PERMISSION_DENIED])
def test_a_request_of_another_project_is_traced_by_an_admins_key(
    weir: Run, server: ScriptedWeir, refusal: int
) -> None:
    """It is used when the other key knows no such request, or lacks the scope."""
    generation = pb.Generation(
        request_id="x", model="demo", state=pb.Generation.STATE_VOIDED, migration_count=2
    )
    server.accounts.replies["GetRequest"] = live_pb.GetRequestResponse(
        generation=generation,
        organization_name="acme",
        project_name="search",
        api_key_prefix="wk_copilot1",
    )
    server.inference.refusals.append((status_pb2.Status(code=refusal, message="no"), True))

    found, requested = weir("trace x"), server.accounts.keys[-1]
    direct = weir("trace x --project acme/search --json")

    assert requested == "Bearer weir_admin"
    assert "acme/search · wk_copilot1" in found.stdout
    assert "moved to another engine 2 times" in found.stdout
    assert "No timings: it ended before any billable work." in found.stdout
    assert json.loads(direct.stdout)["organization_name"] == "acme"
    assert server.accounts.requests[-1] == live_pb.GetRequestRequest(
        request_id="x", project="acme/search"
    )


def test_without_an_admins_key_an_unknown_request_is_unknown(
    weir: Run, server: ScriptedWeir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIR_ADMIN_KEY")
    server.inference.refusals.append(
        (status_pb2.Status(code=code_pb2.NOT_FOUND, message="request 'x' not found"), True)
    )

    result = weir("trace x")

    assert (result.exit_code, server.accounts.requests) == (1, [])
    assert "request 'x' not found" in result.stderr


def test_a_billing_profile_is_changed_field_by_field(weir: Run, server: ScriptedWeir) -> None:
    result = weir(
        "org billing acme --email a@acme.example --email b@acme.example --country DE --json"
    )

    assert result.exit_code == 0
    listed, changed = server.accounts.requests
    assert isinstance(listed, admin_pb.ListOrganizationsRequest)
    assert changed.organization == "00000000-0000-0000-0000-000000000009"
    assert list(changed.billing_profile.emails) == ["a@acme.example", "b@acme.example"]
    assert changed.billing_profile.country == "DE"
    assert changed.billing_profile.legal_name == "Acme GmbH"
    assert json.loads(result.stdout)["billing_profile"]["country"] == "DE"


def test_a_queue_weight_is_set_as_a_number_and_shown(weir: Run, server: ScriptedWeir) -> None:
    result = weir("org weight acme 2.5")
    refused = weir("org weight acme heavy")

    [changed] = server.accounts.requests
    assert (changed.organization, changed.queue_weight_milli) == ("acme", 2500)
    assert "2.5" in result.stdout
    assert refused.exit_code == 2
    assert "WEIGHT" in refused.stderr


def test_a_billing_profile_is_shown_and_an_unknown_organization_refused(
    weir: Run, server: ScriptedWeir
) -> None:
    shown = weir("org billing acme")
    refused = weir("org billing nobody --country DE")

    assert "Acme GmbH" in shown.stdout
    assert refused.exit_code == 1
    assert "organization 'nobody' does not exist" in refused.stderr
    assert not any(
        isinstance(each, admin_pb.SetBillingProfileRequest) for each in server.accounts.requests
    )


def test_an_organization_without_prices_in_its_currency_is_warned_of(
    weir: Run, server: ScriptedWeir
) -> None:
    """Its first request would be refused."""
    reply = server.accounts.replies["CreateOrganization"]
    assert isinstance(reply, admin_pb.CreateOrganizationResponse)
    reply.organization.currency_code = "EUR"
    server.accounts.replies["ListPrices"] = prices_pb2.ListPricesResponse()

    created = weir("org create acme --currency EUR")

    assert created.exit_code == 0
    assert "no EUR price is in force" in created.stderr
    assert "weir price set MODEL --currency EUR" in created.stderr
    assert [type(each) for each in server.accounts.requests] == [
        admin_pb.CreateOrganizationRequest,
        prices_pb2.ListPricesRequest,
    ]


def test_an_end_user_is_erased_after_a_confirmation(
    weir: Run, server: ScriptedWeir, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.accounts.replies["EraseEndUser"] = admin_pb.EraseEndUserResponse(
        erased=True, limit_count=2, labelled_request_count=5
    )
    unasked = weir("end-user erase alice --org acme")
    assert unasked.exit_code == 2
    assert "give --yes: there is no terminal to ask" in unasked.stderr
    monkeypatch.setattr("weir_cli.tenants.has_terminal", lambda: True)
    refused = weir("end-user", "erase", "alice", "--org", "acme", stdin="n\n")
    assert refused.exit_code == 1
    assert "Erase 'alice' of acme" in refused.stderr
    assert server.accounts.requests == []

    erased = weir("end-user", "erase", "alice", "--org", "acme", stdin="y\n")
    unattended = weir("end-user erase alice --org acme --yes --if-exists")

    text = "erased an end user of acme; limits that ended: 2, requests that lost a label: 5"
    assert text in erased.stderr + erased.stdout
    assert text in unattended.stderr + unattended.stdout
    confirmed, scripted = server.accounts.requests
    assert (confirmed.organization, confirmed.end_user, confirmed.allow_missing) == (
        "acme",
        "alice",
        False,
    )
    assert scripted.allow_missing


STATES = [
    ("org rename acme zenith", {"organization": "acme", "name": "zenith"}, "active"),
    ("org suspend acme --reason unpaid", {"organization": "acme", "reason": "unpaid"}, "unpaid"),
    ("org resume acme", {"organization": "acme"}, "active"),
    ("project rename web api --org acme", {"project": "acme/web", "name": "api"}, "active"),
    ("project suspend acme/web --reason unpaid", {"project": "acme/web"}, "unpaid"),
    (f"project resume {UUID(int=2)}", {"project": str(UUID(int=2))}, "active"),
]


@pytest.mark.parametrize(("command", "fields", "state"), STATES)
def test_tenants_are_renamed_suspended_and_resumed(
    weir: Run, server: ScriptedWeir, command: str, fields: dict[str, str], state: str
) -> None:
    result = weir(command)

    [request] = server.accounts.requests
    assert fields.items() <= {each.name: value for each, value in request.ListFields()}.items()
    assert state in result.stdout
    assert ("suspended 2026-11-20 12:00:00Z: unpaid" in result.stdout) == (state == "unpaid")


CLOSINGS = [
    (
        "org close acme --reason unpaid --credit refund --confirm acme",
        {"organization": "acme", "remaining_credit": REMAINING_CREDIT_REFUND},
        "as owed to the customer",
    ),
    ("project close web --org acme --reason unpaid --confirm web", {"project": "acme/web"}, ""),
]


@pytest.mark.parametrize(("command", "fields", "note"), CLOSINGS)
def test_tenants_are_closed_for_good(
    weir: Run, server: ScriptedWeir, command: str, fields: dict[str, object], note: str
) -> None:
    result = weir(command)

    preview, request = server.accounts.requests
    assert preview.validate_only
    assert not request.validate_only
    given = fields | {"reason": "unpaid", "confirm_name": command.split()[-1]}
    assert given.items() <= {each.name: value for each, value in request.ListFields()}.items()
    assert "closed 2026-11-20 12:00:00Z: unpaid" in result.stdout
    assert note in result.output


@pytest.mark.parametrize("command", ["org close acme", "project close web --org acme"])
def test_a_closing_shows_its_effects_and_needs_the_name(
    weir: Run, server: ScriptedWeir, command: str
) -> None:
    shown = weir(f"{command} --dry-run").output
    refused = weir(f"{command} --reason unpaid").output

    assert all(each.validate_only for each in server.accounts.requests)
    assert re.search(r"keys +3 +revoked", shown)
    assert (re.search(r"credit left +7\.00 USD", shown) is not None) == command.startswith("org")
    assert "--confirm" in refused


def test_a_suspension_needs_a_reason(weir: Run, server: ScriptedWeir) -> None:
    assert "--reason" in weir("org suspend acme").output
    assert not server.accounts.requests
