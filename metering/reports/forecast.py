"""What a month will have cost by its end: the rate of the last four weeks by weekday, and how far off that may be. Pure.

The estimate: what was used so far, plus for each day that is left the mean of the same weekday in the last `WINDOW_DAYS` complete
days (with less than two weeks of them: the mean of all). Of today the part that is still to come. The interval holds the truth in
`CONFIDENCE` of all cases if days scatter as they did: Student's t with the scatter of the days around those means, for the days
left and for the means themselves. No trend, no growth, no holidays. Money is in whole picos; the width of the interval alone is a
float on its way there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction

WINDOW_DAYS = 28  # four of each weekday; older days say less than they cost in lag
WEEKDAY_DAYS_MIN = 14  # two of each weekday; with less, one odd day would pass for a weekday's habit
INTERVAL_DAYS_MIN = 5  # with less, Student's t is so wide that an interval says nothing
CONFIDENCE = 0.8
DAY_S = 86_400
# Student's t for a two-sided interval of 80 %, by degrees of freedom; beyond the table that of the normal distribution is close.
T_80 = {1: 3.078, 2: 1.886, 3: 1.638, 4: 1.533, 5: 1.476, 6: 1.440, 7: 1.415, 8: 1.397, 9: 1.383, 10: 1.372, 12: 1.356, 15: 1.341}
T_80_FAR = 1.325  # of 20 degrees; 1.282 at infinity
RECENT_DAYS = 7
CHANGE_SHARE = Fraction(3, 10)  # a week that is so far off the three before is told: the rate lags behind it


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one month, in picos. Without history there is no estimate; with little, no interval.

    complete_day_count: the days that the rate is made of. method, cautions: sentences for the reader.
    """

    so_far_picos: int
    expected_picos: int | None
    low_picos: int | None
    high_picos: int | None
    complete_day_count: int
    method: str
    cautions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a day is expected to cost, and how much days scatter around that.

    means: picos by weekday (Monday is 0), seven times the same where weekdays are not told apart. scatter_picos: None where the
    history is too short for an interval.
    """

    means: tuple[Fraction, ...]
    by_weekday: bool
    day_counts: tuple[int, ...]
    scatter_picos: float | None
    freedom_count: int


def forecast(days: Mapping[date, int], month: date, now: datetime) -> Forecast:
    """The month that begins at `month`, seen at `now` (aware).

    days: picos by day of use (UTC); a day that is not there cost nothing, and the history begins at the first that is.
    """
    now = now.astimezone(UTC)
    ends = (month + timedelta(days=31)).replace(day=1)
    so_far = sum(picos for day, picos in days.items() if month <= day < ends)
    if now.date() >= ends:
        return Forecast(so_far, so_far, so_far, so_far, 0, "The month is over: this is what it cost so far.", ())
    history = complete_days(days, now.date())
    if not history:
        return Forecast(so_far, None, None, None, 0, "No complete day of usage yet: there is nothing to go by.", ())
    rate = daily_rate(history, now.date())
    left = days_left(max(month, now.date()), ends, now)
    rest = sum((rate.means[day.weekday()] * share for day, share in left), Fraction(0))
    expected = so_far + whole(rest)
    margin = interval_margin(rate, left)
    return Forecast(
        so_far_picos=so_far,
        expected_picos=expected,
        low_picos=None if margin is None else max(so_far, expected - margin),
        high_picos=None if margin is None else expected + margin,
        complete_day_count=len(history),
        method=method_text(len(history)),
        cautions=tuple(cautions(history)),
    )


def complete_days(days: Mapping[date, int], today: date) -> list[int]:
    """Picos of the days before today, oldest first: at most the window, and none from before the first usage."""
    past = [day for day in days if day < today]
    if not past:
        return []
    first = max(min(past), today - timedelta(days=WINDOW_DAYS))
    return [days.get(first + timedelta(days=index), 0) for index in range((today - first).days)]


def daily_rate(history: Sequence[int], today: date) -> Rate:
    """Means by weekday where there are two weeks of history, else one mean for all; and the scatter around them."""
    weekdays = [(today - timedelta(days=len(history) - index)).weekday() for index in range(len(history))]
    by_weekday = len(history) >= WEEKDAY_DAYS_MIN
    groups = [[p for p, w in zip(history, weekdays, strict=True) if w == weekday or not by_weekday] for weekday in range(7)]
    means = tuple(Fraction(sum(group), len(group)) for group in groups)
    freedom = len(history) - (7 if by_weekday else 1)
    scatter = None
    if len(history) >= INTERVAL_DAYS_MIN:
        squares = sum((picos - means[weekday]) ** 2 for picos, weekday in zip(history, weekdays, strict=True))
        scatter = math.sqrt(squares / freedom)
    return Rate(means, by_weekday, tuple(map(len, groups)), scatter, freedom)


def days_left(first: date, ends: date, now: datetime) -> list[tuple[date, Fraction]]:
    """The days from `first` on that are not over, each with the share of it that is still to come."""
    left = []
    for index in range((ends - first).days):
        day = first + timedelta(days=index)
        gone_s = (now - datetime.combine(day, time(), UTC)).total_seconds()
        left.append((day, Fraction(DAY_S - min(max(int(gone_s), 0), DAY_S), DAY_S)))
    return left


def interval_margin(rate: Rate, left: Sequence[tuple[date, Fraction]]) -> int | None:
    """Half the width of the interval in picos; None where the history is too short for one.

    The days left scatter independently; the error of a mean hits all the days that rest on it at once.
    """
    if rate.scatter_picos is None:
        return None
    shares = [[float(share) for day, share in left if day.weekday() == weekday] for weekday in range(7)]
    groups = shares if rate.by_weekday else [[share for group in shares for share in group]]
    counts = rate.day_counts if rate.by_weekday else rate.day_counts[:1]
    variance = sum(sum(group) + sum(group) ** 2 / count for group, count in zip(groups, counts, strict=True))
    known = [freedom for freedom in T_80 if freedom <= rate.freedom_count]
    t = T_80_FAR if rate.freedom_count >= 20 else T_80[max(known)]
    return math.ceil(t * rate.scatter_picos * math.sqrt(variance))


def whole(amount: Fraction) -> int:
    """Picos of an estimate. Nobody owes an estimate, so it has no remainder to carry."""
    return round(amount)


def method_text(day_count: int) -> str:
    of = f"the last {day_count} complete days (UTC)" if day_count > 1 else "the one complete day (UTC) there is"
    if day_count >= WEEKDAY_DAYS_MIN:
        return f"Used so far, plus for each day left the mean of the same weekday in {of}."
    return f"Used so far, plus for each day left the mean of {of}."


def cautions(history: Sequence[int]) -> list[str]:
    """What the reader should know before trusting the numbers."""
    said = ["No trend, holidays, plan discounts or credit are taken into account."]
    if len(history) < INTERVAL_DAYS_MIN:
        said.append(
            f"{len(history)} complete day{'s are' if len(history) > 1 else ' is'} too little for an interval: take it as a guess."
        )
    elif len(history) < WEEKDAY_DAYS_MIN:
        said.append(f"Less than {WEEKDAY_DAYS_MIN} complete days: weekdays and weekends are taken for alike.")
    if len(history) >= WINDOW_DAYS:
        recent = Fraction(sum(history[-RECENT_DAYS:]), RECENT_DAYS)
        before = Fraction(sum(history[:-RECENT_DAYS]), len(history) - RECENT_DAYS)
        if before and abs(recent / before - 1) > CHANGE_SHARE:
            change = f"{round(abs(recent / before - 1) * 100)} % {'above' if recent > before else 'below'}"
            said.append(f"The last {RECENT_DAYS} days were {change} those before: the estimate lags behind.")
    return said
