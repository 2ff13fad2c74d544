"""Sequence-classification checkpoints for tests, written here and loaded by `transformers`.

One has hand-made weights and detects bad words; the others are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

BAD_WORDS = ("bomb", "poison")
WORDS = (
    *BAD_WORDS,
    "the",
    "a",
    "how",
    "to",
    "make",
    "garden",
    "hotel",
    "is",
    "near",
    "sea",
    "and",
    "with",
    "breakfast",
)
LABELS = {0: "harmless", 1: "dangerous"}
ARCHITECTURES = ("Bert", "DistilBert", "Roberta", "DebertaV2", "Llama")


def write_word_tokenizer(directory: Path) -> int:
    """Write a tokenizer of words, with special tokens. Returns the vocabulary size."""
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    new_tokenizer: Any = PreTrainedTokenizerFast  # untyped
    fast = new_tokenizer(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )
    fast.save_pretrained(str(directory))
    return len(vocabulary)


def new_model(architecture: str, vocabulary_size: int, **entries: Any) -> Any:
    """Return a random model of one thin layer."""
    import torch
    import transformers

    torch.manual_seed(5)
    sizes: dict[str, Any] = {"vocab_size": vocabulary_size, "pad_token_id": 0, "id2label": LABELS}
    sizes |= {"label2id": {label: index for index, label in LABELS.items()}}
    if architecture == "DistilBert":
        sizes |= {
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 1,
            "n_heads": 2,
            "max_position_embeddings": 64,
        }
    else:
        sizes |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        sizes["max_position_embeddings"] = 65 if architecture == "Roberta" else 64
    config = getattr(transformers, f"{architecture}Config")(**(sizes | entries))
    return getattr(transformers, f"{architecture}ForSequenceClassification")(config)


def make_random_classifier(directory: Path, architecture: str, **entries: Any) -> Path:
    """Write a checkpoint with meaningless scores. entries: of its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    new_model(architecture, write_word_tokenizer(directory), **entries).save_pretrained(
        str(directory)
    )
    return directory


def make_danger_classifier(directory: Path) -> Path:
    """Write a BERT that labels texts with one of `BAD_WORDS` as "dangerous"."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    model = new_model("Bert", write_word_tokenizer(directory))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        # A bad word has a direction, all other words have none. Attention averages over the text,
        # and the normalization after it maps small and large averages to the same value.
        layer, bad = model.bert.encoder.layer[0], range(4, 4 + len(BAD_WORDS))
        for token_id in bad:
            model.bert.embeddings.word_embeddings.weight[token_id, :2] = torch.tensor([5.0, -5.0])
        for linear in (
            layer.attention.self.value,
            layer.attention.output.dense,
            model.bert.pooler.dense,
        ):
            linear.weight.copy_(torch.eye(linear.weight.shape[0]))
        model.classifier.weight[:, 0] = torch.tensor([-10.0, 10.0])
        model.classifier.bias.copy_(torch.tensor([5.0, -5.0]))
    model.save_pretrained(str(directory))
    return directory


def edit_config(directory: Path, **entries: object) -> None:
    """Change entries of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
