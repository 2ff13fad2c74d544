"""The Celery application: broker, schedule and limits of the background work. What the tasks do is in other modules.

A message only says "look for work"; the work is found by a query. So a lost or doubled message costs nothing, nobody has to publish
one, and the broker needs no care. Settings come from the environment: `WEIR_DATABASE_URL`, `WEIR_BROKER_URL`, `WEIR_HOME`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

from celery import Celery, bootsteps  # type: ignore[import-untyped]
from celery.beat import Scheduler, Service  # type: ignore[import-untyped]
from celery.exceptions import SecurityWarning  # type: ignore[import-untyped]
from celery.signals import worker_init, worker_ready  # type: ignore[import-untyped]
from click import Option
from kombu.transport import virtual

from common.incidents import Retries
from metering.core.errors import InvalidValue
from metering.export.export_settings import export_settings
from metering.worker import READY_FILE, Hurry, UsageListener, record_worker_incidents

log = logging.getLogger(__name__)

# Celery warns of running as root because a pickled message could do anything. Ours are JSON, and a container's only user is root.
warnings.filterwarnings("ignore", category=SecurityWarning, message="You're running the worker with superuser privileges")

RATE_EVERY_S = 1.0  # how old usage gets before it is in the ledger
DELETE_COUNTERS_EVERY_S = 3600.0  # a quota per minute leaves 1,440 rows a day
KEEP_PARTITIONS_EVERY_S = 3600.0  # they are made months ahead; soon again where a lock was not had
SWEEP_EVERY_S = 10.0  # a small part of a hold's life of a minute
EXPORT_EVERY_S = 15.0  # usage is exported by the hour, and a failed call comes round again soon
ALERTS_EVERY_S = 15.0  # people read them; one query over the limits that alert, about a second for 100,000 on a busy machine
PREPAID_EVERY_S = 5.0  # how late credit that begins with a month may come; one small query but in the first seconds of a month
SCHEDULE = {
    "rate_pending": RATE_EVERY_S,
    "delete_past_counters": DELETE_COUNTERS_EVERY_S,
    "keep_partitions": KEEP_PARTITIONS_EVERY_S,
    "refresh_prepaid": PREPAID_EVERY_S,
    "fire_alerts": ALERTS_EVERY_S,
    "export_usage": EXPORT_EVERY_S,
    "sweep_expired_holds": SWEEP_EVERY_S,
}
EXPIRES = {"rate_pending": 10}  # times of its schedule after which a message has nothing to say; else 2
TIME_LIMIT_S = 60.0  # of one task: it stops by itself far earlier, so reaching this means that something hangs
POLLING_INTERVAL_S = 0.05  # of the embedded broker, and so how late usage may be rated; looking into an empty directory costs 20 us
CLOCK_TICK_MAX_S = 1.0  # how long the clock may sleep, and so how long it may take to stop
REST_S_MAX = 30.0  # of a task or of the clock after a failure: what is wrong with one item rests for longer by itself
VISIBILITY_TIMEOUT_S = 300  # after which Redis gives a dead worker's message to another; longer than any task may take


task_retries = Retries("worker_task", longest_s=REST_S_MAX)  # by task
clock_retries = Retries("worker_clock", longest_s=REST_S_MAX)


def configuration(environment: Mapping[str, str]) -> dict[str, Any]:
    """Celery's settings for an environment."""
    home = Path(environment.get("WEIR_HOME") or Path.home() / ".weir")
    broker_url = environment.get("WEIR_BROKER_URL") or "filesystem://localhost"
    return {
        "broker_url": broker_url,
        **broker_options(broker_url, home),
        "broker_connection_retry_on_startup": True,
        # A message is acknowledged when its task has ended, and is given to another worker if that one's process dies.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_acks_on_failure_or_timeout": True,  # the schedule tries again; a message that always fails must not go round for ever
        "worker_prefetch_multiplier": 1,
        "task_ignore_result": True,
        "task_time_limit": TIME_LIMIT_S * 2,  # of a prefork pool: kills a process that ignores its own limit
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


def broker_options(broker_url: str, home: Path) -> dict[str, Any]:
    """What the broker of a URL needs to be told beside it."""
    if broker_url.startswith("filesystem:"):
        options = {"directory": str(home / "broker"), "polling_interval": POLLING_INTERVAL_S}
        return {"broker_transport": f"{__name__}:DirectoryTransport", "broker_transport_options": options}
    return {"broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT_S}}


class DirectoryChannel(virtual.Channel):
    """The broker that needs no server: each message is a file in one directory of this machine.

    In place of kombu's own, whose worker dies of a message that it finds half written, or when the directory goes away. Here a file
    gets its name when it is complete, and the directory may be emptied or removed at any time.
    """

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex}.{queue}"
        draft = self._directory / f".{name}"
        draft.write_text(json.dumps(message))
        draft.replace(self._directory / name)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        for path in self._messages(queue):
            try:
                written = path.read_text()
                path.unlink()
            except FileNotFoundError:
                continue  # whoever removes it has it
            try:
                message: dict[str, Any] = json.loads(written)
            except ValueError:
                log.warning("dropped %s, which is no message", path)
                continue
            return message
        raise Empty

    def _size(self, queue: str) -> int:
        return len(self._messages(queue))

    def _purge(self, queue: str) -> int:
        messages = self._messages(queue)
        for path in messages:
            path.unlink(missing_ok=True)
        return len(messages)

    def _messages(self, queue: str) -> list[Path]:
        try:
            return sorted(self._directory.glob(f"[0-9]*.{queue}"))
        except FileNotFoundError:  # `glob` looks whether it is there, and then into it
            return []

    @property
    def _directory(self) -> Path:
        return Path(self.connection.client.transport_options["directory"])


class DirectoryTransport(virtual.Transport):
    """Connects to a `DirectoryChannel`. What is bound to what is known to each process by itself."""

    Channel = DirectoryChannel
    implements = virtual.Transport.implements.extend(asynchronous=False, exchange_type=frozenset(["direct"]))
    global_state = virtual.BrokerState()  # type: ignore[no-untyped-call]
    driver_type = driver_name = "directory"

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)  # type: ignore[no-untyped-call]
        self.state = self.global_state


class ClockThread(threading.Thread):
    """Sends what is due. Celery's own `--beat` would be a process, which goes on by itself when its worker is killed."""

    def __init__(self, app: Celery) -> None:
        super().__init__(name="clock", daemon=True)
        self._app = app
        self._stopping = threading.Event()
        self._service: Service | None = None

    def run(self) -> None:
        """Keep the service going until `stop`."""
        self._app.set_current()
        while not self._stopping.is_set():
            # The plain scheduler: the default one keeps a file, to know after a restart what is due. Here everything soon is.
            self._service = Service(self._app, max_interval=CLOCK_TICK_MAX_S, scheduler_cls=Scheduler, remote_control=False)
            try:
                self._service.start()
            except Exception as error:  # whatever stopped the clock must not stop it for good
                clock_retries.failed(error)
                self._stopping.wait(clock_retries.wait_s())

    def stop(self) -> None:
        """Ask it to stop; it dies with the process if it does not hear."""
        self._stopping.set()
        if self._service is not None:
            self._service.stop()


class Clock(bootsteps.StartStopStep):  # type: ignore[misc]
    """The option `--clock` of a worker."""

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
    """Rates usage as soon as it is there, in every worker."""

    def create(self, worker: Any) -> UsageListener:
        return UsageListener(os.environ["WEIR_DATABASE_URL"], rating_hurry)


def task(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a function that takes nothing a task of this name. A task that fails unexpectedly rests before it runs again."""

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
    """Tell `weir up` that this worker takes tasks."""
    if path := os.environ.get(READY_FILE):
        Path(path).write_text(str(os.getpid()))


app = Celery("weir", include=["metering.tasks"])
app.conf.update(configuration(os.environ))
app.user_options["worker"].add(Option(["--clock"], is_flag=True, help="Send the scheduled tasks, from a thread of this worker."))
app.steps["worker"].update({Clock, Listener})
