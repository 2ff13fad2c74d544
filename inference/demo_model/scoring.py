"""Whether an answer is right, and whether it is true to the listings; pure Python, for any engine's output."""

import re
from dataclasses import dataclass

from inference.demo_model.corpus import Case
from inference.demo_model.hotels import Hotel

_MENTION = re.compile(r"\[(\d+)\]")
_FIGURES = ("Price:", "Rating:", "Distance:")  # how a line with one figure of every hotel begins
_NUMBER = re.compile(r"(?<![\d.])\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Score:
    """One answer's marks."""

    candidates: bool  # walked through exactly the hotels that fit, in listing order
    choice: bool  # settled on the right hotel, or on none where none fits
    facts: bool  # holds the facts that were asked for
    faithful: bool  # every name and number belongs to the hotels it speaks of
    ended: bool  # stopped by itself

    @property
    def right(self) -> bool:
        return self.candidates and self.choice and self.facts and self.faithful and self.ended


def score(case: Case, answer: str, ended: bool) -> Score:
    """Mark the answer to the first question of the case."""
    turn = case.turns[0]
    walked: list[str] = []
    rest: list[str] = []
    for line in answer.split("\n"):
        if line.startswith("- "):
            walked.append(line)
        elif not line.startswith(_FIGURES):
            rest.append(line)
    listed = tuple(int(match[1]) for line in walked if (match := _MENTION.search(line)))
    choice = _MENTION.search("\n".join(rest))
    return Score(
        candidates=listed == turn.listed,
        choice=(int(choice[1]) if choice else None) == turn.pick,
        facts=all(fact in answer for fact in turn.facts),
        faithful=is_faithful(case, answer),
        ended=ended,
    )


def is_faithful(case: Case, answer: str) -> bool:
    """Numbers are those of the hotels the answer mentions, or of the question; names stand with their own number."""
    hotels = {hotel.index: hotel for hotel in case.hotels}
    known = set(_NUMBER.findall(case.turns[0].question))
    for match in _MENTION.finditer(answer):
        hotel = hotels.get(int(match[1]))
        if hotel is None or not _mention_is_true(answer, match, hotel):
            return False
        known |= set(_NUMBER.findall(hotel.listing()))
    for line in answer.split("\n"):
        if line.startswith("- ") and not _bullet_is_true(line, hotels):
            return False
    return set(_NUMBER.findall(_MENTION.sub("", answer))) <= known


def _mention_is_true(answer: str, match: re.Match[str], hotel: Hotel) -> bool:
    """A number in brackets goes with its hotel's name, before or after, or with one of its figures."""
    if answer[: match.start()].endswith(f"{hotel.name} "):
        return True
    figures = (hotel.name, f"${hotel.price}", hotel.rating, hotel.distance)
    return any(answer.startswith(f" {figure}", match.end()) for figure in figures)


def _bullet_is_true(line: str, hotels: dict[int, Hotel]) -> bool:
    match = _MENTION.search(line)
    hotel = hotels.get(int(match[1])) if match else None
    if hotel is None:
        return False
    figures = f"{hotel.cost}, rated {hotel.rating}, {hotel.distance} from the centre"
    return line.endswith(figures) and (hotel.label in line or hotel.citation in line)
