"""Extensions in one round trip are exact; the slow path handles exceptions."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metering.core.errors import HoldEnded, InvariantViolated
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit, Admitted, Extend, Extended, HoldAnswer, Settle, Settled
from metering.quotas.quota_rules import Payer
from metering.quotas.quotas import QuotaExceeded
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.metering.test_fast_settlements import (
    Change,
    charged_to_one_more_quota,
    expired,
    extended,
    settled,
    weighed_anew,
)

LIMIT = 1_000_000


@pytest.fixture
def world(database_url: str) -> Iterator[HoldWorld]:
    """Set the clock shortly before a year's end, so that a minute, a day and a month end within."""
    with HoldWorld(database_url, now=datetime(2027, 12, 31, 23, 58, 30, tzinfo=UTC)) as world:
        yield world


def tenant(world: HoldWorld, name: str, limit: int = LIMIT) -> Payer:
    """Return a tenant with limits of every kind."""
    payer = world.tenant(name)
    key, project, organization = (
        QuotaSubject.API_KEY,
        QuotaSubject.PROJECT,
        QuotaSubject.ORGANIZATION,
    )
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, LIMIT, subject=key)
    world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, LIMIT, subject=project)
    world.quota(payer, QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, limit, subject=key)
    watching = world.quota(payer, QuotaDimension.TOKENS_PER_MINUTE, limit // 4, subject=project)
    weighted = world.quota(payer, QuotaDimension.TOKENS_PER_DAY, limit * 2, subject=project)
    raised = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, limit // 2, subject=organization)
    world.quota(payer, QuotaDimension.COST_PICOS_PER_MONTH, limit * 12, subject=organization)
    world.execute("UPDATE quotas SET enforced = false WHERE id = %s", watching)
    world.execute(
        "UPDATE quotas SET input_weight_milli = 1001, cached_input_weight_milli = 333,"
        " output_weight_milli = 1500 WHERE id = %s",
        weighted,
    )
    world.execute(
        "UPDATE quotas SET override_limit_value = limit_value * 3, override_until = %s,"
        " override_reason = 'load' WHERE id = %s",
        world.now + timedelta(seconds=90),
        raised,
    )
    return payer


def state(world: HoldWorld, payer: Payer) -> tuple[list[Any], list[Any]]:
    """Return all values of a tenant's holds and counters except ids."""
    columns = """input_token_count, cached_input_token_count, leased_token_count,
        delivered_token_count, posted_token_count, posted_cost_picos, posted_minutes, charged_at,
        expires_at, cardinality(quota_ids)"""
    return (
        world.rows(
            f"SELECT state, {columns} FROM holds WHERE project_id = %s ORDER BY id",
            payer.project_id,
        ),
        world.rows(
            "SELECT q.dimension, c.window_start, c.used, c.held FROM quota_counters c JOIN quotas q"
            " ON q.id = c.quota_id WHERE q.subject_id = ANY(%s) ORDER BY 1, 2",
            [*payer.subject_ids],
        ),
    )


def reported(answer: HoldAnswer | Exception) -> object:
    """Return the comparable part of an answer."""
    match answer:
        case Admitted() | Extended():
            return answer.leased_token_count
        case Settled():
            return answer.cost_picos, answer.delivered_token_count
        case QuotaExceeded():
            return str(answer)
    return type(answer)


class Twins:
    """Equal requests of two tenants: one extends from its cache, the other on the slow path."""

    def __init__(self, world: HoldWorld, holds: HoldConnection) -> None:
        self.world, self.holds = world, holds
        self.payers = tenant(world, "quick", 1200), tenant(world, "slow", 1200)
        self.live: dict[int, tuple[int, int]] = {}  # leased and delivered, by number

    @staticmethod
    def ids(number: int) -> tuple[uuid.UUID, uuid.UUID]:
        """Return the ids of both, in the order in which they were taken."""
        return uuid.UUID(int=number + 2**64), uuid.UUID(int=number + 2**65)

    async def do(
        self, number: int, make: Callable[[Payer, uuid.UUID], Admit | Extend | Settle]
    ) -> HoldAnswer | Exception:
        """Run one operation for each, and compare the results."""
        quick, slow = (
            make(payer, hold_id)
            for payer, hold_id in zip(self.payers, self.ids(number), strict=True)
        )
        [answer] = await self.holds.execute([quick])
        [expected] = await self.world.run(slow)
        assert reported(answer) == reported(expected)
        assert state(self.world, self.payers[0]) == state(self.world, self.payers[1])
        if isinstance(answer, Admitted | Extended):
            self.live[number] = (
                answer.leased_token_count,
                0 if isinstance(quick, Admit) else quick.delivered_token_count,
            )
        elif isinstance(answer, Settled):
            del self.live[number]
        return answer


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_any_extension_has_the_same_effect_as_on_the_full_path(
    world: HoldWorld, holds: HoldConnection, read: list[int], seed: int
) -> None:
    chance, twins = random.Random(seed), Twins(world, holds)
    read_counts: Counter[int] = Counter()  # of extensions, by both tenants
    refused_count = 0
    for number in range(60):
        if len(twins.live) < 3:
            leased = chance.randint(1, 60)
            await twins.do(
                number,
                lambda *who, number=number, leased=leased: admit(
                    who[0], hold_id=who[1], input_tokens=number + 1, slice_tokens=leased
                ),
            )
        if not twins.live:
            world.advance(61)
            continue
        extended, (leased, delivered) = chance.choice([*twins.live.items()])
        done, cached, wanted = (
            chance.randint(delivered, leased),
            chance.choice((0, 0, 1)),
            chance.choice((1, 20, 60, 200)),
        )
        read.clear()
        answer = await twins.do(extended, lambda *who: Extend(who[1], done, cached, wanted))  # noqa: B023
        read_counts[len(read)] += 1
        refused_count += isinstance(answer, QuotaExceeded)
        if isinstance(answer, QuotaExceeded) or chance.random() < 0.1:
            await twins.do(extended, lambda *who: settle(who[1], done, input_tokens=extended + 1))  # noqa: B023
        if chance.random() < 0.15:
            world.advance(chance.choice((1, 20, 61)))

    assert set(read_counts) == {1, 2}
    assert read_counts[1] >= 15, "most of it has taken the slow path"
    assert refused_count
    raised = world.rows("SELECT id FROM quotas WHERE override_until IS NOT NULL")
    check_invariants(world.url, over=[row[0] for row in raised])


@pytest.mark.parametrize(
    "change",
    [expired, settled, extended, charged_to_one_more_quota, weighed_anew],
    ids=lambda each: each.__name__,
)
async def test_a_hold_that_has_changed_meanwhile_is_extended_as_it_is(
    world: HoldWorld, holds: HoldConnection, read: list[int], change: Change
) -> None:
    payer = tenant(world, "acme")
    op, other = admit(payer), admit(payer)
    await holds.execute([op, other])
    await holds.execute([Extend(op.hold_id, 10, 0, 5), Extend(other.hold_id, 10, 0, 5)])
    # It would refuse the statement's change.
    world.execute("ALTER TABLE holds DISABLE TRIGGER holds_end_once")
    await change(world, op, payer)
    if change is expired:
        world.advance(-61)  # the minute is the same again: only the hold itself differs
    read.clear()

    [answer] = await holds.execute([Extend(op.hold_id, 20, 0, 5)])
    [again] = await holds.execute([Extend(other.hold_id, 20, 0, 5)])

    assert len(read) >= 1
    assert (
        isinstance(answer, HoldEnded)
        if change in (expired, settled)
        else isinstance(answer, Extended)
    ), answer
    assert again == Extended(30)
    assert not isinstance(answer, Extended) or answer == Extended(50 if change is extended else 30)
    world.execute("ALTER TABLE holds ENABLE TRIGGER holds_end_once")
    check_invariants(world.url)


async def test_extensions_of_one_batch_add_up_and_the_one_beyond_the_limit_gets_what_is_left(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, 200)
    ops = [admit(payer) for _ in range(4)]
    await holds.execute(ops)
    await holds.execute([Extend(op.hold_id, 0, 0, 1) for op in ops])
    read.clear()

    answers = await holds.execute([Extend(op.hold_id, 10, 0, 40) for op in ops])

    assert read == [2]
    assert answers[:2] == [Extended(61), Extended(61)]
    assert answers[2] == Extended(21 + 200 - 2 * 61 - 2 * 21)
    assert isinstance(answers[3], QuotaExceeded)
    assert world.counters(quota_id) == [(30, 170)]
    check_invariants(world.url)


async def test_room_taken_by_another_request_is_not_given_twice(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer = world.tenant()
    quota_id = world.quota(payer, QuotaDimension.OUTPUT_TOKENS_PER_MINUTE, 200)
    op = admit(payer)
    await holds.execute([op])
    await holds.execute([Extend(op.hold_id, 0, 0, 5)])
    await world.run(admit(payer, slice_tokens=150))
    read.clear()

    [answer] = await holds.execute([Extend(op.hold_id, 10, 0, 100)])

    assert read == [1]
    assert answer == Extended(50)
    assert world.counters(quota_id) == [(10, 190)]
    check_invariants(world.url)


async def test_an_end_and_extensions_of_one_batch_are_each_done_once_in_their_order(
    world: HoldWorld, holds: HoldConnection, read: list[int]
) -> None:
    payer = tenant(world, "acme")
    ops = [admit(payer) for _ in range(3)]
    await holds.execute(ops)
    await holds.execute([Extend(op.hold_id, 5, 0, 5) for op in ops])
    read.clear()
    first, second, third = (op.hold_id for op in ops)

    answers = await holds.execute(
        [
            Extend(first, 9, 0, 5),
            settle(second, 6),
            Extend(second, 6, 0, 5),
            Extend(first, 12, 0, 5),
            Extend(third, 25, 0, 7),
        ]
    )

    assert [type(answer) for answer in answers] == [
        Extended,
        Settled,
        HoldEnded,
        Extended,
        Extended,
    ]
    assert [answer.leased_token_count for answer in answers if isinstance(answer, Extended)] == [
        30,
        35,
        32,
    ]
    assert read == [2]
    check_invariants(world.url)


@pytest.mark.parametrize("wanted", [0, -1])
async def test_a_lease_does_not_grow_by_nothing(
    world: HoldWorld, holds: HoldConnection, wanted: int
) -> None:
    """An unchanged lease would hide the change of the hold."""
    payer = tenant(world, "acme")
    op = admit(payer)
    await holds.execute([op])
    await holds.execute([Extend(op.hold_id, 5, 0, 5)])
    before = world.contents()

    [answer] = await holds.execute([Extend(op.hold_id, 9, 0, wanted)])

    assert isinstance(answer, InvariantViolated)
    assert world.contents() == before
