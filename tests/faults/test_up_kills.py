"""`weir up` restarts what it started: each process is killed under load, and no hand is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.core.endpoint import read_endpoint
from common.processes import alive, command_line, descendants, parents, started_with
from metering.store import embedded_postgres
from tests.conftest import ask, new_home, remove_home
from tests.metering.invariants import check_invariants
from tests.service import MODEL, until, wait_for

pytestmark = pytest.mark.faults

CLIENTS = 3
TOKENS = 20
PAUSE_S = 0.1  # after each answer: otherwise the engine computes all the time
SECRETS = {"STRIPE_API_KEY": "sk_test_canary", "WEIR_STRIPE_WEBHOOK_SECRET": "whsec_canary"}
SCAN_S = 0.1  # between two looks at all processes of the machine, which take 10 ms of CPU
# PostgreSQL's processes of one connection or one task, and the programs that start it.
PASSING = re.compile(
    r"\[local\]|worker process|autovacuum worker|startup|initdb|pg_ctl|postgres: ?$"
)


class Up:
    """A running `weir up`."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Return the output of all its runs."""
        return (self.home / "up.log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until its api process serves."""
        with (self.home / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weir_cli", "up"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(self._has_started, "weir up", poll_s=SCAN_S)

    def _has_started(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        served = read_endpoint(self.home)
        try:
            written = json.loads((self.home / "connection.json").read_text())
        except FileNotFoundError:
            return False
        return self.api == served.pid and bool(written["address"] == served.address)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def api(self) -> int | None:
        return self._child("-m api")

    @property
    def worker(self) -> int | None:
        return self._child("celery")

    @property
    def engine(self) -> int | None:
        """The engine worker."""
        return next(iter(self._engines()), None)

    def _engines(self) -> list[int]:
        """Return the engine workers, which outlive the api process that has started them."""
        found = []
        for path in (self.home / "engines").glob("*.lock"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(json.loads(path.read_text())["pid"])
        return [pid for pid in found if "torch_worker" in command_line(pid)]

    @property
    def postmaster(self) -> int | None:
        """PostgreSQL's first process."""
        server = embedded_postgres.EmbeddedPostgres(self.home / "postgres", self.home)
        return server.pid

    def _child(self, command: str) -> int | None:
        return next((pid for pid in self.tree() if command in command_line(pid)), None)

    def tree(self) -> list[int]:
        """Return all its processes, whatever their parents are now, from the first one on."""
        own = [*started_with("WEIR_HOME", str(self.home)), *self._engines()]
        tops = [*own, *([] if self.postmaster is None else [self.postmaster])]
        return list(filter(alive, [*tops, *descendants(*tops)]))

    @property
    def guard(self) -> int | None:
        """The process that nothing else of it has started."""
        commands, above = self._commands(), parents()
        return next((pid for pid in commands if above.get(pid) not in commands), None)

    @property
    def supervisor(self) -> int | None:
        commands, above = self._commands(), parents()
        return next((pid for pid in commands if above.get(pid) in commands), None)

    def _commands(self) -> list[int]:
        return [pid for pid in self.tree() if "weir_cli up" in command_line(pid)]

    def kinds(self) -> dict[str, list[int]]:
        """Return the lasting processes by command, without PostgreSQL's for connections."""
        found: dict[str, list[int]] = {}
        for pid in self.tree():
            kind = re.sub(r"--fd \d+", "", command_line(pid)).strip("\0 ")
            if kind and not PASSING.search(kind):
                found.setdefault(kind, []).append(pid)
        return found

    @property
    def database_url(self) -> str:
        return embedded_postgres.start(self.home / "postgres").url

    def end(self) -> None:
        """Kill all of it, whatever a failed test left."""
        # Again, because a supervisor may have restarted what was killed before it.
        while left := [pid for pid in self.tree() if "postgres" not in command_line(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        if self.postmaster is not None:
            embedded_postgres.start(self.home / "postgres").stop("immediate")


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[Up]:
    """Yield `weir up` of the module's tests, with secrets that no request needs."""
    home = new_home()
    outer = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    environment = {
        **outer,
        "WEIR_HOME": str(home),
        "WEIR_MODELS": f"{MODEL}={model}",
        "WEIR_ENGINE_THREADS": "1",
        "WEIR_LISTEN": "127.0.0.1:0",
        "WEIR_DATABASE_UNREADY_AFTER_S": "0.5",
        "WEIR_STRIPE_WEBHOOK_LISTEN": "127.0.0.1:0",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        **SECRETS,
    }
    stack = Up(home, environment)
    yield stack
    stack.end()
    remove_home(home)


@pytest.fixture
def up(stack: Up) -> Iterator[Up]:
    """Yield it, running: tests that leave it whole save the next one its start of 5 s of CPU."""
    try:
        if not all((stack.guard, stack.supervisor, stack.api, stack.worker, stack.postmaster)):
            stack.end()
            stack.start()
        yield stack
    except BaseException:
        sys.stdout.write(stack.log[-6000:])
        raise


@dataclass
class Load:
    """Requests of several clients. whole: tokens of the answers received whole, by request id."""

    url: Callable[[], str]
    key: str
    whole: dict[str, int] = field(default_factory=dict)
    begun_at: list[float] = field(default_factory=list)  # of the whole ones

    async def client(self) -> None:
        async with httpx2.AsyncClient(timeout=30.0) as client:
            while True:
                began_at = time.monotonic()
                with contextlib.suppress(httpx2.HTTPError, ValueError):
                    answer = await client.post(
                        f"{self.url()}/chat/completions",
                        headers={
                            "authorization": f"Bearer {self.key}",
                            "idempotency-key": str(uuid.uuid4()),
                        },
                        json={
                            "model": MODEL,
                            "messages": [{"role": "user", "content": "a"}],
                            "max_tokens": TOKENS,
                            "ignore_eos": True,
                        },
                    )
                    if answer.status_code == 200:
                        tokens = answer.json()["usage"]["completion_tokens"]
                        self.whole[answer.headers["x-request-id"]] = tokens
                        self.begun_at.append(began_at)
                await asyncio.sleep(PAUSE_S)

    async def answered_again(self, since: float) -> float:
        """Wait for a whole answer to a request sent after a moment; return how long it took."""
        await until(lambda: any(at > since for at in self.begun_at), "a request to be answered")
        return time.monotonic() - since


@asynccontextmanager
async def load_on(up: Up) -> AsyncIterator[Load]:
    key = json.loads((up.home / "connection.json").read_text())["api_key"]
    load = Load(lambda: read_endpoint(up.home).openai_url, key)
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(load.client()) for _ in range(CLIENTS)]
        await load.answered_again(time.monotonic())
        yield load
        for client in clients:
            client.cancel()


def killed(up: Up, *pids: int | None) -> float:
    """Kill processes with SIGKILL; return when."""
    at = time.monotonic()
    for pid in pids:
        assert pid is not None, "it runs"
        os.kill(pid, signal.SIGKILL)
    return at


async def check_database(up: Up, load: Load) -> None:
    """Check that each whole answer is in exactly one usage event, and that all books are right."""
    url = await asyncio.to_thread(lambda: up.database_url)
    held = "SELECT count(*) FROM holds WHERE state = 'held'"
    await until(lambda: ask(url, held).fetchone() == (0,), "all holds to end")
    rows: list[Any] = ask(
        url,
        "SELECT h.request_id::text, sum(u.delivered_token_count), count(*)"
        " FROM usage_events AS u JOIN holds AS h ON h.id = u.hold_id GROUP BY 1",
    ).fetchall()
    billed = {request_id: (int(tokens), count) for request_id, tokens, count in rows}
    assert {each: billed.get(each) for each in load.whole} == {
        each: (tokens, 1) for each, tokens in load.whole.items()
    }
    check_invariants(url, all_ended=True)


def test_a_process_has_only_its_own_secrets(up: Up) -> None:
    endpoint = up._child("stripe webhooks")

    def has(pid: int | None) -> set[str]:
        assert pid is not None
        environment = Path(f"/proc/{pid}/environ").read_text()
        return {name for name, value in SECRETS.items() if value in environment}

    assert has(up.api) == set()
    assert has(up.worker) == {"STRIPE_API_KEY"}
    assert has(endpoint) == {"WEIR_STRIPE_WEBHOOK_SECRET"}


async def test_weir_up_killed_as_a_whole_leaves_nothing_to_do_but_to_start_it(up: Up) -> None:
    """Its api process, worker and engine are ended, and its PostgreSQL is taken over."""
    async with load_on(up) as load:
        left = [up.api, up.worker, up.engine]
        postmaster = up.postmaster
        assert up.guard is not None
        os.kill(up.guard, signal.SIGSTOP)
        killed(up, up.supervisor, up.guard)
        assert up.process is not None
        up.process.wait()
        assert any(alive(pid) for pid in left if pid is not None), "its children go on"

        await asyncio.to_thread(up.start)

        await load.answered_again(time.monotonic())

    await until(lambda: not any(alive(pid) for pid in left if pid is not None), "the old to end")
    assert up.postmaster == postmaster, "PostgreSQL is taken over"
    await check_database(up, load)


async def test_each_process_that_is_killed_under_load_comes_back_without_help(up: Up) -> None:
    """Every process of the tree, `weir up` too: its guard and its supervisor run one command."""
    outages_s: dict[str, float] = {}
    async with load_on(up) as load:
        whole = {kind: len(pids) for kind, pids in up.kinds().items()}

        def is_whole(without: int) -> bool:
            kinds = up.kinds()
            lasting = {kind: len(pids) for kind, pids in kinds.items()}
            return lasting == whole and not any(without in pids for pids in kinds.values())

        victims = [(kind, at) for kind, count in whole.items() for at in range(count)]
        assert {up.guard, up.supervisor, up.api, up.worker, up.engine, up.postmaster} <= {
            up.kinds()[kind][at] for kind, at in victims
        }
        for kind, at in victims:
            pid = up.kinds()[kind][at]
            outages_s[f"{kind} {at}"] = await load.answered_again(killed(up, pid))
            await until(lambda: is_whole(without=pid), kind, SCAN_S)  # noqa: B023
        # Everything at once, and then what has just begun to start.
        api = up.api
        began_at = killed(up, up.supervisor, up.engine, api, up.worker, up.postmaster)
        await until(lambda: up.api not in (None, api) and up.postmaster, "both to start", SCAN_S)
        killed(up, up.api, up.postmaster)
        outages_s["all, twice"] = await load.answered_again(began_at)
        await until(lambda: up.worker is not None, "the worker", SCAN_S)
    print({name[-60:]: round(outage_s, 1) for name, outage_s in outages_s.items()})

    await check_database(up, load)
    assert "PostgreSQL ended; starting it again" in up.log


async def test_parts_serve_on_while_weir_up_is_replaced_and_end_with_it(up: Up) -> None:
    async with load_on(up) as load:
        parts = up.api, up.worker, up.engine, up.postmaster
        for name in ("supervisor", "guard", "guard"):
            left = up.guard, up.supervisor
            killed(up, getattr(up, name))
            await until(
                lambda: up.supervisor not in (None, *left) and up.guard is not None,  # noqa: B023
                f"the {name}",
                SCAN_S,
            )
        supervises = up.home / ".up.lock"
        await until(lambda: supervises.read_text() == str(up.supervisor), "it to supervise", SCAN_S)
        await load.answered_again(time.monotonic())
    assert parts == (up.api, up.worker, up.engine, up.postmaster)
    await check_database(up, load)

    again = await asyncio.to_thread(weir_up_again, up)
    assert again.returncode == 1
    assert f"already running in {up.home}" in again.stdout
    assert f"`kill {up.supervisor}`" in "".join(again.stdout.splitlines())
    assert up.guard is not None
    os.kill(up.guard, signal.SIGTERM)
    await until(lambda: not up.tree(), "everything to end", SCAN_S)


def weir_up_again(up: Up) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weir_cli", "up"],
        env=up._environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_what_a_supervisor_leaves_that_is_killed_while_it_stops_is_ended(up: Up) -> None:
    assert up.supervisor is not None
    os.kill(up.supervisor, signal.SIGSTOP)
    os.kill(up.pid, signal.SIGTERM)
    killed(up, up.supervisor)

    wait_for(lambda: not up.tree(), "everything to end", poll_s=SCAN_S)
