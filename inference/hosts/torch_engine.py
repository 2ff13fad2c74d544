"""The torch engine: a checkpoint's settings, turned into a child process that runs `host.py`. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import replace

from inference.checkpoint.checkpoint import read_model_info
from inference.core.kv_cache import KV_BLOCK_TOKENS
from inference.engine import GenerationRequest
from inference.errors import RequestImpossible
from inference.hosts.host_process import CHILD_ENVIRONMENT, HostKind, HostOpener, open_host
from inference.hosts.host_protocol import LoadModel
from inference.hosts.hosted_engine import HostedEngine
from inference.hosts.torch_settings import TorchEngineSettings
from inference.limits import EngineLimits

__all__ = ["TorchEngine", "TorchEngineSettings"]


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
        load = LoadModel(
            directory=model.directory,
            limits=limits,
            compute_dtype=settings.compute_dtype,
            kv_cache_bytes=settings.kv_cache_bytes,
            torch_thread_count=settings.torch_thread_count or os.cpu_count() or 1,
            device=settings.device,
            simulation=settings.simulation,
            packed=settings.packed,
        )
        kind = HostKind("inference.hosts.host", CHILD_ENVIRONMENT, load, KV_BLOCK_TOKENS, opener)
        super().__init__(replace(model, continues_exactly=True), limits, settings, kind)
        self._simulated = settings.simulation is not None

    def _unserved(self, request: GenerationRequest) -> RequestImpossible | None:
        if self._simulated and request.response_format is not None:
            return RequestImpossible("the simulated engine keeps no response format", request.response_format.field)
        if self._simulated and request.beam_search is not None:
            return RequestImpossible("the simulated engine has nothing to search for", "beam_search")
        return None
