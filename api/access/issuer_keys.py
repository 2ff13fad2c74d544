"""Public keys of token issuers: read from their servers in the background, kept, and renewed.

Keys come only from the source that an administrator chose, never from a token. A source is read
again every `REFRESH_S`, and earlier for a key id that is not among the known ones, but never more
often than every `INTERVAL_S`: tokens with invented key ids cause no more requests than that, and
tokens with known ones do not wait. A set that was read replaces the one before, so a key that its
issuer withdraws ends. While the source cannot be read, the known keys are used for `AGE_MAX_S`.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import urlsafe_b64decode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from api.core.errors import IssuerUnavailable
from common.incidents import log_incident
from metering.core.errors import InvalidValue, TokenInvalid
from metering.core.outbound import DocumentUnread, checked_url, get_document

PRIVATE_ALLOWED = "WEIR_TOKEN_ISSUERS_PRIVATE"
DISCOVERY = "/.well-known/openid-configuration"
REFRESH_S = 300.0  # a withdrawn key ends within this time
INTERVAL_S = 5.0  # between two reads of one source, however many unknown key ids arrive
AGE_MAX_S = 4 * 3600.0  # of keys whose source cannot be read any more
READ_S = 5.0  # of one document
DOCUMENT_BYTES_MAX = 256 * 1024
KEYS_MAX = 100  # of one source; real ones have two to ten
SOURCES_MAX = 1000  # remembered, of some 50 kB at most
READS_AT_ONCE = 16
WAITING_MAX = 1000  # calls that wait for keys
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 4096  # a larger key verifies slowly
RSA_EXPONENT_BITS_MAX = 32
SAME_ID_MAX = 4  # keys with one id that are tried

PublicKey = RSAKey | ECKey | OKPKey
# Type and curve of the key that each accepted algorithm needs. All are asymmetric: a public key can
# never serve as a shared secret.
KEY_TYPES: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
    "Ed25519": ("OKP", "Ed25519"),
}
MEMBERS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeySource:
    """Place of the keys of an issuer: `keys` itself, `keys_url`, or found by discovery."""

    issuer: str
    keys_url: str = ""
    keys: str = ""


@dataclass(frozen=True, slots=True)
class IssuerKey:
    """Public key of an issuer. An empty `algorithm` allows all that fit its type."""

    key_id: str | None
    algorithm: str
    type: tuple[str, str | None]
    key: PublicKey

    def fits(self, algorithm: str) -> bool:
        return KEY_TYPES.get(algorithm) == self.type and self.algorithm in ("", algorithm)


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, for `json.loads`. Raises: ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return members


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object, without names that occur twice. Raises: ValueError."""
    try:
        value = json.loads(text, object_pairs_hook=unique_members)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def parse_keys(text: str | bytes) -> tuple[IssuerKey, ...]:
    """Parse a JSON Web Key Set; keys that cannot verify tokens are left out.

    Raises: ValueError if the set is not valid, or has no key that can.
    """
    listed = parse_object(text).get("keys")
    if not isinstance(listed, list) or len(listed) > KEYS_MAX:
        raise ValueError(f"`keys` must be a list of at most {KEYS_MAX}")
    found = tuple(key for each in listed if (key := _parse_key(each)) is not None)
    if not found:
        raise ValueError(f"it has no key for any of {', '.join(KEY_TYPES)}")
    return found


def _parse_key(value: object) -> IssuerKey | None:
    if not isinstance(value, dict) or value.get("use", "sig") != "sig":
        return None
    kind, algorithm, key_id = value.get("kty"), value.get("alg", ""), value.get("kid")
    if "verify" not in value.get("key_ops", ("verify",)):
        return None
    if not isinstance(kind, str) or kind not in MEMBERS or not isinstance(algorithm, str):
        return None
    if key_id is not None and not isinstance(key_id, str):
        return None
    # Public members only: a private key in the set is neither used nor kept.
    found = ((name, value.get(name)) for name in ("kty", *MEMBERS[kind]))
    public: Any = {name: member for name, member in found if isinstance(member, str)}
    if len(public) <= len(MEMBERS[kind]):
        return None
    curve = public.get("crv")
    if (kind, curve) not in KEY_TYPES.values():
        return None
    try:
        if kind == "RSA":
            modulus, exponent = (number_of(public[name]) for name in MEMBERS[kind])
            # Before the import, whose time grows with the size
            if not RSA_BITS_MIN <= modulus.bit_length() <= RSA_BITS_MAX:
                return None
            if exponent.bit_length() > RSA_EXPONENT_BITS_MAX:
                return None
            key: PublicKey = RSAKey.import_key(public)
        else:
            key = (ECKey if kind == "EC" else OKPKey).import_key(public)
            _ = key.public_key  # the point is checked here
    except (JoseError, ValueError, TypeError):
        return None
    return IssuerKey(key_id, algorithm, (kind, curve), key)


def number_of(text: str) -> int:
    """Decode a number of a key. Raises: ValueError."""
    return int.from_bytes(urlsafe_b64decode(text + "=" * (-len(text) % 4)))


@dataclass(slots=True)
class _Known:
    """Keys of a source. `version` counts the different sets; `error` is that of the last read."""

    keys: tuple[IssuerKey, ...] = ()
    text: bytes = b""
    version: int = 0
    read_at: float = float("-inf")
    attempted_at: float = float("-inf")
    error: str = ""
    is_wanted: bool = False
    attempted: asyncio.Event = field(default_factory=asyncio.Event)


class IssuerKeys:
    """Keys of all sources in use. `run` reads them; without it, nothing new is found."""

    def __init__(
        self,
        *,
        private: bool = False,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[KeySource, bool], Awaitable[bytes]] | None = None,
    ) -> None:
        """`private` allows plain HTTP and private addresses. `read` returns a source's key set."""
        self._private = private
        self._clock = clock
        self._read = read or read_key_set
        self._known: OrderedDict[KeySource, _Known] = OrderedDict()  # latest use last
        self._wanted: asyncio.Queue[KeySource] = asyncio.Queue()  # each source at most once
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._waiting_count = 0
        self._thread = ThreadPoolExecutor(1, "weir-issuer-keys")

    async def _parsed(self, text: bytes) -> tuple[IssuerKey, ...]:
        """Parse a set in a thread of its own: a large one takes longer than the event loop may."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, parse_keys, text)

    def version(self, source: KeySource) -> int | None:
        """Return the number of the set that is in use, None if none is. Renews an older one."""
        known = self._of(source)
        if not self._is_usable(known):
            return None
        if self._clock() - known.read_at > REFRESH_S:
            self._want(source, known)
        return known.version

    async def find(
        self, source: KeySource, key_id: str | None, algorithm: str
    ) -> Sequence[IssuerKey]:
        """Return the keys that may have signed a token with this header, at least one.

        Waits for the source if none is known. Raises: TokenInvalid if it has none, and
        IssuerUnavailable if it cannot be read.
        """
        known = self._of(source)
        if self.version(source) is not None and (found := _select(known.keys, key_id, algorithm)):
            return found
        if self._waiting_count >= WAITING_MAX:
            raise IssuerUnavailable(source.issuer, "too many calls wait for keys of issuers")
        self._want(source, known)
        self._waiting_count += 1
        try:
            async with asyncio.timeout(INTERVAL_S + 2 * READ_S + 1):
                await known.attempted.wait()
        except TimeoutError:
            raise IssuerUnavailable(source.issuer, "its keys could not be read in time") from None
        finally:
            self._waiting_count -= 1
        if not self._is_usable(known):
            raise IssuerUnavailable(source.issuer, known.error or "its keys are too old")
        if found := _select(known.keys, key_id, algorithm):
            return found
        raise TokenInvalid(
            "its issuer has no key with this `kid` and `alg`"
            if key_id is not None
            else "it names no key, and its issuer does not have exactly one for this `alg`"
        )

    async def run(self) -> None:
        """Read the sources that are wanted, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                source = await self._wanted.get()
                tasks.create_task(self._renew(source))

    def _of(self, source: KeySource) -> _Known:
        known = self._known.setdefault(source, _Known())
        self._known.move_to_end(source)
        if len(self._known) > SOURCES_MAX:
            self._known.popitem(last=False)
        return known

    def _is_usable(self, known: _Known) -> bool:
        return bool(known.keys) and self._clock() - known.read_at < AGE_MAX_S

    def _want(self, source: KeySource, known: _Known) -> None:
        if not known.is_wanted:
            known.is_wanted = True
            known.attempted.clear()
            self._wanted.put_nowait(source)

    async def _renew(self, source: KeySource) -> None:
        known = self._of(source)
        await asyncio.sleep(max(known.attempted_at + INTERVAL_S - self._clock(), 0.0))
        try:
            async with self._reads:
                known.attempted_at = self._clock()
                text = await self._read(source, self._private)
                if text != known.text or not known.keys:
                    keys = await self._parsed(text)
                    known.keys, known.text, known.version = keys, text, known.version + 1
            known.read_at, known.error = self._clock(), ""
        except (DocumentUnread, InvalidValue, ValueError) as error:
            known.error = str(error)[:300]
            log.warning("issuer_keys_unread", issuer=source.issuer, cause=known.error)
        except Exception as error:  # one source must not end the reads of the others
            known.error = f"internal error, incident {log_incident(error, source='issuer_keys')}"
        finally:
            known.is_wanted = False
            known.attempted.set()


def _select(keys: Sequence[IssuerKey], key_id: str | None, algorithm: str) -> Sequence[IssuerKey]:
    fitting = [each for each in keys if each.fits(algorithm)]
    if key_id is None:
        return fitting if len(fitting) == 1 else ()
    return [each for each in fitting if each.key_id == key_id][:SAME_ID_MAX]


def checked_issuer_url(url: str, *, private: bool, field: str = "issuer") -> str:
    """Validate the URL of an issuer or of its keys. Raises: InvalidValue."""
    example = "https://login.example.com"
    return checked_url(url, private=private, setting=PRIVATE_ALLOWED, field=field, example=example)


async def read_key_set(source: KeySource, private: bool) -> bytes:
    """Return the key set of a source. Raises: DocumentUnread, InvalidValue, ValueError."""
    if source.keys:
        return source.keys.encode()
    url = source.keys_url
    if not url:
        url = str((await discover(source.issuer, private=private)).get("jwks_uri", ""))
    return await _document(url, private, "jwks_uri")


async def discover(issuer: str, *, private: bool) -> dict[str, Any]:
    """Read what an issuer says of itself (OpenID Connect Discovery).

    Raises: DocumentUnread, InvalidValue, ValueError.
    """
    document = parse_object(await _document(issuer.rstrip("/") + DISCOVERY, private, "issuer"))
    if document.get("issuer") != issuer:
        raise ValueError("the discovery document is of another issuer")
    return document


async def _document(url: str, private: bool, field: str) -> bytes:
    checked_issuer_url(url, private=private, field=field)
    return await get_document(url, private=private, bytes_max=DOCUMENT_BYTES_MAX, wait_s=READ_S)
