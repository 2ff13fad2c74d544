"""NVIDIA Dynamo: its frontends and two workers that simulate vLLM."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import engine_streams as streams
from inference.adapters import remote_http
from inference.adapters.remote_connection import open_dialect
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_examination import Examination
from inference.doctor import remote as doctor
from inference.doctor.findings import Verdict
from inference.engine import EngineFinishReason, SequenceFinished, TokensGenerated
from inference.errors import EngineFailed, EngineStartFailed, RequestImpossible
from inference.sequences import UNKNOWN_TOKEN_ID, RequestField
from tests.inference.real_servers import (
    DYNAMO_ROUTING,
    Dynamo,
    RealServers,
    dynamo_servers,
    end,
    needs,
)
from tests.inference.remote_engines import remote_engine
from tests.inference.running import make_request
from tests.inference.worker_engines import first_tokens, prompt, run, until
from tests.service import wait_for

pytestmark = needs("dynamo")


@pytest.fixture(scope="module")
def dynamo(real_servers: RealServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    folder = tmp_path_factory.mktemp("dynamo")
    with dynamo_servers(real_servers.checkpoint.directory, folder) as found:
        yield found


def has_ended(event: Any) -> bool:
    return isinstance(event, SequenceFinished | EngineFailed)


async def check_output(engine: RemoteEngine, token_count: int = 40) -> list[int]:
    """Generate; check counts and the end, and return the token ids."""
    request = make_request(prompt(1), token_count)
    events: list[Any] = []
    engine.submit(request, events.append)
    await until(lambda: bool(events) and has_ended(events[-1]))
    outputs = [event for event in events if isinstance(event, TokensGenerated)]
    token_ids = [token_id for event in outputs for token_id in event.token_ids]
    text = "".join(event.text for event in outputs) + events[-1].text
    assert len(outputs) > token_count / 2, "it streams"
    assert len(token_ids) == events[-1].generated_token_count == token_count
    assert events[-1].prompt_token_count == len(request.prompt_token_ids)
    assert events[-1].reason is EngineFinishReason.LENGTH
    assert len(re.findall(r"w1\d\d\d", text)) == token_count
    if token_ids[0] != UNKNOWN_TOKEN_ID:
        assert text == "".join(f"w{token_id}" for token_id in token_ids)
    return token_ids


async def test_outputs_are_streamed_with_their_token_ids(dynamo: Dynamo) -> None:
    async with remote_engine(dynamo.settings()) as engine:
        await check_output(engine)
        assert not engine.model.capabilities.counts_from_usage
        assert engine.model.capabilities.unsupported >= {
            RequestField.JSON_SCHEMA,
            RequestField.REGEX,
            RequestField.TOP_LOGPROBS,
        }


async def test_without_the_extension_outputs_are_counted_from_the_usage(
    dynamo: Dynamo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_http, "_ID_REQUESTS", remote_http._ID_REQUESTS[:1])
    async with remote_engine(dynamo.settings()) as engine:
        assert {*await check_output(engine)} == {UNKNOWN_TOKEN_ID}
        assert engine.model.capabilities.counts_from_usage
        with pytest.raises(RequestImpossible, match="stop_token_ids"):
            await run(engine, make_request(prompt(1), 5, stop_token_ids=frozenset({7})))


async def test_a_cancelled_output_ends_on_the_server(dynamo: Dynamo) -> None:
    async with remote_engine(dynamo.settings()) as engine:
        async with streams.stream(engine, make_request(prompt(4), 900)) as stream:
            await first_tokens(stream, 3)
            assert dynamo.running_count("kv") == 1
            stream.cancel()
            last = [event async for event in stream][-1]
        await until(lambda: dynamo.running_count("kv") == 0)

    assert isinstance(last, SequenceFinished)
    assert last.reason is EngineFinishReason.CANCELLED
    assert 3 <= last.generated_token_count < 900


@pytest.mark.parametrize("routing", DYNAMO_ROUTING)
async def test_the_salt_isolates_no_tenants_so_sharing_is_set(dynamo: Dynamo, routing: str) -> None:
    """By turns, the second salt of a probe reaches a worker that has not seen the prompt."""
    settings = dynamo.settings(routing, share_prefixes=False)
    async with remote_engine(settings, started=False) as engine:
        with pytest.raises(EngineStartFailed, match="shares cached prefixes between tenants"):
            await engine.start()

    bad = [each for each in await doctor.examine(settings) if each.verdict is Verdict.BAD]
    assert [each.question for each in bad] == ["Does it cache prompts, separated by salt?"]


@pytest.mark.parametrize(("routing", "is_found"), [("kv", True), ("round-robin", False)])
async def test_routing_by_cache_sends_a_prompt_to_the_worker_that_has_it(
    dynamo: Dynamo, routing: str, is_found: bool
) -> None:
    settings = dynamo.settings(routing)
    engine = RemoteEngine(settings)
    async with open_dialect(settings) as dialect:
        examination = Examination(dialect, settings, engine.model, engine._decoder)
        await examination.pass_all()
        requested = examination.probe_prompt()
        cached = [await examination.cached_tokens(requested, "") for _ in range(2)]

    assert (cached[0], cached[1] > 256) == (0, is_found)


async def test_cached_prompt_tokens_are_billed_as_the_frontend_counts_them(dynamo: Dynamo) -> None:
    async with remote_engine(dynamo.settings("kv")) as engine:
        request = make_request(prompt(uuid.uuid4().int, 400), 5)
        cached = [(await run(engine, request)).cached_token_count for _ in range(2)]

    assert cached[0] == 0
    assert 256 < (cached[1] or 0) <= 400


@pytest.mark.faults
@pytest.mark.parametrize("migrates", [False, True])
async def test_a_worker_killed_in_mid_stream_fails_it_unless_dynamo_migrates_it(
    real_servers: RealServers, tmp_path: Path, migrates: bool
) -> None:
    """Either way each token is counted once, and the other worker serves the next request."""
    with dynamo_servers(real_servers.checkpoint.directory, tmp_path) as dynamo:
        options = ("--migration-limit=3",) if migrates else ()
        dynamo.front("tested", "--router-mode=round-robin", *options)
        wait_for(lambda: dynamo.worker_count("tested") == 2, "two workers", 60.0)
        events: list[list[Any]] = [[], []]
        async with remote_engine(dynamo.settings("tested")) as engine:
            for each in events:  # one on each worker
                engine.submit(make_request(prompt(1), 400), each.append)
            await until(lambda: all(len(each) > 10 for each in events))
            end(dynamo.workers[0])
            await until(lambda: all(has_ended(each[-1]) for each in events))
            assert len((await run(engine, make_request(prompt(2), 5))).token_ids) == 5

    counts = [
        sum(len(event.token_ids) for event in each if isinstance(event, TokensGenerated))
        for each in events
    ]
    lost = [each for each in events if isinstance(each[-1], EngineFailed)]
    assert len(lost) == (0 if migrates else 1)
    assert sorted(counts)[1] == 400
    assert sorted(counts)[0] == 400 if migrates else 10 <= sorted(counts)[0] < 400
