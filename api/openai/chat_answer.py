"""Chat completions: `chat.completion` in one piece, `chat.completion.chunk` as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.v1 import inference_service_pb2 as pb

from api.openai.answers import Bill, Output, encode, event
from api.openai.parameters import Asked, tier_name
from api.openai.refusals import Refusal
from api.openai.token_texts import TokenTexts

MARK = "text"  # stands where the text will; after it comes nothing that a client has a say in


class ChatAnswer:
    """One chat completion."""

    streams_done = True
    tells_all_again = False

    def __init__(self, asked: Asked, texts: TokenTexts, answer_id: str, created: int) -> None:
        """answer_id: hexadecimal; created: in seconds since 1970."""
        self._asked = asked
        self._texts = texts
        self._wants_logprobs = asked.starts[0].HasField("top_logprobs")
        self._plain_chunks: dict[int, tuple[bytes, bytes]] = {}
        self._common = {
            "id": f"chatcmpl-{answer_id}",
            "created": created,
            "model": asked.model,
            "service_tier": tier_name(asked.starts[0]),
            "system_fingerprint": None,
        }

    def opening(self, outputs: Sequence[Output]) -> bytes:
        """See `Answer`."""
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk([_choice(output.index, first)]) for output in outputs)

    def delta(self, output: Output, new: pb.DeltaFrame) -> bytes:
        """See `Answer`."""
        if not new.logprobs and not new.tool_calls:
            before, after = self._plain_chunk(output.index)
            return b"".join((before, encode(new.text), after))
        told = self._logprobs(new.logprobs) if new.logprobs else None
        said: dict[str, Any] = {"content": new.text} if new.text or not new.tool_calls else {}
        if new.tool_calls:
            said["tool_calls"] = [_call_delta(piece) for piece in new.tool_calls]
        return self._chunk([_choice(output.index, said, logprobs=told)])

    def _plain_chunk(self, index: int) -> tuple[bytes, bytes]:
        """The event of a piece of text, up to the text and after it: all but that is the same for every token of a choice."""
        if (found := self._plain_chunks.get(index)) is None:
            before, _, after = self._chunk([_choice(index, {"content": MARK})]).rpartition(encode(MARK))
            found = self._plain_chunks[index] = before, after
        return found

    def closing(self, outputs: Sequence[Output], bill: Bill) -> bytes:
        """See `Answer`."""
        extension = {"weir": bill.extension(outputs)}
        last = [_choice(output.index, {}, finish_reason=output.finish_reason) for output in outputs]
        if not self._asked.includes_usage:
            return self._chunk(last, extension)
        return self._chunk(last) + self._chunk([], {"usage": bill.completion_usage()} | extension)

    def failure(self, refusal: Refusal, outputs: Sequence[Output]) -> bytes:
        """See `Answer`."""
        return event(refusal.body())

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """See `Answer`."""
        choices: list[dict[str, Any]] = [
            {
                "index": output.index,
                "message": _message(output),
                "logprobs": self._logprobs(output.logprobs) if self._wants_logprobs else None,
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ]
        return {"object": "chat.completion", **self._common, "choices": choices}

    def tail(self, outputs: Sequence[Output], bill: Bill) -> dict[str, Any]:
        """See `Answer`."""
        return {"usage": bill.completion_usage(), "weir": bill.extension(outputs)}

    def _chunk(self, choices: Sequence[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        usage = {"usage": None} if self._asked.includes_usage else {}
        return event({"object": "chat.completion.chunk", **self._common, "choices": choices, **usage, **(more or {})})

    def _logprobs(self, logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        return {"content": self._texts.content(logprobs), "refusal": None}


def _choice(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _message(output: Output) -> dict[str, Any]:
    """A whole turn. One that is nothing but calls has no text, not an empty one."""
    content = None if output.calls and not output.text else output.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if output.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.calls
        ]
    return message


def _call_delta(piece: pb.ToolCallDelta) -> dict[str, Any]:
    """More of one call: what it is with its first piece, and later nothing but arguments."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments_json}}
    function = {"name": piece.name, "arguments": piece.arguments_json}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
