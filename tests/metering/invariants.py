"""Invariants of every commit, as `weir fsck` checks them, for a test's database.

They hold at any time; `tests/metering/test_fsck.py` shows that each check can fail.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence

from metering.proof.check import Check, Moment
from metering.proof.counter_checks import WITHIN_LIMITS
from metering.proof.export_checks import EXPORT_CHECKS
from metering.proof.fsck import CHECKS, Connection, connect, run_checks
from metering.proof.hold_checks import NO_LIVE_HOLDS
from metering.proof.ledger_checks import LEDGER_CHECKS
from tests.conftest import on_kept_connection

ALWAYS = tuple(check for check in CHECKS if check.moment is Moment.ALWAYS)
SAMPLE_MAX = 1000


def check_invariants(
    database_url: str, *, all_ended: bool = False, over: Collection[uuid.UUID] = ()
) -> None:
    """Raises: AssertionError with all violations.

    all_ended: that no hold is live any more. over: quotas whose limit was set below their usage.
    """
    found = list(find_violations(database_url, all_ended=all_ended, over=over))
    assert not found, "\n".join(found)


def check_export(database_url: str) -> None:
    """Raises: AssertionError unless every event is rated and every closed hour exported."""
    checks = (*LEDGER_CHECKS, *EXPORT_CHECKS)
    found = [
        violation
        for _, violation in violations(
            database_url, [c for c in checks if c.moment is not Moment.SOON]
        )
    ]
    assert not found, "\n".join(found)


def find_violations(
    database_url: str, *, all_ended: bool = False, over: Collection[uuid.UUID] = ()
) -> Iterator[str]:
    """Yield all violations in one snapshot."""
    checks = (*ALWAYS, NO_LIVE_HOLDS) if all_ended else ALWAYS
    for check, violation in violations(database_url, checks):
        if check is not WITHIN_LIMITS or not any(str(quota_id) in violation for quota_id in over):
            yield violation


def violations(database_url: str, checks: Sequence[Check]) -> list[tuple[Check, str]]:
    """Return the violations that checks find.

    The connection keeps the plans of the checks: they are 50 ms of CPU, and tests check hundreds of
    times.
    """

    def check(connection: Connection) -> list[tuple[Check, str]]:
        with connection.transaction():
            return [
                (verdict.check, f"{verdict.check.name}: {violation}")
                for verdict in run_checks(connection, checks, sample_max=SAMPLE_MAX)
                for violation in verdict.sample
            ]

    return on_kept_connection(database_url, connect_to_check, check)


def connect_to_check(database_url: str) -> Connection:
    """Connect for checks, each of which is planned once."""
    connection = connect(
        database_url, ("application_name=tests", "plan_cache_mode=force_generic_plan")
    )
    connection.prepare_threshold = 0
    return connection
