"""Replay of requests under a limit, against a model that adds up every window again."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from metering.core.models import QuotaDimension, QuotaSubject
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_preview import Replay, Slices
from metering.quotas.quota_rules import QuotaRule

START = datetime(2026, 11, 20, 23, 50, tzinfo=UTC)
SLICES = Slices(token_count=16, least_token_count=2)
PRICES = TokenPrices(1, "USD", 5, 1, 7)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DIMENSIONS: list[tuple[QuotaDimension, int]] = [
    (QuotaDimension.REQUESTS_PER_MINUTE, 0),
    (QuotaDimension.TOKENS_PER_MINUTE, 0),
    (QuotaDimension.TOKENS_PER_HOUR, 0),
    (QuotaDimension.INPUT_TOKENS_PER_DAY, 0),
    (QuotaDimension.COST_PICOS_PER_DAY, 0),
    (QuotaDimension.TOKENS_PER_LIFETIME, 0),
    (QuotaDimension.CONCURRENT_REQUESTS, 0),
    (QuotaDimension.REQUESTS_PER_WINDOW, 3),
    (QuotaDimension.TOKENS_PER_WINDOW, 120),
]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request: its time, input, leased and delivered output, and how long it runs."""

    at: datetime
    sent: int
    leased: int
    output: int
    lasting: timedelta

    @property
    def ends_at(self) -> datetime:
        return self.at + self.lasting

    @property
    def row(self) -> Any:
        """Return the recorded request; as its first slice is its lease, it has no extension."""
        return SimpleNamespace(
            admitted_at=self.at,
            charged_at=self.at,
            ends_at=self.ends_at,
            state="settled",
            input_token_count=self.sent,
            cached_input_token_count=0,
            leased_token_count=self.leased,
            posted_token_count=0,
            posted_minutes=[],
            reasoning_token_count=0,
            price_version_id=1,
            embedding=False,
            is_reported=True,
            reported_input=self.sent,
            reported_output=self.output,
            reported_reasoning=0,
            member="",
        )


def some_requests(chance: random.Random, count: int) -> list[Recorded]:
    at, requests = START, []
    for _ in range(count):
        at += timedelta(seconds=chance.choice((0.5, 3, 20, 61, 400)))
        leased = chance.randint(1, 16)
        requests.append(
            Recorded(
                at,
                chance.randint(1, 30),
                leased,
                chance.randint(0, leased),
                timedelta(seconds=chance.choice((0.25, 2, 90, 3000))),
            )
        )
    return requests


def window_of(dimension: QuotaDimension, minutes: int, at: datetime) -> tuple[datetime, datetime]:
    """Return the first moment that counts at a time, and the start of its counter."""
    unit = dimension.rpartition("_")[2]
    if dimension is QuotaDimension.CONCURRENT_REQUESTS or unit == "lifetime":
        return EPOCH, EPOCH
    if unit == "window":
        bucket = timedelta(minutes=-(-minutes // 60))
        start = at - (at - EPOCH) % bucket
        return start - timedelta(minutes=minutes), start
    kept = {"minute": (at.hour, at.minute), "hour": (at.hour, 0), "day": (0, 0)}[unit]
    start = at.replace(hour=kept[0], minute=kept[1], second=0, microsecond=0)
    return start, start


def amount(dimension: QuotaDimension, sent: int, output: int) -> int:
    if dimension.startswith("input"):
        return sent
    if dimension.startswith("cost"):
        return sent * 5 + output * 7
    return sent + output if dimension.startswith("tokens") else 1


def expected(
    requests: Sequence[Recorded],
    dimension: QuotaDimension,
    minutes: int,
    limit: int,
    since: datetime,
) -> list[datetime]:
    """Return the times of the refused requests, adding up all charges for each request."""
    charged: list[tuple[Recorded, int]] = []
    refused = []
    for each in requests:
        first, _ = window_of(dimension, minutes, each.at)
        taken = 0
        for earlier, leased in charged:
            if window_of(dimension, minutes, earlier.at)[1] < first:
                continue
            if earlier.ends_at > each.at:
                taken += amount(dimension, earlier.sent, leased)
            elif dimension is not QuotaDimension.CONCURRENT_REQUESTS:
                taken += amount(dimension, earlier.sent, min(earlier.output, leased))
        lease = each.leased
        if each.at >= since:
            while lease > 0 and amount(dimension, each.sent, lease) > limit - taken:
                lease -= 1
            if lease < min(SLICES.least_token_count, each.leased):
                refused.append(each.at)
                continue
        charged.append((each, lease))
    return refused


@pytest.mark.parametrize(("dimension", "minutes"), DIMENSIONS)
def test_a_replay_refuses_as_the_sums_of_each_window_do(
    dimension: QuotaDimension, minutes: int
) -> None:
    refused_count = 0
    for seed in range(40):
        chance = random.Random(seed)
        requests = some_requests(chance, 60)
        since = requests[chance.randint(0, 20)].at
        sizes = [amount(dimension, each.sent, each.output) for each in requests]
        limit = chance.choice((0, 1, max(sizes), sum(sizes) // 8, sum(sizes) // 2))
        subject = QuotaSubject.ORGANIZATION
        rule = QuotaRule(
            uuid.uuid4(), subject, uuid.uuid4(), "", dimension, limit, window_minutes=minutes
        )
        # A reduced lease is never extended: no output is longer than the smallest one.
        fitting = [
            Recorded(each.at, each.sent, each.leased, min(each.output, 1), each.lasting)
            for each in requests
        ]
        replay = Replay(rule, since, SLICES, {(1, False): PRICES})

        for each in fitting:
            replay.admit(each.row)

        wanted = expected(fitting, dimension, minutes, limit, since)
        found = sum(each.refused_count for each in replay.days.values())
        assert (found, replay.first_refused_at) == (
            len(wanted),
            wanted[0] if wanted else None,
        ), (seed, limit)
        refused_count += found
        assert sum(each.request_count for each in replay.days.values()) == sum(
            each.at >= since for each in requests
        )
    assert refused_count > 100, "the limits of this test bite"


def test_a_request_that_gets_less_output_is_ended_early() -> None:
    """The second may lease 10 of its 16 tokens, and then asks for 6 more, which never fit."""
    replay = replayed(QuotaDimension.OUTPUT_TOKENS_PER_DAY, 26, output=16)

    assert counts(replay) == (3, 1, 1)


def test_a_request_that_fits_in_the_end_is_not_ended_early() -> None:
    """The second leases 10 tokens of 16, and uses 3."""
    replay = replayed(QuotaDimension.OUTPUT_TOKENS_PER_DAY, 26, output=3)

    assert counts(replay) == (3, 0, 0)


def replayed(dimension: QuotaDimension, limit: int, *, output: int) -> Replay:
    rule = QuotaRule(uuid.uuid4(), QuotaSubject.ORGANIZATION, uuid.uuid4(), "", dimension, limit)
    replay = Replay(rule, START, SLICES, {(1, False): PRICES})
    times = (START + timedelta(seconds=each) for each in (0, 1, 30))
    for at in times:
        replay.admit(Recorded(at, 4, 16, output, timedelta(seconds=10)).row)
    replay.pass_to(START + timedelta(hours=1))
    return replay


def counts(replay: Replay) -> tuple[int, int, int]:
    [day] = replay.days.values()
    return day.request_count, day.refused_count, day.shortened_count


def test_old_counters_are_forgotten() -> None:
    """A week of minutes keeps the counters of one window, not of all."""
    dimension = QuotaDimension.TOKENS_PER_WINDOW
    rule = QuotaRule(
        uuid.uuid4(),
        QuotaSubject.ORGANIZATION,
        uuid.uuid4(),
        "",
        dimension,
        10**9,
        window_minutes=5,
    )
    replay = Replay(rule, START, SLICES, {(1, False): PRICES})
    for minute in range(1000):
        at = START + timedelta(minutes=minute)
        replay.admit(Recorded(at, 1, 1, 1, timedelta(seconds=90)).row)

    assert len(replay._counters.rows) < 12
    assert len(replay._due) < 5


def test_an_extended_request_counts_in_the_minutes_of_its_extensions() -> None:
    """14 tokens of output were posted in the first minute, 26 in the third, and 5 were left."""
    later, ends_at = START + timedelta(minutes=2, seconds=30), START + timedelta(minutes=9)
    row = Recorded(START, 4, 48, 45, ends_at - START).row
    first_minute = int(START.timestamp()) // 60
    row.charged_at, row.posted_token_count = later, 4 + 40
    row.posted_minutes = [first_minute, 4 + 14]
    rule = QuotaRule(
        uuid.uuid4(),
        QuotaSubject.ORGANIZATION,
        uuid.uuid4(),
        "",
        QuotaDimension.TOKENS_PER_MINUTE,
        1000,
    )
    replay = Replay(rule, START, SLICES, {(1, False): PRICES})

    replay.admit(row)
    [first] = replay._counters.rows.values()
    held = first.held
    replay.pass_to(ends_at)

    assert held == 4 + 16, "the first slice"
    counted = {key[1]: (row.used, row.held) for key, row in replay._counters.rows.items()}
    assert counted[later.replace(second=0)] == (26 + 5, 0)
    assert first.used == 4 + 14
