"""API keys that a function returns: when it is called, and what a refused key leads to."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import weir_client
from weir_client import AsyncClient, Client
from weir_client.api_key import CurrentKey

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream

REFUSED = scripted.status("UNAUTHENTICATED", "it has expired", "TOKEN_INVALID")
AUTHORIZATION = "authorization"


def numbered(calls: list[str]) -> Callable[[], str]:
    """Return a function that returns another token at each call, and notes it."""

    def next_token() -> str:
        calls.append(f"token-{len(calls) + 1}")
        return calls[-1]

    return next_token


def jwt(expires_in_s: float) -> str:
    """Return a token that tells its expiry."""
    claims = json.dumps({"exp": time.time() + expires_in_s}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.c2ln"


async def test_concurrent_calls_share_one_token() -> None:
    server, calls = ScriptedInference(scripted.answer), list[str]()

    async def slow() -> str:
        await asyncio.sleep(0)
        return numbered(calls)()

    async with scripted.serve(server) as address, AsyncClient(address, slow) as client:
        await asyncio.gather(*(client.get_quota() for _ in range(5)), client.complete("m", "Hi"))

    assert calls == ["token-1"]
    assert server.metadata[AUTHORIZATION] == "Bearer token-1"


@pytest.mark.parametrize("refused_count", [0, 1, 2])
async def test_a_refused_token_is_replaced_once(refused_count: int) -> None:
    """Even without retries, and in a call that is not repeated otherwise."""
    server, calls = ScriptedInference(scripted.answer), list[str]()
    server.refusals += [(REFUSED, True)] * refused_count

    async with (
        scripted.serve(server) as address,
        AsyncClient(address, numbered(calls), max_retries=0) as client,
    ):
        if refused_count == 2:
            with pytest.raises(weir_client.Unauthenticated, match="it has expired"):
                await client.get_quota()
        else:
            await client.get_quota()

    assert len(server.requests) == min(2, refused_count + 1)
    assert server.metadata[AUTHORIZATION] == f"Bearer token-{min(2, refused_count + 1)}"


async def test_a_fixed_key_is_not_sent_again() -> None:
    server = ScriptedInference(scripted.answer)
    server.refusals.append((REFUSED, True))

    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        with pytest.raises(weir_client.Unauthenticated):
            await client.get_quota()

    assert len(server.requests) == 1


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_stream_that_refuses_its_token_gets_no_more_requests(at_once: bool) -> None:
    """Refuse the call, or each new request: a request that runs there goes on."""
    calls, goes_on = list[str](), asyncio.Event()
    tokens: list[Any] = []

    async def script(stream: ServerStream) -> None:
        tokens.append(dict(stream.context.invocation_metadata())[AUTHORIZATION])
        if len(tokens) > 1:
            await scripted.answer(stream, "new")
            return
        if at_once:
            await scripted.abort(stream.context, REFUSED)
        running = await stream.read_start()
        await stream.send(scripted.admitted(running.request_id))
        await stream.send(scripted.delta(running.request_id, 1, "old"))
        late = await stream.read_start()
        await stream.send(scripted.failed(late.request_id, REFUSED))
        await goes_on.wait()
        await stream.send(scripted.finished(running.request_id, 1))
        await stream.read_to_end()

    server = ScriptedInference(script)
    async with (
        scripted.serve(server) as address,
        AsyncClient(address, numbered(calls), max_retries=0) as client,
    ):
        running = client.generate("m", "Hi")
        first = await anext(aiter(running))
        late = [(await client.complete("m", "Hi")).text for _ in range(2)]
        goes_on.set()
        async for _ in running:
            pass
        result = running.result

    assert late == ["new", "new"]
    assert (first.text, result.text) == (("new", "new") if at_once else ("old", "old"))
    assert tokens == ["Bearer token-1", "Bearer token-2"]


async def test_a_function_that_fails_is_called_once_and_named() -> None:
    count = itertools.count()

    def fails() -> str:
        next(count)
        raise ValueError("no network")

    server = ScriptedInference(scripted.answer)
    async with scripted.serve(server) as address, AsyncClient(address, fails) as client:
        with pytest.raises(weir_client.Unauthenticated, match=r"api_key failed: .*no network"):
            await client.get_quota()
        with pytest.raises(weir_client.Unauthenticated, match=r"api_key failed: .*no network"):
            await client.complete("m", "Hi")

    assert next(count) == 2
    assert not server.requests
    assert not server.streams


@pytest.mark.parametrize("wrong", [None, b"token", "tøken"])
async def test_what_the_function_returns_is_checked(wrong: Any) -> None:
    async with AsyncClient("127.0.0.1:1", lambda: wrong) as client:
        with pytest.raises(weir_client.Unauthenticated, match="the API key"):
            await client.get_quota()


@pytest.mark.parametrize(
    ("lifetime_s", "used_for_s"),
    [(300, 270), (40, 32), (10, 8), (-5, None)],
)
async def test_a_token_is_replaced_before_it_expires(
    monkeypatch: pytest.MonkeyPatch, lifetime_s: float, used_for_s: float | None
) -> None:
    """One that has expired by this machine's clock is used until the server refuses it."""
    now, calls = time.monotonic(), list[str]()

    async def fetch() -> str:
        calls.append(jwt(lifetime_s))
        return calls[-1]

    key = CurrentKey(fetch)
    monkeypatch.setattr("weir_client.api_key.time.monotonic", lambda: now)
    await key.renew()
    now += 1e6 if used_for_s is None else used_for_s - 1
    await key.renew()
    assert len(calls) == 1
    if used_for_s is not None:
        now += 2
        await key.renew()
        assert len(calls) == 2


@pytest.mark.parametrize("token", ["wct_opaque", "a.b", "a.!.c", "a.e30.c", "a.bnVsbA.c", "..", ""])
async def test_a_token_without_an_expiry_is_used_until_it_is_refused(token: str) -> None:
    calls = list[str]()

    def fetch() -> str:
        calls.append(token)
        return token

    key = CurrentKey(fetch)
    for _ in range(3):
        await key.renew()
    assert len(calls) == 1
    assert key.refused("an earlier one")
    await key.renew()
    assert len(calls) == 1, "another call has replaced it already"
    assert key.refused(token)
    await key.renew()
    assert len(calls) == 2


def test_a_function_may_block_beside_the_blocking_client() -> None:
    server, calls = ScriptedInference(lambda stream: scripted.answer(stream, "yes")), list[str]()

    with scripted.serve_in_thread(server) as address, Client(address, numbered(calls)) as client:
        assert client.complete("m", "Hi").text == "yes"
        assert client.get_quota() == []

    assert calls == ["token-1"]
