"""`weir fleet`: the document on stdout, changes as lines, errors with their lines, small edits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from weir.v1 import fleet_pb2 as pb

from tests.cli.conftest import Run, ScriptedWeir
from tests.cli.scripted_weir import NOON

DOCUMENT = """\
models:
  chat:
    versions:
      v1:
        engine: torch
        directory: /models/v1
      v2:
        engine: torch
        directory: /models/v2
        weight: 5
aliases:
  latest: chat
"""
VERSION = pb.FleetVersion(
    number=7,
    document=DOCUMENT,
    digest="ab" * 32,
    actor="wk_abc",
    reason="canary",
    create_time=NOON,
)
CHANGE = pb.FleetChange(path="models.chat.versions.v2.weight", before_json="5", after_json="20")
APPLIED = pb.ApplyFleetResponse(
    version=pb.FleetVersion(number=8, create_time=NOON), changes=[CHANGE]
)


@pytest.fixture(autouse=True)
def replies(server: ScriptedWeir) -> None:
    """Answer with version 7, and apply version 8."""
    processes = [
        pb.FleetProcess(process_name="node-3:4711", number=7),
        pb.FleetProcess(process_name="node-4:12", number=6, fault="no space"),
    ]
    server.accounts.replies["GetFleet"] = pb.GetFleetResponse(version=VERSION, processes=processes)
    server.accounts.replies["ApplyFleet"] = APPLIED


def test_the_document_can_be_redirected_to_a_file(weir: Run) -> None:
    shown = weir("fleet show")

    assert shown.stdout == DOCUMENT
    assert "version 7, 2026-11-20 12:00:00Z by wk_abc (canary)" in shown.stderr
    assert "served by 1 of 2 processes" in shown.stderr
    assert "node-4:12 serves version 6: no space" in shown.stderr


def test_a_file_is_sent_with_its_folder(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(DOCUMENT)

    compared = weir(f"fleet diff {tmp_path / 'fleet.yaml'} --exit-code")
    applied = weir(f"fleet apply {tmp_path / 'fleet.yaml'} --expect 7 --reason more")

    first, second = server.accounts.requests
    assert (first.document, first.base_directory, first.dry_run) == (DOCUMENT, str(tmp_path), True)
    assert (second.expected_number, second.reason, second.dry_run) == (7, "more", False)
    assert (compared.exit_code, applied.exit_code) == (3, 0)
    assert "~ models.chat.versions.v2.weight: 5 → 20" in applied.stdout
    assert "version 8" in applied.stderr


def test_without_a_file_the_server_uses_its_settings(weir: Run, server: ScriptedWeir) -> None:
    weir("fleet diff")

    [request] = server.accounts.requests
    assert (request.from_settings, request.document) == (True, "")


def test_each_error_names_file_and_line(weir: Run, server: ScriptedWeir, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("models: {}")
    wrong = [
        pb.FleetViolation(line=1, location="models", message="is empty: name a model"),
        pb.FleetViolation(message="/models/v3 is missing"),
    ]
    server.accounts.replies["ApplyFleet"] = pb.ApplyFleetResponse(violations=wrong)

    refused = weir(f"fleet apply {file}")

    assert refused.exit_code == 2
    assert f"{file}:1: models: is empty: name a model" in refused.stderr.replace("\n", "")
    assert "/models/v3 is missing" in refused.stderr
    assert "nothing was changed" in refused.stderr


def test_a_weight_or_alias_changes_only_the_version_that_was_read(
    weir: Run, server: ScriptedWeir
) -> None:
    assert weir("fleet weight chat@v2 20").exit_code == 0
    assert weir("fleet alias latest chat@v2").exit_code == 0
    assert weir("fleet alias latest --remove").exit_code == 0

    sent = [each for each in server.accounts.requests if isinstance(each, pb.ApplyFleetRequest)]
    weighed, moved, removed = [yaml.safe_load(each.document) for each in sent]
    assert [each.expected_number for each in sent] == [7, 7, 7]
    assert weighed["models"]["chat"]["versions"]["v2"]["weight"] == 20
    assert moved["aliases"] == {"latest": "chat@v2"}
    assert "aliases" not in removed
    assert sent[0].reason == "weight of chat@v2: 20"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("fleet weight chat@v9 20", "known are: chat@v1, chat@v2"),
        ("fleet weight code 20", "is not a version"),
        ("fleet alias other --remove", "known are: latest"),
        ("fleet alias other", "or --remove"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    weir: Run, server: ScriptedWeir, command: str, hint: str
) -> None:
    refused = weir(command)

    assert refused.exit_code == 2
    assert hint in refused.stderr.replace("\n", " ")
    assert not [each for each in server.accounts.requests if isinstance(each, pb.ApplyFleetRequest)]


def test_a_version_is_applied_again_as_a_new_one(weir: Run, server: ScriptedWeir) -> None:
    weir("fleet rollback 7")

    read, applied = server.accounts.requests
    assert (read.number, applied.document, applied.reason) == (7, DOCUMENT, "as version 7")


def test_the_history_is_a_table(weir: Run, server: ScriptedWeir) -> None:
    listed = pb.ListFleetVersionsResponse(versions=[VERSION])
    server.accounts.replies["ListFleetVersions"] = listed

    shown = weir("fleet history")

    assert "7 2026-11-20 12:00:00Z wk_abc canary" in " ".join(shown.stdout.split())
    assert json.loads(weir("fleet history --json").stdout)[0]["number"] == 7
