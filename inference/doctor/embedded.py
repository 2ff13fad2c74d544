"""Examination of the embedded engine: how it uses the CPUs of this machine, and how fast it is.

It runs one engine without a worker process, and makes one observation per question.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cpus import UsableCpus
from inference.checkpoint.checkpoint import DecoderConfig, read_config
from inference.core.engine_core import EngineCore
from inference.core.options import ComputeDtype, EngineOptions, KvDtype
from inference.doctor.findings import Observation, Question, Verdict, ask_all, expected
from inference.engine import GenerationRequest, SamplingParams, StopCriteria, TokensGenerated
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import EngineLimits
from inference.native import loader
from inference.native.decoder import supports_shape

# Flags of Linux's /proc/cpuinfo that concern the kernels, of x86-64 and of Arm.
INSTRUCTION_SETS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve", "sve2"),
)
CPUINFO = Path("/proc/cpuinfo")
BANDWIDTH_BYTES = 1 << 30  # more than most last-level caches
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
ROUNDS = 3  # the best counts; the first one also warms up
WEIGHT_BYTES: dict[ComputeDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(slots=True)
class Patient:
    """Engine under examination, running in this process."""

    core: EngineCore
    config: DecoderConfig
    options: EngineOptions
    cpus: UsableCpus

    def run(self, prompt_token_count: int, output_token_count: int) -> tuple[float, float]:
        """Compute a random prompt and its output. Return the seconds to the first token, and from
        the first to the last.
        """
        prompt = random.choices(range(self.config.vocabulary_size), k=prompt_token_count)
        stop = StopCriteria(output_token_count, ignore_eos=True)
        self.core.add(0, GenerationRequest(tuple(prompt), SamplingParams(), stop))
        began_s, first_s = time.perf_counter(), math.nan
        while not self.core.idle:
            events = self.core.step()
            if math.isnan(first_s) and any(isinstance(it, TokensGenerated) for _, it in events):
                first_s = time.perf_counter()
        return first_s - began_s, time.perf_counter() - first_s


async def processor(patient: Patient) -> tuple[Verdict, str]:
    """Which processor is it?"""
    return Verdict.EXPECTED, processor_name()


async def instructions(patient: Patient) -> tuple[Verdict, str]:
    """Which instruction sets for matrices does it have?"""
    return Verdict.EXPECTED, ", ".join(instruction_sets()) or "unknown"


async def kernels(patient: Patient) -> tuple[Verdict, str]:
    """Which kernels compute the model, and why?"""
    used = patient.core.kernels
    if used == "torch":
        return Verdict.OTHER, f"torch, several times slower: {_why_torch(patient.config)}"
    best = os.environ.get(loader.SWITCH, "1")
    levels = loader.available_levels(
        loader.open_library(), is_bfloat16=patient.options.compute_dtype != "float32"
    )
    is_limited = best not in ("", "1")
    limit = f", limited by {loader.SWITCH}={best}" if is_limited else ""
    return expected(not is_limited), f"{used}: best of {', '.join(levels)}{limit}"


def _why_torch(config: DecoderConfig) -> str:
    try:
        loader.available_levels(loader.open_library(), is_bfloat16=True)
    except loader.NativeUnavailable as error:
        return str(error)
    assert not supports_shape(config), "the native code computes all other models"
    return (
        "the native kernels need heads of a multiple of 16 floats and even hidden and intermediate"
        f" sizes, got {config.head_dim}, {config.hidden_size} and {config.intermediate_size}"
    )


async def kv_cache(patient: Patient) -> tuple[Verdict, str]:
    """Which type do keys and values have, and how many tokens fit in 1 GiB?"""
    options = patient.options
    tokens = (1 << 30) // options.block_bytes(patient.config) * KV_BLOCK_TOKENS
    return Verdict.EXPECTED, f"{options.kv_type}: {tokens:,} tokens in 1 GiB"


async def threads(patient: Patient) -> tuple[Verdict, str]:
    """With how many threads does it compute, and why?"""
    return Verdict.EXPECTED, f"{patient.cpus.count}, by {patient.cpus.source}"


async def bandwidth(patient: Patient) -> tuple[Verdict, str]:
    """At what rate do all threads together read memory?"""
    bytes_per_s = await asyncio.to_thread(measure_bandwidth, patient.cpus.count)
    return Verdict.EXPECTED, f"{bytes_per_s / 1e9:.1f} GB/s"


async def prefill(patient: Patient) -> tuple[Verdict, str]:
    """At what rate does it compute a long prompt?"""
    count = min(PROMPT_TOKENS, patient.config.context_window_tokens // 2)
    duration_s = min(patient.run(count, 1)[0] for _ in range(ROUNDS))
    operations = 2 * count * _layer_weight_count(patient.config)
    seen = f"{count / duration_s:,.0f} tokens/s, {operations / duration_s / 1e9:,.0f} GFLOPS"
    return Verdict.EXPECTED, seen


async def decode(patient: Patient) -> tuple[Verdict, str]:
    """At what rate does it generate one output?"""
    count = min(OUTPUT_TOKENS, patient.config.context_window_tokens // 2)
    tokens_per_s = max(count / patient.run(16, count + 1)[1] for _ in range(ROUNDS))
    config = patient.config
    weights = _layer_weight_count(config) + config.vocabulary_size * config.hidden_size
    read_bytes_per_s = weights * WEIGHT_BYTES[patient.options.compute_dtype] * tokens_per_s
    rate = f"{read_bytes_per_s / 1e9:.1f} GB/s of weights"
    return Verdict.EXPECTED, f"{tokens_per_s:,.0f} tokens/s, which read {rate}"


QUESTIONS: tuple[Question[Patient], ...] = (
    processor,
    instructions,
    kernels,
    kv_cache,
    threads,
    bandwidth,
    prefill,
    decode,
)


def examine(
    directory: Path, dtype: ComputeDtype, kv_dtype: KvDtype, cpus: UsableCpus
) -> list[Observation]:
    """Load the model into this process and ask all questions. Raises: CheckpointInvalid."""
    torch.set_num_threads(cpus.count)
    config = read_config(directory)
    limits = EngineLimits(min(config.context_window_tokens, 2 * PROMPT_TOKENS))
    # Without a prefix cache worth mentioning: the pool has one context window.
    options = EngineOptions(
        str(directory), limits, dtype, kv_cache_bytes=0, draft_token_count_max=0, kv_dtype=kv_dtype
    )
    patient = Patient(EngineCore(options), config, options, cpus)
    return asyncio.run(ask_all(QUESTIONS, patient))


def processor_name() -> str:
    """Read the processor's model, as the system names it, and its architecture."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name} ({platform.machine()})".strip()


def instruction_sets() -> list[str]:
    """List the processor's instruction sets that matter to the kernels; none if unknown."""
    flags = {
        flag
        for line in _cpuinfo()
        if line.startswith(("flags", "Features"))
        for flag in line.partition(":")[2].split()
    }
    return [name for name in INSTRUCTION_SETS if name in flags]


def _cpuinfo() -> list[str]:
    try:
        return CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # not Linux


def measure_bandwidth(thread_count: int) -> float:
    """Measure the bytes per second that all threads read together: the best of many sums over a
    large array.

    Runs in a separate process, since torch's threads would keep waiting for work beside the
    engine's.
    """
    program = (
        f"import time, torch; torch.set_num_threads({thread_count}); numbers ="
        f" torch.ones({BANDWIDTH_BYTES // 4}); best = 1e9\nfor _ in range(12):\n    begin ="
        " time.perf_counter(); numbers.sum(); best = min(best, time.perf_counter() -"
        " begin)\nprint(numbers.nbytes / best)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(ended.stdout)


def _layer_weight_count(config: DecoderConfig) -> int:
    """Count the weights in the matrices of all layers."""
    heads = 2 * (config.head_count + config.kv_head_count) * config.head_dim
    return config.layer_count * config.hidden_size * (heads + 3 * config.intermediate_size)
