"""Tools that a model may call, and its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weir_client.plain import Value


@dataclass(frozen=True, slots=True)
class Tool(Value):
    """Function that the model may call. You run it, and send its result back as a message."""

    name: str
    description: str = ""
    # JSON schema of an object, or its text; None: no parameters
    parameters: Mapping[str, object] | str | None = None
    strict: bool = False  # arguments are always valid under it; only on engines with grammars

    @property
    def parameters_json(self) -> str:
        """Schema of the parameters as JSON text; empty if there is none."""
        if self.parameters is None:
            return ""
        return self.parameters if isinstance(self.parameters, str) else json.dumps(self.parameters)


@dataclass(frozen=True, slots=True)
class ToolCall(Value):
    """Call of a tool by the model. Its arguments are validated only if it is required or strict."""

    id: str  # to be named in the message with the result
    name: str
    arguments_json: str

    @property
    def arguments(self) -> Any:
        """Decoded arguments of the call. Raises: ValueError if they are not JSON."""
        return json.loads(self.arguments_json)


@dataclass(frozen=True, slots=True)
class ToolCallDelta(Value):
    """New part of a tool call while it streams."""

    index: int  # position among the calls of the choice, from 0
    id: str  # sent with the first piece of a call only
    name: str  # sent with the first piece of a call only
    arguments_json: str  # continues the arguments received so far
