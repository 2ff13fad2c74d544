"""What the API process and the classifier process say to each other. Framed as in `workers/protocol.py`; no torch.

One batch is under way at a time: the parent sends the next when the last one's scores have come. So the queue is the parent's, and
what nobody waits for any more is never computed.
"""

from __future__ import annotations

import msgspec

from inference.workers.protocol import LENGTH_PREFIX, ProtocolBroken


class LoadClassifiers(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first message: checkpoint directories; later messages name them by index."""

    directories: list[str]


class ClassifyBatch(msgspec.Struct, tag="classify", array_like=True, frozen=True):
    """Texts to score, each with the index of its classifier. number: of the batch; its answer bears the same."""

    number: int
    texts: list[tuple[int, str]]


class ClassifiersReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """All are loaded."""


class ClassifiersFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """A checkpoint is unusable. The process exits after this."""

    message: str


class BatchScored(msgspec.Struct, tag="scored", array_like=True, frozen=True):
    """Scores from 0 to 1 for every text, in the order of the classifier's labels. The highest over all parts of a long text.

    fault: why there are none; then `scores` is empty.
    """

    number: int
    scores: list[list[float]]
    fault: str | None = None


ToClassifiers = LoadClassifiers | ClassifyBatch
FromClassifiers = ClassifiersReady | ClassifiersFailed | BatchScored
_encoder = msgspec.msgpack.Encoder()
_to_classifiers: msgspec.msgpack.Decoder[ToClassifiers] = msgspec.msgpack.Decoder(ToClassifiers)
_from_classifiers: msgspec.msgpack.Decoder[FromClassifiers] = msgspec.msgpack.Decoder(FromClassifiers)


def encode(message: ToClassifiers | FromClassifiers) -> bytes:
    body = _encoder.encode(message)
    return LENGTH_PREFIX.pack(len(body)) + body


def decode_to_classifiers(body: bytes) -> ToClassifiers:
    """Raises `ProtocolBroken` for anything else."""
    try:
        return _to_classifiers.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(str(error)) from error


def decode_from_classifiers(body: bytes) -> FromClassifiers:
    """Raises `ProtocolBroken` for anything else."""
    try:
        return _from_classifiers.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(str(error)) from error
