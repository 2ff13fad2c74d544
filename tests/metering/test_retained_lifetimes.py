"""Lifetime limits of every subject count requests whose details were removed."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from metering.core.errors import NotFound
from metering.core.models import Quota, QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.holds.operations import Expire, Extend, HoldOperation, Settled, Void
from metering.invoicing.closing import close_month
from metering.ledger.ledger import month_end, month_text
from metering.ledger.rating import rate_all_pending
from metering.quotas.erasure import Erasure
from metering.quotas.quota_admin import delete_past_counters, set_quota
from metering.quotas.quota_recount import recount
from metering.quotas.quota_rules import Payer
from metering.retention import RetentionSettings, apply_retention
from metering.store.db import Sessions
from metering.tenants.admin_requests import take_changes_lock
from metering.tenants.usage_subjects import archive_all_idle
from tests.metering.closing_world import ISSUER, MovableClock, draw_here
from tests.metering.hold_world import MODEL, HoldWorld, admit, settle
from tests.metering.invariants import check_invariants

MONTHS = [date(2025, month, 1) for month in (1, 2)]
SETTINGS = RetentionSettings(usage_months=3)
LATER = datetime(2025, 9, 15, 12, tzinfo=UTC)
MEASURES = ("requests", "tokens", "input_tokens", "output_tokens", "cost_picos")
INPUT, CACHED, OUTPUT, REASONING = 3, 1, 7, 11  # prices
SENT, LEASED, EXTENDED = 10, 20, 30  # tokens of a request


@dataclass(eq=False)
class Use:
    """A request with its input, cached input, output and reasoning tokens."""

    payer: Payer
    end_user: str
    labels: dict[str, str]
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    tokens: tuple[int, int, int, int] | None = None  # None: voided
    is_leased: bool = False  # expired and not reported
    known: int = 0  # tokens delivered when it expired

    def amount(self, measure: str, weights: Sequence[int]) -> int:
        """Return what it counts in a limit."""
        if self.tokens is None:
            return 0
        if measure == "requests":
            return 1
        sent, cached, output, reasoning = self.tokens
        if measure == "cost_picos":
            dearest = REASONING if self.is_leased else OUTPUT
            return (
                (sent - cached) * INPUT
                + cached * CACHED
                + (output - reasoning) * dearest
                + reasoning * REASONING
            )
        w_input, w_cached, w_output = weights
        total = 0
        if measure != "output_tokens":
            total += (sent - cached) * w_input + cached * w_cached
        if measure != "input_tokens":
            total += output * w_output
        return -(-total // 1000)


class Lifetime:
    """Two closed months with every kind of end, and limits of a lifetime on every subject."""

    def __init__(self, world: HoldWorld, sessions: Sessions, seed: int) -> None:
        self.world, self.sessions = world, sessions
        self.random = random.Random(seed)
        world.set_price(INPUT, CACHED, OUTPUT, reasoning_picos=REASONING)
        first = world.tenant()
        self.payers = [first, replace(first, api_key_id=world.key(first.project_id))]
        world.execute(
            "UPDATE api_keys SET \"group\" = 'free' WHERE id = %s", self.payers[1].api_key_id
        )
        self.uses: list[Use] = []
        self.since: dict[uuid.UUID, int] = {}  # number of the first use that a limit counts

    async def limit(
        self, measure: str, subject: QuotaSubject, weights: Sequence[int] = (), **key: Any
    ) -> uuid.UUID:
        """Set a limit on the organization, project or first key; weights: random if empty."""
        payer = self.payers[0]
        weights = weights or [
            self.random.choice([250, 1000, 1500])
            if measure in ("tokens", f"{kind}_tokens")
            else 1000
            for kind in ("input", "input", "output")
        ]
        subject_id = {
            QuotaSubject.ORGANIZATION: payer.organization_id,
            QuotaSubject.PROJECT: payer.project_id,
            QuotaSubject.API_KEY: payer.api_key_id,
        }[subject]
        async with self.sessions.begin() as session:
            state = await set_quota(
                session,
                subject=subject,
                subject_ref=str(subject_id),
                key=QuotaKey(QuotaDimension(f"{measure}_per_lifetime"), **key),
                terms=QuotaTerms(10**9, True, weights[0], weights[1], weights[2]),
                actor="test",
            )
        return state.quota_id

    async def set_limits(self) -> None:
        """Set limits of random measures on every kind of subject."""
        await self.limit("tokens", QuotaSubject.ORGANIZATION, weights=[1000] * 3)
        organization, project = QuotaSubject.ORGANIZATION, QuotaSubject.PROJECT
        subjects: list[tuple[QuotaSubject, dict[str, Any]]] = [
            (organization, {"for_each": "end_user"}),
            (organization, {"end_user": "ann"}),
            (organization, {"for_each": "label:team"}),
            (organization, {"for_each": "key:free"}),
            (project, {}),
            (project, {"label": "team=x"}),
            (project, {"for_each": "end_user"}),
            (QuotaSubject.API_KEY, {}),
        ]
        for subject, key in subjects:
            for measure in self.random.sample(MEASURES, 2):
                await self.limit(measure, subject, **key)

    async def use(self) -> None:
        """Run requests that end in every way; some that expired are reported late."""
        world, choose = self.world, self.random.choice
        uses = [
            Use(
                choose(self.payers), choose(["", "ann", "bob"]), {"team": choose(["x", "y", "bob"])}
            )
            for _ in range(12)
        ]
        await world.run(
            *(
                admit(each.payer, end_user=each.end_user, labels=each.labels, hold_id=each.id)
                for each in uses
            )
        )
        ends: list[HoldOperation] = []
        expiring: list[Use] = []
        for number, each in enumerate(uses):
            match number % 4:
                case 0:
                    delivered = self.random.randint(0, LEASED)
                    reasoning = self.random.randint(0, delivered)
                    cached = self.random.randint(0, SENT)
                    end = settle(
                        each.id, delivered, cached_tokens=cached, reasoning_tokens=reasoning
                    )
                    each.tokens = SENT, cached, delivered, reasoning
                    ends.append(end)
                case 1 if number == 1:
                    ends.append(Void(each.id))
                case 2:
                    # Cached tokens, delivered ones, and those that are known to be thinking.
                    each.known = self.random.randint(1, 9)
                    cached, thought = self.random.randint(0, SENT), self.random.randint(0, 1)
                    ends.append(Extend(each.id, each.known, cached, EXTENDED - LEASED, thought))
                    each.tokens, each.is_leased = (SENT, cached, EXTENDED, thought), True
                    expiring.append(each)
                case _:
                    each.tokens, each.is_leased = (SENT, 0, LEASED, 0), True
                    expiring.append(each)
        await world.run(*ends)
        world.advance(130)
        await world.run(*(Expire(each.id) for each in expiring))
        self.uses += uses
        for each in expiring[::3]:
            assert await self.report(each)

    async def report(self, use: Use) -> bool:
        """Report what an expired request delivered; False if it was removed."""
        delivered = use.known + self.random.randint(0, 9)
        [answer] = await self.world.run(
            settle(use.id, delivered, cached_tokens=use.tokens[1] if use.tokens else 0)
        )
        if isinstance(answer, NotFound):
            return False
        assert isinstance(answer, Settled)
        sums = answer.input_token_count, answer.cached_input_token_count
        use.tokens = *sums, answer.billed_token_count, answer.billed_reasoning_token_count
        use.is_leased = False
        return True

    async def live(self) -> None:
        """Live through the months and close them. Some limits are set in their middle."""
        world = self.world
        for month in MONTHS:
            for day in (3, 17):
                world.set_time(datetime(month.year, month.month, day, 12, tzinfo=UTC))
                await self.use()
                if day == 3 and month == MONTHS[0]:
                    await self.set_limits()
            await rate_all_pending(self.sessions)
            world.set_time(month_end(month) + timedelta(hours=2))
            await close_month(
                self.sessions,
                organization="acme",
                month=month_text(month),
                actor="test",
                clock=MovableClock(world.now),
                issuer=ISSUER,
                draw=draw_here,
            )
        world.set_time(LATER)

    def check(self) -> None:
        """Raises: AssertionError unless each counter is the sum over the requests it counts."""
        counted = {}
        expected = {}
        for (
            quota_id,
            subject,
            subject_id,
            key,
            name,
            within_id,
            dimension,
            *weights,
            used,
            held,
        ) in self.world.rows("""
            SELECT q.id, q.subject, q.subject_id, u.label_key, u.name, q.within_id, q.dimension,
                   q.input_weight_milli, q.cached_input_weight_milli, q.output_weight_milli,
                   coalesce(c.used, 0), coalesce(c.held, 0)
            FROM quota_terms q
            LEFT JOIN quota_counters c ON c.quota_id = q.id
            LEFT JOIN usage_subjects u ON u.id = q.subject_id
            WHERE q.deleted_at IS NULL AND q.for_each = ''
        """):
            given = (key, name), weights
            of_limit = [
                each
                for each in self.uses[self.since.get(quota_id, 0) :]
                if (
                    each.end_user == name
                    if subject == "end_user"
                    else each.labels.get(key) == name
                    if subject == "label"
                    else subject_id
                    in (each.payer.organization_id, each.payer.project_id, each.payer.api_key_id)
                )
            ]
            measure = dimension.removesuffix("_per_lifetime")
            label = f"{dimension} of {subject} {given} within {within_id}"
            expected[quota_id, label] = sum(each.amount(measure, weights) for each in of_limit), 0
            counted[quota_id, label] = used, held
        assert len(counted) > 15
        assert counted == expected

    async def recount_all(self) -> None:
        """Count all limits again."""
        async with self.sessions.begin() as session:
            query = select(Quota).where(
                Quota.deleted_at.is_(None),
                Quota.selector_id.is_(None) | (Quota.subject == QuotaSubject.API_KEY),
                ~Quota.for_each.startswith("key:"),
            )
            found = (await session.scalars(query)).all()
            organization_id = self.payers[0].organization_id
            await recount(session, [(quota, organization_id) for quota in found])

    async def erase(self, name: str) -> None:
        """Erase a name of an end user and of a label value: their limits end."""
        erasure = Erasure(self.payers[0].organization_id, name, "test")
        async with self.sessions.begin() as session:
            await take_changes_lock(session, alone=True)
            erased = await erasure.erase_names(session)
        await erasure.erase_labels(self.sessions, erased)
        assert erased.limit_count > 2
        for each in self.uses:
            each.end_user = each.end_user.replace(name, "(erased)")
            each.labels = {key: value for key, value in each.labels.items() if value != name}

    def verify(self) -> None:
        """Check the counters, and all that `weir fsck` checks."""
        self.check()
        check_invariants(self.world.url)


@pytest.fixture(params=[1, 2])
async def lifetime(
    request: pytest.FixtureRequest, database_url: str, sessions: Sessions
) -> AsyncIterator[Lifetime]:
    """Yield closed months, at a time at which they are due."""
    with HoldWorld(database_url, now=datetime(2025, 1, 2, tzinfo=UTC)) as world:
        made = Lifetime(world, sessions, request.param)
        await made.live()
        made.verify()
        yield made


async def test_a_lifetime_counts_requests_that_were_removed(
    lifetime: Lifetime, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = lifetime.world
    monkeypatch.setattr("metering.retention.HOLD_PAGES", 1)
    leased = [each for each in lifetime.uses if each.is_leased]
    lifetime.random.shuffle(leased)
    kept_counts = [len(lifetime.uses)]
    is_done = False
    while not is_done:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(
                "metering.retention._is_over",
                lambda _: world.one("SELECT count(*) FROM holds") < kept_counts[-1],
            )
            is_done = (await apply_retention(sessions, SETTINGS, actor="test")).is_done
        kept_counts.append(world.one("SELECT count(*) FROM holds"))
        late = leased.pop()
        is_kept = world.one("SELECT count(*) FROM holds WHERE id = %s", late.id) == 1
        assert await lifetime.report(late) is is_kept
        if len(kept_counts) == 3:
            await lifetime.erase("bob")
        lifetime.check()
        await lifetime.recount_all()
        lifetime.verify()
    assert len(set(kept_counts)) > 4
    assert kept_counts[-1] == 0
    assert not await lifetime.report(leased.pop())

    # Neither idle end users nor old counters are deleted with it.
    assert await archive_all_idle(sessions) > 0
    async with sessions.begin() as session:
        await delete_past_counters(session)
    lifetime.verify()

    # A limit that is set now does not count them; one with new weights does, with the previous.
    removed = lifetime.uses.copy()
    quota_id = await lifetime.limit("tokens", QuotaSubject.API_KEY, model=MODEL)
    lifetime.since[quota_id] = len(removed)
    await lifetime.use()
    lifetime.verify()
    await lifetime.recount_all()
    lifetime.verify()
    quota_id = await lifetime.limit("tokens", QuotaSubject.ORGANIZATION, weights=[125, 125, 125])
    [(used, _)] = world.counters(quota_id)
    assert used == sum(
        each.amount("tokens", [1000] * 3 if each in removed else [125] * 3)
        for each in lifetime.uses
    )
    check_invariants(world.url)
