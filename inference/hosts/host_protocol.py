"""What the API process and an engine host say to each other, and how it is framed.

The transport is a socket pair that the child inherits. A message is 4 bytes of length, big-endian, then msgpack. From host to
parent goes one `StepReport` per engine step with all its events; the other way go requests and cancellations. Either side takes
the end of the stream as the other's death. No torch, no asyncio: both sides import this.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from inference.core.cost_model import CostModel
from inference.encoder.protocol import BatchEncoded, EncodeBatch, LoadEncoder
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
from inference.kv_event_index import KvCacheChange
from inference.limits import EngineLimits
from inference.native.packed_place import PackedPlace
from inference.tensorrt.settings import LoadTensorRt

MESSAGE_BYTES_MAX = 64 << 20  # bytes: a prompt of 10 million tokens; more is a broken peer, not a request
LENGTH_PREFIX = struct.Struct(">I")


class LoadModel(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first message: what to load and how. See `EngineOptions`; limits cross as they are."""

    directory: str
    limits: EngineLimits
    compute_dtype: Literal["float32", "bfloat16", "int8"]
    kv_cache_bytes: int
    torch_thread_count: int
    device: Literal["cpu", "cuda"] = "cpu"
    simulation: CostModel | None = None
    packed: PackedPlace | None = None


class StartSequence(msgspec.Struct, tag="start", array_like=True, frozen=True):
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


class CancelSequence(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """End a sequence. One that has ended already is no error: the two messages crossed."""

    number: int


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Cancel everything, report it, and exit."""


ToHost = LoadModel | LoadTensorRt | LoadEncoder | StartSequence | CancelSequence | EncodeBatch | Shutdown


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """Progress before `Ready`. fraction: 0 to 1 over all stages."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The host takes sequences from now on."""

    kv_block_count: int


class LoadFailed(msgspec.Struct, tag="load_failed", array_like=True, frozen=True):
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


class StepReport(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """All that happened since the last report, in order, and the engine's statistics after it."""

    events: list[Event]
    statistics: list[int]


ToParent = Loading | Ready | LoadFailed | StepReport | KvCacheChange | BatchEncoded

_encoder = msgspec.msgpack.Encoder()
_to_host_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
_to_parent_decoder: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)


class ProtocolBroken(Exception):
    """The peer sent what is no message. The connection is of no use any more."""


def encode(message: ToHost | ToParent) -> bytes:
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


def decode_to_host(body: bytes) -> ToHost:
    """Raises `ProtocolBroken` for anything that is not a message to a host."""
    try:
        return _to_host_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(str(error)) from error


def decode_to_parent(body: bytes) -> ToParent:
    """Raises `ProtocolBroken` for anything that is not a message to a parent."""
    try:
        return _to_parent_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(str(error)) from error


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
