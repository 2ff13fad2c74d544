"""Registry of the requests that a process is running, with the components they share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from api.access.auth import check_model
from api.core.errors import (
    BoundToRegion,
    FieldViolation,
    InvalidRequest,
    KeepTooLong,
    RequestUnderWay,
)
from api.core.interceptor import READ_BYTES, READ_S
from api.core.rate_limiter import REFUSAL_COST_S, Payer, RateLimiter
from api.generation.delivery.output_buffer import OutputBuffer
from api.generation.delivery.replay import Key, ReplayBuffers
from api.generation.delivery.replayable_buffer import ReplayableBuffer
from api.generation.delivery.stream_writer import Subscription
from api.generation.endings import UsageSoFar
from api.generation.parsing.embed_request import ValidEmbed
from api.generation.parsing.start_frame import ValidStart
from api.generation.parsing.text_work import TextWork
from api.generation.request.admission import Admission
from api.generation.request.caller import Caller
from api.generation.request.phases import WAITING, Held, Phase, Preparing
from api.generation.request.relay import Relays
from api.generation.state import Stopwatch
from api.observability.observer import Observer
from api.queue.fair_queue import ExpectedWait, FairQueue
from common.incidents import Retries
from inference.engine import Backend, pool_of
from inference.routing.router import Router
from inference.safety.safety import SafetyChecker
from inference.text.tokenizer import Tokenizer
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.quotas.quota_rules import Owner
from metering.tenants.authentication import Principal

PARSING_REST = 3.0  # a quarter of the time is for parsing
PROGRESS_FRAMES_MAX = 500  # per interval: a few ms of work; beyond it requests take turns


Value = TypeVar("Value")
NO_ORGANIZATION = uuid.UUID(int=0)


class Running(Protocol):
    """Running or waiting request, as seen by control commands, reports and health checks."""

    @property
    def caller(self) -> Caller:
        """Caller of the request."""

    @property
    def start(self) -> ValidStart | ValidEmbed:
        """Parsed start frame or `Embed` request."""

    @property
    def phase(self) -> Phase:
        """Current phase of the request."""

    @property
    def usage(self) -> UsageSoFar:
        """Token counts so far."""

    @property
    def watch(self) -> Stopwatch:
        """Stopwatch of the request."""

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Stop the request as soon as possible. The arguments are those of `EndDecision.stop`."""

    def end_if_lapsed(self) -> None:
        """End the request if its hold has lapsed."""

    def report_progress(self, outlook: ExpectedWait | None) -> None:
        """Send a progress frame if the request waits. `outlook` is None if an engine has it."""


class Generating(Running, Protocol):
    """Running generate request, to whose output streams can attach."""

    @property
    def start(self) -> ValidStart:
        """Parsed start frame."""

    @property
    def output(self) -> OutputBuffer:
        """Output buffer, to which streams attach."""


class RequestRegistry:
    """Registry of the running requests of a process, and of the components they share."""

    def __init__(
        self,
        admission: Admission,
        router: Router,
        tokenizers: Mapping[str, Tokenizer],
        safety: SafetyChecker | None = None,
        relays: Relays | None = None,
        observer: Observer | None = None,
        pace: RateLimiter | None = None,
    ) -> None:
        """`safety` checks prompts and outputs; None: no checks.

        `relays` connects streams to requests in other processes; None: there are none. `observer`
        counts ended requests and `pace` limits the frames of each key; None creates a new one.
        """
        self.settings = settings = admission.settings
        self.observer = observer or Observer(model.name for model in router.models())
        self.safety = safety
        self.admission = admission
        self.router = router
        # Queues of all engines and encoders, those that finish their last requests included.
        self.queue_of: dict[Backend, FairQueue] = {}
        # Of organizations whose weight in the fair queues is not 1, by id as an integer
        self.weights: dict[int, float] = {}
        # Regions of organizations that were bound since the start of this process, by id as an
        # integer; empty for none
        self.bindings: dict[int, str] = {}
        self.queues_changed: Callable[[], None] = lambda: None  # set by who shares them
        self.cold_start_wait_s = settings.requests.cold_start_wait_s
        self.replays = ReplayBuffers[ReplayableBuffer](
            admission.journal,
            bytes_max=settings.delivery.replay_bytes_max,
            bytes_per_request_max=settings.delivery.replay_bytes_per_request_max,
        )
        self.relays = relays
        self.window_tokens_max = 0
        self.fleet_changed(tokenizers)
        self.pace = pace or RateLimiter(settings.messages.frames_share_max)
        self.text_work = TextWork(settings.preparation, self.weights)
        # Parsers keep the interpreter: the event loop would wait for each of several threads, and
        # for one long message after the other.
        self._parsing = TextWork(
            replace(settings.preparation, thread_count=1), self.weights, PARSING_REST
        )
        self.tasks: asyncio.TaskGroup = admission.tasks  # tasks of requests
        self._live: dict[Running, None] = {}  # in order of arrival
        # Keys: project and request ids as integers, because UUIDs are hashed in Python.
        self._by_key: dict[tuple[int, int], Generating] = {}
        self._progress = Retries("progress")
        # Held while a large message of an API key is parsed
        self._large: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    def set_weights(self, milli: Mapping[uuid.UUID, int]) -> None:
        """Set the weights of all organizations, in thousandths; others weigh 1.

        Waiting requests are ordered by the new weights.
        """
        weights = {
            organization_id.int: weight_milli / 1000
            for organization_id, weight_milli in milli.items()
            if weight_milli != 1000
        }
        if weights == self.weights:
            return
        self.weights.clear()
        self.weights.update(weights)
        for queue in self.queue_of.values():
            queue.reweigh(weights)

    def fleet_changed(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        """Follow the router, which has another fleet: these tokenizers by served name, and queues.

        A backend that stays keeps its queue. That of one that left is kept until `forget`.
        """
        self.tokenizers = tokenizers
        for backend in self.router.backends():
            if backend not in self.queue_of:
                queue = FairQueue(self.settings.queue, backend.statistics)
                self.queue_of[backend] = queue
        models = self.router.models()
        self.window_tokens_max = max((each.context_window_tokens for each in models), default=0)
        self.observer.know(model.name for model in models)
        self.queues_changed()

    def uses(self, backend: Backend) -> bool:
        """Return whether a running request has been routed to a backend."""
        queue = self.queue_of[backend]
        for request in self._live:
            phase = request.phase
            if isinstance(phase, Held):
                if phase.admitted.entry.queue is queue:
                    return True
            elif isinstance(phase, Preparing) and phase.route.backend is backend:
                return True
        return False

    def forget(self, backend: Backend) -> None:
        """Remove the queue of a backend that left and is not used any more."""
        del self.queue_of[backend]

    @property
    def queues(self) -> dict[str, FairQueue]:
        """Queues of the present fleet, by served name."""
        return {backend.model.name: self.queue_of[backend] for backend in self.router.backends()}

    def shared_queues(self) -> dict[str, FairQueue]:
        """Find the queues before engines that other processes use too; return them by pool.

        Processes share a pool if they serve the same version of a model by the same engines.
        """
        return {
            f"{backend.model.name} {pool}": self.queue_of[backend]
            for backend in self.router.backends()
            if (pool := pool_of(backend))
        }

    def add(self, request: Generating) -> None:
        """Add a generate request. `find` returns it unless an earlier one has its key."""
        self._live[request] = None
        key = request.caller.payer.project_id.int, request.start.request_id.int
        self._by_key.setdefault(key, request)

    def add_embedding(self, request: Running) -> None:
        """Add an embedding request, to which no client can attach."""
        self._live[request] = None

    async def share_to_read(self, owner: Owner, byte_count: int) -> None:
        """Wait until a message of this API key may be parsed.

        Until then its bytes count as text in preparation. Raises: PreparationLimit, Overloaded.
        """
        with self.text_work.permit(owner, byte_count):
            await self.pace.wait_for_share(owner)
            self.pace.read(owner, READ_S.get(), READ_BYTES.get())

    async def in_order(self, owner: Owner, size: int, call: Callable[[], Value]) -> Value:
        """Run work on a large message with `in_thread`, after earlier messages of the same API key.

        The work is charged before the next message of the key may run.
        """
        lock = self._large.setdefault(owner.api_key_id.int, asyncio.Lock())
        async with lock:
            await self.pace.wait_for_share(owner)
            return await self.in_thread(owner, size, call)

    async def in_thread(self, payer: Payer, size: int, call: Callable[[], Value]) -> Value:
        """Run work on a message of `size` bytes in a thread, fairly, and charge its processor time.

        All payers without a known key together count as one organization. Raises the error of the
        call.
        """
        loop = asyncio.get_running_loop()

        def counted() -> Value:
            began_at = time.thread_time()
            try:
                return call()
            finally:  # even if the client has disconnected
                cost_s = time.thread_time() - began_at
                loop.call_soon_threadsafe(self.pace.charge_in_thread, payer, cost_s)

        organization_id = NO_ORGANIZATION if isinstance(payer, str) else payer.organization_id
        value, _ = await self._parsing.run(organization_id, size, counted)
        return value

    def find(self, key: Key) -> Generating | None:
        """Return the request with this project and id that is running or waiting here, or None."""
        project_id, request_id = key
        return self._by_key.get((project_id.int, request_id.int))

    def check_rights(self, principal: Principal, start: ValidStart) -> None:
        """Check a caller's rights to start. Raises: ModelNotAllowed, ModelUnknown, KeepTooLong."""
        if principal.models:
            check_model(principal, self.router.canonical_name(start.model))
        keep_max_s = self.settings.delivery.keep_on_disconnect_max_s
        if start.keep_s is not None and start.keep_s > keep_max_s:
            raise KeepTooLong(start.keep_s, keep_max_s)

    def bound_region_of(self, caller: Caller, start: ValidStart | ValidEmbed) -> str:
        """Return the region that a request may not leave; empty for none.

        A binding may be newer than the check of the caller's key. Raises: BoundToRegion if it is
        another region than that of this process, InvalidRequest for labels and end users if the
        database is elsewhere.
        """
        region = self.bindings.get(caller.payer.organization_id.int, caller.region)
        if region not in ("", self.settings.models.region):
            raise BoundToRegion(region, self.settings.models.region)
        self.check_kept(region, end_user=start.end_user, labels=start.labels)
        return region

    def check_kept(self, region: str, *, end_user: str, labels: Mapping[str, str]) -> None:
        """Raise InvalidRequest for names that the database may not have, as they leave a region."""
        if region in ("", self.settings.database.region):
            return
        for field, is_given in (("end_user", bool(end_user)), ("labels", bool(labels))):
            if is_given:
                wrong = (
                    f"would be stored in a database that is not known to be in {region!r}, which"
                    " your organization is bound to: leave it out, or ask the operator to set"
                    " WEIR_DATABASE_REGION"
                )
                raise InvalidRequest([FieldViolation(field, wrong)])

    def same_request(
        self, project_id: uuid.UUID, start: ValidStart, received: Subscription | None = None
    ) -> Generating | None:
        """Find the running request that a start frame repeats; None if there is none.

        Frames with the same id and payload are the same request. `received` is the stream's own
        subscription to a request with this id, which may run in another process. Raises
        RequestUnderWay if the payload differs, RequestInFlight if the payload is not known here.
        """
        running = self._by_key.get((project_id.int, start.request_id.int))
        if running is not None:
            payload_hash: bytes | None = running.start.payload_hash
        elif received is not None:
            payload_hash = received.payload_hash
        else:
            return None
        if payload_hash is None:
            raise RequestInFlight(
                "This stream has attached to a request with this request_id. Wait until it ends."
            )
        if payload_hash != start.payload_hash:
            raise RequestUnderWay(
                "A request with this request_id and another payload is already running. Use a new"
                " request_id for a new request."
            )
        return running

    def charge_refusal(self, owner: Owner, subscription: Subscription) -> None:
        """Charge the caller for a refused request that was started on this stream.

        Quotas bound admitted requests only.
        """
        if subscription.is_refused and subscription.payload_hash is not None:
            self.pace.charge(owner, REFUSAL_COST_S)

    @property
    def is_draining(self) -> bool:
        """True once the process admits no more requests."""
        return self.admission.capacity.is_draining

    def running(self) -> tuple[Running, ...]:
        """Return all running and waiting requests, in order of arrival."""
        return tuple(self._live)

    def remove(self, request: Running) -> None:
        """Remove a request, which has ended."""
        self._live.pop(request, None)
        key = request.caller.payer.project_id.int, request.start.request_id.int
        if self._by_key.get(key) is request:
            del self._by_key[key]

    def fail_all(self, error: Exception) -> None:
        """Stop all running requests. Delivered output is settled; clients receive the error."""
        for request in list(self._live):
            request.stop(Outcome.FAILED, error)

    def end_lapsed(self) -> None:
        """Stop every request with a lapsed hold, newest first, so that the engine starts none."""
        for request in reversed(list(self._live)):
            with self._progress.survive(request.start.request_id):
                request.end_if_lapsed()

    async def report_progress_regularly(self) -> None:
        """Send progress frames, and end requests with lapsed holds, every `progress_interval_s`."""
        first = 0
        while True:
            await asyncio.sleep(self.settings.requests.progress_interval_s)
            if self.admission.holds.may_have_lapsed():
                self.end_lapsed()
            first = self._report_progress(first)

    def _report_progress(self, first: int) -> int:
        """Send progress frames to waiting requests from index `first` on; return the next index."""
        waiting = [
            (request, phase.admitted.entry)
            for request in self._live
            if isinstance(phase := request.phase, WAITING)
        ]
        outlooks = (
            {
                outlook.entry: outlook
                for queue in self.queue_of.values()
                for outlook in queue.expected_waits()
            }
            if waiting
            else {}
        )
        for request, entry in waiting[first : first + PROGRESS_FRAMES_MAX]:
            with self._progress.survive(request.start.request_id):
                request.report_progress(outlooks.get(entry))
        end = first + PROGRESS_FRAMES_MAX
        return end if end < len(waiting) else 0
