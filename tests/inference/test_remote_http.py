"""Remote engines over OpenAI's completions: probes, salts, names, broken streams, restarts.

`test_engine_contract.py` and `test_remote_engine.py` run their suites over HTTP as well.
"""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import grpc
import msgspec
import pytest
from tokenizers.decoders import DecodeStream

from api.core.settings import Settings
from api.fleet.fleet import build_serving
from bench import engine_streams as streams
from common.settings import SettingInvalid
from inference.adapters import external_queue, remote_http_connection
from inference.adapters.external_queue import READ_ON_TOKENS_MAX
from inference.adapters.external_request import Choice, Request
from inference.adapters.remote_http import HttpCall, HttpDialect, HttpFailure, _Events, _failure
from inference.adapters.remote_http_connection import Connection, Connections, Server
from inference.adapters.remote_settings import RemoteSettings, Service, Target
from inference.doctor import remote as doctor
from inference.doctor.findings import Verdict
from inference.engine import EngineFinishReason, SamplingParams, TokensGenerated
from inference.errors import EngineFailed, EngineStartFailed, RequestImpossible
from inference.routing.replica import Replica
from inference.routing.replica_set import ReplicaSet
from inference.sequences import UNKNOWN_TOKEN_ID, RequestField
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.reasoning_families import FAMILIES
from tests.inference.remote_engines import RemoteWorld, connected, remote_engine, remote_settings
from tests.inference.running import make_core, make_request, run_all
from tests.inference.worker_engines import LONG, WAIT_S, first_tokens, prompt, run, until
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.openai import ADAPTER
from tests.remote_servers.serving import ServerProcess, server_process

ALWAYS = HttpDialect.capabilities.unsupported
WITHOUT_IDS = pytest.mark.parametrize("faults", [[], ["refuse continuous_usage_stats"]])
TOKEN = '{"choices": [{"token_ids": [5]}]}'
END = '{"choices": [{"token_ids": [6], "finish_reason": "length"}], "usage": null}'
USAGE = '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'


@pytest.fixture
def world(tiny: TinyCheckpoint, remote_server: ServerProcess) -> RemoteWorld:
    return RemoteWorld(remote_server, remote_settings(tiny, remote_server, Service.OPENAI_HTTP))


@pytest.mark.parametrize(
    ("faults", "missing"),
    [
        ([], set()),
        (["refuse min_p"], {RequestField.MIN_P}),
        (["ignore logit_bias"], {RequestField.LOGIT_BIAS}),
        (["ignore seed"], {RequestField.SEED}),
        (["ignore structured_outputs"], {RequestField.JSON_SCHEMA, RequestField.REGEX}),
    ],
)
async def test_fields_that_the_server_refuses_or_ignores_are_found_by_tests(
    world: RemoteWorld, faults: list[str], missing: set[RequestField]
) -> None:
    world.server.go_wrong(*faults)
    async with connected(world) as engine:
        assert engine.model.capabilities.unsupported == ALWAYS | missing
        assert len((await run(engine, make_request(prompt(1), 5))).token_ids) == 5
        if RequestField.MIN_P in missing:
            drawn = make_request(prompt(1), 5, sampling=SamplingParams(temperature=1.0, min_p=0.5))
            with pytest.raises(RequestImpossible) as refused:
                await run(engine, drawn)
            assert refused.value.field == RequestField.MIN_P


async def test_a_model_has_the_capabilities_that_its_servers_showed(
    tiny: TinyCheckpoint, remote_server: ServerProcess, tmp_path: Path
) -> None:
    remote_server.go_wrong("refuse min_p")
    target = str(remote_server.target(Service.OPENAI_HTTP))
    models = {"far": {"engine": "remote", "directory": str(tiny.directory), "targets": [target]}}
    (tmp_path / "fleet.yaml").write_text(json.dumps({"models": models}))
    settings = Settings.of(home=tmp_path, fleet=str(tmp_path / "fleet.yaml"))
    engine = cast(Any, build_serving(settings).engines["far"])
    assert engine.model.capabilities.unsupported == ALWAYS

    async with remote_engine(engine.replicas[0].engine._settings) as connected_engine:
        engine.replicas[0].engine = connected_engine
        assert engine.model.capabilities.unsupported == ALWAYS | {RequestField.MIN_P}
        assert engine.model.name == "far"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no_counts", "--enable-prompt-tokens-details"),
        ("refuse cache_salt", "WEIR_REMOTE_SHARE_PREFIXES=1"),
    ],
)
async def test_a_server_that_cannot_be_billed_or_isolated_is_not_used(
    world: RemoteWorld, fault: str, message: str
) -> None:
    world.server.go_wrong(fault)
    async with remote_engine(world.settings, started=False) as engine:
        with pytest.raises(EngineStartFailed, match=message):
            await engine.start()

        world.server.go_wrong()
        await until(engine.healthy)


async def test_token_ids_are_requested_as_the_server_understands_it(world: RemoteWorld) -> None:
    request = make_request(prompt(1), 5)
    requested = []
    for fault in ("", "refuse return_token_ids", "generate"):
        world.server.go_wrong(*filter(None, [fault]))
        async with connected(world) as engine:
            requested.append(await run(engine, request))
            assert not engine.model.capabilities.counts_from_usage
            unsupported = engine.model.capabilities.unsupported
        body = world.server.state()["bodies"][-1]
        assert ("return_token_ids" in body, "nvext" in body) == (
            not fault,
            fault == "refuse return_token_ids",
        )
    assert unsupported == ALWAYS | {
        RequestField.LOGIT_BIAS,
        RequestField.SEED,
        RequestField.TOP_LOGPROBS,
        RequestField.JSON_SCHEMA,
    }
    assert [each.token_ids for each in requested] == [requested[0].token_ids] * 3
    assert [each.text for each in requested] == [requested[0].text] * 3


@WITHOUT_IDS
async def test_without_token_ids_text_and_counts_are_those_of_the_torch_engine(
    tiny: TinyCheckpoint, world: RemoteWorld, faults: list[str]
) -> None:
    requests = [
        make_request(prompt(1), 30),
        make_request(prompt(2), 1),
        make_request(prompt(3), 60, stop_sequences=("e", "xyz")),
        make_request(prompt(4), 8, choice_count=2, sampling=SamplingParams(temperature=1, seed=5)),
    ]
    expected = run_all(make_core(tiny.directory), requests[:3])
    world.server.go_wrong("no_ids", *faults)
    async with connected(world) as engine:
        outcomes = [await run(engine, request) for request in requests]

    for outcome, model in zip(outcomes, expected, strict=False):
        assert outcome.finished is not None
        assert model.finished is not None
        assert outcome.text == model.text
        assert outcome.finished.reason is model.finished.reason
        assert {*outcome.token_ids} == {UNKNOWN_TOKEN_ID}
        assert len(outcome.token_ids) == outcome.finished.generated_token_count
    counts = [outcome.finished and outcome.finished.generated_token_count for outcome in outcomes]
    assert counts[:2] == [30, 1]
    assert counts[3] == 16
    if not faults:  # else the tokens of a message are known at the end only
        assert counts[2] == len(expected[2].token_ids)


async def test_without_token_ids_fields_that_need_them_are_refused(world: RemoteWorld) -> None:
    world.server.go_wrong("no_ids")
    async with connected(world) as engine:
        model = engine.model
        assert model.capabilities.unsupported == ALWAYS | {
            RequestField.LOGIT_BIAS,
            RequestField.TOP_LOGPROBS,
            RequestField.STOP_TOKEN_IDS,
            RequestField.MIN_OUTPUT_TOKENS,
        }
        for request, field in (
            (make_request(prompt(1), 5, stop_token_ids=frozenset({7})), "stop_token_ids"),
            (replace(make_request(prompt(1), 5), output_token_ids=(7,)), "output_token_ids"),
        ):
            with pytest.raises(RequestImpossible) as refused:
                await run(engine, request)
            assert refused.value.field == field
    assert not model.can_continue(make_request(prompt(1), 5))


@pytest.mark.parametrize(
    ("fault", "message", "faults"),
    [
        ("no_usage", "did not report its usage", ["refuse continuous_usage_stats"]),
        *(
            (fault, message, faults)
            for fault, message in (
                ("overcount", "counts 31 tokens after"),
                ("undercount", "counts 1 tokens after"),
                ("drop", "UNAVAILABLE"),
            )
            for faults in ([], ["refuse continuous_usage_stats"])
        ),
    ],
)
async def test_without_token_ids_a_stream_with_wrong_usage_fails_within_its_limit(
    world: RemoteWorld, fault: str, message: str, faults: list[str]
) -> None:
    world.server.go_wrong("no_ids", *faults)
    async with connected(world) as engine:
        world.server.go_wrong("no_ids", fault, *faults)
        events: list[Any] = []
        engine.submit(make_request(prompt(1), 30), events.append)
        await until(lambda: bool(events) and isinstance(events[-1], EngineFailed))
        assert message in str(events[-1])
        counts = [len(each.token_ids) for each in events if isinstance(each, TokensGenerated)]
        assert 0 < sum(counts) < 30
        world.server.go_wrong("no_ids", *faults)


async def test_output_without_token_ids_is_not_moved_to_a_replica(world: RemoteWorld) -> None:
    world.server.go_wrong("no_ids")
    async with remote_engine(world.settings) as first:
        world.server.go_wrong()
        async with remote_engine(world.settings) as second:
            each = [Replica("r0", first), Replica("r1", second)]
            replicas = ReplicaSet(second.model, each, recovery_wait_s=600.0)
            assert replicas.model.capabilities.counts_from_usage
            replicas.drain({"r1"})
            world.server.go_wrong("no_ids", "drop")
            events: list[Any] = []
            replicas.submit(make_request(prompt(1), 30), events.append)
            await until(lambda: bool(events))
            replicas.drain(())
            seen_count = world.server.state()["seen"]
            await until(lambda: isinstance(events[-1], EngineFailed))

            assert world.server.state()["seen"] == seen_count
            assert any(isinstance(event, TokensGenerated) for event in events)


DYNAMO, SGLANG = "refuse return_token_ids", "generate"


@pytest.mark.parametrize(
    ("faults", "sent_as"),
    [
        ([], {"cache_salt"}),
        (["no_ids"], {"cache_salt"}),
        ([DYNAMO], {"cache_salt", "nvext"}),
        ([DYNAMO, "no_zeros"], {"cache_salt", "nvext"}),
        ([DYNAMO, "ignore cache_salt"], {"cache_salt", "nvext"}),
        ([DYNAMO, "refuse cache_salt"], {"nvext"}),
        ([DYNAMO, "refuse nvext.cache_salt"], {"cache_salt"}),
        ([DYNAMO, "refuse nvext.cache_salt", "refuse cache_salt", "tenant_header"], set()),
        ([SGLANG], {"cache_salt", "extra_key"}),
        ([SGLANG, "ignore cache_salt"], {"cache_salt", "extra_key"}),
        ([SGLANG, "ignore extra_key"], {"cache_salt", "extra_key"}),
        ([SGLANG, "refuse cache_salt"], {"extra_key"}),
    ],
)
async def test_prefixes_are_cached_for_each_tenant_alone_by_a_field_that_the_server_takes(
    world: RemoteWorld, faults: list[str], sent_as: set[str]
) -> None:
    world.server.go_wrong(*faults)
    head, salts = prompt(uuid.uuid4().int, 64), ("one/@", "one/@", "another")
    async with connected(world) as engine:
        cached = [
            (await run(engine, make_request(head, 3, cache_salt=salt))).cached_token_count
            for salt in salts
        ]
        bodies = world.server.state()["bodies"][-3:]

    assert cached == [0, 48, 0]
    hashes = [hashlib.sha256(salt.encode()).hexdigest() for salt in salts]
    assert [body["headers"]["x-tenant-id"] for body in bodies] == hashes
    for body, salt in zip(bodies, hashes, strict=True):
        found = {name: body[name] for name in ("cache_salt", "extra_key") if name in body}
        if "cache_salt" in body.get("nvext", {}):
            found["nvext"] = body["nvext"]["cache_salt"]
        assert found == dict.fromkeys(sent_as, salt)


@pytest.mark.parametrize(
    "faults",
    [
        ["ignore cache_salt"],
        ["unsalted"],
        [DYNAMO, "unsalted", "tenant_header"],
        [SGLANG, "ignore cache_salt", "ignore extra_key"],
        [DYNAMO, "refuse nvext.cache_salt", "refuse cache_salt"],
    ],
)
async def test_a_server_that_ignores_salts_is_unused(world: RemoteWorld, faults: list[str]) -> None:
    world.server.go_wrong(*faults)
    async with remote_engine(world.settings, started=False) as engine:
        with pytest.raises(EngineStartFailed, match="shares cached prefixes between tenants"):
            await engine.start()


@pytest.mark.parametrize("faults", [[], ["no_ids"], [DYNAMO], [SGLANG]])
@pytest.mark.parametrize("ends", ["at the stop sequence", "soon", "late"])
async def test_an_output_that_ends_by_a_stop_sequence_is_billed_with_its_cached_tokens(
    world: RemoteWorld, faults: list[str], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends it, or its last message is waited for within a bound of tokens."""
    monkeypatch.setattr(external_queue, "END_WAIT_S", WAIT_S)  # on a busy machine 2 s may pass
    if ends != "at the stop sequence":
        faults = [*faults, "ignore stop"]
    world.server.go_wrong(*faults)
    head, salt = prompt(1, 64), uuid.uuid4().hex
    async with connected(world) as engine:
        whole = await run(engine, make_request(head, READ_ON_TOKENS_MAX, cache_salt=salt))
        assert whole.finished is not None
        stop = whole.text[8:12]
        text = whole.text[: whole.text.index(stop)]
        request = make_request(head, LONG, cache_salt=salt, stop_sequences=("zzz", stop))
        if ends == "soon":
            stop_criteria = replace(request.stop, max_output_tokens=READ_ON_TOKENS_MAX)
            request = replace(request, stop=stop_criteria)
        aborted_before = len(world.server.state()["aborted"])
        stopped = await run(engine, request)
        await until(lambda: world.server.idle)
        state = world.server.state()
        aborted_count = len(state["aborted"]) - aborted_before

    assert stopped.finished is not None
    assert (stopped.text, stopped.finished.reason) == (text, EngineFinishReason.STOP_SEQUENCE)
    count = stopped.finished.generated_token_count
    assert stopped.token_ids == whole.token_ids[:count], "no token after the sequence is billed"
    sent = state["bodies"][-1].get("stop") == ["zzz", stop]
    assert sent == (ends == "at the stop sequence")
    known = ends != "late"
    assert stopped.finished.cached_token_count == (48 if known else 0)
    assert aborted_count == (not known)


async def test_a_stop_that_only_the_server_finds_fails_its_output(world: RemoteWorld) -> None:
    async with connected(world) as engine:
        whole = await run(engine, make_request(prompt(1), 30))
        world.server.go_wrong("early_stop")
        events: list[Any] = []
        stops = (f"{whole.text[3]}zz",)
        engine.submit(make_request(prompt(1), 30, stop_sequences=stops), events.append)
        await until(lambda: bool(events) and isinstance(events[-1], EngineFailed))
        world.server.go_wrong()
    assert "a stop sequence that the output lacks" in str(events[-1])


@pytest.mark.parametrize(
    ("changes", "is_sent"),
    [
        ({}, True),
        ({"stop_sequences": tuple("abcd")}, True),
        ({"stop_sequences": tuple("abcde")}, False),
        ({"min_output_tokens": 2}, False),
        ({"stop_sequences": ("a", "<|end|>")}, False),
        ({"is_torn": True}, False),
        ({"splits_reasoning": True}, False),
    ],
)
async def test_stop_sequences_are_sent_where_the_server_finds_the_same(
    tiny: TinyCheckpoint, changes: dict[str, Any], is_sent: bool
) -> None:
    """The server would find them in the thinking, and reads control tokens otherwise."""
    target = Target(Service.OPENAI_HTTP, "127.0.0.1:1", "tiny")
    settings = RemoteSettings(directory=tiny.directory, name="tiny", target=target)
    splits, is_torn = [changes.get(name, False) for name in ("splits_reasoning", "is_torn")]
    changes = {
        name: changes[name] for name in changes if name not in ("splits_reasoning", "is_torn")
    }
    request = make_request((300, 301), 9, **({"stop_sequences": ("ab",)} | changes))
    family = FAMILIES[0] if splits else next(each for each in FAMILIES if each.special)
    decoder = family.decoder
    if not splits:
        control = decoder.control_token_in("".join(family.tokens))
        stops = [each.replace("<|end|>", control or "") for each in request.stop.stop_sequences]
        request = replace(request, stop=replace(request.stop, stop_sequences=tuple(stops)))
    prompt_ids = family.backend.encode("☃" if is_torn else "e", add_special_tokens=False).ids
    prompt_ids = prompt_ids[: -1 if is_torn else None]
    assert prompt_ids, "the snowman is several tokens"
    opened = decoder.open(request.stop.stop_sequences, prompt_ids, splits=splits)
    choice = Choice(Request(1, request, frozenset(), 0.0, None), 0, 1, opened)
    dialect = HttpDialect(cast(Any, None), settings)
    dialect.form.id_fields, dialect.form.sends_stops = {"return_token_ids": True}, True

    sent = list(request.stop.stop_sequences) if is_sent else None
    assert dialect.form.body(choice, frozenset()).get("stop") == sent
    dialect.form.sends_stops = False
    assert "stop" not in dialect.form.body(choice, frozenset())


def test_a_server_that_decodes_as_vllm_finds_the_same_stop_sequences(tiny: TinyCheckpoint) -> None:
    """Both search text that may end within a character; Weir may find a sequence earlier."""
    tokenizer, rng = Tokenizer(tiny.directory), random.Random(5)
    found_count = torn_count = 0
    for _ in range(400):
        ids, output = [rng.choices(range(7, 400), k=count) for count in (20, 40)]
        detokenizer = tokenizer.decoder.open(("e", "in"), ids)
        torn_count += detokenizer.is_torn
        ends = [index for index, each in enumerate(output) if detokenizer.push(each).stopped][:1]
        stream, text = DecodeStream(ids=ids, skip_special_tokens=True), ""
        for index, token_id in enumerate(output):
            try:
                text += stream.step(tokenizer.backend, token_id) or ""
            except Exception:  # of text that is not UTF-8: the server begins again
                stream = DecodeStream(skip_special_tokens=True)
                text += stream.step(tokenizer.backend, token_id) or ""
            if "e" in text or "in" in text:
                found_count += 1
                assert detokenizer.is_torn or (ends and ends[0] <= index)
                break
    assert found_count > 300
    assert torn_count > 20


async def test_ranks_are_sent_where_the_server_takes_priorities(world: RemoteWorld) -> None:
    for fault in ("ranks", ""):
        world.server.go_wrong(*filter(None, [fault]))
        async with connected(world) as engine:
            await run(engine, make_request(prompt(1), 3, rank=7.4))
        assert world.server.state()["bodies"][-1].get("priority") == (7 if fault else None)


async def test_choices_equal_the_torch_engines(tiny: TinyCheckpoint, world: RemoteWorld) -> None:
    """Each choice is a request of its own, with a seed derived from the first one's."""
    drawn = SamplingParams(temperature=1.0, seed=3)
    request = make_request(prompt(1), 10, sampling=drawn, choice_count=2)
    [first] = run_all(make_core(tiny.directory), [make_request(prompt(1), 10, sampling=drawn)])
    async with connected(world) as engine, streams.stream(engine, request) as stream:
        outputs: list[list[int]] = [[], []]
        async for event in stream:
            if isinstance(event, TokensGenerated):
                outputs[event.choice_index] += event.token_ids
    assert outputs[0] == first.token_ids
    assert len(outputs[1]) == 10
    assert outputs[1] != outputs[0]


async def test_a_model_or_an_adapter_is_chosen_by_name(
    tiny: TinyCheckpoint, world: RemoteWorld
) -> None:
    address = world.settings.target.address
    for model, is_served in ((ADAPTER, True), ("", True), ("other", False)):
        target = Target(Service.OPENAI_HTTP, address, model)
        settings = remote_settings(tiny, world.server, Service.OPENAI_HTTP, target=target)
        async with remote_engine(settings, started=False) as engine:
            if not is_served:
                with pytest.raises(EngineStartFailed, match="serves tiny, tiny-adapter, not other"):
                    await engine.start()
                continue
            await engine.start()
            await run(engine, make_request(prompt(1), 3))
            assert world.server.state()["bodies"][-1]["model"] == (model or "tiny")


async def test_a_restarted_server_is_used_again(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    with server_process(tiny.directory, certificates) as server:
        settings = remote_settings(
            tiny, server, Service.OPENAI_HTTP, poll_interval_s=60.0, restart_delay_s_max=1.0
        )
        port = int(server.http_address.rpartition(":")[2])
        async with remote_engine(settings) as engine:
            async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
                await first_tokens(stream, 3)
                server.process.kill()
                with pytest.raises(EngineFailed):
                    async for _ in stream:
                        pass
            await until(lambda: not engine.healthy())
            with server_process(tiny.directory, certificates, http_port=port):
                await until(engine.healthy)
                assert len((await run(engine, make_request(prompt(1), 3))).token_ids) == 3


async def test_the_doctor_finds_a_server_well_and_its_faults(world: RemoteWorld) -> None:
    well = await doctor.examine(world.settings)
    world.server.go_wrong("unsalted", "refuse min_p")
    ill = {found.question: found for found in await doctor.examine(world.settings)}

    assert [each for each in well if each.verdict is Verdict.BAD] == []
    bad = {question for question, found in ill.items() if found.verdict is Verdict.BAD}
    assert bad == {"Does it cache prompts, separated by salt?"}
    assert ill["Which request fields does it support?"].seen == "all but sampling.min_p"


def test_embedding_models_are_refused_at_start(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    settings = Settings.of(
        home=tmp_path, encoders={"e": tiny.directory}, remote_encoders={"e": "openai+http://host:1"}
    )
    with pytest.raises(SettingInvalid, match="not supported over HTTP"):
        build_serving(settings)


@pytest.mark.parametrize(
    ("status", "body", "code", "field"),
    [
        (400, {"error": {"message": "no", "param": "min_p"}}, "INVALID_ARGUMENT", "sampling.min_p"),
        (422, {"error": {"message": "no", "param": "x"}}, "INVALID_ARGUMENT", None),
        (404, {"error": {"message": "no such model"}}, "NOT_FOUND", None),
        (429, {}, "RESOURCE_EXHAUSTED", None),
        (503, {}, "RESOURCE_EXHAUSTED", None),
        (500, {}, "INTERNAL", None),
    ],
)
def test_statuses_become_those_of_grpc(
    status: int, body: dict[str, Any], code: str, field: str | None
) -> None:
    failure = _failure(status, json.dumps(body).encode())

    assert (failure.code().name, failure.field) == (code, field)


def pieces(*events: str) -> list[bytes]:
    """Return a response body in pieces."""
    data = "".join(f"data: {event}\n\n" for event in events).encode()
    return [data[start : start + 7] for start in range(0, len(data), 7)]


class Arrived(Connections):
    """A pool whose connection answers with that body, which has arrived."""

    def __init__(self, *events: str) -> None:
        super().__init__(Server("", 0, 1.0))
        self._pieces = pieces(*events)

    def idle(self) -> Connection:
        connection, transport = Connection(self), Mock()
        transport.get_extra_info.return_value = None
        connection.connection_made(transport)
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in self._pieces)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        transport.write = lambda _: connection.data_received(head + body + b"0\r\n\r\n")
        return connection


class Posting:
    """A dialect that gets that response."""

    capabilities = HttpDialect.capabilities

    def __init__(self, *events: str) -> None:
        self.connections = Arrived(*events)
        self.form, self.is_suspected = self, False

    def encoded(self, request_id: str, body: dict[str, Any]) -> bytes:
        return b""

    def suspect(self) -> None:
        self.is_suspected = True


async def test_a_cancelled_output_ends_before_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_http_connection, "PIECE_BYTES", 64)
    call = HttpCall(cast(Any, Posting(TOKEN, TOKEN, END, USAGE, "[DONE]")), "a", {}, 1 << 20)
    messages = aiter(call)

    [first] = await anext(messages)
    assert first.part.token_ids == [5]
    call.cancel()
    assert [each.part.finish_reason async for [each] in messages] == ["abort"]


def read(*events: str) -> tuple[list[Any], _Events]:
    """Return the messages of a body, and their reader."""
    reader = _Events()
    return [message for piece in pieces(*events) for message in reader.read(piece)], reader


def test_the_last_message_has_the_usage() -> None:
    [first, last], reader = read(TOKEN, END, USAGE, "[DONE]")

    assert (first.part.token_ids, first.usage) == ([5], None)
    assert (last.part.finish_reason, last.usage.completion_tokens) == ("length", 2)
    assert reader.is_done


def test_messages_that_arrive_together_are_read_together_also_before_an_invalid_one() -> None:
    reader = _Events()

    messages = reader.read(b"".join(pieces(TOKEN, TOKEN, "{")))

    assert [each.part.token_ids for each in messages] == [[5], [5]]
    assert isinstance(reader.failure, msgspec.DecodeError)


async def test_a_stream_that_breaks_off_or_goes_on_after_its_end_fails() -> None:
    for events in ([TOKEN], [TOKEN, END, USAGE]):
        messages, reader = read(*events)
        assert (len(messages), reader.is_done) == (1, False)
        posting = Posting(*events)
        with pytest.raises(HttpFailure, match="ended before its last message"):
            _ = [each async for each in HttpCall(cast(Any, posting), "a", {}, 1 << 20)]
        assert posting.is_suspected
    _, reader = read(END, TOKEN, "[DONE]")
    assert "after the finish reason" in str(reader.failure)
    for failing in ('{"error": {"message": "dead", "code": 500}}', "{"):
        with pytest.raises(HttpFailure) as failed:
            _ = [
                each
                async for each in HttpCall(
                    cast(Any, Posting(TOKEN, failing, "[DONE]")), "a", {}, 1 << 20
                )
            ]
        assert failed.value.code() is grpc.StatusCode.INTERNAL
