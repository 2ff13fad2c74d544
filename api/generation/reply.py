"""Output of one request: turns engine events into delta frames, after safety checks and under the lease of its hold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

import msgspec
import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.settings import Settings
from api.core.wire import OUTCOMES
from api.generation import frames
from api.generation.admission import Lease
from api.generation.life import Life
from api.generation.output import Output, UsageTelling
from api.generation.output_limits import UNBOUNDED, OutputLimits
from api.generation.start_frame import ValidStart
from api.generation.tools import CallReading
from inference.engine import ChoiceFinished, GrammarKind, SequenceFinished, TokensGenerated
from inference.errors import EngineError
from inference.safety.safety import EscapedOutputCheck, OutputCheck, SafetyChecker, Verdict
from inference.text.tools import Parsed, ToolCallParser
from metering.core.models import Outcome
from metering.quotas.quota_rules import QuotaState
from metering.quotas.quotas import QuotaExceeded

Told = TokensGenerated | ChoiceFinished | SequenceFinished | EngineError

log = structlog.get_logger(__name__)


def closed(*_: object) -> None:
    """Nobody is told."""


class Reply:
    """The frames of one request. No output is handed on before `open`, nor once the request was stopped."""

    def __init__(self, output: Output, start: ValidStart, life: Life, settings: Settings) -> None:
        self.output = output
        self.exhausted: tuple[QuotaState, ...] = ()  # the quotas that ended the request, if any did
        self._start = start
        self._life = life
        self._filters: tuple[OutputFilter, ...] = ()  # by choice; empty: outputs are not checked
        self._choice_ends: dict[int, Outcome] = {}  # of several choices, those that have ended
        self.call_reading: CallReading | None = None  # how tool calls are read; None: there are none
        self.called_choices: set[int] = set()  # those with tool calls in them
        self._parsers: dict[int, ToolCallParser] = {}  # by choice, while output may come
        self._limits: OutputLimits
        self._lease: Lease
        self._settings = settings
        self._run: Callable[[Coroutine[None, None, None]], object] = closed
        self._on_end: Callable[[], None] = closed
        self._late: deque[Told] | None = None  # while a task hands it on
        self._has_to_wait = False  # for checks, or for a client that a search says much to at once

    def open(
        self,
        lease: Lease,
        limits: OutputLimits,
        safety: SafetyChecker | None,
        run: Callable[[Coroutine[None, None, None]], object],
        on_end: Callable[[], None],
    ) -> None:
        """From now on output may come, under this lease.

        safety: what outputs are checked by; None if they are not. run: runs what has to wait, and is told if it breaks.
        on_end: called when all output has been handed on.
        """
        self._run, self._on_end = run, on_end
        self._lease, self._limits = lease, limits
        self.output.hold_id = lease.admitted.hold_id
        if self._start.usage_interval_tokens is not None:
            self.output.usage_telling = UsageTelling(self._start.usage_interval_tokens, lease.admitted.prices)
        if safety is not None:
            self._filters = open_filters(safety, self._start.choice_count, has_json=self._has_json)
        self._has_to_wait = bool(self._filters) or self._start.beam_search is not None
        if self.call_reading is not None:
            self._parsers = {index: self.call_reading.open() for index in range(self._start.choice_count)}

    def close(self) -> None:
        """The request has ended; nothing here refers to it any more."""
        self._run = self._on_end = closed
        self._late = None

    @property
    def _has_json(self) -> bool:
        """Whether clients will parse the output, or calls in it."""
        kept = self._start.response_format
        return self.call_reading is not None or (kept is not None and kept.kind is GrammarKind.JSON_SCHEMA)

    def stopped(self) -> None:
        """The request was stopped: what was held back as a part of a call goes out, or nothing that waits does."""
        if not self._life.discards:
            for choice_index in list(self._parsers):
                self._say_rest(choice_index, "")
        else:
            self.output.discard()

    def discard(self) -> None:
        """Deliver nothing of what still waits for the transport."""
        self._life.discards = True
        self.output.discard()

    def take(self, event: Told) -> None:
        """Hand on an engine event in order: at once, or by a task if checks, the client or the lease make it wait.

        Raises: EngineError that was told, OSError if output has to be journalled and cannot be.
        """
        if self._late is not None:
            self._late.append(event)
            return
        if isinstance(event, TokensGenerated):
            lease, limits = self._lease, self._limits
            token_count = self.output.said_token_count + len(event.token_ids)
            if not self._has_to_wait and token_count <= lease.leased_token_count:
                if self._life.end is not None:
                    return
                if token_count > limits.token_count_max:
                    self._life.stop(limits.outcome)
                    return
                if token_count >= lease.leased_token_count - self._settings.lease_margin_tokens:
                    lease.anticipate(token_count)
                self._say(event)
                return
        elif isinstance(event, EngineError):
            raise event
        elif not self._filters or self._life.end is not None:
            self._end(event)
            return
        self._late = deque((event,))
        self._run(self._hand_on_late(self._late))

    @property
    def free_token_count(self) -> int:
        """So many tokens in all may be said as they come, unless a stop, a change of limits or log-probabilities come between."""
        if self._has_to_wait or self._late is not None or self._parsers or self._life.end is not None:
            return 0
        unsent_max = self._settings.outbox_tokens_per_request_max
        return min(
            self._lease.leased_token_count - self._settings.lease_margin_tokens - 1,
            self._limits.token_count_max - 1,
            self.output.usage.delivered_token_count + unsent_max,
        )

    async def _hand_on_late(self, late: deque[Told]) -> None:
        """What has to wait, and what comes meanwhile."""
        while late:
            event = late.popleft()
            if isinstance(event, TokensGenerated):
                await self._hand_on_waiting(event)
            elif isinstance(event, EngineError):
                raise event
            elif self._filters:
                await self._end_checked(event)
            else:
                self._end(event)
        self._late = None

    async def _hand_on_waiting(self, event: TokensGenerated) -> None:
        """Give on what of the new output, and of what was held back before, the safety stage lets go.

        A beam search says much at once at its end: then the client is waited for, and given up only if it stalls.
        """
        if self._start.beam_search and self.output.unsent_token_count >= self._settings.outbox_tokens_per_request_max // 2:
            taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.flush(lambda: None if taken.done() else taken.set_result(None))
            await taken
        if not self._filters:
            await self._hand_on_checked(event)
        elif self._life.end is None:
            checked = self._filters[event.choice_index]
            for part in await checked.push(event):
                await self._hand_on_checked(part)
            self._note_filtered(checked, event.choice_index)

    async def _end_checked(self, event: ChoiceFinished | SequenceFinished) -> None:
        """Hand on the end of a choice, and what the safety checks held back of it."""
        index = event.choice_index if isinstance(event, ChoiceFinished) else 0
        if self._life.end is None and (isinstance(event, ChoiceFinished) or self._start.choice_count == 1):
            checked = self._filters[index]
            for part in await checked.finish(event.text):
                await self._hand_on_checked(part)
            self._note_filtered(checked, index)
            event = msgspec.structs.replace(event, text="")
        self._end(event)

    def _end(self, event: ChoiceFinished | SequenceFinished) -> None:
        """A choice or the whole has ended by itself: what was held back of it goes out, unless the request was stopped.

        A choice whose last tokens were not handed on ended as the request does.
        """
        if self._life.end is None and isinstance(event, ChoiceFinished):
            self._say_rest(event.choice_index, event.text)
            if self._life.end is None:
                self._choice_ends[event.choice_index] = OUTCOMES[event.reason]
        elif self._life.end is None and self._start.choice_count == 1:
            self._say_rest(0, event.text)
        if isinstance(event, SequenceFinished):
            self._on_end()

    def ends_of_choices(self, cut: Outcome) -> dict[int, Outcome]:
        """How each of several choices ended; what the end of the whole request cut off ended as that did."""
        if self._start.choice_count == 1:
            return {}
        ends = {index: self._choice_ends.get(index, cut) for index in range(self._start.choice_count)}
        return {index: cut if end is Outcome.CANCELLED else end for index, end in ends.items()}

    def flush(self, then: Callable[[], None]) -> None:
        """Call `then` in a later turn of the loop, once the client has taken everything; one that takes nothing is given up.

        An answer that is taken whole waits for its other parts, and whoever writes it looks after the client.
        """
        whole = self.output.takes_whole
        if whole:
            self.output.complete()
        self.output.when_taken(then, None if whole else self._settings.client_stall_max_s)

    async def _hand_on_checked(self, event: TokensGenerated) -> None:
        """Give one step's tokens to the outbox once the lease covers them, unless the request was stopped."""
        if self._life.end is not None:
            return
        token_count = self.output.said_token_count + len(event.token_ids)
        if token_count > self._limits.token_count_max:
            self._life.stop(self._limits.outcome)
            return
        try:
            await self._lease.cover(token_count)
        except QuotaExceeded as refusal:
            self.exhausted = refusal.failing
            self._life.stop(Outcome.QUOTA_EXHAUSTED)
        if self._life.end is None:
            self._say(event)

    def _say(self, event: TokensGenerated) -> None:
        """Give one step's tokens to the outbox, and end the request where its limits or its client's reading want it."""
        logprobs = frames.token_logprobs(event.logprobs) if event.logprobs else ()
        output, unsent_max = self.output, self._settings.outbox_tokens_per_request_max
        if self._parsers and (parser := self._parsers.get(event.choice_index)) is not None:
            text, calls = self._parsed(event.choice_index, parser.push(event.text))
            output.say(event.choice_index, text, event.token_ids, logprobs, calls)
            if self.call_reading is not None and self.call_reading.ends_with_call and parser.complete_count:
                self._life.stop(Outcome.STOP)
        else:
            output.say(event.choice_index, event.text, event.token_ids, logprobs)
        if output.said_token_count >= self._limits.token_count_max:
            self.end_at_limit()
        if output.said_token_count - output.usage.delivered_token_count > unsent_max and not output.takes_whole:
            self._life.stop(Outcome.SLOW_CONSUMER)

    def _say_rest(self, choice_index: int, text: str) -> None:
        """The last of a choice: text that belongs to no further token, and what was held since it might have become a call."""
        calls: list[pb.ToolCallDelta] = []
        if (parser := self._parsers.pop(choice_index, None)) is not None:
            before, begun = self._parsed(choice_index, parser.push(text))
            rest, ended = self._parsed(choice_index, parser.finish())
            text, calls = before + rest, begun + ended
        if text or calls:
            self.output.say(choice_index, text, (), (), calls)

    def _parsed(self, choice_index: int, parsed: Parsed) -> tuple[str, list[pb.ToolCallDelta]]:
        if parsed.calls:
            self.called_choices.add(choice_index)
        return parsed.text, frames.tool_calls(parsed.calls)

    def end_at_limit(self) -> None:
        """End the request if it has all the output that it may have."""
        if (
            self._life.end is None
            and self._limits.token_count_max < UNBOUNDED
            and self.output.said_token_count >= self._limits.token_count_max
        ):
            self._life.stop(self._limits.outcome)

    def _note_filtered(self, output: OutputFilter, choice_index: int) -> None:
        if output.hit is not None:
            log.info("output_filtered", rule=output.hit, choice_index=choice_index)
            self._life.stop(Outcome.FILTERED)


class OutputFilter:
    """One output of one request."""

    def __init__(self, check: OutputCheck, choice_index: int = 0) -> None:
        self.hit: str | None = None  # what was found; nothing more goes out then
        self._check = check
        self._choice_index = choice_index
        self._waiting: deque[tuple[TokensGenerated, int]] = deque()  # with the length of all text up to its end
        self._char_count = 0

    async def push(self, event: TokensGenerated) -> list[TokensGenerated]:
        """Take new output; what may be given out now, in order. Raises `SafetyUnavailable`; what waits then never goes out."""
        self._char_count += len(event.text)
        self._waiting.append((event, self._char_count))
        if not event.text:
            return []
        return self._release(await self._check.push(event.text))

    async def finish(self, text: str) -> list[TokensGenerated]:
        """Take the last text, which belongs to no further token; what may be given out now, the text itself with the last of it."""
        if text:
            self._char_count += len(text)
            self._waiting.append((TokensGenerated((), text, (), self._choice_index), self._char_count))
        verdict = await self._check.push(text) if text else None
        if verdict is None or verdict.hit is None:
            verdict = await self._check.finish()
        if verdict.hit is None:
            released = [event for event, _ in self._waiting]
            self._waiting.clear()
            return released
        return self._release(verdict)

    def _release(self, verdict: Verdict) -> list[TokensGenerated]:
        """Events whose text is safe to its end; the ones without text before them go with them, those after them do not."""
        self.hit = verdict.hit
        count = 0
        for index, (event, end) in enumerate(self._waiting, 1):
            if end > verdict.safe_char_count:
                break
            if event.text:
                count = index
        return [self._waiting.popleft()[0] for _ in range(count)]


def open_filters(checker: SafetyChecker, choice_count: int, *, has_json: bool = False) -> tuple[OutputFilter, ...]:
    """One filter per choice; none if outputs are not checked. has_json: they are checked as whoever parses them reads them, too."""
    opened = [checker.open_output() for _ in range(choice_count)]
    checks = [EscapedOutputCheck(check) if has_json else check for check in opened if check is not None]
    return tuple(OutputFilter(check, index) for index, check in enumerate(checks))
