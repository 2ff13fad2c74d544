"""Processes that outlive the process which starts them, each alone in a folder.

The child inherits the lock of its folder and keeps it while it, or a process that it starts, runs.
So a lock that can be taken proves that nothing runs, and one that cannot proves that something
does, even if the process that started it is dead. The child writes its own process id, before it
becomes the program, so every child that runs can be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Writes its process id, then becomes the program; `$0` is the file.
BECOME = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"'
# Runs the program without the lock, which a server that it leaves behind would keep.
AWAIT = 'echo $$ > "$0.new" && mv "$0.new" "$0" && "$@" 9>&-'
POLL_S = 0.05
EXIT_TIMEOUT_S = 2.0
TAIL_BYTES = 2000
ENDED_MAX = 1000  # exit codes that are remembered
LOCK_FD = 9  # of the lock in a child: POSIX shells keep single digits open
_children: set[int] = set()  # started by this process, and not waited for
_ended: dict[int, int] = {}  # their exit codes, negative for a signal


class Folder:
    """Folder of one child: its lock, its process id, its output."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid_file = path / "pid"
        self.output = path / "output.log"

    def prepare(self) -> None:
        """Create the folder. Raises: OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[int | None]:
        """Take the lock within the block, and yield its file; None if a child has it."""
        file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            yield None
            return
        try:
            yield file
        finally:
            os.close(file)  # a child that was started keeps the lock

    def is_running(self) -> bool:
        """Return whether a child runs."""
        reap()
        if not self.path.exists():
            return False
        with self.lock() as lock:
            return lock is None

    async def ended(self) -> None:
        """Wait until no child runs."""
        while self.is_running():  # noqa: ASYNC110 - a lock has no event
            await asyncio.sleep(POLL_S)

    def spawn(
        self, lock: int, command: Sequence[str], environment: Mapping[str, str], shell: str = BECOME
    ) -> None:
        """Start a child in its own session, with the lock. Raises: OSError."""
        self._pid_file.unlink(missing_ok=True)
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        kept = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10)
        try:
            pid = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", shell, str(self._pid_file), *command],
                {**os.environ, **environment},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                    (os.POSIX_SPAWN_DUP2, kept, LOCK_FD),
                ],
                setsid=True,
            )
        finally:
            os.close(kept)
            os.close(output)
        _children.add(pid)

    def pid(self) -> int | None:
        """Return the process id of the child; None before it is known."""
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and all processes of its session."""
        if (pid := self.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def exit_code(self) -> int | None:
        """Return the exit code of a child of this process that has ended; None if unknown."""
        reap()
        pid = self.pid()
        return None if pid is None else _ended.get(pid)

    async def exited(self) -> int:
        """Wait for the end of a child of this process; return its exit code, -1 if unknown."""
        await self.ended()
        give_up_at_s = time.monotonic() + EXIT_TIMEOUT_S
        while (code := self.exit_code()) is None and time.monotonic() < give_up_at_s:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)  # the lock is free shortly before the end
        return -1 if code is None else code

    def tail(self) -> str:
        """Return the last lines of the output."""
        try:
            with self.output.open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-3:] if line.strip())


def reap() -> None:
    """Collect the exit codes of children that have ended."""
    for pid in tuple(_children):
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            if len(_ended) > ENDED_MAX:
                _ended.clear()
            _ended[pid] = os.waitstatus_to_exitcode(status)
        _children.discard(pid)
