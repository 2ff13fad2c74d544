"""Double of the configuration of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoraConfig:
    """Adapters of an engine. `lora_dir` names modules only if it has a single entry."""

    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj: bool = True
