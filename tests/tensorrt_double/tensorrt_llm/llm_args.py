"""Stand-in for the used part of `tensorrt_llm.llmapi.llm_args`."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class DecodingBaseConfig:
    """Speculative decoding."""

    decoding_type: str
    values: dict[str, Any]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DecodingBaseConfig:
        """Raises: ValueError for an unknown type."""
        values = dict(data)
        if (kind := values.pop("decoding_type", None)) not in ("MTP", "Eagle", "NGram"):
            raise ValueError(f"Invalid decoding type: {kind}")
        return cls(kind, values)


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any],
    llm_args_dict: dict[str, Any],
    extra_llm_api_options: str | None = None,
) -> dict[str, Any]:
    """Merge the content of a file of `trtllm-serve` over arguments of `LLM`."""
    merged = dict(llm_args_dict)
    if "speculative_config" in merged:
        merged["speculative_config"] = DecodingBaseConfig.from_dict(merged["speculative_config"])
    return llm_args | merged
