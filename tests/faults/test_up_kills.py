"""`weir up` restarts what it started: each process is killed under load, and no hand is needed."""

from __future__ import annotations

import asyncio
import json
import os
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
from common.processes import alive, children_of, command_line, descendants
from metering.store import embedded_postgres
from tests.conftest import ask
from tests.metering.invariants import check_invariants
from tests.service import MODEL, until, wait_for

pytestmark = pytest.mark.faults

CLIENTS = 3
TOKENS = 20


class Up:
    """A running `weir up`."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self.home = home
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self._families: set[int] = set()

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
        wait_for(self._has_started, "weir up")

    def _has_started(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        self._families.update(descendants(self.process.pid))
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
        api = self.api
        workers = [] if api is None else children_of(api)
        return next((pid for pid in workers if "torch_worker" in command_line(pid)), None)

    @property
    def postmaster(self) -> int | None:
        """PostgreSQL's first process."""
        server = embedded_postgres.EmbeddedPostgres(self.home / "postgres", self.home)
        return server.pid

    def _child(self, command: str) -> int | None:
        each = (pid for pid in children_of(self.pid) if command in command_line(pid))
        return next(each, None)

    @property
    def database_url(self) -> str:
        return embedded_postgres.start(self.home / "postgres").url

    def end(self) -> None:
        """Kill all of it, whatever a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self._families.update(descendants(self.pid))
            self.process.kill()
            self.process.wait()
        for pid in self._families:
            if alive(pid) and any(
                name in command_line(pid) for name in ("api", "celery", "weir_cli")
            ):
                os.kill(pid, signal.SIGKILL)
        embedded_postgres.start(self.home / "postgres").stop("immediate")


@pytest.fixture
def up(postgres_home: Path, model: Path) -> Iterator[Up]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    environment = {
        **outer,
        "WEIR_HOME": str(postgres_home),
        "WEIR_MODELS": f"{MODEL}={model}",
        "WEIR_ENGINE_THREADS": "1",
        "WEIR_LISTEN": "127.0.0.1:0",
        "WEIR_DATABASE_UNREADY_AFTER_S": "0.5",
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
    stack = Up(postgres_home, environment)
    try:
        stack.start()
        yield stack
    except BaseException:
        sys.stdout.write(stack.log[-6000:])
        raise
    finally:
        stack.end()


@dataclass
class Load:
    """Requests of several clients. whole: tokens of the answers received whole, by request id."""

    url: Callable[[], str]
    key: str
    whole: dict[str, int] = field(default_factory=dict)
    begun_at: list[float] = field(default_factory=list)  # of the whole ones

    async def client(self) -> None:
        while True:
            began_at = time.monotonic()
            try:
                async with httpx2.AsyncClient(timeout=30.0) as client:
                    answer = await client.post(
                        f"{self.url()}/chat/completions",
                        headers={
                            "authorization": f"Bearer {self.key}",
                            "x-request-id": str(uuid.uuid4()),
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
                        continue
            except (httpx2.HTTPError, ValueError):
                pass
            await asyncio.sleep(0.05)  # after a failure

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


async def check_books(up: Up, load: Load) -> None:
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


async def test_each_process_that_is_killed_under_load_comes_back_without_a_hand(up: Up) -> None:
    outages_s: dict[str, float] = {}
    async with load_on(up) as load:
        for name in ("postmaster", "api", "worker", "engine"):
            outages_s[name] = await load.answered_again(killed(up, getattr(up, name)))
            await until(lambda: getattr(up, name) is not None, f"the {name}")  # noqa: B023
        # Everything at once, and then what has just begun to start.
        api = up.api
        at = killed(up, up.engine, api, up.worker, up.postmaster)
        await until(lambda: up.api not in (None, api) and up.postmaster, "both to start")
        killed(up, up.api, up.postmaster)
        outages_s["all, twice"] = await load.answered_again(at)
        await until(lambda: up.worker is not None, "the worker")
    print({name: round(outage_s, 1) for name, outage_s in outages_s.items()})

    await check_books(up, load)
    assert "PostgreSQL ended; starting it again" in up.log


async def test_a_killed_weir_up_is_followed_by_another_without_a_hand(up: Up) -> None:
    """Its api process, worker and engine are ended, and its PostgreSQL is taken over."""
    async with load_on(up) as load:
        left = descendants(up.pid)
        postmaster = up.postmaster
        at = killed(up, up.pid)
        assert up.process is not None
        up.process.wait()
        assert any(map(alive, left)), "its children go on"

        await asyncio.to_thread(up.start)

        outage_s = await load.answered_again(at)
    print(f"killed `weir up`: {outage_s:.1f} s")

    await until(lambda: not any(map(alive, left)), "what was left to end")
    assert up.postmaster == postmaster, "PostgreSQL is taken over"
    await check_books(up, load)


def test_a_process_has_no_secret_that_only_another_one_needs(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    up.end()
    secrets = {"STRIPE_API_KEY": "sk_test_canary", "WEIR_STRIPE_WEBHOOK_SECRET": "whsec_canary"}
    up._environment.update(secrets, WEIR_STRIPE_WEBHOOK_LISTEN="127.0.0.1:0")
    up.start()
    endpoint = up._child("stripe webhooks")

    def has(pid: int | None) -> set[str]:
        assert pid is not None
        environment = Path(f"/proc/{pid}/environ").read_text()
        return {name for name, value in secrets.items() if value in environment}

    assert has(up.api) == set()
    assert has(up.worker) == {"STRIPE_API_KEY"}
    assert has(endpoint) == {"WEIR_STRIPE_WEBHOOK_SECRET"}
