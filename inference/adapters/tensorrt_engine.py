"""TensorRT-LLM in the API process: settings for a child process. Imports neither it nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inference.adapters.external_core import Handling
from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.capabilities import TENSORRT_LLM_IGNORES, Capabilities
from inference.checkpoint.checkpoint import read_model_info
from inference.engine import GenerationRequest, Tell
from inference.errors import RequestImpossible
from inference.limits import EngineLimits, outside_continuation_fault
from inference.workers.engine import EngineSequence, HostedEngine
from inference.workers.life import HostKind
from inference.workers.protocol import Message, decoder_to_parent


@dataclass(frozen=True, slots=True)
class TensorRtOptions(Handling):
    """Engine options passed to the child process, in addition to the limits.

    expert_parallel_size: for mixture-of-experts layers; None for the engine's default.
    kv_cache_memory_fraction: of the GPU memory that is free after loading the weights.
    block_tokens: tokens per cache block.

    abort_...: see `Handling`. Aborts before the first token have hung engines, and aborts of
    sequences with log-probabilities have crashed them (NVIDIA/TensorRT-LLM#10810).
    first_token_timeout_s, inter_token_timeout_s: silence after which a sequence, or the engine,
    counts as stuck. canary_interval_s: idle time before one token is generated as a test, limited
    to canary_timeout_s.
    """

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int | None = None
    kv_cache_memory_fraction: float = 0.9
    block_tokens: int = 32
    first_token_timeout_s: float = 120.0
    inter_token_timeout_s: float = 30.0
    canary_interval_s: float = 30.0
    canary_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError for sizes out of range."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "block_tokens", "empty_answer_count_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.expert_parallel_size is not None and self.expert_parallel_size < 1:
            raise ValueError("expert_parallel_size must be at least 1")
        if not 0 < self.kv_cache_memory_fraction < 1:
            raise ValueError("kv_cache_memory_fraction must be above 0 and below 1")


@dataclass(frozen=True, slots=True)
class TensorRtSettings:
    """Settings of one checkpoint. Counts and waits as in `TorchEngineSettings`, with defaults for
    one GPU.

    load_timeout_s: weights, autotuner and CUDA graphs of a large model take minutes.
    """

    directory: Path
    name: str
    options: TensorRtOptions = field(default_factory=TensorRtOptions)
    context_window_tokens_max: int | None = None
    step_token_count_max: int = 8192
    running_sequence_count_max: int = 256
    waiting_sequence_count_max: int = 2048
    load_timeout_s: float = 3600.0
    step_timeout_s: float = 60.0
    close_timeout_s: float = 20.0
    restart_delay_s_min: float = 1.0
    restart_delay_s_max: float = 60.0
    stable_after_s: float = 300.0
    environment: Mapping[str, str] = field(default_factory=dict)


class LoadTensorRt(Message, tag="load_tensorrt", frozen=True):
    """First message to a TensorRT-LLM worker: the checkpoint and its options."""

    directory: str
    limits: EngineLimits
    options: TensorRtOptions


# For release 1.2.1. A token missing from its log-probabilities fails a sequence, so sampled tokens
# have none.
CAPABILITIES = Capabilities(TENSORRT_LLM_IGNORES, sampled_logprobs=False)


class TensorRtEngine(HostedEngine):
    """One model on TensorRT-LLM, on one or more GPUs of this machine."""

    def __init__(self, settings: TensorRtSettings) -> None:
        """Read the checkpoint's configuration; starts no process.

        Raises: CheckpointInvalid; ValueError for contradictory limits.
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
        """Implement `Engine.predict_cached_token_count` from sent prompts and cache events."""
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
        """Implement `Engine.submit`."""
        if (fault := outside_continuation_fault(request)) is not None:
            raise RequestImpossible(fault, "output_token_ids")
        return super().submit(request, tell)
