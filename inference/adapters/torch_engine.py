"""PyTorch engine: settings for a child process, `torch_worker.py`. Does not import torch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from common.cpus import usable_cpus
from inference.adapters.torch_worker import LoadModel
from inference.capabilities import Capabilities
from inference.checkpoint.checkpoint import read_model_info
from inference.core.options import ComputeDtype, CostModel, Device, EngineOptions, KvDtype
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import EngineLimits
from inference.native.packed_file import PackedTarget
from inference.sequences import RequestField
from inference.workers.engine import WorkerEngine
from inference.workers.process import CHILD_ENVIRONMENT, WorkerOpener, open_worker
from inference.workers.worker import WorkerKind

# A simulation computes no logits, which formats and beam search need.
SIMULATED = Capabilities(
    frozenset(
        {
            RequestField.JSON_SCHEMA,
            RequestField.REGEX,
            RequestField.LARK,
            RequestField.BEAM_SEARCH,
            RequestField.MAX_REASONING_TOKENS,
        }
    )
)


@dataclass(frozen=True, slots=True)
class TorchEngineSettings:
    """Settings of one checkpoint. All defaults suit a small model on a laptop.

    `name` is the model name for clients. `context_window_tokens_max` reduces the model's own window
    to save memory; None keeps it. With the `compute_dtype` "int8", matrices are stored in 8 bits
    and computed in bfloat16. The `device` "cuda" needs a GPU and a torch build with CUDA; it does
    not support int8. `kv_cache_bytes` is None for the free memory of a GPU. `torch_thread_count` is
    0 for one thread per usable CPU. `packed` is the storage for packed weights of large models,
    mapped by all workers; None for one copy per worker. `simulation` takes time for each step and
    computes nothing, for load tests. `environment` is added to that of the worker and read at each
    start; `CUDA_VISIBLE_DEVICES` names its GPU.
    """

    directory: Path
    name: str
    context_window_tokens_max: int | None = None
    compute_dtype: ComputeDtype = "float32"
    device: Device = "cpu"
    kv_cache_bytes: int | None = 1 << 30  # allocated by the system as it is used
    step_token_count_max: int = 512
    step_time_target_s: float | None = 0.1  # seconds: hardly noticeable between two tokens
    running_sequence_count_max: int = 64
    waiting_sequence_count_max: int = 256
    torch_thread_count: int = 0
    load_timeout_s: float = 600.0  # seconds: a large checkpoint from a cold disk
    # seconds without a report while sequences run, after which the worker is killed
    step_timeout_s: float = 120.0
    close_timeout_s: float = 5.0  # seconds for the last step to end
    restart_delay_s_min: float = 0.2
    restart_delay_s_max: float = 30.0
    stable_after_s: float = 60.0  # seconds of service after which the restart delay is reset
    simulation: CostModel | None = None
    packed: PackedTarget | None = None
    kv_dtype: KvDtype = "auto"  # of keys and values; on a GPU, that of the hidden states
    draft_token_count_max: int = 10  # guessed from earlier text per sequence and step
    environment: Mapping[str, str] = field(default_factory=dict)


class TorchEngine(WorkerEngine):
    """Engine of one model on PyTorch, or a simulation without computation."""

    def __init__(self, settings: TorchEngineSettings, opener: WorkerOpener = open_worker) -> None:
        """Read the checkpoint's configuration without starting a process. `opener` starts the
        worker later.

        Raises CheckpointInvalid, or ValueError for contradictory limits.
        """
        model = read_model_info(
            settings.directory,
            name=settings.name,
            engine="torch" if settings.simulation is None else "simulated",
            context_window_tokens_max=settings.context_window_tokens_max,
        )
        limits = EngineLimits(
            context_window_tokens=model.context_window_tokens,
            step_token_count_max=settings.step_token_count_max,
            step_time_target_s=settings.step_time_target_s,
            running_sequence_count_max=settings.running_sequence_count_max,
            waiting_sequence_count_max=settings.waiting_sequence_count_max,
        )
        options = EngineOptions(
            model.directory,
            limits,
            settings.compute_dtype,
            settings.kv_cache_bytes,
            settings.device,
            settings.simulation,
            settings.packed,
            settings.draft_token_count_max,
            settings.kv_dtype,
        )
        load = LoadModel(options, settings.torch_thread_count or usable_cpus().count)
        environment = ChainMap(cast(dict[str, str], settings.environment), CHILD_ENVIRONMENT)
        kind = WorkerKind(
            "inference.adapters.torch_worker", environment, load, KV_BLOCK_TOKENS, opener
        )
        capabilities = Capabilities() if settings.simulation is None else SIMULATED
        super().__init__(
            replace(model, continues_exactly=True, capabilities=capabilities),
            limits,
            settings,
            kind,
        )
