"""Observations about an external engine: one per question of a doctor command.

The adapters handle most answers either way. The answers show which precautions an installation
needs, and where the engine differs from its documentation.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from inference.engine import GrammarKind, ResponseFormat

Patient = TypeVar("Patient")


class Verdict(StrEnum):
    """expected: as documented. other: differs, and the adapter handles it. bad: the adapter cannot
    work with it.
    """

    EXPECTED = "expected"
    OTHER = "other"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one question."""

    question: str
    verdict: Verdict
    seen: str


def expected(condition: bool) -> Verdict:
    """Return the verdict on an answer that the adapter does not depend on."""
    return Verdict.EXPECTED if condition else Verdict.OTHER


def needed(condition: bool) -> Verdict:
    """Return the verdict on an answer that the adapter depends on."""
    return Verdict.EXPECTED if condition else Verdict.BAD


async def ask_all(questions: Sequence[Callable[[Patient], Awaitable[tuple[Verdict, str]]]], patient: Patient) -> list[Observation]:
    """Run all questions in order. The text of a question is the docstring of its function."""
    found = []
    for question in questions:
        asked = inspect.getdoc(question) or repr(question)
        try:
            verdict, seen = await question(patient)
        except Exception as error:  # the remaining questions are still useful
            verdict, seen = Verdict.BAD, f"no answer: {error!r}"
        found.append(Observation(asked, verdict, seen))
    return found


FORMATS = (
    ResponseFormat(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ResponseFormat(GrammarKind.REGEX, "[0-9]{3}"),
)


async def accepted(formats: Iterable[ResponseFormat], answer: Callable[[ResponseFormat], Awaitable[object]]) -> tuple[Verdict, str]:
    """Return which response formats an engine accepts. answer: requests an output in one format."""
    kept, failed = [], []
    for response_format in formats:
        try:
            await answer(response_format)
            kept.append(response_format.kind.value)
        except Exception as error:  # any failure belongs in the report
            failed.append(f"{response_format.kind.value} ({error!r})")
    return expected(not failed), f"accepted: {', '.join(kept) or 'none'}; refused: {', '.join(failed) or 'none'}"
