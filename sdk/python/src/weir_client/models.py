"""Models of a deployment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from weir_client.plain import Value


@dataclass(frozen=True, slots=True)
class Price(Value):
    """One version of a model's price, in picos of the currency per token."""

    version: int
    currency_code: str
    input_picos_per_token: int
    cached_input_picos_per_token: int
    output_picos_per_token: int
    effective_time: datetime | None
    embedding_picos_per_token: int = 0
    tier: str = "interactive"  # or "batch"
    own: bool = False  # the caller's own price instead of the list price
    reasoning_picos_per_token: int = 0  # of the output that is thinking


class ModelTask(StrEnum):
    """Task of a model. UNSPECIFIED if this client does not know the task yet."""

    UNSPECIFIED = "UNSPECIFIED"
    GENERATE = "GENERATE"
    EMBED = "EMBED"


@dataclass(frozen=True, slots=True)
class ModelVersion(Value):
    """One version of a model. `share` is its part (0 to 1) of the requests that name no version."""

    version: str
    share: float


@dataclass(frozen=True, slots=True)
class RefusedField(Value):
    """Request field that a model's engine refuses. `values` has the refused ones, empty for all."""

    field: str
    values: str = ""


@dataclass(frozen=True, slots=True)
class Model(Value):
    """Model that the key may use."""

    name: str
    architecture: str
    context_window_tokens: int
    vocabulary_size: int
    engine: str
    price: Price | None  # for interactive requests; None: no price is set
    tier_prices: tuple[Price, ...] = ()  # one per service tier
    task: ModelTask = ModelTask.GENERATE
    embedding_dimension: int = 0  # floats in a vector; 0 if it generates
    embedding_input_count_max: int = 0  # texts in one call of `embed`; 0 if it generates
    aliases: tuple[str, ...] = ()  # other names for it
    versions: tuple[ModelVersion, ...] = ()  # requested as `name@version`
    ready_replica_count: int = 0
    replica_count: int = 0
    drained_replica_count: int = 0  # drained by an admin
    kernels: tuple[str, ...] = ()  # what embedded engines compute with; `torch` is slow
    refused_fields: tuple[RefusedField, ...] = ()  # fields that its engine would ignore
    counts_from_usage: bool = False  # its engine reports no token ids; each is 2147483647
