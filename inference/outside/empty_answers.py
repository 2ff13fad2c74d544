"""Answers that end at once, one after the other: by what of them a cache is known to be broken. No clock.

Orphaned cache blocks make every answer end at once, and nothing says so (NVIDIA/TensorRT-LLM#12933, #15018). But any prompt may be
answered so too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inference.engine import EngineFinishReason
from inference.outside.sequence import Choice


class EmptyAnswers:
    """Counts those of one engine that came in a row."""

    def __init__(self, count_max: int) -> None:
        """count_max: so many show a fault; 0 looks for none."""
        self._count_max = count_max
        self._salts: deque[str] = deque(maxlen=count_max)  # of the empty ones since one was not

    def show_a_fault(self, choice: Choice, inside: Iterable[Choice]) -> bool:
        """Whether it is the engine's fault, now that this choice has ended. inside: what the engine has.

        What one tenant is given shows nothing while the engine serves others: they would pay for a restart with their streams.
        """
        wanted = choice.request.wanted
        if choice.ended is EngineFinishReason.CANCELLED or not self._count_max:
            return False
        if wanted.output_token_ids or wanted.stop.stop_token_ids or wanted.sampling.logit_bias:
            return False  # it may have been asked for
        if choice.token_count > 1 or choice.ended is not EngineFinishReason.STOP:
            self._salts.clear()
            return False
        self._salts.append(wanted.cache_salt)
        known = {*self._salts}
        serves_others = any(other.request.wanted.cache_salt not in known for other in inside)
        return len(self._salts) == self._count_max and (len(known) > 1 or not serves_others)
