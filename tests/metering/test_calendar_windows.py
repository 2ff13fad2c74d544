"""Limits at the borders of calendar windows: leap days, month ends, clock steps, time zones."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds.operations import Admitted
from metering.quotas.quota_admin import set_quota
from metering.quotas.quota_rules import Unit
from metering.quotas.quotas import QuotaExceeded
from metering.store.db import Sessions
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


# What a limit counts: the subject, and the key of the quota.
SUBJECTS: list[tuple[QuotaSubject, dict[str, Any]]] = [
    (QuotaSubject.ORGANIZATION, {}),
    (QuotaSubject.PROJECT, {}),
    (QuotaSubject.API_KEY, {}),
    (QuotaSubject.ORGANIZATION, {"for_each": "end_user"}),
    (QuotaSubject.PROJECT, {"for_each": "label:team"}),
    (QuotaSubject.PROJECT, {"end_user": "ada"}),
    (QuotaSubject.ORGANIZATION, {"label": "team=red"}),
]


@pytest.mark.parametrize(("unit", "last"), BORDERS)
async def test_a_window_ends_at_its_border_whatever_the_clock_and_the_time_zone_do(
    world: HoldWorld, sessions: Sessions, unit: Unit, last: str
) -> None:
    before = datetime.fromisoformat(last).replace(tzinfo=UTC)
    after = before + timedelta(seconds=0.2)
    database = world.one("SELECT quote_ident(current_database())")
    world.execute(f"ALTER DATABASE {database} SET TimeZone = 'Pacific/Kiritimati'")  # UTC+14
    world.set_time(before - timedelta(seconds=50))
    # A customer for each kind of subject, whose requests it alone limits.
    payers = [world.tenant(f"customer-{number}") for number in range(len(SUBJECTS))]
    dimensions = [
        (QuotaDimension(name), amount)
        for measure, amount in AMOUNTS.items()
        if (name := f"{measure}_per_{unit}") in list(QuotaDimension)
    ]
    async with sessions.begin() as session:
        for payer, (subject, key) in zip(payers, SUBJECTS, strict=True):
            ref = getattr(payer, f"{subject}_id")
            for dimension, amount in dimensions:
                await set_quota(
                    session,
                    subject=subject,
                    subject_ref=str(ref),
                    key=QuotaKey(dimension, **key),
                    terms=QuotaTerms(amount),
                    actor="test",
                )

    async def ask() -> set[type]:
        admits = [
            admit(payer, least_tokens=20, end_user="ada", labels={"team": "red"})
            for payer in payers
        ]
        hold_ids.append([op.hold_id for op in admits])
        return {type(answer) for answer in await world.run(*admits)}

    async def settle_all(number: int) -> None:
        await world.run(*(settle(hold_id, 20) for hold_id in hold_ids[number]))

    hold_ids: list[list[uuid.UUID]] = []
    answers = [await ask()]
    world.set_time(before)
    answers.append(await ask())
    world.set_time(after)
    answers.append(await ask())
    answers.append(await ask())
    world.set_time(before)  # the clock steps back over the border
    await settle_all(2)
    answers.append(await ask())
    check_invariants(world.url)
    world.set_time(after)
    await settle_all(0)
    answers.append(await ask())

    admitted, refused = {Admitted}, {QuotaExceeded}
    assert answers == [admitted, refused, admitted, refused, refused, refused]
    counters = world.rows(
        "SELECT dimension, used, held FROM quotas q JOIN quota_counters c ON c.quota_id = q.id"
    )
    assert sorted(counters) == sorted(
        [(str(dimension), amount, 0) for dimension, amount in dimensions] * 2 * len(SUBJECTS)
    )
    check_invariants(world.url, all_ended=True)
