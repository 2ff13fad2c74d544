"""First attempts of a newcomer: structured output and tool calls, with Weir's own engine.

`python -m demo.first_attempts --model DIR` counts the answers that are valid within 200 tokens. The
requests are written by hand; training draws others.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jsonschema

from bench import engine_streams as streams
from demo.evaluate import CASES_AT_ONCE
from demo.messages import Call, Function, Line, Talk
from inference.adapters.torch_engine import TorchEngine, TorchEngineSettings
from inference.core.options import ComputeDtype, KvDtype
from inference.engine import (
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    SequenceFinished,
    StopCriteria,
    TokensGenerated,
)
from inference.text.call_parser import ToolCallParser
from inference.text.tokenizer import ChatMessage, Tokenizer
from inference.text.tools import CallFormat, Tool, ToolCall, calls_schema

ANSWER_TOKENS_MAX = 200
TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}

WEATHER = Function("get_weather", "Get the weather of a city.", {"city": TEXT})
SEARCH = Function("search", "Search the web.", {"query": TEXT})
ADD = Function("add", "Add two numbers.", {"a": WHOLE, "b": WHOLE})
# Question, expected call, result of the function, and a word that the answer to it must have.
CALLS: tuple[tuple[str, Call, str, str], ...] = (
    *(
        (
            question.format(city),
            Call("get_weather", {"city": city}),
            f'{{"temperature": {degrees}, "condition": "sunny"}}',
            str(degrees),
        )
        for question in ("What is the weather in {}?", "How is the weather in {} today?")
        for city, degrees in (
            ("Paris", 21), ("London", 12), ("Berlin", 8), ("Rome", 25), ("Vienna", 17)
        )
    ),
    *(
        (
            question.format(topic),
            Call("search", {"query": topic}),
            "A page about coffee.",
            "coffee",
        )
        for question in ("Search for {}.", "Can you search for {}?")
        for topic in ("black holes", "cheap flights", "jazz music", "open jobs", "news")
    ),
    *(
        (
            question.format(one, two),
            Call("add", {"a": one, "b": two}),
            str(one + two),
            str(one + two),
        )
        for question in ("What is {} plus {}?", "Add {} and {}.")
        for one, two in ((2, 3), (17, 25), (4, 4), (30, 12), (8, 9))
    ),
)  # fmt: skip


def object_of(**properties: Any) -> dict[str, Any]:
    """Build the schema of an object that must have all these properties, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = object_of(name=TEXT, age=WHOLE)
# Schemas with the requests sent with each: 25 times four.
REQUESTS: tuple[tuple[dict[str, Any], tuple[str, str, str, str]], ...] = (
    (PERSON, ("Give me a person as JSON", "Generate a person.", "Jane, 54 years old", "Hello")),
    (
        {"type": "object", "properties": {"name": TEXT, "age": WHOLE}},
        ("Give me a person", "Make up a person with name and age", "person", "Who are you?"),
    ),
    (
        object_of(city=TEXT, country=TEXT),
        ("What is the capital of France?", "Name a city.", "Tell me a city in Japan", "Paris"),
    ),
    (
        object_of(name=TEXT, capital=TEXT, population=WHOLE),
        ("Describe a country", "Tell me about Germany.", "Return a country as JSON", "Brazil"),
    ),
    (
        object_of(items=TEXTS),
        ("List three fruits.", "Give me a shopping list", "Five colors please", "Name some cities"),
    ),
    (
        object_of(tags=TEXTS, title=TEXT),
        ("Tag this article", "Suggest tags for a blog post", "Return JSON", "Summer in the city"),
    ),
    (
        object_of(is_weekend=FLAG),
        ("Is it the weekend?", "Is Sunday a weekend day?", "Saturday", "Answer with true or false"),
    ),
    (
        object_of(is_spam=FLAG, reason=TEXT),
        ("You won a prize, click here!", "Is this spam: buy now", "Meeting at 10", "Classify it"),
    ),
    (
        object_of(sentiment={"enum": ["positive", "neutral", "negative"]}),
        ("I love it", "This was a bad film.", "Classify: it is fine", "What a great day!"),
    ),
    (
        object_of(color={"enum": ["red", "green", "blue"]}, reason=TEXT),
        ("What color is the sky?", "Choose a color", "Which color do you like?", "Grass"),
    ),
    (
        object_of(name=TEXT, address=object_of(street=TEXT, city=TEXT)),
        ("Give me a user with an address", "Where does Bob live?", "A person, please", "Contact"),
    ),
    (
        object_of(user=object_of(name=TEXT, email=TEXT, active=FLAG)),
        ("Create a user", "Generate a test user as JSON", "New account for Ann", "user object"),
    ),
    (
        object_of(people={"type": "array", "items": PERSON}),
        ("List two people", "Give me three persons as JSON", "Make up a family", "Who is there?"),
    ),
    (
        object_of(name=TEXT, date=TEXT, participants=TEXTS),
        (
            "Alice and Bob are going to a science fair on Friday.",
            "Extract the event: dinner with Tom tomorrow",
            "Make an event",
            "Team meeting on Monday with Eve and Max",
        ),
    ),
    (
        object_of(answer=TEXT),
        ("What is 2 + 2?", "Hello, how are you?", "Why is the sky blue?", "Tell me a joke"),
    ),
    (
        object_of(steps=TEXTS, final_answer=TEXT),
        ("Solve 8x + 7 = -23", "How do I make tea?", "How can I learn Python?", "Plan a trip"),
    ),
    (
        object_of(product=TEXT, price=NUMBER, in_stock=FLAG),
        ("Invent a product", "Give me a product as JSON.", "How much is a lamp?", "Laptop"),
    ),
    (
        object_of(title=TEXT, author=TEXT, year=WHOLE),
        ("Recommend a book", "Give me a book in JSON format", "Who wrote Hamlet?", "A famous book"),
    ),
    (
        object_of(temperature=NUMBER, unit={"enum": ["celsius", "fahrenheit"]}, summary=TEXT),
        ("What is the weather like?", "Weather in Oslo", "Will it rain?", "Give me a forecast"),
    ),
    (
        object_of(ingredients=TEXTS, minutes=WHOLE),
        ("A recipe for pancakes", "How do I cook pasta?", "Something quick to eat", "Pizza"),
    ),
    (
        object_of(hotel=TEXT, stars={"type": "integer", "minimum": 1, "maximum": 5}),
        ("Find me a hotel", "Recommend a hotel in Rome", "Best hotel?", "Describe a hotel as JSON"),
    ),
    (
        object_of(task=TEXT, priority={"enum": ["low", "high"]}, done=FLAG),
        ("Buy milk", "Make a to-do", "Remind me to call Anna", "Give me a task as JSON"),
    ),
    (
        {"type": "object"},
        ("Give me a person as JSON", "Reply with a JSON object", "A city as JSON", "JSON"),
    ),
    (
        {"type": "object"},
        ("List three colors as JSON", "Give me a user in JSON", "Hello", "What can you do?"),
    ),
    (
        {"type": "object"},
        (
            "Return a JSON object with the keys name and age",
            "Describe a car as JSON.",
            "Generate a recipe in JSON format",
            "Is the sky blue? Answer in JSON",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Output:
    """Text of one output. ended: by itself, within the limit."""

    text: str
    ended: bool


async def generate(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> list[Output]:
    """Run requests, many at once."""
    places = asyncio.Semaphore(CASES_AT_ONCE)

    async def one(request: GenerationRequest) -> Output:
        text, ended = "", False
        async with places, streams.stream(engine, request) as stream:
            async for event in stream:
                if isinstance(event, TokensGenerated | SequenceFinished):
                    text += event.text
                if isinstance(event, SequenceFinished):
                    ended = event.reason is not EngineFinishReason.LENGTH
        return Output(text, ended)

    return await asyncio.gather(*map(one, requests))


def structured_requests(
    tokenizer: Tokenizer, temperature: float
) -> list[tuple[dict[str, Any], str, GenerationRequest]]:
    """Return each request with its schema and its text."""
    requested = [(schema, text) for schema, texts in REQUESTS for text in texts]
    return [
        (
            schema,
            text,
            GenerationRequest(
                tokenizer.encode_chat([ChatMessage("user", text)]),
                SamplingParams(temperature=temperature, seed=seed),
                StopCriteria(ANSWER_TOKENS_MAX),
                response_format=ResponseFormat(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            ),
        )
        for seed, (schema, text) in enumerate(requested)
    ]


def is_valid(schema: dict[str, Any], output: Output) -> bool:
    """Return whether the output is complete JSON that fulfils the schema."""
    try:
        value = json.loads(output.text)
    except ValueError:
        return False
    return output.ended and jsonschema.Draft202012Validator(schema).is_valid(value)


def tools_of(functions: Sequence[Function]) -> list[Tool]:
    """Return functions as the engine's tools."""
    return [
        Tool(one.name, one.description, json.dumps(one.chat()["function"]["parameters"]))
        for one in functions
    ]


def prompt_of(tokenizer: Tokenizer, talk: Talk) -> tuple[int, ...]:
    """Return the prompt for the next message of the model."""
    messages = [] if talk.system is None else [ChatMessage("system", talk.system)]
    calls: list[ToolCall] = []
    for line in talk.lines:
        if line.role == "tool":
            messages.append(ChatMessage("tool", line.text, (), calls.pop(0)))
            continue
        made = [ToolCall("c1", call.name, json.dumps(call.arguments)) for call in line.calls]
        calls += made
        messages.append(ChatMessage(line.role, line.text, tuple(made)))
    return tokenizer.encode_chat(messages, tools_of(talk.functions))


def call_requests(
    tokenizer: Tokenizer, mode: str, temperature: float, before: Talk | None = None
) -> list[GenerationRequest]:
    """Return the request of each of `CALLS`. mode: `auto`, `required` or `named`."""
    requests = []
    for seed, (question, call, _, _) in enumerate(CALLS):
        functions = (WEATHER, SEARCH, ADD)
        lines = () if before is None else before.lines
        prompt = prompt_of(tokenizer, Talk((*lines, Line("user", question)), None, functions))
        allowed = [one for one in functions if mode == "required" or one.name == call.name]
        schema = calls_schema(tools_of(allowed), single=mode == "named", arguments_key="arguments")
        kept = None if mode == "auto" else ResponseFormat(GrammarKind.JSON_SCHEMA, schema)
        requests.append(
            GenerationRequest(
                prompt,
                SamplingParams(temperature=temperature, seed=seed),
                StopCriteria(ANSWER_TOKENS_MAX),
                response_format=kept,
            )
        )
    return requests


def calls_in(mode: str, output: Output) -> list[Call]:
    """Parse the calls of an output; none if its JSON is not complete."""
    if mode == "auto":
        parser = ToolCallParser(
            CallFormat.HERMES, [one.name for one in (WEATHER, SEARCH, ADD)], single=False
        )
        parsed = parser.push(output.text), parser.finish()
        pieces = [piece for part in parsed for piece in part.calls]
        names = {piece.index: piece.name for piece in reversed(pieces) if piece.name}
        texts = {
            index: "".join(piece.arguments for piece in pieces if piece.index == index)
            for index in names
        }
        found = [(names[index], texts[index]) for index in sorted(names)]
    else:
        try:
            value = json.loads(output.text)
        except ValueError:
            return []
        several = [value] if mode == "named" else value
        found = [(one["name"], json.dumps(one["arguments"])) for one in several]
    try:
        return [Call(name, json.loads(text)) for name, text in found] if output.ended else []
    except ValueError:
        return []


def answer_requests(tokenizer: Tokenizer) -> list[GenerationRequest]:
    """Return a request for the answer after each call and its result."""
    return [
        GenerationRequest(
            prompt_of(
                tokenizer,
                Talk(
                    (
                        Line("user", question),
                        Line("assistant", "", (call,)),
                        Line("tool", result),
                    ),
                    None,
                    (WEATHER, SEARCH, ADD),
                ),
            ),
            SamplingParams(),
            StopCriteria(ANSWER_TOKENS_MAX),
        )
        for question, call, result, _ in CALLS
    ]


def long_conversation(exchange_count: int) -> Talk:
    """Build a conversation of calls as in the loop of an agent, about 75 tokens each."""
    lines: list[Line] = []
    for number in range(exchange_count):
        question, call, result, word = CALLS[7 * number % len(CALLS)]
        lines += (
            Line("user", question),
            Line("assistant", "", (call,)),
            Line("tool", result),
            Line("assistant", f"The result is {word}."),
        )
    return Talk(tuple(lines))


async def evaluate(settings: TorchEngineSettings, show: bool) -> None:
    """Print one line for each kind of request."""
    tokenizer = Tokenizer(settings.directory)
    engine = TorchEngine(settings)

    def report(kind: str, outputs: Sequence[Output], *marks: tuple[str, Sequence[bool]]) -> None:
        counts = ", ".join(f"{sum(values)} {name}" for name, values in marks)
        print(f"{kind}: {len(outputs)} requests, {counts}", flush=True)
        if show:
            for output, *each in zip(outputs, *(values for _, values in marks), strict=True):
                print(f"  {each} {output.text}")

    async def calls(kind: str, mode: str, temperature: float, before: Talk | None = None) -> None:
        outputs = await generate(engine, call_requests(tokenizer, mode, temperature, before))
        found = [calls_in(mode, output) for output in outputs]
        valid = [
            bool(each)
            and all(
                one.name == function.name
                and jsonschema.Draft202012Validator(
                    function.chat()["function"]["parameters"]
                ).is_valid(one.arguments)
                for one in each
                for function in (WEATHER, SEARCH, ADD)
                if function.name == one.name
            )
            for each in found
        ]
        right = [each == [call] for each, (_, call, _, _) in zip(found, CALLS, strict=True)]
        report(kind, outputs, ("valid", valid), ("right", right))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        await engine.start()
        for temperature in (0.0, 0.7):
            requested = structured_requests(tokenizer, temperature)
            outputs = await generate(engine, [request for _, _, request in requested])
            valid = [
                is_valid(schema, output)
                for (schema, _, _), output in zip(requested, outputs, strict=True)
            ]
            report(f"structured output at {temperature}", outputs, ("valid", valid))
        for temperature in (0.0, 0.7):
            for mode in ("required", "named", "auto"):
                await calls(f"calls, {mode}, at {temperature}", mode, temperature)
        for exchange_count in (20, 40):
            before = long_conversation(exchange_count)
            tokens = len(call_requests(tokenizer, "auto", 0.0, before)[0].prompt_token_ids)
            await calls(f"calls, auto, after {tokens} tokens", "auto", 0.0, before)
        answers = await generate(engine, answer_requests(tokenizer))
        right = [word in one.text for one, (_, _, _, word) in zip(answers, CALLS, strict=True)]
        report("answers after the result", answers, ("right", right))
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print every output")
    parser.add_argument("--precision", choices=get_args(ComputeDtype), default="float32")
    parser.add_argument("--kv", choices=get_args(KvDtype), default="auto")
    arguments = parser.parse_args()
    settings = TorchEngineSettings(
        arguments.model,
        "demo",
        compute_dtype=arguments.precision,
        kv_dtype=arguments.kv,
        torch_thread_count=arguments.threads,
    )
    asyncio.run(evaluate(settings, arguments.show))


if __name__ == "__main__":
    main()
