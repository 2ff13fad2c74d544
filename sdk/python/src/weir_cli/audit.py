"""`weir audit`: the audit log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer
from weir_client import Money, QuotaDimension

from weir_cli.connection import Output, admin_client, calls
from weir_cli.render import Table
from weir_cli.texts import decimal_text, parse_time, per_million, time_text

if TYPE_CHECKING:
    from weir_client import AdminClient, AuditEntry

PAGE_SIZE = 1000
# The audit log has the names of the database, where cost is counted in picos.
DIMENSIONS = {
    each.value.replace("-", "_").replace("cost_", "cost_picos_"): each.value
    for each in QuotaDimension
}
ORDINARY = {f"{kind}_weight_milli": 1000 for kind in ("input", "cached_input", "output")}


def who(entry: AuditEntry) -> str:
    """Describe who made a change: the key with its role, the person, and the address."""
    person = entry.names.get(entry.actor_person_id, "")
    key = f"{entry.actor} ({entry.actor_role})" if entry.actor_role else entry.actor
    named = f"{person}, {key}" if person else key
    return f"{named} from {entry.actor_address}" if entry.actor_address else named


ENTRIES: Table[AuditEntry] = Table(
    {
        "entry": lambda each: str(each.entry_id),
        "time": "create_time",
        "actor": who,
        "action": lambda each: f"{each.action} {name_of(each)}".rstrip(),
        "id": "subject_id",
        "change": lambda each: changed(each.before_json, each.after_json),
    },
    right=("entry",),
    empty="no matching entries",
    drop=("entry", "id"),
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
        str,
        typer.Option(
            help="Only changes by this key, person or program: prefix, address, or `system`."
        ),
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


def name_of(entry: AuditEntry) -> str:
    """Return the prefix, name or model of the changed object; empty if it has an id alone."""
    fields = _object(entry.before_json) | _object(entry.after_json)
    by = ["model"] if entry.action.startswith("price.") else ["prefix", "name"]
    return next((str(fields[each]) for each in by if fields.get(each)), "")


def changed(before_json: str, after_json: str) -> str:
    """Describe a change: `limit value: 10 → 20`, the fields of a new object, or `removed`.

    Words are apart, so that a narrow column can wrap them. Only `--json` has ids, and what a new
    object lacks or has in common with all new ones.
    """
    before, after = _object(before_json), _object(after_json)
    if not after:
        return "removed" if before else ""
    shown = [
        name
        for name in after
        if name not in ("id", "uses_tracked_since")
        and not name.endswith(("_id", "_at", "_time"))
        and after[name] not in ("", None, False, [], {})
        and after[name] != ORDINARY.get(name)
    ]
    dimension = str((before | after).get("dimension"))
    if not before:
        return ", ".join(
            f"{_label(name)}: {_shown(name, after[name], dimension)}" for name in shown
        )
    return ", ".join(
        f"{_label(name)}: {_shown(name, before.get(name), dimension)} →"
        f" {_shown(name, after[name], dimension)}"
        for name in after
        if before.get(name) != after[name]
    )


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {"value": text}
    return value if isinstance(value, dict) else {"value": value}


def _label(name: str) -> str:
    return (
        name.replace("_picos_per_token", " per million tokens")
        .replace("_picos", "")
        .replace("_", " ")
    )


def _shown(name: str, value: object, dimension: str) -> str:
    """Write the value of a field, amounts in picos as money."""
    is_limit = name.endswith("limit_value") and "_picos" in dimension
    if not isinstance(value, int) or not (is_limit or "_picos" in name):
        return _word(value)
    amount = per_million(value) if name.endswith("_per_token") else Money("", value).amount
    return decimal_text(amount)


def _word(value: object) -> str:
    """Write a value as the other commands do: limits by their name there, times in UTC."""
    if isinstance(value, list):
        return " ".join(map(_word, value))
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value in DIMENSIONS:
        return DIMENSIONS[value]
    try:
        return time_text(datetime.fromisoformat(value)) if "T" in value else value
    except ValueError:
        return value
