"""Limits at the borders of calendar windows: leap days, month ends, clock steps, time zones."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from metering.core.models import QuotaDimension
from metering.holds.operations import Admitted, HoldAnswer
from metering.quotas.quota_rules import Unit
from metering.quotas.quotas import QuotaExceeded
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.metering.test_hold_concurrency import AMOUNTS

# The last tenth of a second of each window.
BORDERS = [
    (Unit.MINUTE, "2028-02-29 12:00:59.9"),
    (Unit.HOUR, "2028-02-29 12:59:59.9"),
    (Unit.DAY, "2028-02-28 23:59:59.9"),  # before a leap day
    (Unit.DAY, "2028-02-29 23:59:59.9"),
    (Unit.WEEK, "2028-03-05 23:59:59.9"),  # a Sunday
    (Unit.WEEK, "2027-01-03 23:59:59.9"),  # of a week that began in the year before
    (Unit.MONTH, "2028-02-29 23:59:59.9"),
    (Unit.MONTH, "2027-02-28 23:59:59.9"),
    (Unit.MONTH, "2026-12-31 23:59:59.9"),
]


@pytest.mark.parametrize(("unit", "last"), BORDERS)
async def test_a_window_ends_at_its_border_whatever_the_clock_and_the_time_zone_do(
    world: HoldWorld, unit: Unit, last: str
) -> None:
    before = datetime.fromisoformat(last).replace(tzinfo=UTC)
    after = before + timedelta(seconds=0.2)
    payer = world.tenant()
    database = world.one("SELECT quote_ident(current_database())")
    world.execute(f"ALTER DATABASE {database} SET TimeZone = 'Pacific/Kiritimati'")  # UTC+14
    world.set_time(before - timedelta(seconds=50))
    quotas = {
        measure: world.quota(payer, QuotaDimension(name), amount)
        for measure, amount in AMOUNTS.items()
        if (name := f"{measure}_per_{unit}") in list(QuotaDimension)
    }

    async def ask() -> HoldAnswer | Exception:
        [answer] = await world.run(op := admit(payer, least_tokens=20))
        hold_ids.append(op.hold_id)
        return answer

    hold_ids: list[uuid.UUID] = []
    answers = [await ask()]
    world.set_time(before)
    answers.append(await ask())
    world.set_time(after)
    answers.append(await ask())
    answers.append(await ask())
    world.set_time(before)  # the clock steps back over the border
    await world.run(settle(hold_ids[2], 20))
    answers.append(await ask())
    check_invariants(world.url)
    world.set_time(after)
    await world.run(settle(hold_ids[0], 20))
    answers.append(await ask())

    assert [type(each) for each in answers] == [
        Admitted, QuotaExceeded, Admitted, QuotaExceeded, QuotaExceeded, QuotaExceeded
    ]  # fmt: skip
    for measure, quota_id in quotas.items():
        assert world.counters(quota_id) == [(AMOUNTS[measure], 0)] * 2, measure
    check_invariants(world.url, all_ended=True)
