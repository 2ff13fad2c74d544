"""Metric families of a process: requests, engines, queues, holds and the database, read when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from api.access.auth import Authenticator
from api.core.health import store_is_well
from api.generation.life import PHASES
from api.generation.process import Process
from api.observability.counts import Histogram, RequestCounts
from api.observability.spans import SpanCounts
from api.queue.fair_queue import QueueStatistics
from common.incidents import INCIDENT_COUNTS
from inference.engine import EngineStatistics
from inference.routing.router import ReplicaReport, ReplicaState, Router
from metering.backlog import Backlog
from metering.holds.journal import JournalBacklog

Labels = tuple[str, ...]
MS = 1e-3  # seconds in one: histograms count in ms, and are told in seconds
REQUEST_LABELS, REPLICA_LABELS = ("model", "tier"), ("model", "replica")
Told = list[tuple[tuple[str, str], ReplicaReport]]
Pick = Callable[[EngineStatistics], int]
TOTALS: tuple[tuple[str, str, Pick], ...] = (
    ("weir_engine_steps", "Steps of a replica.", lambda it: it.step_count),
    ("weir_engine_prompt_tokens", "Prompt tokens of sequences that a replica has begun.", lambda it: it.prompt_token_count),
    ("weir_engine_cached_tokens", "Those of them that its prefix cache had.", lambda it: it.cached_token_count),
    ("weir_engine_output_tokens", "Tokens that a replica has generated.", lambda it: it.output_token_count),
    ("weir_engine_preemptions", "Sequences that had to give their memory back and begin anew.", lambda it: it.preemption_count),
)


def gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=value)


def gauges(name: str, what: str, labels: Sequence[str], values: Mapping[Labels, float] | Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=labels)
    for of, value in values.items() if isinstance(values, Mapping) else values:
        family.add_metric(of, value)
    return family


def counter(name: str, what: str, value: float) -> Metric:
    """A count since the start. name: without `_total`."""
    return CounterMetricFamily(name, what, value=value)


def counters(
    name: str, what: str, labels: Sequence[str], values: Mapping[Labels, float] | Iterable[tuple[Labels, float]]
) -> Metric:
    family = CounterMetricFamily(name, what, labels=labels)
    for of, value in values.items() if isinstance(values, Mapping) else values:
        family.add_metric(of, value)
    return family


def histograms(name: str, what: str, labels: Sequence[str], values: Iterable[tuple[Labels, Histogram]], unit: float = MS) -> Metric:
    """A histogram for each set of labels. unit: what one of its units is in the metric's."""
    family = HistogramMetricFamily(name, what, labels=labels)
    for of, histogram in values:
        family.add_metric(of, histogram.buckets(unit), histogram.sum * unit)
    return family


def request_metrics(counts: RequestCounts) -> Iterator[Metric]:
    yield counters(
        "weir_requests",
        "Requests that have ended, by how: a finish reason, or the reason of a refusal or a failure.",
        (*REQUEST_LABELS, "outcome"),
        counts.ends,
    )
    yield counters(
        "weir_refusals",
        "Requests that ended without anything to bill, by reason; of QUOTA_EXCEEDED the dimension and subject of the quota.",
        ("model", "reason", "dimension", "subject"),
        counts.refusals,
    )
    yield counters("weir_tokens", "Tokens billed, by kind; input is without cached_input.", ("model", "kind"), counts.tokens)
    yield counters("weir_failed_calls", "Calls that ended with an error.", ("call", "reason"), counts.failed_calls)
    yield counter("weir_migrations", "Times that a request went on in another engine.", counts.migration_count)
    yield from time_metrics(counts)


def time_metrics(counts: RequestCounts) -> Iterator[Metric]:
    of = [((model, tier.value), times) for (model, tier), times in sorted(counts.times.items())]
    yield histograms(
        "weir_time_to_first_token_seconds",
        "From the arrival of a start frame to its first token.",
        REQUEST_LABELS,
        ((labels, times.first_token) for labels, times in of),
    )
    yield histograms(
        "weir_inter_token_seconds",
        "Between two tokens of a request; all of a request at their mean.",
        REQUEST_LABELS,
        ((labels, times.inter_token) for labels, times in of),
    )
    yield histograms(
        "weir_request_seconds",
        "From the arrival of a start frame to the last frame.",
        REQUEST_LABELS,
        ((labels, times.total) for labels, times in of),
    )
    yield histograms(
        "weir_stage_seconds",
        "Where the time of a request went. cold_start counts those alone that waited for an engine to start.",
        (*REQUEST_LABELS, "stage"),
        (((*labels, stage), histogram) for labels, times in of for stage, histogram in times.stages.items()),
    )


def engine_metrics(router: Router) -> Iterator[Metric]:
    """Of every replica of every model, those that embed included."""
    replicas = [((model, report.name), report) for model, report in router.every_replica()]
    yield gauges(
        "weir_engine_up",
        "Whether a replica takes requests.",
        REPLICA_LABELS,
        ((labels, float(report.state is ReplicaState.READY)) for labels, report in replicas),
    )
    yield gauges(
        "weir_engine_state",
        "1 for the state that a replica is in.",
        (*REPLICA_LABELS, "state"),
        (((*labels, report.state.value), 1.0) for labels, report in replicas),
    )
    told = [(labels, report) for labels, report in replicas if report.statistics is not None]
    yield gauges("weir_engine_sequences", "Sequences in a replica, by what they do.", (*REPLICA_LABELS, "state"), sequences(told))
    yield gauges(
        "weir_engine_batch_places",
        "Sequences that a replica runs at once at most; 0 if it does not tell.",
        REPLICA_LABELS,
        of(told, lambda it: it.running_sequence_count_max),
    )
    yield gauges("weir_kv_blocks", "Blocks of a replica's KV cache, by what they hold.", (*REPLICA_LABELS, "state"), blocks(told))
    for name, what, pick in TOTALS:
        yield counters(name, what, REPLICA_LABELS, of(told, pick))


def of(told: Told, pick: Pick) -> Iterator[tuple[Labels, float]]:
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


@dataclass(frozen=True, slots=True)
class Parts:
    """What is looked at. The functions count what is open now."""

    process: Process
    authenticator: Authenticator
    open_streams: Callable[[], int]
    open_peer_streams: Callable[[], int]
    http_connections: Callable[[], int]


def process_metrics(parts: Parts) -> Iterator[Metric]:
    """All of this process but engines, queues, and what became of requests."""
    process, admission = parts.process, parts.process.admission
    phases = Counter(request.life.state.phase for request in process.running())
    running = (((phase,), float(phases[phase])) for phase in dict.fromkeys(PHASES.values()))
    yield gauges("weir_live_requests", "Requests that run or wait in this process, by where they stand.", ("phase",), running)
    yield gauge("weir_permits_taken", "Requests that count against this process's bound.", admission.capacity.taken_count)
    yield gauge("weir_permits", "That bound: WEIR_REQUESTS_PER_PROCESS_MAX.", admission.settings.requests_per_process_max)
    yield gauge("weir_draining", "1 once this process takes no new requests.", float(admission.capacity.is_draining))
    yield counter("weir_admissions", "Requests that were let in.", admission.admitted_count)
    streams = (("clients",), float(parts.open_streams())), (("peers",), float(parts.open_peer_streams()))
    yield gauges("weir_open_streams", "Generate calls that are open, by who has opened them.", ("door",), streams)
    yield gauge("weir_http_connections", "Open connections of OpenAI's clients.", parts.http_connections())
    yield gauge("weir_relays", "Requests of other processes that clients of this one receive.", relay_count(process))
    yield gauge("weir_kept_output_bytes", "Output kept for clients that may come back.", process.mailboxes.byte_count)
    yield gauge("weir_kept_requests", "Requests that have ended and whose output is kept.", process.mailboxes.ended_count)
    lags = [((), process.observer.loop_lag.lags)]
    yield histograms("weir_event_loop_lag_seconds", "How late the event loop comes to what is due.", (), lags)
    throttled = parts.authenticator.throttled_count
    yield gauge("weir_throttled_addresses", "Addresses whose keys are not looked at for now: too many were wrong.", throttled)
    incidents = (((source,), float(count)) for source, count in INCIDENT_COUNTS.items())
    yield counters("weir_background_incidents", "Unexpected failures, by background loop.", ("source",), incidents)
    yield from store_metrics(parts)


def relay_count(process: Process) -> int:
    """Of this process, if it has any to others."""
    return 0 if process.relays is None else process.relays.running_count


def store_metrics(parts: Parts) -> Iterator[Metric]:
    """Holds, the way to the database, and the journal."""
    admission = parts.process.admission
    batches = parts.process.observer.batches
    holds, journal, told = admission.holds, admission.journal, admission.holds.statistics()
    yield gauge("weir_database_up", "As in health: 0 once PostgreSQL is away for longer than a moment.", store_well(parts))
    yield gauge("weir_database_away_seconds", "For how long PostgreSQL has not answered this process.", holds.away_s or 0.0)
    yield gauge("weir_holds", "Holds that this process answers for.", told.live_hold_count)
    yield gauge("weir_standing_holds", "Those that are set aside for when PostgreSQL is away.", told.standing_hold_count)
    yield gauge("weir_owed_hold_ends", "Ends of holds that PostgreSQL has yet to hear of.", told.owed_end_count)
    yield gauge("weir_hold_operations_open", "Writes of holds that wait or are under way.", told.open_operation_count)
    yield histograms("weir_hold_batch_seconds", "How long a batch of writes took.", (), [((), batches.durations)])
    yield histograms("weir_hold_batch_operations", "How many writes went out together.", (), [((), batches.sizes)], unit=1.0)
    yield gauge("weir_journal_bytes", "Of the usage journal that this process writes.", journal.size_bytes)
    yield gauge("weir_journal_unsettled_requests", "Requests that stand in it and not yet in the books.", journal.unsettled_count)


def store_well(parts: Parts) -> float:
    return float(store_is_well(parts.process.admission.holds, parts.process.admission.settings))


def journal_metrics(backlog: JournalBacklog) -> Iterator[Metric]:
    """Of all processes of this machine that share a home directory."""
    yield gauge("weir_abandoned_journals", "Journals of dead processes that wait for recovery.", backlog.abandoned_count)
    yield gauge("weir_abandoned_journal_age_seconds", "Since the oldest of them was written last.", backlog.oldest_age_s)
    yield gauge("weir_refused_journals", "Journals set aside for a person: the books refused them.", backlog.refused_count)


def books_metrics(backlog: Backlog) -> Iterator[Metric]:
    """Of the whole deployment: every process tells the same."""
    yield gauge("weir_books_holds", "Holds of all processes; counted up to 10,000.", backlog.hold_count)
    yield gauge("weir_books_overdue_holds", "Holds that should have ended 30 s ago, and have not.", backlog.overdue_hold_count)
    yield gauge("weir_books_unrated_events", "Usage not in the ledger yet; counted up to 10,000.", backlog.unrated_event_count)
    yield gauge("weir_books_unrated_age_seconds", "Age of the oldest of it.", backlog.unrated_age_s)
    yield gauge("weir_books_unexported_batches", "Hours of usage not exported yet.", backlog.unexported_batch_count)
    yield gauge("weir_books_unexported_age_seconds", "Age of the oldest of them.", backlog.unexported_age_s)
    yield gauge("weir_books_unhandled_stripe_events", "Events of Stripe that nobody has handled.", backlog.unhandled_event_count)
    yield gauge("weir_books_undelivered_alerts", "Alerts that wait for webhooks; up to 10,000.", backlog.undelivered_alert_count)
    yield gauge("weir_books_export_paused", "1 while the biller takes nothing.", float(backlog.export_is_paused))
    workers = (((source,), float(count)) for source, count in backlog.worker_incidents.items())
    yield counters("weir_worker_incidents", "Unexpected failures in the workers, by background loop.", ("source",), workers)


def span_metrics(counts: SpanCounts) -> Iterator[Metric]:
    yield counter("weir_traces_sent", "Requests whose spans the collector has taken.", counts.sent)
    yield counter("weir_traces_dropped", "Requests whose spans it has not: it was away, or too slow.", counts.dropped)
    yield gauge("weir_traces_waiting", "Requests whose spans are to be sent.", counts.waiting)
