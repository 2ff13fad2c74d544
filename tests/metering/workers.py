"""Real worker processes and brokers for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from metering.worker import worker_command
from tests.forks import Forked, Server

# Forked from a process that has imported a worker's modules except those that read settings.
FORKED_WORKERS = Server(
    *(
        "celery.bin.celery",
        "celery.bin.worker",
        "celery.beat",
        "celery.worker.components",
        "celery.concurrency.solo",
    ),
    *(
        "kombu.transport.redis",
        "metering.worker",
        "metering.alerts.webhooks",
        "metering.export.deliveries",
    ),
    *(
        "metering.holds.recovery",
        "metering.ledger.rating",
        "metering.plans.prepaid",
        "metering.receipts.signing",
    ),
)
PATIENCE_S = 60.0  # far above every duration here on a busy machine
POLL_S = 0.02

# Messages of a healthy worker: its end, and the return of a message that it had taken.
WELL = ("worker: Warm shutdown", "Requeuing undeliverable message")


@dataclass(slots=True)
class Worker:
    """Worker process and its log."""

    process: subprocess.Popen[bytes] | Forked
    log: Path

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Terminate it; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def worker(
    home: Path,
    database_url: str,
    broker: Mapping[str, str],
    name: str = "worker",
    *,
    clock: bool = True,
    may_log: Sequence[str] = (),
) -> Iterator[Worker]:
    """Run a worker during the block; its log must hold no error.

    clock: its schedule. may_log: parts of lines that are not errors here.
    """
    command = [part for part in worker_command() if clock or part != "--clock"]
    log = home / f"{name}.log"
    environment = {
        **os.environ,
        "WEIR_HOME": str(home),
        "WEIR_DATABASE_URL": database_url,
        **broker,
    }
    log.unlink(missing_ok=True)
    process = FORKED_WORKERS.start(command, environment, log) or execute(command, environment, log)
    running = Worker(process, log)
    try:
        yield running
        if process.poll() is None:
            status = running.stop()
            complaints = [
                line
                for line in log.read_text().splitlines()
                if line and not any(well in line for well in (*WELL, *may_log))
            ]
            assert (status, complaints) == (0, [])
    finally:
        if process.poll() is None:
            running.kill()
        sys.stdout.write(log.read_text())


def execute(
    command: list[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a worker in a new interpreter."""
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that another process brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(POLL_S)


@contextmanager
def redis_server(home: Path) -> Iterator[dict[str, str]]:
    """Run Redis on a Unix socket in a directory; yield the environment of a worker for it.

    The directory's path must be short, like that of every socket.
    """
    binary = shutil.which("redis-server")
    assert binary is not None
    socket = home / "redis.sock"
    arguments = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(home))
    process = subprocess.Popen(
        [binary, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(socket.exists, "Redis")
        yield {"WEIR_BROKER_URL": f"redis+socket://{socket}"}
    finally:
        process.terminate()
        process.wait()
