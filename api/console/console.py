"""HTTP handler of the console: static files, sessions, and the console's RPCs as JSON.

`POST /console/api/<Service>/<Method>` takes and returns messages in protobuf's JSON format; errors
are a `google.rpc.Status` in the same format. `GET /console/api/session` returns the permissions of
a key. Paths outside `/console` go to the next handler.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2

from api.access.auth import Authenticator
from api.access.pages import ANSWER_BYTES_MAX
from api.access.permissions import ROLES_OF
from api.access.roles import is_operator
from api.console.sign_in import ORGANIZATION_HEADER, PAGES, SignIn, csrf_of
from api.core.addresses import FORWARDED_FOR
from api.core.errors import FieldViolation, InvalidRequest, MessageUnreadable
from api.core.interceptor import Failed, guarded, writing
from api.core.statuses import ERROR_DOMAIN, STATUS_DETAILS_KEY, help_of, pack, status_of
from api.observability.observer import HTTP, Observer
from api.openai.error_responses import HTTP_STATUSES, HttpFault, error_response
from api.openai.listener import Handle, peer_of, read_body, secret_of
from api.server import Servicers

STATIC = Path(__file__).resolve().parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        # Text can never become markup or code.
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)

# Headers of every response of the console.
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

# HTTP headers that become metadata of the RPC.
FORWARDED_HEADERS = ("authorization", "traceparent", "tracestate", FORWARDED_FOR)
Write = Callable[[Message], Awaitable[None]]
OFFERED: Mapping[str, tuple[str, ...]] = {
    "AdminService": (
        *("ListOrganizations", "CreateOrganization", "UpdateOrganization"),
        *("SuspendOrganization", "ResumeOrganization", "CloseOrganization", "BindOrganization"),
        *("SetBillingProfile", "SetQueueWeight", "EraseEndUser"),
        *("ListProjects", "CreateProject", "UpdateProject"),
        *("SuspendProject", "ResumeProject", "CloseProject"),
        *("ListApiKeys", "CreateApiKey", "UpdateApiKey", "RotateApiKey", "RevokeApiKey"),
        *("ListMembers", "InviteMember", "UpdateMember", "RemoveMember"),
        *("ListInvitations", "ResendInvitation", "RevokeInvitation"),
        *("ListServiceAccounts", "CreateServiceAccount"),
        *("UpdateServiceAccount", "DeleteServiceAccount"),
        *("ListPersons", "DeactivatePerson", "ReactivatePerson", "CreateSignInLink"),
        *("ListQuotas", "SetQuota", "PreviewQuota", "OverrideQuota", "DeleteQuota"),
        *("ListPrices", "SetPrice", "WithdrawPrice", "SimulatePrices"),
        *("ListPlans", "CreatePlan", "AssignPlan"),
        *("ListCreditGrants", "GrantCredit", "GetCreditBalance", "SetPrepaid"),
        *("ListAlertWebhooks", "SetAlertWebhook", "TestAlertWebhook", "DeleteAlertWebhook"),
        *("ListReplicas", "DrainReplica", "UndrainReplica"),
        *("ListLiveRequests", "GetRequest", "KillRequest", "ListAuditEntries"),
        *("GetTraffic", "ListConcerns"),
    ),
    "BillingService": (
        *("GetUsage", "GetForecast", "ExportMonth", "ExportOrganization"),
        *("ListEndUsers", "GetEndUser", "ListAlerts", "ListResalePrices", "GetResaleStatement"),
        *("ListMonths", "GetMonthReport", "GetMonthDocument"),
        *("GetInvoice", "CloseMonth", "VerifyMonth", "GetReconciliation"),
        *("ListAdjustments", "CreateAdjustment", "CreateCreditNote"),
        *("ApproveAdjustment", "RejectAdjustment"),
    ),
    "InferenceService": (
        *("ListModels", "GetQuota", "GetGeneration", "GetOwnUsage", "CreateClientToken"),
    ),
    "ReceiptService": ("GetReceiptMonth",),
}

NAMES = [f"{service}/{method}" for service, methods in OFFERED.items() for method in methods]
ROOT = "/console"
API = f"{ROOT}/api/"
SESSION = "session"
SIGN_IN_CALLS = frozenset({"offer", "link", "invitation", "sign-out"})
# An RPC that every valid key may call: only the key's identity is checked.
ANY_KEY_RPC = "/weir.v1.ReceiptService/ListReceiptKeys"
JSON = "application/json"
# Requests of the page hold names and ids. They are parsed on the event loop, in 2.5 us per byte.
BODY_BYTES_MAX = 4096
TOO_LARGE = "the response is too large for a page: request less, or use the command `weir`"
UNREADABLE_CHARS_MAX = 300
# Responses that several callers get are encoded once; so many of the latest are kept.
SHARED = frozenset(
    {
        f"weir.v1.{name}Response"
        for name in ("GetTraffic", "ListConcerns", "ListLiveRequests", "ListReplicas")
    }
)
SHARED_MAX = 8
FAULT_CODES = {
    404: code_pb2.UNIMPLEMENTED,
    405: code_pb2.UNIMPLEMENTED,
    408: code_pb2.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """Static file. `etag` is the value of its ETag header, a hash of the content.

    `packed` is the content compressed by gzip, for browsers that accept it.
    """

    content: bytes
    packed: bytes
    media_type: str
    etag: str

    def answer(self, request: web.BaseRequest) -> web.Response:
        """Respond with the file, or with status 304 if the browser has this version."""
        headers = {
            **HEADERS,
            "cache-control": "no-cache",
            "etag": self.etag,
            "content-type": self.media_type,
            "vary": "accept-encoding",
        }
        if any(
            each.value == self.etag.removeprefix("W/").strip('"') or each.value == "*"
            for each in request.if_none_match or ()
        ):
            return web.Response(status=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return web.Response(body=self.content, headers=headers)
        return web.Response(body=self.packed, headers=headers | {"content-encoding": "gzip"})


def read_files(directory: Path = STATIC) -> dict[str, PageFile]:
    """Read the static files. Returns them by name; the empty name is the page itself."""
    files = {}
    for path in (path for path in directory.iterdir() if path.suffix in MEDIA_TYPES):
        content = path.read_bytes()
        etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'  # of both encodings
        packed = gzip.compress(content, mtime=0)
        files[path.name] = PageFile(content, packed, MEDIA_TYPES[path.suffix], etag)
    return files | {"": files["index.html"]}


class Refused(grpc.aio.AbortError):
    """Error that ends a refused call. Interceptors and handlers treat it like gRPC's own."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class CallContext:
    """The methods of `grpc.aio.ServicerContext` that the RPC handlers of this API use."""

    def __init__(
        self, request: web.BaseRequest, acting: str = "", write: Write | None = None
    ) -> None:
        """`acting` is the secret of a session, which takes the place of an API key.

        `write` receives the messages of a server-streaming RPC.
        """
        self._metadata = tuple(
            (name, value)
            for name in FORWARDED_HEADERS
            for value in request.headers.getall(name, ())
        )
        if acting:
            self._metadata += (("authorization", f"Bearer {acting}"),)
        self._peer = peer_of(request)
        self._write = write

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def code(self) -> None:
        """Implement `ServicerContext.code`; no handler sets one."""

    async def write(self, message: Message) -> None:
        assert self._write is not None, "the RPC is unary"
        await self._write(message)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, bytes]] = (),
    ) -> NoReturn:
        """Implement `ServicerContext.abort`; details are sent as by gRPC. Raises: Refused."""
        packed = dict(trailing_metadata).get(STATUS_DETAILS_KEY)
        if packed is None:
            raise Refused(status_pb2.Status(code=code.value[0], message=details))
        raise Refused(status_pb2.Status.FromString(packed))


@dataclass(frozen=True, slots=True)
class OfferedCall:
    """RPC that the console may call. `path` is its gRPC path.

    `answer` is its handler with errors converted to statuses; it writes the messages of a stream.
    """

    path: str
    request_type: type[Message]
    answer: Callable[[Any, Any], Awaitable[Any]]
    is_file: bool


def offered_calls(servicers: Servicers, failed: Failed) -> dict[str, OfferedCall]:
    """Build the RPCs that the console may call, by `Service/Method`.

    `failed` is called with the path and error of each call that fails.
    """
    answering: Mapping[str, object] = {
        "AdminService": servicers.admin,
        "BillingService": servicers.billing,
        "InferenceService": servicers.inference,
        "ReceiptService": servicers.receipts,
    }
    calls = {}
    for name in NAMES:
        service, _, method = name.partition("/")
        described = Default().FindServiceByName(f"weir.v1.{service}").methods_by_name[method]
        path, handle = f"/weir.v1.{name}", getattr(answering[service], method)
        is_stream = described.server_streaming
        handle = guarded(
            writing(handle) if is_stream else handle, path, failed, repeats=not is_stream
        )
        request_type = GetMessageClass(described.input_type)
        calls[name] = OfferedCall(path, request_type, handle, described.server_streaming)
    return calls


class Console:
    """HTTP handler of the paths under `/console`; passes all others to the next handler."""

    def __init__(
        self,
        servicers: Servicers,
        authenticator: Authenticator,
        others: Handle,
        *,
        sign_in: SignIn,
        observer: Observer,
        stall_max_s: float,
    ) -> None:
        """`others` handles all other paths. `sign_in` knows the persons of sessions.

        `observer` counts refused requests. A client that reads nothing of a file for `stall_max_s`
        seconds is disconnected.
        """
        self._calls = offered_calls(servicers, observer.call_failed)
        self._files = read_files()
        self._authenticator = authenticator
        self._sign_in = sign_in
        self._next = others
        self._observer = observer
        self._stall_max_s = stall_max_s
        # One response at a time: a computing thread slows the streams of this process.
        self._json_thread = ThreadPoolExecutor(1, "weir-console")
        # Messages of `SHARED` with their JSON, by identity; the kept message keeps its identity.
        self._encoded: dict[int, tuple[Message, asyncio.Future[str]]] = {}

    def handle(self, request: web.BaseRequest) -> Coroutine[Any, Any, web.StreamResponse]:
        """Handle a request to the console, or pass it to the next handler."""
        is_own = request.path in ("/", ROOT) or request.path.startswith(f"{ROOT}/")
        return self._handle(request) if is_own else self._next(request)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        closing = False
        try:
            response = await self._answer(request)
        except HttpFault as fault:
            closing = fault.closing
            self._observer.http_failed(fault.refusal.code)
            response = refused(
                fault_status(fault), fault.refusal.http_status, fault.refusal.headers
            )
        except Refused as error:
            response = refused(error.status)
        except ConnectionError:  # the client disconnected while sending its body
            return web.Response(status=400, headers=HEADERS)
        except Exception as error:
            self._observer.call_failed(HTTP, error)
            response = refused(status_of(error))
        if closing:
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in ("/", ROOT):
            check_method(request, "GET", "HEAD")
            # Relative, for proxies with a path prefix.
            return web.Response(status=307, headers={**HEADERS, "location": "console/"})
        if request.path.startswith(API):
            return await self._answer_call(request, request.path.removeprefix(API))
        if request.path.startswith(PAGES):
            page = await self._sign_in.answer(request, request.path.removeprefix(PAGES))
            page.headers.update(HEADERS)
            return page
        file = self._files.get(request.path.removeprefix(f"{ROOT}/"))
        if file is None:
            raise HttpFault(
                404, "the console does not have this file: open /console/", "unknown_url"
            )
        check_method(request, "GET", "HEAD")
        return file.answer(request)

    async def _answer_call(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        if name == SESSION:
            check_method(request, "GET")
            return as_json(json.dumps(await self._session(request)))
        if name in SIGN_IN_CALLS:
            check_method(request, "POST")
            response = await self._sign_in_call(request, name)
            response.headers.update(HEADERS)
            return response
        call = self._calls.get(name)
        if call is None:
            raise HttpFault(
                404,
                "the console does not offer this call: use gRPC or the command `weir`",
                "not_offered",
            )
        check_method(request, "POST")
        check_json(request)
        acting = await self._acting(request)  # before the body is read; the handler authenticates
        parsed = read_message(await read_body(request, BODY_BYTES_MAX), call.request_type)
        if call.is_file:
            return await FileAnswer(request, self._stall_max_s).serve(call, parsed, acting)
        answer: Message = await call.answer(parsed, CallContext(request, acting))
        return as_json(await self._json_of(answer))

    async def _acting(self, request: web.BaseRequest) -> str:
        """Return the secret by which the session of a request acts; empty if it has an API key.

        Raises: Unauthenticated, PermissionDenied, InvalidValue.
        """
        cookie = self._sign_in.cookie(request)
        if cookie is None:
            secret_of(request)
            return ""
        if cookie.acting is None:
            raise InvalidRequest(
                [FieldViolation(ORGANIZATION_HEADER, "is missing: reload the page")]
            )
        await self._sign_in.noted(cookie)
        return cookie.acting

    async def _sign_in_call(self, request: web.BaseRequest, name: str) -> web.Response:
        """Begin a session, or end it."""
        check_json(request)  # which a page of another origin cannot send
        body = parse_object(await read_body(request, BODY_BYTES_MAX))
        match name:
            case "offer":
                return await self._sign_in.offer(request, body)
            case "link":
                return await self._sign_in.use_link(request, body)
            case "invitation":
                return await self._sign_in.accept(request, body)
        return await self._sign_in.end(request)

    async def _session(self, request: web.BaseRequest) -> dict[str, Any]:
        """Return what a key or session may do, for display only: each RPC checks it itself.

        Without either: how to sign in. A session that acts in no organization has its list only.
        """
        cookie = self._sign_in.cookie(request)
        if cookie is None and "authorization" not in request.headers:
            return {"providers": self._sign_in.providers}
        found: dict[str, Any] = {}
        if cookie is None:
            secret = secret_of(request)
        else:
            signed_in = await self._sign_in.person_of(cookie)
            found = {
                "csrf": csrf_of(cookie.secret),
                "email": signed_in.person.email,
                "displayName": signed_in.person.display_name,
                "expireTime": signed_in.expires_at.isoformat(),
                "organizations": [
                    {
                        "id": str(each.organization_id),
                        "name": each.organization_name,
                        "role": each.role,
                    }
                    for each in signed_in.memberships
                ],
            }
            if cookie.acting is None:
                return found
            secret = cookie.acting
        origin = self._authenticator.proxies.origin(
            peer_of(request), request.headers.getall(FORWARDED_FOR, ())
        )
        principal = await self._authenticator.principal_of(
            secret, method=ANY_KEY_RPC, origin=origin
        )
        return found | {
            "keyPrefix": principal.key_prefix,
            "organizationId": str(principal.organization_id),
            "currencyCode": principal.currency_code,
            "scopes": sorted(principal.scopes),
            "isOperator": is_operator(principal),
            "calls": [
                name
                for name, call in self._calls.items()
                if not principal.scopes.isdisjoint(ROLES_OF[call.path])
            ],
        }

    async def _json_of(self, answer: Message) -> str:
        """Encode a message as protobuf JSON in a thread. Raises: InvalidRequest if too large."""
        if answer.ByteSize() > ANSWER_BYTES_MAX:
            raise InvalidRequest([FieldViolation("page_size", TOO_LARGE)])
        if answer.DESCRIPTOR.full_name not in SHARED:
            return await self._encode(answer)
        if id(answer) not in self._encoded:
            self._encoded[id(answer)] = answer, self._encode(answer)
            while len(self._encoded) > SHARED_MAX:
                del self._encoded[next(iter(self._encoded))]
        return await asyncio.shield(self._encoded[id(answer)][1])

    def _encode(self, answer: Message) -> asyncio.Future[str]:
        write = functools.partial(json_format.MessageToJson, answer, indent=None)
        return asyncio.get_running_loop().run_in_executor(self._json_thread, write)


class FileAnswer:
    """HTTP response that joins the messages of a streaming RPC into one file."""

    def __init__(self, request: web.BaseRequest, stall_max_s: float) -> None:
        self._request = request
        self._stall_max_s = stall_max_s
        self._response: web.StreamResponse | None = None

    async def serve(self, call: OfferedCall, parsed: Message, acting: str) -> web.StreamResponse:
        """Serve the file. If the RPC fails after the first chunk, the connection is aborted.

        Raises Refused if it fails before.
        """
        try:
            await call.answer(parsed, CallContext(self._request, acting, self._write))
        except Refused:
            if self._response is None:
                raise
            if (transport := self._request.transport) is not None:
                transport.abort()
            return self._response
        assert self._response is not None, "a file has at least one piece"
        await self._response.write_eof()
        return self._response

    async def _write(self, piece: Any) -> None:
        try:
            async with asyncio.timeout(self._stall_max_s):
                if self._response is None:
                    disposition = f'attachment; filename="{piece.file_name}"'
                    headers = {
                        "content-type": piece.media_type,
                        "content-disposition": disposition,
                        "cache-control": "no-store",
                    }
                    self._response = web.StreamResponse(headers={**HEADERS, **headers})
                    await self._response.prepare(self._request)
                await self._response.write(piece.chunk)
        except (TimeoutError, ConnectionError) as gone:  # not an error of the server
            raise Refused(
                status_pb2.Status(code=code_pb2.CANCELLED, message="the client is gone")
            ) from gone


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises: MessageUnreadable."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise MessageUnreadable("Your body is not a JSON object. Correct it.")
    return value


def check_json(request: web.BaseRequest) -> None:
    """Raise HttpFault unless the body is JSON, which other sites' forms cannot send."""
    if request.content_type != JSON:
        raise HttpFault(415, f"send the request as {JSON}", "unsupported_media_type")


def read_message(body: bytes, kind: type[Message]) -> Message:
    """Parse a body as protobuf JSON; empty means an empty message. Raises: MessageUnreadable."""
    message = kind()
    try:
        return json_format.Parse(body.decode() or "{}", message)
    except Exception as error:  # the parser raises errors of many types
        detail = "".join(each for each in str(error) if each.isprintable())[:UNREADABLE_CHARS_MAX]
        raise MessageUnreadable(
            f"Your body is not a {message.DESCRIPTOR.full_name} as JSON"
            f" ({detail or type(error).__name__}). Correct it."
        ) from error


def check_method(request: web.BaseRequest, *allowed: str) -> None:
    """Raise HttpFault unless the HTTP method is one of `allowed`.

    `OPTIONS` never is, which keeps pages of other origins from calling.
    """
    if request.method not in allowed:
        raise HttpFault(
            405,
            f"send {allowed[0]}, not {request.method}",
            "method_not_allowed",
            {"allow": ", ".join(allowed)},
        )


def as_json(text: str, http_status: int = 200) -> web.Response:
    headers = {**HEADERS, "content-type": JSON, "cache-control": "no-store"}
    return web.Response(status=http_status, body=text.encode(), headers=headers)


def refused(status: status_pb2.Status, http_status: int = 0, more: Any = None) -> web.Response:
    """Convert a status to an HTTP response.

    `http_status` overrides the status code; 0 derives it from the gRPC code. `more` replaces the
    default headers of an error.
    """
    response = as_json(
        json_format.MessageToJson(status, indent=None),
        http_status or HTTP_STATUSES.get(status.code, 500),
    )
    response.headers.update(error_response(status).headers if more is None else more)
    return response


def fault_status(fault: HttpFault) -> status_pb2.Status:
    code = FAULT_CODES.get(fault.refusal.http_status, code_pb2.INVALID_ARGUMENT)
    reason = fault.refusal.facts["reason"]
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    return pack(code, fault.refusal.message, [info, help_of(reason)])
