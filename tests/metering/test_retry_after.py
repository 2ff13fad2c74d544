"""95 % of clients that wait the exact retry-after are admitted."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest

from common.retry_after import (
    DOUBTED_RESERVATIONS_MAX,
    KEY_RESERVATIONS_MAX,
    MARGIN,
    QUOTA_RESERVATIONS_MAX,
    RETRY_S_MIN,
    Reservations,
)
from metering.core.models import QuotaDimension, QuotaSubject
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admitted, Extend
from metering.pricing.prices import TokenPrices
from metering.quotas import quotas, refusals
from metering.quotas.forecast import (
    DURATION_UNKNOWN_S,
    Forecast,
    History,
    RunningRequest,
    reserve,
)
from metering.quotas.quota_rules import Charge, CounterKey, QuotaRule, QuotaState
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.quotas.refusals import REFRESH_S, Refusals, Refused
from tests.metering.hold_world import NOON, HoldWorld, admit, of_type, settle
from tests.metering.invariants import check_invariants

PRICES = TokenPrices(1, "USD", 3, 1, 7)
SENT, SLICE, LEAST = 10, 128, 16
ORGANIZATION, PROJECT, KEY = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
CONCURRENT, PER_MINUTE = QuotaDimension.CONCURRENT_REQUESTS, QuotaDimension.REQUESTS_PER_MINUTE
DAY, MINUTE = QuotaDimension.TOKENS_PER_DAY, QuotaDimension.TOKENS_PER_MINUTE
# Limits, processes, clients, and seconds in which they arrive.
CASES: dict[str, tuple[dict[QuotaDimension, int], int, int, float]] = {
    "places": ({CONCURRENT: 10}, 1, 300, 1.0),
    "places, three processes": ({CONCURRENT: 30}, 3, 300, 1.0),
    "one place": ({CONCURRENT: 1}, 1, 30, 1.0),
    "requests a minute": ({PER_MINUTE: 60}, 1, 400, 5.0),
    "requests a minute, three processes": ({PER_MINUTE: 90}, 3, 400, 5.0),
    "tokens a minute": ({MINUTE: 5_000}, 1, 300, 5.0),
    "output tokens a minute": ({QuotaDimension.OUTPUT_TOKENS_PER_MINUTE: 5_000}, 2, 300, 5.0),
    "tokens of a day, held by what runs": ({DAY: 20_000}, 1, 200, 1.0),
    "money of a day, held by what runs": (
        {QuotaDimension.COST_PICOS_PER_DAY: 140_000},
        1,
        200,
        1.0,
    ),
    "places and tokens": ({CONCURRENT: 20, MINUTE: 6_000}, 1, 300, 1.0),
    "everything": ({CONCURRENT: 20, PER_MINUTE: 100, MINUTE: 8_000}, 2, 300, 1.0),
}
NEWCOMERS: dict[str, tuple[dict[QuotaDimension, int], int, int, float]] = {
    "places and tokens": ({CONCURRENT: 20, MINUTE: 6_000}, 1, 300, 5.0),
    "everything": ({CONCURRENT: 20, PER_MINUTE: 100, MINUTE: 8_000}, 2, 300, 20.0),
}


@dataclass(slots=True)
class Client:
    """Client with its request and its number of attempts."""

    process: int
    duration_s: float
    output: int
    ask_count: int = 0
    request: tuple[uuid.UUID, uuid.UUID] = field(default_factory=lambda: (PROJECT, uuid.uuid4()))


@dataclass(slots=True)
class Simulation:
    """Processes with shared counters, and clients that wait each retry-after."""

    rules: Sequence[QuotaRule]
    process_count: int
    chance: random.Random
    now: datetime = NOON + timedelta(seconds=30)
    rows: defaultdict[CounterKey, Counter] = field(
        default_factory=lambda: defaultdict(lambda: Counter(0, 0))
    )
    running: dict[int, tuple[Charge, int]] = field(default_factory=dict)
    ended: list[tuple[float, int]] = field(default_factory=list)
    polled_at: dict[int, datetime] = field(default_factory=dict)
    returned: list[bool] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    def play(self, arrivals: Sequence[tuple[float, Client]]) -> float:
        """Let the clients arrive; return the share of first returns that were admitted."""
        refusals = [Refusals() for _ in range(self.process_count)]
        begin = self.now
        events: list[tuple[float, int, Client, Charge | None]] = []
        for number, (at_s, client) in enumerate(arrivals):
            heapq.heappush(events, (at_s, number, client, None))
        number = len(arrivals)
        while events:
            at_s, _, client, charge = heapq.heappop(events)
            self.now = begin + timedelta(seconds=at_s)
            counters = Counters(self.now, self.rows)
            number += 1
            if charge is not None:
                quotas.settle(counters, self.rules, charge, (SENT, client.output, 0))
                del self.running[id(client)]
                self.ended.append((client.duration_s, client.output))
                continue
            client.ask_count += 1
            fresh = Charge(PRICES, SENT, 0, 0, 0, self.now, self.now)
            try:
                charge = quotas.admit(counters, self.rules, fresh, SLICE, LEAST)
            except QuotaExceeded as refused:
                wait_s = self.retry_after_s(refusals[client.process], client, refused)
                self.waits_s.append(wait_s)
                if client.ask_count < 8:
                    heapq.heappush(events, (at_s + wait_s + 0.001, number, client, None))
            else:
                refusals[client.process].on_returned(client.request, self.rules)
                client.output = min(client.output, charge.leased_token_count)
                self.running[id(client)] = charge, client.process
                heapq.heappush(events, (at_s + client.duration_s, number, client, charge))
            if client.ask_count == 2:
                self.returned.append(charge is not None)
        return sum(self.returned) / len(self.returned)

    def retry_after_s(self, refusals: Refusals, client: Client, refused: QuotaExceeded) -> float:
        """Return the retry-after of `Refusals.note` for simulated requests."""
        assert refused.retry_helps
        if (self.now - self.polled_at.get(client.process, NOON)).total_seconds() >= REFRESH_S:
            self.polled_at[client.process] = self.now
            latest = self.ended[-64:]
            history = History([each[0] for each in latest], [each[1] for each in latest])
            running = [
                RunningRequest(charge, (self.now - charge.admitted_at).total_seconds())
                for charge, _ in self.running.values()
            ]
            processes = {process for _, process in self.running.values()}
            for rule in self.rules:
                refusals.learn(rule, self.now, history, max(len(processes), 1), running)
        refusals.reserve(Refused(ORGANIZATION, refused, KEY, client.request), self.now)
        return refused.retry_after_s


def a_rule(dimension: QuotaDimension, limit_value: int) -> QuotaRule:
    return QuotaRule(uuid.uuid4(), QuotaSubject.PROJECT, uuid.uuid4(), "", dimension, limit_value)


@pytest.mark.parametrize("case", NEWCOMERS)
def test_newcomers_take_only_a_part_of_the_reserved_room(case: str) -> None:
    """Twice the capacity arrives continuously; a retry-after alone reserves nothing."""
    assert simulated_share(NEWCOMERS[case], case)[0] >= 0.9


@pytest.mark.parametrize("case", CASES)
def test_of_clients_that_wait_the_exact_retry_after_95_percent_are_admitted(case: str) -> None:
    admitted_share, simulation = simulated_share(CASES[case], case)

    assert admitted_share >= 0.95, f"{admitted_share:.3f} of {len(simulation.returned)}"
    assert len(simulation.returned) > CASES[case][2] // 20
    assert len(simulation.ended) == CASES[case][2] + 64  # no client is refused endlessly


def simulated_share(
    case: tuple[dict[QuotaDimension, int], int, int, float], seed: str
) -> tuple[float, Simulation]:
    """Return the share of admitted first returns, for lengths of wide spread."""
    limits, process_count, client_count, seconds = case
    chance = random.Random(seed)
    simulation = Simulation([a_rule(*limit) for limit in limits.items()], process_count, chance)
    length = [
        min(int(chance.lognormvariate(3.4, 0.6)) + 1, SLICE) for _ in range(client_count + 64)
    ]
    # Earlier ones are known.
    simulation.ended = [(output * 0.05, output) for output in length[client_count:]]
    clients = [
        Client(index % process_count, output * 0.05, output)
        for index, output in enumerate(length[:client_count])
    ]
    return simulation.play([(chance.uniform(0, seconds), client) for client in clients]), simulation


def test_waits_are_no_longer_than_they_have_to_be() -> None:
    """The last of them ends within twice the shortest possible time."""
    simulation = Simulation([a_rule(CONCURRENT, 10)], 1, random.Random(1))
    clients = [Client(0, 2.0, 40) for _ in range(100)]
    simulation.ended = [(2.0, 40)] * 64

    simulation.play([(0.001 * index, client) for index, client in enumerate(clients)])

    assert (simulation.now - NOON).total_seconds() - 30 < 2 * 100 / 10 * 2.0


def test_returns_to_a_new_window_are_spread_over_its_beginning() -> None:
    simulation = Simulation([a_rule(PER_MINUTE, 50)], 1, random.Random(1))
    clients = [Client(0, 1.0, 10) for _ in range(90)]

    simulation.play([(0.0, client) for client in clients])

    waits = sorted(simulation.waits_s)
    assert len(waits) == 40
    assert 30 <= waits[0] < 30.5
    assert 34.5 < waits[-1] < 35
    assert max(later - earlier for earlier, later in itertools.pairwise(waits)) < 0.5


def forecast(
    rule: QuotaRule, *ages_s: float, history: History | None = None, **more: int
) -> Forecast:
    charge = Charge(PRICES, SENT, 0, SLICE, 0, NOON, NOON)
    running = [RunningRequest(charge, age_s) for age_s in ages_s]
    return Forecast(
        rule, NOON.timestamp(), history or History(), more.get("process_count", 1), running
    )


def ask(
    plan: Forecast, requested: int = 1, used: int = 0, held: int = 0, after_s: float = 0.0
) -> float:
    """Return the retry-after. after_s: since the forecast."""
    state = QuotaState(plan.rule, used, held, NOON)
    charge = Charge(PRICES, SENT, 0, LEAST, 0, NOON, NOON)
    request = PROJECT, uuid.uuid4()
    return reserve([(plan, state, requested)], charge, NOON.timestamp() + after_s, request, KEY)


def test_a_request_larger_than_the_limit_never_fits() -> None:
    assert ask(forecast(a_rule(DAY, 100)), requested=101) == math.inf
    assert ask(forecast(a_rule(CONCURRENT, 0))) == math.inf


def test_a_request_that_needs_an_override_never_fits_if_that_ends_before_there_is_room() -> None:
    """The window begins again at midnight, the raise ends at one; or vice versa."""
    midnight = datetime(2026, 11, 21, tzinfo=UTC)
    for until, fits in (
        (midnight + timedelta(hours=1), True),
        (midnight - timedelta(hours=1), False),
    ):
        rule = QuotaRule(
            uuid.uuid4(),
            QuotaSubject.PROJECT,
            uuid.uuid4(),
            "",
            DAY,
            500,
            base_limit_value=100,
            override_until=until,
        )
        assert math.isfinite(ask(forecast(rule), requested=200, used=450)) is fits


@pytest.mark.parametrize("process_count", [1, 2])
def test_rooms_are_reserved_one_after_the_other_at_the_pace_at_which_requests_end(
    process_count: int,
) -> None:
    """A place ends each second; of two processes, each reserves every second place."""
    history = History([4.0] * 64, [20] * 64)
    plan = forecast(
        a_rule(CONCURRENT, 4), 1.0, 3.0, 2.0, 0.0, history=history, process_count=process_count
    )

    waits_s = [ask(plan, held=4) for _ in range(6)]

    assert waits_s[0] == process_count
    assert waits_s == pytest.approx(
        [process_count * (1 + MARGIN * index) for index in range(len(waits_s))]
    )


def test_without_any_history_a_retry_after_is_a_guess_and_not_nothing() -> None:
    assert ask(forecast(a_rule(CONCURRENT, 1), 0.0), held=1) == pytest.approx(DURATION_UNKNOWN_S)


def test_room_that_is_overdue_is_never_reserved_at_once() -> None:
    """An overdue request still counts, so an immediate retry would fail."""
    plan = forecast(a_rule(CONCURRENT, 1), 3.9, history=History([4.0] * 64, [20] * 64))

    assert 0 < ask(plan, held=1, after_s=0.2) == pytest.approx(RETRY_S_MIN, abs=1e-6)


def test_reservations_made_on_a_guess_do_not_delay_later_clients() -> None:
    guess = forecast(a_rule(CONCURRENT, 1), 0.0)
    guessed = [ask(guess, held=1) for _ in range(200)]
    known = forecast(guess.rule, 0.0, history=History([0.8] * 64, [20] * 64))
    known = replace(known, reservations=guess.reservations)

    waits_s = [ask(known, held=1) for _ in range(4)]

    assert guessed[-1] > 100 * DURATION_UNKNOWN_S
    assert waits_s == pytest.approx([0.8 * (1 + MARGIN * index) for index in range(4)])


def refused(rule: QuotaRule, now: datetime) -> QuotaExceeded:
    """Return the refusal of a request while all places are taken."""
    state = QuotaState(rule, 0, rule.limit_value or 0, now)
    charge = Charge(PRICES, SENT, 0, LEAST, 0, now, now)
    error = QuotaExceeded([state], [1], "USD")
    error.charge, error.met = charge, ((state, 1),)
    return error


@dataclass(slots=True)
class Asking:
    """Refused requests of several keys at one exhausted quota."""

    rule: QuotaRule
    now: datetime = NOON
    refusals: Refusals = field(default_factory=Refusals)

    def wait_s(self, api_key_id: uuid.UUID, request_id: uuid.UUID | None = None) -> float:
        """Return the current retry-after of one request."""
        running = [
            RunningRequest(Charge(PRICES, SENT, 0, SLICE, 0, NOON, NOON), 1.0)
            for _ in range(self.rule.limit_value or 0)
        ]
        self.refusals.learn(self.rule, self.now, History([2.0] * 64, [20] * 64), 1, running)
        error, request = refused(self.rule, self.now), (PROJECT, request_id or uuid.uuid4())
        self.refusals.reserve(Refused(ORGANIZATION, error, api_key_id, request), self.now)
        return error.retry_after_s

    @property
    def reservations(self) -> Reservations:
        return self.refusals.forecasts[self.rule.number].reservations


def test_a_client_that_makes_requests_and_never_returns_delays_others_only_briefly() -> None:
    """A hundred new ids per second never return; another key waits its retry-after."""
    asking, attacker, honest = Asking(a_rule(CONCURRENT, 10)), uuid.uuid4(), uuid.uuid4()
    waits_s = []
    for step in range(2000):
        asking.now = NOON + timedelta(seconds=step / 100)
        asking.wait_s(attacker)
        if step % 20 == 0:
            waits_s.append(asking.wait_s(honest))

    # With 10 places for 2 s each, 16 reservations last about 4 s, as do those of the honest key in
    # the same time.
    assert max(waits_s[-20:]) < 30
    assert len(asking.reservations) <= KEY_RESERVATIONS_MAX + DOUBTED_RESERVATIONS_MAX


def test_a_crowd_behind_one_key_that_comes_back_is_believed() -> None:
    """Each of 300 clients gets its own time, round after round."""
    asking, key = Asking(a_rule(CONCURRENT, 10)), uuid.uuid4()
    clients = [uuid.uuid4() for _ in range(300)]
    for _ in range(3):
        reported = sorted((asking.wait_s(key, client), client) for client in clients)
        assert len({wait_s for wait_s, _ in reported}) == len(clients)
        began = asking.now
        for wait_s, client in reported:
            asking.now = began + timedelta(seconds=wait_s)
            asking.refusals.on_returned((PROJECT, client), [asking.rule])

    assert not asking.reservations.is_doubted(key)
    assert not asking.reservations


def test_those_without_a_reservation_do_not_return_at_once() -> None:
    """A thousand clients behind one key: half of them are told one moment, and spread after it."""
    asking, key = Asking(a_rule(CONCURRENT, 10)), uuid.uuid4()
    moments = sorted(asking.wait_s(key) for _ in range(1000))

    assert len(asking.reservations) == KEY_RESERVATIONS_MAX
    assert len(set(moments)) == len(moments)
    each_s = [bisect.bisect(moments, at + 1.0) - index for index, at in enumerate(moments)]
    assert max(each_s) < 150


def test_many_keys_of_one_quota_are_bounded_together() -> None:
    reservations = Reservations()
    for _ in range(10):
        key = uuid.uuid4()
        while reservations.make((PROJECT, uuid.uuid4()), key, 1, 0.0, 100.0):
            pass
        assert reservations.count(key) <= KEY_RESERVATIONS_MAX

    assert len(reservations) == QUOTA_RESERVATIONS_MAX
    reservations.forget_expired(150.0)
    assert not reservations


def test_reservations_are_forgotten_when_their_grace_is_over() -> None:
    reservations = Reservations(2, 2)
    owner, keys = uuid.uuid4(), [(PROJECT, uuid.uuid4()) for _ in range(3)]
    made = [reservations.make(key, owner, 5, 6.0, wait_s=4.0) for key in keys]

    assert made == [True, True, False], "bounded"
    assert not reservations.is_due(keys[0], 9.9)
    assert reservations.is_due(keys[0], 10.0)
    reservations.returned(keys[0])
    reservations.forget_expired(11.9)
    assert (len(reservations), reservations.count(owner), reservations.amount(owner)) == (1, 1, 5)
    reservations.forget_expired(12.0)
    assert (len(reservations), reservations.count(owner), reservations.amount(owner)) == (0, 0, 0)


def test_renewed_reservations_with_another_time_leave_nothing_behind() -> None:
    """A month may pass until the first one would expire."""
    reservations = Reservations(50, 50)
    for second in range(1000):
        for request in range(10):
            key = PROJECT, uuid.UUID(int=request)
            reservations.make(key, KEY, 1, float(second), 2e6 + second % 2)

    assert len(reservations._expiries) < 100
    reservations.forget_expired(4e6)
    assert not reservations
    assert reservations.is_doubted(KEY)


async def test_a_limit_of_any_size_prevents_no_answer(world: HoldWorld) -> None:
    """One promise per request would not fit in memory."""
    payer, other = world.tenant(), world.tenant("other")
    world.quota(payer, CONCURRENT, 2**62)
    world.quota(payer, QuotaDimension.REQUESTS_PER_MINUTE, 1)
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        await holds.execute([admit(payer)])
        refused, admitted = await holds.execute([admit(payer), admit(other)])

    assert isinstance(admitted, Admitted)
    assert isinstance(refused, QuotaExceeded)
    assert 0 < refused.retry_after_s < 70


async def test_a_retry_after_that_cannot_be_computed_delays_no_answer(
    world: HoldWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> float:
        raise AssertionError("a mistake in the forecast")

    monkeypatch.setattr(refusals, "reserve", fails)
    payer, other = world.tenant(), world.tenant("other")
    world.quota(payer, CONCURRENT, 1)
    answers = await world.run(admit(payer), admit(payer), admit(other))

    assert [type(each) for each in answers] == [Admitted, QuotaExceeded, Admitted]


async def test_clients_of_a_real_database_that_wait_the_retry_after_are_admitted(
    world: HoldWorld,
) -> None:
    """Running and ended requests come from queries."""
    payer = world.tenant()
    quota = world.quota(payer, CONCURRENT, 5)
    chance = random.Random(1)
    owner = uuid.uuid4()
    async with HoldConnection(world.url, owner) as holds:
        for _ in range(10):  # requests of 3 to 5 s are known
            op = admit(payer)
            await holds.execute([op])
            world.advance(chance.uniform(3, 5))
            await holds.execute([settle(op.hold_id, 10)])
        events: list[tuple[datetime, int, uuid.UUID, bool, int]] = []
        for number in range(40):
            heapq.heappush(events, (world.now, number, uuid.uuid4(), False, 1))
        number, returned = 40, []
        while events:
            at, _, request_id, runs, attempt = heapq.heappop(events)
            world.set_time(max(at, world.now))
            number += 1
            if runs:
                await holds.execute([settle(request_id, 10)])
                continue
            [answer] = await holds.execute(
                [admit(payer, request_id=request_id, hold_id=request_id)]
            )
            if attempt == 2:
                returned.append(isinstance(answer, Admitted))
            if isinstance(answer, Admitted):
                wait_s, next_attempt = chance.uniform(3, 5), 0
            else:
                assert isinstance(answer, QuotaExceeded)
                wait_s, next_attempt = answer.retry_after_s, attempt + 1
            at = world.now + timedelta(seconds=wait_s)
            heapq.heappush(events, (at, number, request_id, not next_attempt, next_attempt))
        refused = holds.refusals.counts

    assert len(returned) == 35
    assert sum(returned) >= 0.95 * len(returned)
    assert refused == {(CONCURRENT, QuotaSubject.ORGANIZATION): 35 + len(returned) - sum(returned)}
    assert world.counters(quota) == [(0, 0)]
    check_invariants(world.url, all_ended=True)


async def test_a_request_that_comes_too_early_keeps_its_reservation_and_takes_none_from_others(
    world: HoldWorld,
) -> None:
    payer = world.tenant()
    world.quota(payer, CONCURRENT, 1)
    hasty, other = admit(payer), admit(payer)
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        await holds.execute([admit(payer)])
        early = [
            of_type(QuotaExceeded, await holds.execute([hasty]))[0].retry_after_s for _ in range(5)
        ]
        [behind] = of_type(QuotaExceeded, await holds.execute([other]))

    assert len(set(early)) == 1
    assert behind.retry_after_s < early[0] + 2 * DURATION_UNKNOWN_S


async def test_a_refused_extension_is_no_refused_admission(world: HoldWorld) -> None:
    payer = world.tenant()
    world.quota(payer, DAY, 30)
    op = admit(payer)
    async with HoldConnection(world.url, uuid.uuid4()) as holds:
        await holds.execute([op])
        answers = await holds.execute(
            [Extend(op.hold_id, 20, 0, 1), admit(payer), admit(payer, input_tokens=50)]
        )
        counts = holds.refusals.counts

    assert len(of_type(QuotaExceeded, answers)) == 3
    assert [answer.retry_helps for answer in of_type(QuotaExceeded, answers)[1:]] == [True, False]
    assert counts == {(DAY, QuotaSubject.ORGANIZATION): 2}
