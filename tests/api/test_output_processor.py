"""Output of many tokens at once: an unread stream is aborted, the end of a beam search waits."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
import regex
from weir.v1 import inference_service_pb2 as pb

from api.core.settings import DeliverySettings
from api.generation.delivery.output_buffer import FlowControl, OutputBuffer, SendBuffer
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.parsing.start_frame import ValidStart, parse_start
from api.generation.parsing.tools import CallReading
from api.generation.request.admission import HoldHandle
from api.generation.request.limits import OutputLimits
from api.generation.request.output_processor import OutputProcessor
from api.generation.state import EndDecision
from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineTimings,
    SequenceFinished,
    TokensGenerated,
)
from inference.safety.rules import Rule, RuleChecker
from inference.safety.safety import SafetyChecker
from inference.text.tools import CallFormat
from metering.core.models import Outcome
from metering.holds.journal import UsageJournal
from metering.pricing.prices import TokenPrices
from tests.service import conversation

QUEUED_TOKENS = 50
HIDING = r'{"name": "book", "arguments": {"about": "a forbidden\u0020\u0074opic"}}'
PRICES = TokenPrices(1, "USD", 150_000, 15_000, 600_000)


class Covered:
    """Hold whose lease never waits, so that nothing else lets the writer run."""

    leased_token_count = unchecked_until = 10**9

    def __init__(self) -> None:
        self.admitted = SimpleNamespace(hold_id=uuid.uuid4(), prices=None)

    async def cover(self, token_count: int) -> None:
        return None


class Handing:
    """Request that passes engine events to its processor and waits for their effects."""

    def __init__(
        self,
        writer: StreamWriter,
        start: ValidStart,
        stopped: list[Outcome],
        settings: DeliverySettings,
        *,
        call_reading: CallReading | None = None,
        safety: SafetyChecker | None = None,
    ) -> None:
        """Begin the output of a request of this writer's stream, under a lease that covers it.

        stopped: collects reasons of stops.
        """
        subscription = FrameSubscription(writer, start.given_id, lambda _: None)
        flow = FlowControl(None, 60.0, lambda: None)
        self.start = start
        self.decision = EndDecision(lambda end: stopped.append(end.outcome))
        self.output: OutputBuffer = SendBuffer(
            subscription, start.model, flow, self.decision, lambda _: None
        )
        limits, hold = OutputLimits(PRICES, 1000, None), cast(HoldHandle, Covered())
        self.processor = OutputProcessor(self, hold, limits, call_reading, settings)
        self.processor.open(safety)
        self.has_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    def output_ended(self, outcome: Outcome) -> None:
        self.has_ended = True

    async def take(self, event: TokensGenerated | ChoiceFinished | SequenceFinished) -> None:
        """Pass on one event; raise its error."""
        self.processor.take(event)
        while self._tasks:
            await self._tasks.pop()

    async def flush(self) -> None:
        """Wait until the client has taken everything."""
        taken = asyncio.Event()
        self.processor.flush(taken.set)
        await taken.wait()


async def append_at_once(journal: UsageJournal, **fields: Any) -> tuple[list[Outcome], int]:
    """OutputBuffer 500 tokens at once to a client that takes each message.

    Return the reasons of stops, and the number of sent tokens.
    """
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", text="Hi", **fields))
    stopped: list[Outcome] = []
    sent = 0

    async def write(data: bytes) -> None:
        nonlocal sent
        await asyncio.sleep(0)
        frames = pb.GenerateResponse.FromString(data).frames
        sent += sum(len(frame.delta.token_ids) for frame in frames)

    writer = StreamWriter(journal)
    settings = DeliverySettings(unread_tokens_max=QUEUED_TOKENS, stall_max_s=60.0)
    handing = Handing(writer, start, stopped, settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.write_all(write))
        for index in range(500):
            handing.output.usage.generated_token_count += 1
            await handing.take(TokensGenerated((index,), "x"))
        writer.close()
    return stopped, sent


async def test_output_of_a_beam_search_waits_for_its_client(journal: UsageJournal) -> None:
    assert await append_at_once(journal, beam_search=pb.BeamSearch(width=2)) == ([], 500)


async def test_a_client_slower_than_its_tokens_is_stopped(journal: UsageJournal) -> None:
    stopped, _ = await append_at_once(journal)

    assert set(stopped) == {Outcome.SLOW_CONSUMER}


async def test_a_request_behind_others_that_are_read_is_not_ended(
    journal: UsageJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message takes most of the stall limit, and this request's output is in the last."""
    patience_s = 0.2
    monkeypatch.setattr(StreamWriter, "frame_max", 1)
    stopped: list[Outcome] = []
    writer = StreamWriter(journal)
    settings = DeliverySettings(unread_tokens_max=QUEUED_TOKENS, stall_max_s=patience_s)
    replies = []
    for _ in range(2):
        start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", text="Hi"))
        replies.append(Handing(writer, start, stopped, settings))
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
    assert last.output.usage.delivered_token_count == 1


@pytest.mark.parametrize(
    ("fields", "outputs", "stopped"),
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
    journal: UsageJournal, fields: dict[str, Any], outputs: str, stopped: list[Outcome]
) -> None:
    """Token by token, as a model writes it."""
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="tiny", **fields))
    pattern = regex.compile(r".*forbidden\s+topic")
    rules = RuleChecker([Rule("topic", pattern, in_prompt=False, in_output=True)])
    settings = DeliverySettings(unread_tokens_max=1000, stall_max_s=60.0)
    ends: list[Outcome] = []
    writer = StreamWriter(journal)
    reading = None
    if start.tool_use.tools:
        reading = CallReading(CallFormat.HERMES, ("book",), ends_with_call=False)
    handing = Handing(writer, start, ends, settings, call_reading=reading, safety=rules)
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
    assert "".join(delta.text for delta in taken) == outputs
    assert not any(delta.tool_calls for delta in taken)
