"""Conversion of conversations that began with another server.

An agent may switch its model in the middle of a conversation, and then sends the answers of other
servers: calls of tools that are not served here, legacy formats, and parts that only their author
can read. Content with an equivalent here is converted. The work of a server's own tools is left
out, like those tools; the header `weir-ignored-parameters` names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from api.openai.error_responses import invalid_parameter

Tree = dict[str, Any]
Ignore = Callable[[str], None]  # receives the name of an ignored part, item or block

TEXT = "text"
REFUSED_TEXT = "refusal"  # type of a part, and its member
# Types of parts that hold the thinking of an earlier answer; the last one is encrypted.
THOUGHTS = frozenset({"thinking", "reasoning", "reasoning_text", "redacted_thinking"})
PLAIN_PARTS = frozenset({TEXT, "input_text", "output_text"})

# Items of tools that a server runs, whose results are in the text after them
SERVER_ITEMS = frozenset(
    {
        "additional_tools",
        "code_interpreter_call",
        "file_search_call",
        "ghost_snapshot",  # of Codex's own
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "web_search_call",
    }
)
# Items that nothing can replace, and the remedy
LOST_ITEMS: Mapping[str, str] = {
    "item_reference": "nothing is stored: send the item itself",
    "compaction": "its content is encrypted: send the conversation, or a summary of it as text",
    "compaction_trigger": "conversations are not shortened: leave it out",
    "compaction_summary": "its content is encrypted: send the conversation, or a summary as text",
    "computer_call": "the model cannot see screens: leave it and its output out",
    "computer_call_output": "the model cannot see screens: leave it and its call out",
}
# Calls of tools that the client runs: the member with the arguments, and the tool's name
CLIENT_CALLS: Mapping[str, tuple[str, str]] = {
    "custom_tool_call": ("input", ""),
    "local_shell_call": ("action", "local_shell"),
    "shell_call": ("action", "shell"),
    "apply_patch_call": ("operation", "apply_patch"),
    "tool_search_call": ("arguments", "tool_search"),
}
CLIENT_RESULTS: Mapping[str, str] = {
    "custom_tool_call_output": "output",
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "tool_search_output": "tools",
}
MESSAGE, CALL, RESULT, REASONING = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
)
REASONING_TEXT = "reasoning_text"  # type of the parts of thoughts
ITEMS = (MESSAGE, CALL, RESULT, REASONING)

# Blocks of tools that a server runs, whose results are in the text after them
SERVER_BLOCKS = frozenset({"server_tool_use", "mcp_tool_listing", "mcp_tool_use", "fallback"})
SERVER_RESULT = "_tool_result"  # end of the types of their results
PLAIN_BLOCKS = frozenset({TEXT, "tool_use", "tool_result", "thinking", "redacted_thinking"})


def as_text(value: object) -> str:
    """Return a string unchanged, None as an empty string, and any other value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_arguments(value: object) -> str:
    """Encode the arguments of a call. A value that is not an object becomes their `input`."""
    return as_text(value if isinstance(value, dict) else {"input": value})


def objects_of(value: object) -> Iterable[tuple[int, Tree]]:
    """Yield the objects of a list with their positions; nothing if the value is not a list."""
    for index, each in enumerate(value if isinstance(value, list) else ()):
        if isinstance(each, dict):
            yield index, each


def convert_messages(tree: Tree, ignore: Ignore) -> None:
    """Convert the messages of a chat in place. Raises InvalidRequest for unsupported content."""
    for index, message in objects_of(tree.get("messages")):
        legacy = message.pop("function_call", None)
        if isinstance(legacy, dict) and legacy.get("name"):
            message["tool_calls"] = [*(message.get("tool_calls") or ()), {"function": legacy}]
        for _, call in objects_of(message.get("tool_calls")):
            convert_call(call)
        is_text = isinstance(message.get("thinking"), str)  # Ollama
        thoughts = [message.pop("thinking")] if is_text else []
        if isinstance(content := message.get("content"), list):
            location = f"messages[{index}].content"
            message["content"], found = convert_parts(content, location, ignore)
            thoughts += found
        if not (message.get("reasoning_content") or message.get("reasoning")) and any(thoughts):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))


def convert_call(call: Tree) -> None:
    """Add the fields that a call lacks: Ollama omits `type`, Gemini `id`, and so on."""
    custom = call.pop("custom", None)
    if isinstance(custom, dict):
        call["type"] = "function"
        arguments = as_arguments(custom.get("input"))
        call["function"] = {"name": custom.get("name"), "arguments": arguments}
    if call.get("id") is None:
        call["id"] = ""
    if call.get("type") is None:
        call["type"] = "function"
    called = call.get("function")
    if isinstance(called, dict) and not isinstance(called.get("arguments"), str):
        called["arguments"] = as_text(called.get("arguments"))


def convert_parts(parts: list[Any], location: str, ignore: Ignore) -> tuple[list[Any], list[str]]:
    """Split the parts of a message into text parts and the thoughts in other parts.

    Raises InvalidRequest for a part of another type.
    """
    kept: list[Any] = []
    thoughts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in PLAIN_PARTS:
            kept.append(part)
        elif kind == REFUSED_TEXT:
            kept.append({"type": TEXT, TEXT: as_text(part.get(REFUSED_TEXT))})
        elif kind in THOUGHTS:
            if not (thought := thought_of(part)):
                ignore(f"messages[].content[].{kind}")
            thoughts += filter(None, [thought])
        else:
            raise invalid_parameter(
                f"{location}[{index}]",
                f"parts of the type {kind[:40]!r} are not supported: send text",
            )
    return kept, thoughts


def thought_of(part: Tree) -> str:
    """Return the text of a thought; empty if it is encrypted."""
    found = part.get("thinking", part.get(TEXT))
    if isinstance(found, list):  # Mistral
        found = "".join(as_text(each.get(TEXT)) for _, each in objects_of(found))
    return as_text(found)


def convert_items(tree: Tree, ignore: Ignore) -> None:
    """Convert the input items of a response in place. Raises InvalidRequest for others."""
    if not isinstance(items := tree.get("input"), list):
        return
    kept: list[Any] = []
    for index, item in enumerate(items):
        kind = (item.get("type") or MESSAGE) if isinstance(item, dict) else None
        if not isinstance(kind, str):
            kept.append(item)
        elif kind in LOST_ITEMS:
            raise invalid_parameter(
                f"input[{index}].type", f"{kind} is not supported: {LOST_ITEMS[kind]}"
            )
        elif kind not in {*ITEMS, *SERVER_ITEMS, *CLIENT_CALLS, *CLIENT_RESULTS}:
            raise invalid_parameter(
                f"input[{index}].type",
                f"must be one of {', '.join(ITEMS)}: other items are not supported",
            )
        elif kind in SERVER_ITEMS or (kind.startswith("tool_search") and not item.get("call_id")):
            ignore(f"input[].{kind}")
        else:
            kept.append(convert_item(item, kind, f"input[{index}]", ignore))
    tree["input"] = kept


def convert_item(item: Tree, kind: str, location: str, ignore: Ignore) -> Tree:
    """Convert one input item to a type that the model can be shown."""
    if kind in CLIENT_CALLS:
        member, name = CLIENT_CALLS[kind]
        arguments = as_arguments(item.get(member))
        call_id = item.get("call_id") or item.get("id")
        name = name or item.get("name") or ""
        return {"type": CALL, "call_id": call_id, "name": name, "arguments": arguments}
    if kind in CLIENT_RESULTS:
        output = item.get(CLIENT_RESULTS[kind])
        is_parts = all("text" in each for _, each in objects_of(output))
        return {
            "type": RESULT,
            "call_id": item.get("call_id") or item.get("id"),
            "output": output if isinstance(output, list) and is_parts else as_text(output),
        }
    if kind == CALL and isinstance(item.get("arguments"), dict):
        item["arguments"] = as_text(item["arguments"])
    content = item.get("content")
    if kind == REASONING and isinstance(content, list):
        texts = [thought_of(each) for _, each in objects_of(content)]
        item["content"] = [{"type": REASONING_TEXT, TEXT: text} for text in texts if text]
    elif kind == MESSAGE and isinstance(content, list):
        item["content"], _ = convert_parts(content, f"{location}.content", ignore)
    for name in ("caller", "namespace"):  # of a call that the client runs all the same
        if item.pop(name, None) is not None:
            ignore(f"input[].{name}")
    return item


def convert_blocks(tree: Tree, ignore: Ignore) -> None:
    """Convert a conversation in Anthropic's format in place. Raises: InvalidRequest."""
    if isinstance(system := tree.get("system"), list):
        tree["system"] = kept_blocks(system, "system", "system[]", ignore)
    for index, message in objects_of(tree.get("messages")):
        if isinstance(content := message.get("content"), list):
            location = f"messages[{index}].content"
            message["content"] = kept_blocks(content, location, "messages[].content[]", ignore)


def kept_blocks(blocks: list[Any], location: str, path: str, ignore: Ignore) -> list[Any]:
    """Convert blocks to those that the model can read. Raises InvalidRequest for other content."""
    kept: list[Any] = []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            kept.append(block)
        elif kind in SERVER_BLOCKS or kind.endswith(SERVER_RESULT):
            ignore(f"{path}.{kind}")
        elif kind == "document":
            kept.append(document_text(block, f"{location}[{index}]"))
        elif kind == "search_result":
            head = [block.get("title"), block.get("source")]
            kept.append(joined_text([*head, *texts_of(block.get("content"))]))
        elif kind == "compaction":
            kept.append(joined_text(texts_of(block.get("content"))))
        elif kind == "tool_reference":  # to a tool that a search found
            kept.append(joined_text([block.get("tool_name")]))
        elif kind not in PLAIN_BLOCKS:
            raise invalid_parameter(
                f"{location}[{index}]",
                f"blocks of the type {kind[:40]!r} are not supported here: send text",
            )
        else:
            if kind == "tool_result" and isinstance(content := block.get("content"), list):
                inner, inside = f"{location}[{index}].content", f"{path}.content[]"
                block["content"] = kept_blocks(content, inner, inside, ignore)
            kept.append(block)
    return kept


def texts_of(blocks: object) -> list[Any]:
    """Return the texts of text blocks; a string counts as one text."""
    if isinstance(blocks, str):
        return [blocks]
    return [block.get(TEXT) for _, block in objects_of(blocks)]


def joined_text(texts: Iterable[Any]) -> Tree:
    """Build one text block from several texts, each on lines of its own."""
    return {"type": TEXT, TEXT: "\n".join(as_text(each) for each in texts if each)}


def document_text(block: Tree, location: str) -> Tree:
    """Convert a document to a text block with its title. Raises InvalidRequest if not text."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in (TEXT, "content"):
        raise invalid_parameter(
            f"{location}.source",
            "must have the type text or content: the model cannot read files; send their text",
        )
    found = [source.get("data")] if kind == TEXT else texts_of(source.get("content"))
    return joined_text([block.get("title"), block.get("context"), *found])


CONVERSIONS: Mapping[str, Callable[[Tree, Ignore], None]] = {
    "": convert_messages,  # to count their tokens
    "chat": convert_messages,
    "responses": convert_items,
    "messages": convert_blocks,
}


def convert_history(tree: Tree, api: str, ignore: Ignore) -> None:
    """Convert the conversation of a request in place.

    `api` is its name in `dialects.py`. Raises InvalidRequest for content the model cannot be shown.
    """
    if (convert := CONVERSIONS.get(api)) is not None:
        convert(tree, ignore)
