"""The bound that refuses prompts by size never exceeds the true token count."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from inference.text.tokenizer import ChatMessage, TokenBound, Tokenizer, TokenLimitExceeded
from tests.inference.checkpoints import make_checkpoint

DEMO = Path("inference/demo_model/weights")
TRAINING = [
    "the quiet garden of the old harbour  \n\n        spaces",
    "naïve café 北京 crème brûlée",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
] * 3

DEMO_TOKENIZER = Tokenizer(DEMO)


def byte_level(
    *, normalizer: normalizers.Normalizer | None = None, added: tuple[AddedToken, ...] = ()
) -> Backend:
    """Return byte-level BPE, as of Llama 3 and Qwen."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TRAINING, trainer)
    backend.normalizer = normalizer
    backend.add_tokens([*added])
    return backend


def byte_fallback(*, metaspace: bool) -> Backend:
    """Return BPE of characters with a byte fallback, as of Llama 2."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, limit_alphabet=30, show_progress=False
    )
    backend.train_from_iterator(TRAINING, trainer)
    raw = backend.to_str().replace('"special":true', '"special":false')
    backend = Backend.from_str(raw)
    if not metaspace:
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "the demo model": lambda: Backend.from_file(str(DEMO / "tokenizer.json")),
    "byte level": byte_level,
    "byte level that composes": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte level with tokens that strip": lambda: byte_level(
        added=(AddedToken("<x>", lstrip=True, rstrip=True),)
    ),
    "byte level with a long token": lambda: byte_level(
        added=(AddedToken("<a rather long token>"),)
    ),
    "byte fallback": lambda: byte_fallback(metaspace=False),
    "byte fallback, metaspace": lambda: byte_fallback(metaspace=True),
}
MADE = {name: make() for name, make in BACKENDS.items()}
pieces = st.sampled_from(
    [
        "<x>",
        "<a rather long token>",
        " " * 40,
        "\n" * 9,
        "a" * 70,
        "▁",
        "é",
        "e\u0301",
        "\u1100\u1161\u11a8",
        "\u1f82",
        "K",
        "<0x41>",
    ]
)
combining = st.text(st.characters(min_codepoint=0x300, max_codepoint=0x345), max_size=8)
texts = st.lists(pieces | combining | st.text(max_size=30), max_size=12).map("".join)


@pytest.mark.parametrize("name", BACKENDS)
@settings(deadline=None)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    backend = MADE[name]
    bound = TokenBound(backend)
    count = len(backend.encode(text, add_special_tokens=False).ids)

    assert bound.least_token_count(text) <= count
    most = bound.chars_max(count)
    assert most is None or len(text) <= most


@pytest.mark.parametrize("name", ["byte level that composes", "byte level", "byte fallback"])
@settings(deadline=None)
@given(texts, st.integers(1, 40))
def test_texts_longer_than_a_piece_keep_the_bound(name: str, text: str, size: int) -> None:
    """With very short pieces, which end within composed characters."""
    backend = MADE[name]
    bound = TokenBound(backend)
    total = sum(bound._weight(text[begin : begin + size]) for begin in range(0, len(text), size))

    assert total <= len(backend.encode(text, add_special_tokens=False).ids) + 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda backend: setattr(
            backend, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\s+"), "removed")
        ),
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")),
        lambda backend: setattr(
            backend,
            "normalizer",
            normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]),
        ),
        lambda backend: setattr(backend, "model", models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: Callable[[Backend], None]) -> None:
    backend = byte_level()
    change(backend)
    bound = TokenBound(backend)

    assert bound.chars_max(10) is None
    assert bound.least_token_count("x" * 100_000) == 0


def test_text_that_is_far_too_long_is_refused_untokenized(tmp_path: Path) -> None:
    tokenizer = Tokenizer(DEMO)
    text = "The hotel near the harbour has a quiet garden. " * 80_000
    began_at = time.thread_time()
    with pytest.raises(TokenLimitExceeded) as refusal:
        tokenizer.encode(text, token_count_max=4096)

    assert refusal.value.least_token_count > 4096
    assert time.thread_time() - began_at < 0.05, "tokenizing takes seconds"


@pytest.mark.parametrize("content", ["word " * 2000, "<|end|>" * 2000])
def test_a_conversation_is_measured_as_it_was_rendered(tmp_path: Path, content: str) -> None:
    """Templates may drop text of messages, and placeholders lengthen text only temporarily."""
    tokenizer = Tokenizer(make_checkpoint(tmp_path).directory)
    count = len(tokenizer.encode_chat([ChatMessage("user", content)]))

    assert tokenizer.encode_chat([ChatMessage("user", content)], token_count_max=count)
    with pytest.raises(TokenLimitExceeded):
        tokenizer.encode_chat([ChatMessage("user", content * 100)], token_count_max=count)


@settings(deadline=None)
@given(st.text(min_size=1, max_size=40), st.integers(1, 30), st.integers(1, 400))
def test_the_beginning_of_a_long_text_equals_the_whole(unit: str, limit: int, times: int) -> None:
    tokenizer = DEMO_TOKENIZER
    text = (unit + " ") * times
    whole = tokenizer.encode(text)

    ids, truncated = tokenizer.encode_within(text, limit)

    assert truncated == (len(whole) > limit)
    assert ids == whole[:limit]
