"""API keys: the form of a secret, stored only as its SHA-256, and parsers of the values that an admin gives for a key."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass

from metering.core.errors import InvalidValue

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


PREFIX_CHARS = string.ascii_lowercase + string.digits
PREFIX_LENGTH = 8  # 36^8 prefixes: enough to tell keys apart; it is no part of the key's strength
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
SECRET_BYTES = 32
SECRET_LENGTH = 43  # 62^43 > 256^32
SECRET_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}_[0-9A-Za-z]{{{SECRET_LENGTH}}}", re.ASCII)
PREFIX_FORM = re.compile(rf"wk_[a-z0-9]{{{PREFIX_LENGTH}}}", re.ASCII)


def new_secret(prefix: str | None = None) -> str:
    """A secret that nobody has had: `wk_`, a prefix to show, `_`, and 256 random bits in base 62.

    prefix: that of a key which gets one more secret; a new one for a new key.
    """
    if prefix is None:
        prefix = "wk_" + "".join(secrets.choice(PREFIX_CHARS) for _ in range(PREFIX_LENGTH))
    number = int.from_bytes(secrets.token_bytes(SECRET_BYTES))
    digits = []
    for _ in range(SECRET_LENGTH):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return f"{prefix}_{''.join(digits)}"


def prefix_of(secret: str) -> str:
    """The part of a secret that is stored and shown."""
    return secret[: len("wk_") + PREFIX_LENGTH]


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
