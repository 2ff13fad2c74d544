"""Patterns of answers: few of them, with the facts in the order of the listings.

A network of this size learns to copy long before it learns to choose words, so only the questions
vary in wording.
"""

from collections.abc import Sequence
from random import Random

from demo.hotels import Hotel

REASONS = {
    "rating": "the best rated one",
    "price": "the cheapest one",
    "distance": "the closest one to the centre",
}


def figures(hotel: Hotel) -> str:
    return f"costs {hotel.cost}, is rated {hotel.rating} and is {hotel.distance} from the centre"


def amenities(hotel: Hotel) -> str:
    return f"It offers: {', '.join(hotel.amenities)}."


def details(hotel: Hotel) -> str:
    """Return place, figures, amenities and cancellation terms of the hotel."""
    return (
        f"It is in {hotel.district}, {figures(hotel)}. {amenities(hotel)}"
        f" {hotel.cancellation_sentence()}"
    )


def others(ranked: Sequence[Hotel]) -> list[str]:
    """Return a line each for the second and the third matching hotel."""
    return [f"{hotel.label} comes next: it {figures(hotel)}." for hotel in ranked[1:3]]


def recommendation(rng: Random, fitting: Sequence[Hotel], wish: str, reason: str) -> str:
    """Recommend the first matching hotel with its facts, and up to two more."""
    count = "1 hotel" if len(fitting) == 1 else f"{len(fitting)} hotels"
    why = REASONS[reason] if len(fitting) > 1 else "the only one"
    opening = rng.choice(("I recommend", "My pick is"))
    first = (
        f"I found {count} {wish}. {opening} {fitting[0].label}: it is {why}. {details(fitting[0])}"
    )
    return "\n".join([first, *others(fitting)])


def nothing_fits(closest: Hotel, wish: str) -> str:
    return (
        f"I am sorry, I found no hotel {wish}. The closest match is {closest.label}."
        f" {details(closest)}"
    )


def best_of_all(ranked: Sequence[Hotel], reason: str) -> str:
    """Return the best of all listings by one figure."""
    first = f"Of all hotels, {ranked[0].label} is {REASONS[reason]}. {details(ranked[0])}"
    return "\n".join([first, *others(ranked)])


def attribute(hotel: Hotel, name: str) -> tuple[str, str]:
    """Return the answer to a question about one attribute, and the fact in it."""
    listed = ", ".join(hotel.amenities)
    sentence, fact = {
        "price": (f"{hotel.label} costs {hotel.cost}.", hotel.cost),
        "rating": (f"{hotel.label} is rated {hotel.rating}.", f"rated {hotel.rating}"),
        "distance": (f"{hotel.label} is {hotel.distance} from the centre.", hotel.distance),
        "district": (
            f"{hotel.label} is in {hotel.district} of {hotel.city}.",
            f"{hotel.district} of {hotel.city}",
        ),
        "amenities": (f"{hotel.label} offers: {listed}.", listed),
        "breakfast": (f"{hotel.label}: {hotel.breakfast_sentence()}", hotel.breakfast_sentence()),
        "pets": (f"{hotel.label}: {hotel.pets_sentence()}", hotel.pets_sentence()),
        "cancellation": (
            f"{hotel.label}: {hotel.cancellation_sentence()}",
            hotel.cancellation_sentence(),
        ),
        "guests": (f"{hotel.label}: {hotel.praise_sentence()}", hotel.praise_sentence()),
    }[name]
    return sentence, fact


def has(hotel: Hotel, noun: str, fits: bool) -> str:
    verdict = (
        f"Yes, {hotel.label} has {noun}." if fits else f"No, {hotel.label} does not list {noun}."
    )
    return f"{verdict} {amenities(hotel)}"


def offers(hotel: Hotel) -> str:
    """Answer a follow-up question about an amenity from the listing, without conclusions."""
    return f"This is what {hotel.label} offers: {', '.join(hotel.amenities)}."


def description(hotel: Hotel) -> str:
    article = "an" if hotel.kind[0] in "aeiou" else "a"
    return (
        f"{hotel.label} is {article} {hotel.kind} in {hotel.district} of {hotel.city}. It"
        f" {figures(hotel)}. {amenities(hotel)} {hotel.breakfast_sentence()}"
        f" {hotel.pets_sentence()} {hotel.cancellation_sentence()} {hotel.praise_sentence()}"
    )


def comparison(better: Hotel, other: Hotel) -> str:
    """Compare two hotels; the search step puts the better rated one first."""
    return (
        f"{better.label} {figures(better)}.\n{other.label} {figures(other)}.\nGuests rate"
        f" {better.label} higher."
    )


def not_listed(name: str) -> str:
    return (
        f"I am sorry, I cannot find {name} in the listings. Would you like to know about another"
        " hotel?"
    )
