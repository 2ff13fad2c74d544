"""How questions are asked and answers are worded.

Only wording lives here: which hotel is right is decided in `turns`. Every function draws one of several phrasings.
"""

from random import Random

from inference.demo_model.hotels import Hotel

ATTRIBUTES = ("price", "rating", "distance", "district", "amenities", "breakfast", "pets", "cancellation", "guests")

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
    """What guests say before they ask; it changes nothing about the answer."""
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
            f"I am looking for a hotel {wish} for less than ${budget} a night. Which one would you recommend?",
            f"Which hotel {wish} costs less than ${budget} a night?",
            f"Can you find a hotel {wish} under ${budget}?",
            f"My budget is ${budget} a night, and I would like a hotel {wish}. What do you suggest?",
            f"I need a hotel {wish}, but I do not want to pay more than ${budget} a night.",
            f"We want to stay in a hotel {wish} and our budget is ${budget}.",
            f"Is there anything {wish} below ${budget} a night?",
            f"Please recommend a hotel {wish} under ${budget} a night, the better rated the better.",
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
        "rating": ("Which hotel has the best rating?", "Which one is rated best?", "Which hotel do guests like most?"),
        "price": ("Which hotel costs the least?", "Which one has the lowest price?", "What is the cheapest option?"),
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
        "rating": (f"How is {subject} rated?", f"What is the rating of {subject}?", f"Is {subject} well rated?"),
        "distance": (
            f"How far is {subject} from the centre?",
            f"Is {subject} close to the centre?",
            f"What is the distance from {subject} to the centre?",
        ),
        "district": (f"Where is {subject}?", f"Which district is {subject} in?", f"In which area is {subject}?"),
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
        "pets": (f"Can I bring my dog to {subject}?", f"Are pets allowed at {subject}?", f"Does {subject} take pets?"),
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


def attribute_sentence(rng: Random, hotel: Hotel, label: str, attribute: str) -> tuple[str, str]:
    """The answer and the fact in it; `label` is how the hotel is referred to."""
    amenities = ", ".join(hotel.amenities)
    answers = {
        "price": ((f"{label} costs {hotel.cost}.", f"{label} costs ${hotel.price} per night."), f"${hotel.price}"),
        "rating": ((f"{label} is rated {hotel.rating}.", f"{label} has a rating of {hotel.rating}."), hotel.rating),
        "distance": ((f"{label} is {hotel.distance} from the centre.",) * 2, hotel.distance),
        "district": ((f"{label} is in {hotel.district} of {hotel.city}.",) * 2, hotel.district),
        "amenities": (
            (f"{label} offers the following: {amenities}.", f"{label} has these amenities: {amenities}."),
            amenities,
        ),
        "breakfast": ((f"{label}: {hotel.breakfast_sentence()}",) * 2, hotel.breakfast),
        "pets": ((f"{label}: pets are {hotel.pets}.",) * 2, hotel.pets),
        "cancellation": ((f"{label}: cancellation is {hotel.cancellation}.",) * 2, hotel.cancellation),
        "guests": (
            (f"{label}: guests mention {hotel.praise}.", f"{label} is known for {hotel.praise}."),
            hotel.praise,
        ),
    }
    sentences, fact = answers[attribute]
    sentence = rng.choice(sentences)
    if attribute in ("price", "rating", "distance") and rng.random() < 0.4:
        other = {
            "price": f"It is rated {hotel.rating}.",
            "rating": f"It costs {hotel.cost}.",
            "distance": f"It is in {hotel.district}.",
        }[attribute]
        sentence = f"{sentence} {other}"
    return sentence, fact


def ask_has(rng: Random, subject: str, noun: str) -> str:
    return rng.choice(
        (
            f"Does {subject} have {noun}?",
            f"Is there {noun} at {subject}?",
            f"Can you tell me if {subject} has {noun}?",
            f"I would like {noun}. Does {subject} have that?",
        )
    )


def has(hotel: Hotel, subject: str, noun: str) -> str:
    return f"{subject} does have {noun}. A night costs ${hotel.price}."


def has_not(hotel: Hotel, subject: str, noun: str) -> str:
    return f"{subject} does not list {noun}. It offers: {', '.join(hotel.amenities)}."


def compared(hotel: Hotel) -> str:
    return f"- {hotel.citation}: {hotel.cost}, rated {hotel.rating}, {hotel.distance} from the centre"


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


def description(rng: Random, hotel: Hotel) -> str:
    article = "an" if hotel.kind[0] in "aeiou" else "a"
    opening = f"{hotel.citation} is {article} {hotel.kind} in {hotel.district} of {hotel.city}, {hotel.distance} from the centre."
    cost = rng.choice(
        (f"It costs {hotel.cost} and is rated {hotel.rating}.", f"A night costs ${hotel.price}, and the rating is {hotel.rating}.")
    )
    offers = f"It offers: {', '.join(hotel.amenities)}."
    extras = [hotel.breakfast_sentence(), hotel.pets_sentence(), hotel.cancellation_sentence()]
    return " ".join([opening, cost, offers, *extras, hotel.praise_sentence()])


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


def side_by_side(rng: Random) -> str:
    return rng.choice(("Here are the two side by side:", "This is how the two compare:"))


def comparison(rng: Random, cheaper: Hotel, better: Hotel, nearer: Hotel) -> str:
    return " ".join(
        (
            rng.choice((f"The cheaper one is {cheaper.label}.", f"You pay less at {cheaper.label}.")),
            rng.choice((f"The better rated one is {better.label}.", f"Guests prefer {better.label}.")),
            rng.choice((f"The closer one to the centre is {nearer.label}.", f"More central is {nearer.label}.")),
        )
    )


def found(rng: Random, wish: str) -> str:
    return rng.choice(
        (
            f"Here is what I found {wish}:",
            f"Among the hotels {wish}, I found:",
            f"These are the options {wish}:",
        )
    )


def none_has(rng: Random, noun: str) -> str:
    return rng.choice(
        (
            f"I am sorry, but none of the hotels in the listings offers {noun}.",
            f"Unfortunately, none of the listings mentions {noun}. Would another hotel suit you?",
            f"I am sorry, none of the hotels has {noun}. Is there anything else that matters to you?",
        )
    )


def none_has_both(rng: Random, first: str, second: str) -> str:
    return rng.choice(
        (
            f"So none of the hotels offers both {first} and {second}.",
            f"Unfortunately, none of the hotels has {first} as well as {second}.",
        )
    )


def none_in_budget(rng: Random, wish: str, budget: int, cheapest: Hotel) -> str:
    return rng.choice(
        (
            f"None of them is below ${budget}. The cheapest one is {cheapest.label} at {cheapest.cost}.",
            f"So nothing {wish} costs less than ${budget}. The closest is {cheapest.label} at {cheapest.cost}.",
        )
    )


def none_below(rng: Random, budget: int, cheapest: Hotel) -> str:
    label, cost = cheapest.label, cheapest.cost
    return rng.choice(
        (
            f"I am sorry, but none of the hotels costs less than ${budget}. The cheapest one is {label} at {cost}.",
            f"Nothing in the listings is below ${budget}. The lowest price is {cost} at {label}.",
        )
    )


def verdict(rng: Random, pick: Hotel, reason: str) -> str:
    """The choice and its reason; `only` is the reason when there was nothing to choose from."""
    opening = rng.choice((f"My pick is {pick.label}", f"I recommend {pick.label}", f"I would choose {pick.label}"))
    because = {
        "rating": (
            f"it is the best rated of them at {pick.rating} and costs {pick.cost}",
            f"with {pick.rating} it has the best rating, and a night costs ${pick.price}",
        ),
        "price": (
            f"it is the cheapest of them at {pick.cost} and is rated {pick.rating}",
            f"at {pick.cost} it has the lowest price, and it is rated {pick.rating}",
        ),
        "distance": (
            f"it is the closest to the centre at {pick.distance} and costs {pick.cost}",
            f"it is only {pick.distance} from the centre, and a night costs ${pick.price}",
        ),
        "only": (
            f"it is the only one that fits, costs {pick.cost} and is rated {pick.rating}",
            f"it is the one that fits, at {pick.cost} and rated {pick.rating}",
        ),
    }[reason]
    return f"{opening} in {pick.district}: {rng.choice(because)}."


def superlative(rng: Random, pick: Hotel, criterion: str) -> str:
    return rng.choice(
        {
            "rating": (
                f"The best rated hotel is {pick.label} in {pick.district}, rated {pick.rating}. It costs {pick.cost}.",
                f"Guests like {pick.label} most: it is rated {pick.rating} and costs {pick.cost}.",
            ),
            "price": (
                f"The cheapest hotel is {pick.label} in {pick.district} at {pick.cost}. It is rated {pick.rating}.",
                f"The lowest price is at {pick.label}: it costs {pick.cost} and is rated {pick.rating}.",
            ),
            "distance": (
                f"The most central hotel is {pick.label} in {pick.district}, {pick.distance} from the centre.",
                f"The closest to the centre is {pick.label}: it is {pick.distance} away and costs {pick.cost}.",
            ),
        }[criterion]
    )


def details(rng: Random, pick: Hotel) -> list[str]:
    """Two sentences about the choice; a booking that cannot be cancelled is always mentioned."""
    amenities = f"It offers: {', '.join(pick.amenities)}."
    first = rng.choice((amenities, pick.praise_sentence(), pick.breakfast_sentence()))
    if pick.cancellation == "not possible":
        return [first, pick.cancellation_sentence()]
    return [first, rng.choice((pick.cancellation_sentence(), pick.pets_sentence()))]


def runner_up(rng: Random, second: Hotel, criterion: str) -> str:
    value = {"rating": f"rated {second.rating}", "price": f"at {second.cost}", "distance": f"{second.distance} away"}
    opening = rng.choice(("The runner-up is", "Second comes"))
    return f"{opening} {second.label}, {value[criterion]}."


def not_listed(rng: Random, name: str) -> str:
    return rng.choice(
        (
            f"I am sorry, but {name} is not in the listings.",
            f"I cannot find {name} in the listings. Would you like to know about another hotel?",
            f"There is no {name} in the listings, so I cannot say anything about it.",
        )
    )
