"""TensorRT-LLM in the API process: settings for a child process. Does not import it."""

from __future__ import annotations

import functools
from dataclasses import replace

from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.adapters.tensorrt_settings import (
    TENSORRT_LLM,
    VERSION,
    LoadTensorRt,
    TensorRtSettings,
)
from inference.checkpoint.checkpoint import read_external_model
from inference.engine import EventSink, GenerationRequest, ModelInfo
from inference.errors import RequestImpossible
from inference.limits import EngineLimits, external_continuation_fault
from inference.workers.engine import EngineSequence, WorkerEngine
from inference.workers.process import Sharing, open_worker
from inference.workers.protocol import Message, decoder_to_parent
from inference.workers.worker import WorkerKind

# The library may end the process with MPI_Abort before it reports why it cannot load.
LOAD_FAILURE_COUNT_MAX = 3


def load_message(settings: TensorRtSettings) -> tuple[ModelInfo, LoadTensorRt]:
    """Read a checkpoint and build the first message to a worker; return the model and the message.

    Raises CheckpointInvalid, or ValueError for contradictory limits.
    """
    model, end_token_ids = read_external_model(
        settings.directory,
        name=settings.name,
        engine="tensorrt_llm",
        context_window_tokens_max=settings.context_window_tokens_max,
        capabilities=TENSORRT_LLM[VERSION],
    )
    limits = EngineLimits(
        context_window_tokens=model.context_window_tokens,
        step_token_count_max=settings.step_token_count_max,
        running_sequence_count_max=settings.running_sequence_count_max,
        waiting_sequence_count_max=settings.waiting_sequence_count_max,
    )
    load = LoadTensorRt(
        model.directory,
        model.vocabulary_size,
        end_token_ids,
        limits,
        settings.options,
        settings.adapters,
    )
    return replace(model, adapters=tuple(each.name for each in settings.adapters)), load


class TensorRtEngine(WorkerEngine):
    """Engine of one model on TensorRT-LLM, on one or more GPUs of this machine."""

    loss_message = "TensorRT-LLM has failed; operators find the reason in the log"

    def __init__(self, settings: TensorRtSettings, share: Sharing = lambda start: start) -> None:
        """Read the checkpoint's configuration without starting a process. `share` lets other
        processes use the worker too.

        Raises CheckpointInvalid, or ValueError for contradictory limits.
        """
        model, load = load_message(settings)
        self._blocks = KvEventIndex()
        kind = WorkerKind(
            "inference.adapters.tensorrt_worker",
            settings.environment,
            load,
            settings.options.block_tokens,
            share(functools.partial(open_worker, keeps_log=True, python=settings.python)),
            decoder_to_parent(KvCacheChange),
            LOAD_FAILURE_COUNT_MAX,
        )
        super().__init__(model, load.limits, settings, kind)

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine.predict_cached_token_count` from sent prompts and cache events."""
        sent = super().predict_cached_token_count(prompt_token_ids, cache_salt)
        return min(sent, self._blocks.matched_token_count(prompt_token_ids))

    def _receive(self, message: Message) -> None:
        if isinstance(message, KvCacheChange):
            self._blocks.apply(message)
        else:
            super()._receive(message)

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._blocks.clear()

    def submit(self, request: GenerationRequest, sink: EventSink) -> EngineSequence:
        """Implement `Engine.submit`."""
        if (fault := external_continuation_fault(request)) is not None:
            raise RequestImpossible(fault, "output_token_ids")
        return super().submit(request, sink)
