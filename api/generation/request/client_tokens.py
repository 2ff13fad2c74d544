"""Client tokens for browsers, made and revoked over gRPC and HTTP."""

from __future__ import annotations

from datetime import timedelta

from weir.v1 import tokens_pb2 as pb

from api.access.auth import check_model
from api.core import wire
from api.core.errors import PermissionDenied
from inference.routing.router import Router
from metering.core.errors import InvalidValue
from metering.store.db import Sessions
from metering.tenants import client_tokens
from metering.tenants.authentication import Principal
from metering.tenants.client_tokens import ClientTokenTerms
from metering.tenants.usage_subjects import checked_end_user

# HTTP calls that a client token may make, by their paths below `/v1/`
CALLS = ("chat/completions", "completions", "responses", "messages", "embeddings")


async def create_client_token(
    router: Router, sessions: Sessions, maker: Principal, request: pb.CreateClientTokenRequest
) -> pb.CreateClientTokenResponse:
    """Make a client token of the caller's key, which can do no more than the key.

    Raises: PermissionDenied, ModelNotAllowed, ModelUnknown, InvalidValue, InvalidRequest.
    """
    check_has_key(maker)
    if request.call not in CALLS:
        raise InvalidValue("call", f"must be one of {', '.join(CALLS)}, got {request.call[:40]!r}")
    if not request.model:
        raise InvalidValue("model", "must be the model that the token may use")
    model = router.canonical_name(request.model)
    check_model(maker, model)
    router.find(model)
    terms = ClientTokenTerms(
        call=request.call,
        model=model,
        end_user=checked_end_user(request.end_user),
        origins=tuple(request.origins),
        max_requests=request.max_requests or client_tokens.REQUESTS,
        max_input_tokens=request.max_input_tokens or None,
        max_output_tokens=request.max_output_tokens or None,
    )
    lifetime = wire.given_duration(request, "lifetime")
    async with sessions.begin() as session:
        token_id, value, expires_at = await client_tokens.create_client_token(
            session, maker, terms, client_tokens.LIFETIME if lifetime is None else lifetime
        )
    return pb.CreateClientTokenResponse(
        client_token_id=str(token_id), value=value, expire_time=wire.timestamp(expires_at)
    )


async def revoke_client_tokens(
    sessions: Sessions, maker: Principal, request: pb.RevokeClientTokensRequest
) -> pb.RevokeClientTokensResponse:
    """Revoke client tokens of the caller's key.

    Raises: PermissionDenied, NotFound, InvalidValue.
    """
    check_has_key(maker)
    async with sessions.begin() as session:
        count = await client_tokens.revoke_client_tokens(
            session, maker, client_token=request.client_token_id, end_user=request.end_user
        )
    return pb.RevokeClientTokensResponse(revoked_count=count)


def check_has_key(maker: Principal) -> None:
    """Raise PermissionDenied for a caller with a token: it would outlive its revocation."""
    if maker.token is not None:
        raise PermissionDenied(
            "Client tokens are made with an API key, and you sent a token. Use the key of your"
            " application's server."
        )


def seconds(value: int) -> timedelta:
    """Return a duration, of which a protocol buffer has no more than this range."""
    return timedelta(seconds=min(max(value, -(10**9)), 10**9))
