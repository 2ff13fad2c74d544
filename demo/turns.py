"""Questions with what the search step returns for each: listings in order, best match first, and how many of them fit.

The search step ranks and the model explains: every answer is about the first one to three listings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from demo import answers, phrases
from demo import vocabulary as words
from demo.hotels import Hotel, Split, draw_name


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its reference answer, and what a score needs to know about a correct one."""

    kind: str
    question: str
    answer: str
    listed: tuple[int, ...] = ()  # the hotels the answer speaks of, by number, in order
    facts: tuple[str, ...] = ()  # strings that a correct answer contains


@dataclass(frozen=True, slots=True)
class Found:
    """What the search step hands over: all listings, best match first, numbered in that order."""

    hotels: tuple[Hotel, ...] = ()
    fit_count: int = 0

    @property
    def fitting(self) -> tuple[Hotel, ...]:
        return self.hotels[: self.fit_count]

    def block(self) -> str:
        """The listings; `line` follows them."""
        return "\n".join(["Listings:", *(hotel.listing() for hotel in self.hotels)])

    def line(self) -> str:
        """What the search step says about its result, close to the question: far away it is harder to find."""
        if self.fit_count == 0:
            return f"Search: none of {len(self.hotels)} fits; closest first."
        return f"Search: {self.fit_count} of {len(self.hotels)} {'fits' if self.fit_count == 1 else 'fit'}."


Draft = tuple[Found, Turn]
Maker = Callable[[Random, Sequence[Hotel], Split], Draft]


class Criterion(StrEnum):
    """What makes one hotel better than another."""

    RATING = "rating"
    PRICE = "price"
    DISTANCE = "distance"

    def key(self, hotel: Hotel) -> int:
        """Smaller is better."""
        return {
            Criterion.RATING: -hotel.rating_tenths,
            Criterion.PRICE: hotel.price,
            Criterion.DISTANCE: hotel.distance_tenths,
        }[self]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a guest may ask for, in the forms that sentences need."""

    noun: str  # "a pool"
    wish: str  # "with a pool"
    test: Callable[[Hotel], bool]


def _amenity_feature(amenity: str) -> Feature:
    phrase = words.AMENITIES[amenity]
    return Feature(noun=phrase, wish=f"with {phrase}", test=lambda hotel: amenity in hotel.amenities)


AMENITY_FEATURES = tuple(_amenity_feature(amenity) for amenity in words.AMENITIES)
FEATURES = (
    *AMENITY_FEATURES,
    Feature("breakfast included", "with breakfast included", lambda hotel: hotel.breakfast == "included"),
    Feature("room for pets", "where pets are welcome", lambda hotel: hotel.pets == "welcome"),
)


def search(
    hotels: Sequence[Hotel],
    criterion: Criterion,
    fits: Callable[[Hotel], bool],
    nearly: Callable[[Hotel], bool] = lambda hotel: False,
) -> Found:
    """Those that fit, best first, then those that nearly fit, then the rest."""
    ranked = sorted(hotels, key=lambda hotel: (not fits(hotel), not nearly(hotel), criterion.key(hotel)))
    numbered = tuple(replace(hotel, index=number) for number, hotel in enumerate(ranked, start=1))
    return Found(numbered, sum(map(fits, hotels)))


def _facts_of(hotel: Hotel) -> tuple[str, ...]:
    """What an answer that recommends a hotel has to say about it."""
    return (hotel.label, hotel.district, answers.figures(hotel), ", ".join(hotel.amenities), hotel.cancellation_sentence())


def _others(ranked: Sequence[Hotel]) -> tuple[str, ...]:
    return tuple(fact for hotel in ranked[1:3] for fact in (hotel.label, answers.figures(hotel)))


def _numbers(hotels: Sequence[Hotel]) -> tuple[int, ...]:
    return tuple(hotel.index for hotel in hotels[:3])


def _recommended(rng: Random, kind: str, question: str, found: Found, wish: str, criterion: Criterion) -> Draft:
    """The answer to any wish: the first of those that fit and up to two others, or the closest match."""
    first = found.hotels[0]
    if not found.fitting:
        return found, Turn("nothing fits", question, answers.nothing_fits(first, wish), (1,), ("no hotel", wish, *_facts_of(first)))
    answer = answers.recommendation(rng, found.fitting, wish, criterion.value)
    why = answers.REASONS[criterion.value] if found.fit_count > 1 else "the only one"
    facts = (f"I found {found.fit_count} ", wish, why, *_facts_of(first), *_others(found.fitting))
    return found, Turn(kind, question, answer, _numbers(found.fitting), facts)


def _draw_feature(rng: Random, hotels: Sequence[Hotel]) -> Feature:
    """Often one that several hotels have: those answers are the longer ones."""
    features = rng.sample(FEATURES, rng.choice((1, 2, 4)))
    return max(features, key=lambda feature: sum(map(feature.test, hotels)))


def recommend(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """A wish, perhaps with a preference."""
    feature = _draw_feature(rng, hotels)
    criterion = rng.choice(tuple(Criterion))
    stated = criterion is not Criterion.RATING or rng.random() < 0.6
    question = phrases.ask_recommend(rng, feature.wish, criterion.value if stated else None)
    found = search(hotels, criterion, feature.test)
    return _recommended(rng, f"{criterion.value} with a wish", question, found, feature.wish, criterion)


def recommend_in_budget(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """A wish and a limit on the price; what nearly fits has the wish and costs more."""
    feature = _draw_feature(rng, hotels)
    budget = rng.choice(range(80, 401, 10))
    question = phrases.ask_budget(rng, feature.wish, budget)

    def fits(hotel: Hotel) -> bool:
        return feature.test(hotel) and hotel.price < budget

    fit_count = sum(map(fits, hotels))
    found = search(hotels, Criterion.RATING if fit_count else Criterion.PRICE, fits, feature.test)
    return _recommended(rng, "wish and budget", question, found, f"{feature.wish} below ${budget}", Criterion.RATING)


def recommend_two_wishes(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Two wishes; what nearly fits has one of them."""
    first, second = rng.sample(AMENITY_FEATURES, 2)
    question = phrases.ask_two(rng, first.noun, second.noun)
    found = search(
        hotels,
        Criterion.RATING,
        lambda hotel: first.test(hotel) and second.test(hotel),
        lambda hotel: first.test(hotel) or second.test(hotel),
    )
    return _recommended(rng, "two wishes", question, found, f"with {first.noun} and {second.noun}", Criterion.RATING)


def below_price(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Only a limit on the price."""
    cheap = sorted(hotel.price for hotel in hotels)[: rng.randint(1, 4)][-1]
    budget = (cheap // 10 + rng.choice((0, 1, 1, 2))) * 10
    question = phrases.ask_below(rng, budget)
    criterion = Criterion.RATING if any(hotel.price < budget for hotel in hotels) else Criterion.PRICE
    found = search(hotels, criterion, lambda hotel: hotel.price < budget)
    return _recommended(rng, "below a price", question, found, f"below ${budget}", Criterion.RATING)


def superlative(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """The best of all listings by one figure."""
    criterion = rng.choice(tuple(Criterion))
    found = search(hotels, criterion, lambda hotel: True)
    question = phrases.ask_superlative(rng, criterion.value)
    answer = answers.best_of_all(found.hotels, criterion.value)
    facts = (answers.REASONS[criterion.value], *_facts_of(found.hotels[0]), *_others(found.hotels))
    return found, Turn(f"{criterion.value} of all", question, answer, _numbers(found.hotels), facts)


def _named(hotels: Sequence[Hotel], names: Sequence[str]) -> Found:
    """A search for named hotels."""
    return search(hotels, Criterion.RATING, lambda hotel: hotel.name in names)


def look_up(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """One attribute of one named hotel."""
    found = _named(hotels, [rng.choice(hotels).name])
    hotel = found.hotels[0]
    attribute = rng.choice(phrases.ATTRIBUTES)
    answer, fact = answers.attribute(hotel, attribute)
    return found, Turn("look up", phrases.ask_attribute(rng, hotel.name, attribute), answer, (1,), (hotel.label, fact))


def look_up_again(rng: Random, hotel: Hotel) -> Turn:
    """One attribute of a hotel that the conversation spoke of: "it" is the first, the others go by number."""
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
    """Whether one named hotel has an amenity; the search step says whether it fits."""
    hotel = rng.choice(hotels)
    features = [feature for feature in AMENITY_FEATURES if feature.test(hotel)]
    feature = rng.choice(features) if rng.random() < 0.4 else rng.choice(AMENITY_FEATURES)
    found = _named(hotels, [hotel.name])
    fits = feature.test(hotel)
    found, hotel = replace(found, fit_count=int(fits)), found.hotels[0]
    question = phrases.ask_has(rng, hotel.name, feature.noun)
    facts = ("Yes" if fits else "No", hotel.label, feature.noun, ", ".join(hotel.amenities))
    return found, Turn("has an amenity", question, answers.has(hotel, feature.noun, fits), (1,), facts)


def describe(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """All about one named hotel."""
    found = _named(hotels, [rng.choice(hotels).name])
    hotel = found.hotels[0]
    facts = (*_facts_of(hotel), hotel.city, hotel.breakfast_sentence(), hotel.pets_sentence(), hotel.praise_sentence())
    return found, Turn("describe", phrases.ask_describe(rng, hotel.name), answers.description(hotel), (1,), facts)


def compare(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """Two named hotels side by side."""
    names = [hotel.name for hotel in rng.sample(list(hotels), 2)]
    found = _named(hotels, names)
    better, other = found.fitting
    facts = tuple(fact for hotel in found.fitting for fact in (hotel.label, answers.figures(hotel)))
    answer = answers.comparison(better, other)
    question = phrases.ask_compare(rng, *names)
    return found, Turn("compare two", question, answer, (1, 2), (*facts, f"Guests rate {better.label} higher"))


def unknown_hotel(rng: Random, hotels: Sequence[Hotel], split: Split) -> Draft:
    """A hotel that is not among the listings."""
    name = draw_name(rng, split)
    while any(name == hotel.name for hotel in hotels):
        name = draw_name(rng, split)
    question = rng.choice((phrases.ask_attribute(rng, name, rng.choice(phrases.ATTRIBUTES)), phrases.ask_describe(rng, name)))
    return _named(hotels, []), Turn("unknown hotel", question, answers.not_listed(name), (), ("cannot find", name))


# How often each kind of question is drawn.
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
    """Draw a question with what the search step returns for it. There are at least two hotels."""
    makers, weights = zip(*QUESTION_WEIGHTS, strict=True)
    maker: Maker = rng.choices(makers, weights)[0]
    return maker(rng, hotels, split)
