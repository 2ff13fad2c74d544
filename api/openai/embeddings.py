"""OpenAI's embeddings: parameters of a request, and its answer."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.openai.answers import cost_facts
from api.openai.parameters import Int32, Prompt, prompts_of
from api.openai.refusals import wrong_parameter

NAMES: Mapping[str, str] = {"inputs": "input", "labels": "user", "labels['user']": "user"}

INPUT_COUNT_MAX = 2048  # OpenAI's own; the model may take fewer


class EmbeddingParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """What `client.embeddings.create` may send."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    user: str | None = None


def embed_request(given: EmbeddingParameters, request_id: str) -> pb.EmbedRequest:
    """What a body asks for. Raises: InvalidRequest."""
    if not given.model:
        raise wrong_parameter("model", "must name a model; GET /v1/models tells which there are")
    request = pb.EmbedRequest(request_id=request_id, model=given.model, labels={"user": given.user} if given.user else None)
    for each in prompts_of(given.input, "input", INPUT_COUNT_MAX):
        if isinstance(each, str):
            request.inputs.add(text=each)
        else:
            request.inputs.add(token_ids=pb.TokenIds(ids=each))
    return request


def check_dimensions(given: EmbeddingParameters, dimension: int) -> None:
    """Vectors have the length that the model gives them. Raises: InvalidRequest for any other."""
    if given.dimensions not in (None, dimension):
        raise wrong_parameter("dimensions", f"must be {dimension}, which is what this model gives, or left out")


def embedding_list(given: EmbeddingParameters, response: pb.EmbedResponse, request_id: str) -> dict[str, Any]:
    in_base64 = given.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": packed(each) if in_base64 else list(each.vector)}
        for index, each in enumerate(response.embeddings)
    ]
    count = response.usage.embedding_token_count
    return {
        "object": "list",
        "data": data,
        "model": given.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "weir": {"cost": cost_facts(response.cost), "price_version": response.price_version, "request_ids": [request_id]},
    }


def packed(embedding: pb.Embedding) -> str:
    """A vector as base64 of its 32-bit floats, the lowest byte first."""
    return base64.b64encode(array("f", embedding.vector).tobytes()).decode()
