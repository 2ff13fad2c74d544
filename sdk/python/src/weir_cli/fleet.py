"""`weir fleet`: the models, versions, targets and aliases that all processes serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weir_cli.commands import ExitCode
from weir_cli.configuration import content_of
from weir_cli.connection import admin_client, calls
from weir_cli.render import JsonOption, Table, note, print_json, wrong_use
from weir_cli.texts import printable, time_text

if TYPE_CHECKING:
    from weir_client import AdminClient, AppliedFleet, FleetVersion, ServedFleet

TIMEOUT_S = 120.0  # the server reads the files of new models
WEIGHT_MAX = 1e6

fleet = typer.Typer(
    help=(
        "Show and change the models, versions, targets and aliases of all servers, while they run."
    ),
    no_args_is_help=True,
)
FileArgument = Annotated[
    Path | None,
    typer.Argument(
        help=(
            "Fleet file, or - for stdin. Its relative paths start at its folder, on the servers."
            " Default: the fleet of the server's own settings."
        )
    ),
]
NumberArgument = Annotated[int, typer.Argument(help="Number of a version.", min=1)]
ReasonOption = Annotated[
    str, typer.Option("--reason", help="Why. You see it in `weir fleet history`.")
]
ExpectOption = Annotated[
    int | None,
    typer.Option(
        "--expect",
        help="Number of the version that you changed; another one in force is an error.",
        min=0,
    ),
]
HISTORY: Table[FleetVersion] = Table(
    {
        "version": "number",
        "applied": "create_time",
        "by": "actor",
        "reason": lambda each: each.reason or None,
        "digest": lambda each: each.digest[:12],
    },
    right=("version",),
    drop=("digest",),
)


@fleet.command("show")
@calls(admin_client)
def show_fleet(
    client: AdminClient,
    number: Annotated[
        int, typer.Option("--number", help="Another version than the one in force.", min=0)
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write the fleet as a file that you can change and apply, and say who serves it."""
    found = client.get_fleet(number)
    if as_json:
        print_json(found)
        return
    typer.echo(found.version.document, nl=False)
    note(version_text(found.version))
    for line in served_texts(found):
        note(line)


@fleet.command("diff")
@calls(admin_client, timeout=TIMEOUT_S)
def diff_fleet(
    client: AdminClient,
    file: FileArgument = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 3 if the file would change something.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a file, and show what it would change. Changes nothing."""
    applied = sent(client, file, dry_run=True)
    print_applied(file, applied, as_json=as_json, dry_run=True)
    if exit_code and applied.changes:
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


@fleet.command("apply")
@calls(admin_client, timeout=TIMEOUT_S)
def apply_fleet(
    client: AdminClient,
    file: FileArgument = None,
    expect: ExpectOption = None,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make the fleet as a file says. All servers follow within seconds, without a restart.

    New models are loaded, and what the file does not name ends its requests and is closed. Look
    first, with `weir fleet diff`.
    """
    applied = sent(client, file, expected_number=expect, reason=reason)
    print_applied(file, applied, as_json=as_json)


@fleet.command("history")
@calls(admin_client, shown=HISTORY)
def list_versions(
    client: AdminClient,
    limit: Annotated[
        int, typer.Option(help="Show at most this many versions.", min=1, max=1000)
    ] = 20,
) -> list[FleetVersion]:
    """List the versions of the fleet, newest first."""
    return client.list_fleet_versions(page_size=limit)


@fleet.command("rollback")
@calls(admin_client, timeout=TIMEOUT_S)
def roll_back(
    client: AdminClient,
    number: NumberArgument,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Apply an earlier version again, as a new one."""
    earlier = client.get_fleet(number).version.document
    reason = reason or f"as version {number}"
    applied = client.apply_fleet(earlier, reason=reason)
    print_applied(None, applied, as_json=as_json)


@fleet.command("weight")
@calls(admin_client, timeout=TIMEOUT_S)
def set_weight(
    client: AdminClient,
    version: Annotated[str, typer.Argument(help="Version of a model, as MODEL@VERSION.")],
    weight: Annotated[
        float,
        typer.Argument(
            help="Its share of the requests that name no version; 0: none.",
            min=0,
            max=WEIGHT_MAX,
        ),
    ],
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Move requests between the versions of a model."""
    name, _, label = version.rpartition("@")

    def change(document: dict[str, Any]) -> None:
        versions = document.get("models", {}).get(name, {}).get("versions", {})
        if label not in versions:
            known = ", ".join(f"{name}@{each}" for each in versions) or "see `weir fleet show`"
            wrong_use(f"{version!r} is not a version of the fleet; known are: {known}")
        versions[label]["weight"] = weight

    edit(client, change, reason or f"weight of {version}: {weight:g}", as_json=as_json)


@fleet.command("alias")
@calls(admin_client, timeout=TIMEOUT_S)
def set_alias(
    client: AdminClient,
    name: Annotated[str, typer.Argument(help="The other name.")],
    target: Annotated[str, typer.Argument(help="Its model, or MODEL@VERSION.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the name.")] = False,
    reason: ReasonOption = "",
    as_json: JsonOption = False,
) -> None:
    """Give a model another name, let a name lead to another model, or remove it."""
    if bool(target) is remove:
        wrong_use("give the model that the name leads to, or --remove")

    def change(document: dict[str, Any]) -> None:
        aliases = document.setdefault("aliases", {})
        if not remove:
            aliases[name] = target
        elif aliases.pop(name, None) is None:
            known = ", ".join(aliases) or "none"
            wrong_use(f"{name!r} is not an alias; known are: {known}")
        if not aliases:
            del document["aliases"]

    done = f"alias {name} removed" if remove else f"alias {name}: {target}"
    edit(client, change, reason or done, as_json=as_json)


def edit(
    client: AdminClient, change: Callable[[dict[str, Any]], None], reason: str, *, as_json: bool
) -> None:
    """Change the fleet in force, unless another version is in force by then."""
    import yaml

    present = client.get_fleet().version
    document = yaml.safe_load(present.document)
    change(document)
    applied = client.apply_fleet(
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True),
        expected_number=present.number,
        reason=reason,
    )
    print_applied(None, applied, as_json=as_json)


def sent(client: AdminClient, file: Path | None, **options: Any) -> AppliedFleet:
    """Send a file, or without one let the server use its settings."""
    if file is None:
        return client.apply_fleet(from_settings=True, **options)
    base = "" if str(file) == "-" else str(file.absolute().parent)
    return client.apply_fleet(content_of(file), base_directory=base, **options)


def print_applied(
    file: Path | None, applied: AppliedFleet, *, as_json: bool, dry_run: bool = False
) -> None:
    """Print the changes; for a document with errors, each with its line, and exit."""
    if as_json:
        print_json(applied)
    if applied.violations:
        refuse(file, applied, as_json=as_json)
    if as_json:
        return
    for each in applied.changes:
        typer.echo(change_text(each.path, each.before_json, each.after_json))
    if not applied.changes:
        note("nothing to change: the fleet is like that already")
    elif dry_run:
        note("nothing was changed: `weir fleet apply` does it")
    if applied.version.number and not dry_run:
        note(version_text(applied.version))


def refuse(file: Path | None, applied: AppliedFleet, *, as_json: bool) -> NoReturn:
    """Print each error as `file:line: place: remedy`, and exit."""
    for each in applied.violations if not as_json else ():
        line = f"{file or 'the fleet'}:{each.line}: " if each.line else ""
        where = f"{each.location}: " if each.location else ""
        typer.secho(f"{line}{where}{printable(each.message)}", fg="red", err=True)
    note("nothing was changed")
    raise typer.Exit(ExitCode.WRONG_USE)


def change_text(path: str, before: str, after: str) -> str:
    """Format a change: `~ models.chat.weight: 5 → 20`."""
    if not before:
        return f"+ {printable(path)}: {printable(shown(after))}"
    if not after:
        return f"- {printable(path)}: {printable(shown(before))}"
    return f"~ {printable(path)}: {printable(shown(before))} → {printable(shown(after))}"


def shown(text: str) -> str:
    """Format a JSON value: texts without quotes."""
    value = json.loads(text)
    return value if isinstance(value, str) else text


def version_text(version: FleetVersion) -> str:
    if not version.number:
        return "no version is stored: each server serves the fleet of its settings"
    why = f" ({printable(version.reason)})" if version.reason else ""
    return f"version {version.number}, {time_text(version.create_time)} by {version.actor}{why}"


def served_texts(found: ServedFleet) -> list[str]:
    """Describe the processes that serve another version than the one in force."""
    late = [each for each in found.processes if each.number != found.version.number]
    lines = [f"served by {len(found.processes) - len(late)} of {len(found.processes)} processes"]
    if not found.processes:
        lines = []
    for each in late:
        why = f": {printable(each.fault)}" if each.fault else ", and follows within seconds"
        lines.append(f"{each.process_name} serves version {each.number}{why}")
    if found.unresponsive_process_ids:
        lines.append(f"no answer from process {', '.join(found.unresponsive_process_ids)}")
    return lines
