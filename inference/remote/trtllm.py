"""`TrtllmService` of `trtllm-serve --grpc`: chunks hold what is new, the last message all. Salts cross as numbers.

Known of its servers: stop tokens are cut from the output unless asked for; whether the end token is in it is not documented, and
both are taken; one that was aborted while it waited never answers. The published servicer reads no salt and answers neither for its
tokenizer nor for its load.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

import grpc
from smg_grpc_proto.generated import trtllm_service_pb2 as pb
from smg_grpc_proto.generated import trtllm_service_pb2_grpc

from inference.capabilities import TENSORRT_LLM_IGNORES, Capabilities, RequestField
from inference.engine import EngineStatistics, GrammarKind, TokenLogprob
from inference.errors import EngineFailed
from inference.outside.sequence import Choice
from inference.remote.dialect import Dialect, ServerFacts, WireOutput, asked, check_length, check_prompt_count

_GUIDES = {
    GrammarKind.JSON_SCHEMA: pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA,
    GrammarKind.REGEX: pb.GuidedDecodingParams.GUIDE_TYPE_REGEX,
}
_REASONS = {"stop": "stop", "stop_word": "stop", "length": "length", "cancelled": "cancelled"}


class TrtllmDialect(Dialect):
    """See `Dialect`."""

    carries_salt = True
    # Servers take a bias of one float per row of the model, where their own sampler wants another length. Grammars are in a
    # language that the server's settings decide. A drawn token may be missing in its log-probabilities.
    capabilities = Capabilities(TENSORRT_LLM_IGNORES | {RequestField.LOGIT_BIAS, RequestField.LARK}, sampled_logprobs=False)

    def __init__(self, channel: grpc.aio.Channel, call_timeout_s: float) -> None:
        super().__init__(cast(Any, trtllm_service_pb2_grpc).TrtllmServiceStub(channel), call_timeout_s)

    async def health_fault(self) -> str | None:
        """See `Dialect.health_fault`: the status is OK, or what is wrong."""
        answer: pb.HealthCheckResponse = await self._call("HealthCheck", pb.HealthCheckRequest())
        return None if answer.status == "OK" else answer.status or "no status"

    async def facts(self) -> ServerFacts:
        """See `Dialect.facts`."""
        model: pb.GetModelInfoResponse = await self._call("GetModelInfo", pb.GetModelInfoRequest())
        server: pb.GetServerInfoResponse = await self._call("GetServerInfo", pb.GetServerInfoRequest())
        return ServerFacts(
            model=model.model_id,
            version=f"TensorRT-LLM {server.version}",
            vocabulary_size=model.vocab_size,
            context_window_tokens=model.max_seq_len,
            running_sequence_count_max=model.max_batch_size,
        )

    async def load(self, block_tokens: int) -> EngineStatistics | None:
        """See `Dialect.load`: this service has no call for it."""
        return None

    def generate(self, request_id: str, choice: Choice) -> Any:
        """See `Dialect.generate`. Stop sequences stay with us."""
        wanted, wire = choice.request.wanted, asked(choice)
        sampling = wanted.sampling
        request = pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_token_ids=wire.prompt_token_ids),
            sampling_config=_sampling(choice),
            output_config=pb.OutputConfig(exclude_input_from_output=True),
            max_tokens=wire.max_tokens,
            streaming=True,
            stop_token_ids=sorted(choice.request.end_token_ids),
            ignore_eos=wanted.stop.ignore_eos,
            include_stop_token_in_output=True,  # else the id that ended it is taken back from what was streamed
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
        """See `Dialect.embed`."""
        request = pb.EmbedRequest(request_id=request_id, tokenized=pb.TokenizedInput(input_token_ids=token_ids))
        return self._stub.Embed(request, timeout=timeout_s)

    async def abort(self, request_id: str) -> None:
        """See `Dialect.abort`."""
        await self._call("Abort", pb.AbortRequest(request_id=request_id))

    def take(self, message: pb.GenerateResponse, choice: Choice, output: WireOutput) -> int:
        """See `Dialect.take`."""
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
        output.finish_reason = _REASONS.get(complete.finish_reason, complete.finish_reason or "nothing")
        check_length(choice, output)
        if complete.WhichOneof("matched_stop") == "matched_token_id":
            output.stop_reason = complete.matched_token_id
        return complete.cached_tokens


def salt_id(cache_salt: str) -> int:
    """A salt as the number that the wire takes: 63 bits of its hash, so that no two tenants meet by chance or on purpose."""
    return int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "big") >> 1


def _sampling(choice: Choice) -> pb.SamplingConfig:
    sampling = choice.request.wanted.sampling
    config = pb.SamplingConfig(beam_width=1, num_return_sequences=1, temperature=sampling.temperature)
    if sampling.temperature > 0:
        config.top_p, config.top_k = sampling.top_p, sampling.top_k
    else:
        config.top_k = 1
    return config


def _known(told: pb.TokenLogprob) -> dict[int, TokenLogprob]:
    known = {top.token_id: TokenLogprob(top.token_id, top.logprob) for top in told.top_logprobs}
    if not known:  # with others beside it, one that is missing among them has no probability told: it would be 0
        known[told.token_id] = TokenLogprob(told.token_id, told.logprob)
    return known
