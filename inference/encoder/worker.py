"""Encoder worker: `python -m inference.encoder.worker --fd N`, a child process that holds one
encoder.

The main thread loads it and computes the batches; another thread ends the process when the parent
is gone, even during a batch.
"""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inference.encoder.config import read_encoder_config
from inference.errors import CheckpointInvalid, EngineStartFailed
from inference.workers.child import (
    EXIT_LOAD_FAILED,
    EXIT_PROTOCOL_BROKEN,
    Inbox,
    StepClock,
    serve_parent,
)
from inference.workers.protocol import (
    LoadFailed,
    Loading,
    Message,
    Ready,
    Shutdown,
    decoder_to_worker,
)

if TYPE_CHECKING:
    from inference.encoder.network import EncoderNetwork

IMPORT_FRACTION = 0.6  # share of the loading time for importing torch, measured with 23M parameters
_log = logging.getLogger("weir.inference.encoder")


class LoadEncoder(Message, tag="load_encoder", frozen=True):
    """First message: the encoder to load and its options. See `EncoderSettings`."""

    directory: str
    compute_dtype: Literal["float32", "bfloat16", "int8"]
    device: Literal["cpu", "cuda"]
    torch_thread_count: int


class EncodeBatch(Message, tag="encode", frozen=True):
    """Texts to embed, as token ids. The answer repeats the `number` of the batch."""

    number: int
    texts: list[tuple[int, ...]]


class BatchEncoded(Message, tag="encoded", frozen=True):
    """Vectors of a batch in the order of its texts, each as bytes of native fp32 floats.

    `fault` is the reason if embedding failed; `vectors` is then empty.
    """

    number: int
    vectors: list[bytes]
    fault: str | None = None


def serve(connection: socket.socket) -> int:
    """Load the encoder, then embed batches until shutdown. Return the exit status."""
    inbox: Inbox[Message] = Inbox(connection, decoder_to_worker(LoadEncoder, EncodeBatch))
    send, steps = inbox.send, StepClock()
    load = inbox.wait()
    if not isinstance(load, LoadEncoder):
        _log.error("the first message must be LoadEncoder, not %s", type(load).__name__)
        return EXIT_PROTOCOL_BROKEN
    try:
        network = load_network(load, lambda stage, fraction: send(Loading(stage, fraction)))
    except (CheckpointInvalid, EngineStartFailed) as error:
        _log.error("loading failed: %s", error)
        send(LoadFailed(str(error)))
        return EXIT_LOAD_FAILED
    inbox.start_pulse(steps.pulse)
    send(Ready(kv_block_count=0))
    while not isinstance(message := inbox.wait(), Shutdown):
        if not isinstance(message, EncodeBatch):
            _log.error("unexpected: %s", type(message).__name__)
            return EXIT_PROTOCOL_BROKEN
        steps.begin()
        encoded = encode_batch(network, message)
        steps.end()
        send(encoded)
    return 0


def load_network(load: LoadEncoder, on_progress: Callable[[str, float], None]) -> EncoderNetwork:
    """Import torch, read the weights, and embed a text as a test. Raises CheckpointInvalid."""
    on_progress("import", 0.0)
    import torch

    from inference.encoder.network import EncoderNetwork, load_encoder_weights

    torch.set_num_threads(load.torch_thread_count)
    if load.device == "cuda" and not torch.cuda.is_available():
        raise EngineStartFailed(
            "device cuda: torch finds no GPU; use device cpu, or a torch build with CUDA"
        )
    config = read_encoder_config(Path(load.directory))
    dtype = torch.float32 if load.compute_dtype == "float32" else torch.bfloat16
    on_progress("weights", IMPORT_FRACTION)
    weights = load_encoder_weights(
        config,
        dtype,
        lambda fraction: on_progress("weights", IMPORT_FRACTION + (1 - IMPORT_FRACTION) * fraction),
        quantize=load.compute_dtype == "int8",
    )
    network = EncoderNetwork(config, weights, torch.device(load.device))
    vectors = network.embed([[0] * config.input_tokens_max])
    if not bool(torch.isfinite(vectors).all()):
        raise CheckpointInvalid(
            config.directory,
            "computes vectors that are not finite; check that the files are intact",
        )
    gc.collect()
    gc.freeze()  # loaded objects live for the whole process
    return network


def encode_batch(network: EncoderNetwork, batch: EncodeBatch) -> BatchEncoded:
    """Embed a batch; return its vectors, or a fault if a value is not finite or the model fails."""
    import torch

    try:
        vectors = network.embed(batch.texts)
    except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
        _log.exception("a batch could not be embedded")
        return BatchEncoded(batch.number, [], f"{type(error).__name__}: {error}")
    if not bool(torch.isfinite(vectors).all()):
        return BatchEncoded(batch.number, [], "vectors are not finite")
    return BatchEncoded(batch.number, [vector.numpy().tobytes() for vector in vectors])


if __name__ == "__main__":
    raise SystemExit(serve_parent("inference.encoder.worker", serve))
