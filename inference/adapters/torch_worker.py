"""Engine worker: `python -m inference.adapters.torch_worker --fd N`, a child process that holds one
model.

Two threads. The main thread loads the model, reads messages from the sockets and runs the steps,
including all torch calls. The other tells the api processes how long the current step runs, waits
for the end of their connections and then exits the process, even during loading or a step, since no
state needs saving. It therefore starts before torch is imported.
"""

from __future__ import annotations

import gc
import importlib
import logging
import socket
import sys
import time
from typing import TYPE_CHECKING

from inference.core.options import EngineOptions
from inference.engine import (
    EngineFinishReason,
    EngineTimings,
    ResponseFormat,
    SequenceFinished,
    SequenceRefused,
)
from inference.errors import CheckpointInvalid, EngineStartFailed, RequestImpossible
from inference.workers.child import (
    EXIT_LOAD_FAILED,
    EXIT_PROTOCOL_BROKEN,
    Inbox,
    StepClock,
    serve_parent,
)
from inference.workers.protocol import (
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

if TYPE_CHECKING:
    from inference.adapters.torch_beams import BeamSearches
    from inference.core.engine_core import EngineCore
    from inference.sampling.grammar import Compiled, GrammarThread

IMPORT_FRACTION = 0.4  # share of the loading time for importing torch, measured with 5M parameters
QUEUE_FULL = "the engine's queue is full"
_log = logging.getLogger("weir.inference.adapters")


class LoadModel(Message, tag="load", frozen=True):
    """First message: the model to load and its options."""

    options: EngineOptions
    torch_thread_count: int


class TorchWorker:
    """Main loop of the worker: computes steps between the inbox and the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._inbox: Inbox[Compiled] = Inbox(connection, decoder_to_worker(LoadModel))
        self._unsent: list[Event] = []  # for sequences that the core does not have
        self._compiling: dict[int, StartSequence] = {}
        self._grammar_thread: GrammarThread | None = None
        self._steps = StepClock()
        self._shutting_down = False

    def run(self) -> int:
        """Load the model, step until shutdown, and return the exit status."""
        # Importing takes equally long for every model: a spare worker imports before a model is
        # assigned.
        self._inbox.send(Loading("import", 0.0))
        gc.disable()  # imports leave little garbage: collecting takes an eighth of their time
        importlib.import_module("inference.adapters.torch_beams")
        gc.enable()
        message = self._inbox.wait()
        if not isinstance(message, LoadModel):
            _log.error("the first message must be LoadModel, not %s", type(message).__name__)
            return EXIT_PROTOCOL_BROKEN
        try:
            searches = self._load(message)
        except (CheckpointInvalid, EngineStartFailed) as error:
            _log.error("loading failed: %s", error)
            self._inbox.send(LoadFailed(str(error)))
            return EXIT_LOAD_FAILED
        self._inbox.start_pulse(self._steps.pulse)
        core = searches.core
        self._inbox.send(Ready(core.pool.block_count_total, core.kernels))
        while not self._shutting_down:
            self._step(searches)
        return 0

    def _load(self, message: LoadModel) -> BeamSearches:
        started_s = time.monotonic()
        import torch

        from inference.adapters.torch_beams import BeamSearches
        from inference.core.engine_core import EngineCore

        torch.set_num_threads(message.torch_thread_count)
        self._inbox.send(Loading("weights", IMPORT_FRACTION))
        core = EngineCore(
            message.options,
            lambda part: self._inbox.send(
                Loading("weights", IMPORT_FRACTION + (1 - IMPORT_FRACTION) * part)
            ),
        )
        # Loaded objects live for the whole process: excluding them keeps garbage collections short.
        gc.collect()
        gc.freeze()
        _log.info(
            "loaded %s in %.2f s; keys and values are %s",
            message.options.directory,
            time.monotonic() - started_s,
            message.options.kv_type,
        )
        return BeamSearches(core)

    def _step(self, searches: BeamSearches) -> None:
        """Handle messages, compute one step and report it. Wait for a message only when idle."""
        core = searches.core
        for message in self._inbox.take_all(wait=core.idle and not searches.running):
            self._handle(searches, message)
        events, self._unsent = self._unsent, []
        self._steps.begin()
        events += searches.step() if searches.running else core.step()
        self._steps.end()
        self._inbox.report(events, core.statistics())

    def _handle(self, searches: BeamSearches, message: Message | Compiled) -> None:
        core = searches.core
        match message:
            case StartSequence(number=number, request=request):
                if (reason := core.request_fault(request)) is not None:
                    self._refuse(number, reason)
                elif request.response_format is not None:
                    self._compile(core, message, request.response_format)
                else:
                    engine = core if request.beam_search is None else searches
                    if not engine.add(number, request, message.sent_at_s):
                        self._refuse(number, QUEUE_FULL, overloaded=True)
            case CancelSequence():
                self._cancel_compiling(message.number)
                searches.cancel(message.number)
            case Shutdown():
                for number in list(self._compiling):
                    self._cancel_compiling(number)
                searches.cancel_all()
                self._shutting_down = True
            case LoadModel():
                raise ProtocolBroken("a worker loads only one model")
            case Message():
                raise ProtocolBroken(f"unexpected: {message!r}"[:200])
            case _:
                self._take_compiled(core, message)

    def _compile(
        self, core: EngineCore, start: StartSequence, response_format: ResponseFormat
    ) -> None:
        from inference.sampling.grammar import GrammarThread

        if self._grammar_thread is None:
            self._grammar_thread = GrammarThread(core.grammars, self._inbox.put)
        self._compiling[start.number] = start
        self._grammar_thread.begin(start.number, response_format)

    def _take_compiled(self, core: EngineCore, compiled: Compiled) -> None:
        if (start := self._compiling.pop(compiled.number, None)) is None:
            return  # cancelled while compiling
        if isinstance(compiled.result, RequestImpossible):
            self._refuse(compiled.number, str(compiled.result), compiled.result.field)
        elif not core.add(start.number, start.request, start.sent_at_s, compiled.result):
            self._refuse(start.number, QUEUE_FULL, overloaded=True)

    def _cancel_compiling(self, number: int) -> None:
        """Cancel a sequence whose grammar is still being compiled, as if it were queued."""
        start = self._compiling.pop(number, None)
        if start is not None:
            timings = EngineTimings((time.monotonic() - start.sent_at_s) * 1e3, 0.0, 0.0)
            prompt_token_count = len(start.request.prompt_token_ids)
            cancelled = SequenceFinished(
                EngineFinishReason.CANCELLED, "", prompt_token_count, 0, 0, timings
            )
            self._unsent.append((number, cancelled))

    def _refuse(
        self, number: int, reason: str, field: str | None = None, *, overloaded: bool = False
    ) -> None:
        self._unsent.append((number, SequenceRefused(reason, field, overloaded=overloaded)))


def main() -> int:
    return serve_parent(
        "inference.adapters.torch_worker", lambda connection: TorchWorker(connection).run()
    )


if __name__ == "__main__":
    sys.exit(main())
