"""Cost of the OpenAI HTTP API against gRPC and a bare aiohttp server with the same events.

Measures server CPU per token of a streamed chat and per request, and the time to the first token.

    python -m bench.door [--seconds 4] [--chats 1,50,200] [--directory /dev/shm] [--profile FILE]

One api process on a core of its own; on another core PostgreSQL, the worker of the simulated engine
and the client. Each chat has its own connection, with one token per engine step. Concurrent probes
request two tokens: their time to first token, less that of the bare server, is added by Weir. The
next lines have 50 connections with consecutive answers of one token: the cost of a request from its
head to its settlement. The last two have unstreamed answers of one token and of 16, and their
ratio.
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
from urllib.parse import urlsplit

from api.core.endpoint import read_endpoint
from api.core.settings import Settings, bundled_models
from bench import streams
from bench.admission import server
from bench.admission_peers import MODEL
from bench.front import Processes, api_process, create_keys, on_core
from bench.processes import claim_cores, cpu_s
from bench.streams import PROMPT_TOKENS, WARM_UP_S, Case, scale, step_s
from metering.store.migrations_runner import migrate

SHORT_STREAMS = 50
# For unstreamed answers. All at one rate, since constant background work weighs more on fewer
# requests.
WHOLE_TOKENS, WHOLE_STREAMS, WHOLE_PERIOD_S = 16, 150, 1.0
PROMPT = " ".join(["hotel"] * PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case. unit_us: CPU of the server in µs per token, or per short request."""

    unit_us: float
    rate_per_s: float
    busy: float
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0


@contextlib.contextmanager
def echo_process(core: int, case: Case) -> Iterator[tuple[int, Processes]]:
    """Run the baseline; yield its port."""
    command = [
        sys.executable,
        "-m",
        "bench.door_load",
        "echo",
        json.dumps({"step_s": step_s(case)}),
    ]
    process = on_core(core, command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), {"api": lambda: [process.pid]}
    finally:
        process.terminate()
        process.wait()


def run(
    case: Case, port: int, processes: Processes, key: str, seconds: float, **more: Any
) -> Result:
    """Load a server from this process's core. Raises: RuntimeError if the client fails."""
    load: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "model": MODEL,
        "prompt": PROMPT,
        "api_key": key,
    }
    load |= {
        "stream_count": case.stream_count,
        "step_s": step_s(case),
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    } | more
    command = [sys.executable, "-m", "bench.door_load", "client", json.dumps(load)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
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
    count, used_s = (
        seen["request_count" if load.get("short_tokens") else "token_count"],
        marks[1] - marks[0],
    )
    ttft = statistics.quantiles(seen["ttft_ms"], n=100) if seen["ttft_ms"] else [0.0] * 99
    return Result(used_s * 1e6 / count, count / seconds, used_s / seconds, ttft[49], ttft[98])


def by_grpc(case: Case, address: str, processes: Processes, key: str, seconds: float) -> Result:
    """Run the same chats over gRPC, as `bench.streams` does."""
    result = streams.run(case, address, processes, key, seconds)
    return Result(
        result.token_us, result.tokens_per_s, result.busy, result.ttft_p50_ms, result.ttft_p99_ms
    )


def line(name: str, result: Result, ratios: str = "") -> None:
    """Print one line of measured and derived figures."""
    ttft = (
        f"{result.ttft_p50_ms:>8.2f} {result.ttft_p99_ms:>8.2f}" if result.ttft_p50_ms else " " * 17
    )
    print(
        f"{name:<34}{result.rate_per_s:>9,.0f} {result.unit_us:>9.1f} {result.busy:>6.0%}"
        f" {ttft}{ratios}",
        flush=True,
    )


def table(name: str, bare: Result, rpc: Result, door: Result) -> None:
    """Print the three lines of one case."""
    for who, result in (("bare aiohttp", bare), ("Weir, gRPC", rpc), ("Weir, HTTP", door)):
        ratios = "" if result is bare else f" {result.unit_us / bare.unit_us:>7.2f}x"
        ratios += f" {result.unit_us / rpc.unit_us:>7.2f}x" if result is door else ""
        added = (
            f" {result.ttft_p50_ms - bare.ttft_p50_ms:>+8.2f}"
            if result is not bare and result.ttft_p50_ms
            else " " * 9
        )
        line(f"{who}, {name}", result, added + ratios)


def measure(options: argparse.Namespace, url: str, core: int, other_core: int) -> None:
    """Run every case on all three servers, and print the table."""
    migrate(url)
    [key] = create_keys(url, 1)
    print(
        f"{'':<34}{'a second':>9} {'µs each':>9} {'busy':>6} {'ttft50':>8} {'99 ms':>8}"
        f" {'added':>8} {'/bare':>8} {'/gRPC':>8}"
    )
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
        address, processes = stack.enter_context(
            api_process(settings, core, other_core, options.profile)
        )
        port = urlsplit(read_endpoint(settings.home).openai_url).port
        assert port is not None
        for case in [Case(int(each)) for each in options.chats.split(",")]:
            with echo_process(core, case) as bare:
                beside = run(case, *bare, key, options.seconds)
            rpc = by_grpc(case, address, processes, key, options.seconds)
            table(
                case.name.replace("stream", "chat"),
                beside,
                rpc,
                run(case, port, processes, key, options.seconds),
            )
        short = Case(SHORT_STREAMS)
        with echo_process(core, short) as bare:
            beside = run(short, *bare, key, options.seconds, short_tokens=1)
        rpc = run(
            short, port, processes, key, options.seconds, short_tokens=1, grpc_address=address
        )
        table(
            "requests of one token",
            beside,
            rpc,
            run(short, port, processes, key, options.seconds, short_tokens=1),
        )
        whole = {"whole": True, "period_s": WHOLE_PERIOD_S}
        one, more = (
            run(
                Case(WHOLE_STREAMS),
                port,
                processes,
                key,
                options.seconds,
                short_tokens=count,
                **whole,
            )
            for count in (1, WHOLE_TOKENS)
        )
        line("Weir, HTTP, one token in one piece", one)
        line(
            f"Weir, HTTP, {WHOLE_TOKENS} tokens in one piece",
            more,
            f"{more.unit_us / one.unit_us:>17.2f}x beside one token",
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="per case (default: %(default)s)"
    )
    parser.add_argument(
        "--chats", default="1,50,200", help="numbers of concurrent chats (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
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
