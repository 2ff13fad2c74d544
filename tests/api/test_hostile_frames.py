"""Frames that no client of ours sends, by the thousand: whoever sends them waits for them, and everybody else goes on meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.settings import Settings
from api.streams import generation
from metering.operations import Payer
from metering.store.db import Sessions
from metering.tenants.tenants import Principal
from tests.api.small_process import Call, SmallProcess
from tests.inference.checkpoints import make_checkpoint
from tests.metering.hold_world import HoldWorld
from tests.service import PATIENCE_S, until

TOKENS = 20


class World:
    """One process, the books, and who calls."""

    def __init__(self, small: SmallProcess, books: HoldWorld, payer: Payer) -> None:
        self.small = small
        self.books = books
        self.principal = Principal(payer.api_key_id, "wk", payer.project_id, payer.organization_id, "USD", frozenset({"inference"}))
        self.frames_max = small.process.admission.settings.frames_per_message_max

    def serve(self, call: Call, tasks: asyncio.TaskGroup) -> None:
        """Serve a stream."""
        tasks.create_task(self.small.stream(self.principal, "").serve(call.requests(), cast(Any, call)))


@pytest.fixture
async def world(tmp_path: Path, database_url: str, sessions: Sessions) -> AsyncIterator[World]:
    settings = Settings(database_url=database_url, home=tmp_path)
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    with HoldWorld(database_url, now=None) as books:
        payer = books.tenant()
        async with asyncio.TaskGroup() as tasks:
            small = SmallProcess(settings, checkpoint, sessions, tasks)
            await small.engine.start()
            yield World(small, books, payer)
            assert small.left_over() == {}
            await small.close()


def start_frame() -> pb.ClientFrame:
    """A request with credit that may be kept: every frame means something to it."""
    start = pb.StartFrame(
        model="demo", token_ids=pb.TokenIds(ids=range(7, 17)), max_output_tokens=TOKENS, ignore_eos=True, initial_credit_tokens=1
    )
    start.keep_on_disconnect.FromSeconds(60)
    start.usage_interval_tokens = 1
    return pb.ClientFrame(request_id=str(uuid.uuid4()), start=start)


def hostile(kind: str, request_id: str) -> pb.ClientFrame:
    """One of thousands."""
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


async def said(call: Call, kind: str, count: int = 1) -> None:
    """Wait for so many frames of a kind."""
    await until(lambda: sum(frame.WhichOneof("kind") == kind for frame in call.frames) >= count, f"{count} of {kind}")


@pytest.mark.parametrize("kind", ["credit", "update", "attach", "unknown"])
async def test_others_have_their_turns_while_a_message_full_of_frames_is_worked_off(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each slice of it; here a slice is as short as can be, since how many frames one holds is the machine's affair."""
    monkeypatch.setattr(generation, "SLICE_S", 0.0)
    call, start = Call(), start_frame()
    marker = pb.ClientFrame(request_id=str(uuid.uuid4()), cancel=pb.CancelFrame())
    turn_count = 0
    async with asyncio.TaskGroup() as tasks:
        world.serve(call, tasks)
        world.small.engine.pause_after(TOKENS // 2)
        call.send(start)
        await said(call, "delta")
        await world.small.engine.paused.wait()

        call.send(*[hostile(kind, start.request_id) for _ in range(world.frames_max)])
        call.send(marker)
        async with asyncio.timeout(PATIENCE_S):
            while not any(frame.request_id == marker.request_id for frame in call.frames):
                turn_count += 1
                await asyncio.sleep(0)
        world.small.engine.gate.set()
        call.send(pb.ClientFrame(request_id=start.request_id, credit=pb.CreditFrame(token_count=TOKENS)))
        call.half_close()

    assert turn_count >= world.frames_max // 4
    ends = [frame for frame in call.frames if frame.request_id == start.request_id and frame.HasField("finished")]
    assert [end.finished.usage.delivered_token_count for end in ends] == [TOKENS]
    assert world.books.rows("SELECT delivered_token_count FROM usage_events") == [(TOKENS,)]
    world.small.process.mailboxes._forget((world.principal.project_id, uuid.UUID(start.request_id)))


async def test_two_streams_that_take_a_request_from_each_other_a_thousand_times_are_told_one_end_each_time(world: World) -> None:
    """Whoever has it at the end has all of it; it was billed once."""
    calls, start = (Call(), Call()), start_frame()
    request_id, rounds = start.request_id, 500
    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            world.serve(call, tasks)
        world.small.engine.pause_after(TOKENS // 2)
        calls[0].send(start)
        await said(calls[0], "admitted")
        await world.small.engine.paused.wait()
        for number in range(rounds):
            taker = calls[(number + 1) % 2]
            taker.send(hostile("attach", request_id))
            await said(taker, "attached", number // 2 + 1)
        world.small.engine.gate.set()
        last = calls[rounds % 2]
        last.send(pb.ClientFrame(request_id=request_id, credit=pb.CreditFrame(token_count=2 * TOKENS)))
        await said(last, "finished")
        for call in calls:
            call.half_close()

    elsewhere = [sum(frame.failed.status.message.startswith("another stream") for frame in call.frames) for call in calls]
    assert sum(elsewhere) == rounds
    after = max(index for index, frame in enumerate(last.frames) if frame.HasField("attached"))
    deltas = [frame.delta for frame in last.frames[after:] if frame.HasField("delta")]
    assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
    assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
    assert world.books.rows("SELECT delivered_token_count FROM usage_events") == [(TOKENS,)]
    world.small.process.mailboxes._forget((world.principal.project_id, uuid.UUID(request_id)))
