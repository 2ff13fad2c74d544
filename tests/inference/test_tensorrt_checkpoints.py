"""Published checkpoints that TensorRT-LLM serves, by the facts of their public configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference.adapters.tensorrt_engine import TensorRtEngine
from inference.adapters.tensorrt_settings import TensorRtSettings
from inference.errors import CheckpointInvalid
from inference.routing.memory import stored_bytes
from tests.inference.checkpoints import TinyCheckpoint, write_tokenizer
from tests.inference.published_facts import facts, multimodal, rope
from tests.inference.running import make_request
from tests.inference.tensorrt_engines import find_double, tensorrt_settings
from tests.inference.worker_engines import prompt, run, serving

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
LLAMA_FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized"}

LLAMA3 = [128001, 128008, 128009]


LLAMA31 = facts("LlamaForCausalLM", 128256, 131072, LLAMA3, rope_scaling=rope("llama3", 8.0, 8192))
QWEN3_MOE = facts("Qwen3MoeForCausalLM", 151936, 40960, 151645, num_experts=128)
DEEPSEEK = facts(
    "DeepseekV3ForCausalLM",
    129280,
    163840,
    1,
    n_routed_experts=256,
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
)
GPT_OSS = facts(
    "GptOssForCausalLM",
    201088,
    131072,
    200002,
    rope_scaling=rope("yarn", 32.0, 4096),
    quantization_config=MXFP4,
)
MIXTRAL = facts("MixtralForCausalLM", 32000, 32768, 2, num_local_experts=8, sliding_window=None)
QWEN_ENDS, LLAMA4_ENDS = [151645, 151643], [200001, 200007, 200008]

# config.json, end tokens of generation_config.json, algorithm of hf_quant_config.json
PUBLISHED: dict[str, tuple[dict[str, Any], list[int] | None, str | None]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA31, LLAMA3, None),
    "nvidia/Llama-3.1-8B-Instruct-FP8": (LLAMA31, LLAMA3, "FP8"),
    "meta-llama/Llama-3.2-3B-Instruct": (
        LLAMA31 | {"rope_scaling": rope("llama3", 32.0, 8192), "tie_word_embeddings": True},
        LLAMA3,
        None,
    ),
    "nvidia/Llama-3.3-70B-Instruct-FP4": (LLAMA31, LLAMA3, "NVFP4"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        multimodal(
            "Llama4ForConditionalGeneration",
            "llama4_text",
            vocab_size=202048,
            max_position_embeddings=10485760,
            eos_token_id=LLAMA4_ENDS,
            num_local_experts=16,
        ),
        LLAMA4_ENDS,
        None,
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": (
        multimodal(
            "Llama4ForConditionalGeneration",
            "llama4_text",
            vocab_size=202048,
            max_position_embeddings=1048576,
            eos_token_id=LLAMA4_ENDS,
        )
        | {"quantization_config": LLAMA_FP8},
        LLAMA4_ENDS,
        None,
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        facts("Qwen2ForCausalLM", 152064, 32768, 151645, use_sliding_window=False),
        QWEN_ENDS,
        None,
    ),
    "Qwen/Qwen2.5-72B-Instruct-AWQ": (
        facts("Qwen2ForCausalLM", 152064, 32768, 151645, quantization_config=AWQ),
        QWEN_ENDS,
        None,
    ),
    "Qwen/Qwen2-57B-A14B-Instruct": (
        facts("Qwen2MoeForCausalLM", 151936, 32768, 151645, num_experts=64),
        QWEN_ENDS,
        None,
    ),
    "Qwen/Qwen3-8B": (facts("Qwen3ForCausalLM", 151936, 40960, 151645), QWEN_ENDS, None),
    "Qwen/Qwen3-30B-A3B": (QWEN3_MOE, QWEN_ENDS, None),
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": (
        QWEN3_MOE | {"max_position_embeddings": 262144, "quantization_config": FP8},
        QWEN_ENDS,
        None,
    ),
    "nvidia/Qwen3-235B-A22B-FP4": (QWEN3_MOE, QWEN_ENDS, "NVFP4"),
    "deepseek-ai/DeepSeek-V3": (DEEPSEEK | {"quantization_config": FP8}, None, None),
    "deepseek-ai/DeepSeek-R1": (DEEPSEEK | {"quantization_config": FP8}, [1], None),
    "nvidia/DeepSeek-R1-0528-FP4": (DEEPSEEK, [1], "NVFP4"),
    "openai/gpt-oss-120b": (GPT_OSS, [200002, 199999, 200012], None),
    "openai/gpt-oss-20b": (GPT_OSS, [200002, 199999, 200012], None),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (MIXTRAL, [2], None),
    "nvidia/Mixtral-8x7B-Instruct-v0.1-FP8": (MIXTRAL, [2], "FP8"),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": (
        MIXTRAL | {"vocab_size": 32768, "max_position_embeddings": 65536},
        [2],
        None,
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        multimodal(
            "Mistral3ForConditionalGeneration",
            "mistral",
            vocab_size=131072,
            max_position_embeddings=131072,
        ),
        [2],
        None,
    ),
    "google/gemma-2-9b-it": (facts("Gemma2ForCausalLM", 256000, 8192, 1), [1, 107], None),
    "google/gemma-3-1b-it": (facts("Gemma3ForCausalLM", 262144, 32768, [1, 106]), [1, 106], None),
    "google/gemma-3-27b-it": (  # leaves sizes to the defaults of transformers
        multimodal(
            "Gemma3ForConditionalGeneration",
            "gemma3_text",
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
        | {"eos_token_id": [1, 106]},
        [1, 106],
        None,
    ),
    "microsoft/phi-4": (facts("Phi3ForCausalLM", 100352, 16384, 100265), None, None),
    "microsoft/Phi-4-mini-instruct": (
        facts(
            "Phi3ForCausalLM",
            200064,
            131072,
            199999,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rope_scaling={"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
        ),
        [200020, 199999],
        None,
    ),
    "microsoft/Phi-3.5-MoE-instruct": (
        facts("PhiMoEForCausalLM", 32064, 131072, 32000, num_local_experts=16),
        [32000, 32001, 32007],
        None,
    ),
}


def write(
    directory: Path, config: dict[str, Any], ends: list[int] | None, algorithm: str | None
) -> None:
    files: dict[str, Any] = {"config.json": config}
    if ends is not None:
        files["generation_config.json"] = {"eos_token_id": ends}
    if algorithm is not None:
        quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
        files["hf_quant_config.json"] = {"quantization": quantization}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_accepted(name: str, tmp_path: Path) -> None:
    config, ends, algorithm = PUBLISHED[name]
    write(tmp_path, config, ends, algorithm)
    text = config.get("text_config", config)

    model = TensorRtEngine(TensorRtSettings(tmp_path, name)).model

    gemma3 = text.get("model_type") == "gemma3_text"
    assert model.architecture == config["architectures"][0]
    assert model.vocabulary_size == (262208 if gemma3 else text["vocab_size"])
    assert model.context_window_tokens == (131072 if gemma3 else text["max_position_embeddings"])


@pytest.mark.parametrize(
    ("entries", "window"),
    [
        ({"rope_scaling": rope("yarn", 4.0, 32768)}, 131072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 65536),
        ({"rope_scaling": rope("llama3", 32.0, 8192)}, 32768),
        ({"rope_parameters": {"full_attention": rope("yarn", 4.0, 32768)}}, 32768),
    ],
)
def test_yarn_extends_stated_windows(entries: dict[str, Any], window: int, tmp_path: Path) -> None:
    """The model card of Qwen2.5 asks for it; other checkpoints state the extended window."""
    write(tmp_path, facts("Qwen2ForCausalLM", 152064, 32768, 151645) | entries, None, None)

    model = TensorRtEngine(TensorRtSettings(tmp_path, "long")).model

    assert model.context_window_tokens == window


def test_a_limit_shortens_the_window(tmp_path: Path) -> None:
    write(tmp_path, *PUBLISHED["meta-llama/Llama-4-Scout-17B-16E-Instruct"])

    settings = TensorRtSettings(tmp_path, "scout", context_window_tokens_max=65536)

    assert TensorRtEngine(settings).model.context_window_tokens == 65536


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"eos_token_id": [2, 32000]}, "eos_token_id"),
        ({"text_config": "none"}, "wrong type"),
        ({"rope_scaling": ["yarn"]}, "wrong type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, "wrong type"),
    ],
)
def test_missing_or_wrong_entries_are_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path, MIXTRAL | changes, None, None)

    with pytest.raises(CheckpointInvalid, match=named):
        TensorRtEngine(TensorRtSettings(tmp_path, "broken"))


def test_the_memory_of_packed_weights_is_that_of_their_files(tmp_path: Path) -> None:
    """AWQ packs eight weights into an I32, NVFP4 two into a U8."""
    for shard in range(2):
        (tmp_path / f"model-{shard}.safetensors").write_bytes(bytes(3000))

    assert stored_bytes(tmp_path) == 6000


async def test_a_quantized_mixture_of_experts_answers(
    tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker, too, leaves the configuration to the library."""
    find_double(monkeypatch)
    config = MIXTRAL | {"vocab_size": 400, "max_position_embeddings": 2048}
    write(tmp_path, config | {"quantization_config": FP8}, [2, 6], None)
    write_tokenizer(tmp_path)
    (tmp_path / "double").symlink_to(tiny.directory)
    outcomes = []
    for directory in (tiny.directory, tmp_path):
        async with serving(tensorrt_settings(TinyCheckpoint(directory))) as engine:
            outcomes.append(await run(engine, make_request(prompt(1), 12)))

    assert len(outcomes[0].token_ids) == 12
    assert outcomes[1].token_ids == outcomes[0].token_ids
