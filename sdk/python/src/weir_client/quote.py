"""Result of `quote`."""

from __future__ import annotations

from dataclasses import dataclass, field

from weir_client.money import Money
from weir_client.plain import Value
from weir_client.values import QuotaStatus


@dataclass(frozen=True, slots=True)
class Quote(Value):
    """Estimated tokens and cost of a request, and whether it would be admitted now."""

    input_token_count: int
    predicted_cached_token_count: int  # 0 if unknown
    max_output_token_count: int  # sum of all choices
    expected_output_token_count: int  # from the project's latest requests to the model
    worst_case_cost: Money  # upper bound of the cost
    expected_cost: Money
    price_version: int
    would_admit: bool
    retry_helps: bool  # whether waiting can help, if it would not be admitted
    # Seconds to wait before a retry, if a retry helps.
    retry_after_s: float | None = field(metadata={"source": "retry_delay"})
    # Limits that would refuse the request; the first to reset leads.
    failing_quotas: tuple[QuotaStatus, ...]
    quotas: tuple[QuotaStatus, ...]  # every limit that applies, with the binding ones marked
