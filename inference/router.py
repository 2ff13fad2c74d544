"""Which engine serves a model. One engine per model so far; the router is where replicas will be told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference.engine import Engine, ModelInfo
from inference.errors import EngineError


class ModelUnknown(EngineError):
    """No engine serves a model of this name."""

    reason = "MODEL_UNKNOWN"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        super().__init__(f"model {model!r} is unknown; known are: {', '.join(known) or 'none'}")
        self.model = model


class Router:
    """Chooses an engine by model name."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = dict(engines)

    def choose(self, model: str) -> Engine:
        """The engine for a request. Raises: ModelUnknown."""
        engine = self._engines.get(model)
        if engine is None:
            raise ModelUnknown(model, sorted(self._engines))
        return engine

    def models(self) -> list[ModelInfo]:
        """All models, by name."""
        return [self._engines[name].model for name in sorted(self._engines)]

    def engines(self) -> list[Engine]:
        """All engines, by model name."""
        return [self._engines[name] for name in sorted(self._engines)]
