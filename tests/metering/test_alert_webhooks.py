"""Webhooks of alerts: retried until answered, signed, and only to the configured URL."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from docs import verify_alert
from metering.alerts import alerts, webhooks
from metering.alerts.alerts import find_alert, fire_due_alerts, list_alerts
from metering.alerts.webhooks import (
    GIVE_UP_AFTER,
    RETRY_DELAY_S_MAX,
    Run,
    checked_url,
    deliver_alerts,
    send,
    signed_headers,
)
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.core.outbound import AddressRefused, is_public, resolve_allowed
from metering.quotas.quota_admin import set_quota
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions, create_engine, create_sessions
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.usage import new_limit
from tests.metering.webhook_double import BROKEN, HANG, Receiver, receiver

REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
STATES = (
    "SELECT state, attempt_count, last_error FROM alert_deliveries ORDER BY created_at,"
    " attempt_count DESC"
)

NONSENSE = ("", "t=", "v1=1", "t=x,v1=y", f"t={'9' * 5000},v1=y")
PRIVATE = (
    *(
        "127.0.0.1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
    ),
    *("192.0.0.192", "168.63.129.16", "192.88.99.1", "fec0::1", "3fff::1", "64:ff9b:1::a00:1"),
    *(
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::1",
    ),
)


@pytest.fixture
def acme(world: HoldWorld) -> Payer:
    """Return a tenant with a webhook."""
    return world.tenant("acme")


@pytest.fixture
async def sessions(world: HoldWorld, acme: Payer) -> AsyncIterator[Sessions]:
    """Open sessions at the world's time."""
    engine = create_engine(world.url)
    yield create_sessions(engine)
    await engine.dispose()


@pytest.fixture
async def there() -> AsyncIterator[Receiver]:
    async with receiver() as made:
        yield made


async def set_webhook(sessions: Sessions, url: str, organization: str = "acme") -> str:
    async with sessions.begin() as session:
        _, secret = await webhooks.set_webhook(
            session, organization=organization, url=url, private=True, actor="test"
        )
    return secret


async def deliver(sessions: Sessions) -> Run:
    """Deliver like a worker, with enough time for a slow machine."""
    return await deliver_alerts(sessions, private=True, budget_s=60)


async def ask_for_test(sessions: Sessions, organization: str = "acme") -> uuid.UUID:
    async with sessions.begin() as session:
        return await webhooks.try_webhook(session, organization=organization)


async def end_user_limit(sessions: Sessions, payer: Payer, **key: Any) -> None:
    """Give each end user 100 tokens per day within the payer's project."""
    async with sessions.begin() as session:
        await set_quota(
            session,
            subject=QuotaSubject.PROJECT,
            subject_ref=str(payer.project_id),
            key=QuotaKey(QuotaDimension.TOKENS_PER_DAY, for_each="end_user"),
            terms=QuotaTerms(100, **key),
            actor="test",
        )


async def use_as(world: HoldWorld, payer: Payer, end_user: str, token_count: int) -> None:
    """Run a request of an end user with this many input tokens."""
    begun = admit(
        payer, end_user=end_user, input_tokens=token_count, slice_tokens=0, least_tokens=0
    )
    await world.run(begun)
    await world.run(settle(begun.hold_id, 0, input_tokens=token_count))


async def test_an_end_user_near_its_budget_is_named_with_the_scope_of_the_limit(
    world: HoldWorld, acme: Payer, sessions: Sessions, there: Receiver
) -> None:
    secret = await set_webhook(sessions, there.url)
    await end_user_limit(sessions, acme, alert_at=(80,))
    await use_as(world, acme, "ada", 85)
    await use_as(world, acme, "bob", 79)

    assert await fire_due_alerts(sessions) == 1
    await deliver(sessions)

    [received] = there.received
    header = received.headers["weir-signature"]
    assert verify_alert.verify(secret, header, received.body)
    assert not verify_alert.verify(secret, header, received.body.replace(b"ada", b"bob"))
    content = json.loads(received.body)
    project = content["quota"]["within_name"]
    assert project.startswith("acme/")
    assert (content["quota"]["subject"], content["quota"]["subject_name"]) == ("end-user", "ada")
    assert content["quota"]["within_id"] == str(acme.project_id)
    assert content["organization"]["name"] == "acme"
    assert content["text"] == (
        f"ada has used 85 % of its limit per day within {project}: 85 tokens of 100 tokens."
    )

    world.execute(
        "UPDATE usage_subjects SET name = NULL, erased_at = now(), archived_at = now()"
        " WHERE name = 'ada'"
    )
    async with sessions() as session:
        [listed], _ = await list_alerts(session, organization_id=acme.organization_id)
    assert listed.subject_name == content["quota"]["subject_id"]


async def test_alerts_on_end_users_are_bounded_and_the_highest_threshold_goes_first(
    world: HoldWorld, acme: Payer, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "USAGE_SUBJECT_ALERTS_PER_HOUR", 3)
    other = world.tenant("bolt")
    for payer in (acme, other):
        await end_user_limit(sessions, payer, alert_at=(50, 100))
    async with sessions.begin() as session:
        await new_limit(
            session, "acme", QuotaDimension.TOKENS_PER_DAY, 100, enforced=False, alert_at=(100,)
        )
    for number in range(4):
        await use_as(world, acme, f"half-{number}", 60)
    for number in range(2):
        await use_as(world, acme, f"full-{number}", 100)
    await use_as(world, other, "full", 100)

    counts = [await fire_due_alerts(sessions) for _ in range(2)]
    query = (
        "SELECT o.name, q.within_id IS NOT NULL, a.threshold FROM alerts a"
        " JOIN organizations o ON o.id = a.organization_id JOIN quotas q ON q.id = a.quota_id"
        " ORDER BY 1, 2, 3"
    )

    # Three of acme's end users, the limit of acme itself, and both thresholds of bolt's end user.
    assert counts == [6, 0]
    assert world.rows(query) == [
        ("acme", False, 100),
        ("acme", True, 50),
        ("acme", True, 100),
        ("acme", True, 100),
        ("bolt", True, 50),
        ("bolt", True, 100),
    ]
    world.advance(3660)
    later = [await fire_due_alerts(sessions) for _ in range(3)]
    world.advance(3660)
    assert [*later, await fire_due_alerts(sessions)] == [3, 0, 0, 2]


async def test_an_alert_that_cannot_be_sent_delays_no_other(
    world: HoldWorld,
    acme: Payer,
    sessions: Sessions,
    there: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await set_webhook(sessions, there.url)
    bad = await ask_for_test(sessions)
    good = await ask_for_test(sessions)
    find = find_alert

    async def fails(session: AsyncSession, alert_id: uuid.UUID) -> Any:
        if alert_id == bad:
            raise ValueError("planted")
        return await find(session, alert_id)

    monkeypatch.setattr(webhooks, "find_alert", fails)
    first = await deliver(sessions)
    async with sessions.begin() as session:
        [error, rests] = (
            await session.execute(
                text(
                    "SELECT last_error, paused_until > now() FROM alert_deliveries, alert_webhooks"
                    " WHERE alert_id = :id"
                ),
                {"id": bad},
            )
        ).one()
        await session.execute(text("UPDATE alert_webhooks SET paused_until = NULL"))
    second = await deliver(sessions)

    assert first.failed == [bad]
    assert [*first.delivered, *second.delivered] == [good]
    assert (error.startswith("incident "), rests) == (True, True)


async def test_an_alert_is_posted_once_signed_and_says_what_was_used_of_what(
    world: HoldWorld, acme: Payer, sessions: Sessions, there: Receiver
) -> None:
    secret = await set_webhook(sessions, there.url)
    bolt = world.tenant("bolt")
    for organization in ("acme", "bolt"):  # a tenant without a webhook causes no waiting
        async with sessions.begin() as session:
            await new_limit(
                session, organization, QuotaDimension.TOKENS_PER_DAY, 100, alert_at=(80,)
            )
    for each in (acme, bolt):
        begun = admit(each, input_tokens=85, slice_tokens=0, least_tokens=0)
        await world.run(begun)
        await world.run(settle(begun.hold_id, 0, input_tokens=85))
    await fire_due_alerts(sessions)

    runs = [await deliver(sessions) for _ in range(2)]

    [post] = there.received
    content = json.loads(post.body)
    assert [len(run.delivered) for run in runs] == [1, 0]
    assert content["type"] == "quota"
    assert content["percent_threshold"] == "80"
    assert content["used"] == "85"
    assert content["limit"] == "100"
    assert content["text"] == "acme has used 85 % of its limit per day: 85 tokens of 100 tokens."
    assert world.one("SELECT count(*) FROM alerts") == 2
    assert uuid.UUID(content["id"]) == world.one(
        "SELECT alert_id FROM alert_deliveries WHERE state = 'delivered'"
    )
    signature = post.headers["weir-signature"]
    assert verified(secret, signature, post.body)
    assert not verified(secret, signature, post.body + b" ")
    assert not verified(secret + "x", signature, post.body)


def verified(secret: str, signature: str, body: bytes) -> bool:
    """Return the verdict of the documented program."""
    command = [sys.executable, "docs/verify_alert.py", secret, signature]
    return subprocess.run(command, input=body, check=False, capture_output=True).returncode == 0


def test_the_example_of_the_docs_knows_a_wrong_secret_another_time_and_nonsense() -> None:
    body, at_s = b"{}", 1_800_000_000
    header = signed_headers("wh_secret", body, at_s)["Weir-Signature"]

    assert verify_alert.verify("wh_secret", header, body, at_s + 299)
    assert not verify_alert.verify("wh_other", header, body, at_s)
    assert not verify_alert.verify("wh_secret", header, body, at_s + 301)
    assert not verify_alert.verify(
        "wh_secret", header.replace(str(at_s), str(at_s + 1)), body, at_s
    )
    assert not any(verify_alert.verify("wh_secret", wrong, body, at_s) for wrong in NONSENSE)
    assert not verify_alert.verify("wh_secret", f"t={at_s},v1=ä", body, at_s)


async def test_failed_posts_are_retried_with_growing_pauses_and_the_same_id_for_a_day(
    world: HoldWorld, sessions: Sessions, there: Receiver
) -> None:
    await set_webhook(sessions, there.url)
    alert_id = await ask_for_test(sessions)
    there.answers = [BROKEN, REDIRECT]

    attempts = []
    for wait_s in (0.0, 1.0, 10.0, 20.0):  # rests are 5 to 10 s, then 10 to 20
        world.advance(wait_s)
        run = await deliver(sessions)
        attempts.append((len(run.failed), len(run.delivered)))
    given_up = await ask_for_test(sessions)
    there.answers = [BROKEN] * 40
    await deliver(sessions)
    for _ in range(30):
        world.advance(RETRY_DELAY_S_MAX)
        await deliver(sessions)

    assert attempts == [(1, 0), (0, 0), (1, 0), (0, 1)]
    assert [json.loads(post.body)["id"] for post in there.received[:4]] == [str(alert_id)] * 3 + [
        str(given_up)
    ]
    assert {post.path for post in there.received} == {"/alerts"}, "no redirect is followed"
    [first_state, second_state] = world.rows(STATES)
    assert first_state == (
        "delivered",
        3,
        "answered 302: redirects are not followed; set the URL of the target",
    )
    assert second_state[::2] == ("failed", "answered 500")
    assert GIVE_UP_AFTER / timedelta(seconds=RETRY_DELAY_S_MAX) <= second_state[1] <= 30


async def test_an_alert_that_is_refused_holds_up_no_other(
    world: HoldWorld, sessions: Sessions, there: Receiver
) -> None:
    await set_webhook(sessions, there.url)
    refused = await ask_for_test(sessions)
    there.answers = [BROKEN]
    await deliver(sessions)
    world.advance(1)
    other = await ask_for_test(sessions)  # this also ends the rest

    await deliver(sessions)

    assert [json.loads(post.body)["id"] for post in there.received] == [
        str(each) for each in (refused, other, refused)
    ]


async def test_a_receiver_that_hangs_or_sends_without_end_costs_its_timeout_and_delays_no_other(
    world: HoldWorld, sessions: Sessions, there: Receiver
) -> None:
    world.tenant("bolt")
    there.answers = [HANG]
    async with receiver() as endless:
        endless.endless, endless.answers = b"x" * 65_536, [b"HTTP/1.1 200 OK\r\n\r\n"] * 9
        hung = send(there.url, "s", b"{}", private=True, attempt_s=0.2)
        answered = send(endless.url, "s", b"{}", private=True)
        async with asyncio.timeout(15):
            reported = await asyncio.gather(hung, answered)
        endless.answers = [b"HTTP/1.1 200 OK\r\nX: "]  # a head without end
        head = await send(endless.url, "s", b"{}", private=True)
    for name, url in (("acme", "http://127.0.0.1:1/"), ("bolt", there.url)):
        await set_webhook(sessions, url, name)
        await ask_for_test(sessions, name)
    run = await deliver(sessions)

    assert tuple(reported) == ("no answer within 0.2 s", "")
    assert head != ""
    assert endless.taken_count < 50_000_000
    assert (len(run.delivered), len(run.failed)) == (1, 1)


async def test_concurrent_workers_post_each_alert_once_and_take_over_from_a_dead_one(
    world: HoldWorld, sessions: Sessions, there: Receiver
) -> None:
    await set_webhook(sessions, there.url)
    ids = {await ask_for_test(sessions) for _ in range(3)}
    there.answers = [HANG]
    dying = asyncio.create_task(deliver(sessions))
    await there.taken.wait()
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying

    runs = await asyncio.gather(*(deliver(sessions) for _ in range(2)))

    posted = [uuid.UUID(json.loads(post.body)["id"]) for post in there.received]
    assert sorted(each for run in runs for each in run.delivered) == sorted(ids)
    assert len(posted) == 4
    assert set(posted) == ids


async def test_a_removed_webhook_drops_pending_alerts_and_its_secret_is_in_no_log(
    world: HoldWorld, sessions: Sessions, there: Receiver
) -> None:
    first, second = (
        await set_webhook(sessions, there.url),
        await set_webhook(sessions, there.url + "/new"),
    )
    alert_id = await ask_for_test(sessions)
    async with sessions.begin() as session:
        [state] = (await webhooks.list_webhooks(session, organization="acme"))[0]
        await webhooks.remove_webhook(session, organization="acme", actor="test")
    with pytest.raises(NotFound):
        await ask_for_test(sessions)

    await deliver(sessions)

    async with sessions() as session:
        delivery = (await find_alert(session, alert_id)).delivery
    assert (state.pending_count, state.webhook.url) == (1, there.url + "/new")
    assert delivery is not None
    assert (delivery.state, delivery.last_error) == ("failed", webhooks.REMOVED)
    assert there.received == []
    logged = str(world.rows("SELECT action, before, after FROM audit_log"))
    assert "alert_webhook.delete" in logged
    assert first != second
    assert not any(secret in logged for secret in (first, second))


@pytest.mark.parametrize(
    "answer", [b"\x00 what is this?\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: \x00\r\n\r\n"]
)
async def test_an_invalid_http_response_names_no_path(there: Receiver, answer: bytes) -> None:
    there.answers.append(answer)

    error = await send(there.url + "/T0KEN", "s", b"{}", private=True)

    assert error.startswith("the response is not valid HTTP: ")
    assert "T0KEN" not in error


def test_only_addresses_of_the_whole_internet_are_public() -> None:
    assert [each for each in PRIVATE if is_public(ipaddress.ip_address(each))] == []
    assert all(
        is_public(ipaddress.ip_address(each))
        for each in ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808")
    )


@pytest.mark.parametrize(
    "url",
    [
        *(f"https://[{each}]/" if ":" in each else f"https://{each}/" for each in PRIVATE),
        *(
            "http://example.com/",
            "ftp://example.com/",
            "https://",
            "example.com",
            "https://u:p@example.com/",
            "https://x.com/#y",
        ),
        *(
            "https://exa mple.com/",
            "https://exämple.com/",
            "https://example.com:x/",
            "https://e.com/" + "x" * 2000,
            "https://[::1/",
        ),
    ],
)
def test_a_url_that_no_webhook_may_have_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidValue, match="url") as refused:
        checked_url(url, private=False)

    assert refused.value.field == "url"


async def test_a_name_of_an_internal_address_is_refused_each_time_and_the_checked_address_is_used(
    there: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server may answer otherwise the second time."""
    port = int(there.url.rpartition(":")[2].partition("/")[0])
    requested: list[str] = []

    def answer(addresses: list[str]) -> Any:
        def getaddrinfo(host: str, port: int, **_: Any) -> Any:
            requested.append(host)
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in addresses
            ]

        return getaddrinfo

    monkeypatch.setattr(socket, "getaddrinfo", answer(["10.1.2.3", "127.0.0.1"]))
    refused = await send("https://inside.example/", "s", b"{}", private=False)
    monkeypatch.setattr(socket, "getaddrinfo", answer(["10.1.2.3", "8.8.8.8"]))
    indexes = await resolve_allowed("mixed.example", 443, private=False)
    monkeypatch.setattr(socket, "getaddrinfo", answer(["127.0.0.1"]))
    reached = await send(f"http://pinned.example:{port}/alerts", "s", b"{}", private=True)
    allowed_no_more = await send(there.url, "s", b"{}", private=False)

    assert refused == "inside.example does not resolve to a public address"
    assert [index["host"] for index in indexes] == ["8.8.8.8"]
    assert (reached, requested.count("pinned.example")) == ("", 1)
    assert there.received[0].headers["host"] == f"pinned.example:{port}"
    assert "must use https" in allowed_no_more
    with pytest.raises(AddressRefused):
        await resolve_allowed("x.example", 443, private=False)
