"""Start of an engine worker and its inbox of messages; a thread ends the process with its parents.

The process that starts a worker has the first connection. After `Listen` others connect too, and
the worker outlives the first one. The thread also tells them how long the current step runs. The
process ends at once, even while loading or in a step, since a worker has nothing to save. Must not
import torch: it runs before that import.
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
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Generic, NoReturn, TypeVar

from common.logs import configure_logging
from inference.engine import EngineStatistics, SequenceFinished, SequenceRefused
from inference.workers.connections import UNSENT_BYTES_MAX, Connection, Owner, is_own
from inference.workers.protocol import (
    FAMILY,
    CachedBlocks,
    CancelSequence,
    Event,
    Joined,
    Listen,
    LoadFailed,
    Loading,
    Message,
    MessageDecoder,
    ProtocolBroken,
    Pulse,
    Ready,
    Shutdown,
    StartSequence,
    StepReport,
    encode,
    split,
)

EXIT_PARENT_GONE = 0
EXIT_PROTOCOL_BROKEN = 3
EXIT_LOAD_FAILED = 4


RECEIVE_BYTES = 1 << 16  # bytes read from the socket at once
PULSE_S = 1.0  # between two pulses
# Seconds without an api process after which a shared worker ends: a killed one that is started
# again finds its model loaded.
LINGER_S = 10.0
# Seconds between two reports to a connection without events, beside others with events.
STATISTICS_EVERY_S = 0.02
CONNECTION_COUNT_MAX = 64
CACHED_KEYS_MAX = 1 << 16  # kept for processes that connect later: a million tokens
CACHED_KEYS_SENT = 4096  # in one message
FILES_MAX = 2  # that come with `Listen`
INT = struct.Struct("i")
FIRST_STEPS = 8  # compile, page in and warm caches: they say nothing about later ones
USUAL_DECAY = 0.999  # per step, so that a long prefill is remembered for some hundred steps
Local = TypeVar("Local")
_log = logging.getLogger("weir.inference.workers")


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
    """Messages from and to the API processes of a worker, and items from this process's threads.
    One thread reads.

    The worker sees one numbering of sequences, in the order of their arrival. Another thread waits
    for the end of the connections and then ends the process: at once if the worker has only that of
    its parent, after `LINGER_S` seconds if others can connect.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: MessageDecoder,
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the watching thread. `decoder` decodes the messages of this kind of worker.

        `before_exit` is called by any thread when no process is left, to end what would outlive
        this process.
        """
        self._decoder = decoder
        self._before_exit = before_exit
        self._messages: deque[Message | Local] = deque()
        # Guards connections, owners and the greeting.
        self._changing = threading.RLock()
        self._connections = [Connection(connection)]
        self._owners: dict[int, Owner] = {}  # by the worker's numbers of sequences
        self._number = 0
        self._listener: socket.socket | None = None
        self._is_shared = False
        self._files: list[int] = []  # that came with `Listen`: listening socket, lock
        self._load: Message | None = None  # first message of a shared worker
        self._greeting: Message | None = None  # last stage of loading, or its result
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Builds what a process that connects later needs to know beside the cached blocks.
        self.snapshot: Callable[[], Iterable[Message]] = tuple
        self._statistics = EngineStatistics()  # last reported
        # Writing to the second end wakes the reader, or the watching thread.
        self._bell, self._button = socket.socketpair()
        self._watch_bell, self._watch_button = socket.socketpair()
        for end in (self._button, self._watch_button):
            end.setblocking(False)
        self._has_rung = False
        self._arrivals = select.poll()
        self._arrivals.register(self._bell, select.POLLIN)
        self._polled: dict[Connection, int] = {}  # with its descriptor
        self._pulse: Callable[[], Pulse] | None = None
        threading.Thread(target=self._watch, name="weir-worker-watch", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to all API processes. Thread-safe.

        Blocks while the only one does not read, which bounds the data in flight.
        """
        data = encode(message)
        with self._changing:
            if isinstance(message, Loading | Ready | LoadFailed):
                self._greeting = message
            connections = [each for each in self._connections if not each.is_gone]
        for each in connections:
            self._send(each, data)

    def report(self, events: Iterable[Event], statistics: EngineStatistics) -> None:
        """Report the events of a step, each to the API process of its sequence, with the engine's
        statistics after them. Thread-safe; blocks like `send`.
        """
        now_s = time.monotonic()
        reports: list[tuple[Connection, list[Event], bytes]] = []
        with self._changing:
            own: dict[Connection, list[Event]] = {}
            for number, event in events:
                if (owner := self._owners.get(number)) is None:
                    continue
                if isinstance(event, SequenceFinished | SequenceRefused):
                    del self._owners[number]
                    owner.connection.numbers.pop(owner.number, None)
                own.setdefault(owner.connection, []).append((owner.number, event))
            self._statistics = statistics
            connections = [each for each in self._connections if not each.is_gone]
            for each in connections:
                is_due = len(connections) == 1 or now_s - each.reported_at_s >= STATISTICS_EVERY_S
                each.is_stale = each not in own and not is_due
                if not each.is_stale:
                    each.reported_at_s = now_s
                    reports.append((each, own.get(each, []), self._cached_for(each)))
        for connection, its_events, cached in reports:
            self._send(connection, cached + encode(StepReport(its_events, statistics)))
            if connection.is_leaving:
                self._wake_watch()

    def start_pulse(self, pulse: Callable[[], Pulse]) -> None:
        """Send the result of `pulse`, at once and then regularly from another thread.

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
        connections = self._poll_new()
        if wait and not self._messages:
            self._report_late(connections)
            self._arrivals.poll()
            connections = self._poll_new()
        if self._has_rung:
            self._has_rung = False
            with contextlib.suppress(BlockingIOError):  # already read
                self._bell.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        for each in connections:
            self._read(each)
        # Other threads may append.
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def put(self, item: Local) -> None:
        """Add an item, such as a compiled grammar, for the reading thread. Thread-safe."""
        self._messages.append(item)
        self._ring()

    def _ring(self) -> None:
        self._has_rung = True
        with contextlib.suppress(BlockingIOError):  # it rings already
            self._button.send(b"\0")

    def _wake_watch(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._watch_button.send(b"\0")

    def _poll_new(self) -> list[Connection]:
        """Return the connections to read; poll them all."""
        with self._changing:
            connections = [each for each in self._connections if not each.is_over]
        for each in connections:
            if each not in self._polled:
                self._polled[each] = each.socket.fileno()
                self._arrivals.register(each.socket, select.POLLIN)
        return connections

    def _report_late(self, connections: Iterable[Connection]) -> None:
        """Send the last statistics and cached blocks to connections that have not received them."""
        for each in connections:
            data = self._cached_for(each)
            if each.is_stale:
                each.is_stale = False
                data += encode(StepReport([], self._statistics))
            if data and not each.is_gone:
                self._send(each, data)

    def _cached_for(self, connection: Connection) -> bytes:
        """Encode the cached blocks that a process does not know yet, if any."""
        with self._changing:
            keys, connection.cached = connection.cached, []
        return encode(CachedBlocks(keys)) if keys else b""

    def _read(self, connection: Connection) -> None:
        """Take what a connection has received; end it after its end or a broken protocol."""
        has_ended = False
        try:
            while not has_ended:
                data = self._receive(connection)
                connection.received += data
                has_ended = not data
                if len(data) < RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:  # a reset also ends the connection
            has_ended = True
        try:
            for body in split(connection.received):
                self._take(connection, self._decoder.decode(body))
        except ProtocolBroken as error:
            # Not `print`: the process that reads the log may have ended.
            _log.error("an api process broke the protocol: %s", error)
            if not self._is_shared:
                self._exit(EXIT_PROTOCOL_BROKEN)
            has_ended = True
        if has_ended:
            if not self._is_shared:
                self._exit(EXIT_PARENT_GONE)
            self._end(connection)

    def _receive(self, connection: Connection) -> bytes:
        if self._is_shared:
            return connection.socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        # `socket.recv_fds` ignores its flags.
        data, received, _, _ = connection.socket.recvmsg(
            RECEIVE_BYTES, socket.CMSG_SPACE(FILES_MAX * INT.size), socket.MSG_DONTWAIT
        )
        for level, kind, content in received:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._files += [file for (file,) in INT.iter_unpack(content)]
        for file in self._files:
            os.set_inheritable(file, False)
        return data

    def _take(self, connection: Connection, message: Message) -> None:
        """Handle a message, or queue it for the worker. Raises ProtocolBroken."""
        match message:
            case Listen():
                self._listen()
            case CachedBlocks():
                self._forward(connection, message)
            case _ if self._is_shared and not connection.is_admitted:
                self._admit(connection, message)
            case StartSequence(number=number):
                if number in connection.numbers or connection.is_leaving:
                    raise ProtocolBroken(f"sequence {number} has been started already")
                with self._changing:
                    self._number += 1
                    connection.numbers[number] = self._number
                    self._owners[self._number] = Owner(connection, number)
                own = StartSequence(self._number, message.request, message.sent_at_s)
                self._messages.append(own)
            case CancelSequence(number=number):
                if (numbered := connection.numbers.get(number)) is not None:
                    self._messages.append(CancelSequence(numbered))
            case Shutdown() if not self._is_last(connection):
                connection.is_leaving = True
                self._cancel_all(connection)
                self._wake_watch()
            case _:
                self._messages.append(message)

    def _listen(self) -> None:
        if self._is_shared or len(self._files) != FILES_MAX:
            raise ProtocolBroken("Listen comes once, with two open files")
        self._listener = socket.socket(fileno=self._files[0])
        self._listener.setblocking(False)
        self._is_shared = True
        self._wake_watch()

    def _admit(self, connection: Connection, message: Message) -> None:
        """Accept a process that wants the model of this worker. Raises ProtocolBroken."""
        if isinstance(message, StartSequence | CancelSequence):
            raise ProtocolBroken("the first message must name the model")
        if isinstance(message, Shutdown):
            self._end(connection)
            return
        if self._load is None:
            self._load = message
            self._messages.append(message)
        elif message != self._load:
            raise ProtocolBroken("it wants another model than this worker has")
        connection.is_admitted = True
        for each in self.snapshot():
            self._send(connection, encode(each))
        keys = list(self._cached)
        for begin in range(0, len(keys), CACHED_KEYS_SENT):
            self._send(connection, encode(CachedBlocks(keys[begin : begin + CACHED_KEYS_SENT])))

    def _forward(self, sender: Connection, message: CachedBlocks) -> None:
        """Tell the other processes which blocks a sequence has left in the cache.

        With their next reports: a message of its own would wake each of them twice a request.
        """
        if not sender.is_admitted:
            return
        for key in message.keys:
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > CACHED_KEYS_MAX:
            self._cached.popitem(last=False)
        with self._changing:
            for each in self._connections:
                if each is not sender and each.is_admitted and not each.is_gone:
                    each.cached += message.keys

    def _is_last(self, connection: Connection) -> bool:
        """Return whether no other process is connected. None can connect afterwards."""
        with self._changing:
            others = [each for each in self._connections if each is not connection]
            if any(not each.is_gone for each in others):
                return False
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            return True

    def _cancel_all(self, connection: Connection) -> None:
        self._messages += map(CancelSequence, connection.numbers.values())

    def _end(self, connection: Connection) -> None:
        """End a connection, and cancel its sequences."""
        if connection.is_over:
            return
        if (fd := self._polled.pop(connection, None)) is not None:
            self._arrivals.unregister(fd)
        self._cancel_all(connection)
        connection.end()
        self._wake_watch()

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.send(data)
        while connection.unsent_byte_count and not connection.is_gone:
            if self._has_others(connection):
                if connection.unsent_byte_count > UNSENT_BYTES_MAX:
                    _log.error("an api process has stopped reading: its connection is closed")
                    connection.hang_up()
                self._wake_watch()
                return
            connection.drain()

    def _has_others(self, connection: Connection) -> bool:
        with self._changing:
            return any(each is not connection and not each.is_gone for each in self._connections)

    def _watch(self) -> None:
        """Accept connections, see their ends, send pulses and what sockets did not take."""
        polled: dict[int, Connection] = {}
        pulse_at_s, alone_since_s = time.monotonic() + PULSE_S, None
        while True:
            poll = select.poll()
            poll.register(self._watch_bell, select.POLLIN)
            with self._changing:
                for each in [each for each in self._connections if each.is_over]:
                    self._connections.remove(each)
                    each.socket.close()
                for each in self._connections:
                    if each.has_left:
                        each.hang_up()
                        self._ring()
                polled = {
                    each.socket.fileno(): each for each in self._connections if not each.hung_up
                }
                listener = self._listener
                if listener is not None:
                    poll.register(listener, select.POLLIN)
                    listener_fd = listener.fileno()
            for fd, each in polled.items():
                # Hang-ups are always reported.
                poll.register(fd, select.POLLOUT if each.unsent_byte_count else 0)
            now_s = time.monotonic()
            if polled:
                alone_since_s = None
            elif alone_since_s is None:
                alone_since_s = now_s
            if alone_since_s is not None and now_s - alone_since_s >= (
                LINGER_S if self._is_shared else 0.0
            ):
                self._exit(EXIT_PARENT_GONE)
            if now_s >= pulse_at_s:
                pulse_at_s = now_s + PULSE_S
                self._send_pulse(polled.values())
            for fd, event in poll.poll(max(pulse_at_s - now_s, 0.0) * 1000):
                if fd == self._watch_bell.fileno():
                    self._watch_bell.recv(RECEIVE_BYTES)
                elif (connection := polled.get(fd)) is None:
                    if listener is not None and fd == listener_fd:
                        self._accept(listener)
                elif event & ~select.POLLOUT:
                    connection.hung_up = True
                    self._ring()
                else:
                    connection.flush()

    def _accept(self, listener: socket.socket) -> None:
        """Accept a process of this user and tell it how far the worker is."""
        with self._changing:
            if listener is not self._listener:
                return  # closed meanwhile
            try:
                end = listener.accept()[0]
            except OSError:
                return
            if not is_own(end) or not self._has_room():
                end.close()
                return
            connection = Connection(end)
            connection.send(encode(Joined(os.getpid(), os.environ.get(FAMILY, ""))))
            if self._pulse is not None:
                connection.send(encode(self._pulse()))
            if self._greeting is not None:
                connection.send(encode(self._greeting))
            self._connections.append(connection)
        self._ring()

    def _has_room(self) -> bool:
        """Return whether another connection is allowed; drop one that has not named its model."""
        if len(self._connections) < CONNECTION_COUNT_MAX:
            return True
        silent = next((each for each in self._connections if not each.is_admitted), None)
        if silent is not None:
            silent.hang_up()
        return silent is not None

    def _send_pulse(self, connections: Iterable[Connection]) -> None:
        if self._pulse is None:
            return
        data = encode(self._pulse())
        for each in connections:
            if not each.unsent_byte_count:  # else it does not read
                each.send(data)

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
