"""From call metadata to a principal, and what its scopes allow."""

from __future__ import annotations

from api.errors import PermissionDenied, Unauthenticated
from api.interceptor import Context
from metering.db import Sessions
from metering.operations import Payer
from metering.tenants import Principal, authenticate

BEARER = "bearer "


class Authenticator:
    """Checks the API key of a call against the database. Nothing is cached: a revoked key is refused from its next call on."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def principal(self, context: Context, *scopes: str) -> Principal:
        """Who calls. scopes: any one of them is enough.

        Raises: Unauthenticated, PermissionDenied; KeyInvalid for an unknown, expired or revoked key.
        """
        async with self._sessions() as session:
            principal = await authenticate(session, bearer_token(context))
        if principal.scopes.isdisjoint(scopes):
            raise PermissionDenied(
                f"key {principal.key_prefix} has the scopes {', '.join(sorted(principal.scopes))}; this call needs "
                f"{' or '.join(scopes)}"
            )
        return principal


def bearer_token(context: Context) -> str:
    """The secret in the metadata of a call. Raises: Unauthenticated saying how to send it."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(BEARER):
            return value[len(BEARER) :].strip()
    raise Unauthenticated("no API key: send the metadata `authorization: Bearer <API key>`")


def payer(principal: Principal) -> Payer:
    """Whom this principal's requests are charged to."""
    return Payer(principal.organization_id, principal.project_id, principal.api_key_id, principal.currency_code)
