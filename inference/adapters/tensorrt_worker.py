"""Child process of a TensorRT-LLM engine: `python -m inference.adapters.tensorrt_worker --fd N`.

Speaks the protocol of `workers/protocol.py`. The engine is built on the main thread, then one event
loop runs everything. The process exits when the engine is dead or stuck: the library cannot build
another engine after a crash, so the parent starts a new process. Processes started by the library
are killed first, or they would keep the GPU's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.processes import started_with
from inference.adapters.external_queue import ExternalQueue
from inference.adapters.external_request import Answer, Choice
from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.adapters.tensorrt_library import EngineWatch, TensorRtLibrary
from inference.adapters.tensorrt_settings import LoadTensorRt
from inference.engine import EngineStatistics, SequenceEvent, SequenceRefused
from inference.errors import CheckpointInvalid, EngineError, EngineFailed, EngineStartFailed
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import request_fault
from inference.text.tokenizer import Tokenizer
from inference.workers.child import EXIT_LOAD_FAILED, EXIT_PROTOCOL_BROKEN, Inbox, serve_parent
from inference.workers.protocol import (
    FAMILY,
    CancelSequence,
    Event,
    LoadFailed,
    Loading,
    Message,
    ProtocolBroken,
    Ready,
    Shutdown,
    StartSequence,
    decoder_to_worker,
)

EXIT_ENGINE_BROKEN = 5
REPORT_EVERY_S = 1.0  # at least, while sequences run: shows the parent that this process is alive
POLL_TIMEOUT_S = 0.2  # the iterators of an idle engine end after this time
POLL_PAUSE_S = 0.05
SHUTDOWN_TIMEOUT_S = 10.0  # the library's own shutdown has hung
_log = logging.getLogger("weir.inference.adapters")


class TensorRtWorker:
    """Main loop of the worker: connects one engine to the inbox and the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._inbox: Inbox[Message] = Inbox(
            connection, decoder_to_worker(LoadTensorRt), before_exit=kill_workers
        )
        self._unsent: list[Event] = []
        self._flushing = False
        self._llm: Any = None
        self._queue: ExternalQueue
        self._block_count = 0
        self._reported: dict[str, Any] = {}  # last statistics of the engine
        self._load: LoadTensorRt
        self._ended: asyncio.Event

    def run(self) -> int:
        """Load the engine, serve until shutdown, and return the exit status."""
        message = self._inbox.wait()
        if not isinstance(message, LoadTensorRt):
            _log.error("the first message must be LoadTensorRt, not %s", type(message).__name__)
            return EXIT_PROTOCOL_BROKEN
        self._load = message
        self._send(Loading("import", 0.0))
        failure: BaseException | None = None
        try:
            library = TensorRtLibrary()
            self._send(Loading("engine", 0.1))
            self._llm = library.build(
                message.directory, message.limits, message.options, message.adapters
            )
            asyncio.run(self._serve(library))
        except* (CheckpointInvalid, EngineStartFailed) as group:
            failure = group
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
        if failure is not None:
            _log.error("loading failed: %s", failure)
            self._send(LoadFailed(str(failure)))
            return EXIT_LOAD_FAILED
        self._shut_down()
        return 0

    async def _serve(self, library: TensorRtLibrary) -> None:
        """Run the asynchronous part of the engine, which is bound to one event loop."""
        directory, options = Path(self._load.directory), self._load.options
        tokenizer = Tokenizer(directory)
        self._ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            self._queue = ExternalQueue(
                functools.partial(TensorRtAnswers, library, self._llm, self._load.vocabulary_size),
                decoder=tokenizer.decoder,
                vocabulary_size=self._load.vocabulary_size,
                model_end_token_ids=self._load.end_token_ids | tokenizer.end_token_ids,
                # After a complete text the library's grammar allows only the tokenizer's end token.
                format_end_token_ids=frozenset(
                    eos for eos in [tokenizer.eos_token_id] if eos is not None
                ),
                limits=self._load.limits,
                abort_limits=options,
                sink=self._emit,
                broken=self._broken,
                tasks=tasks,
            )
            watch = EngineWatch(library, self._llm, self._queue, options, self._broken)
            if (fault := await watch.canary_fault()) is not None:
                raise EngineStartFailed(f"the engine was loaded, but {fault}")
            await self._check_adapters(library)
            await self._read_first_statistics()
            duties = (watch.run(), self._poll_statistics(), self._beat(), self._poll_kv_events())
            background = [tasks.create_task(duty) for duty in duties]
            self._inbox.start_pulse(self._queue.pulse)
            self._send(Ready(self._block_count))
            threading.Thread(
                target=self._pump,
                args=(asyncio.get_running_loop(),),
                name="weir-worker-pump",
                daemon=True,
            ).start()
            await self._ended.wait()
            for task in background:
                task.cancel()

    async def _check_adapters(self, library: TensorRtLibrary) -> None:
        """Raise EngineStartFailed if an adapter has no effect on an output."""
        adapters, options = self._load.adapters, self._load.options
        names = ("", *(each.name for each in adapters))
        try:
            async with asyncio.timeout(options.canary_timeout_s * len(names)):
                outputs = await library.adapted_outputs(
                    self._llm, self._load.vocabulary_size, names if adapters else ()
                )
        except (library.RequestError, TimeoutError, ValueError) as error:
            raise EngineStartFailed(f"LoRA adapters cannot be applied: {error!r}") from error
        for each in adapters:
            if outputs[each.name] == outputs[""]:
                raise EngineStartFailed(
                    f"LoRA adapter {each.name!r} in {each.directory} does not change the output of"
                    " a test prompt: the base model would answer for it. Merge it into its"
                    " checkpoint, or remove it from WEIR_LORA_ADAPTERS"
                )

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forward messages to the event loop."""
        while True:
            message = self._inbox.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended and the process is exiting
                loop.call_soon_threadsafe(self._handle, message)

    def _handle(self, message: Message) -> None:
        match message:
            case StartSequence():
                request = message.request
                reason = request_fault(
                    request, self._load.limits, self._load.vocabulary_size, self._block_count
                )
                if reason is not None:
                    self._note((message.number, SequenceRefused(reason)))
                else:
                    self._queue.add(message.number, request, message.sent_at_s)
            case CancelSequence():
                self._queue.cancel(message.number)
            case Shutdown():
                self._queue.cancel_all()
                asyncio.get_running_loop().call_later(self._load.options.abort_drain_s, self._end)
                if self._queue.idle:
                    self._end()
            case _:
                raise ProtocolBroken("a worker loads only one model")

    def _end(self) -> None:
        self._flush()
        self._ended.set()

    def _emit(self, number: int, event: SequenceEvent | EngineError) -> None:
        if isinstance(event, EngineError):
            self._note((number, SequenceRefused(str(event), failed=True)))
        else:
            self._note((number, event))

    def _note(self, event: Event) -> None:
        """Queue an event and send it with all of this loop iteration, since a step has many."""
        self._unsent.append(event)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        events, self._unsent = self._unsent, []
        self._inbox.report(events, self._queue.statistics())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if not self._queue.idle:
                self._flush()

    async def _read_first_statistics(self) -> None:
        """Wait for the number of blocks, which the engine reports only after its first step."""
        async with asyncio.timeout(self._load.options.canary_timeout_s):
            while not self._reported:
                await self._take_statistics()
        blocks = self._reported["kvCacheStats"]
        self._block_count = blocks["maxNumBlocks"] * blocks["tokensPerBlock"] // KV_BLOCK_TOKENS

    async def _poll_statistics(self) -> None:
        """Read all statistics; unread ones would accumulate in memory."""
        while True:
            await self._take_statistics()

    async def _take_statistics(self) -> None:
        async for entry in self._llm.get_stats_async(POLL_TIMEOUT_S):
            self._reported = entry
            blocks: dict[str, Any] = entry.get("kvCacheStats") or {}
            self._queue.reported = EngineStatistics(
                kv_block_count_total=blocks.get("maxNumBlocks", 0),
                kv_block_count_free=blocks.get("freeNumBlocks", 0),
                kv_block_count_held=blocks.get("usedNumBlocks", 0),
                step_count=entry.get("iter", 0),
            )
            if self._queue.idle and self._block_count:
                self._flush()  # nothing else reports that the blocks are free again
        await asyncio.sleep(POLL_PAUSE_S)  # the iterator ends at once while nothing is submitted

    async def _poll_kv_events(self) -> None:
        reader, index = KvEventReader(), KvEventIndex()
        self._inbox.snapshot = index.snapshot
        while True:
            async for event in self._llm.get_kv_cache_events_async(POLL_TIMEOUT_S):
                for change in reader.read(event if isinstance(event, list) else [event]):
                    index.apply(change)
                    self._send(change)
            await asyncio.sleep(POLL_PAUSE_S)

    def _broken(self, reason: str) -> None:
        """Exit after an engine failure, without more output; the parent fails its sequences."""
        _log.error("the engine failed: %s", reason)
        with contextlib.suppress(OSError):
            self._flush()
        kill_workers()
        os._exit(EXIT_ENGINE_BROKEN)

    def _shut_down(self) -> None:
        """Shut the library down, limited to `SHUTDOWN_TIMEOUT_S`, to free the GPU."""
        farewell = threading.Thread(target=self._llm.shutdown, name="weir-shutdown", daemon=True)
        farewell.start()
        farewell.join(SHUTDOWN_TIMEOUT_S)
        kill_workers()

    def _send(self, message: Message) -> None:
        self._inbox.send(message)


def kill_workers() -> None:
    """Kill all processes started from this one, even those that have another parent by now."""
    for pid in started_with(FAMILY, os.environ.get(FAMILY, "")):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class TensorRtAnswers:
    """Implement `Answers`. The library yields one mutable object, read before the next step."""

    def __init__(
        self, library: TensorRtLibrary, llm: Any, vocabulary_size: int, choice: Choice
    ) -> None:
        """Submit the choice, always on the same event loop. Raises: EngineFailed."""
        self._library = library
        request = choice.request.generation
        try:
            sampling = library.sampling(request, choice.request.end_token_ids, vocabulary_size)
            self._result = library.submit(llm, request, sampling)
        except (library.RequestError, ValueError, TypeError) as error:
            raise EngineFailed(f"the engine refused the request: {error}") from error

    async def read(self) -> AsyncGenerator[Answer, None]:
        try:
            async for response in self._result:
                if len(response.outputs) != 1:
                    raise EngineFailed(f"the engine sent {len(response.outputs)} outputs for one")
                yield Answer(response.outputs[0], response.cached_tokens)
        except self._library.RequestError as error:
            raise EngineFailed(f"the engine ended the sequence: {error}") from error

    def abort(self) -> None:
        self._result.abort()


class KvEventReader:
    """Converter of the engine's event dictionaries to changes. One per engine start."""

    def __init__(self) -> None:
        self._last_id: int | None = None

    def read(self, events: Sequence[Mapping[str, Any]]) -> list[KvCacheChange]:
        """Convert events to changes. A gap in the numbers is a reset; unknown types are skipped."""
        changes = []
        for event in events:
            event_id = int(event["event_id"])
            lost = self._last_id is not None and event_id != self._last_id + 1
            self._last_id = event_id
            data = event["data"]
            stored: list[tuple[int, int, list[int]]] = []
            removed: list[int] = []
            if data["type"] == "stored":
                parent = data.get("parent_hash") or 0
                for block in data["blocks"]:
                    stored.append(
                        (
                            parent,
                            block["block_hash"],
                            [token["token_id"] for token in block["tokens"]],
                        )
                    )
                    parent = block["block_hash"]
            elif data["type"] == "removed":
                removed = list(data["block_hashes"])
            if lost or stored or removed:
                changes.append(KvCacheChange(lost, stored, removed))
        return changes


def main() -> int:
    """Run the worker. The call is guarded, since the library's processes import this module too."""
    return serve_parent(
        "inference.adapters.tensorrt_worker", lambda connection: TensorRtWorker(connection).run()
    )


if __name__ == "__main__":
    # Not sys.exit: the library's exit handlers have hung.
    status = main()
    sys.stderr.flush()
    os._exit(status)
