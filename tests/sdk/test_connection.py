"""Address, security and key of a client's connection, and exact amounts of money."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from weir_client import (
    AsyncClient,
    ErrorDetails,
    InvalidRequest,
    Money,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)
from weir_client.connection import ConnectionSettings, RetryPolicy, is_local
from weir_client.tls import Tls, TlsOptions

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:50051", True),
        ("127.8.9.1:1", True),
        ("[::1]:50051", True),
        ("unix:/run/weir.sock", True),
        ("dns:///localhost:1", True),
        ("weir.example.com:443", False),
        ("10.0.0.1:443", False),
        ("localhost.example.com:443", False),
        ("dns:///weir.example.com:443", False),
    ],
)
def test_only_what_never_leaves_the_machine_is_local(address: str, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("address", "tls", "expected"),
    [
        ("weir.example.com:443", None, True),
        ("127.0.0.1:50051", None, False),
        ("127.0.0.1:50051", True, True),
        ("weir.example.com:80", False, False),
        ("https://127.0.0.1:443", None, True),
        ("http://weir.internal:80/", None, False),
        ("grpcs://127.0.0.1:443", None, True),
        ("grpc://weir.internal:80", None, False),
        ("https://weir.internal:80", False, False),
    ],
)
def test_tls_is_on_except_for_local_ones(address: str, tls: bool | None, expected: bool) -> None:
    settings = ConnectionSettings.resolve(address, "key", tls=tls)

    assert (settings.tls is not None) is expected
    assert "//" not in settings.address
    assert not settings.address.endswith("/")


def test_root_certificates_mean_tls_and_come_as_bytes_or_file(tmp_path: Path) -> None:
    (tmp_path / "roots.pem").write_bytes(b"pem")

    from_file = ConnectionSettings.resolve(
        "127.0.0.1:1", "key", root_certificates=tmp_path / "roots.pem"
    )
    from_bytes = ConnectionSettings.resolve("127.0.0.1:1", "key", root_certificates=b"pem")

    assert from_file.tls == Tls(b"pem")
    assert from_bytes == from_file


def test_client_certificates_come_as_files_from_the_environment_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, name in (("WEIR_CLIENT_CERTIFICATE", "certificate"), ("WEIR_CLIENT_KEY", "key")):
        (tmp_path / name).write_bytes(name.encode())
        monkeypatch.setenv(variable, str(tmp_path / name))

    settings = ConnectionSettings.resolve("weir.example.com:443", "key", root_certificates=b"roots")

    assert settings.tls == Tls(b"roots", b"certificate", b"key")
    assert "key" not in repr(settings.tls)
    assert ConnectionSettings.resolve("127.0.0.1:1", "key").tls is None, (
        "the environment alone encrypts nothing on this machine"
    )
    monkeypatch.setenv("WEIR_TLS", "1")
    assert ConnectionSettings.resolve("127.0.0.1:1", "key").tls == Tls(None, b"certificate", b"key")
    assert ConnectionSettings.resolve("http://127.0.0.1:1", "key").tls is None, (
        "the address says what it is"
    )


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (
            {"root_certificates": "/no/such/roots.pem"},
            "root_certificates: /no/such/roots.pem cannot be read",
        ),
        ({"client_certificate": b"c"}, "client_key .WEIR_CLIENT_KEY. is missing"),
        (
            {"client_key": b"k", "tls": True},
            "client_certificate .WEIR_CLIENT_CERTIFICATE. is missing",
        ),
    ],
)
def test_unusable_certificates_are_reported_by_name(options: TlsOptions, reported: str) -> None:
    with pytest.raises(InvalidRequest, match=reported):
        ConnectionSettings.resolve("127.0.0.1:1", "key", **options)


def test_a_switch_for_tls_is_1_or_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_TLS", "yes")

    with pytest.raises(InvalidRequest, match="WEIR_TLS='yes': must be 1 or 0"):
        ConnectionSettings.resolve("127.0.0.1:1", "key")


def test_the_environment_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_ADDRESS", "weir.example.com:443")
    monkeypatch.setenv("WEIR_API_KEY", " from-environment\n")

    settings = ConnectionSettings.resolve(None, None)
    admin = ConnectionSettings.resolve(
        "localhost:1", None, key_variables=("WEIR_ADMIN_KEY", "WEIR_API_KEY")
    )

    assert (settings.address, settings.api_key) == ("weir.example.com:443", "from-environment")
    assert (admin.address, admin.api_key) == ("localhost:1", "from-environment")
    assert "from-environment" not in repr(settings)


def test_a_missing_or_broken_key_is_reported_before_any_call() -> None:
    with pytest.raises(Unauthenticated, match="pass api_key= or set WEIR_API_KEY"):
        AsyncClient("localhost:1")
    with pytest.raises(Unauthenticated, match="copied in full"):
        AsyncClient("localhost:1", "weir_…")


async def test_an_empty_key_calls_without_one() -> None:
    server = ScriptedInference(scripted.answer)
    async with scripted.serve(server) as address, AsyncClient(address, "") as client:
        await client.list_models()

    assert "authorization" not in server.metadata


async def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    server = ScriptedInference(scripted.answer)
    async with (
        scripted.serve(server, address=f"unix:{tmp_path}/weir.sock") as address,
        AsyncClient(address, "key") as client,
    ):
        assert await client.list_models() == []


async def test_a_client_configured_for_tls_never_falls_back() -> None:
    server = ScriptedInference(scripted.answer)
    async with (
        scripted.serve(server) as address,
        AsyncClient(address, "key", tls=True, max_retries=0) as client,
    ):
        with pytest.raises(Unavailable):
            await client.list_models()

    assert server.requests == []


def test_waits_grow_carry_jitter_and_honour_the_hint() -> None:
    policy = RetryPolicy(max_retries=2, wait_max_s=10.0)
    hinted = Unavailable("busy", details=ErrorDetails(retry_after_s=2.0))

    first, second = policy.wait_s(Unavailable("busy"), 0), policy.wait_s(Unavailable("busy"), 1)
    with_hint = policy.wait_s(hinted, 0)

    assert first is not None
    assert second is not None
    assert with_hint is not None
    assert 0.05 <= first <= 0.1 <= second <= 0.2
    assert 2.0 <= with_hint <= 2.1
    assert policy.wait_s(Unavailable("busy"), 2) is None
    assert policy.wait_s(Unavailable("busy", details=ErrorDetails(retry_after_s=11.0)), 0) is None
    assert policy.wait_s(QuotaExceeded("used up"), 0) is None
    assert policy.wait_s(Unauthenticated("no"), 0) is None


def test_money_is_exact_at_any_size() -> None:
    assert Money("USD", 1).amount == Decimal("0.000000000001")
    assert str(Money("USD", 1)) == "0.000000000001 USD"
    assert str(Money("EUR", 12 * 10**12)) == "12.00 EUR"
    assert str(Money("USD", -1_500_000_000_000)) == "-1.50 USD"
    assert Money("USD", 9_223_372_036_854_775_807 * 10**12 + 1).amount == Decimal(
        "9223372036854775807.000000000001"
    )
    assert str(Money("USD", 0)) == "0.00 USD"
