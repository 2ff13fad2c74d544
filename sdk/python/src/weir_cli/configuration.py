"""`weir apply` and `weir export`: the server's configuration from and to a file."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from weir_client import ChangeAction

from weir_cli.commands import ExitCode
from weir_cli.connection import admin_client, calls
from weir_cli.render import JsonOption, note, print_json, show, unreadable, wrong_use
from weir_cli.tenants import note_unpriced
from weir_cli.texts import each_text, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text
    from weir_client import AdminClient, AppliedConfiguration, ConfigurationChange

    from weir_cli.document import Document
    from weir_cli.yaml_files import FileError

SIGNS = {
    ChangeAction.CREATE: ("+", "green"),
    ChangeAction.UPDATE: ("~", "yellow"),
    ChangeAction.DELETE: ("-", "red"),
}

VERBS = (
    (ChangeAction.CREATE, "create"),
    (ChangeAction.UPDATE, "change"),
    (ChangeAction.DELETE, "remove"),
)
# Effects on what runs, beside the change itself
EFFECTS = {
    ("key", ChangeAction.DELETE): "  is revoked, and its running requests end",
    ("member", ChangeAction.DELETE): "  with the keys of that person",
    ("token_issuer", ChangeAction.DELETE): "  with its keys, and running requests end",
}
DONE = {"create": "created", "change": "changed", "remove": "removed"}
TIMEOUT_S = 120.0  # thousands of changes in one transaction


def plan(changes: Iterable[ConfigurationChange]) -> RenderableType:
    from rich.console import Group

    return Group(*(block(change) for change in changes))


def block(change: ConfigurationChange) -> Text:
    from rich.text import Text

    from weir_cli.document import shown_field

    sign, color = SIGNS[change.action]
    made = Text(f"{sign} {title(change)}", style=color)
    made.append(EFFECTS.get((change.kind, change.action), ""))
    rows = [(each.field, value(each.before_json), value(each.after_json)) for each in change.fields]
    shown = [
        (
            *shown_field(change.kind, name, before, change.quota),
            shown_field(change.kind, name, after, change.quota)[1],
        )
        for name, before, after in rows
    ]
    width = max((len(key) for key, *_ in shown), default=0)
    for key, before, after in shown:
        values = after if change.action is ChangeAction.CREATE else f"{before} → {after}"
        made.append(f"\n    {key.ljust(width)}  {printable(values)}", style="default")
    return made


def title(change: ConfigurationChange) -> str:
    """Format the headline of a change."""
    from weir_cli.document_fields import dimension_of

    named = f"{change.kind.replace('_', ' ')} {printable(change.path)}"
    if change.kind == "key" and change.api_key_prefix:
        named += f" ({change.api_key_prefix})"
    if change.kind == "quota":
        named += f" · {dimension_of(change.quota.get('dimension')).value}"
        if minutes := change.quota.get("window_minutes"):
            named += f" of {minutes} minutes"
        if model := change.quota.get("model"):
            named += f" for {printable(str(model))}"
        if change.quota.get("for_new_keys"):
            named += ", for new keys"
        if for_each := change.quota.get("for_each"):
            named += f", for each {printable(each_text(str(for_each)))}"
        if name := change.quota.get("end_user") or change.quota.get("label"):
            kind = "end user" if change.quota.get("end_user") else "label"
            named += f", of {kind} {printable(str(name))}"
    return named


def summary(changes: Sequence[ConfigurationChange], *, dry_run: bool) -> str:
    count = Counter(change.action for change in changes)
    if not changes:
        return "nothing to change: everything matches the file"
    if dry_run:
        return (
            "would"
            f" {', '.join(f'{verb} {count[action]}' for action, verb in VERBS if count[action])};"
            " nothing was changed"
        )
    return ", ".join(f"{DONE[verb]} {count[action]}" for action, verb in VERBS if count[action])


def value(text: str | None) -> object:
    return None if text is None else json.loads(text)


@calls(admin_client, timeout=TIMEOUT_S)
def apply(
    client: AdminClient,
    file: Annotated[
        Path, typer.Argument(help="YAML file, or - for stdin. `weir export` writes one.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes, but do not make them.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Remove limits, members, resale prices and trusted issuers, and revoke keys, that"
            " the file's lists lack.",
        ),
    ] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="With --dry-run: exit with 3 if the file would change something."
        ),
    ] = False,
    secrets_file: Annotated[
        Path | None,
        typer.Option(help="Write the secrets of new keys to this new file instead of stdout."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make organizations, projects, keys, limits and prices as a file says, in one transaction.

    If you apply a file twice, nothing changes the second time. Things that the file does not name
    stay as they are, unless you use --prune. Look first, with --dry-run.
    """
    from weir_cli.document import read_document

    document = read_document(content_of(file), prune=prune)
    secrets = None if dry_run or secrets_file is None else new_secrets_file(secrets_file)
    # The server checks a file with errors too, so that all errors are reported at once.
    applied = client.apply_configuration(
        document.configuration, dry_run=dry_run or bool(document.errors)
    )
    errors = errors_of(document, applied)
    if errors:
        if as_json:
            print_json({"applied": False, "changes": [], "kept": [], "errors": errors})
        print_errors(file, errors)
    if secrets is not None:
        os.write(
            secrets,
            "".join(
                f"{each.path} {each.secret}\n" for each in applied.changes if each.secret
            ).encode(),
        )
    if as_json:
        print_json(plan_document(applied, dry_run=dry_run, with_secrets=secrets is None))
    else:
        print_applied(applied, dry_run=dry_run, prune=prune, with_secrets=secrets is None)
    if not dry_run:
        note_unpriced(client, new_currencies(applied.changes))
    if exit_code and dry_run and applied.changes:
        raise typer.Exit(ExitCode.NOT_ALL_DONE)


def new_currencies(changes: Iterable[ConfigurationChange]) -> Iterable[str]:
    """Find the currencies of the organizations that were created."""
    for change in changes:
        if (change.kind, change.action) == ("organization", ChangeAction.CREATE):
            fields = {each.field: value(each.after_json) for each in change.fields}
            yield str(fields.get("currency_code") or "USD")


@calls(admin_client, timeout=TIMEOUT_S)
def export(
    client: AdminClient,
    organization: Annotated[
        str,
        typer.Option("--org", help="Only this organization, by name or id, and its own prices."),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Write the current state as a file for `weir apply`, without secrets."""
    from weir_cli.document import write_document

    present = client.export_configuration(organization)
    if as_json:
        print_json(present)
    else:
        typer.echo(write_document(present), nl=False)


def content_of(file: Path) -> str:
    """Read a file, or stdin for `-`. Exits with an error if it cannot be read."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wrong_use(unreadable(file, error))


def new_secrets_file(path: Path) -> int:
    """Create a file that only its owner may read, and return its descriptor.

    Called before anything is applied, since a secret that cannot be written would be lost.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        wrong_use(
            f"{path} cannot be created: {error.strerror}; name a new file for the secrets: existing"
            " files are never overwritten"
        )


def errors_of(document: Document, applied: AppliedConfiguration) -> list[FileError]:
    """Merge the errors of the reader and those of the server, sorted by line.

    Errors of the server are dropped for lines where the reader has found one.
    """
    wrong = {error.line for error in document.errors}
    reported = (document.error_at(error.field, error.description) for error in applied.violations)
    return sorted(
        [*document.errors, *(each for each in reported if each.line not in wrong)],
        key=lambda each: each.line,
    )


def print_errors(file: Path, errors: list[FileError]) -> NoReturn:
    """Print each error as `file:line: place: remedy`, and exit."""
    for each in errors:
        typer.secho(
            f"{file}:{each.line}: {each.location and each.location + ': '}{each.message}",
            fg="red",
            err=True,
        )
    count = len(errors)
    note(f"nothing was changed: {count} {'error' if count == 1 else 'errors'}")
    raise typer.Exit(ExitCode.WRONG_USE)


def print_applied(
    applied: AppliedConfiguration, *, dry_run: bool, prune: bool, with_secrets: bool
) -> None:
    """Print the differences, a summary of them, and the secrets of new keys."""
    if applied.changes:
        show(plan(applied.changes))
    note(summary(applied.changes, dry_run=dry_run))
    left = [change for change in applied.kept if change.kind != "project"]
    if left:
        remedy = (
            "absent from the file, left alone"
            if prune
            else f"absent from the file; --prune removes {'it' if len(left) == 1 else 'them'}"
        )
        note(
            f"{len(left)} more {'exists' if len(left) == 1 else 'exist'}, {remedy}:"
            f" {', '.join(map(title, left[:5]))}" + (len(left) > 5) * ", …"
        )
    fresh = [change for change in applied.changes if change.secret]
    if fresh and with_secrets:
        typer.secho("These secrets are shown only now. Store them:", fg="yellow", err=True)
        for change in fresh:
            typer.echo(f"{change.path} {change.secret}")


def plan_document(
    applied: AppliedConfiguration, *, dry_run: bool, with_secrets: bool
) -> dict[str, Any]:
    """Convert the changes of a configuration to JSON, with the names and units of the API."""
    return {
        "applied": not dry_run,
        "changes": [
            change_document(change, with_secrets=with_secrets) for change in applied.changes
        ],
        "kept": [change_document(change, with_secrets=False) for change in applied.kept],
        "errors": [],
    }


def change_document(change: ConfigurationChange, *, with_secrets: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "action": change.action.value,
        "kind": change.kind,
        "path": change.path,
    }
    if change.quota:
        document["quota"] = change.quota
    if change.api_key_prefix:
        document["api_key_prefix"] = change.api_key_prefix
    if change.action is not ChangeAction.KEEP:
        document["fields"] = [
            {
                "field": each.field,
                "before": value(each.before_json),
                "after": value(each.after_json),
            }
            for each in change.fields
        ]
    if change.secret and with_secrets:
        document["secret"] = change.secret
    return document
