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
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.core.settings import Settings, bundled_models
from bench.admission import server
from bench.admission_peers import MODEL
from bench.cluster_load import await_replicas
from bench.front import Processes, api_process, create_keys
from bench.processes import claim_cores, cpu_s
from metering.store.migrations_runner import migrate

STREAM_COUNT = 16
OUTSTANDING_PER_REPLICA = 32
WARM_UP_S = 3.0
SETTLE_S = 2.0  # of hardware time: to compute the prompts of all concurrent requests

HEADER = (
    f"{'':<24}{'dilation':>9}{'tokens/s':>9}{'adm./s':>7}{'in/adm.':>8}{'undilated':>10}"
    f"{'tok/msg':>8}{'api busy':>9}{'rest':>6}"
    f"{'µs/token':>9}{'µs/req.':>8}{'pg':>6}{'hosts':>7}{'client':>7}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """Replicas distributed over api processes, at a dilation of time."""

    name: str
    replica_count: int
    dilation: float
    api_count: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case. cpu_s: by process, while counting; "api" is all api processes."""

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
        """Delivered tokens per second of this machine's time."""
        return self.token_count / self.wall_s

    @property
    def replica_tokens_per_s(self) -> float:
        """Tokens per second of one replica at the hardware's speed."""
        return self.tokens_per_s * self.case.dilation / self.case.replica_count

    @property
    def api_token_us(self) -> float:
        """CPU of the api per delivered token, including the costs of requests."""
        return self.cpu_s["api"] / self.token_count * 1e6

    def request_us(self, process: str) -> float:
        """Return the CPU of a process per request."""
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
    """Compute the capacity from costs in µs of CPU.

    token_us, request_us: of the api, the same cost per token and per request; postgres_request_us:
    of PostgreSQL.
    """
    tokens_per_s = 1e6 / token_us
    return Capacity(
        tokens_per_s,
        1e6 / request_us,
        tokens_per_s / replica_tokens_per_s,
        request_us / postgres_request_us,
    )


@contextlib.contextmanager
def cluster(
    case: Case, url: str, key: str, directory: str | None, core: int, other_core: int
) -> Iterator[tuple[list[str], Processes]]:
    """Run the api processes of a case, with all their replicas ready."""
    with contextlib.ExitStack() as stack:
        addresses, parts = [], []
        for _ in range(case.api_count):
            home = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="weir-bench-", dir=directory)
                )
            )
            count = case.replica_count // case.api_count
            version = {
                "engine": "simulated",
                "directory": str(next(iter(bundled_models().values())).absolute()),
            }
            fleet = {"models": {MODEL: version | {"replicas": {"min": count, "max": count}}}}
            (home / "fleet.yaml").write_text(json.dumps(fleet))  # JSON is a subset of YAML
            settings = Settings(
                database_url=url,
                home=home,
                listen_address="127.0.0.1:0",
                models={},
                fleet_file=str(home / "fleet.yaml"),
                requests_per_process_max=10_000,
                queue_requests_per_tenant_max=10_000,
                simulated_time_scale=case.dilation,
            )
            address, processes = stack.enter_context(api_process(settings, core, other_core, None))
            addresses.append(address)
            parts.append(processes)
            await_replicas(address, key)
            pin_all(processes["engine"](), other_core)
        yield (
            addresses,
            {
                "api": lambda: [pid for each in parts for pid in each["api"]()],
                "hosts": lambda: [pid for each in parts for pid in each["engine"]()],
                "postgres": parts[0]["postgres"],
            },
        )


def pin_all(pids: Sequence[int], core: int) -> None:
    """Pin every thread of processes to one core."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})


def run(
    case: Case, addresses: Sequence[str], processes: Processes, keys: Sequence[str], seconds: float
) -> Result:
    """Load the cluster from this process's core. Raises: RuntimeError if a request fails."""
    load = {
        "addresses": addresses,
        "model": MODEL,
        "api_keys": keys,
        "outstanding_count": case.replica_count * OUTSTANDING_PER_REPLICA,
        "warm_up_s": WARM_UP_S + case.dilation * SETTLE_S,
        "seconds": seconds,
    }
    command = [sys.executable, "-m", "bench.cluster_load", json.dumps(load)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        marks = []
        for _ in range(2):
            client.stdout.readline()  # "begin", then "end"
            marks.append({name: cpu_s(pids()) for name, pids in processes.items()})
        out = client.stdout.read()
    if client.returncode or not out:
        raise RuntimeError("the client failed")
    seen = json.loads(out)
    if seen["failures"]:
        raise RuntimeError(
            f"{len(seen['failures'])} requests failed, the first with: {seen['failures'][0]}"
        )
    used = {name: marks[1][name] - marks[0][name] for name in processes} | {"client": seen["cpu_s"]}
    counts = {
        name: seen[name]
        for name in (
            "token_count",
            "message_count",
            "admitted_count",
            "input_token_count",
            "finished_count",
        )
    }
    return Result(case, **counts, wall_s=seen["wall_s"], cpu_s=used)


def row(result: Result) -> str:
    """Return one line of the table."""
    case, admitted_count = result.case, max(result.admitted_count, 1)
    busy = {name: used / result.wall_s for name, used in result.cpu_s.items()}
    return (
        f"{case.name:<24}{case.dilation:>9g}{result.tokens_per_s:>9,.0f}"
        f"{admitted_count / result.wall_s:>7.1f}{result.input_token_count / admitted_count:>8,.0f}"
        f"{result.tokens_per_s * case.dilation:>10,.0f}"
        f"{result.token_count / result.message_count:>8.1f}{busy['api']:>9.0%}"
        f"{sum(busy.values()) - busy['api']:>6.0%}"
        f"{result.api_token_us:>9.1f}{result.request_us('api'):>8,.0f}{result.request_us('postgres'):>6,.0f}"
        f"{result.request_us('hosts'):>7,.0f}{result.request_us('client'):>7,.0f}"
    )


def conclusion(result: Result) -> str:
    """Return the computed figures of one case, marked as computed."""
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


def measure(options: argparse.Namespace, url: str, core: int, other_core: int) -> None:
    """Run every case, and print the table and the computed figures."""
    migrate(url)
    keys = create_keys(url, STREAM_COUNT)
    counts = [int(each) for each in options.replicas.split(",")]
    dilations = [float(each) for each in options.dilation.split(",")]
    cases = [
        Case(f"{n} replica{'s'[: n - 1]}, 1 api", n, dilation)
        for n, dilation in zip(counts, dilations, strict=True)
    ]
    cases.append(Case(f"full: {options.full} replicas, 1 api", options.full, options.full_dilation))
    cases.append(Case(f"{options.two} replicas, 2 api", options.two, options.two_dilation, 2))
    print("GPUs are simulated, with dilated time where shown; everything before them is real")
    print(HEADER)
    results = []
    for case in cases:
        with cluster(case, url, keys[0], options.directory, core, other_core) as (
            addresses,
            processes,
        ):
            results.append(run(case, addresses, processes, keys, options.seconds))
        print(row(results[-1]), flush=True)
    for result in results[-2:]:
        print(conclusion(result))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="per case (default: %(default)s)"
    )
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
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
    )
    options = parser.parse_args()
    core, other_core = claim_cores()
    with server(None, options.directory) as url:
        measure(options, url, core, other_core)


if __name__ == "__main__":
    main()
