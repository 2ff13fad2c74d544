"""Sequences handed to TensorRT-LLM, and its answers as those of any engine that is not ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from inference.errors import EngineFailed
from inference.outside.core import Answer
from inference.outside.sequence import Choice
from inference.tensorrt.library import TensorRtLibrary


class Submission:
    """Hands choices to one engine."""

    def __init__(self, library: TensorRtLibrary, llm: Any, vocabulary_size: int) -> None:
        self._library = library
        self._llm = llm
        self._vocabulary_size = vocabulary_size

    def submit(self, choice: Choice) -> TensorRtAnswers:
        """Needs the running loop that all others had. Raises: EngineFailed if the engine refuses it."""
        wanted = choice.request.wanted
        try:
            sampling = self._library.sampling(wanted, choice.request.end_token_ids, self._vocabulary_size)
            return TensorRtAnswers(self._library, self._library.submit(self._llm, wanted, sampling))
        except (self._library.RequestError, ValueError, TypeError) as error:
            raise EngineFailed(f"the engine refused the request: {error}") from error


class TensorRtAnswers:
    """Implements `Answers`. The library yields the same object again and again; it is read before the next step."""

    def __init__(self, library: TensorRtLibrary, result: Any) -> None:
        self._library = library
        self._result = result

    async def read(self) -> AsyncGenerator[Answer, None]:
        """See `Answers.read`."""
        try:
            async for response in self._result:
                yield Answer(response.outputs[0], response.cached_tokens)
        except self._library.RequestError as error:
            raise EngineFailed(f"the engine gave the sequence up: {error}") from error

    def abort(self) -> None:
        """See `Answers.abort`."""
        self._result.abort()
