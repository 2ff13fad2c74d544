"""The Celery application: broker, schedule and limits of the background work. What the tasks do is
in other modules.

A message only says "look for work"; the work is found by a query. So a lost or doubled message
costs nothing, nobody has to publish one, and the broker needs no care. Settings come from the
environment: `WEIR_DATABASE_URL`, `WEIR_BROKER_URL`, `WEIR_HOME`.
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
from celery.signals import worker_init, worker_ready  # type: ignore[import-untyped]
from click import Option

from common.incidents import Retries
from metering.core.errors import InvalidValue
from metering.export.export_settings import export_settings
from metering.worker import READY_FILE, Hurry, UsageListener, record_worker_incidents

log = logging.getLogger(__name__)

# Celery warns of running as root because a pickled message could do anything. Ours are JSON, and a
# container's only user is root.
warnings.filterwarnings("ignore", category=SecurityWarning, message="You're running the worker with superuser privileges")

RATE_EVERY_S = 1.0  # how old usage gets before it is in the ledger
DELETE_COUNTERS_EVERY_S = 3600.0  # a quota per minute leaves 1,440 rows a day
KEEP_PARTITIONS_EVERY_S = 3600.0  # created months ahead; retried soon after a lock timeout
SWEEP_EVERY_S = 10.0  # a small part of a hold's life of a minute
EXPORT_EVERY_S = 15.0  # usage is exported by the hour, and failed calls are retried soon
# People read them; one query over the limits that alert, about a second for 100,000 on a busy
# machine.
ALERTS_EVERY_S = 15.0
# How late credit that begins with a month may come; one small query but in the first seconds of a
# month.
PREPAID_EVERY_S = 5.0
SCHEDULE = {
    "rate_pending": RATE_EVERY_S,
    "delete_past_counters": DELETE_COUNTERS_EVERY_S,
    "keep_partitions": KEEP_PARTITIONS_EVERY_S,
    "refresh_prepaid": PREPAID_EVERY_S,
    "fire_alerts": ALERTS_EVERY_S,
    "export_usage": EXPORT_EVERY_S,
    "sweep_expired_holds": SWEEP_EVERY_S,
}
# Times of its schedule after which a message has nothing to say; else 2.
EXPIRES = {"rate_pending": 10}
TIME_LIMIT_S = 60.0  # per task: tasks stop far earlier, so reaching it means that something hangs
POLLING_INTERVAL_S = 0.05  # of a worker without a broker, and so the maximum delay of rating
CLOCK_TICK_MAX_S = 1.0  # maximum sleep of the clock, and so the maximum time for it to stop
# Pause of a task or of the clock after a failure; single failing items pause longer.
REST_S_MAX = 30.0
# After which Redis gives a dead worker's message to another; longer than any task may take.
VISIBILITY_TIMEOUT_S = 300


task_retries = Retries("worker_task", longest_s=REST_S_MAX)  # by task
clock_retries = Retries("worker_clock", longest_s=REST_S_MAX)


def configuration(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Celery's settings for an environment."""
    return {
        # A worker alone sends its messages to itself. What it forgets with its death the next one's
        # schedule sends again.
        "broker_url": environment.get("WEIR_BROKER_URL") or "memory://localhost",
        "broker_transport_options": {"polling_interval": POLLING_INTERVAL_S, "visibility_timeout": VISIBILITY_TIMEOUT_S},
        "broker_connection_retry_on_startup": True,
        # A message is acknowledged when its task has ended, and is given to another worker if that
        # one's process dies.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        # The schedule tries again; a message that always fails must not go round for ever.
        "task_acks_on_failure_or_timeout": True,
        "worker_prefetch_multiplier": 1,
        "task_ignore_result": True,
        # Of a prefork pool: kills a process that ignores its own limit.
        "task_time_limit": TIME_LIMIT_S * 2,
        "task_serializer": "json",
        "accept_content": ["json"],
        "timezone": "UTC",
        "task_default_queue": "weir",
        # Nothing here is controlled or watched through the broker; the metrics are in the database.
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        # A message that no worker has taken when the next ones are out has nothing to say any more.
        "beat_schedule": {
            name: {"task": f"weir.{name}", "schedule": every_s, "options": {"expires": EXPIRES.get(name, 2) * every_s}}
            for name, every_s in SCHEDULE.items()
        },
    }


class ClockThread(threading.Thread):
    """Scheduler thread. Celery's own `--beat` would be a process that outlives its killed worker."""

    def __init__(self, app: Celery) -> None:
        super().__init__(name="clock", daemon=True)
        self._app = app
        self._stopping = threading.Event()
        self._service: Service | None = None

    def run(self) -> None:
        """Keep the scheduler running until `stop`."""
        self._app.set_current()
        while not self._stopping.is_set():
            # The plain scheduler: the default one keeps a file, to know after a restart what is
            # due. Here everything soon is.
            self._service = Service(self._app, max_interval=CLOCK_TICK_MAX_S, scheduler_cls=Scheduler, remote_control=False)
            try:
                self._service.start()
            except Exception as error:  # whatever stopped the clock must not stop it for good
                clock_retries.failed(error)
                self._stopping.wait(clock_retries.wait_s())

    def stop(self) -> None:
        """Ask the thread to stop; otherwise it ends with the process."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()


class Clock(bootsteps.StartStopStep):  # type: ignore[misc]
    """Worker option `--clock`."""

    def __init__(self, worker: Any, clock: bool = False, **options: Any) -> None:
        self.enabled = clock
        super().__init__(worker, **options)

    def create(self, worker: Any) -> ClockThread:
        return ClockThread(worker.app)


def ask_for_rating() -> None:
    """Send the task that the schedule sends, too."""
    app.send_task("weir.rate_pending", expires=10 * RATE_EVERY_S)


rating_hurry = Hurry(ask_for_rating, RATE_EVERY_S)


class Listener(bootsteps.StartStopStep):  # type: ignore[misc]
    """Worker step that rates usage as soon as it is settled."""

    def create(self, worker: Any) -> UsageListener:
        return UsageListener(os.environ["WEIR_DATABASE_URL"], rating_hurry)


def task(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function without arguments as a task. A task that fails unexpectedly pauses before
    its next run.
    """

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
    """A worker without its database would only fail, once a second."""
    if not os.environ.get("WEIR_DATABASE_URL"):
        raise SystemExit("WEIR_DATABASE_URL is not set: name the database that the worker is to work on")
    try:
        export_settings(os.environ)
    except InvalidValue as error:
        raise SystemExit(str(error)) from error


@worker_ready.connect  # type: ignore[untyped-decorator]
def tell_readiness(**_: Any) -> None:
    """Tell `weir up` that this worker accepts tasks."""
    if path := os.environ.get(READY_FILE):
        Path(path).write_text(str(os.getpid()))


app = Celery("weir", include=["metering.tasks"])
app.conf.update(configuration(os.environ))
app.user_options["worker"].add(Option(["--clock"], is_flag=True, help="Send the scheduled tasks, from a thread of this worker."))
app.steps["worker"].update({Clock, Listener})
