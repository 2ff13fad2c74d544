"""Engine for its callers: answers, cancels, crashes, hangs, closes, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from bench import engine_streams as streams
from inference.adapters.torch_engine import TorchEngine
from inference.adapters.torch_worker import LoadModel
from inference.core.options import EngineOptions
from inference.engine import (
    EngineFinishReason,
    EngineState,
    SamplingParams,
    SequenceFinished,
    SequenceRefused,
)
from inference.errors import EngineFailed, EngineStartFailed, EngineUnavailable
from inference.limits import EngineLimits
from inference.workers.child import EXIT_PROTOCOL_BROKEN
from inference.workers.engine import WorkerEngine
from inference.workers.process import CHILD_ENVIRONMENT, open_worker
from inference.workers.protocol import Message, Pulse, Ready, StartSequence, StepReport
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.inference.running import make_core, make_request, run_all
from tests.inference.worker_engines import (
    LONG,
    WAIT_S,
    first_tokens,
    prompt,
    read_all,
    run,
    serving,
    settings_for,
    until,
)

PARENT = """
import asyncio, json, sys
from pathlib import Path
from bench import engine_streams as streams
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import GenerationRequest, SamplingParams, StopCriteria, TokensGenerated

async def main(directory, phase):
    engine = TorchEngine(TorchEngineSettings(
        Path(directory), "tiny", kv_cache_bytes=8 << 20, torch_thread_count=1
    ))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        start = tasks.create_task(engine.start())
        while engine.worker_pid is None:
            await asyncio.sleep(0)
        if phase == "loading":
            print(json.dumps(engine.worker_pid), flush=True)
        await start
        if phase == "idle":
            print(json.dumps(engine.worker_pid), flush=True)
        stop = StopCriteria(1900, ignore_eos=True)
        request = GenerationRequest(tuple(range(9, 99)), SamplingParams(), stop)
        while phase == "stepping":
            async with streams.stream(engine, request) as stream:
                async for event in stream:
                    if isinstance(event, TokensGenerated):
                        print(json.dumps(engine.worker_pid), flush=True)
        await asyncio.sleep(60)

assert "torch" not in sys.modules
asyncio.run(main(*sys.argv[1:]))
"""


def kill_worker(engine: WorkerEngine) -> None:
    assert engine.worker_pid is not None
    os.kill(engine.worker_pid, signal.SIGKILL)


async def test_streams_equal_what_the_core_generates(tiny: TinyCheckpoint) -> None:
    requests = [make_request(prompt(seed, 20 + 30 * seed), 20) for seed in range(6)]
    requests.append(
        make_request(
            prompt(9), 30, sampling=SamplingParams(temperature=1.0, seed=3), stop_sequences=("e",)
        )
    )
    expected = run_all(make_core(tiny.directory), requests)

    async with serving(settings_for(tiny)) as engine:
        outcomes = await asyncio.gather(*(run(engine, request) for request in requests))
        predicted = engine.predict_cached_token_count(requests[0].prompt_token_ids, "")
        again = await run(engine, requests[0])
        statistics = engine.statistics()

    assert [(outcome.token_ids, outcome.text) for outcome in outcomes] == [
        (o.token_ids, o.text) for o in expected
    ]
    assert predicted == again.cached_token_count == 16
    assert engine.predict_cached_token_count(requests[0].prompt_token_ids, "other") == 0
    assert statistics.kv_block_count_held == 0
    assert statistics.output_token_count == sum(
        len(outcome.token_ids) for outcome in [*outcomes, again]
    )


@pytest.mark.usefixtures("executed_workers")
def test_it_runs_on_uvloop_as_in_the_api_process(tiny: TinyCheckpoint) -> None:
    async def crash_and_recover() -> list[int]:
        async with serving(settings_for(tiny)) as engine:
            async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
                await first_tokens(stream, 2)
                kill_worker(engine)
                with pytest.raises(EngineFailed):
                    await read_all(stream)
            await engine.start()
            return (await run(engine, make_request(prompt(1), 8))).token_ids

    assert (
        uvloop.run(crash_and_recover())
        == run_all(make_core(tiny.directory), [make_request(prompt(1), 8)])[0].token_ids
    )


@pytest.mark.usefixtures("executed_workers")
async def test_a_killed_worker_fails_its_streams_and_comes_back(tiny: TinyCheckpoint) -> None:
    async with serving(settings_for(tiny)) as engine:
        first_pid = engine.worker_pid
        async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
            await first_tokens(stream, 5)
            kill_worker(engine)
            with pytest.raises(EngineFailed, match="was killed"):
                await read_all(stream)
            assert not engine.healthy()
            with pytest.raises(EngineUnavailable) as unavailable:
                await run(engine, make_request(prompt(1), 5))

        await engine.start()
        outcome = await run(engine, make_request(prompt(1), 5))

        assert unavailable.value.retry_after_s > 0
        assert engine.worker_pid != first_pid
        assert len(outcome.token_ids) == 5
        assert outcome.cached_token_count == 0, "the cache died with the process"


async def test_a_hanging_worker_is_killed_and_replaced(tiny: TinyCheckpoint) -> None:
    async with serving(settings_for(tiny, step_timeout_s=0.5)) as engine:
        async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
            await first_tokens(stream, 1)
            assert engine.worker_pid is not None
            os.kill(engine.worker_pid, signal.SIGSTOP)
            with pytest.raises(EngineFailed):
                await read_all(stream)

        await engine.start()
        assert len((await run(engine, make_request(prompt(1), 5))).token_ids) == 5


@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "idle"])
async def test_a_stopped_worker_takes_no_requests(tiny: TinyCheckpoint, busy: bool) -> None:
    """Found by its pulse: the time-out of a step is two minutes, and an idle one owes nothing."""
    async with serving(settings_for(tiny)) as engine, contextlib.AsyncExitStack() as running:
        stream = None
        if busy:
            stream = await running.enter_async_context(
                streams.stream(engine, make_request(prompt(1), LONG))
            )
            await first_tokens(stream, 1)
        # The first pulse shows that the worker has one.
        await until(lambda: engine._worker._watchdog._pulse is not None)
        worker_pid = engine.worker_pid
        assert worker_pid is not None
        os.kill(worker_pid, signal.SIGSTOP)
        try:
            await until(lambda: not engine.healthy())
            condition = engine.condition()
            with pytest.raises(EngineUnavailable, match="no sign of life for") as unavailable:
                await run(engine, make_request(prompt(1), 5))
        finally:
            os.kill(worker_pid, signal.SIGCONT)
        await until(engine.healthy)
        if stream is not None:
            await read_all(stream)
        outcome = await run(engine, make_request(prompt(2), 5))
        assert engine.worker_pid == worker_pid, "nothing was killed"

    assert condition.state is EngineState.RESTARTING
    assert unavailable.value.retry_after_s > 0
    assert len(outcome.token_ids) == 5


async def test_restarts_are_spaced_further_and_further(tiny: TinyCheckpoint) -> None:
    """A worker that dies in every load: each pause is announced and doubled."""
    loading_guess_s = 2.0  # of an engine that has never loaded; announced on top of the pause
    waits_s: list[float] = []
    async with serving(settings_for(tiny, restart_delay_s_min=0.1), started=False) as engine:
        for _ in range(3):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(expect_start_to_fail(engine))
                await until(lambda: engine.worker_pid is not None)
                kill_worker(engine)
            await until(
                lambda: (
                    engine.condition().retry_after_s > loading_guess_s
                    or engine.worker_pid is not None
                )
            )
            waits_s.append(engine.condition().retry_after_s - loading_guess_s)

    assert waits_s == pytest.approx([0.1, 0.2, 0.4])


async def test_closing_ends_streams_with_counts_and_the_child(tiny: TinyCheckpoint) -> None:
    async with serving(settings_for(tiny)) as engine:
        pidfd = os.pidfd_open(engine.worker_pid or 0)
        async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
            await first_tokens(stream, 2)
            await asyncio.gather(engine.close(), engine.close())
            outcome = await read_all(stream)
        with pytest.raises(EngineUnavailable):
            await run(engine, make_request(prompt(1), 5))
        with pytest.raises(EngineUnavailable):
            await engine.start()
        await engine.close()

    assert outcome.finished is not None
    assert outcome.finished.reason is EngineFinishReason.CANCELLED
    assert engine.condition().state is EngineState.CLOSED
    assert has_exited(pidfd, timeout_s=0)


async def test_closing_does_not_wait_for_loading_nor_need_a_start(tiny: TinyCheckpoint) -> None:
    never_served = TorchEngine(settings_for(tiny))
    await never_served.close()
    await never_served.serve()
    async with serving(settings_for(tiny), started=False) as unstarted:
        assert unstarted.condition().state is EngineState.COLD
        with pytest.raises(EngineUnavailable, match="cold"):
            await run(unstarted, make_request(prompt(1), 5))
    async with serving(settings_for(tiny), started=False) as engine, asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(expect_unavailable(engine))
        await until(lambda: engine.worker_pid is not None)
        await engine.close()
        await starting
    async with serving(settings_for(tiny), started=False) as engine, asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(expect_unavailable(engine))
        while engine.condition().state is not EngineState.LOADING:  # noqa: ASYNC110 - a process is there within a millisecond
            await asyncio.sleep(0)
        assert engine.worker_pid is None, "the process is only being started"
        await engine.close()
        await starting


async def expect_start_to_fail(engine: WorkerEngine) -> None:
    with pytest.raises(EngineStartFailed, match="was killed"):
        await engine.start()


async def expect_unavailable(engine: WorkerEngine) -> None:
    with pytest.raises(EngineUnavailable):
        await engine.start()


@pytest.mark.usefixtures("executed_workers")
async def test_cancelling_serve_takes_the_child_along(tiny: TinyCheckpoint) -> None:
    engine = TorchEngine(settings_for(tiny))
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        serve = tasks.create_task(engine.serve())
        await engine.start()
        pidfd = os.pidfd_open(engine.worker_pid or 0)
        async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
            await first_tokens(stream, 1)
            serve.cancel()
            with pytest.raises(EngineUnavailable):
                await read_all(stream)

    assert has_exited(pidfd, timeout_s=WAIT_S)


@pytest.mark.usefixtures("executed_workers")
async def test_loading_reports_its_progress_and_many_may_wait_for_it(tiny: TinyCheckpoint) -> None:
    async with serving(settings_for(tiny), started=False) as engine, asyncio.TaskGroup() as tasks:
        starts = [tasks.create_task(engine.start()) for _ in range(5)]
        fractions, stages = [], []
        while not engine.healthy():
            condition = engine.condition()
            if condition.state is EngineState.LOADING:
                fractions.append(condition.loading_fraction)
                stages.append(condition.loading_stage)
            await asyncio.sleep(0.001)
        await asyncio.gather(*starts)

    assert fractions == sorted(fractions)
    assert {"process", "import"} <= set(stages)


async def test_an_unusable_checkpoint_is_reported_and_not_retried(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    async with serving(settings_for(checkpoint), started=False) as engine:
        (tmp_path / "model.safetensors").unlink()

        with pytest.raises(EngineStartFailed, match=r"neither model\.safetensors nor"):
            await engine.start()
        with pytest.raises(EngineStartFailed):
            await run(engine, make_request(prompt(1), 5))

        assert engine.condition().state is EngineState.FAILED
        assert not engine.healthy()


async def test_a_worker_sends_a_pulse_before_it_is_ready(tiny: TinyCheckpoint) -> None:
    """Otherwise the watchdog would not know that it has one."""
    received: list[Message | None] = []
    async with (
        asyncio.timeout(WAIT_S),
        open_worker("inference.adapters.torch_worker", CHILD_ENVIRONMENT) as worker,
    ):
        worker.send(load_message(tiny))
        while not (received and isinstance(received[-1], Ready)):
            received.append(await worker.receive())

    assert any(isinstance(each, Pulse) for each in received)


async def test_one_report_per_step_carries_all_sequences(tiny: TinyCheckpoint) -> None:
    """Ten sequences of eight tokens: as many reports as steps."""
    async with (
        asyncio.timeout(WAIT_S),
        open_worker("inference.adapters.torch_worker", CHILD_ENVIRONMENT) as worker,
    ):
        worker.send(load_message(tiny))
        while not isinstance(await worker.receive(), Ready):
            pass
        for number in range(10):
            worker.send(StartSequence(number, make_request(prompt(number), 8)))
        reports: list[StepReport] = []
        while (
            sum(
                isinstance(event, SequenceFinished)
                for report in reports
                for _, event in report.events
            )
            < 10
        ):
            message = await worker.receive()
            if not isinstance(message, Pulse):
                assert isinstance(message, StepReport)
                reports.append(message)

    assert sum(len(report.events) for report in reports) == 10 * (1 + 8 + 1)
    assert reports[-1].statistics.step_count == len(reports)


async def test_a_broken_message_ends_the_worker_with_its_own_exit_status(
    tiny: TinyCheckpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    async with (
        asyncio.timeout(WAIT_S),
        open_worker("inference.adapters.torch_worker", CHILD_ENVIRONMENT) as worker,
    ):
        worker.send(load_message(tiny))
        worker._transport.write(b"\x00\x00\x00\x03abc")
        while await worker.receive() is not None:
            pass
        await worker.wait_gone(WAIT_S)

        assert worker.exit_status == EXIT_PROTOCOL_BROKEN
    assert "broke the protocol" in capfd.readouterr().err


async def test_the_worker_checks_requests_itself(tiny: TinyCheckpoint) -> None:
    async with (
        asyncio.timeout(WAIT_S),
        open_worker("inference.adapters.torch_worker", CHILD_ENVIRONMENT) as worker,
    ):
        worker.send(load_message(tiny))
        while not isinstance(await worker.receive(), Ready):
            pass
        worker.send(StartSequence(0, make_request([99999], 8)))
        while isinstance(report := await worker.receive(), Pulse):
            pass

    assert isinstance(report, StepReport)
    assert [
        (number, event.overloaded)
        for number, event in report.events
        if isinstance(event, SequenceRefused)
    ] == [(0, False)]


def load_message(checkpoint: TinyCheckpoint) -> LoadModel:
    return LoadModel(
        EngineOptions(str(checkpoint.directory), EngineLimits(2048), kv_cache_bytes=8 << 20), 1
    )


@pytest.mark.parametrize("phase", ["loading", "idle", "stepping"])
def test_a_killed_parent_takes_its_child_along(tiny: TinyCheckpoint, phase: str) -> None:
    """`kill -9` runs no clean-up: the child sees the end of the socket."""
    command = [sys.executable, "-c", PARENT, str(tiny.directory), phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        try:
            assert parent.stdout is not None
            child = os.pidfd_open(json.loads(parent.stdout.readline()))
        finally:
            parent.kill()

        assert has_exited(child, timeout_s=WAIT_S)


def has_exited(pidfd: int, timeout_s: float) -> bool:
    """Return whether a process ends in time; closes its descriptor."""
    with open(pidfd, "rb", buffering=0, closefd=True) as handle:
        readable, _, _ = select.select([handle], [], [], timeout_s)
        return bool(readable)


def test_the_api_process_never_imports_torch() -> None:
    modules = (
        "inference.adapters.torch_engine, inference.text.tokenizer, inference.checkpoint.checkpoint"
    )
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


async def test_an_idle_worker_with_unread_output_is_not_hung(tiny: TinyCheckpoint) -> None:
    """A slow reader keeps its ended sequence open for minutes."""
    async with serving(settings_for(tiny)) as engine:
        pid = engine.worker_pid
        async with streams.stream(engine, make_request(prompt(1), 2)) as unread:
            await until(lambda: not engine._owes_answers())
            engine._worker._watchdog._heard_at_s -= 1e6
            async with streams.stream(engine, make_request(prompt(2), 5)) as stream:
                engine._worker._watchdog._poll()
                later = await read_all(stream)
            earlier = await read_all(unread)

    assert (len(earlier.token_ids), len(later.token_ids), engine.worker_pid) == (2, 5, None)
    assert pid is not None
