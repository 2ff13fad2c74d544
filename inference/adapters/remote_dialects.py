"""Interface of a dialect, and the gRPC dialects. One dialect uses one channel.

Servers are not trusted: each answer is bounded by its request before it is decoded, and checked
while it is read. Text that a server sends goes to the log and to operators, bounded and
with its control characters escaped, but never to a client.

`TrtllmService` of `trtllm-serve --grpc`: chunks hold the new tokens, the last message holds all of
them. Salts are sent as numbers.

Known behaviour: stop tokens are cut from the output unless requested; whether the end token is in
it is not documented, and both are accepted; a sequence aborted while it waits never answers. The
published servicer ignores the salt and implements neither the tokenizer call nor the load call.

`VllmEngine` of `vllm serve --grpc`: chunks hold the new tokens, and the last message repeats the
last chunk. There is no salt.

Known behaviour: end and stop tokens are in the output; the chosen token comes first among the top
tokens and displaces the last of them; seeds have 32 bits; biases beyond 100 are clamped; an aborted
sequence answers with `abort`, or, in older releases, not at all.

`SglangScheduler` of `sglang serve --smg-grpc-mode`: messages like vLLM's. There is no salt. In the
source of 0.5.23 and of `smg-grpc-servicer` 0.14.1, there is no seed, the repetition penalty ignores
the prompt, log-probabilities of sampled tokens are those after the temperature, `ignore_eos` also
disables stop tokens, and an aborted sequence never answers.
"""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol, cast

import grpc
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2_grpc,
    trtllm_service_pb2_grpc,
    vllm_engine_pb2_grpc,
)
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto.generated import trtllm_service_pb2 as trtllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from inference.adapters.external_request import Choice, Output
from inference.adapters.remote_settings import KeyFile, RemoteSettings, masked
from inference.adapters.tensorrt_settings import TENSORRT_LLM
from inference.capabilities import EMBEDDED_ONLY, SAMPLINGS_MAX, Capabilities
from inference.engine import EngineStatistics, TokenLogprob
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.sequences import RequestField, SamplingParams, ThinkingStart, choice_seed

SHARES = (
    "the server shares cached prefixes between tenants: turn its prefix cache off (vLLM: "
    "--no-enable-prefix-caching; SGLang: --disable-radix-cache; TensorRT-LLM: "
    "kv_cache_config.enable_block_reuse: false), or set WEIR_REMOTE_SHARE_PREFIXES=1 (in the fleet "
    "file, share_prefixes: true) if your tenants may share them"
)

OVERLOAD_WAIT_S = 1.0  # the services send no retry delay when they are full

# Bounds of answers in bytes. One call in C decodes a message, so that they also bound the time
# without a turn for other streams: 30 ms for 2 MiB of numbers, the costliest content.
SMALL_ANSWER_BYTES_MAX = 64 << 10  # errors, health, loads
FACTS_BYTES_MAX = 1 << 20  # names of all models and adapters; settings of the server
VECTOR_BYTES_MAX = 256 << 10  # 64 Ki floats
EVENTS_BYTES_MAX = 4 << 20  # blocks of a prompt of a million tokens; a chunk of a file
MESSAGE_BYTES_BASE = 256 << 10  # thousands of tokens that arrive together
LOGPROBS_BYTES = 768 << 10  # the same for tokens with 20 log-probabilities of 50 bytes
PROMPT_TOKEN_BYTES = 12  # a message may repeat the prompt as ids of 7 digits
OUTPUT_TOKEN_BYTES = 16  # some messages repeat the output, as ids and as text
EMPTY_MESSAGE_BYTES = 64  # that a message counts for beside its content: some 50 us
TOKENS_MAX = 1 << 40  # above every real count of tokens
BLOCK_TOKENS_MAX = 4096
QUOTED_CHARS_MAX = 300  # of a server's text, in the log
_log = logging.getLogger("weir.inference.adapters")

# Names in requests to servers, by the name of the field in a `StartFrame` that they come from.
WIRE_NAMES = {field: field.rpartition(".")[2] for field in RequestField} | {
    RequestField.TOP_LOGPROBS: "logprobs",
    RequestField.MIN_OUTPUT_TOKENS: "min_tokens",
}
FIELDS = {name: field.value for field, name in WIRE_NAMES.items()} | {
    "max_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "min_new_tokens": RequestField.MIN_OUTPUT_TOKENS.value,
    "structured_outputs": "response_format",
}
# Texts of gRPC in this process about an answer above the limits of its channel.
_TOO_LARGE = re.compile("larger than max|metadata size exceeds")
_FIELD_NAMES = re.compile(rf"\b(?:{'|'.join(map(re.escape, FIELDS))})\b")
TOP_LOGPROBS_MAX = 19  # one more is requested; vLLM's default limit is 20
LOGIT_BIAS_MAX = 100.0
SEED_MAX = 2**31 - 1


def message_bytes_max(choice: Choice, *, repeats_output: bool) -> int:
    """Compute how many bytes one message, or the data between two new tokens, may have."""
    top_count = choice.request.generation.sampling.top_logprobs
    bytes_max = MESSAGE_BYTES_BASE + PROMPT_TOKEN_BYTES * len(choice.sent_token_ids)
    if top_count is not None:
        bytes_max += LOGPROBS_BYTES
    if repeats_output:
        shown_count = 1 if top_count is None else top_count + 2
        bytes_max += OUTPUT_TOKEN_BYTES * choice.token_count_max * shown_count
    return bytes_max


def quoted(text: str | bytes | None) -> str:
    """Make a server's text safe for the log: shorten it and escape control characters."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = masked(text or "no details")[:QUOTED_CHARS_MAX]
    return text if text.isascii() and text.isprintable() else ascii(text)


class ServerUnfit(Exception):
    """The server cannot serve this model as configured; the message says why and how to fix it."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports; 0 or empty if unknown. `block_tokens`: tokens per KV block."""

    model: str
    version: str = ""
    vocabulary_size: int = 0
    context_window_tokens: int = 0
    running_sequence_count_max: int = 0
    block_tokens: int = 0

    def __post_init__(self) -> None:
        """Replace impossible numbers by 0, and escape control characters in names."""
        for name, at_most in (
            ("vocabulary_size", TOKENS_MAX),
            ("context_window_tokens", TOKENS_MAX),
            ("running_sequence_count_max", TOKENS_MAX),
            ("block_tokens", BLOCK_TOKENS_MAX),
        ):
            object.__setattr__(self, name, known_count(getattr(self, name), at_most))
        for name in ("model", "version"):
            if not (text := getattr(self, name)[:QUOTED_CHARS_MAX]).isprintable():
                object.__setattr__(self, name, quoted(text))


class Dialect(ABC):
    """Protocol of one service. Calls raise `grpc.aio.AioRpcError`, even over HTTP."""

    carries_salt: bool  # whether requests carry a salt that separates cached prefixes
    # Whether the number of cached prompt tokens stays the same from the first token on, so that it
    # counts for an output without an end. Otherwise only that of the last message counts.
    fixes_cached_count = True
    reports_cached = True  # whether the server reports cached prompt tokens at all
    salt_count = 2  # salts of a probe for shared prefixes
    repeats_output = False  # whether a message may hold all output so far
    capabilities: Capabilities

    @abstractmethod
    async def wait_until_lost(self) -> None:
        """Wait until the connection is lost."""

    async def probe(self, vocabulary_size: int) -> Capabilities:
        """Find the supported request fields, by test requests if the service does not fix them.
        Called after `facts`. Raises: ServerUnfit.
        """
        return self.capabilities

    @abstractmethod
    async def health_fault(self) -> str | None:
        """Ask for the server's health; return the problem that it reports, or None."""

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """Ask the server for facts about its model."""

    async def load(self, block_tokens: int) -> EngineStatistics:
        """Ask for the cache blocks in use; `block_tokens` converts tokens to blocks."""
        raise missing("call for its load")

    @abstractmethod
    def generate(self, request_id: str, choice: Choice) -> AnswerCall:
        """Send one sequence; return the call that streams its answer."""

    async def abort(self, request_id: str, call: Any) -> None:
        """Ask the server to end a sequence; by default, by cancelling the call of `generate`."""
        call.cancel()

    @abstractmethod
    def take(self, message: Any, choice: Choice, output: Output) -> int | None:
        """Add a message to the output; return its number of cached prompt tokens, None if it has
        none.

        Raises EngineFailed if the message is invalid.
        """

    async def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        """Send one text; return the answer with `embedding` and `prompt_tokens`."""
        raise missing("embeddings")

    def tokenizer_chunks(self) -> AsyncIterable[common_pb2.GetTokenizerChunk]:
        """Stream the server's tokenizer files as chunks of a zip archive."""
        raise missing("tokenizer files")

    def published_salt(self, cache_salt: str) -> str:
        """Convert a request's salt to the one that cache events show; empty if they show none."""
        return ""

    def kv_batches(self) -> AsyncIterable[common_pb2.KvEventBatch]:
        """Stream the changes to the server's prefix cache, without end."""
        raise missing("cache events")


def failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """Build the error of a call that failed a check on this side."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def missing(what: str) -> grpc.aio.AioRpcError:
    """Build the error of a call that the service does not implement."""
    return failure(grpc.StatusCode.UNIMPLEMENTED, f"the service has no {what}")


class GrpcDialect(Dialect):
    """Base of the dialects that speak gRPC. A subclass names its generated stub and messages, and
    in `ids_field` the field of `TokenizedInput` that holds the token ids.

    Answers arrive as bytes, so that one that is too large is not decoded.
    """

    stub_type: Any
    messages: Any
    ids_field = "input_ids"

    def __init__(self, channel: grpc.aio.Channel, settings: RemoteSettings) -> None:
        self._channel = channel
        self._key = settings.key
        (service,) = self.messages.DESCRIPTOR.services_by_name.values()
        self._path = f"/{service.full_name}/"
        self._generate = self._method("Generate", channel.unary_stream)
        self._call_timeout_s = settings.call_timeout_s

    def _method(self, name: str, kind: Any) -> Any:
        call = kind(self._path + name, request_serializer=lambda sent: sent.SerializeToString())
        return call if self._key is None else partial(self._call_with_key, call, self._key)

    @staticmethod
    def _call_with_key(call: Any, key: KeyFile, request: Any, **options: Any) -> Any:
        return call(request, metadata=tuple(key.header().items()), **options)

    async def wait_until_lost(self) -> None:
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)

    async def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        tokenized = self._tokenized(token_ids)
        request = self.messages.EmbedRequest(request_id=request_id, tokenized=tokenized)
        data = await self._method("Embed", self._channel.unary_unary)(request, timeout=timeout_s)
        return decoded(data, self.messages.EmbedResponse, VECTOR_BYTES_MAX)

    def tokenizer_chunks(self) -> Any:
        call = self._method("GetTokenizer", self._channel.unary_stream)
        request = common_pb2.GetTokenizerRequest()
        return GrpcCall(call(request), common_pb2.GetTokenizerChunk)

    def kv_batches(self) -> Any:
        call = self._method("SubscribeKvEvents", self._channel.unary_stream)
        request = common_pb2.SubscribeKvEventsRequest()
        return GrpcCall(call(request), common_pb2.KvEventBatch)

    async def _call(self, name: str, **fields: Any) -> Any:
        request = getattr(self.messages, f"{name}Request")(**fields)
        call = self._method(name, self._channel.unary_unary)
        data = await call(request, timeout=self._call_timeout_s)
        bytes_max = FACTS_BYTES_MAX if name.endswith("Info") else SMALL_ANSWER_BYTES_MAX
        return decoded(data, getattr(self.messages, f"{name}Response"), bytes_max)

    def _call_generate(self, request: Any, choice: Choice) -> GrpcCall:
        kind = self.messages.GenerateResponse
        bytes_max = message_bytes_max(choice, repeats_output=self.repeats_output)
        return GrpcCall(self._generate(request), kind, bytes_max)

    def _tokenized(self, token_ids: tuple[int, ...]) -> Any:
        return self.messages.TokenizedInput(**{self.ids_field: token_ids})


def decoded(data: bytes, kind: Any, bytes_max: int) -> Any:
    """Parse an answer of at most `bytes_max` bytes. Raises grpc.aio.AioRpcError otherwise."""
    if len(data) > bytes_max:
        size = f"an answer of {len(data)} bytes, at most {bytes_max} are read"
        raise failure(grpc.StatusCode.INTERNAL, size)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise failure(grpc.StatusCode.INTERNAL, f"an invalid message: {error}") from error


class AnswerCall(Protocol):
    """Streamed answer, iterated message by message. Each kind of dialect has its own class.

    `is_over` tells that no message follows, so that nothing needs to wait for its end.
    """

    is_over: bool

    def cancel(self) -> None:
        """End the call on the server. Idempotent."""

    def progressed(self) -> None:
        """Renew the allowance of bytes, since a new token has arrived."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """Yield messages. Raises grpc.aio.AioRpcError, even for an answer that is too long."""


class GrpcCall:
    """Implement `AnswerCall` with a call that yields bytes, which are parsed as `kind`.

    `bytes_max` limits the bytes between two calls of `progressed`; None if each message only has
    its own limit, `EVENTS_BYTES_MAX`.
    """

    def __init__(self, call: Any, kind: Any, bytes_max: int | None = None) -> None:
        self._call = call
        self._messages = aiter(call)
        self._kind = kind
        self._bytes_max = self._bytes_left = bytes_max
        self.is_over = False  # a status follows the last message

    def cancel(self) -> None:
        """Implement `AnswerCall.cancel`."""
        self._call.cancel()

    def progressed(self) -> None:
        """Implement `AnswerCall.progressed`."""
        self._bytes_left = self._bytes_max

    def __aiter__(self) -> GrpcCall:
        return self

    async def __anext__(self) -> Any:
        data = await anext(self._messages)
        if self._bytes_left is None:
            return decoded(data, self._kind, EVENTS_BYTES_MAX)
        self._bytes_left -= len(data) + EMPTY_MESSAGE_BYTES
        if self._bytes_left < 0:
            details = f"more than {self._bytes_max} bytes without a new token"
            raise failure(grpc.StatusCode.INTERNAL, details)
        return decoded(data, self._kind, len(data))


def known_count(reported: float, at_most: int) -> int:
    """Validate an informative count of a server: 0, for unknown, if it is impossible."""
    return int(reported) if 0 <= reported <= at_most else 0


def block_counts(token_count_max: int, usage: float, block_tokens: int) -> EngineStatistics:
    """Convert a server's cache usage to blocks. `usage` is the fraction in use, from 0 to 1."""
    token_count_max = known_count(token_count_max, TOKENS_MAX)
    usage = usage if 0.0 <= usage <= 1.0 else 0.0
    total, held = token_count_max // block_tokens, round(usage * token_count_max) // block_tokens
    return EngineStatistics(
        kv_block_count_total=total, kv_block_count_free=total - held, kv_block_count_held=held
    )


def check_room(choice: Choice, output: Output, count: int) -> None:
    """Raise EngineFailed if `count` more tokens would exceed the requested number."""
    total, limit = len(output.token_ids) + count, choice.token_count_max
    if total > limit:
        raise EngineFailed(f"the engine sent {total} tokens, {limit} were asked for")


def check_prompt_count(reported: int, choice: Choice) -> None:
    """Raise EngineFailed if the server reports another prompt length; 0 means unknown."""
    given = len(choice.sent_token_ids)
    if reported not in (0, given):
        raise EngineFailed(f"the engine reports a prompt of {reported} tokens, {given} were sent")


def check_sent(reported: int, output: Output) -> None:
    """Raise EngineFailed if the server counts tokens that it has not sent."""
    if reported > len(output.token_ids):
        raise EngineFailed(f"the engine counts {reported} tokens and sent {len(output.token_ids)}")


def check_index(index: int) -> None:
    """Raise EngineFailed unless the index is 0: each choice is sent by itself."""
    if index != 0:
        raise EngineFailed(f"the engine sent output {index} of a request for one")


def check_length(choice: Choice, output: Output) -> None:
    """Raise EngineFailed if an output ended by length below its limit: tokens were lost."""
    limit, sent = choice.token_count_max, len(output.token_ids)
    if output.finish_reason == "length" and sent < limit:
        raise EngineFailed(
            f"the engine reports the limit of {limit} tokens reached, but sent {sent}"
        )


def check_end(choice: Choice, output: Output) -> None:
    """Raise EngineFailed if an output of an engine that sends end tokens stopped without one."""
    if output.finish_reason == "stop" and (
        not output.token_ids or output.token_ids[-1] not in choice.request.end_token_ids
    ):
        raise EngineFailed(
            "the engine ended a sequence with a token that is not an end token of this checkpoint"
        )


def finish_reason(reported: str) -> str:
    """Convert a reported reason to its name in `Output`. Raises EngineFailed for unknown ones."""
    known = {"stop_word": "stop", "abort": "cancelled"}.get(reported, reported)
    if known not in ("stop", "length", "cancelled"):
        raise EngineFailed(
            f"the engine ended a sequence with an unknown finish reason: {quoted(reported)}"
        )
    return known


def named_field(text: str | None) -> str | None:
    """Find the only field of a `StartFrame` that a server's text names; None if there is none."""
    found = {FIELDS[name] for name in _FIELD_NAMES.findall((text or "")[:QUOTED_CHARS_MAX])}
    return found.pop() if len(found) == 1 else None


def engine_error(
    error: grpc.aio.AioRpcError, what: str, field: str | None = None, *, has_begun: bool = False
) -> EngineError:
    """Convert a call's status to an error. The server's own text is logged and never sent to
    clients.

    `what` is "request" or "text". `has_begun` tells that the server had accepted it.
    """
    code, text = error.code(), error.details()
    if not has_begun:
        match code:
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
                _log.warning("a remote engine refused a %s: %s", what, quoted(text))
                field = field or getattr(error, "field", None) or named_field(text)
                advice = f"change {field}" if field else "the operator finds the reason in the log"
                return RequestImpossible(
                    f"the remote engine refused the {what} ({code.name}): {advice}",
                    field,
                    is_unstarted=True,
                )
            case grpc.StatusCode.RESOURCE_EXHAUSTED if not _TOO_LARGE.search(text or ""):
                _log.warning("a remote engine is full: %s", quoted(text))
                return EngineOverloaded("the remote engine is full", OVERLOAD_WAIT_S)
    lost = "sequence" if field is None else what
    return EngineFailed(f"the remote engine ended the {lost}: {code.name}: {quoted(text)}")


class TrtllmDialect(GrpcDialect):
    """Dialect of TensorRT-LLM's gRPC service."""

    stub_type = cast(Any, trtllm_service_pb2_grpc).TrtllmServiceStub
    messages = trtllm_pb
    ids_field = "input_token_ids"
    carries_salt = True
    repeats_output = True
    _vocabulary_size = 0  # as the server reports it
    # The server takes a bias of one float per row of the model, but its sampler expects another
    # length. The server's settings decide the grammar language.
    capabilities = replace(
        TENSORRT_LLM["1.3.0rc"],
        unsupported=TENSORRT_LLM["1.3.0rc"].unsupported
        | {RequestField.LOGIT_BIAS, RequestField.LARK},
    )

    async def health_fault(self) -> str | None:
        """Implement `Dialect.health_fault`: any status but OK is a fault."""
        answer: trtllm_pb.HealthCheckResponse = await self._call("HealthCheck")
        return None if answer.status == "OK" else quoted(answer.status)

    async def facts(self) -> ServerFacts:
        model: trtllm_pb.GetModelInfoResponse = await self._call("GetModelInfo")
        self._vocabulary_size = model.vocab_size
        server: trtllm_pb.GetServerInfoResponse = await self._call("GetServerInfo")
        return ServerFacts(
            model=model.model_id,
            version=f"TensorRT-LLM {server.version}",
            vocabulary_size=model.vocab_size,
            context_window_tokens=model.max_seq_len,
            running_sequence_count_max=model.max_batch_size,
        )

    def generate(self, request_id: str, choice: Choice) -> GrpcCall:
        """Implement `Dialect.generate`. Stop sequences are not sent."""
        generation = choice.request.generation
        sampling = generation.sampling
        request = trtllm_pb.GenerateRequest(
            request_id=request_id,
            tokenized=self._tokenized(choice.sent_token_ids),
            sampling_config=_trtllm_sampling(choice),
            output_config=trtllm_pb.OutputConfig(exclude_input_from_output=True),
            max_tokens=choice.token_count_max,
            streaming=True,
            stop_token_ids=sorted(choice.request.end_token_ids),
            ignore_eos=generation.stop.ignore_eos,
            # Otherwise the stop token that was streamed is removed again.
            include_stop_token_in_output=True,
        )
        if sampling.top_logprobs is not None:
            request.output_config.logprobs = max(sampling.top_logprobs, 1)
        if generation.response_format is not None:
            guide: Any = request.guided_decoding
            guide.guide_type = guide.GuideType.Value(
                f"GUIDE_TYPE_{generation.response_format.kind.name}"
            )
            guide.guide = generation.response_format.source
        if sampling.logit_bias:  # only of the doctor: see `capabilities`
            biases = dict(sampling.logit_bias)
            request.embedding_bias.extend(
                biases.get(token_id, 0.0) for token_id in range(self._vocabulary_size)
            )
        if generation.cache_salt:
            request.cache_salt_id = salt_id(generation.cache_salt)
        return self._call_generate(request, choice)

    def published_salt(self, cache_salt: str) -> str:
        return str(salt_id(cache_salt)) if cache_salt else ""

    async def abort(self, request_id: str, call: Any) -> None:
        await self._call("Abort", request_id=request_id)

    def take(self, message: trtllm_pb.GenerateResponse, choice: Choice, output: Output) -> int:
        if message.WhichOneof("response") == "chunk":
            chunk = message.chunk
            check_index(chunk.sequence_index)
            check_prompt_count(chunk.prompt_tokens, choice)
            check_room(choice, output, max(len(chunk.token_ids), len(chunk.logprobs)))
            output.token_ids += chunk.token_ids
            output.logprobs += map(_known, chunk.logprobs)
            return chunk.cached_tokens
        complete = message.complete
        check_index(complete.sequence_index)
        check_prompt_count(complete.prompt_tokens, choice)
        if (more := len(complete.output_token_ids) - len(output.token_ids)) > 0:
            check_room(choice, output, more)
            if output.token_ids != list(complete.output_token_ids[: len(output.token_ids)]):
                raise EngineFailed("the engine's last message contradicts the tokens that it sent")
            output.logprobs += map(_known, complete.logprobs[len(output.token_ids) :])
            output.token_ids += complete.output_token_ids[len(output.token_ids) :]
        check_sent(complete.completion_tokens, output)
        output.finish_reason = finish_reason(complete.finish_reason)
        check_length(choice, output)
        if complete.WhichOneof("matched_stop") == "matched_token_id":
            output.stop_reason = complete.matched_token_id
        return complete.cached_tokens


def salt_id(cache_salt: str) -> int:
    """Hash a salt to a 63-bit number for the wire; collisions cannot be forged."""
    return int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "big") >> 1


def _trtllm_sampling(choice: Choice) -> trtllm_pb.SamplingConfig:
    sampling = choice.request.generation.sampling
    config = trtllm_pb.SamplingConfig(
        beam_width=1, num_return_sequences=1, temperature=sampling.temperature
    )
    if sampling.temperature > 0:
        config.top_p, config.top_k = sampling.top_p, sampling.top_k
    else:
        config.top_k = 1
    return config


def _known(logprob: trtllm_pb.TokenLogprob) -> dict[int, TokenLogprob]:
    known = {top.token_id: TokenLogprob(top.token_id, top.logprob) for top in logprob.top_logprobs}
    if not known:  # beside other top tokens, a token without a reported probability would get 0
        known[logprob.token_id] = TokenLogprob(logprob.token_id, logprob.logprob)
    return known


class VllmDialect(GrpcDialect):
    """Dialect of vLLM's gRPC service."""

    stub_type = cast(Any, vllm_engine_pb2_grpc).VllmEngineStub
    messages = vllm_pb
    carries_salt = False
    capabilities = Capabilities(
        EMBEDDED_ONLY | {RequestField.LARK},
        top_logprobs_max=TOP_LOGPROBS_MAX,
        logit_bias_max=LOGIT_BIAS_MAX,
        after_thinking=frozenset(),
    )

    async def health_fault(self) -> str | None:
        answer: vllm_pb.HealthCheckResponse = await self._call("HealthCheck")
        return None if answer.healthy else quoted(answer.message)

    async def facts(self) -> ServerFacts:
        model = await self._call("GetModelInfo")
        return ServerFacts(
            model=model.served_model_name or model.model_path,
            vocabulary_size=model.vocab_size,
            context_window_tokens=model.max_context_length,
            **self._server_facts(await self._call("GetServerInfo")),
        )

    def _server_facts(self, server: Any) -> dict[str, Any]:
        return {
            "version": server.server_type or "vLLM",
            "running_sequence_count_max": server.max_num_seqs,
            "block_tokens": server.block_size,
        }

    async def load(self, block_tokens: int) -> EngineStatistics:
        """Implement `Dialect.load`; older servers report a fraction, but not the cache's size."""
        answer: vllm_pb.GetLoadsResponse = await self._call("GetLoads")
        total = sum(load.max_total_num_tokens for load in answer.loads)
        used = sum(load.token_usage * load.max_total_num_tokens for load in answer.loads)
        return block_counts(total, used / total if total else 0.0, block_tokens)

    def generate(self, request_id: str, choice: Choice) -> GrpcCall:
        """Implement `Dialect.generate`. Stop sequences are not sent."""
        request = vllm_pb.GenerateRequest(
            request_id=request_id,
            tokenized=self._tokenized(choice.sent_token_ids),
            sampling_params=_vllm_sampling(choice),
            stream=True,
        )
        return self._call_generate(request, choice)

    async def abort(self, request_id: str, call: Any) -> None:
        await self._call("Abort", request_ids=[request_id])

    def take(self, message: vllm_pb.GenerateResponse, choice: Choice, output: Output) -> int:
        if message.WhichOneof("response") == "chunk":
            chunk = message.chunk
            check_index(chunk.index)
            check_prompt_count(chunk.prompt_tokens, choice)
            _extend(choice, output, chunk.token_ids, chunk.output_logprobs)
            return chunk.cached_tokens
        complete = message.complete
        check_index(complete.index)
        check_prompt_count(complete.prompt_tokens, choice)
        if not output.token_ids:
            _extend(choice, output, complete.output_ids, complete.output_logprobs)
        elif (
            list(complete.output_ids)
            != output.token_ids[len(output.token_ids) - len(complete.output_ids) :]
        ):
            raise EngineFailed("the engine's last message contradicts the tokens that it sent")
        output.finish_reason = finish_reason(complete.finish_reason)
        check_length(choice, output)
        check_end(choice, output)
        return complete.cached_tokens


def wire_seed(seed: int) -> int:
    """Fit a seed into the wire's 31 bits: a larger one is replaced by its hash."""
    return seed if 0 <= seed <= SEED_MAX else choice_seed(seed, 1) & SEED_MAX


def sampling_fields(
    choice: Choice, left_out: frozenset[RequestField] = frozenset()
) -> dict[str, Any]:
    """Build the sampling fields with equal names in vLLM's APIs; most exist in SGLang's too."""
    request, ends = choice.request.generation, choice.request.end_token_ids
    min_tokens = max(request.stop.min_output_tokens - len(request.output_token_ids), 0)
    ignores_end = request.stop.ignore_eos
    return {**_fields_of(request.sampling, ends, ignores_end, min_tokens, left_out)}


@lru_cache(maxsize=SAMPLINGS_MAX)
def _fields_of(
    sampling: SamplingParams,
    end_token_ids: frozenset[int],
    ignores_end: bool,
    min_tokens: int,
    left_out: frozenset[RequestField],
) -> dict[str, Any]:
    """Build the fields of `sampling_fields`, which most requests have in common."""
    names = ("temperature", "top_p", "top_k", "min_p")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    fields = {name: getattr(sampling, name) for name in names + penalties} | {
        "stop_token_ids": sorted(end_token_ids),
        "ignore_eos": ignores_end,
        "min_tokens": min_tokens,
    }
    left_out_names = {WIRE_NAMES[field] for field in left_out}
    return {name: value for name, value in fields.items() if name not in left_out_names}


def constrains_from_first_token(choice: Choice) -> bool:
    """Return whether the response format applies from the first token, without thinking."""
    request = choice.request.generation
    return request.response_format is not None and request.thinking is not ThinkingStart.PROMPT


def constrains_after_thinking(choice: Choice) -> bool:
    """Return whether the response format applies only after the thinking."""
    has_format = choice.request.generation.response_format is not None
    return has_format and not constrains_from_first_token(choice)


def _constrain(params: Any, choice: Choice) -> None:
    response_format = choice.request.generation.response_format
    if response_format is not None:
        setattr(params, response_format.kind, response_format.source)


def _vllm_sampling(choice: Choice) -> vllm_pb.SamplingParams:
    sampling = choice.request.generation.sampling
    params = vllm_pb.SamplingParams(
        **sampling_fields(choice),
        n=1,
        max_tokens=choice.token_count_max,
        logit_bias=dict(sampling.logit_bias),
        grammar_from_first_token=constrains_from_first_token(choice),
    )
    if sampling.temperature > 0:
        params.seed = wire_seed(choice.seed)
    if sampling.top_logprobs is not None:
        params.logprobs = sampling.top_logprobs + 1
    _constrain(params, choice)
    return params


def _extend(
    choice: Choice, output: Output, token_ids: Any, logprobs: vllm_pb.OutputLogProbs
) -> None:
    check_room(choice, output, max(len(token_ids), len(logprobs.token_ids)))
    if len(logprobs.token_ids) != len(logprobs.token_logprobs):
        raise EngineFailed("the engine sent log-probabilities and tokens of different number")
    output.token_ids += token_ids
    for index, (token_id, logprob) in enumerate(
        zip(logprobs.token_ids, logprobs.token_logprobs, strict=True)
    ):
        known = {token_id: TokenLogprob(token_id, logprob)}
        if index < len(logprobs.top_logprobs):
            top = logprobs.top_logprobs[index]
            known |= {
                each: TokenLogprob(each, value)
                for each, value in zip(top.token_ids, top.values, strict=False)
            }
        output.logprobs.append(known)


class SglangDialect(VllmDialect):
    """Dialect of SGLang's gRPC service."""

    stub_type = cast(Any, sglang_scheduler_pb2_grpc).SglangSchedulerStub
    messages = sglang_pb
    capabilities = Capabilities(
        VllmDialect.capabilities.unsupported | {RequestField.SEED, RequestField.REPETITION_PENALTY},
        sampled_logprobs=False,
        after_thinking=frozenset(),
    )

    def _server_facts(self, server: sglang_pb.GetServerInfoResponse) -> dict[str, Any]:
        running_max = server.server_args.fields["max_running_requests"].number_value
        version = f"SGLang {server.sglang_version}"
        running_max = known_count(running_max, TOKENS_MAX)  # the field may hold no number
        return {"version": version, "running_sequence_count_max": running_max}

    def generate(self, request_id: str, choice: Choice) -> GrpcCall:
        """Implement `Dialect.generate`. Stop sequences are not sent."""
        sampling = choice.request.generation.sampling
        # All are set, since the zeros of the message are other values than the defaults.
        fields = sampling_fields(choice) | {"top_k": sampling.top_k or -1}
        params = sglang_pb.SamplingParams(
            min_new_tokens=fields.pop("min_tokens"),
            **fields,
            n=1,
            max_new_tokens=choice.token_count_max,
            logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias},
        )
        _constrain(params, choice)
        request = sglang_pb.GenerateRequest(
            request_id=request_id,
            tokenized=self._tokenized(choice.sent_token_ids),
            sampling_params=params,
            return_logprob=sampling.top_logprobs is not None,
            logprob_start_len=-1,
            top_logprobs_num=sampling.top_logprobs or 0,
            stream=True,
            require_reasoning=constrains_after_thinking(choice),
        )
        return self._call_generate(request, choice)

    abort = Dialect.abort  # the service's own call leaves the output without an end

    def take(self, message: Any, choice: Choice, output: Output) -> int:
        """Implement `Dialect.take`: end the output at a stop token that `ignore_eos` disabled."""
        before, ends = len(output.token_ids), choice.request.end_token_ids
        cached_token_count = super().take(message, choice, output)
        if message.WhichOneof("response") == "complete":
            check_sent(message.complete.completion_tokens, output)
            if message.complete.reasoning_tokens:  # 0 unless they were asked for
                output.thinking_token_count = message.complete.reasoning_tokens
        for at in range(before, len(output.token_ids)):
            if output.token_ids[at] in ends and choice.request.generation.stop.ignore_eos:
                del output.token_ids[at + 1 :]
                output.finish_reason = "stop"
                break
        return cached_token_count
