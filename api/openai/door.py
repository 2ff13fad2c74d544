"""The door itself: who asks for what, and which handler answers; and embeddings. `listener.py` has the sockets."""

from __future__ import annotations

import base64
import math
import re
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from aiohttp import web
from msgspec import Struct
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import Authenticator, StandingKey, check_model
from api.core.addresses import FORWARDED_FOR
from api.core.errors import Draining, status_of
from api.core.messages import models_for
from api.core.pace import BYTE_COST_S, REFUSAL_COST_S, START_FREE_S, VISIT
from api.core.wire import picos_of
from api.generation.embedding_wire import parse_embed
from api.generation.live import Caller
from api.generation.process import Process
from api.observability.observer import HTTP
from api.observability.spans import trace_of
from api.openai import answers
from api.openai.answers import Answer, ChatAnswer, CompletionAnswer, ResponseAnswer, TokenTexts, cost_facts
from api.openai.exchange import JSON, Arrival, Exchange, plain_headers, refused
from api.openai.listener import peer_of, read_body, secret_of
from api.openai.parameters import (
    Asked,
    ChatParameters,
    CompletionParameters,
    Int32,
    Prompt,
    ResponseParameters,
    chat_asked,
    completion_asked,
    decode,
    prompts_of,
    response_asked,
)
from api.openai.refusals import HttpFault, headers_of, refusal_of, wrong_parameter
from metering.quotas.quota_rules import Owner
from metering.store.db import Sessions
from metering.tenants.tenants import Principal

EMBEDDING_NAMES: Mapping[str, str] = {"inputs": "input", "labels": "user", "labels['user']": "user"}

INPUT_COUNT_MAX = 2048  # OpenAI's own; the model may take fewer


class EmbeddingParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """What `client.embeddings.create` may send."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    user: str | None = None


def embed_request(given: EmbeddingParameters, request_id: str) -> pb.EmbedRequest:
    """What a body asks for. Raises: InvalidRequest."""
    if not given.model:
        raise wrong_parameter("model", "must name a model; GET /v1/models tells which there are")
    request = pb.EmbedRequest(request_id=request_id, model=given.model, labels={"user": given.user} if given.user else None)
    for each in prompts_of(given.input, "input", INPUT_COUNT_MAX):
        if isinstance(each, str):
            request.inputs.add(text=each)
        else:
            request.inputs.add(token_ids=pb.TokenIds(ids=each))
    return request


def check_dimensions(given: EmbeddingParameters, dimension: int) -> None:
    """Vectors have the length that the model gives them. Raises: InvalidRequest for any other."""
    if given.dimensions not in (None, dimension):
        raise wrong_parameter("dimensions", f"must be {dimension}, which is what this model gives, or left out")


def embedding_list(given: EmbeddingParameters, response: pb.EmbedResponse, request_id: str) -> dict[str, Any]:
    in_base64 = given.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": packed(each) if in_base64 else list(each.vector)}
        for index, each in enumerate(response.embeddings)
    ]
    count = response.usage.embedding_token_count
    return {
        "object": "list",
        "data": data,
        "model": given.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "weir": {
            "cost": cost_facts(response.cost.currency_code, picos_of(response.cost)),
            "price_version": response.price_version,
            "request_ids": [request_id],
        },
    }


def packed(embedding: pb.Embedding) -> str:
    """A vector as base64 of its 32-bit floats, the lowest byte first."""
    return base64.b64encode(array("f", embedding.vector).tobytes()).decode()


Parameters = TypeVar("Parameters", bound=Struct)
OWNER = "weir"

# The calls of the contract that these stand for: whoever may make those may make these.
SERVICE = "/weir.v1.InferenceService"
KEY_AGE_MAX_S = 1.0  # second: what is known of a key may be so old. Over gRPC a stream is let in once, here each request is
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
CHUNKED_BYTES = 256 * 1024  # what a body of unknown size counts as while it is read
SHORT_BYTES_MAX = 16_384  # of a body that takes no room from others if it came with its head: it is read in some 50 µs
KEY_NAMESPACE = uuid.UUID("6f1c0c9e-2f6b-5d0a-9a54-3b1d9a1c7e10")  # of request ids that come from keys that are no UUIDs
Handler = Callable[[web.BaseRequest, Arrival, Principal], Awaitable[web.StreamResponse | Exchange]]


def model_object(model: pb.Model, started_at: int) -> dict[str, Any]:
    """One model. It counts as created when its present price came into force; without one, when this process was started.

    started_at: in seconds since 1970.
    """
    facts: dict[str, Any] = {"context_window_tokens": model.context_window_tokens, "engine": model.engine}
    created = started_at
    if model.HasField("price"):
        price = model.price
        created = price.effective_time.seconds
        facts["price"] = {
            "version": price.version,
            "currency_code": price.currency_code,
            "input_picos_per_token": price.input_picos_per_token,
            "cached_input_picos_per_token": price.cached_input_picos_per_token,
            "output_picos_per_token": price.output_picos_per_token,
        }
    return {"id": model.name, "object": "model", "created": created, "owned_by": OWNER, "weir": facts}


GENERATE, EMBED, LIST_MODELS = f"{SERVICE}/Generate", f"{SERVICE}/Embed", f"{SERVICE}/ListModels"


class Door:
    """Answers HTTP requests of OpenAI's clients."""

    def __init__(self, process: Process, authenticator: Authenticator, sessions: Sessions) -> None:
        self._process = process
        self._authenticator = authenticator
        self._sessions = sessions
        self._started_at = int(time.time())
        self._texts = {name: TokenTexts(tokenizer) for name, tokenizer in process.tokenizers.items()}
        self._handlers: dict[str, tuple[str, Handler, str]] = {
            "/v1/chat/completions": ("POST", partial(self._generate, ChatParameters, chat_asked, ChatAnswer), GENERATE),
            "/v1/completions": (
                "POST",
                partial(self._generate, CompletionParameters, completion_asked, CompletionAnswer),
                GENERATE,
            ),
            "/v1/responses": ("POST", partial(self._generate, ResponseParameters, response_asked, ResponseAnswer), GENERATE),
            "/v1/embeddings": ("POST", self._embed, EMBED),
            "/v1/models": ("GET", self._models, LIST_MODELS),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every error becomes an error body."""
        received_at = time.monotonic()
        request_id = uuid.uuid4()
        owner: Owner | None = None  # once it is known whose request it is
        try:
            request_id = request_id_of(request) or request_id
            handler, stands_for = self._find(request)
            secret = secret_of(request)
            origin = self._authenticator.proxies.origin(peer_of(request), request.headers.getall(FORWARDED_FOR, ()))

            find = self._authenticator.principal_of
            look_up = partial(find, secret, method=stands_for, origin=origin, age_max_s=KEY_AGE_MAX_S)
            owner = principal = await look_up()
            auth_ms = (time.monotonic() - received_at) * 1000
            trace = trace_of(request.headers.get("traceparent"), request.headers.get("tracestate"))
            arrival = Arrival(Caller.of(principal, auth_ms, received_at, None, trace), request_id, look_up)
            answer = await handler(request, arrival, principal)
            return await answer.serve() if isinstance(answer, Exchange) else answer
        except HttpFault as fault:
            self._count_refusal(owner)
            self._process.observer.http_failed(fault.refusal.code)
            return refused(fault.refusal, request_id, closing=self._is_draining or fault.closing)
        except ConnectionError:  # in the middle of its body
            return web.Response(status=400)
        except Exception as error:
            self._count_refusal(owner)
            self._process.observer.call_failed(HTTP, error)
            return refused(refusal_of(status_of(error)), request_id, closing=self._is_draining)

    def _count_refusal(self, owner: Owner | None) -> None:
        if owner is not None:
            self._process.pace.spent(owner, REFUSAL_COST_S)

    @property
    def _is_draining(self) -> bool:
        return self._process.admission.capacity.is_draining

    def _find(self, request: web.BaseRequest) -> tuple[Handler, str]:
        """Who answers, and the call that this stands for. Raises: HttpFault for a path or a method that is not served."""
        path = request.path.rstrip("/")
        found = self._handlers.get("/v1/models" if path.startswith("/v1/models/") else path)
        if found is None:
            served = ", ".join(self._handlers)
            raise HttpFault(404, f"there is nothing at {request.method} {path[:200] or '/'}; served are {served}", "unknown_url")
        method, handler, stands_for = found
        taken = ("GET", "HEAD") if method == "GET" else (method,)  # aiohttp leaves out the body of an answer to HEAD
        if request.method not in taken:
            raise HttpFault(405, f"{path[:200]} takes {method}", "method_not_allowed", {"allow": ", ".join(taken)})
        return handler, stands_for

    async def _generate(
        self,
        parameters: type[Parameters],
        understood: Callable[[Parameters], Asked],
        answer: Callable[[Asked, TokenTexts, str, int], Answer],
        request: web.BaseRequest,
        arrival: Arrival,
        principal: Principal,
    ) -> web.StreamResponse | Exchange:
        """Return an exchange that is to be served, or a refusal.

        parameters: what a body may hold. understood: what they ask for. answer: says what comes of it.
        """
        body = await self._body(request, arrival, principal)
        with self._process.pace.spending(arrival.caller.payer, START_FREE_S):  # an ordinary one takes no more
            asked = understood(decode(body, parameters))
            texts = self._texts_of(asked, principal, arrival.request_id)
            told = answer(asked, texts, arrival.request_id.hex, int(time.time()))
            exchange = Exchange(self._process, request, arrival, asked, told)
            return exchange.parse() or exchange

    async def _embed(self, request: web.BaseRequest, arrival: Arrival, principal: Principal) -> web.StreamResponse:
        body = await self._body(request, arrival, principal)
        with self._process.pace.spending(arrival.caller.payer, START_FREE_S):
            given = decode(body, EmbeddingParameters)
        try:
            with self._process.pace.spending(arrival.caller.payer, START_FREE_S):
                start = parse_embed(embed_request(given, str(arrival.request_id)))
            check_model(principal, start.model)
            check_dimensions(given, self._process.router.choose_encoder(start.model).model.embedding_dimension)
            response = await self._process.embed(arrival.caller, start).answer()
        except Exception as error:
            return refused(refusal_of(status_of(error), EMBEDDING_NAMES), arrival.request_id, closing=self._is_draining)
        return answered(embedding_list(given, response, str(arrival.request_id)), arrival, headers_of(response.quotas))

    async def _models(self, request: web.BaseRequest, arrival: Arrival, principal: Principal) -> web.StreamResponse:
        await self._authenticator.turn(principal)
        models = await models_for(self._process.router, self._sessions, principal)
        if request.path.rstrip("/") == "/v1/models":
            return answered({"object": "list", "data": [model_object(model, self._started_at) for model in models]}, arrival)
        name = unquote(request.rel_url.raw_path.removeprefix("/v1/models/"))
        found = next((model for model in models if model.name == name), None)
        if found is None:
            told = f"the model {name[:200]!r} does not exist; GET /v1/models tells which there are"
            raise HttpFault(404, told, "model_not_found", param="model")
        return answered(model_object(found, self._started_at), arrival)

    def _texts_of(self, asked: Asked, principal: Principal, request_id: uuid.UUID) -> TokenTexts:
        """Token texts of the model asked for. Raises: ModelNotAllowed, ModelUnknown, RequestImpossible."""
        router = self._process.router
        check_model(principal, router.own_name(asked.model))
        return self._texts[router.route(asked.model, request_id).served]

    async def _body(self, request: web.BaseRequest, arrival: Arrival, principal: Principal) -> bytes:
        """The body, once the request may have one, in its key's turn.

        Raises: HttpFault, Draining, PreparationLimit, Overloaded; as the look-up of the key, since a body takes its time.
        """
        if self._is_draining:
            raise Draining("this server is shutting down: the same request will be served elsewhere")
        most, size = self._process.admission.settings.message_bytes_max, request.content_length or CHUNKED_BYTES
        if size <= SHORT_BYTES_MAX and request.content.is_eof():  # in the turn in which the key was looked up: nothing waits
            body = await read_body(request, most)
            self._count_bytes(body)
            return body
        key = StandingKey(principal, arrival.look_up, math.inf)
        with self._process.text_work.permit(arrival.caller.payer, min(size, most)), self._authenticator.standing.hold(key):
            body = await read_body(request, most)
            self._count_bytes(body)
            await key.look_again()
            key.check()
            # At last, so that what is done with the body counts before another one of the key has its turn.
            await self._process.pace.turn(arrival.caller.payer)
        return body

    def _count_bytes(self, body: bytes) -> None:
        if (visit := VISIT.get()) is not None:
            visit.work_s += BYTE_COST_S * len(body)


def answered(value: object, arrival: Arrival, more: Mapping[str, str] | None = None) -> web.Response:
    """A response of one piece of JSON. more: headers beside those that every response has."""
    headers = {"content-type": JSON, **plain_headers(arrival.request_id), **(more or {})}
    return web.Response(body=answers.encode(value), headers=headers)


def request_id_of(request: web.BaseRequest) -> uuid.UUID | None:
    """The id that the client gives its request; None if it leaves that to us. The same key is always the same id.

    A proxy may put an `X-Request-Id` of its own form on everything: only a UUID is taken for one. Raises: InvalidRequest.
    """
    keys = request.headers.getall("idempotency-key", [])
    if keys:
        key = keys[0]
        if len(keys) > 1 or not IDEMPOTENCY_KEY.fullmatch(key):
            remedy = "must be one, and have 1 to 255 visible characters; a UUID becomes the request id itself"
            raise wrong_parameter("Idempotency-Key", remedy)
        return as_uuid(key) or uuid.uuid5(KEY_NAMESPACE, key)
    given = request.headers.get("x-request-id")
    return as_uuid(given) if given else None


def as_uuid(text: str) -> uuid.UUID | None:
    """A UUID in its usual form; None if it is none."""
    try:
        return uuid.UUID(text) if len(text) == 36 else None
    except ValueError:
        return None
