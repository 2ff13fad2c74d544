"""A remote engine as the API process sees it: connected, watched, and connected again when it was lost. One target, one engine.

The server's own word is checked where it is billed: tokens are counted as they come, and a count that cannot be fails its sequence.
What is queued here is ranked here, since the services know no ranks.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpc

from inference.engine import EngineStatistics, GenerationRequest, SequenceEvent
from inference.errors import EngineError, RequestImpossible
from inference.hosts.engine_life import EngineLife
from inference.limits import EngineLimits, outside_continuation_fault
from inference.outside.core import OutsideCore
from inference.prefix_hint import PrefixHint
from inference.remote.answers import Submission
from inference.remote.connection import DIALECTS, Examination, open_dialect
from inference.remote.dialect import Dialect, ServerFacts, ServerUnfit
from inference.remote.model_info import read_remote_model
from inference.remote.settings import RemoteSettings, Service, handling
from inference.remote.upkeep import Upkeep
from inference.sequence_stream import BufferedStream
from inference.text.detokenizer import TextDecoder
from inference.text.tokenizer import Tokenizer

HINT_TOKENS_MAX = 4 << 20  # tokens that are remembered as sent, where the server does not tell how many it caches
UNKNOWN_BLOCK_COUNT = 1 << 40  # a server's own limit on what fits its cache is its context window
IDLE_POLL_S = 0.01  # while the last sequences are waited for at the end
DEFAULT_BLOCK_TOKENS = {Service.TRTLLM: 32, Service.VLLM: 16}


class _Over(Exception):
    """Ends the tasks of a connection."""


class Connection(NamedTuple):
    """All that belongs to one connection."""

    dialect: Dialect
    core: OutsideCore
    upkeep: Upkeep
    tasks: asyncio.TaskGroup


class RemoteEngine(EngineLife):
    """One server of `trtllm-serve --grpc` or `vllm serve --grpc`. See `Engine` for the contract."""

    def __init__(self, settings: RemoteSettings) -> None:
        """Reads the checkpoint's configuration and tokenizer, and connects to nothing.

        Raises `CheckpointInvalid`, or ValueError for bounds that contradict each other.
        """
        model, self._end_token_ids = read_remote_model(
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
        tokenizer = Tokenizer(settings.directory)
        path = str(Path(settings.directory) / "tokenizer.json")
        self._decoder = TextDecoder(tokenizer.backend, tokenizer.special_token_ids, path)
        self._began_at_s = -math.inf
        self._connecting: asyncio.Timeout | None = None  # while it is asked whether it is fit
        self._connection: Connection | None = None  # while it serves
        self._ended: asyncio.Future[str] | None = None  # the reason, once the connection is of no use any more

    @property
    def settings(self) -> RemoteSettings:
        """What it was built with."""
        return self._settings

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`: of our own sequences, and of the server's blocks as it last told."""
        return EngineStatistics() if self._connection is None else self._connection.core.statistics()

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`: what was sent and, where the server tells all of it, is still there."""
        if self._connection is None or not self._may_reuse(self._connection.dialect):
            return 0
        sent = super().predict_cached_token_count(prompt_token_ids, cache_salt)
        upkeep = self._connection.upkeep
        if not upkeep.knows_all_blocks:
            return sent
        held = upkeep.blocks.matched_token_count(prompt_token_ids)
        return held if self._settings.share_prefixes else min(held, sent)

    async def _run(self) -> str:
        """One connection: opened, examined, used, until it is lost."""
        self._began_at_s = time.monotonic()
        target = self._settings.target
        self._ended = ended = asyncio.get_running_loop().create_future()
        try:
            async with open_dialect(self._settings) as (dialect, channel):
                try:
                    async with asyncio.timeout(self._settings.connect_timeout_s) as self._connecting:
                        examination = Examination(dialect, self._settings, self._model, self._decoder)
                        facts = await examination.pass_all()
                finally:
                    self._connecting = None
                return await self._use(examination, channel, facts, ended)
        except TimeoutError:
            return f"{target} did not answer within {self._settings.connect_timeout_s:g} s"
        except ServerUnfit as error:
            return f"{target}: {error}"
        except grpc.aio.AioRpcError as error:
            return f"{target} cannot be asked: {error.code().name}: {error.details()}"

    async def _use(
        self, examination: Examination, channel: grpc.aio.Channel, facts: ServerFacts, ended: asyncio.Future[str]
    ) -> str:
        """Serve over a connection until it has ended; returns why."""
        dialect, settings = examination.dialect, self._settings
        self._block_tokens = facts.block_tokens or settings.block_tokens or DEFAULT_BLOCK_TOKENS[settings.target.service]
        self._hint = PrefixHint(HINT_TOKENS_MAX // self._block_tokens, self._block_tokens)
        running_max = min(settings.running_sequence_count_max, facts.running_sequence_count_max or sys.maxsize)
        reason = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                core = OutsideCore(
                    Submission(dialect, tasks, self._may_reuse(dialect), self._end).submit,
                    decoder=self._decoder,
                    model_end_token_ids=self._end_token_ids,
                    limits=replace(self._limits, running_sequence_count_max=running_max),
                    handling=handling(settings),
                    tell=self._tell,
                    broken=self._end,
                    tasks=tasks,
                )
                shares_prefixes = examination.shares_prefixes
                upkeep = Upkeep(dialect, channel, core, settings, self._block_tokens, self._end, shares_prefixes)
                self._connection = Connection(dialect, core, upkeep, tasks)
                for duty in upkeep.duties():
                    tasks.create_task(duty)
                self._ready(UNKNOWN_BLOCK_COUNT, time.monotonic() - self._began_at_s)
                try:
                    reason = await ended
                finally:
                    core.abandon()
                    self._connection = None
                raise _Over
        except* _Over:
            pass
        return reason

    def _tell(self, number: int, event: SequenceEvent | EngineError) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return  # its caller has left
        if isinstance(event, EngineError):
            stream.fail(event)
        else:
            self._take(stream, event)

    def _end(self, reason: str) -> None:
        """The connection is of no use any more; the first to say why is believed."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def _reachable(self) -> bool:
        return self._connection is not None

    def _submit(self, stream: BufferedStream) -> None:
        assert self._connection is not None, "the engine is ready"
        self._connection.core.add(stream.number, stream.request, time.monotonic())

    def _send_cancel(self, stream: BufferedStream) -> None:
        if self._connection is not None:
            self._connection.core.cancel(stream.number)

    def _say_farewell(self) -> None:
        if self._connection is not None:
            self._connection.core.cancel_all()
            self._connection.tasks.create_task(self._leave(self._connection.core))

    async def _leave(self, core: OutsideCore) -> None:
        while True:
            if not core.owes:
                self._end("closed")
                return
            await asyncio.sleep(IDLE_POLL_S)

    def _end_at_once(self) -> None:
        if self._connecting is not None:
            self._connecting.reschedule(asyncio.get_running_loop().time())
        self._end("closed")

    def _unserved(self, request: GenerationRequest) -> RequestImpossible | None:
        fault = outside_continuation_fault(request)
        return None if fault is None else RequestImpossible(fault, "output_token_ids")

    def _cache_group(self, cache_salt: str) -> str:
        return "" if self._settings.share_prefixes else cache_salt

    def _may_reuse(self, dialect: Dialect) -> bool:
        return self._settings.share_prefixes or dialect.carries_salt
