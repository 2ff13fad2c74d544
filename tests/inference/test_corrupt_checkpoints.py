"""Damaged, incomplete or hostile checkpoints are refused with file and defect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from inference.checkpoint.checkpoint import read_model_info
from inference.engine import SamplingParams
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.template_sandbox import NUMBER_MAX, Budget, TemplateTooCostly
from inference.text.tokenizer import ChatMessage, Tokenizer
from tests.inference.checkpoints import LlamaShape, make_checkpoint, write_tokenizer
from tests.inference.damage import (
    MATRIX,
    Spoil,
    added,
    config,
    generation,
    header,
    put,
    tear,
    tensors,
    tokenizer_config,
    write,
)
from tests.inference.running import make_core, make_request, run_all

SHARD = "model-00002-of-00003.safetensors"

HOSTILE = {
    "loop without end": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "loop in a macro": (
        "{% macro f() %}{% for a in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}"
    ),
    "macros that branch": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "loop that recurses": "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "large range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "repeated text": "{{ 'x' * 10 ** 10 }}",
    "repeated list": "{{ 10 ** 10 * [1] }}",
    "doubled text": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{%"
        " endfor %}"
    ),
    "joined text": (
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{%"
        " endfor %}"
    ),
    "power": "{{ 9 ** 9 ** 9 }}",
    "power of a power": "{{ (9 ** 60) ** 60 }}",
    "width": "{{ '%9999999999d' % 3 }}",
    "width from elsewhere": "{{ '%*d' % (9999999999, 3) }}",
    "width in a filter": "{{ '%9999999999d' | format(3) }}",
    "width in a method": "{{ '{:9999999999}'.format(3) }}",
    "padding": "{{ 'x'.ljust(10 ** 10) }}",
    "padding by a filter": "{{ 'x' | center(10 ** 10) }}",
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__['os'] }}",
    "base classes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals of another function": "{{ strftime_now.__globals__['json'] }}",
    "globals by a filter": "{{ (raise_exception | attr('__globals__'))['os'] }}",
    "format's attributes": (
        "{{ ('{0.__globals__}'.format(raise_exception)) | length > 0 or raise_exception('held') }}"
    ),
    "changes": "{{ messages.append(1) }}",
    "files": "{% include 'config.json' %}",
    "text from nowhere": "{{ lipsum(n=1000000) }}",
}
WEIGHTS: dict[str, tuple[Spoil, str]] = {
    "torn tail": (
        tear("model.safetensors", -64),
        "model.safetensors: not a safetensors file, or truncated",
    ),
    "torn header": (
        tear("model.safetensors", 100),
        "model.safetensors: not a safetensors file, or truncated",
    ),
    "empty": (
        tear("model.safetensors", 0),
        "model.safetensors: not a safetensors file, or truncated",
    ),
    "absent": (
        lambda directory: (directory / "model.safetensors").unlink(),
        "neither model.safetensors nor",
    ),
    "pickled": (
        lambda directory: (directory / "model.safetensors").rename(directory / "pytorch_model.bin"),
        "pickle files are not loaded: convert them",
    ),
    "pointer": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "git lfs pull",
    ),
    "wrong shape": (
        tensors(lambda found: found.update({MATRIX: found[MATRIX][:, :-1].copy()})),
        rf"{MATRIX} has shape \(64, 159\), config.json says \(64, 160\)",
    ),
    "missing tensor": (tensors(lambda found: found.pop(MATRIX)), f"tensor {MATRIX} is missing"),
    "tensor too many": (
        tensors(lambda found: found.update({"model.layers.7.x": found[MATRIX]})),
        "model.layers.7.x has no place",
    ),
    "NaN in a matrix": (put(MATRIX, np.nan), f"tensor {MATRIX} holds values that are not finite"),
    "NaN in one row of the embedding": (
        put("model.embed_tokens.weight", np.nan),
        "embed_tokens.weight holds values that are not",
    ),
    "NaN in what is stacked": (
        put("model.layers.0.self_attn.k_proj.weight", np.nan),
        "k_proj.weight holds values that are not",
    ),
    "infinity": (
        put("model.norm.weight", np.inf),
        "tensor model.norm.weight holds values that are not finite",
    ),
    "integers": (
        tensors(lambda found: found.update({MATRIX: found[MATRIX].astype(np.int8)})),
        f"tensor {MATRIX} has type I8",
    ),
    "unknown type": (header(dtype="F4"), "not a safetensors file"),
    "overlap": (header(data_offsets=[0, 64 * 160 * 4]), "not a safetensors file"),
}
SHARDS: dict[str, tuple[Spoil, str]] = {
    "torn": (tear(SHARD, -64), f"{SHARD}: not a safetensors file, or truncated"),
    "absent": (
        lambda directory: (directory / SHARD).unlink(),
        f"{SHARD}: the weights file is missing",
    ),
    "lacks a tensor": (
        tensors(lambda found: found.pop(next(iter(found))), SHARD),
        f"{SHARD}: tensor .* is missing",
    ),
    "index without a map": (
        write("model.safetensors.index.json", "{}"),
        "index.json: entry weight_map is missing",
    ),
    "index that is no JSON": (
        write("model.safetensors.index.json", "{"),
        "index.json: the file cannot be read as JSON",
    ),
}
CONFIGURATIONS: dict[str, tuple[Spoil, str]] = {
    **{
        f"{name} = {value}": (
            config(**{name: value}),
            f"config.json: entry {name} = {value} is not a count of at least 1",
        )
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        for value in (0, -1)
    },
    "no number": (config(vocab_size="many"), "config.json: an entry has a wrong type"),
    "unknown architecture": (
        config(architectures=["GemmaForCausalLM"]),
        "architecture GemmaForCausalLM is not supported; supported",
    ),
    "unknown architecture, not in a list": (
        config(architectures="GemmaForCausalLM"),
        "architecture GemmaForCausalLM is not supported",
    ),
    "architecture of lists": (
        config(architectures=[["x"]]),
        r"architecture \['x'\] is not supported",
    ),
    "no architecture": (config(architectures=[]), r"architecture \(none\) is not supported"),
    "quantized": (
        config(quantization_config={"quant_method": "awq"}),
        "quantized checkpoints are not supported",
    ),
    "quantized by another name": (
        config(quantization={"bits": 4, "group_size": 64}),
        "quantized checkpoints are not supported",
    ),
    "compressed": (
        config(compression_config={"format": "dense"}),
        "quantized checkpoints are not supported",
    ),
    "rotation that stands still": (config(rope_theta=-1.0), "rope_theta = -1.0 and the factor"),
    "scaling by nothing": (
        config(rope_scaling={"type": "linear", "factor": 0}),
        "factor of a RoPE scaling must be above 0",
    ),
    "scaling that is a word": (
        config(rope_scaling="linear"),
        "entry rope_scaling = 'linear' is not an object",
    ),
    "end token outside": (
        generation(eos_token_id=100_000),
        r"eos_token_id \[2, 6, 100000\] is not within vocab_size 400",
    ),
    "end token as a word": (generation(eos_token_id="</s>"), "an entry has a wrong type"),
    "temperature as a word": (
        generation(do_sample=True, temperature="hot"),
        "generation_config.json: an entry has a wrong type",
    ),
    "negative temperature": (
        generation(do_sample=True, temperature=-1),
        "generation_config.json: temperature must be at least 0",
    ),
    "more than certain": (
        generation(do_sample=True, top_p=7),
        "generation_config.json: .*top_p above 0 and at most 1",
    ),
    "no object": (write("config.json", "[]"), "config.json: the file does not hold a JSON object"),
    "no text": (write("config.json", b"\xff\xfe"), "config.json: the file cannot be read as JSON"),
}
TOKENIZERS: dict[str, tuple[Spoil, str]] = {
    "no JSON": (write("tokenizer.json", "{"), "tokenizer.json: not a tokenizer"),
    "empty": (write("tokenizer.json", "{}"), "tokenizer.json: not a tokenizer"),
    "absent": (
        lambda directory: (directory / "tokenizer.json").unlink(),
        "tokenizer.json: the file is missing",
    ),
    "configuration that is no JSON": (
        write("tokenizer_config.json", "{"),
        "tokenizer_config.json: the file cannot be read as JSON",
    ),
    "template that does not parse": (
        tokenizer_config(chat_template="{% for %}"),
        "the chat template does not parse",
    ),
    "template that is a number": (
        tokenizer_config(chat_template=7),
        "chat_template is neither a template nor templates by name",
    ),
    "template without a name": (
        tokenizer_config(chat_template=[{"x": 1}]),
        "chat_template is neither",
    ),
    "templates that are texts": (tokenizer_config(chat_template=["x"]), "chat_template is neither"),
    "template that is no text": (
        write("chat_template.jinja", b"\xff"),
        "chat_template.jinja: the chat template cannot be read",
    ),
    "end token that the tokenizer lacks": (
        tokenizer_config(eos_token="<|im_end|>"),
        r"tokenizer.json: token '<\|im_end\|>', which tokenizer_config.json names \(eos_token\)",
    ),
    "token that the template writes by name and the tokenizer lacks": (
        tokenizer_config(bos_token="<s>", chat_template="{{ bos_token }}{{ messages[0].content }}"),
        r"token '<s>', which tokenizer_config.json names \(bos_token\), is missing",
    ),
    "token that the template writes and only tokenizer_config.json adds": (
        tokenizer_config(
            added_tokens_decoder={"400": {"content": "<|new|>", "special": True}},
            chat_template="<|new|>{{ messages[0].content }}",
        ),
        r"token '<\|new\|>', which tokenizer_config.json names \(added_tokens_decoder\)",
    ),
    "added tokens that are not objects": (
        tokenizer_config(added_tokens_decoder={"400": "<|new|>"}),
        "tokenizer_config.json: an entry has a wrong type",
    ),
    "vocabulary larger than the model's": (
        config(vocab_size=399),
        "tokenizer.json: token .* has the id 399, which is not within vocab_size 399",
    ),
    "marker of the template beyond the embeddings": (
        added("<|new|>", chat_template="<|new|>{{ messages[0].content }}"),
        r"token '<\|new\|>' has the id 400, which is not within vocab_size 400",
    ),
    "end token beyond the embeddings": (
        added("<|new|>", eos_token="<|new|>"),
        r"token '<\|new\|>' has the id 400, which is not within vocab_size 400",
    ),
    "begin token beyond the embeddings": (
        added("<|new|>", begins=True),
        r"token '<\|new\|>' has the id 400, which is not within vocab_size 400",
    ),
    "special token without content": (
        tokenizer_config(bos_token={"x": 1}),
        "bos_token = {'x': 1} has no content",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one file."""
    return make_checkpoint(tmp_path_factory.mktemp("whole"), shape=LlamaShape()).directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three shards."""
    return make_checkpoint(
        tmp_path_factory.mktemp("sharded"), shape=LlamaShape(), shard_count=3
    ).directory


def load(directory: Path) -> None:
    """Run all steps of `weir serve` on a checkpoint, in parent and worker."""
    info = read_model_info(directory, name="m", engine="torch")
    Tokenizer(directory)
    make_core(directory, context_window_tokens=min(info.context_window_tokens, 512))


@pytest.mark.parametrize(
    ("spoil", "words"),
    (WEIGHTS | CONFIGURATIONS | TOKENIZERS).values(),
    ids=WEIGHTS | CONFIGURATIONS | TOKENIZERS,
)
def test_bad_checkpoints_are_refused(spoil: Spoil, words: str, whole: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(whole, tmp_path / "checkpoint")
    spoil(directory)

    with pytest.raises(CheckpointInvalid, match=words) as refusal:
        load(directory)

    assert refusal.value.path.startswith(str(directory))


@pytest.mark.parametrize(("spoil", "words"), SHARDS.values(), ids=SHARDS)
def test_bad_shards_are_named(spoil: Spoil, words: str, sharded: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(sharded, tmp_path / "checkpoint")
    spoil(directory)

    with pytest.raises(CheckpointInvalid, match=words):
        load(directory)


def test_an_unused_special_token_beyond_the_model_is_accepted(whole: Path, tmp_path: Path) -> None:
    """Like the image tokens of models for text; a prompt that spells one is refused."""
    directory = shutil.copytree(whole, tmp_path / "checkpoint")
    added("<|image|>")(directory)
    core = make_core(directory)

    ids = Tokenizer(directory).encode("see <|image|>")

    assert ids[-1] == 400
    assert core.request_fault(make_request(ids)) == "token ids must be from 0 to 399"


def test_rows_of_embeddings_without_a_token_are_accepted(tmp_path: Path) -> None:
    """Vocabularies are padded to round sizes."""
    make_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    del raw["model"]["merges"][-1]
    raw["model"]["vocab"] = {
        token: id_ for token, id_ in raw["model"]["vocab"].items() if id_ < 399
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    bias = SamplingParams(logit_bias=((399, 1e9),))

    [outcome] = run_all(make_core(tmp_path), [make_request([10], 2, sampling=bias)])

    assert (outcome.token_ids, outcome.text) == ([399, 399], "")


def test_a_checkpoint_with_another_spelling_is_served(whole: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(whole, tmp_path / "checkpoint")
    config(architectures="LlamaForCausalLM")(directory)

    load(directory)


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_ends_soon_and_gets_nothing(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.text.template_sandbox.RENDER_S_MAX", 0.05)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)

    with pytest.raises(ChatTemplateFailed):
        Tokenizer(tmp_path).render_chat([ChatMessage("user", "?")])


def test_constructs_of_real_templates_are_allowed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    template = (
        "{% macro turn(m) %}{{ '%s: %5d' % (m.role, 3) }}{{ '-' * 3 ~ m.content ~ '!' }}{% endmacro"
        " %}{% for m in messages %}{{ turn(m) + ' ' }}{{ 2 ** 10 }}{{ 'a'.ljust(3) }}{{ 'b' |"
        " center(3) }}{{ 7 % 4 }}{% endfor %}{% for x in [1, [2]] recursive %}{{ loop(x) if x is"
        " iterable else x }}{% else %}none{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)

    assert (
        Tokenizer(tmp_path).render_chat([ChatMessage("user", "Hi")])
        == "user:     3---Hi! 1024a   b 312"
    )


def test_the_clock_decides() -> None:
    now_s = [0.0]
    budget = Budget(lambda: now_s[0])
    budget.read_clock()

    now_s[0] = 1.01

    with pytest.raises(TemplateTooCostly, match="not ended after 1 s"):
        budget.read_clock()
    assert NUMBER_MAX == 100_000, "as large as the sandbox's own ranges"
