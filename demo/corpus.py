"""Training text of the demo model, and the workload with which Weir is measured.

A case is one conversation of a hotel-search copilot: a system prompt, the result of the search
step, questions and reference answers. Everything is drawn from a seed; the same seed gives the
same case on every machine. Pure Python: no torch, no tokenizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

from demo import phrases, small_talk
from demo import vocabulary as words
from demo.hotels import LISTING_COUNT_MAX, Hotel, Split, draw_hotels
from demo.messages import Message
from demo.turns import Found, Turn, draw_turn, look_up_again, recommend, recommend_in_budget

# 200 system prompt, 800 listings, 25 question: the workload in `bench`.
REFERENCE_PROMPT_TOKENS = 1025
# SYSTEM_PROMPT after the chat template, including the leading special tokens.
SYSTEM_PROMPT_TOKENS = 200

SYSTEM_PROMPT = (
    "You are the hotel search assistant of a travel site. You get hotel listings and a question of"
    " a guest. Answer the question in clear and polite English, and use only what the listings say."
    " The listings come in order, the best first, and the search line says how many fit. Refer to a"
    " hotel by its number and its name. When a guest asks for a recommendation, recommend the first"
    " hotel, with its price, its rating, its distance to the centre and what it offers. Then name"
    " the next one or two, if they fit too. Always tell the guest when a booking cannot be"
    " cancelled. When none of the hotels fits, say so, and tell what the closest one offers. Never"
    " invent a hotel, a price or an amenity. When there are no listings, ask the guest for them."
    " When the question is about something else, say that you can only help with hotels. Be brief:"
    " a few short lines are enough."
)
_REFERENCE_HOTEL_COUNT = 12  # twelve listings are about 800 tokens
# About one draw in three is short of the target by less than the notes can fill.
_REFERENCE_DRAW_COUNT_MAX = 500
_NOTE_TOKENS_MAX = 60  # a longer note would no longer read like one
_OTHER_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You help guests to choose a hotel from the listings.",
    "You are a hotel search assistant. Answer only from the listings.",
    "Answer the question.",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Conversation: the input of the model and the expected answers."""

    found: Found
    system: str | None
    note: str
    turns: tuple[Turn, ...]

    @property
    def hotels(self) -> tuple[Hotel, ...]:
        """Listings in the order of the search step."""
        return self.found.hotels

    def context(self) -> str:
        """Return the search result as it precedes the first question; "" without hotels."""
        if not self.hotels:
            return ""
        note = f"\n{self.note}" if self.note else ""
        return f"{self.found.block()}{note}\n{self.found.line()}\n\n"

    def messages(self, turn_count: int | None = None) -> list[Message]:
        """Return the conversation, or its part before the answer to turn `turn_count`, from 1."""
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for number, turn in enumerate(self.turns[:turn_count], start=1):
            question = (
                f"{self.context()}Question: {turn.question}"
                if number == 1 and self.hotels
                else turn.question
            )
            messages.append({"role": "user", "content": question})
            if number != turn_count:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages


def draw_case(
    rng: Random, split: Split, hotel_count_max: int = LISTING_COUNT_MAX, again_count_max: int = 4
) -> Case:
    """Draw a question and up to `again_count_max` follow-ups; one in ten has no listings."""
    if rng.random() < 0.1:
        return _draw_case_without_listings(rng)
    hotels = draw_hotels(rng, _draw_hotel_count(rng, hotel_count_max), split)
    note = rng.choice(words.NOTES) if rng.random() < 0.35 else ""
    found, turn = draw_turn(rng, hotels, split)
    if rng.random() < 0.3:
        turn = replace(turn, question=f"{phrases.preamble(rng)} {turn.question}")
    turns = [turn]
    for _ in range(rng.randint(0, again_count_max)):
        if not turn.listed or rng.random() < 0.1:
            turns.append(small_talk.draw_small_talk(rng, listings=True))
        else:
            turns.append(look_up_again(rng, found.hotels[rng.choice(turn.listed) - 1]))
    return Case(found, _draw_system(rng, len(hotels)), note, tuple(turns))


def _draw_hotel_count(rng: Random, hotel_count_max: int) -> int:
    """Return mostly numbers near the maximum, where finding a fact is hardest, but all from 2."""
    span = hotel_count_max - 1
    return hotel_count_max - min(rng.randrange(span), rng.randrange(span))


def _draw_system(rng: Random, hotel_count: int) -> str | None:
    """Return the long prompt mostly for many listings; for few it would be most of the text."""
    if rng.random() < (0.7 if hotel_count > 5 else 0.2):
        return SYSTEM_PROMPT
    return rng.choice((*_OTHER_SYSTEM_PROMPTS, None, None))


def _draw_case_without_listings(rng: Random) -> Case:
    turns = tuple(
        (
            small_talk.no_listings(rng, rng.choice(words.CITIES))
            if rng.random() < 0.3
            else small_talk.draw_small_talk(rng, listings=False)
        )
        for _ in range(rng.randint(2, 5))
    )
    return Case(Found(), _draw_system(rng, 0), "", turns)


def evaluation_case(seed: int) -> Case:
    """Return a full-length case of names that training never saw, with one question."""
    rng = Random(f"evaluation {seed}")
    found, turn = draw_turn(
        rng, draw_hotels(rng, rng.randint(6, LISTING_COUNT_MAX), Split.EVAL), Split.EVAL
    )
    return Case(found, SYSTEM_PROMPT, "", (turn,))


def evaluation_follow_up(seed: int) -> Case:
    """Return a full-length case whose second question is about a hotel of the first answer."""
    rng = Random(f"evaluation again {seed}")
    while True:
        found, turn = draw_turn(
            rng, draw_hotels(rng, rng.randint(6, LISTING_COUNT_MAX), Split.EVAL), Split.EVAL
        )
        if turn.listed:
            again = look_up_again(rng, found.hotels[rng.choice(turn.listed) - 1])
            return Case(found, SYSTEM_PROMPT, "", (turn, again))


def evaluation_small_talk(seed: int) -> Case:
    """Return a case whose message does not ask about a listing."""
    rng = Random(f"evaluation talk {seed}")
    if rng.random() < 0.3:
        return Case(
            Found(), SYSTEM_PROMPT, "", (small_talk.no_listings(rng, rng.choice(words.CITIES)),)
        )
    return Case(Found(), SYSTEM_PROMPT, "", (small_talk.draw_small_talk(rng, listings=False),))


def _draw_reference(rng: Random) -> Case:
    while True:
        hotels = draw_hotels(rng, _REFERENCE_HOTEL_COUNT, Split.EVAL)
        found, turn = rng.choice((recommend, recommend_in_budget))(rng, hotels, Split.EVAL)
        if found.fit_count >= 3:
            question = f"{phrases.preamble(rng)} {turn.question}"
            return Case(found, SYSTEM_PROMPT, "", (replace(turn, question=question),))


def reference_messages(
    seed: int,
    count_tokens: Callable[[list[Message]], int],
    prompt_token_count: int = REFERENCE_PROMPT_TOKENS,
) -> list[Message]:
    """Return the messages of `sized_reference_case`."""
    return sized_reference_case(seed, count_tokens, prompt_token_count).messages(1)


def sized_reference_case(
    seed: int,
    count_tokens: Callable[[list[Message]], int],
    prompt_token_count: int = REFERENCE_PROMPT_TOKENS,
) -> Case:
    """Return a reference case whose templated prompt has exactly `prompt_token_count` tokens.

    `count_tokens` renders messages with the chat template and a generation prompt, and counts.
    Cases are drawn until one is slightly too short; notes below its listings fill the rest.
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


def _notes_of_about(
    missing: int, case: Case, count_tokens: Callable[[list[Message]], int]
) -> Iterator[str]:
    """Yield choices of notes with about that many tokens, give or take one for each note."""
    bare = count_tokens(case.messages(1))
    sizes = {
        note: count_tokens(replace(case, note=note).messages(1)) - bare for note in words.NOTES
    }
    for note_count in (1, 2, 3, 4):
        for notes in combinations(words.NOTES, note_count):
            if abs(sum(sizes[note] for note in notes) - missing) <= note_count:
                yield " ".join(notes)
