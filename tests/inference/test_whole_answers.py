"""Answers that a remote server sends whole: equal to streamed ones, bounded, ended safely."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import engine_streams as streams
from inference.adapters.external_faults import StallWatch
from inference.adapters.external_request import Choice, Output, Request
from inference.adapters.remote_http import HttpDialect, _Events
from inference.adapters.remote_settings import Service
from inference.engine import (
    EngineFinishReason,
    GenerationRequest,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, RequestImpossible
from inference.routing.replica import Replica
from inference.routing.replica_set import ReplicaSet
from inference.sequences import RequestField
from inference.text.detokenizer import TextPiece
from inference.text.reasoning import Marked, Markers
from inference.text.text_decoder import GivenTextDecoder, TextDecoder
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.remote_engines import (
    RemoteWorld,
    connected,
    remote_engine,
    remote_settings,
)
from tests.inference.running import make_request
from tests.inference.worker_engines import LONG, prompt, read_all, run, until
from tests.remote_servers.serving import ServerProcess

DYNAMO, SGLANG, NO_IDS = "refuse return_token_ids", "generate", "no_ids"


@pytest.fixture
def world(tiny: TinyCheckpoint, remote_server: ServerProcess) -> RemoteWorld:
    return RemoteWorld(remote_server, remote_settings(tiny, remote_server, Service.OPENAI_HTTP))


def whole(request: GenerationRequest) -> GenerationRequest:
    return replace(request, is_whole=True)


def streamed_last(world: RemoteWorld) -> bool:
    """Return whether the server streamed its last answer."""
    return bool(world.server.state()["bodies"][-1]["stream"])


@pytest.mark.parametrize("faults", [[], [DYNAMO], [SGLANG], [NO_IDS]], ids=str)
async def test_a_whole_answer_equals_a_streamed_one(world: RemoteWorld, faults: list[str]) -> None:
    world.server.go_wrong(*faults)
    # The probe draws prompts, of which few have outputs that do not show where a stop ends them.
    random.seed(1)
    requests = [
        make_request(prompt(1), 30),
        make_request(prompt(2), 1),
        make_request(prompt(3), 40, sampling=SamplingParams(temperature=1.0, seed=3)),
        make_request(prompt(4), 60, ignore_eos=False),
        make_request(prompt(1), 30, stop_sequences=("zzz",)),
    ]
    async with connected(world) as engine:
        for request in requests:
            if request.sampling.seed and RequestField.SEED in engine.model.capabilities.unsupported:
                continue
            streamed, at_once = await run(engine, request), await run(engine, whole(request))
            is_streamed = streamed_last(world)
            assert streamed.finished is not None
            assert at_once.finished is not None

            assert not is_streamed
            assert at_once.text == streamed.text
            assert at_once.token_ids == streamed.token_ids
            assert at_once.finished.reason is streamed.finished.reason
            assert at_once.finished.cached_token_count in (
                streamed.finished.cached_token_count,
                len(request.prompt_token_ids) // 16 * 16,  # the second one finds the first's blocks
            )
            assert at_once.finished.timings.decode_ms == 0 < at_once.finished.timings.prefill_ms


async def test_an_answer_is_streamed_where_single_tokens_matter(world: RemoteWorld) -> None:
    world.server.go_wrong("ignore stop")
    async with connected(world) as engine:
        for request in (
            make_request(prompt(1), 8),
            whole(make_request(prompt(1), 8, stop_sequences=("zzz",))),
            whole(make_request(prompt(1), 8, sampling=SamplingParams(top_logprobs=1))),
        ):
            await run(engine, request)
            assert streamed_last(world)


async def test_a_server_that_only_streams_is_used(world: RemoteWorld) -> None:
    world.server.go_wrong("only_streams")
    async with connected(world) as engine:
        outcome = await run(engine, whole(make_request(prompt(1), 8)))

        assert len(outcome.token_ids) == 8
        assert streamed_last(world)


async def test_a_whole_answer_is_scheduled_and_cancelled_at_the_server(world: RemoteWorld) -> None:
    async with connected(world) as engine:
        async with streams.stream(engine, whole(make_request(prompt(1), LONG))) as stream:
            first = await anext(aiter(stream))
            stream.cancel()
            outcome = await read_all(stream)

        assert first == Scheduled(0, is_final=False)
        assert outcome.finished is not None
        assert outcome.finished.reason is EngineFinishReason.CANCELLED
        assert not outcome.token_ids
        await until(lambda: world.server.idle)


async def test_a_whole_answer_that_the_server_refuses_has_not_begun(world: RemoteWorld) -> None:
    async with connected(world) as engine:
        world.server.go_wrong("only_streams")
        events: list[Any] = []
        engine.submit(whole(make_request(prompt(1), 8)), events.append)
        await until(lambda: len(events) > 1)

    assert events[0] == Scheduled(0, is_final=False)
    assert isinstance(events[1], RequestImpossible)
    assert events[1].is_unstarted


async def test_a_whole_answer_of_a_lost_server_comes_from_another_replica(
    world: RemoteWorld,
) -> None:
    async with remote_engine(world.settings) as first, remote_engine(world.settings) as second:
        expected = await run(second, make_request(prompt(1), 30))
        replicas = ReplicaSet(
            first.model, [Replica("r0", first), Replica("r1", second)], recovery_wait_s=600.0
        )
        replicas.drain({"r1"})
        world.server.go_wrong("mute")
        seen_count, events = world.server.state()["seen"], list[Any]()
        replicas.submit(whole(make_request(prompt(1), 30)), events.append)
        await until(lambda: world.server.state()["seen"] > seen_count)
        replicas.drain({"r0"})
        world.server.go_wrong()
        assert first._connection is not None
        cast(HttpDialect, first._connection.dialect).connections.close()
        await until(lambda: isinstance(events[-1], SequenceFinished | EngineError))

    [scheduled, *generated, finished] = events
    assert scheduled == Scheduled(0, is_final=False)
    assert isinstance(finished, SequenceFinished)
    assert finished.migration_count == 0, "no token had been sent"
    assert [token_id for each in generated for token_id in each.token_ids] == expected.token_ids


async def test_waiting_whole_answers_enter_one_after_the_other(world: RemoteWorld) -> None:
    few = RemoteWorld(world.server, replace(world.settings, running_sequence_count_max=2))
    async with connected(few) as engine, asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(run(engine, whole(make_request(prompt(each % 8), 4))))
            for each in range(40)
        ]
    assert all(len(each.result().token_ids) == 4 for each in running)


class OneChoice:
    """A queue with one choice."""

    moved_at_s = 0.0

    def __init__(self, choice: Choice) -> None:
        self.inside: Iterator[Choice] = iter(())
        self._choice = choice

    def refill(self) -> None:
        self.inside = iter([self._choice])


def test_a_whole_answer_has_the_time_of_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(0, make_request((1,), 10), frozenset(), 0.0, None)
    choice = Choice(request, 0, 0, GivenTextDecoder().open(), silent_since_s=0.0, is_whole=True)
    queue = OneChoice(choice)
    watch = StallWatch(cast(Any, queue), first_token_timeout_s=5.0, inter_token_timeout_s=2.0)
    found = []
    for now_s in (6.0, 24.0, 26.0):
        monkeypatch.setattr("time.monotonic", lambda now_s=now_s: now_s)
        queue.refill()
        found.append(watch.poll() is not None)

    assert found == [False, False, True]


class Settings:
    """Settings that `HttpDialect` reads."""

    tls = None
    name = "tiny"

    class target:
        model = "tiny"


def taken(
    dialect: HttpDialect, choice: Choice, messages: Sequence[dict[str, Any]], *, at_once: bool
) -> tuple[list[TokensGenerated], TextPiece]:
    """Take an answer, as one message or as a stream; return the events and the rest."""
    output, events, reader = Output(), [], _Events()
    if at_once:
        read = [reader.read_whole(json.dumps(messages[0]).encode())]
    else:
        body = b"".join(b"data: %b\n" % json.dumps(each).encode() for each in messages)
        read = reader.read(body + b"data: [DONE]\n")
        assert reader.failure is None
    for message in read:
        dialect.take([message], choice, output)
        while choice.ended is None:
            events += cast(list[TokensGenerated], choice.take(output, 1.0))
            if choice.token_count >= len(output.token_ids):
                break
    return events, choice.rest()


PARTS = ["<think>", "</think>", "a", "bc", "\u00e9", "\U0001f600", "\n", " ", "<th", "stop"]


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyCheckpoint) -> Tokenizer:
    return Tokenizer(tiny.directory)


def cut_into(items: Sequence[Any], cuts: Sequence[int]) -> list[list[Any]]:
    """Cut a list at these positions."""
    ends = sorted({min(cut, len(items)) for cut in cuts} | {0, len(items)})
    return [list(items[begin:end]) for begin, end in itertools.pairwise(ends)] or [[]]


@given(
    parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["a", "top", "b", "\u00e9 ", "cst"]), max_size=2),
    cuts=st.lists(st.integers(0, 60), max_size=12),
    splits=st.booleans(),
    has_ids=st.booleans(),
    thinking=st.integers(0, 3),
)
def test_random_texts_are_equal_whole_and_streamed(
    tokenizer: Tokenizer,
    parts: list[str],
    stops: list[str],
    cuts: list[int],
    splits: bool,
    has_ids: bool,
    thinking: int,
) -> None:
    """The server ends its output where a stop sequence is complete, as the probe has tested."""
    backend, sought = tokenizer.backend, () if splits else tuple(stops)
    if has_ids:
        reasoning = Marked(Markers("<think>", "</think>"), None, backend)
        decoder: Any = TextDecoder(backend, tokenizer.special_token_ids, "tokenizer", reasoning)
    else:
        decoder, splits = GivenTextDecoder(), False
    ids = backend.encode("".join(parts), add_special_tokens=False).ids
    text = decoder.open(sought, (), splits=False)
    reason = "length"
    for index, token_id in enumerate(ids):
        if not has_ids:
            text.feed(backend.decode([token_id]), 1)
        if text.push(token_id).stop:
            ids, reason = ids[: index + 1], "stop"
            break
    dialect = HttpDialect(cast(Any, None), cast(Any, Settings()))
    dialect.form.id_fields = {"return_token_ids": True} if has_ids else {}
    dialect.form.sends_stops = dialect.form.answers_whole = True
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": len(ids)}
    if has_ids or thinking:
        usage["completion_tokens_details"] = {"reasoning_tokens": 0}
    sent = 0
    chunks: list[dict[str, Any]] = []
    for each in cut_into(ids, cuts):
        sent += len(each)
        choice = {"text": "".join(backend.decode([id_]) for id_ in each), "token_ids": each}
        counted = {"prompt_tokens": 3, "completion_tokens": sent}
        chunks.append({"choices": [choice], "usage": counted})
    chunks[-1]["choices"][0]["finish_reason"] = reason
    chunks[-1]["usage"] = usage
    full = {"text": "".join(each["choices"][0]["text"] for each in chunks), "token_ids": ids}
    answer = {"choices": [full | {"finish_reason": reason}], "usage": usage}
    request = replace(
        make_request((1, 2, 3), len(ids), stop_sequences=sought), splits_reasoning=splits
    )
    size = backend.get_vocab_size() if has_ids else None

    def choice_of() -> Choice:
        made = Request(0, request, frozenset(), 0.0, size)
        return Choice(made, 0, 0, decoder.open(sought, (), splits=splits))

    streamed, at_once = choice_of(), choice_of()
    assert dialect.form.may_answer_whole(replace_whole(at_once))
    seen = []
    for taken_by, messages in ((streamed, chunks), (at_once, [answer])):
        events, rest = taken(dialect, taken_by, messages, at_once=taken_by is at_once)
        seen.append(
            (
                "".join(each.text for each in events) + rest.text,
                "".join(each.reasoning for each in events) + rest.reasoning,
                sum(each.reasoning_token_count for each in events),
                [token_id for each in events for token_id in each.token_ids],
                taken_by.ended,
                taken_by.stopped_by,
                taken_by.token_count,
            )
        )

    assert seen[0] == seen[1]


def replace_whole(choice: Choice) -> Choice:
    """Return a choice of the same request, which wants its answer whole."""
    generation = whole(choice.request.generation)
    return replace(choice, request=replace(choice.request, generation=generation))
