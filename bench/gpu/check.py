"""Results of the GPU's decoder beside those of the CPU, and the promises of its steps.

    python -m bench.gpu.check [--device cuda] [--out DIR]

One line per question: PASS or FAIL with the number. The reference is the same decoder on the CPU
with torch's operations in float32, which other tests compare with `transformers`. Ends with status
1 if a question failed. A child process answers; after a failure another one answers the rest, since
CUDA refuses everything after a kernel's fault. With `TRITON_INTERPRET=1 ... --device cpu`, the
interpreter computes tiny models, and questions about memory and CUDA are skipped.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.gpu.models import (
    FIRST_PLAIN_TOKEN,
    SHAPES,
    Run,
    add_common_arguments,
    device_facts,
    open_decoder,
    open_device,
    random_weights,
    write_results,
)
from bench.shapes import Shape
from inference import demo_model
from inference.checkpoint.tensors import on_device
from inference.core.engine_core import EngineCore
from inference.core.options import Device, EngineOptions
from inference.core.torch_decoder import TorchDecoder, _lengths
from inference.decoder.cuda_kernels import TritonKernels
from inference.decoder.model import NOT_FINITE, DecoderWeights, TorchKernels
from inference.engine import (
    GenerationRequest,
    SamplingParams,
    SequenceFinished,
    StopCriteria,
    TokensGenerated,
)
from inference.errors import EngineStartFailed
from inference.limits import EngineLimits
from inference.sampling.sampler import Draw, sample

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
LATE_CYCLES = 1_000_000_000  # of the GPU's clock: longer than a start with compiled kernels
QUESTION_S_MAX = 240.0
DEMO = Path(demo_model.__file__).parent / "weights"
# A pool that is too small for all that run at once, so that sequences are preempted.
ENGINE_LIMITS = EngineLimits(
    512, step_token_count_max=96, running_sequence_count_max=16, owed_output_token_count_max=1
)
ENGINE_REQUESTS, ENGINE_KV_BYTES, SHARED_PREFIX_TOKENS = 32, 6 << 20, 40
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(frequency_penalty=0.5, presence_penalty=0.5, top_logprobs=3),
    SamplingParams(temperature=0.7, top_k=40, min_p=0.01, logit_bias=((77, 2.0),)),
)
Answer = tuple[bool | None, str]  # None: not asked on this device


def kernels_for(device: torch.device) -> TorchKernels | None:
    """Choose the kernels: interpreted ones on a CPU, None on a GPU for those of the decoder."""
    return None if device.type == "cuda" else TritonKernels(INTERPRETED_PROCESSORS)


def outputs(decoder: TorchDecoder, vocabulary_size: int) -> tuple[list[list[int]], torch.Tensor]:
    """Compute greedy tokens, for prompts in chunks and in decoding steps, and the first logits."""
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
    """Compare tokens and logits with those computed in float32 on the CPU."""
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
    """Convert weights to float32."""

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


def late_device(device: torch.device) -> Answer:
    """Does a decoder start right while the GPU is busy?"""
    if device.type == "cpu":
        return None, ""
    weights = random_weights(SHAPES["tiny"], torch.float32, device)
    found = []
    for cycles in (0, LATE_CYCLES):  # the second start has compiled kernels
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        decoder = open_decoder(SHAPES["tiny"], weights, LIMITS, block_count=64)
        found.append(outputs(decoder, SHAPES["tiny"].vocabulary_size)[0])
    return found[0] == found[1], "equal tokens" if found[0] == found[1] else "other tokens"


def captured_steps(device: torch.device) -> Answer:
    """Do captured steps give the logits of computed ones, with a row of padding?"""
    if device.type == "cpu":
        return None, ""
    decoder = open_decoder(
        LARGE, random_weights(LARGE, torch.bfloat16, device), LIMITS, block_count=64
    )
    run, errors, equal_count = Run(decoder), list[float](), 0
    for count in PROMPT_TOKENS:
        run.add([9] * count, STEPS_WATCHED)
    size = LIMITS.running_sequence_count_max
    run.step(CHUNK_TOKENS)
    run.step(CHUNK_TOKENS)
    for _ in range(STEPS_WATCHED - 3):
        logits = run.step(CHUNK_TOKENS)
        captured = logits.values.clone()
        with torch.inference_mode():  # on the inputs that are still there
            batch = decoder._batch([*_lengths(size), 1], size, 1)
            computed, best = decoder._compute(batch, decoder._pools)
        rows = len(captured)
        errors.append(float((captured - computed[:rows]).norm() / captured.norm()))
        equal_count += logits.best == best[:rows].tolist()
    found = f"relative error {max(errors):.1e}, {equal_count} of {len(errors)} steps equal"
    return equal_count == len(errors) and max(errors) < LOGIT_ERROR[torch.bfloat16], found


def sampled_rows(device: torch.device) -> Answer:
    """Are tokens drawn on the GPU those drawn on the CPU?"""
    if device.type == "cpu":
        return None, ""
    generator = torch.Generator(device).manual_seed(6)
    logits = 4 * torch.randn(96, LARGE.vocabulary_size, generator=generator, device=device)
    draws = [Draw(SAMPLINGS[row % len(SAMPLINGS)], row, 2) for row in range(len(logits))]
    pairs = zip(sample(logits, draws), sample(logits.cpu(), draws), strict=True)
    equal_count = sum(ours == reference for ours, reference in pairs)
    return equal_count == len(draws), f"{equal_count} of {len(draws)} tokens equal"


def whole_engine(device: torch.device) -> Answer:
    """Does an engine with chunks, shared prefixes and preemption give the tokens of the CPU?"""
    if device.type == "cpu":
        return None, ""
    (ours, core), (reference, _) = engine_outputs("cuda"), engine_outputs("cpu")
    statistics, equal = core.statistics(), [ours[key] == reference[key] for key in reference]
    found = (
        f"{sum(equal)} of {len(equal)} answers equal, {statistics.preemption_count} preemptions,"
        f" {statistics.cached_token_count} tokens from the prefix cache"
    )
    used = statistics.preemption_count > 0 and statistics.cached_token_count > 0
    return all(equal) and used and not statistics.kv_block_count_held, found


def engine_outputs(device: Device) -> tuple[dict[int, list[int]], EngineCore]:
    """Generate with the bundled model; return tokens of greedy and sampled requests by number."""
    core = EngineCore(
        EngineOptions(str(DEMO), ENGINE_LIMITS, "float32", ENGINE_KV_BYTES, device=device)
    )
    rng, found, ended_count = random.Random(8), dict[int, list[int]](), 0

    def plain(count: int) -> list[int]:
        return [rng.randrange(300, 2_700) for _ in range(count)]

    shared = plain(SHARED_PREFIX_TOKENS)
    for number in range(ENGINE_REQUESTS):
        prompt = (shared if number % 2 else []) + plain(rng.randrange(1, 150))
        sampling = replace(SAMPLINGS[number % len(SAMPLINGS)], seed=number)
        stop = StopCriteria(rng.randrange(20, 60), ignore_eos=True)
        assert core.add(number, GenerationRequest(tuple(prompt), sampling, stop))
        found[number] = []
    while not core.idle:
        for number, event in core.step():
            if isinstance(event, TokensGenerated):
                found[number] += event.token_ids
            ended_count += isinstance(event, SequenceFinished)
    assert ended_count == ENGINE_REQUESTS
    return found, core


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


def too_little_memory(device: torch.device) -> Answer:
    """Is too little memory an error of the start, after which a smaller start works?"""
    if device.type == "cpu":
        return None, ""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    options = EngineOptions(str(DEMO), ENGINE_LIMITS, "bfloat16", 2 * total_bytes, "cuda")
    reasons = [start_failure(options)]
    taken = torch.empty(free_bytes - (192 << 20), dtype=torch.uint8, device=device)
    limits = EngineLimits(1 << 16)  # of 201 MB, whose weights and steps fit what is left
    reasons.append(start_failure(EngineOptions(str(DEMO), limits, "bfloat16", None, "cuda")))
    del taken
    gc.collect()
    torch.cuda.empty_cache()
    EngineCore(EngineOptions(str(DEMO), ENGINE_LIMITS, "bfloat16", ENGINE_KV_BYTES, "cuda"))
    return None not in reasons, "; ".join(str(reason).partition(":")[0] for reason in reasons)


def start_failure(options: EngineOptions) -> str | None:
    """Start an engine; return the reason if it fails, else None."""
    try:
        EngineCore(options)
    except EngineStartFailed as error:
        return str(error)
    return None


QUESTIONS: tuple[Callable[[torch.device], Answer], ...] = (
    small_model,
    windowed_model,
    large_heads,
    large_heads_bfloat16,
    broken_weights,
    late_device,
    captured_steps,
    sampled_rows,
    whole_engine,
    synchronizations,
    long_chunk,
    free_memory,
    too_little_memory,
)


def answer_in_turn(indices: Sequence[int], device_name: str, results: Connection) -> None:
    """Answer questions until one raises an exception. Runs in a process of its own."""
    device = open_device(device_name)
    gc.freeze()  # collections walk the objects of the questions only
    for index in indices:
        try:
            results.send(QUESTIONS[index](device))
        except Exception as error:
            results.send((False, f"{type(error).__name__}: {error}".partition("\n")[0]))
            return
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def answers(device_name: str) -> Iterator[Answer]:
    """Yield the answers to all questions. After a failure, a new process answers the rest."""
    context, index = multiprocessing.get_context("forkserver"), 0
    while index < len(QUESTIONS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=answer_in_turn, args=(range(index, len(QUESTIONS)), device_name, theirs)
        )
        process.start()
        theirs.close()
        answer: Answer = True, ""
        while answer[0] is not False and index < len(QUESTIONS):
            answer = False, f"no answer within {QUESTION_S_MAX:g} s"
            try:
                if ours.poll(QUESTION_S_MAX):
                    answer = ours.recv()
            except EOFError:
                process.join()
                answer = False, f"the process ended with status {process.exitcode}"
            index += 1
            yield answer
        process.kill()
        process.join()


def main() -> int:
    """Parse the command line and answer the questions. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    facts = device_facts(open_device(arguments.device))
    print(facts, flush=True)
    results, began_s = [], time.perf_counter()
    for question, (passed, found) in zip(QUESTIONS, answers(arguments.device), strict=True):
        options = (question.__doc__ or "").strip()
        word = {True: "PASS", False: "FAIL", None: "SKIP"}[passed]
        ended_s = time.perf_counter()
        print(f"{word} {options} {found} ({ended_s - began_s:.1f} s)", flush=True)
        began_s = ended_s
        results.append({"question": options, "passed": passed, "found": found})
    write_results(arguments.out, "check.json", {"device": facts, "results": results})
    return int(any(each["passed"] is False for each in results))


if __name__ == "__main__":
    raise SystemExit(main())
