"""Client addresses: headers of proxies, of clients, and between processes."""

from __future__ import annotations

import ipaddress
import time
import uuid

import pytest

from api.access.auth import KeyChanges
from api.core.addresses import Proxies
from api.core.settings import networks
from api.generation.request.peers import make_identity, vouched_address, voucher_of
from metering.core.errors import InvalidValue
from metering.tenants.networks import allows, checked_networks, networks_of, parse_address

PROXY, SECRET = "ipv4:10.0.0.2:4711", "wk_12345678_secret"
TRUSTED = Proxies(networks_of(("10.0.0.0/8", "2001:db8:1::/48")))


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("ipv4:192.0.2.1:4711", (), "192.0.2.1"),
        ("ipv6:[2001:db8::1]:4711", (), "2001:db8::1"),
        ("ipv6:%5B2001:db8::1%5D:4711", (), "2001:db8::1"),
        ("ipv6:[::ffff:192.0.2.1]:4711", (), "192.0.2.1"),
        ("ipv6:[fe80::1%25eth0]:4711", (), "fe80::1"),
        ("unix:", (), None),
        ("unix:", ("203.0.113.5",), None),
        ("ipv4:192.0.2.1:4711", ("203.0.113.5",), "192.0.2.1"),
        (PROXY, (), "10.0.0.2"),
        (PROXY, ("203.0.113.5",), "203.0.113.5"),
        (PROXY, ("198.51.100.1, 203.0.113.5",), "203.0.113.5"),
        (PROXY, ("198.51.100.1", "203.0.113.5"), "203.0.113.5"),
        (PROXY, ("198.51.100.1, 203.0.113.5, 10.9.9.9", "10.1.1.1"), "203.0.113.5"),
        (PROXY, ("10.0.0.7, 10.0.0.8",), "10.0.0.7"),
        (PROXY, ("203.0.113.5:1234",), "203.0.113.5"),
        (PROXY, ("[2001:db8::5]:1234",), "2001:db8::5"),
        (PROXY, ("::ffff:203.0.113.5",), "203.0.113.5"),
        (PROXY, ("203.0.113.5, unknown",), None),
        (PROXY, ("203.0.113.5, 10.1.1.1.1",), None),
        (PROXY, (" , ,",), "10.0.0.2"),
        ("ipv6:[2001:db8:1::9]:1", ("198.51.100.1, 203.0.113.5",), "203.0.113.5"),
    ],
)
def test_only_what_trusted_proxies_have_added_counts(
    peer: str, forwarded: tuple[str, ...], address: str | None
) -> None:
    found = TRUSTED.origin(peer, forwarded).address

    assert found == (None if address is None else ipaddress.ip_address(address))


def test_no_proxy_is_trusted_without_the_setting() -> None:
    origin = Proxies().origin(PROXY, ("203.0.113.5",))

    assert (str(origin.address), origin.peer) == ("10.0.0.2", PROXY)
    assert networks(" 10.0.0.0/8,2001:db8::/32 ,") == "10.0.0.0/8,2001:db8::/32"
    with pytest.raises(ValueError, match="not a valid network"):
        networks("10.0.0.0/8,proxy")


def test_behind_a_trusted_proxy_each_client_is_throttled_for_itself() -> None:
    assert TRUSTED.origin(PROXY, ("203.0.113.5",)).peer == "ipv4:203.0.113.5:0"
    assert TRUSTED.origin(PROXY, ("2001:db8::5",)).peer == "ipv6:[2001:db8::5]:0"
    assert TRUSTED.origin(PROXY, ("unknown",)).peer == PROXY


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1/8",
        "10.0.0.0/33",
        "office",
        "",
        "::ffff:10.0.0.0/104",
        "2001:db8::1/32",
        "10.0.0.0/255.0.0.0/8",
        "fe80::1%eth0",
    ],
)
def test_an_invalid_network_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"write|is not a valid network") as refused:
        checked_networks([text])

    assert refused.value.field == "allowed_networks"


def test_networks_have_one_form_and_hold_their_addresses_of_either_kind() -> None:
    given = ["203.0.113.7", "2001:DB8::/32", "10.0.0.0/255.0.0.0", "203.0.113.7/32"]
    found = networks_of(tuple(checked_networks(given)))

    assert [str(each) for each in found] == ["10.0.0.0/8", "2001:db8::/32", "203.0.113.7/32"]
    for address, inside in (
        ("::ffff:10.1.2.3", True),
        ("2001:db8:9::1", True),
        ("203.0.113.8", False),
        ("::a00:1", False),
    ):
        assert allows(found, parse_address(address)) is inside
    assert not allows(found, None)
    assert allows((), None)


def test_a_voucher_is_good_for_one_secret_of_one_process_for_a_while() -> None:
    here, stranger = make_identity(uuid.uuid4()), make_identity(uuid.uuid4())
    address, now = ipaddress.ip_address("203.0.113.5"), time.time()
    voucher, certificate = here.vouch(SECRET, address), here.certificate.decode()
    elsewhere = voucher.replace("203.0.113.5", "203.0.113.6")

    assert voucher_of(voucher) == here.process_id
    assert vouched_address(voucher, SECRET, certificate, now) == address
    assert vouched_address(voucher, SECRET + "x", certificate, now) is None
    assert vouched_address(voucher, SECRET, stranger.certificate.decode(), now) is None
    assert vouched_address(elsewhere, SECRET, certificate, now) is None
    assert vouched_address(voucher, SECRET, certificate, now + 400) is None
    assert vouched_address(voucher, SECRET, "", now) is None
    assert (voucher_of("nobody"), vouched_address("nobody", SECRET, certificate, now)) == (
        None,
        None,
    )


def test_a_key_changed_during_its_look_up_is_known_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.access.auth.KEYS_MAX", 2)
    changes, alice, bob = KeyChanges(), uuid.uuid4(), uuid.uuid4()
    begun = changes.count
    changes.note(alice)

    assert changes.since(begun, alice)
    assert not changes.since(begun, bob)
    assert not changes.since(changes.count, alice)
    for _ in range(2):
        changes.note(uuid.uuid4())
    assert changes.since(begun, alice), "what is forgotten counts as changed"
    assert changes.since(begun, bob)
    assert not changes.since(changes.count, alice)
