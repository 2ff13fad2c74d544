"""Differences for people: a line per thing with + ~ -, a line per field with what it was and what it becomes. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from weir_client import ChangeAction, ConfigurationChange

from api.cli.document_format import dimension_of, shown_field
from api.cli.render import printable

SIGNS = {
    ChangeAction.CREATE: ("+", "green"),
    ChangeAction.UPDATE: ("~", "yellow"),
    ChangeAction.DELETE: ("-", "red"),
}
VERBS = ((ChangeAction.CREATE, "create"), (ChangeAction.UPDATE, "change"), (ChangeAction.DELETE, "remove"))
DONE = {"create": "created", "change": "changed", "remove": "removed"}


def plan(changes: Iterable[ConfigurationChange]) -> RenderableType:
    """All differences in their order."""
    return Group(*(block(change) for change in changes))


def block(change: ConfigurationChange) -> Text:
    """One difference with its fields."""
    sign, color = SIGNS[change.action]
    made = Text(f"{sign} {kind_text(change)} {title(change)}", style=color)
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
    """Where, and which."""
    named = printable(change.path)
    if change.kind == "key" and change.api_key_prefix:
        named += f" ({change.api_key_prefix})"
    if change.kind == "quota":
        named += f" · {dimension_of(change.quota.get('dimension')).value}"
        if model := change.quota.get("model"):
            named += f" for {printable(str(model))}"
        if change.quota.get("for_new_keys"):
            named += ", for new keys"
    return named


def keep_line(change: ConfigurationChange) -> str:
    """What stays, in a few words."""
    return f"{kind_text(change)} {title(change)}"


def summary(changes: Sequence[ConfigurationChange], *, dry_run: bool) -> str:
    """What it all comes to."""
    count = Counter(change.action for change in changes)
    if not changes:
        return "nothing to change: everything is as the file says"
    if dry_run:
        return f"would {', '.join(f'{verb} {count[action]}' for action, verb in VERBS if count[action])}; nothing was changed"
    return ", ".join(f"{DONE[verb]} {count[action]}" for action, verb in VERBS if count[action])


def value(text: str | None) -> object:
    """A value from its JSON text."""
    return None if text is None else json.loads(text)


def kind_text(change: ConfigurationChange) -> str:
    """The kind of the thing that changes, for people."""
    return change.kind.replace("_", " ")
