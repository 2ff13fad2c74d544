"""RPCs for trusted issuers of tokens, and for revocations of their tokens."""

from __future__ import annotations

from datetime import timedelta

from weir.v1 import tokens_pb2 as pb

from api.access.issuer_keys import KEY_TYPES, checked_issuer_url, parse_keys
from api.access.permissions import check_may_give
from api.access.roles import is_operator
from api.access.servicer import AuthenticatedServicer, CallerTransaction, once, removed
from api.core import wire
from api.core.errors import PermissionDenied
from api.core.interceptor import Context
from inference.routing.router import Router
from metering.core.errors import InvalidValue
from metering.tenants import token_issuers
from metering.tenants.key_terms import KeyTerms
from metering.tenants.token_issuers import IssuerRecord, IssuerTerms


class TokenCalls(AuthenticatedServicer):
    """RPCs for trusted issuers."""

    _router: Router
    _private_issuers: bool

    @once
    async def CreateTokenIssuer(
        self, request: pb.CreateTokenIssuerRequest, acting: CallerTransaction, earlier: str
    ) -> tuple[object, pb.CreateTokenIssuerResponse]:
        """Trust an issuer. Where issuers may be in private networks, only the operator may."""
        if earlier:
            record = await token_issuers.find_token_issuer(acting.session, earlier)
            return earlier, pb.CreateTokenIssuerResponse(token_issuer=issuer_message(record))
        if self._private_issuers and not is_operator(acting.principal):
            raise PermissionDenied(
                "This server reads keys of issuers in private networks too, so only its operator"
                " may trust issuers. Ask the operator to trust this one."
            )
        for model in request.models:
            self._router.check_canonical_name(model)
        key_terms = KeyTerms(**wire.stated_terms(request, KeyTerms))
        check_may_give(acting.principal, key_terms, None)
        record = await token_issuers.create_token_issuer(
            acting.session,
            organization=request.organization,
            terms=self._issuer_terms(request),
            projects=token_issuers.projects_of(
                request.projects, has_claim=bool(request.project_claim)
            ),
            key_terms=key_terms,
            actor=acting.actor,
        )
        return record.id, pb.CreateTokenIssuerResponse(token_issuer=issuer_message(record))

    def _issuer_terms(self, request: pb.CreateTokenIssuerRequest) -> IssuerTerms:
        """Read and check the terms of an issuer. Raises: InvalidValue, InvalidRequest."""
        terms = wire.stated_terms(request, IssuerTerms)
        for name in ("leeway", "lifetime_max"):
            duration = wire.given_duration(request, name)
            if duration is not None:
                if duration % timedelta(seconds=1):
                    raise InvalidValue(name, "must be whole seconds")
                terms[f"{name}_s"] = duration // timedelta(seconds=1)
        found = IssuerTerms(**terms)
        check_sources(found, private=self._private_issuers)
        return found

    async def DeleteTokenIssuer(
        self, request: pb.DeleteTokenIssuerRequest, context: Context
    ) -> pb.DeleteTokenIssuerResponse:
        async with self._transaction(context) as (session, actor):
            removal = token_issuers.delete_token_issuer(
                session, token_issuer=request.token_issuer_id, actor=actor
            )
            return pb.DeleteTokenIssuerResponse(
                deleted=await removed(removal, allow_missing=request.allow_missing)
            )

    async def RevokeTokens(
        self, request: pb.RevokeTokensRequest, context: Context
    ) -> pb.RevokeTokensResponse:
        async with self._transaction(context) as (session, actor):
            expires_at = await token_issuers.revoke_tokens(
                session,
                token_issuer=request.token_issuer_id,
                kind=request.claim,
                name=request.value,
                actor=actor,
            )
            return pb.RevokeTokensResponse(
                revocation=pb.TokenRevocation(
                    claim=request.claim,
                    value=request.value,
                    expire_time=wire.timestamp(expires_at),
                )
            )


def check_sources(terms: IssuerTerms, *, private: bool) -> None:
    """Check the URLs, keys and algorithms of an issuer. Raises: InvalidValue."""
    if unknown := set(terms.algorithms) - KEY_TYPES.keys():
        raise InvalidValue(
            "algorithms", f"{min(unknown)[:20]!r} is not one of {', '.join(KEY_TYPES)}"
        )
    checked_issuer_url(terms.issuer, private=private)
    if terms.keys_url:
        checked_issuer_url(terms.keys_url, private=private, field="keys_url")
    if terms.keys:
        try:
            parse_keys(terms.keys[: token_issuers.KEYS_CHARS_MAX + 1])
        except ValueError as error:
            raise InvalidValue("keys", f"must be a JSON Web Key Set: {error}") from error


def issuer_message(record: IssuerRecord) -> pb.TokenIssuer:
    message = wire.message_of(
        pb.TokenIssuer, record, token_issuer_id=record.id, leeway=None, lifetime_max=None
    )
    message.leeway.FromSeconds(record.leeway_s)
    message.lifetime_max.FromSeconds(record.lifetime_max_s)
    return message
