"""`weir doctor`: looks at what this machine really does, where Weir relies on what others have written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from api.cli.local import clear_failures
from api.cli.output import JsonOption, print_json, show

if TYPE_CHECKING:
    from inference.adapters.findings import Observation

doctor = typer.Typer(help="Look at what this machine really does.", no_args_is_help=True)


@doctor.callback()
def group() -> None:
    """Look at what this machine really does."""


@doctor.command()
def tensorrt(
    model: Annotated[Path, typer.Option("--model", help="A checkpoint in Hugging Face layout.", exists=True, file_okay=False)],
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1, help="GPUs that share each matrix.")] = 1,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Put a list of questions to TensorRT-LLM on this machine, and show the answers. Takes the GPU for a few minutes.

    Exit code 1 if something is so that the engine of Weir would not work here.
    """
    from inference.adapters.tensorrt_doctor import examine
    from inference.adapters.tensorrt_settings import TensorRtOptions
    from inference.checkpoint.checkpoint import read_config
    from inference.limits import EngineLimits

    with clear_failures():
        config = read_config(model)
        window = min(config.context_window_tokens, 8192)
        limits = EngineLimits(context_window_tokens=window, step_token_count_max=2048, running_sequence_count_max=batch)
        options = TensorRtOptions(tensor_parallel_size=tensor_parallel)
        found = examine(str(model), config.vocabulary_size, limits, options)
    report("TensorRT-LLM on this machine", found, as_json)


@doctor.command()
def remote(
    target: Annotated[str, typer.Argument(help="trtllm://host:port or vllm://host:port.")],
    model: Annotated[Path, typer.Option("--model", help="The directory with its tokenizer.", exists=True, file_okay=False)],
    share_prefixes: Annotated[bool, typer.Option("--share-prefixes", help="Tenants may share cached prefixes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put a list of questions to a server of `trtllm-serve --grpc` or `vllm serve --grpc`, and show the answers.

    Certificates are those of WEIR_REMOTE_TLS_*. Exit code 1 if something is so that Weir would not use the server.
    """
    import asyncio

    from api.core.settings import Settings
    from api.fleet.remote_engines import remote_settings
    from inference.adapters.remote_doctor import examine

    with clear_failures():
        settings = replace(remote_settings(Settings.from_environment(), "doctor", target, model), share_prefixes=share_prefixes)
        found = asyncio.run(examine(settings))
    report(f"{target}, as Weir sees it", found, as_json)


def report(title: str, found: Sequence[Observation], as_json: bool) -> NoReturn:
    """Show what was found; ends the command, with exit code 1 if anything is bad."""
    from rich.table import Table

    from inference.adapters.findings import Verdict

    if as_json:
        print_json(found)
    else:
        table = Table("question", "verdict", "seen", title=title, title_justify="left")
        for observation in found:
            table.add_row(observation.question, observation.verdict.value, observation.seen)
        show(table)
    raise typer.Exit(any(observation.verdict is Verdict.BAD for observation in found))
