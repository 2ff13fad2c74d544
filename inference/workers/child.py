"""How an engine host begins and what it receives: a thread reads messages, and ends the process when the parent is gone.

At once, in mid-load and in mid-step, since nothing here is worth saving. No torch: it is started before that is imported.
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
from collections.abc import Callable
from typing import Generic, TypeVar

from inference.workers.protocol import (
    Message,
    MessageDecoder,
    ProtocolBroken,
    receive,
)

EXIT_PARENT_GONE = 0
EXIT_PROTOCOL_BROKEN = 3
EXIT_LOAD_FAILED = 4


Local = TypeVar("Local")


class Inbox(Generic[Local]):
    """Messages from the parent with the time of their arrival, and what this process's own threads put. One thread takes.

    Bounded by the parent: it sends no more sequences than the waiting queue takes.
    """

    def __init__(self, connection: socket.socket, decoder: MessageDecoder, before_exit: Callable[[], None] = lambda: None) -> None:
        """decoder: of the messages of this kind of worker.

        before_exit: called by the reading thread when the parent is gone, to take along what would outlive this process.
        """
        self._connection = connection
        self._decoder = decoder
        self._before_exit = before_exit
        self._messages: queue.SimpleQueue[tuple[float, Message | Local]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="weir-host-reader", daemon=True).start()

    def wait(self) -> tuple[float, Message | Local]:
        """The next message, when it comes, and its arrival in `time.monotonic()` seconds."""
        return self._messages.get()

    def take_all(self) -> list[tuple[float, Message | Local]]:
        """What has come so far."""
        taken = []
        while not self._messages.empty():
            taken.append(self._messages.get())
        return taken

    def put(self, item: Local) -> None:
        """Hand something of this process's own to the thread that takes. Called by any thread."""
        self._messages.put((time.monotonic(), item))

    def _read(self) -> None:
        code = EXIT_PARENT_GONE
        try:
            stream = self._connection.makefile("rb")  # reads what has come at once: the parent writes all of a moment together
            while (body := receive(stream)) is not None:
                self._messages.put((time.monotonic(), self._decoder.decode(body)))
        except OSError:
            pass  # a reset is an end too
        except ProtocolBroken as error:
            print(f"weir host: the parent broke the protocol: {error}", file=sys.stderr, flush=True)
            code = EXIT_PROTOCOL_BROKEN
        self._before_exit()
        # Not sys.exit: that would end this thread alone, and the main one may be deep inside a step.
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
