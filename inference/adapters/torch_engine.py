"""The torch engine: a checkpoint's settings, turned into a child process that runs `torch_worker.py`. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import replace

from inference.adapters.torch_settings import LoadModel, TorchEngineSettings
from inference.capabilities import Capabilities, RequestField
from inference.checkpoint.checkpoint import read_model_info
from inference.core.options import EngineOptions
from inference.kv_blocks import KV_BLOCK_TOKENS
from inference.limits import EngineLimits
from inference.workers.engine import HostedEngine
from inference.workers.life import HostKind
from inference.workers.process import CHILD_ENVIRONMENT, HostOpener, open_host

__all__ = ["TorchEngine", "TorchEngineSettings"]


# It computes nothing that a format or a search could act on.
SIMULATED = Capabilities(frozenset({RequestField.JSON_SCHEMA, RequestField.REGEX, RequestField.LARK, RequestField.BEAM_SEARCH}))


class TorchEngine(HostedEngine):
    """One model on torch, or, with a simulation, on nothing but a clock."""

    def __init__(self, settings: TorchEngineSettings, opener: HostOpener = open_host) -> None:
        """Reads the checkpoint's configuration and starts nothing. opener: where its host comes from.

        Raises `CheckpointInvalid`, or ValueError for bounds that contradict each other.
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
        )
        load = LoadModel(options, settings.torch_thread_count or os.cpu_count() or 1)
        kind = HostKind("inference.adapters.torch_worker", CHILD_ENVIRONMENT, load, KV_BLOCK_TOKENS, opener)
        capabilities = Capabilities() if settings.simulation is None else SIMULATED
        super().__init__(replace(model, continues_exactly=True, capabilities=capabilities), limits, settings, kind)
