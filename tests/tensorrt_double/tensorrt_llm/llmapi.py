"""What `tensorrt_llm.llmapi` exports, as far as it is used."""

from __future__ import annotations

from .llm import LLM
from .parameters import (
    CapacitySchedulerPolicy,
    GuidedDecodingParams,
    KvCacheConfig,
    LoRARequest,
    SamplingParams,
    SchedulerConfig,
)
from .results import CompletionOutput, RequestError, RequestOutput

__all__ = [
    "LLM",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoRARequest",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
]
