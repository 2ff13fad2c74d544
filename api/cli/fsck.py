"""`weir fsck`: proof of the ledger's invariants."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import psycopg.errors
import typer
from rich.markup import escape
from weir_cli.commands import ExitCode
from weir_cli.render import fail, make_console, print_json
from weir_cli.texts import duration_text

from api.cli.stack import clear_failures, local_database, open_sessions
from metering.invoicing.months import changed_months
from metering.proof.check import Check, Moment
from metering.proof.fsck import CHECKS, Verdict, Violation, select_checks
from metering.proof.fsck import fsck as run_checks

MOMENTS = {
    Moment.ALWAYS: "always",
    Moment.SOON: "while workers run",
    Moment.AT_REST: "with --at-rest",
}
# The only check without SQL: the code of the close recomputes the reports.
REPRODUCED = Check(
    "closed-months-reproduce",
    "Recomputing the report of every closed month gives the same bytes, with the digests of its"
    " close.",
    sql="",
)


def prove(
    only: Sequence[str],
    since: datetime | None,
    *,
    at_rest: bool,
    sample_max: int,
    as_json: bool,
    home: Path | None,
) -> None:
    """Run the checks named in `only`, or all, and print verdicts. Exits with 1 if any fails."""
    moments = tuple(Moment) if at_rest else (Moment.ALWAYS, Moment.SOON)
    names = [name for name in only if name != REPRODUCED.name]
    verdicts: list[Verdict] = []
    with clear_failures(), schema_of_this_version():
        checks = select_checks(names, moments) if names or not only else ()
        with local_database(home) as url:
            for verdict in run_checks(url, checks, since=since, sample_max=sample_max):
                verdicts.append(verdict)
                if not as_json:
                    print_check(verdict)
            if not only or REPRODUCED.name in only:
                verdicts.append(asyncio.run(reproduce_months(url, sample_max)))
                if not as_json:
                    print_check(verdicts[-1])
    wrong = [verdict for verdict in verdicts if verdict.violation_count]
    if as_json:
        print_json(
            {
                "sound": not wrong,
                "since": since,
                "checks": [document(verdict) for verdict in verdicts],
            }
        )
    else:
        conclude(verdicts, wrong)
    if wrong:
        raise typer.Exit(ExitCode.FAILED)


@contextlib.contextmanager
def schema_of_this_version() -> Iterator[None]:
    """Turn the error for a schema that this version cannot read into one line."""
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        problem = str(error).partition("\n")[0]
        fail(
            f"the database schema does not match this version of Weir ({problem}): run `weir"
            " migrate` first"
        )


async def reproduce_months(database_url: str, sample_max: int) -> Verdict:
    """Recompute the report of every closed month, and compare it with the digests of its close."""
    began_at = time.monotonic()
    async with open_sessions(database_url) as sessions, sessions() as session:
        found = [
            Violation(f"{name}, {month}", problem)
            async for name, month, problem in changed_months(session)
        ]
    return Verdict(REPRODUCED, len(found), tuple(found[:sample_max]), time.monotonic() - began_at)


def print_check(verdict: Verdict) -> None:
    """Print one line for a check, and one for each violation in its sample."""
    console = make_console()
    count = verdict.violation_count
    mark = f"[red]{count:,} wrong[/red]" if count else "[green]holds[/green]"
    console.print(
        f"{verdict.check.name:<28} {mark}  [dim]{duration_text(verdict.duration_s)}[/dim]"
    )
    for violation in verdict.sample:
        console.print(f"    {escape(str(violation))}", soft_wrap=True)
    if count > len(verdict.sample):
        console.print(f"    … and {count - len(verdict.sample):,} more: --sample shows more")


def conclude(verdicts: list[Verdict], wrong: list[Verdict]) -> None:
    took = duration_text(sum(verdict.duration_s for verdict in verdicts))
    failed = f"[red]{len(wrong)} of {len(verdicts)} checks failed[/red]"
    make_console().print(
        f"{failed if wrong else f'[green]All {len(verdicts)} checks hold[/green]'}, in {took}."
    )


def document(verdict: Verdict) -> dict[str, object]:
    """Convert a verdict for `--json`."""
    return {
        "name": verdict.check.name,
        "proves": verdict.check.proves,
        "moment": verdict.check.moment,
        "violation_count": verdict.violation_count,
        "sample": [{"subject": each.subject, "problem": each.problem} for each in verdict.sample],
        "duration_ms": round(verdict.duration_s * 1000),
    }


def print_checks(as_json: bool) -> None:
    """Print every check with its statement, and when that must hold."""
    checks = (*CHECKS, REPRODUCED)
    if as_json:
        print_json(
            [{"name": each.name, "moment": each.moment, "proves": each.proves} for each in checks]
        )
        return
    console = make_console()
    for each in checks:
        console.print(
            f"[bold]{each.name}[/bold] [dim]({MOMENTS[each.moment]})[/dim]\n   "
            f" {escape(each.proves)}"
        )
