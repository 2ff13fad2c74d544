"""What an API key looks like: made here, recognised here, and never stored but as its SHA-256."""

from __future__ import annotations

import hashlib
import re
import secrets
import string

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
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()
