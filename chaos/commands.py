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
        typer.Option(
            "--rounds", min=1, help="How many rounds. Each ends with a check of everything."
        ),
    ] = 10,
    kills: Annotated[
        int, typer.Option("--kills", min=1, max=1000, help="How many kills in each round.")
    ] = 5,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Same seed, same kills and requests; timing still varies."),
    ] = None,
    engine: Annotated[
        Literal["simulated", "demo"],
        typer.Option("--engine", help="A simulated engine as fast as a GPU, or the bundled model."),
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
    """Kill parts of a separate Weir under load, and check that every token is billed once.

    It does not touch the Weir that you run. If a token is missing or counted twice, or another
    check fails, it exits with 1 and keeps data and logs.
    """
    from chaos.rounds import run

    sound = run(rounds, kills, seed, engine, with_redis=redis, directory=directory, as_json=as_json)
    if not sound:
        raise typer.Exit(ExitCode.FAILED)
