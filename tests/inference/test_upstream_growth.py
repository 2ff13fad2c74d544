"""Processor time of the costliest answers of upstream servers grows with their size at most."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from smg_grpc_proto.generated import trtllm_service_pb2 as trtllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from inference.adapters.external_request import Choice, Output, Request
from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.adapters.remote_dialects import (
    TrtllmDialect,
    VllmDialect,
    decoded,
    message_bytes_max,
)
from inference.adapters.remote_engine import BLOCKS_MAX
from inference.adapters.remote_http import HttpDialect, _Events, _failure
from inference.adapters.remote_http_connection import PIECE_BYTES
from inference.engine import SamplingParams
from inference.text.text_decoder import GivenTextDecoder, TextDecoder
from inference.text.tokenizer import Tokenizer
from tests.growth import Call, as_in_service, check_growth, check_hold, growth
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_request

pytestmark = pytest.mark.usefixtures("_service")
TOKENS = 200_000  # more than any answer here has
SIZE = 60_000

# Costly texts of a message: beginning, repeated part, end.
SHAPES = {
    "outputs": (b'{"choices":[', b"{},", b"{}]}"),
    "ids": (b'{"choices":[{"token_ids":[', b"1,", b"1]}]}"),
    "ids of the last message": (b'{"output_ids":[', b"1,", b"1]}"),
    "names": (b'{"choices":[{"logprobs":{"token_logprobs":[],"tokens":[', b'"",', b'""]}}]}'),
    "numbers": (b'{"choices":[{"logprobs":{"tokens":[],"token_logprobs":[', b"1,", b"1]}}]}"),
    "tops": (
        b'{"choices":[{"logprobs":{"tokens":[],"token_logprobs":[],"top_logprobs":[',
        b"{},",
        b"{}]}}]}",
    ),
    "unknown": (b'{"other":[', b"{},", b"{}]}"),
}


def choice_of(decoder: Any, vocabulary_size: int | None) -> Choice:
    request = make_request((1, 2, 3), TOKENS, sampling=SamplingParams(top_logprobs=2))
    made = Request(0, request, frozenset(), 0.0, vocabulary_size)
    return Choice(made, 0, 0, decoder.open())


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token_event(count: int, **fields: Any) -> bytes:
    return event(choices=[{"text": "a" * count, "token_ids": [5] * count} | fields])


def logprobs(count: int, tops: int) -> dict[str, Any]:
    names = ["token_id:5"] * count
    top = {"token_id:5": -1.0} | {f"token_id:{each}": -2.0 for each in range(6, 6 + tops)}
    return {"tokens": names, "token_logprobs": [-1.0] * count, "top_logprobs": [top] * count}


HTTP: dict[str, Callable[[int], bytes]] = {
    "messages": lambda size: token_event(1) * (size // 60),
    "messages without tokens": lambda size: event(choices=[]) * (size // 10),
    "messages of nothing": lambda size: b"data:{}\n" * (size // 4),
    "empty lines": lambda size: b"\n" * (4 * size),
    "comments": lambda size: b":\n" * (4 * size),
    "carriage returns": lambda size: b"\r" * (4 * size) + b"\n",
    "a line without end": lambda size: b"x" * (64 * size),
    "a message without end": lambda size: b'data: {"choices": "' + b"x" * (64 * size),
    "spaces": lambda size: b"data:" + b" " * (16 * size) + b"\n",
    "tokens of one message": lambda size: token_event(size),
    "log-probabilities": lambda size: token_event(5, logprobs=logprobs(size // 20, 1)),
    "top tokens": lambda size: token_event(1, logprobs=logprobs(1, size // 4)),
    "outputs": lambda size: event(choices=[{}] * size),
    "equal keys": lambda size: b"data: {" + b'"text":"a",' * size + b'"text":""}\n',
    "other keys": lambda size: event(**{f"k{each}": each for each in range(size)}),
    "unknown objects": lambda size: event(other=[{}] * size),
    "deep lists": lambda size: b"data: " + b"[" * size + b"]" * size + b"\n",
    "long numbers": lambda size: b'data: {"choices":[{"token_ids":[' + b"9" * size + b"]}]}\n",
    "escapes": lambda size: b'data: {"choices":[{"text":"' + b"\\u0041" * size + b'"}]}\n',
    "all output again": lambda size: b"".join(
        event(
            text="a" * count,
            output_ids=[5] * count,
            meta_info={"prompt_tokens": 3, "completion_tokens": count},
        )
        for count in (1, 2, size)
    ),
}


def read_http(body: bytes, kind: type[_Events], choice: Choice, *, has_ids: bool) -> None:
    """Read an answer as `HttpCall` does, and take it as `ExternalQueue` does."""
    dialect, events, output = HttpDialect(cast(Any, None), cast(Any, Settings())), kind(), Output()
    dialect.form.id_fields = {"return_token_ids": True} if has_ids else {}
    for first in range(0, len(body), PIECE_BYTES):
        messages = events.read(body[first : first + PIECE_BYTES])
        if messages:
            dialect.take(messages, choice, output)
            take(choice, output)


def take(choice: Choice, output: Output) -> None:
    while True:
        choice.take(output, 0.0)
        if choice.ended is not None or choice.token_count >= len(output.token_ids):
            return


@pytest.fixture(scope="module")
def _service() -> Iterator[None]:
    with as_in_service():
        yield


class Settings:
    """Settings that `HttpDialect` reads."""

    tls = None
    name = "tiny"

    class target:
        model = "tiny"


@pytest.fixture(scope="module")
def decoder(tiny: TinyCheckpoint) -> TextDecoder:
    tokenizer = Tokenizer(tiny.directory)
    return TextDecoder(tokenizer.backend, tokenizer.special_token_ids, "tokenizer.json")


@pytest.mark.parametrize("has_ids", [True, False], ids=["with ids", "by usage"])
@pytest.mark.parametrize("kind", HTTP)
def test_time_for_an_answer_over_http_grows_with_its_bytes_at_most(
    decoder: TextDecoder, tiny: TinyCheckpoint, kind: str, has_ids: bool
) -> None:
    given = decoder if has_ids else GivenTextDecoder()
    size = tiny.vocabulary_size if has_ids else None

    def prepare(count: int) -> Call:
        body = HTTP[kind](count)
        return lambda: read_http(body, _Events, choice_of(given, size), has_ids=has_ids)

    check_growth(kind, prepare, SIZE)


@pytest.mark.parametrize("kind", HTTP)
def test_time_for_an_error_body_grows_with_its_bytes_at_most(kind: str) -> None:
    def prepare(count: int) -> Call:
        body = HTTP[kind](count).removeprefix(b"data:")
        return lambda: _failure(400, body)

    check_growth(kind, prepare, SIZE)


class SplitAgain(_Events):
    """Joins and splits the incomplete line again with each piece."""

    def read(self, piece: bytes) -> list[Any]:
        piece = b"".join(self._rest) + piece
        self._rest = []
        return super().read(piece)


def test_a_line_that_is_split_again_is_found(decoder: TextDecoder) -> None:
    def prepare(count: int) -> Call:
        body = HTTP["a line without end"](count)
        return lambda: read_http(body, SplitAgain, choice_of(decoder, 9), has_ids=True)

    assert not growth(prepare, SIZE // 4).is_linear


def trtllm_tops(count: int) -> Any:
    chunk = trtllm_pb.GenerateStreamChunk(token_ids=[5])
    known = chunk.logprobs.add(token_id=5, logprob=-1.0)
    for each in range(count):
        known.top_logprobs.add(token_id=5 + each % 100, logprob=-1.0)
    return trtllm_pb.GenerateResponse(chunk=chunk)


def vllm_tops(count: int) -> Any:
    chunk = vllm_pb.GenerateStreamChunk(token_ids=[5])
    chunk.output_logprobs.token_ids.append(5)
    chunk.output_logprobs.token_logprobs.append(-1.0)
    tops = [5 + each % 100 for each in range(count)]
    chunk.output_logprobs.top_logprobs.add(token_ids=tops, values=[-1.0] * count)
    return vllm_pb.GenerateResponse(chunk=chunk)


def vllm_empty(count: int) -> Any:
    message = vllm_pb.GenerateResponse()
    for _ in range(count):
        message.chunk.output_logprobs.top_logprobs.add()
    return message


def tokens(pb: Any) -> Callable[[int], Any]:
    def message(count: int) -> Any:
        chunk = pb.GenerateStreamChunk(token_ids=[5] * count)
        if pb is trtllm_pb:
            for _ in range(count):
                chunk.logprobs.add(token_id=5, logprob=-1.0)
        else:
            chunk.output_logprobs.token_ids.extend([5] * count)
            chunk.output_logprobs.token_logprobs.extend([-1.0] * count)
        return pb.GenerateResponse(chunk=chunk)

    return message


GRPC: dict[str, tuple[Any, Any, Callable[[int], Any]]] = {
    "tokens of TensorRT-LLM": (TrtllmDialect, trtllm_pb, tokens(trtllm_pb)),
    "top tokens of TensorRT-LLM": (TrtllmDialect, trtllm_pb, trtllm_tops),
    "tokens of vLLM": (VllmDialect, vllm_pb, tokens(vllm_pb)),
    "top tokens of vLLM": (VllmDialect, vllm_pb, vllm_tops),
    "empty top tokens of vLLM": (VllmDialect, vllm_pb, vllm_empty),
}


@pytest.mark.parametrize("kind", GRPC)
def test_time_for_a_grpc_message_grows_with_its_bytes_at_most(
    decoder: TextDecoder, tiny: TinyCheckpoint, kind: str
) -> None:
    dialect, pb, make = GRPC[kind]

    def prepare(count: int) -> Call:
        data = make(count).SerializeToString()

        def call() -> None:
            choice, output = choice_of(decoder, tiny.vocabulary_size), Output()
            message = decoded(data, pb.GenerateResponse, len(data))
            dialect.take(cast(Any, None), message, choice, output)
            take(choice, output)

        return call

    check_growth(kind, prepare, SIZE // 4)


def test_time_for_cache_events_grows_with_the_blocks_at_most() -> None:
    def prepare(count: int) -> Call:
        blocks = [(each, each + 1, [5, 6, 7, 8]) for each in range(count)]
        change = KvCacheChange(False, blocks, [block for _, block, _ in blocks])
        return lambda: KvEventIndex().apply(change)

    check_growth("cache events", prepare, SIZE // 2)
    assert BLOCKS_MAX * 16 == 4 << 20, "tokens: as many as are remembered as sent"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_longest_message_of_a_request_keeps_the_interpreter_for_a_limited_time(
    decoder: TextDecoder, tiny: TinyCheckpoint, shape: str
) -> None:
    """The request is for 128 Ki tokens. A message is decoded by one call in C."""
    request = make_request((1, 2, 3), 1 << 17)
    choice = Choice(
        Request(0, request, frozenset(), 0.0, tiny.vocabulary_size), 0, 0, decoder.open()
    )
    begin, part, end = SHAPES[shape]
    body = (
        b"data:"
        + begin
        + part * (message_bytes_max(choice, repeats_output=True) // len(part))
        + end
        + b"\n"
    )

    check_hold(shape, lambda: _Events().read(body))
