"""Admission to a queue: refuses requests that find no room, or would start after their deadline.

A refused request gets a retry-after and a reservation, by the rules of
`common/retry_after.py`: if it returns on time, there is room.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from api.core.errors import QueueFull, StartsTooLate
from api.core.settings import QueueSettings
from api.queue.tier import Tier
from common.retry_after import MARGIN, RETRY_S_MIN, RequestKey, Reservations
from metering.core.models import ServiceTier

ALL_TENANTS = uuid.UUID(int=0)  # shared line of all tenants if fairness is off
# Share of places for new requests; the rest is for reservations, since rates vary.
NEWCOMERS_SHARE = 0.8
RETRY_S_UNKNOWN = 1.0  # seconds at least, and twice that at most: before any service was observed
RESERVATIONS_PER_ENTRY = 10  # beyond this many, a retry-after is an estimate without a reservation
# Fraction of the time left that the expected wait may take: one wait in ten is a fifth longer than
# expected.
RESERVED_WAIT_SHARE, NEWCOMERS_WAIT_SHARE = 0.9, 0.6


class Arrival(msgspec.Struct, frozen=True):
    """Request as seen by the queue. `deadline` is on the queue's clock.

    If `compiles`, the engine must compile a response format first.
    """

    request_id: uuid.UUID
    tenant_id: uuid.UUID
    input_token_count: int
    output_token_count_max: int
    tier: ServiceTier = ServiceTier.INTERACTIVE
    weight: float = 1.0
    sequence_count: int = 1
    compiles: bool = False
    deadline: float | None = None

    @property
    def key(self) -> RequestKey:
        """Tenant and request id: clients choose request ids, so two tenants may use the same."""
        return self.tenant_id, self.request_id


class Dispatch(Protocol):
    """Room for further sequences in the engine."""

    def has_room(self, rank: float) -> bool:
        """Return whether a request of this rank can be dispatched."""
        ...

    def count_before(self, rank: float) -> int:
        """Count the pending sequences that precede a request of this rank."""
        ...


class TenantEntries(msgspec.Struct, array_like=True, frozen=True):
    """Places that a tenant takes in one process: waiting requests, and reservations."""

    tenant: bytes
    waiting_count: int
    reservation_count: int
    reserved_units: float


@dataclass(slots=True)
class WaitingCounts:
    """Numbers of waiting requests; tenants are integers, since UUIDs are hashed in Python.

    Those of other processes before the same engines are as they reported last.
    """

    total: int = 0
    peak: int = 0  # maximum so far
    by_tenant: dict[int, int] = field(default_factory=dict)
    elsewhere_total: int = 0
    elsewhere_by_tenant: dict[int, int] = field(default_factory=dict)
    reserved_elsewhere: dict[int, tuple[int, float]] = field(default_factory=dict)  # count, units

    def of(self, tenant: int) -> int:
        """Return how many requests of a tenant wait in all processes."""
        return self.by_tenant.get(tenant, 0) + self.elsewhere_by_tenant.get(tenant, 0)

    def note_elsewhere(self, entries: Iterable[TenantEntries]) -> None:
        """Replace the places in other processes."""
        by_tenant, reserved = self.elsewhere_by_tenant, self.reserved_elsewhere
        by_tenant.clear()
        reserved.clear()
        for each in entries:
            tenant = int.from_bytes(each.tenant)
            if each.waiting_count:
                by_tenant[tenant] = by_tenant.get(tenant, 0) + each.waiting_count
            if each.reservation_count:
                count, units = reserved.get(tenant, (0, 0.0))
                reserved[tenant] = count + each.reservation_count, units + each.reserved_units
        self.elsewhere_total = sum(by_tenant.values())


class QueueAdmission:
    """Admits or refuses requests. Owns the reservations of refused requests."""

    def __init__(
        self,
        settings: QueueSettings,
        tiers: Mapping[ServiceTier, Tier[Any]],
        dispatch: Dispatch,
        waiting: WaitingCounts,
    ) -> None:
        """The queue updates `waiting`; this object only reads it."""
        self.refused_count = 0
        self._settings = settings
        self._is_fair = settings.order == "fair"
        self._tiers = tiers
        self._dispatch = dispatch
        self._waiting = waiting
        count_max = RESERVATIONS_PER_ENTRY * settings.requests_max
        self.reservations = Reservations(count_max, count_max)

    def check(
        self, arrival: Arrival, engine_wait_s: float, now: float, *, is_half_empty: bool
    ) -> None:
        """Refuse a request without room or with too early a deadline; use up its reservation.

        If `is_half_empty`, half of the tenant's share is free, so that its room is not checked.
        Raises: QueueFull, StartsTooLate.
        """
        self.reservations.forget_expired(now)
        is_reserved = self.reservations.is_due(arrival.key, now)
        refusal: Exception | None = self._room_refusal(
            arrival, now, is_reserved=is_reserved, is_half_empty=is_half_empty
        )
        if refusal is None and arrival.deadline is not None:
            refusal = self._deadline_refusal(
                arrival, arrival.deadline - now, engine_wait_s, now, is_reserved=is_reserved
            )
        if refusal is not None:
            self.refused_count += 1
            raise refusal
        self.reservations.returned(arrival.key)

    def wait_s(self, arrival: Arrival, *, is_reserved: bool = False) -> float | None:
        """Estimate the wait of a request that arrives now, in seconds; None without data.

        `is_reserved` says that room is reserved for it.
        """
        tier = self._tiers[arrival.tier]
        rank = tier.line.start(self._tenant_id(arrival))
        if self._dispatch.has_room(rank) and not tier.line.waiting_count:
            return 0.0
        tenant = tier.line.find(self._tenant_id(arrival))
        own = tier.backlog(tenant) if tenant is not None else 0.0
        if not is_reserved:
            own += self._reserved_units(arrival.tenant_id)
        before = self._units_before(arrival, own)
        return tier.seconds(before + self._cost(arrival) * self._dispatch.count_before(rank))

    def entries(self) -> tuple[TenantEntries, ...]:
        """List the places that tenants take in this process."""
        tenants = self._waiting.by_tenant.keys() | {each.int for each in self.reservations.owners()}
        return tuple(
            TenantEntries(
                (tenant_id := uuid.UUID(int=each)).bytes,
                self._waiting.by_tenant.get(each, 0),
                self.reservations.count(tenant_id),
                self.reservations.amount(tenant_id),
            )
            for each in tenants
        )

    def _room_refusal(
        self, arrival: Arrival, now: float, *, is_reserved: bool, is_half_empty: bool
    ) -> QueueFull | None:
        """Return QueueFull if limits, reservations and the tenant's share leave no room."""
        settings, waiting = self._settings, self._waiting
        own, total = waiting.of(arrival.tenant_id.int), waiting.total + waiting.elsewhere_total
        share = 1.0 if is_reserved else NEWCOMERS_SHARE
        free = int(settings.requests_max * share) - total
        own_max = int(settings.requests_per_tenant_max * share)
        if is_reserved:
            over = max(1 - free, own + 1 - own_max)
        elif is_half_empty:
            return None
        else:
            reserved = self._reserved(arrival.tenant_id.int)
            # It returned too early: its own reservation does not count.
            reserved -= arrival.key in self.reservations
            own += reserved
            free -= reserved + self._reserved_for_others(arrival.tenant_id.int, own)
            # It must have fewer waiting requests than there are free positions. Each one that ends
            # changes both by one, so half of the excess must end.
            over_share = (own + 2 - free) // 2
            over = max(own + 1 - own_max, over_share)
        if over <= 0:
            return None
        tier = self._tiers[arrival.tier]
        ahead = self._units_before(arrival, over * self._usual_cost(arrival))
        units = max(ahead, (1 - free) * self._cost(arrival))
        retry_after_s = self._reserve(arrival, tier.seconds(units), now, again=is_reserved)
        return QueueFull(own, total, retry_after_s)

    def _reserved(self, tenant: int) -> int:
        """Count the places reserved for a tenant in all processes."""
        count, _ = self._waiting.reserved_elsewhere.get(tenant, (0, 0.0))
        return self.reservations.count(uuid.UUID(int=tenant)) + count

    def _reserved_for_others(self, tenant: int, own: int) -> int:
        """Count the places that reservations keep from a tenant with `own` places, taken or
        reserved: those of tenants that have fewer than its next one. A tenant with more waits for
        its own requests to end, so others need not leave it the free places.
        """
        owners = {each.int for each in self.reservations.owners()}
        return sum(
            min(self._reserved(each), max(own + 1 - self._waiting.of(each), 0))
            for each in owners | self._waiting.reserved_elsewhere.keys()
            if each != tenant
        )

    def _deadline_refusal(
        self,
        arrival: Arrival,
        left_s: float,
        engine_wait_s: float,
        now: float,
        *,
        is_reserved: bool,
    ) -> StartsTooLate | None:
        wait_s = self.wait_s(arrival, is_reserved=is_reserved)
        if wait_s is None:
            return None
        wait_s += engine_wait_s
        sure_s = left_s * (RESERVED_WAIT_SHARE if is_reserved else NEWCOMERS_WAIT_SHARE)
        if wait_s <= sure_s:
            return None
        return StartsTooLate(
            wait_s, left_s, self._reserve(arrival, wait_s - sure_s, now, again=is_reserved)
        )

    def _reserve(self, arrival: Arrival, wait_s: float | None, now: float, *, again: bool) -> float:
        """Reserve a place for a refused request, and return its retry-after in seconds.

        With `again` it has returned on time and found no room, perhaps with many others: each is
        told another moment, at the pace at which the tenant's requests are served.
        """
        if left_s := self.reservations.left_s(arrival.key, now):
            return left_s  # it returned too early; its reservation still holds
        self.reservations.returned(arrival.key)
        retry_after_s = (
            RETRY_S_UNKNOWN * (1 + self.reservations.spread())
            if wait_s is None
            else max(wait_s * MARGIN, RETRY_S_MIN)
        )
        units = self._units_before(arrival, self._cost(arrival))
        if again and (gap_s := self._tiers[arrival.tier].seconds(units)) is not None:
            moment = self.reservations.next_moment(
                arrival.tenant_id, now + retry_after_s, MARGIN * gap_s
            )
            retry_after_s = moment - now
        self.reservations.make(
            arrival.key, arrival.tenant_id, self._cost(arrival), now, retry_after_s
        )
        return retry_after_s

    def _tenant_id(self, arrival: Arrival) -> uuid.UUID:
        return arrival.tenant_id if self._is_fair else ALL_TENANTS

    def _units_before(self, arrival: Arrival, own_units: float) -> float:
        """Estimate the service units until this tenant has received `own_units` more."""
        tier = self._tiers[arrival.tier]
        weight = arrival.weight if self._is_fair else 1.0
        return tier.units_before(self._tenant_id(arrival), weight, own_units, self._reserved_units)

    def _reserved_units(self, tenant_id: uuid.UUID) -> float:
        """Return the units reserved for a tenant in all processes."""
        elsewhere = self._waiting.reserved_elsewhere
        units = self.reservations.amount(tenant_id)
        return units + elsewhere[tenant_id.int][1] if tenant_id.int in elsewhere else units

    def _usual_cost(self, arrival: Arrival) -> float:
        """Return the mean cost of the tenant's waiting requests, or else the cost of this one."""
        tier = self._tiers[arrival.tier]
        tenant = tier.line.find(self._tenant_id(arrival))
        if tenant is None or not (count := tenant.backlog()[0]):
            return self._cost(arrival)
        return tier.backlog(tenant) / count

    def _cost(self, arrival: Arrival) -> float:
        return self._tiers[arrival.tier].cost(
            arrival.input_token_count, arrival.output_token_count_max
        )
