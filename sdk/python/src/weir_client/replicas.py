"""Values of replicas (the engines of a model) and of their drains."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.plain import Value


class ReplicaState(StrEnum):
    """State of an engine. DRAINING: takes no new requests. TRIPPED: its circuit breaker is open."""

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
    """Engine of one process. `model` is `name` or `name@version`; `drained` is set by an admin."""

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
    """Order to drain a replica; requests move after `move_after_s` seconds, never if None."""

    model: str
    replica: str
    reason: str
    drain_time: datetime
    move_after_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaList(Value):
    """Engines of all processes that answered, drains, and the processes that did not answer."""

    replicas: tuple[Replica, ...]
    drains: tuple[ReplicaDrain, ...]
    unresponsive_process_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainedReplica(Value):
    """Drained replica. `replicas` has its instance in each process that has applied the order."""

    drain: ReplicaDrain
    replicas: tuple[Replica, ...]
    unresponsive_process_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndrainedReplica(Value):
    """Replica that takes requests again. `undrained` tells whether it was drained before."""

    undrained: bool
    replicas: tuple[Replica, ...]
    unresponsive_process_ids: tuple[str, ...]
