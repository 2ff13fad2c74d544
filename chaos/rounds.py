"""`weir chaos`: rounds of load and kills against a separate Weir, each followed by an audit.

The stack under test: two API processes with an engine each, a worker, an exporter, a broker, and
PostgreSQL. Killed processes restart at once, on the same ports and directories. Other exits are
recorded as errors.

At rest, these are equal, to the token:

- A request whose end reached its client: received = reported at the end = usage event.
- A request whose end did not reach it: usage event = tokens that the transport had taken. Tokens
billed beyond those received count as "unreceived". Tokens of a killed process that were only
journalled are "forgiven": the client may have received those of one message, which the process sent
and had not marked as taken when it died.
- Usage events = ledger = delivered batches = the exporter's file, in sum and by `fsck --at-rest`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from rich.markup import escape
from weir_cli.connection import Connection
from weir_cli.render import make_console, note, print_json, show, table
from weir_cli.texts import duration_text
from weir_client import AsyncClient, WeirError

from api.cli.stack import (
    Child,
    StackFailed,
    bootstrap,
    child_environment,
    clear_failures,
    ensure_receipt_key,
    serving_pid,
)
from api.core.settings import Settings
from api.fleet.fleet_file import model_names
from common.processes import alive, children_of
from metering.holds.journal import abandoned_journals
from metering.proof.fsck import CHECKS, fsck
from metering.receipts.signing import KEY_FILE
from metering.store import embedded_postgres
from metering.store.db import psycopg_conninfo
from metering.store.embedded_postgres import EmbeddedPostgres
from metering.store.migrations_runner import migrate
from metering.worker import worker_command

DEATH_TIMEOUT_S = 30.0  # children of a killed server exit within a second
CHILD_POLL_S = 0.01

# Processes crash, not the machine: committed data survives without fsync.
CRASH_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "max_connections": "200",
}
API_COUNT = 2
READY_TIMEOUT_S = 120.0  # far above the time of a start on a busy machine
READY_POLL_S = 0.05
RESTART_PAUSE_S = 0.2  # before restarting a process that exited: it may depend on another one

# Small leases and short expiry provoke many extensions, expiries and recoveries.
BOUNDS: Mapping[str, Any] = {
    "lease_slice_tokens": 16,
    "lease_margin_tokens": 8,
    "hold_expiry_s": 5.0,
    "recovery_interval_s": 0.5,
}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "simulated": {"engine_device": "simulated", "simulated_time_scale": 0.5},
    "demo": {"engine_device": "cpu", "engine_threads": 1, "kv_cache_bytes": 64 << 20},
}

LOSSLESS_S = 1.0  # a client reads what it has been sent within milliseconds
CONNECTION_COUNT = 8  # concurrent connections
TOGETHER_MAX = 4  # concurrent requests on one connection
# Some requests end at once, some outlive several kills.
OUTPUT_TOKENS = (1, 7, 40, 150, 400)
CANCELLED_SHARE = 0.15
PAUSE_S = 0.05  # after a failure, since the process is probably down
REQUEST_TIMEOUT_S = 60.0  # slower responses are reported as errors
WORDS = ("hotel", "river", "station", "breakfast", "quiet", "harbour", "late", "family")
SETTLE_TIMEOUT_S = 60.0  # holds expire after 5 s and are swept every 10 s
POLL_S = 0.1
UNMARKED_TOKENS_MAX = 64  # one delta: a process may have sent it, and not marked it, when it died
SHOWN_MAX = 20  # discrepancies on the terminal
KILLS_PER_ROUND = 5
# Seconds from a kill to the next: before, during and after the restart.
BETWEEN_KILLS_S = (0.05, 0.8)
TOKENS_BEFORE = 50  # received in a round before its first kill
LOAD_TIMEOUT_S = 90.0  # for the requests of a round
AT_WORK_SHARE = 0.85


# All processes share the journals' directory.
LOGS, JOURNALS, EXPORT_FILE = "logs", "journal", "usage.jsonl"


def crash_postgres(server: EmbeddedPostgres) -> None:
    """Kill the postmaster with SIGKILL, if it runs, and wait until its children have exited."""
    pid = server.pid
    if pid is None:
        return
    children = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while any(map(alive, children)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"children of the killed server {pid} are still there")
        time.sleep(CHILD_POLL_S)


@dataclass(slots=True)
class Part(Child):
    """Supervised process. `up` is true while ready; `down_s` has the seconds of each outage."""

    environment: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    up: bool = True
    killed: bool = False
    down_s: list[float] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        return (
            self.process.pid
            if self.process is not None and self.process.returncode is None
            else None
        )

    def kill(self) -> bool:
        """Send SIGKILL and return whether the process was running."""
        self.killed = self.killed or self.pid is not None
        return kill_process(self.pid)

    async def keep_alive(self) -> None:
        """Restart the process whenever it exits, until cancelled."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            self.up = False
            if not self.killed:
                self.deaths.append(
                    f"{self.name} ended with status {status}, unasked:\n{self.log_tail()}"
                )
                await asyncio.sleep(RESTART_PAUSE_S)
            self.killed = False
            ended_at = time.monotonic()
            await self.start(self.environment)
            if self.address:
                await self.ready()
            self.up = self.pid is not None
            self.down_s.append(time.monotonic() - ended_at)

    async def ready(self) -> None:
        """Wait until the process is ready or has exited."""
        while self.pid is not None:
            if self.ready_pid() == self.pid:
                return
            await asyncio.sleep(READY_POLL_S)


@dataclass(slots=True)
class System:
    """Stack under test. `parts` are its processes, including Redis if that is the broker."""

    directory: Path
    postgres: EmbeddedPostgres
    connection: Connection
    apis: list[Part]
    worker: Part
    exporter: Part
    redis: Part | None
    down_s: list[float] = field(default_factory=list)  # outages of PostgreSQL
    _restarting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def parts(self) -> list[Part]:
        return [*self.apis, self.worker, self.exporter, *([self.redis] if self.redis else [])]

    def engine_pid(self, index: int) -> int | None:
        """Find the process id of the engine worker of an API process; None if it does not run."""
        pid = self.apis[index].pid
        children = children_of(pid) if pid is not None else []
        return children[0] if children else None

    async def end_postgres(self, *, at_once: bool = False) -> bool:
        """Kill or, with `at_once`, stop the database server; restart it. Return whether it ran."""
        if self.postgres.pid is None:
            return False
        async with self._restarting:
            began_at = time.monotonic()
            if at_once:
                await asyncio.to_thread(self.postgres.stop, "immediate")
            else:
                await asyncio.to_thread(crash_postgres, self.postgres)
            await asyncio.to_thread(embedded_postgres.start, self.postgres.data_dir, CRASH_SETTINGS)
            self.down_s.append(time.monotonic() - began_at)
        return True

    def lose_broker(self) -> None:
        """Kill the broker, which loses its queued messages: Redis, or else the worker."""
        (self.redis or self.worker).kill()

    async def all_ready(self) -> None:
        """Wait until every API process and the database are ready. Raises: TimeoutError."""
        async with asyncio.timeout(READY_TIMEOUT_S), self._restarting:
            for api in self.apis:
                while True:
                    await api.ready()
                    if api.pid is not None:
                        break
                    await asyncio.sleep(READY_POLL_S)


def free_port() -> int:
    """Find a free port that a restarted process can use again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def broker(directory: Path) -> Part:
    """Build Redis on a socket in the directory, without persistence. Raises: StackFailed."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise StackFailed("redis-server is not installed: install it, or omit --redis")
    command = [binary, *("--port", "0"), *("--unixsocket", str(directory / "redis.sock"))]
    command += [*("--save", ""), *("--dir", str(directory))]
    return Part("Redis", command, directory / LOGS / "redis.log", environment=dict(os.environ))


def api_part(
    directory: Path, index: int, settings: Settings, environment: Mapping[str, str]
) -> Part:
    """Build an API process with its own home and the journal directory that all share."""
    home = directory / f"api-{index}"
    home.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (home / "journal").symlink_to(directory / JOURNALS)
    address = f"127.0.0.1:{free_port()}"
    own = {"WEIR_HOME": str(home), "WEIR_LISTEN": address, "WEIR_OPENAI_LISTEN": "off"}
    log = directory / LOGS / f"api-{index}.log"
    return Part(
        f"api process {index}",
        [sys.executable, "-m", "api"],
        log,
        lambda: serving_pid(home),
        environment={**environment, **own},
        address=address,
    )


@contextlib.asynccontextmanager
async def running_system(
    directory: Path, settings: Settings, *, with_redis: bool
) -> AsyncIterator[System]:
    """Start the stack in a directory and supervise it during the `async with` block.

    The API processes use `settings`, except for database, home and address. Raises: StackFailed,
    PostgresNotStarted.
    """
    for name in (LOGS, JOURNALS):
        (directory / name).mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as cleanup:
        postgres = await asyncio.to_thread(
            embedded_postgres.start, directory / "postgres", CRASH_SETTINGS
        )
        cleanup.push_async_callback(asyncio.to_thread, postgres.stop)
        await asyncio.to_thread(migrate, postgres.url)
        settings = settings.having(database_url=postgres.url, home=directory)
        ensure_receipt_key(settings)
        connection = await bootstrap(postgres.url, directory, *model_names(settings))
        redis = broker(directory) if with_redis else None
        environment = {
            **child_environment(settings),
            "WEIR_RECEIPT_KEY_FILE": str(directory / KEY_FILE),
        }
        environment |= {"WEIR_EXPORT": "file", "WEIR_EXPORT_FILE": str(directory / EXPORT_FILE)}
        if redis is not None:
            environment["WEIR_BROKER_URL"] = f"redis+socket://{directory / 'redis.sock'}"
        exporter = [sys.executable, "-m", "chaos.exporter"]
        system = System(
            directory,
            postgres,
            connection,
            [api_part(directory, index, settings, environment) for index in range(API_COUNT)],
            Part(
                "worker", worker_command(), directory / LOGS / "worker.log", environment=environment
            ),
            Part("exporter", exporter, directory / LOGS / "exporter.log", environment=environment),
            redis,
        )
        for part in system.parts:
            await part.start(part.environment)
            cleanup.push_async_callback(part.stop)
        await system.all_ready()
        async with asyncio.TaskGroup() as tasks:
            keepers = [
                tasks.create_task(part.keep_alive(), name=part.name) for part in system.parts
            ]
            try:
                yield system
            finally:
                for keeper in keepers:
                    keeper.cancel()


class Wire:
    """Proxy for the connections to an API process that loses no byte when the process dies.

    A gRPC client drops messages that it has received, but not read, when its connection breaks. So
    the proxy passes a break on only after the bytes before it.
    """

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Listen during the block, and yield the address for clients."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled when the event loop ends, which asyncio would report as an error.
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(far_writer):
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._pump(reader, far_writer), name="wire")
                    sending.add_done_callback(lambda _: far_writer.close())
                    await self._pump(far_reader, writer)
                    if not sending.done():  # the server broke off, not the client
                        await asyncio.sleep(LOSSLESS_S)
                    sending.cancel()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy bytes from one connection to the other until the end of the stream."""
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


@dataclass(slots=True)
class SentRequest:
    """Request as its client saw it.

    `reported` is the number of delivered tokens in its final frame, None if that did not arrive.
    `failure` is the client's error.
    """

    request_id: str
    api: int
    began_at: float
    ended_at: float = -math.inf
    received: int = 0
    reported: int | None = None
    failure: str = ""


class Load:
    """Generator of requests, from `run` to `stop`. It can run again afterwards."""

    def __init__(
        self, addresses: Sequence[str], api_key: str, model: str, rng: random.Random
    ) -> None:
        self.sent: list[SentRequest] = []
        self._addresses = addresses
        self._api_key = api_key
        self._model = model
        self._rng = rng
        self._stopping = False

    @property
    def received(self) -> int:
        return sum(each.received for each in self.sent)

    def stop(self) -> None:
        """Send no more requests. Running ones are still read to their end."""
        self._stopping = True

    async def reached(self, token_count: int) -> None:
        """Wait until the clients have received `token_count` tokens."""
        while self.received < token_count:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)

    async def run(self) -> None:
        """Send requests until `stop` is called, then read the running ones to their end."""
        self._stopping = False
        async with asyncio.TaskGroup() as tasks:
            for number in range(CONNECTION_COUNT):
                tasks.create_task(self._connection(number), name=f"client {number}")

    async def _connection(self, number: int) -> None:
        while not self._stopping:
            api = self._rng.randrange(len(self._addresses))
            async with AsyncClient(
                self._addresses[api], self._api_key, max_retries=self._rng.randrange(3)
            ) as client:
                answers = [
                    self._ask(client, api) for _ in range(self._rng.randint(1, TOGETHER_MAX))
                ]
                ends = await asyncio.gather(*answers)
            if not any(ends):
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, client: AsyncClient, api: int) -> bool:
        """Send a request and read it to its end. Return whether the final frame arrived."""
        sent = SentRequest(str(uuid.uuid4()), api, time.monotonic())
        self.sent.append(sent)
        output_tokens = self._rng.choice(OUTPUT_TOKENS)
        patience = (
            self._rng.randint(0, output_tokens) if self._rng.random() < CANCELLED_SHARE else None
        )
        prompt = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 60)))
        try:
            generation = client.generate(
                self._model,
                prompt,
                max_output_tokens=output_tokens,
                ignore_eos=True,
                request_id=sent.request_id,
                timeout=REQUEST_TIMEOUT_S,
                # Output kept for a client that reconnects counts as delivered but is lost with the
                # server.
                keep_on_disconnect=None,
            )
            if patience == 0:
                generation.start()
                generation.cancel()
            async for delta in generation:
                sent.received += len(delta.token_ids)
                if patience is not None and sent.received >= patience:
                    generation.cancel()
            sent.reported = generation.result.usage.delivered_token_count
        except WeirError as error:
            sent.failure = f"{type(error).__name__}: {error.reason}"
            if error.partial is not None and error.partial.usage is not None:
                sent.reported = error.partial.usage.delivered_token_count
        sent.ended_at = time.monotonic()
        return sent.reported is not None


WAITING: Mapping[str, LiteralString] = {
    "live holds": "SELECT count(*) FROM holds WHERE state = 'held'",
    "unrated usage events": "SELECT count(*) FROM usage_events WHERE rated_at IS NULL",
    "undelivered batches": ("SELECT count(*) FROM meter_batches WHERE state <> 'delivered'"),
    "tokens without a batch": (
        """
        SELECT (
            SELECT coalesce(sum(input_token_count + billed_token_count + embedding_token_count), 0)
            FROM usage_events
        ) - (SELECT coalesce(sum(token_count), 0) FROM meter_batches)
    """
    ),
}
VOIDED: LiteralString = "SELECT request_id FROM holds WHERE state = 'voided'"
EVENTS: LiteralString = """
SELECT request_id, sum(delivered_token_count)::bigint,
    sum(journalled_token_count - delivered_token_count)::bigint
FROM usage_events
WHERE request_id <> hold_id
GROUP BY 1
"""
TOTALS: LiteralString = """
SELECT (
    SELECT coalesce(sum(input_token_count + billed_token_count + embedding_token_count), 0)::bigint
    FROM usage_events
),
       (SELECT coalesce(sum(token_count), 0)::bigint FROM ledger_entries),
       (SELECT coalesce(sum(token_count), 0)::bigint FROM meter_batches WHERE state = 'delivered')
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of auditing one request, in tokens. `forgiven` ones were journalled but not billed."""

    sent: SentRequest
    billed: int
    forgiven: int = 0

    @property
    def lost(self) -> int:
        """Tokens received that are neither billed nor forgiven."""
        forgiven = min(self.forgiven, UNMARKED_TOKENS_MAX) if self.sent.reported is None else 0
        return max(self.sent.received - self.billed - forgiven, 0)

    @property
    def doubled(self) -> int:
        """Tokens billed beyond those reported in the final frame."""
        return max(self.billed - self.sent.reported, 0) if self.sent.reported is not None else 0

    @property
    def unreceived(self) -> int:
        """Tokens billed that did not reach the client."""
        return max(self.billed - self.sent.received, 0)

    @property
    def problem(self) -> str:
        """Description of the discrepancy; empty if there is none."""
        received, reported = self.sent.received, self.sent.reported
        if (
            self.lost
            or self.doubled
            or self.unreceived
            or (reported is not None and not received == reported == self.billed)
        ):
            return (
                f"request {self.sent.request_id}: {received} received, {reported} reported,"
                f" {self.billed} billed ({self.sent.failure})"
            )
        return ""


async def settle(system: System) -> list[str]:
    """Wait until all work is done. Return descriptions of the work left after the timeout."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    left: list[str] = ["the parts to restart"]
    while left and time.monotonic() < deadline:
        try:
            await system.all_ready()
            left = await asyncio.to_thread(unsettled, system)
        except (TimeoutError, psycopg.OperationalError) as away:
            left = [f"the system to be there: {away}"]
        if left:
            await asyncio.sleep(POLL_S)
    return [f"did not settle within {SETTLE_TIMEOUT_S:.0f} s: {each}" for each in left]


def unsettled(system: System) -> list[str]:
    """List the work that is not done yet."""
    with psycopg.connect(psycopg_conninfo(system.postgres.url), autocommit=True) as connection:
        counts = {
            name: int((connection.execute(query).fetchone() or [0])[0])
            for name, query in WAITING.items()
        }
    left = [f"{count} {name}" for name, count in counts.items() if count]
    if not left and (journals := sum(1 for _ in abandoned_journals(system.directory / JOURNALS))):
        left.append(f"{journals} journals of dead processes")
    return left


def audit(
    database_url: str, directory: Path, sent: Sequence[SentRequest]
) -> tuple[list[Outcome], list[str]]:
    """Compare every request with its usage, compare all sums, run `fsck`, and return discrepancies.

    `directory` has the journals and the exporter's file.
    """
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        events = {
            str(request_id): (int(billed), int(forgiven))
            for request_id, billed, forgiven in connection.execute(EVENTS)
        }
        # Without a usage event, all that was journalled is forgiven.
        voided = {str(request_id) for (request_id,) in connection.execute(VOIDED)}
        used, posted, exported = connection.execute(TOTALS).fetchone() or (0, 0, 0)
    outcomes = [
        Outcome(
            each,
            *events.pop(each.request_id, (0, each.received if each.request_id in voided else 0)),
        )
        for each in sent
    ]
    wrong = [outcome.problem for outcome in outcomes if outcome.problem]
    wrong += [
        f"request {request_id} was not sent by a client: {billed} tokens"
        for request_id, (billed, _) in events.items()
    ]
    filed = sum(exported_quantities(directory / EXPORT_FILE).values())
    if not used == posted == exported == filed:
        wrong.append(
            f"{used} tokens used, {posted} in the ledger, {exported} in delivered batches, {filed}"
            " in the exporter's file"
        )
    wrong += [
        f"{path.name} was refused by recovery" for path in (directory / JOURNALS).glob("*.refused")
    ]
    for verdict in fsck(database_url, CHECKS):
        wrong += [f"{verdict.check.name}: {violation}" for violation in verdict.sample]
    return outcomes, wrong


def exported_quantities(path: Path) -> Counter[uuid.UUID]:
    """Sum the tokens in the exporter's file by identifier. Raises: ValueError for a duplicate."""
    quantities: Counter[uuid.UUID] = Counter()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        entry = json.loads(line)
        identifier = uuid.UUID(entry["identifier"])
        if identifier in quantities:
            raise ValueError(f"{path}: {identifier} is exported twice")
        quantities[identifier] = entry["token_count"]
    return quantities


Printer = Callable[[str], None]


def run(
    rounds: int,
    kills: int,
    seed: int | None,
    engine: str,
    *,
    with_redis: bool,
    directory: Path | None,
    as_json: bool,
) -> bool:
    """Run the rounds and print the report. Return whether every token is accounted for."""
    chosen = random.randrange(2**32) if seed is None else seed
    home = directory or Path(tempfile.mkdtemp(prefix="weir-chaos-"))
    home = home.expanduser().absolute()
    plan = Plan(rounds, chosen, with_redis, kills)
    note(f"seed {chosen}, in {home}")
    began_at = time.monotonic()
    with clear_failures():
        report = asyncio.run(run_rounds(home, chaos_settings(engine), plan, note))
    if as_json:
        print_json(document(report, chosen))
    else:
        print_line(report, time.monotonic() - began_at)
    if report.wrong:
        note(f"data and logs are in {home}")
    elif directory is None:
        shutil.rmtree(home, ignore_errors=True)
    return not report.wrong


def print_line(report: Report, duration_s: float) -> None:
    """Print the table of kills by kind, and the verdict."""
    heads = (
        "killed",
        "kills",
        "requests hit",
        "refused",
        "cut off",
        "received",
        "billed",
        "forgiven",
        "unreceived",
        "lost",
        "doubled",
    )
    made = table(*heads, right=heads[1:])
    rows = {kind: tuple(asdict(row).values()) for kind, row in report.rows().items()}
    for kind, numbers in rows.items():
        made.add_row(kind or "(nothing)", *(f"{number:,}" for number in numbers))
    made.add_row(
        "all", *(f"{sum(numbers):,}" for numbers in zip(*rows.values(), strict=True)), style="bold"
    )
    show(made)
    for name, seconds in report.back_s.items():
        note(f"{name} recovered after {duration_text(seconds)} (median)")
    console = make_console()
    for each in report.wrong[:SHOWN_MAX]:
        console.print(f"[red]wrong[/red] {escape(each)}", soft_wrap=True)
    if len(report.wrong) > SHOWN_MAX:
        console.print(f"… and {len(report.wrong) - SHOWN_MAX:,} more: see --json")
    verdict = (
        "[red]discrepancies found[/red]"
        if report.wrong
        else "[green]every token is accounted for, once[/green]"
    )
    console.print(f"{len(report.kills):,} kills in {duration_text(duration_s)}: {verdict}.")


def document(report: Report, seed: int) -> dict[str, object]:
    """Convert the report for `--json`."""
    rows = [{"killed": kind, **asdict(row)} for kind, row in report.rows().items()]
    return {
        "sound": not report.wrong,
        "seed": seed,
        "kill_count": len(report.kills),
        "rows": rows,
        "wrong": report.wrong,
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: a number of rounds with `kills_per_round` kills each.

    `kinds` are the kinds of kills to use; if empty, all are, with the probabilities in `WEIGHTS`.
    """

    rounds: int
    seed: int
    with_redis: bool = False
    kills_per_round: int = KILLS_PER_ROUND
    kinds: tuple[Kind, ...] = ()


@dataclass(slots=True)
class Row:
    """Effect of one kind of kill on the requests that ran, in tokens.

    `refused` counts requests without output and usage, `cut_off` those with usage but no final
    frame.
    """

    kills: int = 0
    requests: int = 0
    refused: int = 0
    cut_off: int = 0
    received: int = 0
    billed: int = 0
    forgiven: int = 0
    unreceived: int = 0
    lost: int = 0
    doubled: int = 0

    def add(self, outcome: Outcome) -> None:
        self.requests += 1
        if outcome.sent.reported is None:
            traceless = not outcome.sent.received and not outcome.billed
            self.refused += traceless
            self.cut_off += not traceless
        self.received += outcome.sent.received
        self.billed += outcome.billed
        self.forgiven += outcome.forgiven
        self.unreceived += outcome.unreceived
        self.lost += outcome.lost
        self.doubled += outcome.doubled


@dataclass(slots=True)
class Report:
    """Result of a run. `back_s` has the median outage of each process, in seconds."""

    kills: list[Kill] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    back_s: dict[str, float] = field(default_factory=dict)

    def rows(self) -> dict[Kind | None, Row]:
        """Sum the outcomes by kind of kill, None for no kill. Only a request's first one counts."""
        rows: dict[Kind | None, Row] = {kind: Row() for kind in (*Kind, None)}
        for kill in self.kills:
            rows[kill.kind].kills += 1
        for outcome in self.outcomes:
            rows[first_kill(self.kills, outcome)].add(outcome)
        return {kind: row for kind, row in rows.items() if row.kills or row.requests}


def first_kill(kills: Iterable[Kill], outcome: Outcome) -> Kind | None:
    """Find the first kill while a request ran; None if there was none."""
    sent = outcome.sent
    for kill in kills:
        if sent.began_at <= kill.at <= sent.ended_at and kill.api in (None, sent.api):
            return kill.kind
    return None


async def run_rounds(
    directory: Path, settings: Settings, plan: Plan, print_line: Printer
) -> Report:
    """Run all rounds with API processes of these settings; stop after the first discrepancy.

    Raises: StackFailed, PostgresNotStarted.
    """
    rng = random.Random(plan.seed)
    report = Report()
    async with contextlib.AsyncExitStack() as opened:
        system = await opened.enter_async_context(
            running_system(directory, settings, with_redis=plan.with_redis)
        )
        sent = Load(
            [await opened.enter_async_context(Wire(api.address).open()) for api in system.apis],
            system.connection.api_key,
            next(iter(settings.models.directories)),
            rng,
        )
        for number in range(plan.rounds):
            kills = await one_round(system, sent, plan, rng, report)
            outcomes, wrong = await asyncio.to_thread(
                audit, system.postgres.url, directory, sent.sent
            )
            report.outcomes = outcomes
            report.wrong += wrong + [death for part in system.parts for death in part.deaths]
            names = "; ".join(kill.kind for kill in kills)
            print_line(
                f"round {number + 1}: {names}; {len(sent.sent):,} requests, {sent.received:,}"
                " tokens received so far"
            )
            if report.wrong:
                break
        downs = {
            "API process": [s for api in system.apis for s in api.down_s],
            "PostgreSQL": system.down_s,
        }
        report.back_s = {
            name: statistics.median(seconds) for name, seconds in downs.items() if seconds
        }
    return report


async def one_round(
    system: System, load: Load, plan: Plan, rng: random.Random, report: Report
) -> Sequence[Kill]:
    """Run load and kills, then wait until all work is done. The report gets unfinished work."""
    kills: list[Kill] = []
    before = load.received
    async with asyncio.TaskGroup() as tasks:
        clients = tasks.create_task(load.run(), name="clients")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await load.reached(before + TOKENS_BEFORE)
                while len(kills) < plan.kills_per_round:
                    await asyncio.sleep(rng.uniform(*BETWEEN_KILLS_S))
                    weights = dict.fromkeys(plan.kinds, 1) or WEIGHTS
                    kind = rng.choices(list(weights), list(weights.values()))[0]
                    if (kill := await strike(system, kind, rng)) is not None:
                        kills.append(kill)
                load.stop()
                await clients
        except TimeoutError:
            report.wrong.append(
                f"clients still waited for responses {LOAD_TIMEOUT_S:.0f} s after the round began"
            )
            clients.cancel()
    report.kills += kills
    report.wrong += await settle(system)
    return kills


def chaos_settings(engine: str) -> Settings:
    """Build the settings of the API processes: the engine, and limits that are often reached."""
    return Settings().having(**BOUNDS, **ENGINES[engine])


class Kind(StrEnum):
    """Kind of kill. The signal is SIGKILL unless the value says otherwise."""

    API = "API process"
    ENGINE = "engine worker"
    API_AND_ENGINE = "API process and its engine"
    WORKER = "worker"
    EXPORTER = "exporter"
    POSTGRES = "PostgreSQL"
    POSTGRES_IMMEDIATE = "PostgreSQL, immediate shutdown"
    POSTGRES_BACKEND = "one PostgreSQL backend"
    BROKER = "broker, with all messages"
    EVERYTHING = "everything at once"


# Weights of the random choice. API, engine and database have the longest recovery paths.
WEIGHTS = {
    Kind.API: 5,
    Kind.ENGINE: 4,
    Kind.API_AND_ENGINE: 2,
    Kind.WORKER: 3,
    Kind.EXPORTER: 2,
    Kind.POSTGRES: 3,
    Kind.POSTGRES_IMMEDIATE: 2,
    Kind.POSTGRES_BACKEND: 2,
    Kind.BROKER: 2,
    Kind.EVERYTHING: 1,
}

OF_ONE_API = (Kind.API, Kind.ENGINE, Kind.API_AND_ENGINE)


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill of a process. `api` is the index of the API process that it affects, None for all."""

    kind: Kind
    at: float
    api: int | None = None


async def strike(system: System, kind: Kind, rng: random.Random) -> Kill | None:
    """Kill a process and describe the kill; None if the process was down already."""
    api = aim(system, rng)
    kill = Kill(kind, time.monotonic(), api if kind in OF_ONE_API else None)
    match kind:
        case Kind.API:
            done = system.apis[api].kill()
        case Kind.ENGINE:
            done = kill_process(system.engine_pid(api))
        case Kind.API_AND_ENGINE:
            done = kill_process(system.engine_pid(api)) and system.apis[api].kill()
        case Kind.WORKER:
            done = system.worker.kill()
        case Kind.EXPORTER:
            done = system.exporter.kill()
        case Kind.BROKER:
            system.lose_broker()
            done = True
        case Kind.POSTGRES_BACKEND:
            done = kill_backend(system, rng)
        case Kind.POSTGRES:
            done = await system.end_postgres()
        case Kind.POSTGRES_IMMEDIATE:
            done = await system.end_postgres(at_once=True)
        case Kind.EVERYTHING:
            engines = [system.engine_pid(index) for index in range(len(system.apis))]
            for part in system.parts:
                part.kill()
            for engine in engines:
                kill_process(engine)
            system.lose_broker()
            done = await system.end_postgres()
    return kill if done else None


def aim(system: System, rng: random.Random) -> int:
    """Choose an API process: mostly one that is ready, sometimes one that is starting."""
    up = [index for index, api in enumerate(system.apis) if api.up]
    return (
        rng.choice(up) if up and rng.random() < AT_WORK_SHARE else rng.randrange(len(system.apis))
    )


def kill_backend(system: System, rng: random.Random) -> bool:
    """Kill one of PostgreSQL's child processes, so that the server restarts all and recovers."""
    pid = system.postgres.pid
    children = children_of(pid) if pid is not None else []
    return kill_process(rng.choice(children)) if children else False


def kill_process(pid: int | None) -> bool:
    """Send SIGKILL to a process and return whether it existed."""
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
