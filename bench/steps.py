"""Duration of the parts of a decoding step: the native decoder, and the Python around it.

    python -m bench.steps [--shape M] [--precision bfloat16] [--sequences 50] [--context 100]
    [--steps 200] [--competitors 0]

Engine core and report encoding in this process, as the engine worker runs them, without the API.
Figures are medians over the steps; the overhead is the step without the decoder call. The floor is
the time to read all weights and the contexts once, and to do their operations, at the bandwidth and
the rate of `torch.nn.Linear` measured just before.

With `--competitors 2`, the decoder runs alone, then beside one busy process, then beside two, in
turn. The fair share of two threads beside one process on two CPUs is 67 %: the figures are what the
decoder reaches of that.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, VOCABULARY_SIZE, write_checkpoint

# As in the engine worker: torch's threads would spin on the cores of the decoder.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from bench.engine import add_checkpoint_options
from bench.floor import Limits, decode_step, measure_linear
from bench.harness import Bench, Case, Cases, Figure, Values, main
from common.cpus import usable_cpus
from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.core.scheduler import Chunk
from inference.doctor.embedded import measure_bandwidth
from inference.engine import GenerationRequest, SamplingParams, StopCriteria
from inference.kv_blocks import blocks_for
from inference.limits import EngineLimits
from inference.native.decoder import NativeDecoder
from inference.workers.protocol import StepReport, encode

WARM_UP_STEPS = 20
BUSY = "while True: pass"  # the program of a competitor
TURNS, TURN_S = 7, 0.5  # of the decoder, alone and beside each number of competitors
PROMPT_TOKENS = 512  # of a prefill beside competitors
FIGURES = {
    "step": Figure("a step, ms", ",.3f"),
    "floor": Figure("floor, ms", ",.3f"),
    "floor_share": Figure("share of the floor", ".0%"),
    "read_mb": Figure("must read, MB"),
    "gflop": Figure("must do, GFLOP", ",.2f"),
    "read_gb_per_s": Figure("bandwidth, GB/s", ",.1f"),
    "linear_gflops": Figure("Linear, GFLOPS"),
    "decoder": Figure("decoder, ms", ",.3f"),
    "decoder and its input": Figure("decoder and input, ms", ",.3f"),
    **{
        name: Figure(f"{name.replace('_', ' ')}, ms", ",.3f")
        for name in ("schedule", "commit", "check_conservation", "report", "overhead")
    },
    "overhead_share": Figure("overhead, of a step", ".1%"),
    "decode_share": Figure("decode, of fair share", ".0%"),
    "prefill_share": Figure("prefill, of fair share", ".0%"),
}


class Clock:
    """Stopwatch that sums the durations of wrapped calls in one step, in ms by name."""

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the duration of each call is recorded."""

        def run(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.spent_ms[name] = (
                    self.spent_ms.get(name, 0.0) + (time.perf_counter() - began_s) * 1e3
                )

        return run


def open_core(arguments: argparse.Namespace, checkpoint: Path) -> EngineCore:
    """Open an engine core in which every sequence decodes."""
    limits = EngineLimits(2048, running_sequence_count_max=max(arguments.sequences, 64))
    options = EngineOptions(
        str(checkpoint), limits, arguments.precision, 2 << 30, draft_token_count_max=0
    )
    core = EngineCore(options)
    for number in range(arguments.sequences):
        prompt = tuple(
            (number * 31 + position * 7) % (VOCABULARY_SIZE - 16) + 16
            for position in range(arguments.context)
        )
        stop = StopCriteria(
            arguments.steps + 2 * WARM_UP_STEPS + arguments.sequences, ignore_eos=True
        )
        core.add(number, GenerationRequest(prompt, SamplingParams(), stop))
    while core.scheduler.waiting or any(
        sequence.uncomputed_token_count > 1 for sequence in core.scheduler.running
    ):
        core.step()
    return core


def measure(core: Any, step_count: int) -> list[dict[str, float]]:
    """Measure the duration of each step, in ms by part."""
    clock, runner, scheduler = Clock(), core._runner, core.scheduler  # private parts, so untyped
    decoder = runner._decoder
    decoder.forward = clock.timed("decoder and its input", decoder.forward)
    if isinstance(decoder, NativeDecoder):
        native: Any = decoder
        library, forward = native._library, native._library.weir_decoder_forward
        native._library = type("Timed", (), {})()
        native._library.__dict__ |= {
            "weir_decoder_forward": clock.timed("decoder", forward),
            "library": library,
        }
    for name in ("schedule", "commit", "check_conservation"):
        setattr(scheduler, name, clock.timed(name, getattr(scheduler, name)))
    step = clock.timed("step", core.step)
    report = clock.timed(
        "report",
        lambda events: encode(StepReport(events, core.statistics())),
    )
    rows = []
    for index in range(step_count + WARM_UP_STEPS):
        clock.spent_ms.clear()
        report(step())
        spent = dict(clock.spent_ms)
        spent["overhead"] = (
            spent["step"] + spent["report"] - spent.get("decoder", spent["decoder and its input"])
        )
        if index >= WARM_UP_STEPS:
            rows.append(spent)
    return rows


@contextlib.contextmanager
def competitors(count: int) -> Iterator[None]:
    """Keep `count` processes busy."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-S", "-c", BUSY])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def rate(step: Callable[[], object]) -> float:
    """Measure the steps per second of one turn."""
    count, began_s = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - began_s) < TURN_S:
        step()
        count += 1
    return count / spent_s


def measure_beside(
    runs: dict[str, Callable[[], object]], competitor_count: int, thread_count: int
) -> Values:
    """Measure runs alone and beside competitors, in turn: the share that each reaches of the time
    that a fair scheduler gives its threads.
    """
    fair = min(1.0, usable_cpus().count / (thread_count + competitor_count))
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(TURNS):
        alone = {name: rate(run) for name, run in runs.items()}
        with competitors(competitor_count):
            for name, run in runs.items():
                rates[name].append((alone[name], rate(run)))
    return {
        name: statistics.median(beside / alone for alone, beside in turns) / fair
        for name, turns in rates.items()
    }


def decoder_runs(
    arguments: argparse.Namespace, checkpoint: Path
) -> dict[str, Callable[[], object]]:
    """Build the runs beside competitors: a decoding step, and a prefill, of the decoder alone."""
    core: Any = open_core(arguments, checkpoint)  # with private parts, so untyped
    decoder = core._runner._decoder
    decoding = core.scheduler.schedule().chunks
    prompt = copy.copy(decoding[0].sequence)
    prompt.token_ids, prompt.computed_token_count = [16] * PROMPT_TOKENS, 0
    prompt.block_table = core.pool.allocate(blocks_for(PROMPT_TOKENS))
    prefill = [Chunk(prompt, PROMPT_TOKENS, completes=True)]
    return {
        "decode_share": lambda: decoder.forward(decoding),
        "prefill_share": lambda: decoder.forward(prefill),
    }


@contextlib.contextmanager
def prepare(arguments: argparse.Namespace) -> Iterator[Cases]:
    """Write the checkpoint, and yield the case."""
    torch.set_num_threads(arguments.threads)
    shape, precision = SHAPES[arguments.shape], arguments.precision
    checkpoint = arguments.checkpoints / f"{arguments.shape}-{precision}"
    write_checkpoint(checkpoint, shape, precision)

    def run() -> Values:
        limits = Limits(
            measure_bandwidth(arguments.threads),
            measure_linear(shape, precision, arguments.context, arguments.threads),
        )
        core = open_core(arguments, checkpoint)
        gc.collect()
        gc.freeze()
        contexts = [len(each.token_ids) for each in core.scheduler.running]
        rows = measure(core, arguments.steps)
        work = decode_step(
            shape, precision, [each + WARM_UP_STEPS + arguments.steps // 2 for each in contexts]
        )
        found = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        floor_ms = work.floor_s(limits) * 1e3
        shares = [row["overhead"] / (row["step"] + row["report"]) for row in rows]
        return found | {
            "overhead_share": statistics.median(shares),
            "floor": floor_ms,
            "floor_share": floor_ms / found["step"],
            "read_mb": work.read_bytes / 1e6,
            "gflop": work.flop / 1e9,
            "read_gb_per_s": limits.bytes_per_s / 1e9,
            "linear_gflops": limits.flop_per_s / 1e9,
        }

    name = f"{arguments.sequences} sequences, prompts of {arguments.context}, {arguments.shape}"
    cases = [Case(f"{name}, {precision}", {"Weir": run})]
    if arguments.competitors:
        runs = decoder_runs(arguments, checkpoint)
        cases += [
            Case(
                f"beside {count} busy processes",
                {"Weir": partial(measure_beside, runs, count, arguments.threads)},
            )
            for count in range(1, arguments.competitors + 1)
        ]
    yield cases


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_checkpoint_options(parser, "float32", "bfloat16")
    parser.add_argument("--sequences", type=int, default=50)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--competitors", type=int, default=0, help="busy processes beside which to measure too"
    )


BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
