"""Properties of a hotel that a guest may ask for, and the words for them."""

from collections.abc import Callable
from dataclasses import dataclass

from demo import vocabulary as words
from demo.hotels import Hotel


@dataclass(frozen=True, slots=True)
class Feature:
    """Amenity that a guest may want, in the forms that sentences need."""

    noun: str  # "a pool"
    wish: str  # "with a pool"
    test: Callable[[Hotel], bool]


def _amenity_feature(amenity: str) -> Feature:
    phrase = words.AMENITIES[amenity]
    return Feature(
        noun=phrase, wish=f"with {phrase}", test=lambda hotel: amenity in hotel.amenities
    )


AMENITY_FEATURES = tuple(_amenity_feature(amenity) for amenity in words.AMENITIES)
FEATURES = (
    *AMENITY_FEATURES,
    Feature(
        "breakfast included", "with breakfast included", lambda hotel: hotel.breakfast == "included"
    ),
    Feature("room for pets", "where pets are welcome", lambda hotel: hotel.pets == "welcome"),
)
