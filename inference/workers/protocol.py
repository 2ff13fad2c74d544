"""What the API process and an engine worker say to each other, and how it is framed.

Knows no engine: each kind of worker adds the messages that it alone reads or sends: `decoder_to_worker`, `decoder_to_parent`.

The transport is a socket pair that the child inherits. A message is 4 bytes of length, big-endian, then msgpack. From host to
parent goes one `StepReport` per engine step with all its events; the other way go requests and cancellations. Either side takes
the end of the stream as the other's death. No torch, no asyncio: both sides import this.
"""

from __future__ import annotations

import struct
import time
from functools import reduce
from operator import or_

import msgspec

from inference.engine import (
    EngineStatistics,
    GenerationRequest,
    SequenceEvent,
    SequenceRefused,
)

MESSAGE_BYTES_MAX = 64 << 20  # bytes: a prompt of 10 million tokens; more is a broken peer, not a request
LENGTH_PREFIX = struct.Struct(">I")


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages."""


class StartSequence(Message, tag="start", frozen=True):
    """Run a sequence. number: the parent's handle for it, above all earlier ones.

    sent_at_s: on the monotonic clock, which is the same in all processes of a machine.
    """

    number: int
    request: GenerationRequest
    sent_at_s: float = msgspec.field(default_factory=time.monotonic)


class CancelSequence(Message, tag="cancel", frozen=True):
    """End a sequence. One that has ended already is no error: the two messages crossed."""

    number: int


class Shutdown(Message, tag="shutdown", frozen=True):
    """Cancel everything, report it, and exit."""


class Loading(Message, tag="loading", frozen=True):
    """Progress before `Ready`. fraction: 0 to 1 over all stages."""

    stage: str
    fraction: float


class Ready(Message, tag="ready", frozen=True):
    """The host takes sequences from now on."""

    kv_block_count: int


class LoadFailed(Message, tag="load_failed", frozen=True):
    """The checkpoint is unusable; loading it again would fail again. The host exits after this."""

    message: str


# A sequence's number, and what became of it.
Event = tuple[int, SequenceEvent | SequenceRefused]


class StepReport(Message, tag="step", frozen=True):
    """All that happened since the last report, in order, and the engine's statistics after it."""

    events: list[Event]
    statistics: EngineStatistics


_encoder = msgspec.msgpack.Encoder()


class ProtocolBroken(Exception):
    """The peer sent what is no message. The connection is of no use any more."""


def encode(message: Message) -> bytes:
    """A framed message."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolBroken(f"a message of {len(body)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return LENGTH_PREFIX.pack(len(body)) + body


def split(received: bytearray) -> list[bytes]:
    """Take all whole messages off the beginning of what was received; their bodies. Raises `ProtocolBroken` if one is too long."""
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
    """Decodes what one side reads."""

    def __init__(self, *types: type[Message]) -> None:
        """types: of all messages that may come; their tags are unique among them."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(reduce(or_, types))

    def decode(self, body: bytes) -> Message:
        """Raises `ProtocolBroken` for anything that is not one of its messages."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolBroken(str(error)) from error


def decoder_to_worker(*own: type[Message]) -> MessageDecoder:
    """Of what a worker reads. own: the messages of its kind, its first one among them."""
    return MessageDecoder(StartSequence, CancelSequence, Shutdown, *own)


def decoder_to_parent(*own: type[Message]) -> MessageDecoder:
    """Of what the parent of a worker reads. own: the messages that only its kind sends."""
    return MessageDecoder(Loading, Ready, LoadFailed, StepReport, *own)
