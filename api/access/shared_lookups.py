"""Many who ask the same at once get one answer: the one to a question that was asked after each of them had come.

So nothing is cached: whoever asks after a change sees it. While one question is under way, those that come wait for it to end,
and then for the one next question that is asked for all of them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Question(Generic[Answer]):
    """What is asked by some at the moment. begun: how often it was asked; answered: the last of these whose answer is here."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    asking_count: int = 0
    begun: int = 0
    answered: int = 0
    answer: Answer | Exception | None = None


class SharedLookups(Generic[Answer]):
    """Questions by their keys. Whoever asks one is cancelled alone: the next of those that wait asks it."""

    def __init__(self) -> None:
        self._questions: dict[Hashable, Question[Answer]] = {}

    def __len__(self) -> int:
        return len(self._questions)

    async def ask(self, key: Hashable, look: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of a look that began after this call. Raises what the look raises."""
        question = self._questions.setdefault(key, Question())
        before = question.begun
        question.asking_count += 1
        try:
            async with question.lock:
                if question.answered <= before:
                    question.begun += 1
                    number = question.begun
                    try:
                        question.answer = await look()
                    except Exception as error:
                        question.answer = error
                    question.answered = number
                answer = question.answer
        finally:
            question.asking_count -= 1
            if not question.asking_count:
                del self._questions[key]
        if isinstance(answer, Exception):
            raise copy.copy(answer)  # one instance raised in many tasks would gather the traces of all
        assert answer is not None, "a look answers or raises"
        return answer
