"""Celery application: broker, schedule, and limits of the background tasks, which `tasks.py`
defines.

A message carries no work: its task queries for it. A lost or duplicate message costs nothing, and
the broker needs no durability. Settings come from the environment: `WEIR_DATABASE_URL`,
`WEIR_BROKER_URL`, `WEIR_HOME`.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery, bootsteps  # type: ignore[import-untyped]
from celery.beat import Scheduler, Service  # type: ignore[import-untyped]
from celery.exceptions import SecurityWarning  # type: ignore[import-untyped]
from celery.signals import worker_init, worker_ready, worker_shutting_down  # type: ignore[import-untyped]
from click import Option

from common.incidents import Retries
from common.settings import SettingInvalid, read
from metering.core.errors import InvalidValue
from metering.export.export_settings import export_settings
from metering.retention import RetentionSettings
from metering.worker import READY_FILE, TaskRequest, UsageListener, record_worker_incidents

log = logging.getLogger(__name__)

# Celery warns about root, since a pickled message could run any code. Messages here are JSON, and
# root is a container's only user.
warnings.filterwarnings(
    "ignore",
    category=SecurityWarning,
    message="You're running the worker with superuser privileges",
)

RATE_EVERY_S = 1.0  # maximum delay between settlement and ledger
DELETE_COUNTERS_EVERY_S = 3600.0  # a quota per minute leaves 1,440 rows a day
KEEP_PARTITIONS_EVERY_S = 3600.0  # partitions exist months ahead, so a failed run may wait
SWEEP_EVERY_S = 10.0  # a fraction of the minute after which a hold expires
EXPORT_EVERY_S = 15.0  # batches are hourly; this bounds the delay of retries
# One query over all limits with alerts: about a second for 100,000 of them on a busy machine.
ALERTS_EVERY_S = 15.0
# Maximum delay of credit that starts with a month. Outside the first seconds of a month it is one
# small query.
PREPAID_EVERY_S = 5.0
SCHEDULE = {
    "rate_pending": RATE_EVERY_S,
    "delete_past_counters": DELETE_COUNTERS_EVERY_S,
    "archive_idle_usage_subjects": DELETE_COUNTERS_EVERY_S,
    "keep_partitions": KEEP_PARTITIONS_EVERY_S,
    "apply_retention": KEEP_PARTITIONS_EVERY_S,
    "refresh_prepaid": PREPAID_EVERY_S,
    "fire_alerts": ALERTS_EVERY_S,
    "export_usage": EXPORT_EVERY_S,
    "sweep_expired_holds": SWEEP_EVERY_S,
}
# Expiry of a task's messages, in multiples of its interval; 2 for all others.
EXPIRES = {"rate_pending": 10}
TIME_LIMIT_S = 60.0  # per task; tasks end far earlier, so reaching it indicates a hang
POLLING_INTERVAL_S = 0.05  # of a worker without a broker: maximum delay of a requested rating
CLOCK_TICK_MAX_S = 1.0  # maximum sleep of the scheduler thread, and time for it to stop
# Pause of a task or of the scheduler after a failure; single failing items pause longer.
RETRY_DELAY_S_MAX = 30.0
# Time after which Redis redelivers a dead worker's message; longer than any task may take.
VISIBILITY_TIMEOUT_S = 300


task_retries = Retries("worker_task", longest_s=RETRY_DELAY_S_MAX)  # by task
clock_retries = Retries("worker_clock", longest_s=RETRY_DELAY_S_MAX)


def configuration(environment: Mapping[str, str]) -> dict[str, Any]:
    """Build Celery's configuration from environment variables."""
    return {
        # Without a broker a worker sends messages to itself. Those lost at its death are sent
        # again by the schedule of the next worker.
        "broker_url": environment.get("WEIR_BROKER_URL") or "memory://localhost",
        "broker_transport_options": {
            "polling_interval": POLLING_INTERVAL_S,
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
        },
        "broker_connection_retry_on_startup": True,
        # A message is acknowledged when its task ends, and redelivered if the worker dies.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        # The schedule retries; a message that always fails must not be redelivered endlessly.
        "task_acks_on_failure_or_timeout": True,
        "worker_prefetch_multiplier": 1,
        "task_ignore_result": True,
        # For a prefork pool: kills a process that ignores the limit in `tasks.run`.
        "task_time_limit": TIME_LIMIT_S * 2,
        "task_serializer": "json",
        "accept_content": ["json"],
        "timezone": "UTC",
        "task_default_queue": "weir",
        # Workers are neither controlled nor monitored through the broker; their metrics are in the
        # database.
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        # A message expires when later ones have replaced it.
        "beat_schedule": {
            name: {
                "task": f"weir.{name}",
                "schedule": every_s,
                "options": {"expires": EXPIRES.get(name, 2) * every_s},
            }
            for name, every_s in SCHEDULE.items()
        },
    }


class ClockThread(threading.Thread):
    """Thread of Celery's scheduler. Its own `--beat` is a process that outlives a killed worker."""

    def __init__(self, app: Celery) -> None:
        super().__init__(name="clock", daemon=True)
        self._app = app
        self._stopping = threading.Event()
        self._service: Service | None = None

    def run(self) -> None:
        """Keep the scheduler running until `stop`."""
        self._app.set_current()
        while not self._stopping.is_set():
            # Not the default scheduler, which keeps a file of due times over restarts: intervals
            # here are short.
            self._service = Service(
                self._app,
                max_interval=CLOCK_TICK_MAX_S,
                scheduler_cls=Scheduler,
                remote_control=False,
            )
            try:
                self._service.start()
            except Exception as error:  # errors must not stop the scheduler
                clock_retries.failed(error)
                self._stopping.wait(clock_retries.wait_s())

    def stop(self) -> None:
        """Stop the scheduler. Without a call, the thread ends with the process."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()


class Clock(bootsteps.StartStopStep):  # type: ignore[misc]
    """Worker step that runs the scheduler thread if the worker has the option `--clock`."""

    def __init__(self, worker: Any, clock: bool = False, **options: Any) -> None:
        self.enabled = clock
        super().__init__(worker, **options)

    def create(self, worker: Any) -> ClockThread:
        return ClockThread(worker.app)


def request_rating() -> None:
    """Send the rating task now instead of at its scheduled time."""
    app.send_task("weir.rate_pending", expires=10 * RATE_EVERY_S)


rating_request = TaskRequest(request_rating, RATE_EVERY_S)


class Listener(bootsteps.StartStopStep):  # type: ignore[misc]
    """Worker step that rates usage as soon as it is settled."""

    def create(self, worker: Any) -> UsageListener:
        return UsageListener(os.environ["WEIR_DATABASE_URL"], rating_request)


def task(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function as a Celery task. After an unexpected failure it is paused."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        def attempt() -> None:
            if task_retries.is_due(name):
                with task_retries.survive(name):
                    function()
                record_worker_incidents(os.environ)

        app.task(name=name)(attempt)
        return function

    return register


@worker_init.connect  # type: ignore[untyped-decorator]
def refuse_without_database(**_: Any) -> None:
    """Exit the worker if `WEIR_DATABASE_URL` is not set, or a setting of its tasks is invalid."""
    if not os.environ.get("WEIR_DATABASE_URL"):
        raise SystemExit("WEIR_DATABASE_URL is not set: name the database of this worker")
    try:
        export_settings(os.environ)
        read(RetentionSettings, os.environ)
    except (InvalidValue, SettingInvalid) as error:
        raise SystemExit(str(error)) from error


@worker_ready.connect  # type: ignore[untyped-decorator]
def report_readiness(**_: Any) -> None:
    """Write the pid file by which `weir up` detects that this worker accepts tasks."""
    if path := os.environ.get(READY_FILE):
        Path(path).write_text(str(os.getpid()))


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def end_soon(**_: Any) -> None:
    """Send a last rating: the worker waits up to two seconds for a message before it ends.

    In a thread, because the signal may have interrupted the main one while it held a lock.
    """
    threading.Thread(target=request_rating, name="last rating", daemon=True).start()


app = Celery("weir", include=["metering.tasks"])
app.conf.update(configuration(os.environ))
app.user_options["worker"].add(
    Option(["--clock"], is_flag=True, help="Send the scheduled tasks from a thread of this worker.")
)
app.steps["worker"].update({Clock, Listener})
