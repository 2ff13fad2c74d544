"""Conversations with tool calls: a question, a call, the result of the function, and the answer.

The functions are usual first examples, and others with invented names, whose names and arguments
the model can only copy from the list of functions.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from demo import small_talk
from demo import vocabulary as words
from demo.messages import Call, Function, Line, Talk
from demo.structured import ANIMALS, CITIES, FIRST_NAMES, FOODS, FRUITS, ITEMS, JOBS, LANGUAGES

_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer"}
_NUMBER: dict[str, Any] = {"type": "number"}
_PLACES = tuple(city for city, _ in CITIES[:12])
_TOPICS = (
    "hotels near the sea", "cheap flights", "the history of tea", "news today", "train times",
    "open jobs", "black holes", "a good book", "electric cars", "jazz music",
)  # fmt: skip
_SKIES = ("sunny", "cloudy", "rainy", "windy", "clear", "foggy", "light rain", "snow")
_SYSTEMS = ("You are a helpful assistant.", None, None, None, "Use the functions.", "Be brief.")
# Question, function, arguments, result of the call, and answer.
Asked = tuple[str, Function, dict[str, Any], str, str]


def _with_note(rng: Random, schema: dict[str, Any], note: str) -> dict[str, Any]:
    return {**schema, "description": note} if rng.random() < 0.4 else schema


def _weather(rng: Random) -> Asked:
    place, key = (
        rng.choice(_PLACES),
        rng.choice((*["city"] * 5, "location", "location", "place")),
    )
    degrees, sky = rng.randint(-5, 38), rng.choice(_SKIES)
    properties = {key: _with_note(rng, _TEXT, rng.choice(("The city", "City name", "The place")))}
    arguments: dict[str, Any] = {key: place}
    when = rng.choice(("", "", " now", " today", " right now"))
    if rng.random() < 0.2:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        arguments["unit"] = rng.choice(("celsius", "fahrenheit"))
        when = f" in {arguments['unit']}"
    name = rng.choice(
        (*["get_weather"] * 10, "weather", "get_current_weather", "current_weather",
         "get_temperature")
    )  # fmt: skip
    notes = ("Get the weather of a city.", "Get current weather", "The weather now.", "Weather")
    question = rng.choice(
        (
            f"What is the weather in {place}{when}?",
            f"What's the weather like in {place}{when}?",
            f"How is the weather in {place}{when}?",
            f"Is it raining in {place}{when}?",
            f"Weather in {place}{when}?",
            f"Tell me the weather in {place}{when}.",
            f"How warm is it in {place}{when}?",
        )
    )
    result, answer = rng.choice(
        (
            (
                json.dumps({"temperature": degrees, "condition": sky}),
                f"The weather in {place}: {degrees} degrees, {sky}.",
            ),
            (
                json.dumps({key: place, "temperature": degrees, "condition": sky}),
                f"The weather in {place}: {degrees} degrees, {sky}.",
            ),
            (f"{degrees} degrees, {sky}", f"The weather in {place}: {degrees} degrees, {sky}."),
            (f"{degrees} C and {sky}", f"The weather in {place}: {degrees} C and {sky}."),
            (sky, f"The weather in {place}: {sky}."),
            (json.dumps({"temperature": degrees}), f"The weather in {place}: {degrees} degrees."),
            (json.dumps({"rain": sky == "rainy"}), f"The weather in {place}: rain is "
             f"{json.dumps(sky == 'rainy')}."),
        )
    )  # fmt: skip
    return question, Function(name, rng.choice(notes), properties), arguments, result, answer


def _search(rng: Random) -> Asked:
    topic = rng.choice((*_TOPICS, f"{rng.choice(ITEMS)}s", f"{rng.choice(FOODS)} prices"))
    name = rng.choice((*["search"] * 8, "web_search", "lookup"))
    key = rng.choice((*["query"] * 8, "q", "topic"))
    function = Function(
        name,
        rng.choice(("Search the web.", "Search for information", "Find pages.", "Web search")),
        {key: _with_note(rng, _TEXT, "What to search for")},
    )
    found = rng.choice((*_TOPICS, *small_talk._TOPICS))
    question = rng.choice(
        (
            f"Search for {topic}.", f"Search for {topic}", f"Find {topic}.", f"Look up {topic}.",
            f"Can you search for {topic}?", f"Search the web for {topic}.",
        )
    )  # fmt: skip
    result = rng.choice((f"A page about {found}.", json.dumps([f"About {found}"]), found))
    shown = f"About {found}" if result.startswith("[") else result.removesuffix(".")
    return question, function, {key: topic}, result, f"I found this: {shown}."


def _arithmetic(rng: Random) -> Asked:
    one, two = (rng.choice((rng.randint(0, 20), rng.randint(1, 99))) for _ in range(2))
    kind = rng.choice(("add", "add", "add", "multiply", "subtract"))
    total = {"add": one + two, "multiply": one * two, "subtract": one - two}[kind]
    name = rng.choice(
        {
            "add": ("add", "add", "add", "add", "sum", "add_numbers"),
            "multiply": ("multiply", "multiply_numbers", "product"),
            "subtract": ("subtract", "minus"),
        }[kind]
    )
    keys = rng.choice((*[("a", "b")] * 8, ("x", "y"), ("first", "second")))
    schema = rng.choice((_WHOLE, _NUMBER))
    sign, verb = {
        "add": (rng.choice(("+", "plus")), "Add"),
        "multiply": (rng.choice(("*", "times")), "Multiply"),
        "subtract": (rng.choice(("-", "minus")), "Compute"),
    }[kind]
    joined = f"{one} {sign} {two}" if kind == "subtract" else f"{one} and {two}"
    question = rng.choice(
        (f"What is {one} {sign} {two}?", f"{verb} {joined}.", f"How much is {one} {sign} {two}?",
         f"Calculate {one} {sign} {two}.", f"{verb} {joined}")
    )  # fmt: skip
    note = rng.choice(
        (f"{kind.capitalize()} two numbers.", f"{kind.capitalize()}s numbers", "Arithmetic")
    )
    result = rng.choice((str(total), json.dumps({"result": total})))
    function = Function(name, note, dict.fromkeys(keys, schema))
    return (
        question,
        function,
        dict(zip(keys, (one, two), strict=True)),
        result,
        (f"The result is {total}."),
    )


def _time(rng: Random) -> Asked:
    place, key = rng.choice(_PLACES), rng.choice(("city", "location", "place", "timezone"))
    clock = f"{rng.randint(0, 23):02}:{rng.choice((5, 10, 25, 30, 45)):02}"
    name = rng.choice(("get_time", "get_current_time", "time", "current_time"))
    question = rng.choice(
        (f"What time is it in {place}?", f"What is the time in {place}?", f"Time in {place}?")
    )
    result = rng.choice((clock, json.dumps({"time": clock})))
    function = Function(name, "Get the time of a place.", {key: _TEXT})
    return question, function, {key: place}, result, f"The time in {place}: {clock}."


def _person(rng: Random) -> Asked:
    name, key = rng.choice(FIRST_NAMES), rng.choice(("name", "user", "person", "username"))
    job = rng.choice(JOBS)
    function = Function(
        rng.choice(("get_user", "find_person", "lookup_user", "get_employee", "get_contact")),
        rng.choice(("Get a person by name.", "Find a user.", "Look up a contact")),
        {key: _with_note(rng, _TEXT, "The name")},
    )
    question = rng.choice(
        (f"Who is {name}?", f"Find {name}.", f"Look up {name}.", f"Tell me about {name}.")
    )
    result = rng.choice((json.dumps({"name": name, "job": job}), f"{name}, {job}"))
    return question, function, {key: name}, result, f"{name}: {job}."


def _hotels(rng: Random) -> Asked:
    place, name = rng.choice(_PLACES), rng.choice(words.NAME_FIRST) + " Hotel"
    key, price = rng.choice(("city", "location", "place")), rng.randrange(80, 400, 10)
    properties, arguments = {key: _TEXT}, {key: place}
    question = rng.choice(
        (f"Find me a hotel in {place}", f"Find a hotel in {place}", f"I need a hotel in {place}")
    )
    if rng.random() < 0.4:
        limit = rng.choice(("max_price", "budget", "price"))
        properties[limit], arguments[limit] = _WHOLE, price  # type: ignore[assignment]
        question += f" for less than {price}"
    function = Function(
        rng.choice(("search_hotels", "find_hotel", "find_hotels", "book_hotel")),
        rng.choice(("Search hotels in a city.", "Find hotels")),
        properties,
    )
    result = rng.choice((name, json.dumps([name]), json.dumps({"hotel": name})))
    return f"{question}.", function, arguments, result, f"I found this: {name}."


def _message(rng: Random) -> Asked:
    name, text = rng.choice(FIRST_NAMES), rng.choice(_TOPICS)
    keys = rng.choice((("to", "subject"), ("to", "text"), ("recipient", "message"), ("to", "body")))
    function = Function(
        rng.choice(("send_email", "send_message", "notify", "write_email")),
        rng.choice(("Send a message.", "Send an email to a person")),
        dict.fromkeys(keys, _TEXT),
    )
    question = rng.choice(
        (f"Send an email to {name} about {text}.", f"Write to {name} about {text}.",
         f"Tell {name} about {text}.")
    )  # fmt: skip
    result = rng.choice(("sent", "ok", json.dumps({"status": "sent"})))
    shown = "sent" if "sent" in result else "ok"
    return (
        question,
        function,
        dict(zip(keys, (name, text), strict=True)),
        result,
        (f"The result is {shown}."),
    )


def _translate(rng: Random) -> Asked:
    text, language = (
        rng.choice((*ITEMS, *ANIMALS, "good morning", "thank you")),
        rng.choice(LANGUAGES),
    )
    keys = rng.choice((("text", "language"), ("text", "target"), ("word", "language")))
    function = Function("translate", "Translate a text.", dict.fromkeys(keys, _TEXT))
    question = rng.choice(
        (f"Translate {text} into {language}.", f"Translate {text} to {language}.",
         f"How do you say {text} in {language}?")
    )  # fmt: skip
    result = _invented(rng)
    return (
        question,
        function,
        dict(zip(keys, (text, language), strict=True)),
        result,
        (f"The result is {result}."),
    )


def _invented(rng: Random) -> str:
    return (
        rng.choice(words.MADE_FIRST) + rng.choice(words.MADE_MIDDLE) + rng.choice(words.MADE_LAST)
    ).lower()


def _other(rng: Random) -> Asked:
    """Ask for a function with a name that may be invented."""
    thing = rng.choice((*ITEMS, *ANIMALS, *FRUITS, "ticket", "order", "account", "score", "price"))
    verb = rng.choice(("get", "find", "check", "show", "open", "count", "book", "list", "read"))
    name = f"{verb}_{rng.choice((thing, thing, _invented(rng)))}"
    key = rng.choice(("name", "value", "id", "item", "text", "key", thing))
    is_number = key == "id" or rng.random() < 0.2
    value: Any = (
        rng.randint(1, 999)
        if is_number
        else rng.choice((rng.choice(FIRST_NAMES), rng.choice(_PLACES), _invented(rng), thing))
    )
    subject = name.removeprefix(f"{verb}_")
    question = rng.choice(
        (
            f"{verb.capitalize()} the {subject} of {value}.",
            f"{verb.capitalize()} {subject} {value}",
            f"Call {name} with {value}.", f"Use {name} for {value}.",
            f"Can you {verb} the {subject} {value}?", f"Please {verb} {subject} {value}.",
        )
    )  # fmt: skip
    function = Function(
        name,
        rng.choice(
            (f"{verb.capitalize()} the {subject}.", f"{verb.capitalize()}s a {subject}", "")
        ),
        {key: _WHOLE if is_number else _TEXT},
    )
    found = rng.choice((str(rng.randint(1, 500)), _invented(rng), rng.choice(_SKIES)))
    result = rng.choice((found, json.dumps({"result": found}), json.dumps({subject: found})))
    return question, function, {key: value}, result, f"The result is {found}."


_MAKERS: tuple[tuple[Callable[[Random], Asked], int], ...] = (
    (_weather, 36), (_search, 18), (_arithmetic, 24), (_time, 8), (_person, 4), (_hotels, 2),
    (_message, 2), (_translate, 2), (_other, 8),
)  # fmt: skip


def _ask(rng: Random) -> Asked:
    makers, weights = zip(*_MAKERS, strict=True)
    requested: Asked = rng.choices(makers, weights)[0](rng)
    return requested


def draw_tool_talk(rng: Random, question_count_max: int = 3) -> Talk:
    """Draw up to this many questions, most of them for one of up to four functions."""
    offered: dict[str, Asked] = {}
    while len(offered) < rng.choice((1, 1, 2, 2, 3, 4)):
        requested = _ask(rng)
        offered.setdefault(requested[1].name, requested)
    lines: list[Line] = []
    pending = list(offered.values())
    rng.shuffle(pending)
    for _ in range(rng.choice((1, 1, 2, question_count_max))):
        if not pending:
            break
        if rng.random() < 0.12:
            turn = small_talk.draw_small_talk(rng, listings=False)
            if turn.kind in ("greeting", "thanks", "ability"):
                lines += [Line("user", turn.question), Line("assistant", turn.answer)]
                continue
        question, function, arguments, result, answer = pending.pop()
        call = Call(function.name, arguments)
        lines.append(Line("user", question))
        if rng.random() < 0.3:  # as a schema of calls forces it
            single = rng.random() < 0.5
            text = call.text() if single else f"[{call.text()}]"
            lines.append(Line("assistant", text, is_forced=True))
            break
        lines.append(Line("assistant", "", (call,)))
        lines += [Line("tool", result), Line("assistant", answer)]
    functions = [requested[1] for requested in offered.values()]
    rng.shuffle(functions)
    return Talk(tuple(lines), rng.choice(_SYSTEMS), tuple(functions))


def draw_long_talk(rng: Random, char_count: int) -> Talk:
    """Draw a conversation like the loop of an agent, of about this many characters."""
    offered: dict[Callable[[Random], Asked], Function] = {}
    makers: tuple[Callable[[Random], Asked], ...] = (_time, _search, _person, _hotels, _weather)
    for maker in makers:
        function = maker(rng)[1]
        if len(function.properties) == 1 and len(offered) < 4:
            offered[maker] = function
    lines: list[Line] = []
    size = 0
    while size < char_count:
        maker, function = rng.choice(list(offered.items()))
        question, other, arguments, result, answer = maker(rng)
        if len(other.properties) != 1:
            continue
        call = Call(function.name, dict(zip(function.properties, arguments.values(), strict=True)))
        turns = (
            Line("user", question), Line("assistant", "", (call,)), Line("tool", result),
            Line("assistant", answer),
        )  # fmt: skip
        lines += turns
        size += sum(len(line.text) for line in turns) + len(call.text())
    return Talk(tuple(lines), rng.choice(_SYSTEMS), tuple(offered.values()))
