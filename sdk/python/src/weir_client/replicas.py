"""The engines behind a model, and the orders that keep some out of use: the values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class ReplicaState(StrEnum):
    """What an engine does. DRAINING: it works, and is given nothing new. TRIPPED: it is left alone, since it has lost requests."""

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
    """One engine of one process. model: `name`, or `name@version` where it has versions. drained: by an admin's order."""

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
    """An order to keep a replica out of use. move_after_s: so long after it, what still runs there is moved; None: never."""

    model: str
    replica: str
    reason: str
    drain_time: datetime
    move_after_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaList:
    """All engines that processes have told of, the orders that stand, and the processes that did not answer."""

    replicas: tuple[Replica, ...]
    drains: tuple[ReplicaDrain, ...]
    silent_owner_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DrainedReplica:
    """A replica that is out of use. replicas: it, in each process that has taken the order."""

    drain: ReplicaDrain
    replicas: tuple[Replica, ...]
    silent_owner_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndrainedReplica:
    """A replica that is in use again. undrained: whether it was not before."""

    undrained: bool
    replicas: tuple[Replica, ...]
    silent_owner_ids: tuple[str, ...]
