"""Start of an engine worker and its inbox of messages; a thread ends the process with its parent.

It ends at once, even while loading or in a step, since a worker has nothing to save. Must not
import torch: it runs before that import.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from inference.workers.protocol import Message, MessageDecoder, ProtocolBroken, split

EXIT_PARENT_GONE = 0
EXIT_PROTOCOL_BROKEN = 3
EXIT_LOAD_FAILED = 4


RECEIVE_BYTES = 1 << 16  # bytes read from the socket at once
Local = TypeVar("Local")


class Inbox(Generic[Local]):
    """Messages from the parent and items from this process's threads. One thread reads.

    A separate thread waits for the end of the connection and then ends the process.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: MessageDecoder,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the watching thread. decoder: for the messages of this kind of worker.

        before_exit: called when the parent is gone, by any thread, to end what would outlive it.
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
        threading.Thread(target=self._watch, name="weir-host-watch", daemon=True).start()

    def wait(self) -> Message | Local:
        """Wait for the next message and return it."""
        while not self._messages:
            self._arrivals.poll()
            self._receive()
        return self._messages.popleft()

    def take_all(self, *, wait: bool = False) -> list[Message | Local]:
        """Return all messages received so far. wait: block until there is one."""
        if wait and not self._messages:
            self._arrivals.poll()
        self._receive()
        # Other threads may append.
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def put(self, item: Local) -> None:
        """Add an item for the reading thread. Thread-safe."""
        self._messages.append(item)
        self._button.send(b"\0")
        self._has_rung = True

    def _receive(self) -> None:
        """Decode received data, without waiting."""
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

    def _watch(self) -> None:
        end = select.poll()
        end.register(self._connection, 0)  # hang-ups only, which are always reported
        end.poll()
        self._exit(EXIT_PARENT_GONE)

    def _exit(self, code: int) -> NoReturn:
        self._before_exit()
        # Not sys.exit, which would end this thread only; the main one may be inside a step.
        os._exit(code)


def serve_parent(module: str, run: Callable[[socket.socket], int]) -> int:
    """Run a worker on the inherited socket `--fd`; return its exit status. run: main loop."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description="Engine worker, started by the API process."
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the parent")
    arguments = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
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
