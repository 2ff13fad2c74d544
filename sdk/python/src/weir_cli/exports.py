"""Commands for the export of an organization: fetch the archive, and verify it without a server."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_cli.connection import Output, billing_client, calls
from weir_cli.render import Table, fail, print_found
from weir_cli.tenants import OrganizationArgument, org
from weir_cli.texts import counted

if TYPE_CHECKING:
    from weir_client import BillingClient

FORMAT = 1  # of the archive, as in its manifest
CHUNK_BYTES = 1 << 20

ROWS: Table[tuple[str, int]] = Table(
    {"table": itemgetter(0), "rows": itemgetter(1)}, right=("rows",)
)
ArchiveArgument = Annotated[
    Path, typer.Argument(help="Archive, as `weir org export` wrote it.", metavar="FILE")
]


@org.command("export")
@calls(billing_client)
def export_organization(
    client: BillingClient,
    organization: OrganizationArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File to write. Default: ORG-export.zip.", metavar="FILE"),
    ] = None,
) -> Output:
    """Export everything that an organization has, as one ZIP archive.

    It has all rows of its tables at one moment as JSON Lines, its invoices and credit notes as PDF,
    and a manifest with counts and digests. Secrets are left out. An interrupted command leaves no
    file: run it again.
    """
    path = output or Path(f"{organization}-export.zip")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a directory: name a file", param_hint="--output")
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w+b") as file:
            client.export_organization(organization, file)
        summary = verified(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return {"file": str(path), **summary}, *lines_of(path, summary)


@org.command("verify-export")
def verify_export(archive: ArchiveArgument) -> None:
    """Verify an archive of `weir org export`: every file, its digest and rows, and the ledger."""
    summary = verified(archive)
    print_found(summary, *lines_of(archive, summary), as_json=False)


class BadArchive(Exception):
    """The archive is not what its manifest says."""


def verified(path: Path) -> dict[str, Any]:
    """Verify an archive and summarize it. Ends the program with an error if it is not in order."""
    try:
        with zipfile.ZipFile(path) as archive:
            return summary_of(archive)
    except FileNotFoundError:
        fail(f"{path} does not exist")
    except (BadArchive, zipfile.BadZipFile, OSError, EOFError, ValueError, KeyError) as error:
        fail(f"{path} is not a complete export: {error}. Export the organization again")


def summary_of(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Compare an archive with its manifest. Raises: BadArchive."""
    manifest = json.loads(archive.read("manifest.json"))
    if manifest["format"] != FORMAT:
        raise BadArchive(f"its format is {manifest['format']!r}, and this command knows {FORMAT}")
    files = {each["file"]: each for each in manifest["files"]}
    names = archive.namelist()
    if sorted(names) != sorted([*files, "manifest.json"]):
        changed = sorted({*names} ^ {*files, "manifest.json"}) or sorted(names)
        raise BadArchive(f"it lacks, repeats or adds {', '.join(changed[:5])}")
    rows: dict[str, int] = {}
    ledger = Ledger()
    for name, about in files.items():
        digest, count = hashlib.sha256(), 0
        if "row_count" in about:
            for line in lines_in(archive, name):
                digest.update(line)
                count += 1
                if about["table"] == "ledger_entries":
                    ledger.add(json.loads(line))
            rows[about["table"]] = count
            if count != about["row_count"]:
                raise BadArchive(f"{name} has {count} rows instead of {about['row_count']}")
        else:
            with archive.open(name) as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
        if digest.hexdigest() != about["sha256"]:
            raise BadArchive(f"{name} has another digest than its manifest says")
    ledger.check()
    return {
        "organization": manifest["organization"],
        "exported_at": manifest["exported_at"],
        "row_count": sum(rows.values()),
        "document_count": len(files) - len(rows),
        "rows": {table: count for table, count in rows.items() if count},
    }


class Ledger:
    """Sums of the ledger's transactions, each of which is zero."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, int] = defaultdict(int)

    def add(self, entry: dict[str, str]) -> None:
        """Add an entry to the sum of its transaction."""
        number = entry["transaction_id"]
        self._sums[number] += int(entry["amount_picos"])
        if not self._sums[number]:
            del self._sums[number]

    def check(self) -> None:
        """Raise BadArchive if a transaction is out of balance."""
        if self._sums:
            number, rest = next(iter(self._sums.items()))
            raise BadArchive(f"the ledger transaction {number} is off by {rest} picos")


def lines_in(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    """Yield the lines of a file. Raises: BadArchive if the last one is incomplete."""
    with archive.open(name) as file:
        for line in file:
            if not line.endswith(b"\n"):
                raise BadArchive(f"the last line of {name} is incomplete")
            yield line


def lines_of(path: Path, summary: dict[str, Any]) -> list[Any]:
    """Describe a verified archive."""
    name = summary["organization"]["name"]
    return [
        ROWS.of(list(summary["rows"].items())),
        f"{path}: {name} at {summary['exported_at']}, {counted(summary['row_count'], 'row')},"
        f" {counted(summary['document_count'], 'document')}; every digest is right",
    ]
