"""Duration of the parts of a decoding step: the native decoder, and the Python around it.

    python -m bench.steps [--shape M] [--precision bfloat16] [--sequences 50] [--context 100]
    [--steps 200]

Engine core and report encoding in this process, as the engine worker runs them, without the API.
Prints medians over the steps; the overhead is the step without the decoder call.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, VOCABULARY_SIZE, write_checkpoint
from common.cpus import usable_cpus

# As in the engine worker: torch's threads would spin on the cores of the decoder.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from inference.core.engine_core import EngineCore
from inference.core.options import EngineOptions
from inference.engine import GenerationRequest, SamplingParams, StopCriteria
from inference.limits import EngineLimits
from inference.native.decoder import NativeDecoder
from inference.workers.protocol import StepReport, encode

WARM_UP_STEPS = 20


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


def main() -> None:
    """Parse the command line, measure, and print the medians."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.steps", description=__doc__.split("\n", 1)[0] if __doc__ else None
    )
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--sequences", type=int, default=50)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=usable_cpus().count)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "weir-bench"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = arguments.checkpoints / f"{arguments.shape}-{arguments.precision}"
    write_checkpoint(checkpoint, SHAPES[arguments.shape], arguments.precision)
    core = open_core(arguments, checkpoint)
    gc.collect()
    gc.freeze()
    rows = measure(core, arguments.steps)
    for name in rows[0]:
        print(f"{name:24} {statistics.median(row[name] for row in rows):8.3f} ms")
    share = statistics.median(row["overhead"] / (row["step"] + row["report"]) for row in rows)
    print(f"Python's overhead is {share:.1%} of a step of {arguments.sequences} sequences")


if __name__ == "__main__":
    main()
