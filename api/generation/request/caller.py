"""Caller of a request: its key, address and deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from api.access.auth import payer
from api.core.rate_limiter import CALL
from api.observability.spans import NO_TRACE, TraceContext
from metering.quotas.quota_rules import Payer
from metering.tenants.authentication import NO_BOUNDS, Principal, TokenBounds
from metering.tenants.networks import Address


@dataclass(slots=True)
class Caller:
    """Caller of a request: key, time and address. Immutable.

    received_at, deadline (latest time to start): seconds on the monotonic clock. bounds: token
    limits of the key per request. address: None if unknown. trace: the trace that the request
    belongs to. secret_hash: hash of the presented secret. on_admitted: called once the request is
    admitted.
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

    @classmethod
    def of(
        cls,
        principal: Principal,
        auth_ms: float,
        received_at: float,
        deadline: float | None,
        trace: TraceContext,
    ) -> Caller:
        """Return the caller of a call that carries a single request."""
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
        )
