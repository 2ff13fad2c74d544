"""Questions with the result of the search step: ordered listings and the number of matches.

The search step ranks and the model explains: every answer is about the first one to three listings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from demo import answers, phrases
from demo.features import AMENITY_FEATURES, FEATURES, Feature
from demo.hotels import Hotel, Split, draw_name


@dataclass(frozen=True, slots=True)
class Turn:
    """Question with its reference answer, and the facts that a score checks."""

    kind: str
    question: str
    answer: str
    listed: tuple[int, ...] = ()  # numbers of the hotels in the answer, in order
    facts: tuple[str, ...] = ()  # strings that a correct answer contains


@dataclass(frozen=True, slots=True)
class Found:
    """Result of the search step: all listings, numbered from the best match."""

    hotels: tuple[Hotel, ...] = ()
    fit_count: int = 0

    @property
    def fitting(self) -> tuple[Hotel, ...]:
        return self.hotels[: self.fit_count]

    def block(self) -> str:
        """Return the listings; `line` follows them."""
        return "\n".join(["Listings:", *(hotel.listing() for hotel in self.hotels)])

    def line(self) -> str:
        """Return the result in words; near the question, the model finds it more easily."""
        if self.fit_count == 0:
            return f"Search: none of {len(self.hotels)} fits; closest first."
        return (
            f"Search: {self.fit_count} of {len(self.hotels)}"
            f" {'fits' if self.fit_count == 1 else 'fit'}."
        )


Draft = tuple[Found, Turn]
Maker = Callable[[Random, Sequence[Hotel], Split], Draft]


class Criterion(StrEnum):
    """Criterion by which one hotel is better than another."""

    RATING = "rating"
    PRICE = "price"
    DISTANCE = "distance"

    def key(self, hotel: Hotel) -> int:
        """Return a key by which the best hotel is the smallest."""
        return {
            Criterion.RATING: -hotel.rating_tenths,
            Criterion.PRICE: hotel.price,
            Criterion.DISTANCE: hotel.distance_tenths,
        }[self]


def search(
    hotels: Sequence[Hotel],
    criterion: Criterion,
    fits: Callable[[Hotel], bool],
    nearly: Callable[[Hotel], bool] = lambda hotel: False,
) -> Found:
    """Return matches from the best, then near matches, then the rest."""
    ranked = sorted(
        hotels, key=lambda hotel: (not fits(hotel), not nearly(hotel), criterion.key(hotel))
    )
    numbered = tuple(replace(hotel, index=number) for number, hotel in enumerate(ranked, start=1))
    return Found(numbered, sum(map(fits, hotels)))


def _facts_of(hotel: Hotel) -> tuple[str, ...]:
    """Return the facts that a recommendation of the hotel must contain."""
    return (
        hotel.label,
        hotel.district,
        answers.figures(hotel),
        ", ".join(hotel.amenities),
        hotel.cancellation_sentence(),
    )


def _others(ranked: Sequence[Hotel]) -> tuple[str, ...]:
    return tuple(fact for hotel in ranked[1:3] for fact in (hotel.label, answers.figures(hotel)))


def _numbers(hotels: Sequence[Hotel]) -> tuple[int, ...]:
    return tuple(hotel.index for hotel in hotels[:3])


def _recommended(
    rng: Random, kind: str, question: str, found: Found, wish: str, criterion: Criterion
) -> Draft:
    """Return the answer to any wish: up to three matches, or the closest listing."""
    first = found.hotels[0]
    if not found.fitting:
        return found, Turn(
            "nothing fits",
            question,
            answers.nothing_fits(first, wish),
            (1,),
            ("no hotel", wish, *_facts_of(first)),
        )
    answer = answers.recommendation(rng, found.fitting, wish, criterion.value)
    why = answers.REASONS[criterion.value] if found.fit_count > 1 else "the only one"
    facts = (f"I found {found.fit_count} ", wish, why, *_facts_of(first), *_others(found.fitting))
    return found, Turn(kind, question, answer, _numbers(found.fitting), facts)


def _draw_feature(rng: Random, hotels: Sequence[Hotel]) -> Feature:
    """Return mostly a feature of several hotels, for longer answers."""
    features = rng.sample(FEATURES, rng.choice((1, 2, 4)))
    return max(features, key=lambda feature: sum(map(feature.test, hotels)))


def recommend(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for a hotel with a wish, perhaps with a preference."""
    feature = _draw_feature(rng, hotels)
    criterion = rng.choice(tuple(Criterion))
    stated = criterion is not Criterion.RATING or rng.random() < 0.6
    question = phrases.ask_recommend(rng, feature.wish, criterion.value if stated else None)
    found = search(hotels, criterion, feature.test)
    return _recommended(
        rng, f"{criterion.value} with a wish", question, found, feature.wish, criterion
    )


def recommend_in_budget(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for a hotel with a wish below a price; near matches fulfil the wish and cost more."""
    feature = _draw_feature(rng, hotels)
    budget = rng.choice(range(80, 401, 10))
    question = phrases.ask_budget(rng, feature.wish, budget)

    def fits(hotel: Hotel) -> bool:
        return feature.test(hotel) and hotel.price < budget

    fit_count = sum(map(fits, hotels))
    found = search(hotels, Criterion.RATING if fit_count else Criterion.PRICE, fits, feature.test)
    return _recommended(
        rng, "wish and budget", question, found, f"{feature.wish} below ${budget}", Criterion.RATING
    )


def recommend_two_wishes(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for a hotel with two wishes; near matches fulfil one of them."""
    first, second = rng.sample(AMENITY_FEATURES, 2)
    question = phrases.ask_two(rng, first.noun, second.noun)
    found = search(
        hotels,
        Criterion.RATING,
        lambda hotel: first.test(hotel) and second.test(hotel),
        lambda hotel: first.test(hotel) or second.test(hotel),
    )
    return _recommended(
        rng, "two wishes", question, found, f"with {first.noun} and {second.noun}", Criterion.RATING
    )


def below_price(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for a hotel below a price."""
    cheap = sorted(hotel.price for hotel in hotels)[: rng.randint(1, 4)][-1]
    budget = (cheap // 10 + rng.choice((0, 1, 1, 2))) * 10
    question = phrases.ask_below(rng, budget)
    criterion = (
        Criterion.RATING if any(hotel.price < budget for hotel in hotels) else Criterion.PRICE
    )
    found = search(hotels, criterion, lambda hotel: hotel.price < budget)
    return _recommended(rng, "below a price", question, found, f"below ${budget}", Criterion.RATING)


def superlative(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for the best of all listings by one figure."""
    criterion = rng.choice(tuple(Criterion))
    found = search(hotels, criterion, lambda hotel: True)
    question = phrases.ask_superlative(rng, criterion.value)
    answer = answers.best_of_all(found.hotels, criterion.value)
    facts = (answers.REASONS[criterion.value], *_facts_of(found.hotels[0]), *_others(found.hotels))
    return found, Turn(f"{criterion.value} of all", question, answer, _numbers(found.hotels), facts)


def _named(hotels: Sequence[Hotel], names: Sequence[str]) -> Found:
    """Return the result of a search for named hotels."""
    return search(hotels, Criterion.RATING, lambda hotel: hotel.name in names)


def look_up(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for one attribute of one named hotel."""
    found = _named(hotels, [rng.choice(hotels).name])
    hotel = found.hotels[0]
    attribute = rng.choice(phrases.ATTRIBUTES)
    answer, fact = answers.attribute(hotel, attribute)
    return found, Turn(
        "look up",
        phrases.ask_attribute(rng, hotel.name, attribute),
        answer,
        (1,),
        (hotel.label, fact),
    )


def look_up_again(rng: Random, hotel: Hotel) -> Turn:
    """Ask for an attribute of a hotel of the conversation: "it" is the first one."""
    subject = "it" if hotel.index == 1 else rng.choice((hotel.name, f"[{hotel.index}]"))
    if rng.random() < 0.8:
        attribute = rng.choice(phrases.ATTRIBUTES)
        answer, fact = answers.attribute(hotel, attribute)
        question = phrases.ask_attribute(rng, subject, attribute)
        return Turn("look up again", question, answer, (hotel.index,), (hotel.label, fact))
    question = phrases.ask_has(rng, subject, rng.choice(AMENITY_FEATURES).noun)
    facts = (hotel.label, ", ".join(hotel.amenities))
    return Turn("look up again", question, answers.offers(hotel), (hotel.index,), facts)


def has_amenity(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask whether one named hotel has an amenity; the search result contains the answer."""
    hotel = rng.choice(hotels)
    features = [feature for feature in AMENITY_FEATURES if feature.test(hotel)]
    feature = rng.choice(features) if rng.random() < 0.4 else rng.choice(AMENITY_FEATURES)
    found = _named(hotels, [hotel.name])
    fits = feature.test(hotel)
    found, hotel = replace(found, fit_count=int(fits)), found.hotels[0]
    question = phrases.ask_has(rng, hotel.name, feature.noun)
    facts = ("Yes" if fits else "No", hotel.label, feature.noun, ", ".join(hotel.amenities))
    return found, Turn(
        "has an amenity", question, answers.has(hotel, feature.noun, fits), (1,), facts
    )


def describe(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask for all facts about one named hotel."""
    found = _named(hotels, [rng.choice(hotels).name])
    hotel = found.hotels[0]
    facts = (
        *_facts_of(hotel),
        hotel.city,
        hotel.breakfast_sentence(),
        hotel.pets_sentence(),
        hotel.praise_sentence(),
    )
    return found, Turn(
        "describe", phrases.ask_describe(rng, hotel.name), answers.description(hotel), (1,), facts
    )


def compare(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Compare two named hotels."""
    names = [hotel.name for hotel in rng.sample(list(hotels), 2)]
    found = _named(hotels, names)
    better, other = found.fitting
    facts = tuple(fact for hotel in found.fitting for fact in (hotel.label, answers.figures(hotel)))
    answer = answers.comparison(better, other)
    question = phrases.ask_compare(rng, *names)
    return found, Turn(
        "compare two", question, answer, (1, 2), (*facts, f"Guests rate {better.label} higher")
    )


def unknown_hotel(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Ask about a hotel that is not among the listings."""
    name = draw_name(rng, split)
    while any(name == hotel.name for hotel in hotels):
        name = draw_name(rng, split)
    question = rng.choice(
        (
            phrases.ask_attribute(rng, name, rng.choice(phrases.ATTRIBUTES)),
            phrases.ask_describe(rng, name),
        )
    )
    return _named(hotels, []), Turn(
        "unknown hotel", question, answers.not_listed(name), (), ("cannot find", name)
    )


# Weights of the kinds of questions.
QUESTION_WEIGHTS: tuple[tuple[Maker, int], ...] = (
    (recommend, 30),
    (recommend_in_budget, 16),
    (recommend_two_wishes, 8),
    (below_price, 6),
    (superlative, 10),
    (look_up, 10),
    (has_amenity, 6),
    (describe, 6),
    (compare, 6),
    (unknown_hotel, 3),
)


def draw_turn(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Draw a question with the result of the search step. There are at least two hotels."""
    makers, weights = zip(*QUESTION_WEIGHTS, strict=True)
    maker: Maker = rng.choices(makers, weights)[0]
    return maker(rng, hotels, split)
