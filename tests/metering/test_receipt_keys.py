"""File of the signing key: created once, private, refused with a clear reason."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from metering.core.errors import InvalidValue
from metering.receipts.signing import KEY_FILE, ensure_key, load_signer, read_key, replace_key


def test_a_key_is_made_once_and_is_only_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "new" / KEY_FILE

    assert ensure_key(path)
    first = read_key(path)
    assert not ensure_key(path)

    assert read_key(path).key_id == first.key_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [KEY_FILE], "nothing is left beside it"


def test_concurrent_creations_of_a_key_get_the_same_one(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE

    def make(_: int) -> str:
        ensure_key(path)
        return read_key(path).key_id

    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(make, range(64)))) == 1


def test_a_new_key_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    ensure_key(path)
    old = read_key(path)

    new = replace_key(path)

    assert read_key(path).key_id == new.key_id != old.key_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_key_nothing_is_signed(tmp_path: Path) -> None:
    assert load_signer({"WEIR_HOME": str(tmp_path)}) is None

    ensure_key(tmp_path / KEY_FILE)

    assert load_signer({"WEIR_HOME": str(tmp_path)}) is not None
    assert load_signer({"WEIR_HOME": str(tmp_path), "WEIR_RECEIPT_KEY_FILE": "off"}) is None


def test_a_key_that_is_named_must_be_there_and_of_the_right_kind(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("secret")
    other.write_bytes(
        X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )

    for path, reported in (
        (tmp_path / "none", "cannot be read"),
        (text, "must contain a private key"),
        (other, "Ed25519"),
    ):
        with pytest.raises(InvalidValue, match=reported) as refused:
            load_signer({"WEIR_RECEIPT_KEY_FILE": str(path)})
        assert refused.value.field == "WEIR_RECEIPT_KEY_FILE"
