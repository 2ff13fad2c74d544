"""`weir up`: a whole installation on one machine, in the foreground."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.panel import Panel

from api.cli.connection import ConnectionProblem, connection_path, read_connection_file, reported
from api.cli.local import HomeOption, ListenOption, clear_failures, read_settings, stderr
from api.cli.render import fail, note
from api.core.endpoint import Told, read_endpoint


def up(listen: ListenOption = "", home: HomeOption = None) -> None:
    """Start everything on this machine: PostgreSQL, API server, engine, Celery worker and beat. Ctrl-C stops it all.

    Everything is kept in the home directory. With WEIR_DATABASE_URL or WEIR_BROKER_URL set, those servers are used instead of
    embedded ones.
    """
    with clear_failures():
        asyncio.run(run_until_stopped(listen, home))


async def run_until_stopped(listen: str, home: HomeOption) -> None:
    """Run the stack until SIGINT or SIGTERM."""
    from api.cli.stack import run_stack

    settings = read_settings(home, listen)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopping.set)
    with stderr.status("Starting") as status:
        async with asyncio.TaskGroup() as tasks, run_stack(settings, status.update) as stack:
            status.stop()
            stderr.print(welcome(stack.connection.address, settings.home, read_endpoint(settings.home)))
            supervisor = tasks.create_task(stack.supervise(lambda message: stderr.print(f"[yellow]{message}[/yellow]")))
            await stopping.wait()
            supervisor.cancel()
            stderr.print("Stopping: running requests finish first")


def welcome(address: str, home: Path, told: Told) -> Panel:
    """What to do next. told: by the server, of its doors over HTTP."""
    openai = f"\nOpenAI's clients take [bold]base_url={told.openai_url}[/bold] with the same keys." if told.openai_url else ""
    metrics = f"\nPrometheus scrapes {told.metrics_url}." if told.metrics_url else ""
    weir = command_name()
    sign_in = f"sign in with a key of `{escape(weir)} env`"
    console = f"\nThe console is at [bold]{told.console_url}[/bold]: {sign_in}." if told.console_url else ""
    elsewhere = (
        ""
        if home == Path.home() / ".weir"
        else f"  export WEIR_HOME={shlex.quote(str(home))}   where the commands find this server\n"
    )
    return Panel(
        f"Weir listens on [bold]{address}[/bold].{openai}{console}{metrics} In another terminal:\n\n"
        f"{escape(elsewhere)}"
        f'  {weir} generate "Hello"\n'
        f"  {weir} quota set tokens-per-month 1000000 --org demo\n"
        f"  {weir} report month --help\n"
        f'  eval "$({weir} env)"   for programs that use the SDKs\n\n'
        f"Keys are in {home}/connection.json, logs in {home}/logs. Ctrl-C stops everything.",
        title="weir up",
        expand=False,
    )


def command_name() -> str:
    """How this program is called from this directory: `weir`, or its path where a shell would not find it by that name."""
    called = sys.argv[0]
    known = Path(called).name != "weir" or shutil.which("weir") == called
    return "weir" if known else shlex.quote(called)


def env() -> None:
    """Print where `weir up` listens and its keys, for the shell: eval "$(weir env)".

    The SDKs, and every command, then find that server from any directory and any language.
    """
    with reported(None):
        file = read_connection_file()
        if not file.address:
            raise ConnectionProblem(f"there is no {connection_path()}: start a server with `weir up`")
        variables = {"WEIR_ADDRESS": file.address, "WEIR_API_KEY": file.api_key, "WEIR_ADMIN_KEY": file.admin_key}
        for name, value in variables.items():
            if value:
                typer.echo(f"export {name}={shlex.quote(value)}")


def console(
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    home: HomeOption = None,
) -> None:
    """Print where the console of the server on this machine is.

    It asks for an API key and shows what that key may see. `weir env` prints the keys that `weir up` made.
    """
    settings = read_settings(home)
    told = read_endpoint(settings.home)
    if not told.serving:
        fail(f"no server of {settings.home} serves now: start one with `weir up`")
    if not told.console_url:
        fail("the server has no console: it was started with WEIR_CONSOLE=0 or WEIR_OPENAI_LISTEN=off")
    typer.echo(told.console_url)
    if open_browser and not webbrowser.open(told.console_url):
        note("no browser could be opened here: open the address in yours")
