"""What one request says to its client: engine events become frames, checked, covered by the lease, and put into the outbox."""

from __future__ import annotations

from collections import deque

import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.settings import Settings
from api.generation import frames
from api.generation.admission import Lease
from api.generation.life import Life
from api.generation.output import Output, UsageTelling
from api.generation.output_limits import UNBOUNDED, OutputLimits
from api.generation.start_frame import ValidStart
from api.generation.tools import CallReading
from inference.engine import GrammarKind, TokensGenerated
from inference.safety.safety import EscapedOutputCheck, OutputCheck, SafetyChecker, Verdict
from inference.text.tools import Parsed, ToolCallParser
from metering.core.models import Outcome
from metering.quotas.quota_rules import QuotaState
from metering.quotas.quotas import QuotaExceeded

log = structlog.get_logger(__name__)


class Reply:
    """The frames of one request. No output is handed on before `open`, nor once the request was stopped."""

    def __init__(self, output: Output, start: ValidStart, life: Life) -> None:
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
        self._settings: Settings
        self._has_to_wait = False  # for checks, or for a client that a search says much to at once

    def open(self, lease: Lease, limits: OutputLimits, settings: Settings, safety: SafetyChecker | None) -> None:
        """From now on output may come, under this lease. safety: what outputs are checked by; None if they are not."""
        self._lease, self._limits, self._settings = lease, limits, settings
        self.output.hold_id = lease.admitted.hold_id
        if self._start.usage_interval_tokens is not None:
            self.output.usage_telling = UsageTelling(self._start.usage_interval_tokens, lease.admitted.prices)
        self._filters = open_filters(safety, self._start.choice_count, has_json=self._has_json)
        self._has_to_wait = bool(self._filters) or self._start.beam_search is not None
        if self.call_reading is not None:
            self._parsers = {index: self.call_reading.open() for index in range(self._start.choice_count)}

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

    def hand_on_now(self, event: TokensGenerated) -> bool:
        """Give on new output unless checks, the client or the lease have to be waited for; False if so, and nothing was done."""
        lease, limits, output = self._lease, self._limits, self.output
        token_count = output.said_token_count + len(event.token_ids)
        if self._has_to_wait or token_count > lease.leased_token_count:
            return False
        if self._life.end is not None:
            return True
        if token_count > limits.token_count_max:
            self._life.stop(limits.outcome)
            return True
        if token_count >= lease.leased_token_count - self._settings.lease_margin_tokens:
            lease.anticipate(token_count)
        self._say(event)
        return True

    async def hand_on(self, event: TokensGenerated) -> None:
        """Give on what of the new output, and of what was held back before, the safety stage lets go; for what has to wait for it.

        A beam search says much at once at its end: then the client is waited for, and given up only if it stalls.
        """
        if self._start.beam_search and self.output.unsent_token_count >= self._settings.outbox_tokens_per_request_max // 2:
            await self.flush()
        if not self._filters:
            await self._hand_on_checked(event)
        elif self._life.end is None:
            checked = self._filters[event.choice_index]
            for part in await checked.push(event):
                await self._hand_on_checked(part)
            self._note_filtered(checked, event.choice_index)

    async def hand_on_rest(self, choice_index: int, text: str) -> None:
        """A choice has ended: what was held back of it goes out, unless the request was stopped."""
        if self._life.end is not None:
            return
        if self._filters:
            checked = self._filters[choice_index]
            for part in await checked.finish(text):
                await self._hand_on_checked(part)
            self._note_filtered(checked, choice_index)
            text = ""
        if self._life.end is None:
            self._say_rest(choice_index, text)

    def end_choice(self, choice_index: int, outcome: Outcome) -> None:
        """One of several choices ended by itself. One whose last tokens were not handed on ended as the request does."""
        if self._life.end is None:
            self._choice_ends[choice_index] = outcome

    def ends_of_choices(self, cut: Outcome) -> dict[int, Outcome]:
        """How each of several choices ended; what the end of the whole request cut off ended as that did."""
        if self._start.choice_count == 1:
            return {}
        ends = {index: self._choice_ends.get(index, cut) for index in range(self._start.choice_count)}
        return {index: cut if end is Outcome.CANCELLED else end for index, end in ends.items()}

    async def flush(self) -> None:
        """Wait until the client has taken everything; one that takes nothing for too long is given up.

        What it reads may be frames of other requests that were before these, so the stream is watched and not the request.
        Nothing is waited for once what waits was discarded: what the transport has already was counted when it was handed over.
        An answer that is taken whole waits for its other parts, and whoever writes it looks after the client.
        """
        if self._life.discards:
            return
        if self.output.takes_whole:
            self.output.complete()
            await self.output.all_taken()
            return
        before = None
        while before != (progress := self.output.progress):
            before = progress
            if await self.output.all_taken(self._settings.client_stall_max_s):
                return
        self._life.stop(Outcome.SLOW_CONSUMER)
        self.output.discard()

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
        output = self.output
        if self._parsers and (parser := self._parsers.get(event.choice_index)) is not None:
            text, calls = self._parsed(event.choice_index, parser.push(event.text))
            output.say(event.choice_index, text, event.token_ids, logprobs, calls)
            if self.call_reading is not None and self.call_reading.ends_with_call and parser.complete_count:
                self._life.stop(Outcome.STOP)
        else:
            output.say(event.choice_index, event.text, event.token_ids, logprobs)
        if output.said_token_count >= self._limits.token_count_max:
            self.end_at_limit()
        if output.unsent_token_count > self._settings.outbox_tokens_per_request_max and not output.takes_whole:
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


def open_filters(checker: SafetyChecker | None, choice_count: int, *, has_json: bool = False) -> tuple[OutputFilter, ...]:
    """One filter per choice; none if outputs are not checked. has_json: they are checked as whoever parses them reads them, too."""
    opened = [] if checker is None else [checker.open_output() for _ in range(choice_count)]
    checks = [EscapedOutputCheck(check) if has_json else check for check in opened if check is not None]
    return tuple(OutputFilter(check, index) for index, check in enumerate(checks))
