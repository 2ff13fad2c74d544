"""Program `weir`: help and completion from the tables of commands, which are imported to run."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperCommand, TyperGroup
    from typer.exceptions import TyperException
except ModuleNotFoundError:
    sys.exit(
        "error: the command line needs the extra `cli` of the client: pip install"
        " './sdk/python[cli]' in a clone"
    )

from weir_cli.commands import PERSONAS, Command, ExitCode, all_commands
from weir_cli.parameters import Option, unify, wide_and_home

# Errors of writing to a full or broken disk.
OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMMANDS = all_commands()
EARLY = ("--json", "--wide")  # options of commands that may be written before the command
# Words that other programs use for the same action; ours are among them.
SYNONYMS = (
    ("delete", "remove", "rm", "del", "revoke", "withdraw", "kill", "stop", "down", "end"),
    ("list", "ls", "show", "get", "describe"),
    ("create", "add", "new", "grant"),
    ("set", "update", "edit", "change"),
    ("up", "start", "run"),
)
HELP_WIDTH = 80  # columns of the help output
HELP_END = "More: weir help COMMAND. Exit codes: " + ", ".join(
    f"{each:d} {each.name.lower().replace('_', ' ')}" for each in ExitCode
)


def imported(command: Command) -> Any:
    """Import the function or typer group that a command's target names."""
    module, _, name = command.target.partition(":")
    return getattr(import_module(module), name)


class GroupOption(Option):
    """Option of a group whose default stays text, since converting it would load pydantic."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        is_default = ctx.get_parameter_source(self.name).name == "DEFAULT"
        return value if is_default else super().process_value(ctx, value)


class Group(TyperGroup):
    """Group whose help shows the first paragraph of each command's help, not cut to one line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group, including those that typer adds."""
        found = super().get_params(ctx)
        for option in found:
            option.__class__ = GroupOption
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. For another program's word for it, the error names the one here."""
        if args and args[0] not in self.commands:
            words = next((each for each in SYNONYMS if args[0] in each), ())
            if meant := [repr(each) for each in words if each in self.commands]:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {', '.join(meant)}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the options of a command that are written before its name behind it."""
        if not self.invoke_without_command:
            args = early_last(args, self.params)
        is_completing = ctx.resilient_parsing
        if self.lists_by_default and not is_completing and all(each in EARLY for each in args):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    @property
    def lists_by_default(self) -> bool:
        """True if the group has a `list` that needs nothing: it runs without a command's name."""
        listing = self.commands.get("list")
        return listing is not None and not any(each.required for each in listing.params)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            command.short_help = (command.help or "").partition("\n\n")[0]
        super().format_commands(ctx, formatter)
        if self.lists_by_default:
            formatter.write(f"\n{ctx.command_path} alone is {ctx.command_path} list.\n")


def early_last(args: list[str], options: list[Any]) -> list[str]:
    """Move `--json` and `--wide` from before the name of a command to its end."""
    valued = {name for each in options if not each.is_flag for name in each.opts}
    at, early, rest = 0, list[str](), list(args)
    while at < len(rest) and rest[at].startswith("-") and rest[at] != "--":
        if rest[at] in EARLY:
            early.append(rest.pop(at))
        else:
            at += 2 if rest[at] in valued else 1
    end = rest.index("--") if "--" in rest else len(rest)
    return rest[:end] + early + rest[end:]


def unified(command: Any) -> Any:
    """Give a command the parameters that all have, in their one form."""
    shared = {option.opts[0]: option for option in plain(wide_and_home, "shared").params}
    for option in shared.values():
        option.expose_value = False
    return unify(command, shared)


def single(command: Command, name: str) -> Any:
    """Make a command with this name from the function of a table entry."""
    return plain(imported(command), name)


def plain(function: Callable[..., Any], name: str) -> Any:
    """Make a command from a function, with plain help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(function)
    return typer.main.get_command(app)


def load(name: str) -> Any:
    """Build a command by name. A group includes the commands that other distributions add."""
    target = imported(COMMANDS[name])
    if not isinstance(target, typer.Typer):
        return unified(single(COMMANDS[name], name))
    group = group_of(target)
    group.name = name
    for other, entry in COMMANDS.items():
        parent, _, added = other.partition(" ")
        if parent == name and added:
            group.add_command(single(entry, added))
    return unified(group)


def group_of(target: typer.Typer) -> TyperGroup:
    """Build a group with plain help, since rich takes longer to load than everything else."""
    target.rich_markup_mode = None
    for each in (target, *(nested.typer_instance for nested in target.registered_groups)):
        assert each is not None
        each.info.cls = Group
    return typer.main.get_group(target)


class LazyGroup(Group):
    """Group that knows the names and help of all commands, but imports only the one that runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            if " " not in name:
                self.add_command(TyperCommand(name, help=entry.help))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `weir help COMMAND` as `weir COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is about to run, in place of its placeholder."""
        if args and args[0] in self.commands:
            self.add_command(load(args[0]))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors of values are shown without pydantic's prefix."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            message = error.message.removeprefix("Value error, ")
            error.message = message.replace("Input should be", "must be", 1)
            raise
        except TyperException as error:
            if re.match(r"No such option: -[\d.]", getattr(error, "message", "")):
                error.message = "an amount must be above 0: write it without the minus sign"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write one help line per command, grouped by the role of the user."""
        options = ", ".join(parameter.opts[0] for parameter in self.get_params(ctx))
        lines = [f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]..."]
        for persona in PERSONAS:
            heading = persona
            for name, entry in COMMANDS.items():
                if entry.persona == persona and " " not in name:
                    lines.append(f"{heading:<10} {name:<12} {entry.help}")
                    heading = ""
        lines += textwrap.wrap(
            f"Options: {options}. {HELP_END}.", HELP_WIDTH, break_on_hyphens=False
        )
        formatter.write("\n".join(lines) + "\n")


app = typer.Typer(
    cls=LazyGroup,
    name="weir",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    if requested:
        from weir_cli.checkout import installed_version

        typer.echo(f"weir {installed_version()}")
        raise typer.Exit


@app.callback()
def weir(
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca",
            help="PEM file of trusted CAs. Default: $WEIR_ROOT_CERTIFICATES, then the system's.",
        ),
    ] = None,
    client_certificate: Annotated[
        Path | None,
        typer.Option(help="PEM file, for mutual TLS. Default: $WEIR_CLIENT_CERTIFICATE."),
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(help="PEM file of its key. Default: $WEIR_CLIENT_KEY.")
    ] = None,
    version: Annotated[  # handled by its callback
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Weir: language models as a metered stream, from a key to an invoice."""
    given = {
        "WEIR_ROOT_CERTIFICATES": ca,
        "WEIR_CLIENT_CERTIFICATE": client_certificate,
        "WEIR_CLIENT_KEY": client_key,
    }
    for variable, path in given.items():
        if path is not None:  # the SDK reads these variables in every client
            os.environ |= {variable: str(path), "WEIR_TLS": "1"}


def main() -> None:
    """Run `weir` with the arguments of the process."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's log lines would mix with the answer
    try:
        try:
            app(prog_name="weir")
        finally:
            sys.stdout.flush()  # here a failed write can still be reported
    except OSError as error:
        if error.errno not in OUTPUT_LOST:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # its buffer cannot be written either
        typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
        sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    main()
