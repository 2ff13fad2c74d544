"""Files of packed weights: written by the first worker that packs them, and mapped by all, so they
are in memory once.

The file name hashes its sources: the checkpoint's files (size, times and inode of each), the type,
and the library and its level, which define the layout. A change gives a new name, and writing the
new file removes the old one, so files are never stale. Files are renamed when complete, so they are
never truncated.

    magic, bytes of the header (8, little-endian), header (JSON: [layer, kind, offset, bytes] of
    each part), parts on whole pages
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"weirpack"
_SUFFIX = ".packed"
_UNFINISHED = "unfinished-"
_STALE_S = 3600.0  # far longer than writing takes


@dataclass(frozen=True, slots=True)
class PackedTarget:
    """Directory shared by a machine's workers. `bytes_max` limits files that no process maps."""

    directory: str
    bytes_max: int


_log = logging.getLogger("weir.inference.native")


@dataclass(frozen=True, slots=True)
class Part:
    """Address and size in bytes of a decoder's buffer, with its layer and kind."""

    layer: int
    kind: int
    address: int
    byte_count: int


def packed_path(directory: Path, checkpoint: Path, dtype: str, layout: str) -> Path:
    """Build the path from the checkpoint's current files. Raises OSError if they cannot be read."""
    source = _digest(str(checkpoint.resolve()), dtype)
    files = sorted(
        path for path in checkpoint.iterdir() if path.suffix in (".safetensors", ".json")
    )
    made_of = [layout]
    for path in files:
        status = path.stat()
        made_of.append(
            f"{path.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            f" {status.st_ino}"
        )
    return directory / f"{source}-{_digest(*made_of)}{_SUFFIX}"


def write_packed(path: Path, parts: Iterable[Part]) -> None:
    """Write the file, and remove other versions of the checkpoint. Raises OSError."""
    parts = list(parts)
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.byte_count // mmap.PAGESIZE) * mmap.PAGESIZE
    header = json.dumps(
        [
            [part.layer, part.kind, at, part.byte_count]
            for part, at in zip(parts, offsets, strict=True)
        ]
    ).encode()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in path.parent.glob(f"{_UNFINISHED}*"):
        # from processes killed while writing, or still writing
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as own:
        made = Path(own) / path.name
        with made.open("wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            begin = _begin_of_parts(len(header))
            for part, offset in zip(parts, offsets, strict=True):
                file.seek(begin + offset)
                file.write(
                    memoryview((ctypes.c_char * part.byte_count).from_address(part.address)).cast(
                        "B"
                    )
                )
            file.truncate(begin + end)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    for other in path.parent.glob(f"{path.name.split('-')[0]}-*{_SUFFIX}"):
        if other != path:
            other.unlink(missing_ok=True)


class PackedFile:
    """Read-only mapped file, whose pages all processes share. It must outlive its parts."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its pages. Raises OSError if missing, ValueError if invalid."""
        with path.open("rb") as file:
            # The mapping holds the lock, which tells `trim_packed` that the file is in use.
            with contextlib.suppress(OSError):  # without file locks nothing is removed
                fcntl.flock(file, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):
                os.utime(path)  # marks the file as recently used
            # otherwise the first tokens would wait for every page
            populate = getattr(mmap, "MAP_POPULATE", 0)
            self._mapping = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ
            )
        if self._mapping[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path} holds no packed weights")
        start = len(_MAGIC) + 8
        length = int.from_bytes(self._mapping[len(_MAGIC) : start], "little")
        self._table = [
            tuple(map(int, row)) for row in json.loads(self._mapping[start : start + length])
        ]
        self._begin = _begin_of_parts(length)
        if any(
            self._begin + offset + count > len(self._mapping) for _, _, offset, count in self._table
        ):
            raise ValueError(f"{path} is truncated")

    def parts(self) -> Iterator[Part]:
        """Yield all parts with their addresses."""
        address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data
        for layer, kind, offset, count in self._table:
            yield Part(layer, kind, address + self._begin + offset, count)


def open_packed(path: Path) -> PackedFile | None:
    try:
        return PackedFile(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("packed weights are not used: %s", error)
        return None


def trim_packed(directory: Path, bytes_max: int) -> None:
    """Remove unmapped files, least recently used first, until the total size is at most
    `bytes_max`.

    Ignores files that cannot be removed.
    """
    found = []
    for path in directory.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime_ns, path, status.st_size))
    total = sum(size for _, _, size in found)
    for _, path, size in sorted(found):
        if total <= bytes_max:
            return
        if _removed_unmapped(path):
            _log.info(
                "removed the least recently used packed weights, %s: %d bytes exceed the limit",
                path,
                total,
            )
            total -= size


def _removed_unmapped(path: Path) -> bool:
    """Remove a file unless it is mapped; return success. A process that just opened it keeps it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return False
    return True


def _begin_of_parts(header_byte_count: int) -> int:
    return -(-(len(_MAGIC) + 8 + header_byte_count) // mmap.PAGESIZE) * mmap.PAGESIZE


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()
