"""Checkpoints are read correctly, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.checkpoint.checkpoint import read_config, read_model_info
from inference.decoder.model import load_weights
from inference.engine import SamplingParams
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.tokenizer import ChatMessage, Tokenizer
from tests.inference.checkpoints import MODEL_TYPES, LlamaShape, TinyCheckpoint, make_checkpoint


def change(path: Path, **entries: Any) -> None:
    """Overwrite entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: entry for name, entry in value.items() if entry is not None}))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported"),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            "proportional is not supported",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}},
            "linear has an unsupported entry: beta = 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "unsupported entry: full_attention = ",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"sliding_window": 512}, "sliding_window = 512 is not supported for LlamaForCausalLM"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50\.0 is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5 is not supported"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"hidden_act": "gelu"}, "gelu is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"vocab_size": "many"}, "wrong type"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(
    tmp_path: Path, entries: dict[str, Any], words: str
) -> None:
    make_checkpoint(tmp_path)
    change(tmp_path / "config.json", **entries)

    with pytest.raises(CheckpointInvalid, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "entries", "words"),
    [
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window = 0 is not a count"),
        (
            "MistralForCausalLM",
            {"layer_types": ["full_attention"]},
            "layer_types = .* is not supported for MistralForCausalLM",
        ),
        ("Qwen2ForCausalLM", {"attention_bias": True}, "attention_bias = True is not supported"),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types = .* a window of None tokens",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types = .* for 2 layers",
        ),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope = True is not supported"),
    ],
)
def test_each_architecture_knows_its_own_entries(
    tmp_path: Path, architecture: str, entries: dict[str, Any], words: str
) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(architecture=architecture))
    change(tmp_path / "config.json", **entries)

    with pytest.raises(CheckpointInvalid, match=words):
        read_config(tmp_path)


def test_entries_that_turn_nothing_on_are_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(architecture="Qwen2ForCausalLM"))
    before = read_config(tmp_path)
    change(
        tmp_path / "config.json",
        use_mrope=False,
        partial_rotary_factor=1.0,
        _name_or_path="x",
        initializer_range=0.02,
        new={},
    )

    assert read_config(tmp_path) == before


def test_windows_are_reported_by_layer(tmp_path: Path) -> None:
    """Qwen's first layers see all positions, unless the list of layers differs."""
    make_checkpoint(
        tmp_path,
        shape=LlamaShape(
            architecture="Qwen2ForCausalLM", layer_count=3, sliding_window=64, max_window_layers=2
        ),
    )
    by_number = read_config(tmp_path).layer_windows
    change(
        tmp_path / "config.json",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    by_list = read_config(tmp_path).layer_windows
    change(tmp_path / "config.json", layer_types=None, use_sliding_window=False)

    assert (by_number, by_list) == ((None, None, 64), (64, None, 64))
    assert read_config(tmp_path).layer_windows == (None, None, None)


def test_an_absent_entry_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for architecture in MODEL_TYPES:
        make_checkpoint(tmp_path, shape=LlamaShape(architecture=architecture))
        change(tmp_path / "config.json", num_attention_heads=32, hidden_size=4096)
        absent = dict.fromkeys(
            (
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
                "sliding_window",
                "rms_norm_eps",
            )
        )
        change(tmp_path / "config.json", **absent, rope_theta=None, tie_word_embeddings=None)
        ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(str(tmp_path))

        head_dim = (
            getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        )
        assert (ours.kv_head_count, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
        assert (ours.context_window_tokens, ours.rms_norm_eps) == (
            theirs.max_position_embeddings,
            theirs.rms_norm_eps,
        )
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert set(ours.layer_windows) == {getattr(theirs, "sliding_window", None)}
        assert ours.tied_embeddings == theirs.tie_word_embeddings


def test_scalings_that_extend_positions_extend_the_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    make_checkpoint(tmp_path, shape=LlamaShape(context_window_tokens=512))
    windows = []
    for scaling in ({"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 3.0}, yarn):
        change(tmp_path / "config.json", rope_scaling=scaling)
        windows.append(read_config(tmp_path).context_window_tokens)

    assert windows == [512, 1536, 2048]


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"config\.json: the file is missing"):
        read_config(tmp_path)


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(rope_theta=500_000.0))
    older = read_config(tmp_path).rope
    change(
        tmp_path / "config.json",
        rope_theta=None,
        rope_parameters={"rope_theta": 500_000.0, "rope_type": "default"},
    )

    assert read_config(tmp_path).rope == older
    assert older.theta == 500_000.0


def test_model_info_tells_window_and_default_sampling(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        generation_config={"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40},
    )

    info = read_model_info(tmp_path, name="demo", engine="torch", context_window_tokens_max=512)

    assert info.default_sampling == SamplingParams(temperature=0.7, top_p=0.9, top_k=40)
    assert (info.context_window_tokens, info.vocabulary_size, info.architecture) == (
        512,
        400,
        "LlamaForCausalLM",
    )
    assert read_config(tmp_path).end_token_ids == {2, 6}


@pytest.mark.parametrize("shard_count", [1, 3])
def test_a_missing_tensor_is_named(tmp_path: Path, shard_count: int) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(layer_count=1), shard_count=shard_count)
    change(tmp_path / "config.json", num_hidden_layers=2)

    with pytest.raises(CheckpointInvalid, match=r"model\.layers\.1\.\S+ is missing"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    change(tmp_path / "config.json", intermediate_size=128)

    with pytest.raises(
        CheckpointInvalid,
        match=r"gate_proj\.weight has shape \(160, 64\), config.json says \(128, 64\)",
    ):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


def test_a_torn_weights_file_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(CheckpointInvalid, match="not a safetensors file"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shard_count=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    change(index, weight_map=dict.fromkeys(weight_map, "../elsewhere.safetensors"))

    with pytest.raises(CheckpointInvalid, match="missing"):
        load_weights(tmp_path, read_config(tmp_path), torch.float32)


def test_plain_prompts_get_the_models_own_start(tiny: TinyCheckpoint) -> None:
    tokenizer = Tokenizer(tiny.directory)

    ids = tokenizer.encode("Which hotel?")

    assert ids[0] == 1
    assert tokenizer.encode("Which hotel?", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "Which hotel?"


def test_a_conversation_is_rendered_by_the_template(tiny: TinyCheckpoint) -> None:
    tokenizer = Tokenizer(tiny.directory)
    conversation = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")]

    assert (
        tokenizer.render_chat(conversation)
        == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    )
    assert tokenizer.encode_chat(conversation)[:1] == (3,), (
        "the template alone writes special tokens"
    )


def test_the_template_refuses_in_its_own_words(tiny: TinyCheckpoint) -> None:
    with pytest.raises(ChatTemplateFailed, match="Unknown role: oracle"):
        Tokenizer(tiny.directory).render_chat([ChatMessage("oracle", "?")])


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    change(tmp_path / "tokenizer_config.json", chat_template=None)

    with pytest.raises(ChatTemplateFailed, match="no chat template"):
        Tokenizer(tmp_path).render_chat([ChatMessage("user", "?")])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% set _ = messages.append('x') %}",
        "{{ strftime_now.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, attack: str) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(attack)

    with pytest.raises(ChatTemplateFailed):
        Tokenizer(tmp_path).render_chat([ChatMessage("user", "?")])


def test_a_template_that_does_not_parse_is_refused_at_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")

    with pytest.raises(CheckpointInvalid, match="does not parse"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, "not json"])
def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
