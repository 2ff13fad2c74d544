"""Messages of a chat, and conversations with tools as the chat template renders them."""

import json
from dataclasses import dataclass
from typing import Any, TypedDict

TOOLS_BEGIN = "You may call these functions:\n<tools>\n"
TOOLS_END = (
    '\n</tools>\nTo call one, write <tool_call>{"name": name, "arguments": arguments}</tool_call>.'
)


class Message(TypedDict):
    """One message of a chat, in the form that chat templates take."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. properties: JSON schemas of its arguments by name."""

    name: str
    description: str
    properties: dict[str, dict[str, Any]]

    def chat(self) -> dict[str, Any]:
        """Convert the function to the form of OpenAI's API."""
        parameters = {
            "type": "object",
            "properties": self.properties,
            "required": list(self.properties),
        }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function."""

    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        """Return the call as JSON text."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Line:
    """One message of a conversation.

    is_forced: a grammar decides the first token of this answer, so the model need not learn it.
    """

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class Talk:
    """Conversation without hotel listings."""

    lines: tuple[Line, ...]
    system: str | None = None
    functions: tuple[Function, ...] = ()

    def messages(self) -> list[Message]:
        """Return the messages that the chat template makes of this conversation."""
        messages: list[Message] = []
        system = [] if self.system is None else [self.system]
        if self.functions:
            shown = "\n".join(
                json.dumps(function.chat()["function"], ensure_ascii=False)
                for function in self.functions
            )
            system.append(f"{TOOLS_BEGIN}{shown}{TOOLS_END}")
        if system:
            messages.append({"role": "system", "content": "\n\n".join(system)})
        for line in self.lines:
            calls = "".join(f"<tool_call>{call.text()}</tool_call>" for call in line.calls)
            if line.role == "tool":
                content = f"<tool_response>{line.text}</tool_response>"
                messages.append({"role": "user", "content": content})
            else:
                messages.append({"role": line.role, "content": line.text + calls})
        return messages

    def forced(self) -> frozenset[int]:
        """Return the indexes in `messages` of answers whose first token a grammar decides."""
        first = 1 if self.system is not None or self.functions else 0
        return frozenset(
            number for number, line in enumerate(self.lines, start=first) if line.is_forced
        )

    def chat(self) -> list[dict[str, Any]]:
        """Convert the conversation to the form of OpenAI's API; calls have their position as id."""
        chat: list[dict[str, Any]] = []
        if self.system is not None:
            chat.append({"role": "system", "content": self.system})
        for line in self.lines:
            message: dict[str, Any] = {"role": line.role, "content": line.text}
            if line.calls:
                message["tool_calls"] = [
                    {
                        "id": f"call_{number}",
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                    }
                    for number, call in enumerate(line.calls)
                ]
            chat.append(message)
        return chat
