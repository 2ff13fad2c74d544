"""How several replicas stand as one: what whoever asks for a model is told of them, and why none of them took a request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from inference.engine import EngineCondition, EngineState
from inference.errors import EngineError, EngineStartFailed, EngineUnavailable

DRAINED_RETRY_S = 5.0  # seconds: when it is worth asking again for a model whose replicas are all drained; a person decides it
DRAINED = EngineCondition(EngineState.RESTARTING, retry_after_s=DRAINED_RETRY_S, reason="it is being drained")

# The more a state promises, the later it stands.
_PROMISE = (
    EngineState.CLOSED,
    EngineState.FAILED,
    EngineState.COLD,
    EngineState.RESTARTING,
    EngineState.LOADING,
    EngineState.READY,
)


def standing(told: Collection[EngineCondition], warm_count: int) -> EngineCondition:
    """That of the replica which is likeliest to take requests first. told: of those in use; none if all are drained."""
    if not told:
        return DRAINED
    best = max(told, key=lambda each: (_PROMISE.index(each.state), each.loading_fraction, -each.retry_after_s))
    return replace(best, starts_on_demand=best.starts_on_demand and not warm_count)


def nobody_takes(told: Collection[EngineCondition], replica_count: int) -> EngineError:
    """Why a request finds no place. told: as above. replica_count: of the model."""
    best = standing(told, warm_count=0)
    if best.state is EngineState.FAILED:
        return EngineStartFailed(best.reason)
    wait_s = min((each.retry_after_s for each in told if each.state is best.state), default=best.retry_after_s)
    who = "no replica takes requests; the first" if replica_count > 1 else "the engine"
    return EngineUnavailable(f"{who} is {best.state.value}: {best.reason}", wait_s)


def all_drained(replica_count: int) -> EngineUnavailable:
    """Why a model cannot be started."""
    who = "all replicas are" if replica_count > 1 else "the engine is"
    return EngineUnavailable(f"{who} being drained", retry_after_s=DRAINED_RETRY_S)
