"""`weir month show` by dimension: groupings, sheets, files, forecast, and plots in any terminal."""

from __future__ import annotations

import csv
import io
import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console
from weir.v1 import usage_reports_pb2 as pb
from weir_cli import months as report_module
from weir_cli.render import to_text
from weir_cli.tables import DailyPlot, Day, daily_plot, short_count

from tests.cli.conftest import Run, ScriptedWeir, rows
from tests.cli.scripted_weir import FORECAST, USAGE_PAGE, usage_row

ACME = ("month", "show", "2026-11", "--org", "acme")

NOVEMBER = [Day(number, number * 1_000 if number <= 20 else None) for number in range(1, 31)]


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the date to 20 November 2026."""
    monkeypatch.setattr(report_module, "present_day", lambda: date(2026, 11, 20))


def requested(server: ScriptedWeir) -> pb.GetUsageRequest:
    """Return the latest request for usage."""
    request = server.accounts.requests[-1]
    assert isinstance(request, pb.GetUsageRequest)
    return request


def test_rows_by_day_with_early_ends_apart_and_the_total(weir: Run, server: ScriptedWeir) -> None:
    result = weir(*ACME, "--by", "day")

    lines = rows(result.stdout)
    assert lines[0] == "2026-11 (UTC) · amounts in USD, before tax"
    assert lines[1] == "day requests input cached output cancelled limited failed amount"
    assert "2026-11-03 10 3,000 1,500 1,500 1 0 0 0.00045" in lines
    assert lines[-1] == "total 10 171,000 85,500 85,500 1 0 0 0.02565"
    assert list(requested(server).group_by) == [pb.USAGE_GROUPING_DAY]
    assert requested(server).organization == "acme"


def test_groupings_and_filters_go_to_the_server(weir: Run, server: ScriptedWeir) -> None:
    weir(
        *ACME,
        "--by",
        "project, key",
        "--day",
        "2026-11-03",
        "--project",
        "search",
        "--key",
        "wk_12345678",
    )

    request = requested(server)
    assert list(request.group_by) == [pb.USAGE_GROUPING_PROJECT, pb.USAGE_GROUPING_API_KEY]
    assert request.day == "2026-11-03"
    assert request.project == "search"
    assert request.api_key == "wk_12345678"

    weir("month show 2026-11 --all-orgs --by org")
    assert requested(server).organization == ""

    weir(*ACME, "--by", "label:team,hour", "--end-user", "alice", "--label", "team=search")
    request = requested(server)
    assert list(request.group_by) == [pb.USAGE_GROUPING_LABEL, pb.USAGE_GROUPING_HOUR]
    assert (request.label_key, request.end_user) == ("team", "alice")
    assert dict(request.labels) == {"team": "search"}
    assert request.largest_first, "a table shows the first rows only"
    weir(*ACME, "--by", "label:team", "--format", "csv")
    assert not requested(server).largest_first


def test_a_sheet_names_end_users_and_labels_without_formulas(
    weir: Run, server: ScriptedWeir
) -> None:
    rows = [usage_row(10) for _ in range(3)]
    rows[1].end_user_id, rows[1].end_user, rows[1].label_value = "id-1", "=cmd()", "+a"
    rows[2].end_user_id, rows[2].label_value = "id-2", ""
    server.accounts.replies["GetUsage"] = pb.GetUsageResponse(rows=rows)

    by = ("--by", "end-user,label:team")
    sheet = csv.DictReader(io.StringIO(weir(*ACME, *by, "--format", "csv").stdout))
    found = [(row["end_user"], row["end_user_id"], row["label"]) for row in sheet]

    assert found == [
        ("(not given)", "", "(not given)"),
        ("'=cmd()", "id-1", "'+a"),
        ("(erased) id-2", "id-2", ""),
    ]


def test_a_sheet_has_all_pages_and_numbers(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(weir(*ACME, "--by", "day", "--format", "csv").stdout)))
    weir(*ACME, "--by", "day", "--format", "csv", "--output", str(tmp_path / "usage.csv"))
    document = json.loads(weir(*ACME, "--by", "day", "--json").stdout)

    assert len(rows) == len(USAGE_PAGE.rows) == len(document["rows"])
    assert rows[2]["day"] == "2026-11-03"
    assert rows[2]["time_zone"] == "UTC"
    assert rows[2]["input_token_count"] == "3000"
    assert rows[2]["cancelled_token_count"] == "7"
    assert Decimal(rows[2]["cancelled_amount"]) == Decimal("0.00000105")
    assert document["total"]["amount"]["picos"] == 25_650_000_000
    assert document["total"]["amount"]["currency_code"] == "USD"
    assert list(csv.DictReader(io.StringIO((tmp_path / "usage.csv").read_text()))) == rows


def test_a_sheet_fetches_all_pages_and_a_table_says_more(weir: Run, server: ScriptedWeir) -> None:
    server.accounts.replies["GetUsage"] = pb.GetUsageResponse(
        rows=USAGE_PAGE.rows, next_page_token="more"
    )

    table = weir(*ACME, "--by", "request")

    assert "--format csv has them all" in table.stderr
    assert len(server.accounts.requests) == 1


@pytest.mark.usefixtures("wide_terminal")
def test_late_and_pending_usage_is_marked(weir: Run, server: ScriptedWeir) -> None:
    late = usage_row(10, day="2026-10-31", late=True)
    late.pending_amount.picos = 600_000
    server.accounts.replies["GetUsage"] = pb.GetUsageResponse(rows=[late], total=late)

    result = weir(*ACME, "--by", "day")

    assert "2026-10-31 (late)" in result.stdout
    assert "pending" in result.stdout
    assert "0.0000006" in result.stdout


def test_the_invoice_and_focus_are_written(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    named = weir(*ACME, "--pdf", str(tmp_path / "nov.pdf"))
    weir(*ACME, "--pdf", str(tmp_path))
    piped = weir(*ACME, "--format", "focus")
    nowhere = weir(*ACME, "--pdf", str(tmp_path / "no" / "where.pdf"))

    assert (
        (tmp_path / "nov.pdf").read_bytes()
        == (tmp_path / "acme.bin").read_bytes()
        == b"first second"
    )
    assert "12 bytes" in named.stderr
    assert (named.stdout, piped.stdout) == ("", "first second")
    assert [each.format for each in server.accounts.requests] == [1, 1, 2, 1]
    weir(*ACME, "--format", "focus", "--tags", "end-user,label:team")
    tagged = server.accounts.requests[-1]
    assert (list(tagged.tag_label_keys), tagged.tag_end_user) == (["team"], True)
    assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (1, True)


def test_the_forecast_of_this_month_is_shown_with_basis(weir: Run, server: ScriptedWeir) -> None:
    result = weir(*ACME)
    alone = weir("month forecast --org acme")

    for reported in (result.stdout, alone.stdout):
        text = " ".join(reported.split())
        assert "so far 1,234.5678 USD until 2026-11-20 12:00:00Z" in text
        assert (
            "forecast 2,000.00 USD by the end of 2026-11 (1,900.00 to 2,100.50 in 80 of 100 cases)"
            in text
        )
        assert "Used so far, plus the mean. No trend." in text
    assert "forecast" not in weir("month show 2026-10 --org acme").stdout


def test_without_history_no_forecast_is_claimed(weir: Run, server: ScriptedWeir) -> None:
    bare = pb.GetForecastResponse()
    bare.CopyFrom(FORECAST)
    for name in ("expected", "low", "high"):
        bare.ClearField(name)
    server.accounts.replies["GetForecast"] = bare

    assert "no forecast yet" in weir("month forecast --org acme").stdout


def test_wrong_options_are_refused_before_any_request(weir: Run, server: ScriptedWeir) -> None:
    for wrong in (
        ("--by", "week"),
        ("--by", "label"),
        ("--end-user", "alice"),
        ("--label", "team=search"),
        ("--by", "day", "--label", "team"),
        ("--tags", "end-user"),
        ("--tags", "day", "--format", "focus"),
        ("--by", "day", "--pdf", "x"),
        ("--by", "day", "--format", "focus"),
        ("--day", "2026-11-01"),
        ("--all-orgs", "--by", "org"),
    ):
        assert weir(*ACME, *wrong).exit_code == 2
    assert server.accounts.requests == []


def drawn(width: int, days: list[Day] = NOVEMBER) -> list[str]:
    """Return the plot's lines in a terminal of this width."""
    return to_text(DailyPlot("tokens", days), width).splitlines()


@pytest.mark.parametrize("width", [20, 31, 40, 80, 200])
def test_the_plot_fits_any_terminal(width: int) -> None:
    lines = drawn(width)

    assert max(map(len, lines)) <= max(width, len("tokens, most on day 20: 20,000"))
    assert sum("█" in line for line in lines) == 7
    assert "20,000" in " ".join(lines)


def test_the_plot_has_an_axis_where_there_is_room_and_shares_columns_where_there_is_none() -> None:
    assert any(line.startswith(" 20.0k ") for line in drawn(80))
    assert not any("20.0k" in line for line in drawn(36))
    assert "several days a column" in " ".join(drawn(20))


def test_the_plot_is_text_without_colour_and_ascii_where_that_is_all_there_is() -> None:
    target = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=target, width=80, color_system=None).print(DailyPlot("tokens", NOVEMBER))
    target.flush()

    assert isinstance(target.buffer, io.BytesIO)
    assert "#" in target.buffer.getvalue().decode("ascii")
    assert "\x1b" not in "".join(drawn(80))


def test_few_tokens_are_still_seen_and_none_and_days_to_come_are_not() -> None:
    columns = drawn(80, [Day(1, 1), Day(2, 1_000_000), Day(3, 0), Day(4, None)])

    assert columns[7][7:].split() == ["▁▁", "██"]
    assert "most on day 2: 1,000,000" in columns[0]
    assert drawn(80, [Day(1, 0), Day(2, None)])[0] == "tokens: none"


def test_a_month_is_drawn_whole_and_late_usage_of_another_is_left_out() -> None:
    plot = daily_plot("2026-11", {"2026-10-31": 9, "2026-11-02": 5}, date(2026, 11, 3))

    assert [day.token_count for day in plot.days[:5]] == [0, 5, 0, None, None]
    assert len(plot.days) == 30


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1.0k"),
        (999_999, "999.9k"),
        (1_250_000, "1.2M"),
        (10**14, "100.0T"),
    ],
)
def test_counts_are_shortened(count: int, text: str) -> None:
    assert short_count(count) == text
