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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness import (
    MODEL,
    Server,
    Site,
    Table,
    create_keys,
    new_site,
    options_of,
    quantile_ms,
    run_load,
)

LOAD = "bench.front_load"
STREAM_COUNT = 64
WARM_UP_S = 1.0
TABLE = Table(
    44,
    (
        ("per s", "{:>8,.0f}"),
        ("api µs", "{:>7.0f}"),
        ("busy", "{:>6.0%}"),
        ("pg µs", "{:>8.0f}"),
        ("engine", "{:>8.0f}"),
        ("client", "{:>8.0f}"),
        ("batch50", "{:>8.2f}"),
        ("99 ms", "{:>7.2f}"),
        ("admit50", "{:>7.2f}"),
        ("99 ms", "{:>7.2f}"),
        ("fin.50", "{:>7.2f}"),
        ("99 ms", "{:>7.2f}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Load of one case: concurrent requests per stream, or a share of an earlier case's rate."""

    name: str
    stream_count: int
    outstanding_count: int = 0
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case."""

    report: dict[str, Any]
    cpu_us: dict[str, float]  # per request, by process

    @property
    def rate_per_s(self) -> float:
        """Requests that finish per second."""
        return float(self.report["request_count"]) / float(self.report["wall_s"])


def run(case: Case, server: Server, keys: Sequence[str], prompt: str, seconds: float) -> Result:
    """Measure a server under load from one client. Raises: RuntimeError if the client fails."""
    load = {
        "address": server.address,
        "model": MODEL,
        "prompt": prompt,
        "api_keys": keys[: case.stream_count],
        "outstanding_count": case.outstanding_count,
        "rate_per_s": case.rate_per_s,
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    }
    report, used_s = run_load((LOAD, "client"), load, server.processes, is_marked=False)
    cpu_us = {name: used / report["request_count_total"] * 1e6 for name, used in used_s.items()}
    client_us = report["cpu_s"] / max(report["request_count"], 1) * 1e6
    return Result(report, cpu_us | {"client": client_us})


def print_row(name: str, result: Result) -> None:
    """Print one line of the table."""
    report, us = result.report, result.cpu_us
    until_batch_ms = [sum(stages) for stages in zip(*report["stages_ms"].values(), strict=True)]
    TABLE.print_row(
        name,
        result.rate_per_s,
        us["api"],
        us["api"] * result.rate_per_s / 1e6,
        *(us.get(process, 0.0) for process in ("postgres", "engine", "client")),
        *(
            quantile_ms(times_ms, share) / 1000
            for times_ms in (until_batch_ms, report["admitted_ms"], report["finished_ms"])
            for share in (0.5, 0.99)
        ),
    )


def stages_row(result: Result) -> str:
    """Format p50 and p99 of each stage before the engine's batch."""
    parts = [
        f"{name} {quantile_ms(times, 0.5) / 1000:.2f}, {quantile_ms(times, 0.99) / 1000:.2f}"
        for name, times in result.report["stages_ms"].items()
    ]
    return f"{'of which, p50 and p99 in ms:':<44}{'; '.join(parts)}"


def measure(options: argparse.Namespace, site: Site) -> None:
    """Run every case and print the table."""
    keys = create_keys(site.database_url, STREAM_COUNT)
    prompt = " ".join(["hotel"] * options.prompt_words)
    many, single = (
        Case("16 streams, 16 under way on each", 16, 16),
        Case("64 streams, one under way on each", 64, 1),
    )

    def report(name: str, case: Case, server: Server) -> Result:
        result = run(case, server, keys, prompt, options.seconds)
        print_row(f"{name}, {case.name}", result)
        return result

    TABLE.print_head()
    with site.baseline(LOAD) as bare, site.simulated(0.0, profile=options.profile) as weir:
        rate_per_s = options.rate
        if not rate_per_s:
            for case in (single, many):
                report("bare gRPC", case, bare)
            report("Weir", single, weir)
            rate_per_s = report("Weir", many, weir).rate_per_s / 2
        paced = Case(
            f"{rate_per_s:,.0f} per s at random moments", STREAM_COUNT, rate_per_s=rate_per_s
        )
        report("bare gRPC", paced, bare)
        print(stages_row(report("Weir", paced, weir)))


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, 4.0)
    parser.add_argument(
        "--prompt-words", type=int, default=25, help="each about one token (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, help="run only this case: requests per second, at random times"
    )
    parser.add_argument(
        "--profile", help="write a profile of the api process to this file; slows it down"
    )
    options = parser.parse_args()
    with new_site(options.directory) as site:
        measure(options, site)


if __name__ == "__main__":
    main()
