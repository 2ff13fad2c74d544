"""Pace of calls that answer once: a key that floods with them waits, is refused with a time, and slows nobody else."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import Authenticator
from api.errors import MessageTooLarge, PromptTooLong, TooManyCalls
from api.interceptor import LARGE_MESSAGES, MESSAGE_BYTES_MAX, READ_S, readable, tolerant
from api.server import SERVICES
from api.streams import pace
from api.streams.pace import FramePace
from api.wire import parse_start
from metering.operations import Payer
from metering.store.db import create_engine, create_sessions
from metering.tenants.tenants import Principal


def key() -> Payer:
    """Of an organization of its own."""
    return Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")


async def test_calls_of_a_key_beyond_its_share_are_refused_with_a_time_and_others_have_their_turn() -> None:
    """A quarter of a second of work at any speed, then up to two seconds of waiting."""
    one, other = key(), key()
    paced = FramePace(0.25, clock=lambda: 1000.0)
    for _ in range(int(pace.BURST_S / pace.CALL_COST_S)):
        await paced.turn_to_call(one)
    paced.spent(one, 0.25 * pace.CALL_WAIT_S_MAX + 0.01)

    with pytest.raises(TooManyCalls) as refused:
        await paced.turn_to_call(one)
    await paced.turn_to_call(other)

    assert refused.value.retry_after_s == pytest.approx(pace.CALL_WAIT_S_MAX, abs=0.1)
    assert paced.wait_s(other) == 0


def test_a_message_is_refused_by_its_size_before_it_is_parsed() -> None:
    parsed: list[bytes] = []
    read = tolerant(parsed.append, MESSAGE_BYTES_MAX)
    assert read is not None

    read(bytes(MESSAGE_BYTES_MAX))
    refusal = read(bytes(MESSAGE_BYTES_MAX + 1))

    assert [len(each) for each in parsed] == [MESSAGE_BYTES_MAX]
    with pytest.raises(MessageTooLarge, match="65,537 bytes"):
        readable(refusal)


def test_every_call_that_takes_large_messages_exists() -> None:
    assert {path.split("/")[1] for path in LARGE_MESSAGES} <= set(SERVICES)


async def test_calls_of_tenants_have_turns_and_those_of_administrators_have_none() -> None:
    paced = FramePace(0.25, clock=lambda: 1000.0)
    authenticator = Authenticator(create_sessions(create_engine("postgresql://nobody@localhost/nothing")), pace=paced)
    ids = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    tenant = Principal(ids[0], "wk", ids[1], ids[2], "USD", frozenset({"inference", "billing"}))
    paced.spent(tenant, pace.BURST_S + pace.CALL_WAIT_S_MAX)

    await authenticator.turn(replace(tenant, scopes=frozenset({"admin"})))
    with pytest.raises(TooManyCalls):
        await authenticator.turn(tenant)


def test_what_holds_the_event_loop_in_one_piece_costs_more_than_the_same_in_small_pieces() -> None:
    paced = FramePace(1.0, clock=lambda: 1000.0)
    small, large, huge = key(), key(), key()
    for each in (small, large, huge):
        paced.spent(each, pace.BURST_S)

    for _ in range(10):
        paced.held(small, pace.STALL_S)
    paced.held(large, 2 * pace.STALL_S)
    paced.held(huge, 100 * pace.STALL_S)

    waits = [paced.wait_s(each) / pace.STALL_S for each in (small, large, huge)]
    assert waits == pytest.approx([10, 4, 3200])


async def test_the_time_that_a_message_takes_to_be_parsed_is_known_to_the_task_that_reads_it() -> None:
    def parse(data: bytes) -> bytes:
        end_s = time.thread_time() + 0.002
        while time.thread_time() < end_s:
            pass
        return data

    async def messages() -> AsyncIterator[bytes]:
        read = tolerant(parse)
        assert read is not None
        yield read(b"x")

    async for _ in messages():
        assert READ_S.get() >= 0.002


def test_more_token_ids_than_any_window_holds_are_refused_before_they_are_copied() -> None:
    start = pb.StartFrame(model="tiny")
    start.token_ids.ids.extend(range(101))

    with pytest.raises(PromptTooLong, match="has 101 tokens"):
        parse_start(str(uuid.uuid4()), start, 100)
    start.token_ids.ids.pop()
    assert len(parse_start(str(uuid.uuid4()), start, 100).prompt) == 100
