"""Tests of the documentation: its code parses, its commands exist, its reference is complete."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor_pool import Default
from google.rpc import code_pb2, error_details_pb2, status_pb2
from weir_cli.__main__ import COMMANDS, load
from weir_cli.document import DOCUMENT, PROPOSAL, read_document
from weir_cli.document_fields import Section

from api.cli.guard import ROLE
from api.cli.stack import STACK_HOME, STACK_PART
from api.core.endpoint import HELD
from api.core.health import SERVICES
from api.core.settings import Settings
from api.core.statuses import KINDS, reason_of
from api.openai.error_responses import FAULT_REASONS, error_response
from common.settings import settings_of
from inference.launchers.launcher import VARIABLES
from inference.workers.protocol import FAMILY
from infra import reference
from metering.export.export_settings import (
    Collection,
    Destination,
    Finalizing,
    export_settings,
    stripe_settings,
    webhook_settings,
)
from metering.ledger.ledger import AccountKind, TransactionKind

ROOT = reference.ROOT
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.is_relative_to(path.resolve().parent))
RECORDS = sorted((ROOT / "infra" / "adr").glob("0*.md"))
OUTSIDE = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("sdk/*/README.md")])
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
COLUMNS_MAX, CELL_MAX = 100, 90

PATH = re.compile(
    r"`((?:api|bench|common|demo|docs|inference|infra|metering|migrations|proto|sdk|tests)/[\w./-]*)`"
)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in one of these languages."""
    return [found[3] for found in BLOCK.finditer(page.read_text()) if found[2] in languages]


def each_block(*languages: str) -> list[Any]:
    """Return every block as a parameter, named after its page."""
    found = [(page, block) for page in (*PAGES, *OUTSIDE) for block in blocks(page, *languages)]
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for number, (page, block) in enumerate(found)
    ]


# Reference


def test_every_marker_has_a_table_and_every_table_a_page() -> None:
    named = [name for page in PAGES for name in reference.MARKER.findall(page.read_text())]

    assert sorted(named) == sorted(reference.TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_generated_parts_of_a_page_equal_the_source(page: Path) -> None:
    assert reference.updated(page.read_text()) == page.read_text(), "run: make reference"


def test_an_outdated_table_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    page = tmp_path / "docs" / "ledger.md"
    page.parent.mkdir()
    marker = "<!-- reference: endings-phases -->"
    page.write_text(f"# Page\n\n{marker}\n\nLast.\n")
    assert reference.main(["--check"]) == 1  # not yet written

    assert reference.main(["--write"]) == reference.main(["--check"]) == 0
    written = page.read_text()
    page.write_text(written.replace("| phase |", "| stage |"))
    capsys.readouterr()
    assert reference.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("docs/ledger.md differs")

    assert reference.main(["--write"]) == 0
    assert page.read_text() == written
    assert written.startswith(f"# Page\n\n{marker}\n\n| phase | meaning |\n")
    assert written.endswith(f"\n\n{reference.END}\n\nLast.\n")


def test_a_generated_paragraph_is_wrapped_and_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"- `a` (int): {'word ' * 15}at most 1000. Or - less.\n"
    monkeypatch.setattr(reference, "TABLES", {"a": lambda: text})

    wrapped = reference.generated("a")

    assert " ".join(wrapped.split()) == text.strip()
    assert [line[:7] for line in wrapped.splitlines()] == ["- `a` (", "  most "]


def test_the_reference_has_every_setting() -> None:
    page = reference.settings_page()
    named = re.findall(r"^### `(\w+)`$", page, re.M)
    sources = [
        path
        for top in ("api", "chaos", "inference", "metering", "common", "sdk/python/src")
        for path in (ROOT / top).rglob("*.py")
    ]
    read = {
        name
        for path in sources
        for name in re.findall(r"[\"'](WEIR_[A-Z_]*[A-Z])[\"']", path.read_text())
    }

    assert len(named) == len(set(named))
    # Not for operators: they mark the processes of a worker and of `weir up`, or tell scripts.
    read -= {FAMILY, HELD, ROLE, STACK_HOME, STACK_PART, *VARIABLES}
    assert {spec.metadata["variable"] for _, spec in settings_of(Settings)} | read == {
        name for name in named if name.startswith("WEIR_")
    }
    assert (
        "### `WEIR_PREPARATION_THREADS`\n\n**whole number**; default: `2`; allowed: a whole number"
        " from 1 to 64; read by: api\n" in page
    )


def test_the_reference_has_every_call() -> None:
    page = reference.grpc_page()
    services = [Default().FindServiceByName(name) for name in SERVICES if name.startswith("weir.")]

    calls = [method.name for service in services for method in service.methods]
    assert [call for call in calls if not re.search(rf"^### {call}\n\n.+\n\n\S", page, re.M)] == []
    assert len(calls) >= 60


def test_the_reference_has_every_command() -> None:
    page = reference.cli_page()
    named = set(re.findall(r"^##+ weir (.+)$", page, re.M))

    def members(name: str, command: Any) -> set[str]:
        return {name}.union(
            *(
                members(f"{name} {each}", it)
                for each, it in getattr(command, "commands", {}).items()
            )
        )

    assert named == set().union(
        *(members(name, load(name)) for name in COMMANDS if " " not in name)
    )
    assert "- `--max-output-tokens`: " in page


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_the_reference_has_every_error_reason() -> None:
    named = set(re.findall(r"^\| \[`(\w+)`\]", reference.errors_page(), re.M))
    ours = [
        kind
        for kind in subclasses(Exception)
        if kind.__module__.startswith(("api.", "inference.", "metering."))
        and "reason" in vars(kind)
    ]

    mapped = [kind for kinds in KINDS.values() for kind in kinds]
    assert {reason_of(kind.__new__(kind)) for kind in ours if issubclass(kind, tuple(mapped))} | {
        *FAULT_REASONS.values()
    } == named
    assert len(named) >= 50


def test_every_error_reason_has_its_page() -> None:
    """Each page has hand-written meaning, causes and remedies, and the generated facts."""
    folder = ROOT / "docs/reference/errors"
    reasons = {reason_of(kind.__new__(kind)) for kinds in KINDS.values() for kind in kinds}

    reasons |= {*FAULT_REASONS.values()}

    assert {page.stem for page in folder.glob("*.md")} == reasons
    for reason in reasons:
        text = (folder / f"{reason}.md").read_text()
        parts = re.split(
            r"^## (.+)$", re.sub(r"<!-- reference(?s:.)*?of reference -->", "", text), flags=re.M
        )
        assert parts[1::2] == ["Cause", "What to do", "Example"], reason
        assert all(len(part.split()) >= 5 for part in (parts[0], parts[2], parts[4])), reason
        assert text.startswith(f"# `{reason}`\n")
        assert text.count("<!-- reference: ") == 2
        assert f"<!-- reference: error-{reason} -->" in text
        assert f"<!-- reference: example-{reason} -->" in text


def test_an_error_page_has_the_statuses_of_its_reason() -> None:
    for code, kinds in KINDS.items():
        for reason in {reason_of(kind.__new__(kind)) for kind in kinds}:
            status = status_pb2.Status(code=code)
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason))
            statuses = f"| `{code_pb2.Code.Name(code)}` | {error_response(status).http_status} |"
            assert statuses in reference.error_facts(reason)
    assert "`FAILED_PRECONDITION` | 429 |" in reference.error_facts("INSUFFICIENT_CREDIT")


def test_the_reference_has_every_ledger_account() -> None:
    named = re.findall(r"^\| `(\w+)` \| .+\. \|$", reference.ledger_page(), re.M)

    assert named == [*AccountKind, *TransactionKind]


def test_an_unknown_setting_would_be_missed() -> None:
    assert "WEIR_NO_SUCH_SETTING" not in reference.settings_page()


def test_settings_beyond_the_api_process_are_read_where_the_reference_says() -> None:
    folders = {
        "api": "api",
        "worker": "metering",
        "stripe webhooks": "metering",
        "migrate": "metering",
        "engine worker": "inference",
        "client": "sdk/python/src",
    }
    source = {
        process: "".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
        for process, folder in folders.items()
    }

    assert [
        each.variable
        for each in reference.other_settings()
        if f'"{each.variable}"' not in source[each.processes]
    ] == []


def test_choices_and_defaults_of_the_export_are_those_of_the_source() -> None:
    settings = {each.variable: each for each in reference.other_settings()}
    choices = {
        "WEIR_EXPORT": Destination,
        "WEIR_STRIPE_COLLECTION": Collection,
        "WEIR_STRIPE_FINALIZE": Finalizing,
    }
    stripe = stripe_settings({"STRIPE_API_KEY": "sk_test_0"})
    webhooks = webhook_settings({"WEIR_STRIPE_WEBHOOK_SECRET": "whsec_0"})
    assert webhooks is not None

    assert {name: set(re.findall(r"`(\w+)`", settings[name].range)) for name in choices} == {
        name: set(choice) for name, choice in choices.items()
    }
    defaults = {
        "WEIR_EXPORT": export_settings({}).destination,
        "WEIR_STRIPE_NAMESPACE": stripe.namespace,
        "WEIR_STRIPE_COLLECTION": stripe.collection,
        "WEIR_STRIPE_API_BASE": stripe.api_base,
        "WEIR_STRIPE_FINALIZE": stripe.finalizing,
        "WEIR_STRIPE_WEBHOOK_LISTEN": f"{webhooks.listen_host}:{webhooks.listen_port}",
    }
    assert {name: settings[name].default for name in defaults} == defaults


def test_the_glossary_names_what_the_source_defines() -> None:
    page = (DOCS / "glossary.md").read_text()
    named = re.findall(r"\| `(\w+)` \|$", page, re.M)
    source = "".join(
        path.read_text()
        for top in ("api", "chaos", "common", "inference", "metering")
        for path in (ROOT / top).rglob("*.py")
    )
    rows = re.findall(r"^\| ([^|]+) \|", page, re.M)[1:]

    assert [
        name
        for name in named
        if not re.search(rf"^(class )?{name}\b", source, re.M)
        and not (name.islower() and re.search(rf"^\s*(def )?(self\.)?{name}\b", source, re.M))
    ] == []
    assert len(named) >= 30
    assert rows == sorted(rows, key=str.lower)


# Pages


def test_the_navigation_has_six_parts() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    assert [next(iter(part)) for part in site["nav"]] == [
        "Quickstart",
        "Concepts",
        "How-to",
        "Cookbook",
        "Reference",
        "Internals",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_has_short_lines_and_cells(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text()).splitlines()
    cells = [cell.strip() for line in prose if line.startswith("|") for cell in line.split("|")]

    # A line without blanks, such as the name of a test, cannot be broken.
    long = [line for line in prose if len(line) > COLUMNS_MAX and " " in line.strip(" -")]
    assert [line for line in long if not line.startswith("|")] == []
    assert [cell for cell in cells if len(cell) > CELL_MAX] == []


def anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())


@pytest.mark.parametrize(
    "page", [*PAGES, *OUTSIDE, *RECORDS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for path, fragment in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        text = (
            target.read_text() if fragment and target.suffix == ".md" and target.is_file() else ""
        )
        headings = {
            anchor(heading) for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.M)
        }
        if not target.exists() or (text and fragment not in headings):
            broken.append(f"{path}#{fragment}")

    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


def test_every_decision_record_is_listed_with_status_and_date() -> None:
    index = (ROOT / "infra" / "adr" / "README.md").read_text()
    rows = re.findall(
        r"^\| \[\d{4}\]\(([\w-]+\.md)\) \| .{1,90} \| (?:accepted|superseded .+) \|"
        r" \d{4}-\d\d-\d\d \|$",
        index,
        re.M,
    )

    assert rows == [path.name for path in RECORDS]


# Code


def commands_of(block: str) -> Iterator[list[str]]:
    """Yield the calls of `weir` in a block: the words after `weir`."""
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\([^)]*\)", "1", re.sub(r"^\$ ", "", line.strip()))
        for call in re.findall(r"(?:^|[|;&(`]\s*|[A-Z_]+=\S+\s+|/)weir ([^|;&)`]*)", line):
            words = (
                shlex.split(call, comments=True, posix=True)
                if call.count('"') % 2 == 0 and call.count("'") % 2 == 0
                else call.split()
            )
            yield words


def unknown(words: list[str]) -> str:
    """Return the unknown words of a command line; empty if all of them exist."""
    values = {"--ca", "--client-certificate", "--client-key"}
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in values else words[1:]
    if not words or not re.fullmatch(r"[a-z-]+", words[0]):
        return ""
    if words[0] not in COMMANDS:
        return words[0]
    command, rest = load(words[0]), words[1:]
    while (members := getattr(command, "commands", {})) and rest and not rest[0].startswith("-"):
        if rest[0] not in members:
            return f"{command.name} {rest[0]}"
        command, rest = members[rest[0]], rest[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {
        "--help",
        "-h",
    }
    return " ".join(
        word for word in rest if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known
    )


@pytest.mark.parametrize("block", each_block("sh", "bash", "console", "text"))
def test_commands_and_their_options_exist(block: str) -> None:
    assert [found for words in commands_of(block) if (found := unknown(words))] == []


def test_a_command_that_does_not_exist_is_found() -> None:
    block = "WEIR_HOME=/x weir models --no-such\n$ weir quota sett a\nweir nothing"

    assert [unknown(words) for words in commands_of(block)] == [
        "--no-such",
        "quota sett",
        "nothing",
    ]


@pytest.mark.parametrize("block", each_block("python"))
def test_python_compiles(block: str) -> None:
    ast.parse(block.replace("…", "..."))


@pytest.mark.parametrize("block", each_block("yaml"))
def test_yaml_loads(block: str) -> None:
    assert yaml.safe_load(block)


@pytest.mark.parametrize(
    ("page", "section"), [("configuration", DOCUMENT), ("stripe", DOCUMENT), ("prices", PROPOSAL)]
)
def test_configuration_files_have_no_mistakes(page: str, section: Section) -> None:
    examples = blocks(DOCS / "how-to" / f"{page}.md", "yaml")

    assert examples
    for each in examples:
        assert read_document(each, prune=False, section=section).errors == []


@pytest.mark.parametrize("block", each_block("toml"))
def test_toml_loads(block: str) -> None:
    assert tomllib.loads(block)


@pytest.mark.parametrize("block", each_block("json"))
def test_json_loads(block: str) -> None:
    text = block.strip()

    assert json.loads(text if text.startswith("{") else f"{{{text}}}")
