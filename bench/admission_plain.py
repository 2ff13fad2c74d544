"""Baseline of `bench.admission`: a transaction for each admission, and one for each settlement.

Each locks the counters of a tenant, checks them, writes them back, and writes hold or usage event.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from bench.site import MODEL
from metering.quotas.quota_rules import Payer
from metering.store.pipeline import Connection

INPUT_TOKENS, OUTPUT_TOKENS = 100, 20
TOKENS = INPUT_TOKENS + OUTPUT_TOKENS
COST_PICOS = INPUT_TOKENS * 3 + OUTPUT_TOKENS * 7

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
