"""LoRA adapters and the doctor's reports about them, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inference.adapters.tensorrt_adapters import EFFECTIVE, QUESTION
from inference.adapters.tensorrt_settings import VERSION


def write_adapter(directory: Path, **entries: Any) -> Path:
    """Write an adapter as far as the double reads it."""
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | entries))
    (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory


def write_report(path: Path, seen: str | None = EFFECTIVE, version: str = VERSION) -> Path:
    """Write a report. seen: the answer about adapters; None: not asked."""
    requested = [{"question": QUESTION, "verdict": "expected", "seen": seen}]
    report = {
        "facts": {"tensorrt_llm_version": version},
        "observations": [] if seen is None else requested,
    }
    path.write_text(json.dumps(report))
    return path
