"""What a key may be called and what it may be good for: parsers of the values that an admin gives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from metering.errors import InvalidValue

KEY_NAME_MAX_CHARS = 100
MODEL_NAME_MAX_CHARS = 200
MODELS_PER_KEY_MAX = 100  # a key that is good for so many is better good for all
SCOPES = frozenset({"inference", "admin", "billing"})
TOKENS_MAX = 1_000_000_000  # of one request: above any context window, and far below what its column holds


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """The most tokens of one request of a key; None: as many as the model takes. Output is that of all choices together."""

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None


NO_BOUNDS = TokenBounds()


def checked_key_name(name: str) -> str:
    """A name that a key may have. Raises: InvalidValue."""
    if not 1 <= len(name) <= KEY_NAME_MAX_CHARS or not name.isprintable():
        raise InvalidValue("name", f"give 1 to {KEY_NAME_MAX_CHARS} printable characters")
    return name


def checked_scopes(scopes: Collection[str]) -> list[str]:
    """Scopes in order, each once; none means "inference". Raises: InvalidValue."""
    if unknown := set(scopes) - SCOPES:
        raise InvalidValue("scopes", f"{sorted(unknown)} unknown: choose from {sorted(SCOPES)}")
    return sorted(set(scopes)) or ["inference"]


def checked_models(models: Collection[str]) -> list[str]:
    """Names of models in order, each once; none means every model. Raises: InvalidValue."""
    if len(set(models)) > MODELS_PER_KEY_MAX:
        raise InvalidValue("models", f"give at most {MODELS_PER_KEY_MAX}, or none for every model")
    if not all(1 <= len(model) <= MODEL_NAME_MAX_CHARS and model.isprintable() for model in models):
        raise InvalidValue("models", f"give names of 1 to {MODEL_NAME_MAX_CHARS} printable characters")
    return sorted(set(models))


def checked_bound(token_count: int | None, field: str) -> int | None:
    """The most tokens of one request; 0 and None mean no bound. Raises: InvalidValue."""
    if token_count is not None and not 0 <= token_count <= TOKENS_MAX:
        raise InvalidValue(field, f"give 1 to {TOKENS_MAX:,} tokens, or 0 for no limit of the key")
    return token_count or None


def model_allowed(models: Collection[str], asked: str) -> bool:
    """Whether a key that is limited to these models may use the one asked for; no models mean every one.

    The name of a model allows each version of it, `name@version`; a version allows itself alone.
    """
    return not models or asked in models or asked.partition("@")[0] in models
