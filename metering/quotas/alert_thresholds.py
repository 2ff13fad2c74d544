"""At what a limit alerts: which thresholds it may have, and which it has unless somebody says otherwise. Pure.

Those of a limit are percent of it that are used; those of prepaid credit are picos that are left. Limits per day and month alert,
and credit does. A minute is over before anybody has read of it, and what runs at once comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from metering.errors import InvalidValue
from metering.models import QuotaDimension
from metering.quotas.quota_rules import DIMENSIONS, Unit

USUAL_PERCENTS = (50, 80, 100)
PERCENT_MAX = 1000  # a limit that only watches may be passed; tenfold is a unit mixed up
LEFT_MAX_PICOS = 10**18  # a million units, as much as one grant may be
THRESHOLDS_MAX = 10  # of one limit: nobody acts on more
ALERTING = frozenset(dimension for dimension, (_, unit, *_) in DIMENSIONS.items() if unit in (Unit.DAY, Unit.MONTH))


def usual_thresholds(dimension: QuotaDimension) -> tuple[int, ...]:
    """Of a new limit of which nothing else is said."""
    return USUAL_PERCENTS if dimension in ALERTING else ()


def checked_percents(dimension: QuotaDimension, asked: Sequence[int]) -> tuple[int, ...]:
    """Thresholds of a limit in their order; none for no alerts. Raises: InvalidValue."""
    if asked and dimension not in ALERTING:
        alerting = ", ".join(str(each) for each in QuotaDimension if each in ALERTING)
        raise InvalidValue("alert_at", f"a limit on {dimension} does not alert: leave it out; those on {alerting} do")
    return _checked(asked, PERCENT_MAX, "percent of the limit")


def checked_lefts(asked: Sequence[int]) -> tuple[int, ...]:
    """Thresholds of prepaid credit in their order; none for no alerts. Raises: InvalidValue."""
    return _checked(asked, LEFT_MAX_PICOS, "picos of credit that are left")


def _checked(asked: Sequence[int], most: int, unit: str) -> tuple[int, ...]:
    if len(asked) > THRESHOLDS_MAX:
        raise InvalidValue("alert_at", f"give at most {THRESHOLDS_MAX} thresholds")
    for value in asked:
        if not 1 <= value <= most:
            raise InvalidValue("alert_at", f"{value} is none: give 1 to {most}, in {unit}")
    if len(set(asked)) != len(asked):
        raise InvalidValue("alert_at", "give each threshold once")
    return tuple(sorted(asked))
