"""Encoding of gRPC frames as bytes, from the values of new output, without message objects.

Assigning a message object copies it, and one copy per token costs more than all other work on the
token. Field numbers are those of `weir/v1/inference_service.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.delta import Delta
from inference.engine import TokenLogprob, TokenLogprobs

# Varints of up to two bytes, 0.6 MB: for most tokens, and lengths of small frames.
VARINTS = [
    bytes((number,)) if number < 0x80 else bytes((number & 0x7F | 0x80, number >> 7))
    for number in range(1 << 14)
]
# Fields with a size below 128, by size: tag, size, and the tag of the next field if it is fixed.
FRAMES_OF = [b"\x0a" + size for size in VARINTS[:0x80]]
DELTAS_OF = [b"\x22%b\x08" % size for size in VARINTS[:0x80]]
TEXTS_OF = [b"\x12" + size for size in VARINTS[:0x80]]
TOKENS = [b"\x1a%b%b" % (VARINTS[len(token)], token) for token in VARINTS]  # by token id
DOUBLE = struct.Struct("<d")


def varint(number: int) -> bytes:
    """Encode a non-negative integer in the wire format of Protocol Buffers."""
    if number < 0x4000:
        return VARINTS[number]
    return bytes((number & 0x7F | 0x80,)) + varint(number >> 7)


def framed(frame: bytes) -> bytes:
    """Encode a serialized `ServerFrame` as a field of a `GenerateResponse`."""
    return b"\x0a%b%b" % (varint(len(frame)), frame)


def delta_frame(head: bytes, delta: bytes) -> bytes:
    """Wrap a serialized `DeltaFrame` in a `ServerFrame` as a field of a `GenerateResponse`.

    `head` is the encoded first field of the `ServerFrame`: the request id.
    """
    length = varint(len(delta))
    return framed(b"%b\x22%b%b" % (head, length, delta))


def delta_bytes(seq: int, choice_index: int, delta: Delta) -> bytes:
    """Serialize a `DeltaFrame` without its surrounding `ServerFrame`."""
    text = delta.text.encode()
    ids = b"".join(map(varint, delta.token_ids))
    return b"".join(
        (
            b"\x08" + varint(seq),
            b"\x12" + varint(len(text)) + text if text else b"",
            b"\x1a" + varint(len(ids)) + ids if ids else b"",
            b"\x28" + varint(choice_index) if choice_index else b"",
            b"" if delta.is_plain else rest_of(delta),
        )
    )


def rest_of(delta: Delta) -> bytes:
    """Serialize the rarer fields of a `DeltaFrame`: all but number, choice, text and token ids."""
    data = b"".join([logprobs_field(each) for each in delta.logprobs])
    if delta.calls or delta.end is not None:
        calls = [
            pb.ToolCallDelta(
                index=each.index, id=each.id, name=each.name, arguments_json=each.arguments
            )
            for each in delta.calls
        ]
        data += pb.DeltaFrame(tool_calls=calls, end=delta.end).SerializeToString()
    if delta.reasoning:
        text = delta.reasoning.encode()
        data += b"\x3a%b%b" % (varint(len(text)), text)
    if delta.reasoning_token_count:
        data += b"\x40" + varint(delta.reasoning_token_count)
    return data


def logprobs_field(logprobs: TokenLogprobs) -> bytes:
    """Serialize one entry of `DeltaFrame.logprobs`."""
    data = logprob_field(b"\x0a", logprobs.chosen)
    data += b"".join([logprob_field(b"\x12", each) for each in logprobs.top])
    return b"\x22%b%b" % (varint(len(data)), data)


def logprob_field(tag: bytes, token: TokenLogprob) -> bytes:
    """Serialize a `TokenLogprob` as a field with this tag."""
    number = varint(token.token_id)
    return b"%b%b\x08%b\x11%b" % (
        tag,
        VARINTS[len(number) + 10],
        number,
        DOUBLE.pack(token.logprob),
    )


def logprob_messages(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """Convert log-probabilities to messages, one per token."""
    messages = []
    for each in logprobs:
        top = [
            pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob) for token in each.top
        ]
        chosen = pb.TokenLogprob(token_id=each.chosen.token_id, logprob=each.chosen.logprob)
        messages.append(pb.TokenLogprobs(chosen=chosen, top=top))
    return messages
