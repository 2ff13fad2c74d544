"""`weir apply` and `weir export`: the state as a file, and the file as the state."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from weir_client import AdminClient, AppliedConfiguration, ChangeAction, ConfigurationChange

from api.cli.connection import admin_client, calls
from api.cli.document import Document, dimension_of, read_document, shown_field, write_document
from api.cli.render import JsonOption, fail, note, print_json, printable, show
from common.strict_yaml import FileMistake

SIGNS = {
    ChangeAction.CREATE: ("+", "green"),
    ChangeAction.UPDATE: ("~", "yellow"),
    ChangeAction.DELETE: ("-", "red"),
}

VERBS = ((ChangeAction.CREATE, "create"), (ChangeAction.UPDATE, "change"), (ChangeAction.DELETE, "remove"))
DONE = {"create": "created", "change": "changed", "remove": "removed"}
CHANGES_WAIT = 3  # exit code: something remains to be done
TIMEOUT_S = 120.0  # for thousands of changes in one transaction


def plan(changes: Iterable[ConfigurationChange]) -> RenderableType:
    return Group(*(block(change) for change in changes))


def block(change: ConfigurationChange) -> Text:
    sign, color = SIGNS[change.action]
    made = Text(f"{sign} {title(change)}", style=color)
    if change.kind == "key" and change.action is ChangeAction.DELETE:
        made.append("  is revoked, and what runs with it ends")
    rows = [(each.field, value(each.before_json), value(each.after_json)) for each in change.fields]
    shown = [
        (*shown_field(change.kind, name, before, change.quota), shown_field(change.kind, name, after, change.quota)[1])
        for name, before, after in rows
    ]
    width = max((len(key) for key, *_ in shown), default=0)
    for key, before, after in shown:
        told = after if change.action is ChangeAction.CREATE else f"{before} → {after}"
        made.append(f"\n    {key.ljust(width)}  {printable(told)}", style="default")
    return made


def title(change: ConfigurationChange) -> str:
    """What changes."""
    named = f"{change.kind.replace('_', ' ')} {printable(change.path)}"
    if change.kind == "key" and change.api_key_prefix:
        named += f" ({change.api_key_prefix})"
    if change.kind == "quota":
        named += f" · {dimension_of(change.quota.get('dimension')).value}"
        if model := change.quota.get("model"):
            named += f" for {printable(str(model))}"
        if change.quota.get("for_new_keys"):
            named += ", for new keys"
    return named


def summary(changes: Sequence[ConfigurationChange], *, dry_run: bool) -> str:
    count = Counter(change.action for change in changes)
    if not changes:
        return "nothing to change: everything is as the file says"
    if dry_run:
        return f"would {', '.join(f'{verb} {count[action]}' for action, verb in VERBS if count[action])}; nothing was changed"
    return ", ".join(f"{DONE[verb]} {count[action]}" for action, verb in VERBS if count[action])


def value(text: str | None) -> object:
    return None if text is None else json.loads(text)


@calls(admin_client, timeout=TIMEOUT_S)
def apply(
    client: AdminClient,
    file: Annotated[Path, typer.Argument(help="The configuration, as YAML; - for stdin. `weir export` writes one.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove limits, and revoke keys, that the file's lists do not name.")
    ] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="With --dry-run: exit with 3 if anything would change.")] = False,
    secrets_file: Annotated[
        Path | None, typer.Option(help="Write the secrets of new keys into this new file instead of showing them.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make organizations, projects, keys, limits and prices what a file says: all of it in one transaction, or nothing.

    Applying a file twice changes nothing the second time. What the file does not name stays as it is, unless --prune is given.
    """
    document = read_document(content_of(file), prune=prune)
    secrets = None if dry_run or secrets_file is None else new_secrets_file(secrets_file)
    # A file with mistakes is still shown to the server, which knows of others: they are all told at once.
    applied = client.apply_configuration(document.configuration, dry_run=dry_run or bool(document.mistakes))
    mistakes = mistakes_of(document, applied)
    if mistakes:
        if as_json:
            print_json({"applied": False, "changes": [], "kept": [], "mistakes": mistakes})
        tell_mistakes(file, mistakes)
    if secrets is not None:
        os.write(secrets, "".join(f"{each.path} {each.secret}\n" for each in applied.changes if each.secret).encode())
    if as_json:
        print_json(plan_document(applied, dry_run=dry_run, with_secrets=secrets is None))
    else:
        tell(applied, dry_run=dry_run, prune=prune, with_secrets=secrets is None)
    if exit_code and dry_run and applied.changes:
        raise typer.Exit(CHANGES_WAIT)


@calls(admin_client, timeout=TIMEOUT_S)
def export(
    client: AdminClient,
    organization: Annotated[str, typer.Option("--org", help="Only this organization, by name or id, with its own prices.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Write the present state as a file for `weir apply`. It has no secrets; applying it changes nothing."""
    present = client.export_configuration(organization)
    if as_json:
        print_json(present)
    else:
        typer.echo(write_document(present), nl=False)


def content_of(file: Path) -> str:
    """The text of the file, or of stdin for `-`. Ends the command if it cannot be read."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {error}", 2)


def new_secrets_file(path: Path) -> int:
    """A new file that only its owner may read, made before anything is applied: a secret that cannot be written would be lost."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        fail(f"{path} cannot be made: {error.strerror}; name a new file for the secrets: one that is there is never overwritten", 2)


def mistakes_of(document: Document, applied: AppliedConfiguration) -> list[FileMistake]:
    """What the file and the server found wrong, by line. Of a line that is wrong in itself, the server's word is left out."""
    wrong = {mistake.line for mistake in document.mistakes}
    told = (document.mistake_at(mistake.field, mistake.description) for mistake in applied.mistakes)
    return sorted([*document.mistakes, *(each for each in told if each.line not in wrong)], key=lambda each: each.line)


def tell_mistakes(file: Path, mistakes: list[FileMistake]) -> NoReturn:
    """Say what is wrong as `file:line: place: remedy`, and end the command."""
    for each in mistakes:
        typer.secho(f"{file}:{each.line}: {each.place and each.place + ': '}{each.message}", fg="red", err=True)
    count = len(mistakes)
    note(f"nothing was changed: {count} {'mistake' if count == 1 else 'mistakes'}")
    raise typer.Exit(2)


def tell(applied: AppliedConfiguration, *, dry_run: bool, prune: bool, with_secrets: bool) -> None:
    """The differences, what they come to, and the secrets of new keys."""
    if applied.changes:
        show(plan(applied.changes))
    note(summary(applied.changes, dry_run=dry_run))
    left = [change for change in applied.kept if change.kind != "project"]
    if left:
        remedy = (
            "named nowhere in the file, and left alone"
            if prune
            else f"not named in the file; --prune removes {'it' if len(left) == 1 else 'them'}"
        )
        note(
            f"{len(left)} more {'exists' if len(left) == 1 else 'exist'}, {remedy}: {', '.join(map(title, left[:5]))}"
            + (len(left) > 5) * ", …"
        )
    fresh = [change for change in applied.changes if change.secret]
    if fresh and with_secrets:
        typer.secho("This is the only time that these secrets are shown. Store them now:", fg="yellow", err=True)
        for change in fresh:
            typer.echo(f"{change.path} {change.secret}")


def plan_document(applied: AppliedConfiguration, *, dry_run: bool, with_secrets: bool) -> dict[str, Any]:
    """The plan for scripts: names and units are those of the contract."""
    return {
        "applied": not dry_run,
        "changes": [change_document(change, with_secrets=with_secrets) for change in applied.changes],
        "kept": [change_document(change, with_secrets=False) for change in applied.kept],
        "mistakes": [],
    }


def change_document(change: ConfigurationChange, *, with_secrets: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"action": change.action.value, "kind": change.kind, "path": change.path}
    if change.quota:
        document["quota"] = change.quota
    if change.api_key_prefix:
        document["api_key_prefix"] = change.api_key_prefix
    if change.action is not ChangeAction.KEEP:
        document["fields"] = [
            {"field": each.field, "before": value(each.before_json), "after": value(each.after_json)} for each in change.fields
        ]
    if change.secret and with_secrets:
        document["secret"] = change.secret
    return document
