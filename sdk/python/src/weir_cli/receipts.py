"""`weir receipt`: receipts of a month, public keys, and their offline verification."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from weir_client import (
    Receipt,
    ReceiptKey,
    public_keys,
    verify_receipts,
)

from weir_cli.commands import ExitCode
from weir_cli.connection import (
    AddressOption,
    KeyOption,
    MonthArgument,
    OrganizationOption,
    Output,
    calls,
    organization_or_default,
    receipt_client,
)
from weir_cli.render import (
    JsonOption,
    jsonable,
    note,
    print_json,
    put,
    show,
    table,
    unreadable,
    wrong_use,
)
from weir_cli.texts import checked_month, counted, parse_picos

if TYPE_CHECKING:
    from weir_client import (
        ReceiptClient,
        ReceiptVerdict,
    )
    from weir_client.receipt_months import Totals

receipt = typer.Typer(help="Export signed receipts, and verify them.", no_args_is_help=True)

PROBLEMS_SHOWN_MAX = 50


class FileInvalid(ValueError):
    """A file is malformed; the message has the place and the reason."""


@dataclass(frozen=True, slots=True)
class ReportedMonth:
    """Values of a month's report to compare receipts with. An empty value is not compared."""

    month: str = ""
    organization_id: str = ""
    root: bytes | None = None
    totals: Totals | None = None


def read_receipts(lines: Iterable[str]) -> Iterator[Receipt]:
    """Parse one receipt per non-empty line. Raises: FileInvalid naming the line."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield Receipt.from_json(line)
            except ValueError as error:
                raise FileInvalid(f"line {number} is not a receipt: {error}") from error


def read_keys(path: Path) -> list[ReceiptKey]:
    """Parse a file of public keys. Raises: FileInvalid if it is malformed, OSError."""
    try:
        return [
            ReceiptKey(key["key_id"], bytes.fromhex(key["public_key"]))
            for key in json.loads(path.read_text())["keys"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise FileInvalid(
            f"{path} holds no public keys: write it with `weir receipt keys --json`"
        ) from error


def read_report(path: Path) -> ReportedMonth:
    """Parse a month's report as written by `weir month show --format json`.

    Lines of late usage are left out: their receipts belong to the month of use. Raises:
    FileInvalid, OSError.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        root = document.get("receipts_root")
        totals: Counter[tuple[str, ...]] = Counter()
        for line in document["lines"]:
            if not line.get("late_month"):
                priced = (line["model"], str(line["price_version"]))
                totals[(*priced, line["token_kind"].replace("-", "_"))] += line["token_count"]
                amount = line["amount"]  # exact units as text, or an object
                totals[priced] += (
                    int(amount["picos"]) if isinstance(amount, dict) else parse_picos(amount)
                )
        return ReportedMonth(
            document["month"],
            document["organization_id"],
            bytes.fromhex(root) if root else None,
            totals,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileInvalid(
            f"{path} is not a month's report: write it with `weir month show … --format json`"
        ) from error


@receipt.command("keys")
@calls(receipt_client)
def keys(client: ReceiptClient, as_json: JsonOption = False) -> None:
    """List the public keys that verify receipts. Save `--json` to a file to verify offline."""
    found = client.list_receipt_keys()
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "keys": [
                        {"key_id": key.key_id, "public_key": key.public_key.hex()} for key in found
                    ]
                },
                indent=2,
            )
        )
        return
    show(
        table(
            "key",
            "public key (Ed25519)",
            rows=((each.key_id, each.public_key.hex()) for each in found),
        )
    )


@receipt.command("export")
def export(
    month: MonthArgument,
    organization: OrganizationOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file, not to stdout.")
    ] = None,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Write all receipts of a month as JSON lines, the oldest first."""
    with receipt_client(address, api_key) as client:
        found = client.list_receipts(organization_or_default(organization, client.address), month)
        number = itertools.count()
        put(output, (f"{each.to_json()}\n" for each, _ in zip(found, number, strict=False)))
    note(f"{next(number):,} receipts of {month}")


@receipt.command("month")
@calls(receipt_client)
def month_(
    client: ReceiptClient,
    month: MonthArgument,
    organization: OrganizationOption = None,
) -> Output:
    """Show the root of a month's receipts, and where each project's chain begins and ends."""
    from rich.text import Text

    found = client.get_receipt_month(organization_or_default(organization, client.address), month)
    numbers = ("first", "last", "receipts")
    chains = table("project", *numbers, "hash of the last", right=numbers)
    for each in found.chains:
        counts = each.first_sequence, each.last_sequence, each.receipt_count
        chains.add_row(each.project_id, *counts, each.last_hash.hex())
    count = found.missing_receipt_count
    remarks = [f"older than receipts: {counted(count, 'usage event')}"] if count else []
    return (
        found,
        chains,
        Text(f"{counted(found.receipt_count, 'receipt')}, root {found.root.hex()}"),
        *remarks,
    )


@receipt.command("verify")
def verify(
    file: Annotated[
        str,
        typer.Argument(
            help="Receipts as JSON lines, from `export` or of single requests; - for stdin."
        ),
    ],
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            help="Public keys written by `weir receipt keys --json`. Default: the server's.",
        ),
    ] = None,
    month: Annotated[
        str,
        typer.Option(
            "--month", help="Check that the file has all receipts of this month, such as 2026-11."
        ),
    ] = "",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Report of the month as JSON: its sums and its root must match the receipts.",
        ),
    ] = None,
    root: Annotated[
        str, typer.Option("--root", help="Root that the month must have, in hexadecimal.")
    ] = "",
    as_json: JsonOption = False,
    address: AddressOption = None,
    api_key: KeyOption = None,
) -> None:
    """Verify without the server that each receipt is genuine, and that none is missing.

    It reports every problem, and exits with 1 if it finds one.
    """
    try:
        with opened(file) as lines:
            receipts = list(read_receipts(lines))
        known = read_keys(keys) if keys is not None else fetched_keys(receipts, address, api_key)
        reported = read_report(report) if report is not None else ReportedMonth(month=month)
        if month and reported.month != month:
            wrong_use(f"{report} is the report of {reported.month}, not of {month}")
        if month or reported.month:
            checked_month(reported.month)
        expected = bytes.fromhex(root) if root else reported.root
        verdict = verify_receipts(
            receipts,
            public_keys(known),
            month=reported.month,
            organization_id=reported.organization_id,
            root=expected,
            totals=reported.totals,
        )
    except (FileInvalid, ValueError, ImportError) as error:
        wrong_use(str(error))
    except OSError as error:
        wrong_use(unreadable(error.filename, error))
    print_verdict(verdict, reported, expected, as_json=as_json)
    if not verdict.valid:
        raise typer.Exit(ExitCode.FAILED)


def fetched_keys(
    receipts: list[Receipt], address: str | None, api_key: str | None
) -> list[ReceiptKey]:
    """Fetch the server's public keys, unless none of the receipts is signed."""
    if not any(each.key_id for each in receipts):
        return []
    with receipt_client(address, api_key) as client:
        note(f"public keys from {client.address}; use --keys to verify without trusting the server")
        return client.list_receipt_keys()


def print_verdict(
    verdict: ReceiptVerdict, reported: ReportedMonth, expected_root: bytes | None, *, as_json: bool
) -> None:
    counts = (
        f"{counted(verdict.receipt_count, 'receipt')} of"
        f" {counted(verdict.project_count, 'project')}, {verdict.signed_count:,} signed"
    )
    if as_json:
        print_json({"valid": verdict.valid, **jsonable(verdict)})
        return
    for problem in verdict.problems[:PROBLEMS_SHOWN_MAX]:
        typer.secho(f"✗ {problem}", fg="red")
    if len(verdict.problems) > PROBLEMS_SHOWN_MAX:
        typer.secho(f"✗ and {len(verdict.problems) - PROBLEMS_SHOWN_MAX:,} more", fg="red")
    if verdict.problems:
        typer.echo(f"{counts}: {counted(len(verdict.problems), 'problem')}")
        return
    typer.secho(f"✓ {counts}: unaltered", fg="green")
    if reported.month and expected_root is None:
        note(
            "not checked: first and last receipts of the month; needs --root, or --report of a"
            " closed month"
        )
    if expected_root is not None:
        typer.secho(f"✓ complete: the root is {verdict.root.hex()}", fg="green")
    if reported.totals is not None:
        typer.secho(f"✓ the sums match the report of {reported.month}", fg="green")


def opened(file: str) -> AbstractContextManager[IO[str]]:
    return nullcontext(sys.stdin) if file == "-" else Path(file).open(encoding="utf-8")
