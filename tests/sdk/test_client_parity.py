"""Public names of both clients: the differences are listed here, with reasons."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
import weir_client
from weir_client import options, tls

from infra import typescript_sdk

SOURCES = typescript_sdk.SDK / "src"
PROMPT = "is an argument of its own in Python"
SIGNAL = "Python cancels by asyncio"
TYPE = "Python tells events apart by their classes"
RECEIPTS = (
    "receipts are read by the Python client and the command line; TypeScript counts them, and"
    " verifies exported ones"
)
INTERSECTION = "added by TypeScript in the type of the call's result"
ONE_SIDED = {
    "GenerateOptions.prompt": PROMPT,
    "GenerateOptions.signal": SIGNAL,
    "AttachOptions.signal": SIGNAL,
    "EmbedOptions.signal": SIGNAL,
    "Admitted.type": TYPE,
    "Progress.type": TYPE,
    "Delta.type": TYPE,
    "UsageUpdate.type": TYPE,
    "Resumed.type": TYPE,
    "Delta.received": "for the benchmarks, which are in Python",
    "Result.receipt_count": RECEIPTS,
    "Result.receipts": RECEIPTS,
    "Partial.receipts": RECEIPTS,
    "EmbedResult.receipts": RECEIPTS,
    "Generation.receipts": RECEIPTS,
    "Invoice.credit_notes": INTERSECTION,
    "Plan.existed": INTERSECTION,
    "PlanAssignment.existed": INTERSECTION,
    "Plan.name": "in its `configuration` in TypeScript",
    "UsagePage.has_more": "the pages of TypeScript end with the last one",
    "Client.close": "`aclose` in Python, as of asyncio's own objects",
    "Client.aclose": "`close` in TypeScript",
    "GenerationStream.take": "for the blocking client",
    "GenerationStream.next_event": "for the blocking client",
    "GenerationStream.holds_back": "for the blocking client",
    "GenerationStream.wait": "`result()` in TypeScript waits",
    "GenerationStream.aclose": "`close` in TypeScript",
    "GenerationStream.close": "`aclose` in Python, as of asyncio's own objects",
}
PAGED = {
    "list_audit_entries": "_audit_pages",
    "get_usage": "_usage_pages",
    "list_alerts": "_alert_pages",
    "list_end_users": "_end_user_pages",
    "list_resale_prices": "_resale_price_pages",
    "list_replica_rentals": "_replica_rental_pages",
    "list_resale_statements": "_resale_statement_pages",
}
# Calls and arguments of administrators that only one client has.
MANAGEMENT_ONE_SIDED = {
    "export_month.file_format": "`format` in TypeScript, where it hides no built-in function",
    "export_month.format": "`file_format` in Python",
    "export_resale_statement.file_format": "`format` in TypeScript, as in `export_month`",
    "export_resale_statement.format": "`file_format` in Python",
}
ENUMS = ("FinishReason", "Stage", "GenerationState", "QuotaSubject", "QuotaDimension", "ModelTask")


def snake(name: str) -> str:
    """Return the name in Python's spelling, without the unit of a time."""
    return re.sub(r"_(ms|s)$", "", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def typescript() -> str:
    """Return the client's sources without generated code."""
    return "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.ts")))


def interfaces() -> dict[str, set[str]]:
    """Return the members of every interface that both clients have."""
    found = re.finditer(
        r"^export interface (\w+)(?: extends [\w, ]+)? \{\n(.*?)^\}", typescript(), re.M | re.S
    )
    members = {
        each[1]: {snake(name) for name in re.findall(r"^  readonly (\w+)\??:", each[2], re.M)}
        for each in found
    }
    return {name: of for name, of in members.items() if in_python(name) is not None}


def in_python(name: str) -> set[str] | None:
    """Return the members of a value or a set of options in the Python client."""
    kind = next(
        (getattr(module, name) for module in (weir_client, options, tls) if hasattr(module, name)),
        None,
    )
    if kind is None:
        return None
    members = (
        [field.name for field in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else kind.__annotations__
    )
    return {snake(member) for member in members}


def class_members(name: str) -> set[str]:
    """Return the public members of a class of the TypeScript client."""
    match = re.search(rf"^export class {name} .*?\{{\n(.*?)^\}}", typescript(), re.M | re.S)
    assert match is not None
    methods = re.findall(r"^  (?:async )?\*?(?:get )?(\w+)(?:<.*?>)?\(", match[1], re.M)
    fields = re.findall(r"^  readonly (\w+):", match[1], re.M)
    return {snake(each) for each in (*methods, *fields) if each != "constructor"}


def public(kind: type) -> set[str]:
    """Return the public members of a class, with attributes of instances."""
    bases = kind.__mro__[:-1]
    names = [name for base in bases for name in vars(base)]
    for base in bases:
        names += re.findall(r"self\.([a-z]\w*) = ", inspect.getsource(base))
    return {snake(name) for name in names if not name.startswith("_")}


def calls_of(kind: type) -> dict[str, set[str]]:
    """Return the public calls of a client with the names of their arguments."""
    found: dict[str, set[str]] = {}
    for base in kind.__mro__[:-1]:
        for name, member in vars(base).items():
            if name.startswith("_") or not callable(member) or name in found:
                continue
            # A call that reads pages takes the arguments of the function that reads them.
            paged = PAGED.get(name)
            function = member if paged is None else getattr(kind, paged)
            found[name] = set()
            for each in inspect.signature(function).parameters.values():
                options = re.fullmatch(r"Unpack\[(\w+)\]", str(each.annotation))
                found[name] |= (options and in_python(options[1])) or {snake(each.name)}
            found[name] -= {"self"}
    return found


def typescript_calls_of(name: str) -> dict[str, set[str]]:
    """Return the same for a class of the TypeScript client and those that it extends."""
    source = typescript()
    found = {}
    for declared in (f"{name}Client", f"{name}Calls"):
        match = re.search(rf"^export class {declared} .*?\{{\n(.*?)^\}}", source, re.M | re.S)
        assert match is not None
        calls = re.finditer(
            r"^  async \*?(\w+)\((.*?)\): (?:Promise|AsyncGenerator)<", match[1], re.M | re.S
        )
        for call in calls:
            found[snake(call[1])] = set(arguments(call[2], source))
    return found


def arguments(text: str, source: str) -> Iterator[str]:
    """Yield the arguments of a call and the members of its options."""
    for name in re.findall(r"(?:^|\s|\(|, )(\w+)(?:: | = )", re.sub(r"\{.*?\}", "{}", text)):
        if name != "options":
            yield snake(name)
    for name in re.findall(r"readonly (\w+)\??:", text):
        yield snake(name)
    if (options := re.search(r"options: (\w+Options)\b", text)) is not None:
        match = re.search(rf"^export interface {options[1]} .*?\{{\n(.*?)^\}}", source, re.M | re.S)
        assert match is not None, options[1]
        for name in re.findall(r"^  readonly (\w+)\??:", match[1], re.M):
            yield snake(name)


def one_sided(name: str, theirs: set[str], ours: set[str]) -> set[str]:
    """Return the members of only one client."""
    return {f"{name}.{member}" for member in theirs ^ ours}


def test_both_clients_offer_and_report_the_same_or_the_difference_has_a_reason() -> None:
    differences = set()
    for name, theirs in interfaces().items():
        ours = in_python(name)
        assert ours is not None
        differences |= one_sided(name, theirs, ours)
    differences |= one_sided("Client", class_members("WeirClient"), public(weir_client.AsyncClient))
    differences |= one_sided(
        "GenerationStream", class_members("Generation"), public(weir_client.AsyncGeneration)
    )

    assert len(interfaces()) > 25
    assert differences - ONE_SIDED.keys() == set()
    assert ONE_SIDED.keys() - differences == set(), "reasons for what is not so any more"


def test_both_clients_have_the_same_calls_of_administrators() -> None:
    differences = set()
    for name in ("Admin", "Billing"):
        ours = calls_of(getattr(weir_client, f"Async{name}Client"))
        theirs = typescript_calls_of(name)
        differences |= (ours.keys() ^ theirs.keys()) - {"aclose", "close"}
        for call in ours.keys() & theirs.keys():
            differences |= one_sided(call, theirs[call], ours[call])
        assert len(ours.keys() & theirs.keys()) >= 15

    assert differences == MANAGEMENT_ONE_SIDED.keys()


@pytest.mark.parametrize("name", ENUMS)
def test_both_clients_know_the_same_words(name: str) -> None:
    source = typescript()
    match = re.search(rf"^export type {name} =(.*?);", source, re.M | re.S)
    kind = getattr(weir_client, name)

    assert match is not None
    assert issubclass(kind, enum.Enum)
    if listed := re.fullmatch(r" \(typeof (\w+)\)\[number\]", match[1]):
        match = re.search(rf"^export const {listed[1]} = \[(.*?)\] as const;", source, re.M | re.S)
        assert match is not None
    assert set(re.findall(r'"([\w-]+)"', match[1])) == {each.value for each in kind}


def test_both_clients_have_the_same_errors() -> None:
    theirs = set(
        re.findall(r"^export class (\w+) extends \w+", (SOURCES / "errors.ts").read_text(), re.M)
    )
    ours = {
        name
        for name in weir_client.__all__
        if inspect.isclass(kind := getattr(weir_client, name)) and issubclass(kind, Exception)
    }

    assert theirs == ours - {"ReceiptInvalid"}


def test_a_program_that_only_generates_loads_no_management() -> None:
    program = (
        "import sys; from weir_client import Client;"
        " print(*(name for name in sys.modules if name.startswith('weir')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()

    assert "weir_client.sync" in loaded
    assert not {"weir_client.admin", "weir_client.billing", "weir.v1.admin_service_pb2"} & set(
        loaded
    )
    assert all(getattr(weir_client, name) is not None for name in weir_client.__all__)


def test_type_checkers_see_every_public_name_in_its_module() -> None:
    source = inspect.getsource(weir_client)
    imported = re.findall(r"from weir_client\.(\w+) import (\w+) as \2$", source, re.MULTILINE)
    for module in re.findall(r"from weir_client\.(\w+) import \*", source):
        for name, each in vars(import_module(f"weir_client.{module}")).items():
            if inspect.isclass(each) and each.__module__ == f"weir_client.{module}":
                imported.append((module, name))

    assert {name: module for module, name in imported} == weir_client._MODULES
    assert len(imported) == len(weir_client.__all__) == len(weir_client._MODULES)


def test_values_and_errors_do_not_load_grpc() -> None:
    program = (
        "import sys; from weir_client import ApiKey, Invoice, Money, NotFound, Result, UsageRow;"
        " print([name for name in ('grpc', 'google.protobuf') if name in sys.modules])"
    )
    message = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout

    assert message == "[]\n"
