"""Requests per second through everything before a model: gRPC, authentication, quotas, queue,
settlement.

    python -m bench.front [--seconds 4] [--prompt-words 25] [--rate N] [--directory /dev/shm]
    [--profile FILE]

One api process on a core of its own; on another core everything else: PostgreSQL, the worker of a
simulated engine without delays, and the client. Each request asks for one token, on open streams,
each with its own key and five quotas. The baseline is a bare gRPC server instead of the api
process, with the same number of frames. The columns in µs are CPU per request by process. "batch"
is the server's time from a start frame to the engine's batch; "admit" and "fin." are the client's.
The last lines are at half of the rate reached before, with random arrivals, and show the stages
until the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psycopg

from api.core.endpoint import read_endpoint
from api.core.settings import Settings, bundled_models
from bench.admission import create_tenants, quantile_ms, server
from bench.admission_peers import MODEL
from bench.processes import children_of, claim_cores, cpu_s, postgres_pid
from metering.store.db import psycopg_conninfo
from metering.store.migrations_runner import migrate
from metering.tenants.tenants import hash_of, new_secret, prefix_of

STREAM_COUNT = 64
SERVING = b"\x08\x01"  # a serialized HealthCheckResponse
WARM_UP_S = 1.0
START_MAX_S = 180.0  # far above a start on a busy machine

Processes = dict[str, Callable[[], list[int]]]  # process ids for separate CPU times, by name


@dataclass(frozen=True, slots=True)
class Case:
    """Load: concurrent requests per stream, or a share of the rate of an earlier case."""

    name: str
    stream_count: int
    outstanding_count: int = 0
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case."""

    seen: dict[str, Any]
    cpu_us: dict[str, float]  # per request, by process

    @property
    def rate_per_s(self) -> float:
        """Requests finished per second."""
        return float(self.seen["request_count"]) / float(self.seen["wall_s"])


def create_keys(database_url: str, count: int) -> list[str]:
    """Create tenants with five quotas each; return the secrets of their keys."""
    tenants = create_tenants(database_url, count)
    secrets = [new_secret() for _ in tenants]
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        for payer, secret in zip(tenants, secrets, strict=True):
            connection.execute(
                "UPDATE api_keys SET secret_hash = %s, prefix = %s WHERE id = %s",
                (hash_of(secret), prefix_of(secret), payer.api_key_id),
            )
    return secrets


def on_core(core: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process pinned to this core."""
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {core}), **options)


@contextlib.contextmanager
def api_process(
    settings: Settings, core: int, other_core: int, profile: str | None
) -> Iterator[tuple[str, Processes]]:
    """Run an api process, with its engine worker on the other core."""
    command = [sys.executable, "-m", "api"]
    if profile:
        command = [sys.executable, "-m", "cProfile", "-o", profile, "-m", "api"]
    log = settings.home / "api.log"
    with log.open("wb") as out:
        process = on_core(
            core, command, env={**os.environ, **settings.to_environment()}, stdout=out, stderr=out
        )
    try:
        address = wait_for(lambda: read_endpoint(settings.home).address or None, process, log)
        wait_for(lambda: is_serving(address) or None, process, log)
        for worker in children_of(process.pid):
            for thread in Path(f"/proc/{worker}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {other_core})
        postgres = postgres_pid(settings.database_url)
        yield (
            address,
            {
                "api": lambda: [process.pid],
                "engine": lambda: children_of(process.pid),
                "postgres": lambda: [postgres, *children_of(postgres)],
            },
        )
    finally:
        process.terminate()
        process.wait()


def is_serving(address: str) -> bool:
    """Return the result of the health service."""
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        # No serializers: bytes in both directions.
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        return bool(check(b"", timeout=5) == SERVING)
    return False


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + START_MAX_S
    while (value := condition()) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the api process does not serve:\n{log.read_text()[-4000:]}")
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def echo_process(core: int) -> Iterator[tuple[str, Processes]]:
    """Run the baseline."""
    process = on_core(
        core, [sys.executable, "-m", "bench.front_load", "echo"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip(), {"api": lambda: [process.pid]}
    finally:
        process.terminate()
        process.wait()


def run(
    case: Case, address: str, processes: Processes, keys: Sequence[str], prompt: str, seconds: float
) -> Result:
    """Load a server from this process's core."""
    load = {
        "address": address,
        "model": MODEL,
        "prompt": prompt,
        "api_keys": keys[: case.stream_count],
        "outstanding_count": case.outstanding_count,
        "rate_per_s": case.rate_per_s,
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    }
    client = subprocess.Popen(
        [sys.executable, "-m", "bench.front_load", "client", json.dumps(load)],
        stdout=subprocess.PIPE,
        text=True,
    )
    before = {name: cpu_s(pids()) for name, pids in processes.items()}
    out, _ = client.communicate()
    if client.returncode:
        raise RuntimeError("the client failed")
    seen = json.loads(out)
    if seen["failures"]:
        raise RuntimeError(
            f"{len(seen['failures'])} requests failed, the first with: {seen['failures'][0]}"
        )
    cpu_us = {
        name: (cpu_s(pids()) - before[name]) / seen["request_count_total"] * 1e6
        for name, pids in processes.items()
    }
    return Result(seen, cpu_us | {"client": seen["cpu_s"] / max(seen["request_count"], 1) * 1e6})


def row(name: str, result: Result) -> str:
    """Return one line of the table."""
    seen, us = result.seen, result.cpu_us
    busy = us["api"] * result.rate_per_s / 1e6
    until_batch_ms = [sum(stages) for stages in zip(*seen["stages_ms"].values(), strict=True)]
    times = " ".join(
        f"{quantile_ms(each, 0.5) / 1000:>7.2f} {quantile_ms(each, 0.99) / 1000:>7.2f}"
        for each in (until_batch_ms, seen["admitted_ms"], seen["finished_ms"])
    )
    others = " ".join(f"{us.get(name, 0.0):>8.0f}" for name in ("postgres", "engine", "client"))
    return f"{name:<44}{result.rate_per_s:>8,.0f} {us['api']:>7.0f} {busy:>6.0%} {others}  {times}"


def stages_row(result: Result) -> str:
    """Return the stages until the engine's batch: p50 and p99 of each."""
    parts = [
        f"{name} {quantile_ms(times, 0.5) / 1000:.2f}, {quantile_ms(times, 0.99) / 1000:.2f}"
        for name, times in result.seen["stages_ms"].items()
    ]
    return f"{'of which, p50 and p99 in ms:':<44}{'; '.join(parts)}"


def measure(options: argparse.Namespace, url: str, core: int, other_core: int) -> None:
    """Run every case and print the table."""
    migrate(url)
    keys = create_keys(url, STREAM_COUNT)
    prompt = " ".join(["hotel"] * options.prompt_words)
    many, single = (
        Case("16 streams, 16 under way on each", 16, 16),
        Case("64 streams, one under way on each", 64, 1),
    )

    def tell(what: str, case: Case, server: tuple[str, Processes]) -> Result:
        result = run(case, *server, keys, prompt, options.seconds)
        print(row(f"{what}, {case.name}", result), flush=True)
        return result

    print(
        f"{'':<44}{'per s':>8} {'api µs':>7} {'busy':>6} {'pg µs':>8} {'host µs':>8} {'client':>8}",
        end="  ",
    )
    print(f"{'batch50':>7} {'99 ms':>7} {'admit50':>7} {'99 ms':>7} {'fin.50':>7} {'99 ms':>7}")
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(echo_process(core))
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="weir-bench-", dir=options.directory)
        )
        settings = Settings(
            database_url=url,
            home=Path(home),
            listen_address="127.0.0.1:0",
            models={MODEL: next(iter(bundled_models().values()))},
            engine_device="simulated",
            simulated_time_scale=0.0,
        )
        weir = stack.enter_context(api_process(settings, core, other_core, options.profile))
        rate_per_s = options.rate
        if not rate_per_s:
            for case in (single, many):
                tell("bare gRPC", case, bare)
            tell("Weir", single, weir)
            rate_per_s = tell("Weir", many, weir).rate_per_s / 2
        paced = Case(
            f"{rate_per_s:,.0f} per s at random moments", STREAM_COUNT, rate_per_s=rate_per_s
        )
        tell("bare gRPC", paced, bare)
        print(stages_row(tell("Weir", paced, weir)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="seconds per case, of six (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-words", type=int, default=25, help="each about one token (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
    )
    parser.add_argument(
        "--rate", type=float, help="run only this case: requests per second, at random times"
    )
    parser.add_argument(
        "--profile", help="write a profile of the api process to this file; slows it down"
    )
    options = parser.parse_args()
    core, other_core = claim_cores()
    with server(None, options.directory) as url:
        measure(options, url, core, other_core)


if __name__ == "__main__":
    main()
