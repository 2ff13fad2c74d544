"""Settings of a TensorRT-LLM engine, their merge with a file of `trtllm-serve`; load message.

Imported by the API process and the worker. The worker's interpreter may be the one of NVIDIA's
image, so this imports few packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from common.settings import number, one_of, pairs, setting, whole
from inference.adapters.external_queue import AbortLimits
from inference.adapters.tensorrt_adapters import Adapter
from inference.capabilities import EMBEDDED_ONLY, Capabilities
from inference.limits import EngineLimits
from inference.sequences import RequestField
from inference.workers.protocol import Message

# 1.2.0 corrupts its KV cache under block reuse (NVIDIA/TensorRT-LLM#12770); later interfaces differ
VERSION = "1.2.1"

KV_EVENT_COUNT_MAX = 65_536  # size of the engine's buffer of cache events
SPARE_ROW_COUNT = 8  # batch places reserved for sequences that are being aborted
# Values without which the worker, or its table of effective parameters, would be wrong.
_NEEDED: dict[str, Any] = {
    "backend": "pytorch",
    "enable_chunked_prefill": True,
    "enable_iter_perf_stats": True,
    "enable_lora": False,
    "guided_decoding_backend": "llguidance",
    "kv_cache_config.event_buffer_max_size": KV_EVENT_COUNT_MAX,
    "lora_config": None,
    "max_beam_width": 1,
    "sampler_type": "auto",
    "skip_tokenizer_init": False,
}
# Entries of the library's own server, which makes text there.
_OF_SERVER = frozenset({"num_postprocess_workers", "postprocess_tokenizer_dir", "reasoning_parser"})
_PARALLEL = {
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "moe_expert_parallel_size": "expert_parallel_size",
}
_OBJECTS = ("kv_cache_config", "scheduler_config")
# The default PyTorch sampler accepts and ignores these fields: penalties came with
# NVIDIA/TensorRT-LLM#16485, `min_p` with #16590, seeds with #17172. It suppresses only one of
# several end tokens, so a minimum of tokens is not enforced. The log-probabilities of a sampled
# token may lack that token, which would fail the sequence.
_TORCH_SAMPLER = Capabilities(
    frozenset(
        {
            RequestField.MIN_P,
            RequestField.SEED,
            RequestField.REPETITION_PENALTY,
            RequestField.PRESENCE_PENALTY,
            RequestField.FREQUENCY_PENALTY,
            RequestField.MIN_OUTPUT_TOKENS,
            *EMBEDDED_ONLY,
        }
    ),
    sampled_logprobs=False,
    after_thinking=frozenset(),
)
# Versions of TensorRT-LLM: the library's in the worker, and the release candidates whose server has
# the gRPC service. The doctor asks for each field whether an installed library behaves so.
TENSORRT_LLM: Mapping[str, Capabilities] = MappingProxyType(
    {"1.2.1": _TORCH_SAMPLER, "1.3.0rc": _TORCH_SAMPLER}
)


paths_by_name = pairs("name=directory pairs", Path)


@dataclass(frozen=True, slots=True)
class TensorRtDefaults:
    """Settings that all TensorRT-LLM engines of a process share."""

    # TensorRT-LLM: Python that runs its worker, with the library and Weir installed. Unset: the
    # server's own.
    python: str = setting("WEIR_TENSORRT_PYTHON", "", str)
    # TensorRT-LLM: GPUs that share each matrix.
    tensor_parallel: int = setting("WEIR_TENSORRT_TENSOR_PARALLEL", 1, whole(1, 1024))
    # TensorRT-LLM: GPUs that share the layers.
    pipeline_parallel: int = setting("WEIR_TENSORRT_PIPELINE_PARALLEL", 1, whole(1, 1024))
    # TensorRT-LLM: GPUs that share the experts. 0: the engine decides.
    expert_parallel: int = setting("WEIR_TENSORRT_EXPERT_PARALLEL", 0, whole(0, 1024))
    # TensorRT-LLM: how many sequences run at once.
    batch_max: int = setting("WEIR_TENSORRT_BATCH_MAX", 256, whole(1, 4096))
    # TensorRT-LLM: data type of the KV cache.
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "WEIR_TENSORRT_KV_CACHE_DTYPE", "auto", one_of("auto", "fp8")
    )
    # TensorRT-LLM: how much of the memory left after the weights the KV cache may take. The rest is
    # for activations.
    kv_cache_fraction: float = setting("WEIR_TENSORRT_KV_CACHE_FRACTION", 0.9, number(0, 0.99))
    # TensorRT-LLM: when to abort cancelled sequences. Aborts during prefill have hung engines:
    # `running` waits for the first token, `never` lets sequences finish.
    abort: Literal["running", "always", "never"] = setting(
        "WEIR_TENSORRT_ABORT", "running", one_of("running", "always", "never")
    )
    # TensorRT-LLM: your LoRA adapters, as `model:adapter=directory` pairs. For clients
    # `model:adapter` is a model, with prices of its own.
    lora_adapters: Mapping[str, Path] = setting("WEIR_LORA_ADAPTERS", dict, paths_by_name)
    # TensorRT-LLM: report of `weir doctor tensorrt --lora DIR --json` that adapters take effect,
    # without which none is served.
    lora_report: str = setting("WEIR_LORA_REPORT", "", str)


@dataclass(frozen=True, slots=True)
class TensorRtOptions(AbortLimits):
    """Engine options for the child process, in addition to the limits.

    `expert_parallel_size` applies to mixture-of-experts layers; None for the engine's default.
    `kv_cache_memory_fraction` is the KV cache's part of the GPU memory that is free after loading
    the weights. `block_tokens` is the number of tokens per cache block.

    For the `abort_...` fields see `AbortLimits`: aborts before the first token have hung engines,
    and aborts of sequences with log-probabilities have crashed them (NVIDIA/TensorRT-LLM#10810).
    `config` has entries of `trtllm-serve --config` for the library, which override the others. A
    sequence, or the engine, counts as stuck after a silence of `first_token_timeout_s` or
    `inter_token_timeout_s`. After an idle time of `canary_interval_s`, one token is generated as a
    test, which may take `canary_timeout_s`.
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
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for sizes out of range."""
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "block_tokens",
            "empty_answer_count_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.expert_parallel_size is not None and self.expert_parallel_size < 1:
            raise ValueError("expert_parallel_size must be at least 1")
        if not 0 < self.kv_cache_memory_fraction < 1:
            raise ValueError("kv_cache_memory_fraction must be above 0 and below 1")


@dataclass(frozen=True, slots=True)
class TensorRtSettings:
    """Settings of one checkpoint. Counts and waits are those of `TorchEngineSettings`, with
    defaults for one GPU.

    `load_timeout_s` is long because weights, autotuner and CUDA graphs of a large model take
    minutes. `python` is the worker's interpreter, which has the library; empty for that of this
    process. `adapters` are the LoRA adapters that requests may name.
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
    python: str = ""
    adapters: tuple[Adapter, ...] = ()

    @property
    def shard_count(self) -> int:
        """Number of GPUs that share the weights."""
        return self.options.tensor_parallel_size * self.options.pipeline_parallel_size

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that the engine needs."""
        context_count: int = self.options.config.get("context_parallel_size", 1)
        return self.shard_count * context_count


def with_config(settings: TensorRtSettings, config: Mapping[str, Any]) -> TensorRtSettings:
    """Merge the content of a file for `trtllm-serve --config` into the settings.

    Its sizes replace those of the settings; entries for the server itself are left out. Raises
    ValueError, with the entry, for one that contradicts Weir.
    """
    entries = {name: value for name, value in config.items() if name not in _OF_SERVER}
    for name in _OBJECTS:
        if name in entries and not isinstance(entries[name], Mapping):
            raise ValueError(f"{name} must be a mapping, got {entries[name]!r}")
    kv_cache = dict(entries.pop("kv_cache_config", {}))
    if (fraction := entries.pop("kv_cache_free_gpu_memory_fraction", None)) is not None:
        kv_cache.setdefault("free_gpu_memory_fraction", fraction)  # the server's option
    for name, needed in _NEEDED.items():
        section, _, entry = name.rpartition(".")
        target = kv_cache if section else entries
        if entry in target and target.pop(entry) != needed:
            raise ValueError(f"{name} must be {needed!r}: Weir cannot use another value")
    if settings.adapters and entries.get("cuda_graph_config") is not None:
        raise ValueError("cuda_graph_config must be left out: CUDA graphs omit LoRA adapters")
    for name in ("model", "tokenizer"):
        if name in entries:
            raise ValueError(f"{name} must be left out: `directory` names the checkpoint")
    block_tokens = _size(kv_cache, "tokens_per_block", settings.options.block_tokens)
    changes: dict[str, Any] = {
        option: _size(entries, name, None) for name, option in _PARALLEL.items() if name in entries
    }
    batch = _size(entries, "max_batch_size", None)
    running = settings.running_sequence_count_max
    if batch is not None:
        running = batch - min(SPARE_ROW_COUNT, batch // 4)
        entries["max_batch_size"] = batch
    return replace(
        settings,
        context_window_tokens_max=_size(entries, "max_seq_len", settings.context_window_tokens_max),
        step_token_count_max=_size(entries, "max_num_tokens", settings.step_token_count_max),
        running_sequence_count_max=running,
        options=replace(
            settings.options,
            **changes,
            block_tokens=block_tokens,
            config=entries | ({"kv_cache_config": kv_cache} if kv_cache else {}),
        ),
    )


def _size(entries: dict[str, Any], name: str, default: int | None) -> Any:
    """Remove an entry and return it. Raises ValueError if it is present but not a count."""
    value = entries.pop(name, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return default if value is None else value


class LoadTensorRt(Message, tag="load_tensorrt", frozen=True):
    """First message to a TensorRT-LLM worker: the checkpoint and its options."""

    directory: str
    vocabulary_size: int
    end_token_ids: frozenset[int]
    limits: EngineLimits
    options: TensorRtOptions
    adapters: tuple[Adapter, ...] = ()
