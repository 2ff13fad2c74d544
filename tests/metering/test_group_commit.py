"""Group commit: waiting operations share a batch, and no answer is lost when a caller leaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.incidents import INCIDENT_COUNTS
from metering.store import group_commit
from metering.store.group_commit import GATHER_TICKS, Backlog, Entry, GroupCommit, Patience


class Overflow(Exception):
    """Queue is full."""


class Late(Exception):
    """Operation has waited too long."""


class Closing(Exception):
    """Store is closing."""


@dataclass(slots=True)
class Store:
    """Executes batches on demand: even numbers succeed, odd ones fail."""

    batches: list[list[int]] = field(default_factory=list)
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    may_answer: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    breaks: Exception | None = None

    async def execute(self, batch: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(batch))
        self.begun.release()
        await self.may_answer.acquire()
        if self.breaks is not None:
            raise self.breaks
        return [ValueError(op) if op % 2 else op for op in batch]


@dataclass(slots=True)
class Rig:
    store: Store
    commits: GroupCommit[int, int]
    orphans: list[tuple[int, int | Exception]]
    tasks: asyncio.TaskGroup

    def submit(self, op: int) -> asyncio.Task[int]:
        return self.tasks.create_task(collect(self.commits, op))


async def collect(commits: GroupCommit[int, int], op: int) -> int:
    """Return the answer, or -1 for an error, so that the task group continues."""
    try:
        return await commits.submit(op)
    except (ValueError, Overflow, Closing, Late, RuntimeError):
        return -1


@asynccontextmanager
async def running(
    *,
    batch_size_max: int = 100,
    waiting_count_max: int = 100,
    droppable: Callable[[int], bool] = lambda op: True,
    patience: Patience | None = None,
    put_off: Callable[[Entry[int], Exception], bool] = lambda entry, error: False,
    refused: Callable[[], Exception | None] = lambda: None,
) -> AsyncIterator[Rig]:
    store = Store()
    orphans: list[tuple[int, int | Exception]] = []
    commits: GroupCommit[int, int] = GroupCommit(
        store.execute,
        orphaned=lambda op, answer: orphans.append((op, answer)),
        droppable=droppable,
        batch_size_max=batch_size_max,
        backlog=Backlog(waiting_count_max, Overflow),
        patience=patience,
        put_off=put_off,
        refused=refused,
    )

    async with asyncio.TaskGroup() as tasks:
        runner = tasks.create_task(commits.run())
        yield Rig(store, commits, orphans, tasks)
        runner.cancel()
        await asyncio.wait([runner])
        commits.close(Closing())


async def settled_down() -> None:
    """Let every task run until it waits."""
    for _ in range(5 * GATHER_TICKS):
        await asyncio.sleep(0)


async def test_operations_that_wait_for_a_batch_form_the_next_one() -> None:
    async with running() as rig:
        first = rig.submit(0)
        await rig.store.begun.acquire()
        later = [rig.submit(op) for op in (2, 4, 6)]
        await settled_down()
        rig.store.may_answer.release()
        rig.store.may_answer.release()
        answers = await asyncio.gather(first, *later)

    assert rig.store.batches == [[0], [2, 4, 6]]
    assert answers == [0, 2, 4, 6]
    assert rig.commits.statistics().batch_size_peak == 3
    assert rig.commits.statistics().operation_count == 4


async def test_a_small_batch_waits_for_the_next_loop_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer."""
    monkeypatch.setattr(group_commit, "IDLE_TICK_S", 0.0)  # every turn counts as busy
    async with running() as rig:
        for op in (0, 2, 4):
            rig.commits.begin(op, None)
            for _ in range(3):
                await asyncio.sleep(0)
        assert rig.store.batches == []
        await rig.store.begun.acquire()
        rig.store.may_answer.release()

    assert rig.store.batches == [[0, 2, 4]]


async def test_a_small_batch_never_waits_for_an_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "IDLE_TICK_S", math.inf)  # every turn counts as idle
    async with running() as rig:
        rig.commits.begin(0, None)
        for _ in range(3):
            await asyncio.sleep(0)
        rig.commits.begin(1, None)
        await rig.store.begun.acquire()
        rig.store.may_answer.release()
        await rig.store.begun.acquire()
        rig.store.may_answer.release()

    assert rig.store.batches == [[0], [1]]


async def test_a_caller_that_gives_up_gets_an_error_and_its_late_answer_is_orphaned() -> None:
    """Pending operations are removed, with or without a running batch."""
    async with running(patience=Patience(0.02, Late)) as rig:
        first = rig.submit(0)
        await rig.store.begun.acquire()
        second = rig.submit(2)
        assert (await first, await second) == (-1, -1)

        third = rig.submit(4)
        assert await third == -1
        rig.store.may_answer.release()
        rig.store.may_answer.release()
        await settled_down()
        last = await rig.submit(6)

    assert rig.store.batches == [[0], [6]]
    assert rig.orphans == [(0, 0)]
    assert last == 6


async def test_a_caller_that_gave_up_does_not_enter_the_queue() -> None:
    """Even while a batch hangs: posted and mandatory operations keep their place and order."""
    rigged = running(
        waiting_count_max=3, patience=Patience(0.02, Late), droppable=lambda op: op < 10
    )
    async with rigged as rig:
        first = rig.submit(0)
        await rig.store.begun.acquire()
        rig.commits.begin(8, None)
        late = [rig.submit(op) for op in (2, 12, 4)]
        assert await asyncio.gather(first, *late) == [-1] * 4

        await settled_down()
        assert rig.commits.statistics().waiting_count == 2
        next_one = rig.submit(6)
        await asyncio.sleep(0)
        assert rig.commits.statistics().waiting_count == 3  # there was room for it
        rig.store.may_answer.release()
        rig.store.may_answer.release()
        await next_one
        await settled_down()

    assert rig.store.batches[1][:2] == [8, 12]


async def test_a_batch_is_bounded_and_the_rest_follows_in_order() -> None:
    async with running(batch_size_max=2) as rig:
        tasks = [rig.submit(op) for op in (0, 2, 4, 6, 8)]
        for _ in range(3):
            rig.store.may_answer.release()
        await asyncio.gather(*tasks)

    assert rig.store.batches == [[0, 2], [4, 6], [8]]


async def test_each_caller_gets_its_own_answer_or_error() -> None:
    async with running() as rig:
        tasks = [rig.submit(op) for op in (0, 1, 2)]
        rig.store.may_answer.release()

        assert await asyncio.gather(*tasks) == [0, -1, 2]


async def test_a_batch_that_raises_fails_all_of_it_and_the_next_one_runs() -> None:
    async with running() as rig:
        rig.store.breaks = RuntimeError("broken")
        tasks = [rig.submit(op) for op in (0, 2)]
        rig.store.may_answer.release()
        assert await asyncio.gather(*tasks) == [-1, -1]
        rig.store.breaks = None
        rig.store.may_answer.release()

        assert await rig.submit(4) == 4


async def test_too_many_waiting_are_refused_at_once_unless_they_must_be_taken() -> None:
    async with running(waiting_count_max=2, droppable=lambda op: op < 10) as rig:
        first = rig.submit(0)
        await rig.store.begun.acquire()
        waiting = [rig.submit(2), rig.submit(4)]
        await settled_down()

        with pytest.raises(Overflow):
            await rig.commits.submit(6)
        must = rig.submit(12)
        await settled_down()
        assert rig.commits.statistics().waiting_count == 3

        rig.store.may_answer.release()
        rig.store.may_answer.release()
        assert await asyncio.gather(first, *waiting, must) == [0, 2, 4, 12]


async def test_one_cancelled_before_its_batch_is_left_out_only_if_it_may_be() -> None:
    async with running(droppable=lambda op: op < 10) as rig:
        first = rig.submit(0)
        await rig.store.begun.acquire()
        dropped, kept = rig.submit(2), rig.submit(12)
        await settled_down()
        dropped.cancel()
        kept.cancel()
        rig.store.may_answer.release()
        rig.store.may_answer.release()
        await first
        await rig.store.begun.acquire()
        await settled_down()

    assert rig.store.batches == [[0], [12]]
    assert rig.orphans == [(12, 12)]


async def test_an_answer_is_not_lost_between_its_arrival_and_the_wake_up_of_its_caller() -> None:
    """A task cancelled between its answer and its turn never sees the answer."""
    async with running() as rig:
        task = rig.submit(2)
        await rig.store.begun.acquire()
        rig.store.may_answer.release()
        for _ in range(100):
            if answered(task):
                break
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    assert task.cancelled()
    assert rig.orphans == [(2, 2)]


class Reported:
    """Answers that callbacks received, in order."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, int | Exception]] = []
        self._more = asyncio.Event()

    def of(self, op: int) -> Callable[[int | Exception], None]:
        return partial(self._take, op)

    def _take(self, op: int, answer: int | Exception) -> None:
        self.answers.append((op, answer))
        self._more.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.answers) < count:
                self._more.clear()
                await self._more.wait()


async def test_a_callback_is_called_once_and_never_inside_the_call_that_begins() -> None:
    reported = Reported()
    refusals: list[Exception | None] = [None, None, Late()]
    async with running(waiting_count_max=1, refused=lambda: refusals.pop(0)) as rig:
        rig.commits.begin(2, reported.of(2))
        rig.commits.begin(4, reported.of(4))  # there is no room for it
        refused = rig.commits.begin(6, reported.of(6))
        assert reported.answers == []

        rig.store.may_answer.release()
        await settled_down()
        refused.abandon()
    rig.commits.begin(8, reported.of(8))
    assert len(reported.answers) == 3
    await settled_down()

    assert [op for op, _ in reported.answers] == [4, 6, 2, 8]
    assert [type(answer) for _, answer in reported.answers] == [Overflow, Late, int, Closing]
    assert rig.orphans == []


async def test_an_operation_abandoned_before_its_batch_is_left_out_if_it_may_be() -> None:
    reported = Reported()
    async with running(droppable=lambda op: op < 10) as rig:
        rig.commits.begin(0, reported.of(0))
        await rig.store.begun.acquire()
        waiting = [rig.commits.begin(op, reported.of(op)) for op in (2, 12, 4)]
        for entry in (*waiting[:2], waiting[0]):
            entry.abandon()
        for _ in range(2):
            rig.store.may_answer.release()
        await settled_down()

    assert rig.store.batches == [[0], [12, 4]]
    assert reported.answers == [(0, 0), (4, 4)]
    assert rig.orphans == [(12, 12)]


@pytest.mark.parametrize("ticks", range(6))
async def test_an_operation_abandoned_at_any_time_is_answered_or_orphaned(ticks: int) -> None:
    """After any number of turns of the event loop after the answer: exactly one of both."""
    reported = Reported()
    async with running() as rig:
        entry = rig.commits.begin(2, reported.of(2))
        await rig.store.begun.acquire()
        rig.store.may_answer.release()
        for _ in range(ticks):
            await asyncio.sleep(0)
        was_reported = bool(reported.answers)
        entry.abandon()
        await settled_down()

    assert (reported.answers, rig.orphans) == (([(2, 2)], []) if was_reported else ([], [(2, 2)]))
    if ticks in (0, 5):
        assert was_reported == (ticks == 5)


async def test_a_callback_that_raises_harms_no_other_of_its_batch() -> None:
    reported = Reported()
    before = INCIDENT_COUNTS["batch_answers"]

    def break_down(_: object) -> None:
        raise RuntimeError("broken")

    async with running(patience=Patience(0.02, Late)) as rig:
        for op, done in ((0, reported.of(0)), (2, break_down), (4, reported.of(4))):
            rig.commits.begin(op, done)
        rig.store.may_answer.release()
        await settled_down()
        assert reported.answers == [(0, 0), (4, 4)]

        for op, done in ((6, break_down), (8, reported.of(8))):
            rig.commits.begin(op, done)
        await reported.until(3)

    assert isinstance(reported.answers[2][1], Late)
    assert INCIDENT_COUNTS["batch_answers"] == before + 2


async def test_a_callback_may_abandon_another_of_its_batch_and_begin_a_new_one() -> None:
    reported = Reported()
    async with running(patience=Patience(0.02, Late)) as rig:

        def end_the_other(_: object) -> None:
            other.abandon()
            rig.commits.begin(4, reported.of(4))

        rig.commits.begin(0, end_the_other)
        other = rig.commits.begin(2, reported.of(2))
        for _ in range(2):
            rig.store.may_answer.release()
        await settled_down()
        assert (reported.answers, rig.orphans) == ([(4, 4)], [(2, 2)])

        rig.commits.begin(0, end_the_other)  # even if both have waited too long
        other = rig.commits.begin(2, reported.of(2))
        await reported.until(2)

    assert [op for op, _ in reported.answers] == [4, 4]
    assert isinstance(reported.answers[1][1], Late)


async def test_a_postponed_operation_is_retried_until_it_is_answered() -> None:
    reported = Reported()
    put_off: list[Entry[int]] = []

    def puts_off(entry: Entry[int], error: Exception) -> bool:
        put_off.append(entry)
        return len(put_off) < 3

    async with running(put_off=puts_off) as rig:
        rig.commits.begin(3, reported.of(3))
        for attempt in range(3):
            rig.store.may_answer.release()
            await settled_down()
            assert len(put_off) == attempt + 1
            assert rig.commits.statistics().waiting_count == 0
            if attempt < 2:
                assert reported.answers == []
                rig.commits.again(put_off[-1])

    assert rig.store.batches == [[3]] * 3
    assert [op for op, _ in reported.answers] == [3]
    assert rig.orphans == []


def answered(task: asyncio.Task[int]) -> bool:
    """Return whether the task's future is done, though the task has not run yet."""
    waiter: asyncio.Future[int] | None = getattr(task, "_fut_waiter", None)
    return waiter is not None and waiter.done()


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    ops=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    cancel_after=st.dictionaries(st.integers(0, 5), st.integers(0, 3 * GATHER_TICKS), max_size=4),
    batch_size_max=st.integers(1, 3),
)
def test_every_answer_goes_to_its_caller_or_to_the_orphans_and_never_to_both(
    ops: list[int], cancel_after: dict[int, int], batch_size_max: int
) -> None:
    """Callers are cancelled after any number of turns of the event loop."""

    async def scenario() -> None:
        async with running(batch_size_max=batch_size_max, droppable=lambda op: op < 5) as rig:
            tasks = [rig.submit(op) for op in ops]
            for tick in range(20 * GATHER_TICKS):
                for index, when in cancel_after.items():
                    if when == tick and index < len(tasks):
                        tasks[index].cancel()
                rig.store.may_answer.release()
                await asyncio.sleep(0)
            executed = [op for batch in rig.store.batches for op in batch]
            taken = [
                op
                for op, task in zip(ops, tasks, strict=True)
                if task.done() and not task.cancelled()
            ]
            assert sorted(taken + [op for op, _ in rig.orphans]) == sorted(executed)
            assert len(set(executed)) == len(executed)
            started = {op for op in ops if cancel_after.get(ops.index(op)) != 0}
            assert {op for op in started if op >= 5} <= set(executed), "what must be done is done"

    asyncio.run(scenario())


async def test_a_posted_operation_is_done_and_answered() -> None:
    async with running() as rig:
        rig.commits.begin(2, None)
        rig.commits.begin(3, None)
        rig.store.may_answer.release()
        await rig.store.begun.acquire()
        await settled_down()

    assert [op for op, _ in rig.orphans] == [2, 3]
    assert isinstance(rig.orphans[1][1], ValueError)


async def test_closing_answers_waiting_and_later_callers() -> None:
    async with running() as rig:
        under_way = rig.submit(0)
        await rig.store.begun.acquire()
        waiting = rig.submit(2)
        await settled_down()

    with pytest.raises(Closing):
        await rig.commits.submit(4)
    assert (await under_way, await waiting) == (-1, -1)
