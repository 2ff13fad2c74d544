"""Check of `weir fsck`: an invariant of the database, and the SQL that selects its violations.

The checks share no code with the rest of the server: windows, weights, prices and sums are written
in this package a second time, in SQL, so that one mistake cannot hide another. Each query is
set-based and has one parameter, `since` ('-infinity' for all rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

SINCE = "%(since)s::timestamptz"

# Retention deletes the holds that ended before the end of a month, then exchanges its usage events
# for sums by day: times from which holds and events are kept.
MONTH_END = "(month + interval '1 month') AT TIME ZONE 'UTC'"
HOLDS_KEPT_FROM = f"(SELECT coalesce(max({MONTH_END}), '-infinity') FROM retired_months)"
EVENTS_KEPT_FROM = f"""(
    SELECT coalesce(max({MONTH_END}), '-infinity')
    FROM retired_months
    WHERE detached_at IS NOT NULL
)"""
HOLDS_SINCE = f"greatest({SINCE}, {HOLDS_KEPT_FROM})"
EVENTS_SINCE = f"greatest({SINCE}, {EVENTS_KEPT_FROM})"
# Sums of the months whose events are removed.
OF_REMOVED_MONTH = "month IN (SELECT month FROM retired_months WHERE detached_at IS NOT NULL)"
DAY_SUMS = f"(SELECT * FROM usage_days WHERE {OF_REMOVED_MONTH}) AS d"


class Moment(StrEnum):
    """Time at which a check must pass.

    always: at every commit. soon: within minutes of a commit, while the background work runs.
    at_rest: after every process has stopped and all holds are swept and all usage is rated.
    """

    ALWAYS = "always"
    SOON = "soon"
    AT_REST = "at_rest"


@dataclass(frozen=True, slots=True)
class Check:
    """Invariant of the database: a sentence, and SQL that selects its violations."""

    name: str
    proves: str
    sql: str
    moment: Moment = Moment.ALWAYS


def violations_sql(subject: str, source: str, problems: Mapping[str, str]) -> str:
    """Build SQL that selects the rows of `source` that meet a condition, with their problems.

    `problems` maps conditions to SQL of the problem's text. Texts are built for those rows only, so
    that a check costs no more than its conditions.
    """
    texts = ",\n        ".join(
        f"CASE WHEN {condition} THEN {problem} END" for condition, problem in problems.items()
    )
    any_condition = "\n   OR ".join(f"({condition})" for condition in problems)
    return f"""
SELECT {subject} AS subject,
       concat_ws('; ',
        {texts}) AS problem
FROM ({source}) AS candidates
WHERE {any_condition}
"""
