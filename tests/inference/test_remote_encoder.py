"""Remote encoder over both services: equal vectors, validated answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference import errors
from inference.adapters.remote_encoder import RemoteEncoder
from inference.adapters.remote_settings import RemoteSettings, Service
from inference.encoder.engine import EncoderSettings, TorchEncoder
from inference.engine import EmbeddingRequest, EngineState
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.encoder_checkpoints import (
    CLS,
    DIMENSION,
    INPUT_TOKENS_MAX,
    PLAIN_IDS,
    SEP,
    make_random_encoder,
)
from tests.inference.worker_engines import served, until
from tests.remote_servers.certificates import make_certificates
from tests.remote_servers.serving import ServerProcess, server_process

TEXTS = tuple(
    (CLS, *(PLAIN_IDS[(start + step) % len(PLAIN_IDS)] for step in range(start)), SEP)
    for start in range(1, 25)
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_encoder(tmp_path_factory.mktemp("encoder") / "checkpoint")


@pytest.fixture(scope="module")
def _process(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(
        directory, make_certificates(tmp_path_factory.mktemp("remote") / "certificates")
    ) as server:
        yield server


@pytest.fixture
def server(_process: ServerProcess) -> Iterator[ServerProcess]:
    """Yield a faultless server of both services that embeds."""
    _process.go_wrong()
    yield _process
    _process.go_wrong()


@pytest.fixture(params=[Service.TRTLLM, Service.VLLM, Service.SGLANG])
def settings(
    request: pytest.FixtureRequest, directory: Path, server: ServerProcess
) -> RemoteSettings:
    return settings_for(directory, server, Service(request.param))


def settings_for(
    directory: Path, server: ServerProcess, service: Service, **changes: Any
) -> RemoteSettings:
    """Return settings with short waits."""
    quick: dict[str, Any] = {
        "poll_interval_s": 0.05,
        "restart_delay_s_min": 0.05,
        "restart_delay_s_max": 0.2,
    }
    return RemoteSettings(
        directory=directory, name="far", target=server.target(service), **(quick | changes)
    )


async def test_vectors_are_those_of_our_encoder(settings: RemoteSettings, directory: Path) -> None:
    """Batching changes no more than the rounding of a matrix product."""
    here, far = (
        TorchEncoder(EncoderSettings(directory, "here", torch_thread_count=1)),
        RemoteEncoder(settings),
    )
    begun: list[int] = []
    async with served(here), served(far):
        expected = (await here.embed(EmbeddingRequest(TEXTS))).vectors
        reported = await far.embed(EmbeddingRequest(TEXTS, on_begin=lambda: begun.append(1)))

        assert far.statistics().prompt_token_count == sum(map(len, TEXTS))
        assert far.model.embedding_dimension == DIMENSION
        assert far.model.context_window_tokens == INPUT_TOKENS_MAX
        assert far.model.vocabulary_size == here.model.vocabulary_size
        assert far.model.architecture == here.model.architecture
    assert begun == [1]
    assert len(reported.vectors) == len(TEXTS)
    for vector, true in zip(reported.vectors, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(vector, true, strict=True)) < 1e-5


async def test_texts_in_flight_are_bounded_and_abandoned_texts_are_not_sent(
    directory: Path, server: ServerProcess
) -> None:
    encoder = RemoteEncoder(
        settings_for(
            directory,
            server,
            Service.VLLM,
            running_sequence_count_max=2,
            waiting_token_count_max=60,
        )
    )
    async with served(encoder):
        server.go_wrong("mute")
        before = server.state()["seen"]
        waiting = asyncio.create_task(encoder.embed(EmbeddingRequest(TEXTS)))
        await until(lambda: server.state()["seen"] == before + 2)
        assert encoder.statistics().waiting_sequence_count == len(TEXTS) - 2
        with pytest.raises(errors.EngineOverloaded) as overloaded:
            await encoder.embed(EmbeddingRequest(TEXTS[:1]))
        assert overloaded.value.retry_after_s > 0
        waiting.cancel()
        await asyncio.wait([waiting])
        server.go_wrong()
        assert len((await encoder.embed(EmbeddingRequest(TEXTS[:3], rank=1.0))).vectors) == 3
        assert server.state()["seen"] == before + 2 + 3, "what was cancelled was never sent"
        assert encoder.statistics().running_sequence_count == 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("short_vector", errors.EngineFailed),
        ("no_number", errors.EngineFailed),
        ("wrong_prompt", errors.EngineFailed),
        ("drop", errors.EngineFailed),
        ("refuse", errors.EngineOverloaded),
    ],
)
async def test_an_invalid_answer_fails_only_its_call(
    settings: RemoteSettings, server: ServerProcess, fault: str, error: Any
) -> None:
    encoder = RemoteEncoder(settings)
    async with served(encoder):
        server.go_wrong(fault)
        with pytest.raises(error):
            await encoder.embed(EmbeddingRequest(TEXTS[:4]))
        server.go_wrong()
        assert encoder.healthy()
        assert len((await encoder.embed(EmbeddingRequest(TEXTS[:4]))).vectors) == 4


async def test_a_text_that_could_never_be_is_refused_by_its_field(settings: RemoteSettings) -> None:
    impossible: list[tuple[tuple[tuple[int, ...], ...], str]] = [
        ((TEXTS[0], ()), "inputs[1]"),
        (((CLS,) * (INPUT_TOKENS_MAX + 1),), "inputs[0]"),
        (((10**6,),), "inputs[0]"),
    ]
    encoder = RemoteEncoder(settings)
    async with served(encoder):
        for texts, field in impossible:
            with pytest.raises(errors.RequestImpossible) as refused:
                await encoder.embed(EmbeddingRequest(texts))
            assert refused.value.field == field


async def test_an_unhealthy_server_fails_its_callers_and_is_used_again_when_healthy(
    settings: RemoteSettings, server: ServerProcess
) -> None:
    encoder = RemoteEncoder(settings)
    async with served(encoder):
        server.go_wrong("mute", "unhealthy")
        with pytest.raises(errors.EngineFailed, match="health"):
            await encoder.embed(EmbeddingRequest(TEXTS))
        assert encoder.condition().state in (EngineState.RESTARTING, EngineState.LOADING)
        with pytest.raises(errors.EngineUnavailable):
            await encoder.embed(EmbeddingRequest(TEXTS))
        server.go_wrong()
        await until(encoder.healthy)
        assert len((await encoder.embed(EmbeddingRequest(TEXTS))).vectors) == len(TEXTS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other_tokenizer", "differs from"),
        ("long_vector", "have length 1"),
        ("no_number", "test text"),
    ],
)
async def test_a_server_with_another_model_is_not_used(
    settings: RemoteSettings, server: ServerProcess, fault: str, message: str
) -> None:
    server.go_wrong(fault)
    encoder = RemoteEncoder(settings)
    async with served(encoder, started=False):
        with pytest.raises(errors.EngineStartFailed, match=re.escape(message)):
            await encoder.start()
        server.go_wrong()
        await until(encoder.healthy)


async def test_a_server_that_only_generates_is_not_used(
    tiny: TinyCheckpoint, directory: Path, remote_server: ServerProcess
) -> None:
    """Recognized by its model, or at the latest by the missing call."""
    encoder = RemoteEncoder(settings_for(directory, remote_server, Service.VLLM))
    async with served(encoder, started=False):
        with pytest.raises(errors.EngineError):
            await encoder.start()
