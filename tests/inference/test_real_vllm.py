"""Real vLLM over HTTP and gRPC: outputs, prefix caches, tenants, a killed server.

`test_engine_contract.py` runs on the same servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import engine_streams as streams
from inference.adapters.remote_settings import RemoteSettings, Service
from inference.doctor import remote as doctor
from inference.doctor.findings import Verdict
from inference.engine import EngineFinishReason, SamplingParams
from inference.errors import EngineFailed, EngineStartFailed
from tests.inference.real_servers import (
    RealServer,
    RealServers,
    end,
    needs,
    real_settings,
    vllm_server,
)
from tests.inference.remote_engines import remote_engine
from tests.inference.running import make_core, make_request, run_all
from tests.inference.worker_engines import LONG, first_tokens, prompt, run, until

pytestmark = needs("vllm")


@pytest.fixture(params=["vllm-grpc", "vllm-http"])
def settings(request: pytest.FixtureRequest, real_servers: RealServers) -> RemoteSettings:
    return real_settings(real_servers, request.param)


@pytest.fixture(scope="module")
def sharing_server(real_servers: RealServers) -> Iterator[RealServer]:
    """Yield vLLM over gRPC with its prefix cache, which has no salt."""
    log = real_servers.folder / "vllm-grpc-cache.log"
    directory = real_servers.checkpoint.directory
    with vllm_server(directory, log, Service.VLLM, "--enable-prefix-caching") as server:
        yield server


def sharing_settings(servers: RealServers, server: RealServer, **changes: Any) -> RemoteSettings:
    return RemoteSettings(
        servers.checkpoint.directory, "tiny", server.target, connect_timeout_s=120.0, **changes
    )


async def check_equality(settings: RemoteSettings) -> None:
    """Compare greedy outputs with those of the embedded engine."""
    requests = [
        make_request(prompt(1, 50), 20),
        make_request(prompt(2, 90), 30, stop_sequences=("e",)),
        make_request(prompt(3), 8, sampling=SamplingParams(top_logprobs=3)),
    ]
    expected = run_all(make_core(settings.directory), requests)

    async with remote_engine(settings) as engine:
        # The second time from the prefix cache, if there is one.
        for _ in range(2):
            outcomes = [await run(engine, request) for request in requests]
            assert [
                (each.token_ids, each.text, each.finished and each.finished.reason)
                for each in outcomes
            ] == [
                (each.token_ids, each.text, each.finished and each.finished.reason)
                for each in expected
            ]


async def test_greedy_outputs_are_those_of_the_embedded_engine(settings: RemoteSettings) -> None:
    await check_equality(settings)


async def test_a_cancelled_output_ends(settings: RemoteSettings) -> None:
    async with (
        remote_engine(settings) as engine,
        streams.stream(engine, make_request(prompt(4), LONG)) as stream,
    ):
        await first_tokens(stream, 3)
        stream.cancel()
        ends = [event async for event in stream][-1]

    assert getattr(ends, "reason", None) is EngineFinishReason.CANCELLED


async def test_the_doctor_finds_nothing_bad(settings: RemoteSettings) -> None:
    found = await doctor.examine(settings)

    for observation in found:
        print(f"{observation.verdict.value:9} {observation.question} {observation.seen}")
    assert [each for each in found if each.verdict is Verdict.BAD] == []


async def test_over_http_prefixes_are_cached_for_one_tenant(real_servers: RealServers) -> None:
    settings = real_settings(real_servers, "vllm-http")

    [found] = [
        each
        for each in await doctor.examine(settings)
        if each.question == "Does it cache prompts, separated by salt?"
    ]

    numbers = [int(word) for word in found.seen.replace(",", " ").split() if word.isdecimal()]
    cold, again, under_another_salt = numbers
    assert (cold, under_another_salt) == (0, 0)
    assert again > 256


async def test_over_grpc_a_prefix_cache_is_refused_unless_tenants_may_share_it(
    real_servers: RealServers, sharing_server: RealServer
) -> None:
    refused = sharing_settings(real_servers, sharing_server)
    async with remote_engine(refused, started=False) as engine:
        with pytest.raises(EngineStartFailed, match="shares cached prefixes between tenants"):
            await engine.start()

    shared = sharing_settings(real_servers, sharing_server, share_prefixes=True)
    await check_equality(shared)
    async with remote_engine(shared) as engine:
        cached = [
            (await run(engine, make_request(prompt(7, 400), 3))).cached_token_count
            for _ in range(2)
        ]
    assert cached[0] == 0
    assert (cached[1] or 0) > 256


@pytest.mark.faults
@pytest.mark.parametrize("service", [Service.VLLM, Service.OPENAI_HTTP])
async def test_a_server_killed_in_mid_stream_fails_its_stream_and_is_used_again(
    real_servers: RealServers, tmp_path: Path, service: Service
) -> None:
    option = "--no-enable-prefix-caching" if service is Service.VLLM else "--enable-prefix-caching"
    with vllm_server(
        real_servers.checkpoint.directory, tmp_path / "killed.log", service, option
    ) as server:
        settings = sharing_settings(real_servers, server, restart_delay_s_max=1.0)
        async with remote_engine(settings) as engine:
            async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
                await first_tokens(stream, 3)
                end(server.process)
                with pytest.raises(EngineFailed):
                    async for _ in stream:
                        pass
            await until(lambda: not engine.healthy())
            port = int(server.target.address.rpartition(":")[2])
            with vllm_server(
                real_servers.checkpoint.directory,
                tmp_path / "again.log",
                service,
                option,
                port=port,
            ):
                await until(engine.healthy)
                assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3
