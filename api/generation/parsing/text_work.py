"""Threads that prepare prompts, and limits on the text that is being prepared.

The text of a request is rendered and tokenized before its hold, whatever budget its key has. The
text that is in preparation or waits for it is therefore limited in characters, per API key, per
organization and in total (`permit`). Threads are shared fairly between organizations (`run`): the
one with the least work done is next (`virtual_tokens.Line`; a character costs one unit). Work of a
cancelled request is dropped unless a thread has started on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from api.core.errors import Overloaded, PreparationLimit
from api.core.settings import PreparationSettings
from api.queue.virtual_tokens import Line
from inference.text.tokenizer import ChatMessage
from inference.text.tools import Tool
from metering.quotas.quota_rules import Owner

# Cost of each message or text besides its characters, as a template takes for an empty one.
MESSAGE_COST_CHARS = 30
# Characters: below a millisecond, of which moving it to a thread would be a tenth.
INLINE_COST_MAX = 2000
LONG_S = 0.01  # of a call after which a thread may have to pause

Value = TypeVar("Value")


@dataclass(slots=True)
class Cost:
    """Processor time of a call, in seconds."""

    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Work(Generic[Value]):
    """Call that waits for a thread: an entry of `Line`."""

    number: int
    input_token_count: int  # in characters
    call: Callable[[], Value]
    result: asyncio.Future[Value]
    output_token_count_max: int = field(default=0, init=False)
    cost: Cost = field(default_factory=Cost, init=False)


class TextWork:
    """Threads and limits for preparing text in one process. Used by one event loop."""

    def __init__(
        self,
        settings: PreparationSettings,
        weights: Mapping[int, float] | None = None,
        rest: float = 0.0,
    ) -> None:
        """`weights` are those of the engine queues, by organization id as an integer.

        After a long call, a thread pauses for `rest` times the processor time of the call.
        """
        self._settings = settings
        self._weights = {} if weights is None else weights  # the owner changes it
        self._rest = rest
        self.taken_chars = 0  # of requests that are being prepared or wait for it
        self._taken: Counter[uuid.UUID] = Counter()  # by API key and by organization
        self._threads = ThreadPoolExecutor(settings.thread_count, "weir-text")
        self._line: Line[Work[Any]] = Line()
        self.running_count = 0  # calls that run in threads
        self._number = 0

    @property
    def waiting_count(self) -> int:
        """Number of calls that no thread has started on."""
        return self._line.waiting_count

    @contextlib.contextmanager
    def permit(self, owner: Owner, chars: int) -> Iterator[None]:
        """Reserve the preparation of this many characters.

        A single request may be as large as a message. An organization may take at most as much as
        it leaves free, so that others always find room. Raises: PreparationLimit, Overloaded.
        """
        of_key, of_organization = self._taken[owner.api_key_id], self._taken[owner.organization_id]
        if of_key and of_key + chars > self._settings.chars_per_key_max:
            raise PreparationLimit("API key", of_key, chars, self._settings.chars_per_key_max)
        free_chars = self._settings.chars_max - self.taken_chars
        if of_organization and of_organization + chars > free_chars - chars:
            raise PreparationLimit(
                "organization", of_organization, chars, max((of_organization + free_chars) // 2, 0)
            )
        if self.taken_chars and chars > free_chars:
            raise Overloaded(
                f"This server prepares prompts of {self.taken_chars} characters, and {chars} more"
                f" would exceed its limit of {self._settings.chars_max}. Send the request again."
            )
        self.taken_chars += chars
        self._taken.update({owner.api_key_id: chars, owner.organization_id: chars})
        try:
            yield
        finally:
            self.taken_chars -= chars
            for each in (owner.api_key_id, owner.organization_id):
                self._taken[each] -= chars
                if not self._taken[each]:
                    del self._taken[each]

    async def run(
        self, organization_id: uuid.UUID, chars: int, call: Callable[[], Value]
    ) -> tuple[Value, float]:
        """Run a call in a thread; return result and processor seconds. Raises the call's error."""
        self._number += 1
        work = Work(self._number, chars, call, asyncio.get_running_loop().create_future())
        weight = self._weights.get(organization_id.int, 1.0)
        tenant = self._line.join(work, organization_id, weight)
        self._begin_next()
        try:
            return await work.result, work.cost.seconds
        finally:
            if work in tenant.waiting:
                self._line.leave(work, tenant)

    def _begin_next(self) -> None:
        loop = asyncio.get_running_loop()
        while (
            self.running_count < self._settings.thread_count
            and (tenant := self._line.next_tenant()) is not None
        ):
            work = self._line.take(tenant, 0.0)
            self._line.begun(work, tenant)
            self._line.ended(work, tenant)
            self.running_count += 1
            loop.run_in_executor(self._threads, timed, work.call, work.cost).add_done_callback(
                lambda done, work=work: self._ended(work, done)  # type: ignore[misc]
            )

    def _ended(self, work: Work[Any], done: asyncio.Future[Any]) -> None:
        if (rest_s := self._rest * work.cost.seconds) > self._rest * LONG_S:
            asyncio.get_running_loop().call_later(rest_s, self._rested)
        else:
            self._rested()
        error = None if done.cancelled() else done.exception()
        if not work.result.done():
            if done.cancelled():
                work.result.cancel()
            elif error is not None:
                work.result.set_exception(error)
            else:
                work.result.set_result(done.result())

    def _rested(self) -> None:
        self.running_count -= 1
        self._begin_next()


def timed(call: Callable[[], Value], cost: Cost) -> Value:
    """Run a call and record its cost. Its error keeps this frame, so pass no `Work` in."""
    began_at = time.thread_time()
    try:
        return call()
    finally:
        cost.seconds = time.thread_time() - began_at


def conversation_size(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> tuple[int, int]:
    """Count the characters of messages, tool calls and tools, and the number of these parts."""
    chars = sum([len(message.content) + len(message.reasoning) for message in messages])
    parts = len(messages) + len(tools)
    for message in messages:
        for call in message.tool_calls:
            chars += len(call.name) + len(call.arguments)
            parts += 1
    return (
        chars
        + sum([len(tool.name) + len(tool.description) + len(tool.parameters) for tool in tools]),
        parts,
    )
