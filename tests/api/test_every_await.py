"""Interruption of a request at every `await`: delivered tokens are billed once, and nothing leaks.

Each sweep runs one request repeatedly and interrupts it at its first suspension, then at its
second, until a run ends before that suspension. Nothing is random.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import grpc
import pytest
from weir.v1 import inference_service_pb2 as pb

from api.access.servicer import Reports
from api.core.errors import Draining
from api.core.settings import Settings
from api.generation.delivery.delta import Delta
from api.generation.delivery.stream_writer import StreamWriter
from api.generation.parsing.embed_request import ValidEmbed, parse_embed
from api.generation.request.caller import Caller
from api.generation.request.live_embedding import LiveEmbedding
from api.generation.request.live_request import LiveRequest
from api.generation.request.peers import PeerCertificates, make_identity
from api.openai.exchange import AnswerSubscription, Exchange
from api.openai.gateway import Gateway
from api.openai.listener import Listener
from api.rpc.inference_service import InferenceServicer
from api.server import build_peer_server
from inference.engine import Scheduled
from inference.errors import RequestImpossible
from metering.core.models import Outcome, QuotaDimension
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.authentication import Principal, authenticate
from tests.api.small_process import ENCODER, Call, SmallProcess
from tests.api.suspensions import Moment, Suspensions
from tests.inference.checkpoints import TinyCheckpoint, make_checkpoint
from tests.metering.hold_world import HoldWorld
from tests.service import PATIENCE_S

# Of each answer, under leases of two tokens, so that a request waits for the database in its middle
# too.
TOKENS = 5
PROMPT = range(7, 17)
LONG_TEXT = "the hotel near the old harbour " * 70  # more than is tokenized at once
OTHER = "elsewhere"
# State machine of a request, which has no task of its own.
EVENTS = ("begin", "_answered", "_proceed", "take", "_settle", "_end")
GOING_S = 20.0  # for pending work to end; it takes some milliseconds
WATCHED = frozenset(
    {
        "ClientStream.serve",
        "ClientStream._read_all",
        "ClientStream._write",
        "LiveRequest._contained",
        "LiveEmbedding.run",
        "embed",
        "HoldHandle._extend_quietly",
        "Relay._run",
        "Relay._write",
        "RequestHandler.start",
        "RequestHandler._handle_request",
        "Gateway.handle",
    }
)

EARLY = ("the client goes away", "its deadline passes")
ONLY_OF_STREAMS = ("it does not begin in time", "the client cancels")
LEAST_SUSPENSIONS = 5  # minimum of any run; fewer mean that tasks were not watched


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=3)


class World:
    """Two processes of one deployment with watched tasks, and their database."""

    def __init__(
        self, database: HoldWorld, sessions: Sessions, payer: Payer, settings: Settings
    ) -> None:
        self.database = database
        self.sessions = sessions
        self.payer = payer
        self.settings = settings
        self.suspensions = Suspensions(WATCHED)
        self.secret = ""
        self.principal: Principal
        self.here: SmallProcess
        self.elsewhere: SmallProcess
        self.listener: Listener
        self.port = 0
        self.peer_server: grpc.aio.Server
        self.begun_tasks: set[asyncio.Task[Any]] = set()
        self.is_broken = False

    async def quiet(self) -> None:
        """Wait until all interrupted work has ended; fail with a list of leftovers."""
        async with asyncio.timeout(PATIENCE_S):
            while running := [task for task in self.suspensions.tasks if not task.done()]:
                await asyncio.wait(running)
        left: dict[str, Any] = {}

        def nothing_left() -> bool:
            left.clear()
            left.update(
                self.here.left_over()
                | {f"{name} {OTHER}": n for name, n in self.elsewhere.left_over().items()}
            )
            if self.is_broken:
                left.pop("journalled holds", None)
            tasks = asyncio.all_tasks() - self.begun_tasks
            left["tasks"] = [
                each for each in tasks if not qualified_name(each).startswith("AioServer")
            ]
            left["timers"] = [
                timer for timer in timers_of("api.") if "PeerChannels" not in timer
            ]  # of connections, not of requests
            left["held"] = self.database.one("SELECT count(*) FROM holds WHERE state = 'held'")
            left["held of quotas"] = self.database.one(
                "SELECT coalesce(sum(held), 0)::int FROM quota_counters"
            )
            return not any(left.values())

        try:
            async with asyncio.timeout(GOING_S):
                while not nothing_left():  # noqa: ASYNC110  # depends on the database
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError({name: value for name, value in left.items() if value}) from None

    def mend(self) -> None:
        """Discard the journal: its entries are left to recovery, not to the next run."""
        self.is_broken = False
        for process in (self.here, self.elsewhere):
            process.journal._live.clear()

    def bill(self, request_id: str) -> tuple[int, int] | None:
        """Return input and delivered tokens of the only usage event; None if there is none."""
        rows = self.database.rows(
            "SELECT h.state, e.input_token_count + e.embedding_token_count, e.delivered_token_count"
            " FROM holds h LEFT JOIN usage_events e ON e.hold_id = h.id WHERE h.request_id = %s",
            uuid.UUID(request_id),
        )
        billed = [row[1:] for row in rows if row[0] == "settled"]
        assert len(billed) <= 1, "settled more than once"
        assert all(row[1] is None for row in rows if row[0] != "settled")
        return billed[0] if billed else None


def qualified_name(task: asyncio.Task[Any]) -> str:
    """Return the qualified name of a task's coroutine."""
    return str(getattr(task.get_coro(), "__qualname__", ""))


def timers_of(package: str) -> list[str]:
    """Return the pending timers of the loop that call functions of a package."""
    handles = [
        handle
        for handle in cast(Any, asyncio.get_running_loop())._scheduled
        if not handle.cancelled()
    ]
    return [
        str(handle)
        for handle in handles
        if getattr(handle._callback, "__module__", "").startswith(package)
    ]


@pytest.fixture
async def world(
    tmp_path: Path,
    database_url: str,
    sessions: Sessions,
    checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[World]:
    settings = Settings.of(
        database_url=database_url,
        home=tmp_path,
        lease_slice_tokens=2,
        lease_min_tokens=1,
        lease_margin_tokens=1,
        openai_listen="127.0.0.1:0",
        listen="127.0.0.1:0",
    )
    with HoldWorld(database_url, now=None) as database:
        database.execute(PRICE_OF_ENCODER, ENCODER)
        payer = database.tenant()
        database.quota(payer, QuotaDimension.CONCURRENT_REQUESTS, 100)
        database.quota(payer, QuotaDimension.TOKENS_PER_MONTH, 10**9)
        world = World(database, sessions, payer, settings)
        async with asyncio.TaskGroup() as tasks:
            await open_processes(world, checkpoint, tasks)
            asyncio.get_running_loop().set_task_factory(world.suspensions)
            world.suspensions.watch_events(monkeypatch, LiveRequest, *EVENTS)
            world.suspensions.watch_events(monkeypatch, StreamWriter, "_flush")
            yield world
            asyncio.get_running_loop().set_task_factory(None)
            await close_processes(world)


WAY_TO_PROCESS = """
INSERT INTO live_reports (process_id, process_name, peer_address, peer_certificate, reported_at,
    requests)
VALUES (%s, %s, %s, %s, now(), '[]')
"""
PRICE_OF_ENCODER = """
INSERT INTO price_versions (model, currency_code, input_picos_per_token,
                            cached_input_picos_per_token, output_picos_per_token,
                            embedding_picos_per_token, effective_at)
VALUES (%s, 'USD', 3, 1, 7, 2, now() - interval '1 day')
"""


async def open_processes(
    world: World, checkpoint: TinyCheckpoint, tasks: asyncio.TaskGroup
) -> None:
    """Start both processes, each with the connections that it needs to the other."""
    async with world.sessions.begin() as session:
        _, world.secret = await create_api_key(
            session, organization="acme", project="search", name="key", actor="test"
        )
    async with world.sessions() as session:
        world.principal = await authenticate(session, world.secret)
    world.here = SmallProcess(world.settings, checkpoint, world.sessions, tasks)
    world.elsewhere = SmallProcess(world.settings, checkpoint, world.sessions, tasks)
    for process in (world.here, world.elsewhere):
        await process.engine.start()
    servicer = InferenceServicer(
        world.elsewhere.process,
        world.elsewhere.authenticator,
        world.sessions,
        Reports(world.sessions, 1),
        for_peers=True,
    )
    identity = make_identity(world.elsewhere.process_id)
    accepted = PeerCertificates(identity)
    accepted.replace([world.here.identity.certificate.decode()])
    world.peer_server, peer = build_peer_server(world.settings, servicer, identity, accepted)
    await world.peer_server.start()
    world.database.execute(
        WAY_TO_PROCESS, world.elsewhere.process_id, OTHER, peer.address, peer.certificate
    )
    gateway = Gateway(world.here.process, world.here.authenticator, world.sessions)
    world.listener = Listener(gateway.handle, world.settings, None)
    world.port = world.listener.bind(("127.0.0.1", 0))
    await world.listener.start()


async def close_processes(world: World) -> None:
    """Stop both processes."""
    await world.listener.stop()
    await world.here.close()
    await world.peer_server.stop(grace=None)
    await world.elsewhere.close()


def start_frame(**fields: Any) -> pb.ClientFrame:
    """Return a request that runs to its limit."""
    prompt = pb.TokenIds(ids=PROMPT)
    start = pb.StartFrame(
        model="demo", token_ids=prompt, max_output_tokens=TOKENS, ignore_eos=True, **fields
    )
    return pb.ClientFrame(request_id=str(uuid.uuid4()), start=start)


@dataclass(slots=True)
class StreamRun:
    """Request on a stream of this process.

    not_apart: interruptions that do nothing here, or the same as another one.
    """

    not_apart: ClassVar[tuple[str, ...]] = ()
    world: World
    frames: tuple[pb.ClientFrame, ...]
    kept: bool = False
    call: Call = field(default_factory=Call)
    process: SmallProcess | None = None
    serving: asyncio.Task[None] | None = None

    @property
    def request_id(self) -> str:
        """Id of its only request."""
        return self.frames[0].request_id

    async def run(self) -> None:
        """Run until the stream and its tasks have ended."""
        process = self.process or self.world.here
        self.call.send(*self.frames)
        self.call.half_close()
        stream = process.stream(self.world.principal, self.world.secret)
        self.serving = asyncio.create_task(stream.serve(self.call.requests(), cast(Any, self.call)))
        with contextlib.suppress(asyncio.CancelledError):
            await self.serving

    def hang_up(self) -> None:
        """Disconnect the client."""
        assert self.serving is not None
        self.serving.cancel()

    def run_out_of_time(self) -> None:
        """Let the call's deadline expire: gRPC cancels its handler."""
        self.call.left_s = 0.0
        self.hang_up()

    def check(self) -> None:
        """Check that delivered tokens are billed, and that the client received at most one end."""
        bill = self.world.bill(self.request_id)
        delivered_count = bill[1] if bill else 0
        deltas = [frame.delta for frame in self.call.frames if frame.HasField("delta")]
        received_count = sum(len(delta.token_ids) for delta in deltas)
        assert received_count <= delivered_count if self.kept else received_count == delivered_count
        assert [delta.seq for delta in deltas] == list(range(1, len(deltas) + 1))
        ends = [
            frame
            for frame in self.call.frames
            if frame.WhichOneof("kind") in ("finished", "failed")
        ]
        assert len(ends) <= 1
        for end in ends:
            assert end == self.call.frames[-1]
            reported = end.finished if end.HasField("finished") else end.failed
            assert (
                not reported.HasField("usage")
                or reported.usage.delivered_token_count == delivered_count
            )


class ResumedRun(StreamRun):
    """Kept request whose first stream disconnects after two tokens; the second is watched."""

    async def prepare(self) -> None:
        """Run the first stream."""
        world, owner = self.world, self.process or self.world.here
        start = start_frame()
        start.start.keep_on_disconnect.FromSeconds(60)
        first = StreamRun(world, (start,), process=owner)
        owner.engine.pause_after(2)
        running = asyncio.create_task(first.run())
        await owner.engine.paused.wait()
        first.hang_up()
        await running
        self.frames = (self.coming_back(start),)
        self.kept = True
        self.process = world.here
        self.call.on_frame = lambda frame: (
            owner.engine.gate.set() if frame.HasField("attached") else None
        )

    def coming_back(self, start: pb.ClientFrame) -> pb.ClientFrame:
        """Return the frame that attaches to the request."""
        return pb.ClientFrame(request_id=start.request_id, attach=pb.AttachFrame(after_seq=0))

    async def run(self) -> None:
        """Implement `StreamRun.run`; the engine continues in any case."""
        await StreamRun.run(self)
        for process in (self.world.here, self.world.elsewhere):
            process.engine.gate.set()


class RestartedRun(ResumedRun):
    """Kept request that is attached to by a repeated start frame."""

    def coming_back(self, start: pb.ClientFrame) -> pb.ClientFrame:
        """Implement `ResumedRun.coming_back`."""
        return start


async def embed(world: World, start: ValidEmbed) -> pb.EmbedResponse:
    """Call the service as the handler of the call does."""
    return await LiveEmbedding(Caller(world.payer, 0.0, 0.0), start, world.here.process).answer()


@dataclass(slots=True)
class EmbedRun:
    """One `Embed` call. No frame cancels it, and its start has no time limit."""

    not_apart: ClassVar[tuple[str, ...]] = (*EARLY[1:], *ONLY_OF_STREAMS)
    world: World
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    answering: asyncio.Task[pb.EmbedResponse] | None = None

    def inputs(self) -> list[pb.EmbedInput]:
        """Inputs of the call."""
        return [pb.EmbedInput(token_ids=pb.TokenIds(ids=PROMPT)) for _ in range(2)]

    @property
    def token_count(self) -> int:
        """Tokens of all inputs."""
        return 2 * len(PROMPT)

    async def run(self) -> None:
        """Run until the call has ended."""
        start = parse_embed(
            pb.EmbedRequest(request_id=self.request_id, model=ENCODER, inputs=self.inputs())
        )
        self.answering = asyncio.create_task(embed(self.world, start))
        await asyncio.wait([self.answering])

    def hang_up(self) -> None:
        """Disconnect the client."""
        assert self.answering is not None
        self.answering.cancel()

    run_out_of_time = hang_up  # gRPC cancels the handler

    def check(self) -> None:
        """Check that delivered vectors are billed, and lost ones if the encoder had begun."""
        assert self.answering is not None
        bill = self.world.bill(self.request_id)
        assert bill in (None, (0, 0), (self.token_count, 0))
        if not self.answering.cancelled() and self.answering.exception() is None:
            assert bill == (self.token_count, 0)
            assert self.answering.result().usage.embedding_token_count == self.token_count


class LongEmbedRun(EmbedRun):
    """`Embed` call with texts that a thread tokenizes, after a check in the database."""

    def inputs(self) -> list[pb.EmbedInput]:
        """Implement `EmbedRun.inputs`."""
        ask_always(self.world)
        return [pb.EmbedInput(text=LONG_TEXT)] * 2

    @property
    def token_count(self) -> int:
        """Implement `EmbedRun.token_count`."""
        return 2 * len(self.world.here.process.tokenizers[ENCODER].encode(LONG_TEXT))


@dataclass(slots=True)
class HttpRun:
    """One chat over HTTP."""

    not_apart: ClassVar[tuple[str, ...]] = EARLY[1:]
    world: World
    streams: bool
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    data: bytes = b""

    async def run(self) -> None:
        """Run until the connection is closed."""
        forwarded_count.clear()
        chat = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": TOKENS,
            "stream": self.streams,
        }
        body = json.dumps(chat | {"ignore_eos": True}).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "host: weir",
            "connection: close",
            f"idempotency-key: {self.request_id}",
            f"authorization: Bearer {self.world.secret}",
            f"content-length: {len(body)}",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.world.port)
        with contextlib.suppress(ConnectionError):
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            self.data = await reader.read()
        writer.close()

    def hang_up(self) -> None:
        """Break the connection."""
        for transport in list(self.world.listener._http._connections.values()):
            transport.abort()

    run_out_of_time = hang_up  # such a client disconnects after its own timeout

    def check(self) -> None:
        """Check that the tokens of the messages that the connection has taken are billed."""
        bill = self.world.bill(self.request_id)
        assert sum(forwarded_count) == (bill[1] if bill else 0)


# Tokens of each message of the only HTTP request whose write has completed.
forwarded_count: list[int] = []


@pytest.fixture(autouse=True)
def _watch_handing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    token, delta = Exchange.note_token, AnswerSubscription.delta
    collected: list[int] = []

    def count_one(self: Exchange, index: int, seq: int, text: str, token_id: int) -> bytes:
        collected.append(1)
        return token(self, index, seq, text, token_id)

    def count(self: AnswerSubscription, seq: int, choice_index: int, new: Delta) -> bytes:
        collected.append(len(new.token_ids))
        return delta(self, seq, choice_index, new)

    def noting(
        take: Callable[[Exchange, bytes], Awaitable[None]],
    ) -> Callable[[Exchange, bytes], Awaitable[None]]:
        async def take_and_note(self: Exchange, data: bytes) -> None:
            token_count = sum(collected)
            collected.clear()
            await take(self, data)
            forwarded_count.append(token_count)

        return take_and_note

    send_now = Exchange._send_now

    def send_now_and_note(self: Exchange, data: bytes) -> bool:
        token_count = sum(collected)
        collected.clear()
        is_taken = send_now(self, data)
        # Otherwise `_send` waits for it.
        (forwarded_count if is_taken else collected).append(token_count)
        return is_taken

    monkeypatch.setattr(Exchange, "note_token", count_one)
    monkeypatch.setattr(AnswerSubscription, "delta", count)
    monkeypatch.setattr(Exchange, "_send_now", send_now_and_note)
    for name in ("_write", "_send"):  # of a whole answer, and of a stream
        monkeypatch.setattr(Exchange, name, noting(getattr(Exchange, name)))


Run = StreamRun | EmbedRun | HttpRun
RUNS: dict[str, Callable[[World], Run]] = {
    "a request": lambda world: StreamRun(world, (start_frame(),)),
    "a request with credit": lambda world: with_credit(world),
    "an attached request": lambda world: ResumedRun(world, ()),
    "a relayed request": lambda world: ResumedRun(world, (), process=world.elsewhere),
    "a request that runs elsewhere": lambda world: RestartedRun(world, (), process=world.elsewhere),
    "a request with a long prompt": lambda world: with_long_prompt(world),
    "an embedding": EmbedRun,
    "an embedding of long texts": lambda world: LongEmbedRun(world),
    "a streamed chat": lambda world: HttpRun(world, True),
    "a whole chat": lambda world: HttpRun(world, False),
}


def with_long_prompt(world: World) -> StreamRun:
    """Return a start whose prompt is tokenized in a thread, after a check in the database."""
    ask_always(world)
    return StreamRun(world, (start_frame(text=LONG_TEXT),))


def ask_always(world: World) -> None:
    """Make every request check the quota in the database, whatever is cached for its key."""
    cast(Any, world.here.holds._admission_connection).seems_to_fit = lambda op: False


def with_credit(world: World) -> StreamRun:
    """Return a start with credit for two tokens; the client grants the rest later."""
    start = start_frame(initial_credit_tokens=2)
    credit = pb.ClientFrame(request_id=start.request_id, credit=pb.CreditFrame(token_count=TOKENS))
    return StreamRun(world, (start, credit))


def end_tasks(world: World, run: Run) -> None:
    """Cancel the request's task, as when a process fails. A task that has not begun would not run
    at all.

    The end of the hold is then not reported: its journal stays for the recovery, which finds the
    hold settled.
    """
    world.is_broken = True
    for name in ("LiveRequest._contained", "LiveEmbedding.run"):
        for task in world.suspensions.of(name):
            task.cancel()


def closed_down(world: World, run: Run) -> None:
    """Let the drain time expire."""
    for process in (world.here, world.elsewhere):
        process.process.fail_all(Draining("shut down"))


def miss_start(world: World, run: Run) -> None:
    """Let the time limit for the start expire."""
    for process in (world.here, world.elsewhere):
        for request in process.process.running():
            if hasattr(request, "_stop_unless_begun"):
                request._stop_unless_begun()


def cancel_by_frame(world: World, run: Run) -> None:
    """Cancel the request by a frame and read on."""
    for process in (world.here, world.elsewhere):
        for request in process.process.running():
            if (
                subscription := request.output.subscription if hasattr(request, "output") else None
            ) is not None:
                subscription.source.stop(Outcome.CANCELLED)


Interrupt = Callable[[World, Run], None]
INTERRUPTIONS: dict[str, Interrupt] = {
    "the client goes away": lambda world, run: run.hang_up(),
    "its deadline passes": lambda world, run: run.run_out_of_time(),
    "it does not begin in time": miss_start,
    "the client cancels": cancel_by_frame,
    "its task is cancelled": end_tasks,
    "the process shuts down": closed_down,
}


@pytest.mark.parametrize("name", RUNS)
async def test_an_interruption_anywhere_is_billed_once(world: World, name: str) -> None:
    for kind, interrupt in INTERRUPTIONS.items():
        if kind in RUNS[name](world).not_apart:
            continue
        for moment in Moment:
            at = 1
            while await is_met(world, RUNS[name](world), interrupt, at, moment, kind):
                at += 1
            assert at > LEAST_SUSPENSIONS


async def is_met(
    world: World, run: Run, interrupt: Interrupt, at: int, moment: Moment, kind: str
) -> bool:
    """Interrupt a run at this suspension and check the rest; return whether it was reached."""
    if isinstance(run, ResumedRun):
        await run.prepare()
    world.begun_tasks = asyncio.all_tasks()
    world.suspensions.arm(at, moment, lambda: interrupt(world, run))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await run.run()
        met = world.suspensions.disarm()
        await world.quiet()
        run.check()
        if (at, moment) == (1, Moment.ASLEEP) and kind in EARLY and not isinstance(run, ResumedRun):
            assert world.bill(run.request_id) is None, "nobody was there any more when it began"
    except BaseException as error:
        error.add_note(f"{kind} at suspension {at}, {moment}")
        raise
    world.mend()
    return met


@pytest.mark.parametrize(("is_unstarted", "bill"), [(True, (0, 0)), (False, (len(PROMPT), 0))])
async def test_the_input_of_a_scheduled_request_is_free_if_the_server_refuses_it_unstarted(
    world: World, is_unstarted: bool, bill: tuple[int, int]
) -> None:
    """A whole answer counts as scheduled when it is sent, so its refusal comes after that."""
    engine, run = world.here.engine, StreamRun(world, (start_frame(),))
    engine.gate.clear()
    running = asyncio.create_task(run.run())
    async with asyncio.timeout(PATIENCE_S):
        while not engine._sequences:  # noqa: ASYNC110  # depends on the database
            await asyncio.sleep(0.001)
    [sequence] = engine._sequences.values()

    engine._emit(sequence, Scheduled(0, is_final=False))
    engine._emit(sequence, RequestImpossible("refused", is_unstarted=is_unstarted))
    await running

    assert world.bill(run.request_id) == bill
    [failed] = [frame.failed for frame in run.call.frames if frame.HasField("failed")]
    assert failed.usage.input_token_count == bill[0]
    engine.core = engine.make()
    engine.gate.set()


async def test_one_id_that_is_started_in_two_processes_at_once_runs_in_one_and_is_billed_once(
    world: World,
) -> None:
    """The second stream gets the first one's output, if there is a route; `here` refuses peers."""
    received: set[int] = set()
    for _ in range(20):
        start = start_frame()
        start.start.keep_on_disconnect.FromSeconds(60)
        runs = [
            StreamRun(world, (start,), kept=True, process=process)
            for process in (world.here, world.elsewhere)
        ]
        world.suspensions.arm(0, Moment.ASLEEP, lambda: None)
        world.begun_tasks = asyncio.all_tasks()

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(run.run() for run in runs))
        await world.quiet()

        assert world.bill(start.request_id) == (len(PROMPT), TOKENS)
        for run in runs:
            run.check()
            received.add(sum(len(frame.delta.token_ids) for frame in run.call.frames))
            assert run.call.frames[-1].WhichOneof("kind") in ("finished", "failed")
    assert TOKENS in received
