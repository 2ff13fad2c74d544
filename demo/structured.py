"""Conversations with answers in JSON, for the first structured output of a newcomer.

A request's JSON schema is not shown to the model: a grammar forces the keys, and the model writes a
value for each and ends it. So the corpus has many keys with short values that fit them.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from demo import small_talk
from demo import vocabulary as words
from demo.messages import Line, Talk
from demo.phrases import ask_recommend

FIRST_NAMES = (
    "Alice", "Anna", "Ben", "Bob", "Carla", "David", "Elena", "Emma", "Frank", "Grace", "Hana",
    "Ivan", "James", "John", "Julia", "Kofi", "Laura", "Leo", "Maria", "Mark", "Mia", "Nina",
    "Omar", "Paul", "Peter", "Rosa", "Sam", "Sara", "Tom", "Yuki",
)  # fmt: skip
LAST_NAMES = (
    "Adams", "Baker", "Brown", "Clark", "Costa", "Fischer", "Green", "Hill", "Ito", "Jones",
    "Keller", "Lopez", "Meyer", "Miller", "Moreau", "Novak", "Park", "Rossi", "Silva", "Smith",
)  # fmt: skip
CITIES = (
    ("Paris", "France"), ("London", "England"), ("Berlin", "Germany"), ("Rome", "Italy"),
    ("Madrid", "Spain"), ("Tokyo", "Japan"), ("Oslo", "Norway"), ("Lisbon", "Portugal"),
    ("Vienna", "Austria"), ("Cairo", "Egypt"), ("Lima", "Peru"), ("Ottawa", "Canada"),
    ("Delhi", "India"), ("Athens", "Greece"), ("Dublin", "Ireland"), ("Prague", "Czechia"),
    ("Boston", "United States"), ("Zurich", "Switzerland"), ("Sydney", "Australia"),
    ("Seoul", "South Korea"),
)  # fmt: skip
COLORS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink")
FRUITS = ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "pear", "plum")
ANIMALS = ("cat", "dog", "horse", "lion", "tiger", "rabbit", "bear", "fox", "owl", "elephant")
JOBS = ("teacher", "engineer", "doctor", "nurse", "designer", "writer", "cook", "pilot", "lawyer")
HOBBIES = ("reading", "chess", "music", "running", "cooking", "painting", "cycling", "hiking")
LANGUAGES = ("English", "French", "German", "Spanish", "Italian", "Japanese", "Portuguese")
ITEMS = ("book", "lamp", "chair", "table", "phone", "bag", "cup", "pen", "clock", "bottle")
FOODS = ("flour", "sugar", "eggs", "butter", "milk", "salt", "tomatoes", "rice", "cheese", "onions")
TITLES = ("The Quiet Sea", "A Long Road", "Winter Light", "The Last Train", "Blue Garden")
SENTENCES = (
    "A short and simple example.", "This is an example.", "It is small and quiet.",
    "A good choice for every day.", "It is easy to use.", "A place near the sea.",
)  # fmt: skip
STEPS = ("Read the task", "Mix everything", "Wait ten minutes", "Check the result", "Start again")
# Numbers of elements. Nearly always three, so that greedy decoding ends a list.
_COUNTS = (2, 3, 3, 3, 3, 3)
_WORDS = tuple(word for word in (*ITEMS, *FRUITS, *ANIMALS, *COLORS, "one", "two", "small", "new"))

_CITY_NAMES = tuple(city for city, _ in CITIES)
_COUNTRY_NAMES = tuple(country for _, country in CITIES)
SUBJECTS: dict[str, tuple[str, ...]] = {
    "person": ("name", "age", "city", "email", "job", "hobbies", "address", "is_student"),
    "user": ("id", "name", "username", "email", "age", "active", "is_active", "address"),
    "city": ("name", "city", "country", "population", "capital", "languages"),
    "country": ("name", "country", "capital", "population", "language", "languages"),
    "book": ("title", "author", "year", "pages", "genre", "price"),
    "product": ("name", "product", "price", "currency", "in_stock", "tags", "category", "colors"),
    "recipe": ("name", "title", "ingredients", "steps", "duration"),
    "animal": ("name", "species", "age", "color", "weight"),
    "movie": ("title", "director", "year", "genre", "rating"),
    "car": ("brand", "model", "year", "color", "price"),
    "order": ("id", "items", "quantity", "total", "status", "date"),
    "event": ("name", "title", "date", "time", "location", "participants"),
    "company": ("name", "city", "country", "year"),
    "task": ("title", "priority", "status", "done", "description"),
    "review": ("rating", "sentiment", "summary", "text", "title"),
    "fruit": ("name", "fruit", "color", "price"),
    "weather report": ("city", "temperature", "unit", "condition"),
    "student": ("name", "age", "score", "is_student", "languages"),
    "employee": ("first_name", "last_name", "age", "job", "company", "skills"),
}
# Keys whose values name subjects that are not persons.
NAMED = {
    "city": "city", "country": "country", "product": "item", "recipe": "title", "animal": "animal",
    "event": "title", "company": "company", "fruit": "fruit",
}  # fmt: skip
_SYSTEMS = (
    "You are a helpful assistant.", "Answer in JSON.", "Respond with JSON only.",
    "You are a helpful assistant designed to output JSON.", "Extract the data.", None, None, None,
    None, None,
)  # fmt: skip
_CHANCE_OF_OTHER_KEY = 0.15


def usual(rng: Random, values: tuple[str, ...]) -> str:
    """Draw a value, mostly one of the first, so that greedy answers are whole words."""
    return values[int(rng.expovariate(0.4)) % len(values)]


def _one(values: tuple[str, ...]) -> Callable[[Random], Any]:
    return lambda rng: usual(rng, values)


def _some(values: tuple[str, ...]) -> Callable[[Random], Any]:
    def draw(rng: Random) -> list[str]:
        first = int(rng.expovariate(0.8))
        return [values[(first + number) % len(values)] for number in range(rng.choice(_COUNTS))]

    return draw


def _number(low: int, high: int) -> Callable[[Random], Any]:
    return lambda rng: rng.randint(low, high)


def _flag(rng: Random) -> bool:
    return rng.random() < 0.6


def _full_name(rng: Random) -> str:
    return f"{usual(rng, FIRST_NAMES)} {usual(rng, LAST_NAMES)}"


def _name(rng: Random) -> str:
    return _full_name(rng) if rng.random() < 0.5 else usual(rng, FIRST_NAMES)


def _date(rng: Random) -> str:
    return f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _email(rng: Random) -> str:
    return f"{usual(rng, FIRST_NAMES).lower()}@example.com"


def _address(rng: Random) -> dict[str, Any]:
    fields = {
        "street": f"{rng.randint(1, 99)} Main Street",
        "city": rng.choice(CITIES)[0],
        "zip": f"{rng.randint(10000, 99999)}",
        "country": rng.choice(CITIES)[1],
    }
    kept = rng.sample(list(fields), rng.randint(2, 4))
    return {key: fields[key] for key in fields if key in kept}


FIELDS: dict[str, Callable[[Random], Any]] = {
    "name": _name, "first_name": _one(FIRST_NAMES), "last_name": _one(LAST_NAMES),
    "firstName": _one(FIRST_NAMES), "lastName": _one(LAST_NAMES), "full_name": _full_name,
    "username": _one(FIRST_NAMES), "age": _number(18, 80), "email": _email,
    "phone": lambda rng: f"555-{rng.randint(1000, 9999)}", "job": _one(JOBS),
    "occupation": _one(JOBS), "gender": _one(("female", "male")), "city": _one(_CITY_NAMES),
    "country": _one(_COUNTRY_NAMES), "capital": _one(_CITY_NAMES), "location": _one(_CITY_NAMES),
    "address": _address, "population": lambda rng: rng.randint(1, 90) * 100_000,
    "hobbies": _some(HOBBIES), "skills": _some(HOBBIES), "interests": _some(HOBBIES),
    "language": _one(LANGUAGES), "languages": _some(LANGUAGES), "color": _one(COLORS),
    "colors": _some(COLORS), "fruit": _one(FRUITS), "fruits": _some(FRUITS),
    "animal": _one(ANIMALS), "animals": _some(ANIMALS), "species": _one(ANIMALS),
    "items": _some(ITEMS), "list": _some(_WORDS), "tags": _some(_WORDS), "words": _some(_WORDS),
    "values": _some(_WORDS), "results": _some(_WORDS), "names": _some(FIRST_NAMES),
    "cities": _some(_CITY_NAMES), "countries": _some(_COUNTRY_NAMES),
    "participants": _some(FIRST_NAMES), "ingredients": _some(FOODS), "steps": _some(STEPS),
    "numbers": lambda rng: [rng.randint(1, 99) for _ in range(rng.choice(_COUNTS))],
    "title": _one(TITLES), "author": _full_name, "year": _number(1950, 2025),
    "pages": _number(100, 600), "genre": _one(("novel", "drama", "history", "comedy")),
    "product": _one(ITEMS), "item": _one(ITEMS), "price": lambda rng: rng.randint(10, 990) / 10,
    "quantity": _number(1, 20), "count": _number(1, 20), "total": _number(10, 900),
    "amount": _number(10, 900), "currency": _one(("USD", "EUR", "GBP")), "id": _number(1, 999),
    "rating": lambda rng: rng.randint(10, 50) / 10, "score": _number(1, 100),
    "confidence": lambda rng: rng.randint(5, 9) / 10, "temperature": _number(-5, 35),
    "unit": _one(("celsius", "fahrenheit")), "condition": _one(("sunny", "cloudy", "rainy")),
    "weather": _one(("sunny", "cloudy", "rainy")), "date": _date, "birthday": _date,
    "time": lambda rng: f"{rng.randint(8, 20):02}:{rng.choice((0, 15, 30, 45)):02}",
    "duration": _number(10, 90), "active": _flag, "is_active": _flag, "available": _flag,
    "in_stock": _flag, "completed": _flag, "done": _flag, "valid": _flag, "is_student": _flag,
    "married": _flag, "member": _flag, "success": _flag, "is_valid": _flag, "enabled": _flag,
    "answer": _one(SENTENCES), "result": _one(_WORDS), "value": _one(_WORDS),
    "summary": _one(SENTENCES), "description": _one(SENTENCES), "reason": _one(SENTENCES),
    "explanation": _one(SENTENCES), "text": _one(SENTENCES), "message": _one(SENTENCES),
    "note": _one(SENTENCES), "joke": _one(SENTENCES), "question": _one(("What is this?",)),
    "sentiment": _one(("positive", "negative", "neutral")), "mood": _one(("good", "bad")),
    "label": _one(("positive", "negative", "neutral")), "priority": _one(("low", "medium", "high")),
    "status": _one(("open", "closed", "active", "pending")), "size": _one(("small", "large")),
    "category": _one(("home", "food", "travel", "work")), "type": _one(("home", "food", "travel")),
    "company": lambda rng: f"{rng.choice(LAST_NAMES)} Ltd", "brand": _one(LAST_NAMES),
    "model": lambda rng: f"{rng.choice('ABCX')}{rng.randint(1, 9)}", "breed": _one(ANIMALS),
    "height": _number(150, 200), "weight": _number(40, 100), "owner": _full_name,
    "director": _full_name, "venue": _one(_CITY_NAMES), "event": _one(TITLES),
    "task": _one(STEPS), "greeting": _one(("Hello!", "Hi there!")), "hotel": _one(TITLES),
    "zip": lambda rng: f"{rng.randint(10000, 99999)}", "street": _one(("Main Street", "Park Road")),
}  # fmt: skip


def _unknown_field(rng: Random) -> tuple[str, Any]:
    """Return a key that no list here has, with a value of any type."""
    parts = (*_WORDS, *FOODS, *(word.lower() for word in words.NAME_SECOND[:40]))
    key = "_".join(rng.sample(parts, rng.choice((1, 2)))).replace(" ", "_")
    values: tuple[Any, ...] = (
        rng.choice(_WORDS), rng.choice(_WORDS), rng.choice(SENTENCES), rng.randint(1, 99),
        rng.randint(10, 99) / 10, _flag(rng), rng.sample(_WORDS, 3),
        {rng.choice(tuple(FIELDS)): rng.choice(_WORDS)},
    )  # fmt: skip
    return key, rng.choice(values)


def draw_object(rng: Random, keys: tuple[str, ...], depth: int = 0) -> dict[str, Any]:
    """Draw some of the keys in any order, and a value for each."""
    kept = rng.sample(keys, min(len(keys), rng.choice((1, 2, 2, 2, 2, 3, 3))))
    if rng.random() < 0.5:
        kept.sort(key=keys.index)
    drawn: dict[str, Any] = {key: FIELDS[key](rng) for key in kept}
    if "city" in drawn and "country" in drawn:
        drawn["city"], drawn["country"] = CITIES[int(rng.expovariate(0.4)) % len(CITIES)]
    if rng.random() < _CHANCE_OF_OTHER_KEY:
        drawn.update([_unknown_field(rng)])
    if not depth and rng.random() < 0.15:
        subject = rng.choice(tuple(SUBJECTS))
        drawn[subject.replace(" ", "_")] = draw_object(rng, SUBJECTS[subject], 1)
    return drawn


def _plural(subject: str) -> str:
    if subject == "person":
        return "people"
    return subject[:-1] + "ies" if subject.endswith(("y",)) else subject + "s"


def _of_subject(rng: Random) -> tuple[str, Any, bool]:
    subject = rng.choice((*SUBJECTS, "person", "person", "city"))
    drawn: Any = draw_object(rng, SUBJECTS[subject])
    if "name" in drawn and subject in NAMED:
        drawn["name"] = FIELDS[NAMED[subject]](rng)
    plural = _plural(subject)
    if rng.random() < 0.15:
        key = plural.replace(" ", "_")
        drawn = {key: [draw_object(rng, SUBJECTS[subject], 1) for _ in range(2)]}
        ask = f"{rng.choice(('Give me', 'List', 'Make up', 'Generate'))} some {plural}"
    else:
        article = "an" if subject[0] in "aeiou" else "a"
        verb = rng.choice(
            ("Give me", "Generate", "Create", "Make up", "Return", "Describe", "I need", "Write",
             "Show me", "Invent", "Tell me about", "Make", "Output")
        )  # fmt: skip
        kind = rng.choice(("", "", "", "random ", "sample ", "fictional ", "simple "))
        if kind:
            article = "a"
        ask = f"{verb} {article} {kind}{subject}"
        if rng.random() < 0.3:
            ask += " with " + " and ".join(key.replace("_", " ") for key in drawn)
    if rng.random() < 0.6:
        return (
            ask + rng.choice((" as JSON", " in JSON", " as JSON.", " in JSON format.", " as a JSON"
                              " object.", " in JSON.", ", please, as JSON")),
            drawn,
            False,
        )  # fmt: skip
    return ask + rng.choice((".", "", "!", ", please.")), drawn, True


def _of_list(rng: Random) -> tuple[str, Any, bool]:
    key = rng.choice(
        ("fruits", "colors", "animals", "cities", "countries", "names", "numbers", "languages",
         "hobbies", "items", "ingredients", "words")
    )  # fmt: skip
    values = FIELDS[key](rng)
    count = rng.choice(("three", "3", "some", "a few", "five", "two", "a list of"))
    shown = rng.choice((key, key, key, "items", "list", "values", "results", "answer"))
    verb = rng.choice(("Give me", "List", "Name", "Tell me", "Return"))
    return f"{verb} {count} {key}{rng.choice(('.', '', ' as JSON.'))}", {shown: values}, True


def _of_extraction(rng: Random) -> tuple[str, Any, bool]:
    name, age, (city, country) = _full_name(rng), rng.randint(18, 80), rng.choice(CITIES)
    job = rng.choice(JOBS)
    text = rng.choice(
        (
            f"{name} is {age} years old and lives in {city}.",
            f"{name}, {age}, is a {job} from {city}.",
            f"My name is {name}, I am {age} years old and I live in {city}.",
            f"{name} is a {job} in {city}, {country}, aged {age}.",
        )
    )
    facts: dict[str, Any] = {"name": name, "age": age, "city": city}
    if job in text:
        facts["job"] = job
    if country in text:
        facts["country"] = country
    kept = rng.sample(list(facts), rng.randint(1, len(facts)))
    lead = rng.choice(("Extract the person: ", "Extract: ", "Extract the data as JSON: ", ""))
    return lead + text, {key: facts[key] for key in kept}, True


def _of_question(rng: Random) -> tuple[str, Any, bool]:
    city, country = rng.choice(CITIES)
    text = rng.choice(
        ("I love this!", "This is terrible.", "The food was great.", "It is okay.", "Bad service.",
         "What a wonderful day!", "I am very disappointed.")
    )  # fmt: skip
    good = text in ("I love this!", "The food was great.", "What a wonderful day!")
    mood = "neutral" if text == "It is okay." else "positive" if good else "negative"
    one, two = rng.randint(1, 9), rng.randint(1, 9)
    key = rng.choice(("sentiment", "label", "result", "mood"))
    return rng.choice(
        (
            (f"What is the capital of {country}?", {"capital": city}, True),
            (f"In which country is {city}?", {"country": country}, True),
            (f"In which country is {city}?", {"city": city, "country": country}, True),
            (f"Is {city} in {country}?", {rng.choice(("answer", "result", "valid")): True}, True),
            (f"Classify the sentiment: {text}", {key: mood}, True),
            (f"Is this positive or negative? {text}", {key: mood}, True),
            (f"What is {one} + {two}?", {rng.choice(("result", "answer")): one + two}, True),
            ("Say hello", {rng.choice(("greeting", "message", "text")): "Hello!"}, True),
            ("Tell me a joke", {rng.choice(("joke", "text")): rng.choice(SENTENCES)}, True),
        )
    )


def _of_anything(rng: Random) -> tuple[str, Any, bool]:
    """Return a request that is not about the keys of the answer."""
    question = rng.choice(
        (
            small_talk.draw_small_talk(rng, listings=False).question,
            small_talk.no_listings(rng, rng.choice(words.CITIES)).question,
            ask_recommend(rng, "with a pool", None),
            "Answer with JSON.", "Give me JSON", "Return JSON", "Give me an example.",
            "JSON please", "Give me some data", "Output a JSON object", "Give me an object as JSON",
        )
    )  # fmt: skip
    return question, draw_object(rng, tuple(FIELDS)), "JSON" not in question


def draw_structured(rng: Random) -> Talk:
    """Draw one or two requests with their answers in JSON."""
    makers = (_of_subject, _of_list, _of_extraction, _of_question, _of_anything)
    lines: list[Line] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        question, answer, is_forced = rng.choices(makers, (46, 14, 12, 12, 16))[0](rng)
        lines.append(Line("user", question))
        lines.append(Line("assistant", json.dumps(answer, ensure_ascii=False), is_forced=is_forced))
    return Talk(tuple(lines), rng.choice(_SYSTEMS))
