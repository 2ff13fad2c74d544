"""Model runner for load tests: computes nothing, and takes the time given by a cost model.

Everything else is the real engine: scheduler, KV blocks, prefix cache, preemption, stop sequences,
worker process. Requests wait, share prefixes and are cancelled as on the simulated hardware; only
the tokens are meaningless: every output repeats a sentence that says so.
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
    """Stand-in for `ModelRunner`. Tokens depend only on the sequence's seed and position."""

    kernels = "simulated"
    verifies_drafts = False

    def __init__(
        self,
        cost: CostModel,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a runner. `clock` and `sleep` are in seconds; tests replace them."""
        self._cost = cost
        self._sentence = tokenizer.encode(SENTENCE, add_special_tokens=False)
        self._clock = clock
        self._sleep = sleep
        self._due_s = -math.inf

    def run(self, plan: StepPlan) -> dict[Sequence, Chosen]:
        """Wait for the step's duration; return the next tokens of sequences that complete."""
        now_s = self._clock()
        follows = any(
            chunk.sequence.computed_token_count != chunk.sequence.cached_token_count
            for chunk in plan.chunks
        )
        # A step that continues other steps starts when they end: scheduling overlaps with the GPU's
        # work.
        begin_s = self._due_s if follows else now_s
        context_token_count = sum(chunk.sequence.computed_token_count for chunk in plan.chunks)
        self._due_s = max(begin_s + self._cost.step_s(plan.token_count, context_token_count), now_s)
        if self._due_s > now_s:
            self._sleep(self._due_s - now_s)
        for sequence in (chunk.sequence for chunk in plan.chunks if chunk.scored_count):
            first = len(sequence.prompt_logprobs)
            for token_id in sequence.token_ids[first : sequence.prompt_token_count]:
                certain = TokenLogprob(token_id, 0.0)
                top = (certain,)[: sequence.request.sampling.prompt_logprobs]
                sequence.prompt_logprobs.append(TokenLogprobs(certain, top))
        return {
            chunk.sequence: self._next(chunk.sequence) for chunk in plan.chunks if chunk.completes
        }

    def _next(self, sequence: Sequence) -> Chosen:
        """Choose the next token. Each token is the last with the same probability."""
        index, stop = sequence.output_token_count, sequence.request.stop
        may_end = sequence.end_token_ids and index >= max(stop.min_output_tokens, 1)
        if may_end and uniform(sequence.seed, index) * self._cost.output_token_count_mean < 1:
            token_id = min(sequence.end_token_ids)
        else:
            token_id = self._sentence[index % len(self._sentence)]
        count = sequence.request.sampling.top_logprobs
        if count is None:
            return Chosen(token_id)
        certain = TokenLogprob(token_id, 0.0)  # the only possible token
        return Chosen(token_id, TokenLogprobs(certain, (certain,)[:count]))
