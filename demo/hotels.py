"""Hotels, their listings, and the drawing of sets of listings.

Within one set the prices, ratings and distances are all different: "the cheapest" always names
exactly one hotel.
"""

import zlib
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from demo import vocabulary as words

LISTING_COUNT_MAX = 12  # twelve listings fill the 800 tokens of the reference workload
_PRICES = tuple(price for price in range(45, 420) if price % 10 in (5, 9))
_RATINGS_TENTHS = tuple(range(62, 99))
_DISTANCES_TENTHS = tuple(range(1, 60))


class Split(StrEnum):
    """Disjoint sets of hotel names, so that evaluation only asks about unseen names."""

    TRAIN = "train"
    EVAL = "eval"


def split_of(name: str) -> Split:
    """Return the set of a name by its checksum, because `hash` differs between processes."""
    return Split.EVAL if zlib.crc32(name.encode()) % 12 == 0 else Split.TRAIN


@dataclass(frozen=True, slots=True)
class Hotel:
    """Listing of a hotel. Ratings and distances are kept in tenths, so that no float is printed."""

    index: int
    name: str
    kind: str
    city: str
    district: str
    price: int
    rating_tenths: int
    distance_tenths: int
    amenities: tuple[str, ...]
    breakfast: str
    pets: str
    cancellation: str
    praise: str

    @property
    def label(self) -> str:
        """Number of the hotel in the listings, then its name, as answers refer to it."""
        return f"[{self.index}] {self.name}"

    @property
    def cost(self) -> str:
        return f"${self.price} a night"

    @property
    def rating(self) -> str:
        return f"{self.rating_tenths // 10}.{self.rating_tenths % 10}"

    @property
    def distance(self) -> str:
        return f"{self.distance_tenths // 10}.{self.distance_tenths % 10} km"

    def listing(self) -> str:
        """Return the listing as from a retrieval step: one line, its fields in a fixed order."""
        article = "an" if self.kind[0] in "aeiou" else "a"
        return (
            f"[{self.index}] {self.name}, {article} {self.kind} in {self.district} of {self.city}."
            f" Price: ${self.price}. Rating: {self.rating}. Centre: {self.distance}. Amenities:"
            f" {', '.join(self.amenities)}. Breakfast: {self.breakfast}. Pets: {self.pets}."
            f" Cancellation: {self.cancellation}. Guests say: {self.praise}."
        )

    def breakfast_sentence(self) -> str:
        return {
            "included": "Breakfast is included.",
            "not offered": "Breakfast is not offered.",
        }.get(self.breakfast, f"Breakfast costs {self.breakfast}.")

    def pets_sentence(self) -> str:
        return f"Pets are {self.pets}."

    def cancellation_sentence(self) -> str:
        if self.cancellation == "not possible":
            return "Please note that cancellation is not possible."
        return f"Cancellation is {self.cancellation}."

    def praise_sentence(self) -> str:
        return f"Guests mention {self.praise}."


def draw_name(rng: Random, split: Split) -> str:
    """Compose a name that belongs to the split."""
    while True:
        name = _compose_name(rng)
        if split_of(name) is split:
            return name


def _compose_name(rng: Random) -> str:
    made = rng.choice(words.MADE_FIRST) + (
        rng.choice(words.MADE_MIDDLE) if rng.random() < 0.6 else ""
    )
    made += rng.choice(words.MADE_LAST)
    first, second = rng.choice(words.NAME_FIRST), rng.choice(words.NAME_SECOND)
    suffix = rng.choice(words.NAME_SUFFIX)
    shapes = (
        f"{first} {second} {suffix}",
        f"{first} {second}",
        f"The {first} {second}",
        f"{made} {suffix}",
        f"{made} {suffix}",
        f"Hotel {made}",
        f"Villa {made}",
        f"Casa {made}",
        f"{first} {made}",
        f"{made} {second}",
    )
    return rng.choice(shapes)


def draw_hotels(rng: Random, count: int, split: Split) -> tuple[Hotel, ...]:
    """Draw listings numbered from 1, mostly of one city, like the results of a search for it."""
    cities = [rng.choice(words.CITIES)]
    if rng.random() < 0.1:
        cities.append(rng.choice(words.CITIES))
    names: list[str] = []
    while len(names) < count:
        name = draw_name(rng, split)
        if name not in names:
            names.append(name)
    prices = rng.sample(_PRICES, count)
    ratings = rng.sample(_RATINGS_TENTHS, count)
    distances = rng.sample(_DISTANCES_TENTHS, count)
    return tuple(
        Hotel(
            index=i + 1,
            name=names[i],
            kind=rng.choice(words.KINDS),
            city=rng.choice(cities),
            district=rng.choice(words.DISTRICTS),
            price=prices[i],
            rating_tenths=ratings[i],
            distance_tenths=distances[i],
            amenities=tuple(rng.sample(tuple(words.AMENITIES), rng.choice((2, 3, 3, 4, 4, 5)))),
            breakfast=rng.choice(
                (
                    "included",
                    f"${rng.randint(6, 24)} extra",
                    f"${rng.randint(6, 24)} extra",
                    "not offered",
                )
            ),
            pets=rng.choice(("welcome", "not allowed", "not allowed")),
            cancellation=rng.choice(
                ("free", f"free until {rng.randint(2, 9)} days before arrival", "not possible")
            ),
            praise=_praise(rng),
        )
        for i in range(count)
    )


def _praise(rng: Random) -> str:
    adjectives = rng.sample(words.PRAISE_ADJECTIVES, 2)
    nouns = rng.sample(words.PRAISE_NOUNS, 2)
    return f"{adjectives[0]} {nouns[0]} and {adjectives[1]} {nouns[1]}"
