"""Rendering and counting: output for unusual values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weir_cli import texts
from weir_cli.audit import ENTRIES, changed, name_of
from weir_cli.commands import CLIENT_COMMANDS
from weir_cli.connection import flag_of
from weir_cli.months import Group, usage_csv, usage_table
from weir_cli.render import Table, show, table, to_text
from weir_cli.requests import traced
from weir_cli.tables import RECORDS_BELOW, waterfall
from weir_cli.tenants import QUOTAS
from weir_cli.texts import (
    key_state,
)
from weir_client import (
    ApiKey,
    AuditEntry,
    Generation,
    GenerationState,
    Money,
    QuotaDimension,
    QuotaStatus,
    QuotaSubject,
    Timings,
    Usage,
    UsageGrouping,
    UsageRow,
    UsageShare,
)

from metering.core.money import MINOR_DIGITS, exact_text
from tests.cli.conftest import Run

ID = "5b1f4c1e-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.2 s"),
        (1.01, "2 s"),
        (119, "119 s"),
        (121, "3 min"),
        (7200, "2 h"),
        (86_401, "25 h"),
        (200_000, "3 d"),
    ],
)
def test_waits_are_rounded_up_so_that_waiting_so_long_is_enough(seconds: float, text: str) -> None:
    assert texts.duration_text(seconds) == text


def test_numbers_keep_every_digit() -> None:
    assert texts.decimal_text(Decimal("1234567.100000000001")) == "1,234,567.100000000001"
    assert texts.decimal_text(Decimal("0.500")) == "0.50"
    assert texts.decimal_text(Decimal(5), 0) == "5"


@pytest.mark.parametrize("currency", sorted(MINOR_DIGITS))
def test_amounts_have_at_least_the_decimals_of_their_currency(currency: str) -> None:
    """The client has a list of its own, equal to that of the server's documents."""
    for picos in (5 * 10**12, 1_234_500_000_000_000, 1, -(10**12)):
        amount = Money(currency, picos)

        assert str(amount) == f"{exact_text(picos, currency)} {currency}"
        assert texts.money_text(amount).replace(",", "") == str(amount)
    assert texts.money_places([Money(currency, 10**12)]) == MINOR_DIGITS[currency]
    assert texts.money_places([Money(currency, 10**12), Money(currency, 1)]) == 12


def test_money_and_prices_are_read_exactly() -> None:
    assert (
        Money.of(Decimal("12345678901234567.123456789012"), "").picos
        == 12345678901234567123456789012
    )
    assert texts.parse_limit(QuotaDimension.COST_PER_MONTH, "0.000000000001") == 1
    assert texts.parse_limit(QuotaDimension.TOKENS_PER_DAY, "1_000_000") == 1_000_000
    assert texts.parse_price("0.15") == 150_000
    assert texts.parse_price("0.000001") == 1
    for parse, largest in ((texts.parse_price, 10**12 * 9), (texts.parse_picos, 10**6 * 9)):
        assert parse(str(largest)) == 9 * 10**18
        with pytest.raises(ValueError, match="the largest"):
            parse(str(largest * 2))
    for text in ("0.0000001", "-1", "NaN", "Infinity", "free", ""):
        with pytest.raises(ValueError, match=r".+"):
            texts.parse_price(text)
    with pytest.raises(ValueError, match="not a number"):
        texts.parse_limit(QuotaDimension.TOKENS_PER_DAY, "NaN")


def test_a_waterfall_without_any_time_draws_no_bar() -> None:
    text = to_text(waterfall(Timings()))

    assert "█" not in text
    assert "▏" not in text


def test_bars_follow_each_other_and_fill_the_axis() -> None:
    lines = to_text(
        waterfall(
            Timings(queue_ms=25, prefill_ms=25, decode_ms=50, ttft_ms=50, total_ms=100), cells=8
        )
    ).splitlines()

    bars = {line.split()[0]: line.partition(" ms ")[2][:8] for line in lines}
    assert bars["queue"].rstrip() == "██"
    assert bars["prefill"].rstrip() == "  ██"
    assert bars["decode"] == "    ████"
    assert bars["first"].rstrip() == "    ▲"


def test_a_pause_shows_beside_the_mean() -> None:
    timings = Timings(decode_ms=200, itl_p50_ms=30, itl_p99_ms=150, itl_max_ms=150, total_ms=200)

    text = to_text(waterfall(timings, usage=Usage(generated_token_count=4)), width=200)

    assert "66.7 ms a token\n" in text
    assert text.endswith("between two tokens: p50 30.0, p99 150.0, max 150.0 ms\n")
    assert max(map(len, text.splitlines())) <= 80


def test_tables_never_cut_a_number_and_take_text_as_it_is() -> None:
    made = table("model", "amount", "id", right=("amount",))
    made.add_row(
        "[bold]demo\x1b[31m", "123,456,789.123456789012", "5b1f4c1e-0000-4000-8000-000000000001"
    )

    text = to_text(made, width=30)

    assert "[bold]demo[31m" in text
    assert "\x1b" not in text
    assert "123,456,789.123456789012" in text
    assert "5b1f4c1e-0000-4000" in text


MADE = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (
            100,
            [
                "",
                " name  created               requests  note             id",
                f" {'─' * 91}",
                f" bot   2026-11-20 12:00:00Z     1,234  for the chatbot  {ID}",
                "",
            ],
        ),
        (
            80,
            [
                "",
                " name  created               requests  note",
                f" {'─' * 53}",
                " bot   2026-11-20 12:00:00Z     1,234  for the chatbot",
                " left out: id; --wide shows all",
                "",
            ],
        ),
        (
            30,
            [
                "",
                "name      bot",
                "created   2026-11-20 12:00:00Z",
                "requests  1,234",
                "note      for the chatbot",
                f"id        {ID}",
                "",
            ],
        ),
    ],
)
def test_a_table_drops_columns_and_becomes_records_only_when_narrow(
    width: int, expected: list[str]
) -> None:
    made = table("name", "created", "requests", "note", "id", right=("requests",), drop=("id",))
    made.add_row("bot", MADE, 1234, "for the chatbot", ID)

    assert to_text(made, width=width).splitlines() == expected


def test_a_table_drops_columns_without_content_first_then_in_the_given_order() -> None:
    names = ("day", *(f"counter {number}" for number in range(9)))
    drop = ("counter 5", "counter 2", "counter 4", "counter 7")
    made = table(*names, right=names[1:], drop=drop)
    made.add_row("2026-11-20", 1, 1, 1, 1, 0, 1, 1, "0.00", None)

    lines = to_text(made, width=60).splitlines()

    left_out = ", ".join(f"counter {number}" for number in (2, 4, 5, 7, 8))
    assert " ".join(lines[4:]).split() == f"left out: {left_out}; --wide shows all".split()


def test_a_zero_counts_as_content_where_a_table_does_not_say_otherwise() -> None:
    made = table("limit on", "left", "held", "id", right=("left", "held"), drop=("id", "held"))
    made.add_row("requests-per-minute of this key", 0, 0, ID)

    lines = to_text(made, width=66).splitlines()

    assert lines[1].split() == ["limit", "on", "left", "id"]
    assert "left out: held; --wide shows all" in map(str.strip, lines)


@given(
    st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=20), st.text("xy ", max_size=60)),
        min_size=1,
        max_size=12,
    ),
    st.integers(RECORDS_BELOW, 120),
    st.data(),
)
def test_a_table_never_exceeds_the_terminal_and_names_what_it_leaves_out(
    columns: list[tuple[str, str]], width: int, data: st.DataObject
) -> None:
    heads = [f"{name}{number}" for number, (name, _) in enumerate(columns)]
    drop = data.draw(st.lists(st.sampled_from(heads[1:]), unique=True)) if heads[1:] else []
    made = table(*heads, right=heads[1::2], drop=drop)
    made.add_row(*("".join(cell.split())[:40] for _, cell in columns))

    lines = to_text(made, width=width).splitlines()

    text = " ".join(lines).partition(" left out: ")[2].partition("; --wide")[0]
    left_out = text.replace(",", "").split()
    assert max(map(len, lines)) <= width
    assert sorted([*lines[1].split(), *left_out]) == sorted(heads)
    assert lines[1].split()[0] == heads[0]


def declared_tables() -> Iterator[tuple[str, Table[Any]]]:
    modules = {entry.target.partition(":")[0] for entry in CLIENT_COMMANDS.values()}
    for module in sorted(modules):
        for name, value in vars(import_module(module)).items():
            if isinstance(value, Table):
                yield f"{module}.{name}", value


def test_a_long_name_does_not_hide_what_a_table_is_about() -> None:
    per_minute = QuotaDimension.REQUESTS_PER_MINUTE
    row = QuotaStatus(
        subject=QuotaSubject.END_USER, subject_name="w" * 512, dimension=per_minute, limit_value=7
    )

    text = to_text(QUOTAS.of([row]), width=80)

    assert "requests-per-minute" in text
    assert " 7 " in text
    assert text.count("w" * 36) >= 10
    assert max(map(len, text.splitlines())) <= 80


def test_every_table_says_which_columns_a_narrow_terminal_drops() -> None:
    found = dict(declared_tables())

    assert len(found) > 15
    for where, each in found.items():
        names = list(each.columns)
        ids = [name for name in names[1:] if name == "id" or name.endswith(" id")]
        assert {*each.drop, *each.right} <= set(names), where
        assert set(each.drop) < set(names), where
        assert set(ids) <= set(each.drop), where


def test_wide_shows_every_column_on_any_terminal(
    weir: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    narrow, wide, again = (weir(f"quota list {more}").stdout for more in ("", "--wide", ""))

    assert "left out: " in narrow
    assert "left out: " not in wide
    assert max(map(len, wide.splitlines())) > 60
    assert narrow == again


def test_output_to_a_pipe_has_one_line_per_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS")
    made = table("change", "id")
    made.add_row("tokens " * 40, "5b1f4c1e-0000-4000-8000-000000000001")

    show(made)

    (row,) = [line for line in capsys.readouterr().out.splitlines() if "tokens" in line]
    assert row.rstrip().endswith("5b1f4c1e-0000-4000-8000-000000000001")


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert texts.printable("a\x1b[2Jb\x07\x9b\tc\nü✓") == "a[2Jb\tc\nü✓"


def test_speed_is_shown_only_where_it_is_known() -> None:
    assert texts.tokens_per_second(Usage(generated_token_count=11), Timings(decode_ms=1000)) == 10
    assert texts.tokens_per_second(Usage(generated_token_count=1), Timings(decode_ms=1000)) is None
    assert texts.tokens_per_second(Usage(generated_token_count=11), None) is None
    assert texts.usage_line(Usage(input_token_count=3), None, None) == "3 in · 0 out"
    assert texts.usage_line(Usage(embedding_token_count=3), None, None) == "3 embedded"


@pytest.mark.parametrize(
    ("field", "column", "row_end"),
    [
        ("embedding_token_count", "embedded", ",1234,0,0,"),
        ("reasoning_token_count", "thinking", ",0,0,1234,"),
    ],
)
def test_some_kinds_have_a_column_if_they_occur(field: str, column: str, row_end: str) -> None:
    share, nothing = UsageShare(0, 0, Money("USD", 0)), Money("USD", 0)
    names = ("", "acme", "2026-11-01", "", "search", "", "bot", "wk", "demo", "", "stop")
    plain = UsageRow(*names, None, False, 1, 10, 2, 5, share, share, share, nothing, nothing)
    by = [Group(UsageGrouping.DAY)]

    some: Any = {field: 1_234}
    row = replace(plain, **some)

    shown = to_text(usage_table([plain, row], by, None, ""))

    assert row.token_count == plain.token_count + 1_234
    assert column in shown
    assert "1,234" in shown
    assert column not in to_text(usage_table([plain], by, None, ""))
    assert usage_csv([row], by, header=False).rstrip().endswith(row_end)


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (GenerationState.RUNNING, "Still running"),
        (GenerationState.EXPIRED, "No timings: it was recovered"),
        (GenerationState.SETTLED, "No timings: it failed, or was recovered"),
    ],
)
def test_a_trace_without_timings_names_the_reason(state: GenerationState, line: str) -> None:
    generation = Generation(
        "r", state, "demo", None, None, Usage(input_token_count=5), Money("USD", 1), None, "", {}
    )

    text = to_text(traced(generation))

    assert line in text
    assert "5 in · 0 out · 0.000000000001 USD" in text


def test_changes_name_what_differs() -> None:
    assert changed('{"a": 1, "b": "x"}', '{"a": 2, "b": "x"}') == "a: 1 → 2"
    assert (
        changed("", '{"name": "acme", "id": "1", "org_id": "2", "created_at": "x", "model": ""}')
        == "name: acme"
    )
    assert changed('{"a": 1}', "") == "removed"
    assert changed("", "") == ""
    assert changed("odd", "odder") == "value: odd → odder"
    limit = {"dimension": "cost_picos_per_month", "limit_value": 250 * 10**12}
    assert changed("", json.dumps(limit)) == "dimension: cost-per-month, limit value: 250.00"
    lower = json.dumps(limit | {"limit_value": 5 * 10**11})
    assert changed(json.dumps(limit), lower) == "limit value: 250.00 → 0.50"
    prices = json.dumps({"input_picos_per_token": 150_000, "commitment_picos": 10**12})
    assert changed("", prices) == "input per million tokens: 0.15, commitment: 1.00"
    quota = {"dimension": "cost_picos_per_day", "models": [], "watch": True, "strict": False}
    quota |= {"input_weight_milli": 1000, "output_weight_milli": 250}
    text = "dimension: cost-per-day, watch: true, output weight milli: 250"
    assert changed("", json.dumps(quota)) == text
    assert (
        changed('{"ends_at": null}', '{"ends_at": "2026-11-28T01:36:50.271+01:00"}')
        == "ends at: null → 2026-11-28 00:36:50Z"
    )


@pytest.mark.parametrize(
    ("action", "after", "name"),
    [
        ("api_key.create", {"name": "bot", "prefix": "wk_rrh8rxsw"}, "wk_rrh8rxsw"),
        ("project.create", {"name": "search"}, "search"),
        ("price.set", {"model": "demo"}, "demo"),
        ("quota.set", {"model": "demo", "limit_value": 10}, ""),
    ],
)
def test_the_audit_log_says_who_changed_what_at_80_columns(
    action: str, after: dict[str, object], name: str
) -> None:
    entry = AuditEntry(1, MADE, "wk_f5bgbgww", action, ID, "", json.dumps(after))

    assert name_of(entry) == name
    lines = to_text(ENTRIES.of([entry]), width=80).splitlines()
    assert {"actor", "action", "change"} <= set(lines[1].split())
    assert "wk_f5bgbgww" in lines[3]
    assert name in " ".join(lines[3:5])


def test_the_state_of_a_key_at_a_moment() -> None:
    now = datetime(2026, 11, 20, tzinfo=UTC)
    key = ApiKey(
        "k", "o", "p", "laptop", "weir_", ("inference",), now, now + timedelta(days=1), None
    )

    assert key_state(key, now) == "until 2026-11-21 00:00:00Z"
    assert key_state(key, now + timedelta(days=2)) == "expired 2026-11-21 00:00:00Z"
    assert texts.parse_span("4w") == timedelta(weeks=4)


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("start.sampling.temperature", "--temperature"),
        ("max_output_tokens", "--max-output-tokens"),
        ("stop[3]", "--stop"),
        ("conversation.messages", "PROMPT"),
        ("something.new", "something.new"),
    ],
)
def test_fields_are_named_by_the_flag_they_came_from(field: str, flag: str) -> None:
    assert flag_of(field) == flag
