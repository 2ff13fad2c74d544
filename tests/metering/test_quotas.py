"""Quota decisions equal an independent model, at any time and border."""

from __future__ import annotations

import math
import os
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition
from hypothesis.stateful import rule as act

from metering.core.models import QuotaDimension, QuotaSubject
from metering.pricing.prices import TokenPrices
from metering.quotas import quotas
from metering.quotas.quota_rules import (
    Charge,
    CounterKey,
    QuotaRule,
    QuotaState,
    Unit,
    Weights,
    token_scale,
    window_end,
    window_start,
)
from metering.quotas.quotas import Counter, Counters, QuotaExceeded

PRICES = TokenPrices(
    1, "USD", input_picos_per_token=3, cached_input_picos_per_token=1, output_picos_per_token=7
)
DEARER_CACHED = TokenPrices(
    2, "USD", input_picos_per_token=1, cached_input_picos_per_token=2, output_picos_per_token=1
)
FREE_OUTPUT = TokenPrices(
    3, "USD", input_picos_per_token=1, cached_input_picos_per_token=0, output_picos_per_token=0
)
WEIGHTS = st.builds(Weights, *(st.sampled_from([0, 1, 100, 250, 333, 1000, 1500, 4000]),) * 3)
START = datetime(2027, 2, 28, 23, 58, 30, tzinfo=UTC)
SUBJECT_COUNT = 3
WINDOWS = {
    "minute": "%Y-%m-%d %H:%M",
    "hour": "%Y-%m-%d %H",
    "day": "%Y-%m-%d",
    "week": "%G-W%V",
    "month": "%Y-%m",
    "lifetime": "for ever",
}
# Rolling windows have a model of their own, in `test_rolling_windows.py`.
LABELS = {
    dimension: WINDOWS[dimension.rpartition("_per_")[2]] if "_per_" in dimension else "for ever"
    for dimension in QuotaDimension
    if not dimension.endswith("_per_window")
}
REQUESTS = [dimension for dimension in QuotaDimension if dimension.startswith("requests_per_")]
TOKEN_KINDS = {  # input and output tokens that a dimension counts
    dimension: counts
    for prefix, counts in (("tokens", (1, 1)), ("input_tokens", (1, 0)), ("output_tokens", (0, 1)))
    for dimension in QuotaDimension
    if dimension.startswith(f"{prefix}_per_")
}
MONEY = [dimension for dimension in QuotaDimension if "picos" in dimension]

Box = tuple[uuid.UUID, str]  # a quota and the name of a window

EXAMPLE_COUNT = int(os.environ.get("WEIR_TEST_EXAMPLES", "40"))


def box(rule: QuotaRule, at: datetime) -> Box:
    """Return the window of a moment by the calendar, independently of `window_start`."""
    return rule.id, at.strftime(LABELS[rule.dimension])


@dataclass(slots=True, eq=False)
class ModelClaim:
    """Request in the model. posted_output: None until the first posting, which fixes the cached
    share.

    postings: its part of `used`, by window.
    """

    rules: list[QuotaRule]
    prices: TokenPrices
    sent: int
    admitted_at: datetime
    charged_at: datetime
    leased: int
    cached: int = 0
    posted_output: int | None = None
    live: bool = True
    charge: Charge | None = None
    postings: list[tuple[Box, int]] = field(default_factory=list)

    def weight(self, rule: QuotaRule, sent: int, cached: int, output: int) -> int:
        """Return the weight of tokens in a quota, as one sum, rounded up."""
        if rule.dimension in MONEY:
            prices = self.prices
            dear = (
                sent - cached
            ) * prices.input_picos_per_token + cached * prices.cached_input_picos_per_token
            return dear + output * prices.output_picos_per_token
        counts_input, counts_output = TOKEN_KINDS[rule.dimension]
        weights = rule.weights
        thousandths = counts_input * (
            (sent - cached) * weights.input + cached * weights.cached_input
        )
        return math.ceil(Fraction(thousandths + counts_output * output * weights.output, 1000))

    def posted(self, rule: QuotaRule) -> int:
        """Return the amount that has left the charge for good."""
        return (
            0
            if self.posted_output is None
            else self.weight(rule, self.sent, self.cached, self.posted_output)
        )

    def holds(self, rule: QuotaRule, leased: int) -> int:
        """Return the held amount of a quota while it lives with this lease."""
        if rule.dimension is QuotaDimension.CONCURRENT_REQUESTS:
            return 1
        if rule.dimension in REQUESTS:
            return 0
        if self.posted_output is not None:
            return self.weight(rule, self.sent, self.cached, leased) - self.posted(rule)
        return max(self.weight(rule, self.sent, cached, leased) for cached in (0, self.sent))


@dataclass(slots=True)
class Model:
    """Model of sums over lists, without any kept state that could drift."""

    charges: list[ModelClaim] = field(default_factory=list)
    postings: list[tuple[Box, int]] = field(default_factory=list)
    unheeded: list[Box] = field(default_factory=list)

    def used(self, at: Box) -> int:
        return sum(amount for key, amount in self.postings if key == at)

    def held(self, at: Box) -> int:
        return sum(
            charge.holds(rule, charge.leased)
            for charge in self.charges
            if charge.live
            for rule in charge.rules
            if box(rule, charge.charged_at) == at
        )

    def failing(
        self, charge: ModelClaim, leased: int, now: datetime, *, extending: bool
    ) -> list[QuotaRule]:
        """Return the rules without room for the charge with this lease."""
        found = []
        for rule in charge.rules:
            requested = charge.holds(rule, leased)
            if rule.dimension in REQUESTS:
                requested = 1
            if extending and rule.dimension not in (*TOKEN_KINDS, *MONEY):
                continue
            if not (charge.weight(rule, 0, 0, 1) if extending else requested):
                continue  # an overdrawn limit does not refuse what it does not count
            assert rule.limit_value is not None
            if self.used(box(rule, now)) + self.held(box(rule, now)) + requested > rule.limit_value:
                found.append(rule)
        return found

    def refusing(
        self, charge: ModelClaim, leased: int, now: datetime, *, extending: bool
    ) -> list[QuotaRule]:
        """Return the enforced ones."""
        return [
            rule for rule in self.failing(charge, leased, now, extending=extending) if rule.enforced
        ]

    def post(self, charge: ModelClaim, sent: int, delivered: int) -> None:
        """Post the usage to the window that the charge is charged to."""
        for rule in charge.rules:
            if rule.dimension in TOKEN_KINDS or rule.dimension in MONEY:
                consumed = charge.weight(
                    rule, sent, min(charge.cached, sent), delivered
                ) - charge.posted(rule)
                charge.postings.append((box(rule, charge.charged_at), max(consumed, 0)))
                self.postings.append(charge.postings[-1])

    def expire(self, charge: ModelClaim, billed: tuple[int, int]) -> None:
        """Post the lease to its window; charge lifetime quotas the billed amount."""
        lasting = {box(rule, charge.charged_at): rule for rule in charge.rules if rule.is_credit}
        undone = [(key, -amount) for key, amount in charge.postings if key in lasting]
        before = len(self.postings)
        self.post(charge, charge.sent, charge.leased)
        self.postings[before:] = [
            posting for posting in self.postings[before:] if posting[0] not in lasting
        ]
        self.postings += undone
        for key, rule in lasting.items():
            self.postings.append(
                (key, charge.weight(rule, billed[0], min(charge.cached, billed[0]), billed[1]))
            )


class QuotaMachine(RuleBasedStateMachine):
    """State machine that runs every operation on counter rows and compares it with the model."""

    @initialize(data=st.data())
    def set_up(self, data: st.DataObject) -> None:
        self.now = START
        self.unheeded: list[Box] = []
        self.rows: dict[CounterKey, Counter] = {}
        self.model = Model()
        self.over: set[uuid.UUID] = set()  # reduced while in use: may be over their limit
        ids = random.Random(data.draw(st.integers(0, 2**32), label="ids"))
        self.subjects = [uuid.UUID(int=ids.getrandbits(128)) for _ in range(SUBJECT_COUNT)]
        limits = {dimension: st.integers(0, 120) for dimension in QuotaDimension}
        limits |= dict.fromkeys((QuotaDimension.CONCURRENT_REQUESTS, *REQUESTS), st.integers(0, 4))
        limits |= dict.fromkeys(MONEY, st.integers(0, 800))
        chosen = data.draw(
            st.lists(
                st.tuples(st.sampled_from(self.subjects), st.sampled_from(list(LABELS))),
                max_size=8,
            )
        )
        self.limits = [
            QuotaRule(
                uuid.UUID(int=ids.getrandbits(128)),
                QuotaSubject.PROJECT,
                subject,
                "",
                dimension,
                data.draw(limits[dimension]),
                data.draw(WEIGHTS) if dimension in TOKEN_KINDS else Weights(),
                enforced=data.draw(st.sampled_from([True, True, True, False])),
            )
            for subject, dimension in chosen
        ]

    def decide(
        self, keys: set[CounterKey], do: Callable[[Counters], Charge | None]
    ) -> Charge | QuotaExceeded | None:
        """Decide like a batch: lock exactly these rows, decide, write the changed ones."""
        rows = {key: replace(self.rows.get(key, Counter(0, 0))) for key in keys}
        before = {key: replace(row) for key, row in rows.items()}
        counters = Counters(self.now, rows)
        try:
            answer = do(counters)
            self.unheeded += [self.key(key) for key in counters.would_refuse]
            return answer
        except QuotaExceeded as refusal:
            assert counters.rows == before, "a refusal must change nothing"
            return refusal
        finally:
            self.rows.update((key, rows[key]) for key in counters.changed)

    @act(
        subjects=st.sets(st.integers(0, SUBJECT_COUNT - 1), min_size=1),
        sent=st.integers(0, 20),
        least=st.integers(1, 8),
        more=st.integers(0, 60),
        prices=st.sampled_from([PRICES, DEARER_CACHED, FREE_OUTPUT]),
    )
    def admit(
        self, subjects: set[int], sent: int, least: int, more: int, prices: TokenPrices
    ) -> None:
        rules = [
            rule for rule in self.limits if rule.subject_id in {self.subjects[i] for i in subjects}
        ]
        expected = ModelClaim(rules, prices, sent, self.now, self.now, leased=least)
        failing = self.model.refusing(expected, least, self.now, extending=False)
        unheeded = [
            box(rule, self.now)
            for rule in self.model.failing(expected, least, self.now, extending=False)
        ]
        fresh = Charge(prices, sent, 0, 0, 0, self.now, self.now)

        answer = self.decide(
            {rule.key(self.now) for rule in rules},
            lambda counters: quotas.admit(counters, rules, fresh, least + more, least),
        )

        if failing:
            self.check_refusal(answer, failing, expected, least)
            return
        expected.leased = max(
            leased
            for leased in range(least, least + more + 1)
            if not self.model.refusing(expected, leased, self.now, extending=False)
        )
        self.model.unheeded += unheeded
        assert isinstance(answer, Charge)
        assert answer.leased_token_count == expected.leased
        expected.charge = answer
        self.model.charges.append(expected)
        for rule in rules:
            if rule.dimension in REQUESTS:
                self.model.postings.append((box(rule, self.now), 1))

    def check_refusal(
        self,
        answer: Charge | QuotaExceeded | None,
        failing: list[QuotaRule],
        expected: ModelClaim,
        leased: int,
    ) -> None:
        assert isinstance(answer, QuotaExceeded)
        assert {state.quota_id for state in answer.failing} == {rule.id for rule in failing}
        ends = [
            state.resets_at
            or (datetime.max if state.rule.unit is Unit.LIFETIME else datetime.min).replace(
                tzinfo=UTC
            )
            for state in answer.failing
        ]
        assert ends == sorted(ends), "the first to reset stands in front"
        first = next(rule for rule in failing if rule.id == answer.failing[0].quota_id)
        is_rate = first.dimension in REQUESTS
        assert answer.requested[0] == (1 if is_rate else expected.holds(first, leased))
        assert all(state.rule.enforced for state in answer.failing)

    @precondition(lambda self: self.limits)
    @act(data=st.data(), by=st.integers(1, 60))
    def change_limit(self, data: st.DataObject, by: int) -> None:
        """Begin or end an override, set a limit, or switch enforcement."""
        index = data.draw(st.integers(0, len(self.limits) - 1))
        old = self.limits[index]
        assert old.limit_value is not None
        enforced = old.enforced if by % 3 else not old.enforced
        limit_value = max(old.limit_value + data.draw(st.sampled_from([by, -by])), 0)
        new = replace(old, limit_value=limit_value, enforced=enforced)
        if limit_value < old.limit_value or enforced > old.enforced:
            self.over.add(old.id)
        self.limits[index] = new
        for charge in self.model.charges:
            charge.rules = [new if rule.id == old.id else rule for rule in charge.rules]

    @precondition(lambda self: any(charge.live for charge in self.model.charges))
    @act(data=st.data(), cached=st.integers(0, 20), wanted=st.integers(1, 40))
    def extend(self, data: st.DataObject, cached: int, wanted: int) -> None:
        model = data.draw(st.sampled_from([charge for charge in self.model.charges if charge.live]))
        assert model.charge is not None
        delivered = data.draw(
            st.integers(model.posted_output or 0, model.leased), label="delivered"
        )
        before = (
            model.cached,
            model.posted_output,
            model.charged_at,
            list(self.model.postings),
            list(model.postings),
        )
        if model.posted_output is None:
            model.cached = max(model.cached, min(cached, model.sent))
        charge = model.charge._replace(cached_input_token_count=model.cached)
        self.model.post(model, model.sent, delivered)
        # A request without input and delivered tokens has posted nothing.
        model.posted_output = delivered if model.sent + delivered else None
        model.charged_at = self.now
        model.live = False  # its own charge does not count
        failing = self.model.refusing(model, model.leased + 1, self.now, extending=True)
        granted = 0
        if not failing:
            granted = max(
                more
                for more in range(1, wanted + 1)
                if not self.model.refusing(model, model.leased + more, self.now, extending=True)
            )
        model.live = True

        answer = self.decide(
            quotas.touched_keys(model.rules, charge, self.now, extends=True),
            lambda counters: quotas.extend(counters, model.rules, charge, delivered, wanted),
        )

        if failing:
            self.check_refusal(answer, failing, model, model.leased + 1)
            (
                model.cached,
                model.posted_output,
                model.charged_at,
                self.model.postings,
                model.postings,
            ) = before
            return
        assert isinstance(answer, Charge)
        model.leased += granted
        assert answer.leased_token_count == model.leased
        assert answer.posted_token_count == model.sent + delivered
        model.charge = answer

    @precondition(lambda self: any(charge.live for charge in self.model.charges))
    @act(
        data=st.data(), cached=st.integers(0, 20), how=st.sampled_from(["settle", "expire", "void"])
    )
    def end(self, data: st.DataObject, cached: int, how: str) -> None:
        model = data.draw(st.sampled_from([charge for charge in self.model.charges if charge.live]))
        assert model.charge is not None
        keys = quotas.touched_keys(
            model.rules, model.charge, self.now, extends=False, undoes=how != "settle"
        )
        model.live = False
        if how == "void":
            self.decide(
                keys, lambda counters: quotas.void(counters, model.rules, model.charge or fail())
            )
            self.model.postings += [(key, -amount) for key, amount in model.postings]
            for rule in model.rules:
                if rule.dimension in REQUESTS:
                    self.model.postings.append((box(rule, model.admitted_at), -1))
            return
        if how == "expire":
            billed = (model.sent, model.posted_output) if model.posted_output else (0, 0)
            charge = model.charge
            self.model.expire(model, billed)
            self.decide(
                keys, lambda counters: quotas.expire(counters, model.rules, charge, (*billed, 0))
            )
            return
        delivered = model.leased
        if how == "settle":
            delivered = data.draw(
                st.integers(model.posted_output or 0, model.leased), label="delivered"
            )
            if model.posted_output is None:
                model.cached = max(model.cached, min(cached, model.sent))
        charge = model.charge._replace(cached_input_token_count=model.cached)
        self.model.post(model, model.sent, delivered)

        self.decide(
            keys,
            lambda counters: quotas.settle(
                counters, model.rules, charge, (model.sent, delivered, 0)
            ),
        )

    def key(self, key: CounterKey) -> Box:
        """Return the quota and the window name of a counter."""
        number, start = key
        return next(box(rule, start) for rule in self.limits if rule.id.int == number)

    @act(by=st.sampled_from([0.001, 1, 29, 30, 59.999, 60, 3600, 86_400, 7 * 86_400, 31 * 86_400]))
    def time_passes(self, by: float) -> None:
        self.now += timedelta(seconds=by)

    @invariant()
    def every_counter_equals_the_model(self) -> None:
        """Check that held and used amounts equal the sums of charges."""
        if not hasattr(self, "model"):
            return
        seen = set()
        for (number, start), row in self.rows.items():
            [rule] = [rule for rule in self.limits if rule.id.int == number]
            key = box(rule, start)
            seen.add(key)
            assert (row.used, row.held) == (self.model.used(key), self.model.held(key)), rule
            assert rule.limit_value is not None
            assert (
                row.used + row.held <= rule.limit_value or not rule.enforced or rule.id in self.over
            ), rule
        assert sorted(self.unheeded) == sorted(self.model.unheeded)
        assert sum(amount for key, amount in self.model.postings if key not in seen) == 0


def fail() -> Charge:
    raise AssertionError("a live charge was admitted")


QuotaMachine.TestCase.settings = settings(
    max_examples=EXAMPLE_COUNT, stateful_step_count=40, deadline=None, print_blob=True
)
TestQuotasFollowTheModel = QuotaMachine.TestCase


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),
    st.sampled_from([None, *(timezone(timedelta(hours=h, minutes=30)) for h in (-12, -4, 5, 13))]),
    st.sampled_from(list(LABELS)),
)
def test_a_window_contains_its_moment_and_the_next_one_begins_where_it_ends(
    at: datetime, zone: timezone | None, dimension: QuotaDimension
) -> None:
    moment = at.replace(tzinfo=zone or UTC)

    start, end = window_start(dimension, moment), window_end(dimension, moment)

    assert start == window_start(dimension, start)
    if end is None:
        assert LABELS[dimension] == "for ever"
        return
    assert start <= moment < end
    assert window_start(dimension, end) == end
    assert window_start(dimension, end - timedelta(microseconds=1)) == start


# A moment as a person writes it in some time zone, and the windows that contain it, in UTC.
CALENDAR = [
    # The leap day ends while India has the first of March; its week began in February.
    (
        "2028-03-01T04:28:00.5+05:30",
        {
            "minute": ("2028-02-29 22:58", "2028-02-29 22:59"),
            "hour": ("2028-02-29 22:00", "2028-02-29 23:00"),
            "day": ("2028-02-29", "2028-03-01"),
            "week": ("2028-02-28", "2028-03-06"),
            "month": ("2028-02-01", "2028-03-01"),
        },
    ),
    # The week of a new year's first days begins in the year before.
    (
        "2026-12-31T23:59:59.999999Z",
        {
            "minute": ("2026-12-31 23:59", "2027-01-01"),
            "hour": ("2026-12-31 23:00", "2027-01-01"),
            "day": ("2026-12-31", "2027-01-01"),
            "week": ("2026-12-28", "2027-01-04"),
            "month": ("2026-12-01", "2027-01-01"),
        },
    ),
    # Without a leap day; the last moment of a Sunday is the first of March in Tokyo.
    ("2027-03-01T08:59:59+09:00", {"week": ("2027-02-22", "2027-03-01")}),
    ("2027-03-01T09:00:00+09:00", {"week": ("2027-03-01", "2027-03-08")}),
    # Europe's clocks skip an hour that morning: the day, the week and the hour stay whole.
    (
        "2027-03-28T03:00:00+02:00",
        {
            "hour": ("2027-03-28 01:00", "2027-03-28 02:00"),
            "day": ("2027-03-28", "2027-03-29"),
            "week": ("2027-03-22", "2027-03-29"),
        },
    ),
]


@pytest.mark.parametrize(
    ("moment", "unit", "start", "end"),
    [
        (moment, unit, start, end)
        for moment, windows in CALENDAR
        for unit, (start, end) in windows.items()
    ],
)
def test_windows_follow_the_utc_calendar(moment: str, unit: str, start: str, end: str) -> None:
    at = datetime.fromisoformat(moment)
    of_unit = [each for each in QuotaDimension if each.endswith(f"_per_{unit}")]

    windows = {(window_start(each, at), window_end(each, at)) for each in of_unit}

    assert of_unit
    assert windows == {
        tuple(datetime.fromisoformat(each).replace(tzinfo=UTC) for each in (start, end))
    }


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),
    st.sampled_from(list(LABELS)),
)
def test_a_window_has_the_name_that_the_calendar_gives_it(
    at: datetime, dimension: QuotaDimension
) -> None:
    moment, name = at.replace(tzinfo=UTC), LABELS[dimension]
    start, end = window_start(dimension, moment), window_end(dimension, moment)
    if end is not None:
        before = start - timedelta(microseconds=1)

        assert start.strftime(name) == moment.strftime(name) != before.strftime(name)
        assert end.strftime(name) != moment.strftime(name)


def test_the_retry_after_covers_every_exhausted_limit() -> None:
    """A client that waits for only the first of two full limits is refused again."""
    now = datetime(2026, 11, 20, 12, 0, 30, tzinfo=UTC)
    project_id = uuid.UUID(int=9)
    minute, day = (
        QuotaState(
            QuotaRule(uuid.uuid4(), QuotaSubject.PROJECT, project_id, "", dimension, 10), 10, 0, now
        )
        for dimension in (QuotaDimension.TOKENS_PER_MINUTE, QuotaDimension.TOKENS_PER_DAY)
    )

    both = QuotaExceeded([minute, day], [1, 1], "USD")
    too_much = QuotaExceeded([minute, day], [1, 11], "USD")

    assert both.retry_after_s == day.resets_in_s == 11.5 * 3600 + 1770
    assert both.retry_helps
    assert not too_much.retry_helps


@given(
    sent=st.integers(0, 10_000),
    cached=st.integers(0, 10_000),
    deliveries=st.lists(st.integers(0, 2_000), max_size=6),
    rest=st.integers(0, 2_000),
    weights=WEIGHTS,
    dimension=st.sampled_from([dimension for dimension in QuotaDimension if "tokens" in dimension]),
)
def test_a_request_weighs_the_same_in_one_piece_and_in_many(
    sent: int,
    cached: int,
    deliveries: list[int],
    rest: int,
    weights: Weights,
    dimension: QuotaDimension,
) -> None:
    """Rounding up happens once, over any number of extensions and windows."""
    rule = QuotaRule(
        uuid.uuid4(), QuotaSubject.PROJECT, uuid.uuid4(), "", dimension, 10**9, weights
    )
    cached = min(cached, sent)
    charge = Charge(PRICES, sent, cached, sum(deliveries) + rest, 0, START, START)
    whole = charge.consumed(rule, (sent, sum(deliveries) + rest, 0))

    pieces, at, delivered = 0, START, 0
    for more in deliveries:
        delivered += more
        at += timedelta(seconds=40)
        held, used = charge.held(rule), charge.consumed(rule, (sent, delivered, 0))
        charge = charge.with_posting(delivered, 0, at)
        assert used + charge.held(rule) <= held
        pieces += used
    last = charge.consumed(rule, (sent, delivered + rest, 0))

    assert last <= charge.held(rule)
    assert pieces + last == whole
    counts = TOKEN_KINDS[dimension]
    exact = Fraction(
        counts[0] * ((sent - cached) * weights.input + cached * weights.cached_input), 1000
    )
    assert 0 <= whole - exact - Fraction(counts[1] * (delivered + rest) * weights.output, 1000) < 1


@given(
    room=st.integers(0, 5_000),
    sent=st.integers(0, 3_000),
    posted=st.integers(0, 500) | st.none(),
    weights=WEIGHTS,
)
def test_the_largest_lease_fits_and_one_token_more_does_not(
    room: int, sent: int, posted: int | None, weights: Weights
) -> None:
    rule = QuotaRule(
        uuid.uuid4(),
        QuotaSubject.PROJECT,
        uuid.uuid4(),
        "",
        QuotaDimension.TOKENS_PER_DAY,
        1,
        weights,
    )
    charge = Charge(PRICES, sent, sent // 2, 500, 0, START, START)
    if posted is not None:
        charge = charge.with_posting(posted, 0, START)

    most = charge.most_output(rule, room)

    if most is None:
        assert not weights.output
        return
    assert charge._replace(leased_token_count=most + 1).held(rule) > room
    if most >= (posted or 0):
        assert charge._replace(leased_token_count=most).held(rule) <= room


def test_plain_weights_cost_no_division() -> None:
    assert token_scale(QuotaDimension.TOKENS_PER_MINUTE, Weights()) == token_scale(
        QuotaDimension.TOKENS_PER_MINUTE, Weights(1000, 1000, 1000)
    )
    scale = token_scale(QuotaDimension.TOKENS_PER_MINUTE, Weights(1000, 0, 4000))
    assert scale is not None
    assert (scale.factors, scale.divisor) == ((1, 0, 4), 1)
