"""Sequences sent to a remote engine, and its messages as answers: one call for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from inference.errors import EngineFailed
from inference.outside.core import Answer
from inference.outside.sequence import Choice
from inference.remote.dialect import SHARES, Dialect, WireOutput, asked, engine_error

END_WAIT_S = 2.0  # for a call to end by itself after its last message

_log = logging.getLogger("weir.inference.remote")


class Submission:
    """Sends choices over one connection. may_reuse: whether the server may have prompt tokens of a request cached.

    tasks: of the connection; aborts are among them, since they are calls of their own. unfit: called with why the server must
    not be used any more.
    """

    def __init__(
        self,
        dialect: Dialect,
        tasks: asyncio.TaskGroup,
        may_reuse: bool,
        unfit: Callable[[str], None],
    ) -> None:
        self._dialect = dialect
        self._unfit = unfit
        self._tasks = tasks
        self._may_reuse = may_reuse

    def submit(self, choice: Choice) -> RemoteAnswers:
        """Send it; what becomes of it is told by its answers."""
        request_id = f"weir-{uuid.uuid4().hex}"
        call = self._dialect.generate(request_id, choice)
        return RemoteAnswers(self._dialect, call, choice, request_id, self._tasks, None if self._may_reuse else self._unfit)


class RemoteAnswers:
    """Implements `Answers`. Whoever stops reading ends the call, by which the server knows that nobody wants the rest.

    unfit: called where the server has prompt tokens cached; None where it may.
    """

    def __init__(
        self,
        dialect: Dialect,
        call: Any,
        choice: Choice,
        request_id: str,
        tasks: asyncio.TaskGroup,
        unfit: Callable[[str], None] | None,
    ) -> None:
        self._dialect = dialect
        self._call = call
        self._choice = choice
        self._request_id = request_id
        self._tasks = tasks
        self._unfit = unfit

    async def read(self) -> AsyncGenerator[Answer, None]:
        """See `Answers.read`."""
        output = WireOutput()
        try:
            async for message in self._call:
                cached_token_count = self._dialect.take(message, self._choice, output)
                prompt_token_count = len(asked(self._choice).prompt_token_ids)  # a count beyond it cannot be, and says nothing
                if self._unfit is not None and 0 < cached_token_count <= prompt_token_count:
                    # It did not when it connected, and does now: the tenant may have been served what another one has sent.
                    self._unfit(SHARES)
                    raise EngineFailed("the server reuses prefixes, which it must not for this request")
                yield Answer(output, cached_token_count)
                if output.finish_reason is not None:
                    await self._await_end()
                    return
        except grpc.aio.AioRpcError as error:
            raise engine_error(error, self._choice) from error
        finally:
            self._call.cancel()

    def abort(self) -> None:
        """See `Answers.abort`."""
        self._tasks.create_task(self._send_abort())

    async def _send_abort(self) -> None:
        try:
            await self._dialect.abort(self._request_id)
        except grpc.aio.AioRpcError as error:
            _log.warning("an abort was not taken (%s), ending the call", error.code().name)
            self._call.cancel()

    async def _await_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                async for _ in self._call:
                    pass
