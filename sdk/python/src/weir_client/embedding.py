"""Options and results of `embed`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypedDict

from weir.v1 import inference_service_pb2 as pb

from weir_client import wire
from weir_client.checks import check_known, check_model, check_seconds, invalid, written
from weir_client.generated_values import QuotaStatus, Timings, Usage
from weir_client.money import Money
from weir_client.plain import Value
from weir_client.prompt import service_tier
from weir_client.receipts import Receipt

EmbedInput = str | Sequence[int]


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `embed` and `quote_embed`, which describe them."""

    truncate: bool
    labels: Mapping[str, str] | None
    end_user: str | None
    tier: Literal["interactive", "batch"] | None
    request_id: str | None
    timeout: float | None
    max_retries: int | None


@dataclass(frozen=True, slots=True)
class Embedding(Value):
    """Vector of one text."""

    vector: tuple[float, ...]
    token_count: int  # embedded tokens of the text
    truncated: bool  # the end of the text was cut


@dataclass(frozen=True, slots=True)
class EmbedResult(Value):
    """Vectors of one request, in the order of its texts, with usage and cost."""

    _repr_first: ClassVar[tuple[str, ...]] = ("model", "embeddings", "cost")

    request_id: str
    model: str
    embeddings: tuple[Embedding, ...]
    usage: Usage
    cost: Money
    timings: Timings
    price_version: int
    quotas: tuple[QuotaStatus, ...]  # at its admission, this request included
    receipts: tuple[Receipt, ...] = ()

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        """The vectors alone, in the order of the texts."""
        return [each.vector for each in self.embeddings]


def build_embed(
    model: str,
    inputs: str | Sequence[EmbedInput],
    options: EmbedOptions,
    labels: Mapping[str, str],
) -> pb.EmbedRequest:
    """Build the request for one text or several, each a string or token ids.

    `labels` are those of the client and of the options. Raises: InvalidRequest.
    """
    check_known(options, EmbedOptions.__annotations__)
    check_model(model)
    check_seconds("timeout", options.get("timeout"))
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    fields = {
        "request_id": options.get("request_id") or str(uuid.uuid4()),
        "model": model,
        "inputs": [_input(index, each) for index, each in enumerate(texts)],
        "truncation": pb.TRUNCATION_END if options.get("truncate") else pb.TRUNCATION_NONE,
        "labels": labels,
        "tier": service_tier(options.get("tier")),
    }
    return written(pb.EmbedRequest, fields)


def _input(index: int, given: EmbedInput) -> pb.EmbedInput:
    if isinstance(given, str):
        return pb.EmbedInput(text=given)
    try:
        return pb.EmbedInput(token_ids=pb.TokenIds(ids=[int(token_id) for token_id in given]))
    except (TypeError, ValueError):
        raise invalid(
            f"inputs[{index}]", f"give a text or a list of token ids, not {str(given)[:80]!r}"
        ) from None


def embed_result(request: pb.EmbedRequest, message: pb.EmbedResponse) -> EmbedResult:
    """Convert the response to `request` to its result."""
    return EmbedResult(
        request_id=request.request_id,
        model=request.model,
        embeddings=tuple(
            Embedding(tuple(each.vector), each.token_count, each.truncated)
            for each in message.embeddings
        ),
        usage=wire.read(Usage, message.usage),
        cost=wire.money(message.cost),
        timings=wire.read(Timings, message.timings),
        price_version=message.price_version,
        quotas=tuple(wire.read(QuotaStatus, each) for each in message.quotas),
        receipts=tuple(map(wire.receipt, message.receipts)),
    )
