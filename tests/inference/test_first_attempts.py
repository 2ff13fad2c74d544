"""A newcomer's first structured outputs and tool calls with the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import inference.demo_model
from demo.first_attempts import (
    CALLS,
    Output,
    answer_requests,
    call_requests,
    calls_in,
    generate,
    is_valid,
    object_of,
    structured_requests,
)
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import GenerationRequest
from inference.text.tokenizer import Tokenizer

WEIGHTS = Path(inference.demo_model.__file__).parent / "weights"
MODES = ("auto", "required", "named")


async def outputs_of(requests: Sequence[GenerationRequest]) -> list[Output]:
    """Run requests in an engine of their own."""
    engine = TorchEngine(TorchEngineSettings(WEIGHTS, "demo", torch_thread_count=1))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        outputs = await generate(engine, requests)
        await engine.close()
    return outputs


async def test_first_structured_outputs_are_valid_within_200_tokens() -> None:
    """Every tenth of 100 requests, greedy and at temperature 0.7."""
    tokenizer = Tokenizer(WEIGHTS)
    requested = [each for at in (0.0, 0.7) for each in structured_requests(tokenizer, at)[::10]]

    outputs = await outputs_of([request for _, _, request in requested])

    pairs = zip(requested, outputs, strict=True)
    wrong = [output for (schema, _, _), output in pairs if not is_valid(schema, output)]
    assert len(outputs) == 20
    assert len(wrong) <= 1, wrong


async def test_first_calls_name_the_function_and_are_answered() -> None:
    tokenizer = Tokenizer(WEIGHTS)
    requests = [request for mode in MODES for request in call_requests(tokenizer, mode, 0.0)[::10]]
    answers = answer_requests(tokenizer)[::10]

    outputs = await outputs_of([*requests, *answers])

    expected = [call for _, call, _, _ in CALLS[::10]]
    for number, mode in enumerate(MODES):
        made = [calls_in(mode, each) for each in outputs[number * len(expected) :][: len(expected)]]
        assert [[call.name for call in calls] for calls in made] == [[one.name] for one in expected]
    for output, (_, _, _, word) in zip(outputs[len(requests) :], CALLS[::10], strict=True):
        assert output.ended
        assert word in output.text


def test_an_answer_that_is_cut_off_or_breaks_its_schema_is_not_valid() -> None:
    schema = object_of(age={"type": "integer"})

    marks = [
        is_valid(schema, Output(text, ended))
        for text, ended in (
            ('{"age": 3}', True), ('{"age": 3}', False), ('{"age": 3', True), ('{"age": "3"}', True)
        )
    ]  # fmt: skip

    assert marks == [True, False, False, False]
    assert calls_in("auto", Output('<tool_call>{"name": "add", "arguments": {"a": 1', True)) == []
    assert calls_in("named", Output('{"name": "add"', True)) == []
