"""What goes on in this process and in the books, as metrics: read when somebody asks, so that it costs nothing otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from api.access.auth import Authenticator
from api.core.health import store_is_well
from api.observability.families import counter, counters, gauge, gauges, histograms
from api.process import Process
from api.requests.live import Phase
from common.incidents import INCIDENT_COUNTS
from metering.backlog import Backlog
from metering.holds.journal import JournalBacklog


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
    phases = Counter(request.phase for request in process.running())
    running = (((phase.name.lower(),), float(phases[phase])) for phase in Phase)
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
    """1 or 0."""
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
