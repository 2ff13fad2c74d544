"""How much of a prompt a step may compute beside streams that run: as much as fits the time that they may be kept waiting.

A fixed number of tokens cannot say it: 512 prompt tokens take 0.1 s on a model of 100 million parameters and more than a second on
one ten times as large, and every running stream stands still meanwhile. So the pace is learnt from the steps themselves.
"""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest step: a pause of the machine moves the estimate by a fifth, and for some ten steps
PROMPT_TOKENS_MIN = 64  # tokens: below that a step reads all weights for too little, and prompts would take longer in all


class StepPace:
    """What decoding and prompt tokens cost on this machine, from the steps so far. Times in seconds."""

    def __init__(self, step_time_target_s: float | None) -> None:
        """step_time_target_s: that a step with running streams should not exceed; None sets no limit."""
        self._target_s = step_time_target_s
        self._decode_s: float | None = None  # a step that only decodes
        self._prompt_token_s: float | None = None

    def prompt_token_count_max(self) -> int | None:
        """Prompt tokens for the next step, if streams run; None for as many as its budget has. Before anything is known: few."""
        if self._target_s is None:
            return None
        if self._prompt_token_s is None:
            return PROMPT_TOKENS_MIN
        spare_s = self._target_s - (self._decode_s or 0.0)
        return max(int(spare_s / self._prompt_token_s), PROMPT_TOKENS_MIN)

    def note(self, decoded_count: int, prompt_token_count: int, duration_s: float) -> None:
        """A step has computed so many sequences' next token and so many prompt tokens."""
        if not prompt_token_count:
            self._decode_s = _smoothed(self._decode_s, duration_s)
        elif prompt_token_count >= PROMPT_TOKENS_MIN:  # fewer would mostly measure the decoding beside them
            own_s = duration_s - (self._decode_s or 0.0) * bool(decoded_count)
            self._prompt_token_s = _smoothed(self._prompt_token_s, max(own_s, duration_s / 10) / prompt_token_count)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
