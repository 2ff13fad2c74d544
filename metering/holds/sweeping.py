"""Ends the holds whose owners have been silent too long, by the database's clock."""

from __future__ import annotations

import uuid

import psycopg

from common.incidents import Retries
from metering.errors import StoreAway
from metering.holds.hold_connection import BATCH_SIZE_MAX, HoldConnection
from metering.operations import Ended, Expire, HoldAnswer
from metering.receipts.chaining import BatchSigner
from metering.store.db import connection_options, psycopg_conninfo
from metering.store.store_gate import CONNECT_TIMEOUT_S

retries = Retries("hold_sweep")  # by hold


async def sweep_expired_holds(database_url: str, *, limit: int = 1000, signer: BatchSigner | None = None) -> int:
    """Expire what is overdue; tells how many. Safe anywhere, anytime. signer: of the receipts, if they are signed.

    Raises: psycopg.OperationalError or StoreAway if the database is away.
    """
    async with await psycopg.AsyncConnection.connect(
        psycopg_conninfo(database_url), autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()
    ) as connection:
        cursor = await connection.execute(
            "SELECT id FROM holds WHERE state = 'held' AND expires_at <= now() AND id <> ALL(%s) ORDER BY expires_at LIMIT %s",
            (retries.resting(), limit),
        )
        overdue = [Expire(row[0]) for row in await cursor.fetchall()]
    answers: list[HoldAnswer | Exception] = []
    async with HoldConnection(database_url, uuid.uuid4(), signer=signer) as holds:
        for start in range(0, len(overdue), BATCH_SIZE_MAX):
            answers += await holds.execute(overdue[start : start + BATCH_SIZE_MAX])
    for hold, answer in zip(overdue, answers, strict=True):
        if isinstance(answer, StoreAway):
            raise answer
        if isinstance(answer, Exception):
            retries.failed(answer, hold.hold_id)
    return sum(1 for answer in answers if isinstance(answer, Ended) and answer.done)
