"""How long a request will wait, from what one service tier of a queue has been observed to do. Estimates, never assumptions.

The estimate is a fluid one: what will be served before a request, over the rate at which its tier is served. Before it come its
own tenant's earlier requests, and of each other tenant what fits between that tenant's rank and the level of its own by then.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable

from api.queue.virtual_tokens import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Item, Line, Tenant

OUTPUT_MEMORY = 16  # requests: the mean output follows a change of what is asked within some dozens
OUTPUT_TOKENS_UNKNOWN = 150.0  # tokens: the reference workload's, until anything has ended


class Waits:
    """One tier's rate and mean output, and what follows from them."""

    def __init__(self) -> None:
        self.rate = ServiceRate()
        self._output_tokens_mean: float | None = None

    def ended(self, tenant: Tenant[Item], generated_token_count: int) -> None:
        """A request that had been served has ended with so many output tokens."""
        self._output_tokens_mean = _moved(self._output_tokens_mean, generated_token_count)
        tenant.output_tokens_mean = _moved(tenant.output_tokens_mean, generated_token_count)

    def cost(self, input_token_count: int, output_token_count_max: int, request_count: int = 1) -> float:
        """What requests will probably cost, in units of service: as much output as usual, unless they allow less."""
        output = float(output_token_count_max)
        if self._output_tokens_mean is not None:
            output = min(output, self._output_tokens_mean * request_count)
        return INPUT_TOKEN_COST * input_token_count + OUTPUT_TOKEN_COST * output

    def output_tokens(self, tenant: Tenant[Item], output_token_count_max: int) -> float:
        """What a request of the tenant will probably generate: as much as its own usually do, or else those of all."""
        means = (tenant.output_tokens_mean, self._output_tokens_mean, OUTPUT_TOKENS_UNKNOWN)
        return min(float(output_token_count_max), next(mean for mean in means if mean is not None))

    def backlog(self, tenant: Tenant[Item]) -> float:
        """What everything of a tenant that waits will cost."""
        return self.cost(tenant.waiting_input_tokens, tenant.waiting_output_tokens_max, len(tenant.waiting))

    def seconds(self, units: float) -> float | None:
        """How long so much service takes; None before anything was observed."""
        per_s = self.rate.per_s
        return units / per_s if per_s else None

    def units_before(
        self, line: Line[Item], tenant_id: uuid.UUID, weight: float, own_units: float, promised: Callable[[uuid.UUID], float]
    ) -> float:
        """What is served until the tenant was served `own_units` more, those included. promised: what is to come, by tenant."""
        level = line.start(tenant_id) + own_units / weight
        return own_units + sum(
            self._whole_requests(tenant, level, promised(tenant.id))
            for tenant in line.waiting_tenants()
            if tenant.id != tenant_id and tenant.rank < level
        )

    def _whole_requests(self, tenant: Tenant[Item], level: float, promised_units: float) -> float:
        """What is served of a tenant until its rank comes to a level, or nothing of it is left: no request is served in part."""
        backlog = self.backlog(tenant)
        each = max(backlog / len(tenant.waiting), 1.0)
        return min(backlog + promised_units, math.ceil((level - tenant.rank) * tenant.weight / each) * each)


def _moved(mean: float | None, value: float) -> float:
    return value if mean is None else mean + (value - mean) / OUTPUT_MEMORY


SAMPLE_S = 0.25  # seconds: several steps of a slow engine, so that one sample is no single step
MEMORY_S = 5.0  # seconds after which a sample weighs a third: follows a load that changes, not one that flickers


class ServiceRate:
    """Units of service per second, over the time in which something waited: at other times it is the demand that is measured."""

    def __init__(self) -> None:
        self._per_s: float | None = None
        self._sampled_from: float | None = None
        self._sampled_units = 0.0

    @property
    def per_s(self) -> float | None:
        """None until there was enough to observe."""
        return self._per_s

    def watch(self, now: float, *, waiting: bool) -> None:
        """Something waits, or nothing does any more. now: monotonic seconds."""
        if waiting and self._sampled_from is None:
            self._sampled_from, self._sampled_units = now, 0.0
        elif not waiting:
            self._sampled_from = None

    def served(self, units: float, now: float) -> None:
        """So much was served just now."""
        if self._sampled_from is None:
            return
        self._sampled_units += units
        elapsed_s = now - self._sampled_from
        if elapsed_s < SAMPLE_S:
            return
        sample = self._sampled_units / elapsed_s
        if self._per_s is None:
            self._per_s = sample
        else:
            self._per_s += (sample - self._per_s) * -math.expm1(-elapsed_s / MEMORY_S)
        self._sampled_from, self._sampled_units = now, 0.0
