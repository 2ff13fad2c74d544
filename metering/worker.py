"""Background worker without Celery: its command line, its usage listener, its incident counts.

The listener is a thread that requests the rating task when usage is settled. Usage settled while
its connection is down is rated by the schedule, a second later. A worker serves no metrics, so its
incidents are counted in the database and read by the api processes.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping

import psycopg

from common.backoff import Backoff
from common.incidents import INCIDENT_COUNTS, Retries
from metering.holds.usage_notices import CHANNEL
from metering.store.db import KEEPALIVES, connection_options, psycopg_conninfo
from metering.store.refusals import AWAY

# Environment variable naming a file; a worker writes its pid there when it accepts tasks.
READY_FILE = "WEIR_READY_FILE"

LISTEN_S = 1.0  # per wait: maximum time for the thread to stop
CONNECT_TIMEOUT_S = 2  # the minimum of libpq
APPLICATION = "weir-usage-listener"


def worker_command() -> list[str]:
    """Build the command line of a billing worker that also schedules the tasks.

    Its settings come from the environment. You can run any number of workers: a task may run twice,
    and any scheduler replaces the others. SIGTERM ends a worker within three seconds; kill -9
    leaves no process behind and loses nothing.
    """
    return [
        *(sys.executable, "-m", "celery", "--quiet", "--app=metering.celery_app", "worker"),
        "--clock",
        "--pool=solo",  # tasks wait for PostgreSQL; more processes would wait as well
        "--loglevel=WARNING",
        # Workers do not communicate with each other.
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]


RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 5.0

log = logging.getLogger(__name__)


class UsageListener(threading.Thread):
    """Thread that calls `request` at each usage notification, and when it begins to listen."""

    def __init__(self, database_url: str, request: Callable[[], None]) -> None:
        super().__init__(name="usage listener", daemon=True)
        self._conninfo = psycopg_conninfo(database_url)
        self._request = request
        self._stopping = threading.Event()
        self._retries = Retries("usage_listener", longest_s=RECONNECT_MAX_S)

    def run(self) -> None:
        """Listen until `stop`; reconnect with backoff whenever the connection breaks."""
        backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S)
        delay_s = 0.0
        while not self._stopping.wait(delay_s):
            try:
                with psycopg.connect(
                    self._conninfo,
                    autocommit=True,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    options=connection_options((f"application_name={APPLICATION}",)),
                    **KEEPALIVES,
                ) as connection:
                    connection.execute(f"LISTEN {CHANNEL}".encode())
                    backoff.reset()
                    self._listen(connection)
            except (*AWAY, OSError) as away:
                log.info("the usage listener lost its connection: %s", str(away).partition("\n")[0])
            except Exception as error:  # errors must not stop the listener
                self._retries.failed(error)
            delay_s = max(backoff.next_s(), self._retries.wait_s())

    def stop(self) -> None:
        """Stop listening. Without a call, the thread ends with the process."""
        self._stopping.set()

    def _listen(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        self._request()  # for usage settled while the connection was down
        while not self._stopping.is_set():
            if list(connection.notifies(timeout=LISTEN_S, stop_after=1)):
                self._request()


class TaskRequest:
    """Request for a task, sent once until the task begins or should have begun long ago."""

    def __init__(self, ask: Callable[[], None], again_after_s: float) -> None:
        self._ask = ask
        self._again_after_s = again_after_s
        self._requested_at: float | None = None

    def __call__(self) -> None:
        """Request the task, unless a request is pending."""
        now = time.monotonic()
        if self._requested_at is None or now - self._requested_at >= self._again_after_s:
            self._requested_at = now
            self._ask()

    def begun(self) -> None:
        """Record that the task has begun. Later usage needs another request."""
        self._requested_at = None


ADD = """
INSERT INTO worker_incidents AS known (source, incident_count)
VALUES (%s, %s)
ON CONFLICT (source) DO UPDATE
SET incident_count = known.incident_count + excluded.incident_count, last_at = now()
"""

_recorded: dict[str, int] = {}  # counts of `INCIDENT_COUNTS` that the database has


def record_worker_incidents(environment: Mapping[str, str]) -> None:
    """Store the incidents since the last call; if the database is unavailable, the next call does.

    The first call stores 0 for each source, because alerts compare counts.
    """
    counts = dict(INCIDENT_COUNTS)
    new = {
        source: count - _recorded.get(source, 0)
        for source, count in counts.items()
        if count != _recorded.get(source)
    }
    if not new:
        return
    try:
        conninfo = psycopg_conninfo(environment["WEIR_DATABASE_URL"])
        with psycopg.connect(
            conninfo, connect_timeout=CONNECT_TIMEOUT_S, options=connection_options()
        ) as connection:
            for source, count in sorted(new.items()):
                connection.execute(ADD, (source, count))
    except psycopg.Error as error:
        log.warning(
            "incidents are not counted in the database yet: %s", str(error).partition("\n")[0]
        )
        return
    _recorded.update(counts)
