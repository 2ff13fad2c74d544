"""The key that signs receipts: made, kept in a file that nobody else may read, named by its public half.

One signature covers all receipts of one transaction: it is over the root of their Merkle tree. Without a key receipts are chained
all the same, and the next signature in a chain vouches for what stands before it.
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
SIGNED_PREFIX = b"weir.receipt.batch.v1\n"  # so that no signature of ours can be taken for one over something else


class Signer:
    """One private key. key_id: 16 hexadecimal digits that follow from the public key."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        self.public_key = private_key.public_key().public_bytes_raw()
        self.key_id = key_id_of(self.public_key)

    def derived_key(self, purpose: bytes) -> bytes:
        """Return a secret of 32 bytes for another purpose, which does not reveal the private key."""
        return hmac.digest(self._private_key.private_bytes_raw(), purpose, "sha256")

    def sign(self, root: bytes) -> bytes:
        """The signature over a root, 64 bytes."""
        return self._private_key.sign(SIGNED_PREFIX + root)


def key_id_of(public_key: bytes) -> str:
    """The name of a public key of 32 bytes: nobody can give another key the same one."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def key_path(environment: Mapping[str, str]) -> Path | None:
    """Where the key is: in the file that WEIR_RECEIPT_KEY_FILE names, or in the home directory; None if the variable says `off`."""
    named = environment.get(KEY_VARIABLE, "")
    if named == OFF:
        return None
    return Path(named or Path(environment.get("WEIR_HOME") or Path.home() / ".weir") / KEY_FILE).expanduser()


def load_signer(environment: Mapping[str, str]) -> Signer | None:
    """The key that this process signs with; None if signing is off, or no file is named and there is none in the home directory.

    Raises: InvalidValue for a file that cannot be read, or that holds no Ed25519 key.
    """
    path = key_path(environment)
    if path is None or not (environment.get(KEY_VARIABLE) or path.exists()):
        return None
    return read_key(path)


def read_key(path: Path) -> Signer:
    """The key in a file. Raises: InvalidValue."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InvalidValue(KEY_VARIABLE, f"{path} cannot be read: {error.strerror}; `weir receipt rotate` makes a key") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidValue(KEY_VARIABLE, f"{path} holds no private key as PEM without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidValue(KEY_VARIABLE, f"{path} holds a key of another kind: receipts are signed with Ed25519")
    return Signer(key)


def ensure_key(path: Path) -> bool:
    """Make a key where there is none; whether one was made. Safe when two do it at once: both then use the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _write_new(path)
    try:
        os.link(unfinished, path)  # which fails, unlike a renaming, if there is one by now
    except FileExistsError:
        return False
    finally:
        unfinished.unlink()
    return True


def replace_key(path: Path) -> Signer:
    """Put a new key in the place of the old one, which is gone then: nobody can sign with it any more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _write_new(path)
    signer = read_key(unfinished)
    unfinished.replace(path)
    return signer


def _write_new(path: Path) -> Path:
    """A new key in a file beside `path`, readable by its owner alone and on the disk when this returns."""
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return unfinished
