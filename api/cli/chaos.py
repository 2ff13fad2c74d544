"""`weir chaos`: break a whole Weir of its own, again and again, and prove that no token is lost or billed twice."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from api.chaos.rounds import KILLS_PER_ROUND, Plan, Report, Row, chaos_settings, run_rounds
from api.cli.amounts import duration_text
from api.cli.local import clear_failures
from api.cli.output import JsonOption, make_console, note, print_json, show
from api.cli.render import table

TOLD_MAX = 20  # of what is wrong, on the terminal


class EngineChoice(StrEnum):
    """What answers: a simulated engine at GPU speed, or the bundled model."""

    SIMULATED = "simulated"
    DEMO = "demo"


def chaos(
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds; after each one everything is accounted for.")] = 10,
    kills: Annotated[int, typer.Option("--kills", min=1, max=1000, help="Kills in each round.")] = KILLS_PER_ROUND,
    seed: Annotated[int | None, typer.Option("--seed", help="Of what is killed and asked; timing stays the machine's own.")] = None,
    engine: Annotated[EngineChoice, typer.Option("--engine", help="What answers.")] = EngineChoice.SIMULATED,
    redis: Annotated[bool, typer.Option("--redis", help="With a Redis of its own as broker, which is killed too.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Keep data and logs here. [default: a temporary one]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Kill parts of a Weir of its own under load, and compare the tokens of clients, usage, ledger and biller after each round.

    Needs no running server and touches none. Exit code 1 if a token is missing or counted twice, or anything else is wrong; data
    and logs are kept then.
    """
    chosen = random.randrange(2**32) if seed is None else seed
    home = directory or Path(tempfile.mkdtemp(prefix="weir-chaos-"))
    home = home.expanduser().absolute()
    plan = Plan(rounds, chosen, engine.value, redis, kills)
    note(f"seed {chosen}, in {home}")
    began_at = time.monotonic()
    with clear_failures():
        report = asyncio.run(run_rounds(home, chaos_settings(plan.engine), plan, note))
    if as_json:
        print_json(document(report, chosen))
    else:
        tell(report, time.monotonic() - began_at)
    if report.wrong:
        note(f"data and logs are in {home}")
        raise typer.Exit(1)
    if directory is None:
        shutil.rmtree(home, ignore_errors=True)


def tell(report: Report, duration_s: float) -> None:
    """The table by kind of kill, and the verdict in words."""
    heads = ("killed", "kills", "requests hit", "refused", "cut off", "received", "billed", "in transit", "lost", "doubled")
    made = table(*heads, right=heads[1:])
    rows = report.rows()
    for kind, row in rows.items():
        made.add_row(kind or "(nothing)", *(f"{number:,}" for number in asdict(row).values()))
    made.add_row("all", *(f"{number:,}" for number in asdict(total(rows.values())).values()), style="bold")
    show(made)
    for name, seconds in report.back_s.items():
        note(f"{name} there again after {duration_text(seconds)} (median)")
    console = make_console()
    for each in report.wrong[:TOLD_MAX]:
        console.print(f"[red]wrong[/red] {escape(each)}", soft_wrap=True)
    if len(report.wrong) > TOLD_MAX:
        console.print(f"… and {len(report.wrong) - TOLD_MAX:,} more: see --json")
    verdict = "[red]something is wrong[/red]" if report.wrong else "[green]every token is accounted for, once[/green]"
    console.print(f"{len(report.kills):,} kills in {duration_text(duration_s)}: {verdict}.")


def total(rows: Iterable[Row]) -> Row:
    """All rows in one."""
    summed = Row()
    for row in rows:
        for name, number in asdict(row).items():
            setattr(summed, name, getattr(summed, name) + number)
    return summed


def document(report: Report, seed: int) -> dict[str, object]:
    """The report for `--json`."""
    rows = [{"killed": kind, **asdict(row)} for kind, row in report.rows().items()]
    return {"sound": not report.wrong, "seed": seed, "kill_count": len(report.kills), "rows": rows, "wrong": report.wrong}
