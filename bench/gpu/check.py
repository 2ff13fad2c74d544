"""Results of the GPU's decoder beside those of the CPU, and the promises of its steps.

    python -m bench.gpu.check [--device cuda] [--out DIR]

One line per question: PASS or FAIL with the number. The reference is the same decoder on the CPU
with torch's operations in float32, which other tests compare with `transformers`. Ends with status
1 if a question failed. With `TRITON_INTERPRET=1 ... --device cpu`, the interpreter computes tiny
models, and questions about memory and CUDA are skipped.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from bench.gpu.models import (
    FIRST_PLAIN_TOKEN,
    SHAPES,
    Run,
    Shape,
    add_common_arguments,
    device_facts,
    open_decoder,
    open_device,
    random_weights,
    write_results,
)
from inference.checkpoint.tensors import on_device
from inference.core.torch_decoder import TorchDecoder
from inference.decoder.cuda_kernels import TritonKernels
from inference.decoder.model import NOT_FINITE, DecoderWeights, TorchKernels
from inference.limits import EngineLimits

CPU = torch.device("cpu")
LIMITS = EngineLimits(512, step_token_count_max=64, running_sequence_count_max=4)
PROMPT_TOKENS, OUTPUT_TOKENS, CHUNK_TOKENS = (30, 3, 1), 4, 24
INTERPRETED_PROCESSORS = 4  # of a pretended GPU
# Relative errors of logits, beside float32 on the CPU.
LOGIT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# The 8B shape with two layers: head sizes and vocabulary of a real model, little memory.
LARGE = Shape(4096, 14_336, 2, 32, 8, 128, 128_256)
STEPS_WATCHED = 20
SYNCS_MAX = 1  # per step: the ids
LONG_CONTEXT, LONG_CHUNK = 32_768, 2048
Answer = tuple[bool | None, str]  # None: not asked on this device


def kernels_for(device: torch.device) -> TorchKernels | None:
    """Return the interpreted kernels for a CPU, and None, for the decoder's own, on a GPU."""
    return None if device.type == "cuda" else TritonKernels(INTERPRETED_PROCESSORS)


def outputs(decoder: TorchDecoder, vocabulary_size: int) -> tuple[list[list[int]], torch.Tensor]:
    """Return greedy tokens of prompts in chunks and of steps that decode, and the first logits."""
    rng, run = random.Random(5), Run(decoder)
    for count in PROMPT_TOKENS:
        prompt = [rng.randrange(FIRST_PLAIN_TOKEN, vocabulary_size) for _ in range(count)]
        run.add(prompt, OUTPUT_TOKENS)
    first = run.step(CHUNK_TOKENS).values.float().cpu().clone()
    for _ in range(OUTPUT_TOKENS):
        run.step(CHUNK_TOKENS)
    ends = zip(run.texts, PROMPT_TOKENS, strict=True)
    return [text.token_ids[count : count + OUTPUT_TOKENS - 1] for text, count in ends], first


def compared(device: torch.device, shape: Shape, dtype: torch.dtype) -> Answer:
    """Compare tokens and logits with those of float32 on the CPU."""
    weights = random_weights(shape, dtype, device)
    exact = widened(on_device(weights, CPU))
    ours, logits = outputs(
        open_decoder(shape, weights, LIMITS, block_count=64, kernels=kernels_for(device)),
        shape.vocabulary_size,
    )
    reference, reference_logits = outputs(
        open_decoder(shape, exact, LIMITS, block_count=64, kernels=TorchKernels()),
        shape.vocabulary_size,
    )
    error = float((logits - reference_logits).norm() / reference_logits.norm())
    pairs = [pair for two in zip(ours, reference, strict=True) for pair in zip(*two, strict=True)]
    equal_count = sum(a == b for a, b in pairs)
    # In bfloat16, close logits may change places.
    passed = error < LOGIT_ERROR[dtype] and (dtype != torch.float32 or equal_count == len(pairs))
    return passed, f"relative error {error:.1e}, {equal_count} of {len(pairs)} tokens equal"


def widened(weights: DecoderWeights) -> DecoderWeights:
    """Return weights in float32."""

    def wide(held: Any) -> Any:
        if isinstance(held, torch.Tensor):
            return held.float()
        if isinstance(held, tuple):
            return tuple(map(wide, held))
        if is_dataclass(held) and not isinstance(held, type):
            return replace(
                held, **{each.name: wide(getattr(held, each.name)) for each in fields(held)}
            )
        return held

    result: DecoderWeights = wide(weights)
    return result


def small_model(device: torch.device) -> Answer:
    """Does a small model give the tokens of the CPU in float32?"""
    return compared(device, SHAPES["tiny"], torch.float32)


def windowed_model(device: torch.device) -> Answer:
    """Does a model with windows, normalized heads and groups of three?"""
    return compared(device, SHAPES["tiny-window"], torch.float32)


def large_heads(device: torch.device) -> Answer:
    """Does a model with the sizes of an 8B model in float32?"""
    return (None, "") if device.type == "cpu" else compared(device, LARGE, torch.float32)


def large_heads_bfloat16(device: torch.device) -> Answer:
    """Is bfloat16 near float32?"""
    return (None, "") if device.type == "cpu" else compared(device, LARGE, torch.bfloat16)


def broken_weights(device: torch.device) -> Answer:
    """Are infinite logits found?"""
    weights = random_weights(SHAPES["tiny"], torch.float32, device)
    weights.final_norm[3] = torch.inf
    decoder = open_decoder(
        SHAPES["tiny"], weights, LIMITS, block_count=32, kernels=kernels_for(device)
    )
    run = Run(decoder)
    run.add([9, 9], 1)
    best = run.step(CHUNK_TOKENS).best
    return best == [NOT_FINITE], f"best token {best}"


def synchronizations(device: torch.device) -> Answer:
    """Does a step that decodes wait for the GPU only once?"""
    if device.type == "cpu":
        return None, ""
    decoder = open_decoder(LARGE, random_weights(LARGE, torch.bfloat16, device), LIMITS)
    run = Run(decoder)
    for _ in range(3):  # one row of padding
        run.add([9] * 20, STEPS_WATCHED + 5)
    run.step(CHUNK_TOKENS)
    run.step(CHUNK_TOKENS)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(STEPS_WATCHED):
                run.step(CHUNK_TOKENS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(each.message) for each in caught) / STEPS_WATCHED
    return waits <= SYNCS_MAX, f"{waits:g} per step, and at most {SYNCS_MAX} are allowed"


def long_chunk(device: torch.device) -> Answer:
    """Does a late chunk of a long prompt need little memory?"""
    if device.type == "cpu":
        return None, ""
    limits = EngineLimits(LONG_CONTEXT + 64, step_token_count_max=LONG_CHUNK)
    weights = random_weights(LARGE, torch.bfloat16, device)
    decoder = open_decoder(LARGE, weights, limits, block_count=LONG_CONTEXT // 16 + 8)
    run = Run(decoder)
    text = run.add([9] * LONG_CONTEXT, 1)
    text.computed_token_count = LONG_CONTEXT - LONG_CHUNK
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    run.step(LONG_CHUNK)
    used_bytes = torch.cuda.max_memory_allocated() - before_bytes
    scores_bytes = LARGE.head_count * LONG_CHUNK * LONG_CONTEXT * 2
    return (
        used_bytes < scores_bytes / 4,
        f"{used_bytes / 2**20:,.0f} MiB; stored scores would be {scores_bytes / 2**20:,.0f} MiB",
    )


def free_memory(device: torch.device) -> Answer:
    """Does the KV cache take the free memory, and is too large a one an error?"""
    if device.type == "cpu":
        return None, ""
    shape, limits = SHAPES["1b"], EngineLimits(2048, step_token_count_max=2048)
    weights = random_weights(shape, torch.bfloat16, device)
    block_count = open_decoder(shape, weights, limits).block_count
    torch.cuda.empty_cache()
    decoder = open_decoder(shape, weights, limits, block_count=block_count)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    share, found = free_bytes / total_bytes, f"{block_count:,} blocks"
    del decoder
    torch.cuda.empty_cache()
    try:
        open_decoder(shape, weights, limits, block_count=2 * block_count)
    except torch.OutOfMemoryError:
        return share < 0.2, f"{found}, with {share:.0%} of the memory left free"
    return False, f"{found}, and twice as many fit too"


QUESTIONS: tuple[Callable[[torch.device], Answer], ...] = (
    small_model,
    windowed_model,
    large_heads,
    large_heads_bfloat16,
    broken_weights,
    synchronizations,
    long_chunk,
    free_memory,
)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    facts = device_facts(device)
    print(facts, flush=True)
    results = []
    for question in QUESTIONS:
        began_s = time.perf_counter()
        try:
            passed, found = question(device)
        except Exception as error:  # the other questions are asked nevertheless
            passed, found = False, f"{type(error).__name__}: {error}"
        asked = (question.__doc__ or "").strip()
        word = {True: "PASS", False: "FAIL", None: "SKIP"}[passed]
        print(f"{word} {asked} {found} ({time.perf_counter() - began_s:.1f} s)", flush=True)
        results.append({"question": asked, "passed": passed, "found": found})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write_results(arguments.out, "check.json", {"device": facts, "results": results})
    return int(any(each["passed"] is False for each in results))


if __name__ == "__main__":
    raise SystemExit(main())
