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
import statistics
from dataclasses import dataclass
from typing import Any

from bench.harness import MODEL, Server, Site, Table, create_keys, new_site, options_of, run_load
from inference.core.options import CostModel

LOAD = "bench.streams_load"
STEP_MS = 20.0  # step time of a small batch: 50 tokens per second and stream
PROMPT_TOKENS, DECODED_TOKENS_MEAN = 25, 200  # average number of attended positions, approximate
WARM_UP_S = 1.5
TABLE = Table(
    30,
    (
        ("tokens/s", "{:>9,.0f}"),
        ("µs/token", "{:>9.1f}"),
        ("µs/msg", "{:>8.1f}"),
        ("busy", "{:>6.0%}"),
        ("client", "{:>6.0%}"),
        ("ttft50", "{:>8.2f}"),
        ("99 ms", "{:>8.2f}"),
        ("late 99", "{:>8.2f}"),
        ("ratio", "{:>6.1f}x"),
        ("+ttft50", "{:>+8.2f}"),
        ("99 ms", "{:>+8.2f}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Number of concurrent answers, each on its own connection or all on one stream."""

    stream_count: int
    shared: bool = False

    @property
    def name(self) -> str:
        """Label of the case in the table."""
        return (
            f"{self.stream_count} on one stream" if self.shared else f"{self.stream_count} streams"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case. CPU times of the server are in µs."""

    token_us: float
    message_us: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    late_p99_ms: float
    tokens_per_s: float
    busy: float
    client_busy: float


def scale() -> float:
    """Compute the time scale with which a small batch of the simulated engine takes `STEP_MS`."""
    return STEP_MS / CostModel().weights_ms


def step_s(case: Case) -> float:
    """Compute the duration of a step of the simulated engine in this case."""
    return CostModel(time_scale=scale()).step_s(
        case.stream_count, case.stream_count * (PROMPT_TOKENS + DECODED_TOKENS_MEAN)
    )


def run(case: Case, server: Server, key: str, seconds: float, prefetch_tokens: int = 0) -> Result:
    """Measure a server under load from one client. Raises: RuntimeError if the client fails."""
    load = {
        "address": server.address,
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
    report, used_s = run_load((LOAD, "client"), load, server.processes)
    return summary(report, used_s["api"] * 1e6, seconds)


def summary(report: dict[str, Any], cpu_us: float, seconds: float) -> Result:
    """Compute the figures of one run. Raises: RuntimeError if it was too short."""
    if len(report["ttft_ms"]) < 2 or len(report["gap_ms"]) < 2:
        raise RuntimeError(
            f"fewer than two answers began within {seconds:.0f} s: give it more with --seconds"
        )
    ttft = statistics.quantiles(report["ttft_ms"], n=100)
    gaps = statistics.quantiles(report["gap_ms"], n=100)
    return Result(
        token_us=cpu_us / report["token_count"],
        message_us=cpu_us / report["message_count"],
        ttft_p50_ms=ttft[49],
        ttft_p99_ms=ttft[98],
        late_p99_ms=gaps[98] - gaps[49],
        tokens_per_s=report["token_count"] / seconds,
        busy=cpu_us / 1e6 / seconds,
        client_busy=report["cpu_s"] / seconds,
    )


def print_row(name: str, result: Result, bare: Result | None) -> None:
    """Print one line of the table. `bare` is the result of the bare server."""
    more: tuple[float, ...] = ()
    if bare is not None:
        more = (
            result.token_us / bare.token_us,
            result.ttft_p50_ms - bare.ttft_p50_ms,
            result.ttft_p99_ms - bare.ttft_p99_ms,
        )
    TABLE.print_row(
        name,
        result.tokens_per_s,
        result.token_us,
        result.message_us,
        result.busy,
        result.client_busy,
        result.ttft_p50_ms,
        result.ttft_p99_ms,
        result.late_p99_ms,
        *more,
    )


def measure(options: argparse.Namespace, site: Site) -> None:
    """Run every case on both servers, and print the table."""
    [key] = create_keys(site.database_url, 1)
    counts = [int(each) for each in options.streams.split(",")]
    cases = [*(Case(count) for count in counts), Case(max(counts), shared=True)]
    TABLE.print_head()
    with site.simulated(scale()) as weir:
        for case in cases:
            with site.baseline(LOAD, step_s=step_s(case)) as server:
                bare = run(case, server, key, options.seconds)
            print_row(f"bare grpc.aio, {case.name}", bare, None)
            print_row(f"Weir, {case.name}", run(case, weir, key, options.seconds), bare)
            for prefetch_tokens in map(int, filter(None, options.prefetch.split(","))):
                result = run(case, weir, key, options.seconds, prefetch_tokens)
                print_row(f"  with a prefetch of {prefetch_tokens}", result, bare)


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, 6.0)
    parser.add_argument(
        "--streams", default="1,50,500", help="numbers of concurrent streams (default: %(default)s)"
    )
    parser.add_argument(
        "--prefetch",
        default="",
        help="also with credit for these numbers of tokens (default: none)",
    )
    options = parser.parse_args()
    with new_site(options.directory) as site:
        measure(options, site)


if __name__ == "__main__":
    main()
