"""Beam search finds what the reference finds, token for token, on KV blocks that its beams share; and one end for all of them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engine import (
    BeamSearchParams,
    ChoiceFinished,
    EarlyStopping,
    EngineFinishReason,
    GenerationRequest,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    TokensGenerated,
)
from inference.engine_core import EngineCore, NumberedEvent, SequenceBroken
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_core, make_request, random_prompt

ENDS = frozenset(range(7, 30))  # so many that outputs of a random model end now and then
REFERENCE_STOPPING: dict[EarlyStopping, bool | str] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.WHEN_FULL: True,
    EarlyStopping.NEVER: "never",
}


@dataclass(slots=True)
class Found:
    """Everything that one request reported. told: how many tokens had come before the step that ended it."""

    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, EngineFinishReason] = field(default_factory=dict)
    finished: SequenceFinished | None = None
    told: int = 0


def collect(events: Iterable[NumberedEvent], found: dict[int, Found]) -> None:
    for number, event in events:
        one = found[number]
        assert one.finished is None, "nothing follows the last event"
        match event:
            case TokensGenerated():
                assert event.choice_index not in one.ends
                one.token_ids[event.choice_index] += event.token_ids
                one.texts[event.choice_index] += event.text
                one.logprobs[event.choice_index] += [report.chosen.logprob for report in event.logprobs]
            case ChoiceFinished():
                one.ends[event.choice_index] = event.reason
                one.texts[event.choice_index] += event.text
            case SequenceFinished():
                one.finished = event
                one.texts[0] += event.text
            case Scheduled():
                pass
            case SequenceBroken():
                raise AssertionError(event.message)


def search(core: EngineCore, requests: list[GenerationRequest]) -> list[Found]:
    """Run all at once; every block is accounted for after every step."""
    found = {number: Found() for number in range(len(requests))}
    for number, request in enumerate(requests):
        assert core.request_fault(request) is None
        assert core.add(number, request)
    while not core.idle:
        before = {number: sum(map(len, one.token_ids.values())) for number, one in found.items()}
        ended = {number for number, one in found.items() if one.finished is not None}
        collect(core.step(), found)
        for number, one in found.items():
            if one.finished is not None and number not in ended:
                one.told = before[number]
        core.pool.check_deeply(sequence.block_table for sequence in core.scheduler.running)
        places = sum(sequence.place_count for sequence in core.scheduler.running)
        assert places <= core._limits.running_sequence_count_max
    assert core.pool.block_count_held == 0
    return list(found.values())


@lru_cache(maxsize=4)
def reference_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)


def reference(directory: Path, request: GenerationRequest) -> list[list[int]]:
    """What `transformers` returns for the same search: outputs without what fills them up."""
    params, prompt, stop = request.beam_search, list(request.prompt_token_ids), request.stop
    assert params is not None
    ids = torch.tensor([prompt])
    biases = {(token_id,): bias for token_id, bias in request.sampling.logit_bias} or None
    generated = reference_model(directory).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=stop.max_output_tokens,
        min_new_tokens=stop.min_output_tokens or None,
        num_beams=params.width,
        num_return_sequences=request.choice_count,
        length_penalty=params.length_penalty,
        early_stopping=REFERENCE_STOPPING[params.early_stopping],
        repetition_penalty=request.sampling.repetition_penalty,
        sequence_bias=biases,
        eos_token_id=sorted(stop.stop_token_ids) or None,
        pad_token_id=0,
    )
    outputs = []
    for row in generated[:, len(prompt) :].tolist():
        last = next((index for index, token_id in enumerate(row) if token_id in stop.stop_token_ids), len(row) - 1)
        outputs.append(row[: last + 1])
    return outputs


def beam_request(
    prompt: list[int],
    width: int,
    max_output_tokens: int = 24,
    *,
    choice_count: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    ends: frozenset[int] = ENDS,
    min_output_tokens: int = 0,
    sampling: SamplingParams | None = None,
) -> GenerationRequest:
    from dataclasses import replace

    plain = make_request(
        prompt,
        max_output_tokens,
        stop_token_ids=ends,
        min_output_tokens=min_output_tokens,
        choice_count=choice_count,
        sampling=sampling,
    )
    return replace(plain, beam_search=BeamSearchParams(width, length_penalty, early_stopping))


def outputs(found: Found) -> list[list[int]]:
    return [found.token_ids[index] for index in sorted(found.token_ids)]


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_outputs_equal_transformers(
    tiny: TinyCheckpoint, early_stopping: EarlyStopping, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths, penalties and prompt lengths on both sides of a block's border, all in one batch."""
    if not native:
        monkeypatch.setattr("inference.model_runner.supports", lambda config, dtype: False)
    rng = random.Random(4)
    requests = []
    for width, choice_count in ((2, 1), (3, 3), (4, 2), (8, 5)):
        for length_penalty in (-1.0, 0.0, 0.6, 1.0, 2.5):
            requests.append(
                beam_request(
                    random_prompt(rng, rng.choice((1, 7, 15, 16, 17, 40))),
                    width,
                    rng.choice((1, 9, 24)) if length_penalty else 24,
                    choice_count=choice_count,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                    ends=ENDS if rng.random() < 0.8 else frozenset(),
                )
            )

    found = search(make_core(tiny.directory), requests)

    for one, request in zip(found, requests, strict=True):
        assert outputs(one) == reference(tiny.directory, request)
