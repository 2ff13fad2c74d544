"""Changes of a running request's output: within the limits of its engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.core.errors import InvalidRequest
from api.generation.request.limits import Cost, OutputLimits
from api.generation.request.preparation import check_output_change
from inference.engine import GrammarKind, ModelInfo, ResponseFormat, SamplingParams
from metering.pricing.prices import TokenPrices
from tests.inference.running import make_request

OURS = ModelInfo("m", "", "torch", 1000, 500, "", continues_output=True, continues_exactly=True)
THEIRS = replace(OURS, engine="remote vllm", continues_exactly=False)
SEEDED = make_request([1] * 10, 20, sampling=SamplingParams(temperature=1.0, seed=1))


def test_output_is_raised_only_if_the_engine_continues_the_same_sequence() -> None:
    """An increase that the engine would refuse later is refused at once, not after delivery."""
    formatted = replace(SEEDED, response_format=ResponseFormat(GrammarKind.REGEX, "a+"))

    check_output_change(SEEDED, OURS, 21)
    check_output_change(replace(SEEDED, sampling=SamplingParams(temperature=1.0)), THEIRS, 21)
    check_output_change(SEEDED, THEIRS, 19)
    for request, model, why in (
        (SEEDED, THEIRS, "by the engine of this model with a seed or penalties"),
        (SEEDED, replace(THEIRS, continues_output=False), "by the engine of this model"),
        (formatted, OURS, "with a response format"),
    ):
        with pytest.raises(
            InvalidRequest, match=f"update.max_output_tokens: cannot be raised above 20 {why}$"
        ):
            check_output_change(request, model, 21)


@pytest.mark.parametrize("cached_picos", [0, 2, 3, 9])
def test_a_cost_limit_holds_for_any_cached_tokens_reported(cached_picos: int) -> None:
    prices = TokenPrices(1, "USD", 3, cached_picos, 7)
    limits = OutputLimits(prices, 1000, Cost("USD", 500))
    limits.begun(40, None)

    most = max(prices.cost_picos(40, cached, limits.token_count_max) for cached in range(41))
    assert 500 - 7 < max(most, prices.cost_picos(40, 0, limits.token_count_max)) <= 500
