"""Compiles grammars off the step thread, so that a large schema delays its own request and nobody's tokens.

Bounded like the inbox: the parent sends no more sequences than the waiting queue takes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from inference.engine import GenerationRequest
from inference.errors import RequestImpossible
from inference.sampling.grammar import Grammar, GrammarCompiler


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a request's response format: a grammar, or why there is none."""

    number: int
    request: GenerationRequest
    arrived_at_s: float
    result: Grammar | RequestImpossible


class GrammarThread:
    """One thread that compiles in order of arrival."""

    def __init__(self, compiler: GrammarCompiler, deliver: Callable[[Compiled], None]) -> None:
        """deliver: called in the thread, with each result."""
        self._compiler = compiler
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[tuple[int, GenerationRequest, float]] = queue.SimpleQueue()
        self._started = False

    def begin(self, number: int, request: GenerationRequest, arrived_at_s: float) -> None:
        """Compile the request's response format; the thread starts with the first."""
        self._jobs.put((number, request, arrived_at_s))
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name="weir-grammars", daemon=True).start()

    def _run(self) -> None:
        while True:
            number, request, arrived_at_s = self._jobs.get()
            assert request.response_format is not None, "only those with a format are sent here"
            try:
                result: Grammar | RequestImpossible = self._compiler.compile(request.response_format)
            except RequestImpossible as fault:
                result = fault
            self._deliver(Compiled(number, request, arrived_at_s, result))
