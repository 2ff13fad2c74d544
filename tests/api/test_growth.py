"""Every parser of what callers send is linear, and keeps the interpreter for at most 50 ms.

The bodies and messages are generated from the types of each entry point (`bench/costly_bodies.py`).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from weir.v1 import (
    admin_service_pb2,
    billing_service_pb2,
    inference_service_pb2,
    receipt_service_pb2,
)
from weir.v1 import inference_service_pb2 as pb
from weir.v1.configuration_pb2 import ApplyConfigurationRequest

from api.admin.configuration_calls import Parsing
from api.console.console import BODY_BYTES_MAX, read_message
from api.core.interceptor import LARGE_MESSAGES, MESSAGE_BYTES_MAX, checked, is_costly, tolerant
from api.core.interceptor import SHORT_BYTES_MAX as MESSAGE_SHORT_BYTES_MAX
from api.generation.parsing.embed_request import parse_embed
from api.generation.parsing.start_frame import parse_count_tokens
from api.generation.request.quoting import parse_quoted_embed, parse_quoted_start
from api.openai.apis import parsed_body
from api.openai.embeddings import EmbeddingParameters, embed_request
from api.openai.exchange import valid_starts
from api.openai.gateway import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from api.openai.messages import parse_counted_message
from api.openai.parameters import SHORT_BYTES_MAX, decode
from api.openai.tokens import (
    DetokenizeParameters,
    TokenizeParameters,
    check_decoded_count,
    prompts_to_tokenize,
)
from api.openai.tolerance import Notes
from api.rpc.client_stream import starts_of
from bench.costly_bodies import Costly, bodies_of, filled, messages_of
from tests.growth import (
    BLOCK_MAX_S,
    HOLD_MAX_S,
    Call,
    as_in_service,
    check_cost,
    check_growth,
    check_hold,
)

MODEL, WINDOW = "tiny", 2**20
BYTES_MAX = 4 * 2**20  # default of WEIR_MESSAGE_BYTES_MAX
GROWTH_BYTES = 70_000  # and twice as many: messages of both sizes are walked
USER = [{"role": "user", "content": "x"}]
CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": USER}
Entry = Callable[[bytes], object]

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
# Their bodies are those of another path, without the last step.
COUNTING = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")
CHAT_PATH = "/v1/chat/completions"
QUOTE = "/weir.v1.InferenceService/Quote"
CACHED_S = 0.15
CONFIGURATION_BYTE_S = 25e-6  # in a thread, for administrators; two bytes can be one object
ERROR_CHARS_MAX = 12_000  # an error is converted and sent on the event loop, whatever it quotes
PARSERS: Mapping[str, Callable[[Any], object]] = {
    "/weir.v1.InferenceService/Generate": lambda message: starts_of(message.frames, WINDOW),
    "/weir.v1.InferenceService/CountTokens": lambda message: parse_count_tokens(checked(message)),
    "/weir.v1.InferenceService/Quote": lambda message: quoted(checked(message)),
    "/weir.v1.InferenceService/Embed": lambda message: parse_embed(checked(message)),
}
# Processor time of any body: far above every parser, far below one that is not linear
FIXED_S, BYTE_S = 0.2, 250e-9  # a message of the most fields is walked until it is refused


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
    return parse_embed(embed_request(decode(body, EmbeddingParameters, Notes()), str(uuid.uuid4())))


def tokenizing(body: bytes) -> object:
    """Do what the HTTP API does with a body to tokenize."""
    requested = decode(body, TokenizeParameters, Notes())
    return [parse_count_tokens(each) for each in prompts_to_tokenize(requested, MODEL)[0]]


def detokenizing(body: bytes) -> None:
    """Do what the HTTP API does with tokens that become text."""
    check_decoded_count(decode(body, DetokenizeParameters, Notes()))


HTTP: Mapping[str, tuple[Entry, type[Any], Mapping[str, Any]]] = {
    CHAT_PATH: (generating(CHAT), CHAT.parameters, CHAT_BODY),
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
    "/v1/tokenize": (tokenizing, TokenizeParameters, {"model": MODEL, "prompt": "x"}),
    "/v1/detokenize": (detokenizing, DetokenizeParameters, {"model": MODEL, "tokens": [1]}),
}


def quoted(message: pb.QuoteRequest) -> object:
    if message.HasField("embed"):
        return parse_quoted_embed(message)
    return parse_quoted_start(message, WINDOW)


def calling(path: str, method: MethodDescriptor) -> Entry:
    """Return what the server does with a message before the handler of the call."""
    kind: Any = GetMessageClass(method.input_type)
    read = tolerant(kind.FromString, None if path in LARGE_MESSAGES else MESSAGE_BYTES_MAX)
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


def error_of(call: Call) -> str:
    """Return the message of the error in which a call ends; empty if it succeeds."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def near(costly: Costly, size: int) -> bytes:
    """Return a body of about this size, at most of it."""
    body = costly.build(max(size - 1000, 1))
    if len(body) > size:  # the parameters around the costly place
        body = costly.build(max(2 * size - len(body) - 1000, 1))
    return body


def is_foreign(costly: Costly, path: str) -> bool:
    """Return whether a body of the HTTP API is costly by a parameter of other servers."""
    parameter = re.match(r"(\w+)[^:]*:", costly.name)
    own = HTTP[path][1].__struct_encode_fields__ if path in HTTP else ()
    return path in HTTP and parameter is not None and parameter[1] not in own


def json_of(kind: Descriptor, size: int, above: int = 2) -> Iterator[tuple[str, bytes]]:
    """Yield costly JSON of a message type. above: depth of messages that are entered."""
    yield "unknown members", b'{"p":[' + filled(b"[]", size) + b"]}"
    for field in kind.fields:
        inner = field.message_type
        name = field.json_name.encode()
        if field.is_repeated:
            one = b"{}" if inner else b'"1"' if field.type == field.TYPE_STRING else b"1"
            yield field.name, b'{"%s":[' % name + filled(one, size - 50) + b"]}"
        elif inner and above:
            for entry, inside in json_of(inner, size - 50, above - 1):
                yield f"{field.name}.{entry}", b'{"%s":' % name + inside + b"}"


def at_once(costly: Costly, path: str) -> Iterator[bytes]:
    """Yield the largest bodies that are parsed on the event loop."""
    if path in HTTP:
        yield near(costly, SHORT_BYTES_MAX)
        return
    body = near(costly, MESSAGE_BYTES_MAX)
    if path in LARGE_MESSAGES:
        kind: Any = GetMessageClass(METHODS[path].input_type)
        if is_costly(body, kind):  # then the most bytes, and the most fields, that are not
            yield near(costly, MESSAGE_SHORT_BYTES_MAX)
            size = len(body)
            while is_costly(body, kind):
                size = size * 7 // 8
                body = near(costly, size)
    yield body


# Entry points whose bodies are parsed in a thread if they are long.
@pytest.mark.parametrize(
    "path", [path for path in ENTRIES if path in {*HTTP, *LARGE_MESSAGES} - {*COUNTING}]
)
def test_time_grows_with_the_bytes_of_a_body_and_lets_others_run(path: str) -> None:
    """A body whose time is linear is only measured at sizes at which it could exceed a limit."""
    enter, bodies, bytes_max = ENTRIES[path]
    of_generate = {each.name for each in ENTRIES["/weir.v1.InferenceService/Generate"][1]}
    of_chat = {each.name for each in ENTRIES[CHAT_PATH][1]}

    def prepare(costly: Costly, byte_count: int) -> Call:
        return partial(enter, near(costly, byte_count))

    with as_in_service():
        for costly in bodies:
            name = f"{path}, {costly.name}"
            if path == QUOTE and f"frames.{costly.name}" in of_generate:
                continue  # the same type, with the same parser
            if path != CHAT_PATH and costly.name in of_chat and is_foreign(costly, path):
                continue  # all APIs share the parser
            # Below this time caches decide; if it were a square, the full size would take seconds.
            found = check_growth(name, partial(prepare, costly), GROWTH_BYTES, CACHED_S)
            assert len(error_of(prepare(costly, GROWTH_BYTES))) <= ERROR_CHARS_MAX, name
            part = bytes_max // (2 * GROWTH_BYTES)
            longest_s = whole_s = found.largest_s
            while part > 1 and not (
                longest_s <= HOLD_MAX_S / part and whole_s <= BYTE_S * bytes_max / part
            ):
                part = part // 4 if path in HTTP else 1
                body = near(costly, bytes_max // part)
                hold = check_hold(
                    name, partial(enter, body), call_s_max=FIXED_S + BYTE_S * len(body)
                )
                assert len(hold.error) <= ERROR_CHARS_MAX, name
                longest_s, whole_s = hold.seconds, hold.call_s


@pytest.mark.parametrize("path", ENTRIES)
def test_a_short_body_is_parsed_on_the_event_loop_in_20_ms(path: str) -> None:
    enter, bodies, _ = ENTRIES[path]

    with as_in_service():
        for costly in bodies:
            for body in at_once(costly, path):
                call = partial(enter, body)
                check_cost(f"{path}, {costly.name}", call, BLOCK_MAX_S)
                assert len(error_of(call)) <= ERROR_CHARS_MAX, costly.name


def test_time_for_a_configuration_grows_with_its_bytes() -> None:
    """A thread converts it, however short it is."""

    def prepare(costly: Costly, byte_count: int) -> Call:
        message = ApplyConfigurationRequest.FromString(near(costly, byte_count))
        return lambda: Parsing().configuration(message.configuration)

    with as_in_service():
        for costly in messages_of(ApplyConfigurationRequest.DESCRIPTOR):
            if "many" in costly.name or "packed" in costly.name:
                found = check_growth(costly.name, partial(prepare, costly), 10_000)
                check_hold(costly.name, prepare(costly, 40_000))
                assert found.largest_s <= CONFIGURATION_BYTE_S * 20_000


def test_a_short_message_of_many_fields_is_costly_and_a_long_text_is_not() -> None:
    kind = ApplyConfigurationRequest
    many, few = kind(), kind()
    many.configuration.MergeFromString(b"\n\0" * 32_000)
    few.configuration.organizations.add(name="x" * 60_000)

    assert is_costly(many.SerializeToString(), kind)
    assert not is_costly(few.SerializeToString(), kind)


@pytest.mark.parametrize("path", METHODS)
def test_the_console_parses_a_request_in_20_ms(path: str) -> None:
    kind = GetMessageClass(METHODS[path].input_type)

    with as_in_service():
        for name, body in json_of(METHODS[path].input_type, BODY_BYTES_MAX):
            check_cost(f"{path}, {name}", partial(read_message, body, kind), BLOCK_MAX_S)
