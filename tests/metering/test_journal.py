"""Journal of usage: its process, its disk or its reader may fail at any point."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import shutil
import signal
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from metering.core.errors import JournalUnavailable
from metering.holds import journal as journal_module
from metering.holds.journal import (
    FORMAT,
    FORMATS,
    Delivered,
    UsageJournal,
    abandoned_journals,
    check_locks,
    decode,
    encode,
)

ERRORS = [
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOLCK,
]
HOLDS = [uuid.UUID(int=number + 1) for number in range(8)]
COUNT = st.integers(0, 2**32 - 1)
ENTRY = st.builds(Delivered, st.uuids(), COUNT, COUNT, COUNT, COUNT, COUNT)


def entry(hold: int, delivered: int) -> Delivered:
    return Delivered(HOLDS[hold], 10, 2, delivered, delivered)


def segments(directory: Path) -> list[Path]:
    """Return the files of totals in a directory."""
    return list(directory.glob(f"*{FORMAT.suffix}"))


def recoverable(directory: Path) -> dict[uuid.UUID, int]:
    """Return the highest total of each hold, which a recovery of the directory would settle."""
    found: dict[uuid.UUID, int] = {}
    for journal in abandoned_journals(directory):
        for one in journal.delivered():
            found[one.hold_id] = max(found.get(one.hold_id, 0), one.delivered_token_count)
    return found


@given(st.lists(ENTRY, max_size=5))
def test_records_come_back_as_they_were_written(entries: list[Delivered]) -> None:
    assert list(decode(b"".join(map(encode, entries)))) == entries


@given(st.lists(ENTRY, min_size=1, max_size=4), st.data())
def test_a_tail_torn_at_any_byte_costs_the_torn_record_alone(
    entries: list[Delivered], data: st.DataObject
) -> None:
    whole = b"".join(map(encode, entries))
    length = data.draw(st.integers(0, len(whole)))

    assert list(decode(whole[:length])) == entries[: length // FORMAT.record_size]


@given(st.lists(ENTRY, min_size=1, max_size=4), st.data())
def test_any_flipped_bit_ends_the_reading(entries: list[Delivered], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(encode, entries)))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8

    assert list(decode(bytes(whole))) == entries[: bit // 8 // FORMAT.record_size]


def test_a_journal_of_release_0_1_0_is_recovered_without_reasoning(tmp_path: Path) -> None:
    """Its server may have died just before the upgrade. An older server ignores newer files."""
    process_id = uuid.uuid4()
    body = FORMATS[".journal"].counts.pack(HOLDS[0].bytes, 10, 2, 8, 7)
    record = body + zlib.crc32(body).to_bytes(4, "little")
    tmp_path.joinpath(f"{process_id}.1.journal").write_bytes(record + record[:9])
    tmp_path.joinpath(f"{process_id}.taken").write_bytes(
        FORMATS[".journal"].mark.pack(HOLDS[0].bytes, 6)
    )

    [abandoned] = abandoned_journals(tmp_path)

    assert abandoned.delivered() == [Delivered(HOLDS[0], 10, 2, 8, 7)]
    assert abandoned.taken() == {HOLDS[0]: (6, 0)}
    abandoned.remove()
    assert not list(tmp_path.iterdir())


def test_the_last_total_of_a_hold_counts_and_rotation_forgets_ends(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4(), rotate_bytes=FORMAT.record_size * 5)
    journal.record([entry(0, 1), entry(1, 1)])
    journal.record([entry(0, 2)])
    journal.forget(HOLDS[1])
    journal.record([entry(2, 7), entry(0, 3)])
    journal.record([entry(2, 8)])

    journal.close()

    assert [path.name for path in segments(tmp_path)] == [f"{journal.process_id}.2{FORMAT.suffix}"]
    assert recoverable(tmp_path) == {HOLDS[0]: 3, HOLDS[2]: 8}


def test_a_journal_in_which_everything_is_settled_goes_with_its_process(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    journal.forget(HOLDS[0])

    journal.close()
    journal.close()

    assert not list(tmp_path.iterdir())


def test_the_journal_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])

    assert not list(abandoned_journals(tmp_path))

    journal.close()
    assert recoverable(tmp_path) == {HOLDS[0]: 1}


def test_one_recovery_at_a_time_reads_a_journal(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    journal.close()

    for mine in abandoned_journals(tmp_path):
        assert not list(abandoned_journals(tmp_path))
        mine.remove()

    assert not list(abandoned_journals(tmp_path))


def test_a_journal_removed_while_it_was_waited_for_is_not_recovered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    journal.close()
    [path] = segments(tmp_path)
    real_flock = fcntl.flock

    def another_is_faster(fd: int, operation: int) -> None:
        path.unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", another_is_faster)

    assert not list(abandoned_journals(tmp_path))


def test_a_directory_in_which_locks_have_no_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a recovery would settle requests of a live process that still delivers."""
    check_locks(tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)

    with pytest.raises(
        OSError, match="granted at once: set WEIR_HOME to a directory on a local file system"
    ):
        check_locks(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_refused_journal_is_kept_and_not_recovered_again(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    journal.close()
    for abandoned in abandoned_journals(tmp_path):
        abandoned.set_aside()

    assert not list(abandoned_journals(tmp_path))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".refused", FORMAT.marks_suffix]


@contextmanager
def disk_with(size_bytes: int) -> Iterator[None]:
    """Limit the size of files: longer writes are cut there, later ones refused.

    The limit also holds for the file that the output of the test is captured in.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        with capture_logs():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("room_bytes", range(FORMAT.record_size, 2 * FORMAT.record_size + 1, 5))
def test_a_full_disk_raises_and_later_records_are_read(tmp_path: Path, room_bytes: int) -> None:
    """Half a record in the middle would end every later recovery there."""
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    with disk_with(room_bytes), pytest.raises(JournalUnavailable):
        journal.record([entry(0, 2), entry(1, 5)])
    assert "large" in journal.fault

    journal.record([entry(2, 9)])
    journal.close()

    assert recoverable(tmp_path) == {HOLDS[0]: 1, HOLDS[2]: 9}


def test_a_failed_rotation_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4(), rotate_bytes=FORMAT.record_size * 2)
    real_open, attempts = os.open, 0

    def refusing(*arguments: object, **named: object) -> int:
        nonlocal attempts
        attempts += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", refusing)
    for delivered in range(1, 8):
        journal.record([entry(0, delivered)])
    monkeypatch.setattr(os, "open", real_open)
    assert attempts == 3
    for delivered in range(8, 10):
        journal.record([entry(0, delivered)])
    assert [path.stat().st_size for path in segments(tmp_path)] == [FORMAT.record_size * 2]
    journal.close()

    assert recoverable(tmp_path) == {HOLDS[0]: 9}


class FaultyDisk:
    """`os`, `mmap` and `fcntl` of the journal, of which one call fails with one error."""

    def __init__(self, operation: str, number: int) -> None:
        self._operation, self._error = operation, OSError(number, os.strerror(number))

    def __getattr__(self, name: str) -> Any:
        if name != self._operation:
            return next(getattr(real, name) for real in (os, mmap, fcntl) if hasattr(real, name))

        def fail(*arguments: object, **named: object) -> None:
            raise self._error

        return fail

    def breaks(self, patch: pytest.MonkeyPatch) -> None:
        """Put the journal on this disk."""
        for name in ("os", "mmap", "fcntl"):
            patch.setattr(journal_module, name, self)
        if self._operation == "rename":
            patch.setattr(Path, "rename", self.rename)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["write", "open", "posix_fallocate", "mmap"])
def test_a_record_or_a_mark_that_the_disk_refuses_stops_admissions_until_the_disk_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    """The file of marks grows with the third request."""
    monkeypatch.setattr(journal_module, "MARKS_AT_FIRST", 2)
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1), entry(1, 1)])
    with monkeypatch.context() as broken, capture_logs():
        FaultyDisk(operation, number).breaks(broken)
        for _ in range(2):
            with pytest.raises(JournalUnavailable):
                journal.record([entry(0, 2), entry(2, 5)])
            with pytest.raises(JournalUnavailable):
                journal.check()
            assert not journal.can_write(), "readiness stays off"

    with capture_logs():
        assert journal.can_write()
    journal.check()
    journal.record([entry(2, 6)])
    journal.took(HOLDS[2], 6, 4)
    journal.close()

    assert recoverable(tmp_path) == {HOLDS[0]: 1, HOLDS[1]: 1, HOLDS[2]: 6}
    [abandoned] = abandoned_journals(tmp_path)
    assert abandoned.taken()[HOLDS[2]] == (6, 4)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["write", "open", "flock", "rename", "ftruncate"])
def test_a_journal_comes_back_only_when_every_operation_of_a_new_segment_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    with capture_logs():
        with disk_with(FORMAT.record_size + 7), pytest.raises(JournalUnavailable):
            journal.record([entry(0, 2)])
        with monkeypatch.context() as broken:
            FaultyDisk(operation, number).breaks(broken)
            for _ in range(3):
                assert not journal.can_write()
        assert journal.can_write()
    journal.record([entry(1, 9)])
    journal.close()

    assert recoverable(tmp_path) == {HOLDS[0]: 1, HOLDS[1]: 9}
    assert len(segments(tmp_path)) == 1, "attempts leave no segments"


def test_a_disk_that_does_not_even_cut_a_file_short_hides_nothing_once_it_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])

    def refusing(fd: int, size_bytes: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "ftruncate", refusing)
        with disk_with(FORMAT.record_size + 7), pytest.raises(JournalUnavailable):
            journal.record([entry(0, 2)])
        with pytest.raises(JournalUnavailable):
            journal.record([entry(1, 5)])
        assert "Input/output error" in journal.fault
    journal.record([entry(2, 9)])
    journal.close()

    assert recoverable(tmp_path) == {HOLDS[0]: 1, HOLDS[2]: 9}


def test_a_file_that_cannot_be_removed_neither_marks_its_owner_dead_nor_holds_old_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recovery would void unrecorded requests and settle the others at an old count."""

    def refusing(path: Path, missing_ok: bool = False) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refusing)
    journal = UsageJournal(tmp_path, uuid.uuid4(), rotate_bytes=FORMAT.record_size * 2)
    for delivered in range(1, 26):
        journal.record([entry(delivered % 2, delivered)])
    while_it_runs = list(abandoned_journals(tmp_path))
    journal.close()

    reported = [
        {one.hold_id: one.delivered_token_count for one in each.delivered()}
        for each in abandoned_journals(tmp_path)
    ]

    assert while_it_runs == []
    assert len(reported) > 9
    assert {tuple(sorted(each.items())) for each in reported} == {((HOLDS[0], 24), (HOLDS[1], 25))}


def test_files_of_an_unfinished_rotation_are_removed_with_the_journal(tmp_path: Path) -> None:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    journal.record([entry(0, 1)])
    (tmp_path / f"{journal.process_id}.2.new").write_bytes(b"half")
    journal.close()
    for abandoned in abandoned_journals(tmp_path):
        abandoned.remove()

    assert not list(tmp_path.iterdir())


class CopyingOs:
    """`os` that copies the directory before each call that changes files."""

    def __init__(self, directory: Path, snapshots: list[Path]) -> None:
        self._directory = directory
        self._snapshots = snapshots

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        return self.noting(real) if name in ("open", "write", "close", "ftruncate") else real

    def noting(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            self.copy()
            return real(*arguments, **named)

        return call

    def copy(self) -> None:
        copied = self._directory.with_name(f"snapshot-{len(self._snapshots)}")
        shutil.copytree(self._directory, copied)
        self._snapshots.append(copied)


def test_a_kill_before_any_system_call_of_a_rotation_loses_no_token_that_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each point some file has all earlier totals, and none has later ones."""
    directory = tmp_path / "journal"
    journal = UsageJournal(directory, uuid.uuid4(), rotate_bytes=FORMAT.record_size * 4)
    snapshots: list[Path] = []
    copying = CopyingOs(directory, snapshots)
    monkeypatch.setattr(journal_module, "os", copying)
    real_rename, real_unlink = Path.rename, Path.unlink

    def rename(path: Path, target: Path) -> Path:
        copying.copy()
        return real_rename(path, target)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        copying.copy()
        real_unlink(path, missing_ok)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(Path, "unlink", unlink)
    sent: dict[uuid.UUID, int] = {}
    forgotten: set[uuid.UUID] = set()
    for step in range(1, 24):
        hold = step % 3 if step < 12 else 3 + step % 3
        if step == 12:
            for settled in (0, 1, 2):
                journal.forget(HOLDS[settled])
                forgotten.add(HOLDS[settled])
        first = len(snapshots)
        journal.record([entry(hold, step)])
        copying.copy()

        for snapshot in snapshots[first:]:
            found = recoverable(snapshot)
            for hold_id, total in sent.items():
                if hold_id not in forgotten:
                    assert found[hold_id] in (total, step)
            assert all(total <= step for total in found.values())
        assert recoverable(snapshots[-1])[HOLDS[hold]] == step, "what may be sent stands there"
        sent[HOLDS[hold]] = step

    assert len(snapshots) > 23 + 5 * 4
    journal.close()


@pytest.mark.faults
def test_a_process_killed_in_mid_rotation_loses_no_reported_tokens(tmp_path: Path) -> None:
    """The child reports each total over a pipe after recording it."""
    reader, writer = os.pipe()
    directory = tmp_path / "journal"
    child = os.fork()
    if child == 0:  # pragma: no cover
        journal = UsageJournal(directory, uuid.uuid4(), rotate_bytes=FORMAT.record_size * 7)
        for step in range(1, 10**9):
            journal.record([entry(step % 3, step)])
            os.write(writer, step.to_bytes(4))
    os.close(writer)
    reported = b""
    while len(reported) < 4 * 2_000:
        reported += os.read(reader, 4096)
    assert not list(abandoned_journals(directory)), "its owner lives"

    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while rest := os.read(reader, 65536):
        reported += rest
    os.close(reader)

    last = int.from_bytes(reported[len(reported) // 4 * 4 - 4 : len(reported) // 4 * 4])
    found = recoverable(directory)
    for step in range(last - 2, last + 1):
        assert found[HOLDS[step % 3]] in (step, step + 3)
