"""Slots from cold to cold: starts, closes, and no request lost between two engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inference.engine import EngineState
from inference.errors import EngineStartFailed, EngineUnavailable
from inference.routing.memory import HANDOVER_S, BudgetTooSmall, MemoryBudget, Needs
from inference.routing.on_demand import FAULT_KEPT_S, ManagedEngine, ManagedTerms
from tests.inference.managed_world import FakeEngine, World, managed_world, use

IDLE_S = 10.0


async def ask(managed: ManagedEngine, until: asyncio.Event | None = None) -> str:
    """Run one request that holds its sequence until released."""
    async with use(managed) as stream:
        if until is not None:
            await until.wait()
        stream.cancel()
        async for _ in stream:
            pass
    return "served"


def state(managed: ManagedEngine) -> EngineState:
    return managed.condition().state


def test_it_starts_for_the_first_request_and_stops_when_idle() -> None:
    with managed_world() as world:
        managed = world.add("a", ManagedTerms(idle_timeout_s=IDLE_S))
        assert state(managed) is EngineState.COLD
        assert managed.condition().starts_on_demand
        assert not world.alive

        waiters = [world.run(ask(managed)) for _ in range(20)]
        assert state(managed) is EngineState.LOADING
        assert managed.condition().starts_on_demand
        assert not managed.healthy()
        world.loop.advance(4.0)
        world.alive["a"].load()
        world.loop.settle()
        assert [waiter.result() for waiter in waiters] == ["served"] * 20
        assert managed.healthy()
        assert managed.predict_cached_token_count((1,), "") == 7

        world.loop.advance(IDLE_S - 0.1)
        assert managed.healthy()
        world.run(ask(managed))
        world.loop.advance(IDLE_S - 0.1)
        assert managed.healthy(), "a request begins the idle time anew"
        world.loop.advance(0.2)
        assert not world.alive
        assert state(managed) is EngineState.COLD
        assert managed.condition().retry_after_s == pytest.approx(4.0), "what loading took last"

        again = world.run(ask(managed))
        assert managed.condition().retry_after_s == pytest.approx(4.0)
        world.loop.advance(1.5)
        assert managed.condition().retry_after_s == pytest.approx(2.5)
        world.alive["a"].load()
        world.loop.settle()
        assert again.result() == "served"


def test_a_request_that_comes_while_it_closes_is_served_by_the_next_engine() -> None:
    with managed_world(slow_close=True) as world:
        managed = world.add("a", ManagedTerms(idle_timeout_s=IDLE_S))
        first = world.run(ask(managed))
        world.alive["a"].load()
        world.loop.settle()
        assert first.done()
        world.loop.advance(IDLE_S)
        closing = world.alive["a"]
        assert closing.state is EngineState.CLOSED

        late = world.run(ask(managed))
        assert state(managed) is EngineState.LOADING
        closing.end_close()
        world.loop.settle()
        assert world.alive["a"] is not closing
        world.alive["a"].load()
        world.loop.settle()
        assert late.result() == "served"


def test_a_running_sequence_is_not_idle() -> None:
    with managed_world() as world:
        managed = world.add("a", ManagedTerms(idle_timeout_s=IDLE_S))
        done = asyncio.Event()
        running = world.run(ask(managed, done))
        world.alive["a"].load()
        world.loop.advance(10 * IDLE_S)
        assert managed.healthy()
        done.set()
        world.loop.settle()
        assert running.result() == "served"


@pytest.mark.parametrize("trouble", ["dies", "for good", "not built", "unread"])
def test_a_failed_start_answers_all_waiters_and_is_tried_again(trouble: str) -> None:
    with managed_world() as world:
        managed = world.add("a", ManagedTerms(idle_timeout_s=IDLE_S))
        # A vanished directory, or a file that passes all checks and still fails.
        if trouble in ("not built", "unread"):
            world.run(ask(managed))
            world.alive["a"].load()
            world.loop.settle()
            world.loop.advance(IDLE_S)
            world.unbuildable.add("a")
            world.build_error = OverflowError("int too large") if trouble == "unread" else None
        waiters = [world.run(ask(managed)) for _ in range(20)]
        if trouble == "dies":
            world.alive["a"].fail("killed")
        elif trouble == "for good":
            world.alive["a"].break_for_good("no weights")
        world.loop.settle()
        why = {
            "dies": "killed",
            "for good": "no weights",
            "not built": "the directory is gone",
            "unread": "int too large",
        }[trouble]
        for waiter in waiters:
            with pytest.raises(EngineStartFailed, match=why):
                waiter.result()
        assert not managed.condition().starts_on_demand

        # Reported at once, until it is retried; the memory is free again.
        if trouble != "dies":
            assert state(managed) is EngineState.FAILED
            assert not world.alive
            with pytest.raises(EngineStartFailed, match=why) as reported:
                world.run(ask(managed)).result()
            assert reported.value.retry_after_s == pytest.approx(FAULT_KEPT_S)
            world.unbuildable.clear()
            world.loop.advance(FAULT_KEPT_S)
            assert state(managed) is EngineState.COLD
        later = world.run(ask(managed))
        assert not later.done()
        world.alive["a"].load()
        world.loop.settle()
        assert later.result() == "served"


def test_loading_continues_for_the_next_caller_and_without_one_it_is_closed() -> None:
    with managed_world() as world:
        managed = world.add("a", ManagedTerms(idle_timeout_s=IDLE_S))
        gone = world.run(ask(managed))
        gone.cancel()
        world.loop.advance(3 * IDLE_S)
        assert state(managed) is EngineState.LOADING
        world.alive["a"].load()
        world.loop.settle()
        assert managed.healthy()
        world.loop.advance(IDLE_S)
        assert not world.alive


def test_closing_ends_the_wait_for_a_start() -> None:
    with managed_world() as world:
        managed = world.add("a", ManagedTerms())
        waiter = world.run(ask(managed))
        world.run(managed.close())
        with pytest.raises(EngineUnavailable):
            waiter.result()
        assert state(managed) is EngineState.CLOSED
        with pytest.raises(EngineUnavailable):
            world.run(managed.start()).result()


def test_one_that_is_kept_warm_starts_by_itself_and_stays() -> None:
    with managed_world(total_bytes=10) as world:
        managed = world.add(
            "a", ManagedTerms(idle_timeout_s=IDLE_S, needs=Needs(6, is_pinned=True))
        )
        other = world.add("b", ManagedTerms(needs=Needs(6)))
        assert not managed.condition().starts_on_demand
        world.alive["a"].load()
        world.loop.advance(10 * IDLE_S)
        world.run(ask(other))
        world.loop.advance(1.0)
        assert managed.healthy()
        assert "b" not in world.alive


def both_loaded(world: World, *engines: ManagedEngine) -> None:
    for managed in engines:
        world.run(ask(managed))
        world.alive[managed.name].load()
        world.loop.advance(0.01)
        assert managed.healthy()


def test_the_least_recently_used_gives_way_and_a_busy_one_never() -> None:
    with managed_world(total_bytes=10) as world:
        a, b, c = (world.add(name, ManagedTerms(needs=Needs(5))) for name in "abc")
        both_loaded(world, a, b)
        done = asyncio.Event()
        # So only b can be evicted, although a was used before it.
        busy = world.run(ask(a, done))

        wanted = world.run(ask(c))
        assert state(c) is EngineState.LOADING
        assert c.condition().loading_stage == "memory"
        assert "a, b" in c.condition().reason
        assert set(world.alive) == {"a", "b"}, "whoever was just served is left alone for a moment"
        world.loop.advance(HANDOVER_S)
        assert set(world.alive) == {"a", "c"}
        world.alive["c"].load()
        world.loop.settle()
        assert wanted.result() == "served"

        back = world.run(ask(b))
        done.set()
        world.loop.advance(HANDOVER_S)
        assert set(world.alive) == {"a", "b"}, "c was used before a's sequence ended"
        world.alive["b"].load()
        world.loop.settle()
        assert busy.result() == back.result() == "served"


@pytest.mark.parametrize("why", ["idle", "broken"])
def test_one_that_closes_for_another_reason_makes_room_too(why: str) -> None:
    """Otherwise a recently used engine would be closed without need."""
    with managed_world(total_bytes=10, slow_close=True) as world:
        a = world.add("a", ManagedTerms(idle_timeout_s=IDLE_S, needs=Needs(5)))
        b, c = (world.add(name, ManagedTerms(needs=Needs(5))) for name in "bc")
        both_loaded(world, a, b)
        closing = world.alive["a"]
        if why == "idle":
            world.loop.advance(IDLE_S)
        else:
            closing.break_for_good("no weights")
            with pytest.raises(EngineStartFailed):
                world.run(ask(a)).result()
        assert closing.state is EngineState.CLOSED
        assert "a" in world.alive, "it holds its memory until it has closed"

        wanted = world.run(ask(c))
        world.loop.advance(10 * HANDOVER_S)
        assert b.healthy(), "what is missing comes from the one that closes"
        closing.end_close()
        world.loop.settle()
        world.alive["c"].load()
        world.loop.settle()
        assert wanted.result() == "served"
        assert b.healthy()


def test_waiters_get_memory_in_the_order_in_which_they_came() -> None:
    """A small request does not overtake a large one, which could wait for ever."""
    with managed_world(total_bytes=10) as world:
        a, large, small = (
            world.add(name, ManagedTerms(needs=Needs(size)))
            for name, size in (("a", 6), ("large", 10), ("small", 1))
        )
        both_loaded(world, a)
        done = asyncio.Event()
        world.run(ask(a, done))
        first, second = world.run(ask(large)), world.run(ask(small))
        world.loop.advance(5.0)
        assert set(world.alive) == {"a"}
        done.set()
        world.loop.settle()
        world.loop.advance(HANDOVER_S)
        assert set(world.alive) == {"large"}
        world.alive["large"].load()
        world.loop.settle()
        assert first.done()
        world.loop.advance(HANDOVER_S)
        world.alive["small"].load()
        world.loop.settle()
        assert second.result() == "served"


def test_an_engine_without_waiting_callers_is_not_loaded() -> None:
    with managed_world(total_bytes=10) as world:
        a, b = (world.add(name, ManagedTerms(needs=Needs(10))) for name in "ab")
        both_loaded(world, a)
        done = asyncio.Event()
        world.run(ask(a, done))
        gone = world.run(ask(b))
        gone.cancel()
        world.loop.settle()
        assert state(b) is EngineState.COLD
        done.set()
        world.loop.advance(5.0)
        assert set(world.alive) == {"a"}


@pytest.mark.parametrize("pinned", [False, True])
def test_models_that_can_never_fit_are_refused_by_name(pinned: bool) -> None:
    budget = MemoryBudget(10)
    terms = {
        "large": ManagedTerms(needs=Needs(7)),
        "kept": ManagedTerms(needs=Needs(4, is_pinned=pinned)),
    }
    with managed_world() as world:
        managed = [world.add(name, each) for name, each in terms.items()]
        if pinned:
            with pytest.raises(BudgetTooSmall, match="'large' needs 7 bytes beside 4") as refused:
                budget.check(managed)
            assert refused.value.needed_bytes == 11
            world.alive["kept"].load()
        else:
            budget.check(managed)


def test_an_eviction_at_the_moment_of_a_request_loses_no_request() -> None:
    with managed_world(total_bytes=10, slow_close=True) as world:
        a, b = (world.add(name, ManagedTerms(needs=Needs(10))) for name in "ab")
        both_loaded(world, a)
        wanted = world.run(ask(b))
        world.loop.advance(HANDOVER_S)
        evicted = world.alive["a"]
        assert evicted.state is EngineState.CLOSED
        late = world.run(ask(a))  # a closes for b, which has not begun
        evicted.end_close()
        world.loop.settle()
        world.alive["b"].load()
        world.loop.settle()
        assert wanted.result() == "served"
        assert not late.done()
        world.loop.advance(HANDOVER_S)
        world.alive["b"].end_close()
        world.loop.settle()
        world.alive["a"].load()
        world.loop.settle()
        assert late.result() == "served"


def test_the_engine_that_was_built_to_know_the_model_is_the_first_that_runs() -> None:
    built: list[FakeEngine] = []
    with managed_world() as world:
        make: Any = world._build

        def build() -> FakeEngine:
            built.append(make("a"))
            return built[-1]

        managed = ManagedEngine(build, ManagedTerms(), clock=world.loop.time)
        world.managed["a"] = managed
        world.run(managed.serve())
        world.run(managed.start())
        assert built == [world.alive["a"]]
        world.alive["a"].load()
