"""A LoRA adapter of an engine as an engine of its own: another name, the same process, batch and memory."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from inference.engine import Engine, EngineCondition, EngineStatistics, GenerationRequest, ModelInfo, SequenceStream


class AdapterView:
    """Implements `Engine` by the engine that holds the adapter. That one is served, started and closed for itself."""

    def __init__(self, base: Engine, adapter: str) -> None:
        self._base = base
        self._adapter = adapter
        self._model = replace(base.model, name=f"{base.model.name}:{adapter}")

    @property
    def base(self) -> Engine:
        """The engine that holds the adapter."""
        return self._base

    @property
    def model(self) -> ModelInfo:
        """See `Engine.model`."""
        return self._model

    async def serve(self) -> None:
        """Nothing of its own runs."""

    async def start(self) -> None:
        """See `Engine.start`."""
        await self._base.start()

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[SequenceStream]:
        """See `Engine.generate`."""
        return self._base.generate(self._adapted(request))

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`."""
        return self._base.predict_cached_token_count(prompt_token_ids, self._salted(cache_salt))

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return self._base.statistics()

    def healthy(self) -> bool:
        """See `Engine.healthy`."""
        return self._base.healthy()

    def condition(self) -> EngineCondition:
        """See `Engine.condition`."""
        return self._base.condition()

    async def close(self) -> None:
        """The base is closed for itself."""

    def _adapted(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, adapter=self._adapter, cache_salt=self._salted(request.cache_salt))

    def _salted(self, cache_salt: str) -> str:
        """What one adapter has computed is of no use to another."""
        return f"{cache_salt}\0{self._adapter}"
