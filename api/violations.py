"""Collects what is wrong with a message, so that a client is told all of it at once."""

from __future__ import annotations

from api.errors import FieldViolation, InvalidRequest


class Violations:
    """Collects what is wrong with a message."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def check(self, right: bool, field: str, description: str) -> None:
        """Note a violation unless `right`."""
        if not right:
            self._found.append(FieldViolation(field, description))

    def raise_if_any(self) -> None:
        """Raises: InvalidRequest with all of them."""
        if self._found:
            raise InvalidRequest(self._found)
