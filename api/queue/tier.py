"""Service tier of a queue: its line of tenants, service rate, and wait estimates."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Line, Queued, Tenant

Entry = TypeVar("Entry", bound=Queued)
SAMPLE_S = 0.25  # seconds: several steps of a slow engine
MEMORY_S = 5.0  # seconds after which a sample weighs a third: follows the load without flickering


class Tier(Generic[Entry]):
    """Service tier: the line of its tenants, and its service rate, to estimate waits."""

    def __init__(self) -> None:
        self.line: Line[Entry] = Line()
        self.rate = ServiceRate()

    def cost(
        self, input_token_count: int, output_token_count_max: int, request_count: int = 1
    ) -> float:
        """Estimate a cost in service units from the mean output, or a lower maximum."""
        output = float(output_token_count_max)
        if (mean := self.line.output_tokens_mean) is not None:
            output = min(output, mean * request_count)
        return INPUT_TOKEN_COST * input_token_count + OUTPUT_TOKEN_COST * output

    def backlog(self, tenant: Tenant[Entry]) -> float:
        """Estimate the cost of all requests of a tenant that wait in any process."""
        request_count, input_tokens, output_tokens_max = tenant.backlog()
        return self.cost(input_tokens, output_tokens_max, request_count)

    def seconds(self, units: float) -> float | None:
        """Convert service units to seconds at the measured rate; None if nothing was measured."""
        per_s = self.rate.per_s
        return units / per_s if per_s else None

    def units_before(
        self,
        tenant_id: uuid.UUID,
        weight: float,
        own_units: float,
        reserved: Callable[[uuid.UUID], float],
    ) -> float:
        """Estimate the service units until the tenant has `own_units` more, these included.

        `reserved` returns the reserved units of a tenant.
        """
        level = self.line.start(tenant_id) + own_units / weight
        return own_units + sum(
            self._whole_requests(tenant, level, reserved(tenant.id))
            for tenant in self.line.backlogged_tenants()
            if tenant.id != tenant_id and tenant.rank < level
        )

    def _whole_requests(self, tenant: Tenant[Entry], level: float, reserved_units: float) -> float:
        """Estimate a tenant's service until its rank reaches `level`, in whole requests."""
        request_count, input_tokens, output_tokens_max = tenant.backlog()
        backlog = self.cost(input_tokens, output_tokens_max, request_count)
        each = max(backlog / request_count, 1.0)
        return min(
            backlog + reserved_units, math.ceil((level - tenant.rank) * tenant.weight / each) * each
        )


class ServiceRate:
    """Service units per second, measured while requests wait: otherwise it would be demand."""

    def __init__(self) -> None:
        self.per_s: float | None = None  # None before any observation
        self._sampled_from: float | None = None
        self._sampled_units = 0.0
        self.is_sampled = False  # while requests wait

    def watch(self, now: float, *, waiting: bool) -> None:
        """Record whether requests are waiting. `now` is in monotonic seconds."""
        self.is_sampled = waiting
        if waiting and self._sampled_from is None:
            self._sampled_from, self._sampled_units = now, 0.0
        elif not waiting:
            self._sampled_from = None

    def served(self, units: float, now: float) -> None:
        """Record service units received at the time `now`."""
        if self._sampled_from is None:
            return
        self._sampled_units += units
        elapsed_s = now - self._sampled_from
        if elapsed_s < SAMPLE_S:
            return
        sample = self._sampled_units / elapsed_s
        if self.per_s is None:
            self.per_s = sample
        else:
            self.per_s += (sample - self.per_s) * -math.expm1(-elapsed_s / MEMORY_S)
        self._sampled_from, self._sampled_units = now, 0.0
