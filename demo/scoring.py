"""Whether an answer is right, and whether it is true to the listings; pure Python, for any engine's output."""

import re
from dataclasses import dataclass

from demo.corpus import Case

_MENTION = re.compile(r"\[(\d+)\]")
_NUMBER = re.compile(r"(?<![\d.])\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's marks."""

    hotels: bool  # speaks of exactly the hotels it should, in order
    facts: bool  # holds every fact that the reference answer holds, word by word
    faithful: bool  # every name and number belongs to the hotel that is spoken of
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
    """Each hotel's number goes with its name, and what follows, up to the next hotel, with its figures.

    Numbers of the question and of the search step may stand anywhere.
    """
    hotels = {hotel.index: hotel for hotel in case.hotels}
    common = {*_NUMBER.findall(case.turns[-1].question), str(case.found.fit_count), str(len(case.hotels))}
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
