"""`weir quota` and `weir quote`: requests and output."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import end_users_pb2, types_pb2
from weir.v1 import inference_service_pb2 as pb
from weir_cli.render import to_text
from weir_cli.tenants import QUOTAS, limits
from weir_cli.texts import quota_owner, quota_remarks
from weir_client import QuotaDimension, QuotaStatus, QuotaSubject

from tests.cli.conftest import Run, ScriptedWeir
from tests.cli.scripted_weir import QUOTA, QUOTE


def test_weights_watching_and_limits_for_new_keys_are_sent(weir: Run, server: ScriptedWeir) -> None:
    weighted = weir(
        "quota set input-tokens-per-minute 1000 --key k --input-weight 1000 "
        "--cached-weight 100 --watch"
    )
    kept = weir("quota set cost-per-day 2.5 --org acme --new-keys --enforce")

    assert (weighted.exit_code, kept.exit_code) == (0, 0)
    assert server.accounts.requests == [
        admin_pb.SetQuotaRequest(
            subject=types_pb2.QUOTA_SUBJECT_API_KEY,
            subject_ref="k",
            dimension=types_pb2.QUOTA_DIMENSION_INPUT_TOKENS_PER_MINUTE,
            limit_value=1000,
            input_weight_milli=1000,
            cached_input_weight_milli=100,
            enforced=False,
        ),
        admin_pb.SetQuotaRequest(
            subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
            subject_ref="acme",
            dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_DAY,
            limit_value=2_500_000_000_000,
            enforced=True,
            for_new_keys=True,
        ),
    ]


def test_a_limit_is_previewed_instead_of_set(weir: Run, server: ScriptedWeir) -> None:
    counts: dict[str, Any] = {"request_count": 1200, "refused_count": 30, "shortened_count": 2}
    server.accounts.replies["PreviewQuota"] = admin_pb.PreviewQuotaResponse(
        **counts,
        days=[admin_pb.PreviewedDay(day="2026-11-20", **counts)],
        members=[admin_pb.PreviewedMember(name="alice", **counts)],
        member_count=1,
        refused_member_count=1,
    )

    shown = weir("quota set cost-per-day 2.5 --org acme --each end-user --preview --watch")
    refused = weir("quota set cost-per-day 2.5 --org acme --new-keys --preview")

    assert server.accounts.requests == [
        admin_pb.PreviewQuotaRequest(
            subject=types_pb2.QUOTA_SUBJECT_ORGANIZATION,
            subject_ref="acme",
            dimension=types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_DAY,
            limit_value=2_500_000_000_000,
            for_each="end_user",
        )
    ]
    text = shown.stdout + shown.stderr
    assert "2026-11-20 1,200 30 2" in " ".join(text.split())
    assert "alice 1,200 30 2" in " ".join(text.split())
    assert "30 of 1,200 requests" in text
    assert "--new-keys" in refused.stderr


def test_end_users_labels_and_selectors_are_sent(weir: Run, server: ScriptedWeir) -> None:
    common = "quota set requests-per-minute 100"
    for options in (
        "--org acme --each end-user",
        "--project acme/web --each label:team",
        "--org acme --end-user alice",
        "--project web --org acme --label team=search",
    ):
        assert weir(f"{common} {options}").exit_code == 0

    sent = [
        (each.subject_ref, each.for_each, each.end_user, each.label)
        for each in server.accounts.requests
        if isinstance(each, admin_pb.SetQuotaRequest)
    ]
    assert sent == [
        ("acme", "end_user", "", ""),
        ("acme/web", "label:team", "", ""),
        ("acme", "", "alice", ""),
        ("acme/web", "", "", "team=search"),
    ]


def test_the_length_of_a_rolling_window_is_sent(weir: Run, server: ScriptedWeir) -> None:
    command = "quota set tokens-per-window 100000 --org acme"
    assert weir(f"{command} --minutes 300").exit_code == 0
    for minutes in (0, 44_641, 2**31, 2**63):
        assert weir(f"{command} --minutes {minutes}").exit_code == 2
    assert weir("quota set cost-per-lifetime 20 --org acme").exit_code == 0

    sent = [(each.dimension, each.window_minutes) for each in server.accounts.requests]
    assert sent == [
        (types_pb2.QUOTA_DIMENSION_TOKENS_PER_WINDOW, 300),
        (types_pb2.QUOTA_DIMENSION_COST_PICOS_PER_LIFETIME, 0),
    ]


@pytest.mark.parametrize("selector", ["end_user", "label:", "label", "key", "label=team"])
def test_a_wrong_selector_is_not_sent(weir: Run, server: ScriptedWeir, selector: str) -> None:
    result = weir("quota", "set", "tokens-per-day", "1", "--org", "acme", "--each", selector)

    assert (result.exit_code, server.accounts.requests) == (2, [])
    assert "label:team" in result.stderr


def test_a_refused_field_is_named_by_the_option_of_the_command(weir: Run) -> None:
    result = weir(f"key create k --org acme --project web --max-input-tokens {2**63}")

    assert result.exit_code == 1
    assert "--max-input-tokens: must be between -9,223" in result.stderr


def test_the_limits_of_one_end_user_or_label_are_requested(weir: Run, server: ScriptedWeir) -> None:
    assert weir("quota list --org acme --end-user alice").exit_code == 0
    assert weir("quota list --org acme --label team=search").exit_code == 0
    assert weir("quota list --org acme --label a=b --end-user alice").exit_code == 2
    assert weir("quota show --end-user alice --label team=search --label a=b=c").exit_code == 0
    assert weir("quota show --label team").exit_code == 2

    assert server.accounts.requests == [
        admin_pb.ListQuotasRequest(organization="acme", end_user="alice", page_size=100),
        admin_pb.ListQuotasRequest(organization="acme", label="team=search", page_size=100),
    ]
    requested = [each for each in server.inference.requests if isinstance(each, pb.GetQuotaRequest)]
    labels = {"team": "search", "a": "b=c"}
    assert requested[0] == pb.GetQuotaRequest(end_user="alice", labels=labels)


@pytest.mark.parametrize(
    ("fields", "owner", "remarks"),
    [
        ({"for_each": "end_user"}, "each end user of organization acme", ""),
        ({"for_each": "label:team"}, "each label team of organization acme", ""),
        (
            {"subject": QuotaSubject.END_USER, "within_name": "acme/web", "selector_id": "s"},
            "end user acme of acme/web",
            " (by selector)",
        ),
    ],
)
def test_a_table_says_whom_a_limit_concerns(
    fields: dict[str, Any], owner: str, remarks: str
) -> None:
    given: dict[str, Any] = {"subject": QuotaSubject.ORGANIZATION, "subject_name": "acme"}
    status = QuotaStatus(quota_id="q", **given | fields)

    assert (quota_owner(status), quota_remarks(status)) == (owner, remarks)


@pytest.mark.usefixtures("wide_terminal")
def test_end_users_are_listed_and_shown(weir: Run, server: ScriptedWeir) -> None:
    listed = weir("end-user list --org acme --prefix al --state active --limit 1")
    shown = weir("end-user show alice --org acme")
    as_json = json.loads(weir("end-user show alice --org acme --json").stdout)

    assert (listed.exit_code, shown.exit_code) == (0, 0)
    assert server.accounts.requests[:2] == [
        end_users_pb2.ListEndUsersRequest(
            organization="acme",
            prefix="al",
            state=end_users_pb2.END_USER_STATE_ACTIVE,
            page_size=2,
            with_usage=True,
        ),
        end_users_pb2.GetEndUserRequest(organization="acme", end_user="alice"),
    ]
    assert "alice" in listed.stdout
    assert "0.125 USD" in listed.stdout
    assert "83 % of tokens-per-day" in listed.stdout
    wrong = weir("end-user list --org acme --state gone")
    assert wrong.exit_code == 2
    assert "active, archived or erased" in " ".join(wrong.stderr.replace("│", " ").split())
    assert "alina" not in listed.stdout
    assert "--limit" in listed.stderr
    assert "2026-11-28" in shown.stdout
    assert "tokens-per-minute" in shown.stdout
    assert as_json["end_user"]["name"] == "alice"


@pytest.mark.usefixtures("wide_terminal")
def test_a_raise_is_sent_and_shown_with_end_and_reason(weir: Run, server: ScriptedWeir) -> None:
    before = datetime.now(UTC)

    raised = weir(
        "quota",
        "override",
        QUOTA.quota_id,
        "500,000",
        "--for",
        "12h",
        "--reason",
        "launch",
        "--wide",
    )
    ended = weir("quota", "override", QUOTA.quota_id, "--end", "--json")

    sent, end = (
        each for each in server.accounts.requests if isinstance(each, admin_pb.OverrideQuotaRequest)
    )
    assert (sent.quota_id, sent.limit_value, sent.reason) == (QUOTA.quota_id, 500_000, "launch")
    assert (
        timedelta(0)
        <= sent.expire_time.ToDatetime(tzinfo=UTC) - before - timedelta(hours=12)
        < timedelta(minutes=5)
    )
    assert end == admin_pb.OverrideQuotaRequest(quota_id=QUOTA.quota_id)
    shown = " ".join(raised.stdout.split())
    assert (
        "weights 1/0.1/4; temporary override of 100,000 until 2026-11-20 12:00:00Z: launch; without"
        " effect" in shown
    )
    assert "always runs out first" in raised.stderr
    assert json.loads(ended.stdout)["override_reason"] == "launch"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--end", "5"],
        ["5"],
        ["5", "--for", "12"],
        ["5", "--for", "0h"],
        ["5", "--for", "2w"],
        ["--for", "1h"],
        [],
    ],
)
def test_a_bad_raise_is_not_sent(weir: Run, server: ScriptedWeir, arguments: list[str]) -> None:
    result = weir("quota", "override", QUOTA.quota_id, *arguments)

    assert result.exit_code == 2
    assert not [
        each for each in server.accounts.requests if isinstance(each, admin_pb.OverrideQuotaRequest)
    ]


def test_the_limits_of_a_key_are_requested_by_its_name(weir: Run, server: ScriptedWeir) -> None:
    assert weir("quota list --key weir_ab12cd --model demo").exit_code == 0
    assert weir("quota list --key k --org acme").exit_code == 2

    assert server.accounts.requests == [
        admin_pb.ListQuotasRequest(api_key="weir_ab12cd", model="demo")
    ]


def test_a_quote_reports_tokens_money_and_limits(weir: Run, server: ScriptedWeir) -> None:
    request = "--max-output-tokens 1000 --end-user alice --label team=search"
    reported = weir(f"quote 'How far is the sea?' {request}")
    document = json.loads(weir("quote 'How far is the sea?' --json").stdout)

    assert reported.exit_code == 0
    assert (
        "1,025 input tokens, 200 of them probably cached; 150 output tokens expected, at most 1,000"
        in reported.stdout
    )
    assert "0.0009 USD expected, at most 0.004 USD (price version 3)" in reported.stdout
    assert "tokens-per-minute" in reported.stdout
    assert document["would_admit"] is True
    requested = next(
        each for each in server.inference.requests if isinstance(each, pb.QuoteRequest)
    )
    assert (requested.start.model, requested.start.max_output_tokens) == ("demo", 1000)
    assert (requested.start.end_user, dict(requested.start.labels)) == ("alice", {"team": "search"})


@pytest.mark.parametrize(
    ("retry_s", "advice"), [(41.2, "try again in 42 s"), (None, "waiting does not help")]
)
def test_a_quote_of_what_would_be_refused_says_so_and_exits_with_3(
    weir: Run, server: ScriptedWeir, retry_s: float | None, advice: str
) -> None:
    refused = pb.QuoteResponse()
    refused.CopyFrom(QUOTE)
    refused.would_admit = False
    refused.failing_quotas.append(QUOTA)
    if retry_s is not None:
        refused.retry_helps = True
        refused.retry_delay.FromMilliseconds(int(retry_s * 1000))
    server.inference.replies["QuoteRequest"] = refused

    result = weir("quote hello")

    assert result.exit_code == 3
    assert "would be refused by tokens per minute of the project" in result.stderr
    assert advice in result.stderr


def test_a_removal_reports_whether_it_removed_anything(weir: Run, server: ScriptedWeir) -> None:
    removed = weir("quota delete q1 --if-exists")
    server.accounts.replies["DeleteQuota"] = admin_pb.DeleteQuotaResponse(deleted=False)
    missing = weir("quota delete abc --if-exists")
    reported = weir("quota delete abc --if-exists --json")
    older = weir("quota delete q1")  # an older server, which omits the field, refuses

    assert "removed limit q1" in removed.output
    assert "limit abc does not exist: nothing was removed" in missing.output
    assert json.loads(reported.stdout) == {"quota_id": "abc", "deleted": False}
    assert "removed limit q1" in older.output
    assert [each.exit_code for each in (removed, missing, reported, older)] == [0, 0, 0, 0]


def test_prepaid_credit_is_granted_and_not_set(weir: Run, server: ScriptedWeir) -> None:
    refused = weir("quota set prepaid-credit 5 --org acme")

    assert refused.exit_code == 2
    assert "grant it with `weir credit grant`" in " ".join(refused.stderr.split())
    assert "prepaid-credit" not in weir("quota set --help").stdout
    assert server.accounts.requests == []


def test_binds_is_shown_only_where_several_limits_compete() -> None:
    month, other = status(QuotaDimension.TOKENS_PER_MONTH), status(QuotaDimension.COST_PER_MONTH)

    assert "binds" not in to_text(limits([month, other], QUOTAS))
    assert "binds" in to_text(limits([month, other, month], QUOTAS))


def status(dimension: QuotaDimension) -> QuotaStatus:
    return QuotaStatus(dimension=dimension, enforced=True, binding=True)
