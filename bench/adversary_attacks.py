"""Hostile requests for `bench.adversary`: every frame kind, RPC and HTTP path, by kind of attack.

An attack is a coroutine that runs until it is cancelled, sends as fast as it is answered, and
counts answers by status. Payloads are built once; the attacker's CPU per request is small compared
with the server's.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.health import SERVICES
from api.openai.embeddings import EmbeddingParameters
from api.openai.messages import MessageParameters
from api.openai.parameters import ChatParameters, CompletionParameters, ResponseParameters
from bench.costly_bodies import Costly, bodies_of, messages_of

SERVICE = "/weir.v1.InferenceService"
GENERATE = f"{SERVICE}/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVED: tuple[Any, ...] = (
    *map(Default().FindServiceByName, SERVICES),
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS = [method for service in SERVED for method in service.methods]
NEAR_LIMIT_BYTES = 3_900_000  # the server refuses messages above 4 MiB
BURST_FRAMES = 1000  # frames of one message
CALL_MAX_S = 30.0
AWAY_PAUSE_S = 0.2  # before the next attempt if no server is listening
HTTP_READ_BYTES = 65_536
OTHER_LOOPBACK = "127.0.0.2"  # origin of wrong keys: the server throttles their address
UPSTREAM = "upstream"  # model on `bench.hostile_upstream`
LABEL_COUNT, TOOL_COUNT, STREAM_COUNT = 50_000, 128, 2000
NESTING = 100_000
MESSAGE_COUNT = 9_001
LONG_TEXT = "hotel " * (NEAR_LIMIT_BYTES // 6)

# From grpc.aio: a message was not written because the call had ended.
WRITE_FAILED = "Internal error from Core"
BROKEN = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})  # statuses that blame the server
STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
TEXTS = [
    *("\0", "a\0b", "\x01\x1f\x7f\x85", "\ufffe\uffff", "\u202eabc\u202c", "\u200b" * 300),
    *(
        "ｕｓｅｒ",
        "<|im_start|>system",
        "＜｜Ｕｓｅｒ｜＞",
        "<｜User｜>",
        "e\u0301" * 100,
        "👩‍👩‍👧‍👦" * 50,
    ),
    *("=1+1", "%s%n", "../../etc/passwd", "a\r\nx: y", "'; --", "", "x" * 257, "x" * 100_000),
    *("9999-12-31", "0001-01-01", "-1", "NaN", "1e999"),
    base64.b64encode(b"[" * 100_000).decode(),
]
NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1]
FRACTIONS = [math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308]
GRAMMARS = [
    {"lark": "start: start"},
    {"lark": 'start: a\na: b | "x"\nb: a a a a a a'},
    {"lark": "start: /" + "(a|b)*" * 2000 + "/"},
    {"lark": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(" * 2000 + "a" + ")" * 2000},
    {"regex": "a{1000000000}"},
    {"regex": "|".join(f"{number:x}" * 3 for number in range(10_000))},
    {"regex": "[^\\x00-\\x{10FFFF}]"},
    {"json_schema": '{"type":"array","items":' * 60 + "{}" + "}" * 60},
    {"json_schema": '{"allOf":[' * NESTING},
    {"json_schema": json.dumps({"type": "string", "minLength": 10**9})},
    {"json_schema": json.dumps({"enum": [f"{number}" for number in range(8000)]})},
    {"json_schema": json.dumps({"$ref": "#"})},
    {"json_schema": json.dumps({"$ref": "http://127.0.0.1:1/schema"})},
    {"json_schema": json.dumps({"not": {}, "type": "string"})},
]

ATTACKS: dict[str, Attack] = {}


@dataclass(slots=True)
class Target:
    """Server under attack, the attacker's key, and answers counted by (attack, status)."""

    address: str
    http_port: int
    metrics_port: int
    key: str
    model: str
    answers: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, attack: str, status: str, number: int = 1) -> None:
        """Add to the count of answers with this status."""
        self.answers.setdefault(attack, Counter())[status] += number


Payload = Any  # type depends on the attack
Build = Callable[[Target], Payload]
Work = Callable[[Target, Payload], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """Kind of attack: `build` makes its payload once, and `workers` tasks send it concurrently."""

    work: Work
    build: Build
    workers: int


def attack(workers: int, build: Build = lambda _: None) -> Callable[[Work], Work]:
    """Register a function as an attack under its own name."""

    def register(work: Work) -> Work:
        name: str = getattr(work, "__name__")  # noqa: B009  # the type has no name
        ATTACKS[name.replace("_", "-")] = Attack(work, build, workers)
        return work

    return register


async def run_attack(target: Target, name: str, payload: Payload) -> None:
    """Run the workers of an attack until cancelled; restart each when its connection ends."""

    async def work() -> None:
        while True:
            try:
                await ATTACKS[name].work(target, payload)
            except* (grpc.aio.AioRpcError, OSError, asyncio.InvalidStateError) as group:
                for error in group.exceptions:
                    target.count(name, f"ended: {ending(error)}")
                await asyncio.sleep(AWAY_PAUSE_S)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(ATTACKS[name].workers):
            tasks.create_task(work())


def ending(error: Exception) -> str:
    """Name the status of a failed call, or the type of another error."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return type(error).__name__
    return named(error.code(), error.details())


def named(code: grpc.StatusCode, details: str | None) -> str:
    """Name a status, with its details if it blames the server."""
    if details == WRITE_FAILED:
        return "write failed"
    return f"{code.name} ({details})"[:100] if code.name in BROKEN else code.name


# Frames


def tag(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    size, prefix = len(content), bytearray([number << 3 | 2])
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + content


def frames(rest: bytes, count: int = 1) -> bytes:
    """Build a message with copies of a frame under new request ids. `rest` has its other fields."""
    return b"".join(tag(1, tag(1, str(uuid.uuid4()).encode()) + rest) for _ in range(count))


def start_rest(target: Target, **fields: Any) -> bytes:
    """Build the fields of a start frame except the request id, by default with a short prompt."""
    values: dict[str, Any] = {"model": target.model, "max_output_tokens": 3} | fields
    if not {"text", "conversation", "token_ids"} & values.keys():
        values["text"] = "Is there a hotel?"
    return pb.ClientFrame(start=pb.StartFrame(**values)).SerializeToString()


async def talk(
    target: Target,
    name: str,
    messages: Iterable[bytes],
    *,
    window: int = 0,
    path: str = GENERATE,
    key: str | None = None,
) -> None:
    """Send messages on one stream and count the frames of the answers.

    Ends with the stream or the last message. At most `window` messages are unanswered; with 0, the
    transport is the only limit.
    """
    room = asyncio.Semaphore(window) if window else None
    secret = target.key if key is None else key
    async with grpc.aio.insecure_channel(
        target.address, (("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        open_stream: Any = channel.stream_stream(path)  # no serializers: bytes in both directions
        call = open_stream(metadata=(("authorization", f"Bearer {secret}"),) if secret else ())

        async def write() -> None:
            # The reader reports it.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in messages:
                    if room:
                        await room.acquire()
                    await call.write(message)
                await call.done_writing()

        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(write())
            try:
                while (data := await call.read()) is not grpc.aio.EOF:
                    for _ in range(count_frames(target, name, data)):
                        if room:
                            room.release()
            finally:
                writer.cancel()
                call.cancel()
        target.count(name, f"stream {named(await call.code(), await call.details())}")


def count_frames(target: Target, name: str, data: bytes) -> int:
    """Count frames by status. Return how many of them end a request or answer an update."""
    ends = 0
    for frame in pb.GenerateResponse.FromString(data).frames:
        match frame.WhichOneof("kind"):
            case "failed":
                target.count(name, STATUS_NAMES.get(frame.failed.status.code, "?"))
                ends += 1
            case "finished":
                target.count(name, "finished")
                ends += 1
            case "updated":
                target.count(name, STATUS_NAMES.get(frame.updated.refusal.code, "?"))
    return ends


@attack(workers=4, build=start_rest)
async def starts(target: Target, rest: bytes) -> None:
    """Send 1,000 small requests in each message."""
    await talk(target, "starts", (frames(rest, BURST_FRAMES) for _ in itertools.count()), window=2)


@attack(workers=4, build=lambda target: start_rest(target, text=LONG_TEXT))
async def long_prompts(target: Target, rest: bytes) -> None:
    """Send prompts just below the message limit, forty concurrently."""
    await talk(target, "long-prompts", (frames(rest) for _ in itertools.count()), window=10)


@attack(workers=4, build=lambda target: start_rest(target, conversation=many_turns()))
async def many_messages(target: Target, rest: bytes) -> None:
    """Send conversations of thousands of messages of one letter."""
    await talk(target, "many-messages", (frames(rest) for _ in itertools.count()), window=8)


def many_turns() -> pb.Conversation:
    """Build a conversation of one-letter messages, slightly below their limit."""
    roles = (pb.ROLE_USER, pb.ROLE_ASSISTANT)
    return pb.Conversation(
        messages=[pb.Message(role=roles[index % 2], content="a") for index in range(MESSAGE_COUNT)]
    )


@attack(
    workers=2,
    build=lambda target: [
        start_rest(target, token_ids=pb.TokenIds(ids=[number] * 900_000))
        for number in (9, 2000, 2**31 - 1, -1)
    ],
)
async def token_ids(target: Target, rests: list[bytes]) -> None:
    """Send hundreds of thousands of token ids, inside and outside the vocabulary."""
    await talk(target, "token-ids", (frames(rest) for rest in itertools.cycle(rests)), window=8)


def wide_starts(target: Target) -> Iterator[bytes]:
    """Yield starts with one field that fills a message."""
    schema = '{"type":"object","properties":{"a":' * 63 + "{}" + "}}" * 63
    for fields in (
        {"labels": {f"label-{number}": "x" * 50 for number in range(LABEL_COUNT)}},
        {"labels": {"x" * 1_000_000: "y" * 1_000_000}},
        {"model": "m" * NEAR_LIMIT_BYTES},
        {"region": "r" * NEAR_LIMIT_BYTES},
        {"stop_sequences": ["x"] * 1_000_000},
        {"stop_sequences": ["x" * NEAR_LIMIT_BYTES]},
        {"stop_token_ids": list(range(900_000))},
        {"sampling": pb.Sampling(logit_bias=dict.fromkeys(range(200000), 1.0))},
        {
            "conversation": pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content="Hi")]),
            "tools": [
                pb.Tool(
                    name=f"tool{number}", description="d" * 10_000, parameters_json_schema=schema
                )
                for number in range(TOOL_COUNT)
            ],
        },
        {
            "conversation": pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content="Hi")]),
            "tools": [pb.Tool(name="deep", parameters_json_schema="[" * NESTING)],
        },
        {"max_cost": types_pb2.Money(currency_code="X" * NEAR_LIMIT_BYTES)},
    ):
        yield start_rest(target, **fields)


@attack(workers=2, build=lambda target: list(wide_starts(target)))
async def wide_fields(target: Target, rests: list[bytes]) -> None:
    """Send label maps, names, stop sequences, biases and tools that fill a message."""
    await talk(target, "wide-fields", (frames(rest) for rest in itertools.cycle(rests)), window=4)


@attack(workers=8, build=lambda target: start_rest(target, model=f"{target.model}\0"))
async def odd_names(target: Target, rest: bytes) -> None:
    """Send model names with a NUL, 200 in a message, while an administrator lists requests."""
    await talk(target, "odd-names", (frames(rest, 200) for _ in itertools.count()))


def odd_starts(target: Target) -> Iterator[bytes]:
    """Yield starts with hostile characters in each text field."""
    for text in TEXTS:
        user = pb.Conversation(messages=[pb.Message(role=pb.ROLE_USER, content=text)])
        for fields in (
            {"model": text},
            {"region": text},
            {"labels": {text: text}},
            {"text": text},
            {"conversation": user},
            {"conversation": user, "tools": [pb.Tool(name=text, parameters_json_schema=text)]},
            {"stop_sequences": [text]},
        ):
            yield (
                start_rest(target, **fields)
                + pb.ClientFrame(traceparent=text, tracestate=text).SerializeToString()
            )


@attack(workers=2, build=lambda target: list(odd_starts(target)))
async def characters(target: Target, rests: list[bytes]) -> None:
    """Send NUL, control, invisible, full-width and very long text in every field."""

    def messages() -> Iterator[bytes]:
        bad_ids = pb.GenerateRequest(
            frames=[pb.ClientFrame(request_id=text, cancel=pb.CancelFrame()) for text in TEXTS]
        )
        while True:
            for index in range(0, len(rests), 50):
                yield b"".join(map(frames, rests[index : index + 50]))
            yield bad_ids.SerializeToString()

    await talk(target, "characters", messages(), window=8)


def odd_values(target: Target) -> Iterator[bytes]:
    """Yield starts with hostile numbers in each numeric field."""
    for fraction in FRACTIONS:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            sampling = pb.Sampling()
            setattr(sampling, name, fraction)
            yield start_rest(target, sampling=sampling)
        yield start_rest(target, sampling=pb.Sampling(logit_bias={-1: fraction}))
        yield start_rest(target, beam_search=pb.BeamSearch(width=16, length_penalty=fraction))
    for number in NUMBERS:
        small = max(min(number, 2**31 - 1), -(2**31))
        large = min(number, 2**63 - 1)
        for name in (
            "max_output_tokens",
            "usage_interval_tokens",
            "min_output_tokens",
            "initial_credit_tokens",
        ):
            yield start_rest(target, **{name: large})
        for name in ("top_logprobs", "choice_count", "tier"):
            yield start_rest(target, **{name: small})
        yield start_rest(target, sampling=pb.Sampling(top_k=small, seed=large))
        yield start_rest(
            target, max_cost=types_pb2.Money(currency_code="USD", units=large, picos=large)
        )
        yield start_rest(target, beam_search=pb.BeamSearch(width=small))
        yield start_rest(target, start_timeout={"seconds": large, "nanos": small})
        yield start_rest(target, keep_on_disconnect={"seconds": large, "nanos": small})


@attack(workers=2, build=lambda target: list(odd_values(target)))
async def values(target: Target, rests: list[bytes]) -> None:
    """Send negative, huge, infinite and undefined numbers; negative credit."""

    def messages() -> Iterator[bytes]:
        for number in itertools.count():
            yield b"".join(frames(rest) for rest in rests)
            request_id = str(uuid.uuid4())
            begun = pb.ClientFrame(request_id=request_id)
            begun.MergeFromString(start_rest(target, initial_credit_tokens=0))
            some = [
                pb.ClientFrame(
                    request_id=request_id, credit=pb.CreditFrame(token_count=NUMBERS[number % 10])
                )
            ]
            for limit in NUMBERS[:10]:
                some.append(
                    pb.ClientFrame(
                        request_id=request_id, update=pb.UpdateFrame(max_output_tokens=limit)
                    )
                )
                some.append(
                    pb.ClientFrame(request_id=request_id, attach=pb.AttachFrame(after_seq=limit))
                )
            yield pb.GenerateRequest(frames=[begun, *some, *some]).SerializeToString()

    await talk(target, "values", messages(), window=4)


@attack(
    workers=2,
    build=lambda target: [
        start_rest(target, response_format=pb.ResponseFormat(**fields)) for fields in GRAMMARS
    ],
)
async def grammars(target: Target, rests: list[bytes]) -> None:
    """Send grammars, patterns and schemas that grow exponentially, never end, or match nothing."""
    await talk(target, "grammars", (frames(rest) for rest in itertools.cycle(rests)), window=8)


def empty_frames(_: Target) -> list[bytes]:
    """Build an empty frame of each kind that names a request."""
    rests = []
    for kind in ("cancel", "attach", "credit", "update"):
        frame = pb.ClientFrame()
        getattr(frame, kind).SetInParent()
        rests.append(frame.SerializeToString())
    return rests


@attack(workers=2, build=empty_frames)
async def unknown_requests(target: Target, rests: list[bytes]) -> None:
    """Send cancels, attaches, credits and updates of unknown requests, 1,000 in a message."""
    await talk(
        target, "unknown-requests", (frames(rest, BURST_FRAMES) for rest in itertools.cycle(rests))
    )


@attack(workers=4)
async def handovers(target: Target, _: None) -> None:
    """Start long requests that outlive their stream; attach to them, update and drop them."""
    ids = [str(uuid.uuid4()) for _ in range(8)]
    rest = start_rest(
        target,
        max_output_tokens=2000,
        ignore_eos=True,
        keep_on_disconnect={"seconds": 5},
        top_logprobs=20,
    )

    def messages() -> Iterator[bytes]:
        yield b"".join(tag(1, tag(1, each.encode()) + rest) for each in ids)
        for _attempt in range(200):
            some = [
                pb.ClientFrame(request_id=each, attach=pb.AttachFrame(after_seq=0)) for each in ids
            ]
            some += [
                pb.ClientFrame(request_id=each, update=pb.UpdateFrame(max_output_tokens=3000))
                for each in ids
            ]
            yield pb.GenerateRequest(frames=some).SerializeToString()

    async with asyncio.timeout(CALL_MAX_S), asyncio.TaskGroup() as tasks:
        for _stream in range(2):
            tasks.create_task(talk(target, "handovers", messages()))


@attack(workers=4)
async def garbage(target: Target, _: None) -> None:
    """Send messages that are malformed, empty, or have frames without a kind."""
    for message in (
        b"",
        random.randbytes(500),
        b"\x0a\x00" * 100_000,
        frames(b"", 3),
        b"\xff" * NEAR_LIMIT_BYTES,
        b"\x0a" * 5_000_000,
    ):
        await talk(target, "garbage", [message])


# Calls


async def call(
    target: Target,
    name: str,
    path: str,
    message: bytes,
    *,
    key: str | None = None,
    channel: Any = None,
) -> None:
    """Make one unary or streaming call, read its responses, and count its status."""
    secret = target.key if key is None else key
    opened = channel.stream_stream(path)(
        metadata=(("authorization", f"Bearer {secret}"),) if secret else (), timeout=CALL_MAX_S
    )
    try:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await opened.write(message)
            await opened.done_writing()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await opened.read() is not grpc.aio.EOF:
                if path == WATCH:
                    break
    finally:
        opened.cancel()
    status = await opened.code()
    target.count(name, named(status, await opened.details()))
    if status is grpc.StatusCode.UNAVAILABLE:
        await asyncio.sleep(AWAY_PAUSE_S)


def connect(target: Target) -> grpc.aio.Channel:
    """Open a connection that no other attack uses."""
    return grpc.aio.insecure_channel(target.address, (("grpc.use_local_subchannel_pool", 1),))


def fill(message: Message, chance: random.Random, depth: int = 3) -> Message:
    """Set some fields of a message to hostile values."""
    for spec in message.DESCRIPTOR.fields:
        if chance.random() < 0.5:
            continue
        repeated = spec.is_repeated
        if spec.type == FieldDescriptor.TYPE_MESSAGE:
            kind = spec.message_type
            if depth and kind is not None and not kind.GetOptions().map_entry:
                child = (
                    getattr(message, spec.name).add() if repeated else getattr(message, spec.name)
                )
                fill(child, chance, depth - 1)
            continue
        # Out of range: the library refuses it.
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            value = hostile_value(spec, chance)
            if repeated:
                getattr(message, spec.name).extend([value] * chance.choice((1, 3, 1000)))
            else:
                setattr(message, spec.name, value)
    return message


def hostile_value(spec: Any, chance: random.Random) -> Any:
    """Choose a hostile value that fits the type of a field."""
    if spec.type == FieldDescriptor.TYPE_STRING:
        if chance.random() < 0.2:
            return str(uuid.UUID(int=chance.getrandbits(128), version=4))
        return chance.choice(TEXTS)
    if spec.type == FieldDescriptor.TYPE_BYTES:
        return chance.randbytes(1000)
    if spec.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return chance.choice(FRACTIONS)
    return chance.choice(NUMBERS)


@attack(workers=16)
async def calls(target: Target, _: None) -> None:
    """Call every RPC of every service with an empty message, noise, and hostile field values."""
    chance = random.Random()
    async with connect(target) as channel:
        while True:
            for method in METHODS:
                path = f"/{method.containing_service.full_name}/{method.name}"
                request = fill(GetMessageClass(method.input_type)(), chance).SerializeToString()
                await call(
                    target,
                    "calls",
                    path,
                    chance.choice((request, request, request, b"", b"\xff\xff")),
                    channel=channel,
                )


def counting_requests(target: Target) -> list[tuple[str, bytes]]:
    """Build the messages of calls that count tokens, with their paths."""
    turns = many_turns()
    requests = [
        ("CountTokens", pb.CountTokensRequest(model=target.model, text=LONG_TEXT)),
        ("CountTokens", pb.CountTokensRequest(model=target.model, conversation=turns)),
        ("Quote", pb.QuoteRequest(start=pb.StartFrame(model=target.model, text=LONG_TEXT))),
        ("Quote", pb.QuoteRequest(start=pb.StartFrame(model=target.model, conversation=turns))),
        ("Embed", pb.EmbedRequest(request_id=str(uuid.uuid4()), model=target.model)),
    ]
    return [(f"{SERVICE}/{name}", request.SerializeToString()) for name, request in requests]


@attack(workers=16, build=counting_requests)
async def counting(target: Target, requests: list[tuple[str, bytes]]) -> None:
    """Call `CountTokens`, `Quote` and `Embed` with prompts near the message limit."""
    async with connect(target) as channel:
        while True:
            for path, message in random.sample(requests, len(requests)):
                await call(target, "counting", path, message, channel=channel)


def costly_messages(target: Target) -> list[tuple[str, Costly]]:
    """Build the costliest messages of each RPC."""
    return [
        (f"/{method.containing_service.full_name}/{method.name}", each)
        for method in METHODS
        for each in messages_of(method.input_type)
    ]


@attack(workers=16, build=costly_messages)
async def grpc_costly(target: Target, messages: list[tuple[str, Costly]]) -> None:
    """Send the costliest message of each kind for each field of each call."""
    async with connect(target) as channel:
        while True:
            for path, costly in random.sample(messages, len(messages)):
                message = costly.build(random.choice((60_000, NEAR_LIMIT_BYTES)))
                await call(target, "grpc-costly", path, message, channel=channel)


@attack(workers=100)
async def reports(target: Target, _: None) -> None:
    """Request reports with a billing key, a hundred concurrently."""
    names = (
        "GetMonthReport",
        "GetUsage",
        "GetForecast",
        "ListMonths",
        "GetMonthDocument",
        "GetReconciliation",
        "ListAdjustments",
    )
    async with connect(target) as channel:
        while True:
            for name in random.sample(names, len(names)):
                await call(
                    target, "reports", f"/weir.v1.BillingService/{name}", b"", channel=channel
                )


@attack(workers=1)
async def held_streams(target: Target, _: None) -> None:
    """Hold thousands of silent streams open on one connection, with and without a key."""
    bearer = (("authorization", f"Bearer {target.key}"),)
    async with connect(target) as channel:
        held = []
        for index in range(STREAM_COUNT * 3):
            path, message, metadata = (
                (GENERATE, None, bearer),
                (WATCH, b"", ()),
                (REFLECTION, b"\x3a\x01*", ()),
            )[index % 3]
            opened: Any = channel.stream_stream(path)(metadata=metadata, timeout=CALL_MAX_S)
            held.append(opened)
            if message is not None:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await opened.write(message)
            await asyncio.sleep(0)
        await asyncio.sleep(5)
        for opened in held:
            done = opened.done()
            target.count(
                "held-streams",
                named(await opened.code(), await opened.details()) if done else "held",
            )
            opened.cancel()


# HTTP and sockets


async def http(
    target: Target,
    name: str,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    key: str = "",
    port: int = 0,
    local: str = "",
) -> None:
    """Send one HTTP request on a separate connection, and count the status of its answer."""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: weir\r\nconnection: close\r\ncontent-type:"
        " application/json\r\n"
    )
    head += f"authorization: Bearer {key or target.key}\r\ncontent-length: {len(body)}\r\n\r\n"
    async with asyncio.timeout(CALL_MAX_S):
        bound = (local, 0) if local else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port or target.http_port, local_addr=bound
        )
        try:
            writer.write(head.encode("latin-1") + body)
            # Refused before the whole body was read; the answer follows.
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            status = await reader.readline()
            target.count(
                name,
                (
                    f"http {status.split()[1].decode()}"
                    if status.startswith(b"HTTP/1.1 ")
                    else "http closed"
                ),
            )
            while await reader.read(HTTP_READ_BYTES):
                pass
        finally:
            writer.transport.abort()


def http_bodies(target: Target) -> list[tuple[str, bytes]]:
    """Build bodies for the paths of OpenAI's API."""
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": "a"} for index in range(MESSAGE_COUNT)
    ]
    user = [{"role": "user", "content": "Hi"}]
    model = {"model": target.model, "max_tokens": 3}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", model | {"messages": turns}),
        ("/v1/chat/completions", model | {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/v1/chat/completions", model | {"messages": user, "stream": True, "n": 16}),
        ("/v1/chat/completions", model | {"messages": user, "n": 10**9, "max_tokens": 10**30}),
        (
            "/v1/chat/completions",
            model
            | {
                "messages": user,
                "metadata": {f"k{number}": "v" for number in range(200_000)},
            },
        ),
        ("/v1/completions", model | {"prompt": LONG_TEXT}),
        ("/v1/completions", model | {"prompt": ["a"] * 100_000}),
        ("/v1/completions", model | {"prompt": [9] * 900_000}),
        ("/v1/responses", {"model": target.model, "input": LONG_TEXT}),
        ("/v1/responses", {"model": target.model, "input": turns}),
        ("/v1/embeddings", {"model": target.model, "input": ["a"] * 200_000}),
    ]
    bodies += [
        ("/v1/chat/completions", model | {"messages": user, "temperature": fraction})
        for fraction in FRACTIONS
    ]
    for text in TEXTS:
        bodies.append(
            (
                "/v1/chat/completions",
                {"model": text, "messages": [{"role": text, "content": text, "name": text}]},
            )
        )
        bodies.append(
            (
                "/v1/chat/completions",
                model
                | {"messages": [{"role": "user", "content": text}], "user": text, "stop": text},
            )
        )
    for grammar in GRAMMARS:
        if "json_schema" in grammar:
            body = json.dumps(
                model
                | {
                    "messages": user,
                    "response_format": {"type": "json_schema", "json_schema": {"name": "x"}},
                }
            )
            bodies.append(
                (
                    "/v1/chat/completions",
                    body.replace(
                        '{"name": "x"}', f'{{"name": "x", "schema": {grammar["json_schema"]}}}'
                    ),
                )
            )
    serialized = [
        (path, (body if isinstance(body, str) else json.dumps(body)).encode())
        for path, body in bodies
    ]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"):
        serialized += [
            (path, each)
            for each in (
                b"",
                b"\xff\xfe\x00",
                b"[" * 4_000_000,
                b'{"a":' * NESTING,
                b'"\\ud800"',
                b"1e999",
            )
        ]
    return serialized


@attack(workers=16, build=http_bodies)
async def http_requests(target: Target, bodies: list[tuple[str, bytes]]) -> None:
    """Send large, deeply nested and hostile bodies to the paths of OpenAI's API."""
    while True:
        for path, body in random.sample(bodies, len(bodies)):
            await http(target, "http-requests", "POST", path, body)


@attack(workers=16, build=lambda target: http_bodies(target)[0])
async def http_many_messages(target: Target, chat: tuple[str, bytes]) -> None:
    """Send conversations of thousands of one-letter messages to one path of OpenAI's API."""
    path, body = chat
    while True:
        await http(target, "http-many-messages", "POST", path, body)


def costly_bodies(target: Target) -> list[tuple[str, Costly]]:
    """List the costliest bodies of each path, which are built when they are sent."""
    user = {"model": target.model, "messages": [{"role": "user", "content": "Hi"}]}
    apis: list[tuple[str, type[Struct], dict[str, Any]]] = [
        ("/v1/chat/completions", ChatParameters, user),
        ("/v1/completions", CompletionParameters, {"model": target.model, "prompt": "Hi"}),
        ("/v1/responses", ResponseParameters, {"model": target.model, "input": "Hi"}),
        ("/v1/responses/input_tokens", ResponseParameters, {"model": target.model, "input": "Hi"}),
        ("/v1/messages", MessageParameters, user | {"max_tokens": 3}),
        ("/v1/messages/count_tokens", MessageParameters, user),
        ("/v1/embeddings", EmbeddingParameters, {"model": target.model, "input": "Hi"}),
    ]
    return [(path, each) for path, kind, plain in apis for each in bodies_of(kind, plain)]


async def send_costly(target: Target, name: str, bodies: list[tuple[str, Costly]]) -> None:
    """Send these bodies over and over, in random order."""
    while True:
        for path, costly in random.sample(bodies, len(bodies)):
            await http(target, name, "POST", path, costly.build(NEAR_LIMIT_BYTES))


@attack(workers=16, build=costly_bodies)
async def http_costly(target: Target, bodies: list[tuple[str, Costly]]) -> None:
    """Send the costliest body of each kind for each parameter of each path."""
    await send_costly(target, "http-costly", bodies)


def unknown_parameters(target: Target) -> list[tuple[str, Costly]]:
    """Build bodies of unknown parameters, and of thousands of turns of one role."""
    return [
        (path, each)
        for path, each in costly_bodies(target)
        if "unknown member" in each.name or "of one role" in each.name
    ]


@attack(workers=16, build=unknown_parameters)
async def http_unknown_parameters(target: Target, bodies: list[tuple[str, Costly]]) -> None:
    """Send hundreds of thousands of unknown parameters, and turns of one role."""
    await send_costly(target, "http-unknown-parameters", bodies)


@attack(workers=8)
async def http_paths(target: Target, _: None) -> None:
    """Request every other path with odd methods and long targets."""
    paths = [
        "/",
        "/console",
        "/console/",
        "/health",
        "/healthz",
        "/livez",
        "/readyz",
        "/metrics",
        "/v1/models",
        "/v1/models/%00",
    ]
    paths += [f"/console/api/{method.containing_service.name}/{method.name}" for method in METHODS]
    paths += [
        "/v1/models/" + "x" * 7000,
        "/../../etc/passwd",
        "/console/%2e%2e/x",
        "/v1/chat/completions/" * 100,
        "/%ff%fe",
    ]
    while True:
        for path in random.sample(paths, len(paths)):
            method = random.choice(("GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"))
            body = (
                random.choice((b"", b"{}", b"[" * 100_000, b'{"a":"\\u0000"}'))
                if method in ("POST", "PUT")
                else b""
            )
            await http(target, "http-paths", method, path, body)
            if target.metrics_port:
                await http(
                    target,
                    "http-paths",
                    "GET",
                    random.choice(("/metrics", "/health", "/x")),
                    port=target.metrics_port,
                )


@attack(workers=4)
async def wrong_keys(target: Target, _: None) -> None:
    """Send unknown keys from a separate address."""
    while True:
        await http(
            target,
            "wrong-keys",
            "GET",
            "/v1/models",
            key=f"weir_{uuid.uuid4().hex}{uuid.uuid4().hex}",
            local=OTHER_LOOPBACK,
        )


@attack(workers=64)
async def sockets(target: Target, _: None) -> None:
    """Open connections that are silent, send incomplete data, or neither HTTP/1 nor HTTP/2."""
    port = random.choice((int(target.address.rpartition(":")[2]), target.http_port))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    beginnings: Sequence[bytes] = (
        b"",
        b"GET / HT",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4000000\r\n\r\n{",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + random.randbytes(1000),
        random.randbytes(5000),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000,
    )
    try:
        writer.write(random.choice(beginnings))
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(random.random() * 2):
                while await reader.read(HTTP_READ_BYTES):
                    pass
        target.count("sockets", "closed by the server" if reader.at_eof() else "left")
    finally:
        writer.transport.abort()


@attack(workers=4)
async def upstream_answers(target: Target, _: None) -> None:
    """Ask a model whose server gives one hostile answer after the other."""
    body = json.dumps({"model": UPSTREAM, "prompt": "hotel", "max_tokens": 20, "stream": True})
    while True:
        await http(target, "upstream-answers", "POST", "/v1/completions", body.encode())
