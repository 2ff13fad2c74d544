"""Server of all gRPC services that answers some requests in hostile ways.

`python -m tests.remote_servers.hostile VOCABULARY WINDOW` prints `serving PORT` and serves until it
is killed. A prompt that begins as `marked` says is answered by one of `FORMS`; others get valid
tokens.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto.generated import trtllm_service_pb2 as trtllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from bench.hostile_upstream import FIRST_ID, FORM_BASE, IDS, MARK, SECRET, TOKEN_S

SERVICES = {
    next(iter(pb.DESCRIPTOR.services_by_name.values())).full_name: pb
    for pb in (trtllm_pb, vllm_pb, sglang_pb)
}
HARMLESS = ("messages after the end",)  # forms that end well for the client


class Answer:
    """Messages of an answer to one request of a service."""

    def __init__(self, pb: Any, request: Any, context: Any, size: int) -> None:
        self.pb = pb
        self.size = size
        self.context = context
        self.is_trtllm = pb is trtllm_pb
        tokenized = request.tokenized
        self.prompt = tuple(tokenized.input_token_ids if self.is_trtllm else tokenized.input_ids)
        self.count = int(
            request.max_tokens
            if self.is_trtllm
            else request.sampling_params.max_new_tokens
            if pb is sglang_pb
            else request.sampling_params.max_tokens
        )
        self.sent: list[int] = []

    def chunk(self, ids: list[int], logprob: float | None = None, **fields: Any) -> Any:
        """Return a message with tokens, for each of which `logprob` is reported."""
        self.sent += ids
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.sent)} | fields
        chunk = self.pb.GenerateStreamChunk(token_ids=ids, **counts)
        for each in ids if logprob is not None else ():
            if self.is_trtllm:
                chunk.logprobs.add(token_id=each, logprob=logprob)
            else:
                chunk.output_logprobs.token_ids.append(each)
                chunk.output_logprobs.token_logprobs.append(logprob)
        return self.pb.GenerateResponse(chunk=chunk)

    def complete(self, reason: str = "length", ids: list[int] | None = None, **fields: Any) -> Any:
        """Return the last message."""
        ids = (self.sent if self.is_trtllm else self.sent[-1:]) if ids is None else ids
        name = "output_token_ids" if self.is_trtllm else "output_ids"
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.sent)} | fields
        complete = self.pb.GenerateComplete(**{name: ids}, finish_reason=reason, **counts)
        return self.pb.GenerateResponse(complete=complete)

    async def tokens(self, count: int, pause_s: float = 0.0) -> AsyncIterator[Any]:
        """Yield valid tokens, one by one."""
        for _ in range(count):
            yield self.chunk([FIRST_ID + len(self.sent) % IDS])
            if pause_s:
                await asyncio.sleep(pause_s)

    async def whole(self, pause_s: float = 0.0) -> AsyncIterator[Any]:
        """Yield a valid answer."""
        async for message in self.tokens(self.count, pause_s):
            yield message
        yield self.complete()


Form = Callable[[Answer], AsyncIterator[Any]]


def first(make: Callable[[Answer], Any]) -> Form:
    """Send two tokens and a message, then the rest of a valid answer."""

    async def form(answer: Answer) -> AsyncIterator[Any]:
        async for message in answer.tokens(2):
            yield message
        yield make(answer)
        async for message in answer.tokens(answer.count - len(answer.sent)):
            yield message
        yield answer.complete()

    return form


def last(make: Callable[[Answer], Any], sent: int | None = None) -> Form:
    """Send all tokens, or some, and end with a message."""

    async def form(answer: Answer) -> AsyncIterator[Any]:
        async for message in answer.tokens(answer.count if sent is None else sent):
            yield message
        yield make(answer)

    return form


def endless(make: Callable[[Answer], Any], begun: int = 2) -> Form:
    """Send messages for ever, after some tokens."""

    async def form(answer: Answer) -> AsyncIterator[Any]:
        async for message in answer.tokens(begun):
            yield message
        while True:
            yield make(answer)

    return form


def refused(code: grpc.StatusCode, begun: int = 0, metadata: Any = ()) -> Form:
    """End the call with a status, after some tokens."""

    async def form(answer: Answer) -> AsyncIterator[Any]:
        async for message in answer.tokens(begun):
            yield message
        await answer.context.abort(code, f"{SECRET}\x1b[2J\n top_p", metadata)

    return form


async def silence(answer: Answer) -> AsyncIterator[Any]:
    """Send nothing after two tokens."""
    async for message in answer.tokens(2):
        yield message
    await asyncio.Event().wait()


async def after_the_end(answer: Answer) -> AsyncIterator[Any]:
    """Send messages for ever after a valid answer."""
    async for message in answer.whole():
        yield message
    while True:
        yield answer.chunk([])


async def compressed(answer: Answer) -> AsyncIterator[Any]:
    """Send a compressed message."""
    answer.context.set_compression(grpc.Compression.Gzip)
    yield answer.complete("x" * (3 << 20))


def logprob(value: float) -> Form:
    """Report a log-probability."""
    return first(lambda answer: answer.chunk([FIRST_ID], value))


def index(answer: Answer, number: int) -> dict[str, int]:
    """Return the field with the number of an output."""
    return {"sequence_index" if answer.is_trtllm else "index": number}


def stopped_at(token_id: int) -> Form:
    """End at a token that ends nothing."""

    def make(answer: Answer) -> Any:
        return answer.complete("stop", matched_token_id=token_id)

    return last(make, 3)


ALL: dict[str, Form] = {
    "an id outside the vocabulary": first(lambda answer: answer.chunk([answer.size])),
    "an id of 31 bits": first(lambda answer: answer.chunk([2**31])),
    "an id of 32 bits": first(lambda answer: answer.chunk([2**32 - 1])),
    "100,000 tokens at once": first(lambda answer: answer.chunk([FIRST_ID] * 100_000)),
    "20,000 tokens at once": first(lambda answer: answer.chunk([FIRST_ID] * 20_000)),
    "tokens without end": endless(lambda answer: answer.chunk([FIRST_ID])),
    "a second output": first(lambda answer: answer.chunk([FIRST_ID], **index(answer, 1))),
    "another prompt length": first(lambda answer: answer.chunk([FIRST_ID], prompt_tokens=2)),
    "a huge prompt length": last(lambda answer: answer.complete(prompt_tokens=2**32 - 1)),
    "more cached than sent": first(lambda answer: answer.chunk([FIRST_ID], cached_tokens=2**31)),
    "an unknown finish reason": last(lambda answer: answer.complete("because")),
    "an empty finish reason": last(lambda answer: answer.complete("")),
    "a finish reason of a megabyte": last(lambda answer: answer.complete("b" * (1 << 20))),
    "an early end for length": last(lambda answer: answer.complete(), 3),
    "an end at an id outside the vocabulary": stopped_at(2**31),
    "other last tokens": last(lambda answer: answer.complete(ids=[FIRST_ID + IDS])),
    "empty messages": endless(lambda answer: answer.pb.GenerateResponse()),
    "messages without tokens": endless(lambda answer: answer.chunk([])),
    "messages before the first token": endless(lambda answer: answer.chunk([]), 0),
    "garbage": first(lambda _: b"\xff" * 100),
    "a message of 8 MiB": first(lambda answer: answer.complete("b" * (8 << 20))),
    "a message of 20 MiB": first(lambda answer: answer.complete("b" * (20 << 20))),
    "a compressed message": compressed,
    "INVALID_ARGUMENT": refused(grpc.StatusCode.INVALID_ARGUMENT),
    "OUT_OF_RANGE": refused(grpc.StatusCode.OUT_OF_RANGE),
    "RESOURCE_EXHAUSTED": refused(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "INTERNAL": refused(grpc.StatusCode.INTERNAL),
    "INTERNAL after tokens": refused(grpc.StatusCode.INTERNAL, 3),
    "OK without an end": refused(grpc.StatusCode.INVALID_ARGUMENT, 3),
    "much metadata": refused(grpc.StatusCode.INTERNAL, 0, (("x-long", "y" * 60_000),)),
    "silence": silence,
    "NaN as log-probability": logprob(math.nan),
    "an infinite log-probability": logprob(math.inf),
    "no probability at all": logprob(-math.inf),
    "a positive log-probability": logprob(5.0),
    "messages after the end": after_the_end,
}
FORMS = {name: form for name, form in ALL.items() if name not in HARMLESS}


def marked(name: str, length: int = 8) -> tuple[int, ...]:
    """Return a prompt that is answered by this form."""
    return (*MARK, FORM_BASE + list(ALL).index(name), *range(30, 30 + length - 4))


class Handlers(grpc.GenericRpcHandler):
    """Calls of all services."""

    def __init__(self, vocabulary_size: int, window: int) -> None:
        self._size, self._window = vocabulary_size, window

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        service, _, method = handler_call_details.method[1:].partition("/")
        pb = SERVICES[service]
        if method == "Generate":

            async def generate(data: bytes, context: Any) -> AsyncIterator[bytes]:
                answer = Answer(pb, pb.GenerateRequest.FromString(data), context, self._size)
                messages = answer.whole(0.0 if answer.count < 5 else TOKEN_S)
                if answer.prompt[: len(MARK)] == MARK:
                    form = answer.prompt[len(MARK)] - FORM_BASE
                    messages = list(ALL.values())[form](answer)
                async for message in messages:
                    yield message if isinstance(message, bytes) else message.SerializeToString()

            return grpc.unary_stream_rpc_method_handler(generate)
        if method in ("GetTokenizer", "SubscribeKvEvents", "GetLoads"):
            return None
        response = getattr(pb, f"{method}Response")(**self._fields(pb, method))

        async def answer_once(data: bytes, context: Any) -> bytes:
            return bytes(response.SerializeToString())

        return grpc.unary_unary_rpc_method_handler(answer_once)

    def _fields(self, pb: Any, method: str) -> dict[str, Any]:
        window = "max_seq_len" if pb is trtllm_pb else "max_context_length"
        return {
            "HealthCheck": {"status": "OK"} if pb is trtllm_pb else {"healthy": True},
            "GetModelInfo": {"vocab_size": self._size, window: self._window},
        }.get(method, {})


async def serve(vocabulary_size: int, window: int) -> None:
    """Serve until killed."""
    server = grpc.aio.server(options=[("grpc.max_metadata_size", 1 << 20)])
    server.add_generic_rpc_handlers((Handlers(vocabulary_size, window),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print("serving", port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(*map(int, sys.argv[1:])))
