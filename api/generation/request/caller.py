"""Caller of a request: API key, address and deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from api.access.auth import payer
from api.core.rate_limiter import CALL
from api.observability.spans import NO_TRACE, TraceContext
from metering.quotas.quota_rules import Payer
from metering.tenants.authentication import NO_BOUNDS, Principal, TokenBounds, model_allowed
from metering.tenants.networks import Address


@dataclass(slots=True)
class Caller:
    """Caller of a request. Immutable.

    `received_at` and `deadline`, the latest time to start, are on the monotonic clock. `bounds` are
    the token limits per request of the key. `address` is None if it is unknown. `trace` is the
    trace that the request belongs to, `secret_hash` the hash of the secret that was sent.
    `on_admitted` is called once the request is admitted. `models` are those that the key may use;
    empty for all. `region` is the one that the organization is bound to; empty for none.
    """

    payer: Payer
    auth_ms: float
    received_at: float
    deadline: float | None = None
    secret: str = field(default="", repr=False)
    trace: TraceContext = NO_TRACE
    bounds: TokenBounds = NO_BOUNDS
    address: Address | None = None
    secret_hash: bytes = field(default=b"", repr=False)
    on_admitted: Callable[[], None] = lambda: None
    models: frozenset[str] = frozenset()
    region: str = ""

    def may_use(self, model: str) -> bool:
        """Return True if the key may use the model."""
        return model_allowed(self.models, model)

    @classmethod
    def of(
        cls,
        principal: Principal,
        auth_ms: float,
        received_at: float,
        deadline: float | None,
        trace: TraceContext,
    ) -> Caller:
        """Build the caller of a call that carries a single request."""
        call = CALL.get()
        return cls(
            payer(principal),
            auth_ms,
            received_at,
            deadline,
            trace=trace,
            bounds=principal.bounds,
            address=principal.address,
            secret_hash=principal.secret_hash,
            on_admitted=(lambda: None) if call is None else call.on_admitted,
            models=principal.models,
            region=principal.region,
        )
