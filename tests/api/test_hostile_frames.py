"""Thousands of hostile frames: their sender waits, and all other clients go on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import StreamKey
from api.core import rate_limiter
from api.core.rate_limiter import RateLimiter
from api.core.settings import Settings
from api.generation.parsing import text_work
from api.openai.gateway import Gateway
from api.openai.listener import Listener
from api.rpc import client_stream as generation
from api.rpc.client_stream import ClientStream
from metering.core.errors import KeyInvalid
from metering.quotas.quota_rules import Owner, Payer
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.authentication import Principal
from tests.api.small_process import Call, SmallProcess
from tests.inference.checkpoints import make_checkpoint
from tests.metering.hold_world import HoldWorld
from tests.service import PATIENCE_S, attach, credit, until

TOKENS = 20

LONG_TEXT = "the hotel near the old harbour " * 70  # more than is tokenized at once


class World:
    """One process, the database, and its callers."""

    def __init__(
        self, small: SmallProcess, database: HoldWorld, payer: Payer, streams: asyncio.TaskGroup
    ) -> None:
        self.small = small
        self._streams = streams
        self._serving: list[asyncio.Task[None]] = []
        self.database = database
        self.principal = Principal(
            payer.api_key_id,
            "wk",
            payer.project_id,
            payer.organization_id,
            "USD",
            frozenset({"inference"}),
        )
        self.frames_max = small.process.admission.settings.messages.frames_max

    def serve(self, call: Call, tasks: asyncio.TaskGroup) -> None:
        """Serve a stream."""
        tasks.create_task(
            self.small.stream(self.principal, "").serve(call.requests(), cast(Any, call))
        )

    def serve_for(self, principal: Principal, call: Call) -> None:
        """Serve a stream of another key until the test ends."""
        self.serve_on(self.small.stream(principal, ""), call)

    def serve_on(self, stream: ClientStream, call: Call) -> None:
        """Serve a given stream until the test ends."""
        self._serving.append(
            self._streams.create_task(stream.serve(call.requests(), cast(Any, call)))
        )

    async def hang_up(self) -> None:
        """Disconnect these clients."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


@pytest.fixture
async def world(tmp_path: Path, database_url: str, sessions: Sessions) -> AsyncIterator[World]:
    settings = Settings.of(database_url=database_url, home=tmp_path)
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with HoldWorld(database_url, now=None) as database:
        payer = database.tenant()
        async with asyncio.TaskGroup() as tasks:
            small = SmallProcess(settings, checkpoint, sessions, tasks)
            await small.engine.start()
            world = World(small, database, payer, tasks)
            yield world
            await world.hang_up()
            assert small.left_over() == {}
            await small.close()


def start_frame() -> pb.ClientFrame:
    """Return a start with credit and `keep_on_disconnect`: every kind of frame affects it."""
    start = pb.StartFrame(
        model="demo",
        token_ids=pb.TokenIds(ids=range(7, 17)),
        max_output_tokens=TOKENS,
        ignore_eos=True,
        initial_credit_tokens=1,
    )
    start.keep_on_disconnect.FromSeconds(60)
    start.usage_interval_tokens = 1
    return pb.ClientFrame(request_id=str(uuid.uuid4()), start=start)


def hostile(kind: str, request_id: str) -> pb.ClientFrame:
    """Return a frame of this kind."""
    frame = pb.ClientFrame(request_id=request_id)
    match kind:
        case "credit":
            frame.credit.token_count = 1
        case "update":
            frame.update.max_output_tokens = TOKENS
        case "attach":
            frame.attach.after_seq = 0
        case "unknown":
            frame.request_id = str(uuid.uuid4())
            frame.cancel.SetInParent()
    return frame


async def sent(call: Call, kind: str, count: int = 1) -> None:
    """Wait for this many frames of a kind."""
    await until(
        lambda: sum(frame.WhichOneof("kind") == kind for frame in call.frames) >= count,
        f"{count} of {kind}",
    )


@pytest.mark.parametrize("kind", ["credit", "update", "attach", "unknown"])
async def test_other_requests_run_during_a_large_message(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others run after each slice; slices are minimal here, as their length varies by machine."""
    monkeypatch.setattr(generation, "SLICE_S", 0.0)
    call, start = Call(), start_frame()
    marker = pb.ClientFrame(request_id=str(uuid.uuid4()), cancel=pb.CancelFrame())
    share_count = 0
    async with asyncio.TaskGroup() as tasks:
        world.serve(call, tasks)
        world.small.engine.pause_after(TOKENS // 2)
        call.send(start)
        await sent(call, "delta")
        await world.small.engine.paused.wait()

        call.send(*[hostile(kind, start.request_id) for _ in range(world.frames_max)])
        call.send(marker)
        async with asyncio.timeout(PATIENCE_S):
            while not any(frame.request_id == marker.request_id for frame in call.frames):
                share_count += 1
                await asyncio.sleep(0)
        world.small.engine.gate.set()
        call.send(credit(start.request_id, TOKENS))
        call.half_close()

    assert share_count >= world.frames_max // 4
    ends = [
        frame
        for frame in call.frames
        if frame.request_id == start.request_id and frame.HasField("finished")
    ]
    assert [end.finished.usage.delivered_token_count for end in ends] == [TOKENS]
    assert world.database.rows("SELECT delivered_token_count FROM usage_events") == [(TOKENS,)]
    world.small.process.replays.forget((world.principal.project_id, uuid.UUID(start.request_id)))


async def test_a_request_moved_a_thousand_times_ends_once_per_stream(world: World) -> None:
    """The last owner has all output; it was billed once."""
    calls, start = (Call(), Call()), start_frame()
    request_id, rounds = start.request_id, 500
    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            world.serve(call, tasks)
        world.small.engine.pause_after(TOKENS // 2)
        calls[0].send(start)
        await sent(calls[0], "admitted")
        await world.small.engine.paused.wait()
        for number in range(rounds):
            taker = calls[(number + 1) % 2]
            taker.send(hostile("attach", request_id))
            await sent(taker, "attached", number // 2 + 1)
        world.small.engine.gate.set()
        last = calls[rounds % 2]
        last.send(credit(request_id, 2 * TOKENS))
        await sent(last, "finished")
        for call in calls:
            call.half_close()

    elsewhere = [
        sum(frame.failed.status.message.startswith("Another stream") for frame in call.frames)
        for call in calls
    ]
    assert sum(elsewhere) == rounds
    after = max(index for index, frame in enumerate(last.frames) if frame.HasField("attached"))
    deltas = [frame.delta for frame in last.frames[after:] if frame.HasField("delta")]
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
    assert world.database.rows("SELECT delivered_token_count FROM usage_events") == [(TOKENS,)]
    world.small.process.replays.forget((world.principal.project_id, uuid.UUID(request_id)))


def pace_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sender of any frame wait hours for its next slice: speed is then irrelevant."""
    monkeypatch.setattr(rate_limiter, "BURST_S", 0.0)
    monkeypatch.setattr(generation, "SLICE_S", 0.0)
    world.small.process.pace = RateLimiter(1e-12)


async def answered(world: World, principal: Principal, *frames: pb.ClientFrame) -> Call:
    """Serve a stream that answers each frame of this message, until it reads the next one."""
    call = Call()
    world.serve_for(principal, call)
    call.send(*frames)
    await until(lambda: len(call.frames) >= 1, "the first answer")
    return call


async def test_a_flood_delays_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams of the key wait; a request of another organization begins and ends."""
    flooding = dataclasses.replace(
        world.principal, api_key_id=uuid.uuid4(), organization_id=uuid.uuid4()
    )
    pace_for_ever(world, monkeypatch)

    frames = [hostile("unknown", "") for _ in range(world.frames_max)]
    flood = await answered(world, flooding, *frames)
    quiet, start = Call(), start_frame()
    start.start.initial_credit_tokens = TOKENS
    start.start.ClearField("keep_on_disconnect")
    world.small.process.pace._free_at.pop(world.principal.api_key_id.int, None)
    world.small.process.pace._free_at.pop(world.principal.organization_id.int, None)
    world.serve_for(world.principal, quiet)
    quiet.send(start)
    late = Call()
    world.serve_for(flooding, late)
    late.send(hostile("unknown", ""))
    await sent(quiet, "finished")

    assert (len(flood.frames), late.frames) == (1, [])
    assert world.small.process.pace.wait_s(flooding) > 3600


async def test_database_attaches_end_a_slice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a message of such frames would run at once, and its key then wait for minutes."""
    monkeypatch.setattr(generation, "LOOKUP_COST_S", 1e6)
    attaches = [attach(str(uuid.uuid4())) for _ in range(3)]

    call = await answered(world, world.principal, *attaches)

    assert world.small.process.pace.wait_s(world.principal) < 2 * 1e6 / 0.25
    assert world.small.relays.running_count == 0
    assert len(call.frames) == 1


@pytest.mark.parametrize("kind", ["start", "cancel", "attach", "credit", "update"])
async def test_an_invalid_id_of_any_length_is_answered_in_short(world: World, kind: str) -> None:
    frame = pb.ClientFrame(request_id="x" * 1_000_000)
    getattr(frame, kind).SetInParent()

    call = await answered(world, world.principal, frame)

    [refused] = call.frames
    assert refused.HasField("failed")
    assert refused.ByteSize() < 1000


class Gate(RateLimiter):
    """Pace that passes the first slice, and the later ones once it is opened."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.open = asyncio.Event()
        self.waits = asyncio.Event()
        self._slice_count = 0

    async def wait_for_share(self, owner: Owner) -> bool:
        """Implement `RateLimiter.wait_for_share`."""
        self._slice_count += 1
        if self._slice_count == 1:
            return False
        self.waits.set()
        await self.open.wait()
        return True


async def test_a_revoked_key_starts_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of thousands of frames may wait for minutes."""

    async def refuse() -> Principal:
        raise KeyInvalid("this key is revoked")

    monkeypatch.setattr(generation, "SLICE_S", 0.0)
    gate = world.small.process.pace = Gate()
    key, call = StreamKey(world.principal, refuse, 3600.0), Call()
    stream = ClientStream(world.small.process, key, 0.0)
    world.serve_on(stream, call)

    call.send(hostile("unknown", ""), start_frame())
    await gate.waits.wait()
    key.change(())
    gate.open.set()
    await until(lambda: len(call.frames) >= 2, "both answers")

    assert [frame.failed.status.code for frame in call.frames] == [
        grpc.StatusCode.NOT_FOUND.value[0],
        grpc.StatusCode.UNAUTHENTICATED.value[0],
    ]


async def test_streams_of_a_key_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice waits for all earlier ones: otherwise waiting slices would wake together."""
    now, key = 1000.0, owner()

    async def sleep(duration_s: float) -> None:
        nonlocal now
        wakes_at = now + duration_s
        await asyncio.sleep(0)
        now = max(now, wakes_at)

    monkeypatch.setattr(rate_limiter, "BURST_S", 0.0)
    monkeypatch.setattr(rate_limiter, "asyncio", SimpleNamespace(sleep=sleep))
    frame_pace, owed_s = RateLimiter(0.25, clock=lambda: now), dict[int, float]()
    frame_pace.charge(key, 1.0)

    async def work_off(number: int) -> None:
        await frame_pace.wait_for_share(key)
        owed_s[number] = frame_pace.wait_s(key)
        frame_pace.charge(key, 1.0)

    streams = [asyncio.create_task(work_off(number)) for number in range(5)]
    await asyncio.sleep(0)
    for number in (0, 3):
        streams[number].cancel()
    await asyncio.gather(*streams, return_exceptions=True)

    assert list(owed_s.items()) == [(1, 0.0), (2, 0.0), (4, 0.0)]
    assert frame_pace._waiting == {}


@pytest.mark.parametrize("kind", ["attach", "start"])
async def test_refusals_after_the_frame_was_read_are_counted(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown attach costs a query, an oversized start tokenization; others are free."""
    if kind == "start":
        monkeypatch.setattr("api.generation.request.registry.REFUSAL_COST_S", 1000.0)
    else:
        monkeypatch.setattr(generation, "LOOKUP_COST_S", 1000.0)
    frame = start_frame()
    if kind == "attach":
        frame = pb.ClientFrame(request_id=str(uuid.uuid4()), attach=pb.AttachFrame())
    else:
        frame.start.token_ids.ids[:] = [10**6]
    runs = start_frame()
    runs.start.ClearField("keep_on_disconnect")
    runs.start.ClearField("initial_credit_tokens")
    call = Call()

    world.serve_for(world.principal, call)
    call.send(runs)
    await sent(call, "finished")
    before_s = world.small.process.pace.wait_s(world.principal)
    world.small.process.pace = RateLimiter(1.0, clock=lambda: 0.0)
    call.send(frame)
    await sent(call, "failed")
    after_s = world.small.process.pace.wait_s(world.principal)

    assert before_s < 1000 - rate_limiter.BURST_S <= after_s


def test_a_pause_gives_back_what_may_be_worked_off_at_once_and_no_more() -> None:
    """Half a second of work at any speed, then a quarter of the time; other keys have their own."""
    now, one, other = 1000.0, owner(), owner()
    frame_pace = RateLimiter(0.25, clock=lambda: now)

    frame_pace.charge(one, rate_limiter.BURST_S)
    at_once_s = frame_pace.wait_s(one)
    frame_pace.charge(one, 0.1)
    beyond_s, of_the_other_s = frame_pace.wait_s(one), frame_pace.wait_s(other)
    now += 3600.0
    frame_pace.charge(one, rate_limiter.BURST_S + 0.05)

    assert (at_once_s, of_the_other_s) == (0.0, 0.0)
    assert [round(beyond_s, 6), round(frame_pace.wait_s(one), 6)] == [0.4, 0.2]


def test_keys_of_an_organization_have_two_shares_together() -> None:
    """Many keys do not increase the share, and a flooding one leaves a share to the others."""
    organization_id, frame_pace = uuid.uuid4(), RateLimiter(0.25, clock=lambda: 1000.0)
    keys = [owner(organization_id) for _ in range(10)]

    frame_pace.charge(keys[0], rate_limiter.BURST_S + 0.1)
    flooding_s, beside_s = frame_pace.wait_s(keys[0]), frame_pace.wait_s(keys[1])
    for key in keys[1:]:
        frame_pace.charge(key, 0.1)

    waits_s = (flooding_s, beside_s, frame_pace.wait_s(keys[9]))
    assert [round(each, 6) for each in waits_s] == [0.4, 0.2, 2.0]
    assert frame_pace.wait_s(owner()) == 0.0


def test_keys_that_owe_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that still owes time is kept, however many others come."""
    monkeypatch.setattr(rate_limiter, "KEYS_MAX", 100)
    frame_pace, owing = RateLimiter(0.25, clock=lambda: 1000.0), owner()
    frame_pace.charge(owing, 10.0)

    for _ in range(250):
        frame_pace.charge(owner(), 1e-6)

    assert len(frame_pace._free_at) <= 100
    assert frame_pace.wait_s(owing) > 0


def owner(organization_id: uuid.UUID | None = None) -> Payer:
    """Return a new key, in a new organization by default."""
    return Payer(organization_id or uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")


def text_frame(text: str) -> pb.ClientFrame:
    """Return a request with this prompt."""
    return pb.ClientFrame(
        request_id=str(uuid.uuid4()),
        start=pb.StartFrame(model="demo", text=text, max_output_tokens=1),
    )


def conversation_frame(message_count: int, content: str) -> pb.ClientFrame:
    """Return a request with a conversation."""
    frame = text_frame("")
    frame.start.conversation.messages.extend(
        [pb.Message(role=pb.ROLE_USER, content=content)] * message_count
    )
    return frame


# Window and tokenizer of the tiny model: 2,048 tokens, none longer than 20 characters.
PROMPTS: dict[str, tuple[pb.ClientFrame, str]] = {
    "text that fits": (text_frame("word " * 1000), "QUOTA_EXCEEDED"),
    "a conversation that fits": (conversation_frame(100, "word"), "QUOTA_EXCEEDED"),
    "text of 3.9 MB": (text_frame("word " * 780_000), "CONTEXT_EXCEEDED"),
    "a conversation of 3.9 MB": (conversation_frame(39, "word " * 20_000), "CONTEXT_EXCEEDED"),
    "very many messages": (conversation_frame(9000, "x"), "FIELD_INVALID"),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_no_thread_works_for_a_key_without_quota(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, reason = PROMPTS[name]
    world.database.execute(
        "INSERT INTO quotas (subject, subject_id, dimension, limit_value) VALUES ('organization',"
        " %s, 'tokens_per_month', 0)",
        world.principal.organization_id,
    )
    ran: list[int] = []
    monkeypatch.setattr(text_work, "timed", lambda call, cost: ran.append(1))
    call = Call()
    async with asyncio.TaskGroup() as tasks:
        world.serve(call, tasks)
        call.send(frame)
        call.half_close()

    [failed] = [each.failed for each in call.frames]
    info = error_details_pb2.ErrorInfo()
    assert failed.status.details[0].Unpack(info)
    assert (info.reason, ran) == (reason, [])


async def test_prompts_of_a_refused_key_are_not_tokenized(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is tokenized, which is cheaper than a query; after a new admission, all are."""
    world.database.execute(
        "INSERT INTO quotas (subject, subject_id, dimension, limit_value) VALUES ('organization',"
        " %s, 'tokens_per_month', 0)",
        world.principal.organization_id,
    )
    encoded: list[str] = []
    [tokenizer] = [world.small.process.tokenizers[name] for name in ("demo",)]
    encode = tokenizer.words.encode

    def noted(text: str, **options: Any) -> tuple[int, ...]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer.words, "encode", noted)

    async def ask(text: str) -> str:
        call = Call()
        async with asyncio.TaskGroup() as tasks:
            world.serve(call, tasks)
            call.send(text_frame(text))
            call.half_close()
        return [each.WhichOneof("kind") or "" for each in call.frames][-1]

    assert [await ask("first"), await ask("second"), await ask("third")] == ["failed"] * 3
    assert encoded == ["first"]
    world.database.execute(
        "UPDATE quotas SET limit_value = 1000000 WHERE subject_id = %s",
        world.principal.organization_id,
    )
    assert [await ask("fourth"), await ask("fifth")] == ["finished"] * 2
    assert encoded == ["first", "fourth", "fifth"]
    assert not world.small.process.admission.was_refused(world.principal.api_key_id)


async def test_a_key_has_a_prompt_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its first large prompts are being prepared; afterwards it may send as many again."""
    work = world.small.process.text_work
    small = dataclasses.replace(work._settings, chars_per_key_max=5000)
    monkeypatch.setattr(work, "_settings", small)
    other = dataclasses.replace(
        world.principal, api_key_id=world.database.key(world.principal.project_id)
    )
    call, theirs = Call(), Call()
    async with asyncio.TaskGroup() as tasks:
        world.serve(call, tasks)
        call.send(*[text_frame(LONG_TEXT) for _ in range(4)])
        call.half_close()
        world.serve_for(other, theirs)
        theirs.send(text_frame(LONG_TEXT))
        await sent(theirs, "finished")

    ends = [frame for frame in call.frames if frame.WhichOneof("kind") in ("finished", "failed")]
    refused = [frame.failed.status for frame in ends if frame.HasField("failed")]
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert len(ends) == 4
    assert len(refused) == 2
    for status in refused:
        assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(retry)
        assert info.reason == "PREPARATION_LIMIT"
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert work.taken_chars == 0


def test_preparation_of_what_is_refused_slows_its_key() -> None:
    """A thread's time counts like the event loop's; an ordinary admitted request is free."""
    now = 100.0
    paced = RateLimiter(0.25, clock=lambda: now)
    key = owner()
    with paced.charging(key, free_s=PATIENCE_S):
        sum(range(1000))
    assert paced.wait_s(key) == 0
    paced.charge(key, 2 * rate_limiter.BURST_S)
    assert paced.wait_s(key) == pytest.approx(4 * rate_limiter.BURST_S)


class RecordedPace(RateLimiter):
    """Pace that records its calls in order."""

    def __init__(self) -> None:
        super().__init__(0.25)
        self.events: list[str] = []

    async def wait_for_share(self, owner: Owner) -> bool:
        """Implement `RateLimiter.wait_for_share`."""
        waited = await super().wait_for_share(owner)
        self.events.append("turn")
        return waited

    def charge(self, owner: Owner | str, cost_s: float, held_s: float = 0.0) -> None:
        """Implement `RateLimiter.charge`."""
        if cost_s + held_s > 0:
            self.events.append("charge")
        super().charge(owner, cost_s, held_s)


async def test_each_http_body_counts_at_once(world: World, sessions: Sessions) -> None:
    """Otherwise concurrent bodies would all be read at once, however large they are."""
    process = world.small.process
    recorded = process.pace = RecordedPace()
    async with sessions.begin() as session:
        _, secret = await create_api_key(
            session, organization="acme", project="search", name="key", actor="test"
        )
    gateway = Gateway(process, world.small.authenticator, sessions)
    listener = Listener(gateway.handle, process.admission.settings, None)
    port = listener.bind(("127.0.0.1", 0))
    await listener.start()
    messages = [{"role": "user", "content": "x"}] * 2000
    body = json.dumps({"model": "demo", "messages": messages, "max_tokens": 1}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: weir\r\nconnection: close\r\nauthorization:"
        f" Bearer {secret}\r\n"
    )

    async def post() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        return answer

    answers = await asyncio.gather(*(post() for _ in range(4)))
    await listener.stop()

    assert all(answer.startswith(b"HTTP/1.1 400") for answer in answers)
    assert all(b"context_length_exceeded" in answer for answer in answers)
    assert recorded.events.count("turn") == 4
    for index, event in enumerate(recorded.events):
        if event == "turn":
            assert recorded.events[index + 1] == "charge"
