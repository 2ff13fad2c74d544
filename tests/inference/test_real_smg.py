"""SMG in front of two vLLM servers over gRPC, without prefix caches: they have no salt."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench import engine_streams as streams
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings
from inference.doctor import remote as doctor
from inference.doctor.findings import Verdict
from inference.engine import EngineFinishReason, SequenceFinished, TokensGenerated
from inference.errors import EngineFailed
from inference.sequences import RequestField
from tests.inference.real_servers import (
    RealServer,
    RealServers,
    end,
    needs,
    real_settings,
    smg_gateway,
)
from tests.inference.remote_engines import remote_engine
from tests.inference.running import make_core, make_request, run_all
from tests.inference.worker_engines import LONG, first_tokens, prompt, run, until

pytestmark = [*needs("smg"), *needs("vllm")]
ENDS = (SequenceFinished, EngineFailed)


@pytest.fixture
def settings(real_servers: RealServers) -> RemoteSettings:
    return real_settings(real_servers, "smg-vllm")


async def test_greedy_outputs_are_those_of_the_embedded_engine(settings: RemoteSettings) -> None:
    requests = [
        make_request(prompt(1, 50), 20),
        make_request(prompt(2, 90), 30, stop_sequences=("e",)),
        make_request(prompt(3), 60),
    ]
    expected = run_all(make_core(settings.directory), requests)

    async with remote_engine(settings) as engine:
        outcomes = [await run(engine, request) for request in requests]
        capabilities = engine.model.capabilities

    for outcome, model in zip(outcomes, expected, strict=True):
        assert outcome.finished is not None
        assert model.finished is not None
        assert (outcome.token_ids, outcome.text) == (model.token_ids, model.text)
        assert outcome.finished.reason is model.finished.reason
    assert not capabilities.counts_from_usage
    assert capabilities.unsupported >= {RequestField.LOGIT_BIAS, RequestField.TOP_LOGPROBS}
    assert not capabilities.unsupported & {RequestField.STOP_TOKEN_IDS, RequestField.TOP_K}


async def test_the_doctor_finds_nothing_bad(settings: RemoteSettings) -> None:
    found = await doctor.examine(settings)

    assert [each for each in found if each.verdict is Verdict.BAD] == []


async def test_a_cancelled_output_ends(settings: RemoteSettings) -> None:
    async with (
        remote_engine(settings) as engine,
        streams.stream(engine, make_request(prompt(4), LONG)) as stream,
    ):
        await first_tokens(stream, 3)
        stream.cancel()
        last = [event async for event in stream][-1]

    assert isinstance(last, SequenceFinished)
    assert last.reason is EngineFinishReason.CANCELLED


def busy_workers(gateway: RealServer) -> list[RealServer]:
    """Return the workers that generate."""
    with urllib.request.urlopen(f"http://{gateway.target.address}/workers") as response:
        loads = {each["url"]: each["load"] for each in json.load(response)["workers"]}
    return [each for each in gateway.workers if loads[f"grpc://{each.target.address}"]]


async def begun_stream(engine: RemoteEngine, gateway: RealServer) -> tuple[list[Any], RealServer]:
    """Return the events of a stream in its first half, and its worker."""
    while True:
        events: list[Any] = []
        sequence = engine.submit(make_request(prompt(1), LONG), events.append)
        await until(lambda: len(events) > 3)  # noqa: B023 - awaited in this round
        busy = busy_workers(gateway)
        if len(events) < LONG // 2 and len(busy) == 1:
            return events, busy[0]
        sequence.cancel()
        await until(lambda: isinstance(events[-1], ENDS))  # noqa: B023


@pytest.mark.faults
async def test_a_killed_worker_fails_one_stream(real_servers: RealServers, tmp_path: Path) -> None:
    directory = real_servers.checkpoint.directory
    other: list[Any] = []
    with smg_gateway(directory, tmp_path / "smg.log") as gateway:
        settings = RemoteSettings(directory, "tiny", gateway.target, connect_timeout_s=120.0)
        async with remote_engine(settings) as engine:
            lost, worker = await begun_stream(engine, gateway)
            engine.submit(make_request(prompt(1), LONG), other.append)  # by turns: the other one
            await until(lambda: len(busy_workers(gateway)) == 2 or isinstance(lost[-1], ENDS))
            end(worker.process)
            await until(lambda: all(each and isinstance(each[-1], ENDS) for each in (lost, other)))
            for _ in range(4):
                assert len((await run(engine, make_request(prompt(2), 5))).token_ids) == 5

    assert isinstance(lost[-1], EngineFailed)
    assert isinstance(other[-1], SequenceFinished)
    assert token_count(lost) < LONG == token_count(other)


def token_count(events: list[Any]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, TokensGenerated))
