"""Engines under random traffic: each request gets the output that it gets alone.

`WEIR_TEST_SEEDS=41,42,43 pytest tests/inference/test_request_independence.py` runs other seeds.
In fp32: where two likely tokens are equal to the last bits, the order of additions may decide, so
that one of very many seeds could differ without a fault.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from inference import engine
from inference.core.engine_core import EngineCore, NumberedEvent
from inference.core.model_runner import ModelRunner
from inference.core.scheduler import StepPlan
from inference.core.sequence import Sequence
from inference.sampling.sampler import Chosen, SeenTokens
from tests.inference.checkpoints import LlamaShape, TinyCheckpoint, make_checkpoint
from tests.inference.running import check_deeply, make_core, make_request, random_prompt
from tests.inference.test_reference_tokens import WAYS, choose_way

SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1,2,3,4").split(",")]
REQUESTS = 30
RUNNING_MAX = 6

SEEN_BY_ALL = SeenTokens([])
CALLS = itertools.count()


class Differs(AssertionError):
    """A request got another output than alone."""


@dataclass(slots=True)
class Answer:
    """Outputs of one request, by choice."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprob_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, engine.EngineFinishReason] = field(default_factory=dict)
    finished: engine.SequenceFinished | None = None

    def take(self, event: object) -> None:
        """Add one event, in order."""
        assert self.finished is None, "nothing follows the last event"
        if isinstance(event, engine.SequenceRefused):
            raise Differs(event.message)
        match event:
            case engine.TokensGenerated():
                index = event.choice_index
                self.token_ids.setdefault(index, []).extend(event.token_ids)
                self.text[index] = self.text.get(index, "") + event.text
                self.logprob_ids.setdefault(index, []).extend(
                    each.chosen.token_id for each in event.logprobs
                )
            case engine.ChoiceFinished():
                self.text[event.choice_index] = self.text.get(event.choice_index, "") + event.text
                self.reasons[event.choice_index] = event.reason
            case engine.SequenceFinished():
                self.text[0] = self.text.get(0, "") + event.text
                self.reasons.setdefault(0, event.reason)
                self.finished = event
            case _:
                assert isinstance(event, engine.Scheduled)


@dataclass(frozen=True, slots=True)
class Kind:
    """Statistics of a run. reasons: number of choices per finish reason."""

    preemption_count: int
    cached_token_count: int
    reasons: Counter[engine.EngineFinishReason]


def random_request(
    rng: random.Random, heads: list[list[int]], longest: int
) -> engine.GenerationRequest:
    """Return any mixture of request options. heads: beginnings that prompts share."""
    head = rng.choice(heads)[: rng.choice([0, 16, 31, 32, 48])]
    prompt = head + random_prompt(rng, rng.choice([1, 15, 16, 17, 40]))
    sampling = engine.SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.02]),
        seed=rng.randrange(2**31),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=rng.choice([(), ((9, 2.0), (11, -3.0))]),
        top_logprobs=rng.choice([None, None, 2]),
    )
    formatted = rng.random() < 0.15
    return make_request(
        prompt,
        rng.choice([1, 8, 40, longest - len(prompt)]),
        sampling=sampling,
        stop_sequences=rng.choice([(), (), ("e", "the"), (" a",)]),
        stop_token_ids=frozenset() if formatted else rng.choice([frozenset(), frozenset({30, 31})]),
        ignore_eos=not formatted and rng.random() < 0.5,
        cache_salt=rng.choice(["", "a", "b"]),
        response_format=engine.ResponseFormat(engine.GrammarKind.REGEX, "[a-f ]{3,60}")
        if formatted
        else None,
        choice_count=rng.choice([1, 1, 1, 2, 3]),
    )


def take_all(events: list[NumberedEvent], answers: dict[int, Answer]) -> None:
    for number, event in events:
        answers[number].take(event)


def answer_alone(core: EngineCore, number: int, request: engine.GenerationRequest) -> Answer:
    """Return a request's output in an idle engine, under an unused salt."""
    answers = {number: Answer()}
    assert core.add(number, replace(request, cache_salt=f"alone {number}"))
    while not core.idle:
        take_all(core.step(), answers)
    return answers[number]


def begins(partial: Answer, whole: Answer) -> bool:
    """Return whether a cancelled output is a prefix of the whole one."""
    return all(
        whole.token_ids.get(index, [])[: len(ids)] == ids
        and whole.text[index].startswith(partial.text[index].rstrip("\ufffd"))
        for index, ids in partial.token_ids.items()
        if index not in partial.reasons
        or partial.reasons[index] is engine.EngineFinishReason.CANCELLED
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """Return a checkpoint with a sliding window that ends within a block."""
    shape = LlamaShape(architecture="MistralForCausalLM", sliding_window=40)
    return make_checkpoint(tmp_path_factory.mktemp("windowed"), seed=12, shape=shape)


def run(seed: int, directory: Path) -> Kind:
    """Run bursts of arrivals, cancels and all kinds of sampling in a small pool."""
    rng = random.Random(seed)
    crowded = make_core(
        directory,
        kv_cache_bytes=1,
        step_token_count_max=rng.choice([16, 64]),
        running_sequence_count_max=RUNNING_MAX,
        context_window_tokens=256,
        owed_output_token_count_max=1,
    )
    heads = [random_prompt(rng, 48) for _ in range(2)]
    requests: list[engine.GenerationRequest] = []
    answers: dict[int, Answer] = {}
    cancelled: set[int] = set()

    while len(requests) < REQUESTS or not crowded.idle:
        if len(requests) < REQUESTS and (crowded.idle or rng.random() < 0.2):
            request = random_request(rng, heads, longest=200)
            assert crowded.request_fault(request) is None
            answers[len(requests)] = Answer()
            assert crowded.add(len(requests), request)
            requests.append(request)
        if rng.random() < 0.02:
            cancelled.add(number := rng.randrange(len(requests)))
            crowded.cancel(number)
        take_all(crowded.step(), answers)
        check_deeply(crowded.pool, [sequence.block_table for sequence in crowded.scheduler.running])

    alone = make_core(directory)
    for number, request in enumerate(requests):
        expected, got = answer_alone(alone, number, request), answers[number]
        assert got.finished is not None
        if number in cancelled and engine.EngineFinishReason.CANCELLED in got.reasons.values():
            same = begins(got, expected)
        else:
            same = replace(got, finished=None) == replace(expected, finished=None)
            assert got.finished.generated_token_count == sum(map(len, got.token_ids.values()))
        if not same:
            raise Differs(f"request {number} of seed {seed}: {got}, alone {expected}")
    return Kind(
        crowded.scheduler.preemption_count,
        crowded.statistics().cached_token_count,
        Counter(reason for answer in answers.values() for reason in answer.reasons.values()),
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_request_gets_what_it_gets_alone(
    way: str, tiny: TinyCheckpoint, windowed: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_way(way, monkeypatch)

    kinds = [run(seed, (tiny, windowed)[seed % 2].directory) for seed in SEEDS]

    # The runs had the intended variety.
    assert sum(kind.preemption_count for kind in kinds) > 0
    assert sum(kind.cached_token_count for kind in kinds) > 0
    assert len(set().union(*(kind.reasons for kind in kinds))) == len(engine.EngineFinishReason), (
        "every way to end"
    )


def reversed_run(runner: ModelRunner, plan: StepPlan) -> dict[Sequence, Chosen]:
    """Planted fault: tokens go to the wrong sequences."""
    chosen = original_run(runner, plan)
    return dict(zip(chosen, reversed(chosen.values()), strict=True))


original_run = ModelRunner.run
FAULTS = {
    "seeds depend on what came before": (
        "inference.core.engine_core.choice_seed",
        lambda seed, choice_index: next(CALLS),
    ),
    "tokens go to the neighbour": ("inference.core.model_runner.ModelRunner.run", reversed_run),
    "penalties see the tokens of others": (
        "inference.core.sequence.SeenTokens",
        lambda token_ids: SEEN_BY_ALL,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_in_which_requests_touch_each_other_is_seen(
    name: str, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults."""
    target, fault = FAULTS[name]
    monkeypatch.setattr(target, fault)

    with pytest.raises(Differs):
        run(2, tiny.directory)
