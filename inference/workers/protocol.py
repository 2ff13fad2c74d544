"""What the API process and an engine worker say to each other, and how it is framed.

Knows no engine: each kind of worker adds the messages that it alone reads or sends: `decoder_to_worker`, `decoder_to_parent`.

The transport is a socket pair that the child inherits. A message is 4 bytes of length, big-endian, then msgpack. From host to
parent goes one `StepReport` per engine step with all its events; the other way go requests and cancellations. Either side takes
the end of the stream as the other's death. No torch, no asyncio: both sides import this.
"""

from __future__ import annotations

import socket
import struct
from functools import reduce
from operator import or_

import msgspec

from inference.engine import (
    BeamSearchParams,
    ChoiceFinished,
    EngineFinishReason,
    EngineStatistics,
    EngineTimings,
    GenerationRequest,
    ResponseFormat,
    SamplingParams,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceId,
    StopCriteria,
    TokenLogprobs,
    TokensGenerated,
)

MESSAGE_BYTES_MAX = 64 << 20  # bytes: a prompt of 10 million tokens; more is a broken peer, not a request
LENGTH_PREFIX = struct.Struct(">I")


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Base of all messages."""


class StartSequence(Message, tag="start", frozen=True):
    """Run a sequence. number: the parent's handle for it, above all earlier ones. sampling and stop cross as they are."""

    number: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop: StopCriteria
    cache_salt: str
    response_format: ResponseFormat | None = None
    choice_count: int = 1
    beam_search: BeamSearchParams | None = None
    rank: float = 0.0
    output_token_ids: list[int] = []  # a Struct copies its empty default


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


class ScheduledEvent(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """Wire form of `Scheduled`."""

    number: int
    cached_token_count: int


class TokensEvent(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Wire form of `TokensGenerated`."""

    number: int
    token_ids: list[int]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice_index: int = 0


class FinishedEvent(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Wire form of `SequenceFinished`."""

    number: int
    reason: str
    text: str
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float


class RefusedEvent(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The sequence was not taken, or cannot go on. overloaded: the queue is full. failed: the engine is to blame. Else `message`
    says why it cannot run, and `field` what to mend, if it is one field.
    """

    number: int
    overloaded: bool
    message: str
    field: str | None = None
    failed: bool = False


class ChoiceFinishedEvent(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Wire form of `ChoiceFinished`."""

    number: int
    choice_index: int
    reason: str
    text: str


Event = ScheduledEvent | TokensEvent | FinishedEvent | RefusedEvent | ChoiceFinishedEvent


class StepReport(Message, tag="step", frozen=True):
    """All that happened since the last report, in order, and the engine's statistics after it."""

    events: list[Event]
    statistics: list[int]


_encoder = msgspec.msgpack.Encoder()


class ProtocolBroken(Exception):
    """The peer sent what is no message. The connection is of no use any more."""


def encode(message: Message) -> bytes:
    """A framed message."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolBroken(f"a message of {len(body)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return LENGTH_PREFIX.pack(len(body)) + body


def body_length(prefix: bytes) -> int:
    """Length of the body that follows a prefix. Raises `ProtocolBroken` if it is beyond the limit."""
    (length,) = LENGTH_PREFIX.unpack(prefix)
    if length > MESSAGE_BYTES_MAX:
        raise ProtocolBroken(f"a message of {length} bytes exceeds {MESSAGE_BYTES_MAX}")
    return int(length)


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


def receive(connection: socket.socket) -> bytes | None:
    """The next body from a blocking socket; None at the end of the stream, even one inside a message."""
    prefix = _receive_exactly(connection, LENGTH_PREFIX.size)
    return None if prefix is None else _receive_exactly(connection, body_length(prefix))


def start_message(number: int, request: GenerationRequest) -> StartSequence:
    """Wire form of a request."""
    return StartSequence(
        number=number,
        prompt_token_ids=list(request.prompt_token_ids),
        sampling=request.sampling,
        stop=request.stop,
        cache_salt=request.cache_salt,
        response_format=request.response_format,
        choice_count=request.choice_count,
        beam_search=request.beam_search,
        rank=request.rank,
        output_token_ids=list(request.output_token_ids),
    )


def request_of(message: StartSequence) -> GenerationRequest:
    """The request of a wire form; its sequence_id is the number, since ids need not cross."""
    return GenerationRequest(
        sequence_id=SequenceId(str(message.number)),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=message.sampling,
        stop=message.stop,
        cache_salt=message.cache_salt,
        response_format=message.response_format,
        choice_count=message.choice_count,
        beam_search=message.beam_search,
        rank=message.rank,
        output_token_ids=tuple(message.output_token_ids),
    )


def wire_event(number: int, event: SequenceEvent) -> Event:
    """Wire form of a sequence's event."""
    match event:
        case TokensGenerated(token_ids=token_ids, text=text, logprobs=logprobs, choice_index=choice_index):
            return TokensEvent(number, list(token_ids), text, logprobs, choice_index)
        case Scheduled(cached_token_count=cached_token_count):
            return ScheduledEvent(number, cached_token_count)
        case ChoiceFinished(choice_index=choice_index, reason=reason, text=text):
            return ChoiceFinishedEvent(number, choice_index, reason.value, text)
        case SequenceFinished(timings=timings):
            return FinishedEvent(
                number=number,
                reason=event.reason.value,
                text=event.text,
                prompt_token_count=event.prompt_token_count,
                cached_token_count=event.cached_token_count,
                generated_token_count=event.generated_token_count,
                queue_ms=timings.queue_ms,
                prefill_ms=timings.prefill_ms,
                decode_ms=timings.decode_ms,
            )


def sequence_event(event: ScheduledEvent | TokensEvent | ChoiceFinishedEvent | FinishedEvent) -> SequenceEvent:
    """The sequence's event of a wire form."""
    match event:
        case TokensEvent():
            return TokensGenerated(tuple(event.token_ids), event.text, event.logprobs, event.choice_index)
        case ScheduledEvent():
            return Scheduled(event.cached_token_count)
        case ChoiceFinishedEvent():
            return ChoiceFinished(event.choice_index, EngineFinishReason(event.reason), event.text)
        case FinishedEvent():
            return SequenceFinished(
                reason=EngineFinishReason(event.reason),
                text=event.text,
                prompt_token_count=event.prompt_token_count,
                cached_token_count=event.cached_token_count,
                generated_token_count=event.generated_token_count,
                timings=EngineTimings(event.queue_ms, event.prefill_ms, event.decode_ms),
            )


def statistics_list(statistics: EngineStatistics) -> list[int]:
    """Wire form: the values in the order of the fields."""
    return [getattr(statistics, name) for name in EngineStatistics.__dataclass_fields__]


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < length:
        part = connection.recv(length - len(buffer))
        if not part:
            return None
        buffer += part
    return bytes(buffer)
