"""A running server answers random HTTP bodies and gRPC messages, and blames the caller.

`WEIR_FUZZ_SENT=10000 python -m pytest tests/e2e/test_fuzzed_bodies.py -s` takes some minutes.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from metering.core.models import QuotaDimension
from tests.api.test_fuzzed_bodies import SEED, fuzzed
from tests.api.test_growth import HTTP
from tests.service import MODEL, Service, Tenant, log_events, running

COUNT = int(os.environ.get("WEIR_FUZZ_SENT", "600"))
THREADS = 4
KEYS = 24  # the pace delays the next body of a key
TOKENS = 2000  # of each key: most of the time is for bodies, not for the model
ANSWER_S = 2.0  # a stream may wait for the client without an answer
WARM_SHARE = 5  # of the bodies are sent before the memory is measured
MEMORY_MIB_MAX = 48.0
OF_OURS = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"})
SHAPES: list[Any] = [True, -1, 2**63, 0.5, "x", [], ["x"], {"x": 1}]
LIMITS = {  # of parameters, so that a body with any shape of another one is answered soon
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}
FORMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class Client:
    """Sends bodies on one HTTP connection and one channel."""

    def __init__(self, service: Service, secrets: Sequence[str]) -> None:
        host = service.openai_url.removeprefix("http://").partition("/")[0]
        self._http = http.client.HTTPConnection(host, timeout=120)
        self._channel = grpc.insecure_channel(service.address)
        self._secrets = itertools.cycle(secrets)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()
        self._channel.close()

    def send(self, path: str, body: bytes) -> str:
        """Send a body or message; return the status of a well-formed answer."""
        secret = next(self._secrets)
        return self._post(path, body, secret) if path in HTTP else self._call(path, body, secret)

    def _post(self, path: str, body: bytes, secret: str) -> str:
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        self._http.request("POST", path, body, headers)
        response = self._http.getresponse()
        text = response.read()
        assert 200 <= response.status < 500, (response.status, text[:500])
        if response.getheader("content-type") == "application/json":
            answer = json.loads(text)
            if response.status >= 400:
                check_error(path, answer)
        else:
            assert response.status == 200, text[:500]
            check_events(path, text)
        return str(response.status)

    def _call(self, path: str, message: bytes, secret: str) -> str:
        opened: Any = self._channel.stream_stream(path)
        metadata = (("authorization", f"Bearer {secret}"),)
        answers = opened(iter([message]), metadata=metadata, timeout=ANSWER_S)
        try:
            next(answers, None)
        except grpc.RpcError as error:
            status: Any = error
            assert status.code().name not in OF_OURS, (status.code(), status.details())
            return str(status.code().name)
        finally:
            answers.cancel()
        return "OK"


def check_error(path: str, answer: dict[str, Any]) -> None:
    """Check that an error has all fields that clients read."""
    error = answer["error"]
    assert error["message"], answer
    assert isinstance(error["type"], str)
    if path in FORMED:
        assert isinstance(error["code"], str)
        assert error["param"] is None or isinstance(error["param"], str)


def check_events(path: str, text: bytes) -> None:
    """Check that a stream ends with its end event, or with an error."""
    lines = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    assert events, text[:500]
    if events[-1].get("error") is not None:
        check_error(path, events[-1])
    elif lines[-1] != b"[DONE]":
        kind = events[-1]["type"].removeprefix("response.")
        assert kind in ("completed", "incomplete", "failed", "message_stop")


def incident_count(service: Service) -> int:
    """Return the number of errors of the service itself."""
    return len(log_events(service.log, "incident"))


def resident_mib(service: Service) -> float:
    status = Path(f"/proc/{service.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.fixture
def own_service(tmp_path: Path, database_url: str, model: Path) -> Iterator[Service]:
    """Yield a service whose prices and tenants no other test uses."""
    home = tmp_path / "home"
    home.mkdir()
    with running(Service(home, database_url, model)) as service:
        yield service


@pytest.mark.timeout(3000)
async def test_a_server_answers_random_bodies_and_stays_as_large(own_service: Service) -> None:
    tenants = [
        await own_service.tenant(
            {QuotaDimension.TOKENS_PER_MONTH: TOKENS}, scopes=("inference", "admin", "billing")
        )
        for _ in range(KEYS)
    ]
    secrets, bodies, ends = [each.secret for each in tenants], fuzzed(), Counter[str]()

    def send_all(indices: Iterator[int]) -> None:
        with Client(own_service, secrets) as client:
            for index in indices:
                path, body = bodies.body(index)
                try:
                    ends[client.send(path, body)] += 1
                except Exception as error:
                    raise AssertionError(f"{SEED}, {index}: {path}: {error!r}") from error

    async def send(first: int, end: int) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            loop = asyncio.get_running_loop()
            parts = [iter(range(first + each, end, THREADS)) for each in range(THREADS)]
            await asyncio.gather(*[loop.run_in_executor(threads, send_all, part) for part in parts])

    await send(0, COUNT // WARM_SHARE)
    before_mib = resident_mib(own_service)
    await send(COUNT // WARM_SHARE, COUNT)

    print(dict(ends), f"{before_mib:.0f} to {resident_mib(own_service):.0f} MiB")
    assert resident_mib(own_service) - before_mib <= MEMORY_MIB_MAX
    assert "Traceback" not in own_service.log
    assert incident_count(own_service) == 0
    for each in tenants:
        await own_service.no_hold_left(each)
    assert {"200", "400"} <= ends.keys()
    assert ends["200"] + ends["OK"] > COUNT // 20


@pytest.mark.parametrize("path", FORMED)
async def test_any_shape_of_a_parameter_is_answered(
    service: Service, tenant: Tenant, path: str
) -> None:
    _, kind, plain = HTTP[path]
    completion = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
    incidents = incident_count(service)

    def send_all() -> Counter[str]:
        ends = Counter[str]()
        with Client(service, [tenant.secret]) as client:
            ends[client.send("/v1/completions", json.dumps(completion).encode())] += 1
            for name, shape in itertools.product(kind.__struct_encode_fields__, SHAPES):
                body = {**plain, **LIMITS.get(path, {}), name: shape}
                ends[client.send(path, json.dumps(body).encode())] += 1
        return ends

    ends = await asyncio.to_thread(send_all)
    await service.no_hold_left(tenant)

    assert {"200", "400"} <= ends.keys() <= {"200", "400", "404", "409", "429"}
    assert ends["429"] < 10, "the pace of a key on a slow machine"
    assert incident_count(service) == incidents
