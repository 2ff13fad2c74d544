"""Requests per second through everything before a model: gRPC, authentication, quotas, queue,
settlement.

    python -m bench.front [--seconds 4] [--prompt-words 25] [--rate N] [--directory /dev/shm]

One api process on a core of its own; on another core everything else: PostgreSQL, the worker of a
simulated engine without delays, and the client. Each request asks for one token, on open streams,
each with its own key and five quotas. The baseline is a bare gRPC server instead of the api
process, with the same number of frames. CPU times are per request. "Until the batch" is the
server's time from a start frame to the engine's batch; admission and end are seen by the client.
The case at random times has half of the rate reached before, or `--rate`. The last one compares
requests with an end user and four labels to those without; nothing of them is limited.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

from bench.grpc_load import STAGES
from bench.harness import Bench, Case, Cases, Figure, Values, main
from bench.site import MODEL, Server, add_site_options, create_keys, new_site, quantile, run_load

LOAD = "bench.grpc_load"
STREAM_COUNT = 64
WARM_UP_S = 1.0
SUBJECTS = {
    "end_users": [f"user-{number}" for number in range(4)],
    "labels": {"team": "search", "feature": "autocomplete", "environment": "live", "run": "4711"},
}
SHARES = {"p50": 0.5, "p99": 0.99}
TIMES = {"batch": "until the batch", "admitted": "to admission", "finished": "to the end"}
FIGURES = {
    "api_us": Figure("api CPU, µs"),
    "per_s": Figure("requests/s"),
    "api_busy": Figure("api core busy", ".0%", "no"),
    **{
        f"{name}_us": Figure(f"{name} CPU, µs", compared="no")
        for name in ("postgres", "engine", "client")
    },
    **{
        f"{key}_{share}": Figure(f"{label} {share}, ms", ",.2f", "difference")
        for key, label in TIMES.items()
        for share in SHARES
    },
    **{
        f"{name}_{share}": Figure(f"  {name} {share}, ms", ",.2f", "no")
        for name in STAGES
        for share in SHARES
    },
}


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Run both servers, and yield the cases."""
    prompt = " ".join(["hotel"] * options.prompt_words)
    reached = [0.0]  # requests per second of the latest full case
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(new_site(options.directory))
        keys = create_keys(site.database_url, STREAM_COUNT)
        servers = {
            "bare gRPC": stack.enter_context(site.baseline(LOAD)),
            "Weir": stack.enter_context(site.simulated(0.0, profile=options.profile)),
        }

        def case(
            name: str,
            stream_count: int,
            outstanding_count: int,
            *,
            paced: bool,
            named: bool = False,
        ) -> Case:
            def run(way: str, server: Server, subjects: Mapping[str, object]) -> Values:
                load = {
                    "addresses": [server.address],
                    "model": MODEL,
                    "prompts": [prompt],
                    "api_keys": keys[:stream_count],
                    "output_tokens": 1,
                    "outstanding_count": outstanding_count,
                    "rate_per_s": (options.rate or reached[0] / 2) if paced else 0.0,
                    "warm_up_s": WARM_UP_S,
                    "seconds": options.seconds,
                    **subjects,
                }
                report, used_s = run_load((LOAD, "client"), load, server.processes)
                count, stages = max(report["request_count"], 1), report["stages_ms"]
                per_s = count / report["wall_s"]
                if way == "Weir" and not paced:
                    reached[0] = per_s
                used_s["client"] = report["cpu_s"]
                times = {"admitted": report["admitted_ms"], "finished": report["finished_ms"]}
                if way != "bare gRPC":
                    times["batch"] = [sum(each) for each in zip(*stages.values(), strict=True)]
                    times |= stages if paced else {}
                return {
                    "per_s": per_s,
                    "api_busy": used_s["api"] / report["wall_s"],
                    **{f"{name}_us": used / count * 1e6 for name, used in used_s.items()},
                    **{
                        f"{name}_{label}": quantile(values, share)
                        for name, values in times.items()
                        for label, share in SHARES.items()
                    },
                }

            if named:
                weir, ways = servers["Weir"], {"without": {}, "end users": SUBJECTS}
                return Case(
                    name, {way: partial(run, way, weir, each) for way, each in ways.items()}
                )
            return Case(name, {way: partial(run, way, each, {}) for way, each in servers.items()})

        paced = case("requests at random times", STREAM_COUNT, 1, paced=True)
        full = [
            case(f"{STREAM_COUNT} streams, one request on each", STREAM_COUNT, 1, paced=False),
            case("16 streams, 16 requests on each", 16, 16, paced=False),
        ]
        named = case("16 requests on each, for end users", 16, 16, paced=False, named=True)
        if options.end_users:
            yield [named]
        else:
            yield [paced] if options.rate else [*full, paced, named]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_site_options(parser, 4.0)
    parser.add_argument(
        "--prompt-words", type=int, default=25, help="each about one token (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, help="only the case at random times, with so many requests per second"
    )
    parser.add_argument(
        "--end-users", action="store_true", help="only the case with end users and labels"
    )


BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
