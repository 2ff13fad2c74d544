"""How the torch engine runs a checkpoint, or, for load tests, what a step costs on hardware that is not there. No torch.

The defaults of `CostModel` are Llama 3.3 70B in FP8 on two H200, fitted to what NVIDIA publishes of TensorRT-LLM
(`docs/source/developer-guide/perf-overview.md` of its repository, "LLaMA v3.3 70B", column H200 TP2, per GPU and so doubled here),
in output tokens per second:

    tokens in/out    1000/1000    1024/8192    8192/1024    32768/1024
    published            5,174        4,018        1,074           240
    this model           5,197        4,032        1,076           289

The last is too high because attention within a prompt, which grows with its square, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inference.checkpoint.checkpoint import DecoderConfig
from inference.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from inference.limits import EngineLimits
from inference.native.packed_file import PackedPlace

ComputeDtype = Literal["float32", "bfloat16", "int8"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one replica. A step takes what reading the weights or computing its tokens takes, whichever is more, and
    reading the KV that it attends to.

    token_us: to compute one token of a prompt or of the output. weights_ms: to read all weights once. context_token_us: to read one
    position's keys and values. output_token_count_mean: of answers that end by themselves. time_scale: 1 is the hardware's own
    speed, 0 lets no time pass.
    """

    token_us: float = 71.7  # fitted; 140 GFLOP each, so half of what the two GPUs could do in FP8
    weights_ms: float = 7.3  # 70 GB at 2 x 4.8 TB/s
    context_token_us: float = 0.0327  # fitted; 328 kB at that bandwidth would be 0.034
    kv_block_count: int = 35_000  # of 16 tokens of 328 kB: what 90 % of 2 x 141 GB hold beside the weights
    output_token_count_mean: float = 150.0  # the reference workload's
    time_scale: float = 1.0

    def step_s(self, token_count: int, context_token_count: int) -> float:
        """Duration of a step. token_count: rows of its batch; context_token_count: positions that they attend to, in the pool."""
        compute_s = max(self.weights_ms * 1e-3, token_count * self.token_us * 1e-6)
        return (compute_s + context_token_count * self.context_token_us * 1e-6) * self.time_scale


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a checkpoint, or, with a simulation, how long to pretend to.

    kv_cache_bytes: the pool's size; raised if one full context needs more. packed: where packed weights are kept, so that
    hosts share them; None keeps none.
    """

    directory: str
    limits: EngineLimits
    compute_dtype: ComputeDtype = "float32"
    kv_cache_bytes: int = 1 << 30
    device: Device = "cpu"
    simulation: CostModel | None = None
    packed: PackedPlace | None = None

    def block_count(self, config: DecoderConfig) -> int:
        """Blocks of the pool."""
        if self.simulation is not None:
            wanted = self.simulation.kv_block_count
        else:
            # Keys and values of all layers; int8 is the type of weights alone.
            floats = 2 * config.layer_count * config.kv_head_count * config.head_dim * KV_BLOCK_TOKENS
            wanted = self.kv_cache_bytes // (floats * (4 if self.compute_dtype == "float32" else 2))
        return max(wanted, blocks_for(self.limits.context_window_tokens))
