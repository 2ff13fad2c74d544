"""SMG in front of two vLLM servers over gRPC, without prefix caches: they have no salt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import engine_streams as streams
from inference.adapters import remote_doctor as doctor
from inference.adapters.findings import Verdict
from inference.adapters.remote_settings import RemoteSettings
from inference.capabilities import RequestField
from inference.engine import EngineFinishReason, SequenceFinished, TokensGenerated
from inference.errors import EngineFailed
from tests.inference.hosted import LONG, first_tokens, prompt, run, until
from tests.inference.real_servers import (
    RealServers,
    end,
    needs,
    real_settings,
    smg_gateway,
)
from tests.inference.remote_hosted import remote_engine
from tests.inference.running import make_core, make_request, run_all

pytestmark = [*needs("smg"), *needs("vllm")]


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


@pytest.mark.faults
async def test_a_worker_killed_in_mid_stream_fails_its_stream_only(
    real_servers: RealServers, tmp_path: Path
) -> None:
    directory = real_servers.checkpoint.directory
    events: list[list[Any]] = [[], [], [], []]
    with smg_gateway(directory, tmp_path / "smg.log") as gateway:
        settings = RemoteSettings(directory, "tiny", gateway.target, connect_timeout_s=120.0)
        async with remote_engine(settings) as engine:
            for each in events:  # by turns on both workers
                engine.submit(make_request(prompt(1), LONG), each.append)
            await until(lambda: all(len(each) > 3 for each in events))
            end(gateway.workers[0].process)
            ends = (SequenceFinished, EngineFailed)
            await until(lambda: all(isinstance(each[-1], ends) for each in events))
            for _ in range(4):
                assert len((await run(engine, make_request(prompt(2), 5))).token_ids) == 5

    counts = [
        sum(len(event.token_ids) for event in each if isinstance(event, TokensGenerated))
        for each in events
    ]
    lost = [isinstance(each[-1], EngineFailed) for each in events]
    assert {*lost} == {True, False}
    assert all((count < LONG) == is_lost for count, is_lost in zip(counts, lost, strict=True))
