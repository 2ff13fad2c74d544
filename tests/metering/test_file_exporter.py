"""Usage file: each quantity once and on disk, despite crashes and rotation."""

from __future__ import annotations

import json
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from metering.core.models import TokenKind
from metering.export.exporting import FileExporter, Quantity, Stream, Verdict, line_of

STREAM = Stream(uuid.UUID(int=1), 1, TokenKind.INPUT)


def quantity(number: int) -> Quantity:
    """Return a quantity whose text is as long as that of every other one."""
    return Quantity(str(uuid.UUID(int=number)), STREAM, datetime(2026, 11, 1, tzinfo=UTC), 10, 1)


def identifiers(path: Path) -> list[int]:
    """Return the quantities of the file, in order."""
    return [uuid.UUID(json.loads(line)["identifier"]).int for line in path.read_text().splitlines()]


def inode_of(path: Path) -> int:
    """Return the inode of a file or directory."""
    return path.stat().st_ino


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the inodes that were synced to disk."""
    found: list[int] = []

    def fsync(descriptor: int) -> None:
        found.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


async def test_a_file_that_was_moved_and_grew_again_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    one, other = FileExporter(path), FileExporter(path)
    for number in (1, 9):
        await one.deliver(quantity(number))
    path.rename(tmp_path / "usage.1")

    await other.deliver(quantity(2))
    await other.deliver(quantity(3))
    answers = [await one.deliver(quantity(number)) for number in (2, 3, 4)]

    assert identifiers(path) == [2, 3, 4]
    assert {answer.verdict for answer in answers} == {Verdict.DELIVERED}


async def test_a_line_that_a_dead_worker_left_is_on_the_disk_before_it_counts(
    tmp_path: Path, synced: list[int]
) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(line_of(quantity(1)))

    answer = await FileExporter(path).deliver(quantity(1))

    assert answer.verdict is Verdict.DELIVERED
    assert {inode_of(path), inode_of(tmp_path)} <= set(synced)
    assert identifiers(path) == [1]


async def test_an_invalid_line_is_named_and_nothing_is_written_after_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(line_of(quantity(1)) + b"by hand\n")

    answer = await FileExporter(path).deliver(quantity(2))

    assert (answer.verdict, answer.certain) == (Verdict.LATER, True)
    assert "line 2" in answer.reason
    assert path.read_bytes().endswith(b"by hand\n")
