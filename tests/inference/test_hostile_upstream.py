"""Hostile answers of upstream servers: each fails its own request only, in bounded time and memory.

The servers run in processes of their own: `bench/hostile_upstream.py` over HTTP,
`tests/remote_servers/hostile.py` over gRPC.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import grpc
import pytest

from bench import hostile_upstream as http
from inference.adapters.remote_connection import open_dialect
from inference.adapters.remote_dialects import QUOTED_CHARS_MAX, ServerUnfit
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, Service, Target
from inference.engine import (
    GenerationRequest,
    SamplingParams,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed
from tests.growth import BLOCK_MAX_S, HOLD_MAX_S, LoopWatch
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.remote_engines import remote_engine
from tests.inference.running import make_request
from tests.inference.worker_engines import until
from tests.remote_servers import hostile as grpc_forms
from tests.remote_servers.serving import hostile_process

COUNT = 10
SILENT = ("silence", "a slow drip")  # end after a timeout, which passes beside the other forms
MEMORY_MAX_MIB = 64
BYSTANDER = make_request(tuple(range(40, 50)), 20)
Outcomes = dict[str, str]
Expected = dict[str, set[str]]

IDS = [name for name in http.FORMS if " id" in f" {name}"]
# All tokens are valid, and have been taken before the fault.
AFTER_ALL_TOKENS = (
    *("tokens without end", "a huge prompt length", "an unknown finish reason"),
    *("an empty finish reason", "a finish reason of a megabyte", "other last tokens"),
)
FAILED, FINISHED, EITHER = {"EngineFailed"}, {"finished"}, {"EngineFailed", "finished"}
OVER_HTTP = {
    **dict.fromkeys(http.FORMS, FAILED),
    **dict.fromkeys(http.HARMLESS, FINISHED),
    "status 400 with secrets": {"RequestImpossible"},
    "status 422 with secrets": {"RequestImpossible"},
    "status 400 with deep lists": {"RequestImpossible"},
    "status 429": {"EngineOverloaded"},
    # All tokens may have been taken before.
    **dict.fromkeys(("tokens without end", "tokens after the end", "no last message"), EITHER),
}
# Forms about fields that a style does not have.
BY_STYLE: dict[str, Expected] = {
    "ids": {},
    "counts": dict.fromkeys(IDS, EITHER),
    "generate": dict.fromkeys(("a second output", "two outputs"), EITHER),
}
OVER_GRPC = {
    **dict.fromkeys(grpc_forms.FORMS, FAILED),
    **dict.fromkeys(grpc_forms.HARMLESS, FINISHED),
    **dict.fromkeys(AFTER_ALL_TOKENS, EITHER),
    "more cached than sent": FINISHED,  # the first message's count is billed, not this one
    "INVALID_ARGUMENT": {"RequestImpossible"},
    "OUT_OF_RANGE": {"RequestImpossible"},
    "RESOURCE_EXHAUSTED": {"EngineOverloaded"},
}


def settings_for(tiny: TinyCheckpoint, service: Service, address: str) -> RemoteSettings:
    return RemoteSettings(
        directory=tiny.directory,
        name="tiny",
        target=Target(service, address, "tiny" if service.is_http else ""),
        share_prefixes=True,
        call_timeout_s=10.0,
        first_token_timeout_s=5.0,
        inter_token_timeout_s=5.0,
    )


@dataclass
class Heard:
    """Events of one request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: SequenceFinished | None = None
    error: EngineError | None = None

    def emit(self, event: object) -> None:
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
    engine.submit(request, heard.emit)
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
        self._before_mib = 0

    async def outcome(self, request: GenerationRequest) -> str:
        """Run a request; return the class of its end, or what else went wrong."""
        await self._begin()
        return await self._end(submitted(self._engine, request))

    async def outcome_of(self, heard: Heard) -> str:
        """Return the same of a request that runs already."""
        await self._begin()
        return await self._end(heard)

    async def _begin(self) -> None:
        reset_peak()
        self._before_mib = peak_mib()
        self._watch.restart()
        self._bystanders = [submitted(self._engine, BYSTANDER)]
        await until(lambda: len(self._bystanders[-1].ids) > 0)

    async def _end(self, heard: Heard) -> str:
        while not heard.is_over:
            await until(lambda: heard.is_over or self._bystanders[-1].is_over)
            if not heard.is_over:
                self._bystanders.append(submitted(self._engine, BYSTANDER))
        await until(lambda: self._bystanders[-1].is_over)
        wrong = [*self._wrong(heard, peak_mib() - self._before_mib)]
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
        if longest.seconds > HOLD_MAX_S:  # of copying and decoding by one call in C
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
            silent = {
                name: submitted(engine, requests[name]) for name in SILENT if name in requests
            }
            ends = {
                name: await trial.outcome(requests[name]) for name in requests if name not in silent
            }
            ends |= {name: await trial.outcome_of(heard) for name, heard in silent.items()}
            return ends


def request_for(name: str, prompt: tuple[int, ...]) -> GenerationRequest:
    """Return a request; with log-probabilities if the form is about them."""
    is_about = "probability" in name or "top token" in name
    sampling = SamplingParams(top_logprobs=2) if is_about else SamplingParams()
    return make_request(prompt, COUNT, sampling=sampling)


@pytest.mark.parametrize("style", BY_STYLE)
async def test_a_hostile_http_answer_fails_one_request(tiny: TinyCheckpoint, style: str) -> None:
    requests = {
        name: request_for(name, http.marked(name))
        for name in http.ALL
        if style == "ids" or request_for(name, (9,)).sampling.top_logprobs is None
    }
    options = ("--style", style, "--vocabulary", str(tiny.vocabulary_size))
    with hostile_process("bench.hostile_upstream", *options) as address:
        found = await outcomes(settings_for(tiny, Service.OPENAI_HTTP, address), requests)

    assert unexpected(found, OVER_HTTP | BY_STYLE[style]) == {}


@pytest.mark.parametrize("service", [Service.TRTLLM, Service.VLLM, Service.SGLANG])
async def test_a_hostile_grpc_answer_fails_one_call(tiny: TinyCheckpoint, service: Service) -> None:
    requests = {name: request_for(name, grpc_forms.marked(name)) for name in grpc_forms.ALL}
    with hostile_process("tests.remote_servers.hostile", str(tiny.vocabulary_size), "4096") as at:
        found = await outcomes(settings_for(tiny, service, at), requests)

    assert unexpected(found, OVER_GRPC) == {}


def unexpected(found: Outcomes, expected: Expected) -> Outcomes:
    """Return the outcomes that are not among the expected ones."""
    return {name: end for name, end in found.items() if end not in expected[name]}


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with hostile_process("bench.hostile_upstream") as address:
        yield address


@pytest.mark.parametrize("name", http.FORMS)
async def test_a_hostile_health_answer_or_model_list_is_bounded(
    tiny: TinyCheckpoint, upstream: str, name: str
) -> None:
    async with aiohttp.request("PUT", f"http://{upstream}/health", data=name) as answer:
        assert answer.ok
    settings = replace(settings_for(tiny, Service.OPENAI_HTTP, upstream), call_timeout_s=1.0)
    async with open_dialect(settings) as dialect:
        reset_peak()
        before_mib = peak_mib()
        with LoopWatch() as watch:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert len(await dialect.health_fault() or "") < 2 * QUOTED_CHARS_MAX
            with pytest.raises((ServerUnfit, grpc.aio.AioRpcError)):
                await dialect.facts()

        assert peak_mib() - before_mib < MEMORY_MAX_MIB
        assert watch.longest.seconds < BLOCK_MAX_S, watch.longest
