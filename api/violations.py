"""Collects what is wrong with a message, so that a client is told all of it at once, up to as much as anybody reads.

A message may have a million wrong elements: whoever has sent that must not hold up the streams of others.
"""

from __future__ import annotations

from api.errors import FieldViolation, InvalidRequest

VIOLATION_COUNT_MAX = 100  # told at once


class Violations:
    """Collects what is wrong with a message."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def check(self, right: bool, field: str, description: str) -> None:
        """Note a violation unless `right`. Raises: InvalidRequest once there are as many as are told at once."""
        if right:
            return
        if len(self._found) + 1 == VIOLATION_COUNT_MAX:
            description += "; what stands behind it was not looked at"
        self._found.append(FieldViolation(field, description))
        if len(self._found) == VIOLATION_COUNT_MAX:
            self.raise_if_any()

    def check_count(self, count: int, most: int, field: str) -> bool:
        """Note a violation if there are more elements than allowed; whether each of them is to be looked at."""
        self.check(count <= most, field, f"at most {most} are allowed, not {count}")
        return count <= most

    def raise_if_any(self) -> None:
        """Raises: InvalidRequest with all of them."""
        if self._found:
            raise InvalidRequest(self._found)
