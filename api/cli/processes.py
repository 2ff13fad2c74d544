"""`weir serve`, `worker`, `migrate`, `init` and `doctor`: commands that start or prepare one process of a deployment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from api.cli.render import JsonOption, fail, print_json, show, table
from api.cli.stack import HomeOption, ListenOption, clear_failures, read_settings, stderr
from metering.worker import worker_command

GRANT_HELP = (
    "Database role of api processes and workers: gets the rights that they need on every table, and loses all others. "
    "WEIR_APPLICATION_PASSWORD creates it where it is missing and sets its password."
)

doctor = typer.Typer(help="Look at what this machine really does.", no_args_is_help=True)


def serve(listen: ListenOption = "", home: HomeOption = None) -> None:
    """Start one API server on the database of WEIR_DATABASE_URL, until SIGTERM or Ctrl-C.

    `weir up` starts a whole installation on one machine instead. Migrate first: `weir migrate`.
    """
    from api.__main__ import main
    from metering.store.migrations_runner import is_current

    settings = read_settings(home, listen)
    if not settings.database_url:
        fail("WEIR_DATABASE_URL is not set: name a PostgreSQL database, or start everything on this machine with `weir up`", 2)
    with clear_failures():
        if not is_current(settings.database_url):
            fail("the database has not the schema of this version: run `weir migrate` first")
        main({**os.environ, **settings.to_environment()})


def worker(home: HomeOption = None) -> None:
    """Start one worker on the database of WEIR_DATABASE_URL: it rates, ends stuck holds and exports, until SIGTERM or Ctrl-C.

    Any number may run. With WEIR_BROKER_URL (Redis) they may be on several machines; `weir up` starts one by itself.
    """
    settings = read_settings(home)
    if not settings.database_url:
        fail("WEIR_DATABASE_URL is not set: name the database that the worker is to work on", 2)
    command = worker_command()
    os.execve(command[0], command, {**os.environ, **settings.to_environment()})


def migrate(
    revision: Annotated[str, typer.Argument(help="Where to stop.")] = "head",
    home: HomeOption = None,
    grant: Annotated[str, typer.Option(metavar="ROLE", help=GRANT_HELP, show_default=False)] = "",
) -> None:
    """Bring the database of WEIR_DATABASE_URL to the schema of this version; without one, the embedded database of the home."""
    from metering.store import embedded_postgres
    from metering.store.migrations_runner import PASSWORD_VARIABLE, RoleUnfit, prepare_application_role
    from metering.store.migrations_runner import migrate as upgrade

    settings = read_settings(home)
    if grant and not settings.database_url:
        fail("--grant is for a PostgreSQL of your own: set WEIR_DATABASE_URL; the embedded one has a single user", 2)
    if grant and revision != "head":
        fail(f"--grant {grant} needs the newest schema, revision `head`, got {revision!r}: leave the revision out", 2)
    with clear_failures():
        if settings.database_url:
            upgrade(settings.database_url, revision)
            if grant:
                try:
                    prepare_application_role(settings.database_url, grant, os.environ.get(PASSWORD_VARIABLE, ""))
                except RoleUnfit as error:
                    fail(str(error))
        else:
            server = embedded_postgres.start(settings.home / "postgres")
            try:
                upgrade(server.url, revision)
            finally:
                server.stop()
    stderr.print("the database is at the schema of this version")
    if grant:
        stderr.print(f"role {grant} has the rights that api processes and workers need, and no others")


def init(
    organization: Annotated[str, typer.Option(help="Name of the first organization.")] = "main",
    project: Annotated[str, typer.Option(help="Name of its first project.")] = "default",
    json_output: JsonOption = False,
) -> None:
    """Create the first organization, project and admin key in the database of WEIR_DATABASE_URL, and prices for the models.

    On this machine it makes the key that signs receipts, where there is none and WEIR_RECEIPT_KEY_FILE does not say `off`.
    What exists stays as it is; each run makes one more admin key. Its secret is printed once and can never be shown again.
    """
    from api.cli.stack import create_admin, ensure_receipt_key
    from api.fleet.fleet_file import model_names
    from metering.store.migrations_runner import is_current

    settings = read_settings()
    if not settings.database_url:
        fail("WEIR_DATABASE_URL is not set: name the database of the installation", 2)
    with clear_failures():
        if not is_current(settings.database_url):
            fail("the database has not the schema of this version: run `weir migrate` first")
        receipt_key = ensure_receipt_key(settings)
        secret = asyncio.run(create_admin(settings.database_url, organization, project, *model_names(settings)))
    if json_output:
        print_json({"organization": organization, "project": project, "admin_key": secret})
        return
    typer.echo(secret)
    stderr.print("This admin key is shown once. Keep it as WEIR_ADMIN_KEY where you run `weir`.")
    if receipt_key is not None:
        stderr.print(f"Receipts will be signed with {receipt_key}: copy it to the other machines that serve.")


if TYPE_CHECKING:
    from inference.adapters.findings import Observation


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
    from api.fleet.fleet import remote_settings
    from inference.adapters.remote_doctor import examine

    with clear_failures():
        settings = replace(remote_settings(Settings.from_environment(), "doctor", target, model), share_prefixes=share_prefixes)
        found = asyncio.run(examine(settings))
    report(f"{target}, as Weir sees it", found, as_json)


def report(title: str, found: Sequence[Observation], as_json: bool) -> NoReturn:
    """Show what was found; ends the command, with exit code 1 if anything is bad."""
    from inference.adapters.findings import Verdict

    if as_json:
        print_json(found)
    else:
        rows = ((each.question, each.verdict.value, each.seen) for each in found)
        show(table("question", "verdict", "seen", title=title, rows=rows))
    raise typer.Exit(any(observation.verdict is Verdict.BAD for observation in found))
