"""Effect of a hostile key on other clients: latency of a bystander and an administrator, and memory
of the process.

    python -m bench.adversary [--seconds 60] [--only KIND]... [--each] [--directory /dev/shm]

One api process, one database, three phases of `--seconds`: quiet, one hostile key with a monthly
quota of zero, one hostile key with ordinary quotas. The attacker uses every frame kind, every RPC
and every HTTP path with hostile sizes, counts, characters and values (`bench.adversary_attacks`),
as fast as it is answered. Meanwhile another organization streams and sends short requests, and an
administrator lists live requests and keys and scrapes the metrics every second. `--only` restricts
the attack to one kind; `--each` runs the kinds one after the other. A second model is on a hostile
upstream server (`bench.hostile_upstream`), a process of its own.

The api process has a core of its own. The other core runs PostgreSQL, the worker of the simulated
engine, the bystander and the attacker, each in its own process; the attacker has a low priority, so
that it does not take the bystander's CPU. All traffic is on loopback. The exit status is 1 if the
bystander or the administrator saw an error, the process ended, or anything was answered with
INTERNAL; the latencies are only printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import uvloop

from api.core.settings import Settings, bundled_models
from bench.adversary_attacks import ATTACKS, BROKEN, UPSTREAM, Target
from bench.adversary_load import ATTACKER_NICE
from bench.harness import Bench, Case, Cases, Figure, Results, Values, main, note
from bench.site import (
    MODEL,
    add_site_options,
    children_of,
    cpu_s,
    create_keys,
    is_serving,
    new_site,
    on_core,
    pin,
    quantile,
    wait_for,
)
from bench.streams import scale
from metering.store.db import psycopg_conninfo
from metering.tenants.authentication import hash_of

STREAMS, PROBES = 8, 2
QUIET, NO_QUOTA, QUOTA = "quiet", "quota 0", "normal quota"
ORDINARY_QUOTAS = {
    "concurrent_requests": 20,
    "requests_per_minute": 600,
    "tokens_per_minute": 200_000,
    "tokens_per_month": 100_000_000,
}
MAIN = {
    "itl_p99": Figure("ITL p99, ms", ",.1f"),
    "itl_p50": Figure("ITL p50, ms", ",.1f"),
    "itl_worst": Figure("ITL worst, ms", ",.1f"),
    "ttft_p50": Figure("TTFT p50, ms", ",.1f"),
    "ttft_p99": Figure("TTFT p99, ms", ",.1f"),
}
ADMIN = {
    "live_requests": "ListLiveRequests",
    "keys": "ListApiKeys",
    "metrics": "metrics",
    "livez": "livez",
}
FAULTS = {"errors": "bystander's errors", "restarts": "restarts", "internal": "INTERNAL, incidents"}
FIGURES = {
    **MAIN,
    **{
        f"{key}_{share}": Figure(f"{label} {share}"[:23], ",.1f")
        for key, label in ADMIN.items()
        for share in ("p50", "worst")
    },
    "peak_mib": Figure("peak memory, MiB", ",.0f", "difference"),
    "busy": Figure("api core busy", ".0%", "no"),
    **{key: Figure(label, compared="no") for key, label in FAULTS.items()},
    "answers": Figure("answers to the attacker", compared="no"),
}
CALM_MAX_S = 60.0  # limit between phases, for the attacker's requests to end
CALM_ANSWER_S = 0.2  # limit of a health check


class Service:
    """Api process under attack, which is restarted if it exits."""

    def __init__(self, settings: Settings, core: int, other_core: int) -> None:
        self._settings = settings
        self._core = core
        self._other_core = other_core
        self._log = settings.home / "api.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self.restart_count = 0

    @property
    def pid(self) -> int:
        """Id of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Run the process, and restart it if it exits, until the block ends."""
        try:
            await asyncio.to_thread(self._start)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._supervise())
                try:
                    yield self
                finally:
                    self._stop()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    async def _supervise(self) -> None:
        while True:
            assert self._process is not None
            await asyncio.to_thread(self._process.wait)
            if self._stopping:
                return
            self.restart_count += 1
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        with self._log.open("ab") as out:
            environment = {**os.environ, **self._settings.to_environment()}
            self._process = on_core(
                self._core, [sys.executable, "-m", "api"], env=environment, stdout=out, stderr=out
            )
        wait_for(
            lambda: is_serving(self._settings.listen.address) or None, self._process, self._log
        )
        pin(children_of(self._process.pid), self._other_core)

    def reset_peak(self) -> None:
        """Reset the peak memory use that the kernel records for the process."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def status_mib(self, name: str) -> float:
        """Read a size from /proc/PID/status, in MiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def open_files(self) -> int:
        """Count the open file descriptors of the process."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def incidents(self) -> int:
        """Count the internal errors in the log."""
        return sum(
            b'"event": "incident"' in line or b'"event":"incident"' in line
            for line in self._log.open("rb")
        )


class Client:
    """Process of `bench.adversary_load`: an attacker, or the bystander."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    async def ready(self) -> None:
        """Wait until the process is ready to begin. Raises: RuntimeError if it failed."""
        if await self._stdout.readline() != b"ready\n":
            raise RuntimeError("a client failed")

    def begin(self) -> None:
        """Tell the process to begin its measurement."""
        self._stdin.write(b"begin\n")

    async def result(self) -> dict[str, Any]:
        """Wait until the process ends and return its result. Raises: RuntimeError if it failed."""
        out = await self._stdout.read()
        if await self._process.wait() or not out:
            raise RuntimeError("a client failed")
        result: dict[str, Any] = json.loads(out)
        return result


@dataclass(slots=True)
class Phase:
    """Measurements of bystander and administrator in one phase, and the answers to the attacker."""

    seen: dict[str, Any]
    peak_mib: float
    api_busy: float
    restarts: int
    incidents: int
    answers: dict[str, Counter[str]] = field(default_factory=dict)

    def internal(self) -> int:
        """Count the answers with a status that blames the server."""
        statuses = sum((Counter(each) for each in self.answers.values()), Counter[str]())
        return sum(
            count
            for name, count in statuses.items()
            if not BROKEN.isdisjoint(name.split()) or name == "http 500"
        )

    def values(self) -> Values:
        """Compute the figures."""
        seen = self.seen
        times = {"itl": seen["gap_ms"], "ttft": seen["ttft_ms"]}
        times |= {key: seen[f"{key}_ms"] for key in ADMIN}
        found = {
            f"{key}_{share}": max(values, default=float("nan"))
            if share == "worst"
            else quantile(values, int(share[1:]) / 100)
            for key, values in times.items()
            for share in ("p50", "p99", "worst")
        }
        return {key: value for key, value in found.items() if key in FIGURES} | {
            "peak_mib": self.peak_mib,
            "busy": self.api_busy,
            "errors": len(seen["errors"]),
            "restarts": self.restarts,
            "internal": self.internal() + self.incidents,
            "answers": sum(sum(each.values()) for each in self.answers.values()),
        }

    def note(self, name: str) -> None:
        """Print the bystander's errors, and the answers to the attacker by kind."""
        for error, count in Counter(self.seen["errors"]).most_common(5):
            note(f"{name}: the bystander saw {count} times: {error}")
        for kind, statuses in sorted(self.answers.items()):
            shown = ", ".join(f"{status} {count:,}" for status, count in statuses.most_common(9))
            note(f"{name}: {kind} {shown}")


class Phases:
    """Measurement of several phases on one service."""

    def __init__(
        self,
        service: Service,
        target: Target,
        keys: dict[str, str],
        database_url: str,
        seconds: float,
    ) -> None:
        self._service = service
        self._target = target
        self._keys = keys
        self._database_url = database_url
        self._seconds = seconds

    async def phase(self, name: str, kinds: list[str]) -> Phase:
        """Measure the bystander while these attacks run with the key of this phase."""
        await self.calm()
        restarts, incidents = self._service.restart_count, self._service.incidents()
        bystander = await self._client(
            "bystander",
            target=self._aimed(self._keys["bystander"]),
            admin_key=self._keys["admin"],
            stream_count=STREAMS,
            probe_count=PROBES,
            seconds=self._seconds,
        )
        clients = [bystander]
        if kinds:
            clients.append(
                await self._client(
                    "attacker",
                    target=self._aimed(self._keys[name]),
                    kinds=kinds,
                    seconds=self._seconds,
                )
            )
        for client in clients:
            await client.ready()
        self._service.reset_peak()
        for client in clients:
            client.begin()
        cpu, since = cpu_s([self._service.pid]), time.monotonic()
        peaks = []
        ends = asyncio.gather(*(client.result() for client in clients))
        while not ends.done():
            await asyncio.wait([ends], timeout=0.5)
            with contextlib.suppress(OSError):  # the process ended
                peaks.append(self._service.status_mib("VmHWM"))
        busy = (cpu_s([self._service.pid]) - cpu) / (time.monotonic() - since)
        seen, *answers = await ends
        return Phase(
            seen,
            max(peaks),
            busy,
            self._service.restart_count - restarts,
            self._service.incidents() - incidents,
            {kind: Counter(statuses) for each in answers for kind, statuses in each.items()},
        )

    async def calm(self) -> float:
        """Wait until there are no holds and the server answers at once. Return the seconds."""
        since = time.monotonic()
        while time.monotonic() - since < CALM_MAX_S:
            started_at = time.monotonic()
            serving = await asyncio.to_thread(is_serving, self._target.address)
            if serving and time.monotonic() - started_at < CALM_ANSWER_S and not self.held_count():
                break
            await asyncio.sleep(0.1)
        return time.monotonic() - since

    def held_count(self) -> int:
        """Count the open holds."""
        with psycopg.connect(psycopg_conninfo(self._database_url)) as connection:
            [count] = connection.execute(
                "SELECT count(*) FROM holds WHERE state = 'held'"
            ).fetchone() or [0]
            return int(count)

    def _aimed(self, key: str) -> dict[str, Any]:
        return dataclasses.asdict(dataclasses.replace(self._target, key=key))

    async def _client(self, role: str, **options: Any) -> Client:
        command = [sys.executable, "-m", "bench.adversary_load", role, json.dumps(options)]
        pipe = asyncio.subprocess.PIPE
        return Client(
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**30)
        )


def free_ports(count: int) -> list[int]:
    """Find free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def prepare_keys(database_url: str) -> dict[str, str]:
    """Create keys for each phase, the bystander and an administrator, with quotas and scopes."""
    names = ("bystander", "admin", NO_QUOTA, QUOTA)
    keys = dict(zip(names, create_keys(database_url, len(names)), strict=True))
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:

        def scopes(name: str, *granted: str) -> None:
            connection.execute(
                "UPDATE api_keys SET scopes = %s WHERE secret_hash = %s",
                (list(granted), hash_of(keys[name])),
            )

        def limit(name: str, dimension: str, value: int) -> None:
            connection.execute(
                """UPDATE quotas SET limit_value = %s FROM api_keys k
                   JOIN projects p ON p.id = k.project_id
                   WHERE k.secret_hash = %s AND dimension = %s
                   AND subject_id IN (k.id, p.id, p.organization_id)""",
                (value, hash_of(keys[name]), dimension),
            )

        connection.execute(
            "INSERT INTO price_versions (model, currency_code, input_picos_per_token,"
            " cached_input_picos_per_token, output_picos_per_token, effective_at) VALUES (%s,"
            " 'USD', 3, 1, 7, now())",
            (UPSTREAM,),
        )
        scopes("admin", "admin")
        for name in (NO_QUOTA, QUOTA):
            scopes(name, "inference", "billing")
            for dimension, value in ORDINARY_QUOTAS.items():
                limit(name, dimension, value)
        limit(NO_QUOTA, "tokens_per_month", 0)
    return keys


@contextlib.contextmanager
def hostile_fleet(core: int, home: Path) -> Iterator[Path]:
    """Run a hostile upstream server on this core, and yield a file that lists its model."""
    directory = str(next(iter(bundled_models().values())))
    command = [sys.executable, "-m", "bench.hostile_upstream", "--rotate", "--window", str(1 << 20)]
    with on_core(core, command, stdout=subprocess.PIPE) as process:
        try:
            # Part of the attack, so it takes no CPU of the bystander either.
            os.setpriority(os.PRIO_PROCESS, process.pid, ATTACKER_NICE)
            assert process.stdout is not None
            port = process.stdout.readline().split()[1].decode()
            remote = {
                "engine": "remote",
                "directory": directory,
                "targets": [f"openai+http://127.0.0.1:{port}/tiny"],
                "share_prefixes": True,
            }
            models = {MODEL: {"engine": "simulated", "directory": directory}, UPSTREAM: remote}
            path = home / "fleet.yaml"
            path.write_text(json.dumps({"models": models}))
            yield path
        finally:
            process.kill()


@contextlib.contextmanager
def prepared(options: argparse.Namespace) -> Iterator[tuple[Service, Target, dict[str, str], str]]:
    """Prepare a database with keys, and yield them with a service that is not started yet."""
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(new_site(options.directory))
        keys = prepare_keys(site.database_url)
        home = stack.enter_context(site.home())
        port, http_port, metrics_port = free_ports(3)
        settings = Settings.of(
            database_url=site.database_url,
            home=home,
            listen=f"127.0.0.1:{port}",
            openai_listen=f"127.0.0.1:{http_port}",
            metrics_listen=f"127.0.0.1:{metrics_port}",
            fleet=str(stack.enter_context(hostile_fleet(site.other_core, home))),
            remote_inter_token_s=3.0,
            simulated_time_scale=scale(),
        )
        yield (
            Service(settings, site.core, site.other_core),
            Target(settings.listen.address, http_port, metrics_port, "", MODEL),
            keys,
            site.database_url,
        )


@contextlib.asynccontextmanager
async def prepare(options: argparse.Namespace) -> AsyncIterator[Cases]:
    """Run the service, and yield the attack with its phases as ways, or a case for each kind."""
    kinds = options.only or list(ATTACKS)
    with prepared(options) as (service, target, keys, url):
        async with service.running():
            phases = Phases(service, target, keys, url, options.seconds)
            files = service.open_files()

            def case(name: str, kinds: list[str]) -> Case:
                async def run(way: str) -> Values:
                    phase = await phases.phase(way, [] if way == QUIET else kinds)
                    phase.note(f"{name}, {way}")
                    return phase.values()

                return Case(name, {way: partial(run, way) for way in (QUIET, NO_QUOTA, QUOTA)})

            each = [case(kind, [kind]) for kind in kinds]
            yield each if options.each else [case(f"{len(kinds)} kinds at once", kinds)]
            calm_s = await phases.calm()
            note(
                f"after {calm_s:.1f} s: {phases.held_count()} holds left; {service.open_files()}"
                f" open files, {files} before; {service.status_mib('VmRSS'):.0f} MiB resident"
            )


def is_clean(results: Results) -> bool:
    """Return whether there was no error, restart, incident, or answer that blames the server."""
    rows = [row for ways in results.values() for each in ways.values() for row in each]
    return not any(row[key] for row in rows for key in FAULTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_site_options(parser, 60.0)
    parser.add_argument(
        "--only", action="append", choices=tuple(ATTACKS), help="kind of attack; repeatable"
    )
    parser.add_argument("--each", action="store_true", help="a case for each kind of attack")


BENCH = Bench(
    __doc__,
    FIGURES,
    prepare,
    add_options,
    rounds=1,
    passed=is_clean,
    loop_factory=uvloop.new_event_loop,
)

if __name__ == "__main__":
    main(BENCH)
