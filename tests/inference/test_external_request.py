"""Sequences of external engines: begun ones are reported, and thinking is told from the answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference import engine
from inference.adapters.external_queue import AbortLimits, ExternalQueue
from inference.adapters.external_request import Choice, Output, Request
from inference.errors import EngineFailed
from inference.limits import EngineLimits
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.inference.reasoning_families import FAMILIES, Family
from tests.inference.running import make_core, make_request

GPT_OSS = next(each for each in FAMILIES if each.name == "gpt-oss, several messages")
QWEN3 = FAMILIES[0]


@pytest.mark.parametrize("submitted_at_s", [None, 1.0], ids=["waiting here", "in the engine"])
def test_a_cancelled_sequence_was_begun_if_the_engine_had_it(
    tiny: TinyCheckpoint, submitted_at_s: float | None
) -> None:
    request = Request(1, make_request((30, 31, 32), 5), frozenset({2}), 0.0, 4096, submitted_at_s)
    choice = Choice(request, 0, 1, make_core(tiny.directory)._decoder.open())
    request.choices = [choice]
    choice.ended = engine.EngineFinishReason.CANCELLED

    *before, last = request.finish(choice, 2.0)

    assert isinstance(last, engine.SequenceFinished)
    assert before == ([] if submitted_at_s is None else [engine.Scheduled(0)])


def opened(family: Family, **stop: Any) -> Choice:
    """Return the only choice of a conversation, as the core opens it."""
    request = make_request(family.prompt_ids, 1000, ignore_eos=False, **stop)
    ends = frozenset({family.id_of("<|end|>")} if family is QWEN3 else ())
    made = Request(1, request, ends, 0.0, None)
    made.answer_end_token_ids = request.stop.stop_token_ids
    detokenizer = family.decoder.open(request.stop.stop_sequences, family.prompt_ids, splits=True)
    made.choices = [Choice(made, 0, 1, detokenizer)]
    return made.choices[0]


@pytest.mark.parametrize("family", [QWEN3, GPT_OSS], ids=repr)
def test_an_answer_of_the_engine_cut_at_any_token_has_the_same_parts(family: Family) -> None:
    ids = family.ids
    for cut in range(1, len(ids)):
        choice = opened(family)
        events = choice.take(Output(ids[:cut]), 1.0)
        events += choice.take(Output(ids, "length"), 1.0)
        generated = [event for event in events if isinstance(event, engine.TokensGenerated)]
        rest = choice.rest()

        assert [id_ for event in generated for id_ in event.token_ids] == ids
        thought = "".join(event.reasoning for event in generated) + rest.reasoning
        answer = "".join(event.text for event in generated) + rest.text
        assert (thought, answer) == (family.reasoning, family.answer)
        # An event has its thinking before its text.
        order = [part for event in generated for part in (event.reasoning, event.text) if part]
        whole = "".join(order) + rest.text
        if family is GPT_OSS:
            assert whole == "Hm.I look.\nSo.\n4"


def test_an_end_token_of_the_request_ends_the_answer_only() -> None:
    ids = QWEN3.ids
    hm, it = ids[2], QWEN3.backend.encode("It").ids[-1]
    choice = opened(QWEN3, stop_token_ids=frozenset({hm, it}))

    events = choice.take(Output(ids), 1.0)

    assert choice.ended is engine.EngineFinishReason.STOP
    [event] = [event for event in events if isinstance(event, engine.TokensGenerated)]
    assert event.reasoning == QWEN3.reasoning
    assert event.token_ids[-1] == it


async def test_the_engine_gets_no_end_tokens_that_a_thought_may_have(tmp_path: Path) -> None:
    """It would end the output in the thinking."""
    template = "{{ messages[0].content }}<think>\n"
    checkpoint = make_checkpoint(tmp_path, chat_template=template)
    decoder = Tokenizer(tmp_path).decoder
    submitted: list[Choice] = []

    def submit(choice: Choice) -> Any:
        submitted.append(choice)
        raise EngineFailed("the test ends here")

    limits = EngineLimits(context_window_tokens=2048)
    prompt = tuple(decoder.reasoning.backend.encode("a<think>\n").ids)  # type: ignore[union-attr]
    form = engine.ResponseFormat(engine.GrammarKind.REGEX, "a")
    async with asyncio.TaskGroup() as tasks:
        core = ExternalQueue(
            submit,
            decoder=decoder,
            vocabulary_size=checkpoint.vocabulary_size,
            model_end_token_ids=frozenset({2}),
            limits=limits,
            abort_limits=AbortLimits(),
            sink=lambda *_: None,
            broken=lambda _: None,
            tasks=tasks,
        )
        requested = make_request(prompt, 9, ignore_eos=False, stop_token_ids=frozenset({2, 40}))
        core.add(1, requested, 0.0)
        core.add(2, replace(requested, splits_reasoning=True), 0.0)
        core.add(3, replace(requested, splits_reasoning=True, response_format=form), 0.0)

    plain, split, constrained = submitted
    assert plain.request.end_token_ids == frozenset({2, 40})
    assert split.request.end_token_ids == frozenset({2})
    assert split.request.answer_end_token_ids == frozenset({40})
    assert split.detokenizer.thinks
    assert not constrained.detokenizer.thinks, "a grammar begins at the first token"
