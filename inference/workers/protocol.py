"""Messages between the API process and an engine worker, and their framing.

Independent of engines: each kind of worker adds its own messages with `decoder_to_worker` and
`decoder_to_parent`.

The transport is a socket pair that the child inherits; after `Listen`, other API processes connect
too, each with numbers of its own. A message is 4 bytes of length, big-endian, then msgpack. The
worker sends one `StepReport` per engine step with all events of a connection; the parent sends
requests and cancellations. Either side takes the end of the stream as the other's death. No torch,
no asyncio: both sides import this.
"""

from __future__ import annotations

import struct
import time
from functools import reduce
from operator import or_

import msgspec

from inference.engine import EngineStatistics, GenerationRequest, SequenceEvent, SequenceRefused

MESSAGE_BYTES_MAX = 64 << 20  # bytes: a prompt of 10 million tokens; more means a broken peer
LENGTH_PREFIX = struct.Struct(">I")
# Environment variable of a worker with a value of its own, which all processes started by it
# inherit.
FAMILY = "WEIR_WORKER_FAMILY"


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages between parent and worker."""


class StartSequence(Message, tag="start", frozen=True):
    """Command to run a sequence. `number` is the sender's handle for it, higher for each sequence.

    `sent_at_s` is on the monotonic clock, which all processes of a machine share.
    """

    number: int
    request: GenerationRequest
    sent_at_s: float = msgspec.field(default_factory=time.monotonic)


class CancelSequence(Message, tag="cancel", frozen=True):
    """Command to end a sequence. It is ignored if the sequence has ended: the messages crossed."""

    number: int


class Shutdown(Message, tag="shutdown", frozen=True):
    """Command to cancel all sequences of the sender and report it, and to exit if no other API
    process is connected; else only to close the connection.
    """


class Listen(Message, tag="listen", frozen=True):
    """Command to serve other API processes too. The first message, if it is sent.

    With it come two open files: a listening socket, and the lock that is held as long as the worker
    runs.
    """


class Joined(Message, tag="joined", frozen=True):
    """First message to an API process that did not start the worker: process id, and its `FAMILY`
    (see `process.py`).
    """

    pid: int
    family: str


class CachedBlocks(Message, tag="cached_blocks", frozen=True):
    """Hashes of blocks that a sequence has left in the prefix cache, see `PrefixHint`.

    An API process sends them, and the worker forwards them to the others.
    """

    keys: list[int]


class Loading(Message, tag="loading", frozen=True):
    """Progress of loading, before `Ready`. `fraction` goes from 0 to 1 over all stages."""

    stage: str
    fraction: float


class Ready(Message, tag="ready", frozen=True):
    """Report that the worker takes sequences. For `kernels` see `EngineCondition`."""

    kv_block_count: int
    kernels: str = ""


class LoadFailed(Message, tag="load_failed", frozen=True):
    """Report that the checkpoint is unusable, so a retry would fail too. The worker then exits."""

    message: str


# A sequence's number and an event of it.
Event = tuple[int, SequenceEvent | SequenceRefused]


class Pulse(Message, tag="pulse", frozen=True):
    """Sign of life of a ready worker, about once a second, from a thread that computes nothing.

    `step_s` is how long the current step has run, in seconds; 0 between steps. `usual_s` is the
    longest of recent steps, infinite while there are too few.
    """

    step_s: float
    usual_s: float


class StepReport(Message, tag="step", frozen=True):
    """Report of all events since the last one, in order, and the engine's statistics after them."""

    events: list[Event]
    statistics: EngineStatistics


_encoder = msgspec.msgpack.Encoder()


class ProtocolBroken(Exception):
    """The peer sent an invalid message; the connection is unusable."""


def encode(message: Message) -> bytes:
    """Serialize a message with its length prefix. Raises ProtocolBroken if it is too long."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolBroken(f"a message of {len(body)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return LENGTH_PREFIX.pack(len(body)) + body


def split(received: bytearray) -> list[bytes]:
    """Remove all complete messages from `received` and return their bodies.

    Raises ProtocolBroken if a message is too long.
    """
    bodies = []
    begin, size = 0, LENGTH_PREFIX.size
    while len(received) >= begin + size:
        (length,) = LENGTH_PREFIX.unpack_from(received, begin)
        if length > MESSAGE_BYTES_MAX:
            raise ProtocolBroken(f"a message of {length} bytes exceeds {MESSAGE_BYTES_MAX}")
        end = begin + size + length
        if len(received) < end:
            break
        bodies.append(bytes(received[begin + size : end]))
        begin = end
    del received[:begin]
    return bodies


class MessageDecoder:
    """Decoder of the messages that one side reads."""

    def __init__(self, *types: type[Message]) -> None:
        """Create a decoder for messages of these types, whose tags must be unique."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
            reduce(or_, types)
        )

    def decode(self, body: bytes) -> Message:
        """Decode the body of a message. Raises ProtocolBroken for any other content."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolBroken(str(error)) from error


def decoder_to_worker(*own: type[Message]) -> MessageDecoder:
    """Build a worker's decoder. `own` are the messages of its kind, including the first one."""
    return MessageDecoder(StartSequence, CancelSequence, Shutdown, Listen, CachedBlocks, *own)


def decoder_to_parent(*own: type[Message]) -> MessageDecoder:
    """Build the decoder of a worker's parent. `own` are messages that only this kind sends."""
    return MessageDecoder(Loading, Ready, LoadFailed, Pulse, StepReport, Joined, CachedBlocks, *own)
