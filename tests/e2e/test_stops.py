"""The stop that ended an output: its name in every API, for each choice, and after resuming."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.generation.delivery.frames import stop_of
from tests.e2e.conftest import Serve
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.inference.tool_checkpoints import (
    ASSISTANT_ID,
    END_ID,
    TOOL_TEMPLATE,
    make_scripted_checkpoint,
    write_chains,
)
from tests.service import MODEL, Service, Tenant, conversation, start

PIECES = ("Uno", "ST", "OP", "Dos")
WHOLE, CONTROL = "whole", "control"  # further models: STOP is one token; a control token follows
FORKS = "forks"  # answers with one of two tokens

MESSAGES = [{"role": "user", "content": "Go"}]
PATHS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 9},
    "completions": {"prompt": "<|assistant|>", "max_tokens": 9},
    "responses": {"input": "Go", "max_output_tokens": 9},
    "messages": {"messages": MESSAGES, "max_tokens": 9},
}
STOPS: list[tuple[str, list[str], str | None]] = [
    (WHOLE, ["END", "STOP"], "STOP"),
    (MODEL, ["END", "STOP"], "STOP"),
    (MODEL, ["ST", "STOP"], "ST"),
    (WHOLE, ["STOP", "ST"], "ST"),
    (MODEL, ["TOP", "STOP"], "STOP"),
    (MODEL, ["STOP", "OP"], "STOP"),
    (WHOLE, ["Dos", "noSTOPD", "os"], "noSTOPD"),
    (MODEL, ["END"], None),
    (CONTROL, ["END", "<|user|>"], "<|user|>"),
]


def make_forking_checkpoint(directory: Path) -> Path:
    """Write one whose answer has one of two texts, each followed by its end."""
    make_scripted_checkpoint(directory, ["Left!", "Right!"])
    first_id = json.loads((directory / "config.json").read_text())["vocab_size"] - 2
    write_chains(
        directory,
        [[ASSISTANT_ID, first_id, END_ID], [first_id + 1, END_ID]],
        vocabulary_size=first_id + 2,
        alternatives={ASSISTANT_ID: [(first_id + 1, 100.0)]},
    )
    return directory


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory = tmp_path_factory.mktemp("stops")
    control = directory / "control"
    make_checkpoint(control, shape=LlamaShape(layer_count=1), chat_template=TOOL_TEMPLATE)
    size = json.loads((control / "config.json").read_text())["vocab_size"]
    write_chains(control, [[ASSISTANT_ID, 40, 4, 41, END_ID]], vocabulary_size=size)
    made = {
        MODEL: make_scripted_checkpoint(directory / "parts", PIECES),
        WHOLE: make_scripted_checkpoint(directory / "whole", ["Uno", "STOP", "Dos"]),
        CONTROL: control,
        FORKS: make_forking_checkpoint(directory / "forks"),
    }
    return serve(made[MODEL], models=made)


async def answered(service: Service, tenant: Tenant, path: str, **fields: Any) -> dict[str, Any]:
    """Return the facts of a whole or streamed answer of any API under common names."""
    if path == "messages" and "stop" in fields:
        fields["stop_sequences"] = fields.pop("stop")
    body = {"model": MODEL, "temperature": 0} | PATHS[path] | fields
    headers = {"authorization": f"Bearer {tenant.secret}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{service.openai_url}/{path}", json=body, headers=headers) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    if not fields.get("stream"):
        reported = json.loads(text)
        events = [reported]
        ends = reported.get("choices") or [reported]
    else:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        events += [each["response"] for each in events if "response" in each]
        ends = [
            choice
            for each in events
            for choice in each.get("choices", ())
            if choice["finish_reason"] is not None
        ] or [each["delta"] for each in events if each.get("type") == "message_delta"]
    [extension] = [each["weir"] for each in events if each.get("weir", {}).get("finish_reasons")]
    return {
        "reasons": extension["finish_reasons"],
        "extension": extension["stop_reasons"],
        "timings": extension["timings"],
        "choices": [each.get("stop_reason") for each in ends],
        "anthropic": [each.get("stop_sequence") for each in ends],
    }


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [path for path in PATHS if path != "responses"])
@pytest.mark.parametrize(("model", "stops", "matched"), STOPS)
async def test_the_stop_sequence_that_was_completed_first_is_named(
    service: Service,
    tenant: Tenant,
    path: str,
    streams: bool,
    model: str,
    stops: list[str],
    matched: str | None,
) -> None:
    reported = await answered(service, tenant, path, model=model, stop=stops, stream=streams)

    assert reported["extension"] == [matched]
    assert reported["reasons"] == ["STOP" if matched is None else "STOP_SEQUENCE"]
    if path == "messages":
        assert reported["anthropic"] == [matched]
        assert reported["choices"] == ["end_turn" if matched is None else "stop_sequence"]
    else:
        assert reported["choices"] == [matched]


async def begin(stream: Any, **fields: Any) -> str:
    usual: dict[str, Any] = {"conversation": conversation("Go"), "ignore_eos": False}
    sampling = {"sampling": pb.Sampling(temperature=0.0)}
    return str(await stream.begin(**usual | sampling | {"max_output_tokens": 9} | fields))


def token(service: Service, text: str) -> int:
    token_id = service.tokenizer.token_id(text)
    assert token_id is not None
    return token_id


async def test_a_stop_token_is_named_by_its_id(service: Service, tenant: Tenant) -> None:
    two, end = token(service, "Dos"), END_ID
    cases: list[tuple[dict[str, Any], str | int | None]] = [
        ({"stop_token_ids": [two]}, two),
        ({"stop_token_ids": [two, end], "min_output_tokens": 5}, None),
        ({"stop_token_ids": [end]}, None),
        ({"stop_token_ids": [end], "ignore_eos": True}, end),
        ({"stop_token_ids": [two], "stop_sequences": ["OP", "Dos"]}, "OP"),
        ({"stop_sequences": ["ST", "Dos"], "min_output_tokens": 3}, "Dos"),
        ({"stop_sequences": ["STOP"], "max_output_tokens": 2}, None),
        ({"stop_token_ids": [two], "max_output_tokens": 3}, None),
        ({}, None),
    ]
    async with service.stream(tenant.secret) as stream:
        ids = [await begin(stream, **fields) for fields, _ in cases]
        ends = [await stream.finished(request_id) for request_id in ids]

    assert [stop_of(end) for end in ends] == [matched for _, matched in cases]
    for path in ("chat/completions", "completions"):
        for streams in (False, True):
            by_token = await answered(service, tenant, path, stop_token_ids=[two], stream=streams)
            assert by_token["choices"] == by_token["extension"] == [two]


async def test_each_choice_names_its_own_stop(service: Service, tenant: Tenant) -> None:
    requested: dict[str, Any] = {
        "model": FORKS,
        "n": 8,
        "temperature": 1,
        "seed": 4,
        "stop": ["Left!", "Right!"],
    }
    whole, streamed = [
        await answered(service, tenant, "chat/completions", stream=streams, **requested)
        for streams in (False, True)
    ]
    async with service.client(tenant.secret) as client:
        result = await client.generate(
            FORKS, text="<|assistant|>", choice_count=8, temperature=1, seed=4, stop=["Left!", "Ri"]
        ).wait()

    assert {*whole["choices"]} == {"Left!", "Right!"}
    assert whole["choices"] == whole["extension"]
    assert sorted(streamed["choices"]) == sorted(whole["choices"])
    assert streamed["extension"] == whole["extension"]
    assert {choice.stopped_by for choice in result.choices} == {"Left!", "Ri"}
    assert result.stopped_by == result.choices[0].stopped_by


async def test_a_resumed_stream_names_the_same_stop(service: Service, tenant: Tenant) -> None:
    request_id = str(uuid.uuid4())
    frame = start(
        request_id,
        conversation=conversation("Go"),
        stop_sequences=["OP"],
        ignore_eos=False,
        max_output_tokens=9,
    )
    frame.start.keep_on_disconnect.FromTimedelta(timedelta(seconds=60))
    async with service.stream(tenant.secret) as stream:
        await stream.send(frame)
        first = await stream.finished(request_id)
    async with service.stream(tenant.secret) as stream:
        await stream.attach(request_id)
        again = await stream.finished(request_id)

    assert first.stop_sequence == again.stop_sequence == "OP"
    assert again.reason == types_pb2.FINISH_REASON_STOP_SEQUENCE
