"""Retention beside running requests: counters, prepaid credit and receipt chains stay exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from metering.core.models import QuotaDimension
from metering.holds.operations import Admitted, Expire, Extend, Settled, Void
from metering.invoicing.closing import close_month
from metering.ledger.ledger import month_end, month_text
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import credit_balance, set_prepaid
from metering.proof.check import Moment
from metering.quotas.quota_rules import Payer
from metering.receipts.months import receipt_month
from metering.receipts.signing import Signer
from metering.retention import RetentionSettings, apply_retention
from metering.store.db import Sessions
from tests.metering.closing_world import ISSUER, MovableClock, draw_here
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import unseen
from tests.metering.usage import grant, new_limit

MONTHS = [date(2025, month, 1) for month in (1, 2)]
SETTINGS = RetentionSettings(usage_months=3)
LATER = datetime(2025, 9, 15, 12, tzinfo=UTC)


class Past:
    """Closed months of a prepaid and of another organization, written by real settlements."""

    def __init__(self, world: HoldWorld, sessions: Sessions) -> None:
        self.world = world
        self.sessions = sessions
        self.random = random.Random(35)
        self.signer = Signer(Ed25519PrivateKey.generate())
        self.payers: list[Payer] = []

    async def live(self) -> None:
        """Live through the months, and close them."""
        world = self.world
        self.payers = [world.tenant(), world.tenant("globex")]
        async with self.sessions.begin() as session:
            await set_prepaid(session, organization="acme", prepaid=True, actor="test")
            await grant(session, 10**9, last_month=date(2026, 12, 1))
            await new_limit(session, "globex", QuotaDimension.TOKENS_PER_MONTH, 10**9)
        for month in MONTHS:
            for day in (3, 17):
                world.set_time(datetime(month.year, month.month, day, 12, tzinfo=UTC))
                for payer in self.payers:
                    await self.use(payer)
            await rate_all_pending(self.sessions)
            world.set_time(month_end(month) + timedelta(hours=2))
            for name in ("acme", "globex"):
                await close_month(
                    self.sessions,
                    organization=name,
                    month=month_text(month),
                    actor="test",
                    clock=MovableClock(world.now),
                    issuer=ISSUER,
                    draw=draw_here,
                )
        world.set_time(LATER)

    async def use(self, payer: Payer) -> None:
        """Settle, void and expire requests; one that expired is reported late."""
        world = self.world
        user = self.random.choice(["", "ann"])
        ops = [admit(payer, end_user=user, labels={"team": "x"}) for _ in range(6)]
        await world.run(*ops)
        first, second, third, fourth, *_ = (op.hold_id for op in ops)
        signer = self.random.choice([None, self.signer])
        await world.run(
            settle(first, 5, cached_tokens=3, reasoning_tokens=2),
            Void(second),
            Extend(third, 3, 0, 10),
            Extend(fourth, 4, 0, 10),
            signer=signer,
        )
        world.advance(130)
        await world.run(*(Expire(op.hold_id) for op in ops[2:]), signer=signer)
        await world.run(settle(fourth, 9), signer=signer)

    async def credit(self) -> tuple[int, int]:
        """Return the used and the available credit."""
        used = self.world.one(
            "SELECT c.used FROM quota_counters c JOIN prepaid_organizations USING (quota_id)"
        )
        async with self.sessions() as session:
            return used, (await credit_balance(session, organization="acme")).available_picos

    async def roots(self) -> list[tuple[bytes, int]]:
        """Return the root and number of the receipts of each month."""
        async with self.sessions() as session:
            found = [
                await receipt_month(session, payer.organization_id, month)
                for payer in self.payers
                for month in MONTHS
            ]
        return [(each.root, each.receipt_count) for each in found]


@pytest.fixture
async def past(database_url: str, sessions: Sessions) -> AsyncIterator[Past]:
    """Yield closed months, at a time at which they are due."""
    with HoldWorld(database_url, now=datetime(2025, 1, 2, tzinfo=UTC)) as world:
        made = Past(world, sessions)
        await made.live()
        check_invariants(world.url)
        yield made


async def test_credit_and_chains_go_on_where_they_were(past: Past, sessions: Sessions) -> None:
    world = past.world
    credit, roots = await past.credit(), await past.roots()
    assert roots[0][1] > 0

    removal = await apply_retention(sessions, SETTINGS, actor="test")

    assert set(map(month_text, MONTHS)) <= set(removal.months)
    assert world.one("SELECT count(*) FROM holds") == 0
    assert (await past.credit(), await past.roots()) == (credit, roots)
    check_invariants(world.url)

    # A recount of credit counts removed usage too: the same counter is written again.
    async with sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=False, actor="test")
        await set_prepaid(session, organization="acme", prepaid=True, actor="test")
    assert await past.credit() == credit
    check_invariants(world.url)
    for payer in past.payers:
        await past.use(payer)
    check_invariants(world.url)
    await rate_all_pending(sessions)
    check_invariants(world.url)


@pytest.mark.parametrize("steps", [1, 33, 35])
async def test_credit_is_recounted_in_the_middle_of_a_removal(
    past: Past, sessions: Sessions, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    credit = await past.credit()
    left = iter([*[False] * steps, *[True] * 9])
    monkeypatch.setattr("metering.retention._is_over", lambda _: next(left))
    monkeypatch.setattr("metering.retention.HOLD_PAGES", 1)

    await apply_retention(sessions, SETTINGS, actor="test")
    monkeypatch.undo()
    check_invariants(past.world.url)
    async with sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=False, actor="test")
        await set_prepaid(session, organization="acme", prepaid=True, actor="test")
    assert await past.credit() == credit
    check_invariants(past.world.url)
    await apply_retention(sessions, SETTINGS, actor="test")

    assert await past.credit() == credit
    check_invariants(past.world.url)


async def test_requests_are_served_while_a_month_is_removed(past: Past, sessions: Sessions) -> None:
    world, served = past.world, 0
    removing = asyncio.create_task(apply_retention(sessions, SETTINGS, actor="test"))
    while not removing.done():
        for payer in past.payers:
            op = admit(payer)
            [admitted] = await world.run(op)
            [settled] = await world.run(settle(op.hold_id, 3), signer=past.signer)
            assert isinstance(admitted, Admitted)
            assert isinstance(settled, Settled)
            served += 1

    assert removing.result().months
    assert served > 0
    assert world.one("SELECT count(*) FROM usage_events") == served
    check_invariants(world.url)


FAULTS = (
    ("UPDATE usage_days SET input_token_count = input_token_count + 1", "day-sums-equal-ledger"),
    ("UPDATE usage_days SET billing_month = '2025-05-01'", "day-sums-equal-ledger"),
    ("DELETE FROM usage_days WHERE part = 0", "usage-equals-ledger"),
    ("UPDATE retired_receipts SET receipt_count = receipt_count + 1", "receipt-chains"),
    ("UPDATE retired_receipts SET hashes = hashes || '\\x00'", "receipt-chains"),
    ("DELETE FROM retired_receipts WHERE month = '2025-01-01'", "receipt-chains"),
    ("DELETE FROM retired_receipts", "chain-heads"),
    ("UPDATE quota_checkpoints SET used = used + 1", "counters-equal-holds"),
)


async def test_faults_of_what_remains_are_found(past: Past, sessions: Sessions) -> None:
    await apply_retention(sessions, SETTINGS, actor="test")

    assert unseen(past.world.url, FAULTS, Moment.ALWAYS) == []
