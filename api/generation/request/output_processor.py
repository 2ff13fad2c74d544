"""Output processor of one request: turns engine events into delta frames, after safety checks and
within the lease.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

import msgspec
import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.settings import DeliverySettings
from api.core.wire import OUTCOMES_BY_REASON, finish_reason
from api.generation.delivery import frames
from api.generation.delivery.delta import NO_THOUGHT, joined_calls
from api.generation.delivery.output_buffer import OutputBuffer, UsageInterval
from api.generation.parsing.start_frame import ValidStart
from api.generation.parsing.tools import CallReading
from api.generation.request.admission import HoldHandle
from api.generation.request.limits import UNBOUNDED, OutputLimits
from api.generation.state import EndDecision
from inference.engine import (
    ChoiceFinished,
    GrammarKind,
    SequenceFinished,
    StoppedBy,
    TokensGenerated,
)
from inference.errors import EngineError
from inference.safety.safety import EscapedOutputCheck, OutputCheck, SafetyChecker, Verdict
from inference.text.call_parser import CallPiece, Parsed, ToolCallParser
from metering.core.models import Outcome
from metering.quotas.quota_rules import QuotaState
from metering.quotas.quotas import QuotaExceeded

EngineOutput = TokensGenerated | ChoiceFinished | SequenceFinished | EngineError

log = structlog.get_logger(__name__)


class Owner(Protocol):
    """Request whose output is processed."""

    output: OutputBuffer
    start: ValidStart
    decision: EndDecision

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine as a task, and handle its errors."""

    def output_ended(self, outcome: Outcome) -> None:
        """Handle that all output of the engine was passed on. `outcome` is how the engine ended."""


class OutputProcessor:
    """Converts the engine's output of one request to deltas. Passes nothing on after a stop.

    `exhausted` has the quotas that ended the request. `stops` has the stop sequence or token of the
    request that ended a choice, by its index. `called_choices` are the choices with tool calls.
    """

    exhausted: tuple[QuotaState, ...] = ()
    _filters: tuple[OutputFilter, ...] = ()  # by choice; empty: outputs are not checked
    # Events waiting for a task that handles them in order.
    _late: deque[EngineOutput] | None = None

    def __init__(
        self,
        owner: Owner,
        hold: HoldHandle,
        limits: OutputLimits,
        call_reading: CallReading | None,
        settings: DeliverySettings,
    ) -> None:
        """`call_reading` says how tool calls are parsed; None if the request has no tools."""
        self._owner = owner
        self._start, self._decision = owner.start, owner.decision
        self.output = output = owner.output
        output.hold_id = hold.admitted.hold_id
        if self._start.usage_interval_tokens is not None:
            output.usage_interval = UsageInterval(
                self._start.usage_interval_tokens, hold.admitted.prices
            )
        self.stops: dict[int, StoppedBy] = {}
        self.called_choices: set[int] = set()
        self._hold, self._limits = hold, limits
        self._call_reading = call_reading
        self._settings = settings
        self._choice_ends: dict[int, Outcome] = {}  # of several choices, those that have ended
        self._parsers: dict[int, ToolCallParser] = {}  # by choice, while output may arrive
        # For checks, or for the client if a search sends much at once.
        self._has_to_wait = self._start.beam_search is not None
        sampling = self._start.sampling
        self._has_logprobs = (
            sampling.top_logprobs is not None or sampling.prompt_logprobs is not None
        )

    def open(self, safety: SafetyChecker | None) -> None:
        """Open the safety checks of the output, and the parsers of tool calls.

        With `safety` None, the output is not checked.
        """
        if safety is not None:
            self._filters = open_filters(safety, self._start.choice_count, has_json=self._has_json)
            self._has_to_wait = self._has_to_wait or bool(self._filters)
        if self._call_reading is not None:
            self._parsers = {
                index: self._call_reading.open() for index in range(self._start.choice_count)
            }

    @property
    def _has_json(self) -> bool:
        """True if clients will parse the output, or the tool calls in it, as JSON."""
        kept = self._start.response_format
        return self._call_reading is not None or (
            kept is not None and kept.kind is GrammarKind.JSON_SCHEMA
        )

    def stopped(self) -> None:
        """Handle a stop: send text held back as a possible tool call, or discard the output."""
        if not self._decision.discards:
            for choice_index in list(self._parsers):
                self._append_rest(choice_index, "")
        else:
            self.output.discard()

    def discard(self) -> None:
        """Discard output that has not been handed to the transport."""
        self._decision.discards = True
        self.output.discard()

    def take(self, event: EngineOutput) -> None:
        """Pass on an engine event in order.

        This happens at once, or in a task if safety checks, the client or the lease make it wait.
        Raises JournalUnavailable, or the EngineError that it is given.
        """
        if self._late is not None:
            self._late.append(event)
            return
        if isinstance(event, TokensGenerated):
            hold, limits = self._hold, self._limits
            token_count = self.output.appended_token_count + len(event.token_ids)
            if token_count <= hold.leased_token_count and not self._has_to_wait:
                if self._decision.is_stopped:
                    return
                if token_count > limits.token_count_max:
                    self._decision.stop(limits.outcome)
                    return
                if token_count > hold.unchecked_until:
                    hold.anticipate(token_count)
                self._append(event)
                return
        elif isinstance(event, EngineError):
            raise event
        elif not self._filters or self._decision.is_stopped:
            self._end(event)
            return
        self._late = deque((event,))
        self._owner.run(self._forward_late(self._late))

    @property
    def needs_steps(self) -> bool:
        """True if the output is checked, limited, kept or timed before it is complete."""
        reading, limits, start = self._call_reading, self._limits, self._start
        return (
            self._has_to_wait
            or start.choice_count > 1
            or start.keep_s is not None
            or start.start_timeout_s is not None
            or (reading is not None and reading.ends_with_call)
            or limits.max_cost is not None
            or self._hold.leased_token_count < limits.engine_token_count_max
        )

    @property
    def unchecked_until(self) -> int:
        """Number of output tokens in total up to which no token needs a check of lease or limits.

        0 if tokens have log-probabilities. Up to this number a token costs one comparison; up to
        `HoldHandle.unchecked_until` the lease is not extended; up to `leased_token_count` a token
        does not wait for the extension.
        """
        if (
            self._has_to_wait
            or self._has_logprobs
            or self._late is not None
            or self._parsers
            or self._decision.is_stopped
        ):
            return 0
        unsent_max = self._settings.unread_tokens_max
        return min(
            self._hold.unchecked_until,
            self._limits.token_count_max - 1,
            self.output.usage.journalled_token_count + unsent_max,
        )

    async def _forward_late(self, late: deque[EngineOutput]) -> None:
        """Pass on events that have to wait, and those that arrive in the meantime."""
        while late:
            event = late.popleft()
            if isinstance(event, TokensGenerated):
                await self._forward_waiting(event)
            elif isinstance(event, EngineError):
                raise event
            elif self._filters:
                await self._end_checked(event)
            else:
                self._end(event)
        self._late = None

    async def _forward_waiting(self, event: TokensGenerated) -> None:
        """Check output, and pass on what the safety checks have released so far.

        A beam search sends its whole output at the end, so this waits for the client unless it
        stalls.
        """
        if (
            self._start.beam_search
            and self.output.unsent_token_count >= self._settings.unread_tokens_max // 2
        ):
            taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.flush(lambda: None if taken.done() else taken.set_result(None))
            await taken
        if not self._filters:
            await self._forward_checked(event)
        elif not self._decision.is_stopped:
            checked = self._filters[event.choice_index]
            for part in await checked.push(event):
                await self._forward_checked(part)
            self._note_filtered(checked, event.choice_index)

    async def _end_checked(self, event: ChoiceFinished | SequenceFinished) -> None:
        """Handle the end of a choice: finish its checks and pass on the output held back."""
        index = event.choice_index if isinstance(event, ChoiceFinished) else 0
        if not self._decision.is_stopped and (
            isinstance(event, ChoiceFinished) or self._start.choice_count == 1
        ):
            checked = self._filters[index]
            for part in await checked.finish(event.text):
                await self._forward_checked(part)
            self._note_filtered(checked, index)
            event = msgspec.structs.replace(event, text="")
        self._end(event)

    def _end(self, event: ChoiceFinished | SequenceFinished) -> None:
        """Handle the end of a choice or of all output; unless stopped, send held-back output.

        A choice whose last tokens were not sent ends with the outcome of the request.
        """
        if not self._decision.is_stopped and isinstance(event, ChoiceFinished):
            self._append_rest(event.choice_index, event.text, event.reasoning)
            if not self._decision.is_stopped:
                stop = event.stopped_by
                self._end_choice(event.choice_index, OUTCOMES_BY_REASON[event.reason], stop)
        elif not self._decision.is_stopped and self._start.choice_count == 1:
            if event.text or event.reasoning or self._parsers:
                self._append_rest(0, event.text, event.reasoning)
            if event.stopped_by is not None and not self._decision.is_stopped:
                self.stops[0] = event.stopped_by
        if isinstance(event, SequenceFinished):
            self._owner.output_ended(OUTCOMES_BY_REASON[event.reason])

    def _end_choice(self, index: int, outcome: Outcome, stop: StoppedBy) -> None:
        """Record and send the end of one of several choices.

        A cancelled choice ends with the request. `stop` is the stop sequence or token that ended
        it, or None.
        """
        self._choice_ends[index] = outcome
        if stop is not None:
            self.stops[index] = stop
        if outcome is not Outcome.CANCELLED:
            reason = finish_reason(outcome, called=index in self.called_choices)
            end = pb.ChoiceEnd(choice_index=index, reason=reason)
            frames.set_stop(end, stop)
            self.output.end_choice(end)

    def ends_of_choices(self, cut: Outcome) -> dict[int, Outcome]:
        """Return the outcome of each choice; unfinished ones get `cut`, the request's outcome."""
        ends = {
            index: self._choice_ends.get(index, cut) for index in range(self._start.choice_count)
        }
        return {index: cut if end is Outcome.CANCELLED else end for index, end in ends.items()}

    def flush(self, then: Callable[[], None]) -> None:
        """Call `then` in a later turn of the loop, once the client has everything or stalls.

        An answer that is sent in one piece waits for its other parts; its writer watches the
        client.
        """
        whole = self.output.is_whole
        if whole:
            self.output.complete()
        self.output.when_taken(then, None if whole else self._settings.stall_max_s)

    async def _forward_checked(self, event: TokensGenerated) -> None:
        """Wait until the lease covers the tokens of one step, then send them unless stopped."""
        if self._decision.is_stopped:
            return
        token_count = self.output.appended_token_count + len(event.token_ids)
        if token_count > self._limits.token_count_max:
            self._decision.stop(self._limits.outcome)
            return
        try:
            await self._hold.cover(token_count)
        except QuotaExceeded as refusal:
            self.exhausted = refusal.failing
            self._decision.stop(Outcome.QUOTA_EXHAUSTED)
        if not self._decision.is_stopped:
            self._append(event)

    def _append(self, event: TokensGenerated) -> None:
        """Send the tokens of one step; end the request at its limits or after a final tool call."""
        if event.prompt_logprobs:
            for frame in frames.prompts(event.prompt_logprobs):
                self.output.push(frame)
        thought = (
            (event.reasoning, event.reasoning_token_count)
            if event.reasoning_token_count
            else NO_THOUGHT
        )
        output, unsent_max = self.output, self._settings.unread_tokens_max
        if self._parsers and (parser := self._parsers.get(event.choice_index)) is not None:
            text, calls = self._parsed(event.choice_index, parser.push(event.text))
            output.append(event.choice_index, text, event.token_ids, event.logprobs, calls, thought)
            if (
                self._call_reading is not None
                and self._call_reading.ends_with_call
                and parser.complete_count
            ):
                self._decision.stop(Outcome.STOP)
        else:
            output.append(
                event.choice_index, event.text, event.token_ids, event.logprobs, (), thought
            )
        if output.appended_token_count >= self._limits.token_count_max:
            self.end_at_limit()
        if (
            output.appended_token_count - output.usage.journalled_token_count > unsent_max
            and not output.is_whole
        ):
            # This is one of three triggers of SLOW_CONSUMER. `FlowControl` counts the time in which
            # tokens wait for credit, `Flush.check_reading` the time without progress at the
            # end.
            detail = (
                f"more than {unsent_max} tokens waited for the client: read faster, or ask for"
                " fewer; the server's limit is WEIR_OUTBOX_TOKENS_PER_REQUEST_MAX"
            )
            self._decision.stop(Outcome.SLOW_CONSUMER, detail=detail)

    def _append_rest(self, choice_index: int, text: str, reasoning: str = "") -> None:
        """Send the end of a choice: its last text and thinking, which have no tokens, and text that
        was held back as a possible tool call.
        """
        calls: Sequence[CallPiece] = ()
        if (parser := self._parsers.pop(choice_index, None)) is not None:
            before, begun = self._parsed(choice_index, parser.push(text))
            rest, ended = self._parsed(choice_index, parser.finish())
            text, calls = before + rest, joined_calls([*begun, *ended])
        if text or calls or reasoning:
            thought = (reasoning, 0) if reasoning else NO_THOUGHT
            self.output.append(choice_index, text, (), (), calls, thought)

    def _parsed(self, choice_index: int, parsed: Parsed) -> tuple[str, Sequence[CallPiece]]:
        if parsed.calls:
            self.called_choices.add(choice_index)
        return parsed.text, parsed.calls

    def end_at_limit(self) -> None:
        """End the request if it has reached its output limit."""
        if (
            not self._decision.is_stopped
            and self._limits.token_count_max < UNBOUNDED
            and self.output.appended_token_count >= self._limits.token_count_max
        ):
            self._decision.stop(self._limits.outcome)

    def _note_filtered(self, output: OutputFilter, choice_index: int) -> None:
        if output.hit is not None:
            log.info("output_filtered", rule=output.hit, choice_index=choice_index)
            self._decision.stop(Outcome.FILTERED)


class OutputFilter:
    """Safety filter of the output of one choice."""

    def __init__(self, check: OutputCheck, choice_index: int = 0) -> None:
        self.hit: str | None = None  # the rule that matched; no more output is released then
        self._check = check
        self._choice_index = choice_index
        # Each event with the length of all text up to its end.
        self._waiting: deque[tuple[TokensGenerated, int]] = deque()
        self._char_count = 0

    async def push(self, event: TokensGenerated) -> list[TokensGenerated]:
        """Check more output, and return what is released, in order.

        Thinking is not checked. Raises SafetyUnavailable; output that was held back is then lost.
        """
        if event.reasoning_token_count and not (event.text or self._waiting):
            return [event]
        self._char_count += len(event.text)
        self._waiting.append((event, self._char_count))
        if not event.text:
            return []
        return self._release(await self._check.push(event.text))

    async def finish(self, text: str) -> list[TokensGenerated]:
        """Check the last text, which has no tokens, and return everything that is released."""
        if text:
            self._char_count += len(text)
            self._waiting.append(
                (TokensGenerated((), text, (), self._choice_index), self._char_count)
            )
        verdict = await self._check.push(text) if text else None
        if verdict is None or verdict.hit is None:
            verdict = await self._check.finish()
        if verdict.hit is None:
            released = [event for event, _ in self._waiting]
            self._waiting.clear()
            return released
        return self._release(verdict)

    def _release(self, verdict: Verdict) -> list[TokensGenerated]:
        """Remove and return the events whose text is safe, with the textless events before them."""
        self.hit = verdict.hit
        count = 0
        for index, (event, end) in enumerate(self._waiting, 1):
            if end > verdict.safe_char_count:
                break
            if event.text:
                count = index
        return [self._waiting.popleft()[0] for _ in range(count)]


def open_filters(
    checker: SafetyChecker, choice_count: int, *, has_json: bool = False
) -> tuple[OutputFilter, ...]:
    """Create a safety filter for each choice; none if the checker does not check output.

    With `has_json`, text is also checked as a JSON parser reads it.
    """
    opened = [checker.open_output() for _ in range(choice_count)]
    checks = [
        EscapedOutputCheck(check) if has_json else check for check in opened if check is not None
    ]
    return tuple(OutputFilter(check, index) for index, check in enumerate(checks))
