"""What must be true when everything has come to rest: tokens at the clients, in usage events, in the ledger and at the biller.

The equalities, to the token:

- A request whose end reached its client: received = told in the end = usage event.
- A request whose end did not reach it: received ≤ usage event. Tokens count as delivered once they are journalled, which is before
  they are sent; what the dying process or connection still had in its buffers is the difference, and is counted as "in transit".
- Usage events = ledger = delivered batches = the exporter's file, in sum and by `fsck --at-rest`.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from api.chaos.load import Asked
from api.chaos.system import EXPORT_FILE, JOURNALS, System
from metering.holds.journal import abandoned_journals
from metering.proof.fsck import CHECKS, fsck
from metering.store.db import psycopg_conninfo

SETTLE_TIMEOUT_S = 60.0  # holds expire after 5 s and are swept each 10 s; the rest takes moments
POLL_S = 0.1
WAITING: Mapping[str, LiteralString] = {
    "live holds": "SELECT count(*) FROM holds WHERE state = 'held'",
    "unrated usage events": "SELECT count(*) FROM usage_events WHERE rated_at IS NULL",
    "batches that are not delivered": "SELECT count(*) FROM meter_batches WHERE state <> 'delivered'",
    "tokens that are not in batches": """
        SELECT (SELECT coalesce(sum(input_token_count + billed_token_count + embedding_token_count), 0) FROM usage_events)
             - (SELECT coalesce(sum(token_count), 0) FROM meter_batches)
    """,
}
EVENTS: LiteralString = """
SELECT request_id, sum(delivered_token_count)::bigint FROM usage_events WHERE request_id <> hold_id GROUP BY 1
"""
TOTALS: LiteralString = """
SELECT (SELECT coalesce(sum(input_token_count + billed_token_count + embedding_token_count), 0)::bigint FROM usage_events),
       (SELECT coalesce(sum(token_count), 0)::bigint FROM ledger_entries),
       (SELECT coalesce(sum(token_count), 0)::bigint FROM meter_batches WHERE state = 'delivered')
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request, in tokens. in_transit: journalled and paid, and lost with the connection."""

    asked: Asked
    billed: int

    @property
    def lost(self) -> int:
        """Received, and in no usage event."""
        return max(self.asked.received - self.billed, 0)

    @property
    def doubled(self) -> int:
        """Billed beyond what the client was told at the end."""
        return max(self.billed - self.asked.told, 0) if self.asked.told is not None else 0

    @property
    def in_transit(self) -> int:
        return max(self.billed - self.asked.received, 0) if self.asked.told is None else 0

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        received, told = self.asked.received, self.asked.told
        if self.lost or self.doubled or (told is not None and not received == told == self.billed):
            return f"request {self.asked.request_id}: {received} received, {told} told, {self.billed} billed ({self.asked.failure})"
        return ""


async def settle(system: System) -> list[str]:
    """Wait until nothing is left to do; tells what still is when that takes too long."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    left: list[str] = ["the parts to come back"]
    while left and time.monotonic() < deadline:
        try:
            await system.all_ready()
            left = await asyncio.to_thread(unsettled, system)
        except (TimeoutError, psycopg.OperationalError) as away:
            left = [f"the system to be there: {away}"]
        if left:
            await asyncio.sleep(POLL_S)
    return [f"did not settle within {SETTLE_TIMEOUT_S:.0f} s: {each}" for each in left]


def unsettled(system: System) -> list[str]:
    """What is still to be done, if anything."""
    with psycopg.connect(psycopg_conninfo(system.postgres.url), autocommit=True) as connection:
        counts = {name: int(one(connection, query)) for name, query in WAITING.items()}
    left = [f"{count} {name}" for name, count in counts.items() if count]
    if not left and (journals := sum(1 for _ in abandoned_journals(system.directory / JOURNALS))):
        left.append(f"{journals} journals of dead processes")
    return left


def audit(database_url: str, directory: Path, asked: Sequence[Asked]) -> tuple[list[Outcome], list[str]]:
    """Every request against its usage, all sums against each other, and `fsck`; with everything that is wrong.

    directory: where the system keeps its journals and the exporter's file.
    """
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        events = {str(request_id): int(count) for request_id, count in connection.execute(EVENTS)}
        used, posted, exported = connection.execute(TOTALS).fetchone() or (0, 0, 0)
    outcomes = [Outcome(each, events.pop(each.request_id, 0)) for each in asked]
    wrong = [outcome.problem for outcome in outcomes if outcome.problem]
    wrong += [f"request {request_id} was asked by nobody: {count} tokens" for request_id, count in events.items()]
    filed = sum(exported_quantities(directory / EXPORT_FILE).values())
    if not used == posted == exported == filed:
        wrong.append(f"{used} tokens used, {posted} in the ledger, {exported} in delivered batches, {filed} in the exporter's file")
    wrong += [f"{path.name} was refused by recovery" for path in (directory / JOURNALS).glob("*.refused")]
    for verdict in fsck(database_url, CHECKS):
        wrong += [f"{verdict.check.name}: {violation}" for violation in verdict.sample]
    return outcomes, wrong


def exported_quantities(path: Path) -> Counter[uuid.UUID]:
    """Tokens by identifier in the exporter's file. Raises: ValueError for an identifier that is there twice."""
    quantities: Counter[uuid.UUID] = Counter()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        entry = json.loads(line)
        identifier = uuid.UUID(entry["identifier"])
        if identifier in quantities:
            raise ValueError(f"{path}: {identifier} is exported twice")
        quantities[identifier] = entry["token_count"]
    return quantities


def one(connection: psycopg.Connection[Any], query: LiteralString) -> Any:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]
