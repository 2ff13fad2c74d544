"""List of models over HTTP, in the formats of OpenAI and Anthropic."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.openai.parameters import CHAT_NAMES
from inference.routing.router import VERSION_MARK
from metering.pricing.prices import COUNTS_OF_EVENT

OWNER = "weir"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """Name that clients can send as `model`.

    `target` is the model or version that an alias stands for, the model of a version, otherwise
    empty.
    """

    model: pb.Model
    name: str
    target: str
    context_window_tokens: int

    def created(self, started_at: int) -> int:
        """Return when the current price came into force, in seconds since 1970.

        A model without a price was created at `started_at`.
        """
        has_price = self.model.HasField("price")
        return self.model.price.effective_time.seconds if has_price else started_at

    def facts(self) -> dict[str, Any]:
        """Build the `weir` object: fields that the formats of OpenAI and Anthropic lack."""
        model = self.model
        facts: dict[str, Any] = {
            "context_window_tokens": self.context_window_tokens,
            "engine": model.engine,
            "refused_parameters": [
                {"parameter": CHAT_NAMES.get(each.field, each.field), "values": each.values}
                for each in model.refused_fields
            ],
        }
        if self.target:
            is_version = self.name.startswith(f"{model.name}{VERSION_MARK}")
            facts["version_of" if is_version else "alias_of"] = self.target
        if model.HasField("price"):
            facts["price"] = {
                "version": model.price.version,
                "currency_code": model.price.currency_code,
                **{name: getattr(model.price, name) for _, name in COUNTS_OF_EVENT.values()},
            }
        return facts


def model_object(listed: ListedModel, started_at: int) -> dict[str, Any]:
    """Describe a model in OpenAI's format, with vLLM's field for the context window."""
    return {
        "id": listed.name,
        "object": "model",
        "created": listed.created(started_at),
        "owned_by": OWNER,
        "max_model_len": listed.context_window_tokens,
        "weir": listed.facts(),
    }


def model_info(listed: ListedModel, started_at: int) -> dict[str, Any]:
    """Describe a model in the format of Anthropic's Models API."""
    created = datetime.fromtimestamp(listed.created(started_at), UTC)
    return {
        "type": "model",
        "id": listed.name,
        "display_name": listed.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": listed.context_window_tokens,
        "max_tokens": listed.context_window_tokens,
        "capabilities": None,
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
        "weir": listed.facts(),
    }
