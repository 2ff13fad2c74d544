"""Scores of answers: correct, and faithful to the listings. Pure Python, for any engine."""

import re
from dataclasses import dataclass

from demo.corpus import Case

_MENTION = re.compile(r"\[(\d+)\]")
_NUMBER = re.compile(r"(?<![\d.])\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Score:
    """Marks of one answer."""

    hotels: bool  # names exactly the expected hotels, in order
    facts: bool  # contains every fact of the reference answer, word by word
    faithful: bool  # every name and number belongs to the hotel that the answer is about
    ended: bool  # stopped by itself

    @property
    def right(self) -> bool:
        return self.hotels and self.facts and self.faithful and self.ended


def score(case: Case, answer: str, ended: bool) -> Score:
    """Mark the answer to the last question of the case."""
    turn = case.turns[-1]
    mentioned = tuple(dict.fromkeys(int(number) for number in _MENTION.findall(answer)))
    return Score(
        hotels=mentioned == turn.listed,
        facts=all(fact in answer for fact in turn.facts),
        faithful=is_faithful(case, answer),
        ended=ended,
    )


def is_faithful(case: Case, answer: str) -> bool:
    """Return whether each hotel's number occurs with its name, followed by its own figures.

    Numbers of the question and of the search step may occur anywhere.
    """
    hotels = {hotel.index: hotel for hotel in case.hotels}
    common = {
        *_NUMBER.findall(case.turns[-1].question),
        str(case.found.fit_count),
        str(len(case.hotels)),
    }
    before, *spoken = _MENTION.split(answer)
    if not set(_NUMBER.findall(before)) <= common:
        return False
    for number, text in zip(spoken[::2], spoken[1::2], strict=True):
        hotel = hotels.get(int(number))
        if hotel is None or not re.match(rf" {re.escape(hotel.name)}(?![\w-])", text):
            return False
        if not set(_NUMBER.findall(text)) <= common | set(_NUMBER.findall(hotel.listing())):
            return False
    return True
