"""Admission with real holds: permit and hold together, growing leases, one end per exit."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.core.errors import Draining, Overloaded
from api.core.settings import Settings
from api.generation.endings import UsageSoFar
from api.generation.request.admission import Admission, Capacity, HoldHandle, answered
from metering.core.errors import HoldEnded, RequestInFlight
from metering.core.models import Outcome, QuotaDimension
from metering.holds.journal import Delivered, UsageJournal
from metering.holds.operations import Admit, new_hold_id
from metering.holds.recovery import sweep_expired_holds
from metering.quotas.quota_rules import Payer
from metering.quotas.quotas import QuotaExceeded
from tests.metering.hold_world import AwaitedStore, HoldWorld, until_idle
from tests.metering.invariants import check_invariants

SETTINGS = Settings.of(lease_slice_tokens=20, lease_min_tokens=5, lease_margin_tokens=4)


@dataclass(slots=True)
class Rig:
    admission: Admission
    capacity: Capacity
    holds: AwaitedStore
    journal: UsageJournal

    @asynccontextmanager
    async def admitted(self, op: Admit, max_output_tokens: int = 1000) -> AsyncIterator[HoldHandle]:
        """Run the block under a hold; the block sets `outcome`."""
        lease, error = await self.admission.admit(op, UsageSoFar(), max_output_tokens), None
        try:
            yield lease
        except BaseException as raised:
            error = raised
            raise
        finally:
            await answered(lambda done: lease.end(lease.outcome, error, done))

    async def generate(self, lease: HoldHandle, token_count: int, *, per_step: int = 1) -> None:
        """Deliver tokens as a stream does: cover, journal, count."""
        usage = lease.usage
        usage.input_token_count, usage.cached_input_token_count = 10, 4
        for _ in range(token_count // per_step):
            await lease.cover(usage.delivered_token_count + per_step)
            usage.generated_token_count += per_step
            delivered = usage.delivered_token_count + per_step
            self.journal.record(
                [Delivered(lease.admitted.hold_id, 10, 4, usage.generated_token_count, delivered)]
            )
            self.journal.took(lease.admitted.hold_id, delivered)
            usage.journalled_token_count = usage.taken_token_count = delivered
            usage.delivered_token_count = delivered


@asynccontextmanager
async def running(
    world: HoldWorld, directory: Path, *, settings: Settings = SETTINGS, permits: int = 10
) -> AsyncIterator[Rig]:
    journal = UsageJournal(directory, uuid.uuid4())
    holds = AwaitedStore(world.url, journal.process_id)
    capacity = Capacity(permits)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(holds.run())
        yield Rig(Admission(settings, capacity, holds, journal, tasks), capacity, holds, journal)
        running.cancel()
    journal.close()


def request(payer: Payer) -> Admit:
    first, least = SETTINGS.leases.first_slice(1000)
    return Admit(new_hold_id(), payer, uuid.uuid4(), bytes(32), "demo", 10, first, least)


async def test_a_lease_grows_with_the_output(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
    async with running(world, tmp_path) as rig:
        async with rig.admitted(request(payer)) as lease:
            await rig.generate(lease, 90)
            lease.outcome = Outcome.STOP

        assert lease.settled is not None
        assert lease.settled.cost_picos == 6 * 3 + 4 * 1 + 90 * 7
        assert rig.holds.statistics().group_commit.operation_count <= 2 + 90 // 20 + 2, (
            "one extension per slice, not per token"
        )
        assert rig.capacity.taken_count == 0
    assert world.counters(quota) == [(100, 0)]
    assert world.events() == [(0, 10, 90, "stop")]
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
    check_invariants(world.url, all_ended=True)


async def test_the_lease_is_extended_before_it_is_needed(world: HoldWorld, tmp_path: Path) -> None:
    async with running(world, tmp_path) as rig, rig.admitted(request(world.tenant())) as lease:
        await rig.generate(lease, 16)
        while world.holds()[0][1] == 20:  # noqa: ASYNC110  # the background task writes it
            await asyncio.sleep(0)
        lease.outcome = Outcome.STOP
    assert world.events() == [(0, 10, 16, "stop")]


async def test_no_more_is_leased_than_the_request_allows(world: HoldWorld, tmp_path: Path) -> None:
    async with running(world, tmp_path) as rig:
        async with rig.admitted(request(world.tenant()), 33) as lease:
            await rig.generate(lease, 33)
            lease.outcome = Outcome.LENGTH

        assert world.holds() == [("settled", 33, 33)]


async def test_an_exhausted_quota_ends_the_stream(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 57)
    async with running(world, tmp_path) as rig:
        async with rig.admitted(request(payer)) as lease:
            with pytest.raises(QuotaExceeded):
                await rig.generate(lease, 100)
            lease.outcome = Outcome.QUOTA_EXHAUSTED

        assert lease.settled is not None
        assert lease.settled.delivered_token_count == 47
    assert world.counters(quota) == [(57, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_step_is_covered_whole_or_refused(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 60)
    async with running(world, tmp_path) as rig, rig.admitted(request(payer)) as lease:
        await lease.cover(45)
        with pytest.raises(QuotaExceeded):
            await lease.cover(51)
        await lease.cover(50)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the engine broke"), asyncio.CancelledError()],
    ids=["error", "cancellation"],
)
@pytest.mark.parametrize("delivered", [0, 1, 19, 25])
async def test_every_exit_ends_the_hold_with_exactly_what_was_delivered(
    world: HoldWorld, tmp_path: Path, error: BaseException, delivered: int
) -> None:
    """LiteLLM #14457: a leaving client lost usage; otari#128: an early failure leaked a hold."""
    payer = world.tenant()
    quotas = [world.quota(payer, dimension, 10_000) for dimension in QuotaDimension]
    async with running(world, tmp_path) as rig:

        async def broken() -> None:
            async with rig.admitted(request(payer)) as lease:
                await rig.generate(lease, delivered)
                raise error

        with pytest.raises(type(error)):
            await broken()

        assert rig.capacity.taken_count == 0
        assert rig.holds.statistics().live_hold_count == 0
    assert world.events() == ([(0, 10, delivered, "failed")] if delivered else [])
    assert all(held == 0 for quota in quotas for _, held in world.counters(quota))
    check_invariants(world.url, all_ended=True)


async def test_a_cancelled_request_pays_its_prefill(world: HoldWorld, tmp_path: Path) -> None:
    async with running(world, tmp_path) as rig:
        for input_tokens in (10, 0):
            async with rig.admitted(request(world.tenant(f"t{input_tokens}"))) as lease:
                lease.usage.input_token_count = input_tokens
                lease.outcome = Outcome.CANCELLED

    assert world.events() == [(0, 10, 0, "cancelled"), (0, 0, 0, "cancelled")]
    assert world.hold_count("settled") == 2


async def test_a_failure_before_delivery_bills_nothing(world: HoldWorld, tmp_path: Path) -> None:
    """A slow client may have many pending tokens and none delivered when the engine fails."""
    async with running(world, tmp_path) as rig:
        async with rig.admitted(request(world.tenant())) as lease:
            lease.usage.input_token_count = 10
            await lease.cover(35)

        assert lease.settled is None
        assert rig.holds.statistics().live_hold_count == 0
    assert world.events() == []
    check_invariants(world.url, all_ended=True)


async def test_overload_is_refused_without_the_database(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    async with running(world, tmp_path, permits=1) as rig:
        async with rig.admitted(request(payer)):
            before = rig.holds.statistics().group_commit.operation_count
            with pytest.raises(Overloaded):
                async with rig.admitted(request(payer)):
                    pytest.fail("two permits of one")
            assert rig.holds.statistics().group_commit.operation_count == before
            rig.capacity.drain()
        await rig.capacity.idle()

        with pytest.raises(Draining):
            async with rig.admitted(request(payer)):
                pytest.fail("admitted while draining")
        assert rig.capacity.taken_count == 0


async def test_a_refused_request_returns_its_permit(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 1)
    requested = request(payer)
    async with running(world, tmp_path) as rig, rig.admitted(requested):
        before = world.contents()
        for again, error in ((request(payer), QuotaExceeded), (requested, RequestInFlight)):
            with pytest.raises(error):
                async with rig.admitted(again):
                    pytest.fail("admitted")

        assert world.contents() == before
        assert rig.capacity.taken_count == 1


@pytest.mark.parametrize("ticks", range(0, 24, 2))
async def test_a_cancel_leaves_no_hold(world: HoldWorld, tmp_path: Path, ticks: int) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 10)

    async def caller(rig: Rig) -> None:
        async with rig.admitted(request(payer)):
            await asyncio.Event().wait()

    async with running(world, tmp_path) as rig:
        task = asyncio.ensure_future(caller(rig))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert rig.capacity.taken_count == 0
        await until_idle(rig.holds, payer)

    assert all(counter == (0, 0) for counter in world.counters(quota))
    check_invariants(world.url, all_ended=True)


async def test_a_process_paused_past_expiry_stops(world: HoldWorld, tmp_path: Path) -> None:
    payer = world.tenant()
    quota = world.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 1_000)
    settings = SETTINGS.having(lease_margin_tokens=0)
    async with running(world, tmp_path, settings=settings) as rig:
        async with rig.admitted(request(payer)) as lease:
            await rig.generate(lease, 18)
            world.advance(61)
            await sweep_expired_holds(world.url)
            with pytest.raises(HoldEnded):
                await rig.generate(lease, 10)
            lease.outcome = Outcome.FAILED

        assert lease.settled is not None
        assert lease.settled.delivered_token_count == 20
    assert world.events() == [(0, 10, 20, "failed")]
    assert world.counters(quota) == [(30, 0)]
    check_invariants(world.url, all_ended=True)
