"""HTTP API for clients of OpenAI and Anthropic: routes, keys and request ids."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import unquote

from aiohttp import web
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import tokens_pb2 as pb_tokens

from api.access.auth import Authenticator, StreamKey, check_model
from api.core.addresses import FORWARDED_FOR
from api.core.errors import Draining, InvalidRequest
from api.core.messages import models_for
from api.core.rate_limiter import BYTE_COST_S, CALL, REFUSAL_COST_S, START_FREE_S
from api.core.statuses import status_of
from api.generation.parsing.embed_request import ValidEmbed, parse_embed
from api.generation.parsing.start_frame import parse_count_tokens
from api.generation.request.caller import Caller, on_behalf
from api.generation.request.client_tokens import create_client_token, revoke_client_tokens
from api.generation.request.live_embedding import LiveEmbedding
from api.generation.request.quoting import (
    DECODED_TOKEN_COST,
    count_tokens,
    in_thread,
    text_of,
    token_ids_of,
)
from api.generation.request.registry import RequestRegistry
from api.observability.observer import HTTP
from api.observability.spans import trace_of
from api.openai import answers
from api.openai.answers import Answer, ChatAnswer, CompletionAnswer, ServedModel
from api.openai.apis import Api, parsed_body
from api.openai.client_token_bodies import (
    ClientTokenParameters,
    RevocationParameters,
    check_page,
    note_refused_page,
    preflight,
    token_body,
)
from api.openai.embeddings import (
    EmbeddingParameters,
    check_model_sizes,
    embed_request,
    embedding_list,
    embedding_names,
)
from api.openai.error_responses import (
    ErrorResponse,
    HttpFault,
    error_response,
    invalid_parameter,
    quota_headers,
    remedy_of,
)
from api.openai.exchange import (
    JSON,
    Arrival,
    Exchange,
    Starts,
    plain_headers,
    refused,
    valid_starts,
)
from api.openai.listener import peer_of, read_body, secret_of
from api.openai.messages import (
    MessageAnswer,
    MessageParameters,
    error_body,
    page_of,
    parse_counted_message,
    parse_message,
    tolerate_message,
)
from api.openai.models_list import ListedModel, model_info, model_object
from api.openai.parameters import (
    SHORT_BYTES_MAX,
    ChatParameters,
    CompletionParameters,
    ParsedRequest,
    ResponseParameters,
    decode,
    parse_chat,
    parse_completion,
    parse_response,
)
from api.openai.response_answer import ResponseAnswer
from api.openai.token_texts import TokenTexts
from api.openai.tokens import (
    DetokenizeParameters,
    ShownTokens,
    TokenizeParameters,
    check_decoded_count,
    detokenized_body,
    model_named,
    prompts_to_tokenize,
    shown_tokens,
    shows_texts,
    tokenized_body,
)
from api.openai.tolerance import Notes
from common.loop_watch import Stage
from inference.routing.router import Route
from metering.quotas.quota_rules import Owner
from metering.store.db import Sessions
from metering.tenants.authentication import Principal

TOKENIZE_NAMES: dict[str, str] = {"conversation.messages": "messages"}
# Endpoints require the scopes of the RPCs that they correspond to.
SERVICE = "/weir.v1.InferenceService"
# Seconds. Keys are looked up for each request here, but once per stream over gRPC.
KEY_AGE_MAX_S = 1.0
END_USER = "weir-end-user"  # header, which wins over the parameters of the body
NO_FALLBACK = "weir-no-fallback"  # header
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
CHUNKED_BYTES = 256 * 1024  # assumed size of a body of unknown length
# Namespace of request ids that are derived from idempotency keys other than UUIDs.
KEY_NAMESPACE = uuid.UUID("6f1c0c9e-2f6b-5d0a-9a54-3b1d9a1c7e10")
COUNT_TOKENS = f"{SERVICE}/CountTokens"
CREATE_CLIENT_TOKEN = f"{SERVICE}/CreateClientToken"
REVOKE_CLIENT_TOKENS = f"{SERVICE}/RevokeClientTokens"
VERSION = version("weir-server")
UNVERSIONED = frozenset({"/tokenize", "/detokenize"})  # as vLLM, SGLang and llama.cpp serve them
GENERATE, EMBED, LIST_MODELS = f"{SERVICE}/Generate", f"{SERVICE}/Embed", f"{SERVICE}/ListModels"
CHAT = Api(ChatParameters, parse_chat, ChatAnswer)
COMPLETIONS = Api(CompletionParameters, parse_completion, CompletionAnswer)
RESPONSES = Api(ResponseParameters, parse_response, ResponseAnswer)
MESSAGES = Api(MessageParameters, parse_message, MessageAnswer, tolerate_message, error_body)
MESSAGES_PATH, MODELS_PATH = "/v1/messages", "/v1/models"

Parsed = TypeVar("Parsed")
Handler = Callable[[web.BaseRequest, Arrival, Principal], Awaitable[web.StreamResponse | Exchange]]


class Gateway:
    """HTTP handler for the clients of OpenAI and Anthropic."""

    def __init__(
        self, registry: RequestRegistry, authenticator: Authenticator, sessions: Sessions
    ) -> None:
        self._registry = registry
        self._authenticator = authenticator
        self._sessions = sessions
        messages = registry.settings.messages
        self._bytes_max = messages.bytes_max
        self._started_at = int(time.time())
        build_parsers()
        self._texts: dict[str, TokenTexts] = {}  # by served name
        self._handlers: dict[str, tuple[str, Handler, str]] = {
            "/v1/chat/completions": ("POST", partial(self._generate, CHAT), GENERATE),
            "/v1/completions": ("POST", partial(self._generate, COMPLETIONS), GENERATE),
            "/v1/responses": ("POST", partial(self._generate, RESPONSES), GENERATE),
            "/v1/responses/input_tokens": (
                "POST",
                partial(self._count, RESPONSES, {"object": "response.input_tokens"}),
                COUNT_TOKENS,
            ),
            MESSAGES_PATH: ("POST", partial(self._generate, MESSAGES), GENERATE),
            f"{MESSAGES_PATH}/count_tokens": (
                "POST",
                partial(self._count, replace(MESSAGES, parse=parse_counted_message), {}),
                COUNT_TOKENS,
            ),
            "/v1/embeddings": ("POST", self._embed, EMBED),
            "/v1/tokenize": ("POST", self._tokenize, COUNT_TOKENS),
            "/v1/detokenize": ("POST", self._detokenize, COUNT_TOKENS),
            "/v1/client_tokens": ("POST", self._create_client_token, CREATE_CLIENT_TOKEN),
            "/v1/client_tokens/revoke": ("POST", self._revoke_client_tokens, REVOKE_CLIENT_TOKENS),
            MODELS_PATH: ("GET", self._models, LIST_MODELS),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle a request and return its response. Every error becomes an error response."""
        received_at = time.monotonic()
        request_id = uuid.uuid4()
        path = path_of(request)
        form = error_body if self._is_anthropic(request, path) else ErrorResponse.body
        owner: Owner | None = None  # None until the request is authenticated
        try:
            if (plain := self._plain(request) or preflight(request, path)) is not None:
                return plain
            request_id = request_id_of(request) or request_id
            handler, rpc, name = self._find(request, path)
            secret = secret_of(request)
            origin = self._authenticator.proxies.origin(
                peer_of(request), request.headers.getall(FORWARDED_FOR, ())
            )

            look_up = partial(
                self._authenticator.principal_of,
                secret,
                method=rpc,
                origin=origin,
                age_max_s=KEY_AGE_MAX_S,
                call=name,
            )
            owner = principal = await look_up()
            if principal.token is not None:
                check_page(request, principal.token)
            auth_ms = (time.monotonic() - received_at) * 1000
            trace = trace_of(request.headers.get("traceparent"), request.headers.get("tracestate"))
            arrival = Arrival(
                Caller.of(principal, auth_ms, received_at, None, trace),
                request_id,
                partial(look_up, again=True),
            )
            answer = await handler(request, arrival, principal)
            return await answer.serve() if isinstance(answer, Exchange) else answer
        except HttpFault as fault:
            self._count_refusal(owner)
            self._registry.observer.http_failed(fault.refusal.code)
            return refused(fault.refusal, request_id, closing=fault.closing, form=form)
        except ConnectionError:  # the client disconnected while sending its body
            return web.Response(status=400)
        except Exception as error:
            self._count_refusal(owner)
            note_refused_page(request, error)
            self._registry.observer.call_failed(HTTP, error)
            refusal = error_response(status_of(error))
            return refused(refusal, request_id, form=form)

    def _is_anthropic(self, request: web.BaseRequest, path: str) -> bool:
        """Return whether to respond in Anthropic's format: decided by the path, or by the headers
        if both APIs, or neither, have the path.
        """
        if path.startswith((MESSAGES_PATH, f"/v1{MESSAGES_PATH}")):
            return True
        if path in self._handlers and path != MODELS_PATH:
            return False
        has = request.headers.__contains__
        return has("anthropic-version") or (has("x-api-key") and not has("authorization"))

    def _plain(self, request: web.BaseRequest) -> web.Response | None:
        """Respond to a path of vLLM that needs no API key; None for other paths."""
        if request.path == "/ping" and request.method in ("GET", "HEAD", "POST"):
            return web.Response(status=503 if self._registry.is_draining else 200)
        if request.path == "/version" and request.method in ("GET", "HEAD"):
            return web.Response(
                body=answers.encode({"version": VERSION}), headers={"content-type": JSON}
            )
        return None

    def _count_refusal(self, owner: Owner | None) -> None:
        if owner is not None:
            self._registry.pace.charge(owner, REFUSAL_COST_S)

    def _find(self, request: web.BaseRequest, path: str) -> tuple[Handler, str, str]:
        """Find the handler of an endpoint, the RPC that it corresponds to, and its own name.

        Raises HttpFault for an unknown path or method.
        """
        if path in UNVERSIONED:
            path = f"/v1{path}"
        route = self._handlers.get(MODELS_PATH if path.startswith(f"{MODELS_PATH}/") else path)
        if route is None:
            served = ", ".join(self._handlers)
            hint = remedy_of(path) or f"the API serves {served}"
            if f"/v1{path}" in self._handlers or path.startswith("/models/"):
                hint = "the base URL must end in /v1"
            elif path.removeprefix("/v1") in self._handlers:
                hint = "the base URL has a /v1 that the client adds too: leave it out"
            unknown = f"unknown URL {request.method} {path[:200] or '/'}: {hint}"
            raise HttpFault(404, unknown, "unknown_url")
        method, handler, rpc = route
        # For HEAD, aiohttp omits the body.
        allowed = ("GET", "HEAD") if method == "GET" else (method,)
        if request.method not in allowed:
            hint = "" if request.method == "OPTIONS" else remedy_of(path)
            raise HttpFault(
                405,
                f"send {method}, not {request.method}, to {path[:200]}"
                + (f": {hint}" if hint else ""),
                "method_not_allowed",
                {"allow": ", ".join(allowed)},
            )
        return handler, rpc, path.removeprefix("/v1/")

    async def _generate(
        self, api: Api, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse | Exchange:
        """Parse a generating request. Returns the exchange that serves it, or an error response."""
        window = self._registry.window_tokens_max

        def parse(body: bytes) -> tuple[ParsedRequest, dict[str, str], Starts]:
            parsed, headers = parsed_body(body, api, strict=is_strict(request, principal))
            if end_user := end_user_of(request):
                parsed = parsed.for_end_user(end_user, END_USER)
            starts = valid_starts(parsed, arrival.request_id, window)
            # One answer is of one model, and token ids are those of the requested one.
            shows_ids = parsed.shows_token_ids or parsed.names_tokens_by_id
            if forbids_fallback(request) or shows_ids or len(parsed.starts) > 1:
                for start in () if isinstance(starts, InvalidRequest) else starts:
                    start.no_fallback = True
            return parsed, headers, starts

        parsed, headers, starts = await self._read(request, arrival, principal, parse)
        if not isinstance(starts, InvalidRequest):
            try:
                starts = [on_behalf(principal.token, each) for each in starts]
                await self._authenticator.count_requests(principal, len(starts))
            except InvalidRequest as error:
                starts = error
        with self._registry.pace.charging(arrival.caller.payer, START_FREE_S):
            model = self._model_of(parsed, principal, arrival.request_id)
            named = arrival.request_id.hex, int(time.time())
            format = api.answer(parsed, model, *named)
            if not isinstance(starts, InvalidRequest):

                def answer_of(route: Route) -> Answer:
                    served = replace(parsed, model=route.model)
                    return api.answer(served, self._served_by(route), *named)

                served = parsed, starts, format, headers, answer_of
                return Exchange(self._registry, request, arrival, *served)
        self._registry.observer.start_refused(starts)
        return refused(
            error_response(status_of(starts), parsed.names),
            arrival.request_id,
            form=format.error_body,
        )

    async def _count(
        self,
        api: Api,
        fields: Mapping[str, Any],
        request: web.BaseRequest,
        arrival: Arrival,
        principal: Principal,
    ) -> web.StreamResponse:
        """Count the tokens of a generating request's prompt; `fields` are added to the response."""

        def parse(body: bytes) -> tuple[ParsedRequest, dict[str, str], pb.CountTokensRequest, Any]:
            parsed, headers = parsed_body(body, api, strict=is_strict(request, principal))
            [start] = parsed.starts
            is_shown = start.tool_choice.mode != pb.TOOL_MODE_NONE
            prompt = pb.CountTokensRequest(
                model=start.model,
                conversation=start.conversation,
                tools=start.tools if is_shown else (),
            )
            try:
                return parsed, headers, prompt, parse_count_tokens(prompt)
            except Exception as error:
                return parsed, headers, prompt, error

        parsed, headers, prompt, found = await self._read(request, arrival, principal, parse)
        try:
            if isinstance(found, Exception):
                raise found
            counted = await count_tokens(self._registry, principal, prompt, found)
        except Exception as error:
            return refused(
                error_response(status_of(error), parsed.names),
                arrival.request_id,
                form=api.error_body,
            )
        value = {**fields, "input_tokens": counted.input_token_count}
        return answered(value, arrival, headers)

    async def _embed(
        self, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse:
        def parse(
            body: bytes,
        ) -> tuple[EmbeddingParameters, Notes, ValidEmbed | Exception]:
            notes = Notes(strict=is_strict(request, principal))
            requested = decode(body, EmbeddingParameters, notes)
            try:
                message = embed_request(requested, str(arrival.request_id))
                message.end_user = end_user_of(request) or message.end_user
                start = parse_embed(message)
            except Exception as error:
                return requested, notes, error
            return requested, notes, start

        requested, notes, start = await self._read(request, arrival, principal, parse)
        try:
            if isinstance(start, Exception):
                raise start
            check_model(principal, start.model)
            route = self._registry.router.route_encoder(start.model, str(start.request_id))
            check_model_sizes(requested, route.encoder.model)
            await self._authenticator.count_requests(principal, 1)
            start = on_behalf(principal.token, start)
            response = await LiveEmbedding(arrival.caller, start, self._registry).answer()
        except Exception as error:
            return refused(
                error_response(status_of(error), notes.names_as_sent(embedding_names(requested))),
                arrival.request_id,
            )
        return answered(
            embedding_list(requested, response, str(arrival.request_id)),
            arrival,
            quota_headers(response.quotas) | notes.headers(),
        )

    async def _tokenize(
        self, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse:
        def parse(
            body: bytes,
        ) -> tuple[TokenizeParameters, dict[str, str], list[pb.CountTokensRequest], bool]:
            notes = Notes(strict=is_strict(request, principal))
            requested = decode(body, TokenizeParameters, notes)
            model = model_named(requested.model, self._registry, principal)
            return requested, notes.headers(), *prompts_to_tokenize(requested, model)

        requested, headers, prompts, adds = await self._read(request, arrival, principal, parse)
        names = TOKENIZE_NAMES | {"text": "prompt" if requested.content is None else "content"}
        found: list[ShownTokens] = []
        window = 0
        each_cost = DECODED_TOKEN_COST if shows_texts(requested) else 1
        try:
            for prompt in prompts:
                parsed = parse_count_tokens(prompt)
                ids, window = await token_ids_of(
                    self._registry, principal, prompt, parsed, adds_special_tokens=adds
                )
                served = self._registry.router.find(prompt.model).model.name
                show = partial(shown_tokens, requested, ids, self._registry.tokenizers[served])
                found.append(await in_thread(self._registry, principal, each_cost * len(ids), show))
                await asyncio.sleep(0)  # a turn for others after each of many short texts
        except Exception as error:
            refusal = error_response(status_of(error), names)
            return refused(refusal, arrival.request_id)
        encode = partial(answers.encode, tokenized_body(requested, found, window))
        count = sum(each.token_count for each in found)
        body = await in_thread(self._registry, principal, each_cost * count, encode)
        return answered(body, arrival, headers)

    async def _detokenize(
        self, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse:
        def parse(body: bytes) -> tuple[DetokenizeParameters, dict[str, str], str]:
            notes = Notes(strict=is_strict(request, principal))
            requested = decode(body, DetokenizeParameters, notes)
            check_decoded_count(requested)
            model = model_named(requested.model, self._registry, principal)
            return requested, notes.headers(), model

        requested, headers, model = await self._read(request, arrival, principal, parse)
        skips = bool(requested.skip_special_tokens)
        text = await text_of(
            self._registry, principal, model, requested.tokens, skip_special_tokens=skips
        )
        return answered(detokenized_body(text), arrival, headers)

    async def _create_client_token(
        self, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse:
        def parse(body: bytes) -> pb_tokens.CreateClientTokenRequest:
            requested = decode(body, ClientTokenParameters)
            try:
                return requested.message()
            except ValueError as error:
                raise invalid_parameter("body", f"has a number out of range: {error}") from None

        message = await self._read(request, arrival, principal, parse)
        made = await create_client_token(self._registry.router, self._sessions, principal, message)
        return answered(token_body(made), arrival)

    async def _revoke_client_tokens(
        self, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse:
        def parse(body: bytes) -> pb_tokens.RevokeClientTokensRequest:
            requested = decode(body, RevocationParameters)
            return pb_tokens.RevokeClientTokensRequest(
                client_token_id=requested.id, end_user=requested.end_user
            )

        message = await self._read(request, arrival, principal, parse)
        revoked = await revoke_client_tokens(self._sessions, principal, message)
        return answered({"revoked_count": revoked.revoked_count}, arrival)

    async def _models(
        self, request: web.BaseRequest, arrival: Arrival, principal: Principal
    ) -> web.StreamResponse:
        await self._authenticator.wait_for_share(principal)
        router = self._registry.router
        models = {
            name: ListedModel(model, name, target, router.find(name).model.context_window_tokens)
            for model in await models_for(router, self._sessions, principal)
            for name, target in {model.name: "", **router.other_names(model.name)}.items()
        }
        form: Callable[[ListedModel, int], dict[str, Any]] = model_object
        path = path_of(request)
        if is_anthropic := self._is_anthropic(request, path):
            form = model_info
            models = {
                name: each
                for name, each in models.items()
                if each.model.task == pb.MODEL_TASK_GENERATE
            }
        objects = {name: form(each, self._started_at) for name, each in models.items()}
        if path == MODELS_PATH:
            if is_anthropic:
                return answered(page_of(objects, request.rel_url.query), arrival)
            return answered({"object": "list", "data": [*objects.values()]}, arrival)
        raw_path = plain_path(request.rel_url.raw_path)
        name = unquote(raw_path.removeprefix(f"{MODELS_PATH}/"))
        if name not in objects:
            message = (
                f"the model {name[:200]!r} does not exist: choose one that GET /v1/models lists"
            )
            raise HttpFault(404, message, "model_not_found", param="model")
        return answered(objects[name], arrival)

    def _model_of(
        self, parsed: ParsedRequest, principal: Principal, request_id: uuid.UUID
    ) -> ServedModel:
        """Look up the requested model.

        Raises: ModelNotAllowed, ModelUnknown, RequestImpossible; InvalidRequest if the request asks
        for token ids and the engine reports none.
        """
        router = self._registry.router
        check_model(principal, router.canonical_name(parsed.model))
        route = router.route(parsed.model, request_id)
        model = route.engine.model
        if model.capabilities.counts_from_usage:
            for name, is_wanted in (
                ("return_token_ids", parsed.shows_token_ids),
                ("return_tokens_as_token_ids", parsed.names_tokens_by_id),
            ):
                if is_wanted:
                    raise invalid_parameter(
                        name,
                        "is not supported: this model's engine reports no token ids; leave it out",
                    )
        return self._served_by(route)

    def _served_by(self, route: Route) -> ServedModel:
        """Return the properties of the model of a route."""
        model = route.engine.model
        mark = f"{model.fingerprint}_{route.adapter}" if route.adapter else model.fingerprint
        return ServedModel(self._texts_of(route.served), mark, model.default_sampling)

    def _texts_of(self, served: str) -> TokenTexts:
        """Return the texts of a model's tokens, whose tokenizer changes with the fleet."""
        tokenizers, texts = self._registry.tokenizers, self._texts.get(served)
        if texts is None or texts.tokenizer is not tokenizers[served]:
            self._texts = {name: each for name, each in self._texts.items() if name in tokenizers}
            texts = self._texts[served] = TokenTexts(tokenizers[served])
        return texts

    async def _read(
        self,
        request: web.BaseRequest,
        arrival: Arrival,
        principal: Principal,
        parse: Callable[[bytes], Parsed],
    ) -> Parsed:
        """Read the body when the key's rate limit permits, and parse it; a long one in a thread.

        Raises: HttpFault, Draining, PreparationLimit, Overloaded; the errors of checking the key
        again, and those of `parse`.
        """
        if self._registry.is_draining:
            raise Draining()
        bytes_max, size = self._bytes_max, request.content_length or CHUNKED_BYTES
        # The turn of the key look-up still applies, since nothing was awaited.
        if size <= SHORT_BYTES_MAX and request.content.is_eof():
            body = await read_body(request, bytes_max)
            self._count_bytes(body)
            return self._parse_at_once(arrival, body, parse)
        key = StreamKey(principal, arrival.look_up, math.inf)
        with (
            self._registry.text_work.permit(arrival.caller.payer, min(size, bytes_max)),
            self._authenticator.stream_keys.hold(key),
        ):
            body = await read_body(request, bytes_max)
            self._count_bytes(body)
            await key.refresh()
            key.check()
            # Last, so that the work on this body counts before the key's next request has its turn.
            payer = arrival.caller.payer
            if len(body) > SHORT_BYTES_MAX:
                return await self._registry.in_order(payer, len(body), partial(parse, body))
            await self._registry.pace.wait_for_share(payer)
        return self._parse_at_once(arrival, body, parse)

    def _parse_at_once(
        self, arrival: Arrival, body: bytes, parse: Callable[[bytes], Parsed]
    ) -> Parsed:
        # An ordinary request costs at most this much.
        with self._registry.pace.charging(arrival.caller.payer, START_FREE_S), Stage("parse"):
            return parse(body)

    def _count_bytes(self, body: bytes) -> None:
        if (call := CALL.get()) is not None:
            call.work_s += BYTE_COST_S * len(body)


def build_parsers() -> None:
    """Build what the first body of each API would build, 12 ms of work that its key would pay for.

    On a slow machine a key would have used up its share of the event loop with its first request.
    """
    for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        with contextlib.suppress(InvalidRequest):
            parsed_body(b"{}", api, strict=False)


def is_strict(request: web.BaseRequest, principal: Principal) -> bool:
    """Return whether key or URL demands to refuse unknown parameters. Raises: InvalidRequest."""
    url = request.rel_url
    requested = url.query.get("strict", "0") if url.raw_query_string else "0"
    if requested not in ("0", "1"):
        raise invalid_parameter("strict", "must be 0 or 1")
    return principal.terms.strict_parameters or requested == "1"


def forbids_fallback(request: web.BaseRequest) -> bool:
    """Return whether the header forbids a fallback to another model. Raises: InvalidRequest."""
    sent = request.headers.get(NO_FALLBACK, "0")
    if sent not in ("0", "1"):
        raise invalid_parameter(NO_FALLBACK, "must be 0 or 1")
    return sent == "1"


def end_user_of(request: web.BaseRequest) -> str:
    """Return the end user that the header names; empty if it is not sent. Raises: InvalidRequest.

    Header values are UTF-8, which aiohttp decodes with surrogates in place of other bytes.
    """
    name = request.headers.get(END_USER, "")
    if name and not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise invalid_parameter(END_USER, "must be UTF-8") from None
    return name


def answered(
    value: object, arrival: Arrival, more: Mapping[str, str] | None = None
) -> web.Response:
    """Build a JSON response. `value` is bytes if it is encoded already. `more` adds headers."""
    headers = {"content-type": JSON, **plain_headers(arrival.request_id), **(more or {})}
    body = value if isinstance(value, bytes) else answers.encode(value)
    return web.Response(body=body, headers=headers)


def path_of(request: web.BaseRequest) -> str:
    """Normalize the path: base URLs often end in a slash, and clients add another."""
    return plain_path(request.path)


def plain_path(path: str) -> str:
    while "//" in path:
        path = path.replace("//", "/")
    return path.rstrip("/")


def request_id_of(request: web.BaseRequest) -> uuid.UUID | None:
    """Derive the request id from the `Idempotency-Key` header; None without one.

    Equal keys give equal ids. `X-Request-Id` is not used, since proxies copy it to several requests
    (`TRACING`). Raises: InvalidRequest.
    """
    keys = request.headers.getall("idempotency-key", [])
    if not keys:
        return None
    key = keys[0]
    if len(keys) > 1 or not IDEMPOTENCY_KEY.fullmatch(key):
        description = (
            "must be sent once, with 1 to 255 visible characters; a UUID becomes the request id"
        )
        raise invalid_parameter("Idempotency-Key", description)
    return as_uuid(key) or uuid.uuid5(KEY_NAMESPACE, key)


def as_uuid(text: str) -> uuid.UUID | None:
    """Parse a UUID in its canonical notation. Returns None for any other text."""
    try:
        return uuid.UUID(text) if len(text) == 36 else None
    except ValueError:
        return None
