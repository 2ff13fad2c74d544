"""Tables of live control: small, short-lived rows."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Index, LargeBinary, func
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from metering.core.models import Base


class StopOrder(Base):
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
