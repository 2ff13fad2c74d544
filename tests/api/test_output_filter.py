"""Tokens leave in order, each only with text that is known to be safe; a checker that is slow is asked in a thread."""

from __future__ import annotations

import threading
from pathlib import Path

from api.output_filter import OutputFilter, open_filters
from inference.engine import TokensGenerated
from inference.safety import OutputCheck, RuleChecker, Verdict, read_rules

RULES = "[[rule]]\nname = 'word'\npattern = 'secret'\n"


def rules(tmp_path: Path, text: str = RULES) -> RuleChecker:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return read_rules(path)


def opened(tmp_path: Path) -> OutputFilter:
    [output] = open_filters(rules(tmp_path), 1)
    return output


def token(token_id: int, text: str) -> TokensGenerated:
    return TokensGenerated((token_id,), text)


async def push_all(output: OutputFilter, *events: TokensGenerated) -> list[list[int]]:
    """Ids that each push lets go."""
    return [[token_id for part in await output.push(event) for token_id in part.token_ids] for event in events]


async def test_ids_wait_with_their_text(tmp_path: Path) -> None:
    output = opened(tmp_path)

    released = await push_all(output, token(1, "a "), token(2, "sec"), token(3, "re"), token(4, "d "), token(5, "b"))

    assert released == [[1], [], [], [2, 3, 4], [5]]
    assert output.hit is None


async def test_a_token_whose_text_is_still_to_come_waits_for_it(tmp_path: Path) -> None:
    """Half an emoji, or what the engine holds back for a stop sequence."""
    output = opened(tmp_path)

    assert await push_all(output, token(1, "a"), token(2, ""), token(3, "🙂"), token(4, "")) == [[1], [], [2, 3], []]
    assert [part.token_ids for part in await output.finish("")] == [(4,)]


async def test_nothing_of_a_match_leaves_and_nothing_after_it(tmp_path: Path) -> None:
    output = opened(tmp_path)

    released = await push_all(output, token(1, "my "), token(2, "sec"), token(3, "ret"), token(4, " is"))

    assert released[0] == [1]
    assert released[1:] == [[], [], []]
    assert output.hit == "word"


async def test_a_match_at_the_end_is_found_and_the_rest_goes_out_otherwise(tmp_path: Path) -> None:
    caught, clean = opened(tmp_path), opened(tmp_path)
    await push_all(caught, token(1, "a sec"))
    await push_all(clean, token(1, "a sec"), token(2, "r"))

    assert (await caught.finish("ret"), caught.hit) == ([], "word")
    assert [(part.token_ids, part.text) for part in await clean.finish("ap")] == [((1,), "a sec"), ((2,), "r"), ((), "ap")]


async def test_every_choice_has_a_filter_and_without_rules_there_is_none(tmp_path: Path) -> None:
    assert len(open_filters(rules(tmp_path), 3)) == 3
    assert open_filters(rules(tmp_path, RULES + "applies_to = 'prompt'\n"), 3) == ()
    assert open_filters(None, 3) == ()


class SlowChecker:
    """Notes the threads that it is asked in."""

    quick = False

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def check_prompt(self, text: str) -> str | None:
        return None

    def open_output(self) -> OutputCheck:
        return self

    def push(self, text: str) -> Verdict:
        self.threads.add(threading.get_ident())
        return Verdict(len(text))

    def finish(self) -> Verdict:
        self.threads.add(threading.get_ident())
        return Verdict(0)


async def test_a_slow_checker_never_runs_on_the_event_loop() -> None:
    checker = SlowChecker()
    output = OutputFilter(checker, checker.open_output())

    await push_all(output, token(1, "a"))
    await output.finish("b")

    assert checker.threads
    assert threading.get_ident() not in checker.threads
