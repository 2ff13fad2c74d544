"""Every way to abandon a request: each tells the server, and none blocks forever."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from weir.v1 import types_pb2
from weir_client import (
    AsyncClient,
    AsyncGeneration,
    DeadlineExceeded,
    FinishReason,
    IncompleteGeneration,
    attempt,
)
from weir_client.attempt import CANCEL_GRACE_S

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream

pytestmark = pytest.mark.usefixtures("no_tasks_left")


async def until_cancelled(stream: ServerStream) -> None:
    """Send two tokens, then settle a third one after the cancel."""
    while (frame := await stream.read()) is not None:
        request_id = frame.request_id
        if frame.WhichOneof("kind") == "start":
            await stream.send(scripted.admitted(request_id), scripted.delta(request_id, 1, "a"))
            await stream.send(scripted.delta(request_id, 2, "b"))
        else:
            end = scripted.finished(request_id, 3, types_pb2.FINISH_REASON_CANCELLED)
            await stream.send(scripted.delta(request_id, 3, "c"), end)


async def deaf_to_cancels(stream: ServerStream) -> None:
    """Send one token and nothing else."""
    while (frame := await stream.read()) is not None:
        if frame.WhichOneof("kind") == "start":
            await stream.send(
                scripted.admitted(frame.request_id), scripted.delta(frame.request_id, 1, "a")
            )


async def test_leaving_the_block_cancels_and_reports_the_usage() -> None:
    server = ScriptedInference(until_cancelled)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        async with client.generate("demo", "Hi") as generation:
            await anext(generation)

        result = generation.result
        assert result.finish_reason is FinishReason.CANCELLED
        assert result.usage.billed_token_count == 3
        assert result.text == "abc", "what is billed is also told, read or not"
        kinds = [
            each.WhichOneof("kind")
            for message in server.streams[0].messages
            for each in message.frames
        ]
        assert kinds == ["start", "cancel"]


async def test_an_error_in_the_block_cancels_and_comes_out_as_itself() -> None:
    async with (
        scripted.serve(ScriptedInference(until_cancelled)) as address,
        AsyncClient(address, "key") as client,
    ):
        generation = client.generate("demo", "Hi")
        with contextlib.suppress(KeyError):
            async with generation:
                async for _ in generation:
                    raise KeyError("mine")

        assert generation.result.finish_reason is FinishReason.CANCELLED


async def test_an_error_in_the_block_of_the_client_comes_out_as_itself() -> None:
    async with scripted.serve(ScriptedInference(until_cancelled)) as address:
        with pytest.raises(KeyError):
            async with AsyncClient(address, "key") as client, client.generate("demo", "Hi"):
                raise KeyError("mine")


async def test_breaking_out_of_the_iteration_cancels_without_any_block() -> None:
    cancelled = asyncio.Event()

    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.delta(request_id, 1, "a"))
        await stream.read_cancel()
        cancelled.set()
        await stream.send(scripted.finished(request_id, 1, types_pb2.FINISH_REASON_CANCELLED))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        generation = client.generate("demo", "Hi")
        async for _ in generation:
            break
        await cancelled.wait()

        assert (await generation.wait()).finish_reason is FinishReason.CANCELLED


async def test_a_generation_that_is_dropped_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.delta(request_id, 1, "a"))
        await stream.read_cancel()
        cancelled.set()
        await stream.send(scripted.finished(request_id, 1, types_pb2.FINISH_REASON_CANCELLED))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        await anext(client.generate("demo", "Hi"))
        await cancelled.wait()


async def test_cancelling_the_task_cancels_the_request() -> None:
    running = asyncio.Event()
    ended: list[FinishReason] = []

    async with (
        scripted.serve(ScriptedInference(until_cancelled)) as address,
        AsyncClient(address, "key") as client,
    ):

        async def read() -> None:
            generation = client.generate("demo", "Hi")
            try:
                async with generation:
                    async for _ in generation:
                        running.set()
            finally:
                ended.append(generation.result.finish_reason)

        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read())
            await running.wait()
            reader.cancel()

    assert ended == [FinishReason.CANCELLED]


async def test_an_explicit_cancel_ends_the_iteration_after_what_was_delivered() -> None:
    async with (
        scripted.serve(ScriptedInference(until_cancelled)) as address,
        AsyncClient(address, "key") as client,
    ):
        async with client.generate("demo", "Hi") as generation:
            texts = []
            async for delta in generation:
                texts.append(delta.text)
                generation.cancel()

        assert texts == ["a", "b", "c"]
        assert generation.result.finish_reason is FinishReason.CANCELLED


async def test_the_timeout_cancels_and_raises_with_what_was_delivered_and_its_usage() -> None:
    async with (
        scripted.serve(ScriptedInference(until_cancelled)) as address,
        AsyncClient(address, "key") as client,
    ):
        with pytest.raises(DeadlineExceeded) as caught:
            await client.complete("demo", "Hi", timeout=0.1)

    assert "did not end within 0.1 s (timeout) and was cancelled" in caught.value.message
    partial = caught.value.partial
    assert partial is not None
    assert partial.text == "abc"
    assert partial.usage is not None
    assert partial.usage.billed_token_count == 3
    assert str(partial.cost) == "0.00184 USD"


async def test_the_timeout_passes_while_the_caller_is_busy() -> None:
    """The deadline does not depend on when the caller asks for the next token."""
    cancelled = asyncio.Event()

    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(scripted.delta(request_id, 1, "a"))
        await stream.read_cancel()
        await stream.send(scripted.finished(request_id, 1, types_pb2.FINISH_REASON_CANCELLED))
        cancelled.set()
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        generation = client.generate("demo", "Hi", timeout=0.05)
        await anext(generation)
        await cancelled.wait()
        with pytest.raises(DeadlineExceeded):
            await generation.wait()


async def test_an_unconfirmed_cancel_ends_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "CANCEL_GRACE_S", 0.05)
    async with (
        scripted.serve(ScriptedInference(deaf_to_cancels)) as address,
        AsyncClient(address, "key") as client,
    ):
        async with client.generate("demo", "Hi") as generation:
            await anext(generation)

        with pytest.raises(IncompleteGeneration, match="did not confirm"):
            _ = generation.result
        with pytest.raises(DeadlineExceeded) as caught:
            await client.complete("demo", "Hi", timeout=0.05)
        assert caught.value.partial is not None
        assert caught.value.partial.usage is None, "unknown is not zero"


async def test_closing_the_client_settles_what_runs() -> None:
    async with scripted.serve(ScriptedInference(until_cancelled)) as address:
        async with AsyncClient(address, "key") as client:
            generation = client.generate("demo", "Hi")
            await anext(generation)

        assert generation.result.finish_reason is FinishReason.CANCELLED


async def test_a_closed_client_says_so() -> None:
    client = AsyncClient("127.0.0.1:1", "key")
    async with client:
        with pytest.raises(RuntimeError, match="open already"):
            await client.__aenter__()
    with pytest.raises(RuntimeError, match="is closed: make a new one"):
        await client.list_models()


async def test_closing_can_be_cancelled(no_tasks_left: None) -> None:
    """A server that never confirms does not delay it."""
    begun, leaving = asyncio.Event(), asyncio.Event()

    async def use(address: str) -> None:
        async with AsyncClient(address, "key") as client:
            client.generate("demo", "Hi").start()
            await begun.wait()
            leaving.set()

    async def script(stream: ServerStream) -> None:
        await stream.read_start()
        begun.set()
        await stream.read_cancel()
        await stream.read()  # never returns for this client

    async with scripted.serve(ScriptedInference(script)) as address:
        task = asyncio.create_task(use(address))
        await leaving.wait()
        await asyncio.sleep(0)
        task.cancel()
        ended = await asyncio.wait([task], timeout=CANCEL_GRACE_S * 5)

    assert (task.cancelled(), len(ended[1])) == (True, 0)


async def test_two_that_read_one_generation_get_each_delta_once() -> None:
    """Both readers see the end; a refused request is retried once, not by each reader."""
    texts, is_read = [str(number) for number in range(50)], asyncio.Event()

    async def read(generation: AsyncGeneration) -> list[str]:
        read = []
        async for delta in generation:
            is_read.set()
            read.append(delta.text)
        return read

    async def script(stream: ServerStream) -> None:
        refusal = scripted.status("UNAVAILABLE", "not now", "OVERLOADED", retry_after_s=0.01)
        await stream.send(scripted.failed((await stream.read_start()).request_id, refusal))
        start = await stream.read_start()
        for seq, text in enumerate(texts, 1):
            await stream.send(scripted.delta(start.request_id, seq, text))
            await is_read.wait()
        await stream.send(scripted.finished(start.request_id, len(texts)))
        await stream.read_to_end()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        generation = client.generate("demo", "Hi")
        one, other = await asyncio.gather(read(generation), read(generation))
        result = generation.result

    assert sorted(one + other, key=int) == texts
    assert result.text == "".join(texts)
