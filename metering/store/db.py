"""Connections to PostgreSQL: one SQLAlchemy engine per process, bounded psycopg connections, and
the store gate.

The gate tracks whether PostgreSQL is available. During an outage it permits one attempt at a time,
after growing pauses with jitter; all other calls raise `DatabaseUnavailable` at once. An outage
thus costs a process a few attempts per second however many clients there are, and processes that
lost the database together do not reconnect together.

A bounded connection limits the wait for each answer. The server's own limits do not help if it is
frozen or the network drops packets, and cancelling a call makes psycopg ask that same server to
cancel. So the socket is shut down: readers fail at once, and the server notices on its next read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, event, make_url, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry

from common.backoff import Backoff
from common.settings import Unshown, one_of, positive, setting, whole
from metering.core.errors import DatabaseUnavailable
from metering.store.refusals import refusal_of

BACKOFF_MIN_S = 0.05  # maximum delay in noticing that a restarted database is back
BACKOFF_MAX_S = 2.0  # maximum pause, before jitter of up to half as much again
CONNECT_TIMEOUT_S = 5  # a local network answers within milliseconds
# A host that is silent for longer gets its full time, but the next one is asked meanwhile.
ADDRESS_PATIENCE_S = 0.5
PER_ADDRESS = ("host", "hostaddr", "port")  # libpq's parameters with one value for each host

# Above the server's statement timeout, which applies first if the server works.
ANSWER_TIMEOUT_S = 12.0
# Settings that Weir relies on. Those of a connection take precedence over the defaults of server,
# database and role, whatever these are. `search_path` is the operator's choice of a schema.
OWN_SETTINGS = (
    "default_transaction_isolation=read committed",  # statements lock rows, then read them
    "default_transaction_read_only=off",
    "default_transaction_deferrable=off",
    "lock_timeout=0",  # the time limit of statements applies; single transactions set a shorter one
    "idle_session_timeout=0",  # idle connections wait in pools, listen, or hold advisory locks
    "timezone=UTC",
    "datestyle=ISO",
    "intervalstyle=postgres",
    "bytea_output=hex",
    "extra_float_digits=1",
    "client_encoding=UTF8",
    "standard_conforming_strings=on",
    "array_nulls=on",
    "transform_null_equals=off",
)
KEEPALIVES: dict[str, Any] = {  # detect a silent peer within half a minute; ignored on Unix sockets
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# Far above the slowest report measured; a runaway statement must not hold rows.
STATEMENT_TIMEOUT_MS = 10_000
# A process that sleeps this long is frozen and must not hold row locks.
IDLE_IN_TRANSACTION_TIMEOUT_MS = 10_000
POOL_SIZE = 5  # lookups take a millisecond: this serves thousands per second
POOL_WAIT_S = 5.0  # beyond it the database is too slow: refuse instead of hanging
URL_FORMS = (
    "postgresql://user:password@host:5432/name, or with several hosts for failover as"
    " postgresql://user:password@host1:5432,host2:5432/name"
)
WRITABLE = ("any", "read-write", "primary")  # values of `target_session_attrs`


class StoreGate:
    """Circuit breaker for the database. Not thread-safe: use it from one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Start closed. `clock` returns seconds, `jitter` a random number from 0 to 1."""
        self._clock = clock
        self._jitter = jitter
        self.away_since: float | None = None  # None while the database answers
        self._backoff = Backoff(BACKOFF_MIN_S, BACKOFF_MAX_S)
        self._next_attempt_at = -math.inf
        self._attempting = False

    @property
    def away_s(self) -> float | None:
        """Seconds since the outage began; None while the database answers."""
        return None if self.away_since is None else self._clock() - self.away_since

    @property
    def pause_s(self) -> float:
        """Seconds until the next attempt is permitted, at least `BACKOFF_MIN_S`."""
        return max(self._next_attempt_at - self._clock(), BACKOFF_MIN_S)

    def refusal(self) -> DatabaseUnavailable | None:
        """Return the error to raise while the database is away and no attempt is due, else None."""
        if self.away_since is not None and (
            self._attempting or self._clock() < self._next_attempt_at
        ):
            return DatabaseUnavailable(
                "The database does not answer.", retry_after_s=max(self.pause_s, 1.0)
            )
        return None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Guard a connection attempt; an error within the block counts as a failed one.

        Raises: DatabaseUnavailable, before the block runs, if no attempt is due.
        """
        if (refusal := self.refusal()) is not None:
            raise refusal
        if self.away_since is None:  # concurrent attempts are bounded by the pools
            try:
                yield
            except Exception:
                self.failed()
                raise
            return
        self._attempting = True
        try:
            yield
        except BaseException:
            self.failed()
            raise
        finally:
            self._attempting = False

    def answered(self) -> None:
        """Record that the database answered, which ends an outage."""
        if self.away_since is not None:
            self.away_since = None
            self._backoff.reset()

    def failed(self) -> None:
        """Record a failed connection attempt, or that the database stopped answering."""
        if self.away_since is None:
            self.away_since = self._clock()
        pause_s = self._backoff.next_s() * (0.5 + self._jitter())
        self._next_attempt_at = self._clock() + pause_s


_patience_s: ContextVar[float] = ContextVar("patience_s", default=ANSWER_TIMEOUT_S)


@contextmanager
def patience(answer_timeout_s: float) -> Iterator[None]:
    """Set the time limit, in seconds, for each answer of the database within the context."""
    before = _patience_s.set(answer_timeout_s)
    try:
        yield
    finally:
        _patience_s.reset(before)


class BoundedConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Connection that limits the wait for each answer to `ANSWER_TIMEOUT_S`.

    After that time it closes and raises psycopg.OperationalError. Its commits are durable:
    `synchronous_commit = off` of a server, database or role has no effect here, nor has a time
    limit for whole transactions.
    """

    @classmethod
    async def connect(  # type: ignore[override]  # it has one parameter more
        cls, conninfo: str = "", *, settings: Sequence[str] = (), **parameters: Any
    ) -> Self:
        """Open a connection that commits durably, to the first host that accepts it.

        It has the settings of `connection_settings`, and those of `settings`.

        A lost machine does not refuse connections: it is silent. So an address that has not
        answered within `ADDRESS_PATIENCE_S` does not delay the others. While it is silent, those
        that refused are tried again: one may be promoted. Raises: psycopg.OperationalError.
        """
        hosts = single_addresses(conninfo, parameters)
        if len(hosts) == 1:
            return await cls._connect_to(conninfo, settings, **parameters)
        connected: list[Self] = []
        attempts: dict[int, asyncio.Task[None]] = {}
        failures: dict[int, str] = {}
        ended = asyncio.Event()

        async def ask(index: int) -> None:
            try:
                connection = await cls._connect_to(conninfo, settings, **parameters | hosts[index])
                connected.append(connection)
            except (psycopg.Error, OSError) as error:
                failures[index] = str(error).strip()
            del attempts[index]
            ended.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in itertools.cycle(range(len(hosts))):
                    ended.clear()
                    if index not in attempts:
                        attempts[index] = tasks.create_task(ask(index), name="database host")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ADDRESS_PATIENCE_S):
                            await ended.wait()
                    if connected or (not attempts and len(failures) == len(hosts)):
                        break
                for task in attempts.values():
                    task.cancel()
        except BaseException:
            for connection in connected:
                await connection.close()
            raise
        for connection in connected[1:]:
            await connection.close()
        if not connected:
            raise psycopg.OperationalError(f"no host takes writes: {'; '.join(failures.values())}")
        return connected[0]

    @classmethod
    async def _connect_to(cls, conninfo: str, settings: Sequence[str], **parameters: Any) -> Self:
        options = connection_options(settings)
        try:
            connection = await super().connect(conninfo, **parameters | {"options": options})
        except BaseException as error:
            # The error's frames hold the socket of a cancelled attempt, which would stay open until
            # a garbage collection.
            traceback.clear_frames(error.__traceback__)
            raise
        try:
            await connection.execute(settle_statement(settings).encode())
            await connection.commit()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Implement psycopg's `wait`, with a time limit, for all exchanges with the server."""
        timer = asyncio.get_running_loop().call_later(_patience_s.get(), self.abort)
        try:
            return await super().wait(gen, *args, **kwargs)
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Shut down the socket, which wakes its reader. Does nothing on a closed connection."""
        with (
            suppress(psycopg.OperationalError, OSError),
            socket.socket(fileno=os.dup(self.fileno())) as twin,
        ):
            twin.shutdown(socket.SHUT_RDWR)


def single_addresses(conninfo: str, parameters: Mapping[str, Any]) -> list[dict[str, str]]:
    """Split the hosts of a connection into parameters for each of them, in order."""
    own = {name: parameters[name] for name in PER_ADDRESS if name in parameters}
    named = conninfo_to_dict(conninfo, **own)
    lists = {name: str(named[name]).split(",") for name in PER_ADDRESS if named.get(name)}
    count = max(map(len, lists.values()), default=1)
    return [
        {name: values[index % len(values)] for name, values in lists.items()}
        for index in range(count)
    ]


Sessions = async_sessionmaker[AsyncSession]


class DatabaseUrlInvalid(ValueError):
    """The URL is not of a PostgreSQL database. It is not shown, since it may hold a password."""


def sqlalchemy_url(database_url: str) -> URL:
    """Convert a PostgreSQL URL of any scheme to one for SQLAlchemy's psycopg driver.

    If it names several hosts, libpq uses the first that accepts writes. Raises: DatabaseUrlInvalid.
    """
    scheme, mark, rest = database_url.partition("://")
    if not mark or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise DatabaseUrlInvalid(f"must be a PostgreSQL database, written as {URL_FORMS}")
    try:
        named: dict[str, Any] = conninfo_to_dict(f"postgresql://{rest}")  # as libpq reads it
    except psycopg.ProgrammingError:
        raise DatabaseUrlInvalid(
            f"is not a URL that libpq can read: write it as {URL_FORMS}, with % codes for special"
            " characters in names and passwords"
        ) from None
    hosts = str(named.get("host") or "").split(",")
    ports = str(named.get("port") or "").split(",")
    if len(ports) not in (1, len(hosts)) or not all(
        not port or (port.isdecimal() and 0 < int(port) < 65_536) for port in ports
    ):
        raise DatabaseUrlInvalid(
            f"must have one port from 1 to 65535, or one for each of its {len(hosts)} hosts"
        )
    server = named.get("target_session_attrs", "any")
    if server not in WRITABLE:
        raise DatabaseUrlInvalid(
            f"must have one of {', '.join(WRITABLE)} as target_session_attrs: Weir writes to its"
            " database"
        )
    if len(hosts) == 1:
        return make_url(database_url).set(drivername="postgresql+psycopg")
    user, password, name = (named.pop(key, None) for key in ("user", "password", "dbname"))
    return URL.create(
        "postgresql+psycopg",
        user,
        password,
        database=name,
        query={"target_session_attrs": "read-write"}
        | {key: str(value) for key, value in named.items()},
    )


def postgres_url(text: str) -> str:
    """Validate a database URL. Errors do not repeat the URL, since it may contain a password.

    Raises: ValueError.
    """
    try:
        sqlalchemy_url(text)
    except DatabaseUrlInvalid as error:
        raise Unshown(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    """The database of all processes, the connections of this one, and its policy without it."""

    # The PostgreSQL database that all processes share. With several hosts, separated by commas, the
    # first one that accepts writes is used, and after a failover the next.
    url: str = setting("WEIR_DATABASE_URL", "", postgres_url)
    # Region of the database, its copies, and all processes that use it. Then organizations that are
    # bound to this region may send labels and end users, which are stored there. Set it, and
    # WEIR_REGION to the same, in all processes; unset, such requests are refused.
    region: str = setting("WEIR_DATABASE_REGION", "", str)
    # What happens while PostgreSQL is away: `closed` refuses new requests; `grace` admits requests
    # under pre-authorized holds, until these expire. Neither can exceed a limit.
    unavailable_policy: Literal["closed", "grace"] = setting(
        "WEIR_DATABASE_UNAVAILABLE_POLICY", "closed", one_of("closed", "grace")
    )
    # How long a request waits for PostgreSQL before it is refused. Set it longer than a commit
    # takes, and shorter than your clients wait for a first token.
    timeout_s: float = setting("WEIR_DATABASE_TIMEOUT_S", 5.0, positive(60))
    # How long PostgreSQL may be away before health reports not ready. A restart of the database
    # takes less, so load balancers do not notice it.
    unready_after_s: float = setting("WEIR_DATABASE_UNREADY_AFTER_S", 5.0, positive(3600))
    # Connections with which a process looks up tenants, besides six for holds, commands, recovery
    # and key checks. A lookup takes milliseconds.
    connections_max: int = setting("WEIR_DATABASE_CONNECTIONS", 5, whole(1, 1000))
    # Connections for reports, which may take seconds. One key can use all but one of them.
    report_connections_max: int = setting("WEIR_REPORT_CONNECTIONS", 3, whole(1, 1000))
    # Connections for administration and metrics alone, so that you can revoke a key while tenants
    # keep the others busy.
    admin_connections_max: int = setting("WEIR_ADMIN_CONNECTIONS", 3, whole(2, 1000))
    # How many end users of an organization may be in use; also how many values of limited labels.
    # Those without a request for 35 days do not count.
    end_users_max: int = setting("WEIR_END_USERS_MAX", 1_000_000, whole(1, 10**9))
    # How many holds are pre-authorized for each key and model in use, for `grace`.
    grace_holds_per_key: int = setting("WEIR_GRACE_HOLDS_PER_KEY", 4, whole(1, 1000))
    # How many input tokens each of WEIR_GRACE_HOLDS_PER_KEY covers. Its output is one lease slice.
    grace_input_tokens: int = setting("WEIR_GRACE_INPUT_TOKENS", 2048, whole(1, 10_000_000))


def psycopg_conninfo(database_url: str) -> str:
    """Convert a PostgreSQL URL to a connection string for psycopg. Raises: DatabaseUrlInvalid."""
    url = sqlalchemy_url(database_url).set(drivername="postgresql")
    address, mark, query = url.render_as_string(hide_password=False).partition("?")
    return address + mark + query.replace("+", "%20")  # libpq decodes no other form of a blank


def create_engine(
    database_url: str, *, pool_size: int = POOL_SIZE, gate: StoreGate | None = None
) -> AsyncEngine:
    """Create an asyncio engine with a bounded pool and a statement timeout. Dispose of it.

    Its sessions raise DatabaseUnavailable if the database is away or does not answer in time.
    `gate` is shared by all connections of this process to the same database; None creates one.
    """
    gate = gate or StoreGate()
    engine = create_async_engine(
        sqlalchemy_url(database_url),
        poolclass=gated_pool(gate),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=POOL_WAIT_S,
        pool_pre_ping=True,
        hide_parameters=True,  # errors are logged, and parameters have names of end users
        connect_args={"async_creator_fn": gated_connect(gate)},
    )
    event.listen(engine.sync_engine, "handle_error", raise_database_unavailable)
    return engine


def gated_pool(gate: StoreGate) -> type[AsyncAdaptedQueuePool]:
    """Build a pool class that hands out no connection during a known outage."""

    class GatedPool(AsyncAdaptedQueuePool):
        """Pool that raises DatabaseUnavailable in an outage, or if its connections stay busy."""

        def _do_get(self) -> ConnectionPoolEntry:
            if gate.away_since is not None and (refusal := gate.refusal()) is not None:
                raise refusal
            try:
                return super()._do_get()
            except PoolTimeout as busy:
                raise DatabaseUnavailable(
                    "the database is too slow: all connections to it are busy"
                ) from busy

    return GatedPool


def gated_connect(gate: StoreGate) -> Callable[..., Awaitable[BoundedConnection]]:
    """Build the pool's connect function, which uses the gate and a time limit."""

    async def connect(*args: Any, **parameters: Any) -> BoundedConnection:
        with gate.attempt():
            limits = {"connect_timeout": CONNECT_TIMEOUT_S, **KEEPALIVES}
            connection = await BoundedConnection.connect(*args, **limits | parameters)
        gate.answered()
        return connection

    return connect


def raise_database_unavailable(context: ExceptionContext) -> None:
    """Convert an outage or a conflict to DatabaseUnavailable, without the statement's values.

    Raises: DatabaseUnavailable.
    """
    if context.is_pre_ping:
        return  # the pool's own test of a connection: it replaces a dead one
    if (refusal := refusal_of(context.original_exception)) is not None:
        raise refusal from context.original_exception


def connection_settings(extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the settings of a connection as `NAME=VALUE`. Those in `extra` come last and win."""
    return (
        f"statement_timeout={STATEMENT_TIMEOUT_MS}",
        f"idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_TIMEOUT_MS}",
        "application_name=weir",
        "tcp_keepalives_idle=30",  # lets the server detect a lost client
        *OWN_SETTINGS,
        *extra,
    )


def connection_options(extra: Sequence[str] = ()) -> str:
    """Build the libpq `options` of a connection with these settings."""
    settings = (setting.replace(" ", r"\ ") for setting in connection_settings(extra))
    return " ".join(f"-c {setting}" for setting in settings)


def settle_statement(extra: Sequence[str] = ()) -> str:
    """Build the first statement of a connection, which makes sure that its settings apply.

    A pooler does not pass `options` on: PgBouncer refuses them, or drops them silently. Of the
    other settings, a `synchronous_commit` other than `off` waits at least for the server's own
    disk, and some values for standbys: it is kept. `transaction_timeout` exists since PostgreSQL
    17.
    """
    values = ", ".join(
        "('{}', '{}')".format(*setting.replace("'", "''").split("=", 1))
        for setting in connection_settings(extra)
    )
    return f"""
SELECT set_config(name, value, false) FROM (VALUES {values}) AS own (name, value)
UNION ALL
SELECT set_config(name, CASE name WHEN 'synchronous_commit' THEN 'on' ELSE '0' END, false)
FROM pg_settings
WHERE (name = 'synchronous_commit' AND setting = 'off')
   OR (name = 'transaction_timeout' AND setting <> '0')
"""


def create_sessions(engine: AsyncEngine, *, region: str = "") -> Sessions:
    """Create a session factory. Objects stay readable after commit; nothing loads lazily.

    `region` is that of the database, empty if unknown.
    """
    info = {"region": region}
    return async_sessionmaker(engine, expire_on_commit=False, info=info)


def create_lookups(engine: AsyncEngine) -> Sessions:
    """Create a factory of autocommit sessions, which save two round trips per query."""
    return create_sessions(engine.execution_options(isolation_level="AUTOCOMMIT"))


async def undurable_settings(sessions: Sessions) -> list[str]:
    """List the server settings that risk losing or corrupting commits in a machine crash."""
    async with sessions() as session:
        rows = await session.execute(
            text("""
                SELECT name
                FROM pg_settings
                WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'
            """)
        )
        return sorted(rows.scalars())


@contextlib.asynccontextmanager
async def lock_holder(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """Open an autocommit session that holds advisory locks until the context ends."""
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        try:
            yield session
        finally:
            # Lost connection: the server releases its locks.
            with contextlib.suppress(DatabaseUnavailable, PendingRollbackError):
                await session.execute(text("SELECT pg_advisory_unlock_all()"))


async def try_lock(locks: AsyncSession, name: str) -> bool:
    """Try to take the named advisory lock; return False if another session has it."""
    return bool(
        await locks.scalar(
            text("SELECT pg_try_advisory_lock(hashtextextended(:name, 0))"), {"name": name}
        )
    )


async def database_now(session: AsyncSession) -> datetime:
    """Read the time at which the transaction started, by the database's clock."""
    now: datetime = (await session.execute(text("SELECT now()"))).scalar_one()
    return now


async def read_one_moment(session: AsyncSession, statement_max_s: float) -> None:
    """Make the transaction a read-only snapshot with a statement timeout. Call it first."""
    await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    await session.execute(text(f"SET LOCAL statement_timeout = {int(statement_max_s * 1000)}"))
