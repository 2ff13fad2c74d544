"""Faults from the environment variable `TENSORRT_DOUBLE`: comma-separated `kind:token` or `kind`.

Faults with a token affect requests whose prompt begins with it. error: a `RequestError` after two
tokens. fatal: an error that shuts the whole engine down and is reported to this request only.
stuck: it gets at most two tokens. wedge: no request gets output, and health stays good. empty: an
end token at once. swallow_logprobs: log-probabilities are missing.

Without a token: end_omitted: the end token is not in `token_ids`. mute_abort: aborts are never
answered. lora_ignored: the base model answers for adapters. lonely: no worker process.
abort_on_load: the constructor ends the process by a signal.
"""

from __future__ import annotations

import os


class Faults:
    """Faults requested by the environment variable."""

    def __init__(self) -> None:
        words = [word for word in os.environ.get("TENSORRT_DOUBLE", "").split(",") if word]
        self._tokens = {
            (kind, int(token))
            for kind, _, token in (word.partition(":") for word in words)
            if token
        }
        self._plain = {word for word in words if ":" not in word}

    def strikes(self, kind: str, prompt: list[int]) -> bool:
        """Return whether the fault applies to a request."""
        return (kind, prompt[0]) in self._tokens

    def has(self, kind: str) -> bool:
        """Return whether an engine-wide fault is set."""
        return kind in self._plain
