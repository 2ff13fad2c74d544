"""The engines and the queues before them, as metrics: what each replica told last, by model and replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from api.observability.families import Labels, counters, gauges
from api.queue.places import QueueStatistics
from inference.engine import EngineStatistics
from inference.routing.router import ReplicaReport, ReplicaState, Router

OF = ("model", "replica")


def engine_metrics(router: Router) -> Iterator[Metric]:
    """Of every replica of every model, those that embed included."""
    replicas = [((model, report.name), report) for model, report in router.every_replica()]
    yield gauges(
        "weir_engine_up",
        "Whether a replica takes requests.",
        OF,
        ((labels, float(report.state is ReplicaState.READY)) for labels, report in replicas),
    )
    yield gauges(
        "weir_engine_state",
        "1 for the state that a replica is in.",
        (*OF, "state"),
        (((*labels, report.state.value), 1.0) for labels, report in replicas),
    )
    told = [(labels, report) for labels, report in replicas if report.statistics is not None]
    yield gauges("weir_engine_sequences", "Sequences in a replica, by what they do.", (*OF, "state"), sequences(told))
    yield gauges(
        "weir_engine_batch_places",
        "Sequences that a replica runs at once at most; 0 if it does not tell.",
        OF,
        of(told, lambda it: it.running_sequence_count_max),
    )
    yield gauges("weir_kv_blocks", "Blocks of a replica's KV cache, by what they hold.", (*OF, "state"), blocks(told))
    for name, what, pick in TOTALS:
        yield counters(name, what, OF, of(told, pick))


Told = list[tuple[tuple[str, str], ReplicaReport]]
Pick = Callable[[EngineStatistics], int]

TOTALS: tuple[tuple[str, str, Pick], ...] = (
    ("weir_engine_steps", "Steps of a replica.", lambda it: it.step_count),
    ("weir_engine_prompt_tokens", "Prompt tokens of sequences that a replica has begun.", lambda it: it.prompt_token_count),
    ("weir_engine_cached_tokens", "Those of them that its prefix cache had.", lambda it: it.cached_token_count),
    ("weir_engine_output_tokens", "Tokens that a replica has generated.", lambda it: it.output_token_count),
    ("weir_engine_preemptions", "Sequences that had to give their memory back and begin anew.", lambda it: it.preemption_count),
)


def of(told: Told, pick: Pick) -> Iterator[tuple[Labels, float]]:
    """One number of each replica."""
    return ((labels, float(pick(report.statistics))) for labels, report in told if report.statistics is not None)


def sequences(told: Told) -> Iterator[tuple[Labels, float]]:
    """Those that run, and those that wait inside the engine."""
    for state, pick in (
        ("running", lambda it: it.running_sequence_count),
        ("waiting", lambda it: it.waiting_sequence_count),
    ):
        yield from (((*labels, state), value) for labels, value in of(told, pick))


def blocks(told: Told) -> Iterator[tuple[Labels, float]]:
    """Together they are all that there are."""
    for state, pick in (
        ("free", lambda it: it.kv_block_count_free),
        ("cached", lambda it: it.kv_block_count_cached),
        ("held", lambda it: it.kv_block_count_held),
    ):
        yield from (((*labels, state), value) for labels, value in of(told, pick))


def queue_metrics(queues: Mapping[str, QueueStatistics]) -> Iterator[Metric]:
    """Of the queue before each engine. queues: by the name that the engine serves."""
    label = ("model",)
    yield gauges(
        "weir_queue_waiting",
        "Requests that wait for their turn with a model.",
        label,
        (((model,), float(it.waiting_count)) for model, it in queues.items()),
    )
    yield gauges(
        "weir_queue_engine_pending",
        "Sequences that have had their turn, and have not begun.",
        label,
        (((model,), float(it.engine_pending_count)) for model, it in queues.items()),
    )
    yield gauges(
        "weir_queue_wait_seconds",
        "What the last of those that wait may expect; 0 if nobody waits.",
        label,
        (((model,), it.longest_wait_s or 0.0) for model, it in queues.items()),
    )
    yield counters(
        "weir_queue_refusals",
        "Requests that found no place, or would have started too late.",
        label,
        (((model,), float(it.refused_count)) for model, it in queues.items()),
    )
