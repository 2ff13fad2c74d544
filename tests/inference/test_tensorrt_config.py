"""Configuration of `trtllm-serve --config` for the engine: recipes, sizes, contradictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from inference.adapters.tensorrt_library import TensorRtLibrary
from inference.adapters.tensorrt_settings import TensorRtSettings, with_config
from inference.errors import EngineStartFailed
from inference.limits import EngineLimits
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.tensorrt_queue import double_imported

PLAIN = TensorRtSettings(Path("somewhere"), "m")
# Facts of examples/configs in NVIDIA's repository.
RECIPES = {
    "deepseek-r1-throughput": """
        {max_batch_size: 1024, max_num_tokens: 3200, kv_cache_free_gpu_memory_fraction: 0.8,
        tensor_parallel_size: 8, moe_expert_parallel_size: 8, trust_remote_code: true,
        enable_attention_dp: true, stream_interval: 10, kv_cache_config: {dtype: fp8},
        cuda_graph_config: {enable_padding: true, max_batch_size: 128},
        speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}}""",
    "deepseek-r1-latency": """
        {max_batch_size: 4, tensor_parallel_size: 8, moe_expert_parallel_size: 2,
        max_num_tokens: 32768, trust_remote_code: true, moe_config: {backend: TRTLLM},
        kv_cache_config: {free_gpu_memory_fraction: 0.75},
        speculative_config: {decoding_type: MTP, max_draft_len: 3, relaxed_topk: 10}}""",
    "DeepSeek-R1-0528/B200/1k1k_tp8_conc64": """
        {backend: pytorch, tensor_parallel_size: 8, moe_expert_parallel_size: 8,
        max_num_tokens: 1152, max_seq_len: 2068, print_iter_log: true, stream_interval: 10,
        kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8}, enable_attention_dp: false,
        moe_config: {backend: DEEPGEMM}, cuda_graph_config: {max_batch_size: 256}}""",
    "gpt-oss-120b-throughput": """
        {max_batch_size: 720, max_num_tokens: 16384, tensor_parallel_size: 2,
        moe_expert_parallel_size: 2, enable_attention_dp: true, stream_interval: 20,
        num_postprocess_workers: 4, moe_config: {backend: TRTLLM},
        attention_dp_config: {enable_balance: true, batching_wait_iters: 50, timeout_iters: 1}}""",
    "llama-3.3-70b": """
        {max_batch_size: 1024, max_num_tokens: 2048, tensor_parallel_size: 1,
        moe_expert_parallel_size: 1, trust_remote_code: true, enable_attention_dp: false,
        kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.9}}""",
    "qwen3": """
        {max_batch_size: 161, max_num_tokens: 1160, kv_cache_free_gpu_memory_fraction: 0.8,
        tensor_parallel_size: 1, print_iter_log: true, enable_attention_dp: true,
        cuda_graph_config: {enable_padding: true, batch_sizes: [1, 2, 4, 8]}}""",
}


def build(
    settings: TensorRtSettings, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return the arguments that the stand-in was built with."""
    limits = EngineLimits(
        context_window_tokens=min(settings.context_window_tokens_max or 512, 512),
        step_token_count_max=settings.step_token_count_max,
        running_sequence_count_max=settings.running_sequence_count_max,
    )
    with double_imported(monkeypatch, "lonely"):
        llm = TensorRtLibrary().build(str(tiny.directory), limits, settings.options)
        llm.shutdown()
    arguments: dict[str, Any] = llm.kwargs
    return arguments


@pytest.mark.parametrize("name", RECIPES)
def test_published_recipes_load_unchanged(
    name: str, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load(RECIPES[name])
    settings = with_config(PLAIN, recipe)
    options = settings.options

    assert options.tensor_parallel_size == recipe["tensor_parallel_size"]
    assert options.expert_parallel_size == recipe.get("moe_expert_parallel_size")
    arguments = build(with_config(PLAIN, recipe | {"tensor_parallel_size": 1}), tiny, monkeypatch)

    for entry in recipe.keys() & {"max_batch_size", "max_num_tokens", "stream_interval"}:
        assert arguments[entry] == recipe[entry]
    assert arguments["num_postprocess_workers"] == 0, "counts of cached tokens would be missing"
    cache = arguments["kv_cache_config"]
    reported = recipe.get("kv_cache_config", {})
    assert cache.dtype == reported.get("dtype", "auto")
    assert cache.free_gpu_memory_fraction == reported.get(
        "free_gpu_memory_fraction", recipe.get("kv_cache_free_gpu_memory_fraction", 0.9)
    )
    assert (cache.tokens_per_block, cache.event_buffer_max_size) == (32, 65_536)
    if "speculative_config" in recipe:
        assert arguments["speculative_config"].decoding_type == "MTP"


def test_sizes_of_the_file_replace_those_of_the_settings() -> None:
    settings = with_config(
        PLAIN,
        {
            "max_batch_size": 64,
            "max_num_tokens": 4096,
            "max_seq_len": 65_536,
            "kv_cache_config": {"tokens_per_block": 64, "host_cache_size": 1 << 30},
        },
    )

    assert settings.running_sequence_count_max == 56, "8 places are for aborted sequences"
    assert settings.step_token_count_max == 4096
    assert settings.context_window_tokens_max == 65_536
    assert settings.options.block_tokens == 64
    assert settings.options.config["kv_cache_config"] == {"host_cache_size": 1 << 30}
    assert with_config(PLAIN, {"max_batch_size": 4}).running_sequence_count_max == 3
    assert with_config(PLAIN, {}) == PLAIN


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"backend": "tensorrt"}, "backend must be 'pytorch'"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill must be True"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"sampler_type": "TRTLLMSampler"}, "sampler_type"),
        ({"lora_config": {"max_lora_rank": 8}}, "lora_config must be None"),
        ({"kv_cache_config": {"event_buffer_max_size": 0}}, "kv_cache_config.event_buffer"),
        ({"kv_cache_config": "fp8"}, "kv_cache_config must be a mapping"),
        ({"model": "meta-llama/Llama-3.1-8B"}, "model must be left out"),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number"),
        ({"max_seq_len": "128k"}, "max_seq_len must be a whole number"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size must be a whole number"),
    ],
)
def test_a_contradiction_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        with_config(PLAIN, config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"max_batchsize": 8}, "max_batchsize"),
        ({"speculative_config": {"decoding_type": "Guess"}}, "Guess"),
        ({"kv_cache_config": {"page_size": 8}}, "page_size"),
    ],
)
def test_an_entry_that_the_library_does_not_know_fails_the_start(
    config: dict[str, Any],
    named: str,
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EngineStartFailed, match=named):
        build(with_config(PLAIN, config), tiny, monkeypatch)
