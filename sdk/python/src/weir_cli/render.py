"""Output of a command: tables, CSV and JSON of the client's values, remarks and errors."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, NoReturn, TypeVar
from uuid import UUID

import typer
from weir_client import Money, Receipt

from weir_cli.commands import WIDE, ExitCode
from weir_cli.texts import Cell

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from weir_cli.tables import Sheet

T = TypeVar("T")

PIPE_WIDTH = 160  # columns without a terminal: wide enough for all ids
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, for scripts.")
]


def jsonable(value: Any) -> Any:
    """Convert a value of the client to plain JSON types.

    Money becomes `{"currency_code", "amount", "picos"}` with the exact amount as text; times are
    ISO 8601 in UTC with `Z`; bytes are hexadecimal; a receipt is as `weir receipt verify` reads it.
    """
    if isinstance(value, Money):
        return {
            "currency_code": value.currency_code,
            "amount": f"{value.amount:f}",
            "picos": value.picos,
        }
    if isinstance(value, Receipt):
        return json.loads(value.to_json())
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, UUID):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: jsonable(getattr(value, each.name)) for each in fields(value)}
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
    typer.echo(json.dumps(jsonable(value), ensure_ascii=False, indent=2))


def show(*parts: RenderableType) -> None:
    from weir_cli.tables import whole_width

    console = make_console()
    piped = not (console.is_terminal or os.environ.get("COLUMNS"))
    width = PIPE_WIDTH if piped else console.width
    for part in parts:
        if piped or WIDE.get():
            console.width = max(width, whole_width(console, part))
        console.print(part, crop=False)  # the terminal wraps long lines; nothing is cut


def csv_of(
    found: Iterable[T],
    columns: Mapping[str, Callable[[T], object]],
    *,
    header: bool = True,
    line_end: str = "\n",
) -> str:
    """Format objects as CSV. `columns` maps each column's name to the function for its cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=line_end)
    writer.writerows([columns] if header else [])
    writer.writerows([cell(each) for cell in columns.values()] for each in found)
    return text.getvalue()


def put(output: Path | None, pieces: Iterable[str] | Iterable[bytes]) -> None:
    """Write pieces of text or bytes to a file, or to stdout if `output` is None.

    A file appears only when it is complete.
    """
    if output is None:
        for piece in pieces:
            typer.echo(piece, nl=False)
        return
    unfinished = output.with_name(output.name + ".part")
    try:
        with unfinished.open("wb") as file:
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
        unfinished.replace(output)
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def fail(message: str, status: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Print one error line on stderr and exit."""
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(status) from None


def wrong_use(message: str) -> NoReturn:
    """Print an error in the command line, a setting or a user's file on stderr, and exit."""
    fail(message, ExitCode.WRONG_USE)


def print_found(value: Any, *parts: RenderableType, as_json: bool) -> None:
    """Print a command's output: one JSON document, or tables on stdout and remarks on stderr."""
    if as_json:
        print_json(value)
        return
    for part in parts:
        if isinstance(part, str):
            note(part)
        else:
            show(part)


def unreadable(path: object, error: OSError | UnicodeDecodeError) -> str:
    """Describe a file that cannot be read."""
    cause = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
    return f"{path} cannot be read: {cause}"


def note(text: str) -> None:
    """Print a remark on stderr, dim on a terminal."""
    typer.secho(text, dim=True, err=True)


def make_console(*, stderr: bool = False) -> Console:
    """Build a console as wide as the terminal, or for a pipe wide enough for ids."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def to_text(renderable: RenderableType, width: int = 100) -> str:
    """Render a table or chart as plain text, without trailing spaces."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, color_system=None, highlight=False, legacy_windows=False
    )
    console.print(renderable, crop=False)
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def table(
    *columns: str,
    right: Iterable[str] = (),
    title: str | None = None,
    rows: Iterable[Sequence[Cell]] = (),
    drop: Iterable[str] = (),
) -> Sheet:
    """Build a table in the style of all commands. `right` names the columns of numbers.

    `drop` names the columns that a narrow terminal does without, the first to go first.
    """
    from weir_cli.tables import Sheet

    made = Sheet(*columns, right=right, title=title, drop=drop)
    for row in rows:
        made.add_row(*row)
    return made


@dataclass(frozen=True, slots=True)
class Table(Generic[T]):
    """Table of a command: its columns, and the remark that stands for a table without rows.

    A column maps to an attribute, or to the function for its cells. A column in `optional` is drawn
    only if its function is true for one of the rows. `right` names the columns of numbers, `drop`
    those that a narrow terminal does without, the first to go first. `unit` is a column that goes
    into the title if all rows have one value.
    """

    columns: Mapping[str, str | Callable[[T], Cell]]
    right: Collection[str] = ()
    empty: str = ""
    optional: Mapping[str, Callable[[T], object]] = field(default_factory=dict)
    title: str | None = None
    drop: Sequence[str] = ()
    unit: str = ""

    def without(self, *names: str, empty: str = "") -> Table[T]:
        """Return the table without these columns, and with its own remark for no rows."""
        columns = {name: cell for name, cell in self.columns.items() if name not in names}
        right, drop = ([n for n in kept if n in columns] for kept in (self.right, self.drop))
        return replace(self, columns=columns, right=right, drop=drop, empty=empty)

    def of(self, found: Sequence[T]) -> RenderableType:
        """Draw the objects, one row each."""
        return self.drawn(found) if found or not self.empty else self.empty

    def drawn(self, found: Sequence[T]) -> Sheet:
        """Draw the objects, one row each, even if there are none."""
        columns = {
            name: cell
            for name, cell in self.columns.items()
            if name not in self.optional or any(map(self.optional[name], found))
        }
        title = self.title
        if self.unit in columns:
            units = {cell_of(each, columns[self.unit]) for each in found}
            if len(units) == 1:
                del columns[self.unit]
                title = f"{title} · {units.pop()}"
        rows = ([cell_of(each, cell) for cell in columns.values()] for each in found)
        return table(*columns, right=self.right, title=title, rows=rows, drop=self.drop)


def cell_of(row: T, cell: str | Callable[[T], Cell]) -> Cell:
    """Return the value of a cell: of an attribute, or of a function."""
    return getattr(row, cell) if isinstance(cell, str) else cell(row)
