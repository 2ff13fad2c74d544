"""What is done beside the requests while a connection is in use: is it there, is the server well, what has it cached, who is stuck.

Calls back once with the reason when the connection is of no use any more. All of it runs in the connection's task group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from common.incidents import Retries
from inference.kv_event_index import KvCacheChange, KvEventIndex
from inference.outside.core import OutsideCore
from inference.outside.stalls import StallWatch
from inference.remote.dialect import SHARES, Dialect, ServerUnfit, block_counts
from inference.remote.settings import RemoteSettings
from inference.remote.watch import ConnectionWatch

STALL_LOOK_S = 0.5
EVENTS_AGAIN_S = 30.0  # after a subscription ended that had begun
BLOCKS_MAX = 4 << 20  # of an index: beyond the cache of any server; a stream that only ever adds is broken

_log = logging.getLogger("weir.inference.remote")


class Upkeep(ConnectionWatch):
    """Looks after one connection. lost: called with why it is of no use any more. block_tokens: what the server caches as one.

    shares_prefixes: asks the server, by prompts of its own, whether it serves one tenant what another has sent.
    """

    def __init__(
        self,
        dialect: Dialect,
        channel: grpc.aio.Channel,
        core: OutsideCore,
        settings: RemoteSettings,
        block_tokens: int,
        lost: Callable[[str], None],
        shares_prefixes: Callable[[], Awaitable[bool]],
    ) -> None:
        super().__init__(dialect, channel, settings, lost)
        self._core = core
        self._block_tokens = block_tokens
        self._shares_prefixes = shares_prefixes
        self._stalls = StallWatch(core, settings.first_token_timeout_s, settings.inter_token_timeout_s)
        self._last_sequence_number: int | None = None
        self._retries = Retries("cache_events")
        self.blocks = KvEventIndex()
        self.knows_all_blocks = False  # whether `blocks` has been told of everything that the server holds

    def duties(self) -> list[Coroutine[Any, Any, None]]:
        """All that is to be done, each until it is cancelled or has called back."""
        return [self.watch_channel(), self._watch_stalls(), self.look_often(), self._probe_often(), self._follow_cache()]

    async def _watch_stalls(self) -> None:
        shortest_s = min(self._settings.first_token_timeout_s, self._settings.inter_token_timeout_s)
        while True:
            if (reason := self._stalls.look()) is not None:
                self._lost(f"{self._settings.target}: {reason}")
                return
            await asyncio.sleep(min(STALL_LOOK_S, shortest_s / 4))

    async def _probe_often(self) -> None:
        """A server behind the same address may be another one, or be told to cache otherwise, while the connection lasts."""
        while not self._settings.share_prefixes:
            await asyncio.sleep(self._settings.probe_interval_s)
            try:
                async with asyncio.timeout(self._settings.first_token_timeout_s):
                    if await self._shares_prefixes():
                        self._lost(f"{self._settings.target}: {SHARES}")
                        return
            except (TimeoutError, ServerUnfit, grpc.aio.AioRpcError) as error:  # full, or ill: others see to that
                _log.warning("%s cannot be asked whether tenants share prefixes: %r", self._settings.target, error)

    async def _read_load(self) -> None:
        try:
            told = await self._dialect.load(self._block_tokens)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            told = None
        if told is not None:
            self._core.told = told

    async def _follow_cache(self) -> None:
        """Servers that publish nothing say so at once; what was sent is then the only hint."""
        while True:
            try:
                async for batch in self._dialect.kv_batches():
                    try:
                        self.take(batch)
                    except Exception as error:  # nothing that a server publishes may end the requests on its connection
                        self._retries.failed(error, str(self._settings.target))
                        self._forget()
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION):
                    _log.info("%s publishes no cache events", self._settings.target)
                    return
                _log.warning("cache events of %s ended: %s", self._settings.target, error.code().name)
            self._forget()
            await asyncio.sleep(EVENTS_AGAIN_S)

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        """A batch of events. One that is missing makes all that is known doubtful: what is hot is never told again."""
        if batch.HasField("load"):
            self._take_load(batch.load)
            if batch.load.load_only:
                return
        number, last = batch.sequence_number, self._last_sequence_number
        if last is None:
            self.knows_all_blocks = number <= 1  # from the beginning; servers count from 0 or from 1
        elif number != last + 1:
            self._forget()
        self._last_sequence_number = number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    self._take_stored(event.stored)
                case "removed" if _on_device(event.removed):
                    self.blocks.apply(KvCacheChange(False, [], list(event.removed.block_hashes)))
                case "cleared":
                    self.blocks.clear()
                    self.knows_all_blocks = True
        if len(self.blocks) > BLOCKS_MAX:
            self._forget()

    def _take_stored(self, stored: common_pb2.KvBlocksStored) -> None:
        if not _on_device(stored) or stored.lora_name or stored.kv_cache_spec_kind not in ("", "full_attention"):
            return
        parent, found = stored.parent_block_hash, []
        for block in stored.blocks:
            found.append((parent, block.block_hash, list(block.token_ids)))
            parent = block.block_hash
        self.blocks.apply(KvCacheChange(False, found, []))

    def _take_load(self, load: common_pb2.EngineLoad) -> None:
        if load.max_total_num_tokens:
            self._core.told = block_counts(load.max_total_num_tokens, load.token_usage, self._block_tokens)

    def _forget(self) -> None:
        self.blocks.clear()
        self.knows_all_blocks = False
        self._last_sequence_number = None


def _on_device(event: common_pb2.KvBlocksStored | common_pb2.KvBlocksRemoved) -> bool:
    """What was moved to slower memory counts as gone: fetching it takes time too."""
    return event.tier in (common_pb2.KV_CACHE_TIER_UNSPECIFIED, common_pb2.KV_CACHE_TIER_DEVICE)
