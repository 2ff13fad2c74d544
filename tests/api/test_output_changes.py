"""What of a running request's output can still be changed: as much as its engine could keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from api.core.errors import InvalidRequest
from api.generation.live import check_output_change
from inference.engine import GrammarKind, ModelInfo, ResponseFormat, SamplingParams
from tests.inference.running import make_request

OURS = ModelInfo("m", "", "torch", 1000, 500, "", continues_output=True, continues_exactly=True)
THEIRS = replace(OURS, engine="remote vllm", continues_exactly=False)
SEEDED = make_request([1] * 10, 20, sampling=SamplingParams(temperature=1.0, seed=1))


def test_output_is_raised_only_where_the_engine_goes_on_with_it_as_it_began() -> None:
    """What an engine would refuse at the old limit is refused when it is asked for, and not after the output was delivered."""
    formatted = replace(SEEDED, response_format=ResponseFormat(GrammarKind.REGEX, "a+"))

    check_output_change(SEEDED, OURS, 21)
    check_output_change(replace(SEEDED, sampling=SamplingParams(temperature=1.0)), THEIRS, 21)
    check_output_change(SEEDED, THEIRS, 19)
    for request, model, why in (
        (SEEDED, THEIRS, "by the engine of this model with a seed or penalties"),
        (SEEDED, replace(THEIRS, continues_output=False), "by the engine of this model"),
        (formatted, OURS, "with a response format"),
    ):
        with pytest.raises(InvalidRequest, match=f"update.max_output_tokens: cannot be raised above 20 {why}$"):
            check_output_change(request, model, 21)
