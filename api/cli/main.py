"""The entry of `weir`: a table of commands, each loaded when it is used, so that help and completion are quick.

To add a command, add a line to `COMMANDS`. Its target is a function with typer annotations, or a `typer.Typer` for a group.
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True, slots=True)
class Entry:
    """One command: where its code is, and what help says before that is loaded."""

    target: str
    help: str
    panel: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what writing to a full or broken disk says
SERVE, ASK, MANAGE, PAY = "Run Weir", "Use models", "Manage access", "See usage and money"
COMMANDS = {
    "up": Entry("api.cli.stack:up", "Start everything on this machine.", SERVE),
    "env": Entry("api.cli.stack:env", "Tell programs where `weir up` listens, and its keys.", SERVE),
    "console": Entry("api.cli.stack:console", "Tell where the page for people is; open it.", SERVE),
    "serve": Entry("api.cli.stack:serve", "Start one API server.", SERVE),
    "demo": Entry("api.cli.demo:demo", "Show the whole path of a request, live.", SERVE),
    "chaos": Entry("api.chaos.rounds:chaos", "Break a Weir of its own, and account for every token.", SERVE),
    "doctor": Entry("api.cli.stack:doctor", "Look at what this machine really does.", SERVE),
    "worker": Entry("api.cli.stack:worker", "Start one billing worker.", SERVE),
    "migrate": Entry("api.cli.stack:migrate", "Bring the database to the current schema.", SERVE),
    "init": Entry("api.cli.stack:init", "Create the first organization and admin key.", SERVE),
    "generate": Entry("api.cli.generate:generate", "Stream a model's answer to the terminal.", ASK),
    "embed": Entry("api.cli.generate:embed", "Turn texts into vectors.", ASK),
    "models": Entry("api.cli.generate:models", "List the models and their prices.", ASK),
    "count": Entry("api.cli.generate:count", "Count the tokens of a prompt.", ASK),
    "quote": Entry("api.cli.generate:quote", "Tell what a request would cost, and whether it fits.", ASK),
    "trace": Entry("api.cli.requests:trace", "Show where the time of one request went.", ASK),
    "org": Entry("api.cli.tenants:org", "Create and list organizations.", MANAGE),
    "project": Entry("api.cli.tenants:project", "Create and list projects.", MANAGE),
    "key": Entry("api.cli.tenants:key", "Create, rotate, change, revoke and list API keys.", MANAGE),
    "quota": Entry("api.cli.tenants:quota", "Set, show and remove limits.", MANAGE),
    "requests": Entry("api.cli.requests:requests", "Show and end what runs.", MANAGE),
    "replicas": Entry("api.cli.requests:replicas", "Show the engines behind each model; drain one.", MANAGE),
    "apply": Entry("api.cli.configuration:apply", "Make everything what a file says.", MANAGE),
    "export": Entry("api.cli.configuration:export", "Write everything as such a file.", MANAGE),
    "audit": Entry("api.cli.audit:audit", "Read who changed what.", MANAGE),
    "price": Entry("api.cli.plans:price", "Set, list and try out prices.", PAY),
    "plan": Entry("api.cli.plans:plan", "Make plans, and say who has which.", PAY),
    "credit": Entry("api.cli.plans:credit", "Grant credit, and see what is left of it.", PAY),
    "alerts": Entry("api.cli.alerts:alerts", "Read alerts on limits and credit; have them posted.", PAY),
    "month": Entry("api.cli.months:month", "Close months, read them, prove that they are what they were.", PAY),
    "adjustment": Entry("api.cli.months:adjustment", "Put a line on the next invoice.", PAY),
    "credit-note": Entry("api.cli.months:credit_note", "Give back a part of an invoice.", PAY),
    "report": Entry("api.cli.months:report", "Report usage and money by month.", PAY),
    "reconcile": Entry("api.cli.stripe:reconcile", "Compare a month from its usage to the biller's invoice.", PAY),
    "fsck": Entry("api.cli.audit:fsck", "Prove that the books are right.", PAY),
    "receipt": Entry("api.cli.receipts:receipt", "Export receipts and verify them.", PAY),
    "stripe": Entry("api.cli.stripe:stripe", "Bill with Stripe: sync, compare, correct.", PAY),
}


def load(name: str) -> Any:
    entry = COMMANDS[name]
    module, _, attribute = entry.target.partition(":")
    target = getattr(import_module(module), attribute)
    if isinstance(target, typer.Typer):
        command: Any = typer.main.get_group(target)
    else:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command()(target)
        command = typer.main.get_command(single)
    command.name = name
    return command


class LazyGroup(TyperGroup):
    """A group that knows its commands' names and help by heart, and imports only the one that is run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            if find_spec(entry.module) is not None:
                self.add_command(TyperCommand(name, help=entry.help, rich_help_panel=entry.panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replaces the stand-in by the command itself."""
        if args and args[0] in self.commands:
            self.add_command(load(args[0]))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=LazyGroup,
    name="weir",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weir {metadata.version('weir')}")
        raise typer.Exit


@app.callback()
def weir(
    ca: Annotated[
        Path | None,
        typer.Option("--ca", help="PEM file of the authorities to trust. Else $WEIR_ROOT_CERTIFICATES, else the system's."),
    ] = None,
    client_certificate: Annotated[
        Path | None, typer.Option(help="PEM file, for servers that want to see one. Else $WEIR_CLIENT_CERTIFICATE.")
    ] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM file of its key. Else $WEIR_CLIENT_KEY.")] = None,
    version: Annotated[  # read by its callback alone
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Weir: language models as a metered stream, from a key to an invoice."""
    given = {"WEIR_ROOT_CERTIFICATES": ca, "WEIR_CLIENT_CERTIFICATE": client_certificate, "WEIR_CLIENT_KEY": client_key}
    for variable, path in given.items():
        if path is not None:  # the SDK reads them there, whichever client a command uses
            os.environ |= {variable: str(path), "WEIR_TLS": "1"}


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's log lines would stand between the words of an answer
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # what is left of the output, while its failure can still be told
    except OSError as error:
        if error.errno not in OUTPUT_LOST:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is left in it cannot go out either
        typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
