"""Both ends of the wire for `bench.http_peers`, in separate processes.

A client sends chats over HTTP; an upstream answers them token by token, and completions with token
ids as Weir's remote engines request them.

    python -m bench.http_peers_load client '{"ports": …}' | upstream '{"token_id": …}'
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import uvloop

MODEL = "bench"
TOKEN = " hotel"
# A chunk of a chat with text, or a whole chat with all tokens
FIRST_TEXT = re.compile(rb'"content":\s*"[^"]')
COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
RECORD_ID = re.compile(rb'"litellm_call_id":\s*"([0-9a-f-]{36})"')
WINDOW_TOKENS = 4096
TRIES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a client, whose connections are spread over `ports`. `body` has further parameters.

    In `mode` "rate", each connection sends consecutive requests for a time; in "burst", one
    request, all at once; in "delivered", consecutive requests until the connections break; in
    "first", `try_count` times so many requests at once of a new end user.
    `pause_s` is the pause before each request, `delivered_count` the number of complete responses
    before "delivered" counts.
    """

    ports: list[int]
    headers: dict[str, str]
    body: dict[str, Any]
    mode: str
    connection_count: int
    output_tokens: int
    prompt: str
    streams: bool = False
    warm_up_s: float = 1.0
    seconds: float = 4.0
    pause_s: float = 0.0
    delivered_count: int = 0
    try_count: int = 0


@dataclass(slots=True)
class Seen:
    """Measurements of a run: `request_count` and `ttft_ms` after the warm-up, `delivered` ids.

    `tries` has the statuses of each try of "first", 0 for a connection that broke.
    """

    request_count: int = 0
    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)
    tries: list[list[int]] = field(default_factory=list)


class Client:
    """HTTP client that holds all connections of one run."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._seen = Seen()
        self._counting = False
        self._has_delivered = asyncio.Event()
        chat = load.body | {
            "model": MODEL,
            "messages": [{"role": "user", "content": load.prompt}],
            "max_tokens": load.output_tokens,
            "stream": load.streams,
        }
        if load.streams:
            chat["stream_options"] = {"include_usage": True}
        self._body = json.dumps(chat).encode()
        lines = [f"{name}: {value}" for name, value in load.headers.items()]
        self._head = "\r\n".join(
            (
                "POST /v1/chat/completions HTTP/1.1",
                "host: 127.0.0.1",
                "content-type: application/json",
                f"content-length: {len(self._body)}",
                *lines,
            )
        )

    async def run(self) -> Seen:
        """Run the load. Print a line when counting begins and when it ends."""
        load = self._load
        if load.mode == "first":
            return await self._first_requests()
        opened = [
            await asyncio.open_connection("127.0.0.1", load.ports[index % len(load.ports)])
            for index in range(load.connection_count)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                if load.mode == "burst":
                    print("begin", flush=True)
                    for ends in opened:
                        tasks.create_task(self._ask(*ends))
                    return self._seen
                loops = [tasks.create_task(self._ask_on(*ends)) for ends in opened]
                await asyncio.sleep(load.warm_up_s)
                await self._has_delivered.wait()
                self._counting, begin = True, time.perf_counter()
                print("begin", flush=True)
                if load.mode == "rate":
                    await asyncio.sleep(load.seconds)
                    self._counting = False
                    print("end", flush=True)
                    self._seen.wall_s = time.perf_counter() - begin
                    for each in loops:
                        each.cancel()
        finally:
            for _, writer in opened:
                writer.close()
        return self._seen

    async def _first_requests(self) -> Seen:
        turn = asyncio.Semaphore(TRIES_AT_ONCE)

        async def one(number: int) -> None:
            async with turn:
                statuses = [self._status(f"user-{number}", number + i) for i in range(count)]
                self._seen.tries.append(await asyncio.gather(*statuses))
                if len(self._seen.tries) == self._load.try_count // 3:
                    print("begin", flush=True)

        count = self._load.connection_count
        await asyncio.gather(*map(one, range(self._load.try_count)))
        return self._seen

    async def _status(self, user: str, port_index: int) -> int:
        """Send one request of an end user on a connection of its own; return its status.

        If a process does not accept connections, the next one gets the request.
        """
        body = self._body[:-1] + f', "user": "{user}"}}'.encode()
        size = f"content-length: {len(self._body)}"
        head = self._head.replace(size, f"content-length: {len(body)}")
        ports = self._load.ports
        for port in ports[port_index % len(ports) :] + ports:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                continue
            with contextlib.closing(writer):
                try:
                    writer.write(f"{head}\r\n\r\n".encode() + body)
                    return (await read_response(reader))[0]
                except (ConnectionError, asyncio.IncompleteReadError):
                    return 0
        return 0

    async def _ask_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self._seen.failures:
                await asyncio.sleep(self._load.pause_s)
                await self._ask(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            if self._load.mode == "rate":
                self._seen.failures.append("the connection broke")
        finally:
            self._has_delivered.set()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request_id = str(uuid.uuid4())
        ids = f"x-request-id: {request_id}\r\nx-litellm-call-id: {request_id}"
        sent_at = time.perf_counter()
        writer.write(f"{self._head}\r\n{ids}\r\n\r\n".encode() + self._body)
        status, body, first_at = await read_response(reader)
        self._seen.statuses[status] = self._seen.statuses.get(status, 0) + 1
        if status != 200:
            if self._load.mode != "burst":
                self._seen.failures.append(body[:500].decode(errors="replace"))
            return
        found = COUNT.findall(body)
        if not found or int(found[-1]) != self._load.output_tokens:
            self._seen.failures.append(f"not {self._load.output_tokens} tokens: {body[-500:]!r}")
        self._seen.delivered.append(request_id)
        if len(self._seen.delivered) >= self._load.delivered_count:
            self._has_delivered.set()
        if self._counting:
            self._seen.request_count += 1
            self._seen.ttft_ms.append((first_at - sent_at) * 1000)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes, float]:
    """Read a response. Return status, body, and the time of the first text (or of the end).

    Raises: ConnectionError, asyncio.IncompleteReadError.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if length := re.search(rb"\r\ncontent-length: *(\d+)", head):
        return status, await reader.readexactly(int(length[1])), time.perf_counter()
    body, first_at = b"", 0.0
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
        if not first_at and FIRST_TEXT.search(body):
            first_at = time.perf_counter()
    await reader.readexactly(2)
    return status, body, first_at


def chunk(data: bytes) -> bytes:
    """Encode a chunk of a body with chunked transfer encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    """Encode a server-sent event as a chunk."""
    return chunk(b"data: %b\n\n" % json.dumps(value).encode())


def response(value: object) -> bytes:
    """Encode a whole response with its head."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


class Upstream(asyncio.Protocol):
    """Server side of one connection: OpenAI's chat and plain completions, one token per step.

    `POST /records` receives the records of LiteLLM's `generic_api` callback, which `GET /records`
    lists.
    """

    record_ids: ClassVar[set[str]] = set()

    def __init__(self, step_s: float, token_id: int) -> None:
        self._step_s = step_s
        self._token_id = token_id
        self._buffer = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            if b"\r\ntransfer-encoding: chunked" in head:
                found = dechunked(self._buffer, end + 4)
                if found is None:
                    return
                body, size = found
            else:
                length = re.search(rb"\r\ncontent-length: *(\d+)", head)
                size = end + 4 + (int(length[1]) if length else 0)
                if len(self._buffer) < size:
                    return
                body = bytes(self._buffer[end + 4 : size])
            del self._buffer[:size]
            self._serve(head.split(b" ", 2)[1], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        if path == b"/v1/chat/completions":
            self._chat(msgspec.json.decode(body))
        elif path == b"/v1/completions":
            self._complete(msgspec.json.decode(body))
        elif path == b"/records" and body:
            self.record_ids.update(each.decode() for each in RECORD_ID.findall(body))
            self._transport.write(response({}))
        elif path == b"/records":
            self._transport.write(response(sorted(self.record_ids)))
        else:
            cards = [{"id": MODEL, "object": "model", "max_model_len": WINDOW_TOKENS}]
            self._transport.write(response({"object": "list", "data": cards}))

    def _chat(self, requested: Mapping[str, Any]) -> None:
        count = requested["max_tokens"]
        common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": 1790000000, "model": MODEL}
        prompt_tokens = sum(len(each["content"].split()) for each in requested["messages"])
        if not requested.get("stream"):
            message = {"role": "assistant", "content": TOKEN * count}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            whole = {"object": "chat.completion", **common, "choices": [choice]}
            end = response(whole | usage(prompt_tokens, count))
            asyncio.get_running_loop().call_later(self._step_s * count, self._send, end)
            return
        common["object"] = "chat.completion.chunk"

        def part(reason: str | None) -> bytes:
            delta = {"role": "assistant", "content": TOKEN}
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return event({**common, "choices": [choice]})

        last = event({**common, "choices": []} | usage(prompt_tokens, count))
        self._stream(count, part(None), part("length") + last)

    def _complete(self, requested: Mapping[str, Any]) -> None:
        count = requested["max_tokens"]

        def part(reason: str | None) -> bytes:
            choice = {"text": TOKEN, "token_ids": [self._token_id], "finish_reason": reason}
            return event({"object": "text_completion", "choices": [{"index": 0, **choice}]})

        counts = usage(len(requested["prompt"]), count)
        if not requested.get("stream"):
            ids = [self._token_id] * count
            choice = {"index": 0, "text": TOKEN * count, "token_ids": ids}
            end = response({"choices": [choice | {"finish_reason": "length"}]} | counts)
            asyncio.get_running_loop().call_later(self._step_s * count, self._send, end)
            return
        last = event({"choices": []} | counts)
        self._stream(count, part(None), part("length") + last)

    def _stream(self, count: int, each: bytes, last: bytes) -> None:
        """Send one token per step, beginning after the first step."""
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        )
        end = last + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        loop, begin = asyncio.get_running_loop(), asyncio.get_running_loop().time()

        def send(number: int) -> None:
            self._send((head + b"\r\n" if number == 1 else b"") + (each if number < count else end))
            if number < count:
                loop.call_at(begin + self._step_s * (number + 1), send, number + 1)

        loop.call_at(begin + self._step_s, send, 1)

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def dechunked(data: bytearray, start: int) -> tuple[bytes, int] | None:
    """Decode a chunked body; return it with the position after it, or None until it is complete."""
    body = b""
    while (line_end := data.find(b"\r\n", start)) >= 0:
        size = int(data[start:line_end], 16)
        start, end = line_end + 2, line_end + 4 + size
        if len(data) < end:
            return None
        if not size:
            return body, end
        body += data[start : end - 2]
        start = end
    return None


def usage(prompt_tokens: int, count: int) -> dict[str, Any]:
    """Build the member `usage` of a response."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
    total = {"total_tokens": prompt_tokens + count, "prompt_tokens_details": {"cached_tokens": 0}}
    return {"usage": counts | total}


async def serve_upstream(step_s: float, token_id: int) -> None:
    """Serve until killed. The first line of the output is the port."""
    server = await asyncio.get_running_loop().create_server(
        lambda: Upstream(step_s, token_id), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Run the client or the upstream."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if sys.argv[1] == "upstream":
            runner.run(serve_upstream(**json.loads(sys.argv[2])))
        else:
            seen = runner.run(Client(Load(**json.loads(sys.argv[2]))).run())
            print(json.dumps(dataclasses.asdict(seen)))


if __name__ == "__main__":
    main()
