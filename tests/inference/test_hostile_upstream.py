"""Hostile answers of upstream servers: each fails its own request only, in bounded time and memory.

The servers run in processes of their own: `bench/hostile_upstream.py` over HTTP,
`tests/remote_servers/hostile.py` over gRPC.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench import hostile_upstream as http
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, Service, Target
from inference.engine import (
    GenerationRequest,
    SamplingParams,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed
from tests.growth import BLOCK_MAX_S, LoopWatch
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.hosted import until
from tests.inference.remote_hosted import remote_engine
from tests.inference.running import make_request
from tests.remote_servers import hostile as grpc_forms

COUNT = 10
MEMORY_MAX_MIB = 64
BYSTANDER = make_request(tuple(range(40, 50)), 20)
Outcomes = dict[str, str]


@contextlib.contextmanager
def hostile_process(module: str, *options: str) -> Iterator[str]:
    """Run a hostile server; yield its address."""
    command = [sys.executable, "-m", module, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            word, port = process.stdout.readline().split()
            assert word == "serving"
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def settings_for(tiny: TinyCheckpoint, service: Service, address: str) -> RemoteSettings:
    return RemoteSettings(
        directory=tiny.directory,
        name="tiny",
        target=Target(service, address, "tiny" if service.is_http else ""),
        share_prefixes=True,
        call_timeout_s=10.0,
        first_token_timeout_s=2.0,
        inter_token_timeout_s=2.0,
    )


@dataclass
class Heard:
    """Events of one request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: SequenceFinished | None = None
    error: EngineError | None = None

    def tell(self, event: object) -> None:
        assert not self.is_over, f"{event} after the end"
        if isinstance(event, TokensGenerated):
            self.ids += event.token_ids
            self.text += event.text
        elif isinstance(event, SequenceFinished):
            self.finished = event
            self.text += event.text
        elif isinstance(event, EngineError):
            self.error = event

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.error is not None


def submitted(engine: RemoteEngine, request: GenerationRequest) -> Heard:
    heard = Heard()
    engine.submit(request, heard.tell)
    return heard


def peak_mib() -> int:
    """Return the peak of this process's memory since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Trial:
    """Hostile requests to an engine beside requests of a bystander."""

    def __init__(self, engine: RemoteEngine, expected: Heard, watch: LoopWatch) -> None:
        self._engine = engine
        self._expected = expected
        self._watch = watch
        self._connection = engine._connection
        self._bystanders: list[Heard] = []

    async def outcome(self, request: GenerationRequest) -> str:
        """Run a request; return the class of its end, or what else went wrong."""
        reset_peak()
        before_mib = peak_mib()
        self._watch.restart()
        self._bystanders = [submitted(self._engine, BYSTANDER)]
        await until(lambda: len(self._bystanders[-1].ids) > 0)
        heard = submitted(self._engine, request)
        while not heard.is_over:
            await until(lambda: heard.is_over or self._bystanders[-1].is_over)
            if not heard.is_over:
                self._bystanders.append(submitted(self._engine, BYSTANDER))
        await until(lambda: self._bystanders[-1].is_over)
        wrong = [*self._wrong(heard, peak_mib() - before_mib)]
        if self._engine._connection is not self._connection:
            wrong.append("the connection ended")
            await until(self._engine.healthy)
            self._connection = self._engine._connection
        end = "finished" if heard.error is None else type(heard.error).__name__
        return "; ".join(wrong) or end

    def _wrong(self, heard: Heard, more_mib: int) -> Iterator[str]:
        expected = self._expected
        for each in self._bystanders:
            if (each.error, each.ids, each.text) != (None, expected.ids, expected.text):
                yield f"a bystander got {len(each.ids)} tokens, {each.error!r}"
        if more_mib > MEMORY_MAX_MIB:
            yield f"{more_mib} MiB more"
        longest = self._watch.longest
        if longest.seconds > BLOCK_MAX_S:
            yield f"{longest.where} took {longest.seconds * 1e3:.0f} ms"
        if not isinstance(heard.error, EngineFailed) and "hunter2" in str(heard.error):
            yield f"a client is told {heard.error}"
        if heard.finished is not None and len(heard.ids) != COUNT:
            yield f"it finished after {len(heard.ids)} tokens"


async def outcomes(settings: RemoteSettings, requests: dict[str, GenerationRequest]) -> Outcomes:
    """Run requests by name; return how each ended, or what else went wrong."""
    async with remote_engine(settings) as engine:
        expected = submitted(engine, BYSTANDER)
        await until(lambda: expected.is_over)
        assert expected.finished is not None, expected.error
        with LoopWatch() as watch:
            trial = Trial(engine, expected, watch)
            return {name: await trial.outcome(request) for name, request in requests.items()}


def request_for(name: str, prompt: tuple[int, ...]) -> GenerationRequest:
    """Return a request; with log-probabilities if the form is about them."""
    is_about = "probability" in name or "top token" in name
    sampling = SamplingParams(top_logprobs=2) if is_about else SamplingParams()
    return make_request(prompt, COUNT, sampling=sampling)


OVER_HTTP = {
    **dict.fromkeys(http.FORMS, "EngineFailed"),
    **dict.fromkeys(http.HARMLESS, "finished"),
    "status 400 with secrets": "RequestImpossible",
    "status 422 with secrets": "RequestImpossible",
    "status 400 with deep lists": "RequestImpossible",
    "status 429": "EngineOverloaded",
}
# Forms about fields that the style does not have, or that it may contain.
BY_STYLE: dict[str, Outcomes] = {"ids": {}, "counts": {}, "generate": {}}


@pytest.mark.parametrize("style", BY_STYLE)
async def test_a_hostile_answer_over_http_fails_its_own_request_only(
    tiny: TinyCheckpoint, style: str
) -> None:
    requests = {
        name: request_for(name, http.marked(name))
        for name in http.ALL
        if style == "ids" or request_for(name, (9,)).sampling.top_logprobs is None
    }
    options = ("--style", style, "--vocabulary", str(tiny.vocabulary_size))
    with hostile_process("bench.hostile_upstream", *options) as address:
        found = await outcomes(settings_for(tiny, Service.OPENAI_HTTP, address), requests)

    expected = OVER_HTTP | BY_STYLE[style]
    assert found == {name: expected[name] for name in requests}


OVER_GRPC = {
    **dict.fromkeys(grpc_forms.FORMS, "EngineFailed"),
    **dict.fromkeys(grpc_forms.HARMLESS, "finished"),
    "INVALID_ARGUMENT": "RequestImpossible",
    "OUT_OF_RANGE": "RequestImpossible",
    "RESOURCE_EXHAUSTED": "EngineOverloaded",
}
BY_SERVICE: dict[Service, Outcomes] = {
    Service.TRTLLM: {},
    Service.VLLM: {},
    Service.SGLANG: {},
}


@pytest.mark.parametrize("service", BY_SERVICE)
async def test_a_hostile_answer_over_grpc_fails_its_own_request_only(
    tiny: TinyCheckpoint, service: Service
) -> None:
    requests = {name: request_for(name, grpc_forms.marked(name)) for name in grpc_forms.ALL}
    with hostile_process("tests.remote_servers.hostile", str(tiny.vocabulary_size), "4096") as at:
        found = await outcomes(settings_for(tiny, service, at), requests)

    assert found == OVER_GRPC | BY_SERVICE[service]
