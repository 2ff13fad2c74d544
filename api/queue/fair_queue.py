"""The queue before one engine: bounded, fair between tenants, honest about its waits.

Each request has a `Place` from before its hold until it ends. Its turn comes in the order of `virtual_tokens.Line` within its
service tier, and within the engine in the order of the ranks that it gets here; `Lookahead` says how many the engine is given at
once; `Entrance` refuses at once what would find no place or start too late. One event loop uses it, and nothing here awaits.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable

from api.queue.entrance import Entrance, Tier
from api.queue.places import ALL_TENANTS, Arrival, Outlook, Place, QueueLimits, QueueStatistics, ServiceTier, State
from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Tenant
from inference.engine import EngineStatistics

BATCH_RANK = 1e15  # units of service that no interactive tenant reaches, at a million per second not in thirty years


class FairQueue:
    """All places before one engine."""

    def __init__(
        self, limits: QueueLimits, engine: Callable[[], EngineStatistics], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """engine: what it told last."""
        self._limits = limits
        self._engine = engine
        self._clock = clock
        self._interactive, self._batch = Tier(), Tier()
        self._tiers = {ServiceTier.INTERACTIVE: self._interactive, ServiceTier.BATCH: self._batch}
        self._lookahead = Lookahead()
        self._entrance = Entrance(limits, self._tiers, self._lookahead)
        self._handed: dict[Place, None] = {}  # with the engine, which has not begun with them, the first given first
        self._number = 0
        self._batch_moved_at = -math.inf  # when the batch tier was last given something, or began to wait

    def enter(self, arrival: Arrival, engine_wait_s: float = 0.0) -> Place:
        """Take a place. engine_wait_s: until the engine takes anything at all.

        Raises: QueueFull if there is none for this tenant, StartsTooLate if its turn would come after its deadline.
        """
        self._entrance.let_in(arrival, engine_wait_s, self._clock())
        self._number += 1
        return Place(self, arrival, self._number)

    def wait_s(self, arrival: Arrival) -> float | None:
        """How long a request would wait that came now; None before anything was observed."""
        return self._entrance.wait_s(arrival)

    def join(self, place: Place) -> None:
        """Begin to wait for the turn."""
        assert place.state is State.ENTERED, "a place waits once"
        place.state = State.WAITING
        arrival, tier = place.arrival, self._tiers[place.arrival.tier]
        if arrival.tier is ServiceTier.BATCH and not tier.line:
            self._batch_moved_at = self._clock()
        tenant_id, weight = (arrival.tenant_id, arrival.weight) if self._limits.fair else (ALL_TENANTS, 1.0)
        place.tenant = tier.line.join(place, tenant_id, weight)
        self._hand_over()

    def begun(self, place: Place) -> None:
        """The engine has let a request enter."""
        if place.state is not State.HANDED:
            return
        assert place.tenant is not None, "only what was handed over begins"
        place.state = State.RUNNING
        self._tiers[place.arrival.tier].line.begun(place, place.tenant)
        steps = self._engine().step_count - place.handed_at_step
        behind = self._is_waited()
        overtakes = next(iter(self._handed)).rank > place.rank
        if not (place.arrival.compiles or overtakes):  # else it was its grammar that it waited for, or nothing
            self._lookahead.entered(steps, behind=behind)
        self._take_back(place)
        self._hand_over()

    def generated(self, place: Place, token_count: int) -> None:
        """Charge for output, and note what was served."""
        assert place.tenant is not None, "only what was handed over generates"
        tier = self._tiers[place.arrival.tier]
        units = OUTPUT_TOKEN_COST * token_count
        if not place.generated_token_count:
            units += INPUT_TOKEN_COST * place.input_token_count
        place.generated_token_count += token_count
        tier.line.generated(place, place.tenant, token_count)
        tier.waits.rate.served(units, self._clock())

    def leave(self, place: Place) -> None:
        """Give a place back."""
        state, arrival = place.state, place.arrival
        place.state = State.GONE
        tier = self._tiers[arrival.tier]
        match state:
            case State.ENTERED:
                self._entrance.passed(arrival)
            case State.WAITING:
                assert place.tenant is not None
                tier.line.leave(place, place.tenant)
                self._entrance.passed(arrival)
            case State.HANDED | State.RUNNING:
                assert place.tenant is not None
                tier.line.ended(place, place.tenant)
                if state is State.HANDED:
                    self._take_back(place)
                else:
                    tier.waits.ended(place.tenant, place.generated_token_count)
            case State.GONE:
                return
        self._hand_over()

    def outlook(self) -> list[Outlook]:
        """What everybody who waits may expect, the next first. Takes time in proportion to how many they are."""
        found: list[Outlook] = []
        for tier in self._tiers.values():
            units, ordered = 0.0, []
            for tenant in tier.line.waiting_tenants():
                level = tenant.rank
                for place in tenant.waiting:
                    cost = tier.waits.cost(place.input_token_count, place.output_token_count_max)
                    ordered.append((level, place.number, place, cost))
                    level += cost / tenant.weight
            for _, _, place, cost in sorted(ordered, key=lambda each: each[:2]):
                found.append(Outlook(place, self._lookahead.pending_count + len(found), tier.waits.seconds(units)))
                units += cost
        return found

    def statistics(self) -> QueueStatistics:
        """Never blocks; takes time in proportion to how many wait."""
        entrance = self._entrance
        return QueueStatistics(
            waiting_count=entrance.waiting_count,
            waiting_count_peak=entrance.waiting_count_peak,
            promise_count=entrance.promise_count,
            refused_count=entrance.refused_count,
            engine_pending_count=self._lookahead.pending_count,
            engine_window=int(self._lookahead.window),
            longest_wait_s=max((each.wait_s for each in self.outlook() if each.wait_s is not None), default=None),
        )

    def _hand_over(self) -> None:
        """Give the engine what it has room for."""
        now, engine = self._clock(), self._engine()
        self._lookahead.spread(engine.replica_count)
        while self._is_waited() and (turn := self._next_turn(now)) is not None:
            tier, tenant, rank = turn
            if not self._lookahead.has_room(rank):
                break
            if tier is self._batch:
                self._batch_moved_at = now
            place = tier.line.take(tenant, tier.waits.output_tokens(tenant, tenant.first.output_token_count_max))
            place.rank = rank
            self._entrance.passed(place.arrival)
            self._handed[place] = None
            self._lookahead.given(rank, place.arrival.sequence_count, compiles=place.arrival.compiles)
            place.handed_at_step = engine.step_count
            place.state = State.HANDED
            place.on_turn()
        for tier in (self._interactive, self._batch):
            tier.waits.rate.watch(now, waiting=bool(tier.line))

    def _is_waited(self) -> bool:
        """Whether anybody waits for a turn."""
        return bool(self._interactive.line or self._batch.line)

    def _take_back(self, place: Place) -> None:
        """The engine has begun with a request, or never will."""
        del self._handed[place]
        self._lookahead.gone(place.rank, place.arrival.sequence_count, compiles=place.arrival.compiles)

    def _next_turn(self, now: float) -> tuple[Tier, Tenant[Place], float] | None:
        """Whose turn it is, and with which rank.

        Interactive first, unless the batch tier has waited for so long that the next turn is its own: then it is ranked as if it
        were interactive and came back from idling. Otherwise batch comes after everything interactive in the engine, too.
        """
        interactive, batch = self._interactive.line, self._batch.line
        is_overdue = now - self._batch_moved_at >= self._limits.batch_wait_s_max
        if batch and (is_overdue or not interactive):
            tenant = batch.next_tenant()
            assert tenant is not None, "something of the tier waits"
            rank = interactive.level() if interactive else BATCH_RANK + tenant.rank
            return self._batch, tenant, rank if self._limits.fair else 0.0
        tenant = interactive.next_tenant()
        if tenant is None:
            return None
        return self._interactive, tenant, tenant.rank if self._limits.fair else 0.0


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
