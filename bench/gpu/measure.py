"""Speed of the GPU's decoder beside the limits of the device, and beside `transformers`.

    python -m bench.gpu.measure [--shape 1b,8b] [--batches 1,8,64] [--contexts 128,1024,8192]
        [--prompts 512,2048,8192] [--steps 30] [--repeats 3] [--out DIR]

bfloat16 and random weights. The floor (`bench.floor`) is the time to read all weights and all keys
and values once, at the bandwidth that a sum over a large array has in the same run, or to do all
operations at the rate of a large product of matrices in the same run, whichever is longer.
Each figure is the median over the repeats. Beside a step stands the time of its captured graph
alone: the rest is that of Python, and of the copies to and from the GPU. The last steps draw all
rows, by temperature and by top_p. `transformers`, if it is installed, has the same shape and one
prompt per row; its cache is the static one, and its steps are not compiled.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from bench.floor import Limits, Work, decode_step, prefill
from bench.gpu.check import CPU, kernels_for
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
from inference.core.torch_decoder import TorchDecoder
from inference.engine import SamplingParams
from inference.kv_blocks import blocks_for
from inference.limits import EngineLimits
from inference.sampling.sampler import Draw, choose

STEP_TOKENS = 2048  # as the engine on a GPU
WARM_UP_STEPS = 3
BANDWIDTH_FLOATS, PRODUCT_SIZE = 1 << 31, 8192
BANDWIDTH_FLOATS_CPU, PRODUCT_SIZE_CPU = 1 << 22, 256
PEER_PROMPT_TOKENS = 128
SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.95),
}


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_s(action: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Measure the median duration of an action in seconds, after one run that warms up."""
    durations = []
    for _ in range(repeats + 1):
        wait(device)
        began_s = time.perf_counter()
        action()
        wait(device)
        durations.append(time.perf_counter() - began_s)
    return statistics.median(durations[1:])


def limits_of_device(device: torch.device, repeats: int) -> Limits:
    """Measure the bytes read per second, and the operations per second of a matrix product."""
    on_gpu = device.type == "cuda"
    count = BANDWIDTH_FLOATS if on_gpu else BANDWIDTH_FLOATS_CPU
    size = PRODUCT_SIZE if on_gpu else PRODUCT_SIZE_CPU
    numbers = torch.ones(count, dtype=torch.bfloat16, device=device)
    bytes_per_s = numbers.nbytes / median_s(numbers.sum, repeats, device)
    factor = torch.randn(size, size, device=device).to(torch.bfloat16)
    flop_per_s = 2 * size**3 / median_s(lambda: factor @ factor, repeats, device)
    return Limits(bytes_per_s, flop_per_s, overlap=True)


def open_for(
    shape: Shape, batches: list[int], contexts: list[int], prompts: list[int], device: torch.device
) -> TorchDecoder:
    """Open a decoder that fits all measurements; it chooses the size of the KV cache."""
    context_count = max([*contexts, *prompts]) + STEP_TOKENS
    step_token_count = STEP_TOKENS if device.type == "cuda" else max(prompts)
    limits = EngineLimits(
        context_count,
        step_token_count_max=max(step_token_count, *batches),
        running_sequence_count_max=max(batches),
    )
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # the interpreter has no bfloat16
    weights = random_weights(shape, dtype, device)
    block_count = None if on_gpu else max(batches) * blocks_for(context_count)
    return open_decoder(
        shape, weights, limits, block_count=block_count, kernels=kernels_for(device)
    )


def measure_decode(
    decoder: TorchDecoder,
    batch: int,
    context: int,
    step_count: int,
    repeats: int,
    sampling: SamplingParams | None = None,
) -> tuple[float, float] | None:
    """Measure a decoding step, and its graph alone, in seconds.

    `sampling` applies to all rows; None takes the likeliest tokens. Returns None if the contexts do
    not fit the KV cache.
    """
    run, room = Run(decoder), WARM_UP_STEPS + (repeats + 1) * step_count
    if batch * blocks_for(context + room) > decoder.block_count:
        return None
    for _ in range(batch):
        run.add([FIRST_PLAIN_TOKEN] * context, room)
    run.fill(context)
    for _ in range(WARM_UP_STEPS):
        run.step(1)

    draws = [Draw(sampling, row, 0) for row in range(batch)] if sampling else []

    def steps() -> None:
        for _ in range(step_count):
            logits = run.step(1)
            if draws:
                choose(logits.take([*range(batch)]), draws)

    # Each step reads its ids, so that the device is idle at its end.
    step_s = median_s(steps, repeats, CPU) / step_count
    replay = next(replay for size, replay in decoder._graphs.items() if size >= batch)

    def replays() -> None:
        for _ in range(step_count):
            replay()

    return step_s, median_s(replays, repeats, decoder._device) / step_count


def measure_prompt(decoder: TorchDecoder, count: int, chunk: int, repeats: int) -> float:
    """Measure the seconds to compute a prompt in chunks."""

    def compute() -> None:
        run = Run(decoder)
        text = run.add([FIRST_PLAIN_TOKEN] * count, 1)
        while text.computed_token_count < count:
            run.step(chunk)

    return median_s(compute, repeats, CPU)


def measure_transformers(
    shape: Shape, batches: list[int], step_count: int, device: torch.device
) -> dict[int, float]:
    """Measure a step of greedy decoding with transformers, in seconds by batch.

    The time of the prompt cancels out, as two lengths of output are compared.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layer_count,
        num_attention_heads=shape.head_count,
        num_key_value_heads=shape.kv_head_count,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
    )
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.eval()
    found = {}
    for batch in batches:
        ids = torch.full((batch, PEER_PROMPT_TOKENS), FIRST_PLAIN_TOKEN, device=device)

        def generate(count: int, ids: torch.Tensor = ids) -> None:
            options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    pad_token_id=0,
                    cache_implementation="static",
                    disable_compile=True,
                    **options,
                )

        short_s = median_s(lambda: generate(1), 1, device)
        long_s = median_s(lambda: generate(1 + step_count), 1, device)
        found[batch] = (long_s - short_s) / step_count
    return found


def measure(arguments: argparse.Namespace, name: str, device: torch.device) -> list[dict[str, Any]]:
    """Measure one shape, and print and return its rows."""
    shape, rows = SHAPES[name], list[dict[str, Any]]()
    limits = limits_of_device(device, arguments.repeats)
    print(
        f"{name}: reads {limits.bytes_per_s / 1e9:,.0f} GB/s,"
        f" {limits.flop_per_s / 1e12:,.1f} TFLOPS"
    )
    began_s = time.perf_counter()
    decoder = open_for(shape, arguments.batches, arguments.contexts, arguments.prompts, device)
    start_s = time.perf_counter() - began_s
    print(f"{name}: weights, KV cache of {decoder.block_count:,} blocks, graphs: {start_s:.1f} s")

    def add(
        what: str,
        size: str,
        took_s: float | None,
        work: Work,
        token_count: int,
        graph_s: float | None = None,
    ) -> None:
        floor_s = work.floor_s(limits)
        row: dict[str, Any] = {"shape": name, "what": what, "size": size, "floor_ms": floor_s * 1e3}
        row |= {"read_bytes": work.read_bytes, "flop": work.flop}
        if took_s is None:
            print(f"{name} {what} {size}: does not fit", flush=True)
        else:
            row |= {"ms": took_s * 1e3, "tokens_per_s": token_count / took_s}
            row["share_of_floor"] = floor_s / took_s
            of_graph = ""
            if graph_s is not None:
                row["graph_ms"] = graph_s * 1e3
                of_graph = f" (graph {graph_s * 1e3:.2f})"
            print(
                f"{name} {what} {size}: {took_s * 1e3:.2f} ms{of_graph},"
                f" {token_count / took_s:,.0f} tokens/s; floor {floor_s * 1e3:.2f} ms, so"
                f" {floor_s / took_s:.0%} of its speed",
                flush=True,
            )
        rows.append(row)

    steps, repeats = arguments.steps, arguments.repeats
    cases: list[tuple[str, int, int, SamplingParams | None]] = [
        ("decode", batch, context, None)
        for context in arguments.contexts
        for batch in arguments.batches
    ]
    largest, shortest = max(arguments.batches), min(arguments.contexts)
    for of, sampling in SAMPLINGS.items():
        cases.append((f"decode by {of}", largest, shortest, sampling))
    for what, batch, context, sampled in cases:
        took = measure_decode(decoder, batch, context, steps, repeats, sampled)
        step_s, graph_s = took or (None, None)
        work = decode_step(shape, "bfloat16", [context] * batch)
        add(what, f"batch {batch}, context {context}", step_s, work, batch, graph_s)
    for count in arguments.prompts:
        took_s = measure_prompt(decoder, count, min(count, STEP_TOKENS), arguments.repeats)
        add("prompt", f"{count}", took_s, prefill(shape, "bfloat16", count), count)
    del decoder
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if arguments.transformers and find_spec("transformers") is None:
        print(f"{name}: transformers is not installed")
    elif arguments.transformers:
        peers = measure_transformers(shape, arguments.batches, arguments.steps, device)
        for batch, took_s in peers.items():
            work = decode_step(shape, "bfloat16", [PEER_PROMPT_TOKENS] * batch)
            size = f"batch {batch}, context {PEER_PROMPT_TOKENS}"
            add("decode by transformers", size, took_s, work, batch)
        gc.collect()
    return rows


def whole_numbers(text: str) -> list[int]:
    """Parse positive numbers separated by commas."""
    numbers = [int(each) for each in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def main() -> None:
    """Parse the command line, and measure each shape."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.measure")
    add_common_arguments(parser)
    parser.add_argument("--shape", default="1b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batches", type=whole_numbers, default=[1, 8, 64])
    parser.add_argument("--contexts", type=whole_numbers, default=[128, 1024, 8192])
    parser.add_argument("--prompts", type=whole_numbers, default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--transformers", action=argparse.BooleanOptionalAction, default=True, help="beside it"
    )
    arguments = parser.parse_args()
    names = arguments.shape.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--shape {unknown[0]} must be one of {', '.join(SHAPES)}")
    device = open_device(arguments.device)
    facts = device_facts(device)
    print(facts, flush=True)
    rows = [row for name in names for row in measure(arguments, name, device)]
    write_results(arguments.out, "measure.json", {"device": facts, "rows": rows})


if __name__ == "__main__":
    main()
