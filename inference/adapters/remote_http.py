"""HTTP dialect: OpenAI's `/v1/completions`, or SGLang's `/generate`, with prompts as token ids.

Each sequence is one streamed request; closing it aborts the sequence. Failures are reported with
the status that a gRPC service would send.

Tenants are separated by a salt, in the fields that the server accepts (`_SALT_NAMES`).

Known behaviour of vLLM 0.32: unknown fields are ignored; cached tokens are reported with
`--enable-prompt-tokens-details` only, in the last message; end tokens are in the output; without
priority scheduling, any `priority` but 0 is refused. NVIDIA Dynamo 1.6: unknown fields are refused;
token ids are an extension; usage is reported while streaming. SMG 1.13: completions take text only;
`/generate` ignores unknown fields, and its last message repeats the last ids. Other servers refuse
or ignore other fields, so `ServerProbe` tests each one, by its effect where a short output
shows it.

Stop sequences are sent where a test shows that the server's output ends with the token that
completes one, since only the end of an output tells its cached tokens (`RequestForm.sent_stops`).

Servers without token ids: outputs are counted from the usage, if possible of each message. Without
it, a message with text counts as one token until the last message, whose usage is final.

Answers are read in small pieces: uncompressed, without redirects, at most `message_bytes_max` bytes
from one new token to the next, so that no answer holds the event loop or grows in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import re
import ssl
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any

import grpc
import msgspec
from aiohttp.http import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage

from inference.adapters.external_request import Choice, Output
from inference.adapters.remote_dialects import (
    FACTS_BYTES_MAX,
    FIELDS,
    LOGIT_BIAS_MAX,
    MESSAGE_BYTES_BASE,
    QUOTED_CHARS_MAX,
    SMALL_ANSWER_BYTES_MAX,
    Dialect,
    ServerFacts,
    ServerUnfit,
    check_end,
    check_length,
    check_prompt_count,
    check_room,
    constrains_after_thinking,
    finish_reason,
    message_bytes_max,
    quoted,
    sampling_fields,
    wire_seed,
)
from inference.adapters.remote_http_connection import Connection, Connections, Server
from inference.adapters.remote_settings import RemoteSettings, Service, masked
from inference.capabilities import EMBEDDED_ONLY, Capabilities
from inference.engine import GrammarKind, TokenLogprob
from inference.errors import EngineFailed
from inference.sequences import UNKNOWN_TOKEN_ID, RequestField
from inference.text.reasoning import Split

TOKEN_ID_DIGITS_MAX = 10
PRIORITY_MAX = 2**53  # exact in every JSON reader
TOP_LOGPROBS = (20, 5)  # limits to try: vLLM's default, OpenAI's
PROBE_PROMPT_TOKENS = 16
PROBE_TOKENS = 4
GUIDED_TOKENS = 16  # enough for a few characters, even one by one
PROBE_COUNT = 3  # repetitions of tests that equal logits or rounding may fail
WHOLE_TOKENS_MAX = 4096  # of an answer without a stream: its text and ids fit one message
STOPS_MAX = 4  # OpenAI's limit, which some servers check

COMPLETIONS, GENERATE = "/v1/completions", "/generate"
# Requests for token ids, by path and fields: of vLLM, of NVIDIA Dynamo, of SMG and SGLang.
_ID_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"return_token_ids": True}),
    (COMPLETIONS, {"nvext": {"extra_fields": ["completion_token_ids"]}}),
    (GENERATE, {"stream": True}),
)
TENANT_HEADER = "x-tenant-id"  # of NVIDIA Dynamo, which prefers it to fields; ignored elsewhere
SALT_PROMPT_TOKENS = 257
# Fields of a salt to try: of NVIDIA Dynamo, of vLLM, of SGLang and of Dynamo before SGLang.
_SALT_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "nvext": (("nvext", "cache_salt"), ("nvext",), ("cache_salt",)),
    COMPLETIONS: (("cache_salt",),),
    GENERATE: (("extra_key", "cache_salt"), ("extra_key",), ("cache_salt",)),
}
# Names of `/generate` for the fields of completions; others are ignored there.
_OF_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
} | {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "logit_bias", "stop_token_ids", "ignore_eos"),
        "stop",
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    )
}
# Their effect is visible in token ids only, or they have token ids as values.
_NEEDS_IDS = frozenset(
    {
        RequestField.LOGIT_BIAS,
        RequestField.TOP_LOGPROBS,
        RequestField.STOP_TOKEN_IDS,
        RequestField.MIN_OUTPUT_TOKENS,
    }
)
_USAGE = {"include_usage": True}
_USAGE_OF_EACH = {"include_usage": True, "continuous_usage_stats": True}
_NO_COUNTS = (
    "the server does not report cached prompt tokens, so that shared prefixes would be unnoticed:"
    " enable the report (vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report), or"
    " set WEIR_REMOTE_SHARE_PREFIXES=1 if your tenants may share them"
)

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_TOPS = msgspec.json.Decoder(list[dict[str, float] | None] | None)
# JSON that is not as expected; nested too deeply; text that is not UTF-8.
_INVALID = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class HttpFailure(grpc.aio.AioRpcError):
    """Failure of a request. `field` is the start frame's field that the server names, if any."""

    def __init__(self, code: grpc.StatusCode, details: str, field: str | None = None) -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), masked(details))
        self.field = field


class _Logprobs(msgspec.Struct):
    """Log-probabilities of some tokens. Tokens are written as `token_id:ID`.

    `top_logprobs` has one undecoded mapping from token to log-probability for each token.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    """New output of a choice. Thinking that the server has split off is in `reasoning` (vLLM) or
    `reasoning_content` (SGLang and DeepSeek).
    """

    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def thought(self) -> str:
        """Thinking in this message. A server may send it under both names."""
        return self.reasoning_content or self.reasoning or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _OutputDetails | None = None
    reasoning_tokens: int | None = None  # of SGLang

    @property
    def thinking_token_count(self) -> int | None:
        """Number of output tokens that are thinking; None if the server does not report it."""
        details = self.completion_tokens_details
        return self.reasoning_tokens if details is None else details.reasoning_tokens

    @property
    def cached_token_count(self) -> int | None:
        """Number of cached prompt tokens; None if the server does not report it."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Problem(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _Extension(msgspec.Struct):
    """Fields that NVIDIA Dynamo adds to a message."""

    completion_token_ids: list[int] | None = None


class _Reason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    """State of an output of `/generate`. `finish_reason` is a word, or an object with a `type`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | _Reason | None = None


class _Event(msgspec.Struct):
    """Event of a stream, or an error response. `/generate` sends text, output_ids and meta_info.

    `choices` stays undecoded, since thousands of them would take as many objects.
    """

    choices: msgspec.Raw = msgspec.Raw(b"[]")
    usage: _Usage | None = None
    error: _Problem | None = None
    nvext: _Extension | None = None
    text: str = ""
    output_ids: list[int] = []
    meta_info: _Meta | None = None


class _Message(msgspec.Struct):
    """New output of a request, and its usage if the server sent it."""

    part: _Part
    usage: _Usage | None = None


class _Card(msgspec.Struct):
    """Model that a server offers. `parent` is the base model of an adapter."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_EVENTS = msgspec.json.Decoder(_Event)
_CHOICES = msgspec.json.Decoder(tuple[_Part])


def _failure(status: int, body: bytes) -> HttpFailure:
    try:
        problem = _EVENTS.decode(body).error
    except _INVALID:
        problem = None
    problem = problem or _Problem(body.decode(errors="replace"))
    return HttpFailure(
        _CODES.get(status, grpc.StatusCode.INTERNAL),
        f"HTTP {status}: {masked(problem.message)[:QUOTED_CHARS_MAX]}",
        FIELDS.get(problem.param or ""),
    )


def _check_encoding(head: RawResponseMessage) -> None:
    """Raise HttpFailure for a compressed answer: a few bytes of it may become gigabytes."""
    encoding = head.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise HttpFailure(
            grpc.StatusCode.INTERNAL,
            f"the answer has Content-Encoding {quoted(encoding)}, but identity was asked for: turn"
            " compression off on the server or its proxy",
        )


async def _beginning(
    connection: Connection, head: RawResponseMessage, bytes_max: int = SMALL_ANSWER_BYTES_MAX
) -> bytes:
    """Read a body, or its first `bytes_max` bytes and one piece more."""
    _check_encoding(head)
    body = bytearray()
    while len(body) <= bytes_max and (piece := await connection.read()):
        body += piece
    return bytes(body)


@contextlib.asynccontextmanager
async def open_connections(settings: RemoteSettings) -> AsyncIterator[Connections]:
    """Open a pool of connections; the first request connects. Raises: ServerUnfit."""
    target, tls, context = settings.target, settings.tls, None
    if target.service is Service.OPENAI_HTTPS:
        try:
            context = ssl.create_default_context(cafile=None if tls is None else tls.authority)
            if tls is not None and tls.certificate is not None:
                context.load_cert_chain(tls.certificate, tls.key)
        except OSError as error:
            raise ServerUnfit(f"a certificate file cannot be read: {error}") from error
    host, _, port = target.address.rpartition(":")
    name = None if tls is None else tls.server_name or None
    server = Server(host.strip("[]"), int(port), settings.call_timeout_s, context, name)
    connections = Connections(server)
    try:
        yield connections
    finally:
        connections.close()


class RequestForm:
    """Form of the requests that a server accepts, and builder of such requests.

    `id_fields` are of `_ID_REQUESTS`; empty if the server reports no token ids. `salt_names` are of
    `_SALT_NAMES`.
    """

    def __init__(self, settings: RemoteSettings) -> None:
        self.model = settings.target.model or settings.name
        self.path = COMPLETIONS
        self.id_fields: dict[str, Any] = {}
        self.salt_names: tuple[str, ...] = ()
        self.usage_options = _USAGE
        self.carries_salt = True
        self.sends_priority = self.sends_stops = self.answers_whole = False
        self._settings = settings

    def may_answer_whole(self, choice: Choice) -> bool:
        """Return whether one message at the end has the same output as a stream would have.

        Not if Weir finds an end that the server does not know, or counts thinking by messages.
        """
        request, is_split = choice.request.generation, not self.id_fields and choice.splits_text
        return (
            request.is_whole
            and self.answers_whole
            and choice.token_count_max <= WHOLE_TOKENS_MAX
            and request.sampling.top_logprobs is None
            and not (request.stop.stop_sequences and not self.sent_stops(choice))
            and not (choice.request.answer_end_token_ids or is_split)
        )

    def encoded(self, request_id: str, body: dict[str, Any]) -> bytes:
        """Build the request for an output."""
        tenant = body.pop(TENANT_HEADER, "")
        sent = body if self.path == COMPLETIONS else _generate_body(body)
        return self.request("POST", self.path, msgspec.json.encode(sent), request_id, tenant)

    def request(
        self, method: str, path: str, body: bytes = b"", request_id: str = "", tenant: str = ""
    ) -> bytes:
        """Build a request. `tenant` separates prefixes on servers that read it from a header."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._settings.target.address}",
            "Accept: */*",
            "Accept-Encoding: identity",
            "User-Agent: weir",
        ]
        if self._settings.key is not None:
            lines += [f"{name}: {value}" for name, value in self._settings.key.header().items()]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            lines.append(f"X-Request-Id: {request_id}")
        if tenant:
            lines.append(f"{TENANT_HEADER}: {tenant}")
        return "\r\n".join((*lines, "", "")).encode() + body

    def salted(self, salt: str) -> dict[str, Any]:
        """Build the fields that separate prefixes; all of them have the same value."""
        fields: dict[str, Any] = dict.fromkeys((TENANT_HEADER, *self.salt_names), salt)
        if "nvext" in fields:
            fields["nvext"] = {**self.id_fields["nvext"], "cache_salt": salt}
        return fields

    def base(
        self, prompt: tuple[int, ...], max_tokens: int, *, is_whole: bool = False
    ) -> dict[str, Any]:
        """Build the fields that every request for an output has."""
        streamed = {} if is_whole else {"stream_options": self.usage_options}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            **self.id_fields,
            "stream": not is_whole,
            **streamed,
        }

    def body(self, choice: Choice, unsupported: frozenset[RequestField]) -> dict[str, Any]:
        """Build a request without the fields that the server does not support.

        All others are explicit, since servers have different defaults.
        """
        request = choice.request.generation
        sampling = request.sampling
        body = self.base(choice.sent_token_ids, choice.token_count_max, is_whole=choice.is_whole)
        body |= sampling_fields(choice, unsupported)
        if sampling.temperature > 0 and RequestField.SEED not in unsupported:
            body["seed"] = wire_seed(choice.seed)
        if sampling.logit_bias and RequestField.LOGIT_BIAS not in unsupported:
            body["logit_bias"] = dict(sampling.logit_bias)
        if sampling.top_logprobs is not None:
            body["return_tokens_as_token_ids"] = True
            if RequestField.TOP_LOGPROBS not in unsupported:
                body["logprobs"] = sampling.top_logprobs
        if stops := self.sent_stops(choice):
            body |= self.stopping(stops)
        if request.response_format is not None:
            kind = request.response_format.kind
            name = "json" if kind is GrammarKind.JSON_SCHEMA else "regex"
            body["structured_outputs"] = {name: request.response_format.source}
            if self.path == GENERATE:
                body["require_reasoning"] = constrains_after_thinking(choice)
        if request.cache_salt and self.carries_salt:
            # Hashed: servers limit the length and the characters.
            body |= self.salted(hashlib.sha256(request.cache_salt.encode()).hexdigest())
        if self.sends_priority:
            body["priority"] = round(min(max(choice.rank, -PRIORITY_MAX), PRIORITY_MAX))
        return body

    def sent_stops(self, choice: Choice) -> list[str]:
        """Select the stop sequences to send: all of them, or none if the server could find a
        different end than Weir does.

        A server searches the thinking too, reads control tokens in a stop sequence as text, finds
        one that begins before the minimum output, and treats the end of a prompt that ends within a
        character as output.
        """
        stop, text = choice.request.generation.stop, choice.detokenizer
        differs = isinstance(text, Split) or text.marks or text.is_torn or stop.min_output_tokens
        is_sent = self.sends_stops and not differs and len(stop.stop_sequences) <= STOPS_MAX
        return list(stop.stop_sequences) if is_sent else []

    def stopping(self, stops: list[str]) -> dict[str, Any]:
        """Build the fields for stop sequences, which must stay in the text if there are no ids."""
        shown = {} if self.id_fields else {"include_stop_str_in_output": True}
        return {"stop": stops} | shown


class HttpDialect(Dialect):
    """Dialect of OpenAI's completions. `probe` sets `capabilities` and `carries_salt`."""

    carries_salt = True
    salt_count = 8  # the address may be that of a router
    fixes_cached_count = False  # a router or a decode worker may report a count of its own first
    capabilities = Capabilities(
        EMBEDDED_ONLY | {RequestField.LARK},
        top_logprobs_max=TOP_LOGPROBS[0],
        logit_bias_max=LOGIT_BIAS_MAX,
        after_thinking=frozenset(),
    )

    def __init__(self, connections: Connections, settings: RemoteSettings) -> None:
        self.connections = connections
        self._settings = settings
        self.form = RequestForm(settings)
        self._suspected = asyncio.Event()  # set by a lost connection

    async def wait_until_lost(self) -> None:
        """Implement `Dialect.wait_until_lost`: other streams may go on if one connection broke."""
        while True:
            await self._suspected.wait()
            self._suspected.clear()
            try:
                await self._get("/health")
            except HttpFailure:
                return

    async def health_fault(self) -> str | None:
        """Implement `Dialect.health_fault`; a server without this path answers, too."""
        status, body = await self._get("/health")
        if status in (401, 403):  # without a key, or with a wrong one
            raise _failure(status, body)
        if status < 400 or status == 404:
            return None
        return f"HTTP {status}: {quoted(body)}"

    async def facts(self) -> ServerFacts:
        status, body = await self._get("/v1/models", FACTS_BYTES_MAX)
        if status != 200:
            raise _failure(status, body)
        if len(body) > FACTS_BYTES_MAX:
            raise ServerUnfit(f"the server's list of models exceeds {FACTS_BYTES_MAX} bytes")
        try:
            cards = {card.id: card for card in msgspec.json.decode(body, type=_Cards).data}
        except _INVALID as error:
            raise ServerUnfit(f"the server's list of models is invalid: {error}") from error
        if self.form.model not in cards:
            raise ServerUnfit(
                f"the server serves {quoted(', '.join(sorted(cards)) or 'no model')}, not"
                f" {self.form.model}: add the name to the address, as in"
                f" {self._settings.target.service.value}://{self._settings.target.address}/MODEL"
            )
        card = cards[self.form.model]
        base = cards.get(card.parent or "", card)
        return ServerFacts(
            model=card.id,
            version="OpenAI completions",
            context_window_tokens=card.max_model_len or base.max_model_len or 0,
        )

    def generate(self, request_id: str, choice: Choice) -> HttpCall:
        form = self.form
        whole = choice.is_whole = form.may_answer_whole(choice)
        bytes_max = message_bytes_max(choice, repeats_output=whole or form.path == GENERATE)
        body = form.body(choice, self.capabilities.unsupported)
        return HttpCall(self, request_id, body, bytes_max, is_whole=whole)

    def take(self, messages: list[_Message], choice: Choice, output: Output) -> int | None:
        """Implement `Dialect.take`: tokens that arrive together are reported together."""
        for message in messages[:-1]:
            self._take(message, choice, output)
        return self._take(messages[-1], choice, output)

    def _take(self, message: _Message, choice: Choice, output: Output) -> int | None:
        part, usage = message.part, message.usage
        if (
            part.finish_reason is None
            and part.logprobs is None
            and self.form.id_fields
            and part.token_ids
        ):
            check_room(choice, output, len(part.token_ids))
            output.token_ids += part.token_ids
            return None if usage is None else usage.cached_token_count
        if not self.form.id_fields:
            _count(message, choice, output)
        elif part.token_ids is None and (part.text or part.thought):
            raise EngineFailed("the engine sent text without token ids")
        else:
            check_room(choice, output, len(part.token_ids or ()))
            output.token_ids += part.token_ids or ()
        if part.logprobs is not None:
            if len(output.logprobs) + len(part.logprobs.tokens) > choice.token_count_max:
                raise EngineFailed("the engine sent more log-probabilities than tokens")
            output.logprobs += _known(part.logprobs)
        if part.finish_reason is None:
            return None if usage is None else usage.cached_token_count
        output.finish_reason = finish_reason(part.finish_reason)
        if output.finish_reason == "cancelled":
            return None
        if usage is None:
            raise EngineFailed("the engine did not report its usage")
        check_prompt_count(usage.prompt_tokens, choice)
        if usage.completion_tokens != len(output.token_ids):
            raise EngineFailed(
                f"the engine counts {usage.completion_tokens} tokens and sent"
                f" {len(output.token_ids)}"
            )
        output.thinking_token_count = usage.thinking_token_count
        check_length(choice, output)
        if self.form.id_fields:
            is_end = choice.request.end_token_ids.issuperset(output.token_ids[-1:])
            if output.finish_reason == "stop" and not is_end and self.form.sent_stops(choice):
                output.finish_reason = "stop_sequence"
            check_end(choice, output)
        return usage.cached_token_count

    async def probe(self, vocabulary_size: int) -> Capabilities:
        probe = ServerProbe(self, self._settings)
        self.capabilities = await probe.run(vocabulary_size)
        self.carries_salt, self.reports_cached = self.form.carries_salt, probe.reports_cached
        return self.capabilities

    async def refusal(self, connection: Connection, head: RawResponseMessage) -> HttpFailure:
        """Read an answer without output, and convert it to the failure that it describes."""
        body = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.call_timeout_s):
                body = await _beginning(connection, head)
        return _failure(head.code, body)

    def suspect(self) -> None:
        """Check the server now, because a connection broke."""
        self._suspected.set()

    async def _get(self, path: str, bytes_max: int = SMALL_ANSWER_BYTES_MAX) -> tuple[int, bytes]:
        request, connections = self.form.request("GET", path), self.connections
        try:
            async with asyncio.timeout(self._settings.call_timeout_s):
                while True:
                    connection = connections.idle() or await connections.connect()
                    may_repeat = connection.was_used  # the server may have closed it meanwhile
                    try:
                        connection.send(request)
                        head = await connection.head()
                        return head.code, await _beginning(connection, head, bytes_max)
                    except ConnectionError:
                        if not may_repeat:
                            raise
                    finally:
                        connection.release()
        except (HttpProcessingError, OSError, TimeoutError) as error:
            raise HttpFailure(grpc.StatusCode.UNAVAILABLE, f"{path}: {error!r}") from error


class ServerProbe:
    """Test requests to a server, which find the form and the fields that it accepts.

    Sets `form` as it finds it. `reports_cached` tells whether the server reports cached tokens.
    """

    def __init__(self, dialect: HttpDialect, settings: RemoteSettings) -> None:
        self.reports_cached = True
        self._shares_prefixes = settings.share_prefixes
        self._dialect = dialect
        self._form = dialect.form

    async def run(self, vocabulary_size: int) -> Capabilities:
        """Implement `Dialect.probe`. Penalties and priority only need to be accepted."""
        form = self._form
        middle = range(vocabulary_size // 4, vocabulary_size // 4 + vocabulary_size // 2)
        prompts = [tuple(random.choices(middle, k=PROBE_PROMPT_TOKENS)) for _ in range(PROBE_COUNT)]
        await self._find_counts(prompts[0], middle)
        form.carries_salt = await self._find_salt(middle)
        greedy = [(prompt, await self._output(prompt) or []) for prompt in prompts]
        tests: dict[str, Awaitable[Any]] = {
            "priority": self._accepts(prompts[0], priority=1),
            "stop": self._ends_at_stop(prompts),
            "whole": self._also_answers_whole(middle),
            RequestField.TOP_P: self._reduces(greedy, top_p=1e-6),
            RequestField.TOP_K: self._reduces(greedy, top_k=1),
            RequestField.MIN_P: self._reduces(greedy, min_p=1.0),
            RequestField.SEED: self._repeats(prompts),
            RequestField.REPETITION_PENALTY: self._accepts(prompts[0], repetition_penalty=1.5),
            RequestField.PRESENCE_PENALTY: self._accepts(prompts[0], presence_penalty=0.5),
            RequestField.FREQUENCY_PENALTY: self._accepts(prompts[0], frequency_penalty=0.5),
            RequestField.IGNORE_EOS: self._accepts(prompts[0], ignore_eos=True),
            RequestField.JSON_SCHEMA: self._is_guided(
                prompts[0], '"weir"', json='{"type": "string", "enum": ["weir"]}'
            ),
            RequestField.REGEX: self._is_guided(prompts[0], "[0-9]{3}", regex="[0-9]{3}"),
        }
        if form.id_fields:
            tests |= {
                RequestField.LOGIT_BIAS: self._biases(*greedy[0]),
                RequestField.TOP_LOGPROBS: self._top_logprobs_max(prompts[0]),
                RequestField.STOP_TOKEN_IDS: self._stops(greedy),
                RequestField.MIN_OUTPUT_TOKENS: self._suppresses_end(*greedy[0]),
            }
        answers = dict(zip(tests, await asyncio.gather(*tests.values()), strict=True))
        form.sends_priority, form.sends_stops = answers.pop("priority"), answers.pop("stop")
        form.answers_whole = answers.pop("whole")
        unsupported = _NEEDS_IDS - answers.keys()
        unsupported |= {RequestField(field) for field, answer in answers.items() if not answer}
        return Capabilities(
            HttpDialect.capabilities.unsupported | unsupported,
            top_logprobs_max=answers.get(RequestField.TOP_LOGPROBS) or None,
            logit_bias_max=LOGIT_BIAS_MAX,
            counts_from_usage=not form.id_fields,
            after_thinking=frozenset(),
        )

    async def _find_salt(self, middle: range) -> bool:
        """Find the fields in which the server accepts a salt, or else whether a header with it has
        an effect.

        Whether the salt separates prefixes is tested later, as on every server.
        """
        prompt = tuple(random.choices(middle, k=SALT_PROMPT_TOKENS))
        style = "nvext" if "nvext" in self._form.id_fields else self._form.path
        for self._form.salt_names in _SALT_NAMES[style]:
            if await self._accepts(prompt, **self._form.salted(uuid.uuid4().hex)):
                return True
        self._form.salt_names = ()
        own, other = uuid.uuid4().hex, uuid.uuid4().hex
        counts = []
        for salt in (own, own, other):
            found = await self._try(prompt, 1, **self._form.salted(salt))
            counts.append(found.usage.cached_token_count or 0 if found and found.usage else 0)
        return counts[1] > 0 == counts[2]

    async def _find_counts(self, prompt: tuple[int, ...], middle: range) -> None:
        """Find how the server reports token ids, or else how it counts tokens."""
        self._form.usage_options = _USAGE
        for self._form.path, self._form.id_fields in _ID_REQUESTS:
            try:
                found = await self._try(prompt)
            except HttpFailure as error:
                is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if self._form.path == COMPLETIONS or is_full:
                    raise
                continue  # the server has no such path
            if found is not None and found.part.token_ids:
                break
        else:
            self._form.path, self._form.id_fields = COMPLETIONS, {}
            for self._form.usage_options in (_USAGE_OF_EACH, _USAGE):
                if (found := await self._try(prompt)) is not None:
                    break
        if found is None:
            raise ServerUnfit("the server refuses a prompt of token ids")
        if found.usage is None:
            raise ServerUnfit("the server does not report usage (stream_options.include_usage)")
        self.reports_cached = found.usage.cached_token_count is not None
        # Some servers report no zero: a prompt that is sent again is cached, if by the same worker.
        repeated = tuple(random.choices(middle, k=SALT_PROMPT_TOKENS))
        for _ in range(1 + self._dialect.salt_count if not self.reports_cached else 0):
            again = await self._try(repeated, 1)
            if again and again.usage and again.usage.cached_token_count is not None:
                self.reports_cached = True
                break
        if not self.reports_cached and not self._shares_prefixes:
            raise ServerUnfit(_NO_COUNTS)

    async def _also_answers_whole(self, middle: range) -> bool:
        """Test whether the server reports the same ids and counts without a stream.

        A prompt that is sent again shows cached tokens on servers that report no zero.
        """
        prompt = tuple(random.choices(middle, k=SALT_PROMPT_TOKENS))
        for _ in range(1 + self._dialect.salt_count):
            try:
                found = await self._try(prompt, is_whole=True)
            except HttpFailure as error:
                if error.code() is not grpc.StatusCode.INTERNAL:
                    raise
                return False  # it answers something else
            if found is None or found.usage is None or not found.part.text:
                return False
            if (
                self._form.id_fields
                and len(found.part.token_ids or ()) != found.usage.completion_tokens
            ):
                return False
            if not self.reports_cached or found.usage.cached_token_count is not None:
                return True
        return False

    async def _try(
        self,
        prompt: tuple[int, ...],
        max_tokens: int = PROBE_TOKENS,
        *,
        is_whole: bool = False,
        **fields: Any,
    ) -> _Message | None:
        """Generate an output and join its messages; None if the server refuses the request."""
        token_ids, logprobs = list[int](), _Logprobs([], [])
        whole, usage = _Part("", token_ids, logprobs), None
        call = HttpCall(
            self._dialect,
            f"weir-probe-{uuid.uuid4().hex}",
            self._form.base(prompt, max_tokens, is_whole=is_whole) | fields,
            MESSAGE_BYTES_BASE,
            is_whole=is_whole,
        )
        try:
            async for messages in call:
                for message in messages:
                    part, usage = message.part, message.usage
                    # `/generate` repeats the text.
                    whole.text = (
                        part.text if self._form.path == GENERATE else whole.text + part.text
                    )
                    token_ids += part.token_ids or ()
                    if len(token_ids) > max_tokens or len(whole.text) > MESSAGE_BYTES_BASE:
                        raise ServerUnfit("the server sent more output than a probe asked for")
                    whole.finish_reason = part.finish_reason
                    if part.logprobs is not None:
                        logprobs.tokens += part.logprobs.tokens
        except HttpFailure as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            return None
        finally:
            call.cancel()
        return _Message(whole, usage)

    async def _output(self, prompt: tuple[int, ...], **fields: Any) -> list[int] | None:
        """Generate an output as token ids, or characters without them; None if it is refused."""
        found = await self._try(prompt, **fields)
        if found is None:
            return None
        return found.part.token_ids if self._form.id_fields else [*map(ord, found.part.text)]

    async def _accepts(self, prompt: tuple[int, ...], **fields: Any) -> bool:
        return await self._try(prompt, **fields) is not None

    async def _reduces(
        self, greedy: list[tuple[tuple[int, ...], list[int]]], **fields: Any
    ) -> bool:
        """Test whether a field restricts a flat distribution to its most likely token."""
        return any(
            [
                ids != [] and await self._output(prompt, temperature=2.0, **fields) == ids
                for prompt, ids in greedy
            ]
        )

    async def _repeats(self, prompts: list[tuple[int, ...]]) -> bool:
        """Test whether a seed determines the output."""
        for prompt in prompts:
            first, second = [await self._output(prompt, temperature=2.0, seed=7) for _ in range(2)]
            if first and first == second:
                return True
        return False

    async def _biases(self, prompt: tuple[int, ...], ids: list[int]) -> bool:
        token_id = next(each for each in prompt if each not in ids)
        found = await self._output(prompt, logit_bias={token_id: LOGIT_BIAS_MAX})
        return found is not None and {*found} == {token_id}

    async def _top_logprobs_max(self, prompt: tuple[int, ...]) -> int:
        """Find the largest accepted number of top tokens; 0 if their ids are not reported."""
        for count in TOP_LOGPROBS:
            found = await self._try(prompt, logprobs=count, return_tokens_as_token_ids=True)
            if found is None:
                continue
            part = found.part
            assert part.logprobs is not None, "set by _try"
            if part.logprobs.tokens == [f"token_id:{each}" for each in part.token_ids or ()]:
                return count
        return 0

    async def _stops(self, greedy: list[tuple[tuple[int, ...], list[int]]]) -> bool:
        return any(
            [await self._output(prompt, stop_token_ids=ids) == ids[:1] for prompt, ids in greedy]
        )

    async def _ends_at_stop(self, prompts: list[tuple[int, ...]]) -> bool:
        """Test whether an output ends with the token that completes a stop sequence."""
        for prompt, count in itertools.product(prompts, range(PROBE_TOKENS, 1, -1)):
            before, whole = [await self._try(prompt, count - less) for less in (1, 0)]
            if before is None or whole is None:
                return False
            text, begin = whole.part.text, len(before.part.text)
            stop = text[begin:]
            if not stop or "\ufffd" in text[-1:] or text.find(stop) != begin:
                continue  # it does not show which token completes it
            found = await self._try(prompt, GUIDED_TOKENS, **self._form.stopping([stop]))
            if found is None or found.part.finish_reason != "stop":
                return False
            if self._form.id_fields:
                return found.part.token_ids == whole.part.token_ids
            return found.part.text == text
        return False

    async def _suppresses_end(self, prompt: tuple[int, ...], ids: list[int]) -> bool:
        found = await self._output(prompt, min_tokens=PROBE_TOKENS, stop_token_ids=ids)
        return found is not None and len(found) == PROBE_TOKENS

    async def _is_guided(self, prompt: tuple[int, ...], expected: str, **guide: str) -> bool:
        """Test whether an output under a constraint ends by itself with the expected text. It may
        begin with bytes that complete the prompt.
        """
        found = await self._try(prompt, GUIDED_TOKENS, structured_outputs=guide)
        if found is None or found.part.finish_reason != "stop":
            return False
        return bool(re.search(f"{expected}$", found.part.text))


def _generate_body(body: dict[str, Any]) -> dict[str, Any]:
    """Convert a completions request to one for `/generate`."""
    sampling = {_OF_SAMPLING[name]: value for name, value in body.items() if name in _OF_SAMPLING}
    for name, guide in body.get("structured_outputs", {}).items():
        sampling["json_schema" if name == "json" else name] = guide
    names = ("model", "stream", "priority", "extra_key", "cache_salt", "require_reasoning")
    same = {name: body[name] for name in names if name in body}
    return same | {"input_ids": body["prompt"], "sampling_params": sampling}


def _count(message: _Message, choice: Choice, output: Output) -> None:
    """Add the text and the tokens of a message without token ids. Raises: EngineFailed."""
    part, usage = message.part, message.usage
    limit, before = choice.token_count_max, len(output.token_ids)
    has_text = bool(part.text or part.thought)
    count = before + has_text if usage is None else usage.completion_tokens
    if part.finish_reason is None:
        count = min(count, limit - 1)  # the last token comes with the rest of the text
    elif usage is None:
        count = before
    if not before <= count <= limit:
        raise EngineFailed(f"the engine counts {count} tokens after {before}, of at most {limit}")
    output.token_ids += [UNKNOWN_TOKEN_ID] * (count - before)
    choice.detokenizer.feed(part.text, count - before, part.thought)


def _token_id(text: str) -> int:
    """Parse `token_id:ID`. Raises: EngineFailed."""
    name, _, digits = text.partition(":")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= TOKEN_ID_DIGITS_MAX
    if name != "token_id" or not is_number:
        raise EngineFailed("the engine reported log-probabilities without token ids")
    return int(digits)


def _known(logprobs: _Logprobs) -> list[dict[int, TokenLogprob]]:
    """Convert log-probabilities to mappings by token id. Raises EngineFailed if invalid."""
    if bytes(logprobs.top_logprobs).count(b"{") > len(logprobs.tokens):
        raise EngineFailed("the engine sent more log-probabilities than tokens")
    try:
        tops = _TOPS.decode(logprobs.top_logprobs) or [None] * len(logprobs.tokens)
    except _INVALID as error:
        raise EngineFailed(f"the engine sent invalid log-probabilities: {error}") from error
    return [
        {
            token_id: TokenLogprob(token_id, value)
            for token_id, value in (
                *((_token_id(name), value) for name, value in (top or {}).items()),
                (_token_id(token), chosen),
            )
        }
        for token, chosen, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=False)
    ]


class HttpCall:
    """One output, iterated once, as lists of messages that arrived together. The last message has
    the finish reason and the usage.

    Iteration raises HttpFailure. After `cancel`, the output ends as aborted.
    """

    def __init__(
        self,
        dialect: HttpDialect,
        request_id: str,
        body: dict[str, Any],
        bytes_max: int,
        *,
        is_whole: bool = False,
    ) -> None:
        """Prepare the call. `bytes_max` limits the bytes between two calls of `progressed`.

        With `is_whole`, the server answers with one message.
        """
        self._dialect = dialect
        self._request_id = request_id
        self._body = body
        self._bytes_max = self._bytes_left = bytes_max
        self._is_whole = is_whole
        self._opening: asyncio.Timeout | None = None  # while it connects
        self._connection: Connection | None = None
        self._is_cancelled = self.is_over = False
        self._messages = self._read()

    def __aiter__(self) -> AsyncGenerator[list[_Message], None]:
        return self._messages

    def progressed(self) -> None:
        """Implement `AnswerCall.progressed`."""
        self._bytes_left = self._bytes_max

    def cancel(self) -> None:
        """Close the connection, which aborts the output on the server. Idempotent.

        A connection whose answer was read to its end is kept for other requests.
        """
        self._is_cancelled = True
        if self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())
            self._opening = None
        if self._connection is not None:
            self._connection.release()
            self._connection = None

    async def _open(self) -> Connection:
        connection = None if self._is_cancelled else self._dialect.connections.idle()
        if connection is None:
            try:
                async with asyncio.timeout(None) as self._opening:
                    self._check()
                    connection = await self._dialect.connections.connect()
            finally:
                self._opening = None
        self._connection = connection
        self._check()
        connection.send(self._dialect.form.encoded(self._request_id, self._body))
        head = await connection.head()
        if head.code != 200:
            raise await self._dialect.refusal(connection, head)
        _check_encoding(head)
        return connection

    def _check(self) -> None:
        """Raise ConnectionAbortedError if the call was cancelled."""
        if self._is_cancelled:
            raise ConnectionAbortedError("the call was cancelled")

    async def _read(self) -> AsyncGenerator[list[_Message], None]:
        aborted = [_Message(_Part(finish_reason="abort"))]
        try:
            connection = await self._open()
            if self._is_whole:
                message = await self._whole(connection)
                self.is_over = True
                yield [message]
                return
            events = _Events()
            # Without ids, a stop sequence is found in the message of its last token only.
            by_one = self._dialect.capabilities.counts_from_usage
            while piece := await connection.read():
                self._bytes_left -= len(piece)
                messages = events.read(piece)
                self.is_over = events.is_done and connection.has_ended
                batches = (
                    [[each] for each in messages] if by_one else [messages] if messages else []
                )
                for batch in batches:
                    if self._is_cancelled:
                        break
                    yield batch
                if self._is_cancelled:
                    yield aborted
                    return
                if events.failure is not None:
                    raise events.failure
                if self._bytes_left < 0:
                    if events.is_done:
                        return
                    raise HttpFailure(
                        grpc.StatusCode.INTERNAL,
                        f"more than {self._bytes_max} bytes without a new token",
                    )
            if self._is_cancelled:
                yield aborted
            elif not events.is_done:
                raise ConnectionResetError("the stream ended before its last message")
        except (HttpProcessingError, OSError, TimeoutError) as error:
            if self._is_cancelled:
                yield aborted
                return
            self._dialect.suspect()
            details = f"{type(error).__name__}: {error}"
            raise HttpFailure(grpc.StatusCode.UNAVAILABLE, details) from error
        except _INVALID as error:
            raise HttpFailure(grpc.StatusCode.INTERNAL, f"invalid message: {error}") from error
        finally:
            self.cancel()

    async def _whole(self, connection: Connection) -> _Message:
        """Read an answer that is one message."""
        pieces = []
        while piece := await connection.read():
            pieces.append(piece)
            self._bytes_left -= len(piece)
            if self._bytes_left < 0:
                details = f"an answer of more than {self._bytes_max} bytes"
                raise HttpFailure(grpc.StatusCode.INTERNAL, details)
        return _Events().read_whole(b"".join(pieces))


class _Events:
    """Parser of a stream of server-sent events into messages with output.

    The last message is held back until the usage is known. `failure` is an error that followed the
    messages, and `is_done` tells whether the stream announced its end.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.is_done = False
        self._rest: list[bytes] = []  # pieces of an incomplete line
        self._last: _Message | None = None
        self._usage: _Usage | None = None
        self._sent_count = 0

    def read(self, piece: bytes) -> list[_Message]:
        """Parse a piece of the stream; return the messages it completes. Reads each byte once."""
        messages: list[_Message] = []
        if self.is_done:  # reading goes on so that the connection can be used again
            return messages
        *lines, rest = piece.split(b"\n")
        if not lines:
            self._rest.append(rest)
            return messages
        lines[0] = b"".join((*self._rest, lines[0]))
        self._rest = [rest]
        try:
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                if (message := self._message(line[5:].strip())) is not None:
                    messages.append(message)
                if self.is_done:
                    break
        except (HttpFailure, *_INVALID) as error:
            self.failure = error
        return messages

    def read_whole(self, body: bytes) -> _Message:
        """Parse an answer that is one message. Raises: HttpFailure, and those of `_INVALID`."""
        if self._message(body) is None and (message := self._message(b"[DONE]")) is not None:
            return message
        raise HttpFailure(grpc.StatusCode.INTERNAL, "an answer without a finish reason")

    def _message(self, payload: bytes) -> _Message | None:
        last = self._last
        if payload == b"[DONE]":
            if last is not None:
                last.usage = self._usage
                self.is_done = True
            return last
        event = _EVENTS.decode(payload)
        if event.error is not None:
            code = event.error.code
            raise _failure(code if isinstance(code, int) else 500, payload)
        if (meta := event.meta_info) is not None:
            cached = _Details(meta.cached_tokens)
            self._usage = _Usage(meta.prompt_tokens, meta.completion_tokens, cached)
            self._usage.reasoning_tokens = meta.reasoning_tokens
            # The last message repeats ids, and SGLang may repeat all.
            new_count = meta.completion_tokens - self._sent_count
            token_ids = event.output_ids[-new_count:] if new_count > 0 else []
            self._sent_count += len(token_ids)
            reason = meta.finish_reason
            reason = reason.type if isinstance(reason, _Reason) else reason
            part = _Part(event.text, token_ids, None, reason)
        else:
            self._usage = event.usage or self._usage
            try:
                [part] = _CHOICES.decode(event.choices)
            except msgspec.ValidationError:  # none, or several, which are invalid
                listed = bytes(event.choices).strip()
                if not listed.startswith(b"[") or not listed[1:-1].strip():
                    return None
                raise
            if part.index != 0:
                details = f"output {part.index} of a request for one"
                raise HttpFailure(grpc.StatusCode.INTERNAL, details)
            if event.nvext is not None:
                part.token_ids = event.nvext.completion_token_ids
        if last is not None:
            raise HttpFailure(grpc.StatusCode.INTERNAL, "output after the finish reason")
        message = _Message(part, event.usage or (self._usage if meta is not None else None))
        if part.finish_reason is None:
            return message
        self._last = message
        return None
