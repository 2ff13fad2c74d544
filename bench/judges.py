"""Compare answers of vLLM, of Weir in front of it, and of Weir's own engine.

    python -m bench.judges --vllm-python PYTHON [--count 300] [--seed 1] [--show 40] [--only KIND]

One checkpoint in float32, greedy outputs, the same requests: chats and completions of every kind of
`KINDS`, drawn from a seed. Every second one is streamed, and its pieces are joined. Compared are
status, text, tool calls, finish reason, token counts, log-probabilities and offsets. Prints the
number of equal answers by kind, the explanations of `EXPLAINED`, and every other answer that
differs from vLLM's; if there is one, the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from api.core.endpoint import read_endpoint
from api.core.settings import Settings, bundled_models
from bench.peers import vllm_serving
from bench.site import api_process, create_keys, database
from metering.store.db import psycopg_conninfo
from metering.store.migrations_runner import migrate

THROUGH, OWN, PEER = "through", "own", "judge"  # models of Weir; vLLM's name of the model
VLLM_OPTIONS = (
    "--max-model-len=4096",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
)
LOGPROB_MARGIN = 0.02  # between two implementations in float32
CONCURRENT, ANSWER_MAX_S = 4, 300.0
SHOWN_CHARS = 300
WORDS = [
    *("hotel", "room", "night", "Zoë", "日本語", "🙂🙃", "naïve", "  two blanks", "line\nbreak"),
    *("price", "order 66", "cancel", "“quoted”", "a\tb", "ﬁ", "é", "Straße", "3.14", "<b>", "{}"),
]
QUESTIONS = [
    *("Is there a hotel?", "How much is a room?", "Cancel my order.", "Write three words."),
    *("When is it open?", "Wie geht es dir?", "日本語で答えてください", "Say it with 🙂."),
]
Body = dict[str, Any]

CONTROL = "a control token adds no text in Weir, and is named among `tokens` in vLLM"
NAMES = frozenset({"tokens", "top", "offsets"})
EVERY = frozenset(
    {"prompt_tokens", "completion_tokens", "text", "finish_reason", "calls", "tokens", "logprobs"}
)
# Why answers to a kind may differ from vLLM's: the fields, and the reason.
EXPLAINED: dict[str, tuple[frozenset[str], str]] = {
    "parts": (EVERY, "vLLM puts line breaks between parts; templates that read parts do not"),
    "forced tools": (EVERY, "forced arguments follow the tool's schema in Weir, not in vLLM"),
    "completion log-probabilities": (NAMES, CONTROL),
    "echo": (NAMES, CONTROL),
    "structured": (EVERY, "text that a schema leaves no choice about has its usual tokens in Weir"),
}


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count))


def user(chance: random.Random) -> Body:
    return {"role": "user", "content": f"{chance.choice(QUESTIONS)} {words(chance, 3)}"}


def chat(chance: random.Random, **fields: Any) -> Body:
    return {"messages": [user(chance)], "max_tokens": chance.randint(1, 40)} | fields


def completion(chance: random.Random, **fields: Any) -> Body:
    return {"prompt": words(chance, 8), "max_tokens": chance.randint(1, 30)} | fields


def turns(chance: random.Random) -> Body:
    """Build a chat with a system message and earlier turns."""
    messages: list[Body] = []
    if chance.random() < 0.5:
        messages.append({"role": "system", "content": words(chance, 4)})
    for _ in range(chance.randint(1, 3)):
        messages += [user(chance), {"role": "assistant", "content": words(chance, 3)}]
    return chat(chance, messages=[*messages, user(chance)])


def parts(chance: random.Random) -> Body:
    """Build a chat whose content is a list of parts."""
    content = [{"type": "text", "text": words(chance, 2)} for _ in range(chance.randint(1, 3))]
    return chat(chance, messages=[{"role": "user", "content": content}])


def tool(name: str) -> Body:
    schema = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
    about = {"name": name, "description": f"Find a {name}.", "parameters": schema}
    return {"type": "function", "function": about}


def tools(chance: random.Random) -> Body:
    """Build a chat with tools, in some cases after a call."""
    body = chat(chance, tools=[tool("order"), tool("hotel")], max_tokens=60)
    if chance.random() < 0.5:
        call = {"name": "order", "arguments": json.dumps({"id": chance.choice(WORDS)})}
        called = {"id": "call_1", "type": "function", "function": call}
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call_1", "content": words(chance, 3)},
        ]
    return body


def forced(chance: random.Random) -> Body:
    """Build a chat that must call a tool."""
    named = {"type": "function", "function": {"name": "hotel"}}
    body = chat(chance, tools=[tool("order"), tool("hotel")], max_tokens=80)
    return body | {"tool_choice": chance.choice(["required", named])}


def stops(chance: random.Random) -> Body:
    """Build a request with stop sequences that are likely to occur."""
    stop = chance.choice(["e", ["is", "the"], [" a", "."], "\n", ["I", "you"], "<|end|>"])
    build = chance.choice([chat, completion])
    return build(chance, stop=stop, max_tokens=40)


def structured(chance: random.Random) -> Body:
    """Build a chat whose answer must follow a schema."""
    properties = {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "count"]} | {
        "additionalProperties": False
    }
    wanted = {"name": "thing", "schema": schema, "strict": True}
    return chat(chance, response_format={"type": "json_schema", "json_schema": wanted}) | {
        "max_tokens": 80
    }


KINDS: dict[str, Callable[[random.Random], Body]] = {
    "chat": chat,
    "turns": turns,
    "parts": parts,
    "tools": tools,
    "forced tools": forced,
    "stops": stops,
    "chat log-probabilities": lambda c: chat(c, logprobs=True, top_logprobs=c.randint(0, 5)),
    "completion": completion,
    "token ids": lambda c: completion(c, prompt=[c.randint(10, 2000) for _ in range(12)]),
    "completion log-probabilities": lambda c: completion(c, logprobs=c.randint(0, 5)),
    "echo": lambda c: completion(c, echo=True, logprobs=c.choice([None, 0, 2])),
    "n": lambda c: chat(c, n=2),
    "prompts": lambda c: completion(c, prompt=[words(c, 3), words(c, 5)]),
    "structured": structured,
    "penalties": lambda c: chat(c, frequency_penalty=0.7, presence_penalty=0.3),
    "repetition penalty": lambda c: chat(c, repetition_penalty=1.3),
    "bias": lambda c: chat(c, logit_bias={str(c.randint(100, 2000)): 5.0}),
    "least tokens": lambda c: chat(c, min_tokens=20, max_tokens=40),
    "ignored end": lambda c: chat(c, ignore_eos=True, max_tokens=40),
    "stop tokens": lambda c: chat(c, stop_token_ids=[c.randint(10, 400) for _ in range(9)]),
    "template arguments": lambda c: chat(c, chat_template_kwargs={"enable_thinking": False}),
}


@dataclass(frozen=True, slots=True)
class Request:
    """Request to compare. `number` is its position in the run."""

    number: int
    kind: str
    body: Body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"

    @property
    def is_streamed(self) -> bool:
        return self.number % 2 == 1


def requests(count: int, seed: int, only: list[str]) -> list[Request]:
    """Generate `count` requests, taking the kinds in turn."""
    chance = random.Random(seed)
    kinds = only or list(KINDS)
    made = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        made.append(Request(number, kind, {"temperature": 0} | KINDS[kind](chance)))
    return made


def joined(events: list[Body]) -> Body:
    """Merge streamed events into one answer."""
    choices: dict[int, Body] = {}
    usage: Body = {}
    for event in events:
        if "error" in event:
            return event
        usage = event.get("usage") or usage
        for piece in event.get("choices", ()):
            choice = choices.setdefault(piece["index"], {"text": "", "tool_calls": {}})
            choice["finish_reason"] = piece.get("finish_reason") or choice.get("finish_reason")
            delta = piece.get("delta", piece)
            choice["text"] += delta.get("content") or delta.get("text") or ""
            for call in delta.get("tool_calls") or ():
                made = choice["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                for name in made:
                    made[name] += (call.get("function") or {}).get(name) or ""
            if known := piece.get("logprobs"):
                so_far = choice.setdefault("logprobs", {})
                for name, values in known.items():
                    so_far.setdefault(name, []).extend(values or ())
    for choice in choices.values():
        choice["tool_calls"] = list(choice["tool_calls"].values())
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def plain(choice: Body) -> Body:
    """Convert a choice of an unstreamed answer to the format of `joined`."""
    message = choice.get("message", choice)
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return {
        "text": message.get("content") or message.get("text") or "",
        "tool_calls": [{name: each[name] for name in ("name", "arguments")} for each in calls],
        "finish_reason": choice.get("finish_reason"),
        "logprobs": choice.get("logprobs"),
    }


def facts(status: int, answer: Body) -> Body:
    """Extract the fields of an answer that are compared."""
    if status != 200 or "error" in answer:
        return {"status": status if status != 200 else "error event"}
    usage = answer.get("usage") or {}
    found: Body = {"status": 200}
    found |= {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    for index, choice in enumerate(answer["choices"]):
        for name in ("text", "finish_reason"):
            found[f"{index}.{name}"] = choice[name]
        calls = [(each["name"], as_json(each["arguments"])) for each in choice["tool_calls"]]
        found[f"{index}.calls"] = calls
        found |= {f"{index}.{name}": value for name, value in of_logprobs(choice).items()}
    return found


def of_logprobs(choice: Body) -> Body:
    """Extract log-probabilities by field, in one format for both APIs."""
    known = choice.get("logprobs") or {}
    if content := known.get("content"):
        return {
            "tokens": [each["token"] for each in content],
            "logprobs": [each["logprob"] for each in content],
            "top": [
                {top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in content
            ],
        }
    if not known.get("tokens"):
        return {}
    return {
        "tokens": known["tokens"],
        "logprobs": known["token_logprobs"],
        "top": known.get("top_logprobs") or [],
        "offsets": known.get("text_offset"),
    }


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_close(one: Any, other: Any) -> bool:
    """Return whether two facts are equal, numbers up to a tolerance."""
    if isinstance(one, float) or isinstance(other, float):
        if not isinstance(one, int | float) or not isinstance(other, int | float):
            return False
        return math.isclose(one, other, abs_tol=LOGPROB_MARGIN) or (one < -50 and other < -50)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)


def answer_to(url: str, model: str, key: str, request: Request) -> tuple[int, Body]:
    """Send a request. Return its status and its answer, joined if it was streamed."""
    body = request.body | {"model": model}
    if request.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    sent = urllib.request.Request(url + request.path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(sent, timeout=ANSWER_MAX_S) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, {"error": refused.read().decode()}
    if not request.is_streamed:
        whole = json.loads(text)
        choices = sorted(whole["choices"], key=lambda each: each["index"])
        return 200, whole | {"choices": list(map(plain, choices))}
    lines = (line.removeprefix("data: ") for line in text.split("\n") if line[:6] == "data: ")
    return 200, joined([json.loads(line) for line in lines if line != "[DONE]"])


@dataclass(frozen=True, slots=True)
class Difference:
    """Field in which an answer differs from vLLM's. `by` is the model of Weir that gave it."""

    request: Request
    by: str
    field: str
    theirs: Any
    ours: Any

    @property
    def explanation(self) -> str:
        fields, reason = EXPLAINED.get(self.request.kind, (frozenset(), ""))
        return reason if self.field.rpartition(".")[2] in fields else ""


def differences(request: Request, by: str, theirs: Body, ours: Body) -> list[Difference]:
    """Compare two answers and return the fields that differ."""
    names = (theirs | ours) if theirs["status"] == ours["status"] else ["status"]
    return [
        Difference(request, by, name, theirs.get(name), ours.get(name))
        for name in names
        if not is_close(theirs.get(name), ours.get(name))
    ]


@contextlib.contextmanager
def weir(peer: str, directory: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Run an api process with both models; yield its URL and a key."""
    with database(None, None) as url:
        migrate(url)
        [key] = create_keys(url, 1)
        with psycopg.connect(psycopg_conninfo(url)) as connection:
            connection.execute("UPDATE quotas SET limit_value = 1000000000")
            for model in (THROUGH, OWN):
                connection.execute(
                    "INSERT INTO price_versions (model, currency_code, input_picos_per_token,"
                    " cached_input_picos_per_token, output_picos_per_token, effective_at)"
                    " VALUES (%s, 'USD', 3, 1, 7, now())",
                    (model,),
                )
        remote = {"engine": "remote", "directory": str(directory), "share_prefixes": True}
        remote["targets"] = [f"openai+http://{peer}/{PEER}"]
        models = {THROUGH: remote, OWN: {"engine": "torch", "directory": str(directory)}}
        fleet = folder / "fleet.yaml"
        fleet.write_text(json.dumps({"models": models}))
        settings = Settings.of(
            database_url=url,
            home=folder,
            listen="127.0.0.1:0",
            openai_listen="127.0.0.1:0",
            fleet=str(fleet),
            engine_dtype="float32",
        )
        cores = sorted(os.sched_getaffinity(0))
        with api_process(settings, cores[0], cores[-1]):
            yield read_endpoint(folder).openai_url.removesuffix("/v1"), key


def compare(options: argparse.Namespace, peer: str, url: str, key: str) -> bool:
    """Send all requests to all three and print the result. Return whether all is explained."""
    made = requests(options.count, options.seed, options.only)
    targets = {PEER: (f"http://{peer}", PEER), THROUGH: (url, THROUGH), OWN: (url, OWN)}
    found: list[Difference] = []
    equal: dict[str, Counter[str]] = {THROUGH: Counter(), OWN: Counter()}

    def answers(request: Request) -> dict[str, tuple[int, Body]]:
        return {name: answer_to(*target, key, request) for name, target in targets.items()}

    with ThreadPoolExecutor(CONCURRENT) as threads:
        for request, got in zip(made, threads.map(answers, made), strict=True):
            theirs = facts(*got[PEER])
            for by in (THROUGH, OWN):
                differing = differences(request, by, theirs, facts(*got[by]))
                if [each.field for each in differing] == ["status"]:
                    messages = " ".join(str(got[name][1].get("error", "")) for name in (PEER, by))
                    differing = [replace(differing[0], ours=f"{differing[0].ours} {messages}")]
                found += differing
                equal[by][request.kind] += not differing
    print_result(made, equal, found, options.show)
    return all(each.explanation for each in found)


def print_result(
    made: list[Request], equal: dict[str, Counter[str]], found: list[Difference], show: int
) -> None:
    """Print the table of kinds, and the differences."""
    totals = Counter(each.kind for each in made)
    print(f"{'kind':<30} {'requests':>8} {'through':>8} {'own':>8}")
    for kind, total in totals.items():
        print(f"{kind:<30} {total:>8} {equal[THROUGH][kind]:>8} {equal[OWN][kind]:>8}")
    sums = [sum(equal[by].values()) for by in (THROUGH, OWN)]
    print(f"{'all':<30} {len(made):>8} {sums[0]:>8} {sums[1]:>8}")
    explained = [each for each in found if each.explanation]
    for reason in dict.fromkeys(each.explanation for each in explained):
        numbers = {each.request.number for each in explained if each.explanation == reason}
        print(f"{len(numbers)} requests: {reason}")
    unexplained: dict[tuple[int, str], list[Difference]] = {}
    for each in found:
        if not each.explanation:
            unexplained.setdefault((each.request.number, each.by), []).append(each)
    print(f"{len(unexplained)} answers differ without an explanation")
    for (number, by), differing in list(unexplained.items())[:show]:
        request = differing[0].request
        how = "streamed" if request.is_streamed else "whole"
        print(f"\n{number} {request.kind}, {how}, {by}")
        print(f"  {json.dumps(request.body, ensure_ascii=False)}"[:SHOWN_CHARS])
        for each in differing:
            print(f"  {each.field}: {each.theirs!r}"[:SHOWN_CHARS])
            print(f"  {' ' * len(each.field)}  {each.ours!r}"[:SHOWN_CHARS])


def main() -> None:
    """Compare, print, and exit with 1 if a difference is not explained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=40, help="answers to print")
    parser.add_argument("--only", action="append", choices=tuple(KINDS), default=[])
    options = parser.parse_args()
    directory = Path(next(iter(bundled_models().values())))
    with (
        vllm_serving(options.vllm_python, directory, "float32", PEER, 1, *VLLM_OPTIONS) as peer,
        tempfile.TemporaryDirectory(prefix="weir-judges-") as folder,
        weir(peer, directory, Path(folder)) as (url, key),
    ):
        sys.exit(0 if compare(options, peer, url, key) else 1)


if __name__ == "__main__":
    main()
