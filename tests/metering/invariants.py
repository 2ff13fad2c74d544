"""What must be true at every commit, as `weir fsck` proves it: asked of a test's database.

For any database at any time; `tests/metering/test_fsck.py` shows that each check can fail.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence

from metering.proof import fsck as billing_checks
from metering.proof.fsck import CHECKS, LIMITS_HOLD, NO_HOLD_IS_LEFT, Check, Moment, fsck

ALWAYS = tuple(check for check in CHECKS if check.moment is Moment.ALWAYS)
SAMPLE_MAX = 1000


def check_invariants(database_url: str, *, all_ended: bool = False, over: Collection[uuid.UUID] = ()) -> None:
    """Raises: AssertionError telling everything that is wrong.

    all_ended: that no hold may be live any more either. over: quotas that were set below what was used already.
    """
    found = list(find_violations(database_url, all_ended=all_ended, over=over))
    assert not found, "\n".join(found)


def check_export(database_url: str) -> None:
    """Raises: AssertionError telling what is wrong of ledger and batches, once all is rated and every closed hour has its own."""
    checks = (*billing_checks.LEDGER_CHECKS, *billing_checks.EXPORT_CHECKS)
    found = [violation for _, violation in violations(database_url, [c for c in checks if c.moment is not Moment.SOON])]
    assert not found, "\n".join(found)


def find_violations(database_url: str, *, all_ended: bool = False, over: Collection[uuid.UUID] = ()) -> Iterator[str]:
    """Everything that is wrong, at one moment (one snapshot)."""
    checks = (*ALWAYS, NO_HOLD_IS_LEFT) if all_ended else ALWAYS
    for check, violation in violations(database_url, checks):
        if check is not LIMITS_HOLD or not any(str(quota_id) in violation for quota_id in over):
            yield violation


def violations(database_url: str, checks: Sequence[Check]) -> Iterator[tuple[Check, str]]:
    """What checks find, one by one."""
    for verdict in fsck(database_url, checks, sample_max=SAMPLE_MAX):
        yield from ((verdict.check, f"{verdict.check.name}: {violation}") for violation in verdict.sample)
