"""Listens for usage to rate, in a thread of the worker, and asks for the rating task. Its connection may break at any time.

What is settled while nobody listens is found by the schedule, a second later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import psycopg

from common.backoff import Backoff
from common.incidents import Retries
from metering.holds.holds import CHANNEL
from metering.store.db import KEEPALIVES, psycopg_conninfo

LISTEN_S = 1.0  # at a time, and so how long the thread may take to stop
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 5.0
CONNECT_TIMEOUT_S = 2  # the least that libpq knows
APPLICATION = "weir usage listener"

log = logging.getLogger(__name__)


class UsageListener(threading.Thread):
    """Calls `hurry` whenever a process says that something was used, and whenever it has just begun to listen."""

    def __init__(self, database_url: str, hurry: Callable[[], None]) -> None:
        super().__init__(name="usage listener", daemon=True)
        self._conninfo = psycopg_conninfo(database_url)
        self._hurry = hurry
        self._stopping = threading.Event()
        self._retries = Retries("usage_listener", longest_s=RECONNECT_MAX_S)

    def run(self) -> None:
        """Listen until `stop`; connects again, ever more slowly, whenever the connection breaks."""
        backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S)
        delay_s = 0.0
        while not self._stopping.wait(delay_s):
            try:
                with psycopg.connect(
                    self._conninfo,
                    autocommit=True,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    application_name=APPLICATION,
                    **KEEPALIVES,
                ) as connection:
                    connection.execute(f"LISTEN {CHANNEL}".encode())
                    backoff.reset()
                    self._listen(connection)
            except (psycopg.OperationalError, psycopg.InterfaceError, OSError) as away:
                log.info("usage is not listened for: %s", str(away).partition("\n")[0])
            except Exception as error:  # whatever it is, the schedule goes on, and so must this
                self._retries.failed(error)
            delay_s = max(backoff.next_s(), self._retries.wait_s())

    def stop(self) -> None:
        """Ask it to stop; it dies with the process if it does not hear."""
        self._stopping.set()

    def _listen(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        self._hurry()  # for what was used while nobody listened
        while not self._stopping.is_set():
            if list(connection.notifies(timeout=LISTEN_S, stop_after=1)):
                self._hurry()


class Hurry:
    """Asks for a task no more often than somebody does it: once, until it has begun or should have long ago."""

    def __init__(self, ask: Callable[[], None], again_after_s: float) -> None:
        self._ask = ask
        self._again_after_s = again_after_s
        self._asked_at: float | None = None

    def __call__(self) -> None:
        """Somebody has something to do for it."""
        now = time.monotonic()
        if self._asked_at is None or now - self._asked_at >= self._again_after_s:
            self._asked_at = now
            self._ask()

    def begun(self) -> None:
        """The task has begun: what is used from now on needs another one."""
        self._asked_at = None
