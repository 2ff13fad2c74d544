"""How an engine is to run a checkpoint, and what computes its steps by that: the model, or a simulation in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from inference.checkpoint.checkpoint import DecoderConfig
from inference.core.cost_model import CostModel
from inference.core.kv_cache import blocks_for
from inference.core.model_runner import ComputeDtype, ModelRunner, kv_block_bytes
from inference.core.sequence import Sequence
from inference.core.simulated_runner import SimulatedRunner
from inference.core.step_plan import StepPlan
from inference.limits import EngineLimits
from inference.native.packed_place import PackedPlace
from inference.sampling.sampler import Chosen
from inference.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a checkpoint, or, with a simulation, how long to pretend to.

    kv_cache_bytes: the pool's size; raised if one full context needs more. packed: where packed weights are kept, so that
    hosts share them; None keeps none.
    """

    directory: Path
    limits: EngineLimits
    compute_dtype: ComputeDtype = "float32"
    kv_cache_bytes: int = 1 << 30
    device: Literal["cpu", "cuda"] = "cpu"
    simulation: CostModel | None = None
    packed: PackedPlace | None = None

    def block_count(self, config: DecoderConfig) -> int:
        """KV blocks of the pool."""
        if self.simulation is not None:
            wanted = self.simulation.kv_block_count
        else:
            wanted = self.kv_cache_bytes // kv_block_bytes(config, self.compute_dtype)
        return max(wanted, blocks_for(self.limits.context_window_tokens))


class Runner(Protocol):
    """What computes a step: the model, or what stands in for it under load tests."""

    def run(self, plan: StepPlan) -> dict[Sequence, Chosen]:
        """See `ModelRunner.run`."""
        ...


def open_runner(
    options: EngineOptions,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    on_progress: Callable[[float], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Runner:
    """Load what computes. clock, sleep: of a simulation, in seconds. Raises as `EngineCore`."""
    if options.simulation is not None:
        return SimulatedRunner(options.simulation, tokenizer, clock=clock, sleep=sleep)
    return ModelRunner(
        options.directory,
        config,
        compute_dtype=options.compute_dtype,
        context_window_tokens=options.limits.context_window_tokens,
        block_count=options.block_count(config),
        device=options.device,
        on_progress=on_progress,
        packed=options.packed,
    )
