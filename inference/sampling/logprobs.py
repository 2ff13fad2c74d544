"""Log-probabilities of output tokens, for the rows that asked for them.

They are the model's own: the log-softmax of its logits before bias, penalties, constraint, temperature and cuts, as in OpenAI's
API. So they tell what the model thought, whatever it was made to say, and a token's value does not depend on how it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inference.engine import SamplingParams, TokenLogprob, TokenLogprobs


class LogprobReport:
    """Taken from a step's logits before anything changes them; asked when the tokens are chosen."""

    def __init__(self, logits: Tensor, params: Sequence[SamplingParams]) -> None:
        """logits: (R, V) fp32, one row per entry of params. Copies the rows that are asked about, and only those."""
        self._counts = {row: each.top_logprobs for row, each in enumerate(params) if each.top_logprobs is not None}
        if self._counts:
            self._logprobs = logits[list(self._counts)].log_softmax(dim=-1)

    def of(self, chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row, for the rows that asked. chosen: the token of every row."""
        if not self._counts:
            return {}
        picked = [chosen[row] for row in self._counts]
        own = self._logprobs[range(len(picked)), picked].tolist()
        top = self._logprobs.topk(max(self._counts.values()), dim=-1)
        reports = {}
        rows = zip(self._counts.items(), picked, own, top.indices.tolist(), top.values.tolist(), strict=True)
        for (row, count), token_id, logprob, top_ids, top_values in rows:
            best = tuple(map(TokenLogprob, top_ids[:count], top_values[:count]))
            reports[row] = TokenLogprobs(TokenLogprob(token_id, logprob), best)
        return reports
