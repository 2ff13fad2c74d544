"""Orders to keep replicas out of use, and how the replicas of all processes are.

An order is a row that stands until it is deleted, so a process that starts later, or was cut off, finds it too. Every process
reads all orders at each look of its control channel (`control_channel.py`); the notification that follows a change makes it quick.
Functions that take a session never commit.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.control.live import ask_all
from metering.control.stop_orders import CHANNEL, LOOK_FOR_ORDERS, ReplicaDrain
from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue
from metering.store.db import Sessions

VERSION_MARK = "@"  # between a model and its version, in the names that are served
MOVE_AFTER_MAX = timedelta(days=30)  # nothing runs that long; a longer time is a mistake in its unit

SELECT_REPLICAS = text("""
SELECT q.model, q.replica, q.region, q.state, q.reason, q.is_drained, q.request_count, q.outstanding_token_count,
    r.owner_id, r.owner_name
FROM live_reports r, LATERAL jsonb_to_recordset(r.replicas) AS q(
    model text, replica text, region text, state text, reason text, is_drained boolean, request_count bigint,
    outstanding_token_count bigint)
WHERE r.reported_at >= :asked_at ORDER BY q.model, q.replica, r.owner_name, r.owner_id
""")


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica of one process. model: `name` or `name@version`. state: in the words of the engines' side."""

    model: str
    replica: str
    region: str
    state: str
    reason: str
    is_drained: bool
    request_count: int
    outstanding_token_count: int
    owner_id: uuid.UUID
    owner_name: str

    def is_of(self, model: str) -> bool:
        """Whether it serves this model or, where that is named, this version of it."""
        return is_of(self.model, model)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """All replicas of the processes that have answered, and those that have not."""

    replicas: tuple[ReplicaRow, ...]
    silent_owner_ids: tuple[uuid.UUID, ...]

    def named(self, model: str, replica: str) -> tuple[ReplicaRow, ...]:
        return tuple(row for row in self.replicas if (row.model, row.replica) == (model, replica))


def is_of(served: str, model: str) -> bool:
    """Whether a served name is that of a model, or of a version of it."""
    return served == model or served.startswith(model + VERSION_MARK)


async def replica_view(sessions: Sessions) -> ReplicaView:
    """How the replicas of all processes are; who answers has read all orders that were committed before. Asks every process."""
    asked_at, silent = await ask_all(sessions)
    async with sessions() as session:
        rows = (await session.execute(SELECT_REPLICAS, {"asked_at": asked_at})).all()
    return ReplicaView(tuple(ReplicaRow(*row) for row in rows), tuple(sorted(silent)))


async def list_drains(session: AsyncSession) -> list[ReplicaDrain]:
    return list(await session.scalars(select(ReplicaDrain).order_by(ReplicaDrain.model, ReplicaDrain.replica)))


async def find_drain(session: AsyncSession, model: str, replica: str) -> ReplicaDrain | None:
    """The order that names a replica, to be changed."""
    query = select(ReplicaDrain).where(ReplicaDrain.model == model, ReplicaDrain.replica == replica)
    found: ReplicaDrain | None = await session.scalar(query.with_for_update().execution_options(populate_existing=True))
    return found


async def order_drain(
    session: AsyncSession, *, model: str, replica: str, reason: str, move_after: timedelta | None, actor: str
) -> ReplicaDrain:
    """Keep a replica out of use from now on; the order as it stands. One that stood keeps its time, and takes what else is said.

    Raises: InvalidValue.
    """
    if move_after is not None and not timedelta(0) <= move_after <= MOVE_AFTER_MAX:
        raise InvalidValue("move_after", f"give 0 to {MOVE_AFTER_MAX.days} days, or leave it unset: then nothing is moved")
    before = await find_drain(session, model, replica)
    was = None if before is None else snapshot(before)
    said = {"reason": reason, "move_after_ms": None if move_after is None else move_after // timedelta(milliseconds=1)}
    order = insert(ReplicaDrain).values(model=model, replica=replica, **said)
    await session.execute(order.on_conflict_do_update(index_elements=["model", "replica"], set_=said))
    after = await find_drain(session, model, replica)
    assert after is not None, "it was just written"
    if (now := snapshot(after)) != was:
        await record_change(session, actor=actor, action="replica.drain", subject_id=f"{model} {replica}", before=was, after=now)
    await _announce(session)
    return after


async def end_drain(session: AsyncSession, *, model: str, replica: str, reason: str, actor: str) -> bool:
    """Put a replica into use again; False if no order named it."""
    before = await find_drain(session, model, replica)
    if before is None:
        return False
    was = snapshot(before)
    await session.execute(delete(ReplicaDrain).where(ReplicaDrain.model == model, ReplicaDrain.replica == replica))
    after = {"model": model, "replica": replica, "drained_at": None, "reason": reason}
    await record_change(session, actor=actor, action="replica.undrain", subject_id=f"{model} {replica}", before=was, after=after)
    await _announce(session)
    return True


async def _announce(session: AsyncSession) -> None:
    await session.execute(select(func.pg_notify(CHANNEL, LOOK_FOR_ORDERS)))
