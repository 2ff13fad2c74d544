"""A month of days as columns of blocks, in whatever width there is. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

HEIGHT_ROWS = 7  # with the head and two lines of axis it is a third of a small terminal
EIGHTHS = " ▁▂▃▄▅▆▇█"
COLUMN_CELLS_MAX = 3  # wider columns look like a table
AXIS_CELLS = 7  # `999.9M ` before the columns


@dataclass(frozen=True, slots=True)
class Day:
    """One day: its number in the month, and its tokens; None for a day that has not begun."""

    number: int
    token_count: int | None


@dataclass(frozen=True, slots=True)
class DailyPlot:
    """Tokens by day. The title stands above, with the peak."""

    title: str
    days: Sequence[Day]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws at the width there is: columns get narrower, then the axis goes, then days share a column."""
        marks = "  ..:::##" if options.ascii_only else EIGHTHS
        cells, axis, columns = layout(self.days, options.max_width)
        counts = [sum(day.token_count or 0 for day in column) for column in columns]
        top = max(counts, default=0)
        yield Text(self._head(len(self.days) > len(columns)), style="bold")
        gap = " " if cells > 1 else ""
        for row in range(HEIGHT_ROWS, 0, -1):
            bars = "".join(mark(count, top, row, marks) * max(cells - len(gap), 1) + gap for count in counts)
            shown = {HEIGHT_ROWS: top, HEIGHT_ROWS // 2 + 1: top * (HEIGHT_ROWS // 2 + 1) // HEIGHT_ROWS}.get(row)
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
    """Cells of a column, cells of the axis, and the days of each column."""
    axis = AXIS_CELLS if width >= AXIS_CELLS + len(days) else 0
    per_column = max(1, -(-len(days) // max(width - axis, 1)))
    columns = [list(days[start : start + per_column]) for start in range(0, len(days), per_column)]
    cells = max(1, min(COLUMN_CELLS_MAX, (width - axis) // max(len(columns), 1)))
    return cells, axis, columns


def mark(count: int, top: int, row: int, marks: str) -> str:
    """What a column shows in a row, counted from below; a day with any tokens shows something."""
    if not count:
        return " "
    eighths = max(1, round(count * HEIGHT_ROWS * 8 / top)) - (row - 1) * 8
    return marks[max(0, min(eighths, 8))]


def day_labels(columns: Sequence[Sequence[Day]], cells: int) -> str:
    """The first day and every fifth under their columns, where there is room."""
    text = ""
    for index, column in enumerate(columns):
        at = index * cells
        wanted = index == 0 or any(day.number % 5 == 0 for day in column)
        if wanted and len(text) < at + (index == 0):
            text = f"{text:<{at}}{column[0].number if index == 0 else next(d.number for d in column if d.number % 5 == 0)}"
    return text


def short_count(count: int) -> str:
    """A count in at most six characters: `950`, `12.3k`, `4.5M`."""
    if count < 1_000:
        return str(count)
    for limit, unit, letter in ((10**6, 10**3, "k"), (10**9, 10**6, "M"), (10**12, 10**9, "G"), (10**15, 10**12, "T")):
        if count < limit:
            tenths = count * 10 // unit
            return f"{tenths // 10}.{tenths % 10}{letter}"
    return f"{count:.0e}"
