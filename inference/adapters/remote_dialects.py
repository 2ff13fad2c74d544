"""gRPC dialects of the two remote services. One dialect uses one channel.

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
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import grpc
from smg_grpc_proto.generated import common_pb2, trtllm_service_pb2_grpc, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import trtllm_service_pb2 as trtllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from inference.adapters.external_core import Choice, Output
from inference.capabilities import TENSORRT_LLM_IGNORES, Capabilities, RequestField
from inference.engine import EngineStatistics, GrammarKind, TokenLogprob
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.sequences import choice_seed

SHARES = (
    "the server shares cached prefixes between tenants: turn its prefix cache off "
    "(vLLM: --no-enable-prefix-caching; TensorRT-LLM: kv_cache_config.enable_block_reuse: false), "
    "or set WEIR_REMOTE_SHARE_PREFIXES=1 if your tenants may share them"
)

OVERLOAD_WAIT_S = 1.0  # the services send no retry delay when they are full


class ServerUnfit(Exception):
    """The server cannot serve this model as configured; the message says why and how to fix it."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports; 0 or empty if it does not. block_tokens: tokens per cache block."""

    model: str
    version: str = ""
    vocabulary_size: int = 0
    context_window_tokens: int = 0
    running_sequence_count_max: int = 0
    block_tokens: int = 0


class Dialect(ABC):
    """One service. Calls raise `grpc.aio.AioRpcError`. stub_type: the generated stub class, which
    is untyped.
    """

    stub_type: Any
    carries_salt: bool  # whether requests carry a salt that separates cached prefixes
    capabilities: Capabilities

    def __init__(self, channel: grpc.aio.Channel, call_timeout_s: float) -> None:
        self._stub = self.stub_type(channel)
        self._call_timeout_s = call_timeout_s

    @abstractmethod
    async def health_fault(self) -> str | None:
        """Return the problem that the server reports, or None if it is healthy."""

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """Return the facts that the server reports."""

    @abstractmethod
    async def load(self, block_tokens: int) -> EngineStatistics | None:
        """Return the cache blocks in use as the server reports them, or None if it reports no load."""

    @abstractmethod
    def generate(self, request_id: str, choice: Choice) -> Any:
        """Send one sequence and return the call, which is iterated and can be cancelled."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Ask the server to end a sequence."""

    @abstractmethod
    def take(self, message: Any, choice: Choice, output: Output) -> int:
        """Add a message to the output. Returns the number of cached prompt tokens. Raises:
        EngineFailed if invalid.
        """

    @abstractmethod
    def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        """Send one text to embed; return the awaitable call, whose answer has `embedding` and
        `prompt_tokens`.
        """

    def tokenizer_chunks(self) -> AsyncIterable[common_pb2.GetTokenizerChunk]:
        """Stream the server's tokenizer files as chunks of a zip archive."""
        chunks: AsyncIterable[common_pb2.GetTokenizerChunk] = self._stream("GetTokenizer", common_pb2.GetTokenizerRequest())
        return chunks

    def kv_batches(self) -> AsyncIterable[common_pb2.KvEventBatch]:
        """Stream the changes to the server's prefix cache, without end."""
        batches: AsyncIterable[common_pb2.KvEventBatch] = self._stream("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest())
        return batches

    async def _call(self, name: str, request: Any) -> Any:
        return await getattr(self._stub, name)(request, timeout=self._call_timeout_s)

    def _stream(self, name: str, request: Any) -> Any:
        return getattr(self._stub, name)(request)


class Asked(NamedTuple):
    """A choice as sent to the server: output generated elsewhere becomes part of the prompt."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def asked(choice: Choice) -> Asked:
    wanted = choice.request.wanted
    return Asked(wanted.prompt_token_ids + wanted.output_token_ids, wanted.stop.max_output_tokens - len(wanted.output_token_ids))


def block_counts(token_count_max: int, usage: float, block_tokens: int) -> EngineStatistics:
    """Convert a server's cache usage to blocks. usage: fraction in use, from 0 to 1."""
    total, held = token_count_max // block_tokens, round(usage * token_count_max) // block_tokens
    return EngineStatistics(kv_block_count_total=total, kv_block_count_free=total - held, kv_block_count_held=held)


def check_prompt_count(told: int, choice: Choice) -> None:
    """Raise EngineFailed if the server reports a different prompt length than was sent; 0 means
    unknown.
    """
    given = len(asked(choice).prompt_token_ids)
    if told not in (0, given):
        raise EngineFailed(f"the engine reports a prompt of {told} tokens, {given} were sent")


def check_length(choice: Choice, output: Output) -> None:
    """Raise EngineFailed if an output ended for length before its limit: tokens were lost."""
    most, sent = asked(choice).max_tokens, len(output.token_ids)
    if output.finish_reason == "length" and sent < most:
        raise EngineFailed(f"the engine reports the limit of {most} tokens reached, but sent {sent}")


def engine_error(error: grpc.aio.AioRpcError, what: str, field: str | None = None, *, has_begun: bool = False) -> EngineError:
    """Map a call's status to an error of the request. what: request or text. has_begun: the request
    was accepted.
    """
    if not has_begun:
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
                return RequestImpossible(f"the remote engine refused the {what}: {error.details()}", field)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return EngineOverloaded(f"the remote engine is full: {error.details()}", OVERLOAD_WAIT_S)
    lost = "sequence" if field is None else what
    return EngineFailed(f"the remote engine ended the {lost}: {error.code().name}: {error.details() or 'no details'}")


_GUIDES = {
    GrammarKind.JSON_SCHEMA: trtllm_pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA,
    GrammarKind.REGEX: trtllm_pb.GuidedDecodingParams.GUIDE_TYPE_REGEX,
}

_TRTLLM_REASONS = {"stop": "stop", "stop_word": "stop", "length": "length", "cancelled": "cancelled"}


class TrtllmDialect(Dialect):
    """TensorRT-LLM's service."""

    stub_type = cast(Any, trtllm_service_pb2_grpc).TrtllmServiceStub
    carries_salt = True
    # The server takes a bias of one float per row of the model, but its sampler expects another
    # length. The server's settings decide the grammar language. A sampled token may be missing from
    # its log-probabilities.
    capabilities = Capabilities(TENSORRT_LLM_IGNORES | {RequestField.LOGIT_BIAS, RequestField.LARK}, sampled_logprobs=False)

    async def health_fault(self) -> str | None:
        """Implement `Dialect.health_fault`: any status but OK is a fault."""
        answer: trtllm_pb.HealthCheckResponse = await self._call("HealthCheck", trtllm_pb.HealthCheckRequest())
        return None if answer.status == "OK" else answer.status or "no status"

    async def facts(self) -> ServerFacts:
        model: trtllm_pb.GetModelInfoResponse = await self._call("GetModelInfo", trtllm_pb.GetModelInfoRequest())
        server: trtllm_pb.GetServerInfoResponse = await self._call("GetServerInfo", trtllm_pb.GetServerInfoRequest())
        return ServerFacts(
            model=model.model_id,
            version=f"TensorRT-LLM {server.version}",
            vocabulary_size=model.vocab_size,
            context_window_tokens=model.max_seq_len,
            running_sequence_count_max=model.max_batch_size,
        )

    async def load(self, block_tokens: int) -> EngineStatistics | None:
        """Implement `Dialect.load`: this service has no such call."""
        return None

    def generate(self, request_id: str, choice: Choice) -> Any:
        """Implement `Dialect.generate`. Stop sequences are not sent."""
        wanted, wire = choice.request.wanted, asked(choice)
        sampling = wanted.sampling
        request = trtllm_pb.GenerateRequest(
            request_id=request_id,
            tokenized=trtllm_pb.TokenizedInput(input_token_ids=wire.prompt_token_ids),
            sampling_config=_trtllm_sampling(choice),
            output_config=trtllm_pb.OutputConfig(exclude_input_from_output=True),
            max_tokens=wire.max_tokens,
            streaming=True,
            stop_token_ids=sorted(choice.request.end_token_ids),
            ignore_eos=wanted.stop.ignore_eos,
            include_stop_token_in_output=True,  # otherwise the stop token that was streamed is removed again
        )
        if sampling.top_logprobs is not None:
            request.output_config.logprobs = max(sampling.top_logprobs, 1)
        if wanted.response_format is not None:
            request.guided_decoding.guide_type = _GUIDES[wanted.response_format.kind]
            request.guided_decoding.guide = wanted.response_format.source
        if wanted.cache_salt:
            request.cache_salt_id = salt_id(wanted.cache_salt)
        return self._stream("Generate", request)

    def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        request = trtllm_pb.EmbedRequest(request_id=request_id, tokenized=trtllm_pb.TokenizedInput(input_token_ids=token_ids))
        return self._stub.Embed(request, timeout=timeout_s)

    async def abort(self, request_id: str) -> None:
        await self._call("Abort", trtllm_pb.AbortRequest(request_id=request_id))

    def take(self, message: trtllm_pb.GenerateResponse, choice: Choice, output: Output) -> int:
        if message.WhichOneof("response") == "chunk":
            chunk = message.chunk
            output.token_ids += chunk.token_ids
            output.logprobs += map(_known, chunk.logprobs)
            check_prompt_count(chunk.prompt_tokens, choice)
            return chunk.cached_tokens
        complete = message.complete
        check_prompt_count(complete.prompt_tokens, choice)
        if len(complete.output_token_ids) > len(output.token_ids):
            if output.token_ids != list(complete.output_token_ids[: len(output.token_ids)]):
                raise EngineFailed("the engine's last message contradicts the tokens that it sent")
            output.logprobs += map(_known, complete.logprobs[len(output.token_ids) :])
            output.token_ids += complete.output_token_ids[len(output.token_ids) :]
        if complete.completion_tokens > len(output.token_ids):
            raise EngineFailed(f"the engine counts {complete.completion_tokens} tokens and sent {len(output.token_ids)}")
        output.finish_reason = _TRTLLM_REASONS.get(complete.finish_reason, complete.finish_reason or "nothing")
        check_length(choice, output)
        if complete.WhichOneof("matched_stop") == "matched_token_id":
            output.stop_reason = complete.matched_token_id
        return complete.cached_tokens


def salt_id(cache_salt: str) -> int:
    """Return a salt as the 63-bit number that the wire takes: a hash, so that collisions cannot be
    forced.
    """
    return int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "big") >> 1


def _trtllm_sampling(choice: Choice) -> trtllm_pb.SamplingConfig:
    sampling = choice.request.wanted.sampling
    config = trtllm_pb.SamplingConfig(beam_width=1, num_return_sequences=1, temperature=sampling.temperature)
    if sampling.temperature > 0:
        config.top_p, config.top_k = sampling.top_p, sampling.top_k
    else:
        config.top_k = 1
    return config


def _known(told: trtllm_pb.TokenLogprob) -> dict[int, TokenLogprob]:
    known = {top.token_id: TokenLogprob(top.token_id, top.logprob) for top in told.top_logprobs}
    if not known:  # beside other top tokens, a token without a reported probability would get 0
        known[told.token_id] = TokenLogprob(told.token_id, told.logprob)
    return known


TOP_LOGPROBS_MAX = 19  # one more is requested; vLLM's default limit is 20
LOGIT_BIAS_MAX = 100.0
SEED_MAX = 2**31 - 1
_VLLM_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}


class VllmDialect(Dialect):
    """vLLM's service."""

    stub_type = cast(Any, vllm_engine_pb2_grpc).VllmEngineStub
    carries_salt = False
    capabilities = Capabilities(
        frozenset({RequestField.LARK, RequestField.BEAM_SEARCH}),
        top_logprobs_max=TOP_LOGPROBS_MAX,
        logit_bias_max=LOGIT_BIAS_MAX,
    )

    async def health_fault(self) -> str | None:
        answer: vllm_pb.HealthCheckResponse = await self._call("HealthCheck", vllm_pb.HealthCheckRequest())
        return None if answer.healthy else answer.message or "not healthy"

    async def facts(self) -> ServerFacts:
        model: vllm_pb.GetModelInfoResponse = await self._call("GetModelInfo", vllm_pb.GetModelInfoRequest())
        server: vllm_pb.GetServerInfoResponse = await self._call("GetServerInfo", vllm_pb.GetServerInfoRequest())
        return ServerFacts(
            model=model.served_model_name or model.model_path,
            version=server.server_type or "vLLM",
            vocabulary_size=model.vocab_size,
            context_window_tokens=model.max_context_length,
            running_sequence_count_max=server.max_num_seqs,
            block_tokens=server.block_size,
        )

    async def load(self, block_tokens: int) -> EngineStatistics | None:
        """Implement `Dialect.load`. Older servers report the fraction of the cache in use but not
        its size.
        """
        answer: vllm_pb.GetLoadsResponse = await self._call("GetLoads", vllm_pb.GetLoadsRequest())
        total = sum(load.max_total_num_tokens for load in answer.loads)
        used = sum(load.token_usage * load.max_total_num_tokens for load in answer.loads)
        return block_counts(total, used / total if total else 0.0, block_tokens)

    def generate(self, request_id: str, choice: Choice) -> Any:
        """Implement `Dialect.generate`. Stop sequences are not sent."""
        request = vllm_pb.GenerateRequest(
            request_id=request_id,
            tokenized=vllm_pb.TokenizedInput(input_ids=asked(choice).prompt_token_ids),
            sampling_params=_vllm_sampling(choice),
            stream=True,
        )
        return self._stream("Generate", request)

    def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        request = vllm_pb.EmbedRequest(request_id=request_id, tokenized=vllm_pb.TokenizedInput(input_ids=token_ids))
        return self._stub.Embed(request, timeout=timeout_s)

    async def abort(self, request_id: str) -> None:
        await self._call("Abort", vllm_pb.AbortRequest(request_ids=[request_id]))

    def take(self, message: vllm_pb.GenerateResponse, choice: Choice, output: Output) -> int:
        if message.WhichOneof("response") == "chunk":
            chunk = message.chunk
            _extend(output, chunk.token_ids, chunk.output_logprobs)
            check_prompt_count(chunk.prompt_tokens, choice)
            return chunk.cached_tokens
        complete = message.complete
        check_prompt_count(complete.prompt_tokens, choice)
        if not output.token_ids:
            _extend(output, complete.output_ids, complete.output_logprobs)
        elif list(complete.output_ids) != output.token_ids[len(output.token_ids) - len(complete.output_ids) :]:
            raise EngineFailed("the engine's last message contradicts the tokens that it sent")
        output.finish_reason = _VLLM_REASONS.get(complete.finish_reason, complete.finish_reason or "nothing")
        check_length(choice, output)
        if output.finish_reason == "stop" and (not output.token_ids or output.token_ids[-1] not in choice.request.end_token_ids):
            raise EngineFailed("the engine ended a sequence with a token that is not an end token of this checkpoint")
        return complete.cached_tokens


def wire_seed(seed: int) -> int:
    """Return a seed that fits the wire's 31 bits: the seed itself if it fits, else a hash of it."""
    return seed if 0 <= seed <= SEED_MAX else choice_seed(seed, 1) & SEED_MAX


def _vllm_sampling(choice: Choice) -> vllm_pb.SamplingParams:
    wanted, wire = choice.request.wanted, asked(choice)
    sampling, stop = wanted.sampling, wanted.stop
    params = vllm_pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=wire.max_tokens,
        min_tokens=max(stop.min_output_tokens - len(wanted.output_token_ids), 0),
        stop_token_ids=sorted(choice.request.end_token_ids),
        ignore_eos=stop.ignore_eos,
        n=1,
        logit_bias=dict(sampling.logit_bias),
    )
    if sampling.temperature > 0:
        params.seed = wire_seed(choice.seed)
    if sampling.top_logprobs is not None:
        params.logprobs = sampling.top_logprobs + 1
    response_format = wanted.response_format
    if response_format is not None:
        params.grammar_from_first_token = True
        if response_format.kind is GrammarKind.JSON_SCHEMA:
            params.json_schema = response_format.source
        else:
            params.regex = response_format.source
    return params


def _extend(output: Output, token_ids: Any, told: vllm_pb.OutputLogProbs) -> None:
    output.token_ids += token_ids
    for index, (token_id, logprob) in enumerate(zip(told.token_ids, told.token_logprobs, strict=True)):
        known = {token_id: TokenLogprob(token_id, logprob)}
        if index < len(told.top_logprobs):
            top = told.top_logprobs[index]
            known |= {each: TokenLogprob(each, value) for each, value in zip(top.token_ids, top.values, strict=True)}
        output.logprobs.append(known)
