"""How an engine host begins and what it receives: messages, until the parent is gone; a thread ends the process then.

At once, in mid-load and in mid-step, since nothing here is worth saving. No torch: it is started before that is imported.
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

from inference.workers.protocol import (
    Message,
    MessageDecoder,
    ProtocolBroken,
    split,
)

EXIT_PARENT_GONE = 0
EXIT_PROTOCOL_BROKEN = 3
EXIT_LOAD_FAILED = 4


RECEIVE_BYTES = 1 << 16  # bytes taken off the socket at once
Local = TypeVar("Local")


class Inbox(Generic[Local]):
    """Messages from the parent, and what this process's own threads put. One thread takes.

    A thread of its own waits for the end of the connection, and for nothing else: it ends the process.
    """

    def __init__(self, connection: socket.socket, decoder: MessageDecoder, before_exit: Callable[[], None] = lambda: None) -> None:
        """decoder: of the messages of this kind of worker.

        before_exit: called when the parent is gone, to take along what would outlive this process. By any thread.
        """
        self._connection = connection
        self._decoder = decoder
        self._before_exit = before_exit
        self._received = bytearray()
        self._messages: deque[Message | Local] = deque()
        self._bell, self._button = socket.socketpair()  # the second end wakes who waits
        self._has_rung = False
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._arrivals.register(self._bell, select.POLLIN)
        threading.Thread(target=self._watch, name="weir-host-watch", daemon=True).start()

    def wait(self) -> Message | Local:
        """The next message, when it comes."""
        while not self._messages:
            self._arrivals.poll()
            self._receive()
        return self._messages.popleft()

    def take_all(self, *, wait: bool = False) -> list[Message | Local]:
        """What has come so far. wait: until something has."""
        if wait and not self._messages:
            self._arrivals.poll()
        self._receive()
        return [self._messages.popleft() for _ in range(len(self._messages))]  # other threads may put meanwhile

    def put(self, item: Local) -> None:
        """Hand something of this process's own to the thread that takes. Called by any thread."""
        self._messages.append(item)
        self._button.send(b"\0")
        self._has_rung = True

    def _receive(self) -> None:
        """Decode what has come, without waiting."""
        if self._has_rung:
            self._has_rung = False
            with contextlib.suppress(BlockingIOError):  # it was heard before
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
        except OSError:  # a reset is an end too
            self._exit(EXIT_PARENT_GONE)
        try:
            self._messages += map(self._decoder.decode, split(self._received))
        except ProtocolBroken as error:
            print(f"weir host: the parent broke the protocol: {error}", file=sys.stderr, flush=True)
            self._exit(EXIT_PROTOCOL_BROKEN)

    def _watch(self) -> None:
        end = select.poll()
        end.register(self._connection, 0)  # a hang-up, which is always told
        end.poll()
        self._exit(EXIT_PARENT_GONE)

    def _exit(self, code: int) -> NoReturn:
        self._before_exit()
        # Not sys.exit: that would end one thread alone, and the main one may be deep inside a step.
        os._exit(code)


def serve_parent(module: str, run: Callable[[socket.socket], int]) -> int:
    """Be a host to the parent whose socket `--fd` names; the exit status. run: does all that a host does."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Engine host; the API process starts it.")
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
        return run(connection)
    except ConnectionError:
        return EXIT_PARENT_GONE
