"""Blocking client: the same behaviour from threads."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from weir.v1 import types_pb2
from weir_client import (
    AdminClient,
    AsyncAdminClient,
    AsyncBillingClient,
    AsyncClient,
    AsyncGeneration,
    AsyncReceiptClient,
    BillingClient,
    Cancelled,
    Client,
    DeadlineExceeded,
    Delta,
    FinishReason,
    GenerationStream,
    InvalidRequest,
    ReceiptClient,
    Unauthenticated,
    Unavailable,
    attempt,
)

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream
from tests.service import PATIENCE_S


async def echo(stream: ServerStream) -> None:
    """Answer with the words of the question; for "slow", only after its cancel."""
    while (frame := await stream.read()) is not None:
        request_id = frame.request_id
        if frame.WhichOneof("kind") == "cancel":
            await stream.send(scripted.finished(request_id, 1, types_pb2.FINISH_REASON_CANCELLED))
            continue
        words = frame.start.conversation.messages[-1].content.split()
        await stream.send(scripted.admitted(request_id))
        for seq, word in enumerate(words, 1):
            await stream.send(scripted.delta(request_id, seq, word + " "))
        if words[0] != "slow":
            await stream.send(scripted.finished(request_id, len(words)))


@pytest.fixture
def server() -> ScriptedInference:
    return ScriptedInference(echo)


@pytest.fixture
def address(server: ScriptedInference) -> Iterator[str]:
    """Run a server in a separate thread, since these tests block theirs."""
    with scripted.serve_in_thread(server) as address:
        yield address


def test_the_first_token_takes_ten_lines(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_ADDRESS", address)
    monkeypatch.setenv("WEIR_API_KEY", "key")

    with (
        Client() as client,
        client.generate("demo", "Which hotel has a pool?", max_output_tokens=100) as stream,
    ):
        text = "".join(delta.text for delta in stream)

    assert text == "Which hotel has a pool? "
    assert stream.result.text == text
    assert stream.result.usage.input_token_count == 5
    assert str(stream.result.cost) == "0.00184 USD"


def test_many_threads_share_a_client_and_stream(address: str, server: ScriptedInference) -> None:
    with Client(address, "key") as client, ThreadPoolExecutor(16) as threads:
        questions = [f"question {index} of many" for index in range(64)]
        results = list(threads.map(lambda question: client.complete("demo", question), questions))

    assert [result.text.strip() for result in results] == questions
    assert len(server.streams) == 1


def test_breaking_out_and_leaving_the_block_cancel(address: str) -> None:
    with Client(address, "key") as client:
        with client.generate("demo", "slow answer") as stream:
            for delta in stream:
                assert delta.text == "slow "
                break
        assert stream.result.finish_reason is FinishReason.CANCELLED
        assert stream.done

        with client.generate("demo", "slow answer") as stream:
            assert next(stream).text == "slow "
            assert next(stream).text == "answer "
            assert stream.partial.text == "slow answer "
        assert stream.result.finish_reason is FinishReason.CANCELLED


def test_events_come_in_order(address: str) -> None:
    with Client(address, "key") as client, client.generate("demo", "a b") as stream:
        events = list(stream.events())

    assert [event.text for event in events if isinstance(event, Delta)] == ["a ", "b "]
    assert stream.admitted == events[0]
    assert stream.model == "demo"


def test_another_thread_can_cancel(address: str) -> None:
    with Client(address, "key") as client, client.generate("demo", "slow answer") as stream:
        first = next(stream)
        threading.Thread(target=stream.cancel).start()
        assert stream.wait().finish_reason is FinishReason.CANCELLED

    assert first.text == "slow "


def test_timeouts_and_errors_are_raised_as_they_are(address: str) -> None:
    with Client(address, "key") as client:
        with pytest.raises(DeadlineExceeded) as caught:
            client.complete("demo", "slow answer", timeout=0.05)
        with pytest.raises(InvalidRequest):
            client.complete("demo")

    assert caught.value.partial is not None
    assert caught.value.partial.text == "slow answer "


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Ctrl-C, which a background process ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_waiting_thread_cancels_the_request(address: str) -> None:
    """Ctrl-C arrives while the main thread waits for a token that does not come."""
    with Client(address, "key") as client:
        stream = client.generate("demo", "slow")
        assert next(stream).text == "slow "
        interrupt = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT])
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        interrupt.join()

        assert stream.wait().finish_reason is FinishReason.CANCELLED
        assert stream.result.finish_reason is FinishReason.CANCELLED


def test_a_client_without_a_key_says_where_to_put_one() -> None:
    with pytest.raises(Unauthenticated, match="WEIR_API_KEY"):
        Client("127.0.0.1:1")


def test_a_client_opens_on_first_use_and_says_when_it_is_closed(address: str) -> None:
    client = Client(address, "key")
    client.list_models()
    with client:
        client.list_models()
        with pytest.raises(RuntimeError, match="open already"):
            client.__enter__()
    for call in (client.list_models, partial(client.generate, "demo", "Hi")):
        with pytest.raises(RuntimeError, match="is closed: make a new one"):
            call()


def test_the_first_line_that_a_newcomer_writes_works(address: str) -> None:
    """From several threads at once, and without a name that keeps the client."""
    client = Client(address, "key")
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda word: client.complete("demo", word).text, "abcdefgh"))
    client.close()
    client.close()

    deltas = [delta.text for delta in Client(address, "key").generate("demo", "one two")]

    assert texts == [f"{word} " for word in "abcdefgh"]
    assert deltas == ["one ", "two "]


def test_an_asyncio_client_works_in_one_event_loop_after_the_other(address: str) -> None:
    client = AsyncClient(address, "key")

    texts = [asyncio.run(client.complete("demo", word)).text for word in ("a", "b")]
    with pytest.raises(RuntimeError, match="needs a running event loop"):
        client.generate("demo", "Hi")
    asyncio.run(client.aclose())
    with pytest.raises(RuntimeError, match="is closed"):
        asyncio.run(client.complete("demo", "Hi"))

    assert texts == ["a ", "b "]


def test_an_asyncio_client_of_a_loop_that_still_runs_names_the_remedy(address: str) -> None:
    client = AsyncClient(address, "key")

    async def use_twice() -> None:
        await client.complete("demo", "Hi")
        elsewhere = asyncio.to_thread(asyncio.run, client.complete("demo", "Hi"))
        with pytest.raises(RuntimeError, match="one client in each event loop"):
            await elsewhere
        await client.aclose()

    asyncio.run(use_twice())


def test_a_limit_of_the_client_ends_a_request_without_one_of_its_own(address: str) -> None:
    with Client(address, "key", timeout=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            client.complete("demo", "slow")
        assert client.complete("demo", "Hi", timeout=PATIENCE_S).text == "Hi "
    kinds: tuple[Any, ...] = (Client, AsyncClient, AdminClient)
    for kind in kinds:
        for wrong in (0, -1, "1"):
            with pytest.raises(InvalidRequest, match="timeout"):
                kind(address, "key", timeout=wrong)
        for retries in (-1, "1", True):
            with pytest.raises(InvalidRequest, match="max_retries"):
                kind(address, "key", max_retries=retries)
    with pytest.raises(InvalidRequest, match="labels: no such option"):
        kinds[2](address, "key", labels={})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://weir.example.com/v1", "has a path"),
        ("localhost:99999", "a port from 1 to 65535"),
        ("localhost:http", "a port from 1 to 65535"),
        (":8443", "must be host:port"),
    ],
)
def test_an_address_that_cannot_work_is_refused_by_name(address: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"address: .*{words}"):
        Client(address, "key")


def test_an_unreachable_server_is_named_with_what_was_tried() -> None:
    with Client("127.0.0.1:1", "key", max_retries=0) as client:
        for call in (client.list_models, partial(client.complete, "demo", "Hi")):
            with pytest.raises(Unavailable, match=r"127.0.0.1:1 without TLS cannot be reached"):
                call()


def test_closing_ends_the_thread(address: str) -> None:
    before = threading.active_count()

    with Client(address, "key") as client:
        client.complete("demo", "Hi")
        assert threading.active_count() > before

    assert threading.active_count() == before


def test_a_call_of_another_thread_is_cancelled_by_closing(address: str) -> None:
    """Running, retrying and late calls all return."""
    client = Client("127.0.0.1:1", "key", max_retries=100, retry_wait_max_s=3600)
    client.__enter__()
    entered = threading.Event()

    async def stuck() -> None:
        entered.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(3) as threads:
        calls: list[Future[Any]] = [
            threads.submit(client.list_models, timeout=3600),
            threads.submit(client._thread.run, stuck),
        ]
        entered.wait()
        late: Future[object] = Future()  # like a call that the loop has not started yet
        client._thread._calls.add(late)
        client.__exit__(None, None, None)
        ends = [call.exception() for call in calls]

    assert [type(end) for end in ends] == [Cancelled, Cancelled]
    assert late.cancelled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_client_that_was_opened_before_a_fork_says_so(address: str) -> None:
    """Its thread does not exist there: a call would wait forever."""
    code = (
        "import os, sys, weir_client\n"
        f"client = weir_client.Client({address!r}, 'key').__enter__()\n"
        "child = os.fork()\n"
        "try:\n"
        "    client.complete('demo', 'Hi')\n"
        "except RuntimeError as error:\n"
        "    assert child == 0 and 'forked' in str(error), error\n"
        "    client.__exit__(None, None, None)\n"
        "    os._exit(7)\n"
        "client.__exit__(None, None, None)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert done.stdout.strip() == "7", done.stderr


async def test_it_works_inside_a_program_with_its_own_event_loop(address: str) -> None:
    def ask() -> str:
        with Client(address, "key") as client:
            return client.complete("demo", "Hi there").text

    assert await asyncio.to_thread(ask) == "Hi there "


class Sluice:
    """Server with flow control that records how far ahead it is."""

    def __init__(self, token_count: int) -> None:
        self.grants: list[int] = []
        self.read_count = 0
        self.ahead_max = 0
        self._token_count = token_count

    async def __call__(self, stream: ServerStream) -> None:
        start = await stream.read_start()
        self.grants.append(start.start.initial_credit_tokens)
        seq = 0
        while seq < self._token_count:
            self.ahead_max = max(self.ahead_max, sum(self.grants) - self.read_count)
            while seq < min(sum(self.grants), self._token_count):
                seq += 1
                await stream.send(scripted.delta(start.request_id, seq, "x"))
            if seq < self._token_count:
                frame = await stream.read()
                assert frame is not None
                assert frame.HasField("credit")
                self.grants.append(frame.credit.token_count)
        await stream.send(scripted.finished(start.request_id, seq))
        await stream.read_to_end()  # more credit may be on its way


@pytest.mark.parametrize(
    ("interval_s", "grant"), [(3600.0, 5), (0.0, 1)], ids=["by halves", "after a while"]
)
def test_read_tokens_are_granted_again(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, grant: int
) -> None:
    monkeypatch.setattr(attempt, "GRANT_INTERVAL_S", interval_s)
    sluice = Sluice(40)
    with (
        scripted.serve_in_thread(ScriptedInference(sluice)) as address,
        Client(address, "key") as client,
        client.generate("demo", "Hi", prefetch_tokens=10) as stream,
    ):
        for delta in stream:
            sluice.read_count = delta.seq

    assert stream.result.text == "x" * 40
    assert sluice.grants[:2] == [10, grant]
    assert sluice.ahead_max <= 10 + 1, (
        "the grant for a token may be there before its reader has noted it"
    )


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (AsyncClient, Client),
        (AsyncAdminClient, AdminClient),
        (AsyncBillingClient, BillingClient),
        (AsyncReceiptClient, ReceiptClient),
        (AsyncGeneration, GenerationStream),
    ],
)
def test_every_awaitable_method_has_a_blocking_one(asynchronous: type, blocking: type) -> None:
    """Names, arguments and results are equal, except for closing."""
    only_async = {"aclose", "take", "next_event"}

    def waits(value: object) -> bool:
        return inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)

    calls = {
        name for name, _ in inspect.getmembers(asynchronous, waits) if not name.startswith("_")
    }

    for name in calls - only_async:
        twin = getattr(blocking, name)
        assert not waits(twin)
        ours, theirs = inspect.signature(twin), inspect.signature(getattr(asynchronous, name))
        assert ours.parameters == theirs.parameters, name
        assert ours == theirs or inspect.isgeneratorfunction(twin), name
        assert twin.__doc__
