"""Checkpoints are read correctly, or refused by name."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from inference.checkpoint import families
from inference.checkpoint.checkpoint import read_config, read_model_info
from inference.decoder.model import load_weights
from inference.engine import SamplingParams
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.reasoning import CHANNEL_TOKENS
from inference.text.tokenizer import ChatMessage, Tokenizer
from tests.inference.checkpoints import (
    CHAT_TEMPLATE,
    MODEL_TYPES,
    LlamaShape,
    TinyCheckpoint,
    make_checkpoint,
)
from tests.inference.running import make_core, make_request, run_all
from tests.inference.tool_checkpoints import make_scripted_checkpoint

# Entries of published checkpoints that transformers does not read for Llama, or whose value is that
# of an absent entry.
NOTES: dict[str, Any] = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}, "dtype": "q4"},
    "unsloth_version": "2025.3.1",
    "unsloth_fixed": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    "pad_token": "<pad>",
    "tokenizer_padding_side": "left",
    "model_max_length": 4096,
    "max_window_layers": 21,
    "use_sliding_window": False,
    "_name_or_path": "someone/model",
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "transformers_version": "4.51.3",
    "model_type": "llama",
    "name": "model",
    "mlx_note": "converted",
    "peft_config": {"r": 16, "lora_alpha": 32},
    "lora_alpha": 16,
    "training_args": {"learning_rate": 1e-5},
    "neftune_noise_alpha": 5,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
    "hidden_dropout": 0.1,
    "initializer_range": 0.02,
    "init_method": "small",
    "use_flash_attention": True,
    "quantization_config": None,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "partial_rotary_factor": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 0,
    "residual_multiplier": 1.0,
    "logit_scale": 1,
    "layer_types": ["full_attention", "full_attention"],
    "is_causal": True,
    "is_decoder": True,
    "num_local_experts": 0,
    "sliding_window": None,
    "use_mrope": False,
    "qk_layernorm": False,
    "new_object": {},
    "property_of": "a word that contains another",
    "document_class": "note",
    "definition": 3,
    "license": "apache-2.0",
}
# Entries that transformers reads for some model, with values that change something there.
ENTRIES: list[tuple[str, Any]] = [
    # positions
    ("rope_interleaved", True),
    ("rope_ratio", 500),
    ("use_mrope", True),
    ("mrope_section", [1, 1]),
    ("rotary_pct", 0.25),
    ("rope_type", "linear"),
    ("rope_local_base_freq", 10.0),
    ("no_rope_layers", [0, 1]),
    ("no_rope_layer_interval", 2),
    ("alibi", True),
    ("use_dynamic_ntk", True),
    ("position_embedding_type", "relative_key"),
    ("partial_rotary_factor", 0.5),
    # the tokens that a token sees
    ("sliding_window", 3),
    ("sliding_window", 0),
    ("sliding_window", 2048),
    ("sliding_window_pattern", 2),
    ("global_attn_every_n_layers", 2),
    ("attention_chunk_size", 3),
    ("attention_chunk_size", 2048),
    ("attention_window", [3, 3]),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["chunked_attention", "chunked_attention"]),
    ("layer_types", ["linear_attention", "linear_attention"]),
    ("layer_types", ["full_attention"]),
    ("is_causal", False),
    ("is_decoder", True),
    ("is_decoder", False),
    ("use_bidirectional_attention", True),
    ("is_encoder_decoder", True),
    ("add_cross_attention", True),
    # scales and bounds
    ("attn_temperature_tuning", True),
    ("attn_logit_softcapping", 5.0),
    ("final_logit_softcapping", 3.0),
    ("logits_soft_cap", 3.0),
    ("logit_scale", 0.0625),
    ("logits_scaling", 8.0),
    ("embedding_multiplier", 12),
    ("residual_multiplier", 0.22),
    ("attention_multiplier", 0.1),
    ("scale_emb", 12),
    ("mup_width_multiplier", 2.0),
    ("logits_mup_width_multiplier", 2.0),
    ("query_pre_attn_scalar", 256),
    ("clip_qkv", 0.1),
    ("use_logn_attn", True),
    ("scale_attn_by_inverse_layer_idx", True),
    ("rms_norm_eps", 1.0),
    ("layer_norm_eps", 1.0),
    # weights and layers
    ("use_qk_norm", True),
    ("qk_layernorm", True),
    ("norm_type", "layer_norm"),
    ("hidden_act", "relu"),
    ("hidden_activation", "relu"),
    ("bias", True),
    ("qkv_bias", True),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("use_parallel_residual", True),
    ("num_local_experts", 8),
    ("num_experts_per_tok", 2),
    ("mlp_layer_types", ["dense", "sparse"]),
    ("first_k_dense_replace", 1),
    ("moe_intermediate_size", 8),
    ("kv_lora_rank", 8),
    ("head_dim", 8),
    ("num_kv_shared_layers", 1),
    ("kv_sharing_modes", ["none", "reuse"]),
    ("per_layer_config", {"0": {"rms_norm_eps": 1.0}}),
    ("num_nextn_predict_layers", 1),
    ("tie_word_embeddings", True),
    ("tie_encoder_decoder", True),
    ("text_config", {"hidden_size": 16}),
    ("decoder", {"hidden_size": 16}),
    ("vision_config", {"hidden_size": 16}),
    ("attribute_map", {"rms_norm_eps": "eps"}),
    # how the model is run
    ("use_cache", False),
    ("pretraining_tp", 2),
    ("chunk_size_feed_forward", 2),
    ("torch_dtype", "bfloat16"),
    ("dtype", "float32"),
    ("transformers_version", "4.51.3"),
    ("task_specific_params", {"text-generation": {"temperature": 0.1}}),
    ("_attn_implementation", "eager"),
    ("cache_implementation", "sliding_window"),
    ("attention_dropout", 0.5),
    ("initializer_range", 0.5),
    ("gradient_checkpointing", True),
    ("output_attentions", True),
    ("repetition_penalty", 5.0),
    ("pad_token_id", 3),
]
# Entries that this engine computes as transformers does, which other tests compare.
COMPUTED = {"hidden_act", "rms_norm_eps", "head_dim", "attention_bias", "mlp_bias", "layer_types"}
# Names that transformers reads of a configuration: those that this engine reads too, and those that
# do not change the logits of a loaded model: training, kernels, other tasks, tokens of callers.
SUPPORTED = """
    architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps rope_parameters max_position_embeddings
    attention_bias mlp_bias tie_word_embeddings eos_token_id max_window_layers use_sliding_window
"""
IDLE = """
    _attn_implementation attention_dropout initializer_range pad_token_id bos_token_id use_cache
    pretraining_tp get_text_config standardize_rope_params validate_rope number_of_conv_states
    transformers_version output_hidden_states return_dict dtype chunk_size_feed_forward
    id2label label2id problem_type
"""
OPEN_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if not loop.last %}<|end|>{% endif %}{% endfor %}"
)


def change(path: Path, **entries: Any) -> None:
    """Overwrite entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: entry for name, entry in value.items() if entry is not None}))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
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
        ({"attention_chunk_size": 512}, "attention_chunk_size = 512 is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5 is not supported"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"hidden_act": "gelu"}, "gelu is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
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
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal = False is not supported"),
    ],
)
def test_each_architecture_knows_its_own_entries(
    tmp_path: Path, architecture: str, entries: dict[str, Any], words: str
) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(architecture=architecture))
    change(tmp_path / "config.json", **entries)

    with pytest.raises(CheckpointInvalid, match=words):
        read_config(tmp_path)


@pytest.mark.parametrize("name", NOTES)
def test_notes_of_publishers_change_nothing(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    before = read_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: NOTES[name]}))

    assert read_config(tmp_path) == before


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_all_notes_together_change_nothing(architecture: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shape=LlamaShape(architecture=architecture))
    before = read_config(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(NOTES | config | {"rope_theta": 10000.0}))

    assert read_config(tmp_path) == before


def test_notes_beside_a_scaling_change_nothing(tmp_path: Path) -> None:
    """transformers reads what its kind of scaling has, and logs the rest."""
    make_checkpoint(tmp_path)
    scaling = {"rope_type": "linear", "factor": 2.0}
    change(tmp_path / "config.json", rope_scaling=scaling)
    before = read_config(tmp_path)
    notes = {"finetuned": True, "low_freq_factor": 1.0, "source": "paper", "beta_fast": None}
    change(tmp_path / "config.json", rope_scaling=scaling | notes)

    assert read_config(tmp_path) == before


COMPUTED |= {"sliding_window", "tie_word_embeddings"}


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_an_entry_that_changes_transformers_is_refused(architecture: str, tmp_path: Path) -> None:
    """An entry that transformers does not read, or reads without effect, is a note."""
    make_checkpoint(tmp_path, shape=LlamaShape(architecture=architecture))
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    expected = computed(architecture, raw)
    wrong = []

    for name, value in ENTRIES:
        path.write_text(json.dumps(raw | {name: value}))
        try:
            logits = computed(architecture, raw | {name: value})
            changes = not torch.allclose(logits, expected, atol=1e-4)
        except Exception:  # a model that transformers cannot compute
            changes = True
        try:
            is_accepted = bool(read_config(tmp_path))
        except CheckpointInvalid:
            is_accepted = False
        if is_accepted == changes and not (is_accepted and name in COMPUTED):
            wrong.append(f"{name} = {value} is {'accepted' if is_accepted else 'refused'}")

    # It is read with a scaling of positions, which this checkpoint does not have.
    assert wrong == ["partial_rotary_factor = 0.5 is refused"]


@pytest.mark.parametrize("name", families._READ_BY_ALL)
def test_an_entry_that_changes_the_result_is_refused_by_name(name: str, tmp_path: Path) -> None:
    value = dict(reversed(ENTRIES)).get(name, "other.safetensors")
    make_checkpoint(tmp_path)
    change(tmp_path / "config.json", **{name: value})

    with pytest.raises(CheckpointInvalid, match=re.escape(f"entry {name} = {value!r} is not")):
        read_config(tmp_path)


def computed(architecture: str, raw: dict[str, Any]) -> torch.Tensor:
    """Return the logits that transformers computes with this configuration."""
    import transformers

    model_class: Any = getattr(transformers, architecture)
    torch.manual_seed(7)
    model = model_class(model_class.config_class.from_dict(json.loads(json.dumps(raw))))
    seed = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=seed)
        parameter.data = 0.3 * drawn if drawn.ndim > 1 else 1 + 0.3 * drawn
    ids = torch.arange(7, 23)[None]
    with torch.inference_mode():
        whole = model.eval()(ids, return_dict=True).logits
        made = model.generate(
            ids,
            max_new_tokens=3,
            do_sample=False,
            repetition_penalty=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.cat([whole[0], *made.logits])


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_entries_that_transformers_reads_are_known(architecture: str) -> None:
    """A new version of transformers may read more: each name is supported, refused or idle."""
    import transformers

    package = Path(transformers.__file__).parent
    kind = MODEL_TYPES[architecture]
    sources = [package / f"models/{kind}/modeling_{kind}.py"]
    sources += [package / f"{name}.py" for name in ("masking_utils", "cache_utils")]
    sources += [package / "modeling_rope_utils.py"]
    read = set().union(*map(names_read, sources))
    fields = {
        field.name for field in dataclasses.fields(getattr(transformers, architecture).config_class)
    }

    assert (read | fields) - families._READ_BY_ALL.keys() <= {*SUPPORTED.split(), *IDLE.split()}


def names_read(path: Path) -> set[str]:
    """Return the names that a Python file reads of objects named config."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[
                    ast.Name(id=owner) | ast.Attribute(attr=owner),
                    ast.Constant(value=str(name)),
                    *_,
                ],
            ):
                pass
            case _:
                continue
        if owner == "config":
            names.add(name)
    return names


def _demanding(fault: str) -> str:
    """Return a template that raises in this case, and ends each turn with `<|end|>`."""
    raised = f"{{% if {fault} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    return raised + OPEN_TEMPLATE.replace("{% if not loop.last %}", "{% if true %}")


END_SOURCES: dict[str, tuple[dict[str, Any], set[int]]] = {
    "only config.json": ({"config": 2}, {2}),
    "only generation_config.json": ({"generation": [2, 6]}, {2, 6}),
    "only the tokenizer": ({"tokenizer": "<|end|>"}, {6}),
    "only the tokenizer, as an object": ({"tokenizer": {"content": "<|end|>"}}, {6}),
    "only the older file of special tokens": ({"special_tokens_map": "<|end|>"}, {6}),
    "only the template": ({"template": "<|end|>"}, {6}),
    "only the template, by name": (
        {"template": "{{ eos_token }}", "special_tokens_map": "<|end|>"},
        {6},
    ),
    "null, and the tokenizer": ({"config": None, "generation": None, "tokenizer": "<|eos|>"}, {2}),
    "configurations that differ": ({"config": [2, 6], "generation": 2}, {2, 6}),
    "an empty list beside others": ({"config": [], "generation": 6}, {6}),
    "all four differ": (
        {"config": 2, "generation": 6, "tokenizer": "<|pad|>", "template": "<|user|>"},
        {0, 2, 4, 6},
    ),
    "a template with blanks before its end": ({"config": 2, "template": " \n<|end|>\n"}, {2, 6}),
    "a template whose end is text": ({"config": 2, "template": "</s>"}, {2}),
    "none, as converters write it": ({"config": -1, "generation": [6, None]}, {6}),
    "a template that leaves the last answer open": (
        {"config": 2, "whole template": OPEN_TEMPLATE},
        {2, 6},
    ),
    "a template that needs a system message": (
        {"config": 2, "whole template": _demanding("messages[0].role != 'system'")},
        {2, 6},
    ),
    "a template that needs a question at the end": (
        {"config": 2, "whole template": _demanding("messages[-1].role != 'user'")},
        {2, 6},
    ),
    "a template that needs both": (
        {
            "config": 2,
            "whole template": _demanding(
                "messages[0].role != 'system' or messages[-1].role != 'user'"
            ),
        },
        {2, 6},
    ),
    "a template where the next turn ends the last": (
        {"config": 2, "whole template": OPEN_TEMPLATE.replace("<|end|>", "\n")},
        {2, 4},
    ),
}


def write_ends(directory: Path, sources: dict[str, Any]) -> None:
    """Write a checkpoint whose end tokens stand in these places only."""
    make_checkpoint(directory)
    change(directory / "config.json", eos_token_id=None)
    for name, value in sources.items():
        if name == "template":
            template = (
                "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + value + "{% endfor %}"
            )
            (directory / "chat_template.jinja").write_text(template)
        elif name == "whole template":
            (directory / "chat_template.jinja").write_text(value)
        elif name in ("config", "generation"):
            path = directory / ("config.json" if name == "config" else "generation_config.json")
            raw = json.loads(path.read_text()) if name == "config" else {}
            path.write_text(json.dumps(raw | {"eos_token_id": value}))
        else:
            stem = "tokenizer_config" if name == "tokenizer" else name
            path = directory / f"{stem}.json"
            raw = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(raw | {"eos_token": value}))
    if "generation" not in sources:
        (directory / "generation_config.json").unlink()
    if "tokenizer" not in sources:
        change(directory / "tokenizer_config.json", eos_token=None)
    if not {"template", "whole template"} & sources.keys():
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.mark.parametrize("name", END_SOURCES)
def test_end_tokens_are_those_of_all_files(name: str, tmp_path: Path) -> None:
    sources, ends = END_SOURCES[name]
    write_ends(tmp_path, sources)
    core = make_core(tmp_path)

    for token_id in range(7):
        request = make_request([10, 11], 4, ignore_eos=False)
        forced = replace(request, sampling=SamplingParams(logit_bias=((token_id, 1e9),)))
        [outcome] = run_all(core, [forced], token_id)

        assert len(outcome.token_ids) == (1 if token_id in ends else 4), token_id
        assert outcome.finished is not None
        assert outcome.finished.reason == ("stop" if token_id in ends else "length")


@pytest.mark.parametrize(
    ("tokens", "end", "ends"),
    [
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>", {"<|im_end|>"}),
        (["  ", "\n\n"], "\n\n", set()),  # runs of blanks, not marks
        (CHANNEL_TOKENS, "<|return|>", {"<|return|>"}),
        (CHANNEL_TOKENS, "<|end|>", set()),  # a thought ends with it, too
    ],
)
def test_a_mark_that_no_file_flags_ends_answers_unless_it_ends_a_part_of_them(
    tokens: Sequence[str], end: str, ends: set[str], tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m.role + m.content + END }}{% endfor %}"
    make_checkpoint(tmp_path, chat_template=template.replace("END", repr(end)))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(
        [tokenizers.AddedToken(each, special=False, normalized=False) for each in tokens]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path / "tokenizer_config.json", eos_token=None)

    found = Tokenizer(tmp_path)

    assert {found.backend.id_to_token(each) for each in found.end_token_ids} == ends


def test_a_model_without_any_end_token_is_refused(tmp_path: Path) -> None:
    write_ends(tmp_path, {})

    with pytest.raises(CheckpointInvalid, match=r"generation_config\.json: no end token"):
        make_core(tmp_path)


def test_a_fine_tune_whose_end_stands_in_the_tokenizer_only_ends(tmp_path: Path) -> None:
    make_scripted_checkpoint(tmp_path, ["Hi", "<|im_end|>", "Run", "away", "!!"])
    change(tmp_path / "config.json", eos_token_id=2)
    (tmp_path / "generation_config.json").unlink()
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] |= token["content"] == "<|im_end|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    template = CHAT_TEMPLATE.replace("<|end|>", "<|im_end|>")
    change(tmp_path / "tokenizer_config.json", eos_token="<|im_end|>", chat_template=template)
    prompt = Tokenizer(tmp_path).encode_chat([ChatMessage("user", "Hello")])

    [outcome] = run_all(make_core(tmp_path), [make_request(prompt, 50, ignore_eos=False)])

    assert (outcome.text, len(outcome.token_ids)) == ("Hi", 2)
    assert outcome.finished is not None
    assert outcome.finished.reason == "stop"


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
        assert ours.context_window_tokens == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
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


@pytest.mark.parametrize(
    ("entries", "sampling"),
    [
        ({"top_p": 0}, SamplingParams()),
        ({"top_p": 0.0, "temperature": 0.7}, SamplingParams()),
        ({"temperature": 0}, SamplingParams()),
        ({"top_k": -1}, SamplingParams(temperature=1.0)),
        ({"top_k": 0, "min_p": 0, "top_p": 1}, SamplingParams(temperature=1.0)),
        (
            {"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None},
            SamplingParams(temperature=1.0),
        ),
    ],
)
def test_neutral_and_extreme_defaults_mean_what_they_mean_in_requests(
    entries: dict[str, Any], sampling: SamplingParams, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, generation_config={"do_sample": True} | entries)

    assert read_model_info(tmp_path, name="demo", engine="torch").default_sampling == sampling


def test_model_info_reports_window_and_default_sampling(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        generation_config={"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40},
    )

    info = read_model_info(tmp_path, name="demo", engine="torch", context_window_tokens_max=512)

    assert info.default_sampling == SamplingParams(temperature=0.7, top_p=0.9, top_k=40)
    assert info.context_window_tokens == 512
    assert info.vocabulary_size == 400
    assert info.architecture == "LlamaForCausalLM"
    assert read_config(tmp_path).end_token_ids == {2, 6}


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
