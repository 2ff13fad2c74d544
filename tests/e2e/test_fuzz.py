"""Any sequence of valid and invalid frames: each started request ends once, and nothing leaks."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weir.v1 import inference_service_pb2 as pb

from metering.core.models import QuotaDimension
from tests.service import CONTEXT_WINDOW_TOKENS, MODEL, Service, cancel, log_events, start

ACTS = 12  # per stream
IDS = 4  # few, so that ids are reused

texts = st.text(max_size=8)
numbers = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 30)
floats = st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf")])
samplings = st.builds(
    pb.Sampling,
    temperature=st.none() | floats,
    top_p=st.none() | floats,
    top_k=st.none() | numbers,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
prompts = st.one_of(
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"prompt": st.lists(st.integers(7, 399), min_size=1, max_size=20)}),
    st.fixed_dictionaries({"prompt": st.lists(numbers, min_size=1, max_size=5)}),
    st.builds(
        lambda turns: {"conversation": pb.Conversation(messages=turns)},
        st.lists(
            st.builds(pb.Message, role=st.sampled_from([0, 1, 2, 3]), content=texts), max_size=3
        ),
    ),
)
good = st.fixed_dictionaries(
    {"max_output_tokens": st.integers(1, 60) | st.just(CONTEXT_WINDOW_TOKENS - 200)}
)
any_start = st.builds(
    lambda prompt, rest: prompt | rest,
    prompts,
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.just(MODEL) | texts,
            "sampling": samplings,
            "stop_sequences": st.lists(texts, max_size=3),
            "max_output_tokens": st.integers(-1, 50) | st.none(),
            "ignore_eos": st.booleans(),
            "usage_interval_tokens": st.integers(-1, 20),
            "labels": st.dictionaries(texts, texts, max_size=2),
        },
    ),
)
acts = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "start", "cancel"]),
        st.integers(0, IDS - 1),
        good | any_start,
    ),
    min_size=1,
    max_size=ACTS,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(batches=st.lists(acts, min_size=1, max_size=3), hang_up=st.booleans())
def test_any_sequence_of_frames(
    service: Service, batches: list[list[tuple[str, int, dict[str, Any]]]], hang_up: bool
) -> None:
    asyncio.run(play(service, batches, hang_up))


async def play(
    service: Service, batches: list[list[tuple[str, int, dict[str, Any]]]], hang_up: bool
) -> None:
    """Send these frames on one stream, then close it in some way."""
    tenant = await service.tenant(
        {QuotaDimension.CONCURRENT_REQUESTS: 3, QuotaDimension.TOKENS_PER_MONTH: 6000}
    )
    incidents = len(log_events(service.log, "incident"))
    ids = [str(uuid.uuid4()) for _ in range(IDS)]
    started: set[str] = set()
    async with service.stream(tenant.secret) as stream:
        for batch in batches:
            frames = [
                cancel(ids[index]) if act == "cancel" else start(ids[index], **fields)
                for act, index, fields in batch
            ]
            started |= {frame.request_id for frame in frames if frame.HasField("start")}
            await stream.send(*frames)
        if hang_up:
            await stream.hang_up()
        else:
            if started:
                # Ends long requests; ended ones ignore it.
                await stream.cancel(*started)
            await stream.half_close()
            assert await stream.closed() is grpc.StatusCode.OK
            for request_id in started:
                assert_each_request_has_one_end(stream.frames[request_id])
    await service.no_hold_left(tenant)
    delivered = service.database.delivered(tenant)
    for request_id in ids:
        received = len(stream.token_ids(request_id))
        assert delivered.get(request_id, 0) >= received
        assert hang_up or delivered.get(request_id, 0) == received
    assert log_events(service.log, "incident")[incidents:] == []


def assert_each_request_has_one_end(frames: list[pb.ServerFrame]) -> None:
    """Check that between two ends there is at most one admission, and no output without one."""
    assert frames, "a request without an answer"
    open_ = False
    counts: Counter[str] = Counter()
    for frame in frames:
        kind = str(frame.WhichOneof("kind"))
        counts[kind] += 1
        if kind == "admitted":
            assert not open_, "two admissions without an end between them"
            open_ = True
        elif kind in ("delta", "usage", "finished"):
            assert open_, f"{kind} of a request that is not running"
        if kind == "finished" or (kind == "failed" and not frame.failed.duplicate_start):
            open_ = False
    assert not open_, "an admission without an end"
    assert counts["admitted"] >= counts["finished"]
