"""How to run a checkpoint on TensorRT-LLM: what its engine is told, and every bound and wait of ours around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inference.adapters.external_sequences import Handling
from inference.limits import EngineLimits
from inference.workers.protocol import Message


@dataclass(frozen=True, slots=True)
class TensorRtOptions(Handling):
    """What the child is told of the engine beside its limits.

    expert_parallel_size: of mixture-of-experts layers; None leaves it to the engine. kv_cache_memory_fraction: of the GPU memory
    that is free after the weights. block_tokens: how many tokens are cached as one.

    abort_...: see `Handling`. Aborts before the first token have hung engines, and aborts while log-probabilities are streamed
    have crashed them (NVIDIA/TensorRT-LLM#10810). first_token_timeout_s, inter_token_timeout_s: silence of one sequence after
    which it, or the engine, is taken for stuck. canary_interval_s: of idleness after which one token is generated as a test, which
    may take canary_timeout_s.
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
        """Raises ValueError for sizes that no engine has."""
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "block_tokens", "empty_answer_count_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.expert_parallel_size is not None and self.expert_parallel_size < 1:
            raise ValueError("expert_parallel_size must be at least 1")
        if not 0 < self.kv_cache_memory_fraction < 1:
            raise ValueError("kv_cache_memory_fraction must be above 0 and below 1")


@dataclass(frozen=True, slots=True)
class TensorRtSettings:
    """How to run a checkpoint. Counts and waits as in `TorchEngineSettings`, with defaults that suit one GPU.

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
    """The first message to a TensorRT-LLM host: what to load and how."""

    directory: str
    limits: EngineLimits
    options: TensorRtOptions
