"""Tokens of issuers: each forged one is refused for its reason, and keys are read with bounds."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from api.access import issuer_keys
from api.access.issuer_keys import (
    AGE_MAX_S,
    DOCUMENT_BYTES_MAX,
    INTERVAL_S,
    KEYS_MAX,
    REFRESH_S,
    IssuerKeys,
    KeySource,
    parse_keys,
)
from api.access.issuers import (
    TOKEN_BYTES_MAX,
    Issuer,
    TokenUse,
    TokenVerifier,
    is_token,
    parse_token,
)
from api.core.errors import IssuerUnavailable
from metering.core.errors import TokenInvalid
from metering.core.outbound import DocumentUnread
from tests.issuer_double import AUDIENCE, IssuerDouble, encoded, issuer, key_of, signed

NOW = 1_800_000_000.0


class World:
    """Verifier of one issuer, with clocks that the test moves and keys read without a network."""

    def __init__(self, double: IssuerDouble, read: Any = None) -> None:
        self.double = double
        self.now = NOW
        self.elapsed_s = 0.0
        self.reads = asyncio.Event()  # of the second read
        self.keys = IssuerKeys(clock=lambda: self.elapsed_s, read=read or self._read)
        self.verifier = TokenVerifier(self.keys, clock=lambda: self.now)

    async def _read(self, *_: object) -> bytes:
        found = await self.double.read()
        if self.double.read_count > 1:
            self.reads.set()
        return found

    def issuer(self, **changes: Any) -> Issuer:
        return Issuer(KeySource(self.double.url), AUDIENCE, **changes)

    async def verify(self, token: str, **changes: Any) -> str:
        """Return the subject of a token that is accepted."""
        verified = await self.verifier.verify(parse_token(token), self.issuer(**changes))
        return verified.subject


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(issuer_keys, "INTERVAL_S", 0.05)
    async with running(World(IssuerDouble(clock=lambda: NOW))) as found:
        yield found


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(world.keys.run())
        yield world
        task.cancel()


async def test_a_signed_token_is_accepted(world: World) -> None:
    assert await world.verify(world.double.token()) == "ada"
    assert await world.verify(world.double.token(aud=["other", AUDIENCE])) == "ada"
    assert await world.verify(world.double.token({"typ": "at+jwt"}), type="at+jwt") == "ada"
    assert await world.verify(world.double.token({"kid": None})) == "ada", "it has one key"


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        *(("RS256", "RSA"), ("PS256", "RSA"), ("ES256", "P-256"), ("ES384", "P-384")),
        *(("ES512", "P-521"), ("EdDSA", "Ed25519")),
    ],
)
async def test_each_algorithm_is_verified(world: World, algorithm: str, kind: str) -> None:
    world.double.algorithm, world.double.signing = algorithm, key_of(kind, "own")
    world.double.published = [world.double.signing]
    token = world.double.token()

    assert await world.verify(token) == "ada"
    head, body, signature = token.split(".")
    broken = "A" if signature[10] != "A" else "B"
    with pytest.raises(TokenInvalid, match="signature"):
        await world.verify(f"{head}.{body}.{signature[:10]}{broken}{signature[11:]}")


def unsigned(double: IssuerDouble) -> str:
    return f"{encoded({'alg': 'none'})}.{encoded(double.claims())}."


def with_signature(signature: bytes) -> Callable[[IssuerDouble], str]:
    """Return a token with the right header and this signature."""
    return lambda double: f"{double.token().rpartition('.')[0]}.{encoded(signature)}"


def of_other_header(double: IssuerDouble) -> str:
    """Return a token whose header was exchanged after it was signed."""
    _, body, signature = double.token({"typ": "at+jwt"}).split(".")
    return f"{double.token().partition('.')[0]}.{body}.{signature}"


def signed_with_public_key(double: IssuerDouble) -> str:
    """Return a token whose shared secret is the issuer's public key, in PEM."""
    signed_part = (
        f"{encoded({'alg': 'HS256', 'kid': double.signing.kid})}.{encoded(double.claims())}"
    )
    secret = double.signing.as_pem(private=False)
    return f"{signed_part}.{encoded(hmac.digest(secret, signed_part.encode(), 'sha256'))}"


def with_own_key(double: IssuerDouble, **header: Any) -> str:
    """Return a token of a stranger, whose header offers the stranger's key."""
    key = key_of("P-256", "stranger")
    offered = {"jwk": key.as_dict(private=False), "jku": "https://evil.example.com/keys"}
    payload = json.dumps(double.claims()).encode()
    head = {"alg": "ES256", "kid": double.signing.kid} | offered | header
    return (
        f"{encoded(head)}.{encoded(payload)}."
        + signed({"alg": "ES256"}, payload, key).rpartition(".")[2]
    )


def twice(double: IssuerDouble) -> str:
    """Return a signed token with two subjects: parsers differ in which one they take."""
    payload = json.dumps(double.claims())[:-1] + ', "sub": "eve"}'
    return signed({"alg": "ES256", "kid": double.signing.kid}, payload.encode(), double.signing)


def with_payload(payload: bytes) -> Callable[[IssuerDouble], str]:
    return lambda double: signed(
        {"alg": "ES256", "kid": double.signing.kid}, payload, double.signing
    )


def changed(header: dict[str, Any] | None = None, **claims: Any) -> Callable[[IssuerDouble], str]:
    return lambda double: double.token(header, **claims)


# Each token differs from an accepted one in one thing. The text is what its caller reads.
FORGED: dict[str, tuple[Callable[[IssuerDouble], str], str]] = {
    "no signature": (unsigned, "`alg` must be one of"),
    "no signature, in capitals": (
        lambda d: f"{encoded({'alg': 'NONE', 'kid': d.signing.kid})}.{encoded(d.claims())}.",
        "`alg` must be one of",
    ),
    "an empty signature": (with_signature(b""), "its signature"),
    "a signature of zeros": (with_signature(bytes(64)), "its signature"),
    "a signature in DER": (with_signature(b"\x30\x06\x02\x01\x01\x02\x01\x01"), "its signature"),
    "the signature of another header": (of_other_header, "its signature"),
    "a list of algorithms": (
        lambda d: f"{encoded({'alg': ['ES256'], 'kid': 'first'})}.{encoded(d.claims())}.AA",
        "`alg` must be one of",
    ),
    "the public key as a secret": (signed_with_public_key, "`alg` must be one of"),
    "a key in the header": (with_own_key, "its signature"),
    "a stranger's key id": (lambda d: with_own_key(d, kid="stranger"), "no key with this `kid`"),
    "another algorithm of the key": (changed({"alg": "ES256", "kid": "other"}), "no key with"),
    "an extension": (changed({"crit": ["exp"], "exp": 1}), "`crit`"),
    "an unencoded payload": (changed({"b64": True}), "`crit`, `b64`"),
    "a compressed payload": (changed({"zip": "DEF"}), "`crit`, `b64`, `zip`"),
    "two subjects": (twice, "payload is not valid JSON"),
    "no JSON": (with_payload(b"hello"), "payload is not valid JSON"),
    "a list": (with_payload(b"[]"), "payload is not valid JSON"),
    "deep nesting": (with_payload(b"[" * 4000), "payload is not valid JSON"),
    "not UTF-8": (with_payload(b'{"sub": "\xff"}'), "payload is not valid JSON"),
    "a huge number": (with_payload(b'{"exp": ' + b"9" * 5000 + b"}"), "payload is not valid JSON"),
    "an end in the past": (changed(exp=int(NOW) - 31), "it has expired"),
    "no end": (changed(exp=None), "`exp` is missing"),
    "an end that is a text": (changed(exp=str(int(NOW) + 60)), "`exp` is not a Unix time"),
    "an end that is true": (changed(exp=True), "`exp` is not a Unix time"),
    "an endless end": (
        with_payload(b'{"iss":"https://login.example.com","aud":"weir","sub":"a","exp":Infinity}'),
        "`exp` is not a Unix time",
    ),
    "an end that is no number": (
        with_payload(b'{"iss":"https://login.example.com","aud":"weir","sub":"a","exp":NaN}'),
        "`exp` is not a Unix time",
    ),
    "a late start": (changed(nbf=int(NOW) + 31), "not valid yet"),
    "issued in the future": (changed(iat=int(NOW) + 31), "not valid yet"),
    "too long a life": (changed(exp=int(NOW) + 3601), "lives 3,601 s"),
    "too long a life of an older token": (
        changed(iat=int(NOW) - 3000, exp=int(NOW) + 601),
        "lives 3,601 s",
    ),
    "too long a life without a start": (changed(iat=None, exp=int(NOW) + 3601), "lives 3,601 s"),
    "another audience": (changed(aud="billing"), "`aud` is another audience"),
    "no audience": (changed(aud=None), "`aud` is another audience"),
    "a part of the audience": (changed(aud="we"), "`aud` is another audience"),
    "an audience in an object": (changed(aud={"weir": "weir"}), "`aud` is another audience"),
    "another issuer": (changed(iss="https://login.example.com/"), "`iss` is another issuer"),
    "an ID token": (changed(nonce="n-1"), "it is an ID token"),
    "an ID token of a code": (changed(at_hash="x"), "it is an ID token"),
    "a token of a logout": (changed(events={"x": {}}), "`events`"),
    "the type of a logout": (changed({"typ": "logout+jwt"}), "`typ` is not that of an access"),
    "the type of a proof": (changed({"typ": "dpop+jwt"}), "`typ` is not that of an access"),
    "a bound token": (changed(cnf={"jkt": "x"}), "`cnf`"),
    "no subject": (changed(sub=None), "`sub` is missing"),
    "an empty subject": (changed(sub=""), "`sub` is missing"),
    "a subject that is a list": (changed(sub=["ada"]), "`sub` is not a text"),
    "a subject with a line": (changed(sub="ada\nrole: owner"), "`sub` is not a text"),
    "half a character": (changed(sub="\ud800"), "`sub` is not a text"),
    "a session that is a number": (changed(sid=7), "`sid` is not a text"),
    "an id that is a number": (changed(jti=7), "`jti` is not a text"),
    "a key id that is a number": (changed({"kid": 7}), "`kid` is not a text"),
}


@pytest.mark.parametrize("case", FORGED)
async def test_a_forged_token_is_refused(world: World, case: str) -> None:
    make, why = FORGED[case]
    await world.verify(world.double.token())  # the keys are known

    with pytest.raises(TokenInvalid) as refused:
        await world.verify(make(world.double))

    assert why in str(refused.value)
    assert "Send a new one from your identity provider." in str(refused.value)


async def test_settings_of_an_issuer_narrow_its_tokens(world: World) -> None:
    for token, changes, why in (
        (world.double.token(jti=None), {"requires_id": True}, "`jti` is missing"),
        (world.double.token(), {"type": "at+jwt"}, "`typ` must be at"),
        (world.double.token(), {"algorithms": frozenset({"RS256"})}, "`alg` must be one of RS256"),
        (world.double.token(), {"lifetime_max_s": 60.0}, "may live 60 s"),
        (world.double.token(), {"algorithms": frozenset({"HS256", "none"})}, "`alg` must be"),
    ):
        with pytest.raises(TokenInvalid, match=why):
            await world.verify(token, **changes)


async def test_an_id_token_is_for_sign_in_only(world: World) -> None:
    use = TokenUse.SIGN_IN
    assert await world.verify(world.double.token(nonce="n-1"), use=use) == "ada"
    both = world.double.token(aud=[AUDIENCE, "other"], azp=AUDIENCE)
    assert await world.verify(both, use=use) == "ada"
    for header, claims in (
        ({"typ": "at+jwt"}, {}),
        ({}, {"aud": [AUDIENCE, "other"]}),
        ({}, {"events": {}}),
    ):
        with pytest.raises(TokenInvalid):
            await world.verify(world.double.token(header, **claims), use=use)


async def test_a_remembered_token_ends_on_time(world: World) -> None:
    token = world.double.token()
    await world.verify(token)

    world.now += 300 + 29
    assert await world.verify(token) == "ada", "its clock may be 30 s late"
    world.now += 1
    with pytest.raises(TokenInvalid, match="expired"):
        await world.verify(token)


async def test_a_remembered_token_is_bound_to_its_issuer(world: World) -> None:
    token = world.double.token()
    await world.verify(token)

    other = Issuer(KeySource(world.double.url), "billing")
    with pytest.raises(TokenInvalid, match="audience"):
        await world.verifier.verify(parse_token(token), other)


def test_only_tokens_have_their_form() -> None:
    double = IssuerDouble()

    assert is_token(double.token())
    for other in ("wk_12345678_" + "a" * 43, "", "a.b", "a.b.c.d", "a.b.c d", "..", "é.é.é"):
        assert not is_token(other)
    assert not is_token("a.b." + "c" * TOKEN_BYTES_MAX)
    with pytest.raises(TokenInvalid, match="more than"):
        parse_token("a" * 9000)


# Keys of an issuer


async def test_a_new_key_is_found_beside_the_old_one(world: World) -> None:
    old = world.double.token()
    await world.verify(old)

    world.double.rotate("second")

    assert await world.verify(world.double.token()) == "ada"
    assert await world.verify(old) == "ada"
    assert world.double.read_count == 2


async def test_a_withdrawn_key_ends_with_the_next_read(world: World) -> None:
    old = world.double.token()
    await world.verify(old)

    world.double.rotate("second", keeps=False)
    assert await world.verify(old) == "ada", "not read yet"
    await world.verify(world.double.token())

    with pytest.raises(TokenInvalid, match="no key with this"):
        await world.verify(old)


async def test_a_source_is_read_again_while_its_keys_are_used(world: World) -> None:
    token = world.double.token()
    await world.verify(token)
    world.double.rotate("second", keeps=False)

    world.elapsed_s += REFRESH_S + 1
    assert await world.verify(token) == "ada", "nobody waits for it"
    async with asyncio.timeout(5):
        await world.reads.wait()
        await asyncio.sleep(0.05)  # the set is parsed in a thread

    with pytest.raises(TokenInvalid, match="no key with this"):
        await world.verify(token)


async def test_a_key_serves_its_own_algorithm_only(world: World) -> None:
    """A token without a key id needs an issuer with one key that fits."""
    world.double.algorithm, world.double.signing = "RS256", key_of("RSA", "own")
    public: dict[str, Any] = dict(world.double.signing.as_dict(private=False))
    for algorithm, count in (("RS256", 1), ("RS384", 0), (None, 1)):
        keys = json.dumps({"keys": [public | ({"alg": algorithm} if algorithm else {})]})
        source = KeySource(world.double.url, keys=keys)
        world.keys._read = issuer_keys.read_key_set
        token = parse_token(world.double.token())
        if count:
            await world.verifier.verify(token, Issuer(source, AUDIENCE))
        else:
            with pytest.raises(TokenInvalid, match="no key with this"):
                await world.verifier.verify(token, Issuer(source, AUDIENCE))
    both = [public, dict(key_of("RSA", "other").as_dict(private=False))]
    source = KeySource(world.double.url, keys=json.dumps({"keys": both}))
    with pytest.raises(TokenInvalid, match="exactly one"):
        await world.verifier.verify(
            parse_token(world.double.token({"kid": None})), Issuer(source, AUDIENCE)
        )


async def test_invented_key_ids_cause_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do they delay a token with a known key."""
    started = time.monotonic()
    world = World(IssuerDouble(clock=lambda: NOW))
    async with running(world):
        await world.verify(world.double.token())
        assert world.double.read_count == 1
        world.elapsed_s += INTERVAL_S - 0.3  # of the real clock until the next read
        invented = [
            asyncio.create_task(world.verify(world.double.token({"kid": f"k{number}"})))
            for number in range(500)
        ]
        await asyncio.sleep(0.05)
        assert await world.verify(world.double.token(sub="bob")) == "bob"
        assert not any(each.done() for each in invented)
        refused = await asyncio.gather(*invented, return_exceptions=True)

    assert {type(each) for each in refused} == {TokenInvalid}
    assert world.double.read_count == 2
    assert time.monotonic() - started < 5


async def test_an_issuer_that_is_away_does_not_end_known_keys(world: World) -> None:
    token = world.double.token()
    await world.verify(token)

    async def fails(*_: object) -> bytes:
        raise DocumentUnread("answered 503")

    world.keys._read = fails
    world.now -= 1  # other tokens, so that nothing is remembered
    world.elapsed_s += AGE_MAX_S - 1
    assert await world.verify(world.double.token(sub="bob")) == "bob"
    await asyncio.sleep(0.1)
    world.elapsed_s += 1
    with pytest.raises(IssuerUnavailable, match="answered 503"):
        await world.verify(world.double.token(sub="eve"))
    with pytest.raises(IssuerUnavailable):
        await world.verify(token)


@pytest.mark.parametrize(
    "keys",
    [
        b"{}",
        b"[]",
        b'{"keys": []}',
        b'{"keys": {}}',
        b'{"keys": [{}, 1, null, "x"]}',
        b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "first"}]}',
        b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}',
        b'{"keys": [{"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}]}',
        b'{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}]}',
        b'{"keys": [{"kty": "RSA", "n": "' + b"A" * 100_000 + b'", "e": "AQAB"}]}',
        b'{"keys": [{"kty": ["RSA"]}]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_set_without_usable_keys_is_refused(keys: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_keys(keys)


def test_unusable_keys_of_a_set_are_left_out() -> None:
    key = key_of("P-256", "first")
    public = key.as_dict(private=False)
    private = key.as_dict(private=True)
    weak = key_of("RSA", "weak", 1024).as_dict(private=False)

    [only] = parse_keys(json.dumps({"keys": [weak, public | {"use": "enc"}, private]}))

    assert (only.key_id, only.key.is_private) == ("first", False)
    with pytest.raises(ValueError, match="at most"):
        parse_keys(json.dumps({"keys": [public] * (KEYS_MAX + 1)}))


def test_the_greatest_set_is_parsed_in_time() -> None:
    key = key_of("RSA", "big", 4096).as_dict(private=False)
    keys = json.dumps({"keys": [key | {"kid": str(n)} for n in range(KEYS_MAX)]})

    assert len(keys) < DOCUMENT_BYTES_MAX
    assert len(parse_keys(keys)) == KEYS_MAX


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[IssuerDouble]:
    monkeypatch.setattr(issuer_keys, "READ_S", 0.5)
    async with issuer() as double:
        yield double


async def verified(double: IssuerDouble, *, private: bool = True, **source: str) -> str:
    keys = IssuerKeys(private=private)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(keys.run())
        try:
            found = await TokenVerifier(keys).verify(
                parse_token(double.token()), Issuer(KeySource(double.url, **source), AUDIENCE)
            )
        finally:
            task.cancel()
    return found.subject


async def test_keys_are_found_by_discovery_by_url_or_beside_the_issuer(
    served: IssuerDouble,
) -> None:
    assert await verified(served) == "ada"
    assert await verified(served, keys_url=f"{served.url}/keys") == "ada"
    assert await verified(served, keys=served.key_set().decode()) == "ada"
    assert served.read_count == 2


def lies(body: object, **options: Any) -> Callable[[web.BaseRequest], Any]:
    async def answer(_: web.BaseRequest) -> web.Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(body=raw, **options)

    return answer


async def drips(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lies({"issuer": "https://evil.example.com", "jwks_uri": "https://x"}), "another issuer"),
        (lies({}, status=302, headers={"Location": "/keys"}), "redirects are not followed"),
        (lies({}, status=500), "answered 500"),
        (lies(b" " * (DOCUMENT_BYTES_MAX + 1)), "more than"),
        (lies(b"<html>"), "Expecting value"),
        (lies(b"{}", headers={"Content-Encoding": "gzip"}), "content encoding"),
        (drips, "no answer within"),
    ],
)
async def test_an_issuer_that_lies_is_unavailable(
    served: IssuerDouble, answer: Any, why: str
) -> None:
    served.answer = answer

    with pytest.raises(BaseExceptionGroup) as group:
        await verified(served)

    [refused] = group.value.exceptions
    assert isinstance(refused, IssuerUnavailable)
    assert why in str(refused)


async def test_private_addresses_need_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the issuer, nor the set that it names, leads into the operator's network."""
    double, read = IssuerDouble(), list[str]()

    async def answer(url: str, **_: Any) -> bytes:
        read.append(url)
        return json.dumps({"issuer": double.url, "jwks_uri": target}).encode()

    monkeypatch.setattr(issuer_keys, "get_document", answer)
    for target, why in (
        ("http://example.com/keys", "must use https"),
        ("https://169.254.169.254/keys", "is not a public address"),
        ("https://[::ffff:10.0.0.1]/keys", "is not a public address"),
        ("ftp://example.com/keys", "must be a URL"),
        ("", "must be a URL"),
    ):
        with pytest.raises(BaseExceptionGroup) as group:
            await verified(double, private=False)
        [refused] = group.value.exceptions
        assert isinstance(refused, IssuerUnavailable)
        assert why in str(refused)
        double.url, target = target, "https://example.com/keys"
        if target:
            with pytest.raises(BaseExceptionGroup):
                await verified(double, private=False)
        double.url = "https://login.example.com"
    assert set(read) == {"https://login.example.com/.well-known/openid-configuration"}
