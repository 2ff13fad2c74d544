"""What the API process and an encoder's host say to each other, beside what every host says. Framed as in `host_protocol.py`.

One batch is under way at a time: the parent sends the next when the last one's vectors have come. No torch: both sides import this.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class LoadEncoder(msgspec.Struct, tag="load_encoder", array_like=True, frozen=True):
    """The first message: what to load and how. See `EncoderSettings`."""

    directory: str
    compute_dtype: Literal["float32", "bfloat16", "int8"]
    device: Literal["cpu", "cuda"]
    torch_thread_count: int


class EncodeBatch(msgspec.Struct, tag="encode", array_like=True, frozen=True):
    """Texts to embed, as token ids. number: of the batch; its answer bears the same."""

    number: int
    texts: list[tuple[int, ...]]


class BatchEncoded(msgspec.Struct, tag="encoded", array_like=True, frozen=True):
    """The vectors of a batch in the order of its texts, each as its floats in the machine's own fp32.

    fault: why there are none; then `vectors` is empty.
    """

    number: int
    vectors: list[bytes]
    fault: str | None = None
