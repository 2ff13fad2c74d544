"""Several outputs of one prompt: exact, with one computed prompt and one end."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from inference import engine
from inference.core.engine_core import EngineCore, NumberedEvent
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.sequences import choice_seed
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import check_deeply, make_core, make_request, random_prompt, run_all

HOT = engine.SamplingParams(temperature=1.0, seed=77)
PROMPT = random_prompt(random.Random(5), 200)


@dataclass(slots=True)
class Answers:
    """All events of one request."""

    scheduled: list[engine.Scheduled] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    ends: dict[int, engine.EngineFinishReason] = field(default_factory=dict)
    finished: list[engine.SequenceFinished] = field(default_factory=list)


def collect(events: list[NumberedEvent], answers: Answers, number: int = 0) -> None:
    for owner, event in events:
        if owner != number:
            continue
        assert not answers.finished, "nothing follows the last event"
        match event:
            case engine.Scheduled():
                answers.scheduled.append(event)
            case engine.TokensGenerated():
                assert event.choice_index not in answers.ends
                answers.token_ids[event.choice_index] += event.token_ids
                answers.texts[event.choice_index] += event.text
            case engine.ChoiceFinished():
                assert event.choice_index not in answers.ends
                answers.ends[event.choice_index] = event.reason
                answers.texts[event.choice_index] += event.text
            case engine.SequenceFinished():
                answers.finished.append(event)
            case engine.SequenceRefused():
                raise AssertionError(event.message)


def run(core: EngineCore, request: engine.GenerationRequest, number: int = 0) -> Answers:
    answers = Answers()
    assert core.add(number, request)
    while not core.idle:
        collect(core.step(), answers, number)
        check_deeply(core.pool, [sequence.block_table for sequence in core.scheduler.running])
    return answers


def test_each_choice_is_what_its_seed_gives_alone(tiny: TinyCheckpoint) -> None:
    answers = run(make_core(tiny.directory), make_request(PROMPT, 30, sampling=HOT, choice_count=5))

    for index in range(5):
        sampling = engine.SamplingParams(temperature=1.0, seed=choice_seed(77, index))
        alone = run_all(make_core(tiny.directory), [make_request(PROMPT, 30, sampling=sampling)])[0]
        assert answers.token_ids[index] == alone.token_ids
        assert answers.texts[index] == alone.text
    assert choice_seed(77, 0) == 77, "the first choice is what a single one would be"
    assert len({tuple(ids) for ids in answers.token_ids.values()}) == 5


def test_company_and_preemption_change_nothing(tiny: TinyCheckpoint) -> None:
    """Three requests of four choices each in a pool of one context."""
    requests = [
        make_request(PROMPT[: 60 + row], 120, sampling=HOT, choice_count=4) for row in range(3)
    ]
    alone = [run(make_core(tiny.directory), request) for request in requests]
    crowded = make_core(
        tiny.directory, kv_cache_bytes=1, context_window_tokens=512, owed_output_token_count_max=1
    )
    together = [Answers() for _ in requests]

    for number, request in enumerate(requests):
        crowded.add(number, request)
    while not crowded.idle:
        events = crowded.step()
        for number, answers in enumerate(together):
            collect(events, answers, number)

    assert crowded.statistics().preemption_count > 0
    assert [answers.token_ids for answers in together] == [answers.token_ids for answers in alone]


def test_the_prompt_is_counted_once_and_its_blocks_are_shared(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory)
    answers = Answers()
    core.add(0, make_request(PROMPT, 20, sampling=HOT, choice_count=6))
    for _ in range(6):
        collect(core.step(), answers)

    full_blocks = (len(PROMPT) - 1) // KV_BLOCK_TOKENS
    assert core.pool.block_count_held <= full_blocks + 6 * 2, (
        "one copy of the prompt, and two blocks of its own per choice"
    )
    while not core.idle:
        collect(core.step(), answers)
    assert answers.scheduled == [engine.Scheduled(0)]
    [finished] = answers.finished
    assert (finished.prompt_token_count, finished.cached_token_count) == (200, 0)
    assert finished.generated_token_count == 6 * 20 == core.statistics().output_token_count
    assert (core.statistics().prompt_token_count, core.statistics().cached_token_count) == (200, 0)
    assert core.pool.block_count_held == 0


def test_each_choice_has_its_own_end(tiny: TinyCheckpoint) -> None:
    stops = frozenset(range(7, 22))
    request = make_request(PROMPT, 25, sampling=HOT, stop_token_ids=stops, choice_count=8)

    answers = run(make_core(tiny.directory), request)

    assert set(answers.ends) == set(range(8))
    assert set(answers.ends.values()) == {
        engine.EngineFinishReason.STOP,
        engine.EngineFinishReason.LENGTH,
    }
    for index, reason in answers.ends.items():
        assert (answers.token_ids[index][-1] in stops) == (reason is engine.EngineFinishReason.STOP)
        assert not stops & set(answers.token_ids[index][:-1])
    assert answers.finished[0].reason is answers.ends[0]
    assert answers.finished[0].generated_token_count == sum(map(len, answers.token_ids.values()))


@pytest.mark.parametrize("step_count", [0, 1, 2, 10])
def test_a_cancel_ends_all_of_them(tiny: TinyCheckpoint, step_count: int) -> None:
    core = make_core(tiny.directory, step_token_count_max=64)
    answers = Answers()
    core.add(0, make_request(PROMPT, 100, sampling=HOT, choice_count=3))
    for _ in range(step_count):
        collect(core.step(), answers)

    core.cancel(0)

    assert core.idle
    assert core.pool.block_count_held == 0
    collect(core.step(), answers)
    assert answers.ends == dict.fromkeys(range(3), engine.EngineFinishReason.CANCELLED)
    assert answers.finished[0].reason is engine.EngineFinishReason.CANCELLED
    assert answers.finished[0].generated_token_count == sum(map(len, answers.token_ids.values()))
    tokenizer = Tokenizer(tiny.directory)
    assert all(
        answers.texts[index] == tokenizer.decode(ids) for index, ids in answers.token_ids.items()
    )


def test_each_choice_follows_the_format_by_itself(tiny: TinyCheckpoint) -> None:
    own_format = engine.ResponseFormat(engine.GrammarKind.REGEX, "[a-c]{4}x")

    answers = run(
        make_core(tiny.directory),
        make_request(
            PROMPT, 30, sampling=HOT, ignore_eos=False, response_format=own_format, choice_count=6
        ),
    )

    assert all(len(text) == 5 and text.endswith("x") for text in answers.texts.values())
    assert len(set(answers.texts.values())) > 1
    assert set(answers.ends.values()) == {engine.EngineFinishReason.STOP}


def test_a_broken_format_ends_all_choices_once(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(tiny.directory)
    own_format = engine.ResponseFormat(engine.GrammarKind.REGEX, "[a-c]{40}")
    core.add(
        0,
        make_request(
            PROMPT, 60, sampling=HOT, ignore_eos=False, response_format=own_format, choice_count=3
        ),
    )
    for _ in range(4):
        core.step()
    monkeypatch.setattr(
        "inference.sampling.grammar.Grammar.fault", property(lambda self: "too many items")
    )

    events = core.step()

    assert [type(event) for _, event in events] == [engine.SequenceRefused]
    assert core.idle
    assert core.pool.block_count_held == 0


def test_choices_count_in_the_queue(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory, waiting_sequence_count_max=4)

    assert [
        core.add(number, make_request(PROMPT, 5, sampling=HOT, choice_count=2))
        for number in range(3)
    ] == [True, True, False]
