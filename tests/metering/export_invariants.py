"""What must be true of the export at every commit, worked out from the rows and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

Row = dict[str, Any]
KINDS = ("input", "cached_input", "output")
USED = """
SELECT organization_id, price_version_id, date_trunc('hour', settled_at, 'UTC') AS hour,
       sum(input_token_count - cached_input_token_count) AS input, sum(cached_input_token_count) AS cached_input,
       sum(billed_token_count) AS output
FROM usage_events WHERE rated_at IS NOT NULL GROUP BY 1, 2, 3
"""
POSTED = """
SELECT t.organization_id, e.price_version_id, date_trunc('hour', t.effective_at, 'UTC') AS hour, e.token_kind,
       sum(e.token_count) AS token_count
FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id
WHERE e.token_kind IS NOT NULL GROUP BY 1, 2, 3, 4
"""


def export_violations(connection: psycopg.Connection[Row], *, all_formed: bool = False) -> Iterator[str]:
    """Whatever is wrong with the batches. all_formed: that no closed hour has usage without a batch either."""
    used: dict[tuple[Any, ...], int] = {}
    for row in connection.execute(USED).fetchall():
        for kind in KINDS:
            if row[kind]:
                used[row["organization_id"], row["price_version_id"], row["hour"], kind] = int(row[kind])
    posted = {
        (row["organization_id"], row["price_version_id"], row["hour"], row["token_kind"]): int(row["token_count"])
        for row in connection.execute(POSTED).fetchall()
    }
    if used != posted:
        yield f"usage {used} is not what the ledger says: {posted}"
    progress = connection.execute("SELECT closed_until FROM export_progress").fetchone()
    batches: dict[tuple[Any, ...], list[Row]] = {}
    for row in connection.execute("SELECT * FROM meter_batches ORDER BY part").fetchall():
        place = (row["organization_id"], row["price_version_id"], row["hour"], row["token_kind"])
        batches.setdefault(place, []).append(row)
        if row["token_count"] <= 0:
            yield f"batch {row['id']} has {row['token_count']} tokens"
    for place, rows in batches.items():
        if [row["part"] for row in rows] != list(range(len(rows))):
            yield f"{place} has the parts {[row['part'] for row in rows]}"
        exported = sum(row["token_count"] for row in rows if row["state"] != "cancelled")
        if exported > used.get(place, 0):
            yield f"{place} exports {exported} tokens of {used.get(place, 0)} used"
        if exported < used.get(place, 0) and all_formed:
            yield f"{place} exports only {exported} tokens of {used[place]} used"
    for place in used.keys() - batches.keys():
        if all_formed and progress is not None and place[2] < progress["closed_until"]:
            yield f"{place} used {used[place]} tokens, of which none is exported"
