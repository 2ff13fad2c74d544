"""Lost connections and frames, repeated refusals: results and retries."""

from __future__ import annotations

import asyncio

import pytest
from google.rpc import status_pb2
from weir_client import (
    Aborted,
    AsyncClient,
    AsyncGeneration,
    Cancelled,
    IncompleteGeneration,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    attempt,
)

from tests.sdk import scripted
from tests.sdk.scripted import Script, ScriptedInference, ServerStream

pytestmark = pytest.mark.usefixtures("no_tasks_left")

DRAINING = scripted.status("UNAVAILABLE", "the server drains", "DRAINING", retry_after_s=0.01)


async def hello(stream: ServerStream) -> None:
    await scripted.answer(stream, "Hel", "lo")


def refuse_first(refusal: status_pb2.Status, times: int = 1) -> Script:
    """Return a script that fails the first requests, then answers."""

    async def script(stream: ServerStream) -> None:
        for _ in range(times):
            await stream.send(scripted.failed((await stream.read_start()).request_id, refusal))
        await hello(stream)

    return script


async def break_before_anything(stream: ServerStream) -> None:
    await stream.read_start()
    await scripted.abort(stream.context, DRAINING)


class StoppableServer:
    """Server that a test stops, so that another can listen on its port."""

    def __init__(self, inference: ScriptedInference) -> None:
        self._inference = inference
        self.address = ""

    async def __aenter__(self) -> StoppableServer:
        self._serving = scripted.serve(self._inference)
        self.address = await self._serving.__aenter__()
        return self

    async def stop(self) -> None:
        """Stop the server and its streams."""
        await self._serving.__aexit__(None, None, None)

    async def __aexit__(self, *_: object) -> None:
        return


async def test_a_stream_that_breaks_in_the_middle_leaves_an_incomplete_generation() -> None:
    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.admitted(request_id), scripted.delta(request_id, 1, "Hel"))
        await scripted.abort(stream.context, DRAINING)

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        with pytest.raises(
            IncompleteGeneration, match="the stream ended before the request did: the server drains"
        ) as caught:
            await client.complete("demo", "Hi", keep_on_disconnect=None)

    assert caught.value.partial is not None
    assert caught.value.partial.text == "Hel"
    assert isinstance(caught.value.__cause__, Unavailable)


async def test_a_killed_server_leaves_a_partial_answer_and_a_reconnect() -> None:
    async def stall(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.delta(request_id, 1, "Hel"))
        await stream.read()

    async with (
        StoppableServer(ScriptedInference(stall)) as first,
        AsyncClient(first.address, "key", max_retries=0) as client,
    ):
        generation = client.generate("demo", "Hi", keep_on_disconnect=None)
        assert (await anext(generation)).text == "Hel"
        await first.stop()
        with pytest.raises(IncompleteGeneration):
            await generation.wait()
        with pytest.raises(Unavailable):
            await client.complete("demo", "Hi", keep_on_disconnect=None)

        async with scripted.serve(ScriptedInference(hello), address=first.address):
            assert (await client.complete("demo", "Hi", max_retries=5)).text == "Hello"


async def test_a_server_that_ends_the_stream_politely_is_no_reason_to_lose_a_request() -> None:
    async def leave(stream: ServerStream) -> None:
        await stream.read_start()

    server = ScriptedInference(leave, hello)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        assert (await client.complete("demo", "Hi")).text == "Hello"

    assert len(server.streams) == 2


async def test_a_draining_server_finishes_what_runs_and_gets_nothing_new() -> None:
    """A retry on the same stream would be refused again and again."""
    second_answered = asyncio.Event()

    async def drain(stream: ServerStream) -> None:
        running = (await stream.read_start()).request_id
        await stream.send(scripted.delta(running, 1, "a"))
        await stream.send(scripted.failed((await stream.read_start()).request_id, DRAINING))
        await second_answered.wait()
        await stream.send(scripted.delta(running, 2, "b"), scripted.finished(running, 2))
        assert await stream.read() is None, "the client half-closes when its last request has ended"

    server = ScriptedInference(drain, hello)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        running = client.generate("demo", "Hi")
        await anext(running)
        assert (await client.complete("demo", "Hi")).text == "Hello"
        second_answered.set()
        assert (await running.wait()).text == "ab"

    assert len(server.streams) == 2


async def test_a_request_that_never_began_is_sent_again_with_the_same_id() -> None:
    server = ScriptedInference(break_before_anything, hello)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        result = await client.complete("demo", "Hi")

    sent = [
        frame.request_id
        for stream in server.streams
        for message in stream.messages
        for frame in message.frames
    ]
    assert sent == [result.request_id, result.request_id]


async def test_retries_end_after_the_requested_number() -> None:
    server = ScriptedInference(break_before_anything)
    async with (
        scripted.serve(server) as address,
        AsyncClient(address, "key", max_retries=1) as client,
    ):
        with pytest.raises(Unavailable, match="drains") as caught:
            await client.complete("demo", "Hi")
        assert len(server.streams) == 2
        assert caught.value.retry_after_s == 0.01

        with pytest.raises(Unavailable):
            await client.complete("demo", "Hi", max_retries=0)
        assert len(server.streams) == 3


async def test_a_quota_that_frees_itself_soon_is_waited_for() -> None:
    server = ScriptedInference(refuse_first(scripted.quota_status(retry_after_s=0.02), times=2))
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        assert (await client.complete("demo", "Hi")).text == "Hello"


@pytest.mark.parametrize(
    "refusal",
    [
        scripted.quota_status(retry_after_s=60),
        scripted.quota_status(retry_after_s=None),
        scripted.quota_status(retry_after_s=0.01, retry_helps=False),
    ],
    ids=["later than the bound", "no hint", "larger than the limit"],
)
async def test_a_quota_that_resets_late_is_raised_at_once(refusal: status_pb2.Status) -> None:
    server = ScriptedInference(refuse_first(refusal))
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        with pytest.raises(QuotaExceeded):
            await client.complete("demo", "Hi")


async def test_no_retry_goes_past_the_deadline() -> None:
    server = ScriptedInference(refuse_first(scripted.quota_status(retry_after_s=5)))
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        with pytest.raises(QuotaExceeded):
            await client.complete("demo", "Hi", timeout=0.5)


async def test_a_retry_that_meets_its_own_first_attempt_raises_what_broke_that() -> None:
    """The first attempt was accepted without an answer and must not run twice."""
    settled = scripted.status("ALREADY_EXISTS", "settled", "REQUEST_SETTLED")
    server = ScriptedInference(break_before_anything, refuse_first(settled))
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        with pytest.raises(Unavailable, match="drains"):
            await client.complete("demo", "Hi", keep_on_disconnect=None)


async def test_a_cancel_ends_the_wait_for_the_next_attempt() -> None:
    refused = asyncio.Event()

    async def script(stream: ServerStream) -> None:
        refusal = scripted.status("UNAVAILABLE", "busy", "ENGINE_OVERLOADED", retry_after_s=9)
        await stream.send(scripted.failed((await stream.read_start()).request_id, refusal))
        refused.set()
        await stream.read_to_end()

    async def cancel(generation: AsyncGeneration) -> None:
        await refused.wait()
        generation.cancel()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        generation = client.generate("demo", "Hi")
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(cancel(generation))
            # The cancel may also overtake the refusal.
            with pytest.raises((Cancelled, Unavailable)):
                await generation.wait()


async def test_a_refused_key_is_an_error_of_each_request_and_not_tried_again() -> None:
    async def script(stream: ServerStream) -> None:
        await stream.read_start()
        await scripted.abort(
            stream.context, scripted.status("UNAUTHENTICATED", "unknown API key", "UNAUTHENTICATED")
        )

    server = ScriptedInference(script)
    async with scripted.serve(server) as address, AsyncClient(address, "wrong") as client:
        results = await asyncio.gather(
            *(client.complete("demo", "Hi") for _ in range(3)), return_exceptions=True
        )

    assert [type(each) for each in results] == [Unauthenticated] * 3
    assert len({id(each) for each in results}) == 3
    assert len(server.streams) == 1


async def test_stray_and_late_frames_are_ignored() -> None:
    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.delta("nobody", 1, "x"), scripted.delta(request_id, 1, "a"))
        await stream.send(scripted.delta(request_id, 1, "a"), scripted.finished("nobody", 1))
        await stream.send(scripted.finished(request_id, 1), scripted.delta(request_id, 2, "late"))
        await hello(stream)

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        assert (await client.complete("demo", "Hi")).text == "a", (
            "a repeated frame counts once, a late one not at all"
        )
        assert (await client.complete("demo", "Hi")).text == "Hello"


async def test_missing_output_is_an_error_and_never_a_shorter_text() -> None:
    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.delta(request_id, 1, "a"), scripted.delta(request_id, 3, "c"))
        await stream.read_cancel()
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        with pytest.raises(IncompleteGeneration, match="between frame 1 and frame 3"):
            await client.complete("demo", "Hi", keep_on_disconnect=None)


async def test_an_unread_request_is_stopped_at_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "EVENTS_MAX", 10)

    async def flood(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(*(scripted.delta(request_id, seq, "x") for seq in range(1, 30)))
        await hello(stream)

    async with (
        scripted.serve(ScriptedInference(flood)) as address,
        AsyncClient(address, "key") as client,
    ):
        unread = client.generate("demo", "Hi")
        unread.start()
        assert (await client.complete("demo", "Hi")).text == "Hello"
        with pytest.raises(Aborted, match="waiting to be read") as caught:
            await unread.wait()

    assert caught.value.reason == "SLOW_CONSUMER"


async def test_the_same_id_twice_at_once_is_refused_here() -> None:
    async def script(stream: ServerStream) -> None:
        await hello(stream)

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        first = client.generate("demo", "Hi")
        first.start()
        with pytest.raises(Aborted, match="is running on this client"):
            await client.complete("demo", "Hi", request_id=first.request_id)
        assert (await first.wait()).text == "Hello"


async def test_a_closed_port_is_unavailable_in_short_time() -> None:
    async with AsyncClient("127.0.0.1:1", "key", max_retries=1) as client:
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable):
                await client.complete("demo", "Hi")
            with pytest.raises(Unavailable):
                await client.list_models()
