"""Caller of a request: API key, address and deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from msgspec import structs

from api.access.auth import payer
from api.core.errors import PermissionDenied
from api.core.rate_limiter import CALL
from api.core.texts import Violations
from api.core.wire import LABEL_COUNT_MAX, payload_hash
from api.generation.parsing.embed_request import ValidEmbed
from api.generation.parsing.start_frame import ValidStart
from api.observability.spans import NO_TRACE, TraceContext
from metering.quotas.quota_rules import Payer
from metering.receipts.subjects import Labels
from metering.tenants.authentication import (
    NO_BOUNDS,
    Principal,
    TokenBounds,
    TokenTerms,
    model_allowed,
)
from metering.tenants.networks import Address

Start = TypeVar("Start", ValidStart, ValidEmbed)


@dataclass(slots=True)
class Caller:
    """Caller of a request. Immutable.

    `received_at` and `deadline`, the latest time to start, are on the monotonic clock. `bounds` are
    the token limits per request of the key. `address` is None if it is unknown. `trace` is the
    trace that the request belongs to, `credentials` the hashes of its secret or token.
    `on_admitted` is called once the request is admitted. `models` are those that the key may use;
    empty for all. `token` has the terms of a token that was sent instead of a secret. `region` is
    the one that the organization is bound to; empty for none.
    """

    payer: Payer
    auth_ms: float
    received_at: float
    deadline: float | None = None
    secret: str = field(default="", repr=False)
    trace: TraceContext = NO_TRACE
    bounds: TokenBounds = NO_BOUNDS
    address: Address | None = None
    credentials: frozenset[bytes] = field(default=frozenset(), repr=False)
    on_admitted: Callable[[], None] = lambda: None
    models: frozenset[str] = frozenset()
    token: TokenTerms | None = None
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
            credentials=principal.credentials,
            on_admitted=(lambda: None) if call is None else call.on_admitted,
            models=principal.models,
            token=principal.token,
            region=principal.region,
        )


def on_behalf(token: TokenTerms | None, start: Start) -> Start:
    """Return the request with the end user and the labels of the caller's token.

    With a client token of no end user, a request has none either. Raises InvalidRequest if it names
    another end user, or gives a label of the token another value.
    """
    if token is None or not (token.end_user or token.labels or token.client_token_id):
        return start
    wrong = Violations()
    is_bound = bool(token.end_user or token.client_token_id)
    own = start.end_user in ("", token.end_user) or not is_bound
    wrong.check(own, "end_user", "must be that of your token, or unset")
    for key, value in token.labels:
        kept = start.labels.get(key, value) == value
        wrong.check(kept, f"labels[{key!r}]", "must be that of your token, or unset")
    labels = Labels({**start.labels, **dict(token.labels)})
    wrong.check_count(len(labels), LABEL_COUNT_MAX, "labels")
    wrong.raise_if_any()
    end_user = token.end_user or start.end_user
    digest = start.payload_hash
    if token.end_user:  # the same payload of another end user is another request
        digest = payload_hash(digest + token.end_user.encode())
    if isinstance(start, ValidStart):
        return structs.replace(start, payload_hash=digest, end_user=end_user, labels=labels)
    return replace(start, payload_hash=digest, end_user=end_user, labels=labels)


def own_end_user(principal: Principal, requested: str) -> str:
    """Return the end user whom a caller may read about: its token's, if it names one.

    Raises PermissionDenied for another one.
    """
    if requested and not principal.knows(requested):
        raise PermissionDenied(
            "Your token names an end user, and you ask about another one. Ask without `end_user`,"
            " or use an API key."
        )
    return principal.end_user or requested
