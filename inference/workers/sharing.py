"""Sharing of engine workers by the api processes of a machine, through locks in one directory.

The kernel decides which process starts a worker and which one ends it, since it releases the locks
of a process that dies. A replica has three files, named by its key:

- `.lock` is held by its worker from the start to the end, so there is one at most.
- `.users` is held in common by the api processes that need the engine, from before the start until
  they have left. The process that can take it alone is the last one, and ends the worker.
- `.sock` is the socket on which the worker listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from common.processes import INHERITED_PREFIXES, PROC, inherited
from inference.workers.process import (
    OtherProcess,
    WorkerOpener,
    WorkerProcess,
    end_family,
    set_buffers,
)

BACKLOG = 64  # connections that a worker has not accepted yet
POLL_S = 0.02
NAME_LENGTH_MAX = 60  # of a file, without the hash
_PRIVATE = 0o700


class DirectoryUnusable(ValueError):
    """The directory of engine workers belongs to another user."""


class EngineDirectory:
    """Directory of the locks and sockets of a machine's engine workers; only for its owner."""

    def __init__(self, path: Path) -> None:
        """Create the directory if it is missing. Raises: DirectoryUnusable, OSError."""
        path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(self._fd).st_uid != os.getuid():
            raise DirectoryUnusable(
                f"{path} belongs to another user: name a directory of user {os.getuid()}"
            )
        os.fchmod(self._fd, _PRIVATE)
        self.path = path
        status = os.fstat(self._fd)
        self.identity = f"{machine_identity()}-{status.st_dev:x}-{status.st_ino:x}"

    def replica(self, name: str, *settings: object) -> SharedReplica:
        """Return a replica of this machine, by its name and all settings that its worker gets.

        Processes with other settings, or another environment of compute libraries, have another
        worker.
        """
        environment = {
            key: value
            for key, value in inherited().items()
            if key.startswith(INHERITED_PREFIXES) and not key.startswith("LC_")
        }
        decisive = repr((name, settings, sorted(environment.items())))
        digest = hashlib.sha256(decisive.encode()).hexdigest()[:16]
        return SharedReplica(self, f"{file_name(name)}-{digest}")

    def private(self, name: str) -> SharedReplica:
        """Return a replica that this process shares with none."""
        return SharedReplica(self, f"{file_name(name)}-{os.getpid()}-{secrets.token_hex(4)}")

    def names(self) -> list[str]:
        """List the files."""
        return os.listdir(self._fd)

    def open(self, name: str) -> int:
        """Open a file, and create it if it is missing; only this user can."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._fd)

    def is_locked(self, name: str) -> bool:
        """Return whether a process has locked a file, alone or in common."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(fd, alone=True)
        finally:
            os.close(fd)

    def read(self, name: str) -> dict[str, object]:
        """Read a file's JSON object; empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
            with open(fd) as file:
                content = json.load(file)
                return cast(dict[str, object], content) if isinstance(content, dict) else {}
        return {}

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def address(self, name: str) -> str:
        """Return the address of a socket; that of a deep directory would be too long."""
        return f"/proc/self/fd/{self._fd}/{name}" if PROC.is_dir() else str(self.path / name)


def machine_identity() -> str:
    """Return what no other machine has: the id of its last boot."""
    boot = PROC / "sys/kernel/random/boot_id"
    with contextlib.suppress(OSError):
        return boot.read_text().strip()
    return socket.gethostname()


def file_name(name: str) -> str:
    """Turn the name of a replica into part of a file name."""
    return re.sub("[^0-9A-Za-z._-]+", "_", name)[:NAME_LENGTH_MAX]


def try_lock(fd: int, *, alone: bool) -> bool:
    """Try to lock a file, alone or in common; on failure, no lock of it is left."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(fd: int, content: Mapping[str, object]) -> None:
    """Replace the content of an open file."""
    data = json.dumps(dict(content)).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)


class SharedReplica:
    """Replica of a model on this machine, for one api process."""

    def __init__(self, directory: EngineDirectory, key: str) -> None:
        self.key = key
        self.pool = f"{directory.identity}/{key}"  # equal in all processes that share the worker
        self._directory = directory
        self._users: int | None = None  # open `.users`

    def enter(self) -> bool:
        """Become a user of the replica. Return False while its last user ends it."""
        assert self._users is None, "a replica is entered once"
        fd = self._directory.open(f"{self.key}.users")
        # An unlocked file may be removed before it is locked here.
        if not try_lock(fd, alone=False) or not os.fstat(fd).st_nlink:
            os.close(fd)
            return False
        self._users = fd
        return True

    def declare(self, memory_bytes: int, gpus: Sequence[str]) -> None:
        """Record what the replica holds, for all processes; its first user does."""
        assert self._users is not None, "a user declares"
        write(self._users, {"memory_bytes": memory_bytes, "gpus": list(gpus)})

    def is_last(self) -> bool:
        """Return whether no other process uses the replica. Then none can enter it until `leave`.

        Call it only to leave: a user that is not the last one is none any more.
        """
        return self._users is not None and try_lock(self._users, alone=True)

    def leave(self) -> None:
        """Stop being a user."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    @property
    def is_entered(self) -> bool:
        """True between `enter` and `leave`."""
        return self._users is not None

    def worker_pid(self) -> int:
        """Read the process id of the worker that holds the lock; 0 if none does."""
        name = f"{self.key}.lock"
        pid = self._directory.read(name).get("pid") if self._directory.is_locked(name) else 0
        return pid if isinstance(pid, int) else 0

    @contextlib.asynccontextmanager
    async def open(
        self, start: WorkerOpener, module: str, environment: Mapping[str, str]
    ) -> AsyncIterator[WorkerProcess]:
        """Connect to the worker, which `start` starts if there is none. On exit, end it if the
        process is the last one that uses it and does not need it any more.
        """
        enters = not self.is_entered
        while enters and not self.enter():  # noqa: ASYNC110  # waits for another process
            await asyncio.sleep(POLL_S)
        try:
            while True:
                if (end := self._connect()) is not None:
                    async with self._joined(end) as worker:
                        yield worker
                    return
                if (lock := self._take()) is not None:
                    async with self._started(lock, start, module, environment) as worker:
                        yield worker
                    return
                await asyncio.sleep(POLL_S)
        finally:
            if enters:
                self.leave()

    def _connect(self) -> socket.socket | None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.setblocking(False)
        try:
            set_buffers(end)
            end.connect(self._directory.address(f"{self.key}.sock"))
        except OSError:  # none listens, or has more connections waiting than it accepts
            end.close()
            return None
        return end

    def _take(self) -> int | None:
        """Take the lock of the worker; None if another process has it."""
        fd = self._directory.open(f"{self.key}.lock")
        if try_lock(fd, alone=True):
            return fd
        os.close(fd)
        return None

    @contextlib.asynccontextmanager
    async def _joined(self, end: socket.socket) -> AsyncIterator[WorkerProcess]:
        process = OtherProcess()
        try:
            _, worker = await asyncio.get_running_loop().create_unix_connection(
                lambda: WorkerProcess(process, "", users=self), sock=end
            )
        except BaseException:
            end.close()
            raise
        try:
            yield worker
        finally:
            await worker.give_back()

    @contextlib.asynccontextmanager
    async def _started(
        self, lock: int, start: WorkerOpener, module: str, environment: Mapping[str, str]
    ) -> AsyncIterator[WorkerProcess]:
        """Start a worker that listens. The lock passes to it."""
        name = f"{self.key}.lock"
        with contextlib.ExitStack() as files:
            files.callback(os.close, lock)
            # What an earlier worker started may have outlived it, with the memory of its GPUs.
            family = self._directory.read(name).get("family")
            if isinstance(family, str) and family:
                await end_family(family)
            write(lock, {})
            self._directory.remove(f"{self.key}.sock")
            listener = files.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            set_buffers(listener)  # those it accepts inherit them
            listener.bind(self._directory.address(f"{self.key}.sock"))
            os.chmod(self._directory.address(f"{self.key}.sock"), stat.S_IRUSR | stat.S_IWUSR)
            listener.listen(BACKLOG)
            async with start(module, environment) as worker:
                write(lock, {"pid": worker.pid, "family": worker.family})
                worker.share(self, listener.fileno(), lock)
                files.close()  # the worker has them; only its end may release the lock
                yield worker

    def opener(self, start: WorkerOpener) -> WorkerOpener:
        """Return an opener that shares the workers of another one."""
        return lambda module, environment: self.open(start, module, environment)
