"""How to run an encoder: every bound and every wait by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """How to run an encoder's checkpoint. Every bound has a default that suits a small model on a laptop.

    name: what clients call the model. compute_dtype, device, torch_thread_count: as those of `TorchEngineSettings`.
    """

    directory: Path
    name: str
    compute_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    torch_thread_count: int = 0
    batch_token_count_max: int = 1024  # tokens: a larger batch computes no faster on some cores, and the next one waits for it
    batch_window_s: float = 0.001  # seconds that a first text waits for company: far less than it takes to compute
    waiting_token_count_max: int = 1 << 20  # tokens: minutes of work on a laptop; whoever comes later is better told to
    load_timeout_s: float = 600.0  # seconds: a large checkpoint from a cold disk
    step_timeout_s: float = 120.0  # seconds without an answer to a batch: the host hangs, and is killed
    close_timeout_s: float = 5.0  # seconds for the last batch to end
    restart_delay_s_min: float = 0.2
    restart_delay_s_max: float = 30.0
    stable_after_s: float = 60.0  # seconds of service after which the restart delay begins anew
