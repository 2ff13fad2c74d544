"""How to run a checkpoint on the torch engine: every bound and every wait by name, and the message that asks a worker to load it.

No torch: the API process and the worker import this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inference.core.options import ComputeDtype, CostModel, Device, EngineOptions
from inference.native.packed_file import PackedPlace
from inference.workers.protocol import Message


class LoadModel(Message, tag="load", frozen=True):
    """The first message: what to load and how."""

    options: EngineOptions
    torch_thread_count: int


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """How to run a checkpoint. Every bound has a default that suits a small model on a laptop.

    name: what clients call the model. context_window_tokens_max: below the model's own to save memory; None keeps it.
    compute_dtype: "int8" stores matrices in 8 bits and computes in bfloat16. device: "cuda" needs a GPU and a torch built for
    it. torch_thread_count: 0 takes one per core. packed: where large models' packed weights are kept for all hosts to
    map; None: each has its own. simulation: compute nothing and only take this much time; for load tests.
    """

    directory: Path
    name: str
    context_window_tokens_max: int | None = None
    compute_dtype: ComputeDtype = "float32"
    device: Device = "cpu"
    kv_cache_bytes: int = 1 << 30  # bytes: taken from the system only as far as it is used
    step_token_count_max: int = 512
    step_time_target_s: float | None = 0.1  # seconds: what readers hardly notice between two tokens
    running_sequence_count_max: int = 64
    waiting_sequence_count_max: int = 256
    torch_thread_count: int = 0
    load_timeout_s: float = 600.0  # seconds: a large checkpoint from a cold disk
    step_timeout_s: float = 120.0  # seconds without a report while sequences run: the host hangs, and is killed
    close_timeout_s: float = 5.0  # seconds for the last step to end
    restart_delay_s_min: float = 0.2
    restart_delay_s_max: float = 30.0
    stable_after_s: float = 60.0  # seconds of service after which the restart delay begins anew
    simulation: CostModel | None = None
    packed: PackedPlace | None = None
