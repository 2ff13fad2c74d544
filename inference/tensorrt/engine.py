"""TensorRT-LLM as the API process sees it: a checkpoint's settings, turned into a child process. Imports neither it nor torch."""

from __future__ import annotations

from inference.checkpoint.checkpoint import read_model_info
from inference.engine import GenerationRequest, GrammarKind
from inference.errors import RequestImpossible
from inference.hosts.host_process import HostKind
from inference.hosts.host_protocol import ToParent
from inference.hosts.hosted_engine import HostedEngine
from inference.kv_event_index import KvCacheChange, KvEventIndex
from inference.limits import EngineLimits, outside_continuation_fault
from inference.tensorrt.settings import LoadTensorRt, TensorRtOptions, TensorRtSettings


class TensorRtEngine(HostedEngine):
    """One model on TensorRT-LLM, on one GPU or several of this machine."""

    def __init__(self, settings: TensorRtSettings) -> None:
        """Reads the checkpoint's configuration and starts nothing.

        Raises `CheckpointInvalid`, or ValueError for bounds that contradict each other.
        """
        model = read_model_info(
            settings.directory,
            name=settings.name,
            engine="tensorrt_llm",
            context_window_tokens_max=settings.context_window_tokens_max,
        )
        limits = EngineLimits(
            context_window_tokens=model.context_window_tokens,
            step_token_count_max=settings.step_token_count_max,
            running_sequence_count_max=settings.running_sequence_count_max,
            waiting_sequence_count_max=settings.waiting_sequence_count_max,
        )
        self._options = settings.options
        self._blocks = KvEventIndex()
        load = LoadTensorRt(model.directory, limits, settings.options)
        kind = HostKind("inference.tensorrt.host", settings.environment, load, settings.options.block_tokens)
        super().__init__(model, limits, settings, kind)

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`: what was sent under this salt and is still there by the engine's account."""
        sent = super().predict_cached_token_count(prompt_token_ids, cache_salt)
        if not self._options.kv_event_count_max:
            return sent
        return min(sent, self._blocks.matched_token_count(prompt_token_ids))

    def _handle(self, message: ToParent) -> None:
        if isinstance(message, KvCacheChange):
            self._blocks.apply(message)
        else:
            super()._handle(message)

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._blocks.clear()

    def _unserved(self, request: GenerationRequest) -> RequestImpossible | None:
        if request.beam_search is not None:
            return RequestImpossible("this model's engine does no beam search", "beam_search")
        if request.adapter and request.adapter not in self._options.adapters:
            return RequestImpossible(f"this model has no adapter {request.adapter!r}")
        if (fault := outside_continuation_fault(request)) is not None:
            return RequestImpossible(fault, "output_token_ids")
        return format_fault(request, self._options)


def format_fault(request: GenerationRequest, options: TensorRtOptions) -> RequestImpossible | None:
    """What of a response format this engine's guided decoding does not know."""
    response_format = request.response_format
    if response_format is None or response_format.kind is not GrammarKind.LARK or options.guided_decoding_backend == "llguidance":
        return None
    return RequestImpossible("grammars need guided decoding by llguidance on this engine", response_format.field)


__all__ = ["TensorRtEngine", "TensorRtOptions", "TensorRtSettings"]
