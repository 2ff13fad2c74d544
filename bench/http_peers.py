"""Weir's HTTP API beside other gateways on one workload: CPU, added latency, limits, lost records.

    python -m bench.http_peers [--litellm PYTHON] [--smg] [--seconds 6] [--json FILE]
    [--directory /dev/shm]

`--litellm` is the interpreter of an environment with `litellm[proxy]`, which is not a dependency.
`--smg` adds SMG, a gateway in Rust that checks one key and passes requests on, without quotas and
records: the row shows what only passing on costs. It is installed as `python -m infra.peers smg`
does, and left out with the reason where that fails.
Each gateway has a core of its own. The other core has the client, PostgreSQL, Weir's engine worker
and the upstream: a server that takes `--step-ms` per token. Weir uses it as a remote engine; the
row "simulated" is Weir with its simulated engine of the same speed instead.

1. Answers of 16 tokens, whole and streamed, on `--connections` connections: requests per second of
   CPU, of the process that serves HTTP, and of all processes of the gateway.
2. Time to the first token on one connection, beyond that of the upstream itself.
3. A burst of 500 requests of one key with a limit of 100: how many are served. LiteLLM has its
   limits from a custom authentication function, since its keys need its database; two processes
   share a Redis server, or Weir's database.
4. Ten requests at once of an end user that no one knows, against a default limit for three, in
   many tries: four api processes, one of which is killed. LiteLLM has no part in it: its budgets of
   end users need its database.
5. `kill -9` under load: complete responses without a usage record. LiteLLM's records are those of
   its `generic_api` callback, since its spend logs need its database.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

from api.core.endpoint import forget_endpoint
from api.core.settings import Settings, bundled_models
from bench.harness import (
    Server,
    Site,
    api_process,
    cpu_s,
    create_keys,
    new_site,
    on_core,
    options_of,
    wait_for,
)
from bench.http_peers_load import MODEL, TOKEN
from inference.core.options import CostModel
from inference.text.tokenizer import Tokenizer
from infra.clients import ClientFailed
from infra.peers import PEERS, install
from metering.store.db import psycopg_conninfo
from metering.tenants.authentication import prefix_of

# A default limit for each end user of the project of a key.
DEFAULT_LIMIT = """
INSERT INTO quotas (subject, subject_id, for_each, dimension, limit_value)
SELECT 'project', project_id, 'end_user', 'tokens_per_month', %s FROM api_keys WHERE prefix = %s
"""
ADMITTED = """
SELECT count(*)
FROM holds
WHERE state <> 'voided'
  AND end_user_id IS NOT NULL
  AND project_id = (SELECT project_id FROM api_keys WHERE prefix = %s)
GROUP BY end_user_id
"""
FIRST_COUNT, FIRST_LIMIT = 10, 3
OUTPUT_TOKENS = 16
PROMPT = " ".join(["hotel"] * 25)
BURST, LIMIT = 500, 100
KILL_TRIALS, KILL_AFTER_COUNT = 3, 500
SINK_WAIT_S = 1.0  # for records that LiteLLM sent before it was killed
START_MAX_S = 120.0
MINUTE_LEFT_MIN_S = 20.0  # a burst must not reach into the next minute
MASTER_KEY = "sk-bench"
LIMITS = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}
# Keys of LiteLLM's burst, by prefix; its documentation has such functions as `custom_auth`.
CUSTOM_AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

LIMITS = {limits}

async def authenticate(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, **LIMITS[api_key.split("-")[1]])
"""


@dataclass(frozen=True, slots=True)
class Running:
    """Gateway under test, with its `name` in the table.

    `serving` returns the ids of the processes that serve HTTP, `others` those of the rest. `body`
    has parameters that only this gateway gets.
    """

    name: str
    ports: Sequence[int]
    key: str
    serving: Callable[[], list[int]]
    others: Callable[[], list[int]] = list
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests per second in one case, and CPU per request in µs.

    `serving_us` is that of the process that serves HTTP, `total_us` that of all processes of the
    gateway.
    """

    requests_per_s: float
    serving_us: float
    total_us: float

    @property
    def per_core(self) -> float:
        """Requests per second of CPU of the serving process."""
        return 1e6 / self.serving_us


def free_port() -> int:
    """Find a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    site: Site, command: Sequence[str], port: int, log: Path, **options: Any
) -> Iterator[list[int]]:
    """Run a server on the gateway's core until it accepts connections; yield its process ids."""
    with log.open("wb") as out:
        process = on_core(site.core, command, stdout=out, stderr=out, **options)

    def accepts() -> bool | None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return None

    try:
        wait_for(accepts, process, log)
        yield [process.pid]
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def upstream(step_s: float) -> Iterator[int]:
    """Run the upstream beside this process, and yield its port."""
    tokenizer = Tokenizer(next(iter(bundled_models().values())))
    load = {"step_s": step_s, "token_id": tokenizer.encode(TOKEN)[0]}
    command = [sys.executable, "-m", "bench.http_peers_load", "upstream", json.dumps(load)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def weir(
    site: Site, settings: Mapping[str, Any], key: str, name: str = "Weir", process_count: int = 1
) -> Iterator[Running]:
    """Run api processes. `settings` has the database and the engine."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        for index in range(process_count):
            home = Path(settings["home"], str(index))
            home.mkdir(exist_ok=True)
            forget_endpoint(home)  # a killed process leaves its address
            each = Settings.of(**{**settings, "home": home})
            servers.append(stack.enter_context(api_process(each, site.core, site.other_core)))
        parts = [server.processes for server in servers]
        yield Running(
            name,
            [server.http_port for server in servers],
            key,
            lambda: [pid for each in parts for pid in each["api"]()],
            lambda: [pid for each in parts for pid in each["engine"]()] + parts[0]["postgres"](),
            body={"ignore_eos": True},  # the simulated engine's answers end by themselves
        )


def weir_settings(url: str, home: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Build the settings of an api process."""
    return {
        "database_url": url,
        "home": home,
        "listen": "127.0.0.1:0",
        "models": {MODEL: next(iter(bundled_models().values()))},
        **engine,
    }


@contextlib.contextmanager
def litellm(
    site: Site, python: Path, upstream_port: int, *, more: str = "", process_count: int = 1
) -> Iterator[Running]:
    """Run LiteLLM's proxy as its page on production advises, configured with the lines `more`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench-")))
        tokens_max = LIMIT * (len(PROMPT.split()) + OUTPUT_TOKENS)
        limits = {"requests": {"rpm_limit": LIMIT}, "tokens": {"tpm_limit": tokens_max}}
        (folder / "limits.py").write_text(CUSTOM_AUTH.format(limits=limits))
        (folder / "config.yaml").write_text(
            f"""
model_list:
  - model_name: {MODEL}
    litellm_params:
      {{model: openai/{MODEL}, api_base: "http://127.0.0.1:{upstream_port}/v1", api_key: none}}
litellm_settings: {{num_retries: 0, telemetry: false{more}
"""
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "LITELLM_MASTER_KEY": MASTER_KEY,
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "GENERIC_LOGGER_ENDPOINT": f"http://127.0.0.1:{upstream_port}/records",
        }
        ports, pids = [free_port() for _ in range(process_count)], []
        for port in ports:
            command = [str(python.parent / "litellm"), "--config", "config.yaml"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            log = folder / f"{port}.log"
            pids += stack.enter_context(
                started(site, command, port, log, cwd=folder, env=environment)
            )
        yield Running("LiteLLM", ports, MASTER_KEY, lambda: pids)


@contextlib.contextmanager
def smg(site: Site, python: Path, upstream_port: int) -> Iterator[Running]:
    """Run SMG in front of the upstream. Waits until SMG has registered the upstream."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench-")))
        port, log = free_port(), folder / "smg.log"
        command = [str(python), "-m", "smg", "launch", "--host=127.0.0.1", f"--port={port}"]
        command += ["--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}"]
        command += ["--policy=round_robin", "--log-level=warn", f"--api-key={MASTER_KEY}"]
        command += ["--worker-urls", f"http://127.0.0.1:{upstream_port}"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pids = stack.enter_context(started(site, command, port, log, cwd=folder, env=environment))
        headers = {"authorization": f"Bearer {MASTER_KEY}"}
        workers = urllib.request.Request(f"http://127.0.0.1:{port}/workers", headers=headers)
        deadline = time.monotonic() + START_MAX_S
        while True:
            with urllib.request.urlopen(workers) as answer:
                if any(each["is_healthy"] for each in json.load(answer)["workers"]):
                    break
            if time.monotonic() > deadline:
                raise RuntimeError(f"SMG does not see its upstream:\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        yield Running("SMG", [port], MASTER_KEY, lambda: pids)


def smg_python() -> Path | None:
    """Install SMG unless it is installed. Return its interpreter; on failure, print why."""
    peer = PEERS["smg"]
    try:
        print(f"SMG {install(peer)}", flush=True)
    except ClientFailed as failed:
        print(f"SMG is not measured: {failed}", flush=True)
        return None
    return peer.installed_at


def client(gateway: Running, mode: str, **more: Any) -> subprocess.Popen[str]:
    """Start the client process on this process's core."""
    load = {
        "ports": list(gateway.ports),
        "headers": {"authorization": f"Bearer {gateway.key}"},
        "body": dict(gateway.body),
        "mode": mode,
        "output_tokens": OUTPUT_TOKENS,
        "prompt": PROMPT,
    }
    command = [sys.executable, "-m", "bench.http_peers_load", "client", json.dumps(load | more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def seen_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a client and read its measurements. Raises: RuntimeError if a request failed."""
    out, _ = process.communicate()
    seen: dict[str, Any] = json.loads(out.splitlines()[-1]) if out else {"failures": ["no output"]}
    if seen["failures"]:
        raise RuntimeError(f"{len(seen['failures'])} failures, the first: {seen['failures'][0]}")
    return seen


def rate(gateway: Running, connection_count: int, seconds: float, *, streams: bool) -> Rate:
    """Measure consecutive requests on many connections."""
    load = {"connection_count": connection_count, "seconds": seconds, "streams": streams}
    process = client(gateway, "rate", **load)
    assert process.stdout is not None
    marks = []
    for _ in range(2):
        process.stdout.readline()  # "begin", then "end"
        marks.append((cpu_s(gateway.serving()), cpu_s(gateway.others())))
    seen = seen_by(process)
    serving_us, others_us = (
        (after - before) * 1e6 / seen["request_count"] for before, after in zip(*marks, strict=True)
    )
    return Rate(seen["request_count"] / seen["wall_s"], serving_us, serving_us + others_us)


def ttft_ms(gateway: Running, seconds: float) -> float:
    """Measure the median time to first token on one connection that is idle between requests."""
    load = {"connection_count": 1, "seconds": seconds, "streams": True, "pause_s": 0.01}
    return float(statistics.median(seen_by(client(gateway, "rate", **load))["ttft_ms"]))


def burst(gateway: Running) -> int:
    """Send a burst and count the requests that are served."""
    if (left_s := 60 - time.time() % 60) < MINUTE_LEFT_MIN_S:
        time.sleep(left_s + 0.5)
    seen = seen_by(client(gateway, "burst", connection_count=BURST))
    refused = {status: count for status, count in seen["statuses"].items() if status != "200"}
    if set(refused) - {"429"}:
        print(f"{gateway.name}: other statuses in the burst: {refused}")
    return int(seen["statuses"].get("200", 0))


@dataclass(frozen=True, slots=True)
class FirstRequests:
    """Tries with ten first requests of an end user, of which three have room.

    `served` has the number of tries by that of served requests, where each was answered; `broken`
    those where the kill broke a connection. `admitted` has the number of end users by that of
    admitted requests in the database.
    """

    served: dict[int, int]
    broken: dict[int, int]
    admitted: dict[int, int]
    other_statuses: dict[int, int]


def first_requests(
    site: Site, settings: Mapping[str, Any], try_count: int, prompt_tokens: int
) -> FirstRequests:
    """Send first requests to four api processes, and kill one after a third of the tries."""
    [secret] = create_keys(site.database_url, 1)
    limit = FIRST_LIMIT * (prompt_tokens + OUTPUT_TOKENS)
    with psycopg.connect(psycopg_conninfo(site.database_url), autocommit=True) as connection:
        connection.execute(DEFAULT_LIMIT, (limit, prefix_of(secret)))
        with weir(site, settings, secret, process_count=4) as gateway:
            load = {"connection_count": FIRST_COUNT, "try_count": try_count}
            process = client(gateway, "first", **load)
            assert process.stdout is not None
            process.stdout.readline()
            os.kill(gateway.serving()[0], signal.SIGKILL)
            tries: list[list[int]] = seen_by(process)["tries"]
        rows = connection.execute(ADMITTED, (prefix_of(secret),)).fetchall()
    return FirstRequests(
        Counter(each.count(200) for each in tries if 0 not in each),
        Counter(each.count(200) for each in tries if 0 in each),
        Counter(row[0] for row in rows),
        Counter(status for each in tries for status in each if status not in (0, 200, 429)),
    )


def measure_first_requests(
    site: Site, settings: Mapping[str, Any], try_count: int, prompt_tokens: int, figures: Figures
) -> None:
    """Print and store how many first requests of each end user were admitted."""
    found = first_requests(site, settings, try_count, prompt_tokens)
    figures["Weir"]["first_requests"] = asdict(found)
    print(
        f"\n{FIRST_COUNT} first requests at once of an unknown end user, default limit for"
        f" {FIRST_LIMIT}, four processes, one killed:\n"
        f"Weir: served per try {dict(found.served)}, of tries with a broken connection"
        f" {dict(found.broken)}, admitted per end user {dict(found.admitted)},"
        f" other statuses {dict(found.other_statuses)}",
        flush=True,
    )


def delivered_until_kill(gateway: Running, connection_count: int) -> list[str]:
    """Kill the gateway under load. Return the ids of the complete responses."""
    load = {"connection_count": connection_count, "delivered_count": KILL_AFTER_COUNT}
    process = client(gateway, "delivered", **load)
    assert process.stdout is not None
    process.stdout.readline()
    for pid in gateway.serving():
        os.kill(pid, signal.SIGKILL)
    return list(seen_by(process)["delivered"])


def weir_lost(site: Site, settings: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Kill Weir under load; count the complete responses, and those without a usage event."""
    with weir(site, settings, key) as gateway:
        delivered = delivered_until_kill(gateway, 16)
    with (
        weir(site, settings, key),  # a new process reads the journal
        psycopg.connect(psycopg_conninfo(settings["database_url"])) as connection,
    ):
        deadline, known = time.monotonic() + START_MAX_S, -1
        while known < len(delivered) and time.monotonic() < deadline:
            row = connection.execute(
                "SELECT count(DISTINCT request_id) FROM usage_events WHERE request_id = ANY(%s)",
                (delivered,),
            ).fetchone()
            assert row is not None
            if known == (known := row[0]):
                break  # nothing more comes
            connection.rollback()
            time.sleep(SINK_WAIT_S)
    return len(delivered), len(delivered) - known


def litellm_lost(site: Site, python: Path, upstream_port: int) -> tuple[int, int]:
    """Kill LiteLLM under load; count the complete responses, and those without a record."""
    with litellm(site, python, upstream_port, more=', callbacks: ["generic_api"]}') as gateway:
        delivered = delivered_until_kill(gateway, 16)
    time.sleep(SINK_WAIT_S)
    with urllib.request.urlopen(f"http://127.0.0.1:{upstream_port}/records") as answer:
        known = set(json.load(answer))
    return len(delivered), len(set(delivered) - known)


def limit_key(database_url: str, dimension: str, prompt_tokens: int) -> str:
    """Create a key with a limit of 100 burst requests, and return its secret."""
    [secret] = create_keys(database_url, 1)
    tokens = dimension == LIMITS["tokens"]
    limit = LIMIT * (prompt_tokens + OUTPUT_TOKENS) if tokens else LIMIT
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute(
            "UPDATE quotas SET limit_value = %s WHERE dimension = %s AND subject_id IN"
            " (SELECT id FROM api_keys WHERE prefix = %s UNION"
            "  SELECT project_id FROM api_keys WHERE prefix = %s)",
            (limit, dimension, prefix_of(secret), prefix_of(secret)),
        )
    return secret


def prompt_token_count(gateway: Running) -> int:
    """Ask a gateway for the prompt's number of tokens."""
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS})
    headers = {"authorization": f"Bearer {gateway.key}"}
    url = f"http://127.0.0.1:{gateway.ports[0]}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens"])


@contextlib.contextmanager
def redis() -> Iterator[int | None]:
    """Run a Redis server beside this process, and yield its port; None if it is not installed."""
    if (binary := shutil.which("redis-server")) is None:
        print("redis-server is missing: LiteLLM is not measured with two processes")
        yield None
        return
    port = free_port()
    command = [binary, "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.kill()


Figures = dict[str, dict[str, Any]]


def measure_speed(
    gateway: Running, options: argparse.Namespace, direct_ms: float
) -> dict[str, Any]:
    """Measure whole and streamed answers and the time to the first token; print a line."""
    measured: dict[str, Any] = {}
    line = f"{gateway.name:<18}"
    for name in ("whole", "streamed"):
        found = rate(gateway, options.connections, options.seconds, streams=name == "streamed")
        measured[name] = asdict(found) | {"per_core": found.per_core}
        line += (
            f"{found.requests_per_s:>9,.0f} {found.per_core:>9,.0f} {1e6 / found.total_us:>9,.0f}"
        )
    measured["ttft_added_ms"] = ttft_ms(gateway, options.seconds) - direct_ms
    print(f"{line}{measured['ttft_added_ms']:>10.1f}", flush=True)
    return measured


def measure(options: argparse.Namespace, site: Site) -> Figures:
    """Measure every gateway, print the tables, and return the figures."""
    url = site.database_url
    [key] = create_keys(url, 1)
    figures: Figures = {}
    print(f"{'':<18}{'whole/s':>9} {'per core':>9} {'all CPU':>9}", end="")
    print(f"{'stream/s':>9} {'per core':>9} {'all CPU':>9}{'TTFT +ms':>10}")
    step_s = options.step_ms / 1000
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(upstream(step_s))
        home = stack.enter_context(site.home())
        engine = {
            "engine": "remote",
            "remote_targets": {MODEL: f"openai+http://127.0.0.1:{port}/{MODEL}"},
        }
        remote = weir_settings(url, Path(home, "remote"), engine)
        engine = {
            "engine_device": "simulated",
            "simulated_time_scale": options.step_ms / CostModel().weights_ms,
        }
        simulated = weir_settings(url, Path(home, "simulated"), engine)
        for each in (remote, simulated):
            each["home"].mkdir()
        direct_ms = ttft_ms(Running("upstream", [port], "none", list), options.seconds)

        with weir(site, remote, key) as gateway:
            prompt_tokens = prompt_token_count(gateway)
            figures["Weir"] = measure_speed(gateway, options, direct_ms)
        with weir(site, simulated, key, "Weir, simulated") as gateway:
            figures[gateway.name] = measure_speed(gateway, options, direct_ms)
        if options.litellm:
            with litellm(site, options.litellm, port, more="}") as gateway:
                figures["LiteLLM"] = measure_speed(gateway, options, direct_ms)
        if python := smg_python() if options.smg else None:
            with smg(site, python, port) as gateway:
                figures["SMG"] = measure_speed(gateway, options, direct_ms)
        for peer in ("LiteLLM", "SMG"):
            for name in ("whole", "streamed") if peer in figures else ():
                ratio = figures["Weir"][name]["per_core"] / figures[peer][name]["per_core"]
                print(f"{name}: requests per second of a core, Weir / {peer}: {ratio:.2f}")
        measure_bursts(options, site, remote, port, prompt_tokens, figures)
        measure_first_requests(site, remote, options.tries, prompt_tokens, figures)
        measure_kills(options, site, remote, key, port, figures)
    return figures


def measure_bursts(
    options: argparse.Namespace,
    site: Site,
    settings: Mapping[str, Any],
    port: int,
    prompt_tokens: int,
    figures: Figures,
) -> None:
    """Send bursts to gateways of one process and of two, with each kind of limit."""
    print(f"\n{BURST} requests at once, limit for {LIMIT}: served by LiteLLM and by Weir")
    for process_count in (1, 2):
        served: dict[str, dict[str, int]] = {"Weir": {}, "LiteLLM": {}}
        with weir(site, settings, "", process_count=process_count) as gateway:
            for kind, dimension in LIMITS.items():
                secret = limit_key(site.database_url, dimension, prompt_tokens)
                served["Weir"][kind] = burst(replace(gateway, key=secret))
        with redis() if process_count > 1 else contextlib.nullcontext() as redis_port:
            if options.litellm and (process_count == 1 or redis_port):
                more = "}\ngeneral_settings: {custom_auth: limits.authenticate}"
                if redis_port:
                    cache = f"{{type: redis, host: 127.0.0.1, port: {redis_port}}}"
                    more = f", cache: true, cache_params: {cache}{more}"
                with litellm(
                    site, options.litellm, port, more=more, process_count=process_count
                ) as gateway:
                    for kind in LIMITS:
                        served["LiteLLM"][kind] = burst(replace(gateway, key=f"sk-{kind}"))
        for kind in LIMITS:
            counts = [str(served[name].get(kind, "-")) for name in ("LiteLLM", "Weir")]
            print(f"{process_count} processes, {kind} per minute: {', '.join(counts)}", flush=True)
        for name, each in served.items():
            if each:
                figures[name].setdefault("burst", {})[process_count] = each


def measure_kills(
    options: argparse.Namespace,
    site: Site,
    settings: Mapping[str, Any],
    key: str,
    port: int,
    figures: Figures,
) -> None:
    """Kill each gateway under load several times, and count the responses without a record."""
    kills: dict[str, Callable[[], tuple[int, int]]] = {
        "LiteLLM": lambda: litellm_lost(site, options.litellm, port),
        "Weir": lambda: weir_lost(site, settings, key),
    }
    for name, lose in kills.items():
        if name in figures:
            trials = [lose() for _ in range(KILL_TRIALS)]
            delivered, lost = map(sum, zip(*trials, strict=True))
            figures[name]["killed"] = {"delivered": delivered, "lost": lost}
            print(
                f"{name}: {KILL_TRIALS} kills, {delivered} complete responses, {lost} without a"
                f" record ({lost / delivered:.1%})",
                flush=True,
            )


def main() -> None:
    """Measure, print, and write the figures."""
    parser = options_of(__doc__, 6.0)
    parser.add_argument("--litellm", type=Path, help="interpreter with litellm[proxy]")
    parser.add_argument("--smg", action="store_true", help="install SMG if needed, and measure it")
    parser.add_argument(
        "--connections", type=int, default=32, help="at once (default: %(default)s)"
    )
    parser.add_argument(
        "--step-ms", type=float, default=5.0, help="of the upstream, per token (default: 5)"
    )
    parser.add_argument(
        "--tries", type=int, default=1000, help="of first requests (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with new_site(options.directory) as site:
        figures = measure(options, site)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
