"""Callers with tokens of trusted issuers: the bound key that acts for a token, and its limits.

A claim only narrows what the key may do. The issuer, the key and the revocations are read for each
check, as those of a secret; the signature is verified once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from api.access.issuer_keys import KEY_TYPES, KeySource
from api.access.issuers import (
    Issuer,
    TokenVerifier,
    UnverifiedToken,
    VerifiedToken,
    parse_token,
    text_claim,
    time_claim,
)
from metering.core.errors import InvalidValue, TokenInvalid
from metering.tenants.authentication import (
    Principal,
    SingleUse,
    TokenBounds,
    TokenTerms,
    narrowed,
)
from metering.tenants.key_terms import MODELS_PER_KEY_MAX, TOKENS_MAX
from metering.tenants.token_issuers import (
    KINDS,
    TrustedIssuer,
    authenticate_token,
    find_trusted,
    mark_of,
)
from metering.tenants.usage_subjects import checked_end_user, checked_label_value

AUDIENCES_MAX = 20  # of one token
TRUSTED_MAX = 1000  # remembered issuers
Trusted = tuple[TrustedIssuer, Issuer]
T = TypeVar("T")


class Read(Protocol):
    """Run of a query in a session of its own."""

    def __call__(self, query: Callable[[AsyncSession], Awaitable[T]], /) -> Awaitable[T]:
        """Return the result of the query."""


class TokenCallers:
    """Finds the principals of tokens."""

    def __init__(self, verifier: TokenVerifier, clock: Callable[[], float] = time.time) -> None:
        self.verifier = verifier
        self._clock = clock
        # By issuer and audiences. Rows never change; their removal is seen with their keys
        self._trusted: OrderedDict[tuple[str, tuple[str, ...]], Trusted] = OrderedDict()

    async def principal(self, text: str, read: Read) -> Principal:
        """Verify a token and return its principal. Raises: TokenInvalid, IssuerUnavailable."""
        token = parse_token(text)
        names = token.issuer, token.audiences
        if (known := self._trusted.get(names)) is not None:
            try:
                return await self._principal(token, known, read)
            except TokenInvalid:  # perhaps the issuer is trusted on other terms by now
                self._trusted.pop(names, None)
        found = await self._find(token, read)
        self._trusted[names] = found
        if len(self._trusted) > TRUSTED_MAX:
            self._trusted.popitem(last=False)
        return await self._principal(token, found, read)

    async def _find(self, token: UnverifiedToken, read: Read) -> Trusted:
        audiences = token.audiences
        if not token.issuer or not audiences or len(audiences) > AUDIENCES_MAX:
            raise TokenInvalid(f"it must have `iss`, and `aud` with 1 to {AUDIENCES_MAX} names")
        found = await read(partial(find_trusted, issuer=token.issuer, audiences=audiences))
        if not found:
            raise TokenInvalid(
                "no trusted issuer has its `iss` and `aud`",
                "Check them with `weir token-issuer list`.",
            )
        if len(found) > 1:
            raise TokenInvalid("several of its audiences are trusted, and it must have one")
        return found[0], issuer_of(found[0])

    async def _principal(self, token: UnverifiedToken, known: Trusted, read: Read) -> Principal:
        trusted, issuer = known
        verified = await self.verifier.verify(token, issuer)
        value = required_text(verified.claims, trusted.project_claim)
        if (api_key_id := trusted.keys_by_value.get(value)) is None:
            raise TokenInvalid(f"its `{trusted.project_claim}` is not one that has a project here")
        terms = token_terms(verified, trusted)
        issued_at = time_claim(verified.claims, "iat")
        principal = await read(
            partial(
                authenticate_token,
                api_key_id=api_key_id,
                marks=terms.marks,
                issued_at=None if issued_at is None else datetime.fromtimestamp(issued_at, UTC),
            )
        )
        return narrowed(
            principal,
            terms,
            lifetime_s=verified.expires_at - self._clock(),
            models=models_of(verified.claims, trusted.models_claim),
            bounds=TokenBounds(
                max_output_tokens=tokens_of(verified.claims, trusted.max_output_tokens_claim)
            ),
        )


def issuer_of(trusted: TrustedIssuer) -> Issuer:
    """Convert the terms of a trust to those of verification."""
    return Issuer(
        KeySource(trusted.issuer, trusted.keys_url, trusted.keys),
        trusted.audience,
        frozenset(trusted.algorithms or KEY_TYPES),
        trusted.leeway_s,
        trusted.lifetime_max_s,
        trusted.token_type,
        trusted.requires_id,
    )


def token_terms(verified: VerifiedToken, trusted: TrustedIssuer) -> TokenTerms:
    """Read what a token says of its requests. Raises: TokenInvalid."""
    claims = verified.claims
    end_user = required_text(claims, trusted.end_user_claim)
    labels = tuple((name, required_text(claims, name)) for name in trusted.label_claims)
    try:
        checked_end_user(end_user, trusted.end_user_claim)
        for name, value in labels:
            checked_label_value(value, name)
    except InvalidValue as wrong:
        raise TokenInvalid(f"a claim is not valid: {wrong}") from None
    named = zip(KINDS, (verified.token_id, verified.session_id, verified.subject), strict=True)
    marks = frozenset(mark_of(trusted.id, kind, name) for kind, name in named if name)
    use = None
    if trusted.single_use:
        mark = mark_of(trusted.id, "jti", verified.token_id)
        use = SingleUse(trusted.id, mark, verified.expires_at)
    return TokenTerms(end_user, labels, marks, use)


def required_text(claims: Mapping[str, Any], name: str) -> str:
    """Return a claim that must be a text; empty if none is required. Raises: TokenInvalid."""
    value = text_claim(claims, name) if name else ""
    if name and not value:
        raise TokenInvalid(f"`{name}` is missing")
    return value


def models_of(claims: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the models that a token permits; none if no claim limits them. Raises: TokenInvalid.

    A text has them separated by blanks, like the claim `scope`.
    """
    if not name:
        return ()
    value = claims.get(name)
    found = value.split(" ") if isinstance(value, str) else value
    if (
        not isinstance(found, list)
        or not 1 <= len(found) <= MODELS_PER_KEY_MAX
        or not all(isinstance(each, str) and each for each in found)
    ):
        raise TokenInvalid(f"`{name}` must have 1 to {MODELS_PER_KEY_MAX} names of models")
    return found


def tokens_of(claims: Mapping[str, Any], name: str) -> int | None:
    """Return the output tokens that a token permits per request. Raises: TokenInvalid."""
    if not name:
        return None
    value = claims.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= TOKENS_MAX:
        raise TokenInvalid(f"`{name}` must be a number of tokens from 1 to {TOKENS_MAX:,}")
    return value
