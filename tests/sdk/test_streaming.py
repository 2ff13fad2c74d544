"""One request and many: answers, their order, streams and messages."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2
from weir_client import (
    Admitted,
    AsyncClient,
    Delta,
    FinishReason,
    InvalidRequest,
    Message,
    Progress,
    Stage,
    UsageUpdate,
)
from weir_client.api_key import CurrentKey
from weir_client.stream import StreamConnection

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream

pytestmark = pytest.mark.usefixtures("no_tasks_left")


async def hello(stream: ServerStream) -> None:
    await scripted.answer(stream, "Hel", "lo")


async def test_tokens_arrive_one_by_one_and_the_result_sums_them_up() -> None:
    gate = asyncio.Event()

    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.send(
            scripted.admitted(request_id, 7, cached=4), scripted.delta(request_id, 1, "Hel")
        )
        await gate.wait()
        await stream.send(scripted.delta(request_id, 2, "lo"), scripted.finished(request_id, 2))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        async with client.generate("demo", "Hi") as generation:
            first = await anext(generation)
            gate.set()
            second = await anext(generation)
            rest = [delta async for delta in generation]

        result = generation.result
        assert (first.text, first.seq, first.token_ids) == ("Hel", 1, (1,))
        assert (second.text, rest) == ("lo", [])
        assert first.received_s <= second.received_s
        assert result.text == "Hello"
        assert result.token_ids == (1, 2)
        assert result.finish_reason == FinishReason.STOP
        assert result.usage.delivered_token_count == 2
        assert str(result.cost) == "0.00184 USD"
        assert result.timings.ttft_ms == 40
        assert result.request_id == generation.request_id
        assert result.admitted is not None
        assert result.admitted.predicted_cached_token_count == 4


async def test_fifty_requests_at_once_share_one_stream_and_one_message() -> None:
    async def script(stream: ServerStream) -> None:
        ids = [(await stream.read_start()).request_id for _ in range(50)]
        for seq in (1, 2, 3):
            await stream.send(*(scripted.delta(each, seq, f"{each[:4]}-{seq} ") for each in ids))
        await stream.send(*(scripted.finished(each, 3) for each in ids))
        await stream.read()

    server = ScriptedInference(script)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        results = await asyncio.gather(
            *(client.complete("demo", f"question {index}") for index in range(50))
        )

    assert len({result.request_id for result in results}) == 50
    for result in results:
        assert result.text == "".join(f"{result.request_id[:4]}-{seq} " for seq in (1, 2, 3))
    assert len(server.streams) == 1
    assert len(server.streams[0].messages) == 1, (
        "frames written at the same moment leave in one message"
    )


async def test_large_frames_are_split_over_messages() -> None:
    async def script(stream: ServerStream) -> None:
        for _ in range(3):
            await stream.send(scripted.finished((await stream.read_start()).request_id, 0))
        await stream.read()

    server = ScriptedInference(script)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        await asyncio.gather(*(client.complete("demo", "x" * 700_000) for _ in range(3)))

    assert [len(message.frames) for message in server.streams[0].messages] == [1, 1, 1]


async def test_many_frames_are_split_over_messages() -> None:
    """A thousand cancels at once; servers bound the frames of a message."""
    connection = StreamConnection(cast(Any, None), "", CurrentKey(""))
    sent = [
        pb.ClientFrame(request_id=str(number), cancel=pb.CancelFrame()) for number in range(1100)
    ]
    connection._outgoing.extend(sent)

    batches = []
    while connection._outgoing:
        batches.append(connection._next_batch())

    assert [len(batch) for batch in batches] == [500, 500, 100]
    assert [frame for batch in batches for frame in batch] == sent


async def test_a_request_larger_than_the_limit_is_refused_here_only() -> None:
    async with (
        scripted.serve(ScriptedInference(hello)) as address,
        AsyncClient(address, "key") as client,
    ):
        with pytest.raises(InvalidRequest, match="too large") as caught:
            client.generate("demo", "x" * 5_000_000)

        assert caught.value.reason == "MESSAGE_TOO_LARGE"
        assert caught.value.field_violations[0].field == "prompt"
        assert (await client.complete("demo", "Hi")).text == "Hello"


async def test_events_report_admission_progress_and_running_usage() -> None:
    async def script(stream: ServerStream) -> None:
        frame = await stream.read_start()
        request_id = frame.request_id
        assert frame.start.usage_interval_tokens == 1
        loading = pb.ProgressFrame(
            stage=pb.ProgressFrame.STAGE_ENGINE_LOADING,
            loading_fraction=0.25,
            loading_stage="weights",
        )
        loading.estimated_wait.FromMilliseconds(1500)
        running = pb.UsageFrame(usage=scripted.usage(1), cost=scripted.COST)
        await stream.send(
            scripted.admitted(request_id), pb.ServerFrame(request_id=request_id, progress=loading)
        )
        await stream.send(
            scripted.delta(request_id, 1, "a"), pb.ServerFrame(request_id=request_id, usage=running)
        )
        await stream.send(scripted.finished(request_id, 1))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        events = [
            event async for event in client.generate("demo", "Hi", usage_interval_tokens=1).events()
        ]

    assert [type(event) for event in events] == [Admitted, Progress, Delta, UsageUpdate]
    assert events[1] == Progress(Stage.ENGINE_LOADING, 0, 1.5, 0.25, "weights")


async def test_every_option_reaches_the_start_frame() -> None:
    starts: list[pb.ClientFrame] = []

    async def script(stream: ServerStream) -> None:
        starts.append(await stream.read_start())
        await stream.send(scripted.finished(starts[0].request_id, 0))
        await stream.read()

    request_id = str(uuid.uuid4())
    server = ScriptedInference(script)
    async with scripted.serve(server) as address, AsyncClient(address, "secret") as client:
        await client.complete(
            "demo",
            [{"role": "system", "content": "Be brief."}, Message("user", "Hi")],
            max_output_tokens=100,
            temperature=0.0,
            top_p=0.9,
            top_k=0,
            seed=7,
            stop="\n\n",
            ignore_eos=True,
            usage_interval_tokens=10,
            labels={"agent": "1"},
            request_id=request_id,
        )

    start = starts[0].start
    assert starts[0].request_id == request_id
    assert [(each.role, each.content) for each in start.conversation.messages] == [
        (pb.ROLE_SYSTEM, "Be brief."),
        (pb.ROLE_USER, "Hi"),
    ]
    assert start.max_output_tokens == 100
    assert start.ignore_eos is True
    assert start.usage_interval_tokens == 10
    assert start.sampling == pb.Sampling(temperature=0.0, top_p=0.9, top_k=0, seed=7)
    assert start.sampling.HasField("temperature"), "zero is not unset"
    assert start.sampling.HasField("top_k")
    assert list(start.stop_sequences) == ["\n\n"]
    assert dict(start.labels) == {"agent": "1"}
    assert server.metadata["authorization"] == "Bearer secret"


async def test_raw_text_and_token_ids_are_prompts_too() -> None:
    starts: list[pb.StartFrame] = []

    async def script(stream: ServerStream) -> None:
        while (frame := await stream.read()) is not None:
            starts.append(frame.start)
            await stream.send(scripted.finished(frame.request_id, 0))

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        await client.complete("demo", text="Once")
        await client.complete("demo", token_ids=[1, 2, 3])

    assert starts[0].text == "Once"
    assert list(starts[1].token_ids.ids) == [1, 2, 3]
    assert not starts[0].HasField("max_output_tokens")


async def test_a_prompt_that_cannot_be_written_down_is_refused_with_its_field() -> None:
    async with AsyncClient("127.0.0.1:1", "key") as client:
        with pytest.raises(InvalidRequest, match="exactly one of"):
            client.generate("demo")
        with pytest.raises(InvalidRequest, match="exactly one of"):
            client.generate("demo", "Hi", text="Hi")
        with pytest.raises(
            InvalidRequest,
            match=r"prompt\[0\].role: 'robot' is not one of system, developer, user, assistant",
        ):
            client.generate("demo", [{"role": "robot", "content": ""}])
        with pytest.raises(InvalidRequest, match=r"prompt\[0\]: needs content"):
            client.generate("demo", [{"role": "user"}])
        with pytest.raises(InvalidRequest, match="seed: "):
            client.generate("demo", "Hi", seed=2**70)


async def test_a_quota_that_runs_out_ends_the_answer_with_its_reason() -> None:
    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        frame = scripted.finished(request_id, 1, types_pb2.FINISH_REASON_QUOTA_EXHAUSTED)
        quota = types_pb2.QuotaStatus(
            quota_id="q",
            subject=types_pb2.QUOTA_SUBJECT_PROJECT,
            dimension=types_pb2.QUOTA_DIMENSION_TOKENS_PER_MINUTE,
            limit_value=1000,
            used_value=1000,
        )
        frame.finished.exhausted_quotas.append(quota)
        await stream.send(scripted.delta(request_id, 1, "a"), frame)
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        result = await client.complete("demo", "Hi")

    assert result.finish_reason is FinishReason.QUOTA_EXHAUSTED
    assert result.exhausted_quotas[0].dimension == "tokens-per-minute"
    assert result.exhausted_quotas[0].reset_time is None


async def test_the_result_of_a_running_request_cannot_be_read() -> None:
    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        await stream.read_cancel()
        await stream.send(scripted.finished(request_id, 0, types_pb2.FINISH_REASON_CANCELLED))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        async with client.generate("demo", "Hi") as generation:
            assert not generation.done
            with pytest.raises(RuntimeError, match="still runs"):
                _ = generation.result

        assert generation.result.finish_reason is FinishReason.CANCELLED


async def test_decoding_options_become_the_start_frame() -> None:
    server = ScriptedInference(hello)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        await client.complete(
            "demo",
            "Hi",
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            logit_bias={7: -100, 3: 2.5},
            stop_token_ids=[5],
            min_output_tokens=2,
            top_logprobs=4,
        )
        await client.complete("demo", "Hi", json_schema={"type": "null"})
        await client.complete("demo", "Hi", json_schema="true")
        await client.complete("demo", "Hi", regex="a+")
        await client.complete("demo", "Hi", lark='start: "a"')
        await client.complete(
            "demo", "Hi", beam_width=4, length_penalty=0.0, early_stopping="never", choice_count=2
        )
        with pytest.raises(InvalidRequest, match="tier"):
            await client.complete("demo", "Hi", tier="express")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="at most one"):
            await client.complete("demo", "Hi", regex="a", lark="b")
        with pytest.raises(InvalidRequest, match="only with beam_width"):
            await client.complete("demo", "Hi", early_stopping=True)

    starts = [frame.start for message in server.streams[0].messages for frame in message.frames]
    assert starts[0].sampling == pb.Sampling(
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias={7: -100.0, 3: 2.5},
    )
    assert list(starts[0].stop_token_ids) == [5]
    assert starts[0].min_output_tokens == 2
    assert starts[0].top_logprobs == 4
    assert not starts[0].HasField("response_format")
    search = starts.pop()
    assert search.beam_search == pb.BeamSearch(
        width=4, length_penalty=0.0, early_stopping=pb.EARLY_STOPPING_NEVER
    )
    assert search.choice_count == 2
    assert not starts[0].HasField("beam_search")
    assert [start.response_format for start in starts[1:]] == [
        pb.ResponseFormat(json_schema='{"type": "null"}'),
        pb.ResponseFormat(json_schema="true"),
        pb.ResponseFormat(regex="a+"),
        pb.ResponseFormat(lark='start: "a"'),
    ]


async def test_logprobs_reach_deltas_and_the_result() -> None:
    chosen, other = (
        pb.TokenLogprob(token_id=1, logprob=-0.5),
        pb.TokenLogprob(token_id=9, logprob=-0.25),
    )

    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        frame = scripted.delta(request_id, 1, "a")
        frame.delta.logprobs.append(pb.TokenLogprobs(chosen=chosen, top=[other, chosen]))
        await stream.send(frame, scripted.finished(request_id, 1))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        result = await client.complete("demo", "Hi", top_logprobs=2)

    [report] = result.logprobs
    assert (report.chosen.token_id, report.chosen.logprob) == (1, -0.5)
    assert [(each.token_id, each.logprob) for each in report.top] == [(9, -0.25), (1, -0.5)]


async def test_the_tier_and_the_start_timeout_are_sent() -> None:
    """Such a caller prefers an early refusal."""
    server = ScriptedInference(hello)
    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        await client.complete("demo", "Hi")
        await client.complete("demo", "Hi", timeout=30.0, tier="interactive")
        await client.complete("demo", "Hi", timeout=30.0, start_timeout=0.25, tier="batch")
        with pytest.raises(InvalidRequest, match="start_timeout: must be more than 0"):
            await client.complete("demo", "Hi", start_timeout=0.0)

    starts = [frame.start for message in server.streams[0].messages for frame in message.frames]
    assert [start.tier for start in starts] == [
        pb.SERVICE_TIER_UNSPECIFIED,
        pb.SERVICE_TIER_INTERACTIVE,
        pb.SERVICE_TIER_BATCH,
    ]
    assert [start.start_timeout.ToMilliseconds() for start in starts] == [0, 30_000, 250]
    assert not starts[0].HasField("start_timeout")
