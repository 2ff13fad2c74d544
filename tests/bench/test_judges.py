"""Comparison of answers with those of vLLM: streamed pieces equal whole ones, faults are found."""

from __future__ import annotations

from typing import Any

import pytest

from bench.judges import KINDS, Request, differences, facts, joined, plain, requests

CONTENT = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}]
CALL = {"name": "find", "arguments": '{"id": 1}'}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
REQUEST = Request(0, "chat", {"messages": []})


def whole(**changes: Any) -> dict[str, Any]:
    """Return the facts of an answer that is not streamed."""
    message = {"content": "Hi", "tool_calls": [{"id": "a", "type": "function", "function": CALL}]}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": CONTENT}}
    return facts(200, {"usage": USAGE, "choices": [plain(choice | {"message": message | changes})]})


def test_streamed_pieces_are_joined() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": "H"},
        {"content": "i", "tool_calls": [{"index": 0, "function": CALL | {"arguments": '{"id"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events[1]["choices"][0]["logprobs"] = {"content": CONTENT}
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": USAGE})  # type: ignore[dict-item]

    assert differences(REQUEST, "own", whole(), facts(200, joined(events))) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"content": "Hi "}, "0.text"), ({"tool_calls": []}, "0.calls")],
)
def test_a_planted_difference_is_found(changes: dict[str, Any], field: str) -> None:
    [found] = differences(REQUEST, "own", whole(), whole(**changes))
    [refused] = differences(REQUEST, "own", whole(), facts(400, {"error": "no"}))

    assert (found.field, found.explanation) == (field, "")
    assert (refused.field, refused.ours) == ("status", 400)


def test_requests_are_of_all_kinds_and_depend_on_the_seed_only() -> None:
    made = requests(300, 1, [])

    assert {each.kind for each in made} == set(KINDS)
    assert made == requests(300, 1, []) != requests(300, 2, [])
