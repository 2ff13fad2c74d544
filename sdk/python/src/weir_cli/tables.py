"""Tables and charts for terminals, drawn with rich; imported when a command draws one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Group
from rich.measure import Measurement
from rich.text import Text
from weir_client import Money

from weir_cli.texts import (
    decimal_text,
    money_places,
    money_text,
    per_million,
    printable,
    time_text,
    tokens_per_second,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from weir_client import MonthReport, Timings, Usage

    from weir_cli.texts import Cell

TABLE_WIDTH_MAX = 100_000  # columns of a table in a pipe: no row is longer
COLUMN_GAP = 2  # between columns; 1 on a narrow terminal
RECORDS_BELOW = 60  # columns; on a narrower terminal, a table that does not fit becomes records
TEXT_CELLS = 20  # a time; longer text wraps before a column is left out, shorter text does not
WORD_CELLS = 36  # a UUID; a longer word is broken before a column is left out that is not in `drop`
NAME_CELLS = 12  # of a stage
BAR_CELLS = 34  # width of the waterfall's time axis: the whole fits 80 columns
STAGES = (
    ("auth", "auth_ms", "authenticate the key"),
    ("tokenize", "tokenize_ms", "tokenize the prompt"),
    ("admission", "admission_ms", "hold the tokens"),
    ("cold start", "cold_start_ms", "start the engine"),
    ("queue", "queue_ms", "wait in the queue"),
    ("prefill", "prefill_ms", "compute the prompt"),
    ("decode", "decode_ms", "compute the answer"),
    ("client stall", "client_stall_ms", "wait for the client"),
    ("settle", "settle_ms", "write the usage"),
)

HEIGHT_ROWS = 7  # with title and two axis lines, a third of a small terminal
EIGHTHS = " ▁▂▃▄▅▆▇█"
COLUMN_CELLS_MAX = 3  # wider columns look like a table
AXIS_CELLS = 7  # `999.9M ` before the columns


class Sheet:
    """Table of literal text that cuts nothing and breaks no id, so that it can be copied.

    Where it does not fit, long text wraps, then columns are left out: those without content, and
    those of `drop` in its order, of which columns of zeros go first. Then words that are longer
    than an id are broken, and columns are left out from the right. The last line
    names them. Below 60 columns, each row is a record instead, one line for each column. `right`
    names the columns of numbers.
    """

    def __init__(
        self,
        *columns: str,
        right: Iterable[str] = (),
        title: str | None = None,
        drop: Iterable[str] = (),
    ) -> None:
        self.caption = ""
        self._title, self._columns, self._right = title, columns, frozenset(right)
        self._drop = [columns.index(name) for name in drop if name in columns]
        self._rows: list[tuple[list[str], str]] = []  # cells and style; a blank line has no cells

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Add a row. Its text is not parsed as markup and cannot control the terminal."""
        self._rows.append(([printable(cell_text(cell)) for cell in cells], style))

    def add_section(self) -> None:
        """Add a blank line."""
        self._rows.append(([], ""))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        ranges = self._ranges(console, options)
        width = total_width((each.maximum for each in ranges), COLUMN_GAP)
        return Measurement(min(width, options.max_width), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table in the available width."""
        widths, gap = self._layout(self._ranges(console, options), options.max_width)
        if self._title:
            yield Text(self._title, style="bold")
        if not widths:
            yield from self._as_lists()
        else:
            yield Text()
            yield from self._lines(console, self._columns, widths, gap, "bold")
            rule = "-" if options.ascii_only else "─"
            yield line(" " + rule * (total_width(widths.values(), gap) - 2))
            for cells, style in self._rows:
                yield from self._lines(console, cells, widths, gap, style)
            left_out = [name for at, name in enumerate(self._columns) if at not in widths]
            if left_out:
                yield Text(f" left out: {', '.join(left_out)}; --wide shows all", style="dim")
        yield Text(self.caption, style="dim")

    def _layout(self, ranges: Sequence[Measurement], width: int) -> tuple[dict[int, int], int]:
        """Choose the columns, their widths and the gap between them. No columns: draw records."""
        words = [each.minimum for each in ranges]
        kept = list(range(len(ranges)))
        if width < RECORDS_BELOW:
            least, gap = words, gap_of(words, width)
            if not gap:
                return {}, 0
        else:
            least = [min(each.maximum, max(each.minimum, TEXT_CELLS)) for each in ranges]
            for dropped in [*self._least_wanted(), None]:
                if gap := gap_of([least[index] for index in kept], width):
                    break
                if dropped is not None:
                    kept.remove(dropped)
            if not gap and not gap_of([words[index] for index in kept], width):
                words = [
                    word if name in self._right else min(word, WORD_CELLS)
                    for name, word in zip(self._columns, words, strict=True)
                ]
            if not gap:
                least = words
            while not (gap := gap or gap_of([least[index] for index in kept], width)):
                if len(kept) == 1:
                    gap = 1
                else:
                    kept.pop()
        widths = {index: ranges[index].maximum for index in kept}
        for index in sorted(kept, key=lambda index: least[index] - widths[index]):
            excess = total_width(widths.values(), gap) - width
            widths[index] -= min(widths[index] - least[index], max(0, excess))
        return widths, gap

    def _least_wanted(self) -> list[int]:
        """List the columns that may be left out: first those without content, never the first."""
        cells = [cells for cells, _ in self._rows if cells]
        empty = [
            index
            for index in range(1, len(self._columns))
            if not any(row[index].strip("—0." if index in self._drop else "—") for row in cells)
        ]
        return [*empty, *(index for index in self._drop if index not in empty)]

    def _ranges(self, console: Console, options: ConsoleOptions) -> list[Measurement]:
        """Measure each column: its longest word and its longest text. A number is one word."""
        unlimited = options.update(max_width=TABLE_WIDTH_MAX)
        rows = [self._columns, *(cells for cells, _ in self._rows if cells)]
        ranges = []
        for name, column in zip(self._columns, zip(*rows, strict=True), strict=True):
            cells = [Measurement.get(console, unlimited, Text(cell)) for cell in column]
            longest = max(each.maximum for each in cells)
            word = longest if name in self._right else max(each.minimum for each in cells)
            ranges.append(Measurement(word, longest))
        return ranges

    def _lines(
        self,
        console: Console,
        cells: Sequence[str],
        widths: Mapping[int, int],
        gap: int,
        style: str,
    ) -> Iterator[Text]:
        """Yield the lines of a row, whose cells wrap between words; a blank line without cells."""
        if not cells:
            yield Text()
            return
        parts = [Text(cells[index]).wrap(console, width) for index, width in widths.items()]
        for row in zip_longest(*parts, fillvalue=Text()):
            shown = ""
            for part, (index, width) in zip(row, widths.items(), strict=True):
                space = " " * (width - part.cell_len)
                right = self._columns[index] in self._right
                shown += f"{space}{part.plain}" if right else f"{part.plain}{space}"
                shown += " " * gap
            yield line(f" {shown}".rstrip(), style)

    def _as_lists(self) -> Iterator[Text]:
        """Yield one line for each cell. The terminal wraps it."""
        width = max(map(len, self._columns))
        for cells, _ in self._rows:
            yield Text()
            for name, cell in zip(self._columns, cells, strict=False):
                if cell:
                    yield line(f"{name:<{width}}  ", "dim").append(cell, "not dim")


def line(text: str, style: str = "") -> Text:
    """Make a text that rich neither wraps nor cuts."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def gap_of(widths: Collection[int], width: int) -> int:
    """Choose the gap between columns of these widths; 0 if they do not fit."""
    return next((gap for gap in (COLUMN_GAP, 1) if total_width(widths, gap) <= width), 0)


def total_width(widths: Iterable[int], gap: int) -> int:
    """Compute the width of a table from those of its columns, with a space at both ends."""
    return sum(width + gap for width in widths) + 2 - gap


def cell_text(cell: Cell) -> str:
    """Format a value: separators in numbers, times in UTC, currencies; a dash for None."""
    match cell:
        case int():
            return f"{cell:,}"
        case Money():
            return money_text(cell)
        case datetime() | None:
            return time_text(cell)
        case str():
            return cell


def whole_width(console: Console, part: RenderableType) -> int:
    """Measure a table or text without wrapping, for pipes; 0 for anything else."""
    if not isinstance(part, Sheet | Text | Group):
        return 0
    return Measurement.get(console, console.options.update(max_width=TABLE_WIDTH_MAX), part).maximum


def waterfall(
    timings: Timings, *, cells: int = BAR_CELLS, usage: Usage | None = None
) -> RenderableType:
    """Draw the stages of a request as bars on one time axis, each from the end of the previous one.

    The client's stall, which may overlap decode, ends where the settlement begins. `usage` adds
    details to prefill and decode.
    """
    about = {} if usage is None else work_of(usage, timings)
    lengths = [float(getattr(timings, field)) for _, field, _ in STAGES]
    sum_ms = sum(lengths) - timings.client_stall_ms
    scale_ms = max(timings.total_ms, sum_ms, timings.client_stall_ms) or 1.0
    start_ms = 0.0
    rows: list[tuple[str, float, Text, str]] = []
    for (name, _, meaning), length_ms in zip(STAGES, lengths, strict=True):
        color = "cyan" if name != "decode" else "green"
        if name == "client stall":
            start_ms = max(scale_ms - timings.settle_ms - length_ms, 0.0)
        bar = Text(_bar(start_ms / scale_ms, length_ms / scale_ms, cells), style=color)
        rows.append((name, length_ms, bar, about.get(name, meaning)))
        start_ms += length_ms
    gaps = [Text(f"between two tokens: {about['gaps']}", style="dim")] if "gaps" in about else []
    marker = _marker(timings.ttft_ms / scale_ms, cells)
    rows.append(("first token", timings.ttft_ms, Text(marker), ""))
    rows.append(("total", timings.total_ms, Text("─" * cells, style="dim"), ""))
    width = max(len(f"{length_ms:,.1f}") for _, length_ms, _, _ in rows)
    lines = []
    for name, length_ms, bar, meaning in rows:
        head = (
            f"{name:<{NAME_CELLS}} {length_ms:>{width},.1f} ms ",
            "bold" if name == "total" else "",
        )
        line = Text.assemble(head, bar)
        line.pad_right(max(0, cells - bar.cell_len))
        lines.append(line.append(f" {meaning}", style="dim"))
    return Text("\n").join([*lines, *gaps])


def work_of(usage: Usage, timings: Timings) -> dict[str, str]:
    """Describe stages of a recorded request: computed and cached tokens, time per token.

    The duration of the settlement is unknown: the settlement itself writes the record.
    """
    details, cached = {}, usage.cached_input_token_count
    if not timings.settle_ms:
        details["settle"] = "not recorded"
    if cached:
        details["prefill"] = f"{usage.input_token_count - cached:,} new, {cached:,} cached"
    if (rate := tokens_per_second(usage, timings)) is not None:
        details["decode"] = f"{1000 / rate:,.1f} ms a token"
        if timings.itl_max_ms:
            gaps = timings.itl_p50_ms, timings.itl_p99_ms, timings.itl_max_ms
            details["gaps"] = "p50 {:,.1f}, p99 {:,.1f}, max {:,.1f} ms".format(*gaps)
    return details


def _bar(start: float, length: float, cells: int) -> str:
    """Draw a bar to an eighth of a cell. Even a very short one has an eighth."""
    if length <= 0:
        return ""
    first = min(int(start * cells), cells - 1)
    eighths = max(1, min(round((start + length) * cells * 8), cells * 8) - first * 8)
    full, rest = divmod(eighths, 8)
    return " " * first + "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def _marker(at: float, cells: int) -> str:
    return " " * min(int(at * cells), cells - 1) + "▲"


def month_report(report: MonthReport) -> RenderableType:
    """Build a month's tables: lines by model, price version and token kind, total, and check."""
    currency = report.total.currency_code
    about = f"{currency} before tax, rates per million tokens"
    title = f"{report.organization_name} · {report.month} (UTC) · {about}"
    numbers = ("requests", "tokens", "cancelled", "rate", "amount")  # fits 80 columns
    drop = "price", "cancelled", "requests"
    lines = Sheet("model", "price", "kind", *numbers, right=numbers, title=title, drop=drop)
    decimals = money_places([*(line.amount for line in report.lines), report.total])
    for line in report.lines:
        late = f", late usage of {line.late_month}" if line.late_month else ""
        what = line.model, f"v{line.price_version}", line.token_kind.value.replace("-", " ") + late
        counts = line.request_count, line.token_count, line.cancelled_token_count
        price, amount = (
            decimal_text(per_million(line.unit_price_picos)),
            decimal_text(line.amount.amount, decimals),
        )
        lines.add_row(*what, *counts, price, amount)
    for charge in report.charges:
        lines.add_row(
            charge.description,
            "",
            charge.kind,
            "",
            charge.token_count or "",
            "",
            "",
            decimal_text(charge.amount.amount, decimals),
        )
    lines.add_section()
    sums = (
        sum(line.token_count for line in report.lines),
        sum(line.cancelled_token_count for line in report.lines),
    )
    lines.add_row(
        "sum", "", "", "", *sums, "", decimal_text(report.total.amount, decimals), style="bold"
    )
    return Group(lines, *_month_footer(report))


def draft_table(report: MonthReport) -> RenderableType:
    """Build the invoice that an open month would have now."""
    lines = [
        BillLine(
            f"{each.model}, {each.token_kind.value.replace('-', ' ')} tokens, v{each.price_version}"
            + (f", late usage of {each.late_month}" if each.late_month else ""),
            each.amount,
            each.rounded_amount or each.amount,
        )
        for each in report.lines
    ] + [BillLine(each.description, each.amount, each.rounded_amount) for each in report.charges]
    none = Money(report.total.currency_code, 0)
    title = (
        f"draft invoice · {report.organization_name} · {report.month} ·"
        f" {report.total.currency_code}, {report.tax_note}"
    )
    carried = report.carried_in or none, report.carried_out or none
    return bill_table(title, lines, carried, report.rounding or none, report.total_rounded)


@dataclass(frozen=True, slots=True)
class BillLine:
    """Line of a bill, with its exact and its rounded amount."""

    label: str
    exact: Money
    rounded: Money


def bill_table(
    title: str,
    lines: Sequence[BillLine],
    carried: tuple[Money, Money],
    rounding: Money,
    total: Money,
) -> Sheet:
    """Build a table of lines and total. Each column adds up to its last row.

    `carried` has the rounding from previous months, and that to the next one.
    """
    currency = total.currency_code
    carried_in, carried_out = carried[0], Money(currency, -carried[1].picos)
    exact, rounded = [each.exact for each in lines], [each.rounded for each in lines]
    decimals, least = (
        money_places((*column, total))
        for column in ((*exact, carried_in, carried_out), (*rounded, rounding))
    )
    made = Sheet("line", "exact", "amount", right=("exact", "amount"), title=title, drop=["exact"])
    for line in lines:
        made.add_row(
            line.label,
            decimal_text(line.exact.amount, decimals),
            decimal_text(line.rounded.amount, least),
        )
    made.add_section()
    for label, amount in (
        ("rounding carried from previous months", carried_in),
        ("rounding carried to the next month", carried_out),
    ):
        if amount.picos:
            made.add_row(label, decimal_text(amount.amount, decimals), "")
    if rounding.picos:
        made.add_row("rounding", "", decimal_text(rounding.amount, least))
    made.add_row(
        "total",
        decimal_text(total.amount, decimals),
        decimal_text(total.amount, least),
        style="bold",
    )
    return made


def _month_footer(report: MonthReport) -> list[Text]:
    counts, check = report.request_counts, report.reconciliation
    ended = (
        f"requests  {counts.total_count:,}: {counts.completed_count:,} completed,"
        f" {counts.cancelled_count:,} cancelled, {counts.limited_count:,} limited,"
        f" {counts.failed_count:,} failed"
    )
    unrated = (
        f"unrated   {report.unrated_event_count:,} usage events are recorded but not included"
        " above yet"
    )
    sums = (
        f"usage {check.usage_token_count:,} = ledger {check.ledger_token_count:,} + unrated"
        f" {check.unrated_token_count:,} tokens"
    )
    status = []
    if report.close_time is not None:
        invoice = report.invoice_number or "nothing to invoice"
        status = [
            Text(f"closed    {time_text(report.close_time)} by {report.closed_by}, {invoice}")
        ]
    for note in report.credit_notes:
        status.append(
            Text(f"{note.number} refunds {note.amount} of {note.invoice_number}: {note.reason}")
        )
    if check.balanced:
        verdict = Text(f"check     {sums}: balanced", style="green")
    else:
        off = check.usage_token_count - check.ledger_token_count - check.unrated_token_count
        verdict = Text(
            f"check     {sums.replace(' = ', ' ≠ ')}: OFF BY {off:,} TOKENS", style="bold red"
        )
    return [
        *status,
        Text(ended),
        Text(unrated, style="yellow" if report.unrated_event_count else ""),
        verdict,
    ]


@dataclass(frozen=True, slots=True)
class Day:
    """Day of a month with its tokens, which are None if the day has not begun."""

    number: int
    token_count: int | None


@dataclass(frozen=True, slots=True)
class DailyPlot:
    """Bar chart of tokens by day, with title and peak above it."""

    title: str
    days: Sequence[Day]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the chart. To fit, columns get narrower, then the axis goes, then days merge."""
        marks = "  ..:::##" if options.ascii_only else EIGHTHS
        cells, axis, columns = layout(self.days, options.max_width)
        counts = [sum(day.token_count or 0 for day in column) for column in columns]
        top = max(counts, default=0)
        yield Text(self._head(len(self.days) > len(columns)), style="bold")
        gap = " " if cells > 1 else ""
        for row in range(HEIGHT_ROWS, 0, -1):
            bars = "".join(
                mark(count, top, row, marks) * max(cells - len(gap), 1) + gap for count in counts
            )
            shown = {
                HEIGHT_ROWS: top,
                HEIGHT_ROWS // 2 + 1: top * (HEIGHT_ROWS // 2 + 1) // HEIGHT_ROWS,
            }.get(row)
            label = short_count(shown) if shown else ""
            yield Text.assemble(f"{label:>{axis - 1}} " if axis else "", (bars.rstrip(), "cyan"))
        line = "-" if options.ascii_only else "─"
        yield Text(" " * axis + line * (cells * len(columns)), style="dim")
        yield Text(" " * axis + day_labels(columns, cells), style="dim")

    def _head(self, shared: bool) -> str:
        known = [day for day in self.days if day.token_count]
        if not known:
            return f"{self.title}: none"
        peak = max(known, key=lambda day: day.token_count or 0)
        several = ", several days a column" if shared else ""
        return f"{self.title}, most on day {peak.number}: {peak.token_count:,}{several}"


def layout(days: Sequence[Day], width: int) -> tuple[int, int, list[list[Day]]]:
    """Compute the width of a column and of the axis, in cells, and the days of each column."""
    axis = AXIS_CELLS if width >= AXIS_CELLS + len(days) else 0
    per_column = max(1, -(-len(days) // max(width - axis, 1)))
    columns = [list(days[start : start + per_column]) for start in range(0, len(days), per_column)]
    cells = max(1, min(COLUMN_CELLS_MAX, (width - axis) // max(len(columns), 1)))
    return cells, axis, columns


def mark(count: int, top: int, row: int, marks: str) -> str:
    """Choose a column's character in a row counted from below. Days with tokens are not blank."""
    if not count:
        return " "
    eighths = max(1, round(count * HEIGHT_ROWS * 8 / top)) - (row - 1) * 8
    return marks[max(0, min(eighths, 8))]


def day_labels(columns: Sequence[Sequence[Day]], cells: int) -> str:
    """Format the labels of the first and every fifth day, where they fit."""
    text = ""
    for index, column in enumerate(columns):
        at = index * cells
        is_labelled = index == 0 or any(day.number % 5 == 0 for day in column)
        if is_labelled and len(text) < at + (index == 0):
            labelled = (day.number for day in column if index == 0 or day.number % 5 == 0)
            text = f"{text:<{at}}{next(labelled)}"
    return text


def short_count(count: int) -> str:
    """Format a count in at most six characters: `950`, `12.3k`, `4.5M`."""
    if count < 1_000:
        return str(count)
    for limit, unit, letter in (
        (10**6, 10**3, "k"),
        (10**9, 10**6, "M"),
        (10**12, 10**9, "G"),
        (10**15, 10**12, "T"),
    ):
        if count < limit:
            tenths = count * 10 // unit
            return f"{tenths // 10}.{tenths % 10}{letter}"
    return f"{count:.0e}"


def daily_plot(month: str, by_day: dict[str, int], today: date) -> DailyPlot:
    """Build a chart of all days of a month. Future days are empty, late usage is left out."""
    begins = date.fromisoformat(f"{month}-01")
    ends = (begins + timedelta(days=31)).replace(day=1)
    days = [begins + timedelta(days=index) for index in range((ends - begins).days)]
    return DailyPlot(
        f"tokens per day of {month} (UTC)",
        [Day(day.day, by_day.get(str(day), 0) if day <= today else None) for day in days],
    )
