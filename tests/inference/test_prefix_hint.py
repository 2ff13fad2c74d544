"""Prefix cache prediction: whole leading blocks of earlier sequences, under the same salt only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.core.kv_cache import block_keys
from inference.kv_blocks import KV_BLOCK_TOKENS, PrefixHint, block_hashes

tokens = st.lists(st.integers(0, 50), max_size=70)


def test_a_prompt_is_found_under_its_own_salt_and_never_whole() -> None:
    hint, prompt = PrefixHint(100, KV_BLOCK_TOKENS), list(range(4 * KV_BLOCK_TOKENS))

    hint.note(prompt, "a")

    assert hint.predict(prompt, "a") == 3 * KV_BLOCK_TOKENS
    assert hint.predict([*prompt, 1], "a") == 4 * KV_BLOCK_TOKENS
    assert hint.predict(prompt, "b") == 0
    assert hint.predict([*prompt[KV_BLOCK_TOKENS:], 1], "a") == 0, (
        "the same tokens elsewhere are another block"
    )


def test_the_oldest_tails_are_forgotten_first() -> None:
    hint, old, new = PrefixHint(4, KV_BLOCK_TOKENS), list(range(48)), list(range(100, 133))

    hint.note(old, "")
    hint.note(new, "")

    assert hint.predict([*new, 1], "") == 32
    assert hint.predict([*old, 1], "") == 32, "its tail made room, its head is still there"


@given(tokens, st.text(max_size=3))
def test_hashes_are_those_of_the_engine(token_ids: list[int], salt: str) -> None:
    count = len(token_ids) // KV_BLOCK_TOKENS

    assert list(block_hashes(tuple(token_ids), salt, KV_BLOCK_TOKENS)) == [
        key.key for key in block_keys(token_ids, salt, count)
    ]
