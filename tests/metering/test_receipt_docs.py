"""Receipts in `docs/` agree with the product: vectors, bytes, and an independent verifier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.metering.receipt_vectors import DOCS, json_lines, keys_json, root_of_vectors, vectors


def verify(
    directory: Path, lines: list[str], *root: str, keys: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the stand-alone verifier."""
    (directory / "keys.json").write_text(keys or keys_json())
    (directory / "receipts.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        str(DOCS / "verify_receipts.py"),
        "keys.json",
        "receipts.jsonl",
        *root,
    ]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_the_examples_are_what_the_product_makes() -> None:
    """If this fails, receipts of customers can no longer be verified."""
    assert (DOCS / "receipts_example.jsonl").read_text() == json_lines()
    assert (DOCS / "receipts_example_keys.json").read_text() == keys_json()


def test_the_page_shows_the_first_vector_byte_for_byte() -> None:
    page = (DOCS / "reference" / "receipts.md").read_text()
    first = vectors()[0]

    shown = page.partition("encoding of the first")[2].partition("hash of the first")[0]
    assert bytes.fromhex(shown) == first.encoded
    without_breaks = "".join(page.split())
    assert first.batch is not None
    for value in (first.hash, first.batch.signature, root_of_vectors()):
        assert value.hex() in without_breaks


def test_the_verifier_of_the_docs_accepts_the_examples(tmp_path: Path) -> None:
    done = verify(tmp_path, json_lines().splitlines(), root_of_vectors().hex())

    assert (done.returncode, done.stdout) == (
        0,
        f"{len(vectors())} receipts, root {root_of_vectors().hex()}: 0 problems\n",
    ), done.stderr


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (
            {"cost_picos": 1},
            "receipt 2 of project 00000000-0000-0000-0000-000000000002 was altered",
        ),
        ({"model": "other"}, "was altered"),
        ({"signature": "00" * 64}, "is not signed by a known key"),
        ({"key_id": "0" * 16}, "is not signed by a known key"),
        ({"path": []}, "is not signed by a known key"),
        ({"previous_hash": "00" * 32}, "does not follow the receipt before it"),
        (None, "does not follow the receipt before it"),
    ],
)
def test_the_verifier_of_the_docs_sees_planted_faults(
    tmp_path: Path, fault: dict[str, object] | None, reported: str
) -> None:
    lines = json_lines().splitlines()
    if fault is None:
        del lines[1]
    else:
        lines[1] = json.dumps(json.loads(lines[1]) | fault)

    done = verify(tmp_path, lines, root_of_vectors().hex())

    assert done.returncode == 1
    assert reported in done.stdout


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"end_user": "user-4712"}, "receipt 9 of project 00000000-0000-0000-0000-000000000002 is"),
        ({"end_user_salt": "00" * 32}, "is not for end_user 'user-4711'"),
        ({"labels": {"team": "search"}}, "does not have labels {'team': 'search'}"),
        ({"labels_salt": ""}, "does not have labels"),
        ({"labels_hash": "00" * 32}, "was altered"),
        ({"version": 5}, "version 5 is newer than this program: update it"),
    ],
)
def test_the_verifier_of_the_docs_sees_altered_names(
    tmp_path: Path, change: dict[str, object], reported: str
) -> None:
    lines = json_lines().splitlines()
    lines[8] = json.dumps(json.loads(lines[8]) | change)

    done = verify(tmp_path, lines, root_of_vectors().hex())

    assert done.returncode == 1
    assert reported in done.stdout + done.stderr


def test_the_verifier_of_the_docs_misses_no_receipt_at_the_ends(tmp_path: Path) -> None:
    done = verify(tmp_path, json_lines().splitlines()[:-2], root_of_vectors().hex())

    assert done.returncode == 1
    assert "the root is" in done.stdout
