"""Search for another model, for a request that the model it asks for cannot take now."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from api.core.errors import (
    InvalidRequest,
    ModelNotAllowed,
    PromptTooLong,
    QueueFull,
    StartsTooLate,
)
from api.core.statuses import reason_of
from api.generation.parsing.start_frame import ValidStart
from api.generation.request.caller import Caller
from api.queue.fair_queue import FairQueue
from inference.engine import Startable
from inference.errors import EngineError, EngineStartFailed, EngineUnavailable
from inference.routing.router import Router
from metering.core.errors import PriceMissing
from metering.quotas.quotas import QuotaExceeded

CAUSES = (EngineStartFailed, EngineUnavailable, QueueFull, StartsTooLate)
# Refusals that another model may not have.
OF_ONE_MODEL = (
    EngineError,
    InvalidRequest,
    ModelNotAllowed,
    PriceMissing,
    PromptTooLong,
    QueueFull,
    QuotaExceeded,
    StartsTooLate,
)

log = structlog.get_logger(__name__)


class FallbackSearch:
    """Search for the model that takes one request, which was not admitted yet.

    `requested` is the name as sent, `model` the canonical one, and `queue` the queue of that model.
    `refusal` is why it cannot take the request.
    """

    def __init__(
        self,
        requested: str,
        model: str,
        queue: FairQueue,
        names: Iterable[str],
        refusal: Exception,
    ) -> None:
        """`names` are the models to try, in order."""
        self.requested = requested
        self.model = model
        self.queue = queue
        self.refusal = refusal
        self._names = iter(names)
        self._is_over = False  # whether no other model is left

    def next_name(
        self, router: Router, caller: Caller, start: ValidStart, bound_region: str
    ) -> str:
        """Return the next model to try; empty if none is left.

        The last one is the requested model, if its engine was the reason: the request then waits
        for that engine, as it does without a fallback. `bound_region` is the region that the
        request may not leave; empty for none.
        """
        for name in self._names:
            allowed = caller.may_use(router.canonical_name(name))
            if allowed and can_serve(router, name, start, bound_region):
                return name
        if self._is_over or not isinstance(self.refusal, EngineError):
            return ""
        self._is_over = True
        return self.requested

    def answer(self, last: Exception) -> Exception:
        """Return the refusal to answer, once no model is left; `last` is that of the last one."""
        return last if self._is_over else self.refusal

    def found(self, caller: Caller, start: ValidStart) -> None:
        """Note that another model has taken the request: it will not come back to the first."""
        self.queue.forgo(caller.payer.organization_id, start.request_id)
        log.info(
            "request_fell_back",
            request_id=str(start.request_id),
            model=start.model,
            requested_model=self.model,
            cause=reason_of(self.refusal),
        )


def can_serve(router: Router, name: str, start: ValidStart, bound_region: str) -> bool:
    """Return whether a model exists and an engine where the request may run takes it now."""
    try:
        route = router.route(name, start.request_id, start.region, bound_region)
    except EngineError:  # the fleet has changed
        return False
    return can_take(route.reach)


def can_take(backend: Startable) -> bool:
    """Return whether a backend takes requests, now or once it has started on demand."""
    return backend.healthy() or backend.condition().starts_on_demand


def is_bound(start: ValidStart) -> bool:
    """Return whether a request is for its model only: its client says so, or it has token ids,
    which mean other tokens to another model.
    """
    return (
        start.no_fallback
        or isinstance(start.prompt[-1], int)
        or bool(start.stop.stop_token_ids)
        or bool(start.sampling.logit_bias)
    )
