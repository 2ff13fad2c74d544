"""`weir audit`: the audit log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from weir_cli.connection import Output, admin_client, calls
from weir_cli.render import Table
from weir_cli.texts import parse_time

if TYPE_CHECKING:
    from weir_client import AdminClient, AuditEntry

PAGE_SIZE = 1000
ENTRIES: Table[AuditEntry] = Table(
    {
        "entry": lambda each: str(each.entry_id),
        "time": "create_time",
        "actor": "actor",
        "action": "action",
        "subject": "subject_id",
        "change": lambda each: changed(each.before_json, each.after_json),
    },
    right=("entry",),
    empty="no matching entries",
    drop=("subject", "entry", "actor"),
)


@calls(admin_client)
def audit(
    client: AdminClient,
    subject: Annotated[
        str,
        typer.Option(
            help=(
                "Only entries about this: an organization, ORG/PROJECT, a key's prefix, a request"
                " or any id."
            )
        ),
    ] = "",
    actor: Annotated[
        str, typer.Option(help="Only changes by this key: its prefix, or `system`.")
    ] = "",
    action: Annotated[
        str, typer.Option(help="Only actions that begin like this, such as api_key. or quota.set.")
    ] = "",
    since: Annotated[
        str | None, typer.Option(help="Only since this time: 2h, 7d, or a time in UTC.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only before this time: 2h, 7d, or a time in UTC.")
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Show at most this many entries.", min=1, max=100_000)
    ] = 100,
    before: Annotated[
        int, typer.Option(help="Only entries before this number, for the next page.")
    ] = 0,
) -> Output:
    """Read the audit log, newest first. Entries are never changed or removed."""
    now = datetime.now(UTC)
    start, end = parse_time(since, now, "--since"), parse_time(until, now, "--until")
    found = client.list_audit_entries(
        page_size=min(limit, PAGE_SIZE),
        before_entry_id=before,
        subject=subject,
        actor=actor,
        action_prefix=action,
        start_time=start,
        end_time=end,
    )
    entries = list(islice(found, limit))
    older = (
        [f"older entries: weir audit --before {entries[-1].entry_id}"]
        if len(entries) == limit
        else []
    )
    return entries, ENTRIES.of(entries), *older


def changed(before_json: str, after_json: str) -> str:
    """Describe a change: `limit_value: 10 → 20`, the fields of a new object, or `removed`.

    Ids and times are only in `--json`.
    """
    before, after = _object(before_json), _object(after_json)
    if not after:
        return "removed" if before else ""
    shown = [
        name
        for name in after
        if name != "id"
        and not name.endswith(("_id", "_at", "_time"))
        and after[name] not in ("", None)
    ]
    if not before:
        return ", ".join(f"{name}: {_word(after[name])}" for name in shown)
    differing = [name for name in after if before.get(name) != after[name]]
    return ", ".join(
        f"{name}: {_word(before.get(name))} → {_word(after[name])}" for name in differing
    )


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {"value": text}
    return value if isinstance(value, dict) else {"value": value}


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
