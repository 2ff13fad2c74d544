"""Output filter: tokens leave in order, each only with text that is known to be safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.generation.request.output_processor import OutputFilter, open_filters
from inference.engine import TokensGenerated
from inference.errors import SafetyUnavailable
from inference.safety.safety import OutputCheck, SafetyChecker, Verdict
from inference.safety.safety_file import read_safety

RULES = "[[rule]]\nname = 'word'\npattern = 'secret'\n"


def rules(tmp_path: Path, text: str = RULES) -> SafetyChecker:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    found = read_safety(path).checker
    assert found is not None
    return found


def opened(tmp_path: Path) -> OutputFilter:
    [output] = open_filters(rules(tmp_path), 1)
    return output


def token(token_id: int, text: str) -> TokensGenerated:
    return TokensGenerated((token_id,), text)


async def push_all(output: OutputFilter, *events: TokensGenerated) -> list[list[int]]:
    """Return the ids that each push releases."""
    return [
        [token_id for part in await output.push(event) for token_id in part.token_ids]
        for event in events
    ]


async def test_ids_wait_with_their_text(tmp_path: Path) -> None:
    output = opened(tmp_path)

    released = await push_all(
        output, token(1, "a "), token(2, "sec"), token(3, "re"), token(4, "d "), token(5, "b")
    )

    assert released == [[1], [], [], [2, 3, 4], [5]]
    assert output.hit is None


async def test_a_token_whose_text_is_still_to_come_waits_for_it(tmp_path: Path) -> None:
    """Half an emoji, or text that the engine withholds for a stop sequence."""
    output = opened(tmp_path)

    tokens = token(1, "a"), token(2, ""), token(3, "🙂"), token(4, "")
    assert await push_all(output, *tokens) == [[1], [], [2, 3], []]
    assert [part.token_ids for part in await output.finish("")] == [(4,)]


async def test_nothing_of_a_match_leaves_and_nothing_after_it(tmp_path: Path) -> None:
    output = opened(tmp_path)

    tokens = [token(index, text) for index, text in enumerate(("my ", "sec", "ret", " is"), 1)]
    released = await push_all(output, *tokens)

    assert released[0] == [1]
    assert released[1:] == [[], [], []]
    assert output.hit == "word"


async def test_a_match_at_the_end_is_found_and_the_rest_goes_out_otherwise(tmp_path: Path) -> None:
    caught, clean = opened(tmp_path), opened(tmp_path)
    await push_all(caught, token(1, "a sec"))
    await push_all(clean, token(1, "a sec"), token(2, "r"))

    assert (await caught.finish("ret"), caught.hit) == ([], "word")
    assert [(part.token_ids, part.text) for part in await clean.finish("ap")] == [
        ((1,), "a sec"),
        ((2,), "r"),
        ((), "ap"),
    ]


async def test_every_choice_has_a_filter_and_without_rules_there_is_none(tmp_path: Path) -> None:
    assert len(open_filters(rules(tmp_path), 3)) == 3
    assert open_filters(rules(tmp_path, RULES + "applies_to = 'prompt'\n"), 3) == ()


async def test_the_rest_of_a_choice_is_that_choices(tmp_path: Path) -> None:
    """Text without a token, after all tokens have left."""
    third = open_filters(rules(tmp_path), 3)[2]
    await third.push(TokensGenerated((1,), "a ", (), 2))

    assert [(part.text, part.choice_index) for part in await third.finish("b")] == [("b", 2)]


class Mute:
    """Check that passes one piece and never answers again."""

    def __init__(self) -> None:
        self.pushed = 0

    async def push(self, text: str) -> Verdict:
        self.pushed += 1
        if self.pushed > 1:
            raise SafetyUnavailable("no answer", 1.0)
        return Verdict(len(text))

    async def finish(self) -> Verdict:
        raise SafetyUnavailable("no answer", 1.0)

    def fork(self) -> OutputCheck:
        raise AssertionError("nobody asks")


async def test_nothing_leaves_without_an_answer() -> None:
    check: OutputCheck = Mute()
    output = OutputFilter(check)

    assert [part.token_ids for part in await output.push(token(1, "a"))] == [(1,)]
    for last in (output.push(token(2, "b")), output.finish("c")):
        with pytest.raises(SafetyUnavailable):
            await last


async def test_thinking_is_released_at_once_and_not_checked(tmp_path: Path) -> None:
    checked = opened(tmp_path)
    thought = TokensGenerated((1,), "", (), 0, (), "a secret", 1)
    held = TokensGenerated((2,), "sec", (), 0, (), "", 0)

    assert await checked.push(thought) == [thought]
    assert await checked.push(held) == []
    assert await checked.push(thought) == [], "it follows text that waits"
    assert checked.hit is None
