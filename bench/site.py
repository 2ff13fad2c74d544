"""Server under test of a benchmark: its cores, database, processes and load.

A driver pins the server under test to one core, and everything else to another: PostgreSQL, engine
workers, and the load process. CPU times of processes are read from `/proc`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psycopg
from joserfc import jwt
from joserfc.jwk import ECKey

from api.core.endpoint import read_endpoint
from api.core.settings import Settings, bundled_models
from metering.quotas.quota_rules import Payer
from metering.store import embedded_postgres
from metering.store.db import psycopg_conninfo
from metering.store.migrations_runner import migrate
from metering.tenants.authentication import hash_of, new_secret, prefix_of

MODEL = "bench"
START_MAX_S = 180.0  # far above a start on a busy machine
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SERVING = b"\x08\x01"  # a serialized HealthCheckResponse
QUOTAS = """
INSERT INTO quotas (subject, subject_id, dimension, limit_value)
SELECT subject, id, dimension, 1000000000000000
FROM (VALUES ('organization', %(organization)s::uuid, 'cost_picos_per_month'),
             ('organization', %(organization)s, 'tokens_per_month'),
             ('project', %(project)s, 'requests_per_minute'),
             ('api_key', %(key)s, 'tokens_per_minute'), ('api_key', %(key)s, 'concurrent_requests'))
             AS v(subject, id, dimension)
"""
ISSUER, TOKEN_LIFETIME_S = "https://login.example.com", 3600
TRUST = """
WITH trusted AS (
    INSERT INTO token_issuers (organization_id, issuer, audience, algorithms, keys_url, keys,
        leeway_s, lifetime_max_s, token_type, requires_id, project_claim, end_user_claim,
        models_claim, max_output_tokens_claim, label_claims)
    VALUES (%(organization)s, %(issuer)s, %(audience)s, '{}', '', %(keys)s, 30, 3600, '', true, '',
        '', '', '', '{}')
    RETURNING id
)
INSERT INTO token_keys (token_issuer_id, claim_value, api_key_id)
SELECT id, '', %(key)s FROM trusted
"""

Processes = Mapping[str, Callable[[], list[int]]]  # process ids for separate CPU times, by name


@dataclass(frozen=True, slots=True)
class Server:
    """Server under test: its address, its HTTP port (0 if it has none), and its processes."""

    address: str
    processes: Processes
    http_port: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """Core of the server under test, core of everything else, and database of a run.

    `directory` is for temporary files; None means the system's.
    """

    core: int
    other_core: int
    database_url: str
    directory: str | None = None

    @contextlib.contextmanager
    def home(self) -> Iterator[Path]:
        """Create a temporary directory for an api process."""
        with tempfile.TemporaryDirectory(prefix="weir-bench-", dir=self.directory) as home:
            yield Path(home)

    @contextlib.contextmanager
    def simulated(
        self, time_scale: float, *, profile: str | None = None, **more: Any
    ) -> Iterator[Server]:
        """Run an api process with a simulated engine. `more` has further settings."""
        with self.home() as home:
            settings = Settings.of(
                database_url=self.database_url,
                home=home,
                listen="127.0.0.1:0",
                models={MODEL: next(iter(bundled_models().values()))},
                engine_device="simulated",
                simulated_time_scale=time_scale,
                **more,
            )
            with api_process(settings, self.core, self.other_core, profile) as server:
                yield server

    @contextlib.contextmanager
    def baseline(self, module: str, **parameters: Any) -> Iterator[Server]:
        """Run the bare server of a load module. The first line of its output is its address."""
        command = [sys.executable, "-m", module, "echo", json.dumps(parameters)]
        process = on_core(self.core, command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            address = process.stdout.readline().decode().strip()
            yield Server(address, {"api": lambda: [process.pid]})
        finally:
            process.terminate()
            process.wait()


def add_database_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a database without a server under test."""
    parser.add_argument("--database-url", help="an empty database to fill instead")
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
    )


def add_site_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the options of a server under test. `seconds` is the default length of a case."""
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="per case (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", help="directory of the temporary database (default: the system's)"
    )
    parser.add_argument("--profile", help="file for a profile of the api process; slows it down")


@contextlib.contextmanager
def new_site(directory: str | None) -> Iterator[Site]:
    """Claim the two cores, and run a temporary, migrated database."""
    core, other_core = claim_cores()
    with database(None, directory) as url:
        migrate(url)
        yield Site(core, other_core, url, directory)


@contextlib.contextmanager
def database(database_url: str | None, directory: str | None) -> Iterator[str]:
    """Yield the URL of the named database, or of a temporary server under `directory`."""
    if database_url:
        yield database_url
        return
    home = Path(tempfile.mkdtemp(prefix="weir-bench-", dir=directory))
    running = embedded_postgres.start(home / "postgres")
    try:
        yield running.url
    finally:
        running.stop()
        shutil.rmtree(home, ignore_errors=True)


def create_tenants(database_url: str, count: int) -> list[Payer]:
    """Create tenants with a key and five quotas each, and a price for the model."""
    tenants = []
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute(
            "INSERT INTO price_versions (model, currency_code, input_picos_per_token,"
            " cached_input_picos_per_token, output_picos_per_token, effective_at) VALUES (%s,"
            " 'USD', 3, 1, 7, now()) ON CONFLICT DO NOTHING",
            (MODEL,),
        )
        for _ in range(count):
            payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
            name = f"bench-{payer.organization_id.hex}"
            ids = {
                "organization": payer.organization_id,
                "project": payer.project_id,
                "key": payer.api_key_id,
            }
            values = ids | {"name": name, "hash": payer.api_key_id.bytes * 2}
            connection.execute(
                "INSERT INTO organizations (id, name, currency_code) VALUES (%(organization)s,"
                " %(name)s, 'USD')",
                values,
            )
            connection.execute(
                "INSERT INTO projects (id, organization_id, name) VALUES (%(project)s,"
                " %(organization)s, 'bench')",
                values,
            )
            connection.execute(
                "INSERT INTO api_keys (id, project_id, name, prefix, secret_hash, scopes) "
                "VALUES (%(key)s, %(project)s, 'bench', %(name)s, %(hash)s, '{inference}')",
                values,
            )
            connection.execute(QUOTAS, ids)
            tenants.append(payer)
    return tenants


def create_keys(database_url: str, count: int) -> list[str]:
    """Create tenants with five quotas each, and return the secrets of their keys."""
    tenants = create_tenants(database_url, count)
    secrets = [new_secret() for _ in tenants]
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        for payer, secret in zip(tenants, secrets, strict=True):
            connection.execute(
                "UPDATE api_keys SET secret_hash = %s, prefix = %s WHERE id = %s",
                (hash_of(secret), prefix_of(secret), payer.api_key_id),
            )
    return secrets


def create_token(database_url: str) -> str:
    """Create a tenant as `create_keys` does, which trusts an issuer, and return a token of it."""
    signer = ECKey.generate_key("P-256", {"kid": "bench"})
    now, audience = int(time.time()), "weir"
    claims = {"iss": ISSUER, "aud": audience, "sub": "ada", "jti": "1", "iat": now}
    header = {"alg": "ES256", "kid": "bench"}
    [payer] = create_tenants(database_url, 1)
    trust = {
        "organization": payer.organization_id,
        "key": payer.api_key_id,
        "issuer": ISSUER,
        "audience": audience,
        "keys": json.dumps({"keys": [signer.as_dict(private=False)]}),
    }
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute("UPDATE api_keys SET secret_hash = NULL WHERE id = %(key)s", trust)
        connection.execute(TRUST, trust)
    return jwt.encode(header, claims | {"exp": now + TOKEN_LIFETIME_S}, signer)


@contextlib.contextmanager
def api_process(
    settings: Settings, core: int, other_core: int, profile: str | None = None
) -> Iterator[Server]:
    """Run an api process, with its engine workers on the other core.

    `profile` is the file for a profile of the process, which slows it down.
    """
    command = [sys.executable, "-m", "api"]
    if profile:
        command = [sys.executable, "-m", "cProfile", "-o", profile, "-m", "api"]
    log = settings.home / "api.log"
    with log.open("wb") as out:
        process = on_core(
            core, command, env={**os.environ, **settings.to_environment()}, stdout=out, stderr=out
        )
    try:
        address = wait_for(lambda: read_endpoint(settings.home).address or None, process, log)
        wait_for(lambda: is_serving(address) or None, process, log)
        pin(children_of(process.pid), other_core)
        postgres = postgres_pid(settings.database.url)
        processes = {
            "api": lambda: [process.pid],
            "engine": lambda: children_of(process.pid),
            "postgres": lambda: [postgres, *children_of(postgres)],
        }
        http_port = urlsplit(read_endpoint(settings.home).openai_url).port
        yield Server(address, processes, http_port or 0)
    finally:
        process.terminate()
        process.wait()


def is_serving(address: str) -> bool:
    """Ask the health service whether the server is ready."""
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        # No serializers: bytes in both directions.
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        return bool(check(b"", timeout=5) == SERVING)
    return False


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """Poll a condition until its value is not None, and return that value.

    Raises: RuntimeError with the end of the log if the process ends before, or takes too long.
    """
    deadline = time.monotonic() + START_MAX_S
    while (value := condition()) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the process does not serve:\n{log.read_text()[-4000:]}")
        time.sleep(0.01)
    return value


def run_load(
    module: Sequence[str], parameters: Mapping[str, Any], processes: Processes
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run a load process on this process's core, with the parameters as its input.

    Returns its report, and the CPU time of the processes in seconds by name, between the lines
    "begin" and "end" of its output. Raises: RuntimeError if it fails, or reports failures.
    """
    command, pipe = [sys.executable, "-m", *module], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as load:
        assert load.stdin is not None
        assert load.stdout is not None
        json.dump(parameters, load.stdin)
        load.stdin.close()
        marks = []
        for _ in range(2):
            load.stdout.readline()
            marks.append({name: cpu_s(pids()) for name, pids in processes.items()})
        out = load.stdout.read()
    if load.returncode or not out:
        raise RuntimeError("the load process failed")
    report: dict[str, Any] = json.loads(out)
    if report["failures"]:
        raise RuntimeError(
            f"{len(report['failures'])} requests failed, the first: {report['failures'][0]}"
        )
    return report, {name: marks[1][name] - marks[0][name] for name in processes}


def claim_cores() -> tuple[int, int]:
    """Choose a core for the server under test and pin this process to another. Return both."""
    core, *_, other_core = sorted(os.sched_getaffinity(0)) * 2
    if core == other_core:
        print("there is only one core: client and database share it with the api process")
    os.sched_setaffinity(0, {other_core})
    return core, other_core


def on_core(core: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process pinned to this core."""
    # Not by `preexec_fn`: Python code between fork and exec can crash beside gRPC's threads.
    process = subprocess.Popen(command, **options)
    os.sched_setaffinity(process.pid, {core})
    return process


def pin(pids: Sequence[int], core: int) -> None:
    """Pin every thread of running processes to one core."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})


def children_of(pid: int) -> list[int]:
    """Find the running child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Sum user and system time of processes and their ended children, in steps of `TICK_S`."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, status_fields(pid)[11:15]))
    return total * TICK_S


def postgres_pid(database_url: str) -> int:
    """Find the main process of a PostgreSQL server on this machine, parent of its connections."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        return int(status_fields(row[0])[1])


def status_fields(pid: int) -> list[str]:
    """Read the fields of `/proc/<pid>/stat` from the state on, which is field 3 of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def quantile(values: Sequence[float], share: float) -> float:
    """Compute a quantile of the values; `share` is 0.5 for the median."""
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")
