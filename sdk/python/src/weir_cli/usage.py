"""Command `weir usage`: usage and cost of the caller's key or project, as table and chart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer
from weir_client import UsageGrouping

from weir_cli.connection import Output, PresentMonthArgument, calls, inference_client
from weir_cli.months import (
    UNORDERED,
    WHOSE,
    Group,
    kinds_of,
    parse_labels,
    parse_rows,
    present_day,
)
from weir_cli.render import Table
from weir_cli.texts import Cell, decimal_text, money_places

if TYPE_CHECKING:
    from rich.console import RenderableType
    from weir_client import Client, UsageReport, UsageRow

# Columns of requests that ended early, drawn if there are any.
EARLY: Mapping[str, Callable[[UsageRow], Cell]] = {
    "cancelled": lambda row: row.cancelled.request_count,
    "limited": lambda row: row.limited.request_count,
    "failed": lambda row: row.failed.request_count,
}
WORDS = ("day", "hour", "model", "end-user", "label:KEY")  # of --by
DROP = ("failed", "limited", "cancelled", "cached", "thinking", "requests")  # the first one first


@calls(inference_client, options=WHOSE)
def usage(
    client: Client,
    month: PresentMonthArgument = "",
    first: Annotated[
        datetime | None,
        typer.Option(
            "--from",
            help="Instead of a month: the first day, YYYY-MM-DD in UTC.",
            formats=["%Y-%m-%d"],
            metavar="DAY",
        ),
    ] = None,
    last: Annotated[
        datetime | None,
        typer.Option(
            "--to",
            help="The last day, at most 92 days in all. Default: today.",
            formats=["%Y-%m-%d"],
            metavar="DAY",
        ),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            help="A row for each day, hour, model, end-user, label:KEY, or several with commas.",
        ),
    ] = "day",
    model: Annotated[str, typer.Option("--model", help="Only this model.")] = "",
    all_keys: Annotated[
        bool,
        typer.Option("--all-keys", help="The sum of all keys of your project, not only your own."),
    ] = False,
    plot: Annotated[
        bool | None,
        typer.Option(
            "--plot/--no-plot", help="Draw the tokens of each day. Default: on a terminal."
        ),
    ] = None,
    *,
    end_user: str,
    labels: list[str] | None,
) -> Output:
    """Show usage and cost of your key, by day, hour, model, end user or label.

    Costs are exact, before plan, credit and tax, and include requests that ended a second ago.
    """
    groups = parse_rows(by, WORDS)
    if not groups:
        raise typer.BadParameter(f"must have one of {', '.join(WORDS)}", param_hint="--by")
    if month and (first or last):
        raise typer.BadParameter("give a month, or days with --from and --to", param_hint="MONTH")
    if last and not first:
        raise typer.BadParameter("is needed with --to", param_hint="--from")
    found = client.usage(
        month=month,
        first_day=first.date() if first else "",
        last_day=last.date() if last else "",
        by=[str(each) for each in groups],
        model=model,
        end_user=end_user,
        labels=parse_labels(labels),
        project=all_keys,
    )
    parts: list[RenderableType] = [usage_table(found, groups, all_keys=all_keys)]
    is_drawn = plot if plot is not None else sys.stdout.isatty()
    if is_drawn and Group(UsageGrouping.DAY) in groups and found.rows:
        parts.append(chart(found))
    return found, *parts


def usage_table(found: UsageReport, groups: list[Group], *, all_keys: bool) -> RenderableType:
    """Build the table of rows and total, without columns that have only zeros."""
    shown = [*found.rows, found.total]
    decimals = money_places(row.cost for row in shown)
    numbers: dict[str, Callable[[UsageRow], Cell]] = {
        "requests": lambda row: row.request_count,
        **kinds_of(shown),
        **{name: cell for name, cell in EARLY.items() if cell(found.total)},
        "cost": lambda row: decimal_text(row.cost.amount, decimals),
    }
    days = f"{found.first_day} to {found.last_day} (UTC)"
    of = "all keys of the project" if all_keys else "this key"
    if not found.rows:
        return f"{of}, {days}: no usage"
    title = " · ".join((of, days, f"cost in {found.total.cost.currency_code}"))
    rows = list(found.rows)
    if groups[0].grouping in UNORDERED:
        rows.sort(key=lambda row: -row.cost.picos)
    keys: dict[str, Callable[[UsageRow], Cell]] = dict(each.column for each in groups)
    drawn = Table(keys | numbers, right=numbers, title=title, drop=DROP).drawn(rows)
    drawn.add_section()
    blanks = [""] * (len(keys) - 1)
    totals = [number(found.total) for number in numbers.values()]
    drawn.add_row("total", *blanks, *totals, style="bold")
    return drawn


def chart(found: UsageReport) -> RenderableType:
    """Draw the tokens of each day of the report; late usage of earlier days is left out."""
    from weir_cli.tables import DailyPlot
    from weir_cli.tables import Day as DrawnDay

    first, last = date.fromisoformat(found.first_day), date.fromisoformat(found.last_day)
    by_day: dict[str, int] = {}
    for row in found.rows:
        by_day[row.day] = by_day.get(row.day, 0) + row.token_count
    days = [first + timedelta(days=index) for index in range((last - first).days + 1)]
    today = present_day()
    return DailyPlot(
        "tokens per day (UTC)",
        [DrawnDay(day.day, by_day.get(str(day), 0) if day <= today else None) for day in days],
    )
