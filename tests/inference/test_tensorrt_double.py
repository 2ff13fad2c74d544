"""The double has the names, parameters and defaults of NVIDIA's interface of 1.2.1.

Its behaviour is that of NVIDIA's tests of aborts, errors, statistics and cache events in
`tests/unittest/llmapi/test_llm.py`: these were run against it, with token ids as prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.tensorrt_engines import DOUBLE
from tests.inference.tensorrt_queue import double_imported
from tests.inference.worker_engines import prompt

PUBLISHED: dict[str, Any] = json.loads((DOUBLE / "api.json").read_text())["classes"]
METHODS = [name for name, spec in PUBLISHED.items() if "." in name and "params" in spec]
HOMES = {
    "GenerationResult": ("results", "RequestOutput"),
    "IterationResult": ("results", "IterationResult"),
    "LLM": ("llm", "LLM"),
}
CLASSES = [
    "SamplingParams",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "SchedulerConfig",
    "LoRARequest",
]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with double_imported(monkeypatch) as module:
        yield module


def differences(function: Any, published: dict[str, Any]) -> list[str]:
    """Return the differences between a function's parameters and the published ones."""
    ours = [
        parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    ]
    theirs = published["params"]
    found = []
    if [parameter.name for parameter in ours] != [spec["name"].lstrip("*") for spec in theirs]:
        found.append(
            f"parameters {[parameter.name for parameter in ours]}, published"
            f" {[spec['name'] for spec in theirs]}"
        )
    for parameter, spec in zip(ours, theirs, strict=False):
        default = None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        if default != spec["default"]:
            found.append(f"{parameter.name} = {default}, published {spec['default']}")
    if inspect.iscoroutinefunction(function) != published["async"]:
        found.append("one is a coroutine function, the other is not")
    return found


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_the_published_ones(double: Any, name: str) -> None:
    owner, _, method = name.partition(".")
    module, own_name = HOMES[owner]
    home = getattr(__import__(f"tensorrt_llm.{module}", fromlist=[own_name]), own_name)

    assert differences(getattr(home, method), PUBLISHED[name]) == []


def test_a_difference_is_found() -> None:
    def generate_async(self: Any, inputs: Any, priority: int = 0) -> None: ...

    assert differences(generate_async, PUBLISHED["LLM.generate_async"])


@pytest.mark.parametrize("name", CLASSES)
def test_parameter_classes_have_the_published_fields(double: Any, name: str) -> None:
    from tensorrt_llm import llmapi

    fields = {field.name: field for field in dataclasses.fields(getattr(llmapi, name))}

    assert list(fields) == list(PUBLISHED[name]["fields"])
    for field_name, spec in PUBLISHED[name]["fields"].items():
        if spec["default"] is not None and not spec["default"].startswith(
            ("factory:", "CapacitySchedulerPolicy")
        ):
            assert repr(fields[field_name].default) == spec["default"], field_name


def test_all_that_the_adapter_imports_is_exported_by_the_release(double: Any) -> None:
    exports = json.loads((DOUBLE / "api.json").read_text())["exports"]["tensorrt_llm.llmapi"]
    from tensorrt_llm import llmapi

    assert set(llmapi.__all__) <= set(exports)


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 1.5},
        {"top_k": -1},
        {"temperature": -0.1},
        {"n": 2},
        {"best_of": 1, "n": 2, "temperature": 1.0},
        {"surprise": 1},
    ],
)
def test_parameters_are_refused_as_by_the_release(double: Any, values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        double.SamplingParams(**values)


@pytest.mark.parametrize("argument", ["batching_type", "build_config", "cache_salt"])
def test_arguments_that_the_release_refuses_are_refused(double: Any, argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        double.LLM("nowhere", **{argument: None})


@contextlib.contextmanager
def loaded(double: Any, tiny: TinyCheckpoint, **arguments: Any) -> Iterator[Any]:
    """Yield an engine of the double."""
    from tensorrt_llm import llmapi

    sizes = {"max_seq_len": 2048, "max_num_tokens": 256, "max_batch_size": 4}
    options = {
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": llmapi.KvCacheConfig(event_buffer_max_size=64),
    }
    llm = double.LLM(tiny.directory, **(sizes | options | arguments))
    try:
        yield llm
    finally:
        llm.shutdown()


async def test_an_abort_after_its_request_cancels_it(double: Any, tiny: TinyCheckpoint) -> None:
    with loaded(double, tiny) as llm:
        result = llm.generate_async(prompt(1), double.SamplingParams(max_tokens=100, end_id=-1))
        result.abort()
        answers = [each async for each in result]

    assert 1 <= len(answers) < 100
    assert answers[-1].outputs[0].finish_reason == "cancelled"


async def test_statistics_cover_each_iteration(double: Any, tiny: TinyCheckpoint) -> None:
    with loaded(double, tiny) as llm:
        for _ in range(2):
            await llm.generate_async(prompt(1, 54), double.SamplingParams(max_tokens=6))
            found = [each async for each in llm.get_stats_async(1.0)]
            assert [each["numActiveRequests"] for each in found] == [1] * 6
            assert [each["numCompletedRequests"] for each in found] == [0, 0, 0, 0, 0, 1]
            batches = [each["inflightBatchingStats"] for each in found]
            assert [each["numContextRequests"] for each in batches] == [1, 0, 0, 0, 0, 0]
            assert [each["numGenRequests"] for each in batches] == [0, 1, 1, 1, 1, 1]
            assert not [each async for each in llm.get_stats_async(0.1)]


async def test_cache_events_begin_with_its_creation(double: Any, tiny: TinyCheckpoint) -> None:
    with loaded(double, tiny) as llm:
        await llm.generate_async(prompt(1, 54), double.SamplingParams(max_tokens=6))
        events = llm.get_kv_cache_events(1.0)

    assert [each["event_id"] for each in events] == [*range(len(events))]
    assert [each["data"]["type"] for each in events] == ["created", "stored", "stored", "stored"]


async def test_refused_requests_are_refused_alike(double: Any, tiny: TinyCheckpoint) -> None:
    from tensorrt_llm import llmapi

    with loaded(double, tiny, max_num_tokens=64, enable_chunked_prefill=False) as llm:
        with pytest.raises(llmapi.RequestError):
            await llm.generate_async(prompt(1, 65))
        with pytest.raises(RuntimeError, match="Token ID out of range"):
            llm.generate_async([-1])
        async with asyncio.timeout(60.0):
            await llm.generate_async(prompt(1, 64), double.SamplingParams(max_tokens=1))
        llm.shutdown()
        with pytest.raises(RuntimeError):
            llm.generate_async(prompt(1))
