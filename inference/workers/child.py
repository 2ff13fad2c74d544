"""Start of an engine worker and its inbox of messages; a thread ends the process with its parent.

The thread also tells the parent how long the current step runs. The process ends at once, even
while loading or in a step, since a worker has nothing to save. Must not import torch: it runs
before that import.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from common.logs import configure_logging
from inference.workers.protocol import (
    Message,
    MessageDecoder,
    ProtocolBroken,
    Pulse,
    encode,
    split,
)

EXIT_PARENT_GONE = 0
EXIT_PROTOCOL_BROKEN = 3
EXIT_LOAD_FAILED = 4


RECEIVE_BYTES = 1 << 16  # bytes read from the socket at once
PULSE_S = 1.0  # between two pulses
FIRST_STEPS = 8  # compile, page in and warm caches: they say nothing about later ones
USUAL_DECAY = 0.999  # per step, so that a long prefill is remembered for some hundred steps
Local = TypeVar("Local")


class StepClock:
    """Clock of the steps' durations. One thread runs the steps, another reads."""

    def __init__(self) -> None:
        self._began_at_s: float | None = None
        self._usual_s = 0.0
        self._step_count = 0

    def begin(self) -> None:
        """Record the beginning of a step."""
        self._began_at_s = time.monotonic()

    def end(self) -> None:
        """Record the end of the step."""
        assert self._began_at_s is not None, "a step ends after it began"
        step_s = time.monotonic() - self._began_at_s
        self._began_at_s = None
        self._step_count += 1
        self._usual_s = max(step_s, self._usual_s * USUAL_DECAY)

    def pulse(self) -> Pulse:
        """Measure how long the current step runs, and how long recent ones took."""
        began_at_s = self._began_at_s
        return Pulse(
            0.0 if began_at_s is None else time.monotonic() - began_at_s,
            self._usual_s if self._step_count >= FIRST_STEPS else math.inf,
        )


class Inbox(Generic[Local]):
    """Queue of messages from the parent and items from this process's threads. One thread reads.

    A separate thread waits for the end of the connection and then ends the process.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: MessageDecoder,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the watching thread. `decoder` decodes the messages of this kind of worker.

        `before_exit` is called by any thread when the parent is gone, to end what would outlive
        this process.
        """
        self._connection = connection
        self._decoder = decoder
        self._before_exit = before_exit
        self._received = bytearray()
        self._messages: deque[Message | Local] = deque()
        self._bell, self._button = socket.socketpair()  # writing to the second end wakes the reader
        self._has_rung = False
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._arrivals.register(self._bell, select.POLLIN)
        self._sending = threading.Lock()
        self._pulse: Callable[[], Pulse] | None = None
        threading.Thread(target=self._watch, name="weir-worker-watch", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to the parent. Thread-safe.

        Blocks while the parent does not read, which bounds the data in flight.
        """
        data = encode(message)
        with self._sending:
            self._connection.sendall(data)

    def start_pulse(self, pulse: Callable[[], Pulse]) -> None:
        """Send the parent the result of `pulse`, at once and then regularly from another thread.

        Call this before sending `Ready`: a worker whose pulse never came would only be found
        hanging.
        """
        self.send(pulse())
        self._pulse = pulse

    def wait(self) -> Message | Local:
        """Wait for the next message and return it."""
        while not self._messages:
            self._messages += self.take_all(wait=True)
        return self._messages.popleft()

    def take_all(self, *, wait: bool = False) -> list[Message | Local]:
        """Return all messages received so far. With `wait`, block until data arrives."""
        if wait and not self._messages:
            self._arrivals.poll()
        if self._has_rung:
            self._has_rung = False
            with contextlib.suppress(BlockingIOError):  # already read
                self._bell.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        try:
            while True:
                data = self._connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                self._received += data
                if not data:
                    self._exit(EXIT_PARENT_GONE)
                if len(data) < RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:  # a reset also ends the connection
            self._exit(EXIT_PARENT_GONE)
        try:
            self._messages += map(self._decoder.decode, split(self._received))
        except ProtocolBroken as error:
            print(
                f"weir worker: the parent broke the protocol: {error}", file=sys.stderr, flush=True
            )
            self._exit(EXIT_PROTOCOL_BROKEN)
        # Other threads may append.
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def put(self, item: Local) -> None:
        """Add an item, such as a compiled grammar, for the reading thread. Thread-safe."""
        self._messages.append(item)
        self._button.send(b"\0")
        self._has_rung = True

    def _watch(self) -> None:
        end = select.poll()
        end.register(self._connection, 0)  # hang-ups only, which are always reported
        while not end.poll(PULSE_S * 1000):
            if self._pulse is not None:
                with contextlib.suppress(OSError):  # the end, which the next poll reports
                    self.send(self._pulse())
        self._exit(EXIT_PARENT_GONE)

    def _exit(self, code: int) -> NoReturn:
        self._before_exit()
        # Not sys.exit, which would end this thread only; the main one may be inside a step.
        os._exit(code)


def serve_parent(module: str, run: Callable[[socket.socket], int]) -> int:
    """Run a worker's main loop on the inherited socket `--fd`, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description="Engine worker, started by the API process."
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    arguments = parser.parse_args()
    configure_logging(logging.INFO)
    # The parent handles signals to the process group (Ctrl-C, a service manager): it drains first,
    # and this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=arguments.fd)
    # A process started from here must not keep it open: its end shows the parent a crash.
    connection.set_inheritable(False)
    connection.setblocking(True)
    try:
        return run(connection)
    except ConnectionError:
        return EXIT_PARENT_GONE
