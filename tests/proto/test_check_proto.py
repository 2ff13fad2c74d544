"""Contract check: accepts the contract, and finds planted faults in a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infra.check_proto import BASELINE, complaints, workspace
from infra.generate_proto import PROTO_ROOT


@pytest.fixture
def contract(tmp_path: Path) -> Path:
    """Copy `proto/` for changes by a test."""
    copy = tmp_path / "proto"
    shutil.copytree(PROTO_ROOT, copy, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    return copy


def edit(contract: Path, old: str, new: str) -> None:
    types = contract / "weir" / "v1" / "types.proto"
    text = types.read_text()
    assert old in text, "the planted fault no longer applies: name another line of the contract"
    types.write_text(text.replace(old, new, 1))


def test_the_contract_is_well_formed_and_compatible_with_the_last_release() -> None:
    assert list(complaints(PROTO_ROOT, BASELINE)) == []


def test_a_field_without_a_comment_is_caught(contract: Path) -> None:
    edit(contract, "  // Tokens of the prompt, cached ones included.\n", "")

    [found] = complaints(contract, BASELINE)

    assert found.startswith("lint:")
    assert 'Field "input_token_count" should have a non-empty comment' in found


def test_a_removed_field_is_caught(contract: Path) -> None:
    edit(
        contract,
        "  // Tokens of the prompt, cached ones included.\n  int64 input_token_count = 1;\n",
        "",
    )

    [found] = complaints(contract, BASELINE)

    assert found.startswith("breaking change")
    assert 'Previously present field "1" with name "input_token_count"' in found


def test_a_line_out_of_format_is_caught(contract: Path) -> None:
    edit(contract, "  int64 input_token_count = 1;", "  int64  input_token_count=1;")

    [found] = complaints(contract, BASELINE)

    assert found.startswith("format")


def test_a_contract_that_does_not_compile_is_caught(contract: Path) -> None:
    edit(contract, "  int64 input_token_count = 1;", "  Unheard input_token_count = 1;")

    found = list(complaints(contract, BASELINE))

    assert found
    assert "Unheard" in found[0]


def test_a_new_field_is_breaking_only_once_released(contract: Path, tmp_path: Path) -> None:
    added = "message Usage {\n  // Added after the release.\n  int64 added_count = 99;\n"
    released = tmp_path / "released.binpb"
    edit(contract, "message Usage {\n", added)

    with workspace(contract) as after:
        assert after.breaking(BASELINE) == ""
        after.freeze(released)
    edit(contract, added, "message Usage {\n")

    with workspace(contract) as removed:
        assert 'field "99" with name "added_count"' in removed.breaking(released)
