"""`TrtllmService` on the torch engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import trtllm_service_pb2 as pb

from inference import engine
from tests.remote_servers.backend import Backend, Context

REASONS = {
    engine.EngineFinishReason.STOP: "stop",
    engine.EngineFinishReason.LENGTH: "length",
    engine.EngineFinishReason.CANCELLED: "cancelled",
}


class TrtllmServicer:
    """Calls of the service."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        wanted = self._request(request)
        prompt_tokens = len(wanted.prompt_token_ids) + ("wrong_prompt" in self._backend.faults)
        ends = set(request.stop_token_ids)
        token_ids: list[int] = []
        reported: list[pb.TokenLogprob] = []
        cached = last = 0
        async for event in self._backend.run(request.request_id, wanted, context):
            match event:
                case engine.Scheduled():
                    cached = (
                        len(wanted.prompt_token_ids) + 1
                        if "wrong_cached" in self._backend.faults
                        else event.cached_token_count
                    )
                case engine.TokensGenerated():
                    new = [
                        each
                        for each in event.token_ids
                        if "cut_end" not in self._backend.faults or each not in ends
                    ]
                    token_ids += new
                    last = event.token_ids[-1]
                    reported += map(_logprob, event.logprobs)
                    if not new:
                        continue
                    chunk = pb.GenerateStreamChunk(
                        token_ids=new,
                        prompt_tokens=prompt_tokens,
                        completion_tokens=len(token_ids),
                        cached_tokens=self._backend.running_cached(cached),
                        logprobs=map(_logprob, event.logprobs),
                    )
                    yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
                case engine.SequenceFinished():
                    complete = pb.GenerateComplete(
                        output_token_ids=token_ids,
                        finish_reason=REASONS[event.reason],
                        prompt_tokens=prompt_tokens,
                        completion_tokens=event.generated_token_count
                        - ("cut_end" in self._backend.faults),
                        cached_tokens=cached,
                        logprobs=reported,
                    )
                    if event.reason is engine.EngineFinishReason.STOP and last != min(ends):
                        # The model's own first end token is not reported.
                        complete.matched_token_id = last
                    yield pb.GenerateResponse(request_id=request.request_id, complete=complete)

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(
            status="Executor is unhealthy" if "unhealthy" in self._backend.faults else "OK"
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(success=self._backend.abort(request.request_id))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        model = self._backend.engine.model
        return pb.GetModelInfoResponse(
            model_id=model.directory,
            max_seq_len=model.context_window_tokens,
            vocab_size=model.vocabulary_size,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(version="test", backend="torch", world_size=1)

    async def GetTokenizer(
        self, request: Any, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        async for chunk in self._backend.tokenizer_chunks(context):
            yield chunk

    async def SubscribeKvEvents(
        self, request: Any, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        async for batch in self._backend.kv_batches(context):
            yield batch

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        vector, token_count = await self._backend.embed(
            tuple(request.tokenized.input_token_ids), context
        )
        return pb.EmbedResponse(
            request_id=request.request_id, embedding=vector, prompt_tokens=token_count
        )

    def _request(self, request: pb.GenerateRequest) -> engine.GenerationRequest:
        config = request.sampling_config
        sampling = engine.SamplingParams(
            temperature=config.temperature if config.HasField("temperature") else 1.0,
            top_p=config.top_p if config.HasField("top_p") else 1.0,
            top_k=config.top_k if config.HasField("top_k") else 0,
            seed=config.seed if config.HasField("seed") else None,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty
            if config.HasField("repetition_penalty")
            else 1.0,
            presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty,
            logit_bias=tuple(
                (index, bias) for index, bias in enumerate(request.embedding_bias) if bias
            ),
            top_logprobs=request.output_config.logprobs
            if request.output_config.HasField("logprobs")
            else None,
        )
        guide, response_format = request.guided_decoding, None
        if guide.guide:
            is_schema = guide.guide_type == pb.GuidedDecodingParams.GUIDE_TYPE_JSON_SCHEMA
            response_format = engine.ResponseFormat(
                engine.GrammarKind.JSON_SCHEMA if is_schema else engine.GrammarKind.REGEX,
                guide.guide,
            )
        # With a response format, the engine accepts only the model's own stop ids, which are all
        # ids here.
        stop_ids = frozenset(request.stop_token_ids) if response_format is None else frozenset()
        salt = (
            str(request.cache_salt_id)
            if request.HasField("cache_salt_id") and "unsalted" not in self._backend.faults
            else ""
        )
        return engine.GenerationRequest(
            tuple(request.tokenized.input_token_ids),
            sampling,
            engine.StopCriteria(
                request.max_tokens, (), stop_ids, request.ignore_eos, config.min_tokens
            ),
            salt,
            response_format,
        )


def _logprob(reported: engine.TokenLogprobs) -> pb.TokenLogprob:
    top = {each.token_id: each.logprob for each in (*reported.top, reported.chosen)}
    return pb.TokenLogprob(
        token_id=reported.chosen.token_id,
        logprob=reported.chosen.logprob,
        top_logprobs=[
            pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top.items()
        ],
    )
