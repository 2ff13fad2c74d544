"""`weir requests` and its kill command, key rotation, audit queries, and exit codes."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from weir.v1 import admin_service_pb2 as admin_pb
from weir.v1 import inference_service_pb2
from weir.v1 import live_requests_pb2 as pb

from tests.cli.conftest import Run, ScriptedWeir
from tests.cli.scripted_weir import COST, KEY, NOON, USAGE

ID = "7f3c1d52-6f0e-4b1a-9a53-0d8c6f2b1e77"
GONE = str(uuid.UUID(int=77))


def row(**fields: object) -> pb.LiveRequest:
    """Return a running request."""
    values = {
        "request_id": ID,
        "organization_name": "acme",
        "project_name": "search",
        "api_key_prefix": "wk_copilot1",
        "model": "demo",
        "phase": pb.REQUEST_PHASE_DECODE,
        "age": Duration(seconds=75),
        "input_token_count": 1025,
        "cached_input_token_count": 800,
        "delivered_token_count": 96,
        "tokens_per_second": 48.26,
        "leased_token_count": 128,
        "admit_time": NOON,
        "expire_time": NOON,
        "process_name": "node-3:4711",
    }
    return pb.LiveRequest(**(values | fields))  # type: ignore[arg-type]


VIEW = pb.ListLiveRequestsResponse(
    requests=[
        row(),
        row(
            request_id=GONE,
            phase=pb.REQUEST_PHASE_UNSPECIFIED,
            tokens_per_second=0,
            process_name="",
            process_id=GONE,
        ),
        row(
            request_id=str(uuid.UUID(int=5)),
            phase=pb.REQUEST_PHASE_QUEUED,
            admit_time=None,
            expire_time=None,
            tokens_per_second=0,
        ),
    ],
    organizations=[
        pb.LiveOrganization(
            name="acme",
            request_count=1200,
            hold_count=1100,
            held_token_count=1_253_000,
            tokens_per_second=4820.5,
        ),
        pb.LiveOrganization(
            name="bolt", request_count=4, hold_count=4, held_token_count=5000, tokens_per_second=0
        ),
    ],
    request_count=1204,
    unresponsive_process_ids=[GONE],
)


def test_live_requests_are_a_table_with_sums(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["ListLiveRequests"] = VIEW

    result = weir("requests --org acme --limit 3")

    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "",
        " id                                   project     key         model phase   age    in out"
        " tokens/s",
        f" {'─' * 97}",
        " 7f3c1d52-6f0e-4b1a-9a53-0d8c6f2b1e77 acme/search wk_copilot1 demo  decode 75 s 1,025  96"
        "     48.3",
        " 00000000-0000-0000-0000-00000000004d acme/search wk_copilot1 demo  ?      75 s 1,025  96"
        "        —",
        " 00000000-0000-0000-0000-000000000005 acme/search wk_copilot1 demo  queued 75 s 1,025  96"
        "        —",
        " left out: cached, lease, hold ends in, process; --wide shows all",
        "",
        "",
        " organization  requests  holds  tokens held  tokens/s",
        " ────────────────────────────────────────────────────",
        " acme             1,200  1,100    1,253,000   4,820.5",
        " bolt                 4      4        5,000       0.0",
        "",
        " all              1,204  1,104    1,258,000   4,820.5",
        "",
        "1,201 younger requests not shown: --limit, --org",
        f"no answer from process {GONE}: its requests have no phase, and the",
        "counts of their holds",
    ]
    assert server.accounts.requests == [
        pb.ListLiveRequestsRequest(organization="acme", page_size=3)
    ]


def test_the_wide_table_has_the_rest_and_json_has_all(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["ListLiveRequests"] = pb.ListLiveRequestsResponse(
        requests=[row()], organizations=VIEW.organizations, request_count=1
    )

    wide = weir("requests --wide").stdout
    document = json.loads(weir("requests --json").stdout)

    assert "cached" in wide
    assert "node-3:4711" in wide
    assert "hold ends in" in wide
    [request] = document["requests"]
    assert request["phase"] == "decode"
    assert request["expire_time"] == "2026-11-20T12:00:00Z"
    assert request["age_s"] == 75
    assert document["organizations"][0]["held_token_count"] == 1_253_000
    server.accounts.replies["ListLiveRequests"] = pb.ListLiveRequestsResponse()
    assert weir("requests").stderr == "no running requests\n"


@pytest.mark.parametrize(
    ("result", "exit_code", "reported"),
    [
        (
            pb.KillRequestResponse.RESULT_ENDED,
            0,
            f"request {ID} ended: 1,025 in (200 cached) · 150 out",
        ),
        (pb.KillRequestResponse.RESULT_ALREADY_ENDED, 0, f"request {ID} ended before"),
        (
            pb.KillRequestResponse.RESULT_PENDING,
            3,
            "the hold expires at 2026-11-20 12:00:00Z at the latest",
        ),
    ],
)
def test_ending_a_request_reports_what_came_of_it(
    weir: Run,
    server: ScriptedWeir,
    result: pb.KillRequestResponse.Result.ValueType,
    exit_code: int,
    reported: str,
) -> None:
    generation = inference_service_pb2.Generation(
        request_id=ID, model="demo", admit_time=NOON, usage=USAGE, cost=COST
    )
    server.accounts.replies["KillRequest"] = pb.KillRequestResponse(
        result=result, generation=generation, expire_time=NOON
    )

    killed = weir("requests", "kill", ID, "--project", "acme/search", "--reason", "it loops")
    as_json = weir("requests", "kill", ID, "--json")

    assert killed.exit_code == as_json.exit_code == exit_code
    assert reported in " ".join(killed.stderr.split())
    assert server.accounts.requests[0] == pb.KillRequestRequest(
        request_id=ID, project="acme/search", reason="it loops"
    )
    assert json.loads(as_json.stdout)["generation"]["usage"]["delivered_token_count"] == 150


def test_overdue_holds_fail_the_command_with_a_remedy(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["ExpireOverdueHolds"] = pb.ExpireOverdueHoldsResponse(expired_count=2)
    server.accounts.replies["ListLiveRequests"] = pb.ListLiveRequestsResponse()
    none = weir("requests stuck")
    ended = weir("requests stuck --end")
    server.accounts.replies["ListLiveRequests"] = VIEW
    some = weir("requests stuck")

    assert (none.exit_code, none.stderr) == (0, "no stuck holds\n")
    assert ended.stderr.splitlines() == ["ended 2 overdue holds", "no stuck holds"]
    assert some.exit_code == 3
    assert "weir requests stuck --end" in some.stderr
    assert " ago" in some.stdout
    assert server.accounts.requests[0].stuck_only
    assert json.loads(weir("requests stuck --json").stdout)["stuck_count"] == 1204


def test_a_rotated_secret_is_alone_on_stdout_with_expiry(weir: Run, server: ScriptedWeir) -> None:
    rotated = admin_pb.RotateApiKeyResponse(
        api_key=KEY, secret="weir_ab12cd_newsecret", overlap_end_time=NOON
    )
    server.accounts.replies["RotateApiKey"] = rotated

    day = weir("key rotate weir_ab12cd")
    now = weir("key rotate weir_ab12cd --overlap 0")
    wrong = weir("key rotate weir_ab12cd --overlap long")

    assert day.stdout == "weir_ab12cd_newsecret\n"
    assert "the old one works until 2026-11-20 12:00:00Z" in day.stderr
    assert "the old one is refused from now on" in now.stderr
    assert wrong.exit_code == 2
    assert [request.overlap.seconds for request in server.accounts.requests] == [86_400, 0]
    assert (
        json.loads(weir("key rotate k --json").stdout)["overlap_end_time"] == "2026-11-20T12:00:00Z"
    )


@pytest.mark.usefixtures("wide_terminal")
def test_a_key_is_changed_in_what_is_given(weir: Run, server: ScriptedWeir) -> None:
    ends = Timestamp(seconds=int((datetime.now(UTC) + timedelta(days=3)).timestamp()))
    changed = admin_pb.ApiKey(
        name="bot",
        prefix="weir_ab12cd",
        scopes=["inference"],
        create_time=NOON,
        overlap_end_time=ends,
    )
    server.accounts.replies["UpdateApiKey"] = admin_pb.UpdateApiKeyResponse(api_key=changed)

    result = weir("key update weir_ab12cd --scope inference --never-expires")
    soon = weir("key update weir_ab12cd --expires-in 30d")
    strict = weir("key update weir_ab12cd --strict-parameters")
    lenient = weir("key update weir_ab12cd --no-strict-parameters")

    assert "active, two secrets until" in " ".join(result.stdout.split())
    assert soon.exit_code == strict.exit_code == lenient.exit_code == 0
    first, second, *others = server.accounts.requests
    assert first == admin_pb.UpdateApiKeyRequest(
        api_key="weir_ab12cd", scopes=["inference"], never_expires=True
    )
    assert second.expire_time.ToDatetime(tzinfo=UTC) - datetime.now(UTC) > timedelta(days=29)
    assert not second.HasField("strict_parameters")
    assert [each.strict_parameters for each in others] == [True, False]
    assert all(each.HasField("strict_parameters") for each in others)
    assert weir("key update weir_ab12cd").exit_code == 2, "say what to change"


def test_an_existing_key_is_no_failure_and_has_no_secret(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["CreateApiKey"] = admin_pb.CreateApiKeyResponse(
        api_key=KEY, existed=True
    )

    result = weir("key create laptop --org acme --project web --if-missing")

    assert (result.exit_code, result.stdout) == (0, "")
    assert "exists; its secret" in result.stderr
    assert "weir key rotate" in result.stderr
    assert server.accounts.requests[0].allow_existing


def test_the_log_is_requested_by_each_of_its_filters(weir: Run, server: ScriptedWeir) -> None:
    given = ("--subject", "acme", "--actor", "wk_a", "--action", "quota.")
    weir("audit", *given, "--since", "2026-11-20", "--until", "2026-11-20T18:00:00+01:00")
    weir("audit --since 2h")
    wrong = weir("audit --since yesterday")

    first, second = server.accounts.requests
    assert (first.subject, first.actor, first.action_prefix) == ("acme", "wk_a", "quota.")
    assert first.start_time.ToJsonString() == "2026-11-20T00:00:00Z"
    assert first.end_time.ToJsonString() == "2026-11-20T17:00:00Z"
    assert (
        timedelta(hours=2)
        <= datetime.now(UTC) - second.start_time.ToDatetime(tzinfo=UTC)
        < timedelta(hours=3)
    )
    assert wrong.exit_code == 2
    assert "7d" in wrong.stderr
    server.accounts.replies["ListAuditEntries"] = admin_pb.ListAuditEntriesResponse()
    assert weir("audit").stderr == "no matching entries\n"
