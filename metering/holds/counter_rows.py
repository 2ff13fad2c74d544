"""Counter rows in SQL: locked and written as they were decided, or moved without having been read.

Whoever only gives back what a hold claims need not know how full a counter is: the row is moved by a difference, as the last thing
before the commit, and nobody waits for it longer than that. An admission may do the same where the database itself sees that each
limit has room (`quick_admissions.py`). Rows are locked in the order of (quota, window), in every process alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import psycopg

from metering.quotas.quota_rules import CounterKey
from metering.quotas.quotas import USED_MAX, Counter, Counters
from metering.store.exchange import (
    TIMESTAMPTZ_OID,
    UUID_OID,
    Connection,
    Packed,
    Statement,
    array,
    bigint_array,
    exchange,
    id_number_array,
    packed_array,
    packed_id,
    packed_time,
    time_array,
)

LOCK_COUNTERS = """
SELECT c.quota_id, c.window_start, c.used, c.held
FROM quota_counters c JOIN unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start) USING (quota_id, window_start)
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
INSERT_COUNTERS = """
INSERT INTO quota_counters (quota_id, window_start)
SELECT quota_id, window_start FROM unnest(%s::uuid[], %s::timestamptz[]) AS k(quota_id, window_start)
ORDER BY quota_id, window_start
ON CONFLICT DO NOTHING RETURNING quota_id, window_start
"""
UPDATE_COUNTERS = """
UPDATE quota_counters c SET used = v.used, held = v.held
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[]) AS v(quota_id, window_start, used, held)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
COUNT_UNHEEDED = """
UPDATE quota_counters c SET would_refuse_count = c.would_refuse_count + v.admitted
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[]) AS v(quota_id, window_start, admitted)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
DELETE_COUNTERS = """
DELETE FROM quota_counters c USING unnest(%s::uuid[], %s::timestamptz[]) AS v(quota_id, window_start)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
# What fails where a row that has to be moved is not there, or has no room: a division by nothing, and with it the transaction.
GuardFailed = psycopg.errors.DivisionByZero
MOVE_COUNTERS = f"""
WITH moved AS (
    UPDATE quota_counters c SET held = c.held + v.held, used = CASE
        WHEN c.used <= {USED_MAX} - greatest(v.used, 0) AND c.used < {USED_MAX} THEN c.used + v.used ELSE {USED_MAX} END
    FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[]) AS v(quota_id, window_start, used, held)
    WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start RETURNING 1
) SELECT 1 / (count(*) = %s)::int FROM moved
"""


async def lock_counters(connection: Connection, now: datetime, keys: Collection[CounterKey]) -> Counters:
    """Lock the counter rows in order, making those of windows that have just begun."""
    counters = Counters(now)
    if not keys:
        return counters
    columns = key_columns(keys)
    [rows] = await exchange(connection, [(LOCK_COUNTERS, columns)])
    if len(rows) < len(keys):
        inserted, rows = await exchange(connection, [(INSERT_COUNTERS, columns), (LOCK_COUNTERS, columns)])
        counters.created = frozenset((row[0].int, row[1]) for row in inserted)
    counters.rows = {(row[0].int, row[1]): Counter(row[2], row[3]) for row in rows}
    return counters


def key_columns(keys: Collection[CounterKey]) -> tuple[Packed, Packed]:
    """The two columns of counter keys."""
    return id_number_array([number for number, _ in keys]), time_array([start for _, start in keys])


def packed_key(key: CounterKey) -> bytes:
    """A counter's key in the server's form: its two columns, one after the other. Sorts as the keys of one time do."""
    return packed_id(key[0]) + packed_time(key[1])


def packed_columns(keys: Sequence[bytes]) -> tuple[Packed, Packed]:
    """The two columns of keys that are packed already."""
    return packed_array(UUID_OID, [key[:20] for key in keys]), packed_array(TIMESTAMPTZ_OID, [key[20:] for key in keys])


def move_statement(moves: Mapping[bytes, Sequence[int]]) -> Statement:
    """Moves rows that must be there, by used and held. moves: by packed keys. Raises there: GuardFailed."""
    keys = sorted(moves)
    rows = [moves[key] for key in keys]
    values = bigint_array([used for used, _ in rows]), bigint_array([held for _, held in rows])
    return MOVE_COUNTERS, (*packed_columns(keys), *values, len(keys))


def counter_writes(counters: Counters) -> list[Statement]:
    """What brings the rows to what was decided."""
    statements: list[Statement] = []
    if moves := {packed_key(key): move for key, move in counters.moves.items() if move != (0, 0)}:
        statements.append(move_statement(moves))
    if counters.changed:
        rows = [counters.rows[key] for key in counters.changed]
        values = (array(row.used for row in rows), array(row.held for row in rows))
        statements.append((UPDATE_COUNTERS, (*key_columns(counters.changed), *values)))
    if counters.would_refuse:
        unheeded = (*key_columns(counters.would_refuse), array(counters.would_refuse.values()))
        statements.append((COUNT_UNHEEDED, unheeded))
    if untouched := counters.created - counters.changed:  # a refused request leaves no trace
        statements.append((DELETE_COUNTERS, key_columns(untouched)))
    return statements
