"""`GET /v1/models` and `GET /v1/models/{model}`: what `ListModels` tells, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.openai.refusals import HttpFault

OWNER = "weir"


def model_list(models: list[pb.Model], started_at: int) -> dict[str, Any]:
    """All models. started_at: of this process, in seconds since 1970, for models without a price."""
    return {"object": "list", "data": [model_object(model, started_at) for model in models]}


def one_model(models: list[pb.Model], name: str, started_at: int) -> dict[str, Any]:
    """The model of a name. Raises: HttpFault."""
    for model in models:
        if model.name == name:
            return model_object(model, started_at)
    raise HttpFault(
        404, f"the model {name[:200]!r} does not exist; GET /v1/models tells which there are", "model_not_found", param="model"
    )


def model_object(model: pb.Model, started_at: int) -> dict[str, Any]:
    """One model. It counts as created when its present price came into force."""
    facts: dict[str, Any] = {"context_window_tokens": model.context_window_tokens, "engine": model.engine}
    created = started_at
    if model.HasField("price"):
        price = model.price
        created = price.effective_time.seconds
        facts["price"] = {
            "version": price.version,
            "currency_code": price.currency_code,
            "input_picos_per_token": price.input_picos_per_token,
            "cached_input_picos_per_token": price.cached_input_picos_per_token,
            "output_picos_per_token": price.output_picos_per_token,
        }
    return {"id": model.name, "object": "model", "created": created, "owned_by": OWNER, "weir": facts}
