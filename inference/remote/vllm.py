"""`VllmEngine` of `vllm serve --grpc`: chunks hold what is new, and the last message repeats the last chunk. There is no salt.

Known of its servers: end and stop tokens are in the output; the chosen token comes first among the likeliest, and pushes the last
one out; seeds have 32 bits; biases beyond 100 are cut; an aborted sequence answers with `abort`, or, in older releases, not at all.
"""

from __future__ import annotations

from typing import Any, cast

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from inference.capabilities import Capabilities, RequestField
from inference.engine import EngineStatistics, GrammarKind, TokenLogprob
from inference.errors import EngineFailed
from inference.outside.sequence import Choice
from inference.remote.dialect import Dialect, ServerFacts, WireOutput, asked, block_counts, check_length, check_prompt_count
from inference.sampling.seeds import choice_seed

TOP_LOGPROBS_MAX = 19  # one more is asked for, and vLLM's own limit is 20 unless it is told otherwise
LOGIT_BIAS_MAX = 100.0
SEED_MAX = 2**31 - 1
_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled"}


class VllmDialect(Dialect):
    """See `Dialect`."""

    carries_salt = False
    capabilities = Capabilities(
        frozenset({RequestField.LARK, RequestField.BEAM_SEARCH}),
        top_logprobs_max=TOP_LOGPROBS_MAX,
        logit_bias_max=LOGIT_BIAS_MAX,
    )

    def __init__(self, channel: grpc.aio.Channel, call_timeout_s: float) -> None:
        super().__init__(cast(Any, vllm_engine_pb2_grpc).VllmEngineStub(channel), call_timeout_s)

    async def health_fault(self) -> str | None:
        """See `Dialect.health_fault`."""
        answer: pb.HealthCheckResponse = await self._call("HealthCheck", pb.HealthCheckRequest())
        return None if answer.healthy else answer.message or "not healthy"

    async def facts(self) -> ServerFacts:
        """See `Dialect.facts`."""
        model: pb.GetModelInfoResponse = await self._call("GetModelInfo", pb.GetModelInfoRequest())
        server: pb.GetServerInfoResponse = await self._call("GetServerInfo", pb.GetServerInfoRequest())
        return ServerFacts(
            model=model.served_model_name or model.model_path,
            version=server.server_type or "vLLM",
            vocabulary_size=model.vocab_size,
            context_window_tokens=model.max_context_length,
            running_sequence_count_max=server.max_num_seqs,
            block_tokens=server.block_size,
        )

    async def load(self, block_tokens: int) -> EngineStatistics | None:
        """See `Dialect.load`. Older servers tell only which part of the cache is in use, not how large it is."""
        answer: pb.GetLoadsResponse = await self._call("GetLoads", pb.GetLoadsRequest())
        total = sum(load.max_total_num_tokens for load in answer.loads)
        used = sum(load.token_usage * load.max_total_num_tokens for load in answer.loads)
        return block_counts(total, used / total if total else 0.0, block_tokens)

    def generate(self, request_id: str, choice: Choice) -> Any:
        """See `Dialect.generate`. Stop sequences stay with us."""
        request = pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_ids=asked(choice).prompt_token_ids),
            sampling_params=_sampling(choice),
            stream=True,
        )
        return self._stream("Generate", request)

    def embed(self, request_id: str, token_ids: tuple[int, ...], timeout_s: float) -> Any:
        """See `Dialect.embed`."""
        request = pb.EmbedRequest(request_id=request_id, tokenized=pb.TokenizedInput(input_ids=token_ids))
        return self._stub.Embed(request, timeout=timeout_s)

    async def abort(self, request_id: str) -> None:
        """See `Dialect.abort`."""
        await self._call("Abort", pb.AbortRequest(request_ids=[request_id]))

    def take(self, message: pb.GenerateResponse, choice: Choice, output: WireOutput) -> int:
        """See `Dialect.take`."""
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
        output.finish_reason = _REASONS.get(complete.finish_reason, complete.finish_reason or "nothing")
        check_length(choice, output)
        if output.finish_reason == "stop" and (not output.token_ids or output.token_ids[-1] not in choice.request.end_token_ids):
            raise EngineFailed("the engine ended a sequence by a token that is no end token of this checkpoint")
        return complete.cached_tokens


def wire_seed(seed: int) -> int:
    """A seed as the 31 bits that the wire has: itself if it fits, else what follows from all of it."""
    return seed if 0 <= seed <= SEED_MAX else choice_seed(seed, 1) & SEED_MAX


def _sampling(choice: Choice) -> pb.SamplingParams:
    wanted, wire = choice.request.wanted, asked(choice)
    sampling, stop = wanted.sampling, wanted.stop
    params = pb.SamplingParams(
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


def _extend(output: WireOutput, token_ids: Any, told: pb.OutputLogProbs) -> None:
    output.token_ids += token_ids
    for index, (token_id, logprob) in enumerate(zip(told.token_ids, told.token_logprobs, strict=True)):
        known = {token_id: TokenLogprob(token_id, logprob)}
        if index < len(told.top_logprobs):
            top = told.top_logprobs[index]
            known |= {each: TokenLogprob(each, value) for each, value in zip(top.token_ids, top.values, strict=True)}
        output.logprobs.append(known)
