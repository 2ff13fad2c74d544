"""In the place of a model, for load tests: computes nothing, and takes the time that a cost model says.

Everything around it is the engine's own: scheduler, KV blocks, prefix cache, preemption, stop sequences, host process. So
requests wait, share prefixes and are cancelled as on the hardware that is simulated, and only the tokens mean nothing: every
answer repeats a sentence that says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from inference.core.options import CostModel
from inference.core.scheduler import StepPlan
from inference.core.sequence import Sequence
from inference.engine import TokenLogprob, TokenLogprobs
from inference.sampling.sampler import Chosen
from inference.sequences import uniform
from inference.text.tokenizer import Tokenizer

SENTENCE = "This answer is simulated: no model has computed it. "


class SimulatedRunner:
    """Answers a plan as `ModelRunner` does. What is chosen depends on the sequence's seed and position alone."""

    def __init__(
        self,
        cost: CostModel,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """clock and sleep, both in seconds, are replaced in tests."""
        self._cost = cost
        self._sentence = tokenizer.encode(SENTENCE, add_special_tokens=False)
        self._clock = clock
        self._sleep = sleep
        self._due_s = -math.inf

    def run(self, plan: StepPlan) -> dict[Sequence, Chosen]:
        """Let the step's time pass. Returns the next token per sequence, for the chunks that complete."""
        now_s = self._clock()
        follows = any(chunk.sequence.computed_token_count != chunk.sequence.cached_token_count for chunk in plan.chunks)
        # A step that continues others follows them at once: what scheduling takes here is hidden behind the GPU's work there.
        begin_s = self._due_s if follows else now_s
        context_token_count = sum(chunk.sequence.computed_token_count for chunk in plan.chunks)
        self._due_s = max(begin_s + self._cost.step_s(plan.token_count, context_token_count), now_s)
        if self._due_s > now_s:
            self._sleep(self._due_s - now_s)
        return {chunk.sequence: self._next(chunk.sequence) for chunk in plan.chunks if chunk.completes}

    def _next(self, sequence: Sequence) -> Chosen:
        """Each token may be the last with the same probability, so that lengths scatter around the mean."""
        index, stop = sequence.output_token_count, sequence.request.stop
        may_end = sequence.end_token_ids and index >= max(stop.min_output_tokens, 1)
        if may_end and uniform(sequence.seed, index) * self._cost.output_token_count_mean < 1:
            token_id = min(sequence.end_token_ids)
        else:
            token_id = self._sentence[index % len(self._sentence)]
        count = sequence.request.sampling.top_logprobs
        if count is None:
            return Chosen(token_id)
        certain = TokenLogprob(token_id, 0.0)  # nothing else could have come
        return Chosen(token_id, TokenLogprobs(certain, (certain,)[:count]))
