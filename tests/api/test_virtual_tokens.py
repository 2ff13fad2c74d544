"""Fair order: equal to an independent model, and within the paper's bound for two tenants."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Line, Tenant
from tests.api.queue_world import EngineModel, Request, World

NAMES = "abcde"
# Powers of two: all arithmetic is exact.
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5, "e": 4.0}


@dataclass(eq=False)
class Item:
    number: int
    tenant: str
    input_token_count: int
    output_token_count_max: int = 100


def id_of(name: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, name)


@dataclass
class NaiveLine:
    """The paper's algorithm by full scans; ranks include running requests, which count half in
    levels.
    """

    counters: dict[str, float] = field(default_factory=dict)
    waiting: list[Item] = field(default_factory=list)
    dispatched: list[Item] = field(default_factory=list)
    owed: dict[int, float] = field(default_factory=dict)  # by number
    ranks: dict[int, float] = field(default_factory=dict)  # of requests in the engine
    underway: dict[int, tuple[str, float]] = field(default_factory=dict)  # by number
    last: str | None = None

    def join(self, item: Item) -> None:
        own = self.counters.setdefault(item.tenant, 0.0)
        queued = {each.tenant for each in self.waiting + self.dispatched}
        if item.tenant not in queued:
            names = queued or ({self.last} if self.last is not None else set())
            levels = [self.level(name) for name in names]
            if levels and own < min(levels):
                self.counters[item.tenant] = min(levels)
                self.underway = {
                    number: each for number, each in self.underway.items() if each[0] != item.tenant
                }
        self.waiting.append(item)

    def level(self, name: str) -> float:
        units = sum(units for tenant, units in self.underway.values() if tenant == name)
        return self.counters[name] - units / 2 / WEIGHTS[name]

    def rank(self, name: str, items: dict[int, Item]) -> float:
        own = [number for number in self.owed if items[number].tenant == name]
        owed = sum(self.owed[number] for number in own) / WEIGHTS[name]
        return max([self.counters[name] + owed, *(self.ranks[number] for number in own)])

    def next(self, items: dict[int, Item]) -> Item:
        return min(self.waiting, key=lambda item: (self.rank(item.tenant, items), item.number))

    def take(self, item: Item, output_tokens: int, items: dict[int, Item]) -> None:
        self.ranks[item.number] = self.rank(item.tenant, items)
        self.leave(item)
        self.dispatched.append(item)
        input_cost = INPUT_TOKEN_COST * item.input_token_count
        self.owed[item.number] = input_cost + OUTPUT_TOKEN_COST * output_tokens

    def leave(self, item: Item) -> None:
        self.waiting.remove(item)
        self.last = item.tenant

    def begin(self, item: Item) -> None:
        self.dispatched.remove(item)
        self.last = item.tenant
        self.underway[item.number] = item.tenant, 0.0
        self.charge(item, INPUT_TOKEN_COST * item.input_token_count)

    def charge(self, item: Item, cost: float) -> None:
        self.counters[item.tenant] += cost / WEIGHTS[item.tenant]
        self.owed[item.number] = max(self.owed[item.number] - cost, 0.0)
        if item.number in self.underway:
            self.underway[item.number] = item.tenant, self.underway[item.number][1] + cost

    def end(self, item: Item) -> None:
        del self.owed[item.number], self.ranks[item.number]
        self.underway.pop(item.number, None)
        if item in self.dispatched:
            self.dispatched.remove(item)


class LineMachine(RuleBasedStateMachine):
    """State machine whose every reply is predicted by the model."""

    @initialize()
    def begin(self) -> None:
        self.line: Line[Item] = Line()
        self.model = NaiveLine()
        self.items: dict[int, Item] = {}
        self.tenants: dict[str, Tenant[Item]] = {}
        self.running: list[Item] = []

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(1, 50))
    def join(self, name: str, tokens: int) -> None:
        item = Item(len(self.items) + 1, name, tokens)
        self.items[item.number] = item
        self.model.join(item)
        self.tenants[name] = self.line.join(item, id_of(name), WEIGHTS[name])

    @precondition(lambda self: self.model.waiting)
    @rule(output_tokens=st.integers(1, 30))
    def take(self, output_tokens: int) -> None:
        expected = self.model.next(self.items)
        tenant = self.line.next_tenant()
        assert tenant is not None
        assert tenant.rank == self.model.rank(expected.tenant, self.items)
        assert self.line.take(tenant, output_tokens) is expected
        self.model.take(expected, output_tokens, self.items)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.model.waiting))
        self.line.leave(item, self.tenants[item.tenant])
        self.model.leave(item)

    @precondition(lambda self: self.model.dispatched)
    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        """Let the engine begin any one of its requests."""
        item = data.draw(st.sampled_from(self.model.dispatched))
        self.line.begun(item, self.tenants[item.tenant])
        self.model.begin(item)
        self.running.append(item)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def generate(self, data: st.DataObject, tokens: int) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.line.charge(item, self.tenants[item.tenant], OUTPUT_TOKEN_COST * tokens)
        self.model.charge(item, OUTPUT_TOKEN_COST * tokens)

    @precondition(lambda self: self.running or self.model.dispatched)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.running + self.model.dispatched))
        if item in self.running:
            self.running.remove(item)
        self.model.end(item)
        self.line.ended(item, self.tenants[item.tenant])

    @rule()
    def forget_idle_tenants(self) -> None:
        """A forgotten tenant returns with the state that it would have had anyway."""
        self.line._swept_at = 0
        self.line._forget_idle()

    @invariant()
    def what_waits_agrees(self) -> None:
        assert self.line.waiting_count == len(self.model.waiting)
        for tenant in self.line.waiting_tenants():
            [name] = [each for each in NAMES if id_of(each) == tenant.id]
            waiting = [item for item in self.model.waiting if item.tenant == name]
            assert list(tenant.waiting) == waiting
            assert tenant.counter == self.model.counters[name]
            assert tenant.rank == self.model.rank(name, self.items)
            assert tenant.waiting_input_tokens == sum(item.input_token_count for item in waiting)
        if self.model.waiting:
            expected = self.line.next_tenant()
            assert expected is not None
            assert expected.first is self.model.next(self.items)


TestLineMachine = LineMachine.TestCase
TestLineMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_an_idle_tenant_saves_up_no_credit() -> None:
    line: Line[Item] = Line()
    numbers = iter(range(1000))
    busy = line.join(Item(next(numbers), "a", 10), id_of("a"), 1.0)
    for _ in range(50):
        line.join(Item(next(numbers), "a", 10), id_of("a"), 1.0)
        item = line.take(busy, 0)
        line.begun(item, busy)
        line.ended(item, busy)

    late = line.join(Item(next(numbers), "b", 10), id_of("b"), 1.0)

    assert late.counter == busy.counter == 500.0


def test_running_requests_count_half_for_a_tenant_that_begins() -> None:
    """It gets a share of the places at once, and once only: its counter never falls."""
    line: Line[Item] = Line()
    numbers = iter(range(1000))
    busy = line.join(Item(next(numbers), "a", 10), id_of("a"), 1.0)
    for _ in range(8):
        line.join(Item(next(numbers), "a", 10), id_of("a"), 1.0)
        line.begun(line.take(busy, 0), busy)

    late = line.join(Item(next(numbers), "b", 10), id_of("b"), 1.0)
    assert (busy.counter, late.counter) == (80.0, 40.0)

    for _ in range(3):
        item = line.take(late, 0)
        line.begun(item, late)
        line.ended(item, late)
        line.join(Item(next(numbers), "b", 10), id_of("b"), 1.0)
    assert late.counter == 70.0


def test_a_line_that_begins_takes_over_the_counters_of_the_others() -> None:
    """Whichever of their tenants have requests at the moment, on which levels depend."""
    numbers = iter(range(1000))
    lines = [Line[Item](), Line[Item]()]
    for line in lines:
        busy = line.join(Item(next(numbers), "a", 10), id_of("a"), 1.0)
        line.join(Item(next(numbers), "a", 10), id_of("a"), 1.0)
        item = line.take(busy, 0)
        line.begun(item, busy)
        line.ended(item, busy)
        busy.counter = 1000.0
    quiet = lines[0].join(Item(next(numbers), "b", 10), id_of("b"), 1.0)
    quiet.counter = 400.0
    lines[0]._note_level(quiet)

    begun = Line[Item]()
    for line in lines:
        begun.absorb(uuid.uuid4(), line.report(), is_new=True)

    found = {name: begun.find(id_of(name)) for name in "ab"}
    assert {name: each and each.counter for name, each in found.items()} == {"a": 1000, "b": 400}


def test_memory_follows_the_tenants_that_are_active() -> None:
    line: Line[Item] = Line()
    for number in range(20_000):
        line.join(Item(number, "x", 1), uuid.UUID(int=number + 1), 1.0)
        tenant = line.next_tenant()
        assert tenant is not None
        item = line.take(tenant, 1)
        line.begun(item, tenant)
        line.ended(item, tenant)

    assert len(line._tenants) <= 2001


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("weight_f", "weight_g"), [(1.0, 1.0), (2.0, 1.0)])
def test_two_waiting_tenants_get_equal_turns(seed: int, weight_f: float, weight_g: float) -> None:
    """Sheng et al., OSDI 2024, theorem 4.4: |W_f - W_g| <= 2 max(w_in L_in, w_out M) over any
    interval in which both always wait.

    M: tokens of the requests that a tenant has in the engine at once. The tenants' requests differ
    in shape, and both always have some that wait.
    """
    rng = random.Random(seed)
    world = World(engine=EngineModel(running_max=8, step_tokens_max=128))
    shapes = {"f": (10, 60, weight_f), "g": (300, 5, weight_g)}
    most_input = most_out = 0.0
    difference: list[float] = []

    def make(name: str) -> Request:
        input_max, output_max, weight = shapes[name]
        return Request(
            name, rng.randint(1, input_max), rng.randint(1, output_max), world.now, weight=weight
        )

    def observe() -> None:
        nonlocal most_input, most_out
        difference.append(world.service["f"] / weight_f - world.service["g"] / weight_g)
        for name in shapes:
            with_engine = [each for each in world.with_engine if each.tenant == name]
            tokens = sum(each.input_tokens + each.output_tokens for each in with_engine)
            most_out = max(most_out, OUTPUT_TOKEN_COST * tokens / shapes[name][2])

    for name, (input_max, _, weight) in shapes.items():
        most_input = max(most_input, INPUT_TOKEN_COST * input_max / weight)
        for _ in range(40):
            world.keep_busy(name, 1, lambda name=name: make(name), until=25.0)  # type: ignore[misc]
    world.at(0.0, lambda: setattr(world, "on_event", observe))
    world.run(25.0)

    bound = 2 * max(most_input, most_out)
    assert max(difference) - min(difference) <= bound
    assert len(world.ended) > 150
