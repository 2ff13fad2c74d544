"""The `x-ratelimit-*` headers: of all limits that a request meets, those on requests and on tokens that have the least left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from weir.v1 import types_pb2

from api.core.wire import DIMENSIONS
from metering.core.models import QuotaDimension

REQUESTS, TOKENS = "requests", "tokens"
# Limits that come back within a minute: waiting for them is what OpenAI calls a rate limit. The others are quotas.
RATES: Mapping[QuotaDimension, str] = {
    QuotaDimension.CONCURRENT_REQUESTS: REQUESTS,
    QuotaDimension.REQUESTS_PER_MINUTE: REQUESTS,
    QuotaDimension.TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.INPUT_TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.OUTPUT_TOKENS_PER_MINUTE: TOKENS,
}
COUNTED: Mapping[QuotaDimension, str] = {
    QuotaDimension.REQUESTS_PER_MINUTE: REQUESTS,
    QuotaDimension.TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.INPUT_TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.OUTPUT_TOKENS_PER_MINUTE: TOKENS,
    QuotaDimension.TOKENS_PER_DAY: TOKENS,
    QuotaDimension.TOKENS_PER_MONTH: TOKENS,
}
COUNTED_NUMBERS = {DIMENSIONS[dimension]: kind for dimension, kind in COUNTED.items()}


def kind_of(dimension: str) -> str | None:
    """What a rate limit counts, `requests` or `tokens`; None for a quota of another sort. dimension: by its name."""
    return RATES.get(QuotaDimension(dimension)) if dimension in set(QuotaDimension) else None


def headers_of(quotas: Iterable[types_pb2.QuotaStatus]) -> dict[str, str]:
    """Headers of a request that was let in. quotas: all that it met, itself counted."""
    tightest: dict[str, types_pb2.QuotaStatus] = {}
    for quota in quotas:
        kind = COUNTED_NUMBERS.get(quota.dimension)
        if kind is not None and (kind not in tightest or quota.remaining_value < tightest[kind].remaining_value):
            tightest[kind] = quota
    headers: dict[str, str] = {}
    for kind, quota in tightest.items():
        delay = quota.reset_delay
        headers |= three(kind, quota.limit_value, quota.remaining_value, delay.seconds + delay.nanos / 1e9)
    return headers


def headers_of_refusal(facts: Mapping[str, str]) -> dict[str, str]:
    """Headers of a request that a limit refused. facts: `api.errors.quota_metadata`; of any other error there are none."""
    dimension = facts.get("dimension", "")
    kind = COUNTED.get(QuotaDimension(dimension)) if dimension in set(QuotaDimension) else None
    if kind is None or "reset_time" not in facts:
        return {}
    left_s = (datetime.fromisoformat(facts["reset_time"]) - datetime.now(UTC)).total_seconds()
    return three(kind, int(facts["limit"]), int(facts["remaining"]), left_s)


def three(kind: str, limit: int, remaining: int, reset_s: float) -> dict[str, str]:
    """Limit, what is left of it, and when it is whole again."""
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(max(remaining, 0)),
        f"x-ratelimit-reset-{kind}": duration_text(reset_s),
    }


def duration_text(seconds: float) -> str:
    """As OpenAI writes it: `350ms`, `12s`, `6m0s`, `2h0m5s`."""
    ms = max(round(seconds * 1000), 0)
    if ms < 1000:
        return f"{ms}ms"
    minutes, whole_s = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{whole_s}s"
    return f"{minutes}m{whole_s}s" if minutes else f"{whole_s}s"
