"""What a request would be: the answer of `quote`."""

from __future__ import annotations

from dataclasses import dataclass, field

from weir_client.money import Money
from weir_client.values import QuotaStatus


@dataclass(frozen=True, slots=True)
class Quote:
    """What a request would count and cost, and whether it would be let in, if it were started now."""

    input_token_count: int
    predicted_cached_token_count: int  # 0 where unknown
    max_output_token_count: int  # of all choices together
    expected_output_token_count: int  # by the project's latest requests to the model
    worst_cost: Money  # the request never costs more
    expected_cost: Money
    price_version: int
    would_admit: bool
    retry_helps: bool  # whether waiting can make it fit, if it would not be let in
    retry_after_s: float | None = field(metadata={"source": "retry_delay"})  # how long, if that helps
    failing_quotas: tuple[QuotaStatus, ...]  # those that would refuse it, the first to reset in front
    quotas: tuple[QuotaStatus, ...]  # every limit that it would meet, and which of them bind
