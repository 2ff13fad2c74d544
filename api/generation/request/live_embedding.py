"""Lifecycle of one `Embed` call: tokenize, admit, embed, settle, answer.

It runs as a task of the process, so that cancelling the call cannot interrupt its settlement. It
can be stopped until all texts are embedded (`endings.py` holds the charge); then it is settled and
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import structlog
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import CancelledEarly, EngineLost, InputsTooLong, LongInput
from api.core.messages import input_count_max
from api.core.rate_limiter import REFUSAL_COST_S
from api.generation import state
from api.generation.delivery.stream_writer import UsageSoFar
from api.generation.parsing.embed_request import (
    TokenizedText,
    ValidEmbed,
    check_against_model,
    embed_response,
)
from api.generation.parsing.text_work import INLINE_COST_MAX, MESSAGE_COST_CHARS
from api.generation.parsing.tokenizing import TextJob, check_chars
from api.generation.request.admission import Lease, answered
from api.generation.request.live_request import RETRY_S_MIN, Caller, wait_until_ready
from api.generation.request.preparation import check_input_bound
from api.generation.state import End, Interruptible, Life, State, Stopwatch
from api.observability.observer import Ending
from api.queue.fair_queue import ExpectedWait, QueueEntry
from api.queue.queue_admission import Arrival
from inference.engine import EmbeddingRequest, Encoder, EngineTimings, Vector
from inference.errors import EngineFailed
from inference.text.tokenizer import TokenLimitExceeded
from metering.core.models import Outcome
from metering.holds.operations import Admit, Settled, new_hold_id

if TYPE_CHECKING:
    from api.generation.request.registry import Process
from collections.abc import Sequence
from typing import TypeVar

# Tokens per turn: seconds of work on a laptop, for which other requests may wait.
PART_TOKENS = 16_384


class LiveEmbedding:
    """One `Embed` request."""

    def __init__(self, caller: Caller, start: ValidEmbed, process: Process) -> None:
        self.caller = caller
        self.start = start
        self.life = Life()
        self.place: QueueEntry | None = None  # of its first part, once admitted
        self.usage = UsageSoFar()
        self._served = ""  # name of the encoder, once routed
        self._process = process
        self._watch = Stopwatch(caller.received_at, caller.auth_ms)
        self._answer: asyncio.Future[pb.EmbedResponse] = asyncio.get_running_loop().create_future()
        self._lease: Lease | None = None
        self._work_s = 0.0  # thread time spent on its texts
        self._timings: dict[str, float] | None = None  # set once all texts are embedded
        self._settled: Settled | None = None

    @property
    def routed_model(self) -> str:
        """Canonical model name; empty before routing, since the client's name can be any text."""
        return self.start.model if self._served else ""

    @property
    def hold_id(self) -> uuid.UUID | None:
        """Id of its hold; None before admission."""
        return None if self._lease is None else self._lease.admitted.hold_id

    @property
    def tokens_per_second(self) -> float:
        """Return 0: no tokens are delivered before the end."""
        return 0.0

    async def answer(self) -> pb.EmbedResponse:
        """Return the response.

        Cancellation stops the request unless all texts are embedded. Raises its error.
        """
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
        """Implement `Life.stop`. Nothing is delivered yet, so the call fails with an error."""
        self.life.stop(
            outcome,
            error
            or CancelledEarly(f"the request ended as {outcome} before its texts were embedded"),
        )

    def end_if_lapsed(self) -> None:
        """Fail the request if its hold has lapsed."""
        if self._lease is not None and (lapse := self._lease.lapse()) is not None:
            self.stop(Outcome.FAILED, lapse)

    def tell_progress(self, outlook: ExpectedWait | None) -> None:
        """Do nothing: the call has no progress messages."""

    async def run(self) -> None:
        """Run the request to its end, as a task of the process."""
        try:
            # Binds in the context of this task only, so it is never unbound.
            structlog.contextvars.bind_contextvars(request_id=str(self.start.request_id))
            response = await self._embed()
            self._tell(None)
            if not self._answer.done():
                self._answer.set_result(response)
        except EngineFailed:  # logged where it is raised
            encoder = self._process.router.choose_encoder(self._served)
            self._fail(EngineLost(max(encoder.condition().retry_after_s, RETRY_S_MIN)))
        except Exception as error:
            self._fail(error)
        finally:
            if self._settled is None:
                self._process.pace.charge(self.caller.payer, REFUSAL_COST_S + self._work_s)
            self._answer.cancel()
            self._process.ended(self)
            self.life.over()

    def _tell(self, broken: Exception | None) -> None:
        """Report the end of the request and its timings to operators."""
        outcome, timings = Outcome.STOP if broken is None else None, self._watch.timings()
        self._process.observer.ended(
            Ending(self.caller, self.start, outcome, broken, timings, self._settled)
        )

    def _fail(self, error: Exception) -> None:
        """Fail the call. The error is marked as retrieved, since the caller may be gone."""
        self._tell(error)
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()

    async def _embed(self) -> pb.EmbedResponse:
        """Run all steps and return the response. Raises the error that ends the request."""
        async with contextlib.AsyncExitStack() as stack:
            self.life.become(State.PREPARING)
            with Interruptible(self.life, error_of):
                route = self._process.router.route_encoder(
                    self.start.model, str(self.start.request_id)
                )
                # Limits and prices use the canonical name.
                self.start = replace(self.start, model=route.model)
                encoder, self._served = route.encoder, route.served
                check_against_model(self.start, encoder.model, input_count_max(encoder.model))
                job = TextJob(
                    self._process.text_work,
                    self.caller.payer,
                    self._process.tokenizers[self._served],
                    encoder.model.context_window_tokens,
                )
                texts, self._work_s = await tokenize_inputs(self.start, job, self._check_room)
                check_input_bound(self.caller.bounds, token_count_of(texts), "inputs")
                self._watch.lap(state.TOKENIZE)
                places = self._enter_queue(encoder, texts, stack)
                lease = await self._process.admission.admit(
                    self._admission_request(token_count_of(texts)), self.usage
                )
                stack.push_async_exit(functools.partial(self._end_hold, lease))
                self.life.become(State.ADMITTED)
                self.caller.on_admitted()
                self._watch.lap(state.ADMISSION)
            self._lease = lease
            try:
                with Interruptible(self.life, error_of):
                    vectors = await self._encode(encoder, places)
                self._deliver(lease, texts)
            finally:
                self._lease = None
                for place in places:
                    place.leave()
        self._watch.lap(state.SETTLE)
        assert lease.settled is not None, "a delivered embedding is settled"
        return embed_response(texts, vectors, lease.admitted, lease.settled, self._watch.timings())

    async def _end_hold(
        self,
        lease: Lease,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Settle or void the hold. Raises the error if that fails."""
        outcome = Outcome.STOP if error is None else None
        await answered(lambda done: lease.end(outcome, error, done, self._timings))
        self._settled = lease.settled

    def _enter_queue(
        self, encoder: Encoder, texts: list[TokenizedText], stack: contextlib.AsyncExitStack
    ) -> dict[QueueEntry, Part]:
        """Queue all parts before the hold is taken, so that a refusal leaves no trace.

        Raises as `enter`.
        """
        caller, queue = self.caller, self._process.queues[self._served]
        tenant_id = caller.payer.organization_id
        engine_wait_s = 0.0 if encoder.healthy() else encoder.condition().retry_after_s
        places: dict[QueueEntry, Part] = {}
        for part in parts_of([text.token_ids for text in texts]):
            arrival = Arrival(
                request_id=self.start.request_id,
                tenant_id=tenant_id,
                input_token_count=sum(map(len, part)),
                output_token_count_max=0,
                tier=self.start.tier,
                weight=self._process.admission.settings.queue_weights.get(str(tenant_id), 1.0),
                deadline=caller.deadline,
            )
            places[stack.enter_context(queue.enter(arrival, engine_wait_s))] = part
        self.place = next(iter(places))
        return places

    async def _check_room(self, least_token_count: int) -> None:
        await self._process.admission.check_room(self._admission_request(least_token_count))

    def _admission_request(self, token_count: int) -> Admit:
        start = self.start
        ids = new_hold_id(), self.caller.payer, start.request_id, start.payload_hash
        return Admit(*ids, start.model, token_count, 0, 0, start.labels, start.tier, embedding=True)

    async def _encode(self, encoder: Encoder, places: dict[QueueEntry, Part]) -> list[Vector]:
        """Return the vectors of all parts. Each part waits for its own turn."""
        await self._wait_until_ready(encoder)
        self._watch.lap(state.COLD_START)
        vectors: list[Vector] = []
        queue_ms = encode_ms = 0.0
        for place, part in places.items():
            self.life.become(State.QUEUED)
            joined_at = time.monotonic()
            await place.wait_for_dispatch()
            queue_ms += (time.monotonic() - joined_at) * 1000
            await self._wait_until_ready(encoder)  # the encoder may have failed meanwhile
            self.life.become(State.RUNNING)
            begun = functools.partial(self._begun, place, sum(map(len, part)))
            embedded = await encoder.embed(EmbeddingRequest(part, rank=place.rank, on_begin=begun))
            place.generated(0)
            place.leave()
            queue_ms, encode_ms = queue_ms + embedded.queue_ms, encode_ms + embedded.encode_ms
            vectors += embedded.vectors
        self._watch.engine_finished(EngineTimings(queue_ms, encode_ms, 0.0))
        return vectors

    def _begun(self, place: QueueEntry, token_count: int) -> None:
        """Count the input of a part as computed: it is billed unless the service fails."""
        place.begun()
        self.usage.input_token_count += token_count

    async def _wait_until_ready(self, encoder: Encoder) -> None:
        if encoder.healthy():
            return
        self.life.become(State.LOADING)
        await wait_until_ready(
            encoder, self.start.model, self._process.admission.settings.cold_start_wait_s
        )

    def _deliver(self, lease: Lease, texts: list[TokenizedText]) -> None:
        """Count the vectors as delivered. Raises: HoldEnded, DatabaseUnavailable.

        Not journalled: the answer follows the settlement, so a process that dies before has
        delivered nothing.
        """
        if (lapse := lease.lapse()) is not None:  # this process was suspended
            raise lapse
        self.life.become(State.SETTLING)
        self.usage.input_token_count = token_count_of(texts)
        self._timings = self._watch.timings()


Part = tuple[tuple[int, ...], ...]


def error_of(end: End) -> Exception:
    """Return the error of a request that was stopped."""
    assert end.error is not None, "an embedding is stopped with an error"
    return end.error


def token_count_of(texts: list[TokenizedText]) -> int:
    """Return the tokens of all texts."""
    return sum(len(text.token_ids) for text in texts)


async def tokenize_inputs(
    request: ValidEmbed, job: TextJob, check_room: Callable[[int], Awaitable[None]] | None = None
) -> tuple[list[TokenizedText], float]:
    """Return the token ids of each text, and the processor time spent.

    A text that may be truncated is tokenized only as far as the model takes it. check_room: awaited
    once before long texts are tokenized, with a lower bound of their tokens. Raises: InputsTooLong
    with every such text, PromptTooLarge, PreparationLimit, Overloaded.
    """
    limit, tokenizer = job.window, job.tokenizer
    truncates = request.truncates

    def tokenize(index: int, given: str | tuple[int, ...]) -> TokenizedText | LongInput:
        if not isinstance(given, str):
            if len(given) > limit and not truncates:
                return LongInput(index, len(given))
            return TokenizedText(given[:limit], truncated=len(given) > limit)
        if truncates:
            ids, truncated = tokenizer.encode_within(given, limit)
            return TokenizedText(ids, truncated=truncated)
        try:
            ids = tokenizer.encode(given, token_count_max=limit)
        except TokenLimitExceeded as exceeded:
            return LongInput(index, exceeded.least_token_count, is_least=True)
        return (
            LongInput(index, len(ids)) if len(ids) > limit else TokenizedText(ids, truncated=False)
        )

    def tokenize_all() -> list[TokenizedText]:
        found = [tokenize(index, given) for index, given in enumerate(request.inputs)]
        if long := [each for each in found if isinstance(each, LongInput)]:
            raise InputsTooLong(long, limit)
        return [each for each in found if isinstance(each, TokenizedText)]

    texts = [given for given in request.inputs if isinstance(given, str)]
    cost = sum([len(text) + MESSAGE_COST_CHARS for text in texts])
    if cost <= INLINE_COST_MAX:
        return tokenize_all(), 0.0
    if not truncates:
        for index, given in enumerate(request.inputs):
            if isinstance(given, str):
                check_chars(f"inputs[{index}]", len(given), tokenizer.chars_max(limit), limit)
    with job.work.permit(job.payer, cost):
        if check_room is not None:
            await check_room(1)
        return await job.work.run(job.payer.organization_id, cost, tokenize_all)


Text = TypeVar("Text", bound=Sequence[int])


def parts_of(texts: Sequence[Text], token_count_max: int = PART_TOKENS) -> list[tuple[Text, ...]]:
    """Split texts in order into parts of at most this many tokens, or of a single longer text."""
    parts: list[list[Text]] = []
    room = 0
    for text in texts:
        if not parts or len(text) > room:
            parts.append([])
            room = token_count_max
        parts[-1].append(text)
        room -= len(text)
    return [tuple(part) for part in parts]
