"""Cost of the OpenAI HTTP API against gRPC and a bare aiohttp server with the same events.

Measures server CPU per token of a streamed chat and per request, and the time to the first token.

    python -m bench.http_api [--seconds 4] [--chats 1,50,200] [--directory DIR] [--profile FILE]

One api process on a core of its own; on another core PostgreSQL, the worker of the simulated engine
and the client. Each chat has its own connection, with one token per engine step. Concurrent probes
request two tokens: their time to first token, less that of the bare server, is added by Weir. The
next lines have 50 connections with consecutive answers of one token: the cost of a request from its
head to its settlement. The last two have unstreamed answers of one token and of 16, and their
ratio.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from typing import Any

from bench import streams
from bench.harness import MODEL, Server, Site, Table, create_keys, new_site, options_of, run_load
from bench.streams import PROMPT_TOKENS, WARM_UP_S, Case, scale, step_s

LOAD = "bench.http_api_load"
SHORT_STREAMS = 50
# For unstreamed answers. All at one rate, since constant background work weighs more on fewer
# requests.
WHOLE_TOKENS, WHOLE_STREAMS, WHOLE_PERIOD_S = 16, 150, 1.0
TABLE = Table(
    34,
    (
        ("a second", "{:>9,.0f}"),
        ("µs each", "{:>9.1f}"),
        ("busy", "{:>6.0%}"),
        ("ttft50", "{:>8.2f}"),
        ("99 ms", "{:>8.2f}"),
        ("added", "{:>+8.2f}"),
        ("/bare", "{:>7.2f}x"),
        ("/gRPC", "{:>7.2f}x"),
    ),
)
PROMPT = " ".join(["hotel"] * PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case. `unit_us` is the server's CPU per token, or per short request, in µs."""

    unit_us: float
    rate_per_s: float
    busy: float
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None


def run(case: Case, server: Server, key: str, seconds: float, **more: Any) -> Result:
    """Measure a server under load from one client. Raises: RuntimeError if the client fails."""
    load: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": server.http_port or int(server.address),
        "model": MODEL,
        "prompt": PROMPT,
        "api_key": key,
        "stream_count": case.stream_count,
        "step_s": step_s(case),
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    } | more
    report, used_s = run_load((LOAD, "client"), load, server.processes)
    count = report["request_count" if load.get("short_tokens") else "token_count"]
    result = Result(used_s["api"] * 1e6 / count, count / seconds, used_s["api"] / seconds)
    if report["ttft_ms"]:
        ttft_ms = statistics.quantiles(report["ttft_ms"], n=100)
        result = replace(result, ttft_p50_ms=ttft_ms[49], ttft_p99_ms=ttft_ms[98])
    return result


def by_grpc(case: Case, server: Server, key: str, seconds: float) -> Result:
    """Run the same chats over gRPC, as `bench.streams` does."""
    result = streams.run(case, server, key, seconds)
    return Result(
        result.token_us, result.tokens_per_s, result.busy, result.ttft_p50_ms, result.ttft_p99_ms
    )


def print_row(name: str, result: Result, *derived: float | None) -> None:
    """Print one line of the table, with the figures computed from the measured ones."""
    TABLE.print_row(
        name,
        result.rate_per_s,
        result.unit_us,
        result.busy,
        result.ttft_p50_ms,
        result.ttft_p99_ms,
        *derived,
    )


def print_case(name: str, bare: Result, rpc: Result, http: Result) -> None:
    """Print the three lines of one case."""
    print_row(f"bare aiohttp, {name}", bare)
    print_row(f"Weir, gRPC, {name}", rpc, added_ms(rpc, bare), rpc.unit_us / bare.unit_us)
    ratios = http.unit_us / bare.unit_us, http.unit_us / rpc.unit_us
    print_row(f"Weir, HTTP, {name}", http, added_ms(http, bare), *ratios)


def added_ms(result: Result, bare: Result) -> float | None:
    """Compute by how many ms the time to first token exceeds that of the bare server."""
    if result.ttft_p50_ms is None or bare.ttft_p50_ms is None:
        return None
    return result.ttft_p50_ms - bare.ttft_p50_ms


def measure(options: argparse.Namespace, site: Site) -> None:
    """Run every case on all three servers, and print the table."""
    [key] = create_keys(site.database_url, 1)
    seconds = options.seconds
    TABLE.print_head()
    with site.simulated(scale(), profile=options.profile) as weir:
        for case in [Case(int(each)) for each in options.chats.split(",")]:
            with site.baseline(LOAD, step_s=step_s(case)) as server:
                bare = run(case, server, key, seconds)
            rpc = by_grpc(case, weir, key, seconds)
            name = case.name.replace("stream", "chat")
            print_case(name, bare, rpc, run(case, weir, key, seconds))
        short = Case(SHORT_STREAMS)
        with site.baseline(LOAD, step_s=step_s(short)) as server:
            bare = run(short, server, key, seconds, short_tokens=1)
        rpc = run(short, weir, key, seconds, short_tokens=1, grpc_address=weir.address)
        http = run(short, weir, key, seconds, short_tokens=1)
        print_case("requests of one token", bare, rpc, http)
        whole = {"whole": True, "period_s": WHOLE_PERIOD_S}
        one, more = (
            run(Case(WHOLE_STREAMS), weir, key, seconds, short_tokens=count, **whole)
            for count in (1, WHOLE_TOKENS)
        )
        print_row("Weir, HTTP, one token in one piece", one)
        print_row(f"Weir, HTTP, {WHOLE_TOKENS} tokens in one piece", more)
        print(f"{WHOLE_TOKENS} tokens beside one: {more.unit_us / one.unit_us:.2f}x")


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, 4.0)
    parser.add_argument(
        "--chats", default="1,50,200", help="numbers of concurrent chats (default: %(default)s)"
    )
    parser.add_argument(
        "--profile", help="write a profile of the api process to this file; slows it down"
    )
    options = parser.parse_args()
    with new_site(options.directory) as site:
        measure(options, site)


if __name__ == "__main__":
    main()
