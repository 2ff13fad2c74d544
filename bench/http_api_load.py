"""Both ends of the wire for `bench.http_api`, in separate processes.

A client reads paced event streams of chats; an aiohttp server sends the same events at the same
pace without a backend.

    python -m bench.http_api_load client < LOAD.json
    python -m bench.http_api_load echo '{"step_s": …}'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from dataclasses import dataclass, field

from aiohttp import web

from bench.grpc_load import Stepped, run_end

LONG_TOKENS, PROBE_TOKENS, PROBES = 1500, 2, 4
CONTENT = b'"delta":{"content":'
FIRST = (
    b"data:"
    b' {"object":"chat.completion.chunk","id":"chatcmpl-6f1c0c9e2f6b5d0a9a543b1d9a1c7e10",'
    b'"created":1790000000,"model":"demo",'
)
EVENT = (
    FIRST + b'"service_tier":"default","system_fingerprint":null,'
    b'"choices":[{"index":0,"delta":{"content":" This"},"logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"  # end of a chunked body


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a client.

    `short_tokens` is the length of consecutive answers on each connection. With 0, answers are
    long, and probes follow beside them, as in `bench.grpc_load`. `whole` asks for unstreamed
    answers. `period_s` is the minimum time between the starts of two short answers; 0 for none.
    """

    host: str
    port: int
    model: str
    prompt: str
    api_key: str
    stream_count: int
    step_s: float
    warm_up_s: float
    seconds: float
    short_tokens: int = 0
    whole: bool = False
    period_s: float = 0.0


@dataclass(slots=True)
class Seen:
    """Measurements of a run after its warm-up. `ttft_ms` is that of the probes."""

    token_count: int = 0
    request_count: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Client:
    """HTTP client that holds all connections of one run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._seen = Seen()
        self._counting = False

    async def run(self) -> Seen:
        """Warm up, then count. Print a line when counting begins and when it ends."""
        load = self._load
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._ask_long()) for _ in range(load.stream_count)]
            await asyncio.sleep(1.0 + load.warm_up_s)
            self._counting, cpu = True, time.process_time()
            print("begin", flush=True)
            await asyncio.sleep(load.seconds)
            self._counting = False
            print("end", flush=True)
            self._seen.cpu_s = time.process_time() - cpu
            if not load.short_tokens:
                streams += [tasks.create_task(self._probe()) for _ in range(PROBES)]
                await asyncio.sleep(load.seconds)
            for stream in streams:
                stream.cancel()
        return self._seen

    async def _ask_long(self) -> None:
        """Request long answers, one after the other on one connection."""
        await asyncio.sleep(random.random())  # avoids one huge prefill
        reader, writer = await asyncio.open_connection(self._load.host, self._load.port)
        request = self._request(self._load.short_tokens or LONG_TOKENS)
        due = time.perf_counter()
        while True:
            due = max(due + self._load.period_s, time.perf_counter())
            writer.write(request)
            ended, tail = self._load.whole, b""
            if self._load.whole:
                await self._read_whole(reader)
            while not ended:
                data = tail + await self._read(reader)
                if self._counting:
                    self._seen.token_count += data.count(CONTENT)
                tail = data[-len(CONTENT) + 1 :]
                ended = data.endswith(END)
            self._seen.request_count += self._counting
            if (left_s := due - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)

    async def _probe(self) -> None:
        """Request short answers, one after the other, for the time to first token."""
        reader, writer = await asyncio.open_connection(self._load.host, self._load.port)
        request = self._request(PROBE_TOKENS)
        while True:
            # The last answer ended with a step.
            await asyncio.sleep(random.random() * self._load.step_s)
            sent_at, data, seen = time.perf_counter(), b"", False
            writer.write(request)
            while not data.endswith(END):
                data += await self._read(reader)
                if not seen and CONTENT in data:
                    seen = True
                    self._seen.ttft_ms.append((time.perf_counter() - sent_at) * 1000)

    async def _read_whole(self, reader: asyncio.StreamReader) -> None:
        """Read an unstreamed answer, which has a length."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if length is None or b" 200 " not in head[:16]:
            self._seen.failures.append(head[:300].decode(errors="replace"))
            raise ConnectionError(f"not a whole answer: {head[:300]!r}")
        await reader.readexactly(int(length[1]))

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        data = await reader.read(65_536)
        if not data or b'"error":{' in data:
            self._seen.failures.append(data[-300:].decode(errors="replace"))
            raise ConnectionError(f"the answer broke: {data[-300:]!r}")
        return data

    def _request(self, token_count: int) -> bytes:
        load = self._load
        messages = [{"role": "user", "content": load.prompt}]
        chat = {
            "model": load.model,
            "messages": messages,
            "stream": not load.whole,
            "ignore_eos": True,
        }
        body = json.dumps(chat | {"max_tokens": token_count}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: weir\r\nauthorization: Bearer"
            f" {load.api_key}\r\n"
        )
        return (
            f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )


class Echo(Stepped):
    """Server that answers each chat with one event per step, from the next step on."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one chat."""
        requested = json.loads(await request.read())
        await self._step.wait()  # the current step began before this chat
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(ConnectionError):  # the run is over
            await response.prepare(request)
            for _ in range(requested["max_tokens"]):
                await self._step.wait()
                await response.write(EVENT)
            await response.write(DONE)
            await response.write_eof()
        return response


async def serve_echo(step_s: float) -> None:
    """Serve until killed. The first line of the output is the port."""
    echo = Echo(step_s)
    server = await asyncio.get_running_loop().create_server(
        web.Server(echo.answer, access_log=None), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await echo.tick()


if __name__ == "__main__":
    run_end(lambda load: Client(Load(**load)).run(), serve_echo)
