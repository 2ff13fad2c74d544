"""Webhooks of organizations: set, listed, tried, removed; and which URLs and addresses they may have.

A webhook is called from inside the operator's network. So unless the operator allows it, only https is spoken, and only with public
addresses: a name is resolved once, the address is checked, and that very address is connected to. A name that resolves elsewhere a
moment later changes nothing. Functions take a session and never commit; every change of a webhook writes the audit log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from metering.alerts.alerts import Alert, AlertDelivery, AlertWebhook, DeliveryState
from metering.core.audit import record_change, snapshot
from metering.core.errors import InvalidValue, NotFound
from metering.core.models import Organization
from metering.tenants.tenants import find_organization

PRIVATE_ALLOWED = "WEIR_ALERT_WEBHOOKS_PRIVATE"
URL_CHARS_MAX = 2000
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
# What Python takes for global, in some of its versions, and is not: addresses of a cloud's own services, which only its machines
# reach (Oracle's are in the first network, Azure's is the second), and networks that are reserved or given up.
NOT_PUBLIC = tuple(
    ipaddress.ip_network(each)
    for each in ("192.0.0.0/24", "168.63.129.16/32", "192.88.99.0/24", "fec0::/10", "3fff::/20", "64:ff9b:1::/48")
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(Exception):
    """A webhook leads to where none may be."""


@dataclass(frozen=True, slots=True)
class Place:
    """An address that was checked."""

    family: int
    host: str
    port: int


def allows_private(environment: Mapping[str, str]) -> bool:
    """Whether webhooks may be on private networks, and spoken to in the clear. Raises: InvalidValue."""
    text = environment.get(PRIVATE_ALLOWED, "0").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise InvalidValue(PRIVATE_ALLOWED, "must be 1 or 0")
    return text in ("1", "true")


def checked_url(url: str, *, private: bool) -> str:
    """A URL that a webhook may have, as far as it can be told without a look-up. Raises: InvalidValue."""
    if not url.isascii() or not url.isprintable() or " " in url or len(url) > URL_CHARS_MAX:
        raise InvalidValue("url", f"give at most {URL_CHARS_MAX} printable ASCII characters without spaces")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise InvalidValue("url", f"{error}: give one such as https://example.com/alerts") from error
    if parts.scheme not in ("https", "http") or not host or port == 0:
        raise InvalidValue("url", "give one such as https://example.com/alerts")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise InvalidValue("url", "leave out name, password and fragment: what is sent is signed")
    if parts.scheme == "http" and not private:
        raise InvalidValue("url", f"give one with https, or let the operator set {PRIVATE_ALLOWED}=1")
    if (address := literal(host)) is not None and not private and not is_public(address):
        raise InvalidValue("url", f"{host} is no public address: give another, or let the operator set {PRIVATE_ALLOWED}=1")
    return url


def literal(host: str) -> Address | None:
    """The address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether all the world has this address, and the one that it carries if it is a way to another."""
    if address in NAT64:  # which leads to whatever it carries
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if any(address in network for network in NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    return all(is_public(each) for each in inner if each is not None)


async def checked_places(host: str, port: int, *, private: bool) -> list[Place]:
    """What a host leads to now, but for what is not public. Raises: AddressRefused, OSError."""
    found = [Place(family, str(at[0]), port) for family, _, _, _, at in await look_up(host, port)]
    allowed = [each for each in found if private or ((address := literal(each.host)) is not None and is_public(address))]
    if not allowed:
        raise AddressRefused(f"{host} leads to no public address")
    return allowed


Found = list[tuple[int, int, int, str, tuple[object, ...]]]


async def look_up(host: str, port: int) -> Found:
    """The system's answer, in a thread of its own: one that hangs can be left behind, which the loop's threads cannot.

    Raises: OSError.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Found] = loop.create_future()

    def tell(found: Found | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: Found | OSError
        try:
            found = [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except OSError as error:
            found = error
        except UnicodeError as error:
            found = OSError(f"{host} is no name: {error}")
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=ask, name="webhook look-up", daemon=True).start()
    return await answer


SECRET_PREFIX = "wh_"  # so that scanners of leaked secrets can tell it
REMOVED = "the webhook was removed"


@dataclass(frozen=True, slots=True)
class WebhookState:
    """A webhook, and how what is sent to it fares. last_error: of the latest attempt that failed; empty if none did."""

    webhook: AlertWebhook
    organization: Organization
    pending_count: int
    last_error: str


LAST_ERROR = text("""
SELECT last_error FROM alert_deliveries WHERE organization_id = :organization_id AND last_error IS NOT NULL
ORDER BY attempted_at DESC NULLS LAST LIMIT 1
""")


async def set_webhook(session: AsyncSession, *, organization: str, url: str, private: bool, actor: str) -> tuple[WebhookState, str]:
    """Send an organization's alerts to a URL from now on; with the secret that signs them, which nobody is told again.

    What waits for the one before goes there, too. Raises: NotFound, InvalidValue.
    """
    checked_url(url, private=private)
    owner = await find_organization(session, organization)
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    standing = await _locked(session, owner.id)
    before = None if standing is None else snapshot(standing)
    values = {"url": url, "secret": secret, "created_at": func.now(), "failure_count": 0, "rests_until": None}
    set_it = insert(AlertWebhook).values(organization_id=owner.id, **values)
    set_it = set_it.on_conflict_do_update(index_elements=[AlertWebhook.organization_id], set_=values)
    await session.execute(set_it)
    webhook = await session.get_one(AlertWebhook, owner.id, populate_existing=True)
    await record_change(
        session, actor=actor, action="alert_webhook.set", subject_id=str(owner.id), before=before, after=snapshot(webhook)
    )
    return await _state(session, webhook, owner), secret


async def remove_webhook(session: AsyncSession, *, organization: str, actor: str) -> None:
    """Send them nowhere. What waits is given up. Raises: NotFound."""
    owner = await find_organization(session, organization)
    webhook = await _locked(session, owner.id)
    if webhook is None:
        raise NotFound("alert webhook", organization)
    before = snapshot(webhook)
    await session.delete(webhook)
    waiting = update(AlertDelivery).where(AlertDelivery.organization_id == owner.id, AlertDelivery.state == DeliveryState.PENDING)
    await session.execute(waiting.values(state=DeliveryState.FAILED, ended_at=func.now(), last_error=REMOVED))
    await record_change(session, actor=actor, action="alert_webhook.delete", subject_id=str(owner.id), before=before, after=None)


async def list_webhooks(session: AsyncSession, *, organization: str = "") -> list[WebhookState]:
    """All, or that of one organization, by its name. Raises: NotFound."""
    query = select(AlertWebhook, Organization).join(Organization).order_by(Organization.name)
    if organization:
        query = query.where(Organization.id == (await find_organization(session, organization)).id)
    return [await _state(session, webhook, owner) for webhook, owner in (await session.execute(query)).all()]


async def try_webhook(session: AsyncSession, *, organization: str) -> uuid.UUID:
    """Send a test there, as soon as a worker looks, whatever failed before; tells its id. Raises: NotFound."""
    owner = await find_organization(session, organization)
    webhook = await _locked(session, owner.id)
    if webhook is None:
        raise NotFound("alert webhook", organization)
    now: datetime = (await session.scalars(select(func.now()))).one()
    made = insert(Alert).values(organization_id=owner.id, fired_at=now).returning(Alert.id)
    alert_id = (await session.scalars(made)).one()
    await session.execute(insert(AlertDelivery).values(alert_id=alert_id, organization_id=owner.id, created_at=now))
    webhook.rests_until = None
    await session.flush()
    return alert_id


async def _locked(session: AsyncSession, organization_id: uuid.UUID) -> AlertWebhook | None:
    """The webhook, locked against whoever changes it or notes what became of an attempt."""
    return await session.get(AlertWebhook, organization_id, with_for_update=True, populate_existing=True)


async def _state(session: AsyncSession, webhook: AlertWebhook, owner: Organization) -> WebhookState:
    waiting = select(func.count()).where(AlertDelivery.organization_id == owner.id, AlertDelivery.state == DeliveryState.PENDING)
    pending_count: int = (await session.scalars(waiting)).one()
    last_error = await session.scalar(LAST_ERROR, {"organization_id": owner.id})
    return WebhookState(webhook, owner, pending_count, last_error or "")
