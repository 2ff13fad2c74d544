"""The engine host: `python -m inference.host --fd N`, a child of the API process that holds one model.

Two threads. The main thread loads the model and runs the steps; everything of torch happens in it. The reader thread takes
messages off the socket into an inbox, and ends the whole process when the parent is gone: at once, in mid-load and in mid-step,
since nothing here is worth saving. It is started before torch is imported for that reason.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from inference.errors import CheckpointInvalid
from inference.host_protocol import (
    CancelSequence,
    Event,
    LoadFailed,
    Loading,
    LoadModel,
    ProtocolBroken,
    Ready,
    RefusedEvent,
    Shutdown,
    StartSequence,
    StepReport,
    ToHost,
    ToParent,
    decode_to_host,
    encode,
    receive,
    request_of,
    statistics_list,
    wire_event,
)

if TYPE_CHECKING:
    from inference.engine_core import EngineCore

IMPORT_FRACTION = 0.4  # share of loading that importing torch takes, measured on a 5M-parameter model; larger ones read longer
EXIT_PARENT_GONE = 0
EXIT_PROTOCOL_BROKEN = 3
EXIT_LOAD_FAILED = 4

_log = logging.getLogger("weir.inference.host")


class Inbox:
    """Messages from the parent with the time of their arrival. The reader thread puts, the main thread takes.

    Bounded by the parent: it sends no more sequences than the waiting queue takes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[float, ToHost]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="weir-host-reader", daemon=True).start()

    def wait(self) -> tuple[float, ToHost]:
        """The next message, when it comes, and its arrival in `time.monotonic()` seconds."""
        return self._messages.get()

    def take_all(self) -> list[tuple[float, ToHost]]:
        """What has come so far."""
        taken = []
        while not self._messages.empty():
            taken.append(self._messages.get())
        return taken

    def _read(self) -> None:
        code = EXIT_PARENT_GONE
        try:
            while (body := receive(self._connection)) is not None:
                self._messages.put((time.monotonic(), decode_to_host(body)))
        except OSError:
            pass  # a reset is an end too
        except ProtocolBroken as error:
            print(f"weir host: the parent broke the protocol: {error}", file=sys.stderr, flush=True)
            code = EXIT_PROTOCOL_BROKEN
        # Not sys.exit: that would end this thread alone, and the main one may be deep inside a step.
        os._exit(code)


class Host:
    """The step loop between inbox and socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox = Inbox(connection)
        self._refusals: list[Event] = []
        self._shutting_down = False

    def run(self) -> int:
        """Load, then step until told to stop; returns the exit status."""
        _, message = self._inbox.wait()
        if not isinstance(message, LoadModel):
            _log.error("the first message must be LoadModel, not %s", type(message).__name__)
            return EXIT_PROTOCOL_BROKEN
        try:
            core = self._load(message)
        except CheckpointInvalid as error:
            _log.error("loading failed: %s", error)
            self._send(LoadFailed(str(error)))
            return EXIT_LOAD_FAILED
        self._send(Ready(core.pool.block_count_total))
        while not self._shutting_down:
            self._step(core)
        return 0

    def _load(self, message: LoadModel) -> EngineCore:
        started_s = time.monotonic()
        self._send(Loading("import", 0.0))
        import torch

        from inference.engine_core import EngineCore, EngineOptions

        torch.set_num_threads(message.torch_thread_count)
        self._send(Loading("weights", IMPORT_FRACTION))
        options = EngineOptions(Path(message.directory), message.limits, message.compute_dtype, message.kv_cache_bytes)
        core = EngineCore(options, lambda part: self._send(Loading("weights", IMPORT_FRACTION + (1 - IMPORT_FRACTION) * part)))
        _log.info("loaded %s in %.2f s", message.directory, time.monotonic() - started_s)
        return core

    def _step(self, core: EngineCore) -> None:
        """Take what has come, compute one step, report once. Waits for a message only if there is nothing to compute."""
        messages = [self._inbox.wait()] if core.idle else []
        for arrived_at_s, message in messages + self._inbox.take_all():
            self._handle(core, message, arrived_at_s)
        events = [wire_event(number, event) for number, event in core.step()]
        report = StepReport(self._refusals + events, statistics_list(core.statistics()))
        self._refusals = []
        self._send(report)

    def _handle(self, core: EngineCore, message: ToHost, arrived_at_s: float) -> None:
        match message:
            case StartSequence():
                request = request_of(message)
                reason = core.request_fault(request)
                if reason is not None:
                    self._refusals.append(RefusedEvent(message.number, overloaded=False, message=reason))
                elif not core.add(message.number, request, arrived_at_s):
                    self._refusals.append(RefusedEvent(message.number, overloaded=True, message="the engine's queue is full"))
            case CancelSequence():
                core.cancel(message.number)
            case Shutdown():
                core.cancel_all()
                self._shutting_down = True
            case LoadModel():
                raise ProtocolBroken("a host loads one model in its life")
            case _:
                assert_never(message)

    def _send(self, message: ToParent) -> None:
        # Blocks while the parent does not read: its buffers then bound what is in flight.
        self._connection.sendall(encode(message))


def main() -> int:
    """Entry point of the child process."""
    parser = argparse.ArgumentParser(prog="python -m inference.host", description="Engine host; started by the API process.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to the parent")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # A signal to the whole process group (Ctrl-C, a service manager) is the parent's to handle: it drains first, and this process
    # ends when the parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=arguments.fd)
    connection.setblocking(True)
    try:
        return Host(connection).run()
    except ConnectionError:
        return EXIT_PARENT_GONE


if __name__ == "__main__":
    sys.exit(main())
