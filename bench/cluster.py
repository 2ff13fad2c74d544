"""Service before a cluster of simulated GPUs: CPU per token and request with 1, 8 and 64 replicas.

Also shows the load that fills one api core, and what 1, 2 and 4 api processes cost and serve.

    python -m bench.cluster [--seconds 5] [--replicas 1,8,64] [--dilation 0.2,1.6,13]
        [--processes 1,2,4] [--directory /dev/shm]

gRPC, authentication, tokenizing, admission, queue, placement, metering and settlement are the
product's, and so are the engines' worker processes, one for each replica, with their schedulers and
prefix caches. The GPUs are simulated: each replica has the costs of Llama 3.3 70B in FP8 on two
H200, from NVIDIA's published figures of TensorRT-LLM (`inference/core/options.py`). Requests have
the lengths of the reference workload, 1,025 tokens in, of which 200 are shared, and 150 out on
average; 32 run concurrently for each replica, on 16 streams in total.

Time is dilated if so many replicas would exceed this machine: dilation 13 means that they are 13
times slower than the hardware, and 0.2 that one is five times faster, to compare at similar rates.
Undilated is the rate at the hardware's own speed. The tokens of a replica's step for one stream
are one message; larger messages cost less per token.

One core runs the api processes, the other one everything else: PostgreSQL, workers, client. Costs
are CPU time of processes. Figures for a full api core are computed from them; the case `full`
checks them.

In the last case one, two and four api processes use the same workers, under the same load. They
share the api core, so their throughput with a core for each is computed: the number of cores, over
the CPU time of a request. What processes cost each other is in that time: exchanges of queues, and
smaller groups of statements. PostgreSQL's time for a request is beside it, and waits for its locks
are not. The memory is that of the workers, shared pages divided. In the burst, twice as many
requests as a key may have in a month are sent at once to all processes; `over` are those admitted
beyond the limit.

`--replicas ""`, `--full 0` and `--processes ""` leave these cases out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psycopg
from weir_client import Client, WeirError

from api.core.settings import Settings, bundled_models
from bench.grpc_load import MARK, await_replicas
from bench.harness import Bench, Case, Cases, Figure, Unusable, Values, main
from bench.site import (
    MODEL,
    Processes,
    Site,
    add_site_options,
    api_process,
    create_keys,
    new_site,
    pin,
    run_load,
)
from metering.store.db import psycopg_conninfo
from metering.tenants.authentication import prefix_of

STREAM_COUNT = 16
OUTSTANDING_PER_REPLICA = 32
WARM_UP_S = 3.0
SETTLE_S = 2.0  # of hardware time: to compute the prompts of all concurrent requests
# Each is one token of the demo model; with the mark, the length of the reference workload's
# prompts.
WORDS = (
    *("hotel", "night", "family", "guest", "kitchen", "garden"),
    *("airport", "terrace", "price", "coffee", "lobby", "staff"),
)
SHARED_WORDS, OWN_WORDS = 200, 816
OUTPUT_TOKENS_MAX = 800  # few answers reach it, so that the mean is kept
PROMPT_COUNT = 64
BURST_LIMIT = 100  # requests in a month: room does not come back in the burst
SET_LIMIT = """
INSERT INTO quotas (subject, subject_id, dimension, limit_value)
SELECT 'project', project_id, 'requests_per_month', %s FROM api_keys WHERE prefix = %s
"""
FIGURES = {
    "token_us": Figure("api CPU of a token, µs", ".1f"),
    "api_us": Figure("api CPU a request, µs"),
    "postgres_us": Figure("PostgreSQL a request, µs"),
    "workers_us": Figure("workers a request, µs"),
    "client_us": Figure("client a request, µs"),
    "dilation": Figure("dilation", "g"),
    "tokens_per_s": Figure("tokens/s"),
    "undilated_per_s": Figure("tokens/s, undilated"),
    "admitted_per_s": Figure("admissions/s", ".1f"),
    "input_tokens": Figure("input tokens"),
    "message_tokens": Figure("tokens per message", ".1f"),
    "api_busy": Figure("api core busy", ".0%"),
    "rest_busy": Figure("other core busy", ".0%"),
    "full_tokens_per_s": Figure("full core, tokens/s"),
    "full_requests_per_s": Figure("full core, requests/s"),
    "full_replicas": Figure("full core, replicas", ".1f"),
    "full_postgres": Figure("such cores for a PG core", ".1f"),
    "all_requests_per_s": Figure("a core each, requests/s"),
    "workers_mib": Figure("memory of workers, MiB"),
    "burst_admitted": Figure("admitted in a burst", compared="no"),
    "burst_over": Figure("over its limit", compared="no"),
}


def capacity(
    token_us: float, request_us: float, postgres_request_us: float, replica_tokens_per_s: float
) -> Values:
    """Compute what a full api core serves, from the CPU costs per token and per request, in µs.

    `postgres_request_us` is PostgreSQL's CPU cost per request.
    """
    tokens_per_s = 1e6 / token_us
    return {
        "full_tokens_per_s": tokens_per_s,
        "full_requests_per_s": 1e6 / request_us,
        "full_replicas": tokens_per_s / replica_tokens_per_s,
        "full_postgres": request_us / postgres_request_us,
    }


def prompts(own_words: int) -> list[str]:
    """Draw prompts: first words that all share, then a unique word, then others."""
    rng = random.Random(0)
    shared = " ".join(rng.choices(WORDS, k=SHARED_WORDS))
    return [
        f"{shared} {MARK} {' '.join(rng.choices(WORDS, k=own_words))}" for _ in range(PROMPT_COUNT)
    ]


@contextlib.contextmanager
def cluster(
    site: Site, key: str, replica_count: int, dilation: float, api_count: int
) -> Iterator[tuple[list[str], Processes]]:
    """Run the api processes of a case, with all their replicas ready."""
    with contextlib.ExitStack() as stack:
        servers = []
        engines = stack.enter_context(site.home())
        for _ in range(api_count):
            home = stack.enter_context(site.home())
            count = replica_count
            version = {
                "engine": "simulated",
                "directory": str(next(iter(bundled_models().values())).absolute()),
            }
            fleet = {"models": {MODEL: version | {"replicas": {"min": count, "max": count}}}}
            (home / "fleet.yaml").write_text(json.dumps(fleet))  # JSON is a subset of YAML
            settings = Settings.of(
                database_url=site.database_url,
                home=home,
                engine_directory=str(engines),
                listen="127.0.0.1:0",
                models={},
                fleet=str(home / "fleet.yaml"),
                requests_per_process_max=10_000,
                queue_requests_per_tenant_max=10_000,
                simulated_time_scale=dilation,
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
    site: Site,
    keys: Sequence[str],
    seconds: float,
    replica_count: int,
    dilation: float,
    api_count: int = 1,
    burst_keys: Iterator[str] | None = None,
) -> Values:
    """Run a cluster and measure it under load from one client.

    The first requests have short prompts: otherwise all would be in prefill at the same time, and a
    steady state would take long. The engines end answers, so that their lengths vary. A burst with
    the next of `burst_keys` follows. Raises: RuntimeError if a request fails.
    """
    with cluster(site, keys[0], replica_count, dilation, api_count) as (addresses, processes):
        load = {
            "addresses": addresses,
            "model": MODEL,
            "prompts": prompts(OWN_WORDS),
            "first_prompts": prompts(1),
            "output_tokens": OUTPUT_TOKENS_MAX,
            "ignore_eos": False,
            "api_keys": keys,
            "outstanding_count": replica_count * OUTSTANDING_PER_REPLICA // len(keys),
            "warm_up_s": WARM_UP_S + dilation * SETTLE_S,
            "seconds": seconds,
        }
        report, used_s = run_load(("bench.grpc_load", "client"), load, processes)
        workers_mib = sum(map(pss_mib, processes["workers"]()))
        admitted = None if burst_keys is None else burst(addresses, next(burst_keys))
    used_s["client"] = report["cpu_s"]
    wall_s, token_count = report["wall_s"], report["token_count"]
    busy = {name: used / wall_s for name, used in used_s.items()}
    request_us = {
        f"{name}_us": used / max(report["request_count"], 1) * 1e6 for name, used in used_s.items()
    }
    tokens_per_s, token_us = token_count / wall_s, used_s["api"] / token_count * 1e6
    values = {
        "token_us": token_us,
        **request_us,
        "dilation": dilation,
        "tokens_per_s": tokens_per_s,
        "undilated_per_s": tokens_per_s * dilation,
        "admitted_per_s": report["admitted_count"] / wall_s,
        "input_tokens": report["input_token_count"] / max(report["admitted_count"], 1),
        "message_tokens": token_count / report["message_count"],
        "api_busy": busy["api"],
        "rest_busy": sum(busy.values()) - busy["api"],
        **capacity(
            token_us,
            request_us["api_us"],
            request_us["postgres_us"],
            tokens_per_s * dilation / replica_count,
        ),
        "all_requests_per_s": api_count * 1e6 / request_us["api_us"],
        "workers_mib": workers_mib,
    }
    if admitted is None:
        return values
    return {**values, "burst_admitted": admitted, "burst_over": admitted - BURST_LIMIT}


def pss_mib(pid: int) -> float:
    """Read the memory of a process in MiB; each shared page counts by its number of users."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line Pss")


def burst(addresses: Sequence[str], key: str) -> int:
    """Send twice the requests of a month at once through all processes; count the admitted ones.

    Raises: RuntimeError if one fails for another reason than the limit.
    """

    def is_admitted(client: Client) -> bool:
        try:
            client.complete(MODEL, "hotel", max_output_tokens=1, max_retries=0)
        except WeirError as error:
            if error.reason != "QUOTA_EXCEEDED":
                raise RuntimeError(f"a request of the burst failed: {error}") from error
            return False
        return True

    count = 2 * BURST_LIMIT
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(count))
        clients = [stack.enter_context(Client(each, key)) for each in addresses]
        sent = itertools.islice(itertools.cycle(clients), count)
        return sum(threads.map(is_admitted, sent))


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Create the keys, and yield the cases. Raises: Unusable."""
    counts = [int(each) for each in options.replicas.split(",") if each]
    dilations = [float(each) for each in options.dilation.split(",")]
    api_counts = [int(each) for each in options.processes.split(",") if each]
    if counts and len(counts) != len(dilations):
        raise Unusable(
            f"--dilation must have a number for each of --replicas {options.replicas}, got"
            f" {options.dilation}"
        )
    with new_site(options.directory) as site:
        keys = create_keys(site.database_url, STREAM_COUNT)
        measured = partial(run, site, keys, options.seconds)
        cases = [
            Case(
                f"{count} replica{'s'[: count - 1]}, 1 api",
                {"Weir": partial(measured, count, dilation)},
            )
            for count, dilation in zip(counts, dilations, strict=False)
        ]
        if options.full:
            full = partial(measured, options.full, options.full_dilation)
            cases.append(Case(f"{options.full} replicas, 1 api, full", {"Weir": full}))
        if api_counts:
            burst_keys = create_keys(site.database_url, len(api_counts) * options.rounds)
            set_limits(site.database_url, burst_keys)
            several = partial(measured, options.shared, options.shared_dilation)
            ways = {
                f"{count} api": partial(several, count, iter(burst_keys[index :: len(api_counts)]))
                for index, count in enumerate(api_counts)
            }
            cases.append(Case(f"{options.shared} replicas, shared", ways))
        yield cases


def set_limits(database_url: str, keys: Sequence[str]) -> None:
    """Limit the requests of these keys in a month."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        for key in keys:
            changed = connection.execute(SET_LIMIT, (BURST_LIMIT, prefix_of(key)))
            assert changed.rowcount == 1, "each key has another prefix"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_site_options(parser, 5.0)
    lists = {
        "--replicas": ("1,8,64", "number of replicas, by case"),
        "--dilation": ("0.2,1.6,13", "time dilation, one for each case"),
        "--processes": ("1,2,4", "api processes before the same workers"),
    }
    for name, (default, what) in lists.items():
        parser.add_argument(name, default=default, help=f"{what} (default: {default})")
    numbers = {
        "--full": (16, "replicas of the case with a full api core"),
        "--full-dilation": (0.5, "time dilation of that case"),
        "--shared": (8, "replicas of the case with several api processes"),
        "--shared-dilation": (1.6, "time dilation of that case"),
    }
    for name, (number, what) in numbers.items():
        parser.add_argument(
            name, type=type(number), default=number, help=f"{what} (default: {number})"
        )


BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=1)

if __name__ == "__main__":
    main(BENCH)
