"""Thinking of models on remote servers: its count, and a grammar of the answer after it.

Servers that send token ids do not split the output. The model answers the assistant's
mark with `<think>Hm.</think>`, two blank lines and more text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bench import engine_streams as streams
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, Service
from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineFailed, RequestImpossible
from inference.sequences import RequestField, ThinkingStart
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.remote_engines import RemoteWorld, connected, remote_settings
from tests.inference.running import make_request
from tests.inference.tool_checkpoints import ASSISTANT_ID, make_scripted_checkpoint
from tests.inference.worker_engines import until
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import ServerProcess, server_process

PIECES = ("<think>", "Hm.", "So.", "</think>", "\n\n", "It is four.", " Or five.")
FORMS = (
    ResponseFormat(GrammarKind.REGEX, "four|five", "response_format.regex"),
    ResponseFormat(GrammarKind.JSON_SCHEMA, '{"enum": ["four"]}', "response_format.json_schema"),
)

SPLITTING = ["no_ids", "unsalted", "no_events"]


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("thinking")
    directory = make_scripted_checkpoint(folder / "checkpoint", PIECES, weight=1.0)
    with server_process(directory, make_certificates(folder / "certificates")) as server:
        yield server


@pytest.fixture(params=[Service.TRTLLM, Service.VLLM, Service.SGLANG, Service.OPENAI_HTTP])
def world(request: pytest.FixtureRequest, thinking_server: ServerProcess) -> Iterator[RemoteWorld]:
    thinking_server.go_wrong("unsalted", "no_events")
    directory = thinking_server.certificates.directory.parent / "checkpoint"
    settings: RemoteSettings = replace(
        remote_settings(TinyCheckpoint(directory), thinking_server, Service(request.param)),
        share_prefixes=True,
    )
    yield RemoteWorld(thinking_server, settings)
    thinking_server.go_wrong()


def id_of(world: RemoteWorld, token: str) -> int:
    found = Tokenizer(world.settings.directory).token_id(token)
    assert found is not None
    return found


@dataclass
class Parts:
    """An output. ends: of its choices, by index."""

    token_ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    text: str = ""
    reasoning_token_count: int = 0
    ends: dict[int, EngineFinishReason] = field(default_factory=dict)


async def parts_of(engine: RemoteEngine, request: GenerationRequest) -> dict[int, Parts]:
    """Run a request; return the output of each choice."""
    parts = {index: Parts() for index in range(request.choice_count)}
    async with streams.stream(engine, request) as stream:
        async for event in stream:
            index = getattr(event, "choice_index", 0)
            if isinstance(event, TokensGenerated):
                parts[index].token_ids += event.token_ids
                parts[index].reasoning_token_count += event.reasoning_token_count
            if isinstance(event, TokensGenerated | ChoiceFinished | SequenceFinished):
                parts[index].reasoning += event.reasoning
                parts[index].text += event.text
            if isinstance(event, ChoiceFinished | SequenceFinished):
                parts[index].ends.setdefault(index, event.reason)
    return parts


def requested(**fields: Any) -> GenerationRequest:
    made = make_request((ASSISTANT_ID,), ignore_eos=False, **fields)
    return replace(made, splits_reasoning=True)


@pytest.mark.parametrize("choice_count", [1, 3])
@pytest.mark.parametrize("limit", range(1, 9))
async def test_thinking_is_split_and_counted_wherever_an_output_is_cut(
    world: RemoteWorld, limit: int, choice_count: int
) -> None:
    async with connected(world) as engine:
        parts = await parts_of(
            engine, requested(max_output_tokens=limit, choice_count=choice_count)
        )
    thought = "".join(PIECES[1:3][: max(limit - 1, 0)])
    answer = "".join(PIECES[5:][: max(limit - 5, 0)])
    end = EngineFinishReason.LENGTH if limit < 8 else EngineFinishReason.STOP
    for each in parts.values():
        assert (each.reasoning, each.text) == (thought, answer)
        assert each.reasoning_token_count == min(limit, 4)
        assert len(each.token_ids) == limit
        assert set(each.ends.values()) == {end}


async def test_a_stop_sequence_ends_the_answer_and_no_thought(world: RemoteWorld) -> None:
    async with connected(world) as engine:
        [each] = (await parts_of(engine, requested(stop_sequences=("So", "four")))).values()
    assert (each.reasoning, each.text) == ("Hm.So.", "It is ")
    assert (each.reasoning_token_count, len(each.token_ids)) == (4, 6)
    assert each.ends == {0: EngineFinishReason.STOP_SEQUENCE}


async def test_a_cancelled_thought_is_counted(world: RemoteWorld) -> None:
    """The model thinks without an end, since a bias forbids the closing mark."""
    closing = id_of(world, "</think>")
    again, opening = [id_of(world, each) for each in ("So.", "<think>")]
    is_testable = world.settings.target.service is not Service.TRTLLM
    bias = ((closing, -50.0), (again, 50.0)) if is_testable else ()
    events: list[Any] = []
    async with connected(world) as engine:
        sampling = SamplingParams(logit_bias=bias)
        request = requested(max_output_tokens=1500, sampling=sampling)
        request = replace(request, prompt_token_ids=(ASSISTANT_ID, opening))
        sequence = engine.submit(request, events.append)
        await until(lambda: sum(isinstance(each, TokensGenerated) for each in events) > 1)
        sequence.cancel()
        await until(lambda: isinstance(events[-1], SequenceFinished))
    generated = [each for each in events if isinstance(each, TokensGenerated)]
    count = sum(len(each.token_ids) for each in generated)
    assert count == events[-1].generated_token_count
    thinking_count = sum(each.reasoning_token_count for each in generated)
    assert thinking_count == (count if is_testable else min(count, 3))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
async def test_a_grammar_follows_the_thinking(world: RemoteWorld, form: ResponseFormat) -> None:
    """Each choice has its own place: one that is cut while it thinks has no answer."""
    world.server.go_wrong("unsalted", "no_events", "reasoning_parser")
    opening, closing = [id_of(world, each) for each in ("<think>", "</think>")]
    is_testable = world.settings.target.service is not Service.TRTLLM
    opened = requested(response_format=form, choice_count=2)
    opened = replace(
        opened, prompt_token_ids=(ASSISTANT_ID, opening), thinking=ThinkingStart.PROMPT
    )
    cut = replace(opened, stop=replace(opened.stop, max_output_tokens=1))
    by_itself = replace(opened, prompt_token_ids=(ASSISTANT_ID,), thinking=ThinkingStart.MODEL)
    async with connected(world) as engine:
        known = engine.model.capabilities.after_thinking
        formats = frozenset({RequestField.REGEX, RequestField.JSON_SCHEMA})
        assert known == (formats if is_testable else frozenset())
        if is_testable:
            for each in (await parts_of(engine, opened)).values():
                assert each.reasoning == "Hm.So."
                assert each.text.strip('"') in ("four", "five")
                assert each.reasoning_token_count == 3
            for each in (await parts_of(engine, cut)).values():
                assert (each.reasoning, each.text, each.reasoning_token_count) == ("Hm.", "", 1)
        if is_testable:  # switched off by a prompt that ends the thinking
            ended = replace(
                opened,
                prompt_token_ids=(ASSISTANT_ID, opening, closing),
                thinking=ThinkingStart.ENDED,
            )
            for each in (await parts_of(engine, ended)).values():
                assert each.text.strip('"') in ("four", "five")
                assert (each.reasoning, each.reasoning_token_count) == ("", 0)
        for request in [by_itself] if is_testable else [opened, by_itself]:
            await check_refused(engine, request)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
async def test_a_grammar_and_thinking_are_refused_where_the_server_constrains_the_first_token(
    world: RemoteWorld, form: ResponseFormat
) -> None:
    opening = id_of(world, "<think>")
    opened = replace(
        requested(response_format=form),
        prompt_token_ids=(ASSISTANT_ID, opening),
        thinking=ThinkingStart.PROMPT,
    )
    async with connected(world) as engine:
        assert engine.model.capabilities.after_thinking == frozenset()
        await check_refused(engine, opened)
        [each] = (await parts_of(engine, replace(opened, thinking=ThinkingStart.NONE))).values()
    assert each.text.strip('"') in ("four", "five"), "switched off, the answer begins at once"
    assert each.reasoning_token_count == 0


async def check_refused(engine: RemoteEngine, request: GenerationRequest) -> None:
    """Check that the format is refused by its name, with the remedy."""
    assert request.response_format is not None
    with pytest.raises(RequestImpossible, match=r"thinking off.*enable_thinking") as refused:
        await parts_of(engine, request)
    assert refused.value.field == request.response_format.field


@pytest.fixture
def splitting(thinking_server: ServerProcess) -> Iterator[RemoteWorld]:
    """Yield a server over HTTP that sends no token ids."""
    directory = thinking_server.certificates.directory.parent / "checkpoint"
    tiny = TinyCheckpoint(directory)
    settings = remote_settings(tiny, thinking_server, Service.OPENAI_HTTP, share_prefixes=True)
    yield RemoteWorld(thinking_server, settings)
    thinking_server.go_wrong()


@pytest.mark.parametrize(("choice_count", "is_whole"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("continuous", [[], ["refuse continuous_usage_stats"]])
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        # By name; split by Weir from the text; counted only, as by a server that hides thoughts.
        (["reasoning_content"], ("Hm.So.", "It is four. Or five.", 2)),
        (["reasoning_content", "reasoning"], ("Hm.So.", "It is four. Or five.", 2)),
        ([], ("Hm.So.", "It is four. Or five.", 4)),
        (["reasoning_hidden"], ("", "It is four. Or five.", 2)),
    ],
)
async def test_thinking_that_a_server_splits_itself_has_the_count_of_the_server(
    splitting: RemoteWorld,
    faults: list[str],
    expected: tuple[str, str, int],
    continuous: list[str],
    choice_count: int,
    is_whole: bool,
) -> None:
    request = requested(max_output_tokens=20, choice_count=choice_count)
    splitting.server.go_wrong(*SPLITTING, *faults, *continuous)
    async with connected(splitting) as engine:
        parts = await parts_of(engine, replace(request, is_whole=is_whole))
        is_streamed = splitting.server.state()["bodies"][-1]["stream"]
    assert is_streamed, "without ids, the messages show which tokens are thinking"
    reasoning, text, count = expected
    for each in parts.values():
        assert (each.reasoning, each.text.strip()) == (reasoning, text)
        assert len(each.token_ids) == 8
        assert each.reasoning_token_count == count or (not faults and continuous)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reasoning_total", "9 of 8 output tokens were thinking"),
        ("reasoning_zero", "0 of 8 output tokens were thinking, and has sent 2 to"),
    ],
)
async def test_a_count_of_thinking_that_contradicts_the_output_fails_it(
    splitting: RemoteWorld, fault: str, message: str
) -> None:
    splitting.server.go_wrong(*SPLITTING, "reasoning_content")
    async with connected(splitting) as engine:
        splitting.server.go_wrong(*SPLITTING, "reasoning_content", fault)
        with pytest.raises(EngineFailed, match=message):
            await parts_of(engine, requested(max_output_tokens=20))
        splitting.server.go_wrong(*SPLITTING, "reasoning_content")


async def test_a_split_thought_is_counted_where_output_is_cut(splitting: RemoteWorld) -> None:
    splitting.server.go_wrong(*SPLITTING, "reasoning_content")
    async with connected(splitting) as engine:
        parts = await parts_of(engine, requested(max_output_tokens=2))
    [each] = parts.values()
    assert (each.reasoning, each.text, each.reasoning_token_count) == ("Hm.", "", 1)
