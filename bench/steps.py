"""Duration of the parts of a decoding step: the native decoder, and the Python around it.

    python -m bench.steps [--shape M] [--precision bfloat16] [--sequences 50] [--context 100]
    [--steps 200]

Engine core and report encoding in this process, as the engine worker runs them, without the API.
Figures are medians over the steps; the overhead is the step without the decoder call. The floor is
the time to read all weights and the contexts once, and to do their operations, at the bandwidth and
the rate of `torch.nn.Linear` measured just before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, VOCABULARY_SIZE, write_checkpoint

# As in the engine worker: torch's threads would spin on the cores of the decoder.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from bench.engine import add_checkpoint_options
from bench.floor import Limits, decode_step, measure_linear
from bench.harness import Bench, Case, Cases, Figure, Values, main
from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.doctor.embedded import measure_bandwidth
from inference.engine import GenerationRequest, SamplingParams, StopCriteria
from inference.limits import EngineLimits
from inference.native.decoder import NativeDecoder
from inference.workers.protocol import StepReport, encode

WARM_UP_STEPS = 20
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
    yield [Case(f"{name}, {precision}", {"Weir": run})]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_checkpoint_options(parser, "float32", "bfloat16")
    parser.add_argument("--sequences", type=int, default=50)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)


BENCH = Bench(__doc__, FIGURES, prepare, add_options)

if __name__ == "__main__":
    main(BENCH)
