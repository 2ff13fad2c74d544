"""Execution of a step: runs the decoder, samples the new tokens.

Opens the decoder, native or on torch, which owns all tensors. Scheduling is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from inference.checkpoint.checkpoint import DecoderConfig
from inference.checkpoint.tensors import on_device
from inference.core.options import ComputeDtype, EngineOptions
from inference.core.scheduler import Chunk, StepPlan
from inference.core.sequence import Sequence
from inference.core.torch_decoder import TorchDecoder
from inference.decoder.model import NOT_FINITE, DecoderWeights, Logits, load_weights
from inference.errors import EngineStartFailed, InvariantViolated
from inference.native.decoder import NativeDecoder, open_decoder, path_for, supports
from inference.sampling.grammar import MaskWorker
from inference.sampling.sampler import Chosen, Draw, choose, prompt_logprobs

# Types of hidden states, keys and values. With "int8", only the weights have 8 bits; they
# multiply bfloat16.
_TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.bfloat16,
}


class ModelRunner:
    """A loaded model with its KV pools. Only one thread may use it."""

    def __init__(
        self, options: EngineOptions, config: DecoderConfig, on_progress: Callable[[float], None]
    ) -> None:
        """Load the model. `on_progress` is called with 0 to 1 while weights are read.

        Raises CheckpointInvalid, or EngineStartFailed if the device is missing, too small, or does
        not compute this type.
        """
        directory, compute_dtype = Path(options.directory), options.compute_dtype
        device, dtype = torch.device(options.device), _TORCH_DTYPES[compute_dtype]
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise EngineStartFailed("the device is set to cuda, but torch finds no CUDA device")
            if compute_dtype == "int8":
                raise EngineStartFailed(
                    "the type int8 has no kernels on cuda: use bfloat16, which is faster there"
                )
            if options.kv_dtype not in ("auto", compute_dtype):
                raise EngineStartFailed(
                    f"a KV cache of type {options.kv_dtype} has no kernels on cuda: use auto"
                )
        self._mask_worker = MaskWorker(config.vocabulary_size)
        self._decoder: NativeDecoder | TorchDecoder

        def load() -> DecoderWeights:
            return load_weights(
                directory, config, dtype, on_progress, quantize=compute_dtype == "int8"
            )

        if device.type == "cpu" and supports(config, dtype):
            self._decoder = open_decoder(
                path_for(options.packed, directory, compute_dtype),
                0 if options.packed is None else options.packed.bytes_max,
                load,
                lambda weights: NativeDecoder(
                    config,
                    weights,
                    dtype,
                    options.limits.context_window_tokens,
                    options.block_count(config),
                    options.kv_type,
                ),
            )
        else:
            self._decoder = _open_torch_decoder(config, load, options)
        self.block_count = self._decoder.block_count

    @property
    def kernels(self) -> str:
        """Instruction set of the native kernels, or `torch` or `cuda` without them."""
        return self._decoder.level

    @property
    def verifies_drafts(self) -> bool:
        """True if computing rows in one step gives bit for bit the result of separate steps."""
        return isinstance(self._decoder, NativeDecoder)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> dict[Sequence, Chosen]:
        """Compute the plan's chunks. Return the next token of each sequence whose chunk completes
        it, with the tokens after it where the draft was right, and add to the `prompt_logprobs` of
        sequences.

        Writes the pools only at the chunks' positions. Raises InvariantViolated if the model's
        output is not finite, since further tokens would be noise and must not be billed.
        """
        chunks = plan.chunks
        # Most rows take the largest logit, which the decoder computes anyway; only the remaining
        # rows are sampled.
        rows, draws, row_count = list[int](), list[Draw](), 0
        for chunk in chunks:
            chunk_row_count = chunk.logit_row_count
            ahead_count = chunk_row_count - chunk.scored_count
            row_count += chunk_row_count
            if ahead_count and not chunk.sequence.next_takes_best:
                rows += range(row_count - ahead_count, row_count)
                draws += map(chunk.sequence.draw, range(ahead_count))
        masks = self._mask_worker.begin([draw.grammar for draw in draws])
        logits = self._decoder.forward(chunks)
        if NOT_FINITE in logits.best:
            raise InvariantViolated("the model's output is not finite; are the weights intact?")
        if plan.scored_count:
            self._score(chunks, logits)
        tokens = [Chosen(token_id) for token_id in logits.best]
        if rows:
            for row, token in zip(rows, choose(logits.take(rows), draws, masks), strict=True):
                tokens[row] = token
        found, row = {}, 0
        for chunk in chunks:
            row += chunk.scored_count
            if chunk.completes:
                end = row + 1 + len(chunk.draft)
                found[chunk.sequence] = _accepted(tokens[row], tokens[row + 1 : end], chunk.draft)
                row = end
        return found

    def _score(self, chunks: list[Chunk], logits: Logits) -> None:
        """Add the log-probabilities of the prompt tokens that this step determines."""
        row = 0
        for chunk in chunks:
            if chunk.scored_count:
                sequence = chunk.sequence
                top_count = sequence.request.sampling.prompt_logprobs
                assert top_count is not None, "its rows are wanted"
                first = len(sequence.prompt_logprobs)
                sequence.prompt_logprobs += prompt_logprobs(
                    logits.take([*range(row, row + chunk.scored_count)]),
                    sequence.token_ids[first : first + chunk.scored_count],
                    top_count,
                )
            row += chunk.logit_row_count


def _open_torch_decoder(
    config: DecoderConfig,
    load: Callable[[], DecoderWeights],
    options: EngineOptions,
) -> TorchDecoder:
    """Load the weights on the device. Raises EngineStartFailed if a GPU has too little memory."""
    try:
        weights = on_device(load(), torch.device(options.device))
        return TorchDecoder(config, weights, options)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise EngineStartFailed(
            f"the GPU has too little memory for the model ({reason}): use a smaller checkpoint or"
            " KV cache, a GPU with more memory, or one that no other process uses"
        ) from error


def _accepted(token: Chosen, after: list[Chosen], draft: tuple[int, ...]) -> Chosen:
    """Join the next token with the following ones, up to the first that the draft did not predict.

    `after` was sampled from the rows of the draft.
    """
    right_count = 0
    for drawn, drafted in zip([token, *after], draft, strict=False):
        if drawn.token_id != drafted:
            break
        right_count += 1
    return token._replace(following=tuple(after[:right_count])) if right_count else token
