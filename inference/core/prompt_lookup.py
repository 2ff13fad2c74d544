"""Prompt-lookup speculation: draft tokens copied from earlier text, verified in one step.

Answers often repeat their prompts: names, quotations, code. If the last tokens of a sequence
occurred in it before, the tokens after that occurrence become a draft. One step computes the rows
of the last token and of the draft, and samples each row's token as usual, with the random number of
its position. While the sampled token equals the draft's, the next row is what the next step would
have computed; the other rows are dropped. The output is therefore the same as without drafts.

    token_ids      [ prompt ... | output ... last ]
    rows of a step                          [ last | draft 1 | draft 2 | draft 3 ]
    sampled                                   = d1   = d2      other     dropped
    appended                                  d1     d2        other

More rows cost little while a step is bound by memory, and their full share once it is bound by
computation. Steps are therefore timed: a draft ends where a row costs more than its expected token.
"""

from __future__ import annotations

import math

from inference.core.scheduler import Scheduler, StepPlan
from inference.core.sequence import Sequence

# Lengths of patterns, the most accurate first. A single token matches most often.
PATTERN_LENGTHS = (3, 1)
# rows of a step with drafts: a tile of the matrix units computes 16 rows in the time of one
ROW_COUNT_MAX = 16
SHARE_SMOOTHING = 0.1  # weight of the newest token in the share of correct predictions
# weight of the newest step in the estimate of a row's time
TIME_SMOOTHING = 0.02
# minimum share of a step's time per row, for its logits, its events and its token
ROW_SHARE_MIN = 0.01
ROW_VARIANCE_MIN = 0.05  # squared rows: below it the time of a row is unknown


class RepeatedText:
    """Predictor of the tokens that follow a growing list, by an earlier occurrence of its end."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # latest end of each pattern
        self._indexed_count = 1  # ends before this one are indexed
        # of predictions by pattern length, used or not
        self._right_shares = dict.fromkeys(PATTERN_LENGTHS, 0.5)
        self._predicted: list[int] = []
        self._length, self._predicted_at = 0, 0  # of the pattern; position of the first token

    def predict(self, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """Predict up to `count` next tokens. Return them, and the probability that one is correct
        if all before it are. `token_ids` must extend the list of the previous call.
        """
        came = token_ids[self._predicted_at : self._predicted_at + len(self._predicted)]
        for predicted, token_id in zip(self._predicted, came, strict=False):
            share, is_right = self._right_shares[self._length], predicted == token_id
            self._right_shares[self._length] = share + SHARE_SMOOTHING * (is_right - share)
            if not is_right:
                break
        for end in range(self._indexed_count, len(token_ids)):
            for length in PATTERN_LENGTHS:
                self._ends[tuple(token_ids[max(end - length, 0) : end])] = end
        self._indexed_count = self._predicted_at = len(token_ids)
        for length in PATTERN_LENGTHS:
            end = self._ends.get(tuple(token_ids[-length:]), 0)
            if end:
                self._predicted, self._length = token_ids[end : end + count], length
                return self._predicted, self._right_shares[length]
        self._predicted = []
        return [], 0.0


class RowTime:
    """Estimate of a row's share of a step's time, by a regression over the last steps."""

    def __init__(self) -> None:
        self._rows = self._time_s = self._rows_squared = self._product = 0.0  # means
        self._weight = 0.0

    def note(self, row_count: int, duration_s: float) -> None:
        """Record the number of rows and the duration of a step without prompts."""
        self._weight += TIME_SMOOTHING * (1 - self._weight)
        share = TIME_SMOOTHING / self._weight
        self._rows += share * (row_count - self._rows)
        self._time_s += share * (duration_s - self._time_s)
        self._rows_squared += share * (row_count**2 - self._rows_squared)
        self._product += share * (row_count * duration_s - self._product)

    def share(self, row_count: int) -> float:
        """Estimate the share of one row in the time of a step with this many rows."""
        variance = self._rows_squared - self._rows**2
        if variance < ROW_VARIANCE_MIN:
            return ROW_SHARE_MIN
        row_s = (self._product - self._rows * self._time_s) / variance
        step_s = self._time_s + row_s * (row_count - self._rows)
        return max(row_s / step_s, ROW_SHARE_MIN) if step_s > 0 else 1.0


class PromptLookup:
    """Adds drafts to the steps of an engine, and counts drafted and accepted tokens."""

    def __init__(self, draft_token_count_max: int) -> None:
        """`draft_token_count_max` limits the draft per sequence and step; 0 disables drafts."""
        self._count_max = draft_token_count_max
        self._row_time = RowTime()
        self._last: tuple[int, float] | None = None  # rows and duration of a step, not noted yet
        self._texts: dict[Sequence, RepeatedText] = {}  # by sequence of the last step
        self.draft_token_count = 0  # verified

    def extend(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Add drafts to a step with few rows and no prompts."""
        if self._last is not None:
            self._row_time.note(*self._last)
            self._last = None
        row_count = len(plan.chunks)
        spare_count = min(ROW_COUNT_MAX, plan.token_count_max) - row_count
        if not self._count_max or plan.token_count != row_count or spare_count < row_count:
            return
        count_max = min(self._count_max, spare_count // row_count)
        # A row must yield as many tokens per time as the others.
        worth = row_count * self._row_time.share(row_count)
        self._texts = {
            chunk.sequence: self._texts.get(chunk.sequence) or RepeatedText()
            for chunk in plan.chunks
            if chunk.completes and chunk.sequence.may_be_drafted
        }
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if (text := self._texts.get(sequence)) is None:
                continue
            count = min(count_max, sequence.owed_output_token_count - 1)
            predicted, right_share = text.predict(sequence.token_ids, count)
            draft = predicted[: _worthwhile_count(right_share, worth)]
            if draft and scheduler.make_room(sequence, 1 + len(draft)):
                plan.chunks[index] = chunk._replace(draft=tuple(draft))

    def note(self, plan: StepPlan, duration_s: float) -> None:
        """Record a step and its duration."""
        if plan.token_count == len(plan.chunks):
            draft_token_count = sum(len(chunk.draft) for chunk in plan.chunks)
            self._last = plan.token_count + draft_token_count, duration_s
            self.draft_token_count += draft_token_count


def _worthwhile_count(right_share: float, worth: float) -> int:
    """Compute the draft length at which the last token is correct with probability `worth`."""
    if worth >= right_share:
        return 0
    if right_share > 1 - 1e-6:
        return ROW_COUNT_MAX
    return int(math.log(worth) / math.log(right_share))
