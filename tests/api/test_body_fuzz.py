"""Random HTTP bodies and client messages: parsed, or refused with an error of the API.

`WEIR_FUZZ_BODIES=1000000 python -m pytest tests/api/test_body_fuzz.py -s` takes some minutes.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from msgspec import inspect

from api.core.errors import ApiError
from api.core.interceptor import LARGE_MESSAGES
from api.openai.refusals import HttpFault
from bench.adversary_attacks import TEXTS, fill
from tests.api.test_growth import HTTP, METHODS, calling
from tests.growth import BLOCK_MAX_S, as_in_service, cpu_s

COUNT = int(os.environ.get("WEIR_FUZZ_BODIES", "4000"))
SEED = int(os.environ.get("WEIR_FUZZ_SEED", "1"))
RUNS_MAX = 5  # of a body that seems slow
PLAIN = ("user", "assistant", "tool", "text", "function", "tiny", "auto", "\ud800", "x")
WORDS = [*TEXTS[:20], *PLAIN]
NUMBERS: list[Any] = [0, 1, -1, 2, 16, 2**31, 2**63, 10**30, 0.5, 1e300, -0.0, True, None]
Draw = Callable[[random.Random], Any]


def any_value(chance: random.Random, depth: int = 3) -> Any:
    """Return any JSON value."""
    kind = chance.randrange(6 if depth else 4)
    if kind == 4:
        return [any_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 5:
        return {chance.choice(WORDS): any_value(chance, depth - 1) for _ in range(2)}
    return chance.choice(WORDS) if kind % 2 else chance.choice(NUMBERS)


def value_of(info: inspect.Type, chance: random.Random) -> Any:
    """Return a value of a type, sometimes of another one."""
    if chance.random() < 0.04:
        return any_value(chance)
    match info:
        case inspect.StructType(fields=fields):
            found = {
                each.encode_name: value_of(each.type, chance)
                for each in fields
                if each.required or chance.random() < 0.12
            }
            if chance.random() < 0.05:
                found[chance.choice([*found, "odd"])[::-1]] = any_value(chance)
            return found
        case inspect.UnionType(types=types):
            return value_of(chance.choice(types), chance)
        case inspect.ListType(item_type=item):
            return [value_of(item, chance) for _ in range(chance.randrange(4))]
        case inspect.DictType(key_type=keys, value_type=held):
            return {str(value_of(keys, chance)): value_of(held, chance) for _ in range(2)}
        case inspect.LiteralType(values=values):
            return chance.choice(values)
        case inspect.StrType():
            return chance.choice(WORDS)
        case inspect.IntType() | inspect.FloatType():
            return chance.choice(NUMBERS[:9])
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.NoneType():
            return None
    return any_value(chance)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes that are cut, doubled or changed in a place, mostly unchanged."""
    place = chance.randrange(len(data) + 1)
    match chance.randrange(12):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + chance.randbytes(3) + data[place:]
        case 2:
            return data[:place] + data[place // 2 :]
    return data


def test_random_bodies_and_messages_are_parsed_or_refused() -> None:
    chance = random.Random(SEED)
    bodies = [(path, enter, inspect.type_info(kind)) for path, (enter, kind, _) in HTTP.items()]
    calls = [
        (path, calling(path, METHODS[path]), GetMessageClass(METHODS[path].input_type))
        for path in METHODS
        if path in LARGE_MESSAGES or path.startswith("/weir.v1.InferenceService")
    ]
    ends: Counter[str] = Counter()
    slow: list[str] = []

    with as_in_service():
        for _ in range(COUNT):
            if chance.random() < 0.6:
                path, enter, info = chance.choice(bodies)
                data = json.dumps(value_of(info, chance)).encode()
            else:
                path, enter, kind = chance.choice(calls)
                data = fill(kind(), chance).SerializeToString()
            data = damaged(data, chance)
            began_at = time.thread_time()
            try:
                enter(data)
                end = "parsed"
            except (ApiError, HttpFault) as refusal:
                end = type(refusal).__name__
            except Exception as error:
                raise AssertionError(f"{path}: {error!r} for {data[:2000]!r}") from error
            ends[end] += 1
            if time.thread_time() - began_at > BLOCK_MAX_S and (
                min(cpu_s(lambda enter=enter, data=data: enter(data)) for _ in range(RUNS_MAX))  # type: ignore[misc]
                > BLOCK_MAX_S
            ):
                slow.append(f"{path}: {data[:200]!r}")

    print(dict(ends))
    assert slow == []
    assert ends["parsed"] > COUNT // 50
