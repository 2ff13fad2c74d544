"""A server of OpenAI's completions that answers some requests in hostile ways.

    python -m bench.hostile_upstream [--style ids|counts|generate] [--vocabulary N] [--window N]

Prints `serving PORT`, and serves the model `tiny` until it is killed. A request whose prompt begins
as `marked` says is answered by one of `FORMS`; with `--rotate`, each request but those of probes by
the next one. Every other request gets valid tokens, one each `TOKEN_S`. Styles are those of
`inference.adapters.remote_http`: token ids, counts from usage only, or `/generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

MARK = (11, 13, 17)  # first tokens of a prompt that is answered by a form
FORM_BASE = 20  # of the token that names the form
TOKEN_S = 0.005
FIRST_ID, IDS = 10, 50  # tokens of valid answers, in rotation
MANY = 400  # pieces of 64 KiB: 25 MiB
PIECE = b"x" * 65536
SECRET = "password=hunter2 at 10.0.0.5"
KNOWN = frozenset(
    {
        *("model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "seed"),
        *("return_token_ids", "logprobs", "return_tokens_as_token_ids", "stop_token_ids"),
        *("ignore_eos", "min_tokens", "input_ids", "sampling_params"),
    }
)

DEEP = b"[" * 100_000 + b"]" * 100_000
EMPTY_EVENT = b'data: {"choices": []}\n\n'
NO_TOKENS = b'data: {"choices": [{"index": 0, "text": "", "token_ids": []}]}\n\n'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HARMLESS = ("bytes after the end",)  # forms that end well for the client


def marked(name: str, length: int = 8) -> tuple[int, ...]:
    """Build the prompt that is answered in this form."""
    return (*MARK, FORM_BASE + list(ALL).index(name), *range(30, 30 + length - 4))


class Answer:
    """Streamed answer to one request."""

    def __init__(self, http: web.Request, body: dict[str, Any], style: str) -> None:
        self.http = http
        self.style = style
        self.vocabulary_size: int = http.app["vocabulary"]
        sampling = body.get("sampling_params", body)
        self.count = int(sampling.get("max_new_tokens" if style == "generate" else "max_tokens", 1))
        self.prompt = body.get("input_ids") or body["prompt"]
        self.logprobs = body.get("logprobs")
        self.sent = 0
        self.text = ""
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def begin(self, **headers: str) -> None:
        """Send the response's head, unless it is sent already."""
        if not self._response.prepared:
            self._response.headers.update(headers)
            await self._response.prepare(self.http)

    async def write(self, data: bytes) -> None:
        """Send bytes as a part of the body."""
        await self.begin()
        await self._response.write(data)

    async def send(self, message: object) -> None:
        """Send a server-sent event. A message is encoded as JSON."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        await self.write(b"data: " + data + b"\n\n")

    def raw(self, data: bytes) -> None:
        """Send bytes in place of an HTTP response, and close the connection."""
        assert self.http.transport is not None
        self.http.transport.write(data)
        self.http.transport.close()

    def chunk(self, ids: list[Any], end: Any = None, **fields: Any) -> dict[str, Any]:
        """Build a message with tokens; its choice, or `/generate`'s message, gets the `fields`."""
        self.sent += len(ids)
        usage = self.usage()["usage"]
        if self.style == "generate":
            self.text += "a" * len(ids)
            meta = usage | {"cached_tokens": 0, "finish_reason": end}
            return {"text": self.text, "output_ids": ids, "meta_info": meta} | fields
        choice = {"index": 0, "text": "a" * len(ids), "finish_reason": end}
        if self.style == "counts":
            return {"choices": [choice | fields], "usage": usage}
        if self.logprobs is not None:
            choice["logprobs"] = self.known(ids)
        return {"choices": [choice | {"token_ids": ids} | fields]}

    def known(self, ids: list[Any]) -> dict[str, Any]:
        """Build the log-probabilities of tokens."""
        names = [f"token_id:{each}" for each in ids]
        tops = [{name: -0.5, "token_id:7": -1.5} for name in names]
        return {"tokens": names, "token_logprobs": [-0.5] * len(ids), "top_logprobs": tops}

    def usage(self, **changes: Any) -> dict[str, Any]:
        """Build the message with the usage."""
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": self.sent}
        if self.style != "generate":
            counts["prompt_tokens_details"] = {"cached_tokens": 0}  # type: ignore[assignment]
        return {"choices": [], "usage": counts | changes}

    async def tokens(self, count: int, *, end: bool = True, pause_s: float = 0.0) -> None:
        """Send valid tokens, one by one."""
        for index in range(count):
            is_last = end and index == count - 1
            await self.send(self.chunk([FIRST_ID + index % IDS], "length" if is_last else None))
            if pause_s:
                await asyncio.sleep(pause_s)

    async def finish(self, **usage: Any) -> None:
        """Send the usage, and the event that ends the stream."""
        if self.style != "generate":
            await self.send(self.usage(**usage))
        await self.send(b"[DONE]")


Form = Callable[[Answer], Awaitable[object]]


def ids(*token_ids: Any) -> Form:
    """Make a `Form` that sends these token ids first."""

    async def form(answer: Answer) -> None:
        await answer.tokens(2, end=False)
        await answer.send(answer.chunk(list(token_ids)))
        await answer.tokens(answer.count - 3)
        await answer.finish()

    return form


def raw_ids(text: bytes) -> Form:
    """Make a `Form` that sends a message with this text in place of the list of token ids."""

    async def form(answer: Answer) -> None:
        message = json.dumps(answer.chunk(["IDS"])).encode()
        await answer.send(message.replace(b'["IDS"]', text))
        await answer.tokens(answer.count - 1)
        await answer.finish()

    return form


def ending(reason: Any, **usage: Any) -> Form:
    """Make a `Form` that sends all tokens, and ends with this reason and a changed usage."""

    async def form(answer: Answer) -> None:
        await answer.tokens(answer.count - 1, end=False)
        last = answer.chunk([FIRST_ID], reason)
        if answer.style == "generate":
            last["meta_info"] |= usage
        await answer.send(last)
        await answer.finish(**usage)

    return form


def endless(data: bytes, begun: int = 0) -> Form:
    """Make a `Form` that sends bytes over and over, after some tokens."""
    piece = data * max(65536 // len(data), 1)

    async def form(answer: Answer) -> None:
        await answer.tokens(begun, end=False)
        while True:
            await answer.write(piece)

    return form


def once(data: bytes) -> Form:
    """Make a `Form` that sends bytes, then a valid answer."""

    async def form(answer: Answer) -> None:
        for first in range(0, len(data), 65536):
            await answer.write(data[first : first + 65536])
        await answer.tokens(answer.count)
        await answer.finish()

    return form


def status(code: int, body: bytes, **headers: str) -> Form:
    """Make a `Form` that answers with an HTTP status."""

    async def form(answer: Answer) -> web.Response:
        return web.Response(status=code, body=body, headers=headers)

    return form


def raw(data: bytes, times: int = 1) -> Form:
    """Make a `Form` that sends bytes in place of a valid response."""

    async def form(answer: Answer) -> None:
        answer.raw(data * times)

    return form


async def huge_error(answer: Answer) -> None:
    """Send an error with a large body."""
    answer._response.set_status(500)
    for _ in range(MANY * 4):
        await answer.write(PIECE)


async def compressed(answer: Answer) -> None:
    """Send a compressed body of zeros that is a thousand times larger when decompressed."""
    await answer.begin(**{"Content-Encoding": "gzip"})
    for _ in range(64):
        await answer.write(gzip.compress(bytes(1 << 20), 6))


async def unasked_ids(answer: Answer) -> None:
    """Send many more tokens than were asked for, at once."""
    await answer.send(answer.chunk([FIRST_ID] * 500_000))


async def tokens_without_end(answer: Answer) -> None:
    """Send tokens until the client closes the connection."""
    while True:
        await answer.send(answer.chunk([FIRST_ID]))


async def more_after_the_end(answer: Answer) -> None:
    """Send further tokens after the finish reason."""
    await answer.tokens(answer.count)
    await answer.tokens(3)
    await answer.finish()


async def second_output(answer: Answer) -> None:
    """Send tokens of an output that was not asked for."""
    message = answer.chunk([FIRST_ID], index=1)
    await answer.send({"choices": [{"index": 1, "text": "a"}]} | message)
    await answer.tokens(answer.count - 1)
    await answer.finish()


async def two_outputs(answer: Answer) -> None:
    """Send two outputs in one message."""
    choice = {"index": 0, "text": "a", "token_ids": [FIRST_ID], "finish_reason": None}
    await answer.send({"choices": [choice, choice | {"index": 1}]})


async def error_event(answer: Answer) -> None:
    """Send an error after some tokens."""
    await answer.tokens(3, end=False)
    await answer.send({"error": {"message": f"{SECRET}\x1b[2J\n", "code": 500}})


async def slow_drip(answer: Answer) -> None:
    """Send a byte from time to time, but never a token."""
    await answer.tokens(2, end=False)
    while True:
        await answer.write(b":")
        await asyncio.sleep(0.05)


async def silence(answer: Answer) -> None:
    """Send nothing more after some tokens."""
    await answer.tokens(2, end=False)
    await asyncio.Event().wait()


async def cut(answer: Answer) -> None:
    """Close the connection in the middle of a message."""
    await answer.tokens(2, end=False)
    await answer.write(b'data: {"choices": [')
    assert answer.http.transport is not None
    answer.http.transport.abort()


async def no_end(answer: Answer) -> None:
    """Close the stream without the event that ends it."""
    await answer.tokens(answer.count)


async def busy_after_the_end(answer: Answer) -> None:
    """Send a valid answer, and keep sending after its end."""
    await answer.tokens(answer.count)
    await answer.finish()
    while True:
        await answer.write(PIECE)


def logprobs(**changes: Any) -> Form:
    """Make a `Form` that sends other log-probabilities, or no tokens if none were requested."""

    async def form(answer: Answer) -> None:
        if answer.logprobs is None:
            await answer.send(b"[DONE]")
            return
        known = answer.known([FIRST_ID]) | changes
        message = json.dumps(answer.chunk([FIRST_ID], logprobs=known)).encode()
        await answer.send(message.replace(b'"BIG"', b"1e999"))
        await answer.tokens(answer.count - 1)
        await answer.finish()

    return form


# Answers of a server that is broken or hostile. Each must fail its own request only.
ALL: dict[str, Form] = {
    "a negative id": ids(-1),
    "a far negative id": ids(-(10**8)),
    "an id of 31 bits": ids(2**31),
    "an id of 40 bits": ids(2**40),
    "an id of 300 digits": ids(10**300),
    "an id of 5,000 digits": raw_ids(b"[" + b"9" * 5000 + b"]"),
    "a fraction as an id": raw_ids(b"[11.0]"),
    "a fraction with an exponent as an id": raw_ids(b"[1e1]"),
    "true as an id": raw_ids(b"[true]"),
    "a text as an id": raw_ids(b'["11"]'),
    "ids in an object": raw_ids(b'{"0": 11}'),
    "500,000 tokens at once": unasked_ids,
    "tokens without end": tokens_without_end,
    "tokens after the end": more_after_the_end,
    "a second output": second_output,
    "two outputs": two_outputs,
    "an unknown finish reason": ending("because"),
    "a finish reason of a megabyte": ending("b" * (1 << 20)),
    "a number as finish reason": ending(7),
    "another prompt length": ending("length", prompt_tokens=1),
    "a negative prompt length": ending("length", prompt_tokens=-5),
    "a negative count": ending("length", completion_tokens=-5),
    "a huge count": ending("length", completion_tokens=10**30),
    "a fraction as count": ending("length", completion_tokens=1.5),
    "text that is not UTF-8": once(b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n'),
    "half a surrogate pair": once(b'data: {"choices":[{"text":"\\ud800"}],"text":"\\ud800"}\n\n'),
    "deep lists": once(b'data: {"choices": ' + DEEP + b"}\n\n"),
    "deep unknown lists": once(b'data: {"other": ' + DEEP + b"}\n\n"),
    "no JSON": once(b"data: {choices}\n\n"),
    "a list as message": once(b"data: []\n\n"),
    "NaN": once(b'data: {"usage": {"prompt_tokens": NaN}}\n\n'),
    "many choices": once(b'data: {"choices": [' + b"{}," * 300_000 + b"{}]}\n\n"),
    "many equal keys": once(b"data: {" + b'"text":"a",' * 90_000 + b'"text":"a"}\n\n'),
    "a line of 25 MiB": once(b'data: {"choices": "' + b"y" * (25 << 20) + b'"}\n\n'),
    "a line without end": endless(b"y" * 65536),
    "empty events": endless(EMPTY_EVENT),
    "empty events after tokens": endless(EMPTY_EVENT, 3),
    "messages without tokens": endless(NO_TOKENS, 3),
    "comments": endless(b": keep-alive\n\n", 3),
    "empty lines": endless(b"\n", 3),
    "an error event": error_event,
    "status 400 with secrets": status(400, SECRET.encode()),
    "status 422 with secrets": status(422, b'{"error": {"message": "' + SECRET.encode() + b'"}}'),
    "status 400 with deep lists": status(400, b'{"error": ' + DEEP + b"}"),
    "status 401": status(401, SECRET.encode()),
    "status 429": status(429, SECRET.encode()),
    "status 500 with 100 MiB": huge_error,
    "status 204": status(204, b""),
    "a redirect": status(302, b"", Location="http://127.0.0.1:1/secret"),
    "gzip": compressed,
    "an unknown encoding": status(200, b"data: {}\n\n", **{"Content-Encoding": "weir"}),
    "no HTTP": raw(b"\x00\x01\x02" * 1000),
    "an endless header": raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * (4 << 20)),
    "many headers": raw(
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % each for each in range(20_000))
    ),
    "many interim responses": raw(b"HTTP/1.1 100 Continue\r\n\r\n", 40_000),
    "a wrong chunk": raw(OK + b"zz\r\nabc\r\n"),
    "a chunk of many digits": raw(OK + b"f" * 64 + b"\r\nabc\r\n"),
    "many small chunks": raw(OK + b"1\r\n:\r\n" * 400_000),
    "a slow drip": slow_drip,
    "silence": silence,
    "a cut connection": cut,
    "no last message": no_end,
    "no log-probability": logprobs(tokens=[], token_logprobs=[], top_logprobs=[]),
    "an infinite log-probability": logprobs(token_logprobs=["BIG"]),
    "a positive log-probability": logprobs(token_logprobs=[5.0]),
    "null as log-probability": logprobs(token_logprobs=[None]),
    "a top token of 5,000 digits": logprobs(top_logprobs=[{"token_id:" + "9" * 5000: -1.0}]),
    "a top token outside the vocabulary": logprobs(top_logprobs=[{"token_id:9999999": -1.0}]),
    "a top token without an id": logprobs(top_logprobs=[{"\u00b2": -1.0}]),
    "bytes after the end": busy_after_the_end,
}
FORMS = {name: form for name, form in ALL.items() if name not in HARMLESS}


async def complete(http: web.Request) -> web.StreamResponse:
    """Answer a completion request, in a hostile form if its prompt or the rotation selects one."""
    style = http.app["style"]
    body = await http.json()
    is_probe = http.headers.get("X-Request-Id", "").startswith("weir-probe")
    if (style == "generate") != (http.path == "/generate"):
        return web.json_response({"error": {"message": "not here"}}, status=400)
    if is_probe and set(body) - KNOWN:
        return web.json_response({"error": {"message": "unknown field"}}, status=400)
    answer = Answer(http, body, style)
    index = -1
    if http.app["rotates"] and not is_probe:
        index = next(http.app["rotation"]) % len(ALL)
    elif tuple(answer.prompt[: len(MARK)]) == MARK:
        index = answer.prompt[len(MARK)] - FORM_BASE
    with contextlib.suppress(ConnectionError):
        if index >= 0:
            found = await list(ALL.values())[index](answer)
            if isinstance(found, web.StreamResponse):
                return found
        else:
            await answer.tokens(answer.count, pause_s=0.0 if is_probe else TOKEN_S)
            await answer.finish()
    return answer._response


async def models(http: web.Request) -> web.StreamResponse:
    """Answer with the list of models."""
    if http.app["of_health"]:
        return await healthy(http)
    return web.json_response({"data": [{"id": "tiny", "max_model_len": http.app["window"]}]})


async def healthy(http: web.Request) -> web.StreamResponse:
    """Answer a health check."""
    if not (chosen := http.app["of_health"]):
        return web.Response()
    answer = Answer(http, {"prompt": [1], "max_tokens": 5}, http.app["style"])
    with contextlib.suppress(ConnectionError):
        found = await ALL[chosen[-1]](answer)
        if isinstance(found, web.StreamResponse):
            return found
    return answer._response


async def choose(http: web.Request) -> web.Response:
    """Set how the server answers requests for its health and models."""
    http.app["of_health"].append(await http.text())
    return web.Response()


async def serve(options: argparse.Namespace) -> None:
    """Serve until killed."""
    app = web.Application(client_max_size=1 << 26)
    app.update({"style": options.style, "rotates": options.rotate})
    app.update({"vocabulary": options.vocabulary, "window": options.window})
    app.update({"of_health": [], "rotation": itertools.count()})
    app.router.add_get("/health", healthy)
    app.router.add_put("/health", choose)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/generate", complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    print("serving", runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", choices=("ids", "counts", "generate"), default="ids")
    parser.add_argument("--vocabulary", type=int, default=1 << 17)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rotate", action="store_true")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
