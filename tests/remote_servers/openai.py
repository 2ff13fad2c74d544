"""vLLM's `/v1/completions` on the torch engine: its rules, and its usage in the last message."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import grpc
import msgspec
from aiohttp import web

from inference import engine
from inference.adapters.torch_engine import TorchEngine
from tests.remote_servers.backend import Backend

REASONS = {
    engine.EngineFinishReason.STOP: "stop",
    engine.EngineFinishReason.LENGTH: "length",
    engine.EngineFinishReason.CANCELLED: "abort",
}
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 0,  # the connection breaks
}
RANGES = {
    "temperature": (0.0, 1e9),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 1e9),
    "logprobs": (0, 20),
    "max_tokens": (1, 1 << 31),
    "priority": (0, 0),  # without priority scheduling
}
ADAPTER = "tiny-adapter"


class Refused(Exception):
    """A request that is answered with an error. status 0: the connection breaks."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": "Error", "param": param, "code": status}


class Whole:
    """Stands for the response of a request without a stream, and joins its messages."""

    prepared = True

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    async def write(self, data: bytes) -> None:
        """Add an event of the stream."""
        payload = data.removeprefix(b"data: ").strip()
        if payload == b"[DONE]":
            return
        message, known = json.loads(payload), self.message
        if "error" in message:
            raise Refused(500, message["error"]["message"])
        if "meta_info" in message:
            if message["meta_info"]["finish_reason"] is None:
                message["output_ids"] = known.get("output_ids", []) + message["output_ids"]
            else:
                message["output_ids"] = known["output_ids"]
            known |= message
            return
        [choice] = message.pop("choices") or [{}]
        joined = known.setdefault("choices", [{}])[0]
        for name, value in choice.items():
            adds = (
                name in ("text", "token_ids", "reasoning", "reasoning_content") and name in joined
            )
            joined[name] = joined[name] + value if adds else value
        if "nvext" in message:
            before = known.get("nvext", {}).get("completion_token_ids", [])
            message["nvext"]["completion_token_ids"][:0] = before
        known |= message


class Context:
    """Stands for a gRPC context."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise Refused(STATUSES.get(code, 500), details)


class OpenAiServer:
    """The paths that Weir calls."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def start(self, port: int, tls: ssl.SSLContext) -> tuple[str, str]:
        """Serve; return the addresses without and with TLS."""
        check_key: Any = self._check_key
        app = web.Application(client_max_size=1 << 26, middlewares=[check_key])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/generate", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        plain = web.TCPSite(runner, "127.0.0.1", port)
        secure = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await plain.start()
        await secure.start()
        first, second = [f"127.0.0.1:{address[1]}" for address in runner.addresses]
        return first, second

    @web.middleware
    async def _check_key(
        self, http: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in http.headers.items()}
        if fault := self._backend.key_fault(headers):
            return web.json_response({"error": {"message": fault}}, status=401)
        return await handler(http)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if "unhealthy" in self._backend.faults else 200)

    async def _models(self, _: web.Request) -> web.Response:
        window = self._backend.engine.model.context_window_tokens
        cards = [
            {"id": "tiny", "max_model_len": window, "parent": None},
            {"id": ADAPTER, "parent": "tiny"},
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            body = await http.json()
            if ("generate" in self._backend.faults) != (http.path == "/generate"):
                raise Refused(400 if http.path != "/generate" else 404, "prompt must be a string")
            if http.path == "/generate":
                body = _completion_body(body)
            if "tenant_header" in self._backend.faults and "x-tenant-id" in http.headers:
                body["tenant"] = http.headers["x-tenant-id"]
            wanted = self._request(body)
            shown = {key: body[key] for key in body if key != "prompt"}
            self._backend.bodies.append(shown | {"headers": dict(http.headers)})
            if not body.get("stream"):
                if "only_streams" in self._backend.faults:
                    raise Refused(400, "stream must be true", "stream")
                whole = Whole()
                await self._stream(http, whole, body, wanted)  # type: ignore[arg-type]
                return web.json_response(whole.message)
            await self._stream(http, response, body, wanted)
        except Refused as refused:
            if refused.status == 0 and response.prepared:
                assert http.transport is not None
                http.transport.abort()
                return response
            if not response.prepared:
                status = refused.status or 503
                return web.json_response({"error": refused.error}, status=status)
            await _send(response, {"error": refused.error})
        return response

    async def _stream(
        self,
        http: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        wanted: engine.GenerationRequest,
    ) -> None:
        faults = self._backend.faults
        request_id = http.headers.get("X-Request-Id") or uuid.uuid4().hex
        prompt_tokens = len(wanted.prompt_token_ids) + ("wrong_prompt" in faults)
        options = (
            body.get("stream_options") or {} if body.get("stream") else {"include_usage": True}
        )
        cached = sent = thinking = 0
        if self._splits():
            wanted = replace(wanted, splits_reasoning=True)
        text = ""
        held: dict[str, Any] | None = None  # the last tokens come with the finish reason
        try:
            async for event in self._run(request_id, wanted, body):
                if not response.prepared:
                    await response.prepare(http)
                match event:
                    case engine.Scheduled():
                        cached = event.cached_token_count
                    case engine.TokensGenerated():
                        if held is not None:
                            await _send(response, held)
                        sent += len(event.token_ids)
                        # Without its marks, as vLLM counts it.
                        thinking += event.reasoning_token_count if event.reasoning else 0
                        held = self._chunk(body, event)
                        if "generate" in faults:
                            text += event.text
                            shown = self._backend.running_cached(cached)
                            held = _generated(text, event.token_ids, sent, prompt_tokens, shown)
                        if options.get("continuous_usage_stats") or "running_cached" in faults:
                            held["usage"] = {
                                "prompt_tokens": prompt_tokens,
                                "completion_tokens": sent,
                            }
                        if "running_cached" in faults:
                            shown = self._backend.running_cached(cached)
                            held["usage"]["prompt_tokens_details"] = {"cached_tokens": shown}
                    case engine.SequenceFinished() if "generate" in faults:
                        if held is not None:
                            await _send(response, held)
                            held["meta_info"]["finish_reason"] = REASONS[event.reason]
                            held["meta_info"]["cached_tokens"] = cached
                            await _send(response, held)
                        await response.write(b"data: [DONE]\n\n")
                    case engine.SequenceFinished():
                        held = held or self._chunk(body, engine.TokensGenerated((), ""))
                        held["choices"][0]["text"] += event.text
                        held["choices"][0]["finish_reason"] = REASONS[event.reason]
                        await _send(response, held)
                        usage: dict[str, Any] = {
                            "prompt_tokens": prompt_tokens,
                            "completion_tokens": event.generated_token_count,
                        }
                        if "overcount" in faults:
                            usage["completion_tokens"] = body["max_tokens"] + 1
                        if "undercount" in faults:
                            usage["completion_tokens"] = 1
                        if self._splits():
                            count = 0 if "reasoning_zero" in faults else thinking
                            count = sent + 1 if "reasoning_total" in faults else count
                            usage["completion_tokens_details"] = {"reasoning_tokens": count}
                        if "wrong_cached" in faults:
                            cached = len(wanted.prompt_token_ids) + 1
                        if "no_counts" not in faults and (cached or "no_zeros" not in faults):
                            usage["prompt_tokens_details"] = {"cached_tokens": cached}
                        if options.get("include_usage") and "no_usage" not in faults:
                            await _send(response, {"choices": [], "usage": usage})
                        await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionResetError):
            self._backend.abort(request_id)
            raise

    async def _run(
        self, request_id: str, wanted: engine.GenerationRequest, body: dict[str, Any]
    ) -> AsyncIterator[engine.Scheduled | engine.TokensGenerated | engine.SequenceFinished]:
        """Yield the events of an output. It ends with the token that completes a stop sequence."""
        stops = [] if "ignore stop" in self._backend.faults else body.get("stop") or []
        text, count, cached = "", 0, 0
        events = self._backend.run(request_id, wanted, Context())  # type: ignore[arg-type]
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, engine.Scheduled):
                    cached = event.cached_token_count
                if isinstance(event, engine.TokensGenerated):
                    before, text, count = text, text + event.text, count + len(event.token_ids)
                    if "early_stop" in self._backend.faults:
                        stops = [stop[:1] for stop in stops]
                    ends = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
                    if ends:
                        end, stop = min(ends)
                        end -= 0 if body.get("include_stop_str_in_output") else len(stop)
                        yield msgspec.structs.replace(event, text=text[len(before) : end])
                        prompt, timings = (
                            len(wanted.prompt_token_ids),
                            engine.EngineTimings(0, 0, 0),
                        )
                        reason = engine.EngineFinishReason.STOP
                        yield engine.SequenceFinished(reason, "", prompt, cached, count, timings)
                        return
                yield event

    def _splits(self) -> bool:
        return any(fault.startswith("reasoning_") for fault in self._backend.faults) and (
            "reasoning_parser" not in self._backend.faults
        )

    def _chunk(self, body: dict[str, Any], event: engine.TokensGenerated) -> dict[str, Any]:
        faults = self._backend.faults
        choice: dict[str, Any] = {"index": 0, "text": event.text, "finish_reason": None}
        if event.reasoning and "reasoning_hidden" not in faults:
            choice["reasoning" if "reasoning" in faults else "reasoning_content"] = event.reasoning
        if body.get("return_token_ids") and "no_ids" not in faults:
            choice["token_ids"] = event.token_ids
        if body.get("logprobs") is not None:
            choice["logprobs"] = _logprobs(event.logprobs)
        message: dict[str, Any] = {"choices": [choice]}
        extra_fields = (body.get("nvext") or {}).get("extra_fields") or ()
        if (
            "completion_token_ids" in extra_fields
            and "refuse return_token_ids" in faults
            and "no_ids" not in faults
        ):
            message["nvext"] = {"completion_token_ids": event.token_ids}
        return message

    def _request(self, body: dict[str, Any]) -> engine.GenerationRequest:
        faults = self._backend.faults
        assert isinstance(self._backend.engine, TorchEngine)
        if body["model"] not in ("tiny", ADAPTER):
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        options = body.get("stream_options") or {}
        for name in (
            *("return_token_ids", "min_p", "cache_salt", "structured_outputs"),
            "continuous_usage_stats",
        ):
            if (name in body or name in options) and f"refuse {name}" in faults:
                raise Refused(400, f"Unsupported parameter(s): {name}")
        if "cache_salt" in body.get("nvext", {}) and "refuse nvext.cache_salt" in faults:
            raise Refused(400, "Unsupported parameter(s): cache_salt")
        ignored = {name for name in body if f"ignore {name}" in faults}
        body = {name: value for name, value in body.items() if name not in ignored}
        for name, (least, most) in RANGES.items():
            if name == "priority" and "ranks" in faults:
                continue
            if body.get(name) is not None and not least <= body[name] <= most:
                raise Refused(400, f"{name} must be in [{least}, {most}]", name)
        prompt, max_tokens = body["prompt"], body.get("max_tokens", 16)
        if not prompt or not all(isinstance(each, int) and each >= 0 for each in prompt):
            raise Refused(400, "prompt must be token ids", "prompt")
        if len(prompt) + max_tokens > self._backend.engine.model.context_window_tokens:
            raise Refused(400, "the maximum context length is exceeded", "max_tokens")
        if body.get("min_tokens", 0) > max_tokens:
            raise Refused(400, "min_tokens must be at most max_tokens", "min_tokens")
        if body.get("stream_options") and not body.get("stream"):
            raise Refused(400, "stream_options need stream", "stream_options")
        salt = next(filter(None, map(body.get, ("tenant", "cache_salt", "extra_key"))), None)
        salt = salt or (body.get("nvext") or {}).get("cache_salt")
        if salt is not None and (
            not isinstance(salt, str) or not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0")
        ):
            raise Refused(400, "cache_salt must be at most 128 characters", "cache_salt")
        if body.get("logprobs") is not None and not body.get("return_tokens_as_token_ids"):
            raise Refused(400, "texts of tokens are not reported here", "logprobs")
        guides = body.get("structured_outputs") or {}
        response_format = None
        for name, kind in (
            ("json", engine.GrammarKind.JSON_SCHEMA),
            ("regex", engine.GrammarKind.REGEX),
        ):
            if name in guides:
                response_format = engine.ResponseFormat(kind, guides[name])
        # With a response format, the engine wants no stop ids beside the model's own, which are all
        # there are then.
        stop_ids = frozenset(body.get("stop_token_ids") or ())
        stop_ids = stop_ids if response_format is None else frozenset()
        sampling = engine.SamplingParams(
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            top_k=max(body.get("top_k", 0), 0),
            seed=body.get("seed"),
            min_p=body.get("min_p", 0.0),
            repetition_penalty=body.get("repetition_penalty", 1.0),
            presence_penalty=body.get("presence_penalty", 0.0),
            frequency_penalty=body.get("frequency_penalty", 0.0),
            logit_bias=tuple(
                (int(token), bias) for token, bias in (body.get("logit_bias") or {}).items()
            ),
            top_logprobs=body.get("logprobs"),
        )
        made = engine.GenerationRequest(
            tuple(prompt),
            sampling,
            engine.StopCriteria(
                max_tokens, (), stop_ids, body.get("ignore_eos", False), body.get("min_tokens", 0)
            ),
            "" if "unsalted" in faults else salt or "",
            response_format,
        )
        waits = "generate" not in faults or body.get("require_reasoning", False)
        return self._backend.held_back(made, waits=waits)


def _completion_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request of `/generate` as one of completions. Unknown fields are ignored."""
    sampling = body["sampling_params"]
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    names |= {name: name for name in (*RANGES, "stop", "stop_token_ids", "ignore_eos")}
    known = {names[name]: value for name, value in sampling.items() if name in names}
    if "regex" in sampling:
        known["structured_outputs"] = {"regex": sampling["regex"]}
    names_of_body = ("cache_salt", "extra_key", "require_reasoning")
    known |= {name: body[name] for name in names_of_body if name in body}
    return known | {"model": body["model"], "prompt": body["input_ids"], "stream": body["stream"]}


def _generated(
    text: str, token_ids: Sequence[int], sent: int, prompt_tokens: int, cached: int
) -> dict[str, Any]:
    """Return a message of `/generate`: all text so far, and the new token ids."""
    meta = {"prompt_tokens": prompt_tokens, "completion_tokens": sent, "cached_tokens": cached}
    return {"text": text, "output_ids": token_ids, "meta_info": meta | {"finish_reason": None}}


async def _send(response: web.StreamResponse, message: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


def _logprobs(reported: tuple[engine.TokenLogprobs, ...]) -> dict[str, Any]:
    return {
        "tokens": [f"token_id:{each.chosen.token_id}" for each in reported],
        "token_logprobs": [each.chosen.logprob for each in reported],
        "top_logprobs": [
            {f"token_id:{top.token_id}": top.logprob for top in (each.chosen, *each.top)}
            for each in reported
        ],
    }
