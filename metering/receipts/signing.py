"""Signing key of receipts: created, stored in a file readable by its owner only, named by its
public key.

One signature covers all receipts of a transaction: it signs the root of their Merkle tree. Without
a key receipts are chained nonetheless, and the next signature in a chain also covers the previous
receipts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from metering.core.errors import InvalidValue

KEY_VARIABLE = "WEIR_RECEIPT_KEY_FILE"
KEY_FILE = "receipt-key.pem"  # in WEIR_HOME
OFF = "off"
SIGNED_PREFIX = b"weir.receipt.batch.v1\n"  # prevents use of a signature for any other content


class Signer:
    """An Ed25519 private key. `key_id` has 16 hexadecimal digits, from the public key."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key = private_key.public_key().public_bytes_raw()
        self.key_id = key_id_of(self.public_key)

    def derived_key(self, purpose: bytes) -> bytes:
        """Derive a 32-byte secret for a purpose; it does not reveal the private key."""
        return hmac.digest(self._private_key.private_bytes_raw(), purpose, "sha256")

    def sign(self, root: bytes) -> bytes:
        """Sign a root; the signature has 64 bytes."""
        return self._private_key.sign(SIGNED_PREFIX + root)


def key_id_of(public_key: bytes) -> str:
    """Compute the id of a 32-byte public key: a prefix of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def key_path(environment: Mapping[str, str]) -> Path | None:
    """Return the key's path, from WEIR_RECEIPT_KEY_FILE or by default; None if signing is off."""
    named = environment.get(KEY_VARIABLE, "")
    if named == OFF:
        return None
    return Path(
        named or Path(environment.get("WEIR_HOME") or Path.home() / ".weir") / KEY_FILE
    ).expanduser()


def load_signer(environment: Mapping[str, str]) -> Signer | None:
    """Load this process's signer; None if signing is off, or if there is no default key file.

    Raises: InvalidValue if the file cannot be read or has no Ed25519 key.
    """
    path = key_path(environment)
    if path is None or not (environment.get(KEY_VARIABLE) or path.exists()):
        return None
    return read_key(path)


def read_key(path: Path) -> Signer:
    """Load the private key in a file. Raises: InvalidValue."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InvalidValue(
            KEY_VARIABLE,
            f"{path} cannot be read: {error.strerror}; `weir receipt rotate` creates a key",
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidValue(
            KEY_VARIABLE, f"{path} must contain a private key as PEM without a password"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidValue(
            KEY_VARIABLE, f"{path} contains a key of another kind: receipts are signed with Ed25519"
        )
    return Signer(key)


def ensure_key(path: Path) -> bool:
    """Create the key if it is missing; return True if created. Concurrent calls are safe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _write_new(path)
    try:
        os.link(unfinished, path)  # fails if the file exists by now, unlike a rename
    except FileExistsError:
        return False
    finally:
        unfinished.unlink()
    return True


def replace_key(path: Path) -> Signer:
    """Generate a new key in place of the old one, which is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _write_new(path)
    signer = read_key(unfinished)
    unfinished.replace(path)
    return signer


def _write_new(path: Path) -> Path:
    """Write a new key to a file beside `path`, readable by its owner only, and fsync it."""
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return unfinished
