"""Pace of calls that answer once: a key that floods with them waits, is refused with a time, and slows nobody else."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from api.access.auth import Authenticator
from api.errors import MessageTooLarge, TooManyCalls
from api.interceptor import LARGE_MESSAGES, MESSAGE_BYTES_MAX, readable, tolerant
from api.server import SERVICES
from api.streams import pace
from api.streams.pace import FramePace
from metering.operations import Payer
from metering.store.db import create_engine, create_sessions
from metering.tenants.tenants import Principal


def key() -> Payer:
    """Of an organization of its own."""
    return Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")


async def test_calls_of_a_key_beyond_its_share_are_refused_with_a_time_and_others_have_their_turn() -> None:
    """Half a second of work at any speed, then up to two seconds of waiting."""
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
