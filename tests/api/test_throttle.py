"""Failed authentications: limit per address, queries that they cause, and calls that still pass."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from api.access import auth, throttle
from api.access.auth import Authenticator
from api.access.throttle import ADDRESSES_AT_ONCE, ADDRESSES_MAX, SharedFailures, Throttle
from api.core.addresses import Proxies, address_of
from api.core.errors import AuthenticationThrottled
from metering.control.control_channel import BYTES_MAX
from metering.core.errors import DatabaseUnavailable, KeyInvalid
from metering.store.db import create_engine, create_sessions
from metering.tenants.authentication import Principal

METHOD = "/weir.v1.InferenceService/GetQuota"
ALICE = Principal(
    uuid.uuid4(), "wk_12345678", uuid.uuid4(), uuid.uuid4(), "USD", frozenset({"inference"})
)
HOME, ELSEWHERE = "ipv4:192.0.2.1:4711", "ipv4:192.0.2.2:4711"
MOST = 6  # failures per minute: one drains in 10 s


class Throttled:
    """Authenticator with a clock and a database of known secrets that records queries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, good: Sequence[str] = ()) -> None:
        self.good = set(good)
        self.secrets: list[str] = []
        self.now = 1000.0
        self.held: asyncio.Event | None = None  # answers wait for it
        self.away = False
        monkeypatch.setattr(auth, "authenticate", self._authenticate)
        self.authenticator = Authenticator(
            create_sessions(create_engine("postgresql://nobody@localhost/nothing")),
            failures_per_minute=MOST,
        )
        self.throttle = Throttle(MOST, clock=lambda: self.now)
        monkeypatch.setattr(self.authenticator, "throttle", self.throttle)

    async def _authenticate(self, session: Any, secret: str) -> Principal:
        self.secrets.append(secret)
        if self.held is not None:
            await self.held.wait()
        if self.away:
            raise DatabaseUnavailable("the database does not answer")
        if secret not in self.good:
            raise KeyInvalid("the API key is not valid")
        return ALICE

    async def authenticate(self, secret: str, peer: str = HOME) -> type[Exception] | None:
        """Authenticate; return None, or the type of the refusal."""
        try:
            origin = Proxies().origin(peer, ())
            await self.authenticator.principal_of(secret, method=METHOD, origin=origin)
        except (KeyInvalid, AuthenticationThrottled, DatabaseUnavailable) as refusal:
            return type(refusal)
        return None

    async def exhaust(self, peer: str = HOME) -> None:
        """Use all allowed failures."""
        for number in range(MOST):
            assert await self.authenticate(f"wrong {number}", peer) is KeyInvalid


async def test_a_throttled_address_needs_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch)
    await throttled.exhaust()

    with capture_logs() as logs:
        refusals = [await throttled.authenticate(f"more {number}") for number in range(5)]

    assert refusals == [AuthenticationThrottled] * 5
    assert len(throttled.secrets) == MOST
    assert [line["event"] for line in logs] == ["authentication_throttled"], "once"
    assert await throttled.authenticate("wrong", ELSEWHERE) is KeyInvalid, "others are others"


async def test_a_retry_in_time_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch, good=["new"])
    await throttled.exhaust()
    with pytest.raises(AuthenticationThrottled) as refused:
        await throttled.authenticator.principal_of(
            "new", method=METHOD, origin=Proxies().origin(HOME, ())
        )

    throttled.now += refused.value.retry_after_s

    assert refused.value.retry_after_s == pytest.approx(10)
    assert await throttled.authenticate("new") is None
    assert await throttled.authenticate("wrong") is KeyInvalid
    assert await throttled.authenticate("wrong") is AuthenticationThrottled


async def test_a_known_key_passes_a_throttled_address(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch, good=["good", "unseen"])
    assert await throttled.authenticate("good", ELSEWHERE) is None, "wherever it was good"
    await throttled.exhaust()

    assert await throttled.authenticate("good") is None
    assert await throttled.authenticate("unseen") is AuthenticationThrottled
    throttled.good.remove("good")
    assert await throttled.authenticate("good") is KeyInvalid, "it is looked at each time"
    assert await throttled.authenticate("good") is AuthenticationThrottled, "and was good no longer"


async def test_a_changed_key_passes_a_throttled_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotated key or a new limit needs a query, which failures at its address do not block."""
    throttled = Throttled(monkeypatch, good=["good"])
    assert await throttled.authenticate("good") is None
    await throttled.exhaust()

    throttled.authenticator.changed(ALICE.api_key_id)

    assert await throttled.authenticate("good") is None
    assert throttled.secrets.count("good") == 2, "it is looked at, and not taken for what it was"
    throttled.authenticator.changed(ALICE.api_key_id)
    throttled.good.remove("good")
    assert await throttled.authenticate("good") is KeyInvalid
    assert await throttled.authenticate("good") is AuthenticationThrottled


async def test_only_failures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch, good=[f"good {number}" for number in range(3 * MOST)])
    assert {await throttled.authenticate(secret) for secret in sorted(throttled.good)} == {None}
    throttled.away = True
    refusals = {await throttled.authenticate(f"any {number}") for number in range(3 * MOST)}
    assert refusals == {DatabaseUnavailable}
    throttled.away = False

    await throttled.exhaust()
    assert await throttled.authenticate("wrong") is AuthenticationThrottled


async def test_valid_keys_pass_and_few_wrong_ones_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a new server concurrent attempts wait for one another, and no good key is refused."""
    throttled = Throttled(monkeypatch, good=[f"good {number}" for number in range(100)])
    throttled.held = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        good = [tasks.create_task(throttled.authenticate(each)) for each in sorted(throttled.good)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(throttled.secrets) == MOST, "no more at a time than may fail"
        throttled.held.set()
    assert [task.result() for task in good] == [None] * 100

    throttled.secrets.clear()
    async with asyncio.TaskGroup() as tasks:
        wrong = [tasks.create_task(throttled.authenticate(f"wrong {n}")) for n in range(100)]
    results = [task.result() for task in wrong]
    assert (results.count(KeyInvalid), results.count(AuthenticationThrottled)) == (MOST, 100 - MOST)
    assert len(throttled.secrets) == MOST


async def test_a_new_key_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch, good=["good"])
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(throttled.authenticate("good")) for _ in range(1000)]

    assert {call.result() for call in calls} == {None}
    assert len(throttled.secrets) < 10
    assert not len(throttled.throttle), "an address without failures costs nothing"


async def test_known_keys_do_not_erase_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls with a good key overlap; wrong keys come before the second one ends."""
    throttled = Throttled(monkeypatch, good=["good"])
    assert await throttled.authenticate("good") is None
    held = [asyncio.Event(), asyncio.Event()]

    async def known(until: asyncio.Event) -> None:
        async with throttled.throttle.attempt(HOME, lambda: True):
            await until.wait()

    async with asyncio.TaskGroup() as tasks:
        first, second = [tasks.create_task(known(each)) for each in held]
        await asyncio.sleep(0)
        held[0].set()
        await first
        await throttled.exhaust()
        held[1].set()
        await second

    assert await throttled.authenticate("wrong") is AuthenticationThrottled
    assert len(throttled.secrets) == MOST + 1


async def test_waiting_causes_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """All running attempts succeed, and many that waited for them or come later are wrong."""
    throttled = Throttled(monkeypatch, good=[f"good {number}" for number in range(MOST)])
    throttled.held = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for secret in sorted(throttled.good):
            tasks.create_task(throttled.authenticate(secret))
        waiting = [
            tasks.create_task(throttled.authenticate(f"waited {number}"))
            for number in range(3 * MOST)
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        throttled.held.set()
        throttled.held = None
    came_after = [await throttled.authenticate(f"after {number}") for number in range(3 * MOST)]

    assert [*(each.result() for each in waiting), *came_after].count(KeyInvalid) == MOST
    assert len(throttled.secrets) == 2 * MOST


async def test_a_refused_address_counts_until_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it never comes again."""
    throttled = Throttled(monkeypatch)
    await throttled.exhaust()
    await throttled.authenticate("wrong")

    counts = []
    for _ in range(4):
        counts.append(throttled.throttle.refused_count)
        throttled.now += 10.0

    assert counts == [1, 1, 1, 0], "half of its failures have drained"


async def test_a_waiting_caller_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch, good=[f"good {number}" for number in range(3 * MOST)])
    throttled.held = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(throttled.authenticate(each)) for each in sorted(throttled.good)]
        for _ in range(10):
            await asyncio.sleep(0)
        for call in calls[::2]:  # some that are looked up and some that wait
            call.cancel()
        throttled.held.set()

    assert {call.result() for call in calls if not call.cancelled()} == {None}
    assert not len(throttled.throttle)


async def test_the_oldest_addresses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "ADDRESSES_MAX", 3)
    throttled = Throttled(monkeypatch)
    await throttled.exhaust("ipv4:10.0.0.0:1")
    for number in range(1, 4):
        await throttled.authenticate("wrong", f"ipv4:10.0.0.{number}:1")

    assert len(throttled.throttle) == 3
    assert await throttled.authenticate("wrong", "ipv4:10.0.0.0:1") is KeyInvalid
    assert ADDRESSES_MAX == 10_000


async def test_many_addresses_do_not_erase_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only failing addresses are remembered, and only as many other failing addresses evict one."""
    monkeypatch.setattr(throttle, "ADDRESSES_MAX", 3)
    good = [f"good {number}" for number in range(20)]
    throttled = Throttled(monkeypatch, good)
    await throttled.exhaust("ipv4:10.0.0.0:1")
    for number in range(1, 20):
        assert await throttled.authenticate(good[number], f"ipv4:10.0.0.{number}:1") is None

    assert await throttled.authenticate("wrong", "ipv4:10.0.0.0:1") is AuthenticationThrottled


async def test_processes_share_the_count_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Throttled(monkeypatch), Throttled(monkeypatch)
    shared = [SharedFailures(throttled.throttle, uuid.uuid4()) for throttled in (here, there)]
    for number in range(MOST - 1):
        assert await here.authenticate(f"wrong {number}") is KeyInvalid
    assert await here.authenticate("wrong", ELSEWHERE) is KeyInvalid

    text = shared[0].next_broadcast()
    for each in shared:
        each.receive(text)

    assert shared[0].next_broadcast() == shared[1].next_broadcast() == "", (
        "what was heard is not told again"
    )
    assert [await here.authenticate("last"), await here.authenticate("beyond")] == [
        KeyInvalid,
        AuthenticationThrottled,
    ], "heard of itself"
    assert [await there.authenticate("last"), await there.authenticate("beyond")] == [
        KeyInvalid,
        AuthenticationThrottled,
    ]
    assert await there.authenticate("wrong", ELSEWHERE) is KeyInvalid
    there.now += 10.0
    assert [await there.authenticate("drained"), await there.authenticate("beyond")] == [
        KeyInvalid,
        AuthenticationThrottled,
    ]


async def test_failures_are_broadcast_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Throttled(monkeypatch)
    shared, reported = SharedFailures(throttled.throttle, uuid.uuid4()), []
    for number in range(3 * ADDRESSES_AT_ONCE):
        await throttled.authenticate("wrong", f"ipv6:[2001:db8:{number:x}:ffff::1]:4711")
    await throttled.authenticate("wrong again", "ipv6:[2001:db8:beef:ffff::1]:4711")
    await throttled.authenticate("wrong again", "ipv6:[2001:db8:beef:ffff::1]:4711")

    while text := shared.next_broadcast():
        assert len(text.encode()) <= BYTES_MAX
        reported.append(json.loads(text)["counts"])

    assert reported[0]["2001:db8:beef:ffff::/64"] == 2
    assert sum(sum(counts.values()) for counts in reported) == 3 * ADDRESSES_AT_ONCE + 2


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '{"owner": 1, "counts": {}}', '{"owner": "x", "counts": {"a": "b"}}']
)
def test_an_invalid_text_changes_nothing(text: str) -> None:
    throttled = Throttle(MOST)
    SharedFailures(throttled, uuid.uuid4()).receive(text)
    SharedFailures(throttled, uuid.uuid4()).receive('{"owner": "x", "counts": {"192.0.2.9": -5}}')
    assert all(not bucket.failure_count for bucket in throttled._buckets.values())


async def test_without_a_bound_nothing_is_counted() -> None:
    unbounded = Throttle(0)
    for _ in range(100):
        with pytest.raises(KeyInvalid):
            async with unbounded.attempt(HOME, lambda: False):
                raise KeyInvalid("the API key is not valid")
    assert not len(unbounded)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:4711", "192.0.2.1"),
        ("ipv6:%5B::1%5D:4711", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:4711", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
        ("ipv6:[::ffff:192.0.2.1]:4711", "192.0.2.1"),
        ("unix:", "unix"),
        ("unix:/run/weir.sock", "unix"),
        ("", ""),
    ],
)
def test_a_peer_is_its_address_and_of_ipv6_its_network(peer: str, address: str) -> None:
    assert address_of(peer) == address
