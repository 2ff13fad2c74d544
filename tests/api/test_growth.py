"""Every parser of what callers send is linear, and keeps the interpreter for at most 50 ms.

The bodies and messages are generated from the types of each entry point (`bench/costly_bodies.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from weir.v1 import (
    admin_service_pb2,
    billing_service_pb2,
    inference_service_pb2,
    receipt_service_pb2,
)
from weir.v1 import inference_service_pb2 as pb

from api.core.interceptor import LARGE_MESSAGES, MESSAGE_BYTES_MAX, checked, tolerant
from api.generation.client_stream import starts_of
from api.generation.embedding_wire import parse_embed
from api.generation.quoting import parse_quoted_embed, parse_quoted_start
from api.generation.start_frame import parse_count_tokens
from api.openai.exchange import valid_starts
from api.openai.gateway import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    EmbeddingParameters,
    embed_request,
    parsed_body,
)
from api.openai.messages import parse_counted_message
from api.openai.parameters import SHORT_BYTES_MAX, decode
from api.openai.tolerance import Ignored
from bench.costly_bodies import Costly, bodies_of, messages_of
from tests.growth import BLOCK_MAX_S, Call, as_in_service, check_cost, check_growth, check_hold

MODEL, WINDOW = "tiny", 2**20
BYTES_MAX = 4 * 2**20  # default of WEIR_MESSAGE_BYTES_MAX
GROWTH_BYTES = 2**17  # and twice as many: messages of both sizes are walked
USER = [{"role": "user", "content": "x"}]
CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": USER}
Entry = Callable[[bytes], object]


def generating(api: Any) -> Entry:
    """Return what the HTTP API does with the body of a generating request."""

    def enter(body: bytes) -> object:
        parsed, headers = parsed_body(body, api, strict=False)
        return valid_starts(parsed, uuid.UUID(int=1), WINDOW), headers

    return enter


def counting(api: Any) -> Entry:
    """Return what the HTTP API does with a body whose tokens are counted."""

    def enter(body: bytes) -> object:
        parsed, _ = parsed_body(body, api, strict=False)
        [start] = parsed.starts
        return parse_count_tokens(
            pb.CountTokensRequest(
                model=start.model, conversation=start.conversation, tools=start.tools
            )
        )

    return enter


def embedding(body: bytes) -> object:
    """Do what the HTTP API does with a body to embed."""
    return parse_embed(
        embed_request(decode(body, EmbeddingParameters, Ignored()), str(uuid.uuid4()))
    )


HTTP: Mapping[str, tuple[Entry, type[Any], Mapping[str, Any]]] = {
    "/v1/chat/completions": (generating(CHAT), CHAT.parameters, CHAT_BODY),
    "/v1/completions": (
        generating(COMPLETIONS),
        COMPLETIONS.parameters,
        {"model": MODEL, "prompt": "x"},
    ),
    "/v1/responses": (generating(RESPONSES), RESPONSES.parameters, {"model": MODEL, "input": "x"}),
    "/v1/responses/input_tokens": (
        counting(RESPONSES),
        RESPONSES.parameters,
        {"model": MODEL, "input": "x"},
    ),
    "/v1/messages": (generating(MESSAGES), MESSAGES.parameters, CHAT_BODY | {"max_tokens": 1}),
    "/v1/messages/count_tokens": (
        counting(replace(MESSAGES, parse=parse_counted_message)),
        MESSAGES.parameters,
        CHAT_BODY,
    ),
    "/v1/embeddings": (embedding, EmbeddingParameters, {"model": MODEL, "input": "x"}),
}
SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        inference_service_pb2,
        admin_service_pb2,
        billing_service_pb2,
        receipt_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in SERVICES
    for method in service.methods
}
PARSERS: Mapping[str, Callable[[Any], object]] = {
    "/weir.v1.InferenceService/Generate": lambda message: starts_of(message.frames, WINDOW),
    "/weir.v1.InferenceService/CountTokens": lambda message: parse_count_tokens(checked(message)),
    "/weir.v1.InferenceService/Quote": lambda message: quoted(checked(message)),
    "/weir.v1.InferenceService/Embed": lambda message: parse_embed(checked(message)),
}


def quoted(message: pb.QuoteRequest) -> object:
    if message.HasField("embed"):
        return parse_quoted_embed(message)
    return parse_quoted_start(message, WINDOW)


def calling(path: str, method: MethodDescriptor) -> Entry:
    """Return what the server does with a message before the handler of the call."""
    kind: Any = GetMessageClass(method.input_type)
    read = tolerant(
        kind.FromString,
        None if path in LARGE_MESSAGES else MESSAGE_BYTES_MAX,
    )
    assert read is not None
    parse: Callable[[Any], object] = PARSERS.get(path, checked)

    def enter(data: bytes) -> object:
        message = read(data)
        if isinstance(message, Exception):
            raise message
        return parse(message)

    return enter


def entries() -> Iterator[tuple[str, Entry, list[Costly], int]]:
    """Yield each entry point, its costly bodies, and the limit of their bytes."""
    for path, (enter, kind, plain) in HTTP.items():
        yield path, enter, list(bodies_of(kind, plain)), BYTES_MAX
    for path, method in METHODS.items():
        size = BYTES_MAX if path in LARGE_MESSAGES else MESSAGE_BYTES_MAX
        yield path, calling(path, method), list(messages_of(method.input_type)), size


ENTRIES = {path: (enter, bodies, size) for path, enter, bodies, size in entries()}
# Their bodies are those of another path, without the last step.
COUNTING = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")
# Processor time of any body: far above every parser, far below one that is not linear
FIXED_S, BYTE_S = 0.02, 250e-9
ERROR_CHARS_MAX = 5000  # an error is converted and sent on the event loop, whatever it quotes


def error_of(call: Call) -> str:
    """Return the message of the error in which a call ends; empty if it succeeds."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def near(costly: Costly, size: int) -> bytes:
    """Return a body of about this size, at most of it."""
    body = costly.build(size)
    if len(body) > size:  # the parameters around the costly place
        body = costly.build(max(2 * size - len(body) - 1000, 1))
    return body


@pytest.mark.parametrize("path", [path for path in ENTRIES if path not in COUNTING])
def test_time_grows_with_the_bytes_of_a_body(path: str) -> None:
    enter, bodies, bytes_max = ENTRIES[path]
    size = min(GROWTH_BYTES, bytes_max // 2)

    def prepare(costly: Costly) -> Callable[[int], Call]:
        def prepared(byte_count: int) -> Call:
            return partial(enter, near(costly, byte_count))

        return prepared

    with as_in_service():
        for costly in bodies:
            # Below this time caches decide; of a square of it, the next test would see seconds.
            check_growth(f"{path}, {costly.name}", prepare(costly), size, 4 * size * BYTE_S)


@pytest.mark.parametrize("path", [path for path in ENTRIES if path not in COUNTING])
def test_no_body_keeps_the_interpreter_or_costs_more_than_its_bytes(path: str) -> None:
    enter, bodies, bytes_max = ENTRIES[path]

    with as_in_service():
        for costly in bodies:
            body = near(costly, bytes_max)
            name, call = f"{path}, {costly.name}", partial(enter, body)
            assert len(error_of(call)) <= ERROR_CHARS_MAX, name
            check_hold(name, call)
            check_cost(name, call, FIXED_S + BYTE_S * len(body))


@pytest.mark.parametrize("path", ENTRIES)
def test_a_short_body_is_parsed_on_the_event_loop_in_20_ms(path: str) -> None:
    enter, bodies, _ = ENTRIES[path]
    size = SHORT_BYTES_MAX if path in HTTP else MESSAGE_BYTES_MAX

    with as_in_service():
        for costly in bodies:
            call = partial(enter, near(costly, size))
            check_cost(f"{path}, {costly.name}", call, BLOCK_MAX_S)
