"""Sequences of a scripted external engine: invariants, attribution of faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from inference.adapters.external_core import (
    STALLS_MAX,
    Answer,
    Choice,
    Handling,
    Output,
    OutsideCore,
    StallWatch,
)
from inference.engine import (
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SequenceEvent,
    SequenceFinished,
)
from inference.errors import EngineError, EngineFailed
from inference.limits import EngineLimits
from inference.text.detokenizer import TextDecoder
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.hosted import prompt, until
from tests.inference.running import make_request

END, FORMAT_END = 2, 6
EMPTY_MAX = 4
CAREFUL = Handling(
    abort_prefill=False,
    abort_with_logprobs=False,
    abort_drain_s=60.0,
    empty_answer_count_max=EMPTY_MAX,
)


@dataclass(eq=False)
class Script:
    """Implements `Answers` with what a test puts into it."""

    said: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)
    output: Output = field(default_factory=Output)

    def say(self, *token_ids: int, finish_reason: str | None = None) -> None:
        """Add an answer with this many more tokens."""
        self.output = replace(
            self.output, token_ids=[*self.output.token_ids, *token_ids], finish_reason=finish_reason
        )
        self.said.put_nowait(self.output)

    async def read(self) -> AsyncGenerator[Answer, None]:
        """Implement `Answers`."""
        while True:
            output = await self.said.get()
            yield Answer(output, 0)
            if output.finish_reason is not None:
                return

    def abort(self) -> None:
        """Implement `Answers`."""


class World:
    """A core and its recorded events."""

    def __init__(self, checkpoint: TinyCheckpoint, tasks: asyncio.TaskGroup) -> None:
        tokenizer = Tokenizer(checkpoint.directory)
        self.scripts: dict[int, Script] = {}
        self.ended: list[int] = []
        self.failed: list[int] = []
        self.broken: list[str] = []
        self.core = OutsideCore(
            self.submit,
            decoder=TextDecoder(tokenizer.backend, tokenizer.special_token_ids, "tokenizer.json"),
            vocabulary_size=checkpoint.vocabulary_size,
            model_end_token_ids=frozenset({END}),
            format_end_token_ids=frozenset({FORMAT_END}),
            limits=EngineLimits(
                context_window_tokens=2048, step_token_count_max=64, running_sequence_count_max=4
            ),
            handling=CAREFUL,
            tell=self.tell,
            broken=self.broken.append,
            tasks=tasks,
        )

    def submit(self, choice: Choice) -> Script:
        self.scripts[choice.number] = script = Script()
        return script

    def tell(self, number: int, event: SequenceEvent | EngineError) -> None:
        if isinstance(event, EngineFailed):
            self.failed.append(number)
        elif isinstance(event, SequenceFinished):
            self.ended.append(number)

    def add(self, number: int, request: GenerationRequest | None = None) -> None:
        self.core.add(number, request or make_request(prompt(number), 1000), 0.0)

    async def end_at_once(self, number: int, request: GenerationRequest) -> None:
        """Run a request whose first answer is its end."""
        self.add(number, request)
        self.scripts[number].say(END, finish_reason="stop")
        await until(lambda: number in self.ended)


@contextlib.asynccontextmanager
async def world_of(tiny: TinyCheckpoint) -> AsyncIterator[World]:
    """Yield a core; drop everything that still runs at the end."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        holder = tasks.create_task(asyncio.Event().wait())
        world = World(tiny, tasks)
        yield world
        world.core.abandon()
        for script in world.scripts.values():
            script.say(END, finish_reason="cancelled")
        holder.cancel()


async def test_a_sequence_that_is_stuck_and_cannot_be_aborted_is_counted_once(
    tiny: TinyCheckpoint,
) -> None:
    """It keeps its place; only a third stuck sequence counts as the engine's fault."""
    async with world_of(tiny) as world:
        world.add(0)
        world.scripts[0].say(9)
        await until(lambda: world.core.statistics().output_token_count == 1)
        watch = StallWatch(world.core, first_token_timeout_s=60.0, inter_token_timeout_s=60.0)
        for number in range(1, STALLS_MAX):
            world.add(number)
            for choice in world.core.inside:
                choice.silent_since_s -= 120.0 * (choice.number == number)

            assert [watch.look() for _ in range(3 * STALLS_MAX)] == [None] * 3 * STALLS_MAX
            assert world.failed == list(range(1, number + 1))

        world.add(STALLS_MAX)
        for choice in world.core.inside:
            choice.silent_since_s -= 120.0 * (choice.number == STALLS_MAX)
        assert watch.look() is not None


async def test_requests_cancelled_in_the_queue_of_a_full_engine_are_removed(
    tiny: TinyCheckpoint,
) -> None:
    async with world_of(tiny) as world:
        for number in range(14):
            world.add(number)
        for number in range(14, 1014):
            world.add(number)
            world.core.cancel(number)

        assert world.ended == list(range(14, 1014))
        assert world.core.statistics().waiting_sequence_count == 10
        assert len(world.core._waiting) <= 20


@pytest.mark.parametrize("invited", [False, True], ids=["by their prompts", "by their parameters"])
async def test_one_tenants_empty_answers_end_no_engine_that_serves_others(
    tiny: TinyCheckpoint, invited: bool
) -> None:
    """An empty output is legal; if all tenants get them, the cache is at fault."""
    parameters = {"stop_token_ids": frozenset({END})} if invited else {}
    ours = make_request(prompt(1), 1000, cache_salt="ours", ignore_eos=False, **parameters)  # type: ignore[arg-type]
    async with world_of(tiny) as world:
        world.add(0, replace(ours, cache_salt="theirs"))
        for number in range(1, 3 * EMPTY_MAX):
            await world.end_at_once(number, ours)
        assert world.broken == []

        await world.end_at_once(3 * EMPTY_MAX, replace(ours, cache_salt="a third one's"))
        assert len(world.broken) == (not invited)


async def test_the_only_tenants_empty_answers_in_a_row_show_a_broken_cache(
    tiny: TinyCheckpoint,
) -> None:
    async with world_of(tiny) as world:
        for number in range(EMPTY_MAX):
            assert world.broken == []
            await world.end_at_once(
                number, make_request(prompt(1), 1000, cache_salt="ours", ignore_eos=False)
            )

        assert world.broken == [f"{EMPTY_MAX} answers in a row were empty"]


async def test_a_response_format_also_ends_at_the_end_token_of_the_tokenizer(
    tiny: TinyCheckpoint,
) -> None:
    """A grammar may allow that token alone after a complete text."""
    formatted = make_request(
        prompt(1), 100, ignore_eos=False, response_format=ResponseFormat(GrammarKind.REGEX, "[0-9]")
    )
    async with world_of(tiny) as world:
        world.add(1, formatted)
        world.add(2, make_request(prompt(2), 100, ignore_eos=False))
        for script in world.scripts.values():
            script.say(FORMAT_END)
        await until(lambda: 1 in world.ended)
        world.scripts[2].say(END)
        await until(lambda: 2 in world.ended)

    assert world.ended == [1, 2]
