"""Keyed hashes of payloads: a database confirms no guess, and a new key refuses no repetition."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.core.wire import payload_hash, use_signer
from metering.holds.operations import is_other_payload
from metering.receipts.signing import Signer, ensure_key, read_key

GUESS, OTHER = b"a guessed prompt", b"another prompt"


@pytest.fixture
def signers(tmp_path: Path) -> Iterator[list[Signer]]:
    for name in ("one", "two"):
        ensure_key(tmp_path / name)
    yield [read_key(tmp_path / name) for name in ("one", "two")]
    use_signer(None)


def test_without_the_key_a_guess_cannot_be_confirmed(signers: list[Signer]) -> None:
    use_signer(signers[0])

    stored = payload_hash(GUESS)

    assert len(stored) == 32
    assert hashlib.sha256(GUESS).digest()[:28] not in stored
    assert signers[0].public_key not in stored
    use_signer(signers[1])
    assert payload_hash(GUESS) != stored


def test_all_processes_with_the_key_agree_and_distinguish_payloads(signers: list[Signer]) -> None:
    for signer in (signers[0], None):
        use_signer(signer)
        first = payload_hash(GUESS)
        use_signer(signer)
        assert not is_other_payload(first, payload_hash(GUESS))
        assert is_other_payload(first, payload_hash(OTHER))


def test_a_repetition_after_a_change_of_the_key_is_no_other_payload(signers: list[Signer]) -> None:
    use_signer(None)
    plain = payload_hash(GUESS)
    use_signer(signers[0])
    keyed = payload_hash(GUESS)
    use_signer(signers[1])
    rotated = payload_hash(GUESS)
    before_there_were_keys = hashlib.sha256(GUESS).digest()

    assert len({plain, keyed, rotated, before_there_were_keys}) == 4
    for known in (plain, keyed, before_there_were_keys):
        assert not is_other_payload(known, rotated)
