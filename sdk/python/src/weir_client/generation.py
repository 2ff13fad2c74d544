"""One request for its caller: iterate it, cancel it, read its result.

Refusals before the first token are retried; later breaks of the stream are resumed (`resumption`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors
from weir_client.attempt import EVERYTHING, Attempt, Prefetch
from weir_client.connection import log
from weir_client.money import Money
from weir_client.prompt import update_frame
from weir_client.resumption import OUTPUT_GONE, Resumption
from weir_client.stream import SharedStream
from weir_client.terms import Terms, requested_differently
from weir_client.values import Admitted, Delta, Event, Limits, Partial, Result


class AsyncGeneration:
    """Stream of one answer, made by `AsyncClient.generate`. Nothing is sent before the first use.

    Leaving the `async with` block cancels a running request and waits (at most 2 s) until the
    server has settled it, so that `result` has usage and cost. Breaking out of `async for`, or
    cancelling the task, cancels it as well; `await anext(generation)` takes single deltas without
    that.
    """

    def __init__(self, stream: SharedStream, frame: pb.ClientFrame, terms: Terms) -> None:
        self.request_id = frame.request_id
        self.model = frame.start.model
        self._stream = stream
        self._frame = frame
        self._terms = terms
        self._deadline: float | None = None
        self._attempt: Attempt | None = None
        self._retry_count = 0
        self._is_renewed = False  # the key, after the server has refused one
        self._cancel_requested = asyncio.Event()
        self._failure: errors.WeirError | None = None  # of the previous attempt
        self._error: errors.WeirError | None = None  # the final one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unread: deque[Event] = deque()
        self._taking = asyncio.Lock()  # of concurrent readers, one gets each event

    @property
    def admitted(self) -> Admitted | None:
        """Admission, with input tokens and remaining quotas; None before it arrives."""
        return self._attempt.admitted if self._attempt else None

    @property
    def resume_count(self) -> int:
        """Number of times the request moved to another stream."""
        return self._attempt.resume_count if self._attempt else 0

    @property
    def partial(self) -> Partial:
        """Output received so far, whether or not the request has ended."""
        if self._attempt is None:
            return Partial(self.request_id, self.model, "", ())
        return self._attempt.partial()

    @property
    def holds_back(self) -> bool:
        """True if the server sends at most `prefetch_tokens` more than the reader has consumed."""
        return self._terms.prefetch_tokens is not None

    @property
    def done(self) -> bool:
        """True if the request has ended, with any outcome."""
        return self._error is not None or isinstance(self._outcome, Result)

    @property
    def result(self) -> Result:
        """Whole answer with finish reason, usage and cost. After a cancel, the delivered part.

        Raises: the WeirError that the request ended with; RuntimeError while it still runs.
        """
        if self._error is not None:
            raise self._error
        outcome = self._outcome
        if isinstance(outcome, Result):
            return outcome
        raise RuntimeError(
            "the generation still runs: iterate it to its end, leave its block, or wait for it"
        )

    def start(self) -> None:
        """Send the request unless it was sent already. The time of `timeout` begins here.

        Must run in the event loop. Raises: WeirError if the client cannot send the request.
        """
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        if self._terms.timeout_s is not None:
            self._deadline = self._loop.time() + self._terms.timeout_s
        self._begin_attempt()

    def cancel(self) -> None:
        """Ask the server to stop, without waiting. Output up to that point can still be read."""
        self._cancel_requested.set()
        if self._attempt is not None:
            self._attempt.cancel()

    async def update(
        self, *, max_output_tokens: int | None = None, max_cost: Money | None = None
    ) -> Limits:
        """Change limits of the running request and return the new ones.

        A limit below the present output or cost ends the request, as LENGTH or COST_LIMIT.

        Args:
            max_output_tokens: The new limit; None leaves it unchanged.
            max_cost: The new limit; None leaves it unchanged.

        Raises:
            InvalidRequest: A limit is invalid.
            FailedPrecondition: The request is not admitted yet, or has ended.
            Unavailable: No answer came.
        """
        if self._attempt is None:
            raise errors.FailedPrecondition(
                "the request was not sent yet", reason="NOT_ADMITTED", request_id=self.request_id
            )
        return await self._attempt.update(update_frame(max_output_tokens, max_cost))

    async def aclose(self) -> None:
        """Cancel the request if it still runs, and wait at most 2 s. Raises no WeirError."""
        if self._attempt is None or self.done:
            return
        self.cancel()
        await self._attempt.wait_ended()
        if isinstance(self._outcome, errors.WeirError):
            self._error = self._outcome

    async def wait(self) -> Result:
        """Wait for the end and return the result. Cancelling the wait cancels the request.

        Raises: WeirError.
        """
        while await self.next_event() is not None:
            pass
        return self.result

    async def take(self) -> list[Event]:
        """Wait for events and return all pending ones; an empty list at the end of the request.

        Do not mix it with iteration. Raises: WeirError if the request failed.
        """
        events = await self._take()
        for event in events:
            self._note_read(event)
        return events

    async def next_event(self) -> Event | None:
        """Wait for the next event; None at the end. Raises: WeirError if the request failed."""
        if not self._unread:
            async with self._taking:
                if not self._unread:
                    self._unread.extend(await self._take())
        event = self._unread.popleft() if self._unread else None
        self._note_read(event)
        return event

    async def events(self) -> AsyncIterator[Event]:
        """Yield every event: `Admitted`, `Progress`, `Delta`, `UsageUpdate`, `Resumed`."""
        while (event := await self.next_event()) is not None:
            yield event

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate over the deltas. Leaving the iterator early (`break`) cancels the request."""
        return _Deltas(self)

    async def __anext__(self) -> Delta:
        while (event := await self.next_event()) is not None:
            if isinstance(event, Delta):
                return event
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._abandon()

    @property
    def _outcome(self) -> Result | errors.WeirError | None:
        return self._attempt.outcome if self._attempt else None

    async def _take(self) -> list[Event]:
        self.start()
        while True:
            if self._error is not None:
                raise self._error
            attempt = self._attempt
            assert attempt is not None  # `start` made one, or raised
            try:
                await attempt.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
            events = attempt.take()
            if events:
                return events
            if not isinstance(attempt.outcome, errors.WeirError):
                return []
            await self._retry_or_raise(attempt.outcome)

    def _note_read(self, event: Event | None) -> None:
        if isinstance(event, Delta) and self._attempt is not None:
            self._attempt.read(len(event.token_ids))

    def _begin_attempt(self) -> None:
        frame = self._frame
        attempt = Attempt(self.request_id, self.model, frame.attach.after_seq, self._prefetch())
        self._attempt = attempt
        try:
            continuation = (
                Resumption(self._stream, attempt, frame, self._terms.keep_s)
                if self._terms.keep_s
                else None
            )
            if continuation is not None and frame.HasField("attach"):
                continuation.begin()
            else:
                self._stream.start(attempt, frame)
            if self._deadline is not None and self._terms.timeout_s is not None:
                attempt.expire_at(self._deadline, self._terms.timeout_s)
        except errors.WeirError as error:
            self._error = error
            raise

    def _prefetch(self) -> Prefetch | None:
        limit = self._terms.prefetch_tokens
        if limit is None and self._frame.HasField("attach"):
            # The server needs credit if the request was started with `prefetch_tokens`.
            limit = EVERYTHING
        return None if limit is None else Prefetch(limit)

    async def _retry_or_raise(self, error: errors.WeirError) -> None:
        """Wait and begin the next attempt, or end the request with `error` and raise it.

        Only before the first token, with the same request id. A refused request left no trace. A
        request that the server did accept is attached to, or answered with ALREADY_EXISTS or
        ABORTED; it never runs or is billed twice. These answers to a retry concern our own first
        attempt: its output is fetched if the server kept it, otherwise the error of that attempt is
        raised.
        """
        again = (
            None
            if self._cancel_requested.is_set()
            else requested_differently(self._frame, self._terms, error, self._failure)
        )
        if again is not None:
            log.debug("request %s: sent again, as the server refused its terms", self.request_id)
            self._frame, self._terms = again
            if self._frame.HasField("start"):
                self._stream.keep_max_s = self._terms.keep_s or 0.0
            self._begin_attempt()
            return
        if self._stream.renews(error) and not self._is_renewed and self._may_repeat(error):
            self._is_renewed = True
            self._begin_attempt()
            return
        wait_s = self._retry_wait_s(error)
        if wait_s is None:
            about_first = (
                isinstance(error, errors.AlreadyExists | errors.Aborted | errors.NotFound)
                or error.reason == OUTPUT_GONE
            )
            if self._failure is not None and about_first:
                error = self._failure
            self._error = error
            raise error
        self._failure = error
        self._retry_count += 1
        log.info(
            "request %s: retry %d in %.2f s, as it was refused: %s",
            self.request_id,
            self._retry_count,
            wait_s,
            error.message,
        )
        try:
            with self._stream.woken_at_close(self._cancel_requested):
                async with asyncio.timeout(wait_s):
                    await self._cancel_requested.wait()
        except TimeoutError:
            self._begin_attempt()
        except asyncio.CancelledError:
            self._error = error
            raise
        else:
            why = "the client was closed" if self._stream.closed else "cancelled"
            self._error = errors.Cancelled(
                f"{why} while waiting to try again", request_id=self.request_id
            )
            raise self._error

    def _retry_wait_s(self, error: errors.WeirError) -> float | None:
        loop = self._loop
        assert loop is not None
        if not self._may_repeat(error):
            return None
        wait_s = self._terms.retry.wait_s(error, self._retry_count)
        if wait_s is None or (
            self._deadline is not None and loop.time() + wait_s >= self._deadline
        ):
            return None
        return wait_s

    def _may_repeat(self, error: errors.WeirError) -> bool:
        """Return whether nothing of the request was delivered, billed or cancelled."""
        assert self._attempt is not None
        billed = error.partial is not None and error.partial.usage is not None
        return not (self._cancel_requested.is_set() or self._attempt.delivered or billed)

    def _abandon(self) -> None:
        """Cancel from the garbage collector, which runs in any thread, perhaps after the loop."""
        loop = self._loop
        if (
            loop is None
            or loop.is_closed()
            or self._attempt is None
            or self._attempt.outcome is not None
        ):
            return
        with contextlib.suppress(RuntimeError):  # the loop was just closed, and with it the request
            loop.call_soon_threadsafe(self._attempt.cancel)


class _Deltas:
    """Iterator over the deltas of a generation. Dropping it early cancels the generation."""

    def __init__(self, generation: AsyncGeneration) -> None:
        self._generation = generation

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await self._generation.__anext__()

    def __del__(self) -> None:
        self._generation._abandon()
