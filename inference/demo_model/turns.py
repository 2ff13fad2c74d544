"""Questions about the listings, each with the answer the model should learn and the facts that answer must hold.

Answers that choose first walk through the candidates in listing order and then conclude: it reads naturally, and a small
model then compares a few lines in front of it instead of all listings at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from inference.demo_model import phrases
from inference.demo_model import vocabulary as words
from inference.demo_model.hotels import Hotel, Split, draw_name

MATCH_COUNT_MAX = 5  # more candidates than this would make an answer longer than 150 tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its reference answer, and what a score needs to know about a correct one."""

    kind: str
    question: str
    answer: str
    listed: tuple[int, ...] = ()  # the hotels the answer must walk through, by number, in listing order
    pick: int | None = None  # the hotel it must settle on
    facts: tuple[str, ...] = ()  # strings that a correct answer contains


class Criterion(StrEnum):
    """What makes one candidate better than another."""

    RATING = "rating"
    PRICE = "price"
    DISTANCE = "distance"

    def order(self, hotels: Sequence[Hotel]) -> list[Hotel]:
        """Best first."""
        if self is Criterion.RATING:
            return sorted(hotels, key=lambda hotel: -hotel.rating_tenths)
        if self is Criterion.PRICE:
            return sorted(hotels, key=lambda hotel: hotel.price)
        return sorted(hotels, key=lambda hotel: hotel.distance_tenths)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a guest may ask for, in the forms that sentences need."""

    word: str  # "pool", as the listings print it
    noun: str  # "a pool"
    wish: str  # "with a pool"
    test: Callable[[Hotel], bool]


def _amenity_feature(amenity: str) -> Feature:
    phrase = words.AMENITIES[amenity]
    return Feature(word=amenity, noun=phrase, wish=f"with {phrase}", test=lambda hotel: amenity in hotel.amenities)


AMENITY_FEATURES = tuple(_amenity_feature(amenity) for amenity in words.AMENITIES)
FEATURES = (
    *AMENITY_FEATURES,
    Feature("breakfast included", "breakfast included", "with breakfast included", lambda hotel: hotel.breakfast == "included"),
    Feature("pets welcome", "room for pets", "where pets are welcome", lambda hotel: hotel.pets == "welcome"),
)


def bullet(why: str, hotel: Hotel, remark: str = "") -> str:
    """One candidate of a walk. Why it is one comes first: that is the word to look for in the listings."""
    return f"- {why}: {hotel.label}, {remark}{hotel.cost}, rated {hotel.rating}, {hotel.distance} from the centre"


def figures(hotels: Sequence[Hotel], criterion: Criterion) -> str:
    """One figure of every hotel in one line, so that the best can be read off it."""
    figure: Callable[[Hotel], str] = {
        Criterion.PRICE: lambda hotel: f"${hotel.price}",
        Criterion.RATING: lambda hotel: hotel.rating,
        Criterion.DISTANCE: lambda hotel: hotel.distance,
    }[criterion]
    return f"{criterion.title()}: {', '.join(f'[{hotel.index}] {figure(hotel)}' for hotel in hotels)}."


def recommend(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """A wish, perhaps with a preference: walk through the matches and choose one."""
    feature = rng.choice(FEATURES)
    criterion = rng.choice(tuple(Criterion))
    stated = criterion is not Criterion.RATING or rng.random() < 0.6
    matches = [hotel for hotel in hotels if feature.test(hotel)]
    question = phrases.ask_recommend(rng, feature.wish, criterion.value if stated else None)
    if not matches:
        return Turn("nothing fits", question, phrases.none_has(rng, feature.noun), facts=("none of the",))
    if len(matches) > MATCH_COUNT_MAX:
        return None
    lines = [phrases.found(rng, feature.wish), *(bullet(feature.word, hotel) for hotel in matches)]
    return _conclude(rng, f"{criterion.value} with a wish", question, lines, matches, matches, criterion)


def recommend_in_budget(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """A wish and a limit on the price: each candidate is held against the limit."""
    feature = rng.choice(FEATURES)
    matches = [hotel for hotel in hotels if feature.test(hotel)]
    if not matches or len(matches) > MATCH_COUNT_MAX:
        return None
    budget = rng.choice(range(80, 401, 10))
    if rng.random() < 0.6:  # a limit that parts the candidates teaches more than one far away
        budget = (rng.choice(matches).price // 10 + rng.choice((0, 1, 2))) * 10
    question = phrases.ask_budget(rng, feature.wish, budget)
    lines = [phrases.found(rng, feature.wish)]
    lines += [bullet(feature.word, hotel, "within budget at " if hotel.price < budget else "over budget at ") for hotel in matches]
    fitting = [hotel for hotel in matches if hotel.price < budget]
    if fitting:
        return _conclude(rng, "wish and budget", question, lines, matches, fitting, Criterion.RATING)
    cheapest = Criterion.PRICE.order(matches)[0]
    lines.append(phrases.none_in_budget(rng, feature.wish, budget, cheapest))
    listed = tuple(hotel.index for hotel in matches)
    return Turn("wish and budget", question, "\n".join(lines), listed, cheapest.index, (cheapest.cost,))


def recommend_two_wishes(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """Two wishes: walk through those with the first and say of each whether it has the second."""
    first, second = rng.sample(AMENITY_FEATURES, 2)
    matches = [hotel for hotel in hotels if first.test(hotel)]
    both = [hotel for hotel in matches if second.test(hotel)]
    if not matches or len(matches) > MATCH_COUNT_MAX or (not both and rng.random() < 0.6):
        return None
    question = phrases.ask_two(rng, first.noun, second.noun)
    lines = [phrases.found(rng, first.wish)]
    for hotel in matches:
        remark = f"also {second.noun}, " if second.test(hotel) else f"without {second.noun}, "
        lines.append(bullet(first.word, hotel, remark))
    if both:
        return _conclude(rng, "two wishes", question, lines, matches, both, Criterion.RATING)
    lines.append(phrases.none_has_both(rng, first.noun, second.noun))
    return Turn("two wishes", question, "\n".join(lines), tuple(hotel.index for hotel in matches))


def below_price(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """Only a limit on the price."""
    ranked = Criterion.PRICE.order(hotels)
    budget = (ranked[rng.randrange(min(4, len(ranked)))].price // 10 + rng.choice((0, 1, 1, 2))) * 10
    matches = [hotel for hotel in hotels if hotel.price < budget]
    question = phrases.ask_below(rng, budget)
    if not matches:
        answer = f"{figures(hotels, Criterion.PRICE)}\n{phrases.none_below(rng, budget, ranked[0])}"
        return Turn("below a price", question, answer, pick=ranked[0].index, facts=(ranked[0].cost,))
    if len(matches) > MATCH_COUNT_MAX:
        return None
    lines = [figures(hotels, Criterion.PRICE), phrases.found(rng, f"for less than ${budget} a night")]
    lines += [bullet(f"${hotel.price}", hotel) for hotel in matches]
    return _conclude(rng, "below a price", question, lines, matches, matches, Criterion.RATING)


def _conclude(
    rng: Random,
    kind: str,
    question: str,
    lines: list[str],
    listed: Sequence[Hotel],
    eligible: Sequence[Hotel],
    criterion: Criterion,
) -> Turn:
    """Close a walk through candidates: the choice and its reason, something worth knowing, perhaps the runner-up."""
    ranked = criterion.order(eligible)
    pick = ranked[0]
    closing = [phrases.verdict(rng, pick, criterion.value if len(ranked) > 1 else "only")]
    closing += phrases.details(rng, pick)
    if len(ranked) > 1 and rng.random() < 0.7:
        closing.append(phrases.runner_up(rng, ranked[1], criterion.value))
    answer = "\n".join([*lines, " ".join(closing)])
    listed_indexes = tuple(hotel.index for hotel in listed)
    return Turn(kind, question, answer, listed_indexes, pick.index, (pick.label,))


def superlative(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """The best of all listings by one criterion."""
    criterion = rng.choice(tuple(Criterion))
    ranked = criterion.order(hotels)
    question = phrases.ask_superlative(rng, criterion.value)
    best = phrases.superlative(rng, ranked[0], criterion.value)
    parts = [f"{figures(hotels, criterion)}\n{best}", *phrases.details(rng, ranked[0])]
    if len(ranked) > 1 and rng.random() < 0.7:
        parts.append(phrases.runner_up(rng, ranked[1], criterion.value))
    return Turn(f"{criterion.value} of all", question, " ".join(parts), pick=ranked[0].index, facts=(ranked[0].label,))


def look_up(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """One attribute of one named hotel."""
    hotel = rng.choice(hotels)
    attribute = rng.choice(phrases.ATTRIBUTES)
    question = phrases.ask_attribute(rng, hotel.name, attribute)
    answer, fact = phrases.attribute_sentence(rng, hotel, hotel.citation, attribute)
    return Turn("look up", question, answer, pick=hotel.index, facts=(hotel.citation, fact))


def look_up_again(rng: Random, hotel: Hotel) -> Turn:
    """One attribute of "it": the hotel that the previous answer settled on."""
    if rng.random() < 0.5:
        attribute = rng.choice(phrases.ATTRIBUTES)
        question = phrases.ask_attribute(rng, "it", attribute)
        answer, fact = phrases.attribute_sentence(rng, hotel, hotel.label, attribute)
        return Turn("look up again", question, answer, pick=hotel.index, facts=(hotel.label, fact))
    feature = rng.choice(AMENITY_FEATURES)
    answer, fact = _has_answer(hotel, hotel.label, feature)
    question = phrases.ask_has(rng, "it", feature.noun)
    return Turn("look up again", question, answer, pick=hotel.index, facts=(hotel.label, fact))


def _has_answer(hotel: Hotel, subject: str, feature: Feature) -> tuple[str, str]:
    """The answer, and how it must go on after the hotel."""
    if feature.test(hotel):
        return phrases.has(hotel, subject, feature.noun), f"does have {feature.noun}"
    return phrases.has_not(hotel, subject, feature.noun), f"does not list {feature.noun}"


def has_amenity(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """Whether one named hotel has an amenity."""
    hotel = rng.choice(hotels)
    features = [feature for feature in AMENITY_FEATURES if feature.test(hotel)]
    feature = rng.choice(features) if rng.random() < 0.5 else rng.choice(AMENITY_FEATURES)
    answer, fact = _has_answer(hotel, hotel.citation, feature)
    question = phrases.ask_has(rng, hotel.name, feature.noun)
    return Turn("has an amenity", question, answer, pick=hotel.index, facts=(hotel.citation, fact))


def describe(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """All about one named hotel."""
    hotel = rng.choice(hotels)
    question = phrases.ask_describe(rng, hotel.name)
    facts = (hotel.citation, f"${hotel.price}", hotel.rating, hotel.distance)
    return Turn("describe", question, phrases.description(rng, hotel), pick=hotel.index, facts=facts)


def compare(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """Two named hotels side by side."""
    if len(hotels) < 2:
        return None
    one, two = rng.sample(list(hotels), 2)
    question = phrases.ask_compare(rng, one.name, two.name)
    cheaper = Criterion.PRICE.order((one, two))[0]
    better = Criterion.RATING.order((one, two))[0]
    nearer = Criterion.DISTANCE.order((one, two))[0]
    bullets = (phrases.compared(one), phrases.compared(two))
    lines = [phrases.side_by_side(rng), *bullets, phrases.comparison(rng, cheaper, better, nearer)]
    return Turn("compare two", question, "\n".join(lines), (one.index, two.index), cheaper.index, bullets)


def unknown_hotel(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn | None:
    """A hotel that is not among the listings."""
    name = draw_name(rng, split)
    if any(name == hotel.name for hotel in hotels):
        return None
    asks = (
        lambda: phrases.ask_attribute(rng, name, rng.choice(phrases.ATTRIBUTES)),
        lambda: phrases.ask_describe(rng, name),
        lambda: phrases.ask_has(rng, name, rng.choice(AMENITY_FEATURES).noun),
    )
    return Turn("unknown hotel", rng.choice(asks)(), phrases.not_listed(rng, name), facts=(name,))


# How often each kind of question is drawn.
QUESTION_WEIGHTS: tuple[tuple[Callable[[Random, Sequence[Hotel], Split], Turn | None], int], ...] = (
    (recommend, 26),
    (recommend_in_budget, 14),
    (recommend_two_wishes, 8),
    (below_price, 6),
    (superlative, 12),
    (look_up, 12),
    (has_amenity, 8),
    (describe, 6),
    (compare, 7),
    (unknown_hotel, 4),
)


def draw_turn(rng: Random, hotels: Sequence[Hotel], split: Split) -> Turn:
    """Draw a question that these listings can answer."""
    makers, weights = zip(*QUESTION_WEIGHTS, strict=True)
    while True:
        turn: Turn | None = rng.choices(makers, weights)[0](rng, hotels, split)
        if turn is not None:
            return turn
