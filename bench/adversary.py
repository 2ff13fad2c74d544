"""Effect of a hostile key on other clients: latency of a bystander and an administrator, and memory
of the process.

    python -m bench.adversary [--seconds 60] [--only KIND]... [--each] [--directory /dev/shm]

One api process, one database, three phases of `--seconds`: quiet, one hostile key with a monthly
quota of zero, one hostile key with ordinary quotas. The attacker uses every frame kind, every RPC
and every HTTP path with hostile sizes, counts, characters and values (`bench.adversary_attacks`),
as fast as it is answered. Meanwhile another organization streams and sends short requests, and an
administrator lists live requests and keys and scrapes the metrics every second. `--only` restricts
the attack to one kind; `--each` runs the kinds one after the other and prints a line for each. A
second model is on a hostile upstream server (`bench.hostile_upstream`), a process of its own.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import uvloop

from api.core.settings import Settings, bundled_models
from bench.adversary_attacks import ATTACKS, BROKEN, UPSTREAM, Target
from bench.adversary_load import ATTACKER_NICE
from bench.harness import (
    MODEL,
    children_of,
    cpu_s,
    create_keys,
    is_serving,
    new_site,
    on_core,
    options_of,
    pin,
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
ITL_GOAL, WORST_GOAL_MS, ADMIN_GOAL, MEMORY_GOAL_MIB = 1.3, 100, 1.5, 128
LINE_COLUMNS = (
    "worst ms",
    "ITL50",
    "ITL99",
    "TTFT99",
    "live50",
    "keys50",
    "metr.50",
    "MiB",
    "busy",
    "errors",
    "restarts",
    "INTERNAL",
)
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

    def figures(self) -> dict[str, float]:
        """Compute the figures by name, in milliseconds except for the last two."""
        seen = self.seen
        return {
            "bystander ITL p50": quantile(seen["gap_ms"], 0.5),
            "bystander ITL p99": quantile(seen["gap_ms"], 0.99),
            "bystander ITL worst": max(seen["gap_ms"], default=float("nan")),
            "bystander TTFT p50": quantile(seen["ttft_ms"], 0.5),
            "bystander TTFT p99": quantile(seen["ttft_ms"], 0.99),
            "ListLiveRequests p50": quantile(seen["live_requests_ms"], 0.5),
            "ListLiveRequests worst": max(seen["live_requests_ms"], default=float("nan")),
            "ListApiKeys p50": quantile(seen["keys_ms"], 0.5),
            "ListApiKeys worst": max(seen["keys_ms"], default=float("nan")),
            "metrics p50": quantile(seen["metrics_ms"], 0.5),
            "metrics worst": max(seen["metrics_ms"], default=float("nan")),
            "livez p50": quantile(seen["livez_ms"], 0.5),
            "livez worst": max(seen["livez_ms"], default=float("nan")),
        }

    def is_clean(self) -> bool:
        """True if there was no error, restart, incident, or answer that blames the server."""
        return not (self.seen["errors"] or self.restarts or self.incidents or self.internal())


def quantile(values: list[float], share: float) -> float:
    """Compute a quantile of the values; `share` is 0.5 for the median."""
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


class Bench:
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


def print_table(phases: dict[str, Phase]) -> None:
    """Print the figures of each phase next to those of the quiet one."""
    quiet = phases[QUIET].figures()
    hostile = {name: phase for name, phase in phases.items() if name != QUIET}
    print(
        f"{'':<26}{QUIET:>10}" + "".join(f"{name:>14} {'ratio':>7}" for name in hostile) + "  goal"
    )
    goals = {
        "bystander ITL p99": ITL_GOAL,
        "ListLiveRequests p50": ADMIN_GOAL,
        "ListApiKeys p50": ADMIN_GOAL,
        "metrics p50": ADMIN_GOAL,
        "livez p50": ADMIN_GOAL,
    }
    for figure, value in quiet.items():
        cells = "".join(
            f"{phase.figures()[figure]:>11.1f} ms {phase.figures()[figure] / value:>6.2f}x"
            for phase in hostile.values()
        )
        print(
            f"{figure:<26}{value:>7.1f} ms{cells}  "
            + (
                f"at most {goals[figure]}x"
                if figure in goals
                else f"at most {WORST_GOAL_MS} ms"
                if figure == "bystander ITL worst"
                else ""
            )
        )
    peak = phases[QUIET].peak_mib
    cells = "".join(
        f"{phase.peak_mib:>10.0f} MiB {phase.peak_mib - peak:>+7.0f}" for phase in hostile.values()
    )
    print(f"{'peak memory':<26}{peak:>6.0f} MiB{cells}  at most +{MEMORY_GOAL_MIB} MiB")
    rows: list[tuple[str, Any, str]] = [
        ("api process busy", lambda phase: f"{phase.api_busy:.0%}", ""),
        ("errors of the bystander", lambda phase: len(phase.seen["errors"]), "0"),
        ("restarts", lambda phase: phase.restarts, "0"),
        ("INTERNAL and incidents", lambda phase: phase.internal() + phase.incidents, "0"),
        (
            "answers to the attacker",
            lambda phase: sum(sum(each.values()) for each in phase.answers.values()),
            "",
        ),
    ]
    for name, value_of, goal in rows:
        print(
            f"{name:<26}{value_of(phases[QUIET]):>10}"
            + "".join(f"{value_of(each):>14} {'':>7}" for each in hostile.values())
            + f"  {goal}"
        )
    for name, phase in phases.items():
        for error, count in Counter(phase.seen["errors"]).most_common(5):
            print(f"{name}: the bystander saw {count} times: {error}")
    for name, phase in hostile.items():
        print(f"\nanswers, {name}")
        for kind, statuses in sorted(phase.answers.items()):
            print(
                f"  {kind:<20}"
                + ", ".join(f"{status} {count:,}" for status, count in statuses.most_common(9))
            )


def print_line(name: str, phase: Phase, quiet: Phase) -> None:
    """Print the line of one kind of attack, next to the quiet phase."""
    figures, base = phase.figures(), quiet.figures()
    ratios = [
        f"{figures[each] / base[each]:.2f}x"
        for each in (
            *("bystander ITL p50", "bystander ITL p99", "bystander TTFT p99"),
            *("ListLiveRequests p50", "ListApiKeys p50", "metrics p50"),
        )
    ]
    answers = sum((statuses for statuses in phase.answers.values()), Counter[str]())
    cells = [
        f"{figures['bystander ITL worst']:.0f}",
        *ratios,
        f"{phase.peak_mib - quiet.peak_mib:+.0f}",
        f"{phase.api_busy:.0%}",
    ]
    cells += map(
        str, (len(phase.seen["errors"]), phase.restarts, phase.internal() + phase.incidents)
    )
    statuses = ", ".join(f"{status} {count:,}" for status, count in answers.most_common(4))
    print(f"{name:<34}" + " ".join(f"{cell:>8}" for cell in cells) + f"  {statuses}", flush=True)


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


async def measure(options: argparse.Namespace) -> bool:
    """Measure all phases and print the table. Return whether nothing failed."""
    kinds = options.only or list(ATTACKS)
    with prepared(options) as (service, target, keys, url):
        async with service.running():
            bench = Bench(service, target, keys, url, options.seconds)
            files = service.open_files()
            quiet = await bench.phase(QUIET, [])
            phases = {QUIET: quiet}
            if options.each:
                print(f"{'':<34}" + " ".join(f"{name:>8}" for name in LINE_COLUMNS))
                for kind in kinds:
                    for name in (NO_QUOTA, QUOTA):
                        phase = phases[f"{kind}, {name}"] = await bench.phase(name, [kind])
                        print_line(f"{kind}, {name}", phase, quiet)
            else:
                for name in (NO_QUOTA, QUOTA):
                    phases[name] = await bench.phase(name, kinds)
                print_table(phases)
            calm_s = await bench.calm()
            print(
                f"\nafter {calm_s:.1f} s: {bench.held_count()} holds left; {service.open_files()}"
                f" open files, {files} before; ",
                end="",
            )
            print(f"{service.status_mib('VmRSS'):.0f} MiB resident")
    return all(phase.is_clean() for phase in phases.values())


def main() -> None:
    """Measure, print, and exit with 1 if anything failed."""
    parser = options_of(__doc__, 60.0)
    parser.add_argument(
        "--only", action="append", choices=tuple(ATTACKS), help="kind of attack; repeatable"
    )
    parser.add_argument(
        "--each",
        action="store_true",
        help="run the kinds one after the other, with a line for each",
    )
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(0 if runner.run(measure(options)) else 1)


if __name__ == "__main__":
    main()
