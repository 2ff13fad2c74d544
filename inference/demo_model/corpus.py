"""The text that the demo model learns from, and the workload that Weir is measured by.

A case is one conversation of a hotel-search copilot: a system prompt, retrieved listings, questions and reference answers.
Everything is drawn from a seed; the same seed gives the same case on every machine. Pure Python: no torch, no tokenizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from typing import TypedDict

from inference.demo_model import phrases, small_talk
from inference.demo_model import vocabulary as words
from inference.demo_model.hotels import LISTING_COUNT_MAX, Hotel, Split, draw_hotels
from inference.demo_model.turns import Turn, draw_turn, look_up_again, recommend, recommend_in_budget

REFERENCE_PROMPT_TOKENS = 1025  # 200 system prompt, 800 listings, 25 question: the workload in `bench`
SYSTEM_PROMPT_TOKENS = 200  # what the chat template makes of SYSTEM_PROMPT, the leading special tokens included

SYSTEM_PROMPT = (
    "You are the hotel search assistant of a travel site. You get hotel listings and a question of a guest. "
    "Answer the question in clear and polite English, and use only what the listings say. "
    "Refer to a hotel by its number and its name, as in the listings. "
    "When a guest asks for a recommendation, first show the hotels that fit, each with its price, its rating and its "
    "distance to the centre. Then choose one of them and say why. "
    "The best rated hotel is the best choice, unless the guest prefers a low price or a short way to the centre. "
    "Always tell the guest when a booking cannot be cancelled. "
    "When none of the hotels fits, say so, and never invent a hotel, a price or an amenity. "
    "When there are no listings, ask the guest for them. "
    "When the question is about something else, say that you can only help with hotels. "
    "Be brief: a few short lines are enough, because most guests read on small screens."
)
_REFERENCE_HOTEL_COUNT = 12  # twelve listings are about 800 tokens
_REFERENCE_DRAW_COUNT_MAX = 500  # about one draw in three is short of the target by less than the notes can fill
_NOTE_TOKENS_MAX = 60  # a longer note would no longer read like one
_OTHER_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You help guests to choose a hotel from the listings.",
    "You are a hotel search assistant. Answer only from the listings.",
    "Answer the question.",
)


class Message(TypedDict):
    """One message of a chat, in the form that chat templates take."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation: what the model sees, and what it should answer."""

    hotels: tuple[Hotel, ...]
    system: str | None
    note: str
    turns: tuple[Turn, ...]

    def context(self) -> str:
        """The listings as they stand in front of the first question; empty when there are none."""
        if not self.hotels:
            return ""
        listings = "\n".join(hotel.listing() for hotel in self.hotels)
        note = f"\n{self.note}" if self.note else ""
        return f"Listings:\n{listings}{note}\n\n"

    def messages(self, turn_count: int | None = None) -> list[Message]:
        """The whole conversation, or what stands before the answer to turn `turn_count` (counted from 1)."""
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for number, turn in enumerate(self.turns[:turn_count], start=1):
            question = f"{self.context()}Question: {turn.question}" if number == 1 and self.hotels else turn.question
            messages.append({"role": "user", "content": question})
            if number != turn_count:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages


def draw_case(rng: Random, split: Split, hotel_count_max: int = LISTING_COUNT_MAX, turn_count_max: int = 9) -> Case:
    """Draw a conversation; one in eight comes without listings."""
    if rng.random() < 0.12:
        return _draw_case_without_listings(rng)
    hotels = draw_hotels(rng, _draw_hotel_count(rng, hotel_count_max), split)
    note = rng.choice(words.NOTES) if rng.random() < 0.35 else ""
    turns: list[Turn] = []
    for _ in range(rng.randint(3, turn_count_max)):
        turns.append(_draw_next_turn(rng, hotels, split, turns))
    return Case(hotels, _draw_system(rng), note, tuple(turns))


def _draw_hotel_count(rng: Random, hotel_count_max: int) -> int:
    """Mostly near the maximum, where the choice is hardest, but every smaller number too."""
    return hotel_count_max - min(rng.randrange(hotel_count_max), rng.randrange(hotel_count_max))


def _draw_next_turn(rng: Random, hotels: tuple[Hotel, ...], split: Split, before: list[Turn]) -> Turn:
    pick = before[-1].pick if before and before[-1].kind != "compare two" else None
    draw = rng.random()
    if pick is not None and draw < 0.2:
        return look_up_again(rng, hotels[pick - 1])
    if draw > 0.94:
        return small_talk.draw_small_talk(rng, listings=True)
    turn = draw_turn(rng, hotels, split)
    return replace(turn, question=f"{phrases.preamble(rng)} {turn.question}") if rng.random() < 0.15 else turn


def _draw_system(rng: Random) -> str | None:
    draw = rng.random()
    if draw < 0.35:
        return SYSTEM_PROMPT
    return rng.choice(_OTHER_SYSTEM_PROMPTS) if draw < 0.65 else None


def _draw_case_without_listings(rng: Random) -> Case:
    turns = tuple(
        small_talk.no_listings(rng, rng.choice(words.CITIES))
        if rng.random() < 0.3
        else small_talk.draw_small_talk(rng, listings=False)
        for _ in range(rng.randint(2, 5))
    )
    return Case((), _draw_system(rng), "", turns)


def evaluation_case(seed: int) -> Case:
    """A full-length case of names that training never saw, with one question."""
    rng = Random(f"evaluation {seed}")
    hotels = draw_hotels(rng, rng.randint(6, LISTING_COUNT_MAX), Split.EVAL)
    return Case(hotels, SYSTEM_PROMPT, "", (draw_turn(rng, hotels, Split.EVAL),))


def evaluation_small_talk(seed: int) -> Case:
    """A message that is no question about a listing, with listings or without."""
    rng = Random(f"evaluation talk {seed}")
    if rng.random() < 0.5:
        hotels = draw_hotels(rng, rng.randint(3, 8), Split.EVAL)
        return Case(hotels, SYSTEM_PROMPT, "", (small_talk.draw_small_talk(rng, listings=True),))
    if rng.random() < 0.3:
        return Case((), SYSTEM_PROMPT, "", (small_talk.no_listings(rng, rng.choice(words.CITIES)),))
    return Case((), SYSTEM_PROMPT, "", (small_talk.draw_small_talk(rng, listings=False),))


def reference_case(seed: int) -> Case:
    """A case of the reference workload, before it is brought to its exact length: one recommendation among twelve."""
    return _draw_reference(Random(f"reference {seed}"))


def _draw_reference(rng: Random) -> Case:
    while True:
        hotels = draw_hotels(rng, _REFERENCE_HOTEL_COUNT, Split.EVAL)
        turn = rng.choice((recommend, recommend_in_budget))(rng, hotels, Split.EVAL)
        if turn is not None and len(turn.listed) >= 3:
            question = f"{phrases.preamble(rng)} {turn.question}"
            return Case(hotels, SYSTEM_PROMPT, "", (replace(turn, question=question),))


def reference_messages(
    seed: int,
    count_tokens: Callable[[list[Message]], int],
    prompt_token_count: int = REFERENCE_PROMPT_TOKENS,
) -> list[Message]:
    """The messages of `sized_reference_case`, ready to be sent."""
    return sized_reference_case(seed, count_tokens, prompt_token_count).messages(1)


def sized_reference_case(
    seed: int,
    count_tokens: Callable[[list[Message]], int],
    prompt_token_count: int = REFERENCE_PROMPT_TOKENS,
) -> Case:
    """A reference case whose templated prompt has exactly `prompt_token_count` tokens.

    `count_tokens` renders messages with the chat template, generation prompt added, and counts. Cases are drawn until
    one falls a little short; notes below its listings then make up what is missing.
    Raises: ValueError if no case can be brought to that size.
    """
    rng = Random(f"reference {seed}")
    for _ in range(_REFERENCE_DRAW_COUNT_MAX):
        case = _draw_reference(rng)
        missing = prompt_token_count - count_tokens(case.messages(1))
        if missing == 0:
            return case
        if 0 < missing <= _NOTE_TOKENS_MAX:
            for note in _notes_of_about(missing, case, count_tokens):
                candidate = replace(case, note=note)
                if count_tokens(candidate.messages(1)) == prompt_token_count:
                    return candidate
    raise ValueError(f"no reference case of {prompt_token_count} tokens for seed {seed}")


def _notes_of_about(missing: int, case: Case, count_tokens: Callable[[list[Message]], int]) -> Iterator[str]:
    """Choices of notes that together have about that many tokens; joining them can change a count by one."""
    bare = count_tokens(case.messages(1))
    sizes = {note: count_tokens(replace(case, note=note).messages(1)) - bare for note in words.NOTES}
    for note_count in (1, 2, 3, 4):
        for notes in combinations(words.NOTES, note_count):
            if abs(sum(sizes[note] for note in notes) - missing) <= note_count:
                yield " ".join(notes)
