"""How many sequences wait inside an engine: enough that its next batch is never short, few enough that the order stays ours.

An engine decides by itself what it can run: places in the batch, KV blocks, tokens per step. What it cannot take yet waits in its
own queue, in order of rank. A rank does not change any more once it is given, while the order here follows what is served. So the
number that waits there is steered by what the engine shows: a sequence that enters at the first step which could see it means that
the engine might have taken more; one that has to wait several steps means that fewer would have done. Only those count that come
before a request: one that is to overtake them is handed over whatever else waits there.
"""

from __future__ import annotations

import bisect

WINDOW_FIRST = 8.0  # sequences: a burst that meets an idle engine fills its first batch within a few steps
WINDOW_MIN = 1.0
WINDOW_MAX = 160.0  # sequences: with those below it, and those that overtake, it stays under what engines queue (256)
PENDING_MAX = 224  # sequences in all; one request more, of up to 16 choices, still stays under it
COMPILING_MAX = 32  # sequences with a response format that do not count, since it is their grammar that they wait for
# Steps: the one under way when a sequence is handed over cannot see it, the one after it is the first that does.
STEPS_AT_ONCE = 2
STEPS_LONG = 3  # one step of waiting is the aim
SHRINK = 0.5  # sequences per late one: slower than it grows, since an empty batch costs more than a less fair order


class Lookahead:
    """The window of one engine, or of several behind one queue. Counts are in sequences; a request with several choices is several.

    Several engines have as many times the room; one that is full passes on what it is given.
    """

    def __init__(self) -> None:
        self.window = WINDOW_FIRST
        self._engine_count = 1
        self._ranks: list[float] = []  # of those that wait for nothing but room, the lowest first
        self._compiling_count = 0

    @property
    def pending_count(self) -> int:
        """Sequences that the engine was given and has not let enter yet."""
        return len(self._ranks) + self._compiling_count

    def spread(self, engine_count: int) -> None:
        """So many engines take from the queue now, at least 1. Each one that comes begins as the first did."""
        if engine_count != self._engine_count:
            added = WINDOW_FIRST * (engine_count - self._engine_count)
            self._engine_count = engine_count
            self.window = min(max(self.window + added, WINDOW_MIN * engine_count), WINDOW_MAX * engine_count)

    def count_before(self, rank: float) -> int:
        """Those of them that come before a request which would be given now."""
        return bisect.bisect_right(self._ranks, rank) + max(0, self._compiling_count - COMPILING_MAX * self._engine_count)

    def has_room(self, rank: float) -> bool:
        """Whether the engine may be given one more request, of this rank."""
        return self.count_before(rank) < int(self.window) and self.pending_count < PENDING_MAX * self._engine_count

    def given(self, rank: float, sequence_count: int, *, compiles: bool) -> None:
        """The engine has a request more. compiles: it has a response format."""
        if compiles:
            self._compiling_count += sequence_count
        else:
            at = bisect.bisect_right(self._ranks, rank)
            self._ranks[at:at] = [rank] * sequence_count

    def gone(self, rank: float, sequence_count: int, *, compiles: bool) -> None:
        """A request that was given has entered or ended."""
        if compiles:
            self._compiling_count -= sequence_count
        else:
            at = bisect.bisect_left(self._ranks, rank)
            assert self._ranks[at : at + sequence_count] == [rank] * sequence_count, "what is gone was given"
            del self._ranks[at : at + sequence_count]

    def entered(self, step_count: int, *, behind: bool) -> None:
        """A request that overtook nobody has entered so many steps after it was given. behind: others wait that would follow it."""
        if step_count < 0:
            return  # the engine was started anew in between
        if step_count <= STEPS_AT_ONCE:
            if behind and self.pending_count >= int(self.window):
                self.window = min(self.window + 1, WINDOW_MAX * self._engine_count)
        elif step_count > STEPS_LONG:
            self.window = max(self.window - SHRINK, WINDOW_MIN * self._engine_count)
