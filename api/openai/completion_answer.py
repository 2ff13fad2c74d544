"""Plain completions: `text_completion`, in one piece or as a stream of the same objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.openai.answers import Bill, Output, event
from api.openai.parameters import Asked
from api.openai.refusals import Refusal
from api.openai.token_texts import TokenTexts


class CompletionAnswer:
    """One plain completion of one or more prompts."""

    streams_done = True
    tells_all_again = False

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        self._asked = asked
        self._texts = texts
        self._wants_logprobs = asked.starts[0].HasField("top_logprobs")
        self._offsets: Counter[int] = Counter()  # characters of the tokens so far, by choice
        self._common = {
            "id": f"cmpl-{answer_id}",
            "object": "text_completion",
            "created": created,
            "model": asked.model,
            "system_fingerprint": None,
        }

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """See `Answer`."""
        return b""

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        """See `Answer`."""
        told = None
        if new.logprobs:
            told = self._texts.columns(new.logprobs, self._offsets[output.index])
            self._offsets[output.index] += sum(map(len, told["tokens"]))
        return self._chunk([_choice(output.index, new.text, told, None)])

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        """See `Answer`."""
        extension = {"weir": bill.extension(outputs)}
        last = [_choice(output.index, "", None, output.finish_reason) for output in outputs]
        if not self._asked.includes_usage:
            return self._chunk(last, extension)
        return self._chunk(last) + self._chunk([], {"usage": bill.completion_usage()} | extension)

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        """See `Answer`."""
        return event(refusal.body())

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """See `Answer`."""
        choices = [
            _choice(
                output.index,
                output.text,
                self._texts.columns(output.logprobs, 0) if self._wants_logprobs else None,
                output.finish_reason,
            )
            for output in outputs
        ]
        return {**self._common, "choices": choices}

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """See `Answer`."""
        return {"usage": bill.completion_usage(), "weir": bill.extension(outputs)}

    def _chunk(self, choices: Sequence[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        usage = {"usage": None} if self._asked.includes_usage else {}
        return event({**self._common, "choices": choices, **usage, **(more or {})})


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
