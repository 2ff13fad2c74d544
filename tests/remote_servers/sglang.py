"""`SglangScheduler` on the torch engine, after `smg-grpc-servicer` 0.14.1 and SGLang 0.5.23."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from inference import engine
from tests.remote_servers.backend import BLOCK_TOKENS, Context
from tests.remote_servers.vllm import REASONS, VllmServicer


class SglangServicer(VllmServicer):
    """Calls of the service. The prefix cache is off, except with the fault "unsalted"."""

    messages = pb

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in self._answers(request, context):
                yield message
        except (asyncio.CancelledError, GeneratorExit):  # the client has cancelled the call
            self._backend.abort(request.request_id)
            raise

    async def _answers(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        wanted = self._request(request)
        faults = self._backend.faults
        counts: dict[str, Any] = {
            "prompt_tokens": len(wanted.prompt_token_ids) + ("wrong_prompt" in faults)
        }
        running: dict[str, Any] = {}
        last: tuple[int, ...] = ()
        count = 0
        async for event in self._backend.run(request.request_id, wanted, context):
            match event:
                case engine.Scheduled():
                    counts["cached_tokens"] = (
                        len(wanted.prompt_token_ids) + 1
                        if "wrong_cached" in faults
                        else event.cached_token_count
                    )
                    cached = self._backend.running_cached(counts["cached_tokens"])
                    running = counts | {"cached_tokens": cached}
                case engine.TokensGenerated():
                    last = event.token_ids
                    count += len(last)
                    chunk = pb.GenerateStreamChunk(
                        token_ids=last,
                        completion_tokens=count,
                        output_logprobs=_logprobs(event.logprobs, request),
                        **running,
                    )
                    yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
                case engine.SequenceFinished():
                    if request.request_id in self._backend.aborted:
                        await asyncio.Event().wait()  # an aborted sequence never answers
                    complete = pb.GenerateComplete(
                        output_ids=last,
                        finish_reason=REASONS[event.reason],
                        completion_tokens=count,
                        **counts,
                    )
                    if event.reason is engine.EngineFinishReason.STOP:
                        complete.matched_token_id = last[-1]
                    yield pb.GenerateResponse(request_id=request.request_id, complete=complete)

    async def Abort(self, request: Any, context: Context) -> Any:
        return pb.AbortResponse(success=self._backend.abort(request.request_id))

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        options = Struct()
        options.update({"page_size": BLOCK_TOKENS, "max_running_requests": None})
        return pb.GetServerInfoResponse(server_args=options, sglang_version="test")

    async def LoadLoRAAdapter(self, request: Any, context: Context) -> Any:
        raise NotImplementedError

    UnloadLoRAAdapter = ListLoadedLoRAAdapters = LoadLoRAAdapter

    def _request(self, request: Any) -> engine.GenerationRequest:
        params = request.sampling_params
        greedy = params.temperature < 1e-6
        assert request.stream
        assert request.logprob_start_len == -1, "otherwise those of the prompt are computed"
        assert params.repetition_penalty == 1.0, "it ignores the prompt"
        sampling = engine.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p or 1.0,
            top_k=0 if greedy else max(params.top_k, 0),
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple((int(key), bias) for key, bias in params.logit_bias.items()),
            top_logprobs=request.top_logprobs_num if request.return_logprob else None,
        )
        kind, response_format = params.WhichOneof("constraint"), None
        if kind is not None:
            response_format = engine.ResponseFormat(engine.GrammarKind(kind), getattr(params, kind))
        # It ignores stop tokens with `ignore_eos`. With a response format, the engine accepts only
        # the model's own stop ids, which are all ids here.
        has_stops = response_format is None and not params.ignore_eos
        made = engine.GenerationRequest(
            tuple(request.tokenized.input_ids),
            sampling,
            engine.StopCriteria(
                params.max_new_tokens,
                (),
                frozenset(params.stop_token_ids) if has_stops else frozenset(),
                params.ignore_eos,
                params.min_new_tokens,
            ),
            self._salt(),
            response_format,
        )
        return self._backend.held_back(made, waits=request.require_reasoning)


def _logprobs(
    reported: tuple[engine.TokenLogprobs, ...], request: pb.GenerateRequest
) -> pb.OutputLogProbs | None:
    """Return log-probabilities like SGLang: the chosen token, and the top tokens apart."""
    if not request.return_logprob:
        return None
    found = pb.OutputLogProbs(
        token_ids=[each.chosen.token_id for each in reported],
        token_logprobs=[each.chosen.logprob for each in reported],
    )
    for each in reported:
        if request.top_logprobs_num:
            found.top_logprobs.append(
                pb.TopLogProbs(
                    token_ids=[entry.token_id for entry in each.top],
                    values=[entry.logprob for entry in each.top],
                )
            )
    return found
