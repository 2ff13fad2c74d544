"""Text in pieces equals text at once; stop sequences are found across pieces."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from inference.errors import CheckpointInvalid
from inference.text.detokenizer import TextPiece
from inference.text.text_decoder import TextDecoder, _byte_alphabet
from tests.inference import checkpoints

SPECIAL_IDS = frozenset({1, 2})
PIECES = (
    "▁",
    "▁▁",
    "▁a",
    "a",
    "b",
    "▁the",
    "é",
    "x▁y",
    "\N{REPLACEMENT CHARACTER}",
    "e",
    "\N{COMBINING ACUTE ACCENT}",
    "##b",
    "n't",
    ".",
)

# One of each kind that UTF-8 distinguishes: ASCII, continuations, beginnings of two to four bytes,
# and invalid ones.
BYTE_KINDS = b"\x00A\x80\x9f\xa9\xbf\xc0\xc3\xdf\xe0\xe2\xed\xef\xf0\xf4\xf5\xff"
# Successors of a byte that complete every character that can be completed.
ENDINGS = (
    b"",
    b"A",
    b"\x80",
    b"\x80\x80",
    b"\x80\x80\x80",
    b"\x9f\x80",
    b"\xa0\x80\x80",
    b"\xbf\xbf\xbf",
)
SEQUENCES = [
    bytes(each) for length in (1, 2, 3) for each in itertools.product(BYTE_KINDS, repeat=length)
]
# What published tokenizers and variants of them have; `None` where text cannot be streamed exactly.
REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
STEPS = (
    REPLACE,
    FALLBACK,
    FUSE,
    decoders.Strip(" ", 1, 0),
    decoders.Strip(" ", 2, 0),
    decoders.Strip(" ", 0, 1),
    decoders.Metaspace(),
    decoders.Metaspace(prepend_scheme="never"),
    decoders.Replace("a", "bb"),
    decoders.WordPiece(),
    decoders.WordPiece(cleanup=False),
    decoders.BPEDecoder(),
    decoders.CTC(),
    decoders.ByteLevel(),
)


@dataclass(frozen=True)
class Case:
    """Tokenizer of one family; `ids` are those worth drawing."""

    name: str
    backend: Tokenizer
    special_ids: frozenset[int]

    def __repr__(self) -> str:
        return self.name


def byte_level() -> Case:
    backend = Tokenizer.from_str(checkpoints._tokenizer_json())
    backend.add_tokens(
        [AddedToken("plain added é", normalized=False), AddedToken("日本", normalized=False)]
    )
    return Case("byte-level", backend, frozenset(range(len(checkpoints.SPECIAL_TOKENS))))


def sentencepiece_like(name: str, decoder: decoders.Decoder) -> Case:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {
        f"<0x{byte:02X}>": 3 + byte for byte in range(256)
    }
    vocabulary |= {piece: len(vocabulary) + index for index, piece in enumerate(PIECES)}
    backend = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Case(name, backend, SPECIAL_IDS)


CASES = [
    byte_level(),
    sentencepiece_like(
        "llama 2",
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    ),
    sentencepiece_like(
        "no leading strip",
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    sentencepiece_like("metaspace", decoders.Metaspace()),
    sentencepiece_like("word pieces", decoders.WordPiece()),
]


def ids_of(case: Case) -> st.SearchStrategy[list[int]]:
    """Draw random ids mixed with the ids of valid characters, whole and torn."""
    size = case.backend.get_vocab_size()
    emoji = [
        case.backend.encode(text, add_special_tokens=False).ids
        for text in ("🙂", "北京", "Zoë", " a", "👩‍👩‍👧")
    ]
    pieces = st.one_of(
        st.integers(0, size - 1).map(lambda token_id: [token_id]),
        st.integers(max(size - len(PIECES), 0), size - 1).map(lambda token_id: [token_id]),
        st.sampled_from(emoji),
        st.sampled_from(emoji).map(lambda ids: ids[:1]),
    )
    return st.lists(pieces, max_size=12).map(
        lambda lists: [token_id for ids in lists for token_id in ids]
    )


def stream_text(
    case: Case, ids: list[int], stops: tuple[str, ...] = ()
) -> tuple[str, str, list[str]]:
    """Return all text, the stop that followed it, and the pieces."""
    detokenizer = TextDecoder(case.backend, case.special_ids, "tokenizer.json").open(stops)
    pieces = []
    for token_id in ids:
        piece = detokenizer.push(token_id)
        pieces.append(piece.text)
        if piece.stopped:
            return "".join(pieces), piece.stop, pieces
    piece = detokenizer.finish()
    pieces.append(piece.text)
    return "".join(pieces), piece.stop, pieces


def first_completed_stop(text: str, stops: tuple[str, ...]) -> str:
    """Return by brute force the first completed, longest stop."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return max(found, key=len)
    return ""


@pytest.mark.parametrize("case", CASES, ids=repr)
@given(data=st.data())
def test_pieces_together_equal_the_text_decoded_at_once(case: Case, data: st.DataObject) -> None:
    ids = data.draw(ids_of(case))

    text, stop, _ = stream_text(case, ids)

    assert text == case.backend.decode(ids, skip_special_tokens=True)
    assert not stop


@pytest.mark.parametrize("case", CASES[:2], ids=repr)
@given(data=st.data())
def test_a_stop_sequence_cuts_where_brute_force_says(case: Case, data: st.DataObject) -> None:
    ids = data.draw(ids_of(case))
    whole = case.backend.decode(ids, skip_special_tokens=True)
    parts = [
        whole[start : start + length] for start in range(len(whole)) for length in (1, 2, 3, 5)
    ]
    candidates = st.sampled_from([part for part in parts if part] or ["x"]) | st.text(
        "a b🙂", min_size=1, max_size=3
    )
    stops = tuple(data.draw(st.lists(candidates, min_size=1, max_size=3)))

    text, stop, _ = stream_text(case, ids, stops)

    expected = first_completed_stop(whole, stops)
    assert (text, stop) == (whole.partition(expected)[0] if expected else whole, expected)


def byte_ids(case: Case) -> list[int]:
    """Return the id of the token of each single byte."""
    vocabulary = case.backend.get_vocab(with_added_tokens=True)
    if case.name == "byte-level":
        return [vocabulary[_byte_alphabet()[byte]] for byte in range(256)]
    return [vocabulary[f"<0x{byte:02X}>"] for byte in range(256)]


@pytest.mark.parametrize("case", CASES[:3], ids=repr)
def test_every_sequence_of_three_kinds_of_bytes_streams_as_it_decodes_at_once(case: Case) -> None:
    """Valid, torn, overlong, surrogates: 5,219 sequences, each before a letter and at the end."""
    ids, decoder = byte_ids(case), TextDecoder(case.backend, case.special_ids, "tokenizer.json")
    letter = ids[ord("z")]
    for data in SEQUENCES:
        for tokens in ([ids[byte] for byte in data], [ids[byte] for byte in data] + [letter]):
            detokenizer = decoder.open()
            text = (
                "".join(detokenizer.push(token_id).text for token_id in tokens)
                + detokenizer.finish().text
            )
            assert text == case.backend.decode(tokens, skip_special_tokens=True), data


@settings(deadline=None)
@example(data=b"\xed\xa0")
@example(data=b"\xed\xa0\x80A")
@given(
    data=st.one_of(
        st.binary(max_size=24),
        st.text(max_size=12).map(str.encode),
        st.text(max_size=6).map(lambda t: t.encode()[:-1]),
    )
)
def test_byte_level_text_is_that_of_the_bytes_and_as_early_as_it_can_be(data: bytes) -> None:
    """Compared with Python's decoder after each byte: final text is emitted at once."""
    case = CASES[0]
    ids = byte_ids(case)
    detokenizer = TextDecoder(case.backend, case.special_ids, "tokenizer.json").open()

    text = ""
    for count, byte in enumerate(data, 1):
        text += detokenizer.push(ids[byte]).text
        possible = [(data[:count] + end).decode(errors="replace") for end in ENDINGS]
        assert all(one.startswith(text) for one in possible)
        longer = possible[0][: len(text) + 1]
        # For half a surrogate, which no valid text has, Python's decoder also needs the third byte.
        half_surrogate = count > 1 and data[count - 2] == 0xED and 0xA0 <= byte <= 0xBF
        assert (
            half_surrogate
            or len(longer) == len(text)
            or not all(one.startswith(longer) for one in possible)
        )

    assert text + detokenizer.finish().text == data.decode(errors="replace")


@settings(deadline=None, max_examples=40)
@given(
    words=st.lists(
        st.sampled_from(
            ["👩‍👩‍👧", "🏳️‍🌈", "e\u0301", "é", "\u0915\u094d\u0937", "北京", "🇸🇪", " ", "a"]
        ),
        max_size=8,
    )
)
@pytest.mark.parametrize("case", CASES[:2], ids=repr)
def test_characters_of_many_code_points_come_out_whole(case: Case, words: list[str]) -> None:
    """Joined emoji, combining marks, conjuncts and flags, byte by byte."""
    text = "".join(words)
    alphabet = byte_ids(case)
    ids = [alphabet[byte] for byte in text.encode()]

    streamed, _, pieces = stream_text(case, ids)

    assert streamed == case.backend.decode(ids)
    assert streamed.lstrip(" ") == text.lstrip(" ")
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_half_an_emoji_is_held_back_until_it_is_whole() -> None:
    case = CASES[0]
    ids = case.backend.encode("ok 🙂!", add_special_tokens=False).ids

    _, _, pieces = stream_text(case, ids)

    assert "".join(pieces) == "ok 🙂!"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert len([piece for piece in pieces if not piece]) >= 2, "the emoji is several tokens here"


def test_half_an_emoji_at_the_end_is_flushed_as_the_whole_decode_would() -> None:
    case = CASES[0]
    ids = case.backend.encode("ok 🙂", add_special_tokens=False).ids[:-1]

    text, _, pieces = stream_text(case, ids)

    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"
    assert text == case.backend.decode(ids)


def test_a_possible_stop_is_held_back_no_longer_than_it_is_possible() -> None:
    case = CASES[0]
    ids = [
        case.backend.encode(character, add_special_tokens=False).ids[0] for character in "abXabcd"
    ]

    text, stop, pieces = stream_text(case, ids, ("abcd",))

    assert (text, stop) == ("abX", "abcd")
    assert pieces == ["", "", "abX", "", "", "", ""]


def test_special_tokens_add_no_text() -> None:
    text, _, _ = stream_text(
        CASES[0], [1, 4, *CASES[0].backend.encode("hi", add_special_tokens=False).ids, 2]
    )

    assert text == "hi"


@pytest.mark.parametrize("case", CASES, ids=repr)
@given(data=st.data(), stops=st.sampled_from([(), ("stop",)]))
def test_tokens_pushed_together_add_the_text_of_single_ones(
    case: Case, data: st.DataObject, stops: tuple[str, ...]
) -> None:
    batches = data.draw(st.lists(ids_of(case), max_size=4))
    decoder = TextDecoder(case.backend, case.special_ids, "tokenizer.json")
    together, apart = decoder.open(stops), decoder.open(stops)

    for ids in batches:
        single = "".join([apart.push(token_id).text for token_id in ids])
        text = together.push_all(ids)
        has_special = not case.special_ids.isdisjoint(ids)
        assert (text is None) == bool(case is not CASES[0] or stops or has_special)
        if text is None:
            text = "".join([together.push(token_id).text for token_id in ids])
        assert text == single
    assert together.finish() == apart.finish()


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()

    with pytest.raises(CheckpointInvalid, match="CTC"):
        TextDecoder(backend, frozenset(), "tokenizer.json")


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_decoder_is_streamed_exactly_or_refused(data: st.DataObject) -> None:
    """Random sequences of the steps that the tokenizers library has."""
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4))
    case = sentencepiece_like("drawn", decoders.Sequence(steps))
    try:
        decoder = TextDecoder(case.backend, case.special_ids, "tokenizer.json")
    except CheckpointInvalid:
        return
    prompt, output = data.draw(ids_of(case)), data.draw(ids_of(case))

    detokenizer = decoder.open((), [])
    pieces = [detokenizer.push(token_id).text for token_id in prompt + output]
    text = "".join(pieces) + detokenizer.finish().text

    assert text == case.backend.decode(prompt + output)


def output_text(
    case: Case, prompt: list[int], output: list[int], stops: tuple[str, ...] = ()
) -> str:
    decoder = TextDecoder(case.backend, case.special_ids, "tokenizer.json")
    detokenizer = decoder.open(stops, prompt)
    text = ""
    for token_id in output:
        piece = detokenizer.push(token_id)
        text += piece.text
        if piece.stopped:
            return text
    return text + detokenizer.finish().text


def valid_ids(case: Case) -> st.SearchStrategy[list[int]]:
    """Draw ids of valid text."""
    texts = ("▁the", "a", "é", " ", "🙂", "北京", "Zoë", "\n")
    encoded = [case.backend.encode(text, add_special_tokens=False).ids for text in texts]
    parts = st.lists(st.sampled_from([*encoded, *([each] for each in case.special_ids)]))
    return parts.map(lambda lists: [token_id for ids in lists for token_id in ids])


@pytest.mark.parametrize("case", CASES, ids=repr)
@settings(deadline=None)
@given(data=st.data())
def test_an_output_is_what_its_tokens_add_to_the_prompt(case: Case, data: st.DataObject) -> None:
    prompt, output = data.draw(valid_ids(case)), data.draw(valid_ids(case))
    decoder = TextDecoder(case.backend, case.special_ids, "tokenizer.json")

    both = decoder.text_of(prompt) + output_text(case, prompt, output)

    assert both == case.backend.decode(prompt + output)


@pytest.mark.parametrize("case", CASES[:3], ids=repr)
def test_a_character_torn_between_prompt_and_output_is_decoded_apart(case: Case) -> None:
    vocabulary, alphabet = case.backend.get_vocab(), byte_ids(case)
    first, *rest = [alphabet[byte] for byte in "é".encode()]
    prompt = [vocabulary.get("a", alphabet[ord("a")]), first]

    assert output_text(case, prompt, [*rest, *prompt[:1]]) == "\ufffda"
    assert output_text(case, prompt, prompt[:1]) == "a"


def test_the_first_word_of_an_output_keeps_its_blank() -> None:
    case = CASES[1]
    vocabulary = case.backend.get_vocab()
    the, a = vocabulary["▁the"], vocabulary["▁a"]

    assert output_text(case, [the], [a]) == " a"
    assert output_text(case, [the, 2, 1], [a]) == " a", "control tokens have no text"
    assert output_text(case, [1], [a]) == "a", "nothing precedes it"
    assert output_text(case, [the], [a], (" a",)) == ""


@pytest.mark.parametrize("case", CASES[:3], ids=repr)
@settings(deadline=None)
@given(data=st.data())
def test_positions_are_those_of_the_text(case: Case, data: st.DataObject) -> None:
    """Texts of tokens add up to the text, and each is where its place says."""
    prompt, output = data.draw(valid_ids(case)), data.draw(valid_ids(case))
    if case is CASES[0]:  # others decode a torn character at the end as replacements of its run
        output = output[: data.draw(st.integers(0, len(output)))]
    decoder = TextDecoder(case.backend, case.special_ids, "tokenizer.json")
    text = output_text(case, prompt, output)

    opened = decoder.spans(prompt)
    indexes = [opened.add(token_id) for token_id in output]

    assert "".join(index.text for index in indexes) + opened.finish() == text
    lengths = [len(index.text) for index in indexes]
    assert [index.offset for index in indexes] == [sum(lengths[:at]) for at in range(len(indexes))]


@pytest.mark.parametrize("case", CASES[:2], ids=repr)
def test_the_last_part_of_a_character_adds_it(case: Case) -> None:
    alphabet = byte_ids(case)
    opened = TextDecoder(case.backend, case.special_ids, "tokenizer.json").spans()

    indexes = [opened.add(alphabet[byte]) for byte in "a🙂\n".encode() + b"\xf0\xe2"]

    assert [index.text for index in indexes] == ["a", "", "", "", "🙂", "\n", "", "\ufffd"]
    assert [index.offset for index in indexes] == [0, 1, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("case", CASES[:2], ids=repr)
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("{control}",), "a\n"),
        (("\n{control}",), "a"),
        (("{control}b",), "a\n"),
        (("\n{control}b", "{control}"), "a\n"),
        (("\n{control}b",), "a"),
        (("{control}a", "x"), "a\nb"),
        (("b",), "a\n"),
    ],
)
def test_a_stop_sequence_may_name_control_tokens(
    case: Case, stops: tuple[str, ...], text: str
) -> None:
    """Control tokens have no text, but a stop sequence that names one ends the output there."""
    control_id = max(case.special_ids)
    control = str(case.backend.id_to_token(control_id))
    named = tuple(stop.replace("{control}", control) for stop in stops)
    alphabet = byte_ids(case)
    ids = [alphabet[ord("a")], alphabet[ord("\n")], control_id, alphabet[ord("b")]]

    assert output_text(case, [], ids, named) == text
    spelled = [alphabet[byte] for byte in control.encode()]
    assert output_text(case, [], [*spelled, *ids], (control,)) == "", "as text it matches, too"


def test_a_control_token_does_not_stop_before_stops_are_searched() -> None:
    case = CASES[0]
    control = str(case.backend.id_to_token(2))
    detokenizer = TextDecoder(case.backend, case.special_ids, "tokenizer.json").open((control,))

    assert detokenizer.push(2, may_stop=False) == TextPiece("")
    assert detokenizer.push(2) == TextPiece("", control)
