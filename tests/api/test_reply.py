"""Output of many tokens at once: an unread stream is aborted, the end of a beam search waits."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import regex
from weir.v1 import inference_service_pb2 as pb

from api.core.settings import Settings
from api.generation.delivery.output_buffer import FlowControl, SendBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.parsing.start_frame import ValidStart, parse_start
from api.generation.parsing.tools import CallReading
from api.generation.request.admission import Lease
from api.generation.request.limits import OutputLimits
from api.generation.request.output_processor import Reply
from api.generation.state import Life
from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineTimings,
    SequenceFinished,
    TokensGenerated,
)
from inference.safety.safety import SafetyChecker
from inference.safety.safety_file import Rule, RuleChecker
from inference.text.tools import CallFormat
from metering.core.models import Outcome
from metering.holds.journal import UsageJournal
from metering.pricing.prices import TokenPrices
from tests.service import conversation

OUTBOX_TOKENS = 50
HIDING = r'{"name": "book", "arguments": {"about": "a forbidden\u0020\u0074opic"}}'
PRICES = TokenPrices(1, "USD", 150_000, 15_000, 600_000)


class Covered:
    """Lease that never waits, so that nothing else lets the writer run."""

    leased_token_count = free_token_count = 10**9

    def __init__(self) -> None:
        self.admitted = SimpleNamespace(hold_id=uuid.uuid4(), prices=None)

    async def cover(self, token_count: int) -> None:
        return None


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[UsageJournal]:
    journal = UsageJournal(tmp_path, uuid.uuid4())
    yield journal
    journal.close()


def reply_of(
    writer: StreamWriter, start: ValidStart, stopped: list[Outcome], settings: Settings
) -> Reply:
    """Return the reply to a request of this writer's stream. stopped: collects reasons of stops."""
    subscription, life = (
        FrameSubscription(writer, start.given_id, lambda _: None),
        Life(lambda end: stopped.append(end.outcome)),
    )
    return Reply(
        SendBuffer(
            subscription, start.model, FlowControl(None, 60.0, lambda: None), life, lambda _: None
        ),
        start,
        life,
        settings,
    )


class Handing:
    """Driver that passes engine events to a reply and waits for their effects."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.has_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, safety: SafetyChecker | None = None) -> None:
        """Begin the output, under a lease that covers everything."""
        limits = OutputLimits(PRICES, 1000, None)
        self.reply.open(
            cast(Lease, Covered()),
            limits,
            safety,
            self._run,
            lambda: setattr(self, "has_ended", True),
        )

    def _run(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def take(self, event: TokensGenerated | ChoiceFinished | SequenceFinished) -> None:
        """Pass on one event; raise its error."""
        self.reply.take(event)
        while self._tasks:
            await self._tasks.pop()

    async def flush(self) -> None:
        """Wait until the client has taken everything."""
        taken = asyncio.Event()
        self.reply.flush(taken.set)
        await taken.wait()


async def say_at_once(journal: UsageJournal, **fields: Any) -> tuple[list[Outcome], int]:
    """Output 500 tokens at once to a client that takes each message.

    Return the reasons of stops, and the number of sent tokens.
    """
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", text="Hi", **fields))
    stopped: list[Outcome] = []
    sent = 0

    async def write(data: bytes) -> None:
        nonlocal sent
        await asyncio.sleep(0)
        sent += sum(
            len(frame.delta.token_ids) for frame in pb.GenerateResponse.FromString(data).frames
        )

    writer = StreamWriter(journal)
    settings = cast(
        Settings,
        SimpleNamespace(
            outbox_tokens_per_request_max=OUTBOX_TOKENS,
            client_stall_max_s=60.0,
        ),
    )
    reply = reply_of(writer, start, stopped, settings)
    handing = Handing(reply)
    handing.open()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(write))
        for index in range(500):
            reply.output.usage.generated_token_count += 1
            await handing.take(TokensGenerated((index,), "x"))
        writer.close()
    return stopped, sent


async def test_output_of_a_beam_search_waits_for_its_client(journal: UsageJournal) -> None:
    assert await say_at_once(journal, beam_search=pb.BeamSearch(width=2)) == ([], 500)


async def test_a_client_that_reads_slower_than_tokens_arrive_is_stopped(
    journal: UsageJournal,
) -> None:
    stopped, _ = await say_at_once(journal)

    assert set(stopped) == {Outcome.SLOW_CONSUMER}


async def test_a_request_behind_others_is_not_given_up_while_the_client_reads_those(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message takes most of the stall limit, and this request's output is in the last."""
    patience_s = 0.2
    monkeypatch.setattr(StreamWriter, "frame_max", 1)
    stopped: list[Outcome] = []
    writer = StreamWriter(journal)
    settings = cast(
        Settings,
        SimpleNamespace(
            outbox_tokens_per_request_max=OUTBOX_TOKENS,
            client_stall_max_s=patience_s,
        ),
    )
    replies = []
    for _ in range(2):
        start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", text="Hi"))
        replies.append(Handing(reply_of(writer, start, stopped, settings)))
        replies[-1].open()
    first, last = replies

    async def write(data: bytes) -> None:
        await asyncio.sleep(patience_s / 2)

    for index in range(5):
        await first.take(TokensGenerated((index,), "x"))
    await last.take(TokensGenerated((0,), "x"))
    writer.close()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(write))
        await last.flush()

    assert stopped == []
    assert last.reply.output.usage.delivered_token_count == 1


@pytest.mark.parametrize(
    ("fields", "said", "stopped"),
    [
        (
            {"conversation": conversation("Hi"), "tools": [pb.Tool(name="book")]},
            "",
            [Outcome.FILTERED],
        ),
        (
            {"text": "Hi", "response_format": pb.ResponseFormat(json_schema="{}")},
            "",
            [Outcome.FILTERED],
        ),
        ({"text": "Hi"}, HIDING, []),
    ],
)
async def test_rules_read_escapes_in_what_clients_will_parse_and_in_nothing_else(
    journal: UsageJournal, fields: dict[str, Any], said: str, stopped: list[Outcome]
) -> None:
    """Token by token, as a model writes it."""
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", **fields))
    rules = RuleChecker(
        [Rule("topic", regex.compile(r".*forbidden\s+topic"), in_prompt=False, in_output=True)]
    )
    settings = cast(
        Settings,
        SimpleNamespace(
            outbox_tokens_per_request_max=1000, client_stall_max_s=60.0, lease_margin_tokens=0
        ),
    )
    ends: list[Outcome] = []
    writer = StreamWriter(journal)
    reply = reply_of(writer, start, ends, settings)
    if start.tool_use.tools:
        reply.call_reading = CallReading(CallFormat.HERMES, ("book",), ends_with_call=False)
    handing = Handing(reply)
    handing.open(rules)
    taken: list[pb.DeltaFrame] = []

    async def write(data: bytes) -> None:
        taken.extend(frame.delta for frame in pb.GenerateResponse.FromString(data).frames)

    for index, character in enumerate(HIDING):
        await handing.take(TokensGenerated((index,), character))
        if ends:
            break
    else:
        await handing.take(
            SequenceFinished(
                EngineFinishReason.STOP, "", 1, 0, len(HIDING), EngineTimings(0.0, 0.0, 0.0)
            )
        )
        assert handing.has_ended
    writer.close()
    await writer.write_all(write)

    assert ends == stopped
    assert "".join(delta.text for delta in taken) == said
    assert not any(delta.tool_calls for delta in taken)
