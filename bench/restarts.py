"""Seconds until each process of `weir up` works again after `kill -9` under load.

    python -m bench.restarts [--rounds 3] [--clients 3]

Finds the processes in the process tree. Each round kills every one of them in turn, and waits until
another is ready in its place and a request sent after the kill is answered. Beside it stand a start
of the whole in the same run, and the processor time that the new processes took: on a busy machine
the seconds grow with the load, processor time hardly. Byte code is cached, as after an
installation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2

from api.cli.stack import STACK_HOME, WORKER_READY, written_pid
from api.core.endpoint import read_endpoint
from api.core.settings import DEMO_MODEL_NAME
from bench.harness import Bench, Case, Cases, Figure, Values, main
from bench.site import cpu_s
from common.processes import command_line, descendants, started_with
from metering.store.embedded_postgres import EmbeddedPostgres

POLL_S = 0.1  # looking more often would take the processor from what starts
PATIENCE_S = 180.0
QUIET_S = 3.0  # between two kills
LOCK_FILE = ".up.lock"


class Up:
    """Running `weir up` with its own home directory, and clients that send requests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        own = {"WEIR_HOME": str(home), "WEIR_LISTEN": "127.0.0.1:0"}
        cached = {"PYTHONPYCACHEPREFIX": str(home.parent / "bytecode")}
        outer = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
        outer.pop("PYTHONDONTWRITEBYTECODE", None)
        with (home / "up.log").open("ab") as log:
            command = [sys.executable, "-m", "weir_cli", "up"]
            self.process = subprocess.Popen(
                command, env={**outer, **own, **cached}, stdout=log, stderr=log
            )
        self.answered_sent_at = -1.0  # sending time of the latest request that was answered

    def parts(self) -> dict[str, int]:
        """Find the processes, by command.

        Leaves out PostgreSQL's children, and the guard, whose command is that of the supervisor.
        """
        postmaster = EmbeddedPostgres(self.home / "postgres", self.home).pid
        own = started_with(STACK_HOME, str(self.home))
        below = descendants(self.process.pid, *own)
        pids = [*([] if postmaster is None else [postmaster]), *below, *own]
        return {re.sub(r"^\S+/| --.*", "", command_line(pid)).strip(): pid for pid in pids}

    def is_ready(self, pid: int) -> bool:
        """Return whether a process reports that it is ready."""
        served = read_endpoint(self.home)
        ready = {written_pid(self.home / name) for name in (WORKER_READY, LOCK_FILE)}
        return pid in ready or (served.serving and served.pid == pid)

    async def send(self) -> None:
        """Send one request after the other until cancelled."""
        message = {"role": "user", "content": "Hello"}
        body = {"model": DEMO_MODEL_NAME, "messages": [message], "max_tokens": 20}
        async with httpx2.AsyncClient(timeout=30.0) as client:
            while True:
                sent_at = time.monotonic()
                with contextlib.suppress(httpx2.HTTPError, OSError, ValueError):
                    key = json.loads((self.home / "connection.json").read_text())["api_key"]
                    url = f"{read_endpoint(self.home).openai_url}/chat/completions"
                    headers = {"authorization": f"Bearer {key}"}
                    answer = await client.post(url, headers=headers, json=body)
                    if answer.status_code == 200:
                        self.answered_sent_at = max(self.answered_sent_at, sent_at)
                        continue
                await asyncio.sleep(POLL_S)

    async def answered(self, since: float) -> None:
        """Wait until a request that was sent after `since` is answered."""
        await until(lambda: self.answered_sent_at > since, "a request to be answered")

    async def kill(self, name: str) -> tuple[float, float]:
        """Kill a process, and wait until another does its work. Return seconds and CPU seconds."""
        parts = self.parts()
        pid, was_ready, at = parts[name], self.is_ready(parts[name]), time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            now = self.parts().get(name, pid)
            return now != pid and (not was_ready or self.is_ready(now))

        await asyncio.gather(self.answered(at), until(is_back, f"`{name}` to be back"))
        new = [each for each in self.parts().values() if each not in parts.values()]
        return time.monotonic() - at, cpu_s(new)


async def until(true: Callable[[], bool], what: str) -> None:
    """Poll until a condition is true. Raises: TimeoutError naming `what`."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s for {what}")
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def running(home: Path, client_count: int) -> AsyncIterator[tuple[Up, float]]:
    """Start everything, and yield it under load with the seconds until the first answer."""
    at, up = time.monotonic(), Up(home)
    try:
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(up.send()) for _ in range(client_count)]
            await up.answered(at)
            yield up, time.monotonic() - at
            for client in clients:
                client.cancel()
    finally:
        up.process.terminate()
        await asyncio.to_thread(up.process.wait)


@contextlib.asynccontextmanager
async def prepare(options: argparse.Namespace) -> AsyncIterator[Cases]:
    """Start everything, and yield a case for each process."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as directory:
        home = Path(directory) / "home"
        home.mkdir()
        async with running(home, 1):
            pass  # creates the database and the byte code
        async with running(home, options.clients) as (up, start_s):

            def case(name: str) -> Case:
                async def killed() -> Values:
                    await asyncio.sleep(QUIET_S)
                    back_s, used_s = await up.kill(name)
                    return {"back_s": back_s, "used_s": used_s}

                return Case(name, {"start of all": lambda: {"back_s": start_s}, "killed": killed})

            yield [case(name) for name in up.parts()]


FIGURES = {
    "back_s": Figure("until answered, s", ",.1f"),
    "used_s": Figure("processor time, s", ",.1f"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    parser.add_argument("--clients", type=int, default=3)


BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
