"""A remote engine in the API process: connect, monitor, reconnect. One target is one engine.

Billed values are verified: tokens are counted here, and an impossible count fails its sequence.
Requests are queued and ranked here, since the services have no ranks.

Each sequence is one call (`RemoteAnswers`). `Upkeep` monitors the connection (channel state, server
health, cached blocks, stuck sequences) and calls back once, with the reason, when the connection is
unusable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

import grpc
from smg_grpc_proto.generated import common_pb2

from common.incidents import Retries
from inference.adapters.external_faults import StallWatch
from inference.adapters.external_queue import END_WAIT_S, ExternalQueue
from inference.adapters.external_request import Answer, Choice, Output, unreadable
from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.adapters.remote_connection import DIALECTS, Link
from inference.adapters.remote_dialects import (
    BLOCK_TOKENS_MAX,
    SHARES,
    Dialect,
    ServerFacts,
    ServerUnfit,
    block_counts,
    engine_error,
)
from inference.adapters.remote_examination import Examination
from inference.adapters.remote_settings import (
    LOSS_MESSAGE,
    RemoteSettings,
    Service,
    abort_limits,
    masked,
)
from inference.checkpoint.checkpoint import read_external_model
from inference.engine import EngineStatistics, EventSink, GenerationRequest, SequenceEvent
from inference.errors import EngineError, EngineFailed, RequestImpossible
from inference.kv_blocks import PrefixHint, salt_hash
from inference.limits import EngineLimits, external_continuation_fault
from inference.text.text_decoder import GivenTextDecoder
from inference.text.tokenizer import Tokenizer
from inference.workers.engine import EngineSequence, SupervisedEngine
from inference.workers.worker import overdue

HINT_TOKENS_MAX = 4 << 20  # tokens to remember as sent, if the server does not report cached tokens
UNKNOWN_BLOCK_COUNT = 1 << 40  # a request is limited by the server's context window instead
IDLE_POLL_S = 0.01  # while the last sequences drain on close
DEFAULT_BLOCK_TOKENS = dict.fromkeys(Service, 16) | {Service.TRTLLM: 32}

UNANSWERED_MAX = 2  # consecutive health polls that may fail: one may be lost under load
STALL_POLL_S = 0.5
EVENTS_AGAIN_S = 30.0  # seconds until a subscription that ended is renewed
BLOCKS_MAX = 1 << 18  # of the index, some 250 MB; a larger cache is known by its events no more
BLOCKS_AT_ONCE = 256  # of events, applied before other tasks run: 5 ms


class RemoteEngine(SupervisedEngine):
    """Implement `Engine` with a server: `trtllm-serve --grpc`, `vllm serve`."""

    loss_message = LOSS_MESSAGE

    def __init__(self, settings: RemoteSettings) -> None:
        """Read the checkpoint's configuration and tokenizer; does not connect.

        Raises CheckpointInvalid, or ValueError for contradictory limits.
        """
        model, self._end_token_ids = read_external_model(
            settings.directory,
            name=settings.name,
            engine=f"remote {settings.target.service.value}",
            context_window_tokens_max=settings.context_window_tokens_max,
            capabilities=DIALECTS[settings.target.service].capabilities,
        )
        limits = EngineLimits(
            context_window_tokens=model.context_window_tokens,
            step_token_count_max=max(settings.running_sequence_count_max, 1),
            running_sequence_count_max=settings.running_sequence_count_max,
            waiting_sequence_count_max=settings.waiting_sequence_count_max,
        )
        super().__init__(
            model,
            limits,
            settings,
            settings.block_tokens or DEFAULT_BLOCK_TOKENS[settings.target.service],
        )
        self._settings = settings
        self._declared_model = model  # of the dialect; a server may support fewer fields
        tokenizer = Tokenizer(settings.directory)
        self._end_token_ids |= tokenizer.end_token_ids
        self._decoder = tokenizer.decoder
        self._began_at_s = -math.inf
        self._connection: Upkeep | None = None  # set while connected
        self._examination: Examination  # of the last server checked
        self._facts: ServerFacts
        self._link = Link(settings)

    @property
    def pool(self) -> str:
        """Implement `Pooled.pool`: the server's address."""
        return str(self._settings.target)

    def statistics(self) -> EngineStatistics:
        """Implement `Engine.statistics`: sequences sent from here, blocks as last reported."""
        return (
            EngineStatistics() if self._connection is None else self._connection.queue.statistics()
        )

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine.predict_cached_token_count` by sent prompts and cache events."""
        if self._connection is None or not (
            self._connection.dialect.reports_cached and self._may_reuse(self._connection.dialect)
        ):
            return 0
        sent = super().predict_cached_token_count(prompt_token_ids, cache_salt)
        if not self._connection.knows_all_blocks:
            return sent
        root = root_of(self._connection.dialect.published_salt(cache_salt))
        held = self._connection.blocks.matched_token_count(prompt_token_ids, root)
        return held if self._settings.share_prefixes else min(held, sent)

    async def _run(self) -> str:
        self._began_at_s = time.monotonic()
        return await self._link.run(self._examine, self._use)

    async def _examine(self, dialect: Dialect) -> None:
        self._examination = Examination(dialect, self._settings, self._model, self._decoder)
        self._facts = await self._examination.pass_all()
        supported, declared = dialect.capabilities, self._declared_model
        self._model = replace(
            declared,
            capabilities=supported,
            default_sampling=supported.honoured(declared.default_sampling)[0],
        )

    @contextlib.contextmanager
    def _use(self, dialect: Dialect, tasks: asyncio.TaskGroup) -> Iterator[None]:
        facts, settings = self._facts, self._settings
        self._block_tokens = (
            facts.block_tokens
            or settings.block_tokens
            or DEFAULT_BLOCK_TOKENS[settings.target.service]
        )
        self._hint = PrefixHint(HINT_TOKENS_MAX // self._block_tokens, self._block_tokens)
        running_max = min(
            settings.running_sequence_count_max, facts.running_sequence_count_max or sys.maxsize
        )
        has_no_ids = self._model.capabilities.counts_from_usage
        queue = ExternalQueue(
            functools.partial(
                RemoteAnswers, dialect, tasks, None if self._may_reuse(dialect) else self._link.end
            ),
            decoder=GivenTextDecoder(self._decoder.reasoning) if has_no_ids else self._decoder,
            vocabulary_size=None if has_no_ids else self._model.vocabulary_size,
            # Without token ids, only the server knows which token ended an output.
            model_end_token_ids=frozenset() if has_no_ids else self._end_token_ids,
            limits=replace(self._limits, running_sequence_count_max=running_max),
            abort_limits=abort_limits(settings),
            sink=self._emit,
            broken=self._link.end,
            tasks=tasks,
        )
        self._connection = Upkeep(
            self._examination, queue, self._block_tokens, self._link.end, self.stalled, tasks
        )
        self._connection.begin()
        self._ready(UNKNOWN_BLOCK_COUNT, time.monotonic() - self._began_at_s)
        try:
            yield
        finally:
            queue.abandon()
            self._connection = None
            self.stalled("")
            self.unreachable()

    def _emit(self, number: int, event: SequenceEvent | EngineError) -> None:
        self._deliver(((number, event),))

    # Both are deferred: the queue may emit events while it adds or cancels, and must not call back
    # into the caller.
    def _send_start(self, sequence: EngineSequence) -> None:
        asyncio.get_running_loop().call_soon(self._add, sequence, time.monotonic())

    def _send_cancel(self, sequence: EngineSequence) -> None:
        asyncio.get_running_loop().call_soon(self._cancel, sequence)

    def _add(self, sequence: EngineSequence, arrived_at_s: float) -> None:
        if self._connection is not None and sequence.number in self._sequences:
            self._connection.queue.add(sequence.number, sequence.request, arrived_at_s)

    def _cancel(self, sequence: EngineSequence) -> None:
        if self._connection is not None:
            self._connection.queue.cancel(sequence.number)

    def _begin_shutdown(self) -> None:
        if self._connection is not None:
            self._connection.queue.cancel_all()
            self._connection.tasks.create_task(self._leave(self._connection.queue))

    async def _leave(self, queue: ExternalQueue) -> None:
        while True:
            if not queue.owes:
                self._link.end("closed")
                return
            await asyncio.sleep(IDLE_POLL_S)

    def _kill(self) -> None:
        self._link.end_at_once()

    def submit(self, request: GenerationRequest, sink: EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        fault = external_continuation_fault(request)
        if request.output_token_ids and self._model.capabilities.counts_from_usage:
            fault = "cannot be continued by an engine that reports no token ids"
        if fault is not None:
            raise RequestImpossible(fault, "output_token_ids")
        return super().submit(request, sink)

    def _cache_group(self, cache_salt: str) -> str:
        return "" if self._settings.share_prefixes else cache_salt

    def _may_reuse(self, dialect: Dialect) -> bool:
        return self._settings.share_prefixes or dialect.carries_salt


_log = logging.getLogger("weir.inference.adapters")


class RemoteAnswers:
    """Implement `Answers` with one call. Closing the reader cancels the call on the server."""

    def __init__(
        self,
        dialect: Dialect,
        tasks: asyncio.TaskGroup,
        unfit: Callable[[str], None] | None,
        choice: Choice,
    ) -> None:
        """Send the choice. `tasks` is the task group of the connection, which also runs the abort
        calls.

        `unfit` is called with the reason if the server reports cached prompt tokens; None if
        caching is allowed.
        """
        self._dialect = dialect
        self._tasks = tasks
        self._unfit = unfit
        self._choice = choice
        self._request_id = f"weir-{secrets.token_hex(16)}"
        self._call = dialect.generate(self._request_id, choice)

    async def read(self) -> AsyncGenerator[Answer, None]:
        output, dialect = Output(), self._dialect
        call, choice, take = self._call, self._choice, dialect.take
        awaits_count = dialect.reports_cached and not dialect.fixes_cached_count
        running = Answer(output, 0, is_final=False, awaits_count=awaits_count)
        try:
            async for message in call:
                before_count = len(output.token_ids)
                reported = take(message, choice, output)
                if len(output.token_ids) > before_count:
                    call.progressed()
                is_running = not reported and output.finish_reason is None
                yield running if is_running else self._answer(output, reported)
                if output.finish_reason is not None:
                    if not call.is_over:
                        await self._await_end()
                    return
        except grpc.aio.AioRpcError as error:
            has_begun = choice.token_count > 0
            raise engine_error(error, "request", has_begun=has_begun) from error
        except (EngineError, AssertionError):
            raise
        except Exception as error:
            raise unreadable(error) from error
        finally:
            call.cancel()

    def _answer(self, output: Output, reported: int | None) -> Answer:
        """Convert the output to an answer with the billed number of cached tokens, 0 while unknown.

        The count at a regular end is final. Raises EngineFailed if it is impossible.
        """
        cached_token_count, sent_count = reported or 0, len(self._choice.sent_token_ids)
        is_last = reported is not None and output.finish_reason not in (None, "cancelled")
        is_possible = 0 <= cached_token_count <= sent_count
        if is_last and not is_possible:
            raise EngineFailed(
                f"the engine says that {cached_token_count} of {sent_count} prompt tokens were"
                " cached"
            )
        if self._unfit is not None and cached_token_count and is_possible:
            # The server did not share prefixes on connecting, and does now: data of another tenant
            # may have been used.
            self._unfit(SHARES)
            raise EngineFailed(
                "the server reused cached prefixes, which are not separated by tenant"
            )
        is_known = is_last or self._dialect.fixes_cached_count
        return Answer(
            output,
            cached_token_count if is_known else 0,
            is_final=is_last,
            awaits_count=not is_known and self._dialect.reports_cached,
        )

    def abort(self) -> None:
        self._tasks.create_task(self._send_abort())

    async def _send_abort(self) -> None:
        try:
            await self._dialect.abort(self._request_id, self._call)
        except grpc.aio.AioRpcError as error:
            _log.warning("an abort was rejected (%s), cancelling the call", error.code().name)
            self._call.cancel()

    async def _await_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                async for _ in self._call:
                    pass


class ConnectionWatch:
    """Monitor of one connection; calls `lost` with the reason when the connection is unusable."""

    def __init__(
        self, dialect: Dialect, settings: RemoteSettings, lost: Callable[[str], None]
    ) -> None:
        self.dialect = dialect
        self._settings = settings
        self._lost = lost

    async def watch_channel(self) -> None:
        """Wait until the connection is lost."""
        await self.dialect.wait_until_lost()
        self._lost(f"the connection to {self._settings.target} was lost")

    async def poll_often(self) -> None:
        """Poll the server's health until it is unhealthy or stops answering."""
        unanswered_count = 0
        while unanswered_count < UNANSWERED_MAX:
            await asyncio.sleep(self._settings.poll_interval_s)
            try:
                fault = await self.dialect.health_fault()
                if fault is not None:
                    self._lost(f"{self._settings.target} reports itself unhealthy: {fault}")
                    return
                unanswered_count = 0
                await self._read_load()
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "health check of %s failed: %s", self._settings.target, error.code().name
                )
                unanswered_count += 1
        self._lost(f"{self._settings.target} does not answer health checks")

    async def _read_load(self) -> None:
        """Read the server's load, after each health check."""


class Upkeep(ConnectionWatch):
    """Monitor of one connection of an engine. It calls `lost` with the reason when the connection
    is unusable, or when a probe of `examination` finds that tenants share prefixes.

    `stalled` is called with the reason when there is no progress, and with an empty one when it
    resumes. `block_tokens` is the number of tokens per cache block.
    """

    def __init__(
        self,
        examination: Examination,
        queue: ExternalQueue,
        block_tokens: int,
        lost: Callable[[str], None],
        stalled: Callable[[str], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        super().__init__(examination.dialect, examination.settings, lost)
        self.tasks = tasks
        self.queue = queue
        self._examination = examination
        self._block_tokens = block_tokens
        self._stalled = stalled
        self._stalls = StallWatch(
            queue,
            self._settings.first_token_timeout_s,
            self._settings.inter_token_timeout_s,
            abort_frees=True,  # closing the call ends it
        )
        self._last_sequence_number: int | None = None
        self._retries = Retries("cache_events")
        self.blocks = KvEventIndex()
        self.knows_all_blocks = False  # whether `blocks` is complete

    def begin(self) -> None:
        """Start all monitoring tasks; each runs until it is cancelled or has called `lost`."""
        duties = [
            self.watch_channel(),
            self._watch_stalls(),
            self.poll_often(),
            self._probe_often(),
            self._follow_cache(),
        ]
        for duty in duties:
            self.tasks.create_task(duty)

    async def _watch_stalls(self) -> None:
        shortest_s = min(self._settings.first_token_timeout_s, self._settings.inter_token_timeout_s)
        while True:
            if (reason := self._stalls.poll()) is not None:
                self._lost(f"{self._settings.target}: {reason}")
                return
            self._stalled(overdue(self.queue.pulse()))
            await asyncio.sleep(min(STALL_POLL_S, shortest_s / 4))

    async def _probe_often(self) -> None:
        """Probe for prefix sharing while connected: the server may be replaced or reconfigured."""
        while not self._settings.share_prefixes:
            await asyncio.sleep(self._settings.probe_interval_s)
            try:
                async with asyncio.timeout(self._settings.first_token_timeout_s):
                    if await self._examination.shares_prefixes():
                        self._lost(f"{self._settings.target}: {SHARES}")
                        return
            # Full or unhealthy: other tasks detect it.
            except (TimeoutError, ServerUnfit, grpc.aio.AioRpcError) as error:
                _log.warning(
                    "probing %s for shared prefixes failed: %s",
                    self._settings.target,
                    masked(repr(error)),
                )

    async def _read_load(self) -> None:
        try:
            self.queue.reported = await self.dialect.load(self._block_tokens)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise

    async def _follow_cache(self) -> None:
        """Follow the cache events; without them, predictions know only the prompts sent."""
        while True:
            try:
                async for batch in self.dialect.kv_batches():
                    try:
                        for _ in self.take(batch):
                            await asyncio.sleep(0)
                    # Invalid events must not end the requests on the connection.
                    except Exception as error:
                        self._retries.failed(error, str(self._settings.target))
                        self._forget()
            except grpc.aio.AioRpcError as error:
                if error.code() in (
                    grpc.StatusCode.UNIMPLEMENTED,
                    grpc.StatusCode.FAILED_PRECONDITION,
                ):
                    _log.info("%s publishes no cache events", self._settings.target)
                    return
                _log.warning(
                    "cache events of %s ended: %s", self._settings.target, error.code().name
                )
            self._forget()
            await asyncio.sleep(EVENTS_AGAIN_S)

    def take(self, batch: common_pb2.KvEventBatch) -> Iterator[None]:
        """Apply a batch of events step by step, and discard the index if events are missing."""
        if batch.HasField("load"):
            total = batch.load.max_total_num_tokens
            if total:
                usage = batch.load.token_usage
                self.queue.reported = block_counts(total, usage, self._block_tokens)
            if batch.load.load_only:
                return
        number, last = batch.sequence_number, self._last_sequence_number
        if last is None:
            # Complete from the start; servers count from 0 or from 1.
            self.knows_all_blocks = number <= 1
        elif number != last + 1:
            self._forget()
        self._last_sequence_number = number
        for count, event in enumerate(batch.events, 1):
            match event.WhichOneof("data"):
                case "stored":
                    yield from self._take_stored(event.stored)
                case "removed" if _on_device(event.removed):
                    hashes = event.removed.block_hashes
                    for first in range(0, len(hashes), BLOCKS_AT_ONCE):
                        gone = list(hashes[first : first + BLOCKS_AT_ONCE])
                        self.blocks.apply(KvCacheChange(False, [], gone))
                        yield
                case "cleared":
                    self.blocks.clear()
                    self.knows_all_blocks = True
            if count % BLOCKS_AT_ONCE == 0:
                yield

    def _take_stored(self, stored: common_pb2.KvBlocksStored) -> Iterator[None]:
        if (
            not _on_device(stored)
            or stored.lora_name
            or stored.kv_cache_spec_kind not in ("", "full_attention")
        ):
            return
        parent, salt = stored.parent_block_hash, stored.cache_salt
        if not parent and not salt and stored.blocks:  # vLLM: with the first block of a prompt only
            salt = "".join(key.text for key in stored.blocks[0].extra_keys)
        parent = parent or root_of(salt)
        for index, block in enumerate(stored.blocks, 1):
            if any(key.WhichOneof("key") != "text" for key in block.extra_keys):
                return  # of an image: its tokens do not tell the content
            if len(block.token_ids) > BLOCK_TOKENS_MAX or len(self.blocks) >= BLOCKS_MAX:
                self._forget()
                return
            self.blocks.apply(
                KvCacheChange(False, [(parent, block.block_hash, list(block.token_ids))], [])
            )
            parent = block.block_hash
            if index % BLOCKS_AT_ONCE == 0:
                yield

    def _forget(self) -> None:
        self.blocks.clear()
        self.knows_all_blocks = False
        self._last_sequence_number = None


def root_of(salt: str) -> int:
    """Derive the parent of the first blocks under a salt of cache events; 0 without a salt."""
    return salt_hash(salt) if salt else 0


def _on_device(event: common_pb2.KvBlocksStored | common_pb2.KvBlocksRemoved) -> bool:
    """Return whether the blocks are in device memory. Offloaded blocks count as removed."""
    return event.tier in (common_pb2.KV_CACHE_TIER_UNSPECIFIED, common_pb2.KV_CACHE_TIER_DEVICE)
