"""Double of the used exports of `tensorrt_llm.llmapi`."""

from __future__ import annotations

from . import llm_args as llm_args
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
