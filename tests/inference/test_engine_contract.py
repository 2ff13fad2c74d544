"""Contract of all engines: refusal, cancellation, closing and ends of sequences.

The same tests run on every backend: torch, the simulated engine and TensorRT-LLM's double in child
processes, remote engines over all services, and real servers if installed (`make test-peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from bench import engine_streams as streams
from bench.engine_streams import SequenceStream
from common.incidents import INCIDENT_COUNTS
from inference.adapters.remote_settings import RemoteSettings, Service
from inference.adapters.tensorrt_settings import TensorRtSettings
from inference.adapters.torch_engine import TorchEngineSettings
from inference.capabilities import used_fields
from inference.core.options import CostModel
from inference.engine import (
    ChoiceFinished,
    Engine,
    EngineFinishReason,
    SamplingParams,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, EngineOverloaded, RequestImpossible
from tests.inference import engine_matrix, worker_engines
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.real_servers import AVAILABLE, WITH_RANDOM_OUTPUTS, real_settings
from tests.inference.remote_engines import RemoteWorld, connected, remote_engine, remote_settings
from tests.inference.running import make_request
from tests.inference.tensorrt_engines import find_double, tensorrt_settings
from tests.inference.worker_engines import (
    LONG,
    first_tokens,
    prompt,
    read_all,
    run,
    settings_for,
    until,
)

# Some 1.5 ms a step: the middle of a long answer can be hit.
SLOW_ENOUGH = CostModel(time_scale=0.2)

Settings = TorchEngineSettings | TensorRtSettings | RemoteWorld | RemoteSettings
Backend = Callable[..., Settings]


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Engine]:
    """Yield a ready engine."""
    if isinstance(settings, RemoteWorld):
        async with connected(settings) as engine:
            yield engine
    elif isinstance(settings, RemoteSettings):
        async with remote_engine(settings) as engine:
            yield engine
    else:
        async with worker_engines.serving(settings) as engine:
            yield engine


def is_external(settings: Settings) -> bool:
    """Return whether the engine is external: it emits nothing before the first token."""
    return not isinstance(settings, TorchEngineSettings)


def without_steps(changes: dict[str, Any]) -> dict[str, Any]:
    """Drop step limits, which do not apply to remote engines."""
    return {name: value for name, value in changes.items() if name != "step_token_count_max"}


@pytest.fixture(
    params=[
        *("torch", "simulated", "tensorrt", "remote-trtllm", "remote-vllm", "remote-sglang"),
        "remote-openai+http",
        *AVAILABLE,
    ]
)
def backend(
    request: pytest.FixtureRequest, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> Backend:
    """Return settings of an engine, with changes."""
    if request.param in AVAILABLE:
        servers = request.getfixturevalue("real_servers")
        return lambda **changes: real_settings(servers, request.param, **without_steps(changes))
    if request.param == "tensorrt":
        find_double(monkeypatch)
        return lambda **changes: tensorrt_settings(tiny, **changes)
    if request.param.startswith("remote-"):
        service, server = (
            Service(request.param.removeprefix("remote-")),
            request.getfixturevalue("remote_server"),
        )
        return lambda **changes: RemoteWorld(
            server, remote_settings(tiny, server, service, **without_steps(changes))
        )
    chosen: dict[str, Any] = {"simulation": SLOW_ENOUGH} if request.param == "simulated" else {}
    return lambda **changes: settings_for(tiny, **(chosen | changes))


@pytest.fixture
def repeats(request: pytest.FixtureRequest) -> None:
    """Skip engines whose outputs cannot be compared."""
    if request.node.callspec.params["backend"] in WITH_RANDOM_OUTPUTS:
        pytest.skip("its outputs are random")


async def test_a_cancel_is_answered_in_every_phase_and_frees_the_blocks(backend: Backend) -> None:
    settings = backend(running_sequence_count_max=1, step_token_count_max=16)
    async with serving(settings) as engine:
        async with streams.stream(engine, make_request(prompt(1), LONG)) as decoding:
            read_count = await first_tokens(decoding, 3)
            async with streams.stream(engine, make_request(prompt(2), LONG)) as waiting:
                waiting.cancel()
                waited = await read_all(waiting)
            decoding.cancel()
            decoding.cancel()
            decoded = await read_all(decoding)
        # External engines take the prompt at once, and would finish a short answer before the
        # cancel arrives.
        filler = (
            make_request(prompt(3, 500), LONG)
            if is_external(settings)
            else make_request(prompt(3, 1900), 100)
        )
        async with streams.stream(engine, filler) as filling:
            async for _ in filling:  # scheduled: here its prompt needs over a hundred steps
                break
            filling.cancel()
            filled = await read_all(filling)
        await until(lambda: engine.statistics().kv_block_count_held == 0)
        statistics = engine.statistics()

    for outcome in (waited, decoded, filled):
        assert outcome.finished is not None
        assert outcome.finished.reason is EngineFinishReason.CANCELLED
    assert waited.token_ids == []
    assert not filled.token_ids or is_external(settings)
    assert decoded.finished is not None
    assert decoded.finished.generated_token_count == read_count + len(decoded.token_ids)
    assert statistics.running_sequence_count == statistics.waiting_sequence_count == 0


async def test_leaving_early_forgets_the_sequence_and_frees_its_blocks(backend: Backend) -> None:
    async with serving(backend()) as engine:
        with contextlib.suppress(ZeroDivisionError):
            async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
                await first_tokens(stream, 2)
                raise ZeroDivisionError
        await run(engine, make_request(prompt(2), 3))  # the cancel was sent before it

        await until(lambda: engine.statistics().kv_block_count_held == 0)
        assert engine.statistics().output_token_count < LONG


@pytest.mark.usefixtures("repeats")
async def test_no_event_comes_within_a_call_and_a_bad_callback_harms_none(backend: Backend) -> None:
    before = INCIDENT_COUNTS["engine"]
    reported: list[SequenceEvent | EngineError] = []

    def fail(event: SequenceEvent | EngineError) -> None:
        raise ZeroDivisionError

    async with serving(backend()) as engine:
        whole = await run(engine, make_request(prompt(1), 3))
        failing = engine.submit(make_request(prompt(2), 3), fail)
        # Only its end is not reported yet: some engines could report it at once.
        ending = engine.submit(
            replace(make_request(prompt(1), 3), output_token_ids=tuple(whole.token_ids)),
            reported.append,
        )
        closed = engine.submit(make_request(prompt(3), 3), reported.append)
        ending.cancel()
        closed.close()
        assert not reported
        other = await run(engine, make_request(prompt(1), 3))
        await until(lambda: any(isinstance(event, SequenceFinished) for event in reported))
        # Its start, its tokens, which may arrive together, and its end.
        await until(lambda: len(failing.outputs[0]) == 3)
        await until(lambda: INCIDENT_COUNTS["engine"] >= before + 3)
        failing.close()

    assert other.token_ids == whole.token_ids
    assert sum(isinstance(event, SequenceFinished) for event in reported) == 1
    assert len(failing.outputs[0]) == 3


async def test_a_full_queue_or_impossible_request_is_refused_at_once(backend: Backend) -> None:
    settings = backend(running_sequence_count_max=1, waiting_sequence_count_max=1)
    async with serving(settings) as engine, contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            streams.stream(engine, make_request(prompt(1), LONG))
        )
        await first_tokens(running, 1)
        await stack.enter_async_context(streams.stream(engine, make_request(prompt(2), LONG)))

        with pytest.raises(EngineOverloaded) as overloaded:
            await stack.enter_async_context(streams.stream(engine, make_request(prompt(3), 5)))
        with pytest.raises(RequestImpossible, match="context window"):
            await stack.enter_async_context(streams.stream(engine, make_request(prompt(4), 5000)))

    assert overloaded.value.retry_after_s > 0


@pytest.mark.usefixtures("repeats")
async def test_counts_limits_and_stops_are_exact(
    backend: Backend, request: pytest.FixtureRequest
) -> None:
    """Counted, emitted and billed tokens are equal; stop strings span tokens."""
    settings = backend()
    # Two of the services cannot separate shared prefixes, so the cache is off.
    remote = settings.settings if isinstance(settings, RemoteWorld) else settings
    unsalted = (Service.VLLM, Service.SGLANG)
    is_off = isinstance(remote, RemoteSettings) and remote.target.service in unsalted
    # SMG passes requests on to such a service.
    is_off = is_off or request.node.callspec.params["backend"] == "smg-vllm"
    reused = 0 if is_off else 32
    async with serving(settings) as engine:
        salt = uuid.uuid4().hex  # a remote server has served other tests before
        limited = await run(engine, make_request(prompt(1, 40), 17, cache_salt=salt))
        again = await run(engine, make_request(prompt(1, 40), 17, cache_salt=salt))
        other_salt = await run(engine, make_request(prompt(1, 40), 17, cache_salt=f"not {salt}"))
        stop = limited.text[5:9]
        stopped = await run(engine, make_request(prompt(1, 40), 17, stop_sequences=(stop,)))
        # Without a seed, the simulated engine ends at random, sometimes before the fourth token.
        stops = frozenset(limited.token_ids[3:4])
        ended = await run(
            engine,
            make_request(prompt(1, 40), 17, stop_token_ids=stops, sampling=SamplingParams(seed=1)),
        )

    for outcome in (limited, again, other_salt, stopped, ended):
        assert outcome.finished is not None
        assert outcome.finished.generated_token_count == len(outcome.token_ids)
        assert outcome.finished.prompt_token_count == 40
        assert outcome.finished.cached_token_count == outcome.cached_token_count
    reasons = [
        outcome.finished.reason
        for outcome in (limited, stopped, ended)
        if outcome.finished is not None
    ]
    assert reasons == [
        EngineFinishReason.LENGTH,
        EngineFinishReason.STOP_SEQUENCE,
        EngineFinishReason.STOP,
    ]
    assert [
        outcome.finished.stopped_by
        for outcome in (limited, stopped, ended)
        if outcome.finished is not None
    ] == [None, stop, ended.token_ids[-1]]
    assert len(limited.token_ids) == 17
    assert [
        limited.cached_token_count,
        again.cached_token_count,
        other_salt.cached_token_count,
    ] == [0, reused, 0]
    assert again.token_ids == limited.token_ids == other_salt.token_ids
    assert stopped.text == limited.text[: limited.text.index(stop)]
    assert ended.token_ids == limited.token_ids[: limited.token_ids.index(limited.token_ids[3]) + 1]


async def test_a_lower_rank_enters_first(backend: Backend) -> None:
    """Sequences wait for a single place; equal ranks enter in order of arrival."""
    entered: list[int] = []

    async def follow(index: int, stream: SequenceStream) -> None:
        async for event in stream:
            if isinstance(event, Scheduled):
                entered.append(index)

    async with (
        serving(backend(running_sequence_count_max=1)) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        first = await stack.enter_async_context(
            streams.stream(engine, make_request(prompt(9), LONG, rank=0.0))
        )
        await first_tokens(first, 1)
        others = [
            await stack.enter_async_context(
                streams.stream(engine, make_request(prompt(index), 3, rank=rank))
            )
            for index, rank in enumerate([500.0, 900.0, 500.0, 100.0])
        ]
        async with asyncio.TaskGroup() as tasks:
            for index, stream in enumerate(others):
                tasks.create_task(follow(index, stream))
            first.cancel()

    assert entered == [3, 0, 2, 1]


@pytest.mark.usefixtures("repeats")
async def test_a_long_sequence_displaces_one_that_continues_unchanged(backend: Backend) -> None:
    """No token is lost or repeated. External engines rank only waiting sequences."""
    settings = backend(running_sequence_count_max=1)
    async with serving(settings) as engine:
        alone = await run(engine, make_request(prompt(1, 40), 300, cache_salt=uuid.uuid4().hex))
        async with streams.stream(
            engine, make_request(prompt(1, 40), 300, rank=10_000.0, cache_salt=uuid.uuid4().hex)
        ) as displaced:
            read_count = await first_tokens(displaced, 20)
            quick = await run(engine, make_request(prompt(2, 40), 5, rank=0.0))
            rest = await read_all(displaced)

        assert engine.statistics().preemption_count == (not is_external(settings))
        await until(lambda: engine.statistics().kv_block_count_held == 0)
    assert len(quick.token_ids) == 5
    assert rest.token_ids == alone.token_ids[read_count:]
    assert rest.finished is not None
    assert (rest.finished.cached_token_count, rest.finished.generated_token_count) == (0, 300)


async def test_a_rank_must_be_a_number(backend: Backend) -> None:
    async with serving(backend()) as engine:
        for rank in (math.nan, math.inf, -math.inf):
            with pytest.raises(RequestImpossible, match="rank must be"):
                await run(engine, make_request(prompt(1), 3, rank=rank))


async def test_several_choices_end_one_by_one_and_are_counted_together(backend: Backend) -> None:
    request = make_request(prompt(1), 10, choice_count=3, sampling=SamplingParams(temperature=1.0))
    ends: list[int] = []
    tokens = {0: 0, 1: 0, 2: 0}
    async with serving(backend()) as engine, streams.stream(engine, request) as stream:
        async for event in stream:
            match event:
                case TokensGenerated():
                    tokens[event.choice_index] += len(event.token_ids)
                case ChoiceFinished():
                    ends.append(event.choice_index)
                case SequenceFinished():
                    finished = event

    assert tokens == {0: 10, 1: 10, 2: 10}
    assert sorted(ends) == [0, 1, 2]
    assert finished.generated_token_count == 30


@pytest.mark.usefixtures("repeats")
async def test_output_that_was_begun_elsewhere_is_continued(backend: Backend) -> None:
    """Only new output is emitted, all of it is counted, and an unreported end is reported."""
    async with serving(backend()) as engine:
        whole = await run(engine, make_request(prompt(1, 40), 17))
        stops = (whole.text[4:12],)
        stopped = await run(engine, make_request(prompt(1, 40), 17, stop_sequences=stops))
        for before in (1, 7, 16, 17):
            begun = tuple(whole.token_ids[:before])
            rest = await run(
                engine, replace(make_request(prompt(1, 40), 17), output_token_ids=begun)
            )
            assert begun + tuple(rest.token_ids) == tuple(whole.token_ids)
            assert whole.text.endswith(rest.text)
            assert rest.finished is not None
            assert rest.finished.reason is EngineFinishReason.LENGTH
            assert rest.finished.prompt_token_count == 40
            assert rest.finished.generated_token_count == 17
        for before in range(1, len(stopped.token_ids) + 1):
            begun = tuple(stopped.token_ids[:before])
            rest = await run(
                engine,
                replace(
                    make_request(prompt(1, 40), 17, stop_sequences=stops), output_token_ids=begun
                ),
            )
            assert begun + tuple(rest.token_ids) == tuple(stopped.token_ids)
            assert stopped.text.endswith(rest.text)
            assert rest.finished is not None
            assert rest.finished.reason is EngineFinishReason.STOP_SEQUENCE
            assert rest.finished.stopped_by == stops[0]
        with pytest.raises(RequestImpossible, match="more than max_output_tokens"):
            await run(engine, replace(make_request(prompt(1, 40), 2), output_token_ids=(9, 9, 9)))
        assert engine.model.continues_output


async def test_options_that_read_output_continue_exactly_or_are_refused(backend: Backend) -> None:
    """Seeds and penalties: our engines continue, others get output as prompt."""
    drawn = SamplingParams(
        temperature=0.9, seed=3, presence_penalty=1.0, frequency_penalty=0.6, repetition_penalty=1.1
    )
    request = make_request(prompt(1, 40), 17, sampling=drawn)
    settings = backend()
    async with serving(settings) as engine:
        if used_fields(request) & engine.model.capabilities.unsupported:
            with pytest.raises(RequestImpossible, match="does not support") as refused:
                await run(engine, request)
            assert refused.value.field in used_fields(request)
            return
        whole = await run(engine, request)
        continued = replace(request, output_token_ids=tuple(whole.token_ids[:9]))

        assert (
            engine.model.continues_exactly
            == engine.model.can_continue(request)
            == (not is_external(settings))
        )
        if is_external(settings):
            with pytest.raises(RequestImpossible, match="generated elsewhere"):
                await run(engine, continued)
        else:
            assert whole.token_ids[:9] + (await run(engine, continued)).token_ids == whole.token_ids


@pytest.mark.usefixtures("repeats")
async def test_the_matrix_of_the_page_is_what_the_engine_shows(
    backend: Backend, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["backend"]
    async with serving(backend()) as engine:
        column = await engine_matrix.column_of(engine)
    if (seen_on := engine_matrix.seen_on(name)) is not None:
        column = {engine_matrix.SEEN_ON: seen_on} | column
    if os.environ.get("WEIR_WRITE_MATRIX"):
        engine_matrix.write(name, column)

    columns, rows = engine_matrix.page_table()
    at = columns.index(engine_matrix.heading(name))
    assert {capability: rows[capability][at] for capability in column} == column
    # A field without an effect must be refused. The simulated engine says that it only simulates.
    assert engine_matrix.NO_EFFECT not in column.values() or name == "simulated"
