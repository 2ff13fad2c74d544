"""`weir usage`: table and chart of a key's usage at 80 columns, its JSON, and wrong options."""

from __future__ import annotations

import json

import pytest
from weir.v1 import types_pb2
from weir.v1 import usage_reports_pb2 as pb

from tests.cli.conftest import Run, ScriptedWeir

WIDTH = 80


def row(day: str, model: str = "") -> pb.UsageRow:
    """Return a row with large counts of each kind and of each end."""
    made = pb.UsageRow(day=day, model=model, request_count=99_999)
    for kind in ("input", "cached_input", "output", "reasoning", "embedding"):
        setattr(made, f"{kind}_token_count", 123_456_789)
    for end in (made.cancelled, made.limited, made.failed):
        end.request_count = 12_345
    made.cost.CopyFrom(types_pb2.Money(currency_code="USD", units=1234, picos=500_000_000_007))
    return made


def report(*rows: pb.UsageRow) -> pb.GetOwnUsageResponse:
    days = {"first_day": "2026-10-30", "last_day": "2026-11-02", "time_zone": "UTC"}
    return pb.GetOwnUsageResponse(rows=rows, total=row(""), **days)


def test_the_table_keeps_its_shape_and_names_columns_without_room(
    weir: Run, server: ScriptedWeir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    found = report(row("2026-10-30"), row("2026-11-02"))
    server.inference.replies["GetOwnUsageRequest"] = found

    lines = weir("usage --from 2026-10-30 --to 2026-11-02 --plot").stdout.splitlines()

    assert max(map(len, lines)) <= WIDTH
    assert sum(line.startswith((" 2026-", " total ")) for line in lines) == 3, "a line each"
    assert all("1,234.500000000007" in line for line in lines if line.startswith(" 2026-"))
    assert any("left out: " in line and "failed; --wide" in line for line in lines), lines
    assert any("tokens per day (UTC)" in line for line in lines)


def test_options_become_the_question(weir: Run, server: ScriptedWeir) -> None:
    server.inference.replies["GetOwnUsageRequest"] = report(row("", "demo"))

    shown = weir("usage 2026-10 --by model --model demo --all-keys --json").stdout
    plain = weir("usage 2026-10 --by model").stdout

    question = server.inference.requests[-2]
    groups = [pb.USAGE_GROUPING_MODEL]
    assert question == pb.GetOwnUsageRequest(
        project=True, month="2026-10", group_by=groups, model="demo"
    )
    assert json.loads(shown)["rows"][0]["cost"]["amount"] == "1234.500000000007"
    assert "failed" in plain, "a pipe has room for all columns"
    assert "tokens per day" not in plain


def test_end_users_and_labels_are_named_the_dearest_first(weir: Run, server: ScriptedWeir) -> None:
    rows = [row("") for _ in range(4)]
    for number, (each, end_user_id, end_user) in enumerate(
        zip(rows, ("", "id-1", "id-2", "id-3"), ("", "alice", "", "bob"), strict=True)
    ):
        each.end_user_id, each.end_user = end_user_id, end_user
        each.cost.picos += number
    server.inference.replies["GetOwnUsageRequest"] = report(*rows)

    shown = weir("usage --by end-user,label:team --label a=b=c --label d= --end-user alice").stdout

    question = server.inference.requests[-1]
    assert question == pb.GetOwnUsageRequest(
        group_by=[pb.USAGE_GROUPING_END_USER, pb.USAGE_GROUPING_LABEL],
        label_key="team",
        end_user="alice",
        labels={"a": "b=c", "d": ""},
    )
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    begins = ("end user team", "bob (not", "(erased) id-2", "alice (not", "(not given) (not")
    found = [line for line in lines if line.startswith(begins)]
    assert all(line.startswith(begin) for line, begin in zip(found, begins, strict=True)), found


def test_no_usage_is_a_line(weir: Run, server: ScriptedWeir) -> None:
    server.inference.replies["GetOwnUsageRequest"] = report()

    assert weir("usage").output == "this key, 2026-10-30 to 2026-11-02 (UTC): no usage\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--by project", "--by"),
        ("--by ''", "--by"),
        ("--by label", "--by"),
        ("--by label:", "--by"),
        ("--by label:KEY", "--by"),
        ("--by request", "--by"),
        ("--by day,day", "--by"),
        ("--by label:a,label:b", "--by"),
        ("--label team", "--label"),
        ("--label =x", "--label"),
        ("--label a=b --label a=c", "--label"),
        ("2026-13", "MONTH"),
        ("2026-10 --from 2026-10-01", "MONTH"),
        ("--to 2026-10-01", "--from"),
        ("--from yesterday", "--from"),
    ],
)
def test_wrong_options_are_refused_by_name(weir: Run, options: str, named: str) -> None:
    refused = weir(f"usage {options}")

    assert refused.exit_code == 2
    assert named in refused.output
