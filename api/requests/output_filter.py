"""Between engine and outbox: tokens wait here until the safety stage lets their text go.

Ids and log-probabilities tell as much as text does, so a token leaves only with text that is known to be safe. One whose text is
still to come (half a character, the beginning of a stop sequence) waits for it.
"""

from __future__ import annotations

from collections import deque

from inference.engine import TokensGenerated
from inference.safety.safety import EscapedOutputCheck, OutputCheck, SafetyChecker, Verdict


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
