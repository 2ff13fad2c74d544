"""TensorRT-LLM as the API process sees it: a checkpoint's settings, turned into a child process. Imports neither it nor torch."""

from __future__ import annotations

from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.adapters.tensorrt_settings import LoadTensorRt, TensorRtOptions, TensorRtSettings
from inference.capabilities import TENSORRT_LLM_IGNORES, Capabilities
from inference.checkpoint.checkpoint import read_model_info
from inference.engine import GenerationRequest, Tell
from inference.errors import RequestImpossible
from inference.limits import EngineLimits, outside_continuation_fault
from inference.workers.engine import EngineSequence, HostedEngine
from inference.workers.life import HostKind
from inference.workers.protocol import Message, decoder_to_parent

__all__ = ["TensorRtEngine", "TensorRtOptions", "TensorRtSettings"]

# Of release 1.2.1. A missing token in its log-probabilities fails a sequence: none for drawn tokens.
CAPABILITIES = Capabilities(TENSORRT_LLM_IGNORES, sampled_logprobs=False)


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
            capabilities=CAPABILITIES,
        )
        limits = EngineLimits(
            context_window_tokens=model.context_window_tokens,
            step_token_count_max=settings.step_token_count_max,
            running_sequence_count_max=settings.running_sequence_count_max,
            waiting_sequence_count_max=settings.waiting_sequence_count_max,
        )
        self._blocks = KvEventIndex()
        load = LoadTensorRt(model.directory, limits, settings.options)
        kind = HostKind(
            "inference.adapters.tensorrt_worker",
            settings.environment,
            load,
            settings.options.block_tokens,
            decoder=decoder_to_parent(KvCacheChange),
        )
        super().__init__(model, limits, settings, kind)

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`: what was sent under this salt and is still there by the engine's account."""
        sent = super().predict_cached_token_count(prompt_token_ids, cache_salt)
        return min(sent, self._blocks.matched_token_count(prompt_token_ids))

    def _receive(self, message: Message) -> None:
        if isinstance(message, KvCacheChange):
            self._blocks.apply(message)
        else:
            super()._receive(message)

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._blocks.clear()

    def submit(self, request: GenerationRequest, tell: Tell) -> EngineSequence:
        """See `Engine.submit`."""
        if (fault := outside_continuation_fault(request)) is not None:
            raise RequestImpossible(fault, "output_token_ids")
        return super().submit(request, tell)
