"""Values of replicas (the engines of a model) and of their drains."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.plain import Value


class ReplicaState(StrEnum):
    """State of an engine. DRAINING: takes no new requests. TRIPPED: circuit breaker open."""

    UNSPECIFIED = "unspecified"
    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"
    DRAINING = "draining"
    TRIPPED = "tripped"


@dataclass(frozen=True, slots=True)
class Replica(Value):
    """One engine of one process. model: `name`, or `name@version`. drained: by an admin."""

    model: str
    replica: str
    region: str
    state: ReplicaState
    reason: str
    drained: bool
    request_count: int
    outstanding_token_count: int
    process_id: str
    process_name: str  # "host:pid"


@dataclass(frozen=True, slots=True)
class ReplicaDrain(Value):
    """A drain. move_after_s: seconds until running requests are moved; None: never."""

    model: str
    replica: str
    reason: str
    drain_time: datetime
    move_after_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaList(Value):
    """Engines of all processes that answered, drains, and processes without an answer."""

    replicas: tuple[Replica, ...]
    drains: tuple[ReplicaDrain, ...]
    unresponsive_process_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainedReplica(Value):
    """A drained replica. replicas: its instances, in each process that has applied the order."""

    drain: ReplicaDrain
    replicas: tuple[Replica, ...]
    unresponsive_process_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndrainedReplica(Value):
    """A replica back in service. undrained: whether it was drained before."""

    undrained: bool
    replicas: tuple[Replica, ...]
    unresponsive_process_ids: tuple[str, ...]
