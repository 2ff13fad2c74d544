"""Sequences of a scripted external engine: invariants, attribution of faults."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import pytest

from inference import engine
from inference.adapters.external_faults import STALLS_MAX, StallWatch
from inference.adapters.external_queue import AbortLimits, ExternalQueue
from inference.adapters.external_request import TAKEN_AT_ONCE_MAX, Answer, Choice, Output
from inference.errors import EngineError, EngineFailed
from inference.limits import EngineLimits
from inference.text.text_decoder import TextDecoder
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TOKENIZER_VOCABULARY_SIZE, TinyCheckpoint
from tests.inference.running import make_request
from tests.inference.worker_engines import prompt, until

END, FORMAT_END = 2, 6
EMPTY_MAX = 4
CAREFUL = AbortLimits(
    abort_prefill=False,
    abort_with_logprobs=False,
    abort_drain_s=60.0,
    empty_answer_count_max=EMPTY_MAX,
)

ODD_IDS = [-1, -(10**8), TOKENIZER_VOCABULARY_SIZE, 2**40, 10**5000, True, 9.0, "9", None, [9]]
ODD_LOGPROBS = [math.nan, math.inf, -math.inf, 5.0, "a", None]
ODD_OUTPUTS = {
    **{f"id {index}": Output([9, each]) for index, each in enumerate(ODD_IDS)},  # type: ignore[list-item]
    **{
        f"log-probability {each}": Output([9], logprobs=[{9: engine.TokenLogprob(9, each)}])  # type: ignore[arg-type]
        for each in ODD_LOGPROBS
    },
    "no log-probability": Output([9]),
    "log-probabilities of another token": Output([9], logprobs=[{8: engine.TokenLogprob(8, -1.0)}]),
    "top token": Output(
        [9], logprobs=[{9: engine.TokenLogprob(9, -1.0), 2**40: engine.TokenLogprob(2**40, -2.0)}]
    ),
    "more tokens than asked for": Output([9] * 101),
    "finish reason": Output([9], "because"),
    "finish reason that is not a text": Output([9], 7),  # type: ignore[arg-type]
    "stop at no end token": Output([9], "stop", 8),
    "stop outside the vocabulary": Output([9], "stop", 2**40),
    "ids that are not a list": Output(None),  # type: ignore[arg-type]
}


@dataclass(eq=False)
class Script:
    """Implements `Answers` with what a test puts into it."""

    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)
    output: Output = field(default_factory=Output)

    def emit(self, *token_ids: int, finish_reason: str | None = None) -> None:
        """Add an answer with this many more tokens."""
        self.output = replace(
            self.output, token_ids=[*self.output.token_ids, *token_ids], finish_reason=finish_reason
        )
        self.outputs.put_nowait(self.output)

    async def read(self) -> AsyncGenerator[Answer, None]:
        """Implement `Answers`."""
        while True:
            output = await self.outputs.get()
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
        self.generated: list[int] = []  # tokens of each event
        self.queue = ExternalQueue(
            self.submit,
            decoder=TextDecoder(tokenizer.backend, tokenizer.special_token_ids, "tokenizer.json"),
            vocabulary_size=checkpoint.vocabulary_size,
            model_end_token_ids=frozenset({END}),
            format_end_token_ids=frozenset({FORMAT_END}),
            limits=EngineLimits(
                context_window_tokens=2048, step_token_count_max=64, running_sequence_count_max=4
            ),
            abort_limits=CAREFUL,
            sink=self.emit,
            broken=self.broken.append,
            tasks=tasks,
        )

    def submit(self, choice: Choice) -> Script:
        self.scripts[choice.number] = script = Script()
        return script

    def emit(self, number: int, event: engine.SequenceEvent | EngineError) -> None:
        if isinstance(event, EngineFailed):
            self.failed.append(number)
        elif isinstance(event, engine.TokensGenerated):
            self.generated.append(len(event.token_ids))
        elif isinstance(event, engine.SequenceFinished):
            self.ended.append(number)

    def add(self, number: int, request: engine.GenerationRequest | None = None) -> None:
        self.queue.add(number, request or make_request(prompt(number), 1000), 0.0)

    async def end_at_once(self, number: int, request: engine.GenerationRequest) -> None:
        """Run a request whose first answer is its end."""
        self.add(number, request)
        self.scripts[number].emit(END, finish_reason="stop")
        await until(lambda: number in self.ended)


@contextlib.asynccontextmanager
async def world_of(tiny: TinyCheckpoint) -> AsyncIterator[World]:
    """Yield a core; drop everything that still runs at the end."""
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        holder = tasks.create_task(asyncio.Event().wait())
        world = World(tiny, tasks)
        yield world
        world.queue.abandon()
        for script in world.scripts.values():
            script.emit(END, finish_reason="cancelled")
        holder.cancel()


async def test_a_stuck_sequence_that_cannot_be_aborted_counts_once(tiny: TinyCheckpoint) -> None:
    """It keeps its place; only a third stuck sequence counts as the engine's fault."""
    async with world_of(tiny) as world:
        world.add(0)
        world.scripts[0].emit(9)
        await until(lambda: world.queue.statistics().output_token_count == 1)
        watch = StallWatch(world.queue, first_token_timeout_s=60.0, inter_token_timeout_s=60.0)
        for number in range(1, STALLS_MAX):
            world.add(number)
            for choice in world.queue.inside:
                choice.silent_since_s -= 120.0 * (choice.number == number)

            assert [watch.poll() for _ in range(3 * STALLS_MAX)] == [None] * 3 * STALLS_MAX
            assert world.failed == list(range(1, number + 1))

        world.add(STALLS_MAX)
        for choice in world.queue.inside:
            choice.silent_since_s -= 120.0 * (choice.number == STALLS_MAX)
        assert watch.poll() is not None


async def test_a_stop_sequence_of_control_tokens_ends_the_output(tiny: TinyCheckpoint) -> None:
    events: list[engine.SequenceEvent | EngineError] = []
    async with world_of(tiny) as world:
        world.queue._sink = lambda number, event: events.append(event)
        world.add(0, make_request(prompt(1), 9, stop_sequences=("<|user|>",)))
        world.scripts[0].emit(40, 41, 4, 42)
        await until(lambda: bool(events) and isinstance(events[-1], engine.SequenceFinished))

    *_, generated, finished = events
    assert isinstance(generated, engine.TokensGenerated)
    assert generated.token_ids == (40, 41, 4)
    assert isinstance(finished, engine.SequenceFinished)
    assert finished.reason is engine.EngineFinishReason.STOP_SEQUENCE
    assert finished.stopped_by == "<|user|>"


async def test_requests_cancelled_in_a_full_engine_are_removed(tiny: TinyCheckpoint) -> None:
    async with world_of(tiny) as world:
        for number in range(14):
            world.add(number)
        for number in range(14, 1014):
            world.add(number)
            world.queue.cancel(number)

        assert world.ended == list(range(14, 1014))
        assert world.queue.statistics().waiting_sequence_count == 10
        assert len(world.queue._waiting) <= 20


@pytest.mark.parametrize("invited", [False, True], ids=["by their prompts", "by their parameters"])
async def test_one_tenants_empty_answers_end_no_engine(tiny: TinyCheckpoint, invited: bool) -> None:
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


async def test_a_lone_tenants_empty_answers_show_a_broken_cache(tiny: TinyCheckpoint) -> None:
    async with world_of(tiny) as world:
        for number in range(EMPTY_MAX):
            assert world.broken == []
            await world.end_at_once(
                number, make_request(prompt(1), 1000, cache_salt="ours", ignore_eos=False)
            )

        assert world.broken == [f"{EMPTY_MAX} answers in a row were empty"]


async def test_a_response_format_also_ends_at_the_tokenizers_end(tiny: TinyCheckpoint) -> None:
    """A grammar may allow that token alone after a complete text."""
    formatted = make_request(
        prompt(1),
        100,
        ignore_eos=False,
        response_format=engine.ResponseFormat(engine.GrammarKind.REGEX, "[0-9]"),
    )
    async with world_of(tiny) as world:
        world.add(1, formatted)
        world.add(2, make_request(prompt(2), 100, ignore_eos=False))
        for script in world.scripts.values():
            script.emit(FORMAT_END)
        await until(lambda: 1 in world.ended)
        world.scripts[2].emit(END)
        await until(lambda: 2 in world.ended)

    assert world.ended == [1, 2]


@pytest.mark.parametrize("name", ODD_OUTPUTS)
async def test_an_invalid_output_fails_its_own_sequence(tiny: TinyCheckpoint, name: str) -> None:
    sampling = engine.SamplingParams(top_logprobs=1 if "prob" in name or "top" in name else None)
    async with world_of(tiny) as world:
        world.add(0, make_request(prompt(1), 3, sampling=engine.SamplingParams()))
        world.add(1, make_request(prompt(2), 100, sampling=sampling, ignore_eos=False))
        world.scripts[0].emit(9)
        world.scripts[1].outputs.put_nowait(ODD_OUTPUTS[name])
        await until(lambda: world.failed == [1])
        world.scripts[0].emit(9, 9, finish_reason="length")
        await until(lambda: world.ended == [0])

        assert world.broken == []
        await until(lambda: world.queue.idle)


async def test_a_fault_of_the_detokenizer_fails_its_sequence_and_is_logged(
    tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_of(tiny) as world:
        world.add(0, make_request(prompt(1), 3))
        world.add(1, make_request(prompt(2), 100))
        [broken] = [each for each in world.queue.inside if each.number == 1]
        broken.detokenizer = cast(Any, None)
        world.scripts[0].emit(9)
        world.scripts[1].emit(9)
        await until(lambda: world.failed == [1])
        world.scripts[0].emit(9, 9, finish_reason="length")
        await until(lambda: world.ended == [0])

        [logged] = [record for record in caplog.records if record.exc_info]
        assert "cannot be read" in logged.message
        assert world.broken == []


async def test_many_tokens_of_one_answer_are_taken_in_parts(tiny: TinyCheckpoint) -> None:
    """Events are told one part at a time, so that other sequences have their turns."""
    async with world_of(tiny) as world:
        world.add(0, make_request(prompt(1), 1500))
        world.scripts[0].emit(*[9] * 1500, finish_reason="length")
        await until(lambda: world.ended == [0])

        assert world.generated == [TAKEN_AT_ONCE_MAX, 1500 - TAKEN_AT_ONCE_MAX]


async def test_answers_without_tokens_are_silence(tiny: TinyCheckpoint) -> None:
    async with world_of(tiny) as world:
        world.add(0)
        [choice] = world.queue.inside
        choice.silent_since_s = 0.0
        world.scripts[0].emit()
        await until(lambda: world.scripts[0].outputs.empty())
        assert choice.silent_since_s == 0.0

        world.scripts[0].emit(9)
        await until(lambda: world.queue.statistics().output_token_count == 1)
        assert choice.silent_since_s > 0.0


def has_generated(world: World, token_count: int) -> bool:
    return world.queue.statistics().output_token_count == token_count


async def test_stuck_sequences_that_left_mean_no_stuck_engine(tiny: TinyCheckpoint) -> None:
    async with world_of(tiny) as world:
        world.add(0)
        watch = StallWatch(
            world.queue, first_token_timeout_s=60, inter_token_timeout_s=60, abort_frees=True
        )
        for number in range(1, 3 * STALLS_MAX):
            world.add(number)
            world.scripts[0].emit(9)
            world.scripts[number].emit(9)
            await until(partial(has_generated, world, 2 * number))
            for choice in world.queue.inside:
                choice.silent_since_s -= 120.0 * (choice.number == number)
            assert watch.poll() is None
            world.scripts[number].emit(finish_reason="cancelled")
        assert world.failed == list(range(1, 3 * STALLS_MAX))
