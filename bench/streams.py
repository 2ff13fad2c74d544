"""Cost per token through the service, against a bare `grpc.aio` server with the same messages.

Server CPU per delivered token and time to first token at 1, 50 and 500 streams.

    python -m bench.streams [--seconds 6] [--streams 1,50,500] [--directory /dev/shm]

One api process on a core of its own; on another core PostgreSQL, the worker of the simulated engine
and the client. Each answer has its own connection, with one token per engine step; the last case
has 500 on one stream, where a step is one message. Then concurrent probes request short answers:
their time to first token, less that of the bare server, is added by Weir. Both use the step time of
the simulated engine at this batch. "Late" is the delay of a message after the previous one, beyond
the usual gap.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from bench.harness import Bench, Case, Cases, Figure, Unusable, Values, main
from bench.site import (
    MODEL,
    Server,
    Site,
    add_site_options,
    create_keys,
    new_site,
    quantile,
    run_load,
)
from inference.core.options import CostModel

LOAD = "bench.grpc_load"
STEP_MS = 20.0  # step time of a small batch: 50 tokens per second and stream
LONG_TOKENS = 1500
PROMPT_TOKENS, DECODED_TOKENS_MEAN = 25, 200  # average number of attended positions, approximate
WARM_UP_S = 1.5
PROMPT = " ".join(["hotel"] * PROMPT_TOKENS)
FIGURES = {
    "unit_us": Figure("api CPU of a token, µs", ".1f"),
    "message_us": Figure("of a message, µs", ".1f"),
    "per_s": Figure("tokens/s", compared="no"),
    "busy": Figure("api core busy", ".0%", "no"),
    "client_busy": Figure("client's core busy", ".0%", "no"),
    "ttft_p50_ms": Figure("TTFT p50, ms", ".2f", "difference"),
    "ttft_p99_ms": Figure("TTFT p99, ms", ".2f", "difference"),
    "late_p99_ms": Figure("late p99, ms", ".2f", "difference"),
}


def scale() -> float:
    """Compute the time scale with which a small batch of the simulated engine takes `STEP_MS`."""
    return STEP_MS / CostModel().weights_ms


def step_s(stream_count: int) -> float:
    """Compute the duration of a step of the simulated engine with so many streams."""
    return CostModel(time_scale=scale()).step_s(
        stream_count, stream_count * (PROMPT_TOKENS + DECODED_TOKENS_MEAN)
    )


def run(server: Server, key: str, count: int, seconds: float, *, shared: bool = False) -> Values:
    """Measure a server with so many long answers. Raises: Unusable if `seconds` is too short."""
    load = {
        "addresses": [server.address],
        "model": MODEL,
        "prompts": [PROMPT],
        "api_keys": [key] if shared else [key] * count,
        "outstanding_count": count if shared else 1,
        "output_tokens": LONG_TOKENS,
        "step_s": step_s(count),
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    }
    report, used_s = run_load((LOAD, "client"), load, server.processes)
    if len(report["ttft_ms"]) < 2 or len(report["gap_ms"]) < 2:
        raise Unusable(f"--seconds {seconds:g} is too short: fewer than two answers began within")
    gaps, cpu_us = report["gap_ms"], used_s["api"] * 1e6
    return {
        "unit_us": cpu_us / report["token_count"],
        "message_us": cpu_us / report["message_count"],
        "per_s": report["token_count"] / seconds,
        "busy": used_s["api"] / seconds,
        "client_busy": report["cpu_s"] / seconds,
        "ttft_p50_ms": quantile(report["ttft_ms"], 0.5),
        "ttft_p99_ms": quantile(report["ttft_ms"], 0.99),
        "late_p99_ms": quantile(gaps, 0.99) - quantile(gaps, 0.5),
    }


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Run the api process, and yield the cases."""
    counts = [int(each) for each in options.streams.split(",")]

    def case(site: Site, weir: Server, key: str, count: int, *, shared: bool) -> Case:
        def bare() -> Values:
            with site.baseline(LOAD, step_s=step_s(count)) as server:
                return run(server, key, count, options.seconds, shared=shared)

        def ours() -> Values:
            return run(weir, key, count, options.seconds, shared=shared)

        name = f"{count} answers on one stream" if shared else f"{count} streams"
        return Case(name, {"bare grpc.aio": bare, "Weir": ours})

    with (
        new_site(options.directory) as site,
        site.simulated(scale(), profile=options.profile) as weir,
    ):
        [key] = create_keys(site.database_url, 1)
        yield [
            *(case(site, weir, key, count, shared=False) for count in counts),
            case(site, weir, key, max(counts), shared=True),
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_site_options(parser, 6.0)
    parser.add_argument(
        "--streams", default="1,50,500", help="numbers of concurrent streams (default: %(default)s)"
    )


BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
