"""Remote engines over both services: outputs equal the torch engine's, and faults are reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from api.core.settings import Settings
from api.fleet.fleet import build_serving
from bench import engine_streams as streams
from inference import errors
from inference.adapters.remote_connection import DIALECTS
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, Service, Target, TlsFiles
from inference.capabilities import used_fields
from inference.engine import (
    BeamSearchParams,
    EngineFinishReason,
    EngineState,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    TokensGenerated,
)
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.remote_engines import RemoteWorld, connected, remote_engine, remote_settings
from tests.inference.running import Outcome, make_core, make_request, run_all
from tests.inference.worker_engines import LONG, first_tokens, prompt, read_all, run, until
from tests.remote_servers.serving import PATIENCE_S, ServerProcess

LETTER = 300  # token of the tiny checkpoint that is not part of a character
SERVICES = [Service.TRTLLM, Service.VLLM, Service.SGLANG, Service.OPENAI_HTTP]


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> Service:
    return Service(request.param)


@pytest.fixture
def world(tiny: TinyCheckpoint, remote_server: ServerProcess, service: Service) -> RemoteWorld:
    return RemoteWorld(remote_server, remote_settings(tiny, remote_server, service))


def changed(tiny: TinyCheckpoint, world: RemoteWorld, **changes: Any) -> RemoteWorld:
    return RemoteWorld(
        world.server, remote_settings(tiny, world.server, world.settings.target.service, **changes)
    )


def salted(request: GenerationRequest) -> GenerationRequest:
    """Return a unique salt: the server has served other tests before."""
    return GenerationRequest(
        **{name: getattr(request, name) for name in request.__slots__}
        | {"cache_salt": uuid.uuid4().hex}
    )


async def collect(engine: RemoteEngine, request: GenerationRequest) -> Outcome:
    """Read to the end with log-probabilities, which `read_all` omits."""
    outcome = Outcome()
    async with streams.stream(engine, request) as stream:
        async for event in stream:
            if isinstance(event, TokensGenerated):
                outcome.token_ids += event.token_ids
                outcome.text += event.text
                outcome.logprobs += event.logprobs
            elif isinstance(event, SequenceFinished):
                outcome.text += event.text
    return outcome


async def test_tokens_text_and_log_probabilities_are_those_of_the_torch_engine(
    tiny: TinyCheckpoint, world: RemoteWorld
) -> None:
    """All supported parameters; 32-bit numbers on the wire are the same in both."""
    requests = [
        make_request(prompt(1, 50), 20),
        make_request(
            prompt(2),
            30,
            sampling=SamplingParams(temperature=1.0, seed=3),
            stop_sequences=("e", "ou"),
        ),
        make_request(
            prompt(3),
            30,
            sampling=SamplingParams(temperature=0.5, seed=4, top_k=50, top_p=0.75, min_p=0.0625),
        ),
        make_request(
            prompt(4),
            30,
            sampling=SamplingParams(
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                logit_bias=((9, 4.0),),
            ),
        ),
        make_request(
            prompt(4),
            30,
            sampling=SamplingParams(
                presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((9, 4.0),)
            ),
        ),
        make_request(
            prompt(5), 12, sampling=SamplingParams(temperature=1.0, seed=5, top_logprobs=3)
        ),
        make_request(prompt(5), 12, sampling=SamplingParams(top_logprobs=3)),
        make_request(prompt(5), 12, stop_token_ids=frozenset(range(60, 200))),
        make_request(prompt(6), 12, sampling=SamplingParams(top_logprobs=0)),
        make_request(
            prompt(7),
            40,
            ignore_eos=False,
            min_output_tokens=7,
            sampling=SamplingParams(temperature=1.0, seed=6),
        ),
        make_request(
            prompt(8),
            20,
            sampling=SamplingParams(temperature=0.5, top_k=1, top_p=0.75),
            stop_sequences=("e", "ou"),
        ),
    ]
    capabilities = DIALECTS[world.settings.target.service].capabilities
    requests = [
        request for request in requests if not used_fields(request) & capabilities.unsupported
    ]
    counts = {Service.TRTLLM: 5, Service.SGLANG: 6}
    assert len(requests) == counts.get(world.settings.target.service, 11)
    expected = run_all(make_core(tiny.directory), requests)

    async with connected(world) as engine:
        outcomes = [await collect(engine, request) for request in map(salted, requests)]

    assert [(outcome.token_ids, outcome.text) for outcome in outcomes] == [
        (each.token_ids, each.text) for each in expected
    ]
    for outcome, like in zip(outcomes, expected, strict=True):
        assert [reported.chosen.token_id for reported in outcome.logprobs] == [
            reported.chosen.token_id for reported in like.logprobs
        ]
        for reported, true in zip(outcome.logprobs, like.logprobs, strict=True):
            assert [each.token_id for each in reported.top] == [each.token_id for each in true.top]
            pairs = zip((reported.chosen, *reported.top), (true.chosen, *true.top), strict=True)
            assert all(
                math.isclose(a.logprob, b.logprob, rel_tol=1e-4, abs_tol=1e-4) for a, b in pairs
            )


async def test_response_formats_are_kept(world: RemoteWorld) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    formats = [
        ResponseFormat(GrammarKind.REGEX, "[0-9]{3}x"),
        ResponseFormat(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
    ]
    async with connected(world) as engine:
        number, document = [
            await run(engine, make_request(prompt(1), 200, response_format=each, ignore_eos=False))
            for each in formats
        ]

    assert re.fullmatch("[0-9]{3}x", number.text)
    assert number.finished is not None
    assert number.finished.reason is EngineFinishReason.STOP
    if document.finished is not None and document.finished.reason is EngineFinishReason.STOP:
        assert isinstance(json.loads(document.text)["a"], int)


async def test_options_that_the_protocol_lacks_are_refused_by_name(world: RemoteWorld) -> None:
    lark = ResponseFormat(GrammarKind.LARK, 'start: "a"')
    base = make_request(prompt(1), 5)
    impossible: dict[str, GenerationRequest] = {
        "beam_search": replaced(base, beam_search=BeamSearchParams(2)),
        "response_format.lark": make_request(prompt(1), 5, response_format=lark, ignore_eos=False),
    }
    if world.settings.target.service is Service.VLLM:
        impossible["top_logprobs"] = make_request(
            prompt(1), 5, sampling=SamplingParams(top_logprobs=20)
        )
        impossible["sampling.logit_bias"] = make_request(
            prompt(1), 5, sampling=SamplingParams(logit_bias=((9, 101.0),))
        )

    if world.settings.target.service is Service.TRTLLM:
        impossible["sampling.logit_bias"] = make_request(
            prompt(1), 5, sampling=SamplingParams(logit_bias=((9, 1.0),))
        )

    async with connected(world) as engine:
        seen_before = world.server.state()["seen"]
        for field, request in impossible.items():
            with pytest.raises(errors.RequestImpossible) as refused:
                await run(engine, request)
            assert refused.value.field == field
        assert world.server.state()["seen"] == seen_before


def replaced(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        **{name: getattr(request, name) for name in request.__slots__} | changes
    )


async def test_a_stop_sequence_ends_the_sequence_in_the_server_too(world: RemoteWorld) -> None:
    async with connected(world) as engine:
        whole = await run(engine, make_request(prompt(1), 60))
        aborted_before = len(world.server.state()["aborted"])
        stopped = await run(
            engine, make_request(prompt(1), LONG, stop_sequences=(whole.text[20:26],))
        )

        await until(lambda: world.server.idle)
    assert stopped.text == whole.text[: whole.text.index(whole.text[20:26])]
    is_aborted = not world.settings.target.service.is_http  # which ends it itself
    assert len(world.server.state()["aborted"]) == aborted_before + is_aborted


@pytest.mark.parametrize("fault", ["wrong_prompt", "wrong_cached", "lose_chunk", "preempt", "drop"])
async def test_an_output_against_the_servers_word_fails(world: RemoteWorld, fault: str) -> None:
    """Others continue, and the server keeps no unread output."""
    async with connected(world) as engine:
        async with streams.stream(engine, make_request(prompt(2), LONG)) as other:
            await first_tokens(other, 5)  # past the faults' point
            if fault in ("drop", "preempt"):
                other.cancel()
                await read_all(other)
            world.server.go_wrong(fault)
            with pytest.raises(errors.EngineFailed):
                await run(engine, make_request(prompt(1), 30 if fault == "lose_chunk" else LONG))
            world.server.go_wrong()
            assert engine.healthy()
        assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3
        await until(lambda: world.server.idle)


async def test_a_server_that_is_full_says_so(world: RemoteWorld) -> None:
    async with connected(world) as engine:
        world.server.go_wrong("refuse")
        with pytest.raises(errors.EngineOverloaded) as overloaded:
            await run(engine, make_request(prompt(1), 3))

    assert overloaded.value.retry_after_s > 0


async def test_an_end_token_counts_whether_it_is_listed_or_not(
    tiny: TinyCheckpoint, remote_server: ServerProcess
) -> None:
    """TensorRT-LLM does not document which it does."""
    settings = remote_settings(tiny, remote_server, Service.TRTLLM)
    async with connected(RemoteWorld(remote_server, settings)) as engine:
        whole = await run(engine, make_request(prompt(1), 20))
        request = make_request(prompt(1), 60, stop_token_ids=frozenset({whole.token_ids[9]}))
        listed = await run(engine, salted(request))
        remote_server.go_wrong("cut_end")
        cut = await run(engine, salted(request))

    assert listed.finished is not None
    assert listed.finished.reason is EngineFinishReason.STOP
    assert cut.token_ids == listed.token_ids
    assert cut.text == listed.text


@pytest.mark.parametrize(("service", "fault"), [(Service.TRTLLM, "mute"), (Service.VLLM, "wedge")])
async def test_silence_has_a_timeout(tiny: TinyCheckpoint, world: RemoteWorld, fault: str) -> None:
    """If no sequence progresses, the server is stuck: it is not used until it generates again."""
    impatient = changed(tiny, world, first_token_timeout_s=2.0, inter_token_timeout_s=2.0)
    async with remote_engine(impatient.settings) as engine:
        world.server.go_wrong(fault)
        with pytest.raises(errors.EngineFailed, match="silent for too long"):
            await run(engine, make_request(prompt(1), LONG))
        condition = engine.condition()
        assert condition.state in (EngineState.RESTARTING, EngineState.LOADING)
        with pytest.raises(errors.EngineUnavailable) as unavailable:
            await run(engine, make_request(prompt(1), 3))
        assert unavailable.value.retry_after_s > 0

        world.server.go_wrong()
        await until(engine.healthy)
        assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3


async def test_an_ignored_abort_ends_the_call(tiny: TinyCheckpoint, world: RemoteWorld) -> None:
    async with connected(changed(tiny, world, abort_drain_s=0.2)) as engine:
        async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
            read_count = await first_tokens(stream, 2)
            world.server.go_wrong("mute_abort")
            stream.cancel()
            outcome = await read_all(stream)

        assert outcome.finished is not None
        assert outcome.finished.reason in (EngineFinishReason.CANCELLED, EngineFinishReason.LENGTH)
        assert outcome.finished.generated_token_count == read_count + len(outcome.token_ids)


async def test_closing_cancels_what_runs_and_what_waits(
    tiny: TinyCheckpoint, world: RemoteWorld
) -> None:
    async with (
        connected(changed(tiny, world, running_sequence_count_max=1)) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        running, waiting = [
            await stack.enter_async_context(
                streams.stream(engine, make_request(prompt(seed), LONG))
            )
            for seed in (1, 2)
        ]
        await first_tokens(running, 2)
        await engine.close()
        ends = [await read_all(stream) for stream in (running, waiting)]

    assert [each.finished and each.finished.reason for each in ends] == [
        EngineFinishReason.CANCELLED
    ] * 2


async def test_a_slow_reader_delays_no_other_and_loses_nothing(world: RemoteWorld) -> None:
    async with (
        connected(world) as engine,
        streams.stream(engine, make_request(prompt(1), 300)) as unread,
    ):
        quick = await run(engine, make_request(prompt(2), 20))
        await until(lambda: engine.statistics().running_sequence_count == 0)

        outcome = await read_all(unread)
    assert (len(quick.token_ids), len(outcome.token_ids)) == (20, 300)


async def test_a_server_that_is_ill_is_left_until_it_is_well(world: RemoteWorld) -> None:
    async with (
        connected(world) as engine,
        streams.stream(engine, make_request(prompt(1), LONG)) as stream,
    ):
        await first_tokens(stream, 2)
        world.server.go_wrong("unhealthy")
        with pytest.raises(errors.EngineFailed, match="health"):
            await read_all(stream)
        assert not engine.healthy()
        assert "health" in engine.condition().reason

        world.server.go_wrong()
        await until(engine.healthy)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other_tokenizer", "its tokens would decode to different text"),
        ("corrupt_tokenizer", "do not match the hash"),
        ("unsalted", "WEIR_REMOTE_SHARE_PREFIXES=1"),
    ],
)
async def test_an_unfit_server_is_not_used(world: RemoteWorld, fault: str, message: str) -> None:
    """It is asked repeatedly: it may be replaced by a suitable one."""
    if world.settings.target.service.is_http and "tokenizer" in fault:
        pytest.skip("HTTP servers do not send their tokenizer")
    world.server.go_wrong(fault)
    async with remote_engine(world.settings, started=False) as engine:
        with pytest.raises(errors.EngineStartFailed, match=re.escape(message)):
            await engine.start()
        with pytest.raises(errors.EngineUnavailable):
            await run(engine, make_request(prompt(1), 3))

        world.server.go_wrong()
        await until(engine.healthy)


@pytest.mark.parametrize(
    ("service", "noticed_by"),
    [(Service.VLLM, "a sequence"), (Service.VLLM, "a probe"), (Service.TRTLLM, "a probe")],
)
async def test_a_server_that_begins_to_share_prefixes_leaves_use_until_it_is_fit_again(
    tiny: TinyCheckpoint, world: RemoteWorld, noticed_by: str
) -> None:
    """It passed the checks on connecting; a probe or a cached count reveals sharing."""
    watched = changed(tiny, world, probe_interval_s=0.05 if noticed_by == "a probe" else 3600.0)
    head = prompt(uuid.uuid4().int, 64)
    async with connected(watched) as engine:
        assert len((await run(engine, make_request(head, 3, cache_salt="one"))).token_ids) == 3
        world.server.go_wrong("unsalted", "no_events")
        if noticed_by == "a sequence":
            await run(engine, make_request(head, 3, cache_salt="one"))
            with pytest.raises(errors.EngineFailed, match="reused cached prefixes"):
                await run(engine, make_request(head, 3, cache_salt="another"))
        await until(lambda: "WEIR_REMOTE_SHARE_PREFIXES" in engine.condition().reason)
        with pytest.raises(errors.EngineUnavailable):
            await run(engine, make_request(head, 3))

        world.server.go_wrong()
        await until(engine.healthy)
        assert len((await run(engine, make_request(head, 3))).token_ids) == 3


async def test_prefixes_are_shared_if_it_is_set(tiny: TinyCheckpoint, world: RemoteWorld) -> None:
    world.server.go_wrong("unsalted", "no_events")
    head = prompt(uuid.uuid4().int, 64)
    async with connected(changed(tiny, world, share_prefixes=True)) as engine:
        await run(engine, make_request(head, 3, cache_salt="one"))
        predicted = engine.predict_cached_token_count(tuple(head), "another")
        again = await run(engine, make_request(head, 3, cache_salt="another"))

    assert again.cached_token_count == 48
    assert predicted in (32, 48), "in blocks of the service's own size"


@pytest.mark.parametrize("choice_count", [1, 3])
async def test_the_cached_tokens_of_the_last_message_are_billed_and_never_a_running_count(
    tiny: TinyCheckpoint, world: RemoteWorld, choice_count: int
) -> None:
    """The prompt of several choices is billed once, as it was computed for the first one."""
    world.server.go_wrong("unsalted", "no_events", "running_cached")
    head = prompt(uuid.uuid4().int, 64)
    async with connected(changed(tiny, world, share_prefixes=True)) as engine:
        cold, warm = [
            await run(engine, make_request(head, 4, choice_count=choice_count)) for _ in range(2)
        ]
        statistics = engine.statistics()

    assert (cold.cached_token_count, warm.cached_token_count) == (0, 48)
    assert (statistics.prompt_token_count, statistics.cached_token_count) == (128, 48)


@pytest.mark.parametrize("end", ["cancel", "stop_sequence", "loss"])
async def test_without_a_last_message_only_a_count_that_stays_the_same_is_billed(
    tiny: TinyCheckpoint, world: RemoteWorld, end: str
) -> None:
    """Over HTTP the count of a running output may be that of a router or a decode worker.

    A server that ends an output at the stop sequence sends a last message with the final count. It
    is the first answer, too, if all messages arrive together.
    """
    world.server.go_wrong("unsalted", "no_events")
    # After a prompt that ends within a character, no stop sequence is sent.
    head, events = [*prompt(uuid.uuid4().int, 63), LETTER], list[Any]()
    async with connected(changed(tiny, world, share_prefixes=True)) as engine:
        whole = await run(engine, make_request(head, 20))
        world.server.go_wrong(
            "unsalted", "no_events", "running_cached", *(["drop"] if end == "loss" else [])
        )
        stops = (whole.text[3:6],) if end == "stop_sequence" else ()
        sequence = engine.submit(make_request(head, LONG, stop_sequences=stops), events.append)
        if end == "cancel":
            await until(lambda: any(isinstance(each, TokensGenerated) for each in events))
            sequence.cancel()
        await until(
            lambda: isinstance(events[-1] if events else None, SequenceFinished | Exception)
        )
        world.server.go_wrong("unsalted", "no_events")

    [scheduled] = [each for each in events if isinstance(each, Scheduled)]
    has_last = world.settings.target.service.is_http and end == "stop_sequence"
    running = 0 if world.settings.target.service.is_http else 49
    assert scheduled.is_final in (False, has_last)
    assert scheduled.cached_token_count == (48 if scheduled.is_final else running)
    if end != "loss":
        assert events[-1].cached_token_count == (48 if has_last else running)


async def test_a_server_that_does_not_report_its_tokenizer_is_believed(world: RemoteWorld) -> None:
    world.server.go_wrong("no_tokenizer", "no_events")
    async with connected(world) as engine:
        assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3


async def test_blocks_evicted_by_the_server_are_not_predicted(
    tiny: TinyCheckpoint, remote_server: ServerProcess
) -> None:
    """Once it has reported its whole cache."""
    settings = remote_settings(tiny, remote_server, Service.TRTLLM, block_tokens=16)
    head, salt = tuple(prompt(uuid.uuid4().int, 64)), uuid.uuid4().hex
    async with connected(RemoteWorld(remote_server, settings)) as engine:
        await until(lambda: remote_server.state()["subscribers"] > 0)
        remote_server.cache(clear=True)
        await run(engine, make_request(head, 3, cache_salt=salt))
        await until(lambda: engine.predict_cached_token_count(head, salt) == 48)
        assert engine.predict_cached_token_count(head, "other") == 0

        remote_server.cache(remove=head)
        await until(lambda: engine.predict_cached_token_count(head, salt) == 0)


async def test_a_sequence_that_a_server_drops_continues_on_another_server(
    tiny: TinyCheckpoint, remote_server: ServerProcess, tmp_path: Path
) -> None:
    """One server of each service: no token is lost or repeated, the move is counted."""
    targets = [str(remote_server.target(service)) for service in SERVICES]
    fleet = {
        "models": {
            "far": {"engine": "remote", "directory": str(tiny.directory), "targets": targets}
        }
    }
    (tmp_path / "fleet.yaml").write_text(json.dumps(fleet))
    engine = build_serving(Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml"))).engines[
        "far"
    ]
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        await until(lambda: engine.statistics().replica_count == len(targets))
        undisturbed = await run(engine, make_request(prompt(1), 600))
        async with streams.stream(engine, make_request(prompt(1), 600)) as stream:
            read_count = await first_tokens(stream, 5)
            remote_server.go_wrong("drop")
            token_ids: list[int] = []
            is_wrong = True
            async for event in stream:
                if isinstance(event, TokensGenerated):
                    token_ids += event.token_ids
                elif isinstance(event, SequenceFinished):
                    finished = event
                if is_wrong and engine.statistics().migration_count:
                    remote_server.go_wrong()
                    is_wrong = False
        await engine.close()

    assert len(undisturbed.token_ids) == 600
    assert token_ids == undisturbed.token_ids[read_count:]
    assert finished.generated_token_count == 600
    assert finished.migration_count > 0


async def test_only_the_right_certificates_meet(
    tiny: TinyCheckpoint, remote_server: ServerProcess, service: Service
) -> None:
    target = remote_server.tls_target(service)
    right = remote_server.certificates.client()
    settings = remote_settings(tiny, remote_server, service, target=target)
    unwelcome = [
        None,
        remote_server.certificates.client("stranger"),
        TlsFiles(right.authority),
        TlsFiles(
            remote_server.certificates.directory / "elsewhere.pem", right.certificate, right.key
        ),
    ]
    for tls in unwelcome:
        async with remote_engine(secured(settings, tls), started=False) as engine:
            with pytest.raises(errors.EngineStartFailed, match=r"a call to .* failed"):
                await engine.start()

    async with connected(RemoteWorld(remote_server, secured(settings, right))) as engine:
        assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3


def secured(settings: RemoteSettings, tls: TlsFiles | None) -> RemoteSettings:
    return RemoteSettings(
        **{name: getattr(settings, name) for name in settings.__slots__} | {"tls": tls}
    )


async def test_an_unreachable_address_shows_the_time_of_the_next_attempt(
    tiny: TinyCheckpoint, remote_server: ServerProcess
) -> None:
    settings = remote_settings(
        tiny, remote_server, Service.VLLM, target=Target(Service.VLLM, "127.0.0.1:1")
    )
    async with remote_engine(settings, started=False) as engine:
        with pytest.raises(errors.EngineStartFailed, match=re.escape("vllm://127.0.0.1:1")):
            await engine.start()
        with pytest.raises(errors.EngineUnavailable) as unavailable:
            await run(engine, make_request(prompt(1), 3))

    assert unavailable.value.retry_after_s > 0
