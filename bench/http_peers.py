"""Weir's HTTP API beside other gateways on one workload: CPU, added latency, limits, lost records.

    python -m bench.http_peers [--litellm PYTHON] [--smg] [--seconds 6] [--directory /dev/shm]

`--litellm` is the interpreter of an environment with `litellm[proxy]`, which is not a dependency.
`--smg` adds SMG, a gateway in Rust that checks one key and passes requests on, without quotas and
records: it shows what only passing on costs. It is installed as `python -m infra.peers smg`
does.
Each gateway has a core of its own. The other core has the client, PostgreSQL, Weir's engine worker
and the upstream: a server that takes `--step-ms` per token. Weir uses it as a remote engine; the
column "simulated" is Weir with its simulated engine of the same speed instead.

1. Answers of 16 tokens, whole and streamed, on `--connections` connections: requests per second of
   CPU, of the process that serves HTTP, and of all processes of the gateway.
2. Time to the first token on one connection, beyond that of the upstream itself.
3. A burst of 500 requests of one key with a limit of 100: how many are served. LiteLLM has its
   limits from a custom authentication function, since its keys need its database; two processes
   share a Redis server, or Weir's database.
4. Ten requests at once of an end user that no one knows, against a default limit for three, in
   many tries: four api processes, one of which is killed. LiteLLM's budgets of end users need its
   database, so its limits are those of a minute, by tokens as Weir's, and by requests. Its
   admissions are counted by its answers, some of which the kill takes; Weir's in the database.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from api.core.endpoint import forget_endpoint
from api.core.settings import Settings, bundled_models
from bench.harness import Bench, Case, Cases, Figure, Measure, Unusable, Values, main, note
from bench.http_peers_load import MODEL, TOKEN
from bench.peers import free_port
from bench.site import (
    Server,
    Site,
    add_site_options,
    api_process,
    cpu_s,
    create_keys,
    new_site,
    on_core,
    wait_for,
)
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
FIRST_COUNT, FIRST_LIMIT, FIRST_PROCESSES = 10, 3, 4
OUTPUT_TOKENS = 16
PROMPT = " ".join(["hotel"] * 25)
BURST, LIMIT = 500, 100
KILL_TRIALS, KILL_AFTER_COUNT = 3, 500
SINK_WAIT_S = 1.0  # for records that LiteLLM sent before it was killed
JOURNAL_WAIT_S = 30.0  # for another usage event from the journal
START_MAX_S = 120.0
MINUTE_LEFT_MIN_S = 20.0  # a burst must not reach into the next minute
MASTER_KEY = "sk-bench"
LIMITS = {"requests": "requests_per_minute", "tokens": "tokens_per_minute"}
# Keys of LiteLLM's burst, by prefix; its documentation has such functions as `custom_auth`.
CUSTOM_AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

LIMITS = {limits}

async def authenticate(request, api_key):
    user = (await request.json()).get("user")
    return UserAPIKeyAuth(api_key=api_key, end_user_id=user, **LIMITS[api_key.split("-")[1]])
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
        token_count = len(PROMPT.split()) + OUTPUT_TOKENS
        limits = {
            "requests": {"rpm_limit": LIMIT},
            "tokens": {"tpm_limit": LIMIT * token_count},
            "first_requests": {"end_user_rpm_limit": FIRST_LIMIT},
            "first_tokens": {"end_user_tpm_limit": FIRST_LIMIT * token_count},
        }
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


def smg_python() -> Path:
    """Install SMG unless it is installed. Return its interpreter. Raises: Unusable."""
    peer = PEERS["smg"]
    try:
        note(f"SMG {install(peer)}")
    except ClientFailed as failed:
        raise Unusable(f"--smg: {failed}") from failed
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


def rate(gateway: Running, name: str, connection_count: int, seconds: float) -> Values:
    """Measure consecutive whole or streamed requests on many connections."""
    streams = name == "streamed"
    load = {"connection_count": connection_count, "seconds": seconds, "streams": streams}
    process = client(gateway, "rate", **load)
    assert process.stdout is not None
    marks = []
    for _ in range(2):
        process.stdout.readline()  # "begin", then "end"
        marks.append((cpu_s(gateway.serving()), cpu_s(gateway.others())))
    seen = seen_by(process)
    serving_s, others_s = (after - before for before, after in zip(*marks, strict=True))
    return {
        f"{name}_per_core": seen["request_count"] / serving_s,
        f"{name}_per_cpu": seen["request_count"] / (serving_s + others_s),
        f"{name}_per_s": seen["request_count"] / seen["wall_s"],
    }


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


def first_requests(site: Site, settings: Mapping[str, Any], try_count: int) -> Values:
    """Send first requests to four api processes, and kill one after a third of the tries.

    Returns the tries, the end users that were admitted exactly as often as their limit allows, in
    the database, and the tries in which more were served.
    """
    [secret] = create_keys(site.database_url, 1)
    with psycopg.connect(psycopg_conninfo(site.database_url), autocommit=True) as connection:
        with weir(site, settings, secret, process_count=FIRST_PROCESSES) as gateway:
            limit = FIRST_LIMIT * (prompt_token_count(gateway) + OUTPUT_TOKENS)
            connection.execute(DEFAULT_LIMIT, (limit, prefix_of(secret)))
            tries = first_tries(gateway, try_count)
        rows = connection.execute(ADMITTED, (prefix_of(secret),)).fetchall()
    return {
        **tried(tries),
        "exact": sum(row[0] == FIRST_LIMIT for row in rows),
    }


def first_tries(gateway: Running, try_count: int) -> list[list[int]]:
    """Send first requests, kill a process after a third of the tries; return all statuses."""
    process = client(gateway, "first", connection_count=FIRST_COUNT, try_count=try_count)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(gateway.serving()[0], signal.SIGKILL)
    tries: list[list[int]] = seen_by(process)["tries"]
    return tries


def tried(tries: Sequence[Sequence[int]]) -> dict[str, float]:
    """Count tries, and those in which as many were served as the limit allows, or more."""
    return {
        "tries": len(tries),
        "exact": sum(each.count(200) == FIRST_LIMIT for each in tries),
        "over": sum(each.count(200) > FIRST_LIMIT for each in tries),
        "served_per_try": statistics.mean(each.count(200) for each in tries),
    }


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
        changed_at, known = time.monotonic(), 0
        while known < len(delivered) and time.monotonic() - changed_at < JOURNAL_WAIT_S:
            row = connection.execute(
                "SELECT count(DISTINCT request_id) FROM usage_events WHERE request_id = ANY(%s)",
                (delivered,),
            ).fetchone()
            assert row is not None
            if known != (known := row[0]):
                changed_at = time.monotonic()
            connection.rollback()
            time.sleep(0.2)
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
def redis() -> Iterator[int]:
    """Run a Redis server beside this process, and yield its port."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class World:
    """Upstream of all gateways, the two settings of Weir, and its key."""

    options: argparse.Namespace
    site: Site
    port: int
    direct_ms: float
    remote: Mapping[str, Any]
    simulated: Mapping[str, Any]
    key: str

    def speed(self, running: Callable[[], AbstractContextManager[Running]]) -> Measure:
        """Measure whole and streamed answers, and the time to the first token."""

        def run() -> Values:
            seconds = self.options.seconds
            with running() as gateway:
                found = {
                    key: value
                    for name in ("whole", "streamed")
                    for key, value in rate(gateway, name, self.options.connections, seconds).items()
                }
                return found | {"ttft_added_ms": ttft_ms(gateway, seconds) - self.direct_ms}

        return run

    def speeds(self) -> Case:
        """Build the case of the gateways' speed."""
        options, site = self.options, self.site
        ways = {
            "Weir": self.speed(lambda: weir(site, self.remote, self.key)),
            "simulated": self.speed(lambda: weir(site, self.simulated, self.key, "simulated")),
        }
        if options.litellm:
            ways["LiteLLM"] = self.speed(
                lambda: litellm(site, options.litellm, self.port, more="}")
            )
        if options.smg:
            python = smg_python()
            ways["SMG"] = self.speed(lambda: smg(site, python, self.port))
        return Case(f"answers of {OUTPUT_TOKENS} tokens", ways)

    def bursts(self, process_count: int) -> Case:
        """Build the case of bursts to gateways of so many processes, with each kind of limit."""

        def ours() -> Values:
            with weir(self.site, self.remote, self.key, process_count=process_count) as gateway:
                tokens = prompt_token_count(gateway)
                secrets = {
                    kind: limit_key(self.site.database_url, dimension, tokens)
                    for kind, dimension in LIMITS.items()
                }
                return {
                    f"served_{kind}": burst(replace(gateway, key=secret))
                    for kind, secret in secrets.items()
                }

        def theirs() -> Values:
            with self.limited_litellm(process_count) as gateway:
                return {
                    f"served_{kind}": burst(replace(gateway, key=f"sk-{kind}")) for kind in LIMITS
                }

        name = f"{BURST} at once, limit for {LIMIT}, {process_count} processes"
        return Case(name, {"Weir": ours} | ({"LiteLLM": theirs} if self.options.litellm else {}))

    @contextlib.contextmanager
    def limited_litellm(self, process_count: int) -> Iterator[Running]:
        """Run LiteLLM with the limits of `CUSTOM_AUTH`; several processes share a Redis server."""
        more = "}\ngeneral_settings: {custom_auth: limits.authenticate}"
        with redis() if process_count > 1 else contextlib.nullcontext() as port:
            if port:
                cache = f"{{type: redis, host: 127.0.0.1, port: {port}}}"
                more = f", cache: true, cache_params: {cache}{more}"
            python = self.options.litellm
            with litellm(
                self.site, python, self.port, more=more, process_count=process_count
            ) as gateway:
                yield gateway

    def firsts(self) -> Case:
        """Build the case of first requests of unknown end users."""

        def theirs(kind: str) -> Values:
            with self.limited_litellm(FIRST_PROCESSES) as gateway:
                return tried(
                    first_tries(replace(gateway, key=f"sk-first_{kind}"), self.options.tries)
                )

        ways: dict[str, Measure] = {
            "Weir": partial(first_requests, self.site, self.remote, self.options.tries)
        }
        if self.options.litellm:
            ways |= {f"LiteLLM {kind}": partial(theirs, kind) for kind in ("tokens", "requests")}
        return Case(f"{FIRST_COUNT} first requests of an end user, limit for {FIRST_LIMIT}", ways)

    def kills(self) -> Case:
        """Build the case of responses without a record after kills under load."""
        ways = {"Weir": partial(weir_lost, self.site, self.remote, self.key)}
        if self.options.litellm:
            ways["LiteLLM"] = partial(litellm_lost, self.site, self.options.litellm, self.port)

        def lost(lose: Callable[[], tuple[int, int]]) -> Values:
            delivered, missing = map(sum, zip(*(lose() for _ in range(KILL_TRIALS)), strict=True))
            return {"lost": missing, "delivered": delivered}

        return Case(
            f"{KILL_TRIALS} kills under load",
            {name: partial(lost, lose) for name, lose in ways.items()},
        )


@contextlib.contextmanager
def prepare(options: argparse.Namespace) -> Iterator[Cases]:
    """Run the upstream, and yield the cases. Raises: Unusable."""
    if options.litellm and not (options.litellm.parent / "litellm").exists():
        raise Unusable(f"--litellm must be a Python with litellm[proxy], got {options.litellm}")
    if options.litellm and not shutil.which("redis-server"):
        raise Unusable("--litellm needs redis-server for its two processes: install it")
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(new_site(options.directory))
        url, home = site.database_url, stack.enter_context(site.home())
        port = stack.enter_context(upstream(options.step_ms / 1000))
        engines: dict[str, dict[str, Any]] = {
            "remote": {
                "engine": "remote",
                "remote_targets": {MODEL: f"openai+http://127.0.0.1:{port}/{MODEL}"},
            },
            "simulated": {
                "engine_device": "simulated",
                "simulated_time_scale": options.step_ms / CostModel().weights_ms,
            },
        }
        for name in engines:
            Path(home, name).mkdir()
        remote, simulated = (
            weir_settings(url, Path(home, name), engine) for name, engine in engines.items()
        )
        direct_ms = ttft_ms(Running("upstream", [port], "none", list), options.seconds)
        [key] = create_keys(url, 1)
        world = World(options, site, port, direct_ms, remote, simulated, key)
        cases = [world.speeds(), world.bursts(1), world.bursts(2), world.firsts(), world.kills()]
        yield [world.firsts()] if options.first_requests else cases


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_site_options(parser, 6.0)
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
    parser.add_argument(
        "--first-requests", action="store_true", help="only the case of first requests"
    )


FIGURES = {
    **{
        f"{name}_{key}": Figure(f"{name}, {label}")
        for name in ("whole", "streamed")
        for key, label in {
            "per_core": "per core",
            "per_cpu": "all CPU",
            "per_s": "a second",
        }.items()
    },
    "ttft_added_ms": Figure("TTFT added, ms", ".1f"),
    **{f"served_{kind}": Figure(f"served, by {kind}", compared="no") for kind in LIMITS},
    "tries": Figure("tries", compared="no"),
    "exact": Figure("exactly the limit", compared="no"),
    "over": Figure("over the limit", compared="no"),
    "served_per_try": Figure("served in a try", ".1f", "no"),
    "lost": Figure("without a record", compared="no"),
    "delivered": Figure("complete responses", compared="no"),
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=1, ours_first=True)

if __name__ == "__main__":
    main(BENCH)
