"""Pace of unary calls: a flooding key waits or gets a retry-after, and slows no other."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import Authenticator
from api.core import rate_limiter
from api.core.errors import MessageTooLarge, PromptTooLong, TooManyCalls
from api.core.health import SERVICES
from api.core.interceptor import (
    LARGE_MESSAGES,
    MESSAGE_BYTES_MAX,
    READ_S,
    ReceivedMessages,
    checked,
    tolerant,
)
from api.core.rate_limiter import Call, RateLimiter, measured, start_work, work_s
from api.generation.parsing.start_frame import parse_start
from metering.quotas.quota_rules import Payer
from metering.store.db import create_engine, create_sessions
from metering.tenants.authentication import Principal


def key() -> Payer:
    """Return a payer in a new organization."""
    return Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")


async def test_calls_beyond_a_keys_share_get_a_retry_after_and_others_run() -> None:
    """A quarter of a second of work at any speed, then up to two seconds of waiting."""
    one, other = key(), key()
    paced = RateLimiter(0.25, clock=lambda: 1000.0)
    for _ in range(int(rate_limiter.BURST_S / rate_limiter.CALL_COST_S)):
        await paced.wait_to_call(one)
    paced.charge(one, 0.25 * rate_limiter.CALL_WAIT_S_MAX + 0.01)

    with pytest.raises(TooManyCalls) as refused:
        await paced.wait_to_call(one)
    await paced.wait_to_call(other)

    assert refused.value.retry_after_s == pytest.approx(rate_limiter.CALL_WAIT_S_MAX, abs=0.1)
    assert paced.wait_s(other) == 0


def test_a_message_is_refused_by_its_size_before_it_is_parsed() -> None:
    parsed: list[bytes] = []
    read = tolerant(parsed.append, MESSAGE_BYTES_MAX)
    assert read is not None

    read(bytes(MESSAGE_BYTES_MAX))
    refusal = read(bytes(MESSAGE_BYTES_MAX + 1))

    assert [len(each) for each in parsed] == [MESSAGE_BYTES_MAX]
    with pytest.raises(MessageTooLarge, match="65,537 bytes"):
        checked(refusal)


def test_every_call_that_takes_large_messages_exists() -> None:
    assert {path.split("/")[1] for path in LARGE_MESSAGES} <= set(SERVICES)


async def test_calls_of_tenants_have_shares_and_those_of_administrators_have_none() -> None:
    paced = RateLimiter(0.25, clock=lambda: 1000.0)
    authenticator = Authenticator(
        create_sessions(create_engine("postgresql://nobody@localhost/nothing")), pace=paced
    )
    ids = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    tenant = Principal(ids[0], "wk", ids[1], ids[2], "USD", frozenset({"inference", "billing"}))
    paced.charge(tenant, rate_limiter.BURST_S + rate_limiter.CALL_WAIT_S_MAX)

    await authenticator.wait_for_share(replace(tenant, scopes=frozenset({"admin"})))
    with pytest.raises(TooManyCalls):
        await authenticator.wait_for_share(tenant)


def test_one_long_stall_costs_more_than_the_same_time_in_small_pieces() -> None:
    paced = RateLimiter(1.0, clock=lambda: 1000.0)
    small, large, huge = key(), key(), key()
    for each in (small, large, huge):
        paced.charge(each, rate_limiter.BURST_S)

    for _ in range(10):
        paced.charge(small, 0.0, rate_limiter.STALL_S)
    paced.charge(large, 0.0, 2 * rate_limiter.STALL_S)
    paced.charge(huge, 0.0, 100 * rate_limiter.STALL_S)

    waits = [paced.wait_s(each) / rate_limiter.STALL_S for each in (small, large, huge)]
    assert waits == pytest.approx([10, 4, 100 * rate_limiter.STALL_FACTOR_MAX])


async def test_the_parsing_time_of_a_message_is_known_to_its_reader() -> None:
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


class Hours:
    """Clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_all_shares_shrink_while_the_event_loop_is_late_and_grow_back() -> None:
    hours, late, one = Hours(), 2 * rate_limiter.LATE_S, key()
    paced = RateLimiter(0.5, clock=hours)
    paced.charge(one, rate_limiter.BURST_S + 0.5)
    assert paced.wait_s(one) == pytest.approx(1.0)

    for _ in range(50):
        paced.late(late)
    assert paced.room == rate_limiter.ROOM_MIN
    assert paced.wait_s(one) == pytest.approx(1.0 / rate_limiter.ROOM_MIN)
    hours.now += 0.5 / rate_limiter.ROOM_MIN
    assert paced.wait_s(one) == pytest.approx(0.5 / rate_limiter.ROOM_MIN)
    for _ in range(200):
        paced.late(0.0)
    assert paced.room == 1.0
    assert paced.wait_s(one) == pytest.approx(0.5)


def test_work_in_a_thread_costs_more_the_longer_it_is_in_one_piece() -> None:
    in_one, in_ten, short_s = key(), key(), rate_limiter.THREAD_STALL_S
    paced = RateLimiter(0.5, clock=Hours())

    paced.charge_in_thread(in_one, 10 * short_s)
    for _ in range(10):
        paced.charge_in_thread(in_ten, short_s)

    burst_s = rate_limiter.BURST_S / 0.5
    assert paced.wait_s(in_ten) + burst_s == pytest.approx(10 * short_s / 0.5)
    assert paced.wait_s(in_one) + burst_s == pytest.approx(100 * short_s / 0.5)


def test_the_count_of_an_admitted_call_is_returned_at_any_room() -> None:
    """Otherwise an honest customer of a busy process would owe more with every request."""
    paced, one = RateLimiter(0.25, clock=Hours()), key()
    paced.charge(one, rate_limiter.BURST_S)
    for room in (rate_limiter.ROOM_MIN, 1.0):
        call = Call(paced, "ipv4:192.0.2.1:1")
        call.belongs_to(one, is_free=False)
        paced.room = room  # while it runs
        call.count(0.1)
        assert paced.wait_s(one) > 0
        paced.room = 1.0
        call.on_admitted()
        call.over()
    assert paced.wait_s(one) == pytest.approx(0.0, abs=1e-6)


async def test_an_address_pays_until_a_key_is_known_and_an_administrator_does_not() -> None:
    paced, one, peer = RateLimiter(0.25, clock=Hours()), key(), "ipv4:192.0.2.1:4711"
    for owner, is_free in ((None, False), (one, False), (one, True)):
        call = Call(paced, peer)
        call.work_s = 1.0
        if owner is not None:
            call.belongs_to(owner, is_free=is_free)
        before = paced.wait_s("192.0.2.1"), paced.wait_s(one)
        call.over()
        grew = [
            now > then
            for now, then in zip(
                (paced.wait_s("192.0.2.1"), paced.wait_s(one)), before, strict=True
            )
        ]
        assert grew == [owner is None, owner is not None and not is_free]


async def test_the_steps_of_a_coroutine_are_counted_without_its_waits() -> None:
    async def work() -> str:
        busy(0.01)
        await asyncio.sleep(0.05)
        busy(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        return "done"

    call = Call(RateLimiter(0.25), "unix:")
    assert await measured(call, work()) == "done"
    assert 0.02 <= call.work_s < 0.05


def busy(for_s: float) -> None:
    """Use CPU time."""
    end_s = time.thread_time() + for_s
    while time.thread_time() < end_s:
        pass


def test_short_work_does_not_read_the_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[float] = []

    def read() -> float:
        readings.append(thread_time())
        return readings[-1]

    thread_time = time.thread_time
    monkeypatch.setattr(time, "thread_time", read)
    began_at = time.monotonic()
    costs = [work_s(start_work()) for _ in range(1000)]
    assert len(readings) <= 3 * (time.monotonic() - began_at) / rate_limiter.READING_AGE_S_MAX + 1
    assert all(cost_s >= 0 for cost_s in costs)


def test_work_that_waits_for_the_processor_costs_at_most_a_millisecond_more() -> None:
    started = start_work()
    busy(for_s=0.002)
    time.sleep(0.05)
    assert 0.002 <= work_s(started) < 0.002 + 0.01


async def test_refusals_of_a_flooding_client_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limiter, "REFUSALS_WAITING_MAX", 3)
    paced, address = RateLimiter(0.25), "192.0.2.1"
    await paced.refusal(address)  # owes nothing
    paced.charge(address, rate_limiter.BURST_S + 1.0)

    waiting = [asyncio.create_task(paced.refusal(address)) for _ in range(3)]
    await asyncio.sleep(0)
    await paced.refusal(address)
    await paced.refusal("192.0.2.2")
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not paced._late_counts


async def test_a_large_message_is_parsed_in_its_share_and_a_small_one_at_once() -> None:
    events: list[str] = []

    class Received:
        sizes = iter([MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1])

        async def read(self) -> bytes:
            return bytes(next(self.sizes))

    async def in_order(size: int, read: Callable[[], Any]) -> Any:
        events.append("turn")
        return read()

    messages = ReceivedMessages(
        cast(Any, Received()), lambda data: events.append(f"parse {len(data) > MESSAGE_BYTES_MAX}")
    )
    messages.read_large = in_order
    await anext(messages)
    await anext(messages)

    assert events == ["parse False", "turn", "parse True"]
