"""Weights in every type and layout: equal or close, never in memory twice."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from inference.checkpoint.checkpoint import read_config
from inference.checkpoint.tensors import (
    PACKED_ROWS_MAX,
    WIDEN_COUNT,
    LinearWeights,
    MappedFile,
    project,
    quantize_rows,
)
from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.decoder.model import (
    Batch,
    Decoder,
    DecoderWeights,
    LayerPool,
    TorchKernels,
    load_weights,
)
from inference.errors import CheckpointInvalid
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from inference.limits import EngineLimits
from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import LlamaShape, make_checkpoint, write_tokenizer
from tests.inference.running import make_request, run_all

CORPUS = (
    "The hotel near the harbour has a garden and rooms with a view of the sea. Breakfast is served"
    " until ten. The hotel near the station allows dogs and costs 120 euros a night. The first one"
    " is quiet, the second one is close. Which hotel has a garden? The one near the harbour. Which"
    " hotel allows dogs? The one near the station. "
)

MEMORY_PROBE = """
import sys
from pathlib import Path
import torch
from inference.checkpoint.checkpoint import read_config
from inference.decoder.model import load_weights

def bytes_of(field):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024

directory, dtype, quantize = Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "True"
torch.set_num_threads(1)
torch.randn(64, 64).bfloat16().float() @ torch.randn(64, 64)
anonymous, of_files = bytes_of("RssAnon"), bytes_of("RssFile")
weights = load_weights(directory, read_config(directory), dtype, quantize=quantize)
print(bytes_of("RssAnon") - anonymous, bytes_of("RssFile") - of_files)
"""


def tensors_of(weights: DecoderWeights) -> list[Tensor]:
    """Return all tensors, in one order."""
    linears = [weights.lm_head]
    norms = [weights.final_norm, weights.embedding]
    for layer in weights.layers:
        linears += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
        norms += [layer.attention_norm, layer.mlp_norm]
    return norms + [
        tensor
        for one in linears
        for tensor in (one.weight, one.bias, one.scales)
        if tensor is not None
    ]


def convert(directory: Path, dtype: torch.dtype) -> None:
    """Rewrite the checkpoint's weights in another type."""
    path = directory / "model.safetensors"
    save_file(
        {name: tensor.to(dtype) for name, tensor in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )


def logits_of(
    directory: Path, token_ids: list[int], dtype: torch.dtype, *, quantize: bool = False
) -> Tensor:
    """Return the decoder's logits at each token, (N, V)."""
    config = read_config(directory)
    weights = load_weights(directory, config, dtype, quantize=quantize)
    decoder = Decoder(config, weights, len(token_ids), TorchKernels())
    count, positions = len(token_ids), torch.arange(len(token_ids), dtype=torch.int32)
    table = torch.arange(blocks_for(count), dtype=torch.int32)
    batch = Batch(
        token_ids=torch.tensor(token_ids),
        rotary_rows=positions,
        slots=positions,
        spans=torch.tensor([[0, count, 0, 0]], dtype=torch.int32),
        logit_rows=positions,
        tables=table,
        single_count=0,
        row_count_max=count,
    )
    pool_shape = (len(table), config.kv_head_count, KV_BLOCK_TOKENS, config.head_dim)
    pools = [
        LayerPool(torch.zeros(pool_shape, dtype=dtype), torch.zeros(pool_shape, dtype=dtype))
        for _ in config.layer_windows
    ]
    with torch.inference_mode():
        return decoder.forward(batch, pools)


def reference_logits(directory: Path, token_ids: list[int], dtype: torch.dtype) -> Tensor:
    """Return those of transformers, (N, V)."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama that has learned a few sentences, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("trained")
    write_tokenizer(directory)
    ids = torch.tensor(Tokenizer(directory).encode(CORPUS * 3, add_special_tokens=False))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        starts = torch.randint(0, len(ids) - 64, (8,))
        batch = torch.stack([ids[start : start + 64] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    """Return the perplexity of a text under the logits at its tokens."""
    return math.exp(float(cross_entropy(logits[:-1], torch.tensor(token_ids[1:]))))


def test_shards_and_one_file_give_the_same_weights(tmp_path: Path) -> None:
    shape = LlamaShape(architecture="Qwen3ForCausalLM", attention_bias=True)
    make_checkpoint(tmp_path / "one", shape=shape)
    make_checkpoint(tmp_path / "many", shape=shape, shard_count=3)

    one, many = (
        load_weights(tmp_path / name, read_config(tmp_path / name), torch.float32)
        for name in ("one", "many")
    )

    assert all(map(torch.equal, tensors_of(one), tensors_of(many)))


def test_bfloat16_is_as_close_to_exact_as_the_reference_is(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(architecture="Qwen3ForCausalLM"))
    convert(tmp_path, torch.bfloat16)
    token_ids = list(range(10, 110))
    exact = reference_logits(tmp_path, token_ids, torch.float32)

    ours = (logits_of(tmp_path, token_ids, torch.bfloat16) - exact).square().mean().sqrt()
    theirs = (reference_logits(tmp_path, token_ids, torch.bfloat16) - exact).square().mean().sqrt()

    assert torch.allclose(logits_of(tmp_path, token_ids, torch.float32), exact, atol=1e-3)
    assert ours < 1.3 * theirs


@pytest.mark.parametrize("rows", [1, PACKED_ROWS_MAX + 1])
@pytest.mark.parametrize("inner", [128, 72])  # torch's int8 kernel reads 16 values at once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_multiplies_by_what_it_stores(rows: int, inner: int, dtype: torch.dtype) -> None:
    """Compared with the dequantized weights in fp32, also beyond one widened block."""
    torch.manual_seed(2)
    channel_count = WIDEN_COUNT // inner + 64
    weight, bias = torch.randn(channel_count, inner).to(dtype), torch.randn(channel_count).to(dtype)
    inputs = torch.randn(rows, inner).to(dtype)

    quantized = quantize_rows(weight, bias)

    assert quantized.scales is not None
    stored = quantized.weight.float() * quantized.scales.float()[:, None]
    step = quantized.scales.float()[:, None]
    assert (
        (stored - weight.float()).abs() <= step * 1.01 * (0.5 if dtype is torch.float32 else 1.0)
    ).all()
    expected = linear(inputs.float(), stored, bias.float())
    # Bfloat16 rounds the sum, the scaled sum, and with the bias.
    relative = 1e-5 if dtype is torch.float32 else 3 / 256
    torch.testing.assert_close(
        project(inputs, quantized).float(), expected, rtol=relative, atol=10 * relative
    )


def test_a_row_of_zeros_survives_int8() -> None:
    quantized = quantize_rows(torch.zeros(3, 8))

    assert torch.equal(project(torch.ones(2, 8), quantized), torch.zeros(2, 3))
    assert isinstance(quantized, LinearWeights)


def test_int8_predicts_nearly_as_well_as_the_checkpoint(trained: Path) -> None:
    token_ids = list(Tokenizer(trained).encode(CORPUS, add_special_tokens=False))

    exact = logits_of(trained, token_ids, torch.float32)
    int8 = logits_of(trained, token_ids, torch.bfloat16, quantize=True)

    assert perplexity(exact, token_ids) < 3, "the model has learned"
    assert perplexity(int8, token_ids) < 1.02 * perplexity(exact, token_ids)
    assert (int8.argmax(-1) == exact.argmax(-1)).float().mean() > 0.97
    assert (int8 - exact).square().mean().sqrt() < 0.05 * exact.std()


@pytest.mark.parametrize("way", ["native", "torch"])
@pytest.mark.parametrize("compute_dtype", ["bfloat16", "int8"])
def test_the_engine_continues_what_the_model_has_learned(
    trained: Path,
    compute_dtype: Literal["bfloat16", "int8"],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the whole engine, on both decoders: rounding does not change clear choices."""
    if way == "torch":
        monkeypatch.setattr("inference.core.model_runner.supports", lambda config, dtype: False)
    tokenizer = Tokenizer(trained)
    request = make_request(
        tokenizer.encode("Which hotel has a garden? The", add_special_tokens=False), 12
    )
    exact = EngineCore(EngineOptions(str(trained), EngineLimits(512), "float32", 1 << 20))
    rounded = EngineCore(EngineOptions(str(trained), EngineLimits(512), compute_dtype, 1 << 20))

    assert run_all(rounded, [request])[0].text == run_all(exact, [request])[0].text


@pytest.mark.parametrize(
    ("dtype", "quantize", "anonymous_max", "file_max"),
    [
        # Only query, key and value are stacked; nothing else is read.
        ("bfloat16", False, 0.25, 0.25),
        # Converted: pages of the file are released tensor by tensor.
        ("float32", False, 2.1, 0.25),
        ("bfloat16", True, 0.75, 0.35),  # int8, with the embedding left in the file
    ],
)
def test_a_checkpoint_is_never_in_memory_twice(
    tmp_path: Path, dtype: str, quantize: bool, anonymous_max: float, file_max: float
) -> None:
    """In shares of the file: private memory of the process, and resident pages of the file."""
    shape = LlamaShape(
        hidden_size=512, intermediate_size=6144, layer_count=4, head_count=4, kv_head_count=2
    )
    make_checkpoint(tmp_path, shape=shape)
    convert(tmp_path, torch.bfloat16)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size

    command = [sys.executable, "-c", MEMORY_PROBE, str(tmp_path), dtype, str(quantize)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    anonymous, of_files = (int(value) / file_bytes for value in output.split())

    assert file_bytes > 70 << 20
    assert anonymous < anonymous_max
    assert of_files < file_max


def test_adjacent_tensors_are_one_without_a_copy(tmp_path: Path) -> None:
    save_file({"a.gate": torch.ones(3, 4), "a.up": torch.zeros(5, 4)}, tmp_path / "x.safetensors")
    file = MappedFile(tmp_path / "x.safetensors")

    joined = file.adjacent(["a.gate", "a.up"])

    assert joined is not None
    assert torch.equal(joined, torch.cat((torch.ones(3, 4), torch.zeros(5, 4))))
    assert joined.data_ptr() == file.tensor("a.gate").data_ptr()
    assert file.adjacent(["a.up", "a.gate"]) is None


def test_a_weight_without_a_target_is_named(tmp_path: Path) -> None:
    """A bias that the configuration does not announce would be ignored silently."""
    make_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file(load_file(path) | extra, path)

    with pytest.raises(CheckpointInvalid, match=r"q_proj\.bias has no place in LlamaForCausalLM"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(tied_embeddings=True))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]

    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    load_weights(tmp_path, read_config(tmp_path), torch.float32)
    save_file(tensors | {"lm_head.weight": embedding + 1}, path)

    with pytest.raises(CheckpointInvalid, match=r"lm_head\.weight differs from the embedding"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


def test_weights_of_another_kind_of_number_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    convert(tmp_path, torch.float8_e4m3fn)

    with pytest.raises(CheckpointInvalid, match="type F8_E4M3, which is not supported"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)
