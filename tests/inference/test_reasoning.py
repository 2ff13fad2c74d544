"""The thinking of each model family is split from its answer at the same token however it arrives.

The outputs are written by hand in the form of each family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from inference import engine
from inference.core.engine_core import EngineCore, NumberedEvent
from inference.text.detokenizer import Detokenizer
from inference.text.reasoning import reasoning_format
from inference.text.text_decoder import GivenTextDecoder
from inference.text.tokenizer import ChatMessage
from inference.text.tokenizer import Tokenizer as WeirTokenizer
from tests.inference import checkpoints
from tests.inference.checkpoints import make_checkpoint
from tests.inference.reasoning_families import FAMILIES, THINK, Family
from tests.inference.running import make_core, make_request
from tests.inference.tool_checkpoints import ASSISTANT_ID, END_ID, make_scripted_checkpoint

MARKED = [each for each in FAMILIES if "</think>" in each.output or "[/THINK]" in each.output]
PIECES = ("<think>", "Hm.", "</think>", "\n\n", "no format")


@dataclass
class Parts:
    reasoning: str = ""
    answer: str = ""
    reasoning_token_count: int = 0

    def push(self, detokenizer: Detokenizer, token_id: int) -> bool:
        piece = detokenizer.push(token_id)
        self.reasoning += piece.reasoning
        self.answer += piece.text
        self.reasoning_token_count += piece.reasoning_token_count
        return piece.stopped

    def finish(self, detokenizer: Detokenizer) -> Parts:
        piece = detokenizer.finish()
        answer = self.answer + piece.text
        return Parts(self.reasoning + piece.reasoning, answer, self.reasoning_token_count)


def split(family: Family, ids: list[int]) -> Parts:
    detokenizer = family.decoder.open((), family.prompt_ids, splits=True)
    parts = Parts()
    for token_id in ids:
        parts.push(detokenizer, token_id)
    return parts.finish(detokenizer)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_each_family_is_split(family: Family) -> None:
    parts = split(family, family.ids)

    assert (parts.reasoning, parts.answer) == (family.reasoning, family.answer)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_what_is_sent_before_any_token_is_a_beginning_of_the_same_split(family: Family) -> None:
    """An output cut there, by a limit or a cancel, has the parts that a longer one begins with: the
    end adds at most text that was still undecided."""
    detokenizer, parts = family.decoder.open((), family.prompt_ids, splits=True), Parts()

    for count, token_id in enumerate(family.ids, 1):
        parts.push(detokenizer, token_id)
        assert family.reasoning.startswith(parts.reasoning)
        assert family.answer.startswith(parts.answer)
        assert parts.reasoning_token_count <= count
        ended = split(family, family.ids[:count])
        assert ended.reasoning.startswith(parts.reasoning)
        assert ended.answer.startswith(parts.answer)
        assert ended.reasoning_token_count == parts.reasoning_token_count


@pytest.mark.parametrize("family", MARKED, ids=repr)
def test_all_tokens_up_to_the_closing_marker_count_as_reasoning(family: Family) -> None:
    ids = family.ids
    closing = "[/THINK]" if "[/THINK]" in family.output else "</think>"
    ends = [
        count
        for count in range(len(ids) + 1)
        if closing in family.backend.decode(ids[:count], skip_special_tokens=False)
    ]

    assert split(family, ids).reasoning_token_count == ends[0]


def test_tokens_of_messages_in_other_channels_are_not_reasoning() -> None:
    family = next(each for each in FAMILIES if each.name == "gpt-oss")
    ids = family.ids

    end = ids.index(family.id_of("<|end|>"))
    assert split(family, ids).reasoning_token_count == end + 1
    assert split(family, ids[: end + 5]).reasoning_token_count == end + 1


@pytest.mark.parametrize("family", [each for each in FAMILIES if not each.special], ids=repr)
def test_text_without_token_ids_is_split_at_any_message_border(family: Family) -> None:
    format_ = reasoning_format(family.backend, (family.template,))
    decoder = GivenTextDecoder(format_)
    output = family.output
    cuts = [(output[:end], output[end:]) for end in range(len(output) + 1)]

    for messages in (*cuts, tuple(output)):
        detokenizer, parts = decoder.open((), family.prompt_ids, splits=True), Parts()
        for message in messages:
            detokenizer.feed(message, 1)
            parts.push(detokenizer, 0)
        parts = parts.finish(detokenizer)
        assert (parts.reasoning, parts.answer) == (family.reasoning, family.answer), messages


def test_the_pieces_of_a_split_are_final() -> None:
    """Blanks and parts of a marker wait until it is known what they are."""
    family = next(each for each in FAMILIES if each.name == "nemotron")
    detokenizer, pieces = family.decoder.open((), family.prompt_ids, splits=True), []
    for token_id in family.ids:
        pieces.append(detokenizer.push(token_id))

    assert "".join(piece.reasoning for piece in pieces) == family.reasoning
    assert all(not piece.reasoning.endswith(" ") for piece in pieces[-3:])


def test_a_stop_sequence_in_the_thinking_stops_nothing() -> None:
    family = FAMILIES[0]
    detokenizer = family.decoder.open(("2+2", "four"), family.prompt_ids, splits=True)
    answer, stopped = "", []
    for token_id in family.ids:
        piece = detokenizer.push(token_id)
        answer += piece.text
        stopped.append(piece.stopped)
        if piece.stopped:
            break

    assert answer == "It is 4.\n\n    "
    assert stopped.count(True) == 1


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_a_stop_sequence_of_control_tokens_is_found_in_the_answer(family: Family) -> None:
    """Wherever the token is, the parts are those without it, up to where it stops."""
    stops, control_id = ("<|eos|>",), family.id_of("<|eos|>")
    decoder, ids = family.decoder, family.ids
    stopped_count = 0
    for index in range(len(ids) + 1):
        detokenizer, parts = decoder.open(stops, family.prompt_ids, splits=True), Parts()
        for token_id in ids[:index]:
            parts.push(detokenizer, token_id)
        thinks = detokenizer.thinks
        stopped = parts.push(detokenizer, control_id)
        stopped_count += stopped
        assert stopped or thinks, index
        rest = [] if stopped else ids[index:]
        assert not any(parts.push(detokenizer, token_id) for token_id in rest), index
        expected = split(family, ids[:index] if stopped else ids)
        parts = parts if stopped else parts.finish(detokenizer)
        answer = expected.answer.rstrip("\ufffd")  # a stop drops a torn character
        assert (parts.reasoning, parts.answer) == (expected.reasoning, answer), index
    assert stopped_count or not family.answer


def test_a_stop_sequence_that_names_a_token_of_the_format_ends_the_answer_only() -> None:
    family = next(each for each in FAMILIES if each.name == "gpt-oss, several messages")
    detokenizer = family.decoder.open(("<|end|>",), family.prompt_ids, splits=True)
    parts = Parts()
    stopped = [parts.push(detokenizer, token_id) for token_id in family.ids]

    second = [index for index, id_ in enumerate(family.ids) if id_ == family.id_of("<|end|>")][1]
    assert stopped.index(True) == second
    assert (parts.reasoning[:3], parts.answer[:7]) == ("Hm.", "I look.")


def test_a_marker_that_is_one_token_is_not_found_in_spelled_text() -> None:
    family = FAMILIES[0]
    backend = family.backend
    spelled = [backend.encode(char, add_special_tokens=False).ids for char in "<think>a</think>b"]
    ids = [token_id for each in spelled for token_id in each]
    opening, closing = map(family.id_of, THINK)

    assert split(family, ids) == Parts("", "<think>a</think>b", 0)
    assert split(family, [opening, *ids, closing]) == Parts("<think>a</think>b", "", len(ids) + 2)


def test_an_output_is_not_split_without_its_prompt() -> None:
    family = FAMILIES[0]
    detokenizer, parts = family.decoder.open(), Parts()
    for token_id in family.ids:
        parts.push(detokenizer, token_id)

    assert parts.finish(detokenizer) == Parts("", family.output, 0)


def test_a_model_without_markers_has_no_format() -> None:
    backend = Tokenizer.from_str(checkpoints._tokenizer_json())

    assert reasoning_format(backend, ("{{ messages[0].content }}",)) is None


def test_only_an_opening_marker_at_the_end_of_the_prompt_begins_the_thinking() -> None:
    family = FAMILIES[0]
    format_ = family.decoder.reasoning
    assert format_ is not None

    def opens(prompt: str) -> bool:
        return format_.opens(family.backend.encode(prompt, add_special_tokens=False).ids)

    assert opens("user <think>")
    assert opens("user <think>\n \n")
    assert not opens("user <think> a")
    assert not opens("<think>\n\n</think>\n\n")
    assert not opens("<think> earlier assistant\n")
    assert not opens("")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that answers the assistant's mark with PIECES."""
    return make_scripted_checkpoint(tmp_path_factory.mktemp("thinking"), PIECES)


@pytest.mark.parametrize("begins", [False, True], ids=["by itself", "by its prompt"])
def test_a_grammar_begins_with_the_answer(thinking: Path, begins: bool) -> None:
    core = make_core(thinking)
    opening = Tokenizer.from_file(str(thinking / "tokenizer.json")).token_to_id("<think>")
    assert opening is not None
    prompt = (ASSISTANT_ID, opening) if begins else (ASSISTANT_ID,)
    form = engine.ResponseFormat(engine.GrammarKind.REGEX, "four|five")
    requested = make_request(prompt, 40, ignore_eos=False, response_format=form)

    core.add(1, replace(requested, splits_reasoning=True))
    events = [event for _, event in drained(core) if isinstance(event, engine.TokensGenerated)]

    assert "".join(event.reasoning for event in events) == "Hm."
    assert "".join(event.text for event in events) in ("four", "five")
    assert sum(event.reasoning_token_count for event in events) == 3 - begins


def test_thinking_under_a_grammar_cannot_end_the_output(thinking: Path) -> None:
    """Even that of a model which wants to end at every token."""
    core = make_core(thinking)
    ends = engine.SamplingParams(logit_bias=((END_ID, 1e6),))
    form = engine.ResponseFormat(engine.GrammarKind.REGEX, "four")
    opening = Tokenizer.from_file(str(thinking / "tokenizer.json")).token_to_id("<think>")
    assert opening is not None
    prompt = (ASSISTANT_ID, opening)
    requested = make_request(prompt, 10, ignore_eos=False, sampling=ends, response_format=form)

    core.add(1, replace(requested, splits_reasoning=True))
    events = [event for _, event in drained(core)]

    texts = [event.text for event in events if isinstance(event, engine.TokensGenerated)]
    assert "".join(texts) == "four"
    assert isinstance(events[-1], engine.SequenceFinished)
    assert events[-1].reason is engine.EngineFinishReason.STOP


def test_a_budget_closes_marks_of_several_tokens(tmp_path: Path) -> None:
    """The model would think until its limit."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<reasoning>"
    checkpoint = make_checkpoint(tmp_path, chat_template=template)
    tokenizer = WeirTokenizer(tmp_path)
    assert tokenizer.reasoning is not None
    assert len(tokenizer.reasoning.closing_ids) > 1
    prompt = tokenizer.encode_chat([ChatMessage("user", "2+2?")])
    requested = make_request(prompt, 60)
    stop = replace(requested.stop, max_reasoning_tokens=5)
    core = make_core(checkpoint.directory)

    core.add(1, replace(requested, splits_reasoning=True, stop=stop))
    events = [event for _, event in drained(core) if isinstance(event, engine.TokensGenerated)]

    count = sum(event.reasoning_token_count for event in events)
    ids = [token_id for event in events for token_id in event.token_ids]
    assert tokenizer.decode(ids[5:count]).strip() == "</reasoning>"
    assert any(event.text for event in events)


def drained(core: EngineCore) -> Iterator[NumberedEvent]:
    while not core.idle:
        yield from core.step()
