"""What a doctor finds out about an engine that others have written: one observation for each question.

The adapters work whichever way most answers fall. The answers tell which of their precautions an installation needs, and whether
something is not as it was written down.
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
    """expected: as it was written down. other: not so, and the adapter copes. bad: the adapter would not work here."""

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
    """Of a question that the adapter works without."""
    return Verdict.EXPECTED if condition else Verdict.OTHER


def needed(condition: bool) -> Verdict:
    """Of a question that everything hangs on."""
    return Verdict.EXPECTED if condition else Verdict.BAD


async def ask_all(questions: Sequence[Callable[[Patient], Awaitable[tuple[Verdict, str]]]], patient: Patient) -> list[Observation]:
    """Put all questions, in order; each is asked by the docstring of its function."""
    found = []
    for question in questions:
        asked = inspect.getdoc(question) or repr(question)
        try:
            verdict, seen = await question(patient)
        except Exception as error:  # the others are still worth asking
            verdict, seen = Verdict.BAD, f"no answer: {error!r}"
        found.append(Observation(asked, verdict, seen))
    return found


FORMATS = (
    ResponseFormat(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ResponseFormat(GrammarKind.REGEX, "[0-9]{3}"),
)


async def accepted(formats: Iterable[ResponseFormat], answer: Callable[[ResponseFormat], Awaitable[object]]) -> tuple[Verdict, str]:
    """Which response formats an engine takes. answer: has it answer in one."""
    kept, failed = [], []
    for response_format in formats:
        try:
            await answer(response_format)
            kept.append(response_format.kind.value)
        except Exception as error:  # whatever it is, it belongs in the report
            failed.append(f"{response_format.kind.value} ({error!r})")
    return expected(not failed), f"accepted: {', '.join(kept) or 'none'}; refused: {', '.join(failed) or 'none'}"
