"""Baselines of `bench.admission`: the same two transactions per request, by this process and
pgbench.

Both lock the counters of a tenant, check and change them, and write hold and usage event. Here each
lock is read, checked in Python and written back; pgbench uses one statement, and shows the server's
capacity for requests without batching.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.harness import MODEL
from metering.quotas.quota_rules import Payer
from metering.store import embedded_postgres
from metering.store.db import psycopg_conninfo
from metering.store.pipeline import Connection

INPUT_TOKENS, OUTPUT_TOKENS = 100, 20
TOKENS = INPUT_TOKENS + OUTPUT_TOKENS
COST_PICOS = INPUT_TOKENS * 3 + OUTPUT_TOKENS * 7
PGBENCH_S_MIN = 3  # seconds; 64 new connections need this long to start
MINUTES_OPENED = 10  # windows created beforehand, as pgbench creates none

Pair = Callable[[Payer], Awaitable[tuple[float, float]]]

WINDOW = """CASE
    WHEN dimension = 'concurrent_requests' THEN 'epoch'
    ELSE date_trunc(CASE WHEN dimension LIKE '%%minute' THEN 'minute' ELSE 'month' END,
                    {now}, 'UTC') END"""
LOCK = f"""
SELECT c.quota_id, c.window_start, q.dimension, q.limit_value - c.used - c.held
FROM quota_counters c JOIN quotas q ON q.id = c.quota_id
WHERE q.subject_id = ANY(%s) AND c.window_start = {WINDOW.format(now="%s::timestamptz")}
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
OPEN_WINDOWS = f"""
INSERT INTO quota_counters (quota_id, window_start)
SELECT id, {WINDOW.format(now="%s::timestamptz")}
FROM quotas WHERE subject_id = ANY(%s) ORDER BY id ON CONFLICT DO NOTHING
"""
CHARGE = """
UPDATE quota_counters c SET used = c.used + v.used, held = c.held + v.held
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[])
AS v(quota_id, window_start, used, held)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
HOLD = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
                   price_version_id, labels, process_id, input_token_count, leased_token_count,
                   quota_ids, expires_at)
SELECT %s, %s, %s, %s, %s, %s, model, id, '{}', %s, %s, %s, %s, now() + interval '1 minute'
FROM price_versions WHERE model = %s
"""
END = (
    "UPDATE holds SET state = 'settled', delivered_token_count = %s, ended_at = now() WHERE id = %s"
    " AND state = 'held'"
)
EVENT = """
INSERT INTO usage_events (hold_id, organization_id, project_id, api_key_id, request_id, model,
    outcome, input_token_count, cached_input_token_count, generated_token_count,
    delivered_token_count, billed_token_count, price_version_id, cost_picos, labels, admitted_at)
SELECT id, organization_id, project_id, api_key_id, request_id, model, 'stop', input_token_count, 0,
       %s, %s, %s, price_version_id, %s, labels, admitted_at FROM holds WHERE id = %s
"""
AMOUNTS = {  # per dimension: held by a request, and used by it after its end
    "concurrent_requests": (1, 0),
    "requests_per_minute": (0, 0),
    "tokens_per_minute": (TOKENS, TOKENS),
    "tokens_per_month": (TOKENS, TOKENS),
    "cost_picos_per_month": (COST_PICOS, COST_PICOS),
}

PGBENCH_TENANTS = """
DROP TABLE IF EXISTS bench_tenants;
CREATE TABLE bench_tenants (n int PRIMARY KEY, organization_id uuid, project_id uuid,
api_key_id uuid)
"""


def plain_pair(idle: asyncio.Queue[Connection]) -> Pair:
    """Make a pair that uses one transaction for the admission and one for the settlement."""
    process_id = uuid.uuid4()

    async def charge(
        connection: Connection, payer: Payer, now: object, *, ends: bool
    ) -> list[uuid.UUID]:
        subjects = list(payer.subject_ids)
        async with connection.pipeline():
            await connection.execute("BEGIN")
            locked = await connection.execute(LOCK, (subjects, now))
        rows = await locked.fetchall()
        if not rows:
            await connection.execute(OPEN_WINDOWS, (now, subjects))
            rows = await (await connection.execute(LOCK, (subjects, now))).fetchall()
        assert all(room >= AMOUNTS[dimension][0] for _, _, dimension, room in rows)
        held = [-AMOUNTS[row[2]][0] if ends else AMOUNTS[row[2]][0] for row in rows]
        used = [
            AMOUNTS[row[2]][1] if ends else int(row[2] == "requests_per_minute") for row in rows
        ]
        await connection.execute(
            CHARGE, ([row[0] for row in rows], [row[1] for row in rows], used, held)
        )
        return [row[0] for row in rows]

    async def pair(payer: Payer) -> tuple[float, float]:
        hold_id, now = uuid.uuid4(), time.strftime("%Y-%m-%d %H:%M:%S+00", time.gmtime())
        ids = (
            hold_id,
            payer.organization_id,
            payer.project_id,
            payer.api_key_id,
            uuid.uuid4(),
            bytes(32),
            process_id,
        )
        begin = time.perf_counter()
        connection = await idle.get()
        quota_ids = await charge(connection, payer, now, ends=False)
        async with connection.pipeline():
            await connection.execute(HOLD, (*ids, INPUT_TOKENS, OUTPUT_TOKENS, quota_ids, MODEL))
            await connection.execute("COMMIT")
        idle.put_nowait(connection)
        admitted = time.perf_counter()
        connection = await idle.get()
        await charge(connection, payer, now, ends=True)
        async with connection.pipeline():
            await connection.execute(END, (OUTPUT_TOKENS, hold_id))
            await connection.execute(
                EVENT, (OUTPUT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS, COST_PICOS, hold_id)
            )
            await connection.execute("COMMIT")
        idle.put_nowait(connection)
        return admitted - begin, time.perf_counter() - admitted

    return pair


PGBENCH_WINDOWS = f"""
INSERT INTO quota_counters (quota_id, window_start)
SELECT q.id, {WINDOW.format(now="now() + make_interval(mins => m)")}
FROM quotas q JOIN bench_tenants t
ON q.subject_id IN (t.organization_id, t.project_id, t.api_key_id),
     generate_series(0, {MINUTES_OPENED - 1}) m
ON CONFLICT DO NOTHING
"""
PGBENCH_MOVE = f"""
WITH locked AS (
    SELECT c.quota_id, c.window_start, q.dimension, q.limit_value - c.used - c.held AS room
    FROM bench_tenants t JOIN quotas q
    ON q.subject_id IN (t.organization_id, t.project_id, t.api_key_id)
    JOIN quota_counters c ON c.quota_id = q.id
    AND c.window_start = {WINDOW.format(now="now()").replace("%%", "%")}
    WHERE t.n = :tenant ORDER BY c.quota_id, c.window_start FOR UPDATE OF c)
UPDATE quota_counters c SET used = c.used + v.used, held = c.held + v.held
FROM locked JOIN (VALUES {{amounts}}) AS v(dimension, used, held) USING (dimension)
WHERE c.quota_id = locked.quota_id AND c.window_start = locked.window_start
AND locked.room >= v.held;
"""
PGBENCH_SCRIPT = """
\\set tenant random(1, :tenant_count)
BEGIN;
{admit}
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
                   price_version_id, labels, process_id, input_token_count, leased_token_count,
                   quota_ids, expires_at)
SELECT gen_random_uuid(), t.organization_id, t.project_id, t.api_key_id, gen_random_uuid(),
       decode(repeat('00', 32), 'hex'), p.model, p.id, '{{}}',
       '00000000-0000-4000-8000-000000000000', {input}, {output}, '{{}}',
       now() + interval '1 minute'
FROM bench_tenants t, price_versions p WHERE t.n = :tenant AND p.model = '{model}'
RETURNING id AS hold_id \\gset
COMMIT;
BEGIN;
{end}
UPDATE holds SET state = 'settled', delivered_token_count = {output}, ended_at = now()
WHERE id = :hold_id AND state = 'held';
INSERT INTO usage_events (hold_id, organization_id, project_id, api_key_id, request_id, model,
    outcome, input_token_count, cached_input_token_count, generated_token_count,
    delivered_token_count, billed_token_count, price_version_id, cost_picos, labels, admitted_at)
SELECT id, organization_id, project_id, api_key_id, request_id, model, 'stop', input_token_count, 0,
       {output}, {output}, {output}, price_version_id, {cost}, labels, admitted_at FROM holds
       WHERE id = :hold_id;
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class PgbenchResult:
    """Number of pairs that pgbench ran, and the duration of each in seconds."""

    pair_count: int
    wall_s: float
    pair_s: list[float]


def pgbench_binary() -> Path | None:
    """Find the pgbench of the embedded server, or else of the system; None if there is none."""
    embedded = embedded_postgres.binaries() / "pgbench"
    system = shutil.which("pgbench")
    return embedded if embedded.exists() else Path(system) if system else None


def pgbench_script() -> str:
    """Build pgbench's script of both transactions of a request."""
    admitted = ", ".join(
        f"('{name}', {int(name == 'requests_per_minute')}, {held})"
        for name, (held, _) in AMOUNTS.items()
    )
    ended = ", ".join(f"('{name}', {used}, {-held})" for name, (held, used) in AMOUNTS.items())
    return PGBENCH_SCRIPT.format(
        admit=PGBENCH_MOVE.format(amounts=admitted).strip(),
        end=PGBENCH_MOVE.format(amounts=ended).strip(),
        input=INPUT_TOKENS,
        output=OUTPUT_TOKENS,
        model=MODEL,
        cost=COST_PICOS,
    )


def run_pgbench(
    binary: Path, database_url: str, tenants: Sequence[Payer], concurrency: int, seconds: float
) -> PgbenchResult:
    """Run concurrent clients with pgbench for whole seconds, the unit of its option."""
    conninfo = psycopg_conninfo(database_url)
    with psycopg.connect(conninfo) as connection:
        connection.execute(PGBENCH_TENANTS)
        with connection.cursor() as cursor:
            rows = [
                (n, each.organization_id, each.project_id, each.api_key_id)
                for n, each in enumerate(tenants, 1)
            ]
            cursor.executemany("INSERT INTO bench_tenants VALUES (%s, %s, %s, %s)", rows)
        connection.execute(PGBENCH_WINDOWS.replace("%%", "%"))
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "pair.sql"
        script.write_text(pgbench_script())
        whole_s = max(round(seconds), PGBENCH_S_MIN)
        command = [
            str(binary),
            "-n",
            "-M",
            "prepared",
            "-c",
            str(concurrency),
            "-j",
            "1",
            "-T",
            str(whole_s),
            "-l",
        ]
        command += ["-D", f"tenant_count={len(tenants)}", "-f", str(script), conninfo]
        ended = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, env=os.environ
        )
        if ended.returncode:
            raise RuntimeError(f"pgbench: {ended.stderr[-2000:]}")
        # One line per pair: client, number, microseconds, …
        took_s = [
            int(line.split()[2]) / 1e6
            for log in Path(directory).glob("pgbench_log*")
            for line in log.open()
        ]
    return PgbenchResult(len(took_s), whole_s, took_s)
