"""Which engine serves a model. One engine per model so far; the router is where replicas will be told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference.engine import Backend, Encoder, Engine, ModelInfo
from inference.errors import EngineError


class ModelUnknown(EngineError):
    """No engine serves a model of this name."""

    reason = "MODEL_UNKNOWN"

    def __init__(self, model: str, known: Sequence[str]) -> None:
        super().__init__(f"model {model!r} is unknown; known are: {', '.join(known) or 'none'}")
        self.model = model


class ModelMismatch(EngineError):
    """There is a model of this name, and it does something else. wanted: what it was asked for."""

    reason = "MODEL_MISMATCH"

    def __init__(self, model: str, *, wanted: str, does: str) -> None:
        super().__init__(f"model {model!r} does not {wanted}: it serves {does}")
        self.model = model


class Router:
    """Chooses an engine by model name."""

    def __init__(self, engines: Mapping[str, Engine], encoders: Mapping[str, Encoder] | None = None) -> None:
        """encoders: models that embed, by names of their own."""
        self._engines = dict(engines)
        self._encoders = dict(encoders or {})

    def choose(self, model: str) -> Engine:
        """The engine for a request. Raises: ModelUnknown; ModelMismatch for a model that embeds."""
        engine = self._engines.get(model)
        if engine is None:
            if model in self._encoders:
                raise ModelMismatch(model, wanted="generate", does="Embed")
            raise ModelUnknown(model, self._names())
        return engine

    def choose_encoder(self, model: str) -> Encoder:
        """The encoder for a request. Raises: ModelUnknown; ModelMismatch for a model that generates."""
        encoder = self._encoders.get(model)
        if encoder is None:
            if model in self._names():
                raise ModelMismatch(model, wanted="embed", does="Generate")
            raise ModelUnknown(model, self._names())
        return encoder

    def find(self, model: str) -> Backend:
        """What serves a model, whatever it does. Raises: ModelUnknown."""
        return self._encoders.get(model) or self.choose(model)

    def models(self) -> list[ModelInfo]:
        """All models, by name."""
        return sorted((backend.model for backend in self.backends()), key=lambda model: model.name)

    def engines(self) -> list[Engine]:
        """All engines, by model name."""
        return [self._engines[name] for name in sorted(self._engines)]

    def encoders(self) -> list[Encoder]:
        """All encoders, by model name."""
        return [self._encoders[name] for name in sorted(self._encoders)]

    def backends(self) -> list[Backend]:
        """Everything that is served: engines and encoders."""
        return [*self.engines(), *self.encoders()]

    def _names(self) -> list[str]:
        return sorted([*self._engines, *self._encoders])
