"""Slots under a budget in random operations: requests, loads, failures, crashes, cancels, time.

Invariants: one engine per managed, the budget is kept, no running sequence loses its engine to
another model, and every waiting request is served or refused with a reason once the engines act.
"""

from __future__ import annotations

import asyncio
import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference.engine import EngineState
from inference.errors import EngineStartFailed
from inference.routing.memory import HANDOVER_S, Needs
from inference.routing.on_demand import FAULT_KEPT_S, ManagedEngine, ManagedTerms
from tests.inference.managed_world import VirtualLoop, World, use

EXAMPLES = int(os.environ.get("WEIR_SLOT_EXAMPLES", "40"))
TERMS = {
    "small": ManagedTerms(idle_timeout_s=5.0, needs=Needs(2)),
    "large": ManagedTerms(idle_timeout_s=9.0, needs=Needs(7)),
    "lazy": ManagedTerms(needs=Needs(6)),
    "kept": ManagedTerms(idle_timeout_s=5.0, needs=Needs(2, is_pinned=True)),
}
TOTAL_BYTES = 9
NAMES = st.sampled_from(sorted(TERMS))


class Use:
    """One request and its result."""

    def __init__(self, world: World, managed: ManagedEngine) -> None:
        self.managed = managed
        self.runs = False
        self.done = asyncio.Event()
        self.task = world.run(self._ask())

    async def _ask(self) -> str:
        try:
            async with use(self.managed):
                self.runs = True
                await self.done.wait()
            return "served"
        except EngineStartFailed as refused:
            return str(refused)
        finally:
            self.runs = False


class ManagedEngines(RuleBasedStateMachine):
    """Random operations; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.world = World(self.loop, TOTAL_BYTES, slow_close=True)
        self.use: list[Use] = []
        for name, terms in TERMS.items():
            self.world.add(name, terms)
        self.world.budget.check(self.world.managed.values())

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        self.use.append(Use(self.world, self.world.managed[name]))

    @rule(name=NAMES)
    def ask_where_it_just_closes_or_waits(self, name: str) -> None:
        """Send two requests in the same turn of the loop."""
        self.use += [Use(self.world, self.world.managed[name]) for _ in range(2)]

    @precondition(lambda self: self.use)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.use)).done.set()
        self.loop.settle()

    @precondition(lambda self: self.use)
    @rule(data=st.data())
    def cancel_one(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.use)).task.cancel()
        self.loop.settle()

    @rule(name=NAMES)
    def loaded(self, name: str) -> None:
        engine = self.world.alive.get(name)
        if engine is not None and engine.state in (EngineState.LOADING, EngineState.RESTARTING):
            engine.load()
            self.loop.settle()

    @rule(name=NAMES, for_good=st.booleans())
    def broken(self, name: str, for_good: bool) -> None:
        engine = self.world.alive.get(name)
        if (
            engine is not None
            and not engine.sequences
            and engine.state in (EngineState.LOADING, EngineState.READY)
        ):
            engine.break_for_good("no weights") if for_good else engine.fail("killed")
            self.loop.settle()

    @rule(name=NAMES)
    def closed(self, name: str) -> None:
        engine = self.world.alive.get(name)
        if engine is not None and engine.state is EngineState.CLOSED:
            engine.end_close()
            self.loop.settle()

    @rule(seconds=st.sampled_from([0.01, HANDOVER_S, 3.0, 10.0, FAULT_KEPT_S]))
    def wait(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @invariant()
    def running_sequences_have_their_engines(self) -> None:
        """Check running sequences; the world checks managed and budget at each start."""
        for each in self.use:
            if each.runs:
                engine = self.world.alive[each.managed.name]
                assert engine.sequences
                assert engine.state is not EngineState.CLOSED

    @invariant()
    def held_is_what_runs(self) -> None:
        assert self.world.budget.held_bytes == sum(
            TERMS[name].needs.memory_bytes for name in self.world.alive
        )

    def teardown(self) -> None:
        """Check that every request gets an answer once the engines act."""
        try:
            for _ in range(4 * len(TERMS)):
                for engine in list(self.world.alive.values()):
                    engine.end_close()
                    if engine.state in (EngineState.LOADING, EngineState.RESTARTING):
                        engine.load()
                for each in self.use:
                    each.done.set()
                self.loop.settle()
                self.loop.advance(HANDOVER_S)
            unanswered = [each.managed.name for each in self.use if not each.task.done()]
            assert not unanswered, f"still waiting: {unanswered}"
            answers = {each.task.result() for each in self.use if not each.task.cancelled()}
            assert answers <= {"served", "killed", "no weights"}, (
                "whoever is not served is told why"
            )
            self.world.close()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.settle()
            asyncio.set_event_loop(None)
            self.loop.close()


TestManagedEngines = ManagedEngines.TestCase
TestManagedEngines.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
