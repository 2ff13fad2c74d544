"""Forecast: results with much, little and no history, and the coverage of its interval."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta

import pytest

from metering.reports.forecast import CONFIDENCE, Forecast, forecast

NOVEMBER = date(2026, 11, 1)  # a Sunday
NOON_16TH = datetime(2026, 11, 16, 12, tzinfo=UTC)


def days_before(today: date, count: int, picos: int = 100) -> dict[date, int]:
    """Return this many days of equal cost, up to yesterday."""
    return {today - timedelta(days=index + 1): picos for index in range(count)}


def test_a_steady_month_is_continued_with_the_rest_of_today() -> None:
    seen = forecast(
        days_before(date(2026, 11, 16), 28) | {date(2026, 11, 16): 40}, NOVEMBER, NOON_16TH
    )

    assert seen.month_to_date_picos == 15 * 100 + 40
    assert seen.expected_picos == 1540 + 50 + 14 * 100  # half of today, and the 17th to the 30th
    assert (seen.low_picos, seen.high_picos) == (seen.expected_picos, seen.expected_picos)
    assert seen.complete_day_count == 28


def test_weekends_are_distinguished_from_weekdays_after_two_of_each() -> None:
    today = date(2026, 11, 16)
    week = {day: 10 if day.weekday() >= 5 else 100 for day in days_before(today, 28)}

    seen = forecast(week, NOVEMBER, datetime(2026, 11, 16, tzinfo=UTC))

    month_to_date = sum(picos for day, picos in week.items() if day >= NOVEMBER)
    # 16th to 30th: eleven weekdays, two weekends.
    assert seen.expected_picos == month_to_date + 11 * 100 + 4 * 10
    assert "same weekday" in seen.method


def test_of_less_than_two_weeks_one_mean_is_taken_and_stated() -> None:
    seen = forecast(days_before(date(2026, 11, 16), 13), NOVEMBER, NOON_16TH)

    assert "weekday" not in seen.method
    assert any("weekends are taken for alike" in each for each in seen.warnings)


def test_days_without_usage_count_and_days_before_the_first_do_not() -> None:
    seen = forecast(
        {date(2026, 11, 6): 100, date(2026, 11, 15): 100},
        NOVEMBER,
        datetime(2026, 11, 16, tzinfo=UTC),
    )

    assert seen.complete_day_count == 10
    assert seen.expected_picos == 200 + 15 * 20


@pytest.mark.parametrize("count", [1, 4])
def test_with_few_days_there_is_a_guess_and_no_interval(count: int) -> None:
    seen = forecast(days_before(date(2026, 11, 16), count), NOVEMBER, NOON_16TH)

    assert seen.expected_picos is not None
    assert (seen.low_picos, seen.high_picos) == (None, None)
    assert any("guess" in each for each in seen.warnings)


def test_without_a_complete_day_nothing_is_claimed() -> None:
    seen = forecast({date(2026, 11, 16): 7}, NOVEMBER, NOON_16TH)

    assert seen == Forecast(7, None, None, None, 0, seen.method, ())


def test_a_month_that_is_over_is_what_it_was() -> None:
    seen = forecast({date(2026, 10, 3): 7, date(2026, 11, 3): 9}, date(2026, 10, 1), NOON_16TH)

    assert seen.month_to_date_picos == 7
    assert seen.expected_picos == 7
    assert seen.low_picos == 7
    assert seen.high_picos == 7


def test_the_low_end_is_never_below_what_is_used_already() -> None:
    wild = days_before(date(2026, 11, 30), 28, 0) | {date(2026, 11, 29): 10**15}

    seen = forecast(wild, NOVEMBER, datetime(2026, 11, 30, 23, tzinfo=UTC))

    assert seen.low_picos == seen.month_to_date_picos
    assert seen.high_picos is not None
    assert seen.expected_picos is not None
    assert seen.high_picos > seen.expected_picos


def test_a_week_unlike_those_before_is_mentioned() -> None:
    today = date(2026, 11, 28)
    jump = days_before(today, 28) | days_before(today, 7, 200)

    assert any(
        "100 % above" in each
        for each in forecast(jump, NOVEMBER, datetime(2026, 11, 28, tzinfo=UTC)).warnings
    )


@pytest.mark.parametrize("history_days", [10, 28])
def test_the_interval_holds_about_as_often_as_it_claims(history_days: int) -> None:
    """The interval contains the true total in about 80 of 100 random months."""
    dice = random.Random(20261116 + history_days)
    now = datetime(2026, 11, 16, tzinfo=UTC)
    first = now.date() - timedelta(days=history_days)
    inside, months = 0, 400
    for _ in range(months):
        rhythm = [dice.uniform(0.3, 1.5) if history_days >= 14 else 1.0 for _ in range(7)]
        length = (date(2026, 12, 1) - first).days
        truth = {
            day: round(10**12 * rhythm[day.weekday()] * dice.gauss(1, 0.25))
            for day in (first + timedelta(n) for n in range(length))
        }
        seen = forecast(
            {day: picos for day, picos in truth.items() if day < now.date()}, NOVEMBER, now
        )
        assert seen.low_picos is not None
        assert seen.high_picos is not None
        inside += (
            seen.low_picos
            <= sum(picos for day, picos in truth.items() if day >= NOVEMBER)
            <= seen.high_picos
        )

    assert CONFIDENCE - 0.07 < inside / months < CONFIDENCE + 0.12
