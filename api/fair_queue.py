"""The queue before one engine: bounded, fair between tenants, honest about its waits.

Each request has a `Place` from before its hold until it ends. Its turn comes in the order of `virtual_tokens.Line` within its
service tier; `Lookahead` says how many the engine is given at once; `Entrance` refuses at once what would find no place or start
too late. One event loop uses it, and nothing here awaits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from api.entrance import Entrance, Tier
from api.headroom import Headroom
from api.lookahead import Lookahead
from api.places import ALL_TENANTS, Arrival, Outlook, Place, QueueLimits, QueueStatistics, ServiceTier, State
from api.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Tenant
from inference.engine import EngineStatistics


class FairQueue:
    """All places before one engine."""

    def __init__(
        self, limits: QueueLimits, engine: Callable[[], EngineStatistics], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """engine: what it told last."""
        self._limits = limits
        self._engine = engine
        self._clock = clock
        self._tiers = {tier: Tier() for tier in ServiceTier}
        self._lookahead = Lookahead()
        self._entrance = Entrance(limits, self._tiers, self._lookahead)
        self._headroom: Headroom[Place] = Headroom(limits.kept_share if limits.fair else 0.0)
        self._given_count = 0  # sequences that are with the engine
        self._number = 0
        self._batch_moved_at = 0.0  # when the batch tier was last given something, or began to wait

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
        place.state = State.RUNNING
        steps = self._engine().step_count - place.handed_at_step
        behind = any(tier.line for tier in self._tiers.values())
        if not place.arrival.compiles:  # else it was its grammar that it waited for
            self._lookahead.entered(steps, behind=behind)
        self._lookahead.gone(place.arrival.sequence_count, compiles=place.arrival.compiles)
        self._hand_over()

    def generated(self, place: Place, token_count: int) -> None:
        """Charge for output, and note what was served."""
        assert place.tenant is not None, "only what was handed over generates"
        tier = self._tiers[place.arrival.tier]
        units = OUTPUT_TOKEN_COST * token_count
        if not place.generated_token_count:
            units += INPUT_TOKEN_COST * place.input_token_count
        place.generated_token_count += token_count
        tier.line.generated(place.tenant, token_count)
        tier.waits.rate.served(units, self._clock())

    def look_again(self) -> None:
        """Time has passed, and with it the claim of tenants that have not come back to the places kept for them."""
        self._hand_over()

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
                tier.line.ended(place.tenant)
                self._given_count -= arrival.sequence_count
                self._note(place, self._clock())
                if state is State.HANDED:
                    self._lookahead.gone(arrival.sequence_count, compiles=arrival.compiles)
                else:
                    tier.waits.ended(place.generated_token_count)
            case State.GONE:
                return
        self._hand_over()

    def outlook(self) -> list[Outlook]:
        """What everybody who waits may expect, the next first. Takes time in proportion to how many they are."""
        found: list[Outlook] = []
        for tier in self._tiers.values():
            units, ordered = 0.0, []
            for tenant in tier.line.waiting_tenants():
                level = tenant.counter
                for place in tenant.waiting:
                    cost = tier.waits.cost(place.input_token_count, place.output_token_count_max)
                    ordered.append((level, place.number, place, cost))
                    level += cost / tenant.weight
            for _, _, place, cost in sorted(ordered, key=lambda each: each[:2]):
                found.append(Outlook(place, self._lookahead.pending_count + len(found), tier.waits.seconds(units)))
                units += cost
        return found

    def statistics(self) -> QueueStatistics:
        """Never blocks."""
        entrance = self._entrance
        return QueueStatistics(
            waiting_count=entrance.waiting_count,
            waiting_count_peak=entrance.waiting_count_peak,
            promise_count=entrance.promise_count,
            refused_count=entrance.refused_count,
            engine_pending_count=self._lookahead.pending_count,
            engine_window=int(self._lookahead.window),
        )

    def _hand_over(self) -> None:
        """Give the engine what it has room for."""
        now, engine = self._clock(), self._engine()
        while self._lookahead.has_room and (tier := self._next_tier(now)) is not None:
            tenant = self._next_tenant(tier, engine.running_sequence_count_max, now)
            if tenant is None:
                break
            if tier is self._tiers[ServiceTier.BATCH]:
                self._batch_moved_at = now
            place = tier.line.take(tenant)
            self._given_count += place.arrival.sequence_count
            self._note(place, now)
            self._entrance.passed(place.arrival)
            self._lookahead.given(place.arrival.sequence_count, compiles=place.arrival.compiles)
            place.handed_at_step = engine.step_count
            place.state = State.HANDED
            place.on_turn()
        for tier in self._tiers.values():
            tier.waits.rate.watch(now, waiting=bool(tier.line))

    def _next_tier(self, now: float) -> Tier | None:
        """Interactive first, unless the batch tier has waited for so long that the next turn is its own."""
        interactive, batch = self._tiers[ServiceTier.INTERACTIVE], self._tiers[ServiceTier.BATCH]
        if not batch.line:
            return interactive if interactive.line else None
        if interactive.line and now - self._batch_moved_at < self._limits.batch_wait_s_max:
            return interactive
        return batch

    def _next_tenant(self, tier: Tier, batch_size: int, now: float) -> Tenant[Place] | None:
        """Whose turn it is; None if what is free is kept for tenants that ask for nothing at the moment."""
        tenant = tier.line.next_tenant()
        assert tenant is not None, "something waits in the tier that is next"
        places = self._headroom.places_for(tenant, batch_size, now)
        if places is None or not self._given_count or self._given_count + tenant.first.arrival.sequence_count <= places:
            return tenant
        first = tenant.first
        lead_max = self._headroom.most_kept(batch_size) * tier.waits.cost(first.input_token_count, first.output_token_count_max)
        other = self._headroom.instead_of(tenant, lead_max, now)
        fits = other is not None and self._given_count + other.first.arrival.sequence_count <= batch_size
        return other if fits else None

    def _note(self, place: Place, now: float) -> None:
        if place.arrival.tier is ServiceTier.INTERACTIVE and place.tenant is not None:
            self._headroom.note(place.tenant, now)
