"""Embeddings over HTTP: parameters, conversion to an `EmbedRequest`, and the response."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.core.wire import picos_of
from api.openai.answers import cost_facts
from api.openai.error_responses import invalid_parameter
from api.openai.parameters import MODEL_REQUIRED, Int32, Prompt, prompts_of
from inference.engine import ModelInfo

ENCODINGS = ("float", "base64")
CUTS = ("END", "end")
WHOLE_WINDOW = -1  # as the number of tokens that a text is cut to
UNIT_TOLERANCE = 1e-3  # of the length of a normalized vector
INPUT_COUNT_MAX = 2048  # OpenAI's own limit; the model may take fewer


class EmbeddingParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `client.embeddings.create`, and some of other servers.

    `normalize` is that of TEI, Jina and vLLM. `truncate` (TEI, Cohere) and `truncate_prompt_tokens`
    (vLLM) cut off the end of a text that is too long.
    """

    api: ClassVar[str] = "embeddings"

    model: str
    input: Prompt
    encoding_format: str | None = None
    dimensions: Int32 | None = None
    user: str | None = None
    normalize: bool | None = None
    truncate: bool | str | None = None
    truncate_prompt_tokens: Int32 | None = None


def embed_request(requested: EmbeddingParameters, request_id: str) -> pb.EmbedRequest:
    """Convert the parameters to an `EmbedRequest`. Raises: InvalidRequest."""
    if not requested.model:
        raise invalid_parameter("model", MODEL_REQUIRED)
    if requested.encoding_format not in (None, *ENCODINGS):
        raise invalid_parameter("encoding_format", f"must be one of {', '.join(ENCODINGS)}")
    if requested.normalize is False:
        raise invalid_parameter(
            "normalize", "must be true or left out: vectors have the length that the model gives"
        )
    if requested.truncate not in (None, False, "NONE", True, *CUTS):
        raise invalid_parameter(
            "truncate", "must be true or END, which cuts the end of a text, or false or NONE"
        )
    is_cut = requested.truncate in (True, *CUTS) or requested.truncate_prompt_tokens is not None
    request = pb.EmbedRequest(
        request_id=request_id,
        model=requested.model,
        truncation=pb.TRUNCATION_END if is_cut else pb.TRUNCATION_NONE,
        end_user=requested.user or "",
    )
    for each in prompts_of(requested.input, "input", INPUT_COUNT_MAX):
        if isinstance(each, str):
            request.inputs.add(text=each)
        else:
            request.inputs.add(token_ids=pb.TokenIds(ids=each))
    return request


def embedding_names(requested: EmbeddingParameters) -> Mapping[str, str]:
    """Map the fields of the `EmbedRequest` to the parameters they came from, for error messages."""
    given = requested.input
    is_list = isinstance(given, list) and not any(isinstance(each, int) for each in given[:1])
    fields = ("inputs[]", "inputs[].text", "inputs[].token_ids", "inputs[].token_ids.ids")
    return dict.fromkeys(fields, "input[]" if is_list else "input") | {
        "inputs": "input",
        "truncation": "truncate",
        "end_user": "user",
    }


def check_model_sizes(requested: EmbeddingParameters, model: ModelInfo) -> None:
    """Raise InvalidRequest if the requested dimension or text length is not the model's."""
    dimension, window = model.embedding_dimension, model.context_window_tokens
    if requested.dimensions not in (None, dimension):
        raise invalid_parameter(
            "dimensions", f"must be {dimension}, the dimension of this model, or left out"
        )
    if requested.truncate_prompt_tokens not in (None, WHOLE_WINDOW, window):
        raise invalid_parameter(
            "truncate_prompt_tokens",
            f"must be {WHOLE_WINDOW} or {window}, the context window of this model, or left out",
        )


def embedding_list(
    requested: EmbeddingParameters, response: pb.EmbedResponse, request_id: str
) -> dict[str, Any]:
    is_base64 = requested.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": packed(vector) if is_base64 else list(vector),
        }
        for index, each in enumerate(response.embeddings)
        for vector in [normalized(each.vector) if requested.normalize else each.vector]
    ]
    count = response.usage.embedding_token_count
    return {
        "object": "list",
        "data": data,
        "model": requested.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "weir": {
            "cost": cost_facts(response.cost.currency_code, picos_of(response.cost)),
            "price_version": response.price_version,
            "request_ids": [request_id],
        },
    }


def packed(vector: Iterable[float]) -> str:
    """Encode a vector in base64, as little-endian 32-bit floats."""
    return base64.b64encode(array("f", vector).tobytes()).decode()


def normalized(vector: Sequence[float]) -> Sequence[float]:
    """Scale a vector to length 1. Returns it unchanged if it has that length already."""
    length = math.hypot(*vector)
    if length == 0 or abs(length - 1) < UNIT_TOLERANCE:
        return vector
    return array("f", (each / length for each in vector))
