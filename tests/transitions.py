"""Check of every transition of a request against the table of phases.

Importing this module switches the check on for the process. Requests do not check it themselves,
because they change their phase nine times.
"""

from __future__ import annotations

from typing import Any

from api.generation.request.live_embedding import LiveEmbedding
from api.generation.request.live_request import LiveRequest
from api.generation.request.phases import NEXT


def set_checked(request: Any, name: str, value: object) -> None:
    """Set an attribute of a request. Raises AssertionError if a phase does not follow its own."""
    if name == "phase" and hasattr(request, "phase"):
        before, after = type(request.phase), type(value)
        assert after in NEXT[before], f"{after.__name__} does not follow {before.__name__}"
    object.__setattr__(request, name, value)


for kind in (LiveRequest, LiveEmbedding):
    setattr(kind, "__setattr__", set_checked)  # noqa: B010  # mypy forbids the assignment
