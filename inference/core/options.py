"""Options of the torch engine, and the cost model of simulated hardware for load tests. No torch.

The defaults of `CostModel` are Llama 3.3 70B in FP8 on two H200, fitted to NVIDIA's published
figures of TensorRT-LLM (`docs/source/developer-guide/perf-overview.md` of its repository, "LLaMA
v3.3 70B", column H200 TP2, per GPU and so doubled here), in output tokens per second:

    tokens in/out    1000/1000    1024/8192    8192/1024    32768/1024
    published            5,174        4,018        1,074           240
    this model           5,197        4,032        1,076           289

The last figure is too high because attention within a prompt, which is quadratic in its length, is
not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.settings import number, one_of, setting, whole
from inference.checkpoint.checkpoint import DecoderConfig
from inference.kv_blocks import KV_BITS, KV_BLOCK_TOKENS, KV_SCALE_BYTES, KvType, blocks_for
from inference.limits import EngineLimits
from inference.native.packed_file import PackedTarget

ComputeDtype = Literal["float32", "bfloat16", "int8"]
KvDtype = Literal["auto", "bfloat16", "int8"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one replica. A step takes the time to read the weights or to compute its tokens,
    whichever is longer, plus the time to read its KV context.

    `token_us` is the time to compute one prompt or output token, `weights_ms` that to read all
    weights once, and `context_token_us` that to read one position's keys and values.
    `output_token_count_mean` is the mean length of outputs that end by themselves. `time_scale` is
    1 for the speed of the hardware, 0 for no delays.
    """

    token_us: float = 71.7  # fitted; 140 GFLOP each, half of the FP8 peak of two GPUs
    weights_ms: float = 7.3  # 70 GB at 2 x 4.8 TB/s
    context_token_us: float = 0.0327  # fitted; 328 kB at that bandwidth would be 0.034
    kv_block_count: int = 35_000  # 16 tokens of 328 kB each: 90 % of 2 x 141 GB, minus the weights
    output_token_count_mean: float = 150.0  # as in the reference workload
    time_scale: float = 1.0

    def step_s(self, token_count: int, context_token_count: int) -> float:
        """Estimate a step's seconds from its number of rows and the KV positions that they read."""
        compute_s = max(self.weights_ms * 1e-3, token_count * self.token_us * 1e-6)
        return (compute_s + context_token_count * self.context_token_us * 1e-6) * self.time_scale


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """Settings that all engines on this machine share."""

    # Engine of your models: torch on this machine, TensorRT-LLM on its GPUs, or remote servers.
    backend: Literal["torch", "tensorrt", "remote"] = setting(
        "WEIR_ENGINE", "torch", one_of("torch", "tensorrt", "remote")
    )
    # Data type of the weights. `auto` is bfloat16 for models on `cuda`, else float32. `int8`, not
    # for `cuda`, takes a quarter of the memory of float32, and its answers differ a little.
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = setting(
        "WEIR_ENGINE_DTYPE", "auto", one_of("auto", "float32", "bfloat16", "int8")
    )
    # Where api processes of this machine find the engine workers that they share. Unset: `engines`
    # in WEIR_HOME, for this process alone. If set, packed weights are there too. Only its owner can
    # use it.
    directory: str = setting("WEIR_ENGINE_DIRECTORY", "", str)
    # Data type of the KV cache. `auto` is float32 for a model that computes in it, else bfloat16.
    # `int8`, not for `cuda`, holds 1.9 times the tokens of bfloat16; its answers differ a little.
    kv_dtype: Literal["auto", "bfloat16", "int8"] = setting(
        "WEIR_ENGINE_KV_DTYPE", "auto", one_of("auto", "bfloat16", "int8")
    )
    # Device of the torch backend. `simulated` computes nothing and takes the time of a GPU, for
    # load tests; every answer says so.
    device: Literal["cpu", "cuda", "simulated"] = setting(
        "WEIR_ENGINE_DEVICE", "cpu", one_of("cpu", "cuda", "simulated")
    )
    # How slow simulated engines are: 1 is the speed of the GPU, 0 takes no time.
    simulated_time_scale: float = setting("WEIR_SIMULATED_TIME_SCALE", 1.0, number(0, 1000))
    # Threads of an engine. 0: one for each CPU that the process may use, by affinity and CPU quota.
    thread_count: int = setting("WEIR_ENGINE_THREADS", 0, whole(0, 1024))
    # How many tokens an engine guesses from earlier text of a sequence and verifies in one step; 0:
    # none. You get the same output, sooner.
    draft_token_count_max: int = setting("WEIR_ENGINE_DRAFT_TOKENS_MAX", 10, whole(0, 15))
    # Memory for the KV cache of each engine, reserved at its start. 0: 1 GiB on a CPU, and the free
    # memory of a GPU.
    kv_cache_bytes: int = setting("WEIR_KV_CACHE_BYTES", 0, whole(0, 2**44))
    # Keep packed weights of large models in WEIR_HOME. All workers of a model then share one copy,
    # and start faster.
    packed_weights: Literal["on", "off"] = setting("WEIR_PACKED_WEIGHTS", "on", one_of("on", "off"))
    # How much all packed weights may take. Those that were not used for longest are removed, except
    # those of running models.
    packed_weights_bytes: int = setting("WEIR_PACKED_WEIGHTS_BYTES", 64 << 30, whole(0, 2**50))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options to run, or simulate, a checkpoint.

    `kv_cache_bytes` is the pool size, raised if one full context needs more; None, on a GPU only,
    uses the memory that is free there. `kv_dtype` is the type of keys and values; see `kv_type`.
    `packed` is the storage for packed weights shared by
    workers, None for none. `draft_token_count_max` limits the tokens guessed from earlier text per
    sequence and step; 0 disables drafts.
    """

    directory: str
    limits: EngineLimits
    compute_dtype: ComputeDtype = "float32"
    kv_cache_bytes: int | None = 1 << 30
    device: Device = "cpu"
    simulation: CostModel | None = None
    packed: PackedTarget | None = None
    draft_token_count_max: int = 10
    kv_dtype: KvDtype = "auto"

    @property
    def kv_type(self) -> KvType:
        """Data type of keys and values; of hidden states, if none is set."""
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return "float32" if self.compute_dtype == "float32" else "bfloat16"

    def block_bytes(self, config: DecoderConfig) -> int:
        """Compute the bytes of a block: keys and values of all layers, and their scales."""
        head_count = 2 * config.layer_count * config.kv_head_count * KV_BLOCK_TOKENS
        scale_bytes = KV_SCALE_BYTES if self.kv_type == "int8" else 0
        return head_count * (config.head_dim * KV_BITS[self.kv_type] // 8 + scale_bytes)

    def block_count(self, config: DecoderConfig) -> int:
        """Compute how many blocks fit in kv_cache_bytes."""
        if self.simulation is not None:
            count = self.simulation.kv_block_count
        else:
            count = (self.kv_cache_bytes or 0) // self.block_bytes(config)
        return max(count, blocks_for(self.limits.context_window_tokens))
