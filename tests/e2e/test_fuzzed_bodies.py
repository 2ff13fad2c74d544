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
from tests.api.test_body_fuzz import SEED, fuzzed
from tests.api.test_growth import HTTP
from tests.service import Service, running

COUNT = int(os.environ.get("WEIR_FUZZ_SENT", "600"))
THREADS = 4
KEYS = 24  # the pace delays the next body of a key
TOKENS = 2000  # of each key: most of the time is for bodies, not for the model
ANSWER_S = 2.0  # a stream may wait for the client without an answer
WARM_SHARE = 5  # of the bodies are sent before the memory is measured
MEMORY_MIB_MAX = 48.0
OF_OURS = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"})


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
            assert response.status < 400 or answer["error"]["message"], text[:500]
        else:
            assert response.status == 200, text[:500]
            assert text.startswith((b"data: ", b"event: ")), text[:500]
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
    assert ends["200"] + ends["OK"] > COUNT // 20
