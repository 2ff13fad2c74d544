"""PostgreSQL's refusals: which are repeated, which are an outage, and what an operator has to do.

The only place that interprets errors of the database. A conflict with another transaction is
repeated, the whole transaction as one unit; everything else ends the work with an error that says
why. Owns no state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg
from psycopg import errors
from sqlalchemy.exc import DBAPIError

from common.backoff import Backoff
from metering.core.errors import DatabaseUnavailable, WriteConflict

ATTEMPTS_MAX = 5  # the winners of conflicts commit, so several in a row are rare
PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.5  # transactions take milliseconds; before jitter of half

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# Another transaction was in the way and nothing was written: the same work may succeed now.
CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)

# Work that failed with these errors may succeed if it is repeated: a unique key that another
# transaction has just taken is found by the repetition.
REPEATED = (*CONFLICTS, errors.UniqueViolation)

# The server did not do the work, for whatever reason. Idle time-outs mean that this process was
# suspended. A read-only server has just been replaced by another primary.
AWAY = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
    errors.ReadOnlySqlTransaction,
)
LOST = (*AWAY, OSError)  # a connection was lost; TimeoutError is an OSError

# Causes that an operator can remove, the first match wins. All others: no answer.
CAUSES: tuple[tuple[tuple[type[psycopg.Error], ...], str], ...] = (
    (
        (errors.ReadOnlySqlTransaction,),
        "the database is read-only: it is a standby or fails over to one; check WEIR_DATABASE_URL",
    ),
    (
        (errors.QueryCanceled, errors.TransactionTimeout),
        "the database is too slow: it cancelled a statement that exceeded its time limit",
    ),
    (
        (errors.DiskFull,),
        "the database's disk is full: free space or enlarge it",
    ),
    (
        (errors.OutOfMemory, errors.ConfigurationLimitExceeded, errors.IoError),
        "the database lacks memory or cannot use its disk: see its log",
    ),
    (
        (errors.TooManyConnections,),
        "the database has no free connection: raise max_connections",
    ),
    (
        (errors.InvalidPassword, errors.InvalidAuthorizationSpecification),
        "the database refuses the role or the password of WEIR_DATABASE_URL",
    ),
    (
        (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow),
        "the database shuts down or starts up",
    ),
)
NO_ANSWER = "the database does not answer"
# PgBouncer's words; its refusals have no SQLSTATE.
REFUSED_OPTIONS = "unsupported startup parameter"
POOLER = (
    "the pooler refuses connections with settings: set its ignore_startup_parameters = options,"
    " and pool_mode = session"
)


def cause_of(error: BaseException) -> str:
    """Describe in a sentence what is wrong with the database."""
    if REFUSED_OPTIONS in str(error):
        return POOLER
    return next((cause for kinds, cause in CAUSES if isinstance(error, kinds)), NO_ANSWER)


def refusal_of(error: BaseException, retry_after_s: float = 1.0) -> DatabaseUnavailable | None:
    """Convert a conflict or an outage to a domain error; None for any other error."""
    if isinstance(error, CONFLICTS):
        return WriteConflict(type(error).__name__)
    if isinstance(error, AWAY):
        return DatabaseUnavailable(cause_of(error), retry_after_s=retry_after_s)
    return None


def is_conflict(error: BaseException) -> bool:
    """Return True if work that failed with this error may succeed when repeated."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(origin, (WriteConflict, *REPEATED))


async def repeated(work: Callable[[], Awaitable[Result]]) -> Result:
    """Run work and return its result; after a conflict, run it again from its start.

    `work` is one transaction, or several that may run twice. Raises: the last conflict; other
    errors at once.
    """
    backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S)
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return await work()
        except Exception as error:
            if attempt == ATTEMPTS_MAX or not is_conflict(error):
                raise
            log.info("a transaction is repeated: %s", str(error).partition("\n")[0])
        await asyncio.sleep(backoff.next_s() * (0.5 + random.random()))
    raise AssertionError("the last attempt returns or raises")
