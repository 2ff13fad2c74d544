"""Phrasings of questions; every function draws one of several."""

from random import Random

ATTRIBUTES = (
    "price",
    "rating",
    "distance",
    "district",
    "amenities",
    "breakfast",
    "pets",
    "cancellation",
    "guests",
)

_PREFERENCES = {
    "rating": (
        "The rating matters most to me.",
        "I want the best rated one.",
        "A good rating matters to me.",
        "Which one is rated best?",
        "It should have the best reviews.",
    ),
    "price": (
        "Which one is the cheapest?",
        "The price matters most to me.",
        "I want the cheapest one.",
        "It should cost as little as possible.",
        "I do not want to spend much.",
    ),
    "distance": (
        "Which one is closest to the centre?",
        "It should be as central as possible.",
        "I want to stay near the centre.",
        "The location matters most to me.",
        "Which one is nearest to the centre?",
    ),
}

_ADJECTIVE = {"rating": "best rated", "price": "cheapest", "distance": "most central"}


_PREAMBLES = (
    "Hello!",
    "Hi,",
    "Good morning.",
    "We arrive on Friday.",
    "We are two guests and arrive on Friday evening.",
    "I am travelling with my family in May.",
    "I am planning a weekend with friends.",
    "It is a business trip of three nights.",
    "We stay for a week in summer.",
    "We want to celebrate our anniversary.",
)


def preamble(rng: Random) -> str:
    """Return an introduction of the guest that does not change the answer."""
    return rng.choice(_PREAMBLES)


def ask_recommend(rng: Random, wish: str, criterion: str | None) -> str:
    if criterion is not None and rng.random() < 0.45:
        adjective = _ADJECTIVE[criterion]
        return rng.choice(
            (
                f"Which is the {adjective} hotel {wish}?",
                f"What is the {adjective} hotel {wish}?",
                f"Find me the {adjective} hotel {wish}.",
                f"I am looking for the {adjective} hotel {wish}.",
                f"Can you show me the {adjective} hotel {wish}?",
                f"What's the {adjective} place {wish}?",
            )
        )
    base = rng.choice(
        (
            f"I am looking for a hotel {wish}.",
            f"I need a hotel {wish}.",
            f"Which hotels are there {wish}?",
            f"Can you recommend a hotel {wish}?",
            f"We would like to stay in a hotel {wish}.",
            f"Please find me a hotel {wish}.",
            f"I want a place {wish}.",
            f"Do you have anything {wish}?",
            f"Show me hotels {wish}.",
            f"Is there a hotel {wish}?",
        )
    )
    return base if criterion is None else f"{base} {rng.choice(_PREFERENCES[criterion])}"


def ask_budget(rng: Random, wish: str, budget: int) -> str:
    return rng.choice(
        (
            (
                f"I am looking for a hotel {wish} for less than ${budget} a night. Which one would"
                " you recommend?"
            ),
            f"Which hotel {wish} costs less than ${budget} a night?",
            f"Can you find a hotel {wish} under ${budget}?",
            (
                f"My budget is ${budget} a night, and I would like a hotel {wish}. What do you"
                " suggest?"
            ),
            f"I need a hotel {wish}, but I do not want to pay more than ${budget} a night.",
            f"We want to stay in a hotel {wish} and our budget is ${budget}.",
            f"Is there anything {wish} below ${budget} a night?",
            (
                f"Please recommend a hotel {wish} under ${budget} a night, the better rated the"
                " better."
            ),
        )
    )


def ask_two(rng: Random, first: str, second: str) -> str:
    return rng.choice(
        (
            f"I need a hotel with {first} and {second}.",
            f"Which hotels have both {first} and {second}?",
            f"I am looking for a hotel with {first} and also {second}. Which one would you choose?",
            f"Can you recommend a hotel that has {first} and {second}?",
            f"Is there a hotel with {first} and {second}?",
        )
    )


def ask_below(rng: Random, budget: int) -> str:
    return rng.choice(
        (
            f"Which hotels cost less than ${budget} a night?",
            f"Show me hotels under ${budget}.",
            f"My budget is ${budget} a night. What do you suggest?",
            f"I do not want to spend more than ${budget} a night. Which hotel would you choose?",
            f"Is there anything below ${budget}?",
            f"What can I get for less than ${budget} a night?",
        )
    )


def ask_superlative(rng: Random, criterion: str) -> str:
    adjective = _ADJECTIVE[criterion]
    special = {
        "rating": (
            "Which hotel has the best rating?",
            "Which one is rated best?",
            "Which hotel do guests like most?",
        ),
        "price": (
            "Which hotel costs the least?",
            "Which one has the lowest price?",
            "What is the cheapest option?",
        ),
        "distance": (
            "Which hotel is closest to the centre?",
            "Which one is nearest to the centre?",
            "Where would I stay closest to the centre?",
        ),
    }[criterion]
    return rng.choice(
        (
            *special,
            *special,
            f"Which is the {adjective} hotel?",
            f"What is the {adjective} hotel here?",
            f"Show me the {adjective} hotel of all.",
            f"Which of these hotels is the {adjective}?",
        )
    )


def ask_attribute(rng: Random, subject: str, attribute: str) -> str:
    choices = {
        "price": (
            f"How much is {subject}?",
            f"What does {subject} cost?",
            f"What is the price of {subject}?",
            f"How much does {subject} cost per night?",
        ),
        "rating": (
            f"How is {subject} rated?",
            f"What is the rating of {subject}?",
            f"Is {subject} well rated?",
        ),
        "distance": (
            f"How far is {subject} from the centre?",
            f"Is {subject} close to the centre?",
            f"What is the distance from {subject} to the centre?",
        ),
        "district": (
            f"Where is {subject}?",
            f"Which district is {subject} in?",
            f"In which area is {subject}?",
        ),
        "amenities": (
            f"What amenities does {subject} have?",
            f"What does {subject} offer?",
            f"Which facilities does {subject} have?",
        ),
        "breakfast": (
            f"Is breakfast included at {subject}?",
            f"Does {subject} serve breakfast?",
            f"How much is breakfast at {subject}?",
        ),
        "pets": (
            f"Can I bring my dog to {subject}?",
            f"Are pets allowed at {subject}?",
            f"Does {subject} take pets?",
        ),
        "cancellation": (
            f"Can I cancel a booking at {subject}?",
            f"Is cancellation free at {subject}?",
            f"What is the cancellation policy of {subject}?",
        ),
        "guests": (
            f"What do guests say about {subject}?",
            f"How are the reviews of {subject}?",
            f"What do people like about {subject}?",
        ),
    }[attribute]
    return rng.choice(choices)


def ask_has(rng: Random, subject: str, noun: str) -> str:
    return rng.choice(
        (
            f"Does {subject} have {noun}?",
            f"Is there {noun} at {subject}?",
            f"Can you tell me if {subject} has {noun}?",
            f"I would like {noun}. Does {subject} have that?",
        )
    )


def ask_describe(rng: Random, subject: str) -> str:
    return rng.choice(
        (
            f"Tell me about {subject}.",
            f"Tell me more about {subject}.",
            f"What can you tell me about {subject}?",
            f"Describe {subject}, please.",
            f"Give me a summary of {subject}.",
            f"Is {subject} a good choice?",
        )
    )


def ask_compare(rng: Random, one: str, two: str) -> str:
    return rng.choice(
        (
            f"Compare {one} and {two}.",
            f"Which is better, {one} or {two}?",
            f"Should I book {one} or {two}?",
            f"What is the difference between {one} and {two}?",
            f"{one} or {two}: which one would you choose?",
        )
    )
