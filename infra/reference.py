"""Generated parts of the documentation: `python -m infra.reference --write | --check`.

A page has them between `<!-- reference: NAME -->` and `<!-- end of reference -->`, committed so
that you can read it in the repository. `make reference` writes them, `make reference-check` finds
those that differ from the source. MkDocs loads this module as a hook, which rewrites links between
files of the repository to links between pages of the site.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import posixpath
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.rpc import code_pb2, error_details_pb2, status_pb2
from weir_cli.__main__ import COMMANDS, load
from weir_cli.checkout import version
from weir_cli.commands import PERSONAS
from weir_client.status import error_from_status

from api.access.permissions import PERMISSION_OF, PERMISSIONS
from api.access.roles import Role, named
from api.core import wire
from api.core.errors import Cause
from api.core.settings import Settings
from api.core.statuses import (
    code_of,
    help_of,
    internal_message,
    link_to_docs,
    pack,
    reason_of,
    status_of,
)
from api.generation.charges import Action, Cell
from api.generation.endings import CAUSES, PHASES, SIBLING, TABLE, WAYS
from api.generation.parsing import conversation, decoding, tools
from api.metrics import operator_http
from api.openai import dialects, embeddings, formats, parameters, tolerance
from api.openai.error_responses import ErrorResponse, error_response
from common.settings import settings_of
from infra.error_examples import examples, http_examples
from infra.generate_proto import contract
from infra.install import reported
from metering.ledger.ledger import AccountKind, TransactionKind
from metering.quotas.quota_rules import DIMENSIONS, Kind, Unit

ROOT = Path(__file__).resolve().parent.parent
COOKBOOK = ROOT / "docs" / "cookbook"
COLUMNS_MAX = 100
END = "<!-- end of reference -->"
INCIDENT = "3f9a1c20b7de"  # of the example of an internal error
# A marker and the lines up to its end; a new marker has neither.
MARKER = re.compile(
    rf"^<!-- reference: ([\w-]+) -->(?:\n(?:(?!<!-- reference).*\n)*?{END})?$", re.MULTILINE
)
# At the start of a line, Markdown would read these words as the mark of a list or a heading.
MARK = re.compile(r" (?=(?:[-+*#>|]|\d+[.)])(?: |$))")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!#|\w+:)([^)\s]+)\)")
REMOTE_FILE = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//"
)

SHARED = {
    "WEIR_DATABASE_URL": "api, worker, stripe webhooks, migrate, fsck, reconcile",
    "WEIR_HOME": "api, worker, client",
    "WEIR_RECEIPT_KEY_FILE": "api, worker",
    "WEIR_ALERT_WEBHOOKS_PRIVATE": "api, worker",
}
KINDS_OF_VALUE = {
    "bool": "switch",
    "int": "whole number",
    "float": "number",
    "str": "text",
    "Path": "path",
    "Literal": "choice",
    "Mapping": "pairs",
}
FENCES = {".py": "python", ".ts": "ts"}
PROGRAMS = sorted(path for path in COOKBOOK.glob("*") if path.suffix in (*FENCES, ".ipynb"))
HEADINGS = {
    "api": "API process",
    "worker": "Billing worker and its commands",
    "engine worker": "Engine worker",
    "client": "Clients",
}
TRANSACTIONS: Mapping[TransactionKind, str] = {
    TransactionKind.USAGE: "Usage events of one organization and day, rated together.",
    TransactionKind.PLAN: "What the plan takes off or adds at the close of a month.",
    TransactionKind.CREDIT_GRANTED: "Prepaid credit that was granted.",
    TransactionKind.CREDIT_APPLIED: "Prepaid credit that pays for a month.",
    TransactionKind.CREDIT_EXPIRED: "Prepaid credit that expired unused.",
    TransactionKind.CREDIT_REFUNDED: "Prepaid credit of a closed organization, to be paid back.",
    TransactionKind.ADJUSTMENT: "An approved adjustment or credit note.",
    TransactionKind.ROUNDING: "Difference between the exact total and the invoice.",
}
# Settings outside of dataclasses: variable, processes, kind, default and range; then the meaning.
OTHER_SETTING_LINES = """
WEIR_LOG|api|choice|info|`debug`, `info`, `warning` or `error`
    Log level.
WEIR_BROKER_URL|worker|URL||
    Celery's broker, such as `redis://host`. Unset: you can run one worker, without a broker.
WEIR_READY_FILE|worker|path||
    The worker writes its process id there when it is ready.
WEIR_USAGE_RETENTION_MONTHS|worker|number||3 to 1200
    How many whole months details of usage are kept after their own. Unset: for ever.
WEIR_AUDIT_RETENTION_MONTHS|worker|number||3 to 1200
    For how many months audit entries are kept. Unset: for ever.
WEIR_EXPORT|worker|choice|off|`stripe`, `file` or `off`
    Where usage is sent.
WEIR_EXPORT_FILE|worker|path|usage.jsonl in WEIR_HOME|
    File that usage is written to with `WEIR_EXPORT=file`.
STRIPE_API_KEY|worker|secret||`sk_…` or `rk_…`
    Your secret or restricted key of Stripe.
WEIR_STRIPE_NAMESPACE|worker|text|weir|1 to 20 lower-case letters and digits
    Prefix of everything that Weir creates at Stripe.
WEIR_STRIPE_COLLECTION|worker|choice|send_invoice|`send_invoice` or `charge_automatically`
    How Stripe collects an invoice.
WEIR_STRIPE_FINALIZE|worker|choice|close|`close` or `stripe`
    When Stripe's invoice becomes final: when you close the month, or when Stripe decides.
WEIR_STRIPE_API_BASE|worker|URL|https://api.stripe.com|https
    Address of Stripe's API.
WEIR_STRIPE_WEBHOOK_SECRET|stripe webhooks|secret||
    Signing secrets of Stripe's event destinations, separated by commas.
WEIR_STRIPE_WEBHOOK_LISTEN|stripe webhooks|address|127.0.0.1:8377|`host:port`
    Where `weir stripe webhooks` listens for events.
WEIR_APPLICATION_PASSWORD|migrate|secret||
    Password that `weir migrate --grant` gives the application role.
WEIR_NATIVE|engine worker|text|1|0, 1, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16 or amx
    0 computes with torch, without the native decoder; a level excludes better ones.
WEIR_NATIVE_CACHE|engine worker|path|weir/native in the user's cache|
    Directory of compiled libraries.
WEIR_ADDRESS|client|address|that of `weir up`|`host:port`, or several with commas between
    Server that commands and SDKs call. Several are used in turn, and without one that is lost.
WEIR_API_KEY|client|secret|that of `weir up`|
    Your key, for developers' commands and SDKs.
WEIR_ADMIN_KEY|client|secret|that of `weir up`|
    Your key for the commands of administrators and finance.
WEIR_TLS|client|switch||1 or 0
    Use TLS, or do not. Unset: for every address but the loopback.
WEIR_ROOT_CERTIFICATES|client|path|the system's|
    PEM file with the authorities to trust.
WEIR_CLIENT_CERTIFICATE|client|path||
    PEM file with your client certificate, for mTLS.
WEIR_CLIENT_KEY|client|path||
    PEM file with the key of your client certificate.
""".strip().splitlines()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sentence(text: str) -> str:
    """Join the lines of a docstring or a comment to one paragraph."""
    return " ".join(text.split())


# Settings


@dataclass(frozen=True, slots=True)
class Setting:
    """Environment variable, the processes that read it, and its range of values if limited."""

    variable: str
    processes: str
    kind: str
    default: str
    range: str
    meaning: str


def every_setting() -> list[Setting]:
    """Collect all settings, in the order of the source."""
    ours = [
        Setting(
            spec.metadata["variable"],
            SHARED.get(spec.metadata["variable"], "api"),
            KINDS_OF_VALUE[re.split(r"\W", str(spec.type))[0]],
            shown_default(spec),
            allowed(spec.metadata["parse"]),
            comments_of(kind).get(spec.name, ""),
        )
        for kind, spec in settings_of(Settings)
    ]
    return [*ours, *other_settings()]


def other_settings() -> list[Setting]:
    """Build the settings that no class of settings declares."""
    return [
        Setting(*[cell.strip() for cell in (*facts.split("|"), meaning)])
        for facts, meaning in zip(OTHER_SETTING_LINES[::2], OTHER_SETTING_LINES[1::2], strict=True)
    ]


@cache
def comments_of(kind: type) -> dict[str, str]:
    """Map fields to the comments above them or at the ends of their lines.

    Adjacent fields share the comment above them.
    """
    comments: dict[str, str] = {}
    above: list[str] = []
    body, _ = inspect.getsourcelines(kind)
    node = ast.parse("".join(body)).body[0]
    assert isinstance(node, ast.ClassDef)
    last = node.body[0].end_lineno or 0  # of the docstring
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        before = [line.strip() for line in body[last : each.lineno - 1]]
        comment = [line.removeprefix("#").strip() for line in before if line.startswith("#")]
        if comment or "" in before:
            above = comment
        assert each.end_lineno is not None
        last = each.end_lineno
        _, mark, beside = body[last - 1].rpartition("  # ")
        comments[each.target.id] = sentence(
            " ".join([*above, beside.strip().capitalize() if mark else ""])
        )
    return comments


def shown_default(spec: Any) -> str:
    """Format the default of a field as users write it."""
    variable, value = spec.metadata["variable"], spec.default
    if variable in ("WEIR_HOME", "WEIR_MODELS"):
        return "~/.weir" if variable == "WEIR_HOME" else "demo, the bundled model"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and "BYTES" in variable:
        unit = next((u for u in (30, 20, 10) if value and value % 2**u == 0), 0)
        return (
            f"{value} ({value >> unit}"
            f" {dict(zip((30, 20, 10), ('GiB', 'MiB', 'KiB'), strict=True))[unit]})"
            if unit
            else str(value)
        )
    return str(value) if isinstance(value, int | str) else ""


def allowed(parse: Callable[[str], object]) -> str:
    """Find the values that a parser allows, from its error for an invalid text."""
    try:
        parse("\x00")
    except ValueError as error:
        return (
            str(error).removeprefix("must be ")
            if "\x00" not in str(error) and "x00" not in str(error)
            else "IP networks"
        )
    return ""


def settings_page() -> str:
    """Build the reference of all settings, by process."""
    lines: list[str] = []
    for process, heading in HEADINGS.items():
        lines.append(f"## {heading}\n")
        for each in every_setting():
            first = each.processes.split(", ")[0]
            if first == process or (
                process == "worker" and first in ("stripe webhooks", "migrate")
            ):
                default = f"`{each.default}`" if each.default else "unset"
                facts = [f"**{each.kind}**", f"default: {default}"]
                facts += [f"allowed: {each.range}"] if each.range else []
                facts.append(f"read by: {each.processes}")
                lines.append(f"### `{each.variable}`\n\n{'; '.join(facts)}\n")
                lines.append(f"{each.meaning}\n" if each.meaning else "")
    return "\n".join(lines)


# Errors


@cache
def examples_by_reason() -> Mapping[str, Sequence[status_pb2.Status]]:
    """Convert the examples of all errors to statuses, by reason and without equal ones."""
    link_to_docs("")
    found: dict[str, list[status_pb2.Status]] = {}
    for error in examples():
        status = internal_example() if code_of(error) == code_pb2.INTERNAL else status_of(error)
        found.setdefault(reason_of(error), []).append(status)
    return dict(sorted(found.items()))


@cache
def faults_by_reason() -> Mapping[str, Sequence[ErrorResponse]]:
    """Group the examples of errors that begin in HTTP by their reasons, which gRPC may share."""
    link_to_docs("")
    found: dict[str, list[ErrorResponse]] = {}
    for fault in http_examples():
        found.setdefault(fault.refusal.facts["reason"], []).append(fault.refusal)
    return found


def every_reason() -> list[str]:
    """List the reasons of all errors, of gRPC and HTTP, in alphabetical order."""
    return sorted({*examples_by_reason(), *faults_by_reason()})


def internal_example() -> status_pb2.Status:
    """Build an INTERNAL status whose incident id is always the same, without logging it."""
    info = error_details_pb2.ErrorInfo(reason="INTERNAL", metadata={"incident_id": INCIDENT})
    return pack(code_pb2.INTERNAL, internal_message(INCIDENT), [info, help_of("INTERNAL")])


def errors_page() -> str:
    """Build the table of all error reasons with their gRPC and HTTP status codes."""
    rows = []
    for reason in every_reason():
        statuses = examples_by_reason().get(reason, ())
        codes = dict.fromkeys(code_pb2.Code.Name(each.code) for each in statuses)
        answers = [error_response(each) for each in statuses]
        answers += faults_by_reason().get(reason, ())
        https = dict.fromkeys(str(each.http_status) for each in answers)
        retry = "yes" if any("retry-after" in each.headers for each in answers) else "no"
        link = f"[`{reason}`](errors/{reason}.md)"
        grpc = " ".join(f"`{each}`" for each in codes) or "only HTTP"
        rows.append((link, grpc, ", ".join(https), retry))
    return table(("reason", "gRPC", "HTTP", "retry"), rows)


def error_facts(reason: str) -> str:
    """Build the codes of a reason in all APIs, and the keys of its metadata."""
    rows: dict[tuple[str, ...], None] = {}
    keys: dict[str, None] = {}
    for status in examples_by_reason().get(reason, ()):
        answer, error = error_response(status, parameters.CHAT_NAMES), error_from_status(status)
        when = "after `RetryInfo`" if "retry-after" in answer.headers else "no"
        rows[
            f"`{code_pb2.Code.Name(status.code)}`",
            str(answer.http_status),
            f"`{answer.code}`",
            f"`{type(error).__name__}`",
            when,
        ] = None
        keys |= dict.fromkeys(sorted(error.metadata))
    for fault in faults_by_reason().get(reason, ()):
        rows["only HTTP", str(fault.http_status), f"`{fault.code}`", "", "no"] = None
    metadata = f"\nMetadata: {', '.join(f'`{key}`' for key in keys)}.\n" if keys else ""
    return table(("gRPC", "HTTP", "HTTP `code`", "SDK class", "retry"), rows) + metadata


def error_example(reason: str) -> str:
    """Show the first example of a reason as gRPC, HTTP and the SDK show it."""
    if reason not in examples_by_reason():
        fault = faults_by_reason()[reason][0]
        return example_text(
            {
                "HTTP": f"{fault.http_status}, type {fault.kind}, code {fault.code}:"
                f" {fault.message}",
                "Link": fault.doc_url,
            }
        )
    status = examples_by_reason()[reason][0]
    answer, error = error_response(status, parameters.CHAT_NAMES), error_from_status(status)
    http = [f"{answer.http_status}, type {answer.kind}, code {answer.code}"]
    http += [f"param {answer.param}"] if answer.param else []
    http += [f"{name}: {value}" for name, value in answer.headers.items() if name == "retry-after"]
    return example_text(
        {
            "gRPC": f"{code_pb2.Code.Name(status.code)}: {status.message}",
            "HTTP": ", ".join(http),
            "Python": f"except weir_client.{type(error).__name__} as error:"
            f" error.reason == {reason!r}",
            "Link": error.doc_url,
        }
    )


def example_text(parts: Mapping[str, str]) -> str:
    """Lay out an example of an error, by API."""
    lines = [
        textwrap.fill(
            f"{name:8}{text}", COLUMNS_MAX - 8, subsequent_indent=" " * 8, break_on_hyphens=False
        )
        for name, text in parts.items()
    ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


# Metrics


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Metric as it is scraped, with all its labels."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metric_families() -> list[MetricFamily]:
    """Find all metrics of an api process, from the calls in the source that create them."""
    tables: list[tuple[str, Iterable[str], tuple[str, ...]]] = [
        ("counter", (row[0] for row in operator_http.TOTALS), operator_http.REPLICA_LABELS),
        ("histogram", (row[0] for row in operator_http.TIMES), operator_http.REQUEST_LABELS),
        (
            "histogram",
            (row[0] for row in operator_http.CONVENTIONAL_TIMES),
            operator_http.CONVENTIONAL_LABELS,
        ),
        ("gauge", (row[0] for row in operator_http.QUEUES), ("model",)),
    ]
    meanings = operator_http.MEANINGS
    found = [
        MetricFamily(name, kind, labels, meanings[name])
        for kind, names, labels in tables
        for name in names
    ]
    for node in ast.walk(ast.parse(inspect.getsource(operator_http))):
        match node:
            case ast.Call(
                func=ast.Name(
                    id="gauge" | "gauges" | "counter" | "counters" | "histograms" as kind
                ),
                args=[ast.Constant(value=str(name)), *rest],
            ):
                labels = eval_labels(rest[0]) if kind.endswith("s") else ()
                found.append(MetricFamily(name, kind.removesuffix("s"), labels, meanings[name]))
    return [
        MetricFamily(
            f"{it.name}_total" if it.kind == "counter" else it.name, it.kind, it.labels, it.meaning
        )
        for it in found
    ]


def eval_labels(node: ast.expr) -> tuple[str, ...]:
    """Evaluate the syntax tree of a tuple of labels."""
    return tuple(eval(compile(ast.Expression(node), "labels", "eval"), vars(operator_http)))


def metrics_page() -> str:
    """Build the reference of all metrics, by subject."""
    parts = {
        "Requests": (
            "requests",
            "refusals",
            "tokens",
            "failed",
            "admissions",
            "migrations",
            "time",
            "inter",
            "stage",
        ),
        "Engines and queues": ("engine", "kv", "queue"),
        "Holds, journal, database": (
            "database",
            "holds",
            "preauthorized",
            "pending",
            "hold",
            "journal",
            "abandoned",
            "refused",
        ),
        "Ledger, workers and export": ("cluster", "worker"),
        "Spans and export": ("traces", "metric"),
    }
    groups: dict[str, list[MetricFamily]] = {
        part: [] for part in (*parts, "Process and connections")
    }
    for each in sorted(metric_families(), key=lambda it: it.name):
        word = each.name.split("_")[1]
        request = each.name == "weir_request_seconds" or each.name.startswith("gen_ai_")
        group = next(
            (part for part, words in parts.items() if word in words),
            "Requests" if request else "Process and connections",
        )
        groups[group].append(each)
    lines: list[str] = []
    for group, families in groups.items():
        lines.append(f"## {group}\n")
        for each in families:
            by = (
                "; labels: " + ", ".join(f"`{label}`" for label in each.labels)
                if each.labels
                else ""
            )
            lines.append(f"- `{each.name}` ({each.kind}{by}): {each.meaning}")
        lines.append("")
    return "\n".join(lines)


# Command line


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its path, by role of the user, groups before their members."""
    for persona in PERSONAS:
        for name, entry in COMMANDS.items():
            if entry.persona == persona and " " not in name:
                yield from below((name,), load(name))


def below(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from below((*path, name), each)


def cli_page() -> str:
    """Build the reference of all commands with their arguments and options."""
    lines: list[str] = []
    for path, command in commands():
        lines.append(f"{'##' if len(path) == 1 else '###'} weir {' '.join(path)}\n")
        lines.append(f"{sentence((command.help or '').split(chr(12))[0])}\n")
        if getattr(command, "commands", None) and not command.params:
            continue
        for each in command.params:
            if "--help" in each.opts or each.hidden:
                continue
            is_option = each.param_type_name == "option"
            names = ", ".join(
                f"`{name}`"
                for name in (
                    [*each.opts, *each.secondary_opts] if is_option else [each.name.upper()]
                )
            )
            facts = (
                []
                if is_option and not each.required
                else ["required"]
                if each.required
                else ["optional"]
            )
            facts += ["repeatable"] if each.multiple or each.nargs == -1 else []
            text = sentence(each.help or "")
            beside = f" ({', '.join(facts)})" if facts else ""
            lines.append(f"- {names}{beside}: {text}" if text else f"- {names}{beside}")
        lines.append("")
    return "\n".join(lines)


# gRPC


def grpc_page() -> str:
    """Build the reference of services, messages and enumerations by file, services first."""
    found = sorted(contract().file, key=lambda file: not file.service)
    return "\n".join(line for file in found for line in of_file(file))


def of_file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(it.path): sentence(it.leading_comments) for it in file.source_code_info.location
    }
    paragraphs = {tuple(it.path): it.leading_comments for it in file.source_code_info.location}
    for index, service in enumerate(file.service):
        yield f"## {service.name}\n"
        yield "\n\n".join(map(sentence, paragraphs[6, index].split("\n\n"))) + "\n"
        for number, method in enumerate(service.method):
            request = f"{'stream ' if method.client_streaming else ''}{link_to(method.input_type)}"
            answer = f"{'stream ' if method.server_streaming else ''}{link_to(method.output_type)}"
            needed = PERMISSION_OF[f"/{file.package}.{service.name}/{method.name}"]
            yield (
                f"### {method.name}\n\n{request} → {answer}; permission `{needed.name}`:"
                f" {named(needed.roles)}\n\n{comments[6, index, 2, number]}\n"
            )
    if not file.service:
        yield f"## {Path(file.name).name}\n"
    for index, message in enumerate(file.message_type):
        yield from of_message(message, (4, index), comments, "")
    for index, enum in enumerate(file.enum_type):
        yield from of_enum(enum, (5, index), comments, "")


def of_message(
    message: Any, path: tuple[int, ...], comments: Mapping[tuple[int, ...], str], outer: str
) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = outer + message.name
    yield f"#### {name}\n\n{comments.get(path, '')}\n"
    maps = {each.name: each for each in message.nested_type if each.options.map_entry}
    for index, each in enumerate(message.field):
        yield f"- `{each.name}` {type_of(each, maps)}: {comments.get((*path, 2, index), '')}"
    yield ""
    for index, nested in enumerate(message.nested_type):
        yield from of_message(nested, (*path, 3, index), comments, f"{name}.")
    for index, enum in enumerate(message.enum_type):
        yield from of_enum(enum, (*path, 4, index), comments, f"{name}.")


def of_enum(
    enum: Any, path: tuple[int, ...], comments: Mapping[tuple[int, ...], str], outer: str
) -> Iterator[str]:
    name = outer + enum.name
    yield f"#### {name}\n\n{comments.get(path, '')}\n"
    for index, value in enumerate(enum.value):
        yield f"- `{value.name}`: {comments.get((*path, 2, index), '')}"
    yield ""


def type_of(field: FieldDescriptorProto, maps: Mapping[str, Any]) -> str:
    """Format the type of a field, with a link if the contract defines it."""
    if (entry := maps.get(field.type_name.rpartition(".")[2])) is not None:
        return f"map of {type_of(entry.field[0], {})} to {type_of(entry.field[1], {})}"
    name = (
        link_to(field.type_name)
        if field.type_name
        else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    )
    is_repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"{'repeated ' if is_repeated else 'optional ' if field.proto3_optional else ''}{name}"


def link_to(type_name: str) -> str:
    name = type_name.removeprefix(".")
    return f"[{name[8:]}](#{anchor(name[8:])})" if name.startswith("weir.v1.") else f"`{name}`"


def anchor(name: str) -> str:
    return name.lower().replace(".", "")


# Ledger and endings


def ledger_page() -> str:
    """Build the reference of an organization's accounts and the kinds of transactions."""
    text = sentence(inspect.getdoc(AccountKind) or "")
    meanings = dict(re.findall(r"(\w+): (.*?\.)(?= \w+: |$)", text))
    accounts = table(
        ("account", "balance"),
        ((f"`{kind}`", meanings[kind.value].capitalize()) for kind in AccountKind),
    )
    kinds = table(
        ("transaction", "meaning"), ((f"`{kind}`", TRANSACTIONS[kind]) for kind in TransactionKind)
    )
    return f"## Accounts\n\n{accounts}\n## Transactions\n\n{kinds}"


def billed(cell: Cell) -> str:
    """Describe what a cell of the table of charges bills and counts."""
    charge = cell.charge
    if charge.action is Action.NONE:
        return "nothing"
    if charge.action is Action.UNCHANGED:
        return "as it was settled"
    if charge.action is Action.VOID:
        return "nothing; the request does not count"
    if charge.bills_output:
        return "input, delivered output; the request counts"
    return "input; the request counts" if charge.bills_input else "no tokens; the request counts"


def endings_charges() -> str:
    """Build the table of charges by phase and cause of the end."""
    rows = (
        (str(phase), str(cause), str(cell.charge.action), billed(cell), f"`{cell.test}`")
        for (phase, cause), cell in TABLE.items()
    )
    return table(("phase", "cause", "hold", "billed and counted", "test"), rows)


def endings_ways() -> str:
    """Build the table of the ways in which a request can end, by cause."""
    return (
        "\n".join(
            f"### {cause.capitalize()}\n\n"
            + table(
                ("end", "response"),
                ((way.name, way.response) for way in WAYS if way.cause is cause),
            )
            for cause in Cause
        )
        + f"\n{SIBLING}.\n"
    )


def dimensions() -> str:
    """Describe what each dimension of a quota counts, and when it resets."""
    rows = []
    for dimension, (kind, window, counts_input, counts_output) in DIMENSIONS.items():
        name = dimension.replace("_picos", "").replace("_", "-")
        counted = [
            word for word, counts in (("input", counts_input), ("output", counts_output)) if counts
        ]
        unit = {Kind.MONEY: "cost", Kind.CONCURRENCY: "requests at once"}.get(kind, kind.value)
        over = {None: "none", Unit.WINDOW: "any N minutes"}.get(window, window)
        rows.append((f"`{name}`", unit, str(over), " and ".join(counted) or "—"))
    return table(("dimension", "counts", "window (UTC)", "tokens"), rows)


def dialect_fields(effect: str) -> str:
    """List the fields of other APIs that have this effect, with those of only one API."""

    def rows() -> Iterator[tuple[str, ...]]:
        entries = [(name, "", entry) for name, entry in dialects.FIELDS.items()]
        for api, by_name in dialects.FIELDS_BY_API.items():
            entries += [(name, api, entry) for name, entry in by_name.items()]
        for name, api, entry in sorted(entries, key=lambda each: each[:2]):
            if entry.effect == effect:
                note = entry.note or " or ".join(f"`{each}`" for each in entry.means)
                values = ", ".join(f"`{json.dumps(each)}`" for each in entry.neutral)
                yield f"`{name}`" + (f" ({api})" if api else ""), values, note

    heads = {"refused": "instead, or why"}
    return table(("field", "changes nothing", heads.get(effect, "means")), rows())


def dialect_hints() -> str:
    """List the fields of other APIs that are ignored, and named in a response header."""
    names = sorted(name for name, each in dialects.FIELDS.items() if each.effect == "hint")
    return "\n".join(f"- `{name}`" for name in names) + "\n"


def dialect_neutral() -> str:
    """List the parameter values that change nothing, which an API without the parameter accepts."""
    return table(
        ("parameter", "changes nothing"),
        (
            (f"`{name}`", ", ".join(f"`{json.dumps(each)}`" for each in values))
            for name, values in sorted(dialects.NEUTRAL.items())
        ),
    )


def program(path: Path) -> str:
    """Show a program of the cookbook; a notebook as its cells."""
    if path.suffix != ".ipynb":
        return f"```{FENCES[path.suffix]}\n{path.read_text()}```\n"
    cells = json.loads(path.read_text())["cells"]
    texts = [(each["cell_type"], "".join(each["source"])) for each in cells]
    return "\n\n".join(
        text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts
    )


def http_limits() -> str:
    """List the limits of one HTTP request, which are constants."""
    embedding, body = "`input` of an embedding", "a body"
    limits: Sequence[tuple[str, str, int | str]] = (
        ("a conversation", "messages, or items of `input`", conversation.MESSAGE_COUNT_MAX),
        ("a conversation", "tool calls", conversation.CALL_COUNT_MAX),
        ("tools", "functions", tools.TOOL_COUNT_MAX),
        ("tools", "bytes of all schemas", tools.SCHEMAS_BYTES_MAX),
        ("a tool", "bytes of its schema", tools.SCHEMA_BYTES_MAX),
        ("`response_format`", "bytes", decoding.RESPONSE_FORMAT_BYTES_MAX),
        ("`response_format`", "texts to choose from", formats.CHOICE_COUNT_MAX),
        ("`stop`", "sequences", decoding.STOP_SEQUENCE_COUNT_MAX),
        ("`stop`", "characters of each", decoding.STOP_SEQUENCE_CHARS_MAX),
        ("`stop_token_ids`", "token ids", decoding.STOP_TOKEN_ID_COUNT_MAX),
        ("`logit_bias`", "token ids", decoding.LOGIT_BIAS_COUNT_MAX),
        ("`n`", "choices", decoding.CHOICE_COUNT_MAX),
        ("`top_logprobs`", "tokens", decoding.LOGPROBS_MAX["top_logprobs"]),
        ("`logprobs` with `echo`", "tokens", decoding.LOGPROBS_MAX["prompt_logprobs"]),
        ("`prompt` of completions", "prompts", parameters.PROMPT_COUNT_MAX),
        (embedding, "texts or lists of token ids", embeddings.INPUT_COUNT_MAX),
        ("`metadata`", "labels", wire.LABEL_COUNT_MAX),
        ("`metadata`", "characters of a value", wire.LABEL_VALUE_CHARS_MAX),
        (body, "unknown parameters", tolerance.UNKNOWN_COUNT_MAX),
        *((body, what, count) for what, count in parameters.ELEMENT_COUNTS_MAX.items()),
    )
    return table(
        ("limit of", "what", "at most"), ((of, what, f"{most:,}") for of, what, most in limits)
    )


def permissions_page() -> str:
    """Build the table of permissions and the roles that have them."""
    rows = (
        (f"`{each.name}`", *("yes" if role in each.roles else "" for role in Role))
        for permissions in PERMISSIONS.values()
        for each in permissions
    )
    return table(("permission", *(each.word for each in Role)), rows)


def calls_by_permission() -> str:
    """Build the list of permissions with their calls."""
    return "\n".join(
        f"- `{each.name}`: {', '.join(each.calls)}"
        for permissions in PERMISSIONS.values()
        for each in permissions
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "permissions": permissions_page,
    "permissions-calls": calls_by_permission,
    "settings": settings_page,
    "errors": errors_page,
    "metrics": metrics_page,
    "cli": cli_page,
    "grpc": grpc_page,
    "ledger": ledger_page,
    "dimensions": dimensions,
    "endings-phases": lambda: table(("phase", "meaning"), PHASES.items()),
    "endings-causes": lambda: table(("cause", "meaning"), CAUSES.items()),
    "endings-charges": endings_charges,
    "endings-ways": endings_ways,
    "dialect-aliases": lambda: dialect_fields("alias"),
    "dialect-formats": lambda: dialect_fields("format"),
    "dialect-hints": dialect_hints,
    "dialect-neutral": dialect_neutral,
    "dialect-refused": lambda: dialect_fields("refused"),
    "dialect-thinking": lambda: dialect_fields("thinking"),
    "http-limits": http_limits,
    **{f"error-{each}": partial(error_facts, each) for each in every_reason()},
    **{f"example-{each}": partial(error_example, each) for each in every_reason()},
    **{f"cookbook-{path.stem.replace('_', '-')}": partial(program, path) for path in PROGRAMS},
}


# Pages


def generated(name: str) -> str:
    """Generate a table or section of a page, in lines of at most 100 columns."""
    if name.startswith("cookbook-"):
        return TABLES[name]().strip("\n")  # code keeps its lines
    lines = []
    for line in TABLES[name]().splitlines():
        if len(line) <= COLUMNS_MAX or line.startswith("|"):
            lines.append(line)
            continue
        lines += textwrap.wrap(
            MARK.sub("\0", line),
            COLUMNS_MAX,
            subsequent_indent="  " if line.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
    text = "\n".join(lines).replace("\0", " ")
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def updated(page: str) -> str:
    """Replace the generated parts in the text of a page by those that the source has now."""
    return MARKER.sub(
        lambda found: f"<!-- reference: {found[1]} -->\n\n{generated(found[1])}\n\n{END}", page
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the generated parts of all pages, or print the pages where they are out of date."""
    parser = argparse.ArgumentParser(description="Generated parts of the documentation.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write them into the pages")
    mode.add_argument("--check", action="store_true", help="name the pages that are out of date")
    options = parser.parse_args(arguments)
    stale = False
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        if (current := updated(text)) == text:
            continue
        if options.write:
            path.write_text(current)
            continue
        stale = True
        print(
            f"{path.relative_to(ROOT)} differs from the source: run `make reference`",
            file=sys.stderr,
        )
    return 1 if stale else 0


# Hooks of MkDocs


class Building:
    """Page that MkDocs is at, as text for the lines of progress."""

    page = "preparing"

    def __str__(self) -> str:
        return f"building the documentation: {self.page}"


BUILDING, REPORTED = Building(), ExitStack()


def on_startup(command: str, **_: object) -> None:
    """Say every few seconds how far `make docs` is, which prints nothing else."""
    if command == "build":
        REPORTED.enter_context(reported(BUILDING))


def on_shutdown() -> None:
    REPORTED.close()


def on_config(config: Any) -> None:
    """Show the version beside the name of the site, and a link to REPOSITORY_URL if it is set."""
    config.repo_url = os.environ.get("REPOSITORY_URL")
    config.site_name = f"{config.site_name} {version(ROOT)}"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Lead links to pages of the site, and weigh the page in the search as mkdocs.yml says."""
    BUILDING.page = path = page.file.src_uri
    for start, search in config.extra["search"].items():
        if path.startswith(start):
            page.meta |= {"search": search, "tags": search.get("tags", [])}
    return led(markdown, path)


def on_page_context(_context: object, page: Any, **_: object) -> None:
    """Note that a page is being written, for the lines of progress."""
    BUILDING.page = f"writing {page.file.src_uri}"


@cache
def page_paths() -> Mapping[str, str]:
    """Map the path of each page's file to the page. Some pages are links to files elsewhere."""
    walked = (
        (Path(folder), names) for folder, _, names in os.walk(ROOT / "docs", followlinks=True)
    )
    pages = (folder / name for folder, names in walked for name in names if name.endswith(".md"))
    return {
        page.resolve().relative_to(ROOT).as_posix(): page.relative_to(ROOT / "docs").as_posix()
        for page in pages
    }


def led(markdown: str, page: str) -> str:
    """Point links to pages of the site where there is one, and write other links as plain paths."""
    here = posixpath.dirname((ROOT / "docs" / page).resolve().relative_to(ROOT).as_posix())

    def target(found: re.Match[str]) -> str:
        file, _, fragment = found[2].partition("#")
        path = posixpath.normpath(posixpath.join(here, file))
        if path not in page_paths() and not path.startswith("docs/"):
            return found[1] if path in found[1] else f"{found[1]} (`{path}`)"
        page_path = page_paths().get(path, path.removeprefix("docs/"))
        way = posixpath.relpath(page_path, posixpath.dirname(page) or ".")
        return f"[{found[1]}]({way}#{fragment})" if fragment else f"[{found[1]}]({way})"

    return LINK.sub(target, markdown)


def on_post_page(output: str, page: Any, **_: object) -> None:
    """Check a built page. Raises: ValueError if it loads a file from another server."""
    if (found := REMOTE_FILE.search(output)) is not None:
        raise ValueError(f"{page.file.src_uri} loads a file from another server: {found[0]}")


if __name__ == "__main__":
    sys.exit(main())
