"""LoRA adapters of a TensorRT-LLM engine: their files, and the doctor's report about their effect.

The library answers with the base model, without an error, where it does not apply an adapter.
Files that it would apply in part are refused here, by the entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.checkpoint.json_files import read_json
from inference.errors import CheckpointInvalid

# The doctor's question about adapters, and the answer that serving them needs.
QUESTION = "Do LoRA adapters change the output?"
EFFECTIVE = "yes"
REPORT_COMMAND = "weir doctor tensorrt --model DIR --lora DIR --json > FILE"
# The library's names of the matrices that it adapts in dense decoders; it skips others silently.
MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
}
ATTENTION = ("q_proj", "k_proj", "v_proj")  # the library adapts all of them, or none
# Entries of `adapter_config.json` that the library ignores, with the values that change nothing.
_IGNORED: Mapping[str, tuple[Any, ...]] = {
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "use_dora": (None, False),
}
_MERGE = "merge the adapter into its checkpoint, and serve that as a model"


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA adapter in PEFT's format. `modules` has the library's names, see `MODULES`."""

    name: str
    directory: str
    rank: int
    modules: frozenset[str]


def read_adapter(name: str, directory: Path) -> Adapter:
    """Read an adapter's configuration. Raises: CheckpointInvalid with the file and the remedy."""
    path = directory / "adapter_config.json"
    config = read_json(path)
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointInvalid(path, f"peft_type must be LORA, got {config['peft_type']!r}")
    for entry, harmless in _IGNORED.items():
        if config.get(entry) not in harmless:
            raise CheckpointInvalid(path, f"TensorRT-LLM ignores {entry}: {_MERGE}")
    rank, targets = config.get("r"), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise CheckpointInvalid(path, f"r must be a whole number of at least 1, got {rank!r}")
    if not targets or not isinstance(targets, list) or {*targets} - MODULES.keys():
        raise CheckpointInvalid(
            path,
            f"target_modules must be a list of {', '.join(MODULES)}, got {targets!r}: {_MERGE}",
        )
    if not any((directory / f"adapter_model.{kind}").exists() for kind in ("safetensors", "bin")):
        raise CheckpointInvalid(directory, "adapter_model.safetensors is missing")
    if {*targets} & {*ATTENTION}:
        targets += ATTENTION
    return Adapter(
        name, str(directory.resolve()), rank, frozenset(MODULES[each] for each in targets)
    )


def check_report(path: Path, version: str) -> None:
    """Check a doctor's report. Raises ValueError unless adapters take effect in this version."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        reported = report["facts"]["tensorrt_llm_version"]
        answers = {each["question"]: each["seen"] for each in report["observations"]}
    except OSError as error:
        raise ValueError(
            f"cannot be read ({error}): run `{REPORT_COMMAND}` on this machine"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"must be a report of TensorRT-LLM's doctor: run `{REPORT_COMMAND}` on this machine"
        ) from error
    if reported != version:
        raise ValueError(
            f"must be about TensorRT-LLM {version}, got {reported!r}: run `{REPORT_COMMAND}` again"
        )
    seen = answers.get(QUESTION, "not asked")
    if seen != EFFECTIVE:
        raise ValueError(
            f"must have the answer {EFFECTIVE!r} to {QUESTION!r}, got {seen!r}: run"
            f" `{REPORT_COMMAND}` with an adapter; if it has no effect, {_MERGE}"
        )
