"""How to run an encoder, and the messages between the API process and its worker. No torch: both sides import this.

One batch is under way at a time: the parent sends the next when the last one's vectors have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inference.workers.protocol import Message


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """How to run an encoder's checkpoint. Every bound has a default that suits a small model on a laptop.

    name: what clients call the model. compute_dtype, device, torch_thread_count: as those of `TorchEngineSettings`.
    """

    directory: Path
    name: str
    compute_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    torch_thread_count: int = 0
    batch_token_count_max: int = 1024  # tokens: a larger batch computes no faster on some cores, and the next one waits for it
    batch_window_s: float = 0.001  # seconds that a first text waits for company: far less than it takes to compute
    waiting_token_count_max: int = 1 << 20  # tokens: minutes of work on a laptop; whoever comes later is better told to
    load_timeout_s: float = 600.0  # seconds: a large checkpoint from a cold disk
    step_timeout_s: float = 120.0  # seconds without an answer to a batch: the host hangs, and is killed
    close_timeout_s: float = 5.0  # seconds for the last batch to end
    restart_delay_s_min: float = 0.2
    restart_delay_s_max: float = 30.0
    stable_after_s: float = 60.0  # seconds of service after which the restart delay begins anew


class LoadEncoder(Message, tag="load_encoder", frozen=True):
    """The first message: what to load and how. See `EncoderSettings`."""

    directory: str
    compute_dtype: Literal["float32", "bfloat16", "int8"]
    device: Literal["cpu", "cuda"]
    torch_thread_count: int


class EncodeBatch(Message, tag="encode", frozen=True):
    """Texts to embed, as token ids. number: of the batch; its answer bears the same."""

    number: int
    texts: list[tuple[int, ...]]


class BatchEncoded(Message, tag="encoded", frozen=True):
    """The vectors of a batch in the order of its texts, each as its floats in the machine's own fp32.

    fault: why there are none; then `vectors` is empty.
    """

    number: int
    vectors: list[bytes]
    fault: str | None = None
