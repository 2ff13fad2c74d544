"""A disk that refuses the usage journal: free of charge, told by name, and over by itself."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from weir.v1 import inference_service_pb2 as pb

from api.core.health import JOURNAL, services
from api.core.settings import Settings
from api.openai.gateway import Gateway
from api.openai.listener import Listener
from common.incidents import INCIDENT_COUNTS
from metering.core.models import QuotaDimension
from metering.holds import journal as journal_module
from metering.holds.journal import Delivered
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.authentication import Principal, authenticate
from tests.api.small_process import ENCODER, Call, SmallProcess
from tests.inference.checkpoints import LlamaShape, make_checkpoint
from tests.metering.hold_world import HoldWorld
from tests.metering.invariants import check_invariants
from tests.service import PATIENCE_S, until

PROMPT = range(7, 17)

FULL = errno.ENOSPC
OTHERS = Delivered(uuid.uuid4(), 1, 0, 1, 1)  # the last mark is that of another request
CHAT = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 40, "ignore_eos": True}
ANSWERS: dict[str, tuple[str, dict[str, object]]] = {
    "chat, streamed": ("/chat/completions", CHAT | {"stream": True}),
    "chat, whole": ("/chat/completions", CHAT),
    "completion of two prompts": (
        "/completions",
        {"prompt": ["Go", "Stop"], "max_tokens": 40, "ignore_eos": True},
    ),
    "messages": ("/messages", {"messages": CHAT["messages"], "max_tokens": 40}),
}


class Disk:
    """`os` and `mmap` of the journal, whose calls fail as on a broken disk.

    is_short: it takes the first bytes of a write. marks_are_full: the next request needs a larger
    file of marks.
    """

    def __init__(
        self, failing: dict[str, int], *, is_short: bool = False, marks_are_full: bool = False
    ) -> None:
        self._failing = failing
        self._is_short = is_short
        self.marks_are_full = marks_are_full

    def breaks(self, patch: pytest.MonkeyPatch) -> None:
        """Put the journal on this disk."""
        patch.setattr(journal_module, "os", self)
        if "mmap" in self._failing:
            patch.setattr(journal_module, "mmap", self)

    def __getattr__(self, name: str) -> Any:
        if name not in self._failing:
            return getattr(os, name)

        def fail(*arguments: Any, **named: Any) -> Any:
            if name == "write" and self._is_short and len(arguments[1]) > 8:
                return os.write(arguments[0], arguments[1][:8])
            number = self._failing[name]
            raise OSError(number, os.strerror(number))

        return fail


DISKS = {
    "full": Disk({"write": FULL, "posix_fallocate": FULL}),
    "full in the middle of a record": Disk({"write": FULL}, is_short=True),
    "read-only": Disk({"write": errno.EROFS, "open": errno.EROFS, "ftruncate": errno.EROFS}),
    "broken": Disk({"write": errno.EIO, "ftruncate": errno.EIO}),
    "over quota": Disk({"write": errno.EDQUOT}),
    "no descriptor for marks": Disk({"open": errno.EMFILE}, marks_are_full=True),
    "no room for marks": Disk({"posix_fallocate": FULL}, marks_are_full=True),
    "marks not mapped": Disk({"mmap": errno.ENOMEM}, marks_are_full=True),
}


@dataclass
class World:
    """Process with an HTTP listener, its database, and a tenant with quotas of all kinds."""

    small: SmallProcess
    database: HoldWorld
    payer: Payer
    principal: Principal
    secret: str
    url: str
    tasks: asyncio.TaskGroup
    calls: list[Call] = field(default_factory=list)

    def begin(self, *, keep: bool = False, token_count: int = 40) -> Call:
        """Start a request on a new stream."""
        call = Call()
        frame = pb.StartFrame(
            model="demo",
            token_ids=pb.TokenIds(ids=PROMPT),
            max_output_tokens=token_count,
            ignore_eos=True,
        )
        if keep:
            frame.keep_on_disconnect.FromSeconds(60)
        call.send(pb.ClientFrame(request_id=str(uuid.uuid4()), start=frame))
        call.half_close()
        stream = self.small.stream(self.principal, self.secret)
        self.tasks.create_task(stream.serve(call.requests(), cast(Any, call)))
        return call

    async def end_of(self, call: Call) -> pb.ServerFrame:
        """Return the last frame of a call's only request."""
        await until(
            lambda: any(f.WhichOneof("kind") in ("finished", "failed") for f in call.frames),
            "the end",
        )
        return call.frames[-1]

    async def ask(self, path: str, **fields: object) -> tuple[int, str]:
        """Return status and body of an HTTP request."""
        headers = {"authorization": f"Bearer {self.secret}", "content-type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=json.dumps(fields), headers=headers) as response,
        ):
            return response.status, await response.text()

    def used(self) -> dict[str, int]:
        """Return what is used of each quota; nothing may be held."""
        rows = self.database.rows(
            "SELECT dimension, sum(used)::bigint, sum(held)::bigint FROM quota_counters"
            " JOIN quotas q ON q.id = quota_id GROUP BY 1"
        )
        assert not any(held for _, _, held in rows)
        return {dimension: used for dimension, used, _ in rows if used}


@pytest.fixture
async def world(tmp_path: Path, database_url: str, sessions: Sessions) -> AsyncIterator[World]:
    settings = Settings.of(database_url=database_url, home=tmp_path)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", shape=LlamaShape())
    with HoldWorld(database_url, now=None) as database:
        payer = database.tenant()
        for dimension in QuotaDimension:
            database.quota(payer, dimension, 10**12)
        async with sessions.begin() as session:
            _, secret = await create_api_key(
                session, organization="acme", project="search", name="key", actor="test"
            )
        async with sessions() as session:
            principal = await authenticate(session, secret)
        async with asyncio.TaskGroup() as tasks:
            small = SmallProcess(settings, checkpoint, sessions, tasks)
            await small.engine.start()
            gateway = Gateway(small.process, small.authenticator, sessions)
            listener = Listener(gateway.handle, settings, None)
            url = f"http://127.0.0.1:{listener.bind(('127.0.0.1', 0))}/v1"
            await listener.start()
            yield World(small, database, payer, principal, secret, url, tasks)
            small.engine.gate.set()
            await until(lambda: not small.process.running(), "all to end")
            await listener.stop()
            await small.close()


def is_unavailable(end: pb.ServerFrame) -> bool:
    """Return whether a request ended because the journal cannot be written, with a retry delay."""
    status, info, retry = end.failed.status, error_details_pb2.ErrorInfo(), set[str]()
    for detail in status.details:
        detail.Unpack(info)
        retry.add(detail.TypeName())
    return (
        status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        and info.reason == "JOURNAL_UNAVAILABLE"
        and "google.rpc.RetryInfo" in retry
    )


@pytest.mark.parametrize("disk", DISKS)
async def test_requests_that_cannot_be_journalled_are_free(
    world: World, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    """Running requests on both wires, streamed, whole and kept; then new ones of every kind."""
    incidents, engine, journal = INCIDENT_COUNTS.total(), world.small.engine, world.small.journal
    engine.gate.clear()
    running = [world.begin(), world.begin(keep=True)]
    requested = [
        asyncio.ensure_future(world.ask(path, model="demo", **fields))
        for path, fields in ANSWERS.values()
    ]
    await until(
        lambda: world.database.hold_count() == len(running) + len(requested) + 1,
        "all to be admitted",
    )

    if DISKS[disk].marks_are_full:
        del journal._free_marks[1:]
        journal.record([OTHERS])
    with monkeypatch.context() as broken:
        DISKS[disk].breaks(broken)
        engine.gate.set()
        ends = [await world.end_of(call) for call in running]
        answers = [await answer for answer in requested]
        assert not journal.can_write()
        refused = await world.end_of(world.begin())
        refusals = [await world.ask(path, model="demo", **more) for path, more in ANSWERS.values()]
        embedding = await world.ask("/embeddings", model=ENCODER, input="Go")
        parts = {"database": True, JOURNAL: journal.can_write(), "engine/demo": True}
        assert not services(parts, may_admit_without_store=True)[""]

    assert all(map(is_unavailable, [*ends, refused]))
    for status, body in [*answers, *refusals, embedding]:
        assert status == 503, body
        assert "usage journal" in body
    assert [frame for call in running for frame in call.frames if frame.HasField("delta")] == []
    assert world.database.rows("SELECT count(*) FROM usage_events") == [(0,)]
    assert world.database.hold_count("voided") == len(running) + len(requested) + 1
    assert world.used() == {}
    assert INCIDENT_COUNTS.total() == incidents

    assert journal.can_write()
    journal.forget(OTHERS.hold_id)
    served = await world.end_of(world.begin())
    assert served.finished.usage.billed_token_count == 40
    assert (await world.ask("/chat/completions", model="demo", **CHAT))[0] == 200
    await until(lambda: not world.small.left_over(), "everything to be released")
    check_invariants(world.database.url, all_ended=True)


async def test_earlier_output_stays_billed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the received tokens; the output that could not be journalled is never sent."""
    call = world.begin()

    def received() -> int:
        return sum(len(f.delta.token_ids) for f in call.frames)

    world.small.engine.pause_after(10)
    await until(lambda: received() == 10, "ten tokens")

    with monkeypatch.context() as broken:
        DISKS["full"].breaks(broken)
        world.small.engine.gate.set()
        end = await world.end_of(call)

    assert end.failed.status.code == grpc.StatusCode.ABORTED.value[0]
    assert end.failed.usage.billed_token_count == received() == 10
    assert world.database.events() == [(0, len(PROMPT), 10, "failed")]
    check_invariants(world.database.url, all_ended=True)


async def test_a_fault_of_the_writer_is_not_the_clients_and_is_free(world: World) -> None:
    """Any exception while a stream is written, except that the client has gone."""

    class BrokenCall(Call):
        async def write(self, data: bytes) -> None:
            if any(f.HasField("delta") for f in pb.GenerateResponse.FromString(data).frames):
                raise RuntimeError("a bug")
            await super().write(data)

    call = BrokenCall()
    frame = pb.StartFrame(model="demo", token_ids=pb.TokenIds(ids=PROMPT), max_output_tokens=5)
    call.send(pb.ClientFrame(request_id=str(uuid.uuid4()), start=frame))
    stream = world.small.stream(world.principal, world.secret)
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await stream.serve(call.requests(), cast(Any, call))
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: world.database.hold_count("voided") == 1, "the hold to be voided")

    assert world.database.rows("SELECT count(*) FROM usage_events") == [(0,)]
    assert world.used() == {}
