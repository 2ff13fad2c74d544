"""What goes to stdout and what to stderr: results as text or as one JSON document, everything else beside it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 160  # columns where there is no terminal to ask: wide enough that no id is cut
TABLE_WIDTH_MAX = 100_000  # columns of a table in a pipe: more than any row has

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, for scripts.")]


def jsonable(value: Any) -> Any:
    """A value of the client as plain JSON types.

    Money becomes `{"currency_code", "amount", "picos"}` with the exact amount as text; times are ISO 8601 in UTC with `Z`; bytes
    are hexadecimal; a receipt is what `weir receipt verify` reads.
    """
    from weir_client import Money, Receipt

    if isinstance(value, Money):
        return {"currency_code": value.currency_code, "amount": f"{value.amount:f}", "picos": value.picos}
    if isinstance(value, Receipt):
        return json.loads(value.to_json())
    if isinstance(value, bytes):
        return value.hex()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(each) for each in value]
    return value


def print_json(value: Any) -> None:
    """The one JSON document of a command."""
    typer.echo(json.dumps(jsonable(value), ensure_ascii=False, indent=2))


def show(*parts: RenderableType) -> None:
    """Tables and text on stdout."""
    console = make_console()
    piped = not (console.is_terminal or os.environ.get("COLUMNS"))
    for part in parts:
        if piped:
            console.width = max(PIPE_WIDTH, whole_width(console, part))
        console.print(part, crop=False)  # a line too long for the terminal is wrapped by it, never cut


def whole_width(console: Console, part: RenderableType) -> int:
    """How wide a table is whose rows have a line each, as programs that read lines want them; 0 for what is no table."""
    from rich.measure import Measurement
    from rich.table import Table

    if not isinstance(part, Table):
        return 0
    return Measurement.get(console, console.options.update(max_width=TABLE_WIDTH_MAX), part).maximum


def note(text: str) -> None:
    """A remark on stderr, dim where that is a terminal."""
    typer.secho(text, dim=True, err=True)


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for ids where there is none."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)
