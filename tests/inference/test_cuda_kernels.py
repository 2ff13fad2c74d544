"""Kernels of the GPU: computed by Triton's interpreter on the CPU, and compiled without a GPU."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from inference.core import torch_decoder
from inference.core.engine_core import EngineCore
from inference.core.options import ComputeDtype, EngineOptions
from inference.core.torch_decoder import TorchDecoder, fitting_block_count, graph_sizes
from inference.decoder.model import NOT_FINITE, Batch, LayerPool, TorchKernels
from inference.errors import EngineStartFailed
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from inference.limits import EngineLimits
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.inference.running import make_request, random_prompt, run_all

# Padding rows of captured steps hold memory as it was.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
PROCESSOR_COUNT = 4  # of a pretended GPU: contexts are split in the larger batches too
# Relative errors of one operation.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

NO_NORMS = {"query_norm": None, "key_norm": None}
SPANS = {
    "single": [(1, 0)],
    "singles of many lengths": [(1, 3), (1, 15), (1, 16), (1, 400), (1, 64)],
    "prompt": [(37, 0)],
    "all": [(1, 7), (1, 130), (2, 0), (19, 200)],
}
COMPILED = """
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from inference.decoder import cuda_kernels as kernels

NUMBERS = {"scale": "fp32", "eps": "fp32"}
INTEGERS = dict.fromkeys(("spans", "tables", "slots", "rotary_rows"), "*i32")
HEADS = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK": 16}

def shared_bytes(kernel, type_, constants, types={}, options={}):
    named = NUMBERS | INTEGERS | types
    signature = {
        name: "constexpr" if name in constants else named.get(name, type_)
        for name in kernel.arg_names
    }
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    source = ASTSource(kernel, signature, constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared

for row_count, dtype, type_, splits in (
    (1, torch.bfloat16, "*bf16", 8),
    (512, torch.bfloat16, "*bf16", 1),
    (2048, torch.bfloat16, "*bf16", 1),
    (512, torch.float32, "*fp32", 1),
):
    sizes, options = kernels.tile_sizes(4, 128, row_count, dtype)
    types = {"out": "*fp32", "part_sums": "*fp32"} if splits > 1 else {}
    constants = HEADS | sizes | {"WINDOW": 64, "SPLITS": splits}
    print(shared_bytes(kernels.attention_kernel, type_, constants, types, options))
rows = HEADS | {"DIM_TILE": 128, "SPLITS": 8, "TILE": 64, "HEAD_TILE": 16, "NORMS": True}
print(shared_bytes(kernels.combine_kernel, "*fp32", rows, {"out": "*bf16"}))
print(shared_bytes(kernels.rotate_and_write_kernel, "*bf16", rows, {}, {"num_warps": 4}))
print(shared_bytes(kernels.add_norm_kernel, "*bf16", {"SIZE": 4096, "TILE": 4096, "ADDS": True}))
print(shared_bytes(kernels.gate_kernel, "*bf16", {"SIZE": 14336, "TILE": 1024}))
best = {"SIZE": 128256, "TILE": 8192, "BROKEN": -1}
print(shared_bytes(kernels.best_kernel, "*fp32", best, {"out": "*i32"}))
"""
SHARED_BYTES_MAX = 99 << 10  # of a block on the GPUs of compute capability 8.6 and 8.9


@pytest.fixture
def triton_kernels() -> TorchKernels:
    """Return the kernels, interpreted: see `conftest.py`."""
    pytest.importorskip("triton", reason="Triton is installed on Linux alone")
    from inference.decoder import cuda_kernels

    return cuda_kernels.TritonKernels(PROCESSOR_COUNT)


def batch_of(spans: Sequence[tuple[int, int]], block_count: int, seed: int = 0) -> Batch:
    """Return a batch of (row count, first position), single rows first, in scattered blocks."""
    free = random.Random(seed).sample(range(block_count), block_count)
    rows, tables, slots, positions = [], list[int](), list[int](), list[int]()
    for row_count, position in spans:
        end = position + row_count
        table = [free.pop() for _ in range(blocks_for(end))]
        rows.append((len(slots), row_count, position, len(tables)))
        tables += table
        slots += [
            table[at // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS
            for at in range(position, end)
        ]
        positions += range(position, end)
    numbers = [torch.tensor(each, dtype=torch.int32) for each in (positions, slots, rows, tables)]
    single_count = sum(row_count == 1 for row_count, _ in spans)
    return Batch(
        *(numbers[0], numbers[0], numbers[1], numbers[2], numbers[0][:0], numbers[3]),
        *(single_count, max(row_count for row_count, _ in spans)),
    )


def assert_close(ours: Tensor, reference: Tensor) -> None:
    error = (ours.float() - reference.float()).norm() / reference.float().norm()
    assert error < TOLERANCE[reference.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize(
    ("name", "window"),
    [*itertools.product(SPANS, (None, 40)), ("all", 1), ("all", 10_000)],
)
def test_attention_equals_that_of_torch(
    triton_kernels: TorchKernels, name: str, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = batch_of(SPANS[name], 100)
    queries = torch.randn(len(batch.slots), 8, 24, generator=generator)
    pool = LayerPool(*torch.randn(2, 100, 2, KV_BLOCK_TOKENS, 24, generator=generator))

    ours, reference = (
        kernels.attention(batch, window)(queries, pool)
        for kernels in (triton_kernels, TorchKernels())
    )

    assert_close(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_count", "kv_head_count", "head_dim"), [(7, 1, 64), (2, 2, 144)])
def test_attention_has_heads_of_any_number_and_size(
    triton_kernels: TorchKernels,
    head_count: int,
    kv_head_count: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Not in bfloat16, whose bits the interpreter multiplies as integers."""
    generator = torch.Generator().manual_seed(2)
    batch = batch_of([(1, 99), (5, 30)], 20)
    queries = torch.randn(6, head_count, head_dim, generator=generator).to(dtype)
    shape = (20, kv_head_count, KV_BLOCK_TOKENS, head_dim)
    pool = LayerPool(*torch.randn(2, *shape, generator=generator).to(dtype))

    ours, reference = (
        kernels.attention(batch, None)(queries, pool)
        for kernels in (triton_kernels, TorchKernels())
    )

    assert_close(ours, reference)


def test_a_padding_row_writes_nothing(triton_kernels: TorchKernels) -> None:
    batch = batch_of([(1, 5)], 4)
    batch = replace(batch, slots=torch.tensor([-1], dtype=torch.int32))
    pool = LayerPool(*torch.zeros(2, 4, 1, KV_BLOCK_TOKENS, 8))
    layer: Any = type("Norms", (), NO_NORMS)
    tables = torch.ones(6, 8), torch.ones(6, 8)

    triton_kernels.rotate_and_write(torch.ones(1, 32), layer, 1e-5, tables, batch, pool)

    assert not pool.keys.any()
    assert not pool.values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
def test_the_other_operations_equal_those_of_torch(
    triton_kernels: TorchKernels, dtype: torch.dtype, norms: bool
) -> None:
    generator = torch.Generator().manual_seed(3)

    def random_(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch = batch_of([(1, 9), (3, 14)], 4)
    layer: Any = type(
        "Norms", (), {"query_norm": random_(24), "key_norm": random_(24)} if norms else NO_NORMS
    )
    mixed, update, weight = random_(4, 5 * 24), random_(4, 5 * 24), random_(5 * 24)
    # Cosines and sines of a pair are equal.
    rotation = random_(20, 12).repeat(1, 2), random_(20, 12).repeat(1, 2)

    def results(kernels: TorchKernels) -> list[Tensor]:
        pool = LayerPool(*torch.zeros(2, 4, 1, KV_BLOCK_TOKENS, 24, dtype=dtype))
        queries = kernels.rotate_and_write(mixed, layer, 1e-5, rotation, batch, pool)
        return [
            *(queries, pool.keys, pool.values, kernels.gated(mixed)),
            *kernels.add_norm(mixed, update, weight, 1e-5),
            *kernels.add_norm(mixed, None, weight, 1e-5),
        ]

    for ours, reference in zip(results(triton_kernels), results(TorchKernels()), strict=True):
        assert_close(ours, reference)


@pytest.mark.parametrize("size", [1, 333, 4096, 4097, 9000])
def test_the_first_of_the_largest_logits_wins(triton_kernels: TorchKernels, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-3, 3, (6, size), generator=generator).float()
    for row, broken in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row, size // 2] = broken

    best = triton_kernels.best(logits).tolist()

    assert best == TorchKernels().best(logits).tolist()
    assert best[:3] == [NOT_FINITE] * 3


@pytest.fixture
def cores(triton_kernels: TorchKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes a core on torch, with the kernels of the GPU or without."""
    monkeypatch.setattr("inference.core.model_runner.supports", lambda config, dtype: False)

    def make(shape: LlamaShape, dtype: ComputeDtype, *, on_triton: bool) -> EngineCore:
        directory = tmp_path / str(hash(shape))
        if not directory.exists():
            directory.mkdir()
            make_checkpoint(directory, seed=3, shape=shape)
        kernels = triton_kernels if on_triton else TorchKernels()
        monkeypatch.setattr(torch_decoder, "kernels_of", lambda device: kernels)
        limits = EngineLimits(256, step_token_count_max=24, running_sequence_count_max=3)
        return EngineCore(EngineOptions(str(directory), limits, dtype, 4 << 20))

    return make


@pytest.mark.parametrize(
    "shape",
    [
        LlamaShape(),
        LlamaShape(architecture="Qwen3ForCausalLM", head_dim=32, layer_count=1),
        LlamaShape(architecture="MistralForCausalLM", sliding_window=20, layer_count=1),
    ],
    ids=["grouped heads", "normalized heads", "window"],
)
def test_the_engine_gives_the_tokens_of_the_cpu(cores: Any, shape: LlamaShape) -> None:
    """Chunked prompts, a shared prefix, and steps that are padded to a captured size."""
    rng = random.Random(4)
    shared = random_prompt(rng, 17)
    prompts = [shared + random_prompt(rng, count) for count in (1, 20, 3, 9)]
    requests = [make_request(prompt, 4) for prompt in prompts]

    ours, reference = (
        [outcome.token_ids for outcome in run_all(cores(shape, "float32", on_triton=way), requests)]
        for way in (True, False)
    )

    assert ours == reference


def test_pure_decode_steps_use_a_captured_size(cores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = cores(LlamaShape(), "float32", on_triton=True)
    decoder = core._runner._decoder
    assert isinstance(decoder, TorchDecoder)
    assert list(decoder._graphs) == [1, 2, 3]
    sizes: list[int] = []
    for size, compute in list(decoder._graphs.items()):

        def replay(size: int = size, compute: Any = compute) -> Any:
            sizes.append(size)
            return compute()

        decoder._graphs[size] = replay

    run_all(core, [make_request([9] * 20, 4)])

    assert sizes == [1, 1, 1]


class LateGpu(TorchFunctionMode):
    """Double of a CUDA stream that does nothing before something waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and kwargs and kwargs.get("non_blocking"):
            self.waiting.append(partial(func, *args))
            return args[0]
        return func(*args, **(kwargs or {}))

    def record(self) -> None:
        """Do nothing: every wait is for all work so far."""

    def synchronize(self) -> None:
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


def test_a_gpu_that_is_behind_reads_the_inputs_of_each_step(triton_kernels: TorchKernels) -> None:
    """Pinned memory that is written again too early makes token ids of the next step's padding."""
    from bench.gpu.models import SHAPES, config_of, random_weights  # which imports Triton

    late, shape, cpu = LateGpu(), SHAPES["tiny"], torch.device("cpu")

    class LateDecoder(TorchDecoder):
        def _make_inputs(self, count: int) -> None:
            super()._make_inputs(count)
            self._inputs, self._copied = self._pinned.clone(), late  # type: ignore[assignment]

        def _compute(self, batch: Batch, pools: list[LayerPool]) -> tuple[Tensor, Tensor]:
            late.waiting.append(partial(super()._compute, batch, pools))
            return torch.zeros(1), torch.zeros(1)

    limits = EngineLimits(256, step_token_count_max=64, running_sequence_count_max=4)
    options = EngineOptions("", limits, kv_cache_bytes=1 << 20)
    weights = random_weights(shape, torch.float32, cpu)
    with late, torch.inference_mode():
        LateDecoder(config_of(shape, 256), weights, options, triton_kernels)
        late.synchronize()


def test_broken_weights_are_found_on_the_device(cores: Any) -> None:
    core = cores(LlamaShape(), "float32", on_triton=True)
    core._runner._decoder._decoder._weights.final_norm[3] = torch.nan
    core.add(0, make_request([9], 5))

    with pytest.raises(Exception, match="not finite"):
        core.step()


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    pytest.importorskip("triton", reason="Triton is installed on Linux alone")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    ended = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment
    )

    assert ended.returncode == 0, ended.stderr
    shared_bytes = [int(line) for line in ended.stdout.split()]
    assert len(shared_bytes) == 9
    assert max(shared_bytes) <= SHARED_BYTES_MAX, shared_bytes


def test_the_kv_cache_has_the_free_memory() -> None:
    limits = EngineLimits(1600)

    assert fitting_block_count(1000_000, 1000, limits) == 900
    with pytest.raises(EngineStartFailed, match="one context of 1,600 tokens needs"):
        fitting_block_count(100_000, 1000, limits)


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256])
def test_any_number_of_rows_has_a_graph_that_is_not_much_larger(most: int) -> None:
    sizes = graph_sizes(most)

    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size <= max(2 * count, count + 8, count * 9 // 8)
