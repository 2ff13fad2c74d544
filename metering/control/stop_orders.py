"""Orders to every api process to end a request, or all requests of a key. Written here, read by `control_channel.py`.

An order is a row; the notification that follows its commit only says "look", so that one which gets lost loses nothing.
Functions take a session and never commit. The tables of live control, small and short-lived rows, are declared here.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Index, LargeBinary, delete, func, insert, select
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base


class StopOrderRow(Base):
    """An order to every api process: end this request, or all requests of this key. Kept for a day.

    changed_key_id: of a key that is good for something else by now: look at it again, and end what comes from outside of
    `allowed_networks`, if there are any. ended_secrets: hashes of its secrets that have ended now; what was begun with one ends.
    `ordered_at` is the time of the statement, not of its transaction: see `control_channel.py`.
    """

    __tablename__ = "stop_orders"
    __table_args__ = (
        CheckConstraint("num_nonnulls(request_id, api_key_id, changed_key_id) = 1", name="one_target"),
        CheckConstraint("(changed_key_id IS NULL) = (allowed_networks IS NULL)", name="networks_of_key"),
        CheckConstraint("(request_id IS NULL) = (project_id IS NULL)", name="request_of_project"),
        Index("ix_stop_orders_ordered_at", "ordered_at"),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    request_id: Mapped[uuid.UUID | None]
    project_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("projects.id"))
    api_key_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("api_keys.id"))
    changed_key_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("api_keys.id"))
    allowed_networks: Mapped[list[str] | None]
    ended_secrets: Mapped[list[bytes] | None] = mapped_column(ARRAY(LargeBinary()))
    reason: Mapped[str]
    ordered_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class LiveReport(Base):
    """What one api process runs, written when somebody asks, and where the others reach it.

    Unlogged: it describes a moment, and costs no WAL. A process writes its row whenever it connects.
    """

    __tablename__ = "live_reports"
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)

    owner_id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    owner_name: Mapped[str]
    peer_address: Mapped[str] = mapped_column(server_default="")
    peer_certificate: Mapped[str] = mapped_column(server_default="")
    reported_at: Mapped[datetime]
    requests: Mapped[list[dict[str, Any]]] = mapped_column(JSONB())
    replicas: Mapped[list[dict[str, Any]]] = mapped_column(JSONB(), server_default="[]")


class ReplicaDrain(Base):
    """An admin's order to keep a replica out of use, in every process that has one of this name. It stands until it is deleted.

    model: `name` or `name@version`. move_after_ms: so long after the order what still runs there is moved; None: never.
    """

    __tablename__ = "replica_drains"
    __table_args__ = (CheckConstraint("move_after_ms >= 0", name="move_after_not_negative"),)

    model: Mapped[str] = mapped_column(primary_key=True)
    replica: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str]
    move_after_ms: Mapped[int | None] = mapped_column(BigInteger())
    drained_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class WorkerIncident(Base):
    """Unexpected failures in the workers, counted by background loop since the first worker. See `worker.py`."""

    __tablename__ = "worker_incidents"

    source: Mapped[str] = mapped_column(primary_key=True)
    incident_count: Mapped[int] = mapped_column(BigInteger())
    last_at: Mapped[datetime] = mapped_column(server_default=func.now())


CHANNEL = "weir_control"
LOOK_FOR_ORDERS, REPORT, PEERS = "stop", "report", "peers"  # what a notification can ask of a process
KEPT_FOR = timedelta(days=1)  # far longer than any process can be cut off and still hold its requests


@dataclass(frozen=True, slots=True)
class StopOrder:
    """End one request of a project, or everything of a key. reason: in the words of who ordered it; may be empty.

    changed_key_id: look at that key again, and end what comes from outside of `allowed_networks`; none of them: nothing.
    ended_secrets: hashes of secrets of that key that have ended now; what was begun with one of them ends, too.
    """

    order_id: int
    request_id: uuid.UUID | None
    project_id: uuid.UUID | None
    api_key_id: uuid.UUID | None
    reason: str
    changed_key_id: uuid.UUID | None = None
    allowed_networks: tuple[str, ...] = ()
    ended_secrets: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Keep this replica of a model out of use. is_moving: what still runs there is to go on elsewhere. See `live.py`."""

    model: str
    replica: str
    is_moving: bool


async def order_end_of_request(session: AsyncSession, *, project_id: uuid.UUID, request_id: uuid.UUID, reason: str) -> None:
    """Once the transaction is committed, the process that runs the request ends it."""
    await session.execute(insert(StopOrderRow).values(project_id=project_id, request_id=request_id, reason=reason))
    await _announce(session)


async def order_end_of_key(session: AsyncSession, api_key_id: uuid.UUID) -> None:
    """Once the transaction is committed, every process ends what it runs for the key."""
    await session.execute(insert(StopOrderRow).values(api_key_id=api_key_id, reason=""))
    await _announce(session)


async def order_look_at_key(
    session: AsyncSession, api_key_id: uuid.UUID, allowed_networks: Sequence[str], ended_secrets: Sequence[bytes] = ()
) -> None:
    """Once the transaction is committed, every process looks at the key again, and ends what it runs from outside of these.

    ended_secrets: hashes of the secrets whose requests end as well.
    """
    values = {"allowed_networks": list(allowed_networks), "ended_secrets": list(ended_secrets) or None, "reason": ""}
    await session.execute(insert(StopOrderRow).values(changed_key_id=api_key_id, **values))
    await _announce(session)


async def _announce(session: AsyncSession) -> None:
    await session.execute(delete(StopOrderRow).where(StopOrderRow.ordered_at < func.now() - KEPT_FOR))
    await session.execute(select(func.pg_notify(CHANNEL, LOOK_FOR_ORDERS)))
