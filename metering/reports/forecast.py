"""Forecast of a month's cost. Pure.

The forecast is the cost so far plus, for each remaining day, the mean of the same weekday in the
last `WINDOW_DAYS` complete days (the mean of all days with less than two weeks of history). Today
counts by the part that remains. The interval has a confidence of `CONFIDENCE` if daily costs vary
as before: Student's t with their deviation from the means, for the remaining days and for the means
themselves. Trends, growth and holidays are ignored. Amounts are integers of picos, except for
intermediate values of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction

WINDOW_DAYS = 28  # four of each weekday; older days would make the forecast lag behind changes
# Two of each weekday, so that one unusual day is not taken for the mean of its weekday.
WEEKDAY_DAYS_MIN = 14
INTERVAL_DAYS_MIN = 5  # with less, the interval is too wide to be useful
CONFIDENCE = 0.8
DAY_S = 86_400

# Student's t for a two-sided interval of 80 %, by degrees of freedom.
T_80 = {
    1: 3.078,
    2: 1.886,
    3: 1.638,
    4: 1.533,
    5: 1.476,
    6: 1.440,
    7: 1.415,
    8: 1.397,
    9: 1.383,
    10: 1.372,
    12: 1.356,
    15: 1.341,
}

T_80_FAR = 1.325  # from 20 degrees of freedom on; the limit is 1.282
RECENT_DAYS = 7
# A week whose mean differs this much from the three weeks before causes a caution.
CHANGE_SHARE = Fraction(3, 10)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Cost forecast of one month in picos: no estimate without history, no interval with little.

    `complete_day_count` is the number of days of history used. `method` and `warnings` are
    sentences for the reader.
    """

    month_to_date_picos: int
    expected_picos: int | None
    low_picos: int | None
    high_picos: int | None
    complete_day_count: int
    method: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """Expected cost of a day, and its standard deviation.

    `means` are picos by weekday (Monday is 0), all equal unless `by_weekday`; `day_counts` has the
    days behind each. `deviation_picos` is None if the history is too short for an interval.
    `freedom_count` is the number of degrees of freedom.
    """

    means: tuple[Fraction, ...]
    by_weekday: bool
    day_counts: tuple[int, ...]
    deviation_picos: float | None
    freedom_count: int


def forecast(days: Mapping[date, int], month: date, now: datetime) -> Forecast:
    """Forecast the cost of the month that begins on `month`, as of `now` (timezone-aware).

    `days` has picos by day of use (UTC). Missing days cost nothing; the history begins on the first
    day.
    """
    now = now.astimezone(UTC)
    ends = (month + timedelta(days=31)).replace(day=1)
    so_far = sum(picos for day, picos in days.items() if month <= day < ends)
    if now.date() >= ends:
        method = "The month is over: this is its cost so far."
        return Forecast(so_far, so_far, so_far, so_far, 0, method, ())
    history = complete_days(days, now.date())
    if not history:
        method = "No estimate: it needs one complete day of usage."
        return Forecast(so_far, None, None, None, 0, method, ())
    rate = daily_rate(history, now.date())
    remaining = remaining_days(max(month, now.date()), ends, now)
    rest = sum((rate.means[day.weekday()] * share for day, share in remaining), Fraction(0))
    expected = so_far + round(rest)  # an estimate is not billed, so no remainder is carried
    margin = interval_margin(rate, remaining)
    return Forecast(
        month_to_date_picos=so_far,
        expected_picos=expected,
        low_picos=None if margin is None else max(so_far, expected - margin),
        high_picos=None if margin is None else expected + margin,
        complete_day_count=len(history),
        method=method_text(len(history)),
        warnings=tuple(forecast_warnings(history)),
    )


def complete_days(days: Mapping[date, int], today: date) -> list[int]:
    """Return the cost in picos of each day before today, the oldest first.

    Begins with the first usage, at most `WINDOW_DAYS` before today.
    """
    past = [day for day in days if day < today]
    if not past:
        return []
    first = max(min(past), today - timedelta(days=WINDOW_DAYS))
    return [days.get(first + timedelta(days=index), 0) for index in range((today - first).days)]


def daily_rate(history: Sequence[int], today: date) -> Rate:
    """Compute the mean daily cost, by weekday from two weeks of history on, and its deviation."""
    weekdays = [
        (today - timedelta(days=len(history) - index)).weekday() for index in range(len(history))
    ]
    by_weekday = len(history) >= WEEKDAY_DAYS_MIN
    groups = [
        [p for p, w in zip(history, weekdays, strict=True) if w == weekday or not by_weekday]
        for weekday in range(7)
    ]
    means = tuple(Fraction(sum(group), len(group)) for group in groups)
    freedom = len(history) - (7 if by_weekday else 1)
    deviation = None
    if len(history) >= INTERVAL_DAYS_MIN:
        squares = sum(
            (picos - means[weekday]) ** 2 for picos, weekday in zip(history, weekdays, strict=True)
        )
        deviation = math.sqrt(squares / freedom)
    return Rate(means, by_weekday, tuple(map(len, groups)), deviation, freedom)


def remaining_days(first: date, ends: date, now: datetime) -> list[tuple[date, Fraction]]:
    """List the days from `first` to before `ends`, each with its share that is in the future."""
    remaining = []
    for index in range((ends - first).days):
        day = first + timedelta(days=index)
        elapsed_s = (now - datetime.combine(day, time(), UTC)).total_seconds()
        remaining.append((day, Fraction(DAY_S - min(max(int(elapsed_s), 0), DAY_S), DAY_S)))
    return remaining


def interval_margin(rate: Rate, remaining: Sequence[tuple[date, Fraction]]) -> int | None:
    """Compute half the interval's width in picos; None if the history is too short for one.

    Remaining days vary independently, but the error of a mean is common to all days that use it.
    """
    if rate.deviation_picos is None:
        return None
    shares = [
        [float(share) for day, share in remaining if day.weekday() == weekday]
        for weekday in range(7)
    ]
    groups = shares if rate.by_weekday else [[share for group in shares for share in group]]
    counts = rate.day_counts if rate.by_weekday else rate.day_counts[:1]
    variance = sum(
        sum(group) + sum(group) ** 2 / count for group, count in zip(groups, counts, strict=True)
    )
    known = [freedom for freedom in T_80 if freedom <= rate.freedom_count]
    t = T_80_FAR if rate.freedom_count >= 20 else T_80[max(known)]
    return math.ceil(t * rate.deviation_picos * math.sqrt(variance))


def method_text(day_count: int) -> str:
    of = (
        f"the last {day_count} complete days (UTC)"
        if day_count > 1
        else "the only complete day (UTC)"
    )
    if day_count >= WEEKDAY_DAYS_MIN:
        return f"Cost so far, plus for each remaining day the mean of the same weekday in {of}."
    return f"Cost so far, plus for each remaining day the mean of {of}."


def forecast_warnings(history: Sequence[int]) -> list[str]:
    """Describe the limits of the forecast, as sentences for the reader."""
    sentences = ["Trends, holidays, plan discounts and credit are not taken into account."]
    if len(history) < INTERVAL_DAYS_MIN:
        sentences.append(
            f"{len(history)} complete day{'s are' if len(history) > 1 else ' is'} too few for an"
            " interval: the estimate is a guess."
        )
    elif len(history) < WEEKDAY_DAYS_MIN:
        sentences.append(
            f"Less than {WEEKDAY_DAYS_MIN} complete days: weekdays and weekends are taken for"
            " alike."
        )
    if len(history) >= WINDOW_DAYS:
        recent = Fraction(sum(history[-RECENT_DAYS:]), RECENT_DAYS)
        before = Fraction(sum(history[:-RECENT_DAYS]), len(history) - RECENT_DAYS)
        if before and abs(recent / before - 1) > CHANGE_SHARE:
            change = (
                f"{round(abs(recent / before - 1) * 100)} %"
                f" {'above' if recent > before else 'below'}"
            )
            sentences.append(
                f"The last {RECENT_DAYS} days were {change} those before: the estimate lags behind."
            )
    return sentences
