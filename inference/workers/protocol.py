"""Messages between the API process and an engine worker, and their framing.

Independent of engines: each kind of worker adds its own messages with `decoder_to_worker` and
`decoder_to_parent`.

The transport is a socket pair that the child inherits. A message is 4 bytes of length, big-endian,
then msgpack. The worker sends one `StepReport` per engine step with all its events; the parent
sends requests and cancellations. Either side takes the end of the stream as the other's death. No
torch, no asyncio: both sides import this.
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


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages."""


class StartSequence(Message, tag="start", frozen=True):
    """Run a sequence. number: the parent's increasing handle for it.

    sent_at_s: on the monotonic clock, which all processes of a machine share.
    """

    number: int
    request: GenerationRequest
    sent_at_s: float = msgspec.field(default_factory=time.monotonic)


class CancelSequence(Message, tag="cancel", frozen=True):
    """End a sequence. Ignored if it has already ended: the two messages crossed."""

    number: int


class Shutdown(Message, tag="shutdown", frozen=True):
    """Cancel everything, report it, and exit."""


class Loading(Message, tag="loading", frozen=True):
    """Progress before `Ready`. fraction: 0 to 1 over all stages."""

    stage: str
    fraction: float


class Ready(Message, tag="ready", frozen=True):
    """The worker takes sequences from now on. kernels: see `EngineCondition`."""

    kv_block_count: int
    kernels: str = ""


class LoadFailed(Message, tag="load_failed", frozen=True):
    """The checkpoint is unusable, and a retry would fail too. The worker exits after this."""

    message: str


# A sequence's number and an event of it.
Event = tuple[int, SequenceEvent | SequenceRefused]


class Pulse(Message, tag="pulse", frozen=True):
    """Sign of life of a ready worker, about once a second, from a thread that computes nothing.

    step_s: for how long the current step has run; 0 between steps. usual_s: the longest of recent
    steps; infinite while there are too few.
    """

    step_s: float
    usual_s: float


class StepReport(Message, tag="step", frozen=True):
    """Events since the last report, in order, and the engine's statistics after them."""

    events: list[Event]
    statistics: EngineStatistics


_encoder = msgspec.msgpack.Encoder()


class ProtocolBroken(Exception):
    """The peer sent an invalid message; the connection is unusable."""


def encode(message: Message) -> bytes:
    """Return a framed message. Raises: ProtocolBroken if it is too long."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolBroken(f"a message of {len(body)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return LENGTH_PREFIX.pack(len(body)) + body


def split(received: bytearray) -> list[bytes]:
    """Remove all complete messages from `received` and return their bodies.

    Raises: ProtocolBroken if one is too long.
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
        """Create a decoder. types: of all messages that may arrive, with unique tags."""
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
            reduce(or_, types)
        )

    def decode(self, body: bytes) -> Message:
        """Decode a body. Raises: ProtocolBroken for any other content."""
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolBroken(str(error)) from error


def decoder_to_worker(*own: type[Message]) -> MessageDecoder:
    """Build the decoder of a worker. own: messages of its kind, with the first one."""
    return MessageDecoder(StartSequence, CancelSequence, Shutdown, *own)


def decoder_to_parent(*own: type[Message]) -> MessageDecoder:
    """Build the decoder of a worker's parent. own: messages that only this worker kind sends."""
    return MessageDecoder(Loading, Ready, LoadFailed, Pulse, StepReport, *own)
