"""Sequences begun by an external engine are reported even if it never answers."""

from __future__ import annotations

import pytest

from inference.adapters.external_core import Choice, Request
from inference.engine import EngineFinishReason, Scheduled, SequenceFinished
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_core, make_request


@pytest.mark.parametrize("submitted_at_s", [None, 1.0], ids=["waiting here", "in the engine"])
def test_a_cancelled_sequence_was_begun_if_the_engine_had_it(
    tiny: TinyCheckpoint, submitted_at_s: float | None
) -> None:
    request = Request(1, make_request((30, 31, 32), 5), frozenset({2}), 0.0, 4096, submitted_at_s)
    choice = Choice(request, 0, 1, make_core(tiny.directory)._decoder.open())
    request.choices = [choice]
    choice.ended = EngineFinishReason.CANCELLED

    *before, last = request.finish(choice, 2.0)

    assert isinstance(last, SequenceFinished)
    assert before == ([] if submitted_at_s is None else [Scheduled(0)])
