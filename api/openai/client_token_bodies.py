"""Bodies of the calls that make and revoke client tokens, and rules for pages that use them."""

from __future__ import annotations

from typing import Any, ClassVar

from aiohttp import web
from msgspec import Struct
from weir.v1 import tokens_pb2 as pb

from api.core.errors import PermissionDenied
from api.generation.request.client_tokens import CALLS, seconds
from metering.core.errors import TokenInvalid
from metering.tenants.authentication import TokenTerms

ORIGIN = "origin"
ALLOWED_ORIGIN = "access-control-allow-origin"
PREFLIGHT_AGE_S = 600


class ClientTokenParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/client_tokens`, with the fields of `CreateClientTokenRequest`."""

    api: ClassVar[str] = ""

    call: str
    model: str
    expires_in_s: int | None = None
    end_user: str = ""
    origins: list[str] = []
    max_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def message(self) -> pb.CreateClientTokenRequest:
        """Convert to the request of the contract. Raises: ValueError for a number out of range."""
        request = pb.CreateClientTokenRequest(
            call=self.call,
            model=self.model,
            end_user=self.end_user,
            origins=self.origins,
            max_requests=self.max_requests or 0,
            max_input_tokens=self.max_input_tokens or 0,
            max_output_tokens=self.max_output_tokens or 0,
        )
        if self.expires_in_s is not None:
            request.lifetime.FromTimedelta(seconds(self.expires_in_s))
        return request


class RevocationParameters(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `/v1/client_tokens/revoke`: one of both."""

    api: ClassVar[str] = ""

    id: str = ""
    end_user: str = ""


def token_body(made: pb.CreateClientTokenResponse) -> dict[str, Any]:
    return {
        "id": made.client_token_id,
        "object": "client_token",
        "value": made.value,
        "expires_at": made.expire_time.seconds,
    }


def check_page(request: web.BaseRequest, token: TokenTerms) -> None:
    """Check that a page of this origin may use a client token, and let it read the response.

    Raises: PermissionDenied.
    """
    if not token.origins:
        return
    if (origin := request.headers.get(ORIGIN, "")) not in token.origins:
        raise PermissionDenied(
            f"Your client token is for pages of {', '.join(token.origins)[:300]}, and this request"
            f" comes from {origin[:100] or 'no page'}. Send it from there, or name the origin when"
            " you make the token."
        )
    request[ALLOWED_ORIGIN] = origin


def note_refused_page(request: web.BaseRequest, refusal: Exception) -> None:
    """Let a page read why its own token is refused, so that it can get another one."""
    if isinstance(refusal, TokenInvalid):
        origin = request.headers.get(ORIGIN, "")
        if origin in refusal.origins:
            request[ALLOWED_ORIGIN] = origin


def preflight(request: web.BaseRequest, path: str) -> web.Response | None:
    """Answer a browser's question whether a page may send a call of client tokens.

    The question has no token. A call with an API key, or of another page, gives the page nothing to
    read: its response lacks the header that allows it. None for other requests.
    """
    headers = request.headers
    if (
        request.method != "OPTIONS"
        or ORIGIN not in headers
        or headers.get("access-control-request-method") != "POST"
        or path.removeprefix("/v1/") not in CALLS
    ):
        return None
    return web.Response(
        status=204,
        headers={
            ALLOWED_ORIGIN: headers[ORIGIN],
            "access-control-allow-methods": "POST",
            "access-control-allow-headers": "authorization, *",
            "access-control-max-age": str(PREFLIGHT_AGE_S),
            "vary": ORIGIN,
        },
    )
