"""Rendering and counting: output for unusual values."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from weir_cli import texts
from weir_cli.audit import changed
from weir_cli.connection import flag_of
from weir_cli.months import usage_csv, usage_table
from weir_cli.render import show, table, to_text
from weir_cli.requests import traced
from weir_cli.tables import waterfall
from weir_cli.texts import (
    key_state,
)
from weir_client import (
    ApiKey,
    Generation,
    GenerationState,
    Money,
    QuotaDimension,
    Timings,
    Usage,
    UsageGrouping,
    UsageRow,
    UsageShare,
)

from metering.core.money import MINOR_DIGITS, exact_text

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

    assert "66.7 ms a token; gaps p50 30.0, p99 150.0, max 150.0 ms" in text


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


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (
            100,
            [
                "",
                " name  created               requests  id",
                f" {'─' * 74}",
                f" bot   2026-11-20 12:00:00Z     1,234  {ID}",
                "",
            ],
        ),
        (
            60,
            [
                "",
                " name  created               requests",
                f" {'─' * 36}",
                " bot   2026-11-20 12:00:00Z     1,234",
                f"   id  {ID}",
                "",
            ],
        ),
        (
            30,
            [
                "",
                " name  created       requests",
                f" {'─' * 28}",
                " bot   2026-11-20       1,234",
                "       12:00:00Z",
                f"   id  {ID}",
                "",
            ],
        ),
        (
            20,
            [
                "",
                "name      bot",
                "created   2026-11-20 12:00:00Z",
                "requests  1,234",
                f"id        {ID}",
                "",
            ],
        ),
    ],
)
def test_a_narrow_terminal_breaks_no_id_and_no_word(width: int, expected: list[str]) -> None:
    made = table("name", "created", "requests", "id", right=("requests",))
    made.add_row("bot", datetime(2026, 11, 20, 12, tzinfo=UTC), 1234, ID)

    assert to_text(made, width=width).splitlines() == expected


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
        ("embedding_token_count", "embedded", ",1234,0,0"),
        ("reasoning_token_count", "thinking", ",0,0,1234"),
    ],
)
def test_some_kinds_have_a_column_if_they_occur(field: str, column: str, row_end: str) -> None:
    share, nothing = UsageShare(0, 0, Money("USD", 0)), Money("USD", 0)
    names = ("", "acme", "2026-11-01", "", "search", "", "bot", "wk", "demo", "", "stop")
    plain = UsageRow(*names, None, False, 1, 10, 2, 5, share, share, share, nothing, nothing)
    by = [UsageGrouping.DAY]

    some: Any = {field: 1_234}
    row = replace(plain, **some)

    shown = to_text(usage_table([plain, row], by, None, ""))

    assert row.token_count == plain.token_count + 1_234
    assert column in shown
    assert "1,234" in shown
    assert column not in to_text(usage_table([plain], by, None, ""))
    assert usage_csv([row], header=False).rstrip().endswith(row_end)


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
