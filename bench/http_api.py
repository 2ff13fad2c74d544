"""Cost of the OpenAI HTTP API against gRPC and a bare aiohttp server with the same events.

Measures server CPU per token of a streamed chat and per request, and the time to the first token.

    python -m bench.http_api [--seconds 4] [--chats 1,50,200] [--directory DIR] [--tokens]

One api process on a core of its own; on another core PostgreSQL, the worker of the simulated engine
and the client. Each chat has its own connection, with one token per engine step. Concurrent probes
request two tokens: their time to first token, less that of the bare server, is added by Weir. The
next case has 50 connections with consecutive answers of one token: the cost of a request from its
head to its settlement. Another one compares these requests with a token of a trusted issuer to
those with an API key. The last one has unstreamed answers of one token and of 16.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench import streams
from bench.harness import Bench, Case, Cases, Figure, Values, main
from bench.site import (
    MODEL,
    Server,
    add_site_options,
    create_keys,
    create_token,
    new_site,
    quantile,
    run_load,
)
from bench.streams import PROMPT, WARM_UP_S, scale, step_s

LOAD = "bench.http_api_load"
SHORT_STREAMS = 50
# For unstreamed answers. All at one rate, since constant background work weighs more on fewer
# requests.
WHOLE_TOKENS, WHOLE_STREAMS, WHOLE_PERIOD_S = 16, 150, 1.0
FIGURES = {
    "unit_us": Figure("api CPU, µs", ".1f"),
    "beside_grpc": Figure("api CPU beside gRPC", ".2f", "no"),
    "per_s": Figure("tokens or requests/s", compared="no"),
    "busy": Figure("api core busy", ".0%", "no"),
    "ttft_p50_ms": Figure("TTFT p50, ms", ".2f", "difference"),
    "ttft_p99_ms": Figure("TTFT p99, ms", ".2f", "difference"),
}


def run(server: Server, key: str, count: int, seconds: float, **more: Any) -> dict[str, float]:
    """Measure a server with so many chats, per token; short answers per request."""
    load: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": server.http_port or int(server.address),
        "model": MODEL,
        "prompt": PROMPT,
        "api_key": key,
        "stream_count": count,
        "step_s": step_s(count),
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    } | more
    report, used_s = run_load((LOAD, "client"), load, server.processes)
    unit_count = report["request_count" if load.get("short_tokens") else "token_count"]
    found = {
        "unit_us": used_s["api"] * 1e6 / unit_count,
        "per_s": unit_count / seconds,
        "busy": used_s["api"] / seconds,
    }
    if report["ttft_ms"]:
        found["ttft_p50_ms"] = quantile(report["ttft_ms"], 0.5)
        found["ttft_p99_ms"] = quantile(report["ttft_ms"], 0.99)
    return found


def short_by_grpc(server: Server, key: str, seconds: float) -> Values:
    """Measure consecutive chats of one token over gRPC."""
    load = {
        "addresses": [server.address],
        "model": MODEL,
        "prompts": [PROMPT],
        "chat": True,
        "api_keys": [key] * SHORT_STREAMS,
        "output_tokens": 1,
        "warm_up_s": WARM_UP_S,
        "seconds": seconds,
    }
    report, used_s = run_load((streams.LOAD, "client"), load, server.processes)
    count = report["request_count"]
    return {"unit_us": used_s["api"] * 1e6 / count, "per_s": count / seconds}


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Run the api process, and yield the cases."""
    seconds = options.seconds
    with (
        new_site(options.directory) as site,
        site.simulated(scale(), profile=options.profile) as weir,
    ):
        [key] = create_keys(site.database_url, 1)

        def case(name: str, count: int, by_grpc: Any, **more: Any) -> Case:
            of_grpc = [float("nan")]

            def bare() -> Values:
                with site.baseline(LOAD, step_s=step_s(count)) as server:
                    return run(server, key, count, seconds, **more)

            def grpc() -> Values:
                found: Values = by_grpc()
                of_grpc[0] = found["unit_us"]
                return found

            def http() -> Values:
                # In this round or, where HTTP is measured first, the one before.
                found = run(weir, key, count, seconds, **more)
                if of_grpc[0] != of_grpc[0]:
                    return found
                return found | {"beside_grpc": found["unit_us"] / of_grpc[0]}

            return Case(name, {"bare aiohttp": bare, "Weir, gRPC": grpc, "Weir, HTTP": http})

        short = partial(run, weir, count=SHORT_STREAMS, seconds=seconds, short_tokens=1)
        callers = {"API key": key, "token of an issuer": create_token(site.database_url)}
        tokens = Case(
            "requests of one token, by credential",
            {way: partial(short, key=each) for way, each in callers.items()},
        )
        if options.tokens:
            yield [tokens]
            return
        whole = partial(run, weir, key, WHOLE_STREAMS, seconds, whole=True, period_s=WHOLE_PERIOD_S)
        yield [
            *(
                case(
                    f"{count} chats, by token",
                    count,
                    partial(streams.run, weir, key, count, seconds),
                )
                for count in map(int, options.chats.split(","))
            ),
            case(
                "requests of one token",
                SHORT_STREAMS,
                partial(short_by_grpc, weir, key, seconds),
                short_tokens=1,
            ),
            tokens,
            Case(
                "answers in one piece, over HTTP",
                {
                    "one token": partial(whole, short_tokens=1),
                    f"{WHOLE_TOKENS} tokens": partial(whole, short_tokens=WHOLE_TOKENS),
                },
            ),
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_site_options(parser, 4.0)
    parser.add_argument(
        "--chats", default="1,50,200", help="numbers of concurrent chats (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", action="store_true", help="only the case with a token of an issuer"
    )


BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
