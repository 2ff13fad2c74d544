"""Lifecycle of one `Embed` call: tokenize, admit, embed, settle, answer.

It runs as a task of the process, so that cancelling the call cannot interrupt the settlement. It
can be stopped until all texts are embedded (`endings.py` has the charge); from then on it is
settled and answered in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import CancelledEarly
from api.core.messages import input_count_max
from api.core.rate_limiter import REFUSAL_COST_S
from api.generation import state
from api.generation.endings import UsageSoFar, cause_of
from api.generation.parsing.embed_request import (
    TokenizedText,
    ValidEmbed,
    check_against_model,
    embed_response,
    token_count_of,
    tokenize_inputs,
)
from api.generation.parsing.tokenizing import TextJob
from api.generation.request.admission import HoldHandle, answered
from api.generation.request.caller import Caller
from api.generation.request.phases import (
    AdmittedRequest,
    Encoding,
    Ended,
    Held,
    Loading,
    Preparing,
    Queued,
    Received,
    Settling,
)
from api.generation.request.preparation import check_input_bound
from api.generation.request.readiness import engine_lost, wait_until_ready
from api.generation.request.registry import RequestRegistry
from api.generation.state import End, EndDecision, Interruptible, Stopwatch
from api.observability.observer import Ending
from api.queue.fair_queue import ExpectedWait, QueueEntry
from api.queue.queue_admission import Arrival
from inference.engine import EmbeddingRequest, EngineTimings, Startable, Vector
from inference.errors import EngineFailed
from inference.routing.router import EncoderRoute
from metering.core.models import Outcome
from metering.holds.operations import Admit, Settled, new_hold_id

# Tokens per turn: seconds of work on a laptop, for which other requests may wait.
PART_TOKENS = 16_384

Part = tuple[tuple[int, ...], ...]
Text = TypeVar("Text", bound=Sequence[int])
EmbeddingPhase = (
    Received
    | Preparing[EncoderRoute]
    | Loading[AdmittedRequest]
    | Queued[AdmittedRequest]
    | Encoding
    | Settling[AdmittedRequest]
    | Ended
)


class LiveEmbedding:
    """One `Embed` request, in the phases of `phases.py`. `run` is its task."""

    def __init__(self, caller: Caller, start: ValidEmbed, registry: RequestRegistry) -> None:
        self.caller = caller
        self.start = start
        self.phase: EmbeddingPhase = Received()
        self.decision = EndDecision()
        self.usage = UsageSoFar()
        self._registry = registry
        self.watch = Stopwatch(caller.received_at, caller.auth_ms)
        self._answer: asyncio.Future[pb.EmbedResponse] = asyncio.get_running_loop().create_future()
        self._work_s = 0.0  # thread time spent on its texts

    async def answer(self) -> pb.EmbedResponse:
        """Run the request and return the response. Raises the error that ends it.

        If the call is cancelled, the request stops, unless all texts are already embedded.
        """
        self._registry.add_embedding(self)
        tasks: asyncio.TaskGroup = self._registry.tasks
        tasks.create_task(self.run(), name=f"request {self.start.request_id}")
        try:
            return await asyncio.shield(self._answer)
        except asyncio.CancelledError:
            self.stop(Outcome.CANCELLED)
            raise
        except Exception:
            # The error's traceback refers to this object: a cycle that would keep the texts until a
            # collection.
            del self._answer
            raise

    def stop(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Implement `EndDecision.stop`. Nothing is delivered yet: the call fails with an error."""
        self.decision.stop(
            outcome,
            error
            or CancelledEarly(
                f"Your request ended as {outcome} before its texts were embedded. Send it again."
            ),
        )

    def end_if_lapsed(self) -> None:
        """Fail the request if its hold has lapsed."""
        phase = self.phase
        if isinstance(phase, Held) and (lapse := phase.admitted.hold.lapse()) is not None:
            self.stop(Outcome.FAILED, lapse)

    def report_progress(self, outlook: ExpectedWait | None) -> None:
        """Do nothing: the call has no progress messages."""

    async def run(self) -> None:
        """Run the request to its end. Called as a task of the process."""
        outcome, error = None, None
        try:
            # Binds in the context of this task only, so it is never unbound.
            structlog.contextvars.bind_contextvars(request_id=str(self.start.request_id))
            response = await self._embed()
            outcome = Outcome.STOP
            self._count_end(outcome, None)
            if not self._answer.done():
                self._answer.set_result(response)
        except Exception as failure:
            error = failure
            self._count_end(None, error)
            if not self._answer.done():
                self._answer.set_exception(error)
                self._answer.exception()  # marked as retrieved, since the caller may be gone
        finally:
            if self._settled is None:
                self._registry.pace.charge(self.caller.payer, REFUSAL_COST_S + self._work_s)
            self._answer.cancel()
            self._registry.remove(self)
            self.phase = Ended(cause_of(outcome, error))
            del error  # its traceback refers to this frame

    @property
    def _settled(self) -> Settled | None:
        """Final charge. None until settlement, and if nothing is billed."""
        return self.phase.admitted.hold.settled if isinstance(self.phase, Held) else None

    def _count_end(self, outcome: Outcome | None, broken: Exception | None) -> None:
        """Report the end of the request and its timings to the observer."""
        timings = self.watch.timings()
        self._registry.observer.ended(
            Ending(self.caller, self.start, outcome, broken, timings, self._settled)
        )

    async def _embed(self) -> pb.EmbedResponse:
        """Run all steps and return the response. Raises the error that ends the request."""
        registry, bounds = self._registry, self.caller.bounds
        async with contextlib.AsyncExitStack() as stack:
            with Interruptible(self.decision, error_of):
                region = registry.bound_region_of(self.caller, self.start)
                route = registry.router.route_encoder(
                    self.start.model, str(self.start.request_id), region
                )
                # Limits and prices use the canonical name.
                self.start = replace(self.start, model=route.model)
                self.phase = Preparing(route)
                encoder = route.encoder
                check_against_model(self.start, encoder.model, input_count_max(encoder.model))
                job = TextJob(
                    registry.text_work,
                    self.caller.payer,
                    registry.tokenizers[route.served],
                    encoder.model.context_window_tokens,
                )
                texts, self._work_s = await tokenize_inputs(self.start, job, self._check_room)
                token_count = token_count_of(texts)
                check_input_bound(bounds, token_count, "inputs")
                self.watch.lap(state.TOKENIZE)
                entries = self._enter_queue(route, texts, stack)
                hold = await registry.admission.admit(
                    self._admission_request(token_count), self.usage
                )
                stack.push_async_exit(functools.partial(self._end_hold, hold))
                self.caller.on_admitted()
                self.watch.lap(state.ADMISSION)
            admitted = AdmittedRequest(hold, next(iter(entries)))
            self.phase = Queued(admitted)
            try:
                with Interruptible(self.decision, error_of):
                    vectors = await self._encode(route, admitted, entries, region)
                if (lapse := hold.lapse()) is not None:  # this process was suspended
                    raise lapse
                # Delivered, and not journalled: the answer follows the settlement, so a process
                # that dies before has delivered nothing.
                self.usage.input_token_count = token_count
            except EngineFailed:  # logged where it is raised
                raise engine_lost(route.reach) from None
            finally:
                self.decision.close(Outcome.STOP)
                self.phase = Settling(admitted)
                for entry in entries:
                    entry.leave()
        self.watch.lap(state.SETTLE)
        assert hold.settled is not None, "a delivered embedding is settled"
        return embed_response(texts, vectors, hold.admitted, hold.settled, self.watch.timings())

    async def _end_hold(
        self,
        hold: HoldHandle,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Settle or void the hold. Raises the error if that fails."""
        outcome, timings = (Outcome.STOP, self.watch.timings()) if error is None else (None, None)
        await answered(lambda done: hold.end(outcome, error, done, timings))

    def _enter_queue(
        self, route: EncoderRoute, texts: list[TokenizedText], stack: contextlib.AsyncExitStack
    ) -> dict[QueueEntry, Part]:
        """Queue all parts before a hold is taken, so that a refusal leaves no trace.

        Raises the errors of `FairQueue.enter`.
        """
        caller, encoder = self.caller, route.encoder
        queue = self._registry.queue_of[encoder]
        tenant_id = caller.payer.organization_id
        reach = route.reach
        engine_wait_s = 0.0 if reach.healthy() else reach.condition().retry_after_s
        entries: dict[QueueEntry, Part] = {}
        for part in parts_of([text.token_ids for text in texts]):
            arrival = Arrival(
                request_id=self.start.request_id,
                tenant_id=tenant_id,
                input_token_count=sum(map(len, part)),
                output_token_count_max=0,
                tier=self.start.tier,
                weight=self._registry.weights.get(tenant_id.int, 1.0),
                deadline=caller.deadline,
            )
            entries[stack.enter_context(queue.enter(arrival, engine_wait_s))] = part
        return entries

    async def _check_room(self, least_token_count: int) -> None:
        await self._registry.admission.check_room(self._admission_request(least_token_count))

    def _admission_request(self, token_count: int) -> Admit:
        start = self.start
        ids = new_hold_id(), self.caller.payer, start.request_id, start.payload_hash
        return Admit(
            *ids,
            start.model,
            token_count,
            0,
            0,
            start.labels,
            start.tier,
            embedding=True,
            end_user=start.end_user,
        )

    async def _encode(
        self,
        route: EncoderRoute,
        admitted: AdmittedRequest,
        entries: dict[QueueEntry, Part],
        region: str,
    ) -> list[Vector]:
        """Embed all parts, each in its turn, and return their vectors.

        They do not leave `region`, if one is given.
        """
        await self._wait_until_ready(route.reach, admitted)
        self.watch.lap(state.COLD_START)
        vectors: list[Vector] = []
        queue_ms = encode_ms = 0.0
        for entry, part in entries.items():
            self.phase = Queued(admitted)
            joined_at = time.monotonic()
            await entry.wait_for_dispatch()
            queue_ms += (time.monotonic() - joined_at) * 1000
            await self._wait_until_ready(route.reach, admitted)  # it may have failed meanwhile
            self.phase = Encoding(admitted)
            begun = functools.partial(self._begun, entry, sum(map(len, part)))
            embedded = await route.encoder.embed(
                EmbeddingRequest(part, rank=entry.rank, on_begin=begun, bound_region=region)
            )
            entry.generated(0)
            entry.leave()
            queue_ms, encode_ms = queue_ms + embedded.queue_ms, encode_ms + embedded.encode_ms
            vectors += embedded.vectors
        self.watch.engine_finished(EngineTimings(queue_ms, encode_ms, 0.0))
        return vectors

    def _begun(self, entry: QueueEntry, token_count: int) -> None:
        """Count the input of a part that the encoder has started on, which makes it billable."""
        entry.begun()
        self.usage.input_token_count += token_count

    async def _wait_until_ready(self, reach: Startable, admitted: AdmittedRequest) -> None:
        if reach.healthy():
            return
        self.phase = Loading(admitted)
        await wait_until_ready(reach, self.start.model, self._registry.cold_start_wait_s)


def error_of(end: End) -> Exception:
    """Return the error with which a request was stopped."""
    assert end.error is not None, "an embedding is stopped with an error"
    return end.error


def parts_of(texts: Sequence[Text], token_count_max: int = PART_TOKENS) -> list[tuple[Text, ...]]:
    """Split texts, in order, into parts of at most `token_count_max` tokens, or of one text."""
    parts: list[list[Text]] = []
    room = 0
    for text in texts:
        if not parts or len(text) > room:
            parts.append([])
            room = token_count_max
        parts[-1].append(text)
        room -= len(text)
    return [tuple(part) for part in parts]
