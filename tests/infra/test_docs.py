"""Tests of the documentation: its code runs or parses, and its reference is complete."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor_pool import Default
from weir_cli.__main__ import COMMANDS, load
from weir_cli.configuration import DOCUMENT, PROPOSAL, Section, read_document

from api.core.errors import KINDS, reason_of
from api.core.health import SERVICES
from api.core.settings import Settings
from infra import reference
from metering.ledger.ledger import AccountKind, TransactionKind
from tests.service import wait_for

ROOT = reference.ROOT
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.is_relative_to(path.resolve().parent))
RECORDS = sorted((ROOT / "infra" / "adr").glob("0*.md"))
OUTSIDE = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("sdk/*/README.md")])
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
COLUMNS_MAX, CELL_MAX = 100, 90
SHELLS = ("sh", "bash", "console", "text")
STARTED_S = 240.0


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in one of these languages."""
    return [found[3] for found in BLOCK.finditer(page.read_text()) if found[2] in languages]


def each_block(*languages: str) -> list[Any]:
    """All of them, named by their page."""
    found = [(page, block) for page in (*PAGES, *OUTSIDE) for block in blocks(page, *languages)]
    return [pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}") for number, (page, block) in enumerate(found)]


# Reference


def test_every_marker_has_a_table_and_every_table_a_page() -> None:
    named = [name for page in PAGES for name in reference.MARKER.findall(page.read_text())]

    assert sorted(named) == sorted(reference.TABLES)


def test_the_reference_has_every_setting() -> None:
    page = reference.settings_page()
    named = re.findall(r"^### `(\w+)`$", page, re.M)
    sources = [path for top in ("api", "inference", "metering", "common", "sdk/python/src") for path in (ROOT / top).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"[\"'](WEIR_[A-Z_]*[A-Z])[\"']", path.read_text())}

    assert len(named) == len(set(named))
    assert {spec.metadata["variable"] for spec in fields(Settings)} | read == {name for name in named if name.startswith("WEIR_")}
    assert (
        "### `WEIR_PREPARATION_THREADS`\n\n**whole number**; default: `2`; allowed: a whole number from 1 to 64; read by: api\n"
        in page
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
        return {name}.union(*(members(f"{name} {each}", it) for each, it in getattr(command, "commands", {}).items()))

    assert named == set().union(*(members(name, load(name)) for name in COMMANDS if " " not in name))
    assert "- `--max-output-tokens`: " in page


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_the_reference_has_every_error_reason() -> None:
    named = set(re.findall(r"^### `(\w+)`$", reference.errors_page(), re.M))
    ours = [
        kind
        for kind in subclasses(Exception)
        if kind.__module__.startswith(("api.", "inference.", "metering.")) and "reason" in vars(kind)
    ]

    mapped = [kind for kinds in KINDS.values() for kind in kinds]
    assert {reason_of(kind.__new__(kind)) for kind in ours if issubclass(kind, tuple(mapped))} == named
    assert len(named) >= 50


def test_the_reference_has_every_ledger_account() -> None:
    named = re.findall(r"^\| `(\w+)` \| .+\. \|$", reference.ledger_page(), re.M)

    assert named == [*AccountKind, *TransactionKind]


def test_an_unknown_setting_would_be_missed() -> None:
    assert "WEIR_NO_SUCH_SETTING" not in reference.settings_page()


# Pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_has_short_lines_and_cells(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text()).splitlines()
    cells = [cell.strip() for line in prose if line.startswith("|") for cell in line.split("|")]

    assert [line for line in prose if len(line) > COLUMNS_MAX and not line.startswith("|")] == []
    assert [cell for cell in cells if len(cell) > CELL_MAX] == []


def test_generated_cells_are_short() -> None:
    tables = [table() for name, table in reference.TABLES.items() if name.startswith(("endings", "ledger"))]
    cells = [cell.strip() for line in "\n".join(tables).splitlines() if line.startswith("|") for cell in line.split("|")]

    assert max(map(len, cells)) <= CELL_MAX


def anchor(heading: str) -> str:
    """The anchor that a heading gets."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain.lower()).strip())


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE, *RECORDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for path, fragment in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        text = target.read_text() if fragment and target.suffix == ".md" and target.is_file() else ""
        markers = "".join(reference.TABLES[name]() for name in reference.MARKER.findall(text))
        headings = {anchor(heading) for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", text) + markers, re.M)}
        if not target.exists() or (text and fragment not in headings):
            broken.append(f"{path}#{fragment}")

    assert broken == []


PATH = re.compile(r"`((?:api|bench|common|demo|docs|inference|infra|metering|migrations|proto|sdk|tests)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


def test_every_decision_record_is_listed_with_status_and_date() -> None:
    index = (ROOT / "infra" / "adr" / "README.md").read_text()
    rows = re.findall(r"^\| \[\d{4}\]\(([\w-]+\.md)\) \| .{1,90} \| (?:accepted|superseded .+) \| \d{4}-\d\d-\d\d \|$", index, re.M)

    assert rows == [path.name for path in RECORDS]


# Code


def commands_of(block: str) -> Iterator[list[str]]:
    """Calls of `weir` in a block: their words after `weir`, as far as they are given."""
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
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    return " ".join(word for word in rest if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known)


@pytest.mark.parametrize("block", each_block("sh", "bash", "console", "text"))
def test_commands_and_their_options_exist(block: str) -> None:
    assert [found for words in commands_of(block) if (found := unknown(words))] == []


def test_a_command_that_does_not_exist_is_found() -> None:
    block = "WEIR_HOME=/x weir models --no-such\n$ weir quota sett a\nweir nothing"

    assert [unknown(words) for words in commands_of(block)] == ["--no-such", "quota sett", "nothing"]


@pytest.mark.parametrize("block", each_block("python"))
def test_python_compiles(block: str) -> None:
    ast.parse(block.replace("…", "..."))


@pytest.mark.parametrize("block", each_block("yaml"))
def test_yaml_loads(block: str) -> None:
    assert yaml.safe_load(block)


@pytest.mark.parametrize(("page", "section"), [("configuration", DOCUMENT), ("stripe", DOCUMENT), ("prices", PROPOSAL)])
def test_configuration_files_have_no_mistakes(page: str, section: Section) -> None:
    examples = blocks(DOCS / "how-to" / f"{page}.md", "yaml")

    assert [read_document(each, prune=False, section=section).mistakes for each in examples] == [[]]


@pytest.mark.parametrize("block", each_block("json"))
def test_json_loads(block: str) -> None:
    text = block.strip()

    assert json.loads(text if text.startswith("{") else f"{{{text}}}")


def shell_of(found: re.Match[str]) -> str:
    """Return a block as shell commands."""
    return f"{sys.executable} - <<'END'\n{found[3]}END\n" if found[2] == "python" else found[3]


def test_the_quickstart_and_calls_over_http_run(postgres_home: Path, tmp_path: Path) -> None:
    (program := tmp_path / "weir").write_text(f'#!/bin/sh\nexec {sys.executable} -m weir_cli "$@"\n')
    program.chmod(0o755)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    own = {
        "WEIR_HOME": str(postgres_home),
        "WEIR_LISTEN": "127.0.0.1:0",
        "WEIR_ENGINE_THREADS": "1",
        "NO_COLOR": "1",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    quickstart = BLOCK.finditer((DOCS / "quickstart.md").read_text())
    script = "".join(["set -e\n", *(shell_of(found) for found in quickstart if found[2] in ("sh", "python"))])
    for page in ("reference/openai.md", "how-to/console.md"):
        found = BLOCK.finditer((DOCS / page).read_text())
        calls = [shell_of(each) for each in found if each[2] == "python" or "curl " in each[3]]
        script += "".join(calls).replace("curl ", "curl --fail --silent --show-error ")

    with (postgres_home / "up.log").open("wb") as log:
        up = subprocess.Popen(["weir", "up"], env=outer | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_for(lambda: up.poll() is not None or (postgres_home / "connection.json").exists(), "weir up")
        served = json.loads((postgres_home / "serve.json").read_text())
        script = script.replace("http://127.0.0.1:9443/v1", served["openai_url"])
        script = script.replace("http://127.0.0.1:9443/console/", served["console_url"])
        script = script.replace('"2026-11"', f'"{datetime.now(UTC):%Y-%m}"')
        done = subprocess.run(
            ["bash", "-c", script], env=outer | own, cwd=tmp_path, capture_output=True, text=True, timeout=STARTED_S
        )
    finally:
        up.terminate()
        up.wait(STARTED_S)

    assert done.returncode == 0, done.stderr
    assert "acme" in done.stdout
    assert "✓ " in done.stdout
    assert "chat.completion" in done.stdout
