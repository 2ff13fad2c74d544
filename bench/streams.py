"""Cost per token through the service, against a bare `grpc.aio` server with the same messages.

Server CPU per delivered token and added time to first token at 1, 50 and 500 streams.

    python -m bench.streams [--seconds 6] [--streams 1,50,500] [--directory /dev/shm] [--prefetch
    64,256]

One api process on a core of its own; on another core PostgreSQL, the worker of the simulated engine
and the client. Each answer has its own connection, with one token per engine step; the last case
has 500 on one stream, where a step is one message. Then concurrent probes request short answers:
their time to first token, less that of the bare server, is added by Weir. Both use the step time of
the simulated engine at this batch. "late" is the p99 delay of a message after the previous one,
beyond the usual gap. `--prefetch` also measures clients that send credit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.core.settings import Settings, bundled_models
from bench.admission import server
from bench.admission_peers import MODEL
from bench.front import Processes, api_process, create_keys, on_core
from bench.processes import claim_cores, cpu_s
from inference.core.options import CostModel
from metering.store.migrations_runner import migrate

STEP_MS = 20.0  # step time of a small batch: 50 tokens per second and stream
PROMPT_TOKENS, DECODED_TOKENS_MEAN = 25, 200  # average number of attended positions, approximate
WARM_UP_S = 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """Concurrent answers, each on its own connection, or all on one stream."""

    stream_count: int
    shared: bool = False

    @property
    def name(self) -> str:
        """Label in the table."""
        return (
            f"{self.stream_count} on one stream" if self.shared else f"{self.stream_count} streams"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case. CPU of the server in µs."""

    token_us: float
    message_us: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    late_p99_ms: float
    tokens_per_s: float
    busy: float
    client_busy: float


def scale() -> float:
    """Return the time scale of the simulated engine at which a small batch takes `STEP_MS`."""
    return STEP_MS / CostModel().weights_ms


def step_s(case: Case) -> float:
    """Return the step time of the simulated engine in this case."""
    return CostModel(time_scale=scale()).step_s(
        case.stream_count, case.stream_count * (PROMPT_TOKENS + DECODED_TOKENS_MEAN)
    )


@contextlib.contextmanager
def echo_process(core: int, case: Case) -> Iterator[tuple[str, Processes]]:
    """Run the baseline."""
    command = [
        sys.executable,
        "-m",
        "bench.streams_load",
        "echo",
        json.dumps({"step_s": step_s(case)}),
    ]
    process = on_core(core, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip(), {"api": lambda: [process.pid]}
    finally:
        process.terminate()
        process.wait()


def run(
    case: Case,
    address: str,
    processes: Processes,
    key: str,
    seconds: float,
    prefetch_tokens: int = 0,
) -> Result:
    """Load a server from this process's core. Raises: RuntimeError if the client fails."""
    load = {
        "address": address,
        "model": MODEL,
        "prompt": " ".join(["hotel"] * PROMPT_TOKENS),
        "api_key": key,
        "stream_count": case.stream_count,
        "shared": case.shared,
        "step_s": step_s(case),
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
        "prefetch_tokens": prefetch_tokens,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "bench.streams_load", "client", json.dumps(load)],
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        marks = []
        for _ in range(2):
            client.stdout.readline()  # "begin", then "end"
            marks.append(cpu_s(processes["api"]()))
        out = client.stdout.read()
    if client.returncode or not out:
        raise RuntimeError("the client failed")
    seen = json.loads(out)
    if seen["failures"]:
        raise RuntimeError(
            f"{len(seen['failures'])} requests failed, the first with: {seen['failures'][0]}"
        )
    return summary(case, seen, (marks[1] - marks[0]) * 1e6, seconds)


def summary(case: Case, seen: dict[str, Any], cpu_us: float, seconds: float) -> Result:
    """Return the figures of one run. Raises: RuntimeError if it was too short."""
    if len(seen["ttft_ms"]) < 2 or len(seen["gap_ms"]) < 2:
        raise RuntimeError(
            f"fewer than two answers began within {seconds:.0f} s: give it more with --seconds"
        )
    ttft = statistics.quantiles(seen["ttft_ms"], n=100)
    gaps = statistics.quantiles(seen["gap_ms"], n=100)
    return Result(
        token_us=cpu_us / seen["token_count"],
        message_us=cpu_us / seen["message_count"],
        ttft_p50_ms=ttft[49],
        ttft_p99_ms=ttft[98],
        late_p99_ms=gaps[98] - gaps[49],
        tokens_per_s=seen["token_count"] / seconds,
        busy=cpu_us / 1e6 / seconds,
        client_busy=seen["cpu_s"] / seconds,
    )


def row(name: str, result: Result, beside: Result | None) -> str:
    """Return one line of the table; `beside`: the bare server's."""
    more = ""
    if beside is not None:
        more = (
            f" {result.token_us / beside.token_us:>6.1f}x"
            f" {result.ttft_p50_ms - beside.ttft_p50_ms:>+8.2f}"
        )
        more += f" {result.ttft_p99_ms - beside.ttft_p99_ms:>+8.2f}"
    return (
        f"{name:<30}{result.tokens_per_s:>9,.0f} {result.token_us:>9.1f} {result.message_us:>8.1f}"
        f" {result.busy:>6.0%} {result.client_busy:>6.0%} {result.ttft_p50_ms:>8.2f}"
        f" {result.ttft_p99_ms:>8.2f} {result.late_p99_ms:>8.2f}{more}"
    )


def measure(options: argparse.Namespace, url: str, core: int, other_core: int) -> None:
    """Run every case on both servers, and print the table."""
    migrate(url)
    [key] = create_keys(url, 1)
    counts = [int(each) for each in options.streams.split(",")]
    cases = [*(Case(count) for count in counts), Case(max(counts), shared=True)]
    print(
        f"{'':<30}{'tokens/s':>9} {'µs/token':>9} {'µs/msg':>8} {'busy':>6} {'client':>6}", end=" "
    )
    print(f"{'ttft50':>8} {'99 ms':>8} {'late 99':>8} {'ratio':>7} {'+ttft50':>8} {'99 ms':>8}")
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="weir-bench-", dir=options.directory)
        )
        settings = Settings(
            database_url=url,
            home=Path(home),
            listen_address="127.0.0.1:0",
            models={MODEL: next(iter(bundled_models().values()))},
            engine_device="simulated",
            simulated_time_scale=scale(),
        )
        address, processes = stack.enter_context(api_process(settings, core, other_core, None))
        for case in cases:
            with echo_process(core, case) as bare:
                beside = run(case, *bare, key, options.seconds)
            print(row(f"bare grpc.aio, {case.name}", beside, None), flush=True)
            print(
                row(
                    f"Weir, {case.name}",
                    run(case, address, processes, key, options.seconds),
                    beside,
                ),
                flush=True,
            )
            for prefetch_tokens in map(int, filter(None, options.prefetch.split(","))):
                result = run(case, address, processes, key, options.seconds, prefetch_tokens)
                print(row(f"  with a prefetch of {prefetch_tokens}", result, beside), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="per case (default: %(default)s)"
    )
    parser.add_argument(
        "--streams", default="1,50,500", help="numbers of concurrent streams (default: %(default)s)"
    )
    parser.add_argument(
        "--prefetch",
        default="",
        help="also with credit for these numbers of tokens (default: none)",
    )
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
    )
    options = parser.parse_args()
    core, other_core = claim_cores()
    with server(None, options.directory) as url:
        measure(options, url, core, other_core)


if __name__ == "__main__":
    main()
