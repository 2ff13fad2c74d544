"""Values of replicas (the engines of a model) and of their drain orders."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


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
class Replica:
    """One engine of one process. model: `name`, or `name@version`. drained: by an admin's order."""

    model: str
    replica: str
    region: str
    state: ReplicaState
    reason: str
    drained: bool
    request_count: int
    outstanding_token_count: int
    owner_id: str
    owner_name: str  # "host:pid"


@dataclass(frozen=True, slots=True)
class ReplicaDrain:
    """A drain order. move_after_s: seconds until running requests are moved; None: never."""

    model: str
    replica: str
    reason: str
    drain_time: datetime
    move_after_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaList:
    """Engines of all processes that answered, the drain orders, and the processes that did not
    answer.
    """

    replicas: tuple[Replica, ...]
    drains: tuple[ReplicaDrain, ...]
    silent_owner_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainedReplica:
    """A drained replica. replicas: its instances, in each process that has applied the order."""

    drain: ReplicaDrain
    replicas: tuple[Replica, ...]
    silent_owner_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndrainedReplica:
    """A replica back in service. undrained: whether it was drained before."""

    undrained: bool
    replicas: tuple[Replica, ...]
    silent_owner_ids: tuple[str, ...]
