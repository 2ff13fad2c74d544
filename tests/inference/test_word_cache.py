"""Encoding by words returns exactly the ids of the library."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from inference.text import word_cache
from inference.text.word_cache import GPT2_PATTERN, WORDS_MAX, WordCache, ascii_pattern

DEMO = Path("inference/demo_model/weights/tokenizer.json")
CORPUS = [path.read_text() for path in (Path("README.md"), Path("infra/walk.py"))]
# Expressions of published tokenizers: Llama 3, Qwen 2 and 3, GPT-OSS and Llama 4.
END_OF_CL100K = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = rf"{SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{END_OF_CL100K}"
QWEN = rf"{SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{END_OF_CL100K}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{SHORT_FORMS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{SHORT_FORMS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<tool>")


def trained(pattern: str | None, *, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """Return a small byte-level tokenizer. pattern: splits the text; None: GPT-2's own."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = (
        byte_level
        if pattern is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in MARKERS])
    return tokenizer


def with_begin(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer; it adds a token before and after each text."""
    begin, end = (tokenizer.token_to_id(each) for each in MARKERS[:2])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(
                f"{MARKERS[0]} $A {MARKERS[1]}",
                special_tokens=[(MARKERS[0], begin), (MARKERS[1], end)],
            ),
        ]
    )
    return tokenizer


def composing(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer; it normalizes as Qwen's does."""
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


KNOWN = {
    "demo": tokenizers.Tokenizer.from_file(str(DEMO)),
    "GPT-2": trained(None),
    "Llama 3": with_begin(trained(LLAMA_3, ignore_merges=True)),
    "Qwen": composing(trained(QWEN)),
    "GPT-OSS": trained(GPT_OSS),
}
ascii_text = st.text(st.characters(max_codepoint=0x7F), max_size=60)
prose = st.lists(
    st.one_of(
        ascii_text,
        st.sampled_from([*MARKERS, "<|end|>", "<tool_call>", *(text[:3000] for text in CORPUS)]),
        st.sampled_from(["it's", "WE'LL", " \n\n x", "\t\t\r\n", "  ", "1234.5", "[12]", "€"]),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", KNOWN)
def test_a_text_has_the_ids_of_the_library(name: str) -> None:
    """Also with markers in it, and when its words are known already."""
    tokenizer = KNOWN[name]
    cache = WordCache(tokenizer)

    @given(text=prose, add_special_tokens=st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        expected = tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

        assert cache.encode(text, add_special_tokens=add_special_tokens) == expected
        assert cache.encode(text, add_special_tokens=add_special_tokens) == expected

    check()
    assert cache._words is not None, "this tokenizer is encoded by words"
    assert cache._ids, "words are kept"


def test_every_ascii_character_between_others_has_the_ids_of_the_library() -> None:
    """Each pair of characters at the border of two words, for each expression."""
    for tokenizer in KNOWN.values():
        cache = WordCache(tokenizer)
        for first in map(chr, range(128)):
            text = "".join(f"a{first}{second}b {first}{second} " for second in map(chr, range(128)))

            assert cache.encode(text, add_special_tokens=False) == tuple(
                tokenizer.encode(text, add_special_tokens=False).ids
            )


def test_a_wrong_translation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the library fails for a wrong set: the tests above can fail."""
    monkeypatch.setitem(word_cache.ASCII_SETS, "L", "A-Za-df-z")
    tokenizer = trained(GPT2_PATTERN)

    assert WordCache(tokenizer).encode("the tenth", add_special_tokens=False) != tuple(
        tokenizer.encode("the tenth", add_special_tokens=False).ids
    )


def lower_case(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def prefix_space(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def metaspace(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


def no_split(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.pre_tokenizer = None


def two_splits(tokenizer: tokenizers.Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def stripping_marker(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<strip>", lstrip=True, normalized=False)])


@pytest.mark.parametrize(
    "change", [lower_case, prefix_space, metaspace, no_split, two_splits, stripping_marker]
)
def test_other_tokenizers_are_left_to_the_library(change: object) -> None:
    tokenizer = trained(None)
    assert callable(change)
    change(tokenizer)
    cache = WordCache(tokenizer)
    text = "A Title  <strip> 12 x<tool>y\n"

    assert cache._words is None
    assert cache.encode(text, add_special_tokens=True) == tuple(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        r"\p{Han}+|\s",  # an unknown property
        r"\p{N}{1,3}+|\s",  # possessive in `re` only
        r"[a-z&&[^b]]+",  # an intersection of sets
        r"(\p{L}+)\1",  # a group
        r"\P{L}+",
        r"[\p{Lo}]+|\s",  # a set without ASCII characters
        r"\h+",  # hexadecimal digits in one engine only
    ],
)
def test_expressions_that_may_differ_are_left_to_the_library(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def test_text_between_words_is_left_to_the_library() -> None:
    tokenizer = trained(r"\p{L}+|\p{N}+")
    cache = WordCache(tokenizer)

    assert cache._words is not None
    assert cache.encode("ab, 12 ... c", add_special_tokens=False) == tuple(
        tokenizer.encode("ab, 12 ... c", add_special_tokens=False).ids
    )


def test_the_cache_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WORDS_MAX * 200 < 20e6, "bytes, with about 200 for each word"
    monkeypatch.setattr(word_cache, "WORDS_MAX", 4)
    tokenizer = trained(None)
    cache = WordCache(tokenizer)
    for number in range(20):
        text = f"word{number} {'x' * 100}"

        assert cache.encode(text, add_special_tokens=False) == tuple(
            tokenizer.encode(text, add_special_tokens=False).ids
        )
        assert len(cache._ids) <= 4
        assert all(len(word) <= word_cache.WORD_CHARS_MAX for word in cache._ids)
