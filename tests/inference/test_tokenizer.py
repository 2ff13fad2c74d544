"""Plain prompts become the ids that the tokenizer's file says, by the quicker of the library's two ways."""

from __future__ import annotations

from functools import lru_cache

from hypothesis import given
from hypothesis import strategies as st

from api.settings import bundled_models
from inference.tokenizer import Tokenizer


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    [directory] = bundled_models().values()
    return Tokenizer(directory)


@given(text=st.text(max_size=200), add_special_tokens=st.booleans())
def test_a_prompt_has_the_ids_that_encoding_it_alone_gives(text: str, add_special_tokens: bool) -> None:
    alone = tokenizer().backend.encode(text, add_special_tokens=add_special_tokens).ids

    assert tokenizer().encode(text, add_special_tokens=add_special_tokens) == tuple(alone)
    assert tokenizer().count(text, add_special_tokens=add_special_tokens) == len(alone)
