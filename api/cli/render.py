"""Pure drawing: values of the client in, text and tables out. Nothing here calls, prints or reads a clock."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from decimal import Decimal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from weir_client import (
    PICOS_PER_UNIT,
    Money,
    MonthReport,
    MonthReportLine,
    Price,
    QuotaDimension,
    Result,
    Timings,
    Usage,
)

TOKENS_PER_PRICE = 1_000_000  # prices are shown per million tokens, as customers compare them
BAR_CELLS = 48  # width of the waterfall's time axis
STAGES = (
    ("auth", "auth_ms", "resolve the API key"),
    ("tokenize", "tokenize_ms", "render and tokenize the prompt"),
    ("admission", "admission_ms", "hold the tokens in the database"),
    ("queue", "queue_ms", "wait for a place in the batch"),
    ("cold start", "cold_start_ms", "wait for an engine to start"),
    ("prefill", "prefill_ms", "compute the prompt"),
    ("decode", "decode_ms", "compute the answer"),
    ("client stall", "client_stall_ms", "wait for the client to read"),
    ("settle", "settle_ms", "write usage and settlement"),
)
REPORT_CSV_COLUMNS = (
    "organization",
    "month",
    "model",
    "price_version",
    "token_kind",
    "request_count",
    "token_count",
    "cancelled_token_count",
    "unit_price_per_million",
    "unit_price_picos",
    "amount",
    "currency_code",
)


def to_text(renderable: RenderableType, width: int = 100) -> str:
    """What a renderable looks like without colours, each line without trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False)
    console.print(renderable)
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Table:
    """A table in the house look; the columns named in `right` hold numbers."""
    numbers = set(right)
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def duration_text(seconds: float) -> str:
    """A wait for people: `0.3 s`, `12 s`, `4 min`, `3 h`, `9 d`, rounded up so that waiting so long is enough."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{-int(-seconds // unit_s)} {unit}"
    return f"{-int(-seconds // 86_400)} d"


def decimal_text(value: Decimal, places: int = 2) -> str:
    """An exact number with thousands separators, at least so many decimals, and no needless zeros beyond them."""
    whole, _, fraction = f"{value:,f}".partition(".")
    fraction = fraction.rstrip("0").ljust(places, "0")
    return f"{whole}.{fraction}" if fraction else whole


def per_million(picos_per_token: int) -> Decimal:
    """A price per million tokens in units of the currency, exact."""
    return Money("", picos_per_token * TOKENS_PER_PRICE).amount


def price_text(price: Price | None, picos_per_token: int) -> str:
    """A price per million tokens with its currency; a dash where there is none."""
    return f"{decimal_text(per_million(picos_per_token))} {price.currency_code}" if price else "—"


def dimension_amount(dimension: QuotaDimension | None, value: int) -> str:
    """A limit or what is left of it, in the unit of its dimension; money in units of the currency."""
    if dimension is QuotaDimension.COST_PER_MONTH:
        return decimal_text(Money("", value).amount)
    return f"{value:,}"


def usage_line(usage: Usage, cost: Money | None, timings: Timings | None, request_id: str) -> str:
    """What one request used, in one line."""
    cached = f" ({usage.cached_input_token_count:,} cached)" if usage.cached_input_token_count else ""
    parts = [f"{usage.input_token_count:,} in{cached}", f"{usage.billed_token_count:,} out"]
    if cost is not None:
        parts.append(str(cost))
    if timings is not None and timings.ttft_ms:
        parts.append(f"TTFT {timings.ttft_ms:,.0f} ms")
    rate = tokens_per_second(usage, timings)
    if rate is not None:
        parts.append(f"{rate:,.1f} tokens/s")
    return " · ".join([*parts, request_id])


def tokens_per_second(usage: Usage, timings: Timings | None) -> float | None:
    """Decode speed: tokens after the first one by the time they took. None where that cannot be told."""
    if timings is None or timings.decode_ms <= 0 or usage.generated_token_count < 2:
        return None
    return (usage.generated_token_count - 1) / timings.decode_ms * 1000


def result_line(result: Result) -> str:
    """What one finished request used, in one line."""
    return usage_line(result.usage, result.cost, result.timings, result.request_id)


def waterfall(timings: Timings, *, cells: int = BAR_CELLS) -> RenderableType:
    """The stages of one request as bars on one time axis: each begins where the one before it ended."""
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    rows.add_column(no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True, width=cells)
    rows.add_column(style="dim", overflow="ellipsis", no_wrap=True)
    lengths = [float(getattr(timings, field)) for _, field, _ in STAGES]
    scale_ms = max(timings.total_ms, sum(lengths)) or 1.0
    start_ms = 0.0
    for (name, _, meaning), length_ms in zip(STAGES, lengths, strict=True):
        bar = Text(_bar(start_ms / scale_ms, length_ms / scale_ms, cells), style="cyan" if name != "decode" else "green")
        rows.add_row(name, f"{length_ms:,.1f} ms", bar, meaning)
        start_ms += length_ms
    rows.add_row("first token", f"{timings.ttft_ms:,.1f} ms", Text(_marker(timings.ttft_ms / scale_ms, cells)), "")
    rows.add_row(Text("total", style="bold"), Text(f"{timings.total_ms:,.1f} ms", style="bold"), Text("─" * cells, style="dim"), "")
    return rows


def _bar(start: float, length: float, cells: int) -> str:
    """A bar by eighths of a cell at its end; something short is still a sliver, nothing is nothing."""
    if length <= 0:
        return ""
    first = min(int(start * cells), cells - 1)
    eighths = max(1, min(round((start + length) * cells * 8), cells * 8) - first * 8)
    full, rest = divmod(eighths, 8)
    return " " * first + "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def _marker(at: float, cells: int) -> str:
    return " " * min(int(at * cells), cells - 1) + "▲"


def month_report(report: MonthReport) -> RenderableType:
    """The month of one organization: a line per model, price version and kind of token, the total, and what backs it."""
    currency = report.total.currency_code
    title = f"{report.organization_name} · {report.month} (UTC) · amounts in {currency}, before tax"
    numbers = ("requests", "tokens", "of these cancelled", "per million", "amount")
    lines = table("model", "price", "tokens billed as", *numbers, right=numbers, title=title)
    places = max([2, *(_places(line.amount.amount) for line in report.lines), _places(report.total.amount)])
    for line in report.lines:
        lines.add_row(
            line.model,
            f"v{line.price_version}",
            line.token_kind.value.replace("-", " "),
            f"{line.request_count:,}",
            f"{line.token_count:,}",
            f"{line.cancelled_token_count:,}",
            decimal_text(per_million(line.unit_price_picos)),
            decimal_text(line.amount.amount, places),
        )
    lines.add_section()
    tokens, cancelled = (sum(pick) for pick in _sums(report.lines))
    lines.add_row("total", "", "", "", f"{tokens:,}", f"{cancelled:,}", "", decimal_text(report.total.amount, places), style="bold")
    lines.add_row("rounded", "", "", "", "", "", "", decimal_text(report.total_rounded.amount), style="bold")
    return Group(lines, *_month_footer(report))


def _sums(lines: Sequence[MonthReportLine]) -> tuple[list[int], list[int]]:
    return [line.token_count for line in lines], [line.cancelled_token_count for line in lines]


def _month_footer(report: MonthReport) -> list[Text]:
    counts, check = report.request_counts, report.reconciliation
    ended = (
        f"requests  {counts.total_count:,}: {counts.completed_count:,} completed, {counts.cancelled_count:,} cancelled, "
        f"{counts.limited_count:,} limited, {counts.failed_count:,} failed"
    )
    unrated = f"unrated   {report.unrated_event_count:,} usage events are recorded but not yet in the lines above"
    sums = f"usage {check.usage_token_count:,} = ledger {check.ledger_token_count:,} + unrated {check.unrated_token_count:,} tokens"
    if check.balanced:
        verdict = Text(f"check     {sums}: balanced", style="green")
    else:
        off = check.usage_token_count - check.ledger_token_count - check.unrated_token_count
        verdict = Text(f"check     {sums.replace(' = ', ' ≠ ')}: OFF BY {off:,} TOKENS", style="bold red")
    return [Text(ended), Text(unrated, style="yellow" if report.unrated_event_count else ""), verdict]


def _places(value: Decimal) -> int:
    return len(f"{value:f}".partition(".")[2].rstrip("0"))


def month_report_csv(report: MonthReport) -> str:
    """The lines of a month as CSV: exact plain numbers, a header, no totals, so that a sheet can sum it up itself."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(REPORT_CSV_COLUMNS)
    for line in report.lines:
        writer.writerow(
            (
                report.organization_name,
                report.month,
                line.model,
                line.price_version,
                line.token_kind.value,
                line.request_count,
                line.token_count,
                line.cancelled_token_count,
                f"{per_million(line.unit_price_picos):f}",
                line.unit_price_picos,
                f"{line.amount.amount:f}",
                line.amount.currency_code,
            )
        )
    return text.getvalue()


def pretty_json(text: str) -> str:
    """JSON text on one line with sorted names; other text as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return text


def units_to_picos(amount: Decimal) -> int:
    """An amount in units of a currency as whole picos. Raises: ValueError if it is finer than a pico or no number."""
    if not amount.is_finite():
        raise ValueError(f"{amount} is not an amount")
    scaled = amount.scaleb(12)
    if scaled != scaled.to_integral_value():
        raise ValueError(f"{amount} is finer than a pico (twelve decimals)")
    return int(scaled)


__all__ = ["PICOS_PER_UNIT"]
