"""`VllmEngine` on the torch engine."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from inference import engine
from tests.remote_servers.backend import BLOCK_TOKENS, Backend, Context

REASONS = {
    engine.EngineFinishReason.STOP: "stop",
    engine.EngineFinishReason.LENGTH: "length",
    engine.EngineFinishReason.CANCELLED: "abort",
}


class VllmServicer:
    """Calls of the service. The prefix cache is off, except with the fault "unsalted"."""

    messages: Any = pb

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        wanted = self._request(request)
        prompt_tokens = len(wanted.prompt_token_ids) + ("wrong_prompt" in self._backend.faults)
        top_count = request.sampling_params.logprobs
        last: tuple[int, ...] = ()
        cached = 0
        async for event in self._backend.run(request.request_id, wanted, context):
            match event:
                case engine.Scheduled():
                    cached = (
                        len(wanted.prompt_token_ids) + 1
                        if "wrong_cached" in self._backend.faults
                        else event.cached_token_count
                    )
                case engine.TokensGenerated():
                    last = event.token_ids
                    chunk = pb.GenerateStreamChunk(
                        token_ids=last,
                        prompt_tokens=prompt_tokens,
                        completion_tokens=len(last),
                        cached_tokens=self._backend.running_cached(cached),
                        output_logprobs=_logprobs(event.logprobs, top_count),
                    )
                    yield pb.GenerateResponse(chunk=chunk)
                case engine.SequenceFinished():
                    if event.reason is engine.EngineFinishReason.CANCELLED:
                        last = ()
                    complete = pb.GenerateComplete(
                        output_ids=last,
                        finish_reason=REASONS[event.reason],
                        prompt_tokens=prompt_tokens,
                        completion_tokens=len(last),
                        cached_tokens=cached,
                    )
                    yield pb.GenerateResponse(complete=complete)

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        healthy = "unhealthy" not in self._backend.faults
        return self.messages.HealthCheckResponse(
            healthy=healthy, message="Health" if healthy else "Engine is not alive"
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        for request_id in request.request_ids:
            self._backend.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        model = self._backend.engine.model
        return self.messages.GetModelInfoResponse(
            model_path=model.directory,
            is_generation=True,
            max_context_length=model.context_window_tokens,
            vocab_size=model.vocabulary_size,
            served_model_name=model.name,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(server_type="vllm-grpc", block_size=BLOCK_TOKENS)

    async def GetLoads(self, request: Any, context: Context) -> Any:
        reported = self._backend.engine.statistics()
        load = self.messages.SchedulerLoad(
            num_running_reqs=reported.running_sequence_count,
            num_waiting_reqs=reported.waiting_sequence_count,
            max_total_num_tokens=reported.kv_block_count_total * BLOCK_TOKENS,
            token_usage=reported.kv_block_count_held / max(reported.kv_block_count_total, 1),
        )
        return self.messages.GetLoadsResponse(dp_rank_count=1, loads=[load])

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

    async def Embed(self, request: Any, context: Context) -> Any:
        vector, token_count = await self._backend.embed(tuple(request.tokenized.input_ids), context)
        return self.messages.EmbedResponse(
            embedding=vector, prompt_tokens=token_count, embedding_dim=len(vector)
        )

    async def FlushCache(self, request: Any, context: Context) -> Any:
        raise NotImplementedError

    StartProfile = StopProfile = FlushCache

    def _request(self, request: pb.GenerateRequest) -> engine.GenerationRequest:
        params = request.sampling_params
        sampling = engine.SamplingParams(
            temperature=params.temperature if params.HasField("temperature") else 1.0,
            top_p=params.top_p or 1.0,
            top_k=params.top_k,
            seed=params.seed if params.HasField("seed") else None,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty or 1.0,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple(params.logit_bias.items()),
            top_logprobs=params.logprobs if params.HasField("logprobs") else None,
        )
        kind, response_format = params.WhichOneof("constraint"), None
        if kind in ("json_schema", "regex"):
            response_format = engine.ResponseFormat(engine.GrammarKind(kind), getattr(params, kind))
        # With a response format, the engine accepts only the model's own stop ids, which are all
        # ids here.
        stop_ids = frozenset(params.stop_token_ids) if response_format is None else frozenset()
        made = engine.GenerationRequest(
            tuple(request.tokenized.input_ids),
            sampling,
            engine.StopCriteria(
                params.max_tokens, (), stop_ids, params.ignore_eos, params.min_tokens
            ),
            self._salt(),
            response_format,
        )
        return self._backend.held_back(made, waits=not params.grammar_from_first_token)

    def _salt(self) -> str:
        return "" if "unsalted" in self._backend.faults else uuid.uuid4().hex


def _logprobs(reported: Sequence[engine.TokenLogprobs], top_count: int) -> pb.OutputLogProbs | None:
    """Return log-probabilities like vLLM: the chosen token, then top tokens."""
    if not reported:
        return None
    found = pb.OutputLogProbs()
    for each in reported:
        found.token_ids.append(each.chosen.token_id)
        found.token_logprobs.append(each.chosen.logprob)
        if top_count:
            ordered = {entry.token_id: entry.logprob for entry in (each.chosen, *each.top)}
            shown = list(ordered.items())[:top_count]
            top = pb.TopLogProbs(
                token_ids=[token_id for token_id, _ in shown],
                values=[logprob for _, logprob in shown],
            )
            found.top_logprobs.append(top)
    return found
