"""Parts of bodies of the HTTP API, for tests that vary them."""

from __future__ import annotations

from typing import Any

Part = dict[str, Any]


def user(content: Any, **more: Any) -> Part:
    """Return a message of the user."""
    return {"role": "user", "content": content, **more}


def assistant(content: Any = None, **more: Any) -> Part:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content, **more}


def calling(*calls: Part, **more: Any) -> Part:
    """Return a message of the assistant that calls functions."""
    return assistant(tool_calls=[*calls], **more)


def call(call_id: str, name: str = "f", arguments: str = "{}") -> Part:
    """Return a call of a chat."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(call_id: str, name: str = "f", arguments: str = "{}", **more: Any) -> Part:
    """Return a call as an item of a response."""
    item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return item | more


def result(call_id: str, content: Any = "x", **more: Any) -> Part:
    """Return the result of a call of a chat."""
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def output(call_id: str, content: Any = "x") -> Part:
    """Return the result of a call as an item of a response."""
    return {"type": "function_call_output", "call_id": call_id, "output": content}


def function(name: str = "f", **more: Any) -> Part:
    """Return a tool of a chat."""
    return {"type": "function", "function": {"name": name, **more}}


def tool(name: str = "f", **more: Any) -> Part:
    """Return a tool of a response."""
    return {"type": "function", "name": name, **more}


def json_format(schema: Any, name: str = "x", **more: Any) -> Part:
    """Return the response format of a chat."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}


def text_format(schema: Any, name: str = "x", **more: Any) -> Part:
    """Return the `text` of a response with a format."""
    return {"format": {"type": "json_schema", "name": name, "schema": schema, **more}}


def text(content: str, **more: Any) -> Part:
    """Return a part of the content of a chat or a message."""
    return {"type": "text", "text": content, **more}


def input_text(content: str) -> Part:
    """Return a part of the input of a response."""
    return {"type": "input_text", "text": content}
