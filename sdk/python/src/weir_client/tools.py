"""Tools that a model may call, and what it calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. Your program makes the call, and sends its result with the next request."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | str | None = None  # the JSON schema of an object, or its text; None: it takes nothing
    strict: bool = False  # arguments are valid under it also where the model is free to call; only on engines that keep grammars

    @property
    def parameters_json(self) -> str:
        """The schema as text; empty if there is none."""
        if self.parameters is None:
            return ""
        return self.parameters if isinstance(self.parameters, str) else json.dumps(self.parameters)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model has made. Where it was free to call, the arguments are what it wrote: read them with care."""

    id: str  # for the message with the result
    name: str
    arguments_json: str

    @property
    def arguments(self) -> Any:
        """The arguments as values. Raises: ValueError if the model wrote no JSON."""
        return json.loads(self.arguments_json)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one call."""

    index: int  # among the calls of the choice, from 0
    id: str  # with the first piece of a call, and empty later
    name: str  # the same
    arguments_json: str  # more of the arguments
