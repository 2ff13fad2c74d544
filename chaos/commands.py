"""Command `weir chaos`: options and texts, without the imports of its code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from weir_cli.commands import ExitCode
from weir_cli.render import JsonOption


def chaos(
    rounds: Annotated[
        int,
        typer.Option("--rounds", min=1, help="Rounds; each ends with an audit."),
    ] = 10,
    kills: Annotated[
        int, typer.Option("--kills", min=1, max=1000, help="Kills in each round.")
    ] = 5,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of kills and requests; timing still varies."),
    ] = None,
    engine: Annotated[
        Literal["simulated", "demo"],
        typer.Option("--engine", help="Engine: simulated at GPU speed, or the bundled model."),
    ] = "simulated",
    redis: Annotated[
        bool,
        typer.Option("--redis", help="Use a separate Redis as broker, and kill it too."),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--directory", help="Keep data and logs here. [default: a temporary one]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Kill parts of a separate Weir under load, and compare clients, usage, ledger and biller.

    Needs no running server and touches none. Exit code 1 if a token is missing or counted twice, or
    another check fails; data and logs are kept then.
    """
    from chaos.rounds import run

    sound = run(rounds, kills, seed, engine, with_redis=redis, directory=directory, as_json=as_json)
    if not sound:
        raise typer.Exit(ExitCode.FAILED)
