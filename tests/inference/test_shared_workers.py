"""Workers that several processes share: one per replica, whichever starts, leaves or dies.

Engines of one process stand for those of several: they know each other through the directory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bench import engine_streams as streams
from common.processes import alive
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.engine import EngineState, SamplingParams
from inference.errors import EngineFailed
from inference.workers.process import WorkerProcess, open_worker
from inference.workers.protocol import (
    CancelSequence,
    StartSequence,
    encode,
)
from inference.workers.sharing import DirectoryUnusable, EngineDirectory
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_request
from tests.inference.worker_engines import (
    WAIT_S,
    first_tokens,
    prompt,
    read_all,
    run,
    served,
    settings_for,
    until,
)


def shared(
    directory: EngineDirectory, settings: TorchEngineSettings, name: str = "tiny#0"
) -> TorchEngine:
    """Build the engine of one api process."""
    return TorchEngine(settings, directory.replica(name, settings).opener(open_worker))


@pytest.fixture
def directory(tmp_path: Path) -> EngineDirectory:
    return EngineDirectory(tmp_path / "engines")


@contextlib.asynccontextmanager
async def two(
    directory: EngineDirectory, settings: TorchEngineSettings
) -> AsyncIterator[tuple[TorchEngine, TorchEngine]]:
    first, second = (shared(directory, settings) for _ in range(2))
    async with served(first), served(second):
        yield first, second


async def test_two_processes_share_one_worker_and_each_gets_its_own_tokens(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    requests = [make_request(prompt(number), 20) for number in range(12)]
    async with served(shared(directory, settings_for(tiny), "alone")) as alone:
        expected = [(await run(alone, each)).token_ids for each in requests]
    async with two(directory, settings_for(tiny)) as engines:
        assert engines[0].worker_pid == engines[1].worker_pid

        outcomes = await asyncio.gather(
            *(run(engine, request) for engine in engines for request in requests)
        )

    assert [each.token_ids for each in outcomes] == 2 * expected


async def test_processes_with_other_settings_have_another_worker(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    one = shared(directory, settings_for(tiny))
    other = shared(directory, settings_for(tiny, running_sequence_count_max=2))
    async with served(one), served(other):
        assert one.worker_pid != other.worker_pid


async def test_the_worker_stays_until_the_last_process_leaves(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    """The process that started it leaves first, in the middle of the other one's stream."""
    starter, other = (shared(directory, settings_for(tiny)) for _ in range(2))
    async with served(other, started=False):
        async with served(starter):
            pid = starter.worker_pid
            assert pid is not None
            await other.start()
            async with streams.stream(other, make_request(prompt(1), 100)) as stream:
                await first_tokens(stream, 2)
                async with streams.stream(starter, make_request(prompt(2), 100)) as ended:
                    await first_tokens(ended, 2)
                    await starter.close()
                outcome = await read_all(stream)
        assert len(outcome.token_ids) == 98
        assert other.worker_pid == pid
        assert alive(pid)
    assert not alive(pid)


async def test_eight_starts_at_once_make_one_worker(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    for _ in range(3):
        engines = [shared(directory, settings_for(tiny)) for _ in range(8)]
        async with contextlib.AsyncExitStack() as stack:
            for each in engines:
                await stack.enter_async_context(served(each, started=False))
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*(each.start() for each in engines))
            pids = {each.worker_pid for each in engines}
            outcomes = await asyncio.gather(
                *(run(each, make_request(prompt(1), 5)) for each in engines)
            )
        assert len(pids) == 1
        assert len({tuple(each.token_ids) for each in outcomes}) == 1
        assert not any(alive(pid or 0) for pid in pids)


async def test_a_killed_worker_is_replaced_by_one(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    async with two(directory, settings_for(tiny)) as (first, second):
        pid = first.worker_pid
        assert pid is not None
        async with (
            streams.stream(first, make_request(prompt(1), 200)) as one,
            streams.stream(second, make_request(prompt(2), 200)) as other,
        ):
            await first_tokens(one, 2)
            await first_tokens(other, 2)
            os.kill(pid, signal.SIGKILL)
            for stream in (one, other):
                with pytest.raises(EngineFailed):
                    await read_all(stream)
        await asyncio.gather(first.start(), second.start())

        assert first.worker_pid == second.worker_pid != pid
        assert len((await run(second, make_request(prompt(1), 5))).token_ids) == 5


async def test_a_stranger_does_no_harm(directory: EngineDirectory, tiny: TinyCheckpoint) -> None:
    """Garbage, half messages, requests without a model, and more connections than are allowed."""
    rng = random.Random(3)
    start = encode(StartSequence(0, make_request(prompt(1), 50)))
    sent = [
        rng.randbytes(1000),
        b"\xff" * 8,
        start,
        start[:-3],
        encode(CancelSequence(0)),
        b"",
        b"\x00\x00\x00\x00",
    ]
    async with two(directory, settings_for(tiny)) as (first, second):
        pid = first.worker_pid
        [path] = directory.path.glob("*.sock")
        with contextlib.ExitStack() as intruders:
            async with streams.stream(first, make_request(prompt(1), 200)) as stream:
                await first_tokens(stream, 2)
                for number in range(120):
                    end = intruders.enter_context(socket.socket(socket.AF_UNIX))
                    end.setblocking(False)
                    with contextlib.suppress(OSError):
                        end.connect(directory.address(path.name))
                        end.send(sent[number % len(sent)])
                outcome = await read_all(stream)
            assert len(outcome.token_ids) == 198
            assert len((await run(second, make_request(prompt(2), 5))).token_ids) == 5
            late = shared(directory, settings_for(tiny))
            async with served(late):
                assert {late.worker_pid, first.worker_pid, second.worker_pid} == {pid}


async def test_a_process_that_stops_reading_holds_up_no_other_one(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    """Stop like a suspended process: its sequences go on, since its output is kept for it."""
    settings = settings_for(tiny)
    async with served(shared(directory, settings)) as engine:
        process = engine._worker.process
        assert process is not None
        load = engine._worker._kind.load
        [path] = directory.path.glob("*.sock")
        with socket.socket(socket.AF_UNIX) as stopped:
            stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stopped.connect(directory.address(path.name))
            detailed = SamplingParams(top_logprobs=20)  # 100 bytes of a token become 1000
            starts = [
                StartSequence(number, make_request(prompt(number), 900, sampling=detailed))
                for number in range(30)
            ]
            stopped.sendall(b"".join(map(encode, [load, *starts])))
            await until(lambda: engine.statistics().output_token_count > 9000)

            outcome = await run(engine, make_request(prompt(1), 50))

            assert len(outcome.token_ids) == 50
        await until(lambda: engine.statistics().running_sequence_count == 0)
        assert engine.statistics().output_token_count < 26_000, "its sequences ended with it"


async def test_a_process_that_wants_another_model_is_not_served(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    settings = settings_for(tiny)
    other = TorchEngine(settings_for(tiny, running_sequence_count_max=2))._worker._kind.load
    async with served(shared(directory, settings)) as engine:
        [path] = directory.path.glob("*.sock")
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(WAIT_S)
            end.connect(directory.address(path.name))
            await asyncio.to_thread(end.sendall, encode(other))
            while await asyncio.to_thread(end.recv, 1 << 16):
                pass  # the greeting, then the end
        assert len((await run(engine, make_request(prompt(1), 5))).token_ids) == 5


async def test_a_worker_is_found_again_after_its_process_was_killed(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    """The end of the connection without a farewell is what a killed process leaves."""
    killed = shared(directory, settings_for(tiny))
    async with served(killed):
        pid = killed.worker_pid
        process = killed._worker.process
        assert process is not None
        assert process._users is not None
        await until(lambda: killed.condition().state is EngineState.READY)
        process._transport.abort()
        await until(lambda: not killed.healthy())
        await killed.start()

        assert killed.worker_pid == pid


async def test_a_process_knows_the_prefixes_that_others_have_cached(
    directory: EngineDirectory, tiny: TinyCheckpoint
) -> None:
    """Also those of outputs, and those from before it connected, which hold for their salt only."""
    settings = settings_for(tiny)
    tokens = tuple(prompt(1, 50))
    late = shared(directory, settings)
    async with two(directory, settings) as (first, second):
        output = (await run(first, make_request(tokens, 40))).token_ids
        whole = (*tokens, *output)
        known = first.predict_cached_token_count(whole, "")
        await until(lambda: second.predict_cached_token_count(whole, "") == known)
        async with served(late):
            await until(lambda: late.predict_cached_token_count(whole, "") == known)
        outcome = await run(second, make_request(whole, 1))

        assert known == outcome.cached_token_count == 80
        assert second.predict_cached_token_count(whole, "another") == 0


async def test_a_process_with_running_requests_is_not_woken_for_the_prefixes_of_others(
    directory: EngineDirectory, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that others have cached come together with the next report of a step."""
    received: list[tuple[WorkerProcess, bytes]] = []
    honest = WorkerProcess.data_received

    def data_received(self: WorkerProcess, data: bytes) -> None:
        received.append((self, data))
        honest(self, data)

    async with two(directory, settings_for(tiny)) as (first, second):
        async with streams.stream(second, make_request(prompt(0), 150)) as events:
            await first_tokens(events, 1)
            monkeypatch.setattr(WorkerProcess, "data_received", data_received)
            for number in range(1, 6):
                await run(first, make_request(prompt(number, 40), 3))
            monkeypatch.undo()
        process = second._worker.process

    chunks = [data for owner, data in received if owner is process]
    assert sum(b"cached_blocks" in each for each in chunks) >= 5
    assert all(b"step" in each for each in chunks)


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(tmp_path, 12345, 12345)

    with pytest.raises(DirectoryUnusable, match="belongs to another user"):
        EngineDirectory(tmp_path)


def test_only_the_owner_reads_the_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    assert EngineDirectory(tmp_path).path.stat().st_mode & 0o777 == 0o700
