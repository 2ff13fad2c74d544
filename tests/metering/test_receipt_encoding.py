"""Encoding of a receipt, Merkle tree of a batch, and signature: every change is detected."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from metering.receipts.chaining import SignedBatch
from metering.receipts.encoding import NO_HASH
from metering.receipts.merkle import EMPTY_ROOT, RunningRoot, Step, Tree
from metering.receipts.signing import Signer, key_id_of
from tests.metering.receipt_invariants import root
from tests.metering.receipt_reading import Receipt, decode, hash_of, is_signed, root_by_path

counts = st.integers(0, 2**63 - 1)
hashes = st.binary(min_size=32, max_size=32)
receipts = st.builds(
    Receipt,
    **{name: st.uuids() for name in ("organization_id", "project_id", "api_key_id", "request_id")},
    **dict.fromkeys(
        ("part", "input_token_count", "cached_input_token_count", "billed_token_count"), counts
    ),
    **dict.fromkeys(
        ("embedding_token_count", "price_version", "cost_picos", "admitted_at_us", "settled_at_us"),
        counts,
    ),
    reasoning_token_count=st.one_of(st.just(0), counts),
    sequence=counts,
    previous_hash=hashes,
    currency_code=st.text(max_size=4),
    model=st.text(max_size=40),
    outcome=st.text(max_size=16),
    times=st.one_of(st.just(()), st.tuples(*[counts] * 6)),
    hashes=st.tuples(*[st.one_of(st.just(b""), hashes)] * 2),
)
SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
# First test vector of docs/reference/receipts.md.
KNOWN = Receipt(
    organization_id=uuid.UUID(int=1),
    project_id=uuid.UUID(int=2),
    api_key_id=uuid.UUID(int=3),
    request_id=uuid.UUID("5f0c8a52-7a31-4d2f-9c7e-0a1b2c3d4e5f"),
    part=0,
    input_token_count=1025,
    cached_input_token_count=200,
    billed_token_count=150,
    embedding_token_count=0,
    reasoning_token_count=0,
    price_version=7,
    cost_picos=228_750_000,
    admitted_at_us=1_795_176_000_000_000,
    settled_at_us=1_795_176_001_234_567,
    sequence=1,
    previous_hash=NO_HASH,
    currency_code="USD",
    model="demo",
    outcome="stop",
)
KNOWN_HASH = "03947372f6c7874afce477c872e40e12d97c59a191091ec3dac23641178b0a36"


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit changed."""
    return (int.from_bytes(data, "big") ^ (1 << bit)).to_bytes(len(data), "big")


@given(receipts)
def test_decoding_gives_back_what_was_encoded(receipt: Receipt) -> None:
    assert decode(receipt.encoded) == receipt


def test_texts_cannot_be_shifted_between_fields() -> None:
    """Each is preceded by its length: `ab` + `c` differs from `a` + `bc`."""
    one, other = replace(KNOWN, model="ab", outcome="c"), replace(KNOWN, model="a", outcome="bc")

    assert one.encoded != other.encoded


def test_a_receipt_without_reasoning_has_the_encoding_of_before_and_no_other() -> None:
    """Otherwise a receipt would have two valid encodings, and two hashes."""
    reasoning = replace(KNOWN, reasoning_token_count=40)
    assert replace(KNOWN, times=(0,) * 6).encoded.startswith(b"weir.receipt.v3\n")
    assert KNOWN.encoded.startswith(b"weir.receipt.v1\n")
    assert reasoning.encoded.startswith(b"weir.receipt.v2\n")
    one = replace(KNOWN, hashes=(b"", bytes(range(32)))).encoded
    assert one.startswith(b"weir.receipt.v4\n")
    at = one.index(bytes(range(32))) - 8
    for content in (0, 1, 8):
        with pytest.raises(ValueError, match="has the hash of an end user or of labels"):
            decode(one[:at] + content.to_bytes(8) + one[at + 8 :])

    with pytest.raises(ValueError, match="has version 1"):
        decode(reasoning.encoded.replace((40).to_bytes(8), bytes(8)))


def test_the_known_receipt_has_the_known_hash() -> None:
    """If this fails, receipts of customers can no longer be verified."""
    assert hash_of(KNOWN.encoded).hex() == KNOWN_HASH


@given(receipts, st.data())
def test_truncated_and_longer_bytes_are_no_receipt(receipt: Receipt, data: st.DataObject) -> None:
    encoded = receipt.encoded
    cut = data.draw(st.integers(0, len(encoded) - 1))

    for wrong in (encoded[:cut], encoded + b"\0", b"X" + encoded[1:]):
        with pytest.raises(ValueError, match=r"receipt|decode"):
            decode(wrong)


@given(st.lists(hashes, max_size=70))
def test_all_ways_to_a_root_agree(leaves: list[bytes]) -> None:
    running = RunningRoot()
    for leaf in leaves:
        running.push(leaf)

    assert Tree(leaves).root == running.root == (root(leaves) if leaves else EMPTY_ROOT)
    assert running.count == len(leaves)


@given(st.lists(hashes, min_size=1, max_size=70))
def test_each_leaf_has_a_short_path_to_the_root(leaves: list[bytes]) -> None:
    tree = Tree(leaves)

    for index, leaf in enumerate(leaves):
        path = tree.path(index)
        assert root_by_path(leaf, path) == tree.root
        assert len(path) <= (len(leaves) - 1).bit_length()


def test_a_batch_of_one_has_no_path() -> None:
    leaf = hash_of(KNOWN.encoded)

    assert Tree([leaf]).path(0) == ()
    assert Tree([leaf]).root == leaf


@given(st.lists(hashes, min_size=2, max_size=20, unique=True), st.data())
def test_a_root_depends_on_leaves_and_order(leaves: list[bytes], data: st.DataObject) -> None:
    other = data.draw(st.permutations(leaves))

    assert (Tree(other).root == Tree(leaves).root) == (other == leaves)
    assert Tree(leaves[:-1]).root != Tree(leaves).root


@given(
    st.lists(receipts, min_size=1, max_size=5, unique_by=lambda receipt: receipt.encoded), st.data()
)
def test_any_changed_bit_of_a_receipt_is_caught(batch: list[Receipt], data: st.DataObject) -> None:
    encoded = [receipt.encoded for receipt in batch]
    signed = SignedBatch.sign(SIGNER, [hash_of(each) for each in encoded])
    index = data.draw(st.integers(0, len(batch) - 1))
    path = signed.path(hash_of(encoded[index]))
    assert holds(encoded[index], path, signed.signature)

    changed = flipped(encoded[index], data.draw(st.integers(0, len(encoded[index]) * 8 - 1)))
    assert not holds(changed, path, signed.signature)
    signature = flipped(signed.signature, data.draw(st.integers(0, 511)))
    assert not holds(encoded[index], path, signature)
    for step in range(len(path)):
        on_left, neighbour = path[step]
        wrong = (on_left, flipped(neighbour, data.draw(st.integers(0, 255))))
        assert not holds(encoded[index], (*path[:step], wrong, *path[step + 1 :]), signed.signature)
        assert not holds(encoded[index], (*path[:step], *path[step + 1 :]), signed.signature)


def holds(encoded: bytes, path: tuple[Step, ...], signature: bytes) -> bool:
    """Return whether a receipt verifies."""
    return is_signed(SIGNER.public_key, root_by_path(hash_of(encoded), path), signature)


def test_another_key_verifies_nothing() -> None:
    other = Signer(Ed25519PrivateKey.generate())
    signature = SIGNER.sign(bytes(32))

    assert is_signed(SIGNER.public_key, bytes(32), signature)
    assert not is_signed(other.public_key, bytes(32), signature)
    assert not is_signed(b"no key", bytes(32), signature)
    assert key_id_of(other.public_key) == other.key_id != SIGNER.key_id
