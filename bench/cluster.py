"""Service before a cluster of simulated GPUs: CPU per token and request with 1, 8 and 64 replicas.

Also shows the load that fills one api core, and the gain of a second one.

    python -m bench.cluster [--seconds 5] [--replicas 1,8,64] [--dilation 0.2,1.6,13] [--directory
    /dev/shm]

gRPC, authentication, tokenizing, admission, queue, placement, metering and settlement are the
product's, and so are the engines' worker processes, one for each replica, with their schedulers and
prefix caches. The GPUs are simulated: each replica has the costs of Llama 3.3 70B in FP8 on two
H200, from NVIDIA's published figures of TensorRT-LLM (`inference/core/options.py`). Requests have
the lengths of the reference workload, 1,025 tokens in, of which 200 are shared, and 150 out on
average; 32 run concurrently for each replica, on 16 streams in total.

Time is dilated if so many replicas would exceed this machine: dilation 13 means that they are 13
times slower than the hardware, and 0.2 that one is five times faster, to compare at similar rates.
"undilated" is the rate at the hardware's own speed. The tokens of a replica's step for one stream
are one message of "tok/msg" tokens; larger messages cost less per token.

One core runs the api processes (two share it in the last case), the other one everything else:
PostgreSQL, workers, client. Costs are CPU time of processes. Figures for a full core are computed
from them and marked so; the case "full" checks them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from api.core.settings import Settings, bundled_models
from bench.cluster_load import await_replicas
from bench.harness import (
    MODEL,
    Processes,
    Site,
    Table,
    api_process,
    create_keys,
    new_site,
    options_of,
    pin,
    run_load,
)

STREAM_COUNT = 16
OUTSTANDING_PER_REPLICA = 32
WARM_UP_S = 3.0
SETTLE_S = 2.0  # of hardware time: to compute the prompts of all concurrent requests

TABLE = Table(
    24,
    (
        ("dilation", "{:>8g}"),
        ("tokens/s", "{:>8,.0f}"),
        ("adm./s", "{:>6.1f}"),
        ("in/adm.", "{:>7,.0f}"),
        ("undilated", "{:>9,.0f}"),
        ("tok/msg", "{:>7.1f}"),
        ("api busy", "{:>8.0%}"),
        ("rest", "{:>5.0%}"),
        ("µs/token", "{:>8.1f}"),
        ("µs/req.", "{:>7,.0f}"),
        ("pg", "{:>5,.0f}"),
        ("workers", "{:>7,.0f}"),
        ("client", "{:>6,.0f}"),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Number of replicas and api processes, and the dilation of time."""

    name: str
    replica_count: int
    dilation: float
    api_count: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case. `cpu_s` is the CPU time by process while counting; "api" is all apis."""

    case: Case
    token_count: int
    message_count: int
    admitted_count: int
    input_token_count: int
    finished_count: int
    wall_s: float
    cpu_s: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens per second of real time on this machine."""
        return self.token_count / self.wall_s

    @property
    def replica_tokens_per_s(self) -> float:
        """Tokens per second of one replica at the speed of its hardware."""
        return self.tokens_per_s * self.case.dilation / self.case.replica_count

    @property
    def api_token_us(self) -> float:
        """CPU time of the api per delivered token, in µs, including the costs of requests."""
        return self.cpu_s["api"] / self.token_count * 1e6

    def request_us(self, process: str) -> float:
        """Compute the CPU time of a process per request, in µs."""
        return self.cpu_s[process] / self.finished_count * 1e6


@dataclass(frozen=True, slots=True)
class Capacity:
    """Computed capacity of one api core, and api cores per PostgreSQL core."""

    tokens_per_s: float
    requests_per_s: float
    replica_count: float
    api_core_count: float


def capacity(
    token_us: float, request_us: float, postgres_request_us: float, replica_tokens_per_s: float
) -> Capacity:
    """Compute the capacity from the CPU costs of the api per token and per request, in µs.

    `postgres_request_us` is PostgreSQL's CPU cost per request.
    """
    tokens_per_s = 1e6 / token_us
    return Capacity(
        tokens_per_s,
        1e6 / request_us,
        tokens_per_s / replica_tokens_per_s,
        request_us / postgres_request_us,
    )


@contextlib.contextmanager
def cluster(case: Case, site: Site, key: str) -> Iterator[tuple[list[str], Processes]]:
    """Run the api processes of a case, with all their replicas ready."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(case.api_count):
            home = stack.enter_context(site.home())
            count = case.replica_count // case.api_count
            version = {
                "engine": "simulated",
                "directory": str(next(iter(bundled_models().values())).absolute()),
            }
            fleet = {"models": {MODEL: version | {"replicas": {"min": count, "max": count}}}}
            (home / "fleet.yaml").write_text(json.dumps(fleet))  # JSON is a subset of YAML
            settings = Settings.of(
                database_url=site.database_url,
                home=home,
                listen="127.0.0.1:0",
                models={},
                fleet=str(home / "fleet.yaml"),
                requests_per_process_max=10_000,
                queue_requests_per_tenant_max=10_000,
                simulated_time_scale=case.dilation,
            )
            server = stack.enter_context(api_process(settings, site.core, site.other_core))
            servers.append(server)
            await_replicas(server.address, key)
            pin(server.processes["engine"](), site.other_core)
        parts = [each.processes for each in servers]
        yield (
            [each.address for each in servers],
            {
                "api": lambda: [pid for each in parts for pid in each["api"]()],
                "workers": lambda: [pid for each in parts for pid in each["engine"]()],
                "postgres": parts[0]["postgres"],
            },
        )


def run(
    case: Case, addresses: Sequence[str], processes: Processes, keys: Sequence[str], seconds: float
) -> Result:
    """Measure the cluster under load from one client.

    Raises: RuntimeError if a request fails.
    """
    load = {
        "addresses": addresses,
        "model": MODEL,
        "api_keys": keys,
        "outstanding_count": case.replica_count * OUTSTANDING_PER_REPLICA,
        "warm_up_s": WARM_UP_S + case.dilation * SETTLE_S,
        "seconds": seconds,
    }
    report, used_s = run_load(("bench.cluster_load",), load, processes)
    counts = {
        name: report[name]
        for name in (
            "token_count",
            "message_count",
            "admitted_count",
            "input_token_count",
            "finished_count",
        )
    }
    used_s["client"] = report["cpu_s"]
    return Result(case, **counts, wall_s=report["wall_s"], cpu_s=used_s)


def print_row(result: Result) -> None:
    """Print one line of the table."""
    case, admitted_count = result.case, max(result.admitted_count, 1)
    busy = {name: used_s / result.wall_s for name, used_s in result.cpu_s.items()}
    TABLE.print_row(
        case.name,
        case.dilation,
        result.tokens_per_s,
        admitted_count / result.wall_s,
        result.input_token_count / admitted_count,
        result.tokens_per_s * case.dilation,
        result.token_count / result.message_count,
        busy["api"],
        sum(busy.values()) - busy["api"],
        result.api_token_us,
        *(result.request_us(name) for name in ("api", "postgres", "workers", "client")),
    )


def conclusion(result: Result) -> str:
    """Format the computed figures of one case, marked as computed."""
    found = capacity(
        result.api_token_us,
        result.request_us("api"),
        result.request_us("postgres"),
        result.replica_tokens_per_s,
    )
    return (
        f"{result.case.name}: computed: a full api core delivers {found.tokens_per_s:,.0f} tokens/s"
        f" and admits {found.requests_per_s:,.0f} requests/s, those of {found.replica_count:.1f}"
        f" replicas at {result.replica_tokens_per_s:,.0f} tokens/s; {found.api_core_count:.0f} such"
        " cores fill one core of PostgreSQL"
    )


def measure(options: argparse.Namespace, site: Site) -> None:
    """Run every case, and print the table and the computed figures."""
    keys = create_keys(site.database_url, STREAM_COUNT)
    counts = [int(each) for each in options.replicas.split(",")]
    dilations = [float(each) for each in options.dilation.split(",")]
    cases = [
        Case(f"{n} replica{'s'[: n - 1]}, 1 api", n, dilation)
        for n, dilation in zip(counts, dilations, strict=True)
    ]
    cases.append(Case(f"full: {options.full} replicas, 1 api", options.full, options.full_dilation))
    cases.append(Case(f"{options.two} replicas, 2 api", options.two, options.two_dilation, 2))
    print("GPUs are simulated, with dilated time where shown; everything before them is real")
    TABLE.print_head()
    results = []
    for case in cases:
        with cluster(case, site, keys[0]) as (addresses, processes):
            results.append(run(case, addresses, processes, keys, options.seconds))
        print_row(results[-1])
    for result in results[-2:]:
        print(conclusion(result))


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, 5.0)
    parser.add_argument(
        "--replicas", default="1,8,64", help="number of replicas, by case (default: %(default)s)"
    )
    parser.add_argument(
        "--dilation",
        default="0.2,1.6,13",
        help="time dilation, one for each case (default: %(default)s)",
    )
    parser.add_argument(
        "--full",
        type=int,
        default=16,
        help="replicas of the case with a full api core (default: %(default)s)",
    )
    parser.add_argument(
        "--full-dilation",
        type=float,
        default=0.5,
        help="time dilation of that case (default: %(default)s)",
    )
    parser.add_argument(
        "--two",
        type=int,
        default=8,
        help="replicas of the case with two api processes (default: %(default)s)",
    )
    parser.add_argument(
        "--two-dilation",
        type=float,
        default=1.6,
        help="time dilation of that case (default: %(default)s)",
    )
    options = parser.parse_args()
    with new_site(options.directory) as site:
        measure(options, site)


if __name__ == "__main__":
    main()
