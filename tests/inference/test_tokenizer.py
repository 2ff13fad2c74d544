"""Plain prompts become the ids of the tokenizer's file, by the faster call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.text.tokenizer import Tokenizer
from tests.inference.checkpoints import TinyCheckpoint


def test_a_prompt_has_the_ids_that_encoding_it_alone_gives(tiny: TinyCheckpoint) -> None:
    """Also with the tokens that this tokenizer adds around a prompt."""
    tokenizer = Tokenizer(tiny.directory)

    @given(text=st.text(max_size=200), add_special_tokens=st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        alone = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids

        assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == tuple(alone)

    check()
    assert tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False)
