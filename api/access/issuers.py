"""Verification of JSON Web Tokens of trusted issuers.

A token is accepted only if every check passes: form and size, algorithm, type, issuer, audience,
times, signature. The algorithm must be asymmetric and allowed for the issuer, and keys come from
the issuer's own source (`issuer_keys.py`): the headers `jwk`, `jku`, `x5c` and `x5u` are not read.
joserfc verifies the signature. Each check takes less than a millisecond for a token of the greatest
size, so verification runs in the event loop.
"""

from __future__ import annotations

import binascii
import hashlib
import math
import re
import time
from base64 import urlsafe_b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jws import JWSRegistry

from api.access.issuer_keys import KEY_TYPES, IssuerKeys, KeySource, parse_object
from metering.core.errors import TokenInvalid

TOKEN_BYTES_MAX = 8192
# Three parts in base64url. Nothing else that a caller may send has two full stops.
TOKEN_FORM = re.compile(r"[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)
NAME_CHARS_MAX = 255  # of `sub`, `sid`, `jti` and `kid`, as OpenID Connect allows for subjects
TIME_MAX = 253_402_300_799  # the year 9999
LEEWAY_S, LEEWAY_MAX_S = 30, 300
LIFETIME_S, LIFETIME_MAX_S = 3600, 24 * 3600
REMEMBERED_MAX = 10_000  # verified tokens, of some 2 kB each
# Types by RFC 8725: another one has another purpose, as `logout+jwt` or `dpop+jwt`.
TYPES = {
    "access token": frozenset({"jwt", "at+jwt"}),
    "ID token": frozenset({"jwt"}),
    "logout token": frozenset({"jwt", "logout+jwt"}),
}
OF_SIGN_IN = ("nonce", "at_hash", "c_hash")  # claims that only an ID token for a browser has


class TokenUse(StrEnum):
    """Purpose of a token. One for another purpose is refused, although it is signed."""

    ACCESS = "access token"
    SIGN_IN = "ID token"
    LOGOUT = "logout token"


@dataclass(frozen=True, slots=True)
class Issuer:
    """Issuer of tokens for one audience, and which of its tokens are accepted.

    `lifetime_max_s` is that of a token, from `iat` to `exp`. `type`, if set, must be the header
    `typ`. `requires_id` refuses tokens without `jti`, which can be revoked by subject only.
    """

    source: KeySource
    audience: str
    algorithms: frozenset[str] = frozenset(KEY_TYPES)
    leeway_s: float = LEEWAY_S
    lifetime_max_s: float = LIFETIME_S
    type: str = ""
    requires_id: bool = False
    use: TokenUse = TokenUse.ACCESS


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """Token whose form is valid; nothing else is checked yet."""

    text: str
    header: Mapping[str, Any]
    claims: Mapping[str, Any]

    @property
    def issuer(self) -> str:
        return text_claim(self.claims, "iss")

    @property
    def audiences(self) -> tuple[str, ...]:
        found = self.claims.get("aud")
        listed = found if isinstance(found, list) else [found]
        return tuple(each for each in listed if isinstance(each, str) and each)


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """Claims of an issuer about a caller. `expires_at` is a Unix time, with the leeway."""

    claims: Mapping[str, Any]
    expires_at: float

    @property
    def subject(self) -> str:
        return text_claim(self.claims, "sub")

    @property
    def session_id(self) -> str:
        return text_claim(self.claims, "sid")

    @property
    def token_id(self) -> str:
        return text_claim(self.claims, "jti")


def is_token(secret: str) -> bool:
    """Return whether a secret has the form of a JSON Web Token."""
    return len(secret) <= TOKEN_BYTES_MAX and TOKEN_FORM.fullmatch(secret) is not None


def parse_token(text: str, bytes_max: int = TOKEN_BYTES_MAX) -> UnverifiedToken:
    """Parse a token without verifying it. Raises: TokenInvalid."""
    if len(text) > bytes_max:
        raise TokenInvalid(f"it has more than {bytes_max:,} bytes")
    if TOKEN_FORM.fullmatch(text) is None:
        raise TokenInvalid("it does not have three parts in base64url")
    head, body, _ = text.split(".")
    return UnverifiedToken(text, _part(head, "header"), _part(body, "payload"))


def _part(text: str, name: str) -> dict[str, Any]:
    try:
        return parse_object(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error) as error:
        raise TokenInvalid(f"its {name} is not valid JSON") from error


def text_claim(claims: Mapping[str, Any], name: str) -> str:
    """Return a claim that is a text, empty if the token has none. Raises: TokenInvalid."""
    value = claims.get(name, "")
    if not isinstance(value, str) or len(value) > NAME_CHARS_MAX or not value.isprintable():
        raise TokenInvalid(f"`{name}` is not a text of at most {NAME_CHARS_MAX} characters")
    return value


def time_claim(claims: Mapping[str, Any], name: str) -> float | None:
    """Return a claim that is a Unix time, None if the token has none. Raises: TokenInvalid."""
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= TIME_MAX or math.isnan(value):
        raise TokenInvalid(f"`{name}` is not a Unix time")
    return float(value)


class _Signatures(JWSRegistry):
    """Algorithms that joserfc may use: those of the issuer, without its warnings of weak ones."""

    max_header_length = TOKEN_BYTES_MAX

    def get_alg(self, name: str) -> Any:
        assert self.allowed is not None
        assert name in self.allowed, "checked before"
        return self.algorithms[name]


class TokenVerifier:
    """Verifies tokens. A signature is verified once, and remembered until the token ends.

    What is remembered is bound to the issuer as it was and to its set of keys: it ends with a
    change of either.
    """

    def __init__(
        self,
        keys: IssuerKeys,
        clock: Callable[[], float] = time.time,
        remembered_max: int = REMEMBERED_MAX,
    ) -> None:
        self.keys = keys
        self._clock = clock
        self._remembered_max = remembered_max
        # By hash of the token: the issuer, the version of its keys, and the result
        self._verified: OrderedDict[bytes, tuple[Issuer, int, VerifiedToken]] = OrderedDict()

    async def verify(self, token: UnverifiedToken, issuer: Issuer) -> VerifiedToken:
        """Return what the token says. Raises: TokenInvalid, IssuerUnavailable."""
        digest = hashlib.sha256(token.text.encode()).digest()
        now, version = self._clock(), self.keys.version(issuer.source)
        if (known := self._verified.get(digest)) is not None:
            if known[:2] == (issuer, version) and now < known[2].expires_at:
                return known[2]
            del self._verified[digest]
        verified = check_claims(token, issuer, now)
        algorithm = check_header(token, issuer)
        key_id = token.header.get("kid")
        found = await self.keys.find(issuer.source, key_id, algorithm)
        if not any(_is_signed(token.text, each.key, algorithm) for each in found):
            raise TokenInvalid("its signature is not one of its issuer")
        version = self.keys.version(issuer.source)
        if version is not None:
            self._verified[digest] = issuer, version, verified
            if len(self._verified) > self._remembered_max:
                self._verified.popitem(last=False)
        return verified


def check_header(token: UnverifiedToken, issuer: Issuer) -> str:
    """Return the algorithm of a token, which its issuer may use. Raises: TokenInvalid."""
    header = token.header
    algorithm, kind, key_id = header.get("alg"), header.get("typ", "JWT"), header.get("kid")
    allowed = issuer.algorithms & KEY_TYPES.keys()
    if not isinstance(algorithm, str) or algorithm not in allowed:
        raise TokenInvalid(f"`alg` must be one of {', '.join(sorted(allowed))}")
    if "crit" in header or "b64" in header or "zip" in header or "enc" in header:
        raise TokenInvalid("its header has `crit`, `b64`, `zip` or `enc`, which are not supported")
    if key_id is not None and (not isinstance(key_id, str) or len(key_id) > NAME_CHARS_MAX):
        raise TokenInvalid(f"`kid` is not a text of at most {NAME_CHARS_MAX} characters")
    name = kind.lower().removeprefix("application/") if isinstance(kind, str) else ""
    if issuer.type:
        if name != issuer.type.lower():
            raise TokenInvalid(f"`typ` must be {issuer.type}")
    elif name not in TYPES[issuer.use]:
        raise TokenInvalid(f"its `typ` is not that of an {issuer.use}")
    return algorithm


def check_claims(token: UnverifiedToken, issuer: Issuer, now: float) -> VerifiedToken:
    """Check what a token says of itself, at a Unix time. Raises: TokenInvalid."""
    claims, leeway_s = token.claims, issuer.leeway_s
    if token.issuer != issuer.source.issuer:
        raise TokenInvalid("`iss` is another issuer")
    if issuer.audience not in token.audiences:
        raise TokenInvalid("`aud` is another audience")
    if issuer.use is TokenUse.ACCESS:
        if any(name in claims for name in OF_SIGN_IN):
            raise TokenInvalid("it is an ID token: send an access token")
        if "cnf" in claims:
            raise TokenInvalid("it is bound to a key of its sender (`cnf`), which is not supported")
    elif len(token.audiences) > 1 and claims.get("azp") != issuer.audience:
        raise TokenInvalid("`azp` is another client")
    if "events" in claims and issuer.use is not TokenUse.LOGOUT:
        raise TokenInvalid("it tells of events (`events`) and identifies no caller")
    expires_at, issued_at, begins_at = (time_claim(claims, name) for name in ("exp", "iat", "nbf"))
    if expires_at is None:
        raise TokenInvalid("it never expires: `exp` is missing")
    if now >= expires_at + leeway_s:
        raise TokenInvalid("it has expired")
    if any(each is not None and each > now + leeway_s for each in (issued_at, begins_at)):
        raise TokenInvalid("it is not valid yet: check the clocks of its issuer and of this server")
    lifetime_s = expires_at - (now if issued_at is None else issued_at)
    if lifetime_s > issuer.lifetime_max_s:
        raise TokenInvalid(
            f"it lives {lifetime_s:,.0f} s, and tokens of its issuer may live"
            f" {issuer.lifetime_max_s:,.0f} s"
        )
    verified = VerifiedToken(claims, expires_at + leeway_s)
    if not verified.token_id and issuer.requires_id:
        raise TokenInvalid("`jti` is missing")
    if not verified.subject and issuer.use is not TokenUse.LOGOUT:
        raise TokenInvalid("`sub` is missing")
    text_claim(claims, "sid")
    return verified


def _is_signed(text: str, key: Any, algorithm: str) -> bool:
    try:
        jws.deserialize_compact(
            text, key, registry=_Signatures(algorithms=[algorithm], strict_check_header=False)
        )
    except (JoseError, ValueError, TypeError):
        return False
    return True
