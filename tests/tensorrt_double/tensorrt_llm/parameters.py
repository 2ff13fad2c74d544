"""Parameter types of the published interface; unknown names are refused."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "api.json").read_text())

CHECKED = {"__post_init__": lambda self: self.check()}


class CapacitySchedulerPolicy(enum.StrEnum):
    """Policy that selects the requests of a step."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


def published_fields(name: str) -> list[tuple[str, Any, Any]]:
    """Fields of a published class for `make_dataclass`, all by keyword."""
    fields = []
    for field, spec in PUBLISHED["classes"][name]["fields"].items():
        default = spec["default"]
        if spec["required"]:
            value = dataclasses.field(kw_only=True)
        elif default is not None and default.startswith("factory:"):
            value = dataclasses.field(default_factory=list, kw_only=True)
        else:
            names = {"CapacitySchedulerPolicy": CapacitySchedulerPolicy}
            value = dataclasses.field(default=eval(default, names), kw_only=True, init=spec["init"])
        fields.append((field, Any, value))
    return fields


_Sampling: Any = dataclasses.make_dataclass(
    "_Sampling", published_fields("SamplingParams"), namespace=dict(CHECKED)
)


class SamplingParams(_Sampling):  # type: ignore[misc]
    """Refuses the same values as the release, and is changed by `generate_async`."""

    best_of: Any
    pad_id: Any
    logprobs: Any

    def check(self) -> None:
        """Raises: ValueError."""
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError("require 0 <= top_p <= 1")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError("require top_k >= 0")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError("require temperature >= 0")
        self.best_of = self.best_of or self.n
        if self.best_of < self.n:
            raise ValueError("best_of cannot be less than n")
        if self.is_greedy and self.best_of > 1 and not self.use_beam_search:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError("truncate_prompt_tokens must be >= 1")
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.logprobs = int(self.logprobs) if self.logprobs else self.logprobs

    @property
    def is_greedy(self) -> bool:
        """True if temperature, top_p and top_k are unset, or one of them leaves no choice."""
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.temperature == 0 or self.top_k == 1


_Guides: Any = dataclasses.make_dataclass(
    "_Guides", published_fields("GuidedDecodingParams"), namespace=dict(CHECKED)
)


class GuidedDecodingParams(_Guides):  # type: ignore[misc]
    """At most one guide."""

    def check(self) -> None:
        """Raises: ValueError."""
        if (
            sum(
                map(
                    bool,
                    (self.json, self.regex, self.grammar, self.json_object, self.structural_tag),
                )
            )
            > 1
        ):
            raise ValueError("Only one guide can be used")


KvCacheConfig: Any = dataclasses.make_dataclass("KvCacheConfig", published_fields("KvCacheConfig"))
SchedulerConfig: Any = dataclasses.make_dataclass(
    "SchedulerConfig", published_fields("SchedulerConfig")
)


@dataclasses.dataclass
class LoRARequest:
    """Adapter on disk; the path must exist."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(
                f"lora_ckpt_source must be 'hf' or 'nemo', got {self.lora_ckpt_source}"
            )
        if not Path(self.lora_path).exists() or not self.lora_path:
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
