"""What all requests of this process share, and the set of those that run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from api.admission import Admission
from api.live import Caller, LiveRequest, Phase
from api.wire import ValidStart
from inference.router import Router
from inference.safety import SafetyChecker
from inference.tokenizer import Tokenizer
from metering.operations import Outcome


class Process:
    """What all requests of this process share, and the set of those that run."""

    def __init__(
        self, admission: Admission, router: Router, tokenizers: Mapping[str, Tokenizer], safety: SafetyChecker | None = None
    ) -> None:
        """safety: what prompts and outputs are checked by; None if they are not."""
        self.safety = safety
        self.admission = admission
        self.router = router
        self.tokenizers = tokenizers
        self._live: dict[LiveRequest, None] = {}  # in order of arrival

    def begin(self, caller: Caller, start: ValidStart, on_end: Callable[[LiveRequest], None]) -> LiveRequest:
        """Run a request. Its end comes through the caller's outbox; `on_end` is called after that was pushed."""
        request = LiveRequest(caller, start, self, on_end)
        self._live[request] = None
        request.run_in(self.admission.tasks)
        return request

    def running(self) -> tuple[LiveRequest, ...]:
        """What runs or waits, in order of arrival."""
        return tuple(self._live)

    def ended(self, request: LiveRequest) -> None:
        """Forget a request that has ended."""
        self._live.pop(request, None)

    def fail_all(self, error: Exception) -> None:
        """Stop everything that runs; what was delivered is settled, and the clients are told why."""
        for request in list(self._live):
            request.stop(Outcome.FAILED, error)

    async def tell_progress_regularly(self) -> None:
        """Send progress frames to whoever waits, until cancelled."""
        while True:
            await asyncio.sleep(self.admission.settings.progress_interval_s)
            position: Counter[str] = Counter()
            for request in list(self._live):
                request.tell_progress(position[request.start.model])
                if request.phase in (Phase.LOADING, Phase.QUEUED):
                    position[request.start.model] += 1
